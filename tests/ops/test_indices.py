"""Index maps: every backend against the reference."""

import numpy as np
import pytest
from hypothesis import strategies as st

import cumla
from support.guarded import Guarded
from support.indexing import batch, table_for
from support.lab import Lab
from support.properties import for_all, fuzzed, seeds

pytestmark = pytest.mark.filterwarnings("error")

REFERENCE = Lab("reference", on_device=False)
batches = {
    "requests": st.integers(1, 5),
    "longest_query": st.integers(0, 6),
    "longest_prefix": st.sampled_from((0, 3, 40)),
    "block_size": st.sampled_from((1, 2, 53, 64, 256)),
    "gap": st.sampled_from((0, 0, 1, 4)),
    "seed": seeds,
}


def run_both(lab, function, inputs, numbers, shapes, gap, **keywords):
    """Call `function` on a backend and by the reference, into guarded outputs that start as garbage; compare.

    Args:
        inputs: arrays in order, or None
        numbers: the other arguments, by place
        shapes: of the outputs
    """
    results = []
    for place in (lab, REFERENCE):
        out = [Guarded(place, np.full(shape, -9, np.int32), (0, 4 * gap)) for shape in shapes]
        given = [x if x is None else Guarded(place, x, (0, 4 * gap)).array for x in inputs]
        function(*in_order(given, numbers), out=tuple(x.array for x in out), backend=place.backend, **keywords)
        for x in out:
            x.assert_margins()
        results.append([x.get().copy() for x in out])
    for got, want in zip(*results, strict=True):
        np.testing.assert_array_equal(got, want)
    return results[0]


def in_order(arrays, numbers):
    """Arguments in order: `numbers` maps places to numbers, the arrays take the others."""
    arrays, places = iter(arrays), range(len(arrays) + len(numbers))
    return [numbers[i] if i in numbers else next(arrays) for i in places]


def test_swa(lab):
    @for_all(lab, window=st.sampled_from((1, 4, 7, 64)), skip=st.integers(0, 3), **batches)
    def check(window, skip, requests, longest_query, longest_prefix, block_size, gap, seed):
        rng = np.random.default_rng(seed)
        starts, seq_lens, token_to_req = batch(rng, requests, longest_query, longest_prefix)
        token_to_req = np.append(token_to_req, fuzzed(rng, 3, requests))
        valid = rng.random(len(token_to_req)) < 0.8
        skip = min(skip, len(token_to_req))
        rows = len(token_to_req) - skip
        table = table_for(rng, requests, seq_lens, block_size, 9, spare_columns=int(rng.integers(-1, 2)))
        inputs = [starts, seq_lens, token_to_req, valid, table]
        indices, lens = run_both(
            lab, cumla.compute_swa_indices_and_lens, inputs, {5: block_size, 6: window, 7: rows},
            [(rows, window), (rows,)], gap, token_offset=skip,
        )  # fmt: skip
        assert (indices[np.arange(window) >= lens[:, None]] == -1).all()


@pytest.mark.parametrize("compact", [False, True], ids=["in-place", "compact"])
def test_global_topk(lab, compact):
    @for_all(lab, tokens=st.integers(0, 12), topk=st.sampled_from((0, 1, 4, 5, 63, 64, 130)), **batches)
    def check(tokens, topk, requests, longest_query, longest_prefix, block_size, gap, seed):
        rng = np.random.default_rng(seed)
        columns = int(rng.integers(0, 4))
        table = fuzzed(rng, (requests, columns), 9)
        local = fuzzed(rng, (tokens, topk), columns * block_size)
        token_to_req = fuzzed(rng, tokens + 2, requests)
        valid = rng.random(tokens + 1) < 0.8
        indices, lens = run_both(
            lab, cumla.compute_global_topk_indices_and_lens, [local, token_to_req, table, valid], {3: block_size},
            [(tokens, topk), (tokens,)], gap, compact=compact,
        )  # fmt: skip
        present = (indices >= 0).sum(axis=1)
        np.testing.assert_array_equal(lens, np.where(valid[:tokens], present, 0))
        if compact:
            np.testing.assert_array_equal(indices >= 0, np.arange(topk) < present[:, None])


@pytest.mark.parametrize("compact", [False, True], ids=["in-place", "compact"])
def test_global_topk_of_complete_rows(lab, compact):
    """With positions, a token sees only rows that are complete at its position."""

    @for_all(
        lab,
        tokens=st.integers(1, 12),
        ratio=st.sampled_from((1, 4, 128)),
        topk=st.sampled_from((1, 4, 63, 130)),
        **batches,
    )
    def check(tokens, ratio, topk, requests, longest_query, longest_prefix, block_size, gap, seed):
        rng = np.random.default_rng(seed)
        table = fuzzed(rng, (requests, 3), 9)
        positions = fuzzed(rng, tokens + 1, 3 * block_size * ratio)
        local = fuzzed(rng, (tokens, topk), 3 * block_size)
        valid = rng.random(tokens) < 0.8

        def by_name(*arrays, **keywords):
            local, requests, table, valid, positions = arrays
            cumla.compute_global_topk_indices_and_lens(
                local, requests, table, block_size, valid, positions=positions, compress_ratio=ratio, compact=compact,
                **keywords,
            )  # fmt: skip

        indices, _ = run_both(
            lab, by_name, [local, fuzzed(rng, tokens, requests), table, valid, positions], {},
            [(tokens, topk), (tokens,)], gap,
        )  # fmt: skip
        seen = (local >= 0) & (local < (positions[:tokens, None].astype(np.int64) + 1) // ratio)
        assert ((indices >= 0).sum(axis=1) <= seen.sum(axis=1)).all()


@pytest.mark.parametrize("compact", [False, True], ids=["in-place", "compact"])
def test_combine(lab, compact):
    @for_all(
        lab,
        window=st.sampled_from((1, 4, 7, 64)),
        ratio=st.sampled_from((1, 4, 128)),
        topk=st.sampled_from((0, 1, 4, 9, 64)),
        spare=st.integers(0, 3),
        first_token=st.sampled_from((0, 5)),
        **batches,
    )
    def check(window, ratio, topk, spare, first_token, requests, longest_query, longest_prefix, block_size, gap, seed):
        rng = np.random.default_rng(seed)
        starts, seq_lens, token_to_req = batch(rng, requests, longest_query, longest_prefix, first_token)
        gather_lens = np.maximum(seq_lens - rng.integers(0, 9, requests), 0).astype(np.int32)
        compressed = int(rng.integers(0, 12))
        # A workspace may be too small for a request's window rows, too.
        row_stride = max(compressed, compressed + int(gather_lens.max(initial=0)) + 1 - int(rng.integers(0, 4)))
        local = fuzzed(rng, (len(token_to_req) + spare, topk + 1), compressed)
        width = -(-(topk + window) // 128) * 128
        run_both(
            lab, cumla.combine_topk_swa_indices, [local, starts, seq_lens, gather_lens],
            {4: window, 5: ratio, 6: topk, 7: max(row_stride, 1), 8: compressed},
            [(len(local), width), (len(local),)], gap, compact=compact,
        )  # fmt: skip


def test_combined_rows_do_not_depend_on_the_places_of_entries(lab, rng):
    """The rows are the same with -1 at the start, in between or at the end, and in a wider array."""
    starts, seq_lens = np.array([0, 9, 12], np.int32), np.array([20, 3], np.int32)
    local = np.full((12, 6), -1, np.int32)
    for token, position in enumerate([*range(11, 20), *range(3)]):
        seen = min((position + 1) // 4, 6)
        local[token, :seen] = rng.permutation(seen)
    spread = np.full((12, 11), -1, np.int32)
    for row, entries in zip(spread, local, strict=True):
        row[np.sort(rng.permutation(11)[:6])] = entries

    def rows_of(topk_indices):
        indices, lens = cumla.combine_topk_swa_indices(
            *(lab.put(x) for x in (topk_indices, starts, seq_lens, seq_lens)), 7, 4, topk_indices.shape[1], 25, 5,
            compact=True, backend=lab.backend,
        )  # fmt: skip
        return [row[:n].tolist() for row, n in zip(lab.get(indices), lab.get(lens), strict=True)]

    assert rows_of(spread) == rows_of(local)
    plain, lens = cumla.combine_topk_swa_indices(
        *(lab.put(x) for x in (local, starts, seq_lens, seq_lens)), 7, 4, 6, 25, 5, backend=lab.backend
    )
    assert rows_of(local) == [row[:n].tolist() for row, n in zip(lab.get(plain), lab.get(lens), strict=True)]


def test_mixed(lab):
    @for_all(
        lab,
        window=st.sampled_from((1, 4, 7)),
        ratio=st.sampled_from((1, 4, 128)),
        topk=st.sampled_from((0, 3, 8)),
        decode_topk=st.sampled_from((None, 0, 5, 8)),
        decodes=st.integers(0, 4),
        given_lens=st.booleans(),
        local=st.booleans(),
        given_valid=st.booleans(),
        swa_only=st.booleans(),
        spans=st.booleans(),
        **batches,
    )
    def check(
        window, ratio, topk, decode_topk, decodes, given_lens, local, given_valid, swa_only, spans, requests,
        longest_query, longest_prefix, block_size, gap, seed,
    ):  # fmt: skip
        rng = np.random.default_rng(seed)
        starts, seq_lens, token_to_req = batch(rng, requests, longest_query, longest_prefix)
        tokens = len(token_to_req)
        decodes = min(decodes, tokens)
        swa_table = table_for(rng, requests, seq_lens, block_size, 9)
        compressed_table = None if swa_only else table_for(rng, requests, seq_lens, 2 * block_size, 9, 1)
        if swa_only:
            decode_topk = None
        if rng.random() < 0.3:
            token_to_req = fuzzed(rng, tokens, requests)
        inputs = [
            fuzzed(rng, (decodes, window), 9 * block_size),
            None if decode_topk is None else fuzzed(rng, (decodes, decode_topk), 9 * block_size),
            fuzzed(rng, decodes, 9) if given_lens and decode_topk is not None else None,
            fuzzed(rng, (tokens - decodes, topk + 2), 9),
            starts, seq_lens, token_to_req, swa_table, compressed_table,
            rng.random(decodes + 1) < 0.7 if given_valid else None,
        ]  # fmt: skip
        numbers = {8: block_size, 10: 2 * block_size, 11: window, 12: ratio, 13: topk, 14: local}
        width = window + -(-max(topk, decode_topk or 0) // 4) * 4
        keywords = {"swa_block_span": 3 * block_size, "compressed_block_span": 2 * block_size + 1} if spans else {}
        run_both(
            lab, cumla.build_flashinfer_mixed_sparse_indices, inputs, numbers,
            [(tokens, width), (tokens,)], gap, **keywords,
        )  # fmt: skip


def test_slots_beyond_int32_are_absent(lab):
    """2^31 is the first of them."""
    table = lab.put(np.array([[2**30 - 1, 2**30]], np.int32))
    indices, lens = cumla.compute_global_topk_indices_and_lens(
        lab.put(np.array([[0, 1, 2, 3]], np.int32)), lab.put(np.zeros(1, np.int32)), table, 2,
        lab.put(np.ones(1, np.bool_)), backend=lab.backend,
    )  # fmt: skip
    assert lab.get(indices).tolist() == [[2**31 - 2, 2**31 - 1, -1, -1]]
    assert lab.get(lens).tolist() == [2]


def test_outputs_are_allocated_where_none_are_given(lab):
    table = lab.put(np.array([[4, 2]], np.int32))
    indices, lens = cumla.compute_global_topk_indices_and_lens(
        lab.put(np.array([[3, -1, 8, 1]], np.int32)), lab.put(np.zeros(1, np.int32)), table, 4,
        lab.put(np.ones(1, np.bool_)), compact=True, backend=lab.backend,
    )  # fmt: skip
    assert lab.get(indices).tolist() == [[19, 17, -1, -1]]
    assert lab.get(lens).tolist() == [2]


def test_flashmlas_middle_axis(lab):
    """Decode indices in FlashMLA's form, [D, 1, K]."""
    put = lab.put
    arguments = (
        put(np.arange(4, dtype=np.int32).reshape(2, 1, 2)), put(np.arange(6, dtype=np.int32).reshape(2, 1, 3)), None,
        put(np.zeros((0, 3), np.int32)), put(np.array([0, 1, 2], np.int32)), put(np.array([5, 6], np.int32)),
        put(np.array([0, 1], np.int32)), put(np.zeros((2, 2), np.int32)), 4, put(np.zeros((2, 2), np.int32)), 2,
        2, 4, 3,
    )  # fmt: skip
    indices, lens = cumla.build_flashinfer_mixed_sparse_indices(*arguments, backend=lab.backend)
    assert lab.get(indices).tolist() == [[0, 1, 0, 1, 2, -1], [2, 3, 3, 4, 5, -1]]
    assert lab.get(lens).tolist() == [5, 5]

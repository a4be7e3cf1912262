"""Candidate blocks on every backend: selection, mask, scores of candidates only, and their top-k."""

import importlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from ops.test_indexer import check_logits, e4m3
from ops.test_indexer_topk import hard_rows

import cumla
from oracles.selection import scores as scores_of
from support.guarded import Guarded
from support.indexing import anything
from support.lab import BF16
from support.properties import for_all, seeds
from support.v41_stack import golden_arrays, hidden_states, oracle_of

HEAD_DIM = 128
LAYOUTS = [cumla.INDEXER_FP8, cumla.INDEXER_MXFP4, cumla.INDEXER_BF16, cumla.INDEXER_F32]


def selected(row, topk, block):
    """The rule, block by block: the newest block, then blocks with the best scores above -inf, the lowest first."""
    blocks = [row[i : i + block] for i in range(0, len(row), block)]
    best = [max([x for x in columns if x == x], default=-np.inf) for columns in blocks]
    order = sorted(range(len(blocks)), key=lambda i: (i != len(blocks) - 1, -min(best[i], np.finfo(np.float32).max), i))
    kept = [i for i in order if i == len(blocks) - 1 or best[i] > -np.inf][:topk]
    return sorted(kept) + [-1] * (topk - len(kept))


@pytest.mark.parametrize(("width", "topk", "block"), [(1, 1, 8), (66, 3, 8), (300, 40, 8), (300, 6, 5), (5000, 64, 8)])
@pytest.mark.thorough(when=lambda x: x.simulated and x.get("width") != 66)
def test_blocks_are_selected_by_the_rule(lab, rng, width, topk, block):
    rows = 3 if lab.tiny else 7
    x = hard_rows(rng, rows, width + 3)[:, :width]  # rows of any alignment
    x[-1, -5:] = -np.inf  # the newest block has the lowest scores
    options = {"candidate_block_size": block, "backend": lab.backend}
    found = lab.get(cumla.select_candidate_blocks(lab.put(x), topk, **options))
    np.testing.assert_array_equal(found, [selected(row, topk, block) for row in x])
    starts = rng.integers(-2, width + 2, rows).astype(np.int32)
    ends = (starts + rng.integers(-2, width + 5, rows)).astype(np.int32)
    ranges = zip(np.clip(starts, 0, width), np.clip(ends, 0, width), strict=True)
    expected = [
        selected(row[start : max(start, end)], topk, block) for row, (start, end) in zip(x, ranges, strict=True)
    ]
    workspace = lab.put(np.zeros(-(-width // block) * 4 * 2 + 32, np.uint8))  # one or two rows at a time
    found = cumla.select_candidate_blocks(
        lab.put(x), topk, lab.put(starts), lab.put(ends), workspace=workspace, **options
    )
    np.testing.assert_array_equal(lab.get(found), expected)
    length = int(rng.integers(-1, width + 2))
    found = cumla.select_candidate_blocks(
        lab.put(x), topk, seq_lens=lab.put(np.array([length], np.int32)), next_n=rows, **options
    )
    lens = np.clip(length - rows + 1 + np.arange(rows), 0, width)
    np.testing.assert_array_equal(
        lab.get(found), [selected(row[:n], topk, block) for row, n in zip(x, lens, strict=True)]
    )


def test_the_newest_block_is_selected_beside_infinite_scores(lab):
    x = np.full((1, 40), np.inf, np.float32)
    x[:, 32:] = -np.inf
    found = cumla.select_candidate_blocks(lab.put(x), 2, backend=lab.backend)
    np.testing.assert_array_equal(lab.get(found), [[0, 4]])
    x[:] = np.nan
    found = cumla.select_candidate_blocks(lab.put(x), 2, backend=lab.backend)
    np.testing.assert_array_equal(lab.get(found), [[4, -1]])


@pytest.mark.parametrize("block", [8, 5])
def test_blocks_without_a_score_above_minus_infinity_are_not_selected(lab, block):
    """For any number of requested blocks; the newest block is always selected."""
    x = np.full((2, 5 * block), -np.inf, np.float32)
    x[0, 2 * block + 1], x[1, :block] = -1e30, np.nan
    found = cumla.select_candidate_blocks(lab.put(x), 4, candidate_block_size=block, backend=lab.backend)
    np.testing.assert_array_equal(lab.get(found), [[2, 4, -1, -1], [4, -1, -1, -1]])


@pytest.mark.parametrize("block", [8, 5])
@pytest.mark.parametrize("gap", [0, 3])
def test_subnormal_scores_are_compared_by_value(lab, rng, block, gap):
    """Also on CUDA, where other code uses -ftz=true: rows at multiples of 16 bytes, and others."""
    width = 40 if lab.tiny else 240
    x = (rng.normal(size=(3, width + gap)) * 1e-40).astype(np.float32)[:, :width]
    x[1] = np.abs(x[1])
    x[2, : width // 2] = np.nan
    found = cumla.select_candidate_blocks(lab.put(x), 3, candidate_block_size=block, backend=lab.backend)
    np.testing.assert_array_equal(lab.get(found), [selected(row, 3, block) for row in x])


def test_nothing_to_select(lab):
    for shape, topk in (((0, 40), 3), ((2, 0), 3), ((2, 40), 0)):
        logits = lab.put(np.zeros(shape, np.float32))
        found = lab.get(cumla.select_candidate_blocks(logits, topk, backend=lab.backend))
        np.testing.assert_array_equal(found, np.full((shape[0], topk), -1))
        cumla.apply_candidate_mask(logits, lab.put(np.zeros((shape[0], topk), np.int32)), backend=lab.backend)
    q, weights = np.zeros((0, 1, 2, HEAD_DIM), np.uint8), np.zeros((0, 2), np.float32)
    none = np.zeros(0, np.int32)
    cache, table = np.zeros((3, 4, 132), np.uint8), np.zeros((0, 2), np.int32)
    arguments = [lab.put(x) for x in (q, cache, weights, np.zeros((0, 3), np.int32))]
    rest = lab.put(none), lab.put(table)
    assert cumla.candidate_logits(*arguments, *rest, backend=lab.backend).shape == (0, 24)
    assert cumla.candidate_topk(*arguments, 5, *rest, backend=lab.backend).shape == (0, 5)
    q, weights, blocks = (
        np.zeros((1, 2, 2, HEAD_DIM), np.uint8),
        np.zeros((2, 2), np.float32),
        np.zeros((2, 0), np.int32),
    )
    lens, table = np.full(1, 9, np.int32), np.zeros((1, 3), np.int32)
    found = cumla.candidate_topk(
        *map(lab.put, (q, cache, weights, blocks)), 5, *map(lab.put, (lens, table)), backend=lab.backend
    )
    np.testing.assert_array_equal(lab.get(found), np.full((2, 5), -1))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_candidate_blocks_reach_as_far_as_int32(backend):
    q, cache, weights = np.zeros((1, 1, 2, HEAD_DIM), np.uint8), np.zeros((1, 8, 132), np.uint8), np.zeros((1, 2))
    lens, table = np.ones(1, np.int32), np.zeros((1, 1), np.int32)

    def rows(count, block):  # of which none are selected: no memory for scores
        given = q, cache, weights.astype(np.float32), np.zeros((1, count), np.int32), 0, lens, table
        return cumla.candidate_topk(*given, candidate_block_size=block, backend=backend)

    assert rows(1, 2**31 - 1).shape == rows(2, 2**30 - 1).shape == (1, 0)
    with pytest.raises(ValueError, match="candidate_blocks: got 2 blocks of 1073741824 positions, expected at most"):
        rows(2, 2**30)


@pytest.mark.parametrize(("width", "block"), [(75, 8), (41, 5), (70_000, 8)])
@pytest.mark.thorough(when=lambda x: x.get("width") == 70_000 and (x.simulated or x.emulated or x.get("with_nan")))
@pytest.mark.parametrize("with_nan", [False, True])
def test_mask(lab, rng, width, block, with_nan):
    rows = 3
    x = rng.normal(size=(rows, width + 1)).astype(np.float32)[:, :width]
    blocks = rng.integers(-2, width // block + 3, (rows, 4)).astype(np.int32)
    starts, ends = np.array([0, 7, 5], np.int32), np.array([width, width - 2, 3], np.int32)
    expected = x.copy()
    for row, candidates, start, end in zip(expected, blocks, starts, ends, strict=True):
        for column in range(start, max(start, end)):
            if (column - start) // block not in candidates:
                row[column] = np.nan if with_nan else -np.inf
    logits = Guarded(lab, x, (4,))
    cumla.apply_candidate_mask(
        logits.array, lab.put(blocks), lab.put(starts), lab.put(ends), candidate_block_size=block, with_nan=with_nan,
        backend=lab.backend,
    )  # fmt: skip
    logits.assert_margins()
    np.testing.assert_array_equal(logits.get(), expected)


def cache_of(rng, layout, blocks, block_size, gap):
    """A cache of random keys, and their values in float64."""
    cache = layout.allocate(blocks, block_size, page_stride=layout.page_bytes(block_size) + gap)
    keys = rng.normal(size=(blocks * block_size, HEAD_DIM)).astype(np.float32)
    if layout is cumla.INDEXER_MXFP4:
        cumla.quantize_and_insert_k_cache(
            keys.astype(BF16), cache, np.arange(len(keys)), block_size, layout=layout, backend="reference"
        )
        codes, scales, _ = layout.parts(cache)
        values = np.stack([codes & 15, codes >> 4], axis=-1).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        exponents = scales.reshape(-1, 4).astype(np.float64) - 127
        return cache, values.reshape(-1, HEAD_DIM) * np.repeat(np.exp2(exponents), 32, axis=1)
    cumla.indexer_k_quant_and_cache(keys, cache, np.arange(len(keys)), backend="reference")
    if layout is not cumla.INDEXER_FP8:
        return cache, keys.astype(BF16).astype(np.float64) if layout is cumla.INDEXER_BF16 else keys.astype(np.float64)
    values, scales, _ = layout.parts(cache)
    scales = np.ascontiguousarray(scales).view(np.float32).astype(np.float64)
    return cache, (values.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * scales).reshape(-1, HEAD_DIM)


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize(
    ("layout", "queries"),
    [
        (cumla.INDEXER_FP8, "e4m3"), (cumla.INDEXER_MXFP4, "e4m3"), (cumla.INDEXER_MXFP4, "bfloat16"),
        (cumla.INDEXER_BF16, "bfloat16"), (cumla.INDEXER_F32, "float32"),
    ],
    ids=lambda x: getattr(x, "name", x),
)  # fmt: skip
@pytest.mark.parametrize("heads", [35, 32])
@pytest.mark.thorough(when=lambda x: x.simulated and (x.get("axes") == 2 or x.get("heads") == 32))
def test_scores_and_choice(lab, rng, layout, queries, axes, heads, monkeypatch):
    """Scores against float64, with absent pages and candidates of all kinds, and the selection by these scores."""
    sizes = (1, 3, 4, 3, 2) if lab.tiny else {35: (35, 4, 5, 8, 9), 32: (32, 17, 8, 8, 20)}[heads]
    heads, columns, block_size, block, candidates_of_row = sizes
    requests, next_n, topk = 2, 2, 5
    odd = lab.backend == "cuda" and layout is not cumla.INDEXER_F32 and heads == 35
    gap = 5 if odd else 16  # pages at odd addresses, or at multiples of 16
    if lab.backend == "cuda":
        cuda = importlib.import_module("cumla.kernels.cuda.index_scores")
        monkeypatch.setattr(cuda, "query_parts", lambda *_: 1 if axes == 1 else 3)  # several tiles a warp
        if axes == 2:  # the portable kernel, also where Hopper has another
            monkeypatch.setattr("cumla.kernels.cuda.indexer.CANDIDATE_ROWS", None)
    cache, keys = cache_of(rng, layout, requests * columns + 3, block_size, gap)
    table = rng.permutation(requests * columns + 3)[: requests * columns].reshape(requests, columns).astype(np.int32)
    table[0, 1], table[1, -1] = -1, 999
    q = rng.normal(size=(requests, next_n, heads, HEAD_DIM)).astype(np.float32)
    q = e4m3(q) if queries == "e4m3" else q.astype(BF16 if queries == "bfloat16" else np.float32)
    weights = rng.normal(size=(requests * next_n, heads)).astype(np.float32)
    blocks = np.sort([rng.permutation(candidates_of_row + 2)[:candidates_of_row] for _ in range(4)]).astype(np.int32)
    blocks[1, -1] = -1
    lens = np.array([columns * block_size - 1, 7] if axes == 1 else [[9, 0], [5, 40]], np.int32)

    expected = np.full((4, candidates_of_row * block), -np.inf)
    seen = np.zeros(expected.shape, np.bool_)
    values = (q.view(ml_dtypes.float8_e4m3fn) if q.dtype == np.uint8 else q).astype(np.float64)
    for row, column in np.ndindex(expected.shape):
        request, j = divmod(row, next_n)
        length = lens[request, j] if axes == 2 else lens[request] - next_n + 1 + j
        candidate = blocks[row, column // block]
        position = candidate * block + column % block
        seen[row, column] = candidate >= 0 and position < length
        if seen[row, column] and position < columns * block_size:
            page = table[request, position // block_size]
            if 0 <= page < len(cache):
                key = keys[page * block_size + position % block_size]
                expected[row, column] = weights[row].astype(np.float64) @ np.maximum(values[request, j] @ key, 0)
    arguments = [lab.put(x) for x in (q, cache, weights, blocks)]
    rest = lab.put(lens), lab.put(table)
    options = {"layout": layout, "candidate_block_size": block, "backend": lab.backend}
    found = lab.get(cumla.candidate_logits(*arguments, *rest, **options))
    check_logits(found, expected.astype(np.float32))

    positions = np.repeat(blocks, block, axis=1) * block + np.arange(found.shape[1]) % block
    row_bytes = -(-found.shape[1] * 4 // 16) * 16
    for bound in ({}, {"max_workspace_bytes": row_bytes * next_n}):
        chosen = lab.get(cumla.candidate_topk(*arguments, topk, *rest, **bound, **options))
        for row, columns_of_row in enumerate(chosen):
            order = np.argsort(-found[row][seen[row]], kind="stable")[:topk]
            want = sorted(positions[row][seen[row]][order])
            np.testing.assert_array_equal(columns_of_row, want + [-1] * (topk - len(want)))


@pytest.mark.parametrize(
    ("layout", "queries"),
    [
        (cumla.INDEXER_FP8, "e4m3"), (cumla.INDEXER_MXFP4, "e4m3"), (cumla.INDEXER_BF16, "bfloat16"),
        (cumla.INDEXER_F32, "float32"),
    ],
    ids=lambda x: getattr(x, "name", x),
)  # fmt: skip
@pytest.mark.parametrize("heads", [5, 32])
@pytest.mark.thorough(when=lambda x: x.simulated and x.get("heads") == 32)
def test_contexts_beyond_the_block_table_are_clamped(lab, rng, layout, queries, heads):
    """A query sees no position without a column: it is no candidate, even if there are too few others."""
    # Hopper's kernel supports pages of whole candidate blocks.
    heads, columns, block_size, block = (1, 2, 3, 4) if lab.tiny else (heads, 3, 16 if heads == 32 else 12, 8)
    covered = columns * block_size
    cache, _ = cache_of(rng, layout, columns, block_size, 16)
    q = rng.normal(size=(2, 1, heads, HEAD_DIM)).astype(np.float32)
    q = e4m3(q) if queries == "e4m3" else q.astype(BF16 if queries == "bfloat16" else np.float32)
    weights = rng.normal(size=(2, heads)).astype(np.float32)
    blocks = np.array([[0, covered // block, covered // block + 1]] * 2, np.int32)  # the second one in part, or not
    lens, table = np.array([covered + 100, 2**31 - 1], np.int32), rng.permutation(columns).astype(np.int32)[None]
    given = [lab.put(x) for x in (q, cache, weights, blocks)]
    rest = [lab.put(x) for x in (lens, np.repeat(table, 2, axis=0))]
    options = {"layout": layout, "candidate_block_size": block, "backend": lab.backend}
    inside = [*range(block), *range(covered // block * block, covered)]
    logits = lab.get(cumla.candidate_logits(*given, *rest, **options))
    assert np.isfinite(logits[:, : len(inside)]).all()
    assert (logits[:, len(inside) :] == -np.inf).all()
    chosen = lab.get(cumla.candidate_topk(*given, 3 * block, *rest, **options))
    np.testing.assert_array_equal(chosen, [inside + [-1] * (3 * block - len(inside))] * 2)
    q, cache, weights, _ = given
    of_all = {"context_lens": rest[0], "block_table": rest[1], "layout": layout, "backend": lab.backend}
    for bound in ({}, {"max_context_len": covered + 50}):
        found = lab.get(cumla.indexer_topk(q, cache, weights, covered + 2, **of_all, **bound))
        np.testing.assert_array_equal(found, [[*range(covered), -1, -1]] * 2)


@pytest.mark.parametrize("layout", [cumla.INDEXER_FP8, cumla.INDEXER_MXFP4], ids=lambda x: x.name)
@pytest.mark.parametrize("heads", [2, 32])
@pytest.mark.thorough(when=lambda x: x.simulated and x.get("heads") == 32)
def test_scores_of_special_values(lab, rng, layout, heads):
    """NaN, zeros of both signs, subnormals and extreme scales in keys, queries and weights, against the reference."""
    rows = 4 if lab.tiny else 32
    cache = layout.allocate(1, rows)
    values, scales, _ = layout.parts(cache)
    values[:] = rng.choice(np.array([0, 0x80, 0x01, 0x81, 0x38, 0xB8, 0x77], np.uint8), values.shape)
    if layout is cumla.INDEXER_FP8:
        values[0, rows - 1, 5] = 0x7F
        of_rows = rng.choice(np.array([0.0, -0.0, 2.0**-126, 1.0, -3.5, 2.0**90], np.float32), (1, rows, 1))
        of_rows[0, 1], of_rows[0, 2] = np.nan, np.inf
        scales[:] = of_rows.view(np.uint8)
    else:
        scales[:] = rng.choice(np.array([0, 1, 90, 127, 133], np.uint8), scales.shape)
        scales[0, rows - 1, 2] = 255
    q = rng.choice(np.array([0, 0x80, 0x01, 0x38, 0xBC], np.uint8), (2, 1, heads, HEAD_DIM))
    q[1, 0, -1, 7] = 0xFF
    weights = rng.choice(np.array([0.0, -0.0, 1.0, -2.0], np.float32), (2, heads))
    blocks = np.tile(np.arange(-(-rows // 8), dtype=np.int32), (2, 1))
    given = q, cache, weights, blocks, np.array([rows, rows - 1], np.int32), np.zeros((2, 1), np.int32)
    want = cumla.candidate_logits(*given, layout=layout, backend="reference")
    found = lab.get(cumla.candidate_logits(*map(lab.put, given), layout=layout, backend=lab.backend))
    assert np.isnan(want).any()
    assert np.isnan(want[1, : rows - 1]).all()
    check_logits(found, want)


def test_scores_of_nan_keys_are_never_selected(lab, rng):
    cache, _ = cache_of(rng, cumla.INDEXER_MXFP4, 2, 4, 0)
    cache[0].reshape(-1)[4 * 64 + 4] = 255  # a scale of row 1
    q = np.full((1, 1, 1, HEAD_DIM), 0x38, np.uint8)
    arguments = [lab.put(x) for x in (q, cache, np.ones((1, 1), np.float32), np.array([[0]], np.int32))]
    rest = lab.put(np.array([8], np.int32)), lab.put(np.array([[0, 1]], np.int32))
    logits = lab.get(cumla.candidate_logits(*arguments, *rest, backend=lab.backend))
    np.testing.assert_array_equal(np.isnan(logits[0]), np.arange(8) == 1)
    chosen = lab.get(cumla.candidate_topk(*arguments, 8, *rest, backend=lab.backend))
    np.testing.assert_array_equal(chosen, [[0, 2, 3, 4, 5, 6, 7, -1]])


@pytest.mark.nowhere(when=lambda x: x.simulated)  # 8 heads of 128 values for hundreds of rows
@pytest.mark.parametrize(("case", "source", "consumer"), [(0, 3, 4), (1, 0, 3)])
def test_choices_of_published_code(lab, case, source, consumer):
    """Selections of the candidate source and of a layer that selects in its blocks (tests/data/v41.npz)."""
    layer, later = (oracle_of(case, number) for number in (source, consumer))
    x = [hidden_states(case, 0)[number].astype(np.float64) for number in (source, consumer)]
    config, keys = layer.config, layer.index_keys(layer.latents(x[0]))
    gaps = [golden_arrays()[f"{case}/0/gap{number}"] for number in (source, consumer)]
    rows = golden_arrays()[f"{case}/0/pick_rows"]
    kept = np.flatnonzero((np.minimum(*gaps) > 1e-5) & (rows >= 150))[::25]
    tokens = rows[kept].astype(np.int64)
    block_size = 16
    cache = cumla.INDEXER_F32.allocate(-(-len(keys) // block_size), block_size)
    cumla.indexer_k_quant_and_cache(keys.astype(np.float32), cache, np.arange(len(keys)), backend="reference")
    table = np.tile(np.arange(len(cache), dtype=np.int32), (len(tokens), 1))
    lens = (tokens + 1).astype(np.int32)
    scores = scores_of(*layer.index_queries(x[0][tokens], tokens), keys).astype(np.float32)
    options = {"backend": lab.backend}
    blocks = cumla.select_candidate_blocks(
        lab.put(scores), config.candidate_topk_blocks, seq_lens=lab.put(lens), **options
    )
    topk = config.index_topk
    own = lab.get(cumla.top_k_per_row(lab.put(scores), topk, seq_lens=lab.put(lens), **options))
    np.testing.assert_array_equal(own, golden_arrays()[f"{case}/0/picks{source}"][kept])
    q, weights = later.index_queries(x[1][tokens], tokens)
    arguments = q[:, None].astype(np.float32), cache, weights.astype(np.float32)
    arguments = [lab.put(x) for x in arguments]
    picks = golden_arrays()[f"{case}/0/picks{consumer}"][kept]
    chosen = cumla.candidate_topk(*arguments, blocks, topk, lab.put(lens), lab.put(table), **options)
    np.testing.assert_array_equal(lab.get(chosen), picks)
    masked = lab.put(scores_of(q, weights, keys).astype(np.float32))
    cumla.apply_candidate_mask(masked, blocks, seq_lens=lab.put(lens), with_nan=True, **options)
    chosen = cumla.top_k_per_row(masked, topk, seq_lens=lab.put(lens), **options)
    np.testing.assert_array_equal(lab.get(chosen), picks)


def test_no_value_leaves_the_arrays(lab):
    @for_all(
        lab, examples=6, tiny_examples=2, next_n=st.integers(1, 3), block=st.integers(1, 9), columns=st.integers(0, 3),
        axes=st.integers(1, 2), layout=st.sampled_from((cumla.INDEXER_FP8, cumla.INDEXER_MXFP4)), seed=seeds,
    )  # fmt: skip
    def check(next_n, block, columns, axes, layout, seed):
        rng = np.random.default_rng(seed)
        block_size, heads = (2, 1) if lab.tiny else (5, 3)
        tokens, width = 2 * next_n, columns * block_size
        q = lab.put(rng.integers(0, 256, (2, next_n, heads, HEAD_DIM), np.uint8))
        cache = Guarded(lab, rng.integers(0, 256, (3, block_size, layout.token_bytes), np.uint8))
        lens, table = lab.put(anything(rng, (2, next_n)[:axes])), lab.put(anything(rng, (2, columns)))
        blocks = lab.put(anything(rng, (tokens, 4)))
        arguments = q, cache.array, lab.put(rng.standard_normal((tokens, heads), np.float32)), blocks
        options = {"candidate_block_size": block, "backend": lab.backend}
        logits = Guarded(lab, np.zeros((tokens, 4 * block), np.float32), (0, 4))
        chosen = Guarded(lab, np.full((tokens, 6), -9, np.int32), (0, 4))
        cumla.candidate_logits(*arguments, lens, table, out=logits.array, **options)
        cumla.candidate_topk(*arguments, 6, lens, table, out=chosen.array, **options)
        logits.assert_margins()
        chosen.assert_margins()
        assert (chosen.get() >= -1).all()
        full = Guarded(lab, rng.integers(0, 2**32, (tokens, width), np.uint32).view(np.float32), (4,), 4)
        ranges = lab.put(anything(rng, tokens)), lab.put(anything(rng, tokens))
        found = Guarded(lab, np.full((tokens, 3), -9, np.int32), (0, 4))
        cumla.select_candidate_blocks(full.array, 3, *ranges, out=found.array, **options)
        found.assert_margins()
        assert ((found.get() >= -1) & (found.get() <= width // block)).all()
        cumla.apply_candidate_mask(full.array, blocks, *ranges, **options)
        full.assert_margins()


@pytest.mark.parametrize("next_n", [1, 2, 4, 6])
@pytest.mark.parametrize(
    ("heads", "layout"),
    [(5, cumla.INDEXER_FP8), (32, cumla.INDEXER_FP8), (32, cumla.INDEXER_MXFP4), (64, cumla.INDEXER_FP8)],
)
@pytest.mark.thorough(when=lambda x: x.emulated and x.get("heads") == 32 and x.get("layout") is cumla.INDEXER_FP8)
@pytest.mark.thorough(when=lambda x: x.get("next_n") >= 2 and (x.simulated or (x.get("heads") == 64 and x.emulated)))
@pytest.mark.nowhere(when=lambda x: x.simulated and x.get("next_n") in (2, 4))  # as 6
def test_top_k_writes_the_blocks_of_its_scores(lab, rng, next_n, heads, layout):
    """Bit-identical to select_candidate_blocks of the same logits, for any number of queries in a pass."""
    heads, columns, block_size, requests = (1, 2, 8, 2) if lab.tiny else (heads, 6, 16, 3)
    width, blocks, topk = columns * block_size, 2 if lab.tiny else 4, 3
    cache, _ = cache_of(rng, layout, requests * columns, block_size, 16)
    if layout is cumla.INDEXER_FP8:
        special = np.array([np.nan] * 7 + [np.inf], np.float32)
        layout.parts(cache)[1][-1, :8] = special.view(np.uint8).reshape(8, 4)
    table = rng.permutation(requests * columns).reshape(requests, columns).astype(np.int32)
    q = e4m3(rng.normal(size=(requests, next_n, heads, HEAD_DIM)).astype(np.float32))
    weights = rng.normal(size=(requests * next_n, heads)).astype(np.float32)
    lens = np.array([width, 9, 0][:requests], np.int32)
    given = [lab.put(x) for x in (q, cache, weights, lens, table)]
    q, cache, weights, lens, table = given
    logits = cumla.fp8_paged_mqa_logits(q, cache, weights, lens, table, backend=lab.backend)
    rows = {"seq_lens": lens, "next_n": next_n, "backend": lab.backend}
    want = lab.get(cumla.select_candidate_blocks(logits, blocks, **rows))
    want_rows = lab.get(cumla.top_k_per_row(logits, topk, **rows))
    row_bytes = width * 4  # bytes without the scores of blocks
    for bound in ({}, {"max_workspace_bytes": row_bytes * next_n}):
        written = lab.put(np.full((requests * next_n, blocks), 7, np.int32))
        found = cumla.indexer_topk(
            q, cache, weights, topk, context_lens=lens, block_table=table, candidate_blocks=written,
            backend=lab.backend, **bound,
        )  # fmt: skip
        np.testing.assert_array_equal(lab.get(found), want_rows)
        np.testing.assert_array_equal(lab.get(written), want)
    with pytest.raises(ValueError, match=r"max_workspace_bytes: got \d+ bytes, expected at least"):
        cumla.indexer_topk(
            q, cache, weights, topk, context_lens=lens, block_table=table, candidate_blocks=written,
            backend=lab.backend, max_workspace_bytes=row_bytes * next_n - 1,
        )  # fmt: skip


def test_blocks_of_subnormal_scores(lab, rng):
    """Weights of a few 2^-126: a kernel's blocks agree with its logits, however it rounds such scores."""
    heads, columns, block_size = (1, 3, 8) if lab.tiny else (32, 6, 16)
    cache, _ = cache_of(rng, cumla.INDEXER_FP8, columns, block_size, 16)
    cumla.INDEXER_FP8.parts(cache)[1][:] = np.array([2.0**-6], np.float32).view(np.uint8)
    q = e4m3(rng.normal(size=(1, 1, heads, HEAD_DIM)).astype(np.float32) / 64)
    weights = (rng.normal(size=(1, heads)) * 2.0**-124).astype(np.float32)
    lens, table = np.array([columns * block_size - 3], np.int32), np.arange(columns, dtype=np.int32)[None]
    q, cache, weights, lens, table = (lab.put(x) for x in (q, cache, weights, lens, table))
    logits = cumla.fp8_paged_mqa_logits(q, cache, weights, lens, table, backend=lab.backend)
    written = lab.put(np.full((1, 2), 7, np.int32))
    cumla.indexer_topk(
        q, cache, weights, 3, context_lens=lens, block_table=table, candidate_blocks=written, backend=lab.backend
    )
    want = cumla.select_candidate_blocks(logits, 2, seq_lens=lens, backend=lab.backend)
    np.testing.assert_array_equal(lab.get(written), lab.get(want))


def test_top_k_of_packed_keys_writes_blocks(lab, rng):
    """Blocks count from a query's first key."""
    tokens, rows, heads, blocks = (2, 20, 1, 2) if lab.tiny else (6, 70, 4, 3)
    q = rng.normal(size=(tokens, heads, HEAD_DIM)).astype(np.float32)
    k, weights = rng.normal(size=(rows, HEAD_DIM)).astype(np.float32), rng.normal(size=(tokens, heads)).astype("f4")
    starts = rng.integers(0, rows // 2, tokens).astype(np.int32)
    ends = (starts + rng.integers(0, rows // 2, tokens)).astype(np.int32)
    dtype = np.float32 if not lab.on_device else BF16
    q, k, weights, starts, ends = (lab.put(x) for x in (q.astype(dtype), k.astype(dtype), weights, starts, ends))
    logits = cumla.fp8_mqa_logits(q, k, weights, starts, ends, backend=lab.backend)
    want = cumla.select_candidate_blocks(logits, blocks, starts, ends, backend=lab.backend)
    written = lab.put(np.full((tokens, blocks), 7, np.int32))
    options = {"cu_seqlen_ks": starts, "cu_seqlen_ke": ends, "candidate_blocks": written, "backend": lab.backend}
    cumla.indexer_topk(q, k, weights, 5, **options)
    np.testing.assert_array_equal(lab.get(written), lab.get(want))
    written[...] = 7
    assert lab.get(cumla.indexer_topk(q, k, weights, 0, **options)).shape == (tokens, 0)  # only blocks
    np.testing.assert_array_equal(lab.get(written), lab.get(want))
    with pytest.raises(ValueError, match="max_seqlen_k: got 3 together with candidate_blocks"):
        cumla.indexer_topk(q, k, weights, 5, max_seqlen_k=3, **options)

"""The window builder against what each token attends to, written out."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cumla.metadata import DeepseekSparseSWAMetadataBuilder, ServingConfig
from metadata.batches import BLOCK, THOROUGH, addresses_of, assert_equal, buffers_of, make_batch, shapes, tokens_of
from support.lab import Lab

WINDOW, PAGE = 12, 256  # positions of a compressed page
CONFIG = ServingConfig(
    window_size=WINDOW, compress_ratios=(1, 128), block_size=BLOCK, compressed_block_size=PAGE,
    num_speculative_tokens=2, max_num_batched_tokens=160, max_num_seqs=16, max_model_len=1 << 20, prefill_chunk_size=1,
)  # fmt: skip


def c128a_table(seq_lens):
    columns = max(max(seq_lens, default=0) // PAGE + 1, 1)
    return np.random.default_rng(0).permutation(columns * len(seq_lens)).reshape(-1, columns).astype(np.int32)


def slot(table, request, row, block_size):
    return table[request, row // block_size] * block_size + row % block_size


def padded_to(width, rows):
    return [[*row, *[-1] * (width - len(row))] for row in rows]


def check(lab, metadata, batch, compressed_table, seq_lens, query_lens):
    tokens, table = tokens_of(seq_lens, query_lens), lab.get(batch.block_table_tensor)
    slots = lab.get(batch.slot_mapping)
    rows, threshold = len(slots), CONFIG.decode_threshold
    is_prefill = [q > threshold for q in query_lens]
    decodes = is_prefill.index(True) if True in is_prefill else len(query_lens)
    decode_tokens = sum(query_lens[:decodes]) if decodes < len(query_lens) else batch.num_actual_tokens
    counts = (metadata.num_decodes, metadata.num_prefills, metadata.num_decode_tokens, metadata.num_prefill_tokens)
    assert counts == (decodes, len(seq_lens) - decodes, decode_tokens, batch.num_actual_tokens - decode_tokens)

    padded = tokens + [(0, -1)] * (rows - len(tokens))
    assert_equal(lab, metadata.token_to_req_indices, [r for r, _ in padded])
    assert_equal(lab, metadata.is_valid_token, slots >= 0)
    windows, all_rows = [], []
    for (r, p), its_slot in zip(padded, slots, strict=True):
        valid = p >= 0 and its_slot >= 0
        windows.append([slot(table, r, i, BLOCK) for i in range(max(p - WINDOW + 1, 0), p + 1)] if valid else [])
        all_rows.append(range((p + 1) // 128) if valid else [])
    indices = padded_to(WINDOW, windows)
    lens = [len(window) for window in windows]
    at, end = decode_tokens, batch.num_actual_tokens
    assert metadata.decode_swa_indices.shape == (decode_tokens, 1, WINDOW)
    assert_equal(lab, metadata.decode_swa_indices, indices[:at])
    assert_equal(lab, metadata.decode_swa_lens, lens[:at])
    assert_equal(lab, metadata.prefill_swa_indices, indices[at:end])
    assert_equal(lab, metadata.prefill_swa_lens, lens[at:end])

    width = metadata.c128a_prefill_topk_indices.shape[1]
    of_decodes = [
        [slot(compressed_table, r, row, PAGE // 128) for row in its_rows]
        for (r, _), its_rows in zip(padded, all_rows, strict=True)
    ]
    assert_equal(lab, metadata.c128a_decode_topk_lens, [len(its_rows) for its_rows in all_rows[:at]])
    assert_equal(lab, metadata.c128a_global_decode_topk_indices, padded_to(width, of_decodes[:at]))
    assert_equal(lab, metadata.c128a_prefill_topk_indices, padded_to(width, all_rows[at:end]))

    if decodes == len(seq_lens):
        assert metadata.prefill_seq_lens is None
        assert metadata.prefill_gather_lens is None
    else:
        assert_equal(lab, metadata.prefill_seq_lens, seq_lens[decodes:])
        reached = [q + min(s - q, WINDOW - 1) for s, q in zip(seq_lens, query_lens, strict=True)]
        assert_equal(lab, metadata.prefill_gather_lens, reached[decodes:])
        np.testing.assert_array_equal(metadata.prefill_seq_lens_cpu, seq_lens[decodes:])
        np.testing.assert_array_equal(metadata.prefill_query_lens_cpu, query_lens[decodes:])


def build(lab, builder, seq_lens, query_lens, **options):
    batch, table = make_batch(lab, seq_lens, query_lens, **options), c128a_table(seq_lens)
    return builder.build(0, batch, c128a_block_table=lab.put(table)), batch, table


@THOROUGH
@given(
    history=st.lists(
        st.tuples(shapes(CONFIG.decode_threshold, longest_context=400), st.integers(0, 5)), min_size=1, max_size=3
    ),
    data=st.data(),
)
def test_every_batch(lab, history, data):
    builder = DeepseekSparseSWAMetadataBuilder(CONFIG, backend=lab.backend)
    addresses = None
    for (seq_lens, query_lens), padding in history:
        skipped = data.draw(st.sets(st.integers(0, sum(query_lens) - 1), max_size=3)) if sum(query_lens) else ()
        options = {"padding": padding, "skipped": skipped}
        metadata, batch, table = build(lab, builder, seq_lens, query_lens, **options)
        check(lab, metadata, batch, table, seq_lens, query_lens)
        addresses = addresses or addresses_of(builder)
        assert addresses_of(builder) == addresses
    fresh = DeepseekSparseSWAMetadataBuilder(CONFIG, backend=lab.backend)
    build(lab, fresh, seq_lens, query_lens, **options)
    for name, buffer in buffers_of(lab, fresh).items():
        np.testing.assert_array_equal(buffers_of(lab, builder)[name], buffer, err_msg=f"{name}: stale")


@pytest.mark.parametrize(
    ("seq_lens", "query_lens", "padding"),
    [
        pytest.param([], [], 0, id="none"),
        pytest.param([], [], 4, id="none-padded"),
        pytest.param([1], [1], 0, id="first-token"),
        pytest.param([65], [1], 0, id="prefix-hit-leaves-one-token"),
        pytest.param([0, 0, 0], [0, 0, 0], 0, id="only-padding-requests"),
        pytest.param([1 << 20], [3], 0, id="a-million-tokens"),
        pytest.param([(1 << 20) - 3, 1 << 20], [2, 40], 3, id="a-million-tokens-mixed"),
        pytest.param([9, 30, 0, 50], [3, 3, 0, 20], 2, id="padding-between"),
    ],
)
def test_batch(lab, seq_lens, query_lens, padding):
    builder = DeepseekSparseSWAMetadataBuilder(CONFIG, backend=lab.backend)
    metadata, batch, table = build(lab, builder, seq_lens, query_lens, padding=padding)
    check(lab, metadata, batch, table, seq_lens, query_lens)


@pytest.mark.nowhere(when=lambda x: x.simulated)  # it takes minutes
def test_nothing_of_a_longer_batch_stays(lab):
    builder = DeepseekSparseSWAMetadataBuilder(CONFIG, backend=lab.backend)
    build(lab, builder, [1 << 20, 1 << 19], [3, 40], padding=9)
    metadata, batch, table = build(lab, builder, [5], [1])
    check(lab, metadata, batch, table, [5], [1])
    fresh = DeepseekSparseSWAMetadataBuilder(CONFIG, backend=lab.backend)
    build(lab, fresh, [5], [1])
    for name, buffer in buffers_of(lab, fresh).items():
        np.testing.assert_array_equal(buffers_of(lab, builder)[name], buffer, err_msg=f"{name}: stale")


@pytest.mark.nowhere(when=lambda x: x.simulated)  # it takes minutes
def test_thousands_of_requests(lab):
    config = dataclasses.replace(CONFIG, compress_ratios=(1,), max_num_batched_tokens=6100, max_num_seqs=3000)
    seq_lens, query_lens = [5 + i % 90 for i in range(3000)], [1 + i % 3 for i in range(3000)]
    batch = make_batch(lab, seq_lens, query_lens, padding=11)
    metadata = DeepseekSparseSWAMetadataBuilder(config, backend=lab.backend).build(0, batch)
    tokens = tokens_of(seq_lens, query_lens)
    assert_equal(lab, metadata.token_to_req_indices, [r for r, _ in tokens] + [0] * 11)
    assert_equal(lab, metadata.decode_swa_lens, [min(p + 1, WINDOW) for _, p in tokens])
    last_slot = lab.get(metadata.decode_swa_indices)[np.arange(6000), 0, lab.get(metadata.decode_swa_lens) - 1]
    np.testing.assert_array_equal(last_slot, lab.get(batch.slot_mapping)[:6000])


def test_slots_that_no_int32_holds_are_absent(lab):
    builder = DeepseekSparseSWAMetadataBuilder(dataclasses.replace(CONFIG, compress_ratios=(1,)), backend=lab.backend)
    table = np.array([[2**31 // BLOCK - 1, 2**31 // BLOCK, -5]], np.int32)
    batch = make_batch(lab, [18], [3], columns=3, block_table_tensor=lab.put(table))
    indices = lab.get(builder.build(0, batch).decode_swa_indices)[:, 0]
    for row, position in zip(indices, (15, 16, 17), strict=True):
        window = range(position - WINDOW + 1, position + 1)
        assert row.tolist() == [2**31 - BLOCK + p if p < BLOCK else -1 for p in window]


def test_padding_tokens_that_the_batch_counts_are_empty(lab):
    """A batch at a captured size: its tokens include padding, which belongs to no request."""
    builder = DeepseekSparseSWAMetadataBuilder(dataclasses.replace(CONFIG, compress_ratios=(1,)), backend=lab.backend)
    batch = make_batch(lab, [9, 20, 0], [3, 3, 0], padding=3, num_actual_tokens=9)
    metadata = builder.build(0, batch)
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (3, 9)
    assert_equal(lab, metadata.decode_swa_lens, [7, 8, 9, 12, 12, 12, 0, 0, 0])
    assert (lab.get(metadata.decode_swa_indices)[6:] == -1).all()


@pytest.mark.parametrize(
    ("ratios", "types"),
    [((0, 1), ["swaonly"]), ((4, 1), ["c4a", "swaonly"]), ((128, 4, 4), ["c128a", "c4a"])],
    ids=str,
)
def test_a_plan_for_each_type_of_layer(lab, ratios, types):
    builder = DeepseekSparseSWAMetadataBuilder(dataclasses.replace(CONFIG, compress_ratios=ratios), backend=lab.backend)
    before = None
    for query_lens in ([3, 1], [2, 20], [1]):
        metadata, _, _ = build(lab, builder, [q + 9 for q in query_lens], query_lens)
        plans = {name: getattr(metadata, f"tile_sched_{name}") for name in ("swaonly", "c4a", "c128a")}
        assert sorted(name for name, plan in plans.items() if plan is not None) == types
        assert all(plan.made_for is None for plan in plans.values() if plan)  # to be planned in this step
        for name in types:  # a separate plan, in the same memory as before
            assert before is None or plans[name] is not before[name]
            assert before is None or plans[name].workspace is before[name].workspace
            plans[name].made_for = (1,)
        before = plans
    without_decodes, _, _ = build(lab, builder, [30], [20])
    assert without_decodes.tile_sched_swaonly is without_decodes.tile_sched_c4a is None
    assert without_decodes.tile_sched_c128a is None
    assert builder.build_tile_scheduler(0) == {"swaonly": None, "c4a": None, "c128a": None}


def test_a_chunk_may_fill_its_workspace():
    """Two requests whose rows exactly fill the workspace go together."""
    config = dataclasses.replace(CONFIG, compress_ratios=(1,), max_num_batched_tokens=92)
    queries = (config.max_num_batched_tokens - WINDOW + 2) // 2
    batch = make_batch(Lab("reference", False), [queries + 50] * 2, [queries] * 2)
    metadata = DeepseekSparseSWAMetadataBuilder(config, backend="reference").build(0, batch)
    rows = queries + WINDOW - 1
    assert 2 * rows == WINDOW + config.max_num_batched_tokens
    assert metadata.get_prefill_chunk_plan(1, 1) == [(0, 2, 0, rows)]


@THOROUGH
@given(
    shape=shapes(CONFIG.decode_threshold, max_prefills=8), ratio=st.sampled_from([1, 4, 128]), chunk=st.integers(1, 3)
)
def test_chunk_plan(shape, ratio, chunk):
    seq_lens, query_lens = shape
    config = dataclasses.replace(CONFIG, compress_ratios=(1,), max_model_len=100, max_num_batched_tokens=400)
    batch = make_batch(Lab("reference", False), seq_lens, query_lens)
    metadata = DeepseekSparseSWAMetadataBuilder(config, backend="reference").build(0, batch)
    plan = metadata.get_prefill_chunk_plan(ratio, chunk)
    bounds = [0, *(end for _, end, _, _ in plan)]
    assert [start for start, *_ in plan] == bounds[:-1]
    assert bounds[-1] == metadata.num_prefills

    compressed = [s // ratio if ratio > 1 else 0 for s in metadata.prefill_seq_lens_cpu] if plan else []
    window = metadata.prefill_gather_lens.tolist() if plan else []
    budget = chunk * ((-(-100 // ratio) if ratio > 1 else 0) + WINDOW + 400)
    for start, end, n, m in plan:
        assert n == max(compressed[start:end])
        assert m == n + max(window[start:end])
        assert end - start == 1 or (end - start) * m <= budget
        if end < metadata.num_prefills:
            wider = max(compressed[start : end + 1]) + max(window[start : end + 1])
            assert (end + 1 - start) * wider > budget


def test_capture_without_a_table_of_c128a_pages(lab):
    """C128A layers then find no rows, and later the next build's rows at the same addresses."""
    config = dataclasses.replace(CONFIG, compress_ratios=(0, 4, 128))
    builder = DeepseekSparseSWAMetadataBuilder(config, backend=lab.backend)
    batch = make_batch(lab, [200, 130], [1, 1])
    captured = builder.build_for_cudagraph_capture(batch)
    assert (lab.get(captured.c128a_global_decode_topk_indices) == -1).all()
    table = lab.put(np.array([[5], [2]], np.int32))
    given = builder.build_for_cudagraph_capture(batch, c128a_block_table=table)
    rows = config.compressed_block_size // 128
    assert lab.get(given.c128a_global_decode_topk_indices)[:, 0, 0].tolist() == [5 * rows, 2 * rows]
    assert lab.get(captured.c128a_global_decode_topk_indices)[:, 0, 0].tolist() == [5 * rows, 2 * rows]


@pytest.mark.parametrize(("longest", "columns"), [(1, 1), (256, 1), (257, 2), (1000, 4)])
def test_a_capture_s_own_table_covers_its_longest_sequence_and_no_more(lab, longest, columns):
    given_tables = []

    class Watched(DeepseekSparseSWAMetadataBuilder):
        def build(self, *arguments, c128a_block_table=None, **options):
            given_tables.append(lab.get(c128a_block_table))
            return super().build(*arguments, c128a_block_table=c128a_block_table, **options)

    Watched(CONFIG, backend=lab.backend).build_for_cudagraph_capture(make_batch(lab, [longest, 1], [1, 1]))
    (table,) = given_tables
    np.testing.assert_array_equal(table, np.full((2, columns), -1))


@pytest.mark.parametrize(
    ("longest", "model", "width"),
    [(1, 1 << 20, 128), (128 * 128, 1 << 20, 128), (129 * 128, 1 << 20, 256), (300 * 128, 300 * 128, 384)],
)
def test_columns_of_c128a_rows(longest, model, width):
    """A power of two from 128 on, and at most the length of the longest sequence, in multiples of 128."""
    host, config = Lab("cpu", on_device=False), dataclasses.replace(CONFIG, max_model_len=model)
    batch, table = make_batch(host, [longest], [1]), np.zeros((1, -(-longest // PAGE)), np.int32)
    metadata = DeepseekSparseSWAMetadataBuilder(config, "cpu").build(0, batch, c128a_block_table=table)
    assert metadata.c128a_global_decode_topk_indices.shape == (1, 1, width)

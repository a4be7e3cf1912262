"""Metadata of DeepSeek V4.1: layers of ratio 0, 1 and 2, replayed requests, DSpark's blocks, native decode rows."""

import copy
import dataclasses

import numpy as np
import pytest

import cumla
from cumla.metadata import DeepseekSparseSWAMetadataBuilder, DeepseekV32IndexerMetadataBuilder, ServingConfig
from metadata.batches import BLOCK, compressed_slot, make_batch, tokens_of
from support.lab import Lab

WINDOW = 12
CONFIG = ServingConfig(
    window_size=WINDOW, compress_ratios=(0, 2, 1, 0), block_size=BLOCK, compressed_block_size=16, has_c1a=True,
    num_speculative_tokens=3, max_num_batched_tokens=160, max_num_seqs=16, max_model_len=1 << 10, num_sms=5,
)  # fmt: skip
HOST = Lab("reference", on_device=False)


def slots_of(table, request, positions):
    return [table[request, p // BLOCK] * BLOCK + p % BLOCK for p in positions]


def windows(lab, metadata):
    """The slots of each token's row, and its length, decodes first; rows are -1 after the length."""
    rows = [*lab.get(metadata.decode_swa_indices)[:, 0], *lab.get(metadata.prefill_swa_indices)]
    lens = [*lab.get(metadata.decode_swa_lens).tolist(), *lab.get(metadata.prefill_swa_lens).tolist()]
    assert all((row[n:] == -1).all() for row, n in zip(rows, lens, strict=True))
    return [row[:n].tolist() for row, n in zip(rows, lens, strict=True)]


def test_a_plan_for_each_type_of_layer(lab):
    builder = DeepseekSparseSWAMetadataBuilder(CONFIG, backend=lab.backend)
    metadata = builder.build(0, make_batch(lab, [9, 30], [1, 1]))
    assert {name for name in ("swaonly", "c1a", "c2a", "c4a", "c128a") if getattr(metadata, f"tile_sched_{name}")} == {
        "swaonly", "c1a", "c2a"
    }  # fmt: skip
    for ratio, name in ((0, "swaonly"), (1, "c1a"), (2, "c2a"), (4, "c4a")):
        assert metadata.decode_plan(ratio) is getattr(metadata, f"tile_sched_{name}")
    with pytest.raises(ValueError, match="compress_ratio: got 3"):
        metadata.decode_plan(3)


def test_ratio_1_is_window_only_without_has_c1a():
    assert ServingConfig(compress_ratios=(0, 1, 4)).compress_ratios == (1, 1, 4)
    assert {ServingConfig().layer_type(ratio) for ratio in (0, 1)} == {"swaonly"}
    assert CONFIG.compress_ratios == (0, 2, 1, 0)
    with pytest.raises(TypeError, match="has_c1a: got 1"):
        ServingConfig(has_c1a=1)


@pytest.mark.parametrize("has_replay", [False, True])
def test_windows_of_replayed_requests(lab, has_replay):
    """Starts before, inside, at the end of and beyond the windows, and negative; decodes and prefills."""
    seq_lens, query_lens = [30, 30, 30, 8, 40, 40, 33], [2, 2, 2, 1, 20, 20, 6]
    replay = np.array([0, 25, 29, 9, -5, 18, 31], np.int32)
    batch = make_batch(lab, seq_lens, query_lens, padding=3, skipped=(1,))
    builder = DeepseekSparseSWAMetadataBuilder(CONFIG, backend=lab.backend)
    given = {"replay_start": lab.put(replay)} if has_replay else {}
    metadata = builder.build(0, batch, **given)
    first = replay if has_replay else np.zeros_like(replay)
    table = lab.get(batch.block_table_tensor)
    expected = [
        slots_of(table, r, range(max(p - WINDOW + 1, 0, first[r]), p + 1)) if t != 1 else []
        for t, (r, p) in enumerate(tokens_of(seq_lens, query_lens))
    ]
    assert windows(lab, metadata) == expected
    reached = [
        q + min(max(s - q - max(start, 0), 0), WINDOW - 1)
        for s, q, start in zip(seq_lens, query_lens, first.tolist(), strict=True)
    ]
    np.testing.assert_array_equal(lab.get(metadata.prefill_gather_lens), reached[4:])
    assert (metadata.replay_start is None) == (not has_replay)
    with pytest.raises(ValueError, match="replay_start: got shape"):
        builder.build(0, batch, replay_start=lab.put(replay[1:]))


def test_tokens_of_a_noncausal_decode_see_its_whole_block(lab):
    config = dataclasses.replace(CONFIG, noncausal_decodes=True)
    assert config.decode_swa_width == 64
    assert dataclasses.replace(config, window_size=128, num_speculative_tokens=5).decode_swa_width == 192
    seq_lens, query_lens = [30, 4, 9, 0, 50], [3, 3, 2, 0, 15]
    batch = make_batch(lab, seq_lens, query_lens, padding=2, skipped=(4,))
    builder = DeepseekSparseSWAMetadataBuilder(config, backend=lab.backend)
    builder.build(0, make_batch(lab, [60] * 9, [4] * 9))  # rows that the next build must clear
    replay = lab.put(np.array([29, 3, 8, 0, 40], np.int32))  # has no effect on blocks
    metadata = builder.build(0, batch, replay_start=replay)
    assert metadata.decode_swa_indices.shape == (8, 1, 64)
    assert metadata.prefill_swa_indices.shape == (15, WINDOW)
    table, expected = lab.get(batch.block_table_tensor), []
    for t, (r, p) in enumerate(tokens_of(seq_lens, query_lens)):
        block = range(max(seq_lens[r] - query_lens[r] - WINDOW, 0), seq_lens[r])
        seen = block if r < 4 else range(max(p - WINDOW + 1, 40), p + 1)
        expected.append(slots_of(table, r, seen) if t != 4 else [])
    assert windows(lab, metadata) == expected
    buffers = lab.get(builder._buffers.swa_indices)
    assert (buffers[len(expected) :] == -1).all()


@pytest.mark.parametrize(
    ("window", "block", "width"),
    [(64, 1, 128), (63, 1, 64), (60, 4, 64), (60, 5, 128), (61, 4, 128), (128, 1, 192), (128, 5, 192), (128, 65, 256)],
)
def test_every_block_that_counts_as_a_decode_has_a_row(lab, window, block, width):
    """Window and block, padded to 64 entries: also where the window alone, or with the drafts, fills them."""
    config = dataclasses.replace(
        CONFIG, noncausal_decodes=True, window_size=window, num_speculative_tokens=block - 1, max_num_batched_tokens=256
    )
    assert config.decode_swa_width == width
    seq_lens, query_lens = [window + block + 20, block, window + block], [block] * 3
    batch = make_batch(lab, seq_lens, query_lens)
    metadata = DeepseekSparseSWAMetadataBuilder(config, backend=lab.backend).build(0, batch)
    assert metadata.decode_swa_indices.shape == (3 * block, 1, width)
    table = lab.get(batch.block_table_tensor)
    expected = [slots_of(table, r, range(max(s - block - window, 0), s)) for r, s in enumerate(seq_lens)]
    assert windows(lab, metadata) == [its for its in expected for _ in range(block)]


def test_chunks_of_layers_of_ratio_1_have_compressed_rows():
    config = dataclasses.replace(CONFIG, prefill_chunk_size=1, max_model_len=100, max_num_batched_tokens=100)
    metadata = DeepseekSparseSWAMetadataBuilder(config, backend="reference").build(
        0, make_batch(HOST, [60, 70, 90], [10, 20, 60])
    )
    assert metadata.get_prefill_chunk_plan(1) == metadata.get_prefill_chunk_plan(0)
    assert metadata.get_prefill_chunk_plan(0) == [(0, 2, 0, 31), (2, 3, 0, 71)]
    assert metadata.get_prefill_chunk_plan(1, has_compressed=True) == [(0, 2, 70, 101), (2, 3, 90, 161)]
    assert metadata.get_prefill_chunk_plan(2) == metadata.get_prefill_chunk_plan(2, None, True)
    assert metadata.get_prefill_chunk_plan(2, has_compressed=False) == metadata.get_prefill_chunk_plan(0)
    with pytest.raises(ValueError, match="has_compressed: got True for compress_ratio 0"):
        metadata.get_prefill_chunk_plan(0, has_compressed=True)
    with pytest.raises(TypeError, match="has_compressed: got 1"):
        metadata.get_prefill_chunk_plan(1, has_compressed=1)


@pytest.mark.parametrize("ratio", [1, 2])
def test_an_indexer_of_each_ratio(lab, ratio):
    """Rows that tokens see, and slots of the rows that they complete; pages cover compressed_block_size positions."""
    builder = DeepseekV32IndexerMetadataBuilder(CONFIG, lab.backend, compress_ratio=ratio)
    assert copy.copy(builder).compress_ratio == ratio
    seq_lens, query_lens = [30, 1, 47, 33], [1, 1, 7, 20]
    batch = make_batch(lab, seq_lens, query_lens, padding=2)
    table = np.random.default_rng(3).permutation(4 * 3).reshape(4, 3).astype(np.int32)
    metadata = builder.build(0, batch, block_table=lab.put(table))
    slots = [compressed_slot(table, r, p, 16 // ratio, ratio) for r, p in tokens_of(seq_lens, query_lens)]
    np.testing.assert_array_equal(lab.get(metadata.slot_mapping), [*slots, -1, -1])
    np.testing.assert_array_equal(lab.get(metadata.decode.seq_lens), [30 // ratio, 1 // ratio])
    (chunk,) = metadata.prefill.chunks
    seen = np.subtract(lab.get(chunk.cu_seqlen_ke), lab.get(chunk.cu_seqlen_ks))
    np.testing.assert_array_equal(seen, [(p + 1) // ratio for r, p in tokens_of(seq_lens, query_lens) if r >= 2])


def test_an_indexer_of_v41_needs_its_ratio():
    with pytest.raises(ValueError, match="compress_ratio: got None for layers of ratio 1 and of ratio 2"):
        DeepseekV32IndexerMetadataBuilder(CONFIG)
    with pytest.raises(ValueError, match="compress_ratio: got 128"):
        DeepseekV32IndexerMetadataBuilder(CONFIG, compress_ratio=128)


class Native(DeepseekV32IndexerMetadataBuilder):
    natively_supported_next_n = (1, 2, 4)


@pytest.mark.parametrize("depth", [2, 4])
def test_native_rows_by_the_depth_of_the_batch(lab, depth):
    """A draft of 3 may be cut to 1; padding requests have no rows."""
    builder = Native(CONFIG, lab.backend, compress_ratio=1)
    batch = make_batch(lab, [40, depth, 33, 0], [depth] * 3 + [0], padding=depth)
    decode = builder.build(0, batch).decode
    expected = [[max(s - depth + j + 1, 0) for j in range(depth)] for s in (40, depth, 33)] + [[0] * depth]
    np.testing.assert_array_equal(lab.get(decode.seq_lens), expected)
    np.testing.assert_array_equal(lab.get(decode.decode_lens), [depth] * 3 + [0])
    assert not decode.block_table.shape[1] or decode.block_table.shape[0] == 4


def test_native_rows_of_padded_requests(lab):
    """4 rows a request, of which 3 are in use: row j sees the sequence without the later ones of the 3."""
    builder = Native(CONFIG, lab.backend, compress_ratio=1)
    seq_lens, decode_lens = np.array([40, 2, 0], np.int32), np.array([3, 2, 0], np.int32)
    arrays = [lab.put(x) for x in (seq_lens, np.zeros((3, 70), np.int32), decode_lens)]
    starts = lab.put(np.array([0, 3, 5], np.int32))
    lens, _, _, batch_size, padded = builder._prepare_decode_tensors(
        *arrays, decode_lens, starts, 3, 5, use_native=True, next_n=4, max_decode_len=3
    )
    expected = [[min(max(s - 3 + j + 1, 0), s) for j in range(4)] for s in seq_lens.tolist()]
    np.testing.assert_array_equal(lab.get(lens), expected)
    assert (batch_size, padded) == (3, True)


def test_lists_of_layers_of_ratio_0(lab, rng):
    """The lists of topk 0, with the width of the other layers' lists."""
    topk, starts, lens, gathered = rng.integers(0, 9, (6, 4)), [0, 2, 6], [20, 9], [13, 9]
    arrays = [lab.put(np.array(x, np.int32)) for x in (topk, starts, lens, gathered)]
    found, counts = cumla.combine_topk_swa_indices(*arrays, WINDOW, 0, 4, 40, 9, backend=lab.backend)
    want, want_counts = cumla.combine_topk_swa_indices(*arrays, WINDOW, 1, 0, 40, 9, backend=lab.backend)
    np.testing.assert_array_equal(lab.get(found), lab.get(want))
    np.testing.assert_array_equal(lab.get(counts), lab.get(want_counts))

"""Builders and helpers with host numbers of other types than int32, and with values that are not numbers."""

import numpy as np
import pytest

from cumla.metadata import (
    CommonAttentionMetadata,
    DeepseekSparseSWAMetadataBuilder,
    DeepseekV32IndexerMetadataBuilder,
    MLACommonMetadataBuilder,
    MLAConfig,
    ServingConfig,
    get_dcp_local_seq_lens,
    kv_spans_from_batches,
    split_indexer_prefill_chunks,
)
from cumla.metadata.vllm_helpers import make_local_attention_virtual_batches
from metadata.batches import make_batch
from support.lab import Lab

HOST = Lab("cpu", on_device=False)
NUMBERS = {"window_size": 60, "max_num_batched_tokens": 256, "max_num_seqs": 8, "max_model_len": 256}
CONFIG = ServingConfig(compress_ratios=(1, 4), **NUMBERS)
INTEGERS = ["int8", "uint8", "int16", "uint16", "uint32", "uint64", ">i4", "int64"]
TABLE = np.arange(24, dtype=np.int32).reshape(3, 8)


def lists(results):
    return [x.tolist() for x in results]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_of_any_type(dtype):
    """Differences of small and of unsigned integers would wrap around."""

    def of(*numbers):
        return np.array(numbers).astype(dtype)

    spans = kv_spans_from_batches(of(0, 2, 4, 7), of(5, 9, 4))
    assert lists(spans) == [[0, 0, 5, 5, 14, 14, 14], [4, 5, 13, 14, 16, 17, 18]]
    assert split_indexer_prefill_chunks(of(5, 9, 4), of(2, 2, 3), 14, 400) == [
        (slice(0, 2), slice(0, 4)), (slice(2, 3), slice(0, 3)),
    ]  # fmt: skip
    for rank, want in enumerate(([0, 1, 1, 2, 2], [0, 0, 1, 1, 2], [0, 0, 0, 1, 2], [0, 0, 0, 1, 1])):
        assert get_dcp_local_seq_lens(of(0, 1, 2, 5, 7), 4, rank).tolist() == want
    assert get_dcp_local_seq_lens(of(0, 1, 2, 5, 7), 2, 1, 300).tolist() == [0] * 5
    q_lens, q_starts, k_lens, _ = make_local_attention_virtual_batches(512, of(0, 4, 14, 19), of(6, 17, 9), TABLE, 64)
    assert lists((q_lens, q_starts, k_lens)) == [[4, 10, 5], [0, 4, 14, 19], [6, 17, 9]]
    local = make_local_attention_virtual_batches(4, of(0, 4, 14, 19), of(6, 17, 9), TABLE, 2)
    assert local[0].tolist() == [2, 2, 1, 4, 4, 1, 4, 1]
    assert local[3].tolist()[2:4] == [[10, 11], [12, 13]]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_a_batch_of_any_integers(dtype):
    right = make_batch(HOST, [9, 120], [1, 100])
    names = ("query_start_loc_cpu", "seq_lens_cpu", "num_computed_tokens_cpu")
    small = {name: getattr(right, name).astype(dtype) for name in names}
    other = CommonAttentionMetadata(**vars(right) | small)
    for builder in (
        DeepseekSparseSWAMetadataBuilder(CONFIG),
        DeepseekV32IndexerMetadataBuilder(CONFIG),
        MLACommonMetadataBuilder(MLAConfig(**NUMBERS)),
    ):
        builder.block_size = 8
        got, want = builder.build(0, other), builder.build(0, right)
        for name in ("num_decodes", "num_prefill_tokens"):
            assert getattr(got, name) == getattr(want, name)
        if isinstance(builder, DeepseekSparseSWAMetadataBuilder):
            assert got.get_prefill_chunk_plan(4) == want.get_prefill_chunk_plan(4) == [(0, 1, 30, 150)]
        if isinstance(builder, DeepseekV32IndexerMetadataBuilder):
            assert got.prefill.chunks[0].cu_seqlen_ke.tolist() == want.prefill.chunks[0].cu_seqlen_ke.tolist()


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros(2, np.float32), np.zeros(2, bool), np.array([0, 1], object), np.array(["0", "1"]),
        np.zeros((), np.int32), np.zeros((2, 1), np.int32), np.ma.masked_all(2, np.int32), [0, 1], None,
    ],
)  # fmt: skip
def test_no_integers(wrong):
    right = np.array([1], np.int32)
    calls = {
        "start_seq_loc": lambda: kv_spans_from_batches(wrong, right),
        "seq_lens_cpu": lambda: split_indexer_prefill_chunks(wrong, right, 9, 9),
        "query_lens_cpu": lambda: split_indexer_prefill_chunks(right, wrong, 9, 9),
        "seq_lens": lambda: get_dcp_local_seq_lens(wrong, 2),
        "query_start_loc_np": lambda: make_local_attention_virtual_batches(4, wrong, right, TABLE, 2),
        "seq_lens_np": lambda: make_local_attention_virtual_batches(4, np.array([0, 1]), wrong, TABLE, 2),
        "query_start_loc_cpu": lambda: one_chunk(starts=wrong),
    }
    for name, call in calls.items():
        with pytest.raises((TypeError, ValueError), match=f"^{name}: got"):
            call()


def test_lengths_that_do_not_fit_together():
    starts = np.array([0, 1, 8])
    for lens, text in (([5, 6], "request 1 has 6 tokens and a query of 7"), ([-5, 9], "request 0 has -5 tokens")):
        with pytest.raises(ValueError, match=f"seq_len_per_batch: {text}"):
            kv_spans_from_batches(starts, np.array(lens))
        with pytest.raises(ValueError, match=f"seq_lens_cpu: {text}"):
            one_chunk(starts, np.array(lens))
    with pytest.raises(ValueError, match="seq_len_per_batch: request 0 has 5 tokens and a query of -1"):
        kv_spans_from_batches(np.array([1, 0]), np.array([5]))
    with pytest.raises(ValueError, match="seq_len_per_batch: got 3221225472 rows in all, expected at most 2147483647"):
        kv_spans_from_batches(np.array([0, 1, 2, 3]), np.array([2**30] * 3))
    with pytest.raises(ValueError, match="seq_lens_cpu: got 3 requests, expected 2 as query_lens_cpu has"):
        split_indexer_prefill_chunks(np.array([5, 3, 3]), np.array([2, 2]), 7, 40)
    with pytest.raises(ValueError, match="seq_lens_cpu: got -3 for request 1, expected at least 0"):
        split_indexer_prefill_chunks(np.array([5, -3]), np.array([2, 2]), 7, 40)
    for name in ("workspace_size", "max_logits_bytes"):
        with pytest.raises(ValueError, match=f"{name}: got {2**63}, expected at most {2**63 - 1}"):
            split_indexer_prefill_chunks(
                np.array([5]), np.array([2]), **{"workspace_size": 7, "max_logits_bytes": 40, name: 2**63}
            )


def one_chunk(starts=(0, 1, 8), seq_lens=(9, 20), requests=slice(0, 2), queries=slice(0, 8), table=TABLE):
    starts, seq_lens = (np.array(x) if isinstance(x, tuple) else x for x in (starts, seq_lens))
    builder = DeepseekV32IndexerMetadataBuilder(ServingConfig(**NUMBERS))
    return builder.build_one_prefill_chunk(requests, queries, starts, seq_lens, table)


@pytest.mark.parametrize(
    ("requests", "queries", "text"),
    [
        (slice(None, 2), slice(0, 8), "req_slice.start: got None"), (slice(0, 3), slice(0, 8), "req_slice.stop: got 3"),
        (slice(-1, 2), slice(0, 1), "req_slice.start: got -1"), (slice(1, 0), slice(0, 0), r"req_slice: got slice"),
        (slice(0, 2, 2), slice(0, 8), r"req_slice: got slice\(0, 2, 2\)"), (5, slice(0, 8), "req_slice: got 5"),
        (slice(0, 2), slice(None), "query_slice.start: got None"), (slice(0, 2), slice(0, 9), "query_slice.stop: got"),
        (slice(0, 2), slice(3, 1), r"query_slice: got slice\(3, 1"), (slice(0, 2), None, "query_slice: got None"),
        (slice(0, 2.0), slice(0, 1), "req_slice.stop: got 2.0"),
    ],
)  # fmt: skip
def test_slices_of_what_is_not_there(requests, queries, text):
    with pytest.raises((TypeError, ValueError), match=text):
        one_chunk(requests=requests, queries=queries)


def test_a_chunk_wants_a_table_for_its_requests():
    with pytest.raises(ValueError, match="block_table: got 1 rows, expected at least 2"):
        one_chunk(table=TABLE[:1])
    chunk = one_chunk(requests=slice(np.int8(0), np.uint8(2)), queries=slice(np.int64(1), np.int16(8)))
    assert (chunk.token_start, chunk.token_end, chunk.num_reqs) == (1, 8, 2)


def test_numbers_that_window_metadata_is_asked_by():
    builder = DeepseekSparseSWAMetadataBuilder(CONFIG)
    metadata = builder.build(0, make_batch(HOST, [9, 120], [1, 100]))
    for wrong in (0, -3, "x", 1.5, True):
        with pytest.raises((TypeError, ValueError), match="prefill_chunk_size: got"):
            metadata.get_prefill_chunk_plan(4, wrong)
    for wrong in (-1, "4", None, True, 2**70):
        with pytest.raises((TypeError, ValueError), match="compress_ratio: got"):
            metadata.get_prefill_chunk_plan(wrong)
    for wrong in (3, None, "4", True):
        with pytest.raises(ValueError, match="compress_ratio: got"):
            metadata.decode_plan(wrong)
    assert metadata.decode_plan(0) is metadata.decode_plan(1) is metadata.tile_sched_swaonly
    for wrong in (-1, None, 1.5, True):
        with pytest.raises((TypeError, ValueError), match="num_decode_tokens: got"):
            builder.build_tile_scheduler(wrong)

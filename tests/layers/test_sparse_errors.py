"""Wrong types of objects given to a sparse layer and to builders are named before anything is written."""

import dataclasses

import numpy as np
import pytest
from metadata.batches import make_batch

import cumla
from cumla.layers import CompressedCache, SparseMLALayer
from cumla.layers.selection import IndexerInputs
from cumla.metadata import (
    CommonAttentionMetadata,
    DeepseekSparseSWAMetadataBuilder,
    DeepseekV32IndexerMetadataBuilder,
    MLACommonMetadataBuilder,
    MLAConfig,
    ServingConfig,
)
from support.lab import BF16, Lab

HOST = Lab("reference", on_device=False)
CONFIG = ServingConfig(
    compress_ratios=(4,), index_topk=16, block_size=8, max_num_batched_tokens=16, max_num_seqs=4, max_model_len=64,
)  # fmt: skip
NONSENSE = (
    "a format",
    True,
    0.5,
    10**400,
    [],
    object(),
    np.zeros(()),
    np.array([None]),
    np.zeros(0),
    np.zeros(3, ">i4"),
)


@pytest.fixture
def step():
    """Valid arguments of a step, by name."""
    metadata = DeepseekSparseSWAMetadataBuilder(CONFIG, "reference").build(0, make_batch(HOST, [9, 16], [1, 5]))
    layout = cumla.DSV4_FP8
    table, slots = np.zeros((2, 1), np.int32), np.array([0, 1])
    compressed = CompressedCache(
        layout.allocate(2, 64), table, np.ones((2, 512), BF16), slots, np.full((6, 16), -1, np.int32)
    )
    return {
        "q": np.ones((6, 2, 512), BF16), "k": np.ones((6, 512), BF16), "swa_cache": layout.allocate(4, 8),
        "metadata": metadata, "compressed": compressed, "out": np.full((6, 2, 512), 7, BF16),
    }  # fmt: skip


def raises(arguments, text):
    with pytest.raises((TypeError, ValueError), match=text) as caught:
        SparseMLALayer(4, index_topk=16).step(**arguments, backend="reference")
    assert len(str(caught.value)) < 500
    assert not arguments["swa_cache"].any()
    assert (arguments["out"] == 7).all()


@pytest.mark.parametrize("name", ["compressed", "workspace", "prefill_path", "join", "observe"])
@pytest.mark.parametrize("wrong", NONSENSE, ids=lambda x: type(x).__name__)
def test_objects_of_a_step(step, name, wrong):
    raises(step | {name: wrong}, rf"^{name}: got")


@pytest.mark.parametrize("name", ["token_to_req_indices", "is_valid_token", "positions", "query_start_loc_cpu"])
@pytest.mark.parametrize("wrong", [None, np.zeros((), np.int32), np.zeros(1, np.int32), np.zeros(9), np.array([None])])
def test_arrays_of_metadata(step, name, wrong):
    raises(step | {"metadata": dataclasses.replace(step["metadata"], **{name: wrong})}, rf"^metadata\.{name}: got")


@pytest.mark.parametrize("wrong", [None, 0, True, 8.0, [8], np.zeros(3, np.int32)])
def test_page_size_of_metadata(step, wrong):
    raises(step | {"metadata": dataclasses.replace(step["metadata"], block_size=wrong)}, r"^metadata\.block_size: got")


def test_caches_without_pages(step):
    """Rows would be dropped, and nothing attended to."""
    compressed = step["compressed"]
    raises(step | {"swa_cache": step["swa_cache"][:0]}, "^swa_cache: got 0 pages, expected at least 1")
    empty = dataclasses.replace(compressed, cache=compressed.cache[:0])
    raises(step | {"compressed": empty}, r"^compressed\.cache: got 0 pages, expected at least 1 for the 4 rows of the")
    indexer = IndexerInputs(
        np.zeros((6, 1, 128), np.uint8), np.zeros((6, 1), np.float32), cumla.INDEXER_FP8.allocate(1, 64)[:0],
        DeepseekV32IndexerMetadataBuilder(CONFIG, "reference").build(0, make_batch(HOST, [9, 16], [1, 5])),
    )  # fmt: skip
    selecting = dataclasses.replace(compressed, topk_indices=None, indexer=indexer)
    raises(step | {"compressed": selecting}, r"^compressed\.indexer\.cache: got 0 pages, expected at least 1")


@pytest.mark.parametrize(
    "builder", [DeepseekSparseSWAMetadataBuilder, DeepseekV32IndexerMetadataBuilder, MLACommonMetadataBuilder]
)
@pytest.mark.parametrize("wrong", [None, *NONSENSE], ids=lambda x: type(x).__name__)
def test_no_batch(builder, wrong):
    config = MLAConfig(max_num_seqs=4) if builder is MLACommonMetadataBuilder else CONFIG
    with pytest.raises(TypeError, match="common_attn_metadata: got"):
        builder(config).build(0, wrong)


def test_lengths_that_are_none():
    right = vars(make_batch(HOST, [9, 16], [1, 5])) | {"max_seq_len": -1}
    for wrong in (np.array([None]), np.zeros(2), np.zeros((), np.int32)):
        with pytest.raises((TypeError, ValueError), match="seq_lens_cpu: got"):
            CommonAttentionMetadata(**right | {"seq_lens_cpu": wrong})


@pytest.mark.parametrize("layout", [cumla.DSV4_BF16, cumla.DSV4_F32])
def test_rows_for_caches_that_a_step_does_not_fill(step, layout):
    """The message says how they are filled: before, it claimed that the rows were there."""
    dtype = BF16 if layout is cumla.DSV4_BF16 else np.dtype(np.float32)
    cache = np.zeros((4, 8, 512), dtype)
    arguments = {**step, "swa_cache": cache, "compressed": None}
    with pytest.raises(
        ValueError, match=f"^k: got rows for a {layout.name} cache, .*qnorm_rope_and_insert or by index"
    ):
        SparseMLALayer(layout=layout).step(**arguments, backend="reference")
    assert not cache.any()

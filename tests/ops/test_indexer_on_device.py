"""Cases that need a device: logits of more than 2^31 elements, rows of a million columns, and graphs."""

import numpy as np
import pytest

import cumla
from support.graphs import graph_of
from support.lab import Lab

pytestmark = pytest.mark.gpu

HEADS, DIM = 64, 128


@pytest.fixture
def lab():
    return Lab("cuda", on_device=True)


def e4m3(rng, *shape):
    """Bytes of e4m3 values without NaN."""
    return (rng.integers(0, 2, shape) * 0x80 + rng.integers(0, 0x7F, shape)).astype(np.uint8)


def memory_for(gibibytes):
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    free, _ = cupy.cuda.Device().mem_info
    if free < gibibytes << 30:
        pytest.skip(f"needs {gibibytes} GiB of device memory")


def test_more_logits_than_32_bits_count(lab, rng):
    """2,200 queries of a million keys: 8.8 GB, offsets beyond 2^31 elements and 2^33 bytes."""
    memory_for(20)
    queries, keys, topk = 2200, 1_000_000, 2048
    q, k = lab.put(e4m3(rng, queries, HEADS, DIM)), lab.put(e4m3(rng, keys, DIM))
    scales = lab.put(rng.uniform(0.5, 1, keys).astype(np.float32))
    weights = lab.put(rng.normal(size=(queries, HEADS)).astype(np.float32))
    starts, ends = lab.put(np.zeros(queries, np.int32)), lab.put(np.full(queries, keys, np.int32))
    logits = cumla.fp8_mqa_logits(q, (k, scales), weights, starts, ends, False)
    for some in (slice(0, 2), slice(queries - 2, queries)):
        few = cumla.fp8_mqa_logits(q[some], (k, scales), weights[some], starts[some], ends[some], False)
        assert bool((logits[some] == few).all())
    best = cumla.top_k_per_row(logits, topk)
    for row in (0, 1, queries - 1):
        x = lab.get(logits[row])
        order = np.lexsort((np.arange(keys), -x))[:topk]
        np.testing.assert_array_equal(lab.get(best[row]), np.sort(order))
    del logits
    both = cumla.indexer_topk(q, (k, scales), weights, topk, cu_seqlen_ks=starts, cu_seqlen_ke=ends)
    assert bool((both == best).all())


@pytest.mark.parametrize("topk", [2048, 9000])
def test_rows_of_a_million_columns(lab, rng, topk):
    x = rng.normal(size=(5, 1_000_003)).astype(np.float32)
    x[1], x[2], x[3, ::3] = np.sort(x[1]), np.round(x[2], 1), np.nan
    found = lab.get(cumla.top_k_per_row(lab.put(x), topk))
    for row, indices in zip(x, found, strict=True):
        order = np.lexsort((np.arange(len(row)), np.where(np.isnan(row), np.inf, -row)))[:topk]
        np.testing.assert_array_equal(indices, np.sort(order))


def test_graphs_score_and_choose_again(lab, rng):
    """Other lengths, queries and keys at the same addresses; nothing is allocated."""
    import cupy

    batch, next_n, columns, block, topk = 5, 2, 9, 64, 64
    cache = lab.put(cumla.INDEXER_FP8.allocate(batch * columns, block))
    table = lab.put(rng.permutation(batch * columns).reshape(batch, columns).astype(np.int32))
    q, weights = lab.put(e4m3(rng, batch, next_n, HEADS, DIM)), lab.put(np.ones((batch * next_n, HEADS), np.float32))
    lens = lab.put(np.full(batch, columns * block, np.int32))
    keys, slots = lab.put(np.zeros((batch * columns * block, DIM), np.float32)), cupy.arange(batch * columns * block)
    logits = lab.put(np.zeros((batch * next_n, columns * block), np.float32))
    chosen, both, workspace = (
        lab.put(np.zeros(shape, dtype))
        for shape, dtype in (
            ((batch * next_n, topk), np.int32),
            ((batch * next_n, topk), np.int32),
            (1 << 16, np.uint8),
        )
    )
    schedule = lab.put(np.zeros((133, 2), np.int32))

    def run():
        cumla.indexer_k_quant_and_cache(keys, cache, slots)
        cumla.get_paged_mqa_logits_metadata(lens, block, 132, out=schedule)
        cumla.fp8_paged_mqa_logits(q, cache, weights, lens, table, schedule, columns * block, out=logits)
        cumla.top_k_per_row(logits, topk, seq_lens=lens, next_n=next_n, out=chosen)
        cumla.indexer_topk(q, cache, weights, topk, context_lens=lens, block_table=table, workspace=workspace, out=both)

    run()
    graph = graph_of(run)
    for _ in range(3):
        keys.set(rng.normal(size=keys.shape).astype(np.float32))
        q.set(e4m3(rng, *q.shape))
        weights.set(rng.normal(size=weights.shape).astype(np.float32))
        lens.set(rng.integers(next_n, columns * block + 1, batch).astype(np.int32))
        cupy.cuda.Device().synchronize()
        graph.launch()
        cupy.cuda.Device().synchronize()
        wanted = cumla.top_k_per_row(lab.get(logits), topk, seq_lens=lab.get(lens), next_n=next_n, backend="reference")
        np.testing.assert_array_equal(lab.get(chosen), wanted)
        np.testing.assert_array_equal(lab.get(both), wanted)

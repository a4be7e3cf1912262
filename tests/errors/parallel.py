"""Invalid arguments of attention, of layers and of communicators on ranks: errors before anything is sent."""

import numpy as np

import cumla
from cumla.layers import MLACommonImpl
from cumla.parallel import (
    Agreement,
    ContextAttention,
    MemoryStore,
    RankRows,
    Shard,
    ShardedMLALayer,
    ShardedSparseMLALayer,
    run_threads,
    shard_queries,
)
from support.lab import BF16
from support.ranked import Ranked, dense_arguments, sparse_arguments
from support.refused import EITHER, Call, T, V, read_only

SECONDS = 60


def on_ranks(size, of):
    """A function that calls of(communicator) on each rank, and raises what it raises."""

    def called(**arguments):
        def on(comm):
            try:
                of(comm)(**arguments)
            except EITHER as error:
                assert comm._calls == 0
                return error
            return None

        errors = run_threads(size, on, SECONDS)
        assert len(set(map(repr, errors))) == 1
        if errors[0] is not None:
            raise errors[0]

    return called


def seeded():
    return np.random.default_rng(0)


def whole_layer(case, tokens):
    (ranked,) = run_threads(1, lambda comm: Ranked(case, comm))
    arguments = ranked.arguments(0, tokens)
    return Call(on_ranks(1, lambda comm: type(ranked.sharded)(ranked.layer, comm).step), arguments)


def sparse_layer():
    layer = cumla.layers.SparseMLALayer(4, 4, np.zeros(8, np.float32))
    arguments = sparse_arguments(seeded()) | {"out": np.ones((5, 8, 512), BF16)}
    return Call(on_ranks(1, lambda comm: ShardedSparseMLALayer(layer, comm).step), arguments)


def dense_layer():
    layer = MLACommonImpl(2, 576, 0.1, kv_b_proj=seeded().standard_normal((2 * 256, 512)).astype(BF16))
    layer.process_weights_after_loading(BF16)
    arguments = dense_arguments(seeded(), layer) | {"output": np.ones((3, 256), BF16)}
    return Call(on_ranks(1, lambda comm: ShardedMLALayer(layer, comm).forward), arguments)


def attention(name):
    rows, q = np.zeros((2, 3), np.int32), seeded().standard_normal((2, 4, 576)).astype(BF16)
    arguments = {
        "dense_decode": {
            "q": q, "k_cache": np.zeros((2, 4, 576), BF16), "block_table": np.zeros((2, 1), np.int32),
            "cache_seqlens": np.ones(2, np.int32),
        },
        "sparse_decode": {
            "q": q, "k_cache": cumla.V32_FP8.allocate(2, 4), "indices": rows,
            "extra_k_cache": cumla.V32_FP8.allocate(2, 4), "extra_indices": rows,
        },
    }[name]  # fmt: skip
    return Call(on_ranks(2, lambda comm: getattr(ContextAttention(comm), name)), arguments, creates=True)


def all_to_all():
    arguments = {"x": np.zeros((2, 4)), "out": np.ones((2, 4))}
    return Call(on_ranks(2, lambda comm: comm.all_to_all), arguments)


def queries():
    return Call(shard_queries, {"query_start_loc": np.array([0, 3]), "size": 2}, creates=True)


def of_threads():
    return Call(run_threads, {"size": 2, "function": lambda comm: comm.rank, "time_limit": SECONDS}, creates=True)


def agreement():
    arguments = {"store": MemoryStore(), "rank": 0, "size": 2, "time_limit": SECONDS}
    return Call(Agreement, arguments, creates=True)


NO_ROWS = RankRows(Shard(0, 1), np.zeros((1, 9), np.int32), np.zeros(9, np.int64))
NO_SELECTED_ROWS = np.zeros((2, 1, 3), np.int32)
WHOLE = [
    ("rows.shard", Shard(0, 2), V, "rows.shard: got rank 0 of 2, expected the communicator's, rank 0 of 1"),
    ("rows.shard", None, T, None),
    ("rows.block_table", np.zeros((1, 2)), T, "rows.block_table: got dtype float64"),
    ("rows.block_table", np.zeros((0, 2), np.int32), V, "rows.block_table: got 0 requests"),
    ("rows.block_table", np.zeros((1, 4), np.int32), V, "rows.block_table: got 4 columns, pages of 3 rows each"),
    ("rows.slot_mapping", np.zeros(3, np.int64), V, "rows.slot_mapping: got 3 tokens"),
    ("rows.slot_mapping", np.zeros(61, np.int64), V, "rows.slot_mapping: got 61 slots"),
    ("layer_caches", None, T, "layer_caches: got None of type NoneType"),
    ("topk_indices", np.zeros((60, 4)), T, "topk_indices: got dtype float64"),
    ("metadata", None, T, "metadata: got None of type NoneType"),
]
NUMBERS = [
    ("size", 0, V, "size: got 0, expected at least 1"), ("size", 2.0, T, "size: got 2.0 of type float"),
    ("time_limit", float("nan"), V, "time_limit: got nan, expected a finite number"),
    ("time_limit", float("inf"), V, "time_limit: got inf, expected a finite number"),
    ("time_limit", None, T, "time_limit: got None of type NoneType, expected a number"),
    ("time_limit", -1, V, r"time_limit: got -1, expected 0 to 1e\+06 seconds"),
]  # fmt: skip
CALLS = {
    **{f"ShardedAttention.step-{case}": lambda case=case, tokens=tokens: whole_layer(case, tokens)
       for case, tokens in ((2, 9), (3, 9), (8, 60), (13, 60))},
    "ShardedSparseMLALayer.step": sparse_layer,
    "ShardedMLALayer.forward": dense_layer,
    **{f"ContextAttention.{name}": lambda name=name: attention(name) for name in ("dense_decode", "sparse_decode")},
    "all_to_all": all_to_all,
    "shard_queries": queries,
    "run_threads": of_threads,
    "Agreement": agreement,
}  # fmt: skip
WRONG = {
    "ShardedAttention.step-2": [("rows", NO_ROWS, V, "rows: got RankRows, expected None")],
    "ShardedAttention.step-3": [("rows", None, V, "rows: got NoneType, expected RankRows for ratio 128")],
    "ShardedAttention.step-8": [
        ("rows", None, V, "rows: got NoneType, expected RankRows for ratio 4"), *WHOLE,
    ],
    "ShardedAttention.step-13": [("rows", None, V, "rows: got NoneType"), *WHOLE],
    "ShardedSparseMLALayer.step": [
        ("compressed.topk_indices", np.zeros((5, 4)), T, "compressed.topk_indices: got dtype float64"),
        ("compressed.topk_indices", None, V, "compressed.topk_indices: got None"),
        ("compressed.cache", lambda x: x[:0], V, "compressed.cache: got 0 pages, expected at least 1"),
        ("swa_cache", lambda x: x[:0], V, "swa_cache: got 0 pages, expected at least 1"),
        ("compressed.block_table", np.zeros(3, np.int32), V, "compressed.block_table: got shape"),
        ("compressed.block_table", np.zeros((1, 0), np.int32), V, "compressed.block_table: got 0 columns"),
        ("compressed.slot_mapping", np.zeros(2, np.int64), V, "compressed.slot_mapping: got 2 entries, expected 1"),
        ("compressed.k", np.zeros((2, 512), BF16), V, "compressed.slot_mapping: got 1 entries, expected 2"),
        ("compressed.shard", Shard(1, 2), V, "compressed.shard: got rank 1"),
        ("compressed.slot_mapping", None, EITHER, None),
        ("compressed", None, V, "compressed: got None, expected rows"),
        ("q", np.zeros((5, 8, 500), BF16), V, "q: got shape"),
        ("q", np.zeros((5, 8, 512), np.float16), T, "q: got dtype float16"),
        ("out", np.zeros((5, 8, 512), np.float32), T, "out: got dtype float32"),
        ("metadata", 5, T, "metadata: got 5 of type int"),
    ],
    "ShardedMLALayer.forward": [
        ("block_table", np.zeros((3, 2)), T, "block_table: got dtype float64"),
        ("block_table", np.zeros((2, 2), np.int32), V, "block_table: got 2 rows, expected at least 3"),
        ("cache_seqlens", np.zeros(3, np.int64), T, "cache_seqlens: got dtype int64"),
        ("cache_seqlens", None, T, "cache_seqlens: got NoneType"),
        ("kv_cache", lambda x: x[:0], V, "kv_cache: got 0 pages, expected at least 1"),
        ("slot_mapping", np.zeros(4, np.int64), V, "slot_mapping: got 4 slots"),
        ("output", np.zeros((3, 256), np.float32), T, "output: got dtype float32"),
        ("output", np.zeros((3, 255), BF16), V, "output: got shape"),
        ("max_seqlen", -1, V, "max_seqlen: got -1"),
        ("q", np.zeros((3, 2, 192), np.float32), T, "q: got dtype float32, expected bfloat16"),
        ("k_pe", np.zeros((2, 64), BF16), V, "k_pe: got shape"),
    ],
    "ContextAttention.dense_decode": [
        ("q", np.ones((1, 2, 1, 576), np.float32), V, r"q: got shape \(1, 2, 1, 576\), expected \[T, h, d\]"),
        ("out", np.ones((2, 4, 511), np.float32), T, "out: got dtype float32"),
        ("out", read_only(np.zeros((2, 4, 512), BF16)), V, "out: got a read-only numpy array"),
        ("lse", np.ones((4, 2), np.float32), V, r"lse: got shape \(4, 2\), expected \[2, 4\]"),
        ("attn_sink", np.ones(5, np.float32), V, r"attn_sink: got shape \(5,\), expected \[h\] with h = 4"),
        ("attn_sink", np.ones(4), T, "attn_sink: got dtype float64, expected float32"),
        ("plan", cumla.DecodePlan(), T, None),
    ],
    "ContextAttention.sparse_decode": [
        # The error has the shape that was passed.
        *((name, NO_SELECTED_ROWS, V, rf"{name}: got shape \(2, 1, 3\), expected \[T, (extra_)?topk\]")
          for name in ("indices", "extra_indices")),
        ("plan", cumla.DenseDecodePlan(), T, None),
    ],
    "all_to_all": [
        ("x", np.zeros((3, 4)), V, r"x: got shape \(3, 4\), expected \[2, ...\], a part for each rank"),
        ("x", np.zeros((4, 2)).T, V, "x: got strides"),
        ("x", [1.0], T, "x: got float"),
        ("x", (), V, "x: got no arrays, expected at least one"),
        ("x", np.array([None, 1]), T, "x: got dtype object, expected numbers"),
        ("x", (np.zeros((2, 4)), np.zeros((2, 4))), EITHER, "out: got"),
        ("out", np.zeros((2, 3)), V, r"out: got shape \(2, 3\), expected \(2, 4\)"),
        ("out", np.zeros((2, 4), np.float32), T, "out: got dtype float32, expected float64"),
        ("out", (), V, "out: got 0 arrays, expected 1"),
    ],
    "shard_queries": [
        ("size", 0, V, None), ("size", 2.0, T, r"size: got 2\.0"),
        *(("query_start_loc", wrong, V, None) for wrong in ([], [[0, 1]])),
        *(("query_start_loc", wrong, V, "query_start_loc: got starts that do not ascend from 0")
          for wrong in ([1, 3], [0, 3, 2])),
        ("query_start_loc", [0.0, 3.0], V, "query_start_loc: got float64"),
    ],
    "run_threads": NUMBERS,
    "Agreement": NUMBERS,
}  # fmt: skip

"""The indexer: scores, the choice, both at once, queries and keys.

Peers where they can be imported: DeepGEMM (deep_gemm), and vLLM's C++ operations (vllm_c_ops.so, packed or not).
Rows of `indexer_topk` have the peers' two steps beside them, with the memory that their logits take.
"""

import functools

import cupy
import ml_dtypes
import numpy as np
from common import L2_BYTES, Report, arguments, as_torch, has_peer, measure, random_bits, sets_for, vllm_ops

import cumla

HEADS, DIM, BLOCK = 64, 128, 64


@functools.cache
def deep_gemm():
    if not (has_peer("deep_gemm") and has_peer("torch")):
        return None
    import deep_gemm

    return deep_gemm


def e4m3(*shape, seed=0):
    """Bytes of e4m3 numbers from -1.75 to 1.75, none of them NaN."""
    bits = random_bits(int(np.prod(shape)), seed)
    return ((bits & 0x80) | (bits >> 8) % 0x3E).astype(cupy.uint8).reshape(shape)


def uniform(*shape, seed=0, low=-1.0, high=1.0):
    bits = random_bits(int(np.prod(shape)), seed)
    return (low + (high - low) * (bits >> 8).astype(cupy.float32) / (1 << 24)).astype(cupy.float32).reshape(shape)


def float8(array):
    """A CuPy array of e4m3 bytes as torch's."""
    import torch

    return torch.from_dlpack(array).view(torch.float8_e4m3fn)


E4M3 = cupy.asarray(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64))


def exact(q, k, scales, weights):
    """Scores of one query in float64: q [H, D], k [N, D]."""
    return (cupy.maximum(E4M3[q] @ E4M3[k].T, 0) * weights[:, None]).sum(axis=0) * scales


def check_rows(rows, exact_row):
    """The largest error of some rows of logits, as a part of the row's largest magnitude."""

    def check(result):
        logits = cupy.from_dlpack(result) if not isinstance(result, cupy.ndarray) else result
        worst = 0.0
        for row in rows:
            expected = exact_row(row)
            error = float(cupy.abs(logits[row, : len(expected)] - expected).max() / cupy.abs(expected).max())
            assert error < 1e-3, f"row {row}: error {error}"
            worst = max(worst, error)
        return worst

    return check


def some_of(count):
    return sorted({0, count // 2, count - 1})


# ---- scores


def ragged(report):
    for queries, keys in ((2048, 8192), (2048, 65536), (4096, 16384), (8192, 8192), (8192, 32768), (8192, 65536)):
        if report.wants("fp8_mqa_logits", f"{queries} x {keys}"):
            ragged_row(report, queries, keys)


def ragged_inputs(queries, keys):
    """q, (k, scales), weights, and ranges of all keys."""
    kv = e4m3(keys, DIM, seed=1), uniform(keys, seed=2, low=0.5)
    ranges = cupy.zeros(queries, np.int32), cupy.full(queries, keys, np.int32)
    return e4m3(queries, HEADS, DIM), kv, uniform(queries, HEADS, seed=3), *ranges


def ragged_row(report, queries, keys):
    inputs = q, (k, scales), weights, starts, ends = ragged_inputs(queries, keys)
    out = cupy.empty((queries, keys), np.float32)
    impls = {"cumla": ("cupy", [functools.partial(cumla.fp8_mqa_logits, *inputs, False, out=out)])}
    if deep_gemm():
        t_scales, *rest = as_torch(scales, weights, starts, ends)
        peer = functools.partial(deep_gemm().fp8_mqa_logits, float8(q), (float8(k), t_scales), *rest, False)
        impls["deep_gemm"] = "torch", [peer]
    check = check_rows(some_of(queries), lambda row: exact(q[row], k, scales, weights[row]))
    flop = 2 * queries * keys * HEADS * DIM
    timed(report, "fp8_mqa_logits", f"{queries} x {keys}", impls, check, out.nbytes + k.nbytes + q.nbytes, flop)


def timed(report, op, config, impls, check, bytes_moved, flop=None):
    measure(report, op, config, impls, bytes_moved, check)
    if flop:
        for row in report.rows[-len(impls) :]:
            row["tflops"] = flop / row["us_graph"] / 1e6
        print(" " * 40 + ", ".join(f"{row['impl']} {row['tflops']:.0f} TF" for row in report.rows[-len(impls) :]))


def paged_inputs(batch, context, next_n, seed=0):
    pages = batch * context // BLOCK
    cache = e4m3(pages, BLOCK * (DIM + 4), seed=seed)
    cache[:, BLOCK * DIM :] = uniform(pages, BLOCK, seed=seed + 1, low=0.5).view(cupy.uint8)
    table = cupy.asarray(np.random.default_rng(seed).permutation(pages).reshape(batch, -1).astype(np.int32))
    q, weights = e4m3(batch, next_n, HEADS, DIM, seed=seed + 2), uniform(batch * next_n, HEADS, seed=seed + 3)
    lens = cupy.full((batch, next_n), context, np.int32) - cupy.arange(next_n - 1, -1, -1, dtype=np.int32)
    return q, cache.reshape(pages, BLOCK, DIM + 4), weights, lens, table


def exact_paged(inputs, row):
    q, cache, weights, lens, table = inputs
    entry, j = divmod(row, q.shape[1])
    pages = cache.reshape(len(cache), -1)[table[entry]]
    k = pages[:, : BLOCK * DIM].reshape(-1, DIM)
    scales = cupy.ascontiguousarray(pages[:, BLOCK * DIM :]).view(np.float32).reshape(-1)
    return exact(q[entry, j], k, scales, weights[row])[: int(lens[entry, j])]


def paged(report):
    for batch, context, next_n in (
        (1, 32768, 1), (32, 8192, 1), (128, 32768, 1), (16, 131072, 1), (128, 32768, 2), (128, 32768, 4),
    ):  # fmt: skip
        if report.wants("fp8_paged_mqa_logits", f"b {batch} x {context} next_n {next_n}"):
            paged_row(report, batch, context, next_n)


def paged_row(report, batch, context, next_n):
    key_bytes = batch * context * (DIM + 4)
    sets = [paged_inputs(batch, context, next_n, 10 * i) for i in range(min(sets_for(key_bytes), 4))]
    outs = [cupy.empty((batch * next_n, context), np.float32) for _ in sets]
    calls = [
        functools.partial(cumla.fp8_paged_mqa_logits, *inputs, None, context, out=out)
        for inputs, out in zip(sets, outs, strict=True)
    ]
    impls = {"cumla": ("cupy", calls)}
    if deep_gemm() and next_n <= 2:
        impls["deep_gemm"] = "torch", [peer_paged(inputs, context) for inputs in sets]
    check = check_rows(some_of(batch * next_n), functools.partial(exact_paged, sets[0]))
    flop = 2 * batch * next_n * context * HEADS * DIM
    config = f"b {batch} x {context} next_n {next_n}"
    timed(report, "fp8_paged_mqa_logits", config, impls, check, key_bytes + outs[0].nbytes, flop)


def peer_paged(inputs, context):
    import torch

    q, cache, weights, lens, table = inputs
    t_cache, t_weights, t_lens, t_table = as_torch(cache.reshape(*cache.shape[:2], 1, -1), weights, lens, table)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    schedule = deep_gemm().get_paged_mqa_logits_metadata(t_lens, BLOCK, sms)
    t_q = float8(q)
    return lambda: deep_gemm().fp8_paged_mqa_logits(
        t_q, t_cache, t_weights, t_lens, t_table, schedule, context, clean_logits=False
    )


def schedules(report):
    """The time it takes, and how often it is the peer's own: of the installed one, larger shares come last."""
    op, config = "get_paged_mqa_logits_metadata", "b 128"
    if not report.wants(op, config):
        return
    lens = cupy.asarray(np.random.default_rng(0).integers(1, 32768, (128, 1)).astype(np.int32))
    schedule = cupy.empty((133, 2), np.int32)
    call = functools.partial(cumla.get_paged_mqa_logits_metadata, lens, BLOCK, 132, out=schedule)
    impls = {"cumla": ("cupy", [call])}
    if deep_gemm():
        (t_lens,) = as_torch(lens)
        peer = functools.partial(deep_gemm().get_paged_mqa_logits_metadata, t_lens, BLOCK, 132)
        impls["deep_gemm"] = "torch", [peer]
    timed(report, op, config, impls, None, lens.nbytes)
    if deep_gemm():
        rng, counts = np.random.default_rng(1), {"ours": 0, "larger shares last": 0}
        for _ in range(100):
            lens = cupy.asarray(rng.integers(1, 20000, (int(rng.integers(1, 40)), 1)).astype(np.int32))
            theirs = cupy.from_dlpack(deep_gemm().get_paged_mqa_logits_metadata(*as_torch(lens), BLOCK, 132)).get()
            counts["ours"] += np.array_equal(theirs, cumla.get_paged_mqa_logits_metadata(lens, BLOCK, 132).get())
            counts["larger shares last"] += np.array_equal(theirs, larger_last(lens[:, 0].get(), 132))
        print(f"{'':40}of 100 schedules of the peer's, equal: {counts}")


def larger_last(lens, sms):
    splits = -(-lens // (4 * BLOCK))
    ends = np.cumsum(splits)
    even, larger = divmod(int(ends[-1]), sms)
    at = np.array([i * even + max(i - (sms - larger), 0) for i in range(sms + 1)])
    entry = np.searchsorted(ends, at, side="right")
    return np.stack([entry, at - np.concatenate([[0], ends])[entry]], axis=1)


# ---- the choice


def normal(rows, columns, seed=0):
    """Sums of uniform numbers, float32 [rows, columns]."""
    return sum(uniform(rows, columns, seed=seed + i) for i in range(3))


def check_choice(logits, topk):
    expected = [set(cupy.argsort(-logits[row])[:topk].get().tolist()) for row in some_of(len(logits))]

    def check(result):
        indices = cupy.from_dlpack(result) if not isinstance(result, cupy.ndarray) else result
        for row, best in zip(some_of(len(logits)), expected, strict=True):
            found = set(indices[row].get().tolist())
            if found != best:  # of equal logits a peer may choose others
                values = [sorted(logits[row, cupy.asarray(sorted(x))].get().tolist()) for x in (found, best)]
                assert values[0] == values[1]
        return 0.0

    return check


def choice(report):
    for op, rows, columns, topk in (
        ("top_k decode", 4, 8192, 512), ("top_k decode", 4, 32768, 512), ("top_k decode", 4, 131072, 2048),
        ("top_k decode", 128, 8192, 512), ("top_k decode", 128, 32768, 512), ("top_k decode", 128, 32768, 2048),
        ("top_k decode", 1024, 32768, 512), ("top_k prefill", 8192, 32768, 512),
    ):  # fmt: skip
        config = f"{rows} x {columns} k {topk}"
        if not report.wants(op, config):
            continue
        count = sets_for(rows * columns * 4, 4)
        sets = [normal(rows, columns, 10 * i) for i in range(count)]
        outs = [cupy.empty((rows, topk), np.int32) for _ in sets]
        starts, ends = cupy.zeros(rows, np.int32), cupy.full(rows, columns, np.int32)
        decode = op == "top_k decode"
        options = {"seq_lens": ends} if decode else {"row_starts": starts, "row_ends": ends}

        def ours(logits, out, topk=topk, options=options):
            return lambda: cumla.top_k_per_row(logits, topk, out=out, **options)

        impls = {"cumla": ("cupy", [ours(*pair) for pair in zip(sets, outs, strict=True)])}
        if vllm_ops():
            names = ("persistent_topk", "cooperative_topk") if decode else ("top_k_per_row_prefill",)
            for name in names:
                if name == "cooperative_topk" and rows > 32:
                    continue
                peers = [peer_choice(name, x, starts, ends, topk) for x in sets]
                impls[f"vllm {name.removesuffix('_topk')}"] = "torch", peers
        timed(report, op, config, impls, check_choice(sets[0], topk), rows * columns * 4)


def peer_choice(name, logits, starts, ends, topk):
    import torch

    t_logits, t_starts, t_ends = as_torch(logits, starts, ends)
    out = torch.empty((len(logits), topk), dtype=torch.int32, device="cuda")
    workspace = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    ops = vllm_ops()._C

    def call():
        if name == "top_k_per_row_prefill":
            ops.top_k_per_row_prefill(t_logits, t_starts, t_ends, out, len(logits), t_logits.stride(0), 1, topk)
        else:
            getattr(ops, name)(t_logits, t_ends, out, workspace, topk, logits.shape[1])
        return out

    return call


# ---- both at once


def both(report):
    op, queries, keys, topk = "indexer_topk prefill", 8192, 32768, 512
    config = f"{queries} x {keys} k {topk}"
    if report.wants(op, config):
        q, (k, scales), weights, starts, ends = ragged_inputs(queries, keys)
        out = cupy.empty((queries, topk), np.int32)
        impls = {}
        for mebibytes in (16, 32, 64):
            workspace = cupy.empty(mebibytes << 20, np.uint8)
            impls[f"cumla {mebibytes} MiB"] = "cupy", [functools.partial(
                cumla.indexer_topk, q, (k, scales), weights, topk, cu_seqlen_ks=starts, cu_seqlen_ke=ends,
                workspace=workspace, out=out,
            )]  # fmt: skip
        logits = cumla.fp8_mqa_logits(q, (k, scales), weights, starts, ends, False)
        expected = cumla.top_k_per_row(logits, topk)
        impls["two steps"] = "cupy", [lambda: cumla.top_k_per_row(
            cumla.fp8_mqa_logits(q, (k, scales), weights, starts, ends, False, out=logits), topk, out=out
        )]  # fmt: skip
        timed(report, op, config, impls, check_equal(expected), q.nbytes + k.nbytes, 2 * queries * keys * HEADS * DIM)
    op, batch, context = "indexer_topk decode", 128, 32768
    config = f"b {batch} x {context} k {topk}"
    if report.wants(op, config):
        inputs = paged_inputs(batch, context, 1)
        q, cache, weights, lens, table = inputs
        workspace, out = cupy.empty(64 << 20, np.uint8), cupy.empty((batch, topk), np.int32)
        expected = cumla.top_k_per_row(cumla.fp8_paged_mqa_logits(*inputs), topk, seq_lens=lens)
        impls = {"cumla": ("cupy", [functools.partial(
            cumla.indexer_topk, q, cache, weights, topk, context_lens=lens, block_table=table, workspace=workspace,
            out=out,
        )])}  # fmt: skip
        timed(report, op, config, impls, check_equal(expected), batch * context * (DIM + 4))


def check_equal(expected):
    def check(result):
        assert bool((result == expected).all())
        return 0.0

    return check


# ---- queries and keys


def queries_and_keys(report):
    for tokens in (1, 128, 4096):
        op, config = "fused_indexer_q_rope_quant", f"T {tokens}"
        if report.wants(op, config):
            q = uniform(tokens, HEADS, DIM).astype(np.float16)
            table, weights = uniform(4096, 64), uniform(tokens, HEADS)
            positions = cupy.arange(tokens, dtype=np.int64) % 4096
            out = cupy.empty((tokens, HEADS, DIM), np.uint8), cupy.empty((tokens, HEADS), np.float32)
            call = functools.partial(cumla.fused_indexer_q_rope_quant, positions, q, table, weights, out=out)
            impls = {"cumla": ("cupy", [call])}
            timed(report, op, config, impls, None, q.nbytes + out[0].nbytes)
    for tokens in (1, 128, 512, 4096, 32768):
        op, config = "indexer_k_quant_and_cache", f"T {tokens}"
        if not report.wants(op, config):
            continue
        pages = max(2 * tokens // BLOCK, 4)
        sets = []
        for i in range(sets_for(tokens * 388, 8)):
            k = (uniform(tokens, DIM, seed=i).view(np.uint32) >> 16).astype(np.uint16).view(ml_dtypes.bfloat16)
            slots = cupy.asarray(np.random.default_rng(i).permutation(pages * BLOCK)[:tokens])
            sets.append((k, cupy.zeros((pages, BLOCK, DIM + 4), np.uint8), slots))
        impls = {"cumla": ("cupy", [functools.partial(cumla.indexer_k_quant_and_cache, *x) for x in sets])}
        if vllm_ops():
            peers = []
            for x in sets:
                tensors = as_torch(*x)
                peers.append(lambda t=tensors: vllm_ops()._C_cache_ops.indexer_k_quant_and_cache(*t, 128, "ue8m0"))
            impls["vllm"] = "torch", peers
        timed(report, op, config, impls, None, tokens * (2 * DIM + DIM + 4))


def main():
    report = Report(arguments(__doc__).parse_args())
    for part in (ragged, paged, schedules, choice, both, queries_and_keys):
        part(report)
        cupy.get_default_memory_pool().free_all_blocks()
        report.finish(l2_bytes=L2_BYTES)  # as far as it has come


if __name__ == "__main__":
    main()

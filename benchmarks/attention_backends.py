"""Attention on both device backends, beside the same written with CuPy's own functions.

Rows of `cuda` and `numba_cuda` are of the same arrays in the same process. `cupy` gathers rows into float16 arrays,
multiplies them with cuBLAS and takes a softmax, as one would without kernels; CuPy calls no cuBLAS while a graph is
captured, so its time is that of calls one behind another on the device, and stands under us_graph, too.
"""

from __future__ import annotations

import functools
import statistics

import cupy
import mla
import numpy as np
from common import Report, arguments, graph_us, host_us

import cumla
from cumla.bench.problem import Sizes
from cumla.bench.rows import rows_of
from cumla.bench.sparse import Decode, DecodeInputs
from cumla.dispatch.call import BFLOAT16

BACKENDS = ("cuda", "numba_cuda")
DECODES = [
    *(Decode(cumla.DSV4_FP8, 64, b, 1, 128, 512, 256, lengths=True) for b in (1, 32, 128)),
    *(Decode(cumla.DSV4_FP8, 64, b, 1, 128, 512, 256) for b in (1, 32, 128)),
    Decode(cumla.DSV4_FP8, 128, 128, 2, 128, 1024, 256),
    Decode(cumla.V32_FP8, 128, 64, 2, 2048),
    Decode(cumla.DSV4_FP8, 64, 1, 1, 16384),
]
PREFILLS = [(512, 64, 640), (576, 128, 640), (512, 64, 2048)]  # values and heads of a query, keys
PREFILL_TOKENS, PREFILL_ROWS, AT_A_TIME = 4096, 32768, 256


def stream_us(call, repeats=5):
    """Median time of a call on the device, of calls that a graph cannot take."""
    call()
    times = []
    for _ in range(repeats):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, stop) * 1e3)
    return statistics.median(times)


def softmax_over(scores, values, out):
    """out [n, h, 512] bfloat16 of scores float32 [n, h, keys] and values float16 [n, keys, 512]."""
    scores -= scores.max(axis=2, keepdims=True)
    weights = cupy.exp(scores)
    weights /= weights.sum(axis=2, keepdims=True)
    out[...] = cupy.matmul(weights.astype(np.float16), values).astype(BFLOAT16)


def gathered(cache, layout, slots):
    """Rows of a DSV4_FP8 cache as float16 [n, keys, 512]."""
    pages, block_size = cache.reshape(len(cache), -1), cache.shape[1]
    page, token = (slots // block_size)[..., None], (slots % block_size)[..., None]
    row = pages[page, token * layout.row_bytes + cupy.arange(layout.row_bytes)]
    scales = pages[page, layout.scale_start(block_size) + token * layout.scale_stride + cupy.arange(layout.num_scales)]
    values = e4m3_table()[row[..., : layout.quantized_dim]].reshape(*scales.shape, layout.scale_tile)
    values *= cupy.exp2(scales.astype(np.float32) - 127)[..., None]
    rope = row[..., layout.rope_offset :].copy().view(BFLOAT16)
    values = values.reshape(*slots.shape, layout.quantized_dim).astype(np.float16)
    return cupy.concatenate([values, rope.astype(np.float16)], axis=-1)


@functools.cache
def e4m3_table():
    from cumla.kernels.reference.rows import E4M3_VALUES

    return cupy.asarray(E4M3_VALUES)


def cupy_decode(x: DecodeInputs) -> None:
    case = x.case
    tokens = case.batch * case.s_q
    rows = [
        gathered(cache.array, case.layout, indices.reshape(tokens, -1))
        for cache, indices in zip(x.caches, x.lists, strict=True)
    ]
    keys = cupy.concatenate(rows, axis=1)
    q = x.q.reshape(tokens, case.heads, -1).astype(np.float16)
    scores = cupy.matmul(q, keys.transpose(0, 2, 1)).astype(np.float32) * case.layout.head_dim**-0.5
    softmax_over(scores, keys, x.out.reshape(tokens, case.heads, 512))


def sparse_decode(report: Report, case: Decode) -> None:
    sizes = Sizes("cuda", beside=("numba_cuda",))
    for row in rows_of(case.problem(sizes)):
        report.add_row(row | {"impl": row["impl"].removeprefix("cumla-")})
    if case.layout is cumla.DSV4_FP8 and not case.lengths:  # it has neither lengths nor a sink
        x = DecodeInputs(case, sizes, 0)
        flop = x.keys * 2 * case.heads * (case.layout.head_dim + 512)
        us = stream_us(lambda: cupy_decode(x))
        report.add(case.op, str(case), "cupy", None, us, None, flop, x.check(x.out))


def cupy_prefill(q, kv, indices, scale, out):
    kv = kv.astype(np.float16)
    for first in range(0, len(q), AT_A_TIME):  # so that what is gathered has room
        part = slice(first, first + AT_A_TIME)
        keys = kv[indices[part]]
        scores = cupy.matmul(q[part].astype(np.float16), keys.transpose(0, 2, 1)).astype(np.float32) * scale
        softmax_over(scores, keys[..., :512], out[part])


def sparse_prefill(report: Report, width: int, heads: int, topk: int) -> None:
    config = f"d{width} h{heads} topk {topk}"
    if not report.wants("sparse_mla_prefill", config):
        return
    rng = cupy.random.default_rng(1)
    q, kv = (rng.standard_normal(s, cupy.float32).astype(BFLOAT16) for s in (
        (PREFILL_TOKENS, heads, width), (PREFILL_ROWS, width)))  # fmt: skip
    indices = rng.integers(0, PREFILL_ROWS, (PREFILL_TOKENS, topk), dtype=cupy.int32)
    out = cupy.empty((PREFILL_TOKENS, heads, 512), BFLOAT16)
    sums = [cupy.empty((PREFILL_TOKENS, heads), np.float32) for _ in range(2)]
    flop = 2 * heads * (width + 512) * PREFILL_TOKENS * topk
    want = cumla.sparse_mla_prefill(q[:3].get(), kv.get(), indices[:3].get(), backend="reference")[0]
    want = want.astype(np.float32)

    def error():
        off = np.abs(out[:3].get().astype(np.float32) - want)
        assert (off <= 1e-3 + 2.01 / 128 * np.abs(want)).all(), f"{config}: off by {off.max()}"
        return float(off.max())

    for backend in BACKENDS:

        def call(backend=backend):
            cumla.sparse_mla_prefill(q, kv, indices, out=(out, *sums), backend=backend)

        call()
        report.add("sparse_mla_prefill", config, backend, host_us(call, 20), graph_us([call]), None, flop, error())
    us = stream_us(lambda: cupy_prefill(q, kv, indices, width**-0.5, out))
    report.add("sparse_mla_prefill", config, "cupy", None, us, None, flop, error())


def merge(report: Report, tokens: int, heads: int) -> None:
    config = f"T {tokens} h{heads}"
    if not report.wants("merge_attn_states", config):
        return
    rng = cupy.random.default_rng(1)
    parts = [rng.standard_normal((tokens, heads, 512), cupy.float32).astype(BFLOAT16) for _ in range(2)]
    lses = [rng.standard_normal((heads, tokens), cupy.float32) for _ in range(2)]
    out, lse = cupy.empty_like(parts[0]), cupy.empty_like(lses[0])
    moved = 3 * out.nbytes

    def cupy_merge():
        lse[...] = cupy.logaddexp(*lses)
        shares = [cupy.exp(x - lse).T[..., None] for x in lses]
        out[...] = (shares[0] * parts[0].astype(np.float32) + shares[1] * parts[1].astype(np.float32)).astype(BFLOAT16)

    for backend in BACKENDS:

        def call(backend=backend):
            cumla.merge_attn_states(out, parts[0], lses[0], parts[1], lses[1], lse, backend=backend)

        report.add("merge_attn_states", config, backend, host_us(call, 50), graph_us([call]), moved)
    report.add("merge_attn_states", config, "cupy", host_us(cupy_merge, 50), graph_us([cupy_merge]), moved)


def dense_decode(report: Report, batch: int) -> None:
    config = f"h{mla.HEADS} b{batch} ctx {mla.CONTEXT}"
    if not report.wants("dense_mla_decode", config):
        return
    rng = np.random.default_rng(0)
    blocks = batch * mla.CONTEXT // mla.BLOCK
    cache, q = mla.random((blocks, mla.BLOCK, 576), rng), mla.random((batch, 1, mla.HEADS, 576), rng)
    table = cupy.asarray(rng.permutation(blocks).reshape(batch, -1).astype(np.int32))
    lens = cupy.full(batch, mla.CONTEXT, np.int32)
    out, lse = cupy.empty((batch, 1, mla.HEADS, 512), BFLOAT16), cupy.empty((batch, mla.HEADS, 1), np.float32)
    flop = 2 * batch * mla.HEADS * mla.CONTEXT * (576 + 512)
    keys = cache[table[0]].reshape(mla.CONTEXT, 1, 576)
    want = mla.exact(q[0, 0], keys, keys[..., :512], mla.SCALE)[0]
    for backend in BACKENDS:
        plan = cumla.DenseDecodePlan()

        def call(backend=backend, plan=plan):
            cumla.dense_mla_decode(
                q, cache, table, lens, softmax_scale=mla.SCALE, max_seqlen=mla.CONTEXT, plan=plan, out=out, lse=lse,
                backend=backend,
            )  # fmt: skip

        call()
        error = mla.largest_error(out[0, 0], want)
        report.add("dense_mla_decode", config, backend, host_us(call, 20), graph_us([call]), None, flop, error)


def main() -> None:
    report = Report(arguments(__doc__).parse_args())
    for case in DECODES:
        if report.wants(case.op, str(case)):
            sparse_decode(report, case)
    for sizes in PREFILLS:
        sparse_prefill(report, *sizes)
    for tokens in (128, 4096):
        merge(report, tokens, 64)
    for batch in (1, 16):
        dense_decode(report, batch)
    report.finish()


if __name__ == "__main__":
    main()

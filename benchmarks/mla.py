"""Dense MLA: decode over paged rows, prefill with projected K and V, and the layer's loop over context.

Peers in the same process where they can be imported: FlashMLA's dense decode (as vLLM ships it), and for prefill
cuDNN's attention through its Torch-free frontend. FLOP count what is attended to: 2 * heads * (d_qk + d_v) for a
query and a key. Attention is checked against float64 on a sample of queries before it is timed; the layer is only timed
(events around a step, which a loop over 16 chunks may not make longer than 1.15 times one pass).
"""

from __future__ import annotations

import cupy
import numpy as np
from common import Report, arguments, graph_us, has_peer, host_us

import cumla
from cumla.bench.problem import Sizes
from cumla.bench.rows import rows_of
from cumla.bench.suites import DenseDecode
from cumla.dispatch.call import BFLOAT16
from cumla.layers.dense import MLACommonImpl
from cumla.metadata import MLACommonMetadataBuilder, MLAConfig

FLASH_MLA = "vllm.third_party.flashmla.flash_mla_interface"
HEADS, BLOCK, CONTEXT = 128, 64, 8192
SCALE = 192**-0.5
SAMPLES = 4


def random(shape, rng, scale=1.0):
    """bfloat16 on the device; large arrays repeat 16 Mi values."""
    count = int(np.prod(shape))
    values = (scale * rng.standard_normal(min(count, 1 << 24), np.float32)).astype(BFLOAT16)
    bits = cupy.asarray(values.view(np.uint16))
    return cupy.resize(bits, shape).view(BFLOAT16)


def exact(q, k, v, scale):
    """q [h, d], k [n, h or 1, d], v [n, h or 1, d_v] -> out [h, d_v] and lse [h], float64 on the device."""
    q, k, v = (x.astype(np.float32).astype(np.float64) for x in (q, k, v))
    scores = scale * (q[None] * k).sum(axis=2) if k.shape[1] > 1 else scale * (k[:, 0] @ q.T)
    top = scores.max(axis=0)
    weights = cupy.exp(scores - top)
    total = weights.sum(axis=0)
    weights /= total
    out = (weights[:, :, None] * v).sum(axis=0) if v.shape[1] > 1 else weights.T @ v[:, 0]
    return out, top + cupy.log(total)


def largest_error(got, want):
    """Checks the bounds of FlashMLA's tests and returns the largest error."""
    error = cupy.abs(got.astype(np.float32) - want)
    assert bool((error <= 1e-3 + 2.01 / 128 * cupy.abs(want)).all()), f"error {float(error.max()):.3g}"
    return float(error.max())


def decode(report):
    """Lengths first; then FlashMLA's own case: bf16 cache, 128 heads, 8,192 tokens of context."""
    for case in (
        DenseDecode(HEADS, batch, CONTEXT, lengths) for lengths in (True, False) for batch in (1, 16, 64, 128)
    ):
        if report.wants(case.op, str(case)):
            for row in rows_of(case.problem(Sizes("cuda"))):
                report.add_row(row)


def prefill(report, heads, new, context, rng):
    """The new tokens among themselves (causal), or new tokens over a context (not causal)."""
    config = f"h{heads} {new} x {context or new}" + ("" if context else " causal")
    if not report.wants("mha_varlen", config):
        return
    keys = context or new
    q, kv = random((new, heads, 192), rng), random((keys, heads, 256), rng)
    k_pe = random((keys, 64), rng)
    cu_q, cu_k = (cupy.array([0, n], np.int32) for n in (new, keys))
    out, lse = cupy.empty((new, heads, 128), BFLOAT16), cupy.empty((heads, new), np.float32)

    def call():
        cumla.mha_varlen(
            q, kv[..., :128], kv[..., 128:], cu_q, cu_k, k_pe=k_pe, softmax_scale=SCALE, causal=not context, out=out,
            lse=lse,
        )  # fmt: skip

    pairs = new * keys if context else new * (new + 1) // 2
    flop = 2 * heads * pairs * (192 + 128)
    moved = 2 * (heads * (new * (192 + 128) + keys * 256) + keys * 64)

    def checked(result):
        k = cupy.concatenate([kv[..., :128].view(np.uint16), cupy.broadcast_to(
            k_pe.view(np.uint16)[:, None], (keys, heads, 64))], axis=2).view(BFLOAT16)  # fmt: skip
        errors = []
        for token in rng.integers(0, new, SAMPLES):
            seen = keys if context else int(token) + 1
            errors.append(
                largest_error(result[int(token)], exact(q[int(token)], k[:seen], kv[:seen, :, 128:], SCALE)[0])
            )
        return max(errors), k

    call()
    error, k = checked(out)
    report.add("mha_varlen", config, "cumla", host_us(call), graph_us([call]), moved, flop, error)
    if not has_peer("cudnn"):
        return
    run, result = cudnn_attention(q, k, kv[..., 128:], SCALE, not context)
    run()
    error, _ = checked(result)
    report.add("mha_varlen", config, "cudnn", host_us(run, 20), graph_us([run]), moved, flop, error)


def cudnn_attention(q, k, v, scale, causal):
    """cuDNN's attention over one sequence, through its frontend (pip install nvidia-cudnn-frontend).

    Returns (call, out) for q [m, h, d], k [n, h, d], v [n, h, d_v], 16-bit CuPy arrays: call() writes out [m, h, d_v].
    """
    import cudnn

    out = cupy.empty((*q.shape[:2], v.shape[2]), q.dtype)
    stats = cupy.empty((1, q.shape[1], q.shape[0], 1), np.float32)
    handle = cudnn.create_handle()
    cudnn.set_stream(handle, cupy.cuda.get_current_stream().ptr)
    half, single = cudnn.data_type.BFLOAT16, cudnn.data_type.FLOAT
    graph = cudnn.pygraph(io_data_type=half, intermediate_data_type=single, compute_data_type=single, handle=handle)

    def layout(array):
        rows, heads, dim = array.shape
        stride_t, stride_h, _ = (stride // array.itemsize for stride in array.strides)
        return {"dim": [1, heads, rows, dim], "stride": [rows * stride_t, stride_h, stride_t, 1]}

    tensors = [graph.tensor(name=name, data_type=half, **layout(x)) for name, x in (("q", q), ("k", k), ("v", v))]
    o, lse = graph.sdpa(
        q=tensors[0],
        k=tensors[1],
        v=tensors[2],
        attn_scale=scale,
        use_causal_mask=causal,
        generate_stats=True,
        name="sdpa",
    )
    o.set_output(True).set_dim(layout(out)["dim"]).set_stride(layout(out)["stride"])
    lse.set_output(True).set_data_type(single)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    workspace = cupy.empty(max(graph.get_workspace_size(), 1), np.uint8)
    arrays = dict(zip((*tensors, o, lse), (x.data.ptr for x in (q, k, v, out, stats)), strict=True))

    def call():
        cudnn.set_stream(handle, cupy.cuda.get_current_stream().ptr)
        graph.execute(arrays, workspace.data.ptr, handle=handle)

    return call, out


def layer(report, heads, new, context, workspace, rng):
    """A prefill step of the whole layer, its context in one chunk or in several."""
    config = f"h{heads} {new} new, ctx {context}, workspace {workspace}"
    if not report.wants("mla_layer prefill", config):
        return
    length = new + context
    blocks = length // BLOCK
    mla = MLAConfig(
        block_size=BLOCK, max_num_batched_tokens=new, max_num_seqs=1, max_model_len=length, compress_ratios=(1,)
    )
    builder = MLACommonMetadataBuilder(mla)
    builder.context_chunk_workspace_size = workspace
    starts, lens = np.array([0, new], np.int32), np.array([length], np.int32)
    table = rng.permutation(blocks).astype(np.int32)[None]
    positions = np.arange(context, length)
    slots = table[0][positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    batch = cumla.metadata.batch.CommonAttentionMetadata(
        cupy.asarray(starts), starts, cupy.asarray(lens), lens, lens - new, 1, new, new, cupy.asarray(table),
        cupy.asarray(slots),
    )  # fmt: skip
    metadata = builder.build(0, batch)
    metadata.context_chunk_workspace = cupy.empty((workspace, 576), BFLOAT16)
    impl = MLACommonImpl(heads, 576, SCALE, kv_b_proj=random((heads * 256, 512), rng, 0.02))
    impl.process_weights_after_loading()
    q, kv_c, k_pe = random((new, heads * 192), rng), random((new, 512), rng), random((new, 64), rng)
    cache, out = random((blocks, BLOCK, 576), rng), cupy.empty((new, heads * 128), BFLOAT16)

    def call():
        impl.forward(q, kv_c, k_pe, cache, metadata, out)

    flop = 2 * heads * (192 + 128) * (new * context + new * (new + 1) // 2)
    call()
    start, stop, times = cupy.cuda.Event(), cupy.cuda.Event(), []
    for _ in range(7):
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, stop) * 1e3)
    report.add("mla_layer prefill", config, "cumla", sorted(times)[3], None, None, flop, None, checked=False)


def main():
    args = arguments(__doc__).parse_args()
    report, rng = Report(args), np.random.default_rng(0)
    decode(report)
    for context in (0, 65536):
        prefill(report, 16, 8192, context, rng)
    for context, workspace in ((0, 65536), (65536, 65536), (65536, 16384), (65536, 4096)):
        layer(report, 16, 8192, context, workspace, rng)
    report.finish()


if __name__ == "__main__":
    main()

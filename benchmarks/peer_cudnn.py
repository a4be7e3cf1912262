"""cuDNN's attention over one sequence, through its Torch-free frontend (pip install nvidia-cudnn-frontend)."""

from __future__ import annotations

import cudnn
import cupy
import numpy as np


def attention(q, k, v, scale, causal):
    """(call, out) for q [m, h, d], k [n, h, d], v [n, h, d_v], 16-bit CuPy arrays: call() writes out [m, h, d_v]."""
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

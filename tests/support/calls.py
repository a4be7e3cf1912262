"""Calls of operations that work, to be made wrong in one argument (errors/): the examples, with outputs."""

import inspect

import numpy as np

import cumla
from cumla.specs.inputs import TINY
from support.lab import BF16
from support.operations import EXAMPLES, arguments_of, rebuilt
from support.refused import Call

BLOCK, NUM_BLOCKS = TINY.block_size, TINY.pages


def ones(dtype, *shape):
    return np.ones(shape, dtype)


def int32(*shape):
    return np.zeros(shape, np.int32)


def _fp8(layout):
    return {"layout": layout, "k_cache": layout.allocate(NUM_BLOCKS, BLOCK)}


def _few_keys():
    """Inputs with few heads, for Numba's simulator."""
    arguments = arguments_of(EXAMPLES["fp8_mqa_logits"], 0)
    few = {name: np.ascontiguousarray(arguments[name][:, :2]) for name in ("q", "weights")}
    return few | {name: arguments[name][:12] for name in ("kv", "kv_scales")}


# Optional arguments, or arguments that backends round differently, which examples leave out.
OTHERS = {
    "fused_indexer_q_rope_quant": ("fused_indexer_q_rope_quant-not-quantised", lambda: {"quantize": True}),
    "fused_indexer_q_rope_quant-mxfp4": ("fused_indexer_q_rope_quant-mxfp4_rows", lambda: {"q_format": "mxfp4"}),
    "fp8_mqa_logits-few": ("fp8_mqa_logits", _few_keys),
    "fp8_paged_mqa_logits-scheduled": (
        "fp8_paged_mqa_logits", lambda: {"schedule_metadata": int32(6, 2), "max_context_len": 10},
    ),
    "top_k_per_row-starts": ("top_k_per_row", lambda: {"row_starts": int32(7)}),
    "build_flashinfer_mixed_sparse_indices-lens": (
        "build_flashinfer_mixed_sparse_indices", lambda: {"decode_compressed_topk_lens": int32(2)},
    ),
    "qnorm_rope_and_insert-DSV4_FP8": ("qnorm_rope_and_insert-DSV4_BF16", lambda: _fp8(cumla.DSV4_FP8)),
    "norm_rope_and_insert-DSV41_FP4": ("norm_rope_and_insert-DSV4_BF16", lambda: _fp8(cumla.DSV41_FP4)),
    "indexer_knorm_rope_and_insert-INDEXER_FP8": (
        "indexer_knorm_rope_and_insert-INDEXER_BF16", lambda: _fp8(cumla.INDEXER_FP8),
    ),
    "compress_and_insert-DSV4_FP8": ("compress_and_insert-DSV4_BF16-ratio-4", lambda: _fp8(cumla.DSV4_FP8)),
    "sparse_mla_decode-pages": (
        "sparse_mla_decode-DSV4_FP8-two-caches",
        lambda: {"k_cache": ones(np.uint8, NUM_BLOCKS, cumla.DSV4_FP8.page_bytes(BLOCK)), "block_size": BLOCK},
    ),
    "sparse_mla_decode-inferred": (
        "sparse_mla_decode-DSV4_FP8-two-caches", lambda: {"layout": None, "extra_layout": None},
    ),
    "sparse_mla_prefill-values": ("sparse_mla_prefill-512", lambda: {"d_v": 512, "softmax_scale": 0.1}),
    "dense_mla_decode-longest": ("dense_mla_decode-bfloat16", lambda: {"max_seqlen": 20, "causal": True}),
    "gather_cache-bfloat16": (
        "gather_cache-e4m3-one-scale",
        lambda: {"src_cache": ones(BF16, NUM_BLOCKS, BLOCK, 576), "dst": ones(BF16, 40, 576), "scale": None},
    ),
}  # fmt: skip
NAMES = sorted([*EXAMPLES, *OTHERS])


def kernels_of(name):
    """The file of kernels of a call."""
    base, _ = OTHERS.get(name, (name, dict))
    return EXAMPLES[base].kernels


def is_attention(name):
    """Calls that take too long in Numba's simulator."""
    return kernels_of(name) in ("sparse_attention", "dense_attention")


def function_of(name):
    """The operation of the example of this name, or of one of OTHERS."""
    return EXAMPLES[OTHERS.get(name, (name, dict))[0]].spec.function


def call(name):  # not cached, as callers write to its arrays
    """The example of this name, or one of OTHERS. Outputs that are returned are passed in, too, filled with ones."""
    base, changes = OTHERS.get(name, (name, dict))
    function = function_of(name)
    arguments = arguments_of(EXAMPLES[base], 0) | changes()
    outputs = [x for x in ("out", "lse") if x in inspect.signature(function).parameters and x not in arguments]
    if outputs:
        results = function(**arguments, backend="reference")
        blank = tuple(np.ones_like(x) for x in results) if isinstance(results, tuple) else np.ones_like(results)
        arguments |= dict(zip(outputs, blank if len(outputs) > 1 else [blank], strict=True))
    return Call(function, arguments)


def with_backend(call, backend):
    """The call on a backend, unless its arguments name another."""
    return Call(call.function, {"backend": backend, **call.arguments})


def put(lab, value, integer=int):
    """An argument in the memory of a backend; an integer as another type, if the type has it."""
    if isinstance(value, tuple | list):
        return rebuilt(value, [put(lab, x) for x in value])
    if isinstance(value, np.ndarray):
        return lab.put(value)
    fits = type(value) is int and (integer is int or np.iinfo(integer).min <= value <= np.iinfo(integer).max)
    return integer(value) if fits else value


def arrays(value):
    """The arrays that an argument is or contains."""
    if isinstance(value, tuple | list):
        return [x for part in value for x in arrays(part)]
    return [value] if hasattr(value, "dtype") and hasattr(value, "strides") and value.shape else []

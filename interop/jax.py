"""cumla's operations inside jax.jit, on CPU and GPU.

    import cumla.interop.jax as ops

    @functools.partial(jax.jit, donate_argnames="cache")
    def step(cache, k, slots, q, indices):
        cache = ops.quantize_and_insert_k_cache(k, cache, slots)
        out, lse = ops.sparse_mla_decode(q, cache, indices)
        return cache, out

Names, order of arguments and meaning are cumla's own. JAX's arrays do not change, so a function gives back
what cumla's writes in place: one array, or a tuple in the order of the arguments. XLA updates it where it
is if the array is donated to the jitted function, and copies it first if it is not. Arguments that are no
arrays are static. Nothing else is copied, and no work leaves XLA's stream.

Shapes and dtypes are inferred and checked when a function is traced; what only the arrays themselves tell is checked
when it runs, before anything is written, and arrives as JAX's own error with cumla's message in it. The operations
take whole batches: jax.vmap is an error, and so is differentiation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.custom_batching import custom_vmap
from jax.experimental.buffer_callback import buffer_callback

from ..arrays import dlpack
from ..dispatch import debug, rehearsal
from .ops import OPS, Op

Static = tuple[tuple[str, Any], ...]


def _traceable(op: Op) -> Callable[..., Any]:
    """`op` as a function of JAX arrays and tracers."""

    @functools.wraps(op.function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = op.with_pair_apart(args, kwargs)
        bound = op.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arrays, static = {}, []
        for name, value in bound.arguments.items():
            if name in op.arrays and value is not None and not isinstance(value, (int, float)):
                arrays[name] = jax.numpy.asarray(value)
            elif isinstance(value, jax.core.Tracer):
                raise TypeError(f"{name}: got a traced value, expected a static one (static_argnames of jax.jit)")
            else:
                static.append((name, value))
        _check(op, tuple((name, x.shape, x.dtype) for name, x in arrays.items()), tuple(static))
        results = _function_of(op, tuple(arrays), tuple(static))(*arrays.values())
        return results[0] if len(results) == 1 else tuple(results)

    call.__doc__ = f"cumla.{op.name} for jax.jit; gives back what that writes.\n\n{op.function.__doc__}"
    return call


@functools.lru_cache(maxsize=4096)
def _check(op: Op, arrays: tuple[tuple[str, tuple[int, ...], Any], ...], static: Static) -> None:
    """Raise what the operation raises for arrays of these shapes and dtypes: when it is traced, not when it runs."""
    with rehearsal.rehearsed():
        ghosts = {name: rehearsal.ghost(shape, _seen_as(name, dtype)) for name, shape, dtype in arrays}
        op.function(**dict(static), **ghosts)


def _seen_as(name: str, dtype: Any) -> Any:
    """What an array's dtype is for the operation. Raises TypeError for 8-bit floats that are not e4m3."""
    dlpack.check_float8_type(name, dtype.name)
    return "uint8" if dtype.name.startswith("float8") else dtype


@functools.cache
def _function_of(op: Op, names: tuple[str, ...], static: Static) -> Callable[..., Any]:
    """The operation with everything but its arrays fixed; the same one each time, as JAX caches by identity."""
    written = [name for name in op.writes if name in names]

    def run_on_host(context: Any, outputs: Any, *inputs: Any) -> None:
        with debug.unchecked():
            op.run(arguments_of(outputs, inputs), tuple(outputs[len(written) :]))

    def run_on_device(outputs: list[Any], inputs: list[Any]) -> None:
        results = outputs[len(written) :]
        scratch = None if op.scratch is None else results.pop()
        with debug.unchecked():
            op.run(arguments_of(outputs, inputs), tuple(results), scratch)

    def arguments_of(outputs: Any, inputs: Any) -> dict[str, Any]:
        arguments = {**dict(static), **dict(zip(names, inputs, strict=True))}
        return arguments | dict(zip(written, outputs, strict=False))  # the same memory as the inputs, but writable

    def on(on_device: bool, *arrays: Any) -> Any:
        arguments = {**dict(static), **dict(zip(names, arrays, strict=True))}
        types = [jax.ShapeDtypeStruct(arguments[name].shape, arguments[name].dtype) for name in written]
        types += [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in op.results(arguments)]
        count = len(types)
        if on_device and op.scratch is not None:
            types.append(jax.ShapeDtypeStruct((op.scratch(arguments),), "uint8"))
        aliases = {names.index(name): i for i, name in enumerate(written)}
        if on_device:
            from .xla import custom_call  # imports Numba

            call = custom_call((op.name, names, static), run_on_device, types, aliases)
        else:
            call = buffer_callback(run_on_host, types, input_output_aliases=aliases)
        return call(*arrays)[:count]

    @custom_vmap
    def function(*arrays: Any) -> Any:
        on_host = functools.partial(on, False)
        if jax.default_backend() == "cpu":
            return on_host(*arrays)
        return jax.lax.platform_dependent(*arrays, cpu=on_host, cuda=functools.partial(on, True))

    @function.def_vmap
    def refuse(axis_size: int, in_batched: Any, *arrays: Any) -> Any:
        raise ValueError(f"{op.name}: got arrays of jax.vmap, expected whole ones: it takes a batch as it is")

    return function


advance_step = _traceable(OPS["advance_step"])
apply_rope = _traceable(OPS["apply_rope"])
build_flashinfer_mixed_sparse_indices = _traceable(OPS["build_flashinfer_mixed_sparse_indices"])
combine_topk_swa_indices = _traceable(OPS["combine_topk_swa_indices"])
compress_and_insert = _traceable(OPS["compress_and_insert"])
compute_global_topk_indices_and_lens = _traceable(OPS["compute_global_topk_indices_and_lens"])
compute_swa_indices_and_lens = _traceable(OPS["compute_swa_indices_and_lens"])
concat_and_cache_mla = _traceable(OPS["concat_and_cache_mla"])
cp_gather_indexer_k_quant_cache = _traceable(OPS["cp_gather_indexer_k_quant_cache"])
dense_mla_decode = _traceable(OPS["dense_mla_decode"])
dequantize_and_gather_k_cache = _traceable(OPS["dequantize_and_gather_k_cache"])
fp8_mqa_logits = _traceable(OPS["fp8_mqa_logits"])
fp8_paged_mqa_logits = _traceable(OPS["fp8_paged_mqa_logits"])
fused_indexer_q_rope_quant = _traceable(OPS["fused_indexer_q_rope_quant"])
fused_q_kv_rmsnorm = _traceable(OPS["fused_q_kv_rmsnorm"])
gather_cache = _traceable(OPS["gather_cache"])
get_paged_mqa_logits_metadata = _traceable(OPS["get_paged_mqa_logits_metadata"])
indexer_k_quant_and_cache = _traceable(OPS["indexer_k_quant_and_cache"])
indexer_knorm_rope_and_insert = _traceable(OPS["indexer_knorm_rope_and_insert"])
indexer_topk = _traceable(OPS["indexer_topk"])
inverse_rope_and_quantize = _traceable(OPS["inverse_rope_and_quantize"])
merge_attn_states = _traceable(OPS["merge_attn_states"])
mha_varlen = _traceable(OPS["mha_varlen"])
qnorm_rope_and_insert = _traceable(OPS["qnorm_rope_and_insert"])
quantize_and_insert_k_cache = _traceable(OPS["quantize_and_insert_k_cache"])
sparse_mla_decode = _traceable(OPS["sparse_mla_decode"])
sparse_mla_prefill = _traceable(OPS["sparse_mla_prefill"])
top_k_per_row = _traceable(OPS["top_k_per_row"])

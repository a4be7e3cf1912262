"""cumla's operations for JAX, inside and outside of jax.jit, on CPU and GPU.

    import cumla
    import cumla.interop.jax as ops

    @functools.partial(jax.jit, donate_argnames="cache")
    def step(cache, k, slots, q, indices):
        cache = ops.quantize_and_insert_k_cache(k, cache, slots, block_size=64)
        out, lse = ops.sparse_mla_decode(q, cache, indices, layout=cumla.DSV4_FP8, block_size=64)
        return cache, out

    cache = jnp.zeros((num_blocks, cumla.DSV4_FP8.page_bytes(64)), jnp.uint8)
    cache, out = step(cache, k, slots, q, indices)
    jax.block_until_ready(out)

Names, order of arguments and meaning are the same as cumla's. JAX's arrays are immutable, so a function returns the
results of cumla's operation, and then the arrays that it writes, in the order of its arguments: one array, or a tuple.
XLA updates an array in place if it is donated to the jitted function, and copies it first if it is not. Arguments other
than arrays are static. Nothing else is copied, and all work stays on XLA's stream. JAX arrays have no strides: V4's
padded pages are raw pages [num_blocks, page_bytes], as above.

A call outside of jax.jit runs a jitted program for its static arguments, shapes and dtypes: the first such call traces
it. The last MOST_PROGRAMS programs are kept. Such a call donates nothing, so a cache that it writes is copied.

NumPy's and other frameworks' arrays, and lists of numbers, are copied to JAX first. Without jax_enable_x64, 64-bit
integers become 32-bit ones, as everywhere in JAX; a value that does not fit is an OverflowError.

In a program of several devices each operation gets whole arrays and is computed on each device. Inside of
jax.shard_map it gets a device's part: cumla.interop.jax_parallel has attention over a sharded context.

Shapes and dtypes are inferred and checked when a function is traced. Checks that need the arrays run with it, before
anything is written; they raise JAX's own error, which contains cumla's message. The operations take whole batches:
jax.vmap is an error, and so is differentiation.

On the CPU a call runs in one of XLA's threads, after the jitted function has returned. A program must block
(jax.block_until_ready) before it exits: an XLA thread that enters Python while the interpreter shuts down aborts the
process. An exit hook of this module waits for the calls of the main thread and for arrays that are alive.
"""

from __future__ import annotations

import functools
import inspect
import numbers
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental.buffer_callback import buffer_callback

from ..arrays import dlpack
from ..dispatch import debug, dry_run
from ..dispatch.values import shown
from . import jax_arguments, jax_exit
from .ops import OPS, Op

Static = tuple[tuple[str, Any], ...]
Described = tuple[tuple[str, tuple[int, ...], Any], ...]  # name, shape and dtype of each array
MOST_PROGRAMS = 256  # of eager calls; the program used longest ago is dropped
MOST_CHECKED = 4096  # kinds of calls, traced or eager, that are not checked again


def _traceable(op: Op) -> Callable[..., Any]:
    """`op` as a function of JAX arrays and tracers."""

    names = list(op.signature.parameters)
    defaults = {name: parameter.default for name, parameter in op.signature.parameters.items()}
    bindable = set[tuple[int, tuple[str, ...]]]()  # numbers of positional arguments, and keywords, that bind

    def bound(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments by name, in the order of the signature."""
        form = len(args), tuple(kwargs)
        if form not in bindable:
            try:
                op.signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{op.name}: {error}, expected {op.name}({', '.join(names)})") from None
            bindable.add(form)
        return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}

    @functools.wraps(op.function)
    def call(*args: Any, **kwargs: Any) -> Any:
        arrays, static = {}, []
        for name, value in bound(*op.with_pair_apart(args, kwargs)).items():
            if name in op.arrays and value is not None and not isinstance(value, (numbers.Number, np.generic)):
                arrays[name] = jax_arguments.array_of(name, value)
            elif isinstance(value, jax.core.Tracer):
                raise TypeError(f"{name}: got a traced value, expected a static one (static_argnames of jax.jit)")
            else:
                static.append((name, value))
        jax_arguments.check_devices(arrays)
        jax_exit.wait_at_exit()
        described, fixed = tuple([(name, x.shape, x.dtype) for name, x in arrays.items()]), tuple(static)
        if not arrays or any(isinstance(x, jax.core.Tracer) for x in arrays.values()):
            _check(op, described, fixed)
            results = _results(op, tuple(arrays), fixed, *arrays.values())
        else:
            _check_static(op, described, fixed)
            results = _program_of(op, described, fixed, _types_of(fixed))(*arrays.values())
        return results[0] if len(results) == 1 else results

    del call.__wrapped__  # the wrapped signature has parameters that this function lacks
    call.__module__, call.__doc__ = __name__, _doc(op)
    call.__signature__ = signature = _signature(op)  # type: ignore[attr-defined]
    parameters = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    call.__annotations__ = parameters | {"return": signature.return_annotation}
    return call


def _signature(op: Op) -> inspect.Signature:
    """The function's parameters under jax.jit, and the arrays that it returns."""
    parameters = [
        parameter.replace(annotation=re.sub(r"\bArray\b", "jax.Array", parameter.annotation))
        for parameter in op.signature.parameters.values()
    ]
    results = inspect.signature(op.function).return_annotation.count("Any")
    counts = [results + len(_always_written(op))]
    for group in op.optional_writes:
        counts.append(counts[-1] + len(group))
    returns = [f"tuple[{', '.join(['jax.Array'] * count)}]" if count > 1 else "jax.Array" for count in counts if count]
    return op.signature.replace(parameters=parameters, return_annotation=" | ".join(returns))


def _always_written(op: Op) -> list[str]:
    return [name for name in op.writes if not any(name in group for group in op.optional_writes)]


def _doc(op: Op) -> str:
    """The operation's documentation without the parameters that do not exist under jax.jit."""
    absent = set(inspect.signature(op.function).parameters) - set(op.signature.parameters)
    lines, skipped = [], False
    for line in inspect.cleandoc(op.function.__doc__ or "").splitlines():
        if line.startswith("    ") and line[4:5].strip():
            skipped = line.split()[0].rstrip(",:") in absent
        elif not line.startswith("    "):
            skipped = False
        if not skipped:
            lines.append(line)
    returned = ""
    if op.writes:
        returned = f" Returns {'its results, then ' if op.outputs else ''}{' and '.join(_always_written(op))} updated"
    for group in op.optional_writes:
        returned += f"; with {' and '.join(group)} given, {'these' if len(group) > 1 else 'this'} too"
    return "\n".join([f"cumla.{op.name} under jax.jit.{returned and returned + '.'}", "", *lines])


@functools.cache
def _without_derivatives(name: str) -> Callable[..., Any]:
    """The arrays unchanged; differentiation through the arrays is an error that names the operation."""

    @jax.custom_jvp
    def same(*arrays: Any) -> Any:
        return arrays

    @same.defjvp
    def refuse(arrays: Any, tangents: Any) -> Any:
        raise ValueError(
            f"{name}: got arrays of jax.grad, jax.jvp or the like, expected arrays without derivatives: it has no "
            "gradient (jax.lax.stop_gradient of its arguments leaves it out, jax.custom_vjp defines one)"
        )

    return same


def _results(op: Op, names: tuple[str, ...], static: Static, *arrays: Any) -> tuple[Any, ...]:
    """The operation's results, then the arrays that it writes."""
    inputs = _without_derivatives(op.name)(*arrays)
    results = jax_arguments.varying_as(inputs, _function_of(op, names, static)(*inputs))
    written = sum(name in names for name in op.writes)
    return (*results[written:], *results[:written])


@functools.lru_cache(maxsize=MOST_PROGRAMS)
def _program_of(op: Op, arrays: Described, static: Static, types: tuple[type, ...]) -> Callable[..., tuple[Any, ...]]:
    """The program that eager calls with arrays of these shapes and dtypes share: they are not traced again.

    Raises the operation's errors for such arrays.
    """
    _checked(op, arrays, static, types)
    names = tuple(name for name, _, _ in arrays)

    def program(*inputs: Any) -> tuple[Any, ...]:
        return _results(op, names, static, *inputs)

    program.__name__ = op.name
    return jax.jit(program)


def _types_of(static: Static) -> tuple[type, ...]:
    """The values' types, for cache keys, because True equals 1 and 64.0 equals 64."""
    return tuple([value.__class__ for _, value in static])


def _check(op: Op, arrays: Described, static: Static) -> None:
    """Raise the operation's errors for arrays of these shapes and dtypes when it is traced, not when it runs."""
    _check_static(op, arrays, static)
    _checked(op, arrays, static, _types_of(static))


def _check_static(op: Op, arrays: Described, static: Static) -> None:
    """Raise the operation's errors for static values that cannot be hashed."""
    try:
        hash(static)
    except TypeError:
        _dry_run(op, arrays, static)  # raises for a value of this kind, unless the operation takes it
        raise TypeError(f"{op.name}: got {shown(dict(static))}, expected values that can be hashed") from None


@functools.lru_cache(maxsize=MOST_CHECKED)
def _checked(op: Op, arrays: Described, static: Static, types: tuple[type, ...]) -> None:
    """`_dry_run`, cached by arguments and their types."""
    _dry_run(op, arrays, static)


def _dry_run(op: Op, arrays: Described, static: Static) -> None:
    with dry_run.dry_running():
        fake_arrays = {name: dry_run.fake_array(shape, _seen_as(name, dtype)) for name, shape, dtype in arrays}
        op.function(**dict(static), **fake_arrays)


def _seen_as(name: str, dtype: Any) -> Any:
    """An array's dtype as the operation receives it. Raises TypeError for 8-bit floats that are not e4m3."""
    dlpack.check_float8(name, dtype.name)
    return "uint8" if dtype.name.startswith("float8") else dtype


@functools.lru_cache(maxsize=MOST_CHECKED)
def _function_of(op: Op, names: tuple[str, ...], static: Static) -> Callable[..., Any]:
    """The operation with all arguments except arrays fixed; the same object each time, as JAX caches by identity."""
    written = [name for name in op.writes if name in names]

    def run_on_host(context: Any, outputs: Any, *inputs: Any) -> None:
        with debug.unchecked():
            op.write(arguments_of(outputs, inputs), tuple(outputs[len(written) :]))

    def run_on_device(outputs: list[Any], inputs: list[Any]) -> None:
        results = outputs[len(written) :]
        arguments = arguments_of(outputs, inputs)
        scratch = results.pop() if op.scratch_bytes(arguments) else None
        with debug.unchecked():
            op.write(arguments, tuple(results), scratch)

    def arguments_of(outputs: Any, inputs: Any) -> dict[str, Any]:
        arguments = {**dict(static), **dict(zip(names, inputs, strict=True))}
        return arguments | dict(zip(written, outputs, strict=False))  # the same memory as the inputs, but writable

    def on(on_device: bool, *arrays: Any) -> Any:
        arguments = {**dict(static), **dict(zip(names, arrays, strict=True))}
        types = [jax.ShapeDtypeStruct(arguments[name].shape, arguments[name].dtype) for name in written]
        types += [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in op.results(arguments)]
        count = len(types)
        size = op.scratch_bytes(arguments) if on_device else 0
        if size:
            types.append(jax.ShapeDtypeStruct((size,), "uint8"))
        aliases = {names.index(name): i for i, name in enumerate(written)}
        if on_device:
            from .xla import custom_call  # imports Numba

            call = custom_call((op.name, names, static), run_on_device, types, aliases)
        else:
            call = buffer_callback(run_on_host, types, input_output_aliases=aliases)
        return call(*arrays)[:count]

    @custom_vmap
    def function(*arrays: Any) -> Any:
        if jax.default_backend() == "cpu":
            return jax_exit.waited_for(on(False, *arrays))
        # The exit hook does not wait for programs that may run on a GPU: JAX would dispatch them from Python.
        on_host, on_device = (functools.partial(on, device) for device in (False, True))
        return jax.lax.platform_dependent(*arrays, cpu=on_host, cuda=on_device)

    @function.def_vmap
    def refuse(axis_size: int, in_batched: Any, *arrays: Any) -> Any:
        raise ValueError(f"{op.name}: got arrays of jax.vmap, expected whole ones: it takes a batch in one call")

    return function


globals().update({name: _traceable(op) for name, op in OPS.items()})


def __getattr__(name: str) -> Callable[..., Any]:
    """For type checkers: the module has the names of OPS."""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

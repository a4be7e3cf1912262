"""Host time of a call by the framework of its arrays: on a device, until all is queued.

`launch` is the driver's part: the same kernels launched again with arguments that are packed already. Under jax.jit the
call is one of a jitted function that does nothing else; `jax.jit, identity` hands the same arrays through.
`JAX operator` is the same function outside of jax.jit, `JAX` cumla's own function. A decode is a layer's, with lengths;
FlashMLA makes it too, with the same tensors.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import cumla
from cumla.arrays import dlpack
from cumla.arrays.memory import to_host
from cumla.bench.measure import Thunk
from cumla.bench.peers import FLASH_MLA_DECODE, has_peer
from cumla.bench.problem import BLOCK, Calls, Problem, Sizes, kind_of
from cumla.bench.sparse import Decode, DecodeInputs
from cumla.dispatch import backends
from cumla.layout import DSV4_FP8

INSERT, MAP, DECODE = "insert", "map", "decode"


@dataclass
class Operands:
    """A function by name, its arguments, and the arguments that it writes. inputs: a decode's."""

    function: str
    positional: list[Any]
    named: dict[str, Any] = field(default_factory=dict)
    written: dict[str, Any] = field(default_factory=dict)
    inputs: DecodeInputs | None = None

    def call(self, module: Any, convert: Any = None, plain: bool = False, **options: Any) -> Thunk:
        """The call of a module's function with its arrays converted; `plain` without outputs given."""
        convert = convert or (lambda x: x)
        named = {name: convert(x) for name, x in (self.named | ({} if plain else self.written)).items()}
        return functools.partial(getattr(module, self.function), *map(convert, self.positional), **named, **options)


@dataclass(frozen=True)
class FrameworkCall:
    """A call with its outputs and its plan given, and a plain call without them, for `batch` tokens."""

    name: str
    batch: int
    heads: int = 64
    topk: int = 512  # of the map, and of a decode's second cache
    window: int = 128

    @property
    def op(self) -> str:
        return f"call: {self.name}"

    def __str__(self) -> str:
        if self.name == DECODE:
            return f"h{self.heads} b{self.batch} {self.window}+{self.topk}, {kind_of(True)}"
        return f"T{self.batch}" + (f" {self.topk}" if self.name == MAP else "")

    def problem(self, sizes: Sizes) -> Problem:
        x, moved = self.operands(sizes)
        plan: dict[str, Any] = {"plan": cumla.DecodePlan()} if self.name == DECODE else {}
        found, functions = {sizes.xp.__name__: x.call(cumla, backend=sizes.backend, **plan)}, {}
        if x.written:
            found[f"{sizes.xp.__name__}, plain"] = x.call(cumla, plain=True, backend=sizes.backend)
        if sizes.backend == "cuda":
            found["launch"] = _launches(found[sizes.xp.__name__])
        default = sizes.backend == backends.default(sizes.on_device)  # which operators of a framework's own call
        if has_peer("torch") and (not sizes.on_device or _torch_has_a_device()):
            plan = {"plan": cumla.DecodePlan()} if plan else {}
            found["torch"] = x.call(cumla, _tensor, backend=sizes.backend, **plan)
            if x.written:
                found["torch, plain"] = x.call(cumla, _tensor, plain=True, backend=sizes.backend)
            if default:
                found["torch operator"] = x.call(importlib.import_module("cumla.interop.torch"), _tensor)
        if has_peer("jax") and default:
            found |= _of_jax(x, sizes)
        if x.inputs is not None and sizes.with_peers and (peer := x.inputs.flash_mla()) is not None:
            found["flash_mla"], functions["flash_mla"] = peer, FLASH_MLA_DECODE
        impls: dict[str, tuple[str, Calls]] = {name: ("", [call]) for name, call in found.items()}
        return Problem(
            self.op, str(self), impls, moved, check=_check(x.inputs), clear=x.inputs.clear if x.inputs else None,
            functions=functions, unchecked=("launch", "jax.jit", "jax.jit, identity", "JAX operator", "JAX"),
            from_host=True,
        )  # fmt: skip

    def operands(self, sizes: Sizes) -> tuple[Operands, int]:
        """And how many bytes the call moves."""
        arrays, xp, batch = sizes.inputs(), sizes.xp, self.batch
        if self.name == INSERT:
            slots = xp.asarray(arrays.rng.permutation(sizes.slots)[:batch])
            positional = [arrays.rows(batch, 512), arrays.cache(DSV4_FP8), slots]
            return Operands("quantize_and_insert_k_cache", positional), batch * (1024 + DSV4_FP8.token_bytes)
        if self.name == MAP:
            columns = -(-sizes.context // BLOCK)
            positional = [
                arrays.integers(columns * BLOCK, batch, self.topk), xp.arange(batch, dtype=np.int32),
                arrays.integers(sizes.slots // BLOCK, batch, columns), BLOCK, xp.ones(batch, np.bool_),
            ]  # fmt: skip
            out = xp.empty((batch, self.topk), np.int32), xp.empty(batch, np.int32)
            return Operands("compute_global_topk_indices_and_lens", positional, {}, {"out": out}), 8 * batch * self.topk
        x = DecodeInputs(Decode(DSV4_FP8, self.heads, batch, 1, self.window, self.topk, lengths=True), sizes, 0)
        named = {name: value for name, value in x.arguments.items() if value is not None}
        positional = [named.pop(name) for name in ("q", "k_cache", "indices")]
        moved = x.keys * DSV4_FP8.token_bytes + batch * self.heads * 2048
        return Operands("sparse_mla_decode", positional, named, x.outputs, x), moved


def _check(inputs: DecodeInputs | None) -> Callable[[Any], float] | None:
    """The error of a decode's output, which may come with its lse."""
    if inputs is None:
        return None
    return lambda result: inputs.check(result[0] if isinstance(result, (tuple, list)) else result)


def _torch_has_a_device() -> bool:
    return bool(importlib.import_module("torch").cuda.is_available())


def _tensor(x: Any) -> Any:
    importlib.import_module("torch")  # which must be there for arrays to become its tensors
    if isinstance(x, tuple):
        return tuple(map(_tensor, x))
    return dlpack.give(x, "torch") if hasattr(x, "shape") else x


def _of_jax(x: Operands, sizes: Sizes) -> dict[str, Thunk]:
    """JAX's arrays, whose results are allocated; nothing where its device is another."""
    import jax

    if (jax.default_backend() == "gpu") != sizes.on_device:
        return {}
    import cumla.interop.jax as operations

    places = list(map(str, range(len(x.positional))))  # keys of a pytree are of one type
    every = dict(zip(places, x.positional, strict=True)) | x.named
    arrays = {key: jax.device_put(to_host(a)) for key, a in every.items() if hasattr(a, "shape")}
    donated = {"1": arrays.pop("1")} if x.inputs is None and not x.written else {}  # the cache of an insert

    def call(module: Any, donated: Any, arrays: Any) -> Any:
        found = every | donated | arrays
        named = {name: found[name] for name in x.named}
        return getattr(module, x.function)(*(found[place] for place in places), **named)

    def threaded(function: Callable[..., Any]) -> Thunk:
        """Calls in a row, each with the cache that the one before it gave back."""

        def run() -> None:
            result = function(donated, arrays)
            if donated:
                donated["1"] = result
            if not sizes.on_device:
                jax.block_until_ready(result)

        return run

    jitted = jax.jit(functools.partial(call, operations), donate_argnums=0)
    identity = jax.jit(lambda donated, arrays: donated.get("1", arrays["0"]), donate_argnums=0)
    eager = threaded(functools.partial(call, operations))
    found = {"jax.jit, identity": threaded(identity), "jax.jit": threaded(jitted), "JAX operator": eager}
    return found if donated else {"JAX": functools.partial(call, cumla, donated, arrays), **found}


def _launches(call: Thunk) -> Thunk:
    """The kernels that a call launches, launched again."""
    from cumla.bench.measure import cupy
    from cumla.kernels.cuda.launch import PreparedLaunches, recorded_launches

    call()
    with recorded_launches() as launches:
        call()
    prepared = PreparedLaunches([(launch, ()) for launch in launches], cupy().cuda.runtime.getDevice())
    return lambda: prepared.launch((), cupy().cuda.get_current_stream().ptr)


def frameworks(sizes: Sizes) -> Iterator[FrameworkCall]:
    for batch in sizes.batch:
        yield FrameworkCall(INSERT, batch)
        yield FrameworkCall(DECODE, batch, sizes.heads, sizes.extra, sizes.topk)

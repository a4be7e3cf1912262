"""cumla's operations for torch.compile: torch.library operators with their mutations marked.

    import cumla.interop.torch as ops

    @torch.compile(fullgraph=True)
    def step(cache, k, slots, q, indices):
        ops.quantize_and_insert_k_cache(k, cache, slots)
        return ops.sparse_mla_decode(q, cache, indices)

Names, order of arguments and meaning are the same as cumla's. Without torch.compile call cumla's functions, which
take tensors directly and cost less; these operators are for code that a compiler traces. Torch allocates the results,
so that they are in the pool of torch's graph capture (torch.cuda.graph, mode="reduce-overhead"); with out= (and lse=)
nothing is allocated. A scale is a tensor here. The operators are torch.ops.cumla.*, and *_out with passed results.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from .ops import OPS, Op

NAMESPACE = "cumla"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")  # torch.library.custom_op takes 30 us more a call
# Types of an operator's schema by a parameter's annotation. A cache format is passed by name.
SCHEMA_TYPES = {
    "int": "SymInt", "bool": "bool", "str": "str", "float": "float", "CacheLayout | str": "str", "QueryFormat": "str",
}  # fmt: skip


def _compilable(op: Op) -> Callable[..., Any]:
    """Define the operators of `op`. Returns a function that calls them, with the arguments of cumla's function."""
    operator = _define(op, op.name)
    into = _define(op, f"{op.name}_out", takes_results=True) if op.outputs else None
    outputs = op.outputs

    @functools.wraps(op.function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in ("layout", "extra_layout"):
            if kwargs.get(name) is not None:
                kwargs[name] = getattr(kwargs[name], "name", kwargs[name])
        args, kwargs = op.with_pair_apart(args, kwargs)
        if into is None:
            return operator(*args, **kwargs)
        outs = [kwargs.pop(name, None) for name in outputs]
        if all(result is None for result in outs):
            return operator(*args, **kwargs)
        if any(result is None for result in outs):
            raise ValueError(f"{op.name}: got only some of {', '.join(outputs)}, expected all or none")
        several = len(outputs) == 1 and isinstance(outs[0], (tuple, list))
        results = tuple(outs[0] if several else outs)
        into(*results, *args, **kwargs)
        return _returned(results)

    call.__doc__ = f"cumla.{op.name} for torch.compile.\n\n{op.function.__doc__}"
    return call


def _define(op: Op, name: str, takes_results: bool = False) -> Any:
    """Register torch.ops.cumla.<name> with its kernel and its fake kernel. Returns the operator."""
    result_names = [f"result_{i}" for i in range(_num_results(op))] if takes_results else []
    names = [*result_names, *op.signature.parameters]

    def named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def empty(arguments: dict[str, Any]) -> tuple[Any, ...]:
        like = arguments[next(iter(op.arrays))]
        return tuple(like.new_empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in op.results(arguments))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        arguments = named(args, kwargs)
        _check_required(op, arguments)
        results = tuple(arguments.pop(name) for name in result_names) if takes_results else empty(arguments)
        like = arguments[next(iter(op.arrays))]
        scratch = None
        size = op.scratch_bytes(arguments) if like.is_cuda else 0
        if size:
            scratch = like.new_empty(size, dtype=torch.uint8)
        op.write(arguments, results, scratch)
        return None if takes_results else _returned(results)

    def fake(*args: Any, **kwargs: Any) -> Any:
        arguments = named(args, kwargs)
        _check_required(op, arguments)
        _check_meta({name: arguments[name] for name in (*result_names, *op.arrays) if arguments.get(name) is not None})
        return None if takes_results else _returned(empty(arguments))

    LIBRARY.define(name + _schema(op, result_names), tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _check_required(op: Op, arguments: dict[str, Any]) -> None:
    """Raise TypeError for None in place of an array, which a schema's Tensor accepts."""
    for name in op.arrays:
        if not op.optional(name) and arguments.get(name) is None:
            raise TypeError(f"{name}: got None, expected a tensor")


def _check_meta(tensors: dict[str, Any]) -> None:
    """Raise ValueError if some tensors, but not all, are on the device "meta", which has no values."""
    first, *names = tensors
    for name in names:
        if (tensors[name].device.type == "meta") != (tensors[first].device.type == "meta"):
            raise ValueError(
                f"{name}: got a tensor on {tensors[name].device}, expected it on {tensors[first].device} as {first}"
            )


def _returned(results: tuple[Any, ...]) -> Any:
    """The return value of a call: None, a single array, or a tuple."""
    return None if not results else results[0] if len(results) == 1 else results


def _num_results(op: Op) -> int:
    """The number of arrays that an operation returns, by its return annotation."""
    annotation = inspect.signature(op.function).return_annotation
    return 0 if annotation == "None" else annotation.count("Any")


def _schema(op: Op, result_names: list[str]) -> str:
    """The operator's schema: first the passed results, then the parameters, by position or by name."""
    aliases = iter("abcdefgh")
    parts = [f"Tensor({next(aliases)}!) {name}" for name in result_names]
    for name, parameter in op.signature.parameters.items():
        if name in op.arrays:
            optional = op.optional(name)
            kind = f"Tensor({next(aliases)}!)" if name in op.writes else "Tensor"
        else:
            plain = parameter.annotation.removesuffix(" | None")
            optional, kind = plain != parameter.annotation, SCHEMA_TYPES[plain]
        parts.append(f"{kind}{'?' if optional else ''} {name}{_default(parameter)}")
    count = 0 if result_names else _num_results(op)
    return f"({', '.join(parts)}) -> ({', '.join(['Tensor'] * count)})"


def _default(parameter: inspect.Parameter) -> str:
    if parameter.default is inspect.Parameter.empty:
        return ""
    default = parameter.default
    return f'="{default}"' if isinstance(default, str) else f"={default}"


globals().update({name: _compilable(op) for name, op in OPS.items()})


def __getattr__(name: str) -> Callable[..., Any]:
    """For type checkers: the module has the names of OPS."""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Reads and checks the entries of a config.json that the configurations of all models have."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ..dispatch.values import check_integers, check_kind, in_float32, shown
from ..ops.sparse_attention import MAX_HEADS
from .rope import checked_scaling

MOST_THETA = 1e30  # wavelengths are float32, also after YaRN stretches them


def numbers_of(kind: type[Any], config: Mapping[str, Any], besides: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a configuration class from a config.json, except the fields in `besides`.

    Raises ValueError if config.json lacks a field that has no default.
    """
    fields = [field for field in dataclasses.fields(kind) if field.name not in besides]
    for field in fields:
        if field.default is dataclasses.MISSING and field.name not in config:
            raise ValueError(f"{field.name}: the configuration has none, expected a number")
    return {field.name: config[field.name] for field in fields if field.name in config}


def check_fixed(config: Mapping[str, Any], **expected: Any) -> None:
    """Raise ValueError for an entry that is present with another value, TypeError unless config is a mapping."""
    check_kind(Mapping, config=config)
    for name, value in expected.items():
        if config.get(name, value) != value:
            raise ValueError(f"{name}: got {config[name]!r}, expected {value!r}")


def check_absent(config: Mapping[str, Any], why: str, *names: str) -> None:
    """Raise ValueError for an entry of a config.json that belongs to another model."""
    for name in names:
        if config.get(name) is not None:
            raise ValueError(f"{name}: got {shown(config[name])}, expected none: {why}")


def check_list(name: str, given: Any, layers: int) -> None:
    """Raise TypeError or ValueError unless it is a list with an entry for each layer. It may have further entries."""
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        raise TypeError(f"{name}: got {shown(given)} of type {type(given).__name__}, expected a list")
    if len(given) < layers:
        raise ValueError(f"{name}: got {len(given)} entries, expected one for each of {layers} layers")


def check_numbers(config: Any) -> None:
    """Raise TypeError or ValueError for a size that is not a positive integer, for more heads than attention supports,
    for an epsilon that is not positive, or for a base of RoPE that is not above 1.

    config  a dataclass whose integers are sizes, and whose `rope_scaling` is None or YaRN's parameters
    """
    for field in dataclasses.fields(config):
        name, value = field.name, getattr(config, field.name)
        if field.type == "int":
            check_integers(1, MAX_HEADS if name == "num_attention_heads" else 2**31 - 1, **{name: value})
        elif field.type == "float":
            number = in_float32(name, value, positive=True)
            if name.endswith("rope_theta") and not 1 < number <= MOST_THETA:
                raise ValueError(f"{name}: got {shown(value)}, expected more than 1 and at most {MOST_THETA:g}")
    checked_scaling(config.rope_scaling)


def rope_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """RoPE's parameters in a config.json, under either name; None if it has none."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name)
        if rope is not None:
            check_kind(Mapping, **{name: rope})
            if rope:
                return dict(rope)
    return None

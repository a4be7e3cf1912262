"""What the configurations of models have in common: read from a config.json, and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..dispatch.values import check_integers, check_kind, finite
from .rope import checked_scaling


def numbers_of(kind: type[Any], config: Mapping[str, Any], besides: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a configuration class that a config.json has, without those in `besides`.

    Raises TypeError for a config that is no mapping, ValueError for one without a field that has no default.
    """
    check_kind(Mapping, config=config)
    fields = [field for field in dataclasses.fields(kind) if field.name not in besides]
    for field in fields:
        if field.default is dataclasses.MISSING and field.name not in config:
            raise ValueError(f"{field.name}: the configuration has none, expected a number")
    return {field.name: config[field.name] for field in fields if field.name in config}


def check_fixed(config: Mapping[str, Any], **expected: Any) -> None:
    """Raise ValueError for an entry of a config.json that is there and not what cumla serves."""
    for name, value in expected.items():
        if config.get(name, value) != value:
            raise ValueError(f"{name}: got {config[name]!r}, expected {value!r}")


def check_numbers(config: Any) -> None:
    """Raise TypeError or ValueError for a size that is no positive integer, a number below 0, a base of RoPE below 1.

    config  a dataclass whose integers are sizes, and whose `rope_scaling` is None or YaRN's numbers
    """
    for field in dataclasses.fields(config):
        name, value = field.name, getattr(config, field.name)
        if field.type == "int":
            check_integers(1, **{name: value})
        elif field.type == "float" and finite(name, value) < 0:
            raise ValueError(f"{name}: got {value}, expected at least 0")
        elif name.endswith("rope_theta") and value < 1:
            raise ValueError(f"{name}: got {value}, expected at least 1")
    checked_scaling(config.rope_scaling)


def rope_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """RoPE's parameters of a config.json, under either name; None without."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if rope is None:
        return None
    check_kind(Mapping, rope_parameters=rope)
    return dict(rope)

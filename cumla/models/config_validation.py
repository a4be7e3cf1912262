"""Reads and checks the entries of a config.json that all models share, and the fields of what is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..dispatch.values import check_choice, check_flags, check_integers, check_kind, in_float32, shown
from ..ops.sparse_attention import MAX_HEADS
from .rope import checked_scaling

MOST_LAYERS = 1 << 16
MOST = {"heads": MAX_HEADS, "num_attention_heads": MAX_HEADS, "num_hidden_layers": MOST_LAYERS}
MOST_THETA = 1e30  # wavelengths are float32, also after YaRN stretches them
# Prefixes of the names of entries that change attention, and names with such a prefix that do not change it.
ATTENTION = (
    "attention", "attn", "candidate", "clip_qkv", "compress", "dsa_", "dual_chunk", "full_attention", "gated_att",
    "gated_mla", "global_attn", "head_dim", "head_size", "index", "is_causal", "kv_", "layer_types", "learnable_sink",
    "lerope", "linear_att", "llama_4_scaling", "local_att", "local_window", "logit_soft", "logits_soft",
    "max_window_layers", "mla_", "moba", "mrope", "no_rope", "nope", "nsa_", "num_key_value", "num_kv_heads", "o_bias",
    "o_groups", "o_lora", "partial_rotary", "position_embedding_type", "q_lora", "qk_", "qkv_", "query_pre_attn",
    "rope", "rotary", "sink", "sliding", "softmax", "ssmax", "swa_", "use_alibi", "use_att", "use_bidirectional",
    "use_gated", "use_mla", "use_mrope", "use_nope", "use_qk", "use_rope", "use_sink", "use_sliding", "v_head",
    "window",
)  # fmt: skip
COMPUTED = {"is_causal": True, "use_mla": True}  # by all models' layers
NEUTRAL = {
    "attention_dropout", "attn_implementation", "attn_implementation_internal",
    "index_skip_topk_offset",  # without effect while index_topk_freq is 1
}  # fmt: skip


def names_of(kind: type[Any]) -> tuple[str, ...]:
    """The fields of a configuration class."""
    return tuple(field.name for field in dataclasses.fields(kind))


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


def check_all_read(config: Mapping[str, Any], read: Iterable[str], computed: Mapping[str, Any]) -> None:
    """Raise ValueError for an entry of a config.json that changes attention and is not read; the message names it.

    Args:
        read: names of the entries that are read
        computed: other entries: the value with which the layers compute, or a `Choice` of such values, or `Each`

    Entries whose names begin with a prefix in ATTENTION change attention, unless they are NEUTRAL. An entry that is
    None counts as absent.
    """
    known, computed = NEUTRAL.union(read), {**COMPUTED, **computed}
    for name, value in config.items():
        if value is None or name in known or not str(name).startswith(ATTENTION):
            continue
        if name not in computed:
            raise ValueError(f"{name}: got {shown(value)}, expected none: it changes attention, and is not served")
        if not _says(value, computed[name]):
            raise ValueError(f"{name}: got {shown(value)}, expected {computed[name]!r}")


class Choice(tuple[Any, ...]):
    """Values of an entry that all mean the same."""

    def __repr__(self) -> str:
        return " or ".join(map(repr, self))


@dataclasses.dataclass(frozen=True, repr=False)
class Each:
    """A list, or a string, that says the same of each layer."""

    value: str

    def __repr__(self) -> str:
        return f"{self.value!r} for each layer"


def _says(value: Any, expected: Any) -> bool:
    if isinstance(expected, Choice):
        return any(_says(value, other) for other in expected)
    if isinstance(expected, Each):
        return isinstance(value, Sequence) and all(item == expected.value for item in value)
    return bool(value == expected)


# V3.2 and V4: every layer selects for itself, among all of its keys.
OWN_SELECTION = {
    "index_topk_freq": 1, "index_topk_pattern": Each("F"), "indexer_types": Each("full"), "index_kpool": 1,
}  # fmt: skip


def check_same(name: str, value: Any, expected: Any) -> None:
    """Raise ValueError for an entry that contradicts the entry that is read in its place."""
    if value is not None and value != expected:
        raise ValueError(f"{name}: got {shown(value)}, expected {shown(expected)}, as another entry says")


def check_rotated(rope_dim: int, head_dim: int, *parts: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError for a partial_rotary_factor that does not rotate rope_dim values of a head."""
    for part in parts:
        fraction = part.get("partial_rotary_factor")
        if fraction is not None and int(head_dim * in_float32("partial_rotary_factor", fraction)) != rope_dim:
            raise ValueError(f"partial_rotary_factor: got {shown(fraction)}, expected {rope_dim / head_dim}")


def check_absent(config: Mapping[str, Any], why: str, *names: str) -> None:
    """Raise ValueError for an entry of a config.json that belongs to another model."""
    for name in names:
        if config.get(name) is not None:
            raise ValueError(f"{name}: got {shown(config[name])}, expected none: {why}")


def check_list(name: str, entries: Any, layers: int) -> None:
    """Raise TypeError or ValueError unless `entries` is a list with an entry for each layer, and perhaps more."""
    if isinstance(entries, (str, bytes)) or not isinstance(entries, Sequence):
        raise TypeError(f"{name}: got {shown(entries)} of type {type(entries).__name__}, expected a list")
    if len(entries) < layers:
        raise ValueError(f"{name}: got {len(entries)} entries, expected one for each of {layers} layers")


def check_fields(config: Any, choices: Mapping[str, tuple[Any, ...]], optional: tuple[str, ...]) -> None:
    """Raise TypeError or ValueError for a field of a dataclass that no layer has.

    Args:
        config: its integers are sizes, its floats epsilons, scales and bases of RoPE, `rope_scaling` None or YaRN's
        choices: the values of other fields
        optional: sizes that may be 0
    """
    for field in dataclasses.fields(config):
        name, value = field.name, getattr(config, field.name)
        if name in choices:
            check_choice(choices[name], **{name: value})
        elif field.type == "int":
            check_integers(0 if name in optional else 1, MOST.get(name, 2**31 - 1), **{name: value})
        elif field.type == "bool":
            check_flags(**{name: value})
        elif field.type == "float":
            number = in_float32(name, value, positive=True)
            if name.endswith("rope_theta") and not 1 < number <= MOST_THETA:
                raise ValueError(f"{name}: got {shown(value)}, expected more than 1 and at most {MOST_THETA:g}")
    checked_scaling(config.rope_scaling)


def rope_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """RoPE's parameters in a config.json, under either name; None without them.

    Raises ValueError if a config.json has both names and their values differ.
    """
    found = []
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name)
        if rope is not None:
            check_kind(Mapping, **{name: rope})
            if rope:
                found.append(dict(rope))
    if len(found) == 2:  # the older name has no base, and an older name of the type
        new, old = ({"type": x.get("rope_type"), **x, "rope_type": None} for x in found)
        free = {"rope_theta", "partial_rotary_factor"} - old.keys()
        for key in (new.keys() | old.keys()) - free:
            check_same(f"rope_scaling.{key}", old.get(key, "none"), new.get(key, "none"))
    return found[0] if found else None


def theta_of(name: str, rope: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The base of RoPE among RoPE's parameters, as the field `name`; empty if the parameters lack it.

    Raises ValueError if config.json has another base by that name.
    """
    theta = rope.get("rope_theta")
    if theta is None:
        return {}
    check_same(name, config.get(name), theta)
    return {name: theta}

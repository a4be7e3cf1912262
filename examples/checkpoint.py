"""The weights of a checkpoint outside attention, under transformers' names and checked against the configuration.

Checkpoints name a layer's experts "mlp.experts.gate_up_proj" or, one by one, "mlp.experts.7.up_proj.weight" as in
transformers, or "ffn.experts.7.w3.weight" as in the authors' code. Scales of FP8 matrices are separate tensors.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tiny_checkpoint

from cumla.layers.dense import BlockQuantizedWeight
from cumla.models.weights import SCALE_NAMES, plain

PUBLISHED = (
    (r"^embed\.", "embed_tokens."), (r"^head\.", "lm_head."), (r"^hc_head_(\w+)$", r"hc_head.hc_\1"),
    (r"\.hc_(attn|ffn)_(\w+)$", r".\1_hc.\2"), (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."), (r"\.ffn\.", ".mlp."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"), (r"\.w1\.", ".gate_proj."), (r"\.w2\.", ".down_proj."),
    (r"\.w3\.", ".up_proj."),
)  # fmt: skip
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
OPTIONAL = ("gate.e_score_correction_bias", "gate.tid2eid")  # tensors of routers: by score, and by table
ATTENTION = (".self_attn.", ".attn.")


def check_served(config: Mapping[str, Any], **served: Any) -> None:
    """Raise ValueError if the examples do not support the value of an entry of config.json."""
    for name, value in {"hidden_act": "silu", "mlp_bias": False, "moe_layer_freq": 1, **served}.items():
        choices = value if isinstance(value, tuple) else (value,)
        if config.get(name, choices[0]) not in choices:
            raise ValueError(f"{name}: got {config[name]!r}, expected {' or '.join(map(repr, choices))}")


def load(tensors: Mapping[str, Any], config: dict, xp: Any) -> dict[str, Any]:
    """float32 arrays by transformers' names, experts in one array; tables of experts unchanged.

    Raises KeyError or ValueError for a weight that is missing, unknown, or whose shape differs from `config`.
    """
    found = dict(_merged(dict(_outside_attention(tensors, config)), config.get("n_routed_experts", 0)))
    embedding = found.get("model.embed_tokens.weight")
    if config.get("tie_word_embeddings") and embedding is not None:
        found["lm_head.weight"] = embedding
    shapes = tiny_checkpoint.shapes_outside_attention(config)
    for name, shape in shapes.items():
        if name not in found:
            raise KeyError(f"{name}: the checkpoint lacks it")
        if found[name].shape != shape:
            raise ValueError(f"{name}: got shape {found[name].shape}, expected {shape}")
    for name in found.keys() - shapes.keys():
        if not name.endswith(OPTIONAL):
            raise ValueError(f"{name}: the checkpoint has it, and such a model does not")
    return {name: xp.asarray(a, None if name.endswith("tid2eid") else np.float32) for name, a in found.items()}


def transformers_name(name: str) -> str:
    """transformers' name of a weight outside attention, which may have any of its names."""
    name = name.removeprefix("model.")
    for published, own in PUBLISHED:
        name = re.sub(published, own, name)
    return name if name.startswith("lm_head.") else f"model.{name}"


def _outside_attention(tensors: Mapping[str, Any], config: dict) -> Iterator[tuple[str, Any]]:
    """Skips layers that predict further tokens ("mtp.0", or numbers after the last layer's)."""
    for name in tensors:
        layer = re.match(r"(?:model\.)?layers\.(\d+)\.", name)
        if any(part in name for part in ATTENTION) or name.startswith(("mtp.", "model.mtp.")):
            continue
        if any(name.endswith(kind) and name.removesuffix(kind) + "weight" in tensors for kind in SCALE_NAMES):
            continue  # read with its matrix
        if layer is None or int(layer[1]) < config["num_hidden_layers"]:
            yield transformers_name(name), _numbers(tensors, name)


def _numbers(tensors: Mapping[str, Any], name: str) -> np.ndarray:
    array = np.asarray(tensors[name])
    if name.endswith("tid2eid"):
        return array
    scales = (name.removesuffix("weight") + kind for kind in SCALE_NAMES)
    scale = next((tensors[its] for its in scales if name.endswith(".weight") and its in tensors), None)
    return plain(array if scale is None else BlockQuantizedWeight(array, np.asarray(scale)), name)


def _merged(found: dict[str, Any], experts: int) -> Iterator[tuple[str, Any]]:
    """Merges a layer's experts that are separate tensors into one array."""
    single = {name: match for name in found if (match := EXPERT.fullmatch(name))}
    yield from ((name, array) for name, array in found.items() if name not in single)
    for prefix in sorted({match[1] for match in single.values()}):
        gate, up, down = (
            [f"{prefix}.{i}.{kind}_proj.weight" for i in range(experts)] for kind in ("gate", "up", "down")
        )
        for name in (*gate, *up, *down):
            if name not in found:
                raise KeyError(f"{name}: the checkpoint lacks it")
        both = [np.concatenate([found[g], found[u]]) for g, u in zip(gate, up, strict=True)]
        yield f"{prefix}.gate_up_proj", np.stack(both)
        yield f"{prefix}.down_proj", np.stack([found[name] for name in down])
        for name in single.keys() - {*gate, *up, *down}:
            if name.startswith(f"{prefix}."):
                yield name, found[name]

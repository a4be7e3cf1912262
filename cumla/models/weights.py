"""Weights by name: transformers' names, the published checkpoints' names, and FP8 with scales of blocks.

A layer takes a mapping from transformers' names within its attention module ("q_a_proj.weight",
"compressor.indexer.q_b_proj.weight") to arrays. A published checkpoint names the same matrices as the authors' code
("layers.2.attn.indexer.wq_b.weight") and stores most of them in FP8, with a scale for each block of 128 by 128
values (V4.1: of 32 by 32). The scale has the matrix's name with "scale" (V4) or "weight_scale_inv" (V3.2) in place of
"weight".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from ..arrays import dlpack
from ..dispatch.values import check_choice
from ..layers.weights import BLOCK, FP8, NUMBERS, BlockQuantizedWeight, checked_blocks, dequantized_on_host
from .block_scaled import can_stay

# Within a layer's attention: published name -> transformers' name.
V4_ATTENTION = {
    "wq_a.weight": "q_a_proj.weight",
    "q_norm.weight": "q_a_norm.weight",
    "wq_b.weight": "q_b_proj.weight",
    "wkv.weight": "kv_proj.weight",
    "norm.weight": "kv_norm.weight",  # written by transformers when it saves a model under the published names
    "kv_norm.weight": "kv_norm.weight",
    "wo_a.weight": "o_a_proj.weight",
    "wo_b.weight": "o_b_proj.weight",
    "attn_sink": "sinks",
    "compressor.wkv.weight": "compressor.kv_proj.weight",
    "compressor.wgate.weight": "compressor.gate_proj.weight",
    "compressor.ape": "compressor.position_bias",
    "compressor.norm.weight": "compressor.kv_norm.weight",
    "indexer.wq_b.weight": "compressor.indexer.q_b_proj.weight",
    "indexer.weights_proj.weight": "compressor.indexer.scorer.weights_proj.weight",
    "indexer.compressor.wkv.weight": "compressor.indexer.kv_proj.weight",
    "indexer.compressor.wgate.weight": "compressor.indexer.gate_proj.weight",
    "indexer.compressor.ape": "compressor.indexer.position_bias",
    "indexer.compressor.norm.weight": "compressor.indexer.kv_norm.weight",
}
V32_ATTENTION = {
    "wq_a.weight": "q_a_proj.weight",
    "q_norm.weight": "q_a_layernorm.weight",
    "wq_b.weight": "q_b_proj.weight",
    "wkv_a.weight": "kv_a_proj_with_mqa.weight",
    "kv_norm.weight": "kv_a_layernorm.weight",
    "wkv_b.weight": "kv_b_proj.weight",
    "wo.weight": "o_proj.weight",
    **{
        name: name
        for name in (
            "indexer.wq_b.weight",
            "indexer.wk.weight",
            "indexer.k_norm.weight",
            "indexer.k_norm.bias",
            "indexer.weights_proj.weight",
        )
    },
}
V41_ATTENTION = {  # transformers has no such model: published names
    name: name
    for name in (
        "wq_a.weight",
        "q_norm.weight",
        "wq_b.weight",
        "wkv.weight",
        "kv_norm.weight",
        "wo_a.weight",
        "wo_b.weight",
        "attn_sink",
        "compressor.wkv.weight",
        "compressor.wgate.weight",
        "compressor.norm.weight",
        "indexer.wq_b.weight",
        "indexer.weights_proj.weight",
        "indexer.wk.weight",
        "indexer.k_norm.weight",
    )
}
# Published name of a weight in a layer's attention: groups are the layer's number and the name within the layer.
PUBLISHED_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.attn\.(.+)")
TRANSFORMERS_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.self_attn\.(.+)")
TABLES = ("rotary_emb.inv_freq",)  # in old files; layers compute their own
SCALE_NAMES = ("scale", "weight_scale_inv")
WeightFormat = Literal["fp8", "bfloat16"]


def keeps_fp8(weight_format: WeightFormat) -> bool:
    """Whether FP8 matrices stay so. Raises ValueError for another format."""
    check_choice(("fp8", "bfloat16"), weight_format=weight_format)
    return weight_format == "fp8"


def transformers_name(name: str, table: Mapping[str, str]) -> str | None:
    """A weight of an attention layer under transformers' name, "model.layers.2.self_attn.sinks"; None for others.

    name   transformers' own or the published name of a weight or a scale, with or without "model." in front
    table  V4_ATTENTION, V32_ATTENTION or V41_ATTENTION
    """
    if match := TRANSFORMERS_LAYER.fullmatch(name):
        return f"model.layers.{match[1]}.self_attn.{match[2]}"
    match = PUBLISHED_LAYER.fullmatch(name)
    if match is None:
        return None
    module, _, kind = match[2].rpartition(".")
    if kind in SCALE_NAMES:
        within = table.get(f"{module}.weight")
        return within and f"model.layers.{match[1]}.self_attn.{within.removesuffix('weight')}{kind}"
    within = table.get(match[2])
    return within and f"model.layers.{match[1]}.self_attn.{within}"


class MissingWeightError(KeyError):
    """A weight that a checkpoint lacks. Prints its message, where KeyError prints the repr."""

    def __str__(self) -> str:
        return str(self.args[0])


class LayerWeights(Mapping[str, Any]):
    """The weights of one layer's attention from a checkpoint, under transformers' names within the module.

    tensors  name -> array, under transformers' or the published names
    layer    its number
    table    V4_ATTENTION, V32_ATTENTION or V41_ATTENTION
    block    rows and columns of an FP8 matrix that share a scale

    An FP8 matrix with scales is returned as a BlockQuantizedWeight. A weight with an unknown name keeps its name.

    Raises KeyError if no tensor has the name of a weight of the layer's attention.
    """

    def __init__(
        self, tensors: Mapping[str, Any], layer: int, table: Mapping[str, str], block: tuple[int, int] = BLOCK
    ) -> None:
        self._block = block
        prefix = f"model.layers.{layer}.self_attn."
        self._tensors = tensors
        self._names = {}
        for name in tensors:
            known = transformers_name(name, table)
            if known is not None and known.startswith(prefix):
                self._names[known.removeprefix(prefix)] = name
            elif known is None and (match := PUBLISHED_LAYER.fullmatch(name)) and int(match[1]) == layer:
                self._names[name] = name
        if not self._names:
            raise MissingWeightError(
                f"weights: got no weights of layer {layer}'s attention among {len(tensors)} names, such as "
                f"{', '.join(sorted(map(str, tensors))[:3])}"
            )

    def __getitem__(self, name: str) -> Any:
        weight = self._tensors[self._names[name]]
        for kind in SCALE_NAMES:
            scale = self._names.get(name.removesuffix("weight") + kind)
            if scale is not None:
                return BlockQuantizedWeight(weight, self._tensors[scale], self._block)
        return weight

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if name.rpartition(".")[2] not in SCALE_NAMES)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class WeightReader:
    """Reads a layer's weights by name, and checks the type and shape of each.

    keep_fp8  whether `matrix` leaves FP8 as it is
    """

    def __init__(self, weights: Mapping[str, Any], keep_fp8: bool = False) -> None:
        self._weights, self._keep, self._read = weights, keep_fp8, set[str]()

    def __call__(self, name: str, *shape: int) -> Any:
        """Raises KeyError, TypeError or ValueError for a weight that is missing, or of another type or shape."""
        return self._checked(plain(self._named(name), name), name, shape)

    def matrix(self, name: str, *shape: int) -> Any:
        """The same; a matrix in FP8 stays one, a BlockQuantizedWeight, if it is to be kept."""
        weight = self._named(name)
        if not self._keep or not can_stay(weight):
            return self(name, *shape)
        codes, scales = checked_blocks(weight, name)
        return BlockQuantizedWeight(self._checked(codes, name, shape), scales, weight.block)

    def _named(self, name: str) -> Any:
        if name not in self._weights:
            raise MissingWeightError(lacking(name, self._weights))
        return self._weights[name]

    def _checked(self, array: Any, name: str, shape: tuple[int, ...]) -> Any:
        if array.shape != shape:
            raise ValueError(f"{name}: got shape {tuple(array.shape)}, expected {list(shape)}")
        self._read.add(name)
        return array

    def check_all_read(self) -> None:
        """Raise ValueError for a weight that the layer has no use for: its output would not be the model's."""
        left = sorted(str(n) for n in set(self._weights) - self._read if not str(n).endswith(TABLES))
        if left:
            raise ValueError(f"weights: got {', '.join(left[:4])}, which such a layer does not have")


def lacking(name: str, weights: Mapping[str, Any]) -> str:
    return f"{name}: the weights lack it, there are {', '.join(sorted(map(str, weights)))}"


def place_of(weights: Mapping[str, Any], name: str = "q_a_proj.weight") -> Any:
    """numpy or cupy, of a layer's weights, by the weight of this name."""
    if name not in weights:
        raise MissingWeightError(lacking(name, weights))
    weight = weights[name]
    values = weight.weight if isinstance(weight, BlockQuantizedWeight) else weight
    return dlpack.namespace_of(dlpack.borrow(values, name))


def plain(weight: Any, name: str) -> Any:
    """A weight as an array of float32, bfloat16 or float16 where it is; FP8 is dequantised to float32 on the host.

    weight  an array of any framework, or a BlockQuantizedWeight; a scale may be float32 or UE8M0 (float8_e8m0fnu)

    Raises ValueError for FP8 values without scales.
    """
    if isinstance(weight, BlockQuantizedWeight):
        return dequantized_on_host(weight, name)
    array = dlpack.borrow(weight, name)
    if array.dtype in FP8:
        raise ValueError(f"{name}: got FP8 values without scales, expected a BlockQuantizedWeight")
    if array.dtype not in NUMBERS:
        raise TypeError(f"{name}: got dtype {array.dtype}, expected float32, bfloat16 or float16")
    return array

"""Weights by name: transformers' names, the published checkpoints' names, and FP8 with scales of blocks.

Published checkpoints have the names of the authors' code ("layers.2.attn.indexer.wq_b.weight"). The scales of a matrix
have its name with "scale" (V4) or "weight_scale_inv" (V3.2) in place of "weight" (docs/reference/layer-weights.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

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
    name: name for name in (*V4_ATTENTION, "indexer.wk.weight", "indexer.k_norm.weight")
}
# Names of a checkpoint begin with one of these and one of LAYERS, or of DRAFTS in layers that predict further tokens.
FRONTS = ("", "model.", "model.language_model.", "language_model.")
LAYERS = ("layers.{}.self_attn.", "layers.{}.attn.", "layers.{}.attention.")
DRAFTS = ("mtp.{}.attn.", "mtp_layers.{}.self_attn.")
# Tables in old files, which layers compute; and factors of RoPE that layers without RoPE do not read.
TABLES = ("rotary_emb.inv_freq", "rotary_emb.alpha")
FLOAT8 = "float8_e4m3fn"
SCALE_NAMES = ("scale", "weight_scale_inv")
LAST_NORM = "norm.weight"  # the final norm of a published model
WeightFormat = Literal["fp8", "bfloat16"]


def keeps_fp8(weight_format: WeightFormat) -> bool:
    """Whether FP8 matrices stay in FP8. Raises ValueError for another format."""
    check_choice(("fp8", "bfloat16"), weight_format=weight_format)
    return weight_format == "fp8"


class MissingWeightError(KeyError):
    """A weight that a checkpoint lacks. Prints its message, where KeyError prints the repr."""

    def __str__(self) -> str:
        return str(self.args[0])


def weights_of_layer(
    weights: Mapping[str, Any],
    layer: int,
    table: Mapping[str, str],
    block: tuple[int, int] = BLOCK,
    first_draft: int | None = None,
    model_names: Mapping[str, str] = MappingProxyType({}),
) -> LayerWeights:
    """The weights of one layer's attention. Reads only names.

    Args:
        weights: by transformers' or the published names within the module; or a checkpoint's tensors, by names of the
            whole model
        layer: its number
        table: published names within the module -> transformers' names
        block: rows and columns of an FP8 matrix that share a scale
        first_draft: the number of the first layer that predicts further tokens, which some checkpoints call "mtp.0"
        model_names: as `table`, of weights that all layers share

    Raises KeyError if a checkpoint has no tensor of the layer's attention, ValueError if two tensors are the same
    weight.
    """
    in_module = any(name in weights for name in {*table, *table.values()} - {LAST_NORM})
    modules = [module.format(layer) for module in LAYERS]
    if first_draft is not None and layer >= first_draft:
        modules += [module.format(layer - first_draft) for module in DRAFTS]
    starts = ("",) if in_module else tuple(front + module for front in FRONTS for module in modules)
    shared = {
        front + name: within for published, within in model_names.items() for name in (published, within)
        for front in FRONTS
    }  # fmt: skip
    names: dict[str, str] = {}
    for name in weights:
        within, start = shared.get(str(name)), next((x for x in starts if str(name).startswith(x)), None)
        if within is None and start is not None:
            within = _transformers_name(str(name).removeprefix(start), table)
        if within is not None and names.setdefault(within, name) != name:
            raise ValueError(f"{name}: got it in addition to {names[within]}, expected one of them")
    if not names.keys() - shared.values():
        raise MissingWeightError(
            f"weights: got no weights of layer {layer}'s attention among {len(weights)} names, such as "
            f"{', '.join(sorted(map(str, weights))[:3])}"
        )
    return LayerWeights(weights, names, block)


def _transformers_name(published: str, table: Mapping[str, str]) -> str:
    """The name within the module of a weight or of scales; a name that the table lacks stays."""
    module, _, kind = published.rpartition(".")
    if kind not in SCALE_NAMES:
        return table.get(published, published)
    return table.get(f"{module}.weight", f"{module}.weight").removesuffix("weight") + kind


class LayerWeights(Mapping[str, Any]):
    """Weights by transformers' names within a layer's attention module; an FP8 matrix with its scales is one weight.

    Args:
        tensors: by their own names
        names: name within the module, of a weight or of scales -> name of the tensor
        block: rows and columns of an FP8 matrix that share a scale

    A matrix with scales is returned as a BlockQuantizedWeight. Scales without a matrix are returned under their name.
    """

    def __init__(self, tensors: Mapping[str, Any], names: Mapping[str, str], block: tuple[int, int] = BLOCK) -> None:
        self._tensors, self._block = tensors, block
        self._weights, self._scales = dict(names), dict[str, str]()  # weight -> tensor of its values, of its scales
        for name, tensor in names.items():
            module, _, kind = str(name).rpartition(".")
            weight = f"{module}.weight"
            if kind in SCALE_NAMES and weight in names:
                del self._weights[name]
                if self._scales.setdefault(weight, tensor) != tensor:
                    raise ValueError(
                        f"{tensor}: got scales in addition to {self._scales[weight]}, expected one of them"
                    )

    def __getitem__(self, name: str) -> Any:
        weight = self._tensors[self._weights[name]]
        scale = self._scales.get(name)
        if scale is None:
            return weight
        if isinstance(weight, BlockQuantizedWeight):
            raise ValueError(f"{name}: got a BlockQuantizedWeight and {scale}, expected the scales once")
        return BlockQuantizedWeight(weight, self._tensors[scale], self._block)

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


@dataclass(frozen=True)
class ExpectedWeight:
    """A weight of an attention layer.

    Attributes:
        shape: rows and columns of a matrix, or the length of a vector
        transformers: its name within transformers' attention module; the published name for a model that transformers
            lacks
        part: with tensor parallelism, the rank's part of the whole weight; None: all of it
        tensor: its name in the published checkpoint; layers accept other names, too (docs/reference/layer-weights.md)
        dtype: its type in the model's FP8 checkpoints: "float8_e4m3fn", "bfloat16" or "float32". Layers take any type
            that `SparseAttention` names
        block: rows and columns that share a scale; None unless dtype is FP8
    """

    shape: tuple[int, ...]
    transformers: str
    part: tuple[slice, ...] | None = None
    tensor: str = ""
    dtype: str = "bfloat16"
    block: tuple[int, int] | None = None

    @property
    def scale_shape(self) -> tuple[int, ...] | None:
        """The shape of the scales; None without scales."""
        if self.block is None:
            return None
        return tuple(-(-size // step) for size, step in zip(self.shape, self.block, strict=True))

    @property
    def scale_part(self) -> tuple[slice, ...] | None:
        """The rank's part of the scales; None: all of them.

        Raises ValueError where the part begins within a block.
        """
        if self.block is None or self.part is None:
            return None
        found = []
        for cut, size, step in zip(self.part, self.shape, self.block, strict=True):
            first = cut.start or 0
            if first % step:
                raise ValueError(f"{self.tensor}: a rank's part begins at {first}, within a block of {step}")
            found.append(slice(first // step, -(-(first + size) // step)) if cut.start is not None else cut)
        return tuple(found)


class WeightReader:
    """Reads a layer's weights by DeepSeek's names, and checks the type, shape and device of each.

    Args:
        weights: by transformers' names, which errors have, too
        expected: the layer's weights, by DeepSeek's names
        xp: numpy or cupy, where the layer computes
        keep_fp8: whether `matrix` leaves FP8 as it is

    Its methods raise KeyError, TypeError or ValueError for a weight that is missing, or of another type or shape.
    """

    def __init__(
        self, weights: Mapping[str, Any], expected: Mapping[str, ExpectedWeight], xp: Any, keep_fp8: bool = False
    ) -> None:
        self._weights, self._xp, self._keep, self._read = weights, xp, keep_fp8, set[str]()
        self._expected = expected

    def vector(self, name: str) -> Any:
        """In float32, where the layer computes."""
        weight, name, shape = self._named(name)
        return self._xp.asarray(self._checked(plain(weight, name), name, shape)).astype(np.float32, order="C")

    def matrix(self, name: str) -> Any:
        """The weight in its own type; FP8 is dequantised unless keep_fp8."""
        weight, name, shape = self._named(name)
        if not self._keep or not can_stay(weight):
            return self._checked(plain(weight, name), name, shape)
        codes, scales = checked_blocks(weight, name)
        return BlockQuantizedWeight(self._checked(codes, name, shape), scales, weight.block)

    def _named(self, name: str) -> tuple[Any, str, tuple[int, ...]]:
        """The weight, its name among the weights, and its shape."""
        expected = self._expected[name]
        name = expected.transformers
        return weight_named(name, self._weights), name, expected.shape

    def _checked(self, array: Any, name: str, shape: tuple[int, ...]) -> Any:
        if array.shape != shape:
            raise ValueError(f"{name}: got shape {tuple(array.shape)}, expected {list(shape)}")
        if not isinstance(array, np.ndarray):  # an array in host memory is copied to the layer's device
            device = array.data.device_id
            if self._xp is np:
                raise ValueError(f"{name}: got an array on CUDA device {device}, expected the layer's host memory")
            if device != (here := self._xp.cuda.runtime.getDevice()):
                raise ValueError(f"{name}: got an array on CUDA device {device}, expected CuPy's current one, {here}")
        self._read.add(name)
        return array

    def check_all_read(self) -> None:
        """Raise ValueError for a weight that the layer does not use: its output would differ from the model's."""
        left = sorted(str(n) for n in set(self._weights) - self._read if not str(n).endswith(TABLES))
        if left:
            raise ValueError(f"weights: got {', '.join(left[:4])}, which such a layer does not have")


def weight_named(name: str, weights: Mapping[str, Any]) -> Any:
    """Raises KeyError if weights lack it."""
    if name not in weights:
        raise MissingWeightError(f"{name}: the weights lack it, there are {', '.join(sorted(map(str, weights)))}")
    return weights[name]


def place_of(weights: Mapping[str, Any], name: str) -> Any:
    """numpy or cupy: where a layer's weights are, judged by the weight of this name."""
    weight = weight_named(name, weights)
    values = weight.weight if isinstance(weight, BlockQuantizedWeight) else weight
    return dlpack.namespace_of(dlpack.borrow(values, name))


def plain(weight: Any, name: str) -> Any:
    """A weight as a float32, bfloat16 or float16 array, not moved; FP8 is dequantised to float32 on the host.

    Args:
        weight: an array of any framework, or a BlockQuantizedWeight; a scale may be float32 or UE8M0 (float8_e8m0fnu)

    Raises ValueError for FP8 values without scales.
    """
    if isinstance(weight, BlockQuantizedWeight):
        return dequantized_on_host(weight, name)
    array = dlpack.borrow(weight, name)
    if array.dtype in FP8:
        module = name.removesuffix("weight")
        scales = " or ".join(f"{module}{kind}" for kind in SCALE_NAMES)
        raise ValueError(f"{name}: got FP8 values without scales, expected {scales}, or a BlockQuantizedWeight")
    if array.dtype not in NUMBERS:
        raise TypeError(f"{name}: got dtype {array.dtype}, expected float32, bfloat16 or float16")
    return array

"""The base of a model's configuration of attention layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from ..dispatch.values import check_choice, check_kind
from ..layers.weights import BLOCK
from .config_validation import check_absent, check_all_read, check_fields
from .layer_spec import LayerSpec


class AttentionConfig:
    """The base of a dataclass of sizes and parameters: its integers are sizes, `rope_scaling` None or YaRN's.

    Attributes of a class:
        model_types: of a config.json
        foreign: names of entries of DeepSeek V4's configuration, which the model does not have
        names: DeepSeek's name of a weight within the attention module -> transformers'
        model_names: the same, of weights that all layers share
        published: DeepSeek's name -> the published name, if it is not transformers'. None: all names are DeepSeek's
        module, draft_module: of a published checkpoint, for a layer and for one that predicts further tokens
        in_bfloat16: beginnings of names of matrices that FP8 checkpoints keep in bfloat16
        scale_block: rows and columns of an FP8 matrix that share a scale
    """

    model_types: ClassVar[tuple[str, ...]] = ()
    foreign: ClassVar[tuple[str, ...]] = ()
    names: ClassVar[Mapping[str, str]]
    model_names: ClassVar[Mapping[str, str]] = {}
    published: ClassVar[Mapping[str, str] | None] = None
    module: ClassVar[str] = "layers.{}.attn."
    draft_module: ClassVar[str | None] = None
    in_bfloat16: ClassVar[tuple[str, ...]] = ()
    scale_block: ClassVar[tuple[int, int]] = BLOCK
    num_hidden_layers: int  # V3.2's and V4's configurations have none

    def __post_init__(self) -> None:
        check_fields(self, {}, ())

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Read a config.json, or its text_config.

        Raises TypeError or ValueError for the configuration of another model, for missing entries, for sizes, biases,
        layers and RoPE that cumla does not support, and for an entry that changes attention and is not read.
        """
        check_kind(Mapping, config=config)
        text = config.get("text_config")
        if text is not None:
            check_kind(Mapping, text_config=text)
            check_choice(cls.model_types, model_type=config.get("model_type", cls.model_types[0]))
            check_all_read(config, (), text)
            config = text
        check_choice(cls.model_types, model_type=config.get("model_type", cls.model_types[0]))
        check_absent(config, "it is of a DeepSeek V4 model", *cls.foreign)
        return cls.read(config)

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """`from_dict` of the text model's own entries."""
        raise NotImplementedError

    def specs(self) -> tuple[LayerSpec, ...]:
        """The description of every layer but those that predict further tokens; of a V3.2 model, of one layer."""
        return tuple(map(self.spec, range(getattr(self, "num_hidden_layers", 1))))

    def spec(self, layer: int) -> LayerSpec:
        """The description of a layer; from num_hidden_layers on of a layer that predicts further tokens.

        Raises TypeError or ValueError for a layer that the model lacks, or whose attention cumla does not have.
        """
        raise NotImplementedError

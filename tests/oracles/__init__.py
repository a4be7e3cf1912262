"""Attention layers of every model in float64: from the hidden states of a whole request, without caches or steps.

    basics     norms, RoPE, attention
    selection  scores of an indexer, the best of them, and how clear a choice was
    layer      a layer by rules: a model's differences are in its `Rules`
    v32, v4, v41  rules of a model family, and its compressed rows and index keys

Golden data of the models' own code check the oracles (tests/test_oracles.py); tests of layers, operations and replays
use them.
"""

from cumla.models import DeepseekV4Config, DeepseekV32Config, DeepseekV41Config, expected_weights

from .v4 import V4
from .v32 import V32
from .v41 import V41

KINDS = {DeepseekV4Config: V4, DeepseekV32Config: V32, DeepseekV41Config: V41}


def layer_of(config, number, weights, longest):
    """The oracle of a layer.

    Args:
        weights: by published or transformers' names within the attention module
        longest: positions of RoPE's table
    """
    expected = expected_weights(config, number).items()
    named = {name: weights[name if name in weights else weight.transformers] for name, weight in expected}
    return KINDS[type(config)](config, number, named, longest)

"""Attention layers of every model in float64: from the hidden states of a whole request, without caches or steps.

    basics     norms, RoPE, attention
    selection  scores of an indexer, the best of them, and how clear a choice was
    layer      a layer by rules: a model's differences are in its `Rules`
    latent, v4, v41  rules of a model family, and its rows and index keys

Golden data of the models' own code check the oracles (tests/test_oracles.py); tests of layers, operations and replays
use them.
"""

from cumla.models import DeepseekV4Config, DeepseekV41Config
from cumla.models.weight_shapes import named, shapes_of

from .latent import LatentLayer
from .v4 import V4
from .v41 import V41

KINDS = {DeepseekV4Config: V4, DeepseekV41Config: V41}  # others have latent rows


def layer_of(config, number, weights, longest):
    """The oracle of a layer.

    Args:
        weights: by published or transformers' names within the attention module
        longest: positions of RoPE's table
    """
    published, own = config.published or {}, {}
    for name, weight in named(config, number, shapes_of(config.spec(number))).items():
        names = (published.get(name, name), name, weight.transformers)
        own[name] = next(weights[found] for found in names if found in weights)
    return KINDS.get(type(config), LatentLayer)(config, number, own, longest)

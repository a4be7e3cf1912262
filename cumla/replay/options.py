"""Replay options: the machine's defaults, and checks before a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..dispatch import backends
from ..errors import InputError
from ..layers.sparse import LAYOUTS
from ..layout import CacheLayout
from ..models.caches import CacheFormat, KeyFormat
from ..ops.sparse_attention import second_layouts
from .blocks import BLOCK_TOKENS
from .trace import INT32_MAX, TraceRequest

LAYER_RATIOS = {"swa": 1, "c4a": 4, "c128a": 128}  # of sparse layers
# V4.1's layers, in the model's order: one of each kind, with its ratio.
V41_RATIOS = {
    "v41 window": 0, "v41 c2a full": 2, "v41 c2a reuse": 2, "v41 c1a full": 1, "v41 c1a reindex": 1, "v41 c1a reuse": 1,
}  # fmt: skip
V4_RATIOS = {f"v4 {name}": ratio for name, ratio in LAYER_RATIOS.items()}
# Attention layers of models, from hidden states on: one of each kind.
MODEL_LAYERS = {
    "v4": tuple(V4_RATIOS), "v32": ("v32",), "v41": tuple(V41_RATIOS),
    "glm52": ("glm52 full", "glm52 shared"), "glm53": ("glm53",), "hy4": ("hy4 full", "hy4 shared"),
    "mistral4": ("mistral4 full", "mistral4 shared", "mistral4 nope", "mistral4 nope reindex"),
}  # fmt: skip
MODEL_OF = {name: model for model, names in MODEL_LAYERS.items() for name in names}
WARM_KINDS = ("v4", "v41", "v32", "glm5_next", "mla")  # models that cumla warmup knows
LAYER_TYPES = (*LAYER_RATIOS, "mla", *MODEL_LAYERS)
MLA_CACHES = ("bf16", "fp8")
INDEX_KEYS: tuple[KeyFormat, ...] = ("fp8", "mxfp4")
# Formats of sparse layers' caches, by option: the window's, then the compressed rows' if it differs.
FORMATS = {
    ",".join(dict.fromkeys((first.name, second.name))): (first, second)
    for first in LAYOUTS if first.num_scales for second in second_layouts(first)
}  # fmt: skip
# Formats of V4.1's layers, by the same names: the layers' own names.
V41_CACHE_FORMATS: dict[str, CacheFormat] = {
    "DSV41_FP8,DSV41_FP4": "fp4", "DSV41_FP8": "fp8",
    "DSV41_FP8_SPLIT,DSV41_FP4_SPLIT": "fp4_split", "DSV41_FP8_SPLIT": "fp8_split",
}  # fmt: skip
V41_LAYOUT = "DSV41_FP8,DSV41_FP4"
# Files of kernels that a replay calls.
KERNELS = (
    "window_metadata", "sparse_cache", "indices", "sparse_attention", "dense_cache", "dense_attention", "projection",
    "compressor", "norm_rope", "indexer", "latents", "candidates",
)  # fmt: skip
MAX_RUNNING = 256  # requests in a step


@dataclass(frozen=True)
class Defaults:
    requests: int
    max_len: int | None
    batch_tokens: int
    heads: int
    topk: int


DEVICE_DEFAULTS = Defaults(requests=32, max_len=None, batch_tokens=4096, heads=64, topk=512)
HOST_DEFAULTS = Defaults(requests=12, max_len=1152, batch_tokens=512, heads=8, topk=64)


@dataclass(frozen=True)
class ReplayOptions:
    """Options of a run. Sizes in tokens; `cache_tokens` is a multiple of a block."""

    backend: str
    layers: tuple[str, ...]
    heads: int
    window: int
    topk: int
    batch_tokens: int
    cache_tokens: int
    max_len: int | None
    seed: int
    layout: str = "DSV4_FP8"  # of the caches of sparse layers: one of FORMATS
    v41_layout: str = V41_LAYOUT  # of the caches of V4.1's layers: one of V41_CACHE_FORMATS
    mla_cache: str = "bf16"  # values of dense layers' caches: "bf16" or "fp8"
    prefill_path: str | None = None  # as in SparseMLALayer.step
    ranks: int = 1  # devices, or threads, that share the context
    index_keys: KeyFormat = "fp8"  # of V4.1's layers: one of INDEX_KEYS
    max_output: int | None = None  # tokens that a request generates
    host_pages: int = 0  # of each page group, for prefixes that the cache has no room for
    batch_invariant: bool = False  # of layers and their metadata
    tiny: bool = False  # whether layers of models have a tiny model's sizes on a device, too

    @property
    def num_blocks(self) -> int:
        return self.cache_tokens // BLOCK_TOKENS

    @property
    def formats(self) -> tuple[CacheLayout, CacheLayout]:
        """Formats of a sparse layer's window cache and of its compressed rows."""
        return FORMATS[self.layout]


def choose_backend(name: str | None) -> str:
    """The backend `name`, or by default the device's, else the CPU's. Raises InputError for an unavailable backend."""
    if name is None:
        return backends.best()
    reason = backends.unavailable(name)
    if reason is not None:
        raise InputError(f"--backend {name}: {reason}; available: {', '.join(backends.available())}")
    try:
        for file in KERNELS:
            backends.kernels(name, file)
    except ValueError as error:
        raise InputError(f"--backend {name}: {error}") from None
    return name


def defaults_for(backend: str) -> Defaults:
    return DEVICE_DEFAULTS if backends.takes_device_arrays(backend) else HOST_DEFAULTS


def parse_layers(text: str) -> tuple[str, ...]:
    """Layer types from a comma list. Raises InputError."""
    layers = tuple(name.strip() for name in text.split(","))
    for name in layers:
        if name not in LAYER_TYPES:
            raise InputError(f"--layers: got {name!r}, expected a comma list of {', '.join(LAYER_TYPES)}")
    return tuple(layer for name in layers for layer in MODEL_LAYERS.get(name, (name,)))


def cache_size(asked: int | None, requests: Sequence[TraceRequest]) -> int:
    """Tokens of the cache, in whole blocks: `asked`, or half the tokens of all requests, at least the largest's.

    Raises InputError if `asked` is less than the largest request.
    """
    blocks = [-(-request.total_length // BLOCK_TOKENS) for request in requests]
    largest = max(blocks) * BLOCK_TOKENS
    if asked is None:
        return max(sum(blocks) * BLOCK_TOKENS // 2, largest) // BLOCK_TOKENS * BLOCK_TOKENS
    if asked < largest:
        raise InputError(
            f"--cache-tokens: got {asked}, but one request alone needs {largest}; "
            "give at least that or cut requests with --max-len"
        )
    if asked > INT32_MAX:
        raise InputError(f"--cache-tokens: got {asked}, expected at most {INT32_MAX}: slots are 32-bit")
    return asked // BLOCK_TOKENS * BLOCK_TOKENS

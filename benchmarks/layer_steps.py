"""Steps for benchmarks/layers.py, decodes at the end of their contexts and a prompt: lengths, tables, caches."""

import numpy as np
from common import cupy
from step_cases import batch_of

import cumla
from cumla.arrays.memory import to_host
from cumla.metadata.builder import ServingConfig
from cumla.models import STATE_BLOCK_SIZES, LayerCaches, StepBuilder
from cumla.specs.measured import repeating_cache

CONTEXT, RATIO, PAGE, COMPRESSED_PAGE = 32_768, 4, 64, 256
GROUPS = "window", "compressed", f"states{RATIO}"  # of caches
LAYOUTS = {
    "window": cumla.DSV4_FP8, "compressed": cumla.DSV4_FP8, "indexer": cumla.INDEXER_FP8, "rows": cumla.V32_FP8,
}  # fmt: skip


def serving_of(config, batch, ratio, tokens=None):
    """Sizes for `batch` requests and `tokens` tokens a step, by default one per request."""
    return ServingConfig(
        compress_ratios=(ratio,), index_topk=config.index_topk, num_heads=config.num_attention_heads, block_size=PAGE,
        compressed_block_size=COMPRESSED_PAGE, max_num_batched_tokens=tokens or batch, max_num_seqs=batch,
        max_model_len=CONTEXT,
    )  # fmt: skip


def relative_rms(got, want):
    return float(np.sqrt(np.square(got - want).mean() / np.square(want).mean()))


def fill(cache, layout):
    """Fill a cache with rows of normal values."""
    slots = len(cache) * cache.shape[1] + (1 << 16)
    cache[...] = repeating_cache("cuda", layout, cache.shape[1], slots).array[: len(cache)]


class V4Step:
    """A step's lengths and tables, for the first requests in any number."""

    def __init__(self, config, batch):
        rng = np.random.default_rng(0)
        self.config, self.serving = config, serving_of(config, batch, RATIO)
        self.lens = (CONTEXT - np.arange(batch) % RATIO).astype(np.int32)
        self.window = self.last_pages(batch, PAGE, 3)
        self.states = self.last_pages(batch, STATE_BLOCK_SIZES[RATIO], 3)
        self.compressed = rng.permutation(batch * CONTEXT // COMPRESSED_PAGE).astype(np.int32).reshape(batch, -1)

    @staticmethod
    def last_pages(batch, size, count):
        """A table of requests that have only their last pages; earlier entries are page 0, which is not read."""
        table = np.zeros((batch, CONTEXT // size), np.int32)
        table[:, -count:] = 1 + np.arange(batch * count).reshape(batch, count)
        return table

    def metadata(self, backend, put, requests):
        """The layer's metadata for the first requests."""
        batch = batch_of(put, [1] * requests, self.lens[:requests], self.window[:requests])
        tables = {"compressed": put(self.compressed[:requests]), GROUPS[2]: put(self.states[:requests])}
        return StepBuilder(self.config.specs(), self.serving, backend).build(batch, tables)

    def caches(self):
        """Caches filled with rows of normal values."""
        pages = self.window.max() + 1, self.compressed.size, self.states.max() + 1
        blocks = dict(zip(GROUPS, map(int, pages), strict=True))
        caches = LayerCaches.allocate(self.config.spec(0), self.serving, blocks, xp=cupy)
        for name in ("window", "compressed", "indexer"):
            fill(getattr(caches, name), LAYOUTS[name])
        for states in (caches.state, caches.indexer_state):
            states[...] = cupy.random.default_rng(5).standard_normal(states.shape, np.float32)
        return caches


class V4Prompt:
    """One request's prompt of `tokens` tokens, in a layer of V4."""

    def __init__(self, config, tokens):
        self.config, self.serving, self.tokens = config, serving_of(config, 1, RATIO, tokens), tokens

    def table(self, page):
        return cupy.arange(-(-self.tokens // page), dtype=np.int32)[None]

    def metadata(self):
        batch = batch_of(cupy.asarray, [self.tokens], [self.tokens], self.table(PAGE).get())
        tables = {"compressed": self.table(COMPRESSED_PAGE), GROUPS[2]: self.table(STATE_BLOCK_SIZES[RATIO])}
        return StepBuilder(self.config.specs(), self.serving, "cuda").build(batch, tables)

    def caches(self):
        pages = (self.table(page).size for page in (PAGE, COMPRESSED_PAGE, STATE_BLOCK_SIZES[RATIO]))
        blocks = dict(zip(GROUPS, pages, strict=True))
        return LayerCaches.allocate(self.config.spec(0), self.serving, blocks, xp=cupy)


class V32Step:
    """A step of V3.2's layers, whose rows of all positions are in pages of one table."""

    def __init__(self, config, batch):
        self.config, self.serving = config, serving_of(config, batch, 1)
        self.lens = (CONTEXT - np.arange(batch) % RATIO).astype(np.int32)
        self.table = np.random.default_rng(0).permutation(batch * CONTEXT // PAGE).astype(np.int32).reshape(batch, -1)

    def metadata(self, backend, put, requests):
        """The layer's metadata for the first requests."""
        batch = batch_of(put, [1] * requests, self.lens[:requests], self.table[:requests])
        return StepBuilder(self.config.specs(), self.serving, backend).build(batch)

    def caches(self):
        """Caches filled with rows of normal values."""
        caches = LayerCaches.allocate(self.config.spec(0), self.serving, {"rows": self.table.size}, xp=cupy)
        for name in ("rows", "indexer"):
            fill(getattr(caches, name), LAYOUTS[name])
        return caches


def host_caches(caches):
    """Copies in host memory, with the page stride of the device arrays."""
    arrays = {name: array for name, array in vars(caches).items() if array is not None}
    copies = {name: to_host(cupy.ascontiguousarray(array)) for name, array in arrays.items()}
    for name, pages in copies.items():
        if pages.dtype == np.uint8:
            copies[name] = LAYOUTS[name].allocate(*pages.shape[:2])
            copies[name][...] = pages
    return type(caches)(**copies)

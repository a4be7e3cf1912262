"""Golden layers and models of transformers: seeded weights, and functions that run a layer over paged requests."""

import functools
import json

import numpy as np
from seeded_weights import seeded_weights

from cumla.metadata.batch import CommonAttentionMetadata
from cumla.models import (
    STATE_BLOCK_SIZES,
    DeepseekV4Attention,
    DeepseekV4Config,
    DeepseekV32Attention,
    DeepseekV32Config,
    LayerCaches,
    StepBuilder,
    serving_of,
)

from .golden import DATA

MAX_TOKENS = 2048


@functools.cache
def records(kind):
    """The cases of layers.json or models.json."""
    return json.loads((DATA / f"{kind}.json").read_text())["cases"]


@functools.cache
def outputs(kind):
    with np.load(DATA / f"{kind}.npz") as archive:
        return dict(archive)


class GoldenLayer:
    """A case of layers.npz: hidden states, output, and the rows that its indexer selected (None without an indexer)."""

    def __init__(self, case):
        self.record = records("layers")[case]
        seed, self.splits = self.record["seed"], self.record["splits"]
        self.config, self.tokens = self.record["config"], sum(self.record["splits"])
        generator = np.random.Generator(np.random.PCG64(seed + 7))
        self.hidden = generator.standard_normal((self.tokens, self.config["hidden_size"]), dtype=np.float32)
        self.weights = seeded_weights(self.record["parameters"], seed)
        self.out = outputs("layers")[f"{case}/out"].astype(np.float64)
        self.topk = outputs("layers").get(f"{case}/topk")


def parts_of(layer):
    """The attributes of a layer and of its parts, by path."""
    for name, value in vars(layer).items():
        if type(value).__module__.startswith("cumla.models.") and name in ("queries", "rows", "keys", "output"):
            yield from ((f"{name}.{inner}", x) for inner, x in vars(value).items())
        else:
            yield name, value


def relative_rms(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.sqrt(np.square(got - want).mean() / np.square(want).mean()))


class PagedRequests:
    """Block tables of requests over pools of randomly placed pages.

    Args:
        pages: {pool: positions of a page}; `tables[pool]` is [requests, columns], unallocated pages are -1
    """

    def __init__(self, requests, longest, pages, seed=0, spare=1, put=np.asarray):
        self.put = put
        rng = np.random.default_rng(seed)
        self.pages, self.tables, self.num_blocks = pages, {}, {}
        for pool, size in pages.items():
            columns = -(-longest // size)
            self.num_blocks[pool] = (requests + spare) * columns
            blocks = rng.permutation(self.num_blocks[pool]).astype(np.int32)
            self.tables[pool] = blocks[: requests * columns].reshape(requests, columns).copy()

    def batch(self, scheduled):
        """A decode-first step of (request, first position, tokens), and the block tables of its rows."""
        rows = [request for request, _, _ in scheduled]
        counts = np.array([count for _, _, count in scheduled], np.int32)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        lens = np.array([first + count for _, first, count in scheduled], np.int32)
        tables = {pool: np.ascontiguousarray(table[rows]) for pool, table in self.tables.items()}
        size, slots = self.pages["window"], []
        for row, (_, first, count) in enumerate(scheduled):
            positions = np.arange(first, first + count)
            slots.append(tables["window"][row, positions // size].astype(np.int64) * size + positions % size)
        tables = {pool: self.put(table) for pool, table in tables.items()}
        return CommonAttentionMetadata(
            self.put(starts), starts, self.put(lens), lens, lens - counts, len(rows), int(starts[-1]),
            int(counts.max(initial=0)), tables["window"], self.put(np.concatenate([np.zeros(0, np.int64), *slots])),
        ), tables  # fmt: skip


class PagedLayer:
    """A golden layer with its caches, for several requests that all have the golden hidden states."""

    def __init__(self, golden, requests=1, *, backend="cpu", activations="float32", cache_format="float32",
                 speculative=0, seed=0, lab=None, batch_invariant=False):  # fmt: skip
        self.golden = golden
        put, xp = (np.asarray, np) if lab is None else (lab.put, lab.xp)
        config = self.config_type.from_dict(golden.config)
        self.layer = self.layer_type(
            config, 0, golden.weights, activations=activations, cache_format=cache_format, max_position=MAX_TOKENS,
            batch_invariant=batch_invariant, backend=backend, xp=xp,
        )  # fmt: skip
        serving = serving_of(
            config, num_heads=8, num_speculative_tokens=speculative, max_num_batched_tokens=MAX_TOKENS, max_num_seqs=8,
            max_model_len=MAX_TOKENS, batch_invariant=batch_invariant,
        )  # fmt: skip
        self.builder = StepBuilder(config.specs(), serving, backend)
        self.paged = PagedRequests(requests, golden.tokens, self.pages(), seed, put=put)
        blocks = {**self.paged.num_blocks, "rows": self.paged.num_blocks["window"]}
        self.caches = LayerCaches.allocate(self.layer.spec, serving, blocks, cache_format=cache_format, xp=xp)

    def step(self, scheduled, given=True):
        """Outputs of (request, first position, tokens), one array each; `given`: the golden selection is used."""
        golden = self.golden
        batch, tables = self.paged.batch(scheduled)
        spans = [slice(first, first + count) for _, first, count in scheduled]
        hidden = np.concatenate([golden.hidden[span] for span in spans]).astype(self.layer.activations)
        topk = None
        if given and golden.topk is not None:
            topk = self.paged.put(np.concatenate([golden.topk[span] for span in spans]))
        out = self.layer.step(self.paged.put(hidden), self.caches, self.build(batch, tables), topk_indices=topk)
        out = out if isinstance(out, np.ndarray) else out.get()
        return np.split(out, batch.query_start_loc_cpu[1:-1])

    def run(self, splits, request=0, given=True):
        """The output of a request given in these splits."""
        first, parts = 0, []
        for count in splits:
            parts += self.step([(request, first, count)], given)
            first += count
        return np.concatenate(parts)


class V32Layer(PagedLayer):
    """A golden V3.2 layer."""

    config_type, layer_type = DeepseekV32Config, DeepseekV32Attention

    def pages(self):
        return {"window": 64}

    def build(self, batch, tables):
        return self.builder.build(batch)


class V4Layer(PagedLayer):
    """A golden V4 layer."""

    config_type, layer_type = DeepseekV4Config, DeepseekV4Attention

    def pages(self):
        return {"window": 64, "compressed": 256} | {
            f"states{ratio}": size for ratio, size in STATE_BLOCK_SIZES.items() if ratio == self.layer.ratio
        }

    def arrays(self):
        """The layer's caches, by pool."""
        caches = self.caches
        states = f"states{self.layer.ratio}"
        found = [("window", caches.window), ("compressed", caches.compressed), ("compressed", caches.indexer),
                 (states, caches.state), (states, caches.indexer_state)]  # fmt: skip
        return [(pool, array) for pool, array in found if array is not None]

    def build(self, batch, tables):
        return self.builder.build(batch, tables)


class Started:
    """A golden layer with three running requests, and valid arguments of its next step: two decodes, and a prefill."""

    BATCH = (0, 6, 1), (2, 8, 1), (1, 5, 7)  # (request, first position, tokens)

    def __init__(self, case=8, cache_format="fp8", activations="bfloat16"):
        golden = GoldenLayer(case)
        make = V4Layer if golden.record["model"] == "v4" else V32Layer
        self.made = make(golden, 3, activations=activations, cache_format=cache_format)
        self.made.step([(0, 0, 6), (1, 0, 5), (2, 0, 8)], given=False)
        self.caches = self.made.caches
        self.arguments = {
            "hidden_states": self.hidden(self.BATCH), "layer_caches": self.caches, "metadata": self.metadata(self.BATCH)
        }  # fmt: skip

    def hidden(self, batch):
        spans = [self.made.golden.hidden[first : first + count] for _, first, count in batch]
        return np.concatenate(spans).astype(self.made.layer.activations)

    def metadata(self, batch):
        return self.made.build(*self.made.paged.batch(batch))

    def held(self):
        """Bytes of all caches."""
        return [array.tobytes() for array in vars(self.caches).values() if array is not None]

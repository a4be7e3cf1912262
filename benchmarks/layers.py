"""One C4A layer of DeepSeek V4 Flash's sizes, a step of decodes at 32K of context, in a CUDA graph.

    python benchmarks/layers.py [--json benchmarks/results/h200/layers.json]

With weights as published, FP8 but those of the compressors, and all in bfloat16. Beside it its products, attention,
indexer logits and top-k, each alone in a graph of its own, and the peers' where they can be imported: DeepGEMM's FP8
products with their quantisation and its logits, FlashMLA, vLLM's top-k. The layer's output is compared with the cpu
backend's for some of the requests, over the rows that the device selected; its error is the relative rms. `over_parts`
is the layer's time over the sum of its parts, by configuration, and `over_peers` over the sum of the peers' parts, ours
where there is none: a chain without norms, RoPE, inserts and compressors.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import cupy
import ml_dtypes
import numpy as np
from common import case_arguments, run

import cumla
from cumla.arrays.memory import to_host
from cumla.bench.indexer_cases import Choice, PagedLogits
from cumla.bench.problem import Arrays, Problem, repeating_cache
from cumla.bench.products import BlockLinear
from cumla.bench.sparse import Decode
from cumla.bench.step_suites import batch_of
from cumla.layers.weights import BlockQuantizedWeight
from cumla.metadata.builder import ServingConfig
from cumla.models.block_scaled import BlockScaledWeight
from cumla.models.deepseek_v4 import DeepseekV4Attention, DeepseekV4Caches, DeepseekV4Config
from cumla.models.products import multiply, multiply_groups
from cumla.models.step import STATE_BLOCK_SIZES, DeepseekV4StepBuilder
from cumla.replay.whole import by_the_rule, v4_shapes

BF16 = ml_dtypes.bfloat16
CONTEXT, RATIO, PAGE, COMPRESSED_PAGE = 32_768, 4, 64, 256
FLASH = DeepseekV4Config(
    hidden_size=4096, num_attention_heads=64, q_lora_rank=1024, o_groups=8, o_lora_rank=1024, compress_ratios=(RATIO,),
    index_n_heads=64, index_topk=512, max_position_embeddings=CONTEXT,
)  # fmt: skip
BAR, MOST_ERROR = 1.25, 0.02
FEW = 4  # requests that are checked
LAYERS = 20  # of the kind that the model has, about: they use one step's metadata and its plan of the decodes
PRODUCTS = {
    "low rank": ("low_rank", BF16), "q": ("q_b", BF16), "compressors": ("pooled", np.float32),
    "index q": ("index_q_b", BF16), "o, second": ("o_b", BF16), "o, first": ("o_a", BF16),
}  # fmt: skip
PARTS: dict[str, Callable[[int], Any]] = {
    "attention": lambda batch: Decode(cumla.DSV4_FP8, FLASH.num_attention_heads, batch, 1, 128, FLASH.index_topk),
    "indexer logits": lambda batch: PagedLogits(batch, CONTEXT // RATIO),
    "top-k": lambda batch: Choice("decode", batch, CONTEXT // RATIO, FLASH.index_topk),
}


@functools.cache
def layer_on(backend, weights):
    options = {"activations": "bfloat16", "cache_format": "fp8", "weight_format": weights, "backend": backend}
    return DeepseekV4Attention(FLASH, 0, published(), xp=np if backend == "cpu" else cupy, **options)


@functools.cache
def published():
    """Weights of which a published checkpoint has these in FP8, with scales that are powers of two."""
    found = by_the_rule(v4_shapes(FLASH, RATIO), 0)
    for name in ("q_a_proj", "kv_proj", "q_b_proj", "o_a_proj", "o_b_proj", "compressor.indexer.q_b_proj"):
        weight = found[f"{name}.weight"]
        blocks = weight.reshape(len(weight) // 128, 128, -1, 128)
        scales = np.exp2(np.ceil(np.log2(np.abs(blocks).max((1, 3)) / 448))).astype(np.float32)
        codes = (blocks / scales[:, None, :, None]).astype(ml_dtypes.float8_e4m3fn).reshape(weight.shape)
        found[f"{name}.weight"] = BlockQuantizedWeight(codes, scales)
    return found


@dataclasses.dataclass(frozen=True)
class Part:
    """What a layer is made of, alone: a product, or one of PARTS."""

    name: str
    batch: int
    weights: str

    @property
    def op(self):
        return f"alone: {self.name}" if self.name in PARTS else f"alone: product: {self.name}"

    def __str__(self):
        return f"b {self.batch}, {CONTEXT:,} of context, {self.weights} weights"

    def problem(self, sizes):
        if self.name in PARTS:
            return self.named(PARTS[self.name](self.batch).problem(sizes))
        weight, dtype = PRODUCTS[self.name]
        weight, arrays = getattr(layer_on("cuda", self.weights), weight), Arrays(sizes)
        if isinstance(weight, BlockScaledWeight):
            groups = weight.shape[0] if len(weight.shape) == 3 else 1
            return self.named(BlockLinear(self.batch, *weight.shape[-2:], groups).problem(sizes))
        x, out = arrays.rows(self.batch, weight.shape[-1]), cupy.empty((self.batch, weight.shape[-2]), dtype)
        if self.name == "o, first":
            groups, rank, width = FLASH.o_groups, FLASH.o_lora_rank, FLASH.num_attention_heads * 512 // FLASH.o_groups
            x = arrays.rows(self.batch, groups, width).transpose(1, 0, 2)
            out = cupy.empty((self.batch, groups, rank), BF16).transpose(1, 0, 2)
        call = multiply_groups if self.name == "o, first" else multiply
        sets = [weight, *(weight.copy() for _ in range(sizes.sets(weight.nbytes) - 1))]
        calls = [functools.partial(call, x, each, out, None) for each in sets]
        moved = weight.nbytes + x.nbytes + out.nbytes
        return Problem(self.op, str(self), {"cumla": ("cupy", calls)}, moved, 2 * self.batch * weight.size)

    def named(self, problem):
        """A case's, its implementation and the peer's."""
        impls = {name: x for name, x in problem.impls.items() if name == "cumla" or name in problem.functions}
        return dataclasses.replace(problem, op=self.op, config=str(self), impls=impls)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A step of decodes, one of each request, one in four of which completes a row."""

    batch: int
    weights: str

    op = "layer"

    __str__ = Part.__str__

    def problem(self, sizes):
        layer, step = layer_on("cuda", self.weights), Step(self.batch)
        metadata, caches = step.metadata(None, cupy.asarray, self.batch), step.caches()
        x = Arrays(sizes).rows(self.batch, FLASH.hidden_size)
        out, before = cupy.empty_like(x), host_caches(caches)

        def check(got):
            got = to_host(got)[:FEW].astype(np.float64)
            chosen = to_host(layer.scratch.shaped("topk_indices", (len(x), FLASH.index_topk), np.int32, x))[:FEW]
            few = step.metadata("cpu", np.asarray, FEW)
            want = (
                layer_on("cpu", self.weights)
                .step(to_host(x)[:FEW], before, few, topk_indices=chosen)
                .astype(np.float64)
            )
            error = float(np.sqrt(np.square(got - want).mean() / np.square(want).mean()))
            assert error < MOST_ERROR, error
            return error

        calls = [functools.partial(layer.step, x, caches, metadata, out=out)] * LAYERS
        weights = sum(getattr(layer, name).nbytes for name, _ in PRODUCTS.values())
        keys = self.batch * (128 + FLASH.index_topk) * cumla.DSV4_FP8.token_bytes
        moved = weights + keys + self.batch * CONTEXT // RATIO * cumla.INDEXER_FP8.token_bytes
        return Problem(self.op, str(self), {"cumla": ("cupy", calls)}, moved, check=check)


class Step:
    """A step's lengths and tables, of which any number of the first requests can be taken."""

    def __init__(self, batch):
        rng = np.random.default_rng(0)
        self.serving = ServingConfig(
            compress_ratios=(RATIO,), index_topk=FLASH.index_topk, num_heads=FLASH.num_attention_heads,
            block_size=PAGE, compressed_block_size=COMPRESSED_PAGE, max_num_batched_tokens=batch, max_num_seqs=batch,
            max_model_len=CONTEXT,
        )  # fmt: skip
        self.lens = (CONTEXT - np.arange(batch) % RATIO).astype(np.int32)
        self.window = self.last_pages(batch, PAGE, 3)
        self.states = self.last_pages(batch, STATE_BLOCK_SIZES[RATIO], 3)
        self.compressed = rng.permutation(batch * CONTEXT // COMPRESSED_PAGE).astype(np.int32).reshape(batch, -1)

    @staticmethod
    def last_pages(batch, size, count):
        """A table of requests that hold their last pages alone; those before are page 0, which is not read."""
        table = np.zeros((batch, CONTEXT // size), np.int32)
        table[:, -count:] = 1 + np.arange(batch * count).reshape(batch, count)
        return table

    def metadata(self, backend, put, requests):
        """What the layer takes, of the first requests."""
        batch = batch_of(put, [1] * requests, self.lens[:requests], self.window[:requests])
        builder = DeepseekV4StepBuilder(self.serving, backend)
        return builder.build(batch, put(self.compressed[:requests]), {RATIO: put(self.states[:requests])})

    def caches(self):
        """Filled with rows of ordinary numbers."""
        caches = DeepseekV4Caches.allocate(
            RATIO, self.serving, self.window.max() + 1, self.compressed.size, self.states.max() + 1, xp=cupy
        )
        for name in ("window", "compressed", "indexer"):
            cache, layout = getattr(caches, name), layout_of(name)
            slots = len(cache) * cache.shape[1] + (1 << 16)
            cache[...] = repeating_cache("cuda", layout, cache.shape[1], slots).array[: len(cache)]
        for states in (caches.state, caches.indexer_state):
            states[...] = cupy.random.default_rng(5).standard_normal(states.shape, np.float32)
        return caches


def layout_of(name):
    return cumla.INDEXER_FP8 if name == "indexer" else cumla.DSV4_FP8


def host_caches(caches):
    """Copies in memory of the host, pages as far from one another as they are on the device."""
    copies = {name: to_host(cupy.ascontiguousarray(array)) for name, array in vars(caches).items()}
    for name, pages in copies.items():
        if pages.dtype == np.uint8:
            copies[name] = layout_of(name).allocate(*pages.shape[:2])
            copies[name][...] = pages
    return DeepseekV4Caches(**copies)


def over_parts(rows, peers=False):
    """peers: over the peers' parts, where they were measured."""
    found = {}
    rows = [row for row in rows if row.get("us_graph")]
    for config in {row["config"]: None for row in rows}:
        us = {}
        for row in rows:
            if row["config"] == config and (row["impl"] == "cumla" or peers):
                us[row["op"]] = row["us_graph"]  # a peer's row comes after ours
        parts = sum(us.values()) - us.get(Layer.op, 0.0)
        found[config] = us.get(Layer.op, 0.0) / parts if parts else None
    return found


if __name__ == "__main__":
    cases = []
    for weights in ("fp8", "bfloat16"):
        for batch in (32, 128):
            cases += [*(Part(name, batch, weights) for name in (*PRODUCTS, *PARTS)), Layer(batch, weights)]
    over_peers = functools.partial(over_parts, peers=True)
    raise SystemExit(
        run(case_arguments(__doc__).parse_args(), cases, bar=BAR, over_parts=over_parts, over_peers=over_peers)
    )

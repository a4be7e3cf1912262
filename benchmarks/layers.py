"""One C4A layer of DeepSeek V4 Flash's sizes, a step of decodes at 32K of context, in a CUDA graph.

    python benchmarks/layers.py [--json benchmarks/results/h200/layers.json]

Beside it its products, attention, indexer logits and top-k, each alone in a graph of its own. The layer's output is
compared with the cpu backend's for some of the requests, which the rows that the device selected are given to.
"""

import functools

import cupy
import ml_dtypes
import numpy as np
from common import Report, arguments, graph_us, host_us, random_bits, sets_for

import cumla
from cumla.metadata.batch import CommonAttentionMetadata
from cumla.metadata.builder import ServingConfig
from cumla.models.deepseek_v4 import DeepseekV4Attention, DeepseekV4Caches, DeepseekV4Config
from cumla.models.products import multiply, multiply_groups
from cumla.models.step import STATE_BLOCK_SIZES, DeepseekV4StepBuilder

BF16 = ml_dtypes.bfloat16
CONTEXT, RATIO, PAGE, COMPRESSED_PAGE = 32_768, 4, 64, 256
FLASH = DeepseekV4Config(
    hidden_size=4096, num_attention_heads=64, q_lora_rank=1024, o_groups=8, o_lora_rank=1024, compress_ratios=(RATIO,),
    index_n_heads=64, index_topk=512, max_position_embeddings=CONTEXT,
)  # fmt: skip
BAR = 1.25
FEW = 4  # requests that are checked
LAYERS = 20  # of the kind that the model has, about: they share a step's metadata and its plan of the decodes


def normal(shape, seed, scale=1.0):
    """Sums of uniform numbers of variance scale^2, bfloat16 on the device."""
    size = int(np.prod(shape))
    total = sum((random_bits(size, 3 * seed + i) >> 8).astype(np.float32) for i in range(3)) / (1 << 24) - 1.5
    return (total * np.float32(2 * scale)).astype(BF16).reshape(shape)


def weights():
    """By the names that the layer takes; products keep the size of what they are given."""
    config, made = FLASH, {}
    heads, rank, width = config.num_attention_heads, config.q_lora_rank, config.o_groups * config.o_lora_rank
    index_width = config.index_n_heads * 128
    shapes = {
        "q_a_proj": (rank, config.hidden_size), "kv_proj": (512, config.hidden_size), "q_b_proj": (heads * 512, rank),
        "o_a_proj": (width, heads * 512 // config.o_groups), "o_b_proj": (config.hidden_size, width),
        "compressor.kv_proj": (1024, config.hidden_size), "compressor.gate_proj": (1024, config.hidden_size),
        "compressor.indexer.kv_proj": (256, config.hidden_size),
        "compressor.indexer.gate_proj": (256, config.hidden_size),
        "compressor.indexer.scorer.weights_proj": (config.index_n_heads, config.hidden_size),
        "compressor.indexer.q_b_proj": (index_width, rank),
    }  # fmt: skip
    for seed, (name, shape) in enumerate(shapes.items()):
        made[f"{name}.weight"] = normal(shape, seed, shape[1] ** -0.5)
    for name, size in (("q_a_norm", rank), ("kv_norm", 512), ("compressor.kv_norm", 512)):
        made[f"{name}.weight"] = cupy.ones(size, np.float32)
    made["compressor.indexer.kv_norm.weight"] = cupy.ones(128, np.float32)
    for name, dim in (("compressor.", 512), ("compressor.indexer.", 128)):
        made[f"{name}position_bias"] = normal((RATIO, 2 * dim), dim, 0.5).astype(np.float32)
    return made | {"sinks": cupy.zeros(heads, np.float32)}


class Step:
    """A step of decodes, one of each request, one in four of which completes a row."""

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
        at = self.lens - 1
        self.slots = self.window[np.arange(batch), at // PAGE].astype(np.int64) * PAGE + at % PAGE

    @staticmethod
    def last_pages(batch, size, count):
        """A table of requests that hold their last pages alone; those before are page 0, which nobody reads."""
        table = np.zeros((batch, CONTEXT // size), np.int32)
        table[:, -count:] = 1 + np.arange(batch * count).reshape(batch, count)
        return table

    def metadata(self, backend, put, requests):
        """What the layer takes, of the first requests."""
        starts = np.arange(requests + 1, dtype=np.int32)
        lens = self.lens[:requests]
        batch = CommonAttentionMetadata(
            put(starts), starts, put(lens), lens, lens - 1, requests, requests, 1, put(self.window[:requests]),
            put(self.slots[:requests]),
        )  # fmt: skip
        builder = DeepseekV4StepBuilder(self.serving, backend)
        return builder.build(batch, put(self.compressed[:requests]), {RATIO: put(self.states[:requests])})

    def caches(self):
        """Filled with rows of ordinary numbers."""
        pages = self.compressed.size
        caches = DeepseekV4Caches.allocate(
            RATIO, self.serving, self.window.max() + 1, pages, self.states.max() + 1, xp=cupy
        )
        for cache, layout in ((caches.window, cumla.DSV4_FP8), (caches.compressed, cumla.DSV4_FP8),
                              (caches.indexer, cumla.INDEXER_FP8)):  # fmt: skip
            rows, total = 1 << 16, cache.shape[0] * cache.shape[1]
            for first in range(0, total, rows):
                count = min(rows, total - first)
                slots = cupy.arange(first, first + count)
                made = normal((count, layout.head_dim), first + layout.head_dim)
                cumla.quantize_and_insert_k_cache(made, cache, slots, cache.shape[1], layout=layout)
        for states in (caches.state, caches.indexer_state):
            states[...] = normal(states.shape, 5).astype(np.float32)
        return caches


def host(array):
    return array if isinstance(array, np.ndarray) else array.get()


def host_caches(caches):
    """Copies in memory of the host, pages as far from one another as they are on the device."""
    copies = {}
    for name, array in vars(caches).items():
        pages = host(cupy.ascontiguousarray(array))
        if array.dtype == np.uint8:
            layout = cumla.INDEXER_FP8 if name == "indexer" else cumla.DSV4_FP8
            copies[name] = layout.allocate(array.shape[0], array.shape[1])
            copies[name][...] = pages
        else:
            copies[name] = pages
    return DeepseekV4Caches(**copies)


def alone(layer, step, caches, metadata, batch):
    """{part: calls of it alone}, on inputs that take turns."""
    config, made = FLASH, {}
    heads = config.num_attention_heads
    products = {
        "low rank": (layer.low_rank, np.dtype(BF16)), "q": (layer.q_b, np.dtype(BF16)),
        "compressors": (layer.pooled, np.dtype(np.float32)), "index q": (layer.index_q_b, np.dtype(BF16)),
        "o, second": (layer.o_b, np.dtype(BF16)),
    }  # fmt: skip
    for name, (weight, dtype) in products.items():
        sets = [weight, *(weight.copy() for _ in range(sets_for(weight.nbytes) - 1))]
        x, out = normal((batch, weight.shape[1]), 3), cupy.empty((batch, len(weight)), dtype)
        made[f"product: {name}"] = [functools.partial(multiply, x, each, out, None) for each in sets]
    x = normal((batch, config.o_groups, heads * 512 // config.o_groups), 4).transpose(1, 0, 2)
    out = cupy.empty((batch, config.o_groups, config.o_lora_rank), BF16).transpose(1, 0, 2)
    sets = [layer.o_a, *(layer.o_a.copy() for _ in range(sets_for(layer.o_a.nbytes) - 1))]
    made["product: o, first"] = [functools.partial(multiply_groups, x, each, out, None) for each in sets]

    rng, rows = np.random.default_rng(1), caches.compressed.shape[0] * caches.compressed.shape[1]
    q, lens = normal((batch, 1, heads, 512), 6), cupy.full(batch, config.index_topk, np.int32)
    out, lse = cupy.empty((batch, 1, heads, 512), BF16), cupy.empty((batch, heads, 1), np.float32)
    window = metadata.window
    made["attention"] = [
        functools.partial(
            cumla.sparse_mla_decode, q, caches.window, window.decode_swa_indices, topk_length=window.decode_swa_lens,
            extra_k_cache=caches.compressed, extra_indices=indices, extra_topk_length=lens, attn_sink=layer.sinks,
            plan=window.decode_plan(RATIO), out=out, lse=lse,
        )
        for indices in (
            cupy.asarray(rng.integers(0, rows, (batch, 1, config.index_topk)).astype(np.int32)) for _ in range(4)
        )
    ]  # fmt: skip
    made |= indexer_alone(step, caches, metadata, batch)
    return made


def indexer_alone(step, caches, metadata, batch):
    decode = metadata.indexer.decode
    q = (random_bits(batch * FLASH.index_n_heads * 128, 7) % 0x70).astype(np.uint8).reshape(batch, 1, -1, 128)
    head_weights = normal((batch, FLASH.index_n_heads), 8).astype(np.float32)
    width = CONTEXT // RATIO
    lens = cupy.asarray(step.lens // RATIO)
    sets, caches_there = [], [caches.indexer]
    while len(caches_there) < min(4, sets_for(caches.indexer.nbytes)):
        copy = cumla.INDEXER_FP8.allocate(*caches.indexer.shape[:2], cupy)
        copy[...] = caches.indexer
        caches_there.append(copy)
    logits, chosen = [], cupy.empty((batch, FLASH.index_topk), np.int32)
    for cache in caches_there:
        logits.append(cupy.empty((batch, width), np.float32))
        sets.append(functools.partial(
            cumla.fp8_paged_mqa_logits, q, cache, head_weights, decode.seq_lens, decode.block_table,
            decode.schedule_metadata, width, out=logits[-1],
        ))  # fmt: skip
        sets[-1]()
    choices = [
        functools.partial(cumla.top_k_per_row, each, FLASH.index_topk, seq_lens=lens, out=chosen) for each in logits
    ]
    return {"indexer logits": sets, "top-k": choices}


def check(step, layer, host_layer, device_caches, x, metadata):
    """Relative rms of the device's output against the cpu backend's, of the first requests."""
    before = host_caches(device_caches)
    got = host(layer.step(x, device_caches, metadata)).astype(np.float64)[:FEW]
    chosen = host(layer.scratch.array("topk_indices", (len(x), FLASH.index_topk), np.int32, x))[:FEW]
    want = host_layer.step(host(x)[:FEW], before, step.metadata("cpu", np.asarray, FEW), topk_indices=chosen)
    want = want.astype(np.float64)
    error = float(np.sqrt(np.square(got - want).mean() / np.square(want).mean()))
    assert error < 0.02, error
    return error


def layer_row(report, batch, layer, host_layer):
    config = f"b {batch}, {CONTEXT:,} of context"
    if not report.wants("layer", config):
        return
    step = Step(batch)
    metadata, caches = step.metadata(None, cupy.asarray, batch), step.caches()
    x = normal((batch, FLASH.hidden_size), 9)
    out = cupy.empty_like(x)
    error = check(step, layer, host_layer, caches, x, metadata)
    parts = {name: graph_us(calls) for name, calls in alone(layer, step, caches, metadata, batch).items()}
    for name, us in parts.items():
        report.add(f"alone: {name}", config, "cumla-cuda", us_graph=us, checked=False)
    total = sum(parts.values())
    report.add("alone: all of these", config, "cumla-cuda", us_graph=total, checked=False)

    def run():
        layer.step(x, caches, metadata, out=out)

    us = graph_us([run] * LAYERS)
    report.add("layer", config, "cumla-cuda", us=host_us(run), us_graph=us, max_abs_err=error)
    print(" " * 40 + f"{us / total:.2f} times the sum (bar {BAR}); error: relative rms")


def main():
    report = Report(arguments(__doc__).parse_args())
    given = weights()
    options = {"activations": "bfloat16", "cache_format": "fp8"}
    layer = DeepseekV4Attention(FLASH, 0, given, xp=cupy, **options)
    host_layer = DeepseekV4Attention(
        FLASH, 0, {name: host(array) for name, array in given.items()}, xp=np, backend="cpu", **options
    )
    del given
    for batch in (32, 128):
        layer_row(report, batch, layer, host_layer)
        cupy.get_default_memory_pool().free_all_blocks()
    report.finish(bar=BAR)


if __name__ == "__main__":
    main()

"""Invalid arguments of layers of V4 and V3.2, of their caches and of the builders of their steps."""

import dataclasses

import ml_dtypes
import numpy as np

from cumla.layers.dense import BlockQuantizedWeight
from cumla.metadata import ServingConfig
from cumla.models import (
    DeepseekV4Attention,
    DeepseekV4Config,
    DeepseekV32Attention,
    DeepseekV32Config,
    LayerCaches,
    StepBuilder,
    expected_weights,
)
from support.lab import BF16
from support.models import GoldenLayer, Started
from support.refused import EITHER, Call, From, T, V, With, read_only

E4M3 = ml_dtypes.float8_e4m3fn
SERVING = ServingConfig(compress_ratios=(4, 128))
OTHER = [(0, 6, 1), (2, 8, 2)]  # another batch
KINDS = {
    "DeepseekV4": (DeepseekV4Config, DeepseekV4Attention),
    "DeepseekV32": (DeepseekV32Config, DeepseekV32Attention),
}


def step(case):
    """A step of a golden layer: 3 of V4, of ratio 128; 8 of V4, of ratio 4 with an indexer; 13 of V3.2."""
    started = Started(case)
    return Call(started.made.layer.step, started.arguments, source=started)


def tables():
    """Block tables that sequences of up to 12 tokens fill: states of 4 positions a page, compressed rows of 256."""
    made = Started().made
    batch, tables = made.paged.batch(Started.BATCH)
    tables = {"states4": tables["states4"][:, :3], "compressed": tables["compressed"][:, :1]}
    return Call(made.build, {"batch": batch, "tables": tables}, writes=(made.builder,))


def layer(name, case):
    config, layer = KINDS[name]
    golden = GoldenLayer(case)
    arguments = {"config": config.from_dict(golden.config), "layer": 0, "weights": golden.weights, "max_position": 64}
    return Call(layer, arguments, creates=True)


def v4_caches():
    blocks = {"window": 1, "compressed": 1, "states4": 1}
    arguments = {"spec": V4_SPECS[1], "serving": SERVING, "blocks": blocks}
    return Call(LayerCaches.allocate, arguments, creates=True)


def v32_caches():
    arguments = {"spec": V32_SPECS[0], "serving": ServingConfig(), "blocks": {"rows": 1}, "cache_format": "bfloat16"}
    return Call(LayerCaches.allocate, arguments, creates=True)


def rows(layout, block):
    return From(lambda started: getattr(started.made.layer.layouts, layout).allocate(9, block))


def of_another_batch(name):
    return From(lambda started: getattr(started.metadata(OTHER), name))


def of_another_window(window):
    def build(started):
        made = started.made
        builder = StepBuilder(made.builder.specs, dataclasses.replace(made.builder.config, window_size=window))
        return builder.build(*made.paged.batch(started.BATCH))

    return From(build)


def short_of_pages(cache, window, tokens):
    """Two pages for a longest sequence of more tokens: the host knows that some of its rows cannot be in the cache.

    No two pages of a sequence are the same.
    """
    text = f"layer_caches.{cache}: got 2 pages, expected at least 3 for the"
    changes = {f"layer_caches.{cache}": lambda x: x[:2], f"metadata.{window}.longest": tokens}
    return ("", With(**changes), V, text)


def weight(name, wrong):
    return lambda weights: {**weights, name: wrong(weights[name])}


def without(name):
    return lambda weights: {within: weight for within, weight in weights.items() if within != name}


def another(name):
    """In addition to the others."""
    return lambda weights: {**weights, name: np.zeros(128, np.float32)}


def blocks(values, scales):
    return weight("o_proj.weight", lambda _: BlockQuantizedWeight(values, scales))


def no_pages(*names):
    return [
        (f"layer_caches.{name}", lambda x: x[:0], V, f"layer_caches.{name}: got 0 pages, expected at least 1")
        for name in names
    ]


NO_FORMAT = "cache_format: got 'int4', expected one of fp8, bfloat16, float32"
OPTIONS = [
    ("layer", -1, V, None), ("layer", 0.0, T, None),
    ("activations", "int8", V, None), ("activations", np.float16, V, None), ("activations", None, V, None),
    ("cache_format", "int4", V, None), ("max_position", 0, V, None), ("scratch", {}, T, None),
    ("weights", None, T, None), ("config", {"hidden_size": 256}, T, None), ("backend", "cobol", V, None),
    ("weights", weight("q_b_proj.weight", lambda w: w.T), V, r"q_b_proj\.weight: got"),
    ("weights", weight("q_b_proj.weight", lambda w: w.astype(np.int32)), T, r"q_b_proj\.weight: got"),
    ("weights", weight("q_b_proj.weight", lambda w: w.tolist()), T, r"q_b_proj\.weight: got"),
]  # fmt: skip

SCALES = np.zeros((2, 8), np.float32)
SIZES = {
    "hidden_size": 256, "num_attention_heads": 8, "q_lora_rank": 128, "o_groups": 2, "o_lora_rank": 64,
    "compress_ratios": (1, 4, 128),
}  # fmt: skip
V4_SPECS = DeepseekV4Config(**SIZES).specs()
V32_SPECS = DeepseekV32Config(256, 8, 128).specs()

CALLS = {
    **{f"{name}.step-{case}": lambda case=case: step(case)
       for name, case in (("DeepseekV4Attention", 3), ("DeepseekV4Attention", 8), ("DeepseekV32Attention", 13))},
    "StepBuilder.build": tables,
    "DeepseekV4Attention": lambda: layer("DeepseekV4", 3),
    "DeepseekV4Attention-window": lambda: layer("DeepseekV4", 0),
    "DeepseekV32Attention": lambda: layer("DeepseekV32", 13),
    "LayerCaches.allocate-v4": v4_caches,
    "LayerCaches.allocate-v32": v32_caches,
    "DeepseekV4Config": lambda: Call(DeepseekV4Config, SIZES, creates=True),
    "expected_weights": lambda: Call(expected_weights, {"config": DeepseekV4Config(**SIZES), "layer": 0}, creates=True),
    "StepBuilder-v4": lambda: Call(StepBuilder, {"specs": V4_SPECS, "config": SERVING}, creates=True),
    "StepBuilder-v32": lambda: Call(StepBuilder, {"specs": V32_SPECS, "config": ServingConfig()}, creates=True),
}  # fmt: skip
WRONG = {
    "DeepseekV4Attention.step-3": [
        short_of_pages("compressed", "tokens", 640),
        *(("metadata", of_another_window(window), V,
           rf"metadata: got window_size {window} in the builder's config, .* 128")
          for window in (64, 127, 129, 256)),
    ],
    "DeepseekV4Attention.step-8": [
        ("hidden_states", [[1.0]], T, None),
        ("hidden_states", lambda x: x.astype(np.float32), T, None),
        ("hidden_states", lambda x: x[1:], V, None),
        ("layer_caches", None, T, None),
        ("layer_caches.window", None, T, None),
        *((f"layer_caches.{name}", None, V, None) for name in ("compressed", "state", "indexer", "indexer_state")),
        *no_pages("window", "compressed", "state", "indexer", "indexer_state"),
        ("layer_caches.window", rows("rows", 32), V, None),
        ("layer_caches.compressed", rows("compressed", 32), V, None),
        ("layer_caches.indexer", rows("indexer", 32), V, None),
        ("layer_caches.compressed", np.zeros((9, 64, 512), BF16), T, None),
        ("layer_caches.indexer", np.zeros((9, 64, 128), BF16), T, None),
        ("layer_caches.state", np.zeros((9, 8, 2048), np.float32), V, None),
        ("layer_caches", With(state=np.zeros((9, 8, 2048), "f4"), indexer_state=np.zeros((9, 8, 512), "f4")), V,
         "layer_caches.state: got"),
        ("layer_caches.state", lambda x: x.astype(np.float64), T, None),
        ("layer_caches.state", read_only, V, None),
        short_of_pages("indexer", "tokens", 516),
        ("metadata", None, T, None),
        ("metadata.rows", of_another_batch("rows"), V, "metadata"),
        ("metadata.rows", {}, V, "metadata: got rows of ratios"),
        ("topk_indices", np.full((9, 16), -1), T, None),
        ("topk_indices", np.full((8, 16), -1, np.int32), V, None),
        ("topk_indices", np.full(9, -1, np.int32), V, None),
        ("out", np.zeros((3, 3), BF16), V, None),
        ("out", From(lambda started: read_only(started.hidden(started.BATCH))), V, None),
    ],
    "DeepseekV32Attention.step-13": [
        ("layer_caches", None, T, None), ("layer_caches.rows", None, T, None), ("layer_caches.indexer", None, T, None),
        ("layer_caches.rows", rows("rows", 32), V, None), ("layer_caches.indexer", rows("indexer", 32), V, None),
        *no_pages("rows", "indexer"), short_of_pages("rows", "tokens", 129),
        ("layer_caches.rows", np.zeros((9, 64, 576), BF16), T, None),
        ("metadata", None, T, None), ("metadata.rows", of_another_batch("rows"), V, "metadata.indexer: got"),
        ("topk_indices", np.full((8, 16), -1, np.int32), V, None),
    ],
    "StepBuilder.build": [
        ("tables.states4", lambda x: x[:, :2], V, r"tables\['states4'\]: .*3 columns"),
        ("tables.states4", lambda x: x.astype(np.int64), T, r"tables\['states4'\]: .*int64"),
        ("tables.states4", lambda x: x[:2], V, r"tables\['states4'\]: .*shape"),
        ("tables.states4", None, V, r"tables\['states4'\]: got None"),
        ("tables.compressed", lambda x: x[:, :0], V, r"tables\['compressed'\]: .*1 columns"),
        ("tables.compressed", lambda x: x.astype(np.int64), T, r"tables\['compressed'\]: .*int64"),
        ("tables", [1], T, "tables: got"),
    ],
    "DeepseekV4Attention": [("layer", 99, V, None), *OPTIONS],
    "DeepseekV4Attention-window": [
        ("weights", without("kv_proj.weight"), KeyError, r"kv_proj\.weight: the weights lack it"),
        ("weights", without("q_a_proj.weight"), KeyError, r"q_a_proj\.weight: the weights lack it"),
        ("weights", another("q_a_proj.bias"), V, r"weights: got q_a_proj\.bias, which such a layer does not have"),
        ("weights", another("compressor.kv_norm.weight"), V, r"weights: got compressor\.kv_norm\.weight"),
    ],
    "DeepseekV32Attention": [
        *OPTIONS,
        ("weights", another("o_proj.bias"), V, r"weights: got o_proj\.bias"),
        ("weights", without("q_a_proj.weight"), KeyError, r"q_a_proj\.weight: the weights lack it"),
        ("weights", weight("o_proj.weight", lambda w: w.astype(E4M3)), V,
         r"o_proj\.weight: got FP8 values without scales"),
        *(("weights", blocks(np.zeros((256, 1024), values), scales), error, rf"o_proj\.weight: {text}")
          for values, scales, error, text in (
              (E4M3, np.zeros((2, 7), np.float32), V, r"got scales of shape \(2, 7\)"),
              (E4M3, np.zeros((2, 8), np.int32), T, "got scales of dtype int32"),
              (np.int8, SCALES, T, "got dtype int8 with scales"),
              (np.float32, SCALES, T, "got dtype float32 with scales"),
              (ml_dtypes.float8_e5m2, SCALES, T, "got dtype float8_e5m2"),
          )),
        ("weights", blocks(np.zeros(1024, E4M3), np.zeros((1, 8), np.float32)), V,
         r"o_proj\.weight: got FP8 values of shape \(1024,\)"),
    ],
    "DeepseekV4Config": [
        ("o_groups", 3, V, "o_groups: got 3, expected a divisor of 8 heads"),
        ("index_head_dim", 64, V, "index_head_dim: got 64, expected 128"),
        ("compress_ratios", (1, 8), V, "compress_ratios: got 8, expected 1, 4 or 128"),
    ],
    "expected_weights": [
        ("layer", 3, V, "layer: got 3, expected at most 2"), ("layer", "first", T, "layer: got 'first'"),
        ("config", {}, T, "config: got {}, expected the configuration of a model"),
    ],
    "LayerCaches.allocate-v4": [
        ("spec", None, T, "spec: got None"), ("serving", None, T, None), ("blocks", 3, T, "blocks: got 3"),
        ("blocks.window", -1, V, r"blocks\['window'\]: got -1"), ("cache_format", "int4", V, NO_FORMAT),
        ("cache_format", "fp4", V, None), ("owner", {}, V, "owner: got caches, expected None"),
        ("key_format", "mxfp8", V, "key_format: got 'mxfp8'"), ("state_block_size", 0, V, None),
        *(("", With(blocks={"window": 1, "compressed": 1, "states4": 1, group: 0}, cache_format=kind), V,
           rf"blocks\['{group}'\]: got 0, expected at least 1")
          for kind in ("fp8", "bfloat16", "float32") for group in ("window", "compressed", "states4")),
    ],
    "LayerCaches.allocate-v32": [
        ("blocks.rows", 0, V, r"blocks\['rows'\]: got 0, expected at least 1"),
        ("blocks.rows", 0.5, T, r"blocks\['rows'\]: got 0.5 of type float"),
        ("cache_format", "int4", V, NO_FORMAT), ("key_format", "mxfp4", V, "key_format: got 'mxfp4'"),
    ],
    "StepBuilder-v4": [
        ("specs", None, T, "specs: got None"), ("specs", (1,), T, "specs: got"),
        ("specs", (*V4_SPECS, *V32_SPECS), V, "specs: got layers with rows"),
        ("config", None, T, None),
        ("config", dataclasses.replace(SERVING, has_c1a=True), V, "config.compress_ratios: got"),
        ("config", ServingConfig(compress_ratios=(0, 2)), V, "config.compress_ratios: got"),
        ("state_block_sizes", None, T, None),
        ("state_block_sizes", {4: 4}, V, r"state_block_sizes: got \{4: 4\}, .* for 128"),
        *(("state_block_sizes", {4: 4, 128: size}, EITHER, r"state_block_sizes\[128\]: got")
          for size in (0, 1.5, "4", 2**31, None)),
    ],
    "StepBuilder-v32": [
        ("config", None, T, None),
        ("config", SERVING, V, "config.compress_ratios: got"),
        ("config", ServingConfig(compress_ratios=(1,), has_c1a=True), V, "config.compress_ratios: got"),
        ("config", ServingConfig(noncausal_decodes=True), V, "config.noncausal_decodes: got True"),
    ],
}  # fmt: skip

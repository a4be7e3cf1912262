"""Invalid arguments of layers of V4.1, of their caches and of the builder of their steps."""

import dataclasses

import ml_dtypes
import numpy as np
from seeded_weights import seeded_weights

from cumla.models import DeepseekV41Attention, LayerCaches, SharedSelection, StepBuilder, serving_of
from support.refused import Call, From, T, V, With
from support.v41_stack import Stack, StartedStack

BF16 = ml_dtypes.bfloat16
WINDOW, C2A, REINDEX, C1A, CANDIDATES, REUSE = range(6)  # layers of case 0
NAMES = {WINDOW: "window", C2A: "c2a", REINDEX: "reindex", C1A: "c1a", CANDIDATES: "candidates", REUSE: "reuse"}


def step(number):
    """Of a layer, after the layers before it."""
    started = StartedStack(number)
    return Call(started.stack.layers[number].step, started.given, writes=(started.stack.caches,), source=started)


def build():
    """A sequence that fills one page of compressed rows, of ratio 1 and 2."""
    stack = Stack(0)
    pages = stack.paged.pages["compressed"]
    batch, tables = stack.paged.batch([(0, 0, pages)])
    table = tables["compressed"][:, :1].copy()
    arguments = {
        "common_attn_metadata": batch, "tables": {"compressed": table}, "rings": np.zeros(1, np.int32)
    }  # fmt: skip
    return Call(stack.builder.build, arguments, writes=(stack.builder,), source=stack)


def batch_of(tokens):
    return From(lambda stack: stack.paged.batch([(0, 0, tokens)])[0])


def layer():
    stack = Stack(2)
    arguments = {"config": stack.config, "layer": 0, "weights": seeded_weights(stack.record["parameters"], 0)}
    return Call(DeepseekV41Attention, arguments | {"max_position": 64}, creates=True)


def caches():
    stack = Stack(0)
    blocks = {"window": 2, "compressed": 2, "rings": 1}
    arguments = {"spec": stack.config.spec(C2A), "serving": stack.serving, "blocks": blocks}
    return Call(LayerCaches.allocate, arguments | {"cache_format": "float32"}, creates=True)


def reader(spec):
    return dataclasses.replace(spec, layer=5, selection="source", selection_source=1, keys="none")


def serving():
    return Call(serving_of, {"config": Stack(0).config}, creates=True)


def inserting():
    """Only layers of ratio 0 insert alone."""
    started = StartedStack(WINDOW)
    names = "hidden_states", "layer_caches", "metadata"
    arguments = {"self": started.stack.layers[WINDOW], **{name: started.given[name] for name in names}}
    return Call(DeepseekV41Attention.insert, arguments, source=started)


def of(layout, block):
    return From(lambda started: getattr(started.stack.layers[0].layouts, layout).allocate(40, block))


def other_builder(**changes):
    def make(started):
        serving, specs = dataclasses.replace(started.stack.serving, **changes), started.stack.config.specs()
        builder = StepBuilder([x for x in specs if x.ratio in serving.compress_ratios], serving, "cpu")
        return started.metadata(builder)

    return From(make)


def selection(serving=(), **config):
    def make(started):
        stack = started.stack
        specs = dataclasses.replace(stack.config, **config).specs()
        return SharedSelection(specs, dataclasses.replace(stack.serving, **dict(serving)))

    return From(make)


def indexer_of_another_batch(started):
    batch, tables = started.stack.paged.batch([(1, 5, 1), (0, 9, 7)])
    return started.stack.builder.build(batch, tables, np.array([1, 0], np.int32)).rows


def no_pages(name):
    return (f"layer_caches.{name}", lambda x: x[:0], V, f"layer_caches.{name}: got 0 pages, expected at least 1")


def few_tokens(name):
    return (f"selection.{name}", lambda x: x[:8], V, f"selection.{name}: got 8 tokens, expected at least")


CALLS = {
    **{f"DeepseekV41Attention.step-{name}": lambda number=number: step(number) for number, name in NAMES.items()},
    "StepBuilder.build-v41": build,
    "DeepseekV41Attention": layer,
    "DeepseekV41Attention.insert": inserting,
    "LayerCaches.allocate-v41": caches,
    "serving_of": serving,
}
STEPS = {
    WINDOW: [
        ("hidden_states", lambda x: x[1:], V, None),
        no_pages("window"), ("layer_caches.window", of("rows", 32), V, None),
        ("metadata", None, T, None),
    ],
    C2A: [
        ("hidden_states", [[1.0]], T, None), ("hidden_states", lambda x: x.astype(np.float32), T, None),
        ("layer_caches.ring", None, V, None),
        ("layer_caches.ring", np.zeros((3, 16, 1024), np.float32), V, None),
        ("layer_caches.ring", np.zeros((3, 8, 1024)), T, None),
        ("layer_caches.ring", lambda x: x[:1], V,
         "layer_caches.ring: got 1 rings, expected at least 2 for the 2 requests of the step, a ring each"),
        ("layer_caches.restart_positions", None, V, "layer_caches.restart_positions: got one"),
        ("layer_caches.restart_rows", lambda x: x[1:], V, "layer_caches.restart_rows: got shape"),
        ("layer_caches.restart_positions", np.zeros(3, np.int64), T,
         "layer_caches.restart_positions: got dtype int64"),
        no_pages("indexer"), ("layer_caches.indexer", of("indexer", 32), V, None),
        ("metadata", other_builder(window_size=64), V, "metadata: got window_size 64"),
        ("metadata", other_builder(index_topk=512), V, "metadata: got index_topk 512"),
        ("metadata", other_builder(num_speculative_tokens=9), V, "layer_caches.ring"),
    ],
    REINDEX: [
        ("layer_caches.indexer", None, V, None),
        ("layer_caches.compressed", of("compressed", 64), V,
         "layer_caches.compressed: got another array, expected the array of layer 1"),
        ("selection", selection(), V, "selection: layer 1, which owns the rows, has not run in this step"),
    ],
    C1A: [
        ("layer_caches", None, T, None),
        no_pages("compressed"), ("layer_caches.compressed", of("compressed", 64), V, None),
        ("layer_caches.compressed", np.zeros((9, 128, 512), BF16), T, None),
        ("selection", selection({"max_num_batched_tokens": 8}), V, "selection.topk_indices: got 8 tokens"),
        ("selection", selection(index_topk=16), V, "selection.topk_indices"),
        few_tokens("slots"), few_tokens("lens"),
        ("metadata", other_builder(compress_ratios=(0, 2)), V, "metadata: got rows of ratios"),
        ("metadata.rows", From(indexer_of_another_batch), V, "metadata.indexer"),
    ],
    CANDIDATES: [few_tokens("candidate_blocks")],
    REUSE: [
        ("layer_caches.window", None, T, None), ("layer_caches.compressed", None, V, None),
        ("layer_caches.indexer", of("indexer", 128), V,
         "layer_caches.indexer: got another array, expected the array of layer 3"),
        ("selection", None, T, None),
        ("out", np.zeros((3, 3), BF16), V, None),
    ],
}  # fmt: skip
WRONG = {
    **{f"DeepseekV41Attention.step-{NAMES[number]}": rows for number, rows in STEPS.items()},
    "StepBuilder.build-v41": [
        ("common_attn_metadata", batch_of(200), V, r"tables\['compressed'\]: .*request 0"),
        # The last one completes a row of ratio 1 alone.
        ("common_attn_metadata", batch_of(129), V, r"tables\['compressed'\]: request 0 has 129 tokens, but 1 columns"),
        ("rings", np.zeros(2, np.int32), V, r"rings: got shape \(2,\)"),
        ("rings", np.zeros(1, np.int64), T, "rings: got dtype int64"),
    ],
    "DeepseekV41Attention": [
        ("cache_format", "fp16", V, "cache_format: got 'fp16'"),
        ("activations", "float16", V, "activations: got 'float16'"),
        ("layer", -1, V, "layer: got -1"), ("round_pooled", 1, T, "round_pooled: got 1"),
        ("weights", None, T, "weights: got None"), ("scratch", 3, T, "scratch: got 3 of type int"),
        ("key_format", "fp4", V, "key_format: got 'fp4'"),
        ("", With(key_format="mxfp4", cache_format="bfloat16"), V,
         "key_format: got 'mxfp4' with cache_format 'bfloat16'"),
        ("config", {}, T, "config: got {} of type dict"), ("max_position", 0, V, "max_position: got"),
    ],
    "DeepseekV41Attention.insert": [
        ("self", From(lambda started: started.stack.layers[C2A]), V,
         "layer: got 1 of ratio 2, expected one of ratio 0"),
    ],
    "LayerCaches.allocate-v41": [
        *((f"blocks.{name}", wrong, V, rf"blocks\['{name}'\]: got {wrong}, expected at least 1")
          for name in ("window", "compressed", "rings") for wrong in (0, -1)),
        ("cache_format", "fp16", V, "cache_format: got 'fp16'"),
        ("serving", None, T, "serving: got None of type"), ("", With(spec=reader, owner=3), T, "owner: got 3 of type"),
    ],
    "serving_of": [
        ("compressed_block_size", 65, V, "compressed_block_size: got 65, expected a multiple of 2"),
    ],
}  # fmt: skip

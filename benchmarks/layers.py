"""A layer of V4 Flash that selects rows (C4A), and one of V3.2: a step of decodes at 32K of context, in a graph.

    python benchmarks/layers.py [--json benchmarks/results/h200/layers.json]

Weights are as published (FP8, except V4's compressors and the index weights), or all in bfloat16. Measured are the
layer; its products, attention, indexer logits and top-k, each in its own graph, and the peers' where they can be
imported; and the peers' chain from hidden states to the layer's output in one graph (layer_chain.py). The layer's
output is compared with the cpu backend's for some of the requests, over the rows that the device selected; its error is
the relative rms.

The chain rounds activations to FP8, which changes values and, by near ties of the scores, the rows that it selects. So
it is compared with the layer three times (`chain`, the relative rms): each over the rows it selects; both over the
chain's rows; and both over these rows with the chain's rounding and power-of-two scales in the layer, too. The
remaining difference is e4m3 codes that differ by one step, because products are summed in another order.

A C4A layer's prompt of 4,096 tokens is measured with activations rounded to FP8 (`cumla`), with FP8 weights only
(`weights`) and with bfloat16 weights; its parts are in `prompt_parts`, and `over_bfloat16` is the layer's gain.

`over_chain` is the layer's time divided by the chain's, by configuration, `over_parts` by the sum of its parts, and
`over_peers` by the sum of the peers' parts, with cumla's part where there is no peer.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import layer_chain
import layer_prompts
import layer_steps
import ml_dtypes
import numpy as np
from common import case_arguments, cupy, run
from layer_prompts import TOKENS as PROMPT
from layer_steps import CONTEXT, RATIO, host_caches, relative_rms
from product_cases import BlockLinear

import cumla
from cumla.arrays.memory import to_host
from cumla.bench.indexer_cases import Choice, PagedLogits
from cumla.bench.peers import deep_gemm
from cumla.bench.problem import Problem
from cumla.bench.sparse import Decode
from cumla.layers.weights import BlockQuantizedWeight
from cumla.models import expected_weights, products
from cumla.models.block_scaled import BlockScaledWeight
from cumla.models.deepseek_v4 import DeepseekV4Attention, DeepseekV4Config
from cumla.models.deepseek_v32 import DeepseekV32Attention, DeepseekV32Config
from cumla.models.products import multiply, multiply_groups, width

BF16 = ml_dtypes.bfloat16
FLASH = DeepseekV4Config(
    hidden_size=4096, num_attention_heads=64, q_lora_rank=1024, o_groups=8, o_lora_rank=1024, compress_ratios=(RATIO,),
    index_n_heads=64, index_topk=512, max_position_embeddings=CONTEXT,
)  # fmt: skip
V32 = DeepseekV32Config(
    hidden_size=7168, num_attention_heads=128, q_lora_rank=1536, max_position_embeddings=CONTEXT
)  # fmt: skip
BAR, MOST_ERROR = 1.15, 0.02
# Rounding of consecutive products, 0.027 each, amplified by the softmax (measured: 0.044 to 0.052); and codes that
# differ by one step, 2^-4, because of sums in another order (0.011 to 0.023).
MOST_ROUNDING, MOST_REST = 0.12, 0.04
BATCHES = (32, 128)
CHAIN_ERRORS: dict[str, dict[str, float]] = {}  # by configuration
FEW = 4  # requests to check
LAYERS = 20  # approximate layers of a kind in the model: they share one step's metadata and its decode plan


@dataclasses.dataclass(frozen=True)
class Model:
    """A kind of layer.

    Attributes:
        in_fp8: weights that published checkpoints have in FP8
        products: name -> the layer's attribute, the output's type
        parts: name -> a case for a batch
        is_ue8m0: whether scales of weights are powers of two
    """

    name: str
    config: Any
    attention: Any
    step: Any
    chain: Any
    in_fp8: tuple[str, ...]
    products: Mapping[str, tuple[str, Any]]
    parts: Mapping[str, Callable[[int], Any]]
    is_ue8m0: bool

    def __hash__(self):
        return hash(self.name)


MODELS = {
    "C4A": Model(
        "C4A", FLASH, DeepseekV4Attention, layer_steps.V4Step, layer_chain.V4Chain,
        ("q_a_proj", "kv_proj", "q_b_proj", "o_a_proj", "o_b_proj", "compressor.indexer.q_b_proj"),
        {
            "low rank": ("low_rank", BF16), "q": ("queries.q_b", BF16), "compressors": ("wide", np.float32),
            "index q": ("queries.index_q_b", BF16), "o, second": ("output.o_b", BF16),
            "o, first": ("output.o_a", BF16),
        },
        {
            "attention": lambda batch: Decode(cumla.DSV4_FP8, 64, batch, 1, 128, FLASH.index_topk),
            "indexer logits": lambda batch: PagedLogits(batch, CONTEXT // RATIO),
            "top-k": lambda batch: Choice("decode", batch, CONTEXT // RATIO, FLASH.index_topk),
        },
        True,
    ),
    "V3.2": Model(
        "V3.2", V32, DeepseekV32Attention, layer_steps.V32Step, layer_chain.V32Chain,
        ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "indexer.wk", "indexer.wq_b"),
        {
            "low rank, index keys": ("low_rank", BF16), "q, index q": ("queries.q_b", BF16),
            "W_UK": ("queries.latent", BF16), "index weights": ("wide", np.float32), "W_UV": ("output.value", BF16),
            "o": ("output.o", BF16),
        },
        {
            "attention": lambda batch: Decode(cumla.V32_FP8, 128, batch, 1, V32.index_topk),
            "indexer logits": lambda batch: PagedLogits(batch, CONTEXT),
            "top-k": lambda batch: Choice("decode", batch, CONTEXT, V32.index_topk),
        },
        False,
    ),
}  # fmt: skip


@functools.cache
def layer_on(backend, model, weights, activations="bfloat16"):
    options = {"activations": activations, "cache_format": "fp8", "weight_format": weights, "backend": backend}
    return model.attention(model.config, 0, published(model), xp=np if backend == "cpu" else cupy, **options)


@functools.cache
def published(model):
    """Random weights of a layer's sizes, on the host."""
    rng, found = cupy.random.default_rng(0), {}
    for weight in expected_weights(model.config, 0).values():
        name, shape = weight.transformers, weight.shape
        weight = rng.standard_normal(shape, np.float32)
        if "norm" in name and name.endswith("weight"):
            weight = 1 + weight / 10
        elif len(shape) > 1:
            weight *= 0.5 if "position_bias" in name else shape[-1] ** -0.5
        fp8 = name.removesuffix(".weight") in model.in_fp8
        found[name] = quantized(weight, model.is_ue8m0) if fp8 else weight.get()
    return found


def quantized(weight, is_ue8m0):
    """Quantise blocks of 128 x 128 values by truncation: the upper bits of a float16, times 2^-8, are e4m3's."""
    rows, columns = (-(-size // 128) for size in weight.shape)
    padded = cupy.zeros((rows * 128, columns * 128), np.float32)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.reshape(rows, 128, columns, 128)
    scales = abs(blocks).max((1, 3)) / 448
    scales = cupy.exp2(cupy.ceil(cupy.log2(scales))).astype(np.float32) if is_ue8m0 else scales
    halves = (blocks / scales[:, None, :, None] / 256).astype(np.float16).view(np.uint16)
    codes = ((halves >> 8 & 0x80) | (halves >> 7 & 0x7F)).astype(np.uint8).reshape(padded.shape)
    codes = cupy.ascontiguousarray(codes[: weight.shape[0], : weight.shape[1]])
    return BlockQuantizedWeight(codes.get().view(ml_dtypes.float8_e4m3fn), scales.get())


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a layer alone: a product, or one of the model's parts."""

    name: str
    model: Model
    batch: int
    weights: str

    @property
    def op(self):
        return f"alone: {self.name}" if self.name in self.model.parts else f"alone: product: {self.name}"

    def __str__(self):
        return f"{self.model.name}, b {self.batch}, {CONTEXT:,} of context, {self.weights} weights"

    def problem(self, sizes):
        if self.name in self.model.parts:
            return self.named(self.model.parts[self.name](self.batch).problem(sizes))
        weight, dtype = self.model.products[self.name]
        weight, arrays = operator.attrgetter(weight)(layer_on("cuda", self.model, self.weights)), sizes.inputs()
        if isinstance(weight, BlockScaledWeight):
            groups = weight.shape[0] if len(weight.shape) == 3 else 1
            case = BlockLinear(self.batch, *weight.shape[-2:], groups, weight.is_ue8m0)
            return self.named(case.problem(sizes))
        grouped = getattr(weight, "ndim", 2) == 3
        if grouped:
            groups, rows, columns = weight.shape
            x = arrays.rows(self.batch, groups, columns).transpose(1, 0, 2)
            out = cupy.empty((self.batch, groups, rows), dtype).transpose(1, 0, 2)
        else:
            x = arrays.rows(self.batch, self.model.config.hidden_size if dtype == np.float32 else weight.shape[1])
            out = cupy.empty((self.batch, width(weight)), dtype)
        call = multiply_groups if grouped else multiply
        sets = [weight]
        if hasattr(weight, "copy"):
            sets += [weight.copy() for _ in range(sizes.sets(weight.nbytes) - 1)]
        calls = [functools.partial(call, x, each, out, None) for each in sets]
        moved = weight.nbytes + x.nbytes + out.nbytes
        return Problem(self.op, str(self), {"cumla": ("cupy", calls)}, moved)

    def named(self, problem):
        """A case's problem, with names for its implementation and the peer's."""
        impls = {name: x for name, x in problem.impls.items() if name == "cumla" or name in problem.functions}
        return dataclasses.replace(problem, op=self.op, config=str(self), impls=impls)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A step of decodes, one per request; one in four completes a compressed row of V4."""

    model: Model
    batch: int
    weights: str

    op = "layer"

    __str__ = Part.__str__

    def problem(self, sizes):
        model, config = self.model, self.model.config
        layer, step = layer_on("cuda", model, self.weights), model.step(config, self.batch)
        metadata, caches = step.metadata(None, cupy.asarray, self.batch), step.caches()
        x = sizes.inputs().rows(self.batch, config.hidden_size)
        out = cupy.empty_like(x)

        def check(got):
            got = got if isinstance(got, cupy.ndarray) else cupy.from_dlpack(got)
            got = to_host(got)[:FEW].astype(np.float64)
            chosen = to_host(layer.scratch.shaped("topk_indices", (len(x), config.index_topk), np.int32, x))[:FEW]
            few = step.metadata("cpu", np.asarray, FEW)
            on_host = layer_on("cpu", model, self.weights)
            want = on_host.step(to_host(x)[:FEW], host_caches(caches), few, topk_indices=chosen)
            want = want.astype(np.float64)
            error = relative_rms(got, want)
            assert error < MOST_ERROR, error
            return error

        impls = {"cumla": ("cupy", [functools.partial(layer.step, x, caches, metadata, out=out)] * LAYERS)}
        functions = {}
        if self.weights == "fp8" and sizes.with_peers:
            try:
                chain = model.chain(layer, caches, metadata, x, cupy.empty_like(x))
            except ImportError as error:
                print(f"no chain: {error}")
            else:
                CHAIN_ERRORS[str(self)] = errors_of_chain(model, chain, layer, x, caches, metadata)
                impls["chain"] = "torch", [chain] * LAYERS
                functions["chain"] = f"{layer_chain.FUNCTIONS}; cumla's: {layer_chain.OURS[model.name]}"
        weights = (operator.attrgetter(name)(layer) for name, _ in model.products.values())
        moved = sum(weight.nbytes for weight in weights) + self.bytes_of_rows()
        return Problem(self.op, str(self), impls, moved, check=check, functions=functions, unchecked=("chain",))

    def bytes_of_rows(self):
        """Bytes of the rows that the layer scores and attends to."""
        if self.model.name == "C4A":
            rows, keys = (128 + FLASH.index_topk) * cumla.DSV4_FP8.token_bytes, CONTEXT // RATIO
        else:
            rows, keys = V32.index_topk * cumla.V32_FP8.token_bytes, CONTEXT
        return self.batch * (rows + keys * cumla.INDEXER_FP8.token_bytes)


def errors_of_chain(model, chain, layer, x, caches, metadata):
    """Errors of the chain against the layer: over the layer's rows, over the chain's, and with the chain's rounding."""

    def step(of, rows=None):
        return to_host(of.step(x, caches, metadata, topk_indices=rows)).astype(np.float64)

    def run_chain():
        result = to_host(cupy.from_dlpack(chain())).astype(np.float64)
        return result, cupy.from_dlpack(chain.selected)

    own = step(layer)
    its_rows = to_host(layer.scratch.shaped("topk_indices", chain.selected.shape, np.int32, x))
    got, rows = run_chain()
    others = np.mean([len(np.setdiff1d(a, b)) / len(a) for a, b in zip(to_host(rows), its_rows, strict=True)])
    found = {"own rows": relative_rms(got, own), "other rows": others, "rounding": relative_rms(got, step(layer, rows))}
    rounding, few, chain.is_ue8m0 = layer_on("cuda", model, "fp8", "fp8"), products.MOST_TOKENS, True
    products.MOST_TOKENS = 0
    try:
        got, rows = run_chain()
        found["rest"] = relative_rms(got, step(rounding, rows))
    finally:
        products.MOST_TOKENS, chain.is_ue8m0 = few, False
    print("chain against the layer:", ", ".join(f"{name} {x:.4f}" for name, x in found.items()), flush=True)
    assert found["rounding"] < MOST_ROUNDING, found
    assert found["rest"] < MOST_REST, found
    return found


def over_parts(rows, peers=False):
    """The layer's time divided by the sum of its parts. peers: the peers' parts, where they were measured."""
    found = {}
    rows = [row for row in rows if row.get("us_graph")]
    for config in {row["config"]: None for row in rows}:
        us = {}
        for row in rows:
            if row["config"] == config and row["impl"] != "chain" and (row["impl"] == "cumla" or peers):
                us[row["op"]] = row["us_graph"]  # a peer's row follows cumla's
        parts = sum(us.values()) - us.get(Layer.op, 0.0)
        found[config] = us.get(Layer.op, 0.0) / parts if parts else None
    return found


def over_chain(rows):
    times = {(row["config"], row["impl"]): row["us_graph"] for row in rows if row["op"] == Layer.op}
    return {config: us / times[config, "chain"] for (config, impl), us in times.items()
            if impl == "cumla" and (config, "chain") in times}  # fmt: skip


def over_bfloat16(rows):
    """Time with bfloat16 weights divided by time with FP8 activations, by configuration of a prompt."""
    times = {(row["config"], row["impl"]): row["us"] for row in rows if row["op"] == layer_prompts.Prompt.op}
    return {config: us / times[config, "cumla"] for (config, impl), us in times.items() if impl == "bfloat16"}


def cases():
    for model in MODELS.values():
        for weights in ("fp8", "bfloat16"):
            for batch in BATCHES:
                yield Layer(model, batch, weights)
    yield from layer_prompts.cases(MODELS["C4A"], layer_on)
    for model in MODELS.values():
        for weights in ("fp8", "bfloat16"):
            for batch in BATCHES:
                yield from (Part(name, model, batch, weights) for name in (*model.products, *model.parts))


def compile_ahead():
    """Compile DeepGEMM's kernels in processes, and at the same time a layer's on the host and on the device."""
    matrices = [product for model in MODELS.values() for product in model.chain.products(model.config)]
    for_prompts = [product for product in layer_chain.V4Chain.products(FLASH) if product[0] == 1]
    heads = {model.config.index_n_heads for model in MODELS.values()}
    begun = layer_chain.Compilers(matrices, heads, BATCHES), layer_chain.Compilers(for_prompts, (), (PROMPT,))
    for model in MODELS.values():
        step, few = model.step(model.config, 1), np.zeros((1, model.config.hidden_size), BF16)
        caches = step.caches()
        layer_on("cuda", model, "fp8").step(cupy.asarray(few), caches, step.metadata(None, cupy.asarray, 1))
        layer_on("cpu", model, "fp8").step(few, host_caches(caches), step.metadata("cpu", np.asarray, 1))
    for compilers in begun:
        compilers.wait()


if __name__ == "__main__":
    arguments, over_peers = case_arguments(__doc__).parse_args(), functools.partial(over_parts, peers=True)
    if deep_gemm() is not None:
        compile_ahead()
    raise SystemExit(
        run(
            arguments, list(cases()), bar=BAR, over_parts=over_parts, over_peers=over_peers, over_chain=over_chain,
            over_bfloat16=over_bfloat16, chain=CHAIN_ERRORS, prompt_parts=layer_prompts.PARTS,
        )
    )  # fmt: skip

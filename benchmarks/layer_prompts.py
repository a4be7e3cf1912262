"""A prompt in a whole C4A layer, and the layer's products alone, for benchmarks/layers.py.

Weights and activations are FP8 (`cumla`), only weights are FP8 (`weights`), or both are bfloat16 (`bfloat16`).
"""

import collections
import contextlib
import dataclasses
import functools
import operator
import statistics
from typing import Any

import numpy as np
import record_peers
from common import cupy
from layer_steps import V4Prompt, relative_rms

from cumla.arrays.memory import to_host
from cumla.bench.measure import LONGEST_HOLD_NS
from cumla.bench.problem import Problem
from cumla.dispatch.call import BFLOAT16
from cumla.models.products import multiply, multiply_groups
from cumla.timing import Gate

TOKENS = 4096
# Types of weights and activations, by the name of a row's implementation.
IMPLS = {"cumla": ("fp8", "fp8"), "weights": ("fp8", "bfloat16"), "bfloat16": ("bfloat16", "bfloat16")}
PRODUCTS = {
    "low rank": "low_rank", "q": "queries.q_b", "index q": "queries.index_q_b", "o, first": "output.o_a",
    "o, second": "output.o_b",
}  # fmt: skip
MOST_OF_WEIGHTS, MOST_OF_ROUNDING = 0.01, 0.15  # relative rms of a layer over the same rows, against bfloat16 weights
MOST_OF_PRODUCT = 0.04
REPEATS = 8
PARTS: dict[str, dict[str, float]] = {}  # us of the layer's parts, by implementation


def hidden_states(config):
    return cupy.random.default_rng(0).standard_normal((TOKENS, config.hidden_size), np.float32).astype(BFLOAT16)


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One request's prompt, in a layer without context."""

    model: Any
    layer_on: Any

    op = "layer, prompt"

    def __str__(self):
        return f"{self.model.name}, {TOKENS:,} tokens"

    def problem(self, _):
        config = self.model.config
        prompt, x = V4Prompt(config, TOKENS), hidden_states(config)
        metadata, caches, outs, calls = prompt.metadata(), prompt.caches(), {}, {}
        for name, (weights, activations) in IMPLS.items():
            layer = self.layer_on("cuda", self.model, weights, activations)
            outs[name] = cupy.empty_like(x)
            calls[name] = functools.partial(layer.step, x, caches, metadata, out=outs[name])

        def check(_):
            """Errors of the FP8 layers over the rows that the layer with bfloat16 weights selects."""
            calls["bfloat16"]()
            layer = self.layer_on("cuda", self.model, *IMPLS["bfloat16"])
            rows = layer.scratch.shaped("topk_indices", (TOKENS, config.index_topk), np.int32, x).copy()
            host = {}
            for name, call in calls.items():
                call(topk_indices=rows)
                host[name] = to_host(outs[name]).astype(np.float64)
            errors = {name: relative_rms(got, host["bfloat16"]) for name, got in host.items()}
            print("prompt against bfloat16 weights:", errors, flush=True)
            assert errors["weights"] < MOST_OF_WEIGHTS < errors["cumla"] < MOST_OF_ROUNDING, errors
            return errors["cumla"]

        for name, call in calls.items():
            PARTS[name] = us_of_parts(call)
            print(name, {part: round(us) for part, us in PARTS[name].items()}, flush=True)
        impls = {name: ("cupy", [call]) for name, call in calls.items()}
        return Problem(self.op, str(self), impls, 0, check=check, unchecked=("weights", "bfloat16"), queued=1)


def us_of_parts(step):
    """Median us of each part of a step; the step's work is queued before the device starts it."""
    found = collections.defaultdict(list)
    gate = Gate(LONGEST_HOLD_NS)
    for _ in range(REPEATS):
        events: list[Any] = []

        @contextlib.contextmanager
        def observe(part, events=events):
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            start.record()
            yield
            stop.record()
            events.append((part, start, stop))

        with gate.closed():
            step(observe=observe)
        cupy.cuda.Device().synchronize()
        us: collections.Counter[str] = collections.Counter()
        for part, start, stop in events:
            us[part] += 1e3 * cupy.cuda.get_elapsed_time(start, stop)
        for part, took in us.items():
            found[part].append(took)
    return {part: statistics.median(took) for part, took in found.items()}


@dataclasses.dataclass(frozen=True)
class PromptProduct:
    """One product, with the rounding of its activations, and DeepGEMM's product of the same arrays."""

    model: Any
    layer_on: Any
    name: str

    @property
    def op(self):
        return f"alone: prompt's product: {self.name}"

    __str__ = Prompt.__str__

    def problem(self, sizes):
        layers = {name: self.layer_on("cuda", self.model, *how) for name, how in IMPLS.items()}
        matrices = {name: operator.attrgetter(PRODUCTS[self.name])(layer) for name, layer in layers.items()}
        *groups, rows, columns = matrices["cumla"].shape
        x = cupy.random.default_rng(1).standard_normal((TOKENS, *groups, columns), np.float32).astype(BFLOAT16)
        outs = {name: cupy.empty((TOKENS, *groups, rows), BFLOAT16) for name in IMPLS}
        impls, size = {}, matrices["bfloat16"].size
        for name, matrix in matrices.items():
            call = functools.partial(multiply, x, matrix, outs[name], None)
            if groups:
                by_group = x.transpose(1, 0, 2), matrix, outs[name].transpose(1, 0, 2)
                call = functools.partial(multiply_groups, *by_group, None)
            impls[name] = "cupy", [call]
        functions = {}
        if sizes.with_peers and not groups:
            weight = matrices["cumla"]
            theirs = record_peers.deep_gemm_linear(x, weight.codes, weight.scales, cupy.empty_like(outs["cumla"]))
            if theirs is not None:
                impls["deep_gemm"], functions["deep_gemm"] = ("torch", [theirs]), record_peers.DEEP_GEMM_LINEAR

        def check(_):
            impls["bfloat16"][1][0]()
            error = relative_rms(*(to_host(outs[name])[:512].astype(np.float64) for name in ("cumla", "bfloat16")))
            assert error < MOST_OF_PRODUCT, error
            return error

        moved = size + x.nbytes // 2 + outs["cumla"].nbytes
        unchecked = tuple(name for name in impls if name != "cumla")
        return Problem(
            self.op, str(self), impls, moved, 2 * TOKENS * size, check, functions=functions, unchecked=unchecked,
            fp8=True,
        )  # fmt: skip


def cases(model, layer_on):
    return [Prompt(model, layer_on), *(PromptProduct(model, layer_on, name) for name in PRODUCTS)]

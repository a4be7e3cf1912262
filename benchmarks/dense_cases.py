"""Prefill with projected K and V, and a dense layer's prefill that gathers its context in chunks."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from step_cases import dense_layer_calls

import cumla
from cumla.arrays.memory import to_host
from cumla.bench.dense import BOUND, SAMPLES, DenseDecode
from cumla.bench.problem import Problem, Sizes, calls_of, error_within, problem_of
from cumla.layout import MLA_BF16
from cumla.specs import SPECS, dense_attention
from cumla.specs.dense_attention import NOPE, ROPE, V


@dataclass(frozen=True)
class DensePlan:
    """The decode of a step's first layer, which also divides the keys by the requests' lengths. The plan's time is the
    difference to DenseDecode with lengths, the decode of the other layers."""

    heads: int
    batch: int
    context: int

    op: ClassVar[str] = "dense_mla_decode, first layer"

    def __str__(self) -> str:
        return f"h{self.heads} b{self.batch} of {self.context}, lengths"

    def problem(self, sizes: Sizes) -> Problem:
        plan = cumla.DenseDecodePlan()
        decode = DenseDecode(self.heads, self.batch, self.context, lengths=True).problem(sizes, plan)
        framework, calls = decode.impls["cumla"]

        def renewed(call: Any) -> Any:
            plan.renew()
            return call()

        first = [functools.partial(renewed, call) for call in calls]
        return replace(decode, op=self.op, config=str(self), impls={"cumla": (framework, first)}, functions={})


@dataclass(frozen=True)
class DensePrefill:
    """Attention of a request's new tokens: causal among themselves, or over a context without a mask."""

    heads: int
    new: int
    context: int = 0

    op: ClassVar[str] = "mha_varlen"

    def __str__(self) -> str:
        return f"h{self.heads} {self.new} x {self.context or self.new}" + ("" if self.context else " causal")

    def problem(self, sizes: Sizes) -> Problem:
        new, keys, causal = self.new, self.context or self.new, not self.context
        x = sizes.inputs(requests=1, tokens=new, heads=self.heads, context=self.context, lengths=False)
        arguments = dense_attention.packed(x, causal) | {"softmax_scale": (NOPE + ROPE) ** -0.5}
        outputs = SPECS[self.op].new_results(x, arguments)
        samples = np.linspace(0, new - 1, SAMPLES).astype(int)

        def check(_: Any) -> float:
            """The error of some tokens, each in different heads."""
            worst = 0.0
            for number, token in enumerate(samples):
                one, heads = slice(token, token + 1), slice(number % self.heads, None, SAMPLES)
                seen = token + 1 if causal else keys
                few = {name: to_host(arguments[name][:seen, heads]) for name in ("k", "v")}
                few |= {"q": to_host(arguments["q"][one, heads]), "k_pe": to_host(arguments["k_pe"][:seen])}
                few |= {f"cu_seqlens_{name}": np.array([0, n], np.int32) for name, n in (("q", 1), ("k", seen))}
                want, _ = cumla.mha_varlen(**{**arguments, **few}, backend="reference")
                worst = max(worst, error_within(to_host(outputs["out"][one, heads]), want, BOUND))
            return worst

        calls = calls_of(cumla.mha_varlen, [arguments], **outputs)
        pairs = new * (new + 1) // 2 if causal else new * keys
        moved = 2 * (self.heads * (new * (NOPE + ROPE + V) + keys * (NOPE + V)) + keys * ROPE)
        flop = 2 * self.heads * pairs * (NOPE + ROPE + V)
        return problem_of(self, sizes, calls, moved, check, lambda: outputs["out"].fill(0), flop=flop)


@dataclass(frozen=True)
class DenseLayerPrefill:
    """A dense layer's prefill of one request, with its context in one chunk or in several."""

    heads: int
    new: int
    context: int
    workspace: int

    op: ClassVar[str] = "mla_layer prefill"

    def __str__(self) -> str:
        return f"h{self.heads} {self.new} new, ctx {self.context}, workspace {self.workspace}"

    def problem(self, sizes: Sizes) -> Problem:
        length = self.new + self.context
        calls = dense_layer_calls(sizes, self.heads, [self.new], [length], self.workspace, 1)
        flop = 2 * self.heads * (NOPE + ROPE + V) * (self.new * self.context + self.new * (self.new + 1) // 2)
        return Problem(self.op, str(self), {"cumla": ("cupy", calls)}, length * MLA_BF16.row_bytes, flop, queued=1)

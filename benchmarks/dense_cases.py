"""Prefill with projected K and V, and a dense layer's prefill whose context is gathered in chunks."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

import cumla
from cumla.arrays.memory import to_host
from cumla.bench.dense import BOUND, NOPE, ROPE, SAMPLES, DenseDecode, V
from cumla.bench.problem import Problem, Sizes, by_backend, error_within, problem_of
from cumla.bench.step_suites import dense_layer_calls
from cumla.dispatch.call import BFLOAT16
from cumla.layout import MLA_BF16


@dataclass(frozen=True)
class DensePlan:
    """The decode of a step's first layer, which also divides the keys by their lengths. The plan's time is the
    difference to DenseDecode with lengths, the decode of the other layers."""

    heads: int
    batch: int
    context: int

    op: ClassVar[str] = "dense_mla_decode, first layer"

    def __str__(self) -> str:
        return f"h{self.heads} b{self.batch} of {self.context}, lengths"

    def problem(self, sizes: Sizes) -> Problem:
        decode = DenseDecode(self.heads, self.batch, self.context, lengths=True).problem(sizes)
        framework, calls = decode.impls["cumla"]
        plan = getattr(calls[0], "keywords")["plan"]  # noqa: B009

        def renewed(call: Any) -> Any:
            plan.renew()
            return call()

        first = [functools.partial(renewed, call) for call in calls]
        return replace(decode, op=self.op, config=str(self), impls={"cumla": (framework, first)}, functions={})


@dataclass(frozen=True)
class DensePrefill:
    """New tokens of a request among themselves, causal, or over a context, which is not."""

    heads: int
    new: int
    context: int = 0

    op: ClassVar[str] = "mha_varlen"

    def __str__(self) -> str:
        return f"h{self.heads} {self.new} x {self.context or self.new}" + ("" if self.context else " causal")

    def problem(self, sizes: Sizes) -> Problem:
        arrays, xp, new, keys = sizes.inputs(), sizes.xp, self.new, self.context or self.new
        q, kv = arrays.rows(new, self.heads, NOPE + ROPE), arrays.rows(keys, self.heads, NOPE + V)
        k_pe, scale = arrays.rows(keys, ROPE), (NOPE + ROPE) ** -0.5
        starts = [xp.asarray(np.array([0, n], np.int32)) for n in (new, keys)]
        out, lse = xp.empty((new, self.heads, V), BFLOAT16), xp.empty((self.heads, new), np.float32)
        samples = np.linspace(0, new - 1, SAMPLES).astype(int)

        def check(_: Any) -> float:
            """Some tokens, each with other heads."""
            worst = 0.0
            for number, token in enumerate(samples):
                one, heads = slice(token, token + 1), slice(number % self.heads, None, SAMPLES)
                seen = keys if self.context else token + 1
                of_keys = [to_host(x) for x in (kv[:seen, heads, :NOPE], kv[:seen, heads, NOPE:], k_pe[:seen])]
                want = cumla.mha_varlen(
                    to_host(q[one, heads]), *of_keys[:2], *(np.array([0, n], np.int32) for n in (1, seen)),
                    k_pe=of_keys[2], softmax_scale=scale, backend="reference",
                )  # fmt: skip
                want = want[0] if isinstance(want, tuple) else want
                worst = max(worst, error_within(to_host(out[one, heads]), want, BOUND))
            return worst

        calls = by_backend(
            cumla.mha_varlen, [(q, kv[..., :NOPE], kv[..., NOPE:], *starts)], k_pe=k_pe, softmax_scale=scale,
            causal=not self.context, out=out, lse=lse,
        )  # fmt: skip
        pairs = new * keys if self.context else new * (new + 1) // 2
        moved = 2 * (self.heads * (new * (NOPE + ROPE + V) + keys * (NOPE + V)) + keys * ROPE)
        flop = 2 * self.heads * pairs * (NOPE + ROPE + V)
        return problem_of(self, sizes, calls, moved, check, lambda: out.fill(0), flop=flop)


@dataclass(frozen=True)
class DenseLayerPrefill:
    """A dense layer's prefill of one request, its context in one chunk or in several."""

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

"""Products of few tokens with block-scaled FP8 weights, at the sizes of DeepSeek V4 Flash's layers."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import record_peers

import cumla
from cumla.arrays.memory import to_host
from cumla.bench.problem import Calls, Peer, Problem, Sizes, calls_of, error_within, problem_of
from cumla.bounds import Bound
from cumla.dispatch.call import BFLOAT16
from cumla.layers.weights import E4M3
from cumla.models.products import multiply_groups
from cumla.specs.linear import BLOCK, product

CHECKED_ROWS = 300  # of the weights
MOST_SETS = 48  # so that the smallest weights are not in the L2 cache when they are read again
ROUNDED = Bound(1e-3, 1.01 / 128, 1e-5)
# Name: groups, rows and columns.
FLASH = {
    "low rank": (1, 1536, 4096), "q": (1, 32768, 1024), "index q": (1, 8192, 1024), "o first": (8, 1024, 4096),
    "o second": (1, 4096, 8192),
}  # fmt: skip


@dataclass(frozen=True)
class BlockLinear:
    """One product, compared with DeepGEMM, which quantises activations first, and with cuBLAS over bfloat16 weights."""

    tokens: int
    rows: int
    columns: int
    groups: int = 1
    is_ue8m0: bool = True

    op: ClassVar[str] = "fp8_block_linear"

    def __str__(self) -> str:
        groups = f"{self.groups} x " if self.groups > 1 else ""
        scales = "" if self.is_ue8m0 else ", any scale"
        return f"{self.tokens} tokens, {groups}{self.rows} x {self.columns}{scales}"

    def problem(self, sizes: Sizes) -> Problem:
        inputs, shape = sizes.inputs(tokens=self.tokens), (self.groups, self.rows, self.columns)
        size = self.groups * self.rows * self.columns
        operands = product(inputs, (self.groups,), self.rows, self.columns, self.is_ue8m0)
        operands |= {"float32_output": False, "prefetch_weights": True, "finite_weights": True}
        codes = [operands["weight"], *(inputs.weights(*shape) for _ in range(sizes.sets(size, MOST_SETS) - 1))]
        x, scales, out = operands["x"], operands["weight_scale"], inputs.unwritten(self.tokens, self.groups, self.rows)
        ours = calls_of(cumla.fp8_block_linear, [{**operands, "weight": each} for each in codes], out=out)

        def check(_: Any) -> float:
            """Some rows of every group."""
            sampled = np.linspace(0, self.rows - 1, min(self.rows, CHECKED_ROWS)).astype(int)
            spread = to_host(scales)[:, sampled // BLOCK].repeat(BLOCK, axis=2)[:, :, : self.columns]
            weight = to_host(codes[0])[:, sampled].view(E4M3).astype(np.float64) * spread
            want = np.einsum("tgk,gnk->tgn", to_host(x).astype(np.float64), weight)
            return error_within(to_host(out)[:, :, sampled].astype(np.float64), want, ROUNDED)

        moved = size + scales.nbytes + x.nbytes + out.nbytes
        peer = None
        if self.groups == 1:
            theirs = [(x[:, 0], each[0], scales[0], out[:, 0]) for each in codes]
            peer = Peer("deep_gemm", record_peers.DEEP_GEMM_LINEAR, record_peers.deep_gemm_linear, theirs)
        made = problem_of(
            self, sizes, ours, moved, check, lambda: out.fill(0), flop=2 * self.tokens * size, peer=peer
        )  # fmt: skip
        if sizes.with_peers:
            made.impls["bfloat16"] = "cupy", self.with_bfloat16(sizes.backend, codes, x, out)
        return replace(made, unchecked=("deep_gemm", "bfloat16"))  # of rounded activations, and without scales

    def with_bfloat16(self, backend: str, codes: list[Any], x: Any, out: Any) -> Calls:
        """By cuBLAS."""
        weights = [code.astype(np.float32).astype(BFLOAT16) for code in codes[: len(codes) // 2 + 1]]
        by_group = x.transpose(1, 0, 2), out.transpose(1, 0, 2)
        return [functools.partial(multiply_groups, by_group[0], each, by_group[1], backend) for each in weights]


def products(sizes: Sizes) -> Iterator[BlockLinear]:
    for groups, rows, columns in FLASH.values():
        yield from (BlockLinear(tokens, rows, columns, groups) for tokens in sizes.batch)

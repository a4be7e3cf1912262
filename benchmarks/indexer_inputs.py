"""Queries of an indexer, and the schedule of paged scores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

import cumla
from cumla.arrays.memory import to_host
from cumla.bench import peers
from cumla.bench.indexer_cases import DIM, HEADS, V41_HEADS, Inputs
from cumla.bench.problem import BLOCK, Peer, Problem, Sizes, by_backend, problem_of
from cumla.kernels.types.indexer import QueryFormat
from cumla.specs.measured import contexts


@dataclass(frozen=True)
class QueryQuant:
    """Queries rotated and quantised; in MXFP4 as many heads as DeepSeek V4.1 has."""

    tokens: int
    q_format: QueryFormat = "fp8"

    op: ClassVar[str] = "fused_indexer_q_rope_quant"

    def __str__(self) -> str:
        return f"T {self.tokens}" + ("" if self.q_format == "fp8" else f" {self.q_format}")

    def problem(self, sizes: Sizes) -> Problem:
        x, xp, count, heads = Inputs(sizes), sizes.xp, self.tokens, HEADS if self.q_format == "fp8" else V41_HEADS
        q, weights = x.uniform(count, heads, DIM).astype(np.float16), x.uniform(count, heads)
        table, positions = x.uniform(4096, 64), xp.arange(count, dtype=np.int64) % 4096
        out = xp.empty((count, heads, DIM), np.uint8), xp.empty((count, heads), np.float32)
        want = cumla.fused_indexer_q_rope_quant(
            to_host(positions[:8]), to_host(q[:8]), to_host(table), to_host(weights[:8]), q_format=self.q_format,
            backend="reference",
        )  # fmt: skip

        def check(result: Any) -> float:
            for got, right in zip(result, want, strict=True):
                np.testing.assert_array_equal(to_host(got[:8]), right)
            return 0.0

        given = [(positions, q, table, weights)]
        calls = by_backend(cumla.fused_indexer_q_rope_quant, given, [out], q_format=self.q_format)
        return problem_of(self, sizes, calls, q.nbytes + out[0].nbytes, check)


@dataclass(frozen=True)
class Schedule:
    """Work ranges of decodes by multiprocessor. The installed peer orders the splits otherwise."""

    batch: int

    op: ClassVar[str] = "get_paged_mqa_logits_metadata"

    def __str__(self) -> str:
        return f"b {self.batch}, lengths"

    def problem(self, sizes: Sizes) -> Problem:
        lens = sizes.xp.asarray(contexts(np.random.default_rng(0), self.batch, 1 << 15)[:, None])
        out = sizes.xp.empty((133, 2), np.int32)
        want = cumla.get_paged_mqa_logits_metadata(to_host(lens), BLOCK, 132, backend="reference")

        def check(result: Any) -> float:
            np.testing.assert_array_equal(to_host(result), want)
            return 0.0

        given = [(lens, BLOCK, 132)]
        theirs = Peer("deep_gemm", peers.DEEP_GEMM_SCHEDULE, peers.deep_gemm_schedule, given)
        calls = by_backend(cumla.get_paged_mqa_logits_metadata, given, [out])
        return replace(problem_of(self, sizes, calls, lens.nbytes, check, peer=theirs), unchecked=("deep_gemm",))

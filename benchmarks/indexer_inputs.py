"""Queries of an indexer, and the schedule of paged scores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from record_peers import DEEP_GEMM_SCHEDULE, deep_gemm_schedule

import cumla
from cumla.arrays.memory import to_host
from cumla.bench.indexer_cases import DIM, HEADS, V41_HEADS
from cumla.bench.problem import BLOCK, Peer, Problem, Sizes, calls_of, on_host, problem_of
from cumla.kernels.types.indexer import QueryFormat
from cumla.specs import indexer

OF_TOKENS = "positions", "index_q", "index_weights"


@dataclass(frozen=True)
class QueryQuant:
    """Rotates and quantises queries; MXFP4 queries have DeepSeek V4.1's number of heads."""

    tokens: int
    q_format: QueryFormat = "fp8"

    op: ClassVar[str] = "fused_indexer_q_rope_quant"

    def __str__(self) -> str:
        return f"T {self.tokens}" + ("" if self.q_format == "fp8" else f" {self.q_format}")

    def problem(self, sizes: Sizes) -> Problem:
        heads = HEADS if self.q_format == "fp8" else V41_HEADS
        x = sizes.inputs(rows=self.tokens, heads=heads, context=4096)
        arguments = indexer.queries(x, q_format=self.q_format, dtype=np.float16)
        out = x.unwritten(self.tokens, heads, DIM, dtype=np.uint8), x.unwritten(self.tokens, heads, dtype=np.float32)
        some = {name: array[:8] for name, array in on_host(arguments).items() if name in OF_TOKENS}
        want = cumla.fused_indexer_q_rope_quant(**{**on_host(arguments), **some}, backend="reference")

        def check(result: Any) -> float:
            for got, right in zip(result, want, strict=True):
                np.testing.assert_array_equal(to_host(got[:8]), right)
            return 0.0

        calls = calls_of(cumla.fused_indexer_q_rope_quant, [arguments], [out])
        return problem_of(self, sizes, calls, arguments["index_q"].nbytes + out[0].nbytes, check)


@dataclass(frozen=True)
class Schedule:
    """Work ranges of decodes for each SM. The installed peer orders the splits differently."""

    batch: int

    op: ClassVar[str] = "get_paged_mqa_logits_metadata"

    def __str__(self) -> str:
        return f"b {self.batch}, lengths"

    def problem(self, sizes: Sizes) -> Problem:
        x = sizes.inputs(requests=self.batch, context=1 << 15)
        arguments, out = indexer.schedule(x, BLOCK, 132), x.unwritten(133, 2, dtype=np.int32)
        want = cumla.get_paged_mqa_logits_metadata(**on_host(arguments), backend="reference")

        def check(result: Any) -> float:
            np.testing.assert_array_equal(to_host(result), want)
            return 0.0

        theirs = Peer("deep_gemm", DEEP_GEMM_SCHEDULE, deep_gemm_schedule, [tuple(arguments.values())])
        calls = calls_of(cumla.get_paged_mqa_logits_metadata, [arguments], [out])
        moved = arguments["context_lens"].nbytes
        return replace(problem_of(self, sizes, calls, moved, check, peer=theirs), unchecked=("deep_gemm",))

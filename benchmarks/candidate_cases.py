"""Candidate blocks of V4.1's indexer: selection of blocks, and top-k over candidates compared with all positions."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

import cumla
from cumla.arrays.memory import to_host
from cumla.bench.indexer_cases import DIM, exact, keys_of_pages
from cumla.bench.indexer_cases import V41_HEADS as HEADS
from cumla.bench.problem import BLOCK, Problem, Sizes, calls_of, kind_of, problem_of
from cumla.layout import INDEXER_FP8, CacheLayout
from cumla.ops.candidates import CANDIDATE_BLOCK as POSITIONS
from cumla.specs import candidates, indexer_topk
from cumla.specs.measured import Measured

TOPK = 512


def inputs(case: Any, sizes: Sizes) -> Measured:
    """Of decodes of one token with contexts of one length."""
    return sizes.inputs(
        requests=case.batch, heads=HEADS, topk=TOPK, context=case.context, pages=case.batch * -(-case.context // BLOCK),
        lengths=False,
    )  # fmt: skip


@dataclass(frozen=True)
class CandidateBlocks:
    """Selects the candidate blocks of each row of scores."""

    rows: int
    columns: int
    topk_blocks: int = 2048

    op: ClassVar[str] = "select_candidate_blocks"

    def __str__(self) -> str:
        return f"{self.rows} x {self.columns} k {self.topk_blocks}, {kind_of(False)}"

    def problem(self, sizes: Sizes) -> Problem:
        x = sizes.inputs(tokens=self.rows, keys=self.columns, lengths=False)
        sets = [candidates.select(x, self.topk_blocks) for _ in range(sizes.sets(4 * self.rows * self.columns, 4))]
        outs = [x.unwritten(self.rows, self.topk_blocks, dtype=np.int32) for _ in sets]
        blocks = -(-self.columns // POSITIONS)
        workspace = x.unwritten(min(64 << 20, self.rows * (4 * blocks + 16)), dtype=np.uint8)

        def check(result: Any) -> float:
            for row in sorted({0, self.rows - 1}):
                of_row = np.full(blocks * POSITIONS, -np.inf, np.float32)
                of_row[: self.columns] = to_host(sets[0]["logits"][row])
                best = of_row.reshape(blocks, POSITIONS).max(axis=1)
                best[-1] = np.inf
                want = np.sort(np.argsort(-best, kind="stable")[: self.topk_blocks])
                np.testing.assert_array_equal(to_host(result[row])[: len(want)], want)
            return 0.0

        calls = calls_of(cumla.select_candidate_blocks, sets, outs, workspace=workspace)
        return problem_of(self, sizes, calls, 4 * self.rows * self.columns, check)


@dataclass(frozen=True)
class CandidateTopk:
    """Scores and top-k of candidate positions; "all positions": scores and top-k of every position."""

    batch: int
    context: int
    blocks: int = 2048
    layout: CacheLayout = INDEXER_FP8

    op: ClassVar[str] = "candidate_topk"

    def __str__(self) -> str:
        kind = "" if self.layout is INDEXER_FP8 else " mxfp4"
        return f"b {self.batch} x {self.context}{kind}, {self.blocks} blocks k {TOPK}, {kind_of(False)}"

    def problem(self, sizes: Sizes) -> Problem:
        x = inputs(self, sizes)
        arguments = candidates.choice(x, self.layout, 1, self.blocks, POSITIONS)
        of_blocks = ("candidate_blocks", "candidate_block_size", "batch_invariant")
        everything = {name: x for name, x in arguments.items() if name not in of_blocks}
        everything["kv"] = everything.pop("kv_cache")
        count, chosen = min(self.blocks, -(-self.context // POSITIONS)), to_host(arguments["candidate_blocks"])
        out = x.unwritten(self.batch, TOPK, dtype=np.int32)
        workspace = x.unwritten((64 if sizes.on_device else 4) << 20, dtype=np.uint8)

        def check(result: Any) -> float:
            of_pages = keys_of_pages(sizes.xp, arguments["kv_cache"], arguments["block_table"][0], self.layout)
            scores = exact(sizes.xp, arguments["q"][0, 0], *of_pages, arguments["weights"][0])
            positions = np.repeat(chosen[0, :count] * POSITIONS, POSITIONS) + np.arange(count * POSITIONS) % POSITIONS
            positions = positions[positions < self.context]
            want = np.sort(scores[positions])[::-1][:TOPK]
            found = to_host(result[0])
            found = found[found >= 0]
            assert len(np.unique(found)) == len(want)
            assert np.isin(found, positions).all()
            error = float(np.abs(np.sort(scores[found])[::-1] - want).max() / np.abs(want).max())
            assert error < 1e-3, f"row 0: error {error}"
            return error

        options = {"workspace": workspace}
        calls = calls_of(cumla.candidate_topk, [arguments], [out], **options)
        all_positions = calls_of(cumla.indexer_topk, [everything], [out], **options)(sizes.backend)
        pairs = self.batch * min(count * POSITIONS, self.context)
        found = problem_of(
            self, sizes, calls, pairs * self.layout.token_bytes + chosen.nbytes + out.nbytes, check,
            lambda: out.fill(-7),
            flop=2 * pairs * HEADS * DIM, fp8=True,
        )  # fmt: skip
        beside = replace(found, impls={**found.impls, "all positions": ("cupy", all_positions)})
        return replace(beside, unchecked=("all positions",))


@dataclass(frozen=True)
class CandidateSource:
    """Scores of all positions, their top-k and the candidate blocks; "without blocks": scores and top-k only."""

    batch: int
    context: int
    blocks: int = 2048
    layout: CacheLayout = INDEXER_FP8

    op: ClassVar[str] = "candidate_source"

    def __str__(self) -> str:
        kind = "" if self.layout is INDEXER_FP8 else " mxfp4"
        return f"b {self.batch} x {self.context}{kind}, k {TOPK} and {self.blocks} blocks, {kind_of(False)}"

    def problem(self, sizes: Sizes) -> Problem:
        x = inputs(self, sizes)
        arguments = indexer_topk.over_pages(x, self.layout, 1, self.blocks)
        out, blocks = x.unwritten(self.batch, TOPK, dtype=np.int32), arguments.pop("candidate_blocks")
        arguments |= {"out": out, "workspace": x.unwritten((64 if sizes.on_device else 4) << 20, dtype=np.uint8)}

        def call(backend: str, **options: Any) -> Any:
            return cumla.indexer_topk(**arguments, backend=backend, **options)

        def check(result: Any) -> float:
            row = slice(self.batch - 1, self.batch)
            own = {name: arguments[name][row] for name in ("q", "weights", "context_lens", "block_table")}
            logits = cumla.fp8_paged_mqa_logits(
                kv_cache=arguments["kv"], **own, layout=self.layout, backend=sizes.backend
            )  # fmt: skip
            rows = {"seq_lens": arguments["context_lens"][row], "backend": sizes.backend}
            want = cumla.select_candidate_blocks(logits, self.blocks, **rows)
            np.testing.assert_array_equal(to_host(blocks[row]), to_host(want))
            want = cumla.top_k_per_row(logits, TOPK, **rows)
            np.testing.assert_array_equal(to_host(result[row]), to_host(want))
            return 0.0

        pairs = self.batch * self.context
        found = problem_of(
            self, sizes, lambda backend: [functools.partial(call, backend, candidate_blocks=blocks)],
            pairs * self.layout.token_bytes + out.nbytes + blocks.nbytes, check, lambda: blocks.fill(-7),
            flop=2 * pairs * HEADS * DIM, fp8=True,
        )  # fmt: skip
        beside = replace(
            found, impls={**found.impls, "without blocks": ("cupy", [functools.partial(call, sizes.backend)])}
        )
        return replace(beside, unchecked=("without blocks",))

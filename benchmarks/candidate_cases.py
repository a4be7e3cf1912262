"""Candidate blocks of V4.1's indexer: their selection, and the choice among them beside that among all positions."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

import cumla
from cumla.arrays.memory import to_host
from cumla.bench.indexer_cases import DIM, Inputs
from cumla.bench.problem import BLOCK, Problem, Sizes, by_backend, kind_of, problem_of
from cumla.layout import INDEXER_FP8, CacheLayout
from cumla.ops.candidates import CANDIDATE_BLOCK as POSITIONS

HEADS = 32  # V4.1's index heads
TOPK = 512


@dataclass(frozen=True)
class CandidateBlocks:
    """The blocks of each row of scores."""

    rows: int
    columns: int
    topk_blocks: int = 2048

    op: ClassVar[str] = "select_candidate_blocks"

    def __str__(self) -> str:
        return f"{self.rows} x {self.columns} k {self.topk_blocks}, {kind_of(False)}"

    def problem(self, sizes: Sizes) -> Problem:
        xp = sizes.xp
        sets = sizes.sets(4 * self.rows * self.columns, 4)
        scores = [xp.random.default_rng(i).standard_normal((self.rows, self.columns), np.float32) for i in range(sets)]
        outs = [xp.empty((self.rows, self.topk_blocks), np.int32) for _ in range(sets)]
        blocks = -(-self.columns // POSITIONS)
        workspace = xp.empty(min(64 << 20, self.rows * (4 * blocks + 16)), np.uint8)

        def check(result: Any) -> float:
            for row in sorted({0, self.rows - 1}):
                of_row = np.full(blocks * POSITIONS, -np.inf, np.float32)
                of_row[: self.columns] = to_host(scores[0][row])
                best = of_row.reshape(blocks, POSITIONS).max(axis=1)
                best[-1] = np.inf
                want = np.sort(np.argsort(-best, kind="stable")[: self.topk_blocks])
                np.testing.assert_array_equal(to_host(result[row])[: len(want)], want)
            return 0.0

        calls = by_backend(
            cumla.select_candidate_blocks, [(x, self.topk_blocks) for x in scores], outs, workspace=workspace
        )
        return problem_of(self, sizes, calls, 4 * self.rows * self.columns, check)


@dataclass(frozen=True)
class CandidateTopk:
    """Scores of candidate positions and the choice among them; "all positions": the scores and choice of everything."""

    batch: int
    context: int
    blocks: int = 2048
    layout: CacheLayout = INDEXER_FP8

    op: ClassVar[str] = "candidate_topk"

    def __str__(self) -> str:
        kind = "" if self.layout is INDEXER_FP8 else " mxfp4"
        return f"b {self.batch} x {self.context}{kind}, {self.blocks} blocks k {TOPK}, {kind_of(False)}"

    def problem(self, sizes: Sizes) -> Problem:
        x, xp = Inputs(sizes), sizes.xp
        columns = -(-self.context // BLOCK)
        table = x.arrays.rng.permutation(self.batch * columns).reshape(self.batch, -1).astype(np.int32)
        count = min(self.blocks, -(-self.context // POSITIONS))
        chosen = [
            np.sort(x.arrays.rng.choice(-(-self.context // POSITIONS), count, replace=False)) for _ in range(self.batch)
        ]
        candidates = np.full((self.batch, self.blocks), -1, np.int32)
        candidates[:, :count] = chosen
        q, cache = x.e4m3(self.batch, 1, HEADS, DIM), x.keys(self.batch * columns, self.layout)
        weights = x.uniform(self.batch, HEADS)
        lens, table = xp.full(self.batch, self.context, np.int32), xp.asarray(table)
        out = xp.empty((self.batch, TOPK), np.int32)
        workspace = xp.empty((64 if sizes.on_device else 4) << 20, np.uint8)
        given = q, cache, weights, xp.asarray(candidates), TOPK, lens, table

        def check(result: Any) -> float:
            exact = x.exact(q[0, 0], *x.keys_of_pages(cache, table[0], self.layout), weights[0])
            positions = np.repeat(chosen[0] * POSITIONS, POSITIONS) + np.arange(count * POSITIONS) % POSITIONS
            positions = positions[positions < self.context]
            want = np.sort(exact[positions])[::-1][:TOPK]
            found = to_host(result[0])
            found = found[found >= 0]
            assert len(np.unique(found)) == len(want)
            assert np.isin(found, positions).all()
            error = float(np.abs(np.sort(exact[found])[::-1] - want).max() / np.abs(want).max())
            assert error < 1e-3, f"row 0: error {error}"
            return error

        def everything() -> Any:
            return cumla.indexer_topk(
                q, cache, weights, TOPK, context_lens=lens, block_table=table, out=out, workspace=workspace,
                backend=sizes.backend,
            )  # fmt: skip

        pairs = self.batch * min(count * POSITIONS, self.context)
        found = problem_of(
            self, sizes, by_backend(cumla.candidate_topk, [given], [out], workspace=workspace),
            pairs * self.layout.token_bytes + 4 * candidates.size + out.nbytes, check, lambda: out.fill(-7),
            flop=2 * pairs * HEADS * DIM, fp8=True,
        )  # fmt: skip
        beside = replace(found, impls={**found.impls, "all positions": ("cupy", [everything])})
        return replace(beside, unchecked=("all positions",))


@dataclass(frozen=True)
class CandidateSource:
    """Scores of all positions, the choice among them and the candidate blocks; "without blocks": the first two."""

    batch: int
    context: int
    blocks: int = 2048
    layout: CacheLayout = INDEXER_FP8

    op: ClassVar[str] = "candidate_source"

    def __str__(self) -> str:
        kind = "" if self.layout is INDEXER_FP8 else " mxfp4"
        return f"b {self.batch} x {self.context}{kind}, k {TOPK} and {self.blocks} blocks, {kind_of(False)}"

    def problem(self, sizes: Sizes) -> Problem:
        x, xp = Inputs(sizes), sizes.xp
        columns = -(-self.context // BLOCK)
        table = xp.asarray(x.arrays.rng.permutation(self.batch * columns).reshape(self.batch, -1).astype(np.int32))
        q, cache = x.e4m3(self.batch, 1, HEADS, DIM), x.keys(self.batch * columns, self.layout)
        weights, lens = x.uniform(self.batch, HEADS), xp.full(self.batch, self.context, np.int32)
        out, blocks = xp.empty((self.batch, TOPK), np.int32), xp.empty((self.batch, self.blocks), np.int32)
        workspace = xp.empty((64 if sizes.on_device else 4) << 20, np.uint8)

        def call(backend: str, **options: Any) -> Any:
            return cumla.indexer_topk(
                q, cache, weights, TOPK, context_lens=lens, block_table=table, layout=self.layout, out=out,
                workspace=workspace, backend=backend, **options,
            )  # fmt: skip

        def check(result: Any) -> float:
            row = slice(self.batch - 1, self.batch)
            logits = cumla.fp8_paged_mqa_logits(
                q[row], cache, weights[row], lens[row], table[row], layout=self.layout, backend=sizes.backend
            )
            rows = {"seq_lens": lens[row], "backend": sizes.backend}
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

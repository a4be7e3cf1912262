"""The indexer: scores, the choice, both at once, queries and keys; DeepGEMM and vLLM's operations beside it.

Rows whose text ends in `lengths` are the calls that layers make: each query of a prompt sees what is before it, decodes
are of contexts of different lengths. `full lists` are those in which every query sees all keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

import cumla

from ..arrays.memory import to_host
from ..layout import INDEXER_FP8, INDEXER_MXFP4, CacheLayout
from ..specs.measured import contexts
from . import peers
from .problem import BLOCK, Peer, Problem, Sizes, by_backend, kind_of, problem_of

HEADS, V41_HEADS, DIM = 64, 32, 128
MOST_PAGES = 1 << 14  # of random keys
TOLERANCE = 1e-3  # of scores, as a part of a row's largest magnitude
E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


class Inputs:
    """Random operands of scores, on the device where they are large."""

    def __init__(self, sizes: Sizes, seed: int = 0) -> None:
        self.sizes, self.xp, self.arrays = sizes, sizes.xp, sizes.inputs(seed)

    def e4m3(self, *shape: int) -> Any:
        """Bytes of numbers from -1.75 to 1.75, none of them NaN."""
        bits = self.xp.random.default_rng(int(self.arrays.rng.integers(2**31))).integers(0, 1 << 16, shape, np.uint32)
        return ((bits & 0x80) | (bits >> 8) % 0x3E).astype(np.uint8)

    def uniform(self, *shape: int, low: float = -1.0) -> Any:
        draw = self.xp.random.default_rng(int(self.arrays.rng.integers(2**31))).random(shape, np.float32)
        return draw * np.float32(1.0 - low) + np.float32(low)

    def keys(self, pages: int, layout: CacheLayout = INDEXER_FP8) -> Any:
        """A cache of random keys and scales, whose pages repeat a million rows."""
        base = self.e4m3(min(pages, MOST_PAGES), BLOCK * layout.token_bytes)
        scales = base[:, BLOCK * layout.row_bytes :]
        if layout is INDEXER_MXFP4:
            scales[:] = scales % 5 + 124
        else:
            scales[:] = self.uniform(len(base), BLOCK, low=0.5).view(np.uint8)
        cache = self.xp.empty((pages, BLOCK, layout.token_bytes), np.uint8)
        for start in range(0, pages, len(base)):
            some = cache[start : start + len(base)]
            some[...] = base.reshape(-1, BLOCK, layout.token_bytes)[: len(some)]
        return cache

    def keys_of_pages(self, cache: Any, pages: Any, layout: CacheLayout) -> tuple[Any, Any]:
        """Keys of some pages [N, 128], e4m3 bytes or float64, and their scales [N]."""
        xp, rows = self.xp, cache.reshape(len(cache), -1)[pages]
        k = rows[:, : BLOCK * layout.row_bytes].reshape(-1, layout.row_bytes)
        scales = xp.ascontiguousarray(rows[:, BLOCK * layout.row_bytes :])
        if layout is not INDEXER_MXFP4:
            return k, scales.view(np.float32).reshape(-1)
        values = xp.asarray(E2M1)[xp.stack([k & 15, k >> 4], axis=-1)].reshape(len(k), 4, -1)
        values = values * xp.exp2(scales.reshape(-1, 4, 1).astype(np.float64) - 127)
        return values.reshape(len(k), DIM), xp.ones(len(k))

    def exact(self, q: Any, k: Any, scales: Any, weights: Any) -> np.ndarray:
        """Scores of one query in float64: q [H, D], k [N, D] bytes or float64."""
        values = self.xp.asarray(E4M3)
        keys = values[k] if k.dtype == np.uint8 else k
        scores = (self.xp.maximum(values[q] @ keys.T, 0) * weights[:, None]).sum(axis=0) * scales
        return to_host(scores)


def check_rows(rows: int, exact: Callable[[int], tuple[int, np.ndarray]]) -> Callable[[Any], float]:
    """A check of some rows of logits, of which `exact` gives the first column and the scores.

    Errors are relative to the largest score of these rows: a score is a sum of products of either sign, of which a row
    with few keys may have almost nothing left.
    """

    def check(result: Any) -> float:
        wanted = {row: exact(row) for row in sorted({0, rows // 2, rows - 1})}
        largest = max(float(np.abs(want).max(initial=0)) for _, want in wanted.values())
        worst = 0.0
        for row, (start, want) in wanted.items():
            if not len(want):
                continue
            got = result[row, start : start + len(want)]
            got = got.cpu().numpy() if hasattr(got, "cpu") else to_host(got)
            error = float(np.abs(got - want).max() / largest)
            assert error < TOLERANCE, f"row {row}: error {error}"
            worst = max(worst, error)
        return worst

    return check


@dataclass(frozen=True)
class Logits:
    """Scores of the queries of prompts over packed keys. lengths: each sees what is before it."""

    queries: int
    keys: int
    lengths: bool = False

    op: ClassVar[str] = "fp8_mqa_logits"

    def __str__(self) -> str:
        return f"{self.queries} x {self.keys}, {kind_of(self.lengths)}"

    def inputs(self, sizes: Sizes) -> tuple[Any, Any, Any, Any, Any, Any]:
        """q, k, scales, weights, starts, ends."""
        x, xp = Inputs(sizes), sizes.xp
        ends = np.full(self.queries, self.keys, np.int32)
        if self.lengths:
            ends -= np.arange(min(self.queries, self.keys))[::-1].astype(np.int32)
        return (
            x.e4m3(self.queries, HEADS, DIM), x.e4m3(self.keys, DIM), x.uniform(self.keys, low=0.5),
            x.uniform(self.queries, HEADS), xp.zeros(self.queries, np.int32), xp.asarray(ends),
        )  # fmt: skip

    def problem(self, sizes: Sizes) -> Problem:
        given = q, k, scales, weights, starts, ends = self.inputs(sizes)
        out = sizes.xp.empty((self.queries, self.keys), np.float32)
        seen, exact = to_host(ends), Inputs(sizes).exact

        def row(i: int) -> tuple[int, np.ndarray]:
            return 0, exact(q[i], k[: seen[i]], scales[: seen[i]], weights[i])

        pairs = int(seen.sum())
        return problem_of(
            self, sizes, by_backend(cumla.fp8_mqa_logits, [(q, (k, scales), weights, starts, ends, False)], [out]),
            4 * pairs + k.nbytes + q.nbytes, check_rows(self.queries, row), flop=2 * pairs * HEADS * DIM, fp8=True,
            peer=Peer("deep_gemm", peers.DEEP_GEMM_LOGITS, peers.deep_gemm_logits, [given]),
        )  # fmt: skip


@dataclass(frozen=True)
class PagedLogits:
    """Scores of decodes of next_n tokens over pages. lengths: of contexts up to `context`."""

    batch: int
    context: int
    next_n: int = 1
    lengths: bool = False
    heads: int = HEADS
    layout: CacheLayout = INDEXER_FP8

    op: ClassVar[str] = "fp8_paged_mqa_logits"

    def __str__(self) -> str:
        kind = "" if self.layout is INDEXER_FP8 else " mxfp4"
        heads = "" if self.heads == HEADS else f" h {self.heads}"
        return f"b {self.batch} x {self.context} next_n {self.next_n}{heads}{kind}, {kind_of(self.lengths)}"

    def inputs(self, sizes: Sizes, seed: int) -> tuple[Any, Any, Any, Any, Any]:
        """q, cache, weights, lens, table."""
        x, xp = Inputs(sizes, seed), sizes.xp
        ends = np.full(self.batch, self.context, np.int32)
        if self.lengths:
            ends = np.maximum(contexts(x.arrays.rng, self.batch, self.context), self.next_n)
        lens = ends[:, None] - np.arange(self.next_n - 1, -1, -1, dtype=np.int32)
        columns = -(-self.context // BLOCK)
        table = x.arrays.rng.permutation(self.batch * columns).reshape(self.batch, -1).astype(np.int32)
        return (
            x.e4m3(self.batch, self.next_n, self.heads, DIM), x.keys(self.batch * columns, self.layout),
            x.uniform(self.batch * self.next_n, self.heads), xp.asarray(lens), xp.asarray(table),
        )  # fmt: skip

    def problem(self, sizes: Sizes) -> Problem:
        moved_of_keys = self.batch * self.context * self.layout.token_bytes
        sets = [self.inputs(sizes, seed) for seed in range(sizes.sets(moved_of_keys, 4))]
        outs = [sizes.xp.empty((self.batch * self.next_n, self.context), np.float32) for _ in sets]
        q, cache, weights, lens, table = sets[0]
        seen, inputs = to_host(lens), Inputs(sizes)

        def row(i: int) -> tuple[int, np.ndarray]:
            entry, j = divmod(i, self.next_n)
            k, scales = inputs.keys_of_pages(cache, table[entry], self.layout)
            return 0, inputs.exact(q[entry, j], k, scales, weights[i])[: seen[entry, j]]

        keys, pairs = int(seen[:, -1].sum()), int(seen.sum())
        return problem_of(
            self, sizes, by_backend(cumla.fp8_paged_mqa_logits, [(*x, None, self.context) for x in sets], outs),
            keys * self.layout.token_bytes + 4 * pairs, check_rows(self.batch * self.next_n, row),
            flop=2 * pairs * self.heads * DIM, fp8=True,
            peer=None if self.layout is not INDEXER_FP8 else Peer(
                "deep_gemm", peers.DEEP_GEMM_PAGED_LOGITS, peers.deep_gemm_paged_logits,
                [(*x, self.context) for x in sets],
            ),
        )  # fmt: skip


# Scores of normally distributed numbers x. Scores are sums of ReLUs, so many may be 0; where fewer than k are not, some
# zeros are chosen.
SCORES: dict[str, Callable[[Any, Any], Any]] = {
    "normal": lambda xp, x: x,
    "half zeros": lambda xp, x: xp.maximum(x, 0),
    "90% zeros": lambda xp, x: xp.maximum(x - np.float32(1.2816), 0),
    "95% zeros": lambda xp, x: xp.maximum(x - np.float32(1.6449), 0),
    "99% zeros": lambda xp, x: xp.maximum(x - np.float32(2.3263), 0),
    "zeros": lambda xp, x: xp.zeros_like(x),
    "1,000 +- 5": lambda xp, x: 1000 + 5 * x,
}


@dataclass(frozen=True)
class Choice:
    """The best of each row of scores. lengths: rows see columns of different numbers; scores: a key of SCORES."""

    kind: str  # "decode" or "prefill"
    rows: int
    columns: int
    topk: int
    lengths: bool = False
    scores: str = "normal"

    @property
    def op(self) -> str:
        return f"top_k {self.kind}"

    def __str__(self) -> str:
        scores = "" if self.scores == "normal" else f" {self.scores}"
        return f"{self.rows} x {self.columns} k {self.topk}{scores}, {kind_of(self.lengths)}"

    def problem(self, sizes: Sizes) -> Problem:
        xp, rng = sizes.xp, np.random.default_rng(0)
        lens = np.full(self.rows, self.columns, np.int32)
        if self.lengths:
            lens = contexts(rng, self.rows, self.columns)
            if self.kind == "prefill":
                lens = (self.columns - np.arange(self.rows)[::-1] // 4).clip(1).astype(np.int32)
        sets = sizes.sets(4 * self.rows * self.columns, 4)
        scores = [
            SCORES[self.scores](xp, xp.random.default_rng(i).standard_normal((self.rows, self.columns), np.float32))
            for i in range(sets)
        ]
        outs = [xp.empty((self.rows, self.topk), np.int32) for _ in range(sets)]
        starts, ends = xp.zeros(self.rows, np.int32), xp.asarray(lens)
        decode = self.kind == "decode"
        options = {"seq_lens": ends} if decode else {"row_starts": starts, "row_ends": ends}

        def check(result: Any) -> float:
            for row in sorted({0, self.rows // 2, self.rows - 1}):
                of_row = to_host(scores[0][row, : lens[row]])
                want = np.sort(of_row)[::-1][: self.topk]
                found = result[row].cpu().numpy() if hasattr(result, "cpu") else to_host(result[row])
                found = found[found >= 0]
                assert len(np.unique(found)) == len(want), f"row {row}: {len(found)} entries"
                np.testing.assert_array_equal(np.sort(of_row[found])[::-1], want)  # which of equal scores is open
            return 0.0

        function = f"{peers.top_k_function(self.rows)}, vLLM 0.26" if decode else peers.VLLM_PREFILL_CHOICE
        seen = (ends,) if decode else (None, starts, ends)
        return problem_of(
            self, sizes, by_backend(cumla.top_k_per_row, [(x, self.topk) for x in scores], outs, **options),
            4 * int(lens.sum()), check,
            peer=Peer("vllm", function, peers.vllm_top_k, [(x, self.topk, *seen) for x in scores]),
        )  # fmt: skip


@dataclass(frozen=True)
class Selection:
    """Scores and choice in one call, over packed keys or pages, beside the two steps."""

    scores: Logits | PagedLogits
    topk: int

    @property
    def op(self) -> str:
        return f"indexer_topk {'prefill' if isinstance(self.scores, Logits) else 'decode'}"

    def __str__(self) -> str:
        sizes, _, kind = str(self.scores).partition(", ")
        return f"{sizes} k {self.topk}, {kind}"

    def problem(self, sizes: Sizes) -> Problem:
        xp = sizes.xp
        given: tuple[Any, ...]
        score: Any = cumla.fp8_mqa_logits if isinstance(self.scores, Logits) else cumla.fp8_paged_mqa_logits
        if isinstance(self.scores, Logits):
            q, k, scales, weights, starts, ends = self.scores.inputs(sizes)
            given = (q, (k, scales), weights, starts, ends, False)
            seen, options = {"cu_seqlen_ks": starts, "cu_seqlen_ke": ends}, {"row_ends": ends}
            pairs, read = int(ends.sum()), k.nbytes + q.nbytes
        else:
            q, _, weights, lens, table = given = self.scores.inputs(sizes, 0)
            seen, options = {"context_lens": lens, "block_table": table}, {"seq_lens": lens}
            pairs, read = int(lens.sum()), int(lens.sum()) * (DIM + 4)
        rows, backend = len(weights), sizes.backend
        workspace = xp.empty((64 if sizes.on_device else 4) << 20, np.uint8)
        out, logits = xp.empty((rows, self.topk), np.int32), score(*given, backend=backend)
        want = cumla.top_k_per_row(logits, self.topk, **options, backend=backend)

        def two_steps() -> Any:
            score(*given, out=logits, backend=backend)
            return cumla.top_k_per_row(logits, self.topk, **options, out=out, backend=backend)

        def check(result: Any) -> float:
            assert bool((result == want).all())
            return 0.0

        found = problem_of(
            self, sizes, by_backend(cumla.indexer_topk, [(*given[:3], self.topk)], [out], workspace=workspace, **seen),
            read + out.nbytes, check, lambda: out.fill(-7), flop=2 * pairs * HEADS * DIM, fp8=True,
        )  # fmt: skip
        return replace(found, impls={**found.impls, "two steps": ("cupy", [two_steps])})


def indexer(sizes: Sizes) -> Iterator[Any]:
    for lengths in (True, False):
        for batch in sizes.batch:
            yield PagedLogits(batch, sizes.context, lengths=lengths)
            yield Choice("decode", batch, sizes.context, sizes.extra, lengths)
            yield Selection(PagedLogits(batch, sizes.context, lengths=lengths), sizes.extra)

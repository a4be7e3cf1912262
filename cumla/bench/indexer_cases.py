"""The indexer: scores, the choice, both at once, queries and keys; DeepGEMM and vLLM's operations beside it.

Rows whose text ends in `lengths` are the calls that layers make: each query of a prompt sees what is before it, decodes
are of contexts of different lengths. `full lists` are those in which every query sees all keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

import cumla

from ..arrays.memory import to_host
from ..layout import INDEXER_FP8, INDEXER_MXFP4, CacheLayout
from ..specs import indexer as indexer_inputs
from ..specs import indexer_topk as topk_inputs
from . import peers
from .problem import BLOCK, Peer, Problem, Sizes, calls_of, kind_of, problem_of

HEADS, V41_HEADS, DIM = 64, 32, 128
PAGED = "q", "kv_cache", "weights", "context_lens", "block_table"  # in the order of peers
TOLERANCE = 1e-3  # of scores, as a part of a row's largest magnitude
E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def keys_of_pages(xp: Any, cache: Any, pages: Any, layout: CacheLayout) -> tuple[Any, Any]:
    """Keys of some pages [N, 128], e4m3 bytes or float64, and their scales [N]."""
    rows = cache.reshape(len(cache), -1)[pages]
    k = rows[:, : BLOCK * layout.row_bytes].reshape(-1, layout.row_bytes)
    scales = xp.ascontiguousarray(rows[:, BLOCK * layout.row_bytes :])
    if layout is not INDEXER_MXFP4:
        return k, scales.view(np.float32).reshape(-1)
    values = xp.asarray(E2M1)[xp.stack([k & 15, k >> 4], axis=-1)].reshape(len(k), 4, -1)
    values = values * xp.exp2(scales.reshape(-1, 4, 1).astype(np.float64) - 127)
    return values.reshape(len(k), DIM), xp.ones(len(k))


def exact(xp: Any, q: Any, k: Any, scales: Any, weights: Any) -> np.ndarray:
    """Scores of one query in float64: q [H, D], k [N, D] bytes or float64."""
    values = xp.asarray(E4M3)
    keys = values[k] if k.dtype == np.uint8 else k
    scores = (xp.maximum(values[q] @ keys.T, 0) * weights[:, None]).sum(axis=0) * scales
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

    def inputs(self, sizes: Sizes) -> dict[str, Any]:
        x = sizes.inputs(tokens=self.queries, keys=self.keys, heads=HEADS, lengths=self.lengths)
        return indexer_inputs.packed(x)

    def problem(self, sizes: Sizes) -> Problem:
        arguments = self.inputs(sizes)
        q, k, scales, weights = (arguments[name] for name in ("q", "kv", "kv_scales", "weights"))
        seen = to_host(arguments["cu_seqlen_ke"])

        def row(i: int) -> tuple[int, np.ndarray]:
            return 0, exact(sizes.xp, q[i], k[: seen[i]], scales[: seen[i]], weights[i])

        out, pairs = sizes.xp.empty((self.queries, self.keys), np.float32), int(seen.sum())
        ours = calls_of(cumla.fp8_mqa_logits, [arguments], [out], clean_logits=False)
        theirs = q, k, scales, weights, arguments["cu_seqlen_ks"], arguments["cu_seqlen_ke"]
        return problem_of(
            self, sizes, ours, 4 * pairs + k.nbytes + q.nbytes, check_rows(self.queries, row),
            flop=2 * pairs * HEADS * DIM, fp8=True,
            peer=Peer("deep_gemm", peers.DEEP_GEMM_LOGITS, peers.deep_gemm_logits, [theirs]),
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

    def inputs(self, sizes: Sizes, sets: int = 1) -> list[dict[str, Any]]:
        """Sets of arguments, with pages of their own of one cache."""
        pages = sets * self.batch * -(-self.context // BLOCK)
        x = sizes.inputs(
            requests=self.batch, heads=self.heads, context=self.context, pages=pages, lengths=self.lengths
        )  # fmt: skip
        arguments = [indexer_inputs.paged(x, self.layout, self.next_n) for _ in range(sets)]
        tables = np.split(x.rng.permutation(pages).astype(np.int32), sets)
        return [
            each | {"block_table": x.put(t.reshape(self.batch, -1))} for each, t in zip(arguments, tables, strict=True)
        ]

    def problem(self, sizes: Sizes) -> Problem:
        xp, token_bytes = sizes.xp, self.layout.token_bytes
        sets = self.inputs(sizes, sizes.sets(self.batch * self.context * token_bytes, 4))
        outs = [xp.empty((self.batch * self.next_n, self.context), np.float32) for _ in sets]
        q, cache, weights, lens, table = (sets[0][name] for name in PAGED)
        seen = to_host(lens)

        def row(i: int) -> tuple[int, np.ndarray]:
            entry, j = divmod(i, self.next_n)
            k, scales = keys_of_pages(xp, cache, table[entry], self.layout)
            return 0, exact(xp, q[entry, j], k, scales, weights[i])[: seen[entry, j]]

        keys, pairs = int(seen[:, -1].sum()), int(seen.sum())
        theirs = [(*(each[name] for name in PAGED), self.context) for each in sets]
        return problem_of(
            self, sizes, calls_of(cumla.fp8_paged_mqa_logits, sets, outs, max_context_len=self.context),
            keys * token_bytes + 4 * pairs, check_rows(self.batch * self.next_n, row),
            flop=2 * pairs * self.heads * DIM, fp8=True,
            peer=None if self.layout is not INDEXER_FP8 else Peer(
                "deep_gemm", peers.DEEP_GEMM_PAGED_LOGITS, peers.deep_gemm_paged_logits, theirs
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
        xp = sizes.xp
        x = sizes.inputs(
            tokens=self.rows, keys=self.columns, context=self.columns, topk=self.topk, lengths=self.lengths
        )
        arguments = [topk_inputs.choice(x) for _ in range(sizes.sets(4 * self.rows * self.columns, 4))]
        scores = [SCORES[self.scores](xp, each["logits"]) for each in arguments]
        outs = [xp.empty((self.rows, self.topk), np.int32) for _ in arguments]
        starts, decode = xp.zeros(self.rows, np.int32), self.kind == "decode"
        ends = x.context_lens(self.rows, 1)[:, 0] if decode else arguments[0]["row_ends"]
        if self.lengths and not decode:  # tokens of a prompt see a row of four tokens more each fourth
            ends = x.put((self.columns - np.arange(self.rows)[::-1] // 4).clip(1), np.int32)
        lens, options = to_host(ends), {"seq_lens": ends} if decode else {"row_starts": starts, "row_ends": ends}

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
            self, sizes,
            calls_of(cumla.top_k_per_row, [{"logits": each} for each in scores], outs, topk=self.topk, **options),
            4 * int(lens.sum()), check,
            peer=Peer("vllm", function, peers.vllm_top_k, [(each, self.topk, *seen) for each in scores]),
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
        score: Any
        xp, scores, backend = sizes.xp, self.scores, sizes.backend
        if isinstance(scores, Logits):
            score, arguments = functools.partial(cumla.fp8_mqa_logits, clean_logits=False), scores.inputs(sizes)
            both, seen, options = arguments, arguments["cu_seqlen_ke"], {"row_ends": arguments["cu_seqlen_ke"]}
            read = arguments["kv"].nbytes + arguments["q"].nbytes
        else:
            score, arguments = cumla.fp8_paged_mqa_logits, scores.inputs(sizes)[0]
            both = {"kv" if name == "kv_cache" else name: x for name, x in arguments.items()}
            seen, options = arguments["context_lens"], {"seq_lens": arguments["context_lens"]}
            read = int(seen.sum()) * scores.layout.token_bytes
        workspace = xp.empty((64 if sizes.on_device else 4) << 20, np.uint8)
        out, logits = xp.empty((len(arguments["weights"]), self.topk), np.int32), score(**arguments, backend=backend)
        want = cumla.top_k_per_row(logits, self.topk, **options, backend=backend)

        def two_steps() -> Any:
            score(**arguments, out=logits, backend=backend)
            return cumla.top_k_per_row(logits, self.topk, **options, out=out, backend=backend)

        def check(result: Any) -> float:
            assert bool((result == want).all())
            return 0.0

        found = problem_of(
            self, sizes, calls_of(cumla.indexer_topk, [both], [out], topk=self.topk, workspace=workspace),
            read + out.nbytes, check, lambda: out.fill(-7), flop=2 * int(seen.sum()) * HEADS * DIM, fp8=True,
        )  # fmt: skip
        return replace(found, impls={**found.impls, "two steps": ("cupy", [two_steps])})


def indexer(sizes: Sizes) -> Iterator[Any]:
    for lengths in (True, False):
        for batch in sizes.batch:
            yield PagedLogits(batch, sizes.context, lengths=lengths)
            yield Choice("decode", batch, sizes.context, sizes.extra, lengths)
            yield Selection(PagedLogits(batch, sizes.context, lengths=lengths), sizes.extra)

"""Sparse attention: decodes over paged caches, prefill over gathered rows; FlashMLA beside it.

Rows whose text ends in `lengths` are the calls that layers make: contexts of different lengths, one shorter than the
window, lists that end in -1, and their lengths. A prefill's tokens see what is before them, and neighbours select
nearly the same. `full lists` are random rows, the same number for each token.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

import cumla

from ..arrays.memory import to_host
from ..bounds import DECODE_OUT, PREFILL_FP8_OUT, PREFILL_OUT
from ..layout import DSV4_FP8, DSV41_FP8, DSV41_FP8_SPLIT, V32_FP8, CacheLayout
from ..ops.sparse_attention import PARTNERS, workspace_bytes
from ..specs import SPECS, sparse_attention
from ..specs.measured import Measured, RepeatingCache
from . import peers
from .problem import (
    BLOCK,
    CHECKED,
    WINDOW,
    Calls,
    Peer,
    Problem,
    Sizes,
    calls_of,
    error_within,
    first,
    kind_of,
    problem_of,
)

SETS, PREFILL_SETS = 4, 2
CONTEXT = 1 << 17  # of the longest request
PREFIXES = "", "extra_"  # of the arguments of each cache
WINDOWED = (DSV4_FP8, DSV41_FP8, DSV41_FP8_SPLIT)  # formats whose first list is a window, with lengths and a sink


@dataclass(frozen=True)
class Decode:
    """Decodes of `batch` entries of s_q tokens; `extra` keys of a second cache, V4.1's with FP4 rows.

    Attributes:
        lengths: as layers make them, or full lists
        ratio: positions of a row of the second cache, with lengths
        slots: rows of each cache; None: the number of the sizes
        beside_portable: the portable kernel is measured as well
        beside_ordinary: the call that ends in an ordinary launch is measured as well
        beside_invariant: the batch-invariant call is measured as well
    """

    layout: CacheLayout
    heads: int
    batch: int
    s_q: int
    topk: int
    extra: int = 0
    block_size: int = BLOCK
    extra_block_size: int = BLOCK
    lengths: bool = False
    ratio: int = 4
    slots: int | None = None
    beside_portable: bool = False
    beside_ordinary: bool = False
    beside_invariant: bool = False

    op: ClassVar[str] = "sparse_mla_decode"

    @property
    def layouts(self) -> tuple[CacheLayout, ...]:
        """The formats of the caches."""
        return (self.layout, PARTNERS.get(self.layout.name, self.layout))[: 2 if self.extra else 1]

    def __str__(self) -> str:
        keys = f"{self.topk}" + (f"+{self.extra}" if self.extra else "")
        return f"{self.layout.name} h{self.heads} b{self.batch} s{self.s_q} {keys}, {kind_of(self.lengths)}"

    def problem(self, sizes: Sizes) -> Problem:
        sets = [self.inputs(sizes, seed) for seed in range(SETS)]
        keys = sum(x.keys for x in sets) / SETS
        width = self.layout.head_dim + 512
        moved = sum(x.row_bytes for x in sets) / SETS + self.batch * self.s_q * self.heads * 2 * width

        def ours(backend: str) -> Calls:
            return [functools.partial(DecodeInputs.cumla, x, backend) for x in sets]

        problem = problem_of(
            self, sizes, ours, moved, sets[0].check, sets[0].clear, flop=keys * 2 * self.heads * width,
            peer=None if self.layout not in (DSV4_FP8, V32_FP8)
            else Peer("flash_mla", peers.FLASH_MLA_DECODE, DecodeInputs.flash_mla, [(x,) for x in sets]),
        )  # fmt: skip
        if self.beside_portable and sizes.backend == "cuda":
            problem.impls["portable"] = "cupy", [x.portable for x in sets]
        if self.beside_ordinary and sizes.backend == "cuda":
            calls = [functools.partial(x.cumla, "cuda", early_release=False) for x in sets]
            problem.impls["early_release=False"] = "cupy", calls
        if self.beside_invariant:
            calls = [functools.partial(x.cumla, sizes.backend, batch_invariant=True) for x in sets]
            problem.impls["batch_invariant=True"] = "cupy", calls
        return problem

    def inputs(self, sizes: Sizes, seed: int) -> DecodeInputs:
        return DecodeInputs(self, sizes, seed)


class DecodeInputs:
    """One set of arguments, and outputs that all calls write."""

    def __init__(self, case: Decode, sizes: Sizes, seed: int) -> None:
        self.case, second = case, case.layouts[1] if case.extra else None
        windows = case.layout in WINDOWED
        topk, window = (case.extra, case.topk) if windows else (case.topk, 0)
        x = sizes.inputs(
            seed, requests=case.batch, tokens=case.batch * case.s_q, heads=case.heads, topk=topk, window=window,
            context=CONTEXT, block_size=case.block_size, pages=(case.slots or sizes.slots) // case.block_size,
            lengths=case.lengths,
        )  # fmt: skip
        self.arguments = sparse_attention.decode(
            x, case.layout, second, windows=windows, ratio=case.ratio, second_block_size=case.extra_block_size
        )
        blocks = case.block_size, case.extra_block_size
        self.caches: list[RepeatingCache] = [
            x.repeating(layout, block_size) for layout, block_size in zip(case.layouts, blocks, strict=False)
        ]
        self.lists = [self.arguments[f"{prefix}indices"] for prefix in PREFIXES[: len(self.caches)]]
        counts = [int((to_host(x) >= 0).sum()) for x in self.lists]
        self.keys = sum(counts)
        self.row_bytes = sum(n * x.token_bytes for n, x in zip(counts, case.layouts, strict=True))
        self.outputs = SPECS[case.op].new_results(x, self.arguments)
        self.plans: dict[str, cumla.DecodePlan] = collections.defaultdict(cumla.DecodePlan)  # by backend
        self.invariant_plan = cumla.DecodePlan(batch_invariant=True)

    def portable(self) -> Any:
        """By the kernel of other devices."""
        from ..kernels.cuda.sparse.kernels import forced

        with forced("portable"):
            return self.cumla("cuda", "portable")

    def cumla(
        self, backend: str, plan: str | None = None, early_release: bool = True, batch_invariant: bool = False
    ) -> Any:
        arguments = {**self.arguments, "batch_invariant": batch_invariant}
        plans = self.invariant_plan if batch_invariant else self.plans[plan or backend]
        cumla.sparse_mla_decode(**arguments, **self.outputs, plan=plans, early_release=early_release, backend=backend)
        return self.outputs["out"]

    def flash_mla(self) -> Any:
        """None where it is absent."""
        named = self.arguments
        return peers.flash_mla_decode(
            named["q"], named["k_cache"], named["indices"], self.outputs["out"], sink=named["attn_sink"],
            lens=named.get("topk_length"), extra_k_cache=named.get("extra_k_cache"),
            extra_indices=named.get("extra_indices"), extra_lens=named.get("extra_topk_length"),
        )  # fmt: skip

    def clear(self) -> None:
        self.outputs["out"][...] = 0

    def check(self, result: Any) -> float:
        """The largest error of some entries, the last of them, which is short, among them."""
        worst, last = 0.0, self.case.batch - 1
        # A query with few keys has results as large as their values, of which 16-bit weights are part of the error.
        bound = DECODE_OUT.of_values(max(cache.largest for cache in self.caches))
        for entry in sorted({0, last // 2, last}):
            one = slice(entry, entry + 1)
            part: dict[str, Any] = {
                name: to_host(x[one]) for name, x in self.arguments.items()
                if hasattr(x, "shape") and name not in ("attn_sink", "k_cache", "extra_k_cache")
            }  # fmt: skip
            for prefix, cache in zip(PREFIXES, self.caches, strict=False):
                part |= {f"{prefix}k_cache": cache.base, f"{prefix}indices": cache.in_base(part[f"{prefix}indices"])}
            sink = self.arguments["attn_sink"]
            part["attn_sink"] = None if sink is None else to_host(sink)
            want, _ = cumla.sparse_mla_decode(**{**self.arguments, **part}, backend="reference")
            worst = max(worst, error_within(first(result[one]), want, bound))
        return worst


@dataclass(frozen=True)
class Prefill:
    """Prefill over `rows` gathered rows: with lengths and a sink, a chunk of a C4A layer at the end of a context.

    Attributes:
        precision: as sparse_mla_prefill has it; FlashMLA's products are of bfloat16 values in any case
    """

    width: int
    heads: int
    topk: int
    rows: int
    tokens: int = 4096
    lengths: bool = False
    precision: str | None = None

    op: ClassVar[str] = "sparse_mla_prefill"

    def __str__(self) -> str:
        rows = f"{self.rows // 1024}K" if self.rows % 1024 == 0 else str(self.rows)
        tokens = "" if self.tokens == 4096 else f" T{self.tokens}"
        products = "" if self.precision is None else f", {self.precision} products"
        return f"d{self.width} h{self.heads} topk {self.topk} of {rows}{tokens}{products}, {kind_of(self.lengths)}"

    def arguments(self, x: Measured) -> dict[str, Any]:
        return sparse_attention.prefill(x, self.width) | {"precision": self.precision}

    def inputs(self, sizes: Sizes) -> Measured:
        window = min(WINDOW, self.topk // 2) if self.width == DSV4_FP8.head_dim else 0
        return sizes.inputs(
            tokens=self.tokens, rows=self.rows, heads=self.heads, topk=self.topk - window, window=window,
            lengths=self.lengths,
        )  # fmt: skip

    def problem(self, sizes: Sizes) -> Problem:
        x = self.inputs(sizes)
        sets = [self.arguments(x) for _ in range(PREFILL_SETS)]
        for operands in sets[1:]:  # the same rows, and the same sink
            operands |= {name: sets[0][name] for name in ("kv", "attn_sink")}
        outputs = SPECS[self.op].new_results(x, sets[0])
        size = workspace_bytes(self.precision, self.rows, self.heads, self.width, False)
        workspace = x.unwritten(size, dtype=np.uint8) if size else None
        keys = sum(int((to_host(operands["indices"]) >= 0).sum()) for operands in sets) / PREFILL_SETS
        moved = self.rows * 2 * self.width + self.tokens * self.heads * 2 * (self.width + 512)
        theirs = [[operands[name] for name in ("q", "kv", "indices", "topk_length", "attn_sink")] for operands in sets]
        return problem_of(
            self, sizes, calls_of(cumla.sparse_mla_prefill, sets, workspace=workspace, **outputs), moved,
            functools.partial(self._check, sets[0]), lambda: outputs["out"][0].fill(0),
            flop=2 * keys * self.heads * (self.width + 512), fp8=self.precision is not None,
            peer=Peer("flash_mla", peers.FLASH_MLA_PREFILL, peers.flash_mla_prefill, theirs),
        )  # fmt: skip

    def _check(self, operands: dict[str, Any], result: Any) -> float:
        """The largest error of some tokens."""
        worst, rows = 0.0, to_host(operands["kv"])
        sink = None if operands["attn_sink"] is None else to_host(operands["attn_sink"])
        for token in np.linspace(0, self.tokens - 1, CHECKED).astype(int):
            one = slice(token, token + 1)
            names = ("q", "indices") if operands["topk_length"] is None else ("q", "indices", "topk_length")
            part: dict[str, Any] = {name: to_host(operands[name][one]) for name in names}
            want, _, _ = cumla.sparse_mla_prefill(**part, kv=rows, attn_sink=sink, backend="reference")
            got = first((result[0] if isinstance(result, (tuple, list)) else result)[one])
            largest = float(np.abs(rows[part["indices"][0]][:, :512].astype(np.float32)).max())
            bound = PREFILL_OUT if self.precision is None else PREFILL_FP8_OUT
            worst = max(worst, error_within(got, want, bound.of_values(largest)))
        return worst


def decode(sizes: Sizes) -> Iterator[Decode]:
    """Calls of layers first."""
    extra = sizes.extra if sizes.layout in WINDOWED else 0
    for lengths in (True, False):
        for batch in sizes.batch:
            yield Decode(sizes.layout, sizes.heads, batch, 1, sizes.topk, extra, lengths=lengths)


def prefill(sizes: Sizes) -> Iterator[Prefill]:
    topk = sizes.topk + (sizes.extra if sizes.layout in WINDOWED else 0)
    for lengths in (True, False):
        for tokens in sizes.tokens:
            yield Prefill(sizes.layout.head_dim, sizes.heads, topk, sizes.context, tokens, lengths)

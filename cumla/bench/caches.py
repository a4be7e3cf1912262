"""The paged caches: insert, gather, copies of pages. `copy` is a kernel that only moves the same number of bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

import cumla

from ..arrays.memory import to_host
from ..bounds import ROUNDED
from ..dispatch.call import BFLOAT16
from ..layout import DSV4_FP8, INDEXER_FP8, INDEXER_MXFP4, MLA_BF16, CacheLayout
from ..specs import dense_cache, norm_rope, sparse_cache
from ..specs.inputs import Inputs
from ..specs.measured import Measured
from . import peers
from .problem import BLOCK, Peer, Problem, Sizes, calls_of, error_within, kind_of, picked, problem_of

SAMPLE = 100  # rows that are compared with the reference
LARGE = 4096  # from so many tokens a copy is measured as well, and pages are filled in order, as prompts fill them
POSITIONS = 8192


def sample(count: int) -> np.ndarray:
    return np.unique(np.linspace(0, count - 1, SAMPLE).astype(int))


def token_bytes(layout: CacheLayout, cache: Any, slots: np.ndarray) -> np.ndarray:
    """Rows and scales of slots of a cache, side by side."""
    block = cache.shape[1]
    page, row = np.divmod(slots, block)
    there, page = np.unique(page, return_inverse=True)
    pages = picked(cache, there).reshape(len(there), -1).view(np.uint8)
    scales = layout.scale_start(block) + row * layout.scale_stride
    rows = pages[page[:, None], (row * layout.row_bytes)[:, None] + np.arange(layout.row_bytes)]
    return np.concatenate([rows, pages[page[:, None], scales[:, None] + np.arange(layout.scale_bytes)]], axis=1)


@dataclass(frozen=True)
class Insert:
    """Rows inserted, quantised or as they are. vLLM inserts V4's rows with the queries' norm: QueryNormInsert."""

    tokens: int
    layout: CacheLayout = DSV4_FP8

    @property
    def op(self) -> str:
        keys = "indexer_k_quant_and_cache"
        ops = {INDEXER_FP8: keys, INDEXER_MXFP4: keys, MLA_BF16: "concat_and_cache_mla"}
        return ops.get(self.layout, "quantize_and_insert_k_cache")

    def __str__(self) -> str:
        return f"{'bfloat16' if self.layout is MLA_BF16 else self.layout.name} T={self.tokens}"

    def problem(self, sizes: Sizes) -> Problem:
        layout, call = self.layout, getattr(cumla, self.op)
        moved = self.tokens * (2 * layout.head_dim + layout.token_bytes + 8)
        inputs = sizes.inputs(rows=self.tokens, pages=-(-self.tokens // BLOCK) + 8)
        sets = [self.arguments(inputs) for _ in range(sizes.sets(moved))]
        names = [name for name in sets[0] if hasattr(sets[0][name], "shape")]
        *read, written, where = names
        cache, slots, which = sets[0][written], to_host(sets[0][where]), sample(self.tokens)
        sample_cache = Measured("reference", replace(inputs.size, pages=-(-len(which) // BLOCK))).new_cache(layout)
        own = {name: to_host(sets[0][name])[which] for name in read}
        call(**{**sets[0], **own, written: sample_cache, where: np.arange(len(which))}, backend="reference")
        want = token_bytes(layout, sample_cache, np.arange(len(which)))

        def check(_: Any) -> float:
            np.testing.assert_array_equal(token_bytes(layout, cache, slots[which]), want)
            return 0.0

        arguments = [[x[name] for name in names] for x in sets]
        theirs = {
            INDEXER_FP8: Peer("vllm", peers.VLLM_KEYS, peers.vllm_insert_keys, arguments),
            MLA_BF16: Peer("vllm", peers.VLLM_CONCAT, peers.vllm_concat, arguments),
        }
        return problem_of(
            self, sizes, calls_of(call, sets), moved, check, lambda: cache.fill(0xA5),
            peer=theirs.get(layout),
            copied=self.tokens >= LARGE,
        )  # fmt: skip

    def arguments(self, x: Inputs) -> dict[str, Any]:
        if self.layout is MLA_BF16:
            return dense_cache.concat(x)
        keys = self.op == "indexer_k_quant_and_cache"
        return (sparse_cache.insert_keys if keys else sparse_cache.insert)(x, self.layout)


@dataclass(frozen=True)
class QueryNormInsert:
    """Fused q-norm, RoPE and K insert of a V4 layer."""

    tokens: int
    heads: int = 64

    op: ClassVar[str] = "qnorm_rope_and_insert"

    def __str__(self) -> str:
        return f"h{self.heads} T={self.tokens}"

    def problem(self, sizes: Sizes) -> Problem:
        layout = DSV4_FP8
        moved = self.tokens * (4 * self.heads * 512 + 2 * 512 + layout.token_bytes + 16)
        x = sizes.inputs(rows=self.tokens, heads=self.heads, context=POSITIONS, pages=-(-self.tokens // BLOCK) + 8)
        sets = [norm_rope.window_rows(x, layout) for _ in range(sizes.sets(moved))]
        outs = [x.unwritten(self.tokens, self.heads, 512) for _ in sets]
        cache, slots, which = sets[0]["k_cache"], to_host(sets[0]["slot_mapping"]), sample(self.tokens)
        sample_cache = layout.allocate(-(-len(which) // BLOCK), BLOCK)
        own = {name: to_host(sets[0][name])[which] for name in ("q", "kv", "positions")}
        own["cos_sin_cache"] = to_host(sets[0]["cos_sin_cache"])
        own |= {"k_cache": sample_cache, "slot_mapping": np.arange(len(which))}
        want = cumla.qnorm_rope_and_insert(**{**sets[0], **own}, backend="reference")
        rows = token_bytes(layout, sample_cache, np.arange(len(which)))

        def check(result: Any) -> float:
            got = token_bytes(layout, cache, slots[which])
            differ = float((got != rows).mean())
            assert differ < 1e-3, f"{differ:.2%} of the bytes of rows differ"  # RoPE rounds once, in some order
            return error_within(picked(result, which), want, ROUNDED)

        names = "q", "kv", "k_cache", "slot_mapping", "positions", "cos_sin_cache", "block_size"
        theirs = [[arguments[name] for name in names] for arguments in sets]
        return problem_of(
            self, sizes, calls_of(cumla.qnorm_rope_and_insert, sets, outs), moved, check, lambda: cache.fill(0xA5),
            peer=Peer("vllm", peers.VLLM_INSERT, peers.vllm_qnorm_rope_insert, theirs),
        )  # fmt: skip


@dataclass(frozen=True)
class Gather:
    """Rows of requests gathered and dequantised. lengths: the window rows of a chunk, else whole contexts."""

    requests: int
    length: int
    layout: CacheLayout = DSV4_FP8
    lengths: bool = False

    op: ClassVar[str] = "dequantize_and_gather_k_cache"

    def __str__(self) -> str:
        layout = "" if self.layout is DSV4_FP8 else f"{self.layout.name} "
        return f"{layout}{self.requests} x {self.length:,}, {kind_of(self.lengths)}"

    def problem(self, sizes: Sizes) -> Problem:
        layout, pages = self.layout, sizes.slots // BLOCK
        x = sizes.inputs(requests=self.requests, context=self.length, lengths=self.lengths, pages=pages)
        lens, count = x.step.seq_lens, x.step.gathered
        moved = int(count.sum()) * (2 * layout.head_dim + layout.token_bytes)
        cache = x.repeating(layout)
        sets = [sparse_cache.gather(x, layout) for _ in range(sizes.sets(moved))]
        out, table = sets[0]["out"], to_host(sets[0]["block_table"])
        tail = np.minimum(count, 16)
        want = np.zeros((self.requests, 16, layout.head_dim), BFLOAT16)
        cumla.dequantize_and_gather_k_cache(
            want, cache.base, lens, tail, table % len(cache.base), BLOCK, 0, layout=layout, backend="reference"
        )

        def check(_: Any) -> float:
            for request, (end, rows) in enumerate(zip(count, tail, strict=True)):
                np.testing.assert_array_equal(to_host(out[request, end - rows : end]), want[request, :rows])
            return 0.0

        names = "out", "k_cache", "seq_lens", "gather_lens", "block_table", "block_size"
        theirs = Peer("vllm", peers.vllm_gather_name(), peers.vllm_gather, [[x[name] for name in names] for x in sets])
        return problem_of(
            self, sizes, calls_of(cumla.dequantize_and_gather_k_cache, sets), moved, check, lambda: out.fill(7),
            peer=theirs if layout is DSV4_FP8 else None, copied=int(count.sum()) >= LARGE,
        )  # fmt: skip


def insert(sizes: Sizes) -> Iterator[Insert | QueryNormInsert]:
    for tokens in sizes.tokens:
        if sizes.layout is DSV4_FP8:
            yield QueryNormInsert(tokens, sizes.heads)
        yield Insert(tokens, sizes.layout)


def gather(sizes: Sizes) -> Iterator[Gather]:
    for lengths in (True, False):
        for tokens in sizes.tokens:
            yield Gather(4 if lengths else 1, tokens, sizes.layout, lengths)

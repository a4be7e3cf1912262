"""Calls of dense layers, as V2's and V3's: inserts, gathers, decodes in the latent space, prompts and merges."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..dispatch.call import BFLOAT16
from ..kernels.cuda.dense_attention import BLOCK, HEADS, HOPPER_CACHE_BYTES, MIN_PART, range_count
from ..layout import MLA_BF16
from ..specs import dense_attention, dense_cache, sparse_attention
from ..specs.served import Served
from .maker import LEAST_COLUMNS, Maker, starts, with_plan
from .record import ExportedCall, Limit
from .unread import LEAST_PAGES

MOST_DENSE_PAGES = 1 << 18
CACHES = BFLOAT, E4M3 = "bfloat16", "e4m3"


class DenseCalls(Maker):
    """Calls of layers that attend to all rows before a token."""

    def all(self) -> Iterator[ExportedCall]:
        for name in CACHES:
            yield self.insert(name)
            yield self.gather(name)
            for least, most in self.columns():
                for tokens in self.next_n:
                    yield from self.decodes(name, tokens, least, most)
        yield from self.prompts()
        arguments = functools.partial(sparse_attention.merge, dim=dense_attention.V, dtype=BFLOAT16)
        yield self.call("merge_attn_states", "bfloat16", "tokens", arguments)

    def insert(self, name: str) -> ExportedCall:
        def arguments(x: Served) -> dict[str, Any]:
            return {
                "kv_c": x.rows(x.size.rows, dense_cache.KV_C_DIM), "k_pe": x.rows(x.size.rows, dense_cache.K_PE_DIM),
                "kv_cache": self.cache(x, name), "slot_mapping": x.slots(x.size.rows),
                "kv_cache_dtype": "fp8" if name == E4M3 else "auto", "scale": self.scale(x, name),
            }  # fmt: skip

        return self.call("concat_and_cache_mla", name, "rows", arguments, "pages")

    def gather(self, name: str) -> ExportedCall:
        def arguments(x: Served) -> dict[str, Any]:
            size = x.size
            return {
                "src_cache": self.cache(x, name), "dst": x.unwritten(size.keys, MLA_BF16.head_dim),
                "block_table": x.table(size.requests, size.context), "cu_seq_lens": starts(x, size.keys),
                "batch_size": size.requests, "seq_starts": x.used(size.context, size.requests),
                "scale": self.scale(x, name),
            }  # fmt: skip

        return self.call("gather_cache", name, "requests", arguments, "pages", "context", "keys")

    def decodes(self, name: str, tokens: int, least: int, most: int) -> Iterator[ExportedCall]:
        """Decodes over a block table of `least` to `most` columns."""
        page, sizes = self.claims.block_size, f"{least} pages" if least == most else f"{least} to {most} pages"
        what = f"{name}, {tokens} tokens a request, {sizes}"
        limits = (Limit("k_cache.shape[0]", "k_cache.strides[0]", 0, HOPPER_CACHE_BYTES),) if name == BFLOAT else ()
        ranges = {"context": (least * page, most * page), "pages": (LEAST_PAGES, MOST_DENSE_PAGES)}
        arguments = functools.partial(self.decode, name=name, tokens=tokens)
        for each, of_plan in ((arguments, ""), (functools.partial(with_plan, arguments), ", planned")):
            yield self.call(
                "dense_mla_decode", f"{what}{of_plan}", "requests", each, "pages", "context", limits=limits, most=ranges
            )

    def decode(self, x: Served, name: str, tokens: int) -> dict[str, Any]:
        size = x.size
        return {
            "q": x.queries(size.requests, tokens, size.heads, MLA_BF16.head_dim), "k_cache": self.cache(x, name),
            "block_table": x.table(size.requests, size.context), "cache_seqlens": x.cached(),
            "scale": self.scale(x, name), "causal": bool(size.pages % 2),  # a flag that kernels are given
        }  # fmt: skip

    def columns(self) -> Iterator[tuple[int, int]]:
        """Ranges of columns of a block table: powers of two, and from the one on where any number has all SMs work."""
        most, columns = -(-self.claims.context // self.claims.block_size), LEAST_COLUMNS
        while columns < most and not self.divides_fully(columns):
            yield columns, columns
            columns *= 2
        if self.divides_fully(columns):
            columns = next(n for n in range(columns // 2 + 1, columns + 1) if self.divides_fully(n))
            yield columns, max(most, columns)
        else:
            yield columns, columns

    def divides_fully(self, columns: int) -> bool:
        """Whether one request already has the most work ranges that a call has."""
        groups, longest = -(-self.model.heads // HEADS), columns * self.claims.block_size
        most = max(1, self.device.sms // groups)
        return longest > BLOCK * (2 * MIN_PART - 1) and range_count(1, groups, longest, self.device.sms) == most

    def prompts(self) -> Iterator[ExportedCall]:
        """Attention of new tokens over themselves, and merged into attention over what is before them."""
        for kind, dtype, accumulate in (
            ("causal", BFLOAT16, False), ("causal, float32", np.float32, False), ("accumulated", np.float32, True),
        ):  # fmt: skip
            arguments = functools.partial(self.prompt, dtype=np.dtype(dtype), accumulate=accumulate)
            yield self.call("mha_varlen", kind, "tokens", arguments, "requests", "keys")

    def prompt(self, x: Served, dtype: np.dtype[Any], accumulate: bool) -> dict[str, Any]:
        size, (nope, rope, v) = x.size, (dense_attention.NOPE, dense_attention.ROPE, dense_attention.V)
        tokens, keys, heads = size.tokens, size.keys, size.heads
        return {
            "q": x.queries(tokens, heads, nope + rope), "k": x.keys(keys, heads, nope), "v": x.keys(keys, heads, v),
            "k_pe": x.keys(keys, rope), "cu_seqlens_q": starts(x, tokens), "cu_seqlens_k": starts(x, keys),
            "causal": not accumulate, "accumulate": accumulate, "out": x.unwritten(tokens, heads, v, dtype=dtype),
        }  # fmt: skip

    def cache(self, x: Served, name: str) -> Any:
        pages = x.size.pages, x.size.block_size, MLA_BF16.head_dim
        return x.e4m3(*pages, end=0x70) if name == E4M3 else x.keys(*pages)

    def scale(self, x: Served, name: str) -> Any:
        return x.scales(1) if name == E4M3 else None

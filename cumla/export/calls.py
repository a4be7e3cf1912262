"""The calls that an engine makes for a model: which operations, with which formats and widths, and for which sizes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..dispatch.call import BFLOAT16
from ..kernels.cuda.device import Device
from ..kernels.cuda.sparse_cache import STREAMED_ROWS
from ..layout import INDEXER_FP8, INDEXER_MXFP4, CacheLayout
from ..metadata.slots import STATE_BLOCK_SIZES, ring_capacity
from ..ops.indexer_topk import CANDIDATE_BLOCK
from ..ops.indices import pooled_width
from ..specs import candidates, compressor, indexer, key_pools, latents, norm_rope, sparse_attention, sparse_cache
from ..specs import indexer_topk as topk_inputs
from ..specs import indices as index_maps
from .dense_calls import DenseCalls
from .maker import INVARIANT, LEAST_COLUMNS, RESULTS, Claims, Maker, Model, fields_of, in_mode, starts, with_plan
from .record import ExportedCall, Limit
from .unread import Unread

__all__ = ["KINDS", "RESULTS", "Claims", "Model", "calls_of", "fields_of"]

KINDS = ("v4", "v41", "v32", "glm5_next", "mla")  # of attention, as cumla/cli/served_model.py has them
ROWS = "out.shape[0]", "out.shape[1]"
FEW, MANY = Limit(*ROWS, 0, STREAMED_ROWS - 1), Limit(*ROWS, STREAMED_ROWS, 1 << 40)  # rows of a gather


def calls_of(model: Model, claims: Claims, device: Device) -> Iterator[ExportedCall]:
    """The calls of a layer's operations, products left out."""
    if model.kind == "mla":
        yield from DenseCalls(model, claims, device).all()
    else:
        yield from SparseCalls(model, claims, device).all()


class SparseCalls(Maker):
    """Calls of layers that attend to selected rows."""

    def all(self) -> Iterator[ExportedCall]:
        yield from self.inserts()
        yield from self.norms()
        yield from self.gathers()
        yield from self.maps()
        yield from self.selections()
        yield from self.decodes()
        yield from self.prefills()
        yield from self.merges()

    def norms(self) -> Iterator[ExportedCall]:
        """Norms of low-rank queries and rows, RoPE, and RoPE of attention's output, in FP8 as well."""
        for dtype in (np.dtype(np.float32), BFLOAT16):
            norms = functools.partial(self.norm, dtype=dtype)
            yield self.call("fused_q_kv_rmsnorm", f"{np.dtype(dtype)} weights", "rows", norms)
        if self.model.kind != "glm5_next":
            inverse = functools.partial(norm_rope.rope, inverse=True, dim=512)
            yield self.call("apply_rope", "inverse", "rows", inverse, "context")
        if self.model.o_groups:
            yield self.call("inverse_rope_and_quantize", "", "rows", self.rounded_output, "context")

    def norm(self, x: Unread, dtype: Any) -> dict[str, Any]:
        rank, dim, rows = self.model.q_rank, sparse_attention.V_DIM, x.size.rows
        return {
            "qr": x.rows(rows, rank), "kv": x.rows(rows, dim), "q_weight": x.rows(rank, dtype=dtype),
            "kv_weight": x.rows(dim, dtype=dtype),
        }  # fmt: skip

    def rounded_output(self, x: Unread) -> dict[str, Any]:
        given = {
            "o": x.rows(x.size.rows, x.size.heads, 512), "positions": x.positions(x.size.rows),
            "cos_sin_cache": x.rotation(x.size.context), "num_groups": self.model.o_groups,
        }  # fmt: skip
        return given | {"is_ue8m0": bool(x.size.context % 2)}  # a flag that kernels are given

    def gathers(self) -> Iterator[ExportedCall]:
        """Rows of prompts. A gather of many rows has another kernel than a gather of few."""
        for layout in dict.fromkeys(self.model.formats):
            for limit, what in ((FEW, "few"), (MANY, "many")):
                for has_lens in (True, False):
                    kind = f"{layout.name}, {what} rows{', lengths' if has_lens else ''}"
                    arguments = functools.partial(self.gather, layout=layout, limit=limit, has_lens=has_lens)
                    yield self.call(
                        "dequantize_and_gather_k_cache", kind, "requests", arguments, "rows", "pages", "context",
                        limits=(limit,), most={"rows": (1, max(self.claims.context, STREAMED_ROWS))},
                    )  # fmt: skip
        for layout in self.model.index_formats:
            arguments = functools.partial(self.gather_keys, layout=layout)
            yield self.call(
                "cp_gather_indexer_k_quant_cache", layout.name, "requests", arguments, "keys", "pages", "context",
                block_size=self.index_block,
            )  # fmt: skip

    def gather(self, x: Unread, layout: CacheLayout, limit: Limit, has_lens: bool) -> dict[str, Any]:
        size = x.size
        rows = min(max(size.rows, -(-limit.least // size.requests)), limit.most // size.requests)
        seq_lens = x.used(size.context if has_lens else min(rows, size.context), size.requests)
        return {
            "out": x.unwritten(size.requests, rows, layout.head_dim), "k_cache": x.cache(layout),
            "seq_lens": seq_lens,
            "gather_lens": np.minimum(x.used(rows, size.requests), seq_lens) if has_lens else None,
            "block_table": x.table(size.requests, size.context), "block_size": size.block_size, "offset": 0,
            "layout": layout,
        }  # fmt: skip

    def gather_keys(self, x: Unread, layout: CacheLayout) -> dict[str, Any]:
        """MXFP4 keys are gathered as FP8."""
        size = x.size
        return {
            "kv_cache": x.cache(layout), "dst_k": x.unwritten(size.keys, layout.head_dim, dtype=np.uint8),
            "dst_scale": x.unwritten(size.keys, dtype=np.float32), "cu_seq_lens": starts(x, size.keys),
            "block_table": x.table(size.requests, size.context),
        }  # fmt: skip

    def inserts(self) -> Iterator[ExportedCall]:
        first, second = self.model.formats
        for layout in dict.fromkeys((first, second, *self.model.index_formats)):
            for slots in (np.int64, np.int32):
                arguments = functools.partial(sparse_cache.insert, layout=layout, slots=slots)
                name = f"{layout.name}, {np.dtype(slots)} slots"
                yield self.call("quantize_and_insert_k_cache", name, "rows", arguments, "pages")
        rows = ("rows", "pages", "context")
        if self.model.kind == "v4":
            for ratio, index_keys in ((4, INDEXER_FP8), (128, None)):
                compress = functools.partial(self.compress, index_keys=index_keys, ratio=ratio)
                yield self.call(
                    "compress_and_insert", f"ratio {ratio}", "tokens", compress, "pages", "requests", "context"
                )
            window = functools.partial(norm_rope.window_rows, layout=first)
            yield self.call("qnorm_rope_and_insert", first.name, "rows", window, *rows[1:])
        if self.model.kind == "v41":
            for layout in dict.fromkeys((first, second)):
                latent = functools.partial(norm_rope.latent_rows, layout=layout)
                yield self.call("norm_rope_and_insert", layout.name, "rows", latent, *rows[1:])
            for ratio in (1, 2):
                pooled = functools.partial(self.latents, ratio=ratio)
                yield self.call("compress_latents", f"ratio {ratio}", "tokens", pooled, "requests")
        if self.model.kind == "v32":
            keys = functools.partial(norm_rope.index_keys, layout=INDEXER_FP8)
            yield self.call("indexer_knorm_rope_and_insert", INDEXER_FP8.name, "rows", keys, *rows[1:])
        if self.model.kind == "glm5_next":
            for restart in (True, False):
                pools = functools.partial(self.pools, restart=restart)
                yield self.call(
                    "indexer_kpool_and_insert", "restart" if restart else "", "tokens", pools, "pages", "requests",
                    block_size=self.index_block,
                )  # fmt: skip

    def pools(self, x: Unread, restart: bool) -> dict[str, Any]:
        """Keys of several tokens, whose states are in a ring for each request."""
        pool = self.model.pool
        given = key_pools.pooled_keys(x, INDEXER_FP8, pool, ring_capacity(0, pool), BFLOAT16, restart)
        return given | ({"restart_positions": x.used(self.claims.context, x.size.requests)} if restart else {})

    @property
    def index_block(self) -> int:
        """Index keys of a page."""
        return max(self.claims.block_size // self.model.pool, 1)

    def compress(self, x: Unread, index_keys: CacheLayout | None, ratio: int) -> dict[str, Any]:
        """A step of a compressor; its table has columns for any context."""
        arguments = compressor.compress(x, self.model.formats[1], index_keys, ratio)
        columns = -(-x.size.context // STATE_BLOCK_SIZES[ratio])
        return arguments | {"state_block_table": x.widened(arguments["state_block_table"], columns)}

    def latents(self, x: Unread, ratio: int) -> dict[str, Any]:
        return latents.compress(x.in_rings(), ratio=ratio, dtype=BFLOAT16)

    def selections(self) -> Iterator[ExportedCall]:
        """Index queries, and selections of decodes. A record has one number of a block table's columns, a power of two:
        the kernels depend on the rows and the columns of scores."""
        heads = self.model.index_heads
        for layout in self.model.index_formats:
            q_format = "mxfp4_rows" if layout is INDEXER_MXFP4 else "fp8"
            queries = functools.partial(self.queries, q_format=q_format)
            varying = ("context",) if self.model.pool == 1 else ()
            yield self.call("fused_indexer_q_rope_quant", q_format, "rows", queries, *varying, heads=heads)
            for columns in self.table_columns():
                for next_n in self.next_n:
                    yield from self.selection(layout, columns, next_n)

    def queries(self, x: Unread, q_format: str) -> dict[str, Any]:
        """Index queries; of a model with pooled keys without RoPE."""
        given = indexer.queries(x, rotated=False, q_format=q_format)
        return given if self.model.pool == 1 else given | {"index_q_cos_sin_cache": None, "hadamard": True}

    def table_columns(self) -> list[int]:
        """Columns of a block table of index keys: powers of two."""
        most = -(-self.claims.context // (4 if self.model.kind == "v4" else 1) // self.claims.block_size)
        powers = range(LEAST_COLUMNS.bit_length() - 1, max(most - 1, 1).bit_length() + 1)
        return [1 << power for power in powers]

    def selection(self, layout: CacheLayout, columns: int, next_n: int) -> Iterator[ExportedCall]:
        name = f"{layout.name}, {columns} pages, {next_n} tokens a request"
        size: dict[str, Any] = {
            "heads": self.model.index_heads, "context": columns * self.index_block, "block_size": self.index_block,
            "topk": self.model.topk // self.model.pool,
        }  # fmt: skip
        for blocks in (0, self.model.candidate_blocks) if self.model.kind == "v41" else (0,):
            arguments = functools.partial(
                topk_inputs.over_pages,
                layout=layout,
                next_n=next_n,
                with_slots=True,
                blocks=blocks,
                pool=self.model.pool,
            )
            kind = f"{name}, candidate blocks" if blocks else name
            yield self.call("indexer_topk", kind, "requests", arguments, "pages", **size)
        for mode in (False, True) if self.model.kind == "v41" else ():
            among = functools.partial(
                candidates.choice,
                layout=layout,
                next_n=next_n,
                count=self.model.candidate_blocks,
                block=CANDIDATE_BLOCK,
            )
            kind = f"{name}{INVARIANT if mode else ''}"
            yield self.call("candidate_topk", kind, "requests", in_mode(among, mode), "pages", **size)

    def prefills(self) -> Iterator[ExportedCall]:
        first, _ = self.model.formats
        prefill = functools.partial(sparse_attention.prefill, head_dim=first.head_dim, windows=self.model.has_window)
        yield self.call("sparse_mla_prefill", "", "tokens", prefill, "rows", **self.selected)

    def maps(self) -> Iterator[ExportedCall]:
        several = ("requests", "context")
        if self.model.has_window:
            yield self.call("compute_swa_indices_and_lens", "", "tokens", index_maps.windows, *several)
            yield self.call("combine_topk_swa_indices", "", "tokens", index_maps.combined, *several)
        if self.model.pool > 1:
            pooled = functools.partial(index_maps.pooled_topk, pool=self.model.pool)
            sizes: dict[str, Any] = {"block_size": self.index_block, "topk": self.model.topk // self.model.pool}
            yield self.call("compute_global_topk_indices_and_lens", "pools", "tokens", pooled, *several, **sizes)
            return
        compact = functools.partial(index_maps.global_topk, compact=True)
        yield self.call("compute_global_topk_indices_and_lens", "compact", "tokens", compact, *several)

    def decodes(self) -> Iterator[ExportedCall]:
        """Decodes over a window, or selected rows as well; over selected tokens, with their numbers or without."""
        first, _ = self.model.formats
        for tokens in self.next_n:
            for has_more in (False, True):
                more = ", two lists" if self.model.has_window else ", lengths"
                name = f"{first.name}{more if has_more else ''}, {tokens} tokens a request"
                for mode in (False, True):
                    arguments = in_mode(functools.partial(self.decode, tokens=tokens, has_more=has_more), mode)
                    kind = f"{name}{INVARIANT if mode else ''}"
                    yield self.call("sparse_mla_decode", kind, "requests", arguments, "pages", **self.selected)
                    planned = functools.partial(with_plan, arguments)
                    kind = f"{kind}, planned"
                    yield self.call("sparse_mla_decode", kind, "requests", planned, "pages", **self.selected)

    @property
    def selected(self) -> dict[str, Any]:
        """The width of lists of selected rows: of pools, with the open pool's rows."""
        return {"topk": pooled_width(self.model.topk // self.model.pool, self.model.pool)}

    def decode(self, x: Unread, tokens: int, has_more: bool) -> dict[str, Any]:
        (first, second), windows = self.model.formats, self.model.has_window
        x = x.resized(tokens=x.size.requests * tokens)
        given = sparse_attention.decode(x, first, second if has_more and windows else None, windows)
        if has_more and not windows:
            given["topk_length"] = x.used(x.size.topk, x.size.requests, tokens)
        return given

    def merges(self) -> Iterator[ExportedCall]:
        arguments = functools.partial(sparse_attention.merge, dim=512, dtype=np.dtype("bfloat16"))
        yield self.call("merge_attn_states", "bfloat16", "tokens", arguments)

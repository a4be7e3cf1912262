"""The calls that an engine makes for a model: which operations, with which formats and widths, and for which sizes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..dispatch.call import BFLOAT16
from ..kernels.cuda.device import Device
from ..layout import INDEXER_FP8, INDEXER_MXFP4, CacheLayout
from ..metadata.slots import STATE_BLOCK_SIZES
from ..ops.indexer_topk import CANDIDATE_BLOCK
from ..specs import candidates, compressor, indexer, latents, norm_rope, sparse_attention, sparse_cache
from ..specs import indexer_topk as topk_inputs
from ..specs import indices as index_maps
from .dense_calls import DenseCalls
from .maker import LEAST_COLUMNS, RESULTS, Claims, Maker, Model, fields_of, with_plan
from .record import ExportedCall
from .unread import Unread

__all__ = ["KINDS", "RESULTS", "Claims", "Model", "calls_of", "fields_of"]

KINDS = ("v4", "v41", "v32", "mla")  # of attention, as cumla/cli/served_model.py has them


def calls_of(model: Model, claims: Claims, device: Device) -> Iterator[ExportedCall]:
    """The calls of a layer's operations, products left out. Raises ValueError for a model that none are listed for."""
    if model.kind not in KINDS:
        raise ValueError(f"got attention of kind {model.kind}, expected one of {', '.join(KINDS)}")
    if model.kind == "mla":
        yield from DenseCalls(model, claims, device).all()
    else:
        yield from SparseCalls(model, claims, device).all()


class SparseCalls(Maker):
    """Calls of layers that attend to selected rows."""

    def all(self) -> Iterator[ExportedCall]:
        yield from self.inserts()
        yield from self.maps()
        yield from self.selections()
        yield from self.decodes()
        yield from self.prefills()
        yield from self.merges()

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
        inverse = functools.partial(norm_rope.rope, inverse=True, dim=512)
        yield self.call("apply_rope", "inverse", "rows", inverse, "context")

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
            queries = functools.partial(indexer.queries, rotated=False, q_format=q_format)
            yield self.call("fused_indexer_q_rope_quant", q_format, "rows", queries, "context", heads=heads)
            for columns in self.table_columns():
                for next_n in self.next_n:
                    yield from self.selection(layout, columns, next_n)

    def table_columns(self) -> list[int]:
        """Columns of a block table of index keys: powers of two."""
        most = -(-self.claims.context // (4 if self.model.kind == "v4" else 1) // self.claims.block_size)
        powers = range(LEAST_COLUMNS.bit_length() - 1, max(most - 1, 1).bit_length() + 1)
        return [1 << power for power in powers]

    def selection(self, layout: CacheLayout, columns: int, next_n: int) -> Iterator[ExportedCall]:
        name = f"{layout.name}, {columns} pages, {next_n} tokens a request"
        size: dict[str, Any] = {"heads": self.model.index_heads, "context": columns * self.claims.block_size}
        for blocks in (0, self.model.candidate_blocks) if self.model.kind == "v41" else (0,):
            arguments = functools.partial(
                topk_inputs.over_pages, layout=layout, next_n=next_n, with_slots=True, blocks=blocks
            )
            kind = f"{name}, candidate blocks" if blocks else name
            yield self.call("indexer_topk", kind, "requests", arguments, "pages", **size)
        if self.model.kind == "v41":
            among = functools.partial(
                candidates.choice,
                layout=layout,
                next_n=next_n,
                count=self.model.candidate_blocks,
                block=CANDIDATE_BLOCK,
            )
            yield self.call("candidate_topk", name, "requests", among, "pages", **size)

    def prefills(self) -> Iterator[ExportedCall]:
        first, _ = self.model.formats
        prefill = functools.partial(sparse_attention.prefill, head_dim=first.head_dim, windows=self.model.has_window)
        yield self.call("sparse_mla_prefill", "", "tokens", prefill, "rows")

    def maps(self) -> Iterator[ExportedCall]:
        several = ("requests", "context")
        if self.model.has_window:
            yield self.call("compute_swa_indices_and_lens", "", "tokens", index_maps.windows, *several)
            yield self.call("combine_topk_swa_indices", "", "tokens", index_maps.combined, *several)
        compact = functools.partial(index_maps.global_topk, compact=True)
        yield self.call("compute_global_topk_indices_and_lens", "compact", "tokens", compact, *several)

    def decodes(self) -> Iterator[ExportedCall]:
        first, second = self.model.formats
        for tokens in self.next_n:
            for compressed in (None, second) if self.model.has_window else (None,):
                arguments = functools.partial(self.decode, tokens=tokens, compressed=compressed)
                name = f"{first.name}{', two lists' if compressed else ''}, {tokens} tokens a request"
                yield self.call("sparse_mla_decode", name, "requests", arguments, "pages")
                planned = functools.partial(with_plan, arguments)
                yield self.call("sparse_mla_decode", f"{name}, planned", "requests", planned, "pages")

    def decode(self, x: Unread, tokens: int, compressed: CacheLayout | None) -> dict[str, Any]:
        x = x.resized(tokens=x.size.requests * tokens)
        return sparse_attention.decode(x, self.model.formats[0], compressed, self.model.has_window)

    def merges(self) -> Iterator[ExportedCall]:
        arguments = functools.partial(sparse_attention.merge, dim=512, dtype=np.dtype("bfloat16"))
        yield self.call("merge_attn_states", "bfloat16", "tokens", arguments)

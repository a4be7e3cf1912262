"""The calls that an engine makes for a model: which operations, with which formats and widths, and for which sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from ..dispatch.call import BFLOAT16
from ..kernels.cuda.device import Device, described
from ..layout import INDEXER_FP8, INDEXER_MXFP4, CacheLayout
from ..metadata.slots import STATE_BLOCK_SIZES
from ..ops.indexer_topk import CANDIDATE_BLOCK
from ..specs import SPECS, candidates, compressor, indexer, latents, norm_rope, sparse_attention, sparse_cache
from ..specs import indexer_topk as topk_inputs
from ..specs import indices as index_maps
from ..specs.inputs import Size
from ..specs.served import Served
from ..specs.spec import OperationSpec
from .fields import PAIRS, PLANNED, OperationFields
from .record import ExportedCall

# Names of the results of operations whose results are one tuple.
RESULTS = {
    "compute_swa_indices_and_lens": ("swa_indices", "swa_lens"),
    "compute_global_topk_indices_and_lens": ("global_topk_indices", "topk_lens"),
    "combine_topk_swa_indices": ("combined_indices", "combined_lens"),
    "sparse_mla_prefill": ("out", "max_logits", "lse"),
    "fused_q_kv_rmsnorm": ("qr_normed", "kv_normed"),
    "fused_indexer_q_rope_quant": ("q_values", "q_weights"),
    "inverse_rope_and_quantize": ("values", "scales"),
}
MOST_PAGES, LEAST_PAGES = 1 << 20, 2
KINDS = ("v4", "v41", "v32")  # of attention, as cumla/cli/served_model.py has them
ANY = 2.0**-4  # a scale, or an epsilon
WHOLE = 1 << 62  # bytes that any scores fit into
LEAST_COLUMNS = 16  # of a block table, of selections


class Model(Protocol):
    """What the calls of a model depend on (cumla/cli/served_model.py has it from a config.json)."""

    @property
    def kind(self) -> str: ...
    @property
    def heads(self) -> int: ...
    @property
    def topk(self) -> int: ...
    @property
    def window(self) -> int: ...
    @property
    def formats(self) -> tuple[CacheLayout, CacheLayout]: ...
    @property
    def has_window(self) -> bool: ...
    @property
    def index_heads(self) -> int: ...
    @property
    def index_formats(self) -> tuple[CacheLayout, ...]: ...
    @property
    def candidate_blocks(self) -> int: ...
    @property
    def decode_tokens(self) -> int: ...


@dataclass(frozen=True)
class Claims:
    """Sizes that a file serves.

    Attributes:
        tokens: of a step's prompts and decodes together
        decodes: requests of one step
        block_size: tokens of a page
        context: positions of the longest context
    """

    tokens: int = 4096
    decodes: int = 256
    block_size: int = 64
    context: int = 1 << 17


def calls_of(model: Model, claims: Claims, device: Device) -> Iterator[ExportedCall]:
    """The calls of a layer's operations, products left out. Raises ValueError for a model that none are listed for."""
    if model.kind not in KINDS:
        raise ValueError(f"got attention of kind {model.kind}, expected one of {', '.join(KINDS)}")
    make = _Maker(model, claims, device)
    yield from make.inserts()
    yield from make.maps()
    yield from make.selections()
    yield from make.decodes()
    yield from make.prefills()
    yield from make.merges()


class _Maker:
    def __init__(self, model: Model, claims: Claims, device: Device) -> None:
        self.model, self.claims, self.device = model, claims, device
        self.shared: dict[Any, Any] = {}
        most = claims.tokens
        self.ranges = {
            "rows": (1, most), "tokens": (1, most), "requests": (1, claims.decodes), "pages": (LEAST_PAGES, MOST_PAGES),
            "context": (claims.block_size, claims.context), "keys": (1, claims.tokens + claims.context),
        }  # fmt: skip

    def call(
        self, operation: str, kind: str, by: str, arguments: Callable[[Served], dict[str, Any]], *varying: str,
        **size: Any,
    ) -> ExportedCall:  # fmt: skip
        spec, model = SPECS[operation], self.model
        base = Size(heads=model.heads, topk=model.topk, window=model.window, block_size=self.claims.block_size, pages=2)
        fields = fields_of(spec)
        ranges = {name: self.ranges[name] for name in (by, *varying)}
        return ExportedCall(
            fields, f"{operation} {kind}".strip(), replace(base, **size), ranges, by,
            functools.partial(self.arguments, spec, fields, arguments),
        )  # fmt: skip

    def arguments(
        self, spec: OperationSpec, fields: OperationFields, arguments: Callable[[Served], dict[str, Any]], size: Size
    ) -> dict[str, Any]:
        given = arguments(Unread(size, self.shared))
        results = spec.results(given)
        given = {**{x.name: ANY for x in fields.parameters if x.is_any}, **with_pairs(given)}
        for name, result in zip(fields.results, results, strict=True):
            given[name] = np.empty(result.shape, np.dtype(result.dtype))
        if spec.scratch is not None:
            with described(self.device):
                needed = spec.scratch({**given, "max_workspace_bytes": WHOLE})  # selections in one pass
                given["workspace"] = np.empty(needed, np.uint8)
        return given

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

    def compress(self, x: Served, index_keys: CacheLayout | None, ratio: int) -> dict[str, Any]:
        """A step of a compressor; its table has columns for any context."""
        arguments = compressor.compress(x, self.model.formats[1], index_keys, ratio)
        columns = -(-x.size.context // STATE_BLOCK_SIZES[ratio])
        return arguments | {"state_block_table": np.empty((x.size.requests, columns), np.int32)}

    def latents(self, x: Served, ratio: int) -> dict[str, Any]:
        return latents.compress(Rings(x.size, x.shared), ratio=ratio, dtype=BFLOAT16)

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
        size = {"heads": self.model.index_heads, "context": columns * self.claims.block_size}
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

    @property
    def next_n(self) -> range:
        """Numbers of tokens of a decode."""
        return range(1, self.model.decode_tokens + 1)

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

    def decode(self, x: Served, tokens: int, compressed: CacheLayout | None) -> dict[str, Any]:
        x = Unread(replace(x.size, tokens=x.size.requests * tokens), x.shared)
        return sparse_attention.decode(x, self.model.formats[0], compressed, self.model.has_window)

    def merges(self) -> Iterator[ExportedCall]:
        arguments = functools.partial(sparse_attention.merge, dim=512, dtype=np.dtype("bfloat16"))
        yield self.call("merge_attn_states", "bfloat16", "tokens", arguments)


class Unread(Served):
    """Arrays of a size whose contents nothing reads or writes."""

    def __init__(self, size: Size, shared: dict[Any, Any]) -> None:
        super().__init__("reference", size, shared)

    def filled(self, value: int, shape: tuple[int, ...], dtype: Any) -> Any:
        return np.empty(shape, dtype)

    def states(self, *shape: int) -> Any:
        """Pages of states, of any number."""
        return np.broadcast_to(np.float32(0), (self.pages(), *shape[1:]))

    def new_cache(self, layout: Any) -> Any:
        return self.cache(layout)

    def cache(self, layout: Any, block_size: int | None = None) -> Any:
        """A cache of any number of pages: its shape alone matters."""
        key = layout, block_size or self.size.block_size
        if key not in self.shared:
            self.shared[key] = layout.allocate(1, key[1], np)
        page = self.shared[key]
        return np.broadcast_to(page, (self.pages(), *page.shape[1:]))

    def pages(self) -> int:
        """Pages of the next cache: the caches of a call have different numbers."""
        self.caches = getattr(self, "caches", 0) + 1
        if self.caches == 1 or self.size.pages in (LEAST_PAGES, MOST_PAGES):
            return self.size.pages
        return LEAST_PAGES + (self.size.pages - LEAST_PAGES) * 7919 * self.caches % (MOST_PAGES - LEAST_PAGES + 1)


class Rings(Unread):
    """The same, with states in a ring for each request."""

    def states(self, *shape: int) -> Any:
        return np.empty(shape, np.float32)


def with_plan(arguments: Callable[[Served], dict[str, Any]], x: Served) -> dict[str, Any]:
    """A call whose plan an earlier call of the step has computed."""
    return {**arguments(x), PLANNED: 1}


def with_pairs(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of two arrays as two arguments."""
    found = dict(arguments)
    for name, names in PAIRS.items():
        if isinstance(found.get(name), tuple):
            found |= dict(zip(names, found[name], strict=True))
    return found


@functools.cache
def fields_of(spec: OperationSpec) -> OperationFields:
    """The C struct of an operation."""
    results = RESULTS.get(spec.name, spec.outputs)
    return OperationFields(spec, results, spec.scratch is not None)

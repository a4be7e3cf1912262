"""Whole steps of layers, and their metadata."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cumla.arrays.memory import to_host
from cumla.bench.dense import DenseDecode
from cumla.bench.problem import BLOCK, WINDOW, Problem, Sizes, problem_of
from cumla.bench.sparse import WINDOWED, Decode
from cumla.dispatch.call import BFLOAT16
from cumla.kernels.types.metadata import C128A_RATIO
from cumla.layers.dense import MLACommonImpl
from cumla.layers.sparse import CompressedCache, LayerWorkspace, SparseMLALayer
from cumla.layout import DSV4_FP8, MLA_BF16, V32_FP8
from cumla.metadata import (
    CommonAttentionMetadata,
    DeepseekSparseSWAMetadataBuilder,
    DeepseekV32IndexerMetadataBuilder,
    MLACommonMetadataBuilder,
    MLAConfig,
    ServingConfig,
)
from cumla.ops.sparse_attention import PARTNERS
from cumla.specs.dense_attention import NOPE, ROPE, V

PAGE = 256  # positions of a page of a compressed cache
SPARSE = {1: "window", 4: "C4A", C128A_RATIO: "C128A"}
SETS = 4
V32_TOPK = 2048  # rows that V3.2's indexer selects


def batch_of(
    put: Callable[[Any], Any], query_lens: Sequence[int], seq_lens: Sequence[int], table: Any = None,
    pages: int | None = None,
) -> CommonAttentionMetadata:  # fmt: skip
    """The batch of a step: requests' new tokens and lengths, their pages as in `table` or anywhere among `pages`."""
    new, lens = np.array(query_lens, np.int32), np.array(seq_lens, np.int32)
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    columns = -(-int(lens.max()) // BLOCK)
    if table is None:
        count = len(lens) * columns
        table = (np.random.default_rng(0).permutation(count) % (pages or count)).astype(np.int32).reshape(-1, columns)
    request = np.repeat(np.arange(len(lens)), new)
    position = np.arange(starts[-1]) - starts[request] + (lens - new)[request]
    slots = table[request, position // BLOCK].astype(np.int64) * BLOCK + position % BLOCK
    return CommonAttentionMetadata(
        put(starts), starts, put(lens), lens, lens - new, len(lens), int(starts[-1]), int(new.max()), put(table),
        put(slots), max_seq_len=int(lens.max()),
    )  # fmt: skip


def layers(sizes: Sizes) -> Iterator[Problem]:
    """A step of decodes of each kind of attention layer between its projections: insert, map, attend."""
    for batch in sizes.batch:
        for ratio in SPARSE:
            yield _sparse_layer(sizes, ratio, batch)
        moved, flop = batch * sizes.context * MLA_BF16.row_bytes, 2 * batch * sizes.context * sizes.heads * (576 + 512)
        calls = dense_layer_calls(sizes, sizes.heads, [1] * batch, [sizes.context] * batch)
        config = f"dense h{sizes.heads} b{batch} of {sizes.context}"
        yield Problem("layer", config, {"cumla": ("cupy", calls)}, moved, flop)


def invariant(sizes: Sizes) -> Iterator[Decode | DenseDecode | Problem]:
    """Batch-invariant decodes and, with equal inputs, decodes by default: attention alone, and steps of layers."""
    for batch in sizes.batch:
        window_and_rows = Decode(DSV4_FP8, sizes.heads, batch, 1, sizes.topk, sizes.extra, lengths=True)
        for case in (window_and_rows, Decode(V32_FP8, sizes.heads, batch, 1, V32_TOPK, lengths=True)):
            yield replace(case, beside_invariant=True)
        yield DenseDecode(sizes.heads, batch, sizes.context, beside_invariant=True)
    yield from invariant_layers(sizes)


def invariant_layers(sizes: Sizes) -> Iterator[Problem]:
    """A step of decodes of each kind of sparse layer that is batch invariant, and of the same layer without it."""
    for batch in sizes.batch:
        for ratio in SPARSE:
            default, problem = (_sparse_layer(sizes, ratio, batch, mode) for mode in (False, True))
            impls = {"cumla": problem.impls["cumla"], "default": default.impls["cumla"]}
            yield replace(problem, op="batch-invariant layer", impls=impls)


def _sparse_layer(sizes: Sizes, ratio: int, batch: int, batch_invariant: bool = False) -> Problem:
    xp, arrays = sizes.xp, sizes.inputs()
    config = ServingConfig(
        window_size=sizes.topk, compress_ratios=(ratio,), num_heads=sizes.heads, block_size=BLOCK,
        index_topk=sizes.extra, compressed_block_size=PAGE, max_num_batched_tokens=batch, max_num_seqs=batch,
        max_model_len=sizes.context, batch_invariant=batch_invariant,
    )  # fmt: skip
    rows = PAGE // ratio
    pages = sizes.slots // rows
    table = arrays.integers(pages, batch, -(-sizes.context // PAGE))
    step = batch_of(xp.asarray, [1] * batch, [sizes.context] * batch, pages=sizes.slots // BLOCK)
    metadata = DeepseekSparseSWAMetadataBuilder(config, backend=sizes.backend).build(
        0, step, c128a_block_table=table if ratio == C128A_RATIO else None
    )
    layout = sizes.layout if sizes.layout in WINDOWED else DSV4_FP8
    extra_layout = PARTNERS.get(layout.name, layout)
    cache, compressed, selected = arrays.cache(layout), None, 0
    if ratio > 1:
        chosen = None
        selected = visible = sizes.context // ratio
        if ratio != C128A_RATIO:
            selected = min(visible, sizes.extra)
            chosen = arrays.integers(max(visible, 1), batch, sizes.extra)
        compressed = CompressedCache(extra_layout.allocate(pages, rows, xp), table, topk_indices=chosen)
    layer = SparseMLALayer(
        ratio, index_topk=sizes.extra, layout=layout, extra_layout=extra_layout, batch_invariant=batch_invariant
    )
    calls = []
    for _ in range(SETS):
        q, k = arrays.rows(batch, sizes.heads, 512), arrays.rows(batch, 512)
        workspace = LayerWorkspace.allocate(q, sizes.extra if ratio == 4 else 0)
        calls.append(
            functools.partial(
                layer.step, q, k, cache, metadata, compressed, out=xp.empty(q.shape, q.dtype), workspace=workspace,
                backend=sizes.backend,
            )
        )  # fmt: skip
    window = min(sizes.topk, sizes.context)
    keys, own = batch * (window + selected), batch * (sizes.heads * 1024 + 512)
    moved = batch * ((window + 1) * layout.token_bytes + selected * extra_layout.token_bytes) + 2 * own
    config_name = "" if layout is DSV4_FP8 else f"{layout.name} "
    config_name += f"{SPARSE[ratio]} h{sizes.heads} b{batch} of {sizes.context}"
    return Problem("layer", config_name, {"cumla": ("cupy", calls)}, moved, 4 * keys * sizes.heads * 512)


def dense_layer_calls(
    sizes: Sizes, heads: int, query_lens: Sequence[int], seq_lens: Sequence[int], workspace: int | None = None,
    sets: int = SETS,
) -> list[Callable[[], Any]]:  # fmt: skip
    """Steps of a dense layer. workspace: tokens of context that it gathers at a time."""
    xp, arrays, tokens = sizes.xp, sizes.inputs(), sum(query_lens)
    config = MLAConfig(
        block_size=BLOCK, num_heads=heads, max_num_batched_tokens=tokens, max_num_seqs=len(seq_lens),
        max_model_len=max(seq_lens),
    )  # fmt: skip
    builder = MLACommonMetadataBuilder(config, backend=sizes.backend)
    builder.context_chunk_workspace_size = workspace or builder.context_chunk_workspace_size
    metadata = builder.build(0, batch_of(xp.asarray, query_lens, seq_lens, pages=sizes.slots // BLOCK))
    if workspace is not None:
        metadata.context_chunk_workspace = xp.empty((workspace, MLA_BF16.head_dim), BFLOAT16)
    weight = (arrays.rows(heads * (NOPE + V), 512).astype(np.float32) * np.float32(0.02)).astype(BFLOAT16)
    layer = MLACommonImpl(
        heads, MLA_BF16.head_dim, (NOPE + ROPE) ** -0.5, kv_b_proj=weight, backend=sizes.backend
    )  # fmt: skip
    layer.process_weights_after_loading()
    cache = arrays.rows(sizes.slots // BLOCK, BLOCK, MLA_BF16.head_dim)
    return [
        functools.partial(
            layer.forward, arrays.rows(tokens, heads, NOPE + ROPE), arrays.rows(tokens, 512), arrays.rows(tokens, ROPE),
            cache, metadata, xp.empty((tokens, heads * V), cache.dtype),
        )
        for _ in range(sets)
    ]  # fmt: skip


@dataclass(frozen=True)
class Build:
    """Metadata of a step: decodes of `each` tokens, and prefills of new tokens at the end of a context."""

    op: str
    decodes: int
    each: int = 1
    prefills: int = 0
    new: int = 2048
    context: int = 4000  # of a decode
    end: int = 8192  # of a prefill
    window: int = WINDOW

    def __str__(self) -> str:
        of_each = f" of {self.each} tokens" if self.each > 1 else ""
        return f"{self.decodes:,} decodes{of_each}" + (
            f" + {self.prefills} prefills of {self.new:,}" if self.prefills else ""
        )

    def problem(self, sizes: Sizes) -> Problem:
        query_lens = [self.each] * self.decodes + [self.new] * self.prefills
        seq_lens = [max(self.context, self.each)] * self.decodes + [self.end] * self.prefills
        windows, tokens = self.op == WINDOWS, sum(query_lens)
        config = ServingConfig(
            window_size=self.window, block_size=BLOCK, max_num_batched_tokens=tokens, max_num_seqs=len(seq_lens),
            max_model_len=max(seq_lens), num_speculative_tokens=self.each - 1,
            compress_ratios=(1,) if windows else (1, 4), compressed_block_size=BLOCK if windows else 4 * BLOCK,
        )  # fmt: skip
        builder = DeepseekSparseSWAMetadataBuilder if windows else DeepseekV32IndexerMetadataBuilder
        want = fields_of(builder(config, backend="reference").build(0, batch_of(np.asarray, query_lens, seq_lens)))
        step = batch_of(sizes.xp.asarray, query_lens, seq_lens)

        def check(result: Any) -> float:
            for (name, got), (_, right) in zip(fields_of(result), want, strict=True):
                np.testing.assert_array_equal(got, right, err_msg=name)
            return 0.0

        def build(backend: str) -> Callable[..., Any]:
            return builder(config, backend=backend).build

        found = problem_of(self, sizes, lambda x: [functools.partial(build(x), 0, step)],
                           4 * tokens * (self.window if windows else 1), check)  # fmt: skip
        unchecked = functools.partial(build(sizes.backend), 0, step, validate=False)
        found.impls["validate=False"] = "cupy", [unchecked]
        return found


WINDOWS, INDEXER = "sparse_swa.build", "indexer.build"
WINDOW_FIELDS: tuple[str, ...] = (
    "token_to_req_indices", "is_valid_token", "decode_swa_indices", "decode_swa_lens", "prefill_gather_lens",
)  # fmt: skip
INDEXER_FIELDS = ("seq_lens", "schedule_metadata", "cu_seqlen_ks", "cu_seqlen_ke")


def fields_of(metadata: Any) -> list[tuple[str, np.ndarray]]:
    """Arrays of metadata by name, on the host."""
    parts, names = [metadata], WINDOW_FIELDS
    if not hasattr(metadata, "decode_swa_indices"):
        parts, names = [metadata.decode, *(metadata.prefill.chunks if metadata.prefill else ())], INDEXER_FIELDS
    found = [(name, getattr(part, name, None)) for part in parts for name in names]
    return [(name, to_host(array)) for name, array in found if array is not None]


def metadata(sizes: Sizes) -> Iterator[Build]:
    """A step's window metadata: decodes, and one prefill of the first size in `tokens`."""
    new = sizes.tokens[0]
    for batch in sizes.batch:
        yield Build(WINDOWS, batch, 1, 1, new, sizes.context, new, sizes.topk)

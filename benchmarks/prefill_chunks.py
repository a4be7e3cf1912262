"""A layer's prefill chunk whole, over both roads, beside vLLM's: two gathers, indices and FlashMLA, in one process.

Window 128, 64 heads; a C4A layer selects 512 random compressed rows a token. cumla's times include inserting the
chunk's own rows; the first row is the road that the layer takes by itself. Errors are distances from that over pages.
Steps with prefills allocate, so their time is that of calls which were queued before the first of them began.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import cupy
import numpy as np
from common import Report, arguments, as_torch, has_peer

import cumla
from cumla.bench.measure import queued_us
from cumla.dispatch.call import BFLOAT16
from cumla.layers.prefill_road import chunk_roads
from cumla.layers.sparse import CompressedCache, SparseMLALayer
from cumla.metadata import DeepseekSparseSWAMetadataBuilder, ServingConfig
from cumla.metadata.batch import CommonAttentionMetadata

FLASH_MLA = "vllm.third_party.flashmla.flash_mla_interface"
WINDOW, HEADS, TOPK, RATIO, PAGE = 128, 64, 512, 4, 64
ROUNDS = 3


class Chunk(NamedTuple):
    """Requests with so many new tokens each, the last ones of a context."""

    requests: int
    tokens: int
    context: int

    def __str__(self) -> str:
        return f"{self.requests} x {self.tokens:,} new, {self.context // 1024}K context"


CHUNKS = [Chunk(4, 1024, 32 << 10), Chunk(1, 512, 128 << 10), Chunk(8, 256, 16 << 10)]


def filled_cache(pages: int) -> Any:
    cache = cumla.DSV4_FP8.allocate(pages, PAGE, cupy)
    rows = min(pages * PAGE, 1 << 16)
    k = cupy.random.default_rng(0).standard_normal((rows, 512), cupy.float32).astype(BFLOAT16)
    for first in range(0, pages * PAGE, rows):
        count = min(rows, pages * PAGE - first)
        cumla.quantize_and_insert_k_cache(
            k[:count], cache, cupy.arange(first, first + count), PAGE, layout=cumla.DSV4_FP8
        )
    return cache


class Inputs:
    """A chunk as a layer takes it."""

    def __init__(self, chunk: Chunk) -> None:
        requests, new, context = chunk
        self.chunk, tokens = chunk, requests * new
        rng = np.random.default_rng(0)
        self.lens = np.full(requests, context, np.int32)
        starts = np.arange(requests + 1, dtype=np.int32) * new
        pages, compressed_pages = context // PAGE, context // RATIO // PAGE
        table, self.compressed_table = (
            cupy.asarray(rng.permutation(requests * n).reshape(requests, n).astype(np.int32))
            for n in (pages, compressed_pages)
        )
        positions = np.tile(np.arange(context - new, context), requests)
        slots = cupy.repeat(table, new, axis=0)[cupy.arange(tokens), cupy.asarray(positions // PAGE)] * PAGE
        slots = slots + cupy.asarray(positions % PAGE)
        self.cache, self.compressed_cache = filled_cache(requests * pages), filled_cache(requests * compressed_pages)
        self.topk = cupy.asarray((rng.random((tokens, TOPK)) * ((positions + 1) // RATIO)[:, None]).astype(np.int32))
        normal = cupy.random.default_rng(1).standard_normal
        self.q, self.k = (normal((tokens, *s, 512), cupy.float32).astype(BFLOAT16) for s in ((HEADS,), ()))
        self.sink = normal(HEADS, cupy.float32)
        self.out = cupy.empty_like(self.q)
        config = ServingConfig(
            window_size=WINDOW, compress_ratios=(RATIO,), block_size=PAGE, compressed_block_size=PAGE * RATIO,
            index_topk=TOPK, max_num_batched_tokens=tokens, max_num_seqs=requests, max_model_len=context,
        )  # fmt: skip
        batch = CommonAttentionMetadata(
            query_start_loc=cupy.asarray(starts), query_start_loc_cpu=starts, seq_lens=cupy.asarray(self.lens),
            seq_lens_cpu=self.lens, num_computed_tokens_cpu=self.lens - new, num_reqs=requests,
            num_actual_tokens=tokens, max_query_len=new, block_table_tensor=table, max_seq_len=context,
            slot_mapping=slots.astype(cupy.int64),
        )  # fmt: skip
        self.metadata = DeepseekSparseSWAMetadataBuilder(config).build(0, batch)
        self.layer = SparseMLALayer(RATIO, TOPK, self.sink)

    def cumla(self, road: str | None) -> Callable[[], Any]:
        compressed = CompressedCache(
            self.compressed_cache, self.compressed_table, self.k[:0], cupy.empty(0, cupy.int64), self.topk
        )

        def call() -> Any:
            self.layer.step(self.q, self.k, self.cache, self.metadata, compressed, out=self.out, prefill_road=road)
            return self.out

        return call

    def road(self) -> str:
        return ", ".join(road for *_, road in chunk_roads(self.metadata, RATIO, HEADS, TOPK, "cuda"))

    def vllm(self) -> Callable[[], Any]:
        import torch
        from vllm.models.deepseek_v4.common.ops import cache_utils
        from vllm.third_party.flashmla import flash_mla_interface as peer

        plan = [(slice(start, end), n, m) for start, end, n, m in self.metadata.get_prefill_chunk_plan(RATIO)]
        new, most = self.chunk.tokens, max((at.stop - at.start) * m for at, _, m in plan)
        lens, table, compressed_table, cache, compressed_cache, topk, q, sink, starts, gather_lens = as_torch(
            self.metadata.seq_lens, self.metadata.block_table, self.compressed_table, self.cache,
            self.compressed_cache, self.topk, self.q, self.sink, self.metadata.query_start_loc,
            self.metadata.prefill_gather_lens,
        )  # fmt: skip
        memory = torch.empty((most, 512), dtype=torch.bfloat16, device="cuda")
        scale, result = 512**-0.5, torch.empty_like(q)

        def attend(at: slice, n: int, m: int) -> None:
            requests, tokens = at.stop - at.start, slice(at.start * new, at.stop * new)
            gather = cache_utils.dequantize_and_gather_k_cache
            rows = memory[: requests * m].view(requests, m, 512)
            gather(rows, compressed_cache, lens[at] // RATIO, None, compressed_table[at], PAGE, 0)
            gather(rows, cache, lens[at], gather_lens[at], table[at], PAGE, n)
            indices, counts = cache_utils.combine_topk_swa_indices(
                topk[tokens], starts[at.start : at.stop + 1], lens[at], gather_lens[at], WINDOW, RATIO, TOPK, m, n
            )
            peer.flash_mla_sparse_fwd(
                q[tokens], rows.view(-1, 1, 512), indices[:, None], scale, attn_sink=sink, topk_length=counts,
                out=result[tokens],
            )  # fmt: skip

        def call() -> Any:
            for chunk in plan:
                attend(*chunk)
            return result

        return call


def main() -> None:
    report = Report(arguments(__doc__).parse_args())
    for chunk in CHUNKS:
        if not report.wants("prefill chunk", str(chunk)):
            continue
        x = Inputs(chunk)
        want = x.cumla("pages")().astype(cupy.float32)
        impls = {f"cumla ({x.road()})": x.cumla(None)} | {f"cumla {road}": x.cumla(road) for road in ("pages", "rows")}
        if has_peer(FLASH_MLA):
            impls["vllm"] = x.vllm()
        errors: dict[str, float] = {}
        times: dict[str, list[float]] = {name: [] for name in impls}
        for _ in range(ROUNDS):
            for name, call in impls.items():
                errors[name] = float(abs(cupy.from_dlpack(call()).astype(cupy.float32) - want).max())
                times[name].append(queued_us(call))
        for name in impls:
            report.add(
                "prefill chunk", str(chunk), name, us_graph=statistics.median(times[name]), max_abs_err=errors[name]
            )
    report.finish()


if __name__ == "__main__":
    main()

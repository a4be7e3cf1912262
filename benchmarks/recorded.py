"""The cases of each family of records, which has the name of its file in results/. Calls of layers come first."""

import functools
from dataclasses import replace

from cache_cases import AdvanceStep, CopyBlocks, DenseGather, KeyGather
from candidate_cases import CandidateBlocks, CandidateSource, CandidateTopk
from dense_cases import DenseLayerPrefill, DensePlan, DensePrefill
from framework_calls import DECODE, INSERT, MAP, FrameworkCall
from index_cases import Combine, GlobalTopk, Mixed, Windows
from indexer_inputs import QueryQuant, Schedule
from layer_cases import Compress, CompressLatents, InverseRope, Merge, PooledKeys
from portable_cases import BY_BITS, OF_16_BITS, WithLimits
from product_cases import FLASH, BlockLinear
from step_cases import INDEXER, WINDOWS, Build

from cumla.bench.caches import Gather, Insert, QueryNormInsert
from cumla.bench.dense import DenseDecode
from cumla.bench.indexer_cases import SCORES, Choice, Logits, PagedLogits, Selection
from cumla.bench.sparse import Decode, Prefill
from cumla.layout import (
    DSV4_BF16,
    DSV4_FP8,
    DSV41_FP4,
    DSV41_FP4_SPLIT,
    DSV41_FP8,
    DSV41_FP8_SPLIT,
    INDEXER_FP8,
    INDEXER_MXFP4,
    MLA_BF16,
    V32_FP8,
    V32_NOPE_FP8,
)
from cumla.models.step import STATE_BLOCK_SIZES

SLOTS = {"DSV4_FP8": 7 << 20, "V32_FP8": 6 << 20, "DSV41_FP8": 7 << 20, "MLA_BF16": 7 << 19}  # caches of 4 GiB


def attention_backends():
    return [
        *(Decode(DSV4_FP8, 64, b, 1, 128, 512, 256, lengths=True) for b in (1, 32, 128)),
        *(Decode(DSV4_FP8, 64, b, 1, 128, 512, 256) for b in (1, 32, 128)),
        Decode(DSV4_FP8, 128, 128, 2, 128, 1024, 256),
        Decode(V32_FP8, 128, 64, 2, 2048),
        Decode(DSV4_FP8, 64, 1, 1, 16384),
        *(Prefill(*sizes, 32 << 10) for sizes in ((512, 64, 640), (576, 128, 640), (512, 64, 2048))),
        *(Merge(tokens, 64) for tokens in (128, 4096)),
        *(DenseDecode(128, batch, 8192) for batch in (1, 16)),
    ]


def with_slots(layout, *args, **options):
    """A decode over caches of several GiB."""
    return replace(Decode(layout, *args, **options), slots=SLOTS[layout.name])


def decode():
    v4, v32 = (functools.partial(with_slots, layout) for layout in (DSV4_FP8, V32_FP8))
    return [
        *(
            v4(64, b, 1, 128, 512, 256, lengths=True, beside_ordinary=b in (1, 32, 128))
            for b in (1, 2, 8, 32, 48, 64, 128, 256)
        ),
        *(v4(64, b, 1, 128, 0, 256, lengths=True) for b in (1, 8, 32, 128)),
        *(v4(64, b, 1, 128, 1024, 256, 2, lengths=True, ratio=128) for b in (1, 8, 32, 128)),
        *(v4(128, b, 1, 128, 1024, 256, lengths=True) for b in (1, 2, 8, 32, 128)),
        *(v4(16, b, 1, 128, 1024, 256, lengths=True) for b in (1, 8, 32, 128)),
        *(v32(128, b, 1, 2048, lengths=True) for b in (1, 2, 8, 32, 128)),
        *(v4(64, b, s_q, 128, 512, 256, lengths=True) for b, s_q in ((32, 2), (32, 4), (128, 2))),
        v32(128, 32, 2, 2048, lengths=True),
        *(v4(64, b, 2, 128, 512, 256) for b in (64, 128)),
        *(v4(128, b, 2, 128, 1024, 256) for b in (2, 64, 128, 256)),
        *(v32(128, b, 2, 2048) for b in (2, 8, 64, 128)),
        *(make(heads, 148, 2, 16384) for make in (v4, v32) for heads in (64, 128)),
        *(v4(64, b, 1, 128, 0, 256) for b in (1, 8, 32)),
        *(v4(64, b, 1, 128, 512, 256) for b in (1, 2, 8, 32)),
        *(v4(128, b, 1, 128, 1024, 256) for b in (1, 2, 8, 32)),
        *(v32(128, b, 1, 2048) for b in (1, 2, 8, 32)),
        *(v4(heads, b, 1, 128, 1024, 256) for heads in (8, 16, 32) for b in (1, 32, 128)),
        *(v4(heads, 128, 2, 128, 512, 256) for heads in (8, 16, 32)),
    ]


def prefill():
    k = 1024
    return [
        *(Prefill(512, 64, 640, rows, lengths=True) for rows in (8 * k, 32 * k, 128 * k)),
        *(Prefill(512, 64, 640, 32 * k, tokens, lengths=True) for tokens in (512, 2004)),
        *(Prefill(512, 128, topk, 32 * k, lengths=True) for topk in (640, 1152, 2048)),
        *(
            Prefill(512, h, topk, 32 * k, lengths=True, precision="fp8")
            for h, topk in ((64, 640), (128, 1152), (128, 2048))
        ),
        *(Prefill(512, heads, 1152, 32 * k, lengths=True) for heads in (8, 16, 32)),
        *(Prefill(576, 128, 2048, rows, lengths=True) for rows in (8 * k, 32 * k, 128 * k)),
        *(Prefill(512, 64, 640, rows) for rows in (8 * k, 32 * k, 128 * k)),
        *(Prefill(512, 128, topk, 32 * k) for topk in (640, 1152)),
        *(Prefill(512, 128, 2048, rows) for rows in (8 * k, 32 * k, 128 * k)),
        *(Prefill(576, 128, 2048, rows) for rows in (2 * k, 8 * k, 32 * k, 128 * k)),
        *(Prefill(512, heads, 2048, 32 * k) for heads in (8, 16, 32)),
    ]


def cache():
    return [
        *(QueryNormInsert(tokens, heads) for heads in (64, 128, 16) for tokens in (1, 32, 128, 512, 4096)),
        *(Insert(tokens) for tokens in (1, 32, 512, 4096, 32768)),
        *(Gather(*shape, lengths=True) for shape in ((4, 8192), (4, 65536))),
        *(Gather(*shape) for shape in ((1, 512), (4, 8192), (16, 8192), (4, 65536))),
        *(Insert(tokens, MLA_BF16) for tokens in (512, 4096, 32768)),
        DenseGather(4, 8192),
        KeyGather(4, 8192),
        CopyBlocks(512),
        *(AdvanceStep(sequences) for sequences in (128, 1024)),
    ]


def indexer():
    k = 1024
    return [
        *(Logits(*shape, lengths=True) for shape in ((2 * k, 8 * k), (8 * k, 8 * k), (8 * k, 32 * k))),
        *(
            PagedLogits(b, c * k, n, lengths=True)
            for b, c, n in ((32, 8, 1), (64, 16, 1), (128, 32, 1), (64, 32, 2))
        ),
        *(Choice("decode", rows, 8 * k, 512, lengths=True) for rows in (1, 8, 32, 64, 128)),
        *(Choice("decode", rows, 32 * k, topk, lengths=True) for rows in (32, 128) for topk in (512, 2 * k)),
        *(Choice("decode", 32, 8 * k, 512, lengths=True, scores=scores) for scores in SCORES if scores != "normal"),
        *(
            Choice("decode", *size, scores=scores)
            for size in ((32, 32 * k, 512), (128, 32 * k, 2 * k)) for scores in ("95% zeros", "99% zeros", "1,000 +- 5")
        ),
        *(Choice("decode", 4 * k, 8 * k, 512, scores=scores) for scores in ("normal", "95% zeros", "1,000 +- 5")),
        *(Choice("decode", *size, scores="1,000 +- 5") for size in ((64, 16 * k, 512), (4, 128 * k, 2 * k))),
        Choice("prefill", 8 * k, 32 * k, 512, lengths=True),
        Selection(Logits(8 * k, 32 * k, lengths=True), 512),
        Selection(PagedLogits(128, 32 * k, lengths=True), 512),
        *(
            Logits(queries * k, keys * k)
            for queries, keys in ((2, 8), (2, 64), (4, 16), (8, 8), (8, 32), (8, 64))
        ),
        *(
            PagedLogits(b, c * k, n)
            for b, c, n in ((1, 32, 1), (32, 8, 1), (128, 32, 1), (16, 128, 1), (128, 32, 2), (128, 32, 4))
        ),
        *(
            PagedLogits(128, 32 * k, next_n, heads=32, layout=layout)
            for layout in (INDEXER_FP8, INDEXER_MXFP4)
            for next_n in (1, 2, 4, 6)
        ),
        *(
            Choice("decode", rows, columns * k, topk)
            for rows, columns, topk in (
                (4, 8, 512), (4, 32, 512), (4, 128, 2048), (128, 8, 512), (128, 32, 512), (128, 32, 2048),
                (1024, 32, 512),
            )
        ),
        Choice("prefill", 8 * k, 32 * k, 512),
        Selection(Logits(8 * k, 32 * k), 512),
        Selection(PagedLogits(128, 32 * k), 512),
        Schedule(128),
        *(QueryQuant(tokens) for tokens in (1, 128, 4096)),
        *(QueryQuant(tokens, "mxfp4") for tokens in (1, 128, 4096)),
        *(Insert(tokens, INDEXER_FP8) for tokens in (1, 128, 512, 4096, 32768)),
    ]  # fmt: skip


def compressor():
    return [
        *(Compress(ratio, tokens, tokens == 4096) for ratio in STATE_BLOCK_SIZES for tokens in (1, 32, 128, 4096)),
        *(CompressLatents(2, tokens) for tokens in (1, 32, 128)),
        CompressLatents(2, 768, 6),
        *(CompressLatents(ratio, 4096, prompt=True) for ratio in (2, 1)),
        *(PooledKeys(tokens) for tokens in (1, 128)),
        *(PooledKeys(tokens, prompt=True) for tokens in (4096, 32768)),
        *(QueryNormInsert(tokens, 128) for tokens in (1, 17, 4096)),
        InverseRope(128, 128),
    ]


def indices():
    shapes = (128, 512), (4_096, 512), (8_192, 1_024)
    return [
        Windows(128), Windows(4_096),
        *(kind(*shape, lengths) for lengths in (True, False) for kind in (GlobalTopk, Combine) for shape in shapes),
        Mixed(128, 0, 512), Mixed(0, 4_096, 512),
    ]  # fmt: skip


def products():
    sizes = FLASH.values()
    return [BlockLinear(tokens, rows, columns, groups) for groups, rows, columns in sizes for tokens in (1, 8, 32, 128)]


def mla():
    return [
        *(DenseDecode(128, batch, 8192, lengths) for lengths in (True, False) for batch in (1, 4, 16, 64, 128)),
        *(DensePlan(128, batch, 8192) for batch in (1, 16, 128)),
        DensePrefill(16, 8192), DensePrefill(16, 8192, 65536),
        *(DenseLayerPrefill(16, 8192, *x) for x in ((0, 65536), (65536, 65536), (65536, 16384), (65536, 4096))),
    ]  # fmt: skip


def metadata():
    return [Build(op, *x) for x in ((256, 1, 4), (1024, 3)) for op in (WINDOWS, INDEXER)]


def interop():
    return [FrameworkCall(INSERT, 32), FrameworkCall(MAP, 32), *(FrameworkCall(DECODE, b) for b in (1, 32, 128))]


def candidates():
    for batch in (1, 16, 128):
        yield CandidateTopk(batch, 1 << 20)
        yield CandidateTopk(batch, 1 << 20, layout=INDEXER_MXFP4)
        yield CandidateTopk(batch, 1 << 17)
    for rows in (1, 16, 128):
        yield CandidateBlocks(rows, 1 << 20)
    for batch in (1, 16, 128):
        for layout in (INDEXER_FP8, INDEXER_MXFP4):
            yield CandidateSource(batch, 1 << 20, layout=layout)


ROWS, REQUESTS, LENGTH = 1 << 15, 16, 8192
LATENTS = (DSV4_FP8, V32_FP8, V32_NOPE_FP8, DSV41_FP8, DSV41_FP8_SPLIT, DSV41_FP4, DSV41_FP4_SPLIT)
KEYS = (INDEXER_FP8, INDEXER_MXFP4)


def formats():
    """Decodes over V4's rows attend to the same number of rows as decodes over V4.1's."""
    v4, v32, v41, mla = (functools.partial(with_slots, layout) for layout in (DSV4_FP8, V32_FP8, DSV41_FP8, MLA_BF16))
    return [
        *(v41(64, b, 1, 128, 512, 32, lengths=True, ratio=2) for b in (1, 8, 32, 128)),
        *(v4(64, b, 1, 128, 512, 256, lengths=True, ratio=2) for b in (1, 8, 32, 128)),
        *(v41(heads, b, 1, 128, 512, 32, lengths=True, ratio=2) for heads in (8, 16) for b in (32, 128)),
        *(v4(heads, b, 1, 128, 512, 256, lengths=True, ratio=2) for heads in (8, 16) for b in (32, 128)),
        *(mla(128, b, 2, 2048, beside_portable=True) for b in (8, 64, 128)),
        *(v32(128, b, 2, 2048) for b in (8, 64, 128)),
        *(Insert(ROWS, layout) for layout in (*LATENTS, MLA_BF16, *KEYS)),
        *(Gather(REQUESTS, LENGTH, layout) for layout in (*LATENTS, DSV4_BF16)),
        DenseGather(REQUESTS, LENGTH),
        *(KeyGather(REQUESTS, LENGTH, layout) for layout in KEYS),
    ]


def portable():
    k = 1024
    v4, v32, bf16 = (functools.partial(Decode, x, slots=1 << 19) for x in (DSV4_FP8, V32_FP8, MLA_BF16))
    v41 = functools.partial(Decode, DSV41_FP8, slots=1 << 19)
    of_16_bits = functools.partial(WithLimits, capabilities=OF_16_BITS)
    beside = functools.partial(of_16_bits, beside=True)
    by_bits = functools.partial(WithLimits, capabilities=BY_BITS)
    return [
        beside(Prefill(512, 64, 640, 32 * k)),
        of_16_bits(Prefill(512, 64, 2 * k, 32 * k)),
        beside(Prefill(576, 128, 2 * k, 32 * k, 2 * k)),
        of_16_bits(Prefill(512, 16, 640, 32 * k)),
        *(
            WithLimits(v4(64, b, s, 128, 512, 256, lengths=True))
            for b, s in ((1, 1), (8, 1), (32, 1), (128, 1), (128, 2))
        ),
        *(WithLimits(v4(heads, 128, 1, 128, k, 256, lengths=True)) for heads in (16, 128)),
        *(WithLimits(v32(128, b, 1, 2 * k, lengths=True)) for b in (1, 32, 128)),
        *(WithLimits(v41(64, b, 1, 128, 512, 32, lengths=True, ratio=2)) for b in (1, 32, 128)),
        of_16_bits(bf16(128, 1, 1, 2 * k, lengths=True)),
        *(beside(bf16(128, b, 1, 2 * k, lengths=True)) for b in (32, 128)),
        *(WithLimits(DenseDecode(128, b, 8 * k, lengths=True)) for b in (16, 128)),
        of_16_bits(DensePrefill(16, 8 * k)),
        WithLimits(Logits(8 * k, 32 * k, lengths=True)),
        *(WithLimits(PagedLogits(*x, 1, lengths=True)) for x in ((32, 8 * k), (128, 32 * k))),
        WithLimits(PagedLogits(32, 8 * k, 1, lengths=True, layout=INDEXER_MXFP4)),
        *(of_16_bits(Choice("decode", rows, 32 * k, 512, lengths=True)) for rows in (32, 128)),
        of_16_bits(Choice("prefill", 8 * k, 32 * k, 512, lengths=True)),
        *(of_16_bits(Compress(*x)) for x in ((4, 32), (4, 4096), (128, 4096))),
        *(by_bits(BlockLinear(tokens, 1536, 4 * k)) for tokens in (32, 128)),
        *(by_bits(Insert(32 * k, layout)) for layout in (DSV4_FP8, INDEXER_FP8)),
        by_bits(Gather(16, 8 * k)),
        by_bits(KeyGather(16, 8 * k)),
    ]

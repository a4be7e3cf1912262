"""Sparse attention over values that float16 lacks, beside the same work over ordinary ones, and FlashMLA.

Decode of 128 requests: `zeros` are caches as they are allocated; `1 x 1e6` has a row whose RoPE part has 1e6 somewhere,
to which one request attends, `128 x NaN` one with NaN, to which all do; under `2^-95` all scales are that. Prefill of
4,096 tokens: each row has such a value, or all values are multiplied by 2^-95.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cupy
import numpy as np
from common import Report, arguments, graph_us

import cumla
from cumla.bench.peers import FLASH_MLA_DECODE, flash_mla_decode
from cumla.dispatch.call import BFLOAT16

LAYOUT, BLOCK_SIZE, HEADS, BATCH = cumla.DSV4_FP8, 64, 64, 128
CACHE_TOKENS = 1 << 18  # well beyond the L2 cache
SLOT, ENTRY, VALUE = 5, 9, 470  # the poisoned row, where it is listed, and which value of it: one of RoPE
SETS, TOKENS, TOPK = 2, 4096, 640
TINY_BYTE, TINY = 127 - 95, 2.0**-95
BOUNDS = {"decode": (1e-3, 2.01 / 128), "prefill": (8e-4, 3.01 / 128)}


class Case(NamedTuple):
    """`requests` (of decode) or all rows (of prefill) meet `value`; or values of another kind."""

    name: str
    requests: int = 0
    value: float = 0.0


DECODES = (
    Case("ordinary"), Case("zeros"), Case("1 x 1e6", 1, 1e6), Case("128 x 1e6", BATCH, 1e6), Case("1 x NaN", 1, np.nan),
    Case("128 x NaN", BATCH, np.nan), Case("2^-95"),
)  # fmt: skip
PREFILLS = (Case("ordinary"), Case("1e6", TOKENS, 1e6), Case("NaN", TOKENS, np.nan), Case("2^-95"))


def random(*shape: int, seed: int) -> Any:
    return cupy.random.default_rng(seed).standard_normal(shape, cupy.float32).astype(BFLOAT16)


def largest_error(op: str, got: Any, want: np.ndarray) -> float:
    """Of finite values; NaN must be where it is expected. Raises AssertionError beyond the bound."""
    absolute, relative = BOUNDS[op]
    got, want = got.get().astype(np.float64), want.astype(np.float64)
    assert (np.isnan(got) == np.isnan(want)).all(), "NaN in other places"
    finite = np.isfinite(want)
    error = np.abs(got[finite] - want[finite])
    assert (error <= absolute + relative * np.abs(want[finite])).all(), f"off by {error.max()}"
    return float(error.max(initial=0.0))


def make_cache(case: Case, seed: int) -> Any:
    cache = LAYOUT.allocate(CACHE_TOKENS // BLOCK_SIZE, BLOCK_SIZE, cupy)
    if case.name == "zeros":
        return cache
    k = random(CACHE_TOKENS, LAYOUT.head_dim, seed=seed)
    if case.requests:
        k[SLOT, VALUE] = case.value
    cumla.quantize_and_insert_k_cache(k, cache, cupy.arange(CACHE_TOKENS), BLOCK_SIZE, layout=LAYOUT)
    if case.name == "2^-95":
        scales = cache.reshape(len(cache), -1)[:, LAYOUT.scale_start(BLOCK_SIZE) :][
            :, : BLOCK_SIZE * LAYOUT.scale_stride
        ]
        scales.reshape(len(cache), BLOCK_SIZE, -1)[..., : LAYOUT.num_scales] = TINY_BYTE
    return cache


class Decode:
    """A set of queries and indices over one cache or two."""

    def __init__(self, case: Case, caches: list[Any], s_q: int, widths: tuple[int, ...], seed: int) -> None:
        rng = cupy.random.default_rng(seed)
        self.caches = caches
        self.q = random(BATCH, s_q, HEADS, LAYOUT.head_dim, seed=seed)
        self.indices = [rng.integers(SLOT + 1, CACHE_TOKENS, (BATCH, s_q, width), dtype=cupy.int32) for width in widths]
        self.indices[0][: case.requests, :, ENTRY] = SLOT
        self.out = cupy.empty((BATCH, s_q, HEADS, 512), BFLOAT16)
        self.lse = cupy.empty((BATCH, HEADS, s_q), cupy.float32)
        self.plan = cumla.DecodePlan()

    def __call__(self) -> Any:
        cumla.sparse_mla_decode(
            self.q, self.caches[0], self.indices[0], layout=LAYOUT, **self.second(), plan=self.plan, out=self.out,
            lse=self.lse,
        )  # fmt: skip
        return self.out

    def second(self) -> dict[str, Any]:
        """The second cache and its list, if there is one."""
        if len(self.caches) == 1:
            return {}
        return {"extra_k_cache": self.caches[1], "extra_indices": self.indices[1]}

    def error(self) -> float:
        """Of the first request."""
        self.out[...] = 0
        result = self()[:1]
        listed = [indices[:1].get() for indices in self.indices]
        more = {}
        if len(self.caches) == 2:
            more = {"extra_k_cache": self.caches[1].get(), "extra_indices": listed[1]}
        with np.errstate(invalid="ignore"):
            want, _ = cumla.sparse_mla_decode(
                self.q[:1].get(), self.caches[0].get(), listed[0], layout=LAYOUT, **more, backend="reference"
            )
        return largest_error("decode", result, want)


def decode(report: Report, case: Case, s_q: int, widths: tuple[int, ...]) -> None:
    config = f"h{HEADS} b{BATCH} s{s_q} {'+'.join(map(str, widths))} {case.name}"
    if not report.wants("sparse_mla_decode", config):
        return
    caches = [make_cache(case, seed) for seed in range(len(widths))]
    sets = [Decode(case, caches, s_q, widths, seed) for seed in range(SETS)]
    report.add("sparse_mla_decode", config, "cumla", us_graph=graph_us(sets), max_abs_err=sets[0].error())
    peers = [flash_mla_decode(x.q, x.caches[0], x.indices[0], x.out, **x.second()) for x in sets]
    if None not in peers:
        report.add("sparse_mla_decode", config, "flash_mla", us_graph=graph_us(peers, "torch"), checked=False)
        report.rows[-1]["peer"] = FLASH_MLA_DECODE


def prefill(report: Report, case: Case, width: int, heads: int, rows: int = 1 << 15) -> None:
    config = f"d{width} h{heads} topk {TOPK} {case.name}"
    if not report.wants("sparse_mla_prefill", config):
        return
    kv, q = random(rows, width, seed=0), random(TOKENS, heads, width, seed=1)
    if case.requests:
        kv[:, VALUE] = case.value
    if case.name == "2^-95":
        kv = (kv.astype(cupy.float32) * TINY).astype(BFLOAT16)
    indices = cupy.random.default_rng(2).integers(0, rows, (TOKENS, TOPK), dtype=cupy.int32)
    outputs = (cupy.zeros((TOKENS, heads, 512), BFLOAT16), *(cupy.zeros((TOKENS, heads), cupy.float32) for _ in "ab"))

    def call() -> None:
        cumla.sparse_mla_prefill(q, kv, indices, out=outputs)

    call()
    with np.errstate(invalid="ignore"):
        want = cumla.sparse_mla_prefill(q[:2].get(), kv.get(), indices[:2].get(), backend="reference")[0]
    error = largest_error("prefill", outputs[0][:2], want)
    report.add("sparse_mla_prefill", config, "cumla", us_graph=graph_us([call]), max_abs_err=error)


def main() -> None:
    report = Report(arguments(__doc__).parse_args())
    for s_q, widths in ((1, (512,)), (2, (128, 512))):
        for case in DECODES:
            decode(report, case, s_q, widths)
    for width, heads in ((512, 64), (576, 128)):
        for case in PREFILLS:
            prefill(report, case, width, heads)
    report.finish()


if __name__ == "__main__":
    main()

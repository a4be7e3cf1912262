"""Sparse MLA decode over FP8 caches, beside FlashMLA (as vLLM ships it) in the same process.

Each query token lists random slots of a cache that is far larger than the L2 cache, and four sets of queries and
indices take turns. FLOP count what is attended to: 2 * heads * (head_dim + 512) for a query token and a key.
"""

from __future__ import annotations

import contextlib
import pathlib
from typing import NamedTuple

import cupy
import numpy as np
from common import Report, arguments, graph_us, has_peer, measure

import cumla
from cumla.dispatch.call import BFLOAT16
from cumla.kernels.cuda import compile as compiler
from cumla.kernels.cuda.launch import recorded_launches
from cumla.kernels.cuda.sparse import kernels as sparse_kernels

FLASH_MLA = "vllm.third_party.flashmla.flash_mla_interface"
BASE_TOKENS = 1 << 16  # made of random values; the cache repeats them
CACHE_BYTES = 4 << 30
SETS = 4
CHECKED_TOKENS = 3
PEER_HEADS = 64


class Config(NamedTuple):
    """One row: `extra` keys of a second cache, its lengths uniform in 0..extra where `ragged`."""

    layout: cumla.CacheLayout
    heads: int
    batch: int
    s_q: int
    topk: int
    extra: int = 0
    block_size: int = 64
    extra_block_size: int = 64
    ragged: bool = False

    def __str__(self) -> str:
        keys = f"{self.topk}" + (f"+{self.extra}" if self.extra else "") + (" ragged" if self.ragged else "")
        return f"{self.layout.name} h{self.heads} b{self.batch} s{self.s_q} {keys}"


V4, V32 = cumla.DSV4_FP8, cumla.V32_FP8
CONFIGS = [
    *(Config(V4, 64, b, 2, 128, 512, 256) for b in (2, 64, 128, 256)),
    *(Config(V4, 128, b, 2, 128, 1024, 256) for b in (2, 64, 128, 256)),
    *(Config(V32, 128, b, 2, 2048) for b in (2, 64, 128)),
    *(Config(layout, heads, 148, 2, 16384) for layout in (V4, V32) for heads in (64, 128)),
    *(Config(V4, 64, b, 1, 128, 0, 256) for b in (1, 8, 32)),
    *(Config(V4, 64, b, 1, 128, 512, 256) for b in (1, 2, 8, 32)),
    *(Config(V4, 128, b, 1, 128, 1024, 256) for b in (1, 2, 8, 32)),
    *(Config(V32, 128, b, 1, 2048) for b in (1, 2, 8, 32)),
    *(Config(V4, heads, b, 1, 128, 1024, 256) for heads in (8, 16, 32) for b in (1, 32, 128)),
    *(Config(V4, heads, 128, 2, 128, 1024, 256, 2, ragged=True) for heads in (64, 128)),
    *(Config(V4, heads, 128, 2, 128, 512, 256) for heads in (8, 16, 32)),
]


class Cache:
    """A large cache that repeats BASE_TOKENS random tokens, and those tokens on the host."""

    def __init__(self, layout: cumla.CacheLayout, block_size: int) -> None:
        pages = BASE_TOKENS // block_size
        k = cupy.random.default_rng(0).standard_normal((BASE_TOKENS, layout.head_dim), cupy.float32).astype(BFLOAT16)
        base = layout.allocate(pages, block_size, cupy)
        cumla.quantize_and_insert_k_cache(k, base, cupy.arange(BASE_TOKENS), block_size, layout=layout)
        self.base = base.get()
        page_stride = base.strides[0]
        repeats = max(1, CACHE_BYTES // (pages * page_stride))
        self.array = layout.allocate(pages * repeats, block_size, cupy)
        for i in range(repeats):
            self.array[i * pages : (i + 1) * pages] = base
        self.slots = pages * repeats * block_size


class Inputs:
    """One set of queries and indices."""

    def __init__(self, config: Config, caches: list[Cache], seed: int) -> None:
        rng = cupy.random.default_rng(seed)
        shape = (config.batch, config.s_q)
        self.config, self.caches = config, caches
        self.q = rng.standard_normal((*shape, config.heads, config.layout.head_dim), cupy.float32).astype(BFLOAT16)
        widths = (config.topk, config.extra)
        self.indices = [
            rng.integers(0, cache.slots, (*shape, width), dtype=cupy.int32)
            for cache, width in zip(caches, widths, strict=False)
        ]
        self.extra_lengths = None
        if config.ragged:
            self.extra_lengths = rng.integers(0, config.extra + 1, config.batch, dtype=cupy.int32)
        self.out = cupy.empty((*shape, config.heads, 512), BFLOAT16)
        self.lse = cupy.empty((config.batch, config.heads, config.s_q), cupy.float32)
        self.plan = cumla.DecodePlan()

    @property
    def keys(self) -> int:
        """Keys that are attended to, over all query tokens."""
        batch, s_q, topk, extra = self.config.batch, self.config.s_q, self.config.topk, self.config.extra
        attended = (
            batch * (topk + extra) if self.extra_lengths is None else batch * topk + int(self.extra_lengths.sum())
        )
        return attended * s_q

    def options(self, names: tuple[str, str, str]) -> dict:
        if len(self.caches) == 1:
            return {}
        return dict(zip(names, (self.caches[1].array, self.indices[1], self.extra_lengths), strict=True))

    def cumla(self, backend=None):
        config = self.config
        cumla.sparse_mla_decode(
            self.q, self.caches[0].array, self.indices[0], layout=config.layout,
            **self.options(("extra_k_cache", "extra_indices", "extra_topk_length")),
            plan=self.plan, out=self.out, lse=self.lse, backend=backend,
        )  # fmt: skip
        return self.out

    def flash_mla(self):
        """A function that calls FlashMLA on this set, its plan made once."""
        import torch
        from vllm.third_party.flashmla import flash_mla_interface as peer

        def tensor(array):
            return None if array is None else torch.from_dlpack(array)

        heads = max(PEER_HEADS, self.config.heads)  # it takes 64 or 128: fewer are padded
        padding = (0, 0, 0, heads - self.config.heads)
        q = torch.nn.functional.pad(tensor(self.q), padding)
        padded = cupy.empty((*self.out.shape[:2], heads, 512), BFLOAT16)
        out, result = tensor(padded), padded[:, :, : self.config.heads]
        plan, _ = peer.get_mla_metadata()
        indices = tensor(self.indices[0])
        cache = tensor(self.caches[0].array)[:, :, None]
        options = self.options(("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"))
        options = {name: tensor(array) for name, array in options.items()}
        if "extra_k_cache" in options:
            options["extra_k_cache"] = options["extra_k_cache"][:, :, None]

        def call():
            peer.flash_mla_with_kvcache(
                q, cache, None, None, 512, plan, None, is_fp8_kvcache=True, indices=indices, out=out, **options
            )
            return result

        return call

    def check(self, result) -> float:
        """The largest error of a few tokens against float64; raises AssertionError beyond the bound."""
        config, worst = self.config, 0.0
        for b in np.linspace(0, config.batch - 1, CHECKED_TOKENS).astype(int):
            options = {}
            if len(self.caches) > 1:
                options = {
                    "extra_k_cache": self.caches[1].base,
                    "extra_indices": self.indices[1][b : b + 1].get() % BASE_TOKENS,
                    "extra_topk_length": None if self.extra_lengths is None else self.extra_lengths[b : b + 1].get(),
                }
            want, _ = cumla.sparse_mla_decode(
                self.q[b : b + 1].get(), self.caches[0].base, self.indices[0][b : b + 1].get() % BASE_TOKENS,
                layout=config.layout, **options, backend="reference",
            )  # fmt: skip
            want = want.astype(np.float64)
            error = np.abs(result[b : b + 1].get().astype(np.float64) - want)
            assert (error <= 1e-3 + 2.01 / 128 * np.abs(want)).all(), f"{config}: off by {error.max()}"
            worst = max(worst, float(error.max()))
        return worst


def run(report: Report, config: Config, caches: list[Cache], peer: bool, ours: str) -> None:
    sets = [Inputs(config, caches, seed) for seed in range(SETS)]
    flop = sum(x.keys for x in sets) / SETS * 2 * config.heads * (config.layout.head_dim + 512)
    traffic = sum(x.keys for x in sets) / SETS * config.layout.token_bytes + sets[0].q.nbytes + sets[0].out.nbytes
    impls = {ours: ("cupy", [x.cumla for x in sets])}
    if peer:
        impls["flash_mla"] = ("torch", [x.flash_mla() for x in sets])

    def clear() -> None:
        sets[0].out[:] = 0

    measure(report, "sparse_mla_decode", str(config), impls, traffic, sets[0].check, clear, flop, host_calls=50)


def compare(report: Report, config: Config, caches: list[Cache], versions: list[str]) -> None:
    """Versions of the CUDA sources against one another; the error of a wrong one is nan."""
    sets = [Inputs(config, caches, seed) for seed in range(SETS)]
    flop = sum(x.keys for x in sets) / SETS * 2 * config.heads * (config.layout.head_dim + 512)
    for version in versions:
        compiler.look_first_in(pathlib.Path(version))
        with recorded_launches():
            sets[0].out[:] = 0
            try:
                error, checked = sets[0].check(sets[0].cumla()), True
            except AssertionError:
                error, checked = float("nan"), False
            us = graph_us([x.cumla for x in sets])
        report.add(
            "sparse_mla_decode", str(config), version, us_graph=us, flop=flop, max_abs_err=error, checked=checked
        )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--versions",
        nargs="+",
        metavar="DIR",
        help="for experiments: compare versions of the sources instead, csrc/ or folders with files to take first",
    )
    parser.add_argument(
        "--kernel",
        choices=sparse_kernels.KERNELS,
        help="instead of the one that is chosen; host times are then of calls without notes",
    )
    args = parser.parse_args()
    forced = sparse_kernels.forced(args.kernel) if args.kernel else contextlib.nullcontext()
    with forced:
        run_all(Report(args), "cumla" + (f" {args.kernel}" if args.kernel else ""), args.versions)


def run_all(report: Report, ours: str, versions: list[str] | None) -> None:
    caches: dict[tuple[str, int], Cache] = {}
    peer = has_peer(FLASH_MLA)
    for config in CONFIGS:
        if not report.wants("sparse_mla_decode", str(config)):
            continue
        wanted = [(config.layout.name, config.block_size)]
        if config.extra:
            wanted.append((config.layout.name, config.extra_block_size))
        for key in [key for key in caches if key not in wanted]:
            del caches[key]
        for key in wanted:
            if key not in caches:
                caches[key] = Cache(config.layout, key[1])
        if versions:
            compare(report, config, [caches[key] for key in wanted], versions)
        else:
            run(report, config, [caches[key] for key in wanted], peer, ours)
    report.finish()


if __name__ == "__main__":
    main()

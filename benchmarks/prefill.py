"""Sparse MLA prefill over gathered rows, beside FlashMLA (as vLLM ships it) in the same process.

Each query token lists random rows, and two sets of queries and indices take turns. The implementations are timed in
turn, several rounds each, as one is slower after another has warmed the device. FLOP count what is listed:
2 * heads * (head_dim + 512) for a query token and a row; for FlashMLA too where it pads the heads to 64.
"""

from __future__ import annotations

import contextlib
import pathlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import cupy
import numpy as np
from common import Report, arguments, graph_us, has_peer

import cumla
from cumla.bounds import PREFILL_OUT
from cumla.dispatch.call import BFLOAT16
from cumla.kernels.cuda import compile as compiler
from cumla.kernels.cuda.launch import recorded_launches
from cumla.kernels.cuda.sparse import kernels as sparse_kernels

FLASH_MLA = "vllm.third_party.flashmla.flash_mla_interface"
TOKENS = 4096
SETS, ROUNDS = 2, 3
CHECKED_TOKENS = 3
PEER_HEADS = 64  # a multiple of which FlashMLA takes


class Config(NamedTuple):
    """One row: `width` values a row, `rows` of them to choose from."""

    width: int
    heads: int
    topk: int
    rows: int
    tokens: int = TOKENS

    def __str__(self) -> str:
        return f"d{self.width} h{self.heads} topk {self.topk} of {self.rows // 1024}K"


K = 1024
CONFIGS = [
    *(Config(512, 64, 640, rows) for rows in (8 * K, 32 * K, 128 * K)),
    *(Config(512, 128, topk, 32 * K) for topk in (640, 1152)),
    *(Config(512, 128, 2048, rows) for rows in (8 * K, 32 * K, 128 * K)),
    *(Config(576, 128, 2048, rows) for rows in (2 * K, 8 * K, 32 * K, 128 * K)),
    *(Config(512, heads, 2048, 32 * K) for heads in (8, 16, 32)),
]


class Inputs:
    """One set of queries, rows and indices."""

    def __init__(self, config: Config, seed: int) -> None:
        self.config = config
        rng = cupy.random.default_rng(seed)
        shape = (config.tokens, config.heads)
        self.q = rng.standard_normal((*shape, config.width), cupy.float32).astype(BFLOAT16)
        self.kv = rng.standard_normal((config.rows, config.width), cupy.float32).astype(BFLOAT16)
        self.indices = rng.integers(0, config.rows, (config.tokens, config.topk), dtype=cupy.int32)
        self.out = cupy.empty((*shape, 512), BFLOAT16)
        self.logits = cupy.empty((2, *shape), cupy.float32)

    def cumla(self) -> Any:
        outputs = (self.out, self.logits[0], self.logits[1])
        cumla.sparse_mla_prefill(self.q, self.kv, self.indices, out=outputs)
        return self.out

    def flash_mla(self) -> Callable[[], Any]:
        """A function that calls FlashMLA on this set."""
        import torch
        from vllm.third_party.flashmla import flash_mla_interface as peer

        config = self.config
        padded = -(-config.heads // PEER_HEADS) * PEER_HEADS
        q = torch.from_dlpack(self.q)
        if padded > config.heads:
            q = torch.nn.functional.pad(q, (0, 0, 0, padded - config.heads))
        kv, indices = torch.from_dlpack(self.kv)[:, None], torch.from_dlpack(self.indices)[:, None]
        scale = config.width**-0.5

        def call() -> Any:
            out, _, _ = peer.flash_mla_sparse_fwd(q, kv, indices, scale)
            return out[:, : config.heads]

        return call

    def check(self, result: Any) -> float:
        """The largest error of a few tokens against float64; raises AssertionError beyond the bound."""
        worst = 0.0
        kv = self.kv.get()
        result = cupy.from_dlpack(result)
        for t in np.linspace(0, self.config.tokens - 1, CHECKED_TOKENS).astype(int):
            q, indices = self.q[t : t + 1].get(), self.indices[t : t + 1].get()
            want = cumla.sparse_mla_prefill(q, kv, indices, backend="reference")[0].astype(np.float64)
            error = np.abs(result[t : t + 1].get().astype(np.float64) - want)
            largest = np.abs(kv[indices[0], :512].astype(np.float64)).max()
            absolute, relative, _ = PREFILL_OUT.of_values(largest)
            assert (error <= absolute + relative * np.abs(want)).all(), f"{self.config}: off by {error.max()}"
            worst = max(worst, float(error.max()))
        return worst


def run(report: Report, config: Config, impls: dict[str, Any], checked: Inputs) -> None:
    """Rows of several implementations: name -> (framework, calls, what to do before)."""
    errors: dict[str, float] = {}
    times: dict[str, list[float]] = {name: [] for name in impls}
    for _ in range(ROUNDS):
        for name, (framework, calls, before) in impls.items():
            with before():
                if name not in errors:
                    checked.out[:] = 0
                    try:
                        errors[name] = checked.check(calls[0]())
                    except AssertionError as error:
                        print(error)
                        errors[name] = float("nan")
                times[name].append(graph_us(calls, framework))
    flop = config.tokens * config.topk * 2 * config.heads * (config.width + 512)
    for name in impls:
        report.add(
            "sparse_mla_prefill", str(config), name, us_graph=statistics.median(times[name]),
            bytes_moved=config.tokens * config.topk * config.width * 2, flop=flop, max_abs_err=errors[name],
            checked=errors[name] == errors[name],
        )  # fmt: skip


def version(folder: str) -> Callable[[], Any]:
    """A context in which the sources of `folder` come first."""

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        compiler.look_first_in(pathlib.Path(folder))
        with recorded_launches():
            yield

    return context


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--versions", nargs="+", metavar="DIR", default=[], help="for experiments: versions of the sources"
    )
    parser.add_argument("--kernel", choices=sparse_kernels.KERNELS, help="instead of the one that is chosen")
    args = parser.parse_args()
    report, peer = Report(args), has_peer(FLASH_MLA)
    with sparse_kernels.forced(args.kernel) if args.kernel else contextlib.nullcontext():
        for config in CONFIGS:
            if not report.wants("sparse_mla_prefill", str(config)):
                continue
            sets = [Inputs(config, seed) for seed in range(SETS)]
            calls = [x.cumla for x in sets]
            if args.versions:
                impls = {name: ("cupy", calls, version(name)) for name in args.versions}
            else:
                impls = {"cumla" + (f" {args.kernel}" if args.kernel else ""): ("cupy", calls, contextlib.nullcontext)}
            if peer:
                impls["flash_mla"] = ("torch", [x.flash_mla() for x in sets], contextlib.nullcontext)
            run(report, config, impls, sets[0])
    report.finish()


if __name__ == "__main__":
    main()

"""Rows in host memory: slots of a step's selection, copies of rows that miss, and decode over resident rows.

    python benchmarks/residency.py [--requests 64] [--topk 512] [--hot 8192] [--json FILE]

A step selects rows that every step selects, and new ones: none, 5%, or all. `us_graph` is the time of a call in a graph
of STEPS calls; later replays find no new row in a slot. `step` rows are the product of queries and decode over 128 rows
of windows (V4, V4.1) and the selected rows: all resident, or new ones fetched on a second stream under the product.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import common
import ml_dtypes
import numpy as np
from common import cupy

import cumla
from cumla.pages import Residency, host_pool

STEPS = 400  # in whose course the new rows of a step are replaced
REPLAYS = 10
BLOCK, HEADS, RANK, WINDOW, RATIO = 64, 64, 1024, 128, 4


class Format(NamedTuple):
    """Rows of a model: those in host memory, and of windows (None: there are none); `topk` times the option's rows."""

    resident: cumla.CacheLayout
    window: cumla.CacheLayout | None
    topk: int = 1


FORMATS = {
    "V4": Format(cumla.DSV4_FP8, cumla.DSV4_FP8),
    "V4.1": Format(cumla.DSV41_FP4, cumla.DSV41_FP8),
    "V3.2": Format(cumla.V32_FP8, None, 4),
}


def selections(steps: int, requests: int, topk: int, new: int, rng: np.random.Generator) -> np.ndarray:
    """int32 [steps, requests, topk]: rows that all steps select, and `new` ones of each step, in random order."""
    usual = topk - new
    rows = np.empty((steps, requests, topk), np.int32)
    rows[..., :usual] = np.arange(usual)
    rows[..., usual:] = usual + np.arange(steps * new).reshape(steps, 1, new)
    return rng.permuted(rows, axis=2)


class Steps:
    """Arguments of steps of one token a request."""

    def __init__(self, xp: Any, requests: int, topk: int, hot: int, new: int, steps: int = STEPS) -> None:
        rng = np.random.default_rng(0)
        self.xp, self.requests, self.hot = xp, requests, hot
        self.rows = topk + steps * new
        self.selected = [xp.asarray(x) for x in selections(steps, requests, topk, new, rng)]
        self.starts = xp.arange(requests + 1, dtype=np.int32)
        self.seq_lens = xp.full(requests, RATIO * self.rows + RATIO + 1, np.int32)  # the step completes no selected row
        self.lanes = xp.asarray(rng.permutation(requests).astype(np.int32))
        self.state = Residency.allocate(requests, self.rows, hot, xp)
        self.out = tuple(xp.full((requests, topk), -1, np.int32) for _ in range(2))

    def resolve(self, step: int, backend: str | None = None) -> Any:
        return cumla.resolve_resident(
            self.selected[step], self.starts, self.seq_lens, self.lanes, *self.state, compress_ratio=RATIO,
            out=self.out, backend=backend,
        )  # fmt: skip


class Caches:
    """Rows of all requests in pinned host memory, and slots of the device."""

    def __init__(self, xp: Any, steps: Steps, of: Format, pinned: bool | None = None) -> None:
        self.of, layout = of, of.resident
        columns = -(-steps.rows // BLOCK)
        pages = steps.requests * columns
        size = pages * layout.page_bytes(BLOCK)
        raw = host_pool(size, pinned).memory.reshape(pages, layout.page_bytes(BLOCK))
        raw[:] = np.random.default_rng(1).integers(0, 64, raw.shape[1], np.uint8)  # finite rows
        raw[:, :4] = np.arange(pages, dtype=np.int32)[:, None].view(np.uint8) % 64
        self.host = layout.view(raw, BLOCK)
        self.table = xp.asarray(np.random.default_rng(2).permutation(pages).reshape(-1, columns).astype(np.int32))
        self.slots = layout.allocate(-(-steps.requests * steps.hot // BLOCK), BLOCK, xp)

    def fetch(self, steps: Steps, backend: str | None = None) -> None:
        slots, misses = steps.out
        cumla.fetch_resident(
            misses, slots, steps.starts, self.table, self.host, self.slots, layout=self.of.resident, backend=backend
        )


def check(steps: Steps, caches: Caches) -> None:
    """Raise AssertionError unless a fetched row of each request has the host's bytes."""
    slots, misses = (np.asarray(x.get() if hasattr(x, "get") else x) for x in steps.out)
    found = caches.slots.get() if hasattr(caches.slots, "get") else caches.slots
    table = caches.table.get() if hasattr(caches.table, "get") else caches.table
    for r, (of_request, its_slots) in enumerate(zip(misses, slots, strict=True)):
        for j in np.flatnonzero(of_request >= 0)[:1]:
            (page, row), (to, at) = divmod(int(of_request[j]), BLOCK), divmod(int(its_slots[j]), BLOCK)
            size = caches.of.resident.row_bytes
            np.testing.assert_array_equal(
                found[to].reshape(-1)[at * size :][:size], caches.host[table[r, page]].reshape(-1)[row * size :][:size]
            )


def graph_us(calls: Sequence[Callable[[], Any]]) -> float:
    """Microseconds of a call: all of them in one graph, each once."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        calls[0]()
        stream.begin_capture()
        for call in calls:
            call()
        graph = stream.end_capture()
        times = list[float]()
        for _ in range(REPLAYS):
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            times.append(1e3 * cupy.cuda.get_elapsed_time(start, end) / len(calls))
    return statistics.median(times[2:])


def pcie_gbps(caches: Caches) -> float:
    """Pace of one copy of much host memory."""
    size = min(caches.host.nbytes, 256 << 20)
    target, stream = cupy.empty(size, np.uint8), cupy.cuda.get_current_stream().ptr
    copy = functools.partial(
        cupy.cuda.runtime.memcpyAsync, target.data.ptr, caches.host.ctypes.data, size, 1, stream
    )  # fmt: skip
    times = list[float]()
    for _ in range(REPLAYS):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        copy()
        end.record()
        end.synchronize()
        times.append(1e3 * cupy.cuda.get_elapsed_time(start, end))
    return size / statistics.median(times) / 1e3


class Step:
    """The product of queries, and decode over windows and resident rows."""

    def __init__(self, xp: Any, steps: Steps, of: Format) -> None:
        rng, requests, width = np.random.default_rng(3), steps.requests, of.resident.head_dim
        self.of, self.width = of, width
        self.x = xp.asarray(rng.standard_normal((requests, RANK)).astype(ml_dtypes.bfloat16))
        self.weight = xp.asarray(rng.integers(0, 64, (HEADS * width, RANK), np.uint8))
        self.scale = xp.full((-(-HEADS * width // 128), RANK // 128), 1e-3, np.float32)
        self.q = xp.empty((requests, HEADS * width), self.x.dtype)
        if of.window is not None:
            self.window = of.window.allocate(requests * WINDOW // BLOCK, BLOCK, xp)
            self.indices = xp.arange(requests * WINDOW, dtype=np.int32).reshape(requests, 1, WINDOW)
        self.out = xp.empty((requests, 1, HEADS, 512), self.x.dtype)
        self.lse = xp.empty((requests, HEADS, 1), np.float32)
        self.plan = cumla.DecodePlan()
        self.side: Any = None if xp is np else cupy.cuda.Stream(non_blocking=True)

    def run(self, steps: Steps, caches: Caches, number: int | None) -> None:
        """One step; with a number, rows of that step's selection are fetched under the product."""
        if number is not None:
            main, (fork, join) = cupy.cuda.get_current_stream(), (cupy.cuda.Event(disable_timing=True) for _ in "ab")
            fork.record(main)
            self.side.wait_event(fork)
            with self.side:
                steps.resolve(number)
                caches.fetch(steps)
                join.record(self.side)
        cumla.fp8_block_linear(self.x, self.weight, self.scale, out=self.q)
        if number is not None:
            main.wait_event(join)
        slots, resident = steps.out[0][:, None], self.of.resident
        rows = (caches.slots, slots) if self.of.window is None else (self.window, self.indices)
        more = {"layout": resident} if self.of.window is None else {
            "layout": self.of.window, "extra_k_cache": caches.slots, "extra_indices": slots, "extra_layout": resident
        }  # fmt: skip
        cumla.sparse_mla_decode(
            self.q.reshape(-1, 1, HEADS, self.width), *rows, softmax_scale=self.width**-0.5, out=self.out, lse=self.lse,
            plan=self.plan, **more,
        )  # fmt: skip


def measure(report: common.Report, name: str, requests: int, topk: int, hot: int, new: int) -> None:
    of = FORMATS[name]
    config = f"{name}, {requests} x {topk}, {hot:,} slots, {new / topk:.0%} miss"
    steps = Steps(cupy, requests, topk, hot, new, min(STEPS, 2 * hot // max(new, 1) + 1))
    numbers = range(len(steps.selected))
    moved = requests * new * of.resident.token_bytes
    calls = [functools.partial(steps.resolve, i) for i in numbers]
    report.add("resolve_resident", config, "cumla", graph_us(calls))
    caches = Caches(cupy, steps, of)
    for i in numbers:
        steps.resolve(i)
        caches.fetch(steps)
    if new:
        cupy.cuda.Device().synchronize()
        check(steps, caches)
        us, pace = graph_us([lambda: caches.fetch(steps)] * 20), pcie_gbps(caches)
        report.add("fetch_resident", config, "cumla", us, moved)
        report.add("fetch_resident", config, "PCIe pace", moved / pace / 1e3, moved, checked=False)
    step = Step(cupy, steps, of)
    calls = [functools.partial(step.run, steps, caches, i if new else None) for i in numbers]
    report.add("step", config, "cumla", graph_us(calls))


def main() -> None:
    parser = common.arguments(__doc__)
    for name, default in (("requests", 64), ("topk", 512), ("hot", 8192)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    report = common.Report(args)
    for name, of in FORMATS.items():
        topk = of.topk * args.topk
        for new in (0, topk // 20, topk):
            if report.wants("residency", name):
                measure(report, name, args.requests, topk, args.hot, new)
                cupy.get_default_memory_pool().free_all_blocks()
    report.finish()


if __name__ == "__main__":
    main()

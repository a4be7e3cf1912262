"""Swaps of requests between device and host, all page groups at once, and one memcpy of the same size.

    python benchmarks/page_groups.py [--requests 64] [--tokens 8192] [--layers 4] [--json FILE]

`us_graph` of a row is the time on the stream, the copy of the list of spans included; no graph is captured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import common
import numpy as np
from common import cupy

from cumla import pages
from cumla.models import DeepseekV4Config, DeepseekV32Config

ROUNDS = 9


def models(layers: int) -> dict[str, pages.Description]:
    ratios = (1, 4, 128, 4, *[4, 128] * layers)[:layers]
    v4 = DeepseekV4Config(4096, 64, 1024, 8, 1024, compress_ratios=ratios)
    return {
        "V4": pages.describe(v4), "V3.2": pages.describe(DeepseekV32Config(7168, 128, 1536), layers=layers)
    }  # fmt: skip


def plan(
    model: pages.Description, requests: int, tokens: int, rng: np.random.Generator
) -> tuple[dict[str, int], dict[str, np.ndarray]]:
    """Pages of each pool, and pairs of device page and host page by group."""
    counts, pairs = dict[str, int](), dict[str, np.ndarray]()
    for part in model.needs(tokens).parts:
        count = max(requests * len(part.pages), 1)
        counts[part.group] = count
        used = requests * len(part.pages)
        pairs[part.group] = np.stack([rng.permutation(count)[:used], np.arange(used)], axis=1)
    return counts, pairs


def timed(xp: Any, call: Callable[[], Any]) -> tuple[float, float]:
    """Microseconds on the stream, and of the host."""
    device, host = list[float](), list[float]()
    for _ in range(ROUNDS):
        start, end = xp.cuda.Event(), xp.cuda.Event()
        xp.cuda.Device().synchronize()
        start.record()
        before = time.perf_counter()
        call()
        host.append(1e6 * (time.perf_counter() - before))
        end.record()
        end.synchronize()
        device.append(1e3 * xp.cuda.get_elapsed_time(start, end))
    return statistics.median(device[1:]), statistics.median(host[1:])


def measure(xp: Any, report: common.Report, name: str, model: pages.Description, requests: int, tokens: int) -> None:
    rng = np.random.default_rng(0)
    counts, pairs = plan(model, requests, tokens, rng)
    device = pages.Pools.allocate(model, counts, xp)
    memory = pages.host_pool(pages.Pools.bytes_of(model, counts))
    host = pages.Pools.allocate(model, counts, memory)
    for pool in device.pools:
        pool.array[:] = xp.asarray(rng.integers(0, 256, (1, pool.array.shape[1]), np.uint8))
        pool.array[:, :4] = xp.arange(len(pool.array), dtype=xp.int32).view(xp.uint8).reshape(-1, 4)
    moved = sum(len(pairs[pool.group.name]) * pool.cache.page_bytes for pool in device.pools)
    flat = xp.zeros(moved, xp.uint8)
    runtime, stream = xp.cuda.runtime, xp.cuda.get_current_stream().ptr

    def check() -> None:
        xp.cuda.Device().synchronize()
        for ours, theirs in zip(device.pools, host.pools, strict=True):
            its = pairs[ours.group.name]
            for i in rng.integers(0, len(its), 20) if len(its) else ():
                np.testing.assert_array_equal(ours.array[int(its[i, 0])].get(), theirs.array[its[i, 1]])

    back = {group: its[:, ::-1] for group, its in pairs.items()}
    calls = {
        "swap_out": (lambda: pages.swap_out(device, host, pairs),
                     lambda: runtime.memcpyAsync(memory.address, flat.data.ptr, moved, 2, stream)),
        "swap_in": (lambda: pages.swap_in(host, device, back),
                    lambda: runtime.memcpyAsync(flat.data.ptr, memory.address, moved, 1, stream)),
    }  # fmt: skip
    config = f"{name}, {requests} x {tokens:,}"
    copies = {op: timed(xp, copy) for op, (_, copy) in calls.items()}  # before the pool's content counts
    for op, (swap, _) in calls.items():
        (us, us_host), (copy_us, _) = timed(xp, swap), copies[op]
        check()
        report.add(op, config, "cumla", us, moved)
        report.add(op, config, "memcpy", copy_us, moved, checked=False)
        print(f"{op} {config}: {moved / 1e6:.0f} MB, {copy_us / us:.0%} of memcpy, host {us_host:.0f} us", flush=True)


def main() -> None:
    parser = common.arguments(__doc__)
    for name, default in (("requests", 64), ("tokens", 8192), ("layers", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    report = common.Report(args)
    for name, model in models(args.layers).items():
        if report.wants("swap", name):
            measure(cupy, report, name, model, args.requests, args.tokens)
            cupy.get_default_memory_pool().free_all_blocks()
    report.finish()


if __name__ == "__main__":
    main()

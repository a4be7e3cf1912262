"""Rows of benchmarks/trace.py: steps of a request trace, the peers' chain against cumla's for each part of a layer.

A call runs a part of 8 layers, over the caches of 8 layers or of fewer in turn; times are those for one layer. Decodes
are planned once for the 8 layers, on both sides. Steps of decodes run in a CUDA graph. Mixed steps are queued behind a
kernel that blocks the device, which excludes host time, and are run again with host time. Parts of both sides are
timed alternately. A part that fails leaves a row with its error.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from trace_layers import KINDS, V32, Caches, Place, Shape, StepInputs, Tokens, shared
from trace_peers import PeerStep, functions, missing
from trace_steps import Steps, steps_of
from trace_v32 import V32_FUNCTIONS, V32Inputs, V32Peers

from cumla.arrays import dlpack
from cumla.bench import peers
from cumla.bench.measure import call_times, cupy, graph_times_in_turn, limit_us, queued_times_in_turn
from cumla.bench.rows import Row as Row
from cumla.dispatch import backends
from cumla.replay.trace import TraceRequest

PARTS = ("insert", "select", "attention")
PURE = ("decode8", "decode16", "decode64", "decode256", "mtp2", "mtp4")
MIXED = ("mixed64x2048", "mixed64x8192", "mixed128x2048", "mixed128x8192")
# Bounds of differences: both sides round weights to bfloat16, and select different rows of equal scores.
ABSOLUTE, RELATIVE, LISTS_DIFFER, BYTES_DIFFER = 2e-3, 6.02 / 128, 2e-3, 1e-3
ROUNDED_TWICE = 2.2 / 16  # e4m3 values of one number under different scales
COMPARED = 1024  # tokens per comparison
PLANNED_LAYERS = 8  # layers that share a decode plan; V4 has about 20 layers of a kind

Impls = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class TraceOptions:
    """Options of a measurement. None for heads, steps or requests: the backend's default."""

    backend: str
    kinds: tuple[str, ...] = tuple(KINDS)
    heads: tuple[int, ...] | None = None
    steps: tuple[str, ...] | None = None
    layers: int = 8
    seed: int = 0

    @property
    def on_device(self) -> bool:
        return backends.takes_device_arrays(self.backend)

    @property
    def all_heads(self) -> tuple[int, ...]:
        return self.heads or ((64, 16, 128) if self.on_device else (8,))

    @property
    def all_steps(self) -> tuple[str, ...]:
        return self.steps or ((*PURE, *MIXED) if self.on_device else ("decode8", "mtp2x4", "mixed4x256"))


def measured(options: TraceOptions, requests: Sequence[TraceRequest]) -> Iterator[Row]:
    """Yields a row for each implementation of a part of a layer in a step."""
    place = Place.of(options.backend)
    for name in options.all_steps:
        steps = steps_of(name, requests, options.seed)
        for kind in options.kinds:
            try:
                yield from of_kind(place, kind, steps, options)
            except Exception as error:  # such as a lack of memory: the next kind may succeed
                yield failed("caches", f"{kind} h{options.all_heads[0]} {name}, lengths", "cumla", error)
            if place.on_device:
                place.xp.get_default_memory_pool().free_all_blocks()


def of_kind(place: Place, kind: str, steps: Steps, options: TraceOptions) -> Iterator[Row]:
    """Rows of steps that share caches; the caches are freed at the end."""
    caches = Caches(place, kind, steps.blocks, options.layers)
    for heads in options.all_heads:
        shape = Shape.of(kind, heads)
        tokens = Tokens(place, heads, steps.most_tokens, steps.longest, shape.layout.head_dim)
        for number, step in enumerate(steps.steps):
            config = f"{kind} h{heads} {steps.name}" + (f" {number}" if len(steps.steps) > 1 else "") + ", lengths"
            try:
                inputs = step_inputs(place, shape, caches, tokens, steps, step)
                yield from StepRows(inputs, steps, config, number == 0).rows()
            except Exception as error:  # the next step may succeed
                yield failed("step", config, "cumla", error)
        del tokens


def step_inputs(place: Place, shape: Shape, *of_step: Any) -> StepInputs:
    return (V32Inputs if shape.kind == V32 else StepInputs)(place, shape, *of_step)


def failed(part: str, config: str, impl: str, error: Exception) -> Row:
    text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return {"op": f"trace {part}", "config": config, "impl": impl, "us": None, "us_graph": None, "error": text}


class StepRows:
    """Measurements of one step.

    Args:
        once: whether to time per-step work, too: metadata, plans and schedules that all layers share
    """

    def __init__(self, inputs: StepInputs, steps: Steps, config: str, once: bool) -> None:
        self.inputs, self.steps, self.config, self.once = inputs, steps, config, once
        self.layers = len(inputs.caches.window)

    def rows(self) -> Iterator[Row]:
        inputs = self.inputs
        if self.once:
            yield from self._timed("metadata", {"cumla": inputs.build}, layers=1)
        peer, error = None, None
        if inputs.place.framework == "torch" and peers.has_peer("vllm"):
            try:
                peer = V32Peers(inputs) if isinstance(inputs, V32Inputs) else PeerStep(inputs)
            except Exception as problem:
                yield failed("step", self.config, "peers", problem)
        if inputs.shape.selects:
            inputs.select()  # attention reads the selection
        for part in PARTS:
            if part == "select" and not inputs.shape.selects:
                continue
            impls: Impls = {"cumla": self._call(inputs, part)}
            facts: Row = {}
            if peer is not None:
                try:
                    if (lack := missing(part, inputs.shape.kind, self.steps)) is not None:
                        raise ImportError(f"no {lack}")
                    impls["peers"] = self._call(peer, part)
                    facts["max_abs_err"], error = getattr(self, f"_compare_{part}")(peer)
                except Exception as problem:
                    yield failed(part, self.config, "peers", problem)
                    impls.pop("peers", None)
                    facts, error = {}, None
            facts["checked"] = "max_abs_err" in facts and error is None
            if error is not None:
                facts["error"] = error
            moved, flop = inputs.work(part)
            facts["limit_us"] = limit_us(moved, flop, fp8=part == "select")
            if part == "select":
                facts["overlap"] = inputs.overlap()
            yield from self._timed(part, impls, facts)
            if self.once and part == "attention" and not self.steps.mixed and inputs.place.on_device:
                yield from self._plans(impls, peer)
        if self.once and peer is not None and getattr(peer, "schedule", None) is not None:
            yield from self._timed("index schedule", {"peers": peer.make_schedule}, layers=1)

    def _call(self, side: StepInputs | PeerStep, part: str) -> Callable[[], Any]:
        """A part of all layers; attention runs PLANNED_LAYERS layers, over the available caches in turn."""
        call: Callable[[], Any] = getattr(side, CALLS[part])
        again = self._each(part) // self.layers - 1
        if not again:
            return call

        def repeated() -> None:
            side.attend()
            for _ in range(again):
                side.attend(False)

        return repeated

    def _each(self, part: str) -> int:
        """Number of layers that a call runs."""
        if part != "attention" or not self.inputs.place.on_device:
            return self.layers
        return self.layers * -(-PLANNED_LAYERS // self.layers)

    def _plans(self, impls: Impls, peer: PeerStep | None) -> Iterator[Row]:
        """Time of the decodes' plan: a step with the plan minus a step without it."""
        sides = {"cumla": self.inputs} | ({"peers": peer} if peer is not None and "peers" in impls else {})
        new: Impls = {f"{name} new": side.attend for name, side in sides.items()}
        kept: Impls = {f"{name} kept": functools.partial(side.attend, False) for name, side in sides.items()}
        times = self._times(new | kept)
        for name in sides:
            us = statistics.median(times[f"{name} new"]) - statistics.median(times[f"{name} kept"])
            yield self._row("plan", name, max(us, 0.0), None, {})

    # ---- comparing

    def _compare_insert(self, peer: PeerStep) -> tuple[float, str | None]:
        """Compare queries by value, and written pages by bytes, or by value if both sides' scales differ."""
        inputs, xp = self.inputs, self.inputs.place.xp
        slots = dlpack.borrow(inputs.batch.slot_mapping, "slots")
        error, beyond = 0.0, None
        for cache, values in inputs.inserted():
            pages = xp.unique(slots // cache.shape[1])
            written, before = [], cache[pages]
            for call in (inputs.insert, peer.insert):
                cache[pages] = 0xA5
                call()
                written.append(values(pages) if values is not None else cache[pages])
            cache[pages] = before  # attention reads the rows that the step did not write
            if values is not None:
                largest = float(abs(written[0].astype(np.float32)).max())
                error, beyond = difference(written[0], written[1], largest, ROUNDED_TWICE)
            elif (differ := float((written[0] != written[1]).mean())) > BYTES_DIFFER:
                beyond = f"{differ:.2%} of the bytes of rows differ"
        if peer.inserted is not None and beyond is None:
            error, beyond = difference(inputs.out, peer.inserted[:, : inputs.shape.heads], 1.0)
        return error, beyond

    def _compare_select(self, peer: PeerStep) -> tuple[float, str | None]:
        """Fraction of the lists' entries that differ; both sides may select different rows of equal scores."""
        self.inputs.select()
        peer.select()
        ours, theirs = (dlpack.borrow(x, "selected") for x in (self.inputs.selected, peer.selected))
        differ = 1 - shared(self.inputs.place.xp, ours, theirs) if bool((ours >= 0).any()) else 0.0
        return differ, f"{differ:.2%} of the lists differ" if differ > LISTS_DIFFER else None

    def _compare_attention(self, peer: PeerStep) -> tuple[float, str | None]:
        largest = float(abs(dlpack.borrow(self.inputs.kv, "kv")[:COMPARED].astype(np.float32)).max())
        self.inputs.attend()
        peer.attend()
        return difference(self.inputs.out, peer.out[:, : self.inputs.shape.heads], largest)

    # ---- timing

    def _timed(self, part: str, impls: Impls, facts: Row | None = None, layers: int | None = None) -> Iterator[Row]:
        each = layers or self._each(part)
        try:
            times = self._times(impls, part)
        except Exception as problem:
            if len(impls) == 1:
                yield failed(part, self.config, next(iter(impls)), problem)
                return
            for name, call in impls.items():  # calls that a graph can capture are timed separately
                yield from self._timed(part, {name: call}, facts, layers)
            return
        for name, found in times.items():
            whole = whole_us(impls[name]) / each if self.inputs.place.on_device else None
            yield self._row(part, name, statistics.median(found) / each, whole, facts or {}, found, each)

    def _times(self, impls: Impls, part: str = "attention") -> dict[str, list[float]]:
        place = self.inputs.place
        if not place.on_device:
            return {name: call_times([call], 0.1) for name, call in impls.items()}
        if self.steps.mixed or part in ("metadata", "index schedule"):
            return queued_times_in_turn(impls)
        return graph_times_in_turn({name: (place.framework, [call]) for name, call in impls.items()})

    def _row(
        self, part: str, impl: str, us: float, whole: float | None, facts: Row, times: Sequence[float] = (),
        each: int = 1,
    ) -> Row:  # fmt: skip
        row: Row = {"op": f"trace {part}", "config": self.config, "impl": impl, **facts}
        row |= {"us": us if whole is None else whole, "us_graph": None if not self.inputs.place.on_device else us}
        if len(times) > 1:
            low, _, high = statistics.quantiles(times, n=4)
            row |= {"us_low": low / each, "us_high": high / each}
        if impl == "peers":
            row["functions"] = (V32_FUNCTIONS if self.inputs.shape.kind == V32 else {}).get(part, functions()[part])
        return row


def difference(ours: Any, theirs: Any, largest: float, relative: float = RELATIVE) -> tuple[float, str | None]:
    """The largest difference of outputs, and a message if it exceeds the bound for values up to `largest`."""
    ours, theirs = (dlpack.borrow(x, "out") for x in (ours, theirs))
    worst, beyond = 0.0, False
    for first in range(0, len(ours), COMPARED):
        a, b = (x[first : first + COMPARED].astype(np.float32) for x in (ours, theirs))
        error = abs(a - b)
        worst = max(worst, float(error.max()))
        beyond = beyond or not bool((error <= ABSOLUTE * largest + relative * abs(b)).all())
    return worst, f"off by {worst:.3g}" if beyond else None


CALLS = {"insert": "insert", "select": "select", "attention": "attend"}


def whole_us(call: Callable[[], Any], repeats: int = 5) -> float:
    """Median us from a call until the device has done what it queued."""
    synchronize, times = cupy().cuda.Device().synchronize, []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)

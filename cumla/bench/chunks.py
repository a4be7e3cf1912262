"""A C4A layer's prefill chunk, whole: over both paths, beside vLLM's chain of gathers, index map and FlashMLA.

The rows of the chunk are in the caches already. Several layers with caches of their own run at once; times are of one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..arrays import dlpack
from ..errors import RunError
from ..layers.prefill_path import chunk_paths
from ..replay.blocks import BLOCK_TOKENS
from ..replay.scheduler import Scheduled, Sequence
from ..replay.trace import HASH_TOKENS, TraceRequest
from . import peers
from .problem import Problem, Sizes
from .trace import difference
from .trace_layers import Caches, Place, Shape, StepInputs, Tokens
from .trace_peers import FUNCTIONS, PeerStep
from .trace_steps import Steps

LAYERS = 4


@dataclass(frozen=True)
class Chunk:
    """Requests with so many new tokens each, the last ones of a context; with lengths, of contexts up to that."""

    requests: int
    new: int
    context: int
    heads: int = 64
    lengths: bool = False

    op: ClassVar[str] = "prefill chunk"

    def __str__(self) -> str:
        context = f"{self.context // 1024}K" if self.context % 1024 == 0 else f"{self.context:,}"
        heads = "" if self.heads == 64 else f"h{self.heads} "
        kind = "lengths" if self.lengths else "equal contexts"
        return f"{heads}{self.requests} x {self.new:,} new, {context} context, {kind}"

    def steps(self) -> Steps:
        ends = np.full(self.requests, self.context)
        if self.lengths:
            ends = np.maximum(self.context * (1 + np.arange(self.requests)) // self.requests, self.new)
        counts = -(-ends // BLOCK_TOKENS)
        blocks = np.random.default_rng(0).permutation(int(counts.sum()))
        step = []
        for index, (end, first) in enumerate(zip(ends.tolist(), np.cumsum(counts) - counts, strict=True)):
            request = TraceRequest(0.0, end, 1, tuple(range(-(-end // HASH_TOKENS))))
            sequence = Sequence(index, request, blocks[first : first + counts[index]].tolist())
            step.append(Scheduled(sequence, end - self.new, self.new))
        return Steps("mixed", [step], 1, len(blocks))

    def problem(self, sizes: Sizes) -> Problem:
        place, steps, shape = Place.of(sizes.backend), self.steps(), Shape.of("c4a", self.heads, sizes.extra)
        caches = Caches(place, shape.kind, steps.blocks, LAYERS)
        tokens = Tokens(place, self.heads, steps.most_tokens, steps.longest)
        x = StepInputs(place, shape, caches, tokens, steps, steps.steps[0])
        x.select()
        paths = chunk_paths(x.metadata, shape.ratio, self.heads, shape.topk, place.backend)
        chosen = ", ".join(chunk.path for chunk in paths)
        calls: dict[str, Callable[[], Any]] = {f"cumla ({chosen})": functools.partial(attend, x, None)}
        calls |= {f"cumla {path}": functools.partial(attend, x, path) for path in ("pages", "rows")}
        functions = {}
        if sizes.with_peers and place.framework == "torch" and peers.cutedsl_gather() and peers.module(peers.FLASH_MLA):
            peer = PeerStep(x)
            calls["vllm"], functions = functools.partial(attend_as_vllm, peer), {"vllm": FUNCTIONS["attention"]}
        want = dlpack.borrow(attend(x, "pages"), "out").copy()
        largest = float(abs(dlpack.borrow(x.kv, "kv").astype(np.float32)).max())

        def check(result: Any) -> float:
            error, beyond = difference(result, want, largest)
            if beyond:
                raise RunError(f"{beyond} from attention over the pages")
            return error

        moved, flop = x.work("attention")
        return Problem(
            self.op, str(self), {name: (place.framework, [call]) for name, call in calls.items()}, moved, flop, check,
            lambda: dlpack.borrow(x.out, "out").fill(0), functions, queued=LAYERS,
        )  # fmt: skip


def attend(x: StepInputs, path: str | None) -> Any:
    x.attend(False, path)
    return x.out


def attend_as_vllm(peer: PeerStep) -> Any:
    peer.attend(False)
    return peer.out[:, : peer.heads]


def recorded() -> list[Chunk]:
    sizes = ((4, 1024, 32 << 10), (1, 512, 128 << 10), (8, 256, 16 << 10))
    return [
        *(Chunk(*size, heads, lengths=True) for heads in (64, 16, 128) for size in sizes if size[0] > 1),
        *(Chunk(*size) for size in sizes),
    ]

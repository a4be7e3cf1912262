"""Steps of continuous batching over a request trace, by name: the scheduled tokens of each request.

decode64          64 requests drawn from the trace, each at a random position of its output
mtp2x64           the same requests; their last two positions run as one decode. Without a number: 64 requests
mixed128x8192     ten steps spread over a run of the scheduler: up to 128 requests, 8,192 tokens a step
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cumla.errors import InputError
from cumla.replay.blocks import BLOCK_TOKENS, BlockPool
from cumla.replay.scheduler import Scheduled, Scheduler
from cumla.replay.scheduler import Sequence as Running
from cumla.replay.trace import TraceRequest

MIXED_STEPS = 10
MTP_REQUESTS = 64
NAME = re.compile(r"decode(?P<decode>\d+)|mtp(?P<tokens>\d+)(x(?P<mtp>\d+))?|mixed(?P<running>\d+)x(?P<budget>\d+)")


@dataclass(frozen=True)
class Steps:
    """Steps of one kind.

    Attributes:
        steps: for each step the scheduled tokens of requests, over blocks 0 to `blocks` - 1
        tokens: tokens of a decode
        blocks: blocks of 256 positions in the caches of these steps
    """

    name: str
    steps: Sequence[Sequence[Scheduled]]
    tokens: int
    blocks: int

    @property
    def mixed(self) -> bool:
        """Whether prompts run in the same steps as decodes."""
        return self.name.startswith("mixed")

    @property
    def most_tokens(self) -> int:
        return max(sum(s.count for s in step) for step in self.steps)

    @property
    def most_requests(self) -> int:
        return max(map(len, self.steps))

    @property
    def longest(self) -> int:
        return max(s.sequence.request.total_length for step in self.steps for s in step)


def parsed(name: str) -> re.Match[str]:
    """The numbers of a name. Raises InputError for an unknown name."""
    found = NAME.fullmatch(name)
    if found is None or any(number is not None and not int(number) for number in found.groupdict().values()):
        raise InputError(f"--steps: got {name!r}, expected names such as decode64, mtp2x64 or mixed64x2048")
    return found


def steps_of(name: str, requests: Sequence[TraceRequest], seed: int = 0) -> Steps:
    """The steps of a name. Raises InputError for an unknown name."""
    found = parsed(name)
    rng = np.random.default_rng(seed)
    if found["running"]:
        chosen, tokens = _mixed(requests, int(found["running"]), int(found["budget"])), 1
    else:
        tokens = int(found["tokens"] or 1)
        count = int(found["decode"] or found["mtp"] or MTP_REQUESTS)
        chosen = [_decodes(requests, count, tokens, rng)]
    return _packed(name, chosen, tokens, rng)


def _decodes(requests: Sequence[TraceRequest], count: int, tokens: int, rng: np.random.Generator) -> list[Scheduled]:
    """Requests at random positions of their outputs. The positions are the same for any number of tokens."""
    fitting = [request for request in requests if request.output_length > 1]
    if not fitting:
        raise InputError("the trace has no request with two tokens of output or more, which a step of decodes needs")
    rounds = -(-count // len(fitting))
    drawn = np.concatenate([rng.permutation(len(fitting)) for _ in range(rounds)])[:count]
    step, blocks = [], itertools.count()
    for index, which in enumerate(drawn):
        request = fitting[which]
        end = request.input_length + int(rng.integers(1, request.output_length))
        sequence = Running(index, request, list(itertools.islice(blocks, -(-request.total_length // BLOCK_TOKENS))))
        step.append(Scheduled(sequence, max(end - tokens, 0), min(tokens, end)))
    return step


def _mixed(requests: Sequence[TraceRequest], running: int, budget: int) -> list[list[Scheduled]]:
    """Ten steps, evenly spread over the steps with prompts and decodes while requests wait: later steps have less load.

    The requests arrive at once and are repeated: their number is at least twice `running`.
    """
    together = list(repeated(requests, max(2, -(-2 * running // len(requests)))))
    largest = max(-(-request.total_length // BLOCK_TOKENS) for request in requests)
    scheduler = Scheduler(together, BlockPool(running * largest), budget, running)
    found: list[list[Scheduled]] = []
    while (step := scheduler.next_step()) and (scheduler.waiting or not found):
        if step[-1].count > 1 and (step[0].count == 1 or not found):
            found.append(step)  # a step's entries do not change later: a request's blocks are never reassigned
        scheduler.finish_step(step)
    return [found[int((i + 0.5) * len(found) / MIXED_STEPS)] for i in range(min(MIXED_STEPS, len(found)))]


def repeated(requests: Sequence[TraceRequest], times: int) -> Iterator[TraceRequest]:
    """The requests `times` times, all at time 0; each time with other hash ids, so that no blocks are shared."""
    most = 1 + max((max(request.hash_ids, default=0) for request in requests), default=0)
    for round_ in range(times):
        for request in requests:
            hash_ids = tuple(hash_id + round_ * most for hash_id in request.hash_ids)
            yield replace(request, timestamp=0.0, hash_ids=hash_ids)


def _packed(name: str, steps: Sequence[Sequence[Scheduled]], tokens: int, rng: np.random.Generator) -> Steps:
    """The steps over the least number of blocks that fits all of them, with blocks in random order."""
    needed = [sorted({block for s in step for block in s.sequence.blocks}) for step in steps]
    blocks = max(map(len, needed))
    packed = []
    for step, its_blocks in zip(steps, needed, strict=True):
        places = dict(zip(its_blocks, rng.permutation(blocks).tolist(), strict=False))
        packed.append([
            replace(s, sequence=replace(s.sequence, blocks=[places[block] for block in s.sequence.blocks]))
            for s in step
        ])  # fmt: skip
    return Steps(name, packed, tokens, blocks)

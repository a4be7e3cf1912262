"""Continuous batching: chooses the requests and tokens of each step.

The clock is virtual: a step takes STEP_MS, and if nothing is left to run, the clock jumps to the next arrival.
So a run depends only on its options, not on the speed of the machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from .blocks import BLOCK_TOKENS, BLOCKS_PER_HASH, BlockPool
from .trace import HASH_TOKENS, TraceRequest

STEP_MS = 50.0
DECODE_THRESHOLD = 1  # longest query that counts as a decode


@dataclass(eq=False)
class Sequence:
    """A request that waits or runs.

    Attributes:
        index: the request's index in the trace
        blocks: cache blocks, in order of position
        computed: positions whose rows are in the cache
        shared: number of these positions whose rows another request computed
        waited: whether the request arrived while the cache had too few free blocks
        arrival_step, output_step: numbers of the first step that it could have run in, and of its first output's step
    """

    index: int
    request: TraceRequest
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    shared: int = 0
    waited: bool = False
    arrival_step: int = -1
    output_step: int = -1

    @property
    def is_prefilling(self) -> bool:
        return self.computed < self.request.input_length

    @property
    def is_finished(self) -> bool:
        return self.computed == self.request.total_length

    @cached_property
    def token_keys(self) -> np.ndarray:
        """[total_length] uint64, identity of each token: hash id and offset in the prompt, then request and position.

        Tokens with equal keys have equal rows.
        """
        positions = np.arange(self.request.total_length, dtype=np.uint64)
        hash_ids = np.array(self.request.hash_ids, np.uint64)
        keys = np.uint64(1 << 63) | np.uint64(self.index << 32) | positions
        prompt = positions[: self.request.input_length]
        keys[: len(prompt)] = hash_ids[prompt // HASH_TOKENS] * np.uint64(HASH_TOKENS) + prompt % HASH_TOKENS
        return keys

    def slots(self, rows: np.ndarray, rows_per_block: int = BLOCK_TOKENS) -> np.ndarray:
        """Slots [n] int64 of positions (or of compressed rows) in a cache with `rows_per_block` rows a block."""
        blocks = np.array(self.blocks, np.int64)
        return blocks[rows // rows_per_block] * rows_per_block + rows % rows_per_block


@dataclass(frozen=True)
class Scheduled:
    """`count` tokens of a sequence, from position `start` on."""

    sequence: Sequence
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count


class Scheduler:
    """Runs decodes first, one token each; then prompts, in order of arrival, with the rest of `batch_tokens`.

    A request starts only when all blocks that it will need are free, so that every started request can finish.
    Requests start in order of arrival, even small ones. `requests` are in order of arrival, each fits the pool alone.
    """

    def __init__(
        self, requests: SequenceOf[TraceRequest], pool: BlockPool, batch_tokens: int, max_running: int
    ) -> None:
        self.pool = pool
        self.batch_tokens = batch_tokens
        self.max_running = min(max_running, batch_tokens)  # so that every decode has its token
        self.clock_ms = requests[0].timestamp
        self.step = 0  # number of the next step
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.finished: list[Sequence] = []
        self.admitted_tokens, self.hit_tokens = 0, 0  # of the prompts of requests that began
        self._arrivals = deque(Sequence(index, request) for index, request in enumerate(requests))

    def next_step(self) -> list[Scheduled]:
        """The tokens of a step, decode-first; empty when every request has finished."""
        self._admit()
        if not self.running and self._arrivals:
            self.clock_ms = self._arrivals[0].request.timestamp
            self._admit()
        if not self.running and self.waiting:
            raise ValueError(f"request {self.waiting[0].index} is larger than the whole cache")
        left = self.batch_tokens - sum(not sequence.is_prefilling for sequence in self.running)
        step = []
        for sequence in self.running:
            count = 1
            if sequence.is_prefilling:
                count = min(sequence.request.input_length - sequence.computed, left)
                left -= count
            if count:
                step.append(Scheduled(sequence, sequence.computed, count))
        # Kernels treat the last token of a prompt as a decode.
        return sorted(step, key=lambda scheduled: scheduled.count > DECODE_THRESHOLD)

    def finish_step(self, step: SequenceOf[Scheduled]) -> None:
        """After the rows of these tokens are cached: share complete prefixes, free finished requests."""
        for scheduled in step:
            sequence = scheduled.sequence
            sequence.computed += scheduled.count
            if sequence.output_step < 0 and not sequence.is_prefilling:
                sequence.output_step = self.step
            self._publish(sequence, scheduled.start)
            if sequence.is_finished:
                self.pool.release(sequence.blocks)
                self.running.remove(sequence)
                self.finished.append(sequence)
        self.clock_ms += STEP_MS
        self.step += 1

    def _admit(self) -> None:
        while self._arrivals and self._arrivals[0].request.timestamp <= self.clock_ms:
            self.waiting.append(self._arrivals.popleft())
            self.waiting[-1].arrival_step = self.step
        while self.waiting and len(self.running) < self.max_running:
            sequence = self.waiting[0]
            request = sequence.request
            # At least one token of the prompt has to run: its output is the first generated token.
            shareable = request.hash_ids[: (request.input_length - 1) // HASH_TOKENS]
            shared = self.pool.find(list(enumerate(shareable)))
            num_blocks = -(-request.total_length // BLOCK_TOKENS)
            blocks = self.pool.acquire(shared, num_blocks - len(shared) * BLOCKS_PER_HASH)
            if blocks is None:
                break
            sequence.blocks = blocks
            sequence.computed = sequence.shared = len(shared) * HASH_TOKENS
            self.admitted_tokens += request.input_length
            self.hit_tokens += sequence.shared
            self.running.append(self.waiting.popleft())
        for sequence in self.waiting:
            sequence.waited = True

    def _publish(self, sequence: Sequence, start: int) -> None:
        """Share the prompt's 512-token blocks that were completed since position `start`."""
        complete = min(sequence.computed, sequence.request.input_length) // HASH_TOKENS
        for i in range(start // HASH_TOKENS, complete):
            blocks = sequence.blocks[i * BLOCKS_PER_HASH : (i + 1) * BLOCKS_PER_HASH]
            self.pool.publish((i, sequence.request.hash_ids[i]), blocks)

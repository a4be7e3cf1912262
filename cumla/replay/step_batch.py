"""Converts a step's tokens to the arrays that the metadata builders and the layers take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..metadata.batch import CommonAttentionMetadata
from .blocks import BLOCK_TOKENS
from .scheduler import DECODE_THRESHOLD, Scheduled

SWA_BLOCK = 64  # tokens of a page of a window cache
SWA_PAGES = BLOCK_TOKENS // SWA_BLOCK


@dataclass(frozen=True)
class StepBatch:
    """The tokens of a step, decode-first.

    Attributes:
        scheduled: the requests in batch order
        starts: host [num_reqs + 1] int32, first token of each request
        positions: host [num_tokens] int64
        token_keys: host [num_tokens] uint64
        num_decodes: requests (and tokens) that the kernels treat as decodes
        block_table: [num_reqs, B] int32 blocks of 256 positions, which are also the pages of the compressed caches
        common: the batch as metadata builders take it, over the pages of the window cache
    """

    scheduled: Sequence[Scheduled]
    starts: np.ndarray
    positions: np.ndarray
    token_keys: np.ndarray
    num_decodes: int
    block_table: Any
    common: CommonAttentionMetadata

    @property
    def num_tokens(self) -> int:
        return len(self.positions)

    def at(self, token: int) -> tuple[Scheduled, int]:
        """A token's request, and its position there."""
        scheduled = self.scheduled[int(np.searchsorted(self.starts, token, side="right")) - 1]
        return scheduled, int(self.positions[token])


def make_batch(scheduled: Sequence[Scheduled], xp: Any) -> StepBatch:
    counts = np.array([s.count for s in scheduled], np.int32)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    seq_lens = np.array([s.end for s in scheduled], np.int32)
    ranges = [np.arange(s.start, s.end) for s in scheduled]
    slots = np.concatenate([s.sequence.slots(positions) for s, positions in zip(scheduled, ranges, strict=True)])
    table = np.full((len(scheduled), max(len(s.sequence.blocks) for s in scheduled)), -1, np.int32)
    for row, s in zip(table, scheduled, strict=True):
        row[: len(s.sequence.blocks)] = s.sequence.blocks
    pages = table[:, :, None] * SWA_PAGES + np.arange(SWA_PAGES, dtype=np.int32)
    pages[table < 0] = -1
    common = CommonAttentionMetadata(
        query_start_loc=xp.asarray(starts),
        query_start_loc_cpu=starts,
        seq_lens=xp.asarray(seq_lens),
        seq_lens_cpu=seq_lens,
        num_computed_tokens_cpu=seq_lens - counts,
        num_reqs=len(scheduled),
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(counts.max()),
        block_table_tensor=xp.asarray(pages.reshape(len(table), -1)),
        slot_mapping=xp.asarray(slots),
    )
    return StepBatch(
        scheduled=scheduled,
        starts=starts,
        positions=np.concatenate(ranges),
        token_keys=np.concatenate([s.sequence.token_keys[s.start : s.end] for s in scheduled]),
        num_decodes=sum(s.count <= DECODE_THRESHOLD for s in scheduled),
        block_table=xp.asarray(table),
        common=common,
    )


@dataclass(frozen=True)
class Groups:
    """The compressed rows that a step completes, and the tokens whose mean each row is.

    Attributes:
        members: host [n, ratio] int64: indices into the step's tokens followed by `earlier_keys`
        earlier_keys: host [m] uint64, keys of tokens of earlier steps
        positions: host [n] int64, first position of each group
        slots: host [n] int64 in the compressed cache
    """

    members: np.ndarray
    earlier_keys: np.ndarray
    positions: np.ndarray
    slots: np.ndarray


def completed_groups(batch: StepBatch, ratio: int) -> Groups:
    members, earlier_keys, positions, slots = [], [], [], []
    num_earlier = 0
    for s, first_token in zip(batch.scheduled, batch.starts, strict=False):
        first, last = s.start // ratio, s.end // ratio
        if first == last:
            continue
        token = np.arange(first * ratio, last * ratio) - s.start
        before = max(0, -int(token[0]))
        # Indices of this step's tokens; earlier tokens are numbered after them.
        token[before:] += first_token
        token[:before] = batch.num_tokens + num_earlier + np.arange(before)
        num_earlier += before
        members.append(token.reshape(-1, ratio))
        earlier_keys.append(s.sequence.token_keys[s.start - before : s.start])
        positions.append(np.arange(first, last) * ratio)
        slots.append(s.sequence.slots(np.arange(first, last), BLOCK_TOKENS // ratio))
    if not members:
        none = np.empty(0, np.int64)
        return Groups(np.empty((0, ratio), np.int64), np.empty(0, np.uint64), none, none)
    return Groups(*(np.concatenate(parts) for parts in (members, earlier_keys, positions, slots)))

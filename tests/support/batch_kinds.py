"""Kinds of batches that engines form: idle ranks, padding to captured sizes, drafts, decodes and prefills.

KINDS   by name
BEHIND  batches that every builder refuses: a decode behind a prefill
"""

import dataclasses
from typing import NamedTuple

import numpy as np

CAPACITY = 4  # requests: max_num_seqs


class Kind(NamedTuple):
    """counts: query tokens of each request; padding: tokens after them; drafts: most drafts of a decode."""

    counts: tuple[int, ...]
    padding: int = 0
    drafts: int = 0

    @property
    def scheduled(self):
        """(request, first position, tokens), at odd and at even positions."""
        return [(r, 17 + 6 * r if count else 5, count) for r, count in enumerate(self.counts)]

    @property
    def spans(self):
        return [(r, first, count) for r, first, count in self.scheduled if count]


KINDS = {
    "nothing": Kind(()),
    "a request without tokens": Kind((0,)),
    "an idle rank": Kind((), 3),
    "an idle rank with drafts": Kind((), 6, 2),
    "an idle rank with requests": Kind((0, 0), 4, 1),
    "decodes": Kind((1, 1, 1)),
    "padded decodes": Kind((1, 1, 0), 2),
    "one draft": Kind((2, 2), 0, 1),
    "three drafts, padded": Kind((4, 4, 0), 4, 3),
    "padding beyond capacity": Kind((1, 1), 9),
    "one draft, padding beyond capacity": Kind((2, 2), 9, 1),
    "three drafts, padding beyond capacity": Kind((4, 4), 17, 3),
    "ragged, one draft": Kind((2, 1, 2), 1, 1),
    "ragged, three drafts": Kind((4, 1, 3), 0, 3),
    "ragged, three drafts, padding beyond capacity": Kind((4, 1, 3), 17, 3),
    "an empty query between decodes": Kind((2, 0, 2), 1, 1),
    "prefills": Kind((9, 6)),
    "padded prefills": Kind((9, 6, 0), 3, 1),
    "decodes and a prefill": Kind((1, 1, 9)),
    "drafts, a prefill, padding": Kind((2, 1, 9, 0), 3, 1),
    "drafts and prefills": Kind((3, 3, 5, 7), 0, 3),
}
BEHIND = {
    "a decode": Kind((9, 1)),
    "a decode with a draft": Kind((9, 2), 0, 1),
    "a decode between prefills": Kind((1, 9, 1, 8)),
    "a decode behind padding": Kind((2, 9, 0, 1), 2, 1),
}


def padded(batch, padding, put=np.asarray, get=np.asarray):
    """The batch with `count` padding tokens after the last request's tokens."""
    slots = np.append(get(batch.slot_mapping), np.full(padding, -1, np.int64))
    return dataclasses.replace(
        batch, num_actual_tokens=batch.num_actual_tokens + padding, slot_mapping=put(slots.astype(np.int64))
    )

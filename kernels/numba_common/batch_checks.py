"""What can be wrong with the numbers of a batch, found on the host in one pass."""

from __future__ import annotations

import numpy as np
from numba import njit

NOTHING, DECREASES, LONG_QUERY, SHORT_SEQUENCE, LONG_SEQUENCE, LATE_DECODE = range(6)


@njit(cache=True)
def first_fault(
    starts: np.ndarray, seq_lens: np.ndarray, max_query_len: int, max_seq_len: int, decode_threshold: int
) -> tuple[int, int]:
    """The first request that is wrong, and what is; (-1, NOTHING) if all are right.

    starts            [R + 1] first query token of each request
    seq_lens          [R] tokens of each request, its query included
    max_query_len     longest query
    max_seq_len       longest sequence
    decode_threshold  longest query of a decode; once there was a longer one, only empty ones may be as short
    """
    prefills = False
    for request in range(len(seq_lens)):
        query_len = np.int64(starts[request + 1]) - starts[request]
        if query_len < 0:
            return request, DECREASES
        if query_len > max_query_len:
            return request, LONG_QUERY
        if query_len > seq_lens[request]:
            return request, SHORT_SEQUENCE
        if seq_lens[request] > max_seq_len:
            return request, LONG_SEQUENCE
        if query_len > decode_threshold:
            prefills = True
        elif prefills and query_len > 0:
            return request, LATE_DECODE
    return -1, NOTHING

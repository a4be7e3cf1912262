"""Arguments for the index maps, as arrays by name."""

import numpy as np

from support.properties import INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, fuzzed

INT32_EXTREMES = np.array([INT32_MIN, INT32_MIN + 1, -1, 0, 1, 2**30, INT32_MAX - 1, INT32_MAX])


def batch(rng, requests, longest_query, longest_prefix, first_token=0):
    """query_start_loc, seq_lens and each token's request; some requests without tokens, some without a prefix."""
    query_lens = rng.integers(0, longest_query + 1, requests)
    starts = first_token + np.concatenate([[0], np.cumsum(query_lens)])
    seq_lens = query_lens + rng.integers(0, longest_prefix + 1, requests)
    token_to_req = np.repeat(np.arange(requests), query_lens)
    return starts.astype(np.int32), seq_lens.astype(np.int32), token_to_req.astype(np.int32)


def table_for(rng, requests, seq_lens, block_size, num_blocks, spare_columns=0):
    columns = max(-(-int(seq_lens.max(initial=0)) // block_size) + spare_columns, 0)
    return fuzzed(rng, (requests, columns), num_blocks)


def anything(rng, shape):
    """int32 of any value: extremes, small numbers and everything between."""
    values = rng.integers(INT32_MIN, INT32_MAX + 1, shape)
    small = rng.random(shape) < 0.4
    values[small] = rng.integers(-3, 40, small.sum())
    extreme = rng.random(shape) < 0.3
    values[extreme] = rng.choice(INT32_EXTREMES, extreme.sum())
    return values.astype(np.int32)


def anything_like(rng, array):
    """Integers of any value in place of an array's; numbers stay."""
    if array.dtype == np.int64:
        near = rng.random(array.shape) < 0.5
        return np.where(near, array, rng.integers(INT64_MIN, INT64_MAX, array.shape))
    if array.dtype == np.int32:
        return np.where(rng.random(array.shape) < 0.3, array, anything(rng, array.shape))
    return array

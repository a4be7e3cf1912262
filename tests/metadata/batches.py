"""Batches as a scheduler forms them, and their expected metadata, computed token by token."""

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from cumla.metadata.batch import CommonAttentionMetadata

BLOCK = 8
THOROUGH = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


def make_batch(lab, seq_lens, query_lens, *, block_size=BLOCK, padding=0, skipped=(), columns=None, **changes):
    """Requests of these lengths over randomly placed blocks.

    Args:
        padding: entries of slot_mapping after the last token
        skipped: tokens whose slot is -1
    """
    query_lens = np.array(query_lens, np.int32)
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    lens = np.array(seq_lens, np.int32)
    columns = columns or max(-(-int(lens.max(initial=0)) // block_size), 1)
    table = np.random.default_rng(columns).permutation(len(lens) * columns).reshape(-1, columns).astype(np.int32)
    tokens = int(starts[-1])
    slots = np.full(tokens + padding, -1, np.int64)
    for token, (request, position) in enumerate(tokens_of(seq_lens, query_lens)):
        slots[token] = table[request, position // block_size] * block_size + position % block_size
    slots[list(skipped)] = -1
    fields = {
        "query_start_loc": lab.put(starts),
        "query_start_loc_cpu": starts,
        "seq_lens": lab.put(lens),
        "seq_lens_cpu": lens,
        "num_computed_tokens_cpu": lens - query_lens,
        "num_reqs": len(lens),
        "num_actual_tokens": tokens,
        "max_query_len": int(query_lens.max(initial=0)),
        "block_table_tensor": lab.put(table),
        "slot_mapping": lab.put(slots),
    }
    return CommonAttentionMetadata(**(fields | changes))


def tokens_of(seq_lens, query_lens):
    """(request, position) of each query token."""
    lens = zip(seq_lens, query_lens, strict=True)
    return [(r, p) for r, (s, q) in enumerate(lens) for p in range(s - q, s)]


def compressed_slot(table, request, position, block_size, ratio):
    """Slot of the row that a position completes, or -1."""
    page, offset = divmod(position // ratio, block_size)
    return table[request, page] * block_size + offset if (position + 1) % ratio == 0 else -1


@st.composite
def shapes(draw, threshold, max_decodes=6, max_prefills=3, uniform=False, longest_context=70, longest_prefill=24):
    """(seq_lens, query_lens) of a decode-first batch: decodes, prefills, both or none, with padding requests."""
    contexts = st.integers(0, longest_context)
    decode = st.integers(0, threshold)
    if uniform:
        decode = st.sampled_from([0, draw(st.integers(1, threshold))])
    decodes = draw(st.lists(decode, max_size=max_decodes))
    prefills = draw(st.lists(st.integers(threshold + 1, longest_prefill), max_size=max_prefills))
    query_lens = decodes + prefills + [0] * draw(st.integers(0, 2))
    seq_lens = [q + draw(contexts) if q or draw(st.booleans()) else 0 for q in query_lens]
    return seq_lens, query_lens


def buffers_of(lab, builder):
    """Copies of all of a builder's buffers."""
    return {name: np.array(lab.get(buffer)) for name, buffer in builder._buffers._asdict().items()}


def addresses_of(builder):
    arrays = builder._buffers
    return [array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr for array in arrays]


def assert_equal(lab, got, want, name=""):
    got = np.asarray(lab.get(got))
    np.testing.assert_array_equal(got, np.asarray(want).reshape(got.shape), err_msg=name)

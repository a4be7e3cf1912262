"""The metadata kernel of every backend against the reference, called as its builder calls it."""

import numpy as np
import pytest
from hypothesis import strategies as st

from cumla.dispatch.backends import kernels
from cumla.kernels.types.metadata import BatchCounts, SwaBuffers, WindowStep
from support.guarded import Guarded
from support.indexing import batch, table_for
from support.lab import Lab
from support.properties import for_all, seeds

pytestmark = pytest.mark.filterwarnings("error")

REFERENCE = Lab("reference", on_device=False)


def test_build_sparse_swa(lab):
    @for_all(
        lab,
        tiny_examples=8,
        requests=st.integers(1, 5),
        longest_query=st.integers(0, 4),
        longest_prefix=st.sampled_from((0, 5, 300)),
        block_size=st.sampled_from((1, 4, 64)),
        window=st.sampled_from((1, 4, 7)),
        width=st.sampled_from((0, 3)),
        padding=st.integers(0, 3),
        before=st.integers(0, 3),
        slot_dtype=st.sampled_from((np.int64, np.int32)),
        seed=seeds,
    )
    def check(
        requests, longest_query, longest_prefix, block_size, window, width, padding, before, slot_dtype, seed
    ):  # fmt: skip
        rng = np.random.default_rng(seed)
        starts, seq_lens, token_to_req = batch(rng, requests, longest_query, longest_prefix)
        tokens = len(token_to_req)
        rows, capacity = tokens + padding, tokens + padding + before
        slots = rng.integers(-1, 3, rows).astype(slot_dtype)
        decodes = int(rng.integers(requests + 1))
        counts = BatchCounts(requests, decodes, int(starts[decodes]), tokens, rows, capacity, width + 1 if width else 0)
        table = table_for(rng, requests, seq_lens, block_size, 9, 1)
        shapes = {
            "token_to_req_indices": (capacity,), "is_valid_token": (capacity,), "positions": (capacity,),
            "swa_indices": (capacity, window), "swa_lens": (capacity,), "prefill_gather_lens": (requests + 1,),
            "c128a_indices": (capacity if width else 0, width + 2 if width else 0), "c128a_lens": (capacity,),
        }  # fmt: skip
        results = []
        for place in (lab, REFERENCE):
            buffers = {
                name: Guarded(place, np.full(shape, 1, np.bool_ if name == "is_valid_token" else np.int32))
                for name, shape in shapes.items()
            }
            on_place = place.put(table)
            kernels(place.backend, "window_metadata").build_sparse_swa(WindowStep(
                place.put(starts), place.put(seq_lens), place.put(slots), on_place, on_place if width else None, counts,
                block_size, window, 2, width, SwaBuffers(**{name: x.array for name, x in buffers.items()}),
            ))  # fmt: skip
            results.append({name: x.everything() for name, x in buffers.items()})
        for name in shapes:
            np.testing.assert_array_equal(results[0][name], results[1][name], err_msg=name)

"""A dense layer's decodes in a captured graph that is replayed with fewer requests than it was captured with."""

import numpy as np
import pytest

from cumla.layers.dense import MLACommonImpl
from cumla.metadata import MLACommonMetadata
from support.graphs import graph_of
from support.indexing import anything
from support.lab import BF16
from support.operations import assert_same_bits
from support.properties import INT64_MAX, INT64_MIN

ROWS, HEADS, BLOCK, COLUMNS = 5, 8, 16, 4
PAGES = ROWS * COLUMNS


def rows_of(rng):
    """A step: a token of each request at its end."""
    lens = rng.integers(1, BLOCK * COLUMNS + 1, ROWS).astype(np.int32)
    table = rng.permutation(PAGES).astype(np.int32).reshape(ROWS, COLUMNS)
    slots = table[np.arange(ROWS), (lens - 1) // BLOCK].astype(np.int64) * BLOCK + (lens - 1) % BLOCK
    shapes = {"q": (HEADS, 192), "kv_c": (512,), "k_pe": (64,)}
    values = {name: rng.standard_normal((ROWS, *shape)).astype(BF16) for name, shape in shapes.items()}
    return {"lens": lens, "table": table, "slots": slots, **values}


def garbage_behind(rng, rows, real):
    """NaN and infinities, lengths and pages of any value, slots outside of the cache."""
    rows = {name: x.copy() for name, x in rows.items()}
    rest = ROWS - real
    rows["lens"][real:], rows["table"][real:] = anything(rng, rest), anything(rng, (rest, COLUMNS))
    rows["slots"][real:] = rng.choice(np.array([-1, INT64_MIN, INT64_MAX, PAGES * BLOCK, 2**31]), rest)
    for name in ("q", "kv_c", "k_pe"):
        rows[name][real:] = rng.choice([np.nan, np.inf, -np.inf, 3e38], rows[name][real:].shape).astype(BF16)
    return rows


class CapturedDecodes:
    """A step of a dense layer in a graph; rows, cache and output have fixed addresses."""

    def __init__(self, lab, rng, rows):
        self.lab, put = lab, lab.put
        weight = (rng.standard_normal((HEADS * 256, 512)) * 512**-0.5).astype(BF16)
        self.layer = layer = MLACommonImpl(
            HEADS, 576, 192**-0.5, kv_b_proj=put(weight)
        )  # kept: the graph has its memory
        layer.process_weights_after_loading()
        self.before = rng.standard_normal((PAGES, BLOCK, 576)).astype(BF16)
        self.arrays = {name: put(x) for name, x in rows.items()}
        self.cache, self.output = put(self.before), put(np.zeros((ROWS, HEADS * 128), BF16))
        metadata = MLACommonMetadata(
            num_prefills=0, num_prefill_tokens=0, num_decodes=ROWS, num_decode_tokens=ROWS,
            slot_mapping=self.arrays["slots"], seq_lens=None, seq_lens_tensor=self.arrays["lens"],
            max_prefill_seq_len=0, max_decode_seq_len=BLOCK * COLUMNS, context_lens_tensor=None,
            block_tables=self.arrays["table"], max_query_len=1, max_decode_query_len=1,
        )  # fmt: skip

        def step():
            q, kv_c, k_pe = (self.arrays[name] for name in ("q", "kv_c", "k_pe"))
            layer.forward(q, kv_c, k_pe, self.cache, metadata, self.output)

        step()
        self.graph = graph_of(step)

    def replay(self, rows):
        """Output and cache after a step of these rows, from the same initial cache every time."""
        import cupy

        for name, x in rows.items():
            self.arrays[name][...] = self.lab.put(x)
        self.cache[...] = self.lab.put(self.before)
        cupy.cuda.Device().synchronize()
        self.graph.launch(cupy.cuda.get_current_stream())
        cupy.cuda.Device().synchronize()
        return self.lab.get(self.output), self.lab.get(self.cache)


@pytest.mark.filterwarnings("ignore:invalid value")  # because products are emulated
def test_rows_after_the_requests_may_hold_anything(device, rng):
    rows = rows_of(rng)
    decodes = CapturedDecodes(device, rng, rows)
    whole, _ = decodes.replay(rows)
    assert np.isfinite(whole.astype(np.float32)).all()
    for real in (1, 3, 0, 4):
        kept = decodes.before.copy()
        _, alone = decodes.replay({**rows, "slots": np.where(np.arange(ROWS) < real, rows["slots"], -1)})
        changed = (alone != kept).any(axis=2).sum()
        assert changed == real  # rows of the cache
        out, cache = decodes.replay(garbage_behind(rng, rows, real))
        assert_same_bits(out[:real], whole[:real])
        assert_same_bits(cache, alone)


def test_lengths_of_nothing(device, rng):
    rows = rows_of(rng)
    decodes = CapturedDecodes(device, rng, rows)
    out, cache = decodes.replay({**rows, "lens": np.zeros(ROWS, np.int32), "slots": np.full(ROWS, -1)})
    assert not out.astype(np.float32).any()
    assert_same_bits(cache, decodes.before)

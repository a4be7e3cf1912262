"""No value in a length, a range or a table makes the indexer leave its arrays, or its choice their range."""

import numpy as np
import pytest
from hypothesis import strategies as st

import cumla
from support.guarded import Guarded
from support.indexing import anything
from support.properties import for_all, seeds

pytestmark = pytest.mark.filterwarnings("error")


def queries(rng, *shape):
    return rng.integers(0, 256, shape, np.uint8), rng.standard_normal((*shape[:-2], shape[-2]), np.float32)


@pytest.mark.nowhere(when=lambda x: x.simulated and x.get("heads") == 64)  # one there
@pytest.mark.parametrize("heads", [64, 3])
def test_ranges(lab, heads):
    @for_all(
        lab,
        examples=6 if heads == 3 else 2,
        tiny_examples=2,
        keys=st.integers(1, 70),
        width=st.sampled_from((0, 1, 9)),
        seed=seeds,
    )
    def check(keys, width, seed):
        rng = np.random.default_rng(seed)
        keys = min(keys, 8) if lab.tiny else keys
        q, weights = queries(rng, 3, 1 if lab.tiny else heads, 128)
        kv = Guarded(lab, queries(rng, keys, 128)[0]), Guarded(lab, rng.standard_normal(keys, np.float32))
        ranges = [lab.put(anything(rng, 3)) for _ in range(2)]
        out = Guarded(lab, np.zeros((3, width or keys), np.float32), (0, 4))
        arguments = lab.put(q), tuple(x.array for x in kv), lab.put(weights)
        cumla.fp8_mqa_logits(*arguments, *ranges, True, width, out=out.array, backend=lab.backend)
        out.assert_margins()
        chosen = Guarded(lab, np.full((3, 4), -9, np.int32), (0, 4))
        cumla.indexer_topk(
            *arguments, 4, cu_seqlen_ks=ranges[0], cu_seqlen_ke=ranges[1], max_seqlen_k=width, out=chosen.array,
            backend=lab.backend,
        )  # fmt: skip
        chosen.assert_margins()
        assert ((chosen.get() >= -1) & (chosen.get() < (width or keys))).all()


@pytest.mark.nowhere(when=lambda x: x.simulated and x.get("heads") == 64)  # one there
@pytest.mark.parametrize("heads", [64, 3])
def test_pages(lab, heads):
    @for_all(
        lab, examples=6 if heads == 3 else 2, tiny_examples=2, next_n=st.integers(1, 4),
        block_size=st.sampled_from((1, 5, 16, 64)), columns=st.integers(0, 3), axes=st.integers(1, 2), seed=seeds,
    )  # fmt: skip
    def check(next_n, block_size, columns, axes, seed):
        rng = np.random.default_rng(seed)
        block_size = min(block_size, 2) if lab.tiny else block_size
        q, weights = queries(rng, 2, next_n, 1 if lab.tiny else heads, 128)
        cache = Guarded(lab, rng.integers(0, 256, (3, block_size, 132), np.uint8))
        lens, table = lab.put(anything(rng, (2, next_n)[:axes])), lab.put(anything(rng, (2, columns)))
        width = columns * block_size + 3
        arguments = lab.put(q), cache.array, lab.put(weights.reshape(2 * next_n, -1))
        out = Guarded(lab, np.zeros((2 * next_n, width), np.float32), (0, 4))
        cumla.fp8_paged_mqa_logits(*arguments, lens, table, None, width, True, out=out.array, backend=lab.backend)
        out.assert_margins()
        assert np.isneginf(out.get()[:, columns * block_size :]).all()
        written = [Guarded(lab, np.full((2 * next_n, *shape), -9, np.int32)) for shape in ((5,), (5,), ())]
        chosen, slots, slot_lens = written
        cumla.indexer_topk(
            *arguments, 5, context_lens=lens, block_table=table, max_context_len=width, out=chosen.array,
            slots=(slots.array, slot_lens.array), backend=lab.backend,
        )  # fmt: skip
        for array in written:
            array.assert_margins()
        assert ((chosen.get() >= -1) & (chosen.get() < width)).all()
        assert (slots.get() >= -1).all()
        assert (slot_lens.get() == (slots.get() >= 0).sum(axis=1)).all()
        schedule = Guarded(lab, np.zeros((5, 2), np.int32))
        cumla.get_paged_mqa_logits_metadata(lens, block_size, 4, out=schedule.array, backend=lab.backend)
        schedule.assert_margins()


def test_choice(lab):
    @for_all(
        lab, examples=6, tiny_examples=2, width=st.integers(0, 70), topk=st.sampled_from((0, 1, 6, 80)), seed=seeds
    )
    def check(width, topk, seed):
        width = min(width, 12) if lab.tiny else width
        rng = np.random.default_rng(seed)
        logits = Guarded(lab, rng.integers(0, 2**32, (3, width), np.uint32).view(np.float32), (0, 4), 4)
        out = Guarded(lab, np.full((3, topk), -9, np.int32), (0, 4))
        ranges = [lab.put(anything(rng, 3)) for _ in range(2)]
        cumla.top_k_per_row(logits.array, topk, *ranges, out=out.array, backend=lab.backend)
        out.assert_margins()
        found = out.get()
        assert ((found >= -1) & (found < width)).all()
        kept = np.where(found < 0, width, found)
        assert (np.diff(kept) >= 0).all()
        assert not (np.diff(kept) == 0)[kept[:, 1:] < width].any()

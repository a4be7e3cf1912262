"""No index or length makes attention leave its arrays."""

import numpy as np
import pytest
from hypothesis import strategies as st

import cumla
from support.attention import make_cache
from support.bounds import assert_decode, assert_prefill, largest_values
from support.caches import GuardedCache
from support.guarded import Guarded
from support.indexing import anything
from support.lab import BF16, Lab, to_float
from support.properties import for_all, seeds

pytestmark = [pytest.mark.attention, pytest.mark.filterwarnings("error")]

REFERENCE = Lab("reference", on_device=False)


@pytest.mark.parametrize("layout", [cumla.DSV4_FP8, cumla.V32_FP8, cumla.MLA_BF16, cumla.DSV4_BF16])
def test_any_index_and_length(lab, layout):
    """Indices and lengths of any value, over caches with any valid row bytes, between guards."""

    @for_all(
        lab,
        examples=12,
        blocks=st.integers(1, 3),
        block_size=st.sampled_from((1, 2, 53)),
        gap=st.sampled_from((0, 16, 576)),
        heads=st.sampled_from((1, 5, 64)),
        topk=st.sampled_from((0, 1, 70)),
        lengths=st.sampled_from((None, "b", "b s_q")),
        extra=st.booleans(),
        seed=seeds,
    )
    def check(blocks, block_size, gap, heads, topk, lengths, extra, seed):
        rng = np.random.default_rng(seed)
        content = np.lib.stride_tricks.as_strided(
            make_cache(rng, layout, blocks, block_size, spread=0), (blocks, block_size * layout.token_bytes),
            (layout.page_bytes(block_size), 1),
        )  # fmt: skip
        q = rng.standard_normal((2, 3, heads, layout.head_dim)).astype(BF16)
        indices, extra_indices = anything(rng, (2, 3, topk)), anything(rng, (2, 3, 9))
        sizes = {None: None, "b": (2,), "b s_q": (2, 3)}[lengths]
        lens = None if sizes is None else anything(rng, sizes)
        results = []
        for place in (lab, REFERENCE):
            cache = GuardedCache(place, layout, blocks, block_size, content, gap)
            out = Guarded(place, np.ones((2, 3, heads, 512), BF16), (0, 64))
            lse = Guarded(place, np.ones((2, heads, 3), np.float32), (8,))
            options = {"extra_k_cache": cache.array, "extra_indices": place.put(extra_indices)} if extra else {}
            if extra:
                options["extra_block_size"] = block_size
            cumla.sparse_mla_decode(
                place.put(q), cache.array, place.put(indices), layout=layout, block_size=block_size,
                topk_length=place.put(lens), **options, out=out.array, lse=lse.array, backend=place.backend,
            )  # fmt: skip
            out.assert_margins()
            lse.assert_margins()
            results.append((out.get(), lse.get()))
        (out, lse), (want_out, want_lse) = results
        assert_decode(to_float(out), lse, to_float(want_out), want_lse)


@pytest.mark.parametrize("head_dim", [512, 576])
def test_any_row_and_length(lab, head_dim):
    @for_all(
        lab, examples=12, rows=st.sampled_from((0, 1, 40)), heads=st.sampled_from((1, 5, 64)),
        topk=st.sampled_from((0, 1, 70, 128)), lengths=st.booleans(), seed=seeds,
    )  # fmt: skip
    def check(rows, heads, topk, lengths, seed):
        rng = np.random.default_rng(seed)
        q = rng.standard_normal((5, heads, head_dim)).astype(BF16)
        kv = rng.standard_normal((rows, head_dim)).astype(BF16)
        indices, lens = anything(rng, (5, topk)), anything(rng, 5) if lengths else None
        results = []
        for place in (lab, REFERENCE):
            outputs = [
                Guarded(place, np.ones((5, heads, 512), BF16), (0, 64)),
                *(Guarded(place, np.ones((5, heads), np.float32), (8,)) for _ in range(2)),
            ]
            cumla.sparse_mla_prefill(
                place.put(q), Guarded(place, kv, (16,)).array, place.put(indices), topk_length=place.put(lens),
                out=tuple(x.array for x in outputs), backend=place.backend,
            )  # fmt: skip
            for output in outputs:
                output.assert_margins()
            results.append([to_float(x.get()) for x in outputs])
        largest = largest_values(to_float(kv), indices) if lab.backend == "cuda" and rows and topk else 1.0
        assert_prefill(*results[0], *results[1], largest=largest)

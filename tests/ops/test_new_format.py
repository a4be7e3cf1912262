"""A cache format that no kernel knows: declared once, it is inserted, gathered and attended to on every backend."""

import numpy as np
import pytest

import cumla
from cumla.layout import LAYOUTS
from support.attention import Problem, make_cache, make_indices, make_q
from support.caches import pair_of_caches
from support.lab import BF16, Lab

REFERENCE = Lab("reference", on_device=False)
NEW = cumla.CacheLayout(
    "NEW_FP8", head_dim=544, rope_dim=32, value_type="e4m3", row_bytes=576, scale_type="float32", scale_tile=128,
    scale_bytes=16, scale_placement="page_tail", page_alignment=64, min_exponent=-20, min_scale=2.0**-100,
)  # fmt: skip


@pytest.fixture(autouse=True)
def declared(monkeypatch):
    """The format is in LAYOUTS, from which the CUDA sources' header is made."""
    from cumla.kernels.cuda import compile as compiler

    monkeypatch.setitem(LAYOUTS, NEW.name, NEW)
    compiler.source.cache_clear()
    yield
    compiler.source.cache_clear()


@pytest.mark.parametrize("powers_of_two", [True, False])
def test_insert(lab, rng, powers_of_two):
    k = rng.standard_normal((3 if lab.tiny else 9, 544)).astype(BF16)
    slots, written = rng.permutation(14)[: len(k)], []
    caches = pair_of_caches(lab, REFERENCE, rng, NEW, 2, 7, gap=16)
    for place, cache in zip((lab, REFERENCE), caches, strict=True):
        cumla.quantize_and_insert_k_cache(
            place.put(k), cache.array, place.put(slots), is_ue8m0=powers_of_two, layout=NEW, backend=place.backend
        )
        written.append(cache.everything())
    np.testing.assert_array_equal(*written)


def test_gather(lab, rng):
    cache = make_cache(rng, NEW, 3, 5)
    found = []
    for place in (lab, REFERENCE):
        out = place.put(np.zeros((1, 11, 544), BF16))
        table, lens = place.put(np.array([[2, 0, 1]], np.int32)), place.put(np.array([11], np.int32))
        cumla.dequantize_and_gather_k_cache(out, place.put(cache), lens, None, table, layout=NEW, backend=place.backend)
        found.append(place.get(out))
    np.testing.assert_array_equal(found[0].view(np.uint16), found[1].view(np.uint16))


@pytest.mark.parametrize("lists", [1, 2])
def test_sparse_decode(lab, rng, lists):
    tokens, topk = (1, 9) if lab.tiny else (2, 70)
    more = {}
    if lists == 2:
        more = {"extra_k_cache": make_cache(rng, NEW, 2, 3), "extra_indices": make_indices(rng, tokens, 2, 5, 6)}
    Problem(
        make_q(rng, tokens, 2, 3, NEW), make_cache(rng, NEW, 4, 7), make_indices(rng, tokens, 2, topk, 28), layout=NEW,
        attn_sink=np.array([-np.inf, 0, 1], np.float32), **more,
    ).check(lab)  # fmt: skip

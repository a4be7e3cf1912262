"""Cache formats that no kernel knows: registered, they are inserted, gathered and attended to on every backend."""

import dataclasses
import threading

import numpy as np
import pytest

import cumla
from cumla.layout import LAYOUTS, CacheLayout, _layouts, layouts_of
from support.attention import Problem, make_cache, make_indices, make_q
from support.caches import pair_of_caches
from support.lab import BF16, Lab

REFERENCE = Lab("reference", on_device=False)
TAIL = {"scale_placement": "page_tail", "page_alignment": 64}
NEW = CacheLayout(
    "NEW_FP8", head_dim=544, rope_dim=32, value_type="e4m3", row_bytes=576, scale_type="float32", scale_tile=128,
    scale_bytes=16, min_exponent=-20, min_scale=2.0**-100, **TAIL,
)  # fmt: skip
FORMATS = [
    NEW,
    CacheLayout("NEW_FP8_64", 512, 64, "e4m3", 576, "float32", 64, 28, min_exponent=-22, **TAIL),
    CacheLayout("NEW_FP8_ROPE", 512, 128, "e4m3", 640, "ue8m0", 64, 8, min_exponent=-9, **TAIL),
    CacheLayout("NEW_FP8_16", 512, 0, "e4m3", 544, "ue8m0", 16, 32, min_exponent=-30),
    CacheLayout("NEW_FP8_32", 576, 0, "e4m3", 576, "ue8m0", 32, 20, min_exponent=-22, **TAIL),
    CacheLayout("NEW_FP4", 576, 0, "e2m1", 288, "ue8m0", 32, 20, min_exponent=-126, **TAIL),
    CacheLayout("NEW_FP4_E4M3", 576, 0, "e2m1", 288, "e4m3", 32, 20, min_scale=2.0**-9, **TAIL),
    CacheLayout("NEW_BF16", 528, 0, "bfloat16", 1056),
]
QUICK = ("NEW_FP8", "NEW_FP4_E4M3")  # one for each kind of scales


@pytest.fixture(autouse=True, scope="module")
def registered():
    """Formats of this file's tests alone: errors of other files' tests name all formats."""
    before = dict(LAYOUTS)
    for layout in FORMATS:
        assert cumla.register_layout(layout) is layout
    yield
    for name in set(LAYOUTS) - set(before):
        del _layouts[name]


def formats(quantized=False):
    """Parametrises a test by format; in simulator and emulator most formats are slow tests."""
    some = [layout for layout in FORMATS if layout.num_scales or not quantized]

    def mark(test):
        rare = pytest.mark.thorough(when=lambda x: (x.simulated or x.emulated) and x.get("layout").name not in QUICK)
        return rare(pytest.mark.parametrize("layout", some, ids=lambda layout: layout.name)(test))

    return mark


@formats(quantized=True)
def test_insert(lab, rng, layout):
    k = rng.standard_normal((3 if lab.tiny else 9, layout.head_dim)).astype(BF16)
    k[1, 5], k[2, 7] = np.nan, np.inf
    for powers_of_two in (True, False) if layout.min_scale else (True,):
        slots, written = rng.permutation(14)[: len(k)], []
        caches = pair_of_caches(lab, REFERENCE, rng, layout, 2, 7, gap=16)
        for place, cache in zip((lab, REFERENCE), caches, strict=True):
            cumla.quantize_and_insert_k_cache(
                place.put(k), cache.array, place.put(slots), is_ue8m0=powers_of_two, layout=layout,
                backend=place.backend,
            )  # fmt: skip
            written.append(cache.everything())
        np.testing.assert_array_equal(*written)


@formats()
def test_gather(lab, rng, layout):
    cache = make_cache(rng, layout, 3, 5)
    found = []
    for place in (lab, REFERENCE):
        out = place.put(np.zeros((1, 11, layout.head_dim), BF16))
        table, lens = place.put(np.array([[2, 0, 1]], np.int32)), place.put(np.array([11], np.int32))
        cumla.dequantize_and_gather_k_cache(
            out, place.put(cache), lens, None, table, layout=layout.name, backend=place.backend
        )
        found.append(place.get(out))
    np.testing.assert_array_equal(found[0].view(np.uint16), found[1].view(np.uint16))


@pytest.mark.parametrize("lists", [1, 2])
@formats()
def test_sparse_decode(lab, rng, layout, lists):
    tokens, topk = (1, 9) if lab.tiny else (2, 70)
    more = {}
    if lists == 2:
        more = {"extra_k_cache": make_cache(rng, layout, 2, 3), "extra_indices": make_indices(rng, tokens, 2, 5, 6)}
    Problem(
        make_q(rng, tokens, 2, 3, layout), make_cache(rng, layout, 4, 7), make_indices(rng, tokens, 2, topk, 28),
        layout=layout, attn_sink=np.array([-np.inf, 0, 1], np.float32), **more,
    ).check(lab)  # fmt: skip


def test_a_registered_format_is_never_inferred():
    """Calls without `layout` must not change: a registered format may have the bytes per token of a built-in one."""
    other = cumla.register_layout(dataclasses.replace(cumla.DSV4_FP8, name="NEW_V4", min_exponent=-3))
    assert layouts_of(other.token_bytes) == [cumla.DSV4_FP8]
    k = np.full((1, 512), 1e-3, np.float32).astype(BF16)
    caches = [cumla.DSV4_FP8.allocate(1, 1) for _ in range(3)]
    for cache, layout in zip(caches, (None, "DSV4_FP8", "NEW_V4"), strict=True):
        cumla.quantize_and_insert_k_cache(k, cache, np.zeros(1, np.int64), layout=layout, backend="reference")
    np.testing.assert_array_equal(caches[0], caches[1])
    assert (caches[2] != caches[0]).any()
    with pytest.raises(ValueError, match="which does not identify the format"):
        cumla.quantize_and_insert_k_cache(k, np.zeros((1, 1, NEW.token_bytes), np.uint8), np.zeros(1, np.int64))


def test_a_name_has_one_format():
    """Kernels are compiled by names."""
    assert cumla.register_layout(dataclasses.replace(NEW)) is NEW
    for layout in (dataclasses.replace(NEW, min_exponent=0), dataclasses.replace(NEW, name="V32_FP8")):
        with pytest.raises(ValueError, match=f"name: got {layout.name}, which another format has"):
            cumla.register_layout(layout)
    assert LAYOUTS["NEW_FP8"] is NEW
    with pytest.raises(TypeError, match="does not support item assignment"):
        LAYOUTS["OTHER"] = NEW
    with pytest.raises(TypeError, match="layout: got str, expected a CacheLayout"):
        cumla.register_layout("NEW_FP8")


def test_threads_that_register_one_name_agree():
    layouts = [dataclasses.replace(NEW, name="NEW_OF_THREADS", min_exponent=-i) for i in range(8)]
    refused, barrier = [], threading.Barrier(len(layouts))

    def register(layout):
        barrier.wait()
        try:
            cumla.register_layout(layout)
        except ValueError:
            refused.append(layout)

    threads = [threading.Thread(target=register, args=(layout,)) for layout in layouts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == len(layouts) - 1
    assert LAYOUTS["NEW_OF_THREADS"] not in refused


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (dataclasses.replace(NEW, name="new fp8"), "name: got 'new fp8', expected a letter"),
        (CacheLayout("X", 512, 0, "float16", 1024), "value_type: got float16 without scales"),
        (CacheLayout("X", 512, 0, "e4m3", 512), "value_type: got e4m3 without scales"),
        (CacheLayout("X", 516, 0, "bfloat16", 1032), "head_dim: got 516, expected a multiple of 8"),
        (CacheLayout("X", 544, 0, "e4m3", 544, "ue8m0", 32, 20, **TAIL), "head_dim: got 544, expected a mult"),
        (CacheLayout("X", 128, 0, "bfloat16", 256), "head_dim: got 128, expected at least 136"),
        (CacheLayout("X", 516, 4, "e4m3", 520, "ue8m0", 64, 8, **TAIL), "head_dim: got 516, expected a multiple of 8"),
        (CacheLayout("X", 512, 0, "e4m3", 512, "ue8m0", 128, 4, **TAIL), "scale_tile: got 128, expected 16 or"),
        (CacheLayout("X", 512, 0, "e2m1", 256, "ue8m0", 64, 8, **TAIL), "scale_tile: got 64, expected 16 or 32"),
        (CacheLayout("X", 512, 64, "e4m3", 576, "ue8m0", 32, 16, **TAIL), "rope_dim: got 64, expected 0 with"),
        (CacheLayout("X", 1024, 0, "e4m3", 1024, "ue8m0", 16, 64, **TAIL), "scale_tile: got 64 scales of 16 values"),
        (CacheLayout("X", 512, 64, "e4m3", 576, "ue8m0", 64, 16, **TAIL), "scale_bytes: got 16, expected 8"),
        (CacheLayout("X", 512, 64, "e4m3", 604, "float32", 64, 28), "row_bytes: got 604, expected a multiple of 16"),
        (CacheLayout("X", 520, 136, "e4m3", 664, "ue8m0", 64, 8), "row_bytes: got 664, expected a multiple of 16"),
        (CacheLayout("X", 520, 72, "e4m3", 624, "float32", 64, 32), "scale_bytes: got 32, expected 28"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_formats_that_kernels_do_not_take(layout, message):
    with pytest.raises(ValueError, match=message):
        cumla.register_layout(layout)
    assert layout.name not in LAYOUTS


def test_scales_without_a_least_one_are_powers_of_two():
    """Zeros would be divided by 0."""
    layout = LAYOUTS["NEW_FP8_64"]
    k, cache = np.zeros((1, 512), BF16), layout.allocate(1, 1)
    cumla.quantize_and_insert_k_cache(k, cache, np.zeros(1, np.int64), layout=layout, backend="cpu")
    with pytest.raises(ValueError, match="is_ue8m0: got False, but NEW_FP8_64 has no min_scale"):
        cumla.quantize_and_insert_k_cache(k, cache, np.zeros(1, np.int64), is_ue8m0=False, layout=layout)

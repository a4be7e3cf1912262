"""No slot, block number, length or start makes a cache operation leave its arrays; and very large caches.

Reads outside are detected only where arrays are checked: in Numba's simulator, and in interpreted code
(tests/kernels/test_bounds.py).
"""

import numpy as np
import pytest
from hypothesis import strategies as st

import cumla
from support.caches import QUANTIZED_LAYOUTS, GuardedCache
from support.guarded import Guarded
from support.indexing import anything
from support.lab import BF16, to_float
from support.properties import INT64_MAX, INT64_MIN, for_all, seeds

pytestmark = pytest.mark.filterwarnings("error")

sizes = {"block_size": st.sampled_from((1, 2, 53)), "num_blocks": st.integers(1, 3), "seed": seeds}


def any_slots(rng, count, num_slots):
    slots = rng.integers(INT64_MIN, INT64_MAX, count)
    near = rng.random(count) < 0.6
    slots[near] = rng.choice([-1, -2, 0, num_slots - 1, num_slots, 2**31, -(2**31), INT64_MAX, INT64_MIN], near.sum())
    return slots


def guarded_cache(lab, rng, layout, num_blocks, block_size):
    content = rng.integers(0, 256, (num_blocks, block_size * layout.token_bytes), np.uint8)
    return GuardedCache(lab, layout, num_blocks, block_size, content, gap=3)


@pytest.mark.parametrize("layout", QUANTIZED_LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.thorough(when=lambda x: x.emulated and x.get("layout").name in ("DSV41_FP8_SPLIT", "DSV41_FP4"))
def test_insert(lab, layout):
    @for_all(lab, tokens=st.integers(0, 3 if lab.tiny else 20), **sizes)
    def check(tokens, block_size, num_blocks, seed):
        rng = np.random.default_rng(seed)
        cache = guarded_cache(lab, rng, layout, num_blocks, block_size)
        before = cache.memory.everything()
        k = lab.put(rng.standard_normal((tokens, layout.head_dim)).astype(BF16))
        slots = any_slots(rng, tokens, num_blocks * block_size)
        cumla.quantize_and_insert_k_cache(
            k, cache.array, lab.put(slots), block_size, layout=layout, backend=lab.backend
        )
        cache.memory.assert_margins()
        if not ((slots >= 0) & (slots < num_blocks * block_size)).any():
            np.testing.assert_array_equal(cache.memory.everything(), before)


def test_concat(lab):
    @for_all(lab, tokens=st.integers(0, 3 if lab.tiny else 20), fp8=st.booleans(), **sizes)
    def check(tokens, fp8, block_size, num_blocks, seed):
        rng = np.random.default_rng(seed)
        dtype = np.uint8 if fp8 else BF16
        cache = Guarded(lab, np.zeros((num_blocks, block_size, 576), dtype), (0, 0, 6))
        rows = lab.put(rng.standard_normal((tokens, 576)).astype(BF16))
        cumla.concat_and_cache_mla(
            rows[:, :512], rows[:, 512:], cache.array, lab.put(any_slots(rng, tokens, num_blocks * block_size)),
            "fp8" if fp8 else "auto", backend=lab.backend,
        )  # fmt: skip
        cache.assert_margins()


gathers = {"requests": st.integers(0, 4), "rows": st.integers(0, 5), "columns": st.integers(0, 3), **sizes}


def test_dequantize_and_gather(lab):
    @for_all(lab, first_row=st.integers(0, 3), given_lens=st.booleans(), **gathers)
    def check(first_row, given_lens, requests, rows, columns, block_size, num_blocks, seed):
        rng = np.random.default_rng(seed)
        cache = guarded_cache(lab, rng, cumla.DSV4_FP8, num_blocks, block_size)
        out = Guarded(lab, np.zeros((requests, first_row + rows, 512), BF16), (0, 16, 32))
        lens = [lab.put(anything(rng, requests)) for _ in range(2)]
        cumla.dequantize_and_gather_k_cache(
            out.array, cache.array, lens[0], lens[1] if given_lens else None,
            lab.put(anything(rng, (requests, columns))), block_size, first_row, backend=lab.backend,
        )  # fmt: skip
        out.assert_margins()


def test_gather(lab):
    """Lengths need not even be ascending."""

    @for_all(lab, dequantize=st.booleans(), given_starts=st.booleans(), **gathers)
    def check(dequantize, given_starts, requests, rows, columns, block_size, num_blocks, seed):
        rng = np.random.default_rng(seed)
        cache = lab.put(rng.integers(0, 256, (num_blocks, block_size, 24), np.uint8))
        dst = Guarded(lab, np.zeros((rows, 24), np.float32 if dequantize else np.uint8), (0, 8))
        cumla.gather_cache(
            cache, dst.array, lab.put(anything(rng, (requests, columns))), lab.put(anything(rng, requests + 1)),
            requests, lab.put(anything(rng, requests)) if given_starts else None, backend=lab.backend,
        )  # fmt: skip
        dst.assert_margins()


def test_indexer_gather(lab):
    @for_all(lab, **gathers)
    def check(requests, rows, columns, block_size, num_blocks, seed):
        rng = np.random.default_rng(seed)
        cache = guarded_cache(lab, rng, cumla.INDEXER_FP8, num_blocks, block_size)
        dst_k = Guarded(lab, np.zeros((rows, 128), np.uint8), (0, 3))
        dst_scale = Guarded(lab, np.zeros((rows, 4), np.uint8), (0, 1))
        cumla.cp_gather_indexer_k_quant_cache(
            cache.array, dst_k.array, dst_scale.array, lab.put(anything(rng, (requests, columns))),
            lab.put(anything(rng, requests + 1)), backend=lab.backend,
        )  # fmt: skip
        dst_k.assert_margins()
        dst_scale.assert_margins()


def test_copies(lab):
    @for_all(lab, num_src=st.integers(0, 3), num_dst=st.integers(0, 3), count=st.integers(0, 5), seed=seeds)
    def check(num_src, num_dst, count, seed):
        rng = np.random.default_rng(seed)
        src, dst = (Guarded(lab, np.zeros((n, 5, 7), np.uint8), (0, 0, 3)) for n in (num_src, num_dst))
        pairs = any_slots(rng, 2 * count, num_src).reshape(count, 2)
        cumla.swap_blocks(src.array, dst.array, lab.put(pairs), backend=lab.backend)
        cumla.copy_blocks([dst.array], lab.put(pairs), backend=lab.backend)
        src.assert_margins()
        dst.assert_margins()


def test_advance(lab):
    @for_all(lab, queries=st.integers(0, 5), columns=st.integers(0, 3), block_size=sizes["block_size"], seed=seeds)
    def check(queries, columns, block_size, seed):
        rng = np.random.default_rng(seed)
        vectors = [Guarded(lab, np.zeros(queries + 1, np.int64), (8,)) for _ in range(3)]
        lens = Guarded(lab, anything(rng, queries), (4,))
        tokens, positions, slots = (vector.array for vector in vectors)
        cumla.advance_step(
            queries + 1, queries, block_size, tokens, lab.put(np.zeros(queries, np.int64)), positions, lens.array,
            slots, lab.put(anything(rng, (queries, columns))), backend=lab.backend,
        )  # fmt: skip
        for vector in (*vectors, lens):
            vector.assert_margins()
        assert (vectors[2].get() >= -1).all()


# Caches beyond 2^31 bytes: host memory that is not written is not allocated, so this costs little.


@pytest.fixture(params=["many-pages", "packed-pool"])
def large(request):
    """(num_blocks, page_stride) of a DSV4_FP8 cache of more than 2^31 bytes with 64 tokens a page."""
    return (57_400, None) if request.param == "many-pages" else (2_060, 1 << 20)


def test_large_caches(lab, rng, large):
    num_blocks, page_stride = large
    layout, block_size = cumla.DSV4_FP8, 64
    cache = layout.allocate(num_blocks, block_size, lab.xp, page_stride)
    assert (num_blocks - 1) * cache.strides[0] > 2**31
    slots = np.array([num_blocks * block_size - 1, 0, (num_blocks - 1) * block_size, num_blocks * block_size])
    k = rng.standard_normal((4, 512)).astype(BF16)
    cumla.quantize_and_insert_k_cache(lab.put(k), cache, lab.put(slots), block_size, backend=lab.backend)

    table = lab.put(np.array([[num_blocks - 1], [0], [num_blocks]], np.int32))
    out = lab.put(np.full((3, 2, 512), 7, BF16))
    lens = lab.put(np.array([64, 1, 5], np.int32))
    two = lab.put(np.array([1, 1, 2], np.int32))
    cumla.dequantize_and_gather_k_cache(out, cache, lens, two, table, block_size, 0, backend=lab.backend)
    values = to_float(lab.get(out))
    np.testing.assert_allclose(values[0, 0], to_float(k[0]), rtol=2**-3, atol=2**-6)
    np.testing.assert_allclose(values[1, 0], to_float(k[1]), rtol=2**-3, atol=2**-6)
    assert not values[2].any()

    cumla.copy_blocks([cache], lab.put(np.array([[num_blocks - 1, 1]])), backend=lab.backend)
    np.testing.assert_array_equal(lab.get(cache[1]), lab.get(cache[num_blocks - 1]))


def test_large_dense_caches(lab, rng):
    block_size, stride = 64, 1 << 20
    num_blocks = 2_060
    pool = lab.xp.zeros(num_blocks * stride, np.uint8).reshape(num_blocks, stride)
    cache = pool[:, : block_size * 1152].reshape(num_blocks, block_size, 1152)
    rows = rng.standard_normal((3, 576)).astype(BF16)
    slots = np.array([num_blocks * block_size - 1, 5, num_blocks * block_size])
    cumla.concat_and_cache_mla(
        lab.put(rows)[:, :512], lab.put(rows)[:, 512:], cache, lab.put(slots), backend=lab.backend
    )
    dst = lab.put(np.zeros((2, 576), BF16))
    table = lab.put(np.array([[num_blocks - 1], [0]], np.int32))
    cumla.gather_cache(
        cache, dst, table, lab.put(np.array([0, 1, 2], np.int32)), 2, lab.put(np.array([63, 5], np.int32)),
        backend=lab.backend,
    )  # fmt: skip
    np.testing.assert_array_equal(to_float(lab.get(dst)), to_float(rows[:2]))

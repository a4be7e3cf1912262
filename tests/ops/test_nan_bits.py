"""16-bit values that a cache stores unquantised keep the bits of their NaN, on insert and on gather."""

import numpy as np
import pytest

import cumla
from support.lab import BF16

# Signalling and quiet NaN of both signs with payloads, infinities, a negative zero.
BITS = np.array([0x7F81, 0xFF81, 0x7FC1, 0xFFA5, 0x7FBF, 0x7F80, 0xFF80, 0x8000], np.uint16)
SLOTS = np.array([1, 6])


@pytest.mark.parametrize("layout", [cumla.DSV4_FP8, cumla.V32_FP8], ids=lambda layout: layout.name)
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])
def test_insert_and_gather(lab, rng, layout, offset):
    kept = layout.quantized_dim
    k = rng.standard_normal((2, layout.head_dim + offset)).astype(BF16)[:, offset:]
    k.view(np.uint16)[:, kept:] = np.resize(BITS, layout.head_dim - kept)
    cache = lab.put(layout.allocate(2, 4))
    cumla.quantize_and_insert_k_cache(
        lab.put(k), cache, lab.put(SLOTS), 4, is_ue8m0=True, layout=layout, backend=lab.backend
    )
    out = lab.put(np.zeros((1, 8, layout.head_dim), BF16))
    lens, table = lab.put(np.array([8], np.int32)), lab.put(np.array([[0, 1]], np.int32))
    cumla.dequantize_and_gather_k_cache(out, cache, lens, None, table, 4, 0, layout=layout, backend=lab.backend)
    np.testing.assert_array_equal(lab.get(out).view(np.uint16)[0, SLOTS, kept:], k.view(np.uint16)[:, kept:])


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_ds_mla"])
def test_dense_insert(lab, rng, kv_cache_dtype):
    kv_c, k_pe = rng.standard_normal((2, 512)).astype(BF16), np.resize(BITS, (2, 64)).view(BF16)
    plain = kv_cache_dtype == "auto"
    if plain:
        kv_c.view(np.uint16)[:, :8] = BITS
    cache = lab.put(np.zeros((2, 4, 576), BF16) if plain else cumla.V32_FP8.allocate(2, 4))
    cumla.concat_and_cache_mla(lab.put(kv_c), lab.put(k_pe), cache, lab.put(SLOTS), kv_cache_dtype, backend=lab.backend)
    rows = np.ascontiguousarray(lab.get(cache)).reshape(8, -1)[SLOTS].view(np.uint16)
    np.testing.assert_array_equal(rows[:, -64:], k_pe.view(np.uint16))
    if plain:
        np.testing.assert_array_equal(rows[:, :512], kv_c.view(np.uint16))

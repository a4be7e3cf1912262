"""Format and page size are inferred from the cache; where they cannot be, the error says what to pass."""

import dataclasses
import pickle

import numpy as np
import pytest

import cumla
import emulation
from support.lab import BF16

BLOCK = 5
TABLE = np.array([[1, 0]], np.int32)


def rows(layout, rng):
    return rng.standard_normal((2 * BLOCK, layout.head_dim)).astype(BF16)


@pytest.mark.parametrize("layout", [cumla.DSV4_FP8, cumla.V32_FP8, cumla.INDEXER_FP8], ids=lambda x: x.name)
def test_insert_and_gather_ask_the_cache(layout, rng):
    k = rows(layout, rng)
    inferred, asked, named = (layout.allocate(2, BLOCK) for _ in range(3))
    cumla.quantize_and_insert_k_cache(k, inferred, np.arange(len(k)), BLOCK, layout=layout, backend="reference")
    cumla.quantize_and_insert_k_cache(k, asked, np.arange(len(k)), backend="reference")
    cumla.quantize_and_insert_k_cache(k, named, np.arange(len(k)), layout=layout.name, backend="reference")
    np.testing.assert_array_equal(asked, inferred)
    np.testing.assert_array_equal(named, inferred)
    want, got = np.zeros((2, 1, 2 * BLOCK, layout.head_dim), BF16)
    lens = np.array([2 * BLOCK], np.int32)
    cumla.dequantize_and_gather_k_cache(want, inferred, lens, None, TABLE, BLOCK, 0, layout=layout, backend="reference")
    cumla.dequantize_and_gather_k_cache(got, inferred, lens, None, TABLE, backend="reference")
    np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))
    assert got.astype(np.float32).any()


def test_raw_pages_of_another_size_want_block_size():
    """Only pages of DSV4_FP8 have a default size, and only if their width is that of 64 tokens."""
    k, pages = np.zeros((3, 512), BF16), np.zeros((2, cumla.DSV4_FP8.page_bytes(BLOCK)), np.uint8)
    slots = np.arange(3)
    message = (
        r"k_cache: got raw pages of 3456 bytes and no block_size, expected the tokens of a page as block_size \(only "
        r"pages of 37440 bytes mean 64 tokens\); pages of 5 tokens of DSV4_FP8 have this size$"
    )
    for layout in (None, "DSV4_FP8"):
        with pytest.raises(ValueError, match=message):
            cumla.quantize_and_insert_k_cache(k, pages, slots, layout=layout)
    with pytest.raises(ValueError, match=r"got raw pages of 37441 bytes .* mean 64 tokens\)$"):
        cumla.quantize_and_insert_k_cache(k, np.zeros((2, 37441), np.uint8), slots)
    with pytest.raises(ValueError, match=r"got raw pages of 10 bytes .* mean 64 tokens\)$"):
        cumla.quantize_and_insert_k_cache(k, np.zeros((2, 10), np.uint8), slots)
    cumla.quantize_and_insert_k_cache(k, pages, slots, BLOCK, layout="DSV4_FP8", backend="reference")

    k, pages = np.zeros((3, 576), BF16), np.zeros((2, cumla.V32_FP8.page_bytes(64)), np.uint8)
    with pytest.raises(ValueError, match=r"k_cache: got uint8 of shape .* raw pages, .* expected layout .* block_size"):
        cumla.quantize_and_insert_k_cache(k, pages, slots)
    message = "got raw pages of 41984 bytes and no block_size, expected the tokens of a page as block_size; pages of 64"
    with pytest.raises(ValueError, match=message):
        cumla.quantize_and_insert_k_cache(k, pages, slots, layout="V32_FP8")
    assert not pages.any()


@pytest.mark.parametrize("padded", [True, False])
def test_raw_pages_of_v4_have_64_tokens(padded, rng):
    """With the peer's default size; with or without the padding of a page."""
    layout, tokens = cumla.DSV4_FP8, 100
    k = rng.standard_normal((tokens, 512)).astype(BF16)
    cache = layout.allocate(2, 64)
    pages = np.zeros((2, layout.page_bytes(64) if padded else 64 * layout.token_bytes), np.uint8)
    for x in (cache, pages):
        cumla.quantize_and_insert_k_cache(k, x, np.arange(tokens), backend="reference")
    np.testing.assert_array_equal(pages[:, : 64 * layout.token_bytes], cache.reshape(2, -1))

    lens, table = np.array([tokens], np.int32), np.array([[0, 1]], np.int32)
    want, got = np.zeros((2, 1, tokens, 512), BF16)
    for out, x in ((want, cache), (got, pages)):
        cumla.dequantize_and_gather_k_cache(out, x, lens, None, table, backend="reference")
    np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))

    q, indices = rng.standard_normal((1, 1, 2, 512)).astype(BF16), np.arange(tokens, dtype=np.int32)[None, None]
    want, got = (
        cumla.sparse_mla_decode(q, x, indices, layout=layout, backend="reference")[0].view(np.uint16)
        for x in (cache, pages)
    )
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("layout", [cumla.DSV4_FP8, cumla.V32_FP8, cumla.INDEXER_FP8], ids=lambda x: x.name)
def test_the_format_of_raw_pages_is_inferred_from_rows(layout, rng):
    """As peers call it: pages as bytes, and how many tokens one has."""
    k, cache = rows(layout, rng), layout.allocate(2, BLOCK)
    pages = np.zeros((2, layout.page_bytes(BLOCK)), np.uint8)
    cumla.quantize_and_insert_k_cache(k, cache, np.arange(len(k)), backend="reference")
    cumla.quantize_and_insert_k_cache(k, pages, np.arange(len(k)), BLOCK, backend="reference")
    np.testing.assert_array_equal(pages[:, : BLOCK * layout.token_bytes], cache.reshape(2, -1))
    want, got = np.zeros((2, 1, 2 * BLOCK, layout.head_dim), BF16)
    lens = np.array([2 * BLOCK], np.int32)
    cumla.dequantize_and_gather_k_cache(want, cache, lens, None, TABLE, backend="reference")
    cumla.dequantize_and_gather_k_cache(got, pages, lens, None, TABLE, BLOCK, 0, backend="reference")
    np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))
    with pytest.raises(ValueError, match=r"k_cache: got uint8 of shape .* raw pages, which do not identify the format"):
        cumla.quantize_and_insert_k_cache(k[:, :100], pages, np.arange(len(k)), BLOCK)


def test_a_size_that_two_formats_have_wants_the_format(rng):
    k, cache = rows(cumla.DSV41_FP8, rng), cumla.DSV41_FP8.allocate(2, BLOCK)
    message = "k_cache: got tokens of 528 bytes, which DSV41_FP8, DSV41_FP8_SPLIT, V32_NOPE_FP8 have; expected layout"
    with pytest.raises(ValueError, match=message):
        cumla.quantize_and_insert_k_cache(k, cache, np.arange(3))
    cumla.quantize_and_insert_k_cache(k[:3], cache, np.arange(3), layout="DSV41_FP8", backend="reference")
    assert cache[0, :3].any()


def test_rows_of_another_format_are_named():
    k, cache = np.zeros((3, 576), BF16), cumla.DSV4_FP8.allocate(2, BLOCK)
    with pytest.raises(ValueError, match="k: got rows of 576 values, expected 512 for a DSV4_FP8 cache"):
        cumla.quantize_and_insert_k_cache(k, cache, np.arange(3))


def test_what_a_cache_is_made_of():
    with pytest.raises(TypeError, match="xp: got ml_dtypes, expected the module numpy or cupy"):
        cumla.DSV4_FP8.allocate(1, 1, xp=__import__("ml_dtypes"))
    with pytest.raises(TypeError, match="xp: got str"):
        cumla.DSV4_FP8.allocate(1, 1, xp="numpy")
    with pytest.raises(ValueError, match=f"num_blocks: got {2**62} of 1152 bytes, expected at most"):
        cumla.DSV4_FP8.allocate(2**62, 1)


@pytest.mark.skipif(bool(emulation.unavailable()), reason=str(emulation.unavailable()))
def test_what_runs_is_logged(caplog, rng):
    """At debug level: what is compiled, and what a call launches, once."""
    caplog.set_level("DEBUG", "cumla")
    k = rng.standard_normal((11, 128)).astype(BF16)
    with emulation.devices():
        import cupy

        cache = cumla.INDEXER_FP8.allocate(3, 7, cupy)  # a shape that no other test has
        for _ in range(2):
            cumla.quantize_and_insert_k_cache(cupy.array(k), cache, cupy.array(np.arange(11)))
    messages = [record.getMessage() for record in caplog.records if record.name == "cumla.dispatch.launch_cache"]
    assert len(messages) == 1
    assert messages[0].startswith("quantize_and_insert_k_cache: launches ['")


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "MINE"},
        {"scale_bytes": 16},
        {"rope_dim": 0, "row_bytes": 512},
        {"scale_tile": 32, "scale_bytes": 16},
        {"scale_placement": "in_row", "row_bytes": 584},
        {"min_exponent": 0},
    ],
    ids=str,
)
def test_formats_that_are_not_registered_are_refused(changes):
    """CUDA's kernels select formats by name: they would write another one, or past the page."""
    layout = dataclasses.replace(cumla.DSV4_FP8, **changes)
    cache = np.zeros((2, BLOCK, layout.token_bytes), np.uint8)
    arrays = {"k_cache": cache, "layout": layout}
    for call in (
        lambda: cumla.quantize_and_insert_k_cache(
            np.ones((1, 512), BF16), slot_mapping=np.zeros(1, np.int64), **arrays
        ),
        lambda: cumla.sparse_mla_decode(np.ones((1, 1, 1, 512), BF16), indices=np.zeros((1, 1, 1), np.int32), **arrays),
    ):
        with pytest.raises(ValueError, match=rf"layout: got {layout.name}.* expected one of DSV4_FP8, V32_FP8"):
            call()
    assert not cache.any()


def test_the_least_exponent_of_scales_that_are_no_powers_of_two():
    """It would be ignored: of float32 scales with is_ue8m0=False, and of e4m3 scales."""
    for layout, powers_of_two in ((cumla.V32_FP8, False), (cumla.V32_NOPE_FP8, False), (cumla.DSV41_FP4, True)):
        cache, k = layout.allocate(1, 1), np.ones((1, layout.head_dim), BF16)
        message = f"min_exponent: got -20, but scales of {layout.name} are not powers of two here"
        with pytest.raises(ValueError, match=message):
            cumla.quantize_and_insert_k_cache(
                k, cache, np.zeros(1, np.int64), is_ue8m0=powers_of_two, layout=layout, min_exponent=-20
            )
        assert not cache.any()


def test_the_same_format_is_the_same(rng):
    """Read from a file, or with pages that are padded differently."""
    for layout in (pickle.loads(pickle.dumps(cumla.DSV4_FP8)), dataclasses.replace(cumla.DSV4_FP8, page_alignment=64)):
        cache, want = layout.allocate(2, BLOCK), cumla.DSV4_FP8.allocate(2, BLOCK)
        k = rows(layout, rng)
        for x in (cache, want):
            cumla.quantize_and_insert_k_cache(k, x, np.arange(len(k)), layout=layout, backend="reference")
        np.testing.assert_array_equal(cache, want)

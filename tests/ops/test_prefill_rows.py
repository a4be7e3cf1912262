"""Rows and lists of a chunk of prefills equal the results of the separate operations."""

import numpy as np
import pytest

import cumla
from cumla.ops.prefill_rows import gather_prefill_rows
from support.lab import BF16

WINDOW, BLOCK = 20, 8


@pytest.mark.parametrize("layout", [cumla.DSV4_FP8, cumla.DSV41_FP8], ids=lambda x: x.name)
@pytest.mark.parametrize("ratio", [0, 4, 128])
@pytest.mark.parametrize("gap", [0, 1])
@pytest.mark.nowhere(when=lambda x: x.get("layout") is not cumla.DSV4_FP8 and (x.get("gap") or x.get("ratio") != 4))
@pytest.mark.thorough(when=lambda x: x.simulated and x.get("gap"))
def test_rows_and_lists(lab, rng, layout, ratio, gap):
    """Compressed rows of none, ratio 4 and 128; absent pages and entries; rows at any address."""
    extra = cumla.DSV41_FP4 if layout is cumla.DSV41_FP8 else layout
    lens, new = np.array([300, 9, 141], np.int32), np.array([5, 9, 3])
    starts = (np.concatenate([[0], np.cumsum(new)]) + 2).astype(np.int32)
    n = 0 if ratio == 0 else int(lens.max()) // ratio
    gather_lens = np.minimum(lens, new + WINDOW - 1).astype(np.int32)
    m = n + int(gather_lens.max()) + 1
    tokens, topk = int(new.sum()), 24 if ratio else 0

    def pages(of, count):
        cache = of.allocate(count, BLOCK)
        k = rng.normal(size=(count * BLOCK, of.head_dim)).astype(BF16)
        cumla.quantize_and_insert_k_cache(k, cache, np.arange(len(k)), BLOCK, layout=of, backend="reference")
        return cache

    swa, compressed = pages(layout, 40), pages(extra, 40)
    tables = [rng.integers(0, 40, (3, 38)).astype(np.int32) for _ in range(2)]
    tables[0][0, -2] = tables[1][2, 0] = -1
    local = np.sort(rng.integers(-3, max(n, 1), (tokens, max(topk, 4)))).astype(np.int32)
    compact = ratio != 128
    want = np.full((3, m, 512), 7, BF16)
    if n:
        cumla.dequantize_and_gather_k_cache(
            want, compressed, lens, None, tables[1], BLOCK, 0, compress_ratio=ratio, layout=extra, backend="reference"
        )
    cumla.dequantize_and_gather_k_cache(
        want, swa, lens, gather_lens, tables[0], BLOCK, n, layout=layout, backend="reference"
    )
    wanted = cumla.combine_topk_swa_indices(
        local, starts, lens, gather_lens, WINDOW, ratio, topk, m, n, compact=compact, backend="reference"
    )
    out = np.full((3, m, 512 + gap), 7, BF16)
    given = lab.put(out)
    extra_cache = {
        "compressed_cache": lab.put(compressed), "compressed_layout": extra,
        "compressed_block_table": lab.put(tables[1]),
    }  # fmt: skip
    found = gather_prefill_rows(
        given[:, :, :512], lab.put(swa), lab.put(tables[0]), BLOCK, lab.put(lens), lab.put(gather_lens),
        lab.put(starts), lab.put(local), topk, WINDOW, ratio, n, compact=compact, layout=layout,
        **(extra_cache if ratio else {}), backend=lab.backend,
    )  # fmt: skip
    np.testing.assert_array_equal(lab.get(given)[:, :, :512].view(np.uint16), want.view(np.uint16))
    for got, expected in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(lab.get(got), expected)


def test_compressed_rows_end_where_windows_begin(lab):
    """Also for a request whose length implies more rows: a launch writes no row twice."""
    out, n = lab.put(np.full((1, 12, 512), 7, BF16)), 3
    swa, table = lab.put(cumla.DSV4_FP8.allocate(8, BLOCK)), lab.put(np.zeros((1, 8), np.int32))
    lens, gather_lens = (lab.put(np.array([x], np.int32)) for x in (60, 2))
    starts, local = lab.put(np.array([0, 1], np.int32)), lab.put(np.zeros((1, 4), np.int32))
    gather_prefill_rows(
        out, swa, table, BLOCK, lens, gather_lens, starts, local, 4, WINDOW, 4, n, compact=True, layout=cumla.DSV4_FP8,
        compressed_cache=swa, compressed_layout=cumla.DSV4_FP8, compressed_block_table=table, backend=lab.backend,
    )  # fmt: skip
    written = (lab.get(out)[0].astype(np.float32) != 7).any(axis=1)
    assert written.tolist() == [True] * (n + 2) + [False] * 7


def test_lists_that_do_not_fit_are_named(rng):
    lens, starts = np.array([9], np.int32), np.array([0, 3], np.int32)
    swa, table = cumla.DSV4_FP8.allocate(2, BLOCK), np.zeros((1, 2), np.int32)
    arguments = [np.zeros((1, 30, 512), BF16), swa, table, BLOCK, lens, lens, starts, np.zeros((3, 4), np.int32)]
    options = {"compact": True, "layout": cumla.DSV4_FP8}
    with pytest.raises(ValueError, match=r"topk_indices: got 4 columns, expected at least topk = 5"):
        gather_prefill_rows(*arguments, 5, WINDOW, 4, 2, **options)
    with pytest.raises(ValueError, match=r"N: got 31, expected at most 30"):
        gather_prefill_rows(*arguments, 4, WINDOW, 4, 31, **options)

"""Steps of layers whose window and compressed rows have DeepSeek V4.1's formats, which may differ from each other."""

import re
from dataclasses import replace

import pytest

import cumla
from cumla.layers import SparseMLALayer
from layers.test_sparse import BLOCK, check_step, step_of
from support.lab import Lab

PAIRS = {
    "in the row": (cumla.DSV41_FP8, cumla.DSV41_FP4),
    "split": (cumla.DSV41_FP8_SPLIT, cumla.DSV41_FP4_SPLIT),
    "one format": (cumla.DSV41_FP8, None),
}
DECODES, MIXED = ([5, 90, 33], [1, 1, 1]), ([70, 1, 2, 50, 9], [2, 1, 2, 12, 9])


@pytest.mark.attention
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(
    ("ratio", "lens", "path"),
    [
        pytest.param(4, DECODES, None, id="decodes"),
        pytest.param(4, MIXED, "pages", id="mixed-over-pages"),
        pytest.param(4, MIXED, "rows", id="mixed-over-rows"),
        pytest.param(128, ([260, 150], [1, 9]), "pages", id="c128a-over-pages"),
        pytest.param(128, ([260, 150], [1, 9]), "rows", id="c128a-over-rows"),
        pytest.param(1, MIXED, None, id="window"),
    ],
)
@pytest.mark.nowhere(when=lambda x: x.get("pair") != "in the row" and x.get("ratio") != 4)
@pytest.mark.thorough(when=lambda x: x.emulated and (x.get("pair") != "in the row" or x.get("ratio") != 4))
def test_step(lab, rng, ratio, lens, path, pair):
    """Each list is inserted, gathered and attended to in its own format."""
    check_step(lab, rng, ratio, *lens, path, *PAIRS[pair])


@pytest.mark.parametrize(
    ("formats", "text"),
    [
        ({"layout": cumla.DSV41_FP4}, "layout: got DSV41_FP4, expected one of ['DSV4_FP8', 'DSV41_FP8', "),
        ({"layout": cumla.V32_NOPE_FP8}, "layout: got V32_NOPE_FP8, expected one of"),
        ({"extra_layout": cumla.DSV41_FP4}, "extra_layout: got DSV41_FP4, expected DSV4_FP8 with a DSV4_FP8 cache"),
        (
            {"layout": cumla.DSV41_FP8, "extra_layout": cumla.DSV41_FP4_SPLIT},
            "extra_layout: got DSV41_FP4_SPLIT, expected DSV41_FP8 or DSV41_FP4 with a DSV41_FP8 cache",
        ),
        (
            {"layout": cumla.DSV41_FP8_SPLIT, "extra_layout": cumla.DSV41_FP8},
            "extra_layout: got DSV41_FP8, expected DSV41_FP8_SPLIT or DSV41_FP4_SPLIT with a DSV41_FP8_SPLIT cache",
        ),
    ],
)
def test_formats_that_do_not_go_together(formats, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        SparseMLALayer(4, **formats)


def test_formats_are_no_names():
    with pytest.raises(TypeError, match=r"^extra_layout: got 'DSV41_FP4' of type str, expected a CacheLayout"):
        SparseMLALayer(4, layout=cumla.DSV41_FP8, extra_layout="DSV41_FP4")


def test_caches_of_another_format(rng):
    """The message names the cache, whichever of the two it is, and nothing is written."""
    _, given, _ = step_of(rng, Lab("reference", on_device=False), 4, [40, 30], [1, 5])
    first, second = cumla.DSV41_FP8, cumla.DSV41_FP4
    layer, compressed = SparseMLALayer(4, 8, layout=first, extra_layout=second), given["compressed"]
    window = first.allocate(len(given["swa_cache"]), BLOCK)
    rows = second.allocate(len(compressed.cache), compressed.cache.shape[1])
    right = {**given, "swa_cache": window, "compressed": replace(compressed, cache=rows)}
    for change, text in (
        ({"swa_cache": given["swa_cache"]}, rf"swa_cache: got shape .*, expected .*{BLOCK}, 528\]"),
        ({"compressed": compressed}, r"compressed.cache: got shape .*, expected .*288\]"),
    ):
        with pytest.raises(ValueError, match=f"^{text}"):
            layer.step(**(right | change), backend="reference")
        assert not window.any()
        assert not rows.any()
    layer.step(**right, backend="reference")
    assert window.any()
    assert rows.any()

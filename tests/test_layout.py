"""Caches and pages of a layout."""

import numpy as np
import pytest

import cumla


@pytest.mark.parametrize("layout", [cumla.DSV4_FP8, cumla.V32_FP8, cumla.INDEXER_FP8], ids=lambda x: x.name)
class TestPages:
    def test_a_view_wants_room_for_its_tokens(self, layout):
        enough = 3 * layout.token_bytes
        assert layout.view(np.zeros((2, enough), np.uint8), 3).shape == (2, 3, layout.token_bytes)
        with pytest.raises(ValueError, match=f"pages: got pages of {enough - 1} bytes, expected at least {enough} for"):
            layout.view(np.zeros((2, enough - 1), np.uint8), 3)

    def test_pages_do_not_overlap(self, layout):
        needed = layout.page_bytes(3)
        assert layout.allocate(2, 3, page_stride=needed + 5).strides[0] == needed + 5
        with pytest.raises(ValueError, match=f"page_stride: got {needed - 1} bytes, expected at least {needed} for 3"):
            layout.allocate(2, 3, page_stride=needed - 1)

    def test_sizes_are_integers(self, layout):
        for wrong in (None, True, 3.0, "3", np.array(3)):
            with pytest.raises(TypeError, match=f"num_blocks: got {type(wrong).__name__}, expected an integer"):
                layout.allocate(wrong, 3)
            with pytest.raises(TypeError, match=f"block_size: got {type(wrong).__name__}, expected an integer"):
                layout.allocate(2, wrong)
        with pytest.raises(TypeError, match="page_stride: got float, expected an integer"):
            layout.allocate(2, 3, page_stride=1e9)

    def test_numpy_integers_do_not_wrap_around(self, layout):
        small = np.uint8(200)
        assert layout.page_bytes(small) == layout.page_bytes(200)
        assert layout.allocate(small, small).shape == (200, 200, layout.token_bytes)
        with pytest.raises(ValueError, match="page_stride: got 300 bytes"):
            layout.allocate(2, small, page_stride=np.int16(300))
        with pytest.raises(ValueError, match="pages: got pages of 300 bytes"):
            layout.view(np.zeros((2, 300), np.uint8), small)


FIELDS = {
    "name": "MINE", "head_dim": 512, "rope_dim": 64, "value_type": "e4m3", "row_bytes": 604, "scale_type": "float32",
    "scale_tile": 64, "scale_bytes": 28, "scale_placement": "in_row", "min_exponent": -22,
}  # fmt: skip
FP4 = {"value_type": "e2m1", "scale_type": "e4m3", "scale_tile": 32, "scale_bytes": 14, "row_bytes": 224 + 14 + 128}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale_placement": "row"}, "scale_placement: got 'row', expected one of in_row, page_tail"),
        ({"scale_type": "fp32"}, "scale_type: got 'fp32', expected one of none, ue8m0, float32, e4m3"),
        ({"scale_type": "e4m3"}, "scale_type: got 'e4m3', expected none or ue8m0 or float32 for e4m3 values"),
        ({"value_type": "fp8"}, "value_type: got 'fp8', expected one of e4m3, e2m1, bfloat16, float16, float32"),
        ({"value_type": ["e4m3"]}, "value_type: got \\['e4m3'\\], expected one of"),
        ({"value_type": "bfloat16"}, "scale_type: got 'float32', expected none for bfloat16 values"),
        ({"row_bytes": 448}, "row_bytes: got 448, expected 604, the bytes of its values and scales"),
        ({"row_bytes": 604, "scale_placement": "page_tail"}, "row_bytes: got 604, expected 576,"),
        ({"row_bytes": -1}, "row_bytes: got -1, expected at least 1"),
        ({"scale_bytes": 4}, "scale_bytes: got 4, expected a multiple of 4 of at least 28, for 7 float32 scales"),
        ({"scale_bytes": 30}, "scale_bytes: got 30, expected a multiple of 4 of at least 28"),
        ({"scale_tile": 100}, "scale_tile: got 100, expected a divisor of the 448 quantised values"),
        ({"scale_tile": 0}, "scale_tile: got 0, expected a divisor of the 448 quantised values"),
        ({"rope_dim": 600}, "rope_dim: got 600, expected at most head_dim, 512"),
        ({"rope_dim": 512}, "rope_dim: got 512, expected less than head_dim, 512, in a quantised format"),
        ({"rope_dim": -8}, "rope_dim: got -8, expected at least 0"),
        ({"head_dim": 0}, "head_dim: got 0, expected at least 1"),
        ({"page_alignment": 0}, "page_alignment: got 0, expected at least 1"),
        ({"stride_multiple": 0}, "stride_multiple: got 0, expected at least 1"),
        ({"min_exponent": 1}, "min_exponent: got 1, expected at most 0"),
        ({"min_exponent": -127}, "min_exponent: got -127, expected at least -126"),
        ({"min_scale": -1.0}, "min_scale: got -1.0, expected a finite number of at least 0"),
        ({"min_scale": float("nan")}, "min_scale: got nan, expected a finite number"),
        (FP4, "min_scale: got 0.0, expected at least 2"),
        ({**FP4, "scale_type": "none"}, "scale_type: got 'none', expected ue8m0 or e4m3 for e2m1 values"),
        ({**FP4, "min_scale": 1.0, "scale_tile": 7}, "scale_tile: got 7, expected an even number"),
        ({"scale_type": "none"}, "scale_tile: got 64, expected 0 without scales"),
        ({"scale_type": "none", "scale_tile": 0}, "scale_bytes: got 28, expected 0 without scales"),
    ],
    ids=str,
)  # fmt: skip
def test_fields_that_do_not_fit_are_named(changes, message):
    cumla.CacheLayout(**FIELDS)
    with pytest.raises(ValueError, match=message):
        cumla.CacheLayout(**FIELDS | changes)


def test_fields_of_other_types_are_named():
    for name in ("head_dim", "rope_dim", "row_bytes", "scale_tile", "scale_bytes", "page_alignment", "min_exponent"):
        for wrong in (None, True, 64.0, "64"):
            with pytest.raises(TypeError, match=f"{name}: got {type(wrong).__name__}, expected an integer"):
                cumla.CacheLayout(**FIELDS | {name: wrong})
        assert getattr(cumla.CacheLayout(**FIELDS | {name: np.int64(FIELDS.get(name, 1))}), name) == FIELDS.get(name, 1)
    with pytest.raises(TypeError, match="min_scale: got str, expected a number"):
        cumla.CacheLayout(**FIELDS | {"min_scale": "1"})
    with pytest.raises(TypeError, match="name: got NoneType, expected a string"):
        cumla.CacheLayout(**FIELDS | {"name": None})


def test_rows_of_no_values_are_refused():
    with pytest.raises(ValueError, match=r"src_cache: got shape .*, expected rows of at least one value"):
        cumla.gather_cache(
            np.zeros((1, 2, 0), np.uint8), np.zeros((1, 0), np.uint8), np.zeros((1, 1), np.int32),
            np.array([0, 1], np.int32), 1,
        )  # fmt: skip

"""Caches and pages as a layout makes them."""

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

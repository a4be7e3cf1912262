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

"""Copies of whole pages."""

import numpy as np


def copy_blocks(src: np.ndarray, dst: np.ndarray, src_to_dst: np.ndarray) -> None:
    for source, destination in src_to_dst:
        if 0 <= source < len(src) and 0 <= destination < len(dst):
            dst[destination] = src[source]


def copy_blocks_across(src: np.ndarray, dst: np.ndarray, src_to_dst: np.ndarray) -> None:
    """Copies between host and device memory; here both arrays are in host memory."""
    copy_blocks(src, dst, src_to_dst)

"""Copies of whole pages: each is one contiguous copy, for which NumPy is fast."""

from ..reference.blocks import copy_blocks, copy_blocks_across

__all__ = ["copy_blocks", "copy_blocks_across"]

"""Copies of whole pages: each is one copy of contiguous memory, which NumPy does as well as anything."""

from ..reference.blocks import copy_blocks, copy_blocks_across

__all__ = ["copy_blocks", "copy_blocks_across"]

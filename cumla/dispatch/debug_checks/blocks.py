"""Checks of `cumla.debug` for kernels of copies of pages."""

from __future__ import annotations

from typing import Any

import numpy as np

from .values import host


def copy_blocks(arguments: Any) -> None:
    for name, column, pages in (("first", 0, len(arguments.src)), ("second", 1, len(arguments.dst))):
        blocks = host(arguments.src_to_dst)[:, column]
        wrong = (blocks < -1) | (blocks >= pages)
        if wrong.any():
            i = int(np.argmax(wrong))
            raise ValueError(
                f"src_to_dst: pair {i} has {blocks[i]} as its {name} block, expected -1 or 0 to {pages - 1}"
            )


copy_blocks_across = copy_blocks

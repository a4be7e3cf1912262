"""The format of a cache, given by the caller or inferred from the array, and its pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..arrays.dlpack import Argument
from ..kernels.types.segments import Pages
from ..layout import BUILT_IN, DSV4_FP8, INDEXER_FP8, LAYOUTS, V32_FP8, CacheLayout, layouts_of
from .call import BYTES, Call
from .values import shown

DEFAULT_BLOCK_SIZES = {"DSV4_FP8": 64}  # of raw pages: quantize_and_insert_k_cache of vLLM's V4 has it
VALUES = tuple(sorted({x.value_type for x in BUILT_IN if not x.num_scales}))
RAW_PAGES = (DSV4_FP8, V32_FP8, INDEXER_FP8)  # formats of raw pages that the width of a row identifies


def named_layout(layout: Any, name: str = "layout") -> CacheLayout | None:
    """A CacheLayout unchanged or by its name; None for None. Raises TypeError or ValueError for anything else, the
    argument `name`.

    Kernels know the formats of LAYOUTS by name only, so any other format is an error (`cumla.register_layout` adds
    one). The padding of pages does not matter to kernels.
    """
    if layout is None:
        return None
    names = ", ".join(LAYOUTS)
    if isinstance(layout, CacheLayout):
        known = LAYOUTS.get(layout.name)
        if known is None or (known is not layout and replace(layout, page_alignment=known.page_alignment) != known):
            which = layout.name if known is None else f"{layout.name} with other sizes"
            raise ValueError(f"{name}: got {which}, expected one of {names}, or one that register_layout has added")
        return known
    if not isinstance(layout, str):
        raise TypeError(
            f"{name}: got {shown(layout)} of type {type(layout).__name__}, expected a CacheLayout or the name of one "
            f"({names})"
        )
    if layout not in LAYOUTS:
        raise ValueError(f"{name}: got {shown(layout)}, expected one of {names}")
    return LAYOUTS[layout]


def cache_layout(
    cache: Argument, layout: Any, block_size: int | None = None, row_width: int | None = None
) -> CacheLayout:
    """The format of a cache: `layout` if given, else inferred from the bytes per token or the dtype of its rows.

    Args:
        block_size, row_width: of raw pages: their tokens, and the values of the rows inserted or gathered. Only one of
            the formats of V3.2 and V4 has rows of that width, and V4.1's are always named; raw pages of DSV4_FP8 need
            no block_size (`cache_pages`)

    Raises TypeError for a dtype that no format has, ValueError for an ambiguous array: raw pages of unknown size, or a
    number of bytes that several formats have.
    """
    named = named_layout(layout)
    if named is not None:
        return named
    name, native, known = cache.name, cache.native, []
    if native.dtype not in BYTES and native.dtype.name not in VALUES:
        raise TypeError(f"{name}: got dtype {native.dtype}, expected uint8, or {', '.join(VALUES)} for rows of values")
    if native.ndim in (3, 4):
        width = native.shape[-1]
        if native.dtype in BYTES:
            known = layouts_of(width)
        else:
            plain = (x for x in BUILT_IN if not x.num_scales and x.value_type == native.dtype.name)
            known = [x for x in plain if x.head_dim == width]
    elif native.ndim == 2 and native.dtype in BYTES:
        known = [x for x in RAW_PAGES if x.head_dim == row_width]
        known = [x for x in known if block_size is not None or x.name in DEFAULT_BLOCK_SIZES]
    if len(known) > 1:
        names = ", ".join(x.name for x in known)
        what = f"tokens of {native.shape[-1]} bytes" if native.ndim > 2 else f"raw pages for rows of {row_width} values"
        raise ValueError(f"{name}: got {what}, which {names} have; expected layout with it, one of them")
    if not known:
        what = "raw pages, which do" if native.ndim == 2 else "which does"
        raise ValueError(
            f"{name}: got {native.dtype} of shape {tuple(native.shape)}, {what} not identify the format; expected "
            "layout (and for raw pages block_size) with it, or a cache [num_blocks, block_size, token_bytes]"
        )
    return known[0]


def cache_pages(call: Call, cache: Argument, layout: CacheLayout, block_size: int | None) -> Pages:
    """A paged cache as from `pages_of`; raw pages of DSV4_FP8 have 64 tokens by default.

    Raises ValueError for raw pages without block_size that are not as wide as pages of 64 tokens, with or without their
    padding: a page of another size, or one packed with other data, would be read and written in the wrong places.
    """
    native = cache.native
    if native.ndim != 2 or native.dtype not in BYTES or block_size is not None:
        return pages_of(call, cache, layout, block_size)
    default, width = DEFAULT_BLOCK_SIZES.get(layout.name), native.shape[1]
    if default is not None and width in (default * layout.token_bytes, layout.page_bytes(default)):
        return pages_of(call, cache, layout, default)
    tokens = width // layout.token_bytes
    fits = tokens > 0 and width in (tokens * layout.token_bytes, layout.page_bytes(tokens))
    but = "" if default is None else f" (only pages of {layout.page_bytes(default)} bytes mean {default} tokens)"
    of_this_size = f"; pages of {tokens} tokens of {layout.name} have this size" if fits else ""
    raise ValueError(
        f"{cache.name}: got raw pages of {width} bytes and no block_size, expected the tokens of a page as block_size"
        f"{but}{of_this_size}"
    )


def pages_of(call: Call, cache: Argument, layout: CacheLayout, block_size: int | None = None) -> Pages:
    """A borrowed paged cache as `Pages`.

    Args:
        cache: bytes `[num_blocks, block_size, token_bytes]` (an axis of 1 before the last is allowed) or raw pages
            `[num_blocks, page_bytes]`; 16-bit formats also as `[num_blocks, block_size, head_dim]`. A cache whose pages
            have no tokens has no pages
    """
    name, native = cache.name, cache.native
    if native.ndim == 4 and native.shape[2] == 1:
        native = native[:, :, 0]
    if native.ndim == 2 and block_size is not None:
        pages = _raw_pages(name, native, layout, block_size)
        call.uses(
            name, pages.bytes, writable=name in call.written
        )  # without the rest of a row, such as another cache's pages
        return pages
    if native.ndim == 2 and native.dtype in BYTES:
        raise ValueError(f"{name}: got raw pages, expected block_size with them (the page size of the cache)")
    itemsize, width = native.dtype.itemsize, layout.token_bytes
    if native.dtype not in BYTES:
        if str(native.dtype) != layout.value_type:
            expected = "uint8" if layout.quantized_dim else f"{layout.value_type} or uint8"
            raise TypeError(f"{name}: got dtype {native.dtype}, expected {expected} for a {layout.name} cache")
        width = layout.head_dim
    call.check_shape(name, native.shape, (-1, -1 if block_size is None else block_size, width))
    blocks, rows, _ = native.shape
    strides = native.strides
    packed = (rows == 1 or strides[1] == layout.token_bytes) and strides[2] == itemsize
    if native.size and (not packed or (blocks > 1 and strides[0] < rows * layout.token_bytes)):
        raise ValueError(
            f"{name}: got strides {strides} bytes, expected tokens {layout.token_bytes} bytes apart "
            f"and pages at least {rows * layout.token_bytes} bytes apart"
        )
    if not rows:  # kernels divide by a page's tokens
        return Pages(bytes_of(native[:0], 0, layout.token_bytes), 1, layout)
    return Pages(bytes_of(native, blocks, rows * layout.token_bytes), rows, layout)


def checked_pages(
    call: Call, name: str, cache: Any, layout: CacheLayout, block_size: int | None = None, writable: bool = True
) -> Pages:
    """Borrow a paged cache, the argument `name`, and check it as `pages_of` does."""
    return pages_of(call, call.borrow(name, cache, writable), layout, block_size)


def _raw_pages(name: str, native: Any, layout: CacheLayout, block_size: int) -> Pages:
    if native.dtype not in BYTES:
        raise TypeError(f"{name}: got dtype {native.dtype}, expected uint8 for raw pages")
    needed = block_size * layout.token_bytes
    apart = native.strides[1] == 1 and (len(native) < 2 or native.strides[0] >= needed)
    if native.shape[1] < needed or (native.size and not apart):  # NumPy's strides of an empty array are 0
        raise ValueError(
            f"{name}: got pages of {native.shape[1]} bytes {native.strides[0]} bytes apart, "
            f"expected at least {needed} contiguous bytes for {block_size} tokens of {layout.name}"
        )
    return Pages(bytes_of(native[:, :needed], len(native), needed), block_size, layout)


def bytes_of(native: Any, blocks: int, page_bytes: int) -> Any:
    """uint8 [blocks, page_bytes] over an array whose first axis counts pages, each of them contiguous."""
    if isinstance(native, np.ndarray):
        return native.view(np.uint8).reshape(blocks, page_bytes)
    stride = native.strides[0] if blocks > 1 else page_bytes
    return type(native)((blocks, page_bytes), np.uint8, native.data, (stride, 1))


def check_layout(layout: CacheLayout, names: tuple[str, ...]) -> None:
    """Raise ValueError for a format that an operation does not take."""
    if layout.name not in names:
        raise ValueError(f"layout: got {layout.name}, expected {', '.join(names[:-1])} or {names[-1]}")


def check_row_width(name: str, width: int, layout: CacheLayout) -> None:
    """Raise ValueError for rows, the argument `name`, that are not as wide as the format's."""
    if width != layout.head_dim:
        raise ValueError(f"{name}: got rows of {width} values, expected {layout.head_dim} for a {layout.name} cache")

"""The format of a cache: given by the caller, or inferred from the array."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..kernels.types.segments import Pages
from ..layout import BUILT_IN, DSV4_FP8, INDEXER_FP8, LAYOUTS, V32_FP8, CacheLayout, layouts_of
from .call import BYTES, Call
from .values import shown

DEFAULT_BLOCK_SIZES = {"DSV4_FP8": 64}  # of raw pages: quantize_and_insert_k_cache of vLLM's V4 has it
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
    call: Call, name: str, cache: Any, layout: Any, block_size: int | None = None, row_width: int | None = None
) -> CacheLayout:
    """The format of a cache: `layout` if given, else inferred from the bytes per token or the dtype of its rows.

    block_size, row_width  of raw pages: their tokens, and the values of the rows inserted or gathered. Only one of the
                           formats of V3.2 and V4 has rows of that width, and V4.1's are always named; raw pages of
                           DSV4_FP8 need no block_size (`cache_pages`)

    Raises ValueError for an ambiguous array: raw pages of unknown size, or a number of bytes that several formats have.
    """
    named = named_layout(layout)
    if named is not None:
        return named
    native, known = call.borrow(name, cache), []
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


def cache_pages(
    call: Call, name: str, cache: Any, layout: CacheLayout, block_size: int | None, writable: bool = False
) -> Pages:
    """A paged cache as from `Call.pages`; raw pages of DSV4_FP8 have 64 tokens by default.

    Raises ValueError for raw pages without block_size that are not as wide as pages of 64 tokens, with or without their
    padding: a page of another size, or one packed with other data, would be read and written in the wrong places.
    """
    native = call.borrow(name, cache, writable)
    default = DEFAULT_BLOCK_SIZES.get(layout.name)
    if native.ndim != 2 or native.dtype not in BYTES or block_size is not None:
        return call.pages(name, cache, layout, block_size, writable)
    width = native.shape[1]
    if default is not None and width in (default * layout.token_bytes, layout.page_bytes(default)):
        return call.pages(name, cache, layout, default, writable)
    tokens = width // layout.token_bytes
    fits = tokens > 0 and width in (tokens * layout.token_bytes, layout.page_bytes(tokens))
    but = "" if default is None else f" (only pages of {layout.page_bytes(default)} bytes mean {default} tokens)"
    of_this_size = f"; pages of {tokens} tokens of {layout.name} have this size" if fits else ""
    raise ValueError(
        f"{name}: got raw pages of {width} bytes and no block_size, expected the tokens of a page as block_size"
        f"{but}{of_this_size}"
    )


def check_layout(layout: CacheLayout, names: tuple[str, ...]) -> None:
    """Raise ValueError for a format that an operation does not take."""
    if layout.name not in names:
        raise ValueError(f"layout: got {layout.name}, expected {', '.join(names[:-1])} or {names[-1]}")


def check_row_width(name: str, width: int, layout: CacheLayout) -> None:
    """Raise ValueError for rows, the argument `name`, that are not as wide as the format's."""
    if width != layout.head_dim:
        raise ValueError(f"{name}: got rows of {width} values, expected {layout.head_dim} for a {layout.name} cache")

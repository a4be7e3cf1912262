"""Byte layouts of the paged caches. Every offset of every format is defined here and nowhere else.

A cache is a pool of pages. A page holds `block_size` tokens and is seen as uint8
`[num_blocks, block_size, token_bytes]`. Its first stride, the page stride, is at least
`page_bytes(block_size)`: pages may carry padding, or pages of several layers may be packed together.

Within a page a token has a *row* and, where the format keeps them apart, *scales*:

    scales "in_row"      token r at r * row_bytes; its scales are inside the row
    scales "page_tail"   token r at r * row_bytes; its scales at block_size * row_bytes + r * scale_bytes

So the size of the view's last axis is the bytes per token; that axis does not address the bytes of one token.

Formats: DeepSeek V3.2 and V4 as FlashMLA and vLLM store them (bytes equal, padding untouched). DeepSeek V4.1 in both
arrangements: scales in the row as in FlashMLA and vLLM, or at the page's end (`_SPLIT`) as in SGLang and FlashInfer.
Two e2m1 values share a byte, the first in its low half.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from .layout_fields import LARGEST as LARGEST
from .layout_fields import MAX_BYTES as MAX_BYTES
from .layout_fields import SCALE_BYTES as SCALE_BYTES
from .layout_fields import VALUE_BITS as VALUE_BITS
from .layout_fields import ScaleType as ScaleType
from .layout_fields import ValueType as ValueType
from .layout_fields import check_fields, check_for_kernels, integer


@dataclass(frozen=True)
class CacheLayout:
    """One cache format. Sizes in bytes unless the name says otherwise.

    Attributes:
        name: its name in error messages and CUDA sources
        head_dim: values of one token: quantised ones first, then `rope_dim` that stay 16-bit
        rope_dim: values stored in 16 bits at the end of a quantised row; a model may rotate other values: V4.1
            quantises its rotated values, too
        value_type: type of the first `head_dim - rope_dim` values; "float32" rows show the effect of rounding, and only
            host backends take them
        row_bytes: distance between the rows of neighbouring tokens
        scale_type: type of one scale
        scale_tile: values that share one scale
        scale_bytes: scale area of one token, padding included
        scale_placement: "in_row" or "page_tail"
        page_alignment: pages are padded to a multiple of this
        stride_multiple: the page stride is a multiple of this where pages of several caches are packed together
        min_exponent: smallest power-of-two scale that is written, as an exponent of 2 from -126 to 0
        min_scale: smallest scale that is written where scales need not be powers of two; 0: they always are

    Raises TypeError for a field of another type, ValueError for a field that does not fit the others; the message names
    the field. Operations take the formats of cumla, and formats added by `register_layout`.
    """

    name: str
    head_dim: int
    rope_dim: int
    value_type: ValueType
    row_bytes: int
    scale_type: ScaleType = "none"
    scale_tile: int = 0
    scale_bytes: int = 0
    scale_placement: Literal["in_row", "page_tail"] = "in_row"
    page_alignment: int = 1
    stride_multiple: int = 1
    min_exponent: int = 0
    min_scale: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, np.integer):
                object.__setattr__(self, name, int(value))
        check_fields(self)

    @property
    def token_bytes(self) -> int:
        """Bytes per token, without padding of the page: the last axis of a cache array."""
        return self.row_bytes + (self.scale_bytes if self.scale_placement == "page_tail" else 0)

    @property
    def quantized_dim(self) -> int:
        """Values stored in 8 or 4 bits; 0 for 16-bit formats."""
        return self.head_dim - self.rope_dim if self.value_type in LARGEST else 0

    @property
    def quantized_bytes(self) -> int:
        """Bytes of the quantised values, from the start of the row."""
        return self.quantized_dim * VALUE_BITS[self.value_type] // 8

    @property
    def num_scales(self) -> int:
        """Scales of one token that carry a value (a DSV4_FP8 token has an eighth byte, always 0)."""
        return self.quantized_dim // self.scale_tile if self.scale_tile else 0

    @property
    def has_fine_scales(self) -> bool:
        """Whether scales change within 64 values, which attention kernels multiply at a time: V4.1's do."""
        return 0 < self.scale_tile < 64

    @property
    def rope_offset(self) -> int:
        """First byte of the 16-bit tail of a quantised row, from the start of the row."""
        in_row = self.scale_bytes if self.scale_placement == "in_row" else 0
        return self.quantized_bytes + in_row

    @property
    def scale_stride(self) -> int:
        """Bytes from the scales of a token to the scales of the next."""
        return self.row_bytes if self.scale_placement == "in_row" else self.scale_bytes

    def scale_start(self, block_size: int) -> int:
        """First scale byte of a page of `block_size` tokens; token r's scales begin r * scale_stride later."""
        return self.quantized_bytes if self.scale_placement == "in_row" else block_size * self.row_bytes

    def page_bytes(self, block_size: int) -> int:
        """Bytes of a page of `block_size` tokens, padding included."""
        block_size = _positive("block_size", block_size)
        used = block_size * self.token_bytes
        return -(-used // self.page_alignment) * self.page_alignment

    def allocate(self, num_blocks: int, block_size: int, xp: Any = np, page_stride: int | None = None) -> Any:
        """A zeroed cache: uint8 `[num_blocks, block_size, token_bytes]`, a view of pages of `page_stride` bytes.

        xp           numpy or cupy
        page_stride  bytes from page to page, a multiple of `stride_multiple`; `page_bytes(block_size)` unless pages of
                     several caches are packed together
        Raises TypeError for a size that is no integer or an xp that is no such module, ValueError for a size that is
        not positive, a cache too large for an address, and a stride that is too small or no such multiple.
        """
        num_blocks, block_size = _positive("num_blocks", num_blocks), _positive("block_size", block_size)
        module = getattr(xp, "__name__", type(xp).__name__)
        if module not in ("numpy", "cupy"):
            raise TypeError(
                f"xp: got {module}, expected the module numpy or cupy, whose arrays other frameworks take as they are "
                "(torch.from_numpy, from_dlpack)"
            )
        needed = self.page_bytes(block_size)
        stride = needed if page_stride is None else _positive("page_stride", page_stride)
        if stride < needed:
            raise ValueError(
                f"page_stride: got {stride} bytes, expected at least {needed} for {block_size} tokens of {self.name}"
            )
        if stride % self.stride_multiple:
            raise ValueError(
                f"page_stride: got {stride} bytes, expected a multiple of {self.stride_multiple} for {self.name}"
            )
        if num_blocks * stride > MAX_BYTES:
            raise ValueError(f"num_blocks: got {num_blocks} of {stride} bytes, expected at most {MAX_BYTES // stride}")
        pool = xp.zeros(num_blocks * stride, dtype=np.uint8)
        return self.view(pool.reshape(num_blocks, stride), block_size)

    def view(self, pages: Any, block_size: int) -> Any:
        """Raw pages, uint8 `[num_blocks, page_stride]`, as a cache array `[num_blocks, block_size, token_bytes]`."""
        block_size = _positive("block_size", block_size)
        if pages.ndim != 2 or pages.dtype != np.uint8 or pages.strides[1] != 1:
            raise ValueError(
                f"pages: got {pages.dtype} of shape {pages.shape}, "
                "expected uint8 [num_blocks, page_stride], contiguous in the last axis"
            )
        if pages.shape[1] < block_size * self.token_bytes:
            raise ValueError(
                f"pages: got pages of {pages.shape[1]} bytes, expected at least "
                f"{block_size * self.token_bytes} for {block_size} tokens of {self.name}"
            )
        return pages[:, : block_size * self.token_bytes].reshape(pages.shape[0], block_size, self.token_bytes)

    def parts(self, cache: Any) -> tuple[Any, Any, Any]:
        """Views of a cache: quantised values, scales and the rest of a row.

        Args:
            cache: uint8 [num_blocks, block_size, token_bytes], of NumPy or CuPy

        Returns uint8 [num_blocks, block_size, n], with n quantized_bytes, scale_bytes and 2 * rope_dim: writing to one
        writes to the cache. Raises ValueError for a format without scales, or an array that is not such a cache.
        """
        if not self.num_scales:
            raise ValueError(f"layout: got {self.name}, expected one with FP8 or FP4 values")
        shape = tuple(getattr(cache, "shape", ()))
        if len(shape) != 3 or shape[2] != self.token_bytes or cache.dtype != np.uint8 or cache.strides[2] != 1:
            raise ValueError(
                f"cache: got {getattr(cache, 'dtype', type(cache).__name__)} of shape {shape}, "
                f"expected uint8 [num_blocks, block_size, {self.token_bytes}]"
            )
        blocks, tokens, _ = shape
        if tokens > 1 and cache.strides[1] != self.token_bytes:
            raise ValueError(f"cache: got tokens {cache.strides[1]} bytes apart, expected {self.token_bytes}")
        rows, scales = cache, cache[:, :, self.quantized_bytes : self.quantized_bytes + self.scale_bytes]
        if self.scale_placement == "page_tail":
            pages, used = cache.reshape(blocks, -1), tokens * self.row_bytes
            rows = pages[:, :used].reshape(blocks, tokens, self.row_bytes)
            scales = pages[:, used:].reshape(blocks, tokens, self.scale_bytes)
        return rows[:, :, : self.quantized_bytes], scales, rows[:, :, self.rope_offset : self.row_bytes]


def rearrange(cache: Any, layout: CacheLayout, target: CacheLayout, out: Any | None = None) -> Any:
    """Copy a cache into another arrangement of the same bytes, as between engines: DSV41_FP8 to DSV41_FP8_SPLIT.

    Args:
        cache: uint8 [num_blocks, block_size, token_bytes] of `layout`, of NumPy or CuPy
        target: a format that differs from `layout` only in padding and in the place of scales
        out: uint8 [num_blocks, block_size, token_bytes] of `target` to write instead of allocating; no part of `cache`

    Returns the copy. Raises ValueError for formats of other values, or arrays that do not fit.
    """
    ours, theirs = ((x.head_dim, x.rope_dim, x.value_type, x.scale_type, x.scale_tile) for x in (layout, target))
    if ours != theirs or not layout.num_scales:
        raise ValueError(f"target: got {target.name}, expected another arrangement of {layout.name}")
    source_parts = layout.parts(cache)
    if out is None:
        xp = np if isinstance(cache, np.ndarray) else sys.modules["cupy"]
        out = target.allocate(cache.shape[0], cache.shape[1], xp)
    elif tuple(getattr(out, "shape", ())) != (*cache.shape[:2], target.token_bytes):
        expected = [*cache.shape[:2], target.token_bytes]
        raise ValueError(f"out: got shape {tuple(getattr(out, 'shape', ()))}, expected {expected}")
    for to, part in zip(target.parts(out), source_parts, strict=True):
        to[...] = part
    return out


def _positive(name: str, value: Any) -> int:
    return integer(name, value, 1)


DSV4_FP8 = CacheLayout(
    "DSV4_FP8", head_dim=512, rope_dim=64, value_type="e4m3", row_bytes=576,
    scale_type="ue8m0", scale_tile=64, scale_bytes=8, scale_placement="page_tail", page_alignment=576,
    min_exponent=-22,
)  # fmt: skip
V32_FP8 = CacheLayout(
    "V32_FP8", head_dim=576, rope_dim=64, value_type="e4m3", row_bytes=656,
    scale_type="float32", scale_tile=128, scale_bytes=16, min_exponent=-13, min_scale=2.0**-126,
)  # fmt: skip
INDEXER_FP8 = CacheLayout(
    "INDEXER_FP8", head_dim=128, rope_dim=0, value_type="e4m3", row_bytes=128,
    scale_type="float32", scale_tile=128, scale_bytes=4, scale_placement="page_tail", page_alignment=576,
    min_exponent=-22, min_scale=1e-4 / 448,
)  # fmt: skip
DSV41_FP8 = CacheLayout(
    "DSV41_FP8", head_dim=512, rope_dim=0, value_type="e4m3", row_bytes=528,
    scale_type="ue8m0", scale_tile=32, scale_bytes=16, stride_multiple=528, min_exponent=-22,
)  # fmt: skip
DSV41_FP8_SPLIT = CacheLayout(
    "DSV41_FP8_SPLIT", head_dim=512, rope_dim=0, value_type="e4m3", row_bytes=512,
    scale_type="ue8m0", scale_tile=32, scale_bytes=16, scale_placement="page_tail", page_alignment=512,
    min_exponent=-13,
)  # fmt: skip
DSV41_FP4 = CacheLayout(
    "DSV41_FP4", head_dim=512, rope_dim=0, value_type="e2m1", row_bytes=288,
    scale_type="e4m3", scale_tile=16, scale_bytes=32, stride_multiple=288, min_scale=2.0**-9,
)  # fmt: skip
DSV41_FP4_SPLIT = CacheLayout(
    "DSV41_FP4_SPLIT", head_dim=512, rope_dim=0, value_type="e2m1", row_bytes=256,
    scale_type="e4m3", scale_tile=16, scale_bytes=32, scale_placement="page_tail", page_alignment=256,
    min_scale=2.0**-9,
)  # fmt: skip
V32_NOPE_FP8 = CacheLayout(
    "V32_NOPE_FP8", head_dim=512, rope_dim=0, value_type="e4m3", row_bytes=528,
    scale_type="float32", scale_tile=128, scale_bytes=16, min_exponent=-13, min_scale=2.0**-126,
)  # fmt: skip
INDEXER_MXFP4 = CacheLayout(
    "INDEXER_MXFP4", head_dim=128, rope_dim=0, value_type="e2m1", row_bytes=64,
    scale_type="ue8m0", scale_tile=32, scale_bytes=4, scale_placement="page_tail", page_alignment=256,
    min_exponent=-126,
)  # fmt: skip
INDEXER_BF16 = CacheLayout("INDEXER_BF16", head_dim=128, rope_dim=0, value_type="bfloat16", row_bytes=256)
INDEXER_F32 = CacheLayout("INDEXER_F32", head_dim=128, rope_dim=0, value_type="float32", row_bytes=512)
MLA_BF16 = CacheLayout("MLA_BF16", head_dim=576, rope_dim=64, value_type="bfloat16", row_bytes=1152)
DSV4_BF16 = CacheLayout("DSV4_BF16", head_dim=512, rope_dim=64, value_type="bfloat16", row_bytes=1024)
MLA_F32 = CacheLayout("MLA_F32", head_dim=576, rope_dim=64, value_type="float32", row_bytes=2304)
DSV4_F32 = CacheLayout("DSV4_F32", head_dim=512, rope_dim=64, value_type="float32", row_bytes=2048)


def plain_rows(width: int, value_type: ValueType) -> CacheLayout:
    """The format of rows that consist of `width` values of one type.

    16- and 32-bit values have no scale; e4m3 values share one scale, which is not in the cache.
    """
    row_bytes = width * VALUE_BITS[value_type] // 8
    return CacheLayout(f"{value_type} [.., {width}]", width, 0, value_type, row_bytes)


BUILT_IN = (
    DSV4_FP8, V32_FP8, INDEXER_FP8, DSV41_FP8, DSV41_FP8_SPLIT, DSV41_FP4, DSV41_FP4_SPLIT, V32_NOPE_FP8,
    INDEXER_MXFP4, DSV4_BF16, MLA_BF16, INDEXER_BF16, DSV4_F32, MLA_F32, INDEXER_F32,
)  # fmt: skip
_layouts = {layout.name: layout for layout in BUILT_IN}
LAYOUTS: Mapping[str, CacheLayout] = MappingProxyType(_layouts)  # by name, including registered formats
_lock = threading.Lock()


def layouts_of(token_bytes: int) -> list[CacheLayout]:
    """The formats of cumla with `token_bytes` bytes per token. Where several fit, only the cache's owner knows its
    format. Registered formats are left out, so that registering a format changes no other call."""
    return [layout for layout in BUILT_IN if layout.token_bytes == token_bytes]


def register_layout(layout: CacheLayout) -> CacheLayout:
    """Add a cache format for the life of the process.

    `quantize_and_insert_k_cache` and `dequantize_and_gather_k_cache` take the format or its name as `layout=` on every
    backend; `sparse_mla_decode` does for rows of 512 to 576 values. A registered format is never inferred from an
    array. Other operations and the layers take only the formats of cumla.

    Args:
        layout: float32 (on the host only), bfloat16, or quantised:

            value_type  scale_type     scale_tile  head_dim, a multiple of    rope_dim
            e4m3        float32        64, 128     8                          a multiple of 8
            e4m3        ue8m0          64          8                          a multiple of 8
            e4m3        ue8m0          16, 32      64                         0
            e2m1        ue8m0, e4m3    16, 32      64                         0

            with rows of at least 136 values and a multiple of 16 bytes, at most 32 scales, and a scale area of the
            scales' size rounded up to 4 bytes

    Returns `layout`. An equal format may be registered again. Raises TypeError for another type, ValueError for a name
    that another format has or that is no ASCII identifier, and for a field that some backend does not take.
    """
    if not isinstance(layout, CacheLayout):
        raise TypeError(f"layout: got {type(layout).__name__}, expected a CacheLayout")
    check_for_kernels(layout)
    with _lock:
        known = _layouts.setdefault(layout.name, layout)
    if known != layout:
        raise ValueError(f"name: got {layout.name}, which another format has, expected a name of its own")
    return known

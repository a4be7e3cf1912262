"""Drawings of cache formats, from cumla/layout.py."""

import html
from collections.abc import Iterator

from cumla.layout import VALUE_BITS, CacheLayout

WIDTH, ROW, LABEL = 860, 34, 110
COLORS = {"values": "#7aa6c2", "RoPE": "#c9a66b", "scales": "#9bbf85", "zero": "#d9d9d9", "padding": "#eeeeee"}
BLOCK = 64


def parts_of_row(layout: CacheLayout) -> Iterator[tuple[str, str, int]]:
    """(kind, text, bytes) of a token's row, in order."""
    if not layout.quantized_dim:
        plain = layout.head_dim - layout.rope_dim
        size = VALUE_BITS[layout.value_type] // 8
        yield "values", f"{plain} {layout.value_type}", plain * size
        if layout.rope_dim:
            yield "RoPE", f"{layout.rope_dim}", layout.rope_dim * size
        return
    yield "values", f"{layout.quantized_dim} {layout.value_type}", layout.quantized_bytes
    if layout.scale_placement == "in_row":
        yield "scales", f"{layout.num_scales} {layout.scale_type}", layout.scale_bytes
    if layout.rope_dim:
        yield "RoPE", f"{layout.rope_dim} bfloat16", 2 * layout.rope_dim


def layout_svg(layout: CacheLayout) -> str:
    """A token's row, and below it a page of BLOCK tokens."""
    shapes: list[str] = []
    row = list(parts_of_row(layout))
    _bar(shapes, 20, "a row", row)
    used = BLOCK * layout.row_bytes
    page = [("values", f"{BLOCK} rows of {layout.row_bytes} bytes", used)]
    if layout.scale_placement == "page_tail":
        scales = BLOCK * layout.scale_bytes
        page.append(("scales", f"{BLOCK} x {layout.scale_bytes} scales", scales))
        used += scales
    padding = layout.page_bytes(BLOCK) - used
    if padding:
        page.append(("padding", f"{padding} padding", padding))
    _bar(shapes, 20 + 2 * ROW, f"a page of {BLOCK}", page)
    height = 20 + 4 * ROW
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        'style="max-width: 100%; height: auto" role="img" '
        f'aria-label="{layout.name}: {layout.token_bytes} bytes a token" font-family="sans-serif" font-size="11">'
        + "".join(shapes) + "</svg>"
    )  # fmt: skip


def _bar(shapes: list[str], y: int, name: str, parts: list[tuple[str, str, int]]) -> None:
    """Parts side by side, widths in proportion to sizes but wide enough to be visible; offsets below."""
    total = sum(size for _, _, size in parts)
    least = 100
    room = WIDTH - LABEL - 60 - least * len(parts)
    shapes.append(f'<text x="4" y="{y + ROW / 2 + 4}" fill="currentColor">{html.escape(name)}</text>')
    x, offset = float(LABEL), 0
    for kind, text, size in parts:
        width = least + room * size / total
        where = html.escape(f"{text}: {size} bytes from {offset}")
        shapes.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW}" fill="{COLORS[kind]}" stroke="#555"/>'
            f'<text x="{x + width / 2:.1f}" y="{y + ROW / 2 + 4}" text-anchor="middle" fill="#111">'
            f"{html.escape(_fitting(text, width))}<title>{where}</title></text>"
            f'<text x="{x:.1f}" y="{y + ROW + 13}" fill="currentColor">{offset}</text>'
        )
        x, offset = x + width, offset + size
    shapes.append(f'<text x="{x:.1f}" y="{y + ROW + 13}" text-anchor="end" fill="currentColor">{offset} bytes</text>')


def _fitting(text: str, width: float) -> str:
    most = int(width / 6)
    return text if len(text) <= most else text.split(" ")[0][:most]

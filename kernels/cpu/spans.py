"""Copies of spans of bytes between pages: each is one contiguous copy, for which NumPy is fast."""

from ..reference.spans import copy_spans, copy_spans_across

__all__ = ["copy_spans", "copy_spans_across"]

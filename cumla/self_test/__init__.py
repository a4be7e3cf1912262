"""Small random cases of the operations that have no spec yet."""

from __future__ import annotations

from .arrays import Bench
from .case import Case
from .index_cases import CASES

__all__ = ["CASES", "Bench", "Case"]

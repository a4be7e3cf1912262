"""Small random cases of the operations that have no spec yet."""

from __future__ import annotations

from .arrays import Bench
from .attention_cases import CASES as ATTENTION_CASES
from .case import Case
from .index_cases import CASES as INDEX_CASES

__all__ = ["CASES", "Bench", "Case"]

CASES = (*INDEX_CASES, *ATTENTION_CASES)

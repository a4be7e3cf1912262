"""A case of the self-test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..bounds import Bound
from .arrays import HEADS, Bench

Run: TypeAlias = Callable[[Bench], Sequence[Any]]
UNWRITTEN = 165  # fills memory that an operation must not write


@dataclass(frozen=True)
class Case:
    """call(bench) returns the results to compare; `kernels` is the file of kernels that it needs.

    heads  of `cumla check`; a self-test has the heads of the call that triggered it
    """

    op: str
    variant: str
    kernels: str
    bounds: Sequence[Bound]
    call: Run
    heads: int = HEADS

    def run(self, backend: str, seed: int, heads: int) -> tuple[Sequence[Any], Sequence[Bound]]:
        return self.call(Bench(backend, seed, heads)), self.bounds

"""Cases of the self-test, every variant of every spec at the tiny size, and the comparison with the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..arrays.memory import to_host
from ..bounds import Bound, allowed, compare
from ..dispatch import backends
from . import SPECS
from .inputs import TINY_HEADS, Inputs, tiny
from .spec import OperationSpec, Variant


@dataclass(frozen=True)
class Case:
    """A variant of an operation."""

    spec: OperationSpec
    of_variant: Variant

    @property
    def op(self) -> str:
        return self.spec.name

    @property
    def variant(self) -> str:
        return self.of_variant.name

    @property
    def kernels(self) -> str:
        """The file of kernels that it needs."""
        return self.spec.kernels

    @property
    def heads(self) -> int:
        """Query heads of `cumla check`; a self-test has the heads of the call that triggered it."""
        return self.of_variant.heads

    def arguments(self, x: Inputs) -> dict[str, Any]:
        return self.of_variant.arguments(x)

    def run(self, backend: str, seed: int, heads: int) -> tuple[list[Any], list[Bound | None]]:
        """The results of a call and the arrays that it wrote, and their bounds."""
        arguments = self.arguments(Inputs(backend, tiny(heads), seed))
        return self.spec.run(arguments, backend), self.spec.bounds_of(self.of_variant, arguments)


CASES = tuple(Case(spec, variant) for spec in SPECS.values() for variant in spec.variants)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one case on one backend.

    Attributes:
        error: largest difference; None if nothing was compared
        allowed: the error that the bound allows there; 0: results must be equal
    """

    passed: bool
    error: float | None
    note: str = ""
    allowed: float = 0.0


def check_case(case: Case, backend: str, seed: int, heads: int = TINY_HEADS) -> Outcome:
    """Run a case on a backend and on the reference, with the same inputs. Raises the errors of both."""
    try:
        backends.kernels(backend, case.kernels)
    except ValueError:
        return Outcome(True, None)
    want, bounds = case.run("reference", seed, heads)
    got, _ = case.run(backend, seed, heads)
    passed, found = True, []
    for got_array, want_array, bound in zip(map(to_host, got), map(to_host, want), bounds, strict=True):
        if bound is None:
            continue
        within, difference = compare(got_array, want_array, bound)
        passed = passed and within
        found.append((difference, allowed(got_array, want_array, bound)))
    largest, limit = max(found, default=(0.0, 0.0))
    return Outcome(passed, largest, allowed=limit)

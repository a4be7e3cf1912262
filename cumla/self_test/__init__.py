"""Small random cases of every public operation, and the comparison of a backend's results with the reference's."""

from __future__ import annotations

from dataclasses import dataclass

from ..arrays.memory import to_host
from ..bounds import allowed, compare
from ..dispatch import backends
from .arrays import HEADS, Bench
from .attention_cases import CASES as ATTENTION_CASES
from .cache_cases import CASES as CACHE_CASES
from .case import Case
from .index_cases import CASES as INDEX_CASES

__all__ = ["CASES", "Bench", "Case", "Outcome", "check_case"]

CASES = (*CACHE_CASES, *INDEX_CASES, *ATTENTION_CASES)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one case on one backend.

    error    largest difference; None if nothing was compared
    allowed  the error that the bound allows there; 0: results must be equal
    """

    passed: bool
    error: float | None
    note: str = ""
    allowed: float = 0.0


def check_case(case: Case, backend: str, seed: int, heads: int = HEADS) -> Outcome:
    """Run a case on a backend and on the reference, with the same inputs. Raises the errors of both."""
    try:
        backends.kernels(backend, case.kernels)
    except ValueError:
        return Outcome(True, None)
    want = [to_host(array) for array in case.run(Bench("reference", seed, heads))]
    got = [to_host(array) for array in case.run(Bench(backend, seed, heads))]
    passed, found = True, []
    for got_array, want_array, bound in zip(got, want, case.bounds, strict=True):
        within, difference = compare(got_array, want_array, bound)
        passed = passed and within
        found.append((difference, allowed(got_array, want_array, bound)))
    largest, limit = max(found, default=(0.0, 0.0))
    return Outcome(passed, largest, allowed=limit)

"""Portable kernels on this device: the same calls with the limits of other devices, and with this device's kernels.

Rows `sm_80`, `sm_86` and `sm_89` measure the kernels chosen for a device of that compute capability, run on this
device (docs/kernels/portable.md discusses what this shows).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from record_peers import TORCH_COMPOSED, VLLM_TRITON, torch_sparse, triton_sparse

from cumla.bench import peers, sparse
from cumla.bench.problem import Calls, Problem, Sizes
from cumla.errors import RunError
from cumla.layout import MLA_BF16

# Shared memory of 163 and 99 KB; with 99 KB e4m3 converted by bit operations and by the instruction.
CAPABILITIES = (80, 86, 89)
OF_16_BITS = (80, 86)  # for cases without e4m3
BY_BITS = (86, 89)  # for kernels with little shared memory: e4m3 by bit operations and by the instruction
PEERS_DIFFER = 0.02


@dataclass(frozen=True)
class WithLimits:
    """A case with this device's kernels, and with the kernels for other capabilities.

    Attributes:
        beside: whether other libraries run it, too, if its rows are 16-bit
    """

    case: Any
    capabilities: tuple[int, ...] = CAPABILITIES
    beside: bool = False

    @property
    def op(self) -> str:
        return str(self.case.op)

    def __str__(self) -> str:
        return str(self.case)

    def problem(self, sizes: Sizes) -> Problem:
        problems = {"cumla": self.case.problem(sizes)}
        if sizes.backend == "cuda":
            problems |= {f"sm_{x}": self.case.problem(sizes) for x in self.capabilities}
        first = problems["cumla"]
        ran = [first]  # the last problem that ran: its result is checked

        def noted(problem: Problem, call: Callable[[], Any]) -> Any:
            ran[0] = problem
            return call()

        impls: dict[str, tuple[str, Calls]] = {}
        for name, x in problems.items():
            calls = [functools.partial(noted, x, call) for call in x.impls["cumla"][1]]
            if name != "cumla":
                calls = [functools.partial(with_limits, int(name.removeprefix("sm_")), call) for call in calls]
            impls[name] = "cupy", calls
        functions = {}
        for name, function, others in self._peers(first) if self.beside and sizes.backend == "cuda" else ():
            impls[name] = "torch", others
            functions[name] = function

        def clear() -> None:
            for x in problems.values():
                if x.clear is not None:
                    x.clear()

        def check(result: Any) -> float:
            return ran[0].check(result) if ran[0].check is not None else 0.0

        return Problem(
            first.op,
            first.config,
            impls,
            first.bytes_moved,
            first.flop,
            check,
            clear,
            functions,
            unchecked=("triton", "torch"),
        )

    def _peers(self, problem: Problem) -> Iterator[tuple[str, str, Calls]]:
        """Name, function and calls of other libraries' implementations, on a problem's arrays."""
        operands = [_rows_of(self.case, call) for call in problem.impls["cumla"][1]]
        for name, function, peer in (
            ("triton", VLLM_TRITON, triton_sparse), ("torch", TORCH_COMPOSED, torch_sparse),
        ):  # fmt: skip
            calls = [None if x is None else peer(*x) for x in operands]
            found = [call for call in calls if call is not None]
            if found:
                _compare(problem.impls["cumla"][1][0](), found[0](), name)
                yield name, function, found


def _compare(ours: Any, theirs: Any, name: str) -> None:
    """Raises RunError if a peer's result differs by more than the rounding of its weights to bfloat16."""
    own = peers.tensor(ours[0] if isinstance(ours, tuple) else ours).float()
    beyond = float((own.reshape(theirs.shape) - theirs.float()).abs().max()) / float(own.abs().max())
    if not beyond < PEERS_DIFFER:
        raise RunError(f"{name}: off by {beyond:.2g} of the largest value, expected less than {PEERS_DIFFER}")


def _rows_of(case: Any, call: Any) -> tuple[Any, Any, Any] | None:
    """Queries [t, h, d], rows [n, d] and indices [t, topk] of a call; None if rows are not 16-bit."""
    if isinstance(case, sparse.Prefill) and not case.lengths:
        q, rows, indices = (call.keywords[name] for name in ("q", "kv", "indices"))
        return q, rows, indices
    if isinstance(case, sparse.Decode) and case.layout is MLA_BF16:
        q, indices, rows = (call.args[0].arguments[name] for name in ("q", "indices", "k_cache"))
        flat = rows.reshape(-1, rows.shape[-1]).view(q.dtype)
        return q.reshape(-1, *q.shape[2:]), flat, indices.reshape(-1, indices.shape[-1])
    return None


def with_limits(capability: int, call: Callable[[], Any]) -> Any:
    """The call with the kernels for a device of this capability."""
    from cumla.kernels.cuda.device import assumed
    from cumla.kernels.cuda.launch import recorded_launches

    with assumed(capability), recorded_launches():
        return call()


def compiling(cases: list[Any]) -> list[Any]:
    """The cases, after threads have started to compile their programs: one after another they take minutes."""
    from cumla.kernels.cuda import compile as compiler

    for case in cases:
        compile_ahead(case, Sizes("cuda"))
    compiler.look_first_in(*compiler.FOLDERS[:-1])  # drops the objects that replaced unlaunched kernels
    return cases


def compile_ahead(case: WithLimits, sizes: Sizes) -> None:
    """Start to compile a case's programs in threads; if that fails, the first call compiles them."""
    from cumla.kernels.cuda.compile import programs_asked_for

    own = case.case.problem(sizes).impls["cumla"][1][0]
    for call in (own, *(functools.partial(with_limits, x, own) for x in case.capabilities)):
        try:
            with programs_asked_for():
                call()
        except AttributeError:  # decodes first query the number of a kernel's clusters
            call()
        except Exception:
            continue

"""Portable kernels on a stand-in: the same calls with the limits of other devices, beside this device's own kernels.

Rows `sm_80`, `sm_86` and `sm_89` are of kernels that a device of that compute capability gets, run on this one
(docs/kernels/portable.md says what that shows). `share` is the part of the instructions' pace that a row reaches: its
FLOP at the pace of mma.sync or its bytes at the memory's, whichever takes longer, over its time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import RunError
from ..layout import DSV4_FP8, DSV41_FP8, INDEXER_FP8, INDEXER_MXFP4, MLA_BF16, V32_FP8
from . import caches, dense, indexer_cases, instructions, layer_suites, peers, products, sparse
from .measure import BYTES_PER_US
from .problem import Calls, Problem, Sizes

# Shared memory of 163 and 99 KB; of the latter with e4m3 converted by bits and by the instruction.
CAPABILITIES = (80, 86, 89)
OF_16_BITS = (80, 86)  # for cases without e4m3
BY_BITS = (86, 89)  # for those whose kernels take little shared memory: e4m3 by bits and by the instruction
PEERS_DIFFER = 0.02


@dataclass(frozen=True)
class WithLimits:
    """A case by this device's kernels, and by those of other capabilities.

    beside  of 16-bit rows: also by other libraries
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
        ran = [first]  # whose result is checked

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
        """Other libraries' implementations on the arrays of a problem: name, function and calls."""
        given = [_rows_of(self.case, call) for call in problem.impls["cumla"][1]]
        for name, function, peer in (
            ("triton", peers.VLLM_TRITON, peers.triton_sparse), ("torch", peers.TORCH_COMPOSED, peers.torch_sparse),
        ):  # fmt: skip
            calls = [None if x is None else peer(*x) for x in given]
            found = [call for call in calls if call is not None]
            if found:
                _compare(problem.impls["cumla"][1][0](), found[0](), name)
                yield name, function, found


def _compare(ours: Any, theirs: Any, name: str) -> None:
    """Raises RunError if a peer's result is not ours but for the rounding of its weights to bfloat16."""
    own = peers.tensor(ours[0] if isinstance(ours, tuple) else ours).float()
    beyond = float((own.reshape(theirs.shape) - theirs.float()).abs().max()) / float(own.abs().max())
    if not beyond < PEERS_DIFFER:
        raise RunError(f"{name}: off by {beyond:.2g} of the largest value, expected less than {PEERS_DIFFER}")


def _rows_of(case: Any, call: Any) -> tuple[Any, Any, Any] | None:
    """Queries [t, h, d], rows [n, d] and indices [t, topk] of a call; None: not of 16 bits."""
    if isinstance(case, sparse.Prefill) and not case.lengths:
        q, rows, indices = call.args[:3]
        return q, rows, indices
    if isinstance(case, sparse.Decode) and case.layout is MLA_BF16:
        inputs = call.args[0]
        q, indices, rows = inputs.q, inputs.lists[0], inputs.caches[0].array
        flat = rows.reshape(-1, rows.shape[-1]).view(q.dtype)
        return q.reshape(-1, *q.shape[2:]), flat, indices.reshape(-1, indices.shape[-1])
    return None


def with_limits(capability: int, call: Callable[[], Any]) -> Any:
    """The call as a device of this capability would make it."""
    from ..kernels.cuda.device import assumed
    from ..kernels.cuda.launch import recorded_launches

    with assumed(capability), recorded_launches():
        return call()


def compiling() -> list[Any]:
    """The recorded cases, while threads compile what they call: one program after another takes minutes."""
    from ..kernels.cuda import compile as compiler

    cases = recorded()
    for case in cases:
        if isinstance(case, WithLimits):
            compile_ahead(case, Sizes("cuda"))
    compiler.look_first_in(*compiler.FOLDERS[:-1])  # forgets the placeholders of kernels that were not launched
    return cases


def compile_ahead(case: WithLimits, sizes: Sizes) -> None:
    """Start to compile, in threads, what a case calls; what fails here is compiled when it is called."""
    from ..kernels.cuda.compile import programs_asked_for

    own = case.case.problem(sizes).impls["cumla"][1][0]
    for call in (own, *(functools.partial(with_limits, x, own) for x in case.capabilities)):
        try:
            with programs_asked_for():
                call()
        except AttributeError:  # decodes first ask the device how many clusters a kernel has
            call()
        except Exception:
            continue


def shares(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Add `share` to rows; the pace of the instructions, which the rows of `instructions` have measured."""
    rows = list(rows)
    paces = [row["tflops"] for row in rows if row["op"] == instructions.Products.op and row.get("tflops")]
    pace = min(paces) if paces else None
    for row in rows:
        us = row.get("us_graph")
        if not us or pace is None or row["op"] in (instructions.Products.op, instructions.Copies.op):
            continue
        flop, moved = (row.get("tflops") or 0) * us * 1e6, (row.get("gbps") or 0) * us * 1e3
        row["limit_us"] = max(flop / pace / 1e6, moved / BYTES_PER_US)
        row["share"] = row["limit_us"] / us
    return {"mma_sync_tflops": pace}


def recorded() -> list[Any]:
    k = 1024
    v4, v32, bf16 = (functools.partial(sparse.Decode, x, slots=1 << 19) for x in (DSV4_FP8, V32_FP8, MLA_BF16))
    v41 = functools.partial(sparse.Decode, DSV41_FP8, slots=1 << 19)
    of_16_bits = functools.partial(WithLimits, capabilities=OF_16_BITS)
    beside = functools.partial(of_16_bits, beside=True)
    by_bits = functools.partial(WithLimits, capabilities=BY_BITS)
    return [
        *instructions.recorded(),
        beside(sparse.Prefill(512, 64, 640, 32 * k)),
        of_16_bits(sparse.Prefill(512, 64, 2 * k, 32 * k)),
        beside(sparse.Prefill(576, 128, 2 * k, 32 * k, 2 * k)),
        of_16_bits(sparse.Prefill(512, 16, 640, 32 * k)),
        *(
            WithLimits(v4(64, b, s, 128, 512, 256, lengths=True))
            for b, s in ((1, 1), (8, 1), (32, 1), (128, 1), (128, 2))
        ),
        *(WithLimits(v4(heads, 128, 1, 128, k, 256, lengths=True)) for heads in (16, 128)),
        *(WithLimits(v32(128, b, 1, 2 * k, lengths=True)) for b in (1, 32, 128)),
        *(WithLimits(v41(64, b, 1, 128, 512, 32, lengths=True, ratio=2)) for b in (1, 32, 128)),
        of_16_bits(bf16(128, 1, 1, 2 * k, lengths=True)),
        *(beside(bf16(128, b, 1, 2 * k, lengths=True)) for b in (32, 128)),
        *(WithLimits(dense.DenseDecode(128, b, 8 * k, lengths=True)) for b in (16, 128)),
        of_16_bits(dense.DensePrefill(16, 8 * k)),
        WithLimits(indexer_cases.Logits(8 * k, 32 * k, lengths=True)),
        *(WithLimits(indexer_cases.PagedLogits(*x, 1, lengths=True)) for x in ((32, 8 * k), (128, 32 * k))),
        WithLimits(indexer_cases.PagedLogits(32, 8 * k, 1, lengths=True, layout=INDEXER_MXFP4)),
        *(of_16_bits(indexer_cases.Choice("decode", rows, 32 * k, 512, lengths=True)) for rows in (32, 128)),
        of_16_bits(indexer_cases.Choice("prefill", 8 * k, 32 * k, 512, lengths=True)),
        *(of_16_bits(layer_suites.Compress(*x)) for x in ((4, 32), (4, 4096), (128, 4096))),
        *(by_bits(products.BlockLinear(tokens, 1536, 4 * k)) for tokens in (32, 128)),
        *(by_bits(caches.Insert(32 * k, layout)) for layout in (DSV4_FP8, INDEXER_FP8)),
        by_bits(caches.Gather(16, 8 * k)),
        by_bits(caches.KeyGather(16, 8 * k)),
    ]

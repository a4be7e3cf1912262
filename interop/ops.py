"""Descriptions of the operations for frameworks' compilers: their arrays, the written arrays, and the results.

`interop.jax` and `interop.torch` derive from this table, so each operation is described once; tests compare the table
with the public functions (tests/ops/test_registry.py).
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..arrays import dlpack
from ..kernels.types.plan import DecodePlan, DenseDecodePlan
from ..layout import INDEXER_MXFP4
from ..ops import candidates, indexer, indexer_topk
from ..specs import SPECS
from ..specs.spec import OperationSpec, Result, no_results, shape


@dataclass(frozen=True)
class Op:
    """A public function of cumla.

    function  the function
    writes    arguments that it writes in place, in the order of its parameters
    given     groups of optional arguments in `writes`: a call passes all arguments of a group or none, and a group only
              with the groups before it
    results   arguments by name -> its results; shapes may be symbolic
    outputs   the keywords that take its results: one for each, or a single one for a tuple of results
    eager     keywords of eager calls only, for further written arrays
    scratch   arguments by name -> bytes of temporary device memory that it needs, or 0; None: none
    plan      the plan that passes this memory to its kernels; None: the argument `workspace` passes it
    """

    function: Callable[..., Any]
    writes: tuple[str, ...] = ()
    given: tuple[tuple[str, ...], ...] = ()
    results: Callable[[Mapping[str, Any]], tuple[Result, ...]] = no_results
    outputs: tuple[str, ...] = ()
    eager: tuple[str, ...] = ()
    scratch: Callable[[Mapping[str, Any]], int] | None = None
    plan: type[DecodePlan | DenseDecodePlan] | None = DecodePlan

    @classmethod
    def of(cls, spec: OperationSpec) -> Op:
        writes = tuple(name for name in spec.writes if name not in spec.eager)
        return cls(spec.function, writes, spec.given, spec.results, spec.outputs, spec.eager, spec.scratch, spec.plan)

    @property
    def name(self) -> str:
        return self.function.__name__

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """The parameters without outputs and without parameters for eager calls only: memory, a stream, `eager`."""
        signature = inspect.signature(self.function)
        left_out = {*self.outputs, *self.eager, "plan", "stream", "accumulate", "workspace"}
        return signature.replace(
            parameters=[parameter for name, parameter in signature.parameters.items() if name not in left_out],
            return_annotation=Any,
        )

    @functools.cached_property
    def arrays(self) -> tuple[str, ...]:
        """The parameters that are arrays, in order."""
        parameters = self.signature.parameters.items()
        return tuple(name for name, parameter in parameters if parameter.annotation in ("Any", "Any | None"))

    def with_pair_apart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call's arguments with the pair kv split into keys and scales, because compilers take only arrays."""
        kv = args[1] if len(args) > 1 else kwargs.get("kv")
        if "kv_scales" not in self.arrays or not isinstance(kv, tuple) or kwargs.get("kv_scales") is not None:
            return args, kwargs
        if len(kv) != 2:
            raise ValueError(f"kv: got {len(kv)} arrays, expected (k, scales) or one array")
        keys, scales = kv
        if len(args) > 1:
            return (args[0], keys, *args[2:]), {**kwargs, "kv_scales": scales}
        return args, {**kwargs, "kv": keys, "kv_scales": scales}

    def scratch_bytes(self, arguments: Mapping[str, Any]) -> int:
        """Bytes of temporary device memory for a call, 0 for none."""
        return 0 if self.scratch is None else self.scratch(arguments)

    def run(self, arguments: Mapping[str, Any], results: tuple[Any, ...], scratch: Any = None) -> None:
        """Call the function on arrays with memory, on the caller's current stream.

        results, scratch  arrays for the results and the temporary memory
        """
        as_one = len(self.outputs) == 1 and len(results) > 1
        given = dict(zip(self.outputs, (results,) if as_one else results, strict=True))
        if scratch is not None:
            memory = dlpack.borrow(scratch, "scratch", writable=True)
            given |= {"workspace": memory} if self.plan is None else {"plan": self.plan(memory)}
        self.function(**arguments, **given)


def queries_results(arguments: Mapping[str, Any]) -> tuple[Result, ...]:
    tokens, heads, dim = shape(arguments, "index_q", "T", "H", "D")
    if arguments.get("q_format") == "mxfp4_rows":
        dim = INDEXER_MXFP4.token_bytes
    return Result((tokens, heads, dim), "uint8" if arguments.get("quantize", True) else "float32"), Result(
        (tokens, heads), "float32"
    )


def logits_results(arguments: Mapping[str, Any]) -> tuple[Result, ...]:
    tokens, _, _ = shape(arguments, "q", "M", "H", "D")
    return (Result((tokens, arguments.get("max_seqlen_k") or arguments["kv"].shape[0]), "float32"),)


def paged_width(arguments: Mapping[str, Any], cache: str) -> Any:
    given = arguments.get("max_context_len")
    return given if given is not None else arguments["block_table"].shape[1] * arguments[cache].shape[1]


def paged_logits_results(arguments: Mapping[str, Any]) -> tuple[Result, ...]:
    batch, next_n, _, _ = shape(arguments, "q", "B", "next_n", "H", "D")
    return (Result((batch * next_n, paged_width(arguments, "kv_cache")), "float32"),)


def schedule_results(arguments: Mapping[str, Any]) -> tuple[Result, ...]:
    return (Result((arguments["num_sms"] + 1, 2), "int32"),)


def choice_results(arguments: Mapping[str, Any]) -> tuple[Result, ...]:
    rows, _ = shape(arguments, "logits", "M", "N")
    return (Result((rows, arguments["topk"]), "int32"),)


def indexer_topk_results(arguments: Mapping[str, Any]) -> tuple[Result, ...]:
    *tokens, _, _ = arguments["q"].shape
    return (Result((math.prod(tokens), arguments["topk"]), "int32"),)


def selected_blocks_results(arguments: Mapping[str, Any]) -> tuple[Result, ...]:
    rows, _ = shape(arguments, "logits", "M", "N")
    return (Result((rows, arguments.get("topk_blocks", candidates.TOPK_BLOCKS)), "int32"),)


def selected_blocks_scratch(arguments: Mapping[str, Any]) -> int:
    rows, columns = shape(arguments, "logits", "M", "N")
    return bounded_scratch(arguments, rows, candidates.blocks_of(columns, candidate_block_size(arguments)))


def candidate_block_size(arguments: Mapping[str, Any]) -> int:
    return int(arguments.get("candidate_block_size", candidates.CANDIDATE_BLOCK))


def candidate_logits_results(arguments: Mapping[str, Any]) -> tuple[Result, ...]:
    tokens, blocks = shape(arguments, "candidate_blocks", "T", "K")
    return (Result((tokens, blocks * candidate_block_size(arguments)), "float32"),)


def candidate_topk_results(arguments: Mapping[str, Any]) -> tuple[Result, ...]:
    tokens, _ = shape(arguments, "candidate_blocks", "T", "K")
    return (Result((tokens, arguments["topk"]), "int32"),)


def candidate_topk_scratch(arguments: Mapping[str, Any]) -> int:
    tokens, blocks = shape(arguments, "candidate_blocks", "T", "K")
    return bounded_scratch(arguments, tokens, blocks * candidate_block_size(arguments))


def bounded_scratch(arguments: Mapping[str, Any], rows: int, width: int) -> int:
    """Bytes for rows of float32, in passes that `max_workspace_bytes` allows."""
    row_bytes = indexer_topk.logits_row_bytes(width)
    most = max(arguments.get("max_workspace_bytes", indexer_topk.WORKSPACE_BYTES), row_bytes)
    return int(min(most, rows * row_bytes))


def indexer_topk_scratch(arguments: Mapping[str, Any]) -> int:
    paged = arguments.get("block_table") is not None
    width = paged_width(arguments, "kv") if paged else arguments.get("max_seqlen_k") or int(arguments["kv"].shape[0])
    return bounded_scratch(arguments, math.prod(arguments["q"].shape[:-2]), width)


OPS = {
    op.name: op
    for op in (
        *(Op.of(spec) for spec in SPECS.values() if spec.compiled),
        Op(indexer.fused_indexer_q_rope_quant, results=queries_results, outputs=("out",)),
        Op(indexer.fp8_mqa_logits, results=logits_results, outputs=("out",)),
        Op(indexer.fp8_paged_mqa_logits, results=paged_logits_results, outputs=("out",)),
        Op(indexer.get_paged_mqa_logits_metadata, results=schedule_results, outputs=("out",)),
        Op(indexer_topk.top_k_per_row, results=choice_results, outputs=("out",)),
        Op(
            indexer_topk.indexer_topk,
            results=indexer_topk_results,
            outputs=("out",),
            eager=("slots", "is_valid_token", "candidate_blocks", "candidate_block_size"),
            scratch=indexer_topk_scratch,
            plan=None,
        ),
        Op(
            candidates.select_candidate_blocks,
            results=selected_blocks_results,
            outputs=("out",),
            scratch=selected_blocks_scratch,
            plan=None,
        ),
        Op(candidates.apply_candidate_mask, writes=("logits",)),
        Op(candidates.candidate_logits, results=candidate_logits_results, outputs=("out",)),
        Op(
            candidates.candidate_topk,
            results=candidate_topk_results,
            outputs=("out",),
            scratch=candidate_topk_scratch,
            plan=None,
        ),
    )
}

"""Metadata of dense multi-head latent attention: prefill in chunks of context, decode over the pages.

A step has two kinds of requests. Decodes (few query tokens over a long context) attend in the latent space, where
a key is one row of 576 values for all heads. Prefills attend to their new tokens with K and V projected up for
each head, and to their context chunk by chunk, so that the projected keys fit in one workspace; the partial results
are merged by their LSE.

Batches are decode-first, as everywhere in cumla. vLLM's first engine puts prefills first: `mla_groups` reorders
its sequence groups and returns the new order of the tokens.
Source: vLLM vllm.attention.backends.mla.common.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..arrays import dlpack, streams
from ..dispatch.call import INT32, SLOTS, Call
from ..dispatch.values import check_flags, check_integers, shown
from ..kernels.types.plan import DenseDecodePlan
from ..layout import MLA_BF16
from ..ops.advance import advance_step
from .validation import check_columns

SUPPORTED_HEAD_SIZES = (MLA_BF16.head_dim,)
INT32_MAX = 2**31 - 1


@dataclass
class MLACommonMetadata:
    """Metadata that the dense layers of one step share. The batch is decode-first: decodes, then prefills.

    Attributes:
        num_prefills, num_prefill_tokens, num_decodes, num_decode_tokens: host counts; the decodes' queries all have the
            same length, max_decode_query_len. Without prefills, decodes without a query may follow, and
            num_decode_tokens may include padding tokens; num_prefill_tokens never does
        slot_mapping: [>= num_decode_tokens + num_prefill_tokens] int64 or int32, -1 skips a token
        seq_lens: host list, tokens of each request, the new ones included
        seq_lens_tensor: [num_reqs] int32
        max_prefill_seq_len, max_decode_seq_len: longest sequence of each kind, or a bound on it; 0 without such
            requests
        context_lens_tensor: [num_reqs] int32, tokens that were in the cache before this step
        block_tables: [num_reqs, B] int32
        max_query_len, max_decode_query_len: longest query of all requests and of decodes
        query_start_loc: [num_reqs + 1] int32, first query token of each request
        seq_start_loc: [num_reqs + 1] int32, prefix sums of seq_lens; int64 if int32 cannot hold them
        use_cuda_graph: whether a captured graph runs this batch
        head_dim: values of a cached row; 576
        is_profile_run: whether the step only measures how much memory is needed
        context_chunk_cu_seq_lens: [num_chunks, num_prefills + 1] int32; this and the following fields are None if no
            prefill has context
        context_chunk_starts: [num_chunks, num_prefills] int32
        context_chunk_seq_tot, context_chunk_max_seq_lens: host lists [num_chunks]
        context_chunk_workspace: [rows, head_dim] 16-bit, set by MLACommonState.begin_forward
        block_size: tokens of a page; None: not checked against the cache's
        batch_invariant: whether the step is for batch-invariant layers, as the builder's config has it
        decode_plan: plan of this step's decodes into splits: the first layer's call computes it, the others share it.
            None: each layer has a plan of its own

    Raises ValueError for a head_dim other than 576.
    """

    num_prefills: int
    num_prefill_tokens: int
    num_decode_tokens: int
    slot_mapping: Any
    seq_lens: list[int] | None
    seq_lens_tensor: Any
    max_prefill_seq_len: int
    max_decode_seq_len: int
    context_lens_tensor: Any
    block_tables: Any
    num_decodes: int = 0
    use_cuda_graph: bool = False
    max_query_len: int | None = None
    max_decode_query_len: int | None = None
    query_start_loc: Any = None
    seq_start_loc: Any = None
    head_dim: int | None = None
    is_profile_run: bool = False
    context_chunk_cu_seq_lens: Any = None
    context_chunk_starts: Any = None
    context_chunk_seq_tot: list[int] | None = None
    context_chunk_max_seq_lens: list[int] | None = None
    context_chunk_workspace: Any = None
    block_size: int | None = None
    batch_invariant: bool = False
    decode_plan: DenseDecodePlan | None = field(default=None, repr=False, compare=False)
    _views: dict[str, MLACommonMetadata] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.head_dim is not None:
            check_head_size("head_dim", self.head_dim)

    def __copy__(self) -> MLACommonMetadata:
        return dataclasses.replace(self)  # the copy gets its own views

    @property
    def num_attending_decode_tokens(self) -> int:
        """Decode tokens of requests, without padding tokens."""
        query_len = self.max_decode_query_len or 1
        return min(self.num_decode_tokens // query_len, self.num_decodes) * query_len

    @property
    def prefill_metadata(self) -> MLACommonMetadata | None:
        """The prefills only, with query_start_loc and seq_start_loc from the first prefill; None without prefills."""
        if not self.num_prefills:
            return None
        if "prefill" not in self._views:
            first, first_token = self.num_decodes, self.num_decode_tokens
            self._views["prefill"] = dataclasses.replace(
                self,
                num_decodes=0,
                num_decode_tokens=0,
                slot_mapping=_from(self.slot_mapping, first_token),
                seq_lens=_from(self.seq_lens, first),
                seq_lens_tensor=_from(self.seq_lens_tensor, first),
                max_decode_seq_len=0,
                context_lens_tensor=_from(self.context_lens_tensor, first),
                block_tables=_from(self.block_tables, first),
                use_cuda_graph=False,
                max_decode_query_len=0,
                query_start_loc=_rebased(self.query_start_loc, first),
                seq_start_loc=_rebased(self.seq_start_loc, first),
            )
        return self._views["prefill"]

    @property
    def decode_metadata(self) -> MLACommonMetadata | None:
        """The decodes only; None without decodes.

        max_query_len is the decodes' longest query, context_lens_tensor the decodes' part. In vLLM's view they are the
        batch's longest query and None.
        """
        if not self.num_decode_tokens:
            return None
        if "decode" not in self._views:
            end = self.num_decodes
            self._views["decode"] = dataclasses.replace(
                self,
                num_prefills=0,
                num_prefill_tokens=0,
                slot_mapping=_to(self.slot_mapping, self.num_decode_tokens),
                seq_lens=_to(self.seq_lens, end),
                seq_lens_tensor=_to(self.seq_lens_tensor, end),
                max_prefill_seq_len=0,
                context_lens_tensor=_to(self.context_lens_tensor, end),
                block_tables=_to(self.block_tables, end),
                max_query_len=self.max_decode_query_len,
                query_start_loc=_to(self.query_start_loc, end + 1),
                seq_start_loc=_to(self.seq_start_loc, end + 1),
                context_chunk_cu_seq_lens=None,
                context_chunk_starts=None,
                context_chunk_seq_tot=None,
                context_chunk_max_seq_lens=None,
                context_chunk_workspace=None,
            )
        return self._views["decode"]

    def advance_step(
        self,
        model_input: Any,
        sampled_token_ids: Any,
        block_size: int,
        num_seqs: int,
        num_queries: int,
        turn_prefills_into_decodes: bool = False,
        *,
        backend: str | None = None,
        stream: Any = None,
    ) -> None:
        """Advance to the next decode step in place: each sequence gets the token sampled for it.

        Args:
            model_input: has `input_tokens` and `input_positions`, [>= num_seqs] int64 or int32, written
            sampled_token_ids: [>= num_queries] or [>= num_queries, 1] int64 or int32
            num_seqs, num_queries: sequences with and without the padding of a captured graph's batch
            turn_prefills_into_decodes: whether this step's prefills have completed their prompt and decode from now on

        seq_lens, its tensor and slot_mapping advance on the device as by `cumla.advance_step`. Derived fields
        (context_lens_tensor, seq_start_loc, query_start_loc, the longest lengths) are updated; fields that are None, as
        in a captured graph's metadata, stay None.
        Raises ValueError, before anything is written, for metadata that is not a decode step of `num_seqs`, and for
        block_tables too narrow for the next token.
        """
        check_integers(0, num_seqs=num_seqs, num_queries=num_queries)
        check_flags(turn_prefills_into_decodes=turn_prefills_into_decodes)
        num_seqs, num_queries = int(num_seqs), int(num_queries)
        if num_seqs < num_queries:
            raise ValueError(f"num_seqs: got {num_seqs}, expected at least num_queries = {num_queries}")
        for name in ("input_tokens", "input_positions"):
            if not hasattr(model_input, name):
                raise TypeError(f"model_input: got {shown(model_input)}, expected an object with {name}")
        num_decodes = self.num_decodes + self.num_prefills if turn_prefills_into_decodes else self.num_decodes
        if not turn_prefills_into_decodes and (self.num_prefills or self.max_query_len != 1):
            raise ValueError(
                f"num_prefills: got {self.num_prefills} prefills and queries of up to {self.max_query_len} tokens, "
                "expected decodes of one token each, or turn_prefills_into_decodes=True"
            )
        if num_decodes != num_seqs or (self.seq_lens is not None and len(self.seq_lens) != num_seqs):
            raise ValueError(f"num_seqs: got {num_seqs}, expected {num_decodes}, the requests of this metadata")
        if len(self.slot_mapping) < num_seqs:
            raise ValueError(f"slot_mapping: got {len(self.slot_mapping)} entries, expected at least {num_seqs}")

        framework = dlpack.framework_of(self.seq_lens_tensor)
        call = Call(backend, stream)
        lens = call.array("seq_lens_tensor", self.seq_lens_tensor, INT32, (num_seqs,), writable=True)
        contexts = call.optional("context_lens_tensor", self.context_lens_tensor, INT32, (num_seqs,), writable=True)
        seq_starts = call.optional("seq_start_loc", self.seq_start_loc, SLOTS, (num_seqs + 1,), writable=True)
        if seq_starts is not None and seq_starts.dtype in INT32 and self.seq_lens is not None:
            total = sum(self.seq_lens) + num_queries
            if total > INT32_MAX:
                raise ValueError(f"seq_start_loc: got int32, expected int64 for {total} tokens")
        check_integers(1, block_size=block_size)
        if self.seq_lens is not None and not self.is_profile_run:
            tables = call.array("block_tables", self.block_tables, INT32, (-1, -1))
            check_columns("block_tables", tables, block_size, max(self.seq_lens[:num_queries], default=-1) + 1)
        slots = self.slot_mapping[:num_seqs]
        advance_step(
            num_seqs, num_queries, block_size, model_input.input_tokens, sampled_token_ids,
            model_input.input_positions, self.seq_lens_tensor, slots, self.block_tables,
            backend=backend, stream=stream,
        )  # fmt: skip
        with streams.callers(lens, framework, stream):
            xp = dlpack.namespace_of(lens)
            if contexts is not None:
                contexts[:num_queries] = lens[:num_queries] - 1
            if seq_starts is not None:
                xp.cumsum(lens, dtype=seq_starts.dtype, out=seq_starts[1:])
            if turn_prefills_into_decodes:
                self.query_start_loc = dlpack.give(xp.arange(num_seqs + 1, dtype=np.int32), framework)

        if self.seq_lens is not None:
            self.seq_lens = [n + (i < num_queries) for i, n in enumerate(self.seq_lens)]
        self.slot_mapping = slots
        self.num_decodes, self.num_decode_tokens = num_seqs, num_seqs
        self.num_prefills = self.num_prefill_tokens = self.max_prefill_seq_len = 0
        self.max_query_len = self.max_decode_query_len = 1
        if self.seq_lens is not None:
            self.max_decode_seq_len = max(self.seq_lens, default=0)
        elif not self.use_cuda_graph:  # a graph has one bound for all steps
            self.max_decode_seq_len += 1
        self.context_chunk_cu_seq_lens = self.context_chunk_starts = None
        self.context_chunk_seq_tot = self.context_chunk_max_seq_lens = None
        self._views.clear()
        if self.decode_plan is not None:
            self.decode_plan.renew()


def check_head_size(name: str, head_size: int) -> None:
    """Raises ValueError unless head_size is the size of MLA rows, TypeError unless it is an integer."""
    check_integers(1, **{name: head_size})
    if head_size not in SUPPORTED_HEAD_SIZES:
        raise ValueError(f"{name}: got {head_size}, expected one of {', '.join(map(str, SUPPORTED_HEAD_SIZES))}")


def _from(array: Any, first: int) -> Any:
    return None if array is None else array[first:]


def _rebased(starts: Any, first: int) -> Any:
    """The starts from `first` on, relative to the first of these."""
    return starts if starts is None or not first else starts[first:] - starts[first : first + 1]


def _to(array: Any, end: int) -> Any:
    return None if array is None else array[:end]

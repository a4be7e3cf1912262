"""A step's batch, and the order of its requests.

A batch is decode-first: requests with few query tokens (decodes) come before those with many (prefills).
Each array that a kernel needs on the device has a `_cpu` copy in host memory, so that nothing is read back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..arrays import dlpack, streams
from ..dispatch.call import INT32, SLOTS, Call
from ..dispatch.values import check_flags, check_integers, plain, plain_integers
from .slots import MOST_TOKENS, compute_slot_mapping

PADDING_SLOT = -1


COUNTS = {"num_reqs": 0, "num_actual_tokens": 0, "max_query_len": 0, "max_seq_len": -1}  # the least value of each


@dataclass
class CommonAttentionMetadata:
    """One batch, shared by all layers and builders.

    Attributes:
        query_start_loc: [num_reqs + 1] int32, first query token of each request; on the device
        query_start_loc_cpu: the same in host memory
        seq_lens: [num_reqs] int32, tokens of each request, the new ones included; on the device
        seq_lens_cpu: the same in host memory
        num_computed_tokens_cpu: [num_reqs] int32 in host memory, tokens already in the cache
        num_reqs: requests, padding requests (no query tokens) included
        num_actual_tokens: query tokens; may include padding tokens after the last request's
        max_query_len: longest query, or a bound on it
        block_table_tensor: [num_reqs, B] int32, page of each block_size positions; on the device
        slot_mapping: [>= num_actual_tokens] int64 or int32, cache slot of each new token; -1 skips it
        max_seq_len: longest sequence, or a bound on it; -1: taken from seq_lens_cpu
        block_size: positions of a page, if known: a builder whose pages have another size refuses the batch

    Fields may be assigned between builds, as engines do that draft several tokens. If sequences become longer,
    max_seq_len must be assigned, too. A count is checked when it is assigned, the other fields by the builders.
    Source: vLLM CommonAttentionMetadata. There, constructing it fills the tail of slot_mapping with -1;
    here nothing is written until `pad_slot_mapping` is called.
    `from_lengths` fills all fields from host lengths and a block table.
    """

    query_start_loc: Any
    query_start_loc_cpu: Any
    seq_lens: Any
    seq_lens_cpu: Any
    num_computed_tokens_cpu: Any
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    block_table_tensor: Any
    slot_mapping: Any
    max_seq_len: int = -1
    block_size: int | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in COUNTS and (value.__class__ is not int or not 0 <= value <= MOST_TOKENS):
            check_integers(COUNTS[name], **{name: value})
            value = plain(value)
            if value < 0:
                value = int(host_integers("seq_lens_cpu", self.seq_lens_cpu).max(initial=0))
        self.__dict__[name] = value

    @classmethod
    def from_lengths(
        cls,
        query_lens: Sequence[int] | Any,
        seq_lens: Sequence[int] | Any,
        block_table: Any,
        block_size: int,
        xp: Any = None,
        *,
        backend: str | None = None,
    ) -> CommonAttentionMetadata:
        """The batch of requests with these lengths; slots of their new tokens come from the block table.

        Args:
            query_lens: [num_reqs] integers on the host, new tokens of each request. Decodes come first: the builders
                raise for a request of at most 1 + num_speculative_tokens that follows a longer one
            seq_lens: [num_reqs] integers on the host, tokens of each request, the new ones included
            block_table: [num_reqs, B] int32, page of each block_size positions, wide enough for each sequence. A token
                whose page is negative gets slot -1 and is not inserted
            block_size: positions of a page
            xp: numpy or cupy, the module of the batch's arrays; for cupy, a block table in host memory is copied to
                CuPy's current device. None: arrays of the block table's framework, on its device

        Each array is copied to the device once, on the current stream of the framework, and the slots are computed
        there; nothing is read back. The lengths are copied, the block table is not. The `_cpu` arrays are NumPy arrays;
        for a batch in host memory the other arrays share their memory, unless they are JAX's.

        Calls during a capture raise an error: the CUDA graph would keep the lengths of its capture. For graphs call the
        constructor with arrays whose addresses do not change, as examples/graph_loop.py does.

        Raises TypeError or ValueError for arguments that do not fit and for calls during a capture.
        """
        check_integers(1, block_size=block_size)
        new, lens = _lengths("query_lens", query_lens), _lengths("seq_lens", seq_lens)
        if len(new) != len(lens):
            raise ValueError(f"query_lens, seq_lens: got {len(new)} and {len(lens)} entries, expected equal numbers")
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(new)])
        check_lengths("query_lens", starts, "seq_lens", lens)
        for name, largest in (("query_lens", int(starts[-1])), ("seq_lens", int(lens.max(initial=0)))):
            if largest > MOST_TOKENS:
                raise ValueError(f"{name}: got {largest} tokens, expected at most {MOST_TOKENS}")
        framework, module, table = _placed(block_table, xp)
        with streams.callers(table, framework):
            if module is not np and streams.is_capturing():
                raise ValueError(
                    "from_lengths: got a call while a CUDA graph is being captured, expected one outside of captures"
                )
            table = Call(backend).array("block_table", module.asarray(table), INT32, (len(lens), -1))
            _check_covers(table, int(block_size), lens)
            starts_cpu, lens_cpu = starts.astype(np.int32), lens.astype(np.int32)
            query_start_loc, seq_lens = module.asarray(starts_cpu), module.asarray(lens_cpu)
            slots = compute_slot_mapping(int(starts[-1]), query_start_loc, seq_lens, table, block_size, backend=backend)
            query_start_loc, seq_lens = (dlpack.give_shared(x, framework) for x in (query_start_loc, seq_lens))
            slots = dlpack.give(slots, framework)
        return cls(
            query_start_loc=query_start_loc,
            query_start_loc_cpu=starts_cpu,
            seq_lens=seq_lens,
            seq_lens_cpu=lens_cpu,
            num_computed_tokens_cpu=lens_cpu - np.diff(starts_cpu),
            num_reqs=len(lens),
            num_actual_tokens=int(starts[-1]),
            max_query_len=int(new.max(initial=0)),
            block_table_tensor=block_table if xp is None else table,
            slot_mapping=slots,
            max_seq_len=int(lens.max(initial=0)),
            block_size=int(block_size),
        )

    def pad_slot_mapping(self) -> None:
        """Fill slot_mapping beyond num_actual_tokens with -1, so that padding tokens are not inserted.

        Needed before a step that runs at a captured size larger than its batch.
        """
        slots = dlpack.borrow(self.slot_mapping, "slot_mapping", writable=True)
        slots[self.num_actual_tokens :] = PADDING_SLOT


def host_array(name: str, value: Any) -> np.ndarray:
    """A `_cpu` array of a batch as NumPy. Raises ValueError for a device array: reading it would synchronise."""
    if value.__class__ is np.ndarray:
        return value
    native = dlpack.borrow(value, name)
    if not isinstance(native, np.ndarray):
        raise ValueError(f"{name}: got an array on CUDA device {native.device.id}, expected one in host memory")
    return native


def host_integers(name: str, value: Any) -> np.ndarray:
    """A `_cpu` array [N] as int32 or int64. Small and unsigned integers are converted: their differences would wrap.

    Raises TypeError for values that are no integers, ValueError for another shape and as `host_array`.
    """
    array = host_array(name, value)
    if array.dtype in SLOTS and array.ndim == 1:
        return array
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name}: got dtype {array.dtype}, expected integers")
    if array.ndim != 1:
        raise ValueError(f"{name}: got shape {array.shape}, expected one axis")
    return array.astype(np.int64)


def _lengths(name: str, value: Any) -> np.ndarray:
    """Lengths [R] int64 from a sequence of integers or an array in host memory. Raises as `host_integers`."""
    if isinstance(value, Sequence):
        if not len(value):
            return np.empty(0, np.int64)
        try:
            value = np.array(value)
        except ValueError:
            raise ValueError(f"{name}: got a sequence of sequences, expected one of integers") from None
    lens = host_integers(name, value)
    r = first_true(lens < 0)
    if r >= 0:
        raise ValueError(f"{name}: request {r} has {lens[r]} tokens, expected at least 0")
    return lens.astype(np.int64)


def _placed(block_table: Any, xp: Any) -> tuple[str, Any, Any]:
    """The framework of a batch's arrays, the module that allocates them (numpy or cupy), the borrowed block table."""
    table = dlpack.borrow(block_table, "block_table")
    if xp is None:
        return dlpack.framework_of(block_table), dlpack.namespace_of(table), table
    name = getattr(xp, "__name__", type(xp).__name__)
    if name not in ("numpy", "cupy"):
        raise TypeError(f"xp: got {name}, expected the module numpy or cupy, or None for the block table's framework")
    if name == "numpy" and not isinstance(table, np.ndarray):
        raise ValueError(
            f"xp: got numpy for a block table on CUDA device {table.device.id}, expected cupy or None: nothing is read "
            "back from a device"
        )
    return name, xp, table


def _check_covers(block_table: Any, block_size: int, seq_lens: np.ndarray) -> None:
    """Raise ValueError for a block table that does not cover a sequence."""
    columns, longest = block_table.shape[1], int(seq_lens.max(initial=0))
    if longest > columns * block_size:
        raise ValueError(
            f"block_table: request {int(seq_lens.argmax())} has {longest} tokens, but {columns} columns of "
            f"{block_size} cover {columns * block_size}, expected at least {-(-longest // block_size)} columns"
        )


def first_true(mask: Any) -> int:
    """The first index where `mask` [N] bool is True, or -1. (A byte search takes a third of argmax's time.)"""
    return int(mask.tobytes().find(b"\1"))


def check_lengths(starts_name: str, starts: np.ndarray, lens_name: str, seq_lens: np.ndarray) -> None:
    """Raise ValueError unless starts [R + 1] and seq_lens [R] give each request a query of 0 to all of its tokens."""
    if len(starts) != len(seq_lens) + 1:
        raise ValueError(
            f"{starts_name}, {lens_name}: got shapes {starts.shape} and {seq_lens.shape}, expected [R + 1] and [R]"
        )
    query_lens = np.diff(starts)
    r = first_true((query_lens < 0) | (query_lens > seq_lens))
    if r >= 0:
        raise ValueError(
            f"{lens_name}: request {r} has {seq_lens[r]} tokens and a query of {query_lens[r]}, expected a query of 0 "
            "to all of them"
        )


class HostLens(NamedTuple):
    """A batch's lengths on the host: query_start_loc [num_reqs + 1], query lengths and seq_lens [num_reqs]."""

    starts: np.ndarray
    query_lens: np.ndarray
    seq_lens: np.ndarray

    @classmethod
    def of(cls, batch: CommonAttentionMetadata) -> HostLens:
        """Read a batch's lengths. Raises ValueError for shapes that do not fit its num_reqs."""
        starts = host_integers("query_start_loc_cpu", batch.query_start_loc_cpu)
        seq_lens = host_integers("seq_lens_cpu", batch.seq_lens_cpu)
        num_reqs = batch.num_reqs
        if starts.shape != (num_reqs + 1,) or seq_lens.shape != (num_reqs,):
            raise ValueError(
                f"query_start_loc_cpu, seq_lens_cpu: got shapes {starts.shape} and {seq_lens.shape}, "
                f"expected {(num_reqs + 1,)} and {(num_reqs,)}, as num_reqs is {num_reqs}"
            )
        return cls(starts, starts[1:] - starts[:-1], seq_lens)

    def check_order(self, decode_threshold: int) -> None:
        """Raise ValueError for a decode, a query of 1 to decode_threshold tokens, that follows a longer query."""
        is_prefill = self.query_lens > decode_threshold
        first = first_true(is_prefill)
        if first < 0:
            return
        wrong = first_true((self.query_lens[first:] > 0) & ~is_prefill[first:])
        if wrong >= 0:
            raise ValueError(
                f"query_start_loc_cpu: request {first + wrong} with {self.query_lens[first + wrong]} query tokens "
                f"follows a prefill, expected decodes (at most {decode_threshold} tokens) first"
            )

    def split(
        self, batch: CommonAttentionMetadata, decode_threshold: int, require_uniform: bool = False
    ) -> tuple[int, int, int, int]:
        """`split_decodes_and_prefills` of a batch whose order has been checked."""
        num_reqs, num_tokens, query_lens = batch.num_reqs, batch.num_actual_tokens, self.query_lens
        all_decodes = (num_reqs, 0, num_tokens, 0)
        if batch.max_query_len <= decode_threshold and not (require_uniform and decode_threshold > 1):
            return all_decodes
        first = query_lens[0] if num_reqs else 0
        if first > decode_threshold:
            return 0, num_reqs, 0, num_tokens
        is_prefill = query_lens != first if require_uniform else query_lens > decode_threshold
        num_decodes = first_true(is_prefill)
        if num_decodes < 0:
            return all_decodes
        if require_uniform and not query_lens[num_decodes] and not query_lens[is_prefill].any():
            return all_decodes  # padded to a captured size
        num_decode_tokens = int(self.starts[num_decodes])
        return num_decodes, num_reqs - num_decodes, num_decode_tokens, num_tokens - num_decode_tokens


@plain_integers
def split_decodes_and_prefills(
    common_attn_metadata: CommonAttentionMetadata, decode_threshold: int = 1, require_uniform: bool = False
) -> tuple[int, int, int, int]:
    """Count the decodes and prefills of a decode-first batch.

    Args:
        decode_threshold: longest query of a decode
        require_uniform: all decodes must have the first one's query length; if all queries that differ are empty (a
            padded uniform batch), all requests are decodes

    Returns (num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens). Empty queries after the
    first prefill count as prefills. Padding tokens, which follow the last request's within num_actual_tokens, count as
    the prefills' if there are any, otherwise as the decodes'.
    Raises ValueError for a decode that follows a query of more than decode_threshold tokens.
    Source: vLLM split_decodes_and_prefills, without its assertions on the order of zero-length padding.
    """
    check_integers(0, decode_threshold=decode_threshold)
    check_flags(require_uniform=require_uniform)
    lens = HostLens.of(common_attn_metadata)
    lens.check_order(decode_threshold)
    return lens.split(common_attn_metadata, decode_threshold, require_uniform)


@plain_integers
def get_dcp_local_seq_lens(
    seq_lens: Any, dcp_world_size: int = 1, dcp_rank: int | None = None, cp_kv_cache_interleave_size: int = 1
) -> Any:
    """The number of tokens of each request on one rank, for a cache that is sharded across ranks.

    Args:
        seq_lens: [R] integers, at least 0
        dcp_world_size: ranks
        dcp_rank: the rank, or None for all of them
        cp_kv_cache_interleave_size: consecutive tokens on the same rank

    Returns [R] for one rank, [R, dcp_world_size] for all, of seq_lens' dtype.
    Raises ValueError for a rank that does not exist.
    Source: vLLM get_dcp_local_seq_lens.
    """
    check_integers(1, dcp_world_size=dcp_world_size, cp_kv_cache_interleave_size=cp_kv_cache_interleave_size)
    native = dlpack.borrow(seq_lens, "seq_lens")
    if native.dtype.kind not in "iu":
        raise TypeError(f"seq_lens: got dtype {native.dtype}, expected integers")
    if native.ndim != 1:
        raise ValueError(f"seq_lens: got shape {tuple(native.shape)}, expected [R]")
    lens = native.astype(np.int64)  # differences of int64 do not wrap
    ranks: Any = dcp_rank
    if dcp_rank is None:
        ranks = dlpack.namespace_of(lens).arange(dcp_world_size)
        lens = lens[:, None]
    else:
        check_integers(-(2**31), dcp_rank=dcp_rank)
        if not 0 <= dcp_rank < dcp_world_size:
            raise ValueError(f"dcp_rank: got {dcp_rank}, expected 0 to {dcp_world_size - 1}")
    interleave = cp_kv_cache_interleave_size
    full_rounds = lens // interleave // dcp_world_size * interleave
    rest = lens - full_rounds * dcp_world_size - ranks * interleave
    local = (full_rounds + rest.clip(0, interleave)).astype(native.dtype)
    return dlpack.give(local, dlpack.framework_of(seq_lens))

"""Converts sequence groups of vLLM's first-generation engines to a decode-first batch.

Such an engine lists prompts before decodes; here decodes come first. `GroupedBatch` has both orders: token t of the
batch is token `token_order[t]` of the engine, so `q[token_order]` puts an engine's rows in the batch's order, and
`result[token_order] = out` puts results back in the engine's order. `request_order` does the same for requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import dlpack
from ..dispatch.values import check_flags, check_integers, shown
from .batch import PADDING_SLOT, CommonAttentionMetadata

INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class SequenceGroup:
    """Sequences that share a prompt: one during the prompt, or several that continue it.

    Attributes:
        is_prompt: whether the tokens are (part of) a prompt
        seq_ids: one a sequence
        orig_seq_lens: tokens of each, the new ones included
        query_lens: new tokens of each
        context_lens: tokens of each that are already computed
        block_tables: blocks of each sequence by id; None while memory is being profiled
        seq_lens: tokens that decoding attends to, fewer than orig_seq_lens under a sliding window; orig_seq_lens if
            None
        curr_sliding_window_blocks: trailing blocks that a window still covers, 0 for all; all 0 if None

    Source: vLLM InterDataForSeqGroup.
    """

    is_prompt: bool
    seq_ids: Sequence[int]
    orig_seq_lens: Sequence[int]
    query_lens: Sequence[int]
    context_lens: Sequence[int]
    block_tables: Mapping[int, Sequence[int]] | None
    seq_lens: Sequence[int] | None = None
    curr_sliding_window_blocks: Sequence[int] | None = None

    def __post_init__(self) -> None:
        check_flags(is_prompt=self.is_prompt)
        for name in ("orig_seq_lens", "query_lens", "context_lens", "seq_lens", "curr_sliding_window_blocks"):
            values = getattr(self, name)
            if values is None and name in ("seq_lens", "curr_sliding_window_blocks"):
                continue
            if not isinstance(values, (Sequence, np.ndarray)):
                raise TypeError(f"{name}: got {shown(values)}, expected a sequence of integers")
            if len(values) != len(self.seq_ids):
                raise ValueError(f"{name}: got {len(values)} entries, expected {len(self.seq_ids)}, one a sequence")
            for value in values:
                check_integers(0, **{name: value})
        for i, seq_id in enumerate(self.seq_ids):
            got, expected = int(self.query_lens[i]), int(self.orig_seq_lens[i]) - int(self.context_lens[i])
            if got != expected:
                raise ValueError(
                    f"query_lens: got {got} for sequence {seq_id}, expected {expected}: its length without its context"
                )
            if self.block_tables is not None and seq_id not in self.block_tables:
                raise ValueError(f"block_tables: got no blocks for sequence {seq_id}")


@dataclass(frozen=True)
class GroupedBatch:
    """A decode-first batch on the host, padding requests last.

    Attributes:
        query_lens, seq_lens: [num_reqs] int32
        block_table: [num_reqs, B] int32, -1 where a request has fewer blocks
        slot_mapping: [num_tokens + padding] int64
        token_order: [num_tokens] int64, the engine's token at each position of the batch
        request_order: [num_reqs without padding] int64, the engine's request at each position of the batch
    """

    query_lens: np.ndarray
    seq_lens: np.ndarray
    block_table: np.ndarray
    slot_mapping: np.ndarray
    token_order: np.ndarray
    request_order: np.ndarray

    def to_device(self, like: Any, framework: str) -> CommonAttentionMetadata:
        """The batch with its arrays on the device of `like`, as arrays of `framework`."""
        xp = dlpack.namespace_of(like)
        starts = np.concatenate([[0], np.cumsum(self.query_lens)]).astype(np.int32)

        def sent(array: np.ndarray) -> Any:
            return dlpack.give_shared(xp.asarray(array), framework)

        return CommonAttentionMetadata(
            query_start_loc=sent(starts),
            query_start_loc_cpu=starts,
            seq_lens=sent(self.seq_lens),
            seq_lens_cpu=self.seq_lens,
            num_computed_tokens_cpu=self.seq_lens - self.query_lens,
            num_reqs=len(self.seq_lens),
            num_actual_tokens=len(self.token_order),
            max_query_len=int(self.query_lens.max(initial=0)),
            block_table_tensor=sent(self.block_table),
            slot_mapping=sent(self.slot_mapping),
        )


def batch_of_groups(
    groups: Sequence[SequenceGroup], block_size: int, sliding_window: int | None, padding: int
) -> GroupedBatch:
    """The groups' sequences as a batch, decodes first and otherwise in order.

    Args:
        sliding_window: last tokens of a prompt to cache: the slots of earlier ones are -1
        padding: requests without tokens to add at the end, each with a slot of -1
    """
    is_prompt, query_lens, seq_lens, tables, slots = [], [], [], [], []
    for group in groups:
        for i, seq_id in enumerate(group.seq_ids):
            blocks = None if group.block_tables is None else blocks_of(group.block_tables[seq_id])
            length, context, query = (
                int(lens[i]) for lens in (group.orig_seq_lens, group.context_lens, group.query_lens)
            )
            window = sliding_window if group.is_prompt else None
            slots.append(slots_of(blocks, context, length, block_size, window))
            num_blocks = 0 if group.curr_sliding_window_blocks is None else int(group.curr_sliding_window_blocks[i])
            tables.append(np.empty(0, np.int32) if blocks is None else blocks[-num_blocks:])
            is_prompt.append(group.is_prompt)
            query_lens.append(query)
            seq_lens.append(length if group.seq_lens is None else int(group.seq_lens[i]))

    order = np.argsort(np.array(is_prompt, np.bool_), kind="stable")
    first_token = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int64)
    tokens = [np.arange(first_token[r], first_token[r + 1]) for r in order]
    nothing = np.empty(0, np.int64)
    table = np.full((len(order) + padding, max((len(t) for t in tables), default=0) or 1), -1, np.int32)
    for row, request in enumerate(order):
        table[row, : len(tables[request])] = tables[request]
    return GroupedBatch(
        query_lens=np.array([*(query_lens[r] for r in order), *[0] * padding], np.int32),
        seq_lens=np.array([*(seq_lens[r] for r in order), *[0] * padding], np.int32),
        block_table=table,
        slot_mapping=np.concatenate([nothing, *(slots[r] for r in order), np.full(padding, PADDING_SLOT)]),
        token_order=np.concatenate([nothing, *tokens]),
        request_order=order,
    )


def blocks_of(values: Any) -> np.ndarray:
    """A sequence's blocks. Raises TypeError unless they are integers, ValueError unless they fit in int32."""
    blocks = np.asarray(values)
    if blocks.size and blocks.dtype.kind not in "iu":
        raise TypeError(f"block_tables: got {shown(values)}, expected integers")
    if blocks.ndim != 1 or (blocks.size and not -INT32_MAX - 1 <= blocks.min() <= blocks.max() <= INT32_MAX):
        raise ValueError(f"block_tables: got {shown(values)}, expected a list of blocks within int32")
    return blocks.astype(np.int32)


def slots_of(
    blocks: np.ndarray | None, context_len: int, seq_len: int, block_size: int, sliding_window: int | None
) -> np.ndarray:
    """Slots of positions context_len to seq_len; -1 without blocks, and for positions before the window.

    Raises ValueError for a sequence that outgrows its blocks.
    """
    positions = np.arange(context_len, seq_len)
    if blocks is None:
        return np.full(len(positions), PADDING_SLOT)
    if seq_len > len(blocks) * block_size:
        raise ValueError(
            f"block_tables: got {len(blocks)} blocks of {block_size} tokens for a sequence of {seq_len}, "
            f"expected {-(-seq_len // block_size)}"
        )
    found = blocks[positions // block_size].astype(np.int64) * block_size + positions % block_size
    if sliding_window is not None:
        found[positions < seq_len - context_len - sliding_window] = PADDING_SLOT
    return found

"""Host checks of a batch: what no scheduler can mean is an error that names the request."""

from __future__ import annotations

import numpy as np

from ..batch import CommonAttentionMetadata
from ..interop import dlpack
from .base import ServingConfig


def check_batch(batch: CommonAttentionMetadata, config: ServingConfig) -> None:
    """Raise ValueError for a batch that is inconsistent, unordered or larger than the config allows."""
    num_reqs = batch.num_reqs
    if num_reqs > config.max_num_seqs:
        raise ValueError(f"num_reqs: got {num_reqs}, expected at most max_num_seqs = {config.max_num_seqs}")
    starts = dlpack.borrow(batch.query_start_loc_cpu, "query_start_loc_cpu")
    seq_lens = dlpack.borrow(batch.seq_lens_cpu, "seq_lens_cpu")
    if len(starts) != num_reqs + 1 or len(seq_lens) != num_reqs:
        raise ValueError(
            f"query_start_loc_cpu, seq_lens_cpu: got {len(starts)} and {len(seq_lens)} entries, "
            f"expected {num_reqs + 1} and {num_reqs}"
        )
    if not num_reqs:
        return
    query_lens = np.diff(starts)
    if starts[0] != 0 or int(starts[-1]) != batch.num_actual_tokens:
        raise ValueError(
            f"query_start_loc_cpu: got {starts[0]} to {starts[-1]}, expected 0 to "
            f"num_actual_tokens = {batch.num_actual_tokens}"
        )
    if batch.num_actual_tokens > config.max_num_batched_tokens:
        raise ValueError(
            f"num_actual_tokens: got {batch.num_actual_tokens}, expected at most "
            f"max_num_batched_tokens = {config.max_num_batched_tokens}"
        )
    if query_lens.min() < 0:
        request = int((query_lens < 0).argmax())
        raise ValueError(
            f"query_start_loc_cpu: request {request} goes from {starts[request]} to {starts[request + 1]}, "
            "expected starts that do not decrease"
        )
    if query_lens.max() != batch.max_query_len:
        raise ValueError(f"max_query_len: got {batch.max_query_len}, expected {query_lens.max()}, the longest query")
    short = query_lens > seq_lens
    if short.any():
        request = int(short.argmax())
        raise ValueError(
            f"seq_lens_cpu: request {request} has {seq_lens[request]} tokens, expected at least the "
            f"{query_lens[request]} of its query"
        )
    longest = int(seq_lens.max())
    if longest > config.max_model_len:
        raise ValueError(
            f"seq_lens_cpu: request {int(seq_lens.argmax())} has {longest} tokens, expected at most "
            f"max_model_len = {config.max_model_len}"
        )
    covered = batch.block_table_tensor.shape[1] * config.block_size
    if longest > covered:
        raise ValueError(
            f"block_table_tensor: request {int(seq_lens.argmax())} has {longest} tokens, but "
            f"{batch.block_table_tensor.shape[1]} columns of {config.block_size} cover {covered}"
        )
    if batch.max_query_len > config.decode_threshold:
        is_prefill = query_lens > config.decode_threshold
        late = is_prefill[:-1] & ~is_prefill[1:] & (query_lens[1:] > 0)
        if late.any():
            request = int(late.argmax()) + 1
            raise ValueError(
                f"query_start_loc_cpu: request {request} with {query_lens[request]} query tokens follows a prefill, "
                f"expected decodes (at most {config.decode_threshold} tokens) first"
            )

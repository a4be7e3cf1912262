"""What a metadata step is made of: the counts of a batch and the buffers that are filled."""

from __future__ import annotations

from typing import Any, NamedTuple

C128A_RATIO = 128


class BatchCounts(NamedTuple):
    """Host numbers of a batch.

    num_tokens     query tokens, padding left out; decode tokens are the first num_decode_tokens
    rows           rows to fill: entries of slot_mapping
    rows_before    rows that the build before filled: those beyond `rows` are cleared
    """

    num_reqs: int
    num_decodes: int
    num_decode_tokens: int
    num_tokens: int
    rows: int
    rows_before: int


class SwaBuffers(NamedTuple):
    """Fixed buffers of the sparse-SWA builder, one row a token unless said otherwise.

    token_to_req_indices  int32; 0 for padding
    is_valid_token        bool
    swa_indices           int32 [.., window_size]; -1 after the length
    swa_lens              int32
    prefill_gather_lens   int32, one a prefill request
    c128a_indices         int32 [.., capacity]: slots for decode tokens, 0, 1, 2, ... for prefill tokens
    c128a_lens            int32
    """

    token_to_req_indices: Any
    is_valid_token: Any
    swa_indices: Any
    swa_lens: Any
    prefill_gather_lens: Any
    c128a_indices: Any
    c128a_lens: Any

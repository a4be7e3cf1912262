"""Arguments of a metadata step: the counts of a batch and the buffers to fill."""

from typing import Any, NamedTuple

C128A_RATIO = 128
SPLIT_PAGES = 4  # pages in a split of the paged logits' schedule


class BatchCounts(NamedTuple):
    """Sizes of a batch, known to the host.

    Attributes:
        num_tokens: query tokens of requests, without padding; decode tokens are the first num_decode_tokens
        rows: rows to fill: entries of slot_mapping
        rows_before: rows that the previous build filled: rows beyond `rows` are cleared
        width_before: columns of c128a_indices that the previous build filled: columns beyond the width are cleared
    """

    num_reqs: int
    num_decodes: int
    num_decode_tokens: int
    num_tokens: int
    rows: int
    rows_before: int
    width_before: int = 0


class SwaBuffers(NamedTuple):
    """Fixed buffers of the sparse-SWA builder, one row per token unless said otherwise.

    Attributes:
        token_to_req_indices: int32; 0 for padding
        is_valid_token: bool
        positions: int32, position of the token in its sequence; -1 for padding
        swa_indices: int32 [.., decode_swa_width], at least the window size; -1 after the length
        swa_lens: int32
        prefill_gather_lens: int32, one per prefill request, clamped to 0 .. its length; 0 after the last
        c128a_indices: int32 [.., capacity]: slots for decode tokens, 0, 1, 2, ... for prefill tokens
        c128a_lens: int32
    """

    token_to_req_indices: Any
    is_valid_token: Any
    positions: Any
    swa_indices: Any
    swa_lens: Any
    prefill_gather_lens: Any
    c128a_indices: Any
    c128a_lens: Any


class WindowStep(NamedTuple):
    """Arguments of a sparse-SWA build: a batch's arrays and sizes, and the buffers to fill.

    Attributes:
        slot_mapping: [rows], -1 for padding
        c128a_block_table: None without C128A layers; c128a_width is then 0, else columns of c128a_indices to fill
        replay_start: int32 [R], first position that windows may have, or None
        noncausal: whether each token of a decode sees the whole request
    """

    query_start_loc: Any
    seq_lens: Any
    slot_mapping: Any
    block_table: Any
    c128a_block_table: Any
    counts: BatchCounts
    block_size: int
    window_size: int
    c128a_block_size: int
    c128a_width: int
    buffers: SwaBuffers
    replay_start: Any = None
    noncausal: bool = False


class DecodeBatch(NamedTuple):
    """The arguments of `cumla.advance_step`: the arrays of a decode batch, and its sampled tokens."""

    num_seqs: int
    num_queries: int
    block_size: int
    input_tokens: Any
    sampled_token_ids: Any
    input_positions: Any
    seq_lens: Any
    slot_mapping: Any
    block_tables: Any


class CompressedSlots(NamedTuple):
    """The arguments of `cumla.metadata.get_compressed_slot_mapping`, and the array of its results."""

    query_start_loc: Any
    seq_lens: Any
    block_table: Any
    num_tokens: int
    block_size: int
    compress_ratio: int
    slots: Any


class IndexerCounts(NamedTuple):
    """Sizes of a batch for the indexer, known to the host. Its decode kernels take `batch_size` entries.

    num_decodes       requests at the front that are decodes
    batch_size        entries: the decodes, or their tokens (padding tokens included) if flattened
    flatten           whether an entry is a token; otherwise it is a request
    lens_per_entry    lengths per entry: one per draft token if the kernels take such requests unflattened, else 1
    columns           columns of block_table to copy for each entry; 0 unless flattened
    entries_before    entries and columns that the previous build copied: the build clears the rest of them
    columns_before
    block_size        rows of a page
    compress_ratio    positions of a row
    decode_len        tokens of the longest request: length j of an entry is its sequence's less decode_len - 1 - j
    maps_slots        whether to fill slot_mapping
    """

    num_decodes: int
    batch_size: int
    flatten: bool
    lens_per_entry: int
    columns: int
    entries_before: int
    columns_before: int
    block_size: int
    compress_ratio: int
    decode_len: int
    maps_slots: bool


class IndexerBuffers(NamedTuple):
    """Fixed buffers of the indexer's builder; the unused rest is 0, or -1 in slot_mapping.

    Attributes:
        decode_lens: int32 [capacity], query tokens of an entry
        seq_lens: int32 [capacity], rows an entry may see, `lens_per_entry` for each entry
        slot_mapping: int64 [capacity], one per token; empty unless slots are mapped
        block_table: int32 [.., columns], one row per entry, of flattened tokens
        schedule: int32 [num_sms + 1, 2], entry and split at which each SM starts
    """

    decode_lens: Any
    seq_lens: Any
    slot_mapping: Any
    block_table: Any
    schedule: Any


class IndexerChunk(NamedTuple):
    """Prefill requests in one workspace, and the arrays to fill for them, all int32.

    Attributes:
        first_request, num_reqs: range of requests in the batch
        longest: rows of the longest request
        cu_seqlen_ks, cu_seqlen_ke: [tokens], first row of the workspace that a query sees, and the row after its last
        cu_seq_lens: [num_reqs + 1], first row of each request
        token_to_seq: [rows], the request of each row, counted within the chunk
    """

    first_request: int
    num_reqs: int
    longest: int
    cu_seqlen_ks: Any
    cu_seqlen_ke: Any
    cu_seq_lens: Any
    token_to_seq: Any


class IndexerStep(NamedTuple):
    """Arguments of an indexer's build: a batch's arrays and sizes, and buffers to fill; no chunk without prefills."""

    query_start_loc: Any
    seq_lens: Any
    block_table: Any
    counts: IndexerCounts
    buffers: IndexerBuffers
    chunk: IndexerChunk | None = None

    @property
    def slots(self) -> CompressedSlots:
        counts, out = self.counts, self.buffers.slot_mapping
        return CompressedSlots(*self[:3], len(out), counts.block_size, counts.compress_ratio, out)

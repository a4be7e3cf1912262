"""Builders: from a batch to what the attention layers of a step share. One builder a file."""

from .base import AttentionCGSupport, AttentionMetadataBuilder, ServingConfig
from .indexer import (
    DeepSeekV32IndexerDecodeMetadata,
    DeepseekV32IndexerMetadata,
    DeepseekV32IndexerMetadataBuilder,
    get_compressed_slot_mapping,
)
from .indexer_chunks import (
    DeepseekV32IndexerPrefillChunkMetadata,
    DeepseekV32IndexerPrefillMetadata,
    get_max_prefill_buffer_size,
    kv_spans_from_batches,
    split_indexer_prefill_chunks,
)
from .sparse_swa import DeepseekSparseSWAMetadata, DeepseekSparseSWAMetadataBuilder

__all__ = [
    "AttentionCGSupport",
    "AttentionMetadataBuilder",
    "DeepSeekV32IndexerDecodeMetadata",
    "DeepseekSparseSWAMetadata",
    "DeepseekSparseSWAMetadataBuilder",
    "DeepseekV32IndexerMetadata",
    "DeepseekV32IndexerMetadataBuilder",
    "DeepseekV32IndexerPrefillChunkMetadata",
    "DeepseekV32IndexerPrefillMetadata",
    "ServingConfig",
    "get_compressed_slot_mapping",
    "get_max_prefill_buffer_size",
    "kv_spans_from_batches",
    "split_indexer_prefill_chunks",
]

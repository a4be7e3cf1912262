"""Builders of the metadata that the attention layers of a step share, from a batch. One builder a file."""

from .batch import CommonAttentionMetadata, get_dcp_local_seq_lens, split_decodes_and_prefills
from .builder import AttentionCGSupport, AttentionMetadataBuilder, ServingConfig
from .indexer import (
    DeepSeekV32IndexerDecodeMetadata,
    DeepseekV32IndexerMetadata,
    DeepseekV32IndexerMetadataBuilder,
)
from .indexer_chunks import (
    DeepseekV32IndexerPrefillChunkMetadata,
    DeepseekV32IndexerPrefillMetadata,
    get_max_prefill_buffer_size,
    kv_spans_from_batches,
    split_indexer_prefill_chunks,
)
from .mla import MLACommonMetadata
from .mla_builder import MLACommonMetadataBuilder, MLAConfig
from .mla_groups import GroupedBatch, SequenceGroup
from .mla_state import MLACommonBackend, MLACommonState
from .slots import compute_positions, compute_slot_mapping, get_compressed_slot_mapping, ring_capacity
from .sparse_swa import DeepseekSparseSWAMetadata, DeepseekSparseSWAMetadataBuilder
from .vllm_helpers import (
    PerLayerParameters,
    get_kv_cache_layout,
    get_per_layer_parameters,
    infer_global_hyperparameters,
    make_local_attention_virtual_batches,
    reorder_batch_to_split_decodes_and_prefills,
    set_kv_cache_layout,
)

__all__ = [
    "AttentionCGSupport",
    "AttentionMetadataBuilder",
    "CommonAttentionMetadata",
    "DeepSeekV32IndexerDecodeMetadata",
    "DeepseekSparseSWAMetadata",
    "DeepseekSparseSWAMetadataBuilder",
    "DeepseekV32IndexerMetadata",
    "DeepseekV32IndexerMetadataBuilder",
    "DeepseekV32IndexerPrefillChunkMetadata",
    "DeepseekV32IndexerPrefillMetadata",
    "GroupedBatch",
    "MLACommonBackend",
    "MLACommonMetadata",
    "MLACommonMetadataBuilder",
    "MLACommonState",
    "MLAConfig",
    "PerLayerParameters",
    "SequenceGroup",
    "ServingConfig",
    "compute_positions",
    "compute_slot_mapping",
    "get_compressed_slot_mapping",
    "get_dcp_local_seq_lens",
    "get_kv_cache_layout",
    "get_max_prefill_buffer_size",
    "get_per_layer_parameters",
    "infer_global_hyperparameters",
    "kv_spans_from_batches",
    "make_local_attention_virtual_batches",
    "reorder_batch_to_split_decodes_and_prefills",
    "ring_capacity",
    "set_kv_cache_layout",
    "split_decodes_and_prefills",
    "split_indexer_prefill_chunks",
]

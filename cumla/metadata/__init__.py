"""Builders: from a batch to what the attention layers of a step share. One builder a file."""

from .base import AttentionCGSupport, AttentionMetadataBuilder, ServingConfig
from .sparse_swa import DeepseekSparseSWAMetadata, DeepseekSparseSWAMetadataBuilder

__all__ = [
    "AttentionCGSupport",
    "AttentionMetadataBuilder",
    "DeepseekSparseSWAMetadata",
    "DeepseekSparseSWAMetadataBuilder",
    "ServingConfig",
]

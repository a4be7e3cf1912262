"""The published models of docs' tables: their config.json, as far as attention reads it."""

ONE_ROW = {"num_attention_heads": 64, "o_groups": 8, "o_lora_rank": 1024}
LATENT_ROWS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "index_topk": 2048}
CONFIGS = {
    "V3.2": {
        "model_type": "deepseek_v32", "hidden_size": 7168, "num_attention_heads": 128, "q_lora_rank": 1536,
        **LATENT_ROWS,
    },
    "V4": {
        "model_type": "deepseek_v4", "hidden_size": 4096, "q_lora_rank": 1024, "num_hidden_layers": 43,
        "compress_ratios": (128, 128, *(128, 4) * 20, 128), **ONE_ROW,
    },
    "V4.1": {
        "model_type": "deepseek_v41", "hidden_size": 5120, "q_lora_rank": 1280, "num_hidden_layers": 40,
        "compress_ratios": (0, 0, *(2,) * 18, *(1,) * 20), "kv_source_layer_ids": (2, 8, 14, 20),
        "index_source_layer_ids": (2, 8, 14, 20, 24, 28, 32, 36), "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048, **ONE_ROW,
    },
    "GLM-5.2": {
        "model_type": "glm_moe_dsa", "hidden_size": 6144, "num_attention_heads": 64, "q_lora_rank": 2048,
        "num_hidden_layers": 78, "index_topk_freq": 4, "index_skip_topk_offset": 3, **LATENT_ROWS,
    },
    "GLM-5.3-Flash": {
        "model_type": "glm5_next_text", "hidden_size": 4096, "num_attention_heads": 64, "q_lora_rank": 1536,
        "num_hidden_layers": 45, "index_kpool": 4,
        "layer_types": [("linear" if (i + 1) % 4 else "indexed") + "_attention" for i in range(45)],
    },
    "Mistral Large 4": {
        "model_type": "mistral_large4_text", "hidden_size": 6144, "num_attention_heads": 64, "num_hidden_layers": 72,
        "kv_source_layers": [35 if layer > 35 and layer % 4 == 3 else layer for layer in range(72)],
        "indexer_types": ["full", "shared"] * 36, **LATENT_ROWS,
    },
    "Hy4": {
        "model_type": "hy_v4", "hidden_size": 2816, "num_attention_heads": 32, "q_lora_rank": 1536,
        "num_hidden_layers": 34, "learnable_sink": True, "gated_mla": True, "gating_type": "elementwise", **LATENT_ROWS,
    },
}  # fmt: skip

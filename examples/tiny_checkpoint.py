"""Write a tiny checkpoint: config.json and model.safetensors, with weights determined by a seed.

    python examples/tiny_checkpoint.py v4 FOLDER        or v32, v41

seeded_weights.py draws the weights.
"""

import argparse
import json
import pathlib

import numpy as np
from seeded_weights import seeded_weights

from cumla.models import DeepseekV4Config, DeepseekV32Config, DeepseekV41Config, expected_weights, safetensors

V4 = {
    "model_type": "deepseek_v4", "vocab_size": 512, "hidden_size": 256, "moe_intermediate_size": 128,
    "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 512, "q_lora_rank": 128,
    "num_experts_per_tok": 2, "n_routed_experts": 8, "n_shared_experts": 1, "o_groups": 2, "o_lora_rank": 64,
    "index_n_heads": 8, "index_head_dim": 128, "index_topk": 16, "sliding_window": 128, "hc_mult": 2,
    "max_position_embeddings": 8192, "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
                    "compressed_sparse_attention"],
    "rope_parameters": {"rope_type": "yarn", "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0,
                        "original_max_position_embeddings": 512, "rope_theta": 10000.0},
}  # fmt: skip
V32 = {
    "model_type": "deepseek_v32", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 256,
    "moe_intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8, "n_shared_experts": 1,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "index_n_heads": 8, "index_head_dim": 128, "max_position_embeddings": 8192, "num_hidden_layers": 3,
    "index_topk": 64,
}  # fmt: skip
V41 = {  # layers of every kind, and two draft layers
    "model_type": "deepseek_v41_text", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 256,
    "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 512, "q_lora_rank": 128, "o_groups": 2,
    "o_lora_rank": 64, "index_n_heads": 8, "index_head_dim": 128, "index_topk": 16, "sliding_window": 128,
    "rms_norm_eps": 1e-20, "max_position_embeddings": 8192, "num_hidden_layers": 10,
    "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0], "kv_source_layer_ids": [2, 4, 6],
    "index_source_layer_ids": [2, 4, 6, 8], "candidate_source_layer_id": 6, "candidate_topk_blocks": 4,
    "candidate_block_size": 8, "num_nextn_predict_layers": 2, "dspark_block_size": 5,
    "dspark_target_layer_ids": [8, 9], "dspark_noise_token_id": 1, "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                     "original_max_position_embeddings": 65536},
}  # fmt: skip
HASH_LAYERS = 3  # default for V4
DENSE_LAYERS = 3  # default for V3.2


def write(folder: pathlib.Path, config: dict, seed: int) -> None:
    """Write a checkpoint with this configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    arrays = seeded_weights(shapes_outside_attention(config) | attention_shapes(config), seed)
    for layer, kind in enumerate(mlp_types(config)):
        if kind == "hash_moe":  # the experts of each token id
            shape = (config["vocab_size"], config["num_experts_per_tok"])
            table = np.random.Generator(np.random.PCG64(seed + 1)).integers(0, config["n_routed_experts"], shape)
            arrays[f"model.layers.{layer}.mlp.gate.tid2eid"] = table
    safetensors.write(folder / "model.safetensors", arrays)


def is_v4(config: dict) -> bool:
    return "hc_mult" in config


def is_v41(config: dict) -> bool:
    return "kv_source_layer_ids" in config


def mlp_types(config: dict) -> list[str]:
    """The type of each layer: "dense", "moe", or "hash_moe", whose experts are selected by a table.

    All layers of the toy V4.1 are dense.
    """
    if is_v41(config):
        return ["dense"] * config["num_hidden_layers"]
    layers, types = config["num_hidden_layers"], config.get("mlp_layer_types")
    if types is None:
        name, default, first = ("num_hash_layers", HASH_LAYERS, "hash_moe")
        if not is_v4(config):
            name, default, first = ("first_k_dense_replace", DENSE_LAYERS, "dense")
        count = min(config.get(name, default), layers)
        types = [first] * count + ["moe"] * (layers - count)
    known = ("hash_moe", "moe") if is_v4(config) else ("dense", "sparse", "moe")
    for kind in types[:layers]:
        if kind not in known:
            raise ValueError(f"mlp_layer_types: got {kind!r}, expected one of {', '.join(known)}")
    if len(types) < layers:
        raise ValueError(f"mlp_layer_types: got {len(types)} entries, expected one for each of {layers} layers")
    return ["moe" if kind == "sparse" else kind for kind in types[:layers]]


def shapes_outside_attention(config: dict) -> dict[str, tuple[int, ...]]:
    shapes, streams = common_shapes(config), config.get("hc_mult", 0)
    if is_v4(config):
        wide, mixes = streams * config["hidden_size"], (2 + streams) * streams
        head = {"fn": (streams, wide), "base": (streams,), "scale": (1,)}
        shapes |= {f"model.hc_head.hc_{name}": shape for name, shape in head.items()}
        for layer in range(config["num_hidden_layers"]):
            for site in ("attn_hc", "ffn_hc"):
                within = {"fn": (mixes, wide), "base": (mixes,), "scale": (3,)}
                shapes |= {f"model.layers.{layer}.{site}.{name}": shape for name, shape in within.items()}
    return shapes


def common_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    width, experts = (config.get(name, 0) for name in ("moe_intermediate_size", "n_routed_experts"))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden),
    }  # fmt: skip
    for layer, kind in enumerate(mlp_types(config)):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{norm}.weight"] = (hidden,)
        mlp, inner = f"{prefix}mlp.", width
        if kind == "dense":
            inner = config["intermediate_size"]
        else:
            shapes[f"{mlp}gate.weight"] = (experts, hidden)
            shapes[f"{mlp}experts.gate_up_proj"] = (experts, 2 * width, hidden)
            shapes[f"{mlp}experts.down_proj"] = (experts, hidden, width)
            mlp += "shared_experts."
            if not is_v4(config):
                inner = width * config.get("n_shared_experts", 1)
        shapes[f"{mlp}gate_proj.weight"] = shapes[f"{mlp}up_proj.weight"] = (inner, hidden)
        shapes[f"{mlp}down_proj.weight"] = (hidden, inner)
    return shapes


def draft_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Shapes of the toy's draft layers outside attention, and of weights that draft layers share."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    joined = hidden * len(config["dspark_target_layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {
        "mtp.0.main_proj.weight": (hidden, joined), "mtp.0.main_norm.weight": (hidden,), "mtp.0.norm.weight": (hidden,)
    }  # fmt: skip
    for layer in range(config["num_nextn_predict_layers"]):
        shapes |= {f"mtp.{layer}.{name}.weight": (hidden,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"mtp.{layer}.ffn.{name}.weight": (inner, hidden) for name in ("w1", "w3")}
        shapes[f"mtp.{layer}.ffn.w2.weight"] = (hidden, inner)
    return shapes


def attention_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    layers = {layer: f"model.layers.{layer}.self_attn" for layer in range(config["num_hidden_layers"])}
    if is_v41(config):  # transformers has no such model: published names
        drafts = config.get("num_nextn_predict_layers", 0)
        layers = {layer: f"layers.{layer}.attn" for layer in layers}
        layers |= {config["num_hidden_layers"] + draft: f"mtp.{draft}.attn" for draft in range(drafts)}
    kind = DeepseekV41Config if is_v41(config) else DeepseekV4Config if is_v4(config) else DeepseekV32Config
    attention = kind.from_dict(config)
    shapes = {
        f"{prefix}.{weight.transformers}": weight.shape
        for layer, prefix in layers.items()
        for weight in expected_weights(attention, layer).values()
    }
    return shapes | (draft_shapes(config) if is_v41(config) and config.get("num_nextn_predict_layers") else {})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("v4", "v32", "v41"))
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=6000)
    options = parser.parse_args()
    write(options.folder, {"v4": V4, "v32": V32, "v41": V41}[options.model], options.seed)

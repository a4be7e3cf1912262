"""How the examples read checkpoints and compute mixtures of experts, compared with transformers."""

import json

import ml_dtypes
import numpy as np
import pytest
from seeded_weights import seeded_weights

from cumla.models import safetensors
from support.models import outputs, records, relative_rms

MODULES = {"v4": "deepseek_v4", "v32": "deepseek_v32"}
PUBLISHED = {
    "model.embed_tokens.": "embed.", "lm_head.": "head.", "model.hc_head.hc_": "hc_head_", "model.norm.": "norm.",
    "model.layers.": "layers.", ".attn_hc.": ".hc_attn_", ".ffn_hc.": ".hc_ffn_", ".input_layernorm.": ".attn_norm.",
    ".post_attention_layernorm.": ".ffn_norm.", ".mlp.": ".ffn.", ".gate.e_score_correction_bias": ".gate.bias",
    ".gate_proj.": ".w1.", ".down_proj.": ".w2.", ".up_proj.": ".w3.", ".self_attn.": ".attn.",
}  # fmt: skip


@pytest.mark.parametrize("case", range(4))
def test_experts_equal_transformers(case):
    """Clamped shared experts, sigmoid scores, groups separated by negative biases, weights without normalisation."""
    record = records("experts")[case]
    module, config, seed = __import__(MODULES[record["model"]]), record["config"], record["seed"]
    model = object.__new__(module.Model)
    model.xp, model.config, model.weights = np, config, seeded_weights(record["parameters"], seed)
    bias = np.random.Generator(np.random.PCG64(seed + 1)).standard_normal(config["n_routed_experts"], dtype=np.float32)
    model.weights["mlp.gate.e_score_correction_bias"] = np.float32(record["bias"]) * bias
    x = np.random.Generator(np.random.PCG64(seed + 7)).standard_normal((9, config["hidden_size"]), dtype=np.float32)
    tokens = (None,) if record["model"] == "v4" else ()
    got = model.mlp(x, *tokens, "mlp.", "moe")
    assert relative_rms(got, outputs("experts")[str(case)]) < 1e-6


def tiny(folder, case=0, **changes):
    import tiny_checkpoint

    config = records("models")[case]["config"] | changes
    tiny_checkpoint.write(folder, config, 1)
    return config, {name: np.array(array) for name, array in safetensors.Checkpoint(folder).items()}


def one_by_one(tensors):
    """Experts as in checkpoints: one tensor per expert."""
    for name, array in tensors.items():
        prefix, _, kind = name.rpartition(".")
        if kind == "gate_up_proj":
            for i, both in enumerate(array):
                half = len(both) // 2
                yield f"{prefix}.{i}.gate_proj.weight", both[:half]
                yield f"{prefix}.{i}.up_proj.weight", both[half:]
        elif kind == "down_proj":
            yield from ((f"{prefix}.{i}.down_proj.weight", one) for i, one in enumerate(array))
        else:
            yield name, array


def published(name):
    for own, theirs in PUBLISHED.items():
        name = name.replace(own, theirs)
    return name


def write(folder, config, tensors, files=3):
    """A checkpoint of several files, with an index."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    where = {}
    for i in range(files):
        part = dict(list(tensors.items())[i::files])
        safetensors.write(folder / f"model-{i}.safetensors", part)
        where |= dict.fromkeys(part, f"model-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


@pytest.mark.parametrize("names", [published, lambda name: name])
@pytest.mark.parametrize("case", [0, 2])
def test_a_checkpoint_in_files_and_an_expert_a_tensor(tmp_path, case, names):
    """It also has layers that predict further tokens; the model does not read their weights."""
    import checkpoint

    config, tensors = tiny(tmp_path / "tiny", case)
    attention = [name for name in tensors if ".self_attn." in name]
    layers = config["num_hidden_layers"]
    more = {
        "mtp.0.norm.weight": tensors["model.norm.weight"],
        f"model.layers.{layers}.eh_proj.weight": np.zeros((2, 2)),
    }
    kept = {name: array for name, array in tensors.items() if name not in attention}
    whole = {names(name): array for name, array in one_by_one(tensors)} | more
    write(tmp_path / "parts", config, whole)
    got = checkpoint.load(safetensors.Checkpoint(tmp_path / "parts"), config, np)
    assert set(got) == set(kept)
    for name, array in kept.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


@pytest.mark.parametrize("kind", ["scale", pytest.param("weight_scale_inv", marks=pytest.mark.slow)])
def test_a_model_of_fp8_blocks_and_bfloat16(tmp_path, kind):
    """From files to logits: they equal the logits with dequantised weights."""
    import deepseek_v32
    from serving import Server

    config, tensors = tiny(tmp_path / "tiny", 2, num_hidden_layers=2)
    rounded, plain = {}, {}
    for name, array in one_by_one(tensors):
        if "proj" in name and "weights_proj" not in name:
            rows, columns = (-(-size // 128) for size in array.shape)
            scale = np.exp2(np.arange(rows * columns) % 3 - 9).reshape(rows, columns).astype(np.float32)
            spread = scale.repeat(128, 0)[: array.shape[0]].repeat(128, 1)[:, : array.shape[1]]
            rounded[name] = (array / spread).astype(ml_dtypes.float8_e4m3fn)
            rounded[name.removesuffix("weight") + kind] = scale
            plain[name] = rounded[name].astype(np.float32) * spread
        else:
            rounded[name] = array.astype(ml_dtypes.bfloat16)
            plain[name] = rounded[name].astype(np.float32)
    logits = []
    for folder, arrays in (("rounded", rounded), ("plain", plain)):
        write(tmp_path / folder, config, arrays)
        model = deepseek_v32.Model(tmp_path / folder, longest=64, requests=1, batch_tokens=64)
        (request,) = Server(model, model.num_pages).generate([[3, 4, 5]], 2)
        logits.append(request.logits)
    np.testing.assert_allclose(*logits, rtol=1e-4, atol=1e-5 * np.abs(logits[1]).max())


WRONG = {
    "an expert missing": ({}, lambda t: t.pop("model.layers.1.mlp.experts.3.up_proj.weight"), r"experts\.3\.up_proj"),
    "an expert too many": (
        {}, lambda t: t.update({"model.layers.1.mlp.experts.8.up_proj.weight": np.zeros((2, 2))}), r"experts\.8"
    ),
    "a norm missing": ({}, lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight: the checkpoint lacks it"),
    "a head of another shape": (
        {}, lambda t: t.update({"lm_head.weight": np.zeros((4, 256), np.float32)}), r"lm_head\.weight: got shape \(4,"
    ),
    "a bias": (
        {}, lambda t: t.update({"model.layers.0.mlp.up_proj.bias": np.zeros(4, np.float32)}), r"up_proj\.bias: the"
    ),
    "another activation": ({"hidden_act": "gelu"}, dict, "hidden_act: got 'gelu', expected 'silu'"),
    "biases": ({"mlp_bias": True}, dict, "mlp_bias: got True, expected False"),
    "other scores": ({"scoring_func": "softmax"}, dict, "scoring_func: got 'softmax', expected 'sigmoid'"),
    "an unknown kind": ({"mlp_layer_types": ["dense", "hash_moe", "dense"]}, dict, "mlp_layer_types: got 'hash_moe'"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_what_the_examples_do_not_compute_is_named_at_load(tmp_path, wrong):
    import deepseek_v32

    changes, change, message = WRONG[wrong]
    config, tensors = tiny(tmp_path / "tiny", 2)
    tensors = dict(one_by_one(tensors))
    change(tensors)
    write(tmp_path / "wrong", config | changes, tensors)
    with pytest.raises((KeyError, ValueError), match=message):
        deepseek_v32.Model(tmp_path / "wrong", longest=64)


def test_a_tied_head(tmp_path):
    import checkpoint

    config, tensors = tiny(tmp_path / "tiny")
    del tensors["lm_head.weight"]
    got = checkpoint.load(tensors, config | {"tie_word_embeddings": True}, np)
    np.testing.assert_array_equal(got["lm_head.weight"], tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("config", "types"),
    [
        ({"hc_mult": 2}, ["hash_moe"] * 3 + ["moe"]),
        ({"hc_mult": 2, "num_hash_layers": 1}, ["hash_moe"] + ["moe"] * 3),
        (
            {"hc_mult": 2, "mlp_layer_types": ["moe", "hash_moe", "moe", "moe", "moe"]},
            ["moe", "hash_moe", "moe", "moe"],
        ),
        ({}, ["dense"] * 3 + ["moe"]),
        ({"first_k_dense_replace": 9}, ["dense"] * 4),
        ({"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}, ["moe", "dense", "moe", "moe"]),
    ],
)
def test_kinds_of_layers(config, types):
    import tiny_checkpoint

    assert tiny_checkpoint.mlp_types(config | {"num_hidden_layers": 4}) == types

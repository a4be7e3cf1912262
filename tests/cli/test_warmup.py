"""`cumla warmup`: what it compiles, for which model, and what it prints."""

import io
import json
from pathlib import Path

import pytest

from cumla.__main__ import main
from cumla.models import DeepseekV4Config, DeepseekV32Config, DeepseekV41Config, Glm5NextConfig
from support.command_line import error_line


def test_warmup_says_what_was_in_the_cache(monkeypatch):
    from cumla.cli import warmup
    from cumla.kernels import check_results

    monkeypatch.delenv("CUMLA_TEST_KERNELS", raising=False)
    for counts, says in (
        ({"saved": 44}, "All 44 kernels were in the cache"),
        ({"saved": 40, "right": 3, "not reached": 1}, "4 kernels were compiled: 3 tested and right, 1 not reached"),
    ):
        monkeypatch.setattr(warmup, "RESULTS", type(check_results.RESULTS)(counts))
        assert says in warmup.found()
    monkeypatch.setenv("CUMLA_TEST_KERNELS", "0")
    assert "not tested" in warmup.found()


@pytest.mark.parametrize("unkept", ["code", "an error of CuPy's"])
def test_warmup_says_that_nothing_is_kept(monkeypatch, capsys, unkept):
    """At the first kernel: an image would be built without code, and every process of it would compile again."""
    from cumla.cli import warmup
    from cumla.kernels import check_results

    done = []

    def call():
        if unkept == "code":
            check_results.note_unsaved("/cache/compiled-1: Read-only file system")
        else:
            raise PermissionError(30, "Read-only file system", "/cache/compiled-1")

    monkeypatch.setattr(warmup, "tasks", lambda *_: iter([("decode", call), ("prefill", lambda: done.append(1))]))
    try:
        assert main(["warmup", "--backend", "cpu"]) == 1
    finally:
        check_results.UNSAVED.clear()
    error = capsys.readouterr().err
    assert "cumla: error: decode: compiled kernels cannot be kept" in error
    assert "/cache/compiled-1" in error
    assert "NUMBA_CACHE_DIR" in error
    assert not done


def test_kernels_that_an_earlier_process_kept_are_counted(tmp_path, monkeypatch):
    from cumla.kernels import check_results

    monkeypatch.delenv("CUMLA_TEST_KERNELS", raising=False)
    kept, fresh = tmp_path / "kernel.verdict", []
    kept.write_text("right")
    token = check_results.RUNNING.set(check_results.RunningCall("an operation", fresh))
    try:
        before = check_results.RESULTS["saved"]
        check_results.note(check_results.Fresh("kernel", "cpu", "compiler", "remedy", kept))
    finally:
        check_results.RUNNING.reset(token)
    assert check_results.RESULTS["saved"] == before + 1
    assert not fresh


@pytest.mark.parametrize("kind", ["v32", "glm5_next", "mla"])
def test_warm_up_makes_every_call_of_a_kind(kind, capsys):
    topk = ["--topk", "16"] if kind != "mla" else []
    assert main(["warmup", "--backend", "cpu", "--kind", kind, "--heads", "2", "--batch", "1,3", *topk]) == 0
    out = capsys.readouterr().out
    assert f"{kind}, 2 heads, backend cpu" in out
    assert "calls in" in out


def calls_of(*options):
    """The names of the calls for a model of V4's kind."""
    from cumla.cli.warmup import Model, tasks

    return [name for name, _ in tasks(Model("v4", 2, 16, 128, *options), [3], 64, "cpu")]


def test_warm_up_makes_the_calls_of_a_model_s_formats_alone():
    v4, pair = calls_of(), calls_of("DSV41_FP8,DSV41_FP4")
    op = "quantize_and_insert_k_cache"
    assert {f"{op} DSV4_FP8", "sparse_mla_decode DSV4_FP8, two caches"} <= set(v4) - set(pair)
    assert not any("DSV41" in name or "MXFP4" in name for name in v4)
    assert {
        f"{op} DSV41_FP8", f"{op} DSV41_FP4", f"{op} INDEXER_MXFP4", "sparse_mla_decode DSV41_FP8, DSV41_FP4",
        "qnorm_rope_and_insert DSV41_FP8", "norm_rope_and_insert DSV41_FP4",
    } <= set(pair) - set(v4)  # fmt: skip
    assert not any("SPLIT" in name or "DSV4_FP8" in name or "compress" in name.partition(" ")[0] for name in pair[-30:])


def test_warm_up_of_two_formats(capsys):
    given = ["warmup", "--backend", "cpu", "--heads", "2", "--batch", "1", "--topk", "16"]
    assert main([*given, "--layout", "DSV41_FP8,DSV41_FP4"]) == 0
    assert "v4, DSV41_FP8 and DSV41_FP4, 2 heads, backend cpu" in capsys.readouterr().out
    assert "--layout: does not apply to v32, but to v4 and v41" in error_line(
        capsys, [*given[:3], "--kind", "v32", "--layout", "DSV41_FP8"]
    )


@pytest.mark.slow
def test_warm_up_of_v41(capsys):
    assert main(["warmup", "--backend", "cpu", "--kind", "v41", "--heads", "2", "--batch", "1", "--topk", "16"]) == 0
    out = capsys.readouterr().out
    assert "v41, DSV41_FP8 and DSV41_FP4, 2 heads, backend cpu" in out
    assert "calls in" in out


def test_the_calls_of_v41():
    from cumla.cli.warmup import Model, tasks

    def calls(layout):
        return {name for name, _ in tasks(Model("v41", 2, 16, 128, layout), [3], 64, "cpu")}

    pair, one = calls("DSV41_FP8,DSV41_FP4"), calls("DSV41_FP8_SPLIT")
    assert {
        "compress_latents ratio 2", "candidate_topk", "norm_rope_and_insert DSV41_FP4", "decode, 3 requests",
        "select_candidate_blocks", "sparse_mla_decode DSV41_FP8, DSV41_FP4",
    } <= pair  # fmt: skip
    assert any(name.startswith("a step of v41 window, v41 c2a full") for name in pair)
    for name in pair:
        assert not name.startswith(("compress_and_insert", "qnorm_rope_and_insert", "dense_mla_decode"))
        assert not any(other in name for other in ("SPLIT", "DSV4_FP8", "V32_FP8"))
    assert "norm_rope_and_insert DSV41_FP8_SPLIT" in one
    assert not any("FP4" in name and "MXFP4" not in name for name in one)


@pytest.mark.parametrize("layout", ["DSV4_FP8"])
def test_formats_that_v41_has_not(capsys, layout):
    line = error_line(capsys, ["warmup", "--backend", "cpu", "--kind", "v41", "--layout", layout])
    assert f"--layout: got {layout} for v41, expected one of DSV41_FP8,DSV41_FP4; DSV41_FP8; " in line


SIZES = {"hidden_size": 512, "num_attention_heads": 64, "q_lora_rank": 128, "num_hidden_layers": 3}
V4 = SIZES | {"o_groups": 8, "o_lora_rank": 64, "compress_ratios": [1, 4, 128], "index_topk": 256}
V41 = V4 | {"compress_ratios": [0, 2, 1], "kv_source_layer_ids": [1, 2], "index_source_layer_ids": [1, 2]}
V32 = SIZES | {"kv_lora_rank": 512, "index_topk": 2048}
FLASH = SIZES | {"kv_lora_rank": 512, "index_topk": 2048, "index_kpool": 8, "index_n_heads": 16}
LARGE = {"hidden_size": 6144, "num_attention_heads": 64, "num_hidden_layers": 72, "index_topk": 2048}
MLA = {"num_attention_heads": 128, "kv_lora_rank": 512}


def test_warm_up_reads_a_models_config(tmp_path):
    from cumla.cli.warmup import Model

    config, fp4 = tmp_path / "config.json", "DSV41_FP8,DSV41_FP4"
    for written, expected in (
        (V4, Model("v4", 8, 256, q_rank=128)),
        (V4 | {"sliding_window": 64, "index_n_heads": 32}, Model("v4", 8, 256, 64, index_heads=32, q_rank=128)),
        (V41 | {"model_type": "deepseek_v41_text"}, Model("v41", 8, 256, layout=fp4, q_rank=128)),
        ({"model_type": "deepseek_v41", "text_config": V41}, Model("v41", 8, 256, layout=fp4, q_rank=128)),
        (
            V41 | {"candidate_source_layer_id": 1, "candidate_topk_blocks": 512, "compress_ratios": [0, 2, 2]},
            Model("v41", 8, 256, layout=fp4, candidate_blocks=512, q_rank=128),
        ),
        (V32, Model("v32", 8, 2048, context=163840, q_rank=128)),
        (
            V32 | {"model_type": "deepseek_v32", "max_position_embeddings": 4096},
            Model("v32", 8, 2048, context=4096, q_rank=128),
        ),
        (
            {"model_type": "glm5_next", "text_config": FLASH},
            Model("glm5_next", 8, 2048, pool=8, index_heads=16, q_rank=128),
        ),
        (
            {"model_type": "mistral_large4", "text_config": LARGE},
            Model("v32", 8, 2048, index_heads=32, context=1 << 20),
        ),
        (MLA, Model("mla", 16, 512)),
        ({"num_attention_heads": 128, "model_type": "deepseek_v3"}, Model("mla", 16, 512)),
    ):
        config.write_text("\ufeff" + json.dumps(written))
        assert Model.from_config(config, 8) == expected


def test_contexts_longer_than_any_selection(tmp_path):
    from cumla.cli.served_model import MOST_ROWS, Model

    path = tmp_path / "config.json"
    for given, context in ((163840, 163840), (1 << 22, MOST_ROWS)):
        path.write_text(json.dumps({**V32, "max_position_embeddings": given}))
        assert Model.from_config(path, 1).context == context


@pytest.mark.parametrize(
    ("text", "options", "line"),
    [
        ("{}", [], "is no model of DeepSeek's"),
        ("[]", [], "holds no object"),
        ("{", [], "is no JSON"),
        ('{"kv_lora_rank": 512, "num_attention_heads": 64}', ["--ranks", "7"], "--ranks: got 7, expected a divisor"),
        ('{"kv_lora_rank": 512, "num_attention_heads": 256}', [], "--ranks: got 1, expected at most 128 of 256 heads"),
        (None, [], "cannot read"),
        ('{"kv_lora_rank": 512}', [], "num_attention_heads: the configuration has none, expected a number"),
        ('{"kv_lora_rank": 256, "num_attention_heads": 40}', [], "kv_lora_rank: got 256, expected 512"),
        ('{"kv_lora_rank": 512, "num_attention_heads": "x"}', [], "num_attention_heads: got 'x' of type str"),
        ('{"layer_types": 5, "num_attention_heads": 64}', [], "is no model of DeepSeek's"),
        ("{}", ["--batch", "1,x"], "got 'x', expected an integer from 1 to 4096"),
    ],
)
def test_warm_up_of_what_is_no_model(tmp_path, capsys, text, options, line):
    config = tmp_path / "config.json"
    if text is not None:
        config.write_text(text)
    assert line in error_line(capsys, ["warmup", "--config", config, *options])


@pytest.mark.parametrize(
    ("kind", "config", "changes"),
    [
        (DeepseekV4Config, V4, {"compress_ratios": [128, 4]}),
        (DeepseekV4Config, V4, {"sliding_window": [1]}),
        (DeepseekV4Config, V4, {"head_dim": 256}),
        (DeepseekV4Config, V4 | {"model_type": "deepseek_v4"}, {"compress_ratios": [1, 4, 2]}),
        (DeepseekV41Config, V41, {"compress_ratios": [0, 2, 4]}),
        (DeepseekV41Config, V41 | {"model_type": "deepseek_v41"}, {"index_source_layer_ids": [2]}),
        (DeepseekV32Config, V32, {"index_topk": "x"}),
        (DeepseekV32Config, V32, {"num_attention_heads": 0}),
        (DeepseekV32Config, V32 | {"model_type": "deepseek_v32"}, {"kv_lora_rank": 256}),
        (DeepseekV32Config, V32 | {"model_type": "deepseek_v32"}, {"hidden_size": None}),
        (Glm5NextConfig, FLASH | {"model_type": "glm5_next_text"}, {"index_kpool": 3}),
    ],
)
@pytest.mark.parametrize("options", [[], ["--capability", "9.0"]])
def test_warm_up_refuses_what_the_model_refuses(tmp_path, capsys, kind, config, changes, options):
    """In the same words: what is compiled would be of no use."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | changes))
    kind.from_dict(config)
    with pytest.raises((TypeError, ValueError)) as refused:
        kind.from_dict(config | changes)
    assert f"--config: {refused.value}" in error_line(capsys, ["warmup", "--config", path, *options])


def test_warm_up_reads_a_config_from_stdin(monkeypatch):
    from cumla.cli.warmup import Model

    monkeypatch.setattr("sys.stdin", io.StringIO("\ufeff" + json.dumps(MLA)))
    assert Model.from_config(Path("-"), 8) == Model("mla", 16, 512)


@pytest.mark.parametrize("kind", ["v4", "v32", "v41", "glm5_next"])
def test_warm_up_says_what_another_device_gets(kind, capsys):
    given = ["warmup", "--kind", kind, "--batch", "3", "--topk", "64"]
    assert main([*given, "--capability", "8.6"]) == 0
    out = capsys.readouterr().out
    for kernel in ("sparse_mla_decode", "sparse_mla_prefill", "paged_mqa_logits", "top_k_per_row"):
        assert kernel in out
    assert "hopper" not in out
    assert main([*given, "--capability", "9.0"]) == 0
    assert "hopper" in capsys.readouterr().out
    line = error_line(capsys, [*given, "--capability", "7.5"])
    assert "--capability: got '7.5', expected one of 8.0, 8.6" in line
    assert "--backend: does not apply" in error_line(capsys, [*given, "--capability", "8.6", "--backend", "cpu"])

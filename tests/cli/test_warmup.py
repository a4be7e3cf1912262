"""`cumla warmup`: what it compiles, for which model, and what it prints."""

import io
import json
from pathlib import Path

import pytest

from cumla.__main__ import main
from support.command_line import error_line


def test_warmup_says_what_was_in_the_cache(monkeypatch):
    from cumla.cli import warmup
    from cumla.kernels import self_tests

    monkeypatch.delenv("CUMLA_TEST_KERNELS", raising=False)
    for counts, says in (
        ({"kept": 44}, "All 44 kernels were in the cache"),
        ({"kept": 40, "right": 3, "not reached": 1}, "4 kernels were compiled: 3 tested and right, 1 not reached"),
    ):
        monkeypatch.setattr(warmup, "RESULTS", type(self_tests.RESULTS)(counts))
        assert says in warmup.found()
    monkeypatch.setenv("CUMLA_TEST_KERNELS", "0")
    assert "not tested" in warmup.found()


def test_kernels_that_an_earlier_process_kept_are_counted(tmp_path, monkeypatch):
    from cumla.kernels import self_tests

    monkeypatch.delenv("CUMLA_TEST_KERNELS", raising=False)
    kept, fresh = tmp_path / "kernel.verdict", []
    kept.write_text("right")
    token = self_tests.RUNNING.set(self_tests.RunningCall("an operation", fresh))
    try:
        before = self_tests.RESULTS["kept"]
        self_tests.note(self_tests.Fresh("kernel", "cpu", "compiler", "remedy", kept))
    finally:
        self_tests.RUNNING.reset(token)
    assert self_tests.RESULTS["kept"] == before + 1
    assert not fresh


@pytest.mark.parametrize("kind", ["v32", "mla"])
def test_warm_up_makes_every_call_of_a_kind(kind, capsys):
    topk = ["--topk", "16"] if kind == "v32" else []
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


def test_warm_up_reads_a_models_config(tmp_path):
    from cumla.cli.warmup import Model

    config = tmp_path / "config.json"
    v4 = {"num_attention_heads": 64, "compress_ratios": [1, 4], "index_topk": 512, "sliding_window": 128}
    v41 = v4 | {"compress_ratios": [0, 2, 1], "kv_source_layer_ids": [1, 2]}
    for written, expected in (
        (v4, Model("v4", 8, 512)),
        (v41 | {"model_type": "deepseek_v41_text"}, Model("v41", 8, 512, layout="DSV41_FP8,DSV41_FP4")),
        ({"model_type": "deepseek_v41", "text_config": v41}, Model("v41", 8, 512, layout="DSV41_FP8,DSV41_FP4")),
        ({"num_attention_heads": 128, "kv_lora_rank": 512, "index_topk": 2048}, Model("v32", 16, 2048)),
        ({"num_attention_heads": 128, "kv_lora_rank": 512}, Model("mla", 16, 512)),
    ):
        config.write_text("\ufeff" + json.dumps(written))
        assert Model.from_config(config, 8) == expected


def test_contexts_longer_than_any_selection(tmp_path):
    from cumla.cli.served_model import MOST_ROWS, Model

    path, sizes = tmp_path / "config.json", {"num_attention_heads": 64, "kv_lora_rank": 512, "index_topk": 2048}
    for given, context in ((163840, 163840), (1 << 22, MOST_ROWS)):
        path.write_text(json.dumps({**sizes, "max_position_embeddings": given}))
        assert Model.from_config(path, 1).context == context


@pytest.mark.parametrize(
    ("text", "options", "line"),
    [
        ("{}", [], "is no model of DeepSeek's"),
        ("[]", [], "holds no object"),
        ("{", [], "is no JSON"),
        ('{"kv_lora_rank": 512, "num_attention_heads": 64}', ["--ranks", "7"], "--ranks: got 7, expected a divisor"),
        (None, [], "cannot read"),
        ('{"kv_lora_rank": 512}', [], "num_attention_heads: got None, expected an integer from 1"),
        ('{"kv_lora_rank": 256, "num_attention_heads": 40}', [], "kv_lora_rank: got 256, expected 512"),
        ('{"index_topk": "x", "num_attention_heads": 64}', [], "index_topk: got 'x', expected an integer from 1"),
        ('{"compress_ratios": [4], "num_attention_heads": 64, "sliding_window": [1]}', [], "sliding_window: got [1]"),
        ('{"layer_types": 5, "num_attention_heads": 64}', [], "is no model of DeepSeek's"),
        ("{}", ["--batch", "1,x"], "got 'x', expected an integer from 1 to 4096"),
    ],
)
def test_warm_up_of_what_is_no_model(tmp_path, capsys, text, options, line):
    config = tmp_path / "config.json"
    if text is not None:
        config.write_text(text)
    assert line in error_line(capsys, ["warmup", "--config", config, *options])


def test_warm_up_reads_a_config_from_stdin(monkeypatch):
    from cumla.cli.warmup import Model

    monkeypatch.setattr("sys.stdin", io.StringIO('\ufeff{"num_attention_heads": 128, "kv_lora_rank": 512}'))
    assert Model.from_config(Path("-"), 8) == Model("mla", 16, 512)


@pytest.mark.parametrize("kind", ["v4", "v32", "v41"])
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

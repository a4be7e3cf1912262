"""`--batch-invariant` of `cumla replay` and `cumla warmup`."""

import json

import pytest

from cumla.__main__ import main
from cumla.cli.served_model import Model
from cumla.cli.serving_calls import decodes_of_any_number, sparse_calls

REPLAY = ["replay", "--requests", "2", "--max-len", "200", "--backend", "cpu", "--batch-invariant"]


def test_a_replay_is_right(tmp_path):
    results = tmp_path / "results.json"
    assert main([*REPLAY, "--layers", "c4a,v32", "--json", str(results)]) == 0
    found = json.loads(results.read_text())["verification"]
    assert found["samples"]
    assert not found["failures"]


def test_a_replay_of_dense_layers_is_right():
    assert main([*REPLAY, "--layers", "mla"]) == 0


def test_a_replay_on_ranks_is_right():
    assert main([*REPLAY, "--layers", "c4a,v32,mla", "--ranks", "2"]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layers", "c4a", "--prefill-path", "rows"], "--prefill-path: got rows with --batch-invariant, expected"),
    ],
)
def test_options_that_do_not_fit(capsys, options, message):
    assert main([*REPLAY, *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_warm_up_makes_the_calls_of_the_mode(monkeypatch, batch_invariant):
    from cumla.cli import serving_calls

    seen = []

    def decode(*arguments, batch_invariant=None, plan=None, **keywords):
        seen.append((batch_invariant, None if plan is None else plan.batch_invariant))

    monkeypatch.setattr(serving_calls, "sparse_mla_decode", decode)
    model = Model("v4", 8, 16, batch_invariant=batch_invariant)
    for name, call in sparse_calls(model, 2, 64, "cpu"):
        if name == "decode":
            call()
    assert set(seen) == {(batch_invariant, None), (batch_invariant, batch_invariant)}
    decodes_of_any_number(model, 2, "cpu")
    assert {mode for mode, _ in seen} == {batch_invariant}

"""The examples' whole models against transformers' logits and tokens."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from seeded_weights import seeded_weights

import cumla
from support.models import outputs, records, relative_rms

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
MODELS = {"v4": "deepseek_v4", "v32": "deepseek_v32"}


class Golden:
    """A case of models.npz as a checkpoint on disk, and its tokens and logits."""

    def __init__(self, case, folder):
        import tiny_checkpoint

        self.record = record = records("models")[case]
        tiny_checkpoint.write(folder, record["config"], record["seed"])
        self.prompt_length, self.new_tokens = record["n_prompt"], record["n_new"]
        self.tokens = outputs("models")[f"{case}/tokens"]
        self.logits = outputs("models")[f"{case}/logits"]
        self.prompt_logits = outputs("models")[f"{case}/prompt_logits"]

    def model(self, folder, **options):
        module = __import__(MODELS[self.record["model"]])
        return module.Model(folder, longest=1024, requests=3, batch_tokens=1024, **options)


def fed(model, golden, splits):
    """Logits of all golden tokens, in these splits, then one by one; V3.2's ties are broken as in torch."""
    from serving import Request, Server

    server = Server(model, model.num_pages)
    request = Request(0, golden.tokens.tolist(), 0)
    rows = []
    for count in [*splits, *[1] * (len(golden.tokens) - sum(splits))]:
        server.pages.reserve(request, request.computed + count)
        batch, tables = server.batch([(request, count)])
        metadata = model.build(batch, tables)
        tokens = golden.tokens[request.computed : request.computed + count]
        rows.append(model.forward(tokens, metadata, np.arange(count)))
        request.computed += count
        server.pages.forget(request)
    return np.concatenate(rows)


def break_tie(model, token, taken):
    """Layer 0 of V3.2's case: the 64th place of one token is tied at a score of exactly 0, and torch takes `taken`."""
    select = model.layers[0].indexer.select

    def choose(step, q, weights, memory):
        chosen, tokens = select(step, q, weights, memory), step.metadata.tokens
        for row in np.flatnonzero(tokens.positions == token):
            assert taken not in chosen[row]
            tied = [x for x in chosen[row] if x == 63]
            assert tied, "the lowest of the tied"
            chosen[row][chosen[row] == 63] = taken
        if memory.mapped:  # attention's arguments for decodes
            cumla.compute_global_topk_indices_and_lens(
                chosen[: memory.mapped], tokens.token_to_req_indices, step.rows.block_table,
                step.caches.indexer.shape[1], tokens.is_valid_token, compact=True,
                out=(memory.slots[: memory.mapped], memory.lens[: memory.mapped]),
            )  # fmt: skip
        return chosen

    model.layers[0].indexer.select = choose


@pytest.mark.parametrize("case", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_logits_and_greedy_tokens_equal_transformers(tmp_path, case):
    golden = Golden(case, tmp_path)
    model = golden.model(tmp_path, cache_format="float32")
    if case == 2:
        break_tie(model, 209, 176)
    first = golden.prompt_length
    logits = fed(model, golden, [first // 2, first - first // 2])
    assert relative_rms(logits[first - 1 :], golden.logits) < 1e-4
    assert relative_rms(logits[:first:16], golden.prompt_logits) < 1e-4
    np.testing.assert_array_equal(logits[first - 1 : -1].argmax(axis=1), golden.tokens[first:])


@pytest.mark.parametrize("case", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_continuous_batching_generates_the_golden_tokens(tmp_path, case):
    """Three prompts, chunks, and too few pages for all: one request is preempted and starts again."""
    from serving import Server

    golden = Golden(case, tmp_path)
    model = golden.model(tmp_path, cache_format="float32")
    if case == 2:
        break_tie(model, 209, 176)
    prompt = golden.tokens[: golden.prompt_length].tolist()
    pages = dict(model.num_pages, window=8 if case == 0 else 9)
    server = Server(model, pages, batch_tokens=150)
    new = golden.new_tokens
    requests = server.generate([prompt, prompt[:120], prompt], new)
    for request in (requests[0], requests[2]):
        assert request.tokens == golden.tokens[: golden.prompt_length + new].tolist()
    assert server.preempted >= 1
    for name, free in server.pages.free.items():
        assert sorted(free) == list(range(pages[name]))


@pytest.mark.slow
@pytest.mark.parametrize(("cache_format", "bound"), [("bfloat16", 0.06), ("fp8", 0.4)])
@pytest.mark.parametrize("case", [0])
def test_rounded_caches_stay_near(tmp_path, case, cache_format, bound):
    """Selection amplifies rounding: about 1 to 2.5% and 15 to 25% were simulated; the bounds are for bugs.

    In case 2 a tie at exactly 0 affects all tokens after it, and is broken differently: 36% and 70%.
    """
    golden = Golden(case, tmp_path)
    model = golden.model(tmp_path, cache_format=cache_format)
    logits = fed(model, golden, [golden.prompt_length])[golden.prompt_length - 1 :]
    difference = relative_rms(logits, golden.logits)
    agreement = (logits.argmax(axis=1) == golden.logits.argmax(axis=1)).mean()
    print(f"case {case}, {cache_format}: {difference:.2%}, first choice the same for {agreement:.0%}")
    assert difference < bound


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_examples_run_without_torch(kind, tmp_path):
    script = (
        "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); path = sys.argv.pop(1);"
        "sys.argv[0] = path; runpy.run_path(path, run_name='__main__');"
        "assert not {'torch', 'jax', 'cupy', 'transformers'} & set(sys.modules)"
    )
    picture = tmp_path / "parts.png"
    run = subprocess.run(
        [sys.executable, "-c", script, str(EXAMPLES), str(EXAMPLES / f"{MODELS[kind]}.py"), "--prompts", "2",
         "--longest", "40", "--new-tokens", "2", "--plot", str(picture)],
        capture_output=True, text=True, check=False, cwd=EXAMPLES.parent,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "40 tokens -> [" in run.stdout
    assert picture.stat().st_size > 1000


def test_more_prompts_than_tokens_and_prompts_without(tmp_path, capsys, monkeypatch):
    """One answer per prompt, of the requested length; a prompt without a token is named."""
    import deepseek_v4
    import serving
    import tiny_checkpoint

    monkeypatch.setattr(sys, "argv", ["x", "--prompts", "3", "--longest", "2", "--new-tokens", "1"])
    serving.main("V4", deepseek_v4.Model, tiny_checkpoint.V4)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("[")[0] for line in lines[:3]] == ["1 tokens -> ", "1 tokens -> ", "2 tokens -> "]
    assert all(line.count(",") == 0 for line in lines[:3])
    monkeypatch.setattr(sys, "argv", ["x", "--new-tokens", "0"])
    with pytest.raises(SystemExit):
        serving.main("V4", deepseek_v4.Model, tiny_checkpoint.V4)
    assert "got 0, expected at least 1" in capsys.readouterr().err
    with pytest.raises(ValueError, match="prompts: got one without tokens"):
        serving.Server.generate(None, [[1], []], 1)


def test_a_tiny_checkpoint_has_the_golden_names_and_weights(tmp_path):
    import tiny_checkpoint

    from cumla.models.safetensors import Checkpoint

    for case in range(3):
        record = records("models")[case]
        tiny_checkpoint.write(tmp_path / str(case), record["config"], record["seed"])
        tensors = Checkpoint(tmp_path / str(case))
        weights = seeded_weights(record["parameters"], record["seed"])
        tables = {name for name in tensors if name.endswith("tid2eid")}
        assert set(tensors) - tables == set(weights)
        assert tables == set(record["tid2eid"])
        for name in sorted(weights)[::7]:
            np.testing.assert_array_equal(tensors[name], weights[name])
    assert json.loads((tmp_path / "0" / "config.json").read_text()) == records("models")[0]["config"]

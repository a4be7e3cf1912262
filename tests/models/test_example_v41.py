"""The example's toy V4.1 against float64, and generation with guesses against generation without."""

import sys

import numpy as np
import pytest

from cumla.models.safetensors import Checkpoint
from oracles.toy_v41 import Toy
from support.models import relative_rms

PROMPT = np.random.default_rng(20).integers(2, 512, 141).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import tiny_checkpoint

    made = tmp_path_factory.mktemp("v41")
    tiny_checkpoint.write(made, tiny_checkpoint.V41, 7)
    return made


def server_of(folder, pages=None, batch_tokens=150, guesses=None, cache_format="float32"):
    import deepseek_v41

    model = deepseek_v41.Model(folder, cache_format=cache_format, longest=300, requests=3, batch_tokens=batch_tokens)
    if guesses is not None:
        model.draft = guesses
    return deepseek_v41.DraftingServer(model, model.num_pages | (pages or {}), batch_tokens)


def without_drafts(server):
    server.model.block = 0
    return server


@pytest.fixture(scope="module")
def exact(folder):
    import tiny_checkpoint

    return Toy(tiny_checkpoint.V41, dict(Checkpoint(folder).items()), 512)


@pytest.fixture(scope="module")
def plain(folder):
    """Tokens and logits of two requests, without guesses."""
    server = without_drafts(server_of(folder))
    return server.generate([PROMPT, PROMPT[:7]], 9)


def test_logits_are_those_of_float64(exact, plain):
    """Prompts in chunks, then decodes: positions at which selections are full, and candidates fewer than the rows."""
    for request, prompt in zip(plain, (PROMPT, PROMPT[:7]), strict=True):
        want = exact.logits(request.tokens[:-1])[len(prompt) - 1 :]
        assert relative_rms(np.stack(request.logits), want) < 1e-4
        assert request.tokens[len(prompt) :] == want.argmax(axis=1).tolist()
    assert exact.margin > 1e-4  # float32 and float64 then select the same rows


def test_guesses_are_those_of_float64(folder, exact):
    """Draft layers retain rows of the model's hidden states only; a block's rows are overwritten."""
    server, asked = server_of(folder), []
    draft, logits = server.model.draft, server.model.logits

    def watched(tokens, batch):
        server.model.logits = lambda h, norm: asked.append(logits(h, norm)) or asked[-1]
        try:
            return draft(tokens, batch)
        finally:
            server.model.logits = logits

    server.model.draft = watched
    (request,) = server.generate([PROMPT], 4)
    assert 1 <= len(asked) <= 3
    assert server.accepted == 0  # each step generated one token
    end = len(PROMPT) + len(asked) - 1
    exact.logits(request.tokens[:end])
    assert relative_rms(asked[-1], exact.guesses(request.tokens[end])) < 1e-4


@pytest.mark.parametrize(
    "right", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(4, marks=pytest.mark.slow), 5]
)
def test_guesses_change_no_token(folder, plain, right):
    """The first `right` guesses of each block are the model's tokens, the others are wrong."""
    answers = {tuple(r.tokens[:n]): r.tokens[n:] for r in plain for n in range(len(r.tokens))}

    def guesses(tokens, batch):
        found = []
        for request in server.running:
            if request.computed == len(request.tokens) - 1 and request.computed:
                its = (answers[tuple(request.tokens)] + [0] * 5)[:5]
                found.append([x if i < right else (x + 1) % 512 for i, x in enumerate(its)])
        return np.array(found[: len(tokens)])

    server = server_of(folder, guesses=guesses)
    requests = server.generate([PROMPT, PROMPT[:7]], 9)
    for got, want in zip(requests, plain, strict=True):
        assert got.tokens == want.tokens
        assert relative_rms(np.stack(got.logits), np.stack(want.logits)) < 1e-4
    assert (server.accepted > 0) == (right > 0)
    assert server.accepted < server.proposed or right == 5


@pytest.mark.slow
def test_a_preempted_request_starts_again(folder):
    """Both have two pages and need a third: the younger gives its pages back, its ring and guesses as well."""
    server = server_of(folder, {"window": 4}, batch_tokens=256)
    one, other = server.generate([PROMPT[:124], PROMPT[:123]], 9)
    assert server.preempted == 1
    for got in (one, other):
        (want,) = without_drafts(server_of(folder)).generate([got.tokens[:-9]], 9)
        assert got.tokens == want.tokens
    for name, free in server.pages.free.items():
        assert sorted(free) == list(range({**server.model.num_pages, "window": 4}[name]))


@pytest.mark.slow
@pytest.mark.parametrize(("cache_format", "bound"), [("bfloat16", 0.1), ("fp8", 0.5), ("fp4", 0.6), ("fp4_split", 0.6)])
def test_rounded_caches_stay_near(folder, plain, cache_format, bound):
    """Selection amplifies rounding; the bounds are for bugs."""
    server = without_drafts(server_of(folder, cache_format=cache_format))
    for got, want in zip(server.generate([PROMPT, PROMPT[:7]], 1), plain, strict=True):
        difference = relative_rms(got.logits[0], want.logits[0])
        print(cache_format, difference)
        assert difference < bound


@pytest.mark.slow
def test_the_script(folder, capsys, monkeypatch):
    import deepseek_v41
    import serving
    import tiny_checkpoint

    monkeypatch.setattr(sys, "argv", ["x", "--prompts", "2", "--longest", "20", "--new-tokens", "3"])
    server = serving.main(
        "V4.1", deepseek_v41.Model, tiny_checkpoint.V41, deepseek_v41.FORMATS, deepseek_v41.DraftingServer
    )
    assert "20 tokens -> [" in capsys.readouterr().out
    assert server.proposed > 0

"""Random schedules of the example server: each request's tokens and logits are those of the request alone."""

import numpy as np
import pytest

from support.lab import Lab
from support.operations import assert_same_bits

MODELS = {"v32": "deepseek_v32", "v4": "deepseek_v4", "v41": "deepseek_v41"}
LONGEST, NEW, PROMPTS = 140, 4, 6


class Served:
    """A tiny model, prompts, and the answers to each prompt alone, in one step and then token by token."""

    def __init__(self, name, folder, lab, cache_format):
        import tiny_checkpoint
        from serving import Server

        module = __import__(MODELS[name])
        tiny_checkpoint.write(folder, getattr(tiny_checkpoint, name.upper()), seed=6000)
        self.server_class = getattr(module, "DraftingServer", Server)
        self.model = module.Model(
            folder, longest=LONGEST + NEW, requests=PROMPTS, batch_tokens=512, cache_format=cache_format,
            batch_invariant=True, xp=lab.xp, backend=lab.backend,
        )  # fmt: skip
        rng = np.random.default_rng(0)
        lengths = [1, 7, 64, 25, 40, LONGEST]
        self.prompts = [rng.integers(2, 512, n).tolist() for n in lengths]
        self.answers = [self.generate([prompt], 512, 1)[0] for prompt in self.prompts]

    def server(self, batch_tokens, most, share=1.0, prefix_cache=False):
        from page_cache import PageCache

        needed = {name: -(-(LONGEST + NEW) // size) + 1 for name, (size, _) in self.model.groups.items()}
        pages = {name: max(needed[name], int(share * n)) for name, n in self.model.num_pages.items()}
        server = self.server_class(self.model, pages, batch_tokens, most)
        if prefix_cache:
            server.cache = PageCache(self.model, server.pages, 0, 8)
        return server

    def generate(self, prompts, batch_tokens, most, **options):
        server = self.server(batch_tokens, most, **options)
        requests = server.generate(prompts, NEW)
        self.preempted = server.preempted
        return requests

    def check(self, rng):
        """One random schedule. Returns how many requests were preempted, and computed again."""
        chosen = rng.choice(PROMPTS, rng.integers(2, PROMPTS), replace=bool(rng.random() < 0.3))
        found = self.generate(
            [self.prompts[i] for i in chosen], int(rng.choice([3, 5, 17, 64, 100, 300])), int(rng.integers(1, 9)),
            share=float(rng.choice([0, 0.3, 1])), prefix_cache=bool(rng.random() < 0.3),
        )  # fmt: skip
        for request, i in zip(found, chosen, strict=True):
            assert request.tokens == self.answers[i].tokens
            for got, want in zip(request.logits, self.answers[i].logits, strict=True):
                assert_same_bits(got, want)
        return self.preempted


CASES = [(name, cache_format) for name in MODELS for cache_format in ("float32", "fp4" if name == "v41" else "fp8")]


@pytest.fixture(scope="module", params=CASES, ids=lambda x: " ".join(x))
def served(request, tmp_path_factory):
    name, cache_format = request.param
    return Served(name, tmp_path_factory.mktemp("served"), Lab("cpu", on_device=False), cache_format)


@pytest.mark.thorough(when=lambda x: x.get("served") not in (("v4", "fp8"), ("v41", "fp4")))
def test_a_few_schedules(served, rng):
    for _ in range(2):
        served.check(rng)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(2))
def test_many_schedules(served, rng, part):
    """15 of them: of three models with two formats each in two parts, 180."""
    for _ in range(15):
        served.check(rng)


@pytest.mark.parametrize("name", ["Model", "Flash"])
def test_glm_in_any_chunks(rng, name):
    """The example without a server: each token's logits in one step, in chunks, and token by token."""
    import glm
    from seeded_weights import seeded_weights

    config = glm.TOY if name == "Model" else glm.FLASH
    weights, tokens = seeded_weights(glm.shapes_of(config), 0), rng.integers(2, 512, 90)
    found = []
    for counts in ([90], [31, 1, 40, 1, 1, 16], [1] * 90):
        model = getattr(glm, name)(config, weights, batch_invariant=True)
        ends = np.cumsum(counts)
        parts = [model.logits(tokens[end - n : end], end - n) for end, n in zip(ends, counts, strict=True)]
        found.append(np.concatenate(parts))
    for got in found[1:]:
        assert_same_bits(got, found[0])


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_schedules_on_a_device(tmp_path, rng, name):
    import cupy

    assert cupy.cuda.is_available()
    on_device = Served(name, tmp_path, Lab("cuda", on_device=True), "fp4" if name == "v41" else "fp8")
    for _ in range(25):
        on_device.check(rng)

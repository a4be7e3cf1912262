"""The examples' server with a prefix cache over all page groups, and with preemption by swap: the same tokens."""

import numpy as np
import pytest

from support.models import relative_rms

RNG = np.random.default_rng(3)
PROMPT = RNG.integers(2, 256, 141).tolist()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    import tiny_checkpoint

    made = {}
    for name, config in (("v4", tiny_checkpoint.V4), ("v32", tiny_checkpoint.V32), ("v41", tiny_checkpoint.V41)):
        made[name] = tmp_path_factory.mktemp(name)
        tiny_checkpoint.write(made[name], config, 7)
    return made


def server_of(name, folder, num_pages=None, host_pages=None, **options):
    import deepseek_v4
    import deepseek_v32
    import deepseek_v41
    from page_cache import PageCache
    from serving import Server

    module = {"v4": deepseek_v4, "v32": deepseek_v32, "v41": deepseek_v41}[name]
    model = module.Model(folder, cache_format="float32", longest=300, requests=4, batch_tokens=256)
    make = deepseek_v41.DraftingServer if name == "v41" else Server
    server = make(model, model.num_pages | (num_pages or {}), 256, **options)
    if host_pages is not None:
        server.cache = PageCache(model, server.pages, host_pages)
    return server


def check_same(got, want):
    for one, other in zip(got, want, strict=True):
        assert one.tokens == other.tokens
        assert relative_rms(np.stack(one.logits), np.stack(other.logits)) < 1e-4


def is_free(server):
    """Whether no request has a page once the cache's prefixes are evicted."""
    while server.cache.evict():
        pass
    return not server.pages.shared and all(
        len(free) == len(set(free)) == server.model.num_pages[name] for name, free in server.pages.free.items()
    )


@pytest.mark.parametrize("name", ["v4", "v32", pytest.param("v41", marks=pytest.mark.slow)])
def test_later_prompts_begin_with_a_hit(folders, name):
    """A prompt again, one that continues it, and one that leaves it early: only V3.2 has the rows of any prefix."""
    prompts = [PROMPT, PROMPT, [*PROMPT, 5, 6, 7], [*PROMPT[:70], 9]]
    want = server_of(name, folders[name]).generate(prompts, 3)
    server = server_of(name, folders[name], host_pages=0, max_running=1)
    check_same(server.generate(prompts, 3), want)
    hits = [server.cache.hits.get(number, 0) for number in range(4)]
    assert hits[0] == 0
    assert hits[2] == len(PROMPT)
    assert hits[1] == (140 if name == "v32" else 0)  # a token is computed; the first row of its window was not kept
    assert hits[3] == (70 if name == "v32" else 0)
    assert server.computed <= sum(len(prompt) + 2 for prompt in prompts) - sum(hits) + 6 * len(prompts)
    assert is_free(server)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in ("v4", "v32")] + ["v41"])
def test_a_preempted_request_goes_on_where_it_was(folders, name):
    """Two requests have two window pages each and need a third: one is swapped out, and computes nothing twice."""
    prompts, pages = [PROMPT[:124], PROMPT[1:125]], {"window": 4}
    want = server_of(name, folders[name]).generate(prompts, 9)
    again, swapped = (server_of(name, folders[name], pages, host_pages=count) for count in (0, 40))
    for server in (again, swapped):
        server.cache.most = 0
        check_same(server.generate(prompts, 9), want)
        assert server.preempted >= 1
    assert swapped.cache.swapped == swapped.preempted
    assert swapped.computed < again.computed
    assert all(swapped.cache.host_free.left(group.name) == 40 for group in swapped.model.description)


def test_a_full_host_pool_lets_requests_start_again(folders):
    prompts = [PROMPT[:124], PROMPT[1:125]]
    want = server_of("v4", folders["v4"]).generate(prompts, 9)
    server = server_of("v4", folders["v4"], {"window": 4}, host_pages=1)
    check_same(server.generate(prompts, 9), want)
    assert server.preempted >= 1
    assert server.cache.swapped == 0
    assert server.cache.host_free.left("window") == 1

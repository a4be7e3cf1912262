"""examples/disaggregated.py: prompts computed by another process, the tokens of a single process."""

import ctypes
import functools
import json
import multiprocessing
import sys
import threading

import numpy as np
import pytest
from models.test_page_cache import PROMPT, check_same, server_of

from cumla import pages

PROMPTS = [PROMPT, PROMPT[:1], [*PROMPT[:100], 9], PROMPT[3:90], PROMPT[5:133], PROMPT[:8]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    import tiny_checkpoint

    made = {}
    for name, config in (("v4", tiny_checkpoint.V4), ("v32", tiny_checkpoint.V32), ("v41", tiny_checkpoint.V41)):
        made[name] = tmp_path_factory.mktemp(name)
        tiny_checkpoint.write(made[name], config, 7)
    return made


def moved(make, server, new_tokens, prompts=PROMPTS, tamper=None):
    """The requests, with prompts computed in another thread. tamper: changes a packed request in its slot."""
    import disaggregated
    import serving

    requests = serving.requests_of(prompts, new_tokens)
    size = max(pages.packed_size(server.model.description, len(prompt)) for prompt in prompts)
    shared = (ctypes.c_uint8 * (disaggregated.SLOTS * size))()
    ours, theirs = multiprocessing.Pipe()
    other = threading.Thread(target=disaggregated.prefill, args=(theirs, shared, make, prompts), daemon=True)
    other.start()
    slots = disaggregated.slots_of(shared)
    try:
        if tamper is not None:
            assert ours.poll(60)
            tamper(slots)
        disaggregated.decode(server, ours, slots, requests)
    finally:
        ours.close()
        other.join()
        theirs.close()
    return requests


@pytest.mark.parametrize("name", ["v4", "v32", "v41"])
def test_moved_requests_go_on_where_they_were(folders, name):
    """More requests than slots; the decode process has too few pages for all of them."""
    make = functools.partial(server_of, name, folders[name], max_running=4)
    want = make().generate(PROMPTS, 5)
    server = make({"window": 7}, host_pages=40)
    free = {group: len(free) for group, free in server.pages.free.items()}
    check_same(moved(functools.partial(make, host_pages=0), server, 5), want)
    assert server.computed < len(PROMPTS) * (4 + 20)  # no prompt is computed again
    assert {group: len(free) for group, free in server.pages.free.items()} == free


def test_hits_of_the_other_process_are_reported(folders):
    make = functools.partial(server_of, "v32", folders["v32"], host_pages=0, max_running=1)
    server = make()
    requests = moved(make, server, 2, [PROMPT, [*PROMPT, 5, 6]])
    assert server.cache.hits == {0: 0, 1: len(PROMPT)}
    assert all(request.done for request in requests)


def test_a_changed_byte_is_an_error_before_anything_is_written(folders):
    server = server_of("v4", folders["v4"], host_pages=0)
    before = [pool.array.copy() for pool in server.cache.device.pools]

    def tamper(slots):
        slots[:, 100] ^= 1

    with pytest.raises(ValueError, match="array: got checksum"):
        moved(functools.partial(server_of, "v4", folders["v4"], host_pages=0), server, 2, PROMPTS[:1], tamper)
    for pool, its in zip(server.cache.device.pools, before, strict=True):
        np.testing.assert_array_equal(pool.array, its)


def test_an_error_of_the_other_process_is_raised(folders):
    def fail():
        raise OSError("no such folder")

    with pytest.raises(RuntimeError, match=r"(?s)ended with an error:\n.*OSError: no such folder"):
        moved(fail, server_of("v4", folders["v4"], host_pages=0), 2)


def test_the_option(capsys, monkeypatch):
    """Two processes, started as by the command line."""
    import deepseek_v4
    import serving
    import tiny_checkpoint

    printed = []
    for more in ([], ["--disaggregated"]):
        monkeypatch.setattr(sys, "argv", ["x", "--prompts", "2", "--longest", "30", "--new-tokens", "4", *more])
        server = serving.main("V4", deepseek_v4.Model, tiny_checkpoint.V4)
        printed.append(capsys.readouterr().out.splitlines()[:2])
    assert printed[0] == printed[1]
    assert len(json.loads(printed[0][1].partition("-> ")[2])) == 4
    assert server.computed < 15  # of prompts, none

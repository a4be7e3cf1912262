"""examples/server.py: completions over HTTP, streamed or whole, from a batch that changes at every step."""

import contextlib
import http.client
import json
import threading
import time

import numpy as np
import pytest
import server as http_server
import tiny_checkpoint

LONGEST = 160


@contextlib.contextmanager
def running(folder, model="v4", **options):
    server = http_server.start(model, folder, longest=LONGEST, running=4, cache_format="float32", **options)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        server.engine.stop()
        thread.join()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for name, (_, _, config) in http_server.MODELS.items():
        made[name] = tmp_path_factory.mktemp(name)
        tiny_checkpoint.write(made[name], config, seed=6000)
    return made


@pytest.fixture(scope="module")
def served(folders):
    with running(folders["v4"]) as server:
        yield server


def post(server, body, path="/v1/completions"):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=120)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, data)
    response = connection.getresponse()
    found = response.status, json.loads(response.read())
    connection.close()
    return found


def prompts(count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(2, 512, rng.integers(1, 100)).tolist() for _ in range(count)]


def alone(folder, model, prompt, new_tokens):
    """The new tokens of a prompt without other requests, drafts or shared pages."""
    model_class, _, _ = http_server.MODELS[model]
    made = model_class(folder, longest=LONGEST, requests=1, cache_format="float32")
    (request,) = http_server.Server(made, made.num_pages).generate([prompt], new_tokens)
    return request.tokens[len(prompt) :]


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("model", http_server.MODELS)
def test_clients_at_once_get_the_tokens_of_each_prompt_alone(model, folders):
    asked = prompts(6, seed=1)
    asked[3] = asked[2] + asked[3]  # its beginning may be a hit
    asked[3] = asked[3][: LONGEST - 5]
    found = [None] * len(asked)
    with running(folders[model], model) as server:

        def run(i):
            found[i] = http_server.stream(server.server_port, asked[i], 5)[0]

        threads = [threading.Thread(target=run, args=(i,)) for i in range(len(asked))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [alone(folders[model], model, prompt, 5) for prompt in asked]


def test_a_whole_answer_is_the_streamed_one(served):
    (prompt,) = prompts(1)
    status, body = post(served, {"prompt": prompt, "max_tokens": 6})
    streamed, _, _ = http_server.stream(served.server_port, prompt, 6)
    assert status == 200
    assert body["choices"][0]["token_ids"] == streamed
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 6
    assert body["usage"]["total_tokens"] == len(prompt) + 6


def test_text_is_its_bytes(served):
    _, as_text = post(served, {"prompt": "Hé", "max_tokens": 3})
    _, as_tokens = post(served, {"prompt": [2 + byte for byte in "Hé".encode()], "max_tokens": 3})
    assert as_text["choices"] == as_tokens["choices"]
    assert http_server.text([2 + byte for byte in "Hé".encode()] + [500]) == "Hé"


def test_a_longer_prompt_begins_with_cached_tokens(served):
    prompt = prompts(1, seed=7)[0] * 2
    first, _, _ = http_server.stream(served.server_port, prompt[:90], 2)
    _, body = post(served, {"prompt": prompt[:90] + first + [5, 6, 7], "max_tokens": 2})
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 90


@pytest.mark.parametrize("streams", [True, False])
def test_a_closed_connection_cancels_its_request(folders, streams):
    with running(folders["v4"]) as server:
        free = {name: len(pages) for name, pages in server.engine.server.pages.free.items()}
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
        body = {"prompt": [5, 6, 7], "max_tokens": LONGEST - 3, "stream": streams}
        connection.request("POST", "/v1/completions", json.dumps(body))
        if streams:
            response = connection.getresponse()
            response.readline()
            response.close()
        connection.close()
        wait_until(lambda: not server.engine._active and not server.engine.server.running)
        assert server.engine.server.computed < LONGEST - 1
        while server.engine.server.cache.evict():
            pass
        assert {name: len(pages) for name, pages in server.engine.server.pages.free.items()} == free


def test_an_error_of_the_engine_reaches_the_client_and_later_requests_run(served, monkeypatch):
    model = served.engine.server.model

    def fail(*_):
        raise ValueError("no such luck")

    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", fail)
        status, body = post(served, {"prompt": [5], "max_tokens": 2})
        assert status == 500
        assert body["error"]["message"] == "no such luck"
    assert post(served, {"prompt": [5], "max_tokens": 2})[0] == 200


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (b"{", None, "the body is no JSON"),
        ([], None, "the body is of type list, expected an object"),
        ({}, "prompt", "prompt: expected text"),
        ({"prompt": []}, "prompt", "prompt: expected text"),
        ({"prompt": [1, 512]}, "prompt", "a list of tokens from 0 to 511"),
        ({"prompt": [True]}, "prompt", "prompt: expected text"),
        ({"prompt": ["a", "b"]}, "prompt", "prompt: expected text"),
        ({"prompt": [1], "max_tokens": 0}, "max_tokens", "max_tokens: got 0, expected an integer of at least 1"),
        ({"prompt": [1], "max_tokens": LONGEST}, "max_tokens", f"expected at most {LONGEST} together"),
        ({"prompt": [1], "stream": 1}, "stream", "stream: got 1, expected true or false"),
        ({"prompt": [1], "temperature": 0.7}, "temperature", "temperature: got 0.7, expected 0: sampling is greedy"),
        ({"prompt": [1], "n": 2}, "n", "n: got 2, expected 1"),
    ],
)
def test_bodies_that_are_not_served(served, body, param, message):
    status, answer = post(served, body)
    assert status == 400
    assert answer["error"]["param"] == param
    assert message in answer["error"]["message"]


def test_other_paths(served):
    assert post(served, {}, "/v1/chat/completions")[0] == 404
    connection = http.client.HTTPConnection("127.0.0.1", served.server_port, timeout=60)
    connection.request("GET", "/v1/models")
    assert json.loads(connection.getresponse().read())["data"][0]["id"] == "v4"
    connection.close()


@pytest.mark.slow
def test_load_of_64_clients(folders, capsys):
    with running(folders["v4"]) as server:
        http_server.load(server.server_port, 64, server.engine)
        wait_until(lambda: not server.engine._active)
        assert not server.engine.server.waiting
    printed = capsys.readouterr().out
    assert "48 answers, 16 cancelled" in printed
    assert " 0 of them cached" not in printed

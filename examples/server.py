"""An HTTP server in the shape of OpenAI's completions, around the whole models of this folder.

    python examples/server.py [FOLDER] [--model v41] [--port 8000]
    curl -N localhost:8000/v1/completions -d '{"prompt": "Once upon", "max_tokens": 16, "stream": true}'
    python examples/server.py --load 64

One thread runs the model: it batches all requests continuously, shares the pages of equal prefixes in all page groups,
and, with V4.1, verifies drafts. Each client has a thread of its own, which waits for tokens. A client that closes its
connection cancels its request. Sampling is greedy. The toy models have no tokenizer: a prompt is a list of token
numbers, or text whose bytes are tokens.

`--load N` starts the server, sends N requests at once from N clients, and prints how long they took.
"""

import argparse
import http.client
import itertools
import json
import pathlib
import queue
import select
import socket
import statistics
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import deepseek_v4
import deepseek_v41
import numpy as np
import tiny_checkpoint
from page_cache import PageCache
from serving import Request, Server, positive

MODELS = {
    "v4": (deepseek_v4.Model, Server, tiny_checkpoint.V4),
    "v41": (deepseek_v41.Model, deepseek_v41.DraftingServer, tiny_checkpoint.V41),
}
FIRST_BYTE = 2  # the token of byte 0
MOST_BODY = 1 << 20  # bytes
POLL = 0.05  # seconds between looks at a connection that waits for a token
# Entries of a body that would change the answer, with the values that are served.
SERVED = {
    "n": (1, None), "best_of": (1, None), "temperature": (0, None), "top_p": (1, None), "logprobs": (None,),
    "echo": (False, None), "stop": (None,), "suffix": (None,), "presence_penalty": (0, None),
    "frequency_penalty": (0, None), "logit_bias": (None,),
}  # fmt: skip


class BadRequestError(Exception):
    """A body that is not served; `param` names its entry."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Completion:
    """A request that a client waits for. `tokens` yields its new tokens, then None, or the exception that ended it."""

    def __init__(self, request: Request, prompt: int) -> None:
        self.request, self.prompt = request, prompt
        self.tokens: queue.SimpleQueue[int | Exception | None] = queue.SimpleQueue()


class Engine(threading.Thread):
    """The thread that computes. Other threads only send it completions, and cancel them.

    Attributes:
        longest: most tokens of a prompt and its answer
    """

    def __init__(self, server: Server, longest: int, vocabulary: int) -> None:
        super().__init__(name="engine", daemon=True)
        self.server, self.longest, self.vocabulary = server, longest, vocabulary
        self._inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._active: dict[int, Completion] = {}
        self._numbers = itertools.count()
        server.on_token = self._on_token

    def submit(self, tokens: list[int], new_tokens: int) -> Completion:
        request = Request(next(self._numbers), list(tokens), new_tokens)
        completion = Completion(request, len(tokens))
        self._inbox.put(("submit", completion))
        return completion

    def cancel(self, completion: Completion) -> None:
        self._inbox.put(("cancel", completion))

    def stop(self) -> None:
        self._inbox.put(("stop", None))
        self.join()

    def cached_tokens(self, completion: Completion) -> int:
        return self.server.cache.hits.get(completion.request.number, 0)

    def run(self) -> None:
        while self._receive():
            try:
                self.server.step()
            except Exception as error:  # every client hears of it, and the next requests begin anew
                for completion in list(self._active.values()):
                    self._end(completion, error)

    def _receive(self) -> bool:
        """Take what other threads sent; waits while there is nothing to compute. False: the engine is to stop."""
        while True:
            try:
                action, completion = self._inbox.get(block=not self._active)
            except queue.Empty:
                return True
            if action == "stop":
                return False
            if action == "submit":
                self._active[completion.request.number] = completion
                self.server.waiting.append(completion.request)
            elif completion.request.number in self._active:
                self._end(completion, None)

    def _on_token(self, request: Request, token: int) -> None:
        completion = self._active[request.number]
        completion.tokens.put(token)
        request.logits[:] = [()] * len(request.logits)  # the server counts them
        if request.done:
            del self._active[request.number]
            completion.tokens.put(None)

    def _end(self, completion: Completion, error: Exception | None) -> None:
        del self._active[completion.request.number]
        self.server.cancel(completion.request)
        completion.tokens.put(error)


class Handler(BaseHTTPRequestHandler):
    """One connection: reads a body, sends it to the engine, and writes tokens as they come."""

    server: "HTTPServer"

    def do_GET(self) -> None:
        if self.path != "/v1/models":
            self._error(404, f"{self.path}: expected /v1/models or /v1/completions")
            return
        self._json(200, {"object": "list", "data": [{"id": self.server.model, "object": "model"}]})

    def do_POST(self) -> None:
        if self.path != "/v1/completions":
            self._error(404, f"{self.path}: expected /v1/completions")
            return
        try:
            tokens, new_tokens, streams = read(self._body(), self.server.engine)
        except BadRequestError as error:
            self._error(400, str(error), error.param)
            return
        completion = self.server.engine.submit(tokens, new_tokens)
        try:
            self._answer(completion, streams)
        except OSError:  # the client is gone
            self.server.engine.cancel(completion)

    def _answer(self, completion: Completion, streams: bool) -> None:
        """Raises ConnectionError once the client has closed its connection."""
        answer = []
        while True:
            try:
                token = completion.tokens.get(timeout=POLL)
            except queue.Empty:
                self._check_connection()
                continue
            if isinstance(token, Exception):
                if streams and answer:
                    self._event({"error": {"message": str(token), "type": "server_error"}})
                else:
                    self._error(500, str(token))
                return
            if streams and not answer:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Connection", "close")
                self.end_headers()
            if token is None:
                break
            answer.append(token)
            if streams:
                self._event(self._completion(completion, [token], None))
        if streams:
            self._event(self._completion(completion, [], "length"))
            self.wfile.write(b"data: [DONE]\n\n")
        else:
            self._json(200, self._completion(completion, answer, "length"))

    def _completion(self, completion: Completion, tokens: list[int], finish: str | None) -> dict[str, Any]:
        request = completion.request
        body: dict[str, Any] = {
            "id": f"cmpl-{request.number}", "object": "text_completion", "model": self.server.model,
            "choices": [{"index": 0, "text": text(tokens), "token_ids": tokens, "finish_reason": finish}],
        }  # fmt: skip
        if finish is not None:
            new = len(request.tokens) - completion.prompt
            body["usage"] = {
                "prompt_tokens": completion.prompt, "completion_tokens": new, "total_tokens": completion.prompt + new,
                "prompt_tokens_details": {"cached_tokens": self.server.engine.cached_tokens(completion)},
            }  # fmt: skip
        return body

    def _body(self) -> Any:
        try:
            length = int(self.headers["Content-Length"])
        except (TypeError, ValueError):
            raise BadRequestError("Content-Length: expected the number of bytes of the body") from None
        if not 0 <= length <= MOST_BODY:
            raise BadRequestError(f"Content-Length: got {length}, expected at most {MOST_BODY}")
        try:
            return json.loads(self.rfile.read(length))
        except ValueError as error:
            raise BadRequestError(f"the body is no JSON: {error}") from None

    def _check_connection(self) -> None:
        readable, _, _ = select.select([self.connection], [], [], 0)
        if readable and not self.connection.recv(1, socket.MSG_PEEK):
            raise ConnectionError("the client closed its connection")

    def _event(self, body: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(body)}\n\n".encode())

    def _json(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _error(self, status: int, message: str, param: str | None = None) -> None:
        kind = "invalid_request_error" if status < 500 else "server_error"
        self._json(status, {"error": {"message": message, "type": kind, "param": param}})

    def log_message(self, *_: Any) -> None:
        pass


class HTTPServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, port: int, engine: Engine, model: str) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.engine, self.model = engine, model


def read(body: Any, engine: Engine) -> tuple[list[int], int, bool]:
    """The prompt's tokens, the number of new tokens, and whether to stream. Raises BadRequestError."""
    if not isinstance(body, dict):
        raise BadRequestError(f"the body is of type {type(body).__name__}, expected an object")
    for name, served in SERVED.items():
        if name in body and body[name] not in served:
            raise BadRequestError(f"{name}: got {body[name]!r}, expected {served[0]!r}: sampling is greedy", name)
    prompt, new_tokens, streams = body.get("prompt"), body.get("max_tokens", 16), body.get("stream", False)
    if isinstance(prompt, str):
        prompt = [FIRST_BYTE + byte for byte in prompt.encode()]
    numbers = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not (numbers and prompt and all(0 <= token < engine.vocabulary for token in prompt)):
        raise BadRequestError(f"prompt: expected text, or a list of tokens from 0 to {engine.vocabulary - 1}", "prompt")
    if type(new_tokens) is not int or new_tokens < 1:
        raise BadRequestError(f"max_tokens: got {new_tokens!r}, expected an integer of at least 1", "max_tokens")
    if len(prompt) + new_tokens > engine.longest:
        raise BadRequestError(
            f"max_tokens: got {new_tokens} after a prompt of {len(prompt)} tokens, expected at most {engine.longest} "
            "together",
            "max_tokens",
        )
    if type(streams) is not bool:
        raise BadRequestError(f"stream: got {streams!r}, expected true or false", "stream")
    return prompt, new_tokens, streams


def text(tokens: list[int]) -> str:
    """Tokens of bytes as text; other tokens are left out."""
    return bytes(t - FIRST_BYTE for t in tokens if FIRST_BYTE <= t < FIRST_BYTE + 256).decode(errors="replace")


def stream(port: int, tokens: list[int], new_tokens: int, most: int | None = None) -> tuple[list[int], float, int]:
    """A client: the new tokens, the seconds to the first, cached tokens. It closes its connection after `most`."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    body, start = {"prompt": tokens, "max_tokens": new_tokens, "stream": True}, time.perf_counter()
    answer, first, cached = list[int](), 0.0, 0
    try:
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(response.read().decode())
        for line in response:
            if not line.startswith(b"data: ") or line == b"data: [DONE]\n":
                continue
            part = json.loads(line[6:])
            if "error" in part:
                raise RuntimeError(part["error"]["message"])
            answer += part["choices"][0]["token_ids"]
            first = first or time.perf_counter() - start
            cached = part.get("usage", {}).get("prompt_tokens_details", {}).get("cached_tokens", 0)
            if most is not None and len(answer) >= most:
                break
        response.close()
    finally:
        connection.close()
    return answer, first, cached


def load(port: int, clients: int, engine: Engine, seed: int = 0) -> None:
    """Send a prompt, then requests at once: half of them begin with it, a quarter are cancelled after two tokens."""
    rng = np.random.default_rng(seed)
    new_tokens = 12
    shared = rng.integers(FIRST_BYTE, engine.vocabulary, engine.longest // 2).tolist()
    prompts = []
    for client in range(clients):
        own = rng.integers(FIRST_BYTE, engine.vocabulary, rng.integers(1, engine.longest // 4)).tolist()
        prompts.append((shared if client % 2 else []) + own)
    stream(port, shared, 1)
    found: list[Any] = [None] * clients

    def run(client: int) -> None:
        try:
            found[client] = stream(port, prompts[client], new_tokens, 2 if client % 4 == 3 else None)
        except Exception as error:
            found[client] = error

    start = time.perf_counter()
    threads = [threading.Thread(target=run, args=(client,)) for client in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    for result in found:
        if isinstance(result, Exception):
            raise result
    finished = [result for client, result in enumerate(found) if client % 4 != 3]
    if any(len(answer) != new_tokens for answer, _, _ in finished):
        raise RuntimeError("an answer has too few tokens")
    firsts = sorted(first for _, first, _ in found)
    print(
        f"{clients} clients in {seconds:.1f} s: {len(finished)} answers, {clients - len(finished)} cancelled, "
        f"{sum(map(len, prompts))} prompt tokens, {sum(cached for *_, cached in finished)} of them cached"
    )
    print(f"first token after {statistics.median(firsts):.2f} s (median), {firsts[-1]:.2f} s (last)")


def start(
    model: str, folder: pathlib.Path, *, port: int = 0, longest: int = 512, running: int = 8, device: str = "numpy",
    cache_format: str | None = None,
) -> HTTPServer:  # fmt: skip
    """A server whose engine runs; `serve_forever` answers, and `server_port` is its port."""
    model_class, server_class, _ = MODELS[model]
    xp: Any = np
    if device == "cupy":
        import cupy as xp
    options = {} if cache_format is None else {"cache_format": cache_format}
    # Twice the pages that running requests need: the others keep prefixes.
    made = model_class(folder, xp=xp, longest=longest, requests=2 * running, **options)
    server = server_class(made, made.num_pages, max_running=running)
    server.cache = PageCache(made, server.pages)
    engine = Engine(server, longest, made.config["vocab_size"])
    engine.start()
    return HTTPServer(port, engine, model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=pathlib.Path, help="a checkpoint (default: a tiny one)")
    parser.add_argument("--model", choices=MODELS, default="v4")
    parser.add_argument("--device", choices=("numpy", "cupy"), default="numpy")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--longest", type=positive, default=512, help="most tokens of a prompt and its answer")
    parser.add_argument("--running", type=positive, default=8, help="requests of a step")
    parser.add_argument("--load", type=positive, metavar="N", help="send N requests at once, and stop")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder
        if folder is None:
            folder = pathlib.Path(temporary)
            tiny_checkpoint.write(folder, MODELS[options.model][2], seed=6000)
        port = 0 if options.load else options.port
        server = start(
            options.model, folder, port=port, longest=options.longest, running=options.running, device=options.device
        )
        try:
            if options.load:
                threading.Thread(target=server.serve_forever, daemon=True).start()
                load(server.server_port, options.load, server.engine)
            else:
                print(f"http://127.0.0.1:{server.server_port}/v1/completions", flush=True)
                server.serve_forever()
        except KeyboardInterrupt:
            pass
        finally:
            if options.load:
                server.shutdown()
            server.server_close()
            server.engine.stop()


if __name__ == "__main__":
    main()

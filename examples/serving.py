"""Serving around a model's layers: pages for requests, continuous batching, greedy sampling, time by part.

A model has `groups`, {name: (positions of a page, positions that later tokens see or None for all)}, `build(batch,
tables)`, which builds a step's metadata, and `forward(tokens, metadata, last)`, the logits of the tokens at `last`.
"""

import argparse
import contextlib
import functools
import json
import logging
import pathlib
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import disaggregated
import numpy as np
import tiny_checkpoint
from page_cache import PageCache

from cumla.metadata.batch import CommonAttentionMetadata


@dataclass
class Request:
    """A prompt and the tokens after it. `computed` tokens are in the caches; the last `drafts` are guesses."""

    number: int
    tokens: list[int]
    new_tokens: int
    computed: int = 0
    drafts: int = 0
    pages: dict[str, list[int]] = field(default_factory=dict)
    swapped: dict[str, list[int]] = field(default_factory=dict)  # pages in host memory, by group
    packed: Any = None  # header and bytes of the computed tokens, of another process
    logits: list[np.ndarray] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.new_tokens == 0


def requests_of(prompts: list[list[int]], new_tokens: int) -> list[Request]:
    """Requests numbered from 0. Raises ValueError for a prompt without tokens."""
    if not all(prompts):
        raise ValueError("prompts: got one without tokens, expected at least one token each")
    return [Request(i, list(prompt), new_tokens) for i, prompt in enumerate(prompts)]


class Pages:
    """The free pages of each group, and the requests that own the other pages."""

    def __init__(self, groups: dict[str, tuple[int, int | None]], num_pages: dict[str, int]) -> None:
        self.groups = groups
        self.free = {name: list(range(num_pages[name] - 1, -1, -1)) for name in groups}
        self.shared: dict[tuple[str, int], int] = {}  # users of a page beside the first

    def take(self, name: str) -> int | None:
        """A free page, or None."""
        return self.free[name].pop() if self.free[name] else None

    def share(self, name: str, page: int) -> None:
        """Add a user of a page."""
        self.shared[name, page] = self.shared.get((name, page), 0) + 1

    def give_back(self, name: str, page: int) -> None:
        """Remove a user of a page, which is free after its last one."""
        users = self.shared.pop((name, page), 0)
        if users > 1:
            self.shared[name, page] = users - 1
        elif not users:
            self.free[name].append(page)

    def reserve(self, request: Request, end: int) -> bool:
        """Take pages for positions up to `end`; if there are too few, take none and return False."""
        missing = {name: -(-end // size) - len(request.pages.get(name, [])) for name, (size, _) in self.groups.items()}
        if any(count > len(self.free[name]) for name, count in missing.items()):
            return False
        for name, count in missing.items():
            request.pages.setdefault(name, []).extend(self.free[name].pop() for _ in range(max(count, 0)))
        return True

    def forget(self, request: Request) -> None:
        """Free the pages whose positions no later token sees."""
        for name, (size, sight) in self.groups.items():
            if sight is not None:
                for i in range(max(0, (request.computed - sight) // size)):
                    self._give_back(name, request.pages[name], i)

    def release(self, request: Request) -> None:
        for name, pages in request.pages.items():
            for i in range(len(pages)):
                self._give_back(name, pages, i)
        request.pages = {}

    def _give_back(self, name: str, pages: list[int], i: int) -> None:
        if pages[i] >= 0:
            self.give_back(name, pages[i])
            pages[i] = -1


class Server:
    """Greedy generation for several requests at once: each step decodes all running requests and continues prompts.

    Attributes:
        batch_tokens: tokens of a step; a longer prompt is prefilled in chunks
        decode_tokens: most tokens of a request that the model's metadata treats as a decode
        cache: None, or a PageCache (page_cache.py)
        on_token: called with a request and each new token, after the step that computed it
    """

    decode_tokens = 1

    def __init__(self, model: Any, num_pages: dict[str, int], batch_tokens: int = 256, max_running: int = 8) -> None:
        self.model, self.pages = model, Pages(model.groups, num_pages)
        self.batch_tokens, self.max_running = batch_tokens, max_running
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.preempted, self.computed, self.cache = 0, 0, None
        self.on_token: Callable[[Request, int], None] | None = None

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[Request]:
        """All requests, finished: `tokens` is prompt and answer, `logits` has the logits of each new token."""
        requests = requests_of(prompts, new_tokens)
        self.waiting = list(requests)
        while self.waiting or self.running:
            self.step()
        return requests

    def step(self) -> None:
        scheduled = self.schedule()
        if not scheduled:
            raise RuntimeError("a request needs more pages than there are")
        scheduled.sort(key=lambda x: x[1] > self.decode_tokens)  # decodes first
        batch, tables = self.batch(scheduled)
        tokens = np.concatenate([r.tokens[r.computed : r.computed + count] for r, count in scheduled]).astype(np.int32)
        # A request's last row determines its next token; with drafts, so does the row before each draft.
        counts = [min(r.drafts + 1, count) for r, count in scheduled]
        ends = batch.query_start_loc_cpu[1:]
        rows = np.concatenate([np.arange(end - n, end) for end, n in zip(ends, counts, strict=True)])
        logits = self.model.forward(tokens, self.model.build(batch, tables), rows)
        for (request, count), its in zip(scheduled, np.split(logits, np.cumsum(counts)[:-1]), strict=True):
            self.computed += count
            is_prompt = request.computed + count == len(request.tokens) and not request.logits
            answered = len(request.logits)
            self.take(request, count, its)
            if self.on_token is not None and (new := len(request.logits) - answered):
                for token in request.tokens[-new:]:
                    self.on_token(request, token)
            if self.cache is not None and is_prompt:
                self.cache.keep(request)
            self.pages.forget(request)
            if request.done:
                self.pages.release(request)
                self.running.remove(request)

    def take(self, request: Request, count: int, logits: np.ndarray) -> None:
        """Record `count` computed tokens, and append the next token after the last of them."""
        request.computed += count
        if request.computed == len(request.tokens) and not request.done:
            request.logits.append(logits[-1])
            request.tokens.append(int(logits[-1].argmax()))
            request.new_tokens -= 1

    def schedule(self) -> list[tuple[Request, int]]:
        """Requests with the number of tokens to compute; the youngest is preempted if there are too few pages."""
        while self.waiting and len(self.running) < self.max_running:
            if self.cache is not None and not self.cache.admit(self.waiting[0]):
                break
            self.running.append(self.waiting.pop(0))
        left, scheduled = self.batch_tokens, []
        for request in list(self.running):
            count = min(left, len(request.tokens) - request.computed)
            while count and not self.pages.reserve(request, request.computed + count):
                if self.cache is not None and self.cache.evict():
                    continue
                victim = self.running[-1]
                if victim is request or any(victim is r for r, _ in scheduled):
                    count = 0
                    break
                self.preempt(victim)
            if count and request in self.running:
                scheduled.append((request, count))
                left -= count
        return scheduled

    def preempt(self, request: Request) -> None:
        """Free a request's pages. Later it goes on if they were swapped out, or it starts again, with its generated
        tokens as part of the prompt."""
        if self.cache is None or not self.cache.swap_out(request):
            request.computed = 0
        self.pages.release(request)
        self.running.remove(request)
        self.waiting.insert(0, request)
        self.preempted += 1

    def cancel(self, request: Request) -> None:
        """Drop a request that is not finished; its pages are free."""
        for requests in (self.running, self.waiting):
            requests[:] = [r for r in requests if r is not request]
        self.pages.release(request)
        if self.cache is not None:
            self.cache.drop(request)

    def batch(self, scheduled: list[tuple[Request, int]]) -> tuple[CommonAttentionMetadata, dict[str, Any]]:
        xp = self.model.xp
        tables = {}
        for name in self.model.groups:
            pages = [r.pages[name] for r, _ in scheduled]
            tables[name] = np.full((len(pages), max(map(len, pages))), -1, np.int32)
            for row, its in zip(tables[name], pages, strict=True):
                row[: len(its)] = its
        tables = {name: xp.asarray(table) for name, table in tables.items()}
        counts, lens = [count for _, count in scheduled], [r.computed + count for r, count in scheduled]
        size = self.model.groups["window"][0]
        return CommonAttentionMetadata.from_lengths(counts, lens, tables["window"], size), tables


class Stopwatch:
    """Time by part of a step."""

    def __init__(self, xp: Any) -> None:
        self.xp, self.seconds = xp, defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = self._now()
        yield
        self.seconds[part] += self._now() - start

    def _now(self) -> float:
        if self.xp is not np:
            self.xp.cuda.get_current_stream().synchronize()
        return time.perf_counter()

    def plot(self, path: str, title: str) -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        parts = sorted(self.seconds, key=self.seconds.__getitem__)
        figure, axes = pyplot.subplots(figsize=(7, 4))
        axes.barh(parts, [1e3 * self.seconds[part] for part in parts])
        axes.set_xlabel("ms in all steps")
        axes.set_title(title)
        figure.tight_layout()
        figure.savefig(path)


def rms_norm(x: Any, weight: Any, eps: float, xp: Any) -> Any:
    return x / xp.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def silu(x: Any, xp: Any) -> Any:
    return x / (1 + xp.exp(-x))


def product(x: Any, weight: Any, xp: Any) -> Any:
    """x weight^T in blocks of rows: BLAS chooses an algorithm by their number, on which a token's bits would depend."""
    size = 16 if xp is np else 128
    block, out = xp.zeros((size, x.shape[1]), x.dtype), xp.empty((len(x), len(weight)), x.dtype)
    for first in range(0, len(x), size):
        rows = x[first : first + size]
        block[: len(rows)] = rows
        out[first : first + len(rows)] = (block @ weight.T)[: len(rows)]
    return out


def gated_mlp(x: Any, gate: Any, up: Any, down: Any, limit: float | None, xp: Any) -> Any:
    gate, up = product(x, gate, xp), product(x, up, xp)
    if limit is not None:
        gate, up = xp.minimum(gate, limit), xp.clip(up, -limit, limit)
    return product(silu(gate, xp) * up, down, xp)


def experts(x: Any, chosen: Any, weights: Any, gate_up: Any, down: Any, limit: float | None, xp: Any) -> Any:
    """The weighted sum of the outputs of each token's experts; chosen and weights [T, k]."""
    out, half = xp.zeros_like(x), gate_up.shape[1] // 2
    for expert in range(len(gate_up)):
        mine = chosen == expert
        (tokens,) = xp.nonzero(mine.any(axis=1))
        if len(tokens):
            gate, up = gate_up[expert, :half], gate_up[expert, half:]
            share = (mine * weights)[tokens].sum(axis=1, keepdims=True)  # a table may name an expert twice
            out[tokens] += gated_mlp(x[tokens], gate, up, down[expert], limit, xp) * share
    return out


def largest(scores: Any, count: int, xp: Any) -> Any:
    """Columns of the largest entries of each row; of equal entries the lowest columns."""
    if xp is np:
        return np.argsort(-scores, axis=1, kind="stable")[:, :count]
    return xp.argsort(-scores, axis=1)[:, :count]


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected at least 1")
    return int(text)


def make_server(model_class: Any, server_class: type[Server], options: argparse.Namespace) -> Server:
    """A server of the checkpoint in options.folder."""
    xp: Any = np
    if options.device == "cupy":
        import cupy as xp
    model = model_class(
        options.folder, xp=xp, cache_format=options.cache_format, longest=options.longest + options.new_tokens,
        requests=options.prompts, batch_tokens=options.batch_tokens, backend=options.backend,
        **({"batch_invariant": True} if options.batch_invariant else {}),
    )  # fmt: skip
    server = server_class(model, model.num_pages, options.batch_tokens)
    if options.prefix_cache or options.host_pages or options.disaggregated:
        server.cache = PageCache(model, server.pages, options.host_pages or 0, 8 if options.prefix_cache else 0)
    return server


def main(
    name: str, model_class: Any, tiny: dict, formats: tuple[str, ...] = ("fp8", "bfloat16", "float32"),
    server_class: type[Server] = Server,
) -> Server:  # fmt: skip
    parser = argparse.ArgumentParser(description=f"Greedy generation with a {name} checkpoint, without torch.")
    parser.add_argument("folder", nargs="?", type=pathlib.Path, help="a checkpoint (default: a tiny one)")
    parser.add_argument("--device", choices=("numpy", "cupy"), default="numpy")
    parser.add_argument("--backend", help="such as numba_cuda (default: the device's fastest)")
    parser.add_argument("--cache-format", choices=formats, default=formats[0])
    parser.add_argument("--prompts", type=positive, default=3, help="prompts of random tokens, of different lengths")
    parser.add_argument("--longest", type=positive, default=200, help="tokens of the longest prompt")
    parser.add_argument("--new-tokens", type=positive, default=16)
    parser.add_argument("--batch-tokens", type=positive, default=128)
    parser.add_argument("--prefix-cache", action="store_true", help="keep the pages of prompts for later requests")
    parser.add_argument("--host-pages", type=positive, help="swap preempted requests to so many host pages a group")
    parser.add_argument("--disaggregated", action="store_true", help="compute prompts in a process of their own")
    parser.add_argument("--batch-invariant", action="store_true", help="tokens that do not depend on the schedule")
    parser.add_argument("--plot", metavar="FILE", help="draw the time by part of a step")
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("cumla").setLevel(logging.INFO)  # a first call says that it compiles
    with contextlib.ExitStack() as stack:
        if options.folder is None:
            options.folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
            tiny_checkpoint.write(options.folder, tiny, seed=6000)
        vocabulary = json.loads((options.folder / "config.json").read_text())["vocab_size"]
        rng = np.random.default_rng(0)
        shortest = max(1, options.longest // options.prompts)
        lengths = np.linspace(shortest, options.longest, options.prompts).astype(int)
        prompts = [rng.integers(2, vocabulary, length).tolist() for length in lengths]
        make = functools.partial(make_server, model_class, server_class, options)
        server = make()
        start = time.perf_counter()
        if options.disaggregated:
            requests = requests_of(prompts, options.new_tokens)
            disaggregated.generate(server, make, requests)
        else:
            requests = server.generate(prompts, options.new_tokens)
        for request in requests:
            length = len(prompts[request.number])
            print(f"{length} tokens -> {request.tokens[length:]}")
        seconds = time.perf_counter() - start
        print(f"{name}: {options.prompts * options.new_tokens} tokens in {seconds:.2f} s")
        if server.cache is not None:
            print(f"hits {sum(server.cache.hits.values())} tokens, {server.cache.swapped} requests swapped out")
        if options.plot:
            server.model.stopwatch.plot(options.plot, f"{name}, {options.cache_format} caches, {options.device}")
        return server

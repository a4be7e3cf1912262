"""A small serving engine: continuous batching, chunked prefill and prefix hits over one window layer, on CPU or GPU.

    python examples/mini_engine.py [numpy | cupy] [backend]

The model is an embedding, one attention layer and a projection to the vocabulary, with random weights. Each output of
the engine is compared with the output of one prefill of the whole sequence. No request is preempted: its pages are
reserved when it is admitted.
"""

import importlib
import sys

import ml_dtypes
import numpy as np

import cumla
from cumla.bounds import PREFILL_OUT, compare
from cumla.layers import SparseMLALayer
from cumla.metadata import CommonAttentionMetadata, DeepseekSparseSWAMetadataBuilder, ServingConfig

VOCAB, HIDDEN, HEADS, WINDOW, PAGE, LONGEST = 200, 64, 4, 128, 64, 512
STEP_TOKENS, MOST_RUNNING, NUM_PAGES = 96, 3, 16


class Model:
    def __init__(self, xp, backend=None):
        def normal(*shape):
            return xp.asarray(rng.standard_normal(shape, np.float32))

        rng, self.xp, self.backend = np.random.default_rng(0), xp, backend
        embedding = normal(VOCAB, HIDDEN)
        # In a single layer a token's projections depend on the token only: they are computed once for the vocabulary.
        self.q = (embedding @ normal(HIDDEN, HEADS * 512)).reshape(VOCAB, HEADS, 512)
        self.kv = embedding @ normal(HIDDEN, 512) / HIDDEN**0.5
        self.to_logits = normal(HEADS * 512, VOCAB)
        angles = np.arange(LONGEST)[:, None] / 10000.0 ** (np.arange(32) / 32)
        self.cos_sin = xp.asarray(np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32))
        config = ServingConfig(WINDOW, block_size=PAGE, num_heads=HEADS, max_model_len=LONGEST)
        self.builder, self.layer = DeepseekSparseSWAMetadataBuilder(config, backend), SparseMLALayer()

    def step(self, tokens, query_lens, seq_lens, pages, cache):
        """Insert the rows of these tokens and attend: [tokens, HEADS, 512] float32."""
        table = np.full((len(pages), max(map(len, pages))), -1, np.int32)
        for row, its in zip(table, pages, strict=True):
            row[: len(its)] = its
        batch = CommonAttentionMetadata.from_lengths(query_lens, seq_lens, table, PAGE, self.xp, backend=self.backend)
        metadata, ids = self.builder.build(0, batch), self.xp.asarray(tokens)
        q, kv = (x[ids].astype(ml_dtypes.bfloat16) for x in (self.q, self.kv))
        rope, options = (metadata.positions, self.cos_sin), {"backend": self.backend}
        q = cumla.qnorm_rope_and_insert(q, kv, cache, batch.slot_mapping, *rope, **options)
        out = self.layer.step(q, None, cache, metadata, **options)
        return cumla.apply_rope(out, *rope, inverse=True, **options).astype(np.float32)


class Request:
    def __init__(self, prompt, new_tokens):
        self.tokens, self.end, self.computed = list(prompt), len(prompt) + new_tokens, 0
        self.pages, self.outputs, self.hits = [], {}, 0


class Engine:
    """Unused pages retain their rows for prompts with the same prefix, until they are reused."""

    def __init__(self, model):
        self.model, self.waiting, self.running, self.steps = model, [], [], 0
        self.cache = cumla.DSV4_FP8.allocate(NUM_PAGES, PAGE, model.xp)
        self.free, self.users = dict.fromkeys(range(NUM_PAGES)), [0] * NUM_PAGES  # free pages, oldest first
        self.page_of, self.prefix_of = {}, {}  # all tokens up to a page's end -> the page, and back

    def admit(self, request):
        """Take the pages with the prompt's prefix and free pages for the rest; False if there are too few."""
        ends = range(PAGE, len(request.tokens), PAGE)  # the last token is computed in any case
        hits = [self.page_of.get(tuple(request.tokens[:end])) for end in ends]
        hits = hits[: hits.index(None)] if None in hits else hits
        others = [page for page in self.free if page not in hits][: -(-request.end // PAGE) - len(hits)]
        if len(hits) + len(others) < -(-request.end // PAGE):
            return False
        for page in others:
            self.page_of.pop(self.prefix_of.pop(page, None), None)
        request.pages, request.hits = hits + others, len(hits) * PAGE
        request.computed = request.hits
        for page in request.pages:
            self.free.pop(page, None)
            self.users[page] += 1
        return True

    def finish(self, request):
        self.running.remove(request)
        for page in reversed(request.pages):  # pages of a prompt's beginning are reused last
            self.users[page] -= 1
            if not self.users[page]:
                self.free[page] = None

    def step(self):
        while self.waiting and len(self.running) < MOST_RUNNING and self.admit(self.waiting[0]):
            self.running.append(self.waiting.pop(0))
        left, scheduled = STEP_TOKENS, []
        for request in sorted(self.running, key=lambda r: len(r.tokens) - r.computed > 1):  # decodes never wait
            count = min(left, len(request.tokens) - request.computed)
            scheduled += [(count, request)] * (count > 0)
            left -= count
        scheduled.sort(key=lambda x: x[0] > 1)  # a chunk of one token counts as a decode, which come first
        counts, requests = zip(*scheduled, strict=True)
        tokens = [token for n, r in scheduled for token in r.tokens[r.computed : r.computed + n]]
        lens = [r.computed + n for n, r in scheduled]
        outputs = self.model.step(tokens, counts, lens, [r.pages for r in requests], self.cache)
        last = np.cumsum(counts) - 1
        chosen = (
            (outputs[self.model.xp.asarray(last)].reshape(len(last), -1) @ self.model.to_logits).argmax(axis=1).tolist()
        )
        for (count, request), end, token in zip(scheduled, last + 1, chosen, strict=True):
            request.outputs |= dict(enumerate(outputs[end - count : end], request.computed))
            for i in range(request.computed // PAGE, (request.computed + count) // PAGE):  # pages that are full now
                prefix, page = tuple(request.tokens[: (i + 1) * PAGE]), request.pages[i]
                if prefix not in self.page_of:
                    self.page_of[prefix], self.prefix_of[page] = page, prefix
            request.computed += count
            if request.computed == len(request.tokens):
                request.tokens.append(token)
            if len(request.tokens) == request.end:
                self.finish(request)
        self.steps += 1


def main(device: str = "numpy", backend: str | None = None) -> None:
    xp = importlib.import_module(device)
    model, rng = Model(xp, backend), np.random.default_rng(1)
    engine, system_prompt = Engine(model), rng.integers(VOCAB, size=150)
    lengths = ((60, 9), (17, 30), (100, 4), (31, 12), (1, 20), (200, 5))  # lengths of users' prompts and answers
    requests = [Request([*system_prompt.tolist(), *rng.integers(VOCAB, size=n).tolist()], m) for n, m in lengths]
    engine.waiting = list(requests)
    while engine.waiting or engine.running:
        engine.step()
    for request in requests:
        tokens = request.tokens[:-1]
        cache = cumla.DSV4_FP8.allocate(LONGEST // PAGE, PAGE, xp)
        one_shot = model.step(tokens, [len(tokens)], [len(tokens)], [list(range(LONGEST // PAGE))], cache)
        got, want = xp.stack(list(request.outputs.values())), one_shot[xp.asarray(list(request.outputs))]
        got, want = (x if xp is np else x.get() for x in (got, want))
        equal, error = compare(got, want, PREFILL_OUT.of_values(abs(model.kv).max().item()))
        assert equal, f"outputs are off by {error}"
        assert sorted(request.outputs) == list(range(request.hits, len(tokens)))
    hits, prompts = sum(r.hits for r in requests), sum(150 + n for n, _ in lengths)
    print(f"{engine.steps} steps, {hits} of {prompts} prompt tokens were cached, all outputs as in one shot")


if __name__ == "__main__":
    main(*sys.argv[1:])

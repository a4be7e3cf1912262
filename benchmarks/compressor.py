"""The compressor, and norms with RoPE, in CUDA graphs.

    python benchmarks/compressor.py [--json benchmarks/results/h200/compressor.json]

States are saved of the tokens that a later step reads: all of a decode, the last ones of a prompt. Results are checked
against the reference backend on the same inputs.
"""

import cupy
import ml_dtypes
import numpy as np
from common import Report, arguments, copy_calls, measure, sets_for

import cumla
from cumla.bench.caches import QueryNormInsert
from cumla.bench.problem import Sizes
from cumla.bench.rows import rows_of

BF16 = ml_dtypes.bfloat16
CONTEXT, STATE_BLOCK, BLOCK = 4_096, {4: 4, 128: 8}, 64
rng = np.random.default_rng(0)


def compressor(report, ratio, tokens, prefill):
    config = f"ratio {ratio}, {tokens:,} tokens, {'a prompt' if prefill else 'decodes'}"
    if not report.wants("compress_and_insert", config):
        return
    coff, layout, state_block = (2 if ratio == 4 else 1), cumla.DSV4_FP8, STATE_BLOCK[ratio]
    requests = 1 if prefill else tokens
    # Of decodes one in `ratio` completes a row, as in a batch of requests at any place.
    first = np.zeros(1, np.int64) if prefill else CONTEXT + np.arange(tokens) % ratio
    positions = np.arange(tokens) if prefill else first
    request_of = np.zeros(tokens, np.int32) if prefill else np.arange(tokens, dtype=np.int32)
    starts = np.array([0, tokens], np.int32) if prefill else np.arange(tokens + 1, dtype=np.int32)
    columns = (int(positions.max()) + state_block) // state_block
    window = coff * ratio
    table = np.full((requests, columns), -1, np.int32)
    pages = -(-window // state_block) + 1
    for request in range(requests):  # the last pages of each
        table[request, max(0, columns - pages) :] = np.arange(min(pages, columns)) + request * pages
    block = table[request_of, positions // state_block].astype(np.int64)
    state_slots = np.where(block < 0, -1, block * state_block + positions % state_block)
    slots = np.where((positions + 1) % ratio == 0, np.arange(tokens), -1)
    host = {
        "bias": rng.standard_normal((ratio, coff * 512), np.float32), "weight": rng.standard_normal(512, np.float32),
        "cos_sin": rng.standard_normal((8_192, 64), np.float32),
        "state": rng.standard_normal((requests * pages, state_block, 2 * coff * 512), np.float32),
        "kv_score": rng.standard_normal((tokens, 2 * coff * 512), np.float32),
    }  # fmt: skip
    on_device = {name: cupy.asarray(array) for name, array in host.items()}
    rest = [cupy.asarray(x) for x in (state_slots, table, slots, positions, request_of, starts)]
    completed = int((slots >= 0).sum())
    moved = tokens * 2 * coff * 512 * 4 + int((state_slots >= 0).sum()) * 2 * coff * 512 * 4 + completed * 584
    if not prefill:
        moved += completed * (window - 1) * 1024 * 4
    sets = [
        (on_device["kv_score"].copy(), on_device["state"].copy(), layout.allocate(-(-tokens // BLOCK), BLOCK, cupy))
        for _ in range(sets_for(moved))
    ]

    def call(kv_score, state, cache):
        def run():
            cumla.compress_and_insert(
                kv_score, on_device["bias"], on_device["weight"], state, rest[0], rest[1], cache, rest[2], rest[3],
                rest[4], rest[5], on_device["cos_sin"], compress_ratio=ratio,
            )  # fmt: skip
            return cache

        return run

    def check(cache):
        want = layout.allocate(-(-tokens // BLOCK), BLOCK)
        cumla.compress_and_insert(
            host["kv_score"], host["bias"], host["weight"], host["state"], state_slots, table, want, slots, positions,
            request_of, starts, host["cos_sin"], compress_ratio=ratio, backend="cpu",
        )  # fmt: skip
        rows = []
        for pages_of in (cache.get(), want):
            out = np.empty((1, tokens, 512), np.float32)
            every = np.arange(len(pages_of), dtype=np.int32)[None]
            lens = np.array([tokens], np.int32)
            contiguous = layout.allocate(len(pages_of), BLOCK)
            contiguous[...] = pages_of
            cumla.dequantize_and_gather_k_cache(out, contiguous, lens, None, every, BLOCK, 0)
            rows.append(out)
        error = float(np.abs(rows[0] - rows[1]).max())
        assert error <= np.abs(rows[1]).max() / 8, error
        return error

    impls = {"cumla-cuda": ("cupy", [call(*x) for x in sets])}
    if moved > 1 << 24:
        impls["copy"] = "cupy", copy_calls(moved // 2, len(sets))
    measure(report, "compress_and_insert", config, impls, moved, check)


def inverse(report, tokens, heads=128):
    config = f"{tokens:,} tokens, {heads} heads, in place"
    if not report.wants("apply_rope", config):
        return
    o = rng.standard_normal((tokens, heads, 512), np.float32).astype(BF16)
    cos_sin = rng.standard_normal((8_192, 64), np.float32)
    positions = np.arange(tokens)
    where = cupy.asarray(positions), cupy.asarray(cos_sin)
    moved = 2 * tokens * heads * 64 * 2
    sets = [cupy.asarray(o) for _ in range(sets_for(o.nbytes, 3))]

    def call(o):
        return lambda: cumla.apply_rope(o, *where, inverse=True, out=o)

    def check(got):
        want = cumla.apply_rope(o[:8], positions[:8], cos_sin, inverse=True, backend="reference").astype(np.float32)
        error = np.abs(got[:8].get().astype(np.float32) - want)
        assert (error <= 2.0**-7 * np.abs(want) + 1e-3).all(), error.max()
        return float(error.max())

    measure(report, "apply_rope", config, {"cumla-cuda": ("cupy", [call(x) for x in sets])}, moved, check)


def main():
    report = Report(arguments(__doc__).parse_args())
    for ratio in (4, 128):
        for tokens in (1, 32, 128):
            compressor(report, ratio, tokens, prefill=False)
        compressor(report, ratio, 4_096, prefill=True)
    for case in (QueryNormInsert(tokens, 128) for tokens in (1, 17, 4_096)):
        if report.wants(case.op, str(case)):
            for row in rows_of(case.problem(Sizes("cuda"))):
                report.add_row(row)
    inverse(report, 128)
    report.finish()


if __name__ == "__main__":
    main()

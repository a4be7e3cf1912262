"""Index maps, in turn with vLLM's Triton kernels, in CUDA graphs.

    python benchmarks/indices.py [--json benchmarks/results/h200/indices.json]

vLLM's functions allocate what they return and cumla's are given it. Every result is compared with the reference
backend's for the first tokens, and with that of the implementation before it for all.
"""

import itertools
from functools import partial

import cupy
import numpy as np
from common import Report, arguments, as_torch, copy_calls, copy_gbps, has_peer, measure, random_bits, sets_for

import cumla
from cumla.bench.problem import contexts, selected_rows

WINDOW = 128
RATIO = 4
SWA_BLOCK, COMPRESSED_BLOCK = 64, 64
CONTEXT = 32_768  # positions that a request has before this step
SAMPLE = 48  # tokens that are compared with the reference backend
BACKENDS = ("cuda", "numba_cuda")

rng = np.random.default_rng(0)
seeds = itertools.count()


def device(array):
    return cupy.asarray(np.asarray(array, np.int32))


def topk_of(tokens, topk, entries, absent=True):
    """int32 [tokens, topk] entries in no order, of which one in a hundred is absent."""
    bits = random_bits(tokens * topk, next(seeds)).reshape(tokens, topk)
    indices = (bits % cupy.uint32(entries)).astype(cupy.int32)
    return cupy.where(bits % cupy.uint32(101) == 0, cupy.int32(-1), indices) if absent else indices


def table_for(requests, positions, block_size):
    columns = -(-positions // block_size)
    return device(rng.permutation(requests * columns).reshape(requests, columns))


def compare(report, op, config, function, arguments_of, outputs_of, bytes_moved, of_first):
    """Measure cumla.<function> and vLLM's of the same name.

    arguments_of  gives a new set of arguments at each call
    outputs_of    gives new arrays to write
    of_first      the arguments of the reference backend for the first SAMPLE tokens, given those of all
    """
    if not report.wants(op, config):
        return
    sets = [(arguments_of(), outputs_of()) for _ in range(sets_for(bytes_moved))]
    ours = getattr(cumla, function)
    on_host = [x.get() if isinstance(x, cupy.ndarray) else x for x in sets[0][0]]
    want = ours(*of_first(*on_host), backend="reference")
    seen = []

    def check(result):
        result = [cupy.from_dlpack(x) for x in result]
        for got, first in zip(result, want, strict=True):
            np.testing.assert_array_equal(got[: len(first)].get(), first)
        seen.append([x.copy() for x in result])
        assert all((x == y).all() for x, y in zip(seen[-1], seen[0], strict=True))
        return 0.0

    def clear():
        for output in sets[0][1]:
            output.fill(-7)

    def call(given, out, backend):
        return lambda: ours(*given, out=out, backend=backend)

    impls = {f"cumla-{x}": ("cupy", [call(given, out, x) for given, out in sets]) for x in BACKENDS}
    if has_peer("vllm"):
        from vllm.models.deepseek_v4.common.ops import cache_utils

        theirs = getattr(cache_utils, function, None)
        if theirs:
            impls["vllm"] = "torch", [partial(theirs, *as_torch(*given)) for given, _ in sets]
    if bytes_moved > 1 << 24:
        impls["copy"] = "cupy", copy_calls(bytes_moved // 2, len(sets))
    functions = {"vllm": f"{function}, vLLM 0.26"}
    measure(report, op, config, impls, bytes_moved, check, clear, functions=functions)


def outputs(tokens, width):
    return lambda: (cupy.empty((tokens, width), cupy.int32), cupy.empty(tokens, cupy.int32))


def global_topk(report, tokens, topk, lengths=False):
    requests = min(tokens, 128)
    entries = CONTEXT // RATIO
    token_to_req = device(np.arange(tokens) * requests // tokens)
    table = table_for(requests, entries, COMPRESSED_BLOCK)
    valid = cupy.ones(tokens, cupy.bool_)

    def lists():
        if not lengths:
            return topk_of(tokens, topk, entries)
        visible = (contexts(rng, requests, CONTEXT) // RATIO).repeat(tokens // requests)
        return device(selected_rows(rng, visible, topk, neighbours=tokens > requests))

    compare(
        report, "compute_global_topk_indices_and_lens", f"{tokens:,} x {topk:,}, {kind_of(lengths)}",
        "compute_global_topk_indices_and_lens",
        lambda: (lists(), token_to_req, table, COMPRESSED_BLOCK, valid),
        outputs(tokens, topk), 8 * tokens * topk,
        lambda indices, *rest: (indices[:SAMPLE], *rest),
    )  # fmt: skip


def kind_of(lengths):
    return "lengths" if lengths else "full lists"


def prefills(tokens, requests=4, lengths=False):
    """query_start_loc and seq_lens of `requests` prefills that continue a context, or contexts of different lengths."""
    new = tokens // requests
    before = contexts(rng, requests, CONTEXT) if lengths else np.full(requests, CONTEXT)
    return device(np.arange(requests + 1) * new), device(before + new)


def combine(report, tokens, topk, lengths=False):
    starts, lens = prefills(tokens, lengths=lengths)
    requests, new = len(lens), tokens // len(lens)
    gather_lens = device(np.full(requests, new) + np.minimum(lens.get() - new, WINDOW - 1))
    compressed = (CONTEXT + new) // RATIO
    rows = compressed + new + WINDOW - 1
    width = -(-(topk + WINDOW) // 128) * 128
    visible = (lens.get()[:, None] - new + np.arange(1, new + 1)).reshape(-1) // RATIO

    def lists():
        if not lengths:
            return topk_of(tokens, topk, CONTEXT // RATIO, absent=False)
        return device(selected_rows(rng, visible, topk, neighbours=True))

    compare(
        report, "combine_topk_swa_indices", f"{tokens:,} x {topk:,}, {kind_of(lengths)}", "combine_topk_swa_indices",
        lambda: (lists(), starts, lens, gather_lens, WINDOW, RATIO, topk, rows, compressed),
        outputs(tokens, width), 4 * tokens * (topk + width),
        lambda indices, *rest: (indices[:SAMPLE], *rest),
    )  # fmt: skip


def mixed(report, decodes, prefill_tokens, topk):
    tokens = decodes + prefill_tokens
    prefill_requests = 4 if prefill_tokens else 0
    requests = decodes + prefill_requests
    new = prefill_tokens // prefill_requests if prefill_requests else 0
    query_lens = np.concatenate([np.ones(decodes, np.int64), np.full(prefill_requests, new)])
    starts = device(np.concatenate([[0], np.cumsum(query_lens)]))
    lens = device(CONTEXT + query_lens)
    token_to_req = device(np.repeat(np.arange(requests), query_lens))
    swa_table = table_for(requests, CONTEXT + max(new, 1), SWA_BLOCK)
    table = table_for(requests, (CONTEXT + max(new, 1)) // RATIO, COMPRESSED_BLOCK)
    valid = cupy.ones(decodes, cupy.bool_)
    swa = device(rng.integers(0, swa_table.size * SWA_BLOCK, (decodes, WINDOW)))
    entries = CONTEXT // RATIO

    def arguments_of():
        decode_topk = topk_of(decodes, topk, entries) if decodes else None
        return (
            swa, decode_topk, None, topk_of(prefill_tokens, topk, entries), starts, lens, token_to_req,
            swa_table, SWA_BLOCK, table, COMPRESSED_BLOCK, WINDOW, RATIO, topk, True, valid,
        )  # fmt: skip

    def of_first(swa, decode_topk, decode_lens, prefill_topk, *rest):
        if decodes:
            return swa[:SAMPLE], decode_topk[:SAMPLE], decode_lens, prefill_topk[:0], *rest
        return swa, decode_topk, decode_lens, prefill_topk[:SAMPLE], *rest

    compare(
        report, "build_flashinfer_mixed_sparse_indices",
        f"{decodes:,} decodes, {prefill_tokens:,} prefill x {topk:,}", "build_flashinfer_mixed_sparse_indices",
        arguments_of, outputs(tokens, WINDOW + topk),
        4 * tokens * (topk + topk + WINDOW) + 4 * decodes * WINDOW, of_first,
    )  # fmt: skip


def windows(report, tokens):
    requests = min(tokens, 128)
    starts, lens = prefills(tokens, requests)
    token_to_req = device(np.arange(tokens) * requests // tokens)
    table = table_for(requests, CONTEXT + tokens // requests, SWA_BLOCK)
    valid = cupy.ones(tokens, cupy.bool_)
    compare(
        report, "compute_swa_indices_and_lens", f"{tokens:,} tokens, window {WINDOW}", "compute_swa_indices_and_lens",
        lambda: (starts, lens, token_to_req, valid, table, SWA_BLOCK, WINDOW, tokens),
        outputs(tokens, WINDOW), 4 * tokens * (WINDOW + 1),
        lambda *given: (*given[:-1], SAMPLE),
    )  # fmt: skip


def main():
    report = Report(arguments(__doc__).parse_args())
    gbps = copy_gbps()
    print(f"copy: {gbps:.0f} GB/s")
    for tokens in (128, 4_096):
        windows(report, tokens)
    for lengths in (True, False):
        for shape in ((128, 512), (4_096, 512), (8_192, 1_024)):
            global_topk(report, *shape, lengths)
        for shape in ((128, 512), (4_096, 512), (8_192, 1_024)):
            combine(report, *shape, lengths)
    mixed(report, 128, 0, 512)
    mixed(report, 0, 4_096, 512)
    report.finish(copy_gbps=gbps)


if __name__ == "__main__":
    main()

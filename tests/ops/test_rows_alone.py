"""A row's result does not depend on the rest of the batch: each row alone, and the batch in another order.

Results are equal bit by bit, except where docstrings allow differences: these are within the bounds of results.
"""

import numpy as np
import pytest

import cumla
from cumla.bounds import FLOAT16_WEIGHTS, SCORES, compare
from support.attention import make_cache, make_indices, make_q, marks_of_kernels
from support.bounds import assert_decode
from support.lab import BF16, to_float
from support.operations import assert_same_bits

pytestmark = pytest.mark.thorough(when=lambda x: x.emulated)

MOST_ALONE = 6


def check_rows(call, rows, same=None):
    """call(row numbers) gives host arrays whose first axis is the rows; same(got, want) compares lists of these."""
    everything = call(np.arange(rows))
    alone = np.unique(np.linspace(0, rows - 1, MOST_ALONE).astype(int))
    for some in (*alone[:, None], np.arange(rows)[::-1], np.arange(rows)[1::2]):
        got, want = call(some), [x[some] for x in everything]
        if same is not None:
            same(got, want)
            continue
        for x, y in zip(got, want, strict=True):
            assert_same_bits(x, y)


def on_a_device(lab):
    return lab.on_device and not lab.emulated


def of_kernels(test):
    for mark in marks_of_kernels(of_the_reference=(test.__name__,)):
        test = mark(test)
    return test


# ---- attention


def sparse_decode(lab, rng, layout, heads, **options):
    """A function of requests, and the number of requests."""
    requests, topk, blocks = (60, 2000, 30) if on_a_device(lab) else (4, 1300, 3)
    q, cache, extra = (
        make_q(rng, requests, 1, heads, layout),
        *(make_cache(rng, layout, n, 64, spread=0) for n in (blocks, 1)),
    )
    indices, extra_indices = (make_indices(rng, requests, 1, *s) for s in ((topk, 64 * blocks), (20, 64)))
    lengths = rng.integers(-1, topk + 2, (requests, 1)).astype(np.int32)
    lengths[1:3] = topk
    indices[0], extra_indices[0] = -1, -1
    sink = lab.put(rng.standard_normal(heads).astype(np.float32))
    cache, extra = lab.put(cache), lab.put(extra)

    def call(some):
        out, lse = cumla.sparse_mla_decode(
            lab.put(q[some]), cache, lab.put(indices[some]), topk_length=lab.put(lengths[some]), extra_k_cache=extra,
            extra_indices=lab.put(extra_indices[some]), attn_sink=sink, layout=layout, backend=lab.backend, **options,
        )  # fmt: skip
        return lab.get(out), lab.get(lse)

    return call, requests


@of_kernels
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize(("layout", "heads"), [("DSV4_FP8", 8), ("DSV4_FP8", 66), ("V32_FP8", 24), ("MLA_BF16", 8)])
@pytest.mark.thorough(when=lambda x: x.emulated and (x.get("heads") > 8 or x.get("planned")))
@pytest.mark.nowhere(when=lambda x: x.emulated and x.get("heads") == 66 and x.get("planned"))
def test_invariant_decodes(lab, kernel, rng, layout, heads, planned):
    plan = cumla.DecodePlan(batch_invariant=True) if planned else None
    check_rows(*sparse_decode(lab, rng, getattr(cumla, layout), heads, batch_invariant=True, plan=plan))


@of_kernels
@pytest.mark.parametrize(("layout", "heads"), [("DSV4_FP8", 8), ("DSV4_FP8", 66), ("V32_FP8", 24)])
@pytest.mark.thorough(when=lambda x: x.emulated and x.get("heads") > 8)
def test_decodes_whose_keys_are_split_by_the_batch(lab, kernel, rng, layout, heads):
    check_rows(*sparse_decode(lab, rng, getattr(cumla, layout), heads), same=are_close_sparse_decodes)


def are_close_decodes(got, want, rounding=None):
    assert_decode(to_float(got[0]), got[1], to_float(want[0]), want[1], rounding)


def are_close_sparse_decodes(got, want):
    """Both results may have rounded 16-bit weights; values are up to 5."""
    are_close_decodes(got, want, lambda: 2 * FLOAT16_WEIGHTS * 5)


@of_kernels
@pytest.mark.parametrize(("heads", "dim"), [(8, 576), (24, 512), (66, 576)])
@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.thorough(when=lambda x: x.emulated and x.get("heads") == 66 and not x.get("lengths"))
@pytest.mark.thorough(when=lambda x: x.emulated and x.get("heads") == 24)
def test_prefill(lab, kernel, rng, heads, dim, lengths):
    tokens, topk, rows = (300, 640, 4096) if on_a_device(lab) else (5, 150, 200)
    q = rng.standard_normal((tokens, heads, dim)).astype(BF16)
    kv = lab.put(rng.standard_normal((rows, dim)).astype(BF16))
    indices = make_indices(rng, tokens, 1, topk, rows)[:, 0]
    indices[tokens // 2] = -1
    listed = rng.integers(-1, topk + 2, tokens).astype(np.int32) if lengths else None
    sink = lab.put(rng.standard_normal(heads).astype(np.float32))

    def call(some):
        results = cumla.sparse_mla_prefill(
            lab.put(q[some]), kv, lab.put(indices[some]), attn_sink=sink, backend=lab.backend,
            topk_length=None if listed is None else lab.put(listed[some]),
        )  # fmt: skip
        return [lab.get(x) for x in results]

    check_rows(call, tokens)


@pytest.mark.attention
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(lab, rng, causal):
    sequences, queries, heads = 5, 70, 3
    k_lens = np.array([0, 40, 130, 200, 71])
    ends = np.cumsum(k_lens)
    q = rng.standard_normal((sequences, queries, heads, 192)).astype(BF16)
    k, v = (rng.standard_normal((ends[-1], heads, d)).astype(BF16) for d in (192, 128))

    def call(some):
        keys = np.concatenate([np.arange(ends[i] - k_lens[i], ends[i]) for i in some])
        starts = [
            np.concatenate([[0], np.cumsum(lens)]).astype(np.int32) for lens in (len(some) * [queries], k_lens[some])
        ]
        out, lse = cumla.mha_varlen(
            lab.put(q[some].reshape(-1, heads, 192)), lab.put(k[keys]), lab.put(v[keys]), *map(lab.put, starts),
            causal=causal, backend=lab.backend,
        )  # fmt: skip
        out, lse = lab.get(out), lab.get(lse)
        return out.reshape(len(some), queries, heads, 128), lse.T.reshape(len(some), queries, heads)

    check_rows(call, sequences)


@pytest.mark.attention
def test_dense_decodes_whose_keys_are_split_by_the_batch(lab, rng):
    requests, heads, block, columns = 5, 8, 16, 40
    q = rng.standard_normal((requests, 2, heads, 576)).astype(BF16)
    cache = lab.put((0.1 * rng.standard_normal((columns, block, 576))).astype(BF16))
    table = rng.integers(-1, columns + 1, (requests, columns)).astype(np.int32)
    lens = np.array([0, 640, 3, 200, 65], np.int32)

    def call(some):
        out, lse = cumla.dense_mla_decode(
            lab.put(q[some]), cache, lab.put(table[some]), lab.put(lens[some]), backend=lab.backend
        )
        return lab.get(out), lab.get(lse)

    check_rows(call, requests, same=are_close_decodes)


# ---- the indexer


def e4m3(rng, *shape):
    """Bytes of numbers up to 1 of either sign."""
    return rng.integers(0, 0x39, shape, np.uint8) | rng.integers(0, 2, shape, np.uint8) << 7


def weights_of(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def scored_keys(lab, rng, heads, exact=False):
    """For each query q, weights, first and last key; the keys and their scales; the number of queries.

    Args:
        exact: whether values are few and short enough for float32 to represent the scores, in any order of summation
    """
    queries, keys = (100, 3000) if on_a_device(lab) else (3, 9) if lab.tiny else (9, 300)
    firsts = rng.integers(-2, keys // 2, queries).astype(np.int32)
    lasts = (firsts + rng.integers(-1, keys, queries)).astype(np.int32)
    q, k, scales = e4m3(rng, queries, heads, 128), e4m3(rng, keys, 128), np.abs(weights_of(rng, keys))
    weights = weights_of(rng, queries, heads)
    if exact:
        q, k, weights, scales = q & 0x80 | 0x38, k & 0xB8, np.round(weights), np.exp2(np.round(scales))
    return (q, weights, firsts, lasts), (lab.put(k), lab.put(scales)), queries


def scored_pages(lab, rng, heads, next_n):
    """The same for requests: q, weights, length and block table; the cache."""
    requests, block, columns = (70, 64, 20) if on_a_device(lab) else (2, 4, 2) if lab.tiny else (5, 64, 3)
    cache = cumla.INDEXER_FP8.allocate(columns, block)
    keys = weights_of(rng, columns * block, 128)
    cumla.indexer_k_quant_and_cache(keys, cache, np.arange(len(keys)), backend="reference")
    table = rng.integers(-1, columns + 1, (requests, columns)).astype(np.int32)
    lens = rng.integers(-1, columns * block + 3, requests).astype(np.int32)
    of_requests = e4m3(rng, requests, next_n, heads, 128), weights_of(rng, requests, next_n, heads), lens, table
    return of_requests, lab.put(cache), requests


def are_close_scores(got, want):
    for x, y in zip(got, want, strict=True):
        assert compare(x, y, SCORES)[0]


@pytest.mark.parametrize("heads", [64, 5])
def test_scores_of_keys(lab, rng, heads):
    of_queries, kv, queries = scored_keys(lab, rng, 1 if lab.tiny else heads)

    def call(some):
        q, weights, firsts, lasts = (lab.put(x[some]) for x in of_queries)
        return [lab.get(cumla.fp8_mqa_logits(q, kv, weights, firsts, lasts, True, backend=lab.backend))]

    # On the host a product covers several queries.
    check_rows(call, queries, same=are_close_scores if lab.backend == "cpu" else None)


@pytest.mark.parametrize(("heads", "next_n"), [(64, 1), (64, 2), (64, 3), (5, 2)])
def test_scores_of_pages(lab, rng, heads, next_n):
    of_requests, cache, requests = scored_pages(lab, rng, 1 if lab.tiny else heads, next_n)

    def call(some):
        q, weights, lens, table = (lab.put(x[some]) for x in of_requests)
        weights, more = weights.reshape(-1, weights.shape[-1]), {"clean_logits": True, "backend": lab.backend}
        found = lab.get(cumla.fp8_paged_mqa_logits(q, cache, weights, lens, table, **more))
        return [found.reshape(len(some), next_n, -1)]

    check_rows(call, requests)


@pytest.mark.parametrize("topk", [5, 64])
def test_chosen_keys(lab, rng, topk):
    of_queries, kv, queries = scored_keys(lab, rng, 1 if lab.tiny else 64, exact=lab.backend == "cpu")

    def call(some):
        q, weights, firsts, lasts = (lab.put(x[some]) for x in of_queries)
        ranges = {"cu_seqlen_ks": firsts, "cu_seqlen_ke": lasts}
        return [lab.get(cumla.indexer_topk(q, kv, weights, topk, **ranges, backend=lab.backend))]

    check_rows(call, queries)


@pytest.mark.parametrize("next_n", [1, 2])
def test_chosen_rows_of_pages(lab, rng, next_n):
    of_requests, cache, requests = scored_pages(lab, rng, 1 if lab.tiny else 64, next_n)

    def call(some):
        q, weights, lens, table = (lab.put(x[some]) for x in of_requests)
        weights, of_pages = weights.reshape(-1, weights.shape[-1]), {"context_lens": lens, "block_table": table}
        found = lab.get(cumla.indexer_topk(q, cache, weights, 20, **of_pages, backend=lab.backend))
        return [found.reshape(len(some), next_n, -1)]

    check_rows(call, requests)


@pytest.mark.parametrize("width", [30, 5000])
def test_choice_among_columns(lab, rng, width):
    rows, width = (70 if on_a_device(lab) else 4 if lab.tiny else 9), 40 if lab.tiny else width
    logits = np.round(weights_of(rng, rows, width), 1)  # many are equal
    firsts = rng.integers(-2, width, rows).astype(np.int32)
    ends = rng.integers(-2, width + 3, rows).astype(np.int32)

    def call(some):
        arguments = (lab.put(x[some]) for x in (firsts, ends))
        return [lab.get(cumla.top_k_per_row(lab.put(logits[some]), 20, *arguments, backend=lab.backend))]

    check_rows(call, rows)


# ---- the compressor


@pytest.mark.parametrize(("ratio", "coff"), [(4, 2), (128, 1)])
@pytest.mark.parametrize("indexer", [False, True])
@pytest.mark.nowhere(when=lambda x: x.simulated and (x.get("ratio") == 128 or x.get("indexer")))  # slow
def test_compressed_requests(lab, rng, ratio, coff, indexer):
    """Each request has a page of rows and two of states; the second page is for its tokens of this step."""
    requests, tokens, block = (
        (70 if on_a_device(lab) else 2 if lab.tiny else 4),
        3 if lab.tiny else ratio + 3,
        2 * ratio,
    )
    firsts = rng.integers(ratio, 2 * ratio, requests)
    positions = firsts[:, None] + np.arange(tokens)
    layouts = {"": cumla.DSV4_FP8, "index_": cumla.INDEXER_FP8} if indexer else {"": cumla.DSV4_FP8}
    numbers = {
        prefix: {
            "kv_score": weights_of(rng, requests, tokens, 2 * coff * layout.head_dim),
            "position_bias": weights_of(rng, ratio, coff * layout.head_dim),
            "norm_weight": weights_of(rng, layout.head_dim),
            "state_cache": weights_of(rng, requests, 2, block, 2 * coff * layout.head_dim),
        }
        for prefix, layout in layouts.items()
    }  # fmt: skip
    turns = lab.put(rng.standard_normal((4 * ratio, 64)).astype(np.float32))

    def call(some):
        count, where = len(some), positions[some]
        request = np.arange(count)[:, None]
        given, results = {}, []
        for prefix, layout in layouts.items():
            parts = numbers[prefix]
            width = 2 * coff * layout.head_dim
            state = lab.put(parts["state_cache"][some].reshape(-1, block, width))
            cache = lab.put(layout.allocate(count, 4))
            given |= {
                prefix + "kv_score": lab.put(parts["kv_score"][some].reshape(-1, width)),
                prefix + "position_bias": lab.put(parts["position_bias"]),
                prefix + "norm_weight": lab.put(parts["norm_weight"]),
                prefix + "state_cache": state, prefix + "k_cache": cache,
            }  # fmt: skip
            results += [(cache, (count, -1)), (state, (count, 2, block, width))]
        table = np.arange(2 * count).reshape(count, 2).astype(np.int32)
        saved = 2 * block * request + where % (2 * block)
        slots = np.where((where + 1) % ratio == 0, 4 * request + where // ratio % 4, -1)
        cumla.compress_and_insert(
            **given, state_slot_mapping=lab.put(saved.reshape(-1)), state_block_table=lab.put(table),
            slot_mapping=lab.put(slots.reshape(-1)), positions=lab.put(where.reshape(-1)),
            token_to_req_indices=lab.put(np.repeat(np.arange(count), tokens).astype(np.int32)),
            query_start_loc=lab.put((np.arange(count + 1) * tokens).astype(np.int32)), cos_sin_cache=turns,
            compress_ratio=ratio, backend=lab.backend,
        )  # fmt: skip
        return [np.ascontiguousarray(lab.get(x)).reshape(shape) for x, shape in results]

    check_rows(call, requests)


# ---- norms, RoPE, quantisation


def results_of(lab, op, arrays, layout=None):
    """A function of tokens: what op gives for their rows of `arrays`, tokens in front, and pages if there is a layout.

    op takes the rows, then with a layout a cache in which each token has a page, and their slots
    """

    def call(some):
        rows, pages = [lab.put(x[some]) for x in arrays], []
        if layout is not None:
            pages = [lab.put(layout.allocate(len(some), 1))]
            rows += [*pages, lab.put(np.arange(len(some)))]
        found = op(*rows)
        found = () if found is None else found if isinstance(found, tuple) else (found,)
        return [*(np.ascontiguousarray(lab.get(x)).reshape(len(some), -1) for x in pages), *map(lab.get, found)]

    return call


OPS_OF_TOKENS = (
    "norms", "q_and_window", "indexer_keys", "rope", "inverse_rope", "quantized", "queries", "v4_rows", "v32_rows",
)  # fmt: skip


@pytest.mark.parametrize("op", OPS_OF_TOKENS)
def test_tokens(lab, rng, op):
    tokens, heads = (300, 64) if on_a_device(lab) else (3, 2) if lab.tiny else (9, 3)
    q, kv, v32 = (rng.standard_normal((tokens, *s)).astype(BF16) for s in ((heads, 512), (512,), (576,)))
    at, keys = rng.integers(-1, 70, tokens), weights_of(rng, tokens, 128)
    turns, weight, key_weight = (lab.put(weights_of(rng, *shape)) for shape in ((64, 64), (512,), (128,)))
    on = {"backend": lab.backend}

    def quantized(x, at):
        values, scales = cumla.inverse_rope_and_quantize(x, at, turns, 1, **on)
        return values.swapaxes(0, 1), scales.swapaxes(0, 1)

    def queries(at, x, weights):
        return cumla.fused_indexer_q_rope_quant(at, x, turns, weights, **on)

    def insert(layout):
        return lambda k, cache, slots: cumla.quantize_and_insert_k_cache(k, cache, slots, 1, layout=layout, **on)

    def q_and_window(q, kv, at, cache, slots):
        return cumla.qnorm_rope_and_insert(q, kv, cache, slots, at, turns, **on)

    def indexer_keys(k, at, cache, slots):
        cumla.indexer_knorm_rope_and_insert(k, key_weight, key_weight, cache, slots, at, turns, **on)

    calls = {
        "norms": (lambda x, y: cumla.fused_q_kv_rmsnorm(x, y, weight, weight, **on), [q[:, 0], kv]),
        "q_and_window": (q_and_window, [q, kv, at], cumla.DSV4_FP8),
        "indexer_keys": (indexer_keys, [keys, at], cumla.INDEXER_FP8),
        "rope": (lambda x, at: cumla.apply_rope(x, at, turns, **on), [q, at]),
        "inverse_rope": (lambda x, at: cumla.apply_rope(x, at, turns, inverse=True, **on), [q, at]),
        "quantized": (quantized, [q, at]),
        "queries": (queries, [at, q[..., :128], weights_of(rng, tokens, heads)]),
        "v4_rows": (insert(cumla.DSV4_FP8), [kv], cumla.DSV4_FP8),
        "v32_rows": (insert(cumla.V32_FP8), [v32], cumla.V32_FP8),
    }
    check_rows(results_of(lab, *calls[op]), tokens)

"""A token's attention does not depend on the steps, the other requests of a step, or the places of -1."""

import numpy as np
import pytest
from hypothesis import strategies as st

import cumla
from cumla.kernels.reference.sparse_attention import attend
from cumla.layers.prefill_path import PATHS
from cumla.layers.sparse import CompressedCache, SparseMLALayer
from cumla.metadata import DeepseekSparseSWAMetadataBuilder, ServingConfig
from cumla.metadata.batch import CommonAttentionMetadata
from support.bounds import assert_same_direction, assert_within
from support.lab import BF16, to_float
from support.properties import for_all, seeds

pytestmark = [pytest.mark.attention, pytest.mark.thorough(when=lambda x: x.emulated)]

WINDOW, BLOCK, PAGE, HEADS, TOPK = 12, 8, 256, 2, 6


class Requests:
    """Random rows of requests in caches, and the expected attention to them in float64."""

    def __init__(self, rng, ratio, lens):
        self.ratio, self.lens, self.spread = ratio, lens, max(1, 2 * TOPK)
        self.q, self.k = ([rng.standard_normal((n, *s)).astype(BF16) for n in lens] for s in ((HEADS, 512), (512,)))
        self.compressed = [rng.standard_normal((n // ratio, 512)).astype(BF16) for n in lens] if ratio > 1 else None
        self.sink = rng.standard_normal(HEADS).astype(np.float32)
        # The rows that each token selects, incomplete ones included, at places among -1.
        self.selected = []
        for n in lens:
            selected = np.full((n, self.spread), -1, np.int32)
            for row in selected:
                chosen = rng.permutation(n // 4 + 2)[:TOPK]
                row[np.sort(rng.permutation(self.spread)[: len(chosen)])] = chosen
            self.selected.append(selected)

    def table(self, rng, page):
        """Pages of the requests, at random."""
        columns = -(-max(self.lens) // page)
        return (
            rng.permutation(len(self.lens) * columns + 2)[: len(self.lens) * columns]
            .reshape(-1, columns)
            .astype(np.int32)
        )

    def wanted(self):
        """The queries of each request [n, h, 512]."""
        results = []
        for r, n in enumerate(self.lens):
            window = dequantized(self.k[r])
            rows = dequantized(self.compressed[r]) if self.ratio > 1 else None
            out = []
            for position in range(n):
                keys = [window[max(position - WINDOW + 1, 0) : position + 1]]
                if rows is not None:
                    complete = (position + 1) // self.ratio
                    seen = self.selected[r][position] if self.ratio == 4 else np.arange(complete)
                    keys.append(rows[seen[(seen >= 0) & (seen < complete)]])
                out.append(attend(to_float(self.q[r][position]), np.concatenate(keys), self.sink, 512**-0.5)[0])
            results.append(np.array(out))
        return results


def dequantized(rows):
    """The rows after a round trip through an FP8 cache."""
    count = max(len(rows), 1)
    cache, out = cumla.DSV4_FP8.allocate(1, count), np.zeros((1, len(rows), 512), BF16)
    cumla.quantize_and_insert_k_cache(rows, cache, np.arange(len(rows)), count, backend="reference")
    lens, table = np.array([len(rows)], np.int32), np.zeros((1, 1), np.int32)
    cumla.dequantize_and_gather_k_cache(out, cache, lens, None, table, count, 0, backend="reference")
    return to_float(out[0])


def slots_of(table, request, rows, page_rows):
    return table[request, rows // page_rows].astype(np.int64) * page_rows + rows % page_rows


def run(lab, rng, requests, steps, chunk_requests, path):
    """Output of each request [n, h, 512], computed in steps {request: tokens}."""
    ratio, put = requests.ratio, lab.put
    config = ServingConfig(
        window_size=WINDOW, compress_ratios=(ratio,), block_size=BLOCK, compressed_block_size=PAGE, index_topk=TOPK,
        num_heads=HEADS, max_num_batched_tokens=1024, max_num_seqs=8, max_model_len=512,
        prefill_chunk_size=chunk_requests,
    )  # fmt: skip
    table = requests.table(rng, BLOCK)
    cache = put(cumla.DSV4_FP8.allocate(table.max() + 1, BLOCK))
    if ratio > 1:
        page_rows, compressed_table = PAGE // ratio, requests.table(rng, PAGE)
        compressed_cache = put(cumla.DSV4_FP8.allocate(compressed_table.max() + 1, page_rows))
    builder = DeepseekSparseSWAMetadataBuilder(config, backend=lab.backend)
    layer = SparseMLALayer(ratio, index_topk=TOPK, attn_sink=put(requests.sink))
    done, outs = [0] * len(requests.lens), [np.zeros((n, HEADS, 512)) for n in requests.lens]
    for step in steps:
        order = sorted(step, key=lambda r: step[r] > 1)  # decodes first
        spans = [(r, done[r], done[r] + step[r]) for r in order]
        starts = np.concatenate([[0], np.cumsum([end - first for _, first, end in spans])]).astype(np.int32)
        lens = np.array([end for *_, end in spans], np.int32)
        slots = np.concatenate([slots_of(table, r, np.arange(first, end), BLOCK) for r, first, end in spans])
        batch = CommonAttentionMetadata(
            put(starts), starts, put(lens), lens, lens - np.diff(starts), len(order), int(starts[-1]),
            max(step.values()), put(table[order]), put(slots),
        )  # fmt: skip
        compressed = None
        if ratio > 1:
            rows = [(r, np.arange(first // ratio, end // ratio)) for r, first, end in spans]
            compressed = CompressedCache(
                compressed_cache, put(compressed_table[order]),
                put(np.concatenate([requests.compressed[r][some] for r, some in rows])),
                put(np.concatenate([slots_of(compressed_table, r, some, page_rows) for r, some in rows])),
                put(cut(requests.selected, spans)) if ratio == 4 else None,
            )  # fmt: skip
        metadata = builder.build(0, batch, c128a_block_table=compressed and compressed.block_table)
        q, k = put(cut(requests.q, spans)), put(cut(requests.k, spans))
        out = to_float(lab.get(layer.step(q, k, cache, metadata, compressed, prefill_path=path, backend=lab.backend)))
        for (r, first, end), start in zip(spans, starts, strict=False):
            outs[r][first:end] = out[start : start + end - first]
            done[r] = end
    return outs


def cut(arrays, spans):
    return np.concatenate([arrays[r][first:end] for r, first, end in spans])


def ways(rng, lens):
    """Steps that process all tokens of the requests: whole prompts, each alone, and in random chunks together."""
    yield [dict(enumerate(lens))]
    yield [{r: n} for r, n in enumerate(lens)]
    left, steps = dict(enumerate(lens)), []
    while left:
        most = rng.choice([1, 1, 1, 5, 64, 300])
        step = {r: int(rng.integers(1, min(n, most) + 1)) for r, n in left.items() if rng.random() < 0.7}
        steps += [step] if step else []
        left = {r: n - step.get(r, 0) for r, n in left.items() if n > step.get(r, 0)}
        if len(steps) > 7:  # the rest of each at once
            steps.append(left)
            left = {}
    yield [step for step in steps if step]
    yield [{r: n - 3 for r, n in enumerate(lens)}, *[dict.fromkeys(range(len(lens)), 1)] * 3]  # decodes at the end


@pytest.mark.parametrize("ratio", [1, 4, 128], ids=["swa", "c4a", "c128a"])
def test_the_same_rows(lab, ratio):
    longest = {1: 40, 4: 60, 128: 270}[ratio]

    @for_all(
        lab, examples=(1 if ratio == 128 else 2) if lab.emulated or lab.backend == "reference" else 4,
        path=st.sampled_from((None, *PATHS)), lens=st.lists(st.integers(4, longest), min_size=1, max_size=3),
        chunk_requests=st.integers(1, 4), seed=seeds,
    )  # fmt: skip
    def check(path, lens, chunk_requests, seed):
        rng = np.random.default_rng(seed)
        requests = Requests(rng, ratio, lens)
        wanted = requests.wanted()
        # On Hopper prefill's weights are bfloat16, see assert_prefill.
        rows = [to_float(x) for x in (*requests.k, *(requests.compressed or ()))]
        largest = max(1.0, *(np.abs(x).max(initial=0) for x in rows)) if lab.backend == "cuda" else 1.0
        for way, steps in enumerate(ways(rng, lens)):
            outs = run(lab, rng, requests, steps, chunk_requests, path)
            for r, (got, want) in enumerate(zip(outs, wanted, strict=True)):
                name = f"way {way}, request {r} of {lens}"
                assert_within(name, got, want, 1e-3 * largest, 3.01 / 128)
                assert_same_direction(name, got, want, 7e-6)

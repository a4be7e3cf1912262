"""Rows that a step selects by their scores: what they are, and the memory that is asked for on the way."""

import numpy as np
import pytest
from metadata.batches import make_batch, tokens_of

import cumla
from cumla.layers import selection
from cumla.layers.selection import Candidates, IndexerInputs, score_bytes, select_rows
from cumla.metadata import CommonAttentionMetadata, DeepseekV32IndexerMetadataBuilder, ServingConfig
from support.batch_kinds import padded
from support.lab import Lab

HOST = Lab("cpu", on_device=False)
PAGE, HEADS, TOPK = 8, 2, 5


class Step:
    """Requests of these lengths, whose last tokens are the queries, and random keys of all of them."""

    def __init__(self, rng, seq_lens, query_lens, ratio=None, **config):
        if ratio is not None:  # a layer of V4.1
            config |= {"compress_ratios": (ratio,), "has_c1a": True, "compressed_block_size": PAGE * ratio}
        config = ServingConfig(
            block_size=PAGE, max_num_batched_tokens=256, max_num_seqs=8, max_model_len=512, index_topk=TOPK, **config
        )
        self.batch = make_batch(HOST, seq_lens, query_lens)
        self.tokens, table = tokens_of(seq_lens, query_lens), self.batch.block_table_tensor
        keys = rng.standard_normal((table.size, PAGE, 128)).astype(np.float32)
        q = rng.standard_normal((len(self.tokens), HEADS, 128)).astype(np.float32)
        weights = rng.standard_normal((len(self.tokens), HEADS)).astype(np.float32)
        self.builder, self.queries = DeepseekV32IndexerMetadataBuilder(config, "cpu", ratio), (q, weights)
        metadata = self.build(self.batch)
        self.inputs = IndexerInputs(q, weights, keys, metadata, layout=cumla.INDEXER_F32)
        self.scores = []  # of the rows that each token sees
        for token, (request, position) in enumerate(self.tokens):
            seen = keys[table[request]].reshape(-1, 128)[: (position + 1) // (ratio or 1)].astype(np.float64)
            self.scores.append(weights[token] @ np.maximum(q[token] @ seen.T, 0))
        self.wanted = [sorted(np.argsort(-scores, kind="stable")[:TOPK].tolist()) for scores in self.scores]

    def build(self, batch):
        return self.builder.build(0, batch, block_table=batch.block_table_tensor)

    def selected(self, **options):
        """The rows of each token, and the bytes of memory requested, by name."""
        asked: dict[str, int] = {}

        def memory(name, shape, dtype):
            array = np.empty(shape, dtype)
            asked[name] = max(asked.get(name, 0), array.nbytes)
            return array

        out = np.full((len(self.tokens), TOPK), 99, np.int32)
        requests, positions = np.array(self.tokens, np.int32).T
        select_rows(self.inputs, positions, requests, self.batch.block_table_tensor, out, memory, "cpu", **options)
        return [row[row >= 0].tolist() for row in out], asked


@pytest.mark.parametrize(
    ("seq_lens", "query_lens", "config", "rows"),
    [
        ([70, 9], [1, 1], {}, 72),  # columns of the block table, whole pages
        ([70, 9], [2, 2], {"num_speculative_tokens": 1}, 2 * 72),  # a request's tokens are scored together
        ([70, 9], [3, 3], {"num_speculative_tokens": 2}, 72),  # flattened
        ([9, 70], [9, 12], {}, 80),  # one chunk of 79 rows, in multiples of 4
        ([5, 90, 30], [1, 7, 30], {"max_logits_bytes": 64}, 96),  # decodes over tables of 96, chunks of 90 and 30
    ],
)
def test_scores_take_memory_of_the_longest_request_at_least(rng, monkeypatch, seq_lens, query_lens, config, rows):
    """With a budget smaller than a request needs, its row of scores is allocated; with a larger one, the budget."""
    step = Step(rng, seq_lens, query_lens, **config)
    assert score_bytes(step.inputs) == 4 * rows
    for budget, taken in ((64, 4 * rows), (4 * rows, 4 * rows), (1 << 16, 1 << 16)):
        monkeypatch.setattr(selection, "WORKSPACE_BYTES", budget)
        monkeypatch.setattr(selection, "MOST_SCORE_BYTES", budget)
        got, asked = step.selected()
        assert got == step.wanted
        assert asked["scores"] == taken
        chunks = step.inputs.metadata.prefill.chunks if step.inputs.metadata.prefill else ()
        assert asked.get("index_keys", 0) == max((512 * chunk.total_seq_lens for chunk in chunks), default=0)


def test_all_decodes_are_scored_at_once_as_far_as_memory_goes(rng, monkeypatch):
    step = Step(rng, [70, 9, 33], [1, 1, 1])
    monkeypatch.setattr(selection, "WORKSPACE_BYTES", 64)
    for budget, rows in ((1 << 20, 3), (4 * 72 * 2, 2), (64, 1)):
        for by_model in (False, True):
            monkeypatch.setattr(selection, "MOST_SCORE_BYTES", 1 << 20 if by_model else budget)
            got, asked = step.selected(**({"most_score_bytes": budget} if by_model else {}))
            assert got == step.wanted
            assert asked["scores"] == 4 * 72 * rows


def test_a_large_budget_stays_what_it_is(rng):
    """For few rows, too: a captured graph's memory keeps its address, and steps of many rows take few launches."""
    _, asked = Step(rng, [9], [1]).selected()
    assert asked["scores"] == selection.WORKSPACE_BYTES == 64 << 20


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize(
    ("seq_lens", "query_lens"), [([], []), ([0, 0], [0, 0]), ([30, 61], [1, 1]), ([30, 61, 0], [2, 2, 0])]
)
def test_padding_tokens_select_nothing(rng, ratio, seq_lens, query_lens):
    """No rows, no slots, no candidate blocks: of a step of decodes, and of one without requests."""
    step, tokens, padding = Step(rng, seq_lens, query_lens, ratio, num_speculative_tokens=1), sum(query_lens), 3
    for written in (True, False):
        batch = padded(step.batch, padding)
        metadata = step.build(batch)
        q, weights = (np.concatenate([x, np.full((padding, *x.shape[1:]), np.nan, x.dtype)]) for x in step.queries)
        out, slots = (np.full((tokens + padding, TOPK), 99, np.int32) for _ in range(2))
        lens, blocks = np.full(tokens + padding, 99, np.int32), np.full((tokens + padding, BLOCKS), 99, np.int32)
        if not written:
            blocks[:tokens] = np.reshape([best_blocks(scores) for scores in step.scores], (tokens, BLOCKS))
        requests, positions = np.array([*step.tokens, *[(0, -1)] * padding], np.int32).T.copy()
        select_rows(
            IndexerInputs(q, weights, step.inputs.cache, metadata, layout=cumla.INDEXER_F32), positions, requests,
            batch.block_table_tensor, out, lambda name, shape, dtype: np.empty(shape, dtype), "cpu", (slots, lens),
            positions >= 0, Candidates(blocks, SIZE, written),
        )  # fmt: skip
        assert (out[tokens:] == -1).all()
        assert (slots[tokens:] == -1).all()
        assert not lens[tokens:].any()
        assert (blocks[tokens:] == (-1 if written else 99)).all()
        if written:
            assert [row[row >= 0].tolist() for row in out[:tokens]] == step.wanted
            assert lens[:tokens].tolist() == [len(rows) for rows in step.wanted]


SIZE, BLOCKS = 4, 2  # rows of a candidate block, and blocks: they reach 8 rows


def best_blocks(scores):
    """The blocks with the best scores, the newest always among them; ascending, then -1."""
    best = [scores[first : first + SIZE].max() for first in range(0, len(scores), SIZE)]
    if best:
        best[-1] = np.inf
    chosen = sorted(np.argsort(-np.array(best), kind="stable")[:BLOCKS].tolist())
    return chosen + [-1] * (BLOCKS - len(chosen))


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("rows", [1, 6, 7, 8, 9, 11, 12, 13, 30])
@pytest.mark.parametrize("table_bytes", [selection.TABLE_BYTES, 1], ids=["at once", "one by one"])
def test_candidates_limit_what_a_token_selects(rng, monkeypatch, ratio, rows, table_bytes):
    """From the first row on that they do not reach, and to complete rows: prefills of so many rows, and a decode."""
    monkeypatch.setattr(selection, "TABLE_BYTES", table_bytes)
    step = Step(rng, [40, rows * ratio], [1, rows * ratio], ratio)
    source = [rng.standard_normal(len(scores)) for scores in step.scores]  # of the layer that chose the blocks
    blocks = np.array([best_blocks(scores) for scores in source], np.int32)
    wanted = []
    for scores, its in zip(step.scores, blocks, strict=True):
        kept = np.where(np.isin(np.arange(len(scores)) // SIZE, its), scores, -np.inf)
        order = np.argsort(-kept, kind="stable")[:TOPK]
        wanted.append(sorted(order[kept[order] > -np.inf].tolist()))
    got, _ = step.selected(candidates=Candidates(blocks, SIZE, written=False))
    assert got == wanted


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize(("seq_lens", "query_lens"), [([61], [1]), ([13, 62], [1, 30]), ([29], [29])])
def test_memory_for_scores_of_rows_and_of_blocks(rng, monkeypatch, ratio, seq_lens, query_lens):
    """Where candidate blocks are written, both fit into what is asked for, however small the budget is."""
    step, blocks = Step(rng, seq_lens, query_lens, ratio), np.full((sum(query_lens), BLOCKS), 99, np.int32)
    candidates = Candidates(blocks, SIZE, written=True)
    monkeypatch.setattr(selection, "WORKSPACE_BYTES", 1)
    got, asked = step.selected(candidates=candidates, most_score_bytes=1)
    assert got == step.wanted
    assert blocks.tolist() == [best_blocks(scores) for scores in step.scores]
    assert asked["scores"] == score_bytes(step.inputs, candidates) > score_bytes(step.inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [cumla.INDEXER_FP8, cumla.INDEXER_MXFP4], ids=lambda x: x.name)
@pytest.mark.parametrize("chooses", [True, False], ids=["blocks", "rows"])
def test_requests_of_a_million_rows_take_64_mebibytes(rng, layout, chooses):
    """V4.1's decodes, of which 16 have as many bytes of rows' scores. They share pages, to fit into memory."""
    import cupy

    requests, rows, topk = 17, 1 << 20, 512
    cache = layout.allocate(rows // 64, 64, cupy)
    cache[...] = cupy.random.default_rng(0).integers(0, 0x77, cache.shape, np.uint8)
    scales = layout.parts(cache)[1]
    scales[...] = 127 if layout is cumla.INDEXER_MXFP4 else cupy.asarray(np.float32([1]).view(np.uint8))
    config = ServingConfig(
        compress_ratios=(1,), has_c1a=True, block_size=64, compressed_block_size=64, max_num_batched_tokens=256,
        max_num_seqs=32, max_model_len=rows, index_topk=topk,
    )  # fmt: skip
    table = cupy.asarray(np.stack([rng.permutation(rows // 64) for _ in range(requests)]).astype(np.int32))
    batch = CommonAttentionMetadata.from_lengths([1] * requests, [rows] * requests, table, 64)
    metadata = DeepseekV32IndexerMetadataBuilder(config, "cuda", compress_ratio=1).build(0, batch)
    q = cupy.asarray(rng.integers(0, 0x77, (requests, 32, 128), np.uint8))
    weights = cupy.asarray(rng.standard_normal((requests, 32)).astype(np.float32))
    blocks = cupy.empty((requests, 2048), np.int32)
    candidates = Candidates(blocks, 8, True) if chooses else None
    out, positions = cupy.empty((requests, topk), np.int32), cupy.full(requests, rows - 1, np.int32)
    asked: dict[str, int] = {}

    def memory(name, shape, dtype):
        array = cupy.empty(shape, dtype)
        asked[name] = max(asked.get(name, 0), array.nbytes)
        return array

    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    select_rows(
        IndexerInputs(q, weights, cache, metadata, layout=layout), positions, cupy.arange(requests, dtype=np.int32),
        table, out, memory, "cuda", candidates=candidates, most_score_bytes=selection.WORKSPACE_BYTES,
    )  # fmt: skip
    most = 72 << 20 if chooses else 64 << 20  # of the scores of rows 64
    assert asked == {"scores": most}
    assert pool.total_bytes() - before <= most + (1 << 20)
    for request in (0, requests - 1):
        one = slice(request, request + 1)
        lens = cupy.full(1, rows, np.int32)
        logits = cumla.fp8_paged_mqa_logits(q[one, None], cache, weights[one], lens, table[one], layout=layout)
        assert bool((out[one] == cumla.top_k_per_row(logits, topk)).all())
        if chooses:
            assert bool((blocks[one] == cumla.select_candidate_blocks(logits, 2048)).all())


@pytest.mark.parametrize(
    ("seq_lens", "query_lens", "config"),
    [
        ([70, 9], [3, 3], {"num_speculative_tokens": 2}),
        ([9, 70], [9, 12], {}),
        ([5, 90, 30], [1, 7, 30], {"max_logits_bytes": 64}),
    ],
)
def test_batch_invariant_selections(rng, monkeypatch, seq_lens, query_lens, config):
    """Token by token over the request's own pages, in the least memory, too; no keys are gathered."""
    monkeypatch.setattr("cumla.layers.selection.WORKSPACE_BYTES", 0)
    step = Step(rng, seq_lens, query_lens, batch_invariant=True, **config)
    found, asked = step.selected(most_score_bytes=1)
    assert found == step.wanted
    assert set(asked) == {"scores"}
    assert asked["scores"] == score_bytes(step.inputs)
    assert step.inputs.metadata.decode is None or step.inputs.metadata.decode.seq_lens.ndim == 1

"""A sparse layer on ranks against attention in float64, starting with the insert of rows."""

import numpy as np
import pytest

import cumla
from cumla.layers import SparseMLALayer
from cumla.metadata import CommonAttentionMetadata, DeepseekSparseSWAMetadataBuilder, ServingConfig
from cumla.parallel import RankError, Shard, ShardedCompressedCache, ShardedSparseMLALayer, run_threads, sparse_layer
from support import ranks
from support.backends import only
from support.lab import BF16
from support.ranks import BLOCK, Context

WINDOW, HEADS, TOPK = 6, 6, 5
SEQ_LENS, QUERY_LENS = np.array([37, 1, 300], np.int32), np.array([1, 1, 12], np.int32)  # two decodes and a prefill
SECONDS = 60


class Problem:
    """A step before the rows of new tokens, and each request's last compressed row, are written."""

    def __init__(self, rng, ratio, layout=cumla.DSV4_FP8, extra_layout=None, **config):
        self.config = config
        self.layout, self.extra_layout, self.extra = layout, extra_layout, extra_layout or layout
        self.has_rows = ratio > 1 or (ratio == 1 and "has_c1a" in self.config)
        self.ratio, self.lens = ratio, SEQ_LENS // ratio if self.has_rows else 0 * SEQ_LENS
        self.request = np.repeat(np.arange(3), QUERY_LENS)
        self.position = np.concatenate([np.arange(s - q, s) for s, q in zip(SEQ_LENS, QUERY_LENS, strict=True)])
        self.sink = rng.standard_normal(HEADS).astype(np.float32)
        columns = -(-int(SEQ_LENS.max()) // BLOCK)
        self.table = rng.permutation(3 * columns).reshape(3, columns).astype(np.int32)
        self.window = [rng.standard_normal((n, 512)).astype(BF16) for n in SEQ_LENS]
        self.context = Context.make(rng, self.lens, HEADS, 512)
        self.context.q = rng.standard_normal((len(self.request), HEADS, 512)).astype(BF16)
        # Any rows in any order; some are not complete yet.
        self.selected = np.stack([rng.permutation(np.arange(-2, 80))[:TOPK] for _ in self.request]).astype(np.int32)
        self.selected[:, 0] = (self.position + 1) // max(ratio, 1)  # the next row

    def slots(self, request, positions):
        return self.table[request, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK

    def window_cache(self, upto):
        cache = self.layout.allocate(self.table.size, BLOCK)
        for request, (rows, end) in enumerate(zip(self.window, upto, strict=True)):
            slots = self.slots(request, np.arange(end))
            cumla.quantize_and_insert_k_cache(rows[:end], cache, slots, layout=self.layout, backend="reference")
        return cache

    def wanted(self):
        rows, whole = self.context.rows, self.extra.allocate(max(1, -(-len(self.context.rows) // BLOCK)), BLOCK)
        cumla.quantize_and_insert_k_cache(rows, whole, np.arange(len(rows)), layout=self.extra)
        windows, rows = [], []
        for token, (request, position) in enumerate(zip(self.request, self.position, strict=True)):
            windows.append(self.slots(request, np.arange(max(position - WINDOW + 1, 0), position + 1)))
            complete = (position + 1) // self.ratio if self.has_rows else 0
            seen = np.arange(complete) if self.ratio == 128 else self.selected[token]
            rows.append(seen[(seen >= 0) & (seen < complete)].astype(np.int64) + self.context.starts[request])
        caches = [(self.window_cache(SEQ_LENS), self.layout, windows), (whole, self.extra, rows)]
        half = (self.context.q.astype(np.float32) / 2).astype(BF16)  # equivalent to half the default scale
        return ranks.attend(half, caches, self.sink)

    def on(self, comm, split_heads, backend=None, given=None):
        own = {"compress_ratios": (self.ratio,), "max_model_len": 512}
        config = ServingConfig(
            window_size=WINDOW, block_size=BLOCK, compressed_block_size=128, index_topk=TOPK, max_num_batched_tokens=64,
            max_num_seqs=4, **(own | self.config),
        )  # fmt: skip
        starts = np.concatenate([[0], np.cumsum(QUERY_LENS)]).astype(np.int32)
        batch = CommonAttentionMetadata(
            starts, starts, SEQ_LENS, SEQ_LENS, SEQ_LENS - QUERY_LENS, 3, len(self.request), int(QUERY_LENS.max()),
            self.table, self.slots(self.request, self.position),
        )  # fmt: skip
        compressed, shard = None, Shard(comm.rank, comm.size, 2)
        given = self.has_rows if given is None else given
        if given:
            table, pages = self.context.pages(shard)
            slots, cache = self.context.slots(table, shard, backend), self.extra.allocate(pages, BLOCK)
            new = self.context.starts[1:][self.lens > 0] - 1
            old = np.setdiff1d(np.arange(len(slots)), new)
            rows = self.context.rows[old]
            cumla.quantize_and_insert_k_cache(rows, cache, slots[old], layout=self.extra, backend=backend)
            compressed = ShardedCompressedCache(
                cache, table, shard, self.context.rows[new], slots[new], None if self.ratio == 128 else self.selected
            )
        c128a = np.zeros((3, 4), np.int32) if 128 in config.compress_ratios else None
        heads = self.context.own_heads(comm) if split_heads else slice(None)
        layer = SparseMLALayer(
            self.ratio, TOPK, np.ascontiguousarray(self.sink[heads]), 0.5 * 512**-0.5, self.layout, self.extra_layout
        )
        new_rows = np.stack([self.window[r][p] for r, p in zip(self.request, self.position, strict=True)])
        return ShardedSparseMLALayer(layer, comm, split_heads=split_heads, backend=backend).step(
            np.ascontiguousarray(self.context.q[:, heads]), new_rows, self.window_cache(SEQ_LENS - QUERY_LENS),
            DeepseekSparseSWAMetadataBuilder(config, backend).build(0, batch, c128a_block_table=c128a), compressed,
        )  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("split_heads", [False, True], ids=["all-heads", "own-heads"])
@pytest.mark.parametrize("ratio", [0, 1, 4, 128])
def test_a_step_gives_what_one_device_gives(rng, ratio, split_heads, size):
    """With a sink and another softmax scale, for decodes and a prefill in a step."""
    problem = Problem(rng, ratio)
    want = problem.wanted()
    outs = run_threads(size, lambda comm: problem.on(comm, split_heads), SECONDS)
    ranks.check_outs(outs, want, split_heads, size)


@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_every_operation_is_on_the_layers_backend(rng, ratio):
    problem = Problem(rng, ratio)
    with only("reference"):
        outs = run_threads(2, lambda comm: problem.on(comm, False, "reference"), SECONDS)
    ranks.check_outs(outs, problem.wanted(), False, 2)


@pytest.mark.parametrize("ratio", [4, 128])
def test_a_step_of_v41_s_formats(rng, ratio):
    problem = Problem(rng, ratio, cumla.DSV41_FP8, cumla.DSV41_FP4)
    outs = run_threads(2, lambda comm: problem.on(comm, False), SECONDS)
    ranks.check_outs(outs, problem.wanted(), False, 2)


def test_layers_of_ratio_0_of_v41(rng):
    """Unlike layers with compressed rows, they have only a window."""
    problem = Problem(rng, 0, cumla.DSV41_FP8, compress_ratios=(0, 2, 1), has_c1a=True)
    outs = run_threads(2, lambda comm: problem.on(comm, False), SECONDS)
    ranks.check_outs(outs, problem.wanted(), False, 2)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("ratio", [1, 2])
def test_compressed_rows_of_v41(rng, ratio, size):
    problem = Problem(rng, ratio, cumla.DSV41_FP8, cumla.DSV41_FP4, has_c1a=True)
    outs = run_threads(size, lambda comm: problem.on(comm, False), SECONDS)
    ranks.check_outs(outs, problem.wanted(), False, size)


@pytest.mark.parametrize(
    ("ratio", "given", "message"),
    [
        (0, True, "compressed: got rows, expected None at compress_ratio 0"),
        (1, True, "compressed: got rows, expected None at compress_ratio 1"),
        (4, False, "compressed: got None, expected rows at compress_ratio 4"),
        (128, False, "compressed: got None, expected rows at compress_ratio 128"),
    ],
)
def test_rows_that_do_not_belong_to_the_ratio(rng, ratio, given, message):
    problem = Problem(rng, ratio)
    with pytest.raises(RankError, match=message):
        run_threads(2, lambda comm: problem.on(comm, False, given=given), SECONDS)


def test_metadata_without_layers_of_ratio_128(rng):
    problem = Problem(rng, 128, compress_ratios=(1, 4))
    with pytest.raises(RankError, match="metadata: got one without C128A layers"):
        run_threads(2, lambda comm: problem.on(comm, False), SECONDS)


def test_a_rank_lists_rows_by_the_steps_longest_sequence(monkeypatch):
    """max_model_len does not matter: the memory is the same as on one device."""
    widths = []
    localise = sparse_layer.localise_indices
    monkeypatch.setattr(
        sparse_layer,
        "localise_indices",
        lambda rows, *more, **named: widths.append(rows.shape) or localise(rows, *more, **named),
    )
    for longest in (512, 1 << 20):
        problem = Problem(np.random.default_rng(7), 128, max_model_len=longest)
        outs = run_threads(2, lambda comm, problem=problem: problem.on(comm, False), SECONDS)
        ranks.check_outs(outs, problem.wanted(), False, 2)
    assert set(widths) == {(2, 128), (12, 128)}

"""One layer, one step, of mixed batches, against attention over everything a token may see."""

import contextlib
import weakref
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import cumla
from cumla.arrays import dlpack
from cumla.kernels.cuda.launch import recorded_launches
from cumla.kernels.reference.sparse_attention import attend
from cumla.layers.prefill_path import chunk_paths
from cumla.layers.selection import IndexerInputs, score_bytes
from cumla.layers.sparse import CompressedCache, LayerWorkspace, SparseMLALayer, not_observed
from cumla.metadata import DeepseekSparseSWAMetadataBuilder, DeepseekV32IndexerMetadataBuilder, ServingConfig
from cumla.metadata.batch import CommonAttentionMetadata
from support.backends import only
from support.bounds import assert_same_direction, assert_within
from support.lab import BF16, Lab, to_float

pytestmark = pytest.mark.attention

WINDOW, BLOCK, COMPRESSED_BLOCK = 16, 8, 128
SCALE = 0.7 * 512**-0.5  # not the default


class Pool:
    """Sequences of random rows in randomly placed blocks of a cache."""

    def __init__(self, rng, seq_lens, block_size):
        self.block_size = block_size
        columns = max(-(-max(seq_lens, default=0) // block_size), 1)
        self.num_blocks = columns * max(len(seq_lens), 1) + 3
        order = rng.permutation(self.num_blocks)[: columns * len(seq_lens)]
        self.table = order.reshape(len(seq_lens), columns).astype(np.int32)
        self.rows = [rng.standard_normal((n, 512)).astype(BF16) for n in seq_lens]

    def slots(self, request, positions):
        positions = np.asarray(positions, np.int64)
        return self.table[request][positions // self.block_size].astype(np.int64) * self.block_size + (
            positions % self.block_size
        )


def batch_of(lab, seq_lens, query_lens, pool):
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    lens = np.array(seq_lens, np.int32)
    slots = np.concatenate(
        [pool.slots(r, np.arange(s - q, s)) for r, (s, q) in enumerate(zip(seq_lens, query_lens, strict=True))]
    )
    return CommonAttentionMetadata(
        lab.put(starts), starts, lab.put(lens), lens, lens - np.array(query_lens, np.int32), len(lens),
        int(starts[-1]), max(query_lens), lab.put(pool.table), lab.put(slots),
    )  # fmt: skip


def dequantized(rows, layout=cumla.DSV4_FP8):
    """The rows after a round trip through a quantised cache."""
    given = {"block_size": max(len(rows), 1), "layout": layout, "backend": "reference"}
    cache = layout.allocate(1, given["block_size"])
    cumla.quantize_and_insert_k_cache(rows, cache, np.arange(len(rows)), **given)
    out = np.zeros((1, len(rows), 512), np.float32)
    table, lens = np.zeros((1, 1), np.int32), np.array([len(rows)], np.int32)
    cumla.dequantize_and_gather_k_cache(out, cache, lens, None, table, **given)
    return to_float(out[0])


@pytest.mark.parametrize("ratio", [1, 4, 128])
@pytest.mark.parametrize(
    ("seq_lens", "query_lens", "path"),
    [
        pytest.param([5, 200, 33], [1, 1, 1], None, id="decodes"),
        pytest.param([40, 300], [40, 7], None, id="prefills"),
        pytest.param([40, 300], [40, 7], "pages", id="prefills-over-pages"),
        pytest.param([40, 300], [40, 7], "rows", id="prefills-over-rows"),
        pytest.param([150, 1, 2, 260, 19], [2, 1, 2, 30, 19], None, id="mixed-with-draft-tokens"),
        pytest.param([150, 1, 2, 260, 19], [2, 1, 2, 30, 19], "pages", id="mixed-with-draft-tokens-over-pages"),
    ],
)
@pytest.mark.thorough(when=lambda x: x.emulated and x.get("path") is not None and x.get("ratio") != 4)
def test_step(lab, rng, ratio, seq_lens, query_lens, path):
    check_step(lab, rng, ratio, seq_lens, query_lens, path)


@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("whole", [False, True], ids=["some-tokens", "a-chunk-and-some-tokens"])
@pytest.mark.thorough(when=lambda x: x.simulated)
def test_first_tokens_of_prefills_may_attend_with_the_decodes(lab, rng, monkeypatch, ratio, whole):
    """Over pages, while the others of their chunk read gathered rows."""

    def chunks(*given):
        first, *rest = chunk_paths(*given)
        yield first._replace(path="pages", ahead=30) if whole else first._replace(path="rows", ahead=7)
        yield from (chunk._replace(path="rows", ahead=7) for chunk in rest)

    monkeypatch.setattr("cumla.layers.sparse.chunk_paths", chunks)
    check_step(lab, rng, ratio, [150, 1, 2, 260, 19], [2, 1, 2, 30, 19], None)


def check_step(lab, rng, ratio, seq_lens, query_lens, path, layout=cumla.DSV4_FP8, extra_layout=None):
    """A step against attention in float64 over the rows that the caches of these formats hold."""
    heads, topk, extra = 3, 8, extra_layout or layout
    config = ServingConfig(
        window_size=WINDOW, compress_ratios=(ratio,), block_size=BLOCK, compressed_block_size=COMPRESSED_BLOCK,
        num_speculative_tokens=1, max_num_batched_tokens=64, max_num_seqs=8, max_model_len=512, prefill_chunk_size=1,
    )  # fmt: skip
    pool = Pool(rng, seq_lens, BLOCK)
    cache = lab.put(layout.allocate(pool.num_blocks, BLOCK))
    compressed_lens = [s // ratio if ratio > 1 else 0 for s in seq_lens]
    compressed_pool = Pool(rng, compressed_lens, COMPRESSED_BLOCK // ratio if ratio > 1 else 1)

    # Rows of earlier steps in the caches; this step completes at most the last compressed row.
    for r, (s, q) in enumerate(zip(seq_lens, query_lens, strict=True)):
        insert(lab, pool, cache, r, np.arange(s - q), layout)
    batch = batch_of(lab, seq_lens, query_lens, pool)
    builder = DeepseekSparseSWAMetadataBuilder(config, backend=lab.backend)
    compressed, selected = None, None
    tokens = sum(query_lens)
    if ratio > 1:
        compressed_cache = lab.put(extra.allocate(compressed_pool.num_blocks, compressed_pool.block_size))
        for r, n in enumerate(compressed_lens):
            insert(lab, compressed_pool, compressed_cache, r, np.arange(max(n - 1, 0)), extra)
        fresh = [r for r, n in enumerate(compressed_lens) if n]
        new_rows = np.array([compressed_pool.rows[r][-1] for r in fresh]).reshape(-1, 512).astype(BF16)
        new_slots = np.array([compressed_pool.slots(r, [compressed_lens[r] - 1])[0] for r in fresh], np.int64)
        if ratio == 4:
            selected = select(rng, seq_lens, query_lens, topk)
        compressed = CompressedCache(
            compressed_cache, lab.put(compressed_pool.table), lab.put(new_rows), lab.put(new_slots), lab.put(selected)
        )
    metadata = builder.build(0, batch, c128a_block_table=compressed and compressed.block_table)

    sink = rng.standard_normal(heads).astype(np.float32)
    layer = SparseMLALayer(ratio, topk, lab.put(sink), SCALE, layout, extra_layout)
    q = rng.standard_normal((tokens, heads, 512)).astype(BF16)
    k = np.concatenate([pool.rows[r][s - n : s] for r, (s, n) in enumerate(zip(seq_lens, query_lens, strict=True))])
    observed = []
    with only(lab.backend):
        out = layer.step(
            lab.put(q), lab.put(k), cache, metadata, compressed, prefill_path=path, backend=lab.backend,
            observe=lambda op: observed.append(op) or not_observed(op),
        )  # fmt: skip
    out = to_float(lab.get(out))
    if path is not None:
        assert ("gather" in observed) == (path == "rows")
    if lab.backend == "cuda" and "decode" in observed:
        assert metadata.decode_plan(ratio).made_for is not None  # which the other layers of the step find

    token = 0
    for r, (s, n) in enumerate(zip(seq_lens, query_lens, strict=True)):
        window_rows, compressed_rows = dequantized(pool.rows[r], layout), dequantized(compressed_pool.rows[r], extra)
        for position in range(s - n, s):
            keys = window_rows[max(position - WINDOW + 1, 0) : position + 1]
            if ratio > 1:
                seen = np.arange((position + 1) // ratio) if selected is None else selected[token]
                keys = np.concatenate([keys, compressed_rows[seen[seen >= 0]]])
            want, _, _ = attend(to_float(q[token]), keys, sink, SCALE)
            # On Hopper prefill's weights are bfloat16, see assert_prefill.
            largest = max(np.abs(keys).max(), 1.0) if lab.backend == "cuda" else 1.0
            assert_within(f"token {token}", out[token], want, 1e-3 * largest, 3.01 / 128)
            assert_same_direction(f"token {token}", out[token], want, 7e-6)
            token += 1


def insert(lab, pool, cache, request, positions, layout=cumla.DSV4_FP8):
    if len(positions):
        cumla.quantize_and_insert_k_cache(
            lab.put(pool.rows[request][positions]), cache, lab.put(pool.slots(request, positions)), pool.block_size,
            layout=layout, backend=lab.backend,
        )  # fmt: skip


def select(rng, seq_lens, query_lens, topk):
    """For each token a random choice of the compressed rows that exist at its position, padded with -1."""
    rows = []
    for s, n in zip(seq_lens, query_lens, strict=True):
        for position in range(s - n, s):
            chosen = rng.permutation((position + 1) // 4)[:topk]
            rows.append(np.pad(chosen, (0, topk - len(chosen)), constant_values=-1))
    return np.array(rows, np.int32)


@pytest.mark.parametrize("ratio", [1, 4])
def test_a_workspace_changes_no_bit(lab, rng, ratio):
    seq_lens, heads, topk = [5, 40, 33], 3, 8
    config = ServingConfig(
        window_size=WINDOW, compress_ratios=(ratio,), block_size=BLOCK, compressed_block_size=4 * BLOCK,
        max_num_batched_tokens=64, max_num_seqs=8, max_model_len=512,
    )  # fmt: skip
    pool = Pool(rng, seq_lens, BLOCK)
    cache = lab.put(cumla.DSV4_FP8.allocate(pool.num_blocks, BLOCK))
    for r, s in enumerate(seq_lens):
        insert(lab, pool, cache, r, np.arange(s - 1))
    metadata = DeepseekSparseSWAMetadataBuilder(config, backend=lab.backend).build(
        0, batch_of(lab, seq_lens, [1, 1, 1], pool)
    )
    compressed = None
    if ratio == 4:
        none = np.zeros((0, 512), BF16)
        compressed = CompressedCache(
            cache, lab.put(pool.table), lab.put(none), lab.put(np.zeros(0, np.int64)),
            lab.put(select(rng, seq_lens, [1, 1, 1], topk)),
        )  # fmt: skip
    layer = SparseMLALayer(ratio, index_topk=topk)
    q = lab.put(rng.standard_normal((3, heads, 512)).astype(BF16))
    k = lab.put(np.stack([pool.rows[r][-1] for r in range(3)]))
    want = layer.step(q, k, cache, metadata, compressed, backend=lab.backend)
    more = lab.put(np.zeros((7, heads, 512), BF16))  # more tokens and columns than in the step
    for workspace in (
        LayerWorkspace.allocate(q, topk if ratio == 4 else 0), LayerWorkspace.allocate(more, topk + 5)
    ):  # fmt: skip
        got = layer.step(q, k, cache, metadata, compressed, workspace=workspace, backend=lab.backend)
        assert lab.get(got).tobytes() == lab.get(want).tobytes()
    if ratio == 4:
        with pytest.raises(ValueError, match="workspace: got no topk_indices and topk_lens"):
            layer.step(q, k, cache, metadata, compressed, workspace=LayerWorkspace.allocate(q), backend=lab.backend)


@pytest.mark.parametrize("early_release", [True, False])
def test_a_step_may_end_in_an_ordinary_launch(here, rng, early_release):
    config = ServingConfig(window_size=WINDOW, block_size=BLOCK, max_num_batched_tokens=64, max_num_seqs=8)
    pool = Pool(rng, [5], BLOCK)
    cache = here.put(cumla.DSV4_FP8.allocate(pool.num_blocks, BLOCK))
    metadata = DeepseekSparseSWAMetadataBuilder(config, backend="cuda").build(0, batch_of(here, [5], [1], pool))
    q, k = (here.put(rng.standard_normal(shape).astype(BF16)) for shape in ((1, 3, 512), (1, 512)))
    with recorded_launches() as found:
        SparseMLALayer(1).step(q, k, cache, metadata, early_release=early_release)
    ordinary = [launch.kernel.raw.name == "ordinary_launch" for launch in found]
    assert len(found) > 1
    assert ordinary == [False] * (len(found) - 1) + [not early_release]


INDEXER_LAYOUTS = [cumla.INDEXER_FP8, cumla.INDEXER_BF16, cumla.INDEXER_F32]


@pytest.mark.parametrize(
    ("layout", "query_lens"),
    [(layout, [2, 1, 30]) for layout in INDEXER_LAYOUTS] + [(cumla.INDEXER_FP8, [n] * 3) for n in (1, 2)],
    ids=lambda x: getattr(x, "name", str(x)),
)
@pytest.mark.thorough(when=lambda x: x.emulated and x.get("layout") is cumla.INDEXER_F32)
def test_selects_what_an_indexer_scores_best(lab, rng, layout, query_lens):
    """The bits equal a step's that gets each token's top-k, computed token by token."""
    seq_lens, topk, index_heads = [3, 200, 147], 8, 4
    layer, given, pool = step_of(
        rng, lab, 4, seq_lens, query_lens, index_topk=topk, num_speculative_tokens=max(query_lens) % 29
    )
    compressed, config = given["compressed"], given["metadata"].config
    batch = batch_of(lab, seq_lens, query_lens, pool)
    indexer = DeepseekV32IndexerMetadataBuilder(config, backend=lab.backend).build(
        0, batch, block_table=compressed.block_table
    )
    rows, tokens = COMPRESSED_BLOCK // 4, sum(query_lens)
    table = lab.get(compressed.block_table)
    host_cache = layout.allocate(len(compressed.cache), rows)
    keys = rng.normal(size=(len(compressed.cache) * rows, 128))
    keys = keys.astype(np.float32 if layout.value_type == "float32" else BF16)
    fresh = np.array([table[1, 1] * rows + 49 - rows, 5])  # the last row of a request, and a free one
    old = np.setdiff1d(np.arange(len(keys)), fresh)
    cumla.indexer_k_quant_and_cache(keys[old], host_cache, old, backend="reference")
    cache = lab.put(host_cache.copy())
    cumla.indexer_k_quant_and_cache(keys[fresh], host_cache, fresh, backend="reference")
    q, weights = rng.normal(size=(tokens, index_heads, 128)), rng.normal(size=(tokens, index_heads)).astype(np.float32)
    q = q.astype(ml_dtypes.float8_e4m3fn).view(np.uint8) if layout.num_scales else q.astype(keys.dtype)
    selected, token = np.full((tokens, topk), -1, np.int32), 0
    for r, (s, n) in enumerate(zip(seq_lens, query_lens, strict=True)):
        for position in range(s - n, s):
            some = slice(token, token + 1)
            selected[some] = cumla.indexer_topk(
                q[some][None], host_cache, weights[some], topk, context_lens=np.array([(position + 1) // 4], np.int32),
                block_table=table[r : r + 1], layout=layout, backend="reference",
            )  # fmt: skip
            token += 1
    compressed = replace(compressed, k=lab.put(np.ones((2, 512), BF16)), slot_mapping=lab.put(fresh.astype(np.int64)))
    inputs = IndexerInputs(lab.put(q), lab.put(weights), cache, indexer, lab.put(keys[fresh]), layout)
    arguments = {name: given[name] for name in ("q", "k", "swa_cache", "metadata")}
    want = layer.step(**arguments, compressed=replace(compressed, topk_indices=lab.put(selected)), backend=lab.backend)
    own = replace(compressed, topk_indices=None, indexer=inputs)
    observed = []
    with only(lab.backend):
        got = layer.step(
            **arguments, compressed=own, backend=lab.backend,
            observe=lambda op: observed.append(op) or not_observed(op),
        )  # fmt: skip
    assert lab.get(got).tobytes() == lab.get(want).tobytes()
    assert observed[:4] == ["insert", "insert", "insert", "select"]
    assert lab.get(cache).tobytes() == host_cache.tobytes()
    workspace = LayerWorkspace.allocate(arguments["q"], topk, score_bytes(inputs))
    got = layer.step(**arguments, compressed=own, workspace=workspace, backend=lab.backend)
    assert lab.get(got).tobytes() == lab.get(want).tobytes()
    np.testing.assert_array_equal(lab.get(workspace.selected), selected)
    if lab.backend == "cuda" and max(query_lens) <= 2:
        out = lab.xp.zeros_like(want)
        stream = lab.xp.cuda.Stream(non_blocking=True)
        lab.xp.cuda.Device().synchronize()
        with stream:
            stream.begin_capture()
            few = replace(workspace, selected=None)
            with pytest.raises(ValueError, match="workspace: got no selected and scores"):
                layer.step(**arguments, compressed=own, out=out, workspace=few, backend=lab.backend)
            layer.step(**arguments, compressed=own, out=out, workspace=workspace, backend=lab.backend)
            graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
        assert lab.get(out).tobytes() == lab.get(want).tobytes()
    for change, message in (
        ({"scores": workspace.scores[:-1]}, "workspace.scores: got"),
        ({"selected": workspace.selected[:, 1:]}, "workspace.selected: got shape"),
    ):
        with pytest.raises(ValueError, match=message):
            layer.step(**arguments, compressed=own, workspace=replace(workspace, **change), backend=lab.backend)
    for change, message in (
        ({"q": inputs.q[:-1]}, "indexer.q: got"), ({"weights": inputs.weights[:-1]}, "indexer.weights: got"),
        ({"cache": cache[:, :-1]}, "indexer.cache: got shape"), ({"metadata": None}, "indexer.metadata: got NoneType"),
        ({"k": inputs.k[:, :-1]}, "indexer.k: got shape"),
        ({"k": inputs.k[:1]}, "compressed.slot_mapping: got 2 entries, expected 1, one for each row of compressed.ind"),
        ({"layout": cumla.DSV4_FP8}, "indexer.layout: got"),
    ):  # fmt: skip
        wrong = replace(own, indexer=replace(inputs, **change))
        with pytest.raises((TypeError, ValueError), match=message):
            layer.step(**arguments, compressed=wrong, backend=lab.backend)
    with pytest.raises(ValueError, match="topk_indices: got an array and an indexer"):
        layer.step(**arguments, compressed=replace(own, topk_indices=inputs.q), backend=lab.backend)


def step_of(rng, lab, ratio, seq_lens, query_lens, **config):
    """A layer, valid arguments of its step by name, and the pool of its window's rows."""
    config = ServingConfig(
        **{
            "window_size": WINDOW, "compress_ratios": (ratio,), "block_size": BLOCK,
            "compressed_block_size": COMPRESSED_BLOCK, "max_num_batched_tokens": 64, "max_num_seqs": 8,
            "max_model_len": 512, **config,
        }
    )  # fmt: skip
    pool, tokens = Pool(rng, seq_lens, BLOCK), sum(query_lens)
    compressed = None
    if ratio > 1:
        rows_of = Pool(rng, [s // ratio for s in seq_lens], COMPRESSED_BLOCK // ratio)
        compressed = CompressedCache(
            lab.put(cumla.DSV4_FP8.allocate(rows_of.num_blocks, rows_of.block_size)), lab.put(rows_of.table),
            lab.put(np.ones((1, 512), BF16)), lab.put(np.zeros(1, np.int64)),
            lab.put(select(rng, seq_lens, query_lens, 8)) if ratio == 4 else None,
        )  # fmt: skip
    metadata = DeepseekSparseSWAMetadataBuilder(config, backend=lab.backend).build(
        0, batch_of(lab, seq_lens, query_lens, pool), c128a_block_table=compressed and compressed.block_table
    )
    q, k = (lab.put(rng.standard_normal(shape).astype(BF16)) for shape in ((tokens, 3, 512), (tokens, 512)))
    cache = lab.put(cumla.DSV4_FP8.allocate(pool.num_blocks, BLOCK))
    arguments = {"q": q, "k": k, "swa_cache": cache, "metadata": metadata, "compressed": compressed}
    return SparseMLALayer(ratio, index_topk=8), arguments, pool


@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_prefills_take_memory_of_a_chunk_at_a_time(rng, ratio, monkeypatch):
    """Memory for the rows of a chunk's requests and two numbers per query and head, for any number of prefills."""
    layer, given, _ = step_of(rng, Lab("cpu", False), ratio, [200, 40, 19], [20, 7, 19], prefill_chunk_size=1)
    wanted, shapes, rows, empty = [], [], [], dlpack.empty
    for first, stop, _, longest in given["metadata"].get_prefill_chunk_plan(ratio):
        queries = int(given["metadata"].prefill_query_lens_cpu[first:stop].sum())
        wanted += [(stop - first, longest, 512), (2, queries, 3)]
    assert len(wanted) > 2

    def watched(shape, *more):
        array = empty(shape, *more)
        if len(shape) == 3:
            shapes.append(shape)
        if len(shape) == 3 and shape[2] == 512:
            assert all(reference() is None for reference in rows)  # a chunk's rows are freed before the next chunk's
            rows.append(weakref.ref(array))
        return array

    monkeypatch.setattr(dlpack, "empty", watched)
    layer.step(**given, out=np.zeros_like(given["q"]), prefill_path="rows", backend="cpu")
    assert shapes == wanted


@pytest.mark.nowhere(when=lambda x: x.backend != "cuda")  # host backends have no streams
@pytest.mark.parametrize("bad", [False, True], ids=["right", "refused"])
def test_a_step_on_a_stream_leaves_the_current_one(lab, rng, bad):
    """On any stream, also where the call is refused: CuPy's stack of streams is unchanged."""
    layer, given, _ = step_of(rng, lab, 4, [9, 20], [1, 1])
    stream = lab.xp.cuda.Stream(non_blocking=True)
    lab.xp.cuda.Device().synchronize()
    wrong = {"out": lab.put(np.zeros((2, 3, 511), BF16))} if bad else {}
    with pytest.raises(ValueError, match="out: got shape") if bad else contextlib.nullcontext():
        layer.step(**given, **wrong, stream=stream, backend=lab.backend)
    stream.synchronize()
    with lab.xp.cuda.Stream(non_blocking=True):  # CuPy goes back to the top of its stack at the end of a `with`
        pass
    assert lab.xp.cuda.get_current_stream().ptr == 0


@pytest.mark.parametrize("path", ["pages", "rows"])
def test_raw_pages_of_the_window_are_its_cache(rng, path):
    """Window pages of any size: the metadata has the page size."""
    lab = Lab("cpu", on_device=False)
    layer, arguments, _ = step_of(rng, lab, 4, [150, 40], [1, 19])
    cache = arguments["swa_cache"]
    pages = np.zeros((len(cache), cumla.DSV4_FP8.page_bytes(cache.shape[1])), np.uint8)
    want = layer.step(**arguments, prefill_path=path, backend="cpu")
    got = layer.step(**(arguments | {"swa_cache": pages}), prefill_path=path, backend="cpu")
    np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))


def test_what_a_layer_itself_holds_is_checked_first(rng):
    lab = Lab("cpu", on_device=False)
    _, arguments, _ = step_of(rng, lab, 1, [40], [1])
    with pytest.raises(ValueError, match="attn_sink: got shape"):
        SparseMLALayer(attn_sink=np.zeros(4, np.float32)).step(**arguments, backend="cpu")
    assert not arguments["swa_cache"].any()


def test_c128a_slots_are_for_the_pages_of_the_cache(rng):
    """The builder's page size must be the cache's: otherwise the layer would read rows of other positions."""
    lab = Lab("cpu", on_device=False)
    layer, arguments, _ = step_of(rng, lab, 128, [300, 400], [1, 1])
    _, others, _ = step_of(rng, lab, 128, [300, 400], [1, 1], compressed_block_size=2 * COMPRESSED_BLOCK)
    with pytest.raises(
        ValueError, match=r"compressed.cache: got pages of 1 rows, expected 2: .* compressed_block_size"
    ):
        layer.step(**(arguments | {"metadata": others["metadata"]}), backend="cpu")
    _, without, _ = step_of(rng, lab, 1, [300, 400], [1, 1])
    with pytest.raises(ValueError, match="metadata: got one without C128A layers"):
        layer.step(**(arguments | {"metadata": without["metadata"]}), backend="cpu")
    assert not arguments["swa_cache"].any()

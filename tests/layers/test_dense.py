"""The dense MLA layer against the formula over every token's own K and V, in float64."""

import contextlib
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from cumla.kernels.cuda.launch import recorded_launches
from cumla.layers.dense import BlockQuantizedWeight, MLACommonImpl
from cumla.layers.weights import dequantized
from cumla.metadata import MLACommonMetadataBuilder, MLACommonState, MLAConfig, SequenceGroup
from cumla.metadata.batch import CommonAttentionMetadata
from support.backends import only
from support.batch_kinds import KINDS, padded
from support.bounds import assert_same_direction, assert_within
from support.graphs import graph_of
from support.lab import BF16, Lab, to_float

pytestmark = pytest.mark.attention

HEADS, P, R, L, V = 3, 128, 64, 512, 128
SCALE = 192**-0.5
# The bounds are FlashMLA's, for exact K and V of its tests' size. The layer rounds K and V to 16 bits between
# projection and attention, as every MLA does; with V of that size, 0.1, it still stays within the bounds.
WEIGHT_STD = 0.1 * L**-0.5
BLOCK = 8


class Model:
    """A layer, sequences of random rows in a paged cache, and the expected attention."""

    def __init__(self, lab, rng, seq_lens, query_lens, *, dtype=BF16, kv_cache_dtype="auto", k_scale=None, weight=None):
        self.lab, self.seq_lens, self.query_lens, self.dtype = lab, seq_lens, query_lens, np.dtype(dtype)
        self.k_scale, fp8 = k_scale, kv_cache_dtype != "auto"
        if weight is None:
            weight = (rng.standard_normal((HEADS * (P + V), L)) * WEIGHT_STD).astype(dtype)
        self.impl = MLACommonImpl(
            HEADS, 576, SCALE, kv_cache_dtype=kv_cache_dtype, kv_b_proj=place_weight(lab, weight), backend=lab.backend
        )
        self.impl.process_weights_after_loading(dtype)
        values = dequantized(weight) if isinstance(weight, BlockQuantizedWeight) else weight
        self.weight = to_float(np.asarray(values).astype(dtype)).reshape(HEADS, P + V, L)
        columns = max(-(-max(seq_lens, default=0) // BLOCK), 1)
        order = rng.permutation(len(seq_lens) * columns + 2)
        self.table = order[: len(seq_lens) * columns].reshape(len(seq_lens), columns).astype(np.int32)
        cache = np.full((len(order), BLOCK, 576), 0x7F if fp8 else np.nan, np.uint8 if fp8 else dtype)
        self.rows = [rng.standard_normal((n, L + R)).astype(dtype) for n in seq_lens]
        # Rows of earlier steps in the cache.
        self.cached = [rows.copy() for rows in self.rows]
        for table, rows, cached, new in zip(self.table, self.rows, self.cached, query_lens, strict=True):
            stored = rows
            if fp8:
                stored = (to_float(rows) / k_scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
                cached[:] = (stored.astype(np.float32) * np.float32(k_scale)).astype(dtype)
                stored = stored.view(np.uint8)
            for position in range(len(rows) - new):
                cache[table[position // BLOCK], position % BLOCK] = stored[position]
        self.cache = lab.put(cache)
        self.q = (4 * rng.standard_normal((sum(query_lens), HEADS, P + R))).astype(dtype)
        nothing = np.empty((0, L + R), dtype)
        new = np.concatenate([nothing, *(r[len(r) - n :] for r, n in zip(self.rows, query_lens, strict=True) if n)])
        self.kv_c, self.k_pe = new[:, :L], new[:, L:]

    def batch(self):
        lab, lens = self.lab, np.array(self.seq_lens, np.int32)
        query_lens = np.array(self.query_lens, np.int32)
        starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        positions = [(r, p) for r, (s, q) in enumerate(zip(lens, query_lens, strict=True)) for p in range(s - q, s)]
        slots = np.array([self.table[r, p // BLOCK] * BLOCK + p % BLOCK for r, p in positions], np.int64)
        return CommonAttentionMetadata(
            lab.put(starts), starts, lab.put(lens), lens, lens - query_lens, len(lens), int(starts[-1]),
            int(query_lens.max(initial=0)), lab.put(self.table), lab.put(slots),
        )  # fmt: skip

    def metadata(self, workspace=None, **config):
        config = MLAConfig(
            **{
                "block_size": BLOCK,
                "max_num_batched_tokens": 4096,
                "max_num_seqs": 512,
                "max_model_len": 4096,
                **config,
            }
        )
        builder = MLACommonMetadataBuilder(config, backend=self.lab.backend)
        if workspace is not None:
            builder.context_chunk_workspace_size = workspace
        metadata = builder.build(0, self.batch())
        if metadata.context_chunk_seq_tot:
            rows = self.lab.put(np.full((builder.context_chunk_workspace_size, 576), np.nan, self.dtype))
            metadata.context_chunk_workspace = rows
        return metadata

    def forward(self, metadata, **more):
        put = self.lab.put
        with only(self.lab.backend):
            return self.impl.forward(
                put(self.q.reshape(len(self.q), HEADS * (P + R))), put(self.kv_c), put(self.k_pe), self.cache, metadata,
                k_scale=self.k_scale, **more,
            )  # fmt: skip

    def wanted(self, through_cache):
        """through_cache: for each request, whether its new tokens are read from the cache, as decodes' are."""
        w_uk, w_uv = self.weight[:, :P], self.weight[:, P:]
        out, token = np.zeros((len(self.q), HEADS, V)), 0
        for seq, (n, new) in enumerate(zip(self.seq_lens, self.query_lens, strict=True)):
            rows = to_float(self.cached[seq])
            if not through_cache[seq]:
                rows[n - new :] = to_float(self.rows[seq][n - new :])
            k = np.einsum("nl,hpl->nhp", rows[:, :L], w_uk)
            k = np.concatenate([k, np.repeat(rows[:, None, L:], HEADS, axis=1)], axis=2)
            v = np.einsum("nl,hvl->nhv", rows[:, :L], w_uv)
            for position in range(n - new, n):
                scores = SCALE * np.einsum("hd,nhd->hn", to_float(self.q[token]), k[: position + 1])
                weights = np.exp(scores - scores.max(axis=1, keepdims=True))
                out[token] = np.einsum("hn,nhv->hv", weights / weights.sum(axis=1, keepdims=True), v[: position + 1])
                token += 1
        return out.reshape(len(out), HEADS * V)

    def check(self, metadata, **more):
        out = to_float(self.lab.get(self.forward(metadata, **more)))
        want, n = self.wanted([r < metadata.num_decodes for r in range(len(self.seq_lens))]), metadata.num_decode_tokens
        for name, part, bounds, cosine in (
            ("decode", slice(n), (1e-3, 2.01 / 128), 5e-6),
            ("prefill", slice(n, len(want)), (8e-4, 3.01 / 128), 7e-6),
        ):
            assert_within(name, out[part], want[part], *bounds)
            assert_same_direction(name, out[part], want[part], cosine)
        return out


def place_weight(lab, weight):
    if isinstance(weight, BlockQuantizedWeight):
        return BlockQuantizedWeight(lab.put(weight.weight), lab.put(weight.scale), weight.block)
    return lab.put(weight)


BATCHES = [
    pytest.param([40], [40], id="a-prompt"),
    pytest.param([100], [1], id="a-decode"),
    pytest.param([9, 40, 200, 1], [1, 1, 1, 1], id="decodes"),
    pytest.param([20, 7, 33], [20, 7, 33], id="prompts"),
    pytest.param([60, 80, 33, 200], [20, 80, 3, 64], id="ragged-contexts-and-none"),
    pytest.param([9, 150, 75, 20, 90], [1, 1, 30, 20, 2], id="mixed"),
    pytest.param([3] * 100 + [5] * 120, [1] * 100 + [3, 5] * 60, id="hundreds", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("seq_lens", "query_lens"), BATCHES)
def test_forward(lab, rng, seq_lens, query_lens):
    model = Model(lab, rng, seq_lens, query_lens)
    model.check(model.metadata())


@pytest.mark.parametrize("workspace", [24, 32, 64, 176, 1000])
def test_context_in_chunks(lab, rng, workspace):
    """Contexts of 136, 0, 40 and 1 tokens: in one chunk, in many, and in some whose workspace is exactly full."""
    model = Model(lab, rng, [150, 10, 64, 9], [14, 10, 24, 8])
    metadata = model.metadata(workspace)
    share = workspace // 3 // BLOCK * BLOCK
    assert len(metadata.context_chunk_seq_tot) == -(-136 // share)
    model.check(metadata)


@pytest.mark.parametrize(("seq_lens", "query_lens"), [([50], [1]), ([50, 30], [1, 21])])
def test_k_pe_may_have_an_axis_of_one_head(lab, rng, seq_lens, query_lens):
    model = Model(lab, rng, seq_lens, query_lens)
    want = model.check(model.metadata(32))
    model.k_pe = model.k_pe[:, None]
    np.testing.assert_array_equal(model.check(model.metadata(32)), want)


def test_the_workspace_can_be_exactly_full(lab, rng):
    model = Model(lab, rng, [150, 144], [22, 16])
    metadata = model.metadata(64)
    assert metadata.context_chunk_seq_tot == [64] * 4
    assert len(metadata.context_chunk_workspace) == 64
    model.check(metadata)


@pytest.mark.parametrize(("chunked", "prefix"), [(True, False), (False, True)])
def test_prefix_hits_with_and_without_chunked_prefill(lab, rng, chunked, prefix):
    model = Model(lab, rng, [50, 48, 90], [1, 8, 26])
    model.check(model.metadata(32, chunked_prefill_enabled=chunked, enable_prefix_caching=prefix))


@pytest.fixture
def allocated(monkeypatch):
    """Shapes that the layer allocates from now on."""
    from cumla.arrays import dlpack

    shapes, empty = [], dlpack.empty
    monkeypatch.setattr(dlpack, "empty", lambda shape, *more: shapes.append(shape) or empty(shape, *more))
    return shapes


def test_memory_is_bounded_by_the_workspace(lab, rng, allocated):
    """For any length of context, projections are at most a workspace at a time."""
    model = Model(lab, rng, [700], [4])
    metadata = model.metadata(16)
    ops = Counter()

    def observe(op):
        ops[op] += 1
        return contextlib.nullcontext()

    model.check(metadata, observe=observe)
    chunks = -(-696 // 16)
    assert ops == {
        "insert": 1,
        "prefill": 1,
        "project": chunks + 1,
        "gather": chunks,
        "context": chunks,
    }
    projected = [shape[0] for shape in allocated if shape[1:] == (HEADS, P + V)]
    assert max(projected) == 16


def test_float16(lab, rng):
    model = Model(lab, rng, [9, 150, 75, 20], [1, 1, 30, 20], dtype=np.float16)
    model.check(model.metadata(32, dtype="float16"))


@pytest.mark.parametrize("in_array", [False, True])
def test_fp8_cache(lab, rng, in_array):
    model = Model(lab, rng, [9, 150, 75, 20], [1, 1, 30, 20], kv_cache_dtype="fp8", k_scale=2.0**-6)
    if in_array:
        model.k_scale = lab.put(np.array([2.0**-6], np.float32))
    model.check(model.metadata(32))


def test_decodes_of_several_tokens(lab, rng):
    model = Model(lab, rng, [90, 3, 40, 33], [3, 3, 3, 2])
    metadata = model.metadata(num_speculative_tokens=2)
    assert (metadata.num_decode_tokens, metadata.num_prefill_tokens) == (9, 2)
    model.check(metadata)


@pytest.mark.parametrize("shared", [True, False], ids=["metadata with a plan", "metadata without"])
def test_the_layers_of_a_step_share_a_division(here, rng, shared):
    """Without a plan in the metadata each layer divides; either way the next step divides again."""
    model = Model(here, rng, [250, 9, 200], [1, 1, 1])
    for _ in range(2):
        metadata = model.metadata()
        if not shared:
            metadata = replace(metadata, decode_plan=None)
        with recorded_launches() as launches:
            for _ in range(3):
                model.check(metadata)
        names = [launch.kernel.raw.name for launch in launches]
        assert names.count("plan_dense_decode") == (1 if shared else 3)
        assert names.count("mla_decode_sm90") == 3


def test_decodes_are_of_one_token_unless_the_metadata_say_otherwise(lab, rng):
    model = Model(lab, rng, [90, 3], [1, 1])
    metadata = model.metadata()
    metadata.max_decode_query_len = None
    model.check(metadata)


def test_block_quantised_weight(lab, rng):
    weight = BlockQuantizedWeight(
        rng.standard_normal((HEADS * (P + V), L)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8),
        WEIGHT_STD * rng.uniform(0.5, 1.5, (HEADS * 2, L // 128)).astype(np.float32),
    )
    model = Model(lab, rng, [60, 33], [1, 20], weight=weight)
    model.check(model.metadata())
    np.testing.assert_array_equal(
        dequantized(weight)[130:260:129, 127:129],
        np.array(
            [
                [to_float(weight.weight.view(ml_dtypes.float8_e4m3fn))[r, c] * weight.scale[r // 128, c // 128]
                 for c in (127, 128)] for r in (130, 259)
            ], np.float32,
        ),
    )  # fmt: skip


def test_rows_beyond_the_metadata_are_zero(lab, rng):
    """A captured graph's batch is padded, its metadata may not be."""
    model = Model(lab, rng, [9, 150, 40], [1, 1, 10])
    metadata = model.metadata()
    want = model.check(metadata)
    padding = np.full((5, HEADS, P + R), np.nan, BF16)
    model.q = np.concatenate([model.q, padding])
    output = lab.put(np.full((17, HEADS * V), 7, BF16))
    assert model.forward(metadata, output=output) is output
    got = to_float(lab.get(output))
    np.testing.assert_array_equal(got[:12], want)
    assert not got[12:].any()


@pytest.mark.parametrize(
    ("seq_lens", "query_lens", "drafts"),
    [
        ([9], [1], 0), ([9, 20], [2, 2], 1), ([9, 20, 0], [1, 1, 0], 0), ([9, 20], [2, 1], 1), ([20], [20], 0),
        ([9, 150, 40], [1, 30, 2], 0), ([9, 30, 20], [1, 0, 1], 0), ([9, 30, 20], [2, 0, 2], 1), ([9, 20], [0, 1], 0),
        ([], [], 0),
    ],
)  # fmt: skip
def test_padding_tokens_that_the_batch_counts(lab, rng, seq_lens, query_lens, drafts):
    """Padding is NaN: it is not inserted, and its output rows are 0. Requests without a query may be anywhere."""
    check_padding(lab, rng, seq_lens, query_lens, 3, drafts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thorough(when=lambda x: x.emulated)
def test_every_kind_of_batch(lab, rng, kind):
    kind = KINDS[kind]
    lens = [first + count if count else 0 for _, first, count in kind.scheduled]
    check_padding(lab, rng, lens, list(kind.counts), kind.padding, kind.drafts, 2**-7)


def check_padding(lab, rng, seq_lens, query_lens, padding, drafts, bound=0.0):
    model = Model(lab, rng, seq_lens, query_lens)
    tokens = len(model.q)
    want = model.check(model.metadata(num_speculative_tokens=drafts))
    before, batch = lab.get(model.cache).tobytes(), padded(model.batch(), padding, lab.put, lab.get)
    model.batch = lambda: batch
    for name in ("q", "kv_c", "k_pe"):
        array = getattr(model, name)
        setattr(model, name, np.concatenate([array, np.full((padding, *array.shape[1:]), np.nan, array.dtype)]))
    output = lab.put(np.full((tokens + padding, HEADS * V), 7, BF16))
    got = to_float(lab.get(model.forward(model.metadata(num_speculative_tokens=drafts), output=output)))
    np.testing.assert_allclose(got[:tokens], want, rtol=bound, atol=bound / 10)
    assert not got[tokens:].any()
    assert lab.get(model.cache).tobytes() == before


def test_a_profile_run_has_no_cache(lab, rng):
    model = Model(lab, rng, [20, 7], [20, 7])
    model.cache = model.cache[:0]
    model.check(model.metadata())


def test_a_profile_run_allocates_the_worst_case(lab, rng, allocated):
    """A full workspace of projected rows, sums of all tokens and decodes of all requests, before there is a cache."""
    model = Model(lab, rng, [20, 7], [20, 7])
    model.cache, cache = model.cache[:0], model.cache
    metadata = model.metadata()
    metadata.is_profile_run = True
    metadata.context_chunk_workspace = lab.put(np.zeros((300, 576), BF16))
    model.check(metadata)
    assert {(300, HEADS, P + V), (27, HEADS, V), (HEADS, 27)} <= set(allocated)
    model.cache, model.seq_lens, model.query_lens = cache, [20, 7], [1, 1]
    allocated.clear()
    model.q, model.kv_c, model.k_pe = model.q[:2], model.kv_c[:2], model.k_pe[:2]
    model.forward(model.metadata())
    assert {shape for shape in allocated if len(shape) == 1} <= {(0,)}  # decodes find what they need


@pytest.mark.parametrize("quantised", ["not", "blocks", "a tensor", "rows"])
def test_the_projection_can_be_a_layer(rng, quantised):
    """As an engine has it: an object with a weight, and with scales if that is FP8."""
    rows = HEADS * (P + V)
    weight = rng.standard_normal((rows, L)).astype(np.float32)
    layer, want = SimpleNamespace(weight=weight), weight
    if quantised != "not":
        shape, block = {
            "blocks": ((rows // 128, L // 128), (128, 128)), "a tensor": ((1,), (rows, L)), "rows": ((rows, 1), (1, L)),
        }[quantised]  # fmt: skip
        layer.weight = weight.astype(ml_dtypes.float8_e4m3fn)
        scale = rng.uniform(0.5, 1.5, shape).astype(np.float32)
        setattr(layer, "weight_scale_inv" if quantised == "blocks" else "weight_scale", scale)
        grid = scale.reshape(-(-rows // block[0]), -(-L // block[1]))
        want = layer.weight.astype(np.float32) * grid.repeat(block[0], 0).repeat(block[1], 1)
    impl = MLACommonImpl(HEADS, 576, SCALE, kv_b_proj=layer)
    impl.process_weights_after_loading()
    want = want.astype(BF16).reshape(HEADS, P + V, L)
    np.testing.assert_array_equal(impl.W_UK_T, want[:, :P])
    np.testing.assert_array_equal(impl.W_UV, want[:, P:].transpose(0, 2, 1))


@pytest.mark.gpu
def test_decodes_in_a_captured_graph(rng):
    import cupy

    from support.lab import Lab

    lab = Lab("cuda", on_device=True)
    model = Model(lab, rng, [9, 150, 40], [1, 1, 1])
    config = MLAConfig(block_size=BLOCK, max_num_batched_tokens=64, max_num_seqs=8, max_model_len=256)
    state = MLACommonState(config)
    with state.graph_capture(4, model.cache):
        captured = state.graph_capture_get_metadata_for_batch(4)
    q, kv_c, k_pe = (cupy.zeros((4, *x.shape[1:]), BF16) for x in (model.q, model.kv_c, model.k_pe))
    output = cupy.empty((4, HEADS * V), BF16)
    model.impl.forward(q, kv_c, k_pe, model.cache, captured, output)
    graph = graph_of(lambda: model.impl.forward(q, kv_c, k_pe, model.cache, captured, output))
    for target, source in ((q, model.q), (kv_c, model.kv_c), (k_pe, model.k_pe)):
        target[:3] = cupy.asarray(source)
    metadata = model.metadata()
    state.prepare_graph_input_buffers(state.get_graph_input_buffers(captured), metadata)
    output.view(np.uint16)[:] = 1
    graph.launch()
    cupy.cuda.Device().synchronize()
    got = to_float(output.get())
    assert_within("decode", got[:3], model.wanted([True] * 3), 1e-3, 2.01 / 128)
    assert not got[3].any()


def test_the_state_brings_the_workspace(lab, rng):
    model = Model(lab, rng, [50, 48], [1, 8])
    config = MLAConfig(block_size=BLOCK, max_num_batched_tokens=64, max_num_seqs=8, max_model_len=256)
    metadata = MLACommonMetadataBuilder(config, backend=lab.backend).build(0, model.batch())
    with pytest.raises(ValueError, match="got no context_chunk_workspace"):
        model.forward(metadata)
    MLACommonState(config).begin_forward(SimpleNamespace(input_tokens=model.cache, attn_metadata=metadata))
    model.check(metadata)


def test_sequence_groups_of_an_engine_that_puts_prompts_first(lab, rng):
    model = Model(lab, rng, [9, 40, 150, 20], [1, 1, 30, 20])
    want = model.check(model.metadata())
    order = [2, 3, 0, 1]  # the engine's
    builder = MLACommonMetadataBuilder(
        MLAConfig(block_size=BLOCK, max_num_batched_tokens=64, max_num_seqs=8, max_model_len=256), backend=lab.backend
    )
    for r in order:
        length, query = model.seq_lens[r], model.query_lens[r]
        builder.add_seq_group(
            SequenceGroup(query > 1, [r], [length], [query], [length - query], {r: model.table[r].tolist()})
        )
    metadata, grouped = builder.build_groups(model.cache)
    metadata.context_chunk_workspace = lab.put(np.empty((256, 576), BF16))
    first = np.concatenate([[0], np.cumsum(model.query_lens)])
    to_engine = np.concatenate([np.arange(first[r], first[r + 1]) for r in order])
    engine_q, engine_kv_c, engine_k_pe = (x[to_engine] for x in (model.q, model.kv_c, model.k_pe))
    model.q, model.kv_c, model.k_pe = (x[grouped.token_order] for x in (engine_q, engine_kv_c, engine_k_pe))
    got = np.empty_like(want)
    got[grouped.token_order] = to_float(lab.get(model.forward(metadata)))
    np.testing.assert_array_equal(got, want[to_engine])


def test_weights_are_processed_first(rng):
    model = Model(Lab("cpu", False), rng, [9, 20], [1, 20])
    model.impl = MLACommonImpl(HEADS, 576, SCALE, kv_b_proj=np.zeros((HEADS * (P + V), L), BF16))
    with pytest.raises(ValueError, match="kv_b_proj: not processed"):
        model.forward(model.metadata())

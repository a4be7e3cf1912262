"""Operations and a dense layer in a captured graph that is replayed with fewer rows than it was captured with.

Rows after the real ones may hold anything: NaN, lengths and indices of any value, slots outside of the cache. The
bits of the real rows are those of the captured call, and only the rows' own outputs are written. For
rows that all have a length of 0 nothing is attended to, selected or inserted.
"""

import numpy as np
import pytest

import cumla
from cumla.bounds import FLOAT16_WEIGHTS
from cumla.layers.dense import MLACommonImpl
from cumla.metadata import MLACommonMetadata
from support.attention import make_cache
from support.bounds import assert_decode
from support.graphs import graph_of
from support.guarded import Guarded
from support.indexing import anything
from support.lab import BF16, to_float
from support.operations import assert_same_bits
from support.properties import INT64_MAX, INT64_MIN

ROWS, REAL, HEADS, BLOCK, BLOCKS = 6, 2, 8, 16, 8
SLOTS = BLOCK * BLOCKS


class Captured:
    """A call in a graph, with its own arrays at fixed addresses.

    Args:
        call: is given the arrays by name
        rows: arrays of which each row has one entry
        others: arrays that a call only reads, and whose every element may be read
        out: output arrays with an entry per row: their contents before the call
        caches: arrays of pages that it writes
    """

    def __init__(self, lab, call, rows, others=(), out=(), caches=()):
        self.lab, self.rows, self.out, self.caches = lab, rows, dict(out), dict(caches)
        self.guarded = {
            name: Guarded(lab, x) for name, x in {**rows, **dict(others), **self.out, **self.caches}.items()
        }
        arrays = {name: x.array for name, x in self.guarded.items()}
        self.call = lambda: call(**arrays)
        self.call()  # compiles, allocates
        self.graph = graph_of(self.call)

    def replay(self, rows):
        """Run the graph on these rows: outputs and caches, on the host."""
        import cupy

        for name, x in {**rows, **self.out, **self.caches}.items():
            self.guarded[name].array[...] = self.lab.put(x)
        cupy.cuda.Device().synchronize()
        self.graph.launch(cupy.cuda.get_current_stream())
        cupy.cuda.Device().synchronize()
        for x in self.guarded.values():
            x.assert_margins()
        return {name: np.ascontiguousarray(self.guarded[name].get()) for name in (*self.out, *self.caches)}

    def check(self, rng, same=None):
        """Garbage after the real rows, several times. same(got, want), of outputs by name: None for the same bits."""
        whole = self.replay(self.rows)
        kept = self.replay({name: self.cut(x, without_slots) for name, x in self.rows.items()})
        for _ in range(3):
            got = self.replay({name: self.cut(x, lambda rest: garbage(rng, rest)) for name, x in self.rows.items()})
            got_rows, want_rows = ({name: x[name][:REAL] for name in self.out} for x in (got, whole))
            for name in self.caches:
                assert_same_bits(got[name], kept[name])
            if same is not None:
                same(got_rows, want_rows)
                continue
            for name in self.out:
                assert_same_bits(got_rows[name], want_rows[name])

    @staticmethod
    def cut(x, others):
        """An array of rows with others(rest) for those after the real ones. There may be an entry more than rows."""
        real = REAL + len(x) - ROWS
        return np.concatenate([x[:real], others(x[real:])])

    def check_nothing(self, changes, out=None):
        """With each array of `changes` filled with its value: outputs are those of `out`, and caches are unchanged."""
        got = self.replay({**self.rows, **{name: np.full_like(self.rows[name], x) for name, x in changes.items()}})
        for name, x in (out or {}).items():
            assert_same_bits(got[name], np.full_like(got[name], x))
        for name, before in self.caches.items():
            assert_same_bits(got[name], np.ascontiguousarray(before))


def without_slots(rows):
    return np.full_like(rows, -1) if rows.dtype == np.int64 else rows


def garbage(rng, rows):
    """As many rows of anything: NaN, bytes, any int32. int64 arrays are slots and positions: outside of all caches."""
    if rows.dtype == np.int64:
        return rng.choice(np.array([-1, INT64_MIN, INT64_MAX, 1 << 20, 2**31, -(2**31) - 1]), rows.shape)
    if rows.dtype == np.int32:
        return anything(rng, rows.shape)
    if rows.dtype == np.uint8:
        return rng.integers(0, 256, rows.shape, np.uint8)
    return rng.choice(np.array([np.nan, np.inf, -np.inf, 3e38, 1.0]), rows.shape).astype(rows.dtype)


def lengths(rng, most):
    return rng.integers(1, most + 1, ROWS).astype(np.int32)


def of_normal(rng, *shape, dtype=BF16):
    return rng.standard_normal(shape).astype(dtype)


def ints(rng, end, *shape):
    """int32 from -1 to `end`, which are both nowhere."""
    return rng.integers(-1, end + 1, shape).astype(np.int32)


def e4m3(rng, *shape):
    return rng.integers(0, 0x39, shape, np.uint8)


# ---- attention

NO_ATTENTION = {"out": 0, "lse": np.inf}


def attention_out():
    return {"out": np.full((ROWS, 1, HEADS, 512), 7, BF16), "lse": np.full((ROWS, HEADS, 1), 7, np.float32)}


@pytest.mark.parametrize("layout", ["DSV4_FP8", "V32_FP8", "MLA_BF16"])
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.thorough(when=lambda x: x.get("layout") == "V32_FP8" and not x.get("batch_invariant"))
@pytest.mark.thorough(when=lambda x: x.get("layout") == "MLA_BF16" and x.get("batch_invariant"))
@pytest.mark.thorough(when=lambda x: x.get("layout") == "MLA_BF16")
def test_sparse_decode(device, rng, layout, batch_invariant):
    """Garbage lengths may change how keys of the real rows are split, unless the call is batch-invariant."""
    layout, topk = getattr(cumla, layout), 1300  # so many that they are split
    plan = cumla.DecodePlan(batch_invariant=batch_invariant)
    rows = {
        "q": of_normal(rng, ROWS, 1, HEADS, layout.head_dim),
        "indices": ints(rng, SLOTS, ROWS, 1, topk), "topk_length": lengths(rng, topk),
        "extra_indices": ints(rng, SLOTS, ROWS, 1, 20), "extra_topk_length": lengths(rng, 20),
    }  # fmt: skip
    names = "k_cache", "extra_k_cache"
    caches = {name: np.array(make_cache(rng, layout, BLOCKS, BLOCK, spread=0)) for name in names}

    def call(**arrays):
        cumla.sparse_mla_decode(**arrays, layout=layout, plan=plan, batch_invariant=batch_invariant)

    captured = Captured(device, call, rows, caches, attention_out())
    captured.check(rng, same=None if batch_invariant else are_close_decodes)
    captured.check_nothing({"topk_length": 0, "extra_topk_length": 0}, NO_ATTENTION)


def are_close_decodes(got, want):
    """Where keys are split differently, 16-bit weights of both may be rounded; values are up to 5."""
    rounding = 2 * FLOAT16_WEIGHTS * 5
    assert_decode(to_float(got["out"]), got["lse"], to_float(want["out"]), want["lse"], lambda: rounding)


@pytest.mark.parametrize(("heads", "dim"), [(8, 576), (40, 512)])
def test_sparse_prefill(device, rng, heads, dim):
    rows = {
        "q": of_normal(rng, ROWS, heads, dim), "indices": ints(rng, 200, ROWS, 100), "topk_length": lengths(rng, 100),
    }  # fmt: skip
    out = {"out": np.full((ROWS, heads, 512), 7, BF16)}
    out |= {name: np.full((ROWS, heads), 7, np.float32) for name in ("max_logits", "lse")}

    def call(q, kv, indices, topk_length, out, max_logits, lse):
        cumla.sparse_mla_prefill(q, kv, indices, topk_length=topk_length, out=(out, max_logits, lse))

    captured = Captured(device, call, rows, {"kv": of_normal(rng, 200, dim)}, out)
    captured.check(rng)
    captured.check_nothing({"topk_length": 0}, {**NO_ATTENTION, "max_logits": -np.inf})


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.thorough(when=lambda x: x.get("fp8") and x.get("batch_invariant"))
def test_dense_decode(device, rng, monkeypatch, fp8, batch_invariant):
    """The lengths do not decide how keys are split."""
    rows = {
        "q": of_normal(rng, ROWS, 1, HEADS, 576), "block_table": ints(rng, BLOCKS, ROWS, 20),
        "cache_seqlens": lengths(rng, 20 * BLOCK),
    }  # fmt: skip
    cache = e4m3(rng, BLOCKS, BLOCK, 576) if fp8 else of_normal(rng, BLOCKS, BLOCK, 576)
    plan = cumla.DenseDecodePlan(batch_invariant=batch_invariant)
    monkeypatch.setattr("cumla.kernels.cuda.dense_attention.INVARIANT_PART", 2)  # blocks: keys are split

    def call(**arrays):
        cumla.dense_mla_decode(**arrays, plan=plan, batch_invariant=batch_invariant)

    captured = Captured(device, call, rows, {"k_cache": cache}, attention_out())
    captured.check(rng)
    captured.check_nothing({"cache_seqlens": 0}, NO_ATTENTION)


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")  # because products are emulated
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_products(device, rng, batch_invariant):
    others = {"weight": e4m3(rng, 70, 192), "weight_scale": np.full((1, 2), 0.01, np.float32)}

    def call(**arrays):
        cumla.fp8_block_linear(**arrays, batch_invariant=batch_invariant)

    rows, out = {"x": of_normal(rng, ROWS, 192)}, {"out": np.full((ROWS, 70), 7, BF16)}
    Captured(device, call, rows, others, out).check(rng)


# ---- the indexer


def pages_of_keys(rng):
    cache = np.zeros((BLOCKS, BLOCK, 132), np.uint8)
    keys = of_normal(rng, SLOTS, 128, dtype=np.float32)
    cumla.indexer_k_quant_and_cache(keys, cache, np.arange(SLOTS), backend="reference")
    return cache


def scored(rng, width):
    """q, weights, lengths and block tables of requests, whose context is `width` at most."""
    return {
        "q": e4m3(rng, ROWS, 1, 64, 128), "weights": of_normal(rng, ROWS, 64, dtype=np.float32),
        "context_lens": lengths(rng, width), "block_table": ints(rng, BLOCKS, ROWS, width // BLOCK),
    }  # fmt: skip


def test_scores_of_pages(device, rng):
    def call(**arrays):
        cumla.fp8_paged_mqa_logits(**arrays, clean_logits=True)

    cache, out = {"kv_cache": pages_of_keys(rng)}, {"out": np.full((ROWS, 80), 7, np.float32)}
    captured = Captured(device, call, scored(rng, 80), cache, out)
    captured.check(rng)
    captured.check_nothing({"context_lens": 0}, {"out": -np.inf})


def test_choice_of_pages(device, rng):
    def call(**arrays):
        cumla.indexer_topk(**arrays, topk=20)

    others = {"kv": pages_of_keys(rng), "workspace": np.zeros(ROWS * 80 * 4, np.uint8)}
    captured = Captured(device, call, scored(rng, 80), others, {"out": np.full((ROWS, 20), 7, np.int32)})
    captured.check(rng)
    captured.check_nothing({"context_lens": 0}, {"out": -1})


@pytest.mark.parametrize("choose", [False, True])
def test_packed_keys(device, rng, choose):
    rows = {
        "q": e4m3(rng, ROWS, 64, 128), "weights": of_normal(rng, ROWS, 64, dtype=np.float32),
        "cu_seqlen_ks": ints(rng, 50, ROWS), "cu_seqlen_ke": ints(rng, 130, ROWS),
    }  # fmt: skip
    others = {"k": e4m3(rng, 130, 128), "scales": np.abs(of_normal(rng, 130, dtype=np.float32))}
    out = np.full((ROWS, 20), 7, np.int32) if choose else np.full((ROWS, 130), 7, np.float32)

    def call(k, scales, workspace=None, **arrays):
        if choose:
            cumla.indexer_topk(kv=(k, scales), topk=20, workspace=workspace, **arrays)
        else:
            cumla.fp8_mqa_logits(kv=(k, scales), clean_logits=True, **arrays)

    if choose:
        others["workspace"] = np.zeros(ROWS * 132 * 4, np.uint8)
    captured = Captured(device, call, rows, others, {"out": out})
    captured.check(rng)
    captured.check_nothing({"cu_seqlen_ke": 0}, {"out": -1 if choose else -np.inf})


# ---- inserts into caches


def tokens_of_caches(rng):
    return {"slot_mapping": rng.permutation(SLOTS)[:ROWS], "positions": rng.integers(0, 64, ROWS)}


def test_queries_and_window_rows(device, rng):
    rows = {"q": of_normal(rng, ROWS, HEADS, 512), "kv": of_normal(rng, ROWS, 512), **tokens_of_caches(rng)}
    caches = {"k_cache": np.array(make_cache(rng, cumla.DSV4_FP8, BLOCKS, BLOCK))}
    turns = {"cos_sin_cache": of_normal(rng, 64, 64, dtype=np.float32)}
    out = {"out": np.full((ROWS, HEADS, 512), 7, BF16)}
    captured = Captured(device, cumla.qnorm_rope_and_insert, rows, turns, out, caches)
    captured.check(rng)
    captured.check_nothing({"slot_mapping": -1})


def test_indexer_keys(device, rng):
    rows = {"k": of_normal(rng, ROWS, 128, dtype=np.float32), **tokens_of_caches(rng)}
    others = {name: of_normal(rng, *shape, dtype=np.float32) for name, shape in (
        ("weight", (128,)), ("bias", (128,)), ("cos_sin_cache", (64, 64)))}  # fmt: skip
    caches = {"k_cache": pages_of_keys(rng)}
    captured = Captured(device, cumla.indexer_knorm_rope_and_insert, rows, others, caches=caches)
    captured.check(rng)
    captured.check_nothing({"slot_mapping": -1})


@pytest.mark.parametrize("layout", ["DSV4_FP8", "V32_FP8"])
def test_rows_of_caches(device, rng, layout):
    layout = getattr(cumla, layout)
    rows = {"k": of_normal(rng, ROWS, layout.head_dim), "slot_mapping": tokens_of_caches(rng)["slot_mapping"]}

    def call(**arrays):
        cumla.quantize_and_insert_k_cache(**arrays, block_size=BLOCK, layout=layout)

    caches = {"k_cache": np.array(make_cache(rng, layout, BLOCKS, BLOCK))}
    captured = Captured(device, call, rows, caches=caches)
    captured.check(rng)
    captured.check_nothing({"slot_mapping": -1})


@pytest.mark.parametrize(("ratio", "coff"), [(4, 2), (128, 1)])
def test_compressor(device, rng, ratio, coff):
    """Decodes, each of which completes a row. Requests after the real ones begin and end anywhere."""
    width, state_block = 2 * coff * 512, 8
    table = rng.permutation(ROWS * 2 * ratio // state_block).astype(np.int32).reshape(ROWS, -1)
    rows = {
        "kv_score": of_normal(rng, ROWS, width, dtype=np.float32), "state_block_table": table,
        "state_slot_mapping": rng.permutation(SLOTS)[:ROWS], "slot_mapping": rng.permutation(SLOTS)[:ROWS],
        "positions": np.full(ROWS, 2 * ratio - 1), "token_to_req_indices": np.arange(ROWS, dtype=np.int32),
        "query_start_loc": np.arange(ROWS + 1, dtype=np.int32),
    }  # fmt: skip
    shapes = {"position_bias": (ratio, coff * 512), "norm_weight": (512,), "cos_sin_cache": (2 * ratio, 64)}
    caches = {
        "k_cache": np.array(make_cache(rng, cumla.DSV4_FP8, BLOCKS, BLOCK)),
        "state_cache": of_normal(rng, max(table.size, SLOTS // state_block), state_block, width, dtype=np.float32),
    }  # fmt: skip
    # Nothing is saved where a window's states are read: outside of the tables' pages.
    rows["state_slot_mapping"] += table.size * state_block
    caches["state_cache"] = np.concatenate([caches["state_cache"]] * 2)

    def call(**arrays):
        cumla.compress_and_insert(**arrays, compress_ratio=ratio)

    others = {name: of_normal(rng, *shape, dtype=np.float32) for name, shape in shapes.items()}
    captured = Captured(device, call, rows, others, caches=caches)
    captured.check(rng)
    captured.check_nothing({"slot_mapping": -1, "state_slot_mapping": -1})


# ---- a dense layer

COLUMNS = 4
PAGES = ROWS * COLUMNS


def rows_of(rng):
    """A step: a token of each request at its end."""
    lens = rng.integers(1, BLOCK * COLUMNS + 1, ROWS).astype(np.int32)
    table = rng.permutation(PAGES).astype(np.int32).reshape(ROWS, COLUMNS)
    slots = table[np.arange(ROWS), (lens - 1) // BLOCK].astype(np.int64) * BLOCK + (lens - 1) % BLOCK
    shapes = {"q": (HEADS, 192), "kv_c": (512,), "k_pe": (64,)}
    values = {name: rng.standard_normal((ROWS, *shape)).astype(BF16) for name, shape in shapes.items()}
    return {"lens": lens, "table": table, "slots": slots, **values}


def garbage_behind(rng, rows, real):
    """NaN and infinities, lengths and pages of any value, slots outside of the cache."""
    rows = {name: x.copy() for name, x in rows.items()}
    rest = ROWS - real
    rows["lens"][real:], rows["table"][real:] = anything(rng, rest), anything(rng, (rest, COLUMNS))
    rows["slots"][real:] = rng.choice(np.array([-1, INT64_MIN, INT64_MAX, PAGES * BLOCK, 2**31]), rest)
    for name in ("q", "kv_c", "k_pe"):
        rows[name][real:] = rng.choice([np.nan, np.inf, -np.inf, 3e38], rows[name][real:].shape).astype(BF16)
    return rows


class CapturedDecodes:
    """A step of a dense layer in a graph; rows, cache and output have fixed addresses."""

    def __init__(self, lab, rng, rows):
        self.lab, put = lab, lab.put
        weight = (rng.standard_normal((HEADS * 256, 512)) * 512**-0.5).astype(BF16)
        self.layer = layer = MLACommonImpl(
            HEADS, 576, 192**-0.5, kv_b_proj=put(weight)
        )  # kept: the graph has its memory
        layer.process_weights_after_loading()
        self.before = rng.standard_normal((PAGES, BLOCK, 576)).astype(BF16)
        self.arrays = {name: put(x) for name, x in rows.items()}
        self.cache, self.output = put(self.before), put(np.zeros((ROWS, HEADS * 128), BF16))
        metadata = MLACommonMetadata(
            num_prefills=0, num_prefill_tokens=0, num_decodes=ROWS, num_decode_tokens=ROWS,
            slot_mapping=self.arrays["slots"], seq_lens=None, seq_lens_tensor=self.arrays["lens"],
            max_prefill_seq_len=0, max_decode_seq_len=BLOCK * COLUMNS, context_lens_tensor=None,
            block_tables=self.arrays["table"], max_query_len=1, max_decode_query_len=1,
        )  # fmt: skip

        def step():
            q, kv_c, k_pe = (self.arrays[name] for name in ("q", "kv_c", "k_pe"))
            layer.forward(q, kv_c, k_pe, self.cache, metadata, self.output)

        step()
        self.graph = graph_of(step)

    def replay(self, rows):
        """Output and cache after a step of these rows, from the same initial cache every time."""
        import cupy

        for name, x in rows.items():
            self.arrays[name][...] = self.lab.put(x)
        self.cache[...] = self.lab.put(self.before)
        cupy.cuda.Device().synchronize()
        self.graph.launch(cupy.cuda.get_current_stream())
        cupy.cuda.Device().synchronize()
        return self.lab.get(self.output), self.lab.get(self.cache)


@pytest.mark.filterwarnings("ignore:invalid value")  # because products are emulated
def test_a_dense_layer(device, rng):
    rows = rows_of(rng)
    decodes = CapturedDecodes(device, rng, rows)
    whole, _ = decodes.replay(rows)
    assert np.isfinite(whole.astype(np.float32)).all()
    for real in (1, 3, 0, ROWS - 1):
        kept = decodes.before.copy()
        _, alone = decodes.replay({**rows, "slots": np.where(np.arange(ROWS) < real, rows["slots"], -1)})
        changed = (alone != kept).any(axis=2).sum()
        assert changed == real  # rows of the cache
        out, cache = decodes.replay(garbage_behind(rng, rows, real))
        assert_same_bits(out[:real], whole[:real])
        assert_same_bits(cache, alone)


def test_lengths_of_nothing_in_a_dense_layer(device, rng):
    rows = rows_of(rng)
    decodes = CapturedDecodes(device, rng, rows)
    out, cache = decodes.replay({**rows, "lens": np.zeros(ROWS, np.int32), "slots": np.full(ROWS, -1)})
    assert not out.astype(np.float32).any()
    assert_same_bits(cache, decodes.before)

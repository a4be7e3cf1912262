"""Dense attention: packed sequences and paged MLA rows, against the plain formula in float64."""

import numpy as np
import pytest

import cumla
from cumla.dispatch.launch_cache import launch_cached
from cumla.kernels.cuda import dense_attention, launch, tma
from cumla.kernels.cuda.device import assumed
from cumla.kernels.types.segments import Pages
from support.bounds import assert_decode, assert_dense_prefill
from support.lab import BF16, to_float
from support.properties import INT32_MAX, INT32_MIN

pytestmark = pytest.mark.attention

# Values as in FlashMLA's tests, the source of the bounds: small V, and matching q.
KV_STD = 0.1


def formula(q, k, v, scale, causal):
    """q [m, h, d], k [n, h, d], v [n, h, d_v] in float64 -> out [m, h, d_v], lse [h, m]."""
    out, lse = np.zeros((*q.shape[:2], v.shape[2])), np.full((q.shape[1], len(q)), np.inf)
    for i in range(len(q)):
        n = len(k) - (len(q) - 1 - i) if causal else len(k)
        if n <= 0:
            continue
        scores = scale * np.einsum("hd,nhd->hn", q[i], k[:n])
        lse[:, i] = np.logaddexp.reduce(scores, axis=1)
        out[i] = np.einsum("hn,nhd->hd", np.exp(scores - lse[:, i, None]), v[:n])
    return out, lse


LENGTHS = [
    pytest.param([1], [1], id="one"),
    pytest.param([65], [65], id="square"),
    pytest.param([3, 0, 130, 1, 17], [200, 5, 131, 1, 0], id="ragged"),
    pytest.param([40, 9], [7, 3], id="fewer-keys-than-queries"),
    pytest.param([300], [140], id="several-tiles"),
    pytest.param([2] * 150, [3, 0, 9] * 50, id="hundreds"),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("q_lens", "k_lens"), LENGTHS)
@pytest.mark.parametrize("dtype", [BF16, np.float16])
@pytest.mark.thorough(when=lambda x: x.emulated and x.get("dtype") is np.float16 and x.get("causal"))
@pytest.mark.thorough(when=lambda x: x.emulated and len(x.get("q_lens")) > 100 and not x.get("causal"))
def test_mha_varlen(lab, rng, q_lens, k_lens, causal, dtype):
    heads, scale = 3, 0.11
    q = (6 * rng.standard_normal((sum(q_lens), heads, 192))).astype(dtype)
    kv = (KV_STD * rng.standard_normal((sum(k_lens), heads, 256))).astype(dtype)
    k_pe = (KV_STD * rng.standard_normal((sum(k_lens), 64))).astype(dtype)
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(lens)]).astype(np.int32) for lens in (q_lens, k_lens))
    device_kv = lab.put(kv)
    out, lse = cumla.mha_varlen(
        lab.put(q), device_kv[..., :128], device_kv[..., 128:], lab.put(cu_q), lab.put(cu_k), k_pe=lab.put(k_pe),
        softmax_scale=scale, causal=causal, backend=lab.backend,
    )  # fmt: skip
    assert out.dtype == dtype
    want_out, want_lse = np.zeros((len(q), heads, 128)), np.zeros((heads, len(q)))
    k = np.concatenate([kv[..., :128], np.repeat(k_pe[:, None], heads, axis=1)], axis=2)
    for r in range(len(q_lens)):
        queries, keys = slice(cu_q[r], cu_q[r + 1]), slice(cu_k[r], cu_k[r + 1])
        want_out[queries], want_lse[:, queries] = formula(
            to_float(q[queries]), to_float(k[keys]), to_float(kv[keys, :, 128:]), scale, causal
        )
    assert_dense_prefill(lab.get(out), lab.get(lse), want_out, want_lse)


@pytest.mark.parametrize(("head_dim", "v_dim"), [(192, 128), (128, 128), (64, 64), (256, 256), (16, 48)])
def test_mha_varlen_head_dims_without_rope_part(lab, rng, head_dim, v_dim):
    q, k = (rng.standard_normal((70, 2, head_dim)).astype(BF16) for _ in range(2))
    v = (KV_STD * rng.standard_normal((70, 2, v_dim))).astype(BF16)
    cu = lab.put(np.array([0, 70], np.int32))
    out, lse = cumla.mha_varlen(lab.put(q), lab.put(k), lab.put(v), cu, cu, causal=True, backend=lab.backend)
    want = formula(*map(to_float, (q, k, v)), head_dim**-0.5, True)
    assert_dense_prefill(lab.get(out), lab.get(lse), *want)


def test_mha_varlen_large_scores(lab, rng):
    """A running maximum that keeps rising, and weights of one key only."""
    q = (20 * rng.standard_normal((130, 1, 192))).astype(BF16)
    k = (np.linspace(0.1, 20, 400)[:, None, None] * rng.standard_normal((400, 1, 192))).astype(BF16)
    v = (KV_STD * rng.standard_normal((400, 1, 128))).astype(BF16)
    cu_q, cu_k = lab.put(np.array([0, 130], np.int32)), lab.put(np.array([0, 400], np.int32))
    out, lse = cumla.mha_varlen(lab.put(q), lab.put(k), lab.put(v), cu_q, cu_k, causal=True, backend=lab.backend)
    want_out, want_lse = formula(*map(to_float, (q, k, v)), 192**-0.5, True)
    assert_dense_prefill(lab.get(out), lab.get(lse), want_out, want_lse)


PARTS = [([0, 5, 200, 1, 0], True), ([3, 0, 130, 0, 0], False), ([0, 0, 0, 0, 0], False), ([129, 0, 1, 64, 0], False)]


@pytest.mark.parametrize("head_dims", [(192, 64, 128), (64, 0, 48)])
@pytest.mark.parametrize("dtype", [BF16, np.float16])
def test_mha_varlen_onto_attention_over_other_keys(lab, rng, head_dims, dtype):
    """New tokens, then chunks of context, for some sequences only, and for none."""
    (d, rope, d_v), heads, q_lens = head_dims, 2, [4, 5, 150, 1, 3]
    q = (6 * rng.standard_normal((sum(q_lens), heads, d))).astype(dtype)
    cu_q = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    out, lse = (
        lab.put(np.full((len(q), heads, d_v), np.nan, np.float32)),
        lab.put(np.zeros((heads, len(q)), np.float32)),
    )
    weights, sums = np.zeros((heads, len(q))), np.zeros((heads, len(q), d_v))
    for k_lens, causal in PARTS:
        n = sum(k_lens)
        k, v, k_pe = (
            (KV_STD * rng.standard_normal(s)).astype(dtype) for s in ((n, heads, d - rope), (n, heads, d_v), (n, rope))
        )
        cu_k = np.concatenate([[0], np.cumsum(k_lens)]).astype(np.int32)
        before = lab.get(out).copy(), lab.get(lse).copy()
        got = cumla.mha_varlen(
            *map(lab.put, (q, k, v, cu_q, cu_k)), k_pe=lab.put(k_pe) if rope else None, softmax_scale=0.11,
            causal=causal, accumulate=not causal, out=out, lse=lse, backend=lab.backend,
        )  # fmt: skip
        assert got[0] is out
        assert got[1] is lse
        keys = np.concatenate([k, np.repeat(k_pe[:, None], heads, axis=1)], axis=2)
        for i in range(len(q_lens)):
            rows, seen = slice(*cu_q[i : i + 2]), slice(*cu_k[i : i + 2])
            part, part_lse = formula(*map(to_float, (q[rows], keys[seen], v[seen])), 0.11, causal)
            part_weights = np.where(np.isinf(part_lse), 0, np.exp(part_lse))
            weights[:, rows] += part_weights
            sums[:, rows] += part_weights[..., None] * part.transpose(1, 0, 2)
            if not causal and not k_lens[i]:
                np.testing.assert_array_equal(lab.get(out)[rows], before[0][rows])
                np.testing.assert_array_equal(lab.get(lse)[:, rows], before[1][:, rows])
    empty = weights == 0
    total = np.where(empty, 1, weights)
    want_lse = np.where(empty, np.inf, np.log(total))
    assert_dense_prefill(lab.get(out), lab.get(lse), (sums / total[..., None]).transpose(1, 0, 2), want_lse)


def test_mha_varlen_leaves_other_rows(lab, rng):
    q, k, v = ((rng.standard_normal((20, 2, d)) * std).astype(BF16) for d, std in ((192, 1), (192, 1), (128, KV_STD)))
    out, lse = lab.put(np.full((20, 2, 128), 7, BF16)), lab.put(np.full((2, 20), 7, np.float32))
    cu_q, cu_k = lab.put(np.array([4, 9, 15], np.int32)), lab.put(np.array([2, 10, 18], np.int32))
    cumla.mha_varlen(lab.put(q), lab.put(k), lab.put(v), cu_q, cu_k, out=out, lse=lse, backend=lab.backend)
    out, lse = to_float(lab.get(out)), lab.get(lse)
    for rows, keys in ((slice(4, 9), slice(2, 10)), (slice(9, 15), slice(10, 18))):
        want = formula(*map(to_float, (q[rows], k[keys], v[keys])), 192**-0.5, False)
        assert_dense_prefill(out[rows], lse[:, rows], *want)
    assert (out[[0, 1, 2, 3, 15, 19]] == 7).all()
    assert (lse[:, [0, 3, 15, 19]] == 7).all()


@pytest.mark.parametrize(
    "cu_seqlens", [[INT32_MIN, 5, INT32_MAX], [-3, 30, 99], [9, 4, 40], [INT32_MAX, 0, INT32_MIN], [0, 0, 0]]
)
def test_mha_varlen_bounds_are_kept(lab, rng, cu_seqlens):
    """Sequences that extend past the arrays are truncated."""
    q, k, v = (rng.standard_normal((20, 1, d)).astype(BF16) for d in (64, 64, 64))
    out, lse = lab.put(np.zeros((20, 1, 64), BF16)), lab.put(np.zeros((1, 20), np.float32))
    cu = lab.put(np.array(cu_seqlens, np.int32))
    cumla.mha_varlen(lab.put(q), lab.put(k), lab.put(v), cu, cu, out=out, lse=lse, backend=lab.backend)
    assert np.isfinite(to_float(lab.get(out))).all()


class Paged:
    """Rows of requests in randomly placed pages, NaN everywhere else."""

    def __init__(self, rng, lens, block_size, dtype=BF16, columns=None, page_pad=0, scale=None):
        columns = columns or max(-(-max(lens, default=1) // block_size), 1)
        blocks = len(lens) * columns + 2
        self.table = rng.permutation(blocks)[: len(lens) * columns].reshape(len(lens), columns).astype(np.int32)
        self.rows = [(KV_STD * rng.standard_normal((n, 576))).astype(np.float32) for n in lens]
        cache_dtype = np.uint8 if scale is not None else np.dtype(dtype)
        pool = np.full((blocks, block_size * 576 + page_pad), 0x7F if scale is not None else np.nan, cache_dtype)
        self.cache = pool[:, : block_size * 576].reshape(blocks, block_size, 576)
        self.values = []
        for table, rows in zip(self.table, self.rows, strict=True):
            stored = rows.astype(dtype) if scale is None else quantized(rows / np.float32(scale))
            for position, row in enumerate(stored):
                self.cache[table[position // block_size], position % block_size] = row
            self.values.append(to_float(stored) if scale is None else dequantized(stored) * scale)


def quantized(values):
    import ml_dtypes

    return values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def dequantized(stored):
    import ml_dtypes

    return to_float(stored.view(ml_dtypes.float8_e4m3fn))


def want_decode(q, values, scale, causal=True):
    outs, lses = [], []
    for query, rows in zip(q, values, strict=True):
        parts = []
        for i in range(len(query)):
            n = len(rows) - (len(query) - 1 - i if causal else 0)
            shared = np.repeat(rows[: max(n, 0), None], q.shape[2], axis=1)
            parts.append(formula(to_float(query[i : i + 1]), shared, shared[..., :512], scale, False))
        outs.append(np.concatenate([out for out, _ in parts]))
        lses.append(np.concatenate([lse for _, lse in parts], axis=1))
    return np.array(outs), np.array(lses)


@pytest.mark.parametrize(
    ("lens", "block_size"),
    [
        pytest.param([1], 64, id="one-token"),
        pytest.param([200, 64, 1, 0, 65], 64, id="ragged"),
        pytest.param([77, 130], 13, id="odd-pages"),
        pytest.param([40], 1, id="pages-of-one"),
        pytest.param([1500], 256, id="long"),
        pytest.param([5] * 40, 16, id="many"),
    ],
)
@pytest.mark.parametrize("heads", [1, 16, 100])
def test_dense_mla_decode(lab, rng, lens, block_size, heads):
    if lab.backend == "reference" and heads == 100:
        heads = 65
    paged = Paged(rng, lens, block_size)
    q = (5 * rng.standard_normal((len(lens), 1, heads, 576))).astype(BF16)
    out, lse = cumla.dense_mla_decode(
        lab.put(q), lab.put(paged.cache), lab.put(paged.table), lab.put(np.array(lens, np.int32)),
        softmax_scale=0.08, backend=lab.backend,
    )  # fmt: skip
    assert_decode(lab.get(out), lab.get(lse), *want_decode(q, paged.values, 0.08))


@pytest.mark.parametrize("scale", [1e8, 1e30])
def test_logits_of_which_the_highest_is_all(lab, rng, scale):
    """Logits are so large that a rounded and an exact product differ by more than any exponent."""
    lens = [90, 1, 300]
    paged = Paged(rng, lens, 16)
    q = (5 * rng.standard_normal((3, 1, 20, 576))).astype(BF16)
    out, lse = cumla.dense_mla_decode(
        lab.put(q), lab.put(paged.cache), lab.put(paged.table), lab.put(np.array(lens, np.int32)), softmax_scale=scale,
        backend=lab.backend,
    )  # fmt: skip
    want_out, want_lse = want_decode(q, paged.values, scale)
    assert_decode(lab.get(out), lab.get(lse) / scale, want_out, want_lse / scale)
    for d, d_v in ((192, 128), (64, 64)):
        q, k, v = (rng.standard_normal((70, 2, size)).astype(BF16) for size in (d, d, d_v))
        cu = lab.put(np.array([0, 70], np.int32))
        out, lse = cumla.mha_varlen(
            *map(lab.put, (q, k, v)), cu, cu, causal=True, softmax_scale=scale, backend=lab.backend
        )  # fmt: skip
        want_out, want_lse = formula(*map(to_float, (q, k, v)), scale, True)
        assert_dense_prefill(lab.get(out), lab.get(lse) / scale, want_out, want_lse / scale)


@pytest.mark.parametrize("causal", [False, True])
def test_several_queries_of_a_request(lab, rng, causal):
    lens = [90, 3, 2, 300]
    paged = Paged(rng, lens, 16)
    q = (5 * rng.standard_normal((4, 3, 20, 576))).astype(BF16)
    out, lse = cumla.dense_mla_decode(
        lab.put(q), lab.put(paged.cache), lab.put(paged.table), lab.put(np.array(lens, np.int32)), causal=causal,
        softmax_scale=0.05, backend=lab.backend,
    )  # fmt: skip
    assert_decode(lab.get(out), lab.get(lse), *want_decode(q, paged.values, 0.05, causal))


@pytest.mark.parametrize("page_pad", [0, 576, 40])
def test_caches_of_other_types_and_strides(lab, rng, page_pad):
    lens, device_scale = [100, 64, 7], np.array([0.003], np.float32)
    arrays = [lab.put(np.array(lens, np.int32))]
    for dtype, scale in ((np.float16, None), (BF16, 0.003), (np.float16, device_scale)):
        paged = Paged(rng, lens, 32, dtype, page_pad=page_pad, scale=None if scale is None else np.float32(0.003))
        q = (5 * rng.standard_normal((3, 1, 24, 576))).astype(dtype)
        given = lab.put(scale) if isinstance(scale, np.ndarray) else scale
        out, lse = cumla.dense_mla_decode(
            lab.put(q), lab.put(paged.cache), lab.put(paged.table), *arrays, scale=given, softmax_scale=0.06,
            max_seqlen=100, backend=lab.backend,
        )  # fmt: skip
        assert out.dtype == dtype
        assert_decode(lab.get(out), lab.get(lse), *want_decode(q, paged.values, 0.06))


@pytest.mark.parametrize("capability", [80, 86, 89, 100])
@pytest.mark.parametrize("block_size", [13, 64])
@pytest.mark.parametrize("stored", ["bfloat16", "float16", "e4m3"])
@pytest.mark.thorough(when=lambda x: x.get("capability") in (89, 100) or x.get("block_size") == 13)
@pytest.mark.nowhere(when=lambda x: not x.device and (
    # 86 and 89 have equal shared memory
    (x.get("stored") == "e4m3") != (x.get("capability") == 89) if x.get("capability") in (86, 89)
    else x.get("block_size") == 13 and (x.get("stored") == "e4m3") != (x.get("capability") == 80)
))  # fmt: skip
def test_kernels_of_other_devices(device, rng, capability, block_size, stored):
    """The portable kernel within the shared memory of these devices. A repeated call gives the same bits."""
    lens, lab, dtype = [100, 0, 2, 129, 520], device, np.float16 if stored == "float16" else BF16
    scale = np.float32(0.003) if stored == "e4m3" else None
    paged = Paged(rng, lens, block_size, dtype, scale=scale)
    q = (5 * rng.standard_normal((len(lens), 2, 70, 576))).astype(dtype)
    given = [lab.put(x) for x in (q, paged.cache, paged.table, np.array(lens, np.int32))]
    with assumed(capability), launch.recorded_launches():
        first, again = (
            [lab.get(x) for x in cumla.dense_mla_decode(*given, scale=scale, softmax_scale=0.05, backend="cuda")]
            for _ in range(2)
        )
    assert_decode(*first, *want_decode(q, paged.values, 0.05))
    for x, y in zip(first, again, strict=True):
        np.testing.assert_array_equal(to_float(x), to_float(y))


def test_absent_pages_are_left_out(lab, rng):
    lens = [100, 100, 100, 70]
    paged = Paged(rng, lens, 16)
    table = paged.table.copy()
    table[0, 2], table[1, 0], table[1, 1], table[2] = -1, INT32_MAX, len(paged.cache), INT32_MIN
    kept = [
        np.concatenate([paged.values[0][:32], paged.values[0][48:]]), paged.values[1][32:], paged.values[2][:0],
        paged.values[3],
    ]  # fmt: skip
    q = (5 * rng.standard_normal((4, 1, 8, 576))).astype(BF16)
    device_lens = lab.put(np.array([*lens[:3], 70], np.int32))
    out, lse = cumla.dense_mla_decode(
        lab.put(q), lab.put(paged.cache), lab.put(table), device_lens, softmax_scale=0.05, backend=lab.backend
    )
    assert_decode(lab.get(out), lab.get(lse), *want_decode(q, kept, 0.05))


@pytest.mark.parametrize("page_pad", [0, 104])
@pytest.mark.parametrize("block_size", [1, 8, 16, 24, 32, 48, 53, 64, 128, 192])
@pytest.mark.thorough(when=lambda x: (x.get("block_size") in (1, 16, 32, 64, 192)) != (x.get("page_pad") == 0))
@pytest.mark.thorough(when=lambda x: not x.emulated and x.get("block_size") not in (1, 53, 128))
def test_pages_of_every_size(lab, rng, block_size, page_pad):
    """Blocks with all or some rows present, in several pages or a part of one; unused rows are NaN."""
    lens = [320, 200, 448, 64, 0]
    paged = Paged(rng, lens, block_size, columns=-(-448 // block_size) + 1, page_pad=page_pad)
    table, kept = paged.table.copy(), list(paged.values)
    page = 130 // block_size
    table[2, page] = -1
    kept[2] = np.delete(kept[2], np.s_[page * block_size : (page + 1) * block_size], axis=0)
    q = (5 * rng.standard_normal((5, 1, 70, 576))).astype(BF16)
    out, lse = cumla.dense_mla_decode(
        lab.put(q), lab.put(paged.cache), lab.put(table), lab.put(np.array(lens, np.int32)), softmax_scale=0.05,
        backend=lab.backend,
    )  # fmt: skip
    assert_decode(lab.get(out), lab.get(lse), *want_decode(q, kept, 0.05))


@pytest.mark.parametrize("splits", [1, 2, 3, 4, 5, 8, 9, 25, 64, 100, 200])
@pytest.mark.thorough(when=lambda x: x.get("splits") in (2, 3, 5, 64))
def test_any_number_of_splits(device, rng, monkeypatch, splits):
    """Includes splits without keys, and requests that have only such splits."""
    monkeypatch.setattr(dense_attention, "range_count", lambda *_: splits)
    lab, lens = device, [1600, 65, 0]
    paged = Paged(rng, lens, 64)
    q = (5 * rng.standard_normal((3, 1, 3, 576))).astype(BF16)
    out, lse = cumla.dense_mla_decode(
        lab.put(q), lab.put(paged.cache), lab.put(paged.table), lab.put(np.array(lens, np.int32)), softmax_scale=0.05,
        backend=lab.backend,
    )  # fmt: skip
    assert_decode(lab.get(out), lab.get(lse), *want_decode(q, paged.values, 0.05))


def test_the_same_call_with_another_cache(device, rng, monkeypatch):
    """Also replayed from the launch cache, whose arguments contain the cache's address more than once."""
    again = launch_cached(cumla.dense_mla_decode)
    q = (5 * rng.standard_normal((3, 1, 20, 576))).astype(BF16)
    lab, lens = device, [64, 60, 40]
    calls = [Paged(rng, lens, 32) for _ in range(3)]
    device_q, device_lens = lab.put(q), lab.put(np.array(lens, np.int32))
    arrays = [(lab.put(x.cache), lab.put(x.table)) for x in calls]
    for number in (0, 1, 0, 2, 1):
        for function in (cumla.dense_mla_decode, again):
            out, lse = function(
                device_q, *arrays[number], device_lens, softmax_scale=0.05, max_seqlen=64, backend=lab.backend
            )
            assert_decode(lab.get(out), lab.get(lse), *want_decode(q, calls[number].values, 0.05))
        with monkeypatch.context() as patched:
            patched.setattr(dense_attention, "dense_mla_decode", None)  # the launch cache has the call
            again(device_q, *arrays[2], device_lens, softmax_scale=0.05, max_seqlen=64, backend=lab.backend)


class TestBoxes:
    """Pages by the tensor memory accelerator."""

    def test_rows(self):
        sizes = {1: 0, 4: 0, 8: 8, 16: 16, 24: 8, 32: 32, 48: 16, 53: 0, 64: 64, 96: 32, 128: 64, 192: 64}
        assert {size: tma.box_rows(64, size) for size in sizes} == sizes

    def pages(self, lab, block_size=64, blocks=3, pad=0):
        pool = lab.put(np.zeros((blocks, block_size * 1152 + pad), np.uint8))
        return Pages(pool[:, : block_size * 1152], block_size, cumla.MLA_BF16)

    def test_maps(self, device):
        """The driver encodes them; their first word, and no other, is the address."""
        tma.checked_map.cache_clear()
        for pages, rows in (
            (self.pages(device), 64), (self.pages(device, 48), 16), (self.pages(device, pad=16), 64),
            (self.pages(device, blocks=1), 64), (self.pages(device, 53), 0), (self.pages(device, pad=8), 0),
            (self.pages(device, blocks=0), 0),
        ):  # fmt: skip
            found, words = dense_attention.boxes_of(pages, 64)
            assert found == rows
            assert len(words) == tma.MAP_WORDS
            assert words[0] == (pages.bytes.data.ptr if rows else 0)

    def test_a_map_that_holds_an_address_elsewhere(self, device, rng, monkeypatch):
        """Such a map is not used, and rows are copied one by one."""
        monkeypatch.setattr(tma, "encoded", lambda address, *sizes: (address, address, *tma.NO_MAP[2:]))
        tma.checked_map.cache_clear()
        test_dense_mla_decode(device, rng, [200, 64, 1, 0, 65], 64, 16)
        tma.checked_map.cache_clear()


def test_lengths_beyond_the_table_and_below_zero(lab, rng):
    paged = Paged(rng, [48, 48, 48], 16)
    lens = lab.put(np.array([INT32_MAX, -5, INT32_MIN], np.int32))
    q = (5 * rng.standard_normal((3, 1, 4, 576))).astype(BF16)
    out, lse = cumla.dense_mla_decode(
        lab.put(q), lab.put(paged.cache), lab.put(paged.table), lens, softmax_scale=0.05, backend=lab.backend
    )
    kept = [paged.values[0], paged.values[1][:0], paged.values[2][:0]]
    assert_decode(lab.get(out), lab.get(lse), *want_decode(q, kept, 0.05))


def test_what_queries_see_is_inferred_from_the_length_whatever_the_table_holds(lab, rng):
    """If a request is longer than its table, the last queries see the whole table, the first queries less."""
    paged = Paged(rng, [48, 48], 16)
    lens = [50, 52]
    q = (5 * rng.standard_normal((2, 4, 3, 576))).astype(BF16)
    out, lse = cumla.dense_mla_decode(
        lab.put(q), lab.put(paged.cache), lab.put(paged.table), lab.put(np.array(lens, np.int32)), causal=True,
        softmax_scale=0.05, backend=lab.backend,
    )  # fmt: skip
    for b, length in enumerate(lens):
        for i in range(4):
            seen = [paged.values[b][: length - 3 + i]]
            want, want_lse = want_decode(q[b : b + 1, i : i + 1], seen, 0.05)
            assert_decode(lab.get(out)[b : b + 1, i : i + 1], lab.get(lse)[b : b + 1, :, i : i + 1], want, want_lse)


@pytest.mark.gpu
def test_work_is_split_the_same_way_twice(rng):
    import cupy

    paged = Paged(rng, [3000, 17, 900], 64)
    q = cupy.asarray((5 * rng.standard_normal((3, 1, 128, 576))).astype(BF16))
    arrays = [cupy.asarray(x) for x in (paged.cache, paged.table, np.array([3000, 17, 900], np.int32))]
    first = [x.get() for x in cumla.dense_mla_decode(q, *arrays, softmax_scale=0.05)]
    for bound in (None, 3000, 64):
        again = [x.get() for x in cumla.dense_mla_decode(q, *arrays, softmax_scale=0.05, max_seqlen=bound)]
        assert_decode(*again, *want_decode(q.get(), paged.values, 0.05))
    again = [x.get() for x in cumla.dense_mla_decode(q, *arrays, softmax_scale=0.05)]
    for x, y in zip(first, again, strict=True):
        np.testing.assert_array_equal(x.view(np.uint8), y.view(np.uint8))


@pytest.mark.gpu
def test_decode_in_a_captured_graph(rng):
    import cupy

    lens = [3000, 17, 900]
    paged = Paged(rng, lens, 64)
    q = cupy.asarray((5 * rng.standard_normal((3, 1, 128, 576))).astype(BF16))
    cache, table, device_lens = (cupy.asarray(x) for x in (paged.cache, paged.table, np.array(lens, np.int32)))
    out, lse = cupy.empty((2, 3, 1, 128, 512), BF16), cupy.empty((2, 3, 128, 1), np.float32)
    copy = cache.copy()  # new to cumla inside the graph
    plan = cumla.DenseDecodePlan()

    def call(cache, i, plan):
        cumla.dense_mla_decode(q, cache, table, device_lens, softmax_scale=0.05, plan=plan, out=out[i], lse=lse[i])

    call(cache, 0, plan)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        call(cache, 0, plan)
        call(copy, 1, plan)
        with pytest.raises(RuntimeError, match="plan: memory would have to be allocated"):
            call(cache, 0, None)
        graph = stream.end_capture()
    out[:], lse[:] = 0, 0
    device_lens[1] = 1
    graph.launch()
    cupy.cuda.Device().synchronize()
    values = [paged.values[0], paged.values[1][:1], paged.values[2]]
    for i in range(2):
        assert_decode(out[i].get(), lse[i].get(), *want_decode(q.get(), values, 0.05))


@pytest.mark.parametrize("dtype", [BF16, np.float16])
def test_keys_that_causality_hides_may_hold_anything(lab, rng, dtype):
    """The last two of five tokens are NaN: the first of three queries does not see them, the others do."""
    s_q, heads = 3, 2
    cache = (KV_STD * rng.standard_normal((1, 8, 576))).astype(dtype)
    cache[0, 3:5] = np.nan
    q = rng.standard_normal((1, s_q, heads, 576)).astype(dtype)
    table, lens = np.zeros((1, 1), np.int32), np.array([5], np.int32)
    out, lse = cumla.dense_mla_decode(*map(lab.put, (q, cache, table, lens)), backend=lab.backend)
    keys = to_float(cache[0, :3])[:, None].repeat(heads, axis=1)
    want_out, want_lse = formula(to_float(q[0, :1]), keys, keys[..., :512], 576**-0.5, False)
    assert_decode(to_float(lab.get(out))[0, :1], lab.get(lse)[0, :, :1], want_out, want_lse)
    assert np.isnan(to_float(lab.get(out))[0, 1:]).all()

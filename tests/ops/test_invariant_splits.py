"""Sparse decodes that are batch invariant and whose lists are split by their own length: bits alone and in a batch."""

import numpy as np
import pytest
from ops.test_dense_attention import Paged, want_decode

import cumla
from cumla.kernels.cuda.sparse import division
from cumla.kernels.types.plan import DecodePlan
from support.attention import make_cache, make_indices, make_q, steep
from support.lab import BF16
from support.operations import assert_same_bits

QUICK = {(3, 1, False), (70, 2, False), (3, 1, True)}  # heads and queries of dense decodes, the portable kernel
LENGTHS = [0, 1, 63, 64, 65, 128, 129, 200, 330]  # of selected rows, in keys: 0 to 6 blocks


@pytest.fixture(autouse=True)
def clusters(request, monkeypatch):
    """Emulated devices have clusters of two, which their attributes do not say."""
    from cumla.kernels.cuda.sparse import kernels

    if "here" in request.fixturenames or ("lab" in request.fixturenames and request.getfixturevalue("lab").emulated):
        monkeypatch.setattr(kernels, "_clusters", lambda device: ((2, 1),))
        kernels._hopper.cache_clear()
        yield
        kernels._hopper.cache_clear()
    else:
        yield


def decode_arrays(rng, layout, heads, next_n, lengths=LENGTHS, window=70):
    """Arguments by name, each with one row a request, and the caches. A window unless rows are latent."""
    count, topk = len(lengths), max(lengths)
    latent = layout is cumla.V32_FP8
    prefix = "" if latent else "extra_"
    selected = np.array(lengths)[:, None] - np.arange(next_n)[::-1]  # earlier drafts see less
    rows = {
        "q": make_q(rng, count, next_n, heads, layout, steep(heads)),
        f"{prefix}indices": make_indices(rng, count, next_n, topk, 320),
        f"{prefix}topk_length": np.maximum(selected, 0).astype(np.int32),
    }
    caches = {f"{prefix}k_cache": make_cache(rng, layout, 5, 64, spread=0)}
    if not latent:
        rows |= {
            "indices": make_indices(rng, count, next_n, window, 144),
            "topk_length": rng.integers(0, window + 1, (count, next_n)).astype(np.int32),
        }
        caches["k_cache"] = make_cache(rng, layout, 9, 16, spread=0)
    sink = np.linspace(-3, 3, heads, dtype=np.float32)
    return rows, {**caches, "attn_sink": sink}


def call(lab, rows, others, layout, **options):
    arrays = {name: lab.put(np.ascontiguousarray(x)) for name, x in {**rows, **others}.items()}
    out, lse = cumla.sparse_mla_decode(**arrays, layout=layout, batch_invariant=True, backend=lab.backend, **options)
    return lab.get(out), lab.get(lse)


@pytest.mark.attention
@pytest.mark.parametrize("layout", ["DSV4_FP8", "V32_FP8", "DSV41_FP8"])
@pytest.mark.parametrize(("heads", "next_n"), [(5, 1), (20, 3), (70, 2), (5, 6)])
@pytest.mark.nowhere(when=lambda x: x.simulated and (x.get("heads") > 5 or x.get("next_n") > 1))  # slow
@pytest.mark.thorough(
    when=lambda x: (x.emulated and x.get("layout") != {5: "DSV4_FP8", 20: "V32_FP8"}.get(x.get("heads"))) or x.simulated
)
@pytest.mark.thorough(when=lambda x: x.emulated and x.get("next_n") > 1 and x.get("heads") == 5)
def test_a_token_alone_and_in_a_batch(lab, rng, layout, heads, next_n):
    """Lists of no block to six, with tails: each token alone, without its drafts, in lists no wider than its own."""
    layout = getattr(cumla, layout)
    lengths = [0, 65, 20] if lab.tiny else LENGTHS[:: 2 if heads > 5 else 1] if lab.emulated else LENGTHS
    rows, others = decode_arrays(rng, layout, heads, next_n, lengths)
    out, lse = call(lab, rows, others, layout)
    chosen = [(i, n) for i in range(len(lengths)) for n in range(next_n)]
    if lab.tiny or lab.emulated:
        chosen = [chosen[i] for i in rng.permutation(len(chosen))[:4]]
    for request, token in chosen:
        own = {name: x[request : request + 1, token : token + 1] for name, x in rows.items()}
        for name in list(own):
            if name.endswith("indices"):
                width = max(1, int(own[f"{name.removesuffix('indices')}topk_length"].max()))
                own[name] = own[name][..., :width]
        alone, its = call(lab, own, others, layout)
        assert_same_bits(alone[0, 0], out[request, token])
        assert_same_bits(its[0, :, 0], lse[request, :, token])


@pytest.mark.attention
@pytest.mark.parametrize("layout", ["DSV4_FP8", "V32_FP8"])
@pytest.mark.parametrize(("heads", "next_n"), [(1, 1), (64, 2)])
@pytest.mark.nowhere(when=lambda x: x.simulated)
@pytest.mark.thorough(when=lambda x: x.emulated and (x.get("heads") == 64) != (x.get("layout") == "V32_FP8"))
def test_neighbours_of_any_values(lab, rng, layout, heads, next_n):
    """NaN, infinities and 1e6 in queries and rows of every other request, in the first split, the second, or both."""
    layout = getattr(cumla, layout)
    rows, others = decode_arrays(rng, layout, heads, next_n, [150, 200, 129, 65] if lab.emulated else LENGTHS)
    name = "k_cache" if "extra_k_cache" not in others else "extra_k_cache"
    # The last page is the neighbours' alone.
    entries = rows[name.replace("k_cache", "indices")]
    entries[...] = np.where((entries >= 0) & (entries < 320), entries % 256, -1)
    want = call(lab, rows, others, layout)
    cache = np.array(others[name])
    bytes_of = cache[4].reshape(-1)[: 64 * layout.row_bytes].reshape(64, layout.row_bytes)
    bytes_of[:, :448] = 0x7F  # e4m3's NaN
    entries[::2, :, 3], entries[::4, :, -1] = 256 + 7, 256 + 9
    rows["q"] = rows["q"].copy()
    rows["q"][::2, :, :, ::3] = np.array([np.nan, np.inf, 1e6, -np.inf], BF16)[rng.integers(0, 4)]
    for got, expected in zip(call(lab, rows, {**others, name: cache}, layout), want, strict=True):
        assert_same_bits(got[1::2], expected[1::2])


@pytest.mark.parametrize("layout", ["DSV4_FP8", "V32_FP8"])
@pytest.mark.parametrize("heads", [8, 70])
@pytest.mark.thorough(when=lambda x: (x.get("heads") == 70) != (x.get("layout") == "V32_FP8"))
def test_any_number_of_multiprocessors(here, rng, monkeypatch, layout, heads):
    """Clusters run at a time by the device's SMs and take tiles in any order; no bits depend on it."""
    from cumla.kernels.cuda.launch import recorded_launches
    from cumla.kernels.cuda.sparse import kernels, work

    layout, found, divided = getattr(cumla, layout), [], []
    rows, others = decode_arrays(rng, layout, heads, 1, [0, 70, 330])
    divide = work.divide
    monkeypatch.setattr(work, "divide", lambda *arguments: divided.append(divide(*arguments)) or divided[-1])
    for sms in (4, 78, 114, 132):
        for module in (kernels, work):
            monkeypatch.setattr(module, "device_sms", lambda device, sms=sms: sms)
        for cached in (kernels._hopper, kernels._portable_within):
            cached.cache_clear()
        with recorded_launches():
            found.append(call(here, rows, others, layout))
    for cached in (kernels._hopper, kernels._portable_within):
        cached.cache_clear()
    for results in found[1:]:
        for got, want in zip(results, found[0], strict=True):
            assert_same_bits(got, want)
    tiles = 3 * -(-heads // 64)
    assert set(divided) == {division.Division(2 * tiles, False, False, 2, cluster=True)}


def test_the_division_does_not_depend_on_the_batch():
    """Two splits of each tile, whatever the widths of the lists are, and for more tiles than run at a time."""
    clusters = ((2, 66), (3, 39), (4, 30))
    for tiles in (1, 66, 67, 5000):
        want = division.Division(2 * tiles, False, False, 2, cluster=True)
        assert division.invariant(tiles, True, clusters) == want
        assert division.invariant(tiles, False, clusters) is None  # a window alone
        assert division.invariant(tiles, True, ()) is None
        assert division.invariant(tiles, True, ((2, 0),)) is None


def test_the_memory_of_a_plan_is_enough_for_any_number_of_tiles(here, rng):
    """Clusters write no partial results to memory: a plan's memory does not grow with their number."""
    from cumla.kernels.cuda.sparse import work

    rows, others = decode_arrays(rng, cumla.V32_FP8, 8, 1, [70, 5] * 40, window=0)
    memory = here.put(np.zeros(work.workspace_bytes(80, work.device_sms(0)), np.uint8))
    plan = DecodePlan(memory, batch_invariant=True)
    found, want = (call(here, rows, others, cumla.V32_FP8, plan=x) for x in (plan, None))
    for got, expected in zip(found, want, strict=True):
        assert_same_bits(got, expected)


# ---- dense decode


@pytest.fixture
def parts_of_two_blocks(monkeypatch):
    """A token's part is two blocks of 64 keys, so that short contexts have many."""
    from cumla.kernels.cuda import dense_attention

    monkeypatch.setattr(dense_attention, "INVARIANT_PART", 2)


def dense_arrays(rng, lens, queries, heads):
    """Arrays with one row a request, the cache, and the rows of each request."""
    paged = Paged(rng, lens, 64)
    rows = {
        "q": (5 * rng.standard_normal((len(lens), queries, heads, 576))).astype(BF16), "block_table": paged.table,
        "cache_seqlens": np.array(lens, np.int32),
    }  # fmt: skip
    return rows, {"k_cache": paged.cache}, paged.values


def dense_call(lab, rows, others, **options):
    arrays = {name: lab.put(np.ascontiguousarray(x)) for name, x in {**rows, **others}.items()}
    found = cumla.dense_mla_decode(
        **arrays, softmax_scale=0.05, **{"batch_invariant": True, "backend": lab.backend, **options}
    )
    return [lab.get(x) for x in found]


@pytest.mark.attention
@pytest.mark.usefixtures("parts_of_two_blocks")
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize(("heads", "queries"), [(3, 1), (70, 2), (128, 1), (3, 6)])
@pytest.mark.thorough(when=lambda x: x.emulated and (x.get("heads"), x.get("queries"), x.get("portable")) not in QUICK)
def test_a_dense_token_alone_and_in_a_batch(device, rng, heads, queries, portable):
    """Contexts of no part to many, some cut to the most parts; alone each has a bound and a table of its own length."""
    import contextlib

    from cumla.kernels.cuda.device import assumed
    from support.bounds import assert_decode

    lens = [0, 1, 128, 129, 64 * 5, 600] if device.emulated else [0, 1, 128, 129, 300, 320, 321, 640, 900, 2000]
    rows, others, values = dense_arrays(rng, lens, queries, heads)
    with assumed(80) if portable else contextlib.nullcontext():
        out, lse = dense_call(device, rows, others)
        assert_decode(out, lse, *want_decode(rows["q"], values, 0.05))
        chosen = [(request, n) for request in range(len(lens)) for n in range(queries)]
        if device.emulated:
            chosen = [chosen[-1], *(chosen[i] for i in rng.permutation(len(chosen))[:2])]
        for request, token in chosen:
            seen = max(lens[request] - (queries - 1 - token), 0)
            own = {
                "q": rows["q"][request : request + 1, token : token + 1], "cache_seqlens": np.array([seen], np.int32),
                "block_table": rows["block_table"][request : request + 1, : max(1, -(-seen // 64))],
            }  # fmt: skip
            alone, its = dense_call(device, own, others, max_seqlen=seen)
            assert_same_bits(alone[0, 0], out[request, token])
            assert_same_bits(its[0, :, 0], lse[request, :, token])


@pytest.mark.usefixtures("parts_of_two_blocks")
def test_dense_parts_on_any_number_of_multiprocessors(here, rng, monkeypatch):
    """And whatever other plan the memory held before; poison in a neighbour stays there."""
    from cumla.kernels.cuda import dense_attention
    from cumla.kernels.cuda.launch import recorded_launches

    rows, others, _ = dense_arrays(rng, [0, 300, 640], 2, 8)
    found, workspace = [], cumla.DenseDecodePlan().workspace
    for sms in (4, 78, 114, 132):
        monkeypatch.setattr(dense_attention, "device_sms", lambda device, sms=sms: sms)
        with recorded_launches() as launches:
            plan = cumla.DenseDecodePlan(workspace, batch_invariant=True)
            found.append(dense_call(here, rows, others, plan=plan))
            dense_call(here, rows, others, plan=cumla.DenseDecodePlan(workspace), batch_invariant=False)
        assert "plan_dense_decode_by_token" in [launch.kernel.raw.name for launch in launches]
    rows["q"] = rows["q"].copy()
    rows["q"][1] = np.nan
    poisoned = [x[2] for x in dense_call(here, rows, others)]
    for results in (*found[1:], [None, None]):
        for got, want in zip(results, found[0], strict=True):
            if got is not None:
                assert_same_bits(got, want)
    for got, want in zip(poisoned, found[0], strict=True):
        assert_same_bits(got, want[2])


def test_the_memory_of_dense_parts_is_bounded():
    """538 MB for 128 tokens of any number of heads and any context, and none where no token is divided."""
    from cumla.kernels.cuda import dense_attention

    for heads in (1, 16, 64, 128, 100):
        for longest in (5000, 1 << 17, 1 << 20):
            needed = dense_attention.workspace_bytes(128, 1, heads, longest, 132, batch_invariant=True)
            assert 0 < needed < 540e6
        assert dense_attention.workspace_bytes(128, 1, heads, 4096, 132, batch_invariant=True) == 0
    assert dense_attention.parts_of_token(128, 1 << 20) == 8
    assert dense_attention.parts_of_token(16, 1 << 20) == 64

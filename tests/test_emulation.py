"""CUDA kernels under every schedule of the emulator (tests/emulation)."""

import itertools

import numpy as np
import pytest

import cumla
import emulation
from cumla.kernels.cuda import dense_attention, projection
from cumla.kernels.cuda.launch import recorded_launches
from cumla.kernels.cuda.sparse.division import Division
from cumla.kernels.reference.projection import dequantized
from cumla.specs.self_test import check_case
from support import operations
from support.attention import Problem, make_cache, make_indices, make_q, nothing_attended_again, steep
from support.bounds import assert_decode, assert_prefill, largest_values
from support.lab import BF16, to_float

pytestmark = pytest.mark.skipif(emulation.unavailable() is not None, reason=str(emulation.unavailable()))

HOPPER, AMPERE = 0, 1
DEVICES = pytest.mark.parametrize("device", [HOPPER, AMPERE], ids=["hopper", "ampere"])
QUICK_SCHEDULES = ("late",)
SCHEDULES = pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(schedule, id=name, marks=[] if name in QUICK_SCHEDULES else [pytest.mark.slow])
        for name, schedule in emulation.SCHEDULES.items()
        if name != "in order"  # all other tests run in order
    ],
)
WILDEST = emulation.SCHEDULES["random 1"]
FP8 = (cumla.DSV4_FP8, cumla.V32_FP8)


def run(name, arguments, put, get, backend):
    """The results of an operation, on the host."""
    arrays = {name: put(value) if isinstance(value, np.ndarray) else value for name, value in arguments.items()}
    return [get(x) for x in getattr(cumla, name)(**arrays, backend=backend)]


# Operations for which Hopper has separate kernels, or clusters; for the others both devices run the same kernels.
OF_HOPPER = ("sparse_attention", "dense_attention", "indexer", "indexer_topk", "compressor")


@DEVICES
@pytest.mark.parametrize("name", operations.EXAMPLES)
@pytest.mark.nowhere(when=lambda x: not operations.is_on("cuda", x.get("name")))
@pytest.mark.thorough(
    when=lambda x: x.get("device") == AMPERE and operations.EXAMPLES[x.get("name")].kernels not in OF_HOPPER
)
def test_every_operation(here, name, device):
    """Threads and copies run in any order, early or late."""
    with here.xp.cuda.Device(device), emulation.scheduled(WILDEST):
        outcome = check_case(operations.EXAMPLES[name], "cuda", seed=0)
    assert outcome.passed, outcome


@SCHEDULES
@pytest.mark.parametrize("tiles", [(8, 128, 4), (16, 32, 2), (8, 16, 1), (16, 128, 2, True)], ids=str)
def test_products_of_clusters(here, rng, monkeypatch, schedule, tiles):
    """CTAs of a cluster write their sums, and leave, at any time."""
    monkeypatch.setattr(projection, "division", lambda *_: projection.Tiles(*tiles))
    rows = 152 if len(tiles) > 3 else 150  # Hopper's kernel takes results whose rows are aligned
    codes, scales = rng.integers(0, 120, (rows, 1104)).astype(np.uint8), np.full((2, 9), 0.25, np.float32)
    x = rng.standard_normal((tiles[0] - 1, 1104)).astype(BF16)
    with emulation.scheduled(schedule):
        got = here.get(cumla.fp8_block_linear(*map(here.put, (x, codes, scales)), float32_output=True, backend="cuda"))
    want = cumla.fp8_block_linear(x, codes, scales, float32_output=True, backend="reference")
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6 * float(np.abs(want).max()))


@SCHEDULES
def test_fp8_products(here, rng, monkeypatch, schedule):
    """Results leave shared memory while the next tile is multiplied: two CTAs take five tiles."""
    monkeypatch.setattr(projection, "device_sms", lambda _: 2)
    codes, scales = rng.integers(0, 120, (1, 640, 1024)).astype(np.uint8), rng.random((1, 5, 8), np.float32)
    values, factors = rng.integers(0, 120, (1, 9, 1024)).astype(np.uint8), rng.random((1, 9, 8), np.float32)
    out = here.put(np.zeros((1, 9, 640), BF16))
    with emulation.scheduled(schedule):
        assert projection.fp8_product(*map(here.put, (values, factors, codes, scales)), 128, 128, out)
    want = np.matmul(dequantized(values, factors, 1, 128), dequantized(codes, scales, 128, 128).transpose(0, 2, 1))
    np.testing.assert_allclose(here.get(out).astype(np.float64), want, rtol=2.0**-8)


@pytest.fixture
def no_exact_kernel(here):
    with nothing_attended_again():
        yield


def on(here, device, schedule, problem, **options):
    with here.xp.cuda.Device(device), emulation.scheduled(schedule), recorded_launches():
        problem.check(here, **options)


# The portable kernels' copies are late, too, at random.
LATE_ON_AMPERE = pytest.mark.thorough(
    when=lambda x: x.get("device") == AMPERE and x.get("schedule") == emulation.SCHEDULES["late"]
)


@SCHEDULES
@DEVICES
@LATE_ON_AMPERE
@pytest.mark.usefixtures("no_exact_kernel")
@pytest.mark.parametrize("layout", FP8, ids=lambda x: x.name)
class TestDecode:
    """The Hopper kernel on one device, the portable one on the other."""

    def test_several_tiles_a_thread_block(self, here, rng, layout, device, schedule):
        problem = Problem(
            make_q(rng, 2, 2, 70, layout, steep(70)), make_cache(rng, layout, 20, 53, spread=0),
            make_indices(rng, 2, 2, 150, 1060), topk_length=np.array([150, 0], np.int32),
            attn_sink=np.linspace(-3, 3, 70, dtype=np.float32), layout=layout,
        )  # fmt: skip
        on(here, device, schedule, problem, batch_invariant=True)

    def test_tiles_split_where_the_shape_says(self, here, rng, layout, device, schedule):
        cache = make_cache(rng, layout, 20, 64, spread=0)
        q = make_q(rng, 1, 2, 64, layout, steep(64))
        problem = Problem(q, cache, make_indices(rng, 1, 2, 400, 1280), layout=layout)
        on(here, device, schedule, problem)

    def test_tiles_split_where_the_lengths_say(self, here, rng, layout, device, schedule):
        problem = Problem(
            make_q(rng, 3, 1, 64, layout, steep(64)), make_cache(rng, layout, 20, 64, spread=0),
            make_indices(rng, 3, 1, 400, 1280), topk_length=np.array([5, 400, 200], np.int32), layout=layout,
        )  # fmt: skip
        on(here, device, schedule, problem)

    def test_whole_tiles_assigned(self, here, rng, layout, device, schedule):
        lengths = np.array([5, 130, 64, 0, 65, 130, 1, 70, 128, 3, 129], np.int32)
        problem = Problem(
            make_q(rng, 11, 1, 3, layout, steep(3)), make_cache(rng, layout, 20, 64, spread=0),
            make_indices(rng, 11, 1, 130, 1280), topk_length=lengths, layout=layout,
        )  # fmt: skip
        plan = cumla.DecodePlan()
        on(here, device, schedule, problem, plan=plan)
        with here.xp.cuda.Device(device):
            starts = here.get(plan.workspace.array("starts", 0, np.int32, here.put(np.zeros(1, np.int32))))
        order, first = starts[2 * 513 :][: len(lengths)], starts[: 2 * 513 : 2].tolist()
        first = first[: first.index(len(lengths)) + 1]
        assert sorted(order) == list(range(len(lengths)))
        assert not starts[1 : 2 * len(first) : 2].any(), "tiles stay whole"
        blocks = np.maximum(1, -(-lengths // 64))[order]
        assert np.ptp(np.diff(first)) == 1
        assert all((np.diff(blocks[start:end]) <= 0).all() for start, end in itertools.pairwise(first))


@SCHEDULES
@pytest.mark.usefixtures("no_exact_kernel")
@pytest.mark.parametrize("layout", FP8, ids=lambda x: x.name)
@pytest.mark.parametrize("tile", [16, 32])
@pytest.mark.parametrize("cut", [True, False], ids=["cut", "whole"])
def test_low_tiles_of_the_hopper_kernel(here, rng, layout, schedule, tile, cut, monkeypatch):
    """The last tile has fewer heads than the others."""
    from cumla.kernels.cuda.sparse import kernels as sparse_kernels

    monkeypatch.setattr(sparse_kernels, "tile_heads", lambda *arguments: tile)
    problem = Problem(
        make_q(rng, 1, 2, 40, layout, steep(40)), make_cache(rng, layout, 20, 53, spread=0),
        make_indices(rng, 1, 2, 230, 1060), attn_sink=np.linspace(-3, 3, 40, dtype=np.float32), layout=layout,
    )  # fmt: skip
    on(here, HOPPER, schedule, problem, batch_invariant=not cut)


@SCHEDULES
@pytest.mark.parametrize("tile", [16, 32, 64])
def test_tiles_with_large_rope_are_recomputed(here, rng, schedule, tile, monkeypatch):
    """Under any schedule and tile height: keys beyond float16 are recomputed; tiles whose results are NaN are not."""
    from cumla.kernels.cuda.sparse import kernels as sparse_kernels
    from cumla.kernels.cuda.sparse.work import EXACT_COUNTERS

    found, launch_epilogue = [], sparse_kernels.launch_epilogue

    def observe(work, problem, memory, **options):
        found.append(here.get(memory.unsafe)[EXACT_COUNTERS:][: work.tiles].copy())
        launch_epilogue(work, problem, memory=memory, **options)

    monkeypatch.setattr(sparse_kernels, "tile_heads", lambda *arguments: tile)
    monkeypatch.setattr(sparse_kernels, "launch_epilogue", observe)
    layout = cumla.DSV4_FP8
    cache = make_cache(rng, layout, 20, 64, spread=0)
    rope = cache.reshape(20, -1)[0, : 64 * layout.row_bytes].reshape(64, layout.row_bytes)[:, layout.rope_offset :]
    rope.view(BF16)[7, 3], rope.view(BF16)[8, 63] = np.nan, -1e6
    indices = np.maximum(make_indices(rng, 3, 1, 230, 1280), 10)
    indices[0, 0, 5], indices[1, 0, 64], indices[1, 0, 229] = 8, 7, 8
    problem = Problem(
        make_q(rng, 3, 1, 40, layout, steep(40)), cache, indices, attn_sink=np.linspace(-3, 3, 40, dtype=np.float32)
    )  # fmt: skip
    on(here, HOPPER, schedule, problem, batch_invariant=True)
    marks = found[-1].reshape(-1, 3)  # groups of heads, tokens
    assert (marks[:, 0] == 1).all()
    assert (marks[:, 1] & 2).all()
    assert not marks[:, 2].any()


@SCHEDULES
@pytest.mark.usefixtures("no_exact_kernel")
@pytest.mark.parametrize("layout", FP8, ids=lambda x: x.name)
@pytest.mark.parametrize(("tile", "parts"), [(64, 2), (32, 5), (16, 3)])
@pytest.mark.thorough(when=lambda x: x.get("layout") is not FP8[x.get("parts") % 2])
def test_tiles_of_clusters(here, rng, layout, schedule, tile, parts, monkeypatch):
    """The last tile has fewer heads; one token has keys in one split only, another none at all."""
    from cumla.kernels.cuda.sparse import work as sparse_work

    def divide(work, *rest):
        return Division(work.tiles * parts, False, False, parts, True)

    heads = tile + 6
    monkeypatch.setattr("cumla.kernels.cuda.sparse.kernels.tile_heads", lambda *arguments: tile)
    monkeypatch.setattr(sparse_work, "divide", divide)
    indices = make_indices(rng, 1, 3, 290, 1060)
    indices[0, 1, 64:], indices[0, 2] = -1, -1
    problem = Problem(
        make_q(rng, 1, 3, heads, layout, steep(heads)), make_cache(rng, layout, 20, 53, spread=0), indices,
        attn_sink=np.linspace(-3, 3, heads, dtype=np.float32), layout=layout,
    )  # fmt: skip
    on(here, HOPPER, schedule, problem)


@SCHEDULES
@pytest.mark.usefixtures("no_exact_kernel")
@pytest.mark.parametrize("how", ["whole", "cut"])
@pytest.mark.parametrize("layout", [cumla.DSV4_BF16, cumla.MLA_BF16], ids=lambda x: x.name)
def test_bfloat16_rows_of_the_hopper_kernel(here, rng, schedule, layout, how):
    """Several tiles a thread block, some without keys, and splits of them; two lists; the last heads are few."""
    lengths = np.array([[128, 0], [0, 400], [70, 330], [0, 0], [1, 64]], np.int32)
    problem = Problem(
        make_q(rng, 5, 1, 70, layout, steep(70)), make_cache(rng, layout, 9, 32, spread=0),
        make_indices(rng, 5, 1, 128, 9 * 32), layout=layout, topk_length=lengths[:, 0].copy(),
        extra_k_cache=make_cache(rng, layout, 20, 53, spread=0), extra_indices=make_indices(rng, 5, 1, 400, 1060),
        extra_topk_length=lengths[:, 1].copy(), attn_sink=np.linspace(-3, 3, 70, dtype=np.float32),
    )  # fmt: skip
    on(here, HOPPER, schedule, problem, batch_invariant=how == "whole")


@SCHEDULES
@pytest.mark.usefixtures("no_exact_kernel")
@pytest.mark.parametrize(("tile", "how"), [(64, "whole"), (64, "cut"), (32, "whole"), (16, "cut"), (32, "cluster")])
@pytest.mark.thorough(when=lambda x: (x.get("tile"), x.get("how")) == (64, "cut"))
def test_expanded_rows_of_the_hopper_kernel(here, rng, schedule, tile, how, monkeypatch):
    """V4.1's pair: tiles of FP8 blocks, of FP4 blocks, of both and of none, and splits that begin in either."""
    if how == "cluster":
        from cumla.kernels.cuda.sparse import work as sparse_work

        monkeypatch.setattr(
            sparse_work, "divide", lambda work, *rest: Division(work.tiles * 3, False, False, 3, cluster=True)
        )
    monkeypatch.setattr("cumla.kernels.cuda.sparse.kernels.tile_heads", lambda *arguments: tile)
    first, second = cumla.DSV41_FP8, cumla.DSV41_FP4
    lengths = np.array([[128, 0], [0, 400], [70, 330], [0, 0], [1, 64]], np.int32)
    problem = Problem(
        make_q(rng, 5, 1, tile + 6, first, steep(tile + 6)), make_cache(rng, first, 9, 32, spread=0),
        make_indices(rng, 5, 1, 128, 9 * 32), layout=first, topk_length=lengths[:, 0].copy(),
        extra_k_cache=make_cache(rng, second, 20, 53, spread=0), extra_indices=make_indices(rng, 5, 1, 400, 1060),
        extra_topk_length=lengths[:, 1].copy(), extra_layout=second,
        attn_sink=np.linspace(-3, 3, tile + 6, dtype=np.float32),
    )  # fmt: skip
    on(here, HOPPER, schedule, problem, batch_invariant=how == "whole")


@SCHEDULES
@DEVICES
@LATE_ON_AMPERE
@pytest.mark.usefixtures("no_exact_kernel")
@pytest.mark.parametrize("width", [512, 576])
class TestPrefill:
    """Hopper's kernels (of 16, 32 and 64 heads a tile) on one device, the portable one on the other. The emulated
    device has few multiprocessors, so a thread block has several tiles, of odd and even numbers of blocks and none."""

    @pytest.mark.parametrize(("heads", "topk"), [(3, 330), (21, 260), (70, 130)])
    @pytest.mark.thorough(
        when=lambda x: x.get("device") == AMPERE and (x.get("heads") == 70) != (x.get("width") == 512)
    )
    def test_tiles(self, here, rng, width, heads, topk, device, schedule):
        lengths = np.array([topk, 1, 0, 64, 65, topk // 2, 129, topk, 2**31 - 1, -1, 128], np.int32)
        self.check(here, rng, device, schedule, width, heads, topk, lengths)

    @pytest.mark.parametrize("heads", [5, 40])
    @pytest.mark.thorough(when=lambda x: x.get("device") == AMPERE and x.get("heads") == 40)
    def test_absent_rows(self, here, rng, width, device, schedule, heads):
        self.check(here, rng, device, schedule, width, heads, 200, None, absent=0.9)

    @pytest.mark.nowhere(when=lambda x: x.get("device") == AMPERE)  # Ampere has no boxes
    def test_queries_of_which_there_are_no_boxes(self, here, rng, width, device, schedule, monkeypatch):
        from cumla.kernels.cuda.sparse import kernels as sparse_kernels

        monkeypatch.setattr(sparse_kernels, "map_of_pages", lambda *arguments: sparse_kernels.NO_MAP)
        self.check(here, rng, device, schedule, width, 5, 200, None)

    def check(self, here, rng, device, schedule, width, heads, topk, lengths, absent=0.1):
        tokens = 11
        q = rng.standard_normal((tokens, heads, width)).astype(BF16)
        kv = rng.standard_normal((300, width)).astype(BF16)
        indices = make_indices(rng, tokens, 1, topk, 300, absent)[:, 0]
        indices[4] = -1
        kv[7], indices[indices == 7] = np.nan, -1
        arguments = {
            "q": q, "kv": kv, "indices": indices, "topk_length": lengths,
            "attn_sink": np.linspace(-3, 3, heads, dtype=np.float32),
        }  # fmt: skip
        with here.xp.cuda.Device(device), emulation.scheduled(schedule), recorded_launches():
            out, max_logits, lse = run("sparse_mla_prefill", arguments, here.put, here.get, "cuda")
        want, want_max, want_lse = run("sparse_mla_prefill", arguments, np.array, np.array, "reference")
        largest = largest_values(kv, indices) if device == HOPPER else 1.0
        assert_prefill(to_float(out), max_logits, lse, to_float(want), want_max, want_lse, largest=largest)


KEPT_BACK = [emulation.Schedule(kept_back=group) for group in range(1, 5)]


@pytest.mark.parametrize("schedule", [*emulation.SCHEDULES.values(), *KEPT_BACK], ids=str)
@pytest.mark.thorough(when=lambda x: x.get("schedule") not in (emulation.SCHEDULES["late"], KEPT_BACK[1]))
@pytest.mark.usefixtures("no_exact_kernel")
def test_prefill_with_fp8_products(here, rng, schedule):
    """Results have the bits of a run in order, which tests/ops/test_prefill_fp8.py compares with float64."""
    lengths = np.array([330, 1, 0, 64, 65, 165, 129, 330, 2**31 - 1, -1, 128], np.int32)
    q, kv = (rng.standard_normal(shape).astype(BF16) for shape in ((len(lengths), 70, 512), (300, 512)))
    arguments = {"q": q, "kv": kv, "indices": make_indices(rng, len(lengths), 1, 330, 300)[:, 0]}
    results = []
    for each in (emulation.SCHEDULES["in order"], schedule):
        with emulation.scheduled(each), recorded_launches():
            more = {"topk_length": lengths, "precision": "fp8"}
            results.append(run("sparse_mla_prefill", arguments | more, here.put, here.get, "cuda"))
    for got, want in zip(*results, strict=True):
        np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


@pytest.fixture
def many_multiprocessors(here, monkeypatch):
    """The number of SMs of an H200."""
    from cumla.kernels.cuda import device
    from cumla.kernels.cuda.sparse import kernels as sparse_kernels

    caches = (device._of_driver, sparse_kernels._hopper, sparse_kernels._portable_within)
    monkeypatch.setattr(here.xp.cuda.Device, "MULTIPROCESSORS", 132)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@DEVICES
@pytest.mark.usefixtures("no_exact_kernel", "many_multiprocessors")
@pytest.mark.parametrize(
    ("batch", "heads", "topk", "lengths"),
    [
        (1, 64, 640, None),
        (4, 70, 300, None),
        pytest.param(1, 16, 6000, None, marks=pytest.mark.slow),
        (1, 16, 17000, [16999]),
        (3, 64, 640, [640, 0, 400]),
    ],
)
def test_tiles_split_into_many_parts(here, rng, device, batch, heads, topk, lengths):
    """Into more splits than are loaded together, and into more than a thread block has threads to search."""
    layout = cumla.DSV4_FP8
    problem = Problem(
        make_q(rng, batch, 1, heads, layout, steep(heads)), make_cache(rng, layout, 20, 64, spread=0),
        make_indices(rng, batch, 1, topk, 1280), attn_sink=np.linspace(-3, 3, heads, dtype=np.float32), layout=layout,
        topk_length=None if lengths is None else np.array(lengths, np.int32),
    )  # fmt: skip
    on(here, device, WILDEST, problem)


@DEVICES
@pytest.mark.usefixtures("no_exact_kernel")
@pytest.mark.parametrize("ranges", [4, 5])
def test_ranges_go_on_from_tile_to_tile(here, rng, device, ranges, monkeypatch):
    """Two groups of heads with equal or different numbers of CTAs: then a CTA ends the first and begins the second."""
    from cumla.kernels.cuda.sparse import division
    from cumla.kernels.cuda.sparse import kernels as sparse_kernels

    monkeypatch.setattr(division, "divide", lambda *_: (division.Division(ranges, planned=False, split=True), 0.0))
    monkeypatch.setattr(sparse_kernels, "tile_heads", lambda *_: 64)
    layout = cumla.V32_FP8
    problem = Problem(
        make_q(rng, 3, 1, 100, layout, steep(100)), make_cache(rng, layout, 20, 64, spread=0),
        make_indices(rng, 3, 1, 200, 1280), layout=layout,
    )  # fmt: skip
    on(here, device, WILDEST, problem)


@DEVICES
@pytest.mark.thorough(when=lambda x: x.get("device") == AMPERE)  # where all tiles have one height
@pytest.mark.usefixtures("many_multiprocessors")
def test_given_memory_serves_tiles_of_any_height(here, rng, device):
    """Few queries take low tiles, and more of them; the requested memory is enough for all calls in turn."""
    from cumla.kernels.cuda.sparse import work as sparse_work

    layout, heads = cumla.DSV4_FP8, 64
    cache = make_cache(rng, layout, 4, 64, spread=0)
    memory = here.xp.zeros(sparse_work.workspace_bytes(150, 132), np.uint8) if device == HOPPER else None
    plan = cumla.DecodePlan(memory)
    for batch, lengths in ((1, None), (2, [3, 100]), (9, None), (150, None), (1, None)):
        problem = Problem(
            make_q(rng, batch, 1, heads, layout), cache, make_indices(rng, batch, 1, 100, 256), layout=layout,
            topk_length=None if lengths is None else np.array(lengths, np.int32),
        )  # fmt: skip
        plan.renew()
        on(here, device, WILDEST, problem, plan=plan)


@DEVICES
@pytest.mark.usefixtures("no_exact_kernel", "many_multiprocessors")
@pytest.mark.parametrize("present", [0, 1, 700, 2000])
@pytest.mark.thorough(when=lambda x: x.get("present") in (1, 2000))
def test_parts_without_keys(here, rng, device, present):
    """A tile with more splits than are loaded together: all of them, the first ones, the last ones."""
    layout, topk = cumla.DSV4_FP8, 2000
    indices = make_indices(rng, 3, 1, topk, 1280, 0.0)
    indices[0, 0, : topk - present], indices[1, 0, present:] = -1, 1280
    problem = Problem(
        make_q(rng, 3, 1, 16, layout, steep(16)), make_cache(rng, layout, 20, 64, spread=0), indices,
        attn_sink=np.linspace(-3, 3, 16, dtype=np.float32), layout=layout,
    )  # fmt: skip
    on(here, device, WILDEST, problem)


@SCHEDULES
@DEVICES
@LATE_ON_AMPERE
@pytest.mark.usefixtures("no_exact_kernel")
def test_two_caches(here, rng, device, schedule):
    layout = cumla.DSV4_FP8
    problem = Problem(
        make_q(rng, 2, 1, 20, layout, steep(20)), make_cache(rng, layout, 20, 64, spread=0),
        make_indices(rng, 2, 1, 128, 1280),
        extra_k_cache=make_cache(rng, layout, 20, 2, spread=0), extra_indices=make_indices(rng, 2, 1, 200, 40),
        extra_topk_length=np.array([70, 200], np.int32),
    )  # fmt: skip
    on(here, device, schedule, problem)


@SCHEDULES
@DEVICES
@pytest.mark.thorough(when=lambda x: x.get("device") == AMPERE and x.get("block_size") != 53)  # which has no boxes
@pytest.mark.parametrize("block_size", [16, 53, 64, 128])
def test_dense_decode(here, rng, block_size, device, schedule):
    """On Hopper blocks are loaded as boxes and, where a page is missing, row by row."""
    columns = 700 // block_size + 1
    q = 6 * steep(70) * rng.standard_normal((2, 2, 70, 576))
    cache = 0.1 * rng.standard_normal((2 * columns, block_size, 576))
    table = rng.permutation(2 * columns).reshape(2, columns).astype(np.int32)
    table[0, 200 // block_size] = -1
    arguments = {
        "q": q.astype(BF16), "k_cache": cache.astype(BF16), "softmax_scale": 0.05, "causal": True,
        "block_table": table, "cache_seqlens": np.array([700, 65], np.int32),
    }  # fmt: skip
    check_dense(here, device, schedule, "dense_mla_decode", arguments)


@SCHEDULES
@pytest.mark.parametrize("ranges", [1, 3, 10, 40])
@pytest.mark.thorough(when=lambda x: x.get("ranges") in (1, 40))
def test_dense_decode_of_many_lengths(here, rng, ranges, schedule, monkeypatch):
    """A CTA has several tokens, the ends of two, a part of one, or none; there are more or fewer tokens than ranges."""
    monkeypatch.setattr(dense_attention, "range_count", lambda *_: ranges)
    lens, columns = np.array([0, 700, 65, 0, 1, 640, 320, 2, 129, 64], np.int32), 12
    cache = 0.1 * rng.standard_normal((len(lens) * columns, 64, 576))
    arguments = {
        "q": (6 * steep(70) * rng.standard_normal((len(lens), 2, 70, 576))).astype(BF16),
        "k_cache": cache.astype(BF16), "softmax_scale": 0.05, "causal": True, "cache_seqlens": lens,
        "block_table": rng.permutation(len(cache)).reshape(len(lens), columns).astype(np.int32),
    }  # fmt: skip
    check_dense(here, HOPPER, schedule, "dense_mla_decode", arguments)


@SCHEDULES
@DEVICES
@LATE_ON_AMPERE
@pytest.mark.parametrize("accumulate", [False, True])
def test_packed_sequences(here, rng, device, schedule, accumulate):
    starts = np.array([0, 150, 170, 450], np.int32)
    shapes = {"q": (450, 2, 192), "k": (450, 2, 128), "k_pe": (450, 64), "v": (450, 2, 128)}
    sizes = {"q": 6 * np.array([[[1.0], [32.0]]])}  # as steep() has them, for two heads
    arrays = {name: sizes.get(name, 0.1) * rng.standard_normal(shape) for name, shape in shapes.items()}
    arguments = {name: array.astype(BF16) for name, array in arrays.items()}
    if accumulate:
        arguments |= {
            "accumulate": True, "out": rng.standard_normal((450, 2, 128)).astype(np.float32),
            "lse": rng.standard_normal((2, 450)).astype(np.float32),
        }  # fmt: skip
    check_dense(
        here, device, schedule, "mha_varlen",
        {**arguments, "cu_seqlens_q": starts, "cu_seqlens_k": starts, "softmax_scale": 0.11, "causal": True},
    )  # fmt: skip


def check_dense(here, device, schedule, case, arguments):
    with here.xp.cuda.Device(device), emulation.scheduled(schedule):
        out, lse = run(case, arguments, here.put, here.get, "cuda")
    want, want_lse = run(case, arguments, np.array, np.array, "reference")
    assert_decode(to_float(out), lse, to_float(want), want_lse)

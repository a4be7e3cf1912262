"""FlashMLA's module with tensors: torch allocates what a call makes, and torch.cuda.graph captures the calls."""

import numpy as np
import pytest

import cumla
from cumla.arrays import dlpack
from cumla.interop import flash_mla
from cumla.kernels.types.plan import DecodePlan
from support.bounds import assert_decode, assert_prefill
from support.lab import BF16, to_float

torch = pytest.importorskip("torch")

REQUESTS, HEADS, BLOCKS, BLOCK, TOPK = 3, 64, 6, 64, 192
LAYERS = 2  # that share a schedule
WIDTHS = {"v4": (512, cumla.DSV4_FP8), "v32": (576, cumla.V32_FP8), "dense": (576, None)}


class Contents:
    """What a step is made of, host arrays: of FlashMLA's module as tensors, and of the reference."""

    def __init__(self, kind, seed):
        rng, (width, layout) = np.random.default_rng(seed), WIDTHS[kind]
        rows = (0.3 * rng.standard_normal((BLOCKS * BLOCK, width))).astype(BF16)
        self.kind, self.layout = kind, layout
        self.arrays = {
            "q": rng.standard_normal((REQUESTS, 1, HEADS, width)).astype(BF16),
            "k_cache": rows.reshape(BLOCKS, BLOCK, 1, width),
        }
        if layout is None:
            pages = rng.permutation(BLOCKS).astype(np.int32).reshape(REQUESTS, -1)
            lens = rng.integers(1, pages.shape[1] * BLOCK, REQUESTS)
            self.arrays |= {"block_table": pages, "cache_seqlens": lens.astype(np.int32)}
            return
        cache = layout.allocate(BLOCKS, BLOCK)
        cumla.quantize_and_insert_k_cache(rows, cache, np.arange(len(rows)), layout=layout, backend="cpu")
        self.arrays |= {
            "k_cache": np.ascontiguousarray(cache)[:, :, None],
            "indices": rng.integers(-1, len(rows), (REQUESTS, 1, TOPK)).astype(np.int32),
            "topk_length": rng.integers(1, TOPK, REQUESTS).astype(np.int32),
        }

    def tensors(self, device):
        return {name: dlpack.give(np.array(array), "torch").to(device) for name, array in self.arrays.items()}

    def want(self):
        a = self.arrays
        if self.layout is None:
            return cumla.dense_mla_decode(
                a["q"], a["k_cache"][:, :, 0], a["block_table"], a["cache_seqlens"], causal=False, backend="reference"
            )
        return cumla.sparse_mla_decode(
            a["q"], a["k_cache"], a["indices"], topk_length=a["topk_length"], layout=self.layout, backend="reference"
        )


def decode(tensors, schedule):
    tables = tensors.get("block_table"), tensors.get("cache_seqlens")
    return flash_mla.flash_mla_with_kvcache(
        tensors["q"], tensors["k_cache"], *tables, 512, schedule, is_fp8_kvcache="indices" in tensors,
        indices=tensors.get("indices"), topk_length=tensors.get("topk_length"),
    )  # fmt: skip


def prefill(tensors):
    return flash_mla.flash_mla_sparse_fwd(tensors["q"], tensors["kv"], tensors["indices"], 0.05)


def prefill_arrays(seed):
    rng = np.random.default_rng(seed)
    return {
        "q": rng.standard_normal((40, HEADS, 512)).astype(BF16),
        "kv": (0.3 * rng.standard_normal((300, 1, 512))).astype(BF16),
        "indices": rng.integers(-1, 300, (40, 1, 128)).astype(np.int32),
    }


def host(tensor):
    return to_float(dlpack.borrow(tensor.cpu()))


@pytest.fixture
def made(monkeypatch):
    """The tensors that torch has allocated beside another one."""
    tensors, new_empty = [], torch.Tensor.new_empty

    def recorded(*args, **keywords):
        tensors.append(new_empty(*args, **keywords))
        return tensors[-1]

    monkeypatch.setattr(torch.Tensor, "new_empty", recorded)
    return tensors


def is_among(tensor, tensors):
    return any(tensor is other for other in tensors)


@pytest.mark.parametrize("kind", WIDTHS)
def test_torch_allocates_the_results_of_decode(kind, made):
    contents = Contents(kind, 0)
    out, lse = decode(contents.tensors("cpu"), flash_mla.get_mla_metadata()[0])
    assert is_among(out, made)
    assert is_among(lse, made)
    assert_decode(host(out), host(lse), *map(to_float, contents.want()))


def test_torch_allocates_the_results_of_prefill(made):
    tensors = {name: dlpack.give(array, "torch") for name, array in prefill_arrays(0).items()}
    assert all(is_among(tensor, made) for tensor in prefill(tensors))
    given = torch.empty(40, HEADS, 512, dtype=torch.bfloat16)
    out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(*tensors.values(), 0.05, out=given)
    assert out is given
    assert is_among(max_logits, made)
    assert is_among(lse, made)


@pytest.mark.parametrize("plan", ["tile_scheduler_metadata", "dense"])
def test_torch_allocates_the_memory_of_a_schedule(plan, made):
    workspace, like = getattr(flash_mla.FlashMLASchedMeta(), plan).workspace, np.zeros(1, np.uint8)
    workspace.array("without a tensor", 8, np.int32, like)
    assert not made
    token = flash_mla._tensor.set(torch.zeros(1))
    try:
        array = workspace.array("with one", 8, np.int32, like)
    finally:
        flash_mla._tensor.reset(token)
    assert array.nbytes == 32
    assert [tensor.nbytes for tensor in made] == [32]
    assert array.ctypes.data == made[0].data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["of an eager call", "of the graph", "a plan of the graph"])
@pytest.mark.parametrize("kind", WIDTHS)
@pytest.mark.nowhere(when=lambda x: x.get("kind") == "dense" and x.get("schedule") == "a plan of the graph")
def test_decode_is_captured_and_replayed_with_other_contents(kind, schedule):
    """Layers of a step share a schedule; a replay plans anew, for the lengths of the time."""
    first, second = Contents(kind, 1), Contents(kind, 2)
    tensors = first.tensors("cuda")
    before, _ = flash_mla.get_mla_metadata()
    decode(tensors, before)  # compiles, and tests what it compiled
    torch.cuda.synchronize()
    used = {"of an eager call": before, "of the graph": flash_mla.get_mla_metadata()[0]}.get(schedule, DecodePlan())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [decode(tensors, used) for _ in range(LAYERS)]
    for contents in (first, second, first):
        for name, tensor in contents.tensors("cuda").items():
            tensors[name].copy_(tensor)
        for out, lse in results:
            out.fill_(float("nan"))
            lse.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for out, lse in results:
            assert_decode(host(out), host(lse), *map(to_float, contents.want()))
    if isinstance(used, flash_mla.FlashMLASchedMeta):  # goes on outside of the graph
        out, lse = decode(tensors, used)
        assert_decode(host(out), host(lse), *map(to_float, first.want()))


@pytest.mark.gpu
def test_prefill_is_captured_and_replayed_with_other_contents():
    def put(seed):
        return {name: dlpack.give(array, "torch").cuda() for name, array in prefill_arrays(seed).items()}

    tensors = put(1)
    prefill(tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = prefill(tensors)
    for seed in (1, 2):
        for name, tensor in put(seed).items():
            tensors[name].copy_(tensor)
        for tensor in results:
            tensor.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        a = prefill_arrays(seed)
        want = cumla.sparse_mla_prefill(a["q"], a["kv"], a["indices"], softmax_scale=0.05, backend="reference")
        largest = float(np.abs(to_float(a["kv"])).max())
        assert_prefill(*map(host, results), *map(to_float, want), largest=max(largest, 1.0))

"""The peers' own modules, under our names: their recorded inputs, given as their callers give them."""

import inspect

import numpy as np
import pytest
from errors.test_nonsense import NONSENSE

import cumla
from cumla.arrays import dlpack
from cumla.interop import flash_mla, vllm
from cumla.metadata import DeepseekSparseSWAMetadataBuilder, ServingConfig
from cumla.metadata.batch import CommonAttentionMetadata
from support import golden
from support.attention import make_cache, make_indices, make_q
from support.bounds import assert_decode, assert_prefill
from support.lab import BF16, to_float
from support.refused import EITHER, refused

FRAMEWORKS = ["numpy", "torch", pytest.param("torch-cuda", marks=pytest.mark.gpu)]


class Stack:
    """A caller's arrays."""

    def __init__(self, name):
        self.name = name
        if name != "numpy":
            pytest.importorskip("torch")

    def put(self, array):
        if not isinstance(array, np.ndarray) or self.name == "numpy":
            return array
        tensor = dlpack.give(array, "torch")
        return tensor.cuda() if self.name == "torch-cuda" else tensor

    def get(self, array):
        return dlpack.borrow(array if self.name == "numpy" else array.cpu())


@pytest.fixture(params=FRAMEWORKS)
def stack(request):
    return Stack(request.param)


def cases(*functions):
    return [pytest.param(f, n, id=f"{f}-{n}") for f in functions for n in golden.cases(f)]


def bf16(array):
    return array.view(BF16)


def with_head_axis(pages, block_size, width=584):
    """A cache as FlashMLA has it, [num_blocks, block_size, 1, bytes], over pages that may be longer."""
    if pages.ndim == 2:
        pages = pages[:, : block_size * width].reshape(len(pages), block_size, width)
    return pages[:, :, None]


class TestSignatures:
    """Every way to pass the arguments, by position or by name."""

    @pytest.mark.parametrize(
        ("function", "names"),
        [
            (
                flash_mla.flash_mla_with_kvcache,
                "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata num_splits softmax_scale "
                "causal is_fp8_kvcache indices attn_sink extra_k_cache extra_indices_in_kvcache topk_length "
                "extra_topk_length out",
            ),
            (flash_mla.flash_mla_sparse_fwd, "q kv indices sm_scale d_v attn_sink topk_length out"),
            (vllm.quantize_and_insert_k_cache, "k k_cache slot_mapping block_size is_ue8m0 use_fnuz"),
            (
                vllm.dequantize_and_gather_k_cache,
                "out k_cache seq_lens gather_lens block_table block_size offset use_fnuz",
            ),
            (
                vllm.compute_global_topk_indices_and_lens,
                "topk_indices token_to_req_indices block_table block_size is_valid_token",
            ),
            (
                vllm.combine_topk_swa_indices,
                "topk_indices query_start_loc seq_lens gather_lens window_size compress_ratio topk M N",
            ),
            (
                vllm.build_flashinfer_mixed_sparse_indices,
                "decode_swa_indices decode_compressed_indices decode_compressed_topk_lens prefill_topk_indices "
                "query_start_loc seq_lens token_to_req_indices swa_block_table swa_block_size compressed_block_table "
                "compressed_block_size window_size compress_ratio topk decode_compressed_indices_are_local "
                "decode_is_valid_token swa_block_span compressed_block_span",
            ),
        ],
    )
    def test_positions_and_names(self, function, names):
        parameters = inspect.signature(function).parameters.values()
        assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == names.split()


@pytest.mark.parametrize(("function", "number"), cases("sparse_decode_dsv4", "sparse_decode_v32"))
def test_sparse_decode(function, number, stack):
    data = golden.case(function, number)
    size = data["block_size"]
    cache = data["k_cache"] if data["k_cache"].ndim == 2 else data["k_cache"][:, :size]
    extra = {}
    if "extra_k_cache" in data:
        extra = {
            "extra_k_cache": stack.put(with_head_axis(data["extra_k_cache"], data["extra_block_size"])),
            "extra_indices_in_kvcache": stack.put(data["extra_indices"]),
            "extra_topk_length": stack.put(data["extra_topk_length"]),
        }
    optional = {name: stack.put(data[name]) for name in ("attn_sink", "topk_length") if name in data}
    schedule, nothing = flash_mla.get_mla_metadata("whatever", older="versions took")
    assert nothing is None
    arguments = stack.put(bf16(data["q"])), stack.put(with_head_axis(cache, size)), None, None, 512, schedule
    keywords = {
        "softmax_scale": data["sm_scale"], "is_fp8_kvcache": True, "indices": stack.put(data["indices"]),
        **optional, **extra,
    }  # fmt: skip
    out, lse = flash_mla.flash_mla_with_kvcache(*arguments, **keywords)
    want_out, want_lse = to_float(bf16(data["out"])), to_float(data["lse"])
    assert_decode(to_float(stack.get(out)), to_float(stack.get(lse)), want_out, want_lse)

    assert schedule.have_initialized
    again = stack.put(np.zeros(want_out.shape, BF16))
    result, _ = flash_mla.flash_mla_with_kvcache(*arguments, **keywords, out=again)
    assert result is again
    assert stack.get(again).tobytes() == stack.get(out).tobytes()


@pytest.mark.parametrize("compressed", [cumla.DSV41_FP4, cumla.DSV41_FP8], ids=str)
def test_sparse_decode_of_v41(rng, stack, compressed):
    """Formats are inferred from the last axes: 528 bytes have UE8M0 scales in the row, and the second may be 288."""
    window, q = make_cache(rng, cumla.DSV41_FP8, 3, 8), make_q(rng, 2, 2, 3, cumla.DSV41_FP8)
    extra, sink = make_cache(rng, compressed, 2, 16), np.linspace(-2, 2, 3, dtype=np.float32)
    lists, lengths = make_indices(rng, 2, 4, 20, 24), np.array([20, 7], np.int32)
    listed, more = np.ascontiguousarray(lists[:, :2]), np.ascontiguousarray(lists[:, 2:])
    want, want_lse = cumla.sparse_mla_decode(
        q, window, listed, layout=cumla.DSV41_FP8, topk_length=lengths, extra_k_cache=extra, extra_indices=more,
        extra_layout=compressed, attn_sink=sink, backend="reference",
    )  # fmt: skip
    out, lse = flash_mla.flash_mla_with_kvcache(
        stack.put(q), stack.put(window[:, :, None]), None, None, 512, flash_mla.get_mla_metadata()[0],
        is_fp8_kvcache=True, indices=stack.put(listed), topk_length=stack.put(lengths), attn_sink=stack.put(sink),
        extra_k_cache=stack.put(extra[:, :, None]), extra_indices_in_kvcache=stack.put(more),
    )  # fmt: skip
    assert_decode(to_float(stack.get(out)), to_float(stack.get(lse)), to_float(want), want_lse)


@pytest.mark.parametrize(("function", "number"), cases("sparse_prefill"))
def test_sparse_prefill(function, number, stack):
    data = golden.case(function, number)
    optional = {name: stack.put(data[name]) for name in ("attn_sink", "topk_length") if name in data}
    arguments = stack.put(bf16(data["q"])), stack.put(bf16(data["kv"])), stack.put(data["indices"]), data["sm_scale"]
    results = flash_mla.flash_mla_sparse_fwd(*arguments, **optional)
    got = [to_float(stack.get(x)) for x in results]
    want = to_float(bf16(data["out"])), to_float(data["max_logits"]), to_float(data["lse"])
    assert_prefill(*got, *want, rounded_sides=2)
    given = stack.put(np.zeros(want[0].shape, BF16))
    out, _, _ = flash_mla.flash_mla_sparse_fwd(*arguments, **optional, out=given)
    assert out is given
    assert stack.get(out).tobytes() == stack.get(results[0]).tobytes()


def dense_case(rng, causal):
    batch, s_q, heads, block, columns = 3, 2, 4, 16, 4
    lens = np.array([37, 0, 64], np.int32)
    table = rng.permutation(batch * columns).reshape(batch, columns).astype(np.int32)
    cache = (rng.standard_normal((batch * columns, block, 1, 576)) / 10).astype(BF16)
    q = (rng.standard_normal((batch, s_q, heads, 576)) / 10).astype(BF16)
    out, lse = np.zeros((batch, s_q, heads, 512)), np.full((batch, heads, s_q), np.inf)
    for b in range(batch):
        keys = to_float(cache[table[b]]).reshape(-1, 576)
        for i in range(s_q):
            seen = keys[: max(lens[b] - (s_q - 1 - i if causal else 0), 0)]
            if len(seen):
                logits = to_float(q[b, i]) @ seen.T * 576**-0.5
                top = logits.max(axis=1, keepdims=True)
                weights = np.exp(logits - top)
                out[b, i] = weights @ seen[:, :512] / weights.sum(axis=1, keepdims=True)
                lse[b, :, i] = top[:, 0] + np.log(weights.sum(axis=1))
    return q, cache, table, lens, out, lse


@pytest.mark.parametrize("causal", [False, True])
def test_dense_decode(causal, stack, rng):
    q, cache, table, lens, want_out, want_lse = dense_case(rng, causal)
    schedule, _ = flash_mla.get_mla_metadata()
    out, lse = flash_mla.flash_mla_with_kvcache(
        *(stack.put(x) for x in (q, cache, table, lens)), 512, schedule, causal=causal
    )
    assert_decode(to_float(stack.get(out)), to_float(stack.get(lse)), want_out, want_lse)


def sparse_arguments(**changes):
    arguments = {
        "q": np.ones((2, 1, 3, 512), BF16), "k_cache": np.zeros((2, 4, 1, 584), np.uint8), "block_table": None,
        "cache_seqlens": None, "head_dim_v": 512, "tile_scheduler_metadata": flash_mla.get_mla_metadata()[0],
        "is_fp8_kvcache": True, "indices": np.zeros((2, 1, 4), np.int32),
    }  # fmt: skip
    return {**arguments, **changes}


def insert_arguments():
    return {
        "k": np.ones((3, 512), BF16), "k_cache": np.zeros((2, 4, 584), np.uint8), "slot_mapping": np.arange(3),
        "block_size": 4, "is_ue8m0": True, "use_fnuz": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"tile_scheduler_metadata": None}, TypeError, "tile_scheduler_metadata: got NoneType, expected a Flash"),
        ({"num_splits": 3}, ValueError, "num_splits: got a value, expected None"),
        ({"head_dim_v": 256}, ValueError, "head_dim_v: got 256, expected 512"),
        ({"causal": True}, ValueError, "causal: got True, expected False with indices"),
        ({"is_fp8_kvcache": False}, ValueError, "is_fp8_kvcache: got False with a k_cache of uint8"),
        ({"k_cache": np.zeros((2, 4, 584), np.uint8)}, ValueError, r"k_cache: got shape \(2, 4, 584\), expected 4 "),
        ({"k_cache": np.zeros((2, 4, 2, 584), np.uint8)}, ValueError, "k_cache: got 2 heads, expected 1"),
        (
            {"indices": None, "attn_sink": np.zeros(3, np.float32)}, ValueError,
            "attn_sink: got an array, expected None without indices",
        ),
        ({"indices": None}, ValueError, "block_table: got None, expected an array without indices"),
    ],
)  # fmt: skip
def test_wrong_arguments(changes, error, text):
    with pytest.raises(error, match=text):
        flash_mla.flash_mla_with_kvcache(**sparse_arguments(**changes))


def sparse_prefill_arguments():
    return {
        "q": np.ones((2, 3, 512), BF16), "kv": np.ones((5, 1, 512), BF16), "indices": np.zeros((2, 1, 4), np.int32),
        "sm_scale": 0.1, "d_v": 512, "attn_sink": np.zeros(3, np.float32), "topk_length": np.ones(2, np.int32),
        "out": np.ones((2, 3, 512), BF16),
    }  # fmt: skip


@pytest.mark.parametrize("what", NONSENSE)
@pytest.mark.parametrize(
    ("function", "arguments", "unused"),
    [
        (flash_mla.flash_mla_with_kvcache, sparse_arguments, ("block_table", "cache_seqlens")),
        (flash_mla.flash_mla_sparse_fwd, sparse_prefill_arguments, ()),
        (vllm.quantize_and_insert_k_cache, insert_arguments, ()),
    ],
    ids=["decode", "prefill", "insert"],
)
def test_nonsense(function, arguments, unused, what):
    """As for cumla's own functions: an error that names the argument, in a short message."""
    for name in inspect.signature(function).parameters:
        looks_right = what == "a fraction" and name in ("softmax_scale", "sm_scale")
        looks_right |= what == "True" and name in ("is_fp8_kvcache", "is_ue8m0", "early_release")
        if name in unused or looks_right:
            continue
        given = {**arguments(), name: NONSENSE[what]}
        with refused(EITHER, rf"\b{name}\b", [given]):
            function(**given)


def test_plans_of_metadata_are_schedules(rng):
    """A builder's plan for a step's sparse decodes is refused for dense decodes."""
    config = ServingConfig(max_num_batched_tokens=8, max_num_seqs=4, max_model_len=128)
    lens, starts = np.array([5, 6], np.int32), np.arange(3, dtype=np.int32)
    batch = CommonAttentionMetadata(starts, starts, lens, lens, lens - 1, 2, 2, 1, np.zeros((2, 2), np.int32), lens - 1)
    plan = DeepseekSparseSWAMetadataBuilder(config).build(0, batch).tile_sched_swaonly
    want, _ = flash_mla.flash_mla_with_kvcache(**sparse_arguments())
    out, _ = flash_mla.flash_mla_with_kvcache(**sparse_arguments(tile_scheduler_metadata=plan))
    np.testing.assert_array_equal(out, want)
    q, cache, table, lens, *_ = dense_case(rng, causal=False)
    with pytest.raises(TypeError, match="tile_scheduler_metadata: got DecodePlan, expected a FlashMLASchedMeta"):
        flash_mla.flash_mla_with_kvcache(q, cache, table, lens, 512, plan)


def test_a_schedule_is_for_one_shape():
    schedule, _ = flash_mla.get_mla_metadata()
    flash_mla.flash_mla_with_kvcache(**sparse_arguments(tile_scheduler_metadata=schedule))
    wider = sparse_arguments(tile_scheduler_metadata=schedule, indices=np.zeros((2, 1, 8), np.int32))
    with pytest.raises(ValueError, match="tile_scheduler_metadata: got a schedule built for topk = 4, expected 8"):
        flash_mla.flash_mla_with_kvcache(**wider)


@pytest.mark.parametrize(("function", "number"), cases("quantize_and_insert_k_cache"))
def test_vllm_insert(function, number, stack):
    data = golden.case(function, number)
    cache = stack.put(data["cache_before"])
    vllm.quantize_and_insert_k_cache(
        stack.put(bf16(data["k"])), cache, stack.put(data["slot_mapping"]), data["block_size"], True, False
    )
    np.testing.assert_array_equal(stack.get(cache), data["cache_after"])


@pytest.mark.parametrize(("function", "number"), cases("dequantize_and_gather_k_cache"))
def test_vllm_gather(function, number, stack):
    data = golden.case(function, number)
    out = stack.put(np.full(data["out"].shape, 7, BF16))
    gather_lens = data["gather_lens"] if data["gather_lens"].size else None
    vllm.dequantize_and_gather_k_cache(
        out, stack.put(data["k_cache"]), stack.put(data["seq_lens"]), stack.put(gather_lens),
        stack.put(data["block_table"]), data["block_size"], data["offset"],
    )  # fmt: skip
    np.testing.assert_array_equal(stack.get(out).view(np.uint16), data["out"])


@pytest.mark.parametrize(
    ("function", "number"),
    cases("compute_global_topk_indices_and_lens", "combine_topk_swa_indices", "build_flashinfer_mixed_sparse_indices"),
)
def test_vllm_index_maps(function, number, stack):
    data = golden.case(function, number)
    if "local" in data:
        data["decode_compressed_indices_are_local"] = data["local"]
    call = getattr(vllm, function)
    names = [p.name for p in inspect.signature(call).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    results = call(*(stack.put(data[name]) for name in names if name in data))
    wanted = [value for name, value in data.items() if name.split("_")[0] in ("global", "combined")]
    wanted += [data[name] for name in ("topk_lens", "sparse_indices", "sparse_topk_lens") if name in data]
    for got, want in zip(results, wanted, strict=True):
        np.testing.assert_array_equal(stack.get(got), want)


def test_vllm_has_no_fnuz():
    with pytest.raises(ValueError, match="use_fnuz: got True, expected False"):
        vllm.quantize_and_insert_k_cache(None, None, None, use_fnuz=True)
    with pytest.raises(ValueError, match="use_fnuz: got True, expected False"):
        vllm.dequantize_and_gather_k_cache(None, None, None, None, None, 64, 0, use_fnuz=True)


def test_import_of_one_name_is_all_that_changes():
    """The functions that are cumla's own are the same objects."""
    for name in ("combine_topk_swa_indices", "build_flashinfer_mixed_sparse_indices"):
        assert getattr(vllm, name) is getattr(cumla, name)

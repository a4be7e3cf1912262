"""`cumla.debug`: wrong values are errors that name what and where."""

import contextlib
import copy
import inspect
import pathlib
import re
import runpy
import typing
from dataclasses import replace

import numpy as np
import pytest
from metadata.batches import make_batch

import cumla
from cumla.dispatch.backends import kernels
from cumla.dispatch.debug_checks import check_of
from cumla.kernels.types.shard import Shard
from cumla.layers.selection import IndexerInputs, select_rows
from cumla.layers.sparse import SparseMLALayer
from cumla.metadata import DeepseekSparseSWAMetadataBuilder, DeepseekV32IndexerMetadataBuilder, ServingConfig
from cumla.ops.shards import local_slot_mapping, localise_indices
from cumla.replay.engine import Engine
from cumla.replay.options import ReplayOptions, parse_layers
from cumla.replay.trace import TraceRequest
from cumla.specs import SPECS
from cumla.specs.inputs import Inputs
from support.calls import call
from support.lab import BF16, lab_of
from support.operations import rebuilt

BLOCK = 8
OPERATIONS = runpy.run_path(str(pathlib.Path(__file__).parents[2] / "tools/seam.py"))["operations"]()
CONFIG = ServingConfig(
    window_size=16, compress_ratios=(1, 4), block_size=BLOCK, compressed_block_size=BLOCK, max_num_batched_tokens=96,
    max_num_seqs=16, max_model_len=512, num_sms=7,
)  # fmt: skip


@pytest.fixture(
    params=["reference", "cpu", pytest.param("cuda", id="emulated"), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def place(request):
    yield from lab_of(request)


def put(place, value):
    if isinstance(value, (tuple, list)):
        return rebuilt(value, [put(place, x) for x in value])
    return place.put(value) if isinstance(value, np.ndarray) else value


def changed(at, value):
    """The valid array with one value changed."""

    def change(x):
        x = x.copy()
        x[at] = value
        return x

    return change


def filled(value):
    return lambda x: np.full_like(x, value)


def cycle(*values):
    return lambda x: np.resize(np.array(values, x.dtype), x.shape)


def of(value):
    return lambda x: value


def every_fourth_absent(slots):
    return np.where(np.arange(len(slots)) % 4, np.arange(len(slots)), -1)


THIRD_SLOTS = {"indices": filled(3), "extra_indices": filled(3)}
FIRST_ROWS = {"decode_compressed_indices": filled(0), "prefill_topk_indices": filled(0)}

# By example: valid arguments, arguments that fail in debug mode, and the message.
WRONG = [
    ("quantize_and_insert_k_cache-V32_FP8", {}, {"slot_mapping": changed(1, 10**6)},
     r"slot_mapping: row 1 has slot 1000000, expected -1 or 0 to \d+"),
    ("quantize_and_insert_k_cache-V32_FP8", {}, {"slot_mapping": changed(1, -2)}, "slot_mapping: row 1 has slot -2"),
    ("quantize_and_insert_k_cache-V32_FP8", {}, {"slot_mapping": lambda x: changed(2, x[1])(x)},
     "slot_mapping: row 1 and row 2 both have slot"),
    ("indexer_k_quant_and_cache", {}, {"slot_mapping": changed(0, 10**6)}, "slot_mapping: row 0 has slot 1000000"),
    ("concat_and_cache_mla-bfloat16", {}, {"slot_mapping": changed(0, 10**6)}, "slot_mapping: row 0 has slot 1000000"),
    ("qnorm_rope_and_insert-DSV4_FP8", {}, {"slot_mapping": changed(1, 10**6)},
     r"slot_mapping: row 1 \(position \d+\) has slot 1000000"),
    ("indexer_knorm_rope_and_insert-INDEXER_FP8", {}, {"slot_mapping": changed(1, 10**6)},
     r"slot_mapping: row 1 \(position \d+\) has slot 1000000"),
    ("compress_and_insert-DSV4_FP8", {}, {"slot_mapping": changed(0, 10**6)},
     r"slot_mapping of k_cache: row 0 \(request \d+, position \d+\) has slot 1000000"),
    ("compress_and_insert-DSV4_FP8", {}, {"state_slot_mapping": changed(0, 10**6)},
     r"state_slot_mapping of state_cache: row 0 \(request \d+, position \d+\) has slot 1000000"),
    ("compress_and_insert-DSV4_FP8", {}, {"state_block_table": filled(10**6)},
     r"state_block_table: request \d+ has page 1000000 for position \d+ \(column \d+\), expected 0 to \d+"),
    ("compress_and_insert-DSV4_FP8", {}, {"token_to_req_indices": changed(0, 99)},
     r"token_to_req_indices: token 0 is of request 99, expected 0 to \d+"),
    ("dequantize_and_gather_k_cache-V32_FP8", {}, {"block_table": changed((1, 0), 10**6)},
     r"block_table: request 1 has page 1000000 for position \d+ \(column 0\), expected 0 to \d+"),
    ("dequantize_and_gather_k_cache-V32_FP8", {}, {"seq_lens": changed(1, 10**6)},
     r"block_table: request 1 has positions \d+ to 999999, but \d+ columns of \d+ cover \d+"),
    ("cp_gather_indexer_k_quant_cache", {}, {"block_table": changed((0, 0), -1)},
     r"block_table: request 0 has page -1 for position 0 \(column 0\)"),
    ("gather_cache-bfloat16", {}, {"block_table": filled(10**6)}, r"block_table: request \d+ has page 1000000"),
    ("dense_mla_decode-bfloat16", {"block_table": filled(1), "softmax_scale": of(0.1)},
     {"block_table": changed((0, 0), 99)},
     r"block_table: request 0 has page 99 for position 0 \(column 0\), expected 0 to \d+"),
    ("candidate_topk", {"candidate_blocks": filled(-1)}, {"block_table": filled(10**6)},
     r"block_table: request \d+ has page 1000000"),
    ("candidate_topk", {"candidate_blocks": changed(slice(2, 6), -1)}, {"candidate_blocks": changed((2, 1), 99)},
     r"candidate_blocks: row 2 has block 99, expected -1 or 0 to 0"),
    ("fp8_paged_mqa_logits", {}, {"block_table": filled(10**6)}, r"block_table: request \d+ has page 1000000"),
    ("indexer_topk", {}, {"block_table": changed((1, 0), 10**6)},
     r"block_table: request 1 has page 1000000 for position 0"),
    ("sparse_mla_decode-V32_FP8", {"indices": filled(3)}, {"indices": changed((0, 1, 1), 10**6)},
     r"indices: query 1 of request 0, entry 1: got 1000000, expected -1 or 0 to \d+"),
    ("sparse_mla_decode-DSV4_FP8-two-caches", {"indices": filled(3), "extra_indices": filled(3)},
     {"extra_indices": changed((0, 0, 0), -2)}, "extra_indices: query .*0, entry 0: got -2"),
    ("sparse_mla_prefill-512", {"indices": filled(3)}, {"indices": changed((2, 0), 10**6)},
     r"indices: query 2, entry 0: got 1000000, expected -1 or 0 to \d+"),
    ("compute_swa_indices_and_lens", {}, {"token_to_req_indices": changed(0, 99)},
     r"token_to_req_indices: token 0 is of request 99, expected 0 to \d+"),
    ("compute_swa_indices_and_lens", {}, {"block_table": filled(-1)},
     r"block_table: request \d+ has page -1 for position \d+"),
    ("compute_global_topk_indices_and_lens", {"topk_indices": filled(3), "block_table": filled(2)},
     {"topk_indices": changed((0, 1), 10**6)},
     r"topk_indices: token 0, entry 1: got 1000000, expected -1 or 0 to \d+"),
    ("compute_global_topk_indices_and_lens", {"topk_indices": filled(3), "block_table": filled(2)},
     {"block_table": filled(-1)}, r"block_table: request \d+ has page -1 for row 3 \(column \d+\), which entry 0 of "
     r"token \d+ in topk_indices selects"),
    ("combine_topk_swa_indices", {"topk_indices": filled(0)}, {"topk_indices": filled(-2)},
     r"topk_indices: token \d+, entry 0: got -2, expected -1 or 0 to \d+"),
    ("build_flashinfer_mixed_sparse_indices", FIRST_ROWS, {"decode_compressed_indices": filled(10**6)},
     r"decode_compressed_indices: token \d+, entry 0: got 1000000"),
    ("swap_blocks", {"src_to_dst": filled(0)}, {"src_to_dst": changed((1, 1), 99)},
     "src_to_dst: pair 1 has 99 as its second block, expected -1 or 0 to"),
    ("advance_step", {"seq_lens": filled(1), "block_tables": filled(0)}, {"seq_lens": changed(1, 10**6)},
     "block_tables: request 1 has positions 1000000 to 1000000, but"),
    *(("sparse_mla_decode-DSV4_FP8-two-caches", THIRD_SLOTS, {name: change}, text) for name, change, text in (
        ("topk_length", changed(1, 900), r"topk_length: query 0 of request 1 has 900, expected 0 to \d+"),
        ("topk_length", changed(0, -1), "topk_length: query 0 of request 0 has -1, expected 0 to"),
        ("extra_topk_length", changed((0, 1), 900), "extra_topk_length: query 1 of request 0 has 900"),
        ("softmax_scale", of(512**0.5),
         r"softmax_scale: got 22.6274, expected more than 0 and at most 0.199, 4.5 / sqrt\(512\)"),
        ("softmax_scale", of(0.0), "softmax_scale: got 0, expected more than 0"),
        ("softmax_scale", of(-0.05), "softmax_scale: got -0.05, expected more than 0"),
    )),
    ("sparse_mla_prefill-512", {"indices": filled(3)}, {"topk_length": changed(2, 900)},
     r"topk_length: query 2 has 900, expected 0 to \d+"),
    ("sparse_mla_prefill-576", {"indices": filled(3)}, {"softmax_scale": of(0.2)},
     r"softmax_scale: got 0.2, expected more than 0 and at most 0.188, 4.5 / sqrt\(576\)"),
    ("dense_mla_decode-bfloat16", {"block_table": filled(1), "softmax_scale": of(0.18)}, {"softmax_scale": of(0.19)},
     "softmax_scale: got 0.19"),
    ("dense_mla_decode-bfloat16", {"block_table": filled(1), "softmax_scale": of(0.1)},
     {"cache_seqlens": changed(1, -4)},
     "cache_seqlens: request 1 has -4, expected at least 0"),
    ("mha_varlen-causal", {}, {"softmax_scale": of(14.0)}, "softmax_scale: got 14"),
    ("mha_varlen-causal", {}, {"cu_seqlens_k": changed(-1, 9**9)}, r"cu_seqlens_k: entry \d+ has 387420489, expected"),
    ("mha_varlen-causal", {}, {"cu_seqlens_q": changed(slice(1, 3), [2, 1])}, "cu_seqlens_q: entry 2 has 1 after 2"),
    ("fused_indexer_q_rope_quant-not-quantised", {"positions": filled(6)}, {"positions": changed(1, 900)},
     r"positions: token 1 has 900, expected 0 to \d+, a row of index_q_cos_sin_cache, or -1 for padding"),
    ("fused_indexer_q_rope_quant-not-quantised", {"positions": filled(6)}, {"index_weights_softmax_scale": of(0.0)},
     r"index_weights_softmax_scale \* index_weights_head_scale: got 0, expected more than 0"),
    *((name, {"positions": cycle(-1, 0, 5, 3)} | sound, {"positions": change}, text)
      for name, sound in (
          ("apply_rope", {}), ("inverse_rope_and_quantize-scales", {}),
          *((f"{op}-{layout}", {"slot_mapping": every_fourth_absent}) for op, layout in (
              ("qnorm_rope_and_insert", "DSV4_FP8"), ("norm_rope_and_insert", "DSV41_FP4"),
              ("indexer_knorm_rope_and_insert", "INDEXER_FP8"),
          )),
      )
      for change, text in (
          (changed(1, 900), r"positions: token 1 has 900, expected 0 to \d+, a row of cos_sin_cache"),
          (changed(2, -5), "positions: token 2 has -5"),
          *([(changed(3, -1), r"positions: token 3 has -1, expected 0 to \d+, a row of \w+$")] if sound else []),
    )),
    ("compress_and_insert-DSV4_FP8", {}, {"positions": changed(5, 900)}, "positions: token 5 has 900, expected 0 to"),
    ("dequantize_and_gather_k_cache-V32_FP8", {}, {"gather_lens": filled(99)},
     r"gather_lens: request 0 has 99, expected 0 to \d+"),
    ("dequantize_and_gather_k_cache-V32_FP8", {}, {"gather_lens": changed(2, -1)}, "gather_lens: request 2 has -1"),
    ("dequantize_and_gather_k_cache-V32_FP8", {}, {"seq_lens": changed(1, -9)}, "seq_lens: request 1 has -9"),
    ("cp_gather_indexer_k_quant_cache", {}, {"cu_seq_lens": changed(-1, 900)},
     r"cu_seq_lens: entry \d+ has 900, expected 0 to \d+"),
    ("gather_cache-e4m3-one-scale", {}, {"cu_seq_lens": changed(slice(1, 3), [2, 1])},
     "cu_seq_lens: entry 2 has 1 after 2, expected ascending rows of dst"),
    ("gather_cache-e4m3-one-scale", {}, {"seq_starts": changed(0, -2)}, "seq_starts: request 0 has -2"),
    ("fp8_paged_mqa_logits", {}, {"context_lens": changed(1, 5000)},
     r"block_table: request 1 has positions 0 to 4999, but \d+ columns of \d+ cover \d+"),
    ("fp8_paged_mqa_logits", {}, {"context_lens": changed(2, -1)}, "context_lens: request 2 has -1, expected at least"),
    ("indexer_topk", {}, {"context_lens": changed(0, 900)}, "block_table: request 0 has positions 0 to 899, but"),
    ("candidate_topk", {"candidate_blocks": filled(-1)}, {"context_lens": changed(0, 900)},
     r"block_table: request 0 has positions 0 to 899, but \d+ columns of \d+ cover \d+"),
    ("get_paged_mqa_logits_metadata", {}, {"context_lens": changed(2, -7)}, "context_lens: request 2 has -7"),
    *(("fp8_mqa_logits", {"cu_seqlen_ks": filled(3), "cu_seqlen_ke": filled(9)}, {name: change}, text)
      for name, change, text in (
        ("cu_seqlen_ke", changed(1, 900), r"cu_seqlen_ke: query 1 has 900, expected 3 to \d+"),
        ("cu_seqlen_ke", changed(1, 2), "cu_seqlen_ke: query 1 has 2, expected 3 to"),
        ("cu_seqlen_ks", changed(-1, -1), r"cu_seqlen_ks: query \d+ has -1, expected 0 to"),
    )),
    *((name, {"row_ends": filled(9)}, wrong, text) for name, wrong, text in (
        ("top_k_per_row", {"row_ends": changed(2, 900)}, r"row_ends: row 2 has 900, expected 0 to \d+"),
        ("select_candidate_blocks", {"row_ends": changed(2, -1)}, "row_ends: row 2 has -1, expected 0 to"),
        ("apply_candidate_mask", {"row_ends": changed(2, 900)}, "row_ends: row 2 has 900"),
    )),
    ("combine_topk_swa_indices", {"topk_indices": filled(0)}, {"gather_lens": changed(1, 10**6)},
     r"gather_lens: request 1 has 1000000, expected 0 to \d+"),
    ("combine_topk_swa_indices", {"topk_indices": filled(0), "N": of(16), "compact": of(True)},
     {"topk_indices": filled(14)},
     r"topk_indices: token \d+ selects no complete row: entry 0 is 14, expected an entry among its rows 0 to \d+"),
    ("compute_global_topk_indices_and_lens",
     {"topk_indices": filled(3), "block_table": filled(2), "positions": of(np.full(9, 19, np.int32)),
      "compress_ratio": of(4)},
     {"topk_indices": filled(5)},
     "topk_indices: token 0 selects no complete row: entry 0 is 5, expected an entry among its rows 0 to 4"),
    ("build_flashinfer_mixed_sparse_indices", FIRST_ROWS, {"prefill_topk_indices": filled(19)},
     r"prefill_topk_indices: token \d+ selects no complete row"),
    ("build_flashinfer_mixed_sparse_indices",
     FIRST_ROWS | {"decode_compressed_topk_lens": of(np.array([6, 0], np.int32))},
     {"decode_compressed_topk_lens": changed(0, 900)}, "decode_compressed_topk_lens: token 0 has 900, expected 0 to"),
]  # fmt: skip


def written(place, arguments):
    arrays = [x for value in arguments.values() for x in (value if isinstance(value, (tuple, list)) else [value])]
    return [np.asarray(place.get(x)).tobytes() for x in arrays if hasattr(x, "strides")]


@pytest.mark.parametrize(("name", "sound", "wrong", "text"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_a_wrong_value_is_named(place, name, sound, wrong, text):
    right = call(name)
    arguments = dict(right.arguments)
    for changes in (sound, wrong):
        with cumla.debug() if changes is wrong else contextlib.nullcontext():
            arguments |= {key: change(arguments.get(key)) for key, change in changes.items()}
        given = {key: put(place, value) for key, value in arguments.items()} | {"backend": place.backend}
        if changes is sound:
            with cumla.debug():
                right.function(**given)
            continue
        before = written(place, given)
        with cumla.debug(), pytest.raises(ValueError, match=text):
            right.function(**given)
        assert written(place, given) == before
        right.function(**given)  # an operation accepts the value


SOUND = {"row_ends": 60, "cu_seqlen_ks": 0, "cu_seqlen_ke": 60, "softmax_scale": 0.1}
LENGTHS_AND_STARTS = [
    pytest.param(spec, name, id=f"{spec.name}-{name}")
    for spec in SPECS.values()
    for name, array in spec.arrays.items()
    if array.holds in ("lengths", "starts") and name != "schedule_metadata"  # which operations ignore
]


def every_choice(spec):
    """Arguments of an operation, with the first or another of the choices of Inputs."""
    for number in range(4):
        for variant in spec.variants:
            inputs = Inputs("reference")
            inputs.choose = lambda *choices, number=number: choices[number % len(choices)]
            yield variant.arguments(inputs)


@pytest.mark.parametrize(("spec", "name"), LENGTHS_AND_STARTS)
def test_every_length_and_start_is_checked(spec, name):
    """Of each operation: a negative one, and starts that descend, wherever they are."""
    right = next(x for x in every_choice(spec) if x.get(name) is not None)
    values = {other: {"entries": -1, "pages": 0}.get(array.holds) for other, array in spec.arrays.items()}
    for other, value in (values | SOUND).items():  # Inputs have wrong values, too
        if value is not None and right.get(other) is not None:
            right[other] = np.full_like(right[other], value) if hasattr(right[other], "dtype") else value
    right[name] = np.maximum(right[name], 0)
    right |= {"topk": 8} if right.get("topk") == 0 else {}
    with cumla.debug():
        spec.function(**copy.deepcopy(right), backend="cpu")
    is_start = spec.arrays[name].holds == "starts"
    # A start may make a query longer than its sequence.
    message = rf"^({name}|seq_lens): " if is_start else rf"^{name}: "
    for at in range(min(right[name].size, 20)):
        for value in (-2, -(2**31), *([10**6, 2**31 - 1] if is_start else [])):
            arguments = copy.deepcopy(right)
            arguments[name].flat[at] = value
            with cumla.debug(), pytest.raises(ValueError, match=message):
                spec.function(**arguments, backend="cpu")


def names_of(file, name):
    """The names of a kernel's arguments, including the fields of NamedTuples."""
    hints = typing.get_type_hints(getattr(kernels("reference", file), name))
    return set(hints) | {field for hint in hints.values() for field in getattr(hint, "_fields", ())}


def test_every_kernel_with_such_arguments_is_checked():
    """A new example must be listed, too: the others read no slots, tables or indices."""
    parameters = {name: names_of(file, name) for file, names in OPERATIONS.items() for name in names}
    checked = {
        "slot_mapping", "slots", "block_table", "block_tables", "indices", "topk_indices", "segments", "src_to_dst",
        "candidates", "positions", "seq_lens", "gather_lens", "context_lens", "topk_length", "cache_seqlens", "lens",
        "cu_seq_lens", "cu_seqlens_q", "starts", "rows", "softmax_scale",
    }  # fmt: skip
    reading = {name for name, of in parameters.items() if of & checked}
    have = {name for file, names in OPERATIONS.items() for name in names if check_of(file, name)}
    # Not checked: forwarded pages, outputs.
    ignoring = {"local_block_table", "build_indexer_chunk", "top_k_of_candidates"}
    assert reading - have == ignoring


def test_checks_read_arguments_that_kernels_have():
    """Without a call: an argument that was renamed would be missed only in debug mode."""
    for file, names in OPERATIONS.items():
        for name in names:
            if check := check_of(file, name):
                read = set(re.findall(r"\barguments\.(\w+)", inspect.getsource(check)))
                assert read <= names_of(file, name) | {"first"}, name


def test_requests_have_rings_of_their_own(place):
    """A chunk may be longer than its ring; padding has no ring."""

    def save(slots, positions, starts):
        state = np.zeros((3, 8, 1024), np.float32)
        tokens = len(slots)
        given = [
            np.zeros((tokens, 1024), np.float32),
            np.ones(512, np.float32),
            slots,
            np.zeros((tokens, 512), np.float32),
        ]
        pairs = {"positions": positions, "query_start_loc": np.array(starts, np.int32), "state_cache": state}
        cumla.compress_latents(
            *(place.put(np.asarray(x)) for x in given), compress_ratio=2, backend=place.backend,
            **{name: place.put(np.asarray(x)) for name, x in pairs.items()},
        )  # fmt: skip

    long = np.arange(10)
    with cumla.debug():
        save([*(8 + long % 8), 16, -1], [*long, 0, 0], [0, 10, 11])
        with pytest.raises(ValueError, match="slot_mapping: requests 0 and 1 both have ring 1, expected rings that"):
            save([*(8 + long % 8), 12], [*long, 4], [0, 10, 11])
        with pytest.raises(
            ValueError, match=r"row 1 \(position 5\) has slot 99, expected -1 or 0 to 23 with remainder 5"
        ):
            save([12, 99], [4, 5], [0, 2])
        with pytest.raises(ValueError, match=r"row 0 \(position 4\) has slot 3"):
            save([3, 4], [4, 4], [0, 2])


def test_pages_before_a_replay_may_be_absent(place):
    """Windows of replayed requests begin at replay_start; blocks of draft layers reach one position further back."""
    config = replace(CONFIG, window_size=12)
    batch = make_batch(place, [30, 44], [1, 20])
    table = place.get(batch.block_table_tensor).copy()
    size = config.block_size
    table[0, : 24 // size], table[1, : 24 // size] = -1, -1
    batch = replace(batch, block_table_tensor=place.put(table))
    builder = DeepseekSparseSWAMetadataBuilder(config, place.backend)
    with cumla.debug():
        with pytest.raises(ValueError, match="block_table_tensor: request 0 has page -1 for position"):
            builder.build(0, batch)
        builder.build(0, batch, replay_start=place.put(np.array([24, 24], np.int32)))
        with pytest.raises(ValueError, match="block_table_tensor: request 1 has page -1 for position 2"):
            builder.build(0, batch, replay_start=place.put(np.array([24, 23], np.int32)))
        with pytest.raises(ValueError, match="replay_start: request 1 has 25, expected at most 24, its first position"):
            builder.build(0, batch, replay_start=place.put(np.array([24, 25], np.int32)))
        blocks = DeepseekSparseSWAMetadataBuilder(replace(config, noncausal_decodes=True), place.backend)
        with pytest.raises(ValueError, match="block_table_tensor: request 0 has page -1 for position"):
            blocks.build(0, batch, replay_start=place.put(np.array([24, 24], np.int32)))


class TestRanks:
    shard = Shard(1, 2, 4)

    def test_slots(self, place):
        arrays = [place.put(np.array(x, np.int32)) for x in ([0, 2, 3], [9, 7])]
        for table, wrong in (([[0], [1]], False), ([[0], [-1]], True)):
            table = place.put(np.array(table, np.int32))
            with (
                cumla.debug(),
                pytest.raises(ValueError, match="block_table: request 1 has page -1 for position 2")
                if wrong else contextlib.nullcontext(),
            ):  # fmt: skip
                local_slot_mapping(*arrays, table, 8, self.shard, num_tokens=3, backend=place.backend)

    def test_indices(self, place):
        of_token = place.put(np.array([0, 1], np.int32))
        for table, wrong in (([[0], [1]], False), ([[0], [-1]], True)):
            table = place.put(np.array(table, np.int32))
            indices = place.put(np.array([[0, 4, -1], [13, 0, -1]], np.int32))
            with (
                cumla.debug(),
                pytest.raises(ValueError, match=r"block_table: request 1 has page -1 for row 5 .* entry 0 of token 1")
                if wrong else contextlib.nullcontext(),
            ):  # fmt: skip
                localise_indices(indices, of_token, table, 8, self.shard, backend=place.backend)


BUILDERS = [DeepseekSparseSWAMetadataBuilder, DeepseekV32IndexerMetadataBuilder]


@pytest.mark.parametrize("builder", BUILDERS)
class TestBuilders:
    def test_a_right_batch(self, place, builder):
        with cumla.debug():
            builder(CONFIG, place.backend).build(0, make_batch(place, [9, 30, 0], [1, 12, 0], padding=3))

    @pytest.mark.parametrize(("name", "value", "text"), [
        ("seq_lens_cpu", [9, 31], "seq_lens: request 1 has 30, but 31 in seq_lens_cpu"),
        ("query_start_loc_cpu", [0, 1, 12], "query_start_loc: request 2 has 13, but 12 in query_start_loc_cpu"),
    ])  # fmt: skip
    def test_lengths_that_differ(self, place, builder, name, value, text):
        batch = make_batch(place, [9, 30], [1, 12], num_computed_tokens_cpu=None, **{name: np.array(value, np.int32)})
        builder(CONFIG, place.backend).build(0, batch, validate=False)
        with cumla.debug(), pytest.raises(ValueError, match=text):
            builder(CONFIG, place.backend).build(0, batch, validate=False)

    def test_a_table_without_the_pages(self, place, builder):
        batch = make_batch(place, [9, 30], [1, 12], block_table_tensor=place.put(np.full((2, 5), -1, np.int32)))
        builder(CONFIG, place.backend).build(0, batch)
        with cumla.debug(), pytest.raises(ValueError, match=r"block_table.*: request 0 has page -1 for position 0"):
            builder(CONFIG, place.backend).build(0, batch)


def test_slots_of_a_batch(place):
    batch = make_batch(place, [9, 30], [1, 12], slot_mapping=place.put(np.zeros(13, np.int64)))
    with cumla.debug(), pytest.raises(ValueError, match="slot_mapping: row 0 and row 1 both have slot 0"):
        DeepseekSparseSWAMetadataBuilder(CONFIG, place.backend).build(0, batch)


def test_metadata_of_an_earlier_build(place, rng):
    """The window's table, passed to a layer, and the indexer's table, which selects rows."""
    batch = make_batch(place, [9, 30], [1, 1])
    window, indexer = (builder(CONFIG, place.backend) for builder in BUILDERS)
    early, early_indexer = window.build(0, batch), indexer.build(0, batch)
    late, late_indexer = window.build(0, batch), indexer.build(0, batch)
    q, k = (place.put(rng.standard_normal(shape).astype(BF16)) for shape in ((2, 3, 512), (2, 512)))
    cache = place.put(cumla.DSV4_FP8.allocate(10, BLOCK))
    step = SparseMLALayer().step
    with cumla.debug():
        step(q, k, cache, late, backend=place.backend)
        with pytest.raises(ValueError, match=r"metadata: got metadata of build 1 .* built 2 times, expected the last"):
            step(q, k, cache, early, backend=place.backend)
        inputs = IndexerInputs(None, None, None, early_indexer)
        with pytest.raises(ValueError, match=r"indexer\.metadata: got metadata of build 1 of its builder"):
            select_rows(inputs, None, None, None, None, None)
    assert late_indexer.build.number == 2
    step(q, k, cache, early, backend=place.backend)


@pytest.mark.slow
def test_an_engine_that_is_right():
    """Prefills, chunks, decodes, shared prefixes: layers of every kind, as the replay schedules them."""
    options = ReplayOptions(
        backend="cpu", layers=parse_layers("v4,v32,mla"), heads=2, window=32, topk=8, batch_tokens=100,
        cache_tokens=4096, max_len=None, seed=1,
    )  # fmt: skip
    requests = [TraceRequest(0.0, 130, 2, (0,)), TraceRequest(0.0, 40, 3, (1,)), TraceRequest(0.0, 7, 2, (2,))]
    with cumla.debug():
        assert len(list(Engine(options, requests).steps())) > 3

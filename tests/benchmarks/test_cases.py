"""The measured cases: inputs as in layers, checks, and the peers' arguments."""

import itertools

import any_operation
import cache_cases
import candidate_cases
import dense_cases
import index_cases
import indexer_inputs
import layer_cases
import numpy as np
import operations
import product_cases
import pytest
import recorded
import step_cases

from cumla.bench import caches, dense, indexer_cases, rows, sparse
from cumla.bench.problem import Problem, Sizes
from cumla.errors import RunError
from cumla.layout import DSV4_FP8, DSV41_FP4, DSV41_FP8, INDEXER_FP8, INDEXER_MXFP4, MLA_BF16, V32_FP8
from cumla.specs.measured import contexts, selected_rows, window_lists
from support import peers as stand_ins

SMALL = [
    sparse.Decode(DSV4_FP8, 64, 3, 1, 128, 64, 256, lengths=True, beside_ordinary=True),
    sparse.Decode(DSV4_FP8, 16, 3, 1, 128, 128, 256, 2, lengths=True, ratio=128),
    sparse.Decode(DSV4_FP8, 64, 3, 1, 128, lengths=True),
    sparse.Decode(V32_FP8, 64, 3, 1, 256, lengths=True),
    sparse.Decode(DSV4_FP8, 8, 2, 2, 64, 64),
    sparse.Decode(DSV41_FP8, 8, 3, 1, 128, 64, lengths=True, ratio=2),
    sparse.Decode(MLA_BF16, 34, 2, 1, 64),
    sparse.Prefill(512, 16, 256, 1024, 40, lengths=True),
    sparse.Prefill(512, 20, 256, 300, 40, lengths=True),
    sparse.Prefill(576, 64, 128, 512, 40, lengths=True),
    sparse.Prefill(512, 8, 128, 512, 5),
    caches.QueryNormInsert(70, 16),
    caches.Insert(70),
    caches.Insert(70, V32_FP8),
    caches.Insert(70, DSV41_FP4),
    caches.Insert(70, INDEXER_FP8),
    caches.Gather(3, 300, lengths=True),
    caches.Gather(2, 100),
    caches.Gather(2, 100, DSV41_FP4),
    caches.Insert(70, MLA_BF16),
    cache_cases.DenseGather(2, 100),
    cache_cases.KeyGather(2, 100),
    cache_cases.KeyGather(2, 100, INDEXER_MXFP4),
    caches.Insert(70, INDEXER_MXFP4),
    cache_cases.CopyBlocks(3),
    cache_cases.AdvanceStep(9),
    indexer_cases.Logits(20, 100, lengths=True),
    indexer_cases.Logits(3, 100),
    indexer_cases.PagedLogits(3, 500, lengths=True),
    indexer_cases.PagedLogits(2, 200, 2),
    indexer_cases.PagedLogits(2, 200, 2, heads=32, layout=INDEXER_MXFP4),
    indexer_cases.Choice("decode", 3, 800, 512, lengths=True),
    indexer_cases.Choice("prefill", 40, 800, 512, lengths=True),
    indexer_cases.Choice("decode", 40, 1200, 512),
    indexer_cases.Choice("decode", 3, 1200, 512, scores="99% zeros"),
    indexer_cases.Selection(indexer_cases.Logits(20, 100, lengths=True), 64),
    indexer_cases.Selection(indexer_cases.PagedLogits(3, 500, lengths=True), 64),
    candidate_cases.CandidateBlocks(3, 100, 5),
    candidate_cases.CandidateTopk(2, 200, 9),
    candidate_cases.CandidateTopk(2, 200, 9, layout=INDEXER_MXFP4),
    candidate_cases.CandidateSource(2, 200, 9),
    indexer_inputs.QueryQuant(9),
    indexer_inputs.QueryQuant(9, "mxfp4"),
    indexer_inputs.Schedule(5),
    dense.DenseDecode(16, 3, 300, lengths=True),
    dense.DenseDecode(16, 2, 128),
    dense_cases.DensePrefill(4, 40),
    dense_cases.DensePlan(3, 2, 200),
    dense_cases.DensePrefill(5, 20, 100),
    product_cases.BlockLinear(5, 200, 256),
    layer_cases.Compress(4, 9),
    layer_cases.Compress(128, 130),
    layer_cases.Compress(4, 41, prompt=True),
    layer_cases.CompressLatents(2, 9),
    layer_cases.CompressLatents(2, 12, 6),
    layer_cases.CompressLatents(1, 41, prompt=True),
    layer_cases.PooledKeys(9),
    layer_cases.PooledKeys(41, prompt=True),
    layer_cases.InverseRope(9, 4),
    layer_cases.Merge(9, 4),
    layer_cases.Merge(150, 2, 128),
    index_cases.Windows(9),
    index_cases.GlobalTopk(200, 16, lengths=True),
    index_cases.GlobalTopk(9, 16),
    index_cases.Combine(80, 16, lengths=True),
    index_cases.Combine(8, 16),
    index_cases.Mixed(60, 0, 16),
    index_cases.Mixed(0, 60, 16),
    step_cases.Build(step_cases.WINDOWS, 5, 1, 2, 20, 100, 60),
    step_cases.Build(step_cases.INDEXER, 5, 3),
]
UNREAD_BY_PEERS = (DSV41_FP8, DSV41_FP4, INDEXER_MXFP4)
WITHOUT_PEERS = {
    "quantize_and_insert_k_cache", "gather_cache", "cp_gather_indexer_k_quant_cache", "copy_blocks", "advance_step",
    "indexer_topk prefill", "indexer_topk decode", "fused_indexer_q_rope_quant", "mha_varlen", "compress_and_insert",
    "compress_latents", "indexer_kpool_and_insert", "apply_rope", "merge_attn_states", "compute_swa_indices_and_lens",
    "build_flashinfer_mixed_sparse_indices", step_cases.WINDOWS, step_cases.INDEXER, "select_candidate_blocks",
    "candidate_topk", "candidate_source", "dense_mla_decode, first layer",
}  # fmt: skip


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(rows, "call_times", lambda calls: [(call(), 3.0)[1] for call in calls] * 5)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: f"{case.op} {case}")
def test_cases_are_checked_and_so_are_their_peers(case, monkeypatch):
    """A peer gets arguments that it supports, and is timed only if it computes the same."""
    pytest.importorskip("torch")
    stand_ins.install(monkeypatch)
    monkeypatch.setattr(Sizes, "with_peers", True)
    problem = case.problem(Sizes("cpu"))
    found = list(rows.rows_of(problem, on_device=False))
    assert all((row["op"], row["config"]) == (case.op, str(case)) for row in found)
    assert all(row["limit_us"] > 0 and row["us"] == 3.0 for row in found)
    assert all(row["checked"] for row in found if row["impl"] not in problem.unchecked)
    unchecked = {
        indexer_inputs.Schedule: "deep_gemm", candidate_cases.CandidateTopk: "all positions",
        candidate_cases.CandidateSource: "without blocks", product_cases.BlockLinear: ("deep_gemm", "bfloat16"),
    }  # fmt: skip
    left_out = unchecked.get(type(case), "copy")
    assert problem.unchecked == (left_out if isinstance(left_out, tuple) else (left_out,))
    second = {
        "candidate_topk": "all positions",
        "candidate_source": "without blocks",
        "indexer_topk": "two steps",
        "fp8_block_linear": "bfloat16",
        "sparse_swa": "validate=False",
        "indexer": "validate=False",
    }
    impls = ["cumla", *filter(None, [second.get(case.op.split()[0].split(".")[0])])]
    assert [row["impl"] for row in found if "peer" not in row] == impls
    named = [row for row in found if "peer" in row]
    layout = getattr(case, "layout", None)
    alone = layout in UNREAD_BY_PEERS or (case.op == "sparse_mla_decode" and layout is MLA_BF16)
    assert len(named) == (case.op not in WITHOUT_PEERS and not alone)
    assert all("vLLM" in row["peer"] for row in named)


@pytest.mark.slow
@pytest.mark.parametrize("case", SMALL, ids=lambda case: f"{case.op} {case}")
def test_wrong_results_are_not_timed(case):
    """Every check rejects a result that is wrong everywhere."""
    problem = case.problem(Sizes("cpu"))
    result = problem.impls["cumla"][1][0]()
    if result is None:  # the operation writes in place: nothing has been written here
        problem = case.problem(Sizes("cpu"))
    if problem.clear is not None:
        problem.clear()
    spoil(result)
    with pytest.raises((AssertionError, RunError)):
        problem.check(result)


def spoil(result):
    if type(result).__name__.endswith("Metadata"):
        result = tuple(array for _, array in step_cases.fields_of(result))
    for array in result if isinstance(result, tuple) else [result]:
        if isinstance(array, np.ndarray):
            array.view(np.uint8)[...] = 0x41


RECORDED = {name: getattr(recorded, name)() for name in (*operations.FAMILIES, "interop")}


@pytest.mark.parametrize("cases", RECORDED.values(), ids=RECORDED)
def test_recorded_cases_have_names_of_their_own_and_begin_with_calls_of_layers(cases):
    names = [(case.op, str(case)) for case in cases]
    assert len(set(names)) == len(names)
    of_op = {}
    for op, config in names:
        of_op.setdefault(op, []).append(config.rpartition(", ")[2])
    for kinds in of_op.values():
        if len(set(kinds)) > 1 and "lengths" in kinds:
            assert kinds == sorted(kinds, key=lambda kind: kind != "lengths")
            assert kinds[0] == "lengths"


def test_contexts_differ_and_one_is_shorter_than_the_window():
    lens = contexts(np.random.default_rng(0), 32, 1 << 17)
    assert len(set(lens.tolist())) > 25
    assert 0 < lens.min() < 128
    assert lens.max() > 1 << 15


def test_window_lists_are_the_last_rows():
    lens = np.array([1, 5, 127, 128, 300], np.int32)
    found = window_lists(np.random.default_rng(0), lens, 128, 1 << 12, 64)
    assert ((found >= 0).sum(axis=1) == np.minimum(lens, 128)).all()
    for row, length in zip(found, lens, strict=True):
        used = row[: min(length, 128)]
        assert (used % 64 == (np.arange(max(length - 128, 0), length)) % 64).all()
        assert (row[len(used) :] == -1).all()
        assert len(set(used.tolist())) == len(used)


def test_selected_rows_are_distinct_and_seen_and_neighbours_share_them():
    visible = np.concatenate([np.arange(40), 2000 + np.arange(200)])
    found = selected_rows(np.random.default_rng(0), visible, 64, neighbours=True)
    for row, count in zip(found, visible, strict=True):
        used = row[row >= 0]
        assert len(used) == min(count, 64)
        assert (np.diff(used) > 0).all()
        assert (used < max(count, 1)).all()
    shared = [len(set(a) & set(b)) / 64 for a, b in itertools.pairwise(found[40:])]
    assert 0.87 < np.mean(shared) < 0.94
    alone = selected_rows(np.random.default_rng(0), visible, 64)
    assert np.mean([len(set(a) & set(b)) / 64 for a, b in itertools.pairwise(alone[40:])]) < 0.2


def test_what_another_library_gets_wrong_is_timed_and_said():
    def check(result):
        np.testing.assert_array_equal(result, 3)
        return 0.0

    impls = {name: ("cupy", [lambda x=x: np.array([x])]) for name, x in (("cumla", 3), ("peer", 4))}
    problem = Problem("op", "config", impls, 1, check=check, functions={"peer": "f, Library 1"})
    ours, theirs = rows.rows_of(problem, on_device=False)
    assert (ours["checked"], ours.get("error")) == (True, None)
    assert (theirs["checked"], theirs["error"]) == (False, "AssertionError: Arrays are not equal")
    assert theirs["us"] > 0
    with pytest.raises(AssertionError):
        list(rows.rows_of(Problem("op", "config", {"cumla": impls["peer"]}, 1, check=check), on_device=False))


@pytest.mark.parametrize(
    "op", ["compute_swa_indices_and_lens", "indexer_k_quant_and_cache", "candidate_topk", "compress_latents"]
)
def test_any_operation_is_measured_with_the_inputs_of_its_spec(op):
    size = {"requests": 2, "tokens": 7, "rows": 5, "topk": 16, "context": 70}
    for case in any_operation.cases(op, size):
        assert str(case).endswith("requests 2, tokens 7, rows 5, topk 16, context 70")
        (_, calls), problem = case.problem(Sizes("cpu")).impls["cumla"], case.problem(Sizes("cpu"))
        assert problem.check(problem.impls["cumla"][1][0]()) >= 0
        assert len(calls) == 2
        result = problem.impls["cumla"][1][1]()  # on other inputs
        problem.clear()
        with pytest.raises((AssertionError, RunError)):
            problem.check(result)

"""Calls of GLM-5.3-Flash's layers, and of batch-invariant ones: the C runtime makes the launches that Python makes."""

import re

import numpy as np
import pytest

from cumla.export.record import Sampler
from support import runtime
from support.runtime import H200, Runtime, assert_launches_are_those_of_python

NOT_SERVED = 6
NAMES = (
    "indexer_kpool_and_insert restart", "indexer_kpool_and_insert", "fused_indexer_q_rope_quant fp8",
    "quantize_and_insert_k_cache V32_NOPE_FP8, int64 slots", "compute_global_topk_indices_and_lens pools",
    "indexer_topk INDEXER_FP8, 16 pages, 2 tokens a request", "sparse_mla_prefill",
    "sparse_mla_decode V32_NOPE_FP8, lengths, 1 tokens a request, batch-invariant",
)  # fmt: skip


def test_launches_of_pooled_calls_are_those_of_python():
    assert_launches_are_those_of_python(runtime.some("glm5_next", *NAMES)).close()


def test_the_modes_have_launches_of_their_own():
    """A batch-invariant decode of many requests has tiles of another height than the default."""
    found = {}
    for mode in ("", ", batch-invariant"):
        (call,) = (
            x
            for x in runtime.calls("v4")
            if x.name == f"sparse_mla_decode DSV4_FP8, two lists, 1 tokens a request{mode}"
        )
        sampler = Sampler(call, H200, np.random.default_rng(5))
        made = sampler.sample(sampler.sizes(requests=1, pages=100))
        assert made.values[call.fields.names.index("batch_invariant")] == bool(mode)
        found[mode] = [(runtime.function_of(x), x.grid) for x in made.launches]
    assert found[""] != found[", batch-invariant"]


def test_a_plan_begins_to_be_read_where_requests_outnumber_the_sms():
    """Up to 132 tokens, each has a CTA and the kernel no plan: launches of the same kernels differ in that."""
    name = "sparse_mla_decode DSV4_FP8, 2 tokens a request, batch-invariant, planned"
    calls = runtime.some("v4", name, decodes=70)
    (record,) = runtime.recorded_quickly(calls)
    assert [last for last, _ in record.segments] == [66, 70]
    assert_launches_are_those_of_python(calls).close()


@pytest.mark.parametrize(("rows", "kind"), [(8191, "few rows"), (8192, "many rows")])
def test_a_gather_s_rows_decide_its_kernel(rows, kind):
    with_file = Runtime(runtime.file("v4"))
    (call,) = (x for x in runtime.calls("v4") if x.name == f"dequantize_and_gather_k_cache DSV4_FP8, {kind}")
    sampler = Sampler(call, H200, np.random.default_rng(0))
    made = sampler.sample(sampler.sizes(requests=1, rows=rows))
    assert made.values[call.fields.names.index("out.shape[1]")] == rows
    assert with_file.call(call.fields.spec.name, made.values) == 0, with_file.message
    assert with_file.launches() == runtime.words_of(made.launches)
    with_file.close()


def test_a_gather_into_rows_after_others_is_not_served():
    """The caller's array begins at the first row that is written."""
    with_file = Runtime(runtime.file("v4"))
    call = next(x for x in runtime.calls("v4") if x.name.startswith("dequantize_and_gather_k_cache"))
    sampler = Sampler(call, H200, np.random.default_rng(0))
    words = list(sampler.sample(sampler.sizes(requests=2)).values)
    words[call.fields.names.index("offset")] = 8
    assert with_file.call(call.fields.spec.name, words) == NOT_SERVED
    assert re.search("offset: got 8, expected 0", with_file.message), with_file.message
    with_file.close()

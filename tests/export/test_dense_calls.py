"""Calls of dense layers: the C runtime makes the launches that Python makes."""

import re

import numpy as np
import pytest

from cumla.export.record import Sampler
from support import runtime
from support.runtime import H200, assert_launches_are_those_of_python

NOT_SERVED = 6
DECODES = ("dense_mla_decode bfloat16, 1 tokens a request, 16 pages",
           "dense_mla_decode bfloat16, 2 tokens a request, 257 to 512 pages, planned",
           "dense_mla_decode e4m3, 1 tokens a request, 257 to 512 pages")  # fmt: skip


@pytest.fixture(scope="module")
def decodes():
    calls = runtime.some("mla", *DECODES, context=1 << 15)
    with_file = assert_launches_are_those_of_python(calls)
    yield calls, with_file
    with_file.close()


def test_launches_of_decodes_are_those_of_python(decodes):
    calls, _ = decodes
    names = {x.function.name for call in calls for x in runtime.recorded([call], H200)[0].sequences[0]}
    assert names == {"plan_dense_decode", "mla_decode_sm90", "mla_decode", "mla_decode_merge"}


def test_launches_of_other_calls_are_those_of_python():
    names = ("concat_and_cache_mla bfloat16", "concat_and_cache_mla e4m3", "gather_cache bfloat16", "gather_cache e4m3",
             "mha_varlen causal", "mha_varlen causal, float32", "mha_varlen accumulated")  # fmt: skip
    assert_launches_are_those_of_python(runtime.some("mla", *names)).close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k_cache.shape[0]": 1 << 18, "k_cache.strides[0]": 1 << 20},
         r"k_cache.shape\[0\] \* k_cache.strides\[0\]: got 274877906944, expected 0 to 68719476736"),
        ({"block_table.shape[1]": 256}, r"block_table.shape\[1\]: got 256"),
        ({"max_seqlen": 64}, "max_seqlen: got 64"),
    ],
)  # fmt: skip
def test_decodes_that_take_another_kernel_are_not_served(decodes, changes, message):
    """Hopper's kernel counts the bytes of a cache in fewer bits than its pages and their stride have."""
    (_, call, _), with_file = decodes
    sampler = Sampler(call, H200, np.random.default_rng(0))
    words = list(sampler.sample(sampler.sizes(requests=3)).values)
    for name, value in changes.items():
        words[call.fields.names.index(name)] = value
    assert with_file.call("dense_mla_decode", words) == NOT_SERVED
    assert re.search(message, with_file.message), with_file.message

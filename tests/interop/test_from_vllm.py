"""Batches of vLLM's CommonAttentionMetadata, of several releases, for cumla's metadata builders."""

import dataclasses
import functools
import sys
import types
from typing import Any

import numpy as np
import pytest

from cumla.interop.vllm import from_vllm
from cumla.metadata import CommonAttentionMetadata, DeepseekSparseSWAMetadataBuilder, ServingConfig

CONFIG = ServingConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128, num_speculative_tokens=1)
TABLE = np.arange(6, dtype=np.int32).reshape(3, 2)
WANT = CommonAttentionMetadata.from_lengths([1, 2, 9], [70, 3, 9], TABLE, 64)
NAMES = ("query_start_loc", "seq_lens", "num_reqs", "num_actual_tokens", "max_query_len", "block_table_tensor")


def fields(*more, put=np.array, **changes):
    given = {name: getattr(WANT, name) for name in (*NAMES, "slot_mapping", *more)}
    return {name: put(x) if isinstance(x, np.ndarray) else x for name, x in given.items()} | changes


@dataclasses.dataclass
class Later:
    """A release whose host copies are optional, and properties that wait for the device."""

    query_start_loc: Any
    query_start_loc_cpu: Any
    seq_lens: Any
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Any
    slot_mapping: Any
    causal: bool = True
    dcp_local_seq_lens: Any = None
    encoder_seq_lens: Any = None
    seq_lens_cpu_upper_bound: Any = None
    is_prefilling: Any = None
    _seq_lens_cpu: Any = None
    _num_computed_tokens_cpu: Any = None

    @property
    def seq_lens_cpu(self):
        raise AssertionError("waits for the device")

    @functools.cached_property
    def num_computed_tokens_cpu(self):
        raise AssertionError("waits for the device")


def first_release(**changes):
    return types.SimpleNamespace(**fields("query_start_loc_cpu", "seq_lens_cpu", "num_computed_tokens_cpu", **changes))


def later(**changes):
    given = fields("query_start_loc_cpu", max_seq_len=128, **changes)
    return Later(**{"_seq_lens_cpu": WANT.seq_lens_cpu.copy(), **given})


def check(batch):
    assert type(batch) is CommonAttentionMetadata
    for name, want in vars(WANT).items():
        got = getattr(batch, name)
        if isinstance(want, np.ndarray):
            np.testing.assert_array_equal(np.asarray(got), want, err_msg=name)
    built = DeepseekSparseSWAMetadataBuilder(CONFIG, "reference").build(0, batch)
    assert (built.num_decodes, built.num_prefills, built.num_decode_tokens) == (2, 1, 3)


@pytest.mark.parametrize("release", [first_release, later])
def test_releases(release):
    metadata = release()
    batch = from_vllm(metadata)
    check(batch)
    assert batch.seq_lens is metadata.seq_lens
    assert batch.block_table_tensor is metadata.block_table_tensor
    assert batch.max_seq_len == getattr(metadata, "max_seq_len", 70)
    assert batch.block_size is None
    assert from_vllm(metadata, block_size=64).block_size == 64


def test_tensors():
    torch = pytest.importorskip("torch")
    metadata = first_release(put=lambda x: torch.from_numpy(np.array(x)))
    batch = from_vllm(metadata)
    check(batch)
    assert type(batch.seq_lens) is torch.Tensor
    assert batch.seq_lens.data_ptr() == metadata.seq_lens.data_ptr()


def test_lengths_in_host_memory_are_their_own_copy():
    check(from_vllm(later(_seq_lens_cpu=None)))
    check(from_vllm(types.SimpleNamespace(**fields())))


def test_rows_beyond_the_requests_are_left_out():
    def longer(x):
        return np.concatenate([x, np.full_like(x[:1], 99)]) if len(x) in (3, 4) else x

    check(from_vllm(first_release(put=longer)))


@pytest.mark.usefixtures("emulated")
def test_lengths_on_a_device_alone():
    """Only a caller knows them: nothing is read back."""
    cupy = sys.modules["cupy"]
    metadata = later(put=cupy.asarray, query_start_loc_cpu=WANT.query_start_loc_cpu, _seq_lens_cpu=None)
    with pytest.raises(ValueError, match=r"^seq_lens_cpu: got metadata with seq_lens only on its device, expected"):
        from_vllm(metadata)
    batch = from_vllm(metadata, seq_lens_cpu=[70, 3, 9])
    assert batch.seq_lens_cpu.tolist() == [70, 3, 9]
    assert batch.num_computed_tokens_cpu.tolist() == [69, 1, 0]
    assert batch.seq_lens is metadata.seq_lens


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"causal": False}, ValueError, "metadata.causal: got False, expected True"),
        ({"dcp_local_seq_lens": TABLE}, ValueError, "metadata.dcp_local_seq_lens: got an array, expected a batch of"),
        ({"encoder_seq_lens": TABLE}, ValueError, "metadata.encoder_seq_lens: got an array, expected a batch without"),
        ({"slot_mapping": None}, TypeError, "metadata: got Later without slot_mapping, expected vLLM's"),
        ({"num_reqs": 2.5}, TypeError, "num_reqs: got 2.5 of type float, expected an integer"),
        ({"query_start_loc_cpu": np.zeros(4)}, TypeError, "query_start_loc_cpu: got dtype float64, expected integers"),
    ],
)
def test_batches_that_cumla_does_not_take(change, error, message):
    with pytest.raises(error, match=f"^{message}"):
        from_vllm(later(**change))


def test_what_is_no_metadata():
    for wrong in (None, 3, TABLE, {"num_reqs": 3}):
        with pytest.raises(TypeError, match=f"^metadata: got {type(wrong).__name__} without query_start_loc, seq_lens"):
            from_vllm(wrong)
    with pytest.raises(ValueError, match=r"^block_size: got 0, expected at least 1"):
        from_vllm(later(), block_size=0)


def test_builders_name_the_way():
    builder = DeepseekSparseSWAMetadataBuilder(CONFIG, "reference")
    for call in (lambda: builder.build(0, later()), lambda: builder.build(0, first_release())):
        with pytest.raises(TypeError, match=r"^common_attn_metadata: got .*expected cumla's .*vllm\.from_vllm"):
            call()

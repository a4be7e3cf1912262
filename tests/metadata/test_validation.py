"""Batches that no scheduler can intend, and the errors they cause."""

import dataclasses

import numpy as np
import pytest

from cumla.metadata import (
    DeepseekSparseSWAMetadataBuilder,
    DeepseekV32IndexerMetadataBuilder,
    MLACommonMetadataBuilder,
    MLAConfig,
    ServingConfig,
)
from metadata.batches import make_batch
from support.lab import Lab

HOST = Lab("reference", on_device=False)
CONFIG = ServingConfig(
    block_size=8, compressed_block_size=128, num_speculative_tokens=1, max_num_batched_tokens=32, max_num_seqs=4,
    max_model_len=64,
)  # fmt: skip
BUILDERS = [DeepseekSparseSWAMetadataBuilder, DeepseekV32IndexerMetadataBuilder]


def batch(**changes):
    """Three requests with 2, 1 and 5 query tokens of 20, 1 and 30."""
    return dataclasses.replace(make_batch(HOST, [20, 1, 30], [2, 1, 5]), **changes)


def i32(*numbers):
    return np.array(numbers, np.int32)


WRONG = {
    "starts-that-decrease": (
        {"query_start_loc_cpu": i32(0, 3, 2, 8)},
        r"query_start_loc_cpu: request 1 goes from 3 to 2, expected starts that do not decrease",
    ),
    "starts-not-from-0": (
        {"query_start_loc_cpu": i32(1, 2, 3, 8)},
        r"query_start_loc_cpu: got 1 to 8, expected 0 to at most num_actual_tokens = 8",
    ),
    "more-tokens-than-counted": (
        {"num_actual_tokens": 7},
        r"query_start_loc_cpu: got 0 to 8, expected 0 to at most num_actual_tokens = 7",
    ),
    "sequence-shorter-than-query": (
        {"seq_lens_cpu": i32(20, 0, 30)},
        r"seq_lens_cpu: request 1 has 0 tokens, expected at least the 1 of its query",
    ),
    "longer-than-the-model": (
        {"seq_lens_cpu": i32(20, 65, 30), "max_seq_len": 65, "block_table_tensor": np.zeros((3, 9), np.int32)},
        r"seq_lens_cpu: request 1 has 65 tokens, expected at most max_model_len = 64",
    ),
    "table-too-narrow": (
        {"seq_lens_cpu": i32(20, 1, 33), "max_seq_len": 33},
        r"block_table_tensor: request 2 has 33 tokens, but 4 columns of 8 cover 32",
    ),
    "longer-than-max_seq_len": (
        {"max_seq_len": 29},
        r"max_seq_len: got 29, but request 2 has 30 tokens",
    ),
    "longer-than-max_query_len": (
        {"max_query_len": 4},
        r"max_query_len: got 4, but request 2 has 5 query tokens",
    ),
    "computed-tokens-that-contradict": (
        {"num_computed_tokens_cpu": i32(18, 0, 24)},
        r"num_computed_tokens_cpu: request 2 has 24, expected 30 tokens without the 5 of its query",
    ),
    "starts-that-wrap-around": (
        {"query_start_loc_cpu": i32(0, 2**31 - 1, -(2**31), 8), "max_query_len": 2**31 - 1},
        r"seq_lens_cpu: request 0 has 20 tokens, expected at least the 2147483647 of its query",
    ),
    "decode-behind-prefill": (
        {"query_start_loc_cpu": i32(0, 2, 7, 8), "seq_lens_cpu": i32(20, 30, 1)},
        r"query_start_loc_cpu: request 2 with 1 query tokens follows a prefill, "
        r"expected decodes \(at most 2 tokens\) first",
    ),
    "host-shapes": (
        {"seq_lens_cpu": i32(20, 1)},
        r"query_start_loc_cpu, seq_lens_cpu: got shapes \(4,\) and \(2,\), expected \(4,\) and \(3,\)",
    ),
    "device-shape": (
        {"seq_lens": i32(20, 1)},
        r"seq_lens: got shape \(2,\), expected \[3\]",
    ),
    "table-rows": (
        {"block_table_tensor": np.zeros((2, 4), np.int32)},
        r"block_table_tensor: got shape \(2, 4\), expected \[3, any\]",
    ),
    "fewer-slots-than-tokens": (
        {"slot_mapping": np.zeros(7, np.int64)},
        r"slot_mapping: got 7 entries, expected num_actual_tokens = 8 to max_num_batched_tokens = 32",
    ),
    "more-slots-than-rows": (
        {"slot_mapping": np.zeros(33, np.int64)},
        r"slot_mapping: got 33 entries, expected num_actual_tokens = 8 to max_num_batched_tokens = 32",
    ),
}


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_batch(builder, name):
    changes, message = WRONG[name]
    built = builder(CONFIG, backend="reference")
    with pytest.raises(ValueError, match=message):
        built.build(0, batch(**changes))
    assert built._buffers is None  # nothing was written, or even allocated


@pytest.mark.parametrize("builder", BUILDERS)
def test_capacity(builder):
    with pytest.raises(ValueError, match="num_reqs: got 5, expected 0 to max_num_seqs = 4"):
        builder(CONFIG, backend="reference").build(0, make_batch(HOST, [3] * 5, [1] * 5), validate=False)
    with pytest.raises(ValueError, match="num_actual_tokens: got 33, expected 0 to max_num_batched_tokens = 32"):
        builder(CONFIG, backend="reference").build(0, make_batch(HOST, [33], [33]), validate=False)


@pytest.mark.parametrize("builder", BUILDERS)
def test_decode_behind_padding_behind_prefill(builder):
    with pytest.raises(ValueError, match="request 2 with 1 query tokens follows a prefill"):
        builder(CONFIG, backend="reference").build(0, make_batch(HOST, [9, 0, 4], [5, 0, 1]))
    builder(CONFIG, backend="reference").build(0, make_batch(HOST, [9, 0, 0], [5, 0, 0]))


@pytest.mark.parametrize("builder", BUILDERS)
def test_trusted_batch_is_not_checked(builder):
    wrong = batch(**WRONG["longer-than-max_query_len"][0])
    builder(CONFIG, backend="reference").build(0, wrong, validate=False)


def test_integers_of_numpy():
    """They count as others do: in a config, a batch, and what is checked by them."""
    numbers = {name: np.int64(value) for name, value in vars(CONFIG).items() if type(value) is int}
    config = dataclasses.replace(CONFIG, **numbers, compress_ratios=[np.int64(1), np.uint8(4)])
    assert config == dataclasses.replace(CONFIG, compress_ratios=(1, 4))
    assert all(type(x) is int for x in [*config.compress_ratios, config.block_size, config.decode_threshold])
    short = batch(num_reqs=np.int64(3), seq_lens=i32(20))  # three requests, but space for one
    with pytest.raises(ValueError, match=r"seq_lens: got shape \(1,\), expected \[3\]"):
        DeepseekSparseSWAMetadataBuilder(CONFIG, backend="reference").build(0, short)
    for wrong in (True, 1.5, None, "8"):
        with pytest.raises(TypeError, match="block_size: got "):
            dataclasses.replace(CONFIG, block_size=wrong)
        with pytest.raises(TypeError, match="compress_ratios: got "):
            dataclasses.replace(CONFIG, compress_ratios=(1, wrong))


@pytest.mark.parametrize("builder", BUILDERS)
def test_no_array(builder):
    with pytest.raises(TypeError, match="seq_lens_cpu: got dtype float64, expected integers"):
        builder(CONFIG, backend="reference").build(0, batch(seq_lens_cpu=np.array([20.0, 1.0, 30.0])))
    with pytest.raises(TypeError, match="slot_mapping: got list, expected an array"):
        builder(CONFIG, backend="reference").build(0, batch(slot_mapping=[1] * 8))
    with pytest.raises(TypeError, match="seq_lens: got dtype int64, expected int32"):
        builder(CONFIG, backend="reference").build(0, batch(seq_lens=np.array([20, 1, 30])))


def test_compressed_tables():
    config = dataclasses.replace(CONFIG, compress_ratios=(128,), max_model_len=600)
    built = DeepseekSparseSWAMetadataBuilder(config, backend="reference")
    long = make_batch(HOST, [256, 384], [1, 1])
    with pytest.raises(ValueError, match="c128a_block_table: got None, expected a block table for the C128A layers"):
        built.build(0, long)
    narrow = np.zeros((2, 2), np.int32)
    with pytest.raises(ValueError, match="c128a_block_table: request 1 has 384 tokens, but 2 columns of 128 cover 256"):
        built.build(0, long, c128a_block_table=narrow)
    built.build(0, make_batch(HOST, [256, 383], [1, 1]), c128a_block_table=narrow)  # no third row is complete

    config = dataclasses.replace(CONFIG, compress_ratios=(4,), max_model_len=600)
    built = DeepseekV32IndexerMetadataBuilder(config, backend="reference")
    with pytest.raises(ValueError, match="block_table: request 1 has 384 tokens, but 2 columns of 128 cover 256"):
        built.build(0, long, block_table=narrow)
    built.build(0, make_batch(HOST, [256, 259], [1, 1]), block_table=narrow)


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.gpu
def test_one_device_for_good(builder):
    built = builder(CONFIG)
    built.build(0, batch())
    on_device = make_batch(Lab("cuda", on_device=True), [20, 1, 30], [2, 1, 5])
    with pytest.raises(ValueError, match="the builder's buffers: got an array in host memory"):
        built.build(0, on_device)
    wrong = dataclasses.replace(on_device, seq_lens_cpu=on_device.seq_lens)
    with pytest.raises(ValueError, match="seq_lens_cpu: got an array on CUDA device 0, expected one in host memory"):
        builder(CONFIG).build(0, wrong)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"window_size": 0}, ValueError, "window_size: got 0, expected at least 1"),
        ({"num_sms": 1.5}, TypeError, "num_sms: got 1.5 of type float, expected an integer"),
        ({"num_speculative_tokens": -1}, ValueError, "num_speculative_tokens: got -1, expected at least 0"),
        ({"max_logits_bytes": 0}, ValueError, "max_logits_bytes: got 0, expected at least 1"),
        ({"max_logits_bytes": 2**63}, ValueError, f"max_logits_bytes: got {2**63}, expected at most {2**63 - 1}"),
        ({"block_size": 2**29}, ValueError, "block_size: got 536870912, expected at most 536870911"),
        ({"compressed_block_size": 2**40}, ValueError, "compressed_block_size: got 1099511627776, expected at most"),
        ({"max_model_len": 2**31}, ValueError, "max_model_len: got 2147483648, expected at most 2147483647"),
        ({"num_heads": 200}, ValueError, "num_heads: got 200, expected at most 128"),
        ({"num_heads": 0}, ValueError, "num_heads: got 0, expected at least 1"),
        ({"index_topk": 0}, ValueError, "index_topk: got 0, expected at least 1"),
        ({"num_speculative_tokens": 2**31 - 1}, ValueError, "num_speculative_tokens: got 2147483647, expected at most"),
        ({"compress_ratios": (3,)}, ValueError, "compress_ratios: got 3, expected 0, 1, 2, 4 or 128"),
        ({"compress_ratios": ()}, ValueError, "compress_ratios: got no layers, expected at least one"),
        ({"compress_ratios": (128,), "compressed_block_size": 64}, ValueError, "expected a multiple of 128"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_config(changes, error, message):
    for config in (ServingConfig, MLAConfig):
        with pytest.raises(error, match=message):
            config(**changes)


FIELDS = {field.name for field in dataclasses.fields(MLAConfig)}
AT_LEAST_0 = {"num_speculative_tokens"}
NOT_NUMBERS = {
    "compress_ratios",
    "has_c1a",
    "noncausal_decodes",
    "chunked_prefill_enabled",
    "enable_prefix_caching",
    "dtype",
}


@pytest.mark.parametrize("name", sorted(FIELDS - NOT_NUMBERS))
def test_every_number_of_a_config_has_limits(name):
    """A field that is added has them, too."""
    for wrong in (-1, 2**63, 0.5, "1", True, float("nan"), *([] if name in AT_LEAST_0 else [0])):
        with pytest.raises((TypeError, ValueError), match=f"^{name}: got"):
            MLAConfig(**{name: wrong})


@pytest.mark.parametrize(
    "builder", [DeepseekSparseSWAMetadataBuilder, DeepseekV32IndexerMetadataBuilder, MLACommonMetadataBuilder]
)
def test_what_builders_are_made_of(builder):
    for wrong in (None, {}, ServingConfig if builder is not MLACommonMetadataBuilder else ServingConfig()):
        with pytest.raises(TypeError, match=r"^config: got"):
            builder(wrong)
    with pytest.raises(ValueError, match="backend: got 'cobol', expected 'reference', 'cpu'"):
        builder(MLAConfig(), backend="cobol")


def test_a_budget_beyond_int32():
    assert ServingConfig(max_logits_bytes=1 << 40).max_logits_bytes == 1 << 40

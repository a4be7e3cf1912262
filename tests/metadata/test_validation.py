"""Batches that builders take without a check, or on the host alone; errors/metadata.py has those that they refuse."""

import dataclasses

import numpy as np
import pytest
from errors.metadata import BUILDERS, CONFIG, HOST

from cumla.metadata import ServingConfig
from metadata.batches import make_batch
from support.lab import Lab

every_builder = pytest.mark.parametrize("builder", BUILDERS.values())


@every_builder
def test_requests_without_tokens_follow_prefills(builder):
    builder(CONFIG, backend="reference").build(0, make_batch(HOST, [9, 0, 0], [5, 0, 0]))


@every_builder
def test_trusted_batch_is_not_checked(builder):
    wrong = dataclasses.replace(make_batch(HOST, [20, 1, 30], [2, 1, 5]), max_query_len=4)
    builder(CONFIG, backend="reference").build(0, wrong, validate=False)


def test_integers_of_numpy():
    numbers = {name: np.int64(value) for name, value in vars(CONFIG).items() if type(value) is int}
    config = dataclasses.replace(CONFIG, **numbers, compress_ratios=[np.int64(1), np.uint8(4)])
    assert config == dataclasses.replace(CONFIG, compress_ratios=(1, 4))
    assert all(type(x) is int for x in [*config.compress_ratios, config.block_size, config.decode_threshold])


@every_builder
@pytest.mark.gpu
def test_one_device_for_good(builder):
    built = builder(CONFIG)
    built.build(0, make_batch(HOST, [20, 1, 30], [2, 1, 5]))
    on_device = make_batch(Lab("cuda", on_device=True), [20, 1, 30], [2, 1, 5])
    with pytest.raises(ValueError, match="the builder's buffers: got an array in host memory"):
        built.build(0, on_device)
    wrong = dataclasses.replace(on_device, seq_lens_cpu=on_device.seq_lens)
    with pytest.raises(ValueError, match="seq_lens_cpu: got an array on CUDA device 0, expected one in host memory"):
        builder(CONFIG).build(0, wrong)


def test_a_budget_beyond_int32():
    assert ServingConfig(max_logits_bytes=1 << 40).max_logits_bytes == 1 << 40

"""A step's layers share a plan of dense decode: it divides once, and results are correct for any lengths."""

import numpy as np
import pytest
from ops.test_dense_attention import Paged, want_decode

import cumla
from cumla.kernels.cuda import dense_attention
from cumla.kernels.cuda.device import assumed
from cumla.kernels.cuda.launch import recorded_launches
from support.bounds import assert_decode
from support.lab import BF16

pytestmark = pytest.mark.attention

LENS = [1000, 65, 0, 1, 640]


class Step:
    """Decodes of five requests whose caches hold 1,088 tokens each."""

    def __init__(self, lab, rng, heads=3):
        self.lab, self.paged = lab, Paged(rng, [17 * 64] * len(LENS), 64)
        self.q = (5 * rng.standard_normal((len(LENS), 1, heads, 576))).astype(BF16)
        self.lens = lab.put(np.zeros(len(LENS), np.int32))
        self.arrays = [lab.put(x) for x in (self.q, self.paged.cache, self.paged.table)]

    def attend(self, lens, plan):
        self.lens[:] = self.lab.put(np.array(lens, np.int32))
        results = cumla.dense_mla_decode(
            *self.arrays, self.lens, softmax_scale=0.05, plan=plan, backend=self.lab.backend
        )
        return [self.lab.get(x) for x in results]

    def check(self, lens, plan):
        values = [x[:length] for x, length in zip(self.paged.values, lens, strict=True)]
        assert_decode(*self.attend(lens, plan), *want_decode(self.q, values, 0.05))


@pytest.fixture(params=[3, 10])
def step(request, device, rng, monkeypatch):
    """With fewer work ranges than requests, and more."""
    monkeypatch.setattr(dense_attention, "range_count", lambda *_: request.param)
    return Step(device, rng)


def test_lengths_that_the_plan_was_not_made_for(step):
    """Lengths that are longer, shorter, all 0, and in another order."""
    plan = cumla.DenseDecodePlan()
    for lens in (LENS, [1088] * 5, [1, 2, 3, 4, 5], [0] * 5, LENS[::-1], LENS):
        step.check(lens, plan)


def test_contexts_that_grow_without_renew(step):
    plan, lens = cumla.DenseDecodePlan(), np.array([60, 1, 500, 0, 127])
    for _ in range(6):
        step.check(lens.tolist(), plan)
        lens += 90


@pytest.mark.parametrize("ranges", [3, 10])
def test_lengths_that_a_plan_of_the_portable_kernel_was_not_made_for(device, rng, monkeypatch, ranges):
    monkeypatch.setattr(dense_attention, "range_count", lambda *_: ranges)
    step, plan = Step(device, rng), cumla.DenseDecodePlan()
    with assumed(80), recorded_launches() as launches:
        for lens in (LENS, [60, 1, 500, 0, 127], [1088] * 5, [0] * 5):
            step.check(lens, plan)
    names = [launch.kernel.raw.name for launch in launches]
    assert (names.count("plan_dense_decode"), names.count("mla_decode")) == (1, 4)


def test_a_plan_made_for_no_keys(step):
    plan = cumla.DenseDecodePlan()
    step.check([0] * 5, plan)
    step.check(LENS, plan)


def test_layers_share_a_division(step):
    """Only the first call after `renew` divides."""
    plan = cumla.DenseDecodePlan()
    for renewed in (True, False, False, True, False):
        if renewed:
            plan.renew()
        with recorded_launches() as launches:
            step.attend(LENS, plan)
        names = [launch.kernel.raw.name for launch in launches]
        assert [name == "plan_dense_decode" for name in names] == [True] * renewed + [False, False]


def test_results_with_a_plan_and_without(step):
    """The bits are the same with a new plan, in later layers, with a renewed plan, and without a plan."""
    plan = cumla.DenseDecodePlan()
    first = step.attend(LENS, plan)
    again = [step.attend(LENS, plan), step.attend(LENS, None)]
    step.attend(LENS[::-1], plan)
    plan.renew()
    again.append(step.attend(LENS, plan))
    for results in again:
        for x, y in zip(first, results, strict=True):
            np.testing.assert_array_equal(x.view(np.uint8), y.view(np.uint8))


def test_a_capture_divides_again(device, rng, monkeypatch):
    """A graph's first call divides, the next one does not, and eager calls have a separate division."""
    monkeypatch.setattr(dense_attention, "range_count", lambda *_: 10)
    step, plan = Step(device, rng), cumla.DenseDecodePlan()
    counts = []
    for capture in (0, 0, 7, 7, 0, 8, 7):
        monkeypatch.setattr(dense_attention, "capture_id", lambda capture=capture: capture)
        with recorded_launches() as launches:
            step.check(LENS, plan)
        counts.append(len(launches) - 2)
    assert counts == [1, 0, 1, 0, 0, 1, 1]

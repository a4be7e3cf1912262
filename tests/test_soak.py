"""tests/soak_device.py on an emulated device: tiny problems, a few rounds, and a result that changes is noticed."""

import numpy as np
import pytest
import soak_device

from support import soak_problems

pytestmark = pytest.mark.usefixtures("emulated")


@pytest.fixture
def problems():
    return soak_problems.problems(np.random.default_rng(0), tiny=True)


def test_every_operation_repeats_its_bits(problems):
    ops = {problem.op for problem in problems}
    assert ops == {"decode", "prefill", "indexer", "top-k", "compressor", "dense"}
    soak = soak_device.Soak(problems)
    soak.run(repeats=2, seconds=0)
    lines, right = soak.report()
    assert right, lines
    assert soak.rounds == 1


def test_results_that_change_are_noticed(problems):
    """Detects changes in the results of one round, on both streams, and in one word of one result."""
    soak = soak_device.Soak([next(x for x in problems if x.op == "top-k")])
    soak.run(repeats=4, seconds=60)
    assert soak.rounds == 2
    assert soak.report()[1]
    q = soak.runners[0][0].arguments["q"]
    kept = q.copy()
    q.fill(0)
    soak.round()
    q[...] = kept
    soak.round()
    assert [int(of_stream[0].wrong_runs[0]) for of_stream in soak.runners] == [1, 1]
    runner = soak.runners[1][0]
    before = int(runner.differing[0])
    runner.written[7:8].fill(0x77)
    runner.compare(soak.wanted[0])
    assert int(runner.differing[0]) == before + 1
    assert int(runner.wrong_runs[0]) == 2
    lines, right = soak.report()
    assert not right
    assert "3 with other bits" in lines[0]

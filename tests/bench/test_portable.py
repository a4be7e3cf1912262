"""Stand-ins: the same calls with the limits of other devices, and shares of the instructions' pace."""

from dataclasses import dataclass

import pytest

import emulation
from cumla.bench import instructions, portable
from cumla.bench.problem import Problem, Sizes


@dataclass(frozen=True)
class Asks:
    """A call that says which device it sees; each problem accepts its own first result alone."""

    op = "asks"

    def __str__(self):
        return "its device"

    def problem(self, sizes):
        from cumla.kernels.cuda.device import capability

        given = []

        def call():
            given.append(capability(0))
            return given[-1]

        def check(result):
            assert given == [result]
            return 0.0

        return Problem(self.op, str(self), {"cumla": ("cupy", [call])}, 10, 20, check)


@pytest.mark.skipif(bool(emulation.unavailable()), reason=str(emulation.unavailable()))
def test_calls_see_the_limits_of_their_device():
    with emulation.devices():
        problem = portable.WithLimits(Asks(), (80, 89)).problem(Sizes("cuda"))
        seen = {}
        for name, (_, calls) in problem.impls.items():
            seen[name] = calls[0]()
            assert problem.check(seen[name]) == 0.0
    assert seen == {"cumla": 90, "sm_80": 80, "sm_89": 89}
    assert (problem.op, problem.config, problem.flop) == ("asks", "its device", 20)


def test_shares():
    rows = [
        {"op": instructions.Products.op, "tflops": 500.0, "us_graph": 1.0},
        {"op": instructions.Products.op, "tflops": 600.0, "us_graph": 1.0},
        {"op": instructions.Copies.op, "gbps": 4000.0, "us_graph": 1.0},
        {"op": "products", "tflops": 250.0, "gbps": 100.0, "us_graph": 10.0},
        {"op": "copies", "tflops": None, "gbps": 2150.0, "us_graph": 10.0},
        {"op": "failed", "us_graph": None},
    ]
    assert portable.shares(rows) == {"mma_sync_tflops": 500.0}
    assert [row.get("share") for row in rows] == [None, None, None, pytest.approx(0.5), pytest.approx(0.5), None]
    assert portable.shares([]) == {"mma_sync_tflops": None}

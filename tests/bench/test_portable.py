"""Stand-ins: the same calls with the limits of other devices, and shares of the instructions' pace."""

from dataclasses import dataclass

import numpy as np
import pytest

import cumla
import emulation
from cumla.arrays.memory import to_host
from cumla.bench import instructions, portable
from cumla.bench.problem import Problem, Sizes
from support.lab import BF16


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


class Attends(Asks):
    """A prefill, checked against the reference."""

    def problem(self, sizes):
        rng = np.random.default_rng(0)
        q, kv = (rng.standard_normal(shape).astype(BF16) for shape in ((2, 64, 512), (64, 512)))
        indices = rng.integers(0, 64, (2, 32)).astype(np.int32)
        given = [sizes.xp.asarray(x) for x in (q, kv, indices)]
        want = cumla.sparse_mla_prefill(q, kv, indices, backend="reference")[0].astype(np.float32)

        def check(result):
            found = to_host(result[0]).astype(np.float32)
            return float(np.testing.assert_allclose(found, want, atol=0.02) or 0)

        calls = [lambda: cumla.sparse_mla_prefill(*given, backend="cuda")]
        return Problem(self.op, str(self), {"cumla": ("cupy", calls)}, 10, 20, check)


@pytest.mark.skipif(bool(emulation.unavailable()), reason=str(emulation.unavailable()))
def test_what_is_compiled_ahead_is_launched_later(monkeypatch):
    """No placeholder of a kernel is kept."""
    cases = [portable.WithLimits(Attends(), (80,))]
    monkeypatch.setattr(portable, "recorded", lambda: cases)
    with emulation.devices():
        assert portable.compiling() == cases
        problem = cases[0].problem(Sizes("cuda"))
        for _, calls in problem.impls.values():
            problem.check(calls[0]())


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

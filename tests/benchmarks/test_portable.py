"""The same calls with the limits of other devices."""

from dataclasses import dataclass

import numpy as np
import pytest
from portable_cases import WithLimits, compiling

import cumla
import emulation
from cumla.arrays.memory import to_host
from cumla.bench.problem import Problem, Sizes
from support.lab import BF16


@dataclass(frozen=True)
class Asks:
    """A call that returns the device's capability; each problem accepts only its first result."""

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
        problem = WithLimits(Asks(), (80, 89)).problem(Sizes("cuda"))
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
def test_what_is_compiled_ahead_is_launched_later():
    """No placeholder of a kernel is cached."""
    cases = [WithLimits(Attends(), (80,))]
    with emulation.devices():
        assert compiling(cases) == cases
        problem = cases[0].problem(Sizes("cuda"))
        for _, calls in problem.impls.values():
            problem.check(calls[0]())

"""Operations repeated under load on two streams of a device: every repeat has the bits of the first run.

    tools/with_cumla.sh python3 tests/soak_device.py [--minutes 2] [--repeats 10000]

Tests of a few calls do not find races that show once in thousands of runs. Each problem (support/soak_problems.py)
runs once alone. Then one stream calls operations and another replays graphs of them, all problems in an order that is
random in every round, so that other kernels run concurrently. Outputs are overwritten before a round and compared
on the device with those of the first run; the host waits only every few rounds.

Reports how often each problem ran, and fails if any result differs.
"""

import argparse
import contextlib
import os
import pathlib
import sys
import time

import numpy as np

ROUNDS_AT_ONCE = 20  # rounds queued before the host waits for the device and reads the clock
ALIGNMENT = 256
UNWRITTEN = 0x5A
STREAMS = 2


def flat_size(arrays):
    """Bytes of a buffer for arrays of these shapes and dtypes, each at a multiple of ALIGNMENT."""
    return sum(-(-int(np.prod(shape)) * np.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT for shape, dtype in arrays)


class Runner:
    """A problem on one stream, with its outputs, states and plan.

    Attributes:
        written: uint8, all outputs packed, which are overwritten before a run
        kept: arrays that it reads and writes: every run leaves the same bytes in them
    """

    def __init__(self, problem):
        import cupy

        self.problem = problem
        self.written = cupy.zeros(flat_size(problem.outputs.values()), np.uint8)
        arrays, start = {}, 0
        for name, (shape, dtype) in problem.outputs.items():
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            arrays[name] = self.written[start : start + size].view(dtype).reshape(shape)
            start += -(-size // ALIGNMENT) * ALIGNMENT
        self.kept = {name: x.copy() for name, x in (problem.states or {}).items()}
        plan = {} if problem.plan is None else {"plan": problem.plan()}
        self.arguments = {**problem.inputs, **arrays, **self.kept, **plan}
        self.differing, self.wrong_runs = (cupy.zeros(1, np.int64) for _ in range(2))

    def run(self):
        self.problem.call(**self.arguments)

    def overwrite(self):
        self.written.fill(UNWRITTEN)

    def results(self):
        return [self.written, *(x.reshape(-1).view(np.uint8) for x in self.kept.values())]

    def compare(self, wanted):
        """Count the words that differ from `wanted`, on the current stream, without waiting."""
        for got, want in zip(self.results(), wanted, strict=True):
            words = (got.view(np.uint32) != want.view(np.uint32)).sum()
            self.differing += words
            self.wrong_runs += words > 0


def captured(runner, stream):
    """A graph of a run, captured after one eager run."""
    with stream:
        stream.begin_capture()
        runner.run()
        return stream.end_capture()


class Soak:
    """All problems on STREAMS streams."""

    def __init__(self, problems, seed=0):
        import cupy

        self.rng = np.random.default_rng(seed)
        self.streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(STREAMS)]
        self.runners = [[Runner(problem) for problem in problems] for _ in range(STREAMS)]
        self.wanted, self.rounds = [], 0
        cupy.cuda.Device().synchronize()
        for of_problem in zip(*self.runners, strict=True):
            for stream, runner in zip(self.streams, of_problem, strict=True):
                with stream:
                    runner.run()  # compiles, allocates, plans
                    runner.overwrite()
                    runner.run()
                stream.synchronize()
            first = of_problem[0]
            self.wanted.append([x.copy() for x in first.results()])
            cupy.cuda.Device().synchronize()
            if not first.problem.states and (first.written == UNWRITTEN).all():
                raise AssertionError(f"{first.problem.name}: nothing was written")
        self.graphs = [captured(runner, self.streams[1]) for runner in self.runners[1]]
        cupy.cuda.Device().synchronize()

    def round(self):
        """Each problem on each stream, without waiting."""
        calls = [[runner.run for runner in self.runners[0]]]
        calls.append([lambda graph=graph: graph.launch(self.streams[1]) for graph in self.graphs])
        orders = [self.rng.permutation(len(self.wanted)) for _ in self.streams]
        for stream, runners in zip(self.streams, self.runners, strict=True):
            with stream:
                for runner in runners:
                    runner.overwrite()
        for turn in zip(*orders, strict=True):
            for stream, of_stream, number in zip(self.streams, calls, turn, strict=True):
                with stream:
                    of_stream[number]()
        for stream, runners in zip(self.streams, self.runners, strict=True):
            with stream:
                for runner, wanted in zip(runners, self.wanted, strict=True):
                    runner.compare(wanted)
        self.rounds += 1

    def run(self, repeats, seconds):
        """Run rounds until each problem has run `repeats` times on each stream, or until the time limit."""
        end = time.monotonic() + seconds
        while self.rounds * STREAMS < repeats and (time.monotonic() < end or not self.rounds):
            for _ in range(min(ROUNDS_AT_ONCE, -(-repeats // STREAMS) - self.rounds)):
                self.round()
            for stream in self.streams:
                stream.synchronize()

    def report(self):
        """Report lines, and whether all bits equal the first run's."""
        lines, runs_of_op, right = [], {}, True
        for of_problem in zip(*self.runners, strict=True):
            differing, wrong = (
                sum(int(getattr(x, name)[0]) for x in of_problem) for name in ("differing", "wrong_runs")
            )
            problem, runs = of_problem[0].problem, self.rounds * STREAMS
            said = f"{wrong} with other bits ({differing} words)" if wrong else "the same bits"
            lines.append(f"{problem.op:10} {problem.name:56} {runs:6} runs: {said}")
            runs_of_op[problem.op] = runs_of_op.get(problem.op, 0) + runs
            right = right and not wrong
        lines.append("together   " + ", ".join(f"{op} {runs}" for op, runs in runs_of_op.items()))
        return lines, right


@contextlib.contextmanager
def device(emulated):
    """A context with a device, real or emulated."""
    if not emulated:
        yield
        return
    import emulation

    if emulation.unavailable():
        raise SystemExit(emulation.unavailable())
    with emulation.devices():
        yield


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2, help="after which no round begins (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=10_000, help="of each problem (default: %(default)s)")
    parser.add_argument("--ops", nargs="+", help="those of these operations only")
    parser.add_argument("--emulated", action="store_true", help="tiny problems on an emulated device")
    args = parser.parse_args()
    with device(args.emulated):
        from support import soak_problems

        problems = soak_problems.problems(np.random.default_rng(0), tiny=args.emulated)
        chosen = [problem for problem in problems if not args.ops or problem.op in args.ops]
        if not chosen:
            parser.error(f"--ops: got {args.ops}, expected some of {sorted({problem.op for problem in problems})}")
        start = time.monotonic()
        soak = Soak(chosen)
        prepared = time.monotonic()
        soak.run(args.repeats, 60 * args.minutes)
        lines, right = soak.report()
        print(*lines, sep="\n")
        took = f"{prepared - start:.0f} s to prepare, {time.monotonic() - prepared:.0f} s for {soak.rounds} rounds"
        print(took if right else f"{took}: some results changed")
    return 0 if right else 1


if __name__ == "__main__":
    sys.path.insert(0, os.fspath(pathlib.Path(__file__).parent))  # for the tests' other helpers
    sys.exit(main())

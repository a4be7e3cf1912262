"""What goes wrong on a device without each fence of the CUDA sources: nothing but a device can tell (tests/emulation).

    tools/with_cumla.sh python3 tests/fences_device.py

For each statement that is a fence, the kernels are compiled without it and run on problems that use it, next to the
kernels as they are: results that differ in a bit, an error or a hang show that the fence is needed. Where results stay
right, the hardware or the compiler hides that it is missing: the programming model asks for it, this device does not
punish who leaves it out. That such a thing would be seen is shown by the waits for data at barriers, which are left out
likewise: some of each kernel must be missed, or the run fails. Mutants run in processes of their own.
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import NamedTuple

import numpy as np

FENCE = re.compile(
    r"^(?!__device__).*?(?P<statement>\b(?:fence_proxy_async|wgmma_fence|__threadfence)\(\)"
    r'|\basm volatile\("fence\.[^;]*;" ::: "memory"\))'
)
WAIT = re.compile(r"^\s*(?P<statement>barrier_wait\((?:(?:RAW|P|K|V)_FULL|(?:Q_)?READY)\b[^;{}]*\));$")
TIMES = 100  # that the problems are run
TIMEOUT = 40  # seconds, most of which are compilation
UNNOTICED, WRONG = 0, 3  # exit statuses of a mutant


class Mutant(NamedTuple):
    """A statement that is left out of a line, counted from 0 on, of a source."""

    file: str
    line: int
    statement: str
    is_fence: bool


def mutants():
    from cumla.kernels.cuda.compile import CSRC

    for path in sorted((CSRC / "sm90").rglob("*.cu*")):
        if path.parent == CSRC / "sm90":
            continue  # what these functions are, not where they are called
        for number, line in enumerate(path.read_text().splitlines()):
            for pattern in (FENCE, WAIT):
                found = pattern.match(line)
                if found:
                    yield Mutant(str(path.relative_to(CSRC)), number, found["statement"], pattern is FENCE)


def write_without(mutant, folder):
    """A copy of the source in `folder`, without the statement."""
    from cumla.kernels.cuda.compile import CSRC

    lines = (CSRC / mutant.file).read_text().splitlines(keepends=True)
    lines[mutant.line] = lines[mutant.line].replace(mutant.statement, "(void)0", 1)
    target = pathlib.Path(folder, mutant.file)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(lines))


def problems():
    """(folder of the kernels, function that runs them on a device and gives results); the arrays are made once."""
    import cupy

    import cumla
    from support.attention import make_cache, make_indices, make_q, steep
    from support.lab import BF16

    rng = np.random.default_rng(0)
    stream = cupy.cuda.get_current_stream()  # given to the calls: then nothing known from earlier ones is launched

    def normal(*shape, size=1.0):
        return cupy.asarray((size * rng.standard_normal(shape)).astype(BF16))

    for layout in (cumla.DSV4_FP8, cumla.V32_FP8):
        cache = cupy.asarray(make_cache(rng, layout, 40, 64, spread=0))
        q = cupy.asarray(make_q(rng, 160, 1, 64, layout, steep(64)))
        indices = cupy.asarray(make_indices(rng, 160, 1, 700, 40 * 64))
        yield (
            "sm90/decode",
            lambda a=(q, cache, indices), x=layout: cumla.sparse_mla_decode(*a, layout=x, stream=stream),
        )
    table = cupy.asarray(rng.permutation(48 * 16).reshape(48, 16).astype(np.int32))
    lens = cupy.asarray(rng.integers(1, 1024, 48, dtype=np.int32))
    q, cache = normal(48, 2, 70, 576, size=5), normal(48 * 16, 64, 576, size=0.3)
    yield "sm90/dense", lambda: cumla.dense_mla_decode(q, cache, table, lens, stream=stream)
    starts = cupy.asarray(np.array([0, 700, 900, 2048], np.int32))
    heads = [normal(2048, 16, d, size=size) for d, size in ((192, 4.0), (192, 1.0), (128, 1.0))]
    yield "sm90/dense", lambda: cumla.mha_varlen(*heads, starts, starts, causal=True, stream=stream)


def run(mutant):
    """In a process of its own: exits with WRONG or UNNOTICED."""
    import cupy

    from cumla.kernels.cuda import compile as compiler

    folder = mutant.file.rpartition("/")[0]
    calls = [call for kernels, call in problems() if kernels == folder]

    def results():
        return [b"".join(cupy.asnumpy(x).tobytes() for x in call()) for call in calls]

    right = results()
    with tempfile.TemporaryDirectory() as mutated:
        write_without(mutant, mutated)
        compiler.look_first_in(pathlib.Path(mutated))
        wrong = sum(results() != right for _ in range(TIMES))
        if not compiler.source.cache_info().misses:
            raise AssertionError("nothing was compiled again")
    print(f"{wrong} of {TIMES} runs wrong", flush=True)
    os._exit(WRONG if wrong else UNNOTICED)  # at once: the device may be in no state to clean up


def watch(number):
    """What happens without the statement, in a process of its own; "" if nobody notices."""
    try:
        command = [sys.executable, __file__, "--mutant", str(number)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return "hangs"
    if done.returncode in (WRONG, UNNOTICED):
        return done.stdout.strip() if done.returncode == WRONG else ""
    return "error: " + (done.stderr.strip().splitlines() or ["?"])[-1][:90]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutant", type=int, help="the number of one, which is run in this process")
    args = parser.parse_args()
    all_mutants = list(mutants())
    if args.mutant is not None:
        run(all_mutants[args.mutant])
    missed = {}  # kernel -> whether a wait was missed
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for mutant, seen in zip(all_mutants, pool.map(watch, range(len(all_mutants))), strict=True):
            kernel = "sm90/decode" if mutant.file.startswith("sm90/decode/") else mutant.file
            missed[kernel] = missed.get(kernel, False) or (bool(seen) and not mutant.is_fence)
            kind = "fence" if mutant.is_fence else "wait"
            print(f"{kind} {mutant.file}:{mutant.line + 1} {mutant.statement[:40]}: {seen or 'hidden by the hardware'}")
    unwatched = [kernel for kernel, seen in missed.items() if not seen]
    if unwatched:
        sys.exit(f"no wait of {', '.join(unwatched)} is missed: these problems would show nothing")


if __name__ == "__main__":
    main()

"""Remove each fence of the CUDA sources and observe what fails: only a device can show it (tests/emulation).

    tools/with_cumla.sh python3 tests/fences_device.py

For each fence, the kernels are compiled without it (a mutant) and run on problems that use it, next to the original
kernels: results that differ in a bit, an error or a hang show that the fence is needed. Where results stay correct, the
hardware or the compiler hides that it is missing: the programming model requires it, but this device works without it.
Waits for data at barriers are removed, too, to check that the run detects missing statements: it fails unless
the removal of some waits of each kernel is noticed. Mutants run in separate processes, which find the original kernels
compiled already.
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
from typing import NamedTuple

import numpy as np

from cumla.kernels.check_results import VARIABLE

FENCE = re.compile(
    r"^(?!__device__).*?(?P<statement>\b(?:fence_proxy_async|fence_barrier_init|wgmma_fence|__threadfence)\(\))"
)
WAIT = re.compile(r"^\s*(?P<statement>(?:(?:raw|p|k|v)_full|(?:q|k|rows)_ready)\b[^;{}]*\.wait\([^;{}]*\));$")
TIMES = 100  # runs of a problem
SWEPT = 1 << 28  # bytes, more than the L2 cache has
RUN_SECONDS = 15  # limit for all runs of a problem
TIMEOUT = 40  # for a mutant's compilation and first run
UNNOTICED, WRONG = 0, 3  # exit statuses of a mutant
HUNG = -signal.SIGALRM


class Mutant(NamedTuple):
    """A statement to remove from a line of a source, lines counted from 0."""

    file: str
    line: int
    statement: str
    is_fence: bool


def mutants():
    from cumla.kernels.cuda.compile import CSRC

    for path in sorted((CSRC / "sm90").rglob("*.cu*")):
        if path.parent == CSRC / "sm90":
            continue  # their definitions, not their calls
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


def decode_problem(rng):
    import cumla
    from support.attention import make_cache, make_indices, make_q, steep

    layout = cumla.DSV4_FP8
    cache, q = make_cache(rng, layout, 40, 64, spread=0), make_q(rng, 160, 1, 64, layout, steep(64))
    return cumla.sparse_mla_decode, (q, cache, make_indices(rng, 160, 1, 700, 40 * 64)), {}


def prefill_problem(rng):
    import cumla
    from support.attention import make_indices, steep

    q, kv = normal(rng, 300, 64, 512) * steep(64).astype(np.float32), normal(rng, 4096, 512)
    return cumla.sparse_mla_prefill, (as_bf16(q), as_bf16(kv), make_indices(rng, 300, 1, 640, 4096)[:, 0]), {}


def prefill_fp8_problem(rng):
    function, arrays, _ = prefill_problem(rng)
    return function, arrays, {"precision": "fp8"}


def few_heads_problem(rng):
    import cumla
    from support.attention import make_indices, steep

    q, kv = normal(rng, 300, 16, 576) * steep(16).astype(np.float32), normal(rng, 4096, 576)
    return cumla.sparse_mla_prefill, (as_bf16(q), as_bf16(kv), make_indices(rng, 300, 1, 640, 4096)[:, 0]), {}


def indexer_problem(rng):
    import cumla

    queries, keys = 300, 3000
    q, k = (rng.integers(0, 0x7F, shape, dtype=np.uint8) for shape in ((queries, 64, 128), (keys, 128)))
    weights, scales = normal(rng, queries, 64), np.exp2(rng.uniform(-3, 3, keys)).astype(np.float32)
    starts = rng.integers(0, keys // 2, queries, dtype=np.int32)
    ends = rng.integers(keys // 2, keys, queries, dtype=np.int32)
    options = {"kv_scales": scales, "clean_logits": True}
    return cumla.fp8_mqa_logits, (q, k, weights, starts, ends), options


def dense_decode_problem(rng):
    import cumla

    table = rng.permutation(48 * 16).reshape(48, 16).astype(np.int32)
    q, cache = normal(rng, 48, 2, 70, 576) * 5, normal(rng, 48 * 16, 64, 576) * 0.3
    lens = rng.integers(1, 1024, 48, dtype=np.int32)
    return cumla.dense_mla_decode, (as_bf16(q), as_bf16(cache), table, lens), {}


def mha_problem(rng):
    """Separate keys for every 128 queries of a head, so that loads are slower than their use."""
    import cumla

    requests, heads, queries, keys = 16, 8, 128, 1024
    starts = [np.arange(requests + 1, dtype=np.int32) * count for count in (queries, keys)]
    sizes = ((queries, 192, 4), (keys, 192, 1), (keys, 128, 1))
    arrays = [as_bf16(normal(rng, requests * count, heads, d) * size) for count, d, size in sizes]
    return cumla.mha_varlen, (*arrays, *starts), {"causal": False}


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def as_bf16(array):
    from support.lab import BF16

    return array.astype(BF16)


# The problem of a kernel, by its folder or file.
PROBLEMS = {
    "sm90/decode/": decode_problem,
    "sm90/prefill/": prefill_problem,
    "sm90/prefill_fp8/": prefill_fp8_problem,
    "sm90/few_heads/": few_heads_problem,
    "sm90/indexer/": indexer_problem,
    "sm90/dense/decode/": dense_decode_problem,
    "sm90/dense/mha_varlen.cu": mha_problem,
}


def kernel_of(mutant):
    return next(kernel for kernel in PROBLEMS if mutant.file.startswith(kernel))


def calls_of(kernel):
    """A function that runs a kernel on its problem, with the same arrays every time, and returns the results' bytes."""
    import cupy

    function, arrays, options = PROBLEMS[kernel](np.random.default_rng(0))
    arrays = [cupy.asarray(x) for x in arrays]
    options = {name: cupy.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    stream = cupy.cuda.get_current_stream()  # with a stream, calls bypass the launch cache
    sweep = cupy.zeros(SWEPT, np.uint8)

    def results():
        sweep.fill(0)  # so that all loads miss the cache and are late
        found = function(*arrays, **options, stream=stream)
        return [cupy.asnumpy(x).tobytes() for x in (found if isinstance(found, tuple) else (found,))]

    return results


def run(mutant):
    """In a separate process: exits with WRONG or UNNOTICED, or ends by a signal if it hangs."""
    import cupy

    from cumla.kernels.cuda import compile as compiler

    results = calls_of(kernel_of(mutant))
    right = results()
    if results() != right:
        raise AssertionError("the kernel as it is gives other bits every time")
    with tempfile.TemporaryDirectory() as mutated:
        write_without(mutant, mutated)
        compiler.look_first_in(pathlib.Path(mutated))
        wrong, said = 0, ""
        try:
            signal.alarm(TIMEOUT)
            results()  # compiles
            signal.alarm(RUN_SECONDS)
            wrong = sum(results() != right for _ in range(TIMES))
            said = f"{wrong} of {TIMES} runs wrong"
        except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError) as error:
            wrong, said = 1, f"error: {error}"[:90]
        if not compiler.source.cache_info().misses:
            raise AssertionError("nothing was compiled again")
    print(said, flush=True)
    os._exit(WRONG if wrong else UNNOTICED)  # without cleanup: the device may not respond


def in_process(*options):
    """Run this script in a separate process: exit status and output."""
    # Kernels run without self-tests: their errors must show here.
    environment = {**os.environ, VARIABLE: "0"}
    command = [sys.executable, __file__, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return done.returncode, done.stdout.strip() or (done.stderr.strip().splitlines() or [""])[-1]


def watch(number):
    """Result of removing the statement: (whether the test expects it, in words, "" if it goes unnoticed)."""
    status, said = in_process("--mutant", str(number))
    if status == HUNG:
        return True, "hangs"
    return status in (WRONG, UNNOTICED), said if status != UNNOTICED else ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutant", type=int, help="the number of one, which is run in this process")
    parser.add_argument("--kernel", choices=PROBLEMS, help="one as it is, which is compiled in this process")
    args = parser.parse_args()
    all_mutants = list(mutants())
    if args.mutant is not None:
        return run(all_mutants[args.mutant])
    if args.kernel is not None:
        calls_of(args.kernel)()
        return None
    missed = dict.fromkeys(PROBLEMS, False)  # whether the removal of a wait was noticed
    problems = []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        tried = pool.map(lambda kernel: in_process("--kernel", kernel), PROBLEMS)
        for kernel, (status, said) in zip(PROBLEMS, tried, strict=True):
            if status:
                problems.append(f"{kernel} as it is: {said}")
        for mutant, (known, seen) in zip(all_mutants, pool.map(watch, range(len(all_mutants))), strict=True):
            kind = "fence" if mutant.is_fence else "wait"
            place = f"{kind} {mutant.file}:{mutant.line + 1} {mutant.statement[:40]}"
            print(f"{place}: {seen or 'hidden by the hardware'}", flush=True)
            if not known:
                problems.append(f"{place} could not be tried: {seen}")
            elif seen and not mutant.is_fence:
                missed[kernel_of(mutant)] = True
    unseen = [kernel for kernel, seen in missed.items() if not seen]
    problems += [f"{kernel}: no wait is missed, so its problem would show nothing" for kernel in unseen]
    return "\n".join(problems) or None


if __name__ == "__main__":
    sys.exit(main())

"""More than one GPU: attention with its context or heads sharded, and the exchanges between GPUs; on NCCL and on JAX.

Each row is measured on one GPU and on all, in CUDA graphs (JAX: as jitted functions called one after another); each
rank is a process. Times are the slowest rank's. Results are compared with one GPU's before they are timed. With one
GPU everything runs with one rank, which shows the overhead. Rows of --windows have it in their name.
"""

import json
import multiprocessing
import pathlib
import subprocess
import sys
import tempfile
import threading
from queue import Empty

import parallel_ranks
from common import Report, arguments, cupy

JAX_SECONDS = 150  # time limit of JAX's part


def on_nccl(report, size, only, windows):
    """Start the ranks and record the rows of rank 0."""
    context = multiprocessing.get_context("spawn")
    queue, failed = context.Queue(), False
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=parallel_ranks.run_rank, args=(r, size, folder, only, windows, queue))
            for r in range(size)
        ]
        for process in processes:
            process.start()
        running = set(range(size))
        while running:
            try:
                kind, what, more = queue.get(timeout=1)
            except Empty:
                running -= {rank for rank in running if processes[rank].exitcode}  # ranks that ended without "end"
                continue
            if kind == "row":
                report.add(*what, **more)
                report.finish(ranks=size)
            elif kind == "end":
                running.discard(what)
            else:
                failed |= kind == "error"
                print(what, flush=True)
        for rank, process in enumerate(processes):
            process.join(10)
            if process.exitcode != 0:
                how = "did not end" if process.exitcode is None else f"ended with exit code {process.exitcode}"
                print(f"rank {rank} {how}", flush=True)
                failed = True
                process.kill()
    return failed


def on_jax(report, size):
    """Run JAX's part first, in its own process: neither part then finds the other's memory on the GPUs."""
    script = pathlib.Path(__file__).parent / "parallel_jax.py"
    with subprocess.Popen([sys.executable, script, str(size)], stdout=subprocess.PIPE, text=True) as process:
        late = threading.Timer(JAX_SECONDS, process.kill)
        late.start()
        for line in process.stdout or ():
            if line.startswith("{"):
                row = json.loads(line)
                report.add(row.pop("op"), row.pop("config"), row.pop("impl"), **row)
                report.finish(ranks=size)
            else:
                print(line, end="", flush=True)
        process.wait()
        late.cancel()
    return process.returncode != 0


def main():
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, help="GPUs to use (all)")
    parser.add_argument("--no-jax", action="store_true", help="skip JAX")
    parser.add_argument("--windows", action="store_true", help="gather in memory that NCCL has registered on all GPUs")
    args = parser.parse_args()
    size = args.ranks or cupy.cuda.runtime.getDeviceCount()
    report = Report(args)
    failed = False
    if not args.no_jax and args.only in "dense jax":
        failed |= on_jax(report, size)
    failed |= on_nccl(report, size, args.only, args.windows)
    report.finish(ranks=size)
    return failed


if __name__ == "__main__":
    sys.exit(main())

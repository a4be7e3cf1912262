"""The paged caches' kernels: insert, gather, page copies, in turn with the functions that vLLM's users run.

    python benchmarks/cache.py [--json benchmarks/results/h200/cache.json]

`copy` is an elementwise kernel that moves as many bytes: what cumla's could at best reach.
"""

from common import copy_gbps, run

from cumla.bench.caches import recorded

if __name__ == "__main__":
    raise SystemExit(run(__doc__, recorded(), beside=("numba_cuda",), copy_gbps=copy_gbps()))

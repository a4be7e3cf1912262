"""Index maps, in turn with vLLM's Triton kernels, in CUDA graphs.

    python benchmarks/indices.py [--json benchmarks/results/h200/indices.json]

vLLM's functions allocate what they return and cumla's are given it.
"""

from common import copy_gbps, run

from cumla.bench.index_maps import recorded

if __name__ == "__main__":
    raise SystemExit(run(__doc__, recorded(), beside=("numba_cuda",), copy_gbps=copy_gbps()))

"""Metadata builders: host time of a build (us), and the device's within a CUDA graph (us_graph).

    python benchmarks/metadata.py [--json benchmarks/results/h200/metadata.json]

`validate=False` is a build that leaves out the checks of the batch.
"""

from common import run

from cumla.bench.step_suites import recorded_metadata

if __name__ == "__main__":
    raise SystemExit(run(__doc__, recorded_metadata(), beside=("numba_cuda",)))

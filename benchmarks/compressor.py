"""The compressor, and norms with RoPE, in CUDA graphs.

    python benchmarks/compressor.py [--json benchmarks/results/h200/compressor.json]

States are saved of the tokens that a later step reads: all of a decode, the last ones of a prompt.
"""

from common import run

from cumla.bench.layer_suites import recorded

if __name__ == "__main__":
    raise SystemExit(run(__doc__, recorded()))

"""The indexer: scores, the choice, both at once, queries and keys.

    python benchmarks/indexer.py [--json benchmarks/results/h200/indexer.json]

Peers where they can be imported: DeepGEMM (deep_gemm), and vLLM's C++ operations (vllm_c_ops.so, packed or not).
"""

from common import L2_BYTES, run

from cumla.bench.indexer_cases import recorded

if __name__ == "__main__":
    raise SystemExit(run(__doc__, recorded(), l2_bytes=L2_BYTES))

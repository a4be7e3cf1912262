"""Sparse MLA decode over FP8 caches, beside FlashMLA (as vLLM ships it) in the same process.

    python benchmarks/decode.py [--json benchmarks/results/h200/decode.json]

Rows with lengths are as layers call it; of full lists, each query token lists random slots of a cache that is far
larger than the L2 cache. Four sets of queries and indices are used in rotation. FLOP count what is attended to:
2 * heads * (head_dim + 512) for a query token and a key.
"""

from common import run

from cumla.bench.sparse import recorded_decodes

if __name__ == "__main__":
    raise SystemExit(run(__doc__, recorded_decodes()))

"""Sparse MLA prefill over gathered rows, beside FlashMLA (as vLLM ships it) in the same process.

    python benchmarks/prefill.py [--json benchmarks/results/h200/prefill.json]

Rows with lengths are chunks of prompts, whose neighbouring tokens select nearly the same. FLOP count what is listed:
2 * heads * (head_dim + 512) for a query token and a row; for FlashMLA too where it pads the heads to 64.
"""

from common import run

from cumla.bench.sparse import recorded_prefills

if __name__ == "__main__":
    raise SystemExit(run(__doc__, recorded_prefills()))

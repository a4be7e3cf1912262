"""Dense MLA: decode over paged rows, prefill with projected K and V, and the layer's loop over context.

    python benchmarks/mla.py [--json benchmarks/results/h200/mla.json]

FlashMLA's dense decode, as vLLM ships it, in the same process. FLOP count what is attended to: 2 * heads *
(d_qk + d_v) for a query and a key. The layer is only timed: a loop over 16 chunks of the context may not make it longer
than 1.15 times one pass.
"""

from common import run

from cumla.bench.step_suites import recorded_dense

if __name__ == "__main__":
    raise SystemExit(run(__doc__, recorded_dense()))

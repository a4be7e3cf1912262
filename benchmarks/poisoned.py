"""Sparse attention over values that float16 lacks, beside the same work over ordinary ones, and FlashMLA.

    python benchmarks/poisoned.py [--json benchmarks/results/h200/poisoned.json]

Decode of 128 requests: `zeros` are caches as they are allocated; `1 x 1e6` has a row whose RoPE part has 1e6 somewhere,
to which one request attends, `128 x NaN` one with NaN, to which all do; under `2^-95` all scales are that. Prefill of
4,096 tokens: each row has such a value, or all values are multiplied by 2^-95. FlashMLA's results are not checked.
"""

from common import run

from cumla.bench.poisoned import recorded

if __name__ == "__main__":
    raise SystemExit(run(__doc__, recorded()))

"""A C4A layer's prefill chunk whole, over both paths, beside vLLM's: two gathers, index map and FlashMLA.

    python benchmarks/prefill_chunks.py [--json benchmarks/results/h200/prefill_chunks.json]

Window 128; a token selects 512 compressed rows, of which its neighbour selects 90%. The first row is the path that the
layer takes by itself. Errors are distances from attention over the pages. Steps with prefills allocate, so their time
is that of calls which were queued before the first of them began.
"""

from common import run

from cumla.bench.chunks import recorded

if __name__ == "__main__":
    raise SystemExit(run(__doc__, recorded()))

"""Steps of a request trace: cumla against the chain of its peers, for each part of each kind of layer.

    python benchmarks/trace.py [--kinds c4a,window,c128a,v32] [--heads 64,16,128] [--steps decode64,mixed64x2048]
        [--json benchmarks/results/h200/trace.json]

The same as `cumla bench trace`; without a device it runs on the CPU, in small, and without peers.
"""

import sys

from cumla.__main__ import main

if __name__ == "__main__":
    raise SystemExit(main(["bench", "trace", *sys.argv[1:]]))

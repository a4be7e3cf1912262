"""Attention by both device backends, on the same arrays in one process.

python benchmarks/attention_backends.py [--json benchmarks/results/h200/attention_backends.json]
"""

from common import run

import cumla
from cumla.bench.dense import DenseDecode
from cumla.bench.layer_suites import Merge
from cumla.bench.sparse import Decode, Prefill

CASES = [
    *(Decode(cumla.DSV4_FP8, 64, b, 1, 128, 512, 256, lengths=True) for b in (1, 32, 128)),
    *(Decode(cumla.DSV4_FP8, 64, b, 1, 128, 512, 256) for b in (1, 32, 128)),
    Decode(cumla.DSV4_FP8, 128, 128, 2, 128, 1024, 256),
    Decode(cumla.V32_FP8, 128, 64, 2, 2048),
    Decode(cumla.DSV4_FP8, 64, 1, 1, 16384),
    *(Prefill(*sizes, 32 << 10) for sizes in ((512, 64, 640), (576, 128, 640), (512, 64, 2048))),
    *(Merge(tokens, 64) for tokens in (128, 4096)),
    *(DenseDecode(128, batch, 8192) for batch in (1, 16)),
]  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(run(__doc__, CASES, beside=("numba_cuda",)))

"""A family of operations in CUDA graphs, and other libraries' operations in the same process if they are installed.

    python benchmarks/operations.py decode [--json benchmarks/results/h200/decode.json]

attention_backends  attention by both device backends, on the same arrays
cache               inserts, gathers, page copies; `copy` is an elementwise kernel that moves the same number of
                    bytes, a bound for cumla's kernels
candidates          V4.1's candidate blocks: their selection, and top-k over the rows of selected blocks
compressor          the compressor, and norms with RoPE. It saves states of the tokens that a later step reads: all
                    tokens of a decode, the last ones of a prompt
decode              sparse decode over FP8 caches. Rows with lengths are calls of layers; in the others each query
                    token lists random slots of a cache that is far larger than the L2 cache. `early_release=False`
                    ends each call in an ordinary launch (docs/interop.md)
formats             every format of a cache: inserts and gathers with a copy, decodes over V4.1's rows and V4's with the
                    same number of keys, over bfloat16 rows by both kernels and over V3.2's FP8
indexer             scores, top-k, both at once, queries and keys; peers are DeepGEMM and vLLM's operations
indices             index maps; vLLM's Triton kernels allocate their results, cumla's write into given arrays
metadata            builders: host time of a build (us), device time within a graph (us_graph); `validate=False`
                    skips the checks of the batch
mla                 dense decode, prefill with projected K and V, and a layer's loop over context, which is only
                    timed: with 16 chunks it may take at most 1.15 times the time of one pass
portable            kernels of other compute capabilities, run on this device
prefill             sparse prefill over gathered rows. Rows with lengths have a sink and are chunks of prompts, whose
                    neighbouring tokens select nearly the same
products            products of FP8 weights and few tokens, at V4 Flash's sizes; `deep_gemm` includes its quantisation
                    of the activations, `bfloat16` is cuBLAS's product of weights of twice the bytes

Inputs rotate through several sets. FLOP are 2 * heads * (d_qk + d_v) for each query and key that it attends to, also
for FlashMLA where it pads the heads to 64.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import common
import recorded
from portable_cases import compiling


class Family(NamedTuple):
    """A family's cases, other backends to measure, and further entries of the file."""

    cases: Callable[[], list[Any]]
    backends: tuple[str, ...] = ()
    extra: Callable[[], dict[str, Any]] = dict


def copies():
    return {"copy_gbps": common.copy_gbps()}


NUMBA = ("numba_cuda",)
FAMILIES = {
    "attention_backends": Family(recorded.attention_backends, NUMBA),
    "cache": Family(recorded.cache, NUMBA, copies),
    "candidates": Family(recorded.candidates),
    "compressor": Family(recorded.compressor),
    "decode": Family(recorded.decode),
    "formats": Family(recorded.formats, extra=copies),
    "indexer": Family(recorded.indexer, extra=lambda: {"l2_bytes": common.L2_BYTES}),
    "indices": Family(recorded.indices, NUMBA, copies),
    "metadata": Family(recorded.metadata, NUMBA),
    "mla": Family(recorded.mla),
    "portable": Family(lambda: compiling(recorded.portable())),
    "prefill": Family(recorded.prefill),
    "products": Family(recorded.products),
}

if __name__ == "__main__":
    parser = common.case_arguments(__doc__)
    parser.add_argument("family", choices=FAMILIES)
    args = parser.parse_args()
    family = FAMILIES[args.family]
    sys.exit(common.run(args, family.cases(), family.backends, **family.extra()))

"""A family of operations in CUDA graphs, beside other libraries' in the same process where these can be imported.

    python benchmarks/operations.py decode [--json benchmarks/results/h200/decode.json]

attention_backends  attention by both device backends, on the same arrays
cache               inserts, gathers, page copies; `copy` is an elementwise kernel that moves as many bytes, which is
                    what cumla's could at best reach
compressor          the compressor, and norms with RoPE. States are saved of the tokens that a later step reads: all
                    of a decode, the last ones of a prompt
decode              sparse decode over FP8 caches. Rows with lengths are as layers call it; of full lists, each query
                    token lists random slots of a cache that is far larger than the L2 cache
formats             every format of a cache: inserts and gathers beside a copy, decodes over V4.1's rows beside V4's of
                    as many keys, over bfloat16 rows by both kernels beside V3.2's FP8
indexer             scores, the choice, both at once, queries and keys; peers are DeepGEMM (deep_gemm) and vLLM's C++
                    operations (vllm_c_ops.so, packed or not)
indices             index maps; vLLM's Triton kernels allocate what they return and cumla's are given it
metadata            builders: host time of a build (us), the device's within a graph (us_graph); `validate=False`
                    leaves out the checks of the batch
mla                 dense decode, prefill with projected K and V, and a layer's loop over context, which is only
                    timed: 16 chunks may not make it longer than 1.15 times one pass
poisoned            sparse attention over values that float16 lacks. Decode of 128 requests: `zeros` are caches as they
                    are allocated; `1 x 1e6` has a row whose RoPE part has 1e6 somewhere, to which one request attends,
                    `128 x NaN` one with NaN, to which all do; under `2^-95` all scales are that. Prefill of 4,096
                    tokens: each row has such a value, or all values are multiplied by 2^-95
portable            kernels of other compute capabilities on this device as a stand-in, and what its instructions reach;
                    `share` is of the pace of mma.sync and of the memory
prefill             sparse prefill over gathered rows. Rows with lengths have a sink and are chunks of prompts, whose
                    neighbouring tokens select nearly the same
products            of FP8 weights and few tokens, at V4 Flash's sizes; `deep_gemm` includes its quantisation of the
                    activations, `bfloat16` is cuBLAS's product of weights of twice the bytes
prefill_chunks      a C4A layer's prefill chunk whole, over both paths, beside vLLM's two gathers, index map and
                    FlashMLA. The first row is the path that the layer takes by itself. Errors are distances from
                    attention over the pages. Such steps allocate: their calls are queued before the first one begins

Inputs rotate through several sets. FLOP count what is attended to, 2 * heads * (d_qk + d_v) for a query and a key,
for FlashMLA too where it pads the heads to 64.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import common

import cumla
from cumla.bench import (
    caches,
    candidate_cases,
    chunks,
    format_cases,
    index_maps,
    indexer_cases,
    layer_suites,
    poisoned,
    portable,
    products,
    sparse,
    step_suites,
)
from cumla.bench.dense import DenseDecode
from cumla.bench.sparse import Decode, Prefill


def of_both_backends():
    return [
        *(Decode(cumla.DSV4_FP8, 64, b, 1, 128, 512, 256, lengths=True) for b in (1, 32, 128)),
        *(Decode(cumla.DSV4_FP8, 64, b, 1, 128, 512, 256) for b in (1, 32, 128)),
        Decode(cumla.DSV4_FP8, 128, 128, 2, 128, 1024, 256),
        Decode(cumla.V32_FP8, 128, 64, 2, 2048),
        Decode(cumla.DSV4_FP8, 64, 1, 1, 16384),
        *(Prefill(*sizes, 32 << 10) for sizes in ((512, 64, 640), (576, 128, 640), (512, 64, 2048))),
        *(layer_suites.Merge(tokens, 64) for tokens in (128, 4096)),
        *(DenseDecode(128, batch, 8192) for batch in (1, 16)),
    ]


class Family(NamedTuple):
    """cases, backends measured beside the CUDA sources, and what the file has beside the rows."""

    cases: Callable[[], list[Any]]
    beside: tuple[str, ...] = ()
    extra: Callable[[], dict[str, Any]] = dict


def copies():
    return {"copy_gbps": common.copy_gbps()}


NUMBA = ("numba_cuda",)
FAMILIES = {
    "attention_backends": Family(of_both_backends, NUMBA),
    "cache": Family(caches.recorded, NUMBA, copies),
    "compressor": Family(layer_suites.recorded),
    "decode": Family(sparse.recorded_decodes),
    "candidates": Family(candidate_cases.recorded),
    "formats": Family(format_cases.recorded, extra=copies),
    "indexer": Family(indexer_cases.recorded, extra=lambda: {"l2_bytes": common.L2_BYTES}),
    "indices": Family(index_maps.recorded, NUMBA, copies),
    "metadata": Family(step_suites.recorded_metadata, NUMBA),
    "mla": Family(step_suites.recorded_dense),
    "poisoned": Family(poisoned.recorded),
    "portable": Family(portable.compiling, extra=lambda: {"instructions": portable.shares}),
    "products": Family(products.recorded),
    "prefill": Family(sparse.recorded_prefills),
    "prefill_chunks": Family(chunks.recorded),
}

if __name__ == "__main__":
    parser = common.case_arguments(__doc__)
    parser.add_argument("family", choices=FAMILIES)
    args = parser.parse_args()
    family = FAMILIES[args.family]
    raise SystemExit(common.run(args, family.cases(), family.beside, **family.extra()))

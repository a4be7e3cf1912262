"""torch tensors, eagerly and under torch.compile without a graph break, on CPU or GPU.

An optional argument names the backend, such as numba_cuda; the default is the device's fastest.
"""

import sys

import torch

import cumla
import cumla.interop.torch as ops

REQUESTS, HEADS, BLOCK_SIZE, TOPK = 4, 16, 64, 100


def step(cumla_or_ops, cache, k, slots, q, indices, backend):
    """Insert and attend, with cumla itself or with its operators for compilers, which have the same signatures."""
    cumla_or_ops.quantize_and_insert_k_cache(k, cache, slots, BLOCK_SIZE, backend=backend)
    out, _ = cumla_or_ops.sparse_mla_decode(q, cache, indices, backend=backend)
    return out * 2


def main(backend: str | None = None) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    num_slots = 12 * BLOCK_SIZE
    k = torch.randn(num_slots, 512, dtype=torch.bfloat16, device=device)
    q = torch.randn(REQUESTS, 1, HEADS, 512, dtype=torch.bfloat16, device=device)
    slots = torch.randperm(num_slots, device=device)
    indices = torch.randint(num_slots, (REQUESTS, 1, TOPK), dtype=torch.int32, device=device)
    caches = [torch.zeros(12, BLOCK_SIZE, 584, dtype=torch.uint8, device=device) for _ in range(2)]

    eager = step(cumla, caches[0], k, slots, q, indices, backend)
    compiler = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(step, fullgraph=True, backend=compiler)(ops, caches[1], k, slots, q, indices, backend)
    same = torch.equal(eager, compiled) and torch.equal(*caches)
    print(f"out {compiled.dtype} {tuple(compiled.shape)} on {device}, as eager: {same}")


if __name__ == "__main__":
    main(*sys.argv[1:])

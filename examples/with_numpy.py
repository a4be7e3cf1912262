"""One decode step on NumPy arrays: insert the new rows into a paged FP8 cache, then attend. Runs on any machine.

An optional argument names the backend, such as reference; the default is cpu.
"""

import sys

import ml_dtypes
import numpy as np

import cumla
from cumla.metadata import compute_slot_mapping

BF16 = ml_dtypes.bfloat16
REQUESTS, HEADS, BLOCK_SIZE, WINDOW = 4, 16, 64, 128


def main(backend: str | None = None) -> None:
    rng = np.random.default_rng(0)
    cache = cumla.DSV4_FP8.allocate(num_blocks=12, block_size=BLOCK_SIZE)  # uint8 [12, 64, 584]
    block_table = rng.permutation(12).reshape(REQUESTS, 3).astype(np.int32)
    seq_lens = np.array([1, 70, 128, 190], np.int32)

    # Each request's rows so far, the newest one included, are inserted into the slots of its block table.
    starts = np.concatenate([[0], np.cumsum(seq_lens)]).astype(np.int32)
    slots = compute_slot_mapping(starts[-1], starts, seq_lens, block_table, BLOCK_SIZE, backend=backend)
    cumla.quantize_and_insert_k_cache(
        rng.standard_normal((len(slots), 512)).astype(BF16), cache, slots, BLOCK_SIZE, backend=backend
    )

    # One new token a request, which attends to the last WINDOW positions.
    indices, lens = cumla.compute_swa_indices_and_lens(
        np.arange(REQUESTS + 1, dtype=np.int32), seq_lens, np.arange(REQUESTS, dtype=np.int32),
        np.ones(REQUESTS, np.bool_), block_table, BLOCK_SIZE, WINDOW, REQUESTS, backend=backend,
    )  # fmt: skip
    q = rng.standard_normal((REQUESTS, 1, HEADS, 512)).astype(BF16)
    out, lse = cumla.sparse_mla_decode(q, cache, indices[:, None], topk_length=lens, backend=backend)
    print(f"out {out.dtype} {out.shape}, lse {lse.dtype} {lse.shape}, keys attended {lens.tolist()}")


if __name__ == "__main__":
    main(*sys.argv[1:])

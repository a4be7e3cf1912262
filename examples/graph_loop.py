"""A decode loop as one CUDA graph: each replay advances the batch by one token, builds metadata and runs a layer.

Nothing is allocated, copied from the host or read back between replays.

An optional argument names the backend, such as numba_cuda; the default is the device's fastest.
"""

import sys

import cupy
import ml_dtypes
import numpy as np

import cumla
from cumla.layers.sparse import LayerWorkspace, SparseMLALayer
from cumla.metadata import DeepseekSparseSWAMetadataBuilder, ServingConfig
from cumla.metadata.batch import CommonAttentionMetadata

REQUESTS, HEADS, BLOCK_SIZE, LONGEST, STEPS = 8, 64, 64, 512, 20
COLUMNS = LONGEST // BLOCK_SIZE


class Loop:
    """The batch's arrays, at fixed addresses, and one step."""

    def __init__(self, backend: str | None) -> None:
        self.backend = backend
        rng = np.random.default_rng(0)
        self.starts = np.arange(REQUESTS + 1, dtype=np.int32)
        self.seq_lens = cupy.asarray(rng.integers(1, LONGEST - STEPS, REQUESTS).astype(np.int32))
        self.block_table = cupy.asarray(rng.permutation(REQUESTS * COLUMNS).reshape(REQUESTS, -1).astype(np.int32))
        self.tokens, self.positions, self.slots = (cupy.zeros(REQUESTS, np.int64) for _ in range(3))
        self.sampled = cupy.zeros(REQUESTS, np.int64)
        self.query_start_loc = cupy.asarray(self.starts)
        self.cache = cumla.DSV4_FP8.allocate(REQUESTS * COLUMNS, BLOCK_SIZE, xp=cupy)
        self.q = cupy.asarray(rng.standard_normal((REQUESTS, HEADS, 512)).astype(ml_dtypes.bfloat16))
        self.k = cupy.asarray(rng.standard_normal((REQUESTS, 512)).astype(ml_dtypes.bfloat16))
        self.out = cupy.zeros_like(self.q)
        self.workspace = LayerWorkspace.allocate(self.q)
        self.layer = SparseMLALayer()
        self.builder = DeepseekSparseSWAMetadataBuilder(
            ServingConfig(block_size=BLOCK_SIZE, num_heads=HEADS, max_num_seqs=REQUESTS, max_model_len=LONGEST),
            backend=backend,
        )

    def step(self) -> None:
        cumla.advance_step(
            REQUESTS, REQUESTS, BLOCK_SIZE, self.tokens, self.sampled, self.positions, self.seq_lens, self.slots,
            self.block_table, backend=self.backend,
        )  # fmt: skip
        # On the host only bounds are known: the true lengths are on the device.
        bound = np.full(REQUESTS, LONGEST, np.int32)
        batch = CommonAttentionMetadata(
            self.query_start_loc, self.starts, self.seq_lens, bound, bound - 1, REQUESTS, REQUESTS, 1,
            self.block_table, self.slots,
        )  # fmt: skip
        metadata = self.builder.build(0, batch, validate=False)
        self.layer.step(
            self.q, self.k, self.cache, metadata, out=self.out, workspace=self.workspace, backend=self.backend
        )


def main(backend: str | None = None) -> None:
    loop = Loop(backend)
    loop.step()  # compiles the kernels and allocates the graph's memory
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        loop.step()
        graph = stream.end_capture()
        before = loop.seq_lens.get(stream=stream)
        for _ in range(STEPS):
            graph.launch(stream)
        after = loop.seq_lens.get(stream=stream)
    print(f"{STEPS} steps, lengths from {before.tolist()} to {after.tolist()}")


if __name__ == "__main__":
    main(*sys.argv[1:])

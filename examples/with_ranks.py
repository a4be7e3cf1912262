"""Dense MLA decode over a context sharded across four ranks: here threads with NumPy, on GPUs with NCCL.

python examples/with_ranks.py
"""

import ml_dtypes
import numpy as np

import cumla
from cumla.parallel import ContextAttention, Shard, local_seq_lens, local_slot_mapping, run_threads

RANKS, BLOCK, HEADS = 4, 16, 8
rng = np.random.default_rng(0)
seq_lens = np.array([700, 333], np.int32)  # two requests, whose rows are packed
starts = np.array([0, 700, 1033], np.int32)
rows = rng.standard_normal((1033, 576)).astype(ml_dtypes.bfloat16)
q = rng.standard_normal((2, HEADS, 576)).astype(ml_dtypes.bfloat16)


def rank(comm):
    """Insert a quarter of the rows, attend to them, and merge with the results of the other ranks."""
    shard = Shard(comm.rank, comm.size, interleave=BLOCK)
    block_table = np.arange(2 * 12, dtype=np.int32).reshape(2, 12)  # this rank's pages
    cache = np.zeros((24, BLOCK, 576), ml_dtypes.bfloat16)
    slots = local_slot_mapping(starts, seq_lens, block_table, BLOCK, shard, num_tokens=len(rows))
    cumla.concat_and_cache_mla(rows[:, :512], rows[:, 512:], cache, slots)  # -1: another rank's row
    out, lse = ContextAttention(comm).dense_decode(q, cache, block_table, local_seq_lens(seq_lens, shard))
    print(f"rank {comm.rank}: {(slots >= 0).sum()} rows, sent {sum(comm.traffic.values()):,} bytes")
    return out.astype(np.float32), lse


def one_device():
    cache = np.zeros((2 * 44, BLOCK, 576), ml_dtypes.bfloat16)
    block_table = np.arange(2 * 44, dtype=np.int32).reshape(2, 44)
    slots = np.concatenate([np.arange(700), 44 * BLOCK + np.arange(333)])
    cumla.concat_and_cache_mla(rows[:, :512], rows[:, 512:], cache, slots)
    out, lse = cumla.dense_mla_decode(q[:, None], cache, block_table, seq_lens)
    return out[:, 0].astype(np.float32), lse[..., 0]


if __name__ == "__main__":
    want = one_device()
    for out, lse in run_threads(RANKS, rank):
        assert np.abs(out - want[0]).max() < 2e-2
        assert np.abs(lse - want[1]).max() < 1e-3
    print("every rank has the result of one device")

"""Sizes that fit in an int32 and whose product does not, emulated without large arrays."""

import ctypes

import numpy as np
import pytest

from cumla.kernels.cuda import compile as compiler
from cumla.kernels.cuda import indexer
from emulation import launches

INT32_MAX = 2**31 - 1


def launch(here, text, name, blocks, threads, *arrays):
    """The first array's contents after a kernel ran on these arrays."""
    placed = [here.put(x) for x in arrays]
    packed = (ctypes.c_void_p * len(placed))(*[x.data.ptr for x in placed])
    launches.Kernel(text, name, 90).launch((blocks, 1, 1), (threads, 1, 1), 4096, ctypes.addressof(packed))
    return here.get(placed[0])


WORK_RANGES = """
extern "C" __global__ void work_ranges(int64* out, const int* starts, const int* ends, const int64* sizes) {
    Problem problem{};
    problem.starts = starts, problem.ends = ends, problem.queries = int(sizes[0]), problem.keys = int(sizes[1]);
    problem.compressed_width = 1;
    WorkRange work = work_range_of(problem);
    int64 found[5] = {work.group, work.skipped, work.tiles, work.first_key, work.cost};
    if (threadIdx.x == 0)
        for (int i = 0; i < 5; ++i) out[5 * blockIdx.x + i] = found[i];
}
"""


@pytest.mark.parametrize(
    ("queries", "keys"), [(1 << 16, 1 << 24), (1 << 17, 1 << 24), (9000, 1 << 30), (640 * 8, 1 << 30), (40, 300)]
)
def test_tiles_of_the_indexers_ranges(here, queries, keys):
    """Compressed rows of one logit each: the first query of a group sees the first key, the last one the last."""
    of_group, of_tile, group_cost, blocks = 8, 64, 2, 7
    starts = np.zeros(queries, np.int32)
    starts[of_group - 1 :: of_group] = keys - 1
    values = {
        "HEADS": 64,
        "PAGED": 0,
        "MXFP4": 0,
        "PASS": 2,
        "PASSES": 1,
        "QUERY_GROUPS": 4,
        "MAXIMA": 0,
        "CANDIDATES": 0,
    }
    macros = "".join(f"#define {name} {value}\n" for name, value in values.items())
    found = launch(
        here, macros + compiler.source("sm90/indexer/logits.cu") + WORK_RANGES, "work_ranges", blocks,
        indexer.HOPPER_THREADS, np.full((blocks, 5), -1, np.int64), starts, starts + 1,
        np.array([queries, keys], np.int64),
    )  # fmt: skip
    groups, whole = -(-queries // of_group), -(-keys // of_tile)
    sizes = np.where(np.arange(groups) * of_group + of_group <= queries, whole, 1)  # one key for each query
    costs = sizes + group_cost
    ends = np.cumsum(costs)
    total, first = int(ends[-1]), 0
    for block, (group, skipped, tiles, first_key, cost) in enumerate(found.tolist()):
        assert cost == total // blocks + (block < total % blocks)
        assert (group, first_key, tiles) == (np.searchsorted(ends, first, side="right"), 0, sizes[group])
        assert skipped == first - (ends[group] - costs[group])
        first += cost
    assert first == total


DENSE_BLOCKS = """
extern "C" __global__ void dense_blocks(int64* out, const int* lens, const int* columns) {
    if (threadIdx.x == 0) out[0] = DenseTokens{lens, 1, 1, columns[0], 64, true}.blocks(0);
}
"""


@pytest.mark.parametrize("length", [INT32_MAX, INT32_MAX - 63, 2**30, 1, 0, -1])
def test_blocks_of_dense_decode(here, length):
    text = compiler.source("common/dense/work.cuh") + DENSE_BLOCKS
    for columns in (2**30, 3):
        given = [np.array([x], np.int32) for x in (length, columns)]
        (blocks,) = launch(here, text, "dense_blocks", 1, 32, np.full(1, -1, np.int64), *given)
        assert blocks == min(-(-max(length, 0) // 64), columns)

"""What a device's instructions reach: products of mma.sync, copies of rows by cp.async.

The portable kernels consist of these two; their rows in the results are shares of what is measured here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .measure import cupy
from .problem import Arrays, Problem, Sizes

THREADS, ROUNDS, PRODUCTS = 256, 2048, 16  # products of 16 x 8 x 16 that do not depend on each other
COPIED_ROWS, RING = 1 << 12, 4  # rows that a CTA copies; steps of `at_once` rows that arrive at a time

SOURCE = r"""
#define THREADS %d
#define ROUNDS %d
#define PRODUCTS %d

extern "C" __global__ void __launch_bounds__(THREADS, 1) products(float* out) {
    float x[PRODUCTS][4] = {};
    unsigned a[4], b[2];
    for (int i = 0; i < 4; ++i) a[i] = threadIdx.x * 0x00010001u & 0x00ff00ffu;
    b[0] = b[1] = a[0];
#pragma unroll 1
    for (int round = 0; round < ROUNDS; ++round)
#pragma unroll
        for (int i = 0; i < PRODUCTS; ++i)
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.TYPE.TYPE.f32 "
                "{%%0, %%1, %%2, %%3}, {%%4, %%5, %%6, %%7}, {%%8, %%9}, {%%0, %%1, %%2, %%3};"
                : "+f"(x[i][0]), "+f"(x[i][1]), "+f"(x[i][2]), "+f"(x[i][3])
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    float sum = 0.0f;
    for (int i = 0; i < PRODUCTS; ++i) sum += x[i][0] + x[i][1] + x[i][2] + x[i][3];
    if (sum == 1.2345f) out[0] = sum;  // never; keeps the products
}

#define ROW_BYTES %d
#define AT_ONCE %d
#define COPIED_ROWS %d
#define RING %d

extern "C" __global__ void __launch_bounds__(THREADS, 1)
copies(const unsigned char* rows, const int* indices, float* out) {
    extern __shared__ unsigned char ring[];
    const int lanes = THREADS / AT_ONCE, row = threadIdx.x / lanes, part = threadIdx.x %% lanes;
    const int* mine = indices + blockIdx.x * COPIED_ROWS + row;
    unsigned to = unsigned(__cvta_generic_to_shared(ring)) + row * ROW_BYTES;
    int slot = mine[0];
    for (int step = 0; step < COPIED_ROWS / AT_ONCE; ++step) {
        const unsigned char* from = rows + (long long)(slot) * ROW_BYTES;
        slot = mine[min(step + 1, COPIED_ROWS / AT_ONCE - 1) * AT_ONCE];
#pragma unroll
        for (int at = 16 * part; at < ROW_BYTES; at += 16 * lanes) {
            unsigned target = to + step %% RING * AT_ONCE * ROW_BYTES + at;
            asm volatile("cp.async.cg.shared.global.L2::128B [%%0], [%%1], 16;" ::"r"(target), "l"(from + at)
                         : "memory");
        }
        asm volatile("cp.async.commit_group;\ncp.async.wait_group %%0;" ::"n"(RING - 1) : "memory");
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    if (ring[threadIdx.x] == 255 && out[0] == 1.2345f) out[1] = 0.0f;
}
"""  # fmt: skip


@functools.cache
def _kernel(name: str, kind: str, row_bytes: int = 1024, at_once: int = 32) -> Any:
    text = SOURCE % (THREADS, ROUNDS, PRODUCTS, row_bytes, at_once, COPIED_ROWS, RING)
    made = cupy().RawKernel(text.replace("TYPE", kind), name)
    made.max_dynamic_shared_size_bytes = RING * at_once * row_bytes
    return made


def _multiprocessors() -> int:
    return int(cupy().cuda.Device().attributes["MultiProcessorCount"])


@dataclass(frozen=True)
class Products:
    """Products of mma.sync m16n8k16 with float32 sums, operands in registers. kind: bf16 or f16."""

    kind: str

    op: ClassVar[str] = "mma.sync"

    def __str__(self) -> str:
        return f"m16n8k16 {self.kind}"

    def problem(self, sizes: Sizes) -> Problem:
        out, ctas = cupy().zeros(2, np.float32), _multiprocessors()

        def call() -> None:
            _kernel("products", self.kind)((ctas,), (THREADS,), (out,))

        flop = ctas * (THREADS // 32) * ROUNDS * PRODUCTS * 2 * 16 * 8 * 16
        return Problem(self.op, str(self), {"instruction": ("cupy", [call, call])}, 0, flop)


@dataclass(frozen=True)
class Copies:
    """Random rows into shared memory by cp.async, from `rows` rows, as an attention kernel's ring has them, no more."""

    row_bytes: int
    rows: int
    at_once: int = 32

    op: ClassVar[str] = "cp.async"

    def __str__(self) -> str:
        return f"{self.row_bytes} B of {self.rows >> 10}K, {RING} x {self.at_once} rows"

    def problem(self, sizes: Sizes) -> Problem:
        arrays, xp, ctas = Arrays(sizes), cupy(), _multiprocessors()
        rows, out = xp.zeros(self.rows * self.row_bytes, np.uint8), xp.zeros(2, np.float32)
        sets = [arrays.integers(self.rows, ctas, COPIED_ROWS) for _ in range(2)]
        kernel = _kernel("copies", "bf16", self.row_bytes, self.at_once)
        shared = RING * self.at_once * self.row_bytes

        def call(indices: Any) -> None:
            kernel((ctas,), (THREADS,), (rows, indices, out), shared_mem=shared)

        calls = [functools.partial(call, x) for x in sets]
        moved = ctas * COPIED_ROWS * self.row_bytes
        return Problem(self.op, str(self), {"instruction": ("cupy", calls)}, moved)


def recorded() -> list[Products | Copies]:
    return [
        *(Products(kind) for kind in ("bf16", "f16")),
        *(Copies(size, rows) for size in (576, 1024, 1152) for rows in (32 << 10, 1 << 20)),
        *(Copies(1024, 32 << 10, at_once) for at_once in (8, 16)),
    ]

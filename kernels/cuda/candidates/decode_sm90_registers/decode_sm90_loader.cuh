// The loaders of decode_sm90.cu.
#pragma once
#include "decode_sm90_memory.cuh"

// Two warps bring Q of the next tile, slice by slice, as the scorer is done with a slice of this one. A lane has a
// head: it copies 64 values, waits for them, and puts them in the order of the products, as float16 (RoPE as it is).
struct Loader {
    const Problem& problem;
    int row;

    __device__ Loader(const Problem& p) : problem(p), row(threadIdx.x % 64) {}

    // The n-th slice of a tile in the order in which the scorer takes them: RoPE first.
    static __device__ int slice_at(int n) { return n == 0 ? SLICES : n - 1; }

    __device__ uint32 chunk_at(int slice, int chunk) { return Q_AT + slice * TILE_BYTES + row * 128 + ((chunk ^ (row & 7)) << 4); }

    __device__ void copy(int tile, uint32 parity) {
        TilePlace at(problem, tile);
        bool here = at.first_head + row < problem.heads;
        const bf16* q = problem.q + at.b * problem.q_stride_b + at.s * problem.q_stride_s +
                        (here ? at.first_head + row : 0) * problem.q_stride_h;
#pragma unroll 1
        for (int n = 0; n <= SLICES; ++n) {
            int slice = slice_at(n);
            barrier_wait(Q_EMPTY + 8 * slice, parity);
#pragma unroll
            for (int chunk = 0; chunk < 8; ++chunk) copy_async<16>(chunk_at(slice, chunk), q + slice * 64 + chunk * 8, here);
            copies_commit();
        }
    }

    // A lane's 32 pairs of values of a slice, from the order of a row to that of the products: pair 8 j + 2 i + h goes
    // to product i, its half h, position j (see Scorer::load).
    template <bool CONVERT> __device__ void arrange(int slice, uint32& largest) {
        uint32 pairs[32];
#pragma unroll
        for (int chunk = 0; chunk < 8; ++chunk) {
            uint4 x = lds128(chunk_at(slice, chunk));
            pairs[4 * chunk] = x.x, pairs[4 * chunk + 1] = x.y, pairs[4 * chunk + 2] = x.z, pairs[4 * chunk + 3] = x.w;
        }
#pragma unroll
        for (int chunk = 0; chunk < 8; ++chunk) {  // product chunk / 2, half chunk % 2
            uint4 x = {pairs[chunk], pairs[8 + chunk], pairs[16 + chunk], pairs[24 + chunk]};
            if (CONVERT) largest = __vmaxu2(largest, largest_of_8(x)), x = bf16x8_to_f16x8(x);
            sts128(chunk_at(slice, chunk), x);
        }
    }

    template <int N> __device__ void finish(uint32& largest) {
        if constexpr (N <= SLICES) {
            copies_wait<SLICES - N>();
            arrange<(N > 0)>(slice_at(N), largest);
            fence_for_matrix();
            warp_arrive(Q_FULL + 8 * slice_at(N));
            finish<N + 1>(largest);
        }
    }

    __device__ void run() {
        Share share(problem);
        Work work;
        uint32 parity = 1;
        while (share.next(problem, work)) {
            copy(work.tile, parity);
            uint32 largest = 0;
            finish<0>(largest);
            largest = __reduce_max_sync(~0u, max(largest & 0xffff, largest >> 16));
            // Zero is exact; what is small otherwise would lose its last bits.
            if (largest > MAX_F16 || (largest && largest < MIN_Q)) problem.unsafe[work.tile] = 1;
            parity ^= 1;
        }
    }
};

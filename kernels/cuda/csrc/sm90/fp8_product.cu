// out [tokens, rows] = x [tokens, K] W^T of e4m3 values: x with a scale for each 128 columns of a token, W for each block of 128 x 128.
//
// Grid: up to a CTA an SM; each takes every gridDim.x-th tile of 128 tokens and 128 rows. A warp copies chunks of 128 columns by TMA,
// for the next tile too while the last one's result is stored. Two warpgroups multiply 64 tokens each. Tensor cores keep fewer bits of
// the sums of e4m3 products than float32 has, so the products of a chunk are added by them, then times both scales, then to
// the sum in float32, while the products of the next chunk run.
//
//     barrier      arrivals of a phase                       waits              guards
//     full[slot]   1: the producer, and the bytes of TMA     both warpgroups    a chunk of x and weights
//     empty[slot]  8: warps of both warpgroups               the producer       the chunk until its products have ended
//
// Macros: OUTPUT (bf16 or float).
#include "common/pdl.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"

constexpr int TOKENS = 128, ROWS = 128, DEPTH = 128, STAGES = 6, THREADS = 384;
constexpr int X_BYTES = TOKENS * DEPTH, STAGE_BYTES = X_BYTES + ROWS * DEPTH, RING_BYTES = STAGES * STAGE_BYTES;
[[maybe_unused]] constexpr int SHARED_BYTES = RING_BYTES + 16 * STAGES;  // and barriers

struct Fp8Product {
    const float* x_scales;
    const float* scales;
    OUTPUT* out;
    int64 x_scale_group_stride, x_scale_token_stride, x_scale_column_stride, scale_group_stride, scale_row_stride;
    int64 out_group_stride, out_stride;
    int tokens, rows, columns, block_rows, block_columns, token_tiles, row_tiles, tiles;
};

// Tiles of neighbouring CTAs have the same rows of weights.
struct Fp8Tile {
    int token, row, group;
    __device__ Fp8Tile(const Fp8Product& p, int tile) {
        token = tile % p.token_tiles * TOKENS;
        row = tile / p.token_tiles % p.row_tiles * ROWS;
        group = tile / p.token_tiles / p.row_tiles;
    }
};

// Addresses of a stage and of its barriers, after the last stage.
__device__ inline uint32 stage_at(int slot) { return SHARED_START + slot * STAGE_BYTES; }
__device__ inline uint32 full(int slot) { return SHARED_START + RING_BYTES + 8 * slot; }
__device__ inline uint32 empty(int slot) { return full(slot) + 8 * STAGES; }

struct Slot {
    int index = 0, round = 0;
    __device__ void advance() {
        if (++index == STAGES) index = 0, ++round;
    }
};

__device__ inline void load_tiles(const Fp8Product& p, const TensorMap& x_map, const TensorMap& map, int chunks) {
    Slot slot;
    for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        Fp8Tile at(p, tile);
        for (int i = 0; i < chunks; ++i, slot.advance()) {
            uint32 ready = full(slot.index), to = stage_at(slot.index);
            barrier_wait(empty(slot.index), slot.round % 2 ^ 1);
            barrier_arrive_expecting(ready, STAGE_BYTES);
            tma_load(to, x_map, i * DEPTH / 2, at.token, at.group, ready);
            tma_load(to + X_BYTES, map, i * DEPTH / 2, at.row, at.group, ready);
        }
    }
}

struct Consumer {
    const Fp8Product& p;
    int chunks, lane, first;  // the warp's first token in a tile
    Slot slot;                // of the next chunk
    float sum[64], products[2][64], factors[2][2];

    __device__ Consumer(const Fp8Product& p, int chunks) : p(p), chunks(chunks), lane(threadIdx.x % 32), first(threadIdx.x / 32 * 16) {}

    // The scales of chunk i, of tokens g and g + 8, times that of the rows.
    __device__ void load_factors(const Fp8Tile& at, int i, float (&to)[2]) const {
        i = min(i, chunks - 1);
        float scale = p.scales[at.group * p.scale_group_stride + at.row / p.block_rows * p.scale_row_stride + i * DEPTH / p.block_columns];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            int token = min(at.token + first + lane / 4 + 8 * j, p.tokens - 1);
            to[j] = scale * p.x_scales[at.group * p.x_scale_group_stride + token * p.x_scale_token_stride + i * p.x_scale_column_stride];
        }
    }

    // Start the products of the next chunk.
    __device__ void start(float (&to)[64]) {
        uint64 x = tile_descriptor(stage_at(slot.index) + threadIdx.x / 128 * 64 * DEPTH);
        uint64 w = tile_descriptor(stage_at(slot.index) + X_BYTES);
        barrier_wait(full(slot.index), slot.round % 2);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) wgmma_e4m3(to, x + 2 * step, w + 2 * step, step > 0);
        wgmma_commit();
        slot.advance();
    }

    // Add the products of the chunk before the last PENDING ones, and free its stage.
    template <int PENDING> __device__ void add(float (&from)[64], const float (&factor)[2]) {
        wgmma_wait<PENDING>();
        pin(from);
        warp_arrive(empty((slot.index + STAGES - 1 - PENDING) % STAGES));
#pragma unroll
        for (int j = 0; j < 64; ++j) sum[j] = fmaf(from[j], factor[j / 2 % 2], sum[j]);
    }

    __device__ void multiply(const Fp8Tile& at) {
#pragma unroll
        for (int j = 0; j < 64; ++j) sum[j] = 0.0f;
        load_factors(at, 0, factors[0]);
        start(products[0]);
        int i = 1;
        for (; i + 1 < chunks; i += 2) {
            load_factors(at, i, factors[1]);
            start(products[1]);
            add<1>(products[0], factors[0]);
            load_factors(at, i + 1, factors[0]);
            start(products[0]);
            add<1>(products[1], factors[1]);
        }
        if (i < chunks) {
            load_factors(at, i, factors[1]);
            start(products[1]);
            add<1>(products[0], factors[0]);
            add<0>(products[1], factors[1]);
        } else {
            add<0>(products[0], factors[0]);
        }
    }

    // A lane stores eight neighbouring values.
    __device__ void store(const Fp8Tile& at) const {
        int c = lane % 4;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            int token = at.token + first + lane / 4 + 8 * j;
            OUTPUT* out = p.out + at.group * p.out_group_stride + token * p.out_stride + at.row;
#pragma unroll
            for (int n = 0; n < 16; n += 4) {
                const float* from = sum + 4 * n + 2 * j;
                if (sizeof(OUTPUT) == 2) {
                    uint32 words[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) words[i] = pack(bf16{}, from[4 * i], from[4 * i + 1]);
                    transpose_words(words, lane);
                    int row = 8 * (n + c);
                    if (token < p.tokens && at.row + row < p.rows)
                        *reinterpret_cast<uint4*>(out + row) = {words[0], words[1], words[2], words[3]};
                } else {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        int row = 8 * (n + i) + 2 * c;
                        if (token < p.tokens && at.row + row < p.rows)
                            *reinterpret_cast<float2*>(out + row) = {from[4 * i], from[4 * i + 1]};
                    }
                }
            }
        }
    }

    __device__ void run() {
        for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
            Fp8Tile at(p, tile);
            multiply(at);
            store(at);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
fp8_product(const __grid_constant__ Fp8Product p, const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap map) {
    extern __shared__ uint4 memory[];
    if (shared_address(memory) != SHARED_START || reinterpret_cast<uint64>(&map) % 64) __trap();  // tiles are aligned to 1024 bytes
    if (threadIdx.x == 0)
        for (int i = 0; i < STAGES; ++i) barrier_init(full(i), 1), barrier_init(empty(i), 8 * WARP_ARRIVALS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncthreads();
    pdl_wait();
    int chunks = (p.columns + DEPTH - 1) / DEPTH;
    if (threadIdx.x >= 256) {
        warpgroup_reg_dealloc<40>();
        if (threadIdx.x == 256) load_tiles(p, x_map, map, chunks);
        return;
    }
    warpgroup_reg_alloc<232>();
    Consumer(p, chunks).run();
}

// out [tokens, rows] = x [tokens, K] W^T of e4m3 values. x has a scale for each 128 columns of a token, W for each
// block of 128 x 128.
//
// Grid: up to one CTA per SM; each takes every gridDim.x-th tile of 128 tokens and 128 rows. A warp copies chunks of
// 128 columns by TMA, also for the next tile while results are stored. Two warpgroups multiply 64 tokens each. Tensor
// cores sum e4m3 products with fewer bits than float32. They therefore sum only the products of a chunk, which are then
// multiplied by both scales and added in float32, while the products of the next chunk run. A warp writes 16-bit
// results to shared memory, and bulk copies store the rows of tokens while the next tile is multiplied: all CTAs store
// at the same time, faster than memory can write.
//
//     barrier      arrivals of a phase                       waits              guards
//     full[slot]   1: the producer, and the bytes of TMA     both warpgroups    a chunk of x and weights
//     empty[slot]  8: warps of both warpgroups               the producer       the chunk until its products have ended
//
// Macros: OUTPUT (bf16, float, or uint8: results are rounded to e4m3, with a scale for the 128 rows of a tile, a power of two, as
// common/quantize_groups.cu rounds).
#include "common/device.cuh"
#include "common/pages.cuh"
#include "sm90/hopper.cuh"

constexpr int TOKENS = 128, ROWS = 128, DEPTH = 128, STAGES = 6, THREADS = 384;
constexpr int X_BYTES = TOKENS * DEPTH, STAGE_BYTES = X_BYTES + ROWS * DEPTH, RING_BYTES = STAGES * STAGE_BYTES;
constexpr int RESULT_STRIDE = 2 * ROWS + 16;  // bytes of a token's results
[[maybe_unused]] constexpr int SHARED_BYTES = RING_BYTES + TOKENS * RESULT_STRIDE + 16 * STAGES;

// Its size places the tensor maps that follow at multiples of 64 bytes.
struct Fp8Product {
    const float* x_scales;
    const float* scales;
    OUTPUT* out;
    float* out_scales;  // [group][token][row / 128], of e4m3
    int64 x_scale_group_stride, scale_group_stride, out_group_stride, out_stride, out_scale_group_stride;
    int x_scale_token_stride, scale_row_stride, out_scale_token_stride, tokens, rows, columns, block_rows, block_columns, token_tiles,
        tiles;
};

// Tiles of neighbouring CTAs have the same rows of weights.
struct Fp8Tile {
    int token, row, group;
    __device__ Fp8Tile(const Fp8Product& p, int tile) {
        int row_tiles = (p.rows + ROWS - 1) / ROWS;
        token = tile % p.token_tiles * TOKENS;
        row = tile / p.token_tiles % row_tiles * ROWS;
        group = tile / p.token_tiles / row_tiles;
    }
};

// Address of a stage; after the last stage, of the results of a token. The barriers of the stages follow.
__device__ inline uint32 stage_at(int slot) { return SHARED_START + slot * STAGE_BYTES; }
__device__ inline uint32 result_at(int token) { return SHARED_START + RING_BYTES + token * RESULT_STRIDE; }
constexpr Barriers<STAGES> full{SHARED_START + RING_BYTES + TOKENS * RESULT_STRIDE}, empty{full.end()};

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
            Barrier ready = full[slot.index];
            uint32 to = stage_at(slot.index);
            empty[slot.index].wait(slot.round % 2 ^ 1);
            ready.arrive_expecting(STAGE_BYTES);
            tma_load(to, x_map, i * DEPTH / 2, at.token, at.group, ready);
            tma_load(to + X_BYTES, map, i * DEPTH / 2, at.row, at.group, ready);
        }
    }
}

struct Consumer {
    const Fp8Product& p;
    int chunks, lane, first;  // the warp's first token in a tile
    Slot slot;                // of the next chunk
    float sum[64], products[2][64], scales[2][3];

    __device__ Consumer(const Fp8Product& p, int chunks) : p(p), chunks(chunks), lane(threadIdx.x % 32), first(threadIdx.x / 32 * 16) {}

    __device__ int token_of(const Fp8Tile& at, int j) const { return at.token + first + lane / 4 + 8 * j; }

    // Load the scales of chunk i: of tokens g and g + 8, and of the rows. They are not multiplied here, because this
    // would wait for the loads.
    __device__ void load_scales(const Fp8Tile& at, int i, float (&to)[3]) const {
        i = min(i, chunks - 1);
#pragma unroll
        for (int j = 0; j < 2; ++j)
            to[j] = p.x_scales[at.group * p.x_scale_group_stride + min(token_of(at, j), p.tokens - 1) * int64(p.x_scale_token_stride) + i];
        to[2] = p.scales[at.group * p.scale_group_stride + at.row / p.block_rows * p.scale_row_stride + i * DEPTH / p.block_columns];
    }

    // Start the products of the next chunk.
    __device__ void start(float (&to)[64]) {
        uint64 x = tile_descriptor(stage_at(slot.index) + threadIdx.x / 128 * 64 * DEPTH);
        uint64 w = tile_descriptor(stage_at(slot.index) + X_BYTES);
        full[slot.index].wait(slot.round % 2);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) wgmma_rows(e4m3{}, to, x + 2 * step, w + 2 * step, step > 0);
        wgmma_commit();
        slot.advance();
    }

    // Add the products of the oldest chunk, after which PENDING chunks are in flight, and free its stage.
    template <int PENDING> __device__ void add(float (&from)[64], const float (&scale)[3]) {
        float factor[] = {scale[2] * scale[0], scale[2] * scale[1]};
        wgmma_wait<PENDING>();
        pin(from);
        empty[(slot.index + STAGES - 1 - PENDING) % STAGES].arrive_warp();
#pragma unroll
        for (int j = 0; j < 64; ++j) sum[j] = fmaf(from[j], factor[j / 2 % 2], sum[j]);
    }

    __device__ void multiply(const Fp8Tile& at) {
#pragma unroll
        for (int j = 0; j < 64; ++j) sum[j] = 0.0f;
        load_scales(at, 0, scales[0]);
        start(products[0]);
        int i = 1;
        for (; i + 1 < chunks; i += 2) {
            load_scales(at, i, scales[1]);
            start(products[1]);
            add<1>(products[0], scales[0]);
            load_scales(at, i + 1, scales[0]);
            start(products[0]);
            add<1>(products[1], scales[1]);
        }
        if (i < chunks) {
            load_scales(at, i, scales[1]);
            start(products[1]);
            add<1>(products[0], scales[0]);
            add<0>(products[1], scales[1]);
        } else {
            add<0>(products[0], scales[0]);
        }
    }

    template <class T> __device__ void store(const Fp8Tile& at, T* all) const {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            int token = token_of(at, j);
            store_token(at, sum + 2 * j, token, all + at.group * p.out_group_stride + token * p.out_stride + at.row);
        }
    }

    __device__ void store_token(const Fp8Tile& at, const float* from, int token, float* out) const {
#pragma unroll
        for (int n = 0; n < 16; ++n) {
            int row = 8 * n + 2 * (lane % 4);
            if (token < p.tokens && at.row + row < p.rows) *reinterpret_cast<float2*>(out + row) = {from[4 * n], from[4 * n + 1]};
        }
    }

    // Store through shared memory: lanes 0 to 15 copy a token each.
    __device__ void store(const Fp8Tile& at, bf16* all) const {
        bulk_stores_read<0>();  // of the last tile
        __syncwarp();
        uint32 to = result_at(first + lane % 16) + lane / 16 * 16;
#pragma unroll
        for (int n = 0; n < 16; n += 2) {
            const float* from = sum + 4 * n;
            stmatrix4(to + 16 * n, pack(bf16{}, from[0], from[1]), pack(bf16{}, from[2], from[3]), pack(bf16{}, from[4], from[5]),
                      pack(bf16{}, from[6], from[7]));
        }
        fence_proxy_async();
        __syncwarp();
        int token = at.token + first + lane;
        bf16* out = all + at.group * p.out_group_stride + token * p.out_stride + at.row;
        if (lane < 16 && token < p.tokens) bulk_store(out, result_at(first + lane), 2 * min(ROWS, p.rows - at.row));
        bulk_stores_commit();
    }

    // Store the values of a token, for all rows of the tile. A lane has pairs of values, 8 rows apart.
    __device__ void store_token(const Fp8Tile& at, const float* from, int token, uint8* out) const {
        float largest = 1e-10f;
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            float magnitude = fabsf(from[i / 2 * 4 + i % 2]);
            largest = fmaxf(largest, magnitude < infinity() ? magnitude : 0.0f);
        }
        largest = quad_max(largest);
        int exponent = scale_exponent(largest, -126), c = lane % 4;
        float factor = power_of_two(-exponent);
        bool present = token < p.tokens && at.row < p.rows;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32 words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* x = from + 4 * (8 * half + 2 * i);
                words[i] = float_to_e4m3x2(x[0] * factor, x[1] * factor) | float_to_e4m3x2(x[4] * factor, x[5] * factor) << 16;
            }
            transpose_words(words, lane);  // rows 16 c + 2 i, + 1, + 8 and + 9 in word i
            if (present)
                *reinterpret_cast<uint4*>(out + 64 * half + 16 * c) = {
                    __byte_perm(words[0], words[1], 0x5410), __byte_perm(words[2], words[3], 0x5410),
                    __byte_perm(words[0], words[1], 0x7632), __byte_perm(words[2], words[3], 0x7632)};
        }
        if (present && c == 0)
            p.out_scales[at.group * p.out_scale_group_stride + int64(token) * p.out_scale_token_stride + at.row / ROWS] =
                power_of_two(exponent);
    }

    __device__ void run() {
        for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
            Fp8Tile at(p, tile);
            multiply(at);
            store(at, p.out);
        }
        bulk_stores_read<0>();
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    fp8_product(const __grid_constant__ Fp8Product p, const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap map) {
    extern __shared__ uint4 memory[];
    if (shared_address(memory) != SHARED_START || reinterpret_cast<uint64>(&map) % 64) __trap();  // tiles are aligned to 1024 bytes
    if (threadIdx.x == 0)
        for (int i = 0; i < STAGES; ++i) full.init(i, 1), empty.init(i, 8 * WARP_ARRIVALS);
    fence_barrier_init();
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

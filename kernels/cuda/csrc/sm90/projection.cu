// out [tokens, rows] = x [tokens, K] W^T for few tokens, with wgmma: weights are the first operand, from registers, and
// x is the second, from shared memory. sm80/block_scaled.cuh describes how the work is divided.
//
// One thread copies both by TMA, in chunks of 128 columns. Two warpgroups multiply tiles of 64 rows, 16 for each warp:
// all chunks of their own tiles or, with 64 rows, every second chunk of the same tile. Codes of the next half of a
// chunk are converted to bfloat16 while the products of a half run.
//
//     barrier      arrivals of a phase                         waits                        guards
//     full[slot]   1: the producer, and the bytes of TMA       warps that take the chunk    a chunk of weights and x
//     empty[slot]  WARPS / PARTS: warps that take the chunk    the producer                 the chunk until its products have ended
#define CHUNKS_IN_TURN 1
#include "sm80/block_scaled.cuh"
#include "sm90/hopper.cuh"

static_assert(ROWS == 64 || ROWS == 128 || ROWS == 256, "a warpgroup has one or two tiles of 64 rows");
static_assert(ALIGNED, "TMA copies rows that start at multiples of 16 bytes");
static_assert(POWER_OF_TWO || !FINE, "sums of a block of 32 columns are not kept apart");
static_assert(HEIGHT == 1 || (POWER_OF_TWO && !FINE), "registers hold no more");

constexpr bool TWO_CTAS = TOKENS <= 32 && ROWS <= 128;  // on an SM
constexpr int PRODUCERS = TWO_CTAS ? 1 : 4;             // warps; setmaxnreg takes warpgroups
constexpr int ALL_THREADS = THREADS + 32 * PRODUCERS, HALF = TOKENS * 128;
constexpr bool DIRECT = SPLITS == 1 && PARTS == 1 && TOKENS >= 16 && sizeof(OUTPUT) == 2;  // no sums are added
constexpr int RESULT_STRIDE = 2 * ROWS + 16;                                               // bytes from token to token

// The ring of a CTA: addresses of its stages and of their barriers, after the last stage.
struct Ring {
    uint32 start;
    __device__ uint32 weights(int slot) const { return start + slot * STAGE_BYTES; }
    __device__ uint32 x(int slot) const { return weights(slot) + WEIGHT_BYTES; }
    __device__ Barrier full(int slot) const { return {start + STAGES * STAGE_BYTES + 8 * slot}; }
    __device__ Barrier empty(int slot) const { return {full(slot).address + 8 * STAGES}; }
};

// By one thread.
__device__ inline void produce(const Ring& ring, const Tile& tile, const TensorMap& map, const TensorMap& x_map) {
    auto load_weights = [&](int slot, int i) {
        ring.full(slot).arrive_expecting(STAGE_BYTES);
        tma_load(ring.weights(slot), map, tile.column(i) / 2, tile.row, tile.group, ring.full(slot));
    };
    if (EARLY)
        for (int i = 0; i < min(STAGES, tile.chunks); ++i) load_weights(i, i);
    pdl_wait();
    for (int i = 0, slot = 0, round = 0; i < tile.chunks; ++i) {
        if (i >= STAGES) ring.empty(slot).wait(round % 2 ^ 1);
        if (i >= STAGES || !EARLY) load_weights(slot, i);
#pragma unroll
        for (int half = 0; half < 2; ++half)
            tma_load(ring.x(slot) + half * HALF, x_map, tile.column(i) + 64 * half, tile.first, tile.group, ring.full(slot));
        if (++slot == STAGES) slot = 0, ++round;
    }
}

using RowScales = float[HEIGHT][2][FINE ? 4 : 1];  // of a lane's rows, for each 32 columns of a chunk if they differ

// Bytes 2 c and 2 c + 1 of a word (c is 0 or 1) as bfloat16 times 2^-120: each byte to a half word after its sign, then
// shifted to the fields of bfloat16. Logical instructions bound products of few tokens, so this uses as few as
// possible.
__device__ inline uint32 two_codes_to_bf16(uint32 word, uint32 pick, uint32 unit) {
    uint32 y;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(word), "r"(word), "r"(pick));
    y = y * 16 & 0x87f087f0;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(y), "r"(unit), "r"(0x80008000));  // plus -0
    return y;
}

// The operand of four steps: columns 64 half to 64 half + 63 of the row at `row` and of the row 8 further. Lane 4 g + c
// has values 2 c, + 1, 2 c + 8 and + 9 of a step, in two words that two lanes read.
__device__ inline void load_half(uint32 (&a)[4][4], uint32 (&nan)[2], uint32 row, const float (&scale)[2][FINE ? 4 : 1], int half) {
    int c = threadIdx.x % 4, g = threadIdx.x % 32 / 4;
    uint32 pick = 0x9180 + 0x2222 * (c % 2);  // a digit with the upper bit set selects the replicated sign of a byte
    row += c / 2 * 4;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            uint32 at = row + i * 1024 + ((4 * half + t ^ g) << 4), words[] = {lds32(at), lds32(at + 8)};
            uint32 unit = code_unit(scale[i][FINE ? 2 * half + t / 2 : 0]);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                if (!FINITE) nan[i] |= (words[j] & 0x7f7f7f7f) + 0x01010101;
                a[t][i + 2 * j] = two_codes_to_bf16(words[j], pick, unit);
            }
        }
}

struct Consumer {
    Sums sums = {};
    uint32 row;  // of the lane's first codes in a stage
    int scale_rows[HEIGHT][2];  // indices of the scales of these rows
    RowScales next;

    __device__ Consumer(const Weights& w, const Tile& tile, int strip_row, int part, int block_rows) {
        row = (strip_row + threadIdx.x % 32 / 4) * 128;
#pragma unroll
        for (int i = 0; i < 2 * HEIGHT; ++i) {
            int block = min(tile.row + strip_row + 8 * i + int(threadIdx.x) % 32 / 4, w.rows - 1) / block_rows;
            scale_rows[i / 2][i % 2] = tile.group * int(w.scale_group_stride) + block * int(w.scale_row_stride);
        }
        load_scales(w, tile.column(part));
    }
    __device__ void load_scales(const Weights& w, int k) {
#pragma unroll
        for (int i = 0; i < 2 * HEIGHT; ++i)
#pragma unroll
            for (int q = 0; q < (FINE ? 4 : 1); ++q)
                next[i / 2][i % 2][q] = w.scales[scale_rows[i / 2][i % 2] + min(k + 32 * q, w.columns - 1) / BLOCK_COLUMNS];
    }
    __device__ float (&sum(int h)) [TOKENS / 2] { return reinterpret_cast<float (&)[TOKENS / 2]>(sums.x[h]); }

    // Add the products of a chunk, halves in turn, each with all tiles of 64 rows.
    __device__ void multiply(uint32 weights, uint32 x, const RowScales& scale) {
        uint64 tile = tile_descriptor(x & 0xffffff);  // without the CTA's rank in its cluster
        uint32 a[2][4][4];
        float products[TOKENS / 2];
        load_half(a[0], sums.nan[0], weights + row, scale[0], 0);
#pragma unroll
        for (int u = 0; u < 2 * HEIGHT; ++u) {
            int half = u / HEIGHT, h = u % HEIGHT, next_half = (u + 1) / HEIGHT, next_h = (u + 1) % HEIGHT;
            wgmma_fence();
#pragma unroll
            for (int t = 0; t < 4; ++t)
                wgmma_rows(bf16{}, POWER_OF_TWO ? sum(h) : products, a[u % 2][t], tile + half * (HALF >> 4) + 2 * t,
                           POWER_OF_TWO || half + t);
            wgmma_commit();
            if (u + 1 == 2 * HEIGHT) break;
            if (u) wgmma_wait<1>();  // the other operand is free
            load_half(a[(u + 1) % 2], sums.nan[next_h], weights + row + next_h * 2048, scale[next_h], next_half);
        }
        wgmma_wait<0>();
        if (POWER_OF_TWO) {
#pragma unroll
            for (int h = 0; h < HEIGHT; ++h) pin(sum(h));
            return;
        }
        pin(products);
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) sum(0)[i] = fmaf(products[i], scale[0][i / 2 % 2][0], sum(0)[i]);
    }

    __device__ void run(const Ring& ring, const Weights& w, const Tile& tile, int part) {
        for (int i = part, slot = part % STAGES, round = part / STAGES; i < tile.chunks; i += PARTS) {
            RowScales scale;
#pragma unroll
            for (int j = 0; j < 2 * HEIGHT; ++j)
#pragma unroll
                for (int q = 0; q < (FINE ? 4 : 1); ++q) scale[j / 2][j % 2][q] = next[j / 2][j % 2][q];
            load_scales(w, tile.column(i + PARTS));
            ring.full(slot).wait(round % 2);
            multiply(ring.weights(slot), ring.x(slot), scale);
            ring.empty(slot).arrive_warp();
            if ((slot += PARTS) >= STAGES) slot -= STAGES, ++round;
        }
    }

    // Write the results of a warp as bfloat16, [TOKENS] rows of RESULT_STRIDE bytes, to the memory of the ring.
    __device__ void store_result(uint32 to, int strip_row) const {
        int lane = threadIdx.x % 32, token = lane / 16 * 8 + lane % 8, row = strip_row + lane / 8 % 2 * 8;
#pragma unroll
        for (int h = 0; h < HEIGHT; ++h) {
            bool is_nan[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) is_nan[i] = row_is_nan(sums.nan[h][i]);
#pragma unroll
            for (int n = 0; n < TOKENS / 8; n += 2) {
                uint32 words[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* from = sums.x[h][n + i / 2] + i % 2 * 2;
                    words[i] = is_nan[i % 2] ? 0x7fc07fc0 : pack(bf16{}, from[0], from[1]);
                }
                stmatrix4_transposed(to + (8 * n + token) * RESULT_STRIDE + 2 * (row + 16 * h), words[0], words[1], words[2], words[3]);
            }
        }
    }
};

// Write the result of a CTA that has no sums to add, 16 bytes at a time.
__device__ inline void copy_result(uint32 from, const Tokens& tokens, const Weights& w, const Tile& tile) {
    OUTPUT* out = tokens.out + tile.group * tokens.out_group_stride + tile.first * tokens.out_stride + tile.row;
    for (int i = threadIdx.x; i < tile.count * (ROWS / 8); i += THREADS) {
        int t = i / (ROWS / 8), r = i % (ROWS / 8) * 8;
        if (tile.row + r >= w.rows) continue;
        uint4 x = lds128(from + t * RESULT_STRIDE + 2 * r);
        OUTPUT* to = out + t * tokens.out_stride + r;
        if (tile.row + r + 8 <= w.rows) {
            *reinterpret_cast<uint4*>(to) = x;
        } else {
            uint32 words[] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int j = 0; j < 8; ++j)
                if (tile.row + r + j < w.rows) reinterpret_cast<uint16*>(to)[j] = words[j / 2] >> 16 * (j % 2);
        }
    }
}

extern "C" CLUSTER __global__ void __launch_bounds__(ALL_THREADS, TWO_CTAS ? 2 : 1)
    block_scaled_product(Weights w, Tokens tokens, const __grid_constant__ TensorMap map, const __grid_constant__ TensorMap x_map,
                         int block_rows) {
    extern __shared__ uint4 memory[];
    Ring ring{shared_address(memory)};
    if ((ring.start & 0xffffff) != SHARED_START || reinterpret_cast<uint64>(&map) % 64) __trap();  // tiles are aligned to 1024 bytes
    Tile tile(w, tokens);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) ring.full(i).init(1), ring.empty(i).init(WARPS / PARTS * WARP_ARRIVALS);
        fence_barrier_init();
    }
    __syncthreads();
    pdl_release();
    int strip_row = threadIdx.x / 32 % STRIPS * 16 * HEIGHT, part = threadIdx.x / 32 / STRIPS;
    float* partial = reinterpret_cast<float*>(memory);
    if (threadIdx.x >= THREADS) {
        if (!TWO_CTAS) warpgroup_reg_dealloc<40>();
        if (threadIdx.x == THREADS) produce(ring, tile, map, x_map);
        __syncwarp();
        __syncthreads();
        sync_splits();
        leave_splits();
        return;
    }
    if (!TWO_CTAS) warpgroup_reg_alloc<232>();
    if (!EARLY) pdl_wait();
    Consumer consumer(w, tile, strip_row, part, block_rows);
    consumer.run(ring, w, tile, part);
    __syncthreads();  // every warp has read its last stage
    if (DIRECT) consumer.store_result(ring.start, strip_row);
    else store_sums(partial, consumer.sums, part, strip_row);
    if (EARLY) pdl_wait();  // before the result is written
    sync_splits();
    if (DIRECT) copy_result(ring.start, tokens, w, tile);
    else write_result(tokens, w, tile, partial);
    leave_splits();
}

// Decode over a paged cache of 16-bit dense MLA rows, on Hopper (sm_90a).
//
// A thread block takes 64 heads of a query token; keys go 64 at a time, a *block*, and blocks by *pairs*. Three
// warpgroups:
//
//     feeder     copies rows into a buffer for each block of a pair (cp.async)
//     mixer 0    S = Q K^T and the softmax of a pair's first block; values 0..255 of the result, of both blocks
//     mixer 1    the same of the second block; values 256..511
//
// So each mixer multiplies its own weights out of registers, and the other's out of shared memory, where they lie in
// the RoPE tile of their block's keys, which nobody needs any more. Each half of a buffer is freed by one mixer alone,
// which is the one that uses it last, so that it fills again while the other half is still in use:
//
//     halves of block 0   values 0..255 (mixer 0)          values 256..511 and RoPE (mixer 1)
//     halves of block 1   values 0..255 and RoPE (mixer 0)  values 256..511 (mixer 1)
//
// Weights are exp2(score - reference) for a reference that both mixers raise by what they saw in the pair before, so
// neither waits for the other's maximum. A weight may thus be as large as 2^LIMIT; where one would be larger, or no
// reference is known, all is done again *carefully*: with the maxima of the pair itself.
//
// Macros: VALUE (bf16 or f16), FLOAT16 (whether VALUE is f16).
#define ALIGNED 1
#include "hopper_products.cuh"
#include "latent.cuh"
#include "overlap.cuh"

constexpr int HEADS = 64, KEYS = 64, THREADS = 384;
constexpr int TILES = LATENT_DIM / 64, ROPE_TILE = TILES - 1;
constexpr int FEEDER_REGISTERS = 64, MIXER_REGISTERS = 216;

// In powers of two: what a weight may be, and how far the reference may lie below a maximum.
constexpr float LIMIT = FLOAT16 ? 14.0f : 60.0f, RAISE = FLOAT16 ? 2.0f : 8.0f;

// Shared memory. Without static shared memory the dynamic part starts at 1024; the kernel traps otherwise.
constexpr uint32 BARRIERS_AT = 1024;
constexpr uint32 READY = BARRIERS_AT, FREE = READY + 32;      // of each half: 2 * block + half
constexpr uint32 WEIGHTS_READY = FREE + 32;                   // of each block
constexpr uint32 REDO_AT = WEIGHTS_READY + 16;                // whether to do it again
constexpr uint32 PRESENT_AT = REDO_AT + 16;                   // of each block: a byte for every four rows
constexpr uint32 MAXIMA_AT = PRESENT_AT + 32;                 // [pair % 2][block][64 heads]
constexpr uint32 TOTALS_AT = MAXIMA_AT + 4 * 64 * 4;          // [block][64 heads]
constexpr uint32 Q_AT = 4096;
constexpr uint32 K_AT = Q_AT + TILES * TILE_BYTES;            // [2 blocks][9 tiles]
constexpr uint32 K_BYTES = TILES * TILE_BYTES;
static_assert(TOTALS_AT + 2 * 64 * 4 <= Q_AT);

__device__ inline void mixers_sync() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

constexpr uint32 ABSENT = ~0u;

struct Feeder {
    LatentCache cache;
    int request, keys, row, chunk;  // row (of 16) and 16-byte chunk (of 8) of this thread
    uint32 place;

    // Slots of the rows row, row + 16, .. of a block, -1 where there is none.
    __device__ void look_up(int block, int (&slots)[4]) const {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            int position = block * KEYS + 16 * r + row;
            slots[r] = position < keys ? cache.slot(request, position) : -1;
        }
    }
    // Where those rows are, in units of 16 bytes, which take one register; ABSENT where there is none.
    __device__ void find(const int (&slots)[4], uint32 (&rows)[4]) const {
#pragma unroll
        for (int r = 0; r < 4; ++r) rows[r] = slots[r] < 0 ? ABSENT : uint32(cache.offset(slots[r], 2 * LATENT_DIM) >> 4);
    }

    // Four tiles of a block from `first` on, and its RoPE tile where that belongs to them.
    template <int FIRST, bool ROPE> __device__ void copy(int buffer, const uint32 (&rows)[4]) const {
        uint32 to = K_AT + buffer * K_BYTES + place;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            bool present = rows[r] != ABSENT;
            const uint8* from = cache.pages + (present ? uint64(rows[r]) << 4 : 0) + 16 * chunk;
            asm volatile("" : "+l"(from), "+r"(to));  // or every sum with them is kept in a register
#pragma unroll
            for (int t = FIRST; t < FIRST + 4; ++t) copy_async<16>(to + t * TILE_BYTES + 2048 * r, from + 128 * t, present);
            if (ROPE) copy_async<16>(to + ROPE_TILE * TILE_BYTES + 2048 * r, from + 128 * ROPE_TILE, present);
        }
    }

    // Tell which rows are there. An arrival beside those of the copies, which do not order plain writes.
    __device__ void tell(int buffer, const uint32 (&rows)[4]) const {
        int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            uint32 there = __ballot_sync(~0u, rows[r] != ABSENT) & 0x01010101;  // of lanes 0, 8, 16, 24
            uint32 bits = (there | there >> 7 | there >> 14 | there >> 21) & 15;
            if (lane == 0) asm volatile("st.shared.u8 [%0], %1;" ::"r"(PRESENT_AT + 16 * buffer + 4 * r + warp), "r"(bits) : "memory");
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
mla_decode_sm90(const VALUE* q, int64 q_stride_b, int64 q_stride_s, int64 q_stride_h, int s_q, int heads, uint8* pages,
                int64 page_stride, int64 num_slots, int block_size, const int* block_table, int64 table_stride,
                int columns, int requests, const int* lens, int causal, int splits, float softmax_scale, VALUE* out,
                int64 out_stride_b, int64 out_stride_s, int64 out_stride_h, float* lse, int64 lse_stride_b,
                int64 lse_stride_h, int64 lse_stride_s, float* partial_out, float* partial_lse) {
    extern __shared__ uint4 memory[];
    if (uint32(__cvta_generic_to_shared(memory)) != BARRIERS_AT) __trap();
    overlap_with_previous_kernel();
    int groups = (heads + HEADS - 1) / HEADS;
    Share share = Share::of(blockIdx.x, splits, groups, s_q, lens, int64(columns) * block_size, causal, KEYS);
    int pairs = (share.last_block - share.first_block + 1) / 2;
    int group = threadIdx.x / 128, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 4; ++i) barrier_init(READY + 8 * i, i == 0 || i == 3 ? 128 + 4 : 128), barrier_init(FREE + 8 * i, 4);
        barrier_init(WEIGHTS_READY, 4), barrier_init(WEIGHTS_READY + 8, 4);
        sts32(REDO_AT, 0);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    int row = thread / 8, chunk = thread % 8;
    uint32 place = row * 128 + ((chunk ^ (row & 7)) << 4);
    if (group == 0) {
        give_registers<FEEDER_REGISTERS>();
        LatentCache cache{pages, page_stride, num_slots, block_size, {block_table, table_stride, requests, columns}};
        int end = min(share.keys, share.last_block * KEYS);
        Feeder feeder{cache, share.request, end, row, chunk, place};
        int filled = 0;  // pairs so far
        for (bool careful = false;; careful = true) {
            int slots[2][4];
            feeder.look_up(share.first_block, slots[0]);
            feeder.look_up(share.first_block + 1, slots[1]);
            for (int pair = 0; pair < pairs; ++pair, ++filled) {
                uint32 parity = filled % 2 ^ 1;
                uint32 first[4], second[4];
                feeder.find(slots[0], first);
                feeder.find(slots[1], second);
                barrier_wait(FREE, parity);
                feeder.copy<0, false>(0, first);
                feeder.tell(0, first);
                copies_arrive(READY);
                if (lane == 0) barrier_arrive(READY);
                barrier_wait(FREE + 24, parity);
                feeder.copy<4, false>(1, second);
                feeder.tell(1, second);
                copies_arrive(READY + 24);
                if (lane == 0) barrier_arrive(READY + 24);
                // The next pair's pages are looked up while this one's halves are waited for.
                feeder.look_up(share.first_block + 2 * pair + 2, slots[0]);
                feeder.look_up(share.first_block + 2 * pair + 3, slots[1]);
                barrier_wait(FREE + 8, parity);
                feeder.copy<4, true>(0, first);
                copies_arrive(READY + 8);
                barrier_wait(FREE + 16, parity);
                feeder.copy<0, true>(1, second);
                copies_arrive(READY + 16);
            }
            __syncthreads();
            bool redo = lds32(REDO_AT);
            if (!redo || careful) break;
        }
        copies_wait<0>();
        return;
    }

    take_registers<MIXER_REGISTERS>();
    int mixer = group - 1;  // and the block of a pair whose scores it computes
    int first_head = share.group * HEADS;
    {
        const VALUE* token = q + share.request * q_stride_b + share.query * q_stride_s + 8 * chunk;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int head = 32 * mixer + 16 * r + row;
            bool present = first_head + head < heads;
            const VALUE* from = present ? token + (first_head + head) * q_stride_h : q;
#pragma unroll
            for (int t = 0; t < TILES; ++t)
                copy_async<16>(Q_AT + t * TILE_BYTES + 2048 * (2 * mixer + r) + place, from + (present ? 64 * t : 0), present);
        }
        copies_commit();
        copies_wait<0>();
        fence_for_matrix();
        mixers_sync();
    }
    float scale_log2 = softmax_scale * LOG2_E;
    // READY and FREE of the halves in the order in which this mixer scores with them, and of those it adds up.
    uint32 early = mixer ? 24 : 0, late = mixer ? 16 : 8;             // own block: freed early, late
    uint32 own_v = mixer ? 24 : 0, other_v = mixer ? 8 : 16;          // this mixer's values, of own block and other
    uint64 q_tile = tile_descriptor(Q_AT);
    uint64 own_k = tile_descriptor(K_AT + mixer * K_BYTES);
    uint64 own_columns = transposed_descriptor(K_AT + mixer * K_BYTES + 4 * mixer * TILE_BYTES);
    uint64 other_columns = transposed_descriptor(K_AT + (mixer ^ 1) * K_BYTES + 4 * mixer * TILE_BYTES);
    uint32 own_weights_at = K_AT + mixer * K_BYTES + ROPE_TILE * TILE_BYTES;
    uint64 other_weights = tile_descriptor(K_AT + (mixer ^ 1) * K_BYTES + ROPE_TILE * TILE_BYTES);
    int head = 16 * warp + lane / 4;  // and head + 8

    float low[64], high[64];  // sums of 128 values each
    float reference[2], total[2], seen[2];
    int done = 0;
    for (bool careful = false;; careful = true) {
#pragma unroll
        for (int i = 0; i < 64; ++i) low[i] = high[i] = 0.0f;
        reference[0] = reference[1] = seen[0] = seen[1] = -infinity();
        total[0] = total[1] = 0.0f;
        for (int pair = 0; pair < pairs; ++pair, ++done) {
            uint32 parity = done % 2;
            uint32 maxima = MAXIMA_AT + (done % 2) * 512 + 4 * head;
            float scores[32];
            barrier_wait(READY + early, parity);
            fence_for_matrix();
            pin(scores);
            matrix_begin();
#pragma unroll
            for (int step = 0; step < 16; ++step) {
                int tile = (step / 4 + 4 * mixer) * (TILE_BYTES >> 4);
                multiply_rows(VALUE{}, scores, q_tile + tile + step % 4 * 2, own_k + tile + step % 4 * 2, step > 0);
            }
            matrix_commit();
            barrier_wait(READY + late, parity);
            fence_for_matrix();
            matrix_begin();
#pragma unroll
            for (int step = 0; step < 20; ++step) {
                int tile = (step < 16 ? step / 4 + 4 * (mixer ^ 1) : ROPE_TILE) * (TILE_BYTES >> 4);
                multiply_rows(VALUE{}, scores, q_tile + tile + step % 4 * 2, own_k + tile + step % 4 * 2, 1);
            }
            matrix_commit();
            uint4 present;
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(present.x), "=r"(present.y), "=r"(present.z), "=r"(present.w) : "r"(PRESENT_AT + 16 * mixer));
            matrix_wait<0>();
            pin(scores);

            if ((present.x & present.y & present.z & present.w) != 0x0f0f0f0f) {
                uint32 words[4] = {present.x, present.y, present.z, present.w};
#pragma unroll
                for (int i = 0; i < 32; ++i) {
                    // Column 8 (i / 4) + 2 (lane % 4) + i % 2: word column / 16, byte column / 4 % 4, bit column % 4.
                    int bit = 16 * (i / 4 % 2) + 8 * (lane % 4 / 2) + 2 * (lane % 2) + i % 2;
                    if (!(words[i / 8] >> bit & 1)) scores[i] = -infinity();
                }
            }
            float largest[2] = {-infinity(), -infinity()};
#pragma unroll
            for (int i = 0; i < 32; ++i) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], scores[i]);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 1));
                largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 2)) * scale_log2;
                if (lane % 4 == 0) sts_float(maxima + 256 * mixer + 32 * half, largest[half]);
            }
            bool exact = careful || pair == 0;
            if (exact) {
                mixers_sync();
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    seen[half] = fmaxf(largest[half], lds_float(maxima + 256 * (mixer ^ 1) + 32 * half));
            }
            float rescale[2];
            bool raised = false;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                bool raise = seen[half] > reference[half] + (exact ? 0.0f : RAISE) ||
                             (reference[half] == -infinity() && seen[half] > -infinity());
                float now = raise ? seen[half] : reference[half];
                rescale[half] = raise ? exp2_approx(reference[half] - now) : 1.0f;
                reference[half] = now;
                raised |= raise;
                float base = now == -infinity() ? 0.0f : now;
                // The other way around, so that NaN does not make it do it again.
                if (largest[half] - base > LIMIT || (now == -infinity() && largest[half] > -infinity())) sts32(REDO_AT, 1);
                float sum = 0.0f;
#pragma unroll
                for (int i = 2 * half; i < 32; i += 4) {
                    scores[i] = exp2_approx(fmaf(scores[i], scale_log2, -base));
                    scores[i + 1] = exp2_approx(fmaf(scores[i + 1], scale_log2, -base));
                    sum += scores[i] + scores[i + 1];
                }
                total[half] = fmaf(total[half], rescale[half], sum);
            }
            if (__any_sync(~0u, raised)) {
#pragma unroll
                for (int i = 0; i < 64; ++i) low[i] *= rescale[i / 2 % 2], high[i] *= rescale[i / 2 % 2];
            }
            uint32 weights[4][4];
#pragma unroll
            for (int i = 0; i < 16; ++i) weights[i / 4][i % 4] = pack(VALUE{}, scores[2 * i], scores[2 * i + 1]);

            warpgroup_sync(2 + mixer);  // all of this mixer have used the RoPE tile
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                int at = 16 * warp + lane % 16;
                stmatrix4(own_weights_at + at * 128 + (((2 * step + lane / 16) ^ (at & 7)) << 4), weights[step][0],
                          weights[step][1], weights[step][2], weights[step][3]);
            }
            fence_for_matrix();
            warp_arrive(WEIGHTS_READY + 8 * mixer);

            pin(low), pin(high);
            matrix_begin();
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                multiply_columns(VALUE{}, low, weights[step], own_columns + 128 * step, 1);
                multiply_columns(VALUE{}, high, weights[step], own_columns + (2 * TILE_BYTES >> 4) + 128 * step, 1);
            }
            matrix_commit();
            barrier_wait(WEIGHTS_READY + 8 * (mixer ^ 1), parity);
            barrier_wait(READY + other_v, parity);
            fence_for_matrix();
            matrix_begin();
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                multiply_columns(VALUE{}, low, other_weights + 2 * step, other_columns + 128 * step, 1);
                multiply_columns(VALUE{}, high, other_weights + 2 * step, other_columns + (2 * TILE_BYTES >> 4) + 128 * step, 1);
            }
            matrix_commit();
#pragma unroll
            for (int half = 0; half < 2; ++half)
                seen[half] = fmaxf(largest[half], lds_float(maxima + 256 * (mixer ^ 1) + 32 * half));
            matrix_wait<1>();
            warp_arrive(FREE + own_v);
            matrix_wait<0>();
            pin(low), pin(high);
            warp_arrive(FREE + other_v);
        }
        __syncthreads();
        bool redo = lds32(REDO_AT);
        if (!redo || careful) break;
    }

#pragma unroll
    for (int half = 0; half < 2; ++half) {
        total[half] += __shfl_xor_sync(~0u, total[half], 1);
        total[half] += __shfl_xor_sync(~0u, total[half], 2);
        if (lane % 4 == 0) sts_float(TOTALS_AT + 256 * mixer + 4 * (head + 8 * half), total[half]);
    }
    mixers_sync();
    int64 token = int64(share.request) * s_q + share.query;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int own_head = first_head + head + 8 * half;
        if (own_head >= heads) continue;
        total[half] += lds_float(TOTALS_AT + 256 * (mixer ^ 1) + 4 * (head + 8 * half));
        bool empty = reference[half] == -infinity();
        float share_of = empty ? 0.0f : 1.0f / total[half];
        float log_sum = (reference[half] + log2f(total[half])) * LN_2;
        int column = 256 * mixer + 2 * (lane % 4);
        if (splits > 1) {
            int64 part = (token * splits + share.split) * heads + own_head;
            float* to = partial_out + part * LATENT_V + column;
#pragma unroll
            for (int n = 0; n < 16; ++n) {
                int i = 4 * n + 2 * half;
                store_pair(to + 8 * n, low[i] * share_of, low[i + 1] * share_of);
                store_pair(to + 128 + 8 * n, high[i] * share_of, high[i + 1] * share_of);
            }
            if (mixer == 0 && lane % 4 == 0) partial_lse[part] = empty ? -infinity() : log_sum;
        } else {
            VALUE* to = out + share.request * out_stride_b + share.query * out_stride_s + own_head * out_stride_h + column;
#pragma unroll
            for (int n = 0; n < 16; ++n) {
                int i = 4 * n + 2 * half;
                store_pair(to + 8 * n, low[i] * share_of, low[i + 1] * share_of);
                store_pair(to + 128 + 8 * n, high[i] * share_of, high[i + 1] * share_of);
            }
            if (mixer == 0 && lane % 4 == 0)
                lse[share.request * lse_stride_b + own_head * lse_stride_h + share.query * lse_stride_s] =
                    empty ? infinity() : log_sum;
        }
    }
}

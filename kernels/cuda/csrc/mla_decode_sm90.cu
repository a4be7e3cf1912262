// Decode over a paged cache of 16-bit dense MLA rows, on Hopper (sm_90a).
//
// A thread block takes 64 heads of a query token; keys go 64 at a time, a *block*. Three warpgroups:
//
//     feeder     copies rows into two buffers in turn (cp.async)
//     mixer 0    S = Q K^T and the softmax of even blocks; values 0..255 of the result, of all blocks
//     mixer 1    the same of odd blocks; values 256..511
//
// A mixer multiplies its own weights out of registers, and the other's out of shared memory, where they lie in the
// RoPE tile of their block's keys, which nobody needs any more. Both add up the blocks in order, so that each can go
// on from the other's running maximum, and a mixer's softmax runs beside its product with the other's weights. Each
// half of a buffer is freed by one mixer alone, the last to use it:
//
//     buffer 0   values 0..255 (mixer 0)            values 256..511 and RoPE (mixer 1)
//     buffer 1   values 0..255 and RoPE (mixer 0)   values 256..511 (mixer 1)
//
// Macros: VALUE (bf16 or f16).
#define ALIGNED 1
#include "hopper_products.cuh"
#include "latent.cuh"
#include "overlap.cuh"

constexpr int HEADS = 64, KEYS = 64, THREADS = 384;
constexpr int TILES = LATENT_DIM / 64, ROPE_TILE = TILES - 1;
constexpr int FEEDER_REGISTERS = 64, MIXER_REGISTERS = 216;

// Weights are exp2(score - reference); the reference is raised to the running maximum when that is so much larger,
// which seldom happens after the first blocks.
constexpr float RAISE = 8.0f;

// Shared memory. Without static shared memory the dynamic part starts at 1024; the kernel traps otherwise.
constexpr uint32 BARRIERS_AT = 1024;
constexpr uint32 READY = BARRIERS_AT, FREE = READY + 32;  // of each half: 2 * buffer + half
constexpr uint32 WEIGHTS_READY = FREE + 32;               // of each buffer
constexpr uint32 PRESENT_AT = WEIGHTS_READY + 16;         // of each buffer: a byte for every four rows
constexpr uint32 REFERENCE_AT = PRESENT_AT + 32;          // of each buffer's weights, [64 heads]
constexpr uint32 TOTALS_AT = REFERENCE_AT + 2 * 64 * 4;   // of each mixer, [64 heads]
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

template <bool VALUE_> struct Yes { static constexpr bool value = VALUE_; };

// What a launch is given beside the cache.
struct Problem {
    const VALUE* q;
    int64 q_stride_b, q_stride_s, q_stride_h;
    int s_q, heads, splits;
    float scale_log2;
    VALUE* out;
    int64 out_stride_b, out_stride_s, out_stride_h;
    float* lse;
    int64 lse_stride_b, lse_stride_h, lse_stride_s;
    float *partial_out, *partial_lse;
};

template <int MIXER> __device__ inline void mix(const Problem& problem, const Share& share, int blocks) {
    constexpr int mixer = MIXER;
    int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, row = thread / 8, chunk = thread % 8;
    uint32 place = row * 128 + ((chunk ^ (row & 7)) << 4);
    int first_head = share.group * HEADS;
    {
        const VALUE* token = problem.q + share.request * problem.q_stride_b + share.query * problem.q_stride_s + 8 * chunk;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int head = 32 * mixer + 16 * r + row;
            bool present = first_head + head < problem.heads;
            const VALUE* from = present ? token + (first_head + head) * problem.q_stride_h : problem.q;
#pragma unroll
            for (int t = 0; t < TILES; ++t)
                copy_async<16>(Q_AT + t * TILE_BYTES + 2048 * (2 * mixer + r) + place, from + (present ? 64 * t : 0), present);
        }
        copies_commit();
        copies_wait<0>();
        fence_for_matrix();
        mixers_sync();
    }
    float scale_log2 = problem.scale_log2;
    // Of READY and FREE: the halves of this mixer's own blocks, first and second, and its half of the other's blocks.
    uint32 first = mixer ? 24 : 0, second = mixer ? 16 : 8, other = mixer ? 8 : 16;
    uint64 q_tile = tile_descriptor(Q_AT);
    uint64 own_k = tile_descriptor(K_AT + mixer * K_BYTES);
    uint64 own_columns = transposed_descriptor(K_AT + mixer * K_BYTES + 4 * mixer * TILE_BYTES);
    uint64 other_columns = transposed_descriptor(K_AT + (mixer ^ 1) * K_BYTES + 4 * mixer * TILE_BYTES);
    uint32 own_weights_at = K_AT + mixer * K_BYTES + ROPE_TILE * TILE_BYTES;
    uint64 other_weights = tile_descriptor(K_AT + (mixer ^ 1) * K_BYTES + ROPE_TILE * TILE_BYTES);
    int head = 16 * warp + lane / 4;  // and head + 8

    float low[64] = {}, high[64] = {};  // sums of 128 values each
    float reference[2] = {-infinity(), -infinity()}, total[2] = {};
    pin(low), pin(high);

    // Raise the reference: what was added up so far counts less.
    auto raise_to = [&](const float (&now)[2]) {
        if (!__any_sync(~0u, now[0] != reference[0] || now[1] != reference[1])) return;
        float rescale[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            rescale[half] = now[half] == reference[half] ? 1.0f : exp2_approx(reference[half] - now[half]);
            reference[half] = now[half];
            total[half] *= rescale[half];
        }
#pragma unroll
        for (int i = 0; i < 64; ++i) low[i] *= rescale[i / 2 % 2], high[i] *= rescale[i / 2 % 2];
    };
    // Begin to add what the other mixer's weights of its block in round `round` give.
    auto add_other = [&](int round) {
        barrier_wait(WEIGHTS_READY + 8 * (mixer ^ 1), round % 2);
        barrier_wait(READY + other, round % 2);
        fence_for_matrix();
        float now[2] = {lds_float(REFERENCE_AT + 256 * (mixer ^ 1) + 4 * head),
                        lds_float(REFERENCE_AT + 256 * (mixer ^ 1) + 4 * head + 32)};
        raise_to(now);
        pin(low), pin(high);
        matrix_begin();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            multiply_columns(VALUE{}, low, other_weights + 2 * step, other_columns + 128 * step, 1);
            multiply_columns(VALUE{}, high, other_weights + 2 * step, other_columns + (2 * TILE_BYTES >> 4) + 128 * step, 1);
        }
        matrix_commit();
    };

    auto take = [&](auto has_other, int block) {
        uint32 parity = block / 2 % 2;
        float scores[32];
        barrier_wait(READY + first, parity);
        fence_for_matrix();
        pin(scores);
        matrix_begin();
#pragma unroll
        for (int step = 0; step < 16; ++step) {
            int tile = (step / 4 + 4 * mixer) * (TILE_BYTES >> 4);
            multiply_rows(VALUE{}, scores, q_tile + tile + step % 4 * 2, own_k + tile + step % 4 * 2, step > 0);
        }
        barrier_wait(READY + second, parity);
        fence_for_matrix();
#pragma unroll
        for (int step = 0; step < 20; ++step) {
            int tile = (step < 16 ? step / 4 + 4 * (mixer ^ 1) : ROPE_TILE) * (TILE_BYTES >> 4);
            multiply_rows(VALUE{}, scores, q_tile + tile + step % 4 * 2, own_k + tile + step % 4 * 2, 1);
        }
        matrix_commit();
        if constexpr (decltype(has_other)::value) {
            add_other((block - 1) / 2);
            matrix_wait<1>();
        } else {
            matrix_wait<0>();
        }
        pin(scores);

        uint4 present = lds128(PRESENT_AT + 16 * mixer);
        if ((present.x & present.y & present.z & present.w) != 0x0f0f0f0f) {
            uint32 words[4] = {present.x, present.y, present.z, present.w};
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                // Column 8 (i / 4) + 2 (lane % 4) + i % 2: word column / 16, byte column / 4 % 4, bit column % 4.
                int bit = 16 * (i / 4 % 2) + 8 * (lane % 4 / 2) + 2 * (lane % 2) + i % 2;
                if (!(words[i / 8] >> bit & 1)) scores[i] = -infinity();
            }
        }
        float now[2], sum[2] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float largest = -infinity();
#pragma unroll
            for (int i = 2 * half; i < 32; i += 4) largest = fmaxf(largest, fmaxf(scores[i], scores[i + 1]));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2)) * scale_log2;
            now[half] = largest > reference[half] + RAISE ? largest : reference[half];
            if (lane % 4 == 0) sts_float(REFERENCE_AT + 256 * mixer + 4 * head + 32 * half, now[half]);
            float base = now[half] == -infinity() ? 0.0f : now[half];
#pragma unroll
            for (int i = 2 * half; i < 32; i += 4) {
                scores[i] = exp2_approx(fmaf(scores[i], scale_log2, -base));
                scores[i + 1] = exp2_approx(fmaf(scores[i + 1], scale_log2, -base));
                sum[half] += scores[i] + scores[i + 1];
            }
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

        matrix_wait<0>();
        pin(low), pin(high);
        if constexpr (decltype(has_other)::value) warp_arrive(FREE + other);
        raise_to(now);
        total[0] += sum[0], total[1] += sum[1];
        pin(low), pin(high);
        matrix_begin();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            multiply_columns(VALUE{}, low, weights[step], own_columns + 128 * step, 1);
            multiply_columns(VALUE{}, high, weights[step], own_columns + (2 * TILE_BYTES >> 4) + 128 * step, 1);
        }
        matrix_commit();
        matrix_wait<0>();
        pin(low), pin(high);
        warp_arrive(FREE + first);
    };
    if (mixer == 0 && blocks) take(Yes<false>{}, 0);
    for (int block = 2 - mixer; block < blocks; block += 2) take(Yes<true>{}, block);
    if (blocks && (blocks - 1) % 2 != mixer) {
        add_other((blocks - 1) / 2);
        matrix_wait<0>();
        pin(low), pin(high);
    }

#pragma unroll
    for (int half = 0; half < 2; ++half) {
        total[half] += __shfl_xor_sync(~0u, total[half], 1);
        total[half] += __shfl_xor_sync(~0u, total[half], 2);
        if (lane % 4 == 0) sts_float(TOTALS_AT + 256 * mixer + 4 * (head + 8 * half), total[half]);
    }
    mixers_sync();
    int64 token = int64(share.request) * problem.s_q + share.query;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int own_head = first_head + head + 8 * half;
        if (own_head >= problem.heads) continue;
        total[half] += lds_float(TOTALS_AT + 256 * (mixer ^ 1) + 4 * (head + 8 * half));
        bool empty = reference[half] == -infinity();
        float share_of = empty ? 0.0f : 1.0f / total[half];
        float log_sum = (reference[half] + log2f(total[half])) * LN_2;
        int column = 256 * mixer + 2 * (lane % 4);
        if (problem.splits > 1) {
            int64 part = (token * problem.splits + share.split) * problem.heads + own_head;
            float* to = problem.partial_out + part * LATENT_V + column;
#pragma unroll
            for (int n = 0; n < 16; ++n) {
                int i = 4 * n + 2 * half;
                store_pair(to + 8 * n, low[i] * share_of, low[i + 1] * share_of);
                store_pair(to + 128 + 8 * n, high[i] * share_of, high[i + 1] * share_of);
            }
            if (mixer == 0 && lane % 4 == 0) problem.partial_lse[part] = empty ? -infinity() : log_sum;
        } else {
            VALUE* to = problem.out + share.request * problem.out_stride_b + share.query * problem.out_stride_s + own_head * problem.out_stride_h + column;
#pragma unroll
            for (int n = 0; n < 16; ++n) {
                int i = 4 * n + 2 * half;
                store_pair(to + 8 * n, low[i] * share_of, low[i + 1] * share_of);
                store_pair(to + 128 + 8 * n, high[i] * share_of, high[i + 1] * share_of);
            }
            if (mixer == 0 && lane % 4 == 0)
                problem.lse[share.request * problem.lse_stride_b + own_head * problem.lse_stride_h + share.query * problem.lse_stride_s] =
                    empty ? infinity() : log_sum;
        }
    }
}

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
    int blocks = share.last_block - share.first_block;
    int group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = thread % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 4; ++i) barrier_init(READY + 8 * i, i == 0 || i == 3 ? 128 + 4 : 128), barrier_init(FREE + 8 * i, 4);
        barrier_init(WEIGHTS_READY, 4), barrier_init(WEIGHTS_READY + 8, 4);
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
        int slots[4];
        feeder.look_up(share.first_block, slots);
        for (int i = 0; i < blocks; ++i) {
            uint32 parity = i / 2 % 2 ^ 1, rows[4];
            feeder.find(slots, rows);
            // The half that is freed first, and scored with first.
            int first = i % 2 ? 3 : 0, second = first ^ 1;
            barrier_wait(FREE + 8 * first, parity);
            feeder.tell(i % 2, rows);
            if (i % 2) feeder.copy<4, false>(1, rows);
            else feeder.copy<0, false>(0, rows);
            copies_arrive(READY + 8 * first);
            if (lane == 0) barrier_arrive(READY + 8 * first);
            barrier_wait(FREE + 8 * second, parity);
            if (i % 2) feeder.copy<0, true>(1, rows);
            else feeder.copy<4, true>(0, rows);
            copies_arrive(READY + 8 * second);
            feeder.look_up(share.first_block + i + 1, slots);
        }
        copies_wait<0>();
        return;
    }

    take_registers<MIXER_REGISTERS>();
    Problem problem{q, q_stride_b, q_stride_s, q_stride_h, s_q, heads, splits, softmax_scale * LOG2_E, out, out_stride_b,
                    out_stride_s, out_stride_h, lse, lse_stride_b, lse_stride_h, lse_stride_s, partial_out, partial_lse};
    if (group == 1) mix<0>(problem, share, blocks);
    else mix<1>(problem, share, blocks);
}

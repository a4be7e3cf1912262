// Sparse MLA over paged FP8 caches on Hopper (sm_90a): one thread block an SM, four warpgroups.
//
// A query token and 64 of its heads are a *tile* of work; the keys of a tile are taken 64 at a time, a *block*.
//
//     scorer     S = Q K^T (M = heads), the softmax, and P in float16; loads Q
//     mixer 0    O^T = V^T P^T for values 0..255: converts V in registers straight from the raw rows
//     mixer 1    the same for values 256..511
//     gatherer   one warp: copies raw rows into a ring (cp.async) and tells where tokens are absent
//     converter  three warps: K from e4m3 to float16 for the scorer, a slice of 64 values at a time
//
// K and V are the same bytes, converted twice: once into shared memory for the scorer, once into registers for
// the mixers. That is cheap in float16 (one conversion instruction and one multiplication for two values), leaves
// shared memory to three blocks of raw rows, and keeps the chains short. The last 64 values of a row (RoPE) are
// bfloat16 and enter the scores as they are.
//
// Within 16 tokens the order is permuted so that neither converter's nor mixers' reads of raw rows conflict:
// token t stands at place(t) among the columns of S, the rows of a slice and the rows of P^T.
//
// Float16 has a narrower range than what a cache and q may hold. A tile that leaves it (scales outside
// [MIN_SCALE, MAX_SCALE], large or very small q, a result that is not finite) is marked in `unsafe` for the
// exact kernel, which the launcher runs after this one. A float32 scale is rounded to float16.
//
// Macros: LAYOUT (DSV4_FP8 or V32_FP8).
#include "decode.cuh"
#include "hopper.cuh"
#include "overlap.cuh"

constexpr int STAGE = 32;  // tokens of a ring stage; a block is two
constexpr int SLICES = LAYOUT::quantized_dim / 64;
constexpr bool ROPE_IN_V = LAYOUT::quantized_dim < V_DIM;
constexpr int STAGES = ROPE_IN_V ? 6 : 4;
constexpr int K_SLOTS = 4;
constexpr int P_SLOTS = 2;
constexpr int RAW_BYTES = LAYOUT::quantized_dim;  // of a row in the ring
constexpr int CONVERTERS = 3;                     // warps

constexpr int THREADS = 512;
constexpr int SCORER_REGISTERS = 88, MIXER_REGISTERS = 176, FEEDER_REGISTERS = 72;

constexpr uint32 MIN_SCALE = 105, F16_NORMAL = 113, MAX_SCALE = 126;  // float32 exponents of scales
constexpr uint32 MAX_F16 = 0x477f, MIN_Q = 0x3a80;  // bfloat16 bits: just below 65536, and 2^-10
constexpr float NO_MAX = -1e30f;
constexpr uint32 LAZY = 0x5c00;  // float16 bits of 256: the running maximum is raised when a weight exceeds this

// Shared memory. Without static shared memory the dynamic part starts at 1024; the kernel traps otherwise.
constexpr uint32 Q_AT = 1024;
constexpr uint32 K_AT = Q_AT + (SLICES + 1) * TILE_BYTES;  // the last tile of Q is RoPE
constexpr uint32 P_AT = K_AT + K_SLOTS * TILE_BYTES;
constexpr uint32 ROPE_AT = P_AT + P_SLOTS * TILE_BYTES;
constexpr uint32 RAW_AT = ROPE_AT + STAGES * STAGE * 128;
constexpr uint32 FACTOR_AT = RAW_AT + STAGES * STAGE * RAW_BYTES;
constexpr uint32 BIAS_AT = FACTOR_AT + STAGES * SLICES * STAGE * 2;  // of each token: 0, or what makes its score -inf
constexpr uint32 ALPHA_AT = BIAS_AT + STAGES * STAGE * 4;
constexpr uint32 SHARE_AT = ALPHA_AT + P_SLOTS * HEADS * 4;
constexpr uint32 RAISED_AT = SHARE_AT + 2 * HEADS * 4;
constexpr uint32 ABSENT_AT = RAISED_AT + P_SLOTS * 16;  // of each stage: whether a token is absent
constexpr uint32 RAW_FULL = ABSENT_AT + 8 * STAGES;
constexpr uint32 RAW_EMPTY = RAW_FULL + 8 * STAGES;
constexpr uint32 K_FULL = RAW_EMPTY + 8 * STAGES;
constexpr uint32 K_EMPTY = K_FULL + 8 * K_SLOTS;
constexpr uint32 P_FULL = K_EMPTY + 8 * K_SLOTS;
constexpr uint32 P_EMPTY = P_FULL + 8 * P_SLOTS;
constexpr uint32 SHARE_FULL = P_EMPTY + 8 * P_SLOTS;
constexpr uint32 SHARED_BYTES = SHARE_FULL + 16 - 1024;
static_assert(SHARED_BYTES <= 232448, "more shared memory than there is");
static_assert(STAGES % 2 == 0, "a block's two stages must be neighbours");

// A ring's position: which slot, and the parity of its current round.
template <int SLOTS> struct Ring {
    int slot = 0;
    uint32 round = 0;
    __device__ void advance(int by = 1) {
        slot += by;
        if (slot >= SLOTS) slot -= SLOTS, round ^= 1;
    }
};

// Where token t of 16 stands in the permuted order; see the top.
__device__ inline int place(int t) {
    int b = t >> 2 & 1, c = (t & 3) ^ b;
    return 2 * c + b + (t & 8);
}
// The token at a place.
__device__ inline int token_at_place(int n) {
    int b = n & 1, c = n >> 1 & 3;
    return (c ^ b) | b << 2 | (n & 8);
}

// Byte of 16-byte chunk `chunk` of raw row t, such that 4 tokens' 32-byte halves never meet in a bank.
__device__ inline uint32 raw_offset(int t, int chunk) {
    int swizzle = (t >> 1 & 1) << 1;
    if (RAW_BYTES % 128 == 0) swizzle |= (t & 1) << 2;
    return t * RAW_BYTES + ((chunk ^ swizzle) << 4);
}

// Address of another slice of the row at `raw`, given that of its slice 0. Where a row is a multiple of 128
// bytes, the swizzle of odd tokens exchanges neighbouring slices.
__device__ inline uint32 slice_of(uint32 raw, int slice, int token) {
    if (RAW_BYTES % 128 == 0 && token & 1) return raw + ((slice ^ 1) - 1) * 64;
    return raw + slice * 64;
}

__device__ inline uint32 multiply(uint32 x, uint32 factor) {
    uint32 y;
    asm volatile("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(x), "r"(factor));
    return y;
}
// e4m3 bytes to float16 pairs.
__device__ inline void to_f16(uint32 bytes, uint32& low, uint32& high) {
    asm volatile("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}"
                 : "=r"(low), "=r"(high) : "r"(bytes));
}
__device__ inline uint32 bf16x2_to_f16x2(uint32 x) {
    return pack(f16{}, __uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}
__device__ inline uint4 bf16x8_to_f16x8(uint4 x) {
    return {bf16x2_to_f16x2(x.x), bf16x2_to_f16x2(x.y), bf16x2_to_f16x2(x.z), bf16x2_to_f16x2(x.w)};
}
// Larger of the magnitudes of 8 bfloat16 values, in each half of a word.
__device__ inline uint32 largest_of_8(uint4 x) {
    return __vmaxu2(__vmaxu2(x.x & 0x7fff7fff, x.y & 0x7fff7fff), __vmaxu2(x.z & 0x7fff7fff, x.w & 0x7fff7fff));
}
__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ---------------------------------------------------------------------------------------------- gatherer

__device__ uint4 absent_row[64];  // zeros: what a token that is not there reads

// Whether float16 has the scale whose float32 bits these are, at least to its own precision: powers of two may be
// subnormal there.
__device__ inline bool fits_f16(uint32 bits) {
    uint32 exponent = bits >> 23, least = bits & 0x7fffff ? F16_NORMAL : MIN_SCALE;
    return exponent >= least && exponent <= MAX_SCALE;
}

// One warp. A lane looks after the token of its number in a stage; 4 lanes copy a row, 8 rows at a time.
struct Gatherer {
    const Problem& problem;
    int lane;
    // The block to gather next: where this lane's indices are, how many of its list are left from there, how many
    // blocks of the list and of the tile.
    const int* cursor;
    int tile, left, list_blocks, tile_blocks;
    bool second, more;

    // A stage whose rows are on their way.
    struct Pending {
        uint4 scales;
        bool present;
        int tile;
    };

    __device__ Gatherer(const Problem& p) : problem(p), lane(threadIdx.x % 32) { open_tile(Share(problem)); }

    __device__ void open_tile(Share share) {
        Work work;
        more = share.next(problem, work);
        if (!more) return;
        tile = work.tile, tile_blocks = work.last - work.first;
        int blocks0 = blocks_of(work.lengths0);
        second = work.first >= blocks0;
        open_list(work.first - (second ? blocks0 : 0));
    }

    // Point at the indices of a block of the list.
    __device__ void open_list(int block) {
        const List& list = problem.lists[second];
        TilePlace at(problem, tile);
        int position = block * BLOCK + lane, length = list.length(at.b, at.s);
        cursor = list.indices + at.b * list.indices_stride_b + at.s * list.indices_stride_s + position;
        left = length - position;
        list_blocks = blocks_of(length) - block;
    }

    // Volatile, or the compiler would load where the index is used.
    __device__ int fetch_index(int half) {
        int index = -1;
        if (left > STAGE * half) asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(index) : "l"(cursor + STAGE * half));
        return index;
    }

    __device__ void next_block() {
        if (--tile_blocks == 0) {
            Share share(problem);
            share.tile = tile + 1, share.first = 0;
            open_tile(share);
        } else if (--list_blocks == 0 && !second) {
            second = true;
            open_list(0);
        } else {
            cursor += BLOCK, left -= BLOCK;
        }
    }

    __device__ Pending gather(const List& list, int stage, int slot, int of_tile) {
        bool here = uint32(slot) < uint32(list.num_slots);
        int page = list.block_shift >= 0 ? slot >> list.block_shift : int(uint32(slot) / uint32(list.block_size));
        int row = slot - page * list.block_size;
        const uint8* base = list.pages + page * list.page_stride;
        int scale_at = LAYOUT::scale_start + list.block_size * LAYOUT::scale_start_per_token + row * LAYOUT::scale_stride;
        const uint8* zeros = reinterpret_cast<const uint8*>(absent_row);
        const uint8* source = here ? base + row * LAYOUT::row_bytes : zeros;
        const uint8* scales = here ? base + scale_at : zeros;
        Pending pending{{}, here, of_tile};
        if (LAYOUT::ue8m0)
            asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(pending.scales.x), "=r"(pending.scales.y) : "l"(scales));
        else
            asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(pending.scales.x), "=r"(pending.scales.y), "=r"(pending.scales.z), "=r"(pending.scales.w) : "l"(scales));
        uint64 address = reinterpret_cast<uint64>(source);
        int first = lane / 4, part = lane % 4;  // of 8 rows, and of a row's 4 parts of 16 bytes in each slice
        uint32 raw = RAW_AT + stage * (STAGE * RAW_BYTES) + raw_offset(first, part);
        uint32 rope = ROPE_AT + stage * (STAGE * 128) + place(first) * 128 + ((part ^ place(first)) << 4);
#pragma unroll
        for (int i = 0; i < STAGE / 8; ++i) {  // 8 rows further are 8 places further
            const uint8* from = reinterpret_cast<const uint8*>(__shfl_sync(~0u, address, first + 8 * i)) + 16 * part;
#pragma unroll
            for (int slice = 0; slice < SLICES; ++slice)
                copy16_async(slice_of(raw, slice, first) + i * 8 * RAW_BYTES, from + 64 * slice, true);
            copy16_async(rope + i * 1024, from + LAYOUT::rope_offset, true);
            copy16_async((rope ^ 64) + i * 1024, from + LAYOUT::rope_offset + 64, true);
        }
        copies_commit();
        return pending;
    }

    // Complete a stage whose rows have arrived: factors, bias, and word to the others.
    __device__ void publish(int stage, const Pending& pending) {
        int n = (lane & 16) + place(lane & 15);
        int b = n & 1, c = n >> 1 & 3, h = n >> 3 & 1;
        uint32 at = FACTOR_AT + stage * (SLICES * STAGE * 2) + (lane & 16) * 2 + c * 8 + (b + 2 * h) * 2;
        bool bad = false;
#pragma unroll
        for (int i = 0; i < SLICES; ++i) {
            uint32 bits;  // of the scale as float32
            if (LAYOUT::ue8m0) bits = ((i < 4 ? pending.scales.x : pending.scales.y) >> 8 * (i % 4) & 0xff) << 23;
            else bits = i < 2 ? pending.scales.x : i < 4 ? pending.scales.y : i < 6 ? pending.scales.z : pending.scales.w;
            bad |= !fits_f16(bits);
            sts16(at + i * (STAGE * 2), pack(f16{}, __uint_as_float(bits), 0.0f));
        }
        float absent = problem.softmax_scale < 0.0f ? infinity() : -infinity();
        sts_float(BIAS_AT + (stage * STAGE + n) * 4, pending.present ? 0.0f : absent);
        bool any_absent = __any_sync(~0u, !pending.present);
        if (lane == 0) sts32(ABSENT_AT + stage * 4, any_absent);
        warp_arrive(RAW_FULL + 8 * stage);
        if (pending.present && bad) problem.unsafe[pending.tile] = 1;
    }

    __device__ void run() {
        if (!more) return;
        Ring<STAGES> at;
        Pending pending[2];  // of the block before, which is published as this one is gathered
        int index[2] = {fetch_index(0), fetch_index(1)};
        bool published = true;
        while (more) {
            const List& list = problem.lists[second];
            int of_tile = tile, slot[2] = {index[0], index[1]};
            next_block();
            if (more) index[0] = fetch_index(0), index[1] = fetch_index(1);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (!published) {
                    copies_wait<1>();
                    publish(before(at.slot), pending[half]);
                }
                barrier_wait(RAW_EMPTY + 8 * at.slot, at.round ^ 1);
                pending[half] = gather(list, at.slot, slot[half], of_tile);
                at.advance();
            }
            published = false;
        }
        copies_wait<0>();
        publish(before(at.slot), pending[0]);
        at.advance();
        publish(before(at.slot), pending[1]);
    }

    // The stage two before.
    static __device__ int before(int stage) { return stage >= 2 ? stage - 2 : stage + STAGES - 2; }
};

// ---------------------------------------------------------------------------------------------- converter

// Three warps; each converts a slice of a block, 64 tokens of 64 values, and slices go round the warps.
struct Converter {
    int warp, lane;

    __device__ Converter() : warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32) {}

    // Rows of a slice are in permuted order: of each 8 rows, this lane has a quarter of the one at q.
    __device__ void convert(int stage, int slice, uint32 target) {
        int part = lane % 4, q = lane / 4, token = token_at_place(q);
        uint32 source = slice_of(RAW_AT + stage * (STAGE * RAW_BYTES) + raw_offset(token, part), slice, token);
        uint32 factor_at = FACTOR_AT + stage * (SLICES * STAGE * 2) + slice * (STAGE * 2) + (q >> 1 & 3) * 8 + (q & 1) * 2;
        target += q * 128;
        uint32 low = (2 * part ^ q) << 4, high = low ^ 16;
#pragma unroll
        for (int batch = 0; batch < 2; ++batch) {  // a stage each
            uint4 raw[4];
            uint32 factors[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                raw[i] = lds128(source + (4 * batch + i) * 8 * RAW_BYTES);
                factors[i] = lds16(factor_at + batch * (SLICES * STAGE * 2) + i / 2 * 32 + i % 2 * 4);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                uint32 scale = factors[i] | factors[i] << 16;
                uint32 in[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w}, words[8];
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    to_f16(in[w], words[2 * w], words[2 * w + 1]);
                    words[2 * w] = multiply(words[2 * w], scale);
                    words[2 * w + 1] = multiply(words[2 * w + 1], scale);
                }
                uint32 row = target + (4 * batch + i) * 1024;
                sts128(row + low, {words[0], words[1], words[2], words[3]});
                sts128(row + high, {words[4], words[5], words[6], words[7]});
            }
        }
    }

    __device__ void run(int blocks) {
        Ring<STAGES> at;
        int slice = warp;
        uint32 k = warp;  // slices converted before this one, over all blocks
#pragma unroll 1
        for (; blocks; --blocks) {
            barrier_wait(RAW_FULL + 8 * at.slot, at.round);
            barrier_wait(RAW_FULL + 8 * (at.slot + 1), at.round);
#pragma unroll 1
            for (; slice < SLICES; slice += CONVERTERS, k += CONVERTERS) {
                int slot = k % K_SLOTS;
                barrier_wait(K_EMPTY + 8 * slot, (k / K_SLOTS & 1) ^ 1);
                convert(at.slot, slice, K_AT + slot * TILE_BYTES);
                warp_arrive(K_FULL + 8 * slot);
            }
            slice -= SLICES;
            warp_arrive(RAW_EMPTY + 8 * at.slot);
            warp_arrive(RAW_EMPTY + 8 * (at.slot + 1));
            at.advance(2);
        }
    }
};

// ---------------------------------------------------------------------------------------------- scorer

struct Scorer {
    const Problem& problem;
    int warp, lane;
    Ring<STAGES> raw;
    uint32 k = 0;  // slices taken, over all blocks
    Ring<P_SLOTS> p_slot;

    __device__ Scorer(const Problem& p) : problem(p), warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32) {}

    // All threads of the scorer.
    __device__ void sync() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

    // Start copying a tile's Q, as bfloat16.
    __device__ void copy_q(int tile) {
        TilePlace at(problem, tile);
        int thread = threadIdx.x % 128, chunk = thread % 8;
        const bf16* q = problem.q + at.b * problem.q_stride_b + at.s * problem.q_stride_s + chunk * 8;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int row = thread / 8 + 16 * i;
            bool here = at.first_head + row < problem.heads;
            const bf16* from = q + (here ? at.first_head + row : 0) * problem.q_stride_h;
            uint32 to = Q_AT + row * 128 + ((chunk ^ (row & 7)) << 4);
#pragma unroll
            for (int slice = 0; slice <= SLICES; ++slice) copy16_async(to + slice * TILE_BYTES, from + slice * 64, here);
        }
        copies_commit();
    }

    // Wait for Q and turn all but RoPE to float16 in place. Each thread has the chunks that it copied.
    __device__ void convert_q(int tile) {
        copies_wait<0>();
        int thread = threadIdx.x % 128, chunk = thread % 8;
        uint32 largest = 0;
        uint32 at = Q_AT + thread / 8 * 128 + ((chunk ^ (thread / 8 & 7)) << 4);
#pragma unroll 1
        for (int slice = 0; slice < SLICES; slice += 2, at += 2 * TILE_BYTES) {
            uint4 x[8];  // rows 16 further and the next slice (of seven the last has none)
            int count = slice + 1 < SLICES ? 8 : 4;
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (i < count) x[i] = lds128(at + i / 4 * TILE_BYTES + i % 4 * 2048);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (i >= count) break;
                largest = __vmaxu2(largest, largest_of_8(x[i]));
                sts128(at + i / 4 * TILE_BYTES + i % 4 * 2048, bf16x8_to_f16x8(x[i]));
            }
        }
        fence_for_matrix();
        largest = __reduce_max_sync(~0u, max(largest & 0xffff, largest >> 16));
        // Zero is exact; what is small otherwise would lose its last bits.
        if (largest > MAX_F16 || (largest && largest < MIN_Q)) problem.unsafe[tile] = 1;
        sync();
    }

    // Scores of a block into x: column n is the token at place n.
    __device__ void score(float (&x)[32]) {
        barrier_wait(RAW_FULL + 8 * raw.slot, raw.round);
        barrier_wait(RAW_FULL + 8 * (raw.slot + 1), raw.round);
        fence_for_matrix();
        matrix_begin();
#pragma unroll
        for (int i = 0; i < 4; ++i)
            matrix_bf16(x, tile_descriptor(Q_AT + SLICES * TILE_BYTES) + 2 * i,
                        tile_descriptor(ROPE_AT + raw.slot * (STAGE * 128)) + 2 * i, i != 0);
        matrix_commit();
#pragma unroll
        for (int slice = 0; slice < SLICES; slice += 2) {
            int pair = slice + 1 < SLICES ? 2 : 1;
            int slots[2] = {int(k % K_SLOTS), int((k + 1) % K_SLOTS)};
            barrier_wait(K_FULL + 8 * slots[0], k / K_SLOTS & 1);
            if (pair == 2) barrier_wait(K_FULL + 8 * slots[1], (k + 1) / K_SLOTS & 1);
            fence_for_matrix();
            matrix_begin();
#pragma unroll
            for (int i = 0; i < 4 * pair; ++i)
                matrix_f16(x, tile_descriptor(Q_AT + (slice + i / 4) * TILE_BYTES) + 2 * (i % 4),
                           tile_descriptor(K_AT + slots[i / 4] * TILE_BYTES) + 2 * (i % 4), 1);
            matrix_commit();
            if (slice) {  // the pair before is done with
                matrix_wait<1>();
                warp_arrive(K_EMPTY + 8 * int((k - 2) % K_SLOTS));
                warp_arrive(K_EMPTY + 8 * int((k - 1) % K_SLOTS));
            }
            k += pair;
        }
        matrix_wait<0>();
        pin(x);
#pragma unroll
        for (int i = SLICES % 2 ? 1 : 2; i; --i) warp_arrive(K_EMPTY + 8 * int((k - i) % K_SLOTS));
        uint2 absent = lds64(ABSENT_AT + raw.slot * 4);
        if (__any_sync(~0u, absent.x | absent.y)) hide_absent(x);
        warp_arrive(RAW_EMPTY + 8 * raw.slot);
        warp_arrive(RAW_EMPTY + 8 * (raw.slot + 1));
        raw.advance(2);
    }

    // Columns 8 j + 2 c and + 1 of rows g are elements 4 j and 4 j + 1, of rows g + 8 those after them.
    __device__ void hide_absent(float (&x)[32]) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            float2 bias = lds_float2(BIAS_AT + (raw.slot * STAGE + 8 * j + 2 * (lane % 4)) * 4);
            x[4 * j] += bias.x, x[4 * j + 1] += bias.y, x[4 * j + 2] += bias.x, x[4 * j + 3] += bias.y;
        }
    }

    // P = 2^(scale x - top) to shared memory, its row sums to `sums`; whether a weight is above LAZY.
    __device__ bool write_weights(const float (&x)[32], float scale, const float (&top)[2], float (&sums)[2]) {
        int row = 16 * warp + lane % 16;
        uint32 at = P_AT + p_slot.slot * TILE_BYTES + row * 128;
        uint32 largest = 0;
#pragma unroll
        for (int r = 0; r < 2; ++r) sums[r] = 0.0f;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            uint32 p[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // columns 16 k + 8 (i / 2), rows + 8 (i % 2)
                int from = 8 * k + 4 * (i / 2) + 2 * (i % 2);
                float low = exp2_fast(fmaf(x[from], scale, -top[i % 2]));
                float high = exp2_fast(fmaf(x[from + 1], scale, -top[i % 2]));
                sums[i % 2] += low + high;
                p[i] = pack(f16{}, low, high);
                largest = __vmaxu2(largest, p[i]);
            }
            stmatrix4(at + (((2 * k + lane / 16) ^ (row & 7)) << 4), p[0], p[1], p[2], p[3]);
        }
        return largest >> 16 > LAZY || (largest & 0xffff) > LAZY;
    }

    // The softmax of a block; `total` is this lane's part of the rows' sums.
    __device__ void weigh(const float (&x)[32], float (&top)[2], float (&total)[2], float scale) {
        float sums[2];
        barrier_wait(P_EMPTY + 8 * p_slot.slot, p_slot.round ^ 1);
        bool raise = __any_sync(~0u, write_weights(x, scale, top, sums));
        if (raise) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float highest = top[r];
#pragma unroll
                for (int i = 0; i < 16; ++i) highest = fmaxf(highest, x[4 * (i / 2) + 2 * r + i % 2] * scale);
                highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
                highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
                float alpha = exp2_fast(top[r] - highest);
                top[r] = highest;
                total[r] *= alpha;
                if (lane % 4 == 0) sts_float(ALPHA_AT + (p_slot.slot * HEADS + 16 * warp + lane / 4 + 8 * r) * 4, alpha);
            }
            write_weights(x, scale, top, sums);
        }
        if (lane == 0) sts32(RAISED_AT + p_slot.slot * 16 + warp * 4, raise);
        total[0] += sums[0], total[1] += sums[1];
        warp_arrive(P_FULL + 8 * p_slot.slot);
        p_slot.advance();
    }

    __device__ void run() {
        Share share(problem);
        Work work;
        // A scale of 0 would make NaN of an absent token's infinite score.
        float scale = problem.softmax_scale == 0.0f ? 1e-30f : problem.softmax_scale * LOG2_E;
        int parity = 0;
        bool pending = share.next(problem, work);
        if (pending) copy_q(work.tile);
        while (pending) {
            int tile = work.tile, blocks = work.last - work.first;
            bool whole = work.whole(), from_start = work.first == 0, another = share.more();
            convert_q(tile);
            float top[2] = {NO_MAX, NO_MAX}, total[2] = {};
#pragma unroll 1
            for (; blocks; --blocks) {
                float x[32];
                score(x);
                if (blocks == 1 && another) {
                    sync();  // all have read Q
                    copy_q(tile + 1);
                }
                weigh(x, top, total, scale);
            }
            finish(tile, whole, from_start, top, total, parity);
            parity ^= 1;
            // Found again rather than kept: registers are dear here.
            share = Share(problem);
            share.tile = tile + 1, share.first = 0;
            pending = share.next(problem, work);
        }
    }

    // What the mixers multiply their sums by, and the logarithm of the sum.
    __device__ void finish(int tile, bool whole, bool from_start, const float (&top)[2], const float (&total)[2], int parity) {
        TilePlace at(problem, tile);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int row = 16 * warp + lane / 4 + 8 * r;
            int head = at.first_head + row;
            float sum = total[r];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            bool empty = sum == 0.0f;
            float lse2 = top[r] + log2f(sum);
            float share = 1.0f / sum;
            if (lane % 4 == 0) {
                if (!whole) {
                    problem.partial_lse[partial_slot(blockIdx.x, from_start) * HEADS + row] = empty ? -infinity() : lse2;
                } else if (head < problem.heads) {
                    float lse = lse2 * LN_2;
                    if (problem.attn_sink) share *= 1.0f / (1.0f + expf(problem.attn_sink[head] - lse));
                    problem.lse[at.b * problem.lse_stride_b + head * problem.lse_stride_h + at.s * problem.lse_stride_s] =
                        empty ? infinity() : lse;
                }
                sts_float(SHARE_AT + (parity * HEADS + row) * 4, empty ? 0.0f : share);
            }
        }
        warp_arrive(SHARE_FULL + 8 * parity);
    }
};

// ---------------------------------------------------------------------------------------------- mixers

struct Mixer {
    const Problem& problem;
    int half, warp, lane;
    Ring<STAGES> raw;
    Ring<P_SLOTS> p_slot;

    __device__ Mixer(const Problem& p, int h) : problem(p), half(h), warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32) {}

    // Where this lane's raw values are: in stage 0, of the tokens at places 2 c + b of a 16-token group, the
    // values 8 g .. 8 g + 7 of this warp's 64. Places 8 further, groups and stages are constant distances away.
    uint32 row_at[2], factor_at;

    __device__ void find_rows() {
        int g = lane / 4, c = lane % 4, slice = 4 * half + warp;
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            int n = 2 * c + b, token = token_at_place(n);
            row_at[b] = mixes_rope() ? ROPE_AT + n * 128 + ((g ^ n) << 4)
                                     : RAW_AT + raw_offset(token, 4 * slice + g / 2) + 8 * (g % 2);
        }
        factor_at = FACTOR_AT + slice * (STAGE * 2) + c * 8;
    }

    // Whether this warp's 64 values are those that stay bfloat16.
    __device__ bool mixes_rope() const { return ROPE_IN_V && half == 1 && warp == 3; }

    // Raw values of the tokens at places 2 c + b + 8 h into rows[b + 2 h]: all 8, but of RoPE only the 4 of
    // `half_of_8`, which are as many bytes.
    __device__ void load_rows(uint2 (&rows)[4], uint2& factors, int stage, int group, int half_of_8, bool rope) {
        if (rope) {
            uint32 at = stage * (STAGE * 128) + group * 2048 + 8 * half_of_8;
#pragma unroll
            for (int i = 0; i < 4; ++i) rows[i] = lds64(row_at[i % 2] + at + i / 2 * 1024);
        } else if (half_of_8 == 0) {
            uint32 at = stage * (STAGE * RAW_BYTES) + group * 16 * RAW_BYTES;
#pragma unroll
            for (int i = 0; i < 4; ++i) rows[i] = lds64(row_at[i % 2] + at + i / 2 * 8 * RAW_BYTES);
            factors = lds64(factor_at + stage * (SLICES * STAGE * 2) + group * 32);
        }
    }

    // A fragments of V^T: fragment j has values 4 * half_of_8 + 2 j and + 1 of each 8.
    __device__ void convert(uint32 (&a)[2][4], const uint2 (&rows)[4], uint2 factors, int half_of_8, bool rope) {
        if (rope) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                a[0][2 * h] = bf16x2_to_f16x2(__byte_perm(rows[2 * h].x, rows[2 * h + 1].x, 0x5410));
                a[0][2 * h + 1] = bf16x2_to_f16x2(__byte_perm(rows[2 * h].x, rows[2 * h + 1].x, 0x7632));
                a[1][2 * h] = bf16x2_to_f16x2(__byte_perm(rows[2 * h].y, rows[2 * h + 1].y, 0x5410));
                a[1][2 * h + 1] = bf16x2_to_f16x2(__byte_perm(rows[2 * h].y, rows[2 * h + 1].y, 0x7632));
            }
        } else {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                uint32 factor = h ? factors.y : factors.x;
                uint32 first = half_of_8 ? rows[2 * h].y : rows[2 * h].x;
                uint32 second = half_of_8 ? rows[2 * h + 1].y : rows[2 * h + 1].x;
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    uint32 low, high;
                    to_f16(__byte_perm(first, second, j ? 0x7362 : 0x5140), low, high);
                    a[j][2 * h] = multiply(low, factor);
                    a[j][2 * h + 1] = multiply(high, factor);
                }
            }
        }
    }

    __device__ void run() {
        Share share(problem);
        Work work;
        int parity = 0;
        uint32 share_round = 0;
        float sums[4][32];
        find_rows();
        bool rope = __any_sync(~0u, mixes_rope());
        while (share.next(problem, work)) {
            for (int block = work.first; block < work.last; ++block) {
                barrier_wait(RAW_FULL + 8 * raw.slot, raw.round);
                barrier_wait(RAW_FULL + 8 * (raw.slot + 1), raw.round);
                uint32 a[2][2][4];
                uint2 rows[4], factors;
                load_rows(rows, factors, raw.slot, 0, 0, rope);
                convert(a[0], rows, factors, 0, rope);
                barrier_wait(P_FULL + 8 * p_slot.slot, p_slot.round);
                fence_for_matrix();
                bool fresh = block == work.first;
                if (!fresh) rescale(sums);
                uint64 p = tile_descriptor(P_AT + p_slot.slot * TILE_BYTES);
#pragma unroll
                for (int i = 0; i < 8; ++i) {  // 16 tokens and half of the values at a time
                    int k = i / 2, w = i % 2;
                    matrix_begin();
                    matrix_f16(sums[2 * w], a[w][0], p + 2 * k, k != 0 || !fresh);
                    matrix_f16(sums[2 * w + 1], a[w][1], p + 2 * k, k != 0 || !fresh);
                    matrix_commit();
                    if (i == 7) break;
                    int next = (i + 1) / 2;
                    load_rows(rows, factors, raw.slot + next / 2, next % 2, 1 - w, rope);
                    if (i == 3) warp_arrive(RAW_EMPTY + 8 * raw.slot);
                    if (i == 6) warp_arrive(RAW_EMPTY + 8 * (raw.slot + 1));
                    if (i > 0) matrix_wait<1>();
                    convert(a[1 - w], rows, factors, 1 - w, rope);
                }
                matrix_wait<0>();
#pragma unroll
                for (int j = 0; j < 4; ++j) pin(sums[j]);
                raw.advance(2);
                if (block + 1 < work.last) {
                    warp_arrive(P_EMPTY + 8 * p_slot.slot);
                    p_slot.advance();
                }
            }
            barrier_wait(SHARE_FULL + 8 * parity, share_round);
            store(work, sums, parity);
            warp_arrive(P_EMPTY + 8 * p_slot.slot);  // only now: it also says that the shares were read
            p_slot.advance();
            parity ^= 1;
            if (parity == 0) share_round ^= 1;
        }
    }

    // Heads are columns: 8 i + 2 c + e in elements 4 i + e and 4 i + 2 + e.
    __device__ void rescale(float (&sums)[4][32]) {
        uint4 raised = lds128(RAISED_AT + p_slot.slot * 16);
        uint32 by_warp[4] = {raised.x, raised.y, raised.z, raised.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            if (!__any_sync(~0u, by_warp[w] != 0)) continue;
#pragma unroll
            for (int i = 2 * w; i < 2 * w + 2; ++i) {
                float2 alpha = lds_float2(ALPHA_AT + (p_slot.slot * HEADS + 8 * i + 2 * (lane % 4)) * 4);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    sums[j][4 * i] *= alpha.x, sums[j][4 * i + 1] *= alpha.y;
                    sums[j][4 * i + 2] *= alpha.x, sums[j][4 * i + 3] *= alpha.y;
                }
            }
        }
    }

    // Each lane has 8 neighbouring values of 16 heads.
    __device__ void store(const Work& work, float (&sums)[4][32], int parity) {
        int g = lane / 4, c = lane % 4;
        int value = (4 * half + warp) * 64 + 8 * g;
        TilePlace at(problem, work.tile);
        bf16* out = problem.out + at.b * problem.out_stride_b + at.s * problem.out_stride_s + value;
        float4* partial = reinterpret_cast<float4*>(problem.partial_out) +
                          int64(partial_slot(blockIdx.x, work.first == 0)) * (HEADS * V_DIM / 4) + partial_at(2 * c, value);
        bool whole = work.whole();
        float worst = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float2 share = lds_float2(SHARE_AT + (parity * HEADS + 8 * i + 2 * c) * 4);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                int row = 8 * i + 2 * c + e, head = at.first_head + row;
                float factor = e ? share.y : share.x;
                float x[8];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    x[2 * j] = sums[j][4 * i + e] * factor;
                    x[2 * j + 1] = sums[j][4 * i + 2 + e] * factor;
                    worst += x[2 * j] * 0.0f + x[2 * j + 1] * 0.0f;
                }
                if (whole) {
                    if (head < problem.heads)
                        *reinterpret_cast<uint4*>(out + head * problem.out_stride_h) =
                            uint4{pack(bf16{}, x[0], x[1]), pack(bf16{}, x[2], x[3]), pack(bf16{}, x[4], x[5]),
                                  pack(bf16{}, x[6], x[7])};
                } else {
                    float4* to = partial + (2 * i + e) * 2 * PLANE;  // heads 8 i + 2 c + e
                    to[0] = make_float4(x[0], x[1], x[2], x[3]), to[PLANE] = make_float4(x[4], x[5], x[6], x[7]);
                }
            }
        }
        if (worst != 0.0f) problem.unsafe[work.tile] = 1;  // NaN: something left the range
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) sparse_mla_decode(const __grid_constant__ Problem problem) {
    extern __shared__ uint8 memory[];
    if (threadIdx.x == 0) {
        if (uint32(__cvta_generic_to_shared(memory)) != 1024) __trap();
        // Warps arrive: one gathers, three convert, four score, eight mix.
        for (int i = 0; i < STAGES; ++i) barrier_init(RAW_FULL + 8 * i, 1), barrier_init(RAW_EMPTY + 8 * i, 15);
        for (int i = 0; i < K_SLOTS; ++i) barrier_init(K_FULL + 8 * i, 1), barrier_init(K_EMPTY + 8 * i, 4);
        for (int i = 0; i < P_SLOTS; ++i) barrier_init(P_FULL + 8 * i, 4), barrier_init(P_EMPTY + 8 * i, 8);
        for (int i = 0; i < 2; ++i) barrier_init(SHARE_FULL + 8 * i, 4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    overlap_with_previous_kernel();
    int role = threadIdx.x / 128;
    if (role == 0) {
        give_registers<SCORER_REGISTERS>();
        Scorer(problem).run();
    } else if (role == 3) {
        give_registers<FEEDER_REGISTERS>();
        if (threadIdx.x / 32 % 4 == CONVERTERS) Gatherer(problem).run();
        else Converter().run(blocks_of_share(problem));
    } else {
        take_registers<MIXER_REGISTERS>();
        Mixer(problem, role - 1).run();
    }
}

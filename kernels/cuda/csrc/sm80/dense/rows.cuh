// The ring of rows of sm80/dense/decode.cu. Queries and keys of a token arrive as *steps* of KEYS rows of 16-bit
// values.
//
// The first Q_STEPS steps of a token are its queries, a head a row; the others are keys. Copies run AHEAD steps ahead of their sums,
// across tokens. Rows of absent keys and heads are zeros.
//
// Each warp of the sums copies the values that it multiplies, 128 bytes of a row, and a part of the tails (RoPE). So it
// needs no barrier before it reads or overwrites these values. Rows of e4m3 are copied to the end of their place; the warp
// expands them there LEAD steps before the sums.
#pragma once
#include "common/dense/work.cuh"
#include "common/device.cuh"
#include "sm80/steps.cuh"

struct e4m3 { uint8 bits; };

constexpr int HEADS = 64;
constexpr int VALUES = LATENT_V / SUM_WARPS, PLACE = 2 * VALUES;  // a warp's values of a row, and their bytes
constexpr int TAIL = LATENT_DIM - LATENT_V;                       // RoPE values at the end of a row
constexpr int AHEAD = STAGES - 1, LEAD = STAGES > 3 ? 2 : 1;      // copies and scores are ahead of sums by these numbers of steps
constexpr int TOKENS_LISTED = 4;
constexpr int Q_STEPS = HEADS / KEYS;
constexpr int ROW_STRIDE = row_stride(LATENT_DIM);
constexpr uint32 ALL_PRESENT = KEYS == 32 ? ~0u : (1u << KEYS % 32) - 1;
static_assert((KEYS == 16 || KEYS == 32) && STAGES >= 3 && AHEAD <= Q_STEPS + 1 && TAIL == VALUES, "unsupported sizes");

// threadIdx.x and blockIdx.x, read again by each call, so that values derived from them take no registers between uses.
__device__ inline int thread_index() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

__device__ inline int block_index() {
    int x;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
    return x;
}

// Arguments of a launch.
struct DecodeProblem {
    const VALUE* q;
    int64 q_stride_b, q_stride_s, q_stride_h;
    int heads;
    LatentCache cache;
    DenseTokens tokens;
    float scale_log2, value_scale;
    VALUE* out;
    int64 out_stride_b, out_stride_s, out_stride_h;
    float* lse;
    int64 lse_stride_b, lse_stride_h, lse_stride_s;
    float *partial_out, *partial_lse;

    // This CTA's work range and first head, computed at each use.
    __device__ int groups() const { return (heads + HEADS - 1) / HEADS; }
    __device__ int range() const { return block_index() / groups(); }
    __device__ int first_head() const { return block_index() % groups() * HEADS; }
};

// A query token, or the part of it that is in the CTA's range.
struct RingToken {
    const VALUE* q;       // of the CTA's first head
    int heads;            // from that one on
    int token, request;   // the token is -1 after the range's end
    int position, last;   // its first key, and the one after its last
    int first_keys, end;  // its first step of keys, and the one after its last: steps count through the range
    int part;             // row of the partial results; -1: the whole token is here

    __device__ void take(const DecodeProblem& problem, const DenseWork& work, int next, int first_step) {
        token = next <= work.last_token() ? next : -1, end = INT32_LIMIT;
        if (token < 0) return;
        first_keys = first_step + Q_STEPS;
        int keys = problem.tokens.keys(token), blocks = blocks_of(keys), query = token % problem.tokens.s_q;
        request = token / problem.tokens.s_q, heads = problem.heads - problem.first_head();
        position = work.first_block(token) * BLOCK, last = int(min(int64(keys), int64(work.last_block(token, blocks)) * BLOCK));
        end = first_keys + max(1, (last - position + KEYS - 1) / KEYS), part = work.part(token, problem.range());
        q = problem.q + request * problem.q_stride_b + query * problem.q_stride_s + problem.first_head() * problem.q_stride_h;
    }
};

struct RowRing {
    alignas(16) uint8 rows[STAGES][KEYS][ROW_STRIDE];
    uint32 present[STAGES];  // rows that are not absent
    alignas(8) RingToken tokens[TOKENS_LISTED];
    DenseWork work;
    StepBarriers barriers;

    // The token of this number in the range.
    __device__ RingToken& token(int number) { return tokens[number % TOKENS_LISTED]; }
    // Called by one thread, in order. The first two tokens are listed at the start. Later ones are listed by the
    // scores, which have registers for it, two tokens ahead: copies are at most one token ahead.
    __device__ void list(const DecodeProblem& problem, int number) {
        token(number).take(problem, work, work.begin.token + number, number ? token(number - 1).end : 0);
    }
};
constexpr int TOKEN_BYTES = 40, WORK_BYTES = 20;
constexpr int RING_BYTES =
    to_16(STAGES * (KEYS * ROW_STRIDE + 4) + STAGES % 2 * 4 + TOKENS_LISTED * TOKEN_BYTES + WORK_BYTES + 4 + BARRIER_BYTES);
static_assert(sizeof(RingToken) == TOKEN_BYTES && sizeof(DenseWork) == WORK_BYTES && sizeof(RowRing) == RING_BYTES);

// Convert sixteen e4m3 bytes to VALUE, which is exact.
__device__ inline void expand_codes(const uint32 (&codes)[4], uint32 (&words)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (is_nan4(codes[i])) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float low, high;
                e4m3x2_to_float(codes[i] >> 16 * half, low, high);
                words[2 * i + half] = pack(VALUE{}, low, high);
            }
        } else {
            codes_to(VALUE{}, codes[i], words[2 * i], words[2 * i + 1]);
        }
    }
}

// The copies of a warp of the sums.
struct RowLoader {
    static constexpr bool CODES = sizeof(CACHE) == 1;
    static constexpr int ROW_BYTES = LATENT_DIM * sizeof(CACHE);
    const DecodeProblem& problem;
    RowRing& ring;
    int current;  // number of the token whose sums are computed
    int page;     // of this lane's row in the step to copy next; -1 if the row is absent

    // Starts the first copies; the first LEAD steps have arrived.
    __device__ RowLoader(const DecodeProblem& p, RowRing& r) : problem(p), ring(r), current(0) {
        page = page_in(0);
        for (int i = 0; i < AHEAD; ++i) copy(i);
        copies_wait<AHEAD - LEAD>();
        for (int i = 0; i < LEAD; ++i) arrive(i);
    }

    __device__ RingToken& token() { return ring.token(current); }
    // The token of a step that is copied now.
    __device__ RingToken& token_of(int step) { return ring.token(current + (step >= token().end)); }

    // The position of this lane's row in a step of keys.
    static __device__ int position_in(const RingToken& of, int step) {
        return of.position + (step - of.first_keys) * KEYS + thread_index() % 32;
    }
    __device__ int page_in(int step) {
        const RingToken& of = token_of(step);
        int position = position_in(of, step);
        bool here = of.token >= 0 && step >= of.first_keys && thread_index() % 32 < KEYS && position < of.last;
        const LatentCache& cache = problem.cache;
        return here ? int(lookup_page_row(cache.table, of.request, position, cache.block_size, cache.num_slots).page) : -1;
    }

    static __device__ const uint8* from_lane(const uint8* address, int lane) {
        return reinterpret_cast<const uint8*>(__shfl_sync(~0u, reinterpret_cast<uint64>(address), lane));
    }
    // Copy 16 bytes of a row, or write zeros.
    static __device__ void copy16(uint8* to, const uint8* source, bool present) {
#if ALIGNED
        copy_async_part(shared_address(to), source, present ? 16 : 0);
#else
        *reinterpret_cast<uint4*>(to) = present ? load16(source) : uint4{};
#endif
    }

    // Start copying BYTES of each row, from `offset` on to `to`. `source` gives the row's address.
    template <int BYTES, class Source> __device__ void copy_places(int step, uint32 present, int to, int offset, Source source) {
        constexpr int LANES = BYTES / 16, ROWS = 32 / LANES;
        int lane = thread_index() % 32, first = lane / LANES;
        uint8* target = ring.rows[step % STAGES][first] + to + lane % LANES * 16;
#pragma unroll
        for (int i = 0; i < KEYS; i += ROWS)
            copy16(target + i * ROW_STRIDE, source(first, i) + (offset + lane % LANES * 16), present >> first >> i & 1);
    }
    // The same for the tails: each warp copies a part of the rows.
    template <int BYTES, class Source> __device__ void copy_tails(int step, uint32 present, int to, int offset, Source source) {
        constexpr int LANES = BYTES / 16, ROWS = KEYS / SUM_WARPS;
        int thread = thread_index(), lane = thread % 32, row = ROWS * (thread / 32) + lane / LANES % ROWS;
        const uint8* at = source(row, 0) + (offset + lane % LANES * 16);
        if (lane < LANES * ROWS) copy16(ring.rows[step % STAGES][row] + to + lane % LANES * 16, at, present >> row & 1);
    }
    // Copy rows with SIZE bytes a value, to the end of their places.
    template <int SIZE, class Source> __device__ void copy_rows(int step, uint32 present, Source source) {
        constexpr int BYTES = SIZE * VALUES;
        int warp = thread_index() / 32;
        copy_places<BYTES>(step, present, PLACE * warp + PLACE - BYTES, BYTES * warp, source);
        copy_tails<BYTES>(step, present, 2 * LATENT_V + PLACE - BYTES, SIZE * LATENT_V, source);
    }

    // Start copying this warp's part of a step, as one group of copies that is empty after the end of the range. Called
    // for each step in order.
    __device__ void copy(int step) {
        const RingToken& of = token_of(step);
        if (of.token >= 0) {
            uint32 present;
            if (step < of.first_keys) {
                int head = (step - of.first_keys + Q_STEPS) * KEYS, heads = of.heads - head;
                present = heads >= KEYS ? ALL_PRESENT : (1u << max(heads, 0)) - 1;
                const VALUE* q = heads > 0 ? of.q + head * problem.q_stride_h : of.q;
                copy_rows<2>(step, present, [&](int first, int i) {
                    int row = first + i;
                    return reinterpret_cast<const uint8*>(q + (row < heads ? row : 0) * problem.q_stride_h);
                });
            } else {
                present = __ballot_sync(~0u, page >= 0);
                int row = position_in(of, step) % uint32(problem.cache.block_size);
                const uint8* at = problem.cache.pages + (page < 0 ? 0 : page * problem.cache.page_stride + row * ROW_BYTES);
#if WHOLE_STEPS
                at = from_lane(at, 0);
                copy_rows<sizeof(CACHE)>(step, present, [&](int first, int i) { return at + first * ROW_BYTES + i * ROW_BYTES; });
#else
                copy_rows<sizeof(CACHE)>(step, present, [&](int first, int i) { return from_lane(at, first + i); });
#endif
            }
            if (thread_index() == 0) ring.present[step % STAGES] = present;
        }
        copies_commit();
        page = page_in(step + 1);
    }

    // Expand sixteen values of a place: chunk `chunk`. The lanes of a warp expand whole rows at a time.
    static __device__ void expand_place(uint8* place, int chunk, bool here) {
        uint32 words[8];
        if (here) {
            uint4 v = *reinterpret_cast<const uint4*>(place + PLACE / 2 + 16 * chunk);
            uint32 codes[4] = {v.x, v.y, v.z, v.w};
            expand_codes(codes, words);
        }
        __syncwarp();  // all lanes have read the bytes that are overwritten next
        if (!here) return;
        uint4* to = reinterpret_cast<uint4*>(place + 32 * chunk);
        to[0] = uint4{words[0], words[1], words[2], words[3]}, to[1] = uint4{words[4], words[5], words[6], words[7]};
    }
    // Expand this warp's part of a step of keys.
    __device__ void expand(int step) {
        const RingToken& of = token_of(step);
        if (of.token < 0 || step < of.first_keys) return;
        constexpr int ROWS = KEYS / SUM_WARPS;
        int thread = thread_index(), lane = thread % 32, warp = thread / 32, chunk = lane / 8;
#pragma unroll 1
        for (int i = 0; i < KEYS; i += 8) expand_place(ring.rows[step % STAGES][i + lane % 8] + PLACE * warp, chunk, true);
        expand_place(ring.rows[step % STAGES][ROWS * warp + lane % ROWS] + 2 * LATENT_V, lane / ROWS % 4, lane < 4 * ROWS);
    }
    // Signal to the scores that this warp's part of a step has arrived.
    __device__ void arrive(int step) {
        __syncwarp();
        if (CODES) expand(step);
        ring.barriers.arrive_arrived(step);
    }

    // At a step of the sums: start copying a later step, and signal the arrival of the step of the scores.
    __device__ void advance(int step) {
        copy(step + AHEAD);
        copies_wait<AHEAD - LEAD>();
        arrive(step + LEAD);
    }
};

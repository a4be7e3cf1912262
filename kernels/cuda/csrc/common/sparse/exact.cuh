// Sparse MLA in float64: slow, and correct for every finite input.
//
// A CTA takes UNIT heads of one query token and goes through the listed keys KEYS at a time: it gathers and
// dequantises them into shared memory, computes scores (a warp per head, LANES lanes per key), a running softmax and the
// weighted sum (two output values of each head per thread).
//
// Macros: LAYOUT and EXTRA_LAYOUT (common/sparse/work.cuh), ALIGNED; EXACT_FIRST_THREAD (first thread of the block that
// takes part).
#pragma once
#include "common/sparse/work.cuh"

constexpr int EXACT_THREADS = 256, WARPS = EXACT_THREADS / 32;
constexpr int EXACT_BARRIER = 4;  // a named barrier; kernels that recompute their own tiles do not use it elsewhere
constexpr int UNIT = WARPS;  // heads
constexpr int KEYS = 4;
constexpr int LANES = 32 / KEYS;
constexpr int DIM = LAYOUT::head_dim;
constexpr int VALUES_PER_THREAD = V_DIM / EXACT_THREADS;

// EXACT_THREADS threads from this one on take part; a kernel that recomputes its own tiles has more threads.
#ifndef EXACT_FIRST_THREAD
#define EXACT_FIRST_THREAD 0
#endif
__device__ inline uint32 exact_thread() { return threadIdx.x - EXACT_FIRST_THREAD; }
// Synchronise them. The lanes of a warp arrive together.
__device__ inline void exact_sync() {
    __syncwarp();
    asm volatile("bar.sync %0, %1;" ::"r"(EXACT_BARRIER), "n"(EXACT_THREADS) : "memory");
}
// The same; returns whether x holds for any of them.
__device__ inline bool exact_any(bool x) {
    uint32 y;
    __syncwarp();
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, %3, p;\nselp.u32 %0, 1, 0, q;\n}"
                 : "=r"(y)
                 : "r"(uint32(x)), "r"(EXACT_BARRIER), "n"(EXACT_THREADS)
                 : "memory");
    return y;
}

template <class A, class B> constexpr bool is_same = false;
template <class A> constexpr bool is_same<A, A> = true;

// The entries of one list that a query token attends to.
struct SegmentEntries {
    const Segment& list;
    const int* indices;
    int length;

    __device__ SegmentEntries(const Segment& list, int b, int s)
        : list(list), indices(list.indices + b * list.indices_stride_b + s * list.indices_stride_s), length(list.length(b, s)) {}

    __device__ int slot(int entry) const {
        int slot = entry < length ? indices[entry] : -1;
        return slot < list.num_slots ? slot : -1;
    }

    template <class Layout> __device__ Token token(int slot) const {
        return token_at<Layout>(list.pages, list.page_stride, list.block_size, slot);
    }
};

// Keeps subnormals: CuPy compiles with -ftz=true.
__device__ inline double to_double(float x) {
    double y;
    asm("cvt.f64.f32 %0, %1;" : "=d"(y) : "f"(x));
    return y;
}

// Keeps subnormals, too.
__device__ inline float to_float(double x) {
    float y;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(y) : "d"(x));
    return y;
}

struct ExactShared {
    double keys[KEYS][DIM + 1];
    bf16 q[UNIT][DIM];
    double weights[UNIT][KEYS];
    double rescale[UNIT];
    int slots[KEYS];
};

// Scale `tile` of a token; 1 for a layout without scales.
template <class Layout> __device__ inline float scale_of(const Token& token, int tile) {
    if (Layout::num_scales == 0) return 1.0f;
    if (Layout::ue8m0 || Layout::e4m3_scales) return stored_scale<Layout>(token.scales[tile]);
    return __uint_as_float(load4(token.scales + 4 * tile));
}

// Eight values of a row; quantised values are multiplied by `scale`.
template <class Layout> __device__ inline void load_values(const uint8* row, float scale, int first, double (&values)[8]) {
    float x[8];
    bool quantized = first < Layout::quantized_dim;
    if constexpr (Layout::e2m1_values) {
        uint2 e4m3;
        e2m1_to_e4m3(load4(row + first / 2), e4m3.x, e4m3.y);
        dequantize8(e4m3, 1.0f, x);
    } else {
        if (quantized) dequantize8(load8(row + first), 1.0f, x);
        else unpack8(Raw8<bf16>{load16(row + Layout::rope_offset + 2 * (first - Layout::quantized_dim))}, x);
    }
    for (int i = 0; i < 8; ++i) values[i] = quantized ? to_double(x[i]) * to_double(scale) : to_double(x[i]);
}

template <class Layout>
__device__ inline void load_key(const SegmentEntries& entries, int slot, int first, double (&values)[8]) {
    Token token = entries.token<Layout>(slot);
    load_values<Layout>(token.row, first < Layout::quantized_dim ? scale_of<Layout>(token, first / Layout::scale_tile) : 1.0f, first,
                        values);
}

template <class Layout>
__device__ inline void load_keys(const SegmentEntries& entries, int first_entry, ExactShared& shared) {
    exact_sync();  // all threads are done with the previous tile
    if (exact_thread() < KEYS) shared.slots[exact_thread()] = entries.slot(first_entry + exact_thread());
    exact_sync();
    for (int i = exact_thread(); i < KEYS * (DIM / 8); i += EXACT_THREADS) {
        int key = i / (DIM / 8), first = i % (DIM / 8) * 8;
        double values[8] = {};
        if (shared.slots[key] >= 0) load_key<Layout>(entries, shared.slots[key], first, values);
        for (int j = 0; j < 8; ++j) shared.keys[key][first + j] = values[j];
    }
    exact_sync();
}

__device__ inline double warp_max(double x) {
    for (int lane = 16; lane; lane /= 2) {
        double other = __shfl_xor_sync(~0u, x, lane);
        x = x != x || x > other ? x : other;  // NaN wins
    }
    return x;
}

__device__ inline double warp_sum(double x) {
    for (int lane = 16; lane; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
    return x;
}

// Value subtracted from scores whose maximum is `top`: any finite value while all scores are -inf.
__device__ inline double base_of(double top) { return top == -double(infinity()) ? 0.0 : top; }

// Writes a head's lse and max_logits; returns the factor 1/l for its sums, sink included. `top` and `log_sum` to base e.
__device__ inline double store_lse(const SparseProblem& problem, int b, int s, int head, bool any, double top, double total) {
    if (any && top == -double(infinity())) total = top - top;  // all scores are -inf: NaN, as in the plain formula
    double log_sum = any ? top + log(total) : double(infinity());
    problem.lse[b * problem.lse_stride_b + head * problem.lse_stride_h + s * problem.lse_stride_s] = float(log_sum);
    if (problem.max_logits)
        problem.max_logits[b * problem.max_stride_b + head * problem.max_stride_h] = float(any ? top : -double(infinity()));
    return any ? 1.0 / (total * (problem.attn_sink ? 1.0 + exp(double(problem.attn_sink[head]) - log_sum) : 1.0)) : 0.0;
}

// Attention of heads first_head .. first_head + UNIT - 1 of token (b, s). Called by all threads of the block.
__device__ inline void attend_in_float64(const SparseProblem& problem, int b, int s, int first_head, ExactShared& shared) {
    int warp = exact_thread() / 32, lane = exact_thread() % 32;

    exact_sync();  // the shared memory was in use for other data
    const bf16* q = problem.q + b * problem.q_stride_b + s * problem.q_stride_s;
    for (int i = exact_thread(); i < UNIT * DIM; i += EXACT_THREADS) {
        int head = first_head + i / DIM;
        shared.q[i / DIM][i % DIM] = head < problem.heads ? q[head * problem.q_stride_h + i % DIM] : bf16{0};
    }
    double top = -double(infinity()), total = 0.0;  // of this warp's head
    bool any = false;
    double sums[UNIT][VALUES_PER_THREAD] = {};
    for (const Segment& list : problem.segments) {
        SegmentEntries entries(list, b, s);
        for (int first = 0; first < entries.length; first += KEYS) {
            if constexpr (is_same<LAYOUT, EXTRA_LAYOUT>) load_keys<LAYOUT>(entries, first, shared);
            else if (&list == problem.segments) load_keys<LAYOUT>(entries, first, shared);
            else load_keys<EXTRA_LAYOUT>(entries, first, shared);
            int key = lane / LANES, part = lane % LANES;
            double score = 0.0;
            for (int d = part; d < DIM; d += LANES) score += to_double(to_float(shared.q[warp][d])) * shared.keys[key][d];
            for (int by = 1; by < LANES; by *= 2) score += __shfl_xor_sync(~0u, score, by);
            score *= double(problem.softmax_scale);
            bool present = shared.slots[key] >= 0;
            any |= __any_sync(~0u, present);
            double tile_top = warp_max(present ? score : -double(infinity()));
            double new_top = tile_top != tile_top || tile_top > top ? tile_top : top;
            double weight = present ? exp(score - base_of(new_top)) : 0.0;
            double rescale = total != 0.0 ? exp(top - base_of(new_top)) : 0.0;
            total = total * rescale + warp_sum(part == 0 ? weight : 0.0);
            top = new_top;
            if (part == 0) shared.weights[warp][key] = weight;
            if (lane == 0) shared.rescale[warp] = rescale;
            exact_sync();
            for (int head = 0; head < UNIT; ++head)
                for (int i = 0; i < VALUES_PER_THREAD; ++i) sums[head][i] *= shared.rescale[head];
            for (int k = 0; k < KEYS; ++k) {
                if (shared.slots[k] < 0) continue;
                for (int i = 0; i < VALUES_PER_THREAD; ++i) {
                    double value = shared.keys[k][exact_thread() + i * EXACT_THREADS];
                    for (int head = 0; head < UNIT; ++head) sums[head][i] += shared.weights[head][k] * value;
                }
            }
        }
    }
    exact_sync();
    if (lane == 0 && first_head + warp < problem.heads) shared.rescale[warp] = store_lse(problem, b, s, first_head + warp, any, top, total);
    exact_sync();
    for (int h = 0; h < UNIT && first_head + h < problem.heads; ++h) {
        bf16* row = problem.out + b * problem.out_stride_b + s * problem.out_stride_s + (first_head + h) * problem.out_stride_h;
        for (int i = 0; i < VALUES_PER_THREAD; ++i) {
            float value = to_float(sums[h][i] * shared.rescale[h]);
            row[exact_thread() + i * EXACT_THREADS] = bf16{uint16(pack(bf16{}, value, 0.0f))};
        }
    }
    exact_sync();  // before the next heads
}

// Sparse MLA in float64: plain, slow and right for every finite input.
//
// A thread block takes UNIT heads of one query token and walks over the listed keys KEYS at a time: gather and
// dequantise them into shared memory, scores (a warp a head, LANES lanes a key), a running softmax, and the
// weighted sum (a thread four output values of each head).
//
// Macros: LAYOUT, ALIGNED.
#pragma once
#include "common/sparse/work.cuh"
#include "common/vectors.cuh"

constexpr int UNIT = 4;  // heads
constexpr int KEYS = 4;
constexpr int LANES = 32 / KEYS;
constexpr int THREADS = 128;
constexpr int DIM = LAYOUT::head_dim;
constexpr int VALUES_PER_THREAD = V_DIM / THREADS;

// The entries of one list that a query token attends to.
struct ListEntries {
    const List& list;
    const int* indices;
    int length;

    __device__ ListEntries(const List& list, int b, int s)
        : list(list), indices(list.indices + b * list.indices_stride_b + s * list.indices_stride_s), length(list.length(b, s)) {}

    __device__ int slot(int entry) const {
        int slot = entry < length ? indices[entry] : -1;
        return slot < list.num_slots ? slot : -1;
    }
};

// Subnormals too: CuPy compiles with -ftz=true.
__device__ inline double to_double(float x) {
    double y;
    asm("cvt.f64.f32 %0, %1;" : "=d"(y) : "f"(x));
    return y;
}

struct ExactShared {
    double keys[KEYS][DIM + 1];
    double q[UNIT][DIM];
    double weights[UNIT][KEYS];
    double rescale[UNIT];
    int slots[KEYS];
};

__device__ inline void load_values(const List& list, int slot, int first, double* values) {
    Token token = token_at<LAYOUT>(list.pages, list.page_stride, list.block_size, slot);
    float x[8];
    double scale = 1.0;
    if (first < LAYOUT::quantized_dim) {
        int tile = first / LAYOUT::scale_tile;
        if (LAYOUT::ue8m0) {
            scale = to_double(ue8m0_scale(token.scales[tile]));
        } else {
            uint32 bits = 0;
            for (int i = 0; i < 4; ++i) bits |= uint32(token.scales[4 * tile + i]) << 8 * i;
            scale = to_double(__uint_as_float(bits));
        }
        dequantize8(load8(token.row + first), 1.0f, x);
    } else {
        unpack8(Raw8<bf16>{load16(token.row + LAYOUT::rope_offset + 2 * (first - LAYOUT::quantized_dim))}, x);
    }
    for (int i = 0; i < 8; ++i) values[i] = to_double(x[i]) * scale;
}

__device__ inline void load_keys(const ListEntries& entries, int first_entry, ExactShared& shared) {
    __syncthreads();  // the tile before is done with
    if (threadIdx.x < KEYS) shared.slots[threadIdx.x] = entries.slot(first_entry + threadIdx.x);
    __syncthreads();
    for (int i = threadIdx.x; i < KEYS * (DIM / 8); i += THREADS) {
        int key = i / (DIM / 8), first = i % (DIM / 8) * 8;
        double* values = shared.keys[key] + first;
        if (shared.slots[key] >= 0) load_values(entries.list, shared.slots[key], first, values);
        else for (int j = 0; j < 8; ++j) values[j] = 0.0;
    }
    __syncthreads();
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

// Heads first_head .. first_head + UNIT - 1 of token (b, s); all threads of the block.
__device__ inline void attend_exactly(const SparseProblem& problem, int b, int s, int first_head, ExactShared& shared) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    const bf16* q = problem.q + b * problem.q_stride_b + s * problem.q_stride_s;
    for (int i = threadIdx.x; i < UNIT * DIM; i += THREADS) {
        int head = first_head + i / DIM;
        shared.q[i / DIM][i % DIM] = head < problem.heads ? to_double(to_float(q[head * problem.q_stride_h + i % DIM])) : 0.0;
    }
    double top = -double(infinity()), total = 0.0;  // of this warp's head
    bool any = false;
    double sums[UNIT][VALUES_PER_THREAD] = {};
    for (const List& list : problem.lists) {
        ListEntries entries(list, b, s);
        for (int first = 0; first < entries.length; first += KEYS) {
            load_keys(entries, first, shared);
            int key = lane / LANES, part = lane % LANES;
            double score = 0.0;
            for (int d = part; d < DIM; d += LANES) score += shared.q[warp][d] * shared.keys[key][d];
            for (int by = 1; by < LANES; by *= 2) score += __shfl_xor_sync(~0u, score, by);
            score *= double(problem.softmax_scale);
            bool present = shared.slots[key] >= 0;
            any |= __any_sync(~0u, present);
            double tile_top = warp_max(present ? score : -double(infinity()));
            double new_top = tile_top != tile_top || tile_top > top ? tile_top : top;
            double weight = present ? exp(score - new_top) : 0.0;
            double rescale = any && total != 0.0 ? exp(top - new_top) : 0.0;
            total = total * rescale + warp_sum(part == 0 ? weight : 0.0);
            top = new_top;
            if (part == 0) shared.weights[warp][key] = weight;
            if (lane == 0) shared.rescale[warp] = rescale;
            __syncthreads();
            for (int head = 0; head < UNIT; ++head)
                for (int i = 0; i < VALUES_PER_THREAD; ++i) sums[head][i] *= shared.rescale[head];
            for (int k = 0; k < KEYS; ++k) {
                if (shared.slots[k] < 0) continue;
                for (int i = 0; i < VALUES_PER_THREAD; ++i) {
                    double value = shared.keys[k][threadIdx.x + i * THREADS];
                    for (int head = 0; head < UNIT; ++head) sums[head][i] += shared.weights[head][k] * value;
                }
            }
        }
    }

    int head = first_head + warp;
    double log_sum = any ? top + log(total) : double(infinity());
    double share = 0.0;
    if (any && head < problem.heads) share = 1.0 / (total * (problem.attn_sink ? 1.0 + exp(double(problem.attn_sink[head]) - log_sum) : 1.0));
    __syncthreads();
    if (lane == 0) {
        shared.rescale[warp] = share;
        if (head < problem.heads) {
            problem.lse[b * problem.lse_stride_b + head * problem.lse_stride_h + s * problem.lse_stride_s] = float(log_sum);
            if (problem.max_logits)
                problem.max_logits[b * problem.max_stride_b + head * problem.max_stride_h] = float(any ? top : -double(infinity()));
        }
    }
    __syncthreads();
    for (int h = 0; h < UNIT && first_head + h < problem.heads; ++h) {
        bf16* row = problem.out + b * problem.out_stride_b + s * problem.out_stride_s + (first_head + h) * problem.out_stride_h;
        for (int i = 0; i < VALUES_PER_THREAD; ++i) {
            float value = float(sums[h][i] * shared.rescale[h]);
            row[threadIdx.x + i * THREADS] = bf16{uint16(pack(bf16{}, value, 0.0f))};
        }
    }
    __syncthreads();  // before the next heads
}

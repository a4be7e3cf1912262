// Sparse MLA over paged caches in float64: plain, slow and right for every finite input.
//
// A thread block takes one query token and HEADS heads, and walks over the listed keys KEYS at a time:
// gather and dequantise the tile into shared memory, scores (a warp a head, two lanes a key), a running
// softmax, and the weighted sum (a thread four output values of each head).
//
// Macros: LAYOUT, ALIGNED.
#include "pages.cuh"
#include "vectors.cuh"

constexpr int HEADS = 4;
constexpr int KEYS = 16;
constexpr int THREADS = 128;
constexpr int V_DIM = 512;
constexpr int DIM = LAYOUT::head_dim;
constexpr int VALUES_PER_THREAD = V_DIM / THREADS;

struct Segment {
    uint8* pages;
    int64 page_stride;
    int64 num_slots;
    int block_size;
    const int* indices;
    int topk;

    __device__ int slot(int entry) const {
        int slot = entry < topk ? indices[entry] : -1;
        return slot < num_slots ? slot : -1;
    }
};

struct Shared {
    double keys[KEYS][DIM + 1];
    double q[HEADS][DIM];
    double weights[HEADS][KEYS];
    double rescale[HEADS];
    int slots[KEYS];
};

__device__ inline void load_values(const Segment& segment, int slot, int first, double* values) {
    Token token = token_at<LAYOUT>(segment.pages, segment.page_stride, segment.block_size, slot);
    float x[8];
    double scale = 1.0;
    if (first < LAYOUT::quantized_dim) {
        int tile = first / LAYOUT::scale_tile;
        if (LAYOUT::ue8m0) {
            scale = double(ue8m0_scale(token.scales[tile]));
        } else {
            uint32 bits = 0;
            for (int i = 0; i < 4; ++i) bits |= uint32(token.scales[4 * tile + i]) << 8 * i;
            scale = double(__uint_as_float(bits));
        }
        dequantize8(load8(token.row + first), 1.0f, x);
    } else {
        unpack8(Raw8<bf16>{load16(token.row + LAYOUT::rope_offset + 2 * (first - LAYOUT::quantized_dim))}, x);
    }
    for (int i = 0; i < 8; ++i) values[i] = double(x[i]) * scale;
}

__device__ inline void load_keys(const Segment& segment, int first_entry, Shared& shared) {
    __syncthreads();  // the tile before is done with
    if (threadIdx.x < KEYS) shared.slots[threadIdx.x] = segment.slot(first_entry + threadIdx.x);
    __syncthreads();
    for (int i = threadIdx.x; i < KEYS * (DIM / 8); i += THREADS) {
        int key = i / (DIM / 8), first = i % (DIM / 8) * 8;
        double* values = shared.keys[key] + first;
        if (shared.slots[key] >= 0) load_values(segment, shared.slots[key], first, values);
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

extern "C" __global__ void __launch_bounds__(THREADS)
sparse_mla_exact(const bf16* q, int64 q_stride_b, int64 q_stride_s, int64 q_stride_h, int s_q, int heads,
                 uint8* pages0, int64 page_stride0, int64 num_slots0, int block_size0, const int* indices0,
                 int64 indices_stride_b0, int64 indices_stride_s0, int topk0, const int* lengths0,
                 int64 lengths_stride_b0, int64 lengths_stride_s0,
                 uint8* pages1, int64 page_stride1, int64 num_slots1, int block_size1, const int* indices1,
                 int64 indices_stride_b1, int64 indices_stride_s1, int topk1, const int* lengths1,
                 int64 lengths_stride_b1, int64 lengths_stride_s1,
                 const float* attn_sink, double softmax_scale, bf16* out, int64 out_stride_b, int64 out_stride_s,
                 int64 out_stride_h, float* max_logits, int64 max_stride_b, int64 max_stride_h, float* lse,
                 int64 lse_stride_b, int64 lse_stride_h, int64 lse_stride_s) {
    extern __shared__ double memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    int groups = (heads + HEADS - 1) / HEADS;
    int b = blockIdx.x / groups / s_q, s = blockIdx.x / groups % s_q, first_head = blockIdx.x % groups * HEADS;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    const bf16* q_token = q + b * q_stride_b + s * q_stride_s;
    for (int i = threadIdx.x; i < HEADS * DIM; i += THREADS) {
        int head = first_head + i / DIM;
        shared.q[i / DIM][i % DIM] = head < heads ? double(to_float(q_token[head * q_stride_h + i % DIM])) : 0.0;
    }
    Segment segments[2] = {
        {pages0, page_stride0, num_slots0, block_size0, indices0 + b * indices_stride_b0 + s * indices_stride_s0, topk0},
        {pages1, page_stride1, num_slots1, block_size1, indices1 + b * indices_stride_b1 + s * indices_stride_s1, topk1},
    };
    if (lengths0) segments[0].topk = min(topk0, lengths0[b * lengths_stride_b0 + s * lengths_stride_s0]);
    if (lengths1) segments[1].topk = min(topk1, lengths1[b * lengths_stride_b1 + s * lengths_stride_s1]);

    double top = -double(infinity()), total = 0.0;  // of this warp's head
    bool any = false;
    double sums[HEADS][VALUES_PER_THREAD] = {};
    for (const Segment& segment : segments) {
        for (int first = 0; first < segment.topk; first += KEYS) {
            load_keys(segment, first, shared);
            int key = lane / 2, half = lane % 2;
            double score = 0.0;
            for (int d = half * (DIM / 2); d < (half + 1) * (DIM / 2); ++d)
                score += shared.q[warp][d] * shared.keys[key][d];
            score = (score + __shfl_xor_sync(~0u, score, 1)) * softmax_scale;
            bool present = shared.slots[key] >= 0;
            any |= __any_sync(~0u, present);
            double tile_top = warp_max(present ? score : -double(infinity()));
            double new_top = tile_top != tile_top || tile_top > top ? tile_top : top;
            double weight = present ? exp(score - new_top) : 0.0;
            double rescale = any && total != 0.0 ? exp(top - new_top) : 0.0;
            total = total * rescale + warp_sum(half == 0 ? weight : 0.0);
            top = new_top;
            if (half == 0) shared.weights[warp][key] = weight;
            if (lane == 0) shared.rescale[warp] = rescale;
            __syncthreads();
            for (int head = 0; head < HEADS; ++head)
                for (int i = 0; i < VALUES_PER_THREAD; ++i) sums[head][i] *= shared.rescale[head];
            for (int k = 0; k < KEYS; ++k) {
                if (shared.slots[k] < 0) continue;
                for (int i = 0; i < VALUES_PER_THREAD; ++i) {
                    double value = shared.keys[k][threadIdx.x + i * THREADS];
                    for (int head = 0; head < HEADS; ++head) sums[head][i] += shared.weights[head][k] * value;
                }
            }
        }
    }

    int head = first_head + warp;
    double log_sum = any ? top + log(total) : double(infinity());
    double share = 0.0;
    if (any && head < heads) share = 1.0 / (total * (attn_sink ? 1.0 + exp(double(attn_sink[head]) - log_sum) : 1.0));
    __syncthreads();
    if (lane == 0) {
        shared.rescale[warp] = share;
        if (head < heads) {
            lse[b * lse_stride_b + head * lse_stride_h + s * lse_stride_s] = float(log_sum);
            if (max_logits) max_logits[b * max_stride_b + head * max_stride_h] = float(any ? top : -double(infinity()));
        }
    }
    __syncthreads();
    for (int h = 0; h < HEADS && first_head + h < heads; ++h) {
        bf16* row = out + b * out_stride_b + s * out_stride_s + (first_head + h) * out_stride_h;
        for (int i = 0; i < VALUES_PER_THREAD; ++i) {
            float value = float(sums[h][i] * shared.rescale[h]);
            row[threadIdx.x + i * THREADS] = bf16{uint16(pack(bf16{}, value, 0.0f))};
        }
    }
}

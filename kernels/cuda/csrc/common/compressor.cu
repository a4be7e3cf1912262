// The compressor of V4: states saved, windows pooled, RMSNorm, RoPE, insert.
//
// A thread block takes TOKENS neighbouring tokens, of which it saves the states and pools those that complete a row, one
// after another. A group of DIM / 4 threads, 4 channels each, takes every GROUPS-th position of the window, AHEAD of
// them read before the first is needed, and keeps a softmax that goes along; the groups' parts are merged through shared
// memory by the first DIM / 4 threads, which norm, turn and insert the row. Positions of this step are read from
// kv_score, earlier ones from the pages of states.
//
// Macros: LAYOUT, INPUT and WEIGHT (float or bf16), STATE_SLOT, SLOT and POSITION (int64 or int), GROUPS, AHEAD, TOKENS
// (up to 32), RESIDENT (thread blocks on a multiprocessor), WIDE (kv_score, states and biases may be read 4 values at a
// time), ALIGNED.
#include "common/pdl.cuh"
#include "common/warp_row.cuh"

constexpr int DIM = LAYOUT::head_dim, WARPS = DIM / 128;
constexpr int THREADS_OF_GROUP = DIM / 4;

struct Quad { float x[4]; };

__device__ inline Quad read4(const float* p) {
#if WIDE
    float4 x = *reinterpret_cast<const float4*>(p);
    return {x.x, x.y, x.z, x.w};
#else
    return {p[0], p[1], p[2], p[3]};
#endif
}

__device__ inline Quad read4(const bf16* p) {
#if WIDE
    uint2 x = *reinterpret_cast<const uint2*>(p);
    return {to_float(bf16{uint16(x.x)}), to_float(bf16{uint16(x.x >> 16)}), to_float(bf16{uint16(x.y)}),
            to_float(bf16{uint16(x.y >> 16)})};
#else
    return {to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
#endif
}

__device__ inline void write4(float* p, Quad q) {
#if WIDE
    *reinterpret_cast<float4*>(p) = make_float4(q.x[0], q.x[1], q.x[2], q.x[3]);
#else
    for (int i = 0; i < 4; ++i) p[i] = q.x[i];
#endif
}

__device__ inline Quad operator+(Quad a, Quad b) {
    return {a.x[0] + b.x[0], a.x[1] + b.x[1], a.x[2] + b.x[2], a.x[3] + b.x[3]};
}

// A mean of 4 channels weighted by the softmax of their scores, so far: sum / total.
struct Mean {
    Quad top, total, sum;

    __device__ void clear() {
#pragma unroll
        for (int i = 0; i < 4; ++i) top.x[i] = -infinity(), total.x[i] = sum.x[i] = 0.0f;
    }

    // Count in what has this sum of weights, relative to that of `score`, and of weighted values.
    __device__ void add(int i, float score, float weights, float values) {
        float larger = fmaxf(top.x[i], score);
        float keep = top.x[i] == larger ? 1.0f : expf(top.x[i] - larger), share = expf(score - larger);
        sum.x[i] = sum.x[i] * keep + share * values;
        total.x[i] = total.x[i] * keep + share * weights;
        top.x[i] = larger;
    }
};

template <class S> __device__ inline int64 slot_of(const S* slots, int token, int given, int64 there) {
    int64 slot = token < given ? int64(slots[token]) : -1;
    return slot < there ? slot : -1;
}

// Which of the block's tokens save a state or complete a row, a bit each; a lane looks at one.
__device__ inline uint32 tokens_with_work(const STATE_SLOT* state_slots, int num_state_slots, int64 state_slots_there,
                                          const SLOT* slots, int num_slots_given, int64 num_slots, int tokens) {
    if (TOKENS == 1) return 1;
    int lane = threadIdx.x % 32, token = blockIdx.x * TOKENS + lane;
    bool has_work = lane < TOKENS && token < tokens &&
                    (slot_of(state_slots, token, num_state_slots, state_slots_there) >= 0 ||
                     slot_of(slots, token, num_slots_given, num_slots) >= 0);
    return __ballot_sync(~0u, has_work);
}

extern "C" __global__ void __launch_bounds__(GROUPS * THREADS_OF_GROUP, RESIDENT)
compress_and_insert(const INPUT* kv_score, int64 kv_stride, int tokens, const float* bias, int64 bias_stride,
                    const WEIGHT* weight, float* state, int64 state_page, int64 state_row, int64 state_slots_there,
                    int state_block, const STATE_SLOT* state_slots, int num_state_slots, const int* table,
                    int64 table_stride, int table_rows, int table_columns, uint8* pages, int64 page_stride,
                    int64 num_slots, int block_size, const SLOT* slots, int num_slots_given,
                    const POSITION* positions, const int* requests, const int* starts, int num_requests,
                    const float* cos_sin, int64 cos_stride, int max_position, int rope_dim, int ratio, int coff,
                    float eps) {
    __shared__ Mean parts[GROUPS][THREADS_OF_GROUP];
    __shared__ float squares[WARPS];
    int lane = threadIdx.x % 32, channels = coff * DIM;
    int group = threadIdx.x / THREADS_OF_GROUP, channel = 4 * (threadIdx.x % THREADS_OF_GROUP);
    pdl_wait();
    for (uint32 left = tokens_with_work(state_slots, num_state_slots, state_slots_there, slots, num_slots_given,
                                        num_slots, tokens); left; left &= left - 1) {
        int token = blockIdx.x * TOKENS + __ffs(left) - 1;
        int64 position = positions[token];
        int request = requests[token], remainder = int((position % ratio + ratio) % ratio);
        int64 state_slot = slot_of(state_slots, token, num_state_slots, state_slots_there);
        int64 slot = slot_of(slots, token, num_slots_given, num_slots);
        if (state_slot >= 0) {
            const float* its_bias = bias + remainder * bias_stride;
            float* target = state + state_slot / state_block * state_page + state_slot % state_block * state_row;
            for (int i = 4 * threadIdx.x; i < 2 * channels; i += 4 * blockDim.x) {
                Quad x = read4(kv_score + token * kv_stride + i);
                write4(target + i, i < channels ? x : x + read4(its_bias + i - channels));
            }
        }
        if (slot < 0) continue;

        int first_token = request >= 0 && request < num_requests ? max(starts[request], 0) : token;
        BlockTable states{table, table_stride, table_rows, table_columns};
        int window = int(min(int64(coff * ratio), position + 1));
        Mean mean;
        mean.clear();
        for (int from = group; from < window; from += GROUPS * AHEAD) {
            Quad kv[AHEAD], score[AHEAD];
            bool found[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                int back = from + i * GROUPS;
                found[i] = back < window;
                if (!found[i]) continue;
                int column = channel + (coff == 2 && back < ratio ? DIM : 0);
                if (token - back >= first_token) {
                    const INPUT* row = kv_score + (token - back) * kv_stride + column;
                    const float* its_bias = bias + ((remainder - back) % ratio + ratio) % ratio * bias_stride + column;
                    kv[i] = read4(row);
                    score[i] = read4(row + channels) + read4(its_bias);
                } else {
                    PageRow at = lookup_page_row(states, request, position - back, state_block, state_slots_there);
                    found[i] = at.page >= 0;
                    if (!found[i]) continue;
                    const float* row = state + at.page * state_page + at.row * state_row + column;
                    kv[i] = read4(row);
                    score[i] = read4(row + channels);
                }
            }
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                if (!found[i]) continue;
#pragma unroll
                for (int j = 0; j < 4; ++j) mean.add(j, score[i].x[j], 1.0f, kv[i].x[j]);
            }
        }
        parts[group][threadIdx.x % THREADS_OF_GROUP] = mean;
        __syncthreads();

        WarpRow<4, WARPS> row;
        row.lane = lane, row.warp = threadIdx.x / 32;
        if (group == 0) {
#pragma unroll
            for (int part = 1; part < GROUPS; ++part) {
                const Mean& other = parts[part][threadIdx.x];
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    if (other.total.x[j] != 0.0f) mean.add(j, other.top.x[j], other.total.x[j], other.sum.x[j]);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) row.x[j] = mean.total.x[j] == 0.0f ? 0.0f : div(mean.sum.x[j], mean.total.x[j]);
            float total = row.squares();
            if (lane == 0) squares[row.warp] = total;
        }
        __syncthreads();
        if (group > 0) continue;
        float total = 0.0f;
        for (int i = 0; i < WARPS; ++i) total += squares[i];
        row.normalize(total, eps);
#pragma unroll
        for (int j = 0; j < 4; ++j) row.x[j] *= to_float(weight[row.first() + j]);
        row.turn(turns_at(cos_sin, cos_stride, max_position, position - remainder), rope_dim, 1.0f);
        row.insert<LAYOUT>(token_at<LAYOUT>(pages, page_stride, block_size, slot));
    }
}

// The compressor of V4: states saved, windows pooled, RMSNorm, RoPE, insert.
//
// A thread block takes a token. All threads save its state; if the token completes a row, a thread pools 4 channels
// over every GROUPS-th position of the window (a softmax that goes along), the groups' parts are merged in shared
// memory, and the first warp norms, turns and inserts the row. Positions of this step are read from kv_score, earlier
// ones from the pages of states.
//
// Macros: LAYOUT, INPUT and WEIGHT (float or bf16), STATE_SLOT, SLOT and POSITION (int64 or int), GROUPS, ALIGNED.
#include "common/pdl.cuh"
#include "common/warp_row.cuh"

constexpr int DIM = LAYOUT::head_dim;
constexpr int THREADS_OF_GROUP = DIM / 4;

extern "C" __global__ void __launch_bounds__(GROUPS * THREADS_OF_GROUP)
compress_and_insert(const INPUT* kv_score, int64 kv_stride, int tokens, const float* bias, int64 bias_stride,
                    const WEIGHT* weight, float* state, int64 state_page, int64 state_row, int64 state_slots_there,
                    int state_block, const STATE_SLOT* state_slots, int num_state_slots, const int* table,
                    int64 table_stride, int table_rows, int table_columns, uint8* pages, int64 page_stride,
                    int64 num_slots, int block_size, const SLOT* slots, int num_slots_given,
                    const POSITION* positions, const int* requests, const int* starts, int num_requests,
                    const float* cos_sin, int64 cos_stride, int max_position, int rope_dim, int ratio, int coff,
                    float eps) {
    __shared__ float tops[GROUPS][DIM], totals[GROUPS][DIM], sums[GROUPS][DIM];
    pdl_wait();
    int token = blockIdx.x, channels = coff * DIM;
    int64 position = positions[token];
    int remainder = int((position % ratio + ratio) % ratio);
    int64 state_slot = token < num_state_slots ? int64(state_slots[token]) : -1;
    if (state_slot >= 0 && state_slot < state_slots_there) {
        float* target = state + state_slot / state_block * state_page + state_slot % state_block * state_row;
        for (int i = threadIdx.x; i < 2 * channels; i += blockDim.x) {
            float x = to_float(kv_score[token * kv_stride + i]);
            target[i] = i < channels ? x : x + bias[remainder * bias_stride + i - channels];
        }
    }
    int64 slot = token < num_slots_given ? int64(slots[token]) : -1;
    if (slot < 0 || slot >= num_slots) return;

    int request = requests[token];
    int first_token = request >= 0 && request < num_requests ? max(starts[request], 0) : token;
    int group = threadIdx.x / THREADS_OF_GROUP, channel = 4 * (threadIdx.x % THREADS_OF_GROUP);
    float top[4], total[4] = {}, sum[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) top[i] = -infinity();
    BlockTable states{table, table_stride, table_rows, table_columns};
    for (int back = group; back < coff * ratio && back <= position; back += GROUPS) {
        int from = channel + (coff == 2 && back < ratio ? DIM : 0);
        float kv[4], score[4];
        if (token - back >= first_token) {
            const INPUT* row = kv_score + (token - back) * kv_stride + from;
            const float* its_bias = bias + ((remainder - back) % ratio + ratio) % ratio * bias_stride + from;
#pragma unroll
            for (int i = 0; i < 4; ++i) kv[i] = to_float(row[i]), score[i] = to_float(row[channels + i]) + its_bias[i];
        } else {
            PageRow at = lookup_page_row(states, request, position - back, state_block, state_slots_there);
            if (at.page < 0) continue;
            const float* row = state + at.page * state_page + at.row * state_row + from;
#pragma unroll
            for (int i = 0; i < 4; ++i) kv[i] = row[i], score[i] = row[channels + i];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float larger = fmaxf(top[i], score[i]);
            float keep = top[i] == larger ? 1.0f : expf(top[i] - larger), share = expf(score[i] - larger);
            sum[i] = sum[i] * keep + share * kv[i];
            total[i] = total[i] * keep + share;
            top[i] = larger;
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        tops[group][channel + i] = top[i];
        totals[group][channel + i] = total[i];
        sums[group][channel + i] = sum[i];
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;

    WarpRow<DIM / 32> row;
    row.lane = threadIdx.x;
#pragma unroll
    for (int i = 0; i < DIM / 32; ++i) {
        int at = row.first() + i;
        float largest = -infinity(), whole = 0.0f, mean = 0.0f;
        for (int part = 0; part < GROUPS; ++part) largest = fmaxf(largest, tops[part][at]);
        for (int part = 0; part < GROUPS; ++part) {
            float keep = tops[part][at] == largest ? 1.0f : expf(tops[part][at] - largest);
            whole += keep * totals[part][at];
            mean += keep * sums[part][at];
        }
        row.x[i] = whole == 0.0f ? 0.0f : div(mean, whole);
    }
    row.normalize(eps);
#pragma unroll
    for (int i = 0; i < DIM / 32; ++i) row.x[i] *= to_float(weight[row.first() + i]);
    row.turn(turns_at(cos_sin, cos_stride, max_position, position - remainder), rope_dim, 1.0f);
    row.insert<LAYOUT>(token_at<LAYOUT>(pages, page_stride, block_size, slot));
}

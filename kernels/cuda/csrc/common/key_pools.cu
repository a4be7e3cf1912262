// Pooled index keys: LayerNorm of each token's key, the mean of POOL keys weighted by a softmax of their gates for each
// channel, Hadamard rotation, insert; raw keys and gates are saved in rings for later steps.
//
// Grid: first a CTA per request, then a warp per `together` neighbouring tokens. Block: 4 warps; a lane has the channels
// 4 lane to 4 lane + 3 of a row. No shared memory.
//
// The CTA of a request completes the pool that was open before the step, and saves the request's last tokens in its
// ring, after all its warps have read the ring. If these tokens overwrite rows of the open pool, the rows are saved first, for a
// repetition of the step (restart_rows, by position modulo POOL, and the step's first position; 0: none). The warps of
// tokens complete the pools that have all their tokens in this step.
//
// Macros: INPUT, WEIGHT and STATE (float or bf16), STATE_SLOT, SLOT and POSITION (int64 or int), LAYOUT, POOL, HADAMARD, WIDE
// (rows may be accessed 4 values at a time), ALIGNED.
#include "common/packed.cuh"
#include "common/device.cuh"
#include "common/channels4.cuh"
#include "common/requests.cuh"
#include "common/rings.cuh"
#include "common/warp_row.cuh"

constexpr int DIM = 128, WARPS = 4, THREADS = 32 * WARPS;
constexpr int AHEAD = POOL < 4 ? POOL : 4;  // rows that a warp loads before it uses the first
using Row = WarpRow<4>;

__device__ inline Channels4 rounded(float, Channels4 q) { return q; }
__device__ inline Channels4 rounded(bf16, Channels4 q) {
    uint32 low = pack(bf16{}, q.x[0], q.x[1]), high = pack(bf16{}, q.x[2], q.x[3]);
    return {to_float(bf16{uint16(low)}), to_float(bf16{uint16(low >> 16)}), to_float(bf16{uint16(high)}),
            to_float(bf16{uint16(high >> 16)})};
}

// A token's key and gate, as rings have them once the key is normalised: this lane's channels.
struct Raw { Channels4 key, gate; };

struct Tokens {
    const INPUT *k, *gate;
    int64 k_stride, gate_stride;
    Channels4 weight, bias;
    float eps;
    int lane;

    __device__ int channel() const { return 4 * lane; }
    __device__ Raw load(int64 token) const {
        return {read4_volatile(k + token * k_stride + channel()), read4_volatile(gate + token * gate_stride + channel())};
    }
    // Called by a warp.
    __device__ void normalize(Raw& raw) const {
        Row row;
        row.lane = lane;
#pragma unroll
        for (int i = 0; i < 4; ++i) row.x[i] = raw.key.x[i];
        row.center_and_normalize(eps);
#pragma unroll
        for (int i = 0; i < 4; ++i) raw.key.x[i] = row.x[i] * weight.x[i] + bias.x[i];
        raw.key = rounded(STATE{}, raw.key), raw.gate = rounded(STATE{}, raw.gate);
    }
};

// Rows before a step: the ring, or the rows that a repeated step needs.
struct Before {
    Rings<STATE> rings;
    const STATE* restart_rows;  // of the request's ring; null: rows are in the ring
    int64 restart_row_stride, ring;

    __device__ Raw load(int64 position, int channel) const {
        const STATE* row = restart_rows ? restart_rows + position % POOL * restart_row_stride : rings.row(ring, position % rings.capacity);
        return {read4(row + channel), read4(row + DIM + channel)};
    }
};

using Raws = Raw[AHEAD];

// Rows `first` to `first` + AHEAD - 1 of the pool of `token`. WHOLE: all of them are of this step, else those from `start`
// on are.
template <bool WHOLE>
__device__ inline void load_rows(Raws& raw, const Tokens& tokens, const Before& before, int token, int start, int64 position, int first) {
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
        int back = POOL - 1 - first - i;
        if (POOL % AHEAD && back < 0) {
#pragma unroll
            for (int j = 0; j < 4; ++j) raw[i].key.x[j] = 0.0f, raw[i].gate.x[j] = -infinity();
        } else if (WHOLE || token - back >= start) {
            raw[i] = tokens.load(token - back);
        } else {
            raw[i] = before.load(position - back, tokens.channel());
        }
    }
}

// The key of the pool of `token` and the POOL - 1 tokens before it; `raw` has its first rows. Called by a warp.
template <bool WHOLE>
__device__ inline void pool_and_insert(Raws& raw, const Tokens& tokens, const Before& before, const float* ape, int64 ape_stride, int token,
                                       int start, int64 position, Token to) {
    Mean mean;
    mean.clear();
#pragma unroll 1
    for (int first = 0; first < POOL; first += AHEAD) {
        if (first > 0) load_rows<WHOLE>(raw, tokens, before, token, start, position, first);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            int back = POOL - 1 - first - i;
            if (POOL % AHEAD && back < 0) continue;
            if (WHOLE || token - back >= start) tokens.normalize(raw[i]);
            raw[i].gate = raw[i].gate + read4(ape + (first + i) * ape_stride + tokens.channel());
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float top = raw[0].gate.x[j];
#pragma unroll
            for (int i = 1; i < AHEAD; ++i) top = fmaxf(top, raw[i].gate.x[j]);
            mean.raise(j, top);
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) mean.add(j, raw[i].gate.x[j], 1.0f, raw[i].key.x[j]);
        }
    }
    Row row;
    row.lane = tokens.lane;
#pragma unroll
    for (int j = 0; j < 4; ++j) row.x[j] = mean.total.x[j] == 0.0f ? 0.0f : div(mean.sum.x[j], mean.total.x[j]);
    if (HADAMARD) row.rotate_hadamard();
    row.insert<LAYOUT>(to);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    indexer_kpool_and_insert(const INPUT* k, int64 k_stride, const INPUT* gate, int64 gate_stride, const WEIGHT* weight, const WEIGHT* bias,
                             const float* ape, int64 ape_stride, float eps, const STATE_SLOT* state_slots, int num_state_slots,
                             const SLOT* slots, int num_tokens, const POSITION* positions, const int* starts, int requests, STATE* state,
                             int64 ring_stride, int64 row_stride, int64 num_rows, int capacity, STATE* restart_rows, int64 restart_stride,
                             int64 restart_row_stride, int* restart_positions, uint8* pages, int64 page_stride, int64 num_slots,
                             int block_size, int together) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    pdl_wait();
    Tokens tokens{k, gate, k_stride, gate_stride, read4_volatile(weight + 4 * lane), read4_volatile(bias + 4 * lane), eps, lane};
    Rings<STATE> rings{state, ring_stride, row_stride, num_rows, capacity};
    auto completes = [&](int64 slot, int64 state_slot, int64 position) {
        return slot >= 0 && slot < num_slots && rings.has(state_slot) && position >= 0 && (position + 1) % POOL == 0;
    };
    if (blockIdx.x >= requests) {
        int first = ((blockIdx.x - requests) * WARPS + warp) * together, token = first + lane;
        int64 slot = -1;
        bool own = false;
        if (lane < together && token < num_tokens) {
            slot = slots[token];
            own = completes(slot, state_slots[token], positions[token]) && token >= POOL - 1;
        }
        GatheredRows rows{starts, requests};
        int start = 0, end = 0;  // of the request of the last token
        for (uint32 all = __ballot_sync(~0u, own); all; all &= all - 1) {
            int which = __ffs(all) - 1;
            token = first + which;
            Raws raw;
            load_rows<true>(raw, tokens, {}, token, 0, 0, 0);  // before the request is found, which needs loads of its own
            if (token >= end) {
                int request = rows.request_by_warp(token);
                if (request >= 0) start = max(starts[request], 0), end = starts[request + 1];
            }
            if (token >= end || token - (POOL - 1) < start) continue;  // of no request, or its request's CTA completes it
            Token to = token_at<LAYOUT>(pages, page_stride, block_size, __shfl_sync(~0u, slot, which));
            pool_and_insert<true>(raw, tokens, {}, ape, ape_stride, token, 0, 0, to);
        }
        return;
    }
    int start = max(starts[blockIdx.x], 0), end = min(starts[blockIdx.x + 1], num_state_slots);
    if (start >= end) return;
    int saved_token = max(start, end - capacity) + WARPS - 1 - warp;  // the first warp has the pool
    int first_pooled = start + warp, pooled_end = min(min(end, num_tokens), start + POOL - 1);
    // All loads that need no others' results, before the first of them is used.
    Raw saved;
    if (saved_token < end) saved = tokens.load(saved_token);
    int64 first_slot = state_slots[start], position = positions[start], slot = -1, state_slot = -1, at = -1;
    if (first_pooled < pooled_end) slot = slots[first_pooled], state_slot = state_slots[first_pooled], at = positions[first_pooled];
    bool saves = rings.has(first_slot);
    for (int token = first_pooled; token < pooled_end; token += WARPS) {
        if (token != first_pooled) slot = slots[token], state_slot = state_slots[token], at = positions[token];
        if (!completes(slot, state_slot, at)) continue;
        Before before{rings, nullptr, restart_row_stride, state_slot / capacity};
        if (restart_rows && restart_positions[before.ring] == at - (token - start))
            before.restart_rows = restart_rows + before.ring * restart_stride;
        Raws raw;
        load_rows<false>(raw, tokens, before, token, start, at, 0);
        pool_and_insert<false>(raw, tokens, before, ape, ape_stride, token, start, at,
                               token_at<LAYOUT>(pages, page_stride, block_size, slot));
    }
    if (saves && saved_token < end) tokens.normalize(saved);
    if (!saves) return;
    if (restart_rows) {
        int64 ring = first_slot / capacity;
        int count = position > 0 ? int(position % POOL) : 0;
        bool again = count > 0 && restart_positions[ring] == position, keeps = count > 0 && end - start > capacity - count;
        if (keeps || again)
            for (int i = warp; i < count; i += WARPS) {
                STATE* from = rings.row(ring, (position - count + i) % capacity) + tokens.channel();
                STATE* to = restart_rows + ring * restart_stride + i * restart_row_stride + tokens.channel();
                if (again) {  // the first run may have been longer
                    STATE* saved_row = to;
                    to = from, from = saved_row;
                }
                write4(to, read4(from)), write4(to + DIM, read4(from + DIM));
            }
        __syncthreads();
        if (threadIdx.x == 0 && !again) restart_positions[ring] = keeps ? int(position) : 0;
    } else {
        __syncthreads();
    }
    for (int token = saved_token; token < end; token += WARPS) {
        if (token != saved_token) {
            saved = tokens.load(token);
            tokens.normalize(saved);
        }
        int64 slot = state_slots[token];
        if (!rings.has(slot)) continue;
        STATE* to = rings.row(slot / capacity, slot % capacity) + tokens.channel();
        write4(to, saved.key), write4(to + DIM, saved.gate);
    }
}

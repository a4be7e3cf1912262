// The compressor of V4: states saved, windows pooled, RMSNorm, RoPE, insert.
//
// One launch for one compressor, or for a layer's and its indexer's. Thread blocks that pool come first: each, or each
// cluster of PARTS of them, takes TOKENS neighbouring tokens and those of
// them that complete a row one after another. A thread has 4 channels; GROUPS threads share a window's positions, and
// read AHEAD of them before they need the first. What groups have is merged through shared memory by the first one,
// which norms, turns and inserts its part of the row; a cluster's blocks add up their sums of squares. Positions of this
// step are read from kv_score, earlier ones from the pages of states. The other thread blocks save states.
//
// Macros: LAYOUT, SECOND (the indexer's layout; PARTS and GROUPS are 1 where there is one), INPUT and WEIGHT (float or bf16), STATE_SLOT, SLOT and POSITION (int64 or int), PARTS (1, or on sm_90
// more), GROUPS, AHEAD, TOKENS (up to 32), WIDE (kv_score, states and biases may be read 4 values at a time), ALIGNED.
#include "common/packed.cuh"
#include "common/pdl.cuh"
#include "common/warp_row.cuh"

// How thread blocks go about the rows of a layout.
template <class L> struct Way {
    using Layout = L;
    static constexpr int DIM = L::head_dim, THREADS_OF_GROUP = DIM / 4 / PARTS, THREADS = GROUPS * THREADS_OF_GROUP;
    static constexpr int WARPS = THREADS_OF_GROUP / 32;  // that hold a row's channels in a thread block
    static constexpr int PLACES = WARPS > PARTS ? WARPS : PARTS;
};

// What a compressor reads and writes.
struct Rows {
    const INPUT* kv_score;
    int64 kv_stride;
    const float* bias;
    int64 bias_stride;
    const WEIGHT* weight;
    float* state;
    int64 state_page, state_row, state_slots;
    uint8* pages;
    int64 page_stride, num_slots;
    int block_size, coff;
};

// What compressors share.
struct Step {
    const STATE_SLOT* state_slots;
    const SLOT* slots;
    const POSITION* positions;
    const int* requests;
    const int* starts;
    const int* table;
    int64 table_stride;
    const float* cos_sin;
    int64 cos_stride;
    int tokens, num_state_slots, num_slots, num_requests, table_rows, table_columns, state_block, max_position, rope_dim;
    int ratio;
    float eps;
    int unused;
};

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

// Means of 4 channels weighted by the softmax of their scores, so far: sum / total, weights relative to the top score.
struct Mean {
    Quad top, total, sum;

    __device__ void clear() {
#pragma unroll
        for (int i = 0; i < 4; ++i) top.x[i] = -infinity(), total.x[i] = sum.x[i] = 0.0f;
    }

    // Make `score` the top if it is larger.
    __device__ void raise(int i, float score) {
        float larger = fmaxf(top.x[i], score);
        float keep = weight(top.x[i], larger);
        sum.x[i] *= keep, total.x[i] *= keep, top.x[i] = larger;
    }

    // Count in sums of weights and of weighted values, relative to `score`, which is not above the top.
    __device__ void add(int i, float score, float weights, float values) {
        float share = exp2_approx((score - top.x[i]) * LOG2_E);
        sum.x[i] += share * values, total.x[i] += share * weights;
    }

    // What a weight relative to `score` is relative to `top`; of nothing yet, anything.
    static __device__ float weight(float score, float top) {
        return score == top ? 1.0f : exp2_approx((score - top) * LOG2_E);
    }
};

template <class S> __device__ inline int64 slot_of(const S* slots, int token, int given, int64 there) {
    int64 slot = token < given ? int64(slots[token]) : -1;
    return slot < there ? slot : -1;
}

// Which of the tokens from `first` on complete a row, or save a state: a bit each, a lane looks at one.
template <class S>
__device__ inline uint32 with_slots(const S* slots, int first, int tokens, int given, int64 there) {
    if (TOKENS == 1) return 1;  // it is looked at anyway
    int lane = threadIdx.x % 32;
    return __ballot_sync(~0u, lane < TOKENS && first + lane < tokens &&
                                  slot_of(slots, first + lane, given, there) >= 0);
}

// The sum over all threads that hold channels of a row, of what they hold; all threads of the block come.
template <class W> struct RowSum {
    float (*places)[W::PLACES];  // of two rows: one is read while the next is written
    int turn;

    __device__ float operator()(float of_warp, bool holds) {
        float* place = places[turn++ % 2];
        int lane = threadIdx.x % 32, count = PARTS > 1 ? PARTS : W::WARPS;
        if (PARTS == 1 && W::WARPS == 1 && GROUPS == 1) return of_warp;
#if PARTS > 1
        static_assert(W::WARPS == 1);
        uint32 rank, here = uint32(__cvta_generic_to_shared(place)), there;
        asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
        if (holds && lane < PARTS) {
            asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here + 4 * rank), "r"(lane));
            asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(of_warp) : "memory");
        }
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
        if (holds && lane == 0) place[threadIdx.x / 32] = of_warp;
        __syncthreads();
#endif
        float total = 0.0f;
        for (int i = 0; i < count; ++i) total += place[i];
        return total;
    }
};

// The states of TOKENS tokens from `first` on.
template <class W> __device__ inline void save_states(const Rows& rows, const Step& step, int first) {
    int channels = rows.coff * W::DIM;
    uint32 left = with_slots(step.state_slots, first, step.tokens, step.num_state_slots, rows.state_slots);
    for (; left; left &= left - 1) {
        int token = first + __ffs(left) - 1;
        int64 slot = slot_of(step.state_slots, token, step.num_state_slots, rows.state_slots);
        if (slot < 0) continue;  // maybe of a block that only fills up a cluster
        int64 position = step.positions[token];
        const float* bias = rows.bias + (position % step.ratio + step.ratio) % step.ratio * rows.bias_stride;
        float* target =
            rows.state + slot / step.state_block * rows.state_page + slot % step.state_block * rows.state_row;
        for (int i = 4 * threadIdx.x; i < channels; i += 4 * blockDim.x) {
            const INPUT* source = rows.kv_score + token * rows.kv_stride + i;
            Quad kv = read4(source), score = read4(source + channels);
            write4(target + i, kv);
            write4(target + channels + i, score + read4(bias + i));
        }
    }
}

// Those of TOKENS tokens from `first` on that complete a row: part `part` of its channels.
template <class W>
__device__ inline void pool(const Rows& rows, const Step& step, int first, int part, float (*places)[W::PLACES]) {
#if GROUPS > 1
    __shared__ Mean parts[GROUPS][W::THREADS_OF_GROUP];
#endif
    constexpr int DIM = W::DIM;
    int channels = rows.coff * DIM, ratio = step.ratio, state_block = step.state_block;
    int group = threadIdx.x / W::THREADS_OF_GROUP, thread = threadIdx.x % W::THREADS_OF_GROUP;
    int channel = part * (DIM / PARTS) + 4 * thread;
    RowSum<W> row_sum{places, 0};
    WarpRow<4, DIM / 128> row;
    row.lane = threadIdx.x % 32, row.warp = part * W::WARPS + thread / 32;
    float norm[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) norm[i] = to_float(rows.weight[channel + i]);
    for (uint32 left = with_slots(step.slots, first, step.tokens, step.num_slots, rows.num_slots); left;
         left &= left - 1) {
        int token = first + __ffs(left) - 1;
        int64 position = step.positions[token], slot = slot_of(step.slots, token, step.num_slots, rows.num_slots);
        int request = step.requests[token];
        if (slot < 0) continue;
        bool present = request >= 0 && request < step.num_requests;
        int first_token = present ? max(step.starts[request], 0) : token;
        const int* pages_of_states = step.table + request * step.table_stride;
        int64 reach = request >= 0 && request < step.table_rows ? int64(step.table_columns) * state_block : 0;
        int remainder = int((position % ratio + ratio) % ratio);
        int window = int(max(min(int64(rows.coff * ratio), position + 1), int64(0)));  // none before a sequence
        const float* turns = turns_at(step.cos_sin, step.cos_stride, step.max_position, position - remainder);
        if (threadIdx.x < 2) asm volatile("prefetch.global.L2 [%0];" ::"l"(turns + threadIdx.x * step.rope_dim / 2));
        Mean mean;
        mean.clear();
        for (int from = group; from < window; from += GROUPS * AHEAD) {
            Quad kv[AHEAD], score[AHEAD];
            bool found[AHEAD];
            int entry[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {  // before it is known which positions are of this step
                int64 at = position - from - i * GROUPS;
                found[i] = from + i * GROUPS < window;
                entry[i] = found[i] && at < reach ? pages_of_states[page_row_of(at, state_block).page] : -1;
            }
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                int back = from + i * GROUPS, column = channel + (rows.coff == 2 && back < ratio ? DIM : 0);
                if (!found[i]) continue;
                if (token - back >= first_token) {
                    const INPUT* source = rows.kv_score + (token - back) * rows.kv_stride + column;
                    int its_remainder = ((remainder - back) % ratio + ratio) % ratio;
                    kv[i] = read4(source);
                    score[i] = read4(source + channels) + read4(rows.bias + its_remainder * rows.bias_stride + column);
                    continue;
                }
                int in_page = page_row_of(position - back, state_block).row;
                found[i] = entry[i] >= 0 && int64(entry[i]) * state_block + in_page < rows.state_slots;
                if (!found[i]) continue;
                const float* source = rows.state + entry[i] * rows.state_page + in_page * rows.state_row + column;
                kv[i] = read4(source);
                score[i] = read4(source + channels);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float top = -infinity();
#pragma unroll
                for (int i = 0; i < AHEAD; ++i)
                    if (found[i]) top = fmaxf(top, score[i].x[j]);
                mean.raise(j, top);
#pragma unroll
                for (int i = 0; i < AHEAD; ++i)
                    if (found[i]) mean.add(j, score[i].x[j], 1.0f, kv[i].x[j]);
            }
        }
#if GROUPS > 1
        parts[group][thread] = mean;
        __syncthreads();
        if (group == 0) {
#pragma unroll
            for (int i = 1; i < GROUPS; ++i) {
                const Mean& other = parts[i][thread];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    if (other.total.x[j] == 0.0f) continue;
                    mean.raise(j, other.top.x[j]);
                    mean.add(j, other.top.x[j], other.total.x[j], other.sum.x[j]);
                }
            }
        }
#endif
#pragma unroll
        for (int j = 0; j < 4; ++j) row.x[j] = mean.total.x[j] == 0.0f ? 0.0f : div(mean.sum.x[j], mean.total.x[j]);
        float total = row_sum(row.squares(), group == 0);
        if (group > 0) continue;
        row.normalize(total, step.eps);
#pragma unroll
        for (int j = 0; j < 4; ++j) row.x[j] *= norm[j];
        row.turn(turns, step.rope_dim, 1.0f);
        row.template insert<typename W::Layout>(
            token_at<typename W::Layout>(rows.pages, rows.page_stride, rows.block_size, slot));
    }
}

#if PARTS > 1
#define CLUSTER __cluster_dims__(PARTS, 1, 1)
#else
#define CLUSTER
#endif

using First = Way<LAYOUT>;
using Second = Way<SECOND>;

// Thread blocks that pool rows of the first compressor, then of the second, then such as save states of both.
extern "C" CLUSTER __global__ void __launch_bounds__(First::THREADS, 1)
compress_and_insert(const Rows rows, const Rows second, const Step step, int pooling, int pooling_second, int saving) {
    __shared__ float places[2][First::PLACES], second_places[2][Second::PLACES];
    int block = blockIdx.x;
    pdl_wait();
    if (block < pooling) return pool<First>(rows, step, block / PARTS * TOKENS, block % PARTS, places);
    block -= pooling;
    if (block < pooling_second) {
        if (threadIdx.x < Second::THREADS) pool<Second>(second, step, block * TOKENS, 0, second_places);
        return;
    }
    block -= pooling_second;
    if (block < saving) save_states<First>(rows, step, block * TOKENS);
    else save_states<Second>(second, step, (block - saving) * TOKENS);
}

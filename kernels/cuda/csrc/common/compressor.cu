// The compressor of V4: save states, pool windows, RMSNorm, RoPE, insert.
//
// Grid: one launch for one compressor, or for the compressors of a layer and its indexer. Some CTAs save states, a
// token per warp. Others pool windows: a CTA, or a cluster of PARTS CTAs, takes neighbouring tokens and processes the
// tokens that complete a row one after another. Block: First::THREADS threads. A thread has 4 channels; GROUPS threads
// split a window's positions. Shared memory: the groups' partial means, and sums of squares; dynamic for PARTS > 1.
//
// To pool a window, a thread loads AHEAD positions before it uses the first. Each lane of a warp looks up one position:
// positions of this step are in kv_score, earlier ones in the pages of states. The first warps merge the means of all
// groups, then normalise, rotate and insert their part of the row; the CTAs of a cluster exchange their sums of
// squares.
//
// For long windows (clusters), positions are always divided into ALL_GROUPS groups and channels into ALL_PARTS parts,
// and sums are added in that order for any GROUPS and PARTS: a row is bit-identical in a batch of any size. Pooling
// CTAs then come first, and neighbouring states are saved by different warps. For short windows, saving CTAs come
// first, so that the end of the kernel does not wait for them.
//
// Macros: LAYOUT, SECOND (the indexer's layout; PARTS and GROUPS are 1 if there is one), INPUT and WEIGHT (float or
// bf16), STATE_SLOT, SLOT and POSITION (int64 or int), RATIO, COFF (1 or 2), PARTS (1, or on sm_90 more), GROUPS,
// AHEAD, WIDE (kv_score, states and biases may be read 4 values at a time), ALIGNED.
#include "common/tokens_with_slots.cuh"
#include "common/packed.cuh"
#include "common/device.cuh"
#include "common/channels4.cuh"
#include "common/warp_row.cuh"

constexpr int ALL_GROUPS = PARTS > 1 ? 16 : GROUPS, ALL_PARTS = 8;
constexpr int PASSES = ALL_GROUPS / GROUPS;
constexpr int MEAN_BYTES = 48;
[[maybe_unused]] constexpr int SHARED_BYTES = PARTS > 1 ? 2 * 4 * ALL_PARTS + ALL_GROUPS * LAYOUT::head_dim / (4 * PARTS) * MEAN_BYTES : 0;
static_assert(sizeof(Mean) == MEAN_BYTES);
static_assert(ALL_GROUPS % GROUPS == 0 && (PARTS == 1 || ALL_PARTS % PARTS == 0));

// How CTAs divide the rows of a layout.
template <class L> struct Way {
    using Layout = L;
    static constexpr int DIM = L::head_dim, THREADS_OF_GROUP = DIM / 4 / PARTS, THREADS = GROUPS * THREADS_OF_GROUP;
    // Threads of a CTA that hold the channels of a row. If they are less than a warp, several lanes hold the same
    // channels.
    static constexpr int HOLDERS = THREADS_OF_GROUP < 32 ? 32 : THREADS_OF_GROUP, WARPS = HOLDERS / 32;
    static constexpr int COPIES = HOLDERS / THREADS_OF_GROUP, PLACES = PARTS > 1 ? ALL_PARTS : WARPS;
    static constexpr int THREADS_OF_PART = PARTS > 1 ? DIM / 4 / ALL_PARTS : THREADS_OF_GROUP;
    static_assert(AHEAD * COPIES <= 32);
};

using First = Way<LAYOUT>;
using Second = Way<SECOND>;

// Arguments of one compressor.
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
    int block_size, unused;
};

// Arguments of all compressors.
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
    int together, saved_together;  // tokens of a pooling CTA, and of a saving warp
    float eps;
};

// Sum over all threads that hold channels of a row. Called by all threads of the block.
template <class W> struct RowSum {
    float (*places)[W::PLACES];  // double-buffered by row: one is read while the next is written
    int turn;

    __device__ float operator()(float of_warp, bool holds) {
        float* place = places[turn++ % 2];
        int lane = threadIdx.x % 32, count = PARTS > 1 ? ALL_PARTS : W::WARPS;
        if (PARTS == 1 && W::WARPS == 1 && GROUPS == 1) return of_warp;
#if PARTS > 1
        static_assert(W::WARPS == 1);
        uint32 rank = cluster_rank(), here = shared_address(place);
        if (turn == 1) cluster_wait();  // the first time: all CTAs have started
        int part = lane / W::THREADS_OF_PART, peer = lane % W::THREADS_OF_PART;  // of this CTA's parts
        if (holds && part < ALL_PARTS / PARTS && peer < PARTS) {
            uint32 remote = cluster_address(here + 4 * (rank * (ALL_PARTS / PARTS) + part), peer);
            asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(of_warp) : "memory");
        }
        cluster_arrive();
        cluster_wait();
#else
        if (holds && lane == 0) place[threadIdx.x / 32] = of_warp;
        __syncthreads();
#endif
        float total = 0.0f;
        for (int i = 0; i < count; ++i) total += place[i];
        return total;
    }
};

__device__ inline int remainder_of(int64 position) { return int((position % RATIO + RATIO) % RATIO); }
__device__ inline int remainder_of(int position) { return (position % RATIO + RATIO) % RATIO; }

#if GROUPS > 1
// Merges the means of all groups for the channels of a thread. The groups are divided into SIDES: each copy of a thread
// merges one side, or a single copy merges all.
template <class W> __device__ inline Mean merged(const Mean (*parts)[W::THREADS_OF_GROUP]) {
    constexpr int THREADS = W::THREADS_OF_GROUP, COPIES = W::COPIES;
    constexpr int SIDES = PARTS > 1 ? 32 / W::THREADS_OF_PART : COPIES;
    static_assert(ALL_GROUPS % SIDES == 0 && (COPIES == 1 || COPIES == SIDES));
    int thread = threadIdx.x % THREADS, first = threadIdx.x / THREADS;
    Mean mean;
    mean.top = parts[first][thread].top;
#pragma unroll
    for (int i = 1; i < ALL_GROUPS / COPIES; ++i) mean.top = larger(mean.top, parts[first + i * COPIES][thread].top);
#pragma unroll
    for (int lanes = THREADS; lanes < 32; lanes *= 2) mean.top = larger(mean.top, exchanged(mean.top, lanes));
#pragma unroll
    for (int side = 0; side < SIDES / COPIES; ++side) {
        Mean own;
        own.top = mean.top;
#pragma unroll
        for (int j = 0; j < 4; ++j) own.total.x[j] = own.sum.x[j] = 0.0f;
#pragma unroll
        for (int i = 0; i < ALL_GROUPS / SIDES; ++i) {
            const Mean& other = parts[first + side + i * SIDES][thread];
#pragma unroll
            for (int j = 0; j < 4; ++j) own.add(j, other.top.x[j], other.total.x[j], other.sum.x[j]);
        }
        mean.total = side ? mean.total + own.total : own.total;
        mean.sum = side ? mean.sum + own.sum : own.sum;
    }
#pragma unroll
    for (int lanes = THREADS; lanes < 32; lanes *= 2) {
        mean.total = mean.total + exchanged(mean.total, lanes);
        mean.sum = mean.sum + exchanged(mean.sum, lanes);
    }
    return mean;
}
#endif

// Save the states of neighbouring tokens; called by warp `warp` of `warps`.
template <class W> __device__ inline void save_states(const Rows& rows, const Step& step, int warp, int warps) {
    constexpr int CHANNELS = COFF * W::DIM, READS = CHANNELS / 128, AT_ONCE = READS < 4 ? READS : 4;
    int first = PARTS > 1 ? warp : warp * step.saved_together;
    Tokens tokens(step.state_slots, first, PARTS > 1 ? step.tokens : min(first + step.saved_together, step.tokens), step.num_state_slots,
                  rows.state_slots, PARTS > 1 ? warps : 1);
    for (int token = tokens.next(); token >= 0; token = tokens.next()) {
        PageRow at = page_row_of(int64(step.state_slots[token]), step.state_block);
        int column = 4 * (threadIdx.x % 32);
        const INPUT* source = rows.kv_score + token * rows.kv_stride + column;
        const float* bias = rows.bias + remainder_of(int64(step.positions[token])) * rows.bias_stride + column;
        float* target = rows.state + at.page * rows.state_page + at.row * rows.state_row + column;
#pragma unroll 1
        for (int from = 0; from < CHANNELS; from += 128 * AT_ONCE) {
            Channels4 kv[AT_ONCE], score[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                kv[i] = read4(source + from + 128 * i);
                score[i] = read4(source + from + 128 * i + CHANNELS) + read4(bias + from + 128 * i);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                write4(target + from + 128 * i, kv[i]);
                write4(target + from + 128 * i + CHANNELS, score[i]);
            }
        }
    }
}

// Location of a lane's position of a window: at `source`, which is in kv_score if `here`. If not found, `source` is any
// valid row.
struct Place {
    const void* source;
    bool found, here;
};

__device__ inline Place place_of(const Rows& rows, const Step& step, int token, int64 position, int request, int here, int back) {
    const void* in_step = rows.kv_score + (token - (back < here ? back : 0)) * rows.kv_stride;
    if (back >= COFF * RATIO || position < back) return {in_step, false, true};
    PageRow page = page_row_of(position - back, step.state_block);
    bool has_entry = request >= 0 && request < step.table_rows && page.page < step.table_columns;
    int entry = has_entry ? step.table[request * step.table_stride + page.page] : -1;
    if (back < here) return {in_step, true, true};
    if (entry < 0 || int64(entry) * step.state_block + page.row >= rows.state_slots) return {in_step, false, true};
    return {rows.state + entry * rows.state_page + page.row * rows.state_row, true, false};
}

// Pool the tokens from `first` on that complete a row, for part `part` of its channels.
template <class W>
__device__ inline void pool(const Rows& rows, const Step& step, int first, int part, float (*places)[W::PLACES]) {
#if PARTS > 1
    auto parts = reinterpret_cast<Mean(*)[W::THREADS_OF_GROUP]>(places + 2);
#elif GROUPS > 1
    __shared__ Mean parts[ALL_GROUPS][W::THREADS_OF_GROUP];
#endif
    constexpr int DIM = W::DIM, CHANNELS = COFF * DIM, THREADS = W::THREADS_OF_GROUP, COPIES = W::COPIES;
    int group = threadIdx.x / THREADS, thread = threadIdx.x % THREADS, channel = part * (DIM / PARTS) + 4 * thread;
    int lane = threadIdx.x % 32, groups_before = group % COPIES * AHEAD;  // lanes of this warp's earlier groups
    int channel_read = channel;  // a copy that stays in a register, see below
    bool holds = threadIdx.x < W::HOLDERS;
#if PARTS > 1
    cluster_arrive();  // so that no CTA writes to a CTA that has not started: see RowSum
    // Loaded for all tokens together, before the token is known.
    POSITION some_positions[4];
    int some_requests[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int token = min(first + 32 * i + lane, step.tokens - 1);
        some_positions[i] = step.positions[token], some_requests[i] = step.requests[token];
    }
#else
    int64 position = step.positions[first];
    int request = step.requests[first];
#endif
    Tokens tokens(step.slots, first, min(first + step.together, step.tokens), step.num_slots, rows.num_slots);
    RowSum<W> row_sum{places, 0};
    WarpRow<4, DIM / 128> row;
    row.lane = part * THREADS + thread;
    int token = tokens.next();
#if PARTS > 1
    int64 position = 0;
    int request = 0, known = token;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        POSITION its_position = some_positions[i];
        int its_request = some_requests[i];
        bool is_its = (token - first) / 32 == i;
        position = is_its ? its_position : position, request = is_its ? its_request : request;
    }
    position = __shfl_sync(~0u, position, (token - first) % 32);
    request = __shfl_sync(~0u, request, (token - first) % 32);
#else
    int known = first;
#endif
    for (; token >= 0; token = tokens.next()) {
        // Makes the compiler rematerialise values derived from `channel` instead of keeping them in registers.
        if (PARTS > 1) asm volatile("" : "+r"(channel));
        if (token != known) position = step.positions[token], request = step.requests[token];
        bool present = request >= 0 && request < step.num_requests;
        int here = token + 1 - (present ? max(step.starts[request], 0) : token);  // positions in this step
        int remainder = remainder_of(position);
        float norm[4], cosines[2], sines[2];
        const float* rotation = rotation_at(step.cos_sin, step.cos_stride, step.max_position, position - remainder);
        auto load_factors = [&] {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int pair = (channel + i / 2 * 2 - DIM + step.rope_dim) / 2;
                norm[i] = to_float(rows.weight[channel + i]);
                if (i % 2 == 0 && channel + i >= DIM - step.rope_dim)
                    cosines[i / 2] = rotation[pair], sines[i / 2] = rotation[step.rope_dim / 2 + pair];
            }
        };
        if (GROUPS == 1) load_factors();
        Mean mean;
#pragma unroll 1
        for (int pass = 0; pass < PASSES; ++pass) {
            const int its = pass * GROUPS + group;
            mean.clear();
#pragma unroll 1
            for (int from = 0; from < COFF * RATIO; from += ALL_GROUPS * AHEAD) {
                int its_group = its - group % COPIES + lane / AHEAD;
                int its_back = lane < AHEAD * COPIES ? from + its_group + lane % AHEAD * ALL_GROUPS : COFF * RATIO;
                Place mine = place_of(rows, step, token, position, request, here, its_back);
                uint32 found = __ballot_sync(~0u, mine.found) >> groups_before;
                uint32 in_step = __ballot_sync(~0u, mine.here) >> groups_before;
                Channels4 kv[AHEAD], score[AHEAD];
#pragma unroll
                for (int i = 0; i < AHEAD; ++i) {
                    int back = from + its + i * ALL_GROUPS, column = channel_read + (COFF == 2 && back < RATIO ? DIM : 0);
                    uint64 source = __shfl_sync(~0u, reinterpret_cast<uint64>(mine.source), groups_before + i);
                    if (sizeof(INPUT) == 4 || !(in_step >> i & 1)) {
                        const float* values = reinterpret_cast<const float*>(source) + column;
                        if (PARTS > 1) kv[i] = read4_volatile(values), score[i] = read4_volatile(values + CHANNELS);
                        else kv[i] = read4(values), score[i] = read4(values + CHANNELS);
                    } else {
                        const INPUT* values = reinterpret_cast<const INPUT*>(source) + column;
                        kv[i] = read4(values), score[i] = read4(values + CHANNELS);
                    }
                }
                // The row of biases, which belongs to the position.
                int bias_row = remainder_of(remainder - from - its);
                const float* bias_at = rows.bias + bias_row * rows.bias_stride;
#pragma unroll
                for (int i = 0; i < AHEAD; ++i) {
                    int back = from + its + i * ALL_GROUPS, column = channel_read + (COFF == 2 && back < RATIO ? DIM : 0);
                    if (PARTS == 1) bias_at = rows.bias + remainder_of(remainder - back) * rows.bias_stride;
                    Channels4 bias = read4(bias_at + column);
                    if (PARTS > 1) {
                        bias_row -= ALL_GROUPS % RATIO, bias_at -= ALL_GROUPS % RATIO * rows.bias_stride;
                        if (bias_row < 0) bias_row += RATIO, bias_at += RATIO * rows.bias_stride;
                    }
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        score[i].x[j] += in_step >> i & 1 ? bias.x[j] : 0.0f;
                        if (!(found >> i & 1)) score[i].x[j] = -infinity(), kv[i].x[j] = 0.0f;
                    }
                }
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float top = -infinity();
#pragma unroll
                    for (int i = 0; i < AHEAD; ++i) top = fmaxf(top, score[i].x[j]);
                    mean.raise(j, top);
#pragma unroll
                    for (int i = 0; i < AHEAD; ++i) mean.add(j, score[i].x[j], 1.0f, kv[i].x[j]);
                }
            }
#if GROUPS > 1
            parts[its][thread] = mean;
#endif
        }
        pdl_release();  // the next kernel waits for the end of this one in any case
#if GROUPS > 1
        if (holds) load_factors();  // while groups wait for each other
        __syncthreads();
        if (holds) mean = merged<W>(parts);
#endif
#pragma unroll
        for (int j = 0; j < 4; ++j) row.x[j] = mean.total.x[j] == 0.0f ? 0.0f : div(mean.sum.x[j], mean.total.x[j]);
        float total = row_sum(row.template squares<W::THREADS_OF_PART>(), holds);
        if (!holds) continue;
        row.normalize(total, step.eps);
#pragma unroll
        for (int j = 0; j < 4; ++j) row.x[j] *= norm[j];
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
            if (channel + j < DIM - step.rope_dim) continue;
            float a = row.x[j], b = row.x[j + 1];
            row.x[j] = a * cosines[j / 2] - b * sines[j / 2];
            row.x[j + 1] = b * cosines[j / 2] + a * sines[j / 2];
        }
        row.template insert<typename W::Layout>(
            token_at<typename W::Layout>(rows.pages, rows.page_stride, rows.block_size, int64(step.slots[token])));
    }
}

#if PARTS > 1
#define CLUSTER __cluster_dims__(PARTS, 1, 1)
#else
#define CLUSTER
#endif

// CTAs that save states of the first compressor, then of the second one, then CTAs that pool rows of both. For long
// windows, which have one compressor: CTAs that pool, then CTAs that save.
extern "C" CLUSTER __global__ void __launch_bounds__(First::THREADS, 512 / First::THREADS)
    compress_and_insert(const Rows rows, const Rows second, const Step step, int saving, int saving_second, int pooling) {
#if PARTS > 1
    extern __shared__ uint4 memory[];  // sums of squares and the groups' means
    auto places = reinterpret_cast<float (*)[First::PLACES]>(memory);
#else
    __shared__ float places[2][First::PLACES], second_places[2][Second::PLACES];
#endif
    int block = blockIdx.x, warp = threadIdx.x / 32;
    constexpr int WARPS = First::THREADS / 32;
    pdl_wait();
#if PARTS > 1
    if (block < pooling) return pool<First>(rows, step, block / PARTS * step.together, block % PARTS, places);
    save_states<First>(rows, step, (block - pooling) * WARPS + warp, saving * WARPS);
#else
    if (block < saving) return save_states<First>(rows, step, block * WARPS + warp, saving * WARPS);
    block -= saving;
    if (block < saving_second) return save_states<Second>(second, step, block * WARPS + warp, saving_second * WARPS);
    block -= saving_second;
    if (block < pooling) return pool<First>(rows, step, block / PARTS * step.together, block % PARTS, places);
    block -= pooling;
    if (threadIdx.x < Second::THREADS) pool<Second>(second, step, block * step.together, 0, second_places);
#endif
}

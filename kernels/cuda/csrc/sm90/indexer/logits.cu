// Scores of FP8 keys for FP8 queries of 64 heads, on Hopper (sm_90a): logits = scale * sum of weights * relu(q . k).
//
// Queries go QUERIES at a time, a *group*, keys KEYS at a time, a *tile*. The tiles of all groups lie one behind another,
// and each thread block takes an even share of them, however long the groups are. A producer warp brings queries and
// tiles; four warpgroups multiply 64 keys by 64 * PASS heads each:
//
//     QUERY_GROUPS 1    256 keys, of which each warpgroup takes 64, for all queries
//     QUERY_GROUPS 2    128 keys for two halves of the queries: half the keys to read for each product
//
// In a product keys are rows and heads of queries columns, so that a thread sums most of the heads of its keys on its
// own; four lanes have to add up.
//
// Macros: PAGED (a paged cache, or keys one behind another), PASS (queries of a warpgroup, 1 or 2), QUERY_GROUPS.
#define ALIGNED 1
#include "common/pages.cuh"
#include "common/pdl.cuh"
#include "sm90/tma.cuh"

constexpr int HEADS = 64, DIM = 128, WARPGROUPS = 4, CONSUMERS = 128 * WARPGROUPS, THREADS = CONSUMERS + 128;
constexpr int QUERIES = PASS * QUERY_GROUPS, KEY_GROUPS = WARPGROUPS / QUERY_GROUPS, KEYS = 64 * KEY_GROUPS;
constexpr int PRODUCER_REGISTERS = PASS == 2 ? 32 : 56, CONSUMER_REGISTERS = PASS == 2 ? 112 : 104;
constexpr int Q_STAGES = 2, K_STAGES = QUERY_GROUPS == 2 ? 8 : PASS == 2 ? 5 : 6;
// Of a paged cache each warpgroup's keys are brought by a warp of their own and awaited alone: one warp for all has more to
// do for a tile than memory takes, and if all came at once, so would all products, and all sums.
constexpr int PARTS = PAGED ? KEY_GROUPS : 1, PART_KEYS = KEYS / PARTS;
constexpr int COLUMNS = 32 * PASS;  // of a product, in a thread's registers
static_assert(HEADS * DIM == TILE_BYTES);

// What the consumers have to know of a share's group.
struct Info {
    int first_key, tiles;           // no tiles: there are no more groups
    int first[QUERIES], end[QUERIES];  // keys that each query sees
    int row;                        // of the first query
    int padding;
};

// Shared memory. Without static shared memory the dynamic part starts at 1024; the kernel traps otherwise.
constexpr uint32 BARRIERS_AT = 1024;
constexpr uint32 Q_READY = BARRIERS_AT, Q_FREE = Q_READY + 8 * Q_STAGES;
constexpr uint32 K_READY = Q_FREE + 8 * Q_STAGES, K_FREE = K_READY + 8 * K_STAGES * PARTS;  // [K_STAGES][PARTS]
constexpr uint32 PRESENT_AT = K_FREE + 8 * K_STAGES * PARTS;   // of each part: a bit for each box
constexpr uint32 INFO_AT = PRESENT_AT + 4 * K_STAGES * PARTS;  // of each Q stage
constexpr uint32 SUMS_AT = (INFO_AT + Q_STAGES * sizeof(Info) + 7) / 8 * 8;  // of each warp, while the share is sought
constexpr uint32 WEIGHTS_AT = 2048;                            // [Q_STAGES][QUERIES][HEADS]
constexpr uint32 SCALES_AT = WEIGHTS_AT + Q_STAGES * QUERIES * HEADS * 4;  // [K_STAGES][KEYS]
constexpr uint32 Q_AT = (SCALES_AT + K_STAGES * KEYS * 4 + 1023) / 1024 * 1024;
constexpr uint32 K_AT = Q_AT + Q_STAGES * QUERIES * TILE_BYTES;
constexpr uint32 K_BYTES = KEY_GROUPS * TILE_BYTES;
static_assert(SUMS_AT + 8 * (THREADS / 32) + 32 <= WEIGHTS_AT);

struct Problem {
    const float* weights;
    int64 weights_stride;
    int queries;  // of all, or of an entry of a paged cache
    const int *starts, *ends;  // PAGED: lengths, and none
    int64 lens_stride;         // between entries; 0 in front of `per_query` of 0
    int per_query;             // whether every query has a length of its own
    int keys;                  // there are; PAGED: that logits have room for
    int room;                  // for compressed rows: their width, else 0
    BlockTable table;
    const uint8* pages;
    int64 page_stride;
    int pages_there, block_size, box_rows;
    float* logits;
    int64 logits_stride;
    const float* scales;

    __device__ int groups_of_entry() const { return (queries + QUERIES - 1) / QUERIES; }
    __device__ int groups() const { return PAGED ? table.rows * groups_of_entry() : groups_of_entry(); }
    // The first query of a group, and how many there are.
    __device__ int query_of(int group, int& count) const {
        int entry = PAGED ? group / groups_of_entry() : 0, first = (PAGED ? group % groups_of_entry() : group) * QUERIES;
        count = min(queries - first, QUERIES);
        return entry * (PAGED ? queries : 0) + first;
    }
    // Keys that a query sees.
    __device__ void range_of(int query, int& first, int& end) const {
        if (PAGED) {
            int entry = query / queries, j = query % queries;
            int64 length = per_query ? starts[entry * lens_stride + j] : int64(starts[entry * lens_stride]) - (queries - 1 - j);
            first = 0, end = int(min(max(length, int64(0)), int64(keys)));
        } else {
            first = min(max(starts[query], 0), keys), end = min(max(ends[query], first), keys);
            if (room) end = int(min(int64(end), int64(first) + room));
        }
    }
    // Keys that a group sees: those of all its queries, and what is between.
    __device__ int tiles_of(int group, int& first) const {
        int count, query = query_of(group, count), end = 0;
        first = INT32_LIMIT;
        for (int j = 0; j < count; ++j) {
            int from, to;
            range_of(query + j, from, to);
            if (to > from) first = min(first, from), end = max(end, to);
        }
        return end > first ? int((int64(end) - first + KEYS - 1) / KEYS) : 0;
    }
};

__device__ inline void sts_int64(uint32 address, int64 x) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(uint32(x)), "r"(uint32(uint64(x) >> 32)) : "memory");
}
__device__ inline int64 lds_int64(uint32 address) {
    uint2 x = lds64(address);
    return int64(uint64(x.y) << 32 | x.x);
}

// The tiles [first, first + count) of all groups' that a thread block takes, as where the first one is.
struct Share {
    int group, tile;
    int64 count;
};

// All threads of the block take part.
__device__ inline Share share_of(const Problem& problem) {
    int groups = problem.groups(), run = (groups + THREADS - 1) / THREADS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int begin = min(int(threadIdx.x) * run, groups), end = min(begin + run, groups), unused;
    int64 own = 0;
    for (int group = begin; group < end; ++group) own += problem.tiles_of(group, unused);
    auto sum_to = [&](int64 x) {  // of the lanes up to this one
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            int64 left = __shfl_up_sync(~0u, x, step);
            if (lane >= step) x += left;
        }
        return x;
    };
    int64 up_to = sum_to(own);
    if (lane == 31) sts_int64(SUMS_AT + 8 * warp, up_to);
    __syncthreads();
    int64 sums = sum_to(lane < THREADS / 32 ? lds_int64(SUMS_AT + 8 * lane) : 0);
    int64 total = __shfl_sync(~0u, sums, 31), others = __shfl_sync(~0u, sums, warp ? warp - 1 : 0);
    int64 before = up_to - own + (warp ? others : 0);
    int64 even = total / gridDim.x, larger = total % gridDim.x, block = blockIdx.x;
    int64 first = block * even + min(block, larger), count = even + (block < larger);
    uint32 found_at = SUMS_AT + 8 * (THREADS / 32);
    if (count && before <= first && first < before + own) {
        int group = begin;
        int64 tile = first - before;
        for (; run > 1; ++group) {
            int tiles = problem.tiles_of(group, unused);
            if (tile < tiles) break;
            tile -= tiles;
        }
        sts_int64(found_at, int64(group));
        sts_int64(found_at + 8, tile);
    }
    __syncthreads();
    if (!count) return {0, 0, 0};
    return {int(lds_int64(found_at)), int(lds_int64(found_at + 8)), count};
}

// One warp, for a part of each tile; the first one brings queries, too.
struct Producer {
    const Problem& problem;
    const TensorMap &q_map, &k_map;
    int part;
    int q_stage, k_stage;
    uint32 q_parity, k_parity;

    __device__ void bring_queries(int query, int count, int first_key, int tiles) {
        int lane = threadIdx.x % 32;
        barrier_wait(Q_FREE + 8 * q_stage, q_parity ^ 1);
        uint32 info = INFO_AT + q_stage * sizeof(Info), ready = Q_READY + 8 * q_stage;
        if (lane < QUERIES) {
            int first = 0, end = 0;
            if (lane < count) problem.range_of(query + lane, first, end);
            sts32(info + 8 + 4 * lane, first);
            sts32(info + 8 + 4 * (QUERIES + lane), end);
        }
        if (lane == 0) {
            sts32(info, first_key);
            sts32(info + 4, tiles);
            sts32(info + 8 + 8 * QUERIES, query);
        }
        for (int i = lane; i < QUERIES * HEADS; i += 32) {
            bool present = i / HEADS < count;
            const float* from = present ? problem.weights + (query + i / HEADS) * problem.weights_stride + i % HEADS : problem.weights;
            copy_async<4>(WEIGHTS_AT + (q_stage * QUERIES * HEADS + i) * 4, from, present);
        }
        copies_arrive(ready);
        __syncwarp();
        if (lane == 0) {
            barrier_arrive_expecting(ready, tiles ? QUERIES * TILE_BYTES : 0);
            for (int j = 0; tiles && j < QUERIES; ++j)
                tma_load(Q_AT + (q_stage * QUERIES + j) * TILE_BYTES, q_map, 0, 0, query + j, ready);
        }
        if (++q_stage == Q_STAGES) q_stage = 0, q_parity ^= 1;
    }

    // The page of this lane's box of the part's keys, or -1; and from where on in the page.
    struct Box {
        int page, row;
    };
    // Where the box is among the pages of an entry.
    struct Place {
        const int* entries;
        int column, row;

        __device__ void go_on(int rows, int block_size) {
            for (row += rows; row >= block_size; row -= block_size) ++column;
        }
    };
    __device__ Place place_of(int entry, int key) const {
        Place place{problem.table.entries + entry * problem.table.row_stride, 0, 0};
        place.column = key / problem.block_size, place.row = key % problem.block_size;
        place.go_on(part * PART_KEYS + threadIdx.x % 32 * problem.box_rows, problem.block_size);
        return place;
    }
    __device__ Box box_at(const Place& place) const {
        if (threadIdx.x % 32 * problem.box_rows >= PART_KEYS || place.column >= problem.table.columns) return {-1, 0};
        int page = place.entries[place.column];
        return {page >= 0 && page < problem.pages_there ? page : -1, place.row};
    }

    __device__ void bring_tile(Box box, int key) {
        int lane = threadIdx.x % 32;
        uint32 to = K_AT + k_stage * K_BYTES, scales = SCALES_AT + k_stage * KEYS * 4;
#if PAGED
        uint32 ready = K_READY + 8 * (k_stage * PARTS + part), here = __ballot_sync(~0u, box.page >= 0);
        barrier_wait(K_FREE + 8 * (k_stage * PARTS + part), k_parity ^ 1);
        if (lane == 0) {
            sts32(PRESENT_AT + 4 * (k_stage * PARTS + part), here);
            barrier_arrive_expecting(ready, __popc(here) * problem.box_rows * DIM);
        }
        __syncwarp();
        if (box.page >= 0) {
            int row = part * PART_KEYS + lane * problem.box_rows;
            tma_load(to + row * DIM, k_map, 0, box.row, box.page, ready);
            const uint8* from = problem.pages + box.page * problem.page_stride + INDEXER_FP8::scale_start +
                                (problem.block_size * INDEXER_FP8::scale_start_per_token + box.row * INDEXER_FP8::scale_stride);
#pragma unroll 1
            for (int i = 0; i < problem.box_rows; i += 4) copy_async<16>(scales + 4 * (row + i), from + 4 * i, true);
        }
        copies_arrive(ready);
#else
        uint32 ready = K_READY + 8 * k_stage;
        barrier_wait(K_FREE + 8 * k_stage, k_parity ^ 1);
#pragma unroll
        for (int i = lane; i < KEYS; i += 32) {
            bool present = key + i < problem.keys;
            copy_async<4>(scales + 4 * i, problem.scales + (present ? key + i : 0), present);
        }
        copies_arrive(ready);
        if (lane == 0) {
            barrier_arrive_expecting(ready, K_BYTES);
            tma_load(to, k_map, 0, key, 0, ready);
        }
#endif
        if (++k_stage == K_STAGES) k_stage = 0, k_parity ^= 1;
    }

    __device__ void run(Share share) {
        int left = int(share.count);
        for (int group = share.group, tile = share.tile; left; ++group, tile = 0) {
            int first, tiles = min(problem.tiles_of(group, first) - tile, left);
            if (tiles <= 0) continue;
            int count, query = problem.query_of(group, count), key = first + tile * KEYS;
            if (part == 0) bring_queries(query, count, key, tiles);
            int entry = PAGED ? group / problem.groups_of_entry() : 0;
            Place place = PAGED ? place_of(entry, key) : Place{};
            for (int i = 0; i < tiles; ++i, key += KEYS) {
                bring_tile(PAGED ? box_at(place) : Box{}, key);
                if (PAGED) place.go_on(KEYS, problem.block_size);
            }
            left -= tiles;
        }
        if (part == 0) bring_queries(0, 0, 0, 0);
    }
};

// x (64 keys x 64 * PASS heads) = k q^T: 32 values along both.
__device__ inline void multiply(float (&x)[32], uint64 k, uint64 q, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " REGISTERS32 ", %32, %33, p, 1, 1;\n}\n"
                 : FLOATS32(x) : "l"(k), "l"(q), "r"(add));
}
__device__ inline void multiply(float (&x)[64], uint64 k, uint64 q, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " REGISTERS64 ", %64, %65, p, 1, 1;\n}\n"
                 : FLOATS64(x) : "l"(k), "l"(q), "r"(add));
}

// The larger of x and 0; NaN stays NaN.
__device__ inline float relu(float x) {
    float y;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
    return y;
}

// Of one query, the sums over a thread's 16 heads for its keys g and g + 8.
__device__ inline void sum_heads(const float (&x)[COLUMNS], const float (&weights)[PASS][16], int query, float& low, float& high) {
    float sums[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = relu(x[32 * query + i]) * weights[query][i % 2];
#pragma unroll
    for (int n = 1; n < 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] = fmaf(relu(x[32 * query + 4 * n + i]), weights[query][2 * n + i % 2], sums[i]);
    low = sums[0] + sums[1], high = sums[2] + sums[3];
}

__device__ inline void consume(const Problem& problem) {
    int warpgroup = __shfl_sync(~0u, int(threadIdx.x / 128), 0), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    int key_group = warpgroup % KEY_GROUPS, query_group = warpgroup / KEY_GROUPS, c = lane % 4;
    // After the lanes have added up, this one has one key of one query.
    int own_query = query_group * PASS + (PASS == 2 ? c & 1 : 0);
    int own_key = 64 * key_group + 16 * warp + lane / 4 + 8 * (PASS == 2 ? c >> 1 : c & 1);
    int part = PAGED ? key_group : 0, own_box = PAGED ? own_key % PART_KEYS / problem.box_rows : 0;
    bool stores = PASS == 2 || c < 2;
    int k_stage = 0, q_stage = 0;
    uint32 k_parity = 0, q_parity = 0;
    for (;;) {
        barrier_wait(Q_READY + 8 * q_stage, q_parity);
        uint32 info = INFO_AT + q_stage * sizeof(Info);
        int key = int(lds32(info)) + own_key, tiles = __shfl_sync(~0u, int(lds32(info + 4)), 0);
        if (!tiles) return;
        int first = lds32(info + 8 + 4 * own_query), end = lds32(info + 8 + 4 * (QUERIES + own_query));
        int64 row = int(lds32(info + 8 + 8 * QUERIES)) + own_query;
        float* logits = problem.logits + row * problem.logits_stride - (problem.room ? first : 0);
        float weights[PASS][16];
#pragma unroll
        for (int query = 0; query < PASS; ++query)
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                uint32 at = WEIGHTS_AT + ((q_stage * QUERIES + query_group * PASS + query) * HEADS + 8 * n + 2 * c) * 4;
                float2 pair = lds_float2(at);
                weights[query][2 * n] = pair.x, weights[query][2 * n + 1] = pair.y;
            }
        uint64 q_tile = tile_descriptor(Q_AT + (q_stage * QUERIES + query_group * PASS) * TILE_BYTES);
#pragma unroll 1
        for (int i = 0; i < tiles; ++i, key += KEYS) {
            barrier_wait(K_READY + 8 * (k_stage * PARTS + part), k_parity);
            uint64 k_tile = tile_descriptor(K_AT + k_stage * K_BYTES + key_group * TILE_BYTES);
            float x[COLUMNS];
            pin(x);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < DIM / 32; ++step) multiply(x, k_tile + 2 * step, q_tile + 2 * step, step > 0);
            wgmma_commit();
            float scale = lds_float(SCALES_AT + (k_stage * KEYS + own_key) * 4);
            bool present = !PAGED || lds32(PRESENT_AT + 4 * (k_stage * PARTS + part)) >> own_box & 1;
            wgmma_wait<0>();
            pin(x);
            warp_arrive(K_FREE + 8 * (k_stage * PARTS + part));
            float low, high, score;
            sum_heads(x, weights, 0, low, high);
            if (PASS == 2) {
                float other_low, other_high;
                sum_heads(x, weights, PASS - 1, other_low, other_high);
                bool odd = c & 1;
                float sent_low = __shfl_xor_sync(~0u, odd ? low : other_low, 1);
                float sent_high = __shfl_xor_sync(~0u, odd ? high : other_high, 1);
                low = (odd ? other_low : low) + sent_low, high = (odd ? other_high : high) + sent_high;
                score = (c & 2 ? high : low) + __shfl_xor_sync(~0u, c & 2 ? low : high, 2);
            } else {
                score = (c & 1 ? high : low) + __shfl_xor_sync(~0u, c & 1 ? low : high, 1);
                score += __shfl_xor_sync(~0u, score, 2);
            }
            score = present ? score * scale : -infinity();
            if (stores && key >= first && key < end) logits[key] = score;
            if (++k_stage == K_STAGES) k_stage = 0, k_parity ^= 1;
        }
        warp_arrive(Q_FREE + 8 * q_stage);
        if (++q_stage == Q_STAGES) q_stage = 0, q_parity ^= 1;
    }
}

// 48 bytes come before the first map: a tensor map lies at a multiple of 64, and parameters begin 16 bytes behind one.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
indexer_logits_sm90(const float* weights, int64 weights_stride, const int* starts, const int* ends, int64 lens_stride,
                    int per_query, int queries, const __grid_constant__ TensorMap q_map,
                    const __grid_constant__ TensorMap k_map, const float* scales, int keys, int room,
                    const int* block_table, int64 table_stride, int table_rows, int table_columns, const uint8* pages,
                    int64 page_stride, int64 num_slots, int block_size, int box_rows, float* logits,
                    int64 logits_stride) {
    extern __shared__ uint4 memory[];
    if (uint32(__cvta_generic_to_shared(memory)) != BARRIERS_AT || reinterpret_cast<uint64>(&q_map) % 64) __trap();
    if (threadIdx.x == 0) {
        prefetch_tensor_map(q_map), prefetch_tensor_map(k_map);
        for (int i = 0; i < Q_STAGES; ++i) barrier_init(Q_READY + 8 * i, 33), barrier_init(Q_FREE + 8 * i, CONSUMERS / 32 * WARP_ARRIVALS);
        for (int i = 0; i < K_STAGES * PARTS; ++i)
            barrier_init(K_READY + 8 * i, 33), barrier_init(K_FREE + 8 * i, CONSUMERS / 32 / PARTS * WARP_ARRIVALS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    pdl_wait();
    Problem problem{weights, weights_stride, queries, starts, ends, lens_stride, per_query, keys, room,
                    {block_table, table_stride, table_rows, table_columns}, pages, page_stride,
                    int(min(num_slots, INT32_LIMIT + 1ll) / block_size), block_size, box_rows, logits, logits_stride, scales};
    Share share = share_of(problem);  // all threads meet in there
    if (threadIdx.x >= CONSUMERS) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        int part = (threadIdx.x - CONSUMERS) / 32;
        if (part < PARTS) Producer{problem, q_map, k_map, part, 0, 0, 0, 0}.run(share);
    } else {
        warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        consume(problem);
    }
}

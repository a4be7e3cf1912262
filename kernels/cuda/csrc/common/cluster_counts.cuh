// Finds the bin of the k-th number among bins that all CTAs of a cluster have counted, each in its own shared memory.
//
// A CTA adds its sums of groups of 128 bins to the sums of every other CTA (send_groups). After a cluster barrier each
// CTA finds the group of the k-th number, reads the bins of this group from all CTAs, and finds the bin. So one barrier
// suffices.
//
// Macro: BLOCKS (CTAs of a cluster; with 1, the functions of clusters are not defined).
#pragma once
#include "common/selection.cuh"

#if BLOCKS > 1
#define CLUSTER __cluster_dims__(BLOCKS, 1, 1)

constexpr int GROUP = 128, GROUPS = BINS / GROUP;
static_assert(GROUPS % 32 == 0 && BLOCKS <= WARPS && GROUP / RUN >= BLOCKS && GROUP / RUN <= 32);

struct Counted {
    uint32 groups[GROUPS];                   // sums over the cluster, 0 at first
    alignas(16) uint32 bins[BLOCKS][GROUP];  // of the group of the k-th number, by CTA
};

__device__ inline uint32 rank_in_cluster() { return cluster_rank(); }
// The address of `here` in another CTA's shared memory.
__device__ inline uint32 remote_address(const void* here, uint32 rank) { return cluster_address(shared_address(here), rank); }
__device__ inline void send(uint64& here, uint32 rank, uint64 x) {
    asm volatile("st.shared::cluster.b64 [%0], %1;" ::"r"(remote_address(&here, rank)), "l"(x) : "memory");
}
__device__ inline void send(int& here, uint32 rank, int x) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(remote_address(&here, rank)), "r"(x) : "memory");
}
__device__ inline void add_remote(uint32& here, uint32 rank, uint32 x) {
    asm volatile("red.relaxed.cluster.shared::cluster.add.u32 [%0], %1;" ::"r"(remote_address(&here, rank)), "r"(x) : "memory");
}
__device__ inline uint4 read_remote(const uint32* here, uint32 rank) {
    uint4 x;
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(remote_address(here, rank))
                 : "memory");
    return x;
}

// Adds this CTA's sums of groups to the sums of all CTAs, except the last bin, which is cleared. Called by all threads,
// after a barrier and before a cluster barrier.
__device__ inline void send_groups(Counted& counted, uint32* bins) {
    constexpr int LANES_OF_GROUP = GROUP / RUN;
    if (threadIdx.x == THREADS - 1) bins[BINS - 1] = 0;
    uint32 sum = 0;
#pragma unroll
    for (int i = 0; i < RUN; i += 4) {
        uint4 four = *reinterpret_cast<const uint4*>(bins + threadIdx.x * RUN + i);
        sum += four.x + four.y + four.z + four.w;
    }
#pragma unroll
    for (int step = LANES_OF_GROUP / 2; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    uint32 rank = threadIdx.x % LANES_OF_GROUP;
    if (rank < BLOCKS && sum) add_remote(counted.groups[threadIdx.x / LANES_OF_GROUP], rank, sum);
}

// The bin of the rest-th number, where each lane of a warp has PER neighbouring counts, lane 0 the first; -1 if there
// are fewer numbers. Subtracts the numbers of earlier bins from `rest`.
template <int PER> __device__ inline int place_of(const uint32 (&counts)[PER], int& rest) {
    int own = 0, found = -1, left = 0;
#pragma unroll
    for (int i = 0; i < PER; ++i) own += int(counts[i]);
    int before = sum_to(own) - own;
#pragma unroll
    for (int i = 0; i < PER; ++i) {
        int up_to = before + int(counts[i]);
        if (before < rest && rest <= up_to) found = int(threadIdx.x % 32) * PER + i, left = rest - before;
        before = up_to;
    }
    uint32 having = __ballot_sync(~0u, found >= 0);
    if (!having) return -1;
    int lane = __ffs(having) - 1;
    rest = __shfl_sync(~0u, left, lane);
    return __shfl_sync(~0u, found, lane);
}

struct ClusterDigit {
    int digit, needed, here;  // as returned by find_digit; digit is -1 if there is none
    int earlier;              // how many of `here` are counted by CTAs of lower rank
    int most;                 // the largest number of them that one CTA has counted
};

// Called by all threads, after send_groups and a cluster barrier. The result is valid in warp 0.
__device__ inline ClusterDigit digit_of_cluster(Counted& counted, const uint32* bins, uint32 rank, int rest) {
    const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
    int group = -1;
    if (warp < BLOCKS) {
        constexpr int PER = GROUPS / 32;
        uint32 counts[PER];
#pragma unroll
        for (int i = 0; i < PER; ++i) counts[i] = counted.groups[GROUPS - 1 - (lane * PER + i)];
        group = place_of(counts, rest);
        if (group >= 0) {
            group = GROUPS - 1 - group;
            *reinterpret_cast<uint4*>(&counted.bins[warp][lane * 4]) = read_remote(bins + group * GROUP + lane * 4, warp);
        }
    }
    __syncthreads();
    if (warp || group < 0) return {-1, 0, 0, 0, 0};
    uint32 counts[4] = {};
#pragma unroll
    for (int r = 0; r < BLOCKS; ++r) {
        uint4 four = *reinterpret_cast<const uint4*>(&counted.bins[r][(31 - lane) * 4]);
        counts[0] += four.w, counts[1] += four.z, counts[2] += four.y, counts[3] += four.x;
    }
    int bin = GROUP - 1 - place_of(counts, rest);
    uint32 of_block = lane < BLOCKS ? counted.bins[lane % BLOCKS][bin] : 0;
    return {group * GROUP + bin, rest, int(__reduce_add_sync(~0u, of_block)), int(__reduce_add_sync(~0u, lane < int(rank) ? of_block : 0)),
            int(__reduce_max_sync(~0u, of_block))};
}
#else
#define CLUSTER
struct Counted {};
__device__ inline uint32 rank_in_cluster() { return 0; }
#endif

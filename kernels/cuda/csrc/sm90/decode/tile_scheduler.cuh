// The tile scheduler of sm90/decode/decode.cu.
#pragma once
#include "sm90/decode/memory.cuh"

// One warp publishes each tile while the previous one is processed, and computes the factors that normalise the sums.
// This warp does all work that occurs once per tile: in other roles its instructions would cost space in the
// instruction cache.
struct TileScheduler {
    const SparseProblem& problem;
    int lane;
    WorkRange range;
    PipelineState<SCHEDULED_TILES> to;

    __device__ TileScheduler(const SparseProblem& p) : problem(p), lane(threadIdx.x % 32), range(when_known(p)) {}

    // The preceding kernel may still be writing the starts of work ranges.
    __device__ static WorkRange when_known(const SparseProblem& problem) {
        if (problem.starts) pdl_wait();
        return WorkRange(problem);
    }

    // Prefetch the lengths that are read first into L2; the preceding kernel may still change them there.
    __device__ void prefetch_lengths(const TileCoord& at) {
        for (const Segment& list : problem.segments)
            if (list.lengths) prefetch_to_l2(list.lengths + at.b * list.lengths_stride_b + at.s * list.lengths_stride_s);
    }

    // Publish the next tile; after the last one, a tile without blocks. Returns its number of blocks. The FIRST tile is
    // located before the preceding kernel, which may still write lengths, has ended.
    template <bool FIRST> __device__ int publish_next() {
        WorkTile work;
        bool more = range.more();
        int number = more ? range.number(problem) : 0;
        TileCoord at(problem, number);
        if (FIRST && !problem.starts && (problem.segments[0].lengths || problem.segments[1].lengths)) {
            prefetch_lengths(at);
            pdl_wait();
        }
        if (more) range.take(problem, work, number, at);
        int blocks = more ? work.last - work.first : 0;
        uint32 scheduled = SCHEDULE_AT + to.slot * SCHEDULED_TILE_BYTES;
        if (lane == 0) {
            sts32(scheduled + 4, blocks);
            if (blocks) describe(scheduled, work, at, blocks);
            scheduled_full[to.slot].arrive();
        }
        to.advance();
        return blocks;
    }

    __device__ void describe(uint32 scheduled, const WorkTile& work, const TileCoord& at, int blocks) {
        int blocks0 = blocks_of(work.lengths0);
        bool second = work.first >= blocks0, from_start = work.first == 0;
        uint32 flags =
            (work.whole() ? ScheduledTile::WHOLE : 0) | (from_start ? ScheduledTile::FROM_START : 0) | (second ? ScheduledTile::SECOND : 0);
        sts128(scheduled, {uint32(work.tile), uint32(blocks), uint32(min(HEADS, problem.heads - at.first_head)), flags});
        if (second) {
            describe_segment(scheduled + 16, problem.segments[1], at, work.lengths1, work.first - blocks0);
        } else {
            describe_segment(scheduled + 16, problem.segments[0], at, work.lengths0, work.first);
            describe_segment(scheduled + 32, problem.segments[1], at, work.lengths1, 0);
        }
        uint2 q = parted(problem.q + at.b * problem.q_stride_b + at.s * problem.q_stride_s + at.first_head * problem.q_stride_h);
        uint2 out = parted(problem.out + at.b * problem.out_stride_b + at.s * problem.out_stride_s + at.first_head * problem.out_stride_h);
        if (PARTS == 1 && !work.whole()) out = parted(problem.partial_out + int64(partial_slot(blockIdx.x, from_start)) * (HEADS * V_DIM));
        sts128(scheduled + 48, {q.x, q.y, out.x, out.y});
        uint2 lse = parted(problem.lse + at.b * problem.lse_stride_b + at.first_head * problem.lse_stride_h + at.s * problem.lse_stride_s);
        sts128(scheduled + 64, {lse.x, lse.y, uint32(at.first_head), 0});
    }

    __device__ void describe_segment(uint32 to, const Segment& list, const TileCoord& at, int length, int block) {
        uint2 from = parted(list.indices + at.b * list.indices_stride_b + at.s * list.indices_stride_s + block * BLOCK);
        sts128(to, {from.x, from.y, uint32(length - block * BLOCK), uint32(blocks_of(length) - block)});
    }

    // Compute the factors 1/l by which the PV warpgroups scale their sums, and the LSE. A lane has two neighbouring heads.
    __device__ void finish(ScheduledTile scheduled, int parity, uint32 phase) {
        uint4 summary = scheduled.summary(), lse_and_head = scheduled.lse_and_head();
        bool mine = 2 * lane < HEADS;
        int row = mine ? 2 * lane : 0, heads = summary.z;
        bool whole = PARTS > 1 || summary.w & ScheduledTile::WHOLE;  // a cluster combines its CTAs' results
        float sink[2] = {-infinity(), -infinity()};
        if (problem.attn_sink && whole)
#pragma unroll
            for (int r = 0; r < 2; ++r)
                if (row + r < heads) sink[r] = problem.attn_sink[lse_and_head.z + row + r];
        sums_full[parity].wait(phase);
        float2 top = lds_float2(TOP_AT + (parity * HEADS + row) * 4), sum = {};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            float2 of_warp = lds_float2(SUMS_AT + ((sums_slot(parity) * 4 + w) * HEADS + row) * 4);
            sum.x += of_warp.x, sum.y += of_warp.y;
        }
        float lse2[2] = {top.x + log2f(sum.x), top.y + log2f(sum.y)}, inv_sum[2] = {1.0f / sum.x, 1.0f / sum.y};
        bool empty[2] = {sum.x == 0.0f, sum.y == 0.0f};
        if (BF16_ROWS) check_scores(summary.x, parity, top, empty);
        if (PARTS > 1) find_weight(row, mine, lse2, sink, empty, inv_sum);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (PARTS == 1 && problem.attn_sink && whole) inv_sum[r] *= 1.0f / (1.0f + expf(sink[r] - lse2[r] * LN_2));
            if (empty[r]) inv_sum[r] = 0.0f;
        }
        if (mine) sts_float2(INV_SUM_AT + (parity * HEADS + row) * 4, make_float2(inv_sum[0], inv_sum[1]));
        inv_sum_full[parity].arrive_warp();
        if (!mine || blockIdx.x % PARTS) return;
        if (whole) {
            float* lse = reinterpret_cast<float*>(joined(lse_and_head.x, lse_and_head.y)) + row * problem.lse_stride_h;
#pragma unroll
            for (int r = 0; r < 2; ++r)
                if (row + r < heads) lse[r * problem.lse_stride_h] = empty[r] ? infinity() : lse2[r] * LN_2;
        } else {
            float* to = problem.partial_lse + partial_slot(blockIdx.x, summary.w & ScheduledTile::FROM_START ? 1 : 0) * HEADS + row;
#pragma unroll
            for (int r = 0; r < 2; ++r) to[r] = empty[r] ? -infinity() : lse2[r];
        }
    }

    // Flag a tile of bfloat16 rows if its scores are so large that float32 cannot resolve their differences, or all -inf.
    __device__ void check_scores(int tile, int parity, float2 top, const bool (&empty)[2]) {
        uint32 seen = lane < 4 ? lds32(SEEN_AT + (parity * 4 + lane) * 4) : 0;
        bool any = __any_sync(~0u, seen),
             large = !(fmaxf(fabsf(empty[0] ? 0.0f : top.x), fabsf(empty[1] ? 0.0f : top.y)) <= MAX_PRECISE_SCORE);
        if (__any_sync(~0u, large || (any && (empty[0] || empty[1]))) && lane == 0) problem.mark(tile);
    }

    // Weight of this CTA in the combined result of a cluster's tile. Replaces lse2 by the LSE over all CTAs.
    __device__ void find_weight(int row, bool mine, float (&lse2)[2], const float (&sink)[2], bool (&empty)[2], float (&inv_sum)[2]) {
        float own[2] = {lse2[0], lse2[1]}, top[2] = {NO_MAX, NO_MAX}, total[2] = {}, weight[2], sink_factor[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (empty[r]) own[r] = -infinity(), inv_sum[r] = 0.0f;
            empty[r] = false;
        }
        __syncwarp();
        cluster_wait();  // all CTAs have initialised their barriers
        int rank = blockIdx.x % PARTS;
        if (mine)
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
                store_async(cluster_address(LOG_SUMS_AT + (rank * HEADS + row) * 4, part),
                            uint2{__float_as_uint(own[0]), __float_as_uint(own[1])}, cluster_barrier(log_sums_full, part));
        log_sums_full.wait_for_cluster(0);
        float2 log_sums[PARTS];
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            log_sums[part] = lds_float2(LOG_SUMS_AT + (part * HEADS + row) * 4);
            top[0] = fmaxf(top[0], log_sums[part].x), top[1] = fmaxf(top[1], log_sums[part].y);
        }
#pragma unroll
        for (int part = 0; part < PARTS; ++part) total[0] += exp2f(log_sums[part].x - top[0]), total[1] += exp2f(log_sums[part].y - top[1]);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            empty[r] = total[r] == 0.0f;
            lse2[r] = top[r] + log2f(total[r]);
            weight[r] = empty[r] ? 0.0f : exp2f(own[r] - lse2[r]);
            sink_factor[r] = problem.attn_sink && !empty[r] ? 1.0f / (1.0f + expf(sink[r] - lse2[r] * LN_2)) : 1.0f;
        }
        if (!mine) return;
        sts_float2(WEIGHT_AT + row * 4, make_float2(weight[0], weight[1]));
        sts_float2(SINK_FACTOR_AT + row * 4, make_float2(sink_factor[0], sink_factor[1]));
    }

    __device__ void run() {
        PipelineState<SCHEDULED_TILES> ring;
        int parity = 0;
        uint32 phase = 0;
        int blocks = publish_next<true>();
        pdl_wait();
        for (int next; blocks; blocks = next) {
            next = ONE_TILE ? 0 : publish_next<false>();
            finish(ScheduledTile(ring), parity, phase);
            ring.advance();
            parity ^= 1;
            if (parity == 0) phase ^= 1;
        }
    }
};

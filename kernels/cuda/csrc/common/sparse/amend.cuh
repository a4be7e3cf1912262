// Amends results of tiles with RoPE values that float16 lacks. The fast kernel took them for LARGEST_F16, its sums are right
// otherwise: what is missing is weights times the differences, of a few keys, where to do the tile again would be all of them.
//
// A thread block has ROWS heads. It looks for those keys, then a warp takes a head, a lane 16 of its values; all in float64. A score
// of such a key may be so large that the fast kernel's weights, made in float32, are off. Then either all other keys are as nothing
// beside these, and results are made of these alone; or these are as nothing; or the tile must be done again.
//
// It runs seldom, and its instructions have to come from memory first: loops stay loops.
//
// Macros: LAYOUT, ALIGNED, TILE_HEADS (common/sparse/work.cuh).
#pragma once
#include "common/sparse/exact_mma_scores.cuh"

constexpr int MOST_LARGE = 64;  // keys; if there are more, the tile is done again
constexpr int KEYS_AT_ONCE = 3;  // keys of a thread that are looked at
constexpr uint32 TOO_LARGE_BF16 = 0x4780;  // bits of 2^16
constexpr float LARGEST_F16 = 65504.0f;
constexpr double LARGE_ERROR = 1.0 / (1 << 17);  // of a score as Hopper's products sum it up, of what RoPE adds to it
// Weights, base 2, that float16 has not to its own precision, and that still are something beside LARGEST_F16.
constexpr double WEIGHT_IS_NORMAL = -14.0, WEIGHT_IS_NOTHING = -27.0;

struct LargeKeys {
    Token tokens[MOST_LARGE];
    uint32 votes[KEYS_AT_ONCE][WARPS];
    uint32 others;  // float32 bits: what no value of the other keys is beyond
};

struct Amendment {
    const SparseProblem& problem;
    LargeKeys& keys;
    TileCoord at;
    int first_head, warp, lane, count = 0;

    __device__ Amendment(const SparseProblem& problem, LargeKeys& keys, TileCoord at, int first_head)
        : problem(problem), keys(keys), at(at), first_head(first_head), warp(threadIdx.x / 32), lane(threadIdx.x % 32) {}

    // The bits of the largest magnitude of a token's RoPE.
    __device__ static uint32 largest_rope(const Token& token) {
        uint32 most = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) most = __vmaxu2(most, largest_of_8(load16(token.row + LAYOUT::rope_offset + 16 * i)));
        return max(most & 0xffff, most >> 16);
    }

    __device__ static void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

    // In the order in which they are listed, so that sums are the same every time. A thread has a key, and what it reads of
    // KEYS_AT_ONCE of them is under way together.
    __device__ void find() {
        __syncthreads();  // the memory has been something else's
        if (threadIdx.x == 0) keys.others = 0;
        const ListEntries window(problem.lists[0], at.b, at.s), extra(problem.lists[1], at.b, at.s);
        float others = 0.0f;
#pragma unroll 1
        for (int first = 0; first < window.length + extra.length; first += KEYS_AT_ONCE * THREADS) {
            Token tokens[KEYS_AT_ONCE];
            int slots[KEYS_AT_ONCE];
#pragma unroll
            for (int i = 0; i < KEYS_AT_ONCE; ++i) {
                int entry = first + i * THREADS + int(threadIdx.x);
                slots[i] = entry < window.length ? window.slot(entry) : extra.slot(entry - window.length);
            }
#pragma unroll
            for (int i = 0; i < KEYS_AT_ONCE; ++i) {
                if (slots[i] < 0) continue;
                tokens[i] = first + i * THREADS + int(threadIdx.x) < window.length ? window.token(slots[i]) : extra.token(slots[i]);
                prefetch(tokens[i].row + LAYOUT::rope_offset), prefetch(tokens[i].row + LAYOUT::row_bytes - 1), prefetch(tokens[i].scales);
            }
            bool large[KEYS_AT_ONCE] = {};
#pragma unroll
            for (int i = 0; i < KEYS_AT_ONCE; ++i) {
                if (slots[i] >= 0) {
                    uint32 rope = largest_rope(tokens[i]);
                    large[i] = rope >= TOO_LARGE_BF16;
                    if (!large[i]) {
                        others = fmaxf(others, __uint_as_float(rope << 16));
                        for (int j = 0; j < SCALES; ++j) others = fmaxf(others, fabsf(scale_of(tokens[i], j)) * MAX_CODE);
                    }
                }
                uint32 votes = __ballot_sync(~0u, large[i]);
                if (lane == 0) keys.votes[i][warp] = votes;
            }
            __syncthreads();
#pragma unroll
            for (int i = 0; i < KEYS_AT_ONCE; ++i) {
                int place = count + __popc(keys.votes[i][warp] & ((1u << lane) - 1));
                for (int j = 0; j < WARPS; ++j) {
                    int of_warp = __popc(keys.votes[i][j]);
                    count += of_warp;
                    if (j < warp) place += of_warp;
                }
                if (large[i] && place < MOST_LARGE) keys.tokens[place] = tokens[i];
            }
            __syncthreads();
        }
        atomicMax(&keys.others, __float_as_uint(others));
        __syncthreads();
    }

    __device__ bf16* out(int head) const {
        return problem.out + at.b * problem.out_stride_b + at.s * problem.out_stride_s + head * problem.out_stride_h + 8 * lane;
    }

    // False where the head must be done again. The warp.
    __device__ bool amend(int head) {
        constexpr double LOG2 = 1.4426950408889634;
        const bf16* q = problem.q + at.b * problem.q_stride_b + at.s * problem.q_stride_s + head * problem.q_stride_h + 8 * lane;
        float of_q[2][8];
        double magnitudes = 0.0;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            unpack8(Raw8<bf16>{load16(q + 256 * i)}, of_q[i]);
            for (int j = 0; j < 8; ++j) magnitudes += fabsf(of_q[i][j]);
        }
        float lse = problem.lse[at.b * problem.lse_stride_b + head * problem.lse_stride_h + at.s * problem.lse_stride_s];
        double scale = to_double(problem.softmax_scale) * LOG2, log_sum = to_double(lse) * LOG2;
        // Scores of other keys are within this.
        double others = warp_sum(magnitudes) * fabs(scale) * to_double(__uint_as_float(keys.others));

        double top = -double(infinity()), least_top = top, total = 0.0;
        double sums[2][8] = {}, missing[8] = {};  // of these keys alone; of values 256 on, what the fast kernel left out
        bool weights_are_right = true;
#pragma unroll 1
        for (int key = 0; key < count; ++key) {
            double values[2][8], score = 0.0, doubt = 0.0;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                int first = 8 * lane + 256 * i;
                bool quantized = first < LAYOUT::quantized_dim;
                load_values(keys.tokens[key].row, quantized ? scale_of(keys.tokens[key], first / LAYOUT::scale_tile) : 1.0f, first, values[i]);
                for (int j = 0; j < 8; ++j) {
                    double product = to_double(of_q[i][j]) * values[i][j];
                    score += product;
                    if (!quantized) doubt += fabs(product);
                }
            }
            score = warp_sum(score) * scale, doubt = warp_sum(doubt) * fabs(scale) * LARGE_ERROR;
            double weight = score - log_sum;  // base 2
            weights_are_right &= (doubt <= PRECISE || weight + doubt < -BEATEN) && (weight <= WEIGHT_IS_NOTHING || weight >= WEIGHT_IS_NORMAL);
            least_top = fmax(least_top, score - doubt);
            double higher = fmax(top, score), rescale = exp2(top - base_of(higher));
            weight = exp2(score - base_of(higher));
            top = higher, total = total * rescale + weight;
            for (int j = 0; j < 8; ++j) {
                sums[0][j] = sums[0][j] * rescale + weight * values[0][j];
                sums[1][j] = sums[1][j] * rescale + weight * values[1][j];
                double had = fmax(fmin(values[1][j], double(LARGEST_F16)), -double(LARGEST_F16));
                missing[j] = missing[j] * rescale + weight * (values[1][j] - had);
            }
        }
        if (least_top > others + BEATEN) {
            double share = 0.0;
            if (lane == 0) share = finish_head(problem, at.b, at.s, head, true, top / LOG2, total);
            share = __shfl_sync(~0u, share, 0);
            for (int i = 0; i < 2; ++i) store(out(head) + 256 * i, sums[i], share);
            return true;
        }
        if (!weights_are_right) return false;
        double share = exp2(top - log_sum);
        if (problem.attn_sink) share /= 1.0 + exp(to_double(problem.attn_sink[head]) - to_double(lse));
        float before[8];
        bf16* to = out(head) + 256;
        unpack8(Raw8<bf16>{load16(to)}, before);
        bool right = true;
        for (int j = 0; j < 8; ++j) {
            if (256 + 8 * lane < LAYOUT::quantized_dim) missing[j] = 0.0;
            missing[j] = to_double(before[j]) + missing[j] * share;
            // Results had been rounded, which must not be more than what is left of them.
            right &= fabsf(before[j]) < 0.125f || fabs(missing[j]) >= 0.5 * fabsf(before[j]);
        }
        if (256 + 8 * lane >= LAYOUT::quantized_dim) store(to, missing, 1.0);
        return __all_sync(~0u, right);
    }

    __device__ static void store(bf16* to, const double (&values)[8], double share) {
        float results[8];
        for (int j = 0; j < 8; ++j) results[j] = to_float(values[j] * share);
        store_values8(to, results);
    }
};

// ROWS heads of a marked tile from first_head on; false where they must be done again. All threads of the block.
__device__ __noinline__ bool amend(const SparseProblem& problem, LargeKeys& keys, TileCoord at, int first_head) {
    if (DIM != V_DIM) return false;  // RoPE is in no result there
    Amendment amendment(problem, keys, at, first_head);
    amendment.find();
    bool right = amendment.count <= MOST_LARGE;
    if (right)
        for (int head = first_head + threadIdx.x / 32; head < min(first_head + ROWS, problem.heads); head += WARPS) right &= amendment.amend(head);
    return !__syncthreads_or(!right);
}

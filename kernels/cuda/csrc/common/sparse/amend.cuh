// Amends results of tiles with RoPE values that float16 lacks. The fast kernel took them for LARGEST_F16, its sums are right
// otherwise: what is missing is weights times the differences, of a few keys, where to do the tile again would be all of them.
//
// A thread block has ROWS heads. It looks for those keys, then a warp takes a head, a lane 16 of its values. A score of such a key
// may be so large that the fast kernel's weights, made in float32, are off. Then either all other keys are as nothing beside these,
// and results are made of these alone; or these are as nothing; or the tile must be done again.
//
// It runs seldom, and its instructions have to come from memory first: loops stay loops, and what only has to be float32 is.
//
// Macros: LAYOUT, ALIGNED, TILE_HEADS (common/sparse/work.cuh).
#pragma once
#include "common/sparse/exact_mma_scores.cuh"

constexpr int MOST_LARGE = 64;  // keys; if there are more, the tile is done again
constexpr int KEYS_AT_ONCE = 4;  // of a thread
constexpr uint32 TOO_LARGE_BF16 = 0x4780;  // bits of 2^16
constexpr float LARGEST_F16 = 65504.0f;
constexpr float LARGE_ERROR = 1.0f / (1 << 17);  // of a score as Hopper's products sum it up, of what RoPE adds to it
constexpr float SMALLER = 1.0f / (1 << 16);  // what values are multiplied by here, so that sums of some are finite
// Weights, base 2, that float16 has not to its own precision, and that still are something beside LARGEST_F16.
constexpr float WEIGHT_IS_NORMAL = -14.0f, WEIGHT_IS_NOTHING = -27.0f;

struct LargeKeys {
    int slots[KEYS_AT_ONCE][THREADS];
    Token tokens[MOST_LARGE];
    uint32 votes[WARPS];
    uint32 others, scales;  // what no RoPE value of the other keys is beyond, as bfloat16 bits, and no scale, as it lies
};

__device__ inline float sum_of_warp(float x) {
#pragma unroll
    for (int by = 16; by; by /= 2) x += __shfl_xor_sync(~0u, x, by);
    return x;
}

// 2^x, to float32's precision but in float64's range.
__device__ inline double power_of_two(double x) {
    if (!(x > -1000.0)) return 0.0;
    float whole = rintf(float(x));
    return to_double(exp2_approx(float(x - to_double(whole)))) * __hiloint2double((1023 + int(whole)) << 20, 0);
}

struct Amendment {
    const SparseProblem& problem;
    LargeKeys& keys;
    TileCoord at;
    int first_head, warp, lane, count = 0;

    __device__ Amendment(const SparseProblem& problem, LargeKeys& keys, TileCoord at, int first_head)
        : problem(problem), keys(keys), at(at), first_head(first_head), warp(threadIdx.x / 32), lane(threadIdx.x % 32) {}

    __device__ const bf16* q(int head) const {
        return problem.q + at.b * problem.q_stride_b + at.s * problem.q_stride_s + head * problem.q_stride_h + 8 * lane;
    }
    __device__ bf16* out(int head) const {
        return problem.out + at.b * problem.out_stride_b + at.s * problem.out_stride_s + head * problem.out_stride_h + 8 * lane;
    }
    __device__ float& lse(int head) const {
        return problem.lse[at.b * problem.lse_stride_b + head * problem.lse_stride_h + at.s * problem.lse_stride_s];
    }

    // The bits of the largest magnitude of a token's RoPE.
    __device__ static uint32 largest_rope(const Token& token) {
        uint32 most = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) most = __vmaxu2(most, largest_of_8(load16(token.row + LAYOUT::rope_offset + 16 * i)));
        return max(most & 0xffff, most >> 16);
    }

    __device__ Token token_of(int entry, int slot) const {
        const List& list = problem.lists[entry >= problem.lists[0].length(at.b, at.s)];
        return token_at<LAYOUT>(list.pages, list.page_stride, list.block_size, slot);
    }

    // In the order in which they are listed, so that sums are the same every time. A thread has a key, and what it reads of
    // KEYS_AT_ONCE of them is under way together.
    __device__ void find() {
        __syncthreads();  // the memory has been something else's
        if (threadIdx.x == 0) keys.others = keys.scales = 0;
        const ListEntries window(problem.lists[0], at.b, at.s), extra(problem.lists[1], at.b, at.s);
        int all = window.length + extra.length;
        uint32 others = 0, scales = 0;
#pragma unroll 1
        for (int first = threadIdx.x; first - int(threadIdx.x) < all; first += KEYS_AT_ONCE * THREADS) {
            int slots[KEYS_AT_ONCE];
#pragma unroll
            for (int i = 0; i < KEYS_AT_ONCE; ++i) {
                int entry = first + i * THREADS;
                slots[i] = entry < window.length ? window.slot(entry) : extra.slot(entry - window.length);
            }
#pragma unroll
            for (int i = 0; i < KEYS_AT_ONCE; ++i) keys.slots[i][threadIdx.x] = slots[i];
#pragma unroll 1
            for (int i = 0; i < KEYS_AT_ONCE; ++i) {
                int slot = keys.slots[i][threadIdx.x];
                if (slot < 0) continue;
                Token token = token_of(first + i * THREADS, slot);
                prefetch_to_l2(token.row + LAYOUT::rope_offset), prefetch_to_l2(token.row + LAYOUT::row_bytes - 1), prefetch_to_l2(token.scales);
            }
#pragma unroll 1
            for (int i = 0; i < KEYS_AT_ONCE && first - int(threadIdx.x) + i * THREADS < all; ++i) {
                int slot = keys.slots[i][threadIdx.x];
                bool large = false;
                Token token{};
                if (slot >= 0) {
                    token = token_of(first + i * THREADS, slot);
                    uint2 of_token = load8(token.scales);  // with a byte behind them
                    uint32 rope = largest_rope(token);
                    large = rope >= TOO_LARGE_BF16;
                    if (!large) {
                        others = max(others, rope);
#pragma unroll
                        for (int j = 0; j < SCALES; ++j)
                            scales = max(scales, (j < 4 ? of_token.x >> 8 * j : of_token.y >> 8 * (j - 4)) & 0xff);
                    }
                }
                if (!__syncthreads_or(large)) continue;
                uint32 votes = __ballot_sync(~0u, large);
                if (lane == 0) keys.votes[warp] = votes;
                __syncthreads();
                int place = count + __popc(votes & ((1u << lane) - 1));
#pragma unroll 1
                for (int j = 0; j < WARPS; ++j) {
                    int of_warp = __popc(keys.votes[j]);
                    count += of_warp;
                    if (j < warp) place += of_warp;
                }
                if (large && place < MOST_LARGE) keys.tokens[place] = token;
            }
        }
        others = __reduce_max_sync(~0u, others), scales = __reduce_max_sync(~0u, scales);
        if (lane == 0) atomicMax(&keys.others, others), atomicMax(&keys.scales, scales);
        __syncthreads();
    }

    __device__ static void load_slice(const Token& token, int first, float (&values)[8]) {
        if (first >= LAYOUT::quantized_dim) {
            unpack8(Raw8<bf16>{load16(token.row + LAYOUT::rope_offset + 2 * (first - LAYOUT::quantized_dim))}, values);
#pragma unroll
            for (int j = 0; j < 8; ++j) values[j] *= SMALLER;
        } else {
            dequantize8(load8(token.row + first), scale_of(token, first / LAYOUT::scale_tile) * SMALLER, values);
        }
    }

    // False where the head must be done again. The warp.
    __device__ bool amend(int head) {
        constexpr double LOG2 = 1.4426950408889634, LN2 = 0.6931471805599453;
        bool in_rope = 256 + 8 * lane >= LAYOUT::quantized_dim;
        float of_q[2][8], magnitudes = 0.0f;
#pragma unroll
        for (int i = 0; i < 2; ++i) unpack8(Raw8<bf16>{load16(q(head) + 256 * i)}, of_q[i]);
        uint4 results = *reinterpret_cast<const uint4*>(out(head) + 256);  // under way, as is this; written here, too, below
        double log_sum = to_double(lse(head)) * LOG2;
        float sink = problem.attn_sink ? problem.attn_sink[head] : -infinity();
#pragma unroll
        for (int i = 0; i < 16; ++i) magnitudes += fabsf(of_q[i / 8][i % 8]);
        double scale = to_double(problem.softmax_scale) * LOG2 / SMALLER;
        float per_product = fabsf(float(scale));
        // Scores of other keys are within this.
        float others = sum_of_warp(magnitudes) * per_product * SMALLER * fmaxf(__uint_as_float(keys.others << 16), ue8m0_scale(keys.scales) * MAX_CODE);

        double top = -double(infinity()), least_top = top;
        float total = 0.0f, sums[2][8] = {}, missing[8] = {};  // of these keys alone; of values 256 on, what the fast kernel left out
        bool weights_are_right = true;
#pragma unroll 1
        for (int key = 0; key < count; ++key) {
            Token token = keys.tokens[key];
            float values[2][8], ordinary = 0.0f, of_rope = 0.0f;
            load_slice(token, 8 * lane, values[0]), load_slice(token, 256 + 8 * lane, values[1]);
            double score = 0.0;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                ordinary += of_q[0][j] * values[0][j];
                score += to_double(of_q[1][j]) * to_double(values[1][j]);
                of_rope += fabsf(of_q[1][j] * values[1][j]);
            }
            score = warp_sum(score + to_double(ordinary)) * scale;
            float doubt = sum_of_warp(in_rope ? of_rope : 0.0f) * per_product * LARGE_ERROR;
            float beside_all = float(score - log_sum);  // its weight, base 2
            weights_are_right &= (doubt <= PRECISE || beside_all + doubt < -BEATEN) &&
                                 (beside_all <= WEIGHT_IS_NOTHING || beside_all >= WEIGHT_IS_NORMAL);
            least_top = fmax(least_top, score - to_double(doubt));
            bool is_top = !(score <= top);
            float other = exp2_approx(float(is_top ? top - score : score - top)), rescale = is_top ? other : 1.0f, weight = is_top ? 1.0f : other;
            top = is_top ? score : top, total = total * rescale + weight;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                float had = fmaxf(fminf(values[1][j], SMALLER * LARGEST_F16), -SMALLER * LARGEST_F16);
                sums[0][j] = sums[0][j] * rescale + weight * values[0][j];
                sums[1][j] = sums[1][j] * rescale + weight * values[1][j];
                missing[j] = missing[j] * rescale + weight * (values[1][j] - had);
            }
        }
        bool are_all = least_top > to_double(others + BEATEN);
        if (!are_all && !weights_are_right) return false;
        // A sink beside what the sums are relative to.
        float taken = exp2_approx(float(to_double(sink) * LOG2 - (are_all ? top : log_sum)));
        float x[8];
        if (are_all) {
            if (lane == 0) lse(head) = to_float((top + to_double(log2_approx(total))) * LN2);
            float share = 1.0f / (SMALLER * (total + taken));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int j = 0; j < 8; ++j) x[j] = sums[i][j] * share;
                store_values8(out(head) + 256 * i, x);
            }
            return true;
        }
        double share = power_of_two(top - log_sum) * to_double(1.0f / (SMALLER * (1.0f + taken)));
        bool right = true;
        float before[8];
        unpack8(Raw8<bf16>{results}, before);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            x[j] = to_float(to_double(before[j]) + to_double(missing[j]) * share);
            // Results had been rounded, which must not be more than what is left of them; of large ones, not as much again.
            bool is_large = fabsf(before[j]) > 8.0f && missing[j] != 0.0f;
            right &= fabsf(before[j]) < 0.125f || fabsf(x[j]) >= (is_large ? 2.0f : 0.5f) * fabsf(before[j]);
        }
        if (in_rope) store_values8(out(head) + 256, x);
        return __all_sync(~0u, right || !in_rope);
    }

    __device__ bool run() {
        int last = min(first_head + ROWS, problem.heads);
#pragma unroll 1
        for (int head = first_head + warp; head < last; head += WARPS)
            prefetch_to_l2(q(head)), prefetch_to_l2(q(head) + 256), prefetch_to_l2(out(head) + 256), prefetch_to_l2(&lse(head));
        find();
        if (count > MOST_LARGE) return false;
        bool right = true;
#pragma unroll 1
        for (int head = first_head + warp; head < last; head += WARPS) right &= amend(head);
        return !__syncthreads_or(!right);
    }
};

// ROWS heads of a marked tile from first_head on; false where they must be done again. All threads of the block.
__device__ inline bool amend(const SparseProblem& problem, LargeKeys& keys, TileCoord at, int first_head) {
    if constexpr (DIM != V_DIM || !LAYOUT::ue8m0) return false;  // RoPE is in no result there, or nobody asks for this
    else return Amendment(problem, keys, at, first_head).run();
}

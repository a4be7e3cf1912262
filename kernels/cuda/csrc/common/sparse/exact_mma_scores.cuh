// Scores of exact_mma.cuh and their error bounds.
#pragma once
#include "common/sparse/exact.cuh"
#include "sm80/mma.cuh"

constexpr int ROWS = 16;  // heads
constexpr int SLICE = 64;
constexpr int SLICES = DIM / SLICE, FP8_SLICES = LAYOUT::quantized_dim / SLICE;
constexpr int SCALES = LAYOUT::num_scales, SLICES_PER_SCALE = FP8_SLICES ? LAYOUT::scale_tile / SLICE : 1;
static_assert(V_DIM / WARPS == SLICE, "a warp adds one slice");

// float32 bits.
constexpr uint32 LARGE = (127u + 110) << 23, TINY = (127u - 100) << 23, NOT_FINITE = 0x7f800000;
constexpr float MAX_CODE = 448.0f;
// A slice's products are summed in float32, 16 at a time with the sum truncated after its last bit; then slices are summed.
constexpr float ERROR = 1.0f / (1 << 19);  // largest error, relative to the sum of magnitudes
constexpr float PRECISE = 1.0f / 1024.0f;  // largest error of a score, base 2, that needs no recomputation
constexpr float BEATEN = 40.0f;            // distance, base 2, below another score at which a weight is negligible

// Addresses of a block's keys, null for absent ones, and their scales.
struct Keys {
    const uint8* rows[BLOCK];
    alignas(8) float scales[SCALES + 1][BLOCK];
};

struct Wide {
    double scores[ROWS][BLOCK];                 // base 2
    float doubts[ROWS][BLOCK];                  // error bounds
    alignas(8) float weights[ROWS][BLOCK + 8];  // P
    alignas(8) bf16 q[ROWS][DIM + 4];
    float q_sums[ROWS][SLICES];  // sums of magnitudes of Q
    Keys keys[2];                // this block's and the next one's
    double top[ROWS];
    float total[ROWS], rescale[ROWS];
    int any, out_of_range;
};

__device__ inline void codes_to_bf16(uint32 bytes, uint32& low, uint32& high) {
    float x[4];
    e4m3x2_to_float(bytes & 0xffff, x[0], x[1]), e4m3x2_to_float(bytes >> 16, x[2], x[3]);
    low = pack(bf16{}, x[0], x[1]), high = pack(bf16{}, x[2], x[3]);
}

// Reduce over the 16 lanes of a head.
template <class T, class Combine> __device__ inline T over_head(T x, Combine combine) {
    for (int by = 8; by; by /= 2) x = combine(x, __shfl_xor_sync(~0u, x, by));
    return x;
}

// Column g of a product is a key; the lane holds its values 16 c .. 16 c + 15 of each slice.
struct WideScores {
    Wide& shared;
    const Keys& keys;
    int warp, lane, g, c;
    const uint8* row;
    float x[4], doubts[4];
    double exact[4];  // the part summed in float64

    __device__ WideScores(Wide& shared, const Keys& keys) : shared(shared), keys(keys) {
        warp = exact_thread() / 32, lane = exact_thread() % 32, g = lane / 4, c = lane % 4;
        row = keys.rows[8 * warp + g];
    }

    // This lane's 16 values of a slice as stored; e4m3 takes half the bytes.
    template <bool FP8> struct Raw { uint4 v[FP8 ? 1 : 2]; };
    template <bool FP8> __device__ Raw<FP8> load(int slice) const {
        Raw<FP8> raw{};
        if (!row || slice >= (FP8 ? FP8_SLICES : SLICES)) return raw;
        const uint8* from = FP8 ? row + SLICE * slice + 16 * c : row + LAYOUT::rope_offset + 2 * SLICE * (slice - FP8_SLICES) + 32 * c;
#pragma unroll
        for (int i = 0; i < (FP8 ? 1 : 2); ++i) raw.v[i] = load16(from + 16 * i);
        return raw;
    }

    // Scores of 8 keys per warp. `careful`: slices that are too coarse in float32 are summed in float64.
    __device__ void score(double scale, bool careful) {
        if (!__any_sync(~0u, row != nullptr)) return;
        float per_product = float(fabs(scale)) * ERROR;
        for (int i = 0; i < 4; ++i) x[i] = 0.0f, doubts[i] = 1e-30f, exact[i] = 0.0;
        add_slices(per_product, careful);
        for (int i = 0; i < 4; ++i) {
            int key = 8 * warp + 2 * c + i % 2;
            shared.scores[g + i / 2 * 8][key] = (to_double(x[i]) + exact[i]) * scale;
            shared.doubts[g + i / 2 * 8][key] = doubts[i] * per_product;
        }
    }

    // Slices in order, with the values of two slices in flight. The e4m3 and bfloat16 cases are separate loops without
    // a branch between them: dependent steps bound the time.
    __device__ void add_slices(float per_product, bool careful) {
        Raw<false> values = load<false>(FP8_SLICES);
        Raw<true> codes = load<true>(0), next = load<true>(1);
#pragma unroll 1
        for (int slice = FP8_SLICES; slice < SLICES; ++slice) {
            Raw<false> current = values;
            if (SLICES - FP8_SLICES > 1) values = load<false>(slice + 1);
            add<false>(current, slice, per_product, careful);
        }
#pragma unroll 1
        for (int slice = 0; slice < FP8_SLICES; ++slice) {
            add<true>(codes, slice, per_product, careful);
            codes = next, next = load<true>(slice + 2);
        }
    }

    template <bool FP8> __device__ void add(const Raw<FP8>& raw, int slice, float per_product, bool careful) {
        float first = 1.0f, second = 1.0f, of_row = 1.0f, first_most, second_most;
        if constexpr (FP8) {
            const float* scales = keys.scales[slice / SLICES_PER_SCALE] + 8 * warp;
            first = scales[2 * c], second = scales[2 * c + 1], of_row = scales[g];
            first_most = fabsf(first) * MAX_CODE, second_most = fabsf(second) * MAX_CODE;
            uint32 bits = __float_as_uint(of_row) & ~(1u << 31);
            if (bits < TINY && bits != 0 && (raw.v[0].x | raw.v[0].y | raw.v[0].z | raw.v[0].w) & 0x7f7f7f7f) shared.out_of_range = 1;
        } else {
            uint32 most = __vmaxu2(largest_of_8(raw.v[0]), largest_of_8(raw.v[1]));
            most = max(most & 0xffff, most >> 16) << 16;
            most = max(most, __shfl_xor_sync(~0u, most, 1));
            most = max(most, __shfl_xor_sync(~0u, most, 2));
            if (most > LARGE && most < NOT_FINITE) shared.out_of_range = 1;
            first_most = __uint_as_float(__shfl_sync(~0u, most, 8 * c)), second_most = __uint_as_float(__shfl_sync(~0u, most, 8 * c + 4));
        }
        // Products too small for float32 count as well.
        float low = shared.q_sums[g][slice] + 1e-30f, high = shared.q_sums[g + 8][slice] + 1e-30f;
        float more[4] = {low * first_most, low * second_most, high * first_most, high * second_most};
        if (careful) {
            float coarsest = fmaxf(fmaxf(more[0], more[1]), fmaxf(more[2], more[3]));
            bool all_precise = coarsest * per_product <= PRECISE / (2 * SLICES) && more[0] + more[1] + more[2] + more[3] < infinity();
            if (__any_sync(~0u, !all_precise)) {
                add_exactly<FP8>(raw, slice, of_row);
                return;
            }
        }
        float sums[4];
        multiply<FP8>(sums, raw, slice);
        x[0] += sums[0] * first, x[1] += sums[1] * second, x[2] += sums[2] * first, x[3] += sums[3] * second;
        for (int i = 0; i < 4; ++i) doubts[i] += more[i];
    }

    // sums = Q K^T of a slice, four values of each lane at a time, in storage order. Even and odd fours have their own
    // accumulators, so that fewer products depend on each other.
    template <bool FP8> __device__ void multiply(float (&sums)[4], const Raw<FP8>& raw, int slice) {
        const bf16* q = &shared.q[g][SLICE * slice + 16 * c];
        uint2 low[4], high[4];
        uint32 words[8];
#pragma unroll
        for (int j = 0; j < 4; ++j)
            low[j] = *reinterpret_cast<const uint2*>(q + 4 * j), high[j] = *reinterpret_cast<const uint2*>(q + 8 * (DIM + 4) + 4 * j);
        if constexpr (FP8) {
            codes_to_bf16(raw.v[0].x, words[0], words[1]), codes_to_bf16(raw.v[0].y, words[2], words[3]);
            codes_to_bf16(raw.v[0].z, words[4], words[5]), codes_to_bf16(raw.v[0].w, words[6], words[7]);
        } else {
            words[0] = raw.v[0].x, words[1] = raw.v[0].y, words[2] = raw.v[0].z, words[3] = raw.v[0].w;
            words[4] = raw.v[1].x, words[5] = raw.v[1].y, words[6] = raw.v[1].z, words[7] = raw.v[1].w;
        }
        float halves[2][4] = {};
#pragma unroll
        for (int j = 0; j < 4; ++j)
            mma(bf16{}, halves[j % 2], {low[j].x, high[j].x, low[j].y, high[j].y}, {words[2 * j], words[2 * j + 1]});
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] = halves[0][i] + halves[1][i];
    }

    // The same in float64, multiplied by `scale`.
    template <bool FP8> __device__ void add_exactly(const Raw<FP8>& raw, int slice, float scale) {
        const bf16* q = &shared.q[g][SLICE * slice + 16 * c];
        float values[16];
        float (&low)[8] = reinterpret_cast<float (&)[8]>(values[0]), (&high)[8] = reinterpret_cast<float (&)[8]>(values[8]);
        if constexpr (FP8) {
            dequantize8({raw.v[0].x, raw.v[0].y}, 1.0f, low), dequantize8({raw.v[0].z, raw.v[0].w}, 1.0f, high);
        } else {
            unpack8(Raw8<bf16>{raw.v[0]}, low), unpack8(Raw8<bf16>{raw.v[1]}, high);
        }
#pragma unroll
        for (int i = 0; i < 16; ++i)
            mma(exact, {value_of_q(q, i), value_of_q(q + 8 * (DIM + 4), i)}, to_double(values[i]) * to_double(scale));
    }
    __device__ static double value_of_q(const bf16* q, int i) { return to_double(to_float(q[i])); }

    // A score in float64. Called by a whole warp.
    __device__ static double in_float64(const Wide& shared, const Keys& keys, int row, int key) {
        double sum = 0.0;
        for (int first = 8 * (exact_thread() % 32); first < DIM; first += 8 * 32) {
            double values[8];
            load_values<LAYOUT>(keys.rows[key], keys.scales[min(first / LAYOUT::scale_tile, SCALES)][key], first, values);
            for (int i = 0; i < 8; ++i) sum += to_double(to_float(shared.q[row][first + i])) * values[i];
        }
        return warp_sum(sum);
    }
};

// Sparse MLA beyond float16's range: products in bfloat16, which has float32's range, and in float64 where they are too coarse.
//
// A CTA takes ROWS heads of one query token and some of its blocks of keys, one block at a time:
//
//     look up   addresses and scales of the keys of the next block                           4 threads per key
//     score     S = Q K^T and an error bound for each score, 8 keys per warp      exact_mma_scores.cuh
//     softmax   first recompute in float64 the scores that are too coarse and not negligible    16 threads per head
//     add       O += P V, 64 of the 512 values per warp. P is the sum of two bfloat16 values, high and low
//
// e4m3 values and RoPE are exact in bfloat16, hence K and V are exact; scales multiply the sums (for K) or P (for V) in
// float32. NaN and infinities give the results of the plain formula. Scales and values beyond LARGE, and e4m3 values under
// scales below TINY, are left to float64 (common/sparse/exact.cuh).
//
// Several CTAs may split the keys of the same heads. Each stores its partial result in memory, and the last one to finish
// combines them, in the order of the parts.
//
// It rarely runs, so its instructions come from memory first: loops are not unrolled.
//
// Macros: LAYOUT, ALIGNED.
#pragma once
#include "common/sparse/exact_mma_scores.cuh"

constexpr int MOST_PARTS = 64;  // that one CTA combines
constexpr int PART_BYTES = (4 * ROWS * V_DIM + 8 * ROWS + 4 * ROWS + 8 + 255) / 256 * 256;
constexpr int MANY = 16;  // coarse scores of a warp's two heads above which all are recomputed with `careful`

// Partial result of one of several parts.
struct alignas(256) Part {
    float sums[ROWS][V_DIM];
    double top[ROWS];
    float total[ROWS];
    int any, out_of_range;
};
static_assert(sizeof(Part) == PART_BYTES);

struct WideAttention {
    const SparseProblem& problem;
    Wide& shared;
    int b, s, first_head;
    int warp, g, c;
    double scale;  // to base 2
    float o[V_DIM / WARPS / 8][4];

    __device__ WideAttention(const SparseProblem& problem, Wide& shared, int b, int s, int first_head)
        : problem(problem), shared(shared), b(b), s(s), first_head(first_head) {
        warp = exact_thread() / 32, g = exact_thread() % 32 / 4, c = exact_thread() % 4;
        scale = to_double(problem.softmax_scale) * 1.4426950408889634;
    }

    // ---- Q, 16 threads a head

    __device__ void load_q() {
        int row = exact_thread() / 16, part = exact_thread() % 16;
        bool here = first_head + row < problem.heads;
        const bf16* q = problem.q + b * problem.q_stride_b + s * problem.q_stride_s + (first_head + row) * problem.q_stride_h;
        uint2 x[SLICES];
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) x[slice] = here ? load8(q + SLICE * slice + 4 * part) : uint2{};
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) {
            *reinterpret_cast<uint2*>(&shared.q[row][SLICE * slice + 4 * part]) = x[slice];
            float sum = fabsf(__uint_as_float(x[slice].x << 16)) + fabsf(__uint_as_float(x[slice].x & 0xffff0000)) +
                        fabsf(__uint_as_float(x[slice].y << 16)) + fabsf(__uint_as_float(x[slice].y & 0xffff0000));
            sum = over_head(sum, [](float x, float y) { return x + y; });
            if (part == 0) shared.q_sums[row][slice] = sum;
        }
        if (exact_thread() < ROWS) shared.top[exact_thread()] = -double(infinity()), shared.total[exact_thread()] = 0.0f;
        if (exact_thread() == 0) shared.any = shared.out_of_range = 0;
        for (int j = 0; j < SLICE / 8; ++j) o[j][0] = o[j][1] = o[j][2] = o[j][3] = 0.0f;
    }

    // ---- addresses of a block's keys: found in steps that wait for memory; other work runs between them

    struct LookUp {
        int slot = -1;
        const uint8* row = nullptr;
        uint32 scales[(SCALES + 3) / 4 + 1] = {};  // as stored in the cache
    };

    // SegmentEntries of block `block` of the token's lists.
    __device__ const Segment& list_of(int block, int& first) const {
        int blocks0 = blocks_of(problem.segments[0].length(b, s));
        first = BLOCK * (block < blocks0 ? block : block - blocks0);
        return problem.segments[block >= blocks0];
    }

    __device__ void find_slot(LookUp& to, int block) const {
        int first;
        const Segment& list = list_of(block, first);
        to.slot = SegmentEntries(list, b, s).slot(first + exact_thread() / 4);
    }

    __device__ void find_row(LookUp& to, int block) const {
        if (to.slot < 0) return;
        int first, part = exact_thread() % 4;
        const Segment& list = list_of(block, first);
        Token token = token_at<LAYOUT>(list.pages, list.page_stride, list.block_size, to.slot);
        to.row = token.row;
#pragma unroll
        for (int i = 0; i < (SCALES + 3) / 4; ++i)
            if (part + 4 * i < SCALES) to.scales[i] = LAYOUT::ue8m0 ? token.scales[part + 4 * i] : load4(token.scales + 4 * (part + 4 * i));
        for (int at = 128 * part; at < LAYOUT::row_bytes; at += 512) prefetch_to_l2(token.row + at);
    }

    __device__ void put(const LookUp& from, Keys& keys) {
        int key = exact_thread() / 4, part = exact_thread() % 4;
        if (part == 0) keys.rows[key] = from.row;
        if (from.slot >= 0) shared.any = 1;
#pragma unroll
        for (int i = 0; i < (SCALES + 3) / 4; ++i) {
            if (part + 4 * i >= SCALES) continue;
            float scale = LAYOUT::ue8m0 ? ue8m0_scale(uint8(from.scales[i])) : __uint_as_float(from.scales[i]);
            if (from.slot < 0) scale = 0.0f;
            keys.scales[part + 4 * i][key] = scale;
            uint32 magnitude = __float_as_uint(scale) & ~(1u << 31);
            if (magnitude > LARGE && magnitude < NOT_FINITE) shared.out_of_range = 1;
        }
    }

    // ---- weights, 16 threads a head: keys exact_thread() % 16 + 16 i

    // Smallest score of a head whose weight is not negligible. NaN is ignored.
    __device__ double least_score(const Keys& keys) const {
        int row = exact_thread() / 16;
        double least = shared.top[row];
#pragma unroll 1
        for (int key = exact_thread() % 16; key < BLOCK; key += 16)
            if (keys.rows[key]) least = fmax(least, shared.scores[row][key] - shared.doubts[row][key]);
        return over_head(least, [](double x, double y) { return fmax(x, y); }) - BEATEN;
    }

    // Bitmap of this thread's scores that are too coarse and not negligible. After a NaN in a head, no score of it
    // matters.
    __device__ uint32 coarse_scores(const Keys& keys) const {
        int row = exact_thread() / 16, part = exact_thread() % 16;
        uint32 coarse = 0;
#pragma unroll
        for (int i = 0; i < BLOCK / 16; ++i)
            if (keys.rows[part + 16 * i] && !(shared.doubts[row][part + 16 * i] <= PRECISE)) coarse |= 1 << i;
        if (!__any_sync(~0u, coarse)) return 0;  // the usual case
        double least = least_score(keys);
        if (shared.top[row] != shared.top[row]) return 0;
        for (int i = 0; i < BLOCK / 16; ++i)
            if (shared.scores[row][part + 16 * i] + shared.doubts[row][part + 16 * i] < least) coarse &= ~(1u << i);
        return coarse;
    }

    __device__ void score_again(const Keys& keys, uint32 coarse) {
        int lane = exact_thread() % 32;
#pragma unroll 1
        while (uint32 left = __ballot_sync(~0u, coarse)) {
            int of_lane = __ffs(left) - 1, i = __ffs(__shfl_sync(~0u, coarse, of_lane)) - 1;
            int row = 2 * warp + of_lane / 16, key = of_lane % 16 + 16 * i;
            double score = WideScores::in_float64(shared, keys, row, key) * scale;
            if (lane == of_lane) shared.scores[row][key] = score, coarse &= coarse - 1;
            if (score != score && lane / 16 == of_lane / 16) coarse = 0;
        }
        __syncwarp();
    }

    __device__ void softmax(const Keys& keys) {
        int row = exact_thread() / 16, part = exact_thread() % 16;
        double scores[BLOCK / 16], top = shared.top[row], new_top = top;
        auto higher = [](double x, double y) { return x != x || x > y ? x : y; };  // NaN wins
#pragma unroll
        for (int i = 0; i < BLOCK / 16; ++i) {
            scores[i] = keys.rows[part + 16 * i] ? shared.scores[row][part + 16 * i] : -double(infinity());
            new_top = higher(scores[i], new_top);
        }
        new_top = over_head(new_top, higher);
        double base = base_of(new_top);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < BLOCK / 16; ++i) {
            float weight = keys.rows[part + 16 * i] ? exp2_approx(float(scores[i] - base)) : 0.0f;
            shared.weights[row][part + 16 * i] = weight, sum += weight;
        }
        sum = over_head(sum, [](float x, float y) { return x + y; });
        __syncwarp();  // all lanes of the head have read what is overwritten now
        if (part == 0) {
            float rescale = exp2_approx(float(top - base));
            shared.rescale[row] = rescale, shared.top[row] = new_top;
            shared.total[row] = shared.total[row] * rescale + sum;
        }
    }

    __device__ static float2 pair_at(const float* p) { return *reinterpret_cast<const float2*>(p); }

    // ---- sums: column g of product j is value 8 g + j of this warp's 64

    // The 8 neighbouring values of this lane of four keys, as stored.
    template <bool FP8> struct Values { uint32 v[4][FP8 ? 2 : 4]; };
    template <bool FP8> __device__ Values<FP8> load_v(const Keys& keys, int first) const {
        Values<FP8> values{};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint8* row = keys.rows[first + 2 * c + i % 2 + i / 2 * 8];
            if (!row) continue;
            if constexpr (FP8) {
                uint2 v = load8(row + SLICE * warp + 8 * g);
                values.v[i][0] = v.x, values.v[i][1] = v.y;
            } else {
                uint4 v = load16(row + LAYOUT::rope_offset + 2 * SLICE * (warp - FP8_SLICES) + 16 * g);
                values.v[i][0] = v.x, values.v[i][1] = v.y, values.v[i][2] = v.z, values.v[i][3] = v.w;
            }
        }
        return values;
    }

    __device__ void add_products(const Keys& keys) {
        if (warp < FP8_SLICES) add_products<true>(keys);
        else add_products<false>(keys);
    }

    template <bool FP8> __device__ void add_products(const Keys& keys) {
        float low = shared.rescale[g], high = shared.rescale[g + 8];
        Values<FP8> values = load_v<FP8>(keys, 0);
#pragma unroll
        for (int j = 0; j < SLICE / 8; ++j) o[j][0] *= low, o[j][1] *= low, o[j][2] *= high, o[j][3] *= high;
#pragma unroll 1
        for (int first = 0; first < BLOCK; first += 16) {
            uint32 b[SLICE / 8][2], p[4], rest[4];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const auto &one = values.v[2 * half], &other = values.v[2 * half + 1];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if constexpr (FP8) {
                        codes_to_bf16(__byte_perm(one[i / 2], other[i / 2], i % 2 ? 0x7362 : 0x5140), b[2 * i][half], b[2 * i + 1][half]);
                    } else {
                        b[2 * i][half] = __byte_perm(one[i], other[i], 0x5410);
                        b[2 * i + 1][half] = __byte_perm(one[i], other[i], 0x7632);
                    }
                }
            }
            values = load_v<FP8>(keys, (first + 16) % BLOCK);  // the last load is unused
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int key = first + 2 * c + i / 2 * 8;
                float2 of_keys = pair_at(&shared.weights[g + i % 2 * 8][key]);
                float x = of_keys.x, y = of_keys.y;
                if constexpr (FP8) {
                    float2 scales = pair_at(&keys.scales[warp / SLICES_PER_SCALE][key]);
                    x *= scales.x, y *= scales.y;
                }
                p[i] = pack(bf16{}, x, y);
                rest[i] = pack(bf16{}, x - __uint_as_float(p[i] << 16), y - __uint_as_float(p[i] & 0xffff0000));
            }
#pragma unroll
            for (int j = 0; j < SLICE / 8; ++j) mma(bf16{}, o[j], p, b[j]);
#pragma unroll
            for (int j = 0; j < SLICE / 8; ++j) mma(bf16{}, o[j], rest, b[j]);
        }
    }

    // ---- the whole computation

    // Attend to blocks first .. last - 1 of the token's lists.
    __device__ void attend(int first, int last) {
        LookUp look_up;
        find_slot(look_up, first);
        exact_sync();  // the shared memory was in use for other data
        load_q();
        find_row(look_up, first);
        exact_sync();
        put(look_up, shared.keys[0]);
        exact_sync();
        bool careful = false;
#pragma unroll 1
        for (int block = first; block < last; ++block) {
            const Keys& keys = shared.keys[(block - first) % 2];
            bool more = block + 1 < last;
            LookUp next;
            if (more) find_slot(next, block + 1);
            uint32 coarse;
#pragma unroll 1
            for (;;) {
                WideScores(shared, keys).score(scale, careful);
                exact_sync();
                coarse = coarse_scores(keys);
                int count = __reduce_add_sync(~0u, __popc(coarse));
                if (!exact_any(count > MANY) || careful) break;
                careful = true;
            }
            if (more) find_row(next, block + 1);
            score_again(keys, coarse);
            softmax(keys);
            if (more) put(next, shared.keys[(block + 1 - first) % 2]);
            exact_sync();
            add_products(keys);
        }
        exact_sync();
    }

    // First of this lane's 8 neighbouring values (4 lanes hold a row's 64), of head g + 8 r.
    __device__ int place(int e) const { return SLICE * warp + 8 * (2 * c + e); }

    // Write the results in `shared` and `o`. False if float64 has to recompute them.
    __device__ bool store() {
        if (shared.out_of_range) return false;
        int row = exact_thread();
        if (row < ROWS && first_head + row < problem.heads)
            shared.rescale[row] =
                float(store_lse(problem, b, s, first_head + row, shared.any, shared.top[row] * 0.6931471805599453, shared.total[row]));
        exact_sync();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int r = i / 2, e = i % 2, head = first_head + g + 8 * r;
            if (head >= problem.heads) continue;
            float x[8], inv_sum = shared.rescale[g + 8 * r];
#pragma unroll
            for (int j = 0; j < 8; ++j) x[j] = mul(o[j][2 * r + e], inv_sum);
            store_values8(problem.out + b * problem.out_stride_b + s * problem.out_stride_s + head * problem.out_stride_h + place(e), x);
        }
        return true;
    }

    __device__ void leave(Part& part) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int r = i / 2, e = i % 2;
            float4* to = reinterpret_cast<float4*>(part.sums[g + 8 * r] + place(e));
            to[0] = make_float4(o[0][2 * r + e], o[1][2 * r + e], o[2][2 * r + e], o[3][2 * r + e]);
            to[1] = make_float4(o[4][2 * r + e], o[5][2 * r + e], o[6][2 * r + e], o[7][2 * r + e]);
        }
        if (exact_thread() < ROWS)
            part.top[exact_thread()] = shared.top[exact_thread()], part.total[exact_thread()] = shared.total[exact_thread()];
        if (exact_thread() == 0) part.any = shared.any, part.out_of_range = shared.out_of_range;
    }

    // Combine the partial results of `count` parts. The parts' weights take the place of the keys' weights.
    __device__ void gather(const Part* parts, int count) {
        exact_sync();
        int row = exact_thread() / 16, lane = exact_thread() % 16;
        double tops[MOST_PARTS / 16], top = -double(infinity());
        auto higher = [](double x, double y) { return x != x || x > y ? x : y; };  // NaN wins
#pragma unroll
        for (int i = 0; i < MOST_PARTS / 16; ++i) {
            tops[i] = lane + 16 * i < count ? parts[lane + 16 * i].top[row] : -double(infinity());
            top = higher(tops[i], top);
        }
        top = over_head(top, higher);
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < MOST_PARTS / 16; ++i) {
            if (lane + 16 * i >= count) continue;
            float weight = exp2_approx(float(tops[i] - base_of(top)));
            shared.weights[row][lane + 16 * i] = weight, total += weight * parts[lane + 16 * i].total[row];
        }
        total = over_head(total, [](float x, float y) { return x + y; });
        if (lane == 0) shared.top[row] = top, shared.total[row] = total;
        bool any = false, out_of_range = false;
        if (exact_thread() < count) any = parts[exact_thread()].any, out_of_range = parts[exact_thread()].out_of_range;
        any = exact_any(any), out_of_range = exact_any(out_of_range);
        if (exact_thread() == 0) shared.any = any, shared.out_of_range = out_of_range;
        exact_sync();
#pragma unroll
        for (int j = 0; j < 8; ++j) o[j][0] = o[j][1] = o[j][2] = o[j][3] = 0.0f;
#pragma unroll 2
        for (int part = 0; part < count; ++part) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int r = i / 2, e = i % 2;
                float weight = shared.weights[g + 8 * r][part];
                const float4* from = reinterpret_cast<const float4*>(parts[part].sums[g + 8 * r] + place(e));
                float4 x = from[0], y = from[1];
                o[0][2 * r + e] += weight * x.x, o[1][2 * r + e] += weight * x.y, o[2][2 * r + e] += weight * x.z,
                    o[3][2 * r + e] += weight * x.w;
                o[4][2 * r + e] += weight * y.x, o[5][2 * r + e] += weight * y.y, o[6][2 * r + e] += weight * y.z,
                    o[7][2 * r + e] += weight * y.w;
            }
        }
    }
};

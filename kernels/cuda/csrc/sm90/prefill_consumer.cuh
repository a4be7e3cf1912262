// Base of the consumers of sm90/prefill/ and sm90/prefill_fp8/: softmax state, sums, and the loop over tiles. Include
// it after the memory.cuh of the kernel.
#pragma once
#include "sm90/gathered_rows.cuh"

// Softmax state of a row, base 2.
struct Row {
    float reference, highest;
    float total;  // of a consumer's own weights
};

// A consumer scores every other block, and computes half of the values of the result, of all blocks. Lane 4 g + c of warp w has rows
// (heads) 16 w + g + 8 r of products.
struct PrefillConsumer {
    const SparseProblem& problem;
    int warp, lane;
    int head;  // 16 warp + lane / 4
    float low[64], high[64];  // sums of 128 values each
    Row rows[2];

    __device__ explicit PrefillConsumer(const SparseProblem& p) : problem(p), warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32) {}

    __device__ void begin() {
#pragma unroll
        for (int i = 0; i < 64; ++i) low[i] = high[i] = 0.0f;
        rows[0] = rows[1] = {-infinity(), -infinity(), 0.0f};
    }

    // Raise the references to `now`, and rescale the sums of earlier blocks.
    __device__ void raise_to(const float (&raised)[2]) {
        if (!__any_sync(~0u, raised[0] != rows[0].reference || raised[1] != rows[1].reference)) return;
        float rescale[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            rescale[r] = raised[r] == rows[r].reference ? 1.0f : exp2_approx(rows[r].reference - raised[r]);
            rows[r].reference = raised[r];
            rows[r].total *= rescale[r];
        }
#pragma unroll
        for (int i = 0; i < 64; ++i) low[i] *= rescale[i / 2 % 2], high[i] *= rescale[i / 2 % 2];
    }

    // Publish the sums and maxima of this consumer's scores of a tile to the other consumer. REDUCES: the maxima are
    // reduced over four lanes first.
    template <int CONSUMER, bool REDUCES> __device__ void publish_totals(uint32 tiles) {
        uint32 slot = 2 * (tiles % 2) + CONSUMER;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            Row& row = rows[r];
            row.total = quad_sum(row.total);
            if (REDUCES) {
                row.highest = quad_max(row.highest);
            }
            if (lane % 4 == 0) sts_float2(TOTALS_AT + slot * (HEADS * 8) + 8 * head + 64 * r, {row.total, row.highest});
        }
        totals_ready[slot].arrive_warp();
    }

    // The tiles of this CTA, by a consumer that has
    //     take_first(n, end, tiles)      process the first blocks of a tile, which has blocks [n, end) of the CTA's; returns the next one
    //     take<false>({n, tiles, last})  process a later block
    //     add_last_of_other(n, tiles)    add the tile's last block, which the other consumer scored
    //     publish(tiles), finish(tile, tiles), end(), trace_tile(tiles)
    // ROLLED: of store_nothing. Length: the type, int or uint32, as which lanes compare lengths.
    template <int CONSUMER, bool ROLLED, class Length, class Consumer> __device__ __forceinline__ static void process_tiles(
        Consumer& consumer) {
        const SparseProblem& problem = consumer.problem;
        uint32 n = 0, tiles = 0;
        int tile = blockIdx.x, tile_before = 0, next_length = length_of_tile(problem, tile);
        for (;;) {
            int length =
                __reduce_max_sync(~0u, Length(next_length));  // equal in all lanes; the reduction makes it uniform for the compiler
            next_length = length_of_tile(problem, tile + gridDim.x);
            bool more = tile < problem.tiles();
            if (more && !length) {
                store_nothing<ROLLED>(problem, tile, CONSUMER);
                tile += gridDim.x;
                continue;
            }
            if (n) {
                if (n % 2 == CONSUMER) consumer.add_last_of_other(n - 1, tiles - 1);
                consumer.finish(tile_before, tiles - 1);
            }
            if (!more) return consumer.end();
            consumer.trace_tile(tiles);
            uint32 end = n + blocks_of(length);
            warpgroup_sync(2 + CONSUMER);  // otherwise the compiler treats the following code as divergent, and serialises the products
            consumer.begin();
            for (uint32 own = consumer.take_first(n, end, tiles); own < end; own += 2)
                consumer.template take<false>({own, tiles, own + 2 >= end});
            if ((end - 1) % 2 == CONSUMER) consumer.publish(tiles);
            tile_before = tile, n = end, ++tiles, tile += gridDim.x;
        }
    }
};

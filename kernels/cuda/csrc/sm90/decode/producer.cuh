// The producer warps of sm90/decode/decode.cu.
#pragma once
#include "sm90/decode/memory.cuh"

__device__ uint4 absent_scales[2];  // zeros, read for absent tokens

// The token in a slot of a list's cache; the row of an absent token is null.
template <class Layout> __device__ inline Token token_in(const Segment& list, int slot) {
    if (uint32(slot) >= uint32(list.num_slots)) return {nullptr, reinterpret_cast<uint8*>(absent_scales)};
    int page = list.page_of(slot);
    int row = slot - page * list.block_size;
    uint8* base = list.pages + page * list.page_stride;
    return {base + row * Layout::row_bytes,
            base + Layout::scale_start + list.block_size * Layout::scale_start_per_token + row * Layout::scale_stride};
}

// Whether float16 can represent the scale with these float32 bits precisely. Powers of two may be subnormal in float16,
// and negligible scales may become zero.
__device__ inline bool fits_f16(uint32 bits) {
    uint32 exponent = bits >> 23, least = bits & 0x7fffff ? F16_NORMAL : MIN_SCALE;
    return (exponent >= least && exponent <= MAX_SCALE) || exponent <= TINY_SCALE;
}

// A warp's iterator over the indices of all blocks. Lane i has token i of each half of a block.
struct BlockCursor {
    const SparseProblem& problem;
    int lane;
    PipelineState<SCHEDULED_TILES> ring;
    // The block to gather next: address of this lane's indices, number of indices left in the list from there, blocks left
    // in the list and in the tile.
    const int* cursor;
    int tile, left, list_blocks, tile_blocks;
    bool second;

    __device__ BlockCursor(const SparseProblem& p) : problem(p), lane(threadIdx.x % 32) {
        open_item();
        pdl_wait();
    }

    __device__ bool more() const { return tile_blocks != 0; }

    __device__ void open_item() {
        ScheduledTile scheduled(ring);
        uint4 summary = scheduled.summary();
        tile = summary.x, tile_blocks = summary.y, second = summary.w & ScheduledTile::SECOND;
        if (more()) open_segment(scheduled.list(0));
    }

    __device__ void open_segment(uint4 list) {
        cursor = reinterpret_cast<const int*>(joined(list.x, list.y)) + lane;
        left = int(list.z) - lane, list_blocks = list.w;
    }

    // Volatile, so that the compiler does not move the load to the use of the index.
    __device__ int fetch_index(int half) {
        int index = -1;
        if (left > HALF * half) asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(index) : "l"(cursor + HALF * half));
        return index;
    }

    __device__ void next_block() {
        if (--tile_blocks == 0) {
            if (ONE_TILE) return;
            ring.advance();
            open_item();
        } else if (--list_blocks == 0 && !second) {
            second = true;
            open_segment(ScheduledTile(ring).list(1));
        } else {
            cursor += BLOCK, left -= BLOCK;
        }
    }
};

// Copy 16 bytes of a row, or write zeros without a read where `size` is 0. (Reading zeros from global memory for absent
// tokens made blocks with few keys slower than full ones.) Unlike copy_async, this does not request whole L2 lines,
// because rows end within a line.
__device__ inline void copy_of_row(uint32 to, const uint8* from, int size) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(own(to)), "l"(from), "r"(size) : "memory");
}

// Start copying half a block of rows into a slot: BYTES of quantised values of each row, to slice FIRST and following,
// and its RoPE values. 4 lanes copy a row, 8 rows at a time. Lane i has the address of row i.
template <int BYTES, int FIRST = 0> __device__ inline void copy_rows(int slot, int half, int lane, uint64 address) {
    int first = lane / 4, part = lane % 4;  // row of 8; 16-byte part of each 64 bytes of a row
    uint32 raw = RAW_AT + (2 * slot + half) * (HALF * RAW_BYTES) + raw_offset(first, part);
    uint32 rope = ROPE_AT + (2 * slot + half) * (HALF * 128) + permuted(first) * 128 + ((part ^ permuted(first)) << 4);
#pragma unroll
    for (int i = 0; i < HALF / 8; ++i) {  // row t + 8 is 8 positions after row t
        uint64 row = __shfl_sync(~0u, address, first + 8 * i);
        const uint8* from = reinterpret_cast<const uint8*>(row) + 16 * part;
        int size = row ? 16 : 0;
#pragma unroll
        for (int slice = 0; slice < BYTES / 64; ++slice)
            copy_of_row(slice_of(raw, FIRST + slice, first) + i * 8 * RAW_BYTES, from + 64 * slice, size);
        if constexpr (TAIL) {
            copy_of_row(rope + i * 1024, from + LAYOUT::rope_offset, size);
            copy_of_row((rope ^ 64) + i * 1024, from + LAYOUT::rope_offset + 64, size);
        }
    }
}

// A warp copies one half of each block into the ring. The copies arrive at the barrier when they have landed, so the
// warp does not wait for them.
struct RowProducer {
    BlockCursor upcoming;
    int half;

    __device__ RowProducer(const SparseProblem& problem, int h) : upcoming(problem), half(h) {}

    template <class Layout> __device__ void gather(int slot, Token token) {
        uint64 address = reinterpret_cast<uint64>(token.row);
        if constexpr (Layout::e2m1_values) {
            copy_rows<Layout::quantized_bytes, SLICES / 2>(slot, half, upcoming.lane, address);
            copy_scales<Layout>(slot, token);
            raw_landed[slot].arrive_after_copies();
        } else {
            copy_rows<Layout::quantized_bytes>(slot, half, upcoming.lane, address);
            // No warp waits for this phase of raw_landed, but it must complete before the phase of raw_full; otherwise
            // the next warp that waits for the slot would see it.
            if (EXPANDS && upcoming.lane == 0) raw_landed[slot].arrive(32);
#pragma unroll
            for (int i = 0; i < COPY_ARRIVALS; ++i) raw_full[slot].arrive_after_copies();
        }
    }

    // Copy the scales of FP4 rows to the start of their raw rows.
    template <class Layout> __device__ void copy_scales(int slot, Token token) {
        uint32 rows = RAW_AT + (2 * slot + half) * (HALF * RAW_BYTES);
#pragma unroll
        for (int i = 0; i < Layout::scale_bytes / 16; ++i)
            copy_of_row(rows + raw_offset(upcoming.lane, i), token.scales + 16 * i, token.row ? 16 : 0);
    }

    __device__ void run() {
        PipelineState<RING> at;
        int index = upcoming.more() ? upcoming.fetch_index(half) : 0;
        while (upcoming.more()) {
            bool second = upcoming.second;
            const Segment& list = upcoming.problem.segments[second];
            Token token = EXPANDS && second ? token_in<EXTRA_LAYOUT>(list, index) : token_in<LAYOUT>(list, index);
            // The next tile may not be scheduled yet, so the last block of a tile is copied before the next tile is
            // opened.
            bool last = upcoming.tile_blocks == 1;
            if (!last) upcoming.next_block(), index = upcoming.fetch_index(half);
            raw_empty[at.slot][half].wait(at.phase ^ 1);
            if (EXPANDS && second) gather<EXTRA_LAYOUT>(at.slot, token);
            else gather<LAYOUT>(at.slot, token);
            if (last) {
                upcoming.next_block();
                if (upcoming.more()) index = upcoming.fetch_index(half);
            }
            at.advance();
        }
    }
};

// Producer of bfloat16 rows: each of three warps copies a third of the tiles of every row.
struct TileProducer {
    static constexpr int TILES = (Q_SLICES + ROW_PRODUCERS - 1) / ROW_PRODUCERS;

    BlockCursor upcoming;
    int warp;

    __device__ TileProducer(const SparseProblem& problem, int w) : upcoming(problem), warp(w) {}

    // Start copying 16 rows, from row `first` of a half on.
    __device__ void copy(int slot, int half, int first, uint64 address) {
        int row_of_8 = upcoming.lane / 4, part = upcoming.lane % 4, n = permuted(row_of_8);
        uint32 to = ROPE_AT + slot * TAIL_BYTES + (half * HALF + first + n) * 128 + ((part ^ n) << 4);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint64 row = __shfl_sync(~0u, address, first + 8 * i + row_of_8);
            const uint8* from = reinterpret_cast<const uint8*>(row) + 16 * part + warp * (TILES * 128);
            int size = row ? 16 : 0;
#pragma unroll
            for (int j = 0; j < TILES; ++j) {
                if (Q_SLICES % ROW_PRODUCERS && warp * TILES + j >= Q_SLICES) break;
                uint32 at = to + (warp * TILES + j) * (2 * HALF * 128) + i * 1024;
                copy_of_row(at, from + 128 * j, size), copy_of_row(at ^ 64, from + 128 * j + 64, size);
            }
        }
    }

    // A bit for each position of a half, for QK-softmax.
    __device__ void store_presence(int half_block, bool present) {
        int n = upcoming.lane;
        uint32 bits = __ballot_sync(~0u, __shfl_sync(~0u, int(present), (n & 16) + token_at_permuted(n & 15)));
        if (n == 0) sts32(BIAS_AT + half_block * 4, bits);
    }

    __device__ void run() {
        PipelineState<RING> at;
        int index[2] = {upcoming.more() ? upcoming.fetch_index(0) : 0, upcoming.more() ? upcoming.fetch_index(1) : 0};
        while (upcoming.more()) {
            const Segment& list = upcoming.problem.segments[upcoming.second];
            uint64 rows[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) rows[half] = reinterpret_cast<uint64>(token_in<LAYOUT>(list, index[half]).row);
            bool last = upcoming.tile_blocks == 1;  // as in RowProducer::run
            if (!last) upcoming.next_block(), index[0] = upcoming.fetch_index(0), index[1] = upcoming.fetch_index(1);
#pragma unroll
            for (int part = 0; part < FREED_PARTS; ++part) {
                int half = part / 2;
                raw_empty[at.slot][part].wait(at.phase ^ 1);
                copy(at.slot, half, part % 2 * 16, rows[half]);
                if (warp == 0 && part % 2) store_presence(2 * at.slot + half, rows[half]);
            }
            raw_full[at.slot].arrive_after_copies();
            if (warp == 0) raw_full[at.slot].arrive_warp();
            if (last) {
                upcoming.next_block();
                if (upcoming.more()) index[0] = upcoming.fetch_index(0), index[1] = upcoming.fetch_index(1);
            }
            at.advance();
        }
    }
};

// The scale warp loads the tokens' scales a block ahead, stores them as float16, and writes the bias that masks absent tokens.
// Scales of FP4 rows are copied and converted with the rows.
struct ScaleProducer {
    BlockCursor upcoming;

    // A token's scales, whose load is in flight.
    struct Pending {
        uint4 scales;
        bool present, packed;
    };

    __device__ ScaleProducer(const SparseProblem& problem) : upcoming(problem) {}

    __device__ Pending fetch(int slot) {
        const Segment& list = upcoming.problem.segments[upcoming.second];
        bool packed = EXPANDS && (LAYOUT::e2m1_values || upcoming.second);
        Pending pending{{}, uint32(slot) < uint32(list.num_slots), packed};
        if (!packed) load(pending.scales, token_in<LAYOUT>(list, slot).scales);
        return pending;
    }

    __device__ static void load(uint4& to, const uint8* scales) {
        if (LAYOUT::scale_bytes == 8) {
            asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(to.x), "=r"(to.y) : "l"(scales));
        } else {
            asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w) : "l"(scales));
        }
    }

    // Store a token's factors from `at` on. Returns whether float16 can represent all scales.
    __device__ static bool store(uint32 at, uint4 scales) {
        constexpr int SHARED = BF16_ROWS ? 1 : LAYOUT::scale_tile / FACTOR_TILE;  // number of factors with the same scale
        uint32 words[4] = {scales.x, scales.y, scales.z, scales.w};
        bool all = true;
        if constexpr (!LAYOUT::e2m1_values && !BF16_ROWS)
#pragma unroll
            for (int i = 0; i < FACTORS; ++i) {
                int scale = i / SHARED;
                uint32 bits = LAYOUT::ue8m0 ? (words[scale / 4] >> 8 * (scale % 4) & 0xff) << 23 : words[scale];
                sts16(at + i * FACTOR_STRIDE, pack(f16{}, __uint_as_float(bits), 0.0f));
                all &= fits_f16(bits);
            }
        return all;
    }

    // Store the factors and the bias. Returns whether float16 cannot represent one of the scales.
    __device__ bool publish(int half_block, const Pending& pending) {
        int lane = upcoming.lane, n = (lane & 16) + permuted(lane & 15);
        int b = n & 1, c = n >> 1 & 3, h = n >> 3 & 1;
        uint32 at = FACTOR_AT + half_block * FACTORS_BYTES + (lane & 16) * 2 + c * 8 + (b + 2 * h) * 2;
        bool all = pending.packed || store(at, pending.scales);
        sts_float(BIAS_AT + (half_block * HALF + n) * 4, pending.present ? 0.0f : -infinity());
        return pending.present && !all;
    }

    __device__ void run() {
        PipelineState<RING> at;
        int index[2] = {upcoming.more() ? upcoming.fetch_index(0) : 0, upcoming.more() ? upcoming.fetch_index(1) : 0};
        while (upcoming.more()) {
            int tile = upcoming.tile;
            Pending pending[2] = {fetch(index[0]), fetch(index[1])};
            bool last = upcoming.tile_blocks == 1;  // as in RowProducer::run
            if (!last) upcoming.next_block(), index[0] = upcoming.fetch_index(0), index[1] = upcoming.fetch_index(1);
            bool lacks = false;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                raw_empty[at.slot][half].wait(at.phase ^ 1);
                lacks |= publish(2 * at.slot + half, pending[half]);
            }
            raw_full[at.slot].arrive_warp();
            if (lacks) upcoming.problem.mark(tile);
            if (last) {
                upcoming.next_block();
                if (upcoming.more()) index[0] = upcoming.fetch_index(0), index[1] = upcoming.fetch_index(1);
            }
            at.advance();
        }
    }
};

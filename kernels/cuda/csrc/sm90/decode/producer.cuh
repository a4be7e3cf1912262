// The producer warps of sm90/decode/decode.cu.
#pragma once
#include "sm90/decode/memory.cuh"

__device__ uint4 absent_scales[2];  // zeros, read for absent tokens

// The token in a slot of a list's cache; the row of an absent token is null.
template <class Layout> __device__ inline Token token_in(const Segment& list, int slot) {
    if (uint32(slot) >= uint32(list.num_slots)) return {nullptr, reinterpret_cast<uint8*>(absent_scales)};
    int page = list.block_shift >= 0 ? slot >> list.block_shift : int(uint32(slot) / uint32(list.block_size));
    int row = slot - page * list.block_size;
    uint8* base = list.pages + page * list.page_stride;
    return {base + row * Layout::row_bytes,
            base + Layout::scale_start + list.block_size * Layout::scale_start_per_token + row * Layout::scale_stride};
}

// Whether float16 can represent the scale with these float32 bits to float16's precision: powers of two may be subnormal
// there, and negligible scales may become zero.
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

    // Volatile, or the compiler would move the load to where the index is used.
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

// Copy 16 bytes of a row, or zeros where `size` is 0: nothing is read then. (When all CTAs read the same zeros in global memory
// for absent tokens, blocks with few keys were slower than full ones.) Unlike copy_async, this requests no whole L2 lines,
// because rows end within a line.
__device__ inline void copy_of_row(uint32 to, const uint8* from, int size) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(own(to)), "l"(from), "r"(size) : "memory");
}

// Start copying half a block of rows into a slot, BYTES of quantised values and RoPE of each: 4 lanes a row, 8 rows at a time.
// Lane i has the address of row i.
template <int BYTES> __device__ inline void copy_rows(int slot, int half, int lane, uint64 address) {
    int first = lane / 4, part = lane % 4;  // row of 8; part of 16 bytes, of 4 in each 64 of a row
    uint32 raw = RAW_AT + (2 * slot + half) * (HALF * RAW_BYTES) + raw_offset(first, part);
    uint32 rope = ROPE_AT + (2 * slot + half) * (HALF * 128) + permuted(first) * 128 + ((part ^ permuted(first)) << 4);
#pragma unroll
    for (int i = 0; i < HALF / 8; ++i) {  // rows t and t + 8 are 8 positions apart
        uint64 row = __shfl_sync(~0u, address, first + 8 * i);
        const uint8* from = reinterpret_cast<const uint8*>(row) + 16 * part;
        int size = row ? 16 : 0;
#pragma unroll
        for (int slice = 0; slice < BYTES / 64; ++slice)
            copy_of_row(slice_of(raw, slice, first) + i * 8 * RAW_BYTES, from + 64 * slice, size);
        if constexpr (TAIL) {
            copy_of_row(rope + i * 1024, from + LAYOUT::rope_offset, size);
            copy_of_row((rope ^ 64) + i * 1024, from + LAYOUT::rope_offset + 64, size);
        }
    }
}

// A warp copies one half of each block into the ring. The copies arrive at the barrier themselves, so the warp does not wait for
// them.
struct RowProducer {
    BlockCursor upcoming;
    int half;

    __device__ RowProducer(const SparseProblem& problem, int h) : upcoming(problem), half(h) {}

    __device__ void gather(int slot, uint64 address) {
        copy_rows<LAYOUT::quantized_bytes>(slot, half, upcoming.lane, address);
        copies_arrive(RAW_FULL + 8 * slot);
    }

    __device__ void run() {
        PipelineState<RING> at;
        int index = upcoming.more() ? upcoming.fetch_index(half) : 0;
        while (upcoming.more()) {
            uint64 row = reinterpret_cast<uint64>(token_in<LAYOUT>(upcoming.problem.segments[upcoming.second], index).row);
            // The next tile may not be scheduled yet, so the last block of a tile is copied before asking for it.
            bool last = upcoming.tile_blocks == 1;
            if (!last) upcoming.next_block(), index = upcoming.fetch_index(half);
            barrier_wait(RAW_EMPTY + 8 * (2 * at.slot + half), at.phase ^ 1);
            gather(at.slot, row);
            if (last) {
                upcoming.next_block();
                if (upcoming.more()) index = upcoming.fetch_index(half);
            }
            at.advance();
        }
    }
};

// The scale warp loads the tokens' scales a block ahead, stores them as float16, and writes the bias that masks absent tokens.
struct ScaleProducer {
    BlockCursor upcoming;

    // Loads of scales in flight.
    struct Pending {
        uint4 scales[LAYOUT::scale_bytes > 16 || EXTRA_LAYOUT::scale_bytes > 16 ? 2 : 1];
        bool present, second;
    };

    __device__ ScaleProducer(const SparseProblem& problem) : upcoming(problem) {}

    __device__ Pending fetch(int slot) {
        const Segment& list = upcoming.problem.segments[upcoming.second];
        Pending pending{{}, uint32(slot) < uint32(list.num_slots), upcoming.second};
        if (EXPANDS && pending.second) load<EXTRA_LAYOUT>(pending, token_in<EXTRA_LAYOUT>(list, slot).scales);
        else load<LAYOUT>(pending, token_in<LAYOUT>(list, slot).scales);
        return pending;
    }

    template <class Layout> __device__ static void load(Pending& pending, const uint8* scales) {
        if (Layout::scale_bytes == 8) {
            uint4& to = pending.scales[0];
            asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(to.x), "=r"(to.y) : "l"(scales));
        } else {
#pragma unroll
            for (int i = 0; i < Layout::scale_bytes / 16; ++i) {
                uint4& to = pending.scales[i];
                asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w) : "l"(scales + 16 * i));
            }
        }
    }

    // Word i of the scales.
    __device__ static uint32 word(const Pending& pending, int i) {
        const uint4& scales = pending.scales[i / 4];
        return i % 4 == 0 ? scales.x : i % 4 == 1 ? scales.y : i % 4 == 2 ? scales.z : scales.w;
    }

    // Store a token's factors from `at` on. Returns whether float16 has all scales.
    template <class Layout> __device__ static bool store(uint32 at, const Pending& pending) {
        bool all = true;
        if constexpr (Layout::e4m3_scales) {
            static_assert(Layout::scale_tile == FACTOR_TILE);
            constexpr uint32 SIXTY_FOUR = 0x54005400;
#pragma unroll
            for (int i = 0; i < FACTORS; i += 4) {
                uint32 low, high, bytes = word(pending, i / 4);
                to_f16(bytes, low, high);
                low = multiply(low, SIXTY_FOUR), high = multiply(high, SIXTY_FOUR);  // values are 2^-6 times their own
                uint32 factors[4] = {low, low >> 16, high, high >> 16};
#pragma unroll
                for (int j = 0; j < 4; ++j) sts16(at + (i + j) * (HALF * 2), factors[j]);
                all &= !is_nan4(bytes);
            }
        } else {
            constexpr int SHARED = Layout::scale_tile / FACTOR_TILE;  // factors that have the same scale
#pragma unroll
            for (int i = 0; i < FACTORS; ++i) {
                int scale = i / SHARED;
                uint32 bits = Layout::ue8m0 ? (word(pending, scale / 4) >> 8 * (scale % 4) & 0xff) << 23 : word(pending, scale);
                sts16(at + i * (HALF * 2), pack(f16{}, __uint_as_float(bits), 0.0f));
                all &= fits_f16(bits);
            }
        }
        return all;
    }

    // Store the factors and the bias. Returns whether float16 cannot represent one of the scales.
    __device__ bool publish(int half_block, const Pending& pending) {
        int lane = upcoming.lane, n = (lane & 16) + permuted(lane & 15);
        int b = n & 1, c = n >> 1 & 3, h = n >> 3 & 1;
        uint32 at = FACTOR_AT + half_block * FACTORS_BYTES + (lane & 16) * 2 + c * 8 + (b + 2 * h) * 2;
        bool all = EXPANDS && pending.second ? store<EXTRA_LAYOUT>(at, pending) : store<LAYOUT>(at, pending);
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
                barrier_wait(RAW_EMPTY + 8 * (2 * at.slot + half), at.phase ^ 1);
                lacks |= publish(2 * at.slot + half, pending[half]);
            }
            warp_arrive(RAW_FULL + 8 * at.slot);
            if (lacks) upcoming.problem.mark(tile);
            if (last) {
                upcoming.next_block();
                if (upcoming.more()) index[0] = upcoming.fetch_index(0), index[1] = upcoming.fetch_index(1);
            }
            at.advance();
        }
    }
};

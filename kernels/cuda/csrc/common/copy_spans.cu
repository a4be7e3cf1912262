// Copy spans of bytes between pages of several arrays. Arrays are in device memory, or in pinned host memory.
//
// Grid: `pieces` CTAs per span; each copies up to CHUNK bytes. Block: 256 threads. No shared memory.
// Arrays of one kind follow one another: they have the same page stride, number of pages and bytes of a page.
//
// Macros: SPAN, the type of the spans' numbers (int64 or int).
#include "common/device.cuh"

constexpr int THREADS = 256;
constexpr int CHUNK = 16384;
constexpr int ARRAYS = 200, KINDS = 16;

struct Side {
    uint8* start[200];
    int64 stride[16];
    int64 page_bytes[16];
    int pages[16];
    int end[16];  // number of the first array of the next kind
};
static_assert(sizeof(Side) == 8 * ARRAYS + 24 * KINDS, "the arrays of Side have ARRAYS and KINDS members");

// The first of `size` bytes in a page; nullptr if they are not within a page of an array. `array` counts from the side's first.
__device__ inline uint8* address_of(const Side& side, int64 array, int64 page, int64 first, int64 size) {
    if (array < 0 || size < 0 || first < 0) return nullptr;
    int kind = 0;
    while (kind < KINDS && array >= side.end[kind]) ++kind;
    if (kind == KINDS || page < 0 || page >= side.pages[kind]) return nullptr;
    int64 bytes = side.page_bytes[kind];
    if (first > bytes || size > bytes - first) return nullptr;
    return side.start[array] + page * side.stride[kind] + first;
}

// Units of a piece, whose addresses and size are multiples of the unit.
template <class Unit>
__device__ inline void copy(const uint8* from, uint8* to, int size) {
    constexpr int UNROLL = CHUNK / THREADS / 16;
    const Unit* source = reinterpret_cast<const Unit*>(from);
    Unit* target = reinterpret_cast<Unit*>(to);
    int units = size / int(sizeof(Unit));
    for (int first = threadIdx.x; first < units; first += UNROLL * THREADS) {
        Unit values[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i)
            if (first + i * THREADS < units) values[i] = source[first + i * THREADS];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i)
            if (first + i * THREADS < units) target[first + i * THREADS] = values[i];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    copy_spans(const __grid_constant__ Side src, const __grid_constant__ Side dst, const SPAN* spans, int64 spans_stride,
               int64 column_stride, int first_src, int first_dst, int pieces) {
    pdl_wait();
    const SPAN* span = spans + blockIdx.x / pieces * spans_stride;
    int64 size = span[6 * column_stride];
    const uint8* from = address_of(src, int64(span[0]) - first_src, span[column_stride], span[2 * column_stride], size);
    uint8* to = address_of(dst, int64(span[3 * column_stride]) - first_dst, span[4 * column_stride], span[5 * column_stride], size);
    if (from == nullptr || to == nullptr) return;
    for (int64 first = int64(blockIdx.x % pieces) * CHUNK; first < size; first += int64(pieces) * CHUNK) {
        int piece = int(min(size - first, int64(CHUNK)));
        uint64 bits = reinterpret_cast<uint64>(from + first) | reinterpret_cast<uint64>(to + first) | uint64(piece);
        if (bits % 16 == 0) copy<uint4>(from + first, to + first, piece);
        else if (bits % 8 == 0) copy<uint2>(from + first, to + first, piece);
        else if (bits % 4 == 0) copy<uint32>(from + first, to + first, piece);
        else copy<uint8>(from + first, to + first, piece);
    }
}

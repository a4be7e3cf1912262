// Gather rows of several requests from a cache of plain rows into a dense workspace.
//
// Grid: up to MAX_BLOCKS CTAs that stride over the rows: only the device knows the number of rows, and a workspace may
// have many more. Block: 128 threads, a row per warp. No shared memory.
//
// Macros: UNIT, the type that rows are copied in (uint4, uint2, uint32, uint16 or uint8); or, to dequantise e4m3
// rows, OUTPUT (bf16, f16 or float) and ALIGNED (which also says that rows are a multiple of 8 values).
#include "common/device.cuh"
#include "common/requests.cuh"

#ifdef OUTPUT

__device__ inline void store_value(float* p, float x) { *p = x; }
template <class T> __device__ inline void store_value(T* p, float x) { p->bits = uint16(pack(T{}, x, 0.0f)); }

__device__ inline void move_row(const uint8* src, uint8* dst, int width, int lane, float scale) {
    OUTPUT* out = reinterpret_cast<OUTPUT*>(dst);
#if ALIGNED
    for (int first = 8 * lane; first < width; first += 256) {
        float x[8] = {};
        if (src) dequantize8(load8(src + first), scale, x);
        store_values8(out + first, x);
    }
#else
    for (int i = lane; i < width; i += 32) {
        float x = 0.0f, next;
        if (src) e4m3x2_to_float(src[i], x, next);
        store_value(out + i, src ? mul(x, scale) : 0.0f);
    }
#endif
}

#else

constexpr int UNROLL = 4;  // units of a lane in flight

__device__ inline void move_row(const uint8* src, uint8* dst, int row_bytes, int lane, float) {
    int count = row_bytes / int(sizeof(UNIT));
    for (int first = lane; first < count; first += 32 * UNROLL) {
        UNIT units[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            units[i] = {};
            if (src && first + 32 * i < count) units[i] = reinterpret_cast<const UNIT*>(src)[first + 32 * i];
        }
#pragma unroll
        for (int i = 0; i < UNROLL; ++i)
            if (first + 32 * i < count) reinterpret_cast<UNIT*>(dst)[first + 32 * i] = units[i];
    }
}

#endif

extern "C" __global__ void __launch_bounds__(128)
    gather_cache(const uint8* pages, int64 page_stride, int64 num_slots, int block_size, int row_bytes, uint8* dst, int64 dst_stride,
                 int num_rows, const int* block_table, int64 table_stride, int table_columns, const int* cu_seq_lens, int requests,
                 const int* seq_starts, int64 seq_starts_stride, const float* scale, float scale_value) {
    pdl_wait();
    BlockTable table{block_table, table_stride, requests, table_columns};
    GatheredRows rows{cu_seq_lens, requests};
    if (scale) scale_value = *scale;
    int warps = blockDim.x / 32;
    int count = rows.count(num_rows);
    for (int64 row = int64(blockIdx.x) * warps + threadIdx.x / 32; row < count; row += int64(gridDim.x) * warps) {
        int request = rows.request(row);
        if (request < 0) continue;
        int64 start = seq_starts ? seq_starts[request * seq_starts_stride] : 0;
        PageRow at = lookup_page_row(table, request, start + (row - cu_seq_lens[request]), block_size, num_slots);
        const uint8* src = nullptr;  // an absent row is zeros
        if (at.page >= 0) src = pages + at.page * page_stride + int64(at.row) * row_bytes;
        move_row(src, dst + row * dst_stride, row_bytes, threadIdx.x % 32, scale_value);
    }
}

// Insert keys without scales into the slots of a paged cache, and gather them.
//
// Grid: a warp per row; gather_keys strides over the rows. Block: 128 threads. No shared memory.
//
// Macros: INPUT (type of the inserted keys), VALUE (of the cache), SLOT (int64 or int), LAYOUT.
#include "common/pages.cuh"
#include "common/device.cuh"
#include "common/requests.cuh"

constexpr int DIM = 128, THREADS = 128;

__device__ inline void convert(float x, float& y) { y = x; }
__device__ inline void convert(float x, bf16& y) { y = {uint16(pack(bf16{}, x, 0.0f))}; }
__device__ inline void assign(float x, float& y) { y = x; }
__device__ inline void assign(bf16 x, bf16& y) { y = x; }  // keeps the bits, also of NaN
template <class From, class To> __device__ inline void assign(From x, To& y) { convert(to_float(x), y); }

extern "C" __global__ void __launch_bounds__(THREADS) insert_keys(const INPUT* k, int64 k_stride, const SLOT* slot_mapping, int num_tokens,
                                                                  uint8* pages, int64 page_stride, int64 num_slots, int block_size) {
    pdl_wait();
    int token = blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    if (token >= num_tokens) return;
    int64 slot = slot_mapping[token];
    if (slot < 0 || slot >= num_slots) return;
    uint8* row = token_at<LAYOUT>(pages, page_stride, block_size, slot).row;
    for (int i = threadIdx.x % 32; i < DIM; i += 32) {
        VALUE x;
        assign(k[token * k_stride + i], x);
        write_at(row + i * sizeof(VALUE), x);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gather_keys(uint8* pages, int64 page_stride, int64 num_slots, int block_size, VALUE* out, int64 out_stride, int num_rows,
                const int* block_table, int64 table_stride, int table_columns, const int* cu_seq_lens, int requests) {
    pdl_wait();
    BlockTable table{block_table, table_stride, requests, table_columns};
    for (int row = blockIdx.x * (THREADS / 32) + threadIdx.x / 32; row < num_rows; row += gridDim.x * (THREADS / 32)) {
        int request = GatheredRows{cu_seq_lens, requests}.request(row);
        if (request < 0) continue;
        PageRow at = lookup_page_row(table, request, int64(row) - cu_seq_lens[request], block_size, num_slots);
        const uint8* from = at.page < 0 ? pages : token_at<LAYOUT>(pages, page_stride, block_size, at).row;
        for (int i = threadIdx.x % 32; i < DIM; i += 32)
            out[row * out_stride + i] = at.page < 0 ? VALUE{} : read_at<VALUE>(from + i * sizeof(VALUE));
    }
}

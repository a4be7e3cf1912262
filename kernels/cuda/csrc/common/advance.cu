// Advance a decode batch by one step: sampled tokens become the next inputs.
//
// Grid: a thread per sequence. Block: 128 threads. No shared memory. An int64 token that TOKEN cannot hold becomes -1.
//
// Macros: TOKEN, SAMPLED, POSITION, SLOT (each int64 or int).
#include "common/device.cuh"
#include "common/pages.cuh"

extern "C" __global__ void __launch_bounds__(128)
    advance_step(int num_seqs, int num_queries, int block_size, TOKEN* input_tokens, int64 tokens_stride, const SAMPLED* sampled_token_ids,
                 int64 sampled_stride, POSITION* input_positions, int64 positions_stride, int* seq_lens, int64 lens_stride,
                 SLOT* slot_mapping, int64 slots_stride, const int* block_tables, int64 table_stride, int table_columns) {
    pdl_wait();
    int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= num_seqs) return;
    TOKEN token = 0;
    int position = 0, slot = -1;
    if (i < num_queries) {
        position = seq_lens[i * lens_stride];  // of the sampled token, which follows the sequence
        int64 sampled = sampled_token_ids[i * sampled_stride];
        token = TOKEN(sampled);
        if (token != sampled) token = -1;  // an int64 that int cannot hold
        slot = lookup_slot({block_tables, table_stride, num_queries, table_columns}, int(i), position, block_size);
        if (position < INT32_LIMIT) seq_lens[i * lens_stride] = position + 1;
    }
    input_tokens[i * tokens_stride] = token;
    input_positions[i * positions_stride] = position;
    slot_mapping[i * slots_stride] = slot;
}

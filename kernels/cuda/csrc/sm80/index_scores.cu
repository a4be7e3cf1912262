// Indexer scores by tensor cores of any device: logits = scale * sum of weights * relu(q . k). The keys are all keys of
// a paged cache, candidate blocks of it, or packed keys. Float32 queries use common/indexer_logits.cu and
// common/candidate_logits.cu.
//
// Grid: (CTAs). Block: 128 threads, four independent warps. Each has a work range of one query; `parts` ranges cover a
// query, and with `parts` 0 longer queries have more ranges (divide_by_lengths). Shared memory: a ring of 3 stages for
// each warp, 50 KiB for FP8 keys. Each lane copies only the bytes that it reads itself, so no thread waits for another
// one.
//
// A warp takes 32 positions at a time, a *tile*, and lane 4 g + c looks up position 8 c + g of it. The keys of a tile are rows
// of two products of 16 rows, heads of the query their columns. The order of values in a product is free if both operands have
// the same one: a lane reads 16 bytes of a row in a piece, and four values of them are its operands of a step of 16 values.
//
//     keys     bytes a row    product     pieces of a lane    values of a piece
//     e4m3     128            float16     2                   64 h + 16 c to + 15
//     e2m1     64             bfloat16    1                   32 c to + 31: the scale's tile
//     bf16     256            bfloat16    4                   32 h + 8 c to + 7
//
// float16 has every e4m3 value. bfloat16 has every e2m1 value times a power of two, and every e4m3 value. So products are exact,
// and sums are float32.
//
// While a tile is multiplied, copies of the next two tiles are in flight, and loads of the page of the third and of the
// candidate block of the fourth.
//
// Macros: QUERY (uint8 for e4m3, or bf16), LAYOUT (INDEXER_FP8 with QUERY uint8, INDEXER_BF16 with QUERY bf16,
// INDEXER_MXFP4), HEADS (32 or 64: the number of heads, whose operands stay in registers; 0: any number), PAGED and
// CANDIDATES (which keys), ALIGNED (whether rows of queries and keys are at multiples of 16 bytes, and scales of MXFP4
// keys at multiples of 4).
#include "common/pages.cuh"
#include "common/device.cuh"
#include "sm80/index_operands.cuh"

constexpr int WARPS = 4, KEYS = 32, STAGES = 3;
constexpr int STAGE_BYTES = KEYS * (LAYOUT::row_bytes + 4);
[[maybe_unused]] constexpr int SHARED_BYTES = WARPS * STAGES * STAGE_BYTES;
constexpr int PIECES = LAYOUT::row_bytes / 64, PIECE_STEPS = STEPS / PIECES;

// A tile of a warp's ring.
struct Stage {
    uint4 rows[4][PIECES][32];  // of each lane: positions g, g + 8, g + 16 and g + 24
    uint32 scales[32];          // of each lane's position: a float, or four bytes
};
static_assert(sizeof(Stage) == STAGE_BYTES);

// A pair of UE8M0 scales as bfloat16.
__device__ inline uint32 scale_pair(uint32 byte) {
    uint32 scale = byte == 255 ? 0x7fc0u : byte == 0 ? 0x0040u : byte << 7;
    return scale << 16 | scale;
}

// A lane's operands of a key in a step of a piece. factor: the scale of its values, for e2m1. nan: as above.
__device__ inline void key_pairs(uint4 piece, int step, uint32 factor, uint32& low, uint32& high, uint32& nan) {
    uint32 words[4] = {piece.x, piece.y, piece.z, piece.w};
    if constexpr (IS_MXFP4) {
        uint32 pairs[4];
        e2m1_to_bf16(words[step / 2], pairs);
        constexpr uint32 MINUS_ZERO = 0x80008000;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(low) : "r"(pairs[step % 2 * 2]), "r"(factor), "r"(MINUS_ZERO));
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(high) : "r"(pairs[step % 2 * 2 + 1]), "r"(factor), "r"(MINUS_ZERO));
    } else if constexpr (IS_E4M3) {
        e4m3_key_pairs(words[step], low, high, nan);
    } else {
        low = words[2 * step], high = words[2 * step + 1];
    }
}

// Copy to shared memory, or write zeros.
__device__ inline void copy_piece(uint4* to, const uint8* from, bool present) {
    if constexpr (ALIGNED) {
        copy_async<16>(to, from, present);
    } else {
        uint32 words[4] = {};
        for (int i = 0; present && i < 4; ++i) words[i] = read_at<uint32>(from + 4 * i);
        *to = {words[0], words[1], words[2], words[3]};
    }
}
__device__ inline void copy_word(uint32* to, const uint8* from, bool present) {
    if constexpr (ALIGNED) copy_async<4>(to, from, present);
    else *to = present ? read_at<uint32>(from) : 0;
}

// Which keys, and where.
struct Keys {
    const int *starts, *ends;  // packed keys: of each query. Else lengths, and null
    int64 lens_stride;         // between entries
    int per_query, next_n;     // whether each query has a length of its own; queries of an entry
    const int* candidates;     // blocks of each query, [.., columns / block]
    int64 candidates_stride;
    BlockSize block;
    int columns;           // of logits
    int count;             // packed keys
    int compressed_width;  // of compressed rows of packed keys, else 0
    BlockTable table;
    uint8* bytes;  // pages, or packed keys
    int64 stride;  // of pages or keys, in bytes
    int64 num_slots;
    BlockSize block_size;
    const uint8* scales;  // of packed keys
};

// A warp's iterator over the keys of one query: this lane's key of each tile, found in three steps, each a tile ahead
// of the next step.
struct Cursor {
    const Keys& keys;
    int entry;
    int64 first, length;  // positions; with candidates, length is what the query sees
    int64 columns;        // scores of this query
    const int* blocks;
    int candidate, position, page;  // -1: no candidate, a position that the query does not see, an absent page

    __device__ Cursor(const Keys& other, int query) : keys(other), entry(query / other.next_n), first(0), candidate(-1) {
        int j = query - entry * keys.next_n;
        if (PAGED) {
            length = keys.per_query ? keys.starts[entry * keys.lens_stride + j]
                                    : int64(keys.starts[entry * keys.lens_stride]) - (keys.next_n - 1 - j);
            if (CANDIDATES) length = min(length, keys.table.covered(keys.block_size.tokens));
            columns = CANDIDATES ? keys.columns : min(max(length, int64(0)), int64(keys.columns));
        } else {
            first = min(max(keys.starts[query], 0), keys.count), length = min(max(keys.ends[query], int(first)), keys.count);
            if (keys.compressed_width) length = min(length, first + keys.compressed_width);
            columns = length - first;
        }
        blocks = CANDIDATES ? keys.candidates + query * keys.candidates_stride : nullptr;
    }

    // The candidate block of this lane's column.
    __device__ void find_block(int64 column, bool present) {
        if (CANDIDATES) candidate = present && column < columns ? blocks[keys.block.page_of(uint32(column))] : -1;
    }
    // This lane's position, and its page.
    __device__ void find_page(int64 column, bool present) {
        int64 at = first + column;
        if (CANDIDATES) {
            at = int64(candidate) * keys.block.tokens + keys.block.remainder_of(uint32(column));
            present = candidate >= 0 && at < length;
        } else {
            present = present && column < columns;
        }
        position = present ? int(at) : -1;
        if (PAGED) {
            uint32 place = keys.block_size.page_of(uint32(max(position, 0)));
            bool known = position >= 0 && entry < keys.table.rows && int64(place) < keys.table.columns;
            page = known ? keys.table.entries[entry * keys.table.row_stride + place] : -1;
        }
    }
    // Offset of the key in keys.bytes, -1 if absent, and of its scales.
    __device__ int64 offset_of_key(const uint8*& scales) const {
        if (!PAGED) {
            scales = keys.scales + int64(max(position, 0)) * LAYOUT::scale_bytes;
            return position < 0 ? -1 : position * keys.stride;
        }
        int row = keys.block_size.remainder_of(uint32(max(position, 0)));
        int64 slot = int64(page) * keys.block_size.tokens + row;
        bool present = page >= 0 && slot <= INT32_LIMIT && slot < keys.num_slots;
        Token token = token_at<LAYOUT>(keys.bytes, keys.stride, keys.block_size.tokens, present ? PageRow{page, row} : PageRow{0, 0});
        scales = token.scales;
        return present ? token.row - keys.bytes : -1;
    }
};

__device__ inline int64 tiles_of(const Cursor& cursor) { return (cursor.columns + KEYS - 1) / KEYS; }

// The work range of a warp: one of the parts of a query's keys.
struct WorkItem {
    int query, part, parts;  // parts: 0 if there is nothing
};

// Item `item`; the grid has one warp for each item. All parts have nearly the same length, for any lengths of queries.
__device__ inline WorkItem divide_by_lengths(const Keys& keys, int num_queries, int item) {
    int lane = threadIdx.x % 32;
    int64 total = 0;
    for (int query = lane; query < num_queries; query += 32) total += tiles_of(Cursor(keys, query));
    for (int other = 1; other < 32; other *= 2) total += __shfl_xor_sync(~0u, total, other);
    int64 most = int64(gridDim.x) * WARPS - num_queries;  // the last part of a query may be shorter
    int64 length = max(int64(1), (total + most - 1) / most);
    for (int first = 0, before = 0; first < num_queries; first += 32) {
        int parts = first + lane < num_queries ? int((tiles_of(Cursor(keys, first + lane)) + length - 1) / length) : 0, up_to = parts;
        for (int step = 1; step < 32; step *= 2) {
            int left = __shfl_up_sync(~0u, up_to, step);
            if (lane >= step) up_to += left;
        }
        uint32 after = __ballot_sync(~0u, item < before + up_to);
        if (after) {
            int found = __ffs(after) - 1, own = __shfl_sync(~0u, parts, found);
            return {first + found, item - before - __shfl_sync(~0u, up_to, found) + own, own};
        }
        before += __shfl_sync(~0u, up_to, 31);
    }
    return {0, 0, 0};
}

constexpr int CTAS = HEADS == 64 || BY_BITS ? 2 : 3;  // on an SM

extern "C" __global__ void __launch_bounds__(32 * WARPS, CTAS)
    index_scores(const QUERY* q, int64 q_stride_b, int64 q_stride_s, int64 q_stride_h, int heads, const float* weights,
                 int64 weights_stride, const int* starts, const int* ends, int64 lens_stride, int per_query, int next_n, int num_queries,
                 const int* candidates, int64 candidates_stride, int block, uint32 block_multiplier, int block_shift, int columns,
                 float fill, int count, int compressed_width, const int* block_table, int64 table_stride, int table_rows, int table_columns,
                 uint8* bytes, int64 stride, int64 num_slots, int block_size, uint32 block_size_multiplier, int block_size_shift,
                 const uint8* scales, float* logits, int64 logits_stride, int parts) {
    extern __shared__ uint4 memory[];
    int lane = threadIdx.x % 32, c = lane % 4, key = 8 * c + lane / 4;
    Stage* ring = reinterpret_cast<Stage*>(memory) + threadIdx.x / 32 * STAGES;
    int64 item = int64(blockIdx.x) * WARPS + threadIdx.x / 32;
    if (parts && item >= int64(num_queries) * parts) return;
    pdl_wait();
    const Keys keys{starts,  ends,       lens_stride,       per_query,
                    next_n,  candidates, candidates_stride, {block, block_multiplier, block_shift},
                    columns, count,      compressed_width,  {block_table, table_stride, table_rows, table_columns},
                    bytes,   stride,     num_slots,         {block_size, block_size_multiplier, block_size_shift},
                    scales};
    WorkItem work = parts ? WorkItem{int(item / parts), int(item % parts), parts} : divide_by_lengths(keys, num_queries, int(item));
    if (work.parts == 0) return;
    int query = work.query;
    Cursor cursor(keys, query);
    int64 tiles = tiles_of(cursor), first = tiles * work.part / work.parts, end = tiles * (work.part + 1) / work.parts;
    if (first == end) return;
    int entry = cursor.entry, j = query - entry * next_n;
    const QUERY* own_q = q + entry * q_stride_b + j * q_stride_s;
    const float* own_weights = weights + query * weights_stride;
    float* row = logits + query * logits_stride + (compressed_width ? 0 : cursor.first);

    uint32 states = 0;  // two bits of each tile in the ring: whether the position is seen, and whether its key is present
    auto copy = [&](Stage& stage, int64 tile) {
        const uint8* own_scales;
        int64 offset = cursor.offset_of_key(own_scales);
        states = states << 2 | (offset >= 0) << 1 | (cursor.position >= 0);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int64 from = __shfl_sync(~0u, offset, (lane & ~3) + i);
#pragma unroll
            for (int h = 0; h < PIECES; ++h)
                copy_piece(&stage.rows[i][h][lane], bytes + (from >= 0 ? from + 64 * h + 16 * c : 0), from >= 0);
        }
        if (LAYOUT::num_scales) copy_word(&stage.scales[lane], own_scales, offset >= 0);
        copies_commit();
        cursor.find_page((tile + 1) * KEYS + key, tile + 1 < end);
        cursor.find_block((tile + 2) * KEYS + key, tile + 2 < end);
    };

    cursor.find_block(first * KEYS + key, true);
    cursor.find_page(first * KEYS + key, true);
    cursor.find_block((first + 1) * KEYS + key, first + 1 < end);
    Heads<PIECES> of_query;
    if (HEADS) of_query.read(own_q, q_stride_h, own_weights, 0, heads);
    int stage = 0;
    for (int i = 0; i < STAGES - 1; ++i) copy(ring[i], first + i);
    for (int64 tile = first; tile < end; ++tile) {
        copy(ring[stage == 0 ? STAGES - 1 : stage - 1], tile + STAGES - 1);
        copies_wait<STAGES - 1>();
        const Stage& current = ring[stage];
        uint32 scale = LAYOUT::num_scales ? current.scales[lane] : 0;
        float sums[4] = {};
        for (int first_head = 0; first_head < (HEADS ? HEADS : heads); first_head += CHUNK_HEADS) {
            if (!HEADS) of_query.read(own_q, q_stride_h, own_weights, first_head, heads);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float x[CHUNK_HEADS / 8][4] = {};
                uint32 factors[2] = {}, nan[2] = {};
                if (IS_MXFP4)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        factors[i] = scale_pair(__shfl_sync(~0u, scale, (lane & ~3) + 2 * half + i) >> 8 * c & 0xff);
                uint32 a[STEPS][4];  // loaded before all products, which then do not wait
#pragma unroll
                for (int h = 0; h < PIECES; ++h) {
                    uint4 low = current.rows[2 * half][h][lane], high = current.rows[2 * half + 1][h][lane];
#pragma unroll
                    for (int step = h * PIECE_STEPS; step < (h + 1) * PIECE_STEPS; ++step) {
                        key_pairs(low, step % PIECE_STEPS, factors[0], a[step][0], a[step][2], nan[0]);
                        key_pairs(high, step % PIECE_STEPS, factors[1], a[step][1], a[step][3], nan[1]);
                    }
                }
#pragma unroll
                for (int i = 0; i < 4 * STEPS; ++i) asm volatile("" : "+r"(a[i / 4][i % 4]));
#pragma unroll
                for (int step = 0; step < STEPS; ++step)
#pragma unroll
                    for (int n = 0; n < CHUNK_HEADS / 8; ++n) mma(Product{}, x[n], a[step], of_query.b[n][step]);
#pragma unroll
                for (int n = 0; n < CHUNK_HEADS / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        if (HEADS || first_head + 8 * n + 2 * c + i % 2 < heads)  // the product of an absent head and infinity would be NaN
                            sums[2 * half + i / 2] = fmaf(positive(x[n][i]), of_query.weights[n][i % 2], sums[2 * half + i / 2]);
                if (BY_BITS)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        if (nan[i]) sums[2 * half + i] = __uint_as_float(0x7fffffff);
            }
        }
        float score = sum_of_four(sums) * UNIT;
        uint32 state = states >> 2 * (STAGES - 1) & 3;
        if (LAYOUT::num_scales == 1) score *= __uint_as_float(scale);
        if (state != 3) score = state ? -infinity() : fill;
        int64 column = tile * KEYS + key;
        if (column < cursor.columns) row[column] = score;
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
}

/* A decode step of two C4A layers of DeepSeek V4 in a CUDA graph: window rows and selected compressed rows, one token a
 * request. A layer inserts its rows and index keys, scores the keys, selects rows by the scores and attends to them.
 * Lengths, and so the selections, change between replays. Without Python; the driver and the runtime of cumla export are all it needs.
 *
 *     decode_step FILE [REQUESTS [STEPS]]
 *
 * An engine has one graph for each number of requests, and its own products between the calls: here their results,
 * queries, rows and index keys, are random. The call of the compressors, compress_and_insert, is left out, too: every
 * fourth token of a request inserts a compressed row and an index key.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cumla_operations.h"

/* What is used of cuda.h; with the CUDA toolkit, include that instead. */
typedef uint64_t CUdeviceptr;
typedef void *CUstream, *CUgraph, *CUgraphExec;
int cuMemAlloc_v2(CUdeviceptr *, size_t);
int cuMemFree_v2(CUdeviceptr);
int cuMemsetD8Async(CUdeviceptr, unsigned char, size_t, CUstream);
int cuMemcpyHtoDAsync_v2(CUdeviceptr, const void *, size_t, CUstream);
int cuMemcpyDtoHAsync_v2(void *, CUdeviceptr, size_t, CUstream);
int cuStreamCreate(CUstream *, unsigned);
int cuStreamSynchronize(CUstream);
int cuStreamDestroy_v2(CUstream);
int cuStreamBeginCapture_v2(CUstream, int);
int cuStreamEndCapture(CUstream, CUgraph *);
int cuGraphInstantiateWithFlags(CUgraphExec *, CUgraph, unsigned long long);
int cuGraphLaunch(CUgraphExec, CUstream);
int cuGraphExecDestroy(CUgraphExec);
int cuGraphDestroy(CUgraph);

enum { MOST = 64, HEADS = 64, DIM = 512, ROPE = 64, WINDOW = 128, TOPK = 512, RATIO = 4, LAYERS = 2 };
enum { INDEX_HEADS = 64, INDEX_DIM = 128 };
enum { BLOCK = 64, ROW_BYTES = 584, PAGE_BYTES = 37440 };        /* of DSV4_FP8: docs/layouts.md */
enum { KEY_BYTES = 132, KEY_PAGE_BYTES = 8640 };                 /* of INDEXER_FP8 */
enum { CONTEXT = 2048, COLUMNS = CONTEXT / BLOCK };
enum { COMPRESSED_COLUMNS = 16 }; /* of a selection's table: a power of two; the context needs COLUMNS / RATIO of them */
static const double SCALE = 0.04419417382415922, EPSILON = 1e-6; /* 1 / sqrt(DIM) */

/* What a step reads: written by the host before each replay, and copied to one address. */
typedef struct {
    int32_t starts[MOST + 4];   /* of each request's tokens, and the end */
    int32_t requests[MOST];     /* of each token */
    int32_t lengths[MOST];      /* tokens of each request, the new one included */
    uint8_t valid[MOST];        /* a token is no padding */
    int32_t seen[MOST];         /* compressed rows of each request */
    int64_t positions[MOST], slots[MOST];
    int64_t compressed_slots[MOST]; /* -1: the token completes no row */
    int32_t pages[MOST][COLUMNS], compressed_pages[MOST][COMPRESSED_COLUMNS];
} inputs;

/* Device addresses. */
typedef struct {
    CUdeviceptr inputs, rotation, sink, workspace, q, kv, rotated, out, lse, swa_indices, swa_lens, topk_slots, topk_lens;
    CUdeviceptr row, key, index_q, index_weights, index_values, index_factors, selected, scores;
    CUdeviceptr cache[LAYERS], compressed[LAYERS], keys[LAYERS];
    uint64_t workspace_bytes, scores_bytes;
} memory;

static void check(int error, const char *what) {
    if (!error) return;
    fprintf(stderr, "%s: the driver returned %d\n", what, error);
    exit(1);
}
#define DRIVER(call) check(call, #call)

static void served(int status) {
    if (!status) return;
    fprintf(stderr, "%s\n", cumla_message());
    exit(1);
}

/* An array without gaps. */
static cumla_array array(CUdeviceptr data, int type, int axes, int64_t a, int64_t b, int64_t c, int64_t d) {
    static const int bytes[] = {0, 1, 1, 1, 4, 8, 2, 2, 4, 1, 4, 2}; /* by cumla_type */
    cumla_array made = {.data = data, .type = type, .axes = axes, .shape = {a, b, c, d}};
    int64_t stride = bytes[type];
    for (int i = axes - 1; i >= 0; i--) {
        made.strides[i] = stride;
        stride *= made.shape[i];
    }
    return made;
}

static cumla_array pages(CUdeviceptr data, int64_t count) {
    cumla_array made = array(data, CUMLA_UINT8, 3, count, BLOCK, ROW_BYTES, 0);
    made.strides[0] = PAGE_BYTES;
    return made;
}

static cumla_array key_pages(CUdeviceptr data, int64_t count) {
    cumla_array made = array(data, CUMLA_UINT8, 3, count, BLOCK, KEY_BYTES, 0);
    made.strides[0] = KEY_PAGE_BYTES;
    return made;
}

static int64_t pages_of(int requests) { return requests * COLUMNS; }
static int64_t compressed_pages_of(int requests) { return requests * COMPRESSED_COLUMNS; }
#define INPUT(m, field) ((m)->inputs + offsetof(inputs, field))

/* ---- the calls of a step */

static void insert_rows(const cumla_library *library, const memory *m, int n, int layer, CUstream stream) {
    cumla_qnorm_rope_and_insert_arguments arguments = {
        .q = array(m->q, CUMLA_BFLOAT16, 3, n, HEADS, DIM, 0),
        .kv = array(m->kv, CUMLA_BFLOAT16, 2, n, DIM, 0, 0),
        .k_cache = pages(m->cache[layer], pages_of(n)),
        .slot_mapping = array(INPUT(m, slots), CUMLA_INT64, 1, n, 0, 0, 0),
        .positions = array(INPUT(m, positions), CUMLA_INT64, 1, n, 0, 0, 0),
        .cos_sin_cache = array(m->rotation, CUMLA_FLOAT32, 2, CONTEXT, ROPE, 0, 0),
        .out = array(m->rotated, CUMLA_BFLOAT16, 3, n, HEADS, DIM, 0),
        .eps = EPSILON, .block_size = BLOCK, .layout = CUMLA_DSV4_FP8};
    served(cumla_qnorm_rope_and_insert(library, &arguments, stream, 0));
}

/* The compressed row and the index key that a token completes: results of the compressors. */
static void insert_compressed(const cumla_library *library, const memory *m, int n, int layer, CUstream stream) {
    cumla_quantize_and_insert_k_cache_arguments arguments = {
        .k = array(m->row, CUMLA_BFLOAT16, 2, n, DIM, 0, 0),
        .k_cache = pages(m->compressed[layer], compressed_pages_of(n)),
        .slot_mapping = array(INPUT(m, compressed_slots), CUMLA_INT64, 1, n, 0, 0, 0),
        .block_size = BLOCK, .is_ue8m0 = 1, .layout = CUMLA_DSV4_FP8, .min_exponent = CUMLA_NONE};
    served(cumla_quantize_and_insert_k_cache(library, &arguments, stream, 0));
    arguments.k = array(m->key, CUMLA_BFLOAT16, 2, n, INDEX_DIM, 0, 0);
    arguments.k_cache = key_pages(m->keys[layer], compressed_pages_of(n));
    arguments.layout = CUMLA_INDEXER_FP8;
    served(cumla_quantize_and_insert_k_cache(library, &arguments, stream, 0));
}

static void quantize_queries(const cumla_library *library, const memory *m, int n, CUstream stream) {
    cumla_fused_indexer_q_rope_quant_arguments arguments = {
        .positions = array(INPUT(m, positions), CUMLA_INT64, 1, n, 0, 0, 0),
        .index_q = array(m->index_q, CUMLA_BFLOAT16, 3, n, INDEX_HEADS, INDEX_DIM, 0),
        .index_q_cos_sin_cache = array(m->rotation, CUMLA_FLOAT32, 2, CONTEXT, ROPE, 0, 0),
        .index_weights = array(m->index_weights, CUMLA_FLOAT32, 2, n, INDEX_HEADS, 0, 0),
        .q_values = array(m->index_values, CUMLA_UINT8, 3, n, INDEX_HEADS, INDEX_DIM, 0),
        .q_weights = array(m->index_factors, CUMLA_FLOAT32, 2, n, INDEX_HEADS, 0, 0),
        .index_weights_softmax_scale = CUMLA_NO_NUMBER, .index_weights_head_scale = CUMLA_NO_NUMBER, .quantize = 1,
        .q_format = CUMLA_Q_FORMAT_FP8};
    served(cumla_fused_indexer_q_rope_quant(library, &arguments, stream, 0));
}

/* The rows whose keys score highest, as slots of the compressed cache; keys and rows have the same pages. */
static cumla_indexer_topk_arguments selection_of(const memory *m, int n, int layer) {
    return (cumla_indexer_topk_arguments){
        .q = array(m->index_values, CUMLA_UINT8, 4, n, 1, INDEX_HEADS, INDEX_DIM),
        .kv = key_pages(m->keys[layer], compressed_pages_of(n)),
        .weights = array(m->index_factors, CUMLA_FLOAT32, 2, n, INDEX_HEADS, 0, 0),
        .context_lens = array(INPUT(m, seen), CUMLA_INT32, 1, n, 0, 0, 0),
        .block_table = array(INPUT(m, compressed_pages), CUMLA_INT32, 2, n, COMPRESSED_COLUMNS, 0, 0),
        .is_valid_token = array(INPUT(m, valid), CUMLA_BOOL, 1, n, 0, 0, 0),
        .slots = array(m->topk_slots, CUMLA_INT32, 2, n, TOPK, 0, 0),
        .slot_lens = array(m->topk_lens, CUMLA_INT32, 1, n, 0, 0, 0),
        .out = array(m->selected, CUMLA_INT32, 2, n, TOPK, 0, 0),
        .workspace = array(m->scores, CUMLA_UINT8, 1, (int64_t)m->scores_bytes, 0, 0, 0),
        .topk = TOPK, .max_context_len = CUMLA_NONE, .layout = CUMLA_INDEXER_FP8, .slot_block_size = CUMLA_NONE,
        .pool = 1, .candidate_block_size = 8};
}

static void map_windows(const cumla_library *library, const memory *m, int n, CUstream stream) {
    cumla_compute_swa_indices_and_lens_arguments window = {
        .query_start_loc = array(INPUT(m, starts), CUMLA_INT32, 1, n + 1, 0, 0, 0),
        .seq_lens = array(INPUT(m, lengths), CUMLA_INT32, 1, n, 0, 0, 0),
        .token_to_req_indices = array(INPUT(m, requests), CUMLA_INT32, 1, n, 0, 0, 0),
        .is_valid_token = array(INPUT(m, valid), CUMLA_BOOL, 1, n, 0, 0, 0),
        .block_table = array(INPUT(m, pages), CUMLA_INT32, 2, n, COLUMNS, 0, 0),
        .swa_indices = array(m->swa_indices, CUMLA_INT32, 2, n, WINDOW, 0, 0),
        .swa_lens = array(m->swa_lens, CUMLA_INT32, 1, n, 0, 0, 0),
        .block_size = BLOCK, .window_size = WINDOW, .num_tokens = n};
    served(cumla_compute_swa_indices_and_lens(library, &window, stream, 0));
}

static cumla_sparse_mla_decode_arguments decode_of(const memory *m, int n, int layer) {
    return (cumla_sparse_mla_decode_arguments){
        .q = array(m->rotated, CUMLA_BFLOAT16, 4, n, 1, HEADS, DIM),
        .k_cache = pages(m->cache[layer], pages_of(n)),
        .indices = array(m->swa_indices, CUMLA_INT32, 3, n, 1, WINDOW, 0),
        .topk_length = array(m->swa_lens, CUMLA_INT32, 1, n, 0, 0, 0),
        .extra_k_cache = pages(m->compressed[layer], compressed_pages_of(n)),
        .extra_indices = array(m->topk_slots, CUMLA_INT32, 3, n, 1, TOPK, 0),
        .extra_topk_length = array(m->topk_lens, CUMLA_INT32, 2, n, 1, 0, 0),
        .attn_sink = array(m->sink, CUMLA_FLOAT32, 1, HEADS, 0, 0, 0),
        .out = array(m->out, CUMLA_BFLOAT16, 4, n, 1, HEADS, DIM),
        .lse = array(m->lse, CUMLA_FLOAT32, 3, n, HEADS, 1, 0),
        .workspace = array(m->workspace, CUMLA_UINT8, 1, (int64_t)m->workspace_bytes, 0, 0, 0),
        .layout = CUMLA_DSV4_FP8, .block_size = CUMLA_NONE, .extra_block_size = CUMLA_NONE,
        .extra_layout = CUMLA_DSV4_FP8, .softmax_scale = SCALE,
        .planned = layer > 0}; /* the first layer's call divides the step's work, the others use its plan */
}

static void rotate_back(const cumla_library *library, const memory *m, int n, CUstream stream) {
    cumla_array out = array(m->out, CUMLA_BFLOAT16, 3, n, HEADS, DIM, 0);
    cumla_apply_rope_arguments arguments = {
        .x = out, .out = out, .inverse = 1, .rope_first = 0, .is_neox = 0,
        .positions = array(INPUT(m, positions), CUMLA_INT64, 1, n, 0, 0, 0),
        .cos_sin_cache = array(m->rotation, CUMLA_FLOAT32, 2, CONTEXT, ROPE, 0, 0)};
    served(cumla_apply_rope(library, &arguments, stream, 0));
}

static void step(const cumla_library *library, const memory *m, int n, CUstream stream) {
    map_windows(library, m, n, stream);
    for (int layer = 0; layer < LAYERS; layer++) {
        insert_rows(library, m, n, layer, stream);
        insert_compressed(library, m, n, layer, stream);
        quantize_queries(library, m, n, stream);
        cumla_indexer_topk_arguments selection = selection_of(m, n, layer);
        served(cumla_indexer_topk(library, &selection, stream, 0));
        cumla_sparse_mla_decode_arguments arguments = decode_of(m, n, layer);
        served(cumla_sparse_mla_decode(library, &arguments, stream, 0));
        rotate_back(library, m, n, stream);
    }
}

/* ---- the host */

static CUdeviceptr allocated(uint64_t bytes) {
    CUdeviceptr found;
    DRIVER(cuMemAlloc_v2(&found, bytes));
    return found;
}

static CUdeviceptr zeros(uint64_t bytes, CUstream stream) {
    CUdeviceptr found = allocated(bytes);
    DRIVER(cuMemsetD8Async(found, 0, bytes, stream));
    return found;
}

/* bfloat16 from -1 to 1. */
static CUdeviceptr random_rows(size_t count, CUstream stream) {
    uint16_t *values = malloc(count * sizeof *values);
    if (!values) exit(1);
    for (size_t i = 0; i < count; i++) {
        float value = 2.0f * (float)rand() / (float)RAND_MAX - 1.0f;
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        values[i] = (uint16_t)(bits >> 16);
    }
    CUdeviceptr found = allocated(count * sizeof *values);
    DRIVER(cuMemcpyHtoDAsync_v2(found, values, count * sizeof *values, stream));
    DRIVER(cuStreamSynchronize(stream)); /* before the host's memory is free */
    free(values);
    return found;
}

static CUdeviceptr random_floats(size_t count, CUstream stream) {
    float *values = malloc(count * sizeof *values);
    if (!values) exit(1);
    for (size_t i = 0; i < count; i++) values[i] = (float)rand() / (float)RAND_MAX;
    CUdeviceptr found = allocated(count * sizeof *values);
    DRIVER(cuMemcpyHtoDAsync_v2(found, values, count * sizeof *values, stream));
    DRIVER(cuStreamSynchronize(stream));
    free(values);
    return found;
}

static CUdeviceptr rotation_table(CUstream stream) {
    static float table[CONTEXT][ROPE];
    for (int position = 0; position < CONTEXT; position++)
        for (int i = 0; i < ROPE / 2; i++) {
            double angle = position * pow(10000.0, -2.0 * i / ROPE);
            table[position][i] = (float)cos(angle), table[position][ROPE / 2 + i] = (float)sin(angle);
        }
    CUdeviceptr found = allocated(sizeof table);
    DRIVER(cuMemcpyHtoDAsync_v2(found, table, sizeof table, stream));
    return found;
}

static memory allocate(const cumla_library *library, int n, CUstream stream) {
    const uint64_t bytes = 2ull * n * HEADS * DIM;
    memory m = {.inputs = allocated(sizeof(inputs)), .rotation = rotation_table(stream),
                .sink = zeros(sizeof(float[HEADS]), stream), .q = random_rows(bytes / 2, stream),
                .kv = random_rows((size_t)n * DIM, stream), .rotated = allocated(bytes), .out = allocated(bytes),
                .lse = allocated(4ull * n * HEADS), .swa_indices = allocated(sizeof(int32_t[MOST][WINDOW])),
                .swa_lens = allocated(sizeof(int32_t[MOST])), .topk_slots = allocated(sizeof(int32_t[MOST][TOPK])),
                .topk_lens = allocated(sizeof(int32_t[MOST])), .row = random_rows((size_t)n * DIM, stream),
                .key = random_rows((size_t)n * INDEX_DIM, stream),
                .index_q = random_rows((size_t)n * INDEX_HEADS * INDEX_DIM, stream),
                .index_weights = random_floats((size_t)n * INDEX_HEADS, stream),
                .index_values = allocated((uint64_t)n * INDEX_HEADS * INDEX_DIM),
                .index_factors = allocated(4ull * n * INDEX_HEADS), .selected = allocated(sizeof(int32_t[MOST][TOPK])),
                .workspace = 16, .scores = 16}; /* any multiple of 16 while their sizes are asked for */
    for (int layer = 0; layer < LAYERS; layer++) {
        m.cache[layer] = zeros((uint64_t)pages_of(n) * PAGE_BYTES, stream);
        m.compressed[layer] = zeros((uint64_t)compressed_pages_of(n) * PAGE_BYTES, stream);
        m.keys[layer] = zeros((uint64_t)compressed_pages_of(n) * KEY_PAGE_BYTES, stream);
    }
    cumla_sparse_mla_decode_arguments arguments = decode_of(&m, n, 0);
    served(cumla_sparse_mla_decode_workspace(library, &arguments, &m.workspace_bytes));
    m.workspace = allocated(m.workspace_bytes);
    served(cumla_workspace_init(library, m.workspace, m.workspace_bytes, stream));
    cumla_indexer_topk_arguments selection = selection_of(&m, n, 0);
    served(cumla_indexer_topk_workspace(library, &selection, &m.scores_bytes));
    m.scores = zeros(m.scores_bytes, stream);
    return m;
}

/* The inputs of a step in which every request has one token more than in the step before. */
static void next_step(inputs *x, int n, int number) {
    for (int r = 0; r < n; r++) {
        int length = 1 + (37 + 61 * r) % (CONTEXT / 2) + number, position = length - 1;
        x->starts[r] = x->requests[r] = r, x->starts[r + 1] = r + 1;
        x->valid[r] = 1, x->lengths[r] = length, x->positions[r] = position;
        for (int i = 0; i < COLUMNS; i++) x->pages[r][i] = r * COLUMNS + i;
        for (int i = 0; i < COMPRESSED_COLUMNS; i++) x->compressed_pages[r][i] = r * COMPRESSED_COLUMNS + i;
        x->slots[r] = (int64_t)x->pages[r][position / BLOCK] * BLOCK + position % BLOCK;
        int row = position / RATIO; /* of the token's group of four */
        x->seen[r] = length / RATIO;
        x->compressed_slots[r] =
            length % RATIO ? -1 : (int64_t)x->compressed_pages[r][row / BLOCK] * BLOCK + row % BLOCK;
    }
}

int main(int count, char **words) {
    const int n = count > 2 ? atoi(words[2]) : MOST, steps = count > 3 ? atoi(words[3]) : 8;
    if (count < 2 || n < 1 || n > MOST || steps < 1 || steps > CONTEXT / 2) {
        fprintf(stderr, "usage: decode_step FILE [REQUESTS, to %d [STEPS, to %d]]\n", MOST, CONTEXT / 2);
        return 2;
    }
    cumla_library *library;
    served(cumla_open(words[1], 0, &library)); /* the device's context is current from here on */
    CUstream stream;
    DRIVER(cuStreamCreate(&stream, 1)); /* CU_STREAM_NON_BLOCKING */
    memory m = allocate(library, n, stream);

    CUgraph graph;
    CUgraphExec executable;
    DRIVER(cuStreamBeginCapture_v2(stream, 0)); /* CU_STREAM_CAPTURE_MODE_GLOBAL: nothing is allocated, nothing waits */
    step(library, &m, n, stream);
    DRIVER(cuStreamEndCapture(stream, &graph));
    DRIVER(cuGraphInstantiateWithFlags(&executable, graph, 0));

    static inputs x;
    static float lse[MOST][HEADS];
    static int32_t rows[MOST];
    for (int number = 0; number < steps; number++) {
        next_step(&x, n, number);
        DRIVER(cuMemcpyHtoDAsync_v2(m.inputs, &x, sizeof x, stream));
        DRIVER(cuGraphLaunch(executable, stream));
        DRIVER(cuMemcpyDtoHAsync_v2(lse, m.lse, 4ull * n * HEADS, stream));
        DRIVER(cuMemcpyDtoHAsync_v2(rows, m.topk_lens, 4ull * n, stream));
        DRIVER(cuStreamSynchronize(stream));
        printf("step %d: %d requests, lengths %d to", number, n, x.lengths[0]);
        printf(" %d, the last selects %d rows, its lse %.4f\n", x.lengths[n - 1], rows[n - 1], lse[n - 1][0]);
    }

    DRIVER(cuGraphExecDestroy(executable));
    DRIVER(cuGraphDestroy(graph));
    const CUdeviceptr all[] = {m.inputs, m.rotation, m.sink, m.workspace, m.q, m.kv, m.rotated, m.out, m.lse,
                               m.swa_indices, m.swa_lens, m.topk_slots, m.topk_lens, m.cache[0], m.cache[1],
                               m.compressed[0], m.compressed[1], m.keys[0], m.keys[1], m.row, m.key, m.index_q,
                               m.index_weights, m.index_values, m.index_factors, m.selected, m.scores};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) DRIVER(cuMemFree_v2(all[i]));
    DRIVER(cuStreamDestroy_v2(stream));
    cumla_close(library);
    return 0;
}

/* Reads a file of `cumla export` and makes its launches. See cumla.h; cumla/export/file.py writes the file. */
#include "cumla.h"

#include <dlfcn.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cumla_operations.h"

#ifndef CUMLA_LIBCUDA
#define CUMLA_LIBCUDA "libcuda.so.1"
#endif
#define NONE16 0xFFFFu
#define NONE32 0xFFFFFFFFu
#define MOST_ARGUMENT_BYTES 4096 /* of a kernel, CUDA C++ Programming Guide */
#define MAP_BYTES 128            /* of a tensor map */
#define MAP_WORDS 7              /* of its description */
#define FLOAT_PART 0x104         /* a float64 field, as float32 */
#define LOG2_PART 0x204          /* the same, times log2(e) */
#define LOG2_E 1.4426950408889634
#define MOST_BOX 256
#define MOST_AXIS 0xFFFFFFFFll
#define MOST_GRID 0x7FFFFFFFll
#define MOST_SELF_TEST (1ull << 40)
#define SELF_TEST_ALIGNMENT 256

/* ---- the file: structs as in cumla/export/file.py */

typedef struct { uint32_t function, ctas, threads, shared, most; } cluster_entry;
typedef struct { uint32_t name, words, field_name, record, records, workspace, array, arrays; } operation_entry;
typedef struct { uint32_t operation, name, condition, conditions, by, segment, segments, zero; } record_entry;
typedef struct { uint32_t field, kind, word, multiple; int64_t least, most; } condition_entry;
typedef struct { int64_t last; uint32_t sequence, zero; } segment_entry;
typedef struct { uint32_t launch, launches; } sequence_entry;
typedef struct {
    uint32_t function, grid[3], block[3], shared, overlap, arguments, argument_bytes, part, parts, zero;
} launch_entry;
typedef struct { uint32_t offset, bytes, word, words; } part_entry;
typedef struct {
    uint16_t first, second, third, base;
    uint32_t run, runs;
    int64_t scale, third_scale, add, divisor, most;
} word_entry;
typedef struct { int64_t start, value, slope; } run_entry;
typedef struct { uint32_t program, name, shared, zero; } function_entry;
typedef struct { uint64_t at, bytes; } program_entry;
typedef struct { uint32_t operation, name, word, fill, fills, check, checks, zero; uint64_t bytes; } case_entry;
typedef struct { uint32_t field, place, period, zero; uint64_t bytes; } fill_entry;
typedef struct {
    uint32_t fill, place, count, most;
    uint64_t first, stride;
    double absolute, relative, cosine;
} check_entry;

typedef struct {
    char magic[8];
    uint32_t version, abi;
    uint64_t bytes, checksum;
    uint32_t capability, sms, zero, tables;
} header;
typedef struct { uint64_t offset, count; } table_entry;

enum table { CLUSTERS, OPERATIONS, ARRAYS, FIELD_NAMES, RECORDS, CONDITIONS, SEGMENTS, SEQUENCES, LAUNCHES, PARTS, PART_WORDS,
             WORDS, RUNS, FUNCTIONS, PROGRAMS, CASES, CASE_WORDS, FILLS, CHECKS, BYTES, TABLES };
static const size_t ENTRY_BYTES[TABLES] = {
    sizeof(cluster_entry), sizeof(operation_entry), 4, 4, sizeof(record_entry), sizeof(condition_entry),
    sizeof(segment_entry), sizeof(sequence_entry), sizeof(launch_entry), sizeof(part_entry), 4, sizeof(word_entry),
    sizeof(run_entry), sizeof(function_entry), sizeof(program_entry), sizeof(case_entry), 8, sizeof(fill_entry),
    sizeof(check_entry), 1};
static const uint8_t TYPE_BYTES[] = {0, 1, 1, 1, 4, 8, 2, 2, 4, 1, 4, 2}; /* by cumla_type */
enum condition_kind { EQUAL, RANGE, AT_LEAST, NUMBER, PRODUCT };

/* ---- the driver: what is used of cuda.h */

typedef struct { uint32_t id; char pad[4]; char value[64]; } launch_attribute;
typedef struct {
    uint32_t grid[3], block[3], shared;
    void *stream;
    launch_attribute *attributes;
    uint32_t num_attributes;
} launch_config;
enum { CLUSTER_DIMENSION = 4, PROGRAMMATIC_STREAM_SERIALIZATION = 6 };
enum { MAJOR = 75, MINOR = 76, SMS = 16 };               /* device attributes */
enum { MAX_DYNAMIC_SHARED = 8 };                         /* function attribute */
enum { UINT16 = 1, SWIZZLE_128B = 3, L2_PROMOTION_256B = 3 };  /* of tensor maps */

typedef struct {
    int (*init)(unsigned);
    int (*device_get)(int *, int);
    int (*device_attribute)(int *, int, int);
    int (*primary_retain)(void **, int);
    int (*primary_release)(int);
    int (*set_current)(void *);
    int (*load)(void **, const void *);
    int (*unload)(void *);
    int (*get_function)(void **, void *, const char *);
    int (*set_attribute)(void *, int, int);
    int (*launch)(const launch_config *, void *, void **, void **);
    int (*most_clusters)(int *, void *, const launch_config *);
    int (*encode)(void *, int, uint32_t, void *, const uint64_t *, const uint64_t *, const uint32_t *, const uint32_t *,
                  int, int, int, int);
    int (*memset)(uint64_t, unsigned char, size_t, void *);
    int (*to_device)(uint64_t, const void *, size_t, void *);
    int (*to_host)(void *, uint64_t, size_t, void *);
    int (*synchronize)(void *);
    int (*is_capturing)(void *, int *);
    int (*error)(int, const char **);
} driver;

struct cumla_library {
    driver cuda;
    void *libcuda;
    int device;
    bool retained;
    unsigned char *file;
    const unsigned char *tables[TABLES];
    uint64_t counts[TABLES];
    void **modules;    /* by program */
    void **functions;  /* by function */
};

/* ---- messages */

static _Thread_local char message[512];

const char *cumla_message(void) { return message; }

static int failed(int status, const char *format, ...) {
    va_list rest;
    va_start(rest, format);
    vsnprintf(message, sizeof message, format, rest);
    va_end(rest);
    return status;
}

static int refused(const driver *cuda, const char *function, int error) {
    const char *name = NULL;
    if (cuda->error) cuda->error(error, &name);
    return failed(CUMLA_DRIVER_ERROR, "%s: the driver returned %d (%s)", function, error, name ? name : "unknown");
}

/* ---- tables. Everything in them is checked once, at opening. */

#define ENTRY(library, table, type, index) ((const type *)(library)->tables[table] + (index))

static uint32_t number(const cumla_library *x, int table, uint64_t index) {
    return *ENTRY(x, table, uint32_t, index);
}

static const char *text(const cumla_library *x, uint32_t place) { return (const char *)x->tables[BYTES] + place; }

static bool within(const cumla_library *x, int table, uint64_t first, uint64_t count) {
    return first <= x->counts[table] && count <= x->counts[table] - first;
}

static bool is_text(const cumla_library *x, uint32_t place) {
    return place < x->counts[BYTES] && memchr(x->tables[BYTES] + place, 0, x->counts[BYTES] - place);
}

static uint64_t checksum(const unsigned char *data, size_t bytes) {
    uint32_t first = 0, second = 0;
    for (size_t at = 0; at < bytes; at += 4) {
        uint32_t word = 0;
        memcpy(&word, data + at, bytes - at < 4 ? bytes - at : 4);
        first += word;
        second += first;
    }
    return first | (uint64_t)second << 32;
}

/* Whether a word reads only fields and runs that exist. */
static bool is_word(const cumla_library *x, uint32_t index, uint32_t fields) {
    if (index >= x->counts[WORDS]) return false;
    const word_entry *w = ENTRY(x, WORDS, word_entry, index);
    const uint16_t read[] = {w->first, w->second, w->third, w->base};
    for (int i = 0; i < 4; i++)
        if (read[i] != NONE16 && read[i] >= fields) return false;
    if (w->divisor < 1) return false;
    return !w->runs || within(x, RUNS, w->run, w->runs);
}

static bool is_launch(const cumla_library *x, const launch_entry *l, uint32_t fields) {
    if (l->function >= x->counts[FUNCTIONS] || l->argument_bytes > MOST_ARGUMENT_BYTES ||
        !within(x, BYTES, l->arguments, l->argument_bytes) || !within(x, PARTS, l->part, l->parts))
        return false;
    for (int i = 0; i < 3; i++)
        if (!is_word(x, l->grid[i], fields)) return false;
    if (!is_word(x, l->shared, fields)) return false;
    for (uint32_t i = 0; i < l->parts; i++) {
        const part_entry *p = ENTRY(x, PARTS, part_entry, l->part + i);
        uint32_t bytes = p->bytes == FLOAT_PART || p->bytes == LOG2_PART ? sizeof(float) : p->bytes;
        if (p->offset > l->argument_bytes || bytes > l->argument_bytes - p->offset ||
            !(bytes == MAP_BYTES ? p->words == MAP_WORDS : p->words == 1 && bytes <= 8) || !within(x, PART_WORDS, p->word, p->words))
            return false;
        for (uint32_t j = 0; j < p->words; j++)
            if (!is_word(x, number(x, PART_WORDS, p->word + j), fields)) return false;
    }
    return true;
}

static bool is_record(const cumla_library *x, uint32_t index) {
    const record_entry *r = ENTRY(x, RECORDS, record_entry, index);
    if (r->operation >= x->counts[OPERATIONS] || !is_text(x, r->name) || !r->segments ||
        !within(x, CONDITIONS, r->condition, r->conditions) || !within(x, SEGMENTS, r->segment, r->segments))
        return false;
    uint32_t fields = ENTRY(x, OPERATIONS, operation_entry, r->operation)->words;
    if (!is_word(x, r->by, fields)) return false;
    for (uint32_t i = 0; i < r->conditions; i++) {
        const condition_entry *c = ENTRY(x, CONDITIONS, condition_entry, r->condition + i);
        if (c->field >= fields || c->kind > PRODUCT || !c->multiple) return false;
        if (c->kind != RANGE && c->kind != NUMBER && !is_word(x, c->word, fields)) return false;
    }
    for (uint32_t i = 0; i < r->segments; i++) {
        const segment_entry *s = ENTRY(x, SEGMENTS, segment_entry, r->segment + i);
        if (s->sequence >= x->counts[SEQUENCES]) return false;
        const sequence_entry *q = ENTRY(x, SEQUENCES, sequence_entry, s->sequence);
        if (!within(x, LAUNCHES, q->launch, q->launches)) return false;
        for (uint32_t j = 0; j < q->launches; j++)
            if (!is_launch(x, ENTRY(x, LAUNCHES, launch_entry, q->launch + j), fields)) return false;
    }
    return true;
}

/* Whether a check compares elements of its array, which has these bytes and elements of this type. */
static bool is_check(const cumla_library *x, const check_entry *c, uint64_t bytes, int64_t type) {
    if (type < CUMLA_UINT8 || type > CUMLA_UINT16 || type == CUMLA_FLOAT16 || type == CUMLA_E4M3) return false;
    const uint64_t elements = bytes / TYPE_BYTES[type];
    return c->count && c->stride && c->first < elements && (c->count - 1) <= (elements - 1 - c->first) / c->stride &&
           within(x, BYTES, c->place, (uint64_t)c->count * TYPE_BYTES[type]);
}

static bool is_case(const cumla_library *x, const case_entry *c) {
    if (c->operation >= x->counts[OPERATIONS] || !is_text(x, c->name) || c->bytes > MOST_SELF_TEST) return false;
    const operation_entry *o = ENTRY(x, OPERATIONS, operation_entry, c->operation);
    if (!within(x, CASE_WORDS, c->word, o->words) || !within(x, FILLS, c->fill, c->fills) || !within(x, CHECKS, c->check, c->checks))
        return false;
    const int64_t *words = ENTRY(x, CASE_WORDS, int64_t, c->word);
    for (uint32_t i = 0; i < c->fills; i++) {
        const fill_entry *f = ENTRY(x, FILLS, fill_entry, c->fill + i);
        if (f->field + sizeof(cumla_array) / 8 > o->words || !f->period || !within(x, BYTES, f->place, f->period)) return false;
        const uint64_t at = (uint64_t)words[f->field];
        if (at > c->bytes || f->bytes > c->bytes - at) return false;
    }
    for (uint32_t i = 0; i < c->checks; i++) {
        const check_entry *k = ENTRY(x, CHECKS, check_entry, c->check + i);
        if (k->fill >= c->fills) return false;
        const fill_entry *f = ENTRY(x, FILLS, fill_entry, c->fill + k->fill);
        if (!is_check(x, k, f->bytes, words[f->field + 1])) return false;
    }
    return true;
}

static bool has_valid_tables(const cumla_library *x) {
    for (uint64_t i = 0; i < x->counts[OPERATIONS]; i++) {
        const operation_entry *o = ENTRY(x, OPERATIONS, operation_entry, i);
        if (!is_text(x, o->name) || o->words > NONE16 || !within(x, FIELD_NAMES, o->field_name, o->words) ||
            !within(x, RECORDS, o->record, o->records) || !within(x, ARRAYS, o->array, o->arrays) ||
            (o->workspace != NONE32 && o->workspace >= o->words))
            return false;
        for (uint32_t j = 0; j < o->words; j++)
            if (!is_text(x, number(x, FIELD_NAMES, o->field_name + j))) return false;
        for (uint32_t j = 0; j < o->arrays; j++)
            if (number(x, ARRAYS, o->array + j) + sizeof(cumla_array) / 8 > o->words) return false;
        for (uint32_t j = 0; j < o->records; j++)
            if (ENTRY(x, RECORDS, record_entry, o->record + j)->operation != i) return false;
    }
    for (uint64_t i = 0; i < x->counts[RECORDS]; i++)
        if (!is_record(x, (uint32_t)i)) return false;
    for (uint64_t i = 0; i < x->counts[FUNCTIONS]; i++) {
        const function_entry *f = ENTRY(x, FUNCTIONS, function_entry, i);
        if (f->program >= x->counts[PROGRAMS] || !is_text(x, f->name) || f->shared > MOST_GRID) return false;
    }
    for (uint64_t i = 0; i < x->counts[CLUSTERS]; i++)
        if (ENTRY(x, CLUSTERS, cluster_entry, i)->function >= x->counts[FUNCTIONS]) return false;
    for (uint64_t i = 0; i < x->counts[PROGRAMS]; i++) {
        const program_entry *p = ENTRY(x, PROGRAMS, program_entry, i);
        if (!within(x, BYTES, p->at, p->bytes) || !p->bytes) return false;
    }
    for (uint64_t i = 0; i < x->counts[CASES]; i++)
        if (!is_case(x, ENTRY(x, CASES, case_entry, i))) return false;
    return true;
}

static int read_tables(cumla_library *x, size_t bytes) {
    const header *h = (const header *)x->file;
    const uint16_t one = 1;
    if (*(const unsigned char *)&one != 1) return failed(CUMLA_BAD_FILE, "file: is little-endian, this machine is not");
    if (bytes < sizeof *h || memcmp(h->magic, "CUMLA\0\r\n", 8))
        return failed(CUMLA_BAD_FILE, "file: was not written by cumla export");
    if (h->version != 2 || h->abi != CUMLA_ABI || h->tables != TABLES)
        return failed(CUMLA_BAD_FILE, "file: version %u, structs %08x; this source has version 2, structs %08x: export "
                      "the file and the runtime with one version of cumla", h->version, h->abi, CUMLA_ABI);
    size_t first = sizeof *h + TABLES * sizeof(table_entry);
    if (h->bytes != bytes || bytes < first)
        return failed(CUMLA_BAD_FILE, "file: %zu bytes, its header says %llu", bytes, (unsigned long long)h->bytes);
    if (checksum(x->file + sizeof *h, bytes - sizeof *h) != h->checksum)
        return failed(CUMLA_BAD_FILE, "file: the checksum is wrong");
    const table_entry *tables = (const table_entry *)(x->file + sizeof *h);
    for (int i = 0; i < TABLES; i++) {
        uint64_t offset = tables[i].offset, count = tables[i].count;
        if (offset < first || offset > bytes || offset % 8 || count > (bytes - offset) / ENTRY_BYTES[i])
            return failed(CUMLA_BAD_FILE, "file: table %d is outside of it", i);
        x->tables[i] = x->file + offset;
        x->counts[i] = count;
    }
    if (!has_valid_tables(x)) return failed(CUMLA_BAD_FILE, "file: a table names an entry that does not exist");
    return CUMLA_OK;
}

/* ---- opening */

static int find_driver(cumla_library *x) {
    x->libcuda = dlopen(CUMLA_LIBCUDA, RTLD_NOW);
    if (!x->libcuda) return failed(CUMLA_NO_DRIVER, "libcuda: %s", dlerror());
    struct { const char *name; void *place; } functions[] = {
        {"cuInit", &x->cuda.init}, {"cuDeviceGet", &x->cuda.device_get},
        {"cuDeviceGetAttribute", &x->cuda.device_attribute}, {"cuDevicePrimaryCtxRetain", &x->cuda.primary_retain},
        {"cuDevicePrimaryCtxRelease_v2", &x->cuda.primary_release}, {"cuCtxSetCurrent", &x->cuda.set_current},
        {"cuModuleLoadData", &x->cuda.load}, {"cuModuleUnload", &x->cuda.unload},
        {"cuModuleGetFunction", &x->cuda.get_function}, {"cuFuncSetAttribute", &x->cuda.set_attribute},
        {"cuLaunchKernelEx", &x->cuda.launch}, {"cuOccupancyMaxActiveClusters", &x->cuda.most_clusters},
        {"cuTensorMapEncodeTiled", &x->cuda.encode}, {"cuMemsetD8Async", &x->cuda.memset},
        {"cuMemcpyHtoDAsync_v2", &x->cuda.to_device}, {"cuMemcpyDtoHAsync_v2", &x->cuda.to_host},
        {"cuStreamSynchronize", &x->cuda.synchronize}, {"cuStreamIsCapturing", &x->cuda.is_capturing},
        {"cuGetErrorName", &x->cuda.error}};
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *found = dlsym(x->libcuda, functions[i].name);
        if (!found) return failed(CUMLA_NO_DRIVER, "libcuda: has no %s; CUDA 12 or later is needed", functions[i].name);
        memcpy(functions[i].place, &found, sizeof found);
    }
    return CUMLA_OK;
}

#define ASK(library, name, function, ...)                                 \
    do {                                                                  \
        int error_ = (library)->cuda.function(__VA_ARGS__);               \
        if (error_) return refused(&(library)->cuda, name, error_);       \
    } while (0)

static int check_device(cumla_library *x) {
    const header *h = (const header *)x->file;
    int device, major, minor, sms;
    ASK(x, "cuInit", init, 0);
    ASK(x, "cuDeviceGet", device_get, &device, x->device);
    ASK(x, "cuDeviceGetAttribute", device_attribute, &major, MAJOR, device);
    ASK(x, "cuDeviceGetAttribute", device_attribute, &minor, MINOR, device);
    ASK(x, "cuDeviceGetAttribute", device_attribute, &sms, SMS, device);
    if ((uint32_t)(10 * major + minor) != h->capability || (uint32_t)sms != h->sms)
        return failed(CUMLA_WRONG_DEVICE, "device %d: capability %d.%d with %d SMs; the file is for %u.%u with %u SMs",
                      x->device, major, minor, sms, h->capability / 10, h->capability % 10, h->sms);
    void *context;
    ASK(x, "cuDevicePrimaryCtxRetain", primary_retain, &context, device);
    x->retained = true;
    ASK(x, "cuCtxSetCurrent", set_current, context);
    return CUMLA_OK;
}

static int load_functions(cumla_library *x) {
    x->modules = calloc(x->counts[PROGRAMS] + 1, sizeof *x->modules);
    x->functions = calloc(x->counts[FUNCTIONS] + 1, sizeof *x->functions);
    if (!x->modules || !x->functions) return failed(CUMLA_BAD_FILE, "file: no memory for its kernels");
    for (uint64_t i = 0; i < x->counts[PROGRAMS]; i++)
        ASK(x, "cuModuleLoadData", load, &x->modules[i], x->tables[BYTES] + ENTRY(x, PROGRAMS, program_entry, i)->at);
    for (uint64_t i = 0; i < x->counts[FUNCTIONS]; i++) {
        const function_entry *f = ENTRY(x, FUNCTIONS, function_entry, i);
        ASK(x, "cuModuleGetFunction", get_function, &x->functions[i], x->modules[f->program], text(x, f->name));
        if (f->shared) ASK(x, "cuFuncSetAttribute", set_attribute, x->functions[i], MAX_DYNAMIC_SHARED, (int)f->shared);
    }
    return CUMLA_OK;
}

/* The division of work counts on so many clusters at a time, as the exporting machine was told. */
static int check_clusters(const cumla_library *x) {
    for (uint64_t i = 0; i < x->counts[CLUSTERS]; i++) {
        const cluster_entry *c = ENTRY(x, CLUSTERS, cluster_entry, i);
        launch_attribute attribute = {.id = CLUSTER_DIMENSION};
        const uint32_t size[3] = {c->ctas, 1, 1};
        memcpy(attribute.value, size, sizeof size);
        launch_config config = {.grid = {c->ctas, 1, 1}, .block = {c->threads, 1, 1}, .shared = c->shared,
                                .attributes = &attribute, .num_attributes = 1};
        int found = 0;
        ASK(x, "cuOccupancyMaxActiveClusters", most_clusters, &found, x->functions[c->function], &config);
        if (found < 0 || (uint32_t)found < c->most)
            return failed(CUMLA_WRONG_DEVICE, "device %d: runs %d clusters of %u CTAs at a time; the file is for %u",
                          x->device, found, c->ctas, c->most);
    }
    return CUMLA_OK;
}

static int opened(cumla_library *x, size_t bytes) {
    int status = read_tables(x, bytes);
    if (!status) status = find_driver(x);
    if (!status) status = check_device(x);
    if (!status) status = load_functions(x);
    return status ? status : check_clusters(x);
}

int cumla_open_memory(const void *data, size_t bytes, int device, cumla_library **library) {
    *library = NULL;
    cumla_library *x = calloc(1, sizeof *x);
    if (x) x->file = malloc(bytes ? bytes : 1); /* aligned for every table */
    if (!x || !x->file) {
        free(x);
        return failed(CUMLA_BAD_FILE, "file: no memory for its %zu bytes", bytes);
    }
    memcpy(x->file, data, bytes);
    x->device = device;
    int status = opened(x, bytes);
    if (status)
        cumla_close(x);
    else
        *library = x;
    return status;
}

int cumla_open(const char *path, int device, cumla_library **library) {
    *library = NULL;
    FILE *file = fopen(path, "rb");
    if (!file) return failed(CUMLA_BAD_FILE, "%s: cannot be opened", path);
    long bytes = fseek(file, 0, SEEK_END) ? -1 : ftell(file);
    unsigned char *data = bytes > 0 && !fseek(file, 0, SEEK_SET) ? malloc((size_t)bytes) : NULL;
    size_t got = data ? fread(data, 1, (size_t)bytes, file) : 0;
    fclose(file);
    int status = got && got == (size_t)bytes ? cumla_open_memory(data, got, device, library)
                                             : failed(CUMLA_BAD_FILE, "%s: cannot be read", path);
    free(data);
    return status;
}

void cumla_close(cumla_library *x) {
    if (!x) return;
    for (uint64_t i = 0; x->modules && i < x->counts[PROGRAMS]; i++)
        if (x->modules[i]) x->cuda.unload(x->modules[i]);
    if (x->retained) x->cuda.primary_release(x->device);
    free(x->modules);
    free(x->functions);
    free(x->file);
    free(x); /* libcuda stays loaded, as other libraries use it */
}

/* ---- words. Arithmetic is modulo 2^64, as unsigned: a file's numbers can be any. */

static int64_t evaluated(const cumla_library *x, uint32_t index, const int64_t *fields, int64_t by) {
    const word_entry *w = ENTRY(x, WORDS, word_entry, index);
    uint64_t base = w->base == NONE16 ? 0 : (uint64_t)fields[w->base];
    if (w->runs) {
        const run_entry *run = ENTRY(x, RUNS, run_entry, w->run), *low = run;
        for (uint32_t count = w->runs; count > 1;) { /* the last run that starts at or before `by` */
            uint32_t half = count / 2;
            if (low[half].start <= by) low += half;
            count -= half;
        }
        return (int64_t)(base + (uint64_t)low->value + (uint64_t)low->slope * ((uint64_t)by - (uint64_t)low->start));
    }
    uint64_t product = (uint64_t)w->scale;
    if (w->first != NONE16) product *= (uint64_t)fields[w->first];
    if (w->second != NONE16) product *= (uint64_t)fields[w->second];
    if (w->third != NONE16) product += (uint64_t)fields[w->third] * (uint64_t)w->third_scale;
    int64_t sum = (int64_t)(product + (uint64_t)w->add);
    if (w->divisor > 1) sum = sum / w->divisor + (sum % w->divisor > 0); /* rounded up */
    if (sum > w->most) sum = w->most;
    return (int64_t)(base + (uint64_t)sum);
}

/* ---- calls */

/* Returns 0, or 1 + the index of the condition that the fields do not meet. */
static uint32_t unmet(const cumla_library *x, const record_entry *r, const int64_t *fields, uint32_t workspace,
                      int64_t *by) {
    *by = evaluated(x, r->by, fields, 0);
    for (uint32_t i = 0; i < r->conditions; i++) {
        const condition_entry *c = ENTRY(x, CONDITIONS, condition_entry, r->condition + i);
        int64_t value = fields[c->field];
        bool met;
        if (c->kind == RANGE || c->kind == NUMBER) /* positive numbers are in the order of their bits */
            met = value >= c->least && value <= c->most && !((uint64_t)value % c->multiple);
        else if (c->kind == EQUAL)
            met = value == evaluated(x, c->word, fields, *by);
        else if (c->kind == PRODUCT) {
            value = evaluated(x, c->word, fields, *by);
            met = value >= c->least && value <= c->most;
        } else
            met = workspace == c->field || value >= evaluated(x, c->word, fields, *by);
        if (!met) return i + 1;
    }
    return 0;
}

/* Rows of arrays do not overlap: kernels assume that they can write them in any order. */
static bool overlaps(const int64_t *array) {
    const int64_t *shape = array + 3, *strides = shape + CUMLA_AXES;
    for (int64_t axis = 0; axis + 1 < array[2] && axis + 1 < CUMLA_AXES; axis++)
        if (shape[axis] > 1 && shape[axis + 1] > 0 && strides[axis] / shape[axis + 1] < strides[axis + 1]) return true;
    return false;
}

static int described_condition(const cumla_library *x, const operation_entry *o, const record_entry *r, uint32_t index,
                               const int64_t *fields, int64_t by) {
    const condition_entry *c = ENTRY(x, CONDITIONS, condition_entry, r->condition + index);
    const char *operation = text(x, o->name), *field = text(x, number(x, FIELD_NAMES, o->field_name + c->field));
    int64_t got = fields[c->field];
    if (c->kind == EQUAL)
        return failed(CUMLA_NOT_SERVED, "%s: %s: got %lld, expected %lld (%s)", operation, field, (long long)got,
                      (long long)evaluated(x, c->word, fields, by), text(x, r->name));
    if (c->kind == AT_LEAST)
        return failed(CUMLA_NOT_SERVED, "%s: %s: got %lld, expected at least %lld (%s)", operation, field, (long long)got,
                      (long long)evaluated(x, c->word, fields, by), text(x, r->name));
    if (c->kind == PRODUCT) {
        const word_entry *w = ENTRY(x, WORDS, word_entry, c->word);
        uint32_t second = w->second < o->words ? w->second : c->field;
        return failed(CUMLA_NOT_SERVED, "%s: %s * %s: got %lld, expected %lld to %lld (%s)", operation, field,
                      text(x, number(x, FIELD_NAMES, o->field_name + second)),
                      (long long)evaluated(x, c->word, fields, by), (long long)c->least, (long long)c->most,
                      text(x, r->name));
    }
    if (c->kind == NUMBER) {
        double numbers[3];
        const int64_t bits[3] = {got, c->least, c->most};
        memcpy(numbers, bits, sizeof numbers);
        if (got == INT64_MIN)
            return failed(CUMLA_NOT_SERVED, "%s: %s: got CUMLA_NO_NUMBER, expected a number from %g to %g (%s)",
                          operation, field, numbers[1], numbers[2], text(x, r->name));
        return failed(CUMLA_NOT_SERVED, "%s: %s: got %g, expected a number from %g to %g (%s)", operation, field,
                      numbers[0], numbers[1], numbers[2], text(x, r->name));
    }
    return failed(CUMLA_NOT_SERVED, "%s: %s: got %lld, expected a multiple of %u from %lld to %lld (%s)", operation,
                  field, (long long)got, c->multiple, (long long)c->least, (long long)c->most, text(x, r->name));
}

/* Finds the record that serves a call. workspace: a field that may be too small, or NONE32. */
static int find_record(const cumla_library *x, uint32_t operation, const void *arguments, size_t bytes,
                       bool any_workspace, const record_entry **record, const int64_t **words, int64_t *by) {
    if (!x || !arguments) return failed(CUMLA_WRONG_STRUCT, "library or arguments: got NULL");
    if (operation >= x->counts[OPERATIONS])
        return failed(CUMLA_WRONG_STRUCT, "operation: got %u, expected less than %llu", operation,
                      (unsigned long long)x->counts[OPERATIONS]);
    const operation_entry *o = ENTRY(x, OPERATIONS, operation_entry, operation);
    if (bytes != 8 * (size_t)o->words)
        return failed(CUMLA_WRONG_STRUCT, "%s: got a struct of %zu bytes, expected %zu", text(x, o->name), bytes,
                      8 * (size_t)o->words);
    const int64_t *fields = arguments;
    uint32_t best = 0, furthest = 0, workspace = any_workspace ? o->workspace : NONE32;
    for (uint32_t i = 0; i < o->records; i++) {
        const record_entry *r = ENTRY(x, RECORDS, record_entry, o->record + i);
        uint32_t wrong = unmet(x, r, fields, workspace, by);
        if (!wrong) {
            *record = r;
            *words = fields;
            return CUMLA_OK;
        }
        if (wrong > furthest) best = i, furthest = wrong; /* the record that is most like the call */
    }
    if (!o->records) return failed(CUMLA_NOT_SERVED, "%s: the file has no such operation", text(x, o->name));
    const record_entry *r = ENTRY(x, RECORDS, record_entry, o->record + best);
    unmet(x, r, fields, workspace, by);
    return described_condition(x, o, r, furthest - 1, fields, *by);
}

/* Writes a tensor map, as cumla/kernels/cuda/tma.py encodes it; zeros if the driver rejects it. */
static void encode_map(const cumla_library *x, const int64_t *words, unsigned char *out) {
    _Alignas(64) unsigned char map[MAP_BYTES];
    const uint64_t sizes[3] = {(uint64_t)words[1], (uint64_t)words[2], (uint64_t)words[3]};
    const uint64_t strides[2] = {(uint64_t)words[4], (uint64_t)words[5]};
    const uint32_t box[3] = {64, (uint32_t)words[6], 1}, steps[3] = {1, 1, 1};
    void *address = (void *)(uintptr_t)words[0];
    memset(map, 0, sizeof map);
    if (x->cuda.encode(map, UINT16, 3, address, sizes, strides, box, steps, 0, SWIZZLE_128B, L2_PROMOTION_256B, 0))
        memset(map, 0, sizeof map);
    memcpy(out, map, sizeof map);
}

static int launch(const cumla_library *x, const launch_entry *l, const int64_t *fields, int64_t by, void *stream,
                  bool overlap) {
    _Alignas(64) unsigned char arguments[MOST_ARGUMENT_BYTES];
    memcpy(arguments, x->tables[BYTES] + l->arguments, l->argument_bytes);
    for (uint32_t i = 0; i < l->parts; i++) {
        const part_entry *p = ENTRY(x, PARTS, part_entry, l->part + i);
        int64_t words[MAP_WORDS];
        for (uint32_t j = 0; j < p->words; j++)
            words[j] = evaluated(x, number(x, PART_WORDS, p->word + j), fields, by);
        if (p->bytes == MAP_BYTES)
            encode_map(x, words, arguments + p->offset);
        else if (p->bytes == FLOAT_PART || p->bytes == LOG2_PART) {
            double number;
            memcpy(&number, words, sizeof number);
            const float rounded = (float)(p->bytes == LOG2_PART ? number * LOG2_E : number);
            memcpy(arguments + p->offset, &rounded, sizeof rounded);
        } else
            memcpy(arguments + p->offset, words, p->bytes); /* little-endian: the low bytes are first */
    }
    launch_attribute attribute = {.id = PROGRAMMATIC_STREAM_SERIALIZATION, .value = {1}};
    launch_config config = {.stream = stream, .attributes = &attribute, .num_attributes = overlap && l->overlap};
    for (int i = 0; i < 3; i++) {
        int64_t size = evaluated(x, l->grid[i], fields, by);
        if (size <= 0) return CUMLA_OK; /* no CTAs */
        if (size > MOST_GRID) return failed(CUMLA_NOT_SERVED, "a grid of %lld CTAs is too large", (long long)size);
        config.grid[i] = (uint32_t)size;
        config.block[i] = l->block[i];
    }
    config.shared = (uint32_t)evaluated(x, l->shared, fields, by);
    size_t bytes = l->argument_bytes;
    void *extra[] = {(void *)1, arguments, (void *)2, &bytes, (void *)0}; /* CU_LAUNCH_PARAM_BUFFER_POINTER, _SIZE */
    ASK(x, "cuLaunchKernelEx", launch, &config, x->functions[l->function], NULL, extra);
    return CUMLA_OK;
}

static const sequence_entry *sequence_of(const cumla_library *x, const record_entry *r, int64_t by) {
    const segment_entry *segment = ENTRY(x, SEGMENTS, segment_entry, r->segment), *end = segment + r->segments - 1;
    while (segment < end && segment->last < by) segment++;
    return ENTRY(x, SEQUENCES, sequence_entry, segment->sequence);
}

static int check_arrays(const cumla_library *x, const operation_entry *o, const int64_t *fields) {
    for (uint32_t i = 0; i < o->arrays; i++) {
        uint32_t field = number(x, ARRAYS, o->array + i);
        if (overlaps(fields + field))
            return failed(CUMLA_NOT_SERVED, "%s: %s: its rows overlap", text(x, o->name),
                          text(x, number(x, FIELD_NAMES, o->field_name + field)));
    }
    return CUMLA_OK;
}

int cumla_call(const cumla_library *x, uint32_t operation, const void *arguments, size_t bytes, void *stream,
               uint32_t flags) {
    const record_entry *record;
    const int64_t *fields;
    int64_t by;
    int status = find_record(x, operation, arguments, bytes, false, &record, &fields, &by);
    if (!status) status = check_arrays(x, ENTRY(x, OPERATIONS, operation_entry, operation), fields);
    if (status) return status;
    const sequence_entry *sequence = sequence_of(x, record, by);
    for (uint32_t i = 0; i < sequence->launches && !status; i++) {
        const launch_entry *l = ENTRY(x, LAUNCHES, launch_entry, sequence->launch + i);
        status = launch(x, l, fields, by, stream, !(flags & CUMLA_ORDINARY));
    }
    return status;
}

int cumla_supported(const cumla_library *x, uint32_t operation, const void *arguments, size_t bytes) {
    const record_entry *record;
    const int64_t *fields;
    int64_t by;
    int status = find_record(x, operation, arguments, bytes, false, &record, &fields, &by);
    return status ? status : check_arrays(x, ENTRY(x, OPERATIONS, operation_entry, operation), fields);
}

int cumla_workspace(const cumla_library *x, uint32_t operation, const void *arguments, size_t bytes,
                    uint64_t *needed) {
    const record_entry *record;
    const int64_t *fields;
    int64_t by;
    *needed = 0;
    int status = find_record(x, operation, arguments, bytes, true, &record, &fields, &by);
    if (status) return status;
    for (uint32_t i = 0; i < record->conditions; i++) {
        const condition_entry *c = ENTRY(x, CONDITIONS, condition_entry, record->condition + i);
        if (c->kind == AT_LEAST) *needed = (uint64_t)evaluated(x, c->word, fields, by);
    }
    return CUMLA_OK;
}

int cumla_workspace_init(const cumla_library *x, uint64_t data, size_t bytes, void *stream) {
    if (!x || !data) return failed(CUMLA_WRONG_STRUCT, "library or data: got NULL");
    ASK(x, "cuMemsetD8Async", memset, data, 0, bytes, stream);
    return CUMLA_OK;
}

/* ---- self-test: calls of the file, whose results it has */

int cumla_self_test_bytes(const cumla_library *x, uint64_t *needed) {
    *needed = 0;
    if (!x) return failed(CUMLA_WRONG_STRUCT, "library: got NULL");
    for (uint64_t i = 0; i < x->counts[CASES]; i++) {
        const case_entry *c = ENTRY(x, CASES, case_entry, i);
        if (c->bytes > *needed) *needed = c->bytes;
    }
    return CUMLA_OK;
}

/* Writes an array: what the file has of it, repeated. */
static int write_array(const cumla_library *x, const fill_entry *f, uint64_t data, void *stream) {
    const unsigned char *block = x->tables[BYTES] + f->place;
    if (!f->bytes) return CUMLA_OK;
    if (f->period == 1) {
        ASK(x, "cuMemsetD8Async", memset, data, *block, f->bytes, stream);
        return CUMLA_OK;
    }
    unsigned char *all = malloc(f->bytes);
    if (!all) return failed(CUMLA_NO_MEMORY, "self-test: no memory for %llu bytes", (unsigned long long)f->bytes);
    for (uint64_t at = 0; at < f->bytes; at += f->period)
        memcpy(all + at, block, f->bytes - at < f->period ? f->bytes - at : f->period);
    int error = x->cuda.to_device(data, all, f->bytes, stream);
    if (!error) error = x->cuda.synchronize(stream); /* before the host's memory is free */
    free(all);
    return error ? refused(&x->cuda, "cuMemcpyHtoDAsync", error) : CUMLA_OK;
}

static double element(const unsigned char *data, int64_t type) {
    uint8_t byte = *data;
    uint16_t half;
    uint32_t word;
    int32_t integer;
    int64_t large;
    float real;
    switch (type) {
        case CUMLA_INT8: return (int8_t)byte;
        case CUMLA_UINT16: memcpy(&half, data, 2); return half;
        case CUMLA_INT32: memcpy(&integer, data, 4); return integer;
        case CUMLA_UINT32: memcpy(&word, data, 4); return word;
        case CUMLA_INT64: memcpy(&large, data, 8); return (double)large;
        case CUMLA_FLOAT32: memcpy(&real, data, 4); return real;
        case CUMLA_BFLOAT16:
            memcpy(&half, data, 2);
            word = (uint32_t)half << 16;
            memcpy(&real, &word, 4);
            return real;
        default: return byte;
    }
}

/* Compares results with the file's. `got` begins with the first of them. */
static int compare(const cumla_library *x, const case_entry *c, const check_entry *k, const unsigned char *got) {
    const operation_entry *o = ENTRY(x, OPERATIONS, operation_entry, c->operation);
    const uint32_t field = ENTRY(x, FILLS, fill_entry, c->fill + k->fill)->field;
    const int64_t type = ENTRY(x, CASE_WORDS, int64_t, c->word)[field + 1];
    const char *array = text(x, number(x, FIELD_NAMES, o->field_name + field));
    const int length = (int)strcspn(array, ".");
    const unsigned char *wanted = x->tables[BYTES] + k->place;
    double products = 0, squares = 0;
    uint32_t beyond = 0;
    for (uint32_t i = 0; i < k->count; i++) {
        const double found = element(got + i * k->stride * TYPE_BYTES[type], type);
        const double want = element(wanted + (size_t)i * TYPE_BYTES[type], type);
        const double most = k->absolute + k->relative * fabs(want);
        if (isfinite(want) && isfinite(found)) products += found * want, squares += found * found + want * want;
        if (found == want || (isnan(found) && isnan(want))) continue;
        if (!(isfinite(want) && fabs(found - want) <= most) && ++beyond > k->most)
            return failed(CUMLA_WRONG_RESULT, "%s: %.*s[%llu]: got %.9g, expected %.9g within %.3g", text(x, c->name),
                          length, array, (unsigned long long)(k->first + i * k->stride), found, want, most);
    }
    const double distance = squares > 0 ? 1 - 2 * products / squares : 0;
    if (distance > k->cosine)
        return failed(CUMLA_WRONG_RESULT, "%s: %.*s: got a cosine distance of %.3g, expected at most %.3g",
                      text(x, c->name), length, array, distance, k->cosine);
    return CUMLA_OK;
}

static int check_results(const cumla_library *x, const case_entry *c, const check_entry *k, uint64_t memory, void *stream) {
    const uint32_t field = ENTRY(x, FILLS, fill_entry, c->fill + k->fill)->field;
    const int64_t *words = ENTRY(x, CASE_WORDS, int64_t, c->word);
    const uint64_t size = TYPE_BYTES[words[field + 1]], bytes = ((k->count - 1) * k->stride + 1) * size;
    unsigned char *got = malloc(bytes);
    if (!got) return failed(CUMLA_NO_MEMORY, "self-test: no memory for %llu bytes", (unsigned long long)bytes);
    int error = x->cuda.to_host(got, memory + (uint64_t)words[field] + k->first * size, bytes, stream);
    if (!error) error = x->cuda.synchronize(stream);
    int status = error ? refused(&x->cuda, "cuMemcpyDtoHAsync", error) : compare(x, c, k, got);
    free(got);
    return status;
}

static int run_case(const cumla_library *x, const case_entry *c, int64_t *words, uint64_t memory, void *stream) {
    const operation_entry *o = ENTRY(x, OPERATIONS, operation_entry, c->operation);
    memcpy(words, ENTRY(x, CASE_WORDS, int64_t, c->word), 8 * (size_t)o->words);
    int status = CUMLA_OK;
    for (uint32_t i = 0; i < c->fills && !status; i++) {
        const fill_entry *f = ENTRY(x, FILLS, fill_entry, c->fill + i);
        words[f->field] = (int64_t)(memory + (uint64_t)words[f->field]);
        status = write_array(x, f, (uint64_t)words[f->field], stream);
    }
    if (!status) status = cumla_call(x, c->operation, words, 8 * (size_t)o->words, stream, 0);
    for (uint32_t i = 0; i < c->checks && !status; i++)
        status = check_results(x, c, ENTRY(x, CHECKS, check_entry, c->check + i), memory, stream);
    return status;
}

int cumla_self_test(const cumla_library *x, uint64_t memory, size_t bytes, void *stream, uint32_t *calls) {
    uint64_t needed;
    int status = cumla_self_test_bytes(x, &needed), capturing = 0;
    if (calls) *calls = 0;
    if (status) return status;
    if (!memory || memory % SELF_TEST_ALIGNMENT || bytes < needed)
        return failed(CUMLA_WRONG_STRUCT, "memory: got %zu bytes at 0x%llx, expected %llu at a multiple of %d", bytes,
                      (unsigned long long)memory, (unsigned long long)needed, SELF_TEST_ALIGNMENT);
    ASK(x, "cuStreamIsCapturing", is_capturing, stream, &capturing);
    if (capturing) return failed(CUMLA_NOT_SERVED, "stream: got one that is captured, expected one that runs calls");
    for (uint64_t i = 0; i < x->counts[CASES] && !status; i++) {
        const case_entry *c = ENTRY(x, CASES, case_entry, i);
        int64_t *words = malloc(8 * (size_t)ENTRY(x, OPERATIONS, operation_entry, c->operation)->words + 8);
        if (!words) return failed(CUMLA_NO_MEMORY, "self-test: no memory for a call");
        status = run_case(x, c, words, memory, stream);
        free(words);
        if (!status && calls) ++*calls;
    }
    return status;
}

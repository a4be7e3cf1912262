/* A stand-in for libcuda: records launches and answers for a device of 132 SMs. Memory is the host's, a stream is none.
 * With STAND_IN_TRACE in the environment, launches are printed to stderr. */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    uint32_t grid[3], block[3], shared;
    uint32_t overlap, argument_bytes;
    uint64_t stream, function, code; /* code: the first 8 bytes of the module */
    unsigned char arguments[4096];
} launched;

enum { MOST = 64 };
static launched launches[MOST];
static int count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
int stand_in_sms = 132, stand_in_capability = 90, stand_in_clusters = 66, stand_in_error = 0;
static char names[4096][128];
static uint64_t codes[4096];
static int functions;

typedef struct { uint32_t id; char pad[4]; char value[64]; } attribute;
typedef struct {
    uint32_t grid[3], block[3], shared;
    void *stream;
    attribute *attributes;
    uint32_t num_attributes;
} config;

int cuInit(unsigned flags) { return (int)flags; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal < 0 || ordinal > 7 ? 101 : 0; }
int cuDeviceGetAttribute(int *value, int which, int device) {
    (void)device;
    *value = which == 75 ? stand_in_capability / 10 : which == 76 ? stand_in_capability % 10 : stand_in_sms;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &lock; return device < 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return device < 0; }
int cuCtxSetCurrent(void *context) { return context == NULL; }
int cuModuleLoadData(void **module, const void *data) { *module = (void *)data; return 0; }
int cuModuleUnload(void *module) { return module == NULL; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
    memcpy(&codes[functions % 4096], module, sizeof *codes);
    strncpy(names[functions % 4096], name, 127);
    *function = names[functions++ % 4096];
    return 0;
}
int cuFuncSetAttribute(void *function, int which, int value) { (void)function; return which != 8 || value < 0; }
int cuOccupancyMaxActiveClusters(int *found, void *function, const config *launch) {
    (void)function;
    *found = stand_in_clusters + 0 * (int)launch->grid[0];
    return 0;
}
int cuMemsetD8Async(uint64_t address, unsigned char value, size_t bytes, void *stream) {
    (void)stream;
    memset((void *)(uintptr_t)address, value, bytes);
    return 0;
}
int cuGetErrorName(int error, const char **name) { *name = error == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR"; return 0; }

/* The words of cumla/kernels/cuda/tma.py's described_map. */
int cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *address, const uint64_t *sizes,
                           const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                           int swizzle, int promotion, int fill) {
    if (type != 1 || rank != 3 || interleave || swizzle != 3 || promotion != 3 || fill || steps[0] != 1) return 1;
    const uint64_t words[10] = {(uintptr_t)address, 2, sizes[0], sizes[1], sizes[2], strides[0], strides[1], box[0], box[1], box[2]};
    memset(map, 0, 128);
    memcpy(map, words, sizeof words);
    return 0;
}

/* Memory, streams and graphs: a graph is the number of its launches. */

static int capturing, captured;

int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    void *found = aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (found) memset(found, 0xA5, bytes); /* as a device's memory, with anything in it */
    *address = (uintptr_t)found;
    return found ? 0 : 2;
}
int cuMemFree_v2(uint64_t address) { free((void *)(uintptr_t)address); return 0; }
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream) {
    (void)stream;
    memcpy((void *)(uintptr_t)to, from, bytes);
    return 0;
}
void (*stand_in_before_read)(uint64_t from, size_t bytes); /* for tests: writes results in the place of kernels */
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream) {
    (void)stream;
    if (stand_in_before_read) stand_in_before_read(from, bytes);
    memcpy(to, (const void *)(uintptr_t)from, bytes);
    return 0;
}
int cuStreamCreate(void **stream, unsigned flags) { *stream = &captured; return flags > 1; }
int cuStreamSynchronize(void *stream) { (void)stream; return capturing ? 900 : 0; }
int cuStreamIsCapturing(void *stream, int *status) { (void)stream; *status = capturing; return 0; }
int cuStreamDestroy_v2(void *stream) { return stream == NULL; }
int cuStreamBeginCapture_v2(void *stream, int mode) {
    (void)stream, (void)mode;
    capturing = 1, captured = 0;
    return 0;
}
int cuStreamEndCapture(void *stream, void **graph) {
    (void)stream;
    int *made = malloc(sizeof *made);
    *made = captured, *graph = made, capturing = 0;
    return 0;
}
int cuGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long flags) {
    int *made = malloc(sizeof *made);
    *made = *(int *)graph, *executable = made;
    return flags != 0;
}
int cuGraphLaunch(void *executable, void *stream) {
    (void)stream;
    if (getenv("STAND_IN_TRACE")) fprintf(stderr, "graph of %d launches\n", *(int *)executable);
    return capturing ? 900 : 0;
}
int cuGraphDestroy(void *graph) { free(graph); return 0; }
int cuGraphExecDestroy(void *executable) { free(executable); return 0; }

int cuLaunchKernelEx(const config *launch, void *function, void **parameters, void **extra) {
    if (stand_in_error) return stand_in_error;
    if (parameters || extra[0] != (void *)1 || extra[2] != (void *)2 || extra[4]) return 1;
    pthread_mutex_lock(&lock);
    launched *x = &launches[count++ % MOST];
    memset(x, 0, sizeof *x);
    memcpy(x->grid, launch->grid, 12);
    memcpy(x->block, launch->block, 12);
    x->shared = launch->shared;
    x->stream = (uintptr_t)launch->stream;
    x->function = (uintptr_t)function;
    x->code = codes[((char *)function - names[0]) / (ptrdiff_t)sizeof *names];
    x->overlap = launch->num_attributes == 1 && launch->attributes[0].id == 6 && launch->attributes[0].value[0] == 1;
    x->argument_bytes = (uint32_t)*(size_t *)extra[3];
    memcpy(x->arguments, extra[1], x->argument_bytes);
    pthread_mutex_unlock(&lock);
    if (getenv("STAND_IN_TRACE")) fprintf(stderr, "%s %s\n", capturing ? "captured" : "launched", (char *)function);
    captured += capturing;
    return 0;
}

/* For tests: the launches since the last call. */
int stand_in_launches(launched *out) {
    pthread_mutex_lock(&lock);
    int found = count < MOST ? count : MOST;
    memcpy(out, launches, sizeof *launches * (size_t)found);
    count = 0;
    pthread_mutex_unlock(&lock);
    return found;
}

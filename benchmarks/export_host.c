/* Host times of the C runtime, for benchmarks/export.py: the runtime's source is included for its parts. */
#define _POSIX_C_SOURCE 200809L
#include "cumla.c"

#include <time.h>

enum { MOST_LAUNCHES = 16, CALLS = 50 }; /* CALLS of a batch: fewer launches than a stream's queue holds */

typedef struct {
    launch_config config;
    launch_attribute attribute;
    void *function;
    unsigned char arguments[MOST_ARGUMENT_BYTES];
    size_t bytes;
} kept_launch;

static kept_launch kept[MOST_LAUNCHES];
static int launches;

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int keep(const launch_config *config, void *function, void **parameters, void **extra) {
    (void)parameters;
    if (launches == MOST_LAUNCHES) return 1;
    kept_launch *x = &kept[launches++];
    x->config = *config, x->attribute = *config->attributes, x->function = function;
    x->config.attributes = &x->attribute;
    x->bytes = *(size_t *)extra[3];
    memcpy(x->arguments, extra[1], x->bytes);
    return 0;
}

/* us of a launch: `of_call` of cumla_call, `of_driver` of cuLaunchKernelEx with the same launches, in turn, for each of
 * `batches`. Returns the launches of a call, or -1. */
int host_times(cumla_library *x, uint32_t operation, const void *arguments, size_t bytes, void *stream, int batches,
               double *of_call, double *of_driver) {
    int (*synchronize)(void *);
    void *found = dlsym(x->libcuda, "cuStreamSynchronize");
    if (!found) return -1;
    memcpy(&synchronize, &found, sizeof found);
    int (*launch_it)(const launch_config *, void *, void **, void **) = x->cuda.launch;
    launches = 0;
    x->cuda.launch = keep;
    int status = cumla_call(x, operation, arguments, bytes, stream, 0);
    x->cuda.launch = launch_it;
    if (status || !launches) return -1;
    for (int batch = 0; batch < batches; batch++) {
        double start = seconds();
        for (int i = 0; i < CALLS; i++) status |= cumla_call(x, operation, arguments, bytes, stream, 0);
        of_call[batch] = 1e6 * (seconds() - start) / CALLS / launches;
        status |= synchronize(stream);
        start = seconds();
        for (int i = 0; i < CALLS; i++)
            for (int j = 0; j < launches; j++) {
                void *extra[] = {(void *)1, kept[j].arguments, (void *)2, &kept[j].bytes, (void *)0};
                status |= launch_it(&kept[j].config, kept[j].function, NULL, extra);
            }
        of_driver[batch] = 1e6 * (seconds() - start) / CALLS / launches;
        status |= synchronize(stream);
        if (status) return -1;
    }
    return launches;
}

/* Opens a file in memory and closes it. Seconds: copying and checking it, finding the driver and the device, loading
 * cubins and functions, asking for clusters. Returns a cumla_status. */
int opening_times(const void *data, size_t bytes, int device, double parts[4]) {
    cumla_library *x = calloc(1, sizeof *x);
    double times[5] = {seconds()};
    if (!x || !(x->file = malloc(bytes))) return -1;
    memcpy(x->file, data, bytes);
    x->device = device;
    int status = read_tables(x, bytes);
    times[1] = seconds();
    if (!status) status = find_driver(x);
    if (!status) status = check_device(x);
    times[2] = seconds();
    if (!status) status = load_functions(x);
    times[3] = seconds();
    if (!status) status = check_clusters(x);
    times[4] = seconds();
    cumla_close(x);
    for (int i = 0; i < 4; i++) parts[i] = times[i + 1] - times[i];
    return status;
}

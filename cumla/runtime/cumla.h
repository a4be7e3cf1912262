/* cumla's kernels without Python: attention metadata, paged caches and sparse attention on NVIDIA GPUs.
 *
 * `cumla export` writes a file with the compiled kernels and the launches of every call that it serves. This library
 * opens the file and makes calls. It needs libcuda alone, which it finds at run time.
 *
 * A call takes the arguments of cumla's Python function of the same name, in the structs of cumla_operations.h. It
 * allocates nothing and does not wait for the device, so it may be captured in a CUDA graph. Arguments that the file
 * does not serve are an error, before anything is launched. Any number of threads may make calls at a time.
 * The primary context of the device that was opened must be current in the calling thread, as after cudaSetDevice.
 */
#ifndef CUMLA_H
#define CUMLA_H
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CUMLA_AXES 4

/* Types of an array's elements. */
enum cumla_type {
    CUMLA_UINT8 = 1, CUMLA_INT8, CUMLA_BOOL, CUMLA_INT32, CUMLA_INT64, CUMLA_FLOAT16, CUMLA_BFLOAT16, CUMLA_FLOAT32,
    CUMLA_E4M3, CUMLA_UINT32, CUMLA_UINT16
};

/* An array on the device. All zeros: no array. Addresses, and strides but the last one, are multiples of 16 bytes. */
typedef struct cumla_array {
    uint64_t data;                /* address of the first element */
    int64_t type;                 /* one of cumla_type */
    int64_t axes;                 /* how many entries of shape and strides there are; the others are 0 */
    int64_t shape[CUMLA_AXES];
    int64_t strides[CUMLA_AXES];  /* in bytes */
} cumla_array;

enum cumla_status {
    CUMLA_OK = 0,
    CUMLA_NO_DRIVER,     /* libcuda, or a function of it, was not found */
    CUMLA_DRIVER_ERROR,  /* the driver refused */
    CUMLA_BAD_FILE,      /* not written by cumla export, damaged, or of another version than this source */
    CUMLA_WRONG_DEVICE,  /* the file has no kernels for this device */
    CUMLA_WRONG_STRUCT,  /* another size than this source has */
    CUMLA_NOT_SERVED,    /* the file serves no such call: the message names a field */
    CUMLA_WRONG_RESULT,  /* a kernel's result differs from the file's: the message names the call, array and element */
    CUMLA_NO_MEMORY      /* the host has too little, of a self-test */
};

/* Flags of a call. */
enum cumla_flags {
    CUMLA_ORDINARY = 1 /* no kernel starts before the one ahead has ended, and none after the call before it has */
};

typedef struct cumla_library cumla_library;

/* Open a file, or one in memory, for CUDA device `device`: loads all kernels, and makes the device's primary context
 * current in this thread. Returns a cumla_status; *library is NULL after an error. */
int cumla_open(const char *path, int device, cumla_library **library);
int cumla_open_memory(const void *data, size_t bytes, int device, cumla_library **library);
/* Release it. No call may be running. */
void cumla_close(cumla_library *library);
/* What was wrong with this thread's last call that returned an error; an empty text if there was none. */
const char *cumla_message(void);

/* A call by the number of its operation, with the words of its struct; cumla_operations.h has a function for each.
 * `stream` is a CUstream. */
int cumla_call(const cumla_library *library, uint32_t operation, const void *arguments, size_t bytes, void *stream,
               uint32_t flags);
/* Whether the file serves a call: CUMLA_OK, or CUMLA_NOT_SERVED. Addresses may be any multiples of 16 but 0. */
int cumla_supported(const cumla_library *library, uint32_t operation, const void *arguments, size_t bytes);
/* The bytes of `workspace` that a call needs, 0 for none. The array's own size is not looked at. Its memory is zero
 * before its first call (cumla_workspace_init), and serves one stream at a time. */
int cumla_workspace(const cumla_library *library, uint32_t operation, const void *arguments, size_t bytes,
                    uint64_t *needed);
/* Set a workspace to zero, on this stream. */
int cumla_workspace_init(const cumla_library *library, uint64_t data, size_t bytes, void *stream);

/* Device memory that the self-test needs. */
int cumla_self_test_bytes(const cumla_library *library, uint64_t *needed);
/* Run a small call of every kernel of the file, and compare the results with the file's, each within its bound. The
 * device memory is the caller's, at a multiple of 256. Allocates host memory and waits for the stream, which must not
 * be captured. Stops at the first result that differs. *calls, unless NULL: how many calls were right. */
int cumla_self_test(const cumla_library *library, uint64_t memory, size_t bytes, void *stream, uint32_t *calls);

#ifdef __cplusplus
}
#endif
#endif

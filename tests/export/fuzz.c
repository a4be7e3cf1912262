/* Opens damaged files and makes calls of any words: for sanitizers. Arguments: a file of cumla export, a file of calls
 * (of each: operation, number of words, words; all of 8 bytes), mutations. Exit status 0 unless something is wrong. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cumla.h"

static uint64_t state = 88172645463325252u;
static uint64_t drawn(uint64_t end) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state % end;
}

static unsigned char *read_all(const char *path, size_t *bytes) {
    FILE *file = fopen(path, "rb");
    if (!file) exit(2);
    fseek(file, 0, SEEK_END);
    *bytes = (size_t)ftell(file);
    rewind(file);
    unsigned char *data = malloc(*bytes + 1);
    if (fread(data, 1, *bytes, file) != *bytes) exit(2);
    fclose(file);
    return data;
}

/* As the header's checksum, at byte 24 of its 48. */
static void correct(unsigned char *data, size_t bytes) {
    uint32_t first = 0, second = 0;
    for (size_t at = 48; at < bytes; at += 4) {
        uint32_t word = 0;
        memcpy(&word, data + at, bytes - at < 4 ? bytes - at : 4);
        first += word, second += first;
    }
    uint64_t sum = first | (uint64_t)second << 32, size = bytes;
    memcpy(data + 16, &size, 8);
    memcpy(data + 24, &sum, 8);
}

static int make_calls(const cumla_library *library, const int64_t *calls, size_t words, int damage) {
    int made = 0;
    for (size_t at = 0; at + 2 <= words;) {
        uint32_t operation = (uint32_t)calls[at];
        size_t count = (size_t)calls[at + 1];
        int64_t *fields = malloc(8 * count);
        memcpy(fields, calls + at + 2, 8 * count);
        static const int64_t odd[] = {0, 1, -1, 7, INT64_MIN, INT64_MAX, 1 << 20, 16, (int64_t)1 << 40};
        for (int i = 0; i < damage; i++) fields[drawn(count)] = drawn(2) ? odd[drawn(9)] : (int64_t)drawn(1 << 20);
        uint64_t bytes;
        made += !cumla_call(library, operation, fields, 8 * count, NULL, (uint32_t)drawn(2));
        cumla_supported(library, operation, fields, 8 * count);
        cumla_workspace(library, operation, fields, 8 * count, &bytes);
        cumla_call(library, operation + (uint32_t)drawn(3), fields, 8 * count, NULL, 0);
        free(fields);
        at += 2 + count;
    }
    return made;
}

/* In memory of the host, which is the stand-in's. Nothing computes the results. */
static void test_itself(const cumla_library *library) {
    uint64_t bytes;
    cumla_self_test_bytes(library, &bytes);
    if (bytes > 1 << 28) return;
    void *memory = aligned_alloc(256, (bytes + 256) / 256 * 256);
    if (memory) cumla_self_test(library, (uintptr_t)memory, bytes, NULL, NULL);
    free(memory);
}

int main(int count, char **arguments) {
    if (count != 4) return 2;
    size_t bytes, call_bytes;
    unsigned char *file = read_all(arguments[1], &bytes);
    int64_t *calls = (int64_t *)(void *)read_all(arguments[2], &call_bytes);
    cumla_library *library;
    if (cumla_open_memory(file, bytes, 0, &library)) return printf("%s\n", cumla_message()), 1;
    int made = make_calls(library, calls, call_bytes / 8, 0);
    printf("%d calls\n", made);
    for (int i = 0; i < 200; i++) make_calls(library, calls, call_bytes / 8, 1 + (int)drawn(4));
    cumla_close(library);
    int opened = 0;
    for (int i = 0; i < atoi(arguments[3]); i++) {
        size_t size = drawn(4) ? bytes : drawn(bytes + 1);
        unsigned char *damaged = malloc(size + 1);
        memcpy(damaged, file, size);
        size_t near = drawn(3) ? (size < 512 ? size : 512) : size; /* the header and the tables' places more often */
        for (uint64_t j = drawn(6); near && j > 0; j--) damaged[drawn(near)] = (unsigned char)drawn(256);
        if (size >= 48 && drawn(8)) correct(damaged, size);
        if (!cumla_open_memory(damaged, size, 0, &library)) {
            opened++;
            make_calls(library, calls, call_bytes / 8, (int)drawn(3));
            test_itself(library);
            cumla_close(library);
        } else if (!cumla_message()[0]) {
            return printf("no message\n"), 1;
        }
        free(damaged);
    }
    printf("%d of the damaged files opened\n", opened);
    free(file);
    free(calls);
    return 0;
}

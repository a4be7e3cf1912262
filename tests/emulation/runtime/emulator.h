// Declarations shared by the parts of the emulator and the kernels that run in it.
//
//     threads.cpp    threads of a block as fibers, and the scheduler
//     meetings.cpp   collectives of threads: warps, __syncthreads, named barriers, mbarriers
//     copies.cpp     cp.async, and copies of boxes by the tensor memory accelerator
//     matrices.cpp   ldmatrix, stmatrix, mma.sync, wgmma
//     formats.cpp    float16, bfloat16 and e4m3
//     device.h       what CUDA C++ declares without any include, on top of these
//
// Kernels are compiled one by one, so this header is kept small: the rest is compiled once.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <initializer_list>
#include <utility>

#define EXPORT __attribute__((visibility("default")))

namespace emulator {

// ---- threads.cpp

struct Index { unsigned x, y, z; };

// Blocked while (*word & mask) == value; `what` and `number` are for the report of a deadlock.
struct Wait {
    const uint64_t* word;
    uint64_t mask, value;
    const char* what;
    uint64_t number;
};

EXPORT extern Index thread_index, block_index, grid_size, block_size;  // thread_index: of the fiber that runs
EXPORT extern int thread_number, cluster_rank, cluster_size;  // thread_number: in its block
extern int fiber_number;                                      // in its cluster

EXPORT void wait(const Wait& wait);
EXPORT void wait_for_kernel_ahead();
// Ends the launch: the message becomes an error in Python.
[[noreturn]] EXPORT void fail(const char* format, ...);

// Asynchronous work: done at once or, if it is late, when no fiber can continue. Decided for each item.
struct Work {
    virtual ~Work() = default;
    virtual void run() = 0;
};
// A block's pending work, saved while blocks of the kernel ahead run; the destructor restores it.
struct SetAside {
    virtual ~SetAside() = default;
};
template <class T> struct Kept : SetAside {
    T &place, kept;
    explicit Kept(T& place_) : place(place_), kept(std::move(place_)) { place = T(); }
    ~Kept() override { place = std::move(kept); }
};

bool work_is_late();
void when_stuck(Work* work);
int random_number(int below);

// Shared memory is addressed from 0 on, where the system's part is, as on the device; in a cluster the upper byte is the
// block's rank.
constexpr uint32_t DYNAMIC_SHARED_AT = 1024;
constexpr int RANK_SHIFT = 24;
EXPORT extern uint8_t* shared_memory;
EXPORT extern uint32_t shared_end;
EXPORT uint8_t* shared_at(uint32_t address, uint32_t bytes);
// The address in another block of the cluster, or in this one.
EXPORT uint32_t mapped(uint32_t address, uint32_t rank);
EXPORT uint8_t* cluster_shared_at(uint32_t address, uint32_t bytes);
// Counts at a barrier of the target block when it arrives.
EXPORT void store_async(uint32_t address, std::initializer_list<uint32_t> values, uint32_t barrier);
uint32_t without_rank(uint32_t address);  // of this block's memory
// Global memory, for accesses that must be aligned.
inline uint8_t* global_at(const void* address, uint32_t bytes) {
    if (uintptr_t(address) % bytes) fail("%u bytes at %p, which is misaligned", bytes, address);
    return static_cast<uint8_t*>(const_cast<void*>(address));
}

// ---- meetings.cpp

constexpr int MOST_BYTES = 64;  // of a lane's input or result

using Act = void (*)(void* context, uint8_t (*brought)[MOST_BYTES], uint8_t (*taken)[MOST_BYTES]);
// All lanes of the warp arrive; the last one acts for all. Returns this lane's result.
EXPORT const uint8_t* meet(const char* what, const void* brought, size_t bytes, Act act, void* context);

template <class In, class F> const uint8_t* meet(const char* what, const In& in, F act) {
    static_assert(sizeof(In) <= MOST_BYTES);
    Act call = [](void* context, uint8_t (*brought)[MOST_BYTES], uint8_t (*taken)[MOST_BYTES]) {
        (*static_cast<F*>(context))(brought, taken);
    };
    return meet(what, &in, sizeof in, call, &act);
}
// All lanes of the warp arrive; returns every lane's word.
EXPORT const uint64_t* exchange(const char* what, uint64_t word);
// Every lane's `x`, valid until the next meeting.
template <class T> struct Table {
    const uint64_t* words;
    T operator[](int lane) const {
        T x;
        memcpy(&x, words + lane, sizeof x);
        return x;
    }
};
template <class T> Table<T> everybodys(const char* what, T x) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    uint64_t word = 0;
    memcpy(&word, &x, sizeof x);
    return {exchange(what, word)};
}
EXPORT uint32_t ballot(bool vote);

EXPORT void cluster_arrive();
EXPORT void cluster_wait();
EXPORT void block_sync();
EXPORT int block_sync_or(int predicate);
EXPORT void named_sync(int id, int threads);
EXPORT void named_arrive(int id, int threads);
EXPORT int named_sync_or(int id, int threads, int predicate);
EXPORT void barrier_init(uint32_t barrier, int arrivals);
EXPORT void barrier_arrive(uint32_t barrier, int count);
EXPORT void barrier_expect(uint32_t barrier, uint32_t bytes);
void barrier_bytes(uint32_t barrier, uint32_t bytes);  // have come
EXPORT bool barrier_passed(uint32_t barrier, uint32_t parity);
EXPORT void barrier_wait(uint32_t barrier, uint32_t parity);
void begin_block_meetings();
SetAside* set_aside_meetings();

// ---- copies.cpp

EXPORT void copy_async(uint32_t target, const void* source, int bytes, int present_bytes);
EXPORT void copies_commit();
EXPORT void copies_wait(uint32_t pending);
EXPORT void copies_arrive(uint32_t barrier);
EXPORT void store_bytes(void* target, uint32_t source, uint32_t bytes);
EXPORT void stores_commit();
EXPORT void stores_wait(uint32_t pending);
EXPORT void copy_box(uint32_t target, const void* map, int x, int y, int z, uint32_t barrier);
EXPORT void copy_bytes(uint32_t target, const void* source, uint32_t bytes, uint32_t barrier);
void begin_block_copies();
SetAside* set_aside_copies();
SetAside* set_aside_stores();

// ---- matrices.cpp

EXPORT void load_matrices(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t address, bool transposed);
EXPORT void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d, bool transposed);
EXPORT void mma(float& x0, float& x1, float& x2, float& x3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                uint32_t b0, uint32_t b1, bool bfloat16);
EXPORT void mma_f64(double& x0, double& x1, double a, double b);
// An 8 x 8 matrix of 16-bit values, as a fragment holds it, transposed.
EXPORT uint32_t transpose_matrix(uint32_t x);
// x (64 x columns) = a b (+ x); a from registers, or where that is null a tile. a_rows: a tile's rows are the product's;
// b_rows: they are its columns.
enum class Operands { f16, bf16, e4m3, e5m2 };  // of a product's first; the second of e5m2 is e4m3
EXPORT void wgmma(float* x, int columns, const uint32_t* a, uint64_t a_tile, uint64_t b_tile, bool a_rows,
                  bool b_rows, bool add, Operands type);
// With PTX's modifiers: factors of a and b; for values of 16 bits whether a, if it is a tile, and b are transposed.
template <int COUNT>
void wgmma(float* x, int columns, const uint32_t* a, uint64_t a_tile, uint64_t b_tile, bool add, Operands type,
           const int (&modifiers)[COUNT]) {
    if (modifiers[0] != 1 || modifiers[1] != 1) fail("wgmma: negated operands are not emulated");
    wgmma(x, columns, a, a_tile, b_tile, COUNT < 4 || !modifiers[2], COUNT < 3 || !modifiers[COUNT - 1], add, type);
}
EXPORT void wgmma_commit();
EXPORT void wgmma_wait(uint32_t pending);
void begin_block_matrices();
SetAside* set_aside_matrices();

// ---- formats.cpp: numbers and their bits, to nearest even

EXPORT float from_f16(uint32_t bits);
EXPORT float from_bf16(uint32_t bits);
EXPORT float from_e4m3(uint32_t byte);
EXPORT uint32_t to_f16x2(float low, float high);
EXPORT uint32_t to_bf16x2(float low, float high);
EXPORT uint16_t to_e4m3x2(float low, float high);
EXPORT uint32_t e4m3x2_to_f16x2(uint32_t bytes);
EXPORT uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c);
EXPORT uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c);
EXPORT uint32_t multiply_f16x2(uint32_t a, uint32_t b);
EXPORT uint32_t add_f16x2(uint32_t a, uint32_t b);
EXPORT uint32_t at_least_f16x2(uint32_t a, uint32_t b);  // all bits of a half where a >= b
EXPORT uint32_t to_f16x2_saturated(float low, float high);  // infinities become the largest finite values
EXPORT uint32_t max_f16x2(uint32_t a, uint32_t b);   // the other one where one is NaN
EXPORT uint32_t min_f16x2(uint32_t a, uint32_t b);
EXPORT uint32_t max_magnitudes_bf16x2(uint32_t a, uint32_t b);  // NaN where one is; the signs multiplied
// Keep subnormal numbers, which the rest of a kernel flushes to zero (CuPy compiles with -ftz=true).
EXPORT float multiply(float a, float b);
EXPORT float divide(float a, float b);
EXPORT double to_double(float x);
EXPORT float to_float(double x);

struct KeepSubnormals {
    uint32_t before;
    KeepSubnormals();
    ~KeepSubnormals();
};

}  // namespace emulator

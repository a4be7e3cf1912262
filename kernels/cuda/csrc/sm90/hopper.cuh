// Instructions of Hopper (sm_90a): shared memory, mbarriers, copies by the Tensor Memory Accelerator and in bulk, clusters, warpgroup
// matrix products (wgmma).
//
// Shared memory is addressed by its 32-bit address throughout. Matrix operands in shared memory are tiles of
// 64 rows of 128 bytes, 1024-aligned, whose 16-byte chunks are swizzled: chunk c of row r is at
// r * 128 + ((c ^ (r & 7)) << 4).
#pragma once
#include "common/device.cuh"

constexpr int TILE_BYTES = 64 * 128;

// ---- shared memory

// Address of a member of the kernel's struct SharedMemory. Without static shared memory the dynamic part starts at 1024; kernels
// trap otherwise. NVRTC before 13.4 has no __builtin_offsetof; there, as in libcu++, an operator of its front end replaces it.
#define SHARED_START 1024u
[[maybe_unused]] constexpr int MOST_SHARED_BYTES = 227 * 1024;  // of a CTA
#if __has_builtin(__builtin_offsetof)
#define SHARED_AT(member) (SHARED_START + uint32(__builtin_offsetof(SharedMemory, member)))
#else
#define SHARED_AT(member) (SHARED_START + uint32(__INTADDR__(&((SharedMemory*)0)->member)))
#endif

// x, which is equal in all lanes, as a value that the compiler treats as uniform.
__device__ inline int uniform(uint32 x) { return int(__reduce_max_sync(~0u, x)); }

__device__ inline uint4 lds128(uint32 address) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(own(address)));
    return x;
}
__device__ inline uint2 lds64(uint32 address) {
    uint2 x;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(own(address)));
    return x;
}
__device__ inline uint32 lds32(uint32 address) {
    uint32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(own(address)));
    return x;
}
__device__ inline uint32 lds8(uint32 address) {
    uint32 x;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(own(address)));
    return x;
}
__device__ inline float2 lds_float2(uint32 address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(own(address)));
    return x;
}
__device__ inline float lds_float(uint32 address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(own(address)));
    return x;
}
__device__ inline void sts128(uint32 address, uint4 x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(own(address)), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
__device__ inline void sts32(uint32 address, uint32 x) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(own(address)), "r"(x) : "memory"); }
__device__ inline void sts16(uint32 address, uint32 x) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(own(address)), "h"(uint16(x)) : "memory");
}
__device__ inline void sts8(uint32 address, uint32 x) { asm volatile("st.shared.u8 [%0], %1;" ::"r"(own(address)), "r"(x) : "memory"); }
__device__ inline void sts_float(uint32 address, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(own(address)), "f"(x) : "memory");
}
__device__ inline void sts_float2(uint32 address, float2 x) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(own(address)), "f"(x.x), "f"(x.y) : "memory");
}

// Store four 8x8 matrices of 16-bit values, in the layout of an accumulator fragment, to the rows that lanes point to.
__device__ inline void stmatrix4(uint32 address, uint32 a, uint32 b, uint32 c, uint32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(own(address)), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}
// The same, transposed: each row that a lane points to receives a column.
__device__ inline void stmatrix4_transposed(uint32 address, uint32 a, uint32 b, uint32 c, uint32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(own(address)), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}

// ---- barriers in shared memory

// With -DEVERY_LANE_ARRIVES all 32 lanes of a warp arrive, for racecheck: it attributes an arrival to the arriving lane
// alone.
#ifdef EVERY_LANE_ARRIVES
[[maybe_unused]] constexpr int WARP_ARRIVALS = 32;
#else
[[maybe_unused]] constexpr int WARP_ARRIVALS = 1;
#endif

__device__ inline void barrier_init(uint32 address, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(own(address)), "r"(arrivals) : "memory");
}

// An mbarrier at a shared memory address.
struct Barrier {
    uint32 address;

    // The same barrier where shared addresses begin at `window`.
    __device__ Barrier in(uint32 window) const { return {window + address}; }

    __device__ void init(int arrivals) const { barrier_init(address, arrivals); }
    __device__ void arrive(int count = 1) const {
        asm volatile("mbarrier.arrive.shared.b64 _, [%0], %1;" ::"r"(own(address)), "r"(count) : "memory");
    }
    // Arrive for one thread, and add `bytes` to the bytes that asynchronous copies must write in this phase.
    __device__ void arrive_expecting(uint32 bytes) const {
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(own(address)), "r"(bytes) : "memory");
    }
    // Arrive when all cp.async copies that this thread has started have landed.
    __device__ void arrive_after_copies() const {
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(own(address)) : "memory");
    }
    // Arrive for a warp, after all its lanes: WARP_ARRIVALS.
    __device__ void arrive_warp() const {
#ifdef EVERY_LANE_ARRIVES
        arrive();
#else
        __syncwarp();
        asm volatile(
            "{\n"
            ".reg .pred one;\n"
            "elect.sync _|one, 0xffffffff;\n"
            "@one mbarrier.arrive.shared.b64 _, [%0];\n"
            "}\n" ::"r"(own(address))
            : "memory");
#endif
    }
    // Like arrive_expecting, for a warp. All lanes have the same arguments.
    __device__ void arrive_warp_expecting(uint32 bytes) const {
#ifdef EVERY_LANE_ARRIVES
        if (threadIdx.x % 32) return arrive();
        arrive_expecting(bytes);
#else
        __syncwarp();
        asm volatile("{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\n@one mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;\n}" ::"r"(
                         own(address)),
                     "r"(bytes)
                     : "memory");
#endif
    }
    // Wait until the phase of this parity has completed; on a fresh barrier, the preceding phase (parity 1) has.
    // With -DWATCHDOG a wait of more than 2^31 clocks prints its barrier and traps, to find deadlocks.
    __device__ void wait(uint32 parity) const {
#ifdef WATCHDOG
        for (int64 start = clock64();;) {
            uint32 done;
            asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                         : "=r"(done)
                         : "r"(own(address)), "r"(parity)
                         : "memory");
            if (done) return;
            if (clock64() - start > (int64(1) << 31)) {
                printf("block %d thread %d waits at %u for parity %u\n", blockIdx.x, threadIdx.x, address, parity);
                __trap();
            }
        }
#else
        asm volatile(
            "{\n"
            ".reg .pred done;\n"
            "again:\n"
            "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
            "@!done bra again;\n"
            "}\n" ::"r"(own(address)),
            "r"(parity)
            : "memory");
#endif
    }
    // Like wait, and makes the stores of the other CTAs of the cluster visible.
    __device__ void wait_for_cluster(uint32 parity) const {
        asm volatile(
            "{\n"
            ".reg .pred done;\n"
            "again:\n"
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
            "@!done bra again;\n"
            "}\n" ::"r"(own(address)),
            "r"(parity)
            : "memory");
    }
};

// Make the initialisation of barriers visible to asynchronous copies and to the cluster.
__device__ inline void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// An array of COUNT barriers, or of COUNT rows of COLUMNS barriers. An index is an int or a uint32.
template <class Index> struct BarrierRow {
    uint32 address;
    Index first;
    template <class I> __device__ constexpr Barrier operator[](I i) const { return {address + 8 * (first + i)}; }
};
template <int COUNT, int COLUMNS = 0> struct Barriers {
    uint32 address;
    template <class Index> __device__ constexpr auto operator[](Index i) const {
        if constexpr (COLUMNS > 0) return BarrierRow<Index>{address, COLUMNS * i};
        else return Barrier{address + 8 * i};
    }
    __device__ void init(int i, int arrivals) const { barrier_init(address + 8 * i, arrivals); }
    __device__ void init(int arrivals) const {
        for (int i = 0; i < COUNT * (COLUMNS > 0 ? COLUMNS : 1); ++i) init(i, arrivals);
    }
    __device__ constexpr uint32 end() const { return address + 8 * COUNT * (COLUMNS > 0 ? COLUMNS : 1); }
};

// A position in a ring of SLOTS slots, and the parity of its current phase.
template <int SLOTS> struct PipelineState {
    uint32 slot = 0, phase = 0;

    __device__ void advance() {
        if (++slot == SLOTS) slot = 0, phase ^= 1;
    }
    __device__ void advance(uint32 by) {
        slot += by;
        if (slot >= SLOTS) slot -= SLOTS, phase ^= 1;
    }
};

// Make writes of this thread visible to matrix products and copies that start later (asynchronous proxy).
__device__ inline void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- registers of a warpgroup

template <int REGISTERS> __device__ inline void warpgroup_reg_alloc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> __device__ inline void warpgroup_reg_dealloc() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ---- clusters

__device__ inline Barrier cluster_barrier(Barrier barrier, int rank) { return {cluster_address(barrier.address, rank)}; }

// Store to the shared memory of another CTA, whose barrier counts the bytes. Both addresses are cluster addresses.
__device__ inline void store_async(uint32 to, uint2 x, Barrier barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%0], {%1, %2}, [%3];" ::"r"(to), "r"(x.x), "r"(x.y),
                 "r"(barrier.address)
                 : "memory");
}
__device__ inline void store_async(uint32 to, uint4 x, Barrier barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "r"(x.x), "r"(x.y),
                 "r"(x.z), "r"(x.w), "r"(barrier.address)
                 : "memory");
}

// ---- copies of boxes of an array by the Tensor Memory Accelerator
//
// Rows of a box are 128 bytes; they are swizzled in shared memory like matrix operands.

// A tensor map, encoded by the driver for an array of three dimensions (tma.py). A kernel takes it as
// `const __grid_constant__ TensorMap`, and its address has to be a multiple of 64. alignas(64) does not ensure that: the
// compiler would align relative to a multiple of 64 before the parameters, so the first could be at 48, unlike in a struct.
// Each kernel's parameter list ensures it instead (tests/kernels/test_launch.py).
struct TensorMap {
    const uint8* start;
    int64 rest[15];
};

// L2 cache policy for data that is read once: createpolicy.fractional with L2::evict_first.
[[maybe_unused]] constexpr uint64 EVICT_FIRST = 0x12f0000000000000;

// Start a copy of the box at [z][y][x]. The barrier counts its bytes when they have landed.
__device__ inline void tma_load(uint32 target, const TensorMap& map, int x, int y, int z, Barrier barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(target),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier.address)
        : "memory");
}
// The same with an L2 cache policy.
__device__ inline void tma_load(uint32 target, const TensorMap& map, int x, int y, int z, Barrier barrier, uint64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(target),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier.address), "l"(policy)
        : "memory");
}
__device__ inline void prefetch_tensor_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// ---- bulk copies of contiguous bytes

// Start a copy of `bytes` by one lane of a warp; all lanes have the same arguments. Size and both addresses are
// multiples of 16. The barrier counts the bytes when they have landed.
__device__ inline void warp_copy_bulk(uint32 target, const void* source, uint32 bytes, Barrier barrier) {
    asm volatile(
        "{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\n"
        "@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n}" ::"r"(own(target)),
        "l"(source), "r"(bytes), "r"(own(barrier.address))
        : "memory");
}

// Start a copy of `bytes` to global memory by this thread; size and addresses are multiples of 16. bulk_stores_commit
// makes a group of the copies that the thread has started. The shared memory may be overwritten after
// `bulk_stores_read`.
__device__ inline void bulk_store(void* target, uint32 source, uint32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(own(source)), "r"(bytes) : "memory");
}
__device__ inline void bulk_stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Wait until all but PENDING groups of this thread have been read from shared memory.
template <int PENDING> __device__ inline void bulk_stores_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Load four 8x8 matrices of 16-bit values from the rows that lanes point to: 8 lanes a matrix.
__device__ inline void ldmatrix4(uint32 (&x)[4], uint32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(own(address))
                 : "memory");
}
__device__ inline void ldmatrix4_transposed(uint32 (&x)[4], uint32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(own(address))
                 : "memory");
}

// ---- warpgroup matrix products
//
// A product has 64 rows and 8 to 128 columns. Operands are tiles in shared memory, given by their descriptors, or a fragment in
// registers. The sums of a thread are x: lane 4 g + c of warp w has rows 16 w + g + 8 r, column 8 j + 2 c + e in
// element 4 j + 2 r + e.

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ inline void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }
// Keep the compiler from moving accesses of these registers across this point.
template <int N> __device__ inline void pin(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// Descriptor of a swizzled tile whose rows run along the reduced dimension (K-major); + 2 advances by 16 values of 16
// bits.
__device__ inline uint64 tile_descriptor(uint32 address) { return (uint64(0x40000040) << 32) | (1u << 16) | (address >> 4); }

// Descriptor of tiles that are read transposed (MN-major): their rows are the reduced dimension, and each tile has 64
// columns of the result. + 128 advances by 16 rows.
__device__ inline uint64 transposed_descriptor(uint32 address) {
    return (uint64(0x40000040) << 32) | (uint32(TILE_BYTES >> 4) << 16) | (address >> 4);
}

// Operands of the asm statements: the elements of x come first, from %0 on.
#define SUMS_8(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define SUMS_16(x, i) SUMS_8(x, i), SUMS_8(x, i + 4)
#define SUMS_32(x, i) SUMS_16(x, i), SUMS_16(x, i + 8)
#define SUMS_64(x, i) SUMS_32(x, i), SUMS_32(x, i + 16)
#define SUMS_96(x, i) SUMS_64(x, i), SUMS_32(x, i + 32)
#define SUMS_128(x, i) SUMS_64(x, i), SUMS_64(x, i + 32)
#define REGISTERS_8 "%0, %1, %2, %3"
#define REGISTERS_16 REGISTERS_8 ", %4, %5, %6, %7"
#define REGISTERS_32 REGISTERS_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define REGISTERS_64 REGISTERS_32 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_96 REGISTERS_64 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define REGISTERS_128 REGISTERS_96 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// x = a b (+ x, if `add`), with a in shared memory or in registers. o1 to o6: numbers of the operands after x. The last
// arguments are modifiers of the PTX instruction: factors of a and b, and for 16-bit values whether each is transposed.
#define WGMMA_OF_TILES(name, a_type, b_type, columns, depth, o1, o2, o3, ...) \
    __device__ inline void name(a_type, float (&x)[columns / 2], uint64 a, uint64 b, int add) { \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #o3 \
                     ", 0;\n" \
                     "wgmma.mma_async.sync.aligned.m64n" #columns "k" #depth ".f32." #a_type "." #b_type " {" REGISTERS_##columns \
                     "}, %" #o1 ", %" #o2 ", p, " #__VA_ARGS__ ";\n}\n" \
                     : SUMS_##columns(x, 0) \
                     : "l"(a), "l"(b), "r"(add)); \
    }
#define WGMMA_OF_REGISTERS(name, a_type, b_type, columns, depth, o1, o2, o3, o4, o5, o6, ...) \
    __device__ inline void name(a_type, float (&x)[columns / 2], const uint32(&a)[4], uint64 b, int add) { \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #o6 \
                     ", 0;\n" \
                     "wgmma.mma_async.sync.aligned.m64n" #columns "k" #depth ".f32." #a_type "." #b_type " {" REGISTERS_##columns \
                     "}, {%" #o1 ", %" #o2 ", %" #o3 ", %" #o4 "}, %" #o5 ", p, " #__VA_ARGS__ ";\n}\n" \
                     : SUMS_##columns(x, 0) \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)); \
    }
// wgmma_rows: b is a tile of `columns` rows, 32 bytes of each (K-major). wgmma_columns: b is 16 rows of tiles of 64
// columns (MN-major). A tile of a has 64 rows, 32 bytes of each. Where a is e5m2, b is e4m3.
#define WGMMA_OF_TYPE(type, columns, o1, o2, o3, o4, o5, o6) \
    WGMMA_OF_TILES(wgmma_rows, type, type, columns, 16, o1, o2, o3, 1, 1, 0, 0) \
    WGMMA_OF_TILES(wgmma_columns, type, type, columns, 16, o1, o2, o3, 1, 1, 0, 1) \
    WGMMA_OF_REGISTERS(wgmma_rows, type, type, columns, 16, o1, o2, o3, o4, o5, o6, 1, 1, 0) \
    WGMMA_OF_REGISTERS(wgmma_columns, type, type, columns, 16, o1, o2, o3, o4, o5, o6, 1, 1, 1)
#define WGMMA(columns, o1, o2, o3, o4, o5, o6) \
    WGMMA_OF_TYPE(bf16, columns, o1, o2, o3, o4, o5, o6) \
    WGMMA_OF_TYPE(f16, columns, o1, o2, o3, o4, o5, o6) \
    WGMMA_OF_TILES(wgmma_rows, e4m3, e4m3, columns, 32, o1, o2, o3, 1, 1) \
    WGMMA_OF_REGISTERS(wgmma_rows, e4m3, e4m3, columns, 32, o1, o2, o3, o4, o5, o6, 1, 1) \
    WGMMA_OF_REGISTERS(wgmma_rows, e5m2, e4m3, columns, 32, o1, o2, o3, o4, o5, o6, 1, 1)

struct e4m3 {};
struct e5m2 {};
WGMMA(8, 4, 5, 6, 7, 8, 9)
WGMMA(16, 8, 9, 10, 11, 12, 13)
WGMMA(32, 16, 17, 18, 19, 20, 21)
WGMMA(64, 32, 33, 34, 35, 36, 37)
WGMMA(96, 48, 49, 50, 51, 52, 53)
WGMMA(128, 64, 65, 66, 67, 68, 69)

// ---- threads of a warpgroup

// Synchronise the threads of a warpgroup by named barrier `id`, 1 to 15.
__device__ inline void warpgroup_sync(int id) { asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory"); }
// Whether x is true for any thread of a warpgroup.
__device__ inline bool warpgroup_any(int id, bool x) {
    uint32 y;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, 128, p;\nselp.u32 %0, 1, 0, q;\n}"
                 : "=r"(y)
                 : "r"(uint32(x)), "r"(id)
                 : "memory");
    return y;
}

// Transpose 4 x 4 words among four lanes: lane c receives word c of each lane.
__device__ inline void transpose_words(uint32 (&words)[4], int lane) {
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
        bool upper = lane & step;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint32 &a = words[step == 1 ? 2 * i : i], &b = words[step == 1 ? 2 * i + 1 : i + 2];
            uint32 got = __shfl_xor_sync(~0u, upper ? a : b, step);
            a = upper ? got : a, b = upper ? b : got;
        }
    }
}

// Exchange halves of 2 N columns with lane ^ BY: send one half, and combine the other half with the received one.
template <int N, int BY, int SIZE, class Combine> __device__ inline void exchange_halves(float (&x)[SIZE], int lane, Combine combine) {
    bool upper = lane & BY;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        float low = x[i], high = x[i + N];
        x[i] = combine(upper ? high : low, __shfl_xor_sync(~0u, upper ? low : high, BY));
    }
}

// Reduce the columns of a product whose rows are keys over a warp's rows: lane 4 g + c has column 8 j + 2 c + e in element 2 j + e.
// Stores a float per column to shared memory.
template <int COLUMNS, class Combine> __device__ inline void reduce_rows(uint32 to, float (&x)[COLUMNS / 4], int lane, Combine combine) {
    if constexpr (COLUMNS == 64) {
        exchange_halves<8, 16>(x, lane, combine), exchange_halves<4, 8>(x, lane, combine), exchange_halves<2, 4>(x, lane, combine);
        sts_float2(to + 2 * lane * 4, make_float2(x[0], x[1]));
    } else if constexpr (COLUMNS == 32) {
        exchange_halves<4, 16>(x, lane, combine), exchange_halves<2, 8>(x, lane, combine), exchange_halves<1, 4>(x, lane, combine);
        sts_float(to + (lane / 8 * 8 + lane % 4 * 2 + lane / 4 % 2) * 4, x[0]);
    } else {
        exchange_halves<2, 16>(x, lane, combine), exchange_halves<1, 8>(x, lane, combine);
        x[0] = combine(x[0], __shfl_xor_sync(~0u, x[0], 4));
        if (!(lane & 4)) sts_float(to + (lane / 16 * 8 + lane % 4 * 2 + lane / 8 % 2) * 4, x[0]);
    }
}

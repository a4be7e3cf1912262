// Sparse MLA over paged FP8 caches on Hopper (sm_90a): one thread block an SM, four warpgroups.
//
// A query token and 64 of its heads are a *tile* of work; the keys of a tile are taken 64 at a time, a *block*.
//
//     scorer     S = Q K^T, the softmax, and P in float16; before that, a tile's Q to shared memory and to float16
//     mixer 0    O = P V for values 0..255 of all 64 heads
//     mixer 1    the same for values 256..511
//     feeder     raw FP8 rows from global memory into registers, half a row ahead, and as float16 into a buffer of K
//
// A buffer of K holds a block in float16, in swizzled tiles of 64 tokens and 64 values. The scorer reads its rows along,
// as K, and the mixers read the same tiles across, as V: a row is converted once, and no raw row lies in shared memory.
// There are two buffers, so the next block is fed while one is scored and mixed. The scorer follows the feeder through
// a buffer part by part, two slices of 64 values at a time. The last 64 values of a row (RoPE) are bfloat16 and enter
// the scores as they are; where they are values too (DSv4), the buffer has them in float16 as well.
//
// What is float16 stands in an order of its own within every 32 values: decode_sm90_rows.cuh.
//
// Float16 has a narrower range than what a cache and q may hold. A tile that leaves it (scales outside [MIN_SCALE,
// MAX_SCALE], large or very small q, a result that is not finite) is marked in `unsafe` for the exact kernel, which the
// launcher runs after this one. A float32 scale is rounded to float16.
//
// Macros: LAYOUT (DSV4_FP8 or V32_FP8).
#include "decode_sm90_feeder.cuh"
#include "decode_sm90_mixer.cuh"
#include "decode_sm90_scorer.cuh"
#include "overlap.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) sparse_mla_decode(const __grid_constant__ Problem problem) {
    extern __shared__ uint8 memory[];
    if (threadIdx.x == 0) {
        if (uint32(__cvta_generic_to_shared(memory)) != 1024) __trap();
        // Warps arrive: four score, eight mix, four feed. Mixers have waited for the scorer: it, too, is done with a
        // buffer that they leave.
        for (int i = 0; i < BUFFERS * PARTS; ++i) barrier_init(K_FULL + 8 * i, 4);
        for (int i = 0; i < BUFFERS; ++i) barrier_init(K_EMPTY + 8 * i, 8);
        for (int i = 0; i < P_SLOTS; ++i) barrier_init(P_FULL + 8 * i, 4), barrier_init(P_EMPTY + 8 * i, 8);
        for (int i = 0; i < 2; ++i) barrier_init(FACTORS_FULL + 8 * i, 4);
        sts32(ZERO_AT, 0);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    overlap_with_previous_kernel();
    if (threadIdx.x == 0) keep_share(Share(problem));
    __syncthreads();
    int role = threadIdx.x / 128;
    if (role == 0) {
        give_registers<SCORER_REGISTERS>();
        Scorer(problem).run();
    } else if (role == 3) {
        give_registers<FEEDER_REGISTERS>();
        Feeder(problem).run();
    } else {
        take_registers<MIXER_REGISTERS>();
        Mixer(problem, role - 1).run();
    }
}

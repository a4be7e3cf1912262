// Sparse MLA over paged FP8 caches on Hopper (sm_90a): one thread block an SM, four warpgroups.
#include "decode_sm90_feeder.cuh"
#include "decode_sm90_mixer.cuh"
#include "decode_sm90_scorer.cuh"
#include "overlap.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) sparse_mla_decode(const __grid_constant__ Problem problem) {
    extern __shared__ uint8 memory[];
    if (threadIdx.x == 0) {
        if (uint32(__cvta_generic_to_shared(memory)) != 1024) __trap();
        // Warps arrive: four score, eight mix, four feed.
        for (int i = 0; i < BUFFERS * PARTS; ++i) barrier_init(K_FULL + 8 * i, 4);
        for (int i = 0; i < BUFFERS; ++i) barrier_init(K_EMPTY + 8 * i, 8);
        for (int i = 0; i < P_SLOTS; ++i) barrier_init(P_FULL + 8 * i, 4), barrier_init(P_EMPTY + 8 * i, 8);
        for (int i = 0; i < 2; ++i) barrier_init(SHARE_FULL + 8 * i, 4);
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

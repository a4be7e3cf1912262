// out [tokens, rows] = x [tokens, K] W^T for few tokens, by wgmma: weights are the first operand, from registers, and x the second, from
// shared memory (sm80/block_scaled.cuh says how the work is divided). A warpgroup has tiles of
// 64 rows, 16 of each warp.
//
// wgmma takes the columns of a step of 16 in their order, where a lane has eight neighbouring codes of 32. So the columns of x are
// permuted as they are copied: four bytes at a time, a row of 128 bytes by a warp, without conflicts.
#include "sm80/block_scaled.cuh"
#include "sm90/wgmma.cuh"

static_assert(ROWS == 128 || ROWS == 256, "a warpgroup has one or two tiles of 64 rows");

#if TOKENS <= 32 && ROWS == 128
#define BOUNDS THREADS, 2
#else
#define BOUNDS THREADS
#endif

__device__ inline void wgmma_bf16(float (&x)[64], const uint32 (&a)[4], uint64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " REGISTERS64 ", {%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}\n"
                 : FLOATS64(x) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

struct Wgmma {
    const bf16* from;
    int64 apart;
    int rows, column, to;

    // Lane j copies the pair of columns 32 (j / 16) + 2 (j % 16) of a half of 64 columns, a warp every eighth token.
    __device__ Wgmma(const Tokens& tokens, const bf16* x, int count) {
        int warp = threadIdx.x / 32, j = threadIdx.x % 32;
        column = 2 * j;
        from = x + warp * tokens.x_stride + column;
        apart = 8 * tokens.x_stride;
        rows = count - warp;
        int chunk = j / 16 * 4 + j / 2 % 2 * 2 + j % 2, word = j / 4 % 4;
        to = warp * 128 + ((chunk ^ warp) << 4) + 4 * word;
    }

    __device__ static void sync() {
        fence_proxy_async();
        __syncthreads();
    }

    __device__ static void copy_pair(uint8* target, const bf16* source) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(target)), "l"(source) : "memory");
    }

    // A pair, of which `left` values are there.
    __device__ static void store_part(uint8* target, const bf16* source, int left) {
        uint32 low = left > 0 ? source[0].bits : 0, high = left > 1 ? source[1].bits : 0;
        *reinterpret_cast<uint32*>(target) = low | high << 16;
    }

    // Columns [k, k + 128) to two tiles of TOKENS rows of 128 bytes. Rows without a token stay as they are: they make columns of the
    // product that nothing reads.
    __device__ void copy(uint8* stage, int k, int end) const {
        const bf16* source = from + k;
        stage += to;
        if (ALIGNED && k + 128 <= end) {
#pragma unroll
            for (int i = 0; i < TOKENS / 8; ++i, source += apart)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    if (8 * i < rows) copy_pair(stage + half * TOKENS * 128 + 1024 * i, source + 64 * half);
            return;
        }
#pragma unroll 1
        for (int i = 0; i < TOKENS / 8; ++i, source += apart)
            for (int half = 0; half < 2; ++half)
                if (8 * i < rows) store_part(stage + half * TOKENS * 128 + 1024 * i, source + 64 * half, end - k - column - 64 * half);
    }

    __device__ void multiply(Sums& sums, const Codes& a, const uint8* x, const Scales& scale) const {
        constexpr int STEPS = FINE && !POWER_OF_TWO ? 2 : 8;  // of 16 columns that are added before they are scaled
        uint64 tile = tile_descriptor(shared_address(x) & 0xffffff);  // without the CTA's rank in its cluster
#pragma unroll
        for (int h = 0; h < HEIGHT; ++h) {
            float(&sum)[TOKENS / 2] = reinterpret_cast<float(&)[TOKENS / 2]>(sums.x[h]);
#pragma unroll
            for (int first = 0; first < 8; first += STEPS) {
                float products[TOKENS / 2];
                wgmma_fence();
#pragma unroll
                for (int step = first; step < first + STEPS; ++step)
                    wgmma_bf16(POWER_OF_TWO ? sum : products, a[h][step],
                               tile + step / 4 * (TOKENS * 128 >> 4) + step % 4 * 2, POWER_OF_TWO || step > first);
                wgmma_commit();
                wgmma_wait<0>();
                if (POWER_OF_TWO) {
                    pin(sum);
                    continue;
                }
                pin(products);
#pragma unroll
                for (int i = 0; i < TOKENS / 2; ++i) sum[i] = fmaf(products[i], scale[h][i / 2 % 2][FINE ? first / 2 : 3], sum[i]);
            }
        }
    }
};

extern "C" CLUSTER __global__ void __launch_bounds__(BOUNDS)
block_scaled_product(Weights w, Tokens tokens) {
    extern __shared__ uint4 memory[];
    if ((shared_address(memory) & 0xffffff) != SHARED_START) __trap();  // tiles are aligned to 1024 bytes
    multiply_rows<Wgmma>(w, tokens, reinterpret_cast<uint8*>(memory));
}

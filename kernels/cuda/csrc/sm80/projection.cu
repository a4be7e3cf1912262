// out [tokens, rows] = x [tokens, K] W^T for few tokens: W is e4m3 with a float32 scale for each block, x is bfloat16.
//
// By mma.sync, with the weights as the first operand: a product takes 16 of their rows and as few as 8 tokens. sm80/block_scaled.cuh
// says how the work is divided. 16-byte chunks of x are swizzled so that loads of its fragments do not conflict in banks.
#include "sm80/block_scaled.cuh"
#include "sm80/mma.cuh"

#if TOKENS + 16 * (BLOCK_COLUMNS % 128 != 0) <= 32 && ROWS <= 128
#define BOUNDS THREADS, 2
#else
#define BOUNDS THREADS
#endif

struct Mma {
    const Tokens& tokens;
    const bf16* x;
    int count;

    __device__ Mma(const Tokens& tokens, const bf16* x, int count) : tokens(tokens), x(x), count(count) {}

    __device__ static void sync() { __syncthreads(); }

    // Columns [k, k + DEPTH) to [PARTS][TOKENS][256] bytes.
    __device__ void copy(uint8* to, int k, int end) const {
        constexpr int PIECES = DEPTH / 8;
#pragma unroll
        for (int i = threadIdx.x; i < TOKENS * PIECES; i += THREADS) {
            int t = i / PIECES, piece = i % PIECES, column = k + 8 * piece;
            int size = t < count ? 2 * min(max(end - column, 0), 8) : 0;
            const bf16* from = size ? x + t * tokens.x_stride + column : x;
            copy16(to + (piece / 16 * TOKENS + t) * 256 + ((piece % 16) ^ 4 * (t & 1)) * 16, from, size);
        }
    }

    // Add the products of 128 columns.
    __device__ void multiply(Sums& sums, const Codes& a, const uint8* x, const Scales& scale) const {
        int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
#pragma unroll
        for (int n = 0; n < TOKENS / 8; ++n) {
            const uint8* row = x + (8 * n + g) * 256;
            float products[HEIGHT][4] = {};
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                uint4 values = *reinterpret_cast<const uint4*>(row + ((4 * q + c) ^ 4 * (g & 1)) * 16);
#pragma unroll
                for (int h = 0; h < HEIGHT; ++h) {
                    float(&to)[4] = POWER_OF_TWO ? sums.x[h][n] : products[h];
                    mma(bf16{}, to, a[h][2 * q], {values.x, values.y});
                    mma(bf16{}, to, a[h][2 * q + 1], {values.z, values.w});
                    if (!POWER_OF_TWO && (FINE || q == 3)) {
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            sums.x[h][n][i] = fmaf(products[h][i], scale[h][i / 2][q], sums.x[h][n][i]);
                            products[h][i] = 0.0f;
                        }
                    }
                }
            }
        }
    }
};

extern "C" CLUSTER __global__ void __launch_bounds__(BOUNDS)
block_scaled_product(Weights w, Tokens tokens) {
    extern __shared__ uint4 memory[];
    multiply_rows<Mma>(w, tokens, reinterpret_cast<uint8*>(memory));
}

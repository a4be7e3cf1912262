// Matrix operands and products of a warp and of a warpgroup, as the PTX manual lays fragments out.
//
// Lane 4 g + c of a 16 x 8 fragment of 16-bit values holds rows g and g + 8, columns 2 c and 2 c + 1, and the same of
// the next 8 columns; of a result it holds columns 2 c and 2 c + 1 of both rows.
#include "emulator.h"
#include <vector>

namespace emulator {
namespace {

constexpr int LANES = 32, K = 16;
constexpr int ROWS = 16, MOST_DEPTH = 32, MOST_COLUMNS = 256;  // of a warp's product; bytes are twice as deep
constexpr int PITCH = MOST_COLUMNS + 8;  // of rows, so that a column's values are in different sets of the CPU's cache

struct Operand {
    uint32_t address, x[4];
};
struct Fragments {
    float x[4];
    uint32_t a[4], b[2];
};

template <class T> const T& as(const uint8_t* bytes) { return *reinterpret_cast<const T*>(bytes); }
template <class T> T& as(uint8_t* bytes) { return *reinterpret_cast<T*>(bytes); }

float value(uint32_t pair, int half, bool bfloat16) {
    return bfloat16 ? from_bf16(pair >> 16 * half & 0xffff) : from_f16(pair >> 16 * half);
}

// The sums of WIDTH columns, in order along the depth.
template <int WIDTH>
void sum_columns(const float (*a)[MOST_DEPTH], const float (*b)[PITCH], int depth, int column, float (*sums)[PITCH]) {
    constexpr int AT_ONCE = 8;
    typedef float Columns __attribute__((vector_size(4 * WIDTH)));
    for (int row = 0; row < ROWS; row += AT_ONCE) {
        Columns x[AT_ONCE] = {}, of_b;
        for (int k = 0; k < depth; ++k) {
            memcpy(&of_b, &b[k][column], sizeof of_b);
            for (int i = 0; i < AT_ONCE; ++i) x[i] += a[row + i][k] * of_b;
        }
        for (int i = 0; i < AT_ONCE; ++i) memcpy(&sums[row + i][column], &x[i], sizeof of_b);
    }
}

// sums = a b; `columns` is a multiple of 8.
void sum_products(const float (*a)[MOST_DEPTH], const float (*b)[PITCH], int depth, int columns, float (*sums)[PITCH]) {
    int column = 0;
#ifdef __AVX512F__
    for (; column + 16 <= columns; column += 16) sum_columns<16>(a, b, depth, column, sums);
#endif
    for (; column < columns; column += 8) sum_columns<8>(a, b, depth, column, sums);
}

// The rows of four matrices, to which lanes point.
struct Rows {
    uint16_t* row[4][8];

    explicit Rows(uint8_t (*brought)[MOST_BYTES]) {
        for (int lane = 0; lane < LANES; ++lane)
            row[lane / 8][lane % 8] = reinterpret_cast<uint16_t*>(shared_at(as<Operand>(brought[lane]).address, 16));
    }
};

}  // namespace

// Lanes 8 i to 8 i + 7 point to the rows of matrix i.
void load_matrices(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t address, bool transposed) {
    auto load = [&](uint8_t (*brought)[MOST_BYTES], uint8_t (*taken)[MOST_BYTES]) {
        Rows at(brought);
        for (int lane = 0; lane < LANES; ++lane)
            for (int i = 0; i < 4; ++i) {
                int g = lane / 4, column = 2 * (lane % 4);
                uint32_t low = transposed ? at.row[i][column][g] : at.row[i][g][column];
                uint32_t high = transposed ? at.row[i][column + 1][g] : at.row[i][g][column + 1];
                as<Operand>(taken[lane]).x[i] = low | high << 16;
            }
    };
    const auto& mine = as<Operand>(meet(transposed ? "ldmatrix.trans" : "ldmatrix", Operand{address, {}}, load));
    a = mine.x[0], b = mine.x[1], c = mine.x[2], d = mine.x[3];
}

void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d, bool transposed) {
    auto store = [&](uint8_t (*brought)[MOST_BYTES], uint8_t (*)[MOST_BYTES]) {
        Rows at(brought);
        for (int lane = 0; lane < LANES; ++lane)
            for (int i = 0; i < 4; ++i)
                for (int half = 0; half < 2; ++half) {
                    int g = lane / 4, column = 2 * (lane % 4) + half;
                    uint16_t bits = as<Operand>(brought[lane]).x[i] >> 16 * half;
                    (transposed ? at.row[i][column][g] : at.row[i][g][column]) = bits;
                }
    };
    meet(transposed ? "stmatrix.trans" : "stmatrix", Operand{address, {a, b, c, d}}, store);
}

uint32_t transpose_matrix(uint32_t x) {
    auto transpose = [](uint8_t (*brought)[MOST_BYTES], uint8_t (*taken)[MOST_BYTES]) {
        auto bits = [&](int row, int column) {
            return as<Operand>(brought[4 * row + column / 2]).x[0] >> 16 * (column % 2) & 0xffff;
        };
        for (int lane = 0; lane < LANES; ++lane) {
            int g = lane / 4, column = 2 * (lane % 4);
            as<Operand>(taken[lane]).x[0] = bits(column, g) | bits(column + 1, g) << 16;
        }
    };
    return as<Operand>(meet("movmatrix", Operand{0, {x}}, transpose)).x[0];
}

void mma(float& x0, float& x1, float& x2, float& x3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
         uint32_t b1, bool bfloat16) {
    auto multiply = [&](uint8_t (*brought)[MOST_BYTES], uint8_t (*taken)[MOST_BYTES]) {
        KeepSubnormals keep;
        float a[ROWS][MOST_DEPTH], b[K][PITCH], sums[ROWS][PITCH];
        for (int lane = 0; lane < LANES; ++lane) {
            const auto& from = as<Fragments>(brought[lane]);
            int g = lane / 4, k = 2 * (lane % 4);
            for (int half = 0; half < 2; ++half)
                for (int i = 0; i < 2; ++i) {
                    a[g][k + 8 * i + half] = value(from.a[2 * i], half, bfloat16);
                    a[g + 8][k + 8 * i + half] = value(from.a[2 * i + 1], half, bfloat16);
                    b[k + 8 * i + half][g] = value(from.b[i], half, bfloat16);
                }
        }
        sum_products(a, b, K, 8, sums);
        for (int lane = 0; lane < LANES; ++lane)
            for (int i = 0; i < 4; ++i)
                as<Fragments>(taken[lane]).x[i] += sums[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2];
    };
    Fragments brought{{x0, x1, x2, x3}, {a0, a1, a2, a3}, {b0, b1}};
    const auto& mine = as<Fragments>(meet(bfloat16 ? "mma.bf16" : "mma.f16", brought, multiply));
    x0 = mine.x[0], x1 = mine.x[1], x2 = mine.x[2], x3 = mine.x[3];
}

void mma_f64(double& x0, double& x1, double a, double b) {
    struct Numbers {
        double x[2], a, b;
    };
    auto multiply = [](uint8_t (*brought)[MOST_BYTES], uint8_t (*taken)[MOST_BYTES]) {
        for (int lane = 0; lane < LANES; ++lane)
            for (int i = 0; i < 2; ++i) {
                double sum = 0;
                for (int k = 0; k < 4; ++k)
                    sum += as<Numbers>(brought[lane / 4 * 4 + k]).a * as<Numbers>(brought[(2 * (lane % 4) + i) * 4 + k]).b;
                as<Numbers>(taken[lane]).x[i] += sum;
            }
    };
    const auto& mine = as<Numbers>(meet("mma.f64", Numbers{{x0, x1}, a, b}, multiply));
    x0 = mine.x[0], x1 = mine.x[1];
}

// ---- wgmma: a warp's 16 of the 64 rows. It reads shared memory, registers and sums when it completes, not before.

namespace {

int bytes_of(Operands type) { return type == Operands::f16 || type == Operands::bf16 ? 2 : 1; }

// A tile of shared memory whose 16-byte chunks are swizzled over 8 rows of 128 or 64 bytes, by its descriptor.
struct Tile {
    uint32_t start, leading, stride, width;

    explicit Tile(uint64_t descriptor)
        : start((descriptor & 0x3fff) << 4),
          leading((descriptor >> 16 & 0x3fff) << 4),
          stride((descriptor >> 32 & 0x3fff) << 4),
          width(descriptor >> 62 == 1 ? 128 : 64) {
        if (descriptor >> 62 != 1 && descriptor >> 62 != 2) fail("wgmma: only tiles swizzled over 128 or 64 bytes are emulated");
    }
    // The values of a chunk, each `step` after the one before it.
    void read(uint32_t offset, Operands type, float* values, int step) const {
        uint32_t address = start + offset, own = cluster_rank << RANK_SHIFT;  // absent from descriptors
        const uint8_t* bytes = shared_at(own | (address ^ (address >> 3 & (width - 16))), 16);
        auto words = reinterpret_cast<const uint16_t*>(bytes);
        if (bytes_of(type) == 1)
            for (int i = 0; i < 16; ++i) values[i * step] = from_e4m3(bytes[i]);
        else if (type == Operands::bf16)
            for (int i = 0; i < 8; ++i) values[i * step] = from_bf16(words[i]);
        else
            for (int i = 0; i < 8; ++i) values[i * step] = from_f16(words[i]);
    }
    // Rows of the operand are rows of the tile, k runs along them: all of its 32 bytes.
    void along(int row, Operands type, float* values, int step) const {
        for (int chunk = 0; chunk < 2; ++chunk)
            read(row / 8 * stride + row % 8 * width + 16 * chunk, type, values + chunk * 16 / bytes_of(type) * step, step);
    }
    // Transposed, 8 columns; another tile every 64 columns.
    void across(int k, int column, Operands type, float* values, int step) const {
        read(column / 64 * leading + k / 8 * stride + k % 8 * 128 + column % 64 * 2, type, values, step);
    }
};

struct Registers {
    float* x;
    const uint32_t* a;
};

struct Product {
    Registers of[LANES];
    uint64_t a_tile, b_tile;
    int first_row, columns;
    bool a_rows, b_rows, add;
    Operands type;

    void run() const {
        KeepSubnormals keep;
        int depth = MOST_DEPTH / bytes_of(type);
        float a[ROWS][MOST_DEPTH], b[MOST_DEPTH][PITCH], sums[ROWS][PITCH];
        Tile a_at(of[0].a ? b_tile : a_tile), b_at(b_tile);
        if (of[0].a) {
            for (int row = 0; row < ROWS; ++row)
                for (int k = 0; k < depth; ++k) {
                    int per_word = 4 / bytes_of(type), lane = row % 8 * 4 + k % (4 * per_word) / per_word;
                    uint32_t word = of[lane].a[row / 8 + k / (4 * per_word) * 2];
                    uint32_t byte = word >> 8 * (k % 4) & 0xff;
                    a[row][k] = type == Operands::e4m3   ? from_e4m3(byte)
                                : type == Operands::e5m2 ? from_f16(byte << 8)
                                                         : value(word, k % 2, type == Operands::bf16);
                }
        } else if (a_rows) {
            for (int row = 0; row < ROWS; ++row) a_at.along(first_row + row, type, a[row], 1);
        } else {
            for (int k = 0; k < depth; ++k)
                for (int row = 0; row < ROWS; row += 8) a_at.across(k, first_row + row, type, &a[row][k], MOST_DEPTH);
        }
        for (int column = 0; b_rows && column < columns; ++column) b_at.along(column, type, &b[0][column], PITCH);
        for (int k = 0; !b_rows && k < depth; ++k)
            for (int column = 0; column < columns; column += 8) b_at.across(k, column, type, &b[k][column], 1);
        sum_products(a, b, depth, columns, sums);
        for (int lane = 0; lane < LANES; ++lane)
            for (int i = 0; i < columns / 2; ++i) {
                int row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + 2 * (lane % 4) + i % 2;
                of[lane].x[i] = (add ? of[lane].x[i] : 0.0f) + sums[row][column];
            }
    }
};

struct WarpProducts {
    std::vector<Product> open;
    std::vector<std::vector<Product>> groups;

    void finish(size_t pending) {
        if (groups.size() <= pending) return;
        auto end = groups.end() - pending;
        for (auto group = groups.begin(); group < end; ++group)
            for (const Product& product : *group) product.run();
        groups.erase(groups.begin(), end);
    }
};
std::vector<WarpProducts> products;

}  // namespace

void begin_block_matrices() { products.assign(cluster_size * block_size.x * block_size.y * block_size.z / LANES, {}); }

SetAside* set_aside_matrices() { return new Kept(products); }

void wgmma(float* x, int columns, const uint32_t* a, uint64_t a_tile, uint64_t b_tile, bool a_rows, bool b_rows,
           bool add, Operands type) {
    int warp = thread_number / LANES;
    meet("wgmma", Registers{x, a}, [&](uint8_t (*brought)[MOST_BYTES], uint8_t (*)[MOST_BYTES]) {
        Product product{{}, a_tile, b_tile, 16 * (warp % 4), columns, a_rows, b_rows, add, type};
        for (int lane = 0; lane < LANES; ++lane) product.of[lane] = as<Registers>(brought[lane]);
        products[fiber_number / LANES].open.push_back(product);
    });
}

void wgmma_commit() {
    WarpProducts& mine = products[fiber_number / LANES];
    meet("wgmma.commit_group", 0, [&](uint8_t (*)[MOST_BYTES], uint8_t (*)[MOST_BYTES]) {
        mine.groups.push_back(std::move(mine.open));
        mine.open.clear();
        if (!work_is_late()) {
            size_t groups = mine.groups.size();
            mine.finish(0);
            mine.groups.resize(groups);
        }
    });
}

void wgmma_wait(uint32_t pending) {
    WarpProducts& mine = products[fiber_number / LANES];
    meet("wgmma.wait_group", 0, [&](uint8_t (*)[MOST_BYTES], uint8_t (*)[MOST_BYTES]) { mine.finish(pending); });
}

}  // namespace emulator

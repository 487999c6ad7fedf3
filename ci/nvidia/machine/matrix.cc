// Matrix instructions: of a warp at once, and those of warpgroups that run beside it.

#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#include "inner.h"

namespace machine {

namespace {

constexpr int DEPTH = 16, ROWS = 16, MOST_COLUMNS = 256;
constexpr int CHUNK = 8;  // 16-bit values of 16 bytes, in which swizzled units are permuted

float widened(uint16_t bits, Format format) {
    if (format == Format::F16) {
        _Float16 value;
        memcpy(&value, &bits, 2);
        return (float)value;
    }
    uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

/// Row and column of element `i` (two in a register) of a fragment of 16 x 16, as a lane holds it.
int fragment_row(int lane, int i) { return lane / 4 + i / 2 % 2 * 8; }
int fragment_column(int lane, int i) { return lane % 4 * 2 + i % 2 + i / 4 * 8; }

void widen_fragment(float (&to)[ROWS][DEPTH], const uint32_t* word, int lane, Format format) {
    for (int i = 0; i < 8; i++) {
        to[fragment_row(lane, i)][fragment_column(lane, i)] = widened((uint16_t)(word[i / 2] >> i % 2 * 16), format);
    }
}

/// What a lane has of some matrices: the address of one row, and a word of each.
struct Matrices {
    uint32_t row, word[4];
    int count;
    bool transposed;
};

/// Where the 16-bit half `half` of a lane's word of matrix `m` lies in shared memory.
unsigned char* place_of(void* const* given, int lane, int m, int half) {
    bool transposed = ((const Matrices*)given[lane])->transposed;
    int row = lane / 4, column = lane % 4 * 2 + half;
    if (transposed) std::swap(row, column);
    return settled_at(((const Matrices*)given[m * 8 + row])->row, 16, 16) + column * 2;
}

struct Multiplied {
    float* sums;
    const uint32_t *a, *b;
    Format format;
};

/// An operand in shared memory, whose descriptor knows no rank: units of 64 columns whose rows of 128 bytes are swizzled.
struct Operand {
    uint32_t at, leading, stride;
    bool by_depth;

    Operand(uint64_t descriptor, bool by_depth)
        : at((descriptor & 0x3fff) << 4), leading((descriptor >> 16 & 0x3fff) << 4), stride((descriptor >> 32 & 0x3fff) << 4),
          by_depth(by_depth) {
        if (descriptor >> 62 != 1) fail("an operand that is not swizzled by 128 bytes");
    }

    /// Eight values from `index` on of the operand's row or column at `depth`, or from `depth` on of the one at `index`.
    void chunk(float (&value)[CHUNK], int index, int depth, Format format) const {
        uint32_t address = by_depth ? at + index / 64 * leading + depth / 8 * stride + depth % 8 * 128 + index % 64 * 2
                                    : at + index / 8 * stride + index % 8 * 128 + depth * 2;
        uint16_t bits[CHUNK];
        memcpy(bits, settled_at(with_rank(address ^ (address >> 3 & 0x70)), sizeof bits, sizeof bits), sizeof bits);
        for (int i = 0; i < CHUNK; i++) value[i] = widened(bits[i], format);
    }

    /// `count` rows (columns of operand b) from `first` on, as [depth][index].
    template <int width>
    void read(float (&to)[DEPTH][width], int first, int count, Format format) const {
        float value[CHUNK];
        if (by_depth) {
            for (int depth = 0; depth < DEPTH; depth++) {
                for (int i = 0; i < count; i += CHUNK) {
                    chunk(value, first + i, depth, format);
                    memcpy(to[depth] + i, value, sizeof value);
                }
            }
            return;
        }
        for (int i = 0; i < count; i++) {
            for (int depth = 0; depth < DEPTH; depth += CHUNK) {
                chunk(value, first + i, depth, format);
                for (int j = 0; j < CHUNK; j++) to[depth + j][i] = value[j];
            }
        }
    }
};

/// A warp's share of a product: sixteen rows.
struct Share {
    Product of;
    int warp_of_group;
    float* sums[WARP];
    uint32_t held[WARP][4];

    void run() const {
        static float a[ROWS][DEPTH], by_depth[DEPTH][ROWS], b[DEPTH][MOST_COLUMNS], c[ROWS][MOST_COLUMNS];
        if (of.held) {
            for (int lane = 0; lane < WARP; lane++) widen_fragment(a, held[lane], lane, of.format);
        } else {
            Operand(of.a, of.a_by_depth).read(by_depth, warp_of_group * ROWS, ROWS, of.format);
            for (int row = 0; row < ROWS; row++) {
                for (int depth = 0; depth < DEPTH; depth++) a[row][depth] = by_depth[depth][row];
            }
        }
        Operand(of.b, of.b_by_depth).read(b, 0, of.columns, of.format);
        for (int row = 0; row < ROWS; row++) {
            memset(c[row], 0, of.columns * sizeof(float));
            for (int depth = 0; depth < DEPTH; depth++) {
                for (int n = 0; n < of.columns; n++) c[row][n] += a[row][depth] * b[depth][n];
            }
        }
        for (int lane = 0; lane < WARP; lane++) {
            for (int i = 0; i < of.columns / 2; i++) {
                float value = c[fragment_row(lane, i)][fragment_column(lane, i)];
                sums[lane][i] = of.add ? sums[lane][i] + value : value;
            }
        }
    }
};

struct Group {
    std::vector<Share> products;
    bool done = false;

    void run() {
        if (done) return;
        done = true;
        for (const Share& share : products) share.run();
    }
};

/// Groups of a warp in order; the last is not committed yet.
struct Groups {
    std::deque<std::shared_ptr<Group>> committed;
    std::shared_ptr<Group> open = std::make_shared<Group>();

    /// Runs a group and those before it.
    void run(const Group* last) {
        for (auto& group : committed) {
            group->run();
            if (group.get() == last) break;
        }
    }
};
std::vector<Groups> groups;

Groups& own() { return groups[here.thread / WARP]; }

}  // namespace

void load_matrix(uint32_t* word, uint32_t row, int matrices, bool transposed) {
    Matrices own = {row, {}, matrices, transposed};
    meet(transposed ? "ldmatrix.trans" : "ldmatrix", &own, [](void* const* given, int lanes) {
        for (int lane = 0; lane < lanes; lane++) {
            auto& its = *(Matrices*)given[lane];
            for (int i = 0; i < its.count * 2; i++) memcpy((uint16_t*)its.word + i, place_of(given, lane, i / 2, i % 2), 2);
        }
    });
    memcpy(word, own.word, matrices * sizeof *word);
}

void store_matrix(uint32_t row, const uint32_t* word, int matrices, bool transposed) {
    Matrices own = {row, {}, matrices, transposed};
    memcpy(own.word, word, matrices * sizeof *word);
    meet(transposed ? "stmatrix.trans" : "stmatrix", &own, [](void* const* given, int lanes) {
        for (int lane = 0; lane < lanes; lane++) {
            auto& its = *(const Matrices*)given[lane];
            for (int i = 0; i < its.count * 2; i++) memcpy(place_of(given, lane, i / 2, i % 2), (const uint16_t*)its.word + i, 2);
        }
    });
}

void multiply(float* sums, const uint32_t* a, const uint32_t* b, Format format) {
    Multiplied own = {sums, a, b, format};
    meet("mma", &own, [](void* const* given, int) {
        float left[ROWS][DEPTH], right[DEPTH][8], result[ROWS][8] = {};
        for (int lane = 0; lane < WARP; lane++) {
            auto& its = *(const Multiplied*)given[lane];
            widen_fragment(left, its.a, lane, its.format);
            for (int i = 0; i < 4; i++) {
                right[lane % 4 * 2 + i % 2 + i / 2 * 8][lane / 4] = widened((uint16_t)(its.b[i / 2] >> i % 2 * 16), its.format);
            }
        }
        for (int row = 0; row < ROWS; row++) {
            for (int depth = 0; depth < DEPTH; depth++) {
                for (int n = 0; n < 8; n++) result[row][n] += left[row][depth] * right[depth][n];
            }
        }
        for (int lane = 0; lane < WARP; lane++) {
            auto& its = *(const Multiplied*)given[lane];
            for (int i = 0; i < 4; i++) its.sums[i] += result[fragment_row(lane, i)][fragment_column(lane, i)];
        }
    });
}

void reset_products(int threads) {
    groups.clear();
    groups.resize((threads + WARP - 1) / WARP);
}

void check_products() {
    for (size_t warp = 0; warp < groups.size(); warp++) {
        here.thread = (int)warp * WARP;
        bool waited = groups[warp].open->products.empty();
        for (auto& group : groups[warp].committed) waited &= group->done;
        if (!waited) fail("products are under way when the block ends");
    }
}

void products_begin() {
    meet("wgmma.fence", nullptr, [](void* const*, int) {});
}

void product(const Product& of) {
    Product own = of;
    meet("wgmma", &own, [](void* const* given, int) {
        Share share = {*(const Product*)given[0], here.thread / WARP % 4, {}, {}};
        for (int lane = 0; lane < WARP; lane++) {
            auto& its = *(const Product*)given[lane];
            const Product& first = share.of;
            if (its.a != first.a || its.b != first.b || its.add != first.add || its.columns != first.columns) {
                fail("lanes name different operands of a product");
            }
            share.sums[lane] = its.sums[0];
            for (int i = 0; i < its.columns / 2; i++) {
                if (its.sums[i] != its.sums[0] + i) fail("the sums of a product are no array");
            }
            if (its.held) memcpy(share.held[lane], its.held, sizeof share.held[lane]);
        }
        machine::own().open->products.push_back(share);
    });
}

void products_commit() {
    meet("wgmma.commit_group", nullptr, [](void* const*, int) {
        auto group = std::move(own().open);
        own().open = std::make_shared<Group>();
        own().committed.push_back(group);
        if (chance(4) == 0) return own().run(group.get());
        later(false, [group] {
            if (!group->done) own().run(group.get());
        });
    });
}

void products_wait(int pending) {
    static thread_local int allowed;
    allowed = pending;
    meet("wgmma.wait_group", nullptr, [](void* const*, int) {
        auto& committed = own().committed;
        while ((int)committed.size() > allowed) {
            committed.front()->run();
            committed.pop_front();
        }
    });
}

}  // namespace machine

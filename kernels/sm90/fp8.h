// A cache of 8-bit floats for the forms whose products have tokens as their rows. They become f16, exactly, on their way from shared
// memory into the registers of an operand; queries are f16 too, scaled to fit by a power of two for each row.
//
// A lane reads a token's columns 16 at a time, four for each of four products of depth 16: lane c of four takes columns 32 c to
// 32 c + 31 of a unit of 128, or 16 c to 16 c + 15 of the rotary 64. The queries' columns are arranged in the same order: pair j of
// the lane's share becomes pair 4 j + c. Of values, a lane reads pairs of columns, whose first goes with the operand's rows 0 to 7
// and whose second with rows 8 to 15: `d[4 j + e]` of a lane belongs to column lane / 4 * 2 + e / 2 of the warp's sixteen.

/// What a lane reads for the operands of four products, of depth 64 together: two words for each.
using Bytes = uint32[4][2];

/// Keys: this warp's sixteen tokens x 64 columns, a `part` of the unit.
DEVICE void load_keys(Bytes& bytes, const unsigned char SHARED* unit, int part, bool rotary) {
    int lane = lane_index();
    const unsigned char SHARED* line = unit + (thread_index() / 32 % 4 * 16 + lane / 4) * 128;
    int chunk = (rotary ? lane % 4 : lane % 4 * 2 + part) ^ lane / 4;
    Word4 low = *(const Word4 SHARED*)(line + chunk * 16);
    Word4 high = *(const Word4 SHARED*)(line + 8 * 128 + chunk * 16);
    uint32 words[2][4] = {{low.x, low.y, low.z, low.w}, {high.x, high.y, high.z, high.w}};
    UNROLL for (int step = 0; step < 4; step++) {
        bytes[step][0] = words[0][step];
        bytes[step][1] = words[1][step];
    }
}
DEVICE void widen_keys(uint32 (&a)[4], const uint32 (&bytes)[2]) {
    e4m3x4_to_f16(bytes[0], a[0], a[2]);
    e4m3x4_to_f16(bytes[1], a[1], a[3]);
}

/// Values: this warp's sixteen of the 64 columns of a `part` of the unit, x 64 tokens.
DEVICE void load_values(Bytes& bytes, uint32 unit, int part) {
    int lane = lane_index();
    uint32 from = unit + lane * 128 + ((part * 4 + thread_index() / 32 % 4) ^ lane % 8) * 16;
    UNROLL for (int half = 0; half < 2; half++) {
        uint32 pairs[4];
        load_matrix_trans(pairs, from + half * 32 * 128);
        UNROLL for (int m = 0; m < 4; m++) bytes[half * 2 + m / 2][m % 2] = pairs[m];
    }
}
DEVICE void widen_values(uint32 (&a)[4], const uint32 (&bytes)[2]) {
    e4m3x4_to_f16(select_bytes(bytes[0], 0, 0x3120), a[0], a[1]);
    e4m3x4_to_f16(select_bytes(bytes[1], 0, 0x3120), a[2], a[3]);
}

/// d (64 x 64) += a b, or = where `add` is 0, of a part of 64 tokens or columns: `a` of what was read for four products, `b` by its
/// columns' rows. Products are begun by twos, each two when at most two before them are under way: a warp that begins products of
/// registers waits until the one before has read its own, so more at once would only keep it from widening. What products under way may
/// still read is not written, so there are four operands. One statement: the compiler goes through all operands of every one.
template <bool values>
DEVICE void multiply_part(float (&d)[32], const Bytes& bytes, uint64 b, int add) {
#define CONVERT(first, second) "cvt.rn.f16x2.e4m3x2 " first ", l;\ncvt.rn.f16x2.e4m3x2 " second ", h;\n"
#define KEYS(word, first, second) "mov.b32 {l, h}, " word ";\n" CONVERT(first, second)
#define VALUES(word, first, second) "prmt.b32 v, " word ", 0, 0x3120;\nmov.b32 {l, h}, v;\n" CONVERT(first, second)
#define WIDEN_KEYS(low, high, w) KEYS(low, w "0", w "2") KEYS(high, w "1", w "3")
#define WIDEN_VALUES(low, high, w) VALUES(low, w "0", w "1") VALUES(high, w "2", w "3")
#define PRODUCT(w, add)                                                                                             \
    "wgmma.mma_async.sync.aligned.m64n64k16." WGMMA_TYPES " " SUMS_32 ", {" w "0, " w "1, " w "2, " w "3}, b, " add \
    ", 1, 1, 0;\n"
#define TWO(widen, v, w, add)                                                                                       \
    "wgmma.wait_group.sync.aligned 1;\n" widen "wgmma.fence.sync.aligned;\n" PRODUCT(v, add) ADVANCE("b", "2")      \
    PRODUCT(w, "1") "wgmma.commit_group.sync.aligned;\n"
#define OPERAND_REGISTERS(w) ".reg .b32 " w "0, " w "1, " w "2, " w "3;\n"
#define PART(WIDEN)                                                                                                            \
    asm volatile("{\n.reg .pred add;\n.reg .b16 l, h;\n.reg .b32 v;\n" OPERAND_REGISTERS("w") OPERAND_REGISTERS("x")           \
                 OPERAND_REGISTERS("y") OPERAND_REGISTERS("z") "setp.ne.b32 add, %41, 0;\n" OPERAND("b", "%40")                \
                 TWO(WIDEN("%32", "%33", "w") WIDEN("%34", "%35", "x"), "w", "x", "add") ADVANCE("b", "2")                     \
                 TWO(WIDEN("%36", "%37", "y") WIDEN("%38", "%39", "z"), "y", "z", "1") "}"                                     \
                 : IN_OUT_32(d, 0)                                                                                             \
                 : "r"(bytes[0][0]), "r"(bytes[0][1]), "r"(bytes[1][0]), "r"(bytes[1][1]), "r"(bytes[2][0]), "r"(bytes[2][1]), \
                   "r"(bytes[3][0]), "r"(bytes[3][1]), "l"(b), "r"(add)                                                        \
                 : "memory")
    if constexpr (values) {
        PART(WIDEN_VALUES);
    } else {
        PART(WIDEN_KEYS);
    }
#undef CONVERT
#undef KEYS
#undef VALUES
#undef WIDEN_KEYS
#undef WIDEN_VALUES
#undef PRODUCT
#undef TWO
#undef OPERAND_REGISTERS
#undef PART
}

/// A stream of products in parts of four, each commited by itself: what is read for a part is read one part ahead, and widened one
/// product ahead. A warp that begins products of registers waits until the one before has read its own, so more at once would only
/// keep it from widening.
template <int parts, typename Load, typename Widen, typename Multiply>
DEVICE void multiply_widened(Load load, Widen widen, Multiply multiply) {
    Bytes bytes[2];
    uint32 a[3][4];
    load(bytes[0], 0);
    UNROLL for (int part = 0; part < parts; part++) {
        if (part + 1 < parts) load(bytes[(part + 1) % 2], part + 1);
        UNROLL for (int step = 0; step < 4; step++) {
            int product = part * 4 + step;
            if (product >= 3) products_wait<2>();
            widen(a[product % 3], bytes[part % 2][step]);
            products_begin();
            multiply(part, step, a[product % 3]);
            products_commit();
        }
    }
}

/// Stores a query row's words `word` to `word + 3` (pairs of columns of a block that a unit of the cache has) where products expect
/// them, in f16 and times `scale`: in units of 64 columns, `unit_bytes` apart.
DEVICE void store_query(unsigned char SHARED* block, int unit_bytes, int row, int word, int pairs_of_lane, const Word4& raw, float scale) {
    uint32 pairs[4] = {raw.x, raw.y, raw.z, raw.w};
    UNROLL for (int i = 0; i < 4; i++) {
        float low, high;
        unpack(pairs[i], low, high);
        int share = (word + i) / pairs_of_lane;
        int chunk = word + i - share * pairs_of_lane;
        *(uint32 SHARED*)(block + chunk / 8 * unit_bytes + row * 128 + (chunk % 8 ^ row % 8) * 16 + share * 4) =
            pack_f16(low * scale, high * scale);
    }
}

/// The larger of a size and those of eight values, as bits of float32.
DEVICE uint32 largest_of(const Word4& values, uint32 largest) {
    uint32 pairs[4] = {values.x, values.y, values.z, values.w};
    UNROLL for (int i = 0; i < 4; i++) {
        float value[2];
        unpack(pairs[i], value[0], value[1]);
        UNROLL for (int e = 0; e < 2; e++) {
            uint32 size = float_bits(value[e]) & 0x7fffffffu;
            if (size > largest) largest = size;
        }
    }
    return largest;
}

/// The power of two that brings a row's largest value, given its bits, to 2^14 or more and below 2^15: f16 then loses nothing
/// that matters. 1 for a row that is zero or not finite.
DEVICE float fitting_scale(uint32 largest) {
    int exponent = (int)(largest >> 23);
    if (exponent == 0 || exponent == 255) return 1.0f;
    return bits_float((uint32)smaller(141 - exponent + 127, 253) << 23);
}

// What CDNA's forms of stage 1 share: products of operands in words, and the softmax of query rows that lie by lane.
//
// Products are transposed, tokens or columns x query rows. A lane is the `lane % 16`-th row of A and column of B, and the
// `lane / 16`-th quarter of what is summed over; of a result it holds four neighbouring rows of a column. So logits come to the
// lanes where weights are taken from, and maxima, sums and outputs of a query row lie in the same four lanes.

constexpr int ELEM = bytes_of(KV_DTYPE);

/// Neighbouring words, loaded and stored at once.
template <int count>
struct alignas(4 * count) Words {
    uint32 word[count];
};

/// c += a b; two words of a lane are 16 deep, four are 32.
DEVICE void multiply(Accum& c, const Words<2>& a, const Words<2>& b) {
    mma<Q_IS_BF16>(c, frag_of(a.word[0], a.word[1]), frag_of(b.word[0], b.word[1]));
}
DEVICE void multiply(Accum& c, const Words<4>& a, const Words<4>& b) { mma_wide<Q_IS_BF16>(c, a.word, b.word); }

/// The same of 32 rows and columns: two words of a lane are 8 deep, four are 16.
DEVICE void multiply(LargeAccum& c, const Words<2>& a, const Words<2>& b) {
    mma_large<Q_IS_BF16>(c, frag_of(a.word[0], a.word[1]), frag_of(b.word[0], b.word[1]));
}
DEVICE void multiply(LargeAccum& c, const Words<4>& a, const Words<4>& b) { mma_large_wide<Q_IS_BF16>(c, a.word, b.word); }

// ---- 8-bit floats ----

/// Whether the device has instructions for the other kind of 8-bit floats and none for that of the cache.
constexpr bool OTHER_FP8 = ELEM == 1 && (KV_DTYPE == FP8_E4M3 ? EXPANDS_E4M3FNUZ : EXPANDS_E4M3);

/// What elements of the cache are worth, in units of what they are widened to: the same bits are worth twice as much in E4M3 as in
/// E4M3FNUZ, but for -0 and NaN of the former, and the largest and NaN of the latter.
constexpr float WIDENED_UNIT = !OTHER_FP8 ? 1.0f : KV_DTYPE == FP8_E4M3 ? 2.0f : 0.5f;

/// Whether some of four bytes means something else in the other kind, in the upper bits of the bytes. Of E4M3FNUZ it finds at times
/// one that does not, the least negative number above a zero.
DEVICE uint32 means_else(uint32 bytes) {
    if constexpr (KV_DTYPE == FP8_E4M3) return (bytes & 0x7f7f7f7fu) + 0x01010101u;
    uint32 more = bytes + 0x01010101u, less = bytes - 0x01010101u;
    return (bytes ^ more) | (bytes & ~less);
}

/// Four 8-bit floats that mean nothing else, by the device's instructions for the other kind.
DEVICE void widen_other(uint32 bytes, uint32& first, uint32& second) {
    if constexpr (KV_DTYPE == FP8_E4M3) {
        uint32 magnitude = bytes & 0x7f7f7f7fu;
        bytes = (bytes & (magnitude + 0x7f7f7f7fu)) | magnitude;  // -0 is 0
    }
    fp8x4_to_pairs<Q_IS_BF16>(bytes, first, second);
}

/// The same of any, by more instructions.
DEVICE void widen_any(uint32 bytes, uint32& first, uint32& second) {
    constexpr uint32 TWO = 0x40004000u, HALF = Q_IS_BF16 ? 0x3f003f00u : 0x38003800u;  // pairs
    constexpr uint32 UNIT = KV_DTYPE == FP8_E4M3 ? HALF : TWO;
    widen_fp8x4(bytes, first, second);
    first = Q_IS_BF16 ? multiply_bf16x2(first, UNIT) : multiply_f16x2(first, UNIT);
    second = Q_IS_BF16 ? multiply_bf16x2(second, UNIT) : multiply_f16x2(second, UNIT);
}

/// Elements of the cache, of several tokens, as elements of Q_DTYPE in units of WIDENED_UNIT.
template <int count, int tokens>
DEVICE void widen(const Words<count> (&from)[tokens], Words<count * 2 / ELEM> (&to)[tokens]) {
    auto each = [&](auto change) {
        UNROLL for (int t = 0; t < tokens; t++) {
            UNROLL for (int i = 0; i < count; i++) {
                change(from[t].word[i], to[t].word[i * 2 / ELEM], to[t].word[(i * 2 + 1) / ELEM]);
            }
        }
    };
    if constexpr (ELEM == 2) {
        each([](uint32 pair, uint32& only, uint32&) { only = pair; });
    } else if constexpr (!OTHER_FP8) {
        each([](uint32 bytes, uint32& first, uint32& second) {
            if constexpr (EXPANDS_E4M3 || EXPANDS_E4M3FNUZ) {
                fp8x4_to_pairs<Q_IS_BF16>(bytes, first, second);
            } else {
                widen_fp8x4(bytes, first, second);
            }
        });
    } else {
        uint32 found = 0;
        each([&](uint32 bytes, uint32&, uint32&) { found |= means_else(bytes); });
        if (unlikely(wave_any((found & 0x80808080u) != 0))) {
            each(widen_any);
        } else {
            each(widen_other);
        }
    }
}

// ---- blocks ----

/// A block's share of the work. The blocks of an item attend to the same tokens for other rows: they go to one die, which has them in
/// its cache, of the DIES that blocks are dealt out to in turn.
struct Share {
    int item, first_row;
};
DEVICE Share share_of(const DecodeParams& p, int block) {
    int items = p.schedule_kind == BALANCED ? p.num_parts : p.batch * num_groups(p) * p.num_kv_splits;
    int row_blocks = divide_up(group_rows(p), BLOCK_ROWS);
    int round = DIES * row_blocks;
    // The last items, fewer than there are dies, are too few to matter.
    if (block >= items / DIES * round) return {block / row_blocks, block % row_blocks * BLOCK_ROWS};
    return {block / round * DIES + block % DIES, block % round / DIES * BLOCK_ROWS};
}

/// Leaves a cursor, which is the same for all lanes, to scalar registers.
DEVICE void make_scalar(Cursor& at) { at = {wave_first(at.seq), wave_first(at.token), wave_first(at.end)}; }

// ---- rows of the cache ----

/// Whether there is such a page, of 2^31 - 1 at most.
DEVICE bool is_page(const DecodeParams& p, int page) {
    constexpr int64 MOST = 0x7fffffff;
    return (uint32)page < (uint32)(p.num_pages < MOST ? p.num_pages : MOST);
}

/// Where tokens' rows are, in bytes. Products of 32 bits, which strides fit as a rule, take a third of the time.
template <int tokens, typename Use>
DEVICE void row_offsets(const int (&page)[tokens], const int (&entry)[tokens], int64 page_stride, int64 token_stride, Use use) {
    uint64 page_bytes = page_stride * ELEM, token_bytes = token_stride * ELEM;
    if (unlikely((page_bytes | token_bytes) >> 32 != 0)) {
        UNROLL for (int t = 0; t < tokens; t++) use(t, page[t] * page_bytes + entry[t] * token_bytes);
    } else {
        // The compiler must not find out that these are the strides themselves, of 64 bits.
        uint32 page_narrow = wave_first((int)page_bytes), token_narrow = wave_first((int)token_bytes);
        UNROLL for (int t = 0; t < tokens; t++) {
            use(t, (uint64)(uint32)page[t] * page_narrow + (uint64)(uint32)entry[t] * token_narrow);
        }
    }
}

// ---- lanes ----

DEVICE int lane_row() { return lane_index() % 16; }
DEVICE int lane_quarter() { return lane_index() / 16; }

/// Pairs of neighbouring columns of four tokens, to the four tokens of each column.
DEVICE Words<4> transpose_pairs(uint32 first, uint32 second, uint32 third, uint32 fourth) {
    return {{select_bytes(first, second, 0x5410), select_bytes(third, fourth, 0x5410), select_bytes(first, second, 0x7632),
             select_bytes(third, fourth, 0x7632)}};
}

/// Two weights rounded to Q_DTYPE. Each came from elements of 16 bits, so a NaN has no more.
DEVICE uint32 pack_weights(float low, float high) {
    return Q_IS_BF16 ? pack_bf16_weights(low, high) : pack_f16(low, high);
}

/// Softmax of query rows of which a wave has `rows`, each in the lanes that are equal modulo `rows`. Of a tile such a lane has four
/// tokens, `apart` from each other; the next lane's begin where they leave room. There may be several times as many.
template <int rows, int apart, int fours = 1>
struct Softmax {
    static constexpr int COUNT = MMA_ELEMS * fours;   // of a lane
    static constexpr int TILE = WAVE / rows * COUNT;  // tokens
    float maximum, sum;  // the sum is this lane's share; the maximum is below all numbers until it is first raised
    int limit;           // tokens that the row sees of this piece

    DEVICE void start(const DecodeParams& p, const Cursor& at, int row) {
        maximum = NEGATIVE_INFINITY;
        sum = 0.0f;
        Row of = row_of(p, at.seq, row);
        limit = smaller(visible_tokens(p, sequence_length(p, of.seq), of.token), at.end);
        if (!of.valid) limit = at.end;  // nothing to mask
    }

    /// The first of this lane's tokens.
    static DEVICE int first_token() {
        return (int)(unhoisted((uint32)lane_index()) / rows) * (apart == 1 ? MMA_ELEMS : 1);
    }

    /// The sum of a value over the lanes of a row, or their maximum.
    template <typename Combine>
    static DEVICE float over_row(float value, Combine combine) {
        UNROLL for (int mask = rows; mask < WAVE; mask *= 2) {
            value = combine(value, shuffle_from(value, (int)(unhoisted((uint32)lane_index()) ^ mask)));
        }
        return value;
    }

    /// Turns the products of the tile at `token` into logarithms of weights. Says what the row's earlier sums are to be multiplied
    /// by: its maximum is raised only when a logit exceeds it by LAZY_MAX, and only then do lanes ask each other.
    DEVICE float logs(const DecodeParams& p, float (&x)[COUNT], int token) {
        float scale = p.sm_scale * p.kv_scale * (WIDENED_UNIT * LOG2_E);
        bool raised = maximum > NEGATIVE_INFINITY;
        float base = raised ? maximum : 0.0f, lazy = raised ? LAZY_MAX : NEGATIVE_INFINITY;
        if (unlikely(p.softcap != 0.0f)) {
            float softcap = unhoisted(p.softcap);
            float twice = scale * 2.0f * reciprocal(softcap);
            UNROLL for (int i = 0; i < COUNT; i++) x[i] = capped(softcap, x[i] * twice) - base;
        } else {
            UNROLL for (int i = 0; i < COUNT; i++) x[i] = multiply_add(x[i], scale, -base);
        }
        if (unlikely(wave_any(token + TILE > limit))) {
            int seen = limit - token - first_token();
            UNROLL for (int i = 0; i < COUNT; i++) {
                if (i / MMA_ELEMS * (TILE / fours) + i % MMA_ELEMS * apart >= seen) x[i] = NEGATIVE_INFINITY;
            }
        }
        float highest = NEGATIVE_INFINITY;
        UNROLL for (int i = 0; i < COUNT; i++) highest = ::maximum(highest, x[i]);
        float factor = 1.0f;
        if (unlikely(wave_any(highest > lazy))) {
            float rise = over_row(highest, [](float a, float b) { return ::maximum(a, b); });
            if (rise > lazy) {
                maximum = base + rise;
                rise = maximum - base;
                factor = exp2(-::maximum(rise, 0.0f));  // sums are zero before the first rise, which may be a fall
                sum *= factor;
                UNROLL for (int i = 0; i < COUNT; i++) x[i] -= rise;
            }
        }
        return factor;
    }

    /// Turns four logarithms into weights.
    DEVICE void weigh(float (&x)[MMA_ELEMS]) {
        UNROLL for (int i = 0; i < MMA_ELEMS; i++) x[i] = exp2(x[i]);
        sum += (x[0] + x[1]) + (x[2] + x[3]);
    }

    /// Both at once.
    DEVICE float push(const DecodeParams& p, float (&x)[COUNT], int token) {
        static_assert(fours == 1, "four weights of a lane");
        float factor = logs(p, x, token);
        weigh(x);
        return factor;
    }

    /// Ends the row: writes its LSE to `slot` or, if that is negative, to the result. What its sums are to be multiplied by.
    DEVICE float finish(const DecodeParams& p, int virtual_seq, int row, int64 slot) {
        sum = over_row(sum, [](float a, float b) { return a + b; });
        float lse = sum == 0.0f ? NEGATIVE_INFINITY : (maximum + log2(sum)) * LN_2;
        Row of = row_of(p, virtual_seq, row);
        if (of.valid && lane_index() < rows) {
            if (slot < 0) {
                write_lse(p, of, lse);
            } else {
                global_pointer<float>(p.partial_lse)[slot * group_rows(p) + row] = lse;
            }
        }
        return result_scale(p, sum, slot) * WIDENED_UNIT;
    }
};

/// Stores four neighbouring columns of a result. A row that saw nothing is zero even beside values that are not finite.
DEVICE void store_columns(uint16 GLOBAL* to, float a, float b, float c, float d, float scale) {
    bool empty = scale == 0.0f;
    *(Word2 GLOBAL*)to = {empty ? 0 : pack(a * scale, b * scale), empty ? 0 : pack(c * scale, d * scale)};
}

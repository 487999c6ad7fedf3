// What CDNA's forms of stage 1 share: products of operands in words, and the softmax of query rows that lie by lane.
//
// Products are transposed, tokens or columns x query rows. A lane is the `lane % 16`-th row of A and column of B, and the
// `lane / 16`-th quarter of what is summed over; of a result it holds four neighbouring rows of a column. So logits come to the
// lanes where weights are taken from, and maxima, sums and outputs of a query row lie in the same four lanes.

/// c += a b; two words of a lane are 16 deep, four are 32.
DEVICE void multiply(Accum& c, const Word2& a, const Word2& b) { mma<Q_IS_BF16>(c, frag_of(a.x, a.y), frag_of(b.x, b.y)); }
DEVICE void multiply(Accum& c, const Word4& a, const Word4& b) {
    mma_wide<Q_IS_BF16>(c, {a.x, a.y, a.z, a.w}, {b.x, b.y, b.z, b.w});
}

constexpr int ELEM = bytes_of(KV_DTYPE);

/// Words of the cache that are loaded at once.
template <int count>
struct Words;
template <>
struct Words<1> {
    uint32 x;
};
template <>
struct Words<2> : Word2 {};
template <>
struct Words<4> : Word4 {};

/// Four and eight 8-bit floats as elements of Q_DTYPE.
DEVICE Words<2> widened(const Words<1>& bytes) {
    Words<2> to;
    widen_fp8x4(bytes.x, to.x, to.y);
    return to;
}
DEVICE Words<4> widened(const Words<2>& bytes) {
    Words<4> to;
    widen_fp8x4(bytes.x, to.x, to.y);
    widen_fp8x4(bytes.y, to.z, to.w);
    return to;
}

/// Elements of the cache as elements of Q_DTYPE.
template <int count>
DEVICE auto operands(const Words<count>& loaded) {
    if constexpr (ELEM == 2) {
        return loaded;
    } else {
        return widened(loaded);
    }
}

DEVICE int lane_row() { return lane_index() % 16; }
DEVICE int lane_quarter() { return lane_index() / 16; }

/// Pairs of neighbouring columns of four tokens, to the four tokens of each column.
DEVICE Word4 transpose_pairs(uint32 first, uint32 second, uint32 third, uint32 fourth) {
    return {select_bytes(first, second, 0x5410), select_bytes(third, fourth, 0x5410), select_bytes(first, second, 0x7632),
            select_bytes(third, fourth, 0x7632)};
}

/// The sum of a value over the lanes of a query row, or their maximum.
template <typename Combine>
DEVICE float over_row(float value, Combine combine) {
    UNROLL for (int mask = 16; mask < WAVE; mask *= 2) {
        value = combine(value, shuffle_from(value, (int)(unhoisted((uint32)lane_index()) ^ mask)));
    }
    return value;
}

/// Softmax of the query row of this lane and those 16 apart.
struct Softmax {
    float maximum, sum;  // the sum is this lane's share
    int limit;           // tokens that the row sees of this piece

    DEVICE void start(const DecodeParams& p, const Cursor& at, int row) {
        maximum = NO_MAXIMUM;
        sum = 0.0f;
        Row of = row_of(p, at.seq, row);
        limit = smaller(visible_tokens(p, sequence_length(p, of.seq), of.token), at.end);
        if (!of.valid) limit = at.end;  // nothing to mask
    }

    /// Turns products into weights, `x`: those of tokens 16 t + 4 quarter + i of the tile at `token`. Says what the row's earlier
    /// sums are to be multiplied by: its maximum is raised only when a logit exceeds it by LAZY_MAX, and only then do lanes ask
    /// each other.
    template <int tiles>
    DEVICE float push(const DecodeParams& p, const Accum (&logits)[tiles], float (&x)[tiles][MMA_ELEMS], int token) {
        float scale = p.sm_scale * p.kv_scale * LOG2_E;
        auto each = [&](auto change) {
            UNROLL for (int t = 0; t < tiles; t++) {
                UNROLL for (int i = 0; i < MMA_ELEMS; i++) change(t, i);
            }
        };
        each([&](int t, int i) { x[t][i] = logits[t].value[i] * scale; });
        if (unlikely(p.softcap != 0.0f)) {
            float softcap = unhoisted(p.softcap);
            // c tanh(y) = c (1 - 2 / (exp(2 y) + 1))
            each([&](int t, int i) {
                x[t][i] = softcap * LOG2_E * (1.0f - 2.0f / (exp2(x[t][i] * (2.0f / softcap)) + 1.0f));
            });
        }
        if (unlikely(wave_any(token + tiles * 16 > limit))) {
            int seen = limit - token - (int)(unhoisted((uint32)lane_index()) / 16 * 4);
            each([&](int t, int i) {
                if (t * 16 + i >= seen) x[t][i] = NEGATIVE_INFINITY;
            });
        }
        float highest = NEGATIVE_INFINITY;
        each([&](int t, int i) { highest = ::maximum(highest, x[t][i]); });
        float factor = 1.0f;
        if (unlikely(wave_any(highest > maximum + LAZY_MAX))) {
            float raised = over_row(highest, [](float a, float b) { return ::maximum(a, b); });
            if (raised <= maximum + LAZY_MAX) raised = maximum;
            factor = exp2(maximum - raised);
            maximum = raised;
            sum *= factor;
        }
        each([&](int t, int i) {
            x[t][i] = exp2(x[t][i] - maximum);
            sum += x[t][i];
        });
        return factor;
    }

    /// Ends the row: writes its LSE, if `writes`, to `slot` or, if that is negative, to the result. What its sums are to be
    /// multiplied by.
    DEVICE float finish(const DecodeParams& p, int virtual_seq, int row, int64 slot, bool writes) {
        sum = over_row(sum, [](float a, float b) { return a + b; });
        float lse = sum == 0.0f ? NEGATIVE_INFINITY : (maximum + log2(sum)) * LN_2;
        Row of = row_of(p, virtual_seq, row);
        if (writes && of.valid && lane_quarter() == 0) {
            if (slot < 0) {
                write_lse(p, of, lse);
            } else {
                global_pointer<float>(p.partial_lse)[slot * group_rows(p) + row] = lse;
            }
        }
        return result_scale(p, sum, slot);
    }
};

/// Stores four neighbouring columns of a result. A row that saw nothing is zero even beside values that are not finite.
DEVICE void store_columns(uint16 GLOBAL* to, float a, float b, float c, float d, float scale) {
    bool empty = scale == 0.0f;
    *(Word2 GLOBAL*)to = {empty ? 0 : pack(a * scale, b * scale), empty ? 0 : pack(c * scale, d * scale)};
}

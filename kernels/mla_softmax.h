// What the forms of stage 1 do with logits and sums (kernels/mla_decode_split.cu, kernels/mla_decode_split_turns.cu): the
// softmax of rows, and the writing of results.

/// Softmax of one row by ROW_LANES neighbouring lanes.
struct Softmax {
    float maximum, sum;  // the sum is this lane's share
    int limit;           // tokens that the row sees of this piece

    DEVICE void start(const DecodeParams& p, const Cursor& at, int row) {
        maximum = NO_MAXIMUM;
        sum = 0.0f;
        Row of = row_of(p, at.seq, row);
        int visible = visible_tokens(p, sequence_length(p, of.seq), of.token);
        limit = of.valid ? smaller(visible, at.end) : 0;
    }

    /// Turns a lane's logits into weights, and says what the row's earlier sums are to be multiplied by. Logit `j` is of token
    /// `token_of(j)`.
    template <typename TokenOf>
    DEVICE float weigh(const DecodeParams& p, float (&x)[LANE_KEYS], TokenOf token_of) {
        float scale = p.sm_scale * p.kv_scale * LOG2_E;
        UNROLL for (int j = 0; j < LANE_KEYS; j++) x[j] *= scale;
        if (unlikely(p.softcap != 0.0f)) {
            float twice = 2.0f * reciprocal(p.softcap);
            UNROLL for (int j = 0; j < LANE_KEYS; j++) x[j] = capped(p.softcap, x[j] * twice);
        }
        float highest = NEGATIVE_INFINITY;
        UNROLL for (int j = 0; j < LANE_KEYS; j++) {
            if (token_of(j) >= limit) x[j] = NEGATIVE_INFINITY;
            highest = ::maximum(highest, x[j]);
        }
        highest = lanes_maximum<ROW_LANES>(highest);
        float factor = 1.0f;
        if (highest > maximum + LAZY_MAX || maximum == NO_MAXIMUM) {
            float raised = ::maximum(highest, NO_MAXIMUM);
            factor = exp2(maximum - raised);
            maximum = raised;
            sum *= factor;
        }
        UNROLL for (int j = 0; j < LANE_KEYS; j++) {
            x[j] = exp2(x[j] - maximum);
            sum += x[j];
        }
        return factor;
    }

    /// Writes the row's LSE, to `slot` or, if that is negative, to the result, and what its output is to be multiplied by.
    /// Emptiness is a sum of zero: a NaN must show.
    DEVICE void finish(const DecodeParams& p, int virtual_seq, int row, int64 slot, float SHARED* scale) {
        sum = lanes_sum<ROW_LANES>(sum);
        if (thread_index() % ROW_LANES != 0) return;
        *scale = result_scale(p, sum, slot);
        float lse = sum == 0.0f ? NEGATIVE_INFINITY : (maximum + log2(sum)) * LN_2;
        Row of = row_of(p, virtual_seq, row);
        if (!of.valid) return;
        if (slot < 0) {
            write_lse(p, of, lse);
        } else {
            global_pointer<float>(p.partial_lse)[slot * group_rows(p) + row] = lse;
        }
    }
};

/// Writes the results of a wave's rows and columns, from `first_row` and `first_column` on, to `slot` or, if that is negative,
/// to the output. `scale` is what each of the wave's rows is multiplied by.
template <int row_tiles, int column_tiles>
DEVICE void write_results(const DecodeParams& p, const Accum (&tile)[row_tiles][column_tiles], int virtual_seq, int first_row,
                          int first_column, int64 slot, const float SHARED* scale) {
    UNROLL for (int m = 0; m < row_tiles; m++) {
        UNROLL for (int s = 0; s < ROW_SLOTS; s++) {
            int local = m * 16 + accum_row(row_slot_element[s]);
            Row row = row_of(p, virtual_seq, first_row + local);
            float factor = scale[local];
            uint16 GLOBAL* out = result_row(p, row, slot, first_row + local) + first_column;
            UNROLL for (int n = 0; n < column_tiles; n++) {
                UNROLL for (int i = 0; i < MMA_ELEMS; i += MMA_VECTOR) {
                    if (row_slot(i) != s) continue;
                    float value[MMA_VECTOR];
                    // A row that saw nothing is zero even beside values that are not finite.
                    UNROLL for (int j = 0; j < MMA_VECTOR; j++) {
                        value[j] = factor == 0.0f ? 0.0f : tile[m][n].value[i + j] * factor;
                    }
                    if (row.valid) store_narrow<MMA_VECTOR>(out + n * 16 + accum_column(i), value);
                }
            }
        }
    }
}

/// Multiplies each of a wave's rows of sums.
template <int row_tiles, int column_tiles>
DEVICE void rescale_rows(Accum (&tile)[row_tiles][column_tiles], const float SHARED* factors) {
    UNROLL for (int m = 0; m < row_tiles; m++) {
        float factor[ROW_SLOTS];
        UNROLL for (int s = 0; s < ROW_SLOTS; s++) factor[s] = factors[m * 16 + accum_row(row_slot_element[s])];
        UNROLL for (int n = 0; n < column_tiles; n++) {
            UNROLL for (int i = 0; i < MMA_ELEMS; i++) tile[m][n].value[i] *= factor[row_slot(i)];
        }
    }
}

// The stream of tiles that a block of stage 1 works through on Hopper.
//
// Tiles begin at multiples of TILE_TOKENS, where a page or an eighth of a tile begins as well, so boxes of 64 columns x 8 to 64
// tokens cover them. A piece that begins or ends inside a tile leaves tokens that are not its own to be masked.

constexpr int MOST_SHARED_BYTES = 232448;  // of a block

/// Whether boxes are small, so that several warps copy them.
#ifdef SMALL_PAGES
constexpr bool SMALL_BOXES = true;
#else
constexpr bool SMALL_BOXES = false;
#endif

constexpr int UNIT_COLUMNS = 64;
constexpr int UNIT_BYTES = TILE_TOKENS * UNIT_COLUMNS * 2;
constexpr int LATENT_UNITS = KV_LORA_RANK / UNIT_COLUMNS;
constexpr int HALF_UNITS = LATENT_UNITS / 2;
constexpr int HALF_BYTES = HALF_UNITS * UNIT_BYTES;
static_assert(TILE_TOKENS == 64 && KV_LORA_RANK == 512 && (ROPE_DIM == 64 || ROPE_DIM == 0), "units of 64 x 64");

/// A cache of 8-bit floats, which become f16 on the way to the products.
constexpr bool FP8 = bytes_of(KV_DTYPE) == 1;
static_assert(!FP8 || KV_DTYPE == FP8_E4M3, "the device's own 8-bit floats");

constexpr float LAZY_MAX = 8.0f;        // 2^8 times the running scale fits f16 and bf16
constexpr float NO_MAXIMUM = -1.0e30f;  // finite: exp2(-inf - NO_MAXIMUM) is 0, not NaN

/// Waits for the kernels before this one, and only then lets the next one begin: so whatever comes before this kernel has ended when
/// the one after the next begins.
DEVICE void take_turn() {
    grid_dependency_wait();
    grid_dependency_launch();
}

/// The block's share of the schedule: from `token` of `seq` up to `end_token` of `end_seq`. A schedule that was made before tells where
/// the slots of `seq` begin, how many it has, and how many tokens; else the last two are negative.
struct Part {
    int seq, token, end_seq, end_token, split;
    int slot_begin = 0, slots = -1, length = -1;

    DEVICE bool empty() const { return seq > end_seq || (seq == end_seq && token >= end_token); }
};

DEVICE Part find_part(const DecodeParams& p, int item) {
    if (is_balanced(p)) {
        const int GLOBAL* words = schedule_of(p).parts + (int64)item * PART_WORDS;
        Word4 ends = *(const Word4 GLOBAL*)words;
        Word2 slots = *(const Word2 GLOBAL*)(words + FIRST_WORD);
        return {(int)ends.x, (int)ends.y * TILE_TOKENS, (int)ends.z, (int)ends.w * TILE_TOKENS, words[4], (int)slots.x, (int)slots.y,
                words[LENGTH_WORD]};
    }
    int seq = quotient(item, p.num_kv_splits);
    int split = item - seq * p.num_kv_splits;
    int tokens = extent(p, seq);
    int64 begin = (int64)split_length(p, tokens) * split;
    int64 end = begin + split_length(p, tokens);
    if (begin >= tokens) return {seq, 0, seq, 0, 0};
    return {seq, (int)begin, seq, end < tokens ? (int)end : tokens, split};
}

/// A position in the stream: the tile that begins at `token` of `seq`, whose piece ends at `end`. The sequence has `length` tokens.
struct Cursor {
    int seq, token, end, split, length;
    bool more;

    DEVICE Cursor(const DecodeParams& p, const Part& part) : seq(part.seq), token(part.token), end(0), split(part.split), length(0) {
        settle(p, part);
        token &= -TILE_TOKENS;
    }

    /// Moves to the first piece with tokens at or after the current `seq` and `token`.
    DEVICE void settle(const DecodeParams& p, const Part& part) {
        more = false;
        NO_UNROLL while (seq < part.end_seq || (seq == part.end_seq && token < part.end_token)) {
            length = seq == part.seq && part.length >= 0 ? part.length : sequence_length(p, seq_of(p, seq));
            end = visible_tokens(p, length, last_token(p, seq));
            if (seq == part.end_seq) end = smaller(end, part.end_token);
            more = token < end;
            if (more) break;
            seq++;
            token = 0;
            split = 0;
        }
    }

    /// Where the partial results of its sequence are.
    DEVICE Slots slots(const DecodeParams& p, const Part& part) const {
        return seq == part.seq && part.slots >= 0 ? Slots{part.slot_begin, part.slots} : slots_of(p, seq);
    }

    /// Whether the tile is the last of its piece.
    DEVICE bool last() const { return token + TILE_TOKENS >= end; }

    DEVICE void advance(const DecodeParams& p, const Part& part) {
        token += TILE_TOKENS;
        if (token < end) return;
        seq++;
        token = 0;
        split = 0;
        settle(p, part);
    }
};

/// The turn of a loader: what the caller has said to be final it copies before that has come.
struct LoadersTurn {
    bool has_come;

    /// Takes it if it is `due`, unless the cache and its tables stand.
    DEVICE LoadersTurn(const DecodeParams& p, bool due) : has_come(p.settled != HISTORY_SETTLED || !due) {
        if (due && has_come) take_turn();
    }

    /// Sees to it that the tile at a cursor may be read: it has, or none of its rows are of this step's tokens.
    DEVICE void await(const DecodeParams& p, const Cursor& at) {
        if (has_come || at.token + TILE_TOKENS <= at.end - p.query_len) return;
        grid_dependency_wait();
        has_come = true;
    }
};

/// Where the block table has the page of a token.
DEVICE const int GLOBAL* page_entry(const DecodeParams& p, int seq, int token) {
    return global_pointer<const int>(p.block_table) + seq_of(p, seq) * p.table_stride + column_of(p, token);
}
/// The page of a token before `end`, the end of a piece: what lies past it is not looked up.
DEVICE int page_of(const DecodeParams& p, int seq, int token, int end) {
    return token < end ? load_now(page_entry(p, seq, token)) : -1;
}

/// Asks for the first pages of the sequences after a part's first, to be near when they are looked up. Each lane asks for one.
DEVICE void fetch_later_pages(const DecodeParams& p, const Part& part) {
    int seq = part.seq + 1 + lane_index();
    if (seq <= part.end_seq && seq < p.batch * num_groups(p)) fetch_near(page_entry(p, seq, 0));
}

/// Products to logits, in units of powers of two; those of tokens that a row does not see are for the caller to mask.
template <int count>
DEVICE void scale_logits(const DecodeParams& p, float (&x)[count]) {
    float scale = p.sm_scale * p.kv_scale * LOG2_E;
    if (p.softcap == 0.0f) {
        UNROLL for (int i = 0; i < count; i++) x[i] *= scale;
        return;
    }
    float softcap = unhoisted(p.softcap);
    scale *= 2.0f * reciprocal(softcap);
    UNROLL for (int i = 0; i < count; i++) {
        // Eight at a time in the kernel of two forms: a cap is never negative, which the compiler does not know, and else it has more under
        // way than registers.
        if (ONE_SEQUENCE && i % 8 == 0 && softcap < -i) return;
        x[i] = capped(softcap, x[i] * scale);
    }
}

/// Stores 16 bytes of an output row, which begins at a multiple of 8, or of 16 if it is `aligned`.
DEVICE void store_output(uint16 GLOBAL* to, const Word4& word, bool aligned) {
    if (aligned) {
        *(Word4 GLOBAL*)to = word;
    } else {
        *(Word2 GLOBAL*)to = {word.x, word.y};
        *(Word2 GLOBAL*)(to + 4) = {word.z, word.w};
    }
}
DEVICE void store_output(uint16 GLOBAL* to, const Word4& word) { store_output(to, word, (uint64)to % 16 == 0); }

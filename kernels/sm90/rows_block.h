// Stage 1 of MLA decode for Hopper, query rows as the rows of the products: 64 of them in a block, tiles of 64 tokens.
//
// One warp, the loader, keeps a ring of tiles filled, in units of 64 columns. Two warpgroups, the sides, compute: of every tile
// each multiplies the weights with its half of the columns, and of every second tile, its own, it computes the weights. A side
//
//   begins the logits of its tile,
//   then the output of the other side's tile before, which runs beside its softmax,
//   hands its weights over in shared memory, and multiplies them, still in registers, with its own half of its tile.
//
// While one side is in its softmax the other's products fill the matrix units. Row maxima and sums pass from tile to tile, and
// so from side to side, with the weights; a maximum is raised only when a logit exceeds it by LAZY_MAX, so sums of the output
// are rarely rescaled.

constexpr int ROWS = 64;
constexpr int LOADER_REGISTERS = 24;
constexpr int SIDE_REGISTERS = 240;
constexpr int SIDE_THREADS = 128;
constexpr int SIDE_WARPS = 4;
// Of a query row the first unit of each half and the rotary one are held in registers, the others in shared memory.
constexpr int HELD_UNITS = 2 + (ROPE_DIM > 0);
constexpr int STAGED_UNITS = HALF_UNITS - 1;  // of each half
static_assert(!FP8, "the wide form's");
static_assert(BLOCK_ROWS == ROWS && THREADS == 3 * SIDE_THREADS, "a loader, two sides");
static_assert(LOADER_REGISTERS + 2 * SIDE_REGISTERS <= 65536 / 384 / 8 * 8 * 3, "registers of a third of the block");

/// Shared memory, in bytes from its beginning.
constexpr int QUERY_AT = RING_BYTES;
constexpr int WEIGHTS_AT = QUERY_AT + 2 * STAGED_UNITS * UNIT_BYTES;
constexpr int STATE_AT = WEIGHTS_AT + UNIT_BYTES;
constexpr int PIECES_AT = STATE_AT + SIDE_THREADS * 16;
constexpr int PIECE_BYTES = 32;
constexpr int BARRIERS_AT = PIECES_AT + 2 * 2 * PIECE_BYTES;
constexpr int READY_AT = BARRIERS_AT + RING_BARRIERS * 8;
constexpr int SHARED_BYTES = READY_AT + 2 * 8;
static_assert(SHARED_BYTES <= MOST_SHARED_BYTES, "a unit's shared memory");

/// Named barriers: one of each side, one of both.
enum { SIDE_BARRIER = 1, BOTH_SIDES = 3 };

/// A warp's sixteen query rows: those units that are in registers, of the side's own half, of the other, rotary. They come by way of a
/// half of the ring that the side keeps meanwhile. Of the units in shared memory a side loads those of its own half.
struct Queries {
    uint32 word[HELD_UNITS][16];

    static constexpr int KEPT_BYTES = HALF_BYTES / SIDE_WARPS;  // of a warp

    /// Asks for the rows to be near when they are fetched, by one warp.
    static DEVICE void fetch_near(const DecodeParams& p, int virtual_seq, int first_row) {
        NO_UNROLL for (int r = lane_index(); r < ROWS; r += 32) {
            Row row = row_of(p, virtual_seq, first_row + r);
            if (!row.valid) continue;
            const uint16 GLOBAL* from = global_pointer<const uint16>(p.q) + row.seq * p.q_stride_batch + row.token * p.q_stride_token +
                                        row.head * p.q_stride_head;
            NO_UNROLL for (int column = 0; column < KV_LORA_RANK + ROPE_DIM; column += UNIT_COLUMNS) prefetch(from + column);
        }
    }

    /// Where the lane's row of the warp's sixteen begins among the queries, of a virtual sequence; negative if it does not exist.
    static DEVICE int64 offset(const DecodeParams& p, int virtual_seq, int first_row) {
        Row row = row_of(p, virtual_seq, first_row + warp_of_group() * 16 + unhoisted(lane_index()) % 16);
        return row.valid ? row.seq * p.q_stride_batch + row.token * p.q_stride_token + row.head * p.q_stride_head : -1;
    }

    /// Asks for the rows at such offsets; those that do not exist become zeros. No products may be reading queries any more.
    static DEVICE void fetch(const DecodeParams& p, int64 offset, int side, unsigned char SHARED* staged, unsigned char SHARED* kept) {
        int lane = unhoisted(lane_index());
        int warp_row = warp_of_group() * 16;
        int half = side * HALF_UNITS;
        NO_UNROLL for (int i = 0; i < 4; i++) {
            int local = lane / 8 + i * 4;
            int64 at = from_lane(offset, local);
            const uint16 GLOBAL* from = global_pointer<const uint16>(p.q) + (at < 0 ? 0 : at) + lane % 8 * 8;
            int to = local * 128 + (lane % 8 ^ local % 8) * 16;
            UNROLL for (int unit = 0; unit < HELD_UNITS; unit++) {
                int column = unit == 2 ? LATENT_UNITS : half ^ unit * HALF_UNITS;
                copy16_async(kept + warp_row / 16 * KEPT_BYTES + unit * 2048 + to, from + column * UNIT_COLUMNS, at >= 0);
            }
            UNROLL for (int unit = 0; unit < STAGED_UNITS; unit++) {
                copy16_async(staged + (side * STAGED_UNITS + unit) * UNIT_BYTES + warp_row * 128 + to,
                             from + (half + 1 + unit) * UNIT_COLUMNS, at >= 0);
            }
        }
        copy_commit();
    }

    /// Waits for this side's share, and takes what is for registers.
    DEVICE void take(const unsigned char SHARED* kept) {
        copy_wait<0>();
        warp_barrier();
        uint32 from = shared_address(kept) + warp_of_group() * KEPT_BYTES;
        UNROLL for (int unit = 0; unit < HELD_UNITS; unit++) {
            UNROLL for (int step = 0; step < 4; step++) load_matrix_at(word[unit] + step * 4, matrices(from + unit * 2048, step));
        }
        publish_to_async();
    }

    /// Where a lane's row of the matrices of a step lies, in sixteen rows of a unit.
    static DEVICE uint32 matrices(uint32 rows, int step) {
        int lane = unhoisted(lane_index());
        return rows + lane % 16 * 128 + ((step * 2 + lane / 16) ^ lane % 8) * 16;
    }
};

/// Starts the products of the queries with the tile `n`, unit by unit as they come in. The rotary unit comes first: the next one can
/// only be loaded when it is done with. A warp waits for products whose queries are in registers, so those of others come last.
DEVICE void start_logits(float (&x)[32], const Queries& q, int side, const Ring& ring, int n) {
    HalfPlace half = place_of<HALVES>(2 * n);
    auto start_held = [&](uint32 full, int parity, uint32 keys, const uint32* held, bool first) {
        barrier_wait(full, parity);
        if constexpr (GATHERS) publish_to_async();
        products_begin();
        products_64_held(x, held, rows_operand(keys), !first);
    };
    if (ROPE_DIM > 0) {
        start_held(ring.rotary_full(n % 2), n / 2 & 1, ring.rotary(), q.word[2], true);
        products_commit();
    }
    UNROLL for (int other = 0; other < 2; other++) {
        uint32 staged = ring.base + QUERY_AT + (other ^ side) * STAGED_UNITS * UNIT_BYTES;
        uint32 keys = ring.half(half.index), full = ring.half_full(half.index);
        start_held(full, half.parity, keys, q.word[other], ROPE_DIM == 0 && other == 0);
        static_assert(STAGED_UNITS == 3, "as the products count");
        // Gathered units of a half come together.
        products_64_of_3<UNIT_BYTES, !GATHERS>(x, rows_operand(staged), rows_operand(keys, UNIT_BYTES), full + 8, half.parity);
        half.advance();
        products_commit();
        if (other == 0) {
            products_wait<1>();  // without rotary columns, too: or the compiler waits where sums are scaled
            if (ROPE_DIM > 0) release(ring.rotary_empty());
        }
    }
}

/// What a block computes of one sequence, and how much of that its rows see.
struct Piece {
    int64 slot;  // where its result goes; the output if negative
    int seq, first_row;
    int token;       // at which its first tile begins
    int begin, end;  // its tokens; 0 where there is no piece
    int seen;        // tokens that all rows see; negative where the first lacks some

    DEVICE Piece() {}
    DEVICE Piece(const DecodeParams& p, const Cursor& at, const Part& rest, int first_row)
        : slot(-1), seq(at.seq), first_row(first_row), token(at.token), begin(at.seq == rest.seq ? rest.token : 0), end(0), seen(0) {
        if (!at.more) return;
        Slots slots = at.slots(p, rest);
        if (slots.count > 0) slot = slots.begin + at.split;
        end = at.end;
        seen = at.length;
        if (p.causal) seen += 1 - p.query_len + row_of(p, seq, first_row).token;
    }

    /// Tokens that the block's row sees of the sequence, within the piece's end.
    DEVICE int limit(const DecodeParams& p, int row) const {
        int later = p.causal ? row_of(p, seq, first_row + row).token - row_of(p, seq, first_row).token : 0;
        return smaller(seen + later, end);
    }

    DEVICE int tiles() const { return divide_up(end - token, TILE_TOKENS); }
    /// Tokens of tile `i` before the end.
    DEVICE int valid(int i) const { return end - token - i * TILE_TOKENS; }

    /// Products of tile `i` to logits, but for a factor of each of a lane's rows: `scale`, before that of the products.
    DEVICE void mask(const DecodeParams& p, float (&x)[32], int i, float (&scale)[2]) const {
        float factor = p.sm_scale * p.kv_scale * LOG2_E;
        if (p.softcap != 0.0f || factor <= 0.0f) {
            scale_logits(p, x);
            scale[0] = scale[1] = 1.0f;
        } else {
            UNROLL for (int r = 0; r < 2; r++) scale[r] *= factor;
        }
        int first = token + i * TILE_TOKENS;
        if (first + TILE_TOKENS <= smaller(seen, end) && first >= begin) return;
        int lane = unhoisted(lane_index());
        int row = warp_of_group() * 16 + lane / 4;
        int limits[2] = {limit(p, row), limit(p, row + 8)};
        UNROLL for (int i = 0; i < 32; i++) {
            int at = first + i / 4 * 8 + lane % 4 * 2 + i % 2;
            if (at >= limits[i / 2 % 2] || at < begin) x[i] = NEGATIVE_INFINITY;
        }
    }
};

static_assert(sizeof(Piece) == PIECE_BYTES, "two of each side in shared memory");

/// One of the two sides.
struct Side {
    const DecodeParams& p;
    int side;
    unsigned char SHARED* shared;
    Ring ring;  // of operands
    float o[128];  // HALF columns of sixteen rows a warp
    float maximum[2], sum[2];

    /// What lanes hand on with a tile's weights: the maxima of their two rows, and their shares of the sums.
    DEVICE Float4 SHARED& state() const { return *((Float4 SHARED*)(shared + STATE_AT) + thread_index() % SIDE_THREADS); }
    /// The piece in hand and the next, in turn: registers are full.
    DEVICE Piece SHARED& piece(int turn) const { return *((Piece SHARED*)(shared + PIECES_AT) + side * 2 + turn); }
    /// The address of a place in shared memory, for all but operands.
    DEVICE uint32 address(int at) const { return ring.barriers - BARRIERS_AT + at; }
    DEVICE uint32 ready(int n) const { return address(READY_AT + n % 2 * 8); }
    /// The side's half of a tile that is its own or not.
    DEVICE int half(int n, bool own) const { return (2 * n + !own) % HALVES; }
    DEVICE void side_barrier() const { named_barrier(SIDE_BARRIER + side, SIDE_THREADS); }

    /// Scales what has been summed as maxima rise from those to the lane's; no products may be under way to it.
    DEVICE void scale_sums(const float (&from)[2]) {
        float factor[2];
        UNROLL for (int r = 0; r < 2; r++) {
            factor[r] = exp2(from[r] - maximum[r]);
            sum[r] *= factor[r];
        }
        UNROLL for (int i = 0; i < 128; i++) o[i] *= factor[i / 2 % 2];
    }

    /// Raises the maxima where products, which `scale` makes logits, exceed them by too much, which is rare; the four lanes of a row hold
    /// sixteen tokens each. Whether any of the warp's rose.
    DEVICE bool raise(const float (&x)[32], const float (&scale)[2]) {
        float highest[2];
        UNROLL for (int r = 0; r < 2; r++) {
            highest[r] = x[2 * r];
            UNROLL for (int i = 0; i < 16; i++) highest[r] = ::maximum(highest[r], x[i / 2 * 4 + 2 * r + i % 2]);
            highest[r] *= scale[r];
        }
        bool any = warp_any(highest[0] > maximum[0] + LAZY_MAX || highest[1] > maximum[1] + LAZY_MAX);
        if (any) {
            UNROLL for (int r = 0; r < 2; r++) {
                highest[r] = lanes_maximum<4>(highest[r]);
                if (highest[r] > maximum[r] + LAZY_MAX) maximum[r] = highest[r];
            }
        }
        return any;
    }

    /// Turns products into weights likewise.
    DEVICE void weigh(float (&x)[32], const float (&scale)[2]) {
        UNROLL for (int i = 0; i < 32; i++) {
            x[i] = exp2(x[i] * scale[i / 2 % 2] - maximum[i / 2 % 2]);
            sum[i / 2 % 2] += x[i];
        }
    }

    /// Hands over the weights of the tile `n`, and the state of its rows.
    DEVICE void hand_over(const uint32 (&weights)[16], int n) {
        int lane = unhoisted(lane_index());
        int warp_row = warp_of_group() * 16;
        int matrix_row = lane % 16;
        uint32 to = address(WEIGHTS_AT) + (warp_row + matrix_row) * 128;
        UNROLL for (int step = 0; step < 4; step++) {
            const uint32* a = weights + step * 4;
            store_matrix(to + ((step * 2 + lane / 16) ^ matrix_row % 8) * 16, a[0], a[1], a[2], a[3]);
        }
        state() = {maximum[0], maximum[1], sum[0], sum[1]};
        publish_to_async();
        barrier_arrive(ready(n));  // each lane for what it has stored, which is how racecheck follows it
    }

    /// Waits for the weights of the other side's tile `n`, and takes over the state of its rows.
    DEVICE void take_over(int n) {
        barrier_wait(ready(n), n / 2 & 1);
        Float4 told = state();
        float before[2] = {maximum[0], maximum[1]};
        maximum[0] = told.x;
        maximum[1] = told.y;
        if (warp_any(maximum[0] != before[0] || maximum[1] != before[1])) scale_sums(before);
        sum[0] = told.z;
        sum[1] = told.w;
    }

    /// Clears what the side's half of a tile has after its piece's end; of gathered rows nothing is there.
    DEVICE void clear(int half, int valid) const {
        if (GATHERS || valid >= TILE_TOKENS) return;
        clear_rows(shared + half * HALF_BYTES, valid);
        side_barrier();
    }

    /// Starts the products of the weights in shared memory with a half.
    DEVICE void start_other(int half, bool first) {
        uint32 weights = ring.base + WEIGHTS_AT, values = ring.half(half);
        products_begin();
        products_256(o, rows_operand(weights), columns_operand<UNIT_BYTES>(values), !first);
    }

    /// Adds up a piece's weights: what its rows' sums are to be multiplied by, and their log-sum-exps.
    DEVICE void add_up(const Piece& piece, float (&scale)[2], float (&lse)[2]) const {
        UNROLL for (int r = 0; r < 2; r++) {
            // Emptiness is a sum of zero: a NaN must show.
            float total = lanes_sum<4>(sum[r]);
            scale[r] = result_scale(p, total, piece.slot);
            lse[r] = total == 0.0f ? NEGATIVE_INFINITY : (maximum[r] + log2(total)) * LN_2;
        }
    }

    /// The first of a lane's two rows in its group; the other is eight further on.
    DEVICE int group_row(const Piece& piece) const { return piece.first_row + warp_of_group() * 16 + unhoisted(lane_index()) / 4; }

    /// Writes the log-sum-exps of a piece that is its sequence's only one.
    DEVICE void write_lses(const Piece& piece, const float (&lse)[2]) const {
        UNROLL for (int r = 0; r < 2; r++) {
            Row of = row_of(p, piece.seq, group_row(piece) + r * 8);
            if (lane_index() % 4 == 0 && of.valid) write_lse(p, of, lse[r]);
        }
    }

    /// Writes the side's half of a partial result, columns as lanes have them (DEALT_PAIRS), and `last` the log-sum-exps, which are the
    /// same on both sides. Of rows that saw nothing these tell: what else is written of them is not read.
    DEVICE void write_partial(const Piece& piece, const float (&scale)[2], const float (&lse)[2], bool last) const {
        int lane = unhoisted(lane_index()), rows = group_rows(p), row = group_row(piece);
        int64 slot_row = piece.slot * rows + row;
        Word4 GLOBAL* to = global_pointer<Word4>(p.partial_out + (slot_row * KV_LORA_RANK + side * HALF) * 2) + lane % 4;
        UNROLL for (int r = 0; r < 2; r++) {
            if (row + r * 8 >= rows) continue;
            UNROLL for (int word = 0; word < 8; word++) {
                uint32 pairs[4];
                UNROLL for (int u = 0; u < 4; u++) {
                    const float* x = o + (word + u * 8) * 4 + r * 2;
                    pairs[u] = pack(x[0] * scale[r], x[1] * scale[r]);
                }
                to[r * 8 * KV_LORA_RANK / 8 + word * 4] = {pairs[0], pairs[1], pairs[2], pairs[3]};
            }
            if (last && lane % 4 == 0) global_pointer<float>(p.partial_lse)[slot_row + r * 8] = lse[r];
        }
    }

    /// Sums up a piece whose first tile is the block's tile `base`.
    DEVICE void attend(const Piece& piece, const Queries& queries, int base) {
        maximum[0] = maximum[1] = NO_MAXIMUM;
        sum[0] = sum[1] = 0.0f;
        int tiles = piece.tiles();
        int i = (base ^ side) & 1;  // the side's own tile
        NO_UNROLL while (warp_any(i < tiles)) {
            int n = base + i;
            float x[32];
            start_logits(x, queries, side, ring, n);
            // A piece's first tile has none before it. Its products begin all the same, for the compiler's sake: the own ones
            // after them overwrite what they sum up.
            if (i > 0) take_over(n - 1);
            start_other(i > 0 ? half(n - 1, false) : half(n, true), i <= 1);
            products_commit();
            products_wait<1>();
            settle(x);

            float scale[2] = {1.0f, 1.0f};
            piece.mask(p, x, i, scale);
            float before[2] = {maximum[0], maximum[1]};
            bool raised = raise(x, scale);
            products_wait<0>();
            settle(o);
            if (raised) scale_sums(before);
            // Before the weights are computed: the loader waits for places.
            if (i > 0) release(ring.half_empty(half(n - 1, false)));
            weigh(x, scale);
            uint32 weights[16];
            UNROLL for (int j = 0; j < 16; j++) {
                weights[j] = pack(x[2 * j], x[2 * j + 1]);
            }
            side_barrier();  // no warp reads the other side's weights any more
            hand_over(weights, n);
            clear(half(n, true), piece.valid(i));
            uint32 values = ring.half(half(n, true));
            products_begin();
            products_256_held(o, weights, columns_operand<UNIT_BYTES>(values), i > 0);
            products_commit();
            products_wait<0>();
            settle(o);
            i += 2;
            if (i <= tiles) release(ring.half_empty(half(n, true)));
        }
        if (!warp_any(i > tiles)) {  // the last tile is the other side's
            int last = base + tiles - 1;
            take_over(last);
            clear(half(last, false), piece.valid(tiles - 1));
            start_other(half(last, false), tiles == 1);
            products_commit();
            products_wait<0>();
            settle(o);
        }
    }
};

/// The pieces of the block's part, by one side, once the block is prepared. It takes its turn if that is `due`: then schedule and lengths
/// stand, and what follows from them is found before.
DEVICE void attend_part(const DecodeParams& p, int item, const Part& part, const Cursor& first, int first_row, int side, bool due,
                        unsigned char SHARED* shared, const Ring& ring) {
    unsigned char SHARED* staged = shared + QUERY_AT;
    Side self = {p, side, shared, ring};
    bool describes = thread_index() % SIDE_THREADS == 0;
    int base = 0;
    int kept = HALVES - 2 + side;
    Piece piece(p, first, part, first_row);
    int64 offset = Queries::offset(p, first.more ? first.seq : 0, first_row);
    await_prepared(false);
    if (due) take_turn();
    if (!first.more) return;
    Queries::fetch(p, offset, side, staged, shared + kept * HALF_BYTES);
    if (describes) self.piece(0) = piece;
    NO_UNROLL for (int turn = 0;; turn ^= 1) {
        if constexpr (!ONE_PIECE) {  // while the queries come, what is next is looked up
            Part whole = find_part(p, item);
            Part rest = {piece.seq + 1, 0, whole.end_seq, whole.end_token, 0};
            Piece after(p, Cursor(p, rest), rest, first_row);
            if (describes) self.piece(turn ^ 1) = after;
        }
        Queries queries;
        queries.take(shared + kept * HALF_BYTES);
        release(ring.half_empty(kept));
        named_barrier(BOTH_SIDES, 2 * SIDE_THREADS);
        self.attend(piece, queries, base);
        base += piece.tiles();
        kept = self.half(base - 1, (base - 1) % 2 == side);
        // Both are read before the side meets, after which they may be written again.
        Piece done = self.piece(turn);
        if constexpr (!ONE_PIECE) piece = self.piece(turn ^ 1);
        bool more = !ONE_PIECE && warp_any(piece.end > 0), whole = warp_any(done.slot < 0), last = (base - 1) % 2 == side;
        float scale[2], lse[2];
        self.add_up(done, scale, lse);
        if (whole || more) self.side_barrier();  // no warp reads the values any more
        // Both sides are done with the queries: who has seen the last weights knows it of the other.
        auto fetch_next = [&] {
            if (more) Queries::fetch(p, Queries::offset(p, piece.seq, first_row), side, staged, shared + kept * HALF_BYTES);
        };
        if (whole) {
            if (last) self.write_lses(done, lse);
            Output output;
            output.gather(self.o, scale, shared + kept * HALF_BYTES);
            fetch_next();
            output.write(p, done.seq, first_row + warp_of_group() * 16, side * HALF);
        } else {
            fetch_next();
            self.write_partial(done, scale, lse, last);
        }
        if (!more) break;
    }
}

/// Prepares the block, by one thread.
DEVICE void prepare(const TensorMap& latent, const TensorMap& rope, unsigned char SHARED* shared) {
    Ring ring = {shared_address(shared), shared_address(shared) + BARRIERS_AT};
    if constexpr (!GATHERS) prefetch_map(latent);
    if constexpr (!GATHERS && ROPE_DIM > 0) prefetch_map(rope);
    ring.init(SIDE_WARPS * RELEASES, SIDE_WARPS * RELEASES, GATHERS ? Gather::ARRIVALS : 1);
    for (int side = 0; side < 2; side++) barrier_init(ring.base + READY_AT + side * 8, SIDE_THREADS);
    barrier_publish_init();
}

/// The block's part of the schedule: known before the block's turn, if it has not come, where schedules stand, with all that follows from
/// it and from lengths. Where the cache stands, too, the loader does not wait for the turn.
DEVICE void serve(const DecodeParams& p, const TensorMap& latent, const TensorMap& rope, unsigned char SHARED* shared, bool waited) {
    Ring ring = {shared_address(shared), shared_address(shared) + BARRIERS_AT};
    int row_blocks = divide_up(group_rows(p), BLOCK_ROWS);
    int item = quotient(block_index(), row_blocks);
    int first_row = (block_index() - item * row_blocks) * BLOCK_ROWS;
    if (!waited && !p.settled) take_turn();
    Part part = find_part(p, item);
    Cursor first(p, part);
    bool due = !waited && p.settled;
    if (part.empty()) {
        if (due) take_turn();
        return;
    }
    int role = warpgroup_index();
    if (role == 0) {
        shrink_registers<LOADER_REGISTERS>();
        if (warp_of_group() == PREPARING_WARP) tell_prepared();
        if constexpr (GATHERS) {
            await_prepared(true);
            gather_tiles(p, part, first, ring, LoadersTurn(p, due));
        } else if (warp_of_group() < LOADERS) {
            load_tiles(p, part, first, latent, rope, ring, due, [&](int seq) {
                int row_blocks = divide_up(group_rows(p), BLOCK_ROWS);  // again: registers are few
                Queries::fetch_near(p, seq, unhoisted(block_index()) % row_blocks * BLOCK_ROWS);
            });
        }
    } else {
        grow_registers<SIDE_REGISTERS>();
        attend_part(p, item, part, first, first_row, role - 1, due, shared, ring.of_operands());
    }
}

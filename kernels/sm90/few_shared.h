// What a block of few_block.h has in shared memory, and by what its warps wait for each other.

namespace few {

constexpr int GROUPS = 2;
constexpr int GROUP_THREADS = 128;
constexpr int GROUP_WARPS = 4;
constexpr int WORKERS = GROUPS * GROUP_THREADS;
constexpr int ROWS = BESIDE_ROWS ? 32 : BLOCK_ROWS;
constexpr int GROUP_ROWS = ROWS / GROUPS;
constexpr int GROUP_UNITS = LATENT_UNITS / GROUPS;
constexpr int SUMS = ROWS / 2;            // of a product, in a lane's registers
constexpr int LOGITS = SUMS / GROUPS;     // that a lane is left with
constexpr int LANE_ROWS = ROWS / 4;       // query rows of which a lane holds sums: see `lane_row`
constexpr int OWN_ROWS = GROUP_ROWS / 4;  // and logits
static_assert(THREADS >= WORKERS + WAVE && (ROWS == 16 || ROWS == 32), "two warpgroups and a loader");
static_assert(bytes_of(KV_DTYPE) == 2, "products of 16 bits");

// A row's maximum begins at 0 and is raised, to the highest logit so far, only when a logit exceeds it by RAISE_ABOVE (powers of two)
// or, in the first tile, lies more than RAISE_BELOW under it. Weights far from 1 cost nothing where they have the range of floats.
constexpr float RAISE_ABOVE = Q_IS_BF16 ? 32.0f : LAZY_MAX;
constexpr float RAISE_BELOW = Q_IS_BF16 ? 64.0f : 0.0f;

// Shared memory, in bytes from its beginning, as `shared_bytes` of src/kernel/select_few.rs counts it.
constexpr int QUERY_UNIT_BYTES = ROWS * 128;
constexpr int QUERY_AT = TILES_BYTES;
constexpr int EXCHANGE_AT = QUERY_AT + UNITS * QUERY_UNIT_BYTES;
constexpr int WEIGHTS_AT = EXCHANGE_AT + WORKERS * LOGITS * 4;
constexpr int HIGHEST_AT = WEIGHTS_AT + QUERY_UNIT_BYTES;
constexpr int MAXIMA_AT = HIGHEST_AT + GROUP_WARPS * ROWS * 4;
constexpr int FACTOR_AT = MAXIMA_AT + ROWS * 4;
constexpr int CHANGED_AT = FACTOR_AT;  // at first
constexpr int BARRIERS_BYTES = TILES_BARRIERS_BYTES + 4 * 8;
constexpr int LENGTHS_BYTES = WAVE * 4;
// Beside the rows form, what is there before a form is chosen lies where that one has nothing.
constexpr int SHARED_BYTES = BESIDE_ROWS ? MOST_SHARED_BYTES : FACTOR_AT + ROWS * 4 + BARRIERS_BYTES;
constexpr int BARRIERS_AT = SHARED_BYTES - BARRIERS_BYTES;
constexpr int SIGNALS_AT = BARRIERS_AT + TILES_BARRIERS_BYTES;
constexpr int LENGTHS_AT = BESIDE_ROWS ? BARRIERS_AT - LENGTHS_BYTES : HIGHEST_AT;
constexpr int RESULT_STRIDE = KV_LORA_RANK * 2 + 16;
static_assert(ROWS * RESULT_STRIDE <= WEIGHTS_AT - QUERY_AT, "results pass through the place of queries and logits");

/// This thread's words of the block's query rows; rows that do not exist become zeros.
struct Queries {
    static constexpr int SHARES = WORKERS / (ROWS * 8);  // of the units

    const uint16 GLOBAL* from;
    bool valid;

    DEVICE void find(const DecodeParams& p, const OwnPiece& piece, int first_row) {
        int thread = unhoisted(thread_index());
        Row at = row_of(p, piece.seq, first_row + thread / 8 % ROWS);
        valid = at.valid;
        from = global_pointer<const uint16>(p.q) + thread % 8 * 8;
        if (valid) from += at.seq * p.q_stride_batch + at.token * p.q_stride_token + at.head * p.q_stride_head;
    }

    DEVICE void copy(unsigned char SHARED* queries) const {
        int thread = unhoisted(thread_index());
        int row = thread / 8 % ROWS;
        unsigned char SHARED* to = queries + row * 128 + (thread % 8 ^ row % 8) * 16;
        UNROLL for (int i = 0; i < divide_up(UNITS, SHARES); i++) {
            int unit = i * SHARES + thread / (ROWS * 8);
            if (unit < UNITS) copy16_async(to + unit * QUERY_UNIT_BYTES, from + unit * UNIT_COLUMNS, valid);
        }
        copy_commit();
    }
};

/// What the groups tell the loader, and it them.
struct Signals {
    uint32 at;

    DEVICE uint32 queries() const { return at; }         // they are asked for
    DEVICE uint32 summands() const { return at + 8; }    // lanes have told their sums
    DEVICE uint32 factors() const { return at + 16; }    // the loader has told what rows are multiplied by
    DEVICE uint32 changed() const { return at + 24; }    // and whether the block begins again

    DEVICE void init() const {
        // Lanes arrive each for what they have done, which is how racecheck follows it.
        barrier_init(queries(), WORKERS);
        barrier_init(summands(), WORKERS);
        barrier_init(factors(), WAVE);
        barrier_init(changed(), WAVE);
    }

    /// Whether lengths or pages were others than the first time: the loader tells once, before any group goes beyond its first logits.
    DEVICE void tell_changed(unsigned char SHARED* shared, bool any) const {
        if (lane_index() == 0) *(int SHARED*)(shared + CHANGED_AT) = any;
        barrier_arrive(changed());
    }
    DEVICE bool was_changed(const unsigned char SHARED* shared) const {
        barrier_wait(changed(), 0);  // the only phase: who begins again does not ask
        return *(const int SHARED*)(shared + CHANGED_AT) != 0;
    }
};

/// Query row of a lane's `i`-th column of sums.
DEVICE int lane_row(int lane, int i) { return i / 2 * 8 + lane % 4 * 2 + i % 2; }

/// The barrier of both warpgroups.
constexpr int BOTH = 1;
DEVICE void workers_barrier() { named_barrier(BOTH, WORKERS); }

}  // namespace few

// The block of the keys form: who works in it, which query rows a lane has, and where shared memory has what.

constexpr int ROWS = BLOCK_ROWS;
constexpr int QUERY_UNITS = LATENT_UNITS + (ROPE_DIM > 0);
constexpr int QUERY_UNIT_BYTES = ROWS * UNIT_COLUMNS * 2;
constexpr int WEIGHTS_BYTES = ROWS * TILE_TOKENS * 2;
constexpr int SUMS = ROWS / 2;        // of a product, in a lane's registers
constexpr int LANE_ROWS = ROWS / 4;   // query rows of which a lane holds logits and sums: 8 (i / 2) + lane % 4 * 2 + i % 2
constexpr int GROUPS = 2;
constexpr int GROUP_THREADS = 128;
constexpr int GROUP_WARPS = 4;
// Twice the sums of 16 rows, or operands in registers, need more of them than an equal share: the loader's warpgroup gives up most.
constexpr bool SHARES_REGISTERS = ROWS == 32 || FP8 || GATHERS || SMALL_BOXES;
constexpr int LOADER_REGISTERS = 24;
constexpr int GROUP_REGISTERS = 240;
constexpr int FIRST_AHEAD = 1;  // group that prepares the first piece
// One warp issues large copies as fast as 16-bit tiles come, not twice as fast.
constexpr int LOADERS = SMALL_BOXES ? 4 : FP8 ? 2 : 1;
static_assert(ROWS == 16 || ROWS == 32, "columns of the products");
static_assert(THREADS == GROUPS * GROUP_THREADS + (SHARES_REGISTERS ? GROUP_THREADS : 32), "two warpgroups and a loader");

constexpr int PIECE_BYTES = 32;

/// Shared memory, in bytes from its beginning. What describes a piece is there twice, for this one and the next.
constexpr int QUERY_AT = UNITS_BYTES;
constexpr int WEIGHTS_AT = QUERY_AT + (LATENT_UNITS + 1) * QUERY_UNIT_BYTES;
constexpr int EXCHANGE_AT = WEIGHTS_AT + 2 * GROUPS * WEIGHTS_BYTES;  // a value per group, warp and row
constexpr int MAXIMA_AT = EXCHANGE_AT + GROUPS * GROUP_WARPS * ROWS * 4;
constexpr int SCALE_AT = MAXIMA_AT + GROUPS * ROWS * 4;  // of a row's sums: for each group, its own and the other's
constexpr int QUERY_SCALE_AT = SCALE_AT + GROUPS * GROUPS * ROWS * 4;
constexpr int LIMIT_AT = QUERY_SCALE_AT + ROWS * 4;
constexpr int PIECE_AT = LIMIT_AT + 2 * ROWS * 4;
constexpr int ADDRESSES_AT = PIECE_AT + 2 * PIECE_BYTES;
constexpr int LSE_AT = ADDRESSES_AT + 2 * 2 * ROWS * 8;
constexpr int ARRIVED_AT = LSE_AT + GROUPS * ROWS * 4;
constexpr int BARRIERS_AT = ARRIVED_AT + GROUPS * 4;
constexpr int SHARED_BYTES = BARRIERS_AT + UNITS_BARRIERS_BYTES;
static_assert(SHARED_BYTES <= 232448, "a unit's shared memory");
#ifdef SPLIT_SHARED_BYTES
static_assert(SHARED_BYTES == SPLIT_SHARED_BYTES, "select.rs counts the same");
#endif

/// Query row of a lane's `i`-th column.
DEVICE int lane_row(int lane, int i) { return i / 2 * 8 + lane % 4 * 2 + i % 2; }

/// Waits for both warpgroups.
DEVICE void pair_barrier() { named_barrier(1, GROUPS * GROUP_THREADS); }
/// Waits for one of them.
DEVICE void group_barrier(int group) { named_barrier(2 + group, GROUP_THREADS); }
/// One group tells the other that it has seen its tile, and the other waits for it.
DEVICE void tell_seen(int group) { named_barrier_arrive(4 + group, GROUPS * GROUP_THREADS); }
DEVICE void wait_until_seen(int group) { named_barrier(5 - group, GROUPS * GROUP_THREADS); }

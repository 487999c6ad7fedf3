// The tiles of a piece in the form of few tokens, and the warp that copies them, in boxes of 64 columns x 8 to 64 tokens of a page.

namespace few {

/// Whether the kernel has the rows form besides, of which the variant's constants then are.
constexpr bool BESIDE_ROWS = FORM == 9;

constexpr int SLOTS = BESIDE_ROWS ? 2 : STAGES;
constexpr int UNITS = LATENT_UNITS + (ROPE_DIM > 0);
constexpr int PART_UNITS = 3;  // of a tile, that products wait for together
constexpr int PARTS = divide_up(UNITS, PART_UNITS);
constexpr int TILE_BYTES = UNITS * UNIT_BYTES;
constexpr int TILES_BYTES = SLOTS * TILE_BYTES;
constexpr int TILES_BARRIERS_BYTES = SLOTS * (PARTS + 1) * 8;

/// The tiles in shared memory. Parts of a tile have barriers that end a phase when they have come, a slot one that does when its
/// readers are done with it.
struct Tiles {
    uint32 base, barriers;

    DEVICE uint32 tile(int slot) const { return base + slot * TILE_BYTES; }
    DEVICE uint32 full(int slot, int part) const { return barriers + (slot * PARTS + part) * 8; }
    DEVICE uint32 empty(int slot) const { return barriers + (SLOTS * PARTS + slot) * 8; }

    /// By one thread, with how many warps read a tile.
    DEVICE void init(int readers) const {
        for (int i = 0; i < SLOTS * PARTS; i++) barrier_init(full(0, i), 1);
        for (int slot = 0; slot < SLOTS; slot++) barrier_init(empty(slot), readers);
    }

    /// Lets the phases of all slots but the first `filled` end, by one warp.
    DEVICE void skip(int filled) const {
        int other = filled * PARTS + lane_index();
        if (other < SLOTS * PARTS) barrier_arrive(full(0, other));
    }

    /// Waits for the ends of all slots' phases.
    DEVICE void await(int parity) const {
        NO_UNROLL for (int i = 0; i < SLOTS * PARTS; i++) barrier_wait(full(0, i), parity);
    }
};

/// The loader. Its lanes have the boxes of a piece in turn: 32 boxes' pages are looked up at a time.
struct Loader {
    int rows, boxes;             // of a box, of a tile
    const int GLOBAL* page_at;   // where this lane's page is told; null past the piece or the table
    int page, entry;             // what was told, -1 if nothing; row of the page

    DEVICE int page_now() const { return page_at ? load_now(page_at) : -1; }

    /// Looks up the boxes from a token of a piece on.
    DEVICE void turn(const DecodeParams& p, const OwnPiece& piece, int token) {
        rows = smaller(p.page_size & -p.page_size, TILE_TOKENS);
        boxes = TILE_TOKENS >> highest_bit(rows);
        int at = token + lane_index() * rows;
        int column = column_of(p, at);
        entry = at - column * p.page_size;
        const int GLOBAL* table = global_pointer<const int>(p.block_table) + seq_of(p, piece.seq) * p.table_stride;
        page_at = at < piece.end && column < p.table_width ? table + column : nullptr;
        page = page_now();
    }

    /// For each of the tile's boxes and units: `take(unit, column, row, page, first token)`; all lanes must ask. `tile` counts from
    /// where the boxes were looked up.
    template <typename Take>
    DEVICE void each(int tile, Take take) const {
        int shift = highest_bit(boxes);
        NO_UNROLL for (int first = 0; first < UNITS * boxes; first += WAVE) {
            int unit = (first + lane_index()) >> shift;
            int box = (first + lane_index()) & (boxes - 1);
            int its_page = from_lane(page, tile * boxes + box);
            int its_entry = from_lane(entry, tile * boxes + box);
            if (unit < UNITS) take(unit, unit == LATENT_UNITS ? 0 : unit * UNIT_COLUMNS, its_entry, its_page, box * rows);
        }
    }

    /// Asks for the first tiles.
    DEVICE void fetch(int tiles, const TensorMap& latent, const TensorMap& rope) const {
        NO_UNROLL for (int tile = 0; tile < tiles; tile++) {
            each(tile, [&](int unit, int column, int row, int its_page, int) {
                fetch_box(unit == LATENT_UNITS ? rope : latent, column, row, its_page);
            });
        }
    }

    DEVICE void copy(int tile, const TensorMap& latent, const TensorMap& rope, const Tiles& tiles, int slot) const {
        if (lane_index() < PARTS) {
            int units = smaller(UNITS - lane_index() * PART_UNITS, PART_UNITS);
            barrier_expect(tiles.full(slot, lane_index()), units * UNIT_BYTES);
        }
        warp_barrier();
        each(tile, [&](int unit, int column, int row, int its_page, int token) {
            copy_box(tiles.tile(slot) + unit * UNIT_BYTES + token * 128, unit == LATENT_UNITS ? rope : latent, column, row, its_page,
                     tiles.full(slot, unit / PART_UNITS));
        });
    }

    /// Copies the tiles after the first as their slots become free.
    DEVICE void run(const DecodeParams& p, const OwnPiece& piece, const TensorMap& latent, const TensorMap& rope, const Tiles& tiles) {
        int turn_tiles = WAVE / boxes;
        int slot = 0, parity = 0;
        NO_UNROLL for (int tile = SLOTS; piece.begin + tile * TILE_TOKENS < piece.end; tile++) {
            int since = tile & (turn_tiles - 1);
            if (since == 0) turn(p, piece, piece.begin + tile * TILE_TOKENS);
            barrier_wait(tiles.empty(slot), parity);
            copy(since, latent, rope, tiles, slot);
            slot = slot + 1 < SLOTS ? slot + 1 : 0;
            parity ^= slot == 0;
        }
    }
};

}  // namespace few

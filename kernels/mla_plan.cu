// The balanced schedule of a step from the lengths on the device: the algorithm and the table of `plan::balance` in
// src/plan/balance.rs, by one block. Sequences are scanned THREADS at a time with prefix sums; the part boundaries that fall among
// them are found by binary search, in parallel. Few tokens that another form of stage 1 serves are left out: parts are empty.

constexpr int WAVES = THREADS / WAVE;
constexpr int64 SNAP_TILES = 2;  // as in plan/balance.rs
constexpr int64 SLACK = 8;
constexpr int64 PIECE_SLACK = 5, WHOLE_SLACK = 16;
constexpr int64 PIECE_LENGTHS = 5;

/// Floor and ceiling of a quotient; `b` > 0.
DEVICE int64 floor_div(int64 a, int64 b) {
    int64 q = a / b;
    return q - (a % b < 0);
}
DEVICE int64 ceil_div(int64 a, int64 b) { return -floor_div(-a, b); }
DEVICE int64 larger(int64 a, int64 b) { return a > b ? a : b; }

/// Inclusive prefix sum over the block, and the total.
DEVICE int64 block_scan(int64 value, int64 SHARED* wave_total, int64& total) {
    int lane = thread_index() % WAVE;
    int wave = thread_index() / WAVE;
    for (int delta = 1; delta < WAVE; delta *= 2) {
        int64 below = shuffle_up(value, delta);
        if (lane >= delta) value += below;
    }
    barrier();
    if (lane == WAVE - 1) wave_total[wave] = value;
    barrier();
    total = 0;
    for (int w = 0; w < WAVES; w++) {
        if (w < wave) value += wave_total[w];
        total += wave_total[w];
    }
    return value;
}

DEVICE int64 block_maximum(int64 value, int64 SHARED* wave_value) {
    for (int mask = WAVE / 2; mask > 0; mask /= 2) {
        int64 other = shuffle_xor(value, mask);
        value = value > other ? value : other;
    }
    barrier();
    if (thread_index() % WAVE == 0) wave_value[thread_index() / WAVE] = value;
    barrier();
    for (int w = 0; w < WAVES; w++) value = value > wave_value[w] ? value : wave_value[w];
    return value;
}

/// How the total cost is cut: as `Cut` of plan/balance.rs.
struct Cut {
    int64 total, chunk, snap, fixed, piece;

    DEVICE int64 cost(int tiles) const {
        if (tiles == 0) return 0;
        return piece > 0 ? ceil_div(tiles, piece) : tiles + fixed;
    }

    /// First boundary strictly inside a sequence that begins at `begin`, and how many there are.
    DEVICE int64 first_inside(int64 begin) const { return (begin + fixed + snap) / chunk + 1; }
    DEVICE int64 count_inside(int64 begin, int tiles) const {
        int64 high = ceil_div(begin + cost(tiles) - snap, chunk) - 1;
        int64 count = high - first_inside(begin) + 1;
        return count > 0 ? count : 0;
    }

    /// Most pieces that a sequence of so many tiles can have, wherever it begins.
    DEVICE int64 most_pieces(int tiles) const { return ceil_div(cost(tiles), chunk) + (piece == 0); }

    /// The tile of a sequence that lies `at` behind its beginning.
    DEVICE int64 tile(int64 at, int tiles) const { return piece > 0 ? at * tiles / cost(tiles) : at - fixed; }
};

DEVICE int tiles_of(const DecodeParams& p, int virtual_seq) { return divide_up(extent(p, virtual_seq), p.tile_tokens); }

/// Chooses how to cut sequences that may have several pieces, given the sum of their costs and the longest and the shortest.
DEVICE Cut choose(const DecodeParams& p, int64 total, int64 longest, int64 shortest, int64 count, int64 SHARED* wave_value) {
    int64 even = larger(ceil_div(total, p.num_parts), larger(ceil_div(longest, p.num_kv_splits - 1), (int64)1));
    auto longer_by = [&](int64 most) { return even + (even / SLACK < most ? even / SLACK : most); };
    int64 mean = larger(ceil_div(total - count * p.fixed_cost, p.num_parts), ceil_div(longest - p.fixed_cost, p.num_kv_splits));
    NO_UNROLL for (int i = 0; i < PIECE_LENGTHS; i++) {
        Cut pieces = {0, 1, 0, 0, mean + i * ceil_div(mean, 32)};
        if (pieces.piece <= 0 || pieces.piece > longer_by(PIECE_SLACK)) break;
        int64 sum = 0;
        for (int v = thread_index(); v < p.batch * num_groups(p); v += THREADS) sum += pieces.cost(tiles_of(p, v));
        block_scan(sum, wave_value, pieces.total);
        if (pieces.total <= p.num_parts) return pieces;
    }
    int64 whole = ceil_div(even, larger(longest, (int64)1)) * longest;
    int64 chunk = shortest == longest && whole <= longer_by(WHOLE_SLACK) ? whole : even;
    return {total, chunk, chunk / 4 < SNAP_TILES ? chunk / 4 : SNAP_TILES, p.fixed_cost, 0};
}

/// Writes boundary `at` of the parts: the end of one and the beginning of the next.
DEVICE void write_boundary(const DecodeParams& p, int GLOBAL* parts, int64 at, int seq, int tile, int split, bool merges) {
    if (at > 0) {
        parts[(at - 1) * PART_WORDS + 2] = seq;
        parts[(at - 1) * PART_WORDS + 3] = tile;
    }
    if (at < p.num_parts) {
        int GLOBAL* part = parts + at * PART_WORDS;
        part[0] = seq;
        part[1] = tile;
        part[4] = split;
        part[ARRIVAL_WORD] = part[ARRIVAL_WORD + 1] = 0;
        part[MERGES_WORD] = merges;
    }
}

/// Writes the words of a part that follow from others, once those and the slots are there.
DEVICE void derive(const DecodeParams& p, const int GLOBAL* slot_begin, int virtual_seqs, int GLOBAL* parts, int at, bool merges) {
    int GLOBAL* part = parts + (int64)at * PART_WORDS;
    int first = part[0], split = part[4];
    auto slots = [&](int seq) { return seq < virtual_seqs ? slot_begin[seq + 1] - slot_begin[seq] : 0; };
    auto begin = [&](int seq) { return seq < virtual_seqs ? slot_begin[seq] : 0; };
    bool any = !merges && (split > 0 || part[3] != 0);
    int merged = split > 0 ? first : part[2];
    int less = any && split > 0 && parts[(int64)(at - split) * PART_WORDS + 4] > 0;
    part[FIRST_WORD] = begin(first);
    part[FIRST_WORD + 1] = slots(first);
    part[SHARE_WORD] = any ? split - less : 0;
    part[SHARE_WORD + 1] = any ? slots(merged) - less : 0;
    part[MERGED_WORD] = any ? merged : 0;
    part[MERGED_WORD + 1] = any ? begin(merged) : 0;
    part[MERGED_WORD + 2] = any ? slots(merged) : 0;
    part[LENGTH_WORD] = first < virtual_seqs ? sequence_length(p, seq_of(p, first)) : 0;
}

KERNEL(THREADS) mla_plan(const DecodeParams p) {
    SHARED_ARRAY(int64, wave_value, WAVES);
    SHARED_ARRAY(int64, begins, THREADS);
    SHARED_ARRAY(int, tiles, THREADS);
    grid_dependency_wait();
    grid_dependency_launch();

    int thread = thread_index();
    int virtual_seqs = p.batch * num_groups(p);
    int GLOBAL* slot_begin = global_pointer<int>(p.schedule);
    int64 parts_offset = (virtual_seqs + PART_WORDS) / PART_WORDS * PART_WORDS;
    int scheduled = p.schedule_kind == EITHER && are_few(p, few_tokens_now(p)) ? 0 : virtual_seqs;
    int GLOBAL* parts = slot_begin + parts_offset;

    Cut cut = {0, 1, 0, p.fixed_cost, 0};
    int64 sum = 0, count = 0;
    int64 longest = 0;
    int64 longest_negated = -0x7fffffff;  // the shortest, so that one maximum serves both
    for (int v = thread; v < scheduled; v += THREADS) {
        int64 cost = cut.cost(tiles_of(p, v));
        sum += cost;
        count += cost > 0;
        longest = larger(longest, cost);
        if (cost > 0) longest_negated = larger(longest_negated, -cost);
    }
    block_scan(sum, wave_value, cut.total);
    block_scan(count, wave_value, count);
    longest = block_maximum(longest, wave_value);
    int64 shortest = -block_maximum(longest_negated, wave_value);
    if (p.num_kv_splits > 1) {
        cut = choose(p, cut.total, longest, shortest, count, wave_value);
    } else {
        // Every boundary moves to the start of its sequence.
        constexpr int64 EVERYTHING = 0x1fffffffffffffff;
        cut.chunk = larger(ceil_div(cut.total, p.num_parts), (int64)1);
        cut.snap = EVERYTHING;
    }

    bool merges = cut.most_pieces((int)larger(longest - p.fixed_cost, (int64)0)) <= p.merged_pieces;
    int64 begin = 0;
    int64 slots = 0;
    for (int first = 0; first < scheduled; first += THREADS) {
        int v = first + thread;
        int own = v < virtual_seqs ? tiles_of(p, v) : 0;
        int64 cost_here;
        int64 own_begin = begin + block_scan(cut.cost(own), wave_value, cost_here) - cut.cost(own);
        int64 pieces = own > 0 ? cut.count_inside(own_begin, own) + 1 : 0;
        int64 slots_here;
        int64 slots_end = slots + block_scan(pieces >= 2 ? pieces : 0, wave_value, slots_here);
        if (v < virtual_seqs) slot_begin[v + 1] = (int)slots_end;
        begins[thread] = own_begin;
        tiles[thread] = own;
        barrier();

        // Boundaries within these sequences: p * chunk in [begin, begin + cost_here).
        int here = smaller(virtual_seqs - first, THREADS);
        for (int64 at = ceil_div(begin, cut.chunk) + thread; at * cut.chunk < begin + cost_here && at <= p.num_parts;
             at += THREADS) {
            int64 position = at * cut.chunk;
            int low = 0;  // the last sequence that begins at or before the position; an empty one begins where the next does
            for (int high = here; high - low > 1;) {
                int middle = (low + high) / 2;
                if (begins[middle] <= position) {
                    low = middle;
                } else {
                    high = middle;
                }
            }
            int64 tile = cut.tile(position - begins[low], tiles[low]);
            if (tile <= cut.snap) {
                write_boundary(p, parts, at, first + low, 0, 0, merges);
            } else if (tile >= tiles[low] - cut.snap) {
                write_boundary(p, parts, at, first + low + 1, 0, 0, merges);
            } else {
                write_boundary(p, parts, at, first + low, (int)tile, (int)(at - cut.first_inside(begins[low]) + 1), merges);
            }
        }
        barrier();
        begin += cost_here;
        slots += slots_here;
    }
    // The other boundaries lie at the end of everything.
    for (int64 at = ceil_div(cut.total, cut.chunk) + thread; at <= p.num_parts; at += THREADS) {
        write_boundary(p, parts, at, virtual_seqs, 0, 0, merges);
    }
    if (thread == 0) slot_begin[0] = 0;
    for (int64 i = scheduled + 1 + thread; i < parts_offset; i += THREADS) slot_begin[i] = 0;
    barrier();
    for (int at = thread; at < p.num_parts; at += THREADS) derive(p, slot_begin, virtual_seqs, parts, at, merges);
}

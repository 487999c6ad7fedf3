//! The balanced schedule: how virtual sequences are cut into parts of equal cost. The plan kernel is its device twin.

/// A boundary of a balanced schedule this close to a sequence's start or end, in tiles, moves onto it (`c1`).
pub const SNAP_TILES: i64 = 2;

/// A balanced schedule makes a part longer by one of so many of it, at most, to begin sequences at boundaries.
const SLACK: i64 = 8;

/// And by so many tiles at most for pieces that have parts of their own, and for whole sequences: in long parts more is lost by parts that
/// are left over than further pieces cost (B16 S131072 H16 547 µs instead of 554, B16 S65536 H128 412 instead of 418, H200).
const MOST_SLACK: [i64; 2] = [5, 16];

/// Lengths of a piece that are tried, a thirty-second apart.
const PIECE_LENGTHS: i64 = 5;

/// Words of one part in the schedule table.
pub const PART_WORDS: usize = 16;

/// Word of a part that has the tokens of its first sequence, as far as the block table reaches, or 0 if there is none. [`balance`], which
/// knows of tiles only, leaves it to whoever knows lengths.
pub const LENGTH_WORD: usize = 15;

/// Word of the schedule table at which the parts begin: the slot offsets of `virtual_seqs` sequences come before.
pub const fn parts_offset(virtual_seqs: usize) -> usize {
    (virtual_seqs + 1).next_multiple_of(PART_WORDS)
}

/// Inputs of [`balance`]. All device copies of the algorithm take the same.
#[derive(Debug, Clone, Copy)]
pub struct BalanceShape {
    /// Parts to cut into.
    pub num_parts: usize,
    /// Most splits of one virtual sequence.
    pub num_kv_splits: usize,
    /// Cost of starting a sequence, in tiles.
    pub fixed_cost: i64,
    /// Most pieces of a sequence that stage 1 merges itself.
    pub merged_pieces: i64,
}

/// Cuts virtual sequences of `tiles[v]` tiles into parts of equal cost, and writes the schedule table.
///
/// Table, in 32-bit words: `slot_begin[0..=V]`, the prefix sum of slots (a sequence in one piece has none and is written
/// directly, one in `n >= 2` pieces has `n`); padding up to [`parts_offset`]; then per part [`PART_WORDS`] words
/// `{first_seq, first_tile, end_seq, end_tile, first_split, 0, 0, merges, first_begin, first_slots, share, shares, merged_seq, merged_begin,
/// merged_slots, first_length}`. A part covers everything from `first_tile` of `first_seq` up to, not including, `end_tile` of `end_seq`;
/// it is empty when both ends are equal. `first_split` is the split index of its piece of `first_seq`; later sequences begin in it with
/// split 0. The slot of split `s` of `v` is `slot_begin[v] + s`. `merges` is 1 where no sequence can have more than `merged_pieces` pieces:
/// stage 1 then merges them, counting them in the words before, else stage 2.
///
/// The other words follow from these and are there since a load that waits for another takes as long again. `first_slots` slots of
/// `first_seq` begin at `first_begin`. Of `shares` equal shares of the rows of `merged_seq`, whose `merged_slots` slots begin at
/// `merged_begin`, stage 2 merges the one of number `share` for this part; `shares` and what comes after are 0 where there is nothing to
/// merge. A part within a sequence merges that one, another the one that ends within it, so a sequence has as many shares as it has
/// pieces, or one less where its first piece lies in a part that merges another. `first_length` stays 0 here: see [`LENGTH_WORD`].
///
/// Where pieces of at most `piece` tiles, each in a part of its own, are no longer than the parts would be otherwise, or longer
/// by an eighth or five tiles at most, whichever is less, every sequence is cut into as few equal pieces as that takes: a piece
/// less to write, read and merge for most sequences is worth a little imbalance. `piece` is the first that fits of those from the
/// mean upwards.
///
/// Else parts are stretches of equal cost of all sequences. The cost of a sequence is its tiles plus `fixed_cost`, or 0 if it is
/// empty. Boundaries lie at multiples of `chunk = max(ceil(total / parts), max over v of ceil(cost / (num_kv_splits - 1)))`,
/// which keeps every sequence within `num_kv_splits` pieces; one within `min(SNAP_TILES, chunk / 4)` tiles of a sequence's start
/// or end moves onto it. If all sequences are equal, a chunk longer by an eighth or sixteen tiles at most, whichever is less, is
/// taken that is a multiple of their cost.
///
/// # Panics
/// If `table` is shorter than the layout above.
pub fn balance(shape: &BalanceShape, tiles: &[i32], table: &mut [i32]) {
    let cut = Cut::new(shape, tiles);
    let (offsets, parts) = table.split_at_mut(parts_offset(tiles.len()));
    offsets.fill(0);
    let mut begin = 0;
    for (v, &t) in tiles.iter().enumerate() {
        let pieces = if t > 0 { cut.inside(begin, t).1 as i32 + 1 } else { 0 };
        offsets[v + 1] = offsets[v] + if pieces >= 2 { pieces } else { 0 };
        begin += cut.cost(t);
    }
    let total = begin;
    let merges = i32::from(cut.most_pieces(tiles.iter().copied().max().unwrap_or(0)) <= shape.merged_pieces);

    // Boundary `p`: the sequence it falls into, the tile, and the split that begins there.
    let boundary = |p: usize, mut v: usize, mut begin: i64| -> (usize, i64, [i32; 3]) {
        let at = (p as i64 * cut.chunk).min(total);
        while v < tiles.len() && begin + cut.cost(tiles[v]) <= at {
            begin += cut.cost(tiles[v]);
            v += 1;
        }
        if v == tiles.len() {
            return (v, begin, [v as i32, 0, 0]);
        }
        let tile = cut.tile(at - begin, tiles[v]);
        let word = if tile <= cut.snap {
            [v as i32, 0, 0]
        } else if tile >= i64::from(tiles[v]) - cut.snap {
            [v as i32 + 1, 0, 0]
        } else {
            let (low, _) = cut.inside(begin, tiles[v]);
            [v as i32, tile as i32, (p as i64 - low + 1) as i32]
        };
        (v, begin, word)
    };
    let (mut v, mut begin, mut first) = boundary(0, 0, 0);
    for p in 0..shape.num_parts {
        let (next_v, next_begin, end) = boundary(p + 1, v, begin);
        parts[p * PART_WORDS..(p + 1) * PART_WORDS]
            .copy_from_slice(&[first[0], first[1], end[0], end[1], first[2], 0, 0, merges, 0, 0, 0, 0, 0, 0, 0, 0]);
        (v, begin, first) = (next_v, next_begin, end);
    }
    for p in 0..shape.num_parts {
        let derived = derived_words(&offsets[..=tiles.len()], parts, p);
        parts[p * PART_WORDS + 8..][..derived.len()].copy_from_slice(&derived);
    }
}

/// Words of part `p` from the ninth on, which follow from slot offsets and the words before.
fn derived_words(offsets: &[i32], parts: &[i32], p: usize) -> [i32; 8] {
    let part = &parts[p * PART_WORDS..];
    let (split, merges) = (part[4], part[7] != 0);
    let slots = |seq: i32| match offsets.get(seq as usize + 1) {
        Some(end) => [offsets[seq as usize], end - offsets[seq as usize]],
        None => [0, 0],
    };
    let [first_begin, first_slots] = slots(part[0]);
    if merges || (split == 0 && part[3] == 0) {
        return [first_begin, first_slots, 0, 0, 0, 0, 0, 0];
    }
    let merged = if split > 0 { part[0] } else { part[2] };
    let [begin, count] = slots(merged);
    let less = i32::from(split > 0 && parts[(p - split as usize) * PART_WORDS + 4] > 0);
    [first_begin, first_slots, split - less, count - less, merged, begin, count, 0]
}

/// How a balanced schedule cuts: sequences lie one after the other by their costs, with boundaries at multiples of `chunk`.
struct Cut {
    chunk: i64,
    snap: i64,
    fixed: i64,
    /// Most tiles of a piece where each has a part of its own, and a sequence costs as many as it has pieces; else 0.
    piece: i64,
}

impl Cut {
    fn new(shape: &BalanceShape, tiles: &[i32]) -> Self {
        let stretches = Self { chunk: 1, snap: 0, fixed: shape.fixed_cost, piece: 0 };
        let (num_parts, splits) = (shape.num_parts.max(1) as i64, shape.num_kv_splits as i64);
        let costs = || tiles.iter().map(|&t| stretches.cost(t)).filter(|&cost| cost > 0);
        let longest = costs().max().unwrap_or(0);
        let even = costs().sum::<i64>().div_ceil_(num_parts).max(1);
        if splits <= 1 {
            // Every boundary moves to the start of its sequence.
            return Self { chunk: even, snap: i64::MAX / 4, ..stretches };
        }
        let even = even.max(longest.div_ceil_(splits - 1));
        let [most_of_piece, most_of_whole] = MOST_SLACK.map(|most| even + most.min(even / SLACK));
        let mean = (costs().map(|cost| cost - shape.fixed_cost).sum::<i64>().div_ceil_(num_parts))
            .max((longest - shape.fixed_cost).div_ceil_(splits));
        let lengths = (0..PIECE_LENGTHS)
            .map(|i| mean + i * mean.div_ceil_(32))
            .filter(|&piece| 0 < piece && piece <= most_of_piece);
        for piece in lengths {
            let pieces = Self { chunk: 1, snap: 0, fixed: 0, piece };
            if tiles.iter().map(|&t| pieces.cost(t)).sum::<i64>() <= num_parts {
                return pieces;
            }
        }
        let whole = even.div_ceil_(longest.max(1)) * longest;
        let equal = costs().all(|cost| cost == longest) && (1..=most_of_whole).contains(&whole);
        let chunk = if equal { whole } else { even };
        Self { chunk, snap: SNAP_TILES.min(chunk / 4), ..stretches }
    }

    fn cost(&self, tiles: i32) -> i64 {
        match i64::from(tiles) {
            0 => 0,
            tiles if self.piece > 0 => tiles.div_ceil_(self.piece),
            tiles => tiles + self.fixed,
        }
    }

    /// Most pieces that a sequence of so many tiles can have, wherever it begins.
    fn most_pieces(&self, tiles: i32) -> i64 {
        self.cost(tiles).div_ceil_(self.chunk) + i64::from(self.piece == 0)
    }

    /// First boundary that lies strictly inside a sequence beginning at `begin`, and how many there are.
    fn inside(&self, begin: i64, tiles: i32) -> (i64, i64) {
        let low = (begin + self.fixed + self.snap) / self.chunk + 1;
        let high = (begin + self.cost(tiles) - self.snap).div_ceil_(self.chunk) - 1;
        (low, (high - low + 1).max(0))
    }

    /// The tile of a sequence that lies `at` behind its beginning.
    fn tile(&self, at: i64, tiles: i32) -> i64 {
        if self.piece > 0 { at * i64::from(tiles) / self.cost(tiles) } else { at - self.fixed }
    }
}

trait DivCeil {
    fn div_ceil_(self, by: Self) -> Self;
}

impl DivCeil for i64 {
    // Both operands are non-negative here, or the result is only compared.
    fn div_ceil_(self, by: Self) -> Self {
        self.div_euclid(by) + i64::from(self.rem_euclid(by) != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every tile of every sequence lies in exactly one part, and slots and splits agree with the pieces.
    fn check(shape: &BalanceShape, tiles: &[i32]) {
        let mut table = vec![-1; parts_offset(tiles.len()) + shape.num_parts * PART_WORDS];
        balance(shape, tiles, &mut table);
        let (offsets, parts) = table.split_at(parts_offset(tiles.len()));
        let mut next_tile = vec![0; tiles.len()];
        let mut pieces = vec![0; tiles.len()];
        for part in parts.chunks(PART_WORDS) {
            let (mut v, mut tile) = (part[0] as usize, part[1]);
            let mut split = part[4];
            while (v as i32) < part[2] || (v as i32 == part[2] && tile < part[3]) {
                let end = if v as i32 == part[2] { part[3] } else { tiles[v] };
                if end > tile {
                    assert_eq!(next_tile[v], tile, "{shape:?} {tiles:?}");
                    assert_eq!(pieces[v], split, "{shape:?} {tiles:?}");
                    next_tile[v] = end;
                    pieces[v] += 1;
                }
                (v, tile, split) = (v + 1, 0, 0);
            }
        }
        assert_eq!(next_tile, tiles, "{shape:?}");
        let mut slots = 0;
        for (v, &n) in pieces.iter().enumerate() {
            assert!(n <= shape.num_kv_splits.max(1) as i32, "{shape:?} {tiles:?} has {n} pieces");
            assert_eq!(offsets[v], slots);
            slots += if n >= 2 { n } else { 0 };
        }
        assert_eq!(offsets[tiles.len()], slots);
        let most = pieces.iter().copied().max().unwrap_or(0);
        for part in parts.chunks(PART_WORDS) {
            assert!(part[7] == 0 || i64::from(most) <= shape.merged_pieces, "{shape:?} {tiles:?} has {most} pieces");
        }
        assert!(slots as usize <= 2 * (shape.num_parts - 1));

        // Stage 2 merges every share of what has several pieces once, and nothing else; parts know the slots of where they begin.
        let merges = parts[7] != 0;
        let mut shares = vec![Vec::new(); tiles.len()];
        for part in parts.chunks(PART_WORDS) {
            let slots_of = |v: usize| if v < tiles.len() { [offsets[v], offsets[v + 1] - offsets[v]] } else { [0, 0] };
            assert_eq!(part[8..10], slots_of(part[0] as usize), "{shape:?} {tiles:?}");
            if part[11] > 0 {
                let merged = part[12] as usize;
                assert_eq!(part[13..15], slots_of(merged), "{shape:?} {tiles:?}");
                shares[merged].push((part[10], part[11]));
            }
        }
        for (v, mut shares) in shares.into_iter().enumerate() {
            shares.sort_unstable();
            let count = shares.len() as i32;
            assert_eq!(count > 0, pieces[v] >= 2 && !merges, "{shape:?} {tiles:?}: sequence {v}");
            assert!(
                shares.iter().copied().eq((0..count).map(|share| (share, count))),
                "{shape:?} {tiles:?}: {shares:?}"
            );
        }
    }

    #[test]
    fn a_balanced_schedule_covers_every_tile_once() {
        let mut state = 7_u64;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        // Miri takes a tenth of a second for each.
        for _ in 0..if cfg!(miri) { 50 } else { 3000 } {
            let batch = random(40) as usize;
            let longest = 1 + random(300);
            let tiles: Vec<i32> = (0..batch).map(|_| random(longest + 1) as i32).collect();
            let shape = BalanceShape {
                num_parts: 1 + random(140) as usize,
                num_kv_splits: 1 + random(140) as usize,
                fixed_cost: 1 + random(5) as i64,
                merged_pieces: random(6) as i64,
            };
            check(&shape, &tiles);
        }
        check(&BalanceShape { num_parts: 132, num_kv_splits: 256, fixed_cost: 1, merged_pieces: 4 }, &[64]);
        check(&BalanceShape { num_parts: 132, num_kv_splits: 256, fixed_cost: 1, merged_pieces: 4 }, &[0, 0]);
    }

    /// Slots of all sequences, and tiles of the longest part.
    fn cut(num_parts: usize, tiles: &[i32]) -> (i32, i32) {
        let shape = BalanceShape { num_parts, num_kv_splits: 256, fixed_cost: 1, merged_pieces: 4 };
        check(&shape, tiles);
        let mut table = vec![0; parts_offset(tiles.len()) + num_parts * PART_WORDS];
        balance(&shape, tiles, &mut table);
        let (offsets, parts) = table.split_at(parts_offset(tiles.len()));
        let before = |v: i32, tile: i32| tiles[..v as usize].iter().sum::<i32>() + tile;
        let longest = parts.chunks(PART_WORDS).map(|part| before(part[2], part[3]) - before(part[0], part[1])).max();
        (offsets[tiles.len()], longest.unwrap_or(0))
    }

    #[test]
    fn sequences_stay_whole_where_that_costs_little() {
        assert_eq!(cut(132, &[64; 128]), (0, 64), "a sequence per part");
        assert_eq!(cut(132, &[64; 64]), (128, 32), "two pieces of each, none across two parts");
        assert_eq!(cut(66, &[64; 128]), (0, 128), "two sequences per part");
        assert_eq!(cut(66, &[64; 16]), (64, 16), "four equal pieces of each");
        assert_eq!(cut(66, &[64; 4]), (64, 4), "sixteen equal pieces of each");
        let longest = cut(132, &[1024; 64]).1;
        assert!(longest < 502, "halves of 512 would leave four parts of 497 idle: {longest}");
        let longest = cut(66, &[1024; 64]).1;
        assert!(longest < 1000, "so would whole sequences: {longest}");
        let (slots, longest) = cut(132, &[64; 100]);
        assert!(slots > 0 && longest <= 52, "a third more than the mean is too much: {slots} {longest}");
        let (_, longest) = cut(132, &[2048, 64, 64, 64, 64, 64, 64, 64]);
        assert!(longest <= 24, "{longest}");
    }

    #[test]
    fn equal_long_sequences_are_balanced_within_a_tile_of_the_mean() {
        let tiles = [64; 128];
        let shape = BalanceShape { num_parts: 132, num_kv_splits: 256, fixed_cost: 1, merged_pieces: 4 };
        let mut table = vec![0; parts_offset(128) + 132 * PART_WORDS];
        balance(&shape, &tiles, &mut table);
        for part in table[parts_offset(128)..].chunks(PART_WORDS) {
            let work = (part[2] - part[0]) * 64 + part[3] - part[1];
            assert!(work <= 64 + 2 * SNAP_TILES as i32, "{part:?}");
        }
    }

    #[test]
    fn stage_1_merges_where_no_sequence_can_have_too_many_pieces() {
        let merges = |merged_pieces, tiles: &[i32]| {
            let shape = BalanceShape { num_parts: 132, num_kv_splits: 256, fixed_cost: 1, merged_pieces };
            let mut table = vec![0; parts_offset(tiles.len()) + 132 * PART_WORDS];
            balance(&shape, tiles, &mut table);
            let parts = &table[parts_offset(tiles.len())..];
            let words: Vec<i32> = parts.chunks(PART_WORDS).map(|part| part[7]).collect();
            assert!(words.iter().all(|&word| word == words[0]), "{words:?}");
            words[0] == 1
        };
        assert!(merges(2, &[64; 64]) && merges(4, &[64; 32]) && merges(1, &[64; 132]), "2, 4 and 1 pieces each");
        assert!(!merges(1, &[64; 64]) && !merges(3, &[64; 32]) && !merges(4, &[64; 16]));
        let mut skewed = [64; 64];
        skewed[7] = 2048;
        assert!(!merges(4, &skewed), "one of many pieces among many of few");
        assert!(!merges(0, &[64; 132]), "of a form that merges none");
    }
}

//! How the work of a decode step is cut: the split-count heuristic, the plan of a step and the balanced schedule.
//!
//! A [`DecodePlan`] is made on the host from host facts alone (batch, longest length, device), so a captured graph cannot
//! freeze anything that depends on the lengths. It sizes the scratch and the grids. Which split covers which tokens is
//! decided on the device from `seq_lens`: by the [`balance`]d schedule that the plan kernel writes once per step, or by the
//! formulas of [`ScheduleKind::Own`], [`ScheduleKind::Even`] and [`ScheduleKind::Chunked`]. Under [`ScheduleKind::Either`] the
//! lengths also decide which of two kernels does the work.

use crate::backend::{DecodeKernels, DeviceInfo, FewKernel};
use crate::error::{Error, Result};
use crate::kernel::Variant;
use crate::kernel::params::ScheduleKind;

/// Cached tokens per split below which the heuristic does not split further.
pub const MIN_TOKENS_PER_SPLIT: usize = 512;

/// Most splits that any policy makes of one sequence.
pub const MAX_KV_SPLITS: usize = 4096;

/// Cost of starting a sequence in a balanced schedule, in tiles (`c0`), of kernels that were not measured for it.
pub const FIXED_COST: i32 = 1;

/// A boundary of a balanced schedule this close to a sequence's start or end, in tiles, moves onto it (`c1`).
pub const SNAP_TILES: i64 = 2;

/// Virtual sequences that count as few: [`SplitPolicy::Auto`] may cut them more finely than [`num_kv_splits`] says.
const FEW_SEQS: usize = 8;

/// A balanced schedule makes a part longer by one of so many of it, at most, to begin sequences at boundaries.
const SLACK: i64 = 8;

/// Lengths of a piece that are tried, a thirty-second apart.
const PIECE_LENGTHS: i64 = 5;

/// Fewest columns that a block of stage 2 merges.
const REDUCE_COLUMNS: usize = 64;

/// Columns times splits that the threads of a block of stage 2 load in one round.
const REDUCE_ROUND: usize = 8192;

/// Words of one part in the schedule table.
pub const PART_WORDS: usize = 8;

/// The split-count heuristic shared by all backends: `min(next_pow2(max(1, max_seq_len / 512)), 2 * num_compute_units)`.
///
/// Source: vLLM's Triton MLA backend, `_compute_num_kv_splits` (0.25.1 to 0.33.0). The cap need not be a power of two.
///
/// ```
/// assert_eq!(latentwave::plan::num_kv_splits(131_072, 132), 256);
/// assert_eq!(latentwave::plan::num_kv_splits(1 << 20, 132), 264);
/// assert_eq!(latentwave::plan::num_kv_splits(0, 132), 1);
/// ```
pub fn num_kv_splits(max_seq_len: usize, num_compute_units: usize) -> usize {
    splits_of_at_least(MIN_TOKENS_PER_SPLIT, max_seq_len, num_compute_units)
}

fn splits_of_at_least(tokens: usize, max_seq_len: usize, num_compute_units: usize) -> usize {
    let by_length = (max_seq_len / tokens.max(1)).max(1).checked_next_power_of_two().unwrap_or(usize::MAX);
    by_length.min(num_compute_units.saturating_mul(2)).max(1)
}

/// Shape of the float32 scratch that vLLM's layout takes: `[num_rows, num_heads, num_kv_splits, kv_lora_rank + 1]`, the last
/// column being the LSE. Ours holds the same number of elements when the policy is [`SplitPolicy::Fixed`]; on a GPU those of
/// the outputs have 16 bits.
pub fn scratch_shape(num_rows: usize, num_heads: usize, num_kv_splits: usize, kv_lora_rank: usize) -> [usize; 4] {
    [num_rows, num_heads, num_kv_splits, kv_lora_rank.saturating_add(1)]
}

/// What bounds the scratch of every step of an engine in vLLM's layout: the reservation that its Triton MLA backend makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScratchReservation {
    /// Most sequences in a batch.
    pub max_num_seqs: usize,
    /// Most query tokens per sequence that count as decode.
    pub decode_threshold: usize,
    /// Query heads of one rank.
    pub num_heads: usize,
    /// Ranks of decode context parallelism: the queries of all their heads are gathered.
    pub dcp_size: usize,
    /// Longest sequence, in tokens.
    pub max_seq_len: usize,
    /// Compute units of the device.
    pub num_compute_units: usize,
    /// Width of the latent part.
    pub kv_lora_rank: usize,
}

impl ScratchReservation {
    /// Shape of the float32 scratch, as [`scratch_shape`].
    ///
    /// Source: vLLM, `_reserve_attn_logits_workspace`.
    pub fn shape(&self) -> [usize; 4] {
        scratch_shape(
            self.max_num_seqs.saturating_mul(self.decode_threshold),
            self.num_heads.saturating_mul(self.dcp_size),
            num_kv_splits(self.max_seq_len, self.num_compute_units),
            self.kv_lora_rank,
        )
    }

    /// Bytes of that scratch.
    ///
    /// # Errors
    /// [`Error::Argument`] if they overflow.
    pub fn bytes(&self) -> Result<usize> {
        let shape = self.shape();
        let bytes = shape.iter().try_fold(size_of::<f32>(), |bytes, &extent| bytes.checked_mul(extent));
        bytes.ok_or_else(|| Error::argument("shape", format!("the scratch {shape:?} overflows")))
    }
}

/// How many splits a sequence may have, and where they lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum SplitPolicy {
    /// Spread over the device by the lengths of each step. At most [`num_kv_splits`] splits of a sequence, unless there are so few
    /// sequences that this leaves most of the device idle: the bound was made for scratch that grows with the batch, and says 8 for
    /// a single sequence of 4,096 tokens. Then as many as the device has blocks to give.
    #[default]
    Auto,
    /// Balanced likewise, but with splits down to this many tokens: more splits for short sequences.
    MinTokens(usize),
    /// Exactly this many equal splits of every sequence, empty ones included: vLLM's scratch and partition.
    Fixed(usize),
    /// Splits of exactly this many tokens: a row's result is bit-equal alone, in any batch, and as a verify row.
    Invariant(usize),
}

/// What is planned for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanShape {
    /// Sequences.
    pub batch: usize,
    /// Query tokens per sequence.
    pub query_len: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Width of the latent part.
    pub kv_lora_rank: usize,
    /// Longest sequence that may come, in tokens.
    pub max_seq_len: usize,
}

/// The plan of a decode step: everything that host facts decide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct DecodePlan {
    /// What it was made for.
    pub shape: PlanShape,
    /// Where splits lie.
    pub schedule: ScheduleKind,
    /// Most splits of one sequence.
    pub num_kv_splits: usize,
    /// Tokens per split of a chunked schedule, else 0.
    pub split_tokens: usize,
    /// Parts of a balanced schedule, else 0.
    pub num_parts: usize,
    /// Most pieces that sequences are cut into where blocks find them by themselves, else 0.
    pub few_parts: usize,
    /// Partial results that the scratch holds.
    pub num_slots: usize,
    /// Most pieces of a sequence that stage 1 merges itself.
    pub merged_pieces: i32,
    /// Blocks of stage 2: as many of each part of a balanced schedule, or else of each sequence.
    pub reduce_blocks: usize,
    /// Those of them that work on such pieces.
    pub few_blocks: usize,
    /// Query tokens per group.
    pub query_group: usize,
    /// Groups per sequence.
    pub num_groups: usize,
    /// Bytes of the schedule table, 0 where no step is balanced.
    pub schedule_bytes: usize,
    /// Bytes of the partial outputs, of [`DecodeKernels::partial_dtype`].
    pub partial_out_bytes: usize,
    /// Bytes of the partial LSE.
    pub partial_lse_bytes: usize,
}

/// Columns of a row with so many splits for a block of stage 2 to have enough to do.
fn reduce_columns(splits: usize) -> usize {
    (REDUCE_ROUND / splits.max(1)).next_power_of_two().max(REDUCE_COLUMNS)
}

impl DecodePlan {
    /// Plans a step for the kernels chosen for it.
    ///
    /// # Errors
    /// [`Error::Argument`] for a policy of zero or of more than [`MAX_KV_SPLITS`] splits, or sizes that overflow.
    pub fn new(shape: PlanShape, policy: SplitPolicy, kernels: &DecodeKernels, device: &DeviceInfo) -> Result<Self> {
        let units = device.num_compute_units.max(1);
        let query_group = kernels.query_group.clamp(1, shape.query_len.max(1));
        let row_blocks_of =
            |split: &Variant| (query_group * shape.num_heads).div_ceil(split.block_rows.max(1) as usize).max(1);
        let row_blocks = row_blocks_of(&kernels.split);
        let blocks = units * kernels.blocks_per_unit.max(1);
        let few = match policy {
            SplitPolicy::Auto if kernels.own_pieces => Some((kernels.split, kernels.reduce_blocks)),
            SplitPolicy::Auto => kernels.few.map(|FewKernel { split, reduce_blocks, .. }| (split, reduce_blocks)),
            _ => None,
        };
        let few_parts = few.map_or(0, |(split, _)| (blocks / row_blocks_of(&split)).max(1));
        let (schedule, num_kv_splits, split_tokens) = match policy {
            SplitPolicy::Auto if kernels.own_pieces => (ScheduleKind::Own, few_parts, 0),
            SplitPolicy::Auto => {
                let schedule = if few.is_some() { ScheduleKind::Either } else { ScheduleKind::Balanced };
                let virtual_seqs = shape.batch.saturating_mul(shape.query_len.div_ceil(query_group));
                let least =
                    if virtual_seqs <= FEW_SEQS { blocks.div_ceil(row_blocks * virtual_seqs.max(1)) } else { 1 };
                (schedule, num_kv_splits(shape.max_seq_len, units).max(least), 0)
            }
            SplitPolicy::MinTokens(0) => return Err(Error::argument("policy", "MinTokens(0): at least 1 token")),
            SplitPolicy::MinTokens(tokens) => {
                (ScheduleKind::Balanced, splits_of_at_least(tokens, shape.max_seq_len, units), 0)
            }
            SplitPolicy::Fixed(splits) => (ScheduleKind::Even, splits, 0),
            SplitPolicy::Invariant(0) => return Err(Error::argument("policy", "Invariant(0): at least 1 token")),
            SplitPolicy::Invariant(tokens) => {
                (ScheduleKind::Chunked, shape.max_seq_len.div_ceil(tokens).max(1), tokens)
            }
        };
        if num_kv_splits == 0 || num_kv_splits > MAX_KV_SPLITS {
            return Err(Error::argument(
                "policy",
                format!("{policy:?} makes {num_kv_splits} splits; 1 to {MAX_KV_SPLITS} are possible"),
            ));
        }

        // The largest product that follows: where it fits, all do.
        let most = [shape.batch, shape.query_len.saturating_add(query_group), shape.num_heads, shape.kv_lora_rank]
            .iter()
            .try_fold(8 * num_kv_splits.max(few_parts), |most, &count| most.checked_mul(count.max(1)));
        if most.is_none_or(|most| isize::try_from(most).is_err()) {
            return Err(Error::argument(
                "shape",
                format!("the scratch of {shape:?} in {num_kv_splits} splits overflows"),
            ));
        }
        let num_groups = shape.query_len.div_ceil(query_group);
        let group_rows = query_group * shape.num_heads;
        let virtual_seqs = shape.batch * num_groups;

        let (num_parts, num_slots) = match schedule {
            ScheduleKind::Own => (0, few_parts),
            ScheduleKind::Balanced | ScheduleKind::Either => {
                let parts = blocks.div_ceil(row_blocks).max(1);
                // A part boundary inside a sequence makes one more split of it; a sequence in one piece needs no slot.
                (parts, (virtual_seqs * num_kv_splits).min(2 * (parts - 1)).max(few_parts))
            }
            _ if num_kv_splits == 1 => (0, 0),
            _ => (0, virtual_seqs * num_kv_splits),
        };

        let reduce_blocks_of = |items: usize, columns, blocks: usize| {
            let shares = group_rows * shape.kv_lora_rank.div_ceil(columns);
            items * (blocks / items.max(1)).clamp(1, shares.max(1))
        };
        let few_columns = reduce_columns(few_parts.div_ceil(virtual_seqs.max(1)));
        let few_blocks = few.map_or(0, |(_, blocks)| reduce_blocks_of(virtual_seqs, few_columns, blocks));
        let reduce_blocks = match schedule {
            ScheduleKind::Own => few_blocks,
            ScheduleKind::Balanced | ScheduleKind::Either => {
                reduce_blocks_of(num_parts, REDUCE_COLUMNS, kernels.reduce_blocks).max(few_blocks)
            }
            ScheduleKind::Even | ScheduleKind::Chunked => {
                reduce_blocks_of(virtual_seqs, reduce_columns(num_kv_splits), kernels.reduce_blocks)
            }
        };

        let tabled = matches!(schedule, ScheduleKind::Balanced | ScheduleKind::Either);
        let merged_pieces = if tabled && row_blocks == 1 { kernels.merged_pieces } else { 0 };
        let rows = num_slots * group_rows;
        Ok(Self {
            shape,
            schedule,
            num_kv_splits,
            split_tokens,
            num_parts,
            few_parts,
            num_slots,
            merged_pieces,
            reduce_blocks,
            few_blocks,
            query_group,
            num_groups,
            schedule_bytes: match schedule {
                ScheduleKind::Balanced | ScheduleKind::Either => {
                    (parts_offset(virtual_seqs) + num_parts * PART_WORDS) * 4
                }
                _ => 0,
            },
            partial_out_bytes: rows * shape.kv_lora_rank * kernels.partial_dtype.size(),
            partial_lse_bytes: rows * 4,
        })
    }

    /// Rows of one group: `query_group * num_heads`.
    pub fn group_rows(&self) -> usize {
        self.query_group * self.shape.num_heads
    }

    /// Sequences times groups: the units that are scheduled.
    pub fn virtual_seqs(&self) -> usize {
        self.shape.batch * self.num_groups
    }

    /// Sizes of the workspace views that a step takes, in order: schedule, partial outputs, partial LSE.
    pub fn workspace_views(&self) -> [usize; 3] {
        [self.schedule_bytes, self.partial_out_bytes, self.partial_lse_bytes]
    }
}

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
/// `{first_seq, first_tile, end_seq, end_tile, first_split, 0, 0, merges}`. A part covers everything from `first_tile` of
/// `first_seq` up to, not including, `end_tile` of `end_seq`; it is empty when both ends are equal. `first_split` is the split
/// index of its piece of `first_seq`; later sequences begin in it with split 0. The slot of split `s` of `v` is
/// `slot_begin[v] + s`. `merges` is 1 where no sequence can have more than `merged_pieces` pieces: stage 1 then merges them, counting them in
/// the words before, else stage 2.
///
/// Where pieces of at most `piece` tiles, each in a part of its own, are no longer than the parts would be otherwise, or longer by
/// an eighth at most, every sequence is cut into as few equal pieces as that takes: a piece less to write, read and merge for most
/// sequences is worth a little imbalance. `piece` is the first that fits of those from the mean upwards.
///
/// Else parts are stretches of equal cost of all sequences. The cost of a sequence is its tiles plus `fixed_cost`, or 0 if it is
/// empty. Boundaries lie at multiples of `chunk = max(ceil(total / parts), max over v of ceil(cost / (num_kv_splits - 1)))`, which
/// keeps every sequence within `num_kv_splits` pieces; one within `min(SNAP_TILES, chunk / 4)` tiles of a sequence's start or end
/// moves onto it. If all sequences are equal, a chunk longer by an eighth at most is taken that is a multiple of their cost.
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
            .copy_from_slice(&[first[0], first[1], end[0], end[1], first[2], 0, 0, merges]);
        (v, begin, first) = (next_v, next_begin, end);
    }
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
        let most = even + even / SLACK;
        let mean = (costs().map(|cost| cost - shape.fixed_cost).sum::<i64>().div_ceil_(num_parts))
            .max((longest - shape.fixed_cost).div_ceil_(splits));
        let lengths =
            (0..PIECE_LENGTHS).map(|i| mean + i * mean.div_ceil_(32)).filter(|&piece| 0 < piece && piece <= most);
        for piece in lengths {
            let pieces = Self { chunk: 1, snap: 0, fixed: 0, piece };
            if tiles.iter().map(|&t| pieces.cost(t)).sum::<i64>() <= num_parts {
                return pieces;
            }
        }
        let whole = even.div_ceil_(longest.max(1)) * longest;
        let equal = costs().all(|cost| cost == longest) && (1..=most).contains(&whole);
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

    #[test]
    fn sizes_that_overflow_are_refused_by_name() {
        use crate::backend::Backend;
        let host = crate::Host::with_threads(1);
        let mla = crate::MlaConfig::deepseek(128, 64);
        let decode = crate::MlaDecode::new(&host, mla, crate::DType::F32, crate::DType::F32).expect("decode");
        let kernels = decode.kernels(1, 1, 1024).expect("kernels");
        let most = i32::MAX as usize;
        for (batch, query_len, policy) in [
            (most, most, SplitPolicy::Fixed(MAX_KV_SPLITS)),
            (usize::MAX, 1, SplitPolicy::Auto),
            (1, usize::MAX, SplitPolicy::Invariant(1)),
        ] {
            let shape = PlanShape { batch, query_len, num_heads: 128, kv_lora_rank: 512, max_seq_len: 1024 };
            let refused = DecodePlan::new(shape, policy, &kernels, host.device());
            assert!(matches!(refused, Err(Error::Argument { arg: "shape", .. })), "{refused:?}");
        }
        let shape = ScratchReservation {
            max_num_seqs: 1,
            decode_threshold: 1,
            num_heads: 1,
            dcp_size: 1,
            max_seq_len: 1,
            num_compute_units: 1,
            kv_lora_rank: usize::MAX,
        };
        assert!(shape.bytes().is_err());
    }

    /// Kernels that find their pieces by themselves, or not, for groups of 16 rows.
    fn kernels(own_pieces: bool) -> DecodeKernels {
        use crate::kernel::{Entry, Variant};
        let variant = |entry| Variant { block_rows: 16, ..Variant::simple(entry, crate::DType::BF16) };
        DecodeKernels {
            split: variant(Entry::DecodeSplit),
            reduce: variant(Entry::DecodeReduce),
            plan: variant(Entry::Plan),
            query_group: 1,
            blocks_per_unit: 1,
            fixed_cost: FIXED_COST,
            split_shared_bytes: 0,
            own_pieces,
            few: None,
            short_seq_len: None,
            merged_pieces: 0,
            partial_dtype: crate::DType::BF16,
            reduce_blocks: 264,
            row_alignment: 16,
            max_query_len: 1,
        }
    }

    #[test]
    fn a_plan_for_few_sequences_is_as_fine_for_short_ones_as_for_long_ones() {
        use crate::backend::Backend;
        let host = crate::Host::with_threads(1);
        let device = DeviceInfo { num_compute_units: 132, ..host.device().clone() };
        let plan = |batch, max_seq_len, own_pieces| {
            let shape = PlanShape { batch, query_len: 1, num_heads: 16, kv_lora_rank: 512, max_seq_len };
            DecodePlan::new(shape, SplitPolicy::Auto, &kernels(own_pieces), &device).expect("plan")
        };
        for max_seq_len in [64, 4096, 131_072] {
            let own = plan(1, max_seq_len, true);
            assert_eq!((own.schedule, own.few_parts, own.num_slots), (ScheduleKind::Own, 132, 132));
            assert_eq!((own.schedule_bytes, own.partial_out_bytes), (0, 132 * 16 * 512 * 2));
            assert_eq!(own.reduce_blocks, 128, "16 rows in shares of 64 columns");
            assert_eq!(plan(4, max_seq_len, true).reduce_blocks, 128, "64 rows in shares of 256 columns");
            assert!(plan(1, max_seq_len, false).num_kv_splits >= 132);
            assert!(plan(4, max_seq_len, false).num_kv_splits >= 33);
        }
        // Beside another form: scratch, table and blocks for both.
        let plan_of = |kernels: &DecodeKernels| {
            let shape = PlanShape { batch: 1, query_len: 1, num_heads: 16, kv_lora_rank: 512, max_seq_len: 131_072 };
            DecodePlan::new(shape, SplitPolicy::Auto, kernels, &device).expect("plan")
        };
        let many = kernels(false);
        let few = FewKernel { split: many.split, shared_bytes: 0, max_tokens: 16_384, reduce_blocks: 66 };
        let (own, balanced) = (plan(1, 131_072, true), plan_of(&many));
        let either = plan_of(&DecodeKernels { few: Some(few), ..many });
        assert_eq!((either.schedule, either.num_parts, either.few_parts), (ScheduleKind::Either, 132, own.few_parts));
        assert_eq!((either.schedule_bytes, either.num_slots), (balanced.schedule_bytes, balanced.num_slots.max(132)));
        assert_eq!((either.reduce_blocks, either.few_blocks), (balanced.reduce_blocks, 66));
        assert_eq!((own.few_blocks, balanced.few_parts, balanced.few_blocks), (own.reduce_blocks, 0, 0));
        let many = plan(64, 4096, false);
        assert_eq!((many.schedule, many.num_kv_splits), (ScheduleKind::Balanced, num_kv_splits(4096, 132)));
    }

    #[test]
    fn sequences_stay_whole_where_that_costs_little() {
        assert_eq!(cut(132, &[64; 128]), (0, 64), "a sequence per part");
        assert_eq!(cut(132, &[64; 64]), (128, 32), "two pieces of each, none across two parts");
        assert_eq!(cut(66, &[64; 128]), (0, 128), "two sequences per part");
        assert_eq!(cut(66, &[64; 16]), (64, 16), "four equal pieces of each");
        assert_eq!(cut(66, &[64; 4]), (64, 4), "sixteen equal pieces of each");
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
}

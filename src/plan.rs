//! How the work of a decode step is cut: the split-count heuristic, the plan of a step and the balanced schedule.
//!
//! A [`DecodePlan`] is made on the host from host facts alone (batch, longest length, device), so a captured graph cannot
//! freeze anything that depends on the lengths. It sizes the scratch and the grids. Which split covers which tokens is
//! decided on the device from `seq_lens`: by the [`balance`]d schedule that the plan kernel writes once per step, or by the
//! formulas of [`ScheduleKind::Own`], [`ScheduleKind::Even`] and [`ScheduleKind::Chunked`]. Under [`ScheduleKind::Either`] the
//! lengths also decide which of two kernels does the work.

mod balance;

pub use self::balance::{BalanceShape, LENGTH_WORD, PART_WORDS, SNAP_TILES, balance, parts_offset};

use crate::backend::{DecodeKernels, DeviceInfo, FewTokens};
use crate::error::{Error, Result};
use crate::kernel::params::ScheduleKind;

/// Cached tokens per split below which the heuristic does not split further.
pub const MIN_TOKENS_PER_SPLIT: usize = 512;

/// Most splits that any policy makes of one sequence.
pub const MAX_KV_SPLITS: usize = 4096;

/// Cost of starting a sequence in a balanced schedule, in tiles (`c0`), of kernels that were not measured for it.
pub const FIXED_COST: i32 = 1;

/// Virtual sequences that count as few: [`SplitPolicy::Auto`] may cut them more finely than [`num_kv_splits`] says.
const FEW_SEQS: usize = 8;

/// Fewest columns that a block of stage 2 merges.
const REDUCE_COLUMNS: usize = 64;

/// Columns times splits that the threads of a block of stage 2 load in one round.
const REDUCE_ROUND: usize = 8192;

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
    /// Blocks of stage 2 for each part of a balanced schedule, or else each virtual sequence.
    pub(crate) fn share_blocks(&self) -> usize {
        let items = match self.schedule {
            ScheduleKind::Balanced | ScheduleKind::Either => self.num_parts,
            ScheduleKind::Own | ScheduleKind::Even | ScheduleKind::Chunked => self.shape.batch * self.num_groups,
        };
        self.reduce_blocks / items.max(1)
    }

    /// Plans a step for the kernels chosen for it.
    ///
    /// # Errors
    /// [`Error::Argument`] for a policy of zero or of more than [`MAX_KV_SPLITS`] splits, or sizes that overflow.
    pub fn new(shape: PlanShape, policy: SplitPolicy, kernels: &DecodeKernels, device: &DeviceInfo) -> Result<Self> {
        let units = device.num_compute_units.max(1);
        let query_group = kernels.query_group.clamp(1, shape.query_len.max(1));
        let row_blocks_of =
            |block_rows: u32| (query_group * shape.num_heads).div_ceil(block_rows.max(1) as usize).max(1);
        let row_blocks = row_blocks_of(kernels.split.block_rows);
        let blocks = units * kernels.blocks_per_unit.max(1);
        let few = match policy {
            SplitPolicy::Auto if kernels.own_pieces => Some((kernels.split.block_rows, kernels.reduce_blocks)),
            SplitPolicy::Auto => {
                kernels.few.map(|FewTokens { block_rows, reduce_blocks, .. }| (block_rows, reduce_blocks))
            }
            _ => None,
        };
        let few_parts = few.map_or(0, |(block_rows, _)| (blocks / row_blocks_of(block_rows)).max(1));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::params::PartialOrder;

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
            partial_order: PartialOrder::InOrder,
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
        let few =
            FewTokens { max_tokens: 16_384, block_rows: many.split.block_rows, tile_tokens: 64, reduce_blocks: 66 };
        let (own, balanced) = (plan(1, 131_072, true), plan_of(&many));
        let either = plan_of(&DecodeKernels { few: Some(few), ..many });
        assert_eq!((either.schedule, either.num_parts, either.few_parts), (ScheduleKind::Either, 132, own.few_parts));
        assert_eq!((either.schedule_bytes, either.num_slots), (balanced.schedule_bytes, balanced.num_slots.max(132)));
        assert_eq!((either.reduce_blocks, either.few_blocks), (balanced.reduce_blocks, 66));
        assert_eq!((own.few_blocks, balanced.few_parts, balanced.few_blocks), (own.reduce_blocks, 0, 0));
        let many = plan(64, 4096, false);
        assert_eq!((many.schedule, many.num_kv_splits), (ScheduleKind::Balanced, num_kv_splits(4096, 132)));
    }
}

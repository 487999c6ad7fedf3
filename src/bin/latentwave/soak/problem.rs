//! A random decode problem: everything about it follows from a seed and an index.

use std::fmt;
use std::ops::Range;

use latentwave::kernel::select::DIMS;
use latentwave::reference::{self, Attended};
use latentwave::testing::{SplitMix64, nan_byte};
use latentwave::{DType, MlaConfig, SplitPolicy};

use crate::point::Point;
use crate::rng::Rng;
use crate::rows::Rows;

/// Most distinct rows of a cache, and of queries: they are repeated in random order, so that drawing and checking cost the
/// same for any length.
const DISTINCT_ROWS: usize = 1021;
const DISTINCT_QUERIES: usize = 127;

/// Problems in a row that share their rarer element types and widths: each pair is a kernel that may have to be compiled.
const WINDOW: u64 = 256;

/// Latent and rope widths that most problems have.
const DEEPSEEK: (usize, usize) = (512, 64);

/// Partial rows that a problem's scratch may hold.
const MAX_PARTIAL_ROWS: usize = 1 << 16;

/// How large problems get.
#[derive(Debug, Clone, Copy)]
pub(super) struct Size {
    batch: usize,
    heads: usize,
    query_len: usize,
    /// Query rows.
    rows: usize,
    /// Cached tokens of all sequences, and how many in a few problems.
    tokens: [usize; 2],
    pub(super) checked_rows: usize,
    /// Whether types and widths vary, for which kernels may have to be compiled.
    all_types: bool,
    /// Whether splits and kernels are always those that the library would choose.
    chosen: bool,
}

impl Size {
    pub(super) const SMALL: Self = Self {
        batch: 4,
        heads: 33,
        query_len: 4,
        rows: 64,
        tokens: [300, 600],
        checked_rows: 8,
        all_types: false,
        chosen: false,
    };
    pub(super) const FULL: Self = Self {
        batch: 40,
        heads: 130,
        query_len: 16,
        rows: 4096,
        tokens: [6_000, 150_000],
        checked_rows: 32,
        all_types: true,
        chosen: false,
    };

    /// Likewise, of few sequences.
    pub(super) fn of_few(self) -> Self {
        Self { batch: self.batch.min(4), query_len: self.query_len.min(4), chosen: true, ..self }
    }
}

/// A problem whose shape is given, not drawn: launched once.
#[derive(Debug, Clone, Copy)]
pub(super) struct Given {
    pub(super) point: Point,
    pub(super) q_dtype: DType,
    pub(super) kv_dtype: DType,
    pub(super) page_size: usize,
    pub(super) policy: SplitPolicy,
    /// Longest sequence that is planned for, if it is longer than the point's own.
    pub(super) captured_for: usize,
    pub(super) portable: bool,
}

/// A block of a larger tensor: what a strided view sees of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Block<const N: usize> {
    pub(super) whole: [usize; N],
    pub(super) from: [usize; N],
    pub(super) shape: [usize; N],
}

impl<const N: usize> Block<N> {
    /// `shape` with up to `room` elements on either side in each dimension, in the last in multiples of `step`.
    fn within(shape: [usize; N], room: [usize; N], step: usize, rng: &mut Rng) -> Self {
        let mut side = || -> [usize; N] {
            std::array::from_fn(
                |d| if d + 1 < N { rng.below(room[d] + 1) } else { rng.below(room[d] / step + 1) * step },
            )
        };
        let (from, after) = (side(), side());
        Self { whole: std::array::from_fn(|d| from[d] + shape[d] + after[d]), from, shape }
    }

    /// Where row `row` of the block, counted through all dimensions but the last, lies in the whole.
    pub(super) fn row(&self, mut row: usize) -> Range<usize> {
        let mut begin = self.from[N - 1];
        let mut stride = self.whole[N - 1];
        for d in (0..N - 1).rev() {
            begin += (row % self.shape[d] + self.from[d]) * stride;
            row /= self.shape[d];
            stride *= self.whole[d];
        }
        begin..begin + self.shape[N - 1]
    }
}

/// Lengths and pages of one launch.
#[derive(Debug)]
pub(super) struct Round {
    pub(super) seq_lens: Vec<i32>,
    /// `[batch, table_stride]`, of which a sequence's own pages come first and anything else follows.
    pub(super) block_table: Vec<i32>,
}

#[derive(Debug)]
pub(super) struct Problem {
    pub(super) config: MlaConfig,
    pub(super) q_dtype: DType,
    pub(super) kv_dtype: DType,
    pub(super) batch: usize,
    pub(super) query_len: usize,
    pub(super) causal: bool,
    pub(super) kv_scale: f32,
    pub(super) policy: SplitPolicy,
    /// Longest sequence that is planned for.
    pub(super) planned: usize,
    /// Captured once and replayed for every round; else each round is enqueued anew.
    pub(super) graph: bool,
    /// Layers of a step. All read the same; only the last one's results are looked at.
    pub(super) layers: usize,
    /// Whether the LSE is asked for.
    pub(super) lse: bool,
    /// Without the kernels that are made for one architecture alone.
    pub(super) portable: bool,
    /// Whether kernels are promised that all of the cache is final but a step's own tokens.
    pub(super) history_final: bool,
    /// Latent and rope parts in two tensors.
    pub(super) split_cache: bool,
    pub(super) rounds: Vec<Round>,
    pub(super) num_pages: usize,
    pub(super) table_width: usize,
    pub(super) table_stride: usize,
    pub(super) q_block: Block<4>,
    pub(super) out_block: Block<4>,
    pub(super) lse_block: Block<3>,
    /// Slots of a page, and elements of a slot, that the tensor has beyond those used.
    pub(super) page_room: usize,
    pub(super) slot_room: usize,
    queries: Rows,
    cached: Rows,
    numbers: SplitMix64,
    checked_rows: usize,
}

impl Problem {
    /// Problem `index` of a seed, of types that a backend serves: `served(q, kv, dims)`. What is given is drawn, too, and not
    /// used, so that chance falls the same way.
    pub(super) fn draw(
        seed: u64,
        index: u64,
        size: &Size,
        given: Option<&Given>,
        served: impl Fn(DType, DType, (usize, usize)) -> bool,
    ) -> Self {
        let mut rng = Rng::new(SplitMix64::new(seed).number(index));
        let drawn = types(seed, index, size, &mut rng, served);
        let (q_dtype, kv_dtype, (kv_lora_rank, qk_rope_head_dim)) =
            given.map_or(drawn, |given| (given.q_dtype, given.kv_dtype, DEEPSEEK));
        let query_len = match rng.below(10) {
            0..6 => 1,
            6..9 => 1 + rng.below(4.min(size.query_len)),
            _ => 1 + rng.below(size.query_len),
        };
        let common = [1, 2, 8, 16, 20, 32, 33, 64, 65, 128];
        let num_heads = match rng.below(2) {
            0 => common[rng.below(common.len())].min(size.heads),
            _ => 1 + rng.below(size.heads),
        };
        let num_heads = num_heads.min(size.rows / query_len).max(1);
        let batch = (1 + skewed(size.batch, &mut rng)).min(size.rows / (query_len * num_heads)).max(1);
        let (batch, query_len, num_heads) = given.map_or((batch, query_len, num_heads), |given| {
            (given.point.batch, given.point.query_len, given.point.num_heads)
        });
        let page_size = match rng.below(4) {
            0 => 1 << rng.below(9),
            1 => 8 * (1 + rng.below(32)),
            2 => 64,
            _ => 1 + rng.below(256),
        };
        let page_size = given.map_or(page_size, |given| given.page_size);
        let config = MlaConfig {
            num_heads,
            kv_lora_rank,
            qk_rope_head_dim,
            page_size,
            sm_scale: [1.0 / 192_f32.sqrt(), 0.1, 0.3, -0.1][rng.below(4)],
            softcap: [0.0, 0.0, 0.0, 50.0, 2.5][rng.below(5)],
        };

        let budget = if rng.below(20) == 0 { size.tokens[1] } else { size.tokens[0] };
        let lens: Vec<Vec<i32>> = (0..1 + rng.below(3)).map(|_| lengths(batch, budget, page_size, &mut rng)).collect();
        let lens = given.map_or(lens, |given| vec![given.point.seq_lens(seed)]);
        let num_tokens: usize = lens.iter().flatten().map(|len| *len as usize).sum();
        let longest = lens.iter().flatten().copied().max().unwrap_or(0) as usize;
        let planned = if rng.below(8) == 0 { longest + rng.below(131_072) } else { longest }.max(1);
        let planned = given.map_or(planned, |given| longest.max(given.captured_for));
        let policy = match rng.below(10) {
            _ if size.chosen => SplitPolicy::Auto,
            0..4 => SplitPolicy::Auto,
            4..6 => SplitPolicy::MinTokens([16, 32, 64, 300][rng.below(4)]),
            6..8 => SplitPolicy::Fixed(1 + skewed(64, &mut rng)),
            _ => SplitPolicy::Invariant([16, 64, 100, 512][rng.below(4)]),
        };
        let pieces = match policy {
            SplitPolicy::Fixed(splits) => splits,
            SplitPolicy::Invariant(tokens) => planned.div_ceil(tokens),
            _ => 1,
        };
        let policy = given.map_or(policy, |given| given.policy);
        let fits = pieces.saturating_mul(batch * query_len * num_heads) <= MAX_PARTIAL_ROWS && pieces <= 4096;
        let fits = given.is_some() || fits;

        let used = |len: i32| (len as usize).div_ceil(page_size);
        let table_width = used(longest as i32).max(1) + rng.below(3);
        let table_stride = table_width + rng.below(3);
        let num_pages = lens.iter().flatten().map(|len| used(*len)).sum::<usize>() + 1 + rng.below(4);
        let mut pages: Vec<i32> = (0..num_pages as i32).collect();
        rng.shuffle(&mut pages);
        let mut pages = pages.into_iter();
        let rounds = lens.into_iter().map(|seq_lens| {
            let mut block_table = Vec::with_capacity(batch * table_stride);
            for len in &seq_lens {
                block_table.extend(pages.by_ref().take(used(*len)));
                block_table.extend((used(*len)..table_stride).map(|_| rng.next_u64() as i32));
            }
            Round { seq_lens, block_table }
        });
        let rounds = rounds.collect();

        let padded = rng.below(2) == 0;
        let room = |most: usize| if padded { most } else { 0 };
        // Rows begin on multiples of 16 bytes, those of outputs of 8.
        let words = 16 / q_dtype.size();
        let shape = |width| [batch, query_len, num_heads, width];
        let q_block = Block::within(shape(config.head_dim()), [0, room(1), room(2), room(32)], words, &mut rng);
        let out_block = Block::within(shape(kv_lora_rank), [1, room(1), room(2), room(24)], words / 2, &mut rng);
        let lse_block = Block::within([batch, query_len, num_heads], [1, room(1), room(5)], 1, &mut rng);
        let cached = Rows::random(kv_dtype, num_tokens.clamp(1, DISTINCT_ROWS), config.head_dim(), &mut rng);
        Self {
            config,
            q_dtype,
            kv_dtype,
            batch,
            query_len,
            causal: rng.below(3) > 0,
            kv_scale: if kv_dtype.is_fp8() { [1.0, 0.5, 0.3, 1.7][rng.below(4)] } else { 1.0 },
            policy: if fits { policy } else { SplitPolicy::Auto },
            planned,
            graph: rng.below(2) == 0,
            lse: rng.below(4) > 0,
            portable: {
                let drawn = rng.below(3) == 0 && !size.chosen;
                given.map_or(drawn, |given| given.portable)
            },
            split_cache: rng.below(3) == 0,
            rounds,
            num_pages,
            table_width,
            table_stride,
            q_block,
            out_block,
            lse_block,
            page_room: if padded { rng.below(3) } else { 0 },
            slot_room: if padded { rng.below(3) * 16 } else { 0 },
            queries: Rows::random(
                q_dtype,
                (batch * query_len * num_heads).min(DISTINCT_QUERIES),
                config.head_dim(),
                &mut rng,
            ),
            cached,
            numbers: SplitMix64::new(rng.next_u64()),
            checked_rows: size.checked_rows,
            layers: 1 + rng.below(3),
            history_final: rng.below(2) == 0,
        }
    }

    /// Query rows.
    pub(super) fn rows(&self) -> usize {
        self.batch * self.query_len * self.config.num_heads
    }

    fn query(&self, row: usize) -> usize {
        self.numbers.below(row as u64, self.queries.len() as u64) as usize
    }

    fn cached_row(&self, slot: usize) -> usize {
        self.numbers.below(1 << 40 | slot as u64, self.cached.len() as u64) as usize
    }

    /// Slots that hold tokens of a sequence of a round, in order.
    fn slots<'a>(&'a self, round: &'a Round, seq: usize) -> impl Iterator<Item = usize> + 'a {
        let page_size = self.config.page_size;
        let table = &round.block_table[seq * self.table_stride..];
        (0..round.seq_lens[seq] as usize).map(move |j| table[j / page_size] as usize * page_size + j % page_size)
    }

    /// The bytes of the whole tensor that the queries are a block of; NaN around them.
    pub(super) fn query_bytes(&self) -> Vec<u8> {
        let size = self.q_dtype.size();
        let mut bytes = vec![0xff; self.q_block.whole.iter().product::<usize>() * size];
        for row in 0..self.rows() {
            let Range { start, end } = self.q_block.row(row);
            bytes[start * size..end * size].copy_from_slice(self.queries.bytes(self.query(row)..self.query(row) + 1));
        }
        bytes
    }

    /// The bytes of a cache `[num_pages, page_size + page_room, columns.len() + slot_room]` that holds these columns of every
    /// token; NaN where no token is.
    pub(super) fn cache_bytes(&self, columns: Range<usize>) -> Vec<u8> {
        let size = self.kv_dtype.size();
        let (from, len) = (columns.start * size, columns.len() * size);
        let slot_bytes = len + self.slot_room * size;
        let page_slots = self.config.page_size + self.page_room;
        let mut bytes = vec![nan_byte(self.kv_dtype); self.num_pages * page_slots * slot_bytes];
        for round in &self.rounds {
            for slot in (0..self.batch).flat_map(|seq| self.slots(round, seq)) {
                let (page, entry) = (slot / self.config.page_size, slot % self.config.page_size);
                let row = self.cached_row(slot);
                let at = (page * page_slots + entry) * slot_bytes;
                bytes[at..at + len].copy_from_slice(&self.cached.bytes(row..row + 1)[from..from + len]);
            }
        }
        bytes
    }

    /// Rows that are compared with float64 in a round: the first, the last, and random ones between.
    pub(super) fn checked_rows(&self, round: usize) -> Vec<usize> {
        let rows = self.rows();
        if rows <= self.checked_rows {
            return (0..rows).collect();
        }
        let drawn = |i: usize| self.numbers.below((2 + round as u64) << 40 | i as u64, rows as u64) as usize;
        [0, rows - 1].into_iter().chain((2..self.checked_rows).map(drawn)).collect()
    }

    /// Attention of some rows of a round in float64.
    pub(super) fn reference(&self, round: usize) -> impl Fn(usize) -> Attended {
        let round = &self.rounds[round];
        let width = self.config.head_dim();
        let scale = f64::from(self.kv_scale);
        let cached = reference::to_f64(self.kv_dtype, self.cached.bytes(0..self.cached.len()), scale);
        move |row| {
            let (seq, token) =
                (row / (self.query_len * self.config.num_heads), row / self.config.num_heads % self.query_len);
            let len = round.seq_lens[seq] as usize;
            let hidden = if self.causal { self.query_len - 1 - token } else { 0 };
            let mut counts = vec![0; self.cached.len()];
            for slot in self.slots(round, seq).take(len.saturating_sub(hidden)) {
                counts[self.cached_row(slot)] += 1;
            }
            let q = self.queries.values(self.query(row), 0..width);
            let MlaConfig { kv_lora_rank, sm_scale, softcap, .. } = self.config;
            reference::attend_repeated(&q, kv_lora_rank, &counts, sm_scale.into(), softcap.into(), |j, row| {
                row.copy_from_slice(&cached[j * width..][..width]);
            })
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { config, q_dtype, kv_dtype, batch, query_len, causal, kv_scale, policy, .. } = self;
        let MlaConfig { num_heads, kv_lora_rank, qk_rope_head_dim, page_size, sm_scale, softcap } = config;
        let how = if self.graph { "one graph" } else { "eager" };
        let cache = if self.split_cache { "split" } else { "joined" };
        write!(
            f,
            "{batch} sequences of {query_len} query tokens (causal {causal}), {num_heads} heads of {kv_lora_rank} + {qk_rope_head_dim}, \
             pages of {page_size}, {q_dtype} over {kv_dtype} x {kv_scale}, scale {sm_scale}, soft cap {softcap}, {policy:?} planned for \
             {}, portable {}, history final {}, {} layers, {how}, LSE {}, {cache} cache; queries {:?} of {:?}, outputs {:?} of {:?}; lengths {:?}",
            self.planned,
            self.portable,
            self.history_final,
            self.layers,
            self.lse,
            self.q_block.shape,
            self.q_block.whole,
            self.out_block.shape,
            self.out_block.whole,
            self.rounds.iter().map(|round| &round.seq_lens).collect::<Vec<_>>(),
        )
    }
}

/// Element types and widths: mostly those whose kernels are carried, else one of two that a window of indices shares.
fn types(
    seed: u64,
    index: u64,
    size: &Size,
    rng: &mut Rng,
    served: impl Fn(DType, DType, (usize, usize)) -> bool,
) -> (DType, DType, (usize, usize)) {
    let quantised = [DType::Fp8E4m3, DType::Fp8E4m3Fnuz].into_iter().find(|kv| served(DType::BF16, *kv, DEEPSEEK));
    let usual = match (rng.below(4), quantised) {
        (0, Some(quantised)) => (DType::BF16, quantised, DEEPSEEK),
        _ => (DType::BF16, DType::BF16, DEEPSEEK),
    };
    let rare = rng.below(3);
    if !size.all_types || rare == 2 {
        return usual;
    }
    let mut shared = Rng::new(SplitMix64::new(!seed).number(index / WINDOW * 2 + rare as u64));
    let all = [DType::BF16, DType::F16, DType::F32].into_iter().flat_map(|q| {
        let caches = [q, DType::Fp8E4m3, DType::Fp8E4m3Fnuz].into_iter();
        caches.flat_map(move |kv| DIMS.map(|(rank, rope)| (q, kv, (rank as usize, rope as usize))))
    });
    let all: Vec<_> = all.filter(|&(q, kv, dims)| served(q, kv, dims)).collect();
    if all.is_empty() { usual } else { all[shared.below(all.len())] }
}

/// A number below `end`, small ones more often.
fn skewed(end: usize, rng: &mut Rng) -> usize {
    let most = 1 + rng.below(end);
    rng.below(most)
}

/// Cached tokens of each sequence, about `budget` in all at most: none, one, whole pages and one beside, few, many.
fn lengths(batch: usize, budget: usize, page_size: usize, rng: &mut Rng) -> Vec<i32> {
    let mut left = budget;
    let equal = (rng.below(6) == 0).then(|| rng.below(budget / batch + 1));
    let lens = (0..batch).map(|_| {
        let few = budget / batch + 1;
        let len = match (equal, rng.below(8)) {
            (Some(len), _) => len,
            (_, 0) => 0,
            (_, 1) => 1,
            (_, 2..4) => (page_size * rng.below(few / page_size + 2) + rng.below(3)).saturating_sub(1),
            (_, 4..7) => rng.below(few),
            _ => rng.below(left + 1),
        };
        left = left.saturating_sub(len);
        len as i32
    });
    lens.collect()
}

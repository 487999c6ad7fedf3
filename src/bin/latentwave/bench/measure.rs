//! Measures one point: several layers with caches of their own, captured in one graph, replayed.

use std::time::{Duration, Instant};

use latentwave::{
    DType, DecodeArgs, Error, GraphBackend, KvCache, MlaConfig, MlaDecode, Result, SplitPolicy, Stream, Tensor,
    Workspace,
};
use serde::Serialize;

use super::check;
use crate::interrupt;
use crate::point::Point;
use crate::rng::Rng;
use crate::rows::{self, Errors, Rows};

/// Distinct random cache rows; a cache repeats them.
const DISTINCT_ROWS: usize = 1021;

/// Rest before a single replay.
const REST: Duration = Duration::from_millis(120);

/// How to measure.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Method {
    pub(crate) q_dtype: DType,
    pub(crate) kv_dtype: DType,
    pub(crate) policy: SplitPolicy,
    /// Whether kernels made for one architecture alone are left out.
    pub(crate) portable: bool,
    /// As [`MlaDecode::history_final`].
    pub(crate) history_final: bool,
    /// Bytes of cache that the layers of a graph take together at least, so that each layer finds its own one cold.
    pub(crate) pool_bytes: usize,
    /// Most layers with a cache of their own.
    pub(crate) max_layers: usize,
    /// Layers of a graph at least; beyond `max_layers` they take the caches in turn.
    pub(crate) min_launches: usize,
    /// Longest sequence that the graph is captured for; the point's own longest if that is longer.
    pub(crate) max_seq_len: usize,
    /// Least time spent replaying.
    pub(crate) time: Duration,
    /// Whether single replays after a rest are measured, too: a device that is not warm yet runs at a higher clock.
    pub(crate) burst: bool,
    pub(crate) seed: u64,
}

/// What a point took.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Measurement {
    pub(crate) point: String,
    /// Microseconds of one layer: median, least and most over replays.
    pub(crate) us: f64,
    pub(crate) us_min: f64,
    pub(crate) us_max: f64,
    /// The same of single replays after a rest, if they were asked for: the median.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) us_burst: Option<f64>,
    /// Microseconds of the host to hand one layer over, the replay's cost shared out.
    pub(crate) issue_us: f64,
    /// Bytes of cache read by one layer.
    pub(crate) kv_bytes: usize,
    /// Multiplications and additions of one layer.
    pub(crate) flops: f64,
    /// Largest error of the rows checked, as a share of the row's largest element.
    pub(crate) error: f64,
    /// `||out - reference|| / ||reference||` of all rows checked together, and of the row where it is largest.
    pub(crate) error_norm: f64,
    pub(crate) error_norm_max: f64,
    pub(crate) checked_rows: usize,
    pub(crate) launches: usize,
    pub(crate) replays: usize,
    /// Milliseconds until the point's kernels were loaded and had run once, eagerly. Those that another point had before are loaded.
    pub(crate) first_ms: f64,
    pub(crate) num_kv_splits: usize,
    pub(crate) kernel: String,
}

impl Measurement {
    pub(crate) fn gb_per_second(&self) -> f64 {
        self.kv_bytes as f64 / self.us / 1e3
    }

    pub(crate) fn tflops(&self) -> f64 {
        self.flops / self.us / 1e6
    }
}

/// The inputs of a point, and what they stand for.
struct Inputs<B: GraphBackend> {
    q: Tensor<B>,
    q_rows: Rows,
    kv_rows: Rows,
    caches: Vec<KvCache<B>>,
    table: Tensor<B>,
    pages: Vec<Vec<i32>>,
    seq_lens: Tensor<B>,
    lens: Vec<i32>,
}

/// Measures a point; `None` at Ctrl-C, as a point without its check is none.
///
/// # Errors
/// [`OutOfMemory`](latentwave::Error::OutOfMemory) where the point does not fit the device, and what capture and launch return.
pub(crate) fn measure<B: GraphBackend>(
    backend: &B,
    mla: &MlaConfig,
    point: &Point,
    method: &Method,
) -> Result<Option<Measurement>> {
    let mla = MlaConfig { num_heads: point.num_heads, ..*mla };
    let decode = MlaDecode::new(backend, mla, method.q_dtype, method.kv_dtype)?;
    let decode = decode.portable(method.portable).history_final(method.history_final);
    let Some(inputs) = Inputs::new(backend, &mla, point, method)? else { return Ok(None) };
    let longest = inputs.lens.iter().copied().max().unwrap_or(0) as usize;
    let longest = longest.max(method.max_seq_len);
    let start = Instant::now();
    let plan = decode.plan(point.batch, point.query_len, longest, method.policy)?;
    let planned = start.elapsed();
    let mut workspace = Workspace::new(backend, 1)?;
    workspace.reserve(0, &plan.decode().workspace_views())?;
    workspace.lock();
    let rows = point.batch * point.query_len;
    let mut out = Tensor::zeros(backend, [rows, mla.num_heads, mla.kv_lora_rank], method.q_dtype)?;

    let stream = Stream::new(backend)?;
    let launches = inputs.caches.len().max(method.min_launches);
    let mut layers = |count: usize| {
        // The plan kernel runs once, as in a step: lengths are the same for all layers.
        let table_width = inputs.table.shape()[1];
        let mut step = decode.schedule(&stream, &plan, &mut workspace, &inputs.seq_lens, table_width, true)?;
        inputs.caches.iter().cycle().take(count).try_for_each(|kv_cache| {
            let args = DecodeArgs {
                q: &inputs.q,
                kv_cache,
                block_table: &inputs.table,
                seq_lens: &inputs.seq_lens,
                out: &mut out,
                lse: None,
                kv_scale: 1.0,
                causal: true,
            };
            step.attend(args)
        })
    };
    let start = Instant::now();
    layers(1)?;
    stream.synchronize()?;
    let first = planned + start.elapsed();
    let graph = stream.capture(|| layers(launches))?;

    let replay = || -> Result<(f64, f64)> {
        let start = Instant::now();
        // SAFETY: everything captured owns its memory.
        unsafe { stream.replay(&graph)? };
        let issued = start.elapsed();
        stream.synchronize()?;
        Ok((start.elapsed().as_secs_f64(), issued.as_secs_f64()))
    };
    let warm_up = Instant::now();
    while warm_up.elapsed() < method.time / 5 && !interrupt::caught() {
        replay()?;
    }
    let mut times = Vec::new();
    let mut issues = Vec::new();
    let start = Instant::now();
    while start.elapsed() < method.time || times.len() < 3 {
        if interrupt::caught() {
            return Ok(None);
        }
        let (time, issue) = replay()?;
        times.push(time);
        issues.push(issue);
    }
    times.sort_by(f64::total_cmp);
    issues.sort_by(f64::total_cmp);
    let burst = if method.burst { Some(after_rests(|| Ok(replay()?.0))?) } else { None };

    let Some(errors) = inputs.errors(backend, &mla, point, &out, method)? else { return Ok(None) };
    let us = |seconds: f64| seconds * 1e6 / launches as f64;
    let tokens: usize = inputs.lens.iter().map(|&len| len as usize).sum();
    Ok(Some(Measurement {
        point: point.to_string(),
        us: us(times[times.len() / 2]),
        us_min: us(times[0]),
        us_max: us(times[times.len() - 1]),
        us_burst: burst.map(us),
        issue_us: us(issues[issues.len() / 2]),
        kv_bytes: tokens * mla.head_dim() * method.kv_dtype.size(),
        flops: 2.0 * (tokens * point.query_len * mla.num_heads) as f64 * (mla.head_dim() + mla.kv_lora_rank) as f64,
        error: errors.element,
        error_norm: errors.norm(),
        error_norm_max: errors.row_norm,
        checked_rows: errors.rows,
        launches,
        replays: times.len(),
        first_ms: first.as_secs_f64() * 1e3,
        num_kv_splits: plan.decode().num_kv_splits,
        kernel: plan.kernels().split.to_string(),
    }))
}

/// Median of a few times that `once` takes, each after the device has rested.
///
/// # Errors
/// What `once` returns.
pub(super) fn after_rests(mut once: impl FnMut() -> Result<f64>) -> Result<f64> {
    let mut times = [0.0; 3];
    for time in &mut times {
        std::thread::sleep(REST);
        *time = once()?;
    }
    times.sort_by(f64::total_cmp);
    Ok(times[1])
}

/// Fills a cache with the rows, over and over, in pieces of many: a large cache takes few copies.
fn repeat_rows<B: GraphBackend>(backend: &B, cache: &Tensor<B>, rows: &Rows) -> Result<()> {
    let [num_pages, page_size, width] = *cache.shape() else { return Ok(()) };
    let cache = cache.reshape([num_pages * page_size, width])?;
    let total = cache.shape()[0];
    let piece: Vec<u8> = rows.bytes(0..DISTINCT_ROWS).repeat((total / DISTINCT_ROWS).clamp(1, 32));
    let piece_rows = piece.len() / (width * cache.dtype().size());
    for start in (0..total).step_by(piece_rows) {
        let part = cache.narrow(0, start..total.min(start + piece_rows))?;
        part.write_bytes(backend, &piece[..part.span_bytes()])?;
    }
    Ok(())
}

impl<B: GraphBackend> Inputs<B> {
    /// `None` at Ctrl-C.
    fn new(backend: &B, mla: &MlaConfig, point: &Point, method: &Method) -> Result<Option<Self>> {
        let mut rng = Rng::new(method.seed);
        let lens = point.seq_lens(method.seed);
        let pages_of = |len: i32| (len as usize).div_ceil(mla.page_size);
        let num_pages: usize = lens.iter().map(|&len| pages_of(len)).sum();
        let width = lens.iter().map(|&len| pages_of(len)).max().unwrap_or(1);

        let ids = |count: usize| i32::try_from(count).is_ok();
        if !ids(num_pages) || !point.batch.checked_mul(width).is_some_and(ids) {
            return Err(Error::argument(
                "points",
                format!("{point}: more pages, or entries of its table, than there are page ids"),
            ));
        }
        // Pages in random order; what lies behind a sequence's pages in the table names no page.
        let mut order: Vec<i32> = (0..num_pages as i32).collect();
        rng.shuffle(&mut order);
        let mut table = vec![-1; point.batch * width];
        let mut pages = Vec::with_capacity(point.batch);
        for (row, &len) in table.chunks_mut(width).zip(&lens) {
            let own = order.split_off(order.len() - pages_of(len));
            row[..own.len()].copy_from_slice(&own);
            pages.push(own);
        }

        let kv_rows = Rows::random(method.kv_dtype, DISTINCT_ROWS, mla.head_dim(), &mut rng);
        let layer_bytes = num_pages * mla.page_size * mla.head_dim() * method.kv_dtype.size();
        let layers = method.pool_bytes.div_ceil(layer_bytes).clamp(1, method.max_layers);
        let caches = (0..layers).take_while(|_| !interrupt::caught()).map(|_| {
            let cache = Tensor::empty(backend, [num_pages, mla.page_size, mla.head_dim()], method.kv_dtype)?;
            repeat_rows(backend, &cache, &kv_rows)?;
            KvCache::joined(&cache, mla)
        });
        let caches = caches.collect::<Result<_>>()?;
        if interrupt::caught() {
            return Ok(None);
        }
        let rows = point.batch * point.query_len;
        let q_rows = Rows::random(method.q_dtype, rows, mla.num_heads * mla.head_dim(), &mut rng);
        Ok(Some(Self {
            caches,
            q: Tensor::from_bytes(
                backend,
                [rows, mla.num_heads, mla.head_dim()],
                method.q_dtype,
                q_rows.bytes(0..rows),
            )?,
            q_rows,
            kv_rows,
            table: Tensor::from_slice(backend, [point.batch, width], &table)?,
            pages,
            seq_lens: Tensor::from_slice(backend, [point.batch], &lens)?,
            lens,
        }))
    }

    /// What some rows of the output differ by from float64; `None` at Ctrl-C.
    fn errors(
        &self,
        backend: &B,
        mla: &MlaConfig,
        point: &Point,
        out: &Tensor<B>,
        method: &Method,
    ) -> Result<Option<Errors>> {
        let slot = |seq: usize, token: usize| {
            self.pages[seq][token / mla.page_size] as usize * mla.page_size + token % mla.page_size
        };
        let wanted = check::Wanted {
            mla,
            lens: &self.lens,
            query_len: point.query_len,
            q_rows: &self.q_rows,
            kv_rows: &self.kv_rows,
            cached_row: |seq, token| slot(seq, token) % DISTINCT_ROWS,
        };
        check::errors(&wanted, method.seed, |row| rows::read(backend, &out.narrow(0, row..row + 1)?))
    }
}

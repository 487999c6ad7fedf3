//! `latentwave gain`: what reserving the scratch and capturing the step are worth.

use std::path::PathBuf;
use std::time::Instant;

use clap::Args as ClapArgs;
use latentwave::{
    DecodeArgs, Error, GraphBackend, KvCache, MlaConfig, MlaDecode, Result, SplitPolicy, Stream, Tensor, Workspace,
};
use serde::Serialize;

use crate::args::{self, ModelArgs, TypeArgs};
use crate::device::{self, DeviceArgs, Job};
use crate::rng::Rng;
use crate::rows::Rows;
use crate::{Outcome, alloc, files, interrupt, text};

/// Measure what reserving scratch and capturing graphs are worth
///
/// One step of attention over many layers, three ways in one run: scratch allocated in every call, scratch reserved once and
/// locked, and the whole step captured in a full graph and replayed. Results of the three are compared bit by bit.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    /// Sequences of a step, set apart by commas; one table row each.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values_t = [1, 16])]
    batch: Vec<usize>,
    /// Heads, set apart by commas.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values_t = [16])]
    heads: Vec<usize>,
    /// Cached tokens of every sequence.
    #[arg(long, value_name = "TOKENS", default_value_t = 1024)]
    seq_len: usize,
    /// Layers of a step.
    #[arg(long, value_name = "N", default_value_t = 4)]
    layers: usize,
    /// Least seconds spent on each way.
    #[arg(long, value_name = "SECONDS", default_value_t = 0.5, allow_negative_numbers = true)]
    time: f64,
    /// How sequences are split: auto, min-tokens:N, fixed:N or invariant:N.
    #[arg(long, value_name = "POLICY", default_value = "auto", value_parser = args::split_policy)]
    split_policy: SplitPolicy,
    /// Promise kernels that history is final during a step, tables and the rows before each sequence's own tokens: they may copy these
    /// while the layer before runs.
    #[arg(long)]
    history_final: bool,
    /// Write every number as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    types: TypeArgs,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Most layers of a step.
const MAX_LAYERS: usize = 4096;

/// How a step is enqueued.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
enum Way {
    /// A workspace is made, and freed, in every layer.
    AllocatePerCall,
    /// One workspace, locked.
    Reserved,
    /// One graph.
    FullGraph,
}

/// What one way of one step took.
#[derive(Debug, Serialize)]
struct Row {
    batch: usize,
    heads: usize,
    way: Way,
    /// Microseconds of a step, median.
    us: f64,
    /// Microseconds until the host had handed it over, median.
    host_us: f64,
    /// Scratch buffers allocated on the device per step.
    device_allocations: f64,
    /// Allocations on the host per step.
    host_allocations: f64,
}

/// Runs the command.
///
/// # Errors
/// For bad arguments, an absent device, and what a backend returns.
pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let least = |values: &[usize]| values.iter().copied().min().unwrap_or(0);
    let counts = [
        ("batch", least(&args.batch)),
        ("heads", least(&args.heads)),
        ("layers", args.layers),
        ("seq_len", args.seq_len),
    ];
    if let Some((arg, _)) = counts.iter().find(|(_, least)| *least == 0) {
        return Err(Error::argument(arg, "0: at least 1"));
    }
    if args.layers > MAX_LAYERS {
        return Err(Error::argument("layers", format!("{}: at most {MAX_LAYERS}", args.layers)));
    }
    args::seconds("time", args.time)?;
    files::check_outputs(args.model.file().as_slice(), &[("json", args.json.as_deref())])?;
    let (_, mla) = args.model.load(1)?;
    device::run(args.device, Gain { args, mla })
}

struct Gain<'a> {
    args: &'a Args,
    mla: MlaConfig,
}

impl Job for Gain<'_> {
    type Output = Outcome;

    fn run<B: GraphBackend>(self, backend: &B) -> Result<Outcome> {
        let Self { args, mla } = self;
        let info = backend.device();
        println!(
            "{}: {} ({}), {} of {}",
            info.backend,
            info.name,
            info.arch,
            text::plural(args.layers, "layer"),
            text::plural(args.seq_len, "token")
        );
        interrupt::catch();
        let mut rows = Vec::new();
        for &heads in &args.heads {
            for &batch in &args.batch {
                let step = StepData::new(backend, MlaConfig { num_heads: heads, ..mla }, batch, args)?;
                if interrupt::caught() {
                    break;
                }
                let mut results = Vec::new();
                for way in [Way::AllocatePerCall, Way::Reserved, Way::FullGraph] {
                    rows.push(step.measure(backend, way, args)?);
                    results.push(step.out.to_vec::<u8>(backend)?);
                }
                if results.iter().any(|result| *result != results[0]) {
                    eprintln!("miss: the three ways differ at batch {batch}, {heads} heads");
                    return Ok(Outcome::Missed);
                }
            }
        }
        println!("{}", table(&rows));
        if let Some(path) = &args.json {
            files::write_json(path, &rows)?;
        }
        Ok(if interrupt::caught() { Outcome::Interrupted } else { Outcome::Done })
    }
}

struct StepData<B: GraphBackend> {
    decode: MlaDecode<B>,
    plan: latentwave::ops::Plan<B>,
    q: Tensor<B>,
    caches: Vec<KvCache<B>>,
    table: Tensor<B>,
    seq_lens: Tensor<B>,
    // Bytes, so that results can be compared whatever their type.
    out: Tensor<B>,
    out_rows: Tensor<B>,
}

impl<B: GraphBackend> StepData<B> {
    fn new(backend: &B, mla: MlaConfig, batch: usize, args: &Args) -> Result<Self> {
        let (q_dtype, kv_dtype) = (args.types.dtype, args.types.kv());
        let mut rng = Rng::new(7);
        let pages = args.seq_len.div_ceil(mla.page_size);
        let num_pages = batch.checked_mul(pages).and_then(|pages| i32::try_from(pages).ok()).ok_or_else(|| {
            Error::argument(
                "seq_len",
                format!("{}: {batch} sequences have more pages than there are page ids", args.seq_len),
            )
        })?;
        let shape = [num_pages as usize, mla.page_size, mla.head_dim()];
        // What the device has no room for is refused before the host makes it.
        drop(Tensor::empty(backend, shape, kv_dtype)?);
        let mut order: Vec<i32> = (0..num_pages).collect();
        rng.shuffle(&mut order);
        let decode = MlaDecode::new(backend, mla, q_dtype, kv_dtype)?.history_final(args.history_final);
        let plan = decode.plan(batch, 1, args.seq_len, args.split_policy)?;
        let q = Rows::random(q_dtype, batch, mla.num_heads * mla.head_dim(), &mut rng);
        let page = Rows::random(kv_dtype, mla.page_size, mla.head_dim(), &mut rng);
        let bytes = page.bytes(0..mla.page_size).repeat(batch * pages);
        // At Ctrl-C no further one is made: the step is not run.
        let caches = (0..args.layers)
            .take_while(|_| !interrupt::caught())
            .map(|_| KvCache::joined(&Tensor::from_bytes(backend, shape, kv_dtype, &bytes)?, &mla));
        let elements = batch * mla.num_heads * mla.kv_lora_rank;
        let out = Tensor::zeros(backend, [elements * q_dtype.size()], latentwave::DType::U8)?;
        let (rank, shape) = (mla.kv_lora_rank, [batch, mla.num_heads, mla.kv_lora_rank]);
        // SAFETY: the same memory as `out`, which lives as long, under the queries' type.
        let out_rows = unsafe { Tensor::from_raw(out.addr(), q_dtype, &shape, &[mla.num_heads * rank, rank, 1])? };
        Ok(Self {
            caches: caches.collect::<Result<_>>()?,
            q: Tensor::from_bytes(backend, [batch, mla.num_heads, mla.head_dim()], q_dtype, q.bytes(0..batch))?,
            table: Tensor::from_slice(backend, [batch, pages], &order)?,
            seq_lens: Tensor::from_slice(backend, [batch], &vec![args.seq_len as i32; batch])?,
            decode,
            plan,
            out,
            out_rows,
        })
    }

    /// The plan kernel, then these layers.
    fn enqueue(&self, stream: &Stream<B>, workspace: &mut Workspace<B>, caches: &[KvCache<B>]) -> Result<()> {
        let width = self.table.shape()[1];
        let mut step = self.decode.schedule(stream, &self.plan, workspace, &self.seq_lens, width, true)?;
        caches.iter().try_for_each(|kv_cache| {
            step.attend(DecodeArgs {
                q: &self.q,
                kv_cache,
                block_table: &self.table,
                seq_lens: &self.seq_lens,
                out: &mut self.out_rows.clone(),
                lse: None,
                kv_scale: 1.0,
                causal: true,
            })
        })
    }

    fn measure(&self, backend: &B, way: Way, args: &Args) -> Result<Row> {
        self.out.fill_bytes(backend, 0xff)?;
        let stream = Stream::new(backend)?;
        let mut workspace = Workspace::new(backend, 1)?;
        workspace.reserve(0, &self.plan.decode().workspace_views())?;
        workspace.lock();
        let graph = match way {
            Way::FullGraph => Some(stream.capture(|| self.enqueue(&stream, &mut workspace, &self.caches))?),
            _ => None,
        };
        let mut device_allocations = 0;
        let mut enqueue = || -> Result<()> {
            match (&graph, way) {
                // SAFETY: everything that the graph uses lives as long as this function.
                (Some(graph), _) => unsafe { stream.replay(graph) },
                (None, Way::AllocatePerCall) => self.caches.iter().try_for_each(|cache| {
                    let mut own = Workspace::new(backend, 1)?;
                    device_allocations += 1;
                    // The schedule lies in the scratch too, so it is made anew.
                    self.enqueue(&stream, &mut own, std::slice::from_ref(cache))
                }),
                _ => self.enqueue(&stream, &mut workspace, &self.caches),
            }
        };

        for _ in 0..3 {
            enqueue()?;
            stream.synchronize()?;
        }
        let (mut steps, mut issues) = (Vec::with_capacity(1 << 16), Vec::with_capacity(1 << 16));
        let (time, begin) = (args::seconds("time", args.time)?, Instant::now());
        let mut host_allocations = 0;
        while begin.elapsed() < time && steps.len() < 1 << 16 && !interrupt::caught() || steps.is_empty() {
            let (start, before) = (Instant::now(), alloc::allocations());
            enqueue()?;
            issues.push(start.elapsed().as_secs_f64() * 1e6);
            stream.synchronize()?;
            host_allocations += alloc::allocations() - before;
            steps.push(start.elapsed().as_secs_f64() * 1e6);
        }
        let count = steps.len() as f64;
        let median = |times: &mut Vec<f64>| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        };
        Ok(Row {
            batch: self.plan.decode().shape.batch,
            heads: self.plan.decode().shape.num_heads,
            way,
            us: median(&mut steps),
            host_us: median(&mut issues),
            device_allocations: device_allocations as f64 / (count + 3.0),
            host_allocations: host_allocations as f64 / count,
        })
    }
}

fn table(rows: &[Row]) -> String {
    let heading = ["batch", "heads", "way", "us per step", "host us", "device allocations", "host allocations"];
    let lines = rows.iter().map(|row| {
        let way = match row.way {
            Way::AllocatePerCall => "allocating per call",
            Way::Reserved => "reserved scratch",
            Way::FullGraph => "FULL graph",
        };
        vec![
            row.batch.to_string(),
            row.heads.to_string(),
            way.to_owned(),
            text::quantity(row.us),
            text::quantity(row.host_us),
            format!("{:.0}", row.device_allocations),
            format!("{:.0}", row.host_allocations),
        ]
    });
    text::table(&std::iter::once(heading.map(str::to_owned).to_vec()).chain(lines).collect::<Vec<_>>(), 3)
}

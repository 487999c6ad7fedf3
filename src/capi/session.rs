//! Sessions: what an engine holds. Everything reserved once, graphs captured through the engine's callback, steps replayed.

use std::cell::Cell;
use std::ffi::{CString, c_char, c_void};
use std::fmt::Write;
use std::sync::{Mutex, PoisonError, TryLockError};

use super::args::{array, block, naming, out_block, out_pointer, read_block, size};
use super::config::{config, lw_session_config, mode_number};
use super::device::{self, Opened, lw_device, on};
use super::status::{Failure, guard, lw_status, set_last_error};
use super::step::{Erased as ErasedStep, lw_step};
use crate::backend::GraphBackend;
use crate::error::{Error, Result};
use crate::session::{CaptureReport, DecodeSession, Step, StepBatch, StepReport};
use crate::stream::Stream;

/// What a session is.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct lw_session_info {
    /// `sizeof(lw_session_info)`, set by the caller.
    pub struct_size: usize,
    /// Device bytes reserved: scratch and step inputs.
    pub reserved_bytes: u64,
    /// Device bytes that captured graphs hold, as far as the driver tells.
    pub graph_bytes: u64,
    /// The raw stream that steps are enqueued on.
    pub stream: *mut c_void,
    /// Graphs that there are keys for; `lw_session_capture` captures them.
    pub num_graphs: i32,
    /// The `lw_graph_mode` that could be had.
    pub graph_mode: i32,
}

/// What `lw_session_capture` did.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct lw_capture_report {
    /// `sizeof(lw_capture_report)`, set by the caller.
    pub struct_size: usize,
    /// Graphs captured now.
    pub num_captured: i64,
    /// Sizes that could not be captured; their batches use the next larger graph, or run eagerly.
    pub num_failed: i64,
    /// Device bytes that the new graphs hold, as far as the driver tells.
    pub graph_bytes: u64,
}

/// The sequences of one step. Everything is on the host and free again when the call returns. Clear it, then fill it in.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct lw_step_batch {
    /// `sizeof(lw_step_batch)`.
    pub struct_size: usize,
    /// Decoding sequences; 0 is allowed.
    pub num_seqs: i64,
    /// Query tokens per decoding sequence: 1, or 1 plus the drafts to verify.
    pub query_len: i64,
    /// Cached tokens of each decoding sequence, this step's own included, `[num_seqs]`.
    pub seq_lens: *const i32,
    /// Page ids of each decoding sequence, in order, `[num_seqs, table_width]`; what lies behind a sequence's pages may be anything.
    pub block_table: *const i32,
    /// Columns of `block_table`.
    pub table_width: i64,
    /// From row to row of `block_table`, in elements; 0 for packed.
    pub table_stride: i64,
    /// Further tokens that the engine handles itself in this step (prefill); with any, the batch is mixed.
    pub prefill_tokens: i64,
    /// Requests that those belong to.
    pub prefill_reqs: i64,
}

/// How a step was served.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct lw_step_report {
    /// `sizeof(lw_step_report)`, set by the caller.
    pub struct_size: usize,
    /// Tokens that the step ran with, padding included.
    pub num_tokens: i64,
    /// Tokens of padding among them.
    pub padding: i64,
    /// `LW_GRAPH_FULL` if a graph was replayed; otherwise what the engine may do around the attention, which ran eagerly:
    /// `LW_GRAPH_PIECEWISE` or `LW_GRAPH_NONE`.
    pub mode: i32,
}

block!(lw_session_info, lw_capture_report, lw_step_batch, lw_step_report);

/// The engine's whole step: enqueues its model on the step's stream, calling `lw_step_decode` once per layer, and returns 0, or
/// anything else to give the step up. It is called eagerly and while graphs are captured. It must not throw, jump out or keep `step`.
pub type lw_enqueue_fn = Option<unsafe extern "C" fn(user: *mut c_void, step: *mut lw_step) -> i32>;

/// Decode attention of an engine. It serves one call at a time.
pub struct lw_session {
    running: Mutex<Box<dyn Erased>>,
    reasons: CString,
}

/// A session whose backend is known at run time.
trait Erased: Send {
    fn info(&self) -> lw_session_info;
    fn capture(&mut self, engine: &Engine) -> Result<CaptureReport>;
    /// # Safety
    /// The batch's pointers are as [`lw_step_batch`] says.
    unsafe fn step(&mut self, batch: &lw_step_batch, engine: &Engine) -> Result<StepReport>;
    fn synchronize(&self) -> Result<()>;
}

/// The caller's callback.
struct Engine {
    enqueue: unsafe extern "C" fn(user: *mut c_void, step: *mut lw_step) -> i32,
    user: *mut c_void,
    returned: Cell<i32>,
}

const ENQUEUE: &str = "enqueue";

impl Engine {
    /// # Safety
    /// `enqueue` is NULL or may be called with `user` and a step.
    unsafe fn new(enqueue: lw_enqueue_fn, user: *mut c_void) -> Result<Self> {
        let enqueue = enqueue.ok_or_else(|| Error::argument(ENQUEUE, "NULL"))?;
        Ok(Self { enqueue, user, returned: Cell::new(0) })
    }

    fn call<B: GraphBackend>(&self, step: &mut Step<'_, B>) -> Result<()> {
        let mut erased: &mut dyn ErasedStep = step;
        // SAFETY: the promise of `new`; the step lives until the callback returns, which keeps nothing of it.
        self.returned.set(unsafe { (self.enqueue)(self.user, lw_step::handle(&mut erased)) });
        match self.returned.get() {
            0 => Ok(()),
            code => Err(Error::argument(ENQUEUE, format!("the callback returned {code}"))),
        }
    }

    /// An error that the callback asked for is told apart from others.
    fn failure(&self, error: Error) -> Failure {
        match error {
            Error::Argument { arg: ENQUEUE, .. } => Failure::Callback(self.returned.get()),
            error => error.into(),
        }
    }
}

/// One sequence's row of a caller's block table.
struct Row {
    pages: *const i32,
    width: usize,
}

// SAFETY: it is used only within the call that made it.
unsafe impl Send for Row {}

impl AsRef<[i32]> for Row {
    fn as_ref(&self) -> &[i32] {
        // SAFETY: made by `step` from a table that is there until that call returns.
        unsafe { std::slice::from_raw_parts(self.pages, self.width) }
    }
}

struct Running<B: GraphBackend> {
    session: DecodeSession<B>,
    // Kept, so that a step allocates nothing.
    rows: Vec<Row>,
}

impl<B: GraphBackend> Erased for Running<B> {
    fn info(&self) -> lw_session_info {
        let session = &self.session;
        let raw = session.stream().backend().raw_stream(session.stream().raw());
        lw_session_info {
            struct_size: 0,
            reserved_bytes: session.reserved_bytes() as u64,
            graph_bytes: session.graph_bytes() as u64,
            stream: std::ptr::without_provenance_mut(raw as usize),
            num_graphs: session.dispatcher().keys().len() as i32,
            graph_mode: mode_number(session.resolved().mode) as i32,
        }
    }

    fn capture(&mut self, engine: &Engine) -> Result<CaptureReport> {
        self.session.capture(|step| engine.call(step))
    }

    unsafe fn step(&mut self, batch: &lw_step_batch, engine: &Engine) -> Result<StepReport> {
        let Self { session, rows } = self;
        let num_seqs = size("num_seqs", batch.num_seqs)?;
        let limit = session.config().max_num_seqs;
        if num_seqs > limit {
            let what = "sequences of a step (max_num_seqs)";
            return Err(Error::Capacity { what, asked: num_seqs, limit });
        }
        let width = size("table_width", batch.table_width)?;
        let stride = if batch.table_stride == 0 { width } else { size("table_stride", batch.table_stride)? };
        let entries = stride.checked_mul(num_seqs).ok_or_else(|| Error::argument("table_stride", "overflows"))?;
        // SAFETY: the caller's promises. Not all of the last row's stride need be there, so no slice of the table is made.
        let seq_lens = unsafe { array("seq_lens", batch.seq_lens, num_seqs)? };
        let table = out_pointer("block_table", batch.block_table.cast_mut());
        if entries > 0 && (table.is_err() || entries > isize::MAX as usize / size_of::<i32>() || width > stride) {
            let problem = format!("{:p} of {num_seqs} rows of {width}, {stride} apart", batch.block_table);
            return Err(Error::argument("block_table", problem));
        }
        rows.clear();
        for seq in 0..num_seqs {
            let dangling = std::ptr::NonNull::dangling().as_ptr();
            let pages = if width == 0 { dangling } else { batch.block_table.wrapping_add(seq * stride) };
            rows.push(Row { pages, width });
        }
        let batch = StepBatch {
            query_len: size("query_len", batch.query_len)?,
            seq_lens,
            block_tables: rows,
            prefill_tokens: size("prefill_tokens", batch.prefill_tokens)?,
            prefill_reqs: size("prefill_reqs", batch.prefill_reqs)?,
        };
        session.step(&batch, |step| engine.call(step))
    }

    fn synchronize(&self) -> Result<()> {
        self.session.synchronize()
    }
}

/// # Safety
/// As [`lw_session_create`].
unsafe fn create<B: GraphBackend>(opened: &Opened<B>, args: &lw_session_config) -> Result<lw_session> {
    // SAFETY: the caller's promises.
    let (config, stream) = unsafe {
        let stream = match args.stream.addr() {
            0 => Stream::new(&opened.backend)?,
            raw => Stream::from_raw(&opened.backend, raw as u64).map_err(naming("stream"))?,
        };
        (config(args)?, stream)
    };
    let rows = Vec::with_capacity(config.max_num_seqs.min(1 << 16));
    let session = DecodeSession::with_builders(stream, config, Vec::new())?;
    let reasons = session.resolved().because.iter().fold(String::new(), |mut text, reason| {
        let _ = writeln!(text, "{reason}");
        text
    });
    let reasons = CString::new(reasons.replace('\0', " ")).unwrap_or_default();
    Ok(lw_session { running: Mutex::new(Box::new(Running { session, rows })), reasons })
}

/// A caller's session.
///
/// # Safety
/// `session` is NULL or a session that lives for as long as the result is used.
unsafe fn session<'a>(session: *const lw_session) -> Result<&'a lw_session> {
    // SAFETY: the caller's promise.
    unsafe { session.as_ref() }.ok_or_else(|| Error::argument("session", "NULL: lw_session_create makes one"))
}

impl lw_session {
    /// Does something with the session, if nobody is using it.
    fn with<T>(&self, work: impl FnOnce(&mut dyn Erased) -> Result<T, Failure>) -> Result<T, Failure> {
        let mut running = match self.running.try_lock() {
            Ok(running) => running,
            Err(TryLockError::Poisoned(poisoned)) => PoisonError::into_inner(poisoned),
            Err(TryLockError::WouldBlock) => {
                let problem = "in use: by another thread, or by the callback that makes this call";
                return Err(Error::argument("session", problem).into());
            }
        };
        work(&mut **running)
    }
}

/// Makes a session: reserves everything for the declared maxima, loads every kernel that a step may take, and resolves which graph mode
/// can be had. Close it with `lw_session_close`.
///
/// `LW_ERROR_ARGUMENT` naming the field, `LW_ERROR_UNSUPPORTED`, `LW_ERROR_COMPILE`, `LW_ERROR_OUT_OF_MEMORY`, `LW_ERROR_GRAPH` where the mode
/// cannot be had.
///
/// # Safety
/// `device` is open, `config` is NULL or a block of its size with the array that it says, `session` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lw_session_create(
    device: *const lw_device,
    config: *const lw_session_config,
    session: *mut *mut lw_session,
) -> lw_status {
    guard(|| {
        // SAFETY: the caller's promises.
        unsafe {
            let device = device::device(device)?;
            let config = read_block("config", config)?;
            let to = out_pointer("session", session)?;
            let made = on!(device, opened => create(opened, &config))?;
            to.write(Box::into_raw(Box::new(made)));
        }
        Ok(())
    })
}

/// Waits for a session's work and frees it with its graphs. NULL is ignored, and so is a session in use, as `lw_last_error` then
/// says.
///
/// # Safety
/// `session` is NULL or was created and not closed before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lw_session_close(session: *mut lw_session) {
    if session.is_null() {
        return;
    }
    guard(|| {
        // SAFETY: the caller's promise: it is there.
        unsafe { &*session }.with(|_| Ok(()))?;
        // SAFETY: it came from `lw_session_create`, by the caller's promise for the last time.
        drop(unsafe { Box::from_raw(session) });
        Ok(())
    });
}

/// What the session is. `info->struct_size` must be set.
///
/// # Safety
/// `session` lives; `info` is NULL or can be read and written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lw_session_get_info(session: *const lw_session, info: *mut lw_session_info) -> lw_status {
    guard(|| {
        // SAFETY: the caller's promises.
        unsafe {
            let found = self::session(session)?.with(|running| Ok(running.info()))?;
            out_block("info", info, found)?;
        }
        Ok(())
    })
}

/// How the graph mode came about, one sentence a line, UTF-8. Valid as long as the session; empty for NULL.
///
/// # Safety
/// `session` is NULL or lives.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lw_session_reasons(session: *const lw_session) -> *const c_char {
    // SAFETY: the caller's promise.
    unsafe { session.as_ref() }.map_or(c"".as_ptr(), |session| session.reasons.as_ptr())
}

/// Captures a full graph for every size that has none yet, calling `enqueue` once per size and once before, eagerly, on padding alone.
/// A size that fails leaves the others usable: it is counted in `report`, and `lw_last_error` has the first one's text.
/// Pointers that `enqueue` gives to this library must stay valid as long as the session.
///
/// `LW_ERROR_CALLBACK` where the eager run fails, `LW_ERROR_DRIVER`.
///
/// # Safety
/// `session` lives; `enqueue` is NULL or may be called with `user`; `report` is NULL or can be read and written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lw_session_capture(
    session: *const lw_session,
    enqueue: lw_enqueue_fn,
    user: *mut c_void,
    report: *mut lw_capture_report,
) -> lw_status {
    guard(|| {
        // SAFETY: the caller's promises.
        let (session, engine) = unsafe { (self::session(session)?, Engine::new(enqueue, user)?) };
        let done = session.with(|running| running.capture(&engine).map_err(|error| engine.failure(error)))?;
        if let Some((_, first)) = done.failed.first() {
            set_last_error(&first.to_string());
        }
        if !report.is_null() {
            let made = lw_capture_report {
                struct_size: 0,
                num_captured: done.captured.len() as i64,
                num_failed: done.failed.len() as i64,
                graph_bytes: done.graph_bytes as u64,
            };
            // SAFETY: the caller's promise.
            unsafe { out_block("report", report, made)? };
        }
        Ok(())
    })
}

/// Serves one step: brings lengths, tables and slots to the device, then replays the graph that fits, or calls `enqueue` to run eagerly.
/// Returns once everything is enqueued. The session is usable after an error.
///
/// `LW_ERROR_CAPACITY` for more than was declared, `LW_ERROR_OUT_OF_RANGE` for lengths and pages, `LW_ERROR_ARGUMENT`,
/// `LW_ERROR_CALLBACK`, `LW_ERROR_DRIVER`.
///
/// # Safety
/// `session` lives; `batch` is NULL or a block of its size with the arrays that it says; `enqueue` is NULL or may be called with
/// `user`; `report` is NULL or can be read and written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lw_session_step(
    session: *const lw_session,
    batch: *const lw_step_batch,
    enqueue: lw_enqueue_fn,
    user: *mut c_void,
    report: *mut lw_step_report,
) -> lw_status {
    guard(|| {
        // SAFETY: the caller's promises.
        unsafe {
            let (session, engine) = (self::session(session)?, Engine::new(enqueue, user)?);
            let batch = read_block("batch", batch)?;
            let step = |running: &mut dyn Erased| running.step(&batch, &engine).map_err(|error| engine.failure(error));
            let served = session.with(step)?;
            if !report.is_null() {
                let made = lw_step_report {
                    struct_size: 0,
                    num_tokens: served.num_tokens as i64,
                    padding: served.padding as i64,
                    mode: mode_number(served.mode.into()) as i32,
                };
                out_block("report", report, made)?;
            }
        }
        Ok(())
    })
}

/// Waits for all enqueued steps.
///
/// `LW_ERROR_DRIVER`.
///
/// # Safety
/// `session` lives.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lw_session_synchronize(session: *const lw_session) -> lw_status {
    guard(|| {
        // SAFETY: the caller's promise.
        unsafe { self::session(session) }?.with(|running| running.synchronize().map_err(Failure::from))
    })
}

//! Every way a call can fail.
//!
//! A caller's mistake names the argument and the way to mend it; a driver's failure names the driver call. Nothing in
//! this crate panics on bad input, a missing library, memory running out or a failed capture.

use std::panic::Location;
use std::path::PathBuf;

use crate::graph::{CaptureState, GraphMode, GraphSupport, QueryLenSupport};
use crate::tensor::DType;

/// Result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong. Match on the variant; the message is for people.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An argument has a value that no call of this kind can take.
    #[error("argument `{arg}`: {problem}")]
    Argument {
        /// Name of the argument or field.
        arg: &'static str,
        /// What is wrong with it and what would be right.
        problem: String,
    },
    /// A tensor's shape does not fit the others.
    #[error("tensor `{arg}` has shape {got:?}, expected {expected}")]
    Shape {
        /// Name of the tensor.
        arg: &'static str,
        /// The shape wanted, in words or numbers.
        expected: String,
        /// The shape given.
        got: Vec<usize>,
    },
    /// A tensor's element type is not one that this call takes.
    #[error("tensor `{arg}` is {got}, expected one of {expected:?}")]
    DType {
        /// Name of the tensor.
        arg: &'static str,
        /// Types that would do.
        expected: &'static [DType],
        /// The type given.
        got: DType,
    },
    /// A block table names a page that the cache does not have, inside the pages that a sequence uses.
    #[error("block_table[{seq}, {slot}] = {page}, but the cache has pages 0..{num_pages}")]
    PageOutOfRange {
        /// Row of the block table.
        seq: usize,
        /// Column of the block table.
        slot: usize,
        /// The page id found there.
        page: i32,
        /// Pages in the cache.
        num_pages: usize,
    },
    /// A sequence is longer than `max_seq_len` or than its row of the block table can address, or negative.
    #[error(
        "seq_lens[{seq}] = {len}, but 0..={capacity} tokens are possible: the lesser of `max_seq_len` and a block table row's pages; raise the one that is less, or shorten the sequence"
    )]
    SeqLenOutOfRange {
        /// Index of the sequence.
        seq: usize,
        /// The length found there.
        len: i64,
        /// Most tokens possible: the lesser of `max_seq_len` and what one row of the table can address.
        capacity: usize,
    },
    /// More was asked than was reserved when the object was made.
    #[error("{what}: {asked} asked, {limit} reserved; construct with a larger maximum")]
    Capacity {
        /// What ran out.
        what: &'static str,
        /// How much was asked.
        asked: usize,
        /// How much there is.
        limit: usize,
    },
    /// The backend or its kernels cannot do this on this device.
    #[error("{backend} ({arch}) does not support {what}")]
    Unsupported {
        /// Name of the backend.
        backend: &'static str,
        /// Architecture of the device.
        arch: String,
        /// What was asked, and what to do instead.
        what: String,
    },
    /// A vendor's library is not there or too old.
    #[error("{backend}: {library} is unavailable: {reason}")]
    Unavailable {
        /// Name of the backend.
        backend: &'static str,
        /// The library looked for.
        library: &'static str,
        /// What was tried and what each try said.
        reason: String,
    },
    /// The library is there, the device is not.
    #[error("{backend}: no device {index}: {reason}")]
    NoDevice {
        /// Name of the backend.
        backend: &'static str,
        /// The index asked for.
        index: usize,
        /// How many devices there are, or what the driver said.
        reason: String,
    },
    /// A locked workspace would have to grow. Its contents and its buffers are unchanged.
    #[error(
        "workspace slot {slot} is locked at {have} bytes but {need} were asked at {caller}; \
         reserve the largest plan before locking"
    )]
    WorkspaceLocked {
        /// The slot asked for.
        slot: usize,
        /// Bytes asked for, rounded as the workspace rounds them.
        need: usize,
        /// Bytes the slot has.
        have: usize,
        /// Who asked.
        caller: &'static Location<'static>,
    },
    /// A workspace slot would have to grow while a captured graph uses its buffer. Its contents and its buffer are unchanged.
    #[error(
        "workspace slot {slot} has {have} bytes in use by a captured graph but {need} were asked at {caller}; \
         drop the graphs that use it, or reserve the largest plan before capturing"
    )]
    WorkspaceInUse {
        /// The slot asked for.
        slot: usize,
        /// Bytes asked for, rounded as the workspace rounds them.
        need: usize,
        /// Bytes the slot has.
        have: usize,
        /// Who asked.
        caller: &'static Location<'static>,
    },
    /// The query tokens of a block cannot be shared out evenly over its requests.
    #[error(
        "{num_rows} query rows cannot be shared out evenly over {num_reqs} requests; a decode block has one query length"
    )]
    UnevenRows {
        /// Query tokens of the block.
        num_rows: usize,
        /// Requests of the block.
        num_reqs: usize,
    },
    /// A causal block of several query tokens meets a cache sharded over ranks.
    #[error(
        "causal rows of {query_len} query tokens cannot be laid out from one length per request when the cache is sharded over \
         {dcp_size} ranks; give each row its own local length, or decode one token at a time"
    )]
    CausalDcp {
        /// Query tokens per request.
        query_len: usize,
        /// Ranks of decode context parallelism.
        dcp_size: usize,
    },
    /// No multiple of the query length fits under the largest capture size.
    #[error(
        "no capture size up to {max_size} holds a query of {query_len} tokens; raise the largest size or draft fewer tokens"
    )]
    NoCaptureSizes {
        /// Largest size allowed.
        max_size: usize,
        /// Query tokens per sequence of a decode batch.
        query_len: usize,
    },
    /// Device memory ran out. Nothing was kept of the failed allocation.
    #[error("{backend}: out of memory while allocating {bytes} bytes for {purpose}")]
    OutOfMemory {
        /// Name of the backend.
        backend: &'static str,
        /// Bytes asked for.
        bytes: usize,
        /// What they were for.
        purpose: &'static str,
    },
    /// A kernel could not be compiled at run time.
    #[error("kernel {kernel} for {arch} does not compile:\n{log}")]
    Compile {
        /// The kernel variant.
        kernel: String,
        /// Target architecture.
        arch: String,
        /// The compiler's log.
        log: String,
    },
    /// A graph call came in a state that does not allow it. The state is unchanged.
    #[error("{call} is not possible while the stream is {state}")]
    GraphState {
        /// The call.
        call: &'static str,
        /// The state it found.
        state: CaptureState,
    },
    /// A capture ended without a usable graph. The stream is out of capture and usable.
    #[error("capture failed: {reason}")]
    CaptureFailed {
        /// Why.
        reason: String,
    },
    /// A builder's own capture check: the batch holds longer queries than its decode path takes.
    ///
    /// vLLM meets this as a bare assertion (`build_for_cudagraph_capture`, second assertion; vLLM PR 47144).
    #[error("builder `{builder}` cannot capture this batch: max_query_len {max_query_len} > threshold {threshold}")]
    CaptureQueryTooLong {
        /// Name of the builder.
        builder: String,
        /// Longest query of the batch, in tokens.
        max_query_len: usize,
        /// Longest query that the builder's decode path takes.
        threshold: usize,
    },
    /// A builder's own capture check: more requests than decode tokens could fill.
    #[error(
        "builder `{builder}` cannot capture this batch: {num_reqs} requests > {num_tokens} tokens * threshold {threshold}; \
         keep capture sizes at or below max_num_seqs"
    )]
    CaptureTooManyRequests {
        /// Name of the builder.
        builder: String,
        /// Requests in the batch.
        num_reqs: usize,
        /// Tokens in the batch.
        num_tokens: usize,
        /// Longest query that the builder's decode path takes.
        threshold: usize,
    },
    /// A builder claims more graph support than its kernel's query lengths allow.
    #[error(
        "builder `{builder}` claims graph support {claimed} but its kernel takes query lengths {query_len_support}, \
         which allows {allowed} at most"
    )]
    InconsistentGraphSupport {
        /// Name of the builder.
        builder: String,
        /// The support claimed.
        claimed: GraphSupport,
        /// What the kernel takes.
        query_len_support: QueryLenSupport,
        /// The most that could be claimed.
        allowed: GraphSupport,
    },
    /// The graph mode asked for cannot be had with this support, and nothing weaker was allowed in its place.
    #[error("graph mode {requested} is not possible: builder `{builder}` has graph support {support}; try {instead}")]
    GraphModeUnsupported {
        /// The mode asked for.
        requested: GraphMode,
        /// The builder that set the minimum.
        builder: String,
        /// Its support.
        support: GraphSupport,
        /// A mode that would work.
        instead: GraphMode,
    },
    /// The vendor's driver or runtime refused a call.
    #[error("{backend}: {call} failed with {code} ({message})")]
    Driver {
        /// Name of the backend.
        backend: &'static str,
        /// The driver's function.
        call: &'static str,
        /// The driver's error number.
        code: i32,
        /// The driver's name and text for it.
        message: String,
    },
    /// A file could not be read or written.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file or text could be read but not understood.
    #[error("{what}: {place}: {problem}")]
    Parse {
        /// What was being read (a file's name, or what kind of text).
        what: String,
        /// Where in it: a line, a key.
        place: String,
        /// What is wrong there, and what was expected.
        problem: String,
    },
}

impl Error {
    /// An [`Error::Argument`], from anything that prints.
    pub fn argument(arg: &'static str, problem: impl Into<String>) -> Self {
        Self::Argument { arg, problem: problem.into() }
    }
}

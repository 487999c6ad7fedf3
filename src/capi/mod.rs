//! The C ABI: what `include/latentwave.h` declares. Build it with `cargo rustc --release --lib --crate-type cdylib --features
//! capi` (add `,cuda` or `,rocm`; `staticlib` for an archive). `include/latentwave.h` is made of these files by cbindgen, and a
//! test says when it is not.
//!
//! - **Status.** A call returns an [`lw_status`]; [`lw_last_error`] has the text of the last failure on the calling thread. No
//!   panic and no exception crosses the boundary. A call that fails because of its arguments has enqueued nothing.
//! - **Argument blocks** are plain structures that begin with `struct_size`, which the caller sets to `sizeof` the structure and so
//!   says which version of it is meant: fields that a caller does not know are taken as 0, and a later header's fields must be 0
//!   for an older library. A field of 0 means the usual value wherever there is one, so clear a structure before filling it.
//! - **Pointers** to tensors are device pointers of the device that the call names (host pointers on the host backend), aligned
//!   to their elements. Strides count elements; a stride of 0 means packed, and the last dimension is always packed.
//! - **Streams** are the caller's raw handles (`CUstream`, `cudaStream_t`, `hipStream_t`; NULL is the default stream, and the only one on the
//!   host). Work is only enqueued, so it can be captured by anyone's graph; the host runs it at once. Memory must stay valid until
//!   that work has ended and, if it was captured, as long as the graph; so must the device handle, whose kernels the graph holds.
//! - **Threads.** A device may be used by any number of threads at once. A session serves one call at a time and refuses a
//!   second ([`LW_ERROR_ARGUMENT`](lw_status::LW_ERROR_ARGUMENT)); which thread makes it does not matter. A step belongs to the callback that it was given to.
//! - **Handles** are freed once, by their own function, after the last call that uses them; NULL is ignored there and an error
//!   elsewhere.
#![allow(non_camel_case_types)]

mod args;
mod cache;
mod config;
mod decode;
mod device;
mod merge;
mod session;
mod status;
mod step;

pub use args::{lw_dtype, lw_kv_cache, lw_layer, lw_split};
pub use cache::{lw_cache_gather, lw_cache_gather_args, lw_cache_write, lw_cache_write_args};
pub use config::{lw_graph_mode, lw_session_config};
pub use decode::{lw_decode, lw_decode_args, lw_decode_plan, lw_decode_workspace_bytes};
pub use device::{
    lw_backend, lw_device, lw_device_close, lw_device_count, lw_device_get_info, lw_device_info, lw_device_open,
};
pub use merge::{lw_dcp_combine, lw_dcp_combine_args, lw_merge_states, lw_merge_states_args};
pub use session::{
    lw_capture_report, lw_enqueue_fn, lw_session, lw_session_capture, lw_session_close, lw_session_create,
    lw_session_get_info, lw_session_info, lw_session_reasons, lw_session_step, lw_session_synchronize, lw_step_batch,
    lw_step_report,
};
pub use status::{LW_ABI_VERSION, lw_abi_version, lw_last_error, lw_status, lw_status_name, lw_version};
pub use step::{
    lw_step, lw_step_decode, lw_step_decode_args, lw_step_get_info, lw_step_info, lw_step_write_cache,
    lw_step_write_cache_args,
};

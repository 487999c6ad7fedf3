//! The C ABI, called as C calls it: equal to the Rust API bit by bit, on the caller's streams and in the caller's graphs; sessions
//! through callbacks; and no argument, however absurd, that does more than return an error.
#![cfg(feature = "capi")]

#[path = "capi/arguments.rs"]
mod arguments;
mod common;
#[path = "capi/decode.rs"]
mod decode;
mod devices;
#[path = "capi/other.rs"]
mod other;
#[path = "capi/session.rs"]
mod session;

use std::ffi::{CStr, c_void};
use std::ptr::{null_mut, without_provenance_mut};

use common::Problem;
use latentwave::capi::lw_status::LW_OK;
use latentwave::capi::*;
use latentwave::{Backend, DType, SplitPolicy, Tensor};

on_every_backend!(
    decode_equals_the_rust_api_bit_by_bit,
    layers_share_a_schedule,
    threads_share_a_device,
    strided_and_split_tensors_are_taken,
    anyones_graph_can_capture_it,
    the_cache_is_written_and_gathered,
    partial_results_are_merged,
    a_session_steps_through_a_callback,
);

use decode::{
    anyones_graph_can_capture_it, decode_equals_the_rust_api_bit_by_bit, layers_share_a_schedule,
    strided_and_split_tensors_are_taken, threads_share_a_device,
};
use other::{partial_results_are_merged, the_cache_is_written_and_gathered};
use session::a_session_steps_through_a_callback;

/// An open device, closed at the end.
struct Device(*mut lw_device);

impl Device {
    fn open<B: Backend>() -> Self {
        let backend = match B::NAME {
            "cuda" => lw_backend::LW_CUDA,
            "rocm" => lw_backend::LW_ROCM,
            _ => lw_backend::LW_HOST,
        };
        let mut device = null_mut();
        // SAFETY: the pointer can be written.
        ok(unsafe { lw_device_open(backend as i32, 0, &mut device) });
        Self(device)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: opened once and used by nobody any more.
        unsafe { lw_device_close(self.0) };
    }
}

fn last_error() -> String {
    // SAFETY: a terminated string that the next failure of this thread replaces.
    unsafe { CStr::from_ptr(lw_last_error()) }.to_str().expect("UTF-8").to_owned()
}

#[track_caller]
fn ok(status: lw_status) {
    assert_eq!(status, LW_OK, "{}", last_error());
}

fn pointer<B: Backend, T>(tensor: &Tensor<B>) -> *mut T {
    std::ptr::with_exposed_provenance_mut(tensor.addr() as usize)
}

fn raw_stream(raw: u64) -> *mut c_void {
    without_provenance_mut(raw as usize)
}

fn number(dtype: DType) -> i32 {
    (match dtype {
        DType::F32 => lw_dtype::LW_F32,
        DType::F16 => lw_dtype::LW_F16,
        DType::BF16 => lw_dtype::LW_BF16,
        DType::Fp8E4m3 => lw_dtype::LW_FP8_E4M3,
        DType::Fp8E4m3Fnuz => lw_dtype::LW_FP8_E4M3FNUZ,
        _ => lw_dtype::LW_FP8_DS_MLA,
    }) as i32
}

/// A structure with every byte 0 but its size.
fn cleared<T>() -> T {
    let size = size_of::<T>();
    // SAFETY: the structures of the ABI are numbers and raw pointers, which zeros are valid for, and begin with their size.
    unsafe {
        let mut block: T = std::mem::zeroed();
        (&raw mut block).cast::<usize>().write(size);
        block
    }
}

fn layer(problem: &Problem) -> lw_layer {
    let (split, split_value) = match problem.policy {
        SplitPolicy::MinTokens(tokens) => (lw_split::LW_SPLIT_MIN_TOKENS, tokens),
        SplitPolicy::Fixed(splits) => (lw_split::LW_SPLIT_FIXED, splits),
        SplitPolicy::Invariant(tokens) => (lw_split::LW_SPLIT_INVARIANT, tokens),
        _ => (lw_split::LW_SPLIT_AUTO, 0),
    };
    lw_layer {
        num_heads: problem.config.num_heads as i64,
        kv_lora_rank: problem.config.kv_lora_rank as i64,
        qk_rope_head_dim: problem.config.qk_rope_head_dim as i64,
        page_size: problem.config.page_size as i64,
        split_value: split_value as i64,
        split: split as i32,
        q_dtype: number(problem.q_dtype),
        kv_dtype: number(problem.kv_dtype),
        sm_scale: problem.config.sm_scale,
        softcap: problem.config.softcap,
        kv_scale: problem.kv_scale,
    }
}

/// A joined cache, packed.
fn pages<B: Backend>(cache: &Tensor<B>) -> lw_kv_cache {
    let num_pages = cache.shape()[0] as i64;
    lw_kv_cache { kv: pointer(cache), k_rope: null_mut(), num_pages, kv_strides: [0; 2], k_rope_strides: [0; 2] }
}

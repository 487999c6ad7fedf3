//! Sessions, whose engine is a C callback.

use std::ffi::{CStr, c_void};
use std::ptr::null_mut;

use half::bf16;
use latentwave::capi::*;
use latentwave::testing::{SplitMix64, check_close};
use latentwave::{DType, GraphBackend, Host, MlaConfig, Tensor};

use crate::common::{self, Problem};
use crate::{Device, cleared, last_error, layer, ok, pages, pointer};

const MAX_SEQS: usize = 4;
const MAX_LEN: i32 = 300;

/// What the callback is given.
struct Engine {
    decode: lw_step_decode_args,
    write: lw_step_write_cache_args,
    calls: usize,
    /// What to return instead of 0.
    refuse: i32,
    /// A session to call from within its own callback.
    again: *mut lw_session,
    again_said: Option<lw_status>,
}

unsafe extern "C" fn enqueue(user: *mut c_void, step: *mut lw_step) -> i32 {
    // SAFETY: the tests hand over an engine that nothing else uses meanwhile, and its tensors outlive the session.
    unsafe {
        let engine = &mut *user.cast::<Engine>();
        engine.calls += 1;
        let mut info: lw_step_info = cleared();
        ok(lw_step_get_info(step, &mut info));
        assert!(info.num_seqs * info.query_len <= info.num_tokens && info.num_seqs <= MAX_SEQS as i64);
        assert!(!info.seq_lens.is_null() && !info.block_table.is_null() && !info.slot_mapping.is_null());
        if !engine.again.is_null() {
            engine.again_said = Some(lw_session_synchronize(engine.again));
        }
        for status in [lw_step_write_cache(step, &engine.write), lw_step_decode(step, &engine.decode)] {
            if status != lw_status::LW_OK {
                return status as i32;
            }
        }
        engine.refuse
    }
}

/// A session with its one layer's tensors. It is closed first.
struct Running<B: GraphBackend> {
    session: *mut lw_session,
    engine: Box<Engine>,
    q: Tensor<B>,
    cache: Tensor<B>,
    out: Tensor<B>,
    _rows: [Tensor<B>; 2],
    problem: Problem,
}

impl<B: GraphBackend> Drop for Running<B> {
    fn drop(&mut self) {
        // SAFETY: created once.
        unsafe { lw_session_close(self.session) };
    }
}

fn running<B: GraphBackend>(backend: &B, device: &Device) -> Running<B> {
    let mla = MlaConfig::deepseek(16, 16);
    let problem = Problem::random(1, mla, (DType::BF16, DType::BF16), 1, &[MAX_LEN; MAX_SEQS]);
    let numbers = SplitMix64::new(9);
    let random = |shape: [usize; 2], at: u64| {
        Tensor::from_fn(backend, shape, |i| bf16::from_f64(numbers.grid(at + i as u64))).unwrap()
    };
    let (q, kv_c, k_pe) =
        (random([MAX_SEQS, 16 * 576], 0), random([MAX_SEQS, 512], 1 << 20), random([MAX_SEQS, 64], 1 << 21));
    let cache = common::tensor(backend, [problem.num_pages(), 16, 576], DType::BF16, &problem.cache);
    let out = Tensor::zeros(backend, [MAX_SEQS, 16, 512], DType::BF16).unwrap();
    let config = lw_session_config {
        layer: layer(&problem),
        max_num_seqs: MAX_SEQS as i64,
        max_seq_len: i64::from(MAX_LEN),
        num_pages: problem.num_pages() as i64,
        ..cleared()
    };
    let mut session = null_mut();
    // SAFETY: the device is open and the pointers are valid.
    ok(unsafe { lw_session_create(device.0, &config, &mut session) });
    let cache_args = pages(&cache);
    let decode = lw_step_decode_args { cache: cache_args, q: pointer(&q), out: pointer(&out), ..cleared() };
    let write = lw_step_write_cache_args { cache: cache_args, kv_c: pointer(&kv_c), k_pe: pointer(&k_pe), ..cleared() };
    let engine = Box::new(Engine { decode, write, calls: 0, refuse: 0, again: null_mut(), again_said: None });
    Running { session, engine, q, cache, out, _rows: [kv_c, k_pe], problem }
}

impl<B: GraphBackend> Running<B> {
    fn step(&mut self, lens: &[i32], report: &mut lw_step_report) -> lw_status {
        let batch = lw_step_batch {
            num_seqs: lens.len() as i64,
            query_len: 1,
            seq_lens: lens.as_ptr(),
            block_table: self.problem.block_table.as_ptr(),
            table_width: self.problem.table_width() as i64,
            ..cleared()
        };
        let user = (&raw mut *self.engine).cast();
        // SAFETY: session, arrays and engine live.
        unsafe { lw_session_step(self.session, &batch, Some(enqueue), user, report) }
    }

    fn capture(&mut self) -> lw_capture_report {
        let mut report = cleared();
        let user = (&raw mut *self.engine).cast();
        // SAFETY: session and engine live.
        ok(unsafe { lw_session_capture(self.session, Some(enqueue), user, &mut report) });
        report
    }

    fn check(&self, backend: &B, lens: &[i32]) {
        let now = Problem {
            seq_lens: lens.to_vec(),
            block_table: self.problem.block_table[..lens.len() * self.problem.table_width()].to_vec(),
            q: common::values(backend, &self.q)[..lens.len() * 16 * 576].to_vec(),
            cache: common::bytes(backend, &self.cache),
            ..self.problem.clone()
        };
        let got = common::values(backend, &self.out.narrow(0, 0..lens.len()).unwrap());
        check_close("out", &got, &now.reference().0, &common::tolerance(DType::BF16)).unwrap();
    }
}

pub(crate) fn a_session_steps_through_a_callback<B: GraphBackend>(backend: &B) {
    let device = Device::open::<B>();
    let mut running = running(backend, &device);
    let mut info: lw_session_info = cleared();
    // SAFETY: the session lives and the pointer is valid; the text lives as long as the session.
    let reasons = unsafe {
        ok(lw_session_get_info(running.session, &mut info));
        CStr::from_ptr(lw_session_reasons(running.session)).to_str().unwrap()
    };
    assert!(info.num_graphs > 0 && info.reserved_bytes > 0 && !reasons.is_empty());
    assert_eq!(info.graph_mode, lw_graph_mode::LW_GRAPH_FULL_AND_PIECEWISE as i32);

    let mut report: lw_step_report = cleared();
    ok(running.step(&[30, 7], &mut report));
    assert_ne!(report.mode, lw_graph_mode::LW_GRAPH_FULL as i32, "nothing was captured yet");
    running.check(backend, &[30, 7]);

    let captured = running.capture();
    assert!(captured.num_captured > 0 && captured.num_failed == 0, "{}", last_error());
    let calls = running.engine.calls;
    for lens in [&[31, 8, 1][..], &[300, 1, 2, 299], &[16]] {
        running.out.fill_bytes(backend, 0xFF).unwrap();
        ok(running.step(lens, &mut report));
        // SAFETY: the session lives.
        ok(unsafe { lw_session_synchronize(running.session) });
        assert_eq!(report.mode, lw_graph_mode::LW_GRAPH_FULL as i32, "{lens:?}");
        running.check(backend, lens);
    }
    assert_eq!(running.engine.calls, calls, "replays do not call the engine");
}

#[test]
fn a_callback_that_fails_gives_the_step_up_and_the_session_goes_on() {
    let backend = Host::new();
    let device = Device::open::<Host>();
    let mut running = running(&backend, &device);
    let mut report = cleared();

    running.engine.refuse = 77;
    assert_eq!(running.step(&[5], &mut report), lw_status::LW_ERROR_CALLBACK);
    assert!(last_error().contains("77"), "{}", last_error());
    running.engine.refuse = 0;

    // A call of this library that failed inside the callback is told along.
    let q = std::mem::replace(&mut running.engine.decode.q, null_mut::<u8>().cast());
    assert_eq!(running.step(&[5], &mut report), lw_status::LW_ERROR_CALLBACK);
    assert!(last_error().contains("`q`"), "{}", last_error());
    running.engine.decode.q = q;

    assert_eq!(running.step(&[MAX_LEN + 1], &mut report), lw_status::LW_ERROR_OUT_OF_RANGE);
    assert_eq!(running.step(&[1; MAX_SEQS + 1], &mut report), lw_status::LW_ERROR_CAPACITY);
    ok(running.step(&[5, 6], &mut report));
    running.check(&backend, &[5, 6]);
}

#[test]
fn a_session_refuses_a_second_call_from_its_own_callback() {
    let backend = Host::new();
    let device = Device::open::<Host>();
    let mut running = running(&backend, &device);
    running.engine.again = running.session;
    ok(running.step(&[5], &mut cleared()));
    assert_eq!(running.engine.again_said, Some(lw_status::LW_ERROR_ARGUMENT));
    assert!(last_error().contains("in use"), "{}", last_error());
}

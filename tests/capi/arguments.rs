//! Arguments that cannot be: each call returns an error that names the argument, touches nothing and does not crash.

use std::ffi::c_void;
use std::ptr::{null, null_mut, without_provenance, without_provenance_mut};

use latentwave::capi::lw_status::*;
use latentwave::capi::*;
use latentwave::testing::SplitMix64;
use latentwave::{DType, Host, MlaConfig};

use crate::common::Problem;
use crate::decode::Call;
use crate::{Device, cleared, last_error, layer, ok};

fn problem() -> Problem {
    Problem::random(1, MlaConfig::deepseek(2, 16), (DType::F32, DType::F32), 1, &[40, 3])
}

/// Changes one thing about a valid call.
type Change = fn(&mut lw_decode_args);

#[test]
fn every_bad_decode_argument_is_named() {
    let (backend, device) = (Host::new(), Device::open::<Host>());
    let call = Call::new(&backend, &device, &problem());
    let changes: &[(&str, Change)] = &[
        ("args", |a| a.struct_size = 0),
        ("args", |a| a.struct_size = 1 << 40),
        ("num_heads", |a| a.layer.num_heads = -1),
        ("num_heads", |a| a.layer.num_heads = 0),
        ("num_heads", |a| a.layer.num_heads = i64::MAX),
        ("kv_lora_rank", |a| a.layer.kv_lora_rank = i64::MIN),
        ("kv_lora_rank", |a| a.layer.kv_lora_rank = 0),
        ("qk_rope_head_dim", |a| a.layer.qk_rope_head_dim = -64),
        ("page_size", |a| a.layer.page_size = 0),
        ("page_size", |a| a.layer.page_size = i64::MAX),
        ("split", |a| a.layer.split = 9),
        ("split_value", |a| a.layer.split_value = -2),
        ("policy", |a| a.layer.split = lw_split::LW_SPLIT_FIXED as i32),
        ("policy", |a| (a.layer.split, a.layer.split_value) = (lw_split::LW_SPLIT_FIXED as i32, i64::MAX)),
        ("policy", |a| (a.layer.split, a.layer.split_value) = (lw_split::LW_SPLIT_INVARIANT as i32, 0)),
        ("q_dtype", |a| a.layer.q_dtype = 0),
        ("q_dtype", |a| a.layer.q_dtype = i32::MIN),
        ("q", |a| a.layer.q_dtype = lw_dtype::LW_FP8_E4M3 as i32),
        ("kv_dtype", |a| a.layer.kv_dtype = 99),
        ("sm_scale", |a| a.layer.sm_scale = 0.0),
        ("sm_scale", |a| a.layer.sm_scale = f32::NAN),
        ("softcap", |a| a.layer.softcap = f32::INFINITY),
        ("kv_scale", |a| a.layer.kv_scale = -1.0),
        ("kv_scale", |a| a.layer.kv_scale = 2.0),
        ("batch", |a| a.batch = -1),
        ("batch", |a| a.batch = i64::MAX),
        ("workspace", |a| a.batch = i64::from(i32::MAX)),
        ("query_len", |a| a.query_len = 0),
        ("query_len", |a| a.query_len = i64::MIN),
        ("max_seq_len", |a| a.max_seq_len = -5),
        ("max_seq_len", |a| a.max_seq_len = i64::MAX),
        ("table_width", |a| a.table_width = -1),
        ("block_table", |a| a.table_width = i64::MAX),
        ("block_table", |a| a.table_width = 1 << 40),
        ("block_table", |a| a.table_stride = i64::MAX),
        ("block_table", |a| a.table_stride = -3),
        ("q", |a| a.q = null()),
        ("q", |a| a.q = without_provenance(2)),
        ("q", |a| a.q_strides = [-1, 0, 0]),
        ("q", |a| a.q_strides = [i64::MAX, 0, 0]),
        ("block_table", |a| a.block_table = null()),
        ("block_table", |a| a.block_table = without_provenance(1)),
        ("seq_lens", |a| a.seq_lens = null()),
        ("seq_lens", |a| a.seq_lens = without_provenance(usize::MAX)),
        ("out", |a| a.out = null_mut()),
        ("out", |a| a.out = a.q.cast_mut()),
        ("out", |a| a.out_strides = [i64::MAX / 2, i64::MAX / 2, i64::MAX / 2]),
        ("lse", |a| a.lse = without_provenance_mut(3)),
        ("lse", |a| a.lse = a.out.cast()),
        ("workspace", |a| a.workspace = null_mut()),
        ("workspace", |a| a.workspace_bytes = 1),
        ("workspace", |a| a.workspace = without_provenance_mut(usize::MAX)),
        ("kv", |a| a.cache.kv = null_mut()),
        ("kv", |a| a.cache.num_pages = -1),
        ("kv", |a| a.cache.num_pages = i64::MAX),
        ("kv", |a| a.cache.kv_strides = [0, i64::MAX]),
        ("k_rope", |a| a.cache.k_rope = without_provenance_mut(1)),
        ("causal", |a| a.causal = 2),
        ("scheduled", |a| a.scheduled = -1),
        ("settled", |a| a.settled = 1),
        ("settled", |a| a.settled = -1),
    ];
    for (index, (name, change)) in changes.iter().enumerate() {
        let mut args = call.args;
        change(&mut args);
        // SAFETY: the device is open and the call must not follow what is wrong.
        let status = unsafe { lw_decode(device.0, &args, null_mut()) };
        let said = last_error();
        assert_ne!(status, LW_OK, "change {index}, of {name}");
        assert_ne!(status, LW_ERROR_INTERNAL, "change {index}, of {name}: {said}");
        assert!(said.contains(&format!("`{name}`")), "change {index}, of {name}: {said}");
    }
    let bad_pages = lw_decode_args { cache: lw_kv_cache { num_pages: 1, ..call.args.cache }, ..call.args };
    // SAFETY: as above; the host sees the table and follows no page past the cache.
    assert_eq!(unsafe { lw_decode(device.0, &bad_pages, null_mut()) }, LW_ERROR_OUT_OF_RANGE);
    // SAFETY: a valid call.
    ok(unsafe { lw_decode(device.0, &call.args, null_mut()) });
}

#[test]
fn null_is_an_error_everywhere_but_for_closing() {
    let device = Device::open::<Host>();
    let d = device.0;
    let mut bytes = 0;
    let mut session = null_mut();
    let mut info: lw_device_info = cleared();
    let enqueue: lw_enqueue_fn = None;
    // SAFETY: NULL is what is tested; the other pointers are valid.
    let statuses = unsafe {
        lw_device_close(null_mut());
        lw_session_close(null_mut());
        [
            lw_device_count(0, null_mut()),
            lw_device_open(0, 0, null_mut()),
            lw_device_get_info(null(), &mut info),
            lw_device_get_info(d, null_mut()),
            lw_decode_workspace_bytes(null(), &cleared(), &mut bytes),
            lw_decode_workspace_bytes(d, null(), &mut bytes),
            lw_decode_workspace_bytes(d, &cleared(), null_mut()),
            lw_decode_plan(null(), null(), null_mut()),
            lw_decode_plan(d, null(), null_mut()),
            lw_decode(null(), &cleared(), null_mut()),
            lw_decode(d, null(), null_mut()),
            lw_cache_write(null(), &cleared(), null_mut()),
            lw_cache_write(d, null(), null_mut()),
            lw_cache_gather(null(), &cleared(), null_mut()),
            lw_cache_gather(d, null(), null_mut()),
            lw_merge_states(null(), &cleared(), null_mut()),
            lw_merge_states(d, null(), null_mut()),
            lw_dcp_combine(null(), &cleared(), null_mut()),
            lw_dcp_combine(d, null(), null_mut()),
            lw_session_create(null(), &cleared(), &mut session),
            lw_session_create(d, null(), &mut session),
            lw_session_create(d, &cleared(), null_mut()),
            lw_session_get_info(null(), null_mut()),
            lw_session_capture(null(), enqueue, null_mut(), null_mut()),
            lw_session_step(null(), &cleared(), enqueue, null_mut(), null_mut()),
            lw_session_synchronize(null()),
            lw_step_get_info(null_mut(), null_mut()),
            lw_step_decode(null_mut(), &cleared()),
            lw_step_write_cache(null_mut(), &cleared()),
        ]
    };
    for (index, status) in statuses.into_iter().enumerate() {
        assert_eq!(status, LW_ERROR_ARGUMENT, "call {index}");
    }
    assert!(session.is_null());
    // SAFETY: NULL has an empty text.
    assert_eq!(unsafe { *lw_session_reasons(null()) }, 0);
}

#[test]
fn devices_that_cannot_be_are_told_apart() {
    let mut device = null_mut();
    let mut open = |backend, index| {
        // SAFETY: the pointer is valid.
        unsafe { lw_device_open(backend, index, &mut device) }
    };
    assert_eq!(open(-1, 0), LW_ERROR_ARGUMENT);
    assert_eq!(open(3, 0), LW_ERROR_ARGUMENT);
    assert_eq!(open(0, -1), LW_ERROR_ARGUMENT);
    assert_eq!(open(0, 1), LW_ERROR_NO_DEVICE);
    for backend in [1, 2] {
        let status = open(backend, i32::MAX);
        assert!(matches!(status, LW_ERROR_NO_DEVICE | LW_ERROR_UNAVAILABLE), "{status:?}: {}", last_error());
    }
    assert!(device.is_null());
}

/// A number of which most are absurd.
fn odd(random: &SplitMix64, at: u64) -> i64 {
    const NUMBERS: [i64; 24] = [
        0,
        1,
        -1,
        2,
        3,
        7,
        16,
        64,
        255,
        512,
        575,
        576,
        4096,
        1 << 16,
        (1 << 16) + 1,
        1 << 31,
        1 << 32,
        1 << 40,
        1 << 47,
        i64::MAX,
        i64::MAX - 1,
        i64::MIN,
        i64::MIN + 1,
        i32::MAX as i64,
    ];
    NUMBERS[random.below(at, NUMBERS.len() as u64) as usize]
}

/// Structures with some fields odd at random, over pointers that are NULL: whatever their sizes, nothing may be read. What it is
/// about is arithmetic that overflows, and checks in the wrong order.
#[test]
fn structures_with_odd_numbers_are_refused() {
    let device = Device::open::<Host>();
    let (d, layer) = (device.0, layer(&problem()));
    let cache =
        lw_kv_cache { kv: null_mut(), k_rope: null_mut(), num_pages: 4, kv_strides: [0; 2], k_rope_strides: [0; 2] };
    let random = SplitMix64::new(77);
    let disturb = |round: u64, words: &mut [i64]| {
        for (at, word) in words.iter_mut().enumerate().skip(1) {
            let draw = 1024 * round + 2 * at as u64;
            if random.below(draw, 8) == 0 {
                *word = odd(&random, draw + 1);
            }
        }
    };
    macro_rules! storm {
        ($($args:ident = $valid:expr, without $($pointer:ident).+ $(, $($more:ident).+)*; $call:expr;)+) => {
            for round in 0..4000_u64 {
                $({
                    let mut $args = $valid;
                    let words = size_of_val(&$args) / 8;
                    // SAFETY: the structures are numbers and pointers, for which any bits are valid, of a multiple of 8 bytes.
                    disturb(round, unsafe { std::slice::from_raw_parts_mut((&raw mut $args).cast::<i64>(), words) });
                    $args.$($pointer).+ = null_mut::<c_void>().cast();
                    $($args.$($more).+ = null_mut::<c_void>().cast();)*
                    // SAFETY: what cannot be must not be followed.
                    let status: lw_status = unsafe { $call };
                    assert_ne!(status, LW_ERROR_INTERNAL, "round {round}: {}", last_error());
                })+
            }
        };
    }
    storm! {
        args = lw_decode_args { layer, cache, batch: 2, query_len: 1, max_seq_len: 64, table_width: 4, ..cleared() },
            without q, seq_lens, block_table, out, lse, workspace, cache.kv, cache.k_rope;
            lw_decode(d, &args, null_mut());
        args = lw_cache_write_args { layer, cache, num_tokens: 3, ..cleared() },
            without kv_c, k_pe, slot_mapping, cache.kv, cache.k_rope;
            lw_cache_write(d, &args, null_mut());
        args = lw_cache_gather_args { layer, cache, batch: 2, num_tokens: 3, table_width: 4, ..cleared() },
            without block_table, cu_seq_lens, seq_starts, out, cache.kv, cache.k_rope;
            lw_cache_gather(d, &args, null_mut());
        args = lw_merge_states_args { num_tokens: 3, num_heads: 2, head_dim: 64, dtype: 3, ..cleared() },
            without prefix_out, suffix_out, prefix_lse, suffix_lse, out, out_lse;
            lw_merge_states(d, &args, null_mut());
        args = lw_dcp_combine_args { num_ranks: 2, num_rows: 3, num_heads: 2, head_dim: 64, dtype: 3, ..cleared() },
            without partial_out, partial_lse, out, out_lse;
            lw_dcp_combine(d, &args, null_mut());
    }
}

/// As above for sessions, each field of a valid configuration in turn, so that what is allocated stays small.
#[test]
fn session_configurations_that_cannot_be_are_refused() {
    let device = Device::open::<Host>();
    let problem = problem();
    let valid =
        lw_session_config { layer: layer(&problem), max_num_seqs: 2, max_seq_len: 64, num_pages: 8, ..cleared() };
    let sizes = [0_i64, -1];
    type Change = fn(&mut lw_session_config, &[i64; 2]);
    let changes: &[(&str, Change)] = &[
        ("config", |c, _| c.struct_size = 7),
        ("sm_scale", |c, _| c.layer.sm_scale = 0.0),
        ("max_num_seqs", |c, _| c.max_num_seqs = -1),
        ("max_num_seqs", |c, _| c.max_num_seqs = 0),
        ("max_num_seqs", |c, _| c.max_num_seqs = i64::MAX),
        ("max_seq_len", |c, _| c.max_seq_len = i64::MIN),
        ("num_pages", |c, _| c.num_pages = 0),
        ("max_num_batched_tokens", |c, _| c.max_num_batched_tokens = -1),
        ("max_num_batched_tokens", |c, _| c.max_num_batched_tokens = 1),
        ("num_spec_tokens", |c, _| c.num_spec_tokens = -1),
        ("num_spec_tokens", |c, _| (c.num_spec_tokens, c.max_num_batched_tokens) = (4000, 1 << 20)),
        ("graph_mode", |c, _| c.graph_mode = 6),
        ("graph_mode", |c, _| c.graph_mode = -1),
        ("no_piecewise", |c, _| c.no_piecewise = 3),
        ("ignore_driver_rules", |c, _| c.ignore_driver_rules = -1),
        ("history_final", |c, _| c.history_final = 2),
        ("max_capture_size", |c, _| c.max_capture_size = -1),
        ("capture_sizes", |c, sizes| (c.capture_sizes, c.num_capture_sizes) = (sizes.as_ptr(), 2)),
        ("num_capture_sizes", |c, sizes| (c.capture_sizes, c.num_capture_sizes) = (sizes.as_ptr(), -1)),
        ("capture_sizes", |c, sizes| (c.capture_sizes, c.num_capture_sizes) = (sizes.as_ptr(), i64::MAX)),
        ("stream", |c, _| c.stream = without_provenance_mut(8)),
    ];
    let mut session = null_mut();
    for (index, (name, change)) in changes.iter().enumerate() {
        let mut config = valid;
        change(&mut config, &sizes);
        // SAFETY: device and pointers are valid.
        let status = unsafe { lw_session_create(device.0, &config, &mut session) };
        assert_eq!(status, LW_ERROR_ARGUMENT, "change {index}, of {name}: {}", last_error());
        assert!(last_error().contains(&format!("`{name}`")), "change {index}, of {name}: {}", last_error());
    }
    assert!(session.is_null());
}

#[test]
fn step_batches_that_cannot_be_are_refused() {
    unsafe extern "C" fn nothing(_: *mut c_void, _: *mut lw_step) -> i32 {
        0
    }
    let device = Device::open::<Host>();
    let config =
        lw_session_config { layer: layer(&problem()), max_num_seqs: 2, max_seq_len: 64, num_pages: 8, ..cleared() };
    let mut session = null_mut();
    // SAFETY: device and pointers are valid.
    ok(unsafe { lw_session_create(device.0, &config, &mut session) });
    let (lens, table) = ([5, 6], [0, 1, 2, 3]);
    let valid = lw_step_batch {
        num_seqs: 2,
        query_len: 1,
        seq_lens: lens.as_ptr(),
        block_table: table.as_ptr(),
        table_width: 2,
        ..cleared()
    };
    let changes: &[fn(&mut lw_step_batch)] = &[
        |b| b.struct_size = 0,
        |b| b.num_seqs = -1,
        |b| b.num_seqs = 3,
        |b| b.num_seqs = i64::MAX,
        |b| b.query_len = 0,
        |b| b.query_len = 2,
        |b| b.query_len = i64::MIN,
        |b| b.seq_lens = null(),
        |b| b.seq_lens = without_provenance(1),
        |b| b.block_table = null(),
        |b| b.block_table = without_provenance(2),
        |b| b.table_width = -1,
        |b| b.table_width = 0,
        |b| b.table_width = i64::MAX,
        |b| b.table_stride = -1,
        |b| b.table_stride = 1,
        |b| b.table_stride = i64::MAX,
        |b| b.prefill_tokens = -1,
        |b| b.prefill_tokens = i64::MAX,
        |b| b.prefill_reqs = -1,
    ];
    for (index, change) in changes.iter().enumerate() {
        let mut batch = valid;
        change(&mut batch);
        // SAFETY: the session lives; what cannot be must not be followed.
        let status = unsafe { lw_session_step(session, &batch, Some(nothing), null_mut(), null_mut()) };
        assert!(!matches!(status, LW_OK | LW_ERROR_INTERNAL), "change {index}: {status:?} {}", last_error());
    }
    // SAFETY: the session lives, and is closed once.
    unsafe {
        ok(lw_session_step(session, &valid, Some(nothing), null_mut(), null_mut()));
        lw_session_close(session);
    }
}

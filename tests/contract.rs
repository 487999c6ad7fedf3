//! What every backend must do, one list of checks for all: numerics, then graphs, then memory and threads.

mod common;
#[path = "contract/graphs.rs"]
mod graphs;
#[path = "contract/layers.rs"]
mod layers;
#[path = "contract/memory.rs"]
mod memory;
#[path = "contract/numerics.rs"]
mod numerics;

/// Makes one test per check for a device. `$device` is a `Result`; an absent device says so, or fails if it is required.
macro_rules! backend_contract {
    ($name:ident, $device:expr, $dtypes:expr) => {
        mod $name {
            use latentwave::DType;
            use latentwave::testing::device_or_report;

            backend_contract!(@each $device, $dtypes,
                numerics::{
                    the_plan_kernel_writes_the_balanced_schedule,
                    the_split_count_does_not_change_the_answer,
                    few_sequences_of_any_length,
                    plans_for_many_tokens,
                    lses_of_few_tokens_are_exact,
                    empty_sequences_are_zero_and_minus_infinity,
                    what_lies_past_the_end_does_not_matter,
                    pages_may_lie_in_any_order,
                    head_counts,
                    lengths_around_page_and_split_edges,
                    causal_rows_of_every_query_length,
                    stage_two_merges_made_up_partials,
                    views_with_strides,
                    widths_and_soft_caps,
                    every_cache_type,
                    bad_pages_and_lengths_are_not_followed,
                },
                graphs::{
                    a_graph_replays_new_lengths_and_tables,
                    a_graph_captured_long_serves_every_length,
                    a_dropped_session_leaves_its_graph_whole,
                    a_forbidden_call_breaks_only_its_capture,
                    an_error_in_the_closure_ends_the_capture,
                    captures_do_not_nest,
                },
                layers::{
                    rows_of_the_step_are_read_in_their_turn,
                    few_rows_of_the_step_are_read_in_their_turn,
                },
                memory::{
                    memory_that_runs_out_is_an_error,
                    two_threads_do_not_disturb_each_other,
                    copies_round_trip,
                }
            );
        }
    };
    (@each $device:expr, $dtypes:expr, $($module:ident::{$($check:ident),* $(,)?}),*) => {$($(
        #[test]
        fn $check() {
            let Some(device) = device_or_report(stringify!($check), $device) else { return };
            for dtype in $dtypes {
                crate::$module::$check(&device, dtype);
            }
        }
    )*)*};
}

backend_contract!(host, latentwave::Result::Ok(latentwave::Host::new()), [DType::F32, DType::BF16, DType::F16]);
backend_contract!(host_of_one_thread, latentwave::Result::Ok(latentwave::Host::with_threads(1)), [DType::F32]);
#[cfg(feature = "cuda")]
backend_contract!(cuda, latentwave::Cuda::new(0), [DType::BF16, DType::F16]);
#[cfg(feature = "rocm")]
backend_contract!(rocm, latentwave::Rocm::new(0), [DType::BF16, DType::F16]);

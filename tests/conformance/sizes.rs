//! Capture sizes.

use std::collections::BTreeSet;

use latentwave::Error;
use latentwave::graph::sizes::{DEFAULT_CEILING, LARGE_DEVICE_CEILING};
use latentwave::graph::{GraphMode, SizeReason, SizeRequest};

use crate::report::{Report, Rule, deviates, equal};
use crate::table::{Row, Table};

static ZERO_SIZES: Rule = Rule {
    name: "sizes of zero are refused",
    why: "vLLM captures a graph of no tokens, or fails later, far from the cause",
};

static USER_MAXIMUM: Rule = Rule {
    name: "a user's largest size is honoured",
    why: "vLLM cuts it back to its grid and leaves out the decode batches, so the widest of them lose their graph",
};

/// Sizes, the largest, and vLLM's warnings; or vLLM's error.
type Sizes = Result<(Vec<usize>, usize, Vec<String>), String>;

/// Ours, in vLLM's words.
fn ours(request: &SizeRequest<'_>) -> Sizes {
    match request.resolve() {
        Ok(sizes) => {
            let warnings = sizes.because.iter().filter_map(|reason| match reason {
                SizeReason::MaximumLowered { .. } => Some("W_TRUNCATE_MAX".to_owned()),
                SizeReason::SizesDropped { .. } => Some("W_SIZES_OVERRIDDEN".to_owned()),
                _ => None,
            });
            Ok((sizes.sizes.clone(), sizes.max_size(), warnings.collect()))
        }
        Err(Error::Argument { arg: "max_size", problem }) if problem.starts_with("no size") => {
            Err("AssertionError:E_MAX_LT_1".into())
        }
        Err(Error::Argument { arg: "max_size", .. }) => Err("ValueError:E_MAX_INCONSISTENT_WITH_SIZES".into()),
        Err(Error::Argument { arg: "sizes", problem }) if problem.starts_with("empty") => {
            Err("AssertionError:E_EMPTY_SIZES".into())
        }
        Err(error) => Err(error.to_string()),
    }
}

fn expected(row: Row<'_>) -> Sizes {
    match row.get::<Option<String>>("error") {
        Some(error) => Err(error),
        None => {
            let warnings = if row.has("warnings") { row.get("warnings") } else { Vec::new() };
            Ok((row.get("sizes"), row.usize("max_size"), warnings))
        }
    }
}

pub(crate) fn defaults(table: &Table, report: &mut Report) {
    report.rows(table, |row| {
        let (seqs, tokens) = (row.usize("max_num_seqs"), row.usize("max_num_batched_tokens"));
        let mut request = SizeRequest::new(GraphMode::FullAndPiecewise, seqs, tokens, 1 + row.usize("num_spec_tokens"));
        if row.has("datacenter_blackwell") {
            request.ceiling = if row.bool("datacenter_blackwell") { LARGE_DEVICE_CEILING } else { DEFAULT_CEILING };
            request.every_small_size = row.text("performance_mode") == "interactivity";
        }
        equal(&expected(row), &ours(&request))
    });
}

pub(crate) fn off(table: &Table, report: &mut Report) {
    report.rows(table, |row| {
        let mode = if row.bool("enforce_eager") { GraphMode::None } else { row.parse("mode") };
        // The table does not name its limits; a largest size of 32 is twice 16 sequences.
        let request = SizeRequest::new(mode, 16, 2048, 1);
        equal(&expected_off(row), &ours(&request))
    });
}

fn expected_off(row: Row<'_>) -> Sizes {
    Ok((row.get("sizes"), row.usize("max_size"), Vec::new()))
}

pub(crate) fn user(table: &Table, report: &mut Report) {
    report.rows(table, |row| {
        let sizes: Option<Vec<usize>> = row.get("user_sizes");
        let request = SizeRequest {
            sizes: sizes.as_deref(),
            max_size: row.get("user_max"),
            // 64 sequences throughout, as the table's note says.
            ..SizeRequest::new(
                GraphMode::FullAndPiecewise,
                64,
                row.usize("max_num_batched_tokens"),
                1 + row.usize("num_spec_tokens"),
            )
        };
        let ours = ours(&request);
        let (vllm, rule) = match (&sizes, request.max_size) {
            (Some(sizes), _) => (vllm_user_sizes(&request, sizes), sizes.contains(&0).then_some(&ZERO_SIZES)),
            (None, Some(max)) => (vllm_user_maximum(max, request.max_num_tokens), Some(&USER_MAXIMUM)),
            (None, None) => (ours.clone(), None),
        };
        deviates(&expected(row), &vllm, &ours, rule)
    });
}

const MAX_LT_1: &str = "AssertionError:E_MAX_LT_1";

/// vLLM with sizes given: zero is a size like any other.
fn vllm_user_sizes(request: &SizeRequest<'_>, sizes: &[usize]) -> Sizes {
    if request.max_size == Some(0) || request.max_num_tokens == 0 {
        return Err(MAX_LT_1.into());
    }
    if sizes.is_empty() {
        return Err("AssertionError:E_EMPTY_SIZES".into());
    }
    let kept: BTreeSet<usize> = sizes.iter().copied().filter(|&size| size <= request.max_num_tokens).collect();
    let largest = kept.last().copied().unwrap_or(0);
    if request.max_size.is_some_and(|max| max != largest) {
        return Err("ValueError:E_MAX_INCONSISTENT_WITH_SIZES".into());
    }
    let warnings = if kept.len() < sizes.len() { vec!["W_SIZES_OVERRIDDEN".to_owned()] } else { Vec::new() };
    Ok((kept.into_iter().collect(), largest, warnings))
}

/// vLLM with a largest size but no sizes: the bare grid, cut back to its last entry.
fn vllm_user_maximum(asked: usize, max_num_tokens: usize) -> Sizes {
    let max = asked.min(max_num_tokens);
    if max == 0 {
        return Err(MAX_LT_1.into());
    }
    let grid = [1, 2, 4].into_iter().chain((8..256).step_by(8)).chain((256..=max).step_by(16));
    let mut sizes: BTreeSet<usize> = grid.filter(|&size| size <= max).collect();
    if max == max_num_tokens {
        sizes.insert(max);
    }
    let largest = sizes.last().copied().unwrap_or(0);
    let warnings = if asked == largest { Vec::new() } else { vec!["W_TRUNCATE_MAX".to_owned()] };
    Ok((sizes.into_iter().collect(), largest, warnings))
}

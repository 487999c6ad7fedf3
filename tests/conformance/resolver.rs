//! Modes and the resolver.

use latentwave::Error;
use latentwave::graph::resolve::Change;
use latentwave::graph::sizes::round_to_query_len;
use latentwave::graph::{
    EngineFacts, GraphMode, GraphSupport, MinimumSupport, Reason, ResolveRequest, RuntimeMode, resolve,
};
use serde_json::{Value, json};

use crate::report::{Report, Rule, Verdict, deviates, equal};
use crate::table::{Row, Table};

static SMALLER_MULTIPLE: Rule = Rule {
    name: "rounding keeps a smaller multiple",
    why: "vLLM drops a size whose round-up passes the maximum though a smaller multiple fits; the batches between lose their graph",
};

pub(crate) fn modes(table: &Table, report: &mut Report) {
    let supports = table.meta["attention_cg_support"].as_object();
    report.rows(table, |row| {
        for (name, value) in supports.into_iter().flatten() {
            let support: GraphSupport = name.parse().map_err(|error: Error| error.to_string())?;
            equal(value, &json!(support as usize))?;
        }
        let mode: GraphMode = row.parse("mode");
        let parts = [mode.decode_mode() as usize, mode.mixed_mode() as usize];
        let value = if mode.separate_routine() { json!(parts) } else { json!(parts[0]) };
        let full = mode.max_mode() == RuntimeMode::Full;
        for (column, ours) in [
            ("value", value),
            ("decode_mode", json!(mode.decode_mode().to_string())),
            ("mixed_mode", json!(mode.mixed_mode().to_string())),
            ("has_mode_NONE", json!(mode.has(RuntimeMode::None))),
            ("has_mode_PIECEWISE", json!(mode.has(RuntimeMode::Piecewise))),
            ("has_mode_FULL", json!(mode.has(RuntimeMode::Full))),
            ("requires_piecewise_compilation", json!(mode.has(RuntimeMode::Piecewise))),
            ("has_piecewise_cudagraphs", json!(mode.has(RuntimeMode::Piecewise))),
            ("without_piecewise", json!(mode.without_piecewise().to_string())),
            ("max_cudagraph_mode", json!(mode.max_mode().to_string())),
            ("has_full_cudagraphs", json!(full)),
            ("separate_routine", json!(mode.separate_routine())),
            ("is_valid_runtime_mode", json!(mode.runtime().is_some())),
            ("truthy", json!(mode != GraphMode::None)),
            ("str", json!(mode.to_string())),
        ] {
            equal(row.value(column), &ours).map_err(|problem| format!("{column}: {problem}"))?;
        }
        equal(&mode, &row.text("mode").to_lowercase().parse().map_err(|error: Error| error.to_string())?)
    });
}

/// The mode, vLLM's warnings and its error, from a resolution of ours.
fn resolve_as_vllm(row: Row<'_>, engine: EngineFacts) -> (Option<GraphMode>, Vec<String>, Option<String>) {
    let minimum = MinimumSupport::over([("builder", row.parse("min_support"))]);
    let request = ResolveRequest {
        requested: row.parse_opt("requested_mode"),
        minimum: &minimum,
        query_len: 1 + row.usize("num_spec_tokens"),
        engine,
        driver: None,
    };
    match resolve(&request) {
        Ok(resolved) => (Some(resolved.mode), resolved.because.iter().filter_map(warning).collect(), None),
        Err(Error::GraphModeUnsupported { .. }) => (None, Vec::new(), Some("ValueError:E_FULL_WITH_NEVER".into())),
        Err(error) => (None, Vec::new(), Some(error.to_string())),
    }
}

/// The warning that vLLM logs at the step of a reason.
fn warning(reason: &Reason) -> Option<String> {
    let (step, change) = match reason {
        Reason::MixedNeedsAlways { change, .. } => ("MIXED", change),
        Reason::NoFullGraphs { change, .. } => ("NEVER", change),
        Reason::QueryLenNeedsUniformBatch { change, .. } => ("SPEC", change),
        Reason::NoPiecewiseCapture { .. } => return Some("W_NO_PIECEWISE_PROVIDER".to_owned()),
        _ => return None,
    };
    let Change { to, .. } = change;
    Some(format!("W_{step}_TO_{to}"))
}

/// Whether attention can be taken out of the graph, from vLLM's compile settings.
///
/// vLLM asks in two ways. Where no full graph exists at all (support NEVER) it wants its own compile mode, and then takes either
/// the list of splitting operations or the compiler's own partition; at the other steps, which only builders with some support
/// reach, the list alone decides. The support thus says which question a row answers.
fn attention_separable(row: Row<'_>) -> bool {
    let listed = row.text("splitting_ops") == "attention";
    match row.parse("min_support") {
        GraphSupport::Never => {
            row.usize("compilation_mode") == 3 && (listed || row.bool("use_inductor_graph_partition"))
        }
        _ => listed,
    }
}

pub(crate) fn mode(table: &Table, report: &mut Report) {
    report.rows(table, |row| {
        let engine = EngineFacts {
            attention_separable: attention_separable(row),
            piecewise_capture: row.bool("piecewise_capture_available"),
        };
        let expected = (row.parse_opt("resolved_mode"), row.get("warnings"), row.get("error"));
        equal(&expected, &resolve_as_vllm(row, engine))
    });
}

/// vLLM's rounding: a size whose round-up passes the maximum is dropped.
fn vllm_rounding(sizes: &[usize], max: usize, query_len: usize) -> Option<Vec<usize>> {
    let mut rounded: Vec<usize> =
        sizes.iter().map(|size| size.next_multiple_of(query_len)).filter(|&size| size <= max).collect();
    rounded.sort_unstable();
    rounded.dedup();
    if rounded.is_empty() && query_len <= max {
        rounded.push(query_len);
    }
    (!rounded.is_empty()).then_some(rounded)
}

/// Mode, error, sizes and maximum after resolving.
type Sizes = (Option<GraphMode>, Option<String>, Option<Vec<usize>>, usize);

pub(crate) fn sizes(table: &Table, report: &mut Report) {
    let configs = &table.meta["size_configs"];
    report.rows(table, |row| check_sizes(row, &configs[row.text("size_config")]));
}

fn check_sizes(row: Row<'_>, config: &Value) -> Verdict {
    let read = |value: &Value| serde_json::from_value::<Option<Vec<usize>>>(value.clone()).map_err(|e| e.to_string());
    let before = read(&config["sizes"])?;
    let max = config["max"].as_u64().ok_or("no maximum in size_configs")? as usize;
    let (mode, _, error) = resolve_as_vllm(row, EngineFacts { attention_separable: true, piecewise_capture: true });

    // Runner V2 leaves the sizes alone: its graph keys round them. Runner V1 rounds them here for full decode graphs.
    let query_len = 1 + row.usize("num_spec_tokens");
    let full_decode = mode.is_some_and(|mode| mode.decode_mode() == RuntimeMode::Full);
    let rounds = !row.bool("use_v2_model_runner") && full_decode && query_len > 1;
    let (vllm, ours): (Sizes, Sizes) = match &before {
        Some(sizes) if rounds && !sizes.is_empty() => {
            let after = |rounded: Option<Vec<usize>>| match rounded {
                Some(sizes) => (mode, None, Some(sizes.clone()), sizes.last().copied().unwrap_or(0)),
                None => (None, Some("ValueError:E_NO_VALID_SIZES".to_owned()), before.clone(), max),
            };
            let ours = match round_to_query_len(sizes, max, query_len) {
                Ok(sizes) => Some(sizes),
                Err(Error::NoCaptureSizes { .. }) => None,
                Err(error) => return Err(error.to_string()),
            };
            (after(vllm_rounding(sizes, max, query_len)), after(ours))
        }
        _ => {
            let unchanged = (mode, error, before.clone(), max);
            (unchanged.clone(), unchanged)
        }
    };
    let expected: Sizes =
        (row.parse_opt("resolved_mode"), row.get("error"), row.get("sizes_after"), row.usize("max_after"));
    deviates(&expected, &vllm, &ours, Some(&SMALLER_MULTIPLE))
}

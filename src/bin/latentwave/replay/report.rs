//! What is left of a replay on disk: a JSON file with every step, and a page with plots.

use std::fmt::Write as _;
use std::path::Path;

use latentwave::{Error, Result};
use serde::Serialize;

use super::plots;
use super::stats::{Measured, StepTimes};
use crate::{files, text};

/// What was replayed and on what, as the table, the page and the JSON file name it.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Setting {
    pub(crate) trace: String,
    pub(crate) requests: usize,
    pub(crate) model: String,
    pub(crate) backend: &'static str,
    pub(crate) device: String,
    pub(crate) arch: String,
    pub(crate) num_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) kv_lora_rank: usize,
    pub(crate) layers: usize,
    pub(crate) page_size: usize,
    pub(crate) num_pages: usize,
    pub(crate) dtype: String,
    pub(crate) kv_dtype: String,
    /// Bytes of one cached token in one layer.
    pub(crate) kv_row_bytes: usize,
    pub(crate) max_num_seqs: usize,
    pub(crate) max_model_len: usize,
    pub(crate) max_num_batched_tokens: usize,
    pub(crate) spec_tokens: usize,
    pub(crate) acceptance: f64,
    pub(crate) seed: u64,
    pub(crate) split_policy: String,
    pub(crate) graph_mode_asked: String,
    /// The mode that this leads to.
    pub(crate) graph_mode: String,
    /// Why.
    pub(crate) graph_mode_reasons: Vec<String>,
    pub(crate) capture_sizes: Vec<usize>,
    /// Bytes that the session reserved for scratch and staging before the first step.
    pub(crate) reserved_bytes: usize,
    pub(crate) kv_cache_bytes: usize,
    /// Bytes that the captured graphs hold, as far as the driver tells.
    pub(crate) graph_bytes: usize,
    /// Whether the replay was ended before the trace was.
    pub(crate) ended_early: Option<&'static str>,
}

/// The JSON file.
#[derive(Serialize)]
struct File<'a> {
    setting: &'a Setting,
    attention_tokens_per_second: f64,
    step_seconds: StepTimes,
    kv_bytes_per_second: f64,
    padding_share: f64,
    full_graph_share_of_decode_steps: f64,
    allocations_per_step_max: u64,
    #[serde(flatten)]
    measured: &'a Measured,
}

/// Tokens that attention was computed for and that stayed, per second of attention.
pub(crate) fn tokens_per_second(measured: &Measured) -> f64 {
    super::stats::ratio(measured.decoded_tokens as f64, measured.times().total)
}

/// Writes every step and every sum as JSON.
///
/// # Errors
/// [`Error::Io`].
pub(crate) fn write_json(path: &Path, setting: &Setting, measured: &Measured) -> Result<()> {
    let file = File {
        setting,
        attention_tokens_per_second: tokens_per_second(measured),
        step_seconds: measured.times(),
        kv_bytes_per_second: measured.kv_bytes_per_second(setting.kv_row_bytes, setting.layers),
        padding_share: measured.padding_share(),
        full_graph_share_of_decode_steps: measured.full_share_of_decode(),
        allocations_per_step_max: measured.allocations().2,
        measured,
    };
    files::write_json(path, &file)
}

/// Lines that say what was replayed and on what.
pub(crate) fn heading(setting: &Setting) -> [String; 2] {
    [
        format!(
            "{}: {} heads, {}, {} of {} tokens, {} queries, {} cache",
            setting.model,
            setting.num_heads,
            text::plural(setting.layers, "layer"),
            text::plural(setting.num_pages, "page"),
            setting.page_size,
            setting.dtype,
            setting.kv_dtype
        ),
        format!("{}: {} ({})", setting.backend, setting.device, setting.arch),
    ]
}

/// The table printed at the end: name and value, then how steps were served.
pub(crate) fn table(setting: &Setting, measured: &Measured) -> String {
    let times = measured.times();
    let mut rows: Vec<[String; 2]> = Vec::new();
    let mut row = |name: &str, value: String| rows.push([name.to_owned(), value]);

    let mut requests = format!("{} finished", text::count(measured.finished));
    if measured.rejected > 0 {
        let _ =
            write!(requests, ", {} rejected: longer than the cache or --max-model-len", text::count(measured.rejected));
    }
    if measured.unfinished > 0 {
        let _ = write!(requests, ", {} left over", text::count(measured.unfinished));
    }
    row("requests", requests);
    let mut steps = format!(
        "{} ({} decode only, {} with prompts beside)",
        text::count(measured.steps.len()),
        text::count(measured.steps.len() - measured.mixed_steps()),
        text::count(measured.mixed_steps())
    );
    if measured.prompt_only_steps > 0 {
        let _ = write!(steps, ", and {} with prompts only", text::count(measured.prompt_only_steps));
    }
    row("steps", steps);
    row(
        "tokens",
        format!(
            "{} decoded, {} prompt tokens written to the cache",
            text::count(measured.decoded_tokens),
            text::count(measured.prompt_tokens)
        ),
    );
    if measured.drafts[0] > 0 {
        let share = measured.drafts[1] as f64 / measured.drafts[0] as f64;
        row(
            "drafts",
            format!(
                "{} of {} accepted ({})",
                text::count(measured.drafts[1]),
                text::count(measured.drafts[0]),
                text::percent(share)
            ),
        );
    }
    row("attention", format!("{} tokens/s", text::quantity(tokens_per_second(measured))));
    row(
        "step time",
        format!(
            "p50 {}, p90 {}, p99 {}, longest {}",
            text::seconds(times.p50),
            text::seconds(times.p90),
            text::seconds(times.p99),
            text::seconds(times.max)
        ),
    );
    row(
        "KV read",
        format!("{} GB/s", text::quantity(measured.kv_bytes_per_second(setting.kv_row_bytes, setting.layers) / 1e9)),
    );
    row("padding", format!("{} of the query rows computed", text::percent(measured.padding_share())));
    row(
        "reserved",
        format!(
            "{} of scratch, {} of cache, {} in graphs",
            text::bytes(setting.reserved_bytes),
            text::bytes(setting.kv_cache_bytes),
            text::bytes(setting.graph_bytes)
        ),
    );
    let (_, mean, most) = measured.allocations();
    row(
        "allocations",
        format!("{} per step, at most {most}", if mean == 0.0 { "0".into() } else { text::quantity(mean) }),
    );
    if let Some(verified) = &measured.verified {
        row(
            "verified",
            format!(
                "{} rows against float64, worst error {:.1e} of the row's largest element (allowed {:.0e}), {} missed",
                text::count(verified.rows),
                verified.worst,
                verified.tolerance,
                text::count(verified.misses)
            ),
        );
    }

    let rows: Vec<Vec<String>> = rows.into_iter().map(Vec::from).collect();
    let mut out = text::table(&rows, 2);
    let _ = writeln!(out, "\ngraph mode {} (asked: {})", setting.graph_mode, setting.graph_mode_asked);
    for reason in &setting.graph_mode_reasons {
        let _ = writeln!(out, "  {reason}");
    }
    out.push('\n');
    out += &text::table(&served_rows(measured), 1);
    out
}

/// How steps were served, most first, under a heading.
fn served_rows(measured: &Measured) -> Vec<Vec<String>> {
    let mut served: Vec<_> = measured.served.iter().collect();
    served.sort_by_key(|served| std::cmp::Reverse(served.steps));
    let heading = ["served by", "rows", "steps", "share", "padding", "mean", "why"].map(str::to_owned).to_vec();
    let all = measured.steps.len() as f64;
    std::iter::once(heading)
        .chain(served.into_iter().map(|served| {
            let rows = (served.query_tokens + served.padding) as f64;
            vec![
                served.mode.clone(),
                served.size.map_or_else(|| "-".to_owned(), text::count),
                text::count(served.steps),
                text::percent(served.steps as f64 / all),
                text::percent(super::stats::ratio(served.padding as f64, rows)),
                text::seconds(served.seconds / served.steps as f64),
                served.why.clone(),
            ]
        }))
        .collect()
}

/// Writes the plots: a page for `.html`, the bare drawing for `.svg`.
///
/// # Errors
/// [`Error::Argument`] for another ending; [`Error::Io`].
pub(crate) fn write_report(path: &Path, setting: &Setting, measured: &Measured) -> Result<()> {
    let svg = plots::draw(measured).map_err(|error| Error::argument("report", error.to_string()))?;
    match path.extension().and_then(|ending| ending.to_str()) {
        Some("svg") => files::write(path, &svg),
        _ => files::write(path, &page(setting, measured, &svg)),
    }
}

/// Checks the ending of a report's path before any work is done.
///
/// # Errors
/// [`Error::Argument`].
pub(crate) fn check_path(path: &Path) -> Result<()> {
    match path.extension().and_then(|ending| ending.to_str()) {
        Some("html" | "svg") => Ok(()),
        _ => Err(Error::argument("report", format!("{}: a name ending in .html or .svg is needed", path.display()))),
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

const STYLE: &str = include_str!("report.css");

/// The page: numbers first, then the plots, then how steps were served and on what.
fn page(setting: &Setting, measured: &Measured, svg: &str) -> String {
    let times = measured.times();
    let tile = |value: String, name: &str| format!("<div><b>{}</b><span>{name}</span></div>", escape(&value));
    let tiles = [
        tile(text::quantity(tokens_per_second(measured)), "tokens/s of attention"),
        tile(text::seconds(times.p50), "step time, median"),
        tile(text::seconds(times.p99), "step time, p99"),
        tile(
            format!(
                "{} GB/s",
                text::quantity(measured.kv_bytes_per_second(setting.kv_row_bytes, setting.layers) / 1e9)
            ),
            "KV read",
        ),
        tile(text::percent(measured.full_share_of_decode()), "decode steps on full graphs"),
        tile(measured.allocations().2.to_string(), "allocations per step, at most"),
    ]
    .concat();
    let mut served = String::new();
    for (i, row) in served_rows(measured).iter().enumerate() {
        let cell = if i == 0 { "th" } else { "td" };
        served += "<tr>";
        for text in row {
            let _ = write!(served, "<{cell}>{}</{cell}>", escape(text));
        }
        served += "</tr>\n";
    }
    let reasons: String =
        setting.graph_mode_reasons.iter().map(|reason| format!("<li>{}</li>", escape(reason))).collect();
    let [model, device] = heading(setting).map(|line| escape(&line));
    // The drawing scales with the page.
    let drawing =
        svg.replacen(&format!("width=\"{}\" height=\"{}\"", plots::SIZE.0, plots::SIZE.1), "width=\"100%\"", 1);
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>latentwave replay: {trace}</title>\n<style>{STYLE}</style></head>\n<body><main>\n\
         <header><p>latentwave replay</p><h1>{trace}</h1><p>{model}<br>{device}</p></header>\n\
         <section class=\"tiles\">{tiles}</section>\n\
         <section class=\"card\">{drawing}</section>\n\
         <section class=\"card text\"><h2>How steps were served</h2>\n\
         <p>Graph mode <b>{mode}</b>, asked for {asked}.</p><ul>{reasons}</ul>\n<div class=\"wide\"><table>{served}</table></div></section>\n\
         <section class=\"card text\"><h2>All numbers</h2><pre>{table}</pre></section>\n</main></body></html>\n",
        trace = escape(&setting.trace),
        mode = escape(&setting.graph_mode),
        asked = escape(&setting.graph_mode_asked),
        table = escape(&table(setting, measured)),
    )
}

#[cfg(test)]
mod tests;

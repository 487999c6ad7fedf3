//! Builders: the check at capture, and the story of one backend's flags through vLLM's versions.

use latentwave::batch::ReorderThreshold;
use latentwave::graph::builder::minimum_support;
use latentwave::graph::{
    AttentionBuilder, BuilderSpec, CaptureBatch, EngineFacts, GraphMode, GraphSupport, MlaBuilder, QueryLenSupport,
    ResolveRequest, RuntimeMode, resolve,
};
use latentwave::{Error, Result};

use crate::report::{Outcome, Report, Rule, Verdict, deviates, equal};
use crate::table::{Row, Table};

static CLAIM_REFUSED: Rule = Rule {
    name: "a claim above the kernel's query lengths is refused",
    why: "vLLM PR 47144: the builder claims uniform batches, takes single tokens, and its assertion fails while capturing",
};

static DCP_LOWERS_SUPPORT: Rule = Rule {
    name: "a threshold lowered by DCP lowers graph support",
    why: "vLLM lowers the threshold to one token and keeps the claim, so capturing speculative decoding fails again",
};

/// A builder that reports whatever flags it is given, true or not.
struct Reported {
    query_len_support: QueryLenSupport,
    graph_support: GraphSupport,
    threshold: usize,
}

impl AttentionBuilder for Reported {
    fn name(&self) -> &str {
        "reported"
    }

    fn query_len_support(&self) -> QueryLenSupport {
        self.query_len_support
    }

    fn decode_threshold(&self) -> usize {
        self.threshold
    }

    fn graph_support(&self) -> GraphSupport {
        self.graph_support
    }
}

pub(crate) fn capture_assert(table: &Table, report: &mut Report) {
    report.rows(table, |row| {
        let builder = Reported {
            query_len_support: QueryLenSupport::Varlen,
            graph_support: GraphSupport::Always,
            threshold: row.usize("reorder_batch_threshold"),
        };
        let batch = CaptureBatch {
            num_reqs: row.usize("num_reqs"),
            num_tokens: row.usize("num_actual_tokens"),
            max_query_len: row.usize("max_query_len"),
        };
        let ours = match builder.check_capture(&batch) {
            Ok(()) => "ok".to_owned(),
            Err(Error::CaptureTooManyRequests { .. }) => "E_TOO_MANY_REQS".to_owned(),
            Err(Error::CaptureQueryTooLong { .. }) => "E_QUERY_TOO_LONG".to_owned(),
            Err(error) => error.to_string(),
        };
        equal(&row.text("result"), &ours.as_str())
    });
}

/// Resolved mode, error, query length captured at, what the capture check says.
type Story = (Option<GraphMode>, Option<&'static str>, Option<usize>, Option<&'static str>);

fn story(row: Row<'_>, builder: &dyn AttentionBuilder) -> Result<Story> {
    let query_len = 1 + row.usize("num_spec_tokens");
    let separable = row.text("splitting_ops") == "attention";
    let request = ResolveRequest {
        requested: row.parse_opt("requested_mode"),
        minimum: &minimum_support([builder]),
        query_len,
        engine: EngineFacts { attention_separable: separable, piecewise_capture: true },
        driver: None,
    };
    let mode = match resolve(&request) {
        Ok(resolved) => resolved.mode,
        Err(Error::GraphModeUnsupported { .. }) => return Ok((None, Some("ValueError"), None, None)),
        Err(error) => return Err(error),
    };
    if mode.decode_mode() != RuntimeMode::Full {
        return Ok((Some(mode), None, None, None));
    }
    // Any number of requests: only the query length can be wrong.
    let batch = CaptureBatch { num_reqs: 8, num_tokens: 8 * query_len, max_query_len: query_len };
    let capture = match builder.check_capture(&batch) {
        Ok(()) => "ok",
        Err(Error::CaptureQueryTooLong { .. }) => "AssertionError",
        Err(error) => return Err(error),
    };
    Ok((Some(mode), None, Some(query_len), Some(capture)))
}

pub(crate) fn capture_story(table: &Table, report: &mut Report) {
    report.rows(table, check_story);
}

fn check_story(row: Row<'_>) -> Verdict {
    let query_len_support: QueryLenSupport = row.parse("query_len_support");
    let graph_support: GraphSupport = row.parse("cg_support");
    let threshold = ReorderThreshold {
        class_threshold: Some(1),
        spec_as_decode: query_len_support != QueryLenSupport::SingleOnly,
        draft_tokens: Some(row.usize("num_spec_tokens")),
        parallel_drafting: false,
        dcp_size: row.usize("dcp_size"),
        multi_token_dcp: false,
    };
    let tokens = threshold.tokens().ok_or("no threshold")?;
    equal(&row.usize("reorder_batch_threshold"), &tokens)?;

    let text = |column| row.get::<Option<String>>(column);
    let expected = (
        row.parse_opt::<GraphMode>("resolved_mode"),
        text("error"),
        row.get::<Option<usize>>("capture_query_len"),
        text("capture"),
    );
    let owned = |story: Story| (story.0, story.1.map(str::to_owned), story.2, story.3.map(str::to_owned));
    let reported = Reported { query_len_support, graph_support, threshold: tokens };
    let vllm = owned(story(row, &reported).map_err(|error| error.to_string())?);

    let spec = BuilderSpec {
        claim: Some(graph_support),
        draft_tokens: threshold.draft_tokens,
        dcp_size: threshold.dcp_size,
        ..BuilderSpec::new("ours", query_len_support)
    };
    match MlaBuilder::new(spec) {
        Ok(builder) => {
            let ours = owned(story(row, &builder).map_err(|error| error.to_string())?);
            if ours.3.as_deref() == Some("AssertionError") {
                return Err(format!("our builder fails its own capture check: {ours:?}"));
            }
            deviates(&expected, &vllm, &ours, threshold.dcp_limits().then_some(&DCP_LOWERS_SUPPORT))
        }
        Err(Error::InconsistentGraphSupport { claimed, allowed, .. }) => {
            equal(&expected, &vllm)?;
            equal(&(claimed, allowed), &(graph_support, query_len_support.allowed_support()))?;
            Ok(Outcome::Deviates(&CLAIM_REFUSED))
        }
        Err(error) => Err(error.to_string()),
    }
}

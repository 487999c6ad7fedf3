//! Thresholds, splits, row flattening and local lengths.

use latentwave::Error;
use latentwave::batch::{BatchSplit, DcpShard, ReorderThreshold, SplitRequest, flatten_rows};

use crate::report::{Outcome, Report, Rule, Verdict, deviates, equal};
use crate::table::{Row, Table};

static EMPTY_BATCH: Rule = Rule {
    name: "an empty batch splits into nothing",
    why: "vLLM looks at the first request and fails when there is none",
};

static ROWS_WITHOUT_REQUESTS: Rule = Rule {
    name: "rows without requests are refused",
    why: "vLLM hands the kernel query rows and an empty block table; its reads are out of bounds",
};

static NO_ROWS: Rule = Rule {
    name: "no rows have no extents",
    why: "vLLM hands on the lengths of requests that have no query row in the block",
};

pub(crate) fn reorder_threshold(table: &Table, report: &mut Report) {
    report.rows(table, |row| {
        let drafts: Option<i64> = row.get("num_spec_tokens");
        let parallel = row.bool("parallel_drafting");
        let threshold = |parallel_drafting| {
            ReorderThreshold {
                class_threshold: row.get("class_threshold"),
                spec_as_decode: row.bool("supports_spec_as_decode"),
                // -1: speculation is configured, without a count.
                draft_tokens: drafts.and_then(|drafts| usize::try_from(drafts).ok()),
                parallel_drafting,
                dcp_size: row.usize("dcp_size"),
                multi_token_dcp: row.bool("supports_dcp_with_varlen"),
            }
            .tokens()
        };
        // Runner V2 gives the second half of a parallel draft a batch of its own; before 0.33.0 neither runner did.
        equal(&row.get("threshold"), &threshold(parallel && !row.bool("use_v2_model_runner")))?;
        equal(&row.get("threshold_0.26.0"), &threshold(parallel))
    });
}

fn written(split: BatchSplit) -> [usize; 4] {
    [split.num_decodes, split.num_prefills, split.num_decode_tokens, split.num_prefill_tokens]
}

pub(crate) fn split(table: &Table, report: &mut Report) {
    report.rows(table, |row| {
        let query_lens: Vec<usize> = row.get("query_lens");
        let flags: Option<Vec<bool>> = row
            .has("is_prefilling")
            .then(|| row.get::<Vec<u8>>("is_prefilling").into_iter().map(|flag| flag != 0).collect());
        let request = SplitRequest {
            query_lens: &query_lens,
            num_tokens: query_lens.iter().sum(),
            max_query_len: query_lens.iter().copied().max().unwrap_or(0),
            decode_threshold: row.usize("decode_threshold"),
            require_uniform: row.bool("require_uniform"),
            is_prefilling: flags.as_deref(),
        };
        check_split(row, &request)
    });
}

pub(crate) fn split_padded(table: &Table, report: &mut Report) {
    report.rows(table, |row| {
        let query_lens: Vec<usize> = row.get("query_lens");
        equal(&row.usize("num_reqs"), &query_lens.len())?;
        let request = SplitRequest {
            query_lens: &query_lens,
            num_tokens: row.usize("num_actual_tokens"),
            max_query_len: row.usize("max_query_len"),
            decode_threshold: row.usize("decode_threshold"),
            require_uniform: row.bool("require_uniform"),
            is_prefilling: None,
        };
        check_split(row, &request)
    });
}

fn check_split(row: Row<'_>, request: &SplitRequest<'_>) -> Verdict {
    let ours = request.split().map(written).map_err(|error| error.to_string())?;
    let error: Option<String> = row.get("error");
    // vLLM answers for an empty batch only where the bound on the query lengths settles it.
    let settled = request.max_query_len <= request.decode_threshold
        && (!request.require_uniform || request.decode_threshold <= 1)
        && request.is_prefilling.is_none();
    match error {
        Some(_) if request.query_lens.is_empty() && !settled => Ok(Outcome::Deviates(&EMPTY_BATCH)),
        Some(error) => Err(format!("ours is {ours:?}, vLLM fails with {error}")),
        None => equal(&row.get("result"), &ours),
    }
}

pub(crate) fn dcp_local_seq_lens(table: &Table, report: &mut Report) {
    report.rows(table, |row| {
        let (len, size, interleave) = (row.usize("seq_len"), row.usize("dcp_size"), row.usize("interleave"));
        let shard = |rank| DcpShard::new(rank, size, interleave).map_err(|error| error.to_string());
        let ours = (0..size).map(|rank| Ok(shard(rank)?.local_len(len))).collect::<Result<Vec<_>, String>>()?;
        let bound = shard(0)?.max_local_len(len);
        if ours.iter().any(|&local| local > bound) {
            return Err(format!("the bound {bound} is below one of {ours:?}"));
        }
        equal(&row.get("local"), &ours)
    });
}

/// Extent of each row and its request, or vLLM's error.
type Rows = Result<(Vec<usize>, Vec<usize>), String>;

fn ours(seq_lens: &[usize], rows: usize, causal: bool, dcp_size: usize) -> Rows {
    match flatten_rows(seq_lens, rows, causal, dcp_size) {
        Ok(rows) => Ok((rows.extents, rows.requests)),
        Err(Error::CausalDcp { .. }) => Err("E_CAUSAL_MULTI_TOKEN_WITH_DCP".into()),
        Err(Error::UnevenRows { .. }) => Err("E_NON_UNIFORM_BLOCK".into()),
        Err(error) => Err(error.to_string()),
    }
}

pub(crate) fn row_flatten(table: &Table, report: &mut Report) {
    report.rows(table, |row| {
        let seq_lens: Vec<usize> = row.get("seq_lens");
        let rows = seq_lens.len() * row.usize("query_len");
        let expected: Rows = match row.get::<Option<String>>("error") {
            Some(error) => Err(error),
            None => Ok((row.get("row_seq_lens"), row.get("row_request"))),
        };
        equal(&expected, &ours(&seq_lens, rows, row.bool("causal"), row.usize("dcp_size")))
    });
}

pub(crate) fn row_counts(table: &Table, report: &mut Report) {
    report.rows(table, |row| {
        let seq_lens: Vec<usize> = row.get("seq_lens");
        let num_rows = row.usize("q_rows");
        let expected: Result<Vec<usize>, String> = match row.get::<Option<String>>("error") {
            Some(error) => Err(error),
            None => Ok(row.get("row_seq_lens")),
        };
        let ours = ours(&seq_lens, num_rows, true, 1).map(|(extents, _)| extents);
        // Without rows or without requests vLLM flattens nothing and hands on the lengths as they are.
        match (num_rows, seq_lens.len()) {
            (0, _) => deviates(&expected, &Ok(seq_lens.clone()), &ours, Some(&NO_ROWS)),
            (_, 0) => deviates(&expected, &Ok(seq_lens.clone()), &ours, Some(&ROWS_WITHOUT_REQUESTS)),
            _ => equal(&expected, &ours),
        }
    });
}

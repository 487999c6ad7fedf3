//! Graph keys and dispatch (model runner V2).

use std::collections::HashMap;

use latentwave::graph::{Batch, BatchDescriptor, GraphDispatcher, KeyRequest, RuntimeMode, graph_keys};
use serde::Deserialize;

use crate::report::{Report, Rule, deviates, equal};
use crate::table::{Row, Table};

static LARGER_GRAPH: Rule = Rule {
    name: "a larger full graph serves where the nearest does not fit",
    why: "vLLM looks at the descriptors of the nearest size only, and then falls back to piecewise or eager",
};

/// A descriptor as the tables write it: mode, tokens, requests, uniform query length, longest query, variant.
type Written = (String, usize, Option<usize>, Option<usize>, Option<usize>, u32);

fn written(key: &BatchDescriptor) -> Written {
    (key.mode.to_string(), key.num_tokens, key.num_reqs, key.uniform_query_len, key.max_query_len, key.variant)
}

#[derive(Deserialize)]
struct Config {
    mode: String,
    sizes: Vec<usize>,
    max_num_seqs: usize,
    num_spec_tokens: usize,
    varlen_decode: bool,
    lora_capture_cases: Vec<u32>,
    /// First batch size, last batch size, draft tokens.
    dynamic_schedule: Option<Vec<(usize, usize, usize)>>,
}

impl Config {
    fn keys(&self) -> Vec<BatchDescriptor> {
        let query_lens = match &self.dynamic_schedule {
            Some(tiers) => tiers.iter().map(|&(_, _, drafts)| 1 + drafts).collect(),
            None => vec![1 + self.num_spec_tokens],
        };
        let request = KeyRequest {
            mode: self.mode.parse().unwrap(),
            sizes: &self.sizes,
            max_num_seqs: self.max_num_seqs,
            query_lens: &query_lens,
            varlen_decode: self.varlen_decode,
            variants: &self.lora_capture_cases,
        };
        graph_keys(&request).unwrap()
    }

    /// The variant for a number of LoRA adapters: the smallest captured case that has as many, else the largest; none stays none.
    fn variant(&self, adapters: u32) -> u32 {
        let cases = &self.lora_capture_cases;
        let enough = cases.iter().copied().filter(|&case| case >= adapters).min();
        if adapters == 0 { 0 } else { enough.or(cases.iter().copied().max()).unwrap_or(0) }
    }
}

fn configs(table: &Table) -> HashMap<String, Config> {
    serde_json::from_value(table.meta["configs"].clone()).unwrap()
}

/// vLLM's choice: of each mode only the descriptors of the nearest size, full graphs first.
fn nearest_size_only(keys: &[BatchDescriptor], batch: &Batch) -> Option<BatchDescriptor> {
    let fits = |key: &&BatchDescriptor| {
        key.uniform_query_len.is_none_or(|len| batch.uniform_query_len == Some(len))
            && key.max_query_len.is_none_or(|most| batch.max_query_len.is_some_and(|longest| longest <= most))
            && key.num_reqs.is_none_or(|most| most >= batch.num_reqs)
    };
    [RuntimeMode::Full, RuntimeMode::Piecewise].into_iter().filter(|_| batch.num_tokens > 0).find_map(|mode| {
        let of_mode = || keys.iter().filter(|key| key.mode == mode && key.variant == batch.variant);
        let nearest = of_mode().map(|key| key.num_tokens).filter(|&tokens| tokens >= batch.num_tokens).min()?;
        of_mode().filter(|key| key.num_tokens == nearest).find(fits).copied()
    })
}

fn batch(row: Row<'_>, config: &Config) -> Batch {
    Batch {
        num_tokens: row.usize("num_tokens"),
        num_reqs: row.usize("num_reqs"),
        uniform_query_len: row.get("uniform_token_count"),
        max_query_len: row.get("max_query_len"),
        variant: config.variant(row.get("num_active_loras")),
    }
}

pub(crate) fn dispatch(table: &Table, report: &mut Report) {
    let dispatchers: HashMap<String, (Config, GraphDispatcher)> = configs(table)
        .into_iter()
        .map(|(name, config)| {
            let mut dispatcher = GraphDispatcher::new(config.keys()).unwrap();
            dispatcher.set_all_captured();
            (name, (config, dispatcher))
        })
        .collect();
    report.rows(table, |row| {
        let (config, dispatcher) = &dispatchers[row.text("config")];
        let batch = batch(row, config);
        let ours = dispatcher.dispatch(&batch);
        if ours.graph.map(|graph| dispatcher.keys()[graph]).unwrap_or(ours.descriptor) != ours.descriptor {
            return Err(format!("index and descriptor disagree: {ours:?}"));
        }
        let vllm = nearest_size_only(dispatcher.keys(), &batch).map_or_else(
            || ("NONE".to_owned(), batch.num_tokens, Some(batch.num_reqs), None, None, batch.variant),
            |key| written(&key),
        );
        let rule = (ours.descriptor.mode == RuntimeMode::Full && vllm.0 != "FULL").then_some(&LARGER_GRAPH);
        deviates(&row.get("result"), &vllm, &written(&ours.descriptor), rule)
    });
}

pub(crate) fn keys(table: &Table, report: &mut Report) {
    let configs = configs(table);
    report.rows(table, |row| {
        let keys = configs[row.text("config")].keys();
        if !keys.is_sorted_by_key(|key| key.mode) {
            return Err("piecewise graphs are not captured before full ones".to_owned());
        }
        // The table lists the modes by name; within a mode its order is that of capture.
        let ours: Vec<(String, Vec<Written>)> = [RuntimeMode::Full, RuntimeMode::Piecewise]
            .into_iter()
            .map(|mode| (mode.to_string(), keys.iter().filter(|key| key.mode == mode).map(written).collect()))
            .filter(|(_, keys): &(_, Vec<_>)| !keys.is_empty())
            .collect();
        equal(&row.get("capture_order"), &ours)
    });
}

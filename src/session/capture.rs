//! Capturing a session's graphs: for each size one that serves any length, and where it pays one for short sequences.

use super::report::CaptureReport;
use super::{DecodeSession, Served, Step, make_step, planned_seq_lens};
use crate::backend::GraphBackend;
use crate::error::Result;
use crate::graph::{CaptureBatch, RuntimeMode};
use crate::observe::{event, span};
use crate::stream::Graph;

/// The graphs of one size, each with the longest sequence that it was planned for; the longest comes first.
pub(super) struct SizeGraphs<B: GraphBackend>(Vec<(usize, Graph<B>)>);

impl<B: GraphBackend> Default for SizeGraphs<B> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<B: GraphBackend> SizeGraphs<B> {
    fn has(&self, max_seq_len: usize) -> bool {
        self.0.iter().any(|(len, _)| *len == max_seq_len)
    }

    fn add(&mut self, max_seq_len: usize, graph: Graph<B>) {
        self.0.push((max_seq_len, graph));
        self.0.sort_by_key(|(len, _)| std::cmp::Reverse(*len));
    }

    /// The graph for the shortest sequences that serves those of up to `longest` tokens, and what it was planned for.
    pub(super) fn serving(&self, longest: usize) -> Option<(usize, &Graph<B>)> {
        self.0.iter().rev().find(|(len, _)| longest <= *len).map(|(len, graph)| (*len, graph))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.iter().map(|(_, graph)| graph.bytes()).sum()
    }
}

impl<B: GraphBackend> DecodeSession<B> {
    /// Captures a full graph for every size that has none yet, largest first; and a second one where other kernels serve short
    /// sequences better ([`DecodeKernels::short_seq_len`](crate::backend::DecodeKernels::short_seq_len)), which is so for a few sequences at most.
    /// `enqueue` enqueues the engine's whole step for [`Step::num_tokens`] rows; it is called once per graph, and once before to run
    /// eagerly on padding alone, so that everything that is made on first use is there.
    ///
    /// A size that fails is reported and leaves the others usable; nothing half-captured remains. Piecewise graphs are the
    /// engine's own, and counted on from here.
    ///
    /// # Errors
    /// What `enqueue` returns when run eagerly; [`Error::Driver`](crate::Error::Driver).
    pub fn capture(&mut self, mut enqueue: impl FnMut(&mut Step<'_, B>) -> Result<()>) -> Result<CaptureReport> {
        let mut report = CaptureReport::default();
        let mut warm = false;
        for index in 0..self.dispatcher.keys().len() {
            let key = self.dispatcher.keys()[index];
            if key.mode == RuntimeMode::Piecewise {
                self.dispatcher.set_captured(index)?;
                continue;
            }
            let query_len = key.uniform_query_len.unwrap_or(1);
            let num_seqs = key.num_reqs.unwrap_or(key.num_tokens / query_len);
            let seq_lens = planned_seq_lens(&self.decode, &self.config, num_seqs, query_len)?;
            let missing: Vec<usize> = seq_lens.filter(|&len| !self.graphs[index].has(len)).collect();
            if missing.is_empty() {
                continue;
            }
            let batch = CaptureBatch { num_reqs: num_seqs, num_tokens: key.num_tokens, max_query_len: query_len };
            let _span = span!(INFO, "capture", mode = %key.mode, num_tokens = key.num_tokens);
            let checked = self.builders.iter().try_for_each(|builder| builder.check_capture(&batch));
            if let Err(error) = checked {
                event!(WARN, %error, "not captured");
                report.failed.push((key, error));
                continue;
            }
            if !warm {
                self.inputs.update(&self.stream, &[], query_len, |_| &[])?;
                let served = Served::eager(key.num_tokens);
                self.enqueue(num_seqs, query_len, key.num_tokens, self.config.max_seq_len, served, &mut enqueue)?;
                self.stream.synchronize()?;
                warm = true;
            }
            let captured = missing.into_iter().try_for_each(|max_seq_len| {
                let graph = self.capture_one(num_seqs, query_len, key.num_tokens, max_seq_len, &mut enqueue)?;
                report.graph_bytes += graph.bytes();
                self.graphs[index].add(max_seq_len, graph);
                Ok(())
            });
            if self.graphs[index].has(self.config.max_seq_len) {
                self.dispatcher.set_captured(index)?;
            }
            match captured {
                Ok(()) => report.captured.push(key),
                Err(error) => {
                    event!(WARN, %error, "not captured");
                    report.failed.push((key, error));
                }
            }
        }
        Ok(report)
    }

    fn capture_one(
        &mut self,
        num_seqs: usize,
        query_len: usize,
        num_tokens: usize,
        max_seq_len: usize,
        enqueue: &mut impl FnMut(&mut Step<'_, B>) -> Result<()>,
    ) -> Result<Graph<B>> {
        let plan = self.decode.plan(num_seqs, query_len, max_seq_len, self.config.policy)?;
        let Self { config, decode, inputs, workspace, stream, .. } = self;
        let served = Served { mode: RuntimeMode::Full, num_tokens };
        let mut step = make_step(config, decode, &plan, inputs, workspace, stream, num_tokens, served)?;
        stream.capture(|| enqueue(&mut step))
    }
}

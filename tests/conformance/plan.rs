//! Split counts and scratch.

use latentwave::plan::{self, ScratchReservation, scratch_shape};

use crate::report::{Report, equal};
use crate::table::Table;

pub(crate) fn num_kv_splits(table: &Table, report: &mut Report) {
    report.rows(table, |row| {
        let ours = plan::num_kv_splits(row.usize("max_seq_len"), row.usize("compute_units"));
        equal(&row.usize("num_kv_splits"), &ours)
    });
}

pub(crate) fn logits_shape(table: &Table, report: &mut Report) {
    report.rows(table, |row| {
        let splits = match row.bool("batch_invariant") {
            true => 1,
            false => plan::num_kv_splits(row.usize("max_seq_len"), row.usize("compute_units")),
        };
        let ours = scratch_shape(row.usize("q_rows"), row.usize("heads"), splits, row.usize("kv_lora_rank"));
        equal(&row.text("dtype"), &"float32")?;
        equal(&row.get("logits_shape"), &ours)
    });
}

pub(crate) fn reserve(table: &Table, report: &mut Report) {
    report.rows(table, |row| {
        let reservation = ScratchReservation {
            max_num_seqs: row.usize("max_num_seqs"),
            decode_threshold: row.usize("reorder_batch_threshold"),
            num_heads: row.usize("num_heads"),
            dcp_size: row.usize("dcp_size"),
            max_seq_len: row.usize("max_model_len"),
            num_compute_units: row.usize("compute_units"),
            kv_lora_rank: row.usize("kv_lora_rank"),
        };
        equal(&row.get("shape"), &reservation.shape())?;
        equal(&row.usize("bytes"), &reservation.bytes().map_err(|error| error.to_string())?)
    });
}

//! Workspace: slots, alignment, growth and lock.
//!
//! Lanes only multiply the slots, so they are mapped to slot numbers. Their own range checks, resources that persist and the
//! global manager are not in this crate; those operations are counted, not compared.

use std::panic::Location;

use latentwave::Error;
use latentwave::workspace::{Fit, SlotTable, layout};
use serde_json::{Value, json};

use crate::report::{Outcome, Report, Rule, Verdict};
use crate::table::{Row, Table};

static ZERO_BYTES: Rule = Rule {
    name: "a first request of zero bytes works",
    why: "vLLM has no buffer to slice then and fails with a TypeError",
};

/// Most views in one request of the tables; absent ones have no bytes and change no total.
const MAX_VIEWS: usize = 16;

pub(crate) fn workspace(table: &Table, report: &mut Report) {
    report.rows_with(table, check);
}

struct Manager {
    slots: SlotTable,
    microbatch: usize,
    lanes: i64,
    lane: i64,
}

impl Manager {
    fn new(init: &Value) -> Result<Self, String> {
        let count = |key: &str| init[key].as_u64().unwrap_or(1);
        let slots = SlotTable::new((count("num_ubatches") * count("num_lanes")) as usize);
        Ok(Self {
            slots: slots.map_err(|error| error.to_string())?,
            microbatch: 0,
            lanes: count("num_lanes") as i64,
            lane: 0,
        })
    }

    /// Serves views; the result as the table writes it, and whether vLLM would fail for want of a buffer.
    fn get(&mut self, views: &[(Vec<usize>, String)]) -> Result<(Value, bool), String> {
        let mut sizes = [0; MAX_VIEWS];
        for (size, (shape, dtype)) in sizes.iter_mut().zip(views) {
            // The names end in the number of bits.
            let bits: usize = dtype
                .trim_start_matches(|c: char| c.is_alphabetic())
                .parse()
                .map_err(|error| format!("element type {dtype}: {error}"))?;
            *size = shape.iter().product::<usize>() * bits / 8;
        }
        let (offsets, need) = layout(&sizes).map_err(|error| error.to_string())?;
        let slot = self.microbatch * self.lanes as usize + self.lane as usize;
        let before = self.slots.generation(slot).map_err(|error| error.to_string())?;
        let no_buffer = before == 0 && need == 0 && !views.is_empty();
        match self.slots.fit(slot, need, Location::caller()) {
            Ok(Fit::Grow(bytes)) => self.slots.replaced(slot, bytes).map_err(|error| error.to_string())?,
            Ok(Fit::Fits) => {}
            Err(Error::WorkspaceLocked { .. }) => return Ok((json!("AssertionError:E_LOCKED_GROWTH"), false)),
            Err(error) => return Err(error.to_string()),
        }
        let shapes: Vec<_> = views.iter().map(|(shape, _)| shape).collect();
        let result = json!({
            "offsets": offsets[..views.len()],
            "shapes": shapes,
            "slot": slot,
            "new_allocation": self.slots.generation(slot).map_err(|error| error.to_string())? != before,
            "slot_bytes": self.slots.bytes().collect::<Vec<_>>(),
        });
        Ok((result, no_buffer))
    }
}

fn check(row: Row<'_>, report: &mut Report) -> Verdict {
    let init = row.value("init");
    if init["num_lanes"].as_i64().is_some_and(|lanes| lanes < 1) {
        report.out_of_scope("workspaces without a lane");
        return Ok(Outcome::OutOfScope);
    }
    let (ops, results): (Vec<Value>, Vec<Value>) = (row.get("ops"), row.get("results"));
    if init.is_null() {
        ops.iter().for_each(|_| report.out_of_scope("operations of the global manager"));
        return Ok(Outcome::OutOfScope);
    }
    let mut manager = Manager::new(init)?;
    let (mut compared, mut zero_bytes) = (0, false);
    for (op, expected) in ops.iter().zip(&results) {
        let ours = match op[0].as_str().unwrap_or_default() {
            "get" if !(0..manager.lanes).contains(&manager.lane) => {
                report.out_of_scope("requests in a lane that is not there");
                continue;
            }
            "get" => {
                let views: Vec<(Vec<usize>, String)> =
                    serde_json::from_value(op[1].clone()).map_err(|error| error.to_string())?;
                if views.len() > MAX_VIEWS {
                    return Err(format!("{} views in one request; raise MAX_VIEWS", views.len()));
                }
                let (ours, no_buffer) = manager.get(&views)?;
                if no_buffer && ours != *expected {
                    let vllm = json!("TypeError:E_ZERO_BYTES_BEFORE_ANY_ALLOCATION");
                    if vllm != *expected {
                        return Err(format!("{op}: vLLM's value computed as {vllm}, but the row has {expected}"));
                    }
                    (compared, zero_bytes) = (compared + 1, true);
                    continue;
                }
                without_offsets_of_empty_views(ours, expected, &views)
            }
            "lock" => {
                manager.slots.lock();
                json!("ok")
            }
            "unlock" => {
                manager.slots.unlock();
                json!("ok")
            }
            "locked?" => json!(manager.slots.is_locked()),
            "ubatch" => {
                manager.microbatch = op[1].as_u64().ok_or("no microbatch number")? as usize;
                json!("ok")
            }
            "lane" => {
                manager.lane = op[1].as_i64().ok_or("no lane number")?;
                json!("ok")
            }
            "persistent" => {
                report.out_of_scope("persistent resources");
                continue;
            }
            "initialised?" => {
                report.out_of_scope("operations of the global manager");
                continue;
            }
            // The rest of the row asks a manager that is gone.
            "reset" => {
                report.out_of_scope("operations of the global manager");
                break;
            }
            other => return Err(format!("unknown operation {other}")),
        };
        compared += 1;
        if ours != *expected {
            return Err(format!("{op}: ours is {ours}, the row has {expected}"));
        }
    }
    Ok(match (compared, zero_bytes) {
        (0, _) => Outcome::OutOfScope,
        (_, true) => Outcome::Deviates(&ZERO_BYTES),
        (_, false) => Outcome::Equal,
    })
}

/// Where an empty view stands means nothing: takes its offset from the row.
fn without_offsets_of_empty_views(mut ours: Value, expected: &Value, views: &[(Vec<usize>, String)]) -> Value {
    for (i, (shape, _)) in views.iter().enumerate() {
        if shape.contains(&0) && ours["offsets"][i].is_number() {
            ours["offsets"][i] = expected["offsets"][i].clone();
        }
    }
    ours
}

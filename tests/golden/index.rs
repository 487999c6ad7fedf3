//! `index.X.json`: cases whose inputs come from a seed and whose results lie in `.npz` files.
//!
//! Number `i` of state `4 * seed` makes the queries, of `4 * seed + 1` the cache (every slot of it), of `4 * seed + 2` an fp8 cache.

use std::path::Path;

use latentwave::testing::{SplitMix64, Tolerance};
use latentwave::{DType, GraphBackend};
use serde_json::Value;

use super::{Tally, dcp, paged};

/// One case: its description and its arrays.
pub(crate) struct Case<'a> {
    json: &'a Value,
    file: std::path::PathBuf,
}

impl Case<'_> {
    pub(crate) fn field(&self, key: &str) -> Result<&Value, String> {
        self.json.get(key).ok_or_else(|| format!("no field `{key}`"))
    }

    pub(crate) fn get(&self, key: &str) -> Option<&Value> {
        self.json.get(key)
    }

    pub(crate) fn number(&self, key: &str) -> Result<f64, String> {
        self.field(key)?.as_f64().ok_or_else(|| format!("`{key}` is no number"))
    }

    pub(crate) fn size(&self, key: &str) -> Result<usize, String> {
        self.field(key)?.as_u64().map(|x| x as usize).ok_or_else(|| format!("`{key}` is no size"))
    }

    pub(crate) fn ints(&self, key: &str) -> Result<Vec<i32>, String> {
        ints(self.field(key)?).ok_or_else(|| format!("`{key}` is no list of integers"))
    }

    pub(crate) fn text(&self, key: &str) -> Result<&str, String> {
        self.field(key)?.as_str().ok_or_else(|| format!("`{key}` is no text"))
    }

    /// The generator of queries (0), cache (1) or fp8 cache (2).
    pub(crate) fn numbers(&self, stream: u64) -> Result<SplitMix64, String> {
        let seed = self.field("seed")?.as_u64().ok_or("`seed` is no integer")?;
        Ok(SplitMix64::new(4 * seed + stream))
    }

    /// An array of the case's `.npz` file, row-major.
    pub(crate) fn array(&self, name: &str) -> Result<Vec<f64>, String> {
        let why = |error: std::io::Error| format!("{}: {name}: {error}", self.file.display());
        let mut archive = npyz::npz::NpzArchive::open(&self.file).map_err(why)?;
        let array = archive.by_name(name).map_err(why)?.ok_or_else(|| format!("{name} is not in the file"))?;
        let npyz::DType::Plain(kind) = array.dtype() else { return Err(format!("{name} has fields")) };
        if array.header().order() != npyz::Order::C {
            return Err(format!("{name} is not row-major"));
        }
        let widen = |kind: &str| format!("{name} has type {kind}");
        Ok(match (kind.type_char(), kind.size_field()) {
            (npyz::TypeChar::Float, 8) => array.into_vec::<f64>().map_err(why)?,
            (npyz::TypeChar::Float, 4) => array.into_vec::<f32>().map_err(why)?.into_iter().map(f64::from).collect(),
            (npyz::TypeChar::Int, 4) => array.into_vec::<i32>().map_err(why)?.into_iter().map(f64::from).collect(),
            (npyz::TypeChar::Int, 1) => array.into_vec::<i8>().map_err(why)?.into_iter().map(f64::from).collect(),
            _ => return Err(widen(&kind.to_string())),
        })
    }

    /// The tolerance that these cases are to be met with in float32.
    pub(crate) fn tolerance(&self, dtype: DType) -> Tolerance {
        if dtype != DType::F32 {
            return Tolerance { frobenius: f64::INFINITY, ..Tolerance::HALF };
        }
        let name = self.text("name").unwrap_or_default();
        match self.text("group").unwrap_or_default() {
            // fp8 values reach 448 times the scale; the largest logits lose digits in float32 wherever they are computed.
            "fp8" => Tolerance::abs(2e-4),
            "extreme" if name.contains("big_logits") => Tolerance::abs(3e-3),
            _ => Tolerance::abs(2e-5),
        }
    }
}

/// A nested list of integers, flattened.
pub(crate) fn ints(value: &Value) -> Option<Vec<i32>> {
    match value {
        Value::Array(items) => items.iter().map(ints).collect::<Option<Vec<_>>>().map(|lists| lists.concat()),
        other => other.as_i64().and_then(|x| i32::try_from(x).ok()).map(|x| vec![x]),
    }
}

pub(crate) fn run<B: GraphBackend>(
    backend: &B,
    dtype: DType,
    json: &Value,
    arrays: &Path,
    stem: &str,
    tally: &mut Tally,
) {
    let Some(cases) = json.get("cases").and_then(Value::as_array) else {
        tally.failures.push(format!("{stem}: no list `cases`"));
        return;
    };
    if cases.is_empty() {
        tally.failures.push(format!("{stem}: no cases"));
    }
    for json in cases {
        let name = json.get("name").and_then(Value::as_str).unwrap_or("?");
        let group = json.get("group").and_then(Value::as_str).unwrap_or("?");
        let file = arrays.join(json.get("file").and_then(Value::as_str).unwrap_or("?"));
        let case = Case { json, file };
        let outcome = match group {
            "decode" | "dims" | "softcap" | "extreme" | "fp8" | "multi_token" => paged::check(backend, dtype, &case),
            "dcp" => dcp::check(backend, dtype, &case),
            other => Err(format!("unknown group `{other}`")),
        };
        tally.count(&format!("{stem}/{group}"), name, outcome);
    }
}

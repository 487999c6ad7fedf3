//! Options that several commands share, and how their values are written.

use std::path::Path;
use std::time::Duration;

use clap::Args;
use latentwave::{DType, Error, GraphMode, MlaConfig, ModelConfig, Result, SplitPolicy};

/// Which model's attention.
#[derive(Debug, Clone, Args)]
pub(crate) struct ModelArgs {
    /// Model: a preset's name, or the path of a Hugging Face config.json. `latentwave info` lists the presets.
    #[arg(long, default_value = "deepseek-v2-lite", value_name = "PRESET|config.json", help_heading = "Model")]
    pub(crate) model: String,
    /// Tokens per page of the cache.
    #[arg(long, default_value_t = 64, value_name = "N", help_heading = "Model")]
    pub(crate) page_size: usize,
}

impl ModelArgs {
    /// The model's file, if it is one.
    pub(crate) fn file(&self) -> Option<&Path> {
        let looks_like_a_file = self.model.ends_with(".json") || self.model.contains(std::path::MAIN_SEPARATOR);
        looks_like_a_file.then(|| Path::new(&self.model))
    }

    /// The model and its attention layer on one of `tp` devices.
    pub(crate) fn load(&self, tp: usize) -> Result<(ModelConfig, MlaConfig)> {
        let model = if let Some(path) = self.file() {
            let text = std::fs::read_to_string(path).map_err(|source| Error::Io { path: path.to_owned(), source })?;
            ModelConfig::from_json(&text, &self.model)?
        } else {
            ModelConfig::preset(&self.model)?
        };
        let mla = model.mla(tp, self.page_size)?;
        Ok((model, mla))
    }
}

/// Element types of queries and cache.
#[derive(Debug, Clone, Args)]
pub(crate) struct TypeArgs {
    /// Element type of queries and outputs: bf16, f16 or f32 (f32 on the host only).
    #[arg(long, default_value = "bf16", value_name = "TYPE", value_parser = dtype, help_heading = "Model")]
    pub(crate) dtype: DType,
    /// Element type of the cache: that of the queries unless fp8_e4m3 or fp8_e4m3fnuz (AMD gfx942) is named.
    #[arg(long, value_name = "TYPE", value_parser = dtype, help_heading = "Model")]
    pub(crate) kv_dtype: Option<DType>,
}

impl TypeArgs {
    /// Element type of the cache.
    pub(crate) fn kv(&self) -> DType {
        self.kv_dtype.unwrap_or(self.dtype)
    }
}

/// A time of at least a moment and at most a day.
pub(crate) fn seconds(arg: &'static str, seconds: f64) -> Result<Duration> {
    match Duration::try_from_secs_f64(seconds) {
        Ok(time) if seconds > 0.0 && seconds <= 86_400.0 => Ok(time),
        _ => Err(Error::argument(arg, format!("{seconds}: a positive number of seconds, 86400 at most, is needed"))),
    }
}

/// Parses the name of an element type.
pub(crate) fn dtype(text: &str) -> std::result::Result<DType, String> {
    match text.to_ascii_lowercase().as_str() {
        "bf16" | "bfloat16" => Ok(DType::BF16),
        "f16" | "fp16" | "float16" | "half" => Ok(DType::F16),
        "f32" | "fp32" | "float32" => Ok(DType::F32),
        "fp8" | "fp8_e4m3" => Ok(DType::Fp8E4m3),
        "fp8_e4m3fnuz" => Ok(DType::Fp8E4m3Fnuz),
        _ => Err("bf16, f16, f32, fp8_e4m3 and fp8_e4m3fnuz are possible".to_owned()),
    }
}

/// Parses a graph mode as it is displayed; case is free, and dashes are as good as underscores.
pub(crate) fn graph_mode(text: &str) -> std::result::Result<GraphMode, String> {
    let name = text.to_ascii_uppercase().replace('-', "_");
    [GraphMode::None, GraphMode::Piecewise, GraphMode::Full, GraphMode::FullDecodeOnly, GraphMode::FullAndPiecewise]
        .into_iter()
        .find(|mode| mode.to_string() == name)
        .ok_or_else(|| "none, piecewise, full, full-decode-only and full-and-piecewise are possible".to_owned())
}

/// Parses a split policy: `auto`, `min-tokens:N`, `fixed:N` or `invariant:N`.
pub(crate) fn split_policy(text: &str) -> std::result::Result<SplitPolicy, String> {
    let (kind, number) = text.split_once(':').unwrap_or((text, ""));
    let policy: fn(usize) -> SplitPolicy = match kind.to_ascii_lowercase().as_str() {
        "auto" if number.is_empty() => return Ok(SplitPolicy::Auto),
        "min-tokens" => SplitPolicy::MinTokens,
        "fixed" => SplitPolicy::Fixed,
        "invariant" => SplitPolicy::Invariant,
        _ => return Err("auto, min-tokens:N, fixed:N and invariant:N are possible".to_owned()),
    };
    match number.parse() {
        Ok(number) if number > 0 => Ok(policy(number)),
        _ => Err(format!("`{kind}` needs a number from 1, as in {kind}:32")),
    }
}

/// Parses a whole number within `least..=most`.
pub(crate) fn count(least: usize, most: usize) -> impl Fn(&str) -> std::result::Result<usize, String> + Clone {
    move |text| match text.parse() {
        Ok(number) if (least..=most).contains(&number) => Ok(number),
        _ => Err(format!("a whole number from {least} to {most} is needed")),
    }
}

/// Parses a probability.
pub(crate) fn probability(text: &str) -> std::result::Result<f64, String> {
    match text.parse() {
        Ok(p) if (0.0..=1.0).contains(&p) => Ok(p),
        _ => Err("a number from 0 to 1 is needed".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_values() {
        assert_eq!(dtype("FP8"), Ok(DType::Fp8E4m3));
        assert!(dtype("int4").unwrap_err().contains("bf16"));
        assert_eq!(graph_mode("full-and-piecewise"), Ok(GraphMode::FullAndPiecewise));
        assert_eq!(graph_mode("FULL_DECODE_ONLY"), Ok(GraphMode::FullDecodeOnly));
        assert!(graph_mode("fastest").is_err());
        assert_eq!(split_policy("auto"), Ok(SplitPolicy::Auto));
        assert_eq!(split_policy("fixed:8"), Ok(SplitPolicy::Fixed(8)));
        assert_eq!(split_policy("Invariant:256"), Ok(SplitPolicy::Invariant(256)));
        for bad in ["fixed", "fixed:0", "fixed:x", "auto:3", "some"] {
            assert!(split_policy(bad).is_err(), "{bad}");
        }
        assert_eq!(count(1, 8)("8"), Ok(8));
        assert!(count(1, 8)("0").is_err() && count(1, 8)("9").is_err() && count(0, 8)("-1").is_err());
        assert_eq!(probability("0.7"), Ok(0.7));
        assert!(probability("1.1").is_err() && probability("NaN").is_err());
    }

    #[test]
    fn models_by_name_and_by_file() {
        let load = |model: &str, tp| ModelArgs { model: model.to_owned(), page_size: 16 }.load(tp);
        let (model, mla) = load("deepseek-v3", 8).unwrap();
        assert_eq!((model.num_layers, mla.num_heads, mla.page_size), (61, 16, 16));
        assert!(matches!(load("no/config.json", 1), Err(Error::Io { .. })));
        assert!(matches!(load("no-model", 1), Err(Error::Argument { arg: "model", .. })));
        assert!(matches!(load("deepseek-v3", 7), Err(Error::Argument { arg: "tensor_parallel", .. })));
    }
}

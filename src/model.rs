//! What a model's attention is: presets of published models, and Hugging Face `config.json` files.

use serde_json::{Map, Value};

use crate::config::MlaConfig;
use crate::error::{Error, Result};

/// The attention of one model, before it is spread over devices.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Name of the preset, or of the file that it was read from.
    pub name: String,
    /// Query heads of the whole model.
    pub num_heads: usize,
    /// Width of the latent part of a cached row.
    pub kv_lora_rank: usize,
    /// Rank of the query projection; none where queries are projected at once.
    pub q_lora_rank: Option<usize>,
    /// Width of the part of a head that carries no position, before absorption.
    pub qk_nope_head_dim: usize,
    /// Width of the rotary part of a head, and of a cached row; 0 for models without.
    pub qk_rope_head_dim: usize,
    /// Width of a value head, after the latent output is projected up.
    pub v_head_dim: usize,
    /// Attention layers.
    pub num_layers: usize,
    /// YaRN's part in the softmax scale, if the model has one.
    pub yarn: Option<YarnScale>,
}

/// The two numbers by which YaRN changes the softmax scale. (What it does to the rotary frequencies is not attention's concern.)
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct YarnScale {
    /// How many times the trained context is stretched.
    pub factor: f64,
    /// `mscale_all_dim`: how much the attention sharpens with `factor`; 0 for not at all.
    pub mscale_all_dim: f64,
}

impl YarnScale {
    /// What the softmax scale is multiplied by: `(0.1 * mscale_all_dim * ln(factor) + 1)^2`, and 1 for a `factor` up to 1.
    ///
    /// Source: `yarn_get_mscale` of DeepSeek's modelling code, squared since it scales queries and keys alike.
    pub fn multiplier(&self) -> f64 {
        if self.factor <= 1.0 {
            return 1.0;
        }
        (0.1 * self.mscale_all_dim * self.factor.ln() + 1.0).powi(2)
    }
}

/// One row of the table of presets: name, heads, q rank, kv rank, nope, rope, v, layers, YaRN `(factor, mscale_all_dim)`.
type Preset = (&'static str, usize, Option<usize>, usize, usize, usize, usize, usize, Option<(f64, f64)>);

/// Widths are those of the published configurations (the classes of `transformers` where the file only repeats them). Layers
/// count attention layers: LongCat-Flash has two in each of its 28 blocks.
#[rustfmt::skip]
const PRESETS: &[Preset] = &[
    // deepseek-ai/DeepSeek-V2 (V2.5 stretches with mscale_all_dim 1: read its config.json)
    ("deepseek-v2",      128, Some(1536), 512, 128, 64, 128, 60, Some((40.0, 0.707))),
    // deepseek-ai/DeepSeek-V2-Lite
    ("deepseek-v2-lite",  16, None,       512, 128, 64, 128, 27, Some((40.0, 0.707))),
    // deepseek-ai/DeepSeek-V3 (V3.1 and V3.2 alike)
    ("deepseek-v3",      128, Some(1536), 512, 128, 64, 128, 61, Some((40.0, 1.0))),
    // deepseek-ai/DeepSeek-R1
    ("deepseek-r1",      128, Some(1536), 512, 128, 64, 128, 61, Some((40.0, 1.0))),
    // moonshotai/Kimi-K2-Instruct-0905 (other releases have other factors: read their config.json)
    ("kimi-k2",           64, Some(1536), 512, 128, 64, 128, 61, Some((64.0, 1.0))),
    // meituan-longcat/LongCat-Flash-Chat, class defaults
    ("longcat-flash",     64, Some(1536), 512, 128, 64, 128, 56, None),
    // zai-org/GLM-4.7-Flash
    ("glm-4.7-flash",     20, Some(768),  512, 192, 64, 256, 47, None),
    // zai-org/GLM-5: 3 dense and 75 expert layers
    ("glm-5",             64, Some(2048), 512, 192, 64, 256, 78, None),
    // mistralai/Mistral-Small-4-119B-2603, class defaults
    ("mistral-small-4",   32, Some(1024), 256,  64, 64, 128, 36, Some((128.0, 1.0))),
    // openbmb/MiniCPM3-4B
    ("minicpm3",          40, Some(768),  256,  64, 32,  64, 62, None),
];

impl ModelConfig {
    /// Names that [`ModelConfig::preset`] takes.
    pub fn presets() -> impl Iterator<Item = &'static str> {
        PRESETS.iter().map(|preset| preset.0)
    }

    /// A published model by name; upper and lower case are the same.
    ///
    /// # Errors
    /// [`Error::Argument`] listing the names there are.
    pub fn preset(name: &str) -> Result<Self> {
        let Some(&(name, num_heads, q_lora_rank, kv_lora_rank, nope, rope, v_head_dim, num_layers, yarn)) =
            PRESETS.iter().find(|preset| preset.0.eq_ignore_ascii_case(name))
        else {
            let known = Self::presets().collect::<Vec<_>>().join(", ");
            return Err(Error::argument("model", format!("no preset `{name}`; presets are {known}")));
        };
        Ok(Self {
            name: name.to_owned(),
            num_heads,
            kv_lora_rank,
            q_lora_rank,
            qk_nope_head_dim: nope,
            qk_rope_head_dim: rope,
            v_head_dim,
            num_layers,
            yarn: yarn.map(|(factor, mscale_all_dim)| YarnScale { factor, mscale_all_dim }),
        })
    }

    /// Reads a Hugging Face `config.json`. `name` is what errors call the file.
    ///
    /// A multi-modal model's language part is found under `text_config` (or `language_config`, `llm_config`). YaRN is read from
    /// `rope_scaling` or, as newer files have it, `rope_parameters`, with its kind under `rope_type` or `type`.
    ///
    /// # Errors
    /// [`Error::Parse`] naming the line of a malformed text, or the key that is missing or has an impossible value.
    pub fn from_json(text: &str, name: &str) -> Result<Self> {
        let root: Value = serde_json::from_str(text).map_err(|error| {
            let problem = if error.is_eof() { "the text ends inside the JSON value; is the file whole?" } else { "" };
            Error::Parse {
                what: name.to_owned(),
                place: format!("line {}, column {}", error.line(), error.column()),
                problem: if problem.is_empty() { error.to_string() } else { problem.to_owned() },
            }
        })?;
        let keys = Keys::language_part(&root, name)?;

        let num_heads = keys.count("num_attention_heads", 1)?;
        let kind = keys.map.get("model_type").and_then(Value::as_str).unwrap_or_default();
        Ok(Self {
            name: name.to_owned(),
            num_heads,
            kv_lora_rank: keys.count("kv_lora_rank", 1)?,
            q_lora_rank: keys.optional_count("q_lora_rank", 1)?,
            qk_nope_head_dim: keys.count("qk_nope_head_dim", 1)?,
            qk_rope_head_dim: keys.count("qk_rope_head_dim", 0)?,
            v_head_dim: match keys.optional_count("v_head_dim", 1)? {
                Some(width) => width,
                // MiniCPM3 writes no value width: its heads share the hidden width out.
                None if kind.starts_with("minicpm3") => keys.count("hidden_size", 1)? / num_heads,
                None => keys.count("v_head_dim", 1)?,
            },
            num_layers: match (kind, keys.optional_count("num_layers", 1)?) {
                // LongCat-Flash counts blocks of two attention layers.
                ("longcat_flash", Some(blocks)) => 2 * blocks,
                _ => keys.count("num_hidden_layers", 1)?,
            },
            yarn: keys.yarn()?,
        })
    }

    /// The softmax scale: `1 / sqrt(qk_nope_head_dim + qk_rope_head_dim)` times [`YarnScale::multiplier`].
    pub fn softmax_scale(&self) -> f64 {
        let plain = 1.0 / (self.qk_nope_head_dim as f64 + self.qk_rope_head_dim as f64).sqrt();
        plain * self.yarn.map_or(1.0, |yarn| yarn.multiplier())
    }

    /// The attention layer of one device of `tensor_parallel`, with pages of `page_size` tokens.
    ///
    /// Heads are shared out; the latent cache is not, every device holds it whole.
    ///
    /// # Errors
    /// [`Error::Argument`] if the heads do not divide, or as [`MlaConfig::validate`].
    pub fn mla(&self, tensor_parallel: usize, page_size: usize) -> Result<MlaConfig> {
        if tensor_parallel == 0 || !self.num_heads.is_multiple_of(tensor_parallel) {
            let fits: Vec<_> = (1..=self.num_heads).filter(|tp| self.num_heads.is_multiple_of(*tp)).collect();
            return Err(Error::argument(
                "tensor_parallel",
                format!(
                    "{tensor_parallel}: the {} heads of {} divide among {fits:?} devices",
                    self.num_heads, self.name
                ),
            ));
        }
        let mla = MlaConfig {
            num_heads: self.num_heads / tensor_parallel,
            kv_lora_rank: self.kv_lora_rank,
            qk_rope_head_dim: self.qk_rope_head_dim,
            page_size,
            sm_scale: self.softmax_scale() as f32,
            softcap: 0.0,
        };
        mla.validate()?;
        Ok(mla)
    }
}

/// Largest count that a configuration may hold; beyond it the file is broken.
const MOST: u64 = 1 << 24;

/// The object that holds a model's attention, and where it lies in the file.
struct Keys<'a> {
    map: &'a Map<String, Value>,
    /// Dotted path to `map`, empty or ending in a dot.
    path: &'static str,
    file: &'a str,
}

impl<'a> Keys<'a> {
    fn language_part(root: &'a Value, file: &'a str) -> Result<Self> {
        let Some(map) = root.as_object() else {
            return Err(Error::Parse {
                what: file.to_owned(),
                place: "the whole text".to_owned(),
                problem: "a JSON object was expected".to_owned(),
            });
        };
        let top = Self { map, path: "", file };
        if map.contains_key("kv_lora_rank") {
            return Ok(top);
        }
        for (key, path) in
            [("text_config", "text_config."), ("language_config", "language_config."), ("llm_config", "llm_config.")]
        {
            match map.get(key) {
                None | Some(Value::Null) => {}
                Some(Value::Object(map)) => return Ok(Self { map, path, file }),
                Some(other) => return Err(top.error(key, format!("an object was expected, found {}", kind_of(other)))),
            }
        }
        Ok(top)
    }

    fn error(&self, key: &str, problem: impl Into<String>) -> Error {
        Error::Parse { what: self.file.to_owned(), place: format!("key `{}{key}`", self.path), problem: problem.into() }
    }

    fn count(&self, key: &str, least: u64) -> Result<usize> {
        self.optional_count(key, least)?.ok_or_else(|| {
            let hint = if key == "kv_lora_rank" { "; without it this is no model with latent attention" } else { "" };
            self.error(key, format!("missing{hint}"))
        })
    }

    fn optional_count(&self, key: &str, least: u64) -> Result<Option<usize>> {
        let value = match self.map.get(key) {
            None | Some(Value::Null) => return Ok(None),
            Some(value) => value,
        };
        match value.as_u64() {
            Some(count) if (least..=MOST).contains(&count) => Ok(Some(count as usize)),
            _ => Err(self.error(key, format!("{value}: a whole number from {least} to {MOST} was expected"))),
        }
    }

    fn yarn(&self) -> Result<Option<YarnScale>> {
        for key in ["rope_scaling", "rope_parameters"] {
            let rope = match self.map.get(key) {
                None | Some(Value::Null) => continue,
                Some(Value::Object(rope)) => rope,
                Some(other) => return Err(self.error(key, format!("an object was expected, found {}", kind_of(other)))),
            };
            let number = |name: &str| match rope.get(name) {
                None | Some(Value::Null) => Ok(None),
                Some(value) => match value.as_f64().filter(|number| number.is_finite() && *number >= 0.0) {
                    Some(number) => Ok(Some(number)),
                    None => Err(self.error(&format!("{key}.{name}"), format!("{value}: a number from 0 was expected"))),
                },
            };
            let kind = rope.get("rope_type").or_else(|| rope.get("type")).and_then(Value::as_str).unwrap_or("default");
            // Other kinds change frequencies only.
            if !matches!(kind, "yarn" | "deepseek_yarn") {
                continue;
            }
            let Some(mscale_all_dim) = number("mscale_all_dim")? else { return Ok(None) };
            let factor = number("factor")?
                .ok_or_else(|| self.error(&format!("{key}.factor"), "missing, and YaRN's softmax scale needs it"))?;
            return Ok(Some(YarnScale { factor, mscale_all_dim }));
        }
        Ok(None)
    }
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests;

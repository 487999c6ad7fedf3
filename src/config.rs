//! What a decode attention layer is: heads, widths, page size, scale.

use crate::error::{Error, Result};

/// One MLA attention layer as the kernels see it: queries already absorbed into latent space, one latent row per cached token.
///
/// [`ModelConfig`](crate::model::ModelConfig) makes one from a preset or a Hugging Face `config.json`. There is no default scale:
/// it depends on the head width *before* absorption, which these fields do not tell.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MlaConfig {
    /// Query heads on this device.
    pub num_heads: usize,
    /// Width of the latent part of a cached row, and of a value row.
    pub kv_lora_rank: usize,
    /// Width of the rotary part of a cached row; 0 for models without.
    pub qk_rope_head_dim: usize,
    /// Tokens per page of the cache; any number from 1.
    pub page_size: usize,
    /// Softmax scale: `1 / sqrt(qk_nope_head_dim + qk_rope_head_dim)`, times the model's YaRN factor if it has one.
    pub sm_scale: f32,
    /// Logit soft cap `c`, `x -> c * tanh(x / c)`; 0 for none.
    pub softcap: f32,
}

impl MlaConfig {
    /// DeepSeek V2, V3 and R1 without YaRN: latent 512, rope 64, scale `1 / sqrt(192)`.
    pub fn deepseek(num_heads: usize, page_size: usize) -> Self {
        Self {
            num_heads,
            kv_lora_rank: 512,
            qk_rope_head_dim: 64,
            page_size,
            sm_scale: 1.0 / 192_f32.sqrt(),
            softcap: 0.0,
        }
    }

    /// Width of a query row and of a cached row.
    pub fn head_dim(&self) -> usize {
        self.kv_lora_rank + self.qk_rope_head_dim
    }

    /// Checks every field.
    ///
    /// # Errors
    /// [`Error::Argument`] naming the first field that is zero, too large or not finite.
    pub fn validate(&self) -> Result<()> {
        let range = |arg, value: usize, least: usize, most: usize| match value {
            v if v < least || v > most => Err(Error::argument(arg, format!("{v}: {least} to {most} are possible"))),
            _ => Ok(()),
        };
        range("num_heads", self.num_heads, 1, 1 << 16)?;
        range("kv_lora_rank", self.kv_lora_rank, 1, 1 << 14)?;
        range("qk_rope_head_dim", self.qk_rope_head_dim, 0, 1 << 14)?;
        range("page_size", self.page_size, 1, 1 << 20)?;
        if !self.sm_scale.is_finite() {
            return Err(Error::argument("sm_scale", format!("{}: a finite number is needed", self.sm_scale)));
        }
        if !(self.softcap.is_finite() && self.softcap >= 0.0) {
            return Err(Error::argument(
                "softcap",
                format!("{}: 0 (none) or a positive number is needed", self.softcap),
            ));
        }
        Ok(())
    }
}

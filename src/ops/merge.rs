//! Merging partial attention results by their log-sum-exp.

use super::check;
use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::kernel::params::{DcpCombineParams, MergeParams};
use crate::kernel::{Entry, Launch, Params, Variant};
use crate::stream::Stream;
use crate::tensor::{DType, Tensor};

const OUT_TYPES: &[DType] = &[DType::F32, DType::F16, DType::BF16];

fn dims<const N: usize, B: Backend>(arg: &'static str, expected: &str, tensor: &Tensor<B>) -> Result<[usize; N]> {
    let wrong = || Error::Shape { arg, expected: expected.to_owned(), got: tensor.shape().to_vec() };
    tensor.shape().try_into().map_err(|_| wrong())
}

fn output<B: Backend>(arg: &'static str, tensor: &Tensor<B>, shape: &[usize], dtype: DType) -> Result<()> {
    check::shape(arg, tensor, shape)?;
    check::contiguous(arg, tensor)?;
    match tensor.dtype() == dtype {
        true => Ok(()),
        false => Err(Error::argument(arg, format!("{} where the outputs are {dtype}", tensor.dtype()))),
    }
}

fn lse<B: Backend>(arg: &'static str, tensor: &Tensor<B>, shape: &[usize]) -> Result<()> {
    check::dtype(arg, tensor, &[DType::F32])?;
    check::shape(arg, tensor, shape)?;
    check::contiguous(arg, tensor)
}

/// Inputs of [`merge_states`]: two attention results of the same queries over different keys.
#[derive(Debug)]
pub struct MergeStates<'a, B: Backend> {
    /// `[num_tokens, num_heads, head_dim]`, contiguous.
    pub prefix_out: &'a Tensor<B>,
    /// Natural log, f32 `[num_heads, num_tokens]`. An infinite LSE of either sign means no keys.
    pub prefix_lse: &'a Tensor<B>,
    /// As `prefix_out`.
    pub suffix_out: &'a Tensor<B>,
    /// As `prefix_lse`.
    pub suffix_lse: &'a Tensor<B>,
    /// Tokens at or past this one have no prefix and copy the suffix; `None` if all have one.
    pub tokens_with_context: Option<usize>,
}

/// Merges two attention results (vLLM's `merge_attn_states`). A side without keys contributes nothing, whatever its output
/// holds; two such sides give output 0 and LSE −inf.
///
/// # Errors
/// [`Error::Shape`], [`Error::DType`], [`Error::Argument`] naming the argument; what the backend's launch returns.
pub fn merge_states<B: Backend>(
    stream: &Stream<B>,
    states: &MergeStates<'_, B>,
    out: &mut Tensor<B>,
    out_lse: Option<&mut Tensor<B>>,
) -> Result<()> {
    let MergeStates { prefix_out, prefix_lse, suffix_out, suffix_lse, tokens_with_context } = *states;
    check::dtype("prefix_out", prefix_out, OUT_TYPES)?;
    let [tokens, heads, head_dim] = dims("prefix_out", "[num_tokens, num_heads, head_dim]", prefix_out)?;
    for (arg, tensor) in [("prefix_out", prefix_out), ("suffix_out", suffix_out), ("out", &*out)] {
        output(arg, tensor, &[tokens, heads, head_dim], prefix_out.dtype())?;
    }
    for (arg, tensor) in
        [("prefix_lse", Some(prefix_lse)), ("suffix_lse", Some(suffix_lse)), ("out_lse", out_lse.as_deref())]
    {
        if let Some(tensor) = tensor {
            lse(arg, tensor, &[heads, tokens])?;
        }
    }
    if out.is_empty() {
        return Ok(());
    }
    let params = MergeParams {
        prefix_out: prefix_out.addr(),
        prefix_lse: prefix_lse.addr(),
        suffix_out: suffix_out.addr(),
        suffix_lse: suffix_lse.addr(),
        out: out.addr(),
        out_lse: out_lse.as_deref().map_or(0, Tensor::addr),
        num_tokens: check::int("prefix_out", tokens)?,
        num_heads: check::int("prefix_out", heads)?,
        head_dim: check::int("prefix_out", head_dim)?,
        tokens_with_context: check::int("tokens_with_context", tokens_with_context.unwrap_or(tokens).min(tokens))?,
    };
    let variant = Variant { threads: 128, ..Variant::simple(Entry::MergeStates, out.dtype()) };
    let kernel = stream.backend().prepare(&variant)?;
    let rows = u32::try_from(tokens * heads).map_err(|_| Error::argument("prefix_out", "more than 2^32 rows"))?;
    let launch = Launch { grid: [rows, 1, 1], threads: variant.threads, shared_bytes: 0, dependent: false, cluster: 1 };
    stream.retain(&[
        Some(prefix_out),
        Some(prefix_lse),
        Some(suffix_out),
        Some(suffix_lse),
        Some(&*out),
        out_lse.as_deref(),
    ]);
    // SAFETY: all tensors are contiguous and have the shapes that the parameters say.
    unsafe { stream.launch(&kernel, &launch, &Params::Merge(params)) }
}

/// Inputs of [`dcp_combine`]: what each decode-context-parallel rank found over its shard of the cache.
#[derive(Debug)]
pub struct DcpCombine<'a, B: Backend> {
    /// `[num_ranks, num_rows, num_heads, head_dim]`; each rank's part is contiguous.
    pub partial_out: &'a Tensor<B>,
    /// f32 `[num_ranks, num_rows, num_heads]`; each rank's part is contiguous. NaN and infinities mean an empty shard, whose output is ignored.
    pub partial_lse: &'a Tensor<B>,
    /// Whether the LSE are natural logarithms; base 2 otherwise. Reading one as the other is silently wrong (vLLM PR 47079).
    pub natural_log: bool,
}

/// Combines the ranks' results. Rows that are empty on all ranks give output 0 and LSE −inf.
///
/// # Errors
/// [`Error::Shape`], [`Error::DType`], [`Error::Argument`] naming the argument; what the backend's launch returns.
pub fn dcp_combine<B: Backend>(
    stream: &Stream<B>,
    combine: &DcpCombine<'_, B>,
    out: &mut Tensor<B>,
    out_lse: Option<&mut Tensor<B>>,
) -> Result<()> {
    let DcpCombine { partial_out, partial_lse, natural_log } = *combine;
    check::dtype("partial_out", partial_out, OUT_TYPES)?;
    let [ranks, rows, heads, head_dim] =
        dims("partial_out", "[num_ranks, num_rows, num_heads, head_dim]", partial_out)?;
    if ranks == 0 {
        return Err(Error::argument("partial_out", "no ranks: at least 1 is needed"));
    }
    output("partial_out", &partial_out.narrow(0, 0..1)?, &[1, rows, heads, head_dim], partial_out.dtype())?;
    check::shape("partial_lse", partial_lse, &[ranks, rows, heads])?;
    lse("partial_lse", &partial_lse.narrow(0, 0..1)?, &[1, rows, heads])?;
    output("out", out, &[rows, heads, head_dim], partial_out.dtype())?;
    if let Some(tensor) = out_lse.as_deref() {
        lse("out_lse", tensor, &[rows, heads])?;
    }
    if out.is_empty() {
        return Ok(());
    }
    let params = DcpCombineParams {
        partial_out: partial_out.addr(),
        partial_lse: partial_lse.addr(),
        out: out.addr(),
        out_lse: out_lse.as_deref().map_or(0, Tensor::addr),
        out_stride_rank: partial_out.strides()[0] as i64,
        lse_stride_rank: partial_lse.strides()[0] as i64,
        num_ranks: check::int("partial_out", ranks)?,
        num_rows: check::int("partial_out", rows)?,
        num_heads: check::int("partial_out", heads)?,
        head_dim: check::int("partial_out", head_dim)?,
        natural_log: i32::from(natural_log),
        reserved: 0,
    };
    let variant = Variant { threads: 128, ..Variant::simple(Entry::DcpCombine, out.dtype()) };
    let kernel = stream.backend().prepare(&variant)?;
    let blocks = u32::try_from(rows * heads).map_err(|_| Error::argument("partial_out", "more than 2^32 rows"))?;
    let launch =
        Launch { grid: [blocks, 1, 1], threads: variant.threads, shared_bytes: 0, dependent: false, cluster: 1 };
    stream.retain(&[Some(partial_out), Some(partial_lse), Some(&*out), out_lse.as_deref()]);
    // SAFETY: each rank's part is contiguous and all have the shapes that the parameters say.
    unsafe { stream.launch(&kernel, &launch, &Params::DcpCombine(params)) }
}

//! What a call's tensors are checked for, against each other, the plan and the configuration.

use super::{DecodeArgs, MlaDecode, Plan};
use crate::backend::Backend;
use crate::config::MlaConfig;
use crate::error::{Error, Result};
use crate::ops::cache::KvCache;
use crate::ops::check;
use crate::plan::PlanShape;
use crate::tensor::{DType, Tensor};

impl<B: Backend> MlaDecode<B> {
    pub(super) fn check_seq_lens(&self, plan: &Plan<B>, seq_lens: &Tensor<B>) -> Result<()> {
        if plan.config != self.config || plan.types != [self.q_dtype, self.kv_dtype] {
            return Err(Error::argument("plan", "made for another layer: plan with the `MlaDecode` that runs it"));
        }
        check::dtype("seq_lens", seq_lens, &[DType::I32])?;
        check::shape("seq_lens", seq_lens, &[plan.decode.shape.batch])?;
        check::contiguous("seq_lens", seq_lens)
    }

    /// Checks that a cache is of the type and the layout that this was set up for.
    pub(crate) fn check_cache(&self, cache: &KvCache<B>) -> Result<()> {
        let MlaConfig { kv_lora_rank, qk_rope_head_dim, page_size, .. } = self.config;
        if cache.dtype() != self.kv_dtype {
            return Err(Error::argument("kv_cache", format!("{} where {} was set up", cache.dtype(), self.kv_dtype)));
        }
        match (cache.kv_lora_rank(), cache.rope_dim(), cache.page_size()) == (kv_lora_rank, qk_rope_head_dim, page_size)
        {
            true => Ok(()),
            false => Err(Error::Shape {
                arg: "kv_cache",
                expected: format!("[num_pages, {page_size}, {}]", self.config.head_dim()),
                got: cache.latent().shape().to_vec(),
            }),
        }
    }

    /// Checks the tensors against each other, the plan and the configuration. Returns the table's width.
    pub(crate) fn check_args(&self, plan: &Plan<B>, args: &DecodeArgs<'_, B>) -> Result<usize> {
        let PlanShape { batch, query_len, num_heads, .. } = plan.decode.shape;
        let (rank, width) = (self.config.kv_lora_rank, self.config.head_dim());
        self.check_seq_lens(plan, args.seq_lens)?;
        check::dtype("block_table", args.block_table, &[DType::I32])?;
        check::dense_rows("block_table", args.block_table)?;
        let table_width = match args.block_table.shape() {
            [rows, table_width] if *rows == batch => *table_width,
            got => {
                let expected = format!("[{batch}, table_width]");
                return Err(Error::Shape { arg: "block_table", expected, got: got.to_vec() });
            }
        };
        let cache = args.kv_cache;
        self.check_cache(cache)?;
        check::kv_scale(args.kv_scale, self.kv_dtype)?;
        check::int("block_table", table_width.saturating_mul(self.config.page_size))?;
        for (arg, tensor, last) in [("q", args.q, width), ("out", &*args.out, rank)] {
            if tensor.dtype() != self.q_dtype {
                return Err(Error::argument(arg, format!("{} where {} was set up", tensor.dtype(), self.q_dtype)));
            }
            check::dense_rows(arg, tensor)?;
            check_rows(arg, tensor, batch, query_len, &[num_heads, last])?;
        }
        let alignment = plan.kernels.row_alignment;
        check::aligned("q", args.q, alignment)?;
        check::aligned("kv_cache", cache.latent(), alignment)?;
        cache.rope().map_or(Ok(()), |rope| check::aligned("k_rope", rope, alignment))?;
        check::aligned("out", args.out, alignment.div_ceil(2))?;
        // A cache without a rope tensor of its own names its latent twice.
        let inputs = [("q", args.q), ("kv_cache", cache.latent()), ("k_rope", cache.rope().unwrap_or(cache.latent()))];
        check::disjoint("out", args.out, &inputs)?;
        if let Some(lse) = args.lse.as_deref() {
            check::dtype("lse", lse, &[DType::F32])?;
            check::dense_rows("lse", lse)?;
            check_rows("lse", lse, batch, query_len, &[num_heads])?;
            check::disjoint("lse", lse, &inputs)?;
            check::disjoint("lse", lse, &[("out", args.out)])?;
        }
        Ok(table_width)
    }
}

/// Checks that a tensor is `[batch * query_len, ..rest]` or `[batch, query_len, ..rest]`.
fn check_rows<B: Backend>(
    arg: &'static str,
    tensor: &Tensor<B>,
    batch: usize,
    query_len: usize,
    rest: &[usize],
) -> Result<()> {
    let shape = tensor.shape();
    let fits = match shape.len().checked_sub(rest.len()) {
        Some(1) => shape[0] == batch * query_len && shape[1..] == *rest,
        Some(2) => shape[..2] == [batch, query_len] && shape[2..] == *rest,
        _ => false,
    };
    match fits {
        true => Ok(()),
        false => Err(Error::Shape {
            arg,
            expected: format!("[{}, {rest:?}] or [{batch}, {query_len}, {rest:?}] (flattened)", batch * query_len),
            got: shape.to_vec(),
        }),
    }
}

/// Strides of sequence, token and head of a tensor that passed [`check_rows`]; an LSE has no further dimension.
pub(super) fn row_strides<B: Backend>(
    arg: &'static str,
    tensor: &Tensor<B>,
    batch: usize,
    query_len: usize,
) -> Result<[i64; 3]> {
    let strides = tensor.strides();
    let dims = if arg == "lse" { 2 } else { 3 };
    let [sequence, token, head] = match strides.len() - dims {
        0 => [strides[0] * query_len, strides[0], strides[1]],
        _ => [strides[0], strides[1], strides[2]],
    };
    let last = [batch, query_len, 1]
        .iter()
        .zip([sequence, token, head])
        .try_fold(0_usize, |sum, (extent, stride)| sum.checked_add(extent.saturating_sub(1).checked_mul(stride)?));
    match last.map(i64::try_from) {
        Some(Ok(_)) => Ok([sequence as i64, token as i64, head as i64]),
        _ => Err(Error::argument(arg, "strides overflow")),
    }
}

//! A small random DeepSeek-style decoder layer on candle: low-rank projections of queries and keys, RMSNorm, RoPE, absorbed attention
//! over a paged latent cache, output projection. It generates greedily for three sequences, and its logits are compared at every
//! step with attention as it is written down: keys and values projected up for every head, nothing absorbed, nothing cached.
//!
//! `cargo run --features candle --example candle_decoder`

use candle_core::{D, DType, Device, Result, Tensor};
use latentwave::MlaConfig;
use latentwave::candle::CandleMla;
use latentwave::testing::SplitMix64;

const HIDDEN: usize = 64;
const VOCAB: usize = 97;
const Q_LORA_RANK: usize = 48;
const V_HEAD_DIM: usize = 16;
const QK_NOPE_HEAD_DIM: usize = 16;
const CONFIG: MlaConfig = MlaConfig {
    num_heads: 4,
    kv_lora_rank: 32,
    qk_rope_head_dim: 8,
    page_size: 4,
    sm_scale: 0.204_124_15,
    softcap: 0.0,
};
const NUM_PAGES: usize = 24;

struct Layer {
    embedding: Tensor,
    q_down: Tensor,
    q_up: Tensor,
    kv_down: Tensor,
    /// `[num_heads, qk_nope_head_dim, kv_lora_rank]`: goes into the queries.
    k_up: Tensor,
    /// `[num_heads, kv_lora_rank, v_head_dim]`: is applied to the outputs.
    v_up: Tensor,
    out: Tensor,
    head: Tensor,
}

/// A random matrix whose rows keep the size of what they multiply.
fn weight(seed: u64, shape: &[usize]) -> Result<Tensor> {
    let random = SplitMix64::new(seed);
    let fan_in = shape[shape.len() - 2] as f64;
    let values = (0..shape.iter().product::<usize>() as u64)
        .map(|i| ((random.number(i) >> 11) as f64 / (1_u64 << 52) as f64 - 1.0) * (3.0 / fan_in).sqrt());
    Tensor::from_vec(values.map(|value| value as f32).collect::<Vec<f32>>(), shape, &Device::Cpu)
}

fn rms_norm(x: &Tensor) -> Result<Tensor> {
    let mean = (x.sqr()?.mean_keepdim(D::Minus1)? + 1e-6)?;
    x.broadcast_div(&mean.sqrt()?)
}

/// Rotates neighbouring pairs of `x` `[tokens, .., dim]` by the angles of each token's position.
fn rope(x: &Tensor, positions: &[usize]) -> Result<Tensor> {
    let dim = x.dim(D::Minus1)?;
    let mut shape = vec![1; x.rank()];
    (shape[0], shape[x.rank() - 1]) = (positions.len(), dim / 2);
    let angle =
        |&position: &usize| (0..dim / 2).map(move |i| position as f32 * 10_000_f32.powf(-2.0 * i as f32 / dim as f32));
    let angles = Tensor::from_vec(positions.iter().flat_map(angle).collect::<Vec<_>>(), shape, &Device::Cpu)?;
    let half = |offset: u32| -> Result<Tensor> {
        let index: Vec<u32> = (0..dim as u32 / 2).map(|i| 2 * i + offset).collect();
        x.contiguous()?.index_select(&Tensor::new(index, &Device::Cpu)?, D::Minus1)
    };
    let (even, odd, cos, sin) = (half(0)?, half(1)?, angles.cos()?, angles.sin()?);
    let turned = [
        (even.broadcast_mul(&cos)? - odd.broadcast_mul(&sin)?)?,
        (odd.broadcast_mul(&cos)? + even.broadcast_mul(&sin)?)?,
    ];
    Tensor::stack(&turned, D::Minus1)?.reshape(x.dims())
}

impl Layer {
    fn random() -> Result<Self> {
        let MlaConfig { num_heads, kv_lora_rank, qk_rope_head_dim, .. } = CONFIG;
        Ok(Self {
            embedding: weight(1, &[VOCAB, HIDDEN])?.affine(5.0, 0.0)?,
            q_down: weight(2, &[HIDDEN, Q_LORA_RANK])?,
            q_up: weight(3, &[Q_LORA_RANK, num_heads * (QK_NOPE_HEAD_DIM + qk_rope_head_dim)])?,
            kv_down: weight(4, &[HIDDEN, kv_lora_rank + qk_rope_head_dim])?,
            k_up: weight(5, &[num_heads, QK_NOPE_HEAD_DIM, kv_lora_rank])?,
            v_up: weight(6, &[num_heads, kv_lora_rank, V_HEAD_DIM])?,
            out: weight(7, &[num_heads * V_HEAD_DIM, HIDDEN])?,
            head: weight(8, &[HIDDEN, VOCAB])?,
        })
    }

    fn embed(&self, tokens: &[u32]) -> Result<Tensor> {
        self.embedding.index_select(&Tensor::new(tokens, &Device::Cpu)?, 0)
    }

    /// What the cache holds of tokens: the normalised latent row, then the rotated rope row.
    fn cache_rows(&self, hidden: &Tensor, positions: &[usize]) -> Result<Tensor> {
        let rows = rms_norm(hidden)?.matmul(&self.kv_down)?;
        let latent = rms_norm(&rows.narrow(1, 0, CONFIG.kv_lora_rank)?)?;
        let k_pe = rope(&rows.narrow(1, CONFIG.kv_lora_rank, CONFIG.qk_rope_head_dim)?, positions)?;
        Tensor::cat(&[latent, k_pe], 1)?.contiguous()
    }

    /// Queries `[tokens, num_heads, ..]` without and with position.
    fn queries(&self, hidden: &Tensor, positions: &[usize]) -> Result<(Tensor, Tensor)> {
        let q = rms_norm(&rms_norm(hidden)?.matmul(&self.q_down)?)?.matmul(&self.q_up)?;
        let q = q.reshape((positions.len(), CONFIG.num_heads, ()))?;
        let q_pe = q.narrow(2, QK_NOPE_HEAD_DIM, CONFIG.qk_rope_head_dim)?;
        Ok((q.narrow(2, 0, QK_NOPE_HEAD_DIM)?, rope(&q_pe, positions)?))
    }

    /// Logits from hidden states and attention outputs `[num_heads, tokens, v_head_dim]`.
    fn logits(&self, hidden: &Tensor, heads: &Tensor) -> Result<Tensor> {
        let out = heads.transpose(0, 1)?.flatten_from(1)?.matmul(&self.out)?;
        rms_norm(&(hidden + out)?)?.matmul(&self.head)
    }

    /// One decode step: a token per sequence, whose cache row is written first.
    fn step(
        &self,
        mla: &CandleMla,
        cache: &Tensor,
        tables: &[Vec<u32>],
        last: &[u32],
        lens: &[usize],
    ) -> Result<Tensor> {
        let positions: Vec<usize> = lens.iter().map(|len| len - 1).collect();
        let slots: Vec<i64> = tables.iter().zip(&positions).map(|(table, &at)| slot(table, at)).collect();
        let hidden = self.embed(last)?;
        let rows = self.cache_rows(&hidden, &positions)?;
        mla.write_cache(cache, &rows, &Tensor::new(slots, &Device::Cpu)?)?;

        let (q_nope, q_pe) = self.queries(&hidden, &positions)?;
        // Absorbed: the queries go to latent space, instead of every cached token to each head's.
        let latent = q_nope.transpose(0, 1)?.contiguous()?.matmul(&self.k_up)?.transpose(0, 1)?;
        let q = Tensor::cat(&[latent, q_pe], 2)?.contiguous()?.unsqueeze(1)?;
        let seq_lens: Vec<i32> = lens.iter().map(|&len| len as i32).collect();
        let out = mla.attend(&q, cache, &Tensor::new(tables.to_vec(), &Device::Cpu)?, &seq_lens)?.squeeze(1)?;
        let heads = out.transpose(0, 1)?.contiguous()?.matmul(&self.v_up)?;
        self.logits(&hidden, &heads)
    }

    /// The logits of a sequence's last token, from all its tokens.
    fn reference(&self, tokens: &[u32]) -> Result<Tensor> {
        let positions: Vec<usize> = (0..tokens.len()).collect();
        let hidden = self.embed(tokens)?;
        let rows = self.cache_rows(&hidden, &positions)?;
        let (latent, k_pe) =
            (rows.narrow(1, 0, CONFIG.kv_lora_rank)?, rows.narrow(1, CONFIG.kv_lora_rank, CONFIG.qk_rope_head_dim)?);
        let last = hidden.narrow(0, tokens.len() - 1, 1)?;
        let (q_nope, q_pe) = self.queries(&last, &positions[tokens.len() - 1..])?;
        let heads = (0..CONFIG.num_heads).map(|head| {
            let k = Tensor::cat(&[latent.matmul(&self.k_up.get(head)?.t()?)?, k_pe.clone()], 1)?;
            let v = latent.matmul(&self.v_up.get(head)?)?;
            let q = Tensor::cat(&[q_nope.narrow(1, head, 1)?.squeeze(1)?, q_pe.narrow(1, head, 1)?.squeeze(1)?], 1)?;
            let weights = (q.matmul(&k.t()?)? * f64::from(CONFIG.sm_scale))?.exp()?;
            weights.broadcast_div(&weights.sum_keepdim(1)?)?.matmul(&v)
        });
        self.logits(&last, &Tensor::stack(&heads.collect::<Result<Vec<_>>>()?, 0)?)
    }
}

/// The cache slot of a position.
fn slot(table: &[u32], position: usize) -> i64 {
    let page = table[position / CONFIG.page_size] as usize;
    (page * CONFIG.page_size + position % CONFIG.page_size) as i64
}

fn main() -> Result<()> {
    let layer = Layer::random()?;
    let mla = CandleMla::new(CONFIG, DType::F32, DType::F32)?;
    let cache = Tensor::zeros((NUM_PAGES, CONFIG.page_size, CONFIG.head_dim()), DType::F32, &Device::Cpu)?;
    // Each sequence has its pages, in any order.
    let tables: Vec<Vec<u32>> = (0..3).map(|seq| (0..8).rev().map(|page| 3 * page + seq).collect()).collect();
    let mut tokens: Vec<Vec<u32>> = vec![vec![3], vec![1, 4, 1, 5, 9], (10..21).collect()];

    // Prompts but for their last token, which the first step takes.
    for (table, prompt) in tables.iter().zip(&tokens).filter(|(_, prompt)| prompt.len() > 1) {
        let positions: Vec<usize> = (0..prompt.len() - 1).collect();
        let rows = layer.cache_rows(&layer.embed(&prompt[..positions.len()])?, &positions)?;
        let slots: Vec<i64> = positions.iter().map(|&position| slot(table, position)).collect();
        mla.write_cache(&cache, &rows, &Tensor::new(slots, &Device::Cpu)?)?;
    }
    let mut worst = 0_f32;
    for _ in 0..16 {
        let last: Vec<u32> = tokens.iter().map(|tokens| tokens[tokens.len() - 1]).collect();
        let lens: Vec<usize> = tokens.iter().map(Vec::len).collect();
        let logits = layer.step(&mla, &cache, &tables, &last, &lens)?;
        for (seq, tokens) in tokens.iter_mut().enumerate() {
            let (got, want) = (logits.get(seq)?, layer.reference(tokens)?.squeeze(0)?);
            let most = want.abs()?.max(0)?.to_scalar::<f32>()?;
            worst = worst.max((&got - &want)?.abs()?.max(0)?.to_scalar::<f32>()? / most);
            tokens.push(got.argmax(0)?.to_scalar()?);
        }
    }
    for tokens in &tokens {
        println!("{tokens:?}");
    }
    println!("16 steps; logits differ from the reference by {worst:.1e} of the largest at most");
    assert!(worst < 1e-5, "absorbed and plain attention disagree");
    Ok(())
}

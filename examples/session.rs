//! A small engine around a [`DecodeSession`]: two layers, speculative decoding with one draft token, full graphs.
//!
//! `cargo run --example session` runs on the host backend; `Cuda::new(0)?` or `Rocm::new(0)?` instead of `Host::new()` is all that
//! a GPU needs.

use half::bf16;
use latentwave::session::{DecodeSession, SessionConfig, Step, StepBatch};
use latentwave::{DType, Host, KvCache, MlaConfig, Result, Tensor};

/// One attention layer's tensors. A real engine computes `q` and the new rows from hidden states on the same stream.
struct Layer {
    q: Tensor<Host>,
    kv_c: Tensor<Host>,
    k_pe: Tensor<Host>,
    cache: KvCache<Host>,
    out: Tensor<Host>,
}

/// The engine's whole step: called eagerly and while graphs are captured.
fn model(step: &mut Step<'_, Host>, layers: &mut [Layer]) -> Result<()> {
    for layer in layers {
        step.write_cache(&layer.kv_c, Some(&layer.k_pe), &layer.cache)?;
        step.decode(&layer.q, &layer.cache, &mut layer.out, None)?;
    }
    Ok(())
}

fn main() -> Result<()> {
    let dev = Host::new();
    let mla = MlaConfig::deepseek(16, 64);
    let (max_num_seqs, max_seq_len, num_pages) = (8, 1024, 64);
    let config = SessionConfig { num_spec_tokens: 1, ..SessionConfig::new(mla, max_num_seqs, max_seq_len, num_pages) };
    let rows = config.max_decode_tokens();
    let mut session = DecodeSession::new(&dev, config)?;
    println!("graph mode {}, {} bytes reserved", session.resolved().mode, session.reserved_bytes());
    for reason in &session.resolved().because {
        println!("  {reason}");
    }

    let random =
        |shape: [usize; 2], seed: f32| Tensor::from_fn(&dev, shape, |i| bf16::from_f32((i as f32 * 0.37 + seed).sin()));
    let mut layers = Vec::new();
    for seed in [0.0, 1.0] {
        layers.push(Layer {
            q: random([rows, 16 * 576], seed)?.reshape([rows, 16, 576])?,
            kv_c: random([rows, 512], seed + 2.0)?,
            k_pe: random([rows, 64], seed + 3.0)?,
            cache: KvCache::zeros(&dev, num_pages, &mla, DType::BF16)?,
            out: Tensor::zeros(&dev, [rows, 16, 512], DType::BF16)?,
        });
    }
    let captured = session.capture(|step| model(step, &mut layers))?.all()?;
    println!("{} graphs captured", captured.captured.len());

    // Five sequences grow by one or two tokens a step; each has its own pages, in any order.
    let tables: Vec<Vec<i32>> = (0..5).map(|seq| vec![seq * 3 + 1, seq * 3 + 2, seq * 3]).collect();
    let mut lens = [100, 7, 64, 33, 2];
    for accepted in [1, 2, 1] {
        let report = session.step(&StepBatch::decode(2, &lens, &tables), |step| model(step, &mut layers))?;
        println!("lengths {lens:?}: {report}");
        lens.iter_mut().for_each(|len| *len += accepted);
    }
    session.synchronize()
}

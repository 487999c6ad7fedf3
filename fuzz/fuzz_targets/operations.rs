//! Arguments of the operations, on the host backend: any shapes, types, strides, lengths, page ids and policies are refused by
//! name or computed without reading or writing past a tensor.
#![no_main]

use std::sync::LazyLock;

use arbitrary::{Result, Unstructured};
use latentwave::ops::{CacheWrite, DcpCombine, MergeStates, dcp_combine, gather_cache, merge_states, write_cache};
use latentwave::{DType, DecodeArgs, Host, KvCache, MlaConfig, MlaDecode, SplitPolicy, Stream, Tensor, Workspace};

const DTYPES: [DType; 8] =
    [DType::F32, DType::F16, DType::BF16, DType::Fp8E4m3, DType::Fp8E4m3Fnuz, DType::U8, DType::I32, DType::I64];

static HOST: LazyLock<Host> = LazyLock::new(Host::new);

/// Usually what is wanted, sometimes another.
fn dtype(u: &mut Unstructured<'_>, wanted: DType) -> Result<DType> {
    if u.ratio(1, 64)? { Ok(*u.choose(&DTYPES)?) } else { Ok(wanted) }
}

/// A tensor of about this shape, cut out of a larger one, filled with what the input holds.
fn tensor<const N: usize>(u: &mut Unstructured<'_>, wanted: DType, shape: [usize; N]) -> Result<Tensor<Host>> {
    let dtype = dtype(u, wanted)?;
    let mut wide = shape;
    let mut cuts = [(0, 0); N];
    for (dim, (extent, cut)) in wide.iter_mut().zip(&mut cuts).enumerate() {
        if u.ratio(1, 32)? {
            *extent = u.int_in_range(0..=4)?;
        }
        let room = if u.ratio(1, 8)? { u.int_in_range(0..=2)? } else { 0 };
        *cut = (dim, room);
        *extent += 2 * room;
    }
    let mut bytes = vec![0; wide.iter().product::<usize>() * dtype.size()];
    let seed = u.bytes(u.len().min(64))?;
    if !seed.is_empty() {
        bytes.iter_mut().zip(seed.iter().cycle()).for_each(|(byte, seed)| *byte = *seed);
    }
    let mut cut = Tensor::from_bytes(&*HOST, wide, dtype, &bytes).expect("a few elements");
    for (dim, room) in cuts {
        cut = cut.narrow(dim, room..wide[dim] - room).expect("inside");
    }
    Ok(cut)
}

struct Layer {
    config: MlaConfig,
    rows: DType,
    cache: KvCache<Host>,
    kv_scale: f32,
}

fn layer(u: &mut Unstructured<'_>) -> Result<Option<Layer>> {
    let config = MlaConfig {
        num_heads: u.int_in_range(0..=5)?,
        kv_lora_rank: u.int_in_range(0..=20)?,
        qk_rope_head_dim: u.int_in_range(0..=9)?,
        page_size: u.int_in_range(0..=5)?,
        sm_scale: if u.ratio(1, 16)? { u.arbitrary()? } else { 0.125 },
        softcap: if u.ratio(1, 16)? { u.arbitrary()? } else { 0.0 },
    };
    let rows = *u.choose(&DTYPES[..3])?;
    let kv = *u.choose(&DTYPES[..5])?;
    let (pages, size, rank, rope) =
        (u.int_in_range(0..=4)?, config.page_size, config.kv_lora_rank, config.qk_rope_head_dim);
    let cache = match u.int_in_range(0..=7)? {
        0 => KvCache::ds_mla(&tensor(u, DType::U8, [pages, size, 656])?),
        1 | 2 => {
            let latent = tensor(u, kv, [pages, size, rank])?;
            let rope = if rope > 0 { Some(tensor(u, kv, [pages, size, rope])?) } else { None };
            KvCache::split(&latent, rope.as_ref())
        }
        _ => KvCache::joined(&tensor(u, kv, [pages, size, rank + rope])?, &config),
    };
    let kv_scale = if u.ratio(1, 8)? { u.arbitrary()? } else { 1.0 };
    Ok(cache.ok().map(|cache| Layer { config, rows, cache, kv_scale }))
}

fn policy(u: &mut Unstructured<'_>) -> Result<SplitPolicy> {
    let number = if u.ratio(1, 8)? { u.arbitrary()? } else { u.int_in_range(0..=8)? };
    Ok(match u.int_in_range(0..=3)? {
        0 => SplitPolicy::Auto,
        1 => SplitPolicy::MinTokens(number),
        2 => SplitPolicy::Fixed(number),
        _ => SplitPolicy::Invariant(number),
    })
}

fn decode(u: &mut Unstructured<'_>, stream: &Stream<Host>, layer: &Layer) -> Result<()> {
    let Layer { config, rows, cache, kv_scale } = layer;
    let Ok(mla) = MlaDecode::new(&*HOST, *config, dtype(u, *rows)?, dtype(u, cache.dtype())?) else { return Ok(()) };
    let (batch, query_len, width) = (u.int_in_range(0..=3)?, u.int_in_range(0..=3)?, u.int_in_range(0..=4)?);
    let max_seq_len = if u.ratio(1, 16)? { u.arbitrary()? } else { width * config.page_size };
    let Ok(plan) = mla.plan(batch, query_len, max_seq_len, policy(u)?) else { return Ok(()) };
    let views = plan.decode().workspace_views();
    if views.iter().sum::<usize>() > 1 << 26 {
        return Ok(());
    }
    let mut workspace = Workspace::new(&*HOST, 1).expect("an empty workspace");
    if workspace.reserve(0, &views).is_err() {
        return Ok(());
    }
    let (num_rows, heads) = (batch * query_len, config.num_heads);
    let mut lse = if u.arbitrary()? { Some(tensor(u, DType::F32, [num_rows, heads])?) } else { None };
    let q = tensor(u, *rows, [num_rows, heads, config.head_dim()])?;
    let mut out = tensor(u, *rows, [num_rows, heads, config.kv_lora_rank])?;
    let args = DecodeArgs {
        q: &q,
        kv_cache: cache,
        block_table: &tensor(u, DType::I32, [batch, width])?,
        seq_lens: &tensor(u, DType::I32, [batch])?,
        out: &mut out,
        lse: lse.as_mut(),
        kv_scale: *kv_scale,
        causal: u.arbitrary()?,
    };
    let _ = mla.run(stream, &plan, &mut workspace, args);
    Ok(())
}

fn cache(u: &mut Unstructured<'_>, stream: &Stream<Host>, layer: &Layer) -> Result<()> {
    let Layer { config, rows, cache, kv_scale } = layer;
    let (tokens, batch, rope) = (u.int_in_range(0..=6)?, u.int_in_range(0..=3)?, config.qk_rope_head_dim);
    let k_pe = if u.ratio(1, 8)? == (rope > 0) { None } else { Some(tensor(u, *rows, [tokens, rope])?) };
    let write = CacheWrite {
        kv_c: &tensor(u, *rows, [tokens, config.kv_lora_rank])?,
        k_pe: k_pe.as_ref(),
        slot_mapping: &tensor(u, DType::I64, [tokens])?,
        kv_scale: *kv_scale,
    };
    let _ = write_cache(stream, cache, &write);
    let width = u.int_in_range(0..=4)?;
    let starts = if u.arbitrary()? { Some(tensor(u, DType::I32, [batch])?) } else { None };
    let (table, offsets) = (tensor(u, DType::I32, [batch, width])?, tensor(u, DType::I32, [batch + 1])?);
    let mut out = tensor(u, *rows, [tokens, config.head_dim()])?;
    let _ = gather_cache(stream, cache, &table, &offsets, starts.as_ref(), *kv_scale, &mut out);
    Ok(())
}

fn merge(u: &mut Unstructured<'_>, stream: &Stream<Host>) -> Result<()> {
    let (tokens, heads, dim, ranks) =
        (u.int_in_range(0..=4)?, u.int_in_range(0..=4)?, u.int_in_range(0..=9)?, u.int_in_range(0..=3)?);
    let rows = *u.choose(&DTYPES[..3])?;
    let mut out = tensor(u, rows, [tokens, heads, dim])?;
    let mut lse = if u.arbitrary()? { Some(tensor(u, DType::F32, [heads, tokens])?) } else { None };
    let states = MergeStates {
        prefix_out: &tensor(u, rows, [tokens, heads, dim])?,
        prefix_lse: &tensor(u, DType::F32, [heads, tokens])?,
        suffix_out: &tensor(u, rows, [tokens, heads, dim])?,
        suffix_lse: &tensor(u, DType::F32, [heads, tokens])?,
        tokens_with_context: u.arbitrary()?,
    };
    let _ = merge_states(stream, &states, &mut out, lse.as_mut());
    let mut lse = if u.arbitrary()? { Some(tensor(u, DType::F32, [tokens, heads])?) } else { None };
    let parts = DcpCombine {
        partial_out: &tensor(u, rows, [ranks, tokens, heads, dim])?,
        partial_lse: &tensor(u, DType::F32, [ranks, tokens, heads])?,
        natural_log: u.arbitrary()?,
    };
    let _ = dcp_combine(stream, &parts, &mut out, lse.as_mut());
    Ok(())
}

fn operate(u: &mut Unstructured<'_>) -> Result<()> {
    let stream = Stream::new(&*HOST).expect("a host stream");
    match u.int_in_range(0..=3)? {
        0 => merge(u, &stream)?,
        1 => {
            if let Some(layer) = layer(u)? {
                cache(u, &stream, &layer)?;
            }
        }
        _ => {
            if let Some(layer) = layer(u)? {
                decode(u, &stream, &layer)?;
            }
        }
    }
    stream.synchronize().expect("nothing was captured");
    Ok(())
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    // An input that ends early is no failure.
    let _ = operate(&mut Unstructured::new(data));
});

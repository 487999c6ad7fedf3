//! Prints the kernel variants that the selection table can give, as JSON, for `ci/compilers.py`: `variants [ARCH...]`. With the
//! features `cuda` and `rocm` their sources too: `text` is an index into `texts`.

use latentwave::DeviceInfo;
use latentwave::backend::DecodeShape;
use latentwave::kernel::{Entry, Variant, select};
use serde_json::{Value, json};

const ARCHES: [&str; 11] =
    ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"];

#[cfg(not(any(feature = "cuda", feature = "rocm")))]
fn source(_: &str, _: &Variant) -> Option<(String, Vec<String>)> {
    None
}

/// Text and options that a variant is compiled from; none in a build without that vendor.
#[cfg(any(feature = "cuda", feature = "rocm"))]
fn source(arch: &str, variant: &Variant) -> Option<(String, Vec<String>)> {
    latentwave::kernel::source_of(arch, variant).ok().map(|source| (source.text, source.options))
}

/// Query rows of a group, of 16 to 128, for which the table chooses this variant of stage 1 in a large batch.
fn rows_served(arch: &str, variant: &Variant) -> Vec<usize> {
    let device = DeviceInfo {
        backend: "",
        name: String::new(),
        arch: arch.to_owned(),
        index: 0,
        num_compute_units: 128,
        wave_size: 0,
        shared_bytes_per_block: select::shared_limit(arch),
        memory_bytes: 0,
        driver_version: String::new(),
    };
    let shape = |num_heads| DecodeShape {
        q_dtype: variant.q_dtype,
        kv_dtype: variant.kv_dtype,
        num_heads,
        query_len: 1,
        kv_lora_rank: variant.kv_lora_rank as usize,
        rope_dim: variant.rope_dim as usize,
        page_size: if variant.gather {
            1
        } else if variant.small {
            8
        } else {
            64
        },
        batch: 128,
        max_seq_len: 4096,
        portable: false,
        free_splits: true,
    };
    let chosen = |rows| select::decode_kernels(&shape(rows), &device).is_ok_and(|kernels| kernels.split == *variant);
    [16, 32, 64, 128].into_iter().filter(|&rows| chosen(rows)).collect()
}

fn describe(arch: &str, variant: &Variant, common: bool, texts: &mut Vec<String>) -> Value {
    let split = variant.entry == Entry::DecodeSplit;
    let (text, options) = source(arch, variant).unzip();
    let text = text.map(|text| {
        texts.iter().position(|known| *known == text).unwrap_or_else(|| {
            texts.push(text);
            texts.len() - 1
        })
    });
    json!({
        "arch": arch,
        "name": variant.to_string(),
        "symbol": variant.entry.symbol(),
        "common": common,
        "shared_bytes": if split { select::split_shared_bytes(variant, arch) } else { 0 },
        "shared_limit": select::shared_limit(arch),
        "rows": if split { rows_served(arch, variant) } else { Vec::new() },
        "kv_dtype": variant.kv_dtype.to_string(),
        "kv_bytes": variant.kv_dtype.size(),
        "kv_lora_rank": variant.kv_lora_rank,
        "rope_dim": variant.rope_dim,
        "block_rows": variant.block_rows,
        "tile_tokens": variant.tile_tokens,
        "threads": variant.threads,
        "form": variant.form,
        "text": text,
        "options": options,
    })
}

fn main() {
    let asked: Vec<String> = std::env::args().skip(1).collect();
    let mut texts = Vec::new();
    let mut variants = Vec::new();
    for arch in ARCHES.iter().filter(|arch| asked.is_empty() || asked.iter().any(|asked| asked == *arch)) {
        let common = select::variants(arch);
        let all = select::all_variants(arch);
        variants.extend(all.iter().map(|variant| describe(arch, variant, common.contains(variant), &mut texts)));
    }
    println!("{}", json!({"variants": variants, "texts": texts}));
}

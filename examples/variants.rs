//! Prints the kernel variants that the selection table can give, as JSON, for `ci/compilers.py`: `variants [ARCH...]`. With the
//! features `cuda` and `rocm` their sources too: `text` is an index into `texts`.

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

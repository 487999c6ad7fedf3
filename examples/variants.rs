//! Prints the kernel variants that the selection table can give, as JSON, for `ci/kernels.py`: `variants [ARCH...]`.

use latentwave::kernel::{Entry, Variant, select};

const ARCHES: [&str; 11] =
    ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"];

fn main() {
    let asked: Vec<String> = std::env::args().skip(1).collect();
    let arches = ARCHES.iter().filter(|arch| asked.is_empty() || asked.iter().any(|asked| asked == *arch));
    let describe = |arch: &str, variant: &Variant, common: &[Variant]| {
        let split = variant.entry == Entry::DecodeSplit;
        serde_json::json!({
            "arch": arch,
            "name": variant.to_string(),
            "symbol": variant.entry.symbol(),
            "common": common.contains(variant),
            "shared_bytes": if split { select::split_shared_bytes(variant, arch) } else { 0 },
            "defines": {
                "Q_DTYPE": variant.q_dtype.to_string().to_uppercase(),
                "KV_DTYPE": variant.kv_dtype.to_string().to_uppercase(),
                "KV_LORA_RANK": variant.kv_lora_rank,
                "ROPE_DIM": variant.rope_dim,
                "BLOCK_ROWS": variant.block_rows,
                "TILE_TOKENS": variant.tile_tokens,
                "STAGES": variant.stages,
                "THREADS": variant.threads,
                "FORM": variant.form,
            },
        })
    };
    let all: Vec<_> = arches
        .flat_map(|arch| {
            let common = select::variants(arch);
            select::all_variants(arch).iter().map(|variant| describe(arch, variant, &common)).collect::<Vec<_>>()
        })
        .collect();
    println!("{}", serde_json::Value::Array(all));
}

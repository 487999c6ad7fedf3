//! Which source text and which options make a [`Variant`].
//!
//! Kernels are written once, without includes and without a vendor's words. The text given to a vendor's compiler is the
//! vendor's headers, the shared headers and the kernel's own file, one after the other; the variant's constants are `-D`
//! options.

use std::borrow::Cow;

use sha2::{Digest, Sha256};

use super::{Entry, Variant, select, select_cdna, select_few, select_sm90};
use crate::tensor::DType;

/// A file of source text, carried in the library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SourceFile {
    /// Path in the repository, as compilers shall name it in their messages.
    pub name: &'static str,
    /// Content.
    pub text: &'static str,
}

/// Names a folder laid out as this repository, whose kernel files are read at run time instead of the carried ones: for those
/// who change kernels and do not want to build the library for each try. Their code has another hash, so nothing compiled
/// from the carried text is used for it.
const SOURCES_VARIABLE: &str = "LATENTWAVE_KERNEL_SOURCES";

impl SourceFile {
    /// The carried text, or the file's of the folder that [`SOURCES_VARIABLE`] names, where it can be read.
    fn current_text(&self) -> Cow<'static, str> {
        let replaced = std::env::var_os(SOURCES_VARIABLE)
            .and_then(|root| std::fs::read_to_string(std::path::Path::new(&root).join(self.name)).ok());
        replaced.map_or(Cow::Borrowed(self.text), Cow::Owned)
    }
}

macro_rules! embed {
    ($name:literal) => {
        SourceFile { name: $name, text: include_str!(concat!("../../", $name)) }
    };
}

/// A vendor's spelling of the device vocabulary, and how its compiler is called.
#[derive(Debug, Clone, Copy)]
pub struct Dialect {
    /// Name of the backend: `cuda` or `rocm`.
    pub backend: &'static str,
    /// The vendor's header.
    pub vendor: SourceFile,
    /// The vendor's matrix operations.
    pub mma: SourceFile,
    /// Options of every compilation.
    pub options: &'static [&'static str],
}

/// NVIDIA's dialect.
#[cfg(feature = "cuda")]
pub const CUDA: Dialect = Dialect {
    backend: "cuda",
    vendor: embed!("kernels/vendor.h"),
    mma: embed!("kernels/mma.h"),
    // The last prints registers and spills into the log; it does not change the code.
    options: &["--std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v"],
};

/// AMD's dialect.
#[cfg(feature = "rocm")]
pub const ROCM: Dialect = Dialect {
    backend: "rocm",
    vendor: SourceFile { name: "hip/device/vendor.h", text: hip_sys::VENDOR_H },
    mma: SourceFile { name: "hip/device/mma.h", text: hip_sys::MMA_H },
    options: &[
        "-std=c++17",
        "-O3",
        // Runs on HIP 5.7 and later; older compilers make what their own runtime takes, whatever the option says.
        "-mcode-object-version=5",
        // Nested loops over registers must be unrolled whole, and a call in a main loop would save and move registers.
        "-mllvm",
        "-pragma-unroll-threshold=1000000",
        "-mllvm",
        "-amdgpu-early-inline-all=true",
        "-mllvm",
        "-amdgpu-function-calls=false",
    ],
};

const PARAMS: SourceFile = embed!("kernels/params.h");
const TILE: SourceFile = embed!("kernels/tile.h");
const PLAN: SourceFile = embed!("kernels/mla_plan.cu");
const PART: SourceFile = embed!("kernels/mla_part.h");
const STREAM: SourceFile = embed!("kernels/mla_stream.h");
const SOFTMAX: SourceFile = embed!("kernels/mla_softmax.h");
const DECODE_SPLIT: SourceFile = embed!("kernels/mla_decode_split.cu");
const DECODE_SPLIT_TURNS: SourceFile = embed!("kernels/mla_decode_split_turns.cu");
const FEW: SourceFile = embed!("kernels/mla_few.h");
const DECODE_SPLIT_FEW: SourceFile = embed!("kernels/mla_decode_split_few.cu");
const SM90_WGMMA: SourceFile = embed!("kernels/sm90/wgmma.h");
const SM90_STREAM: SourceFile = embed!("kernels/sm90/stream.h");
const SM90_RING: SourceFile = embed!("kernels/sm90/ring.h");
const SM90_GATHER: SourceFile = embed!("kernels/sm90/gather.h");
const SM90_UNITS: SourceFile = embed!("kernels/sm90/units.h");
const SM90_FP8: SourceFile = embed!("kernels/sm90/fp8.h");
const SM90_ROWS_RESULT: SourceFile = embed!("kernels/sm90/rows_result.h");
const SM90_ROWS_BLOCK: SourceFile = embed!("kernels/sm90/rows_block.h");
const SM90_SPLIT_ROWS: SourceFile = embed!("kernels/sm90/mla_decode_split_rows.cu");
const SM90_KEYS_BLOCK: SourceFile = embed!("kernels/sm90/keys_block.h");
const SM90_KEYS_PIECES: SourceFile = embed!("kernels/sm90/keys_pieces.h");
const SM90_KEYS_RESULT: SourceFile = embed!("kernels/sm90/keys_result.h");
const SM90_SPLIT_KEYS: SourceFile = embed!("kernels/sm90/mla_decode_split_keys.cu");
const SM90_WIDE_BLOCK: SourceFile = embed!("kernels/sm90/wide_block.h");
const SM90_SPLIT_WIDE: SourceFile = embed!("kernels/sm90/mla_decode_split_wide.cu");
const SM90_FEW_TILES: SourceFile = embed!("kernels/sm90/few_tiles.h");
const SM90_FEW_SHARED: SourceFile = embed!("kernels/sm90/few_shared.h");
const SM90_FEW_BLOCK: SourceFile = embed!("kernels/sm90/few_block.h");
const SM90_SPLIT_FEW: SourceFile = embed!("kernels/sm90/mla_decode_split_few.cu");
const SM90_SPLIT_EITHER: SourceFile = embed!("kernels/sm90/mla_decode_split_either.cu");
const CDNA_LANES: SourceFile = embed!("kernels/cdna/lanes.h");
const CDNA_SPLIT_SLICES: SourceFile = embed!("kernels/cdna/mla_decode_split_slices.cu");
const CDNA_SPLIT_ROWS: SourceFile = embed!("kernels/cdna/mla_decode_split_rows.cu");
const CDNA_SPLIT_OWN_ROWS: SourceFile = embed!("kernels/cdna/mla_decode_split_own_rows.cu");
const DECODE_REDUCE: SourceFile = embed!("kernels/mla_decode_reduce.cu");
const CACHE: SourceFile = embed!("kernels/mla_cache.cu");
const MERGE: SourceFile = embed!("kernels/merge.cu");
const PROBE: SourceFile = embed!("kernels/probe.cu");
const SM90_PROBE: SourceFile = embed!("kernels/sm90/probe.cu");

/// The file that holds a variant's entry point, after those that it alone needs.
fn kernel_files(variant: &Variant) -> &'static [SourceFile] {
    match variant.entry {
        Entry::Plan => &[FEW, PLAN],
        Entry::DecodeSplit => match variant.form {
            select_sm90::ROWS_FORM => {
                &[SM90_WGMMA, SM90_STREAM, SM90_GATHER, SM90_RING, SM90_ROWS_RESULT, SM90_ROWS_BLOCK, SM90_SPLIT_ROWS]
            }
            select_sm90::KEYS_FORM => &[
                SM90_WGMMA,
                SM90_STREAM,
                SM90_GATHER,
                SM90_UNITS,
                SM90_FP8,
                SM90_KEYS_BLOCK,
                SM90_KEYS_PIECES,
                SM90_KEYS_RESULT,
                SM90_SPLIT_KEYS,
            ],
            select_sm90::WIDE_FORM => {
                &[SM90_WGMMA, SM90_STREAM, SM90_GATHER, SM90_UNITS, SM90_FP8, SM90_WIDE_BLOCK, SM90_SPLIT_WIDE]
            }
            select_few::FORM => &[FEW, DECODE_SPLIT_FEW],
            select_few::BOXES_FORM => {
                &[SM90_WGMMA, SM90_STREAM, FEW, SM90_FEW_TILES, SM90_FEW_SHARED, SM90_FEW_BLOCK, SM90_SPLIT_FEW]
            }
            select_few::EITHER_FORM => &[
                SM90_WGMMA,
                SM90_STREAM,
                FEW,
                SM90_FEW_TILES,
                SM90_FEW_SHARED,
                SM90_FEW_BLOCK,
                SM90_GATHER,
                SM90_RING,
                SM90_ROWS_RESULT,
                SM90_ROWS_BLOCK,
                SM90_SPLIT_EITHER,
            ],
            select_cdna::SLICES_FORM => &[PART, CDNA_LANES, CDNA_SPLIT_SLICES],
            select_cdna::ROWS_FORM => &[PART, CDNA_LANES, CDNA_SPLIT_ROWS],
            select_cdna::OWN_ROWS_FORM => &[PART, CDNA_LANES, CDNA_SPLIT_OWN_ROWS],
            select::TURNS_FORM => &[PART, STREAM, SOFTMAX, DECODE_SPLIT_TURNS],
            _ => &[PART, STREAM, SOFTMAX, DECODE_SPLIT],
        },
        Entry::DecodeReduce => &[FEW, DECODE_REDUCE],
        Entry::CacheWrite | Entry::CacheGather => &[CACHE],
        Entry::MergeStates | Entry::DcpCombine => &[MERGE],
        Entry::ProbeMatmul if variant.form == 1 => &[SM90_PROBE],
        Entry::ProbeRead | Entry::ProbeMatmul => &[PROBE],
    }
}

/// What a compiler is given for one kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// Name of the variant.
    pub name: String,
    /// Name of the entry point. A file may hold several.
    pub symbol: &'static str,
    /// The whole source text.
    pub text: String,
    /// Options, the architecture excepted.
    pub options: Vec<String>,
}

impl Source {
    /// Source and options of a variant for devices with waves of `wave` lanes.
    pub fn new(dialect: &Dialect, variant: &Variant, wave: usize) -> Self {
        let prelude = [dialect.vendor, dialect.mma, PARAMS, TILE];
        let files = || prelude.iter().chain(kernel_files(variant));
        let mut text = String::with_capacity(files().map(|file| file.text.len() + 64).sum());
        for file in files() {
            // A message then names the file and line that a reader can open.
            text.push_str(&format!("#line 1 \"{}\"\n{}\n", file.name, file.current_text()));
        }
        let options = dialect.options.iter().map(|&option| option.to_owned());
        let defines = defines(variant, wave).map(|(name, value)| format!("-D{name}={value}"));
        let options = options.chain(defines).collect();
        Self { name: variant.to_string(), symbol: variant.entry.symbol(), text, options }
    }

    /// SHA-256 of text and options, in hexadecimal digits: code with another hash is stale.
    pub fn hash(&self) -> String {
        let parts = std::iter::once(&self.text).chain(&self.options);
        hex(&digest(parts.map(|part| part.as_bytes())))
    }
}

/// The constants of a variant, as the kernels name them.
fn defines(variant: &Variant, wave: usize) -> impl Iterator<Item = (&'static str, u64)> {
    let constants = [
        ("Q_DTYPE", dtype_code(variant.q_dtype)),
        ("KV_DTYPE", dtype_code(variant.kv_dtype)),
        ("KV_LORA_RANK", variant.kv_lora_rank.into()),
        ("ROPE_DIM", variant.rope_dim.into()),
        ("BLOCK_ROWS", variant.block_rows.into()),
        ("TILE_TOKENS", variant.tile_tokens.into()),
        ("STAGES", variant.stages.into()),
        ("THREADS", variant.threads.into()),
        ("FORM", variant.form.into()),
        ("WAVE", wave as u64),
    ];
    let pages = [("GATHER", variant.gather), ("SMALL_PAGES", variant.small)];
    constants.into_iter().chain(pages.into_iter().filter_map(|(name, is)| is.then_some((name, 1))))
}

/// Codes of element types, the same in `kernels/params.h`.
fn dtype_code(dtype: DType) -> u64 {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::BF16 => 2,
        DType::Fp8E4m3 => 3,
        DType::Fp8E4m3Fnuz => 4,
        DType::U8 => 5,
        DType::I32 => 6,
        DType::I64 => 7,
    }
}

/// SHA-256 over parts, each with its length, so that no two lists of parts agree by chance of their borders.
pub(super) fn digest<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> [u8; 32] {
    let mut sha = Sha256::new();
    for part in parts {
        sha.update((part.len() as u64).to_le_bytes());
        sha.update(part);
    }
    sha.finalize().into()
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIALECT: Dialect = Dialect {
        backend: "test",
        vendor: SourceFile { name: "test/vendor.h", text: "// vendor" },
        mma: SourceFile { name: "test/mma.h", text: "// mma" },
        options: &["-O3"],
    };

    #[test]
    fn the_prelude_comes_in_order_and_every_file_names_itself() {
        let source = Source::new(&DIALECT, &Variant::simple(Entry::CacheGather, DType::BF16), 32);
        let names = ["test/vendor.h", "test/mma.h", "kernels/params.h", "kernels/tile.h", "kernels/mla_cache.cu"];
        let places: Vec<usize> =
            names.iter().map(|name| source.text.find(&format!("#line 1 \"{name}\"\n")).expect(name)).collect();
        assert!(places.is_sorted(), "{places:?}");
        assert!(source.options.starts_with(&["-O3".to_owned()]));
        assert!(source.options.contains(&"-DQ_DTYPE=2".to_owned()), "{:?}", source.options);
    }

    #[test]
    fn every_constant_the_text_and_the_wave_change_the_hash() {
        let base = Variant::simple(Entry::DecodeSplit, DType::BF16);
        let hash = |variant: Variant, wave| Source::new(&DIALECT, &variant, wave).hash();
        let changed = Dialect { vendor: SourceFile { text: "// vendor 2", ..DIALECT.vendor }, ..DIALECT };
        let mut hashes = vec![
            hash(base, 32),
            hash(base, 64),
            hash(Variant { q_dtype: DType::F16, ..base }, 32),
            hash(Variant { kv_dtype: DType::Fp8E4m3, ..base }, 32),
            hash(Variant { kv_lora_rank: 512, ..base }, 32),
            hash(Variant { rope_dim: 512, ..base }, 32),
            hash(Variant { block_rows: 512, ..base }, 32),
            hash(Variant { tile_tokens: 512, ..base }, 32),
            hash(Variant { stages: 512, ..base }, 32),
            hash(Variant { threads: 512, ..base }, 32),
            hash(Variant { form: 512, ..base }, 32),
            hash(Variant { gather: true, ..base }, 32),
            hash(Variant { entry: Entry::Plan, ..base }, 32),
            Source::new(&changed, &base, 32).hash(),
        ];
        let count = hashes.len();
        hashes.sort();
        hashes.dedup();
        assert_eq!(hashes.len(), count);
        assert_eq!(hash(base, 32), hash(base, 32));
    }
}

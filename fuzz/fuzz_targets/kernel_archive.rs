//! Archives of compiled kernels: whatever they hold, nothing but code of the size promised is taken from them.
#![no_main]

use std::sync::LazyLock;

use arbitrary::Arbitrary;
use latentwave::kernel::Source;
use latentwave::kernel::embedded::{Manifest, ManifestEntry, extract};

#[derive(Arbitrary, Debug)]
enum Archive<'a> {
    /// The file as it is.
    Raw(&'a [u8]),
    /// A readable manifest that may promise anything of its kernels.
    Promising { offset: usize, stored: usize, size: usize, kernels: &'a [u8] },
    /// Compressed code, and a size that may not be its own.
    Packed { code: &'a [u8], size: Option<usize> },
}

static SOURCE: LazyLock<Source> =
    LazyLock::new(|| Source { name: "kernel".into(), symbol: "kernel", text: String::new(), options: Vec::new() });

fn pack(offset: usize, stored: usize, size: usize, kernels: &[u8]) -> Vec<u8> {
    let entry = ManifestEntry { variant: SOURCE.name.clone(), source: SOURCE.hash(), offset, stored, size };
    let manifest = Manifest { arch: "sm_90a".into(), compiler: "none".into(), kernels: vec![entry] };
    let manifest = serde_json::to_vec(&manifest).expect("a manifest is JSON");
    [&b"LWKERNEL"[..], &(manifest.len() as u32).to_le_bytes(), &manifest, kernels].concat()
}

libfuzzer_sys::fuzz_target!(|archive: Archive<'_>| {
    match archive {
        Archive::Raw(bytes) => {
            let _ = extract(bytes, &SOURCE);
        }
        Archive::Promising { offset, stored, size, kernels } => {
            let code = extract(&pack(offset, stored, size, kernels), &SOURCE);
            assert!(code.is_none_or(|code| code.len() == size));
        }
        Archive::Packed { code, size } => {
            let mut encoder = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::fast());
            std::io::Write::write_all(&mut encoder, code).expect("a vector takes everything");
            let stored = encoder.finish().expect("a vector takes everything");
            let size = size.unwrap_or(code.len());
            let taken = extract(&pack(0, stored.len(), size, &stored), &SOURCE);
            assert_eq!(taken.as_deref(), (size == code.len()).then_some(code));
        }
    }
});

//! Entries of the disk cache: a damaged one is never given out, a sound one always.
#![no_main]

use std::sync::LazyLock;

use arbitrary::Arbitrary;
use latentwave::kernel::Source;
use latentwave::kernel::cache::{DiskCache, Key};

#[derive(Arbitrary, Debug)]
enum Entry<'a> {
    /// The file as it is.
    Raw(&'a [u8]),
    /// A sound entry, changed.
    Damaged { binary: &'a [u8], flips: Vec<(u16, u8)>, cut: Option<u16>, tail: &'a [u8] },
}

static CACHE: LazyLock<(DiskCache, Key)> = LazyLock::new(|| {
    let dir = std::env::temp_dir().join(format!("latentwave-fuzz-{}", std::process::id()));
    let source = Source { name: "kernel".into(), symbol: "kernel", text: String::new(), options: Vec::new() };
    (DiskCache::at(dir), Key::new("cuda", &source, "sm_90a", "nvrtc 13.0"))
});

libfuzzer_sys::fuzz_target!(|entry: Entry<'_>| {
    let (cache, key) = &*CACHE;
    let path = cache.path(key).expect("the cache has a directory");
    cache.put(key, b"").expect("the temporary directory can be written");
    match entry {
        Entry::Raw(bytes) => {
            std::fs::write(&path, bytes).expect("the temporary directory can be written");
            // A checksum of 256 bits is not found by chance.
            assert!(cache.get(key).is_none_or(|binary| binary.len() < bytes.len()));
        }
        Entry::Damaged { binary, flips, cut, tail } => {
            cache.put(key, binary).expect("the temporary directory can be written");
            let sound = std::fs::read(&path).expect("what was put");
            let mut bytes = sound.clone();
            for (at, mask) in flips {
                let at = usize::from(at) % bytes.len();
                bytes[at] ^= mask;
            }
            bytes.truncate(cut.map_or(usize::MAX, usize::from));
            bytes.extend(tail);
            std::fs::write(&path, &bytes).expect("the temporary directory can be written");
            assert_eq!(cache.get(key).as_deref(), (bytes == sound).then_some(binary));
        }
    }
});

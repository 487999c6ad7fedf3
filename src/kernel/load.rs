//! Where a kernel's code comes from: carried in the library, kept on disk, or compiled now. Whatever is found first and can
//! be loaded is taken, so code that this driver or device refuses is replaced by code made for it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::cache::{DiskCache, Key};
use super::compile::Compiler;
use super::source::{Dialect, Source};
use super::{Variant, embedded};
use crate::error::Result;
use crate::observe::span;

/// Where the code of a loaded kernel came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Origin {
    /// The library carries it.
    Embedded,
    /// The disk cache had it.
    Cached,
    /// It was compiled in this process.
    Compiled,
}

/// Finds code for `variant` on a device and gives it to `load` until that accepts it.
///
/// # Errors
/// What the compiler or, for code compiled now, `load` says.
pub(crate) fn load<K>(
    dialect: &Dialect,
    variant: &Variant,
    (arch, wave): (&str, usize),
    cache: &DiskCache,
    compiler: impl FnOnce() -> Result<&'static dyn Compiler>,
    mut load: impl FnMut(&[u8]) -> Result<K>,
) -> Result<(K, Origin)> {
    let source = Source::new(dialect, variant, wave);
    if let Some(kernel) = embedded::find(&source, arch).and_then(|code| load(&code).ok()) {
        return Ok((kernel, Origin::Embedded));
    }
    let compiler = compiler()?;
    let key = Key::new(dialect.backend, &source, arch, compiler.version());
    if let Some(kernel) = cache.get(&key).and_then(|code| load(&code).ok()) {
        return Ok((kernel, Origin::Cached));
    }
    let _span = span!(INFO, "compile", kernel = source.name, arch, compiler = compiler.version());
    let code = compiler.compile(&source, arch)?.code;
    let kernel = load(&code)?;
    // A place that cannot be written to costs the next process a compilation, and no more.
    let _ = cache.put(&key, &code);
    Ok((kernel, Origin::Compiled))
}

type Slot<K> = Arc<Mutex<Option<K>>>;

/// The kernels loaded on one device. Each is loaded once; different ones may be loaded at the same time.
pub(crate) struct Loaded<K>(Mutex<HashMap<Variant, Slot<K>>>);

impl<K: Clone> Loaded<K> {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(HashMap::new()))
    }

    /// The kernel, made by `make` if it is not there yet. A failure is not remembered.
    pub(crate) fn get_or_load(&self, variant: &Variant, make: impl FnOnce() -> Result<K>) -> Result<K> {
        let slot = self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(*variant).or_default().clone();
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = &*slot {
            return Ok(kernel.clone());
        }
        Ok(slot.insert(make()?).clone())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::super::source::SourceFile;
    use super::super::{Compiled, Entry};
    use super::*;
    use crate::error::Error;
    use crate::tensor::DType;

    const DIALECT: Dialect = Dialect {
        backend: "test",
        vendor: SourceFile { name: "vendor.h", text: "// load" },
        mma: SourceFile { name: "mma.h", text: "" },
        options: &[],
    };

    struct Counting(AtomicUsize);

    impl Compiler for Counting {
        fn version(&self) -> &str {
            "counting 1"
        }

        fn compile(&self, _: &Source, _: &str) -> Result<Compiled> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Ok(Compiled { code: b"good".to_vec(), log: String::new(), resources: None })
        }
    }

    #[test]
    fn compiled_code_is_cached_and_code_that_does_not_load_is_compiled_anew() {
        let dir = std::env::temp_dir().join(format!("latentwave-load-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        let cache = DiskCache::at(&dir);
        let compiler: &'static Counting = Box::leak(Box::new(Counting(AtomicUsize::new(0))));
        let variant = Variant::simple(Entry::Plan, DType::BF16);
        let device = ("test_arch", 32);
        let accept = |code: &[u8]| match code {
            b"good" => Ok(code.to_vec()),
            _ => Err(Error::CaptureFailed { reason: "not loadable".into() }),
        };
        let run = || load(&DIALECT, &variant, device, &cache, || Ok(compiler), accept).unwrap().1;
        assert_eq!(run(), Origin::Compiled);
        assert_eq!(run(), Origin::Cached);
        assert_eq!(compiler.0.load(Ordering::Relaxed), 1);
        // Sound on disk, but nothing that the device takes.
        let key = Key::new("test", &Source::new(&DIALECT, &variant, 32), "test_arch", "counting 1");
        cache.put(&key, b"bad").unwrap();
        assert_eq!(run(), Origin::Compiled);
        assert_eq!(run(), Origin::Cached);
        // Without a compiler there is nothing to fall back on.
        let none = || Err(Error::Unavailable { backend: "test", library: "none", reason: "not there".into() });
        let failed = load(&DIALECT, &variant, device, &cache, none, accept);
        assert!(matches!(failed, Err(Error::Unavailable { .. })));
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_kernel_is_made_once_by_many_threads_and_a_failure_is_tried_again() {
        let loaded = Loaded::<usize>::new();
        let made = AtomicUsize::new(0);
        let variant = Variant::simple(Entry::Plan, DType::BF16);
        let fail = || Err(Error::CaptureFailed { reason: "once".into() });
        assert!(loaded.get_or_load(&variant, fail).is_err());
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let make = || {
                        std::thread::sleep(std::time::Duration::from_millis(5));
                        Ok(made.fetch_add(1, Ordering::Relaxed))
                    };
                    assert_eq!(loaded.get_or_load(&variant, make).unwrap(), 0);
                });
            }
        });
        assert_eq!(made.into_inner(), 1);
    }
}

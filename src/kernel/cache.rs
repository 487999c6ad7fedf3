//! A disk cache of compiled kernels.
//!
//! It lies in `$LATENTWAVE_CACHE_DIR`, else `$XDG_CACHE_HOME/latentwave`, else `~/.cache/latentwave`. An entry carries its key
//! and a checksum: one that is cut short, changed, or made for something else is not used, and is written anew. A missing or
//! read-only directory only means that nothing is kept.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::{fs, io};

use super::source::{Source, digest, hex};

const MAGIC: [u8; 8] = *b"LWCACHE1";
/// Magic, key and checksum.
const HEADER: usize = 8 + 32 + 32;

/// What a cached kernel was made from. Any difference makes another key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Key {
    digest: [u8; 32],
    path: PathBuf,
}

impl Key {
    /// The key of a source compiled for `arch` by `compiler`, for this version of this crate.
    pub fn new(backend: &str, source: &Source, arch: &str, compiler: &str) -> Self {
        let parts = [backend, &source.hash(), arch, compiler, env!("CARGO_PKG_VERSION")];
        let digest = digest(parts.map(str::as_bytes));
        let file = format!("{}-{}.bin", source.name, &hex(&digest)[..16]);
        let folder = arch.replace(|c: char| !c.is_ascii_alphanumeric() && c != '_', "_");
        Self { digest, path: Path::new(backend).join(folder).join(file) }
    }
}

/// The cache, or none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskCache {
    dir: Option<PathBuf>,
}

/// What the cache holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CacheStatus {
    /// Its directory, if there is a place for one.
    pub dir: Option<PathBuf>,
    /// Files in it.
    pub entries: usize,
    /// Their bytes.
    pub bytes: u64,
}

impl DiskCache {
    /// The cache where the environment puts it.
    pub fn from_env() -> Self {
        let var = |name| std::env::var_os(name);
        Self { dir: location(var("LATENTWAVE_CACHE_DIR"), var("XDG_CACHE_HOME"), var("HOME")) }
    }

    /// The cache in this directory.
    pub fn at(dir: impl Into<PathBuf>) -> Self {
        Self { dir: Some(dir.into()) }
    }

    /// Where an entry lies or would lie.
    pub fn path(&self, key: &Key) -> Option<PathBuf> {
        self.dir.as_ref().map(|dir| dir.join(&key.path))
    }

    /// The binary under `key`, if there is a sound one.
    pub fn get(&self, key: &Key) -> Option<Vec<u8>> {
        let mut entry = fs::read(self.path(key)?).ok()?;
        let header = entry.get(..HEADER)?;
        let sound =
            header[..8] == MAGIC && header[8..40] == key.digest && header[40..HEADER] == digest([entry.get(HEADER..)?]);
        sound.then(|| entry.split_off(HEADER))
    }

    /// Keeps a binary. Readers see the old entry or the whole new one.
    ///
    /// # Errors
    /// What the file system says; nothing is kept then, and nothing is left behind.
    pub fn put(&self, key: &Key, binary: &[u8]) -> io::Result<()> {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let Some(path) = self.path(key) else { return Ok(()) };
        let entry = [&MAGIC[..], &key.digest, &digest([binary]), binary].concat();
        if let Some(folder) = path.parent() {
            create_private(folder)?;
        }
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let temporary = path.with_extension(format!("{}-{number}.tmp", std::process::id()));
        let written = fs::write(&temporary, entry).and_then(|()| fs::rename(&temporary, &path));
        if written.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        written
    }

    /// What is there now.
    pub fn status(&self) -> CacheStatus {
        let mut status = CacheStatus { dir: self.dir.clone(), ..CacheStatus::default() };
        let mut folders: Vec<PathBuf> = self.dir.iter().cloned().collect();
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                match entry.metadata() {
                    Ok(meta) if meta.is_dir() => folders.push(entry.path()),
                    Ok(meta) if entry.path().extension().is_some_and(|extension| extension == "bin") => {
                        status.entries += 1;
                        status.bytes += meta.len();
                    }
                    _ => {}
                }
            }
        }
        status
    }
}

/// Creates a folder that no other user can put code into.
fn create_private(folder: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)
}

/// The directory that these values of the variables mean. Relative ones are ignored, as the XDG specification asks for its own.
fn location(own: Option<OsString>, xdg: Option<OsString>, home: Option<OsString>) -> Option<PathBuf> {
    let absolute = |value: Option<OsString>| value.map(PathBuf::from).filter(|path| path.is_absolute());
    absolute(own)
        .or_else(|| absolute(xdg).map(|dir| dir.join("latentwave")))
        .or_else(|| absolute(home).map(|dir| dir.join(".cache").join("latentwave")))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let dir = std::env::temp_dir().join(format!("latentwave-cache-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&dir);
            Self(dir)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn key(text: &str, arch: &str, compiler: &str) -> Key {
        let options = vec!["-O3".into()];
        let source = Source { name: "kernel".into(), symbol: "kernel", text: text.into(), options };
        Key::new("cuda", &source, arch, compiler)
    }

    #[test]
    fn what_was_put_is_got_under_its_own_key_only() {
        let scratch = Scratch::new("key");
        let cache = DiskCache::at(&scratch.0);
        let first = key("a", "sm_90a", "nvrtc 13.0");
        assert_eq!(cache.get(&first), None);
        cache.put(&first, b"binary").unwrap();
        assert_eq!(cache.get(&first).as_deref(), Some(&b"binary"[..]));
        for other in
            [key("b", "sm_90a", "nvrtc 13.0"), key("a", "sm_80", "nvrtc 13.0"), key("a", "sm_90a", "nvrtc 12.8")]
        {
            assert_eq!(cache.get(&other), None);
        }
        cache.put(&first, b"newer").unwrap();
        assert_eq!(cache.get(&first).as_deref(), Some(&b"newer"[..]));
        assert_eq!(cache.status(), CacheStatus { dir: Some(scratch.0.clone()), entries: 1, bytes: HEADER as u64 + 5 });
    }

    #[test]
    fn corrupt_and_foreign_entries_are_not_used_and_can_be_replaced() {
        let scratch = Scratch::new("corrupt");
        let cache = DiskCache::at(&scratch.0);
        let key = key("a", "gfx942:sramecc+:xnack-", "hiprtc 6.4");
        cache.put(&key, b"some binary").unwrap();
        let path = cache.path(&key).unwrap();
        let good = fs::read(&path).unwrap();
        let mut damaged: Vec<Vec<u8>> = (0..good.len()).map(|cut| good[..cut].to_vec()).collect();
        damaged.extend((0..good.len()).map(|at| {
            let mut entry = good.clone();
            entry[at] ^= 1;
            entry
        }));
        damaged.push([&good[..], b"x"].concat());
        damaged.push(b"\x7fELF of another program".to_vec());
        for entry in damaged {
            fs::write(&path, &entry).unwrap();
            assert_eq!(cache.get(&key), None, "{entry:?}");
        }
        // A sound entry of another key under this name.
        let other = Key { digest: [7; 32], path: key.path.clone() };
        cache.put(&other, b"foreign").unwrap();
        assert_eq!(cache.get(&key), None);
        cache.put(&key, b"some binary").unwrap();
        assert_eq!(cache.get(&key).as_deref(), Some(&b"some binary"[..]));
    }

    #[test]
    fn an_unwritable_or_missing_place_is_no_failure_of_a_read_and_leaves_nothing() {
        let scratch = Scratch::new("unwritable");
        let key = key("a", "sm_90a", "nvrtc 13.0");
        assert_eq!(DiskCache { dir: None }.get(&key), None);
        DiskCache { dir: None }.put(&key, b"x").unwrap();
        // A file where the directory should be: no user, not even root, can write below it.
        fs::create_dir_all(&scratch.0).unwrap();
        fs::write(scratch.0.join("file"), b"").unwrap();
        let cache = DiskCache::at(scratch.0.join("file"));
        assert_eq!(cache.get(&key), None);
        assert!(cache.put(&key, b"x").is_err());
        // A folder where the entry should be: the rename fails, and the temporary file goes away.
        let cache = DiskCache::at(&scratch.0);
        let path = cache.path(&key).unwrap();
        fs::create_dir_all(&path).unwrap();
        assert_eq!(cache.get(&key), None);
        assert!(cache.put(&key, b"x").is_err());
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn many_writers_leave_a_whole_entry() {
        let scratch = Scratch::new("writers");
        let cache = DiskCache::at(&scratch.0);
        let key = key("a", "sm_90a", "nvrtc 13.0");
        std::thread::scope(|scope| {
            for writer in 0..4_u8 {
                let (cache, key) = (&cache, &key);
                scope.spawn(move || {
                    for _ in 0..50 {
                        cache.put(key, &vec![writer; 10_000]).unwrap();
                        let seen = cache.get(key).expect("a whole entry");
                        assert!(seen.len() == 10_000 && seen.iter().all(|&byte| byte == seen[0]));
                    }
                });
            }
        });
        assert_eq!(cache.status().entries, 1);
    }

    #[test]
    fn the_place_follows_the_variables_in_order() {
        let var = |value: &str| Some(OsString::from(value));
        let place = |own, xdg, home| location(own, xdg, home).map(|path| path.to_string_lossy().into_owned());
        assert_eq!(place(var("/a"), var("/b"), var("/c")).as_deref(), Some("/a"));
        assert_eq!(place(None, var("/b"), var("/c")).as_deref(), Some("/b/latentwave"));
        assert_eq!(place(None, None, var("/c")).as_deref(), Some("/c/.cache/latentwave"));
        assert_eq!(place(var(""), var("relative"), var("/c")).as_deref(), Some("/c/.cache/latentwave"));
        assert_eq!(place(None, None, None), None);
    }

    #[cfg(unix)]
    #[test]
    fn folders_are_private() {
        use std::os::unix::fs::PermissionsExt;
        let scratch = Scratch::new("private");
        let cache = DiskCache::at(&scratch.0);
        let key = key("a", "sm_90a", "nvrtc 13.0");
        cache.put(&key, b"x").unwrap();
        let folder = cache.path(&key).unwrap();
        assert_eq!(fs::metadata(folder.parent().unwrap()).unwrap().permissions().mode() & 0o077, 0);
    }
}

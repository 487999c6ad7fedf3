//! What a user may choose, by environment variables.

/// Configuration of the emulated device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Compute units that the device claims: `AMD_EMULATOR_CUS`, 8 by default. It does not change how it runs.
    pub compute_units: u32,
    /// Device memory in MiB: `AMD_EMULATOR_MEMORY_MIB`, 8192 by default. Pages are taken from the host when they are touched.
    pub memory_mib: u64,
    /// Threads that execute workgroups: `AMD_EMULATOR_THREADS`, by default all cores.
    pub threads: usize,
    /// Looks for LDS races, unaligned LDS accesses and matrix instructions under a partial execution mask, and fills new
    /// device memory with NaN: `AMD_EMULATOR_CHECK=1`.
    pub check: bool,
    /// Looks for reads of never-written memory and LDS too: `AMD_EMULATOR_CHECK=2`. A kernel may read such bytes ahead of time
    /// and not use them.
    pub strict: bool,
    /// File that statistics are appended to when the process ends: `AMD_EMULATOR_STATISTICS`.
    pub statistics: Option<std::path::PathBuf>,
    /// Prints each call of the driver interface and each packet: `AMD_EMULATOR_LOG=1`.
    pub log: bool,
    /// Instructions that one wave may execute before it is taken for hung: `AMD_EMULATOR_WAVE_LIMIT`, 2^32 by default.
    pub wave_limit: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            compute_units: 8,
            memory_mib: 8192,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            check: false,
            strict: false,
            statistics: None,
            log: false,
            wave_limit: 1 << 32,
        }
    }
}

impl Config {
    /// The configuration that the environment asks for.
    ///
    /// # Errors
    /// Names the variable whose value is no number, or out of range.
    pub fn from_environment() -> Result<Self, String> {
        let default = Self::default();
        Ok(Self {
            compute_units: number("AMD_EMULATOR_CUS", default.compute_units.into(), 1..=1024)? as u32,
            memory_mib: number("AMD_EMULATOR_MEMORY_MIB", default.memory_mib, 64..=1 << 20)?,
            threads: number("AMD_EMULATOR_THREADS", default.threads as u64, 1..=256)? as usize,
            check: number("AMD_EMULATOR_CHECK", 0, 0..=2)? > 0,
            strict: number("AMD_EMULATOR_CHECK", 0, 0..=2)? > 1,
            statistics: std::env::var_os("AMD_EMULATOR_STATISTICS").map(Into::into),
            log: number("AMD_EMULATOR_LOG", 0, 0..=1)? == 1,
            wave_limit: number("AMD_EMULATOR_WAVE_LIMIT", default.wave_limit, 1..=u64::MAX)?,
        })
    }
}

fn number(name: &str, default: u64, range: std::ops::RangeInclusive<u64>) -> Result<u64, String> {
    let Ok(text) = std::env::var(name) else { return Ok(default) };
    text.parse()
        .ok()
        .filter(|value| range.contains(value))
        .ok_or_else(|| format!("{name}={text}: expected a number from {} to {}", range.start(), range.end()))
}

//! What was executed, for the tables that CI prints.

use std::collections::BTreeMap;

/// Counts of one kernel.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct KernelStatistics {
    /// Times that it was dispatched.
    pub dispatches: u64,
    /// Instructions that its waves have executed.
    pub instructions: u64,
    /// Seconds from the first wave to the last.
    pub seconds: f64,
}

/// Counts of a device since it was made.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Statistics {
    /// By the address of the kernel's descriptor.
    pub kernels: BTreeMap<u64, KernelStatistics>,
    /// Instructions executed, by mnemonic.
    pub mnemonics: BTreeMap<&'static str, u64>,
}

impl Statistics {
    /// Sums over all kernels.
    pub fn total(&self) -> KernelStatistics {
        self.kernels.values().fold(KernelStatistics::default(), |sum, kernel| KernelStatistics {
            dispatches: sum.dispatches + kernel.dispatches,
            instructions: sum.instructions + kernel.instructions,
            seconds: sum.seconds + kernel.seconds,
        })
    }

    /// Lines for a file: one `total DISPATCHES INSTRUCTIONS SECONDS`, and one `mnemonic NAME COUNT` for each.
    pub fn lines(&self) -> String {
        let total = self.total();
        let mut text = format!("total {} {} {:.6}\n", total.dispatches, total.instructions, total.seconds);
        for (name, count) in &self.mnemonics {
            text += &format!("mnemonic {name} {count}\n");
        }
        text
    }
}

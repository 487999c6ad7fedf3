//! What stops a kernel.

use thiserror::Error;

/// What went wrong.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum FaultKind {
    /// An instruction that no decode table has.
    #[error("instruction not implemented: encoding {}, {form}{}", hex(words), listing(words))]
    Undecoded {
        /// Its first dwords.
        words: Vec<u32>,
        /// Encoding and opcode.
        form: String,
    },
    /// A known instruction in a form that is not implemented.
    #[error("not implemented: {0}")]
    Unsupported(&'static str),
    /// A jump through a register to an address that holds no code.
    #[error("jump to {0:#x}, which is in no allocation")]
    IndirectJump(u64),
    /// An address that belongs to no allocation.
    #[error("lane {lane} {} {len} bytes at {address:#x}: no allocation of the device holds them{hint}", if *write { "writes" } else { "reads" })]
    OutOfBounds {
        /// First byte.
        address: u64,
        /// Bytes.
        len: u64,
        /// Lane of the wave.
        lane: u32,
        /// A store or an atomic.
        write: bool,
        /// Where the nearest allocation lies.
        hint: String,
    },
    /// A load of bytes that nothing has written since they were allocated.
    #[error("lane {lane} reads {address:#x}, which nothing has written since it was allocated")]
    NeverWritten {
        /// First byte.
        address: u64,
        /// Lane of the wave.
        lane: u32,
    },
    /// An LDS access past the workgroup's allotment.
    #[error("lane {lane} {} {len} bytes of LDS at {address}: the workgroup has {size}", if *write { "writes" } else { "reads" })]
    LdsOutOfBounds {
        /// First byte.
        address: u32,
        /// Bytes.
        len: u32,
        /// Lane of the wave.
        lane: u32,
        /// The workgroup's LDS bytes.
        size: u32,
        /// A store or an atomic.
        write: bool,
    },
    /// An LDS access that is not aligned to its size or to a dword.
    #[error("lane {lane}: LDS access of {len} bytes at {address} is not aligned")]
    LdsUnaligned {
        /// First byte.
        address: u32,
        /// Bytes.
        len: u32,
        /// Lane of the wave.
        lane: u32,
    },
    /// Two waves touch a byte of LDS with no barrier between them, and one of them writes.
    #[error("race on LDS byte {address}: wave {first} {} and wave {second} {}, with no barrier between", verb(*first_writes), verb(*second_writes))]
    LdsRace {
        /// The byte.
        address: u32,
        /// The wave that came first here; hardware may order them otherwise.
        first: u32,
        /// What it did.
        first_writes: bool,
        /// The other wave.
        second: u32,
        /// What that did.
        second_writes: bool,
    },
    /// A load of LDS that the workgroup has not written.
    #[error("lane {lane} reads LDS byte {address}, which the workgroup has not written")]
    LdsNeverWritten {
        /// The byte.
        address: u32,
        /// Lane of the wave.
        lane: u32,
    },
    /// An access past a lane's private segment.
    #[error("lane {lane}: private segment access of {len} bytes at {address}, the segment has {size}")]
    PrivateOutOfBounds {
        /// First byte.
        address: i64,
        /// Bytes.
        len: u64,
        /// Lane of the wave.
        lane: u32,
        /// The segment's bytes.
        size: u64,
    },
    /// A matrix instruction while some lanes are masked off: it computes and writes all lanes nevertheless, so it belongs into
    /// code that whole waves take or leave, by a branch on a scalar.
    #[error("a matrix instruction with the execution mask {exec:#018x}: it writes every lane all the same")]
    MaskedMatrix {
        /// The execution mask.
        exec: u64,
    },
    /// `s_trap`: an assertion of the program.
    #[error("s_trap {0}: the program stopped itself")]
    Trap(u32),
    /// More instructions than `wave_limit`.
    #[error("a wave has executed {0} instructions: it hangs")]
    Hung(u64),
    /// The dispatch packet or kernel descriptor cannot be run.
    #[error("{0}")]
    Dispatch(String),
    /// A defect of the emulator itself, such as a register index past the allotment.
    #[error("the emulator failed: {0}")]
    Internal(String),
}

fn verb(writes: bool) -> &'static str {
    if writes { "writes" } else { "reads" }
}

fn hex(words: &[u32]) -> String {
    words.iter().map(|word| format!("{word:08x}")).collect::<Vec<_>>().join(" ")
}

/// LLVM's disassembly, when its assembler is installed.
fn listing(words: &[u32]) -> String {
    let bytes: Vec<_> = words.iter().flat_map(|word| word.to_le_bytes()).map(|byte| format!("{byte:#04x}")).collect();
    let text = disassemble(&bytes.join(" "));
    text.map(|text| format!(": {text}")).unwrap_or_default()
}

fn disassemble(bytes: &str) -> Option<String> {
    use std::io::Write;
    use std::process::{Command, Stdio};
    ["llvm-mc", "llvm-mc-22", "llvm-mc-19"].iter().find_map(|tool| {
        let mut child = Command::new(tool)
            .args(["--disassemble", "--arch=amdgcn", "--mcpu=gfx942"])
            .env_remove("LD_LIBRARY_PATH")
            .env_remove("LD_PRELOAD")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .ok()?;
        child.stdin.take()?.write_all(bytes.as_bytes()).ok()?;
        let output = child.wait_with_output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        text.lines().map(str::trim).find(|line| line.starts_with(|c: char| c.is_ascii_lowercase())).map(Into::into)
    })
}

/// A fault and where it happened.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "kernel {kernel:#x}, {mnemonic} at {pc:#x} (byte {offset:#x} of its code), workgroup {workgroup:?}, wave {wave}: {kind}"
)]
pub struct Fault {
    /// Address of the kernel descriptor.
    pub kernel: u64,
    /// Address of the instruction.
    pub pc: u64,
    /// Bytes from the kernel's entry point.
    pub offset: i64,
    /// The instruction.
    pub mnemonic: &'static str,
    /// Workgroup x, y, z.
    pub workgroup: [u32; 3],
    /// Wave in the workgroup.
    pub wave: u32,
    /// What went wrong.
    pub kind: FaultKind,
}

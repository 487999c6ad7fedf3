//! Measures the interpreter: `cargo run --release --example speed -- CODE_OBJECT`, on `tests/kernels/test.hip` compiled.

use hsakmt::device::{CodeObject, Config, Device, Dispatch};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("usage: speed CODE_OBJECT")?;
    let device = Device::new(Config::from_environment()?);
    let code = CodeObject::load(&std::fs::read(path)?, &device.memory)?;
    let mut buffers = Vec::new();
    let mut buffer = |len: usize| {
        let buffer = vec![0u64; len / 8];
        let address = buffer.as_ptr() as u64;
        device.memory.insert(address, len as u64);
        buffers.push(buffer);
        address
    };
    let (a, b, c) = (buffer(1 << 22), buffer(1 << 22), buffer(1 << 22));
    let ints = |x: i32, y: i32| u64::from(x.cast_unsigned()) | u64::from(y.cast_unsigned()) << 32;
    for (name, grid, threads, arguments) in [
        ("gemm", 64 * 64, 64, vec![a, b, c, ints(256, 1024)]),
        ("vector_add", 1 << 18, 256, vec![a, b, c, ints(1 << 18, 0)]),
        ("functions", 1 << 16, 256, vec![a, b, c, ints(1 << 16, 0)]),
        ("reduce", 256, 256, vec![a, c, ints(1 << 20, 0)]),
    ] {
        let kernarg = buffer(1024);
        for (n, value) in arguments.iter().enumerate() {
            // SAFETY: the buffer has room for the arguments.
            unsafe { ((kernarg + 8 * n as u64) as *mut u64).write(*value) };
        }
        let kernel = code.kernel(name).ok_or_else(|| format!("no kernel {name}"))?;
        let before = device.statistics().total();
        let dispatch = Dispatch {
            kernel,
            grid: [grid, 1, 1],
            workgroup: [threads, 1, 1],
            group_bytes: 4096,
            private_bytes: 0,
            kernarg,
            ..Dispatch::default()
        };
        device.run(&dispatch)?;
        let after = device.statistics().total();
        let (instructions, seconds) = (after.instructions - before.instructions, after.seconds - before.seconds);
        println!(
            "{name:12} {instructions:9} wave instructions, {seconds:.3} s, {:.2} M/s",
            instructions as f64 / seconds / 1e6
        );
    }
    Ok(())
}

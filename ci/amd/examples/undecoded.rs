//! Names the instructions of code objects that no table has: `cargo run --example undecoded -- FILE...`.

use std::process::ExitCode;

use hsakmt::device::{CodeObject, Memory, Program};

fn main() -> Result<ExitCode, Box<dyn std::error::Error>> {
    let mut missing = 0;
    for path in std::env::args().skip(1) {
        let memory = Memory::default();
        let code = CodeObject::load(&std::fs::read(&path)?, &memory)?;
        for name in code.kernels() {
            let kernel = code.kernel(name).ok_or("a kernel that has no descriptor")?;
            let program = Program::decode(&memory, kernel).map_err(|kind| kind.to_string())?;
            let undecoded: Vec<_> = program.undecoded(&memory).collect();
            println!("{path} {name}: {} instructions, {} not implemented", program.insts.len(), undecoded.len());
            for fault in &undecoded {
                println!("  {fault}");
            }
            missing += undecoded.len();
        }
    }
    Ok(if missing == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

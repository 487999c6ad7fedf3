//! Whole kernels on the interpreter alone, and planted bugs that it must find.

mod common;

use common::emulator::Emulator;
use common::{Arguments, Gpu};
use hsakmt::device::Config;

/// An emulator with the test kernels; `None`, with the reason printed, where they cannot be compiled.
fn emulator(defines: &[&str], check: bool) -> Option<Emulator> {
    match common::compile("test.hip", defines) {
        Ok(file) => Some(Emulator::new(&file, check)),
        Err(reason) => {
            println!("not run: {reason}");
            None
        }
    }
}

/// Runs a test on a plain and on a checking device.
fn on_both(test: impl Fn(&Emulator) -> Result<(), String>) {
    for check in [false, true] {
        let Some(emulator) = emulator(&[], check) else { return };
        if let Err(fault) = test(&emulator) {
            panic!("check {check}: {fault}");
        }
    }
}

#[test]
fn vector_add() {
    on_both(common::vector_add);
}

#[test]
fn reduce() {
    on_both(common::reduce);
}

#[test]
fn reverse() {
    on_both(common::reverse);
}

#[test]
fn blocks_of_grid() {
    on_both(common::blocks_of_grid);
}

#[test]
fn shift() {
    on_both(common::shift);
}

#[test]
fn count() {
    on_both(common::count);
}

#[test]
fn functions() {
    on_both(common::functions);
}

#[test]
fn matrices() {
    on_both(common::matrices);
}

#[test]
fn gemm() {
    on_both(common::gemm);
}

#[test]
fn private_memory() {
    on_both(common::private_memory);
}

/// Runs a test with a bug planted, on a checking device, and gives the report.
fn planted(define: &str, test: impl Fn(&Emulator) -> Result<(), String>) -> Option<String> {
    let planted = emulator(&[define], true)?;
    Some(test(&planted).expect_err("the bug was not found"))
}

#[test]
fn a_missing_barrier_is_reported_as_a_race() {
    let Some(report) = planted("PLANT_MISSING_BARRIER", common::reduce) else { return };
    assert!(report.contains("race on LDS byte") || report.contains("has not written"), "{report}");
}

#[test]
fn an_lds_overrun_is_reported_on_any_device() {
    let Some(report) = planted("PLANT_LDS_OVERRUN", common::reverse) else { return };
    assert!(report.contains("the workgroup has 1024"), "{report}");
    let Some(plain) = emulator(&["PLANT_LDS_OVERRUN"], false) else { return };
    assert!(common::reverse(&plain).is_err());
}

#[test]
fn an_address_of_no_allocation_is_reported() {
    let Some(report) = planted("PLANT_OUT_OF_BOUNDS", common::shift) else { return };
    assert!(report.contains("no allocation of the device holds them"), "{report}");
}

#[test]
fn a_wrong_lane_mapping_gives_wrong_numbers() {
    let Some(emulator) = emulator(&["PLANT_LANE_MAPPING"], true) else { return };
    let wrong = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        common::matrix(&emulator, "bf16_32x32x8", 32, 8, common::Element::Bf16)
    }));
    assert!(wrong.is_err(), "the product was taken for right");
}

#[test]
fn never_written_memory_is_reported() {
    let file = match common::compile("test.hip", &[]) {
        Ok(file) => file,
        Err(reason) => return println!("not run: {reason}"),
    };
    let emulator = Emulator::with(&file, Config { check: true, strict: true, ..Config::default() });
    let input = emulator.upload(&[0; 4096]);
    emulator.device.poison(input, 4096);
    let output = emulator.upload(&[0; 4096]);
    let arguments = Arguments::default().pointer(input).pointer(input).pointer(output).int(256);
    let report = emulator.launch(&emulator.kernel("vector_add"), 1, 256, &arguments).expect_err("read");
    assert!(report.contains("nothing has written"), "{report}");
}

#[test]
fn statistics_count_every_wave() {
    let Some(emulator) = emulator(&[], false) else { return };
    common::vector_add(&emulator).expect("runs");
    let statistics = emulator.device.statistics();
    assert_eq!(statistics.mnemonics["v_add_f32"], 16, "16 waves of 64 threads");
    assert_eq!(statistics.mnemonics["s_endpgm"], 16);
    assert_eq!(statistics.total().dispatches, 1);
}

#[test]
fn an_instruction_that_is_not_implemented_is_named() {
    let Some(emulator) = emulator(&[], false) else { return };
    let out = emulator.upload(&[0; 4]);
    let arguments = Arguments::default().pointer(out);
    let report = emulator.launch(&emulator.kernel("unknown"), 1, 64, &arguments).expect_err("stopped");
    assert!(report.contains("not implemented: encoding 7e") && report.contains("Vop1 opcode 73"), "{report}");
    let disassembler = std::process::Command::new("llvm-mc-22").arg("--version").output();
    assert!(disassembler.is_err() || report.contains("v_sin_f16"), "{report}");
}

#[test]
fn a_wave_that_hangs_is_stopped() {
    let file = match common::compile("test.hip", &[]) {
        Ok(file) => file,
        Err(reason) => return println!("not run: {reason}"),
    };
    let emulator = Emulator::with(&file, Config { wave_limit: 100_000, ..Config::default() });
    let kernel = emulator.kernel("spin");
    let (go, wait) = (emulator.upload(&[1; 4]), emulator.upload(&[0; 4]));
    emulator.launch(&kernel, 1, 64, &Arguments::default().pointer(go)).expect("ends");
    let report = emulator.launch(&kernel, 1, 64, &Arguments::default().pointer(wait)).expect_err("stopped");
    assert!(report.contains("it hangs"), "{report}");
}

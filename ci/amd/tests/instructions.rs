//! Every instruction against values worked out from the ISA document.

mod machine;

use std::collections::BTreeSet;

use hsakmt::cdna3::decode::{Encoding, implemented};
use machine::{BYTES, Case, Machine, PRIVATE};

fn assert_none(failures: Vec<String>) {
    assert!(failures.is_empty(), "{} failures\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn every_line_holds() {
    assert_none(Case::all().iter().filter_map(|case| case.run().err()).collect());
}

#[test]
fn encodings_are_those_of_llvm() {
    use std::io::Write;
    use std::process::{Command, Stdio};
    let mut command = Command::new("llvm-mc-22");
    command.args(["--arch=amdgcn", "--mcpu=gfx942", "--show-encoding"]);
    let Ok(mut child) = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn() else {
        println!("not run: llvm-mc-22 is not installed");
        return;
    };
    let cases = Case::all();
    let source: String = cases.iter().map(|case| format!("{}\n", case.assembly)).collect();
    // The assembler may write before it has read everything.
    let mut input = child.stdin.take().expect("a pipe");
    let writer = std::thread::spawn(move || input.write_all(source.as_bytes()));
    let output = child.wait_with_output().expect("the assembler ends");
    writer.join().expect("no panic").expect("written");
    let text = String::from_utf8_lossy(&output.stdout);
    let encodings = text.lines().filter_map(|line| line.split("encoding: [").nth(1));
    let encodings: Vec<Vec<u8>> = encodings
        .map(|bytes| {
            bytes.trim_end_matches(']').split(',').map(|x| u8::from_str_radix(&x[2..], 16).expect("hex")).collect()
        })
        .collect();
    assert_eq!(encodings.len(), cases.len());
    for (case, encoding) in cases.iter().zip(encodings) {
        let words: Vec<u8> = case.words.iter().flat_map(|word| word.to_le_bytes()).collect();
        assert_eq!(words, encoding, "{}", case.assembly);
    }
}

/// The opcode of a mnemonic.
fn opcode(name: &str) -> Option<u32> {
    implemented().find(|(_, row)| row.name == name).map(|(_, row)| row.op.into())
}

/// Lines of global loads, stores and atomics at a register pair with an offset that is not negative, by what follows the prefix.
fn global_lines() -> Vec<(String, Case)> {
    let plain = |case: &Case| {
        let (low, high) = (case.words[0], case.words.get(1).copied().unwrap_or(0));
        case.before.starts_with("v0=mem ") && high >> 16 & 0x7f == 0x7f && low >> 12 & 1 == 0 && low >> 25 & 1 == 0
    };
    let cases = Case::all().into_iter().filter(|case| case.after != "flow=fault");
    cases
        .filter_map(|case| {
            let rest = case.mnemonic().strip_prefix("global_")?.to_owned();
            (plain(&case) && !rest.starts_with("load_lds") && !case.assembly.contains(" a")).then_some((rest, case))
        })
        .collect()
}

#[test]
fn flat_instructions_do_as_global_ones() {
    let mut failures = Vec::new();
    let lines = global_lines();
    assert!(lines.len() > 50, "{}", lines.len());
    for (rest, mut case) in lines {
        assert!(opcode(&format!("flat_{rest}")).is_some(), "flat_{rest}");
        // Segment 0; a scalar base is not looked at, whatever it says.
        case.words[0] &= !(3 << 14);
        case.words[1] = case.words[1] & !(0x7f << 16) | 20 << 16;
        case.assembly = format!("flat form of {}", case.assembly);
        failures.extend(case.run_with(|machine| machine.wave.s[20] = 64).err());
    }
    assert_none(failures);
}

#[test]
fn buffer_instructions_do_as_global_ones() {
    let mut failures = Vec::new();
    for (rest, mut case) in global_lines() {
        let op = opcode(&format!("buffer_{rest}")).unwrap_or_else(|| panic!("buffer_{rest}"));
        let (low, high) = (case.words[0], case.words[1]);
        let atomic = rest.starts_with("atomic");
        let load = rest.starts_with("load");
        let (data, result) = (high >> 8 & 0xff, high >> 24);
        let register = if load { result } else { data };
        let offset = low & 0xfff;
        // Descriptor in s[20:23], no address register, scalar offset 0; an atomic returns where its data was.
        case.words[0] = 0x38 << 26 | op << 18 | u32::from(atomic && low >> 16 & 1 == 1) << 14 | offset;
        case.words[1] = 128 << 24 | 5 << 16 | register << 8;
        if case.words[0] >> 14 & 1 == 1 {
            let after = case.after.replace(&format!("v{}", result + 1), &format!("v{}", data + 1));
            let after = after.replace(&format!("v{result}"), &format!("v{data}"));
            let old = |at: usize| {
                let start = format!("mem@{at}=");
                case.before.split_whitespace().find_map(|part| part.strip_prefix(&start)).unwrap_or("0").to_owned()
            };
            let wide = rest.ends_with("x2") || rest.ends_with("f64");
            let high = if wide { format!("v{}@0={} ", data + 1, old(4)) } else { String::new() };
            case.after = format!("v{data}@0={} {high}{after}", old(0));
        }
        case.assembly = format!("buffer form of {}", case.assembly);
        let run = case.run_with(|machine| {
            let base = machine.memory.as_ptr() as u64;
            machine.wave.set_s64(20, base);
            machine.wave.s[22] = BYTES as u32;
        });
        failures.extend(run.err());
    }
    assert_none(failures);
}

#[test]
fn scratch_instructions_do_as_global_ones() {
    let mut failures = Vec::new();
    for (rest, case) in global_lines().into_iter().filter(|(rest, _)| !rest.starts_with("atomic")) {
        let op = opcode(&format!("scratch_{rest}")).unwrap_or_else(|| panic!("scratch_{rest}"));
        // The private segments hold what memory would.
        let mut machine = Machine::new();
        machine.assign(&case.before);
        let fill = |machine: &mut Machine| {
            let bytes: Vec<u8> = machine.memory.iter().flat_map(|x| x.to_le_bytes()).take(PRIVATE).collect();
            machine.wave.private = bytes.repeat(64);
        };
        fill(&mut machine);
        let words = [case.words[0] & !(3 << 14 | 0x7f << 18) | 1 << 14 | op << 18, case.words[1]];
        let mut want = Machine::new();
        (want.wave.v, want.memory) = (machine.wave.v.clone(), machine.memory.clone());
        want.assign(&case.after);
        fill(&mut want);
        want.wave.s = machine.wave.s;
        if let Err(kind) = machine.execute(&words) {
            failures.push(format!("scratch_{rest}: {kind}"));
        }
        want.memory = machine.memory.clone();
        let wrong = machine.state().difference(&want.state());
        // Memory of inactive lanes stays as it was.
        let exec = machine.wave.exec();
        if !wrong.is_empty() && exec == u64::MAX {
            failures.push(format!("scratch_{rest}: {}", wrong.join("; ")));
        }
    }
    assert_none(failures);
}

#[test]
fn lds_atomics_return_the_old_value() {
    let mut failures = Vec::new();
    let mut seen = 0;
    for mut case in Case::all() {
        let name = case.mnemonic().to_owned();
        let Some((_, kind)) = name.rsplit_once('_') else { continue };
        let returning = name.replace(&format!("_{kind}"), &format!("_rtn_{kind}"));
        let Some(op) = opcode(&returning).filter(|_| name.starts_with("ds_") && !name.contains("_rtn")) else {
            continue;
        };
        seen += 1;
        case.words[0] = case.words[0] & !(0xff << 17) | op << 17;
        case.words[1] |= 10 << 24;
        let old = |at: u32| {
            let start = format!("lds@{at}=");
            case.before.split_whitespace().find_map(|part| part.strip_prefix(&start).map(str::to_owned))
        };
        let offset = case.words[0] & 0xffff;
        let mut extra = old(offset).map_or(String::new(), |x| format!(" v10@0={x}"));
        if kind.ends_with("64") {
            extra += &old(offset + 4).map_or(String::new(), |x| format!(" v11@0={x}"));
        }
        case.after += &extra;
        case.assembly = format!("returning form of {}", case.assembly);
        failures.extend(case.run().err());
    }
    assert!(seen > 25, "{seen}");
    assert_none(failures);
}

/// A condition of two ordered or unordered numbers, by the middle of its name.
fn holds(condition: &str, order: Option<std::cmp::Ordering>) -> bool {
    use std::cmp::Ordering::{Equal, Greater, Less};
    match condition {
        "f" => false,
        "lt" => order == Some(Less),
        "eq" => order == Some(Equal),
        "le" => matches!(order, Some(Less | Equal)),
        "gt" => order == Some(Greater),
        "lg" => matches!(order, Some(Less | Greater)),
        "ne" | "neq" => order != Some(Equal),
        "ge" => matches!(order, Some(Greater | Equal)),
        "o" => order.is_some(),
        "u" => order.is_none(),
        "nge" => !holds("ge", order),
        "nlg" => !holds("lg", order),
        "ngt" => !holds("gt", order),
        "nle" => !holds("le", order),
        "nlt" => !holds("lt", order),
        "t" | "tru" => true,
        other => panic!("{other}: no condition"),
    }
}

#[test]
fn every_comparison_holds() {
    let values: [f64; 8] = [0.0, -0.0, 1.0, -1.0, 2.5, f64::INFINITY, f64::NEG_INFINITY, f64::NAN];
    let integers: [i64; 8] = [0, 1, -1, 2, 0x7fff, -0x8000, 0x7000, -2];
    let mut seen = 0;
    for (_, row) in implemented().filter(|(encoding, row)| *encoding == Encoding::Vopc && !row.name.contains("class")) {
        let mut parts = row.name.split('_').skip(1);
        let (prefix, condition, kind) =
            (parts.next(), parts.next().expect("a condition"), parts.next().expect("a type"));
        let is_cmpx = prefix == Some("cmpx");
        let width: u32 = kind[1..].parse().expect("a width");
        let bits = |n: usize| -> u64 {
            let x = match (&kind[..1], width) {
                ("f", 16) => half::f16::from_f64(values[n]).to_bits().into(),
                ("f", 32) => (values[n] as f32).to_bits().into(),
                ("f", _) => values[n].to_bits(),
                _ => integers[n].cast_unsigned(),
            };
            if width == 64 { x } else { x & ((1 << width) - 1) }
        };
        let order = |a: usize, b: usize| match &kind[..1] {
            "f" => values[a].partial_cmp(&values[b]),
            "i" => integers[a].partial_cmp(&integers[b]),
            _ => bits(a).partial_cmp(&bits(b)),
        };
        let op = u32::from(row.op);
        // Lane 8 a + b compares values a and b.
        let wanted =
            (0..64).filter(|lane| holds(condition, order(lane / 8, lane % 8))).fold(0u64, |x, lane| x | 1 << lane);
        let exec = 0xfedc_ba98_7654_3210u64 | 0xf0;
        for words in [vec![0x3e << 25 | op << 17 | 2 << 9 | 256], vec![0x34 << 26 | op << 16 | 30, 258 << 9 | 256]] {
            let mut machine = Machine::new();
            for lane in 0..64 {
                let (a, b) = (bits(lane / 8), bits(lane % 8));
                (machine.wave.v[0][lane], machine.wave.v[1][lane]) = (a as u32, (a >> 32) as u32);
                (machine.wave.v[2][lane], machine.wave.v[3][lane]) = (b as u32, (b >> 32) as u32);
            }
            machine.wave.set_s64(126, exec);
            let destination = if words.len() == 1 { 106 } else { 30 };
            machine.execute(&words).expect("runs");
            assert_eq!(machine.wave.s64(destination), wanted & exec, "{} {words:x?}", row.name);
            assert_eq!(machine.wave.exec(), if is_cmpx { wanted & exec } else { exec }, "EXEC after {}", row.name);
            seen += 1;
        }
    }
    assert_eq!(seen, 2 * 2 * (3 * 16 + 6 * 8));
}

#[test]
fn every_implemented_instruction_is_tested() {
    let mut tested: BTreeSet<String> = Case::all().iter().map(|case| case.mnemonic().to_owned()).collect();
    for (rest, _) in global_lines() {
        tested.extend(["flat", "buffer", "scratch"].map(|prefix| format!("{prefix}_{rest}")));
    }
    let elsewhere = |name: &str| {
        let base = name.replace("_rtn_", "_");
        let returning = base != name && tested.contains(&base);
        // Comparisons above; matrix instructions in matrices.rs; clocks give no fixed value.
        returning
            || name.starts_with("v_cmp")
            || name.starts_with("v_mfma")
            || matches!(name, "s_memtime" | "s_memrealtime")
    };
    let missing = implemented().map(|(_, row)| row.name).filter(|name| !tested.contains(*name) && !elsewhere(name));
    assert_eq!(missing.collect::<Vec<_>>(), Vec::<&str>::new());
}

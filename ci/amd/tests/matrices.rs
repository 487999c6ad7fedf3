//! Every matrix instruction against float64, with the lanes and registers of AMD's matrix instruction tables.

mod machine;

use hsakmt::cdna3::decode::implemented;
use machine::Machine;

/// What a mnemonic such as `v_mfma_f32_32x32x4_2b_bf16` says.
#[derive(Debug)]
struct Form {
    m: usize,
    k: usize,
    blocks: usize,
    a: String,
    b: String,
}

fn form(name: &str) -> Form {
    let parts: Vec<&str> = name.split('_').collect();
    let shape: Vec<usize> = parts[3].split('x').map(|x| x.parse().expect("a size")).collect();
    let blocks = parts[4].strip_suffix('b').and_then(|x| x.parse().ok());
    let types = &parts[4 + usize::from(blocks.is_some())..];
    let last = types.last().expect("a type").to_string();
    Form { m: shape[0], k: shape[2], blocks: blocks.unwrap_or(1), a: types[0].into(), b: last }
}

/// A small number of a type: its bits and value. All sums of products are exact in float32.
fn element(kind: &str, n: u32) -> (u32, f64) {
    let x = f64::from(n % 7) - 3.0;
    let bits = match kind {
        "f32" => (x as f32).to_bits(),
        "f16" => half::f16::from_f64(x).to_bits().into(),
        "bf16" => half::bf16::from_f64(x).to_bits().into(),
        "i8" => (x as i8 as u8).into(),
        // e4m3fnuz has bias 8, e5m2fnuz bias 16.
        "fp8" => [0xcc, 0xc8, 0xc0, 0x00, 0x40, 0x48, 0x4c][(n % 7) as usize],
        "bf8" => [0xc6, 0xc4, 0xc0, 0x00, 0x40, 0x44, 0x46][(n % 7) as usize],
        other => panic!("{other}: no type"),
    };
    (bits, x)
}

fn width(kind: &str) -> usize {
    match kind {
        "f32" => 32,
        "f16" | "bf16" => 16,
        _ => 8,
    }
}

/// Lane, and element in the lane, that hold row (or column) `row` and `k` of a block.
fn operand_place(form: &Form, block: usize, row: usize, k: usize) -> (usize, usize) {
    let per_lane = form.m * form.k * form.blocks / 64;
    let lanes_per_block = 64 / form.blocks;
    (block * lanes_per_block + k / per_lane * form.m + row, k % per_lane)
}

/// Lane and register that hold an element of the result.
fn result_place(form: &Form, block: usize, row: usize, column: usize) -> (usize, usize) {
    match form.m {
        32 => (row / 4 % 2 * 32 + column, block * 16 + row / 8 * 4 + row % 4),
        16 => (row / 4 * 16 + column, block * 4 + row % 4),
        _ => (block * 4 + column, row),
    }
}

#[test]
fn every_matrix_instruction_multiplies() {
    let mut seen = 0;
    for (_, row) in implemented().filter(|(_, row)| row.name.starts_with("v_mfma")) {
        let form = form(row.name);
        let integer = row.name.starts_with("v_mfma_i32");
        let Form { m, k, blocks, .. } = form;
        // D and C in a[0:31], A in v[0:7], B in v[8:15]; then D in v[32:63] with C = 1.
        for in_accumulation in [true, false] {
            let mut machine = Machine::new();
            let mut values = [vec![0.0; blocks * m * k], vec![0.0; blocks * m * k]];
            for (which, kind) in [&form.a, &form.b].into_iter().enumerate() {
                for block in 0..blocks {
                    for at in 0..m {
                        for x in 0..k {
                            let (bits, value) =
                                element(kind, (at * 5 + x * 3 + block * 2 + which) as u32 % 97 + at as u32);
                            values[which][(block * m + at) * k + x] = value;
                            let (lane, n) = operand_place(&form, block, at, x);
                            let bit = n * width(kind);
                            machine.wave.v[8 * which + bit / 32][lane] |= bits << (bit % 32);
                        }
                    }
                }
            }
            let addend = |block: usize, at: usize, column: usize| (block * 7 + at * 3 + column) as f64;
            let to_bits = |x: f64| if integer { (x as i32).cast_unsigned() } else { (x as f32).to_bits() };
            let first = if in_accumulation { 128 } else { 32 };
            let each = |f: &mut dyn FnMut(usize, usize, usize)| {
                for at in 0..blocks * m * m {
                    f(at / (m * m), at / m % m, at % m);
                }
            };
            if in_accumulation {
                each(&mut |block, at, column| {
                    let (lane, register) = result_place(&form, block, at, column);
                    machine.wave.v[first + register][lane] = to_bits(addend(block, at, column));
                });
            }
            // The execution mask does not matter.
            machine.wave.set_s64(126, 5);
            let before = machine.state();
            let op = u32::from(row.op);
            let words = match in_accumulation {
                true => [0x1a7 << 23 | op << 16 | 1 << 15, 256 << 18 | (256 + 8) << 9 | 256],
                false => [0x1a7 << 23 | op << 16 | 32, (if integer { 129 } else { 242 }) << 18 | (256 + 8) << 9 | 256],
            };
            machine.execute(&words).unwrap_or_else(|kind| panic!("{}: {kind}", row.name));
            each(&mut |block, at, column| {
                let product = |x: usize| values[0][(block * m + at) * k + x] * values[1][(block * m + column) * k + x];
                let sum: f64 = (0..k).map(product).sum();
                let want = sum + if in_accumulation { addend(block, at, column) } else { 1.0 };
                let (lane, register) = result_place(&form, block, at, column);
                let place = &mut machine.wave.v[first + register][lane];
                assert_eq!(*place, to_bits(want), "{} block {block} row {at} column {column}", row.name);
                *place = if in_accumulation { to_bits(addend(block, at, column)) } else { 0 };
            });
            assert_eq!(machine.state().difference(&before), Vec::<String>::new(), "{} wrote elsewhere", row.name);
            seen += 1;
        }
    }
    assert_eq!(seen, 2 * 28);
}

#[test]
fn a_masked_matrix_instruction_is_reported() {
    // v_mfma_f32_16x16x16_bf16 v[0:3], v[8:9], v[10:11], 0
    let words = [0xd3e1_0000, 0x0202_1508];
    for (exec, reported) in [(u64::MAX, false), (u64::MAX - 1, true), (0, true)] {
        let mut machine = Machine::new();
        machine.check = true;
        machine.wave.set_s64(126, exec);
        assert_eq!(machine.execute(&words).is_err(), reported, "{exec:#x}");
    }
}

#[test]
fn a_result_may_begin_inside_the_addend() {
    // v_mfma_f32_16x16x16_bf16 v[D:D+3], v[8:9], v[10:11], v[20:23]
    let result = |first: usize| {
        let mut machine = Machine::new();
        for register in 8..12 {
            machine.wave.v[register] = std::array::from_fn(|lane| element("bf16", (lane * 5 + register) as u32).0);
        }
        for register in 20..24 {
            machine.wave.v[register] = std::array::from_fn(|lane| ((lane * 4 + register) as f32).to_bits());
        }
        let words = [0xd3e1_0000 | first as u32, (256 + 20) << 18 | (256 + 10) << 9 | (256 + 8)];
        machine.execute(&words).unwrap_or_else(|kind| panic!("{kind}"));
        machine.wave.v[first..first + 4].to_vec()
    };
    let want = result(40);
    for first in 17..24 {
        assert_eq!(result(first), want, "D in v{first}");
    }
}

#![allow(dead_code, reason = "each test file uses a part")]
//! Kernels of `kernels/test.hip` and what they must give, on anything that runs gfx942 code.

pub(crate) mod emulator;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// Something that runs kernels.
pub(crate) trait Gpu {
    /// A kernel of the loaded code object.
    type Kernel;
    /// Copies bytes to new device memory.
    fn upload(&self, bytes: &[u8]) -> u64;
    /// Copies bytes back.
    fn download(&self, address: u64, len: usize) -> Vec<u8>;
    /// Finds a kernel.
    fn kernel(&self, name: &str) -> Self::Kernel;
    /// Runs `blocks` blocks of `threads` threads; arguments lie one after another at their alignment.
    fn launch(&self, kernel: &Self::Kernel, blocks: u32, threads: u32, arguments: &Arguments) -> Result<(), String>;
}

/// Kernel arguments as they lie in memory.
#[derive(Default, Clone)]
pub(crate) struct Arguments {
    pub(crate) bytes: Vec<u8>,
    pub(crate) offsets: Vec<usize>,
}

impl Arguments {
    pub(crate) fn pointer(self, x: u64) -> Self {
        self.push(&x.to_le_bytes())
    }

    pub(crate) fn int(self, x: i32) -> Self {
        self.push(&x.to_le_bytes())
    }

    /// A struct by value, aligned to 8 bytes.
    pub(crate) fn block(self, bytes: &[u8]) -> Self {
        self.push_aligned(bytes, 8)
    }

    fn push(self, x: &[u8]) -> Self {
        self.push_aligned(x, x.len())
    }

    fn push_aligned(mut self, x: &[u8], align: usize) -> Self {
        self.bytes.resize(self.bytes.len().next_multiple_of(align), 0);
        self.offsets.push(self.bytes.len());
        self.bytes.extend(x);
        self
    }
}

/// The first of these paths that exists: tests run in the package's folder or the workspace's.
pub(crate) fn find(path: &str) -> Result<PathBuf, String> {
    let places = ["", "ci/amd/", "../../"].map(|prefix| PathBuf::from(format!("{prefix}{path}")));
    places.into_iter().find(|place| place.exists()).ok_or_else(|| format!("{path} is not here"))
}

/// Compiles a file of the tests for gfx942, or says why it cannot be done.
pub(crate) fn compile(source: &str, defines: &[&str]) -> Result<Vec<u8>, String> {
    let options: Vec<String> = defines.iter().map(|define| format!("-D{define}")).collect();
    compile_path(&find(&format!("tests/kernels/{source}"))?, &options)
}

/// Compiles source text for gfx942 with further options.
pub(crate) fn compile_text(text: &str, options: &[String]) -> Result<Vec<u8>, String> {
    let path = temporary("hip");
    std::fs::write(&path, text).map_err(|e| e.to_string())?;
    let compiled = compile_path(&path, options);
    let _removed = std::fs::remove_file(&path);
    compiled
}

/// A file name of this process's own.
fn temporary(extension: &str) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!("amd-emulator-{}-{}.{extension}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    std::env::temp_dir().join(name)
}

fn compile_path(source: &Path, options: &[String]) -> Result<Vec<u8>, String> {
    let works = |name: &&str| Command::new(name).arg("--version").output().is_ok_and(|out| out.status.success());
    let compiler = ["clang++-22", "clang++-19", "clang++"].into_iter().find(works);
    let compiler = compiler.ok_or("no clang++ for AMD GPUs is installed")?;
    let output = temporary("hsaco");
    let mut command = Command::new(compiler);
    command.args([
        "-x",
        "hip",
        "--offload-arch=gfx942",
        "--offload-device-only",
        "--no-gpu-bundle-output",
        "-nogpulib",
        "-nogpuinc",
    ]);
    command.args(["-std=c++17", "-O3", "-fuse-ld=lld", "-mcode-object-version=5"]);
    command.args(options);
    let done = command.arg(source).arg("-o").arg(&output).output().map_err(|e| e.to_string())?;
    if !done.status.success() {
        return Err(format!("{compiler}: {}", String::from_utf8_lossy(&done.stderr)));
    }
    let bytes = std::fs::read(&output).map_err(|e| e.to_string());
    let _removed = std::fs::remove_file(&output);
    bytes
}

/// Random numbers that differ from run to run, and can be repeated: the seed is printed.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new() -> Self {
        let now = std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(1, |t| t.as_nanos() as u64);
        let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(now | 1);
        println!("SEED={seed}");
        Self(seed)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// In -1..1.
    pub(crate) fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub(crate) fn units(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.unit()).collect()
    }
}

pub(crate) fn f32_bytes(x: &[f32]) -> Vec<u8> {
    x.iter().flat_map(|x| x.to_le_bytes()).collect()
}

pub(crate) fn i32_bytes(x: &[i32]) -> Vec<u8> {
    x.iter().flat_map(|x| x.to_le_bytes()).collect()
}

pub(crate) fn to_f32(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect()
}

pub(crate) fn to_i32(bytes: &[u8]) -> Vec<i32> {
    bytes.chunks_exact(4).map(|x| i32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect()
}

/// NaN bytes of a result that no kernel has written.
pub(crate) fn unwritten(n: usize) -> Vec<u8> {
    vec![0xff; 4 * n]
}

pub(crate) fn vector_add<G: Gpu>(gpu: &G) -> Result<(), String> {
    let n = 1000;
    let mut random = Random::new();
    let (a, b) = (random.units(n), random.units(n));
    let (pa, pb, out) = (gpu.upload(&f32_bytes(&a)), gpu.upload(&f32_bytes(&b)), gpu.upload(&unwritten(n + 24)));
    let arguments = Arguments::default().pointer(pa).pointer(pb).pointer(out).int(n as i32);
    gpu.launch(&gpu.kernel("vector_add"), 4, 256, &arguments)?;
    let got = to_f32(&gpu.download(out, 4 * (n + 24)));
    for i in 0..n {
        assert_eq!(got[i], a[i] + b[i], "element {i}");
    }
    assert!(got[n..].iter().all(|x| x.to_bits() == u32::MAX), "wrote past the end");
    Ok(())
}

pub(crate) fn reduce<G: Gpu>(gpu: &G) -> Result<(), String> {
    let x = Random::new().units(3001);
    let (px, out) = (gpu.upload(&f32_bytes(&x)), gpu.upload(&unwritten(1)));
    gpu.launch(&gpu.kernel("reduce"), 1, 256, &Arguments::default().pointer(px).pointer(out).int(3001))?;
    let want: f64 = x.iter().map(|x| f64::from(*x)).sum();
    let got = f64::from(to_f32(&gpu.download(out, 4))[0]);
    assert!((got - want).abs() < 1e-3, "{got} for {want}");
    Ok(())
}

pub(crate) fn reverse<G: Gpu>(gpu: &G) -> Result<(), String> {
    let mut random = Random::new();
    let x: Vec<i32> = (0..1024).map(|_| random.bits() as i32).collect();
    let (px, out) = (gpu.upload(&i32_bytes(&x)), gpu.upload(&unwritten(1024)));
    gpu.launch(&gpu.kernel("reverse"), 4, 256, &Arguments::default().pointer(px).pointer(out))?;
    let want: Vec<i32> = x.chunks(256).flat_map(|block| block.iter().rev().copied()).collect();
    assert_eq!(to_i32(&gpu.download(out, 4096)), want);
    Ok(())
}

pub(crate) fn blocks_of_grid<G: Gpu>(gpu: &G) -> Result<(), String> {
    let out = gpu.upload(&unwritten(5 * 64));
    gpu.launch(&gpu.kernel("blocks_of_grid"), 5, 64, &Arguments::default().pointer(out))?;
    assert_eq!(to_i32(&gpu.download(out, 4 * 5 * 64)), [5; 5 * 64]);
    Ok(())
}

pub(crate) fn shift<G: Gpu>(gpu: &G) -> Result<(), String> {
    let x: Vec<i32> = (0..512).collect();
    let (px, out) = (gpu.upload(&i32_bytes(&x)), gpu.upload(&unwritten(512)));
    gpu.launch(&gpu.kernel("shift"), 2, 256, &Arguments::default().pointer(px).pointer(out).int(512))?;
    let want: Vec<i32> = (1..512).chain([0]).collect();
    assert_eq!(to_i32(&gpu.download(out, 2048)), want);
    Ok(())
}

pub(crate) fn count<G: Gpu>(gpu: &G) -> Result<(), String> {
    let mut random = Random::new();
    let x: Vec<i32> = (0..2000).map(|_| random.bits() as i32).collect();
    let (px, bins, sum) = (gpu.upload(&i32_bytes(&x)), gpu.upload(&[0; 32]), gpu.upload(&[0; 4]));
    let arguments = Arguments::default().pointer(px).pointer(bins).pointer(sum).int(2000);
    gpu.launch(&gpu.kernel("count"), 8, 256, &arguments)?;
    let want: Vec<i32> = (0..8).map(|bin| x.iter().filter(|x| *x & 7 == bin).count() as i32).collect();
    assert_eq!(to_i32(&gpu.download(bins, 32)), want);
    assert_eq!(to_f32(&gpu.download(sum, 4)), [2000.0]);
    Ok(())
}

pub(crate) fn functions<G: Gpu>(gpu: &G) -> Result<(), String> {
    let n = 256;
    let mut random = Random::new();
    let x: Vec<f32> = (0..n).map(|_| random.unit() * 20.0).collect();
    let y: Vec<f32> = (0..n).map(|_| random.unit().abs() * 10.0 + 1e-3).collect();
    let (px, py, out) = (gpu.upload(&f32_bytes(&x)), gpu.upload(&f32_bytes(&y)), gpu.upload(&unwritten(8 * n)));
    let arguments = Arguments::default().pointer(px).pointer(py).pointer(out).int(n as i32);
    gpu.launch(&gpu.kernel("functions"), 1, 256, &arguments)?;
    let got = to_f32(&gpu.download(out, 4 * 8 * n));
    for i in 0..n {
        let (a, b) = (f64::from(x[i]), f64::from(y[i]));
        let want = [
            a / b,
            a.exp2(),
            b.log2(),
            b.sqrt(),
            a.mul_add(b, 1.0),
            a / b,
            a.round_ties_even() + b.floor(),
            (a * 1e6).trunc(),
        ];
        for (k, want) in want.into_iter().enumerate() {
            let got = f64::from(got[k * n + i]);
            let allowed = if k == 0 || k == 5 { 6e-8 } else { 5e-7 };
            assert!(
                (got - want).abs() <= allowed * want.abs().max(1e-3) + if k == 7 { 2.0 } else { 0.0 },
                "function {k} of {a} {b}: {got} for {want}"
            );
        }
    }
    Ok(())
}

/// A matrix product's element type.
#[derive(Clone, Copy)]
pub(crate) enum Element {
    Bf16,
    F16,
    Fp8,
}

impl Element {
    /// Random elements: their bytes and values.
    fn random(self, random: &mut Random, n: usize) -> (Vec<u8>, Vec<f64>) {
        let mut bytes = Vec::new();
        let values = random.units(n).into_iter().map(|x| match self {
            Self::Bf16 => {
                let x = half::bf16::from_f32(x);
                bytes.extend(x.to_le_bytes());
                x.to_f64()
            }
            Self::F16 => {
                let x = half::f16::from_f32(x);
                bytes.extend(x.to_le_bytes());
                x.to_f64()
            }
            Self::Fp8 => {
                // e4m3fnuz: sign, exponent minus 8, three bits; bytes below 0x78 keep products small.
                let magnitude = (x.to_bits() >> 5) as u8 % 0x48;
                let byte = magnitude | if x < 0.0 { 0x80 } else { 0 };
                let byte = if byte == 0x80 { 0 } else { byte };
                bytes.push(byte);
                let (e, m) = (i32::from(byte >> 3 & 15), f64::from(byte & 7) / 8.0);
                let magnitude = if e == 0 { m * 2f64.powi(-7) } else { (1.0 + m) * 2f64.powi(e - 8) };
                if byte & 0x80 != 0 { -magnitude } else { magnitude }
            }
        });
        let values = values.collect();
        (bytes, values)
    }
}

fn assert_product(got: &[f32], a: &[f64], b: &[f64], n: usize, k: usize) {
    for (at, got) in got.iter().enumerate() {
        let (row, column) = (at / n, at % n);
        let terms = (0..k).map(|x| a[row * k + x] * b[column * k + x]);
        let (want, size) = terms.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()));
        let error = (f64::from(*got) - want).abs();
        assert!(error <= 1e-6 * size + 1e-9, "row {row} column {column}: {got} for {want}");
    }
}

/// One matrix instruction: D = A B^T.
pub(crate) fn matrix<G: Gpu>(gpu: &G, name: &str, m: usize, k: usize, element: Element) -> Result<(), String> {
    let mut random = Random::new();
    let (a, b) = (element.random(&mut random, m * k), element.random(&mut random, m * k));
    let (pa, pb, out) = (gpu.upload(&a.0), gpu.upload(&b.0), gpu.upload(&unwritten(m * m)));
    gpu.launch(&gpu.kernel(name), 1, 64, &Arguments::default().pointer(pa).pointer(pb).pointer(out))?;
    assert_product(&to_f32(&gpu.download(out, 4 * m * m)), &a.1, &b.1, m, k);
    Ok(())
}

pub(crate) fn matrices<G: Gpu>(gpu: &G) -> Result<(), String> {
    matrix(gpu, "bf16_16x16x16", 16, 16, Element::Bf16)?;
    matrix(gpu, "bf16_32x32x8", 32, 8, Element::Bf16)?;
    matrix(gpu, "f16_16x16x16", 16, 16, Element::F16)?;
    matrix(gpu, "f16_32x32x8", 32, 8, Element::F16)?;
    matrix(gpu, "fp8_16x16x32", 16, 32, Element::Fp8)?;
    matrix(gpu, "fp8_32x32x16", 32, 16, Element::Fp8)
}

pub(crate) fn gemm<G: Gpu>(gpu: &G) -> Result<(), String> {
    let (m, n, k) = (64, 96, 128);
    let mut random = Random::new();
    let (a, b) = (Element::Bf16.random(&mut random, m * k), Element::Bf16.random(&mut random, n * k));
    let (pa, pb, out) = (gpu.upload(&a.0), gpu.upload(&b.0), gpu.upload(&unwritten(m * n)));
    let arguments = Arguments::default().pointer(pa).pointer(pb).pointer(out).int(n as i32).int(k as i32);
    gpu.launch(&gpu.kernel("gemm"), (m / 32 * n / 32) as u32, 64, &arguments)?;
    assert_product(&to_f32(&gpu.download(out, 4 * m * n)), &a.1, &b.1, n, k);
    Ok(())
}

pub(crate) fn private_memory<G: Gpu>(gpu: &G) -> Result<(), String> {
    let mut random = Random::new();
    let x: Vec<i32> = (0..64).map(|_| (random.bits() & 0xffff) as i32).collect();
    let (px, out) = (gpu.upload(&i32_bytes(&x)), gpu.upload(&unwritten(64)));
    gpu.launch(&gpu.kernel("private_memory"), 1, 64, &Arguments::default().pointer(px).pointer(out))?;
    let want: Vec<i32> = (0..64).map(|i| x[(x[i as usize] & 63) as usize] * i).collect();
    assert_eq!(to_i32(&gpu.download(out, 256)), want);
    Ok(())
}

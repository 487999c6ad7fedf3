//! `latentwave info`: devices and libraries found, or exactly what is missing; presets.

use clap::Args as ClapArgs;
use latentwave::backend::Backend;
use latentwave::{DeviceInfo, Host, ModelConfig, Result};

use crate::{Outcome, device, text};

/// List devices and libraries found, or exactly what is missing, and the model presets
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    /// Most devices to look for per vendor.
    #[arg(long, default_value_t = 16, value_name = "N")]
    max_devices: usize,
}

/// Runs the command.
///
/// # Errors
/// None: what is missing is shown.
pub(crate) fn run(args: &Args) -> Result<Outcome> {
    println!("latentwave {}\n", env!("CARGO_PKG_VERSION"));
    show(Host::new().device());
    vendor("cuda", args.max_devices, device::cuda);
    vendor("rocm", args.max_devices, device::rocm);
    #[cfg(any(feature = "cuda", feature = "rocm"))]
    kernels();
    println!("\n{}", presets()?);
    Ok(Outcome::Done)
}

/// Shows a vendor's devices, or why there is none.
fn vendor<B: Backend>(name: &str, most: usize, open: impl Fn(usize) -> Result<B>) {
    for index in 0..most {
        match open(index) {
            Ok(backend) => show(backend.device()),
            // Past the last device.
            Err(_) if index > 0 => break,
            Err(error) => {
                println!("{name}: not available\n   {error}");
                break;
            }
        }
    }
}

fn show(info: &DeviceInfo) {
    println!("{} {}: {}", info.backend, info.index, info.name);
    println!(
        "   {}, {}, {} of memory, driver {}",
        info.arch,
        text::plural(info.num_compute_units, "compute unit"),
        text::bytes(info.memory_bytes as usize),
        info.driver_version
    );
    if info.shared_bytes_per_block > 0 {
        println!(
            "   {} lanes, {} of shared memory per block",
            info.wave_size,
            text::bytes(info.shared_bytes_per_block)
        );
    }
}

/// Shows where kernels would come from: carried code, the disk cache, the run-time compilers.
#[cfg(any(feature = "cuda", feature = "rocm"))]
fn kernels() {
    let inventory = latentwave::kernel::inventory();
    println!("\nkernels");
    for archive in &inventory.archives {
        let missing = match archive.stale.len() {
            0 => String::new(),
            stale => format!(", {stale} more would be compiled at run time"),
        };
        println!(
            "   {}: {} carried in {}{missing}",
            archive.arch,
            text::plural(archive.fresh, "kernel"),
            text::bytes(archive.bytes)
        );
    }
    match &inventory.cache.dir {
        Some(dir) => println!(
            "   disk cache: {} in {} of {}",
            text::plural(inventory.cache.entries, "kernel"),
            text::bytes(inventory.cache.bytes as usize),
            dir.display()
        ),
        None => println!("   disk cache: none; set LATENTWAVE_CACHE_DIR"),
    }
    for compiler in &inventory.compilers {
        match &compiler.version {
            Ok(version) => println!("   {} run-time compiler: {version}", compiler.backend),
            Err(reason) => println!("   {} run-time compiler: none; {reason}", compiler.backend),
        }
    }
}

fn presets() -> Result<String> {
    let heading = ["preset", "heads", "layers", "latent", "rope", "softmax scale"].map(str::to_owned).to_vec();
    let mut rows = vec![heading];
    for name in ModelConfig::presets() {
        let model = ModelConfig::preset(name)?;
        rows.push(vec![
            model.name.clone(),
            model.num_heads.to_string(),
            model.num_layers.to_string(),
            model.kv_lora_rank.to_string(),
            model.qk_rope_head_dim.to_string(),
            format!("{:.6}", model.softmax_scale()),
        ]);
    }
    Ok(text::table(&rows, 1))
}

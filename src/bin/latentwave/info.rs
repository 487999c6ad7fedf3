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

//! Says which HIP this machine has and what it sees.

use hip_sys::types::{hipDeviceAttributeMultiprocessorCount, hipDeviceAttributeWarpSize};
use hip_sys::{Hip, Hiprtc};

fn main() {
    match Hip::load() {
        Ok(hip) => {
            println!("libamdhip64: {}", hip.path().display());
            match hip.runtime_version() {
                Ok(version) => println!("HIP {version}"),
                Err(error) => println!("version: {error}"),
            }
            match hip.device_count() {
                Ok(count) => (0..count).for_each(|device| describe(hip, device)),
                Err(error) => println!("{error}"),
            }
        }
        Err(error) => println!("{error}"),
    }
    match Hiprtc::load() {
        Ok(rtc) => println!("hipRTC {:?}: {}", rtc.version(), rtc.path().display()),
        Err(error) => println!("{error}"),
    }
}

fn describe(hip: &Hip, device: usize) {
    let name = hip.device_name(device).unwrap_or_else(|error| error.to_string());
    let arch = hip.arch_name(device).unwrap_or_else(|error| error.to_string());
    let units = hip.device_attribute(hipDeviceAttributeMultiprocessorCount, device);
    let wave = hip.device_attribute(hipDeviceAttributeWarpSize, device);
    println!("device {device}: {name}, {arch}, compute units {units:?}, wave {wave:?}");
}

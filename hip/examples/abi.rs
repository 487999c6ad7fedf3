//! Writes C that compiles only where this crate's constants, layouts and signatures are those of AMD's headers.
//!
//! The argument is the include folder of a HIP release. Names that its headers do not know are listed on
//! standard error as `absent NAME`, so that a caller who checks several releases can tell a late name from a wrong one.

use std::mem::{align_of, offset_of, size_of};
use std::path::Path;
use std::{env, fs};

use hip_sys::api::{HipApi, HiprtcApi, Signature};
use hip_sys::types::{self, dim3, hipDeviceProp_tR0000, hipDeviceProp_tR0600, hipKernelNodeParams, hipUUID};
use hip_sys::{HipError, HiprtcError};

fn main() {
    let include = env::args().nth(1).expect("usage: abi INCLUDE_FOLDER");
    let read = |file| fs::read_to_string(Path::new(&include).join(file)).unwrap_or_else(|e| panic!("{file}: {e}"));
    let headers = read("hip/hip_runtime_api.h") + &read("hip/driver_types.h") + &read("hip/hiprtc.h");
    let has = |name: &str| {
        let known = headers.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').any(|word| word == name);
        if !known {
            eprintln!("absent {name}");
        }
        known
    };

    println!("#define __HIP_PLATFORM_AMD__ 1\n#define __HIP_PLATFORM_HCC__ 1");
    println!("#include <stdbool.h>\n#include <stddef.h>\n#include <hip/hip_runtime_api.h>\n#include <hip/hiprtc.h>");
    for &(name, value) in types::CONSTANTS.iter().filter(|(name, _)| has(name)) {
        equal(&format!("(long long){name}"), value);
    }
    for code in HipError::KNOWN.iter().filter(|code| has(code.name())) {
        equal(code.name(), code.0.into());
    }
    for code in HiprtcError::KNOWN.iter().filter(|code| has(code.name())) {
        equal(code.name(), code.0.into());
    }

    layout::<dim3>("dim3");
    layout::<hipUUID>("hipUUID");
    layout::<hipKernelNodeParams>("hipKernelNodeParams");
    macro_rules! offsets {
        ($type:ty, $c:literal: $($field:ident)*) => {
            $(equal(&format!("offsetof({}, {})", $c, stringify!($field)), offset_of!($type, $field) as i64);)*
        };
    }
    offsets!(hipKernelNodeParams, "hipKernelNodeParams": blockDim extra func gridDim kernelParams sharedMemBytes);
    // HIP 6 renames the old struct by a macro; its own header keeps it for the old function's sake.
    if has("hipDeviceProp_tR0600") {
        layout::<hipDeviceProp_tR0600>("hipDeviceProp_tR0600");
        offsets!(hipDeviceProp_tR0600, "hipDeviceProp_tR0600":
            name uuid luid totalGlobalMem warpSize maxGridSize multiProcessorCount maxTexture3DAlt surfaceAlignment l2CacheSize
            sharedMemPerMultiprocessor sharedMemPerBlockOptin memoryPoolsSupported unifiedFunctionPointers reserved
            hipReserved gcnArchName maxSharedMemoryPerMultiProcessor arch hdpMemFlushCntl isLargeBar asicRevision);
        println!("#include <hip/hip_deprecated.h>");
        old_layout("hipDeviceProp_tR0000");
    } else {
        old_layout("hipDeviceProp_t");
    }
    fn old_layout(name: &str) {
        println!("typedef {name} old_properties;");
        layout::<hipDeviceProp_tR0000>("old_properties");
        offsets!(hipDeviceProp_tR0000, "old_properties":
            name totalGlobalMem warpSize maxGridSize memoryBusWidth totalConstMem multiProcessorCount arch pciDeviceID
            maxSharedMemoryPerMultiProcessor gcnArch gcnArchName maxTexture3D hdpMemFlushCntl memPitch ECCEnabled isLargeBar
            asicRevision pageableMemoryAccessUsesHostPageTables);
    }

    for signature in HipApi::SIGNATURES.iter().chain(HiprtcApi::SIGNATURES) {
        // Under their unsuffixed names HIP 6 declares the functions of the new layout.
        let renamed = signature.symbol.starts_with("hipGetDeviceProperties");
        if !renamed && (signature.required || has(signature.symbol)) {
            same_type(signature);
        }
    }
    println!("int main(void) {{ return 0; }}");
}

fn equal(c: &str, rust: i64) {
    println!("_Static_assert({c} == {rust}LL, \"{c} is not {rust}\");");
}

fn layout<T>(c: &str) {
    equal(&format!("sizeof({c})"), size_of::<T>() as i64);
    equal(&format!("_Alignof({c})"), align_of::<T>() as i64);
}

fn same_type(signature: &Signature) {
    let arguments: Vec<_> = signature.arguments.iter().map(|rust| c_type(rust)).collect();
    let arguments = if arguments.is_empty() { "void".to_owned() } else { arguments.join(", ") };
    let (symbol, result) = (signature.symbol, c_type(signature.result));
    println!(
        "_Static_assert(__builtin_types_compatible_p(__typeof__({symbol}), {result}({arguments})), \
         \"{symbol} is not {result}({arguments})\");"
    );
}

/// A Rust type of the tables in C's spelling. Opaque handles and enumerations have C's names already.
fn c_type(rust: &str) -> String {
    if let Some(pointee) = rust.strip_prefix("*mut ") {
        return format!("{}*", c_type(pointee));
    }
    if let Some(pointee) = rust.strip_prefix("*const ") {
        // In C the constness of a pointer's target is written with the target.
        return match pointee.starts_with('*') {
            true => format!("{} const*", c_type(pointee)),
            false => format!("const {}*", c_type(pointee)),
        };
    }
    let c = match rust {
        "c_int" => "int",
        "c_uint" => "unsigned int",
        "c_ulonglong" => "unsigned long long",
        "c_char" => "char",
        "c_void" => "void",
        "usize" => "size_t",
        "f32" => "float",
        "HipError" => "hipError_t",
        "HiprtcError" => "hiprtcResult",
        name => name,
    };
    c.to_owned()
}

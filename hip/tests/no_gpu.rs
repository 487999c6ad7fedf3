//! The libraries as this machine has them: absent, present without a GPU, or present with one.
//!
//! `HIP_SYS_EXPECT` (`unavailable`, `no-device` or `device`) makes any other state a failure; `ci/hip_runtimes.sh` sets it.

use std::env;
use std::ffi::c_void;
use std::ptr;

use hip_sys::types::*;
use hip_sys::{Error, Header, Hip, HipError, Hiprtc, Version};

#[derive(Debug, Clone, Copy, PartialEq)]
enum State {
    Unavailable,
    NoDevice,
    Device,
}

fn state() -> State {
    let state = match Hip::load().map(Hip::device_count) {
        Err(Error::Unavailable { library: "libamdhip64", ref tried }) if !tried.is_empty() => State::Unavailable,
        Ok(Err(Error::NoDevice { code: HipError::NO_DEVICE | HipError::INVALID_DEVICE, .. })) => State::NoDevice,
        Ok(Ok(count)) if count > 0 => State::Device,
        other => panic!("neither a runtime nor a typed reason: {other:?}"),
    };
    match env::var("HIP_SYS_EXPECT").as_deref() {
        Ok("unavailable") => assert_eq!(state, State::Unavailable),
        Ok("no-device") => assert_eq!(state, State::NoDevice),
        Ok("device") => assert_eq!(state, State::Device),
        Ok(other) => panic!("HIP_SYS_EXPECT={other}: expected unavailable, no-device or device"),
        Err(_) => {}
    }
    state
}

/// The runtime, if it is there and sees no GPU.
fn without_gpu() -> Option<&'static Hip> {
    match state() {
        State::NoDevice => Hip::load().ok(),
        state => {
            println!("not run: needs a HIP runtime without a GPU, here it is {state:?}");
            None
        }
    }
}

#[test]
fn the_reason_is_typed_and_readable() {
    let text = match state() {
        State::Unavailable => Hip::load().unwrap_err().to_string(),
        State::NoDevice => Hip::load().unwrap().device_count().unwrap_err().to_string(),
        State::Device => return println!("not run: a HIP device is here"),
    };
    println!("{text}");
    if state() == State::Unavailable {
        for name in ["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so"] {
            assert!(text.contains(&format!("\n  {name}: ")), "{name} not named in: {text}");
        }
    } else {
        assert!(text.starts_with("no HIP device: hipError"), "{text}");
    }
}

#[test]
fn versions_are_known_without_a_gpu() {
    let Some(hip) = without_gpu() else { return };
    // HIP 5.2 initialises devices even for its version, and fails; later ones know it by heart.
    match hip.runtime_version() {
        Ok(version) => {
            println!("HIP {version} at {}", hip.path().display());
            assert!((5..=7).contains(&version.major), "{version}");
            assert!(version >= Version { major: 5, minor: 2, patch: 0 }, "{version}");
        }
        Err(Error::Hip { call: "hipRuntimeGetVersion", code, message }) => println!("{code:?}: {message}"),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn every_call_fails_with_a_code_and_nothing_crashes() {
    let Some(hip) = without_gpu() else { return };
    let null: *mut c_void = ptr::null_mut();
    let mut word = 0u32;
    let word_ptr: *mut c_void = (&raw mut word).cast();
    // SAFETY: without a device no call gets as far as using its pointers; null streams and modules are defined to be refused.
    let results: Vec<(&str, hip_sys::Result<()>)> = unsafe {
        vec![
            ("set_device", hip.set_device(0)),
            ("device 99", hip.set_device(99)),
            ("attribute", hip.device_attribute(hipDeviceAttributeMultiprocessorCount, 0).map(drop)),
            ("name", hip.device_name(0).map(drop)),
            ("memory", hip.device_memory(0).map(drop)),
            ("arch", hip.arch_name(0).map(drop)),
            ("malloc", hip.malloc(1 << 20).map(drop)),
            ("host_malloc", hip.host_malloc(1 << 12, hipHostMallocDefault).map(drop)),
            ("memory_info", hip.memory_info().map(drop)),
            ("memset", hip.memset(word_ptr, 0, 4)),
            ("stream", hip.stream_create(hipStreamNonBlocking).map(drop)),
            ("event", hip.event_create(hipEventDisableTiming).map(drop)),
            ("module", hip.module_load(&[0; 4096]).map(drop)),
            ("capture", hip.begin_capture(ptr::null_mut(), hipStreamCaptureModeThreadLocal)),
            ("malloc_async", hip.malloc_async(64, ptr::null_mut()).map(drop)),
            ("default_pool", hip.default_pool(0).map(drop)),
            ("graph_memory", hip.graph_memory(0).map(drop)),
            ("free", hip.free(null)),
        ]
    };
    for (what, result) in results {
        match result {
            Err(Error::Hip { call, code, message }) => {
                println!("{what}: {call} {code:?}: {message}");
                assert_ne!(code, HipError::SUCCESS);
                assert_eq!(hip.error_name(code), code.name(), "the library and our table name {} alike", code.0);
            }
            Err(Error::Unsupported { symbol }) => println!("{what}: no {symbol} in this release"),
            // Freeing nothing may succeed anywhere.
            Ok(()) if what == "free" => println!("{what}: ok"),
            other => panic!("{what}: {other:?}"),
        }
    }
}

#[test]
fn the_library_names_codes_as_our_table_does() {
    let Some(hip) = without_gpu() else { return };
    for &code in HipError::KNOWN {
        let name = hip.error_name(code);
        // Each release lacks some newer codes, and may call them unknown.
        if name != code.name() {
            println!("{}: {name} in the library, {} here", code.0, code.name());
            assert!(name.contains("Unknown"), "{}: {name} in the library, {} here", code.0, code.name());
        }
        assert!(!hip.error_message(code).is_empty());
    }
}

#[test]
fn the_compiler_needs_no_gpu() {
    if state() == State::Unavailable {
        return println!("not run: no HIP runtime");
    }
    let rtc = match Hiprtc::load() {
        Ok(rtc) => rtc,
        Err(error @ Error::Unavailable { library: "libhiprtc", .. }) => panic!("the runtime came without: {error}"),
        Err(error) => panic!("{error}"),
    };
    println!("hipRTC {:?} at {}", rtc.version().unwrap(), rtc.path().display());

    let source = "#include \"scale.h\"\nextern \"C\" __global__ void scale(float* x) { x[blockIdx.x] *= FACTOR; }";
    let header = Header { name: "scale.h", source: "#define FACTOR 3.0f\n" };
    let compiled = rtc.compile("scale.cu", source, &[header], &["--offload-arch=gfx90a", "-O3"]).unwrap();
    assert_eq!(&compiled.code[..4], b"\x7fELF");
    assert!(compiled.code.windows(6).any(|w| w == b"scale\0"), "the kernel's symbol is in the code object");

    let Err(Error::Compile { log, .. }) = rtc.compile("broken.cu", "nonsense here;", &[], &["--offload-arch=gfx90a"])
    else {
        panic!("nonsense compiled");
    };
    assert!(log.contains("nonsense"), "{log}");
    let again = rtc.compile("scale.cu", source, &[header], &["--offload-arch=gfx90a", "-O3"]).unwrap();
    assert_eq!(again.code, compiled.code, "a failure leaves the compiler usable");

    let templated = "template <typename T> __global__ void fill(T* x, T v) { x[threadIdx.x] = v; }";
    let names = ["fill<float>", "fill<int>"];
    let compiled = rtc.compile_names("fill.cu", templated, &[], &["--offload-arch=gfx90a"], &names).unwrap();
    assert_eq!(compiled.lowered_names, ["_Z4fillIfEvPT_S0_", "_Z4fillIiEvPT_S0_"]);

    assert!(matches!(rtc.compile("nul", "a\0b", &[], &[]), Err(Error::InteriorNul { argument: "source" })));
}

#[test]
fn an_architecture_that_the_compiler_does_not_know_is_refused() {
    let Ok(rtc) = Hiprtc::load() else { return println!("not run: no hipRTC") };
    // Given these, hipRTC itself ends the process.
    for arch in ["gfx000", "gfx90a:foo+", "gfx90a:xnack", "gfx1100:xnack+", "", "bad"] {
        assert!(!rtc.knows(arch), "{arch}");
        let option = format!("--offload-arch={arch}");
        match rtc.compile("empty.cu", "extern \"C\" __global__ void empty() {}", &[], &[&option]) {
            Err(Error::Compile { log, .. }) => assert!(log.contains(&option), "{log}"),
            other => panic!("{arch}: {other:?}"),
        }
    }
    let known: Vec<_> =
        ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"].into_iter().filter(|a| rtc.knows(a)).collect();
    println!("knows {known:?}");
    assert!(known.contains(&"gfx90a"));
    for arch in known {
        let option = format!("--offload-arch={arch}");
        rtc.compile("empty.cu", "extern \"C\" __global__ void empty() {}", &[], &[&option]).unwrap();
    }
}

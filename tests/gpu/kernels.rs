//! Preparing and launching.

use std::time::Instant;

use latentwave::kernel::cache::DiskCache;
use latentwave::kernel::{Launch, Origin, Params, Variant, embedded, select};
use latentwave::{Backend, DType, Error, MlaConfig, MlaDecode};

use super::support::{Copy, copy_variant, not_run, on_each_device};
use super::vendor::{COMPILER, Gpu, REFUSED_LAUNCH};

#[test]
fn kernels_are_prepared_once_cached_on_disk_and_rebuilt_when_the_entry_is_corrupt() {
    on_each_device(|gpu| {
        // A constant that the kernel does not read makes code that the library does not carry.
        let variant = Variant { stages: 77, ..copy_variant() };
        let dir = std::env::temp_dir().join(format!("latentwave-{}-test-{}", Gpu::NAME, std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        let index = gpu.device().index;
        let fresh = || Gpu::with_cache(index, DiskCache::at(&dir)).unwrap();
        let check = |gpu: &Gpu, origin| {
            let start = Instant::now();
            let kernel = gpu.prepare(&variant)?;
            println!("prepared in {:?}: {:?}", start.elapsed(), kernel.origin());
            assert_eq!(kernel.origin(), origin);
            assert_eq!(gpu.prepare(&variant)?.origin(), origin, "found loaded");
            let copy = Copy::with_kernel(gpu, kernel);
            let stream = gpu.create_stream()?;
            let data = copy.refresh(gpu, &stream, 5);
            copy.enqueue(gpu, &stream, false)?;
            assert!(copy.result(gpu, &stream) == data);
            Ok(())
        };
        match check(&fresh(), Origin::Compiled) {
            Err(error @ Error::Unavailable { .. }) => return not_run(COMPILER, &error),
            done => done.unwrap(),
        }
        check(&fresh(), Origin::Cached).unwrap();
        let entry = find_entry(&dir);
        let good = std::fs::read(&entry).unwrap();
        let mut flipped = good.clone();
        flipped[good.len() / 2] ^= 0x40;
        for bad in [&b"not an entry"[..], &good[..good.len() / 2], &flipped, b""] {
            std::fs::write(&entry, bad).unwrap();
            check(&fresh(), Origin::Compiled).unwrap();
            assert!(std::fs::read(&entry).unwrap() == good, "rebuilt");
        }
        check(&fresh(), Origin::Cached).unwrap();
        std::fs::remove_dir_all(&dir).unwrap();

        // A place that cannot be written to.
        std::fs::write(&dir, b"a file").unwrap();
        check(&fresh(), Origin::Compiled).unwrap();
        std::fs::remove_file(&dir).unwrap();

        let gpu = fresh();
        let start = Instant::now();
        std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(|| gpu.prepare(&variant).unwrap()))));
        println!("prepared by four threads at once in {:?}", start.elapsed());
        std::fs::remove_dir_all(&dir).unwrap();
    });
}

#[test]
fn kernels_of_common_models_are_carried_and_nothing_is_compiled() {
    on_each_device(|gpu| {
        let device = gpu.device();
        if embedded::manifest(&device.arch).is_none() {
            return not_run(&device.arch, &"this build carries no code for it");
        }
        // A cache of its own: what another process compiled does not count.
        let dir = std::env::temp_dir().join(format!("latentwave-{}-carried-{}", Gpu::NAME, std::process::id()));
        let gpu = Gpu::with_cache(device.index, DiskCache::at(&dir)).unwrap();
        for variant in select::variants(&device.arch) {
            let start = Instant::now();
            let kernel = gpu.prepare(&variant).unwrap();
            println!("{variant} loaded in {:?}", start.elapsed());
            assert_eq!(kernel.origin(), Origin::Embedded, "{variant}");
        }
        assert!(!dir.exists(), "nothing was compiled, so nothing is kept");
    });
}

fn find_entry(dir: &std::path::Path) -> std::path::PathBuf {
    let mut path = dir.to_owned();
    while path.is_dir() {
        path = std::fs::read_dir(&path).unwrap().next().unwrap().unwrap().path();
    }
    path
}

#[test]
fn a_kernel_that_does_not_compile_names_itself_and_the_next_one_does() {
    on_each_device(|gpu| {
        // Rows of 200 elements are no whole number of the waves' columns.
        let bad = Variant { kv_lora_rank: 200, ..split_variant(gpu) };
        for _ in 0..2 {
            match gpu.prepare(&bad).map(drop) {
                Err(Error::Compile { kernel, arch, log }) => {
                    assert_eq!((kernel, &arch), (bad.to_string(), &gpu.device().arch));
                    assert!(log.contains("kernels/"), "the file that says no is named: {log}");
                }
                Err(error @ Error::Unavailable { .. }) => return not_run(COMPILER, &error),
                other => panic!("{other:?}"),
            }
        }
        gpu.prepare(&split_variant(gpu)).unwrap();
    });
}

/// Stage 1 of a common layer.
fn split_variant(gpu: &Gpu) -> Variant {
    let decode = MlaDecode::new(gpu, MlaConfig::deepseek(16, 64), DType::BF16, DType::BF16).unwrap();
    decode.kernels(1, 1, 4096).unwrap().split
}

#[test]
fn a_launch_that_the_driver_refuses_is_typed_and_harmless() {
    on_each_device(|gpu| {
        let Some(copy) = Copy::new(gpu) else { return };
        let stream = gpu.create_stream().unwrap();
        let params = Params::Merge(bytemuck::Zeroable::zeroed());
        for (threads, shared_bytes) in [(4096, 0), (128, 1 << 20)] {
            let launch = Launch { grid: [1, 1, 1], threads, shared_bytes, dependent: false, cluster: 1 };
            // SAFETY: the driver refuses the launch.
            let refused = unsafe { gpu.launch(&stream, &copy.kernel, &launch, &params) };
            assert!(
                matches!(&refused, Err(Error::Driver { code, .. }) if REFUSED_LAUNCH.contains(code)),
                "{refused:?}"
            );
        }
        let data = copy.refresh(gpu, &stream, 1);
        copy.enqueue(gpu, &stream, true).unwrap();
        assert!(copy.result(gpu, &stream) == data);
    });
}

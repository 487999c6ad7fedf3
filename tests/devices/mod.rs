//! Instantiates a suite for every backend that was built in. An absent device is reported, or fails if it is required
//! (`LATENTWAVE_REQUIRE`).

/// `on_every_backend!(suite_name, function)` makes one test per backend, each calling `function(&backend)`.
#[macro_export]
macro_rules! on_every_backend {
    ($($test:ident),+ $(,)?) => {
        mod host {
            $(#[test]
            fn $test() {
                super::$test(&latentwave::Host::new());
            })+
        }
        #[cfg(feature = "cuda")]
        mod cuda {
            $(#[test]
            fn $test() {
                let device = latentwave::Cuda::new(0);
                if let Some(device) = latentwave::testing::device_or_report(stringify!($test), device) {
                    super::$test(&device);
                }
            })+
        }
        #[cfg(feature = "rocm")]
        mod rocm {
            $(#[test]
            fn $test() {
                let device = latentwave::Rocm::new(0);
                if let Some(device) = latentwave::testing::device_or_report(stringify!($test), device) {
                    super::$test(&device);
                }
            })+
        }
    };
}

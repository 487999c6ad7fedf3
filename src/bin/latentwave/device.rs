//! Which backend a command runs on.

use clap::{Args, ValueEnum};
use latentwave::backend::host::Host;
use latentwave::{Error, GraphBackend, Result};

/// Backends that a person can ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Choice {
    /// The first of cuda, rocm and host that is there.
    Auto,
    /// The processor.
    Host,
    /// An NVIDIA GPU.
    Cuda,
    /// An AMD GPU.
    Rocm,
}

/// Where to run.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct DeviceArgs {
    /// Backend. `auto` takes the first of cuda, rocm and host that is there.
    #[arg(long, value_enum, default_value = "host", value_name = "NAME", help_heading = "Device")]
    pub(crate) backend: Choice,
    /// Index of the device among the backend's.
    #[arg(long, default_value_t = 0, value_name = "N", help_heading = "Device")]
    pub(crate) device: usize,
}

/// Something to do on a backend that is known at run time.
pub(crate) trait Job {
    type Output;

    fn run<B: GraphBackend>(self, backend: &B) -> Result<Self::Output>;
}

/// Does a job on the backend asked for.
pub(crate) fn run<J: Job>(args: DeviceArgs, job: J) -> Result<J::Output> {
    match args.backend {
        Choice::Host => host(args.device, job),
        Choice::Cuda => job.run(&cuda(args.device)?),
        Choice::Rocm => job.run(&rocm(args.device)?),
        Choice::Auto => {
            if let Ok(backend) = cuda(args.device) {
                return job.run(&backend);
            }
            if let Ok(backend) = rocm(args.device) {
                return job.run(&backend);
            }
            host(args.device, job)
        }
    }
}

fn host<J: Job>(index: usize, job: J) -> Result<J::Output> {
    if index > 0 {
        let reason = "the host is one device, 0".to_owned();
        return Err(Error::NoDevice { backend: "host", index, reason });
    }
    job.run(&Host::new())
}

#[cfg(feature = "cuda")]
pub(crate) fn cuda(index: usize) -> Result<latentwave::backend::cuda::Cuda> {
    latentwave::backend::cuda::Cuda::new(index)
}

#[cfg(feature = "rocm")]
pub(crate) fn rocm(index: usize) -> Result<latentwave::backend::rocm::Rocm> {
    latentwave::backend::rocm::Rocm::new(index)
}

/// Stands in for a backend that is not compiled in: there is no value of it.
#[cfg(not(feature = "cuda"))]
pub(crate) fn cuda(_index: usize) -> Result<Host> {
    Err(not_built("cuda"))
}

/// As above.
#[cfg(not(feature = "rocm"))]
pub(crate) fn rocm(_index: usize) -> Result<Host> {
    Err(not_built("rocm"))
}

#[cfg(not(all(feature = "cuda", feature = "rocm")))]
fn not_built(backend: &'static str) -> Error {
    Error::Unavailable {
        backend,
        library: "this program's own support",
        reason: format!("it was built without; build with --features cli,{backend}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Name;

    impl Job for Name {
        type Output = &'static str;

        fn run<B: GraphBackend>(self, backend: &B) -> Result<&'static str> {
            Ok(backend.device().backend)
        }
    }

    #[test]
    fn a_backend_by_name() {
        let args = |backend, device| DeviceArgs { backend, device };
        assert_eq!(run(args(Choice::Host, 0), Name).unwrap(), "host");
        assert!(matches!(run(args(Choice::Host, 1), Name), Err(Error::NoDevice { .. })));
        assert!(run(args(Choice::Auto, 0), Name).is_ok());
        #[cfg(not(feature = "cuda"))]
        assert!(run(args(Choice::Cuda, 0), Name).unwrap_err().to_string().contains("--features cli,cuda"));
        #[cfg(not(feature = "rocm"))]
        assert!(run(args(Choice::Rocm, 0), Name).unwrap_err().to_string().contains("--features cli,rocm"));
    }
}

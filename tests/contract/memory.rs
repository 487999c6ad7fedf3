//! Memory and threads.

use latentwave::{Backend, DType, Error, SplitPolicy, Tensor};

use super::numerics::layer;
use crate::common::Problem;

pub(crate) fn memory_that_runs_out_is_an_error<B: Backend>(backend: &B, dtype: DType) {
    let too_much = [1_usize << 50, usize::MAX / 2];
    for bytes in too_much {
        match backend.alloc(bytes, "a test") {
            Err(Error::OutOfMemory { bytes: got, purpose: "a test", .. }) => assert_eq!(got, bytes),
            Err(other) => panic!("{bytes} bytes: {other}"),
            Ok(_) => panic!("{bytes} bytes were there"),
        }
    }
    assert!(matches!(Tensor::<B>::empty(backend, [1 << 48, 4], dtype), Err(Error::OutOfMemory { .. })));
    assert!(matches!(Tensor::<B>::empty(backend, [usize::MAX, 4], dtype), Err(Error::Argument { .. })));
    Problem::random(41, layer(2, 16), (dtype, dtype), 1, &[20]).check(backend, "after running out of memory");
}

pub(crate) fn two_threads_do_not_disturb_each_other<B: Backend>(backend: &B, dtype: DType) {
    let problems = [(1, SplitPolicy::Auto), (2, SplitPolicy::Fixed(3))].map(|(query_len, policy)| Problem {
        policy,
        ..Problem::random(42 + query_len as u64, layer(5, 16), (dtype, dtype), query_len, &[90, 0, 41])
    });
    std::thread::scope(|scope| {
        for problem in &problems {
            scope.spawn(|| {
                let first = problem.check(backend, "alone");
                for _ in 0..5 {
                    assert!(problem.run(backend).unwrap().bits == first.bits);
                }
            });
        }
    });
}

pub(crate) fn copies_round_trip<B: Backend>(backend: &B, _: DType) {
    let data: Vec<i32> = (0..1000).map(|i| i * 7 - 300).collect();
    let tensor = Tensor::from_slice(backend, [10, 100], &data).unwrap();
    assert_eq!(tensor.addr() % 256, 0, "allocations are aligned to 256 bytes");
    assert_eq!(tensor.to_vec::<i32>(backend).unwrap(), data);
    let row = tensor.narrow(0, 3..4).unwrap();
    assert_eq!(row.to_vec::<i32>(backend).unwrap(), data[300..400]);
    row.fill_bytes(backend, 0).unwrap();
    let mut want = data;
    want[300..400].fill(0);
    assert_eq!(tensor.to_vec::<i32>(backend).unwrap(), want);
}

//! DLPack: nothing is copied, deleters are called once, what cannot be said is a typed error, and another implementation agrees.
#![cfg(feature = "dlpack")]

use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use dlpark::{ffi, legacy, versioned};
use half::bf16;
use latentwave::dlpack::{
    CPU, CUDA, CUDA_HOST, DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion, DLTensor,
    Managed, VERSION,
};
use latentwave::{DType, Error, Host, Stream, Tensor};

/// A producer: a managed tensor over ordinary memory that counts how often it was given back.
struct Producer {
    data: Vec<f32>,
    shape: Vec<i64>,
    strides: Option<Vec<i64>>,
    deleted: Arc<AtomicUsize>,
    change: fn(&mut DLManagedTensorVersioned),
}

struct Context {
    managed: DLManagedTensorVersioned,
    _data: Vec<f32>,
    shape: Vec<i64>,
    strides: Option<Vec<i64>>,
    deleted: Arc<AtomicUsize>,
}

unsafe extern "C" fn delete(managed: *mut DLManagedTensorVersioned) {
    // SAFETY: `hand_out` made it.
    let context = unsafe { Box::from_raw((*managed).manager_ctx.cast::<Context>()) };
    context.deleted.fetch_add(1, Ordering::Relaxed);
}

impl Producer {
    fn new(shape: &[i64], data: &[f32]) -> Self {
        Self { data: data.to_vec(), shape: shape.to_vec(), strides: None, deleted: Arc::default(), change: |_| {} }
    }

    fn hand_out(mut self) -> NonNull<DLManagedTensorVersioned> {
        let tensor = DLTensor {
            data: self.data.as_mut_ptr().cast(),
            device: DLDevice { device_type: CPU, device_id: 0 },
            ndim: self.shape.len() as i32,
            dtype: DLDataType { code: 2, bits: 32, lanes: 1 },
            shape: null_mut(),
            strides: null_mut(),
            byte_offset: 0,
        };
        let managed = DLManagedTensorVersioned {
            version: VERSION,
            manager_ctx: null_mut(),
            deleter: Some(delete),
            flags: 0,
            dl_tensor: tensor,
        };
        let Self { data, shape, strides, deleted, change } = self;
        let context = Box::leak(Box::new(Context { managed, _data: data, shape, strides, deleted }));
        context.managed.manager_ctx = (&raw mut *context).cast::<c_void>();
        context.managed.dl_tensor.shape = context.shape.as_mut_ptr();
        context.managed.dl_tensor.strides = context.strides.as_mut().map_or(null_mut(), |strides| strides.as_mut_ptr());
        change(&mut context.managed);
        NonNull::from(&mut context.managed)
    }
}

fn import<M: Managed>(managed: NonNull<M>) -> latentwave::Result<Tensor<Host>> {
    // SAFETY: the tests hand out valid tensors, or such as must not be followed.
    unsafe { Tensor::from_dlpack(&Host::new(), managed) }
}

#[test]
fn an_imported_tensor_is_the_same_memory_and_is_given_back_once() {
    let host = Host::new();
    let producer = Producer::new(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let (deleted, addr) = (producer.deleted.clone(), producer.data.as_ptr().addr() as u64);
    let tensor = import(producer.hand_out()).unwrap();
    assert_eq!((tensor.addr(), tensor.shape(), tensor.strides()), (addr, &[2, 3][..], &[3, 1][..]));
    assert_eq!(tensor.to_vec::<f32>(&host).unwrap(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let row = tensor.narrow(0, 1..2).unwrap();
    drop(tensor);
    assert_eq!(deleted.load(Ordering::Relaxed), 0, "a part of it is alive");
    assert_eq!(row.to_vec::<f32>(&host).unwrap(), [4.0, 5.0, 6.0]);
    drop(row);
    assert_eq!(deleted.load(Ordering::Relaxed), 1);
}

#[test]
fn offsets_strides_and_pinned_memory_are_understood() {
    let data: Vec<f32> = (0..12).map(|i| i as f32).collect();
    let columns = Producer { strides: Some(vec![1, 4]), ..Producer::new(&[3, 2], &data) };
    assert_eq!(import(columns.hand_out()).unwrap().strides(), [1, 4]);
    let change = |managed: &mut DLManagedTensorVersioned| {
        managed.dl_tensor.byte_offset = 20;
        managed.dl_tensor.device = DLDevice { device_type: CUDA_HOST, device_id: 3 };
    };
    let offset = Producer { change, ..Producer::new(&[2], &data) };
    assert_eq!(import(offset.hand_out()).unwrap().to_vec::<f32>(&Host::new()).unwrap(), [5.0, 6.0]);
    let empty = Producer { change: |managed| managed.dl_tensor.data = null_mut(), ..Producer::new(&[0, 5], &[]) };
    assert!(import(empty.hand_out()).unwrap().is_empty());
}

#[test]
fn what_cannot_be_taken_is_a_typed_error_and_is_given_back() {
    type Change = fn(&mut DLManagedTensorVersioned);
    let changes: [(&str, Change); 9] = [
        ("managed", |m| m.version = DLPackVersion { major: 2, minor: 0 }),
        ("managed", |m| m.dl_tensor.device = DLDevice { device_type: CUDA, device_id: 0 }),
        ("managed", |m| m.dl_tensor.dtype = DLDataType { code: 2, bits: 64, lanes: 1 }),
        ("managed", |m| m.dl_tensor.dtype.lanes = 4),
        ("ndim", |m| m.dl_tensor.ndim = 5),
        ("ndim", |m| m.dl_tensor.ndim = -1),
        ("byte_offset", |m| m.dl_tensor.byte_offset = u64::MAX),
        ("shape", |m| m.dl_tensor.byte_offset = 2),
        ("shape", |m| m.dl_tensor.byte_offset = u64::MAX - (m.dl_tensor.data.addr() as u64) - 7),
    ];
    let mut producers: Vec<(&str, Producer)> = changes
        .into_iter()
        .map(|(arg, change)| (arg, Producer { change, ..Producer::new(&[1, 1, 1, 1, 2], &[0.0; 2]) }))
        .collect();
    producers.iter_mut().filter(|(arg, _)| *arg != "ndim").for_each(|(_, producer)| producer.shape = vec![2]);
    producers.push(("strides", Producer { strides: Some(vec![-1]), ..Producer::new(&[2], &[0.0; 2]) }));
    producers.push(("shape", Producer::new(&[-2], &[])));
    producers.push(("shape", Producer::new(&[i64::MAX, i64::MAX], &[])));
    producers.push(("shape", Producer { strides: Some(vec![i64::MAX]), ..Producer::new(&[9], &[]) }));
    for (index, (wanted, producer)) in producers.into_iter().enumerate() {
        let deleted = producer.deleted.clone();
        match import(producer.hand_out()) {
            Err(Error::Argument { arg, .. }) => assert_eq!(arg, wanted, "case {index}"),
            other => panic!("case {index}, of {wanted}: {other:?}"),
        }
        assert_eq!(deleted.load(Ordering::Relaxed), 1, "case {index}, of {wanted}");
    }
}

#[test]
fn a_graph_keeps_an_imported_tensor() {
    use latentwave::ops::{MergeStates, merge_states};
    let host = Host::new();
    let producer = Producer::new(&[1, 1, 2], &[3.0, 5.0]);
    let deleted = producer.deleted.clone();
    let prefix_out = import(producer.hand_out()).unwrap();
    let suffix_out = Tensor::from_slice(&host, [1, 1, 2], &[5.0_f32, 7.0]).unwrap();
    let lse = Tensor::from_slice(&host, [1, 1], &[1.0_f32]).unwrap();
    let mut out = Tensor::zeros(&host, [1, 1, 2], DType::F32).unwrap();
    let stream = Stream::new(&host).unwrap();
    let graph = stream
        .capture(|| {
            let states = MergeStates {
                prefix_out: &prefix_out,
                prefix_lse: &lse,
                suffix_out: &suffix_out,
                suffix_lse: &lse,
                tokens_with_context: None,
            };
            merge_states(&stream, &states, &mut out, None)
        })
        .unwrap();
    drop((prefix_out, suffix_out, lse));
    // SAFETY: the graph keeps all that it uses.
    unsafe { stream.replay(&graph).unwrap() };
    assert_eq!(out.to_vec::<f32>(&host).unwrap(), [4.0, 6.0]);
    assert_eq!(deleted.load(Ordering::Relaxed), 0);
    drop(graph);
    assert_eq!(deleted.load(Ordering::Relaxed), 1);
}

#[test]
fn exported_tensors_come_back_as_they_were() {
    fn round<M: Managed>() {
        let host = Host::new();
        for dtype in
            [DType::F32, DType::F16, DType::BF16, DType::Fp8E4m3, DType::Fp8E4m3Fnuz, DType::U8, DType::I32, DType::I64]
        {
            let whole = Tensor::zeros(&host, [3, 4, 5], dtype).unwrap();
            let tensor = whole.narrow(1, 1..3).unwrap();
            let managed = tensor.to_dlpack::<M>(&host).unwrap();
            let wanted = (tensor.addr(), dtype, [3, 2, 5], [20, 5, 1]);
            drop((tensor, whole));
            let back = import(managed).unwrap();
            let got = (back.addr(), back.dtype(), back.shape(), back.strides());
            assert_eq!(got, (wanted.0, wanted.1, &wanted.2[..], &wanted.3[..]));
        }
        let scalar = Tensor::from_slice(&host, [], &[4.5_f32]).unwrap();
        let back = import(scalar.to_dlpack::<M>(&host).unwrap()).unwrap();
        assert_eq!((back.to_vec::<f32>(&host).unwrap()[0], back.shape().len()), (4.5, 0));
    }
    round::<DLManagedTensorVersioned>();
    round::<DLManagedTensor>();
}

/// The structures here are those of another implementation, and both read what the other wrote.
#[test]
fn another_implementation_agrees() {
    assert_eq!(size_of::<DLManagedTensor>(), size_of::<ffi::DLManagedTensor>());
    assert_eq!(size_of::<DLManagedTensorVersioned>(), size_of::<ffi::DLManagedTensorVersioned>());
    let host = Host::new();
    let values: Vec<f32> = (0..6).map(|i| i as f32).collect();
    let tensor = Tensor::from_slice(&host, [2, 3], &values).unwrap();

    let theirs: NonNull<DLManagedTensorVersioned> = tensor.to_dlpack(&host).unwrap();
    // SAFETY: a valid tensor that is handed over, and whose memory is there.
    let theirs = unsafe { versioned::Dlpack::from_raw(theirs.as_ptr().cast()) }.unwrap();
    let view = theirs.validate_export().unwrap();
    assert_eq!(
        (view.shape(), view.strides(), view.device().device_type.0),
        (&[2, 3][..], Some(&[3, 1][..]), CPU as u32)
    );
    // SAFETY: as above.
    assert_eq!(unsafe { view.cpu_slice::<f32>() }.unwrap(), values);
    // And back again, as theirs.
    let back = import(NonNull::new(theirs.into_raw()).unwrap().cast::<DLManagedTensorVersioned>()).unwrap();
    assert_eq!(back.addr(), tensor.addr());

    let theirs: NonNull<DLManagedTensor> = tensor.to_dlpack(&host).unwrap();
    // SAFETY: as above.
    let theirs = unsafe { legacy::Dlpack::from_raw(theirs.as_ptr().cast()) }.unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { theirs.validate_export().unwrap().cpu_slice::<f32>() }.unwrap(), values);
    drop(theirs);

    let halves = Tensor::from_slice(&host, [2], &[bf16::ONE, bf16::ZERO]).unwrap();
    let theirs: NonNull<DLManagedTensorVersioned> = halves.to_dlpack(&host).unwrap();
    // SAFETY: as above.
    let theirs = unsafe { versioned::Dlpack::from_raw(theirs.as_ptr().cast()) }.unwrap();
    let dtype = theirs.validate().unwrap().dtype();
    assert_eq!((dtype.code, dtype.bits), (ffi::DLDataTypeCode::BFLOAT, 16));
}

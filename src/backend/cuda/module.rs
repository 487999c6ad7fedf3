//! Kernels: loading and launching.

use std::ffi::{CString, c_void};
use std::ptr::{from_ref, null_mut};
use std::sync::Arc;

use cudarc::driver::sys::{
    CUfunction, CUfunction_attribute as Attribute, CUlaunchAttribute, CUlaunchAttributeID,
    CUlaunchAttributeValue_union__bindgen_ty_1 as CUclusterDim, CUlaunchConfig, CUmodule,
};

use super::device::{Device, StreamHandle};
use super::driver::cu;
use super::tensor_map::cache_maps;
use crate::backend::gpu::Arena;
use crate::error::Result;
use crate::kernel::{Launch, Params, Variant};

/// A loaded binary with one entry point.
pub struct Module {
    arena: Arc<Arena<Device>>,
    module: CUmodule,
    function: CUfunction,
}

// SAFETY: handles of the driver, which every thread may use.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// Loads a binary, and lets its kernel use all the shared memory that a block can have.
    pub(super) fn load(arena: &Arc<Arena<Device>>, code: &[u8], symbol: &str) -> Result<Self> {
        let device = arena.device();
        let driver = device.driver;
        let _bound = device.bind_relaxed()?;
        // PTX is read as text up to a zero; a binary knows its own end.
        let image = [code, &[0]].concat();
        let mut module = Self { arena: arena.clone(), module: null_mut(), function: null_mut() };
        let symbol = CString::new(symbol).unwrap_or_default();
        let mut static_bytes = 0;
        // SAFETY: image and name outlive the calls; the pointers are valid for them.
        unsafe {
            cu!(driver, cuModuleLoadData(&mut module.module, image.as_ptr().cast()))?;
            cu!(driver, cuModuleGetFunction(&mut module.function, module.module, symbol.as_ptr()))?;
            let shared = Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
            cu!(driver, cuFuncGetAttribute(&mut static_bytes, shared, module.function))?;
            let dynamic = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let most = device.info.shared_bytes_per_block as i32 - static_bytes;
            cu!(driver, cuFuncSetAttribute(module.function, dynamic, most.max(0)))?;
        }
        Ok(module)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let device = self.arena.device();
        if self.module.is_null() {
            return;
        }
        let Ok(_bound) = device.bind_relaxed() else { return };
        // SAFETY: loaded once; the backend waits for its streams before it drops its kernels.
        let _ = unsafe { cu!(device.driver, cuModuleUnload(self.module)) };
    }
}

/// Enqueues a kernel.
///
/// # Safety
/// As [`Backend::launch`](crate::Backend::launch).
pub(super) unsafe fn launch(
    device: &Device,
    stream: StreamHandle,
    (module, variant): (&Module, &Variant),
    launch: &Launch,
    params: &Params,
) -> Result<()> {
    let _bound = device.bind()?;
    // SAFETY: plain C structures, for which zeros are valid.
    let mut attributes: [CUlaunchAttribute; 2] = unsafe { std::mem::zeroed() };
    let mut num_attributes = 0;
    // From compute capability 9.0 on a kernel may start before its predecessor has ended, and there are clusters.
    if device.capability >= 90 {
        if launch.dependent {
            let attribute = &mut attributes[num_attributes];
            attribute.id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attribute.value.programmaticStreamSerializationAllowed = 1;
            num_attributes += 1;
        }
        if launch.cluster > 1 {
            let attribute = &mut attributes[num_attributes];
            attribute.id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
            attribute.value.clusterDim = CUclusterDim { x: launch.cluster, y: 1, z: 1 };
            num_attributes += 1;
        }
    }
    let config = CUlaunchConfig {
        gridDimX: launch.grid[0],
        gridDimY: launch.grid[1],
        gridDimZ: launch.grid[2],
        blockDimX: launch.threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: launch.shared_bytes,
        hStream: stream.0,
        attrs: attributes.as_mut_ptr(),
        numAttrs: num_attributes as u32,
    };
    let maps = match params {
        Params::Decode(params) if variant.takes_maps() => Some(cache_maps(device.driver, variant, params)?),
        _ => None,
    };
    let [latent, rope] =
        maps.as_ref().map_or([null_mut(); 2], |maps| maps.each_ref().map(|map| from_ref(map).cast_mut().cast()));
    // The block itself, then the maps, which other kernels have no parameters for.
    let mut arguments = [from_ref(params.as_bytes()).cast_mut().cast::<c_void>(), latent, rope];
    // SAFETY: the driver copies the parameters and the attributes before it returns; the addresses are the caller's promise.
    unsafe { cu!(device.driver, cuLaunchKernelEx(&config, module.function, arguments.as_mut_ptr(), null_mut())) }
}

//! The interpreter with no HIP runtime.

use std::sync::Mutex;

use hsakmt::device::{CodeObject, Config, Device, Dispatch, KernelDescriptor};

use super::{Arguments, Gpu};

/// An emulated device with a code object.
pub(crate) struct Emulator {
    pub(crate) device: Device,
    code: CodeObject,
    buffers: Mutex<Vec<Vec<u64>>>,
    /// Dynamic LDS of a workgroup.
    pub(crate) dynamic_bytes: u32,
}

impl Emulator {
    /// Loads a code object.
    pub(crate) fn new(file: &[u8], check: bool) -> Self {
        Self::with(file, Config { check, ..Config::default() })
    }

    /// Loads a code object on a device of that configuration.
    pub(crate) fn with(file: &[u8], config: Config) -> Self {
        let device = Device::new(config);
        let code = CodeObject::load(file, &device.memory).expect("a code object");
        Self { device, code, buffers: Mutex::default(), dynamic_bytes: 0 }
    }
}

impl Gpu for Emulator {
    type Kernel = u64;

    fn upload(&self, bytes: &[u8]) -> u64 {
        let mut buffer = vec![0u64; bytes.len().div_ceil(8)];
        let address = buffer.as_mut_ptr() as u64;
        // SAFETY: the buffer has at least as many bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) };
        self.device.memory.insert(address, bytes.len() as u64);
        self.buffers.lock().unwrap().push(buffer);
        address
    }

    fn download(&self, address: u64, len: usize) -> Vec<u8> {
        self.device.memory.read(address, len).expect("an uploaded buffer")
    }

    fn kernel(&self, name: &str) -> u64 {
        self.code.kernel(name).unwrap_or_else(|| panic!("no kernel {name}"))
    }

    fn launch(&self, kernel: &u64, blocks: u32, threads: u32, arguments: &Arguments) -> Result<(), String> {
        // Hidden arguments follow; the test kernels read none.
        let mut bytes = arguments.bytes.clone();
        bytes.resize(bytes.len() + 256, 0);
        let descriptor = self.device.memory.read(*kernel, KernelDescriptor::SIZE).expect("a descriptor");
        let descriptor = KernelDescriptor::parse(&descriptor)?;
        // Of the packet kernels read the sizes of block and grid.
        let mut packet = [0; 64];
        packet[4..6].copy_from_slice(&(threads as u16).to_le_bytes());
        packet[12..16].copy_from_slice(&(blocks * threads).to_le_bytes());
        let dispatch = Dispatch {
            packet: self.upload(&packet),
            kernel: *kernel,
            grid: [blocks * threads, 1, 1],
            workgroup: [threads, 1, 1],
            group_bytes: descriptor.group_segment + self.dynamic_bytes,
            private_bytes: descriptor.private_segment,
            kernarg: self.upload(&bytes),
            ..Dispatch::default()
        };
        self.device.run(&dispatch).map_err(|fault| fault.to_string())
    }
}

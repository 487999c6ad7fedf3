//! Layouts of the driver library's C interface, as `hsakmt/hsakmttypes.h` declares them: packed to 4 bytes.

use std::ffi::c_void;

/// `HSAKMT_STATUS`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Status {
    /// Done.
    Success = 0,
    /// An argument is out of range.
    InvalidParameter = 3,
    /// No such queue, event or allocation.
    InvalidHandle = 4,
    /// No such node.
    InvalidNodeUnit = 5,
    /// Out of memory.
    NoMemory = 6,
    /// The emulated device has no such thing.
    NotSupported = 11,
    /// The driver library could not be opened.
    KernelIoChannelNotOpened = 20,
    /// Nothing happened in time.
    WaitTimeout = 31,
    /// The memory was never registered.
    MemoryNotRegistered = 36,
}

/// `HsaVersionInfo`.
#[repr(C, packed(4))]
pub struct VersionInfo {
    pub(super) major: u32,
    pub(super) minor: u32,
}

/// `HsaSystemProperties`.
#[derive(Default)]
#[repr(C, packed(4))]
pub struct SystemProperties {
    pub(super) num_nodes: u32,
    pub(super) platform: [u32; 3],
}

/// `HsaNodeProperties`.
#[derive(Clone, Copy)]
#[repr(C, packed(4))]
pub struct NodeProperties {
    pub(super) num_cpu_cores: u32,
    pub(super) num_fcompute_cores: u32,
    pub(super) num_memory_banks: u32,
    pub(super) num_caches: u32,
    pub(super) num_io_links: u32,
    pub(super) ccompute_id_lo: u32,
    pub(super) fcompute_id_lo: u32,
    pub(super) capability: u32,
    pub(super) max_waves_per_simd: u32,
    pub(super) lds_size_in_kb: u32,
    pub(super) gds_size_in_kb: u32,
    pub(super) wave_front_size: u32,
    pub(super) num_shader_banks: u32,
    pub(super) num_arrays: u32,
    pub(super) num_cu_per_array: u32,
    pub(super) num_simd_per_cu: u32,
    pub(super) max_slots_scratch_cu: u32,
    pub(super) engine_id: u32,
    pub(super) vendor_id: u16,
    pub(super) device_id: u16,
    pub(super) location_id: u32,
    pub(super) local_mem_size: u64,
    pub(super) max_engine_clock_mhz_fcompute: u32,
    pub(super) max_engine_clock_mhz_ccompute: u32,
    pub(super) drm_render_minor: i32,
    pub(super) marketing_name: [u16; 64],
    pub(super) amd_name: [u8; 64],
    pub(super) ucode_engine_versions: u32,
    pub(super) debug_properties: u64,
    pub(super) hive_id: u64,
    pub(super) num_sdma_engines: u32,
    pub(super) num_sdma_xgmi_engines: u32,
    pub(super) num_sdma_queues_per_engine: u8,
    pub(super) num_cp_queues: u8,
    pub(super) num_gws: u8,
    pub(super) integrated: u8,
    pub(super) domain: u32,
    pub(super) unique_id: u64,
    pub(super) vgpr_size_per_cu: u32,
    pub(super) sgpr_size_per_cu: u32,
    pub(super) num_xcc: u32,
    pub(super) kfd_gpu_id: u32,
    pub(super) family_id: u32,
}

/// `HsaMemoryProperties`.
#[derive(Clone, Copy, Default)]
#[repr(C, packed(4))]
pub struct MemoryProperties {
    pub(super) heap_type: u32,
    pub(super) size_in_bytes: u64,
    pub(super) flags: u32,
    pub(super) width: u32,
    pub(super) memory_clock_max: u32,
    pub(super) virtual_base_address: u64,
}

/// `HsaCacheProperties`.
#[derive(Clone, Copy)]
#[repr(C, packed(4))]
pub struct CacheProperties {
    pub(super) processor_id_low: u32,
    pub(super) cache_level: u32,
    pub(super) cache_size: u32,
    pub(super) cache_line_size: u32,
    pub(super) cache_lines_per_tag: u32,
    pub(super) cache_associativity: u32,
    pub(super) cache_latency: u32,
    pub(super) cache_type: u32,
    pub(super) sibling_map: [u32; 256],
}

/// `HsaIoLinkProperties`.
#[derive(Clone, Copy, Default)]
#[repr(C, packed(4))]
pub struct IoLinkProperties {
    pub(super) io_link_type: u32,
    pub(super) version: [u32; 2],
    pub(super) node_from: u32,
    pub(super) node_to: u32,
    pub(super) weight: u32,
    pub(super) latency: [u32; 2],
    pub(super) bandwidth: [u32; 2],
    pub(super) rec_transfer_size: u32,
    pub(super) flags: u32,
}

/// `HsaClockCounters`.
#[repr(C, packed(4))]
pub struct ClockCounters {
    pub(super) gpu: u64,
    pub(super) cpu: u64,
    pub(super) system: u64,
    pub(super) system_frequency_hz: u64,
}

/// `HsaPointerInfo`.
#[repr(C, packed(4))]
pub struct PointerInfo {
    pub(super) kind: u32,
    pub(super) node: u32,
    pub(super) mem_flags: u32,
    pub(super) cpu_address: *mut c_void,
    pub(super) gpu_address: u64,
    pub(super) size_in_bytes: u64,
    pub(super) num_registered_nodes: u32,
    pub(super) num_mapped_nodes: u32,
    pub(super) registered_nodes: *const u32,
    pub(super) mapped_nodes: *const u32,
    pub(super) user_data: *mut c_void,
}

/// `HsaEventDescriptor`.
#[repr(C, packed(4))]
pub struct EventDescriptor {
    pub(super) event_type: u32,
    pub(super) node_id: u32,
    pub(super) sync_var: [u64; 2],
}

/// `HsaEvent`.
#[repr(C, packed(4))]
pub struct Event {
    pub(super) event_id: u32,
    pub(super) event_type: u32,
    pub(super) data: [u32; 5],
    pub(super) hw_data1: u64,
    pub(super) hw_data2: u64,
    pub(super) hw_data3: u32,
}

/// `HsaQueueResource`.
#[repr(C, packed(4))]
pub struct QueueResource {
    pub(super) queue_id: u64,
    pub(super) doorbell: *mut u64,
    pub(super) write_ptr: *mut u64,
    pub(super) read_ptr: *mut u64,
    pub(super) error_reason: *mut i64,
}

const _: () = {
    assert!(size_of::<NodeProperties>() == 356);
    assert!(size_of::<MemoryProperties>() == 32);
    assert!(size_of::<CacheProperties>() == 1056);
    assert!(size_of::<IoLinkProperties>() == 48);
    assert!(size_of::<PointerInfo>() == 68);
    assert!(size_of::<Event>() == 48);
    assert!(size_of::<QueueResource>() == 40);
};

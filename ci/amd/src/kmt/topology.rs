//! Topology: node 0 is the host, node 1 the emulated gfx942.

use super::types::{CacheProperties, IoLinkProperties, MemoryProperties, NodeProperties, Status, SystemProperties};
use super::{output, with};
use crate::device::{Config, PRIVATE_APERTURE, SHARED_APERTURE};

const HOST: u32 = 0;
/// The GPU's node.
pub(super) const GPU: u32 = 1;
/// The host's processors have ids below this.
const FIRST_GPU_PROCESSOR: u32 = 0x8000_0000;
/// The PCI device id of an MI300X.
pub(super) const DEVICE_ID: u16 = 0x74a1;

const HEAP_SYSTEM: u32 = 0;
const HEAP_FRAME_BUFFER_PUBLIC: u32 = 1;
const HEAP_GPU_LDS: u32 = 4;
const HEAP_GPU_SCRATCH: u32 = 5;

const CACHE_DATA: u32 = 1;
const CACHE_CPU: u32 = 4;
const CACHE_GPU: u32 = 8;

const LINK_PCI_EXPRESS: u32 = 2;

// Fields of HSA_CAPABILITY.
const QUEUE_SIZE_POWER_OF_TWO: u32 = 1 << 3;
const DOORBELL_TYPE_64_BIT: u32 = 2 << 12;
const ASIC_REVISION_1: u32 = 1 << 22;
const SRAM_EDC_SUPPORT: u32 = 1 << 26;

/// Counts the nodes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hsaKmtAcquireSystemProperties(properties: *mut SystemProperties) -> Status {
    // SAFETY: the caller gives a writable pointer or null.
    unsafe { output(properties, SystemProperties { num_nodes: 2, platform: [0; 3] }) }
}

/// Nothing is held.
#[unsafe(no_mangle)]
pub extern "C" fn hsaKmtReleaseSystemProperties() -> Status {
    Status::Success
}

fn node_properties(node: u32, config: &Config) -> NodeProperties {
    // SAFETY: the struct is plain data, for which zeros are valid.
    let mut p: NodeProperties = unsafe { std::mem::zeroed() };
    if node == HOST {
        p.num_cpu_cores = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
        p.num_memory_banks = 1;
        p.num_caches = 2;
        p.num_io_links = 1;
        p.drm_render_minor = -1;
        return p;
    }
    p.num_simd_per_cu = 4;
    p.num_fcompute_cores = config.compute_units * p.num_simd_per_cu;
    p.num_memory_banks = 3;
    p.num_caches = 2;
    p.num_io_links = 1;
    p.fcompute_id_lo = FIRST_GPU_PROCESSOR;
    p.capability = QUEUE_SIZE_POWER_OF_TWO | DOORBELL_TYPE_64_BIT | ASIC_REVISION_1 | SRAM_EDC_SUPPORT;
    p.max_waves_per_simd = 8;
    p.lds_size_in_kb = 64;
    p.wave_front_size = 64;
    p.num_shader_banks = 1;
    p.num_arrays = 1;
    p.num_cu_per_array = config.compute_units;
    p.max_slots_scratch_cu = 32;
    // uCode 70, version 9.4.2
    p.engine_id = 70 | 9 << 10 | 4 << 16 | 2 << 24;
    p.vendor_id = 0x1002;
    p.device_id = DEVICE_ID;
    p.location_id = 0x300;
    p.local_mem_size = config.memory_mib << 20;
    p.max_engine_clock_mhz_fcompute = 1700;
    p.max_engine_clock_mhz_ccompute = 1700;
    p.drm_render_minor = 128;
    let mut name = [0u16; 64];
    name.iter_mut().zip("gfx942 emulator".encode_utf16()).for_each(|(to, c)| *to = c);
    p.marketing_name = name;
    p.amd_name[..6].copy_from_slice(b"gfx942");
    p.num_cp_queues = 24;
    p.unique_id = 0x1234;
    p.num_xcc = 1;
    p.vgpr_size_per_cu = 512 << 10;
    p.sgpr_size_per_cu = 16 << 10;
    p
}

/// What a node is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hsaKmtGetNodeProperties(node: u32, properties: *mut NodeProperties) -> Status {
    with(|driver| {
        if node > GPU {
            return Status::InvalidNodeUnit;
        }
        // SAFETY: the caller gives a writable pointer or null.
        unsafe { output(properties, node_properties(node, &driver.device.config)) }
    })
}

/// Writes as many of `values` as the caller has room for.
///
/// # Safety
/// `to` has room for `count` values.
unsafe fn fill<T: Copy>(to: *mut T, count: u32, values: &[T]) -> Status {
    if to.is_null() {
        return Status::InvalidParameter;
    }
    for (n, value) in values.iter().enumerate().take(count as usize) {
        // SAFETY: by the contract of this function.
        unsafe { to.add(n).write_unaligned(*value) };
    }
    Status::Success
}

/// A node's memories.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hsaKmtGetNodeMemoryProperties(
    node: u32,
    count: u32,
    properties: *mut MemoryProperties,
) -> Status {
    with(|driver| {
        let bank = |heap_type, size_in_bytes, virtual_base_address| MemoryProperties {
            heap_type,
            size_in_bytes,
            flags: 0,
            width: 4096,
            memory_clock_max: 1600,
            virtual_base_address,
        };
        let banks: &[MemoryProperties] = match node {
            HOST => &[bank(HEAP_SYSTEM, host_memory(), 0)],
            GPU => &[
                bank(HEAP_FRAME_BUFFER_PUBLIC, driver.device.config.memory_mib << 20, 0),
                bank(HEAP_GPU_LDS, 64 << 10, SHARED_APERTURE << 32),
                bank(HEAP_GPU_SCRATCH, 1 << 32, PRIVATE_APERTURE << 32),
            ],
            _ => return Status::InvalidNodeUnit,
        };
        // SAFETY: the caller gives room for `count` entries.
        unsafe { fill(properties, count, banks) }
    })
}

/// Bytes of the host's memory.
fn host_memory() -> u64 {
    // SAFETY: sysconf has no preconditions.
    let (pages, size) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    (pages.max(1) as u64) * (size.max(4096) as u64)
}

/// A node's caches.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hsaKmtGetNodeCacheProperties(
    node: u32,
    _processor: u32,
    count: u32,
    properties: *mut CacheProperties,
) -> Status {
    let cache = |level: u32, kib: u32| CacheProperties {
        processor_id_low: if node == HOST { 0 } else { FIRST_GPU_PROCESSOR },
        cache_level: level,
        cache_size: kib,
        cache_line_size: 128,
        cache_lines_per_tag: 1,
        cache_associativity: 16,
        cache_latency: 0,
        cache_type: CACHE_DATA | if node == HOST { CACHE_CPU } else { CACHE_GPU },
        sibling_map: [0; 256],
    };
    // SAFETY: the caller gives room for `count` entries.
    unsafe { fill(properties, count, &[cache(1, 32), cache(2, 4096)]) }
}

/// The link between both nodes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hsaKmtGetNodeIoLinkProperties(
    node: u32,
    count: u32,
    properties: *mut IoLinkProperties,
) -> Status {
    let link = IoLinkProperties {
        io_link_type: LINK_PCI_EXPRESS,
        node_from: node,
        node_to: 1 - node.min(1),
        weight: 20,
        ..IoLinkProperties::default()
    };
    // SAFETY: the caller gives room for `count` entries.
    unsafe { fill(properties, count, &[link]) }
}

//! Ranges in the vendors' profilers: NVTX and rocTX, opened at run time.
//!
//! NVTX has no library of its own any more: a tool puts the path of one into `NVTX_INJECTION64_PATH`, and whoever has ranges to
//! give hands that library a table of function pointers to fill. Older toolkits bring `libnvToolsExt`, and AMD `libroctx64`,
//! with plain functions. Nothing of this is an error where it is missing.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::OnceLock;

use libloading::Library;

type Push = unsafe extern "C" fn(*const c_char) -> c_int;
type Pop = unsafe extern "C" fn() -> c_int;

/// One profiler that takes ranges.
#[derive(Clone, Copy)]
struct Profiler {
    push: Push,
    pop: Pop,
}

/// A range on this thread. Ranges nest, so it is not sent to another.
pub(crate) struct Range(std::marker::PhantomData<*const ()>);

impl Range {
    pub(super) fn new(name: &'static CStr) -> Self {
        for profiler in profilers() {
            // SAFETY: the signature is that of the library's function; the name ends in NUL and is never freed.
            unsafe { (profiler.push)(name.as_ptr()) };
        }
        Self(std::marker::PhantomData)
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        for profiler in profilers() {
            // SAFETY: the signature is that of the library's function.
            unsafe { (profiler.pop)() };
        }
    }
}

/// The profilers that were there when the first range began.
fn profilers() -> &'static [Profiler] {
    static PROFILERS: OnceLock<Vec<Profiler>> = OnceLock::new();
    PROFILERS.get_or_init(|| {
        let nvtx = || plain(&["libnvToolsExt.so.1", "nvToolsExt64_1.dll"], c"nvtxRangePushA", c"nvtxRangePop");
        let roctx =
            ["librocprofiler-sdk-roctx.so.1", "librocprofiler-sdk-roctx.so.0", "libroctx64.so.4", "libroctx64.so"];
        [injected().or_else(nvtx), plain(&roctx, c"roctxRangePushA", c"roctxRangePop")].into_iter().flatten().collect()
    })
}

/// Opens a library for the rest of the process.
fn open(name: impl AsRef<std::ffi::OsStr>) -> Option<&'static Library> {
    // SAFETY: the vendors' profiling libraries may be loaded at any time, and are never unloaded here.
    let library = unsafe { Library::new(name.as_ref()) }.ok()?;
    Some(Box::leak(Box::new(library)))
}

/// The first of these libraries, with plain functions.
fn plain(names: &[&str], push: &CStr, pop: &CStr) -> Option<Profiler> {
    let library = names.iter().find_map(open)?;
    // SAFETY: functions of these names have these signatures in every release.
    unsafe {
        let push = *library.get::<Push>(push.to_bytes_with_nul()).ok()?;
        let pop = *library.get::<Pop>(pop.to_bytes_with_nul()).ok()?;
        Some(Profiler { push, pop })
    }
}

/// A slot that a tool fills with a function, or leaves empty.
type Slot = *const c_void;

/// Of NVTX's types and numbers (`nvtxTypes.h`, the same since version 2): the tables that a tool asks for, and the places of the two
/// functions used here in the table of the module `CORE`.
const CALLBACKS: u32 = 1;
const VERSION_INFO: u32 = 3;
const CORE: usize = 1;
const RANGE_PUSH_A: usize = 9;
const RANGE_POP: usize = 11;
/// Functions of each module: `CORE`, `CUDA`, `OPENCL`, `CUDART`, `CORE2`, `SYNC`. Tools fill them all; most are never called.
const MODULE_SIZES: [usize; 7] = [0, 16, 9, 15, 7, 16, 7];

type ExportTable = unsafe extern "C" fn(u32) -> *const c_void;
type Initialize = unsafe extern "C" fn(ExportTable) -> c_int;

#[repr(C)]
struct Callbacks {
    struct_size: usize,
    module_table: unsafe extern "C" fn(c_uint, *mut *mut *mut Slot, *mut c_uint) -> c_int,
}

#[repr(C)]
struct VersionInfo {
    struct_size: usize,
    version: u32,
    reserved: u32,
    set_version: unsafe extern "C" fn(u32),
}

/// Per module, pointers to the slots of its functions. A tool may keep their addresses, so the slots are never freed.
struct Tables(Vec<Vec<*mut Slot>>);

// SAFETY: a tool writes to the slots while it initialises, which one thread does (in `profilers`); later they are only read.
unsafe impl Sync for Tables {}
// SAFETY: as above.
unsafe impl Send for Tables {}

fn tables() -> &'static Tables {
    static TABLES: OnceLock<Tables> = OnceLock::new();
    TABLES.get_or_init(|| {
        let slots =
            |&size: &usize| vec![ptr::null::<c_void>(); size + 1].leak().iter_mut().map(ptr::from_mut).collect();
        Tables(MODULE_SIZES.iter().map(slots).collect())
    })
}

unsafe extern "C" fn export_table(id: u32) -> *const c_void {
    static CALLBACK_TABLE: Callbacks = Callbacks { struct_size: size_of::<Callbacks>(), module_table };
    static VERSION: VersionInfo =
        VersionInfo { struct_size: size_of::<VersionInfo>(), version: 3, reserved: 0, set_version };
    match id {
        CALLBACKS => ptr::from_ref(&CALLBACK_TABLE).cast(),
        VERSION_INFO => ptr::from_ref(&VERSION).cast(),
        _ => ptr::null(),
    }
}

unsafe extern "C" fn set_version(_: u32) {}

unsafe extern "C" fn module_table(module: c_uint, table: *mut *mut *mut Slot, size: *mut c_uint) -> c_int {
    let Some(pointers) = tables().0.get(module as usize).filter(|pointers| pointers.len() > 1) else { return 0 };
    // SAFETY: the tool gives places to write to, or null for what it does not want.
    unsafe {
        if !table.is_null() {
            *table = pointers.as_ptr().cast_mut();
        }
        if !size.is_null() {
            *size = (pointers.len() - 1) as c_uint;
        }
    }
    1
}

/// The tool that `NVTX_INJECTION64_PATH` names, once it has put its functions into the table.
fn injected() -> Option<Profiler> {
    let library = open(std::env::var_os("NVTX_INJECTION64_PATH")?)?;
    // SAFETY: every injection library has this function, with this signature; the tables live for ever.
    let filled = unsafe {
        let initialize = library.get::<Initialize>(c"InitializeInjectionNvtx2".to_bytes_with_nul()).ok()?;
        initialize(export_table)
    };
    if filled == 0 {
        return None;
    }
    let slot = |index: usize| -> Slot {
        // SAFETY: the slot is one of `tables`, and the tool has finished writing.
        unsafe { tables().0[CORE][index].read() }
    };
    let (push, pop) = (slot(RANGE_PUSH_A), slot(RANGE_POP));
    if push.is_null() || pop.is_null() {
        return None;
    }
    // SAFETY: the tool put functions of these signatures into these slots.
    unsafe {
        Some(Profiler { push: std::mem::transmute::<Slot, Push>(push), pop: std::mem::transmute::<Slot, Pop>(pop) })
    }
}

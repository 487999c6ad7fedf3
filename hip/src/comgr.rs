//! The code object manager, which hipRTC compiles with: it knows which architectures there are.

use std::ffi::{CString, c_char, c_int};

use libloading::Library;

use crate::loader::Search;

/// Handle of the description of a compilation, passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
struct ActionInfo {
    handle: u64,
}

/// What is used of libamd_comgr. All functions return 0 on success.
#[derive(Debug)]
pub(crate) struct Comgr {
    create_action_info: unsafe extern "C" fn(*mut ActionInfo) -> c_int,
    set_isa_name: unsafe extern "C" fn(ActionInfo, *const c_char) -> c_int,
    destroy_action_info: unsafe extern "C" fn(ActionInfo) -> c_int,
}

impl Comgr {
    /// The library that hipRTC uses, if it is a library of its own.
    pub(crate) fn find(search: &Search) -> Option<Self> {
        let files = ["libamd_comgr.so.3", "libamd_comgr.so.2", "libamd_comgr.so"];
        // One that is loaded already is hipRTC's.
        let loaded = files.iter().find_map(|file| open_loaded(file));
        // SAFETY: as in `loader::open`, for AMD's library of this name.
        let open = |place| unsafe { Library::new(place) }.ok();
        let library = loaded.or_else(|| search.places_of(&files).into_iter().find_map(open))?;
        // SAFETY: the types are those of AMD's published interface, the same since its first version.
        let comgr = unsafe {
            Self {
                create_action_info: *library.get("amd_comgr_create_action_info").ok()?,
                set_isa_name: *library.get("amd_comgr_action_info_set_isa_name").ok()?,
                destroy_action_info: *library.get("amd_comgr_destroy_action_info").ok()?,
            }
        };
        // Never unloaded, like the libraries that use it.
        std::mem::forget(library);
        Some(comgr)
    }

    /// Whether code can be made for an architecture. True where the library does not tell.
    pub(crate) fn knows(&self, arch: &str) -> bool {
        let Ok(name) = CString::new(format!("amdgcn-amd-amdhsa--{arch}")) else { return false };
        let mut info = ActionInfo { handle: 0 };
        // SAFETY: the pointer is valid for the call; the description is destroyed once.
        unsafe {
            if (self.create_action_info)(&mut info) != 0 {
                return true;
            }
            let known = (self.set_isa_name)(info, name.as_ptr()) == 0;
            (self.destroy_action_info)(info);
            known
        }
    }
}

#[cfg(target_os = "linux")]
fn open_loaded(file: &str) -> Option<Library> {
    use libloading::os::unix;

    const RTLD_NOLOAD: c_int = 4;
    // SAFETY: nothing is loaded, so no initialiser runs.
    unsafe { unix::Library::open(Some(file), unix::RTLD_LAZY | RTLD_NOLOAD) }.ok().map(Library::from)
}

#[cfg(not(target_os = "linux"))]
fn open_loaded(_: &str) -> Option<Library> {
    None
}

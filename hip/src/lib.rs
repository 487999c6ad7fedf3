//! AMD's HIP and hipRTC libraries, opened at run time.

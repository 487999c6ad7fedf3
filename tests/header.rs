//! `include/latentwave.h` is what cbindgen makes of `src/capi/`, and what is beside it names this version.
#![cfg(feature = "capi")]

use std::path::Path;

const HEADER: &str = "include/latentwave.h";

/// In the order in which the header declares them.
const SOURCES: [&str; 7] = ["status", "device", "args", "decode", "cache", "merge", "session"];

#[test]
fn the_header_is_what_cbindgen_makes() {
    let config = cbindgen::Config::from_file("cbindgen.toml").expect("cbindgen.toml");
    let sources = SOURCES.iter().chain(&["step"]).map(|name| format!("src/capi/{name}.rs"));
    let builder = sources.fold(cbindgen::Builder::new().with_config(config), |builder, source| {
        assert!(Path::new(&source).exists(), "{source}");
        builder.with_src(source)
    });
    let mut made = Vec::new();
    builder.generate().expect("a header").write(&mut made);
    let made = String::from_utf8(made).expect("UTF-8");
    if std::env::var_os("LATENTWAVE_WRITE_HEADER").is_some() {
        std::fs::write(HEADER, &made).expect("include/ can be written");
    }
    let kept = std::fs::read_to_string(HEADER).expect(HEADER);
    let differs = made.lines().zip(kept.lines()).enumerate().find(|(_, (made, kept))| made != kept);
    assert!(
        made == kept,
        "{HEADER} is not what cbindgen makes (first difference: {differs:?}); run LATENTWAVE_WRITE_HEADER=1 cargo test --features capi \
         --test header"
    );
}

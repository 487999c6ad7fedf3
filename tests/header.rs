//! `include/latentwave.h` is what cbindgen makes of `src/capi/`, and the file for pkg-config beside it names this version.
#![cfg(feature = "capi")]

const HEADER: &str = "include/latentwave.h";

/// In the order in which the header declares them.
const SOURCES: [&str; 9] = ["status", "device", "args", "decode", "cache", "merge", "config", "session", "step"];

#[test]
fn the_header_is_what_cbindgen_makes() {
    let config = cbindgen::Config::from_file("cbindgen.toml").expect("cbindgen.toml");
    let files = std::fs::read_dir("src/capi").expect("src/capi").count();
    assert_eq!(files, SOURCES.len() + 1, "a file of src/capi/ is missing here");
    let sources = SOURCES.map(|name| format!("src/capi/{name}.rs"));
    let builder = sources.into_iter().fold(cbindgen::Builder::new().with_config(config), cbindgen::Builder::with_src);
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

#[test]
fn pkg_config_knows_the_version() {
    let file = std::fs::read_to_string("include/latentwave.pc").expect("include/latentwave.pc");
    assert!(file.lines().any(|line| line == concat!("Version: ", env!("CARGO_PKG_VERSION"))));
}

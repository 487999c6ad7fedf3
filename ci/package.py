#!/usr/bin/env python3
"""Checks what `cargo package` made: each package's size, that what users need is inside, and nothing else."""
import pathlib
import re
import sys
import tarfile

LIMIT = 8 << 20
NEEDED = {"latentwave": ["README.md", "LICENSE-MIT", "LICENSE-APACHE", "CHANGELOG.md", "src/lib.rs", "include/latentwave.h"], "latentwave-hip-sys": ["src/lib.rs"]}

# What may lie at the top of each package; cargo adds its own files.
CARGO = {"Cargo.toml", "Cargo.toml.orig", "Cargo.lock", ".cargo_vcs_info.json"}
ALLOWED = {
    "latentwave": {
        "build.rs", "src", "kernels", "include", "cbindgen.toml", "tests", "benches", "examples", "data", "README.md", "ARCHITECTURE.md", "CHANGELOG.md", "LICENSE-MIT",
        "LICENSE-APACHE",
    },
    "latentwave-hip-sys": {"src", "tests", "examples", "device", "README.md"},
}

folder = pathlib.Path("target/package")
version = re.search(r'^version = "(.*)"', pathlib.Path("Cargo.toml").read_text(), re.M).group(1)
bad = 0
for name, needed in NEEDED.items():
    path = folder / f"{name}-{version}.crate"
    size = path.stat().st_size
    with tarfile.open(path) as archive:
        names = {member.name.split("/", 1)[1] for member in archive.getmembers() if "/" in member.name}
    missing = [file for file in needed if file not in names]
    print(f"{path.name}: {size / 1024:.0f} KiB, {len(names)} files")
    if size > LIMIT:
        print(f"  over {LIMIT >> 20} MiB")
        bad += 1
    foreign = sorted({file.split("/")[0] for file in names} - ALLOWED[name] - CARGO)
    if foreign:
        print(f"  not meant to be inside: {', '.join(foreign)}")
        bad += 1
    if missing:
        print(f"  missing: {', '.join(missing)}")
        bad += 1
sys.exit(bad != 0)

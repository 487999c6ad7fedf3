#!/usr/bin/env python3
"""Compiles every kernel variant of the selection table without a GPU and prints what each takes.

usage: ci/kernels.py [--all] [ARCH...]

NVIDIA's architectures go through NVRTC and ptxas, AMD's through clang-22 and lld-22. Without --all only the variants that
are shipped compiled. Fails on spills or scratch, on shared memory that differs from what select.rs counts or is over the
device's, and on stage-1 kernels without matrix instructions. What a machine has no compiler for is reported as not run.
"""

import concurrent.futures
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / "target" / "kernels-venv"
WHEELS = ["nvidia-cuda-nvrtc==13.0.88", "nvidia-cuda-nvdisasm==13.5.37"]
FILES = {
    "mla_plan": ["mla_plan.cu"],
    "mla_decode_split": ["mla_stream.h", "mla_decode_split.cu"],
    "mla_decode_reduce": ["mla_decode_reduce.cu"],
    "mla_cache_write": ["mla_cache.cu"],
    "mla_cache_gather": ["mla_cache.cu"],
    "merge_states": ["merge.cu"],
    "dcp_combine": ["merge.cu"],
}


def is_amd(arch):
    return arch.startswith("gfx")


# Forms of stage 1 other than the portable one, by their number.
FORMS = {
    1: ["sm90/wgmma.h", "sm90/stream.h", "sm90/mla_decode_split_rows.cu"],
    2: ["sm90/wgmma.h", "sm90/stream.h", "sm90/mla_decode_split_keys.cu"],
    3: ["mla_decode_split_few.cu"],
}
# What ptxas says when it serialises matrix products of a warpgroup, or ignores the sharing out of registers.
SERIALISED = re.compile(r"\(C75(?:08|1[0-8]|20)\)")


def source(variant):
    vendor = ROOT / ("hip/device" if is_amd(variant["arch"]) else "kernels")
    kernels = ROOT / "kernels"
    files = [vendor / "vendor.h", vendor / "mma.h", kernels / "params.h", kernels / "tile.h"]
    form = variant["defines"]["FORM"]
    tuned = form > 0 and variant["symbol"] == "mla_decode_split"
    files += [kernels / name for name in (FORMS[form] if tuned else FILES[variant["symbol"]])]
    return "".join(f'#line 1 "{file.relative_to(ROOT)}"\n{file.read_text()}\n' for file in files)


def defines(variant):
    wave = 64 if variant["arch"].startswith("gfx9") else 32
    constants = dict(variant["defines"], WAVE=wave)
    if variant["shared_bytes"]:
        constants["SPLIT_SHARED_BYTES"] = variant["shared_bytes"]
    return [f"-D{name}={value}" for name, value in constants.items()]


class Nvidia:
    """NVRTC out of a virtual environment of its own, opened by path."""

    def __init__(self):
        if not VENV.exists():
            subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
        python = VENV / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", *WHEELS], check=True)
        find = lambda pattern: str(next(VENV.glob(f"lib/python*/site-packages/nvidia/**/{pattern}")))
        ctypes.CDLL(find("libnvrtc-builtins.so.13.0"), mode=ctypes.RTLD_GLOBAL)
        self.nvrtc = ctypes.CDLL(find("libnvrtc.so.13"), mode=ctypes.RTLD_GLOBAL)
        self.nvdisasm = find("nvdisasm")

    def read(self, program, name):
        size = ctypes.c_size_t()
        getattr(self.nvrtc, f"nvrtcGet{name}Size")(program, ctypes.byref(size))
        data = ctypes.create_string_buffer(size.value)
        getattr(self.nvrtc, f"nvrtcGet{name}")(program, data)
        return data.raw

    def compile(self, variant):
        program = ctypes.c_void_p()
        text = source(variant).encode()
        self.nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, b"kernel.cu", 0, None, None)
        options = [f"--gpu-architecture={variant['arch']}", "--std=c++17", "--device-as-default-execution-space"]
        options += ["--ptxas-options=-v", *defines(variant)]
        pointers = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        failed = self.nvrtc.nvrtcCompileProgram(program, len(options), pointers)
        log = self.read(program, "ProgramLog").decode(errors="replace")
        if failed or SERIALISED.search(log):
            return None, log
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(self.read(program, "CUBIN"))
            cubin.flush()
            listing = subprocess.run([self.nvdisasm, "-c", cubin.name], capture_output=True, text=True).stdout
        self.nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
        numbers = lambda pattern: [int(n) for n in re.findall(pattern, log)]
        return {
            "registers": max(numbers(r"Used (\d+) registers"), default=0),
            "spills": sum(numbers(r"(\d+) bytes spill")) + sum(numbers(r"(\d+) bytes stack frame")),
            "static": max(numbers(r"(\d+) bytes smem"), default=0),
            "matrix": listing.count("HMMA.") + listing.count("HGMMA."),
        }, log


class Amd:
    def __init__(self):
        self.clang = shutil.which("clang++-22")
        if not (self.clang and shutil.which("ld.lld-22") and shutil.which("llvm-readelf-22")):
            raise FileNotFoundError("clang++-22, lld-22 and llvm-22 are needed")

    def compile(self, variant):
        with tempfile.TemporaryDirectory() as folder:
            code, text = Path(folder) / "kernel.hsaco", Path(folder) / "kernel.hip"
            text.write_text(source(variant))
            command = [self.clang, "-x", "hip", f"--offload-arch={variant['arch']}", "--offload-device-only"]
            command += ["--no-gpu-bundle-output", "-nogpulib", "-nogpuinc", "-O3", "-std=c++17", "-fuse-ld=lld"]
            command += ["-mcode-object-version=5", *AMD_OPTIONS, *defines(variant), text, "-o", code]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                return None, done.stderr
            notes = subprocess.run(["llvm-readelf-22", "--notes", code], capture_output=True, text=True).stdout
            listing = subprocess.run(["llvm-objdump-22", "-d", code], capture_output=True, text=True).stdout
        most = lambda name: max((int(n) for n in re.findall(rf"\.{name}:\s+(\d+)", notes)), default=0)
        return {
            "registers": most("vgpr_count"),
            "spills": most("private_segment_fixed_size") + most("vgpr_spill_count"),
            "static": most("group_segment_fixed_size"),
            "matrix": len(re.findall(r"v_mfma|v_wmma", listing)),
        }, done.stderr


# Nested loops over registers must be unrolled whole.
AMD_OPTIONS = ["-mllvm", "-pragma-unroll-threshold=1000000", "-Wno-pass-failed"]


def shared_limit(arch):
    if is_amd(arch):
        return 160 << 10 if arch == "gfx950" else 64 << 10
    return {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_120a": 99}.get(arch, 227) << 10


def problems(variant, result):
    shared = variant["shared_bytes"] + result["static"]
    if result["spills"]:
        yield f"{result['spills']} bytes of spills or scratch"
    if variant["symbol"] == "mla_decode_split" and not result["matrix"]:
        yield "no matrix instructions"
    if shared > shared_limit(variant["arch"]):
        yield f"{shared} bytes of shared memory"


def main():
    arguments = sys.argv[1:]
    everything = "--all" in arguments
    arches = [argument for argument in arguments if argument != "--all"]
    command = ["cargo", "run", "--quiet", "--example", "variants", "--", *arches]
    variants = json.loads(subprocess.run(command, check=True, capture_output=True, cwd=ROOT).stdout)
    variants = [variant for variant in variants if everything or variant["common"]]

    failures = 0
    for vendor, of_vendor in ((Nvidia, lambda arch: not is_amd(arch)), (Amd, is_amd)):
        mine = [variant for variant in variants if of_vendor(variant["arch"])]
        if not mine:
            continue
        try:
            compiler = vendor()
        except (OSError, subprocess.CalledProcessError, StopIteration) as error:
            print(f"not run: {vendor.__name__}: {error!r}")
            continue
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            results = pool.map(compiler.compile, mine)
            for variant, (result, log) in zip(mine, results):
                label = f"{variant['arch']:8} {variant['name']:64}"
                if result is None:
                    failures += 1
                    print(f"{label} FAILED\n{log}", flush=True)
                    continue
                found = list(problems(variant, result))
                failures += bool(found)
                shared = variant["shared_bytes"] + result["static"]
                print(
                    f"{label} registers {result['registers']:3} spills {result['spills']:3} shared {shared:6} "
                    f"matrix {result['matrix']:3} {'FAILED: ' + ', '.join(found) if found else ''}".rstrip(),
                    flush=True,
                )
    print(f"{len(variants)} variants, {failures} failed")
    return failures != 0


if __name__ == "__main__":
    sys.exit(main())

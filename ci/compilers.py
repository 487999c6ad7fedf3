"""Compiles kernel variants for the checks of `ci/kernels.py` and `ci/isa`, without a GPU and without ROCm.

Which variants there are, their source text and their options come from the library itself (`examples/variants.rs`).
NVIDIA's go through NVRTC of a pip package, AMD's through clang-22 and lld-22.
"""

import concurrent.futures
import ctypes
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / "target" / "kernels-venv"
WHEELS = ["nvidia-cuda-nvrtc==13.0.88", "nvidia-cuda-nvdisasm==13.5.37"]
# What ptxas says when it serialises matrix products of a warpgroup, or ignores the sharing out of registers.
SERIALISED = re.compile(r"\(C75(?:08|1[0-8]|20)\)")


class CompileError(Exception):
    """What a compiler said of a variant that it refused, or that it made something unfit of."""


@dataclass
class Code:
    """What a compiler made of a variant."""

    listing: str  # disassembled
    registers: int  # vector registers of a thread
    spills: int  # bytes
    static: int  # bytes of shared memory beside the dynamic
    notes: str = ""  # of an AMD code object


def is_amd(arch):
    return arch.startswith("gfx")


def variants(arches):
    """The selection table's variants for these architectures, or all, each with its `text` and `options`."""
    command = ["cargo", "run", "--quiet", "--features", "cuda,rocm", "--example", "variants", "--", *arches]
    table = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT).stdout)
    for variant in table["variants"]:
        variant["text"] = table["texts"][variant["text"]]
        if variant["shared_bytes"]:
            # A kernel asserts that select.rs counts its shared memory as it does.
            variant["options"].append(f"-DSPLIT_SHARED_BYTES={variant['shared_bytes']}")
    return table["variants"]


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
        self.nvrtc.nvrtcCreateProgram(ctypes.byref(program), variant["text"].encode(), b"kernel.cu", 0, None, None)
        options = [f"--gpu-architecture={variant['arch']}", *variant["options"]]
        pointers = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        failed = self.nvrtc.nvrtcCompileProgram(program, len(options), pointers)
        log = self.read(program, "ProgramLog").decode(errors="replace")
        if failed or SERIALISED.search(log):
            raise CompileError(log)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(self.read(program, "CUBIN"))
            cubin.flush()
            listing = subprocess.run([self.nvdisasm, "-c", cubin.name], capture_output=True, text=True).stdout
        self.nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
        numbers = lambda pattern: [int(n) for n in re.findall(pattern, log)]
        return Code(
            listing,
            registers=max(numbers(r"Used (\d+) registers"), default=0),
            spills=sum(numbers(r"(\d+) bytes spill")) + sum(numbers(r"(\d+) bytes stack frame")),
            static=max(numbers(r"(\d+) bytes smem"), default=0),
        )


class Amd:
    """Clang without ROCm: the kernels include nothing."""

    OPTIONS = ["-x", "hip", "--offload-device-only", "--no-gpu-bundle-output", "-nogpulib", "-nogpuinc", "-fuse-ld=lld", "-Wno-pass-failed"]

    def __init__(self):
        self.clang = shutil.which("clang++-22")
        if not (self.clang and shutil.which("ld.lld-22") and shutil.which("llvm-readelf-22")):
            raise FileNotFoundError("clang++-22, lld-22 and llvm-22 are needed")

    def compile(self, variant):
        with tempfile.NamedTemporaryFile(suffix=".hsaco") as code:
            command = [self.clang, *self.OPTIONS, f"--offload-arch={variant['arch']}", *variant["options"], "-", "-o", code.name]
            done = subprocess.run(command, input=variant["text"], capture_output=True, text=True)
            if done.returncode:
                raise CompileError(done.stderr)
            notes = subprocess.run(["llvm-readelf-22", "--notes", code.name], capture_output=True, text=True).stdout
            listing = subprocess.run(["llvm-objdump-22", "-d", code.name], capture_output=True, text=True).stdout
        most = lambda name: max((int(n) for n in re.findall(rf"\.{name}:\s+(\d+)", notes)), default=0)
        return Code(
            listing,
            registers=most("vgpr_count"),
            spills=most("private_segment_fixed_size") + most("vgpr_spill_count"),
            static=most("group_segment_fixed_size"),
            notes=notes,
        )


job = None  # of this process's children: what makes the answer for a variant


def answer(variant):
    return job(variant)


def examine(variants, look):
    """Compiles every variant and has `look` see it: triples of the variant, what `look` returned and the error if there was
    one, in order. Says which vendor's compiler is not here."""
    global job
    for vendor, of_vendor in ((Nvidia, lambda arch: not is_amd(arch)), (Amd, is_amd)):
        mine = [variant for variant in variants if of_vendor(variant["arch"])]
        if not mine:
            continue
        try:
            compiler = vendor()
        except (OSError, subprocess.CalledProcessError, StopIteration) as error:
            print(f"not run: {vendor.__name__}: {error!r}")
            continue
        job = lambda variant: look(variant, compiler.compile(variant))
        with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("fork")) as pool:
            jobs = [pool.submit(answer, variant) for variant in mine]
            for variant, done in zip(mine, jobs):
                try:
                    yield variant, done.result(), None
                except CompileError as error:
                    yield variant, None, str(error)

#!/usr/bin/env python3
"""Times host attention and the same float32 products in numpy, on the same cores in one run.

    python3 benches/compare_numpy.py [--write FILE]

numpy computes S = Q K^T and O = S V per sequence over a contiguous cache: the two matrix products alone, without softmax,
paging or splits. The crate's step computes all of that. OPENBLAS_CORETYPE=SKYLAKEX makes OpenBLAS use AVX-512 where it would
not by itself.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import time

import numpy as np

# Heads, sequences, cached tokens of each; the same list is in host_attention.rs.
SHAPES = [(16, 8, 2048), (16, 1, 16384), (64, 4, 2048), (128, 4, 2048)]
WIDTH, RANK = 576, 512
ROOT = pathlib.Path(__file__).resolve().parent.parent


def numpy_seconds(heads, batch, tokens):
    random = np.random.default_rng(1)
    q = random.standard_normal((batch, heads, WIDTH), dtype=np.float32)
    kv = random.standard_normal((batch, tokens, WIDTH), dtype=np.float32)
    scores = np.empty((batch, heads, tokens), np.float32)
    out = np.empty((batch, heads, RANK), np.float32)

    def step():
        for b in range(batch):
            np.matmul(q[b], kv[b].T, out=scores[b])
            np.matmul(scores[b], kv[b, :, :RANK], out=out[b])

    step()
    times = []
    for _ in range(30):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return min(times)


def crate_seconds():
    command = ["cargo", "bench", "--bench", "host_attention", "--", "--noplot"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
    target = json.loads(
        subprocess.run(["cargo", "metadata", "--no-deps", "--format-version", "1"], cwd=ROOT, check=True,
                       capture_output=True).stdout)["target_directory"]
    seconds = {}
    for path in pathlib.Path(target, "criterion", "host_attention").glob("*/*/new/sample.json"):
        kind, shape = path.parts[-4], path.parts[-3]
        sample = json.loads(path.read_text())
        seconds[kind, shape] = min(t / n for t, n in zip(sample["times"], sample["iters"])) * 1e-9
    return seconds


def cpu():
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    model = re.search(r"model name\s*:\s*(.*)", text)
    family = re.search(r"cpu family\s*:\s*(\d+)", text)
    number = re.search(r"model\s*:\s*(\d+)", text)
    name = model.group(1) if model else platform.machine()
    return f"{name} (family {family.group(1)}, model {number.group(1)})" if family and number else name


def blas():
    info = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    try:
        from threadpoolctl import threadpool_info
        found = [f"{p['internal_api']} {p['version']}, {p['architecture']} kernels, {p['num_threads']} threads"
                 for p in threadpool_info() if p["user_api"] == "blas"]
        if found:
            return found[0]
    except ImportError:
        pass
    return f"{info['name']} {info['version']}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=pathlib.Path, help="also write the table to this file")
    args = parser.parse_args()

    load = os.getloadavg()
    # Before and after the crate's run, so that a machine that slows down shows.
    before = {shape: numpy_seconds(*shape) for shape in SHAPES}
    crate = crate_seconds()
    after = {shape: numpy_seconds(*shape) for shape in SHAPES}

    rustc = subprocess.run(["rustc", "--version"], check=True, capture_output=True, text=True).stdout.strip()
    kernels = os.environ.get("OPENBLAS_CORETYPE")
    command = f"OPENBLAS_CORETYPE={kernels} " if kernels else ""
    lines = [
        "# Host attention against numpy",
        "",
        f"{datetime.date.today().isoformat()}, {cpu()}, {len(os.sched_getaffinity(0))} cores, {rustc}, "
        f"numpy {np.__version__} with {blas()}.",
        "",
        f"Command: `{command}python3 benches/compare_numpy.py --write benches/results/host-attention.md`. The crate runs the whole step "
        "over a paged, shuffled cache; numpy the two float32 matrix products alone over a contiguous one, before and after. "
        "Times are the fastest of 20 samples and of 30 runs, for the cores may be shared (load average "
        f"{load[0]:.1f} before, {os.getloadavg()[0]:.1f} after). Speed is numpy's faster time over the crate's.",
        "",
        "| heads x sequences x tokens | cache | crate ms | crate GFLOP/s | numpy ms before, after | speed against numpy |",
        "|---|---|---|---|---|---|",
    ]
    for heads, batch, tokens in SHAPES:
        shape = f"{heads}x{batch}x{tokens}"
        flop = 2 * heads * batch * tokens * (WIDTH + RANK)
        times = before[heads, batch, tokens], after[heads, batch, tokens]
        for kind in ("f32", "bf16", "fp8_e4m3"):
            if (kind, shape) in crate:
                ours = crate[kind, shape]
                lines.append(f"| {shape} | {kind} | {ours * 1e3:.2f} | {flop / ours * 1e-9:.0f} "
                             f"| {times[0] * 1e3:.2f}, {times[1] * 1e3:.2f} | {min(times) / ours * 100:.0f} % |")
    text = "\n".join(lines) + "\n"
    print(text)
    if args.write:
        args.write.write_text(text)


if __name__ == "__main__":
    main()

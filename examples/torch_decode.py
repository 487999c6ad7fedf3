#!/usr/bin/env python3
"""Decode attention of torch tensors through the C ABI, by ctypes alone: nothing is copied and nothing is compiled against torch.

    cargo rustc --release --lib --crate-type cdylib --features capi,cuda        # or capi,rocm; capi alone for the host
    python3 examples/torch_decode.py                                            # --bench target/release/latentwave for its figures, too

It checks outputs against a float32 reference, captures a step of several layers in a torch.cuda.CUDAGraph, replays it after
lengths and block tables have changed in place, and measures a layer as `latentwave bench` does. Without a GPU it says so and runs
what can be run on the host, with torch or numpy.
"""
import argparse
import ctypes
import json
import math
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from ctypes import POINTER, byref, c_char_p, c_float, c_int32, c_int64, c_size_t, c_uint32, c_void_p

try:
    import torch
except ImportError:
    torch = None
try:
    import numpy
except ImportError:
    numpy = None

LW_HOST, LW_CUDA, LW_ROCM = 0, 1, 2
LW_F32, LW_BF16 = 1, 3
ABI_VERSION = 1
LATENT, ROPE, PAGE = 512, 64, 64
WIDTH = LATENT + ROPE
SCALE = 1 / math.sqrt(192)
MIB = 1 << 20


class Layer(ctypes.Structure):
    """lw_layer"""
    _fields_ = [(name, c_int64) for name in ("num_heads", "kv_lora_rank", "qk_rope_head_dim", "page_size", "split_value")]
    _fields_ += [("split", c_int32), ("q_dtype", c_int32), ("kv_dtype", c_int32)]
    _fields_ += [("sm_scale", c_float), ("softcap", c_float), ("kv_scale", c_float)]


class KvCache(ctypes.Structure):
    """lw_kv_cache"""
    _fields_ = [("kv", c_void_p), ("k_rope", c_void_p), ("num_pages", c_int64)]
    _fields_ += [("kv_strides", c_int64 * 2), ("k_rope_strides", c_int64 * 2)]


class DecodeArgs(ctypes.Structure):
    """lw_decode_args"""
    _fields_ = [("struct_size", c_size_t), ("layer", Layer), ("cache", KvCache)]
    _fields_ += [(name, c_int64) for name in ("batch", "query_len", "max_seq_len", "table_width", "table_stride")]
    _fields_ += [(name, c_void_p) for name in ("q", "block_table", "seq_lens", "out", "lse", "workspace")]
    _fields_ += [("workspace_bytes", c_size_t), ("q_strides", c_int64 * 3), ("out_strides", c_int64 * 3)]
    _fields_ += [("lse_strides", c_int64 * 2), ("causal", c_int32), ("scheduled", c_int32), ("settled", c_int32)]


class Library:
    """The functions of include/latentwave.h that are used here; a status that is not 0 becomes an exception."""

    def __init__(self, path):
        self.lib = ctypes.CDLL(str(path.resolve()))
        self.lib.lw_abi_version.restype = c_uint32
        self.lib.lw_last_error.restype = self.lib.lw_version.restype = c_char_p
        if self.lib.lw_abi_version() != ABI_VERSION:
            sys.exit(f"{path} has another ABI version than this program")
        args = POINTER(DecodeArgs)
        self.open = self.function("lw_device_open", c_int32, c_int32, POINTER(c_void_p))
        self.workspace_bytes = self.function("lw_decode_workspace_bytes", c_void_p, args, POINTER(c_size_t))
        self.plan = self.function("lw_decode_plan", c_void_p, args, c_void_p)
        self.decode = self.function("lw_decode", c_void_p, args, c_void_p)

    def function(self, name, *argtypes):
        function = getattr(self.lib, name)
        function.argtypes, function.restype, function.errcheck = argtypes, c_int32, self.check
        return function

    def check(self, status, function, _):
        if status != 0:
            raise RuntimeError(f"{function.__name__}: {self.lib.lw_last_error().decode()}")
        return status


class Host:
    """Arrays in ordinary memory, of torch or numpy; calls have run when they return."""
    backend, dtype, stream = LW_HOST, LW_F32, None

    def __init__(self):
        self.name = "torch" if torch else "numpy"
        self.xp = torch or numpy
        self.rng = None if torch else numpy.random.default_rng(0)

    def normal(self, *shape):
        return torch.randn(*shape) if torch else self.rng.standard_normal(shape, dtype=numpy.float32)

    def empty(self, *shape):
        return torch.full(shape, math.nan) if torch else numpy.full(shape, math.nan, numpy.float32)

    floats = empty

    def ints(self, values):
        return torch.tensor(values, dtype=torch.int32) if torch else numpy.array(values, numpy.int32)

    def memory(self, count):
        return torch.empty(count, dtype=torch.uint8) if torch else numpy.empty(count, numpy.uint8)


class Gpu:
    """torch tensors of the current device, on torch's current stream."""
    dtype, xp, name = LW_BF16, torch, "torch"

    def __init__(self):
        self.backend = LW_ROCM if torch.version.hip else LW_CUDA
        torch.manual_seed(0)

    @property
    def stream(self):
        return torch.cuda.current_stream().cuda_stream

    def normal(self, *shape):
        return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")

    def empty(self, *shape):
        return torch.full(shape, math.nan, dtype=torch.bfloat16, device="cuda")

    def floats(self, *shape):
        return torch.full(shape, math.nan, device="cuda")

    def ints(self, values):
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    def memory(self, count):
        return torch.empty(count, dtype=torch.uint8, device="cuda")


def pointer(array):
    return array.data_ptr() if torch and isinstance(array, torch.Tensor) else array.ctypes.data


class Step:
    """One decode step: a batch over several layers, each with pages of its own under one block table."""

    def __init__(self, library, device, on, heads, lens, layers=1, max_seq_len=0):
        self.library, self.device, self.on, self.heads = library, device, on, heads
        batch, self.longest = len(lens), max(max_seq_len, *lens)
        width = -(-self.longest // PAGE)
        self.num_pages = sum(-(-n // PAGE) for n in lens) + width
        self.lens, self.table = on.ints(lens), on.ints(self.pages(lens, width))
        self.q = on.normal(batch, 1, heads, WIDTH)
        self.caches = [on.normal(self.num_pages, PAGE, WIDTH) for _ in range(layers)]
        self.out = [on.empty(batch, 1, heads, LATENT) for _ in range(layers)]
        self.lse = [on.floats(batch, 1, heads) for _ in range(layers)]
        layer = Layer(heads, LATENT, ROPE, PAGE, 0, 0, on.dtype, on.dtype, SCALE, 0, 0)
        first = DecodeArgs(struct_size=ctypes.sizeof(DecodeArgs), layer=layer, batch=batch, query_len=1)
        first.max_seq_len, first.table_width = self.longest, width
        size = c_size_t()
        library.workspace_bytes(device, byref(first), byref(size))
        self.workspace = on.memory(max(size.value, 1))
        first.workspace, first.workspace_bytes = pointer(self.workspace), size.value
        first.q, first.block_table, first.seq_lens = map(pointer, (self.q, self.table, self.lens))
        self.args = []
        for cache, out, lse in zip(self.caches, self.out, self.lse):
            args = DecodeArgs.from_buffer_copy(first)
            args.cache = KvCache(pointer(cache), None, self.num_pages)
            args.out, args.lse, args.scheduled = pointer(out), pointer(lse), 1
            args.settled = 2 if self.args else 0  # the caches of this example are never written
            self.args.append(args)
        self.single = DecodeArgs.from_buffer_copy(self.args[0])
        self.single.scheduled = self.single.settled = 0

    def pages(self, lens, width, seed=1):
        """A block table: each sequence has pages of its own, in any order; what lies behind them names no page."""
        order = list(range(self.num_pages))
        random.Random(seed).shuffle(order)
        rows = []
        for n in lens:
            used = -(-n // PAGE)
            rows.append([order.pop() for _ in range(used)] + [-1] * (width - used))
        return rows

    def run(self, launches=None):
        """Enqueues the schedule, then every layer over it."""
        stream, args = self.on.stream, self.args
        self.library.plan(self.device, byref(args[0]), stream)
        for i in range(launches or len(args)):
            self.library.decode(self.device, byref(args[i % len(args)]), stream)

    def error(self, layer=0):
        """Largest difference from softmax(scale * q k) v in float32, as a share of the row's largest element; that of the LSE."""
        xp, worst, worst_lse = self.on.xp, 0.0, 0.0
        for seq, n in enumerate(self.lens.tolist()):
            got = self.out[layer][seq, 0]
            got = got.float() if torch else got
            if n == 0:
                worst = max(worst, float(abs(got).max()))
                continue
            rows = self.caches[layer][self.table[seq, : -(-n // PAGE)].tolist()].reshape(-1, WIDTH)[:n]
            rows, q = (rows.float(), self.q[seq, 0].float()) if torch else (rows, self.q[seq, 0])
            logits = q @ rows.T * SCALE
            largest = xp.amax(logits, -1)[:, None]
            weights = xp.exp(logits - largest)
            total = weights.sum(-1)[:, None]
            want = (weights / total) @ rows[:, :LATENT]
            share = xp.amax(abs(got - want), -1) / xp.amax(abs(want), -1)
            worst = max(worst, float(share.max()))
            lse = xp.log(total[:, 0]) + largest[:, 0]
            worst_lse = max(worst_lse, float(abs(self.lse[layer][seq, 0] - lse).max()))
        return worst, worst_lse


def accurate(what, step, layer=0):
    error, lse = step.error(layer)
    most = 2e-2 if step.on.dtype == LW_BF16 else 1e-4
    print(f"{what}: largest error {error:.1e} of the row's largest element, LSE {lse:.1e}")
    if not (error < most and lse < most):
        sys.exit(f"{what}: wrong")


def graphs(library, device, on):
    """A captured step equals an eager one bit for bit, also after lengths and tables have changed in place."""
    lens = [3000, 1, 0, 517, 64, 4096, 129]
    step = Step(library, device, on, 128, lens, layers=3, max_seq_len=4096)
    graph = torch.cuda.CUDAGraph()
    step.run()  # Kernels are loaded by now; they could be in the capture, too.
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step.run()
    width = step.table.shape[1]
    for round, lens in enumerate([lens, [1, 4096, 2500, 0, 700, 65, 2], [5, 6, 7, 8, 9, 10, 11]]):
        step.lens.copy_(on.ints(lens))
        step.table.copy_(on.ints(step.pages(lens, width, seed=round)))
        for out in step.out:
            out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        replayed = [out.clone() for out in step.out]
        accurate(f"graph, round {round}", step, layer=2)
        for out in step.out:
            out.fill_(math.nan)
        step.run()
        torch.cuda.synchronize()
        if not all(map(torch.equal, replayed, step.out)):
            sys.exit("a replayed graph differs from the same step run eagerly")
    print("graph: bit-equal to eager in every round")


def issue_time(library, device, on):
    """Host time of a call, with ctypes' own share told apart."""
    step = Step(library, device, on, 16, [64])
    for name, call in (
        ("lw_abi_version (ctypes alone)", library.lib.lw_abi_version),
        ("lw_decode, schedule included", lambda s=on.stream: library.decode(device, byref(step.single), s)),
        ("lw_decode of a scheduled step", lambda s=on.stream: library.decode(device, byref(step.args[0]), s)),
    ):
        times = []
        for _ in range(60):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(50):
                call()
            times.append((time.perf_counter() - start) / 50)
        print(f"host time of {name}: {statistics.median(times) * 1e6:.1f} us")


def measure(library, device, on, batch, length, heads, seconds):
    """Microseconds of a layer as `latentwave bench` measures: at least 20 launches in one graph, each over a cold cache."""
    layer_bytes = batch * -(-length // PAGE) * PAGE * WIDTH * 2
    layers = max(1, -(-256 * MIB // layer_bytes))
    launches = max(layers, 20)
    step = Step(library, device, on, heads, [length] * batch, layers)
    step.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run(launches)

    def replay():
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    begin, times = time.perf_counter(), []
    while time.perf_counter() - begin < seconds / 5:
        replay()
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or len(times) < 3:
        times.append(replay())
    accurate(f"B{batch} S{length} H{heads}", step)
    return statistics.median(times) / launches * 1e6


def bench(program, on, points, seconds):
    """What the program measures at the same points, on the same device."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "bench.json"
        names = ", ".join(f"B{b} S{s} H{h} q1" for b, s, h in points)
        backend = "rocm" if on.backend == LW_ROCM else "cuda"
        command = [program, "bench", "--backend", backend, "--points", names, "--time", str(seconds), "--json", str(file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return [point["us"] for point in json.loads(file.read_text())["points"]]


def main():
    root = pathlib.Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=pathlib.Path, default=root / "target/release/liblatentwave.so")
    parser.add_argument("--bench", metavar="PROGRAM", help="the latentwave program, to measure the same points with")
    parser.add_argument("--points", default="128:4096:128,64:4096:16", help="batch:length:heads, set apart by commas")
    parser.add_argument("--time", type=float, default=0.5, help="seconds spent on each point")
    options = parser.parse_args()
    if not torch and not numpy:
        print("not run: neither torch nor numpy is installed")
        return
    if not options.library.exists():
        sys.exit(f"{options.library} is not there; cargo rustc --release --lib --crate-type cdylib --features capi builds it")

    library = Library(options.library)
    gpu = bool(torch) and torch.cuda.is_available()
    on = Gpu() if gpu else Host()
    device = c_void_p()
    library.open(on.backend, torch.cuda.current_device() if gpu else 0, byref(device))
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}" if gpu else f"the host, {on.name}"
    print(f"latentwave {library.lib.lw_version().decode()} on {where}")

    step = Step(library, device, on, 16, [300, 1, 0, 64, 129], layers=2, max_seq_len=512)
    library.decode(device, byref(step.single), on.stream)
    accurate("one layer", step)
    step.run()
    accurate("layers over one schedule", step, layer=1)
    if not gpu:
        print("no graph and no measurement: there is no GPU that torch can use")
        return
    graphs(library, device, on)
    issue_time(library, device, on)
    points = [tuple(map(int, point.split(":"))) for point in options.points.split(",")]
    ours = [measure(library, device, on, *point, options.time) for point in points]
    theirs = bench(options.bench, on, points, options.time) if options.bench else [None] * len(points)
    for (batch, length, heads), us, program in zip(points, ours, theirs):
        beside = f", latentwave bench {program:.1f} us: {(us / program - 1) * 100:+.1f} %" if program else ""
        print(f"B{batch} S{length} H{heads} q1: {us:.1f} us a layer from torch{beside}")


if __name__ == "__main__":
    main()

"""AMD's code objects: what a kernel takes, what one steady turn of its main loop executes, and how long that should take."""

import re
from collections import Counter
from dataclasses import dataclass

import flow

BRANCH = re.compile(r"s_cbranch_|s_branch")
# A line of llvm-objdump: name, operands, address, encoding and, of a branch, its target.
LINE = re.compile(r"^\s+(\w+)\s*(.*?)\s*// ([0-9A-F]+):.*?(?:<\w+\+0x([0-9a-f]+)>)?\s*$")
SYMBOL = re.compile(r"^([0-9a-f]+) <(\w+)>:")
MATRIX = re.compile(r"v_(?:s?mfma|wmma)\w*?_(\d+)x(\d+)x(\d+)")
WORDS = {"b8": 1, "u8": 1, "i8": 1, "b16": 2, "u16": 2, "i16": 2, "b32": 4, "b64": 8, "b96": 12, "b128": 16}
MEMORY_WORDS = {"ubyte": 1, "sbyte": 1, "byte": 1, "ushort": 2, "sshort": 2, "short": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
# Vector instructions that take four times as long as others.
SLOW = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_|v_mul_(lo|hi)_[ui]32|v_mad_[ui]64|v_\w+_f64")


@dataclass(frozen=True)
class Chip:
    """What the model assumes of an architecture."""

    mfma_16bit: int  # multiply-adds of a SIMD per clock, at the shapes of most throughput
    memory: float  # bytes of device memory per clock of a compute unit
    simds: int = 4
    lds: int = 128  # bytes per clock
    valu: int = 4  # clocks of a vector instruction of 64 lanes
    barrier: int = 100  # clocks

CHIPS = {
    # 1307 TFLOPS over 304 units at 2.1 GHz; 4.3 TB/s.
    "gfx942": Chip(mfma_16bit=256, memory=6.7),
    # 2.3 PFLOPS over 256 units at 2.4 GHz; 6.0 TB/s, a little over what AITER reaches.
    "gfx950": Chip(mfma_16bit=512, memory=9.8),
    # 383 TFLOPS over 220 units at 1.7 GHz; 3.2 TB/s peak, the same share of it as gfx942.
    "gfx90a": Chip(mfma_16bit=128, memory=7.0),
}


def lanes(arch):
    return 64 if arch.startswith("gfx9") else 32


def matrix_work(name):
    shape = MATRIX.match(name)
    return int(shape[1]) * int(shape[2]) * int(shape[3]) if shape else 0


def loaded_bytes(name, arch):
    if not re.match(r"(global|buffer|flat)_load_", name):
        return 0
    width = re.search(r"_(d\w+|[us]?byte|[us]?short|b\d+|u16|i16)$", name.removesuffix("_d16_hi").removesuffix("_d16"))
    width = width[1] if width else "dword"
    return (MEMORY_WORDS.get(width) or WORDS.get(width) or 4) * lanes(arch)


def parse(listing, kernel, arch):
    """The instructions of one kernel of a listing."""
    base, inside, found = 0, False, []
    for line in listing.splitlines():
        if symbol := SYMBOL.match(line):
            base, inside = int(symbol[1], 16), symbol[2] == kernel
        if not inside or not (match := LINE.match(line)):
            continue
        name, operands, address, target = match.groups()
        found.append(
            flow.Instruction(
                address=int(address, 16),
                name=name,
                operands=operands,
                target=base + int(target or "0", 16) if BRANCH.match(name) else None,
                falls_through=name not in ("s_branch", "s_endpgm", "s_setpc_b64"),
                skips_nothing=name == "s_cbranch_execz",
                work=matrix_work(name),
                loaded=loaded_bytes(name, arch),
            )
        )
    return found


def matrix_clocks(instruction, arch):
    """Clocks of a SIMD: 8-bit elements, and on gfx950 deep shapes, go twice as fast."""
    chip = CHIPS[arch]
    rate = chip.mfma_16bit
    shallow = re.search(r"_(16x16x16|32x32x8)_?", instruction.name)
    if arch == "gfx950" and shallow:
        rate //= 2
    if arch == "gfx942" and re.search(r"fp8|bf8|i8", instruction.name):
        rate *= 2
    return instruction.work / rate


def lds_bytes(name, arch):
    """Bytes that pass between LDS and registers, or come into LDS from memory. A lane takes a whole bank."""
    if name.startswith(("ds_bpermute", "ds_permute", "ds_swizzle")):
        return 4 * lanes(arch)
    if not re.match(r"ds_(read|write|load|store)", name):
        return 0
    widths = re.findall(r"[bui]\d+", name)
    twice = 2 if re.match(r"ds_(read|write|load|store)_?2", name) else 1
    return max(4, WORDS.get(widths[-1], 4)) * twice * lanes(arch)


def registers_of(operand):
    """`v[2:5]` and `a7` as sets of names."""
    many = re.match(r"([va])\[(\d+):(\d+)\]", operand)
    if many:
        return {f"{many[1]}{n}" for n in range(int(many[2]), int(many[3]) + 1)}
    one = re.match(r"[va]\d+", operand)
    return {one[0]} if one else set()


def rescales(turn):
    """Vector instructions that change accumulators which are carried from turn to turn."""
    carried, written = set(), set()
    for instruction in turn:
        operands = instruction.operands.split(", ")
        if instruction.work and len(operands) > 3:
            carried |= registers_of(operands[3]) - written
        if instruction.name.startswith("v_"):
            written |= registers_of(operands[0])
    of_carried = lambda i: registers_of(i.operands.split(", ")[0]) & carried
    return sum(bool(re.match(r"v_(pk_)?(mul|fma)", i.name)) and bool(of_carried(i)) for i in turn)


def counts(turn, arch):
    """What a turn executes, by kind, of one wave."""
    kinds = Counter()
    for instruction in turn:
        name = instruction.name
        if instruction.work:
            kinds["matrix"] += 1
            kinds["matrix_work"] += instruction.work
        elif name.startswith("v_accvgpr"):
            kinds["accvgpr"] += 1
            kinds["valu"] += 1
        elif name.startswith("v_"):
            kinds["valu"] += 1
            kinds["slow"] += bool(SLOW.match(name))
        elif name.startswith("ds_"):
            kinds["lds"] += 1
            kinds["lds_bytes"] += lds_bytes(name, arch)
        elif re.match(r"(global|buffer|flat)_(load|store|atomic)", name):
            kinds["global"] += 1
            kinds["loaded"] += instruction.loaded
        elif name.startswith("scratch_"):
            kinds["scratch"] += 1
        elif name.startswith("s_wait"):
            kinds["waits"] += 1
        elif name.startswith(("s_barrier_wait", "s_barrier")) and name != "s_barrier_signal":
            kinds["barriers"] += 1
        elif name.startswith("s_load") or name.startswith("s_buffer_load"):
            kinds["scalar_loads"] += 1
        else:
            kinds["salu"] += 1
        kinds["instructions"] += 1
    kinds["rescales"] = rescales(turn)
    return kinds


def model(turn, arch, waves, tile_bytes):
    """Clocks of a compute unit for one turn of a block: t = max(MFMA, VALU, LDS, memory) + barriers."""
    chip = CHIPS[arch]
    kinds = counts(turn, arch)
    per_simd = waves / chip.simds
    clocks = {
        "mfma": per_simd * sum(matrix_clocks(i, arch) for i in turn if i.work),
        "valu": per_simd * chip.valu * (kinds["valu"] + 3 * kinds["slow"]),
        "lds": waves * kinds["lds_bytes"] / chip.lds,
        "memory": tile_bytes / chip.memory,
        "barriers": chip.barrier * kinds["barriers"],
    }
    clocks["total"] = max(clocks[part] for part in ("mfma", "valu", "lds", "memory")) + clocks["barriers"]
    # One wave issues one instruction in four clocks, of whatever kind.
    clocks["issue"] = per_simd * 4 * kinds["instructions"]
    return clocks


def resources(notes):
    """What the code object's notes say that the kernel takes."""
    of = lambda name: int((re.search(rf"\.{name}:\s+(\d+)", notes) or [0, 0])[1])
    return {
        "vgpr": of("vgpr_count"),
        "agpr": of("agpr_count"),
        "sgpr": of("sgpr_count"),
        "scratch": of("private_segment_fixed_size") + of("vgpr_spill_count"),
        "sgpr_spills": of("sgpr_spill_count"),
        "static_lds": of("group_segment_fixed_size"),
    }


def occupancy(vgpr, lds, waves, arch):
    """Waves of a SIMD that fit, and blocks of a compute unit (of a work-group processor on RDNA)."""
    if arch.startswith("gfx9"):
        registers, granule, most, simds, shared = 512, 8, 8, 4, 160 << 10 if arch == "gfx950" else 64 << 10
    else:
        registers, granule, most, simds, shared = 1536, 24, 16, 4, 128 << 10
    by_registers = min(most, registers // max(granule, -(-vgpr // granule) * granule))
    blocks = min(shared // lds if lds else most, by_registers * simds // waves)
    return blocks * waves / simds, blocks

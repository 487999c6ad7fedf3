"""AMD's code objects: what a kernel takes, and what one steady turn of its main loop executes."""

import re
from collections import Counter

import flow
import model
from conditions import Conditions

BRANCH = re.compile(r"s_cbranch_|s_branch")
# A line of llvm-objdump: name, operands, address, encoding and, of a branch, its target.
LINE = re.compile(r"^\s+(\w+)\s*(.*?)\s*// ([0-9A-F]+):.*?(?:<\w+\+0x([0-9a-f]+)>)?\s*$")
SYMBOL = re.compile(r"^([0-9a-f]+) <(\w+)>:")
MATRIX = re.compile(r"v_(?:s?mfma|wmma)\w*?_(\d+)x(\d+)x(\d+)")
WORDS = {"b8": 1, "u8": 1, "i8": 1, "b16": 2, "u16": 2, "i16": 2, "b32": 4, "b64": 8, "b96": 12, "b128": 16}
MEMORY_WORDS = {"ubyte": 1, "sbyte": 1, "byte": 1, "ushort": 2, "sshort": 2, "short": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
# Vector instructions that take four times as long as others.
SLOW = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_|v_mul_(lo|hi)_[ui]32|v_mad_[ui]64|v_\w+_f64")


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
        address, target = int(address, 16), base + int(target or "0", 16)
        # Code out of line for the lanes that need it is taken to run, as is code that only no lane at all would skip.
        aside = name == "s_cbranch_execnz" and target > address
        found.append(
            flow.Instruction(
                address=address,
                name=name,
                operands=operands,
                targets=(target,) if BRANCH.match(name) else (),
                falls_through=name not in ("s_branch", "s_endpgm", "s_setpc_b64") and not aside,
                skips_nothing=name == "s_cbranch_execz",
                work=matrix_work(name),
                loaded=loaded_bytes(name, arch),
            )
        )
    return found


def matrix_clocks(instruction, arch):
    """Clocks of a SIMD: 8-bit elements, and on gfx950 the deep shapes, go twice as fast as others."""
    rate = model.CHIPS[arch].matrix
    if arch == "gfx950" and re.search(r"_(16x16x16|32x32x8)_?", instruction.name):
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
        elif name == "s_swappc_b64":
            kinds["calls"] += 1
        elif name.startswith("s_wait"):
            kinds["waits"] += 1
        elif name in ("s_barrier", "s_barrier_wait"):
            kinds["barriers"] += 1
        else:
            kinds["salu"] += 1
        kinds["instructions"] += 1
    kinds["rescales"] = rescales(turn)
    return kinds


def resources(notes):
    """What the code object's notes say that the kernel takes."""
    of = lambda name: int((re.search(rf"\.{name}:\s+(\d+)", notes) or [0, 0])[1])
    return {
        "vgpr": of("vgpr_count"),
        "agpr": of("agpr_count"),
        "sgpr": of("sgpr_count"),
        "sgpr_spills": of("sgpr_spill_count"),
    }


def waves_of_simd(vgpr, lds, waves, arch):
    """Waves that a SIMD holds of blocks of `waves` waves; RDNA's blocks share a work-group processor of two units."""
    if arch.startswith("gfx9"):
        registers, granule, most, simds, shared = 512, 8, 8, 4, 160 << 10 if arch == "gfx950" else 64 << 10
    else:
        registers, granule, most, simds, shared = 1536, 24, 16, 4, 128 << 10
    by_registers = min(most, registers // max(granule, -(-vgpr // granule) * granule))
    blocks = min(shared // lds if lds else most, by_registers * simds // waves)
    return blocks * waves / simds


HEADING = (
    f"{'':70} {'registers':>16} {'':10} {'waves':>6} | {'instructions of a wave per 64 tokens':^62} |{'clocks of a compute unit per 64 tokens':^46}\n"
    f"{'arch':8} {'variant':51} {'serves':>9} {'v':>4} {'a':>3} {'s':>4} {'spilt':>5} {'LDS':>8} {'a SIMD':>6} | {'matrix':>6} {'valu':>6} {'acc':>4} {'resc':>4} "
    f"{'lds':>5} {'global':>6} {'salu':>5} {'waits':>5} {'barr':>4} {'all':>6} |"
    f" {'mfma':>6} {'valu':>6} {'lds':>6} {'memory':>6} {'barr':>5} {'t':>6} {'issue':>6}"
)
COUNTS = {"matrix": 6, "valu": 6, "accvgpr": 4, "rescales": 4, "lds": 5, "global": 6, "salu": 5, "waits": 5, "barriers": 4, "instructions": 6}
CLOCKS = {"mfma": 6, "valu": 6, "lds": 6, "memory": 6, "barriers": 5, "total": 6, "issue": 6}


def budgets_of(variant, budgets):
    """The budgets of the problems that a variant serves."""
    of_variant = {"arches": "arch", "ranks": "kv_lora_rank", "ropes": "rope_dim", "kv_dtypes": "kv_dtype"}
    for budget in budgets:
        meant = (names not in budget or variant[name] in budget[names] for names, name in of_variant.items())
        if budget["rows"] in variant["rows"] and all(meant):
            yield budget


def look(variant, code, budgets):
    """A line of the table, what is wrong with the variant, and the turn."""
    arch = variant["arch"]
    waves = variant["threads"] // lanes(arch)
    turn, tiles = flow.tile_turn(parse(code.listing, variant["symbol"], arch), variant, waves, Conditions)
    scale = 64 / (tiles * variant["tile_tokens"])
    once = counts(turn, arch)
    per_64 = Counter({kind: count * scale for kind, count in once.items()})
    per_64["mfma"] = once["matrix_work"] / (flow.tile_work(variant, waves) * tiles)

    takes = resources(code.notes)
    lds = variant["shared_bytes"] + code.static
    occupancy = waves_of_simd(takes["vgpr"], lds, waves, arch)
    cells = f"{takes['vgpr']:4} {takes['agpr']:3} {takes['sgpr']:4} {takes['sgpr_spills']:5} {lds:8} {occupancy:6.1f} |"
    cells += "".join(f" {flow.rounded(per_64[kind]):>{width}}" for kind, width in COUNTS.items()) + " |"
    problems = [f"{code.spills} bytes of scratch"] if code.spills else []
    if per_64["calls"]:
        problems.append("a call in the main loop")
    if chip := model.CHIPS.get(arch):
        matrix = sum(matrix_clocks(i, arch) for i in turn if i.work)
        bytes_of_turn = flow.tile_bytes(variant) * tiles

        def clocks(rows):
            # Blocks of the same group of rows attend to the same tile.
            sharing = max(1, rows // variant["block_rows"])
            of = model.clocks(chip, waves, once, matrix, bytes_of_turn, sharing)
            return {part: clock * scale for part, clock in of.items()}

        of = clocks(max(variant["rows"], default=0))
        cells += "".join(f" {flow.rounded(of[part]):>{width}}" for part, width in CLOCKS.items())
        held = list(budgets_of(variant, budgets))
        for budget in held:
            problems += model.over_budget(budget, per_64, clocks(budget["rows"]))
        budgeted = {budget["rows"] for budget in budgets if arch in budget["arches"]}
        missing = budgeted & set(variant["rows"]) - {budget["rows"] for budget in held}
        problems += [f"no budget for {rows} rows" for rows in sorted(missing)]
    return cells, problems, turn

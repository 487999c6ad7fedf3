"""NVIDIA's machine code: what a kernel takes, and what its main loops execute."""

import re
from collections import Counter

import flow

LABEL = re.compile(r"^(\.L_x_\d+):")
SECTION = re.compile(r"^\s+\.section\s+\.text\.(\w+)")
# A line of nvdisasm: address, predicate, name and operands.
LINE = re.compile(r"^\s+/\*([0-9a-f]+)\*/\s+(@!?U?P\w+ )?\s*([\w.]+)\s*(.*?)\s*;")
JUMP = re.compile(r"(BRA|JMP|BRX|BRXU|JMX)\b")
SHAPE = re.compile(r"[HQ]G?MMA\.(?:SP\.)?(?:(\d+)x(\d+)x(\d+)|(16816|1688|16832))")
SHAPES = {"16816": 16 * 8 * 16, "1688": 16 * 8 * 8, "16832": 16 * 8 * 32}


def work_of(name):
    """Multiply-adds of a warp: those of a warpgroup are shared by its four."""
    shape = SHAPE.match(name)
    if not shape:
        return 0
    return SHAPES[shape[4]] if shape[4] else int(shape[1]) * int(shape[2]) * int(shape[3]) // 4


def parse(listing, kernel):
    inside, labels, waiting, lines = False, {}, [], []
    for line in listing.splitlines():
        if section := SECTION.match(line):
            inside = section[1] == kernel
        elif inside and (label := LABEL.match(line)):
            waiting.append(label[1])
        elif inside and (match := LINE.match(line)):
            lines.append(match)
            labels |= {label: int(match[1], 16) for label in waiting}
            waiting = []
    found = []
    for match in lines:
        address, predicate, name, operands = match.groups()
        # A call without a return address goes where a jump would.
        jumps = bool(JUMP.match(name)) or name == "CALL.REL.NOINC" and operands.startswith("`(.L_x_")
        conditional = predicate or re.match(r"!?U?P\d|!?UR", operands) or ".DIV" in name or ".ANY" in name
        copies = re.match(r"LDG(STS)?\.E", name)
        width = re.search(r"\.(\d+)\b", name)
        found.append(
            flow.Instruction(
                address=int(address, 16),
                name=name,
                operands=operands,
                targets=tuple(labels[l] for l in re.findall(r"\.L_x_\d+", match[0]) if l in labels) if jumps else (),
                falls_through=bool(conditional) or not (jumps or name.startswith(("EXIT", "RET"))),
                work=work_of(name),
                loaded=(int(width[1]) // 8 if width else 4) * 32 if copies else 0,
            )
        )
    return found


KINDS = {
    "matrix": r"[HQ]G?MMA",
    "special": r"MUFU",
    "shared": r"LDS|STS|LDSM|STSM",
    "global": r"LDG|STG|RED|ATOM|UTMA|UBLKCP",
    "barriers": r"BAR\b",
    "waits": r"WARPGROUP\.DEPBAR|DEPBAR|LDGDEPBAR|SYNCS\.PHASECHK",
    "local": r"LDL|STL",
    "branches": r"BRA|BSYNC|BSSY|WARPSYNC",
}
HEADING = (
    f"{'':70} {'':9} {'':6} {'':5} | instructions of a warp: per 64 tokens, or (*) of the whole loop, rare paths included\n"
    f"{'arch':8} {'variant':51} {'serves':>9} {'registers':>9} {'shared':>6} {'spilt':>5} |" + "".join(f" {kind:>8}" for kind in [*KINDS, "other", "all"])
)


WIDE_FORM = 10  # as in select_sm90.rs


def counts(instructions):
    kinds = Counter(all=len(instructions))
    for instruction in instructions:
        kinds[next((kind for kind, names in KINDS.items() if re.match(names, instruction.name)), "other")] += 1
    return kinds


def look(variant, code):
    """A line of the table, what is wrong with the variant, and the turn."""
    instructions = parse(code.listing, variant["symbol"])
    blocks = flow.blocks_of(instructions)
    loops = [[i for a in sorted(body) for i in blocks[a].instructions] for _, body in flow.main_loops(blocks)]
    if not loops:
        raise flow.NoTurn("no loop with matrix instructions")
    problems = []
    for body in loops:
        of = counts(body)
        if of["local"]:
            problems.append(f"{of['local']} accesses of local memory in a main loop")
        asynchronous = [i.name for i in body if "GMMA" in i.name]
        waits = sum(i.name.startswith("WARPGROUP.DEPBAR") for i in body)
        # The wide form waits before each product for the registers of the third before it: serialised ones would be waited for twice.
        each = 2 if variant["form"] == WIDE_FORM else 1
        if len(asynchronous) > 1 and waits >= each * len(asynchronous):
            problems.append(f"{waits} waits for {len(asynchronous)} matrix instructions of a warpgroup")
    takes = f"{code.registers:9} {variant['shared_bytes'] + code.static:6} {code.spills:5} |"
    try:
        # Kernels whose warps have roles do no whole tile in any one loop.
        if variant["form"] > 0:
            raise flow.NoTurn
        turn, tiles = flow.tile_turn(instructions, variant, variant["threads"] // 32, lambda *_: flow.AllWays())
        rows = [(turn, 64 / (tiles * variant["tile_tokens"]), "")]
    except flow.NoTurn:
        turn = []
        rows = [(body, 1, "*") for body in loops]
    text = []
    for shown, scale, mark in rows:
        of = counts(shown)
        text.append("".join(f" {flow.rounded(of[kind] * scale) + mark:>8}" for kind in [*KINDS, "other", "all"]))
    return takes + f"\n{'':70} {'':9} {'':6} {'':5} |".join(text), problems, turn

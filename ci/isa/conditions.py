"""Which ways through AMD's code can be gone in one turn of a loop.

The compiler keeps conditions of a whole wave in scalar registers and tests them again later, so that many ways through the
branches contradict themselves. Here the conditions are followed from register to register as symbols: a branch that was taken
on one decides all later ones on the same, and what a turn assumed of its beginning must hold at its end.
"""

import functools
import re

NO_SCC = re.compile(r"s_(mov|cselect|cbranch|branch|waitcnt|wait|nop|mul_i32|mul_hi|load|buffer|barrier|setprio|sext|pack|movk|getpc|sleep|delay|clause|brev|bitset|cmov)")


@functools.cache
def overlapping(register, operand):
    """Whether a write to `operand` changes `register` (both as spelled in the listing)."""
    if register == operand:
        return True
    if register[0] == "s" and operand[0] == "s":
        ends = lambda text: [int(n) for n in re.findall(r"\d+", text)] or [-1]
        mine, other = ends(register), ends(operand)
        return mine[0] <= other[-1] and other[0] <= mine[-1]
    if register[0] == "v" and register[1:].isdigit() and operand.startswith("v["):
        low, high = (int(n) for n in re.findall(r"\d+", operand)[:2])
        return low <= int(register[1:]) <= high
    return register == "vcc" and operand.startswith("vcc")


def comparison(name, a, b):
    """A scalar comparison as one of "less" and "equal", with its sense: `a > 0` is not `a < 1`."""
    kind, width = re.match(r"s_cmpk?_(\w+?)_(\w+)$", name).groups()
    following = lambda text: str(int(text, 0) + 1)
    constant = re.match(r"(-?\d+|0x[0-9a-f]+)$", b)
    return {
        "lt": (f"{a} < {b} {width}", True),
        "ge": (f"{a} < {b} {width}", False),
        "gt": (f"{a} < {following(b)} {width}", False) if constant else (f"{b} < {a} {width}", True),
        "le": (f"{a} < {following(b)} {width}", True) if constant else (f"{b} < {a} {width}", False),
        "eq": (f"{a} = {b}", True),
        "lg": (f"{a} = {b}", False),
    }[kind]


def transfers(instruction):
    """What an instruction does to conditions: pairs of a register and the source of its condition, which is another register
    or a comparison with its sense, a constant, or None for something new."""
    name, operands = instruction.name, instruction.operands.split(", ")
    to = operands[0]
    if name.startswith("s_cmp"):
        return [("scc", comparison(name, *operands))]
    moved = []
    if name == "s_mov_b64" and len(operands) == 2:
        constant = {"-1": True, "0": False}.get(operands[1])
        moved = [(to, constant if constant is not None else (operands[1], True))]
    elif name in ("s_and_b64", "s_andn2_b64", "s_and_not1_b64") and operands[1] == "exec":
        moved = [(to, (operands[2], name == "s_and_b64"))]
    elif name == "s_and_b64" and operands[2] == "exec":
        moved = [(to, (operands[1], True))]
    elif name == "s_xor_b64" and operands[2] == "-1":
        moved = [(to, (operands[1], False))]
    elif name == "s_cselect_b64" and operands[1:] == ["-1", "0"]:
        moved = [(to, ("scc", True))]
    elif name == "v_cndmask_b32_e64" and operands[1:3] == ["0", "1"]:
        moved = [(to, (operands[3], True))]
    elif name.startswith("v_cmp_ne_u32") and operands[1] == "1":
        moved = [(to, (operands[2], False))]
    elif name.startswith(("v_cmp", "s_", "v_")) and operands[0]:
        moved = [(to, None)]
        if name.startswith(("v_mad_u64", "v_mad_i64", "v_add_co", "v_sub_co", "v_addc", "v_div_scale")) and len(operands) > 1:
            moved.append((operands[1], None))
        if "saveexec" in name or instruction.targets:
            moved = [(to, None)] if "saveexec" in name else []
        if name.startswith("s_bitcmp"):
            moved = []
    if name.startswith("s_") and not NO_SCC.match(name):
        moved.append(("scc", None))
    return moved


@functools.cache
def compares(symbol, register):
    """Whether a symbol stands for a comparison, of as it is now, with `register`."""
    return symbol[1] == "now" and any(part[0] in "sv" and overlapping(part, register) for part in symbol[0].split())


@functools.cache
def tested(name):
    """The register that a branch tests, and whether it is taken when that is true."""
    test = re.match(r"s_cbranch_(vcc|scc)(z|nz|0|1)$", name)
    return (test[1], test[2] in ("nz", "1")) if test else None


class Conditions:
    """Conditions known at the beginning of a block: registers' symbols, and what symbols were found to be."""

    def __init__(self, blocks, header, body):
        self.header = header
        self.moves = self.that_matter({a: [(i, transfers(i)) for i in blocks[a].instructions] for a in body})
        self.live = self.liveness(blocks, body)
        start = {register: ((register, "start"), True) for register in self.live[header]}
        self.start = (frozenset(start.items()), frozenset())

    @staticmethod
    def that_matter(moves):
        """Of what instructions do to conditions that which a branch of the loop may depend on."""
        matter, before = {"vcc", "scc"}, 0
        touches = lambda to: any(overlapping(register, to) for register in matter)
        every = [move for block in moves.values() for _, moved in block for move in moved]
        while len(matter) > before:
            before = len(matter)
            for to, source in every:
                if isinstance(source, tuple) and touches(to):
                    matter |= {part for part in source[0].split() if part[0] in "sv"}
        return {a: [(i, [move for move in moved if touches(move[0])]) for i, moved in block] for a, block in moves.items()}

    def liveness(self, blocks, body):
        """Registers at each block's beginning that a later branch depends on."""
        live = {a: frozenset() for a in body}
        changed = True
        while changed:
            changed = False
            for a in body:
                alive = set().union(*(live[to] for to in blocks[a].next if to in body))
                for instruction, moved in reversed(self.moves[a]):
                    if test := tested(instruction.name):
                        alive.add(test[0])
                    for to, source in moved:
                        if any(overlapping(register, to) for register in alive):
                            needed = to in alive
                            alive = {register for register in alive if not overlapping(register, to)}
                            if needed and isinstance(source, tuple) and " " not in source[0]:
                                alive.add(source[0])
                if alive != live[a]:
                    live[a], changed = frozenset(alive), True
        return live

    def after(self, block, known):
        registers, truths = dict(known[0]), dict(known[1])
        for instruction, moved in self.moves[block.address]:
            values = []
            for to, source in moved:
                if isinstance(source, bool):
                    values.append((to, source))
                elif source and " " in source[0]:
                    values.append((to, ((source[0], "now"), source[1])))
                elif source and source[0] in registers:
                    value, sense = registers[source[0]], source[1]
                    values.append((to, value == sense if isinstance(value, bool) else (value[0], value[1] == sense)))
                else:
                    symbol = (to, instruction.address)
                    truths.pop(symbol, None)
                    registers = {r: v for r, v in registers.items() if isinstance(v, bool) or v[0] != symbol}
                    values.append((to, (symbol, True)))
            for to, value in values:
                registers = {r: v for r, v in registers.items() if not overlapping(r, to)}
                aged = lambda symbol: (symbol[0], instruction.address) if compares(symbol, to) else symbol
                registers = {r: v if isinstance(v, bool) else (aged(v[0]), v[1]) for r, v in registers.items()}
                truths = {aged(symbol): truth for symbol, truth in truths.items()}
                registers[to] = value
        last = block.instructions[-1]
        ways = [(to, None) for to in block.next]
        test = tested(last.name)
        if test and test[0] in registers and len(ways) == 2:
            value, (_, when) = registers[test[0]], test
            taken = lambda to: to in last.targets
            if not isinstance(value, bool) and value[0] in truths:
                value = truths[value[0]] == value[1]
            if isinstance(value, bool):
                ways = [(to, None) for to in block.next if taken(to) == (value == when)]
            else:
                ways = [(to, (value[0], (taken(to) == when) == value[1])) for to in block.next]
        for to, decided in ways:
            following = dict(truths)
            if decided:
                following[decided[0]] = decided[1]
            yield to, self.trimmed(to, registers, following)

    def trimmed(self, to, registers, truths):
        """What matters from the block at `to` on."""
        if to not in self.live:
            return frozenset(), frozenset()
        kept = {r: v for r, v in registers.items() if r in self.live[to]}
        symbols = {v[0] for v in kept.values() if not isinstance(v, bool)}
        truths = {s: t for s, t in truths.items() if s in symbols or s[1] in ("start", "now")}
        return frozenset(kept.items()), frozenset(truths.items())

    def closes(self, known):
        """Whether the next turn can begin as this one did."""
        registers, truths = dict(known[0]), dict(known[1])
        for (register, when), truth in truths.items():
            value = registers.get(register)
            if when != "start" or value is None:
                continue
            if not isinstance(value, bool):
                if value[0] not in truths:
                    continue
                value = truths[value[0]] == value[1]
            if value != truth:
                return False
        return True

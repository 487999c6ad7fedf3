"""Control flow of a disassembled kernel: basic blocks, the innermost loop with matrix instructions, and one steady turn of it.

A loop holds rare paths (another sequence begins, the maximum is raised) beside the usual one. The usual one is taken to be the
shortest way round that does a whole tile's work: multiplies as much as a tile needs and loads as many bytes. That the count of
work is known from the variant makes the search independent of how a compiler lays out or unrolls the loop.
"""

import heapq
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Instruction:
    address: int
    name: str
    operands: str
    targets: tuple[int, ...] = ()  # of a branch
    falls_through: bool = True  # whether the next instruction may follow
    skips_nothing: bool = False  # a branch taken only when no lane is active
    work: int = 0  # multiply-adds of a matrix instruction, of all lanes
    loaded: int = 0  # bytes that it loads from device memory, of all lanes


@dataclass
class Block:
    instructions: list[Instruction]
    next: list[int] = field(default_factory=list)  # addresses of the blocks that may follow

    @property
    def address(self):
        return self.instructions[0].address

    @property
    def work(self):
        return sum(i.work for i in self.instructions)

    @property
    def loaded(self):
        return sum(i.loaded for i in self.instructions)


def blocks_of(instructions):
    """Basic blocks by address."""
    addresses = {i.address for i in instructions}
    leaders = {instructions[0].address}
    for here, after in zip(instructions, instructions[1:] + [None]):
        if here.targets or not here.falls_through:
            leaders |= set(here.targets) & addresses
            if after:
                leaders.add(after.address)
    blocks = {}
    for instruction in instructions:
        if instruction.address in leaders:
            block = blocks[instruction.address] = Block([])
        block.instructions.append(instruction)
    order = list(blocks.values())
    for block, after in zip(order, order[1:] + [None]):
        last = block.instructions[-1]
        if last.falls_through and after:
            block.next.append(after.address)
        # Code that is skipped only if no lane needs it is taken to run.
        if not (last.skips_nothing and block.next):
            block.next += [target for target in last.targets if target in blocks and target not in block.next]
    return blocks


def dominators(blocks, entry):
    """The blocks that every way from the entry to a block goes through, for each reachable block."""
    order, seen = [], set()
    stack = [(entry, iter(blocks[entry].next))]
    seen.add(entry)
    while stack:
        at, following = stack[-1]
        step = next((b for b in following if b not in seen), None)
        if step is None:
            order.append(at)
            stack.pop()
        else:
            seen.add(step)
            stack.append((step, iter(blocks[step].next)))
    order.reverse()
    before = {at: [] for at in order}
    for at in order:
        for to in blocks[at].next:
            before[to].append(at)
    over = {at: None for at in order}
    over[entry] = {entry}
    changed = True
    while changed:
        changed = False
        for at in order:
            known = [over[b] for b in before[at] if over[b] is not None]
            if at == entry or not known:
                continue
            new = set.intersection(*known) | {at}
            if new != over[at]:
                over[at], changed = new, True
    return over, before


def loops_of(blocks):
    """Natural loops, smallest first: pairs of a header's address and the addresses of the loop's blocks."""
    entry = next(iter(blocks))
    over, before = dominators(blocks, entry)
    loops = {}
    for at in over:
        for header in blocks[at].next:
            if header in over[at]:
                body, work = {header, at}, [at]
                while work:
                    here = work.pop()
                    if here == header:
                        continue
                    for b in before[here]:
                        if b not in body:
                            body.add(b)
                            work.append(b)
                loops.setdefault(header, set()).update(body)
    return sorted(loops.items(), key=lambda item: len(item[1]))


def main_loops(blocks):
    """The innermost loops that hold matrix instructions."""
    found = []
    for header, body in loops_of(blocks):
        if any(blocks[b].work for b in body) and not any(inner < body for _, inner in found):
            found.append((header, body))
    return found


class AllWays:
    """Knows nothing of what decides a branch: every way may be gone."""

    start = ()

    def after(self, block, known):
        return [(to, known) for to in block.next]

    def closes(self, known):
        return True


def steady_turn(blocks, header, body, work, loaded, conditions=AllWays()):
    """The instructions of the shortest way from the header round to it that does at least this work and loads this much, and
    that `conditions` allow; None if no single turn does."""
    start = (header, 0, 0, conditions.start)
    best, came = {start: 0}, {}
    queue, pushed = [(0, 0, start)], 0
    while queue:
        cost, _, state = heapq.heappop(queue)
        if cost > best[state]:
            continue
        at, done, got, known = state
        block = blocks[at]
        done, got = min(work, done + block.work), min(loaded, got + block.loaded)
        cost += len(block.instructions)
        for to, learnt in conditions.after(block, known):
            if to == header:
                if done >= work and got >= loaded and conditions.closes(learnt):
                    turn = [at]
                    while state in came:
                        state = came[state]
                        turn.append(state[0])
                    return [i for address in reversed(turn) for i in blocks[address].instructions]
            elif to in body:
                following = (to, done, got, learnt)
                if cost < best.get(following, cost + 1):
                    best[following], came[following] = cost, state
                    pushed += 1
                    heapq.heappush(queue, (cost, pushed, following))
    return None


class NoTurn(Exception):
    """Why a kernel's main loop cannot be counted."""


def tile_bytes(variant):
    """Bytes of a tile of the cache."""
    return variant["tile_tokens"] * (variant["kv_lora_rank"] + variant["rope_dim"]) * variant["kv_bytes"]


def tile_work(variant, waves):
    """Multiply-adds that a wave's share of a tile needs."""
    columns = variant["kv_lora_rank"] * 2 + variant["rope_dim"]
    return variant["block_rows"] * variant["tile_tokens"] * columns // waves


def tile_turn(instructions, variant, waves, conditions):
    """One steady turn of a wave through the main loop of stage 1, and the tiles that it handles."""
    work = tile_work(variant, waves)
    blocks = blocks_of(instructions)
    loops = main_loops(blocks)
    for header, body in loops:
        turn = steady_turn(blocks, header, body, work, tile_bytes(variant) // waves, conditions(blocks, header, body))
        if turn:
            return turn, max(1, round(sum(i.work for i in turn) / work))
    raise NoTurn(f"none of {len(loops)} loops with matrix instructions does a whole tile's work in a turn")


def rounded(number):
    return f"{number:.1f}" if number < 10 and number != int(number) else f"{number:.0f}"

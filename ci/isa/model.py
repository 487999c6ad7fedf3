"""The model of time, for one 64-token stretch of the main loop on one compute unit of CDNA that runs one block:

    t = max(MFMA, VALU, LDS, memory) + 100 clocks a barrier

MFMA    multiply-adds over the matrix rate of the SIMD: its waves' products follow each other without a gap
VALU    4 clocks an instruction of 64 lanes, 16 for exponentials, reciprocals and products of 32-bit integers
LDS     bytes that move, a lane taking at least a bank, over 128 a clock; no bank conflicts
memory  bytes of the tile over the unit's share of the device's bandwidth, divided by the blocks that attend to the same tile
        for a group of rows: neighbours that find it in L2
issue   is shown and is no part of t: 4 clocks for each instruction of one wave, of any kind. Where it exceeds t, the wave cannot
        issue fast enough, however many there are.

Each maximum assumes perfect overlap, so t is a lower bound; treat it as 30 % either way. AITER's loops for gfx942, of which
only some counts are published, are put through it first, beside what was published or simulated of them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """What is assumed of an architecture."""

    matrix: int  # multiply-adds of 16-bit elements of a SIMD per clock, at the shapes of most throughput
    memory: float  # bytes of device memory per clock of a compute unit
    units: int
    gigahertz: float
    simds: int = 4
    lds: int = 128  # bytes per clock
    valu: int = 4  # clocks of a vector instruction of 64 lanes
    barrier: int = 100  # clocks


CHIPS = {
    # MI210: 181 TFLOPS; 1.6 TB/s, of which 80 % are taken to be had.
    "gfx90a": Chip(matrix=128, memory=7.4, units=104, gigahertz=1.7),
    # MI300X: 1307 TFLOPS; 4.3 TB/s.
    "gfx942": Chip(matrix=256, memory=6.7, units=304, gigahertz=2.1),
    # MI355X: 2.5 PFLOPS; 6.0 TB/s, a little over what AITER reaches.
    "gfx950": Chip(matrix=512, memory=9.8, units=256, gigahertz=2.4),
}

PARTS = ("mfma", "valu", "lds", "memory")


def clocks(chip, waves, counts, matrix_clocks, tile_bytes, sharing=1):
    """Clocks of the parts and of the whole for one turn: `counts` and `matrix_clocks` of one wave, bytes of the block."""
    per_simd = waves / chip.simds
    result = {
        "mfma": per_simd * matrix_clocks,
        "valu": per_simd * chip.valu * (counts["valu"] + 3 * counts["slow"]),
        "lds": waves * counts["lds_bytes"] / chip.lds,
        "memory": tile_bytes / chip.memory / sharing,
        "barriers": chip.barrier * counts["barriers"],
    }
    result["total"] = max(result[part] for part in PARTS) + result["barriers"]
    result["issue"] = 4 * counts["instructions"]
    return result


# AITER's bf16 loops for gfx942, as far as their counts are known; of one of four waves.
AITER = {
    "16 rows": {"tokens": 128, "rows": 16, "mfma": 136, "valu": 132 + 128, "lds_bytes": 32 * 1024, "barriers": 10},
    "128 rows": {"tokens": 32, "rows": 128, "mfma": 272, "valu": 256 + 160, "lds_bytes": (68 + 9) * 1024, "barriers": 6},
}
PUBLISHED = {
    "16 rows": "157 TFLOPS measured (128 heads read the cache eight times, partly from L2); llvm-mca 2,100 without memory",
    "128 rows": "llvm-mca 13,400 without memory",
}


def calibration():
    """What the model says of AITER's loops, as lines."""
    chip = CHIPS["gfx942"]
    for name, loop in AITER.items():
        counts = loop | {"slow": 0, "instructions": 0}
        of = clocks(chip, 4, counts, loop["mfma"] * 4096 / chip.matrix, loop["tokens"] * 1152)
        scale = 64 / loop["tokens"]
        parts = ", ".join(f"{part} {of[part] * scale:.0f}" for part in (*PARTS, "barriers", "total"))
        flops = 2 * loop["rows"] * loop["tokens"] * 1088
        rate = flops * chip.units * chip.gigahertz / of["total"] / 1e3
        yield f"AITER gfx942, {name}: {parts}; {rate:.0f} TFLOPS. {PUBLISHED[name]}"


def over_budget(budget, counts, of):
    """What breaks a budget: `counts` of one wave and clocks `of` the model, for 64 tokens."""
    measured = {f"{part}_of_memory": of[part] / of["memory"] for part in PARTS}
    measured |= {f"{part}_of_total": of[part] / of["total"] for part in ("mfma", "memory")}
    measured |= {name: counts[name] for name in ("mfma", "accvgpr", "rescales", "barriers")}
    for name in measured.keys() & budget.keys():
        least, value = name.endswith("_of_total"), round(measured[name], 2)
        if value < budget[name] if least else value > budget[name]:
            yield f"for {budget['rows']} rows {name} is {value:.2f}: {'at least' if least else 'at most'} {budget[name]}"

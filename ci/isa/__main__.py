#!/usr/bin/env python3
"""Static evidence for speed: disassembles stage 1's variants and holds one steady turn of the main loop to ci/isa/budgets.toml.

usage: python3 ci/isa [--all] [--listing] [ARCH...]

Needs no GPU. Without --all only the variants that are shipped compiled.
"""

import concurrent.futures
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import amd
import flow
import kernels
from conditions import Conditions

TOKENS = 64  # what counts are given for


class Finding(Exception):
    """What makes a variant's loop not countable."""


def rounded(number):
    return f"{number:.0f}" if number >= 10 or number == int(number) else f"{number:.1f}"


def main_loop(instructions, variant):
    """One steady turn of the main loop, and the tokens that it handles."""
    constants = variant["defines"]
    waves = constants["THREADS"] // amd.lanes(variant["arch"])
    width, latent = constants["KV_LORA_RANK"] + constants["ROPE_DIM"], constants["KV_LORA_RANK"]
    work = constants["BLOCK_ROWS"] * constants["TILE_TOKENS"] * (width + latent) // waves
    element = 1 if "FP8" in constants["KV_DTYPE"] else 2
    loaded = constants["TILE_TOKENS"] * width * element // waves
    blocks = flow.blocks_of(instructions)
    loops = flow.main_loops(blocks)
    for header, body in loops:
        turn = flow.steady_turn(blocks, header, body, work, loaded, Conditions(blocks, header, body))
        if turn:
            tiles = max(1, round(sum(i.work for i in turn) / work))
            return turn, tiles * constants["TILE_TOKENS"], constants["TILE_TOKENS"] * width * element * tiles
    raise Finding(f"none of {len(loops)} loops with matrix instructions does a whole tile's work in a turn")


def over_budget(variant, row, budgets):
    constants = variant["defines"]
    for budget in budgets:
        if variant["arch"] not in budget["arches"] or constants["BLOCK_ROWS"] not in budget["rows"]:
            continue
        if budget["kv"].upper() != constants["KV_DTYPE"]:
            continue
        clocks = row["clocks"]
        measured = {
            "mfma": row["matrix_work"] / 4096 * row["waves"] / 4 / (constants["BLOCK_ROWS"] / 16),
            "mfma_of_memory": clocks["mfma"] / clocks["memory"],
            "valu_of_memory": clocks["valu"] / clocks["memory"],
            "lds_of_memory": clocks["lds"] / clocks["memory"],
            "mfma_of_total": clocks["mfma"] / clocks["total"],
            **{name: row[name] for name in ("accvgpr", "rescales", "barriers")},
        }
        for name, limit in budget.items():
            if name not in measured:
                continue
            least = name == "mfma_of_total"
            if measured[name] < limit if least else measured[name] > limit:
                yield f"{name} {measured[name]:.2f}, {'at least' if least else 'at most'} {limit}"


def examine(compiler, variant, budgets):
    result, log = compiler.compile(variant)
    if result is None:
        raise Finding(log)
    arch = variant["arch"]
    waves = variant["defines"]["THREADS"] // amd.lanes(arch)
    row = amd.resources(result["notes"])
    lds = variant["shared_bytes"] + row["static_lds"]
    row["occupancy"], row["blocks"] = amd.occupancy(row["vgpr"], lds, waves, arch)
    row |= {"lds_total": lds, "waves": waves}
    turn, tokens, loaded = main_loop(amd.parse(result["listing"], variant["symbol"], arch), variant)
    scale = TOKENS / tokens
    row |= {kind: count * scale for kind, count in amd.counts(turn, arch).items()}
    row |= {"turn": turn, "tokens": tokens}
    for kind in ("accvgpr", "rescales", "scratch", "valu", "salu", "waits", "barriers", "lds", "global"):
        row.setdefault(kind, 0)
    problems = [f"{row['scratch']} bytes of scratch"] if row["scratch"] else []
    if arch in amd.CHIPS:
        clocks = amd.model(turn, arch, waves, loaded)
        row["clocks"] = {part: clock * scale for part, clock in clocks.items()}
        problems += over_budget(variant, row, budgets)
    return row, problems


HEADING = (
    f"{'':8} {'':54} {'registers':>15} {'LDS':>6} {'waves':>6} | {'instructions of a wave per 64 tokens':^64} |"
    f" {'clocks of a compute unit per 64 tokens':^46}\n"
    f"{'arch':8} {'variant':54} {'v':>4} {'a':>3} {'s':>3} {'spil':>4} {'':6} {'a SIMD':>6} | {'matrix':>6} {'valu':>5} {'acc':>4} {'resc':>4} "
    f"{'lds':>5} {'global':>6} {'salu':>5} {'waits':>5} {'barr':>4} {'all':>5} | {'mfma':>6} {'valu':>6} {'lds':>6} {'memory':>6} {'barr':>5} {'total':>6} {'issue':>6}"
)


def line(variant, row):
    name = variant["name"].removeprefix("mla_decode_split_")
    text = (
        f"{variant['arch']:8} {name:54} {row['vgpr']:4} {row['agpr']:3} {row['sgpr']:3} {row['sgpr_spills']:4} {row['lds_total']:6} {row['occupancy']:6.1f} | "
        f"{rounded(row['matrix']):>6} {rounded(row['valu']):>5} {rounded(row['accvgpr']):>4} {rounded(row['rescales']):>4} {rounded(row['lds']):>5} "
        f"{rounded(row['global']):>6} {rounded(row['salu']):>5} {rounded(row['waits']):>5} {rounded(row['barriers']):>4} {rounded(row['instructions']):>5} |"
    )
    if clocks := row.get("clocks"):
        for part, width in (("mfma", 6), ("valu", 6), ("lds", 6), ("memory", 6), ("barriers", 5), ("total", 6), ("issue", 6)):
            text += f" {rounded(clocks[part]):>{width}}"
    return text


def main():
    arguments = sys.argv[1:]
    arches = [argument for argument in arguments if not argument.startswith("-")]
    arches = arches or ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"]
    command = ["cargo", "run", "--quiet", "--example", "variants", "--", *arches]
    variants = json.loads(subprocess.run(command, check=True, capture_output=True, cwd=kernels.ROOT).stdout)
    variants = [v for v in variants if v["symbol"] == "mla_decode_split" and ("--all" in arguments or v["common"])]
    budgets = tomllib.loads((HERE / "budgets.toml").read_text())["budget"]
    compiler = kernels.Amd()

    failures = 0
    print(HEADING)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [(variant, pool.submit(examine, compiler, variant, budgets)) for variant in variants]
        for variant, job in jobs:
            try:
                row, problems = job.result()
            except Finding as finding:
                print(f"{variant['arch']:8} {variant['name']}\n    FAILED: {finding}")
                failures += 1
                continue
            print(line(variant, row), flush=True)
            for problem in problems:
                print(f"    FAILED: {problem}")
            failures += bool(problems)
            if "--listing" in arguments:
                for instruction in row["turn"]:
                    print(f"        {instruction.address:6x} {instruction.name} {instruction.operands}")
    print(f"{len(variants)} variants, {failures} failed")
    return failures != 0


if __name__ == "__main__":
    sys.exit(main())

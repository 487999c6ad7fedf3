#!/usr/bin/env python3
"""Static evidence for speed: disassembles stage 1's variants and counts what one steady turn of the main loop executes.

usage: python3 ci/isa [--all | --all=ARCH,...] [--listing] [ARCH...]

Needs no GPU. Counts the variants that are shipped compiled; with --all every one, be it of some architectures. --listing prints the
turns. Fails where AMD's break a budget of ci/isa/budgets.toml or use scratch, and where NVIDIA's touch local memory in a main loop
or serialise their matrix instructions.
"""

import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import amd
import compilers
import flow
import model
import nvidia

BUDGETS = tomllib.loads((HERE / "budgets.toml").read_text())["budget"]


def look(variant, code):
    try:
        if compilers.is_amd(variant["arch"]):
            return amd.look(variant, code, BUDGETS)
        return nvidia.look(variant, code)
    except flow.NoTurn as reason:
        return "", [str(reason)], []


def main():
    options = {argument for argument in sys.argv[1:] if argument.startswith("-")}
    arches = [argument for argument in sys.argv[1:] if argument not in options]
    variants = [v for v in compilers.variants(arches) if v["symbol"] == "mla_decode_split"]
    every = {arch for option in options if option.startswith("--all=") for arch in option[len("--all=") :].split(",")}
    variants = [v for v in variants if v["common"] or "--all" in options or v["arch"] in every]

    failures, vendor = 0, None
    for variant, result, error in compilers.examine(variants, look):
        if vendor != compilers.is_amd(variant["arch"]):
            vendor = compilers.is_amd(variant["arch"])
            if vendor:
                print("", model.__doc__, *model.calibration(), "", sep="\n")
            print((amd if vendor else nvidia).HEADING, flush=True)
        cells, problems, turn = result or ("", [error], [])
        rows = ",".join(str(rows) for rows in variant["rows"])
        print(f"{variant['arch']:8} {variant['name'].removeprefix('mla_decode_split_'):51} {rows:>9} {cells}", flush=True)
        for problem in problems:
            print(f"    FAILED: {problem}")
        failures += bool(problems)
        if "--listing" in options:
            for instruction in turn:
                print(f"        {instruction.address:6x} {instruction.name} {instruction.operands}")
    print(f"{len(variants)} variants, {failures} failed")
    return failures != 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Compiles every kernel variant of the selection table without a GPU and prints what each takes.

usage: ci/kernels.py [--all] [ARCH...]

Without --all only the variants that are shipped compiled. Fails on spills or scratch, on shared memory that differs from what
select.rs counts or is over the device's, on stage-1 kernels without matrix instructions, and on an instruction that ptxas encodes
wrongly. What the main loops execute is for `ci/isa` to judge. What a machine has no compiler for is reported as not run.
"""

import re
import sys

import compilers

# A copy by lanes to the sum of two registers, one of them the warp's, with a policy: ptxas gives it a pair of registers that begins at
# an odd one, which the device calls an illegal instruction.
MISPLACED = re.compile(r"LDGSTS\S* \[R\d+\+UR\d+[^\]]*\], desc\[UR\d*[13579]\]")


def look(variant, code):
    """What a variant takes, and what is wrong with it."""
    shared = variant["shared_bytes"] + code.static
    matrix = len(re.findall(r"\bH?G?MMA\.|\bv_mfma|\bv_wmma", code.listing))
    problems = []
    if code.spills:
        problems.append(f"{code.spills} bytes of spills or scratch")
    if variant["symbol"] == "mla_decode_split" and not matrix:
        problems.append("no matrix instructions")
    if MISPLACED.search(code.listing):
        problems.append("a copy by lanes whose policy is in half a register")
    if shared > variant["shared_limit"]:
        problems.append(f"{shared} bytes of shared memory")
    return f"registers {code.registers:3} spills {code.spills:3} shared {shared:6} matrix {matrix:3}", problems


def main():
    arguments = sys.argv[1:]
    everything = "--all" in arguments
    arches = [argument for argument in arguments if argument != "--all"]
    variants = [variant for variant in compilers.variants(arches) if everything or variant["common"]]
    failures = 0
    for variant, result, error in compilers.examine(variants, look):
        label = f"{variant['arch']:8} {variant['name']:64}"
        if error:
            failures += 1
            print(f"{label} FAILED\n{error}", flush=True)
            continue
        takes, problems = result
        failures += bool(problems)
        print(f"{label} {takes} {'FAILED: ' + ', '.join(problems) if problems else ''}".rstrip(), flush=True)
    print(f"{len(variants)} variants, {failures} failed")
    return failures != 0


if __name__ == "__main__":
    sys.exit(main())

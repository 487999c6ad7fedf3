#!/usr/bin/env python3
"""Fills the encodings of instructions.txt in with LLVM's assembler: run it after adding lines."""
import pathlib
import re
import subprocess
import sys

path = pathlib.Path(__file__).with_name("instructions.txt")
lines = path.read_text().splitlines()
tests = [n for n, line in enumerate(lines) if line and not line.startswith("#")]
source = "\n".join(re.split(r" \| *(?:[0-9a-f ]*)\|", lines[n])[0] for n in tests)
command = ["llvm-mc-22", "--arch=amdgcn", "--mcpu=gfx942", "--show-encoding"]
run = subprocess.run(command, input=source, capture_output=True, text=True)
if run.returncode:
    sys.exit(run.stderr)
encodings = re.findall(r"encoding: \[(.*?)\]", run.stdout)
assert len(encodings) == len(tests), (len(encodings), len(tests))
for n, encoding in zip(tests, encodings):
    data = bytes.fromhex(encoding.replace("0x", "").replace(",", ""))
    words = " ".join(data[at:at + 4][::-1].hex() for at in range(0, len(data), 4))
    assembly, rest = re.match(r"(.*?) \| *[0-9a-f ]*\|(.*)", lines[n]).groups()
    lines[n] = f"{assembly} | {words} |{rest}"
path.write_text("\n".join(lines) + "\n")

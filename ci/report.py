#!/usr/bin/env python3
"""Turns the results of CI's jobs (JSON on standard input, as GitHub gives `needs`) into a table, one row of ci/matrix.json each.

Fails if a required row did not pass. What was skipped is not run, whatever colour the page gives it.
"""
import json
import pathlib
import sys

matrix = json.loads((pathlib.Path(__file__).parent / "matrix.json").read_text())
results = json.load(sys.stdin)

bad = []
print("| job | required | result | what |\n| --- | --- | --- | --- |")
for row in matrix["jobs"]:
    result = results.get(row["job"].replace(":", "-"), {}).get("result", "skipped")
    device = matrix["runners"][row["runner"]].get("device", False)
    said = {
        "success": "passed",
        "failure": "failed",
        "skipped": f"not run: no runner labelled {row['runner']}" if device else "not run",
    }.get(result, result)
    if row["required"] and result != "success":
        bad.append(row["job"])
    print(f"| `{row['job']}` | {'yes' if row['required'] else 'no'} | {said} | {row['what']} |")
if bad:
    print(f"\nRequired, and not passed: {', '.join(bad)}")
sys.exit(bool(bad))

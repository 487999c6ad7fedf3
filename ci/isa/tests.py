"""Tests of the counting itself, on small listings: `python3 ci/isa/tests.py`."""

import sys
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import amd
import flow
import model
import nvidia
from conditions import Conditions

MFMA = "v_mfma_f32_16x16x16_bf16 v[0:3], v[8:9], v[10:11], v[0:3]"
LOAD = "global_load_dwordx4 v[4:7], v[20:21], off"


def listing(lines):
    """As llvm-objdump writes it: instructions of four bytes, labels as `name:`, branches to them by name."""
    places, instructions = {}, []
    for line in lines:
        if line.endswith(":"):
            places[line[:-1]] = len(instructions) * 4
        else:
            instructions.append(line)
    text = ["0000000000001000 <kernel>:"]
    for place, line in enumerate(instructions):
        name, _, operands = line.partition(" ")
        target = f" <kernel+0x{places[operands]:x}>" if operands in places else ""
        text.append(f"\t{line}    // {0x1000 + place * 4:012X}: BF800000{target}")
    return "\n".join(text)


def turn(lines, work=4096, loaded=1024):
    blocks = flow.blocks_of(amd.parse(listing(lines), "kernel", "gfx942"))
    ((header, body),) = flow.main_loops(blocks)
    found = flow.steady_turn(blocks, header, body, work, loaded, Conditions(blocks, header, body))
    return found and [instruction.name for instruction in found]


class Turns(unittest.TestCase):
    def test_a_rare_path_is_left_out_and_guarded_code_is_not(self):
        loop = ["s_nop 0", "top:", "s_cmp_eq_u32 s4, s5", "s_cbranch_scc1 rare", "back:", LOAD]
        loop += ["s_and_saveexec_b64 s[8:9], vcc", "s_cbranch_execz join", "ds_write_b128 v12, v[4:7]", "join:", MFMA]
        loop += ["s_barrier", "s_cmp_lt_i32 s6, s7", "s_cbranch_scc1 top", "s_endpgm"]
        loop += ["rare:", "v_mul_f32 v0, v0, v1", "s_branch back"]
        names = turn(loop)
        self.assertNotIn("v_mul_f32", names)
        self.assertIn("ds_write_b128", names)
        self.assertEqual(names.count("s_barrier"), 1)

    def test_code_aside_for_some_lanes_is_counted(self):
        loop = ["s_nop 0", "top:", LOAD, MFMA, "s_and_saveexec_b64 s[8:9], vcc", "s_cbranch_execnz aside", "back:", "s_or_b64 exec, exec, s[8:9]"]
        loop += ["s_cmp_lt_i32 s6, s7", "s_cbranch_scc1 top", "s_endpgm", "aside:", "v_mul_lo_u32 v12, v13, v14", "s_branch back"]
        self.assertIn("v_mul_lo_u32", turn(loop))

    def test_a_condition_that_was_kept_decides_later_branches(self):
        # Whoever skips the first part goes through the second: no way misses both, though each can be missed.
        loop = ["s_nop 0", "top:", LOAD, MFMA, "s_cmp_gt_i32 s4, 0", "s_cselect_b64 s[10:11], -1, 0", "s_cmp_lt_i32 s4, 1"]
        loop += ["s_cbranch_scc1 second", "v_add_f32 v30, v30, v31", "v_add_f32 v30, v30, v31", "second:"]
        loop += ["s_and_b64 vcc, exec, s[10:11]", "s_cbranch_vccnz end", "v_sub_f32 v30, v30, v31", "end:"]
        loop += ["s_cmp_lg_u32 s6, s7", "s_cbranch_scc1 top", "s_endpgm"]
        names = turn(loop)
        self.assertEqual((names.count("v_add_f32"), names.count("v_sub_f32")), (0, 1))

    def test_a_turn_does_the_whole_work_or_there_is_none(self):
        loop = ["s_nop 0", "top:", LOAD, "s_cbranch_vccz half", MFMA, "half:", MFMA, "s_cbranch_scc1 top", "s_endpgm"]
        self.assertEqual(sum("mfma" in name for name in turn(loop)), 1)
        self.assertEqual(sum("mfma" in name for name in turn(loop, work=8192)), 2)
        self.assertIsNone(turn(loop, work=3 * 4096))
        self.assertIsNone(turn(loop, loaded=4096))

    def test_only_the_innermost_loop_with_products_is_counted(self):
        loop = ["s_nop 0", "outer:", "v_mov_b32 v9, 0", "top:", LOAD, MFMA, "s_cbranch_scc1 top", "s_cbranch_vccz outer", "s_endpgm"]
        self.assertEqual(turn(loop), ["global_load_dwordx4", MFMA.split()[0], "s_cbranch_scc1"])


class Counts(unittest.TestCase):
    def count(self, *lines):
        return amd.counts(amd.parse(listing(lines), "kernel", "gfx942"), "gfx942")

    def test_multiplications_of_carried_accumulators_are_rescales(self):
        fresh = "v_mfma_f32_16x16x16_bf16 v[40:43], v[8:9], v[10:11], 0"
        of = self.count(MFMA, fresh, "v_pk_mul_f32 v[0:1], v[0:1], v[50:51]", "v_mul_f32 v40, v40, v50", "v_accvgpr_read_b32 v60, a3")
        self.assertEqual((of["matrix"], of["rescales"], of["accvgpr"], of["valu"]), (2, 1, 1, 3))

    def test_bytes_of_shared_memory(self):
        self.assertEqual(self.count("ds_read_u16 v1, v2", "ds_read2_b64 v[4:7], v2", "ds_write_b128 v2, v[4:7]")["lds_bytes"], (4 + 16 + 16) * 64)

    def test_a_broken_budget_is_told(self):
        of = dict.fromkeys((*model.PARTS, "total"), 100.0)
        counts = {"mfma": 1.0, "accvgpr": 0, "rescales": 0, "barriers": 8}
        budget = {"rows": 16, "mfma": 1.0, "barriers": 5, "mfma_of_total": 0.75}
        self.assertEqual(len(list(model.over_budget(budget, counts, of))), 1)
        budget |= {"barriers": 8}
        self.assertEqual(list(model.over_budget(budget, counts, of)), [])
        self.assertEqual(len(list(model.over_budget(budget, counts | {"mfma": 1.06}, of))), 1)
        self.assertEqual(len(list(model.over_budget(budget, counts, of | {"mfma": 70.0}))), 1)
        self.assertEqual(len(list(model.over_budget({"rows": 128, "memory_of_total": 0.9}, counts, of | {"memory": 80.0}))), 1)

    def test_budgets_are_found_by_what_a_variant_serves(self):
        budget = {"arches": ["gfx942"], "rows": 16, "ranks": [512], "kv_dtypes": ["bf16"]}
        variant = {"arch": "gfx942", "rows": [16], "kv_lora_rank": 512, "kv_dtype": "bf16"}
        self.assertEqual(list(amd.budgets_of(variant, [budget])), [budget])
        for change in ({"arch": "gfx90a"}, {"rows": []}, {"kv_lora_rank": 256}, {"kv_dtype": "f16"}):
            self.assertEqual(list(amd.budgets_of(variant | change, [budget])), [])
        of_rope = budget | {"ropes": [64]}
        self.assertEqual([list(amd.budgets_of(variant | {"rope_dim": rope}, [of_rope])) for rope in (64, 32)], [[of_rope], []])


class Nvidia(unittest.TestCase):
    def test_jumps_labels_and_work(self):
        text = "\t.section\t.text.kernel,\"ax\",@progbits\n        /*0000*/    MOV R1, R2 ;\n.L_x_1:\n"
        text += "        /*0010*/    HMMA.16816.F32.BF16 R4, R8, R12, R4 ;\n        /*0020*/    @P0 BRA `(.L_x_1) ;\n        /*0030*/    EXIT ;\n"
        blocks = flow.blocks_of(nvidia.parse(text, "kernel"))
        ((header, body),) = flow.main_loops(blocks)
        self.assertEqual((header, body, blocks[header].work), (0x10, {0x10}, 2048))


if __name__ == "__main__":
    unittest.main()

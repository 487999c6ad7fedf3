//! Lists the instructions that are implemented. Those that a run executed are marked: its statistics come on standard input.

use std::collections::BTreeSet;
use std::io::Read;

use hsakmt::cdna3::decode::implemented;

fn main() -> std::io::Result<()> {
    let mut statistics = String::new();
    std::io::stdin().read_to_string(&mut statistics)?;
    let executed = statistics.lines().filter_map(|line| line.strip_prefix("mnemonic ")?.split(' ').next());
    let executed: BTreeSet<&str> = executed.collect();
    let mut encoding = None;
    let (mut all, mut marked) = (0, 0);
    for (of, row) in implemented() {
        if encoding != Some(of) {
            println!("{of:?}");
            encoding = Some(of);
        }
        let mark = executed.contains(row.name);
        println!("  {} {}", if mark { '*' } else { ' ' }, row.name);
        all += 1;
        marked += usize::from(mark);
    }
    println!("{all} instructions, {marked} executed (*)");
    Ok(())
}

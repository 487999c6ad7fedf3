//! Numbers and names as people read them.

/// A whole number with its thousands set apart: `12,345`.
pub(crate) fn count(number: usize) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A quantity with three significant digits, whole numbers above a hundred.
pub(crate) fn quantity(number: f64) -> String {
    match number.abs() {
        x if x >= 99.95 => count(number.round() as usize),
        x if x >= 9.995 => format!("{number:.1}"),
        _ => format!("{number:.2}"),
    }
}

/// A duration in the unit that suits it.
pub(crate) fn seconds(seconds: f64) -> String {
    match seconds {
        s if s >= 1.0 => format!("{} s", quantity(s)),
        s if s >= 1e-3 => format!("{} ms", quantity(s * 1e3)),
        s => format!("{} us", quantity(s * 1e6)),
    }
}

/// Bytes in the binary unit that suits them.
pub(crate) fn bytes(bytes: usize) -> String {
    let mut value = bytes as f64;
    let mut units = ["B", "KiB", "MiB", "GiB", "TiB"].iter();
    let mut unit = units.next().unwrap_or(&"B");
    while value >= 1024.0 {
        let Some(next) = units.next() else { break };
        value /= 1024.0;
        unit = next;
    }
    if *unit == "B" { format!("{bytes} B") } else { format!("{} {unit}", quantity(value)) }
}

/// A share as a percentage.
pub(crate) fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// `1 step`, `2 steps`.
pub(crate) fn plural(number: usize, noun: &str) -> String {
    format!("{} {noun}{}", count(number), if number == 1 { "" } else { "s" })
}

/// Columns set under one another, two spaces apart. The first `left` columns and the last are set to the left, the rest to the
/// right.
pub(crate) fn table(rows: &[Vec<String>], left: usize) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns)
        .map(|c| rows.iter().filter_map(|row| row.get(c)).map(|s| s.chars().count()).max().unwrap_or(0))
        .collect();
    let mut out = String::new();
    for row in rows {
        let mut line = String::new();
        for (c, cell) in row.iter().enumerate() {
            let pad = " ".repeat(widths[c] - cell.chars().count());
            let gap = if c == 0 { "" } else { "  " };
            if c < left || c + 1 == columns {
                line += &format!("{gap}{cell}{pad}");
            } else {
                line += &format!("{gap}{pad}{cell}");
            }
        }
        out += line.trim_end();
        out.push('\n');
    }
    out
}

/// A progress bar over things called `noun`.
pub(crate) fn progress_style(noun: &str) -> indicatif::ProgressStyle {
    let template = format!("{{bar:32.blue/dim}} {{human_pos}} of {{human_len}} {noun}, {{eta}} left  {{msg}}");
    indicatif::ProgressStyle::with_template(&template)
        .unwrap_or_else(|_| indicatif::ProgressStyle::default_bar())
        .progress_chars("━━╌")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
        assert_eq!(count(0), "0");
        assert_eq!(count(999), "999");
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(quantity(1234.6), "1,235");
        assert_eq!(quantity(12.34), "12.3");
        assert_eq!(quantity(1.234), "1.23");
        assert_eq!(seconds(0.0123), "12.3 ms");
        assert_eq!(seconds(0.000_012_3), "12.3 us");
        assert_eq!(bytes(512), "512 B");
        assert_eq!(bytes(3 << 20), "3.00 MiB");
        assert_eq!(plural(1, "step"), "1 step");
        assert_eq!(plural(1000, "step"), "1,000 steps");
    }

    #[test]
    fn columns() {
        let rows = [vec!["mode".into(), "size".into(), "why".into()], vec!["FULL".into(), "8".into(), "fits".into()]];
        assert_eq!(table(&rows, 1), "mode  size  why\nFULL     8  fits\n");
    }
}

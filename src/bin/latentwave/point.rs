//! Points of a benchmark or a soak, written as in a table: `B64 S4096 H16 q1`, `var B64 ~4096 H16`, `skew B16 1x131072 H16`.

use std::fmt;
use std::str::FromStr;

use crate::rng::Rng;

/// Length of the other sequences of a skewed batch.
const SKEW_REST: usize = 4096;

/// How long the sequences of a batch are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lengths {
    /// All alike.
    Same(usize),
    /// Spread evenly from nearly nothing to twice this, with this as the mean.
    Around(usize),
    /// One of this length, the others of 4,096.
    OneOf(usize),
}

/// One point: a batch of decode attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Point {
    pub(crate) batch: usize,
    pub(crate) lengths: Lengths,
    pub(crate) num_heads: usize,
    pub(crate) query_len: usize,
}

impl Point {
    /// Longest sequence, in tokens, or a bound of it.
    pub(crate) fn longest(&self) -> usize {
        match self.lengths {
            Lengths::Same(len) => len,
            Lengths::Around(mean) => 2 * mean,
            Lengths::OneOf(len) => len.max(SKEW_REST),
        }
    }

    /// Lengths of all sequences, in tokens.
    pub(crate) fn seq_lens(&self, seed: u64) -> Vec<i32> {
        let mut rng = Rng::new(seed);
        let mut lens: Vec<i32> = match self.lengths {
            Lengths::Same(len) => vec![len as i32; self.batch],
            // Evenly spread, so that every seed reads as much.
            Lengths::Around(mean) => {
                let step = 2.0 * mean as f64 / self.batch as f64;
                (0..self.batch).map(|i| ((i as f64 + 0.5) * step).round().max(1.0) as i32).collect()
            }
            Lengths::OneOf(len) => {
                let mut lens = vec![SKEW_REST as i32; self.batch];
                lens[0] = len as i32;
                lens
            }
        };
        rng.shuffle(&mut lens);
        lens
    }
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.lengths {
            Lengths::Same(len) => write!(f, "B{} S{len}", self.batch)?,
            Lengths::Around(mean) => write!(f, "var B{} ~{mean}", self.batch)?,
            Lengths::OneOf(len) => write!(f, "skew B{} 1x{len}", self.batch)?,
        }
        write!(f, " H{} q{}", self.num_heads, self.query_len)
    }
}

impl FromStr for Point {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut batch = None;
        let mut lengths = None;
        let mut num_heads = None;
        let mut query_len = 1;
        for word in text.split_whitespace() {
            let number = |prefix: &str| -> Option<Result<usize, String>> {
                let digits = word.strip_prefix(prefix)?;
                Some(match digits.parse() {
                    Ok(number) if (1..=1 << 24).contains(&number) => Ok(number),
                    _ => Err(format!("`{word}` in `{text}`: a number from 1 was expected behind `{prefix}`")),
                })
            };
            if matches!(word, "var" | "skew") {
                continue;
            } else if let Some(number) = number("B") {
                batch = Some(number?);
            } else if let Some(number) = number("S") {
                lengths = Some(Lengths::Same(number?));
            } else if let Some(number) = number("~") {
                lengths = Some(Lengths::Around(number?));
            } else if let Some(number) = number("1x") {
                lengths = Some(Lengths::OneOf(number?));
            } else if let Some(number) = number("H") {
                num_heads = Some(number?);
            } else if let Some(number) = number("q") {
                query_len = number?;
            } else {
                return Err(format!("`{word}` in `{text}`: a point is written like `B64 S4096 H16 q1`"));
            }
        }
        match (batch, lengths, num_heads) {
            (Some(batch), Some(lengths), Some(num_heads)) => Ok(Self { batch, lengths, num_heads, query_len }),
            _ => Err(format!("`{text}`: batch, length and heads are needed, as in `B64 S4096 H16 q1`")),
        }
    }
}

/// Points by the name of a list, or written out and set apart by commas.
pub(crate) fn list(text: &str) -> Result<Vec<Point>, String> {
    let points = match text {
        "small" => {
            "B1 S1024 H16 q1, B1 S4096 H16 q1, B4 S4096 H16 q1, B16 S1024 H16 q1, B4 S4096 H16 q4, var B16 ~1024 H16 q1"
        }
        "gpu" => {
            "B1 S1024 H16 q1, B1 S1024 H128 q1, B1 S4096 H16 q1, B1 S4096 H128 q1, B1 S65536 H16 q1, B1 S131072 H128 q1, \
             B4 S4096 H128 q1, B4 S16384 H16 q1, B4 S131072 H32 q1, B16 S4096 H16 q1, B16 S4096 H128 q1, B16 S16384 H64 q1, \
             B16 S65536 H128 q1, B16 S131072 H16 q1, B64 S4096 H16 q1, B64 S4096 H32 q1, B64 S4096 H128 q1, B64 S16384 H16 q1, \
             B64 S16384 H128 q1, B128 S4096 H16 q1, B128 S4096 H128 q1, B128 S8192 H128 q1, B128 S65536 H16 q1, \
             B16 S4096 H64 q2, B64 S4096 H16 q2, B128 S4096 H128 q2, B128 S8192 H128 q2, \
             var B64 ~4096 H16 q1, var B64 ~4096 H128 q1, skew B16 1x131072 H16 q1, skew B16 1x131072 H128 q1"
        }
        other => other,
    };
    points.split(',').map(str::trim).filter(|point| !point.is_empty()).map(str::parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_read_back() {
        for text in ["B64 S4096 H16 q1", "var B64 ~4096 H128 q2", "skew B16 1x131072 H16 q1"] {
            assert_eq!(text.parse::<Point>().unwrap().to_string(), text);
        }
        assert_eq!("B2 S8 H4".parse::<Point>().unwrap().query_len, 1);
        for bad in ["", "B4", "B0 S8 H4", "B4 S8", "B4 S8 H4 x9", "B4 Sfoo H4"] {
            assert!(bad.parse::<Point>().is_err(), "{bad}");
        }
        assert_eq!(list("gpu").unwrap().len(), 31);
        assert!(list("small").unwrap().len() > 4);
        assert_eq!(list("B1 S2 H3, B4 S5 H6 q7").unwrap().len(), 2);
        assert!(list("nonsense").is_err());
    }

    #[test]
    fn lengths() {
        let lens = |text: &str| text.parse::<Point>().unwrap().seq_lens(3);
        assert_eq!(lens("B3 S7 H1"), [7, 7, 7]);
        let spread = lens("var B64 ~4096 H1");
        assert_eq!(spread.iter().sum::<i32>(), 64 * 4096);
        assert_ne!(spread.iter().max(), spread.iter().min());
        let skewed = lens("skew B16 1x131072 H1");
        assert_eq!(skewed.iter().filter(|&&len| len == 4096).count(), 15);
        assert_eq!(skewed.iter().sum::<i32>(), 131_072 + 15 * 4096);
    }
}

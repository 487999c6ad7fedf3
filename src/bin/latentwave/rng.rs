//! Seeded random numbers: the same seed gives the same run on every machine.

use latentwave::testing::SplitMix64;

/// The numbers of a seed, one after another.
#[derive(Debug, Clone)]
pub(crate) struct Rng {
    numbers: SplitMix64,
    drawn: u64,
}

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self { numbers: SplitMix64::new(seed), drawn: 0 }
    }

    pub(crate) fn next_u64(&mut self) -> u64 {
        self.drawn += 1;
        self.numbers.number(self.drawn - 1)
    }

    /// A number from 0 up to, not including, `end` (at least 1). The bias of the remainder is below `end / 2^64`.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next_u64() % end.max(1) as u64) as usize
    }

    /// A number from 0 up to, not including, 1.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// A number of mean 0 and variance 1, nearly normal: the sum of four uniform numbers.
    pub(crate) fn normal(&mut self) -> f32 {
        let bits = self.next_u64();
        let sum: u64 = (0..4).map(|i| (bits >> (16 * i)) & 0xffff).sum();
        // Each has variance (2^32 - 1) / 12 and mean 65535 / 2.
        ((sum as f64 - 2.0 * 65535.0) / (65536.0 / 3_f64.sqrt())) as f32
    }

    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for end in (1..items.len()).rev() {
            items.swap(end, self.below(end + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments() {
        let mut rng = Rng::new(1);
        let draws: Vec<f64> = (0..100_000).map(|_| f64::from(rng.normal())).collect();
        let mean = draws.iter().sum::<f64>() / draws.len() as f64;
        let variance = draws.iter().map(|x| x * x).sum::<f64>() / draws.len() as f64;
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.02, "{mean} {variance}");
        assert!((0..1000).map(|_| rng.unit()).all(|x| (0.0..1.0).contains(&x)));
    }

    #[test]
    fn a_shuffle_keeps_every_item() {
        let mut items: Vec<usize> = (0..100).collect();
        Rng::new(3).shuffle(&mut items);
        assert_ne!(items, (0..100).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..100).collect::<Vec<_>>());
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Seeded random numbers (SplitMix64): a run is a function of its seed.

use atp_proto::index::mix;

#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(mix(seed ^ 0x6174_702d_7369_6d00))
    }

    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Below `n`, 0 for 0.
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.draw()) * u128::from(n)) >> 64) as u64
    }

    /// In `low..=high`.
    pub fn range(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    pub fn chance(&mut self, p: f64) -> bool {
        ((self.draw() >> 11) as f64) < p * (1u64 << 53) as f64
    }

    /// Logarithmically uniform in `low..=high`.
    pub fn log_range(&mut self, low: f64, high: f64) -> f64 {
        let u = (self.draw() >> 11) as f64 / (1u64 << 53) as f64;
        low * (high / low).powf(u)
    }

    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len() as u64) as usize]
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Which workers' gradients a packet or a sum holds.

use crate::config::Config;
use crate::wire::Header;

/// A set of (rack, worker) pairs: one 32-bit mask of workers for each of 32 racks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Coverage([u32; 32]);

impl Default for Coverage {
    fn default() -> Self {
        Self::EMPTY
    }
}

impl Coverage {
    pub const EMPTY: Self = Self([0; 32]);

    /// The set of one worker.
    #[must_use]
    pub fn single(rack: u8, bit: u8) -> Self {
        let mut c = Self::EMPTY;
        c.0[usize::from(rack)] = 1 << bit;
        c
    }

    /// Add the workers `mask` of `rack`.
    pub fn add_rack(&mut self, rack: usize, mask: u32) {
        self.0[rack] |= mask;
    }

    /// Workers of `rack` in this set.
    #[must_use]
    pub fn rack(&self, rack: usize) -> u32 {
        self.0[rack]
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.iter().fold(0, |a, b| a | b) == 0
    }

    #[must_use]
    pub fn intersects(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).fold(0, |acc, (a, b)| acc | (a & b)) != 0
    }

    /// `other` is a subset of this set.
    #[must_use]
    pub fn contains(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).fold(0, |acc, (a, b)| acc | (b & !a)) == 0
    }

    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] | other.0[i]))
    }

    /// What is in this set but not in `other`.
    #[must_use]
    pub fn minus(&self, other: &Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] & !other.0[i]))
    }

    #[must_use]
    pub fn count(&self) -> u32 {
        self.0.iter().map(|m| m.count_ones()).sum()
    }

    /// The (rack, bit) pairs in order.
    pub fn iter(&self) -> impl Iterator<Item = (u8, u8)> + '_ {
        self.0.iter().enumerate().flat_map(|(rack, &mask)| {
            (0..32u8).filter(move |bit| mask >> bit & 1 == 1).map(move |bit| (rack as u8, bit))
        })
    }
}

/// The workers of a job as the switches see them.
#[derive(Clone, Debug)]
pub struct Topology {
    full: Coverage,
    ranks: Vec<[u16; 32]>,
    /// Racks of one whose worker enters level 1 directly.
    edge_racks: u32,
    racks: u32,
}

const NO_RANK: u16 = u16::MAX;

impl Topology {
    #[must_use]
    pub fn new(config: &Config) -> Self {
        let mut t = Self { full: Coverage::EMPTY, ranks: vec![[NO_RANK; 32]; 32], edge_racks: 0, racks: 0 };
        for w in &config.workers {
            t.full.add_rack(usize::from(w.rack), 1 << w.bit);
            t.ranks[usize::from(w.rack)][usize::from(w.bit)] = w.rank;
            t.racks |= 1 << w.rack;
            if w.edge {
                t.edge_racks |= 1 << w.rack;
            }
        }
        t
    }

    /// All workers of the job.
    #[must_use]
    pub fn full(&self) -> &Coverage {
        &self.full
    }

    /// Ranks in `coverage`, in (rack, bit) order.
    pub fn ranks<'a>(&'a self, coverage: &'a Coverage) -> impl Iterator<Item = u16> + 'a {
        coverage.iter().map(|(rack, bit)| self.ranks[usize::from(rack)][usize::from(bit)]).filter(|r| *r != NO_RANK)
    }

    /// Fan-in degree fields (level 0 of `rack`, level 1) as they go on the wire: 32 is written as 0.
    #[must_use]
    pub fn fan_in(&self, rack: u8) -> (u8, u8) {
        let level0 = self.full.rack(usize::from(rack)).count_ones();
        ((level0 % 32) as u8, (self.racks.count_ones() % 32) as u8)
    }

    /// What a gradient packet covers; `None` when it names workers or racks that the job does not have.
    #[must_use]
    pub fn coverage(&self, h: &Header) -> Option<Coverage> {
        let mut c = Coverage::EMPTY;
        if h.edge_switch_identifier {
            if h.bitmap1 == 0 || h.bitmap1 & !self.racks != 0 {
                return None;
            }
            for rack in 0..32 {
                if h.bitmap1 >> rack & 1 == 1 {
                    c.add_rack(rack, self.full.rack(rack));
                }
            }
        } else {
            if h.bitmap1.count_ones() != 1 || h.bitmap0 == 0 {
                return None;
            }
            let rack = h.bitmap1.trailing_zeros() as usize;
            if h.bitmap0 & !self.full.rack(rack) != 0 {
                return None;
            }
            c.add_rack(rack, h.bitmap0);
        }
        Some(c)
    }

    /// Whether a gradient packet was summed, or completed, by a switch (a worker alone cannot have sent it).
    #[must_use]
    pub fn from_switch(&self, h: &Header, coverage: &Coverage) -> bool {
        coverage.count() > 1 || (h.edge_switch_identifier && h.bitmap1 & self.edge_racks == 0)
    }
}

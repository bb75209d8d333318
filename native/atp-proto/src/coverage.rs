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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_coverage() -> impl Strategy<Value = Coverage> {
        proptest::collection::vec((0usize..32, any::<u32>()), 0..6).prop_map(|racks| {
            let mut c = Coverage::EMPTY;
            for (rack, mask) in racks {
                c.add_rack(rack, mask);
            }
            c
        })
    }

    fn topology(edge_last: bool) -> Topology {
        // Ranks 0..3 in rack 0 (bits 0, 1, 5), rank 3 alone in rack 31.
        let workers: Vec<String> = [(0, 0), (0, 1), (0, 5), (31, 0)]
            .iter()
            .enumerate()
            .map(|(rank, (rack, bit))| {
                let edge = edge_last && *rack == 31;
                format!(r#"{{"rank":{rank},"address":"10.0.0.{rank}","rack":{rack},"bit":{bit},"edge":{edge}}}"#)
            })
            .collect();
        let text = format!(
            r#"{{"jobId":1,"mode":"HostOnly","role":"worker","valuesPerPacket":62,"workers":[{}],
                "parameterServers":[{{"address":"10.0.1.1"}}]}}"#,
            workers.join(",")
        );
        Topology::new(&Config::from_json(&text).expect("valid"))
    }

    fn gradient(edge: bool, bitmap0: u32, bitmap1: u32) -> Header {
        Header { bitmap0, bitmap1, edge_switch_identifier: edge, ..Header::default() }
    }

    #[test]
    fn edge_decides_what_a_packet_covers() {
        let t = topology(false);
        let ranks = |h: &Header| t.coverage(h).map(|c| t.ranks(&c).collect::<Vec<_>>());
        assert_eq!(ranks(&gradient(false, 0b10_0001, 1)), Some(vec![0, 2]));
        assert_eq!(ranks(&gradient(true, 0b1, 1)), Some(vec![0, 1, 2]));
        assert_eq!(ranks(&gradient(true, 0, 1 << 31 | 1)), Some(vec![0, 1, 2, 3]));
        assert_eq!(t.coverage(&gradient(true, 0, 1 << 31 | 1)), Some(*t.full()));
        for bad in [
            gradient(false, 0b100, 1),       // no worker has that bit
            gradient(false, 0, 1),           // covers nobody
            gradient(false, 1, 1 << 31 | 1), // one rack at a time
            gradient(false, 1, 0),
            gradient(true, 1, 0b10), // no such rack
            gradient(true, 1, 0),
        ] {
            assert_eq!(t.coverage(&bad), None, "{bad:?}");
        }
        assert_eq!(t.fan_in(0), (3, 2));
    }

    #[test]
    fn a_lone_packet_counts_as_a_switchs_only_when_no_worker_sends_it_so() {
        for edge in [false, true] {
            let t = topology(edge);
            let h = gradient(true, 1, 1 << 31);
            assert_eq!(t.from_switch(&h, &t.coverage(&h).expect("valid")), !edge);
            let h = gradient(false, 1, 1);
            assert!(!t.from_switch(&h, &t.coverage(&h).expect("valid")));
            let h = gradient(false, 3, 1);
            assert!(t.from_switch(&h, &t.coverage(&h).expect("valid")));
        }
    }

    #[test]
    fn a_fan_in_of_32_is_written_as_0() {
        let workers: Vec<String> = (0..1024)
            .map(|r| {
                format!(r#"{{"rank":{r},"address":"10.1.{}.{}","rack":{},"bit":{}}}"#, r / 200, r % 200, r / 32, r % 32)
            })
            .collect();
        let text = format!(
            r#"{{"jobId":1,"mode":"HostOnly","role":"worker","valuesPerPacket":62,"workers":[{}],
                "parameterServers":[{{"address":"10.0.1.1"}}]}}"#,
            workers.join(",")
        );
        let config = Config::from_json(&text).expect("valid");
        let t = Topology::new(&config);
        assert_eq!(t.fan_in(5), (0, 0));
        assert_eq!(t.full().count(), 1024);
        assert_eq!(config.descriptor_packets(), 50);
    }

    proptest! {
        #[test]
        fn sets_behave_as_sets(a in any_coverage(), b in any_coverage()) {
            let union = a.union(&b);
            prop_assert!(union.contains(&a) && union.contains(&b));
            prop_assert_eq!(a.minus(&b).union(&b), union);
            prop_assert!(!a.minus(&b).intersects(&b));
            prop_assert_eq!(a.intersects(&b), a.iter().any(|x| b.iter().any(|y| x == y)));
            prop_assert_eq!(a.contains(&b) && b.contains(&a), a == b);
            prop_assert_eq!(a.count() as usize, a.iter().count());
            prop_assert_eq!(a.is_empty(), a == Coverage::EMPTY);
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The index table: slot = sequence mod P, aggregatorIndex = hash(job, slot) in the job's concatenated regions.

use crate::config::Config;

/// SplitMix64 (Steele et al., OOPSLA '14): a full-period mixer.
#[must_use]
pub fn mix(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// aggregatorIndex of every slot, the same at all hosts of a job.
#[derive(Clone, Debug)]
pub struct IndexTable {
    /// Every aggregatorIndex of the job.
    pool: Vec<u16>,
    slots: Vec<u16>,
    /// First sequence for which the slot's entry is in force.
    since: Vec<u64>,
    picks: u64,
}

impl IndexTable {
    /// The hash is linear with a stride and an offset drawn from the job ID, so that slots of one job never share an
    /// aggregator while P fits the region, and two jobs that share a region meet pseudo-randomly.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        let mut pool: Vec<u16> =
            config.regions.iter().flat_map(|r| (r.start..r.start + r.size).map(|i| i as u16)).collect();
        if pool.is_empty() {
            pool.push(0);
        }
        let total = pool.len() as u64;
        let seed = mix(u64::from(config.job_id));
        let mut stride = mix(seed) % total;
        while gcd(stride, total) != 1 {
            stride = (stride + 1) % total;
        }
        let slots: Vec<u16> =
            (0..u64::from(config.slots)).map(|slot| pool[((slot * stride + seed % total) % total) as usize]).collect();
        let since = vec![0; slots.len()];
        Self { pool, slots, since, picks: seed }
    }

    fn slot(&self, seq: u64) -> usize {
        (seq % self.slots.len() as u64) as usize
    }

    /// aggregatorIndex of `seq`.
    #[must_use]
    pub fn get(&self, seq: u64) -> u16 {
        self.slots[self.slot(seq)]
    }

    /// Take `index` for `seq` + P and later sequences of its slot; an announcement older than the entry is ignored.
    /// True when the entry changed.
    pub fn announce(&mut self, seq: u64, index: u16) -> bool {
        let slot = self.slot(seq);
        let since = seq + self.slots.len() as u64;
        if since <= self.since[slot] {
            return false;
        }
        self.since[slot] = since;
        let changed = self.slots[slot] != index;
        self.slots[slot] = index;
        changed
    }

    /// Parameter server: a new aggregatorIndex for the slot of `seq`, preferably one that none of the job's slots uses.
    pub fn pick(&mut self, seq: u64) -> u16 {
        let current = self.get(seq);
        let mut candidate = current;
        for _ in 0..16 {
            self.picks = self.picks.wrapping_add(1);
            candidate = self.pool[(mix(self.picks) % self.pool.len() as u64) as usize];
            if candidate != current && (self.pool.len() <= self.slots.len() || !self.slots.contains(&candidate)) {
                break;
            }
        }
        candidate
    }

    /// Number of distinct aggregators of the job.
    #[must_use]
    pub fn pool_size(&self) -> usize {
        self.pool.len()
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The index table: slot = sequence mod P, aggregatorIndex = hash(job, slot) in the job's concatenated regions.

use std::collections::HashMap;

use crate::config::Config;

/// Random candidates for a new index.
const CANDIDATES: usize = 16;

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
    /// Slots of each aggregatorIndex in use; made at the first pick.
    users: Option<HashMap<u16, Vec<u32>>>,
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
        Self { pool, slots, since, picks: seed, users: None }
    }

    /// For comparisons: slot mod region, as SwitchML has it. All jobs of a region meet at the same indexes.
    #[must_use]
    pub fn linear(config: &Config) -> Self {
        let mut table = Self::new(config);
        let total = table.pool.len();
        for (slot, index) in table.slots.iter_mut().enumerate() {
            *index = table.pool[slot % total];
        }
        table
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
        let old = std::mem::replace(&mut self.slots[slot], index);
        if old == index {
            return false;
        }
        if let Some(users) = &mut self.users {
            users.entry(old).or_default().retain(|s| *s as usize != slot);
            users.entry(index).or_default().push(slot as u32);
        }
        true
    }

    /// Parameter server: a new aggregatorIndex for the slot of `seq`. Of some at random the one that the job's own slots use
    /// least near this slot: sequences that are far apart are not in flight together.
    pub fn pick(&mut self, seq: u64) -> u16 {
        let slot = self.slot(seq);
        let current = self.slots[slot];
        let total = self.slots.len();
        let slots = &self.slots;
        let users = self.users.get_or_insert_with(|| {
            let mut users: HashMap<u16, Vec<u32>> = HashMap::new();
            for (slot, index) in slots.iter().enumerate() {
                users.entry(*index).or_default().push(slot as u32);
            }
            users
        });
        let mut best = (current, 0);
        for _ in 0..CANDIDATES {
            self.picks = self.picks.wrapping_add(1);
            let candidate = self.pool[(mix(self.picks) % self.pool.len() as u64) as usize];
            if candidate == current {
                continue;
            }
            let nearest = users.get(&candidate).into_iter().flatten().map(|user| {
                let apart = slot.abs_diff(*user as usize);
                apart.min(total - apart)
            });
            let distance = nearest.min().unwrap_or(total);
            if distance > best.1 {
                best = (candidate, distance);
            }
            if distance == total {
                break;
            }
        }
        best.0
    }

    /// Number of distinct aggregators of the job.
    #[must_use]
    pub fn pool_size(&self) -> usize {
        self.pool.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn config(job_id: u8, sizes: (u32, u32), slots: u32) -> Config {
        let text = format!(
            r#"{{"jobId":{job_id},"mode":"Shared","role":"worker","valuesPerPacket":62,"indexTableSize":{slots},
                "regions":[{{"start":10,"size":{}}},{{"start":2000,"size":{}}}],
                "workers":[{{"rank":0,"address":"10.0.0.1"}}],"parameterServers":[{{"address":"10.0.1.1"}}]}}"#,
            sizes.0, sizes.1
        );
        Config::from_json(&text).expect("valid")
    }

    proptest! {
        #[test]
        fn indexes_stay_in_the_regions_and_do_not_meet(job_id in 1u8.., a in 1u32..500, b in 1u32..500, slots in 1u32..1200) {
            let table = IndexTable::new(&config(job_id, (a, b), slots));
            let mut seen = std::collections::HashSet::new();
            for seq in 0..u64::from(slots) {
                let i = u32::from(table.get(seq));
                prop_assert!((10..10 + a).contains(&i) || (2000..2000 + b).contains(&i));
                seen.insert(i);
                prop_assert_eq!(table.get(seq), table.get(seq + u64::from(slots)));
            }
            prop_assert_eq!(seen.len(), slots.min(a + b) as usize);
        }
    }

    #[test]
    fn an_announcement_is_in_force_once_and_in_order() {
        let mut table = IndexTable::new(&config(1, (100, 1), 10));
        let old = table.get(3);
        assert!(table.announce(3, 42));
        assert_eq!(table.get(13), 42);
        assert!(!table.announce(3, 43), "a repeated ACK");
        assert!(table.announce(13, 44));
        assert!(!table.announce(3, old), "a late ACK");
        assert_eq!(table.get(23), 44);
    }

    #[test]
    fn a_new_index_is_far_from_its_other_users() {
        let mut table = IndexTable::new(&config(1, (64, 64), 1024));
        for seq in 0..4096u64 {
            let index = table.pick(seq);
            assert_ne!(index, table.get(seq));
            table.announce(seq, index);
            let slot = seq % 1024;
            let near = (1..16).filter(|d| table.get(slot + d) == index || table.get(slot + 1024 - d) == index).count();
            assert_eq!(near, 0, "sequence {seq}");
        }
    }

    #[test]
    fn a_new_index_differs_and_is_unused() {
        let mut table = IndexTable::new(&config(1, (300, 300), 64));
        let mut moved = 0;
        for seq in 0..64 {
            let before: Vec<u16> = (0..64).map(|s| table.get(s)).collect();
            let index = table.pick(seq);
            moved += usize::from(!before.contains(&index));
        }
        assert_eq!(moved, 64);
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The index table: slot = sequence mod P, aggregatorIndex = hash(job, slot) in the job's concatenated regions. A job
//! with a floor has aggregators of its own beside those that it shares: some slots are bound to them for ever.

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
    /// Every aggregatorIndex of the job but those of its floor: unbound slots move among them.
    pool: Vec<u16>,
    floor: Vec<u16>,
    slots: Vec<u16>,
    /// Slots that keep their aggregator of the floor.
    bound: Vec<bool>,
    /// First sequence for which the slot's entry is in force.
    since: Vec<u64>,
    picks: u64,
    /// Slots of each aggregatorIndex in use; made at the first pick.
    users: Option<HashMap<u16, Vec<u32>>>,
}

impl IndexTable {
    /// The hash is linear with a stride and an offset drawn from the job ID, so that slots of one job never share an
    /// aggregator while P fits the region, and two jobs that share a region meet pseudo-randomly.
    ///
    /// Each aggregator of the floor is bound to one slot, at random in a stretch of the table of its own: so they are
    /// spread evenly, and over the shards (sequence mod their number) too.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        let indexes = |floor: bool| -> Vec<u16> {
            let regions = config.regions.iter().filter(|r| r.floor == floor);
            regions.flat_map(|r| (r.start..r.start + r.size).map(|i| i as u16)).collect()
        };
        let mut pool = indexes(false);
        if pool.is_empty() {
            pool.push(0);
        }
        let mut floor = indexes(true);
        floor.truncate(config.slots as usize);
        let total = pool.len() as u64;
        let seed = mix(u64::from(config.job_id));
        let mut stride = mix(seed) % total;
        while gcd(stride, total) != 1 {
            stride = (stride + 1) % total;
        }
        let mut slots: Vec<u16> =
            (0..u64::from(config.slots)).map(|slot| pool[((slot * stride + seed % total) % total) as usize]).collect();
        let mut bound = vec![false; slots.len()];
        for (i, index) in floor.iter().enumerate() {
            let (begin, end) = (i * slots.len() / floor.len(), (i + 1) * slots.len() / floor.len());
            let slot = begin + mix(i as u64) as usize % (end - begin);
            slots[slot] = *index;
            bound[slot] = true;
        }
        let since = vec![0; slots.len()];
        Self { pool, floor, slots, bound, since, picks: seed, users: None }
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
    /// True when the entry changed; that of a bound slot never does.
    pub fn announce(&mut self, seq: u64, index: u16) -> bool {
        let slot = self.slot(seq);
        if self.bound[slot] {
            return false;
        }
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
    /// least near this slot: sequences that are far apart are not in flight together. A bound slot keeps its own.
    pub fn pick(&mut self, seq: u64) -> u16 {
        let slot = self.slot(seq);
        let current = self.slots[slot];
        if self.bound[slot] {
            return current;
        }
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
    pub fn aggregators(&self) -> usize {
        self.pool.len() + self.floor.len()
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

    /// A region of 300 that is shared, at 10, and a floor at 2000.
    fn floored(job_id: u8, floor: u32, slots: u32) -> IndexTable {
        let mut config = config(job_id, (300, floor), slots);
        config.regions[1].floor = true;
        IndexTable::new(&config)
    }

    fn floor_slots(table: &IndexTable, slots: u32) -> Vec<u64> {
        (0..u64::from(slots)).filter(|s| table.get(*s) >= 2000).collect()
    }

    proptest! {
        #[test]
        fn a_floor_is_bound_one_to_one_and_evenly(job_id in 1u8.., floor in 1u32..700, exponent in 0u32..10) {
            let slots = 1 << exponent;
            let table = floored(job_id, floor, slots);
            let bound = floor_slots(&table, slots);
            prop_assert_eq!(bound.len(), floor.min(slots) as usize);
            let used: std::collections::HashSet<u16> = bound.iter().map(|s| table.get(*s)).collect();
            prop_assert_eq!(used.len(), bound.len());
            prop_assert!(used.iter().all(|i| u32::from(*i) < 2000 + floor));
            // One in each stretch, so two of them are never further apart than two stretches.
            let stretch = u64::from(slots.div_ceil(floor));
            let around = bound.iter().skip(1).copied().chain([bound[0] + u64::from(slots)]);
            prop_assert!(bound.iter().zip(around).all(|(a, b)| b - a < 2 * stretch));
        }

        #[test]
        fn bound_slots_stay_and_others_stay_away_from_the_floor(
            floor in 1u32..200, collisions in proptest::collection::vec((0u64..100_000, proptest::option::of(any::<u16>())), 0..300)
        ) {
            let mut table = floored(7, floor, 256);
            let before: Vec<u16> = (0..256).map(|s| table.get(s)).collect();
            for (seq, index) in collisions {
                // An announcement of the parameter server's own, or whatever came in an ACK.
                let picked = table.pick(seq);
                table.announce(seq, index.filter(|i| *i < 2000).unwrap_or(picked));
            }
            for slot in 0..256 {
                let index = table.get(slot);
                prop_assert!(index == before[slot as usize] || (index < 2000 && before[slot as usize] < 2000));
            }
        }
    }

    #[test]
    fn every_shard_has_its_part_of_a_floor() {
        for floor in [64u32, 256, 1000] {
            let bound = floor_slots(&floored(1, floor, 4096), 4096);
            for shard in 0..4 {
                let here = bound.iter().filter(|s| *s % 4 == shard).count() as f64;
                assert!((0.6..1.4).contains(&(4.0 * here / f64::from(floor))), "{here} of {floor} in shard {shard}");
            }
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

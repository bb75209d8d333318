// SPDX-License-Identifier: Apache-2.0
//! The index table: slot = sequence mod P, aggregatorIndex = hash(job, slot) in the job's concatenated regions. A job
//! with a floor has aggregators of its own beside those that it shares: some slots are bound to them for ever, and others
//! find shelter there while shared ones are of no use.

use std::collections::HashMap;

use crate::config::{Config, Region};

/// Random candidates for a new index.
const CANDIDATES: usize = 16;
/// Collisions in a row, each at another index, after which a slot shelters in the floor: jobs that merely share seldom get so far.
const STRIKES: u8 = 4;
/// One answer in so many lets its slot leave the shelter, to see whether shared aggregators are of use again.
const SHELTERED: u64 = 64;

/// 2^64 divided by the golden ratio.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// SplitMix64 (Steele et al., OOPSLA '14): a full-period mixer.
#[must_use]
pub fn mix(x: u64) -> u64 {
    let mut z = x.wrapping_add(GOLDEN);
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
    /// First aggregatorIndex of the floor, and how many there are, at most P.
    floor: (u16, usize),
    /// Whether a slot may shelter in it.
    shelter: bool,
    slots: Vec<u16>,
    /// Slots that keep their aggregator of the floor.
    bound: Vec<bool>,
    /// Parameter server: collisions of each slot in a row; a slot that may shelter does so at `STRIKES`.
    strikes: Vec<u8>,
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
    /// With a floor of F aggregators, the one that a slot can have there is slot mod F: so its users are F slots apart. One
    /// of them is bound to it. Those are spread evenly over the table, and over the shards (sequence mod their number).
    #[must_use]
    pub fn new(config: &Config) -> Self {
        let (floors, shared): (Vec<&Region>, Vec<&Region>) = config.regions.iter().partition(|r| r.floor);
        let mut pool: Vec<u16> = shared.iter().flat_map(|r| (r.start..r.start + r.size).map(|i| i as u16)).collect();
        if pool.is_empty() {
            pool.push(0);
        }
        let floor = floors.first().map_or((0, 0), |r| (r.start as u16, r.size.min(config.slots) as usize));
        let total = pool.len() as u64;
        let seed = mix(u64::from(config.job_id));
        let mut stride = mix(seed) % total;
        while gcd(stride, total) != 1 {
            stride = (stride + 1) % total;
        }
        let mut slots: Vec<u16> =
            (0..u64::from(config.slots)).map(|slot| pool[((slot * stride + seed % total) % total) as usize]).collect();
        let mut bound = vec![false; slots.len()];
        for i in 0..floor.1 {
            // Slots whose aggregator this would be: every F-th. Multiples of the golden ratio are spread evenly.
            let choices = (slots.len() - i).div_ceil(floor.1);
            let turn = (i as u64).wrapping_mul(GOLDEN);
            let slot = i + floor.1 * ((u128::from(turn) * choices as u128) >> 64) as usize;
            slots[slot] = floor.0 + i as u16;
            bound[slot] = true;
        }
        // Within it only as many sequences are open as it has aggregators, but each costs the parameter server's link one
        // packet, not one of every worker.
        let shelter = floor.1 > 0 && floor.1 * config.workers.len() >= config.max_window as usize;
        let (since, strikes) = (vec![0; slots.len()], vec![0; slots.len()]);
        Self { pool, floor, shelter, slots, bound, strikes, since, picks: seed, users: None }
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

    /// Place in the floor of the aggregator of `seq`, if it is there.
    #[must_use]
    pub fn in_floor(&self, seq: u64) -> Option<usize> {
        let place = usize::from(self.get(seq)).checked_sub(usize::from(self.floor.0));
        place.filter(|p| *p < self.floor.1)
    }

    /// Parameter server: `seq` is answered. What every worker must be told: the aggregatorIndex of its slot from `seq` + P on.
    pub fn answered(&mut self, seq: u64, collided: bool) -> Option<u16> {
        let slot = self.slot(seq);
        let may = self.shelter && !self.bound[slot];
        let strikes = self.strikes[slot];
        self.strikes[slot] = if collided {
            (strikes + 1).min(STRIKES)
        } else if may && strikes == STRIKES {
            self.picks = self.picks.wrapping_add(1);
            if !mix(self.picks).is_multiple_of(SHELTERED) {
                return None;
            }
            STRIKES - 1
        } else {
            self.strikes[slot] = 0;
            return None;
        };
        let index = if may && self.strikes[slot] == STRIKES {
            self.floor.0 + (slot % self.floor.1) as u16
        } else {
            self.pick(seq)
        };
        self.announce(seq, index);
        (self.get(seq) == index).then_some(index)
    }

    /// Parameter server: a new aggregatorIndex for the slot of `seq`. Of some at random the one that the job's own slots use
    /// least near this slot: sequences that are far apart are not in flight together. A bound slot keeps its own.
    fn pick(&mut self, seq: u64) -> u16 {
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

    /// Number of aggregators of the floor that slots use.
    #[must_use]
    pub fn floor_size(&self) -> usize {
        self.floor.1
    }

    /// Number of distinct aggregators of the job.
    #[must_use]
    pub fn aggregators(&self) -> usize {
        self.pool.len() + self.floor.1
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
            let stretch = u64::from(slots.div_ceil(floor));
            let around = bound.iter().skip(1).copied().chain([bound[0] + u64::from(slots)]);
            prop_assert!(bound.iter().zip(around).all(|(a, b)| b - a <= 4 * stretch), "{:?}", bound);
            // All that may use an aggregator are as many slots apart as the floor has aggregators.
            let size = u64::from(floor.min(slots));
            prop_assert!(bound.iter().all(|s| u64::from(table.get(*s)) == 2000 + s % size));
        }

        #[test]
        fn bound_slots_stay_and_others_shelter_in_their_place(
            floor in 1u32..200, answers in proptest::collection::vec((0u64..4, 0u64..256, 0u8..4, any::<u16>()), 0..3000)
        ) {
            let mut table = floored(7, floor, 256);
            let before: Vec<u16> = (0..256).map(|s| table.get(s)).collect();
            for (turn, slot, what, index) in answers {
                // An answer of the parameter server's own, or whatever came in an ACK.
                if what == 0 && index < 2000 {
                    table.announce(256 * turn + slot, index);
                } else {
                    table.answered(256 * turn + slot, what < 3);
                }
            }
            for slot in 0..256u16 {
                let (was, index) = (before[usize::from(slot)], table.get(u64::from(slot)));
                let stays = was == index;
                prop_assert!(stays || was < 2000);
                prop_assert!(stays || index < 2000 || u32::from(index) == 2000 + u32::from(slot) % floor);
            }
        }
    }

    #[test]
    fn a_slot_shelters_after_some_collisions_and_comes_back() {
        let mut table = floored(1, 64, 256);
        table.shelter = true;
        let slot = (0..256).find(|s| table.get(*s) < 2000).expect("an unbound slot");
        let mut seqs = (slot..).step_by(256);
        let mut answer = |table: &mut IndexTable, collided| table.answered(seqs.next().expect("endless"), collided);
        for _ in 1..STRIKES {
            assert!(answer(&mut table, true).is_some_and(|index| index < 2000));
        }
        let index = answer(&mut table, true);
        assert_eq!(index.map(u64::from), Some(2000 + slot % 64));
        let stay = (0..).take_while(|_| answer(&mut table, false).is_none()).count();
        assert!(table.get(slot) < 2000 && stay < 1000, "{stay}");
        assert_eq!(answer(&mut table, true), index, "one collision, and it is back at once");
        table.shelter = false;
        assert!(answer(&mut table, true).is_some_and(|index| index < 2000));
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

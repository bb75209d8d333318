// SPDX-License-Identifier: Apache-2.0
//! Whether ACKs to the job's group reach its workers. A switch replicates them; one that has forgotten the job does not,
//! and then the group's addressee alone gets them.

use super::ParameterServer;
use super::answers::To;
use crate::Nanos;

/// Group ACKs in a row that half of the workers, but not the representative, had to ask for again, before the group path
/// counts as broken, and the least time between the first and the last of these questions.
const SUSPICION: u32 = 16;
const SUSPICION_TIME: Nanos = 1_000_000;
/// How long ACKs go to each worker before the group path is tried again; doubled at each failure.
const RETRY: Nanos = 1_000_000_000;
const RETRY_MAX: Nanos = 64_000_000_000;
/// Sequences that try the group path, and how long nobody may ask for one of them again.
const PROBES: u32 = 8;
const PROBE_TIME: Nanos = 200_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GroupPath {
    Up,
    /// ACKs go to each worker until .until.
    Down {
        until: Nanos,
        wait: Nanos,
    },
    /// `left` more sequences go to the group alone; then, until `until`, each worker gets its ACK as in `Down`.
    Probing {
        left: u32,
        /// Probes that somebody asked for again; losses alone do so to some.
        asked: u32,
        until: Nanos,
        wait: Nanos,
    },
}

impl GroupPath {
    pub fn is_up(&self) -> bool {
        *self == Self::Up
    }

    /// Whether an ACK goes to the group now.
    fn takes(&mut self, now: Nanos) -> bool {
        if let Self::Down { until, wait } = *self
            && now >= until
        {
            *self = Self::Probing { left: PROBES, asked: 0, until: 0, wait };
        }
        match self {
            Self::Up => true,
            Self::Down { .. } => false,
            Self::Probing { left, until, .. } => {
                if *left > 0 {
                    *left -= 1;
                    *until = now + PROBE_TIME;
                    return true;
                }
                let works = now >= *until;
                if works {
                    *self = Self::Up;
                }
                works
            }
        }
    }

    /// Half of the workers asked again for an ACK that went to the group; `broken`: as for many before it. True when the
    /// path counts as broken from now on.
    fn on_missed(&mut self, broken: bool, now: Nanos) -> bool {
        let wait = match self {
            Self::Up if broken => RETRY,
            Self::Probing { asked, wait, .. } => {
                *asked += 1;
                if 2 * *asked <= PROBES {
                    return false;
                }
                (2 * *wait).min(RETRY_MAX)
            }
            Self::Up | Self::Down { .. } => return false,
        };
        *self = Self::Down { until: now + wait, wait };
        true
    }
}

impl ParameterServer {
    /// Where a group ACK goes now.
    pub(super) fn group_target(&mut self, now: Nanos) -> To {
        let alone = self.config.workers.len() == 1 && self.config.switch.is_none();
        if alone || self.group.takes(now) { To::Group } else { To::Each(0) }
    }

    /// Half of the workers asked again for every one of the last group ACKs up to `seq`, and not all at once. Losses hit some
    /// sequences, or many in a burst; a switch that does not replicate misses all, and repeats tell it a few at a time.
    fn group_seems_broken(&self, seq: u64, now: Nanos) -> bool {
        let mut first = now;
        for i in 0..u64::from(self.config.slots) {
            let Some(s) = seq.checked_sub(i * self.config.servers.len() as u64) else { return false };
            let entry = self.ring.at(s);
            let Some(at) = entry.asked_at.filter(|_| entry.seq == s) else { return false };
            first = first.min(at);
            if i + 1 >= u64::from(SUSPICION) && now >= first + SUSPICION_TIME {
                return true;
            }
        }
        false
    }

    /// Somebody asked again for a sequence that went to the group.
    pub(super) fn suspect_group(&mut self, seq: u64, rank: u16, now: Nanos) {
        // The representative gets even what no switch replicates, unless everything depends on a relay.
        if rank == self.representative && self.config.switch.is_none() {
            return;
        }
        // With many workers somebody misses nearly every ACK by chance, and to answer those costs less than an ACK to each.
        let half = (self.config.workers.len() / 2).max(1);
        let entry = self.ring.at_mut(seq);
        if !entry.to_group || entry.asked_at.is_some() || entry.asked.contains(&rank) {
            return;
        }
        entry.asked.push(rank);
        if entry.asked.len() < half {
            return;
        }
        entry.asked_at = Some(now);
        let broken = self.group.is_up() && self.group_seems_broken(seq, now);
        self.counters.group_fallbacks += u64::from(self.group.on_missed(broken, now));
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Properties of windows and aggregators that every run must have, and the sums of all counters.

use std::collections::HashMap;

use atp_switch::counter_names;

use super::{Power, Sim, TorState};

impl Sim {
    pub(super) fn check_window(&mut self, e: u32) {
        let running = &mut self.running[e as usize];
        let Some(w) = running.machine.trainee() else { return };
        let s = w.snapshot();
        let config = w.config();
        let max = f64::from(config.max_window);
        self.peak_window = self.peak_window.max(s.window);
        let bad = !(s.window >= 2.0f64.min(max) && s.window <= max)
            || s.open_sequences > u64::from(config.slots)
            || s.in_flight > s.open_sequences;
        if bad {
            let text = format!(
                "job {} rank {}: window {} of at most {max}, {} in flight, {} open sequences",
                running.job, running.rank, s.window, s.in_flight, s.open_sequences
            );
            self.violate("window", text);
        }
    }

    pub(super) fn check_leak(&mut self, job: u32, job_id: u8) {
        let now = self.net.now;
        let tors = self.tors_of(&self.jobs[job as usize].spec.clone());
        let early = self.clean && now < self.jobs[job as usize].ended_at + self.tors[0].stale;
        for t in tors {
            let tor = &mut self.tors[t as usize];
            if tor.power == Power::Off {
                continue;
            }
            if !early {
                // Idle for longer than T: whoever meets them may take them.
                tor.switch.sweep(now);
            }
            let left = tor.switch.occupancy(job_id);
            if left > 0 {
                self.leaks += u64::from(left);
                let how = if early { "although nothing was lost" } else { "after T" };
                self.violate("leak", format!("switch {t} still holds {left} aggregators of job {job} {how}"));
            }
        }
    }

    pub(super) fn collect_switch(t: &mut TorState) {
        for id in 0..=255u8 {
            for (total, c) in t.totals.iter_mut().zip(t.switch.counters(id)) {
                *total += c;
            }
        }
    }

    /// Sums of the counters of all switches and endpoints, by name. To be called once, at the end.
    pub fn totals(&mut self) -> HashMap<String, u64> {
        let mut out: HashMap<String, u64> = HashMap::new();
        for t in &mut self.tors {
            Self::collect_switch(t);
            for (name, value) in counter_names().iter().zip(&t.totals) {
                *out.entry(format!("switch.{name}")).or_default() += value;
            }
        }
        let alive: Vec<u32> = (0..self.running.len() as u32).filter(|e| self.running[*e as usize].alive).collect();
        for e in alive {
            self.remove_endpoint(e);
        }
        for (name, value) in &self.endpoint_totals {
            *out.entry(format!("endpoint.{name}")).or_default() += value;
        }
        for l in &self.net.links {
            for (name, value) in [
                ("lost", l.stats.lost),
                ("overflowed", l.stats.overflowed),
                ("duplicated", l.stats.duplicated),
                ("late", l.stats.late),
                ("marked", l.stats.marked),
                ("cut", l.stats.cut),
            ] {
                *out.entry(format!("link.{name}")).or_default() += value;
            }
        }
        out
    }
}

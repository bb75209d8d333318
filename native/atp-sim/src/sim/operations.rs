// SPDX-License-Identifier: Apache-2.0
//! Operations of the jobs, and the checks of their results.

use std::fmt::Write as _;

use atp_proto::worker::Submission;

use super::{Action, JobState, Sim, Victim};
use crate::check::{Expected, source};

impl Sim {
    pub(super) fn submit(&mut self, job: u32, epoch: u32, rank: u16) {
        let now = self.net.now;
        let j = &self.jobs[job as usize];
        if j.epoch != epoch || !matches!(j.state, JobState::Running | JobState::Broken) {
            return;
        }
        let Some(e) = self.endpoint_of(job, usize::from(rank)) else { return };
        let r = usize::from(rank);
        loop {
            let j = &mut self.jobs[job as usize];
            let k = j.submitted[r];
            if k >= j.spec.ops.len() || k >= j.completed[r] + j.spec.depth {
                break;
            }
            j.submitted[r] += 1;
            let op = j.spec.ops[k];
            let memory = source(&op, Self::salt(job, k), r, 0, op.count);
            if let Some(w) = self.running[e as usize].machine.trainee() {
                w.submit(
                    Submission {
                        token: u64::from(epoch) << 32 | k as u64,
                        op_id: k as u64,
                        kind: op.kind,
                        dtype: op.dtype,
                        count: op.count as u64,
                        scale: None,
                        memory: Box::new(memory),
                    },
                    now,
                );
            }
        }
        self.pump(e);
    }

    fn salt(job: u32, op: usize) -> u64 {
        u64::from(job) << 40 | op as u64
    }

    pub(super) fn operation_ended(&mut self, job: u32, epoch: u32, rank: u16, event: atp_proto::Event) {
        let now = self.net.now;
        let k = (event.token & 0xffff_ffff) as usize;
        let r = usize::from(rank);
        if let Some(failure) = event.error {
            self.operation_failed(job, rank, &failure.text);
            return;
        }
        let j = &mut self.jobs[job as usize];
        if event.token >> 32 != u64::from(epoch) || j.completed[r] != k || j.epoch != epoch {
            let text = format!(
                "job {job} rank {rank}: operation {k} ended out of turn or twice (completed {})",
                j.completed[r]
            );
            self.violate("twice", text);
            return;
        }
        j.completed[r] += 1;
        let op = j.spec.ops[k];
        let (ranks, values, scale) = (j.spec.workers.len(), j.spec.values, j.spec.scale);
        let (expected, seen) =
            j.expected.entry(k).or_insert_with(|| (Expected::new(&op, Self::salt(job, k), ranks, values, scale), 0));
        *seen += 1;
        let result = expected.verify(event.memory.source());
        if r == 0 {
            j.operation_ends.push(now);
        }
        j.bytes_done += (op.count * op.dtype.size()) as u64;
        if *seen == ranks {
            j.expected.remove(&k);
        }
        if let Err(text) = result {
            self.violate("wrong sum", format!("job {job} epoch {epoch} operation {k} ({op:?}) at rank {rank}: {text}"));
        }
        let j = &self.jobs[job as usize];
        if j.completed.iter().all(|c| *c == j.spec.ops.len()) {
            self.job_done(job);
            return;
        }
        if j.victim.is_some() {
            self.end_if_nobody_lives(job);
        }
        let j = &self.jobs[job as usize];
        if j.completed[r] < j.spec.ops.len() {
            let (low, high) = j.spec.compute;
            let delay = self.net.rng.range(low, high);
            if delay == 0 {
                self.submit(job, epoch, rank);
            } else {
                self.at(now + delay, Action::Submit { job, epoch, rank });
            }
        }
    }

    pub(super) fn operation_failed(&mut self, job: u32, rank: u16, text: &str) {
        let now = self.net.now;
        self.note(|| format!("job {job} rank {rank}: {text}"));
        let j = &mut self.jobs[job as usize];
        if j.state == JobState::Broken {
            return;
        }
        match j.victim {
            None if j.amnesia => {
                // The operator sees the error and begins a new epoch.
                j.state = JobState::Broken;
                self.after(1_000_000, Action::StartEpoch(job));
            }
            None => {
                let text = format!("job {job} ({:?}) rank {rank}: {text}", j.spec.mode);
                self.violate("error without cause", text);
                self.end_failed(job);
            }
            Some((victim, at)) => {
                let spec = &j.spec;
                let took = now.saturating_sub(at);
                // A server that forgot may also miss ranks that had finished.
                let named = j.amnesia
                    || match victim {
                        Victim::Worker(v) => text.contains(&format!("rank {v} ")),
                        Victim::Server(_) => text.contains("does not answer"),
                    };
                let late = took > 2 * spec.stall_timeout + 1_000_000_000;
                let mut problem = String::new();
                if !named {
                    let _ = write!(problem, "the error does not name the dead {victim:?}: {text}");
                } else if late {
                    let _ = write!(problem, "the error came {} s after the death", took as f64 * 1e-9);
                }
                j.errors += 1;
                if !problem.is_empty() {
                    self.violate("bad error", format!("job {job} rank {rank}: {problem}"));
                }
                if let Some(e) = self.endpoint_of(job, usize::from(rank)) {
                    self.remove_endpoint(e);
                }
                self.end_if_nobody_lives(job);
            }
        }
    }
}

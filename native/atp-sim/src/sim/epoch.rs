// SPDX-License-Identifier: Apache-2.0
//! Epochs of a job: its processes start, die and end; its job ID is taken and rests.

use atp_proto::{Config, Nanos, Role};

use super::job::Running;
use super::{Action, JobState, QUARANTINE, Sim};
use crate::check::Flavour;
use crate::comparison::Machine;

impl Sim {
    pub(super) fn start_epoch(&mut self, job: u32) {
        let now = self.net.now;
        let spec = self.jobs[job as usize].spec.clone();
        let tors = self.tors_of(&spec);
        let old = self.jobs[job as usize].job_id;
        for e in std::mem::take(&mut self.jobs[job as usize].endpoints) {
            self.remove_endpoint(e);
        }
        let Some(id) = self.free_id(&tors) else {
            // All rest: wait, as the operator does.
            self.after(QUARANTINE / 4, Action::StartEpoch(job));
            self.jobs[job as usize].state = JobState::Broken;
            return;
        };
        let j = &mut self.jobs[job as usize];
        if j.epoch > 0 {
            j.restarts += 1;
        }
        j.epoch += 1;
        j.job_id = id;
        j.state = JobState::Running;
        j.amnesia = false;
        j.victim = None;
        j.resume = j.completed.iter().copied().min().unwrap_or(0);
        let resume = j.resume;
        j.completed.fill(resume);
        j.submitted.fill(resume);
        j.expected.clear();
        let epoch = j.epoch;
        if old != 0 {
            self.leave(&tors, old);
        }
        self.jobs[job as usize].config = Some(self.config(job));
        let programs = self.programs(&spec, &tors);
        for (t, program) in tors.iter().zip(programs) {
            // The ID is taken at once, the entries come when the agent gets to it.
            let Some(program) = program else { continue };
            self.tors[*t as usize].desired.insert(id, program);
            let delay = if self.tidy { 0 } else { self.net.rng.below(200_000) };
            self.after(delay, Action::ProgramSwitch { tor: *t, job_id: id });
        }
        // Also where a HostOnly job has no entries, nobody else may use its ID.
        for t in &tors {
            self.tors[*t as usize].rest_until[usize::from(id)] = Nanos::MAX;
        }
        for index in 0..spec.workers.len() + spec.servers.len() {
            let skew = match self.tidy {
                true => {
                    if index < spec.workers.len() {
                        2_000
                    } else {
                        1_000
                    }
                }
                false => self.net.rng.below(300_000),
            };
            self.at(now + skew, Action::StartEndpoint { job, epoch, index: index as u16 });
        }
    }

    pub(super) fn start_endpoint(&mut self, job: u32, epoch: u32, index: u16) {
        let j = &self.jobs[job as usize];
        if j.epoch != epoch || j.state != JobState::Running {
            return;
        }
        let n = j.spec.workers.len() as u16;
        let (role, rank) = if index < n { (Role::Worker, index) } else { (Role::ParameterServer, index - n) };
        let host = if index < n { j.spec.workers[usize::from(rank)] } else { j.spec.servers[usize::from(rank)] };
        let comparison = j.spec.comparison;
        let template = j.config.as_ref().expect("made with the epoch");
        let config = Config { role, rank, ..template.clone() };
        let machine = Machine::new(config, comparison).expect("the assignment is for its role");
        let e = self.running.len() as u32;
        self.running.push(Running { machine, host, job, epoch, rank, armed: Nanos::MAX, alive: true, handled: 0 });
        self.net.hosts[host as usize].endpoint = Some(e);
        self.jobs[job as usize].endpoints.push(e);
        if role == Role::Worker {
            self.submit(job, epoch, rank);
        }
    }

    /// Take a job ID off the switches, each when its agent gets to it.
    pub(super) fn leave(&mut self, tors: &[u32], job_id: u8) {
        for t in tors {
            let delay = self.net.rng.below(2_000_000);
            self.after(delay, Action::ForgetJob { tor: *t, job_id });
        }
    }

    pub(super) fn endpoint_of(&self, job: u32, index: usize) -> Option<u32> {
        self.jobs[job as usize].endpoints.iter().copied().find(|e| {
            let r = &self.running[*e as usize];
            let workers = self.jobs[job as usize].spec.workers.len();
            let i = usize::from(r.rank) + if r.machine.is_worker() { 0 } else { workers };
            r.alive && i == index
        })
    }

    pub(super) fn remove_endpoint(&mut self, e: u32) {
        self.check_window(e);
        let running = &mut self.running[e as usize];
        if !running.alive {
            return;
        }
        running.alive = false;
        let host = running.host as usize;
        let list = running.machine.endpoint().snapshot().counters.list();
        for (name, value) in list {
            *self.endpoint_totals.entry(name).or_default() += value;
        }
        // Its memory goes.
        if let Some(w) = running.machine.trainee() {
            w.cancel_all("the process ended");
            while w.poll_event().is_some() {}
        }
        self.net.hosts[host].endpoint = None;
        for id in std::mem::take(&mut self.net.hosts[host].socket) {
            self.net.drop_packet(id);
        }
    }

    pub(super) fn job_done(&mut self, job: u32) {
        let now = self.net.now;
        let j = &mut self.jobs[job as usize];
        j.state = JobState::Done;
        j.ended_at = now;
        let (linger, job_id) = (j.spec.linger, j.job_id);
        // All endpoints are gone within a millisecond or so; packets on the way, later.
        let flight: Nanos =
            self.net.links.iter().map(|l| l.spec.late + l.spec.delay).max().unwrap_or(0) * 6 + 5_000_000;
        let stale = self.tors.iter().map(|t| t.stale).max().unwrap_or(0);
        let endpoints = self.jobs[job as usize].endpoints.clone();
        for e in endpoints {
            self.remove_endpoint(e);
        }
        // What turned raw after its request had passed leaves an aggregator to T: raw results release nothing.
        let raw = self.jobs[job as usize].spec.ops.iter().any(|op| op.flavour != Flavour::Small);
        if self.clean && !raw {
            self.after(flight.min(linger.saturating_sub(1)), Action::CheckLeak { job, job_id });
        }
        if linger > stale + flight {
            self.after(stale + flight, Action::CheckLeak { job, job_id });
        }
        self.after(linger, Action::EndJob { job });
    }

    pub(super) fn end_failed(&mut self, job: u32) {
        self.jobs[job as usize].state = JobState::Failed;
        let linger = self.jobs[job as usize].spec.linger;
        self.after(linger, Action::EndJob { job });
    }

    /// After a death without restart: all that live must end, with an error or because they had what they need.
    pub(super) fn end_if_nobody_lives(&mut self, job: u32) {
        let j = &self.jobs[job as usize];
        let total = j.spec.ops.len();
        let living = j.endpoints.iter().any(|e| {
            let r = &self.running[*e as usize];
            r.alive && r.machine.is_worker() && j.completed[usize::from(r.rank)] < total
        });
        if !living && j.state == JobState::Running {
            self.end_failed(job);
        }
    }

    pub(super) fn end_job(&mut self, job: u32) {
        for e in std::mem::take(&mut self.jobs[job as usize].endpoints) {
            self.remove_endpoint(e);
        }
        let spec = self.jobs[job as usize].spec.clone();
        let tors = self.tors_of(&spec);
        let job_id = self.jobs[job as usize].job_id;
        self.leave(&tors, job_id);
        if self.jobs[job as usize].ended_at == 0 {
            self.jobs[job as usize].ended_at = self.net.now;
        }
        self.open_jobs -= 1;
    }
}

// SPDX-License-Identifier: Apache-2.0
//! One run: jobs of real endpoints (`atp-proto`) and real switch cores (softswitch/) on the network, the control plane that
//! programs and restarts them, faults, and the properties that every run must have.

mod action;
mod epoch;
mod job;
mod operations;
mod packets;
mod plan;
mod properties;

use std::collections::HashMap;

use atp_proto::Nanos;
use atp_switch::{Emit, Program, Switch, counter_names};

pub use self::action::Action;
use self::job::Running;
pub use self::job::{Job, JobSpec, JobState, Victim};
use crate::flow::Flow;
use crate::net::{Due, Net};
use crate::trace::Tracer;

/// How long a job ID rests after its job has left a switch.
pub const QUARANTINE: Nanos = 400_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Power {
    On,
    /// Reboots: everything that comes is lost.
    Off,
}

pub struct TorState {
    pub switch: Switch,
    pub power: Power,
    aggregators: u32,
    values: u32,
    stale: Nanos,
    /// Programs that the control plane wants here.
    desired: HashMap<u8, Program>,
    /// Job IDs may be used again from then on.
    rest_until: [Nanos; 256],
    totals: Vec<u64>,
}

#[derive(Clone, Debug)]
pub struct Violation {
    pub at: Nanos,
    pub kind: &'static str,
    pub text: String,
}

pub struct Sim {
    pub net: Net,
    pub tors: Vec<TorState>,
    pub jobs: Vec<Job>,
    pub flows: Vec<Flow>,
    running: Vec<Running>,
    actions: Vec<Option<Action>>,
    pub violations: Vec<Violation>,
    pub leaks: u64,
    /// Loss, duplication, reordering and faults are all off: ACKs must have released everything.
    pub clean: bool,
    pub tracer: Option<Tracer>,
    open_jobs: usize,
    emits: Vec<Emit>,
    endpoint_totals: HashMap<&'static str, u64>,
    /// Time at which everything was over.
    pub ended: Nanos,
    pub peak_window: f64,
    /// Switches, parameter servers and workers of a job start one after the other, as measurements want it.
    pub tidy: bool,
    /// Highest job ID in use: few of them make reuse frequent.
    pub job_ids: u8,
}

impl Sim {
    #[must_use]
    pub fn new(net: Net) -> Self {
        Self {
            net,
            tors: Vec::new(),
            jobs: Vec::new(),
            flows: Vec::new(),
            running: Vec::new(),
            actions: Vec::new(),
            violations: Vec::new(),
            leaks: 0,
            clean: false,
            tracer: None,
            open_jobs: 0,
            emits: Vec::new(),
            endpoint_totals: HashMap::new(),
            ended: 0,
            peak_window: 0.0,
            job_ids: 255,
            tidy: false,
        }
    }

    pub fn add_switch(&mut self, aggregators: u32, values: u32, stale: Nanos) {
        self.tors.push(TorState {
            switch: Switch::new(aggregators, values, stale),
            power: Power::On,
            aggregators,
            values,
            stale,
            desired: HashMap::new(),
            rest_until: [0; 256],
            totals: vec![0; counter_names().len()],
        });
    }

    pub fn add_job(&mut self, spec: JobSpec) -> u32 {
        let id = self.jobs.len() as u32;
        let start = spec.start;
        let n = spec.workers.len();
        self.jobs.push(Job {
            spec,
            state: JobState::Waiting,
            epoch: 0,
            job_id: 0,
            config: None,
            endpoints: Vec::new(),
            submitted: vec![0; n],
            completed: vec![0; n],
            resume: 0,
            expected: HashMap::new(),
            victim: None,
            amnesia: false,
            started_at: start,
            ended_at: 0,
            errors: 0,
            restarts: 0,
            operation_ends: Vec::new(),
            bytes_done: 0,
        });
        self.open_jobs += 1;
        self.at(start, Action::StartJob(id));
        id
    }

    pub fn add_flow(&mut self, flow: Flow) {
        let id = self.flows.len() as u32;
        self.net.queue.push(flow.start, Due::Flow(id));
        self.flows.push(flow);
    }

    pub fn at(&mut self, time: Nanos, action: Action) {
        self.actions.push(Some(action));
        self.net.queue.push(time, Due::Control(self.actions.len() as u32 - 1));
    }

    fn after(&mut self, delay: Nanos, action: Action) {
        self.at(self.net.now + delay, action);
    }

    fn note(&mut self, text: impl FnOnce() -> String) {
        if let Some(t) = &mut self.tracer {
            t.note(self.net.now, &text());
        }
    }

    fn violate(&mut self, kind: &'static str, text: String) {
        self.note(|| format!("VIOLATION {kind}: {text}"));
        // One broken run tells the same many times.
        if self.violations.len() < 20 {
            self.violations.push(Violation { at: self.net.now, kind, text });
        }
    }

    /// Run until all jobs have ended or `limit` is reached.
    pub fn run(&mut self, limit: Nanos) {
        self.advance(limit);
        for i in 0..self.jobs.len() {
            let job = &self.jobs[i];
            if matches!(job.state, JobState::Done | JobState::Failed) {
                continue;
            }
            let text = format!(
                "job {i} ({:?}) {:?} in epoch {}: ranks have completed {:?} of {} operations",
                job.spec.mode,
                job.state,
                job.epoch,
                job.completed,
                job.spec.ops.len()
            );
            self.violate("stuck", text);
        }
    }

    /// Jobs that have not ended.
    #[must_use]
    pub fn open_jobs(&self) -> usize {
        self.open_jobs
    }

    /// Let time pass until `limit` or until every job has ended.
    pub fn advance(&mut self, limit: Nanos) {
        while let Some((at, due)) = self.net.queue.pop() {
            if at > limit {
                self.net.queue.push(at, due);
                self.net.now = limit;
                break;
            }
            self.net.now = at;
            match due {
                Due::Link(link) => {
                    let id = self.net.take_head(link);
                    self.arrive(link, id);
                }
                Due::Late(id) => {
                    let link = self.net.packet(id).link;
                    self.arrive(link, id);
                }
                Due::Timer(e) => self.timer(e),
                Due::Wake(h) => {
                    self.net.hosts[h as usize].wake_armed = false;
                    if let Some(e) = self.net.hosts[h as usize].endpoint {
                        self.pump(e);
                    }
                }
                Due::Control(i) => {
                    if let Some(action) = self.actions[i as usize].take() {
                        self.act(action);
                    }
                }
                Due::Flow(f) => {
                    self.pump_flow(f);
                    let now = self.net.now;
                    if let Some(at) = self.flows[f as usize].on_timer(now) {
                        self.net.queue.push(at, Due::Flow(f));
                    }
                }
            }
            if self.open_jobs == 0 {
                break;
            }
        }
        self.ended = self.net.now;
    }
}

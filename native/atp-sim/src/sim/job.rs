// SPDX-License-Identifier: Apache-2.0
//! A job of a run: what it is, and where it stands.

use std::collections::HashMap;

use atp_proto::{Config, Mode, Nanos};

use crate::check::{Expected, OpSpec};
use crate::comparison::{Comparison, Machine};

#[derive(Clone, Debug)]
pub struct JobSpec {
    pub mode: Mode,
    pub values: usize,
    pub workers: Vec<u32>,
    pub servers: Vec<u32>,
    pub regions: Vec<(u32, u32)>,
    /// A region of this job alone, beside those that it shares.
    pub floor: Option<(u32, u32)>,
    pub slots: u32,
    pub max_window: u32,
    pub initial_window: u32,
    pub scale: f64,
    pub min_rto: Nanos,
    pub stall_timeout: Nanos,
    pub first_sequence: u64,
    pub ops: Vec<OpSpec>,
    /// Operations that a worker has submitted at most at once.
    pub depth: usize,
    /// Time between the end of an operation and the submission of the next one that waits for it.
    pub compute: (Nanos, Nanos),
    pub start: Nanos,
    /// Level 1 also where all workers share one rack elsewhere.
    pub lone_level1: bool,
    /// The job's ACKs go to the group, but its packets are not aggregated at level 1.
    pub level0_only: bool,
    /// Time between the end of the job and its removal from the switches.
    pub linger: Nanos,
    pub comparison: Comparison,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobState {
    Waiting,
    Running,
    /// A process died; the control plane has not started the next epoch yet.
    Broken,
    Done,
    Failed,
}

pub struct Job {
    pub spec: JobSpec,
    pub state: JobState,
    pub epoch: u32,
    pub job_id: u8,
    pub(super) config: Option<Config>,
    pub(super) endpoints: Vec<u32>,
    /// By rank, in this epoch.
    pub(super) submitted: Vec<usize>,
    pub completed: Vec<usize>,
    /// Operation that this epoch starts with.
    pub(super) resume: usize,
    pub(super) expected: HashMap<usize, (Expected, usize)>,
    /// A process died that nobody restarts: errors that name it must come.
    pub victim: Option<(Victim, Nanos)>,
    /// A parameter server lost its memory without a new epoch: a stall is its right outcome.
    pub(super) amnesia: bool,
    pub started_at: Nanos,
    pub ended_at: Nanos,
    pub(super) errors: usize,
    pub restarts: u32,
    /// When operations ended at rank 0.
    pub operation_ends: Vec<Nanos>,
    /// Of all workers: bytes of results.
    pub bytes_done: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Victim {
    Worker(u16),
    Server(u16),
}

/// A process of a job.
pub(super) struct Running {
    pub(super) machine: Machine,
    pub(super) host: u32,
    pub(super) job: u32,
    pub(super) epoch: u32,
    pub(super) rank: u16,
    pub(super) armed: Nanos,
    pub(super) alive: bool,
    pub(super) handled: u32,
}

// SPDX-License-Identifier: Apache-2.0
//! What exists only to be compared with ATP, made of the transport's own parts where it differs in one thing.

mod fixed_window;
mod linear_index;
pub mod switchml;

use atp_proto::congestion::Controller;
use atp_proto::worker::Submission;
use atp_proto::{Config, ConfigError, Endpoint, Nanos, ParameterServer, Role, Worker};

pub use fixed_window::FixedWindow;
use linear_index::LinearIndex;

/// How a job differs from what the product runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Comparison {
    /// It does not.
    #[default]
    None,
    /// The window stands still at its largest.
    NoCongestionControl,
    /// aggregatorIndex = slot mod region, and no new index after a collision, instead of the hash.
    LinearIndex,
    /// SwitchML's workers.
    SwitchMl,
}

/// The workers' side of a transport.
pub trait Trainee: Endpoint {
    fn submit(&mut self, submission: Submission, now: Nanos);
    fn cancel_all(&mut self, reason: &str);
    fn config(&self) -> &Config;
}

impl<C: Controller> Trainee for Worker<C> {
    fn submit(&mut self, submission: Submission, now: Nanos) {
        Self::submit(self, submission, now);
    }
    fn cancel_all(&mut self, reason: &str) {
        Self::cancel_all(self, reason);
    }
    fn config(&self) -> &Config {
        Self::config(self)
    }
}

/// A process of a job. What the product runs is known to the compiler, so that comparisons cost its runs nothing.
pub enum Machine {
    Worker(Box<Worker>),
    OtherWorker(Box<dyn Trainee>),
    Server(Box<ParameterServer>),
    OtherServer(Box<dyn Endpoint>),
}

impl Machine {
    /// The process that an assignment is for.
    ///
    /// # Errors
    /// When the assignment does not fit.
    pub fn new(config: Config, comparison: Comparison) -> Result<Self, ConfigError> {
        Ok(match (config.role, comparison) {
            (Role::Worker, Comparison::None) => Self::Worker(Box::new(Worker::new(config)?)),
            (Role::Worker, Comparison::NoCongestionControl) => {
                Self::OtherWorker(Box::new(Worker::<FixedWindow>::controlled(config)?))
            }
            (Role::Worker, Comparison::LinearIndex) => {
                Self::OtherWorker(Box::new(LinearIndex::new(&config.clone(), Worker::new(config)?)))
            }
            (Role::Worker, Comparison::SwitchMl) => Self::OtherWorker(Box::new(switchml::Worker::new(config))),
            (Role::ParameterServer, Comparison::LinearIndex) => {
                Self::OtherServer(Box::new(LinearIndex::new(&config.clone(), ParameterServer::new(config)?)))
            }
            (Role::ParameterServer, _) => Self::Server(Box::new(ParameterServer::new(config)?)),
        })
    }

    pub fn endpoint(&mut self) -> &mut dyn Endpoint {
        match self {
            Self::Worker(w) => &mut **w,
            Self::OtherWorker(w) => &mut **w,
            Self::Server(s) => &mut **s,
            Self::OtherServer(s) => &mut **s,
        }
    }

    pub fn trainee(&mut self) -> Option<&mut dyn Trainee> {
        match self {
            Self::Worker(w) => Some(&mut **w),
            Self::OtherWorker(w) => Some(&mut **w),
            Self::Server(_) | Self::OtherServer(_) => None,
        }
    }

    #[must_use]
    pub fn is_worker(&self) -> bool {
        matches!(self, Self::Worker(_) | Self::OtherWorker(_))
    }
}

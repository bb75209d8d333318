// SPDX-License-Identifier: Apache-2.0
//! What the header of a gradient says: whose it is, and its resend and collision bits together.

use crate::config::Config;
use crate::coverage::Topology;
use crate::wire::Header;

impl Header {
    /// What all gradients of the worker that this assignment is for have in common.
    #[must_use]
    pub fn of_worker(config: &Config) -> Self {
        let me = config.workers[usize::from(config.rank)];
        let fan_in = Topology::new(config).fan_in(me.rack);
        Self {
            job_id: config.job_id,
            bitmap0: if me.edge { 1 } else { 1 << me.bit },
            bitmap1: 1 << me.rack,
            fan_in_degree0: if me.edge { 1 } else { fan_in.0 },
            fan_in_degree1: fan_in.1,
            edge_switch_identifier: me.edge,
            ..Self::default()
        }
    }

    /// Sent again, to add what a switch lacks: it allocates, empties and releases nothing.
    #[must_use]
    pub fn is_repeat(&self) -> bool {
        self.collision && !self.resend
    }

    /// A switch found its aggregator taken by another sequence.
    #[must_use]
    pub fn has_collided(&self) -> bool {
        self.collision && self.resend
    }
}

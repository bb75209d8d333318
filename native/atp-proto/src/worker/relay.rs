// SPDX-License-Identifier: Apache-2.0
//! Failover from a relay that seems to swallow gradients to the parameter server itself, and back.

use std::net::SocketAddrV4;

use crate::Nanos;

/// Time-outs in a row after which a relay counts as broken, and how long it is left out; doubled at each failure.
const MISSES: u32 = 3;
const RETRY: Nanos = 1_000_000_000;
const RETRY_MAX: Nanos = 64_000_000_000;

pub(super) struct Relay {
    address: Option<SocketAddrV4>,
    /// Time-outs since the last sign that packets sent to the relay reach the parameter server.
    misses: u32,
    /// Until then gradients go to the parameter server itself.
    direct_until: Nanos,
    direct_wait: Nanos,
}

impl Relay {
    pub fn new(address: Option<SocketAddrV4>) -> Self {
        Self { address, misses: 0, direct_until: 0, direct_wait: RETRY }
    }

    pub fn is(&self, from: SocketAddrV4) -> bool {
        self.address.is_some_and(|relay| relay.ip() == from.ip())
    }

    /// Where gradients go instead of the parameter server, if anywhere.
    pub fn target(&self, now: Nanos) -> Option<SocketAddrV4> {
        self.address.filter(|_| now >= self.direct_until)
    }

    /// A packet timed out. True when the relay is left out from now on.
    pub fn suspect(&mut self, now: Nanos) -> bool {
        if self.target(now).is_none() {
            return false;
        }
        self.misses += 1;
        if self.misses < MISSES {
            return false;
        }
        self.misses = 0;
        self.direct_until = now + self.direct_wait;
        self.direct_wait = (2 * self.direct_wait).min(RETRY_MAX);
        true
    }

    /// A packet that went to the relay was answered.
    pub fn trust(&mut self, now: Nanos) {
        if now >= self.direct_until {
            self.misses = 0;
            self.direct_wait = RETRY;
        }
    }
}

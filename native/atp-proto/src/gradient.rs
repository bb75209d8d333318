// SPDX-License-Identifier: Apache-2.0
//! What the resend and collision bits of a gradient say together.

use crate::wire::Header;

impl Header {
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

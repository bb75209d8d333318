// SPDX-License-Identifier: Apache-2.0
//! Sequence arithmetic. Inside, a sequence is a 64-bit number that never wraps; 24 bits of it go on the wire.

use crate::wire::{SEQUENCE_BITS, SEQUENCE_MASK};

/// The low 24 bits.
#[must_use]
pub fn wrap(seq: u64) -> u32 {
    (seq & u64::from(SEQUENCE_MASK)) as u32
}

/// The sequence nearest to `near` whose low 24 bits are `wire`; never negative.
#[must_use]
pub fn unwrap(wire: u32, near: u64) -> u64 {
    let span = 1u64 << SEQUENCE_BITS;
    let ahead = u64::from(wire.wrapping_sub(wrap(near)) & SEQUENCE_MASK);
    if ahead >= span / 2 && near + ahead >= span { near + ahead - span } else { near + ahead }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn unwrap_finds_everything_near(near in 0u64..1 << 40, delta in -(1i64 << 22)..1i64 << 22) {
            let seq = near.saturating_add_signed(delta);
            prop_assert_eq!(unwrap(wrap(seq), near), seq);
        }
    }

    #[test]
    fn across_the_wrap() {
        assert_eq!(unwrap(0, (1 << 24) - 1), 1 << 24);
        assert_eq!(unwrap((1 << 24) - 1, 1 << 24), (1 << 24) - 1);
        assert_eq!(unwrap(5, 0), 5);
    }
}

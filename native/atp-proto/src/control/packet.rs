// SPDX-License-Identifier: Apache-2.0
//! Layout of a control packet behind the ATP header (rawFloat=1, aggregatorIndex=`RAW_CONTROL`), big endian:
//!
//! | bytes | field |
//! |---|---|
//! | 0-3 | incarnation of the sender, never 0 |
//! | 4-7 | incarnation of the receiver as the sender knows it; 0: not yet |
//! | 8-11 | number of the first record in this packet (from 1, modulo 2^32) |
//! | 12-15 | number of the next record that the sender expects |
//! | 16-17 | epoch modulo 2^16 |
//! | 18 | flags: 1 answer me, 2 a record is missing before those that came |
//! | 19 | from a worker: number of its trainers, at most 255 |
//! | 20- | records: length (2 bytes) and that many bytes, until the end |

use crate::wire::{CONTROL_BYTES_MAX, HEADER_BYTES, TAG_BYTES};

/// Bytes before the records.
pub const HEAD: usize = 20;
/// Bytes that the records of one packet may have, with their lengths.
pub const ROOM: usize = CONTROL_BYTES_MAX as usize - HEADER_BYTES - HEAD - TAG_BYTES;
/// Bytes that one record may have.
pub const RECORD_MAX: usize = ROOM - 2;

const ANSWER_ME: u8 = 1;
const GAP: u8 = 2;

/// The fields before the records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Head {
    pub sender: u32,
    pub receiver: u32,
    pub first: u32,
    pub expects: u32,
    pub epoch: u16,
    pub answer_me: bool,
    pub gap: bool,
    pub trainers: u8,
}

impl Head {
    /// Write into the first `HEAD` bytes of `out`.
    pub fn pack(&self, out: &mut [u8]) {
        for (at, word) in [self.sender, self.receiver, self.first, self.expects].into_iter().enumerate() {
            out[4 * at..4 * at + 4].copy_from_slice(&word.to_be_bytes());
        }
        out[16..18].copy_from_slice(&self.epoch.to_be_bytes());
        out[18] = (u8::from(self.answer_me) * ANSWER_ME) | (u8::from(self.gap) * GAP);
        out[19] = self.trainers;
    }

    /// The head and the bytes of the records; `None` when it is too short or the sender has no incarnation.
    #[must_use]
    pub fn unpack(body: &[u8]) -> Option<(Self, &[u8])> {
        let (head, records) = body.split_at_checked(HEAD)?;
        let word = |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let unpacked = Self {
            sender: word(0),
            receiver: word(4),
            first: word(8),
            expects: word(12),
            epoch: u16::from_be_bytes([head[16], head[17]]),
            answer_me: head[18] & ANSWER_ME != 0,
            gap: head[18] & GAP != 0,
            trainers: head[19],
        };
        (unpacked.sender != 0).then_some((unpacked, records))
    }
}

/// The records of a packet; `None` when a length does not fit.
#[must_use]
pub fn records(mut bytes: &[u8]) -> Option<Vec<&[u8]>> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let (length, rest) = bytes.split_at_checked(2)?;
        let length = usize::from(u16::from_be_bytes([length[0], length[1]]));
        let (record, rest) = rest.split_at_checked(length)?;
        found.push(record);
        bytes = rest;
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn head_round_trip(sender in 1u32.., receiver: u32, first: u32, expects: u32, epoch: u16, answer_me: bool, gap: bool,
                           trainers: u8) {
            let head = Head { sender, receiver, first, expects, epoch, answer_me, gap, trainers };
            let mut out = [0u8; HEAD + 3];
            head.pack(&mut out);
            prop_assert_eq!(Head::unpack(&out), Some((head, &[0u8; 3][..])));
        }

        #[test]
        fn any_bytes_are_taken_or_refused(bytes: Vec<u8>) {
            let _ = Head::unpack(&bytes);
            if let Some(found) = records(&bytes) {
                prop_assert_eq!(found.iter().map(|r| r.len() + 2).sum::<usize>(), bytes.len());
            }
        }
    }
}

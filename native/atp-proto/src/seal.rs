// SPDX-License-Identifier: Apache-2.0
//! The seal of packets with rawFloat=1. Those are not summed but believed (raw gradients and results, notices, control),
//! and not every switch checks who sends them. So each ends with a tag that only the job's own pods can make: `SipHash`-2-4
//! (Aumasson, Bernstein, INDOCRYPT 2012) of everything before it, with the epoch's key. Summed packets have none: a switch
//! changes them on the way, and admits them.

use std::hash::Hasher;

use siphasher::sip::SipHasher24;

use crate::wire::TAG_BYTES;

/// Bytes of the key.
pub const KEY_BYTES: usize = 16;

/// Puts tags on packets and looks at them; without a key it does neither.
#[derive(Clone)]
pub struct Seal(Option<SipHasher24>);

impl Seal {
    #[must_use]
    pub fn new(key: Option<[u8; KEY_BYTES]>) -> Self {
        Self(key.map(|key| SipHasher24::new_with_key(&key)))
    }

    /// Bytes of a tag.
    #[must_use]
    pub fn bytes(&self) -> usize {
        if self.0.is_some() { TAG_BYTES } else { 0 }
    }

    fn tag(hasher: SipHasher24, data: &[u8]) -> [u8; TAG_BYTES] {
        let mut hasher = hasher;
        hasher.write(data);
        hasher.finish().to_be_bytes()
    }

    /// Put the tag behind the first `length` bytes; how many they are then.
    pub fn close(&self, buffer: &mut [u8], length: usize) -> usize {
        let Some(hasher) = self.0 else { return length };
        let tag = Self::tag(hasher, &buffer[..length]);
        buffer[length..length + TAG_BYTES].copy_from_slice(&tag);
        length + TAG_BYTES
    }

    /// The packet without its tag; `None` when nobody of this job made it, or not in this epoch.
    #[must_use]
    pub fn open<'a>(&self, data: &'a [u8]) -> Option<&'a [u8]> {
        let Some(hasher) = self.0 else { return Some(data) };
        let (packet, tag) = data.split_last_chunk::<TAG_BYTES>()?;
        (Self::tag(hasher, packet) == *tag).then_some(packet)
    }
}

/// Keys are not for logs.
impl std::fmt::Debug for Seal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_some() { "Seal(..)" } else { "Seal(none)" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_papers_vector() {
        // SipHash paper, appendix A: key 00..0f, input 00..0e.
        let key: [u8; KEY_BYTES] = std::array::from_fn(|i| i as u8);
        let mut buffer: Vec<u8> = (0..15).collect();
        buffer.resize(15 + TAG_BYTES, 0);
        assert_eq!(Seal::new(Some(key)).close(&mut buffer, 15), 23);
        assert_eq!(buffer[15..], 0xa129_ca61_49be_45e5_u64.to_be_bytes());
    }

    proptest! {
        #[test]
        fn what_was_closed_opens_and_nothing_else(
            key: [u8; KEY_BYTES], other: [u8; KEY_BYTES], data: Vec<u8>, at: prop::sample::Index, bit in 0u8..8
        ) {
            let seal = Seal::new(Some(key));
            let mut buffer = data.clone();
            buffer.resize(data.len() + TAG_BYTES, 0);
            let length = seal.close(&mut buffer, data.len());
            prop_assert_eq!(seal.open(&buffer[..length]), Some(&data[..]));
            prop_assert_eq!(seal.open(&data), None);
            if other != key {
                prop_assert_eq!(Seal::new(Some(other)).open(&buffer), None);
            }
            let at = at.index(buffer.len());
            buffer[at] ^= 1 << bit;
            prop_assert_eq!(seal.open(&buffer), None);
        }
    }

    #[test]
    fn without_a_key_packets_stay_as_they_are() {
        let seal = Seal::new(None);
        assert_eq!(seal.close(&mut [1, 2, 3], 3), 3);
        assert_eq!(seal.open(&[1, 2, 3]), Some(&[1, 2, 3][..]));
    }

    #[test]
    fn keys_are_not_printed() {
        assert_eq!(format!("{:?}", Seal::new(Some([7; KEY_BYTES]))), "Seal(..)");
    }
}

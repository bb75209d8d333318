// SPDX-License-Identifier: Apache-2.0
//! Frames of the session protocol (docs/session.md): a length of four bytes, big endian, then the body. A body is JSON, or
//! binary, which its first byte tells.

use atp_proto::fixed::Dtype;
use atp_proto::op::Kind;

/// Largest body.
pub const FRAME_BYTES_MAX: usize = 1 << 20;
/// First byte of binary bodies.
pub const SUBMIT: u8 = 1;
pub const DONE: u8 = 2;
/// First byte of JSON bodies.
pub const JSON: u8 = b'{';
pub const SUBMIT_BYTES: usize = 64;
const LENGTH_BYTES: usize = 4;
const DONE_HEAD: usize = 8;

/// Cuts a stream of bytes into bodies.
#[derive(Default)]
pub struct Splitter {
    bytes: Vec<u8>,
    /// Bytes that were given out already.
    taken: usize,
}

impl Splitter {
    /// More of the stream.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.taken);
        self.taken = 0;
        self.bytes.extend_from_slice(bytes);
    }

    /// The next body that is complete.
    ///
    /// # Errors
    /// When the stream is none of frames; nothing can follow.
    pub fn next_body(&mut self) -> Result<Option<&[u8]>, String> {
        let rest = &self.bytes[self.taken..];
        let Some(head) = rest.first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
        let length = u32::from_be_bytes(*head) as usize;
        if length > FRAME_BYTES_MAX {
            return Err(format!("a frame of {length} bytes exceeds {FRAME_BYTES_MAX}"));
        }
        if length == 0 {
            return Err("a frame is empty".to_owned());
        }
        let end = self.taken + LENGTH_BYTES + length;
        if self.bytes.len() < end {
            return Ok(None);
        }
        let begin = self.taken + LENGTH_BYTES;
        self.taken = end;
        Ok(Some(&self.bytes[begin..end]))
    }

    /// Whether the stream ended inside a frame, if it ended now.
    #[must_use]
    pub fn inside_frame(&self) -> bool {
        self.bytes.len() > self.taken
    }
}

/// One part of an operation, as a client submits it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Submit {
    pub dtype: Dtype,
    pub kind: Kind,
    pub segment: u32,
    /// The client's handle.
    pub op: u64,
    pub group: u64,
    /// Of the operation in its group.
    pub number: u64,
    /// Elements of the whole tensor.
    pub total: u64,
    /// First element of this part.
    pub begin: u64,
    /// Bytes in the segment.
    pub offset: u64,
    /// Elements of this part.
    pub count: u32,
}

const DTYPES: [Dtype; 4] = [Dtype::Float32, Dtype::Float16, Dtype::Bfloat16, Dtype::Int32];

impl Submit {
    /// # Errors
    /// When the body is none; the text says why.
    pub fn decode(body: &[u8]) -> Result<Self, String> {
        let Ok(body) = <&[u8; SUBMIT_BYTES]>::try_from(body) else {
            return Err(format!("submit: the body has {} bytes, not {SUBMIT_BYTES}", body.len()));
        };
        let word = |at: usize| u32::from_le_bytes([body[at], body[at + 1], body[at + 2], body[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let Some(dtype) = DTYPES.get(usize::from(body[1])).copied() else {
            return Err(format!("submit: dtype must be 0..3, not {}", body[1]));
        };
        let kind = match body[2] {
            0 => Kind::Sum,
            1 => Kind::Mean,
            other => return Err(format!("submit: kind must be 0 (sum) or 1 (mean), not {other}")),
        };
        if kind == Kind::Mean && dtype == Dtype::Int32 {
            return Err("submit: mean of int32 is not defined".to_owned());
        }
        Ok(Self {
            dtype,
            kind,
            segment: word(4),
            op: long(8),
            group: long(16),
            number: long(24),
            total: long(32),
            begin: long(40),
            offset: long(48),
            count: word(56),
        })
    }

    /// The opposite of `decode`.
    #[must_use]
    pub fn encode(&self) -> [u8; SUBMIT_BYTES] {
        let mut body = [0; SUBMIT_BYTES];
        body[0] = SUBMIT;
        body[1] = DTYPES.iter().position(|d| *d == self.dtype).unwrap_or(0) as u8;
        body[2] = u8::from(self.kind == Kind::Mean);
        body[4..8].copy_from_slice(&self.segment.to_le_bytes());
        let longs = [self.op, self.group, self.number, self.total, self.begin, self.offset];
        for (at, value) in (8..).step_by(8).zip(longs) {
            body[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        body[56..60].copy_from_slice(&self.count.to_le_bytes());
        body
    }
}

/// Append a frame with this body.
pub fn push_body(out: &mut Vec<u8>, body: &[u8]) {
    out.extend_from_slice(&(body.len() as u32).to_be_bytes());
    out.extend_from_slice(body);
}

/// Append frames that say that these operations are done: as few as there can be.
pub fn push_done(out: &mut Vec<u8>, ops: &[u64]) {
    for chunk in ops.chunks((FRAME_BYTES_MAX - DONE_HEAD) / 8) {
        out.extend_from_slice(&((DONE_HEAD + 8 * chunk.len()) as u32).to_be_bytes());
        out.extend_from_slice(&[DONE, 0, 0, 0, 0, 0, 0, 0]);
        for op in chunk {
            out.extend_from_slice(&op.to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cut(splitter: &mut Splitter) -> Result<Vec<Vec<u8>>, String> {
        let mut bodies = Vec::new();
        while let Some(body) = splitter.next_body()? {
            bodies.push(body.to_vec());
        }
        Ok(bodies)
    }

    proptest! {
        #[test]
        fn bodies_come_out_as_they_went_in(
            bodies in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..40), 0..8),
            pieces in prop::collection::vec(1usize..30, 1..60),
        ) {
            let mut stream = Vec::new();
            for body in &bodies {
                push_body(&mut stream, body);
            }
            let mut splitter = Splitter::default();
            let mut out = Vec::new();
            let mut rest = &stream[..];
            for piece in pieces.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (now, later) = rest.split_at(rest.len().min(*piece));
                splitter.push(now);
                out.extend(cut(&mut splitter).unwrap());
                rest = later;
            }
            prop_assert_eq!(out, bodies);
            prop_assert!(!splitter.inside_frame());
        }

        #[test]
        fn any_bytes_are_bodies_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut splitter = Splitter::default();
            splitter.push(&bytes);
            let _ = cut(&mut splitter);
            let _ = Submit::decode(&bytes);
        }

        #[test]
        fn submit_round_trip(
            d in 0usize..4, mean: bool, segment: u32, op: u64, group: u64, number: u64, total: u64, begin: u64,
            offset: u64, count: u32,
        ) {
            let dtype = DTYPES[d];
            let kind = if mean && dtype != Dtype::Int32 { Kind::Mean } else { Kind::Sum };
            let x = Submit { dtype, kind, segment, op, group, number, total, begin, offset, count };
            prop_assert_eq!(Submit::decode(&x.encode()), Ok(x));
        }
    }

    #[test]
    fn lengths_are_bounded() {
        let mut splitter = Splitter::default();
        splitter.push(&(FRAME_BYTES_MAX as u32 + 1).to_be_bytes());
        assert!(splitter.next_body().unwrap_err().contains("exceeds 1048576"));
        let mut splitter = Splitter::default();
        splitter.push(&[0; 4]);
        assert!(splitter.next_body().is_err());
        let mut splitter = Splitter::default();
        splitter.push(&[0, 0]);
        assert_eq!(splitter.next_body(), Ok(None));
        assert!(splitter.inside_frame());
    }

    #[test]
    fn many_operations_that_are_done_fit_in_frames() {
        let ops: Vec<u64> = (0..200_000).collect();
        let mut out = Vec::new();
        push_done(&mut out, &ops);
        let mut splitter = Splitter::default();
        splitter.push(&out);
        let bodies = cut(&mut splitter).unwrap();
        assert_eq!(bodies.len(), 2);
        let got: Vec<u64> =
            bodies.iter().flat_map(|b| b[8..].chunks(8)).map(|c| u64::from_le_bytes(c.try_into().unwrap())).collect();
        assert_eq!(got, ops);
    }
}

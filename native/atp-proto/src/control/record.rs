// SPDX-License-Identifier: Apache-2.0
//! What worker and coordinator say to each other. Big endian; the first byte is the kind.

use crate::failure::Code;
use crate::fixed::Dtype;
use crate::op::Kind;

/// What all ranks must agree on about an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    pub kind: Kind,
    pub dtype: Dtype,
    /// Elements of the whole tensor.
    pub total: u64,
}

impl Shape {
    /// `1024 float32 elements (mean)`.
    #[must_use]
    pub fn text(&self) -> String {
        let kind = if self.kind == Kind::Mean { " (mean)" } else { "" };
        format!("{} {} elements{kind}", self.total, self.dtype.name())
    }

    fn code(&self) -> u8 {
        self.dtype.number() << 1 | u8::from(self.kind == Kind::Mean)
    }

    fn from_code(code: u8, total: u64) -> Option<Self> {
        let kind = if code & 1 == 1 { Kind::Mean } else { Kind::Sum };
        Some(Self { kind, dtype: Dtype::from_number(code >> 1)?, total })
    }
}

/// A part of an operation that a worker has ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Announce<'a> {
    pub group: u64,
    /// Of the operation in the group.
    pub number: u64,
    pub shape: Shape,
    /// First element of the part.
    pub begin: u64,
    /// Elements of the part.
    pub count: u32,
    /// Of the largest finite magnitude (`fixed::largest_exponent`).
    pub exponent: u8,
    /// The elements in wire order, when the coordinator is to sum them.
    pub inline: &'a [u8],
}

/// From a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request<'a> {
    Announce(Announce<'a>),
    /// This rank gives the group up.
    Abort {
        group: u64,
        code: Code,
        text: &'a str,
    },
    /// This rank will not use the group any more.
    Leave {
        group: u64,
    },
}

/// From the coordinator. All workers get the grants of all groups in one order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict<'a> {
    /// The oldest announced part of the group runs now, with the scale that `exponent` leads to.
    Grant { group: u64, number: u32, exponent: u8 },
    /// The oldest announced part of the group, summed.
    Sum { group: u64, number: u32, values: &'a [u8] },
    /// The ranks asked for different things: the operation fails, as a whole.
    Mismatch { group: u64, number: u64, known: Vec<(u16, Shape)> },
    /// Nothing of the group goes on.
    Broken { group: u64, code: Code, text: &'a str },
    /// Nothing goes on.
    Lost { code: Code, text: &'a str },
}

const ANNOUNCE: u8 = 1;
const ABORT: u8 = 2;
const LEAVE: u8 = 3;
const GRANT: u8 = 16;
const SUM: u8 = 17;
const MISMATCH: u8 = 18;
const BROKEN: u8 = 19;
const LOST: u8 = 20;

/// Bytes of a text; a longer one is cut.
const TEXT_MAX: usize = 600;

/// `text`, cut at a character so that it fits a record.
#[must_use]
pub fn cut(text: &str) -> &str {
    let mut end = text.len().min(TEXT_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Reads fields from the front of a record.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }
    fn u8(&mut self) -> Option<u8> {
        self.take::<1>().map(|b| b[0])
    }
    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_be_bytes)
    }
    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_be_bytes)
    }
    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_be_bytes)
    }
    fn text(&mut self) -> Option<&'a str> {
        std::str::from_utf8(std::mem::take(&mut self.0)).ok()
    }
    fn end<T>(&self, value: T) -> Option<T> {
        self.0.is_empty().then_some(value)
    }
}

impl<'a> Request<'a> {
    #[must_use]
    pub fn pack(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(40);
        match self {
            Self::Announce(a) => {
                out.push(ANNOUNCE);
                out.extend(a.group.to_be_bytes());
                out.extend(a.number.to_be_bytes());
                out.extend(a.shape.total.to_be_bytes());
                out.extend(a.begin.to_be_bytes());
                out.extend(a.count.to_be_bytes());
                out.push(a.shape.code());
                out.push(a.exponent);
                out.extend(a.inline);
            }
            Self::Abort { group, code, text } => {
                out.push(ABORT);
                out.extend(group.to_be_bytes());
                out.push(code.number());
                out.extend(cut(text).as_bytes());
            }
            Self::Leave { group } => {
                out.push(LEAVE);
                out.extend(group.to_be_bytes());
            }
        }
        out
    }

    /// `None` when the bytes are no request.
    #[must_use]
    pub fn unpack(bytes: &'a [u8]) -> Option<Self> {
        let mut r = Reader(bytes);
        match r.u8()? {
            ANNOUNCE => {
                let (group, number, total, begin, count) = (r.u64()?, r.u64()?, r.u64()?, r.u64()?, r.u32()?);
                let (code, exponent) = (r.u8()?, r.u8()?);
                let shape = Shape::from_code(code, total)?;
                let inline = r.0;
                let bytes = u64::from(count) * shape.dtype.size() as u64;
                let whole =
                    (count > 0 || total == 0) && begin.checked_add(u64::from(count)).is_some_and(|end| end <= total);
                let fits = inline.is_empty() || inline.len() as u64 == bytes;
                let legal = shape.kind == Kind::Sum || shape.dtype != Dtype::Int32;
                (whole && fits && legal).then_some(Self::Announce(Announce {
                    group,
                    number,
                    shape,
                    begin,
                    count,
                    exponent,
                    inline,
                }))
            }
            ABORT => Some(Self::Abort { group: r.u64()?, code: Code::from_number(r.u8()?), text: r.text()? }),
            LEAVE => {
                let group = r.u64()?;
                r.end(Self::Leave { group })
            }
            _ => None,
        }
    }
}

impl<'a> Verdict<'a> {
    #[must_use]
    pub fn pack(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(32);
        match self {
            Self::Grant { group, number, exponent } => {
                out.push(GRANT);
                out.extend(group.to_be_bytes());
                out.extend(number.to_be_bytes());
                out.push(*exponent);
            }
            Self::Sum { group, number, values } => {
                out.push(SUM);
                out.extend(group.to_be_bytes());
                out.extend(number.to_be_bytes());
                out.extend(*values);
            }
            Self::Mismatch { group, number, known } => {
                out.push(MISMATCH);
                out.extend(group.to_be_bytes());
                out.extend(number.to_be_bytes());
                for (rank, shape) in known {
                    out.extend(rank.to_be_bytes());
                    out.push(shape.code());
                    out.extend(shape.total.to_be_bytes());
                }
            }
            Self::Broken { group, code, text } => {
                out.push(BROKEN);
                out.extend(group.to_be_bytes());
                out.push(code.number());
                out.extend(cut(text).as_bytes());
            }
            Self::Lost { code, text } => {
                out.push(LOST);
                out.push(code.number());
                out.extend(cut(text).as_bytes());
            }
        }
        out
    }

    /// `None` when the bytes are no verdict.
    #[must_use]
    pub fn unpack(bytes: &'a [u8]) -> Option<Self> {
        let mut r = Reader(bytes);
        match r.u8()? {
            GRANT => {
                let verdict = Self::Grant { group: r.u64()?, number: r.u32()?, exponent: r.u8()? };
                r.end(verdict)
            }
            SUM => Some(Self::Sum { group: r.u64()?, number: r.u32()?, values: r.0 }),
            MISMATCH => {
                let (group, number) = (r.u64()?, r.u64()?);
                let mut known = Vec::new();
                while !r.0.is_empty() {
                    let (rank, code, total) = (r.u16()?, r.u8()?, r.u64()?);
                    known.push((rank, Shape::from_code(code, total)?));
                }
                Some(Self::Mismatch { group, number, known })
            }
            BROKEN => Some(Self::Broken { group: r.u64()?, code: Code::from_number(r.u8()?), text: r.text()? }),
            LOST => Some(Self::Lost { code: Code::from_number(r.u8()?), text: r.text()? }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shape(code: u8, total: u64) -> Shape {
        Shape::from_code(code % 7, total).expect("a shape")
    }

    proptest! {
        #[test]
        fn requests_round_trip(group: u64, number: u64, begin in 0u64..1 << 40, count in 1u32..60, code in 0u8..7, exponent: u8,
                               inline: bool, text in ".{0,300}") {
            let shape = shape(code, begin + 100);
            let bytes = vec![7u8; count as usize * shape.dtype.size()];
            let a = Announce { group, number, shape, begin, count, exponent, inline: if inline { &bytes } else { &[] } };
            for request in [Request::Announce(a), Request::Abort { group, code: Code::Timeout, text: cut(&text) },
                            Request::Leave { group }] {
                let packed = request.pack();
                prop_assert!(packed.len() <= super::super::packet::RECORD_MAX);
                prop_assert_eq!(Request::unpack(&packed), Some(request));
            }
        }

        #[test]
        fn verdicts_round_trip(group: u64, number: u32, exponent: u8, values: Vec<u8>, ranks in 0u16..9, text in ".{0,300}") {
            let known: Vec<(u16, Shape)> = (0..ranks).map(|r| (r, shape(r as u8, u64::from(r) << 33))).collect();
            let text = cut(&text);
            for verdict in [Verdict::Grant { group, number, exponent }, Verdict::Sum { group, number, values: &values },
                            Verdict::Mismatch { group, number: u64::from(number) << 20, known },
                            Verdict::Broken { group, code: Code::PeerGone, text }, Verdict::Lost { code: Code::Stalled, text }] {
                let packed = verdict.pack();
                prop_assert_eq!(Verdict::unpack(&packed), Some(verdict.clone()));
            }
        }

        #[test]
        fn any_bytes_are_taken_or_refused(bytes: Vec<u8>) {
            let _ = (Request::unpack(&bytes), Verdict::unpack(&bytes));
        }
    }

    #[test]
    fn texts_are_cut_at_characters() {
        let long = "ä".repeat(1000);
        assert_eq!(cut(&long).len(), TEXT_MAX);
        assert_eq!(cut("a"), "a");
    }
}

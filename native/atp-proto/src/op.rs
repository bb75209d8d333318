// SPDX-License-Identifier: Apache-2.0
//! Operations and their descriptors.
//!
//! Every operation starts with descriptor packets: an int32 vector in which each rank fills three words of its own and
//! leaves the others 0. The sum tells every rank what all ranks asked for. Each word is below 2^30 and has one
//! non-zero term, so no sum can saturate.
//!
//! The third word also has the incarnation, a number that each start of a worker draws. A worker that starts again under
//! the identity of an earlier one finds, in its own words of the sum, that the answer is to the earlier one: the parameter
//! server's cache would hand it the old results as if they were its own.

use crate::fixed::Dtype;

/// Memory of one operation, owned by the caller until the operation ends. Source and target may be the same memory.
pub trait Memory: Send {
    /// The gradient: count * dtype size bytes in host order.
    fn source(&self) -> &[u8];
    /// Where the result goes; the same length.
    fn target(&mut self) -> &mut [u8];
}

/// In place in one vector.
impl Memory for Vec<u8> {
    fn source(&self) -> &[u8] {
        self
    }
    fn target(&mut self) -> &mut [u8] {
        self
    }
}

/// What the result is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    Sum,
    Mean,
}

impl Kind {
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "sum" => Some(Self::Sum),
            "mean" => Some(Self::Mean),
            _ => None,
        }
    }

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Mean => "mean",
        }
    }
}

/// Words that a rank puts into the descriptor.
pub const WORDS_PER_RANK: usize = 3;

/// Elements that one operation may have.
pub const COUNT_MAX: u64 = 1 << 48;

/// What one rank asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// 23 low bits of the caller's operation number.
    pub op: u32,
    pub kind: Kind,
    pub dtype: Dtype,
    pub count: u64,
    /// Of the worker that asks, below `INCARNATIONS`.
    pub incarnation: u32,
}

/// Numbers that a worker's start draws one of.
pub const INCARNATIONS: u32 = 1 << 12;

const OP_MASK: u32 = (1 << 23) - 1;
const LOW30: u64 = (1 << 30) - 1;
/// Bits of the third word that the count has.
const HIGH_BITS: u32 = 18;
const HIGH_MASK: u32 = (1 << HIGH_BITS) - 1;

impl Descriptor {
    #[must_use]
    pub fn new(op_id: u64, kind: Kind, dtype: Dtype, count: u64) -> Self {
        Self { op: (op_id & u64::from(OP_MASK)) as u32, kind, dtype, count, incarnation: 0 }
    }

    #[must_use]
    pub fn of_incarnation(self, incarnation: u32) -> Self {
        Self { incarnation: incarnation % INCARNATIONS, ..self }
    }

    /// The three words.
    #[must_use]
    pub fn words(&self) -> [i32; WORDS_PER_RANK] {
        let dtype = u32::from(self.dtype.number());
        let code = 1 + 4 * u32::from(self.kind == Kind::Mean) + dtype;
        let high = (self.count >> 30) as u32 & HIGH_MASK | self.incarnation << HIGH_BITS;
        [(self.op << 7 | code) as i32, (self.count & LOW30) as i32, high as i32]
    }

    /// The opposite of `words`; `None` when they are no descriptor.
    #[must_use]
    pub fn from_words(words: &[i32]) -> Option<Self> {
        let &[head, low, high] = words else { return None };
        if head <= 0 || low < 0 || high < 0 {
            return None;
        }
        let code = (head as u32 & 0x7f).checked_sub(1)?;
        let kind = match code / 4 {
            0 => Kind::Sum,
            1 => Kind::Mean,
            _ => return None,
        };
        Some(Self {
            op: head as u32 >> 7,
            kind,
            dtype: Dtype::from_number((code % 4) as u8)?,
            count: low as u64 | u64::from(high as u32 & HIGH_MASK) << 30,
            incarnation: high as u32 >> HIGH_BITS,
        })
    }

    fn text(&self, with_kind: bool) -> String {
        let kind = if with_kind { format!(" ({})", self.kind.name()) } else { String::new() };
        format!("{} {} elements{kind}", self.count, self.dtype.name())
    }
}

/// Ranks that one error text lists.
const LISTED: usize = 8;

/// Why an operation cannot go on after its descriptors came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The ranks asked for different things: this operation fails at all of them, the next may go well. The text names
    /// the ranks that differ and what they asked for.
    Mismatch(String),
    /// The answer is not to this process: nothing that follows can be right.
    NotOurs(String),
}

/// Compare what all ranks asked for (`sum`: three words a rank) with what this rank asked for.
///
/// # Errors
/// See `Refusal`.
pub fn check_descriptors(own: &Descriptor, rank: u16, sum: &[i32]) -> Result<(), Refusal> {
    let with_kind =
        sum.chunks_exact(WORDS_PER_RANK).any(|words| Descriptor::from_words(words).is_some_and(|d| d.kind != own.kind));
    let mut differ = Vec::new();
    let mut more = 0usize;
    for (r, words) in sum.chunks_exact(WORDS_PER_RANK).enumerate() {
        let theirs = Descriptor::from_words(words);
        if r == usize::from(rank) && theirs != Some(*own) {
            if theirs.is_some_and(|d| d.incarnation != own.incarnation) {
                return Err(Refusal::NotOurs(format!(
                    "all_reduce #{}: the answer is to another process that ran, or runs, as rank {rank} of the same job ID \
                     and epoch: a worker that starts again cannot join the epoch of the one before; restart the job to \
                     start a new epoch",
                    own.op
                )));
            }
            return Err(Refusal::Mismatch(format!(
                "all_reduce #{}: the descriptor came back damaged (sent {:?}, got {words:?}); two jobs or epochs use the \
                 same job ID, or a switch changes packets",
                own.op,
                own.words()
            )));
        }
        if theirs.is_some_and(|d| d.of_incarnation(own.incarnation) == *own) {
            continue;
        }
        if differ.len() == LISTED {
            more += 1;
            continue;
        }
        differ.push(match theirs {
            None => format!("rank {r} sent no valid descriptor ({words:?})"),
            Some(d) if d.op != own.op => format!("rank {r} is at operation #{} with {}", d.op, d.text(with_kind)),
            Some(d) => format!("rank {r} has {}", d.text(with_kind)),
        });
    }
    if differ.is_empty() {
        return Ok(());
    }
    let more = if more > 0 { format!(", and {more} more ranks differ") } else { String::new() };
    Err(Refusal::Mismatch(format!(
        "all_reduce #{}: {}{more}, this rank ({rank}) has {}: all ranks must call the same operations in the same order, \
         with the same number of elements, dtype and reduction",
        own.op,
        differ.join(", "),
        own.text(with_kind)
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn words_round_trip(op: u64, mean: bool, d in 0u8..4, count in 0..COUNT_MAX, start: u32) {
            let kind = if mean { Kind::Mean } else { Kind::Sum };
            let x = Descriptor::new(op, kind, Dtype::from_number(d).unwrap(), count).of_incarnation(start);
            let words = x.words();
            prop_assert!(words.iter().all(|w| (0..1 << 30).contains(w)));
            prop_assert_eq!(Descriptor::from_words(&words), Some(x));
        }
    }

    #[test]
    fn mismatch_names_the_rank() {
        let own = Descriptor::new(12, Kind::Sum, Dtype::Float32, 1024);
        let other = Descriptor::new(12, Kind::Sum, Dtype::Float32, 1000);
        let sum: Vec<i32> = [own.words(), own.words(), other.words()].concat();
        let Err(Refusal::Mismatch(text)) = check_descriptors(&own, 0, &sum) else { panic!("a mismatch") };
        assert!(
            text.starts_with(
                "all_reduce #12: rank 2 has 1000 float32 elements, this rank (0) has 1024 float32 elements: "
            ),
            "{text}"
        );
        assert!(!text.contains("rank 1 "), "{text}");
        let Err(Refusal::Mismatch(text)) = check_descriptors(&other, 1, &sum) else { panic!("a mismatch") };
        assert!(text.contains("damaged"));
    }

    #[test]
    fn an_answer_to_an_earlier_process_is_not_ours() {
        let own = Descriptor::new(1, Kind::Sum, Dtype::Float32, 100).of_incarnation(5);
        let earlier = own.of_incarnation(4);
        let sum: Vec<i32> = [own.words(), earlier.words()].concat();
        assert_eq!(check_descriptors(&own, 0, &sum), Ok(()), "the starts of others do not matter");
        assert!(matches!(check_descriptors(&own, 1, &sum), Err(Refusal::NotOurs(_))));
    }
}

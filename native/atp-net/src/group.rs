// SPDX-License-Identifier: Apache-2.0
//! The operations of one group, as one session submits them: the order of their parts, and how each ends.

use std::collections::VecDeque;

use atp_proto::failure::Code;
use atp_proto::fixed::Dtype;
use atp_proto::op::Kind;
use atp_proto::wire::PART_BYTES;

use crate::frame::Submit;

struct Operation {
    /// Parts that were submitted and have not ended.
    outstanding: u32,
    /// Every part was submitted.
    complete: bool,
    failed: bool,
    dtype: Dtype,
    kind: Kind,
    total: u64,
    /// First element of the next part.
    next: u64,
}

impl Operation {
    fn new(s: &Submit) -> Self {
        Self { outstanding: 0, complete: false, failed: false, dtype: s.dtype, kind: s.kind, total: s.total, next: 0 }
    }
}

/// How an operation ended.
pub type Ended = Result<(), Code>;

/// One group of one session.
#[derive(Default)]
pub struct Group {
    /// Number of the first of `operations`.
    first: u64,
    operations: VecDeque<Operation>,
    outstanding: u64,
    /// The client has left it; it goes with its last part.
    left: bool,
}

impl Group {
    /// Take a part.
    ///
    /// # Errors
    /// When it is out of order or cut wrongly.
    pub fn submit(&mut self, s: &Submit) -> Result<(), String> {
        if self.left {
            return Err(format!("submit: the client has left group {:#x}", s.group));
        }
        let next = self.first + self.operations.len() as u64;
        // After a failure the client need not send the other parts.
        let may_begin = self.operations.back().is_none_or(|o| o.complete || o.failed);
        let continues = s.number.checked_add(1) == Some(next) && self.operations.back().is_some_and(|o| !o.complete);
        let begins = may_begin && s.number == next;
        if !continues && !begins {
            let expected = if may_begin { next } else { next - 1 };
            return Err(format!(
                "submit: operation {} of group {:#x} is out of order: number {expected} was expected",
                s.number, s.group
            ));
        }
        let mut fresh = None;
        let operation = match self.operations.back_mut() {
            Some(operation) if continues => operation,
            _ => fresh.insert(Operation::new(s)),
        };
        if (operation.dtype, operation.kind, operation.total) != (s.dtype, s.kind, s.total) {
            return Err(format!(
                "submit: parts of operation {} of group {:#x} differ in total, dtype or kind",
                s.number, s.group
            ));
        }
        let room = (PART_BYTES / s.dtype.size()) as u64;
        let count = room.min(s.total.saturating_sub(operation.next));
        if (s.begin, u64::from(s.count)) != (operation.next, count) {
            return Err(format!(
                "submit: elements {} to {} of operation {} of group {:#x}: {} to {} were expected (parts have {room} \
                 elements, the last one has the rest)",
                s.begin,
                s.begin.saturating_add(s.count.into()),
                s.number,
                s.group,
                operation.next,
                operation.next + count,
            ));
        }
        operation.next += count;
        operation.complete = operation.next == operation.total;
        operation.outstanding += 1;
        self.outstanding += 1;
        self.operations.extend(fresh);
        Ok(())
    }

    /// A part of operation `number` ended. Some: so did the operation, which is said once.
    pub fn ended(&mut self, number: u64, failure: Option<Code>) -> Option<Ended> {
        let operation = self.operations.get_mut(usize::try_from(number.checked_sub(self.first)?).ok()?)?;
        operation.outstanding = operation.outstanding.saturating_sub(1);
        self.outstanding = self.outstanding.saturating_sub(1);
        let first_failure = failure.filter(|_| !operation.failed);
        operation.failed |= failure.is_some();
        let done = operation.complete && operation.outstanding == 0 && !operation.failed;
        self.forget();
        match first_failure {
            Some(code) => Some(Err(code)),
            None => done.then_some(Ok(())),
        }
    }

    /// Drop operations that have ended. The last one stays while it has parts to come.
    fn forget(&mut self) {
        while let Some(operation) = self.operations.front() {
            if operation.outstanding > 0 || !(operation.complete || self.operations.len() > 1) {
                return;
            }
            self.operations.pop_front();
            self.first += 1;
        }
    }

    /// Operations that have not ended and were not said to have failed.
    #[must_use]
    pub fn open(&self) -> usize {
        self.operations.iter().filter(|o| !o.failed).count()
    }

    pub fn leave(&mut self) {
        self.left = true;
    }

    /// Whether nothing more will come of it.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.left && self.outstanding == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: u64 = PART_BYTES as u64 / 4;

    fn part(number: u64, total: u64, begin: u64, count: u64) -> Submit {
        Submit {
            dtype: Dtype::Float32,
            kind: Kind::Sum,
            segment: 0,
            op: 0,
            group: 7,
            number,
            total,
            begin,
            offset: 0,
            count: count as u32,
        }
    }

    #[test]
    fn an_operation_ends_with_its_last_part() {
        let mut group = Group::default();
        group.submit(&part(0, 2 * ROOM + 1, 0, ROOM)).unwrap();
        assert_eq!(group.ended(0, None), None);
        group.submit(&part(0, 2 * ROOM + 1, ROOM, ROOM)).unwrap();
        group.submit(&part(0, 2 * ROOM + 1, 2 * ROOM, 1)).unwrap();
        group.submit(&part(1, 0, 0, 0)).unwrap();
        assert_eq!(group.ended(1, None), Some(Ok(())));
        assert_eq!(group.ended(0, None), None);
        assert_eq!(group.ended(0, None), Some(Ok(())));
        assert_eq!((group.first, group.operations.len(), group.outstanding), (2, 0, 0));
    }

    #[test]
    fn a_failure_is_said_once_and_the_rest_may_be_left_out() {
        let mut group = Group::default();
        for begin in [0, ROOM] {
            group.submit(&part(0, 3 * ROOM, begin, ROOM)).unwrap();
        }
        assert!(group.submit(&part(1, 1, 0, 1)).unwrap_err().contains("number 0 was expected"));
        assert_eq!(group.ended(0, Some(Code::Mismatch)), Some(Err(Code::Mismatch)));
        assert_eq!(group.ended(0, Some(Code::Mismatch)), None);
        assert_eq!(group.open(), 0);
        group.submit(&part(0, 3 * ROOM, 2 * ROOM, ROOM)).unwrap();
        assert_eq!(group.ended(0, Some(Code::Mismatch)), None);
        group.submit(&part(1, 3 * ROOM, 0, ROOM)).unwrap();
        assert_eq!(group.ended(1, Some(Code::Mismatch)), Some(Err(Code::Mismatch)));
        group.submit(&part(2, 1, 0, 1)).unwrap();
        assert_eq!(group.ended(2, None), Some(Ok(())));
    }

    #[test]
    fn parts_come_in_order_and_cut_alike() {
        let mut group = Group::default();
        for wrong in [
            part(1, 1, 0, 1),
            part(u64::MAX, 1, 0, 1),
            part(0, 2 * ROOM, ROOM, ROOM),
            part(0, 2 * ROOM, 0, ROOM - 1),
            part(0, 10, 0, 11),
            part(0, 10, 0, 0),
            part(0, 0, 0, 1),
            part(0, 10, u64::MAX, 10),
        ] {
            assert!(group.submit(&wrong).is_err(), "{wrong:?}");
        }
        group.submit(&part(0, 2 * ROOM, 0, ROOM)).unwrap();
        assert!(group.submit(&part(0, 2 * ROOM, 0, ROOM)).is_err(), "again");
        assert!(group.submit(&part(0, 3 * ROOM, ROOM, ROOM)).is_err(), "another total");
        group.submit(&part(0, 2 * ROOM, ROOM, ROOM)).unwrap();
        group.leave();
        assert!(group.submit(&part(1, 1, 0, 1)).is_err());
        group.ended(0, None);
        assert!(!group.is_over());
        group.ended(0, None);
        assert!(group.is_over());
        assert_eq!(group.ended(5, None), None);
    }
}

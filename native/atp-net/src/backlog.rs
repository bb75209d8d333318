// SPDX-License-Identifier: Apache-2.0
//! Parts that wait in this sidecar, because the job has enough of this rank's already.
//!
//! The coordinator takes only so many announcements of a rank: beyond that it takes the rank's sidecar for broken. What a
//! trainer submits beyond `ANNOUNCED_MAX` parts waits here, but for the first part of each group: the other ranks may need
//! just that one to go on.

use std::collections::{HashMap, VecDeque};

use atp_proto::member::Part;

/// Parts that are announced and have not ended, of all groups.
const ANNOUNCED_MAX: usize = 1 << 14;
/// The same with the first parts of groups; below what the coordinator takes.
const ANNOUNCED_LIMIT: usize = 60_000;

#[derive(Default)]
struct Queue {
    announced: usize,
    held: VecDeque<Part>,
}

/// See the module.
#[derive(Default)]
pub struct Backlog {
    groups: HashMap<u64, Queue>,
    announced: usize,
    /// Groups with held parts, the next to go on first.
    turn: VecDeque<u64>,
}

impl Backlog {
    fn may_go(&self, announced_of_group: usize) -> bool {
        self.announced < ANNOUNCED_MAX || announced_of_group == 0 && self.announced < ANNOUNCED_LIMIT
    }

    /// A part to be submitted now, or later.
    pub fn push(&mut self, part: Part) -> Option<Part> {
        let number = part.group;
        let known = self.groups.get(&number).map_or((0, false), |q| (q.announced, !q.held.is_empty()));
        let go = !known.1 && self.may_go(known.0);
        let queue = self.groups.entry(number).or_default();
        if go {
            queue.announced += 1;
            self.announced += 1;
            return Some(part);
        }
        if queue.held.is_empty() {
            self.turn.push_back(number);
        }
        queue.held.push_back(part);
        None
    }

    /// A part that was submitted has ended. Then ask `next`.
    pub fn ended(&mut self, group: u64) {
        self.announced = self.announced.saturating_sub(1);
        if let Some(queue) = self.groups.get_mut(&group) {
            queue.announced = queue.announced.saturating_sub(1);
            if queue.announced == 0 && queue.held.is_empty() {
                self.groups.remove(&group);
            }
        }
    }

    /// A part that waited and can be submitted now.
    pub fn next(&mut self) -> Option<Part> {
        for _ in 0..self.turn.len() {
            let number = *self.turn.front()?;
            let announced = self.groups.get(&number).map_or(0, |q| q.announced);
            if self.may_go(announced) {
                return self.pop(number);
            }
            if self.announced >= ANNOUNCED_LIMIT {
                return None;
            }
            self.turn.rotate_left(1);
        }
        None
    }

    /// The next part of a group that was given up, however many are announced.
    pub fn give_up(&mut self, group: u64) -> Option<Part> {
        let at = self.turn.iter().position(|g| *g == group)?;
        self.turn.swap(0, at);
        self.pop(group)
    }

    /// The next part of the group at the front of `turn`.
    fn pop(&mut self, group: u64) -> Option<Part> {
        let queue = self.groups.get_mut(&group)?;
        let part = queue.held.pop_front()?;
        queue.announced += 1;
        self.announced += 1;
        if queue.held.is_empty() {
            self.turn.pop_front();
        } else {
            self.turn.rotate_left(1);
        }
        Some(part)
    }

    /// Forget everything.
    pub fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use atp_proto::fixed::Dtype;
    use atp_proto::op::Kind;

    fn part(group: u64, token: u64) -> Part {
        Part {
            token,
            group,
            number: token,
            total: 1,
            begin: 0,
            kind: Kind::Sum,
            dtype: Dtype::Float32,
            count: 1,
            memory: Box::new(vec![0; 4]),
        }
    }

    #[test]
    fn order_within_a_group_and_room_for_every_group() {
        let mut backlog = Backlog::default();
        for token in 0..ANNOUNCED_MAX as u64 {
            assert!(backlog.push(part(1, token)).is_some());
        }
        for token in 0..10 {
            assert!(backlog.push(part(1, 1_000_000 + token)).is_none());
        }
        assert!(backlog.push(part(2, 7)).is_some(), "the first of its group");
        assert!(backlog.push(part(2, 8)).is_none());
        assert!(backlog.next().is_none());
        backlog.ended(2);
        assert_eq!(backlog.next().map(|p| p.token), Some(8), "group 2 has none announced");
        assert!(backlog.next().is_none());
        backlog.ended(2);
        let mut got = Vec::new();
        for _ in 0..ANNOUNCED_MAX {
            backlog.ended(1);
            got.extend(std::iter::from_fn(|| backlog.next()).map(|p| p.token));
        }
        assert_eq!(got, (1_000_000..1_000_010).collect::<Vec<_>>());
        for _ in 0..10 {
            backlog.ended(1);
        }
        assert!(backlog.groups.is_empty() && backlog.turn.is_empty() && backlog.announced == 0);
    }

    #[test]
    fn a_group_that_is_given_up_holds_nothing_back() {
        let mut backlog = Backlog::default();
        for token in 0..ANNOUNCED_MAX as u64 + 5 {
            backlog.push(part(1, token));
        }
        backlog.push(part(2, 0));
        backlog.push(part(2, 1));
        let given = std::iter::from_fn(|| backlog.give_up(1)).count();
        assert_eq!(given, 5);
        assert!(backlog.give_up(3).is_none());
        assert_eq!(backlog.turn, [2]);
    }
}

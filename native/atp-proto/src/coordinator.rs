// SPDX-License-Identifier: Apache-2.0
//! The coordinator: which operations of which groups all ranks have ready, in one order for all.
//!
//! Process groups order their own operations; between groups every rank has an order of its own. The sequence transport
//! needs one order for all ranks. So each rank announces what it has ready, and when all have announced the same part, the
//! coordinator grants it, to all ranks in one order. (Horovod negotiates tensors in the same way.) Nothing waits for a part of
//! another group. It also compares what the ranks ask for, and finds the largest magnitude for the scale.
//!
//! Pure: time is an argument, `outbox` takes what is to be sent.

use std::collections::{BTreeMap, HashMap, VecDeque};

use crate::Nanos;
use crate::control::record::{Announce, Request, Shape, Verdict};
use crate::failure::{Code, Failure};
use crate::fixed;

/// Ranks that one mismatch or error text lists.
const LISTED: usize = 8;
/// Parts of one rank that may wait; a client has far fewer.
const WAITING_MAX: usize = 1 << 16;

/// A set of ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Ranks {
    words: Vec<u64>,
    count: usize,
}

impl Ranks {
    /// False when it was in already.
    fn insert(&mut self, rank: u16) -> bool {
        let (word, bit) = (usize::from(rank) / 64, 1u64 << (rank % 64));
        if self.words.len() <= word {
            self.words.resize(word + 1, 0);
        }
        let new = self.words[word] & bit == 0;
        self.words[word] |= bit;
        self.count += usize::from(new);
        new
    }

    fn contains(&self, rank: u16) -> bool {
        self.words.get(usize::from(rank) / 64).is_some_and(|w| w >> (rank % 64) & 1 == 1)
    }
}

/// A part that some ranks have announced.
#[derive(Debug)]
struct Waiting {
    begin: u64,
    count: u32,
    announced: Ranks,
    exponent: u8,
    /// The elements of each rank that the coordinator sums.
    inline: Vec<Option<Box<[u8]>>>,
    since: Nanos,
}

/// An operation of a group between its first announcement and its last grant.
#[derive(Debug)]
struct Operation {
    shape: Shape,
    parts: VecDeque<Waiting>,
    /// Elements that were granted.
    granted: u64,
}

/// An operation that the ranks asked for differently, until all ranks have gone beyond it.
#[derive(Debug)]
struct Failed {
    /// Who asked for what, as far as it is known and fits.
    known: Vec<(u16, Shape)>,
    told: Ranks,
}

#[derive(Debug)]
struct Group {
    operations: BTreeMap<u64, Operation>,
    failed: BTreeMap<u64, Failed>,
    /// Number that each rank announced last.
    at: Vec<u64>,
    broken: Option<Failure>,
    left: Ranks,
}

/// Where a verdict goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum To {
    All,
    One(u16),
}

/// What the coordinator has counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub parts_granted: u64,
    pub inline_operations: u64,
    pub mismatches: u64,
    pub groups_broken: u64,
}

#[derive(Debug)]
pub struct Coordinator {
    ranks: u16,
    groups: HashMap<u64, Group>,
    /// Parts that each rank has waiting.
    load: Vec<usize>,
    /// Nothing goes on.
    lost: Option<Failure>,
    outbox: VecDeque<(To, Vec<u8>)>,
    pub tally: Tally,
}

impl Coordinator {
    #[must_use]
    pub fn new(ranks: u16) -> Self {
        Self {
            ranks,
            groups: HashMap::new(),
            load: vec![0; usize::from(ranks)],
            lost: None,
            outbox: VecDeque::new(),
            tally: Tally::default(),
        }
    }

    /// Groups that are known.
    #[must_use]
    pub fn groups(&self) -> usize {
        self.groups.len()
    }

    /// Why nothing goes on, if so.
    #[must_use]
    pub fn lost(&self) -> Option<&Failure> {
        self.lost.as_ref()
    }

    /// The next verdict to be sent.
    pub fn poll_verdict(&mut self) -> Option<(To, Vec<u8>)> {
        self.outbox.pop_front()
    }

    fn group(&mut self, number: u64) -> &mut Group {
        let ranks = usize::from(self.ranks);
        self.groups.entry(number).or_insert_with(|| Group {
            operations: BTreeMap::new(),
            failed: BTreeMap::new(),
            at: vec![0; ranks],
            broken: None,
            left: Ranks::default(),
        })
    }

    fn say(&mut self, to: To, verdict: &Verdict<'_>) {
        self.outbox.push_back((to, verdict.pack()));
    }

    /// A request of `rank`. False: it is against the protocol, and the rank's sidecar is not to be trusted any more.
    pub fn handle(&mut self, rank: u16, request: &Request<'_>, now: Nanos) -> bool {
        if let Some(failure) = &self.lost {
            let record = Verdict::Lost { code: failure.code, text: &failure.text }.pack();
            self.outbox.push_back((To::One(rank), record));
            return true;
        }
        match request {
            Request::Announce(a) => return self.announce(rank, a, now),
            Request::Abort { group, code, text } => {
                self.group(*group);
                self.break_group(*group, Failure::breaking(*code, format!("rank {rank}: {text}")));
            }
            Request::Leave { group } => self.leave(*group, rank),
        }
        true
    }

    fn announce(&mut self, rank: u16, a: &Announce<'_>, now: Nanos) -> bool {
        let n = usize::from(self.ranks);
        let group = self.group(a.group);
        if group.broken.is_some() {
            self.tell_broken(a.group, To::One(rank));
            return true;
        }
        if group.left.count > 0 {
            let left = group.left.clone();
            let gone = (0..self.ranks).find(|r| left.contains(*r)).unwrap_or(0);
            self.break_group(a.group, left_text(gone));
            return true;
        }
        group.at[usize::from(rank)] = a.number;
        if !group.failed.is_empty() {
            let slowest = group.at.iter().copied().min().unwrap_or(0);
            group.failed = group.failed.split_off(&slowest);
        }
        let operation = group.operations.get(&a.number);
        if group.failed.contains_key(&a.number) || operation.is_some_and(|op| op.shape != a.shape) {
            self.mismatch(rank, a);
            return true;
        }
        let operation = group.operations.entry(a.number).or_insert_with(|| Operation {
            shape: a.shape,
            parts: VecDeque::new(),
            granted: 0,
        });
        // Each rank announces its parts in order: a new one is behind all that are known.
        let next = operation.parts.back().map_or(operation.granted, |p| p.begin + u64::from(p.count));
        let part = match operation.parts.iter_mut().find(|p| p.begin == a.begin) {
            Some(part) => part,
            None if a.begin == next => {
                operation.parts.push_back(Waiting {
                    begin: a.begin,
                    count: a.count,
                    announced: Ranks::default(),
                    exponent: 0,
                    inline: Vec::new(),
                    since: now,
                });
                let Some(part) = operation.parts.back_mut() else { return false };
                part
            }
            None => return false,
        };
        let inline = !a.inline.is_empty();
        let known_inline = !part.inline.is_empty();
        if part.count != a.count || (part.announced.count > 0 && inline != known_inline) || !part.announced.insert(rank)
        {
            return false;
        }
        part.exponent = part.exponent.max(a.exponent);
        if inline {
            part.inline.resize(n, None);
            part.inline[usize::from(rank)] = Some(a.inline.into());
        }
        let whole = part.announced.count == n;
        self.load[usize::from(rank)] += 1;
        if whole {
            self.grant(a.group, a.number);
        }
        self.load[usize::from(rank)] <= WAITING_MAX
    }

    /// The oldest part of the operation is announced by all.
    fn grant(&mut self, group_number: u64, number: u64) {
        let Some(group) = self.groups.get_mut(&group_number) else { return };
        let Some(operation) = group.operations.get_mut(&number) else { return };
        let Some(part) = operation.parts.pop_front() else { return };
        operation.granted += u64::from(part.count);
        let shape = operation.shape;
        if operation.granted == shape.total {
            group.operations.remove(&number);
        }
        for load in &mut self.load {
            *load -= 1;
        }
        let (group, number) = (group_number, number as u32);
        if part.inline.is_empty() {
            self.tally.parts_granted += 1;
            self.say(To::All, &Verdict::Grant { group, number, exponent: part.exponent });
        } else {
            self.tally.inline_operations += 1;
            let divisor = if shape.kind == crate::op::Kind::Mean { f64::from(self.ranks) } else { 1.0 };
            let mut values = vec![0u8; part.count as usize * shape.dtype.size()];
            let parts: Vec<&[u8]> = part.inline.iter().flatten().map(|p| &p[..]).collect();
            fixed::sum_inline(shape.dtype, &parts, divisor, &mut values);
            self.say(To::All, &Verdict::Sum { group, number, values: &values });
        }
    }

    /// `rank` asked for something else than others under the same number, or for what has failed so.
    fn mismatch(&mut self, rank: u16, a: &Announce<'_>) {
        let ranks = self.ranks;
        let Some(group) = self.groups.get_mut(&a.group) else { return };
        let mut tell = vec![rank];
        if let Some(operation) = group.operations.remove(&a.number) {
            // Those who announced it so far learn it now.
            let first = operation.parts.front();
            tell.extend((0..ranks).filter(|r| first.is_some_and(|part| part.announced.contains(*r))));
            let known = tell[1..].iter().take(LISTED).map(|r| (*r, operation.shape)).collect();
            group.failed.insert(a.number, Failed { known, told: Ranks::default() });
            self.tally.mismatches += 1;
            Self::unload(&mut self.load, ranks, [operation]);
        }
        let Some(failed) = group.failed.get_mut(&a.number) else { return };
        if failed.known.len() <= LISTED && !failed.known.iter().any(|k| k.0 == rank) {
            failed.known.push((rank, a.shape));
        }
        tell.retain(|r| failed.told.insert(*r));
        let record = Verdict::Mismatch { group: a.group, number: a.number, known: failed.known.clone() }.pack();
        self.outbox.extend(tell.into_iter().map(|to| (To::One(to), record.clone())));
    }

    fn leave(&mut self, number: u64, rank: u16) {
        let ranks = usize::from(self.ranks);
        let group = self.group(number);
        group.left.insert(rank);
        if group.left.count == ranks {
            if let Some(group) = self.groups.remove(&number) {
                Self::unload(&mut self.load, self.ranks, group.operations.into_values());
            }
        } else if group.operations.values().any(|op| !op.parts.is_empty()) {
            self.break_group(number, left_text(rank));
        }
    }

    /// The parts of these operations do not wait any more.
    fn unload(load: &mut [usize], ranks: u16, operations: impl IntoIterator<Item = Operation>) {
        for part in operations.into_iter().flat_map(|op| op.parts) {
            for rank in (0..ranks).filter(|r| part.announced.contains(*r)) {
                load[usize::from(rank)] -= 1;
            }
        }
    }

    /// Nothing of the group goes on, at any rank.
    pub fn break_group(&mut self, number: u64, failure: Failure) {
        let Some(group) = self.groups.get_mut(&number) else { return };
        if group.broken.is_some() {
            return;
        }
        group.broken = Some(failure);
        let operations = std::mem::take(&mut group.operations);
        Self::unload(&mut self.load, self.ranks, operations.into_values());
        self.tally.groups_broken += 1;
        self.tell_broken(number, To::All);
    }

    fn tell_broken(&mut self, group: u64, to: To) {
        let Some(failure) = self.groups.get(&group).and_then(|g| g.broken.as_ref()) else { return };
        let record = Verdict::Broken { group, code: failure.code, text: &failure.text }.pack();
        self.outbox.push_back((to, record));
    }

    /// Nothing goes on any more, at any rank.
    pub fn lose(&mut self, failure: Failure) {
        if self.lost.is_none() {
            self.say(To::All, &Verdict::Lost { code: failure.code, text: &failure.text });
            self.lost = Some(failure);
            self.groups.clear();
            self.load.fill(0);
        }
    }

    /// Ranks that somebody waits for, each with the time since when and the group.
    pub fn awaited(&self) -> impl Iterator<Item = (u16, Nanos, u64)> + '_ {
        self.groups.iter().flat_map(move |(number, group)| {
            group.operations.values().filter_map(|op| op.parts.front()).flat_map(move |part| {
                (0..self.ranks).filter(|r| !part.announced.contains(*r)).map(|r| (r, part.since, *number))
            })
        })
    }

    /// Whether any rank is waited for.
    #[must_use]
    pub fn waits(&self) -> bool {
        self.load.iter().any(|l| *l > 0)
    }
}

fn left_text(rank: u16) -> Failure {
    Failure::breaking(
        Code::PeerGone,
        format!("rank {rank} has left the process group (its trainer ended, or destroyed the group)"),
    )
}

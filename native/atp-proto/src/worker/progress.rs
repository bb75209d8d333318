// SPDX-License-Identifier: Apache-2.0
//! Whether anything moves, and what to tell when nothing does: who is waited for, as far as this rank knows.

use crate::Nanos;
use crate::config::Config;

/// Ranks that a stall's text names.
const NAMED: usize = 16;

/// Who the parameter server last said to wait for.
pub(super) struct Notice {
    pub seq: u64,
    at: Nanos,
    count: u32,
    pub ranks: Vec<u16>,
}

impl Notice {
    /// The number of missing ranks, then those of them that fit.
    pub fn parse(seq: u64, payload: &[u8], workers: usize, now: Nanos) -> Self {
        let mut words = payload.as_chunks::<4>().0.iter().map(|w| u32::from_be_bytes(*w));
        let count = words.next().unwrap_or(0);
        let ranks = words.take(count as usize).filter_map(|r| u16::try_from(r).ok());
        Self { seq, at: now, count, ranks: ranks.filter(|r| usize::from(*r) < workers).collect() }
    }
}

#[derive(Default)]
pub(super) struct Progress {
    /// When an ACK came last, or the first of the waiting operations.
    pub at: Nanos,
    pub notice: Option<Notice>,
}

impl Progress {
    /// Why nothing moves; `open`: the sequences that wait for an ACK, oldest first.
    pub fn stall_text(&self, config: &Config, op: u32, open: std::ops::Range<u64>, now: Nanos) -> String {
        let seconds = config.stall_timeout as f64 * 1e-9;
        let server = config.server(open.start);
        let known = self
            .notice
            .as_ref()
            .filter(|n| n.seq >= open.start && n.seq < open.end && now.saturating_sub(n.at) <= config.stall_timeout);
        let why = match known {
            None => format!("the parameter server {server} does not answer"),
            Some(n) => {
                let names = Self::names(config, n);
                let age = now.saturating_sub(n.at);
                // Resends ask at least every `max_rto`, or after half of the time so far: a server that said nothing for
                // most of the time may have died since, or the answers were lost.
                if age <= config.stall_timeout / 5 * 3 {
                    format!("the parameter server still waits for the gradient of {names}")
                } else {
                    let age = age as f64 * 1e-9;
                    format!(
                        "the parameter server {server} does not answer; {age:.1} s ago it waited for the gradient of {names}"
                    )
                }
            }
        };
        format!(
            "all_reduce #{op}: no progress for {seconds} s: {why}; see whether those processes and the network between \
             them are alive"
        )
    }

    fn names(config: &Config, notice: &Notice) -> String {
        let name = |rank: &u16| {
            let you = if *rank == config.rank { ", this rank" } else { "" };
            format!("rank {rank} ({}{you})", config.workers[usize::from(*rank)].address.ip())
        };
        let mut names: Vec<String> = notice.ranks.iter().take(NAMED).map(name).collect();
        if notice.count as usize > names.len() {
            names.push(format!("{} more", notice.count as usize - names.len()));
        }
        names.join(", ")
    }
}

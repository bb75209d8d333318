// SPDX-License-Identifier: Apache-2.0
//! Counters and gauges of an endpoint.

pub use crate::counters::Counters;

/// Counters and gauges at one moment.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    pub counters: Counters,
    pub window: f64,
    pub ssthresh: f64,
    pub rtt_seconds: f64,
    pub rto_seconds: f64,
    pub in_flight: u64,
    pub open_sequences: u64,
    pub reorder_threshold: u64,
    /// Parameter server: 1 while ACKs go to each worker because the group path seems broken.
    pub group_path_down: u64,
    /// Count per bucket; bucket i holds round trips below 2^i microseconds.
    pub rtt_histogram: Vec<u64>,
    pub rtt_sum_seconds: f64,
}

// SPDX-License-Identifier: Apache-2.0
//! Counters of an endpoint.

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// What an endpoint counts. The names are those of the metrics.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counters { $($(#[$doc])* pub $name: u64,)* }

        impl Counters {
            /// Every counter with its name.
            #[must_use]
            pub fn list(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)*]
            }
        }
    };
}

counters! {
    packets_sent, packets_received,
    /// UDP payload bytes.
    bytes_sent,
    bytes_received,
    /// Gradient packets (also raw and resent ones), sent by a worker or received by the parameter server.
    gradient_packets,
    /// Results, received by a worker or sent by the parameter server.
    ack_packets,
    retransmits, timeouts, probes, fast_retransmits, needless_retransmits, ecn_marks, window_cuts,
    /// Parameter server: packets with collision=1. Worker: announced index changes.
    collisions,
    /// Worker gradients that reached the parameter server inside a switch's sum.
    aggregated_packets,
    /// Worker gradients that the parameter server summed itself.
    host_summed_packets,
    raw_float_corrections, saturated, duplicates, reanswers, notices,
    /// Contributions dropped because they overlap others without containing them.
    overlaps,
    /// Times the parameter server left the group path because only its representative seemed to get ACKs.
    group_fallbacks,
    /// Times a worker left out a relay that seemed to swallow its packets.
    relay_fallbacks,
    rejected_short, rejected_stranger, rejected_job, rejected_length, rejected_sequence, rejected_coverage,
    rejected_kind,
    /// Raw packets without the tag of this epoch.
    rejected_tag,
    ops_completed, ops_failed,
    /// Coordinator: parts that run through the switch, and parts that it summed itself.
    parts_granted, inline_operations,
    /// Worker: values that are not 0 and became 0 at the scale in use.
    values_rounded_to_zero,
    /// Worker: finite values that had to travel raw.
    values_out_of_range,
    /// Worker: NaN and Inf.
    values_not_finite,
    /// Packets of the control channel, and those of them that were sent again.
    control_packets, control_retransmits,
}

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

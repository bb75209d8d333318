// SPDX-License-Identifier: Apache-2.0
//! The control channel between a worker and the coordinator (in the parameter server of shard 0): reliable, in order,
//! small. `packet` is the layout, `channel` the retransmission, `record` what is said. See docs/protocol.md, "Control".

pub mod channel;
pub mod packet;
pub mod record;

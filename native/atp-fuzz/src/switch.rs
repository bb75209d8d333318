// SPDX-License-Identifier: Apache-2.0
//! The switch core that the fuzzer is linked with, as the targets use it: what leaves comes as packets of their own.

pub use atp_switch::Program;

use atp_proto::Nanos;

pub const AGGREGATORS: u32 = 64;
const VALUES: u32 = 62;

/// One copy that leaves.
pub struct Out {
    pub port: u32,
    pub dst: u32,
    pub packet: Vec<u8>,
}

pub struct Switch(atp_switch::Switch);

impl Switch {
    pub fn new() -> Self {
        // 0: T is the product's.
        Self(atp_switch::Switch::new(AGGREGATORS, VALUES, 0))
    }

    pub fn program(&mut self, job_id: u8, program: &Program) {
        self.0.program(job_id, program);
    }

    /// Lose the job's entries and its aggregators.
    pub fn forget(&mut self, job_id: u8) {
        self.0.forget(job_id);
    }

    pub fn occupancy(&self, job_id: u8) -> u32 {
        self.0.occupancy(job_id)
    }

    pub fn process(&mut self, port: u32, dst: u32, ce: bool, mut packet: Vec<u8>, now: Nanos) -> Vec<Out> {
        let emits = self.0.process(port, dst, ce, &mut packet, now).to_vec();
        emits.into_iter().map(|e| Out { port: e.port, dst: e.dst_ip, packet: packet.clone() }).collect()
    }
}

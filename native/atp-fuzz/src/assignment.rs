// SPDX-License-Identifier: Apache-2.0
//! The assignment JSON: any text gives an endpoint that can be made, or an error.

use atp_proto::{Config, ParameterServer, Role, Worker};

const ENDPOINT_MAX: usize = 1 << 26;

pub fn run(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let config = match Config::from_json(text) {
        Ok(config) => config,
        Err(error) => {
            assert!(!error.0.is_empty());
            return;
        }
    };
    assert!(config.job_id != 0 && config.values > 0 && config.packet_bytes() <= 65507);
    assert!(config.max_window >= 1 && config.max_window <= config.slots);
    assert!(config.workers.iter().enumerate().all(|(i, w)| usize::from(w.rank) == i && w.rack < 32 && w.bit < 32));
    assert!(config.regions.iter().all(|r| r.size > 0 && r.start + r.size <= 65536));
    if config.slots > 1 << 14 {
        return; // takes the time of a thousand others
    }
    let before = crate::alloc::live();
    match config.role {
        Role::Worker => drop(Worker::new(config).expect("a worker's assignment")),
        Role::ParameterServer => {
            let server = ParameterServer::new(config).expect("a parameter server's assignment");
            assert!(crate::alloc::live() - before < ENDPOINT_MAX);
            drop(server);
        }
    }
}

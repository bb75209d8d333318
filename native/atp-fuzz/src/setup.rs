// SPDX-License-Identifier: Apache-2.0
//! Small jobs to fuzz.

use std::net::{Ipv4Addr, SocketAddrV4};

use atp_proto::Config;

use crate::input::Input;

pub const JOB_ID: u8 = 3;
pub const SERVER: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(10, 9, 0, 1), 10800);
pub const RELAY: Ipv4Addr = Ipv4Addr::new(10, 8, 0, 1);
pub const STRANGER: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(10, 7, 7, 7), 10800);

/// Workers of each rack, and racks (a mask) whose one worker enters level 1 directly.
const SHAPES: [(&[u8], u32); 6] = [(&[1], 0), (&[2], 0), (&[3], 0), (&[2, 1], 0), (&[2, 1], 0b10), (&[1, 2, 1], 0b100)];

/// A job whose shape, mode, window and place in the sequence space the input chooses.
pub fn config(input: &mut Input<'_>) -> Config {
    let (racks, edge) = SHAPES[input.below(SHAPES.len())];
    let mut workers = Vec::new();
    for (rack, size) in racks.iter().enumerate() {
        for bit in 0..*size {
            workers.push(format!(
                r#"{{"rank":{},"address":"10.0.{rack}.{}","rack":{rack},"bit":{bit},"edge":{}}}"#,
                workers.len(),
                bit + 1,
                edge >> rack & 1 == 1
            ));
        }
    }
    let how = input.byte();
    let slots = [1, 2, 8, 32][usize::from(how >> 2 & 3)];
    let window = if how >> 4 & 1 == 1 { slots } else { 1 + slots / 2 };
    let mode = ["Shared", "Shared", "Reserved", "HostOnly"][usize::from(how & 3)];
    let first = input.byte();
    let floor = mode == "Shared" && first & 2 == 2;
    let text = format!(
        r#"{{"job":"fuzz/job","epoch":1,"jobId":{JOB_ID},"mode":"{mode}","role":"worker","valuesPerPacket":62,
            "scale":1048576,"regions":[{{"start":0,"size":3}},{{"start":8,"size":{},"floor":{floor}}}],"indexTableSize":{slots},
            "maxWindow":{window},"workers":[{}],"parameterServers":[{{"address":"{}"}}]}}"#,
        1 + (how >> 6) * 8,
        workers.join(","),
        SERVER.ip()
    );
    let mut config = Config::from_json(&text).expect("a valid assignment");
    config.initial_window = config.initial_window.min(16);
    config.min_rto = 1_000_000;
    config.max_rto = 200_000_000;
    // Half of the jobs meet the wrap of the 24 bits at once.
    config.first_sequence = if first & 1 == 1 { (1 << 24) - u64::from(first >> 1) } else { u64::from(first) << 20 };
    config
}

pub fn words(payload: &[u8]) -> Vec<i32> {
    payload.as_chunks::<4>().0.iter().map(|w| i32::from_be_bytes(*w)).collect()
}

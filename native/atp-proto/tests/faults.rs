// SPDX-License-Identifier: Apache-2.0
//! The wrap of the 24-bit sequence, which sockets would take a minute to reach; tests/faults runs these by name.

#[allow(dead_code)] // shared with schedules.rs
mod common;

use atp_proto::fixed::Dtype;
use atp_proto::op::Kind;
use atp_proto::wire::{HEADER_BYTES, Header};
use atp_proto::worker::Submission;
use atp_proto::{Config, Endpoint, Mode, ParameterServer, Role};
use common::{Faults, Network, config};

const WRAP: u64 = 1 << 24;

fn submission(rank: usize, token: u64, count: usize) -> Submission {
    let memory: Vec<u8> = (0..count).flat_map(|i| value(rank, token, i).to_ne_bytes()).collect();
    Submission {
        token,
        op_id: token,
        kind: Kind::Sum,
        dtype: Dtype::Int32,
        count: count as u64,
        scale: None,
        memory: Box::new(memory),
    }
}

fn value(rank: usize, token: u64, i: usize) -> i32 {
    (rank as i32 + 1) * (1000 * token as i32 + i as i32)
}

/// Operations before, over and after the wrap, through two levels of switches that lose, double and reorder.
#[test]
fn wrap_under_loss_duplication_and_reordering() {
    for seed in 0..40 {
        let first_sequence = WRAP - 100 - seed;
        let config = Config { first_sequence, ..config(&[2, 2], 0, Mode::Shared) };
        let faults = Faults { loss: 0.05, duplicate: 0.1, reorder: 0.2, reset: 0.002, ..Faults::default() };
        let mut net = Network::new(config, faults, seed);
        for rank in 0..4 {
            for token in 0..4 {
                net.submit(rank, submission(rank, token, 400));
            }
        }
        let until = net.now + 300_000_000_000;
        assert!(net.run(4, until), "seed {seed}");
        for rank in 0..4 {
            for token in 0..4 {
                let bytes = net.results[rank][&token].as_ref().expect("a sum");
                for (i, word) in bytes.as_chunks::<4>().0.iter().enumerate() {
                    let want: i32 = (0..4).map(|r| value(r, token, i)).sum();
                    assert_eq!(
                        i32::from_ne_bytes(*word),
                        want,
                        "seed {seed} rank {rank} operation {token} element {i}"
                    );
                }
            }
        }
    }
}

fn server(slots: u32) -> (Config, ParameterServer) {
    let mut config = config(&[2], 0, Mode::HostOnly);
    config.role = Role::ParameterServer;
    config.slots = slots;
    let server = ParameterServer::new(config.clone()).expect("a parameter server's configuration");
    (config, server)
}

fn gradient(config: &Config, rank: usize, seq: u64, fill: i32, resend: bool) -> Vec<u8> {
    let header = Header {
        job_id: config.job_id,
        sequence: (seq % WRAP) as u32,
        bitmap0: 1 << rank,
        bitmap1: 1,
        fan_in_degree0: 2,
        fan_in_degree1: 1,
        resend,
        ..Header::default()
    };
    let mut packet = header.pack().to_vec();
    packet.extend((0..config.values).flat_map(|_| fill.to_be_bytes()));
    packet
}

fn answers(server: &mut ParameterServer) -> Vec<(u32, i32)> {
    let mut buffer = [0u8; 256];
    let mut got = Vec::new();
    while server.poll_transmit(0, &mut buffer).is_some() {
        let header = Header::unpack(&buffer).expect("a header");
        if !header.raw_float {
            let value = i32::from_be_bytes(buffer[HEADER_BYTES..HEADER_BYTES + 4].try_into().expect("four bytes"));
            got.push((header.sequence, value));
        }
    }
    got
}

/// A whole wrap of answered sequences: the same 24 bits start afresh, with nothing of what they held.
#[test]
fn wrap_gives_the_same_24_bits_a_fresh_sum() {
    let (config, mut server) = server(32);
    let from = |rank: usize| config.workers[rank].address;
    for seq in (0..=WRAP).step_by(32).chain([WRAP + 5]) {
        let fill = (seq / 32 % 1000) as i32;
        server.handle(from(0), false, &gradient(&config, 0, seq, fill, false), seq);
        server.handle(from(1), false, &gradient(&config, 1, seq, 3, false), seq);
        let got = answers(&mut server);
        assert_eq!(got, vec![((seq % WRAP) as u32, fill + 3); 2], "sequence {seq}");
    }
    assert_eq!(server.snapshot().counters.rejected_sequence, 0);
    assert_eq!(server.snapshot().counters.reanswers, 0);
}

/// Copies that the network kept for a while come from before the wrap: they are read as old, and get the old answer.
#[test]
fn wrap_does_not_make_late_copies_new() {
    let (config, mut server) = server(32);
    let from = |rank: usize| config.workers[rank].address;
    let mut near = WRAP - 40;
    for seq in (0..near).step_by(64) {
        server.handle(from(0), false, &gradient(&config, 0, seq, 1, false), seq);
        near = near.max(seq);
    }
    answers(&mut server);
    for seq in WRAP - 40..WRAP + 20 {
        for rank in 0..2 {
            server.handle(from(rank), false, &gradient(&config, rank, seq, 5, false), seq);
        }
    }
    answers(&mut server);
    let before = server.snapshot();
    for seq in WRAP - 40..WRAP {
        server.handle(from(0), false, &gradient(&config, 0, seq, 777, true), WRAP + 20);
        assert_eq!(answers(&mut server), [((seq % WRAP) as u32, 10)], "sequence {seq}");
    }
    let after = server.snapshot();
    assert_eq!(after.open_sequences, before.open_sequences, "no late copy opened a sequence");
    assert_eq!(after.counters.reanswers - before.counters.reanswers, 40);
}

// SPDX-License-Identifier: Apache-2.0
//! Thousands of random schedules: whatever the network does, every rank gets the exact sum, or an error that is true.

mod common;

use atp_proto::config::Region;
use atp_proto::fixed::Dtype;
use atp_proto::op::Kind;
use atp_proto::worker::Submission;
use atp_proto::{Config, Endpoint, Mode};
use common::{Faults, Network, Rng, config};

const SECOND: u64 = 1_000_000_000;

#[derive(Clone)]
enum Data {
    Floats(Vec<Vec<f32>>),
    Ints(Vec<Vec<i32>>),
}

/// What one rank contributes, as bytes; in place, so that a result written too early would spoil the source.
fn submission(data: &Data, rank: usize, token: u64) -> Submission {
    let (dtype, count, memory): (_, _, Vec<u8>) = match data {
        Data::Floats(all) => {
            (Dtype::Float32, all[rank].len(), all[rank].iter().flat_map(|x| x.to_ne_bytes()).collect())
        }
        Data::Ints(all) => (Dtype::Int32, all[rank].len(), all[rank].iter().flat_map(|x| x.to_ne_bytes()).collect()),
    };
    Submission {
        token,
        op_id: token,
        kind: Kind::Sum,
        dtype,
        count: count as u64,
        scale: None,
        memory: Box::new(memory),
    }
}

/// The scale is 2^20 and normal values are multiples of 2^-10 below 8, so that fixed point and float64 agree exactly.
fn random_data(rng: &mut Rng, n: usize, count: usize) -> Data {
    let special = rng.below(4) == 0;
    some_data(rng, n, count, special)
}

/// `special`: with values that have no fixed point, or whose sum saturates.
fn some_data(rng: &mut Rng, n: usize, count: usize, special: bool) -> Data {
    if rng.below(2) == 0 {
        let mut value = |_| {
            let x = (rng.below(1 << 14) as f32 - 8192.0) / 1024.0;
            match rng.below(100) {
                0 if special => f32::NAN,
                1 if special => f32::INFINITY,
                2 if special => 1e30,
                3 if special => 1500.0, // two of them saturate 2^31 / 2^20 = 2048
                _ => x,
            }
        };
        Data::Floats((0..n).map(|_| (0..count).map(&mut value).collect()).collect())
    } else {
        let mut value = |_| match rng.below(50) {
            0 if special => i32::MAX,
            1 if special => i32::MIN,
            2 if special => i32::MAX - 1,
            _ => rng.below(2000) as i32 - 1000,
        };
        Data::Ints((0..n).map(|_| (0..count).map(&mut value).collect()).collect())
    }
}

fn check(data: &Data, got: &[u8], what: &str) {
    match data {
        Data::Floats(all) => {
            for (i, word) in got.as_chunks::<4>().0.iter().enumerate() {
                let got = f32::from_ne_bytes(*word);
                let want = all.iter().fold(0.0f64, |a, v| a + f64::from(v[i])) as f32;
                assert!(got == want || (got.is_nan() && want.is_nan()), "{what}: element {i}: {got} is not {want}");
            }
        }
        Data::Ints(all) => {
            for (i, word) in got.as_chunks::<4>().0.iter().enumerate() {
                let want = all.iter().fold(0i32, |a, v| a.wrapping_add(v[i]));
                assert_eq!(i32::from_ne_bytes(*word), want, "{what}: element {i}");
            }
        }
    }
}

fn random_config(rng: &mut Rng) -> Config {
    let mode = [Mode::Shared, Mode::Shared, Mode::Shared, Mode::Reserved, Mode::HostOnly][rng.below(5) as usize];
    let count = 1 + rng.below(3) as usize;
    let mut racks: Vec<u8> = (0..count).map(|_| 1 + rng.below(3) as u8).collect();
    let mut edge = 0;
    if count > 1 && rng.below(2) == 0 {
        racks[count - 1] = 1;
        edge = 1 << (count - 1);
    }
    let mut config = config(&racks, edge, mode);
    if rng.below(3) == 0 {
        // Fewer aggregators than slots: the job meets itself.
        config.regions.truncate(1);
        config.regions[0].size = 8;
    } else if mode == Mode::Shared && rng.below(2) == 0 {
        config.regions[1].floor = true;
        config.regions[1].size = 1 + rng.below(24) as u32;
    }
    if rng.below(2) == 0 {
        config.first_sequence = (1 << 24) - rng.below(60);
    }
    config.values = 1 + rng.below(8) as usize;
    if rng.below(4) == 0 {
        config.addend_limit = i32::MAX / config.workers.len() as i32;
    }
    config
}

fn random_faults(rng: &mut Rng) -> Faults {
    let mut share = |max: f64| if rng.below(2) == 0 { 0.0 } else { max * rng.below(100) as f64 / 100.0 };
    Faults {
        loss: share(0.15),
        duplicate: share(0.1),
        reorder: share(0.2),
        mark: share(0.05),
        reset: share(0.01),
        foreign: share(0.05),
    }
}

/// One schedule: several operations queued back to back, submitted by the ranks at different times.
fn schedule(seed: u64) {
    let mut rng = Rng::new(seed ^ 0x5eed);
    let config = random_config(&mut rng);
    let faults = random_faults(&mut rng);
    let n = config.workers.len();
    let mut net = Network::new(config, faults, seed);
    let ops = 1 + rng.below(6) as usize;
    let data: Vec<Data> = (0..ops)
        .map(|_| {
            let count = if rng.below(8) == 0 { 0 } else { rng.below(300) as usize };
            random_data(&mut rng, n, count)
        })
        .collect();
    let mut order: Vec<usize> = (0..n).collect();
    for i in (1..n).rev() {
        order.swap(i, rng.below(i as u64 + 1) as usize);
    }
    for rank in order {
        for (i, d) in data.iter().enumerate() {
            net.submit(rank, submission(d, rank, i as u64));
        }
        let skew = [0, 1_000_000, 30_000_000, 250_000_000][rng.below(4) as usize];
        let until = net.now + skew;
        net.run(ops, until);
        net.now = net.now.max(until);
    }
    let until = net.now + 300 * SECOND;
    let done = net.run(ops, until);
    let states: Vec<_> = net.workers.iter().map(Endpoint::snapshot).collect();
    assert!(done, "seed {seed}: not done at {}: {:?} {states:?}", net.now, net.server.snapshot());
    for rank in 0..n {
        for (i, d) in data.iter().enumerate() {
            match &net.results[rank][&(i as u64)] {
                Ok(bytes) => check(d, bytes, &format!("seed {seed} rank {rank} operation {i}")),
                Err(text) => panic!("seed {seed} rank {rank} operation {i}: {text}"),
            }
        }
    }
}

#[test]
fn sums_are_exact_in_thousands_of_schedules() {
    let count = std::env::var("ATP_SCHEDULES").ok().and_then(|v| v.parse().ok()).unwrap_or(3000);
    let first = std::env::var("ATP_SEED").ok().and_then(|v| v.parse().ok()).unwrap_or(0);
    for seed in first..first + count {
        schedule(seed);
    }
}

#[test]
fn mismatches_fail_alike_everywhere_and_the_rest_is_summed() {
    for seed in 0..500u64 {
        let mut rng = Rng::new(seed ^ 0xbad);
        let config = random_config(&mut rng);
        let n = config.workers.len();
        if n < 2 {
            continue;
        }
        let faults = random_faults(&mut rng);
        let mut net = Network::new(config, faults, seed);
        let ops = 2 + rng.below(5);
        let bad: Vec<u64> = (0..ops).filter(|_| rng.below(3) == 0).collect();
        let odd = rng.below(n as u64) as usize;
        let good: Vec<Data> = (0..ops)
            .map(|_| {
                let count = rng.below(200) as usize;
                random_data(&mut rng, n, count)
            })
            .collect();
        for rank in 0..n {
            for i in 0..ops {
                let mut s = submission(&good[i as usize], rank, i);
                if bad.contains(&i) && rank == odd {
                    let count = 1000 + rng.below(100);
                    s.count = count;
                    s.dtype = Dtype::Float32;
                    s.memory = Box::new(vec![0u8; 4 * count as usize]);
                }
                net.submit(rank, s);
            }
            let until = net.now + rng.below(20_000_000);
            net.run(ops as usize, until);
            net.now = net.now.max(until);
        }
        let until = net.now + 300 * SECOND;
        assert!(net.run(ops as usize, until), "seed {seed}: not done after 300 s");
        for rank in 0..n {
            for i in 0..ops {
                let what = format!("seed {seed} rank {rank} operation {i}");
                match (&net.results[rank][&i], bad.contains(&i)) {
                    (Ok(bytes), false) => check(&good[i as usize], bytes, &what),
                    (Err(text), true) => {
                        assert!(text.starts_with(&format!("all_reduce #{i}: ")), "{what}: {text}");
                        if rank != odd {
                            assert!(text.contains(&format!("rank {odd} has 10")), "{what}: {text}");
                        }
                    }
                    (got, _) => panic!("{what}: {got:?}"),
                }
            }
        }
    }
}

#[test]
fn a_silent_rank_is_named() {
    for seed in 0..100u64 {
        let mut rng = Rng::new(seed ^ 0xdead);
        let mut config = random_config(&mut rng);
        let n = config.workers.len();
        if n < 2 {
            continue;
        }
        // A notice must have room for a rank.
        config.values = config.values.max(2);
        config.stall_timeout = 5 * SECOND;
        let faults = random_faults(&mut rng);
        let mut net = Network::new(config, faults, seed);
        let dead = rng.below(n as u64) as usize;
        net.dead[dead] = true;
        let data = random_data(&mut rng, n, 500);
        for rank in 0..n {
            net.submit(rank, submission(&data, rank, 9));
        }
        let until = net.now + 20 * SECOND;
        assert!(net.run(1, until), "seed {seed}");
        assert!(net.now < 8 * SECOND, "seed {seed}: {} ns", net.now);
        for rank in 0..n {
            if rank != dead {
                let text = net.results[rank][&9].clone().expect_err("a stall");
                assert!(text.contains(&format!("waits for the gradient of rank {dead} (")), "seed {seed}: {text}");
            }
        }
    }
}

/// Without faults nothing is sent twice, and all workers' gradients reach the PS inside a switch's sum.
#[test]
fn a_calm_network_aggregates_everything() {
    for (racks, edge) in [(&[4u8][..], 0u32), (&[3, 2], 0), (&[2, 1], 0b10), (&[1], 0)] {
        let mut net = Network::new(config(racks, edge, Mode::Shared), Faults::default(), 1);
        let n = net.config.workers.len();
        let data = some_data(&mut Rng::new(8), n, 4000, false);
        for rank in 0..n {
            net.submit(rank, submission(&data, rank, 0));
        }
        assert!(net.run(1, 10 * SECOND));
        let server = net.server.snapshot().counters;
        assert_eq!(server.host_summed_packets, 0, "{racks:?}: {server:?}");
        assert!(server.aggregated_packets >= 1000 * n as u64);
        for worker in &net.workers {
            assert_eq!(worker.snapshot().counters.retransmits, 0);
        }
    }
}

/// The switch forgets its tables: only the representative gets ACKs. The PS notices, and tries again later.
#[test]
fn a_switch_without_tables_does_not_make_the_job_crawl() {
    let mut net = Network::new(config(&[4], 0, Mode::Shared), Faults::default(), 1);
    net.racks[0].known = false;
    let mut token = 0;
    let mut step = |net: &mut Network, count: usize| {
        let data = some_data(&mut Rng::new(token + 40), 4, count, false);
        for rank in 0..4 {
            let s = submission(&data, rank, token);
            net.submit(rank, s);
        }
        token += 1;
        let started = net.now;
        let until = started + 100 * SECOND;
        assert!(net.run(token as usize, until));
        net.now - started
    };
    step(&mut net, 2000);
    assert_eq!(net.server.snapshot().counters.group_fallbacks, 1);
    let before = net.workers[1].snapshot().counters.timeouts;
    let took = step(&mut net, 4000);
    assert!(took < SECOND / 10, "{took} ns");
    assert_eq!(net.workers[1].snapshot().counters.timeouts, before);
    // The tables are back: after the wait the group path carries ACKs again.
    net.racks[0].known = true;
    net.now += 2 * SECOND;
    step(&mut net, 400);
    net.now += SECOND;
    step(&mut net, 400);
    assert_eq!(net.server.snapshot().group_path_down, 0);
    let sent = net.server.snapshot().counters.packets_sent;
    step(&mut net, 4000);
    assert!(net.server.snapshot().counters.packets_sent - sent < 1100, "one ACK a sequence");
}

/// Marks on the way of single packets reach all workers with the sum, and their windows shrink alike.
#[test]
fn congestion_marks_reach_all_workers() {
    let faults = Faults { mark: 0.02, ..Faults::default() };
    let mut net = Network::new(config(&[3, 3], 0, Mode::Shared), faults, 5);
    let data = some_data(&mut Rng::new(12), 6, 4000, false);
    for rank in 0..6 {
        net.submit(rank, submission(&data, rank, 0));
    }
    assert!(net.run(1, 100 * SECOND));
    let server = net.server.snapshot().counters;
    for worker in &net.workers {
        let s = worker.snapshot();
        assert!(s.counters.ecn_marks >= server.ecn_marks, "{:?} {server:?}", s.counters);
        assert!(s.counters.window_cuts > 10 && s.counters.window_cuts < s.counters.ecn_marks);
        assert!(s.window < 16.0, "{}", s.window);
        assert_eq!(s.counters.retransmits, 0);
    }
}

/// A job whose aggregators another job holds moves its slots away.
#[test]
fn slots_move_away_from_collisions() {
    let faults = Faults { foreign: 0.002, ..Faults::default() };
    let mut net = Network::new(config(&[3], 0, Mode::Shared), faults, 3);
    let data = some_data(&mut Rng::new(9), 3, 8000, false);
    for rank in 0..3 {
        net.submit(rank, submission(&data, rank, 0));
    }
    assert!(net.run(1, 100 * SECOND));
    assert!(net.workers.iter().all(|w| w.snapshot().counters.collisions > 0));
    let moves: Vec<u64> = net.workers.iter().map(|w| w.snapshot().counters.collisions).collect();
    assert!(moves.windows(2).all(|m| m[0] == m[1]), "all workers take the same announcements: {moves:?}");
    let c = net.server.snapshot().counters;
    assert!(c.aggregated_packets > 5 * c.host_summed_packets, "{c:?}");
}

/// Another job holds every shared aggregator: what is bound to the floor is aggregated all the same.
#[test]
fn a_floor_holds_whatever_others_do() {
    for (floor, seed) in [(0u32, 1), (1, 2), (8, 3), (13, 4), (24, 5)] {
        let mut config = config(&[2, 3], 0, Mode::Shared);
        config.regions.truncate(1);
        if floor > 0 {
            config.regions.push(Region { start: 500, size: floor, floor: true });
        }
        let faults = Faults { foreign: 1.0, ..Faults::default() };
        let mut net = Network::new(config, faults, seed);
        let data = some_data(&mut Rng::new(seed), 5, 16_000, false);
        for rank in 0..5 {
            net.submit(rank, submission(&data, rank, 0));
        }
        assert!(net.run(1, 100 * SECOND));
        let c = net.server.snapshot().counters;
        let share = c.aggregated_packets as f64 / (c.aggregated_packets + c.host_summed_packets) as f64;
        let promised = f64::from(floor) / 32.0;
        assert!(share >= 0.99 * promised, "{share} of {promised}: {c:?}");
        if 5 * floor >= 32 {
            assert!(share > 0.8, "slots shelter in the floor: {share} of {promised}");
        } else {
            assert!(share <= promised + 0.2, "the attack does not bite: {share} of {promised}");
        }
        for rank in 0..5 {
            check(&data, net.results[rank][&0].as_ref().expect("a sum"), &format!("rank {rank}"));
        }
    }
}

/// The largest job: fan-in degrees of 32 are 0 on the wire, and a descriptor needs many packets.
#[test]
fn thirty_two_racks_of_thirty_two_workers() {
    let mut config = config(&[32; 32], 0, Mode::Shared);
    config.values = 62;
    config.regions = vec![Region { start: 0, size: 64, floor: false }];
    config.slots = 64;
    config.max_window = 64;
    config.min_rto = 50_000_000;
    let mut net = Network::new(config, Faults::default(), 1);
    let data = some_data(&mut Rng::new(3), 1024, 100, false);
    for rank in 0..1024 {
        net.submit(rank, submission(&data, rank, 0));
    }
    let done = net.run(1, 10 * SECOND);
    assert!(done, "{:?}", net.server.snapshot());
    for rank in 0..1024 {
        match &net.results[rank][&0] {
            Ok(bytes) => check(&data, bytes, &format!("rank {rank}")),
            Err(text) => panic!("rank {rank}: {text}"),
        }
    }
    let c = net.server.snapshot().counters;
    assert_eq!((c.host_summed_packets, c.aggregated_packets), (0, 52 * 1024), "{c:?}");
}

/// The parameter server dies after it has said whom it waits for: at the end the error must blame the server.
#[test]
fn a_server_that_died_is_not_mistaken_for_a_silent_rank() {
    let mut config = config(&[3], 0, Mode::Shared);
    config.stall_timeout = 3 * SECOND;
    let data = some_data(&mut Rng::new(8), 3, 100, false);
    let mut net = Network::new(config, Faults::default(), 1);
    net.dead[1] = true;
    for rank in [0, 2] {
        net.submit(rank, submission(&data, rank, 0));
    }
    // Long enough for some notices about rank 1.
    net.run(1, 400_000_000);
    assert!(net.workers[0].snapshot().counters.notices > 0);
    net.faults.loss = 1.0;
    assert!(net.run(1, 10 * SECOND));
    let error = net.results[0][&0].as_ref().expect_err("nobody answers");
    assert!(error.contains("10.9.0.9:10800 does not answer"), "{error}");
}

// SPDX-License-Identifier: Apache-2.0
//! Many groups over one transport: however the ranks interleave them and whatever the network does, every operation gets
//! its own sum at every rank, or an error that is true.

mod common;

use std::collections::HashMap;

use atp_proto::fixed::Dtype;
use atp_proto::op::Kind;
use atp_proto::{Code, Config, Endpoint, Host, Member, Mode, Part};
use common::{Faults, Network, Rng, config, of_server, of_worker};

const SECOND: u64 = 1_000_000_000;

type Net = Network<Member, Host>;

fn network(config: Config, faults: Faults, seed: u64) -> Net {
    let members = (0..config.workers.len() as u16).map(|r| member(&config, r, 100 + u32::from(r))).collect();
    let host = Host::new(of_server(&config), 7).expect("a valid configuration");
    let mut net = Network::of(config, members, host, faults, seed);
    for member in &mut net.workers {
        member.set_attached(1, 0);
    }
    net
}

fn member(config: &Config, rank: u16, incarnation: u32) -> Member {
    Member::new(of_worker(config, rank), incarnation).expect("a valid configuration")
}

/// An operation of a group, with what every rank contributes.
#[derive(Clone)]
struct Operation {
    group: u64,
    number: u64,
    mean: bool,
    /// Elements of each part.
    parts: Vec<usize>,
    data: Vec<Vec<f32>>,
    /// This rank asks for one element more.
    odd: Option<usize>,
}

impl Operation {
    fn random(rng: &mut Rng, ranks: usize, group: u64, number: u64) -> Self {
        let parts: Vec<usize> = match rng.below(3) {
            0 => vec![1 + rng.below(60) as usize],
            1 => vec![65 + rng.below(300) as usize],
            _ => (0..2 + rng.below(3)).map(|_| 65 + rng.below(100) as usize).collect(),
        };
        let count: usize = parts.iter().sum();
        // Multiples of 2^-10 below 8: every sum is exact in fixed point and in float32. A factor that is a power of two
        // tests that the scale follows the magnitude.
        let factor = 2f32.powi(rng.below(80) as i32 - 40);
        let mut value = || (rng.below(1 << 14) as f32 - 8192.0) / 1024.0 * factor;
        let data = (0..ranks).map(|_| (0..count).map(|_| value()).collect()).collect();
        Self { group, number, mean: false, parts, data, odd: None }
    }

    /// Submit all parts at `rank`; token = base + index of the part.
    fn submit(&self, net: &mut Net, rank: usize, base: u64) {
        let extra = usize::from(self.odd == Some(rank));
        let total = (self.data[rank].len() + extra) as u64;
        let mut begin = 0;
        for (i, count) in self.parts.iter().enumerate() {
            let memory: Vec<u8> = self.data[rank][begin..begin + count].iter().flat_map(|x| x.to_ne_bytes()).collect();
            let part = Part {
                token: base + i as u64,
                group: self.group,
                number: self.number,
                total,
                begin: begin as u64,
                kind: if self.mean { Kind::Mean } else { Kind::Sum },
                dtype: Dtype::Float32,
                count: *count as u64,
                memory: Box::new(memory),
            };
            begin += count;
            let now = net.now;
            net.workers[rank].submit(part, now);
        }
    }

    fn check(&self, part: usize, got: &[u8], what: &str) {
        let begin: usize = self.parts[..part].iter().sum();
        for (i, word) in got.as_chunks::<4>().0.iter().enumerate() {
            let want: f64 = self.data.iter().map(|d| f64::from(d[begin + i])).sum();
            let got = f32::from_ne_bytes(*word);
            assert_eq!(f64::from(got), want, "{what}: part {part}, element {i}");
        }
    }
}

fn token(operation: usize) -> u64 {
    operation as u64 * 16
}

/// What became of operation `k` at `rank`: each part's result, as far as there is one.
fn results(net: &Net, rank: usize, k: usize, operation: &Operation) -> Vec<Option<Result<Vec<u8>, String>>> {
    (0..operation.parts.len()).map(|i| net.results[rank].get(&(token(k) + i as u64)).cloned()).collect()
}

fn go_on(net: &mut Net, time: u64) {
    let until = net.now + time;
    net.run(usize::MAX, until);
    net.now = until;
}

/// Submit everything, each rank in an order of its own that keeps the order within a group, at random times.
fn submit_interleaved(net: &mut Net, rng: &mut Rng, operations: &[Operation]) {
    let ranks = net.workers.len();
    let mut queues: Vec<HashMap<u64, Vec<usize>>> = vec![HashMap::new(); ranks];
    for (k, operation) in operations.iter().enumerate() {
        for queue in &mut queues {
            queue.entry(operation.group).or_default().push(k);
        }
    }
    while queues.iter().any(|q| !q.is_empty()) {
        let rank = rng.below(ranks as u64) as usize;
        let mut groups: Vec<u64> = queues[rank].keys().copied().collect();
        groups.sort_unstable();
        if groups.is_empty() {
            continue;
        }
        let group = groups[rng.below(groups.len() as u64) as usize];
        if let Some(list) = queues[rank].get_mut(&group) {
            let k = list.remove(0);
            if list.is_empty() {
                queues[rank].remove(&group);
            }
            operations[k].submit(net, rank, token(k));
        }
        if rng.below(4) == 0 {
            let pause = rng.below(2_000_000);
            go_on(net, pause);
        }
    }
}

fn faults(rng: &mut Rng) -> Faults {
    match rng.below(4) {
        0 => Faults::default(),
        1 => Faults { loss: 0.02, duplicate: 0.02, reorder: 0.05, ..Faults::default() },
        2 => Faults { loss: 0.1, reorder: 0.2, mark: 0.02, ..Faults::default() },
        _ => Faults { loss: 0.01, duplicate: 0.1, reorder: 0.1, reset: 0.002, foreign: 0.01, ..Faults::default() },
    }
}

fn random_config(rng: &mut Rng) -> Config {
    let racks: &[&[u8]] = &[&[1], &[2], &[3], &[2, 2], &[1, 3, 2]];
    let mode = [Mode::Shared, Mode::Reserved, Mode::HostOnly][rng.below(3) as usize];
    let racks = racks[rng.below(racks.len() as u64) as usize];
    Config { auto_scale: true, ..config(racks, 0, mode) }
}

#[test]
fn every_operation_gets_its_own_sum() {
    let schedules = std::env::var("ATP_SCHEDULES").ok().and_then(|s| s.parse().ok()).unwrap_or(300);
    for seed in 0..schedules {
        let mut rng = Rng::new(seed);
        let config = random_config(&mut rng);
        let ranks = config.workers.len();
        let faults = faults(&mut rng);
        let mut net = network(config, faults, seed);
        let mut numbers = [0u64; 4];
        let operations: Vec<Operation> = (0..4 + rng.below(20))
            .map(|_| {
                let group = rng.below(4) as usize;
                numbers[group] += 1;
                let mut operation = Operation::random(&mut rng, ranks, 1 << 40 | group as u64, numbers[group] - 1);
                if ranks > 1 && rng.below(8) == 0 {
                    operation.odd = Some(rng.below(ranks as u64) as usize);
                }
                operation
            })
            .collect();
        submit_interleaved(&mut net, &mut rng, &operations);
        let count: usize = operations.iter().map(|o| o.parts.len()).sum();
        let until = net.now + 50 * SECOND;
        let ended = net.run(count, until);
        for rank in 0..ranks {
            for (k, operation) in operations.iter().enumerate() {
                for (i, result) in results(&net, rank, k, operation).into_iter().enumerate() {
                    let what = format!("seed {seed}, rank {rank}, operation {k}");
                    match (result, operation.odd) {
                        (None, _) => panic!("{what}: no end ({ended}, {:?})", net.workers[rank].lost()),
                        (Some(Ok(bytes)), None) => operation.check(i, &bytes, &what),
                        (Some(Ok(_)), Some(_)) => panic!("{what}: different sizes were summed"),
                        (Some(Err(text)), None) => panic!("{what}: {text}"),
                        (Some(Err(text)), Some(odd)) => {
                            // The error names the other side's size.
                            let own = operation.data[0].len() + usize::from(odd == rank);
                            let other = operation.data[0].len() + usize::from(odd != rank);
                            assert!(text.contains(&format!("this rank ({rank}) has {own} float32")), "{what}: {text}");
                            assert!(text.contains(&format!("has {other} float32")), "{what}: {text}");
                        }
                    }
                }
            }
        }
        assert!(net.workers.iter().all(|m| m.lost().is_none() && m.outstanding() == 0));
        assert!(net.server.coordinator().is_some_and(|c| !c.waits()));
        // When all ranks leave the groups, nothing of them stays.
        for member in &mut net.workers {
            (0..4).for_each(|group| member.leave(1 << 40 | group, net.now));
        }
        go_on(&mut net, 20 * SECOND);
        assert_eq!(net.server.coordinator().map(|c| c.groups()), Some(0), "seed {seed}");
    }
}

#[test]
fn a_group_that_one_rank_gives_up_is_over_for_all_and_the_others_go_on() {
    for seed in 0..150 {
        let mut rng = Rng::new(1000 + seed);
        let config = random_config(&mut rng);
        let ranks = config.workers.len();
        let faults = faults(&mut rng);
        let mut net = network(config, faults, seed);
        let operations: Vec<Operation> = (0..12).map(|k| Operation::random(&mut rng, ranks, k % 2, k / 2)).collect();
        // Group 0 is given up by one rank somewhere in the middle; group 1 is not.
        let (quitter, at) = (rng.below(ranks as u64) as usize, 1 + rng.below(5));
        for rank in 0..ranks {
            for (k, operation) in operations.iter().enumerate() {
                if rank == quitter && operation.group == 0 && operation.number == at {
                    let now = net.now;
                    net.workers[rank].abort(0, Code::Timeout, "gave up", now);
                }
                operation.submit(&mut net, rank, token(k));
                if rng.below(3) == 0 {
                    let pause = rng.below(1_000_000);
                    go_on(&mut net, pause);
                }
            }
        }
        let count: usize = operations.iter().map(|o| o.parts.len()).sum();
        let until = net.now + 50 * SECOND;
        assert!(net.run(count, until), "seed {seed}: somebody waits for ever");
        for rank in 0..ranks {
            for (k, operation) in operations.iter().enumerate() {
                let what = format!("seed {seed}, rank {rank}, operation {k}");
                for (i, result) in results(&net, rank, k, operation).into_iter().enumerate() {
                    match result.expect("an end") {
                        Ok(bytes) => {
                            operation.check(i, &bytes, &what);
                            assert!(operation.group == 1 || operation.number < at, "{what}: success alone");
                        }
                        Err(text) => {
                            assert_eq!(operation.group, 0, "{what}: {text}");
                            assert!(text.contains(&format!("rank {quitter}: gave up")), "{what}: {text}");
                        }
                    }
                }
            }
        }
    }
}

fn pair(stall: u64) -> Net {
    let config = Config { stall_timeout: stall * SECOND, auto_scale: true, ..config(&[2], 0, Mode::Shared) };
    network(config, Faults::default(), 1)
}

fn one(rank: usize, net: &mut Net, group: u64, number: u64, k: usize) {
    let operation =
        Operation { group, number, mean: false, parts: vec![100], data: vec![vec![1.0; 100]; 2], odd: None };
    operation.submit(net, rank, token(k));
}

fn error(net: &Net, rank: usize, k: usize) -> String {
    net.results[rank][&token(k)].clone().expect_err("it failed")
}

#[test]
fn a_late_rank_is_no_stall() {
    let mut net = pair(1);
    one(0, &mut net, 5, 0, 0);
    go_on(&mut net, 75 * SECOND);
    assert!(net.results[0].is_empty());
    one(1, &mut net, 5, 0, 0);
    go_on(&mut net, SECOND);
    assert!(net.results.iter().all(|r| r[&token(0)].is_ok()));
}

#[test]
fn a_silent_sidecar_is_named() {
    let mut net = pair(3);
    go_on(&mut net, SECOND);
    one(0, &mut net, 5, 0, 0);
    net.dead[1] = true;
    go_on(&mut net, 5 * SECOND);
    let text = error(&net, 0, 0);
    assert!(text.contains("no progress for 3 s: the sidecar of rank 1 (10.0.0.2) is silent"), "{text}");
    // And whatever comes later fails at once, in every group.
    one(0, &mut net, 6, 0, 1);
    go_on(&mut net, 1);
    assert!(error(&net, 0, 1).contains("rank 1"));
}

#[test]
fn a_rank_without_trainer_is_named() {
    let mut net = pair(3);
    net.workers[1].set_attached(0, 0);
    one(0, &mut net, 5, 0, 0);
    go_on(&mut net, 2 * SECOND);
    assert!(net.results[0].is_empty());
    go_on(&mut net, 3 * SECOND);
    assert!(error(&net, 0, 0).contains("rank 1 (10.0.0.2) has no trainer for 3 s"));
    // Another group of a trainer that came back goes on.
    let now = net.now;
    net.workers[1].set_attached(1, now);
    one(0, &mut net, 6, 0, 1);
    one(1, &mut net, 6, 0, 1);
    go_on(&mut net, SECOND);
    assert!(net.results.iter().all(|r| r[&token(1)].is_ok()));
}

#[test]
fn a_rank_that_left_is_named() {
    let mut net = pair(60);
    one(0, &mut net, 5, 0, 0);
    one(1, &mut net, 5, 0, 0);
    go_on(&mut net, SECOND);
    let now = net.now;
    net.workers[1].leave(5, now);
    one(0, &mut net, 5, 1, 1);
    go_on(&mut net, SECOND);
    assert!(net.results[0][&token(0)].is_ok());
    assert!(error(&net, 0, 1).contains("rank 1 has left the process group"));
}

#[test]
fn a_server_that_started_again_ends_the_epoch() {
    let mut net = pair(60);
    one(0, &mut net, 5, 0, 0);
    go_on(&mut net, SECOND);
    net.server = Host::new(of_server(&net.config), 8).expect("a valid configuration");
    go_on(&mut net, 10 * SECOND);
    for rank in 0..2 {
        assert_eq!(net.workers[rank].lost().map(|f| f.code), Some(Code::PeerGone));
    }
    assert!(error(&net, 0, 0).contains("has started again within epoch 1"));
}

#[test]
fn a_sidecar_that_started_again_ends_the_epoch_unless_nothing_was_said() {
    let mut net = pair(60);
    go_on(&mut net, SECOND);
    net.workers[1] = member(&net.config, 1, 500);
    let now = net.now;
    net.workers[1].set_attached(1, now);
    one(0, &mut net, 5, 0, 0);
    one(1, &mut net, 5, 0, 0);
    go_on(&mut net, SECOND);
    assert!(net.results.iter().all(|r| r[&token(0)].is_ok()), "{:?}", net.results);
    net.workers[1] = member(&net.config, 1, 501);
    one(0, &mut net, 5, 1, 1);
    go_on(&mut net, 10 * SECOND);
    assert!(error(&net, 0, 1).contains("the sidecar of rank 1 (10.0.0.2) has started again"));
    assert_eq!(net.workers[1].lost().map(|f| f.code), Some(Code::PeerGone));
}

#[test]
fn a_silent_server_is_named() {
    let mut net = pair(3);
    go_on(&mut net, SECOND);
    net.faults.loss = 1.0;
    one(0, &mut net, 5, 0, 0);
    go_on(&mut net, 5 * SECOND);
    assert!(error(&net, 0, 0).contains("the parameter server 10.9.0.9:10800 does not answer"));
}

#[test]
fn a_fixed_scale_that_is_too_small_is_told_once() {
    let config = Config { scale: 1e8, ..config(&[2], 0, Mode::Shared) };
    let mut net = network(config, Faults::default(), 1);
    for k in 0..2 {
        for rank in 0..2 {
            let operation = Operation {
                group: 1,
                number: k,
                mean: false,
                parts: vec![100],
                data: vec![vec![3e-9; 100]; 2],
                odd: None,
            };
            operation.submit(&mut net, rank, token(k as usize));
        }
        go_on(&mut net, SECOND);
    }
    let warning = net.workers[0].poll_warning().expect("a warning");
    assert!(warning.contains("100.0 % of the gradient values") && warning.contains("Auto"), "{warning}");
    assert_eq!(net.workers[0].poll_warning(), None);
    let counters = net.workers[0].snapshot().counters;
    assert_eq!(counters.values_rounded_to_zero, 200);
}

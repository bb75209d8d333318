// SPDX-License-Identifier: Apache-2.0
//! Everything of one run, drawn from its seed: topology, links, jobs, background flows and faults.

use atp_proto::fixed::Dtype;
use atp_proto::op::Kind;
use atp_proto::wire::HEADER_BYTES;
use atp_proto::{Mode, Nanos};

use crate::check::{Flavour, OpSpec};
use crate::comparison::Comparison;
use crate::flow::Flow;
use crate::net::{LinkSpec, Net};
use crate::rng::Rng;
use crate::sim::{Action, JobSpec, Sim};

const MS: Nanos = 1_000_000;
/// Virtual time after which what has not ended is stuck.
pub const LIMIT: Nanos = 180_000 * MS;

/// What one run gave.
pub struct Outcome {
    pub sim: Sim,
    pub summary: String,
}

fn some(rng: &mut Rng, share: f64, low: f64, high: f64) -> f64 {
    if rng.chance(share) { rng.log_range(low, high) } else { 0.0 }
}

fn operation(rng: &mut Rng, small: bool) -> OpSpec {
    let count = match rng.below(10) {
        0 => *rng.pick(&[0, 1, 61, 62, 63, 124, 350, 351]),
        1..=5 => rng.log_range(10.0, 2000.0) as usize,
        _ if small => rng.log_range(10.0, 2000.0) as usize,
        _ => rng.log_range(1000.0, 30_000.0) as usize,
    };
    let dtype = *rng.pick(&[Dtype::Float32, Dtype::Float32, Dtype::Int32, Dtype::Float16, Dtype::Bfloat16]);
    let kind = if dtype != Dtype::Int32 && rng.chance(0.3) { Kind::Mean } else { Kind::Sum };
    let flavour = match rng.below(16) {
        0 | 1 => Flavour::Large,
        2 => Flavour::Special,
        _ => Flavour::Small,
    };
    OpSpec { count, dtype, kind, flavour }
}

/// Hosts that are still without a process.
struct Places {
    free: Vec<u32>,
}

impl Places {
    fn take(&mut self, rng: &mut Rng, n: usize) -> Vec<u32> {
        (0..n).map(|_| self.free.swap_remove(rng.below(self.free.len() as u64) as usize)).collect()
    }
}

/// Build the run of a seed.
#[must_use]
#[allow(clippy::too_many_lines)]
pub fn build(seed: u64) -> Outcome {
    let mut rng = Rng::new(seed);
    let rng = &mut rng;
    let large = rng.chance(0.004);
    let racks: Vec<usize> = if large {
        let per_rack = rng.range(2, 6) as usize;
        vec![per_rack; rng.range(24, 32) as usize]
    } else if rng.chance(0.45) {
        vec![rng.range(2, 14) as usize]
    } else {
        let n = rng.range(2, 6) as usize;
        (0..n).map(|_| rng.range(2, 7) as usize).collect()
    };
    let hosts: usize = racks.iter().sum();
    let rate = *rng.pick(&[1u64, 10, 25, 100]) * 1_000_000_000;
    let queue = rng.log_range(20_000.0, 1_000_000.0) as u32;
    let lossy = rng.chance(0.65);
    let host = LinkSpec {
        rate,
        delay: rng.log_range(300.0, 20_000.0) as Nanos,
        queue,
        ecn: if rng.chance(0.7) { queue / rng.range(2, 10) as u32 } else { 0 },
        loss: if lossy { some(rng, 0.8, 1e-5, if large { 0.005 } else { 0.06 }) } else { 0.0 },
        duplicate: if lossy { some(rng, 0.5, 1e-5, 0.03) } else { 0.0 },
        reorder: if lossy { some(rng, 0.5, 1e-4, 0.1) } else { 0.0 },
        late: rng.log_range(1e3, 3e6) as Nanos,
    };
    let fabric = LinkSpec { rate: rate * rng.range(1, 8), ..host };
    let values_max = if rng.chance(0.15) { 350 } else { 62 };
    let mut net = Net::new(&racks, host, fabric, HEADER_BYTES + 4 * values_max, rng.draw());
    // One bad link among good ones.
    if rng.chance(0.15) {
        let link = rng.below(net.links.len() as u64) as u32;
        let spec = net.links[link as usize].spec;
        net.links[link as usize].set_spec(LinkSpec { loss: rng.log_range(0.01, 0.25), ..spec });
    }
    let worst_loss = net.links.iter().map(|l| l.spec.loss).fold(0.0, f64::max);
    let mut sim = Sim::new(net);
    let shared = rng.log_range(4.0, 4096.0) as u32;
    let reserved = 128;
    let stale = if rng.chance(0.2) { 20 * MS } else { 100 * MS };
    for _ in &racks {
        sim.add_switch(shared + reserved, values_max as u32, stale);
    }
    sim.job_ids = if rng.chance(0.4) { rng.range(6, 12) as u8 } else { 255 };

    let mut places = Places { free: (0..hosts as u32).collect() };
    let wanted = if large { 1 } else { rng.range(1, 5) as usize };
    let mut reserved_next = shared;
    let mut jobs = Vec::new();
    let doomed = rng.chance(0.05);
    // Of a generator of its own: what else a seed draws does not hang on it.
    let floors = &mut Rng::new(!seed);
    for _ in 0..wanted {
        if places.free.len() < 2 {
            break;
        }
        let shards = if places.free.len() > 4 && rng.chance(0.15) { 2 } else { 1 };
        let mut servers = places.take(rng, 1);
        if shards == 2 {
            // All shards of a job are under one switch.
            let tor = sim.net.hosts[servers[0] as usize].tor;
            if let Some(i) = places.free.iter().position(|h| sim.net.hosts[*h as usize].tor == tor) {
                servers.push(places.free.swap_remove(i));
            }
        }
        let room = places.free.len();
        if room == 0 {
            break;
        }
        let n = if large { room } else { rng.range(1, room.min(12) as u64) as usize };
        let workers = places.take(rng, n);
        let mut mode = match rng.below(20) {
            0..=2 => Mode::HostOnly,
            3..=5 => Mode::Reserved,
            _ => Mode::Shared,
        };
        let mut slots = 1u32 << rng.range(4, 10);
        let regions = if mode == Mode::Reserved {
            let size = rng.range(8, 64) as u32;
            if reserved_next + size > shared + reserved {
                mode = Mode::Shared;
            }
            reserved_next += size;
            vec![(reserved_next - size, size)]
        } else {
            Vec::new()
        };
        let regions = match mode {
            Mode::Reserved => regions,
            _ if shared >= 16 && rng.chance(0.3) => {
                let half = shared / 2;
                let a = rng.below(u64::from(half / 2)) as u32;
                let b = half + rng.below(u64::from(half / 2)) as u32;
                vec![(a, half / 2), (b, half / 4 + 1)]
            }
            _ => vec![(0, shared)],
        };
        let floor = (mode == Mode::Shared && floors.chance(0.3)).then(|| {
            let size = floors.log_range(1.0, 64.0) as u32;
            reserved_next += size;
            (reserved_next - size, size)
        });
        let floor = floor.filter(|(start, size)| start + size <= shared + reserved);
        if large {
            slots = slots.min(256);
        }
        let max_window = if rng.chance(0.5) { slots } else { rng.range(1, u64::from(slots)) as u32 };
        let ops = if large { rng.range(1, 3) } else { rng.log_range(1.0, 16.0) as u64 };
        let compute = match rng.below(4) {
            0 => (0, 0),
            1 => (0, 30 * MS),
            _ => (0, MS),
        };
        let linger = if rng.chance(0.5) { rng.range(MS, 10 * MS) } else { 2 * stale + rng.range(20 * MS, 40 * MS) };
        let scale = (2_147_483_000.0 / (0.5 * n as f64 + 1.0)).min(1e8).floor();
        jobs.push(sim.add_job(JobSpec {
            mode,
            values: if values_max == 350 && rng.chance(0.6) { 350 } else { 62 },
            workers,
            servers,
            regions,
            floor,
            slots,
            max_window,
            initial_window: *rng.pick(&[2, 10, 200]),
            scale,
            min_rto: *rng.pick(&[1, 4, 4, 4]) * MS,
            // Where much is lost, some packet is lost again and again for seconds.
            stall_timeout: if doomed && worst_loss < 0.01 { 3000 * MS } else { 40_000 * MS },
            first_sequence: if rng.chance(0.3) { (1 << 24) - rng.log_range(1.0, 3000.0) as u64 } else { 0 },
            ops: (0..ops).map(|_| operation(rng, large || rate < 2_000_000_000)).collect(),
            depth: rng.range(1, 4) as usize,
            compute,
            start: if rng.chance(0.5) { 0 } else { rng.below(20 * MS) },
            lone_level1: rng.chance(0.5),
            level0_only: rng.chance(0.1),
            linger,
            comparison: Comparison::None,
        }));
    }
    let mut flows = 0;
    if hosts >= 2 && rng.chance(0.25) {
        flows = rng.range(1, 4);
        for _ in 0..flows {
            let from = rng.below(hosts as u64) as u32;
            let to = (from + 1 + rng.below(hosts as u64 - 1) as u32) % hosts as u32;
            let start = rng.below(10 * MS);
            sim.add_flow(Flow::new(from, to, start, start + rng.log_range(1e5, 2e7) as Nanos));
        }
    }
    if rng.chance(0.3) {
        let every = rng.range(5 * MS, 50 * MS);
        for tor in 0..racks.len() as u32 {
            sim.at(every, Action::Sweep { tor, every });
        }
    }
    let faulty = rng.chance(0.55);
    let mut names = Vec::new();
    if faulty {
        let count = rng.range(1, 6);
        // Most jobs are short: faults in their lifetime, and some later.
        let horizon = rng.log_range(1e5, 6e7);
        for _ in 0..count {
            let at = rng.log_range(1e3, horizon) as Nanos;
            let tor = rng.below(racks.len() as u64) as u32;
            let job = *rng.pick(&jobs);
            let (workers, shards) = {
                let s = &sim.jobs[job as usize].spec;
                (s.workers.len() as u64, s.servers.len() as u64)
            };
            let restart_after = Some(rng.log_range(1e5, 3e8) as Nanos);
            let action = match rng.below(14) {
                0 => Action::Reboot {
                    tor,
                    off: rng.log_range(1e4, 2e8) as Nanos,
                    program_after: rng.log_range(1e4, 2e8) as Nanos,
                },
                1 => Action::StopAggregating { tor, pick: rng.draw(), back_after: None },
                2 | 3 => Action::StopAggregating {
                    tor,
                    pick: rng.draw(),
                    back_after: Some(rng.log_range(1e4, 1e8) as Nanos),
                },
                4 => Action::Reprogram { tor },
                5 | 6 => Action::ClearAggregators { tor },
                7 => Action::KillWorker { job, rank: rng.below(workers) as u16, restart_after },
                8 => Action::KillServer { job, shard: rng.below(shards) as u16, restart_after },
                9 => Action::Amnesia { job, shard: rng.below(shards) as u16 },
                10 | 11 => Action::LinkDown {
                    link: rng.below(sim.net.links.len() as u64) as u32,
                    time: rng.log_range(1e4, 3e8) as Nanos,
                },
                12 => {
                    let link = rng.below(sim.net.links.len() as u64) as u32;
                    let spec = sim.net.links[link as usize].spec;
                    Action::SetLink { link, spec: LinkSpec { loss: rng.log_range(1e-3, 0.2), ..spec } }
                }
                _ => Action::Pause { host: rng.below(hosts as u64) as u32, time: rng.log_range(1e4, 2e8) as Nanos },
            };
            names.push(format!("{:.3} ms {action:?}", at as f64 * 1e-6));
            sim.at(at, action);
        }
    }
    if doomed {
        let job = *rng.pick(&jobs);
        let at = rng.log_range(1e3, 1e7) as Nanos;
        let workers = sim.jobs[job as usize].spec.workers.len() as u64;
        let action = if workers > 1 && rng.chance(0.7) {
            Action::KillWorker { job, rank: rng.below(workers) as u16, restart_after: None }
        } else {
            Action::KillServer { job, shard: 0, restart_after: None }
        };
        names.push(format!("{:.3} ms {action:?}", at as f64 * 1e-6));
        sim.at(at, action);
    }
    sim.clean =
        !faulty && !doomed && sim.net.links.iter().all(|l| l.spec.loss + l.spec.duplicate + l.spec.reorder == 0.0);
    let mut summary = format!(
        "seed {seed}: racks {racks:?}, {} Gbit/s, delay {} us, queue {} KB, ecn {} KB, loss {:.5}, duplicates {:.5}, \
         late {:.5} by up to {} us, {shared}+{reserved} aggregators, T {} ms, {flows} flows",
        rate / 1_000_000_000,
        host.delay as f64 / 1e3,
        queue / 1000,
        host.ecn / 1000,
        host.loss,
        host.duplicate,
        host.reorder,
        host.late / 1000,
        stale / MS,
    );
    for (i, j) in sim.jobs.iter().enumerate() {
        let s = &j.spec;
        let elements: usize = s.ops.iter().map(|o| o.count).sum();
        summary += &format!(
            "\n  job {i}: {:?}, workers on hosts {:?}, PS on {:?}, {} operations with {elements} elements, {} values, P {}, \
             window {}, regions {:?}, floor {:?}, start {:.3} ms, sequence {}",
            s.mode,
            s.workers,
            s.servers,
            s.ops.len(),
            s.values,
            s.slots,
            s.max_window,
            s.regions,
            s.floor,
            s.start as f64 * 1e-6,
            s.first_sequence
        );
    }
    for n in names {
        summary += &format!("\n  fault at {n}");
    }
    Outcome { sim, summary }
}

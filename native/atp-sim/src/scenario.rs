// SPDX-License-Identifier: Apache-2.0
//! The figures: each compares runs of the same code on the same network with one thing changed.

use atp_proto::fixed::Dtype;
use atp_proto::op::Kind;
use atp_proto::wire::{HEADER_BYTES, STALE_NS, VALUES_BASE, VALUES_LARGE};
use atp_proto::{Mode, Nanos};
use serde_json::{Map, Value, json};

use crate::check::{Flavour, OpSpec};
use crate::comparison::Comparison;
use crate::flow::Flow;
use crate::net::{LinkSpec, Net};
use crate::sim::{Action, JobSpec, JobState, Sim};

/// Names and descriptions.
pub const SCENARIOS: [(&str, &str); 9] = [
    ("loss", "goodput at 0.001, 0.01, 0.1 and 1 % loss on every link, relative to none: ATP, and SwitchML's way"),
    ("two-level", "bytes that reach the PS with two levels of aggregation, against one level"),
    ("sharing", "three equal jobs with a third of the aggregators of their peak: shared against reserved regions"),
    ("hash", "eight jobs on shared aggregators: hashed indexes against linear ones"),
    ("congestion", "half of the aggregators that a job needs: with and without congestion control"),
    ("fairness", "two equal jobs, and a job among background flows"),
    (
        "slow",
        "a switch of a thousand packets a second with a short queue that marks nothing: packets sent again, in and out of order",
    ),
    ("floor", "a job among aggregators that another job takes and keeps: with floors of several sizes, and alone"),
    ("scale", "32 racks of 32 workers at 100 Gbit/s: simulated packets a second of wall time"),
];

const MS: Nanos = 1_000_000;
const GBIT: u64 = 1_000_000_000;
const LIMIT: Nanos = 600_000 * MS;

fn link(rate: u64) -> LinkSpec {
    LinkSpec {
        rate,
        delay: 1_000,
        queue: 1 << 20,
        // About 20 microseconds of the link.
        ecn: (rate / 8 / 50_000) as u32,
        loss: 0.0,
        duplicate: 0.0,
        reorder: 0.0,
        late: 0,
    }
}

/// Towards a switch that many racks send to: 16 ports of 100 Gbit/s, with the buffer of such a switch.
fn fabric() -> LinkSpec {
    LinkSpec { queue: 16 << 20, ecn: 1 << 20, ..link(1600 * GBIT) }
}

fn cluster(racks: &[usize], host: LinkSpec, fabric: LinkSpec, aggregators: u32, seed: u64) -> Sim {
    let net = Net::new(racks, host, fabric, HEADER_BYTES + 4 * VALUES_LARGE, seed);
    let mut sim = Sim::new(net);
    sim.tidy = true;
    for _ in racks {
        sim.add_switch(aggregators, VALUES_LARGE as u32, STALE_NS);
    }
    sim
}

/// `count` operations of `elements` float32 each.
fn job(workers: Vec<u32>, server: u32, mode: Mode, region: (u32, u32), count: usize, elements: usize) -> JobSpec {
    let scale = (2_147_483_000.0 / (0.5 * workers.len() as f64 + 1.0)).min(1e8).floor();
    let op = OpSpec { count: elements, dtype: Dtype::Float32, kind: Kind::Sum, flavour: Flavour::Small };
    JobSpec {
        mode,
        values: VALUES_BASE,
        workers,
        servers: vec![server],
        regions: vec![region],
        floor: None,
        slots: 4096,
        max_window: 1024,
        initial_window: 200,
        scale,
        min_rto: 4 * MS,
        stall_timeout: 60_000 * MS,
        first_sequence: 0,
        ops: vec![op; count],
        depth: 4,
        compute: (0, 0),
        start: 0,
        lone_level1: false,
        level0_only: false,
        linger: MS,
        comparison: Comparison::None,
    }
}

/// Goodput of a job in Gbit/s: gradient bytes of one worker over the time of the whole job.
fn goodput(sim: &Sim, job: usize) -> f64 {
    let j = &sim.jobs[job];
    let end = if j.state == JobState::Done { j.ended_at } else { sim.ended };
    j.bytes_done as f64 * 8.0 / j.spec.workers.len() as f64 / (end - j.started_at) as f64
}

fn run(sim: &mut Sim, limit: Nanos) -> Result<(), String> {
    sim.run(limit);
    match sim.violations.iter().find(|v| limit == LIMIT || v.kind != "stuck") {
        None => Ok(()),
        Some(v) => Err(format!("{} at {:.3} ms: {}", v.kind, v.at as f64 * 1e-6, v.text)),
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Jain's fairness index.
fn jain(values: &[f64]) -> f64 {
    let sum: f64 = values.iter().sum();
    let squares: f64 = values.iter().map(|v| v * v).sum();
    sum * sum / (values.len() as f64 * squares)
}

fn round(v: f64) -> f64 {
    (v * 1e4).round() / 1e4
}

/// Run a scenario with `seeds` seeds from `seed` on.
///
/// # Errors
/// When the name is unknown or a property was violated.
pub fn scenario(name: &str, seed: u64, seeds: u64) -> Result<Value, String> {
    let list: Vec<u64> = (seed..seed + seeds).collect();
    let mut out = match name {
        "loss" => loss(&list)?,
        "two-level" => two_level(&list)?,
        "sharing" => sharing(&list)?,
        "hash" => hash(&list)?,
        "congestion" => congestion(&list)?,
        "fairness" => fairness(&list)?,
        "slow" => slow(&list)?,
        "floor" => floor(&list)?,
        "scale" => scale(seed)?,
        _ => return Err(format!("{name} is no scenario; see atp-sim list")),
    };
    out["scenario"] = json!(name);
    out["seeds"] = json!(list);
    Ok(out)
}

/// SwitchML's slots, and how many ATP ones there are for its server to keep every sum: see `comparison::switchml`.
const SWITCHML_SLOTS: u32 = 512;
const SWITCHML_KEPT: u32 = 1 << 14;

/// Packets of a worker's gradients in `loss`.
const LOSS_PACKETS: usize = 100_000;

fn one_loss(percent: f64, comparison: Comparison, tensors: usize, seed: u64) -> Result<(f64, Value), String> {
    let spec = LinkSpec { loss: percent / 100.0, ..link(100 * GBIT) };
    let mut sim = cluster(&[9], spec, spec, 4096, seed);
    let workers: Vec<u32> = (0..8).collect();
    let elements = VALUES_BASE * LOSS_PACKETS / tensors;
    // A fabric for which 4 milliseconds are long: 1 ms, as SwitchML's time-out is.
    let spec = JobSpec { min_rto: MS, comparison, ..job(workers, 8, Mode::Shared, (0, 4096), tensors, elements) };
    sim.add_job(if comparison == Comparison::SwitchMl {
        let regions = vec![(0, SWITCHML_SLOTS)];
        JobSpec { mode: Mode::Reserved, slots: SWITCHML_KEPT, max_window: SWITCHML_SLOTS, regions, ..spec }
    } else {
        spec
    });
    run(&mut sim, LIMIT)?;
    let g = goodput(&sim, 0);
    let totals = sim.totals();
    let get = |n: &str| totals.get(n).copied().unwrap_or(0);
    let detail = json!({
        "goodput_gbit": round(g), "retransmits": get("endpoint.retransmits"), "timeouts": get("endpoint.timeouts"), "probes": get("endpoint.probes"), "reanswers": get("endpoint.reanswers"),
        "needless": get("endpoint.needless_retransmits"), "cuts": get("endpoint.window_cuts"),
        "aggregated": get("endpoint.aggregated_packets"), "by_host": get("endpoint.host_summed_packets")
    });
    Ok((g, detail))
}

fn loss(seeds: &[u64]) -> Result<Value, String> {
    let mut out = json!({});
    // A trainer that has four tensors of 248 kB under way at a time, and one tensor of 24.8 MB.
    for (key, comparison, tensors) in [
        ("atp", Comparison::None, 100),
        ("switchml", Comparison::SwitchMl, 100),
        ("atp_one_tensor", Comparison::None, 1),
        ("switchml_one_tensor", Comparison::SwitchMl, 1),
    ] {
        let mut relative = Map::new();
        let mut details = Map::new();
        let mut base = Vec::new();
        for seed in seeds {
            base.push(one_loss(0.0, comparison, tensors, *seed)?.0);
        }
        let base = mean(&base);
        for percent in ["0.001", "0.01", "0.1", "1"] {
            let mut g = Vec::new();
            for seed in seeds {
                let (rate, detail) = one_loss(percent.parse().unwrap_or(0.0), comparison, tensors, *seed)?;
                g.push(rate);
                details.insert(percent.to_owned(), detail);
            }
            relative.insert(percent.to_owned(), json!(round(mean(&g) / base)));
        }
        out[format!("{key}_relative_goodput")] = Value::Object(relative);
        out[format!("{key}_goodput_gbit")] = json!(round(base));
        out[format!("{key}_details")] = Value::Object(details);
    }
    Ok(out)
}

fn ps_bytes(racks: usize, per_rack: usize, level0_only: bool, seed: u64) -> Result<u64, String> {
    let mut sizes = vec![per_rack; racks];
    sizes.push(1);
    let host = link(100 * GBIT);
    let mut sim = cluster(&sizes, host, fabric(), 4096, seed);
    let n = (racks * per_rack) as u32;
    sim.add_job(JobSpec { level0_only, ..job((0..n).collect(), n, Mode::Shared, (0, 4096), 8, 62 * 1000) });
    run(&mut sim, LIMIT)?;
    let down = sim.net.hosts[n as usize].down;
    Ok(sim.net.links[down as usize].stats.bytes)
}

fn two_level(seeds: &[u64]) -> Result<Value, String> {
    let mut by_racks = Map::new();
    for racks in [2usize, 3, 4, 8] {
        let mut r = Vec::new();
        for seed in seeds {
            let one = ps_bytes(racks, 4, true, *seed)?;
            let two = ps_bytes(racks, 4, false, *seed)?;
            r.push(1.0 - two as f64 / one as f64);
        }
        by_racks.insert(racks.to_string(), json!(round(mean(&r))));
    }
    Ok(json!({"ps_traffic_reduction": by_racks["3"], "ps_traffic_reduction_by_racks": by_racks}))
}

/// Three jobs of four workers that compute and communicate in turn, on `total` aggregators.
fn three_jobs(mode: Mode, total: u32, jobs: u32, compute: Nanos, seed: u64) -> Result<f64, String> {
    let mut sim = cluster(&[5 * jobs as usize], link(100 * GBIT), link(100 * GBIT), total, seed);
    for j in 0..jobs {
        let first = 5 * j;
        let region = if mode == Mode::Reserved { (j * (total / jobs), total / jobs) } else { (0, total) };
        let spec = job((first..first + 4).collect(), first + 4, mode, region, 10, 62 * 8000);
        let start = u64::from(j) * compute / 2;
        let window = 128;
        let compute = (compute, compute + compute / 8);
        sim.add_job(JobSpec { depth: 1, compute, start, slots: window, max_window: window, ..spec });
    }
    run(&mut sim, LIMIT)?;
    Ok(mean(&(0..jobs as usize).map(|j| goodput(&sim, j)).collect::<Vec<_>>()))
}

fn sharing(seeds: &[u64]) -> Result<Value, String> {
    // Aggregators of the peak: the fewest with which one job alone reaches 95 % of what it reaches with plenty.
    let alone = three_jobs(Mode::Reserved, 4096, 1, 0, seeds[0])?;
    let mut peak = 64;
    while peak < 256 && three_jobs(Mode::Reserved, peak, 1, 0, seeds[0])? < 0.95 * alone {
        peak += 16;
    }
    // Communication takes about as long as computation, when all aggregators are there.
    let compute = 250_000;
    let (mut dynamic, mut fixed) = (Vec::new(), Vec::new());
    for seed in seeds {
        dynamic.push(three_jobs(Mode::Shared, peak, 3, compute, *seed)?);
        fixed.push(three_jobs(Mode::Reserved, peak, 3, compute, *seed)?);
    }
    Ok(json!({
        "dynamic_over_static": round(mean(&dynamic) / mean(&fixed)),
        "dynamic_gbit": round(mean(&dynamic)), "static_gbit": round(mean(&fixed)),
        "peak_aggregators_per_job": peak, "aggregators": peak, "share_of_peak": round(1.0 / 3.0),
    }))
}

fn hash(seeds: &[u64]) -> Result<Value, String> {
    let mut mean_rate = [Vec::new(), Vec::new()];
    let mut collisions = [0u64; 2];
    for (i, comparison) in [Comparison::None, Comparison::LinearIndex].into_iter().enumerate() {
        for seed in seeds {
            // Enough aggregators for all windows together, if they do not meet.
            let aggregators = 4096;
            let mut sim = cluster(&[40], link(100 * GBIT), link(100 * GBIT), aggregators, *seed);
            for j in 0..8u32 {
                let first = 5 * j;
                let spec = job((first..first + 4).collect(), first + 4, Mode::Shared, (0, aggregators), 10, 62 * 1000);
                sim.add_job(JobSpec { slots: 512, max_window: 256, comparison, ..spec });
            }
            run(&mut sim, LIMIT)?;
            mean_rate[i].push(mean(&(0..8).map(|j| goodput(&sim, j)).collect::<Vec<_>>()));
            collisions[i] += sim.totals().get("switch.collisions").copied().unwrap_or(0);
        }
    }
    Ok(json!({
        "hash_over_linear": round(mean(&mean_rate[0]) / mean(&mean_rate[1])),
        "hash_gbit": round(mean(&mean_rate[0])), "linear_gbit": round(mean(&mean_rate[1])),
        "hash_collisions": collisions[0], "linear_collisions": collisions[1],
    }))
}

/// Three jobs of eight workers and a PS each, at 10 Gbit/s, on `aggregators` in all.
fn three_busy_jobs(aggregators: u32, comparison: Comparison, seed: u64) -> Sim {
    let spec = LinkSpec { delay: 5_000, ..link(10 * GBIT) };
    let mut sim = cluster(&[27], spec, spec, aggregators, seed);
    for j in 0..3 {
        let spec = job((9 * j..9 * j + 8).collect(), 9 * j + 8, Mode::Shared, (0, aggregators), 100, 62 * 250);
        sim.add_job(JobSpec { slots: 256, max_window: 256, comparison, ..spec });
    }
    sim
}

/// Most aggregators in use at once when there are plenty: those of the peak throughput.
fn peak_aggregators(seed: u64) -> u32 {
    let mut sim = three_busy_jobs(4096, Comparison::None, seed);
    let mut peak = 0;
    let mut at = 0;
    while sim.open_jobs() > 0 && at < LIMIT {
        at += 20_000;
        sim.advance(at);
        peak = peak.max(sim.tors.iter().map(|t| t.switch.occupancy(0)).sum());
    }
    peak
}

/// Mean goodput of the jobs, and the lowest and highest of one job over ten operations.
fn on_aggregators(count: u32, comparison: Comparison, seed: u64) -> Result<(f64, f64, f64), String> {
    let mut sim = three_busy_jobs(count, comparison, seed);
    run(&mut sim, LIMIT)?;
    let bits = (62 * 250 * 4 * 8 * 10) as f64;
    let (mut low, mut high) = (f64::MAX, 0.0f64);
    for job in &sim.jobs {
        let times: Vec<Nanos> = job.operation_ends.iter().copied().step_by(10).collect();
        for w in times.windows(2).skip(1) {
            let rate = bits / (w[1] - w[0]).max(1) as f64;
            (low, high) = (low.min(rate), high.max(rate));
        }
    }
    Ok((mean(&(0..3).map(|j| goodput(&sim, j)).collect::<Vec<_>>()), low, high))
}

fn congestion(seeds: &[u64]) -> Result<Value, String> {
    let (mut with, mut without) = (Vec::new(), Vec::new());
    let (mut with_range, mut without_range) = (Vec::new(), Vec::new());
    let need = peak_aggregators(seeds[0]);
    let plenty = on_aggregators(4096, Comparison::None, seeds[0])?.0;
    for seed in seeds {
        let (g, low, high) = on_aggregators(need / 2, Comparison::None, *seed)?;
        with.push(g);
        with_range.push([round(low), round(high)]);
        let (g, low, high) = on_aggregators(need / 2, Comparison::NoCongestionControl, *seed)?;
        without.push(g);
        without_range.push([round(low), round(high)]);
    }
    let shares: Vec<f64> = two_jobs(seeds)?;
    Ok(json!({
        "peak_aggregators": need, "aggregators": need / 2, "plenty": round(plenty), "with": round(mean(&with)),
        "without": round(mean(&without)), "with_range": with_range, "without_range": without_range,
        "jain": round(jain(&shares)), "unit": "Gbit/s",
    }))
}

/// Goodputs of two jobs whose PSes share a link, on few aggregators.
fn two_jobs(seeds: &[u64]) -> Result<Vec<f64>, String> {
    let mut rates = vec![0.0; 2];
    for seed in seeds {
        let mut sim = cluster(&[4, 4, 2], link(10 * GBIT), link(10 * GBIT), 256, *seed);
        for j in 0..2u32 {
            let spec = job((4 * j..4 * j + 4).collect(), 8 + j, Mode::Shared, (0, 256), 40, 62 * 500);
            sim.add_job(JobSpec { slots: 256, max_window: 256, ..spec });
        }
        run(&mut sim, LIMIT)?;
        for (j, r) in rates.iter_mut().enumerate() {
            *r += goodput(&sim, j);
        }
    }
    Ok(rates)
}

fn fairness(seeds: &[u64]) -> Result<Value, String> {
    let mut gaps = Vec::new();
    let mut indexes = Vec::new();
    let mut rates = Vec::new();
    for seed in seeds {
        let mut sim = cluster(&[10], link(10 * GBIT), link(10 * GBIT), 1024, *seed);
        for j in 0..2u32 {
            sim.add_job(job((5 * j..5 * j + 4).collect(), 5 * j + 4, Mode::Shared, (0, 1024), 20, 62 * 1000));
        }
        run(&mut sim, LIMIT)?;
        let (a, b) = (goodput(&sim, 0), goodput(&sim, 1));
        gaps.push((a - b).abs() / a.max(b));

        // A job with packets as large as theirs and four flows share the link to the PS.
        let mut sim = cluster(&[9], link(10 * GBIT), link(10 * GBIT), 1024, *seed);
        let spec = job((0..4).collect(), 4, Mode::Shared, (0, 1024), 4000, 350 * 100);
        sim.add_job(JobSpec { values: VALUES_LARGE, ..spec });
        for f in 0..4 {
            sim.add_flow(Flow::new(5 + f, 4, 100_000, LIMIT));
        }
        let end = 100 * MS;
        run(&mut sim, end)?;
        let mut r = vec![goodput(&sim, 0) * (HEADER_BYTES + 42 + 1400) as f64 / 1400.0];
        r.extend(sim.flows.iter().map(|f| f.delivered as f64 * 8.0 / end as f64 * 1514.0 / 1472.0));
        indexes.push(jain(&r));
        rates.push(r.iter().map(|v| round(*v)).collect::<Vec<_>>());
    }
    Ok(json!({"jain": round(mean(&indexes)), "rates_gbit": rates, "two_jobs_gap": round(mean(&gaps))}))
}

/// Two workers behind a link of 2.5 Mbit/s that drops what 64 packets of queue do not hold, and marks nothing.
fn slow(seeds: &[u64]) -> Result<Value, String> {
    let mut out = json!({"unit": "Mbit/s"});
    for (name, reorder) in [("ordered", 0.0), ("reordered", 0.1)] {
        let (mut rates, mut again) = (Vec::new(), Vec::new());
        for seed in seeds {
            let host = LinkSpec { delay: 50_000, ecn: 1 << 20, ..link(10 * GBIT) };
            let bytes = (HEADER_BYTES + 42 + 4 * VALUES_BASE) as u32;
            let slow = LinkSpec { rate: GBIT / 400, queue: 64 * bytes, reorder, late: 5 * MS, ..host };
            let mut sim = cluster(&[2, 1], host, slow, 4096, *seed);
            sim.add_job(job(vec![0, 1], 2, Mode::Shared, (0, 4096), 8, 62 * 617));
            run(&mut sim, LIMIT)?;
            let totals = sim.totals();
            let get = |n: &str| totals.get(n).copied().unwrap_or(0) as f64;
            rates.push(1e3 * goodput(&sim, 0));
            again.push(get("endpoint.retransmits") / get("endpoint.gradient_packets"));
        }
        out[format!("{name}_goodput")] = json!(round(mean(&rates)));
        out[format!("{name}_sent_again")] = json!(round(mean(&again)));
    }
    Ok(out)
}

/// Aggregators that the jobs of `floor` share.
const SHARED: u32 = 256;

/// A job of eight workers with so large a floor, while another job's worker takes shared aggregators, so many packets in T,
/// and never completes a sum. Goodput, and the share of the job's gradients that switches added.
fn floored(floor: u32, packets: u64, seed: u64) -> Result<(f64, f64), String> {
    let spec = LinkSpec { delay: 5_000, ..link(10 * GBIT) };
    let mut sim = cluster(&[12], spec, spec, 2 * SHARED + floor, seed);
    // As the operator tells a job with so many aggregators.
    let window = SHARED + floor;
    let victim = job((0..8).collect(), 8, Mode::Shared, (0, SHARED), 60, 62 * 500);
    sim.add_job(JobSpec {
        floor: (floor > 0).then_some((SHARED, floor)),
        slots: window.next_power_of_two(),
        max_window: window,
        start: 2 * MS,
        ..victim
    });
    if let Some(every) = STALE_NS.checked_div(packets) {
        let greedy = sim.add_job(job(vec![9, 10], 11, Mode::Shared, (0, SHARED), 0, 0));
        // All of them are taken when the other job begins.
        for next in 0..u64::from(SHARED) {
            sim.at(MS, Action::Hoard { job: greedy, rank: 0, next: next + packets, every: LIMIT });
        }
        sim.at(MS + every, Action::Hoard { job: greedy, rank: 0, next: 0, every });
    }
    let mut at = 0;
    while sim.jobs[0].state != JobState::Done && at < LIMIT {
        at += MS / 10;
        sim.advance(at);
    }
    if let Some(v) = sim.violations.first() {
        return Err(format!("{} at {:.3} ms: {}", v.kind, v.at as f64 * 1e-6, v.text));
    }
    let goodput = goodput(&sim, 0);
    let totals = sim.totals();
    let get = |n: &str| totals.get(n).copied().unwrap_or(0) as f64;
    let (switches, server) = (get("endpoint.aggregated_packets"), get("endpoint.host_summed_packets"));
    Ok((goodput, switches / (switches + server)))
}

fn floor(seeds: &[u64]) -> Result<Value, String> {
    let mut out = json!({"shared_aggregators": SHARED, "unit": "Gbit/s"});
    for (name, packets) in [("alone", 0), ("attacked", 256), ("attacked_tenfold", 2560)] {
        for size in [0u32, 64, 128, 256] {
            let (mut rates, mut shares) = (Vec::new(), Vec::new());
            for seed in seeds {
                let (rate, share) = floored(size, packets, *seed)?;
                rates.push(rate);
                shares.push(share);
            }
            let promised = f64::from(size) / f64::from((SHARED + size).next_power_of_two());
            out[name][size.to_string()] = json!({
                "goodput": round(mean(&rates)), "aggregated": round(mean(&shares)), "promised": round(promised),
            });
        }
    }
    Ok(out)
}

fn scale(seed: u64) -> Result<Value, String> {
    let mut sizes = vec![32usize; 32];
    sizes.push(1);
    let mut sim = cluster(&sizes, link(100 * GBIT), fabric(), 4096, seed);
    let spec = job((0..1024).collect(), 1024, Mode::Shared, (0, 4096), 2, 62 * 400);
    sim.add_job(JobSpec { slots: 512, max_window: 512, ..spec });
    let started = std::time::Instant::now();
    run(&mut sim, LIMIT)?;
    let seconds = started.elapsed().as_secs_f64();
    Ok(json!({
        "workers": 1024, "goodput_gbit": round(goodput(&sim, 0)), "packets": sim.net.hops, "seconds": round(seconds),
        "packets_per_second": (sim.net.hops as f64 / seconds).round(),
    }))
}

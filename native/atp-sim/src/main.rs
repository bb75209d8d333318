// SPDX-License-Identifier: Apache-2.0
//! Command line of the simulator.

use std::collections::BTreeMap;
use std::io::{BufWriter, Write};
use std::process::ExitCode;
use std::time::Instant;

use atp_sim::scenario;
use atp_sim::schedule::{self, LIMIT};
use atp_sim::trace::{self, Tracer};
use serde_json::json;

const USAGE: &str = "\
atp-sim: the ATP transport and the switch core in virtual time

  atp-sim fuzz --seeds A:B [--json] [--coverage]   run the schedules of the seeds A..B (B excluded)
          [--damage SHARE]                         change a value in so many packets: the check of the checks
  atp-sim replay SEED [--pcap FILE] [--quiet]      run one schedule again and print every packet
  atp-sim scenario NAME [--seed N] [--runs N] [--json]   measure one of the figures, over N seeds from N on
  atp-sim list                                     the scenarios

The exit code is 0 when every property held, 1 when not, 2 for a wrong command line.";

fn usage(problem: &str) -> ExitCode {
    eprintln!("atp-sim: {problem}\n\n{USAGE}");
    ExitCode::from(2)
}

struct Args(Vec<String>);

impl Args {
    fn flag(&mut self, name: &str) -> bool {
        let before = self.0.len();
        self.0.retain(|a| a != name);
        self.0.len() != before
    }

    fn value(&mut self, name: &str) -> Result<Option<String>, String> {
        let Some(i) = self.0.iter().position(|a| a == name) else { return Ok(None) };
        if i + 1 >= self.0.len() {
            return Err(format!("{name} needs a value"));
        }
        self.0.remove(i);
        Ok(Some(self.0.remove(i)))
    }

    fn end(&self) -> Result<(), String> {
        self.0.first().map_or(Ok(()), |a| Err(format!("{a} is not understood here")))
    }
}

fn main() -> ExitCode {
    let mut args: Vec<String> = std::env::args().skip(1).collect();
    if args.is_empty() || args[0] == "--help" || args[0] == "-h" {
        println!("{USAGE}");
        return ExitCode::SUCCESS;
    }
    let command = args.remove(0);
    let args = Args(args);
    let result = match command.as_str() {
        "fuzz" => fuzz(args),
        "replay" => replay(args),
        "scenario" => measure(args),
        "list" => {
            for (name, text) in scenario::SCENARIOS {
                println!("{name:<12} {text}");
            }
            Ok(ExitCode::SUCCESS)
        }
        other => Err(format!("{other} is not a command")),
    };
    result.unwrap_or_else(|problem| usage(&problem))
}

fn range(text: &str) -> Result<(u64, u64), String> {
    let problem = || format!("--seeds is {text}, it must be A:B with A < B, for example 0:1000");
    let (a, b) = text.split_once(':').ok_or_else(problem)?;
    let (a, b) = (a.parse().map_err(|_| problem())?, b.parse().map_err(|_| problem())?);
    if a < b { Ok((a, b)) } else { Err(problem()) }
}

fn fuzz(mut args: Args) -> Result<ExitCode, String> {
    let as_json = args.flag("--json");
    let coverage = args.flag("--coverage");
    let damage = args
        .value("--damage")?
        .map_or(Ok(0.0), |t| t.parse().map_err(|_| format!("--damage is {t}, it must be a share")))?;
    let seeds = args.value("--seeds")?.ok_or("fuzz needs --seeds A:B")?;
    args.end()?;
    let (from, to) = range(&seeds)?;
    let started = Instant::now();
    let (mut packets, mut stuck, mut leaks, mut violations) = (0u64, 0u64, 0u64, 0u64);
    let mut virtual_ns = 0u64;
    let mut restarts = 0u64;
    let mut failures = Vec::new();
    let mut totals: BTreeMap<String, u64> = BTreeMap::new();
    for seed in from..to {
        let mut run = schedule::build(seed);
        run.sim.net.damage = damage;
        run.sim.run(LIMIT);
        packets += run.sim.net.hops;
        virtual_ns += run.sim.ended;
        leaks += run.sim.leaks;
        restarts += run.sim.jobs.iter().map(|j| u64::from(j.restarts)).sum::<u64>();
        for (name, value) in run.sim.totals() {
            *totals.entry(name).or_default() += value;
        }
        for v in &run.sim.violations {
            if v.kind == "stuck" {
                stuck += 1;
            } else if v.kind != "leak" {
                violations += 1;
            }
        }
        if let Some(v) = run.sim.violations.first() {
            if !as_json {
                println!("seed {seed}: {} at {:.6} ms: {}", v.kind, v.at as f64 * 1e-6, v.text);
                println!("  replay: atp-sim replay {seed} --pcap seed-{seed}.pcap");
            }
            failures.push(json!({
                "seed": seed, "kind": v.kind, "at_ms": v.at as f64 * 1e-6, "text": v.text,
                "replay": format!("atp-sim replay {seed} --pcap seed-{seed}.pcap"),
            }));
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    let rate = packets as f64 / seconds;
    if as_json {
        let mut out = json!({
            "schedules": to - from, "violations": violations, "stuck": stuck, "leaks": leaks,
            "packets_per_second": rate.round(), "packets": packets, "seconds": seconds,
            "virtual_seconds": virtual_ns as f64 * 1e-9, "restarts": restarts, "failures": failures,
        });
        if coverage {
            out["coverage"] = json!(totals);
        }
        println!("{out}");
    } else {
        println!(
            "{} schedules, {violations} violations, {stuck} stuck, {leaks} leaked aggregators; {packets} packets in {seconds:.1} s \
             ({rate:.0} a second), {:.1} s of virtual time, {restarts} restarts",
            to - from,
            virtual_ns as f64 * 1e-9
        );
        if coverage {
            for (name, value) in &totals {
                println!("  {name:<36} {value}");
            }
        }
    }
    Ok(if violations + stuck + leaks == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn number(args: &mut Args, name: &str, default: u64) -> Result<u64, String> {
    args.value(name)?.map_or(Ok(default), |t| t.parse().map_err(|_| format!("{name} is {t}, it must be a number")))
}

fn measure(mut args: Args) -> Result<ExitCode, String> {
    let as_json = args.flag("--json");
    let seed = number(&mut args, "--seed", 1)?;
    let seeds = number(&mut args, "--runs", 3)?.max(1);
    if args.0.len() != 1 {
        return Err("scenario needs one NAME; see atp-sim list".into());
    }
    let name = args.0.remove(0);
    if !scenario::SCENARIOS.iter().any(|s| s.0 == name) {
        return Err(format!("{name} is no scenario; see atp-sim list"));
    }
    match scenario::scenario(&name, seed, seeds) {
        Ok(value) if as_json => println!("{value}"),
        Ok(value) => println!("{value:#}"),
        Err(text) => {
            eprintln!("atp-sim: scenario {name}: {text}");
            return Ok(ExitCode::FAILURE);
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn replay(mut args: Args) -> Result<ExitCode, String> {
    let pcap = args.value("--pcap")?;
    let quiet = args.flag("--quiet");
    if args.0.len() != 1 {
        return Err("replay needs one SEED".into());
    }
    let seed: u64 = args.0[0].parse().map_err(|_| format!("{} is not a seed", args.0[0]))?;
    let mut run = schedule::build(seed);
    println!("{}", run.summary);
    let pcap = pcap.map(|p| trace::file(&p).map_err(|e| format!("{p}: {e}"))).transpose()?;
    let text: Option<Box<dyn Write>> = if quiet { None } else { Some(Box::new(BufWriter::new(std::io::stdout()))) };
    run.sim.tracer = Some(Tracer::new(text, pcap));
    run.sim.run(LIMIT);
    if let Some(t) = run.sim.tracer.take() {
        t.finish().map_err(|e| format!("the trace could not be written: {e}"))?;
    }
    println!();
    for v in &run.sim.violations {
        println!("{:.6} ms {}: {}", v.at as f64 * 1e-6, v.kind, v.text);
    }
    println!("{} violations after {:.6} ms", run.sim.violations.len(), run.sim.ended as f64 * 1e-6);
    Ok(if run.sim.violations.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

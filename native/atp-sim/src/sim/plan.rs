// SPDX-License-Identifier: Apache-2.0
//! What the operator would plan: places of workers, programs of switches, assignments.

use std::net::Ipv4Addr;

use atp_proto::{Config, Mode};
use atp_switch::Program;

use super::{JobSpec, Sim};
use crate::net::Net;

impl Sim {
    /// Racks, bits and edge of the workers: (rack, bit, edge) by rank.
    fn places(&self, spec: &JobSpec) -> Vec<(u32, u32, bool)> {
        let tor = |h: u32| self.net.hosts[h as usize].tor;
        let ps = tor(spec.servers[0]);
        let mut tors: Vec<u32> = spec.workers.iter().map(|h| tor(*h)).collect();
        tors.sort_unstable();
        tors.dedup();
        if tors == [ps] {
            return (0..spec.workers.len() as u32).map(|bit| (0, bit, false)).collect();
        }
        let under_ps = spec.workers.iter().filter(|h| tor(**h) == ps).count();
        tors.retain(|t| *t != ps);
        let racks = tors.len() as u32;
        let edge = racks as usize + under_ps <= 32;
        let mut next = vec![0u32; self.net.tors.len()];
        spec.workers
            .iter()
            .map(|h| {
                let t = tor(*h);
                let n = next[t as usize];
                next[t as usize] += 1;
                match tors.iter().position(|x| *x == t) {
                    Some(rack) => (rack as u32, n, false),
                    None if edge => (racks + n, 0, true),
                    None => (racks, n, false),
                }
            })
            .collect()
    }

    /// What each switch of the job must hold, as the operator plans it.
    pub(super) fn programs(&self, spec: &JobSpec, tors: &[u32]) -> Vec<Option<Program>> {
        if spec.mode == Mode::HostOnly {
            return vec![None; tors.len()];
        }
        let places = self.places(spec);
        let host = |i: usize| &self.net.hosts[spec.workers[i] as usize];
        let ps_tor = self.net.hosts[spec.servers[0] as usize].tor;
        let ps_ports: Vec<u32> = spec.servers.iter().map(|h| Net::port(self.net.hosts[*h as usize].down)).collect();
        let all: Vec<usize> = (0..spec.workers.len()).collect();
        let worker_tors: Vec<u32> = all.iter().map(|i| host(*i).tor).collect();
        let single = worker_tors.iter().all(|t| *t == ps_tor);
        tors.iter()
            .map(|t| {
                let local: Vec<usize> = all.iter().copied().filter(|i| host(*i).tor == *t).collect();
                let uplink = Net::port(self.net.tors[*t as usize].up);
                let mut p = Program {
                    values: spec.values as u32,
                    full0: 0,
                    full1: 0,
                    regions: spec.regions.iter().copied().chain(spec.floor).collect(),
                    admission: Vec::new(),
                    transit: Vec::new(),
                    ps_ports: Vec::new(),
                    group: local.iter().map(|i| (Net::port(host(*i).down), host(*i).ip)).collect(),
                };
                if single || *t != ps_tor {
                    for i in &local {
                        p.full0 |= 1 << places[*i].1;
                        p.admission.push((Net::port(host(*i).down), false, 1 << places[*i].1));
                    }
                    p.ps_ports = if single { ps_ports.clone() } else { vec![uplink] };
                } else {
                    p.ps_ports.clone_from(&ps_ports);
                    let mut racks: Vec<(u32, u32, u32)> = Vec::new();
                    for i in &all {
                        let (rack, bit, edge) = places[*i];
                        if edge {
                            p.full1 |= 1 << rack;
                            p.admission.push((Net::port(host(*i).down), true, 1 << rack));
                        } else if host(*i).tor == ps_tor {
                            // Too many racks for a bit each: the PS sums these workers itself.
                            p.admission.push((Net::port(host(*i).down), false, 1 << bit));
                        } else {
                            match racks.iter_mut().find(|r| r.0 == rack) {
                                Some(r) => r.1 |= 1 << bit,
                                None => racks.push((rack, 1 << bit, host(*i).ip)),
                            }
                        }
                    }
                    for (rack, mask, ip) in racks {
                        p.full1 |= 1 << rack;
                        p.admission.push((uplink, true, 1 << rack));
                        p.transit.push((uplink, 1 << rack, mask));
                        p.group.push((uplink, ip));
                    }
                    if spec.level0_only || (p.full1.count_ones() == 1 && !spec.lone_level1) {
                        p.full1 = 0;
                    }
                }
                Some(p)
            })
            .collect()
    }

    /// The assignment of shard 0, as the operator would write it. The others differ in role and rank.
    pub(super) fn config(&self, job: u32) -> Config {
        let j = &self.jobs[job as usize];
        let spec = &j.spec;
        let places = self.places(spec);
        let ip = |h: u32| Ipv4Addr::from(self.net.hosts[h as usize].ip).to_string();
        let workers: Vec<serde_json::Value> = spec
            .workers
            .iter()
            .zip(&places)
            .enumerate()
            .map(|(rank, (h, (rack, bit, edge)))| {
                serde_json::json!({"rank": rank, "address": ip(*h), "rack": rack, "bit": bit, "edge": edge})
            })
            .collect();
        let servers: Vec<serde_json::Value> = spec
            .servers
            .iter()
            .enumerate()
            .map(|(shard, h)| serde_json::json!({"shard": shard, "address": ip(*h)}))
            .collect();
        let shared = spec.regions.iter().map(|r| (r, false));
        let regions: Vec<serde_json::Value> = shared
            .chain(spec.floor.iter().map(|r| (r, true)))
            .map(|((start, size), floor)| serde_json::json!({"start": start, "size": size, "floor": floor}))
            .collect();
        let text = serde_json::json!({
            "job": format!("job-{job}"), "epoch": j.epoch, "jobId": j.job_id,
            "mode": match spec.mode { Mode::Shared => "Shared", Mode::Reserved => "Reserved", Mode::HostOnly => "HostOnly" },
            "role": "parameterServer", "rank": 0, "valuesPerPacket": spec.values, "scale": spec.scale, "regions": regions,
            "indexTableSize": spec.slots, "maxWindow": spec.max_window,
            "stallTimeoutSeconds": spec.stall_timeout as f64 * 1e-9,
            "workers": workers, "parameterServers": servers,
        });
        let mut config = Config::from_json(&text.to_string()).expect("the schedule makes valid assignments");
        config.initial_window = spec.initial_window.min(spec.max_window);
        config.min_rto = spec.min_rto;
        config.first_sequence = spec.first_sequence;
        config
    }

    pub(super) fn tors_of(&self, spec: &JobSpec) -> Vec<u32> {
        let hosts = spec.workers.iter().chain(&spec.servers);
        let mut tors: Vec<u32> = hosts.map(|h| self.net.hosts[*h as usize].tor).collect();
        tors.sort_unstable();
        tors.dedup();
        tors
    }

    /// A job ID that rests at none of the job's switches.
    pub(super) fn free_id(&mut self, tors: &[u32]) -> Option<u8> {
        let now = self.net.now;
        let free: Vec<u8> = (1..=self.job_ids)
            .filter(|id| {
                tors.iter().all(|t| {
                    let t = &self.tors[*t as usize];
                    !t.desired.contains_key(id) && t.rest_until[usize::from(*id)] <= now
                })
            })
            .collect();
        (!free.is_empty()).then(|| *self.net.rng.pick(&free))
    }
}

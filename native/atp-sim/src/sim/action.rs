// SPDX-License-Identifier: Apache-2.0
//! What happens at a time of its own: the control plane's work, and faults.

use atp_proto::coverage::Topology;
use atp_proto::wire::{HEADER_BYTES, Header};
use atp_proto::{Nanos, seq};
use atp_switch::Switch;

use super::{JobState, Power, QUARANTINE, Sim, Victim};
use crate::net::{LinkSpec, Packet};

/// What happens at a time of its own.
#[derive(Clone, Debug)]
pub enum Action {
    StartJob(u32),
    /// Begin an epoch: new job ID, switches, processes.
    StartEpoch(u32),
    StartEndpoint {
        job: u32,
        epoch: u32,
        index: u16,
    },
    Submit {
        job: u32,
        epoch: u32,
        rank: u16,
    },
    ProgramSwitch {
        tor: u32,
        job_id: u8,
    },
    ForgetJob {
        tor: u32,
        job_id: u8,
    },
    EndJob {
        job: u32,
    },
    CheckLeak {
        job: u32,
        job_id: u8,
    },
    /// The switch loses its memory and forwards again after the given time.
    Reboot {
        tor: u32,
        off: Nanos,
        program_after: Nanos,
    },
    PowerOn {
        tor: u32,
        program_after: Nanos,
    },
    /// The switch forgets one random job, and maybe learns it again.
    StopAggregating {
        tor: u32,
        pick: u64,
        back_after: Option<Nanos>,
    },
    /// The agent writes everything again.
    Reprogram {
        tor: u32,
    },
    /// All aggregators are lost, the tables stay.
    ClearAggregators {
        tor: u32,
    },
    Sweep {
        tor: u32,
        every: Nanos,
    },
    KillWorker {
        job: u32,
        rank: u16,
        restart_after: Option<Nanos>,
    },
    KillServer {
        job: u32,
        shard: u16,
        restart_after: Option<Nanos>,
    },
    /// A parameter server process starts again within its epoch.
    Amnesia {
        job: u32,
        shard: u16,
    },
    LinkDown {
        link: u32,
        time: Nanos,
    },
    LinkUp {
        link: u32,
    },
    SetLink {
        link: u32,
        spec: LinkSpec,
    },
    Pause {
        host: u32,
        time: Nanos,
    },
    Resume {
        host: u32,
    },
    /// A worker that wants other jobs' aggregators: its gradients are in order, but nobody completes them. One for each
    /// sequence from `next` on, each to the next index of the region that it shares.
    Hoard {
        job: u32,
        rank: u16,
        next: u64,
        every: Nanos,
    },
}

impl Sim {
    pub(super) fn act(&mut self, action: Action) {
        self.note(|| format!("{action:?}"));
        match action {
            Action::StartJob(job) => {
                self.jobs[job as usize].started_at = self.net.now;
                self.start_epoch(job);
            }
            Action::StartEpoch(job) => {
                // Those that lived may have finished meanwhile.
                if self.jobs[job as usize].state == JobState::Broken {
                    self.start_epoch(job);
                }
            }
            Action::StartEndpoint { job, epoch, index } => self.start_endpoint(job, epoch, index),
            Action::Submit { job, epoch, rank } => self.submit(job, epoch, rank),
            Action::ProgramSwitch { tor, job_id } => {
                let t = &mut self.tors[tor as usize];
                if t.power == Power::On
                    && let Some(p) = t.desired.get(&job_id)
                {
                    t.switch.program(job_id, p);
                }
            }
            Action::ForgetJob { tor, job_id } => {
                let now = self.net.now;
                let t = &mut self.tors[tor as usize];
                t.desired.remove(&job_id);
                t.rest_until[usize::from(job_id)] = now + QUARANTINE;
                if t.power == Power::On {
                    t.switch.forget(job_id);
                    let left = t.switch.occupancy(job_id);
                    if left > 0 {
                        self.leaks += u64::from(left);
                        self.violate(
                            "leak",
                            format!("switch {tor} holds {left} aggregators of deleted job ID {job_id}"),
                        );
                    }
                }
            }
            Action::EndJob { job } => self.end_job(job),
            Action::CheckLeak { job, job_id } => self.check_leak(job, job_id),
            Action::Reboot { tor, off, program_after } => {
                let t = &mut self.tors[tor as usize];
                if t.power == Power::On {
                    Self::collect_switch(t);
                    t.power = Power::Off;
                    t.switch = Switch::new(t.aggregators, t.values, t.stale);
                    self.after(off, Action::PowerOn { tor, program_after });
                }
            }
            Action::PowerOn { tor, program_after } => {
                self.tors[tor as usize].power = Power::On;
                self.after(program_after, Action::Reprogram { tor });
            }
            Action::Reprogram { tor } => {
                let t = &mut self.tors[tor as usize];
                if t.power == Power::On {
                    let mut ids: Vec<u8> = t.desired.keys().copied().collect();
                    ids.sort_unstable();
                    for id in ids {
                        t.switch.program(id, &t.desired[&id]);
                    }
                }
            }
            Action::StopAggregating { tor, pick, back_after } => {
                let t = &mut self.tors[tor as usize];
                let mut ids: Vec<u8> = t.desired.keys().copied().collect();
                ids.sort_unstable();
                if t.power == Power::On && !ids.is_empty() {
                    let job_id = ids[(pick % ids.len() as u64) as usize];
                    t.switch.forget(job_id);
                    if let Some(after) = back_after {
                        self.after(after, Action::ProgramSwitch { tor, job_id });
                    }
                }
            }
            Action::ClearAggregators { tor } => {
                let t = &mut self.tors[tor as usize];
                if t.power == Power::On {
                    let mut ids: Vec<u8> = t.desired.keys().copied().filter(|id| t.switch.knows(*id)).collect();
                    ids.sort_unstable();
                    for id in ids {
                        t.switch.forget(id);
                        t.switch.program(id, &t.desired[&id]);
                    }
                }
            }
            Action::Sweep { tor, every } => {
                let now = self.net.now;
                let t = &mut self.tors[tor as usize];
                if t.power == Power::On {
                    t.switch.sweep(now);
                }
                self.after(every, Action::Sweep { tor, every });
            }
            Action::KillWorker { job, rank, restart_after } => {
                let index = usize::from(rank);
                self.kill(job, index, Victim::Worker(rank), restart_after);
            }
            Action::KillServer { job, shard, restart_after } => {
                let index = self.jobs[job as usize].spec.workers.len() + usize::from(shard);
                self.kill(job, index, Victim::Server(shard), restart_after);
            }
            Action::Amnesia { job, shard } => {
                let j = &self.jobs[job as usize];
                if j.state == JobState::Running {
                    let index = (j.spec.workers.len() + usize::from(shard)) as u16;
                    let epoch = j.epoch;
                    let Some(e) = self.endpoint_of(job, usize::from(index)) else { return };
                    self.jobs[job as usize].amnesia = true;
                    self.remove_endpoint(e);
                    self.start_endpoint(job, epoch, index);
                }
            }
            Action::LinkDown { link, time } => {
                for l in [link, link ^ 1] {
                    self.net.links[l as usize].up = false;
                }
                self.after(time, Action::LinkUp { link });
            }
            Action::LinkUp { link } => {
                for l in [link, link ^ 1] {
                    self.net.links[l as usize].up = true;
                }
            }
            Action::Hoard { job, rank, next, every } => {
                self.hoard(job, rank, next);
                self.after(every, Action::Hoard { job, rank, next: next + 1, every });
            }
            Action::SetLink { link, spec } => self.net.links[link as usize].set_spec(spec),
            Action::Pause { host, time } => {
                self.net.hosts[host as usize].paused = true;
                self.after(time, Action::Resume { host });
            }
            Action::Resume { host } => {
                let h = &mut self.net.hosts[host as usize];
                h.paused = false;
                let waiting = std::mem::take(&mut h.socket);
                let endpoint = h.endpoint;
                for id in waiting {
                    match endpoint {
                        Some(e) if self.running[e as usize].alive => self.deliver(e, id),
                        _ => self.net.drop_packet(id),
                    }
                }
                if let Some(e) = endpoint {
                    let now = self.net.now;
                    let running = &mut self.running[e as usize];
                    running.armed = Nanos::MAX;
                    let endpoint = running.machine.endpoint();
                    if endpoint.poll_timeout().is_some_and(|t| t <= now) {
                        endpoint.handle_timeout(now);
                    }
                    self.pump(e);
                }
            }
        }
    }

    fn kill(&mut self, job: u32, index: usize, victim: Victim, restart_after: Option<Nanos>) {
        let j = &self.jobs[job as usize];
        if j.state != JobState::Running {
            return;
        }
        let Some(e) = self.endpoint_of(job, index) else { return };
        self.remove_endpoint(e);
        let now = self.net.now;
        let j = &mut self.jobs[job as usize];
        match restart_after {
            Some(after) => {
                j.state = JobState::Broken;
                self.after(after, Action::StartEpoch(job));
            }
            None => j.victim = Some((victim, now)),
        }
    }

    /// One gradient of a worker that no other worker of its job completes.
    fn hoard(&mut self, job: u32, rank: u16, seq: u64) {
        let j = &self.jobs[job as usize];
        let Some(config) = &j.config else { return };
        let worker = config.workers[usize::from(rank)];
        let (fan_in_degree0, fan_in_degree1) = Topology::new(config).fan_in(worker.rack);
        let (start, size) = j.spec.regions[0];
        let header = Header {
            job_id: config.job_id,
            sequence: seq::wrap(seq),
            bitmap0: 1 << worker.bit,
            bitmap1: 1 << worker.rack,
            fan_in_degree0,
            fan_in_degree1,
            aggregator_index: (u64::from(start) + seq % u64::from(size)) as u16,
            ..Header::default()
        };
        let (length, dst) = (config.packet_bytes(), u32::from(*config.servers[0].ip()));
        let host = &self.net.hosts[j.spec.workers[usize::from(rank)] as usize];
        let (up, src) = (host.up, host.ip);
        let buffer = self.net.new_buffer();
        let bytes = &mut self.net.buffer_mut(buffer)[..length];
        bytes.fill(0);
        bytes[..HEADER_BYTES].copy_from_slice(&header.pack());
        let id = self.net.new_packet(Packet { src, dst, length: length as u32, buffer, ..Packet::default() });
        self.send(up, id);
    }
}

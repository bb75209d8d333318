// SPDX-License-Identifier: Apache-2.0
//! One run: jobs of real endpoints (`atp-proto`) and real switch cores (softswitch/) on the network, the control plane that
//! programs and restarts them, faults, and the properties that every run must have.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::net::{Ipv4Addr, SocketAddrV4};

use atp_proto::config::Comparison;
use atp_proto::coverage::Topology;
use atp_proto::wire::{HEADER_BYTES, Header, UDP_PORT};
use atp_proto::worker::Submission;
use atp_proto::{Config, Endpoint, Mode, Nanos, ParameterServer, Role, Worker, seq};

use crate::check::{Expected, Flavour, OpSpec, source};
use crate::flow::{self, Flow};
use crate::net::{Due, Fate, LinkSpec, NO_BUFFER, Net, Node, Packet};
use crate::trace::Tracer;
use atp_switch::{Emit, Program, Switch, counter_names};

/// Bytes that a host's socket and queue hold before the transport is not asked for more.
const HOST_BACKLOG: u64 = 64 * 1024;
/// Packets that wait for a process that does not run.
const SOCKET_PACKETS: usize = 512;
/// How long a job ID rests after its job has left a switch.
pub const QUARANTINE: Nanos = 400_000_000;

#[derive(Clone, Debug)]
pub struct JobSpec {
    pub mode: Mode,
    pub values: usize,
    pub workers: Vec<u32>,
    pub servers: Vec<u32>,
    pub regions: Vec<(u32, u32)>,
    /// A region of this job alone, beside those that it shares.
    pub floor: Option<(u32, u32)>,
    pub slots: u32,
    pub max_window: u32,
    pub initial_window: u32,
    pub scale: f64,
    pub min_rto: Nanos,
    pub stall_timeout: Nanos,
    pub first_sequence: u64,
    pub ops: Vec<OpSpec>,
    /// Operations that a worker has submitted at most at once.
    pub depth: usize,
    /// Time between the end of an operation and the submission of the next one that waits for it.
    pub compute: (Nanos, Nanos),
    pub start: Nanos,
    /// Level 1 also where all workers share one rack elsewhere.
    pub lone_level1: bool,
    /// The job's ACKs go to the group, but its packets are not aggregated at level 1.
    pub level0_only: bool,
    /// Time between the end of the job and its removal from the switches.
    pub linger: Nanos,
    pub comparison: Comparison,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobState {
    Waiting,
    Running,
    /// A process died; the control plane has not started the next epoch yet.
    Broken,
    Done,
    Failed,
}

pub struct Job {
    pub spec: JobSpec,
    pub state: JobState,
    pub epoch: u32,
    pub job_id: u8,
    config: Option<Config>,
    endpoints: Vec<u32>,
    /// By rank, in this epoch.
    submitted: Vec<usize>,
    pub completed: Vec<usize>,
    /// Operation that this epoch starts with.
    resume: usize,
    expected: HashMap<usize, (Expected, usize)>,
    /// A process died that nobody restarts: errors that name it must come.
    pub victim: Option<(Victim, Nanos)>,
    /// A parameter server lost its memory without a new epoch: a stall is its right outcome.
    amnesia: bool,
    pub started_at: Nanos,
    pub ended_at: Nanos,
    errors: usize,
    pub restarts: u32,
    /// When operations ended at rank 0.
    pub operation_ends: Vec<Nanos>,
    /// Of all workers: bytes of results.
    pub bytes_done: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Victim {
    Worker(u16),
    Server(u16),
}

enum Machine {
    Worker(Box<Worker>),
    Server(Box<ParameterServer>),
}

struct Running {
    machine: Machine,
    host: u32,
    job: u32,
    epoch: u32,
    rank: u16,
    armed: Nanos,
    alive: bool,
    handled: u32,
}

impl Running {
    fn endpoint(&mut self) -> &mut dyn Endpoint {
        match &mut self.machine {
            Machine::Worker(w) => &mut **w,
            Machine::Server(s) => &mut **s,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Power {
    On,
    /// Reboots: everything that comes is lost.
    Off,
}

pub struct TorState {
    pub switch: Switch,
    pub power: Power,
    aggregators: u32,
    values: u32,
    stale: Nanos,
    /// Programs that the control plane wants here.
    desired: HashMap<u8, Program>,
    /// Job IDs may be used again from then on.
    rest_until: [Nanos; 256],
    totals: Vec<u64>,
}

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

#[derive(Clone, Debug)]
pub struct Violation {
    pub at: Nanos,
    pub kind: &'static str,
    pub text: String,
}

pub struct Sim {
    pub net: Net,
    pub tors: Vec<TorState>,
    pub jobs: Vec<Job>,
    pub flows: Vec<Flow>,
    running: Vec<Running>,
    actions: Vec<Option<Action>>,
    pub violations: Vec<Violation>,
    pub leaks: u64,
    /// Loss, duplication, reordering and faults are all off: ACKs must have released everything.
    pub clean: bool,
    pub tracer: Option<Tracer>,
    open_jobs: usize,
    emits: Vec<Emit>,
    endpoint_totals: HashMap<&'static str, u64>,
    /// Time at which everything was over.
    pub ended: Nanos,
    pub peak_window: f64,
    /// Switches, parameter servers and workers of a job start one after the other, as measurements want it.
    pub tidy: bool,
    /// Highest job ID in use: few of them make reuse frequent.
    pub job_ids: u8,
}

fn address(ip: u32) -> SocketAddrV4 {
    SocketAddrV4::new(Ipv4Addr::from(ip), UDP_PORT as u16)
}

impl Sim {
    #[must_use]
    pub fn new(net: Net) -> Self {
        Self {
            net,
            tors: Vec::new(),
            jobs: Vec::new(),
            flows: Vec::new(),
            running: Vec::new(),
            actions: Vec::new(),
            violations: Vec::new(),
            leaks: 0,
            clean: false,
            tracer: None,
            open_jobs: 0,
            emits: Vec::new(),
            endpoint_totals: HashMap::new(),
            ended: 0,
            peak_window: 0.0,
            job_ids: 255,
            tidy: false,
        }
    }

    pub fn add_switch(&mut self, aggregators: u32, values: u32, stale: Nanos) {
        self.tors.push(TorState {
            switch: Switch::new(aggregators, values, stale),
            power: Power::On,
            aggregators,
            values,
            stale,
            desired: HashMap::new(),
            rest_until: [0; 256],
            totals: vec![0; counter_names().len()],
        });
    }

    pub fn add_job(&mut self, spec: JobSpec) -> u32 {
        let id = self.jobs.len() as u32;
        let start = spec.start;
        let n = spec.workers.len();
        self.jobs.push(Job {
            spec,
            state: JobState::Waiting,
            epoch: 0,
            job_id: 0,
            config: None,
            endpoints: Vec::new(),
            submitted: vec![0; n],
            completed: vec![0; n],
            resume: 0,
            expected: HashMap::new(),
            victim: None,
            amnesia: false,
            started_at: start,
            ended_at: 0,
            errors: 0,
            restarts: 0,
            operation_ends: Vec::new(),
            bytes_done: 0,
        });
        self.open_jobs += 1;
        self.at(start, Action::StartJob(id));
        id
    }

    pub fn add_flow(&mut self, flow: Flow) {
        let id = self.flows.len() as u32;
        self.net.queue.push(flow.start, Due::Flow(id));
        self.flows.push(flow);
    }

    pub fn at(&mut self, time: Nanos, action: Action) {
        self.actions.push(Some(action));
        self.net.queue.push(time, Due::Control(self.actions.len() as u32 - 1));
    }

    fn after(&mut self, delay: Nanos, action: Action) {
        self.at(self.net.now + delay, action);
    }

    fn note(&mut self, text: impl FnOnce() -> String) {
        if let Some(t) = &mut self.tracer {
            t.note(self.net.now, &text());
        }
    }

    fn violate(&mut self, kind: &'static str, text: String) {
        self.note(|| format!("VIOLATION {kind}: {text}"));
        // One broken run tells the same many times.
        if self.violations.len() < 20 {
            self.violations.push(Violation { at: self.net.now, kind, text });
        }
    }

    // ---- the loop ----

    /// Run until all jobs have ended or `limit` is reached.
    pub fn run(&mut self, limit: Nanos) {
        self.advance(limit);
        for i in 0..self.jobs.len() {
            let job = &self.jobs[i];
            if matches!(job.state, JobState::Done | JobState::Failed) {
                continue;
            }
            let text = format!(
                "job {i} ({:?}) {:?} in epoch {}: ranks have completed {:?} of {} operations",
                job.spec.mode,
                job.state,
                job.epoch,
                job.completed,
                job.spec.ops.len()
            );
            self.violate("stuck", text);
        }
    }

    /// Jobs that have not ended.
    #[must_use]
    pub fn open_jobs(&self) -> usize {
        self.open_jobs
    }

    /// Let time pass until `limit` or until every job has ended.
    pub fn advance(&mut self, limit: Nanos) {
        while let Some((at, due)) = self.net.queue.pop() {
            if at > limit {
                self.net.queue.push(at, due);
                self.net.now = limit;
                break;
            }
            self.net.now = at;
            match due {
                Due::Link(link) => {
                    let id = self.net.take_head(link);
                    self.arrive(link, id);
                }
                Due::Late(id) => {
                    let link = self.net.packet(id).link;
                    self.arrive(link, id);
                }
                Due::Timer(e) => self.timer(e),
                Due::Wake(h) => {
                    self.net.hosts[h as usize].wake_armed = false;
                    if let Some(e) = self.net.hosts[h as usize].endpoint {
                        self.pump(e);
                    }
                }
                Due::Control(i) => {
                    if let Some(action) = self.actions[i as usize].take() {
                        self.act(action);
                    }
                }
                Due::Flow(f) => {
                    self.pump_flow(f);
                    let now = self.net.now;
                    if let Some(at) = self.flows[f as usize].on_timer(now) {
                        self.net.queue.push(at, Due::Flow(f));
                    }
                }
            }
            if self.open_jobs == 0 {
                break;
            }
        }
        self.ended = self.net.now;
    }

    fn trace_sent(&mut self, link: u32, id: u32) {
        // Before the packet is consumed.
        if let Some(t) = &mut self.tracer {
            t.packet(&self.net, link, id);
        }
    }

    fn send(&mut self, link: u32, id: u32) {
        self.trace_sent(link, id);
        self.net.send(link, id);
        if let Some(t) = &mut self.tracer {
            t.fate(self.net.last_fate);
        }
    }

    fn arrive(&mut self, link: u32, id: u32) {
        match self.net.links[link as usize].to {
            Node::Host(h) => self.host_receives(h, id),
            Node::Tor(t) => self.switch_receives(t, link, id),
            Node::Core => {
                let dst = self.net.packet(id).dst;
                match self.net.route(Node::Core, dst) {
                    Some(out) => self.send(out, id),
                    None => self.net.drop_packet(id),
                }
            }
        }
    }

    fn switch_receives(&mut self, t: u32, link: u32, id: u32) {
        let p = *self.net.packet(id);
        let tor = &mut self.tors[t as usize];
        if tor.power == Power::Off {
            self.net.drop_packet(id);
            return;
        }
        if p.buffer == NO_BUFFER {
            match self.net.route(Node::Tor(t), p.dst) {
                Some(out) => self.send(out, id),
                None => self.net.drop_packet(id),
            }
            return;
        }
        let now = self.net.now;
        // The core changes gradients in place, ACKs and raw packets never.
        let flags = self.net.data(id)[13];
        let gradient = flags & 3 == 0;
        let mut emits = std::mem::take(&mut self.emits);
        emits.clear();
        let data = if gradient { self.net.data_mut(id) } else { self.net.data_shared(id) };
        emits.extend_from_slice(tor.switch.process(Net::port(link ^ 1), p.dst, p.ce, data, now));
        if let Some(tr) = &mut self.tracer
            && emits.is_empty()
        {
            tr.keeps(now, t, self.net.data(id));
        }
        // An ACK with edge=1 is for one worker.
        let replicated = flags & 0x23 == 2;
        let last = emits.len().wrapping_sub(1);
        for (i, e) in emits.iter().enumerate() {
            let copy = if i == last { id } else { self.net.copy(id) };
            self.net.packet_mut(copy).dst = e.dst_ip;
            let out = if replicated && e.port != 0 { Some(e.port - 1) } else { self.net.route(Node::Tor(t), e.dst_ip) };
            match out {
                Some(out) => self.send(out, copy),
                None => self.net.drop_packet(copy),
            }
        }
        if emits.is_empty() {
            self.net.drop_packet(id);
        }
        self.emits = emits;
    }

    fn host_receives(&mut self, h: u32, id: u32) {
        let p = *self.net.packet(id);
        let host = &mut self.net.hosts[h as usize];
        if p.dst != host.ip {
            self.net.drop_packet(id);
            self.violate("misrouted", format!("host {h} got a packet for address {:#x}", p.dst));
            return;
        }
        if p.buffer == NO_BUFFER {
            self.net.drop_packet(id);
            self.flow_packet(&p);
            return;
        }
        let Some(e) = host.endpoint else {
            self.net.drop_packet(id);
            return;
        };
        if host.paused {
            if host.socket.len() < SOCKET_PACKETS {
                host.socket.push_back(id);
            } else {
                self.net.drop_packet(id);
            }
            return;
        }
        self.deliver(e, id);
        self.pump(e);
    }

    fn deliver(&mut self, e: u32, id: u32) {
        let p = *self.net.packet(id);
        let now = self.net.now;
        let running = &mut self.running[e as usize];
        let data = self.net.data(id);
        match &mut running.machine {
            Machine::Worker(w) => w.handle(address(p.src), p.ce, data, now),
            Machine::Server(s) => s.handle(address(p.src), p.ce, data, now),
        }
        running.handled += 1;
        if running.handled.is_multiple_of(512) {
            self.check_window(e);
        }
        self.net.drop_packet(id);
    }

    fn timer(&mut self, e: u32) {
        let now = self.net.now;
        let running = &mut self.running[e as usize];
        if !running.alive || running.armed != now {
            return;
        }
        running.armed = Nanos::MAX;
        if self.net.hosts[running.host as usize].paused {
            return;
        }
        let endpoint = running.endpoint();
        if endpoint.poll_timeout().is_some_and(|t| t <= now) {
            endpoint.handle_timeout(now);
        }
        self.pump(e);
    }

    /// Let an endpoint send what it wants, take what it has finished, set its timer.
    fn pump(&mut self, e: u32) {
        let now = self.net.now;
        let running = &self.running[e as usize];
        let h = running.host;
        let host = &self.net.hosts[h as usize];
        if !running.alive || host.paused {
            return;
        }
        let up = host.up;
        let ip = host.ip;
        let limit = HOST_BACKLOG * 8_000_000_000 / self.net.links[up as usize].spec.rate;
        let mut buffer = None;
        loop {
            let backlog = self.net.links[up as usize].backlog(now);
            if backlog > limit {
                let host = &mut self.net.hosts[h as usize];
                if !host.wake_armed {
                    host.wake_armed = true;
                    self.net.queue.push(now + backlog - limit, Due::Wake(h));
                }
                break;
            }
            let b = match buffer.take() {
                Some(b) => b,
                None => self.net.new_buffer(),
            };
            let running = &mut self.running[e as usize];
            let bytes = self.net.buffer_mut(b);
            let transmit = match &mut running.machine {
                Machine::Worker(w) => w.poll_transmit(now, bytes),
                Machine::Server(s) => s.poll_transmit(now, bytes),
            };
            let Some(t) = transmit else {
                buffer = Some(b);
                break;
            };
            let id = self.net.new_packet(Packet {
                src: ip,
                dst: u32::from(*t.to.ip()),
                length: t.length as u32,
                buffer: b,
                flow: 0,
                number: 0,
                ce: false,
                ack: false,
                echo: false,
                link: 0,
            });
            self.send(up, id);
        }
        if let Some(b) = buffer {
            self.net.release_buffer(b);
        }
        loop {
            let running = &mut self.running[e as usize];
            let Machine::Worker(w) = &mut running.machine else { break };
            let Some(event) = w.poll_event() else { break };
            let (job, epoch, rank) = (running.job, running.epoch, running.rank);
            self.operation_ended(job, epoch, rank, event);
            if !self.running[e as usize].alive {
                return;
            }
        }
        self.arm(e);
    }

    fn arm(&mut self, e: u32) {
        let now = self.net.now;
        let running = &mut self.running[e as usize];
        if let Some(at) = running.endpoint().poll_timeout() {
            let at = at.max(now + 1);
            if at < running.armed {
                running.armed = at;
                self.net.queue.push(at, Due::Timer(e));
            }
        }
    }

    fn check_window(&mut self, e: u32) {
        let running = &mut self.running[e as usize];
        let Machine::Worker(w) = &running.machine else { return };
        let s = w.snapshot();
        let config = w.config();
        let max = f64::from(config.max_window);
        self.peak_window = self.peak_window.max(s.window);
        let bad = !(s.window >= 2.0f64.min(max) && s.window <= max)
            || s.open_sequences > u64::from(config.slots)
            || s.in_flight > s.open_sequences;
        if bad {
            let text = format!(
                "job {} rank {}: window {} of at most {max}, {} in flight, {} open sequences",
                running.job, running.rank, s.window, s.in_flight, s.open_sequences
            );
            self.violate("window", text);
        }
    }

    // ---- background flows ----

    fn pump_flow(&mut self, f: u32) {
        let now = self.net.now;
        loop {
            let flow = &mut self.flows[f as usize];
            let (from, to) = (flow.from as usize, flow.to as usize);
            let Some(number) = flow.poll(now) else { return };
            let (src, dst, up) = (self.net.hosts[from].ip, self.net.hosts[to].ip, self.net.hosts[from].up);
            self.send_background(up, src, dst, f, number, false, false);
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn send_background(&mut self, up: u32, src: u32, dst: u32, flow: u32, number: u32, ack: bool, echo: bool) {
        let length = if ack { flow::ACK } else { flow::DATA };
        let p = Packet { src, dst, length, buffer: NO_BUFFER, flow, number, ce: false, ack, echo, link: 0 };
        let id = self.net.new_packet(p);
        self.send(up, id);
    }

    fn flow_packet(&mut self, p: &Packet) {
        if p.ack {
            let now = self.net.now;
            self.flows[p.flow as usize].on_ack(p.number, p.echo, now);
            self.pump_flow(p.flow);
        } else if let Some(h) = self.net.host_of(p.dst) {
            let up = self.net.hosts[h as usize].up;
            self.send_background(up, p.dst, p.src, p.flow, p.number, true, p.ce);
        }
    }

    // ---- jobs ----

    fn act(&mut self, action: Action) {
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
                    let endpoint = running.endpoint();
                    if endpoint.poll_timeout().is_some_and(|t| t <= now) {
                        endpoint.handle_timeout(now);
                    }
                    self.pump(e);
                }
            }
        }
    }

    fn endpoint_of(&self, job: u32, index: usize) -> Option<u32> {
        self.jobs[job as usize].endpoints.iter().copied().find(|e| {
            let r = &self.running[*e as usize];
            let workers = self.jobs[job as usize].spec.workers.len();
            let i = match r.machine {
                Machine::Worker(_) => usize::from(r.rank),
                Machine::Server(_) => workers + usize::from(r.rank),
            };
            r.alive && i == index
        })
    }

    fn remove_endpoint(&mut self, e: u32) {
        self.check_window(e);
        let running = &mut self.running[e as usize];
        if !running.alive {
            return;
        }
        running.alive = false;
        let host = running.host as usize;
        let list = running.endpoint().snapshot().counters.list();
        for (name, value) in list {
            *self.endpoint_totals.entry(name).or_default() += value;
        }
        // Its memory goes.
        if let Machine::Worker(w) = &mut running.machine {
            w.cancel_all("the process ended");
            while w.poll_event().is_some() {}
        }
        self.net.hosts[host].endpoint = None;
        for id in std::mem::take(&mut self.net.hosts[host].socket) {
            self.net.drop_packet(id);
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

    /// A job ID that rests at none of the job's switches.
    fn free_id(&mut self, tors: &[u32]) -> Option<u8> {
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

    fn tors_of(&self, spec: &JobSpec) -> Vec<u32> {
        let hosts = spec.workers.iter().chain(&spec.servers);
        let mut tors: Vec<u32> = hosts.map(|h| self.net.hosts[*h as usize].tor).collect();
        tors.sort_unstable();
        tors.dedup();
        tors
    }

    fn start_epoch(&mut self, job: u32) {
        let now = self.net.now;
        let spec = self.jobs[job as usize].spec.clone();
        let tors = self.tors_of(&spec);
        let old = self.jobs[job as usize].job_id;
        for e in std::mem::take(&mut self.jobs[job as usize].endpoints) {
            self.remove_endpoint(e);
        }
        let Some(id) = self.free_id(&tors) else {
            // All rest: wait, as the operator does.
            self.after(QUARANTINE / 4, Action::StartEpoch(job));
            self.jobs[job as usize].state = JobState::Broken;
            return;
        };
        let j = &mut self.jobs[job as usize];
        if j.epoch > 0 {
            j.restarts += 1;
        }
        j.epoch += 1;
        j.job_id = id;
        j.state = JobState::Running;
        j.amnesia = false;
        j.victim = None;
        j.resume = j.completed.iter().copied().min().unwrap_or(0);
        let resume = j.resume;
        j.completed.fill(resume);
        j.submitted.fill(resume);
        j.expected.clear();
        let epoch = j.epoch;
        if old != 0 {
            self.leave(&tors, old);
        }
        self.jobs[job as usize].config = Some(self.config(job));
        let programs = self.programs(&spec, &tors);
        for (t, program) in tors.iter().zip(programs) {
            // The ID is taken at once, the entries come when the agent gets to it.
            let Some(program) = program else { continue };
            self.tors[*t as usize].desired.insert(id, program);
            let delay = if self.tidy { 0 } else { self.net.rng.below(200_000) };
            self.after(delay, Action::ProgramSwitch { tor: *t, job_id: id });
        }
        // Also where a HostOnly job has no entries, nobody else may use its ID.
        for t in &tors {
            self.tors[*t as usize].rest_until[usize::from(id)] = Nanos::MAX;
        }
        for index in 0..spec.workers.len() + spec.servers.len() {
            let skew = match self.tidy {
                true => {
                    if index < spec.workers.len() {
                        2_000
                    } else {
                        1_000
                    }
                }
                false => self.net.rng.below(300_000),
            };
            self.at(now + skew, Action::StartEndpoint { job, epoch, index: index as u16 });
        }
    }

    /// Take a job ID off the switches, each when its agent gets to it.
    fn leave(&mut self, tors: &[u32], job_id: u8) {
        for t in tors {
            let delay = self.net.rng.below(2_000_000);
            self.after(delay, Action::ForgetJob { tor: *t, job_id });
        }
    }

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
    fn programs(&self, spec: &JobSpec, tors: &[u32]) -> Vec<Option<Program>> {
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
    fn config(&self, job: u32) -> Config {
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

    fn start_endpoint(&mut self, job: u32, epoch: u32, index: u16) {
        let j = &self.jobs[job as usize];
        if j.epoch != epoch || j.state != JobState::Running {
            return;
        }
        let n = j.spec.workers.len() as u16;
        let (role, rank) = if index < n { (Role::Worker, index) } else { (Role::ParameterServer, index - n) };
        let host = if index < n { j.spec.workers[usize::from(rank)] } else { j.spec.servers[usize::from(rank)] };
        let comparison = j.spec.comparison;
        let template = j.config.as_ref().expect("made with the epoch");
        let config = Config { role, rank, ..template.clone() };
        let machine = match role {
            Role::Worker => Machine::Worker(Box::new(Worker::compared(config, comparison).expect("role worker"))),
            Role::ParameterServer => {
                Machine::Server(Box::new(ParameterServer::compared(config, comparison).expect("role PS")))
            }
        };
        let e = self.running.len() as u32;
        self.running.push(Running { machine, host, job, epoch, rank, armed: Nanos::MAX, alive: true, handled: 0 });
        self.net.hosts[host as usize].endpoint = Some(e);
        self.jobs[job as usize].endpoints.push(e);
        if role == Role::Worker {
            self.submit(job, epoch, rank);
        }
    }

    fn submit(&mut self, job: u32, epoch: u32, rank: u16) {
        let now = self.net.now;
        let j = &self.jobs[job as usize];
        if j.epoch != epoch || !matches!(j.state, JobState::Running | JobState::Broken) {
            return;
        }
        let Some(e) = self.endpoint_of(job, usize::from(rank)) else { return };
        let r = usize::from(rank);
        loop {
            let j = &mut self.jobs[job as usize];
            let k = j.submitted[r];
            if k >= j.spec.ops.len() || k >= j.completed[r] + j.spec.depth {
                break;
            }
            j.submitted[r] += 1;
            let op = j.spec.ops[k];
            let memory = source(&op, Self::salt(job, k), r, 0, op.count);
            if let Machine::Worker(w) = &mut self.running[e as usize].machine {
                w.submit(
                    Submission {
                        token: u64::from(epoch) << 32 | k as u64,
                        op_id: k as u64,
                        kind: op.kind,
                        dtype: op.dtype,
                        count: op.count as u64,
                        scale: None,
                        memory: Box::new(memory),
                    },
                    now,
                );
            }
        }
        self.pump(e);
    }

    fn salt(job: u32, op: usize) -> u64 {
        u64::from(job) << 40 | op as u64
    }

    fn operation_ended(&mut self, job: u32, epoch: u32, rank: u16, event: atp_proto::Event) {
        let now = self.net.now;
        let k = (event.token & 0xffff_ffff) as usize;
        let r = usize::from(rank);
        if let Some(failure) = event.error {
            self.operation_failed(job, rank, &failure.text);
            return;
        }
        let j = &mut self.jobs[job as usize];
        if event.token >> 32 != u64::from(epoch) || j.completed[r] != k || j.epoch != epoch {
            let text = format!(
                "job {job} rank {rank}: operation {k} ended out of turn or twice (completed {})",
                j.completed[r]
            );
            self.violate("twice", text);
            return;
        }
        j.completed[r] += 1;
        let op = j.spec.ops[k];
        let (ranks, values, scale) = (j.spec.workers.len(), j.spec.values, j.spec.scale);
        let (expected, seen) =
            j.expected.entry(k).or_insert_with(|| (Expected::new(&op, Self::salt(job, k), ranks, values, scale), 0));
        *seen += 1;
        let result = expected.verify(event.memory.source());
        if r == 0 {
            j.operation_ends.push(now);
        }
        j.bytes_done += (op.count * op.dtype.size()) as u64;
        if *seen == ranks {
            j.expected.remove(&k);
        }
        if let Err(text) = result {
            self.violate("wrong sum", format!("job {job} epoch {epoch} operation {k} ({op:?}) at rank {rank}: {text}"));
        }
        let j = &self.jobs[job as usize];
        if j.completed.iter().all(|c| *c == j.spec.ops.len()) {
            self.job_done(job);
            return;
        }
        if j.victim.is_some() {
            self.end_if_nobody_lives(job);
        }
        let j = &self.jobs[job as usize];
        if j.completed[r] < j.spec.ops.len() {
            let (low, high) = j.spec.compute;
            let delay = self.net.rng.range(low, high);
            if delay == 0 {
                self.submit(job, epoch, rank);
            } else {
                self.at(now + delay, Action::Submit { job, epoch, rank });
            }
        }
    }

    fn operation_failed(&mut self, job: u32, rank: u16, text: &str) {
        let now = self.net.now;
        self.note(|| format!("job {job} rank {rank}: {text}"));
        let j = &mut self.jobs[job as usize];
        if j.state == JobState::Broken {
            return;
        }
        match j.victim {
            None if j.amnesia => {
                // The operator sees the error and begins a new epoch.
                j.state = JobState::Broken;
                self.after(1_000_000, Action::StartEpoch(job));
            }
            None => {
                let text = format!("job {job} ({:?}) rank {rank}: {text}", j.spec.mode);
                self.violate("error without cause", text);
                self.end_failed(job);
            }
            Some((victim, at)) => {
                let spec = &j.spec;
                let took = now.saturating_sub(at);
                // A server that forgot may also miss ranks that had finished.
                let named = j.amnesia
                    || match victim {
                        Victim::Worker(v) => text.contains(&format!("rank {v} ")),
                        Victim::Server(_) => text.contains("does not answer"),
                    };
                let late = took > 2 * spec.stall_timeout + 1_000_000_000;
                let mut problem = String::new();
                if !named {
                    let _ = write!(problem, "the error does not name the dead {victim:?}: {text}");
                } else if late {
                    let _ = write!(problem, "the error came {} s after the death", took as f64 * 1e-9);
                }
                j.errors += 1;
                if !problem.is_empty() {
                    self.violate("bad error", format!("job {job} rank {rank}: {problem}"));
                }
                if let Some(e) = self.endpoint_of(job, usize::from(rank)) {
                    self.remove_endpoint(e);
                }
                self.end_if_nobody_lives(job);
            }
        }
    }

    /// After a death without restart: all that live must end, with an error or because they had what they need.
    fn end_if_nobody_lives(&mut self, job: u32) {
        let j = &self.jobs[job as usize];
        let total = j.spec.ops.len();
        let living = j.endpoints.iter().any(|e| {
            let r = &self.running[*e as usize];
            r.alive && matches!(r.machine, Machine::Worker(_)) && j.completed[usize::from(r.rank)] < total
        });
        if !living && j.state == JobState::Running {
            self.end_failed(job);
        }
    }

    fn end_failed(&mut self, job: u32) {
        self.jobs[job as usize].state = JobState::Failed;
        let linger = self.jobs[job as usize].spec.linger;
        self.after(linger, Action::EndJob { job });
    }

    fn job_done(&mut self, job: u32) {
        let now = self.net.now;
        let j = &mut self.jobs[job as usize];
        j.state = JobState::Done;
        j.ended_at = now;
        let (linger, job_id) = (j.spec.linger, j.job_id);
        // All endpoints are gone within a millisecond or so; packets on the way, later.
        let flight: Nanos =
            self.net.links.iter().map(|l| l.spec.late + l.spec.delay).max().unwrap_or(0) * 6 + 5_000_000;
        let stale = self.tors.iter().map(|t| t.stale).max().unwrap_or(0);
        let endpoints = self.jobs[job as usize].endpoints.clone();
        for e in endpoints {
            self.remove_endpoint(e);
        }
        // What turned raw after its request had passed leaves an aggregator to T: raw results release nothing.
        let raw = self.jobs[job as usize].spec.ops.iter().any(|op| op.flavour != Flavour::Small);
        if self.clean && !raw {
            self.after(flight.min(linger.saturating_sub(1)), Action::CheckLeak { job, job_id });
        }
        if linger > stale + flight {
            self.after(stale + flight, Action::CheckLeak { job, job_id });
        }
        self.after(linger, Action::EndJob { job });
    }

    fn check_leak(&mut self, job: u32, job_id: u8) {
        let now = self.net.now;
        let tors = self.tors_of(&self.jobs[job as usize].spec.clone());
        let early = self.clean && now < self.jobs[job as usize].ended_at + self.tors[0].stale;
        for t in tors {
            let tor = &mut self.tors[t as usize];
            if tor.power == Power::Off {
                continue;
            }
            if !early {
                // Idle for longer than T: whoever meets them may take them.
                tor.switch.sweep(now);
            }
            let left = tor.switch.occupancy(job_id);
            if left > 0 {
                self.leaks += u64::from(left);
                let how = if early { "although nothing was lost" } else { "after T" };
                self.violate("leak", format!("switch {t} still holds {left} aggregators of job {job} {how}"));
            }
        }
    }

    fn end_job(&mut self, job: u32) {
        for e in std::mem::take(&mut self.jobs[job as usize].endpoints) {
            self.remove_endpoint(e);
        }
        let spec = self.jobs[job as usize].spec.clone();
        let tors = self.tors_of(&spec);
        let job_id = self.jobs[job as usize].job_id;
        self.leave(&tors, job_id);
        if self.jobs[job as usize].ended_at == 0 {
            self.jobs[job as usize].ended_at = self.net.now;
        }
        self.open_jobs -= 1;
    }

    fn collect_switch(t: &mut TorState) {
        for id in 0..=255u8 {
            for (total, c) in t.totals.iter_mut().zip(t.switch.counters(id)) {
                *total += c;
            }
        }
    }

    /// Sums of the counters of all switches and endpoints, by name. To be called once, at the end.
    pub fn totals(&mut self) -> HashMap<String, u64> {
        let mut out: HashMap<String, u64> = HashMap::new();
        for t in &mut self.tors {
            Self::collect_switch(t);
            for (name, value) in counter_names().iter().zip(&t.totals) {
                *out.entry(format!("switch.{name}")).or_default() += value;
            }
        }
        let alive: Vec<u32> = (0..self.running.len() as u32).filter(|e| self.running[*e as usize].alive).collect();
        for e in alive {
            self.remove_endpoint(e);
        }
        for (name, value) in &self.endpoint_totals {
            *out.entry(format!("endpoint.{name}")).or_default() += value;
        }
        for l in &self.net.links {
            for (name, value) in [
                ("lost", l.stats.lost),
                ("overflowed", l.stats.overflowed),
                ("duplicated", l.stats.duplicated),
                ("late", l.stats.late),
                ("marked", l.stats.marked),
                ("cut", l.stats.cut),
            ] {
                *out.entry(format!("link.{name}")).or_default() += value;
            }
        }
        out
    }
}

/// One line about a packet.
#[must_use]
pub fn describe(data: &[u8]) -> String {
    let Some(h) = Header::unpack(data) else { return format!("{} bytes", data.len()) };
    let kind = match (h.is_ack, h.raw_float, h.resend) {
        (false, false, false) => "gradient",
        (false, false, true) => "resend",
        (true, false, false) => "ack",
        (true, false, true) => "request",
        (false, true, _) => "raw",
        (true, true, _) => match h.aggregator_index {
            2 => "notice",
            _ => "raw-result",
        },
    };
    let first = data.get(HEADER_BYTES..HEADER_BYTES + 4).map_or(0, |b| i32::from_be_bytes([b[0], b[1], b[2], b[3]]));
    format!(
        "{kind:<10} job={} seq={} b0={:#x} b1={:#x} index={}{}{}{} v0={first}",
        h.job_id,
        h.sequence,
        h.bitmap0,
        h.bitmap1,
        h.aggregator_index,
        if h.edge_switch_identifier { " edge" } else { "" },
        if h.collision { " collision" } else { "" },
        if h.ecn { " ecn" } else { "" },
    )
}

/// Words for a fate.
#[must_use]
pub fn fate_text(fate: Fate) -> &'static str {
    match fate {
        Fate::Sent => "",
        Fate::Late => " -- late",
        Fate::Duplicated => " -- twice",
        Fate::Lost => " -- LOST",
        Fate::Overflow => " -- DROPPED (queue full)",
        Fate::LinkDown => " -- DROPPED (link down)",
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The assignment of one endpoint: who it is, who its peers are, which aggregators its job may use.

use std::net::{Ipv4Addr, SocketAddrV4};

use serde::Deserialize;

use crate::Nanos;
use crate::seal::{KEY_BYTES, Seal};
use crate::{fixed, wire};

/// How a job uses switches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum Mode {
    /// ATP: aggregators are shared with other jobs, first come, first served.
    Shared,
    /// A region of aggregators belongs to this job alone, as in SwitchML.
    Reserved,
    /// No switch takes part; the parameter server sums everything.
    HostOnly,
}

/// Which end of the transport an endpoint is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Role {
    Worker,
    ParameterServer,
}

/// A contiguous range of aggregator indexes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Region {
    pub start: u32,
    pub size: u32,
    /// In mode Shared: this job's alone, whatever others send.
    #[serde(default)]
    pub floor: bool,
}

impl Region {
    fn overlaps(&self, other: &Self) -> bool {
        self.start < other.start + other.size && other.start < self.start + self.size
    }
}

/// One worker of the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerEntry {
    pub rank: u16,
    pub address: SocketAddrV4,
    pub rack: u8,
    pub bit: u8,
    /// Enters level 1 directly, as a rack of one.
    pub edge: bool,
}

/// A checked assignment.
#[derive(Clone, Debug)]
pub struct Config {
    pub job: String,
    pub epoch: u64,
    pub job_id: u8,
    pub mode: Mode,
    pub role: Role,
    /// Worker: its rank. Parameter server: its shard.
    pub rank: u16,
    /// 32-bit values in every packet.
    pub values: usize,
    /// Fixed-point factor s, where an operation does not bring its own.
    pub scale: f64,
    /// The ranks agree on a scale for each part of an operation.
    pub auto_scale: bool,
    /// Largest |x * s| that is sent as an integer. Smaller than `fixed::LIMIT` where a switch's sum could leave int32
    /// unseen.
    pub addend_limit: i32,
    pub bind: SocketAddrV4,
    pub regions: Vec<Region>,
    /// P: slots of the index table.
    pub slots: u32,
    /// Largest window, packets; at most P.
    pub max_window: u32,
    pub stall_timeout: Nanos,
    /// Sorted by rank; ranks are 0..n.
    pub workers: Vec<WorkerEntry>,
    /// Sorted by shard; shards are 0..n.
    pub servers: Vec<SocketAddrV4>,
    /// Of packets that are believed, not summed.
    pub seal: Seal,
    /// A relay that gradients and group ACKs are sent to instead of the peer.
    pub switch: Option<SocketAddrV4>,
    /// Let the kernel cut and join runs of packets (UDP_SEGMENT, UDP_GRO). Switches on the way must see packets one by one,
    /// without a checksum, so by default only without them or with a relay, which has a socket of its own.
    pub segmentation: bool,
    /// Initial window, packets.
    pub initial_window: u32,
    /// Smallest retransmission timeout.
    pub min_rto: Nanos,
    /// Largest retransmission timeout after back-off.
    pub max_rto: Nanos,
    /// Where the sequence space of this epoch starts; 0 but in tests of the wrap.
    pub first_sequence: u64,
}

/// Why an assignment cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError(pub String);

impl std::fmt::Display for ConfigError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ConfigError {}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawWorker {
    rank: u32,
    address: Ipv4Addr,
    #[serde(default)]
    rack: u32,
    #[serde(default)]
    bit: u32,
    #[serde(default)]
    edge: bool,
    port: Option<u16>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawServer {
    #[serde(default)]
    shard: u32,
    address: Ipv4Addr,
    port: Option<u16>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Raw {
    #[serde(default)]
    job: String,
    #[serde(default)]
    epoch: u64,
    job_id: u32,
    mode: Mode,
    role: Role,
    #[serde(default)]
    rank: u32,
    values_per_packet: u32,
    #[serde(default)]
    scale: RawScale,
    addend_limit: Option<u32>,
    #[serde(default = "default_port")]
    port: u16,
    bind_address: Option<Ipv4Addr>,
    #[serde(default)]
    regions: Vec<Region>,
    #[serde(default = "default_slots")]
    index_table_size: u32,
    max_window: Option<u32>,
    #[serde(default = "default_stall")]
    stall_timeout_seconds: f64,
    workers: Vec<RawWorker>,
    parameter_servers: Vec<RawServer>,
    key: Option<String>,
    switch_address: Option<Ipv4Addr>,
    segmentation_offload: Option<bool>,
}

/// `"Auto"` or a number.
#[derive(Deserialize)]
#[serde(untagged)]
enum RawScale {
    Fixed(f64),
    Word(String),
}

impl Default for RawScale {
    fn default() -> Self {
        Self::Word("Auto".to_owned())
    }
}

fn default_port() -> u16 {
    10800
}
fn default_slots() -> u32 {
    1024
}
fn default_stall() -> f64 {
    60.0
}

/// Largest payload that fits one UDP datagram of IPv4.
const VALUES_MAX: u32 = (65507 - 16) / 4;
/// Largest index table; the sequence space must hold many times as much (see `seq::unwrap`).
const SLOTS_MAX: u32 = 1 << 18;

macro_rules! bail {
    ($($arg:tt)*) => { return Err(ConfigError(format!($($arg)*))) };
}

fn parse_key(text: &str) -> Result<[u8; KEY_BYTES], ConfigError> {
    let mut key = [0; KEY_BYTES];
    if text.len() != 2 * KEY_BYTES || !text.bytes().all(|c| c.is_ascii_hexdigit()) {
        bail!("key must be {} hexadecimal digits", 2 * KEY_BYTES);
    }
    for (at, byte) in key.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).map_err(|e| ConfigError(format!("key: {e}")))?;
    }
    Ok(key)
}

impl Config {
    /// Parse and check the assignment JSON. Unknown fields are ignored.
    ///
    /// # Errors
    /// A text that names the field and says what it must be.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        let raw: Raw = serde_json::from_str(text).map_err(|e| ConfigError(format!("assignment: {e}")))?;
        Self::check(raw)
    }

    #[allow(clippy::too_many_lines)]
    fn check(raw: Raw) -> Result<Self, ConfigError> {
        if raw.job_id == 0 || raw.job_id > wire::JOB_ID_MAX {
            bail!("jobId is {}, it must be 1..255 (0 marks a free aggregator)", raw.job_id);
        }
        if raw.values_per_packet == 0 || raw.values_per_packet > VALUES_MAX {
            bail!(
                "valuesPerPacket is {}, it must be 1..{VALUES_MAX} (62 is what every switch supports)",
                raw.values_per_packet
            );
        }
        let (scale, auto_scale) = match raw.scale {
            RawScale::Fixed(scale) => (scale, false),
            RawScale::Word(word) if word == "Auto" => (f64::from(wire::SCALE_DEFAULT), true),
            RawScale::Word(word) => bail!("scale is {word:?}, it must be \"Auto\" or a positive number"),
        };
        if !(scale.is_finite() && scale > 0.0) {
            bail!("scale is {scale}, it must be \"Auto\" or a positive number");
        }
        let limit = raw.addend_limit.unwrap_or(i32::MAX.unsigned_abs());
        if limit == 0 || limit > i32::MAX.unsigned_abs() {
            bail!("addendLimit is {limit}, it must be 1..2147483647 (absent where every switch keeps a saturated sum)");
        }
        if !(raw.stall_timeout_seconds > 0.0 && raw.stall_timeout_seconds < 1e9) {
            bail!("stallTimeoutSeconds is {}, it must be a positive number of seconds", raw.stall_timeout_seconds);
        }
        if raw.port == 0 {
            bail!("port is 0, it must be 1..65535 (default 10800)");
        }
        if raw.index_table_size == 0 || raw.index_table_size > SLOTS_MAX {
            bail!("indexTableSize is {}, it must be 1..{SLOTS_MAX}", raw.index_table_size);
        }
        let max_window = raw.max_window.unwrap_or(raw.index_table_size);
        if max_window == 0 || max_window > raw.index_table_size {
            bail!("maxWindow is {max_window}, it must be 1..indexTableSize ({})", raw.index_table_size);
        }
        let mut total = 0u64;
        for region in &raw.regions {
            let end = u64::from(region.start) + u64::from(region.size);
            if region.size == 0 || end > u64::from(wire::AGGREGATOR_INDEX_MAX) + 1 {
                bail!("region start {} size {} must be non-empty and lie in 0..65535", region.start, region.size);
            }
            total += u64::from(region.size);
        }
        for (i, region) in raw.regions.iter().enumerate().filter(|(_, r)| r.floor) {
            if raw.mode == Mode::Reserved {
                bail!("regions: a floor is for mode Shared, in mode Reserved every region is the job's alone");
            }
            if raw.regions.iter().enumerate().any(|(j, other)| i != j && region.overlaps(other)) {
                bail!("regions: the floor at {} size {} overlaps another region", region.start, region.size);
            }
        }
        if raw.regions.iter().filter(|r| r.floor).count() > 1 {
            bail!("regions: two of them are the floor, there is one at most");
        }
        if raw.mode == Mode::Shared && total > 0 && raw.regions.iter().all(|r| r.floor) {
            bail!("regions: beside its floor a job of mode Shared needs a region that it shares");
        }
        if raw.mode != Mode::HostOnly && total == 0 {
            bail!("regions is empty, but mode {:?} needs at least one aggregator", raw.mode);
        }
        let n = raw.workers.len();
        if n == 0 || n > wire::WORKERS_MAX as usize {
            bail!("workers has {n} entries, it must have 1..{}", wire::WORKERS_MAX);
        }
        let mut workers = Vec::with_capacity(n);
        for w in &raw.workers {
            if w.rank as usize >= n {
                bail!("worker rank {} must be below the number of workers ({n})", w.rank);
            }
            if w.rack >= wire::FAN_IN_MAX || w.bit >= wire::FAN_IN_MAX {
                bail!("worker rank {}: rack {} and bit {} must be 0..31", w.rank, w.rack, w.bit);
            }
            workers.push(WorkerEntry {
                rank: w.rank as u16,
                address: SocketAddrV4::new(w.address, w.port.unwrap_or(raw.port)),
                rack: w.rack as u8,
                bit: w.bit as u8,
                edge: w.edge,
            });
        }
        workers.sort_by_key(|w| w.rank);
        for pair in workers.windows(2) {
            if pair[0].rank == pair[1].rank {
                bail!("worker rank {} appears twice", pair[0].rank);
            }
        }
        for (i, a) in workers.iter().enumerate() {
            for b in &workers[i + 1..] {
                if (a.rack, a.bit) == (b.rack, b.bit) {
                    bail!("workers {} and {} both have rack {} bit {}", a.rank, b.rank, a.rack, a.bit);
                }
                if a.address == b.address {
                    bail!("workers {} and {} both have address {}", a.rank, b.rank, a.address);
                }
                if a.rack == b.rack && (a.edge || b.edge) {
                    bail!("workers {} and {} share rack {}, but edge says it is a rack of one", a.rank, b.rank, a.rack);
                }
            }
        }
        let mut servers: Vec<(u32, SocketAddrV4)> = raw
            .parameter_servers
            .iter()
            .map(|s| (s.shard, SocketAddrV4::new(s.address, s.port.unwrap_or(raw.port))))
            .collect();
        servers.sort_unstable_by_key(|s| s.0);
        if servers.is_empty() {
            bail!("parameterServers is empty, it must have at least one entry");
        }
        for (i, (shard, address)) in servers.iter().enumerate() {
            if *shard as usize != i {
                bail!("parameterServers: shards must be 0..{} without gaps", servers.len() - 1);
            }
            if workers.iter().any(|w| w.address == *address) {
                bail!("parameter server {address} has the address and port of a worker");
            }
        }
        let servers: Vec<SocketAddrV4> = servers.into_iter().map(|s| s.1).collect();
        let own = match raw.role {
            Role::Worker => workers.get(raw.rank as usize).map(|w| w.address),
            Role::ParameterServer => servers.get(raw.rank as usize).copied(),
        };
        let Some(own) = own else {
            bail!("rank {} has no entry among the {:?}s", raw.rank, raw.role);
        };
        let bind = SocketAddrV4::new(raw.bind_address.unwrap_or(*own.ip()), own.port());
        Ok(Self {
            job: raw.job,
            epoch: raw.epoch,
            job_id: raw.job_id as u8,
            mode: raw.mode,
            role: raw.role,
            rank: raw.rank as u16,
            values: raw.values_per_packet as usize,
            scale,
            auto_scale,
            addend_limit: fixed::LIMIT.min(limit as i32),
            bind,
            regions: raw.regions,
            slots: raw.index_table_size,
            max_window,
            stall_timeout: (raw.stall_timeout_seconds * 1e9) as Nanos,
            workers,
            servers,
            seal: Seal::new(raw.key.as_deref().map(parse_key).transpose()?),
            switch: raw.switch_address.map(|a| SocketAddrV4::new(a, raw.port)),
            segmentation: raw
                .segmentation_offload
                .unwrap_or(raw.mode == Mode::HostOnly || raw.switch_address.is_some()),
            initial_window: wire::WINDOW_INITIAL.min(max_window),
            min_rto: 4_000_000,
            max_rto: 1_000_000_000,
            first_sequence: 0,
        })
    }

    /// Number of descriptor packets at the front of every operation (`op::WORDS_PER_RANK` words a rank).
    #[must_use]
    pub fn descriptor_packets(&self) -> u64 {
        (self.workers.len() * crate::op::WORDS_PER_RANK).div_ceil(self.values) as u64
    }

    /// Address of the parameter server of `seq`'s shard.
    #[must_use]
    pub fn server(&self, seq: u64) -> SocketAddrV4 {
        self.servers[(seq % self.servers.len() as u64) as usize]
    }

    /// Bytes of every packet's UDP payload, without the tag of a raw one.
    #[must_use]
    pub fn packet_bytes(&self) -> usize {
        wire::HEADER_BYTES + 4 * self.values
    }

    /// Bytes that the largest packet of this endpoint needs, data or control.
    #[must_use]
    pub fn buffer_bytes(&self) -> usize {
        (self.packet_bytes() + self.seal.bytes()).max(wire::CONTROL_BYTES_MAX as usize)
    }

    /// Where the sequence space continues after the operation at `start` failed on its descriptor: beyond everything
    /// that any rank can have sent before it knew (its window is at most P).
    #[must_use]
    pub fn resume_after_mismatch(&self, start: u64) -> u64 {
        start + self.descriptor_packets() + u64::from(self.slots)
    }

    /// Entries of the parameter server's ring: 2 windows between the slowest and the fastest worker, one jump of
    /// `resume_after_mismatch`, and room.
    #[must_use]
    pub fn ring_size(&self) -> usize {
        (4 * self.slots as usize + self.descriptor_packets() as usize).next_power_of_two()
    }
}

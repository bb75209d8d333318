// SPDX-License-Identifier: Apache-2.0
//! The switch core of softswitch/, which the fuzzer is linked with: the same code that kernel and relay run.

use std::ffi::{c_char, c_int, c_void};

use atp_proto::Nanos;

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Region {
    start: u32,
    size: u32,
}

#[repr(C)]
struct Job {
    values: u32,
    full0: u32,
    full1: u32,
    group: u32,
    region_count: u32,
    region: [Region; 4],
}

#[repr(C)]
struct Admission {
    port: u32,
    bitmap: u32,
    job_id: u8,
    edge: u8,
    zero: u16,
}

#[repr(C)]
struct Transit {
    port: u32,
    bitmap1: u32,
    job_id: u8,
    zero: [u8; 3],
}

#[repr(C)]
struct Replica {
    port: u32,
    dst_ip: u32,
    dst_mac: [u8; 6],
    dst_port: u16,
}

#[repr(C)]
struct Options {
    aggregators: u32,
    values: u32,
    stale_ns: u64,
    object_dir: *const c_char,
}

#[repr(C)]
struct Raw {
    private: [u8; 0],
}

type Emit = unsafe extern "C" fn(*mut c_void, u32, u32, *const u8, usize, c_int);

unsafe extern "C" {
    fn atp_switch_open_native(options: *const Options, out: *mut *mut Raw) -> c_int;
    fn atp_switch_close(sw: *mut Raw);
    fn atp_switch_set_job(sw: *mut Raw, job_id: u8, config: *const Job) -> c_int;
    fn atp_switch_delete_job(sw: *mut Raw, job_id: u8) -> c_int;
    fn atp_switch_set_admission(sw: *mut Raw, key: *const Admission) -> c_int;
    fn atp_switch_set_transit(sw: *mut Raw, key: *const Transit, mask0: u32) -> c_int;
    fn atp_switch_set_ps_port(sw: *mut Raw, job_id: u8, port: u32) -> c_int;
    fn atp_switch_set_group(sw: *mut Raw, group: u32, replicas: *const Replica, count: u32) -> c_int;
    fn atp_switch_occupancy(sw: *mut Raw, job_id: u8) -> c_int;
    fn atp_switch_process(
        sw: *mut Raw,
        ingress_port: u32,
        dst_ip: u32,
        ce: c_int,
        payload: *mut u8,
        length: usize,
        now_ns: u64,
        emit: Emit,
        context: *mut c_void,
    ) -> c_int;
}

pub const AGGREGATORS: u32 = 64;
const GROUP: u32 = 1;

/// What the control plane writes for one job.
pub struct Program {
    pub values: u32,
    pub full0: u32,
    pub full1: u32,
    pub regions: Vec<(u32, u32)>,
    /// Port, edge, bit.
    pub admission: Vec<(u32, bool, u32)>,
    /// Port, rack bit, workers.
    pub transit: Vec<(u32, u32, u32)>,
    pub ps_port: u32,
    /// Egress port, destination address.
    pub group: Vec<(u32, u32)>,
}

/// One copy that leaves.
pub struct Out {
    pub port: u32,
    pub dst: u32,
    pub packet: Vec<u8>,
}

pub struct Switch(*mut Raw);

fn must(result: c_int) {
    assert!(result >= 0, "the switch answers {result}");
}

unsafe extern "C" fn collect(context: *mut c_void, port: u32, dst: u32, payload: *const u8, length: usize, ecn: c_int) {
    // SAFETY: `process` passes a vector that outlives the call; the core passes a readable packet.
    let (out, packet) = unsafe {
        (&mut *context.cast::<Vec<Out>>(), if length == 0 { &[] } else { std::slice::from_raw_parts(payload, length) })
    };
    let _ = ecn;
    out.push(Out { port, dst, packet: packet.to_vec() });
}

impl Switch {
    pub fn new() -> Self {
        let options = Options { aggregators: AGGREGATORS, values: 62, stale_ns: 0, object_dir: std::ptr::null() };
        let mut raw = std::ptr::null_mut();
        // SAFETY: both pointers are valid for the call.
        must(unsafe { atp_switch_open_native(&raw const options, &raw mut raw) });
        Self(raw)
    }

    pub fn program(&mut self, job_id: u8, p: &Program) {
        let mut job = Job {
            values: p.values,
            full0: p.full0,
            full1: p.full1,
            group: GROUP,
            region_count: p.regions.len() as u32,
            region: [Region::default(); 4],
        };
        for (to, (start, size)) in job.region.iter_mut().zip(&p.regions) {
            *to = Region { start: *start, size: *size };
        }
        let replicas: Vec<Replica> = p
            .group
            .iter()
            .map(|(port, dst)| Replica { port: *port, dst_ip: *dst, dst_mac: [0; 6], dst_port: 0 })
            .collect();
        // SAFETY: the switch is open, and every pointer is valid for its call.
        unsafe {
            must(atp_switch_set_job(self.0, job_id, &raw const job));
            for (port, edge, bitmap) in &p.admission {
                let key = Admission { port: *port, bitmap: *bitmap, job_id, edge: u8::from(*edge), zero: 0 };
                must(atp_switch_set_admission(self.0, &raw const key));
            }
            for (port, bitmap1, mask) in &p.transit {
                let key = Transit { port: *port, bitmap1: *bitmap1, job_id, zero: [0; 3] };
                must(atp_switch_set_transit(self.0, &raw const key, *mask));
            }
            must(atp_switch_set_ps_port(self.0, job_id, p.ps_port));
            must(atp_switch_set_group(self.0, GROUP, replicas.as_ptr(), replicas.len() as u32));
        }
    }

    /// Lose the job's table entry and its aggregators.
    pub fn forget(&mut self, job_id: u8) {
        // SAFETY: the switch is open.
        let _ = unsafe { atp_switch_delete_job(self.0, job_id) };
    }

    pub fn occupancy(&mut self, job_id: u8) -> u32 {
        // SAFETY: the switch is open.
        let used = unsafe { atp_switch_occupancy(self.0, job_id) };
        must(used);
        used as u32
    }

    pub fn process(&mut self, port: u32, dst: u32, ce: bool, mut packet: Vec<u8>, now: Nanos) -> Vec<Out> {
        let mut out: Vec<Out> = Vec::new();
        let context = (&raw mut out).cast();
        // SAFETY: the switch is open; packet and `out` outlive the call.
        must(unsafe {
            atp_switch_process(
                self.0,
                port,
                dst,
                c_int::from(ce),
                packet.as_mut_ptr(),
                packet.len(),
                now,
                collect,
                context,
            )
        });
        out
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        // SAFETY: opened in `new`, closed once.
        unsafe { atp_switch_close(self.0) };
    }
}

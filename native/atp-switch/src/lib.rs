// SPDX-License-Identifier: Apache-2.0
//! The C switch core (softswitch/) as a Rust type: the very code that relay and kernel run.

use std::ffi::{CStr, c_char, c_int, c_void};

use atp_proto::Nanos;

const REGIONS_MAX: usize = 4;
/// Room for the core's counters; how many there are is told by their names.
const COUNTERS_MAX: usize = 64;

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RawRegion {
    start: u32,
    size: u32,
}

#[repr(C)]
struct RawJob {
    values: u32,
    full0: u32,
    full1: u32,
    group: u32,
    region_count: u32,
    region: [RawRegion; REGIONS_MAX],
}

#[repr(C)]
struct RawAdmission {
    port: u32,
    bitmap: u32,
    job_id: u8,
    edge: u8,
    zero: u16,
}

#[repr(C)]
struct RawTransit {
    port: u32,
    bitmap1: u32,
    job_id: u8,
    zero: [u8; 3],
}

#[repr(C)]
#[derive(Clone, Copy)]
struct RawReplica {
    port: u32,
    dst_ip: u32,
    dst_mac: [u8; 6],
    dst_port: u16,
}

#[repr(C)]
struct RawOptions {
    aggregators: u32,
    values: u32,
    stale_ns: u64,
    object_dir: *const c_char,
    pin_dir: *const c_char,
}

#[repr(C)]
struct RawSwitch {
    private: [u8; 0],
}

type EmitFn = unsafe extern "C" fn(*mut c_void, u32, u32, *const u8, usize, c_int);

unsafe extern "C" {
    fn atp_switch_open_native(options: *const RawOptions, out: *mut *mut RawSwitch) -> c_int;
    fn atp_switch_close(sw: *mut RawSwitch);
    fn atp_switch_set_job(sw: *mut RawSwitch, job_id: u8, config: *const RawJob) -> c_int;
    fn atp_switch_delete_job(sw: *mut RawSwitch, job_id: u8) -> c_int;
    fn atp_switch_set_admission(sw: *mut RawSwitch, key: *const RawAdmission) -> c_int;
    fn atp_switch_delete_admission(sw: *mut RawSwitch, key: *const RawAdmission) -> c_int;
    fn atp_switch_set_transit(sw: *mut RawSwitch, key: *const RawTransit, mask0: u32) -> c_int;
    fn atp_switch_delete_transit(sw: *mut RawSwitch, key: *const RawTransit) -> c_int;
    fn atp_switch_set_ps_port(sw: *mut RawSwitch, job_id: u8, port: u32) -> c_int;
    fn atp_switch_delete_ps_port(sw: *mut RawSwitch, job_id: u8, port: u32) -> c_int;
    fn atp_switch_set_group(sw: *mut RawSwitch, group: u32, replicas: *const RawReplica, count: u32) -> c_int;
    fn atp_switch_read_counters(sw: *mut RawSwitch, job_id: u8, out: *mut u64) -> c_int;
    fn atp_counter_names() -> *const *const c_char;
    fn atp_switch_sweep(sw: *mut RawSwitch) -> c_int;
    fn atp_switch_occupancy(sw: *mut RawSwitch, job_id: u8) -> c_int;
    fn atp_switch_process(
        sw: *mut RawSwitch,
        ingress_port: u32,
        dst_ip: u32,
        ce: c_int,
        payload: *mut u8,
        length: usize,
        now_ns: u64,
        emit: EmitFn,
        context: *mut c_void,
    ) -> c_int;
}

/// What one switch holds of one job, as the agent would program it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    pub values: u32,
    pub full0: u32,
    pub full1: u32,
    pub regions: Vec<(u32, u32)>,
    /// Ingress port, edge, bit.
    pub admission: Vec<(u32, bool, u32)>,
    /// Ingress port, rack bit, allowed workers.
    pub transit: Vec<(u32, u32, u32)>,
    pub ps_ports: Vec<u32>,
    /// Egress port, destination address.
    pub group: Vec<(u32, u32)>,
}

/// One packet that the switch let out; its bytes are the input's, changed in place.
#[derive(Clone, Copy, Debug)]
pub struct Emit {
    /// Replica's port of an ACK; otherwise to be routed by `dst_ip`.
    pub port: u32,
    pub dst_ip: u32,
}

/// One switch.
pub struct Switch {
    raw: *mut RawSwitch,
    programs: Vec<Option<Program>>,
    emits: Vec<Emit>,
}

fn check(what: &str, result: c_int) {
    assert!(result >= 0, "switch core: {what} failed with errno {}", -result);
}

unsafe extern "C" fn on_emit(context: *mut c_void, port: u32, dst_ip: u32, _: *const u8, _: usize, _: c_int) {
    // SAFETY: `context` is the vector that `process` passes, which nobody else touches during the call.
    let emits = unsafe { &mut *context.cast::<Vec<Emit>>() };
    emits.push(Emit { port, dst_ip });
}

/// Names of the switch's counters, in their order.
#[must_use]
pub fn counter_names() -> Vec<&'static str> {
    let mut names = Vec::new();
    // SAFETY: the library's table ends with NULL and lives for ever.
    unsafe {
        let mut p = atp_counter_names();
        while !(*p).is_null() {
            names.push(CStr::from_ptr(*p).to_str().unwrap_or("?"));
            p = p.add(1);
        }
    }
    names
}

impl Switch {
    /// # Panics
    /// When the core refuses the sizes: a mistake of the schedule.
    #[must_use]
    pub fn new(aggregators: u32, values: u32, stale: Nanos) -> Self {
        assert!(counter_names().len() <= COUNTERS_MAX, "COUNTERS_MAX must hold ATP_COUNTERS of atp_control.h");
        let options = RawOptions {
            aggregators,
            values,
            stale_ns: stale,
            object_dir: std::ptr::null(),
            pin_dir: std::ptr::null(),
        };
        let mut raw = std::ptr::null_mut();
        // SAFETY: plain C call with valid pointers.
        check("open", unsafe { atp_switch_open_native(&raw const options, &raw mut raw) });
        Self { raw, programs: vec![None; 256], emits: Vec::new() }
    }

    #[must_use]
    pub fn knows(&self, job_id: u8) -> bool {
        self.programs[usize::from(job_id)].is_some()
    }

    /// Make the switch hold `program` for the job; entries of an earlier one that are not in it go.
    pub fn program(&mut self, job_id: u8, program: &Program) {
        if self.programs[usize::from(job_id)].as_ref().is_some_and(|old| {
            (&old.admission, &old.transit, &old.ps_ports) != (&program.admission, &program.transit, &program.ps_ports)
        }) {
            self.forget(job_id);
        }
        let mut job = RawJob {
            values: program.values,
            full0: program.full0,
            full1: program.full1,
            group: u32::from(job_id),
            region_count: program.regions.len() as u32,
            region: [RawRegion::default(); REGIONS_MAX],
        };
        for (to, (start, size)) in job.region.iter_mut().zip(&program.regions) {
            *to = RawRegion { start: *start, size: *size };
        }
        let replicas: Vec<RawReplica> = program
            .group
            .iter()
            .map(|(port, dst_ip)| RawReplica { port: *port, dst_ip: *dst_ip, dst_mac: [0; 6], dst_port: 0 })
            .collect();
        // The order of the agent: what lets packets in comes last.
        // SAFETY: plain C calls with valid pointers.
        unsafe {
            check(
                "set_group",
                atp_switch_set_group(self.raw, u32::from(job_id), replicas.as_ptr(), replicas.len() as u32),
            );
            for (port, edge, bit) in &program.admission {
                let key = RawAdmission { port: *port, bitmap: *bit, job_id, edge: u8::from(*edge), zero: 0 };
                check("set_admission", atp_switch_set_admission(self.raw, &raw const key));
            }
            for (port, rack, mask) in &program.transit {
                let key = RawTransit { port: *port, bitmap1: *rack, job_id, zero: [0; 3] };
                check("set_transit", atp_switch_set_transit(self.raw, &raw const key, *mask));
            }
            for port in &program.ps_ports {
                check("set_ps_port", atp_switch_set_ps_port(self.raw, job_id, *port));
            }
            check("set_job", atp_switch_set_job(self.raw, job_id, &raw const job));
        }
        self.programs[usize::from(job_id)] = Some(program.clone());
    }

    /// Delete the job and its entries.
    pub fn forget(&mut self, job_id: u8) {
        let Some(old) = self.programs[usize::from(job_id)].take() else { return };
        // SAFETY: plain C calls with valid pointers.
        unsafe {
            check("delete_job", atp_switch_delete_job(self.raw, job_id));
            for (port, edge, bit) in &old.admission {
                let key = RawAdmission { port: *port, bitmap: *bit, job_id, edge: u8::from(*edge), zero: 0 };
                check("delete_admission", atp_switch_delete_admission(self.raw, &raw const key));
            }
            for (port, rack, _) in &old.transit {
                let key = RawTransit { port: *port, bitmap1: *rack, job_id, zero: [0; 3] };
                check("delete_transit", atp_switch_delete_transit(self.raw, &raw const key));
            }
            for port in &old.ps_ports {
                check("delete_ps_port", atp_switch_delete_ps_port(self.raw, job_id, *port));
            }
            if !old.group.is_empty() {
                check("delete_group", atp_switch_set_group(self.raw, u32::from(job_id), std::ptr::null(), 0));
            }
        }
    }

    /// One packet, changed in place; what comes out.
    pub fn process(&mut self, port: u32, dst_ip: u32, ce: bool, payload: &mut [u8], now: Nanos) -> &[Emit] {
        self.emits.clear();
        let context: *mut c_void = (&raw mut self.emits).cast();
        // SAFETY: the payload is valid for its length, and `on_emit` gets the vector that it expects.
        check("process", unsafe {
            let (data, length) = (payload.as_mut_ptr(), payload.len());
            atp_switch_process(self.raw, port, dst_ip, c_int::from(ce), data, length, now, on_emit, context)
        });
        &self.emits
    }

    /// Aggregators that the job (0: any) holds.
    #[must_use]
    pub fn occupancy(&self, job_id: u8) -> u32 {
        // SAFETY: plain C call.
        unsafe { atp_switch_occupancy(self.raw, job_id) }.max(0) as u32
    }

    /// Free the stale aggregators, as an agent's sweep does; returns how many.
    pub fn sweep(&mut self, now: Nanos) -> u32 {
        // The native core's clock is that of its last packet: an empty one sets it.
        self.process(0, 0, false, &mut [], now);
        // SAFETY: plain C call.
        unsafe { atp_switch_sweep(self.raw) }.max(0) as u32
    }

    /// Counters of one job since the switch was made.
    #[must_use]
    pub fn counters(&self, job_id: u8) -> [u64; COUNTERS_MAX] {
        let mut out = [0; COUNTERS_MAX];
        // SAFETY: the library writes ATP_COUNTERS words.
        check("read_counters", unsafe { atp_switch_read_counters(self.raw, job_id, out.as_mut_ptr()) });
        out
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        // SAFETY: opened by `new`, closed once.
        unsafe { atp_switch_close(self.raw) };
    }
}

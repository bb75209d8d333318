// SPDX-License-Identifier: Apache-2.0
//! Python module `atp_transport._native`. The API is documented in `atp_transport/_native.pyi`.

mod member;

use std::collections::HashMap;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use atp_net::{Commanded, Driver, WorkerCommand};
use atp_proto::fixed::Dtype;
use atp_proto::host::Host;
use atp_proto::op::{Kind, Memory};
use atp_proto::stats::Snapshot;
use atp_proto::worker::{OPS_MAX, Submission};
use atp_proto::{Config, ConfigError};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn config_error(e: &ConfigError) -> PyErr {
    PyValueError::new_err(e.to_string())
}

fn os_error(e: &io::Error, what: &str) -> PyErr {
    PyOSError::new_err((e.raw_os_error().unwrap_or(libc_eio()), format!("{what}: {e}")))
}

const fn libc_eio() -> i32 {
    5
}

/// A held buffer export of a Python object; dropped with the GIL held.
struct Export(Box<ffi::Py_buffer>);

// SAFETY: the view is only read, and released, by threads that hold the GIL.
unsafe impl Send for Export {}

impl Export {
    fn new(object: &Bound<'_, PyAny>, writable: bool) -> PyResult<Self> {
        let mut view = Box::new(ffi::Py_buffer::new());
        let flags = if writable { ffi::PyBUF_WRITABLE } else { ffi::PyBUF_SIMPLE };
        // SAFETY: a live object and a live, zeroed Py_buffer; PyBUF_SIMPLE asks for contiguous bytes.
        if unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &mut *view, flags) } != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        Ok(Self(view))
    }

    fn len(&self) -> usize {
        usize::try_from(self.0.len).unwrap_or(0)
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        Python::attach(|_| {
            // SAFETY: obtained by PyObject_GetBuffer, released once.
            unsafe { ffi::PyBuffer_Release(&mut *self.0) };
        });
    }
}

/// The memory of two exports, which the owner keeps until the operation ends.
struct Exported {
    source: *const u8,
    target: *mut u8,
    length: usize,
}

// SAFETY: plain memory; the caller leaves it alone until the completion.
unsafe impl Send for Exported {}

impl Memory for Exported {
    fn source(&self) -> &[u8] {
        if self.length == 0 {
            return &[];
        }
        // SAFETY: the export is held until the event of this operation was collected or the thread has ended.
        unsafe { std::slice::from_raw_parts(self.source, self.length) }
    }

    fn target(&mut self) -> &mut [u8] {
        if self.length == 0 {
            return &mut [];
        }
        // SAFETY: as above; the exclusive borrow of self keeps `source` slices away even where both are one memory.
        unsafe { std::slice::from_raw_parts_mut(self.target, self.length) }
    }
}

struct Pending {
    op_id: u64,
    _send: Export,
    _recv: Export,
}

#[derive(Default)]
struct Ledger {
    next: u64,
    pending: HashMap<u64, Pending>,
}

fn metrics<'py>(py: Python<'py>, s: &Snapshot, running: bool) -> PyResult<Bound<'py, PyDict>> {
    let d = PyDict::new(py);
    for (name, value) in s.counters.list() {
        d.set_item(name, value)?;
    }
    d.set_item("window", s.window)?;
    d.set_item("ssthresh", s.ssthresh)?;
    d.set_item("rtt_seconds", s.rtt_seconds)?;
    d.set_item("rto_seconds", s.rto_seconds)?;
    d.set_item("in_flight", s.in_flight)?;
    d.set_item("open_sequences", s.open_sequences)?;
    d.set_item("reorder_threshold", s.reorder_threshold)?;
    d.set_item("group_path_down", s.group_path_down)?;
    d.set_item("running", u8::from(running))?;
    let histogram = PyDict::new(py);
    let mut total = 0;
    for (i, count) in s.rtt_histogram.iter().enumerate() {
        total += count;
        histogram.set_item(format!("{}", f64::from(1u32 << i) * 1e-6), total)?;
    }
    d.set_item("rtt_histogram", histogram)?;
    d.set_item("rtt_sum_seconds", s.rtt_sum_seconds)?;
    Ok(d)
}

fn start<E: Commanded + 'static>(py: Python<'_>, endpoint: E, config: &Config, name: &str) -> PyResult<Driver<E>> {
    py.detach(|| Driver::start(endpoint, config, name))
        .map_err(|e| os_error(&e, &format!("cannot open UDP socket at {}", config.bind)))
}

/// No lock is held while Python objects are made or released: that can run other Python code, and other threads.
fn observe<E: Commanded + 'static>(driver: &Mutex<Driver<E>>) -> (Snapshot, bool) {
    let driver = lock(driver);
    (driver.snapshot(), driver.failure().is_none())
}

/// A number that another start of the same process, or of another in its place, hardly draws again.
fn start_number() -> u32 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64);
    (atp_proto::index::mix(now ^ u64::from(std::process::id()) << 32) >> 32) as u32
}

#[pyclass(module = "atp_transport", frozen)]
struct Worker {
    // Dropped before the ledger: the thread ends before its memory goes.
    driver: Mutex<Driver<atp_proto::Worker>>,
    ledger: Mutex<Ledger>,
}

#[pymethods]
impl Worker {
    #[new]
    fn new(py: Python<'_>, config: &str) -> PyResult<Self> {
        let config = Config::from_json(config).map_err(|e| config_error(&e))?;
        let endpoint =
            atp_proto::Worker::new(config.clone()).map_err(|e| config_error(&e))?.of_incarnation(start_number());
        let driver = Mutex::new(start(py, endpoint, &config, "atp-worker")?);
        Ok(Self { driver, ledger: Mutex::default() })
    }

    fn fileno(&self) -> i32 {
        lock(&self.driver).ready_fd()
    }

    fn submit(
        &self,
        op_id: u64,
        kind: &str,
        dtype: &str,
        send: &Bound<'_, PyAny>,
        recv: &Bound<'_, PyAny>,
        count: u64,
    ) -> PyResult<()> {
        let value_error = |text: String| Err(PyValueError::new_err(text));
        let Some(kind) = Kind::parse(kind) else {
            return value_error(format!("kind {kind:?} is unknown: use \"sum\" or \"mean\""));
        };
        let Some(dtype) = Dtype::parse(dtype) else {
            return value_error(format!(
                "dtype {dtype:?} is unknown: use \"float32\", \"float16\", \"bfloat16\" or \"int32\""
            ));
        };
        if kind == Kind::Mean && dtype == Dtype::Int32 {
            return value_error("mean of int32 is not defined: use kind \"sum\", or a float dtype".to_owned());
        }
        let send = Export::new(send, false)?;
        let recv = Export::new(recv, true)?;
        let needed = usize::try_from(count).ok().and_then(|c| c.checked_mul(dtype.size()));
        let Some(length) = needed.filter(|n| *n <= send.len() && *n <= recv.len()) else {
            return value_error(format!(
                "{count} {} elements need {} bytes, but send has {} and recv has {}",
                dtype.name(),
                count as u128 * dtype.size() as u128,
                send.len(),
                recv.len()
            ));
        };
        let memory = Exported { source: send.0.buf.cast(), target: recv.0.buf.cast(), length };
        // The driver's lock is held over both, so that tokens reach the thread in order.
        let driver = lock(&self.driver);
        let mut ledger = lock(&self.ledger);
        if ledger.pending.len() >= OPS_MAX {
            drop((ledger, driver));
            return Err(PyOSError::new_err(format!(
                "{OPS_MAX} operations wait or were not collected: call completions() before submitting more"
            )));
        }
        let token = ledger.next;
        ledger.next += 1;
        ledger.pending.insert(token, Pending { op_id, _send: send, _recv: recv });
        let submission = Submission { token, op_id, kind, dtype, count, scale: None, memory: Box::new(memory) };
        if !driver.send(WorkerCommand::Submit(submission)) {
            let refused = ledger.pending.remove(&token);
            let why = driver.failure().unwrap_or_default();
            drop((ledger, driver));
            drop(refused);
            return Err(PyOSError::new_err(format!("the worker does not run: {why}")));
        }
        Ok(())
    }

    fn completions(&self) -> Vec<(u64, Option<String>)> {
        let events = lock(&self.driver).take_events();
        let ended: Vec<(Pending, Option<String>)> = {
            let mut ledger = lock(&self.ledger);
            events
                .into_iter()
                .filter_map(|event| ledger.pending.remove(&event.token).map(|p| (p, event.error.map(|e| e.text))))
                .collect()
        };
        ended.into_iter().map(|(pending, error)| (pending.op_id, error)).collect()
    }

    fn cancel_all(&self, reason: &str) {
        lock(&self.driver).send(WorkerCommand::CancelAll(reason.to_owned()));
    }

    fn metrics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (snapshot, running) = observe(&self.driver);
        metrics(py, &snapshot, running)
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| lock(&self.driver).stop());
    }
}

#[pyclass(module = "atp_transport", frozen)]
struct ParameterServer {
    driver: Mutex<Driver<Host>>,
}

#[pymethods]
impl ParameterServer {
    #[new]
    fn new(py: Python<'_>, config: &str) -> PyResult<Self> {
        let config = Config::from_json(config).map_err(|e| config_error(&e))?;
        let endpoint = Host::new(config.clone(), start_number()).map_err(|e| config_error(&e))?;
        Ok(Self { driver: Mutex::new(start(py, endpoint, &config, "atp-ps")?) })
    }

    fn metrics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (snapshot, running) = observe(&self.driver);
        metrics(py, &snapshot, running)
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| lock(&self.driver).stop());
    }
}

#[pymodule]
fn _native(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<Worker>()?;
    m.add_class::<member::Member>()?;
    m.add_class::<ParameterServer>()?;
    Ok(())
}

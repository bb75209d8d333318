// SPDX-License-Identifier: Apache-2.0
//! A worker with groups, for a sidecar: it serves the sessions of the trainers.

use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use atp_net::{Attachment, Board, Driver, End, Segment, SessionCommand, SessionEvent, Sessions};
use atp_proto::Config;
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::{Map, Value};

use crate::{config_error, lock, metrics, observe, os_error, start_number};

#[pyclass(module = "atp_transport", frozen)]
pub struct Member {
    driver: Mutex<Driver<Sessions<atp_proto::member::Member>>>,
    board: Arc<Board>,
    directory: PathBuf,
}

/// Kind, session and fields of an event.
type Event<'py> = (&'static str, u32, Bound<'py, PyDict>);

fn event(py: Python<'_>, event: SessionEvent) -> PyResult<Event<'_>> {
    let d = PyDict::new(py);
    let head = match event {
        SessionEvent::Stats { session } => ("stats", session),
        SessionEvent::Ended { session, end, why, outstanding } => {
            d.set_item("reason", why)?;
            d.set_item("operationsLeft", outstanding)?;
            let kind = match end {
                End::Left => "left",
                End::Refused => "refused",
                End::CutOff => "cut-off",
            };
            (kind, session)
        }
        SessionEvent::Failed { session, group, op, code, text, broken, count } => {
            d.set_item("group", group)?;
            d.set_item("op", op)?;
            d.set_item("code", code.name())?;
            d.set_item("message", text)?;
            d.set_item("broken", broken)?;
            d.set_item("count", count)?;
            ("failed", session)
        }
        SessionEvent::GrowRefused { session, bytes, why } => {
            d.set_item("bytes", bytes)?;
            d.set_item("reason", why)?;
            ("grow-refused", session)
        }
        SessionEvent::Warning { text } => {
            d.set_item("text", text)?;
            ("warning", 0)
        }
        SessionEvent::Stopped { why } => {
            d.set_item("reason", why)?;
            ("stopped", 0)
        }
    };
    Ok((head.0, head.1, d))
}

impl Member {
    fn send(&self, command: SessionCommand) -> bool {
        lock(&self.driver).send(command)
    }
}

#[pymethods]
impl Member {
    #[new]
    fn new(py: Python<'_>, config: &str, directory: PathBuf) -> PyResult<Self> {
        let config = Config::from_json(config).map_err(|e| config_error(&e))?;
        let member = atp_proto::member::Member::new(config.clone(), start_number()).map_err(|e| config_error(&e))?;
        let started = py.detach(|| {
            let board = Arc::new(Board::new()?);
            let of_thread = Arc::clone(&board);
            let driver = Driver::start_with(&config, "atp-member", |commands| {
                Sessions::new(member, &directory, of_thread, commands)
            })?;
            Ok((driver, board))
        });
        let (driver, board) =
            started.map_err(|e| os_error(&e, &format!("cannot open UDP socket at {}", config.bind)))?;
        Ok(Self { driver: Mutex::new(driver), board, directory })
    }

    fn fileno(&self) -> i32 {
        self.board.ready_fd()
    }

    fn attach(&self, py: Python<'_>, fd: i32, welcome: &str, session: u32) -> PyResult<()> {
        let welcome: Map<String, Value> = serde_json::from_str(welcome)
            .map_err(|e| PyValueError::new_err(format!("the welcome is not a JSON object: {e}")))?;
        if fd < 0 {
            return Err(PyValueError::new_err(format!("{fd} is no descriptor")));
        }
        let directory: &Path = &self.directory;
        let made = py.detach(|| {
            // SAFETY: the caller keeps the descriptor open during this call; it is duplicated.
            let stream = UnixStream::from(unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()?);
            stream.set_nonblocking(true)?;
            Ok((stream, Segment::create(directory, INITIAL_SEGMENT_BYTES)?))
        });
        let (stream, segment) = made.map_err(|e: std::io::Error| {
            let number = e.raw_os_error().unwrap_or(crate::libc_eio());
            PyOSError::new_err((number, e.to_string()))
        })?;
        let new = Box::new(Attachment { session, stream, segment, welcome });
        if !self.send(SessionCommand::Attach(new)) {
            let why = lock(&self.driver).failure().unwrap_or_default();
            return Err(PyValueError::new_err(format!("the transport does not run: {why}")));
        }
        Ok(())
    }

    fn session_events<'py>(&self, py: Python<'py>) -> PyResult<Vec<Event<'py>>> {
        self.board.take().into_iter().map(|e| event(py, e)).collect()
    }

    fn reply(&self, session: u32, body: Vec<u8>) {
        self.send(SessionCommand::Reply { session, body });
    }

    fn metrics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (snapshot, running) = observe(&self.driver);
        let d = metrics(py, &snapshot, running)?;
        let operations = PyDict::new(py);
        for (result, count) in self.board.results() {
            operations.set_item(result, count)?;
        }
        d.set_item("operations", operations)?;
        d.set_item("sessions", self.board.attached())?;
        d.set_item("operations_outstanding", self.board.outstanding())?;
        Ok(d)
    }

    fn close(&self, py: Python<'_>, code: &str, message: &str) {
        let command = SessionCommand::Close { code: code.to_owned(), message: message.to_owned() };
        py.detach(|| {
            let driver = lock(&self.driver);
            driver.send(command);
            driver.wait_closed();
        });
    }

    fn join(&self, py: Python<'_>) {
        py.detach(|| lock(&self.driver).stop());
    }
}

/// Room of a session before it asks for more.
const INITIAL_SEGMENT_BYTES: u64 = 4 << 20;

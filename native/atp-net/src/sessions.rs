// SPDX-License-Identifier: Apache-2.0
//! All sessions of a worker's sidecar, in front of its transport.
//!
//! This is the endpoint that the thread runs: the transport's packets and timeouts pass through, and between two of its
//! turns the clients' frames become operations of the transport, whose ends become frames.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::SocketAddrV4;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use atp_proto::failure::{Code, Failure};
use atp_proto::member::{Member, Part};
use atp_proto::stats::Snapshot;
use atp_proto::{Endpoint, Event, Nanos, Transmit};
use serde_json::{Map, Value};

use crate::backlog::Backlog;
use crate::board::{Board, End, SessionEvent};
use crate::commanded::Commanded;
use crate::connection::{Connection, Got, LINGER, Stage};
use crate::driver::Sender;
use crate::segment::Segment;
use crate::session::{Call, Session, clip};
use crate::sys::PollSet;

/// Bytes that are read of a session in one turn.
const READ_BYTES: usize = 1 << 16;

/// What the sessions need of the transport.
pub trait Groups: Endpoint {
    fn submit(&mut self, part: Part, now: Nanos);
    /// This rank gives the group up; its parts come back as events.
    fn abort(&mut self, group: u64, code: Code, reason: &str, now: Nanos);
    /// This rank is through with the group.
    fn leave(&mut self, group: u64, now: Nanos);
    /// How many trainers are connected.
    fn set_attached(&mut self, sessions: u32, now: Nanos);
    /// What the trainers and the log should know.
    fn poll_warning(&mut self) -> Option<String>;
}

impl Groups for Member {
    fn submit(&mut self, part: Part, now: Nanos) {
        Self::submit(self, part, now);
    }
    fn abort(&mut self, group: u64, code: Code, reason: &str, now: Nanos) {
        Self::abort(self, group, code, reason, now);
    }
    fn leave(&mut self, group: u64, now: Nanos) {
        Self::leave(self, group, now);
    }
    fn set_attached(&mut self, sessions: u32, now: Nanos) {
        Self::set_attached(self, sessions, now);
    }
    fn poll_warning(&mut self) -> Option<String> {
        Self::poll_warning(self)
    }
}

/// A client that was let in.
pub struct Attachment {
    /// Unique among the sessions of the transport.
    pub session: u32,
    pub stream: UnixStream,
    pub segment: Segment,
    /// The welcome without what the segment adds.
    pub welcome: Map<String, Value>,
}

/// What the sessions can be told.
pub enum SessionCommand {
    Attach(Box<Attachment>),
    /// The answer to `SessionEvent::Stats`: a JSON object.
    Reply {
        session: u32,
        body: Vec<u8>,
    },
    /// A further segment was made, or not.
    Grown {
        session: u32,
        bytes: u64,
        made: io::Result<Segment>,
    },
    /// End all sessions; the transport goes too.
    Close {
        code: String,
        message: String,
    },
}

struct Token {
    session: u32,
    op: u64,
    group: u64,
}

/// The first failure of a group in one turn, and how many followed.
struct Failures {
    session: u32,
    group: u64,
    op: u64,
    failure: Failure,
    count: u64,
}

pub struct Sessions<G> {
    groups: G,
    directory: PathBuf,
    board: Arc<Board>,
    commands: Sender<SessionCommand>,
    connections: BTreeMap<u32, Connection>,
    /// Parts that were submitted and have not ended.
    tokens: HashMap<u64, Token>,
    next_token: u64,
    /// Parts that the transport does not have yet.
    backlog: Backlog,
    /// Which session uses a group.
    owners: HashMap<u64, u32>,
    failures: Vec<Failures>,
    calls: Vec<Call>,
    buffer: Vec<u8>,
    attached: u32,
    /// Some: everything ends, with this code and message.
    closing: Option<(String, String)>,
}

impl<G: Groups> Sessions<G> {
    /// `directory`: where the shared memory is.
    #[must_use]
    pub fn new(groups: G, directory: &Path, board: Arc<Board>, commands: Sender<SessionCommand>) -> Self {
        Self {
            groups,
            directory: directory.to_owned(),
            board,
            commands,
            connections: BTreeMap::new(),
            tokens: HashMap::new(),
            next_token: 0,
            backlog: Backlog::default(),
            owners: HashMap::new(),
            failures: Vec::new(),
            calls: Vec::new(),
            buffer: vec![0; READ_BYTES],
            attached: 0,
            closing: None,
        }
    }

    fn attach(&mut self, new: Attachment, now: Nanos) {
        let session = Session::new(Arc::new(new.segment), new.welcome);
        self.connections.insert(new.session, Connection::new(new.stream, session));
        if let Some((code, message)) = self.closing.clone() {
            self.finish(new.session, End::Left, &message, Some((&code, &message)), now);
        }
        self.count_attached(now);
    }

    fn count_attached(&mut self, now: Nanos) {
        let attached = self.connections.values().filter(|c| c.is_serving()).count();
        if self.attached as usize != attached {
            self.attached = attached as u32;
            self.groups.set_attached(self.attached, now);
        }
    }

    /// A client's bytes wait.
    fn read(&mut self, number: u32, now: Nanos) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        let mut calls = std::mem::take(&mut self.calls);
        let outcome = match connection.read(&mut self.buffer) {
            Got::Nothing => Ok(()),
            Got::Bytes(n) => connection.session.receive(&self.buffer[..n], &mut calls).map_err(|e| (End::Refused, e)),
            Got::End(why) => Err((End::Left, why)),
        };
        let mut outcome = outcome;
        for call in calls.drain(..) {
            if let Err(end) = self.call(number, call, now) {
                outcome = Err(end);
                break;
            }
        }
        calls.clear();
        self.calls = calls;
        match outcome {
            Ok(()) => {}
            Err((End::Refused, why)) => self.finish(number, End::Refused, &why, Some(("Protocol", &why)), now),
            Err((end, why)) => self.finish(number, end, &why, None, now),
        }
    }

    fn call(&mut self, number: u32, call: Call, now: Nanos) -> Result<(), (End, String)> {
        match call {
            Call::Submit { submit: s, memory } => {
                self.own(s.group, number)?;
                let token = self.next_token;
                self.next_token += 1;
                self.tokens.insert(token, Token { session: number, op: s.op, group: s.group });
                let part = Part {
                    token,
                    group: s.group,
                    number: s.number,
                    total: s.total,
                    begin: s.begin,
                    kind: s.kind,
                    dtype: s.dtype,
                    count: s.count.into(),
                    memory: Box::new(memory),
                };
                if let Some(part) = self.backlog.push(part) {
                    self.groups.submit(part, now);
                }
            }
            Call::Abort { group, code, reason } => {
                self.own(group, number)?;
                self.give_up(group, code, &reason, now);
            }
            Call::Leave { group } => {
                self.own(group, number)?;
                self.leave(group, now);
                self.disown(group, number);
            }
            Call::Grow { bytes } => self.grow(number, bytes),
            Call::Stats => {
                self.commands.publish(self.groups.snapshot());
                self.board.push(SessionEvent::Stats { session: number });
            }
            Call::Bye => return Err((End::Left, "bye".to_owned())),
        }
        Ok(())
    }

    fn give_up(&mut self, group: u64, code: Code, reason: &str, now: Nanos) {
        self.groups.abort(group, code, reason, now);
        self.drop_held(group, now);
    }

    fn leave(&mut self, group: u64, now: Nanos) {
        self.groups.leave(group, now);
        self.drop_held(group, now);
    }

    /// The transport refuses what it gets of a group that was given up.
    fn drop_held(&mut self, group: u64, now: Nanos) {
        while let Some(part) = self.backlog.give_up(group) {
            self.groups.submit(part, now);
        }
    }

    fn own(&mut self, group: u64, number: u32) -> Result<(), (End, String)> {
        if *self.owners.entry(group).or_insert(number) == number {
            return Ok(());
        }
        Err((End::Refused, format!("group {group:#x} belongs to another trainer of this pod")))
    }

    /// Forget whose group it is, once its session does.
    fn disown(&mut self, group: u64, number: u32) {
        let uses = self.connections.get(&number).is_some_and(|c| c.session.uses(group));
        if !uses && self.owners.get(&group) == Some(&number) {
            self.owners.remove(&group);
        }
    }

    /// Reserving memory takes a millisecond for each 4 MB: not on this thread.
    fn grow(&mut self, session: u32, bytes: u64) {
        let directory = self.directory.clone();
        let commands = self.commands.clone();
        let spawned = std::thread::Builder::new().name("atp-segment".to_owned()).spawn(move || {
            let made = Segment::create(&directory, bytes);
            commands.send(SessionCommand::Grown { session, bytes, made });
        });
        if let Err(e) = spawned {
            self.grown(session, bytes, Err(e));
        }
    }

    fn grown(&mut self, number: u32, bytes: u64, made: io::Result<Segment>) {
        if let Err(e) = &made {
            self.board.push(SessionEvent::GrowRefused { session: number, bytes, why: e.to_string() });
        }
        let Some(connection) = self.connections.get_mut(&number).filter(|c| c.is_serving()) else { return };
        if let Some(Call::Grow { bytes }) = connection.session.grown(made) {
            self.grow(number, bytes);
        }
    }

    /// End a session. `fatal`: code and message of its last words.
    fn finish(&mut self, number: u32, end: End, why: &str, fatal: Option<(&str, &str)>, now: Nanos) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        if connection.stage() == Stage::Closed {
            // The socket broke already.
        } else if !connection.is_serving() {
            return;
        }
        if let Some((code, message)) = fatal {
            connection.session.fatal(code, message);
        }
        let (parts, groups) = connection.session.dissolve();
        connection.end(now);
        let outstanding = parts.len();
        for (group, open) in groups {
            for _ in 0..open {
                self.board.count(Some(Code::PeerGone));
            }
            if self.owners.get(&group) != Some(&number) {
                continue;
            }
            self.owners.remove(&group);
            if self.closing.is_some() {
                continue;
            }
            if outstanding > 0 {
                // Also groups without operations under way: whoever waits for this rank there waits in vain.
                let reason = format!("its trainer left ({}) with {outstanding} operations outstanding", clip(why));
                self.give_up(group, Code::PeerGone, &reason, now);
            }
            self.leave(group, now);
        }
        self.board.push(SessionEvent::Ended {
            session: number,
            end,
            why: clip(why).to_owned(),
            outstanding: outstanding as u64,
        });
        self.count_attached(now);
    }

    /// An operation of the transport ended.
    fn ended(&mut self, event: Event) {
        let Event { token, error, memory } = event;
        // The client may reuse the memory once it knows.
        drop(memory);
        let Some(token) = self.tokens.remove(&token) else { return };
        self.backlog.ended(token.group);
        let Some(connection) = self.connections.get_mut(&token.session).filter(|c| c.is_serving()) else { return };
        if let Some(result) = connection.session.ended(token.op, error.as_ref()) {
            self.board.count(result.err());
        }
        if !connection.session.uses(token.group) {
            self.disown(token.group, token.session);
        }
        let Some(failure) = error else { return };
        let known = self
            .failures
            .iter_mut()
            .rev()
            .find(|f| (f.session, f.group, f.failure.code) == (token.session, token.group, failure.code));
        match known {
            Some(known) => known.count += 1,
            None => self.failures.push(Failures {
                session: token.session,
                group: token.group,
                op: token.op,
                failure,
                count: 1,
            }),
        }
    }

    fn report_failures(&mut self) {
        for f in self.failures.drain(..) {
            self.board.push(SessionEvent::Failed {
                session: f.session,
                group: f.group,
                op: f.op,
                code: f.failure.code,
                text: clip(&f.failure.text).to_owned(),
                broken: f.failure.broken,
                count: f.count,
            });
        }
    }

    fn write(&mut self, now: Nanos) {
        let mut broken: Vec<(u32, End, String)> = Vec::new();
        for (number, connection) in &mut self.connections {
            if !connection.is_serving() {
                connection.wind_up(&mut self.buffer, now);
            } else if let Err(why) = connection.write() {
                broken.push((*number, End::Left, why));
            } else if connection.session.is_clogged() {
                connection.cut();
                broken.push((*number, End::CutOff, "it does not read its messages".to_owned()));
            }
        }
        for (number, end, why) in broken {
            self.finish(number, end, &why, None, now);
        }
        self.connections.retain(|_, c| c.stage() != Stage::Closed);
    }

    /// Fail every operation, and tell every client why the connection ends.
    fn close(&mut self, code: &str, message: &str, now: Nanos) {
        if self.closing.is_some() {
            return;
        }
        self.closing = Some((code.to_owned(), message.to_owned()));
        let failure = Failure::breaking(Code::parse(code).unwrap_or(Code::Internal), message);
        let numbers: Vec<u32> = self.connections.iter().filter(|(_, c)| c.is_serving()).map(|(n, _)| *n).collect();
        let mut tokens: Vec<(u64, Token)> = self.tokens.drain().collect();
        tokens.sort_unstable_by_key(|(token, _)| *token);
        for (_, token) in tokens {
            let Some(connection) = self.connections.get_mut(&token.session).filter(|c| c.is_serving()) else {
                continue;
            };
            if let Some(result) = connection.session.ended(token.op, Some(&failure)) {
                self.board.count(result.err());
            }
        }
        for number in numbers {
            self.finish(number, End::Left, message, Some((code, message)), now);
        }
        self.write(now);
    }
}

impl<G: Groups> Endpoint for Sessions<G> {
    fn handle(&mut self, from: SocketAddrV4, ce: bool, data: &[u8], now: Nanos) {
        self.groups.handle(from, ce, data, now);
    }
    fn poll_transmit(&mut self, now: Nanos, buffer: &mut [u8]) -> Option<Transmit> {
        self.groups.poll_transmit(now, buffer)
    }
    fn poll_timeout(&self) -> Option<Nanos> {
        let until = |c: &Connection| match c.stage() {
            Stage::Ending { until, .. } => Some(until),
            Stage::Serving | Stage::Closed => None,
        };
        self.groups.poll_timeout().into_iter().chain(self.connections.values().filter_map(until)).min()
    }
    fn handle_timeout(&mut self, now: Nanos) {
        if self.groups.poll_timeout().is_some_and(|at| now >= at) {
            self.groups.handle_timeout(now);
        }
    }
    fn poll_event(&mut self) -> Option<Event> {
        None
    }
    fn snapshot(&self) -> Snapshot {
        self.groups.snapshot()
    }
}

impl<G: Groups> Commanded for Sessions<G> {
    type Command = SessionCommand;

    fn command(&mut self, command: SessionCommand, now: Nanos) {
        match command {
            SessionCommand::Attach(new) => self.attach(*new, now),
            SessionCommand::Reply { session, body } => {
                if let Some(connection) = self.connections.get_mut(&session).filter(|c| c.is_serving()) {
                    connection.session.reply(&body);
                }
            }
            SessionCommand::Grown { session, bytes, made } => self.grown(session, bytes, made),
            SessionCommand::Close { code, message } => self.close(&code, &message, now),
        }
    }

    fn abort(&mut self, reason: &str) {
        if self.closing.is_none() {
            self.board.push(SessionEvent::Stopped { why: reason.to_owned() });
            self.close("Internal", &format!("the transport of this sidecar does not run: {reason}"), 0);
        }
        self.tokens.clear();
        self.backlog.clear();
    }

    fn watch(&mut self, poll: &mut PollSet) {
        for connection in self.connections.values_mut() {
            let (readable, writable) = connection.wants();
            connection.slot = poll.add(connection.raw(), readable, writable);
        }
    }

    fn serve(&mut self, poll: &PollSet, now: Nanos) {
        let ready: Vec<u32> = self
            .connections
            .iter()
            .filter(|(_, c)| c.is_serving() && poll.readable(c.slot))
            .map(|(number, _)| *number)
            .collect();
        for number in ready {
            self.read(number, now);
        }
    }

    fn settle(&mut self, now: Nanos) {
        loop {
            while let Some(event) = self.groups.poll_event() {
                self.ended(event);
            }
            let Some(part) = self.backlog.next() else { break };
            self.groups.submit(part, now);
        }
        self.report_failures();
        while let Some(text) = self.groups.poll_warning() {
            for connection in self.connections.values_mut().filter(|c| c.is_serving()) {
                connection.session.warn(&text);
            }
            self.board.push(SessionEvent::Warning { text });
        }
        self.write(now);
        self.board.gauge(self.attached as usize, self.tokens.len());
    }

    fn closing(&self) -> bool {
        self.closing.is_some()
    }

    fn linger(&mut self) {
        let origin = Instant::now();
        let clock = || origin.elapsed().as_nanos() as Nanos;
        for connection in self.connections.values_mut() {
            connection.restart_clock(0);
        }
        let mut poll = PollSet::default();
        loop {
            let now = clock();
            self.write(now);
            if self.connections.is_empty() {
                return;
            }
            poll.clear();
            self.watch(&mut poll);
            if poll.wait(Some(LINGER.saturating_sub(now))).is_err() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::Driver;
    use crate::frame::{Submit, push_body};
    use atp_proto::Config;
    use atp_proto::fixed::Dtype;
    use atp_proto::op::Kind;
    use serde_json::json;
    use std::io::{Read, Write};
    use std::net::UdpSocket;
    use std::sync::Mutex;
    use std::time::Duration;

    /// What the transport was told, and the parts that it has not given back.
    #[derive(Default)]
    struct Script {
        told: Vec<String>,
        held: Vec<Part>,
        events: Vec<Event>,
    }

    /// A transport that holds every part until the test lets it go.
    struct Fake(Arc<Mutex<Script>>, Nanos);

    impl Endpoint for Fake {
        fn handle(&mut self, _from: SocketAddrV4, _ce: bool, _data: &[u8], _now: Nanos) {}
        fn poll_transmit(&mut self, _now: Nanos, _buffer: &mut [u8]) -> Option<Transmit> {
            None
        }
        fn poll_timeout(&self) -> Option<Nanos> {
            Some(self.1)
        }
        fn handle_timeout(&mut self, now: Nanos) {
            self.1 = now + 1_000_000;
        }
        fn poll_event(&mut self) -> Option<Event> {
            self.0.lock().unwrap().events.pop()
        }
        fn snapshot(&self) -> Snapshot {
            Snapshot::default()
        }
    }

    impl Groups for Fake {
        fn submit(&mut self, part: Part, _now: Nanos) {
            self.0.lock().unwrap().held.push(part);
        }
        fn abort(&mut self, group: u64, code: Code, reason: &str, _now: Nanos) {
            self.0.lock().unwrap().told.push(format!("abort {group} {} {reason}", code.name()));
        }
        fn leave(&mut self, group: u64, _now: Nanos) {
            self.0.lock().unwrap().told.push(format!("leave {group}"));
        }
        fn set_attached(&mut self, sessions: u32, _now: Nanos) {
            self.0.lock().unwrap().told.push(format!("attached {sessions}"));
        }
        fn poll_warning(&mut self) -> Option<String> {
            None
        }
    }

    struct World {
        script: Arc<Mutex<Script>>,
        board: Arc<Board>,
        driver: Driver<Sessions<Fake>>,
        directory: PathBuf,
    }

    fn until<T>(mut look: impl FnMut() -> Option<T>) -> T {
        for _ in 0..2000 {
            if let Some(found) = look() {
                return found;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("did not happen within 10 s");
    }

    impl World {
        fn new() -> Self {
            let port = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            let text = json!({
                "jobId": 1, "mode": "HostOnly", "role": "worker", "valuesPerPacket": 62, "port": port,
                "workers": [{"rank": 0, "address": "127.0.0.1"}], "parameterServers": [{"address": "127.0.0.2"}],
            });
            let config = Config::from_json(&text.to_string()).unwrap();
            let script = Arc::new(Mutex::new(Script::default()));
            let board = Arc::new(Board::new().unwrap());
            let fake = Fake(Arc::clone(&script), 0);
            let directory = std::env::temp_dir();
            let driver = Driver::start_with(&config, "test", |commands| {
                Sessions::new(fake, &directory, Arc::clone(&board), commands)
            });
            Self { script, board, driver: driver.unwrap(), directory }
        }

        fn attach(&self, session: u32) -> Client {
            let (stream, other) = UnixStream::pair().unwrap();
            other.set_nonblocking(true).unwrap();
            let segment = Segment::create(&self.directory, 8192).unwrap();
            let path = segment.path().to_owned();
            let welcome = json!({"type": "welcome"}).as_object().unwrap().clone();
            let new = Attachment { session, stream: other, segment, welcome };
            assert!(self.driver.send(SessionCommand::Attach(Box::new(new))));
            stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            let mut client = Client { stream, path };
            assert_eq!(client.json()["type"], "welcome");
            client
        }

        fn held(&self, count: usize) {
            until(|| (self.script.lock().unwrap().held.len() == count).then_some(()));
        }

        fn told(&self, text: &str) {
            until(|| self.script.lock().unwrap().told.iter().any(|t| t == text).then_some(()));
        }

        /// Give all parts back.
        fn release(&self, error: Option<&Failure>) {
            let mut script = self.script.lock().unwrap();
            let held = std::mem::take(&mut script.held);
            script.events.extend(held.into_iter().map(|part| Event {
                token: part.token,
                error: error.cloned(),
                memory: part.memory,
            }));
        }
    }

    struct Client {
        stream: UnixStream,
        path: PathBuf,
    }

    impl Client {
        fn send(&mut self, body: &[u8]) {
            let mut frame = Vec::new();
            push_body(&mut frame, body);
            self.stream.write_all(&frame).unwrap();
        }

        fn submit(&mut self, op: u64, group: u64, number: u64) {
            let submit = Submit {
                dtype: Dtype::Float32,
                kind: Kind::Sum,
                segment: 0,
                op,
                group,
                number,
                total: 16,
                begin: 0,
                offset: 64 * op,
                count: 16,
            };
            self.send(&submit.encode());
        }

        fn body(&mut self) -> Vec<u8> {
            let mut head = [0; 4];
            self.stream.read_exact(&mut head).unwrap();
            let mut body = vec![0; u32::from_be_bytes(head) as usize];
            self.stream.read_exact(&mut body).unwrap();
            body
        }

        fn json(&mut self) -> Value {
            serde_json::from_slice(&self.body()).unwrap()
        }

        fn at_end(&mut self) -> bool {
            matches!(self.stream.read(&mut [0; 16]), Ok(0))
        }
    }

    #[test]
    fn what_ends_in_one_turn_is_one_frame() {
        let world = World::new();
        let mut client = world.attach(1);
        for op in 0..5 {
            client.submit(op, 3, op);
        }
        world.held(5);
        world.release(None);
        let body = client.body();
        assert_eq!((body[0], body.len()), (crate::frame::DONE, 8 + 8 * 5));
        assert_eq!(world.board.results()[0], ("ok", 5));
    }

    #[test]
    fn memory_stays_until_the_transport_gives_it_back() {
        let world = World::new();
        let mut client = world.attach(1);
        let path = client.path.clone();
        client.submit(0, 3, 0);
        world.held(1);
        drop(client);
        world.told("abort 3 PeerGone its trainer left (connection closed) with 1 operations outstanding");
        world.told("leave 3");
        world.told("attached 0");
        until(|| (!path.exists()).then_some(()));
        let mut script = world.script.lock().unwrap();
        let memory = &mut script.held[0].memory;
        memory.target().fill(7);
        assert_eq!(memory.source(), [7; 64]);
        drop(script);
        world.release(None);
        world.held(0);
        let mut other = world.attach(2);
        other.submit(0, 4, 0);
        world.held(1);
        world.release(None);
        assert_eq!(other.body()[0], crate::frame::DONE);
    }

    #[test]
    fn a_clean_end_leaves_the_groups() {
        let world = World::new();
        let mut client = world.attach(1);
        client.submit(0, 3, 0);
        world.held(1);
        world.release(None);
        client.body();
        client.send(br#"{"type":"bye"}"#);
        assert!(client.at_end());
        world.told("leave 3");
        assert!(!world.script.lock().unwrap().told.iter().any(|t| t.starts_with("abort")));
        let event = until(|| world.board.take().pop());
        let why = "bye".to_owned();
        assert_eq!(event, SessionEvent::Ended { session: 1, end: End::Left, why, outstanding: 0 });
    }

    #[test]
    fn a_group_of_another_session_is_refused_and_not_touched() {
        let world = World::new();
        let mut client = world.attach(1);
        client.submit(0, 3, 0);
        world.held(1);
        let mut thief = world.attach(2);
        thief.send(br#"{"type":"leave","group":3}"#);
        assert!(thief.json()["message"].as_str().unwrap().contains("belongs to another trainer"));
        assert!(thief.at_end());
        assert!(!world.script.lock().unwrap().told.iter().any(|t| t.starts_with("leave")));
        world.release(None);
        assert_eq!(client.body()[0], crate::frame::DONE);
    }

    #[test]
    fn failures_are_reported_once_a_group_and_counted() {
        let world = World::new();
        let mut client = world.attach(1);
        for op in 0..3 {
            client.submit(op, 3, op);
        }
        world.held(3);
        world.release(Some(&Failure::breaking(Code::Timeout, "too late")));
        for _ in 0..3 {
            let failed = client.json();
            assert_eq!((&failed["code"], &failed["broken"]), (&json!("Timeout"), &json!(true)));
        }
        let events = until(|| Some(world.board.take()).filter(|e| !e.is_empty()));
        assert!(matches!(&events[..], [SessionEvent::Failed { count: 3, group: 3, .. }]), "{events:?}");
        assert!(world.board.results().contains(&("Timeout", 3)));
    }

    #[test]
    fn the_last_words_reach_a_client_that_is_sending() {
        let mut world = World::new();
        let mut client = world.attach(1);
        client.submit(0, 3, 0);
        world.held(1);
        let close = SessionCommand::Close { code: "Epoch".to_owned(), message: "epoch 2 has begun".to_owned() };
        assert!(world.driver.send(close));
        world.driver.wait_closed();
        // The address is free, and the client may still send.
        for op in 1..200 {
            client.submit(op % 100, 3, op);
        }
        let failed = client.json();
        assert_eq!((&failed["type"], &failed["code"]), (&json!("failed"), &json!("Epoch")));
        let fatal = client.json();
        assert_eq!((&fatal["type"], &fatal["code"]), (&json!("fatal"), &json!("Epoch")));
        assert!(client.at_end());
        assert!(!world.driver.send(SessionCommand::Reply { session: 1, body: Vec::new() }));
        drop(client);
        world.driver.stop();
    }

    #[test]
    fn clients_that_read_nothing_hold_nobody_up() {
        let mut world = World::new();
        let client = world.attach(1);
        let begin = Instant::now();
        world.driver.stop();
        assert!(begin.elapsed() < Duration::from_secs(3));
        drop(client);
    }
}

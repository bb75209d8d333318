// SPDX-License-Identifier: Apache-2.0
//! The session of one client (docs/session.md): bytes in, calls out; outcomes in, bytes out. No socket and no clock.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::Arc;

use atp_proto::failure::{Code, Failure};
use serde_json::{Map, Value, json};

use crate::frame::{self, Splitter, Submit};
use crate::group::{Ended, Group};
use crate::segment::{Segment, Slice};

/// A client that reads nothing while it submits is cut off here.
const UNSENT_BYTES_MAX: usize = 16 << 20;
/// Texts that quote a client, a megabyte perhaps, must fit a frame and a line of a log.
const TEXT_MAX: usize = 1000;
/// Parts of one session that have not ended.
const OUTSTANDING_MAX: usize = 1 << 18;
/// Groups that one session uses at a time.
const GROUPS_MAX: usize = 1 << 14;
const SEGMENTS_MAX: usize = 4096;
/// Questions without an answer.
const WAITING_MAX: usize = 1024;

/// What a client asks for.
pub enum Call {
    Submit {
        submit: Submit,
        memory: Slice,
    },
    Abort {
        group: u64,
        code: Code,
        reason: String,
    },
    Leave {
        group: u64,
    },
    /// Make a segment of so many bytes, and answer with `Session::grown`. One at a time.
    Grow {
        bytes: u64,
    },
    /// Answer with `Session::reply`.
    Stats,
    Bye,
}

/// One client after its welcome.
pub struct Session {
    input: Splitter,
    output: Vec<u8>,
    /// Bytes of `output` that the kernel took.
    sent: usize,
    /// Bytes that were written in answer to what does not depend on the client's reading.
    owed: usize,
    segments: Vec<Arc<Segment>>,
    /// Group and number of each part that has not ended, by the client's handle.
    parts: HashMap<u64, (u64, u64)>,
    groups: HashMap<u64, Group>,
    done: Vec<u64>,
    growing: bool,
    to_grow: VecDeque<u64>,
    questions: usize,
}

/// At most `TEXT_MAX` bytes of a text.
pub fn clip(text: &str) -> &str {
    let mut end = text.len().min(TEXT_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

fn text_of(message: &Map<String, Value>, name: &str) -> Result<String, String> {
    match message.get(name) {
        Some(Value::String(text)) => Ok(clip(text).to_owned()),
        other => Err(wrong(message, name, "a text", other)),
    }
}

fn integer_of(message: &Map<String, Value>, name: &str, least: u64) -> Result<u64, String> {
    let value = message.get(name);
    value.and_then(Value::as_u64).filter(|v| *v >= least).ok_or_else(|| {
        let what = format!("an integer of at least {least}");
        wrong(message, name, &what, value)
    })
}

fn wrong(message: &Map<String, Value>, name: &str, what: &str, value: Option<&Value>) -> String {
    let kind = message.get("type").and_then(Value::as_str).unwrap_or_default();
    let value = value.map_or_else(|| "missing".to_owned(), Value::to_string);
    format!("{}: \"{name}\" must be {what}, not {}", clip(kind), clip(&value))
}

/// Files in the shared directory have names of this sidecar's making.
fn path_of(segment: &Segment) -> String {
    segment.path().to_string_lossy().into_owned()
}

impl Session {
    /// Begins with the welcome: `welcome` and where the first segment is.
    #[must_use]
    pub fn new(segment: Arc<Segment>, mut welcome: Map<String, Value>) -> Self {
        welcome.insert("segment".to_owned(), 0.into());
        welcome.insert("shm".to_owned(), path_of(&segment).into());
        welcome.insert("shmBytes".to_owned(), segment.size().into());
        let mut session = Self {
            input: Splitter::default(),
            output: Vec::new(),
            sent: 0,
            owed: 0,
            segments: vec![segment],
            parts: HashMap::new(),
            groups: HashMap::new(),
            done: Vec::new(),
            growing: false,
            to_grow: VecDeque::new(),
            questions: 0,
        };
        session.say(&Value::Object(welcome));
        session
    }

    /// Take bytes of the client; `calls` gets what it asks for.
    ///
    /// # Errors
    /// When the client breaks the protocol. What it asked for before counts.
    pub fn receive(&mut self, bytes: &[u8], calls: &mut Vec<Call>) -> Result<(), String> {
        let mut input = std::mem::take(&mut self.input);
        input.push(bytes);
        while let Some(body) = input.next_body()? {
            match body[0] {
                frame::SUBMIT => calls.push(self.submit(body)?),
                frame::JSON => self.message(body, calls)?,
                other => return Err(format!("a frame begins with {other}, which is no type of this protocol")),
            }
            if matches!(calls.last(), Some(Call::Bye)) {
                break;
            }
        }
        self.input = input;
        Ok(())
    }

    /// Whether the client's bytes ended inside a frame, if they ended now.
    #[must_use]
    pub fn inside_frame(&self) -> bool {
        self.input.inside_frame()
    }

    fn submit(&mut self, body: &[u8]) -> Result<Call, String> {
        let submit = Submit::decode(body)?;
        let Some(segment) = self.segments.get(submit.segment as usize) else {
            return Err(format!("submit: there is no segment {}", submit.segment));
        };
        if submit.offset % 64 != 0 {
            return Err(format!("submit: offset {} is not a multiple of 64", submit.offset));
        }
        let length = u64::from(submit.count) * submit.dtype.size() as u64;
        let Some(memory) = segment.slice(submit.offset, length) else {
            return Err(format!(
                "submit: {length} bytes at {} are not inside segment {} of {} bytes",
                submit.offset,
                submit.segment,
                segment.size()
            ));
        };
        if self.parts.contains_key(&submit.op) {
            return Err(format!("submit: operation {} is outstanding already", submit.op));
        }
        if self.parts.len() >= OUTSTANDING_MAX {
            return Err(format!("submit: {OUTSTANDING_MAX} operations are outstanding: wait for some of them"));
        }
        self.group(submit.group)?.submit(&submit)?;
        self.parts.insert(submit.op, (submit.group, submit.number));
        Ok(Call::Submit { submit, memory })
    }

    /// A group that the client uses from now on.
    fn group(&mut self, group: u64) -> Result<&mut Group, String> {
        if self.groups.len() >= GROUPS_MAX && !self.groups.contains_key(&group) {
            return Err(format!("{GROUPS_MAX} groups are in use: leave some of them"));
        }
        Ok(self.groups.entry(group).or_default())
    }

    fn message(&mut self, body: &[u8], calls: &mut Vec<Call>) -> Result<(), String> {
        let message: Map<String, Value> =
            serde_json::from_slice(body).map_err(|e| format!("a frame is not a JSON object: {e}"))?;
        let Some(kind) = message.get("type").and_then(Value::as_str) else {
            return Err("a frame is not a JSON object with a \"type\"".to_owned());
        };
        match kind {
            "grow" => {
                let bytes = integer_of(&message, "bytes", 1)?;
                if self.to_grow.len() >= WAITING_MAX {
                    return Err(format!("grow: {WAITING_MAX} questions wait for their answers"));
                }
                self.to_grow.push_back(bytes);
                calls.extend(self.next_grow());
            }
            "abort" => {
                let group = integer_of(&message, "group", 0)?;
                let name = text_of(&message, "code")?;
                let code = Code::parse(&name).ok_or_else(|| format!("abort: code {name:?} is unknown"))?;
                let reason = text_of(&message, "reason")?;
                self.group(group)?;
                calls.push(Call::Abort { group, code, reason });
            }
            "leave" => {
                let group = integer_of(&message, "group", 0)?;
                let known = self.group(group)?;
                known.leave();
                if known.is_over() {
                    self.groups.remove(&group);
                }
                calls.push(Call::Leave { group });
            }
            "ping" => self.say(&json!({"type": "pong"})),
            "stats" => {
                if self.questions >= WAITING_MAX {
                    return Err(format!("stats: {WAITING_MAX} questions wait for their answers"));
                }
                self.questions += 1;
                calls.push(Call::Stats);
            }
            "bye" => calls.push(Call::Bye),
            other => return Err(format!("unknown message type {:?}", clip(other))),
        }
        Ok(())
    }

    fn next_grow(&mut self) -> Option<Call> {
        if self.growing {
            return None;
        }
        let bytes = self.to_grow.pop_front()?;
        self.growing = true;
        Some(Call::Grow { bytes })
    }

    /// The answer to `Call::Grow`; what to do next.
    pub fn grown(&mut self, made: io::Result<Segment>) -> Option<Call> {
        self.growing = false;
        let made = made.and_then(|segment| {
            if self.segments.len() < SEGMENTS_MAX {
                return Ok(segment);
            }
            Err(io::Error::other(format!("a session has at most {SEGMENTS_MAX} segments")))
        });
        match made {
            Ok(segment) => {
                let (number, path, size) = (self.segments.len(), path_of(&segment), segment.size());
                self.segments.push(Arc::new(segment));
                self.say(&json!({"type": "segment", "segment": number, "shm": path, "shmBytes": size}));
            }
            Err(e) => self.say(&json!({"type": "segment", "error": clip(&e.to_string())})),
        }
        self.next_grow()
    }

    /// The answer to `Call::Stats`: a JSON object.
    pub fn reply(&mut self, body: &[u8]) {
        self.questions = self.questions.saturating_sub(1);
        if body.len() <= frame::FRAME_BYTES_MAX {
            frame::push_body(&mut self.output, body);
        }
    }

    /// A part ended; `op` is the client's handle. Some: so did its operation, which is said once.
    pub fn ended(&mut self, op: u64, failure: Option<&Failure>) -> Option<Ended> {
        let (group, number) = self.parts.remove(&op)?;
        match failure {
            None => self.done.push(op),
            Some(f) => {
                let before = self.output.len();
                self.say(&json!({
                    "type": "failed", "op": op, "code": f.code.name(), "message": clip(&f.text), "group": group,
                    "broken": f.broken,
                }));
                self.owed += self.output.len() - before;
            }
        }
        let known = self.groups.get_mut(&group)?;
        let ended = known.ended(number, failure.map(|f| f.code));
        if known.is_over() {
            self.groups.remove(&group);
        }
        ended
    }

    /// Whether the client still uses the group.
    #[must_use]
    pub fn uses(&self, group: u64) -> bool {
        self.groups.contains_key(&group)
    }

    /// To be logged by the client.
    pub fn warn(&mut self, text: &str) {
        self.say(&json!({"type": "warning", "text": clip(text)}));
    }

    /// The last message.
    pub fn fatal(&mut self, code: &str, message: &str) {
        self.flush_done();
        self.say(&json!({"type": "fatal", "code": code, "message": clip(message)}));
    }

    fn say(&mut self, message: &Value) {
        frame::push_body(&mut self.output, message.to_string().as_bytes());
    }

    fn flush_done(&mut self) {
        if !self.done.is_empty() {
            frame::push_done(&mut self.output, &self.done);
            self.done.clear();
        }
    }

    /// What the client has to get, with one frame for all operations that are done.
    pub fn unsent(&mut self) -> &[u8] {
        self.flush_done();
        &self.output[self.sent..]
    }

    /// The kernel took the first `count` bytes of `unsent`.
    pub fn took(&mut self, count: usize) {
        self.sent += count;
        if self.sent >= self.output.len() {
            self.output.clear();
            (self.sent, self.owed) = (0, 0);
            self.output.shrink_to(1 << 16);
        } else if self.sent > 1 << 20 {
            self.output.drain(..self.sent);
            self.sent = 0;
        }
    }

    /// Whether the client reads too little of what it asked for.
    #[must_use]
    pub fn is_clogged(&self) -> bool {
        self.output.len() - self.sent > UNSENT_BYTES_MAX + self.owed
    }

    /// Parts that were submitted and have not ended.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.parts.len()
    }

    /// The session is over: its parts' handles, and its groups with the number of operations that have not ended.
    pub fn dissolve(&mut self) -> (Vec<u64>, Vec<(u64, usize)>) {
        for segment in self.segments.drain(..) {
            segment.unlink();
        }
        let ops = self.parts.drain().map(|(op, _)| op).collect();
        (ops, self.groups.drain().map(|(number, group)| (number, group.open())).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{push_body, push_done};
    use atp_proto::fixed::Dtype;
    use atp_proto::op::Kind;
    use proptest::prelude::*;

    fn session() -> Session {
        let segment = Segment::create(&std::env::temp_dir(), 1 << 16).unwrap();
        let mut session = Session::new(Arc::new(segment), Map::new());
        let length = session.unsent().len();
        session.took(length);
        session
    }

    fn submit(op: u64, number: u64) -> Submit {
        Submit {
            dtype: Dtype::Float32,
            kind: Kind::Sum,
            segment: 0,
            op,
            group: 9,
            number,
            total: 4,
            begin: 0,
            offset: 64 * op,
            count: 4,
        }
    }

    fn frames(bodies: &[&[u8]]) -> Vec<u8> {
        let mut out = Vec::new();
        for body in bodies {
            push_body(&mut out, body);
        }
        out
    }

    fn messages(session: &mut Session) -> Vec<Value> {
        let mut splitter = Splitter::default();
        splitter.push(session.unsent());
        let mut out = Vec::new();
        while let Some(body) = splitter.next_body().unwrap() {
            out.push(serde_json::from_slice(body).unwrap());
        }
        out
    }

    #[test]
    fn submissions_become_calls_and_their_ends_frames() {
        let mut session = session();
        let mut calls = Vec::new();
        let bytes = frames(&[&submit(1, 0).encode(), &submit(2, 1).encode(), br#"{"type":"bye"}"#, b"nonsense"]);
        session.receive(&bytes, &mut calls).unwrap();
        assert_eq!(calls.len(), 3, "after bye nothing counts");
        let Call::Submit { submit: got, .. } = &calls[1] else { panic!("a submission") };
        assert_eq!(*got, submit(2, 1));
        assert_eq!(session.ended(2, None), Some(Ok(())));
        assert_eq!(session.ended(1, None), Some(Ok(())));
        assert_eq!(session.ended(1, None), None, "it is not outstanding");
        let mut expected = Vec::new();
        push_done(&mut expected, &[2, 1]);
        assert_eq!(session.unsent(), expected);
    }

    #[test]
    fn a_failure_names_its_operation() {
        let mut session = session();
        session.receive(&frames(&[&submit(5, 0).encode()]), &mut Vec::new()).unwrap();
        let failure = Failure::breaking(Code::PeerGone, "x".repeat(5000));
        assert_eq!(session.ended(5, Some(&failure)), Some(Err(Code::PeerGone)));
        let message = messages(&mut session).remove(0);
        assert_eq!((&message["op"], &message["group"]), (&json!(5), &json!(9)));
        assert_eq!((&message["code"], &message["broken"]), (&json!("PeerGone"), &json!(true)));
        assert_eq!(message["message"].as_str().map(str::len), Some(TEXT_MAX));
    }

    #[test]
    fn segments_are_made_one_at_a_time() {
        let mut session = session();
        let mut calls = Vec::new();
        let grow: &[u8] = br#"{"type":"grow","bytes":4096}"#;
        session.receive(&frames(&[grow, grow]), &mut calls).unwrap();
        assert_eq!(calls.len(), 1);
        assert!(session.grown(Err(io::Error::other("no room"))).is_some(), "now the second");
        assert!(session.grown(Segment::create(&std::env::temp_dir(), 4096)).is_none());
        let answers = messages(&mut session);
        assert_eq!(answers[0]["error"], "no room");
        assert_eq!((&answers[1]["segment"], &answers[1]["shmBytes"]), (&json!(1), &json!(4096)));
        let mut in_it = submit(1, 0);
        (in_it.segment, in_it.offset) = (1, 4032);
        session.receive(&frames(&[&in_it.encode()]), &mut calls).unwrap();
        (in_it.op, in_it.number, in_it.offset) = (2, 1, 4096);
        assert!(session.receive(&frames(&[&in_it.encode()]), &mut calls).is_err());
    }

    #[test]
    fn who_reads_nothing_is_clogged_but_failures_are_owed() {
        let mut session = session();
        let failure = Failure::new(Code::Timeout, "x".repeat(TEXT_MAX));
        for op in 0..20_000 {
            let mut s = submit(op, op);
            s.offset = 0;
            session.receive(&frames(&[&s.encode()]), &mut Vec::new()).unwrap();
        }
        for op in 0..20_000 {
            session.ended(op, Some(&failure));
        }
        assert!(session.unsent().len() > UNSENT_BYTES_MAX && !session.is_clogged());
        let length = session.unsent().len();
        session.took(length);
        let ping: &[u8] = br#"{"type":"ping"}"#;
        let pings = frames(&[ping; 1000]);
        while !session.is_clogged() {
            session.receive(&pings, &mut Vec::new()).unwrap();
        }
        assert!(session.unsent().len() <= UNSENT_BYTES_MAX + 20_000);
    }

    #[test]
    fn the_output_is_the_same_however_it_is_taken() {
        let mut session = session();
        let mut out = Vec::new();
        for i in 0..3000 {
            session.warn(&format!("{i} {}", "y".repeat(900)));
            if i % 3 == 0 {
                let piece = session.unsent().len().min(5000);
                out.extend_from_slice(&session.unsent()[..piece]);
                session.took(piece);
            }
        }
        out.extend_from_slice(session.unsent());
        let mut splitter = Splitter::default();
        splitter.push(&out);
        for i in 0..3000 {
            let body = splitter.next_body().unwrap().unwrap();
            let message: Value = serde_json::from_slice(body).unwrap();
            assert!(message["text"].as_str().unwrap().starts_with(&format!("{i} ")));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_calls_or_an_error(
            bodies in prop::collection::vec(
                prop_oneof![
                    prop::collection::vec(any::<u8>(), 0..80),
                    (0u64..4, 0u64..3, any::<u8>(), any::<u8>()).prop_map(|(op, number, at, to)| {
                        let mut body = submit(op, number).encode().to_vec();
                        body[usize::from(at) % 64] = to;
                        body
                    }),
                    "\\{\"type\":\"(grow|abort|leave|ping|stats)\",\"(group|bytes)\":-?[0-9]{1,21}\\}"
                        .prop_map(String::into_bytes),
                ],
                0..10,
            ),
        ) {
            let mut session = session();
            let mut calls = Vec::new();
            for body in &bodies {
                if session.receive(&frames(&[body]), &mut calls).is_err() {
                    break;
                }
            }
            for call in &calls {
                if let Call::Submit { submit, .. } = call {
                    session.ended(submit.op, None);
                }
            }
            session.dissolve();
        }
    }
}

//! The monitor of a libvirt domain's QEMU, as a QMP connection.
//!
//! libvirt keeps QEMU's monitor for itself and passes single commands on (`virDomainQemuMonitorCommand`). [`connect`] makes a QMP connection of
//! that, so that everything else drives such a QEMU as any other: a thread reads the commands from a socket pair, has libvirt pass them on, and
//! writes answers and events.
//!
//! | command | becomes | why |
//! |---|---|---|
//! | `stop` | `virDomainSuspend` | libvirt's lock manager releases the disks |
//! | `cont` | `virDomainResume` | libvirt's lock manager acquires them again |
//! | `quit` | `virDomainDestroyFlags` | libvirt does not take QEMU's end for a crash |
//! | with a descriptor (`add-fd`, `getfd`) | `virDomainQemuMonitorCommandWithFiles` | libvirt 8.2 or newer |
//! | others | `virDomainQemuMonitorCommand` | |
//!
//! **Events** come by another way than answers, so an answer may overtake an event that QEMU sent before it: by the time that libvirt's daemon
//! needs for one turn of its event loop.
//!
//! **A lost connection** (libvirtd was restarted) ends what needs all of QEMU's events, a migration under way, because some may be missing.
//! A guest that is paused must still be resumed: so the thread connects again, for a limited time, and from then on serves only the commands of
//! [`AFTER_LOSS`].

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fs;
use std::io::{self, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Builder;
use std::time::{Duration, Instant};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde_json::{Value, json};
use sterna_engine::process;
use sterna_libvirt::{Client, Connection, Destroy, Domain, Error, MonitorEvent, MonitorEvents, State};
use sterna_wire::switchover::ProcessIdentity;

use crate::qmp::{DEFAULT_TIMEOUT, Messages, Qmp, QmpError};
use crate::vcpus;

/// The commands that are served after the connection to libvirt was lost: those that bring a paused guest back, or end its QEMU.
const AFTER_LOSS: [&str; 5] = ["cont", "query-status", "stop", "quit", "announce-self"];
/// How long to try to connect to libvirt again: a restart of its daemon takes some seconds.
const RECONNECTING_TIME: Duration = Duration::from_secs(60);
/// Pause between two attempts to connect again.
const RECONNECTING_PAUSE: Duration = Duration::from_millis(200);
/// The most descriptors that are passed with one command.
const MAX_DESCRIPTORS: usize = 4;

/// Finds a domain, and connects to the monitor of its QEMU.
///
/// # Errors
/// libvirt cannot be reached, or has no such domain, or the domain has no QEMU.
pub fn connect(uri: Option<&str>, name: &str) -> Result<Qmp, QmpError> {
    let domain = find(uri, name).map_err(|reason| QmpError::Libvirt { reason })?;
    of_domain(&domain)
}

/// Finds a domain.
///
/// # Errors
/// libvirt cannot be reached, or has no such domain.
pub(crate) fn find(uri: Option<&str>, name: &str) -> Result<Domain, String> {
    let connection = connection(uri)?;
    Domain::find(&connection, name).map_err(|error| error.to_string())
}

/// Connects to libvirt.
///
/// # Errors
/// Its client library is missing, or it cannot be reached.
pub(crate) fn connection(uri: Option<&str>) -> Result<Connection, String> {
    let client = Client::load().map_err(|error| error.to_string())?;
    client.connect(uri).map_err(|error| error.to_string())
}

/// Connects to the monitor of a domain's QEMU.
fn of_domain(domain: &Domain) -> Result<Qmp, QmpError> {
    let failed = |reason: String| QmpError::Libvirt { reason };
    let uuid = domain.uuid().map_err(|error| failed(error.to_string()))?;
    let version = passed_on(domain, &json!({ "execute": "query-version" }), None);
    let version = version.map_err(|error| failed(error.to_string()))?["return"].take();
    let (ours, theirs) = UnixStream::pair().map_err(|error| failed(format!("no socket pair: {error}")))?;
    let answers = theirs.try_clone().map_err(|error| failed(error.to_string()))?;
    let output = Output(Arc::new(Mutex::new(answers)));
    let events = output.follow(domain).map_err(|error| failed(error.to_string()))?;
    output.write(&json!({ "QMP": { "version": version, "capabilities": [] } }));
    let domain = domain.clone();
    let thread = Builder::new().name("libvirt-monitor".into()).spawn(move || {
        Relay { domain, output, _events: events, lost: None }.run(theirs);
    });
    thread.map_err(|error| failed(format!("no thread passes commands to libvirt: {error}")))?;
    Qmp::over(ours, DEFAULT_TIMEOUT, |qmp| process_of(qmp, &uuid))
}

/// Finds the process of a domain's QEMU: the one that has the domain's UUID among its arguments and runs its vCPUs.
fn process_of(qmp: &Qmp, uuid: &str) -> Option<i32> {
    let mut found = with_uuid(uuid).filter(|pid| vcpus::check(qmp, *pid).is_ok());
    let first = found.next()?;
    found.next().is_none().then_some(first)
}

/// Returns the processes that have this UUID among their arguments, as libvirt gives it to QEMU.
pub(crate) fn processes_of(uuid: &str) -> Vec<ProcessIdentity> {
    with_uuid(uuid).filter_map(|pid| process::identity(pid.try_into().ok()?)).collect()
}

fn with_uuid(uuid: &str) -> impl Iterator<Item = i32> {
    let processes = fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
    let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    numbers.filter(move |pid| has_uuid(*pid, uuid))
}

/// Returns whether a process is a QEMU that was started with this UUID, as libvirt writes it.
pub(crate) fn has_uuid(pid: i32, uuid: &str) -> bool {
    let Ok(arguments) = fs::read(format!("/proc/{pid}/cmdline")) else { return false };
    let mut arguments = arguments.split(|byte| *byte == 0);
    arguments.any(|argument| argument == b"-uuid") && arguments.next() == Some(uuid.as_bytes())
}

/// The thread's end of the socket pair, for answers and events.
#[derive(Clone)]
struct Output(Arc<Mutex<UnixStream>>);

impl Output {
    /// Writes a message. Fails where the connection has ended, which the thread notices by itself.
    fn write(&self, message: &Value) {
        let mut line = message.to_string();
        line.push('\n');
        let mut stream = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = stream.write_all(line.as_bytes()) {
            tracing::debug!(%error, "a QMP connection over libvirt has ended");
        }
    }

    /// Has all events of the domain's QEMU written.
    fn follow(&self, domain: &Domain) -> Result<MonitorEvents, Error> {
        let output = self.clone();
        domain.on_monitor_event(move |event| output.write(&as_qmp(&event)))
    }

    fn shut_down(&self) {
        // Fails where it has ended.
        let _ = self.0.lock().unwrap_or_else(PoisonError::into_inner).shutdown(Shutdown::Both);
    }
}

/// Returns an event as QEMU sends it.
fn as_qmp(event: &MonitorEvent) -> Value {
    let (seconds, microseconds) = event.time.map_or((-1, -1), |(seconds, micros)| (seconds as i64, i64::from(micros)));
    let data = event.details.as_deref().and_then(|text| serde_json::from_str(text).ok()).unwrap_or(Value::Null);
    json!({ "event": event.name, "timestamp": { "seconds": seconds, "microseconds": microseconds }, "data": data })
}

/// The thread that has libvirt pass commands on.
struct Relay {
    domain: Domain,
    output: Output,
    /// Delivers QEMU's events while the thread lives.
    _events: MonitorEvents,
    /// Why the connection to libvirt was lost, if it was.
    lost: Option<String>,
}

impl Relay {
    /// Serves commands until the connection is dropped, or QEMU has ended.
    fn run(mut self, stream: UnixStream) {
        let descriptors = Rc::default();
        let mut requests = Messages::new(Requests { stream, descriptors: Rc::clone(&descriptors) });
        loop {
            let Ok(request) = requests.next() else { return };
            let mut request = request.object;
            let id = request["id"].take();
            // libvirt adds an id of its own.
            request.as_object_mut().expect("every message is an object").remove("id");
            let command = request["execute"].as_str().unwrap_or_default().to_owned();
            let mut answer = match self.answer(&command, &request, &descriptors) {
                Ok(answer) => answer,
                Err(error) => json!({ "error": { "class": "GenericError", "desc": error.to_string() } }),
            };
            let ended = answer["error"].is_object() && self.qemu_has_ended();
            answer["id"] = id;
            self.output.write(&answer);
            if ended {
                self.output.shut_down();
                return;
            }
        }
    }

    fn answer(
        &mut self,
        command: &str,
        request: &Value,
        descriptors: &RefCell<VecDeque<OwnedFd>>,
    ) -> Result<Value, Error> {
        let descriptor = takes_descriptor(command).then(|| descriptors.borrow_mut().pop_front()).flatten();
        loop {
            if let Some(message) = self.lost.clone().filter(|_| !AFTER_LOSS.contains(&command)) {
                let uri = self.domain.connection().uri().to_owned();
                let domain = self.domain.name().to_owned();
                return Err(Error::ConnectionLost { uri, doing: "pass QEMU's events on", domain, message });
            }
            match execute(&self.domain, command, request, descriptor.as_ref()) {
                Err(error @ Error::ConnectionLost { .. }) => {
                    self.lost = Some(error.to_string());
                    // Carried out twice, these commands do the same as once.
                    if !AFTER_LOSS.contains(&command) || !self.reconnect() {
                        return Err(error);
                    }
                }
                answer => return answer,
            }
        }
    }

    /// Connects to libvirt again. Returns false if that does not succeed in time, or if the domain is another one.
    fn reconnect(&mut self) -> bool {
        let deadline = Instant::now() + RECONNECTING_TIME;
        let uri = self.domain.connection().uri().to_owned();
        // From memory: the old connection knows it.
        let uuid = self.domain.uuid().ok();
        while Instant::now() < deadline {
            match find(Some(&uri), self.domain.name()) {
                Ok(domain) => {
                    self.domain = domain;
                    return self.domain.uuid().ok() == uuid;
                }
                Err(error) => tracing::debug!(%error, "connecting to libvirt again"),
            }
            std::thread::sleep(RECONNECTING_PAUSE);
        }
        false
    }

    /// Returns whether the domain has no QEMU any more.
    fn qemu_has_ended(&self) -> bool {
        matches!(self.domain.state(), Ok(State::ShutOff | State::Crashed))
    }
}

fn takes_descriptor(command: &str) -> bool {
    matches!(command, "add-fd" | "getfd")
}

fn execute(domain: &Domain, command: &str, request: &Value, descriptor: Option<&OwnedFd>) -> Result<Value, Error> {
    let done = || json!({ "return": {} });
    match command {
        // The connection is made without negotiation.
        "qmp_capabilities" => Ok(done()),
        "stop" => domain.suspend().map(|()| done()),
        "cont" => domain.resume().map(|()| done()),
        "quit" => domain.destroy(Destroy::Forced).map(|()| done()),
        _ => passed_on(domain, request, descriptor),
    }
}

/// Has libvirt pass a command on. Returns QEMU's answer.
fn passed_on(domain: &Domain, request: &Value, descriptor: Option<&OwnedFd>) -> Result<Value, Error> {
    let request = request.to_string();
    let answer = match descriptor {
        None => domain.monitor_command(&request),
        Some(descriptor) => domain.monitor_command_with_descriptors(&request, &[descriptor.as_fd()]),
    }?;
    // libvirt has parsed it before.
    Ok(serde_json::from_str::<Value>(&answer).ok().filter(Value::is_object).unwrap_or_else(|| json!({})))
}

/// The requests of a QMP connection, and the descriptors that came with them, in the same order.
struct Requests {
    stream: UnixStream,
    descriptors: Rc<RefCell<VecDeque<OwnedFd>>>,
}

impl Read for Requests {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(buffer)];
        let received = recvmsg(&self.stream, &mut slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                self.descriptors.borrow_mut().extend(descriptors);
            }
        }
        Ok(received.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_passed_on_as_qemu_sends_it() {
        let event = |time, details: Option<&str>| {
            as_qmp(&MonitorEvent { name: "SHUTDOWN".into(), time, details: details.map(str::to_owned) })
        };
        let sent = event(Some((5, 7)), Some("{\"guest\": true}"));
        assert_eq!(
            sent,
            json!({ "event": "SHUTDOWN", "timestamp": { "seconds": 5, "microseconds": 7 }, "data": { "guest": true } })
        );
        let unknown = event(None, None);
        assert_eq!((&unknown["timestamp"]["seconds"], &unknown["data"]), (&json!(-1), &Value::Null));
    }

    #[test]
    fn requests_keep_their_descriptors() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let descriptors = Rc::default();
        let mut requests = Messages::new(Requests { stream: theirs, descriptors: Rc::clone(&descriptors) });
        let file = rustix::fs::memfd_create("passed", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = rustix::net::SendAncillaryBuffer::new(&mut space);
        let given = [file.as_fd()];
        assert!(ancillary.push(rustix::net::SendAncillaryMessage::ScmRights(&given)));
        let line = b"{\"execute\": \"add-fd\", \"id\": 1}\n";
        let flags = rustix::net::SendFlags::empty();
        rustix::net::sendmsg(&ours, &[io::IoSlice::new(line)], &mut ancillary, flags).unwrap();
        assert_eq!(requests.next().ok().map(|request| request.object["execute"].clone()), Some(json!("add-fd")));
        assert_eq!(descriptors.borrow().len(), 1);
        drop(ours);
        assert!(requests.next().is_err());
    }
}

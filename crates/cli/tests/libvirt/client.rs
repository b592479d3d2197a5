//! The crate `sterna-libvirt` with a real libvirt: its client library, loaded where the host has it, and both hosts' daemons.

use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::mpsc::{Receiver, channel};

use serde_json::{Value, json};
use sterna_libvirt::{
    Client, Code, Connection, Destroy, Domain, Error, Job, MonitorEvent, SavedImage, State, Version, Xml,
};
use sterna_qemu_lab::libvirt::{LibvirtHost, Side};

use super::Lab;
use super::support::LONG;
use super::support::pair::eventually;

/// Loads the library that a host's programs use.
fn client(lab: &Lab) -> Client {
    lab.hosts.host(Side::A).among_its_files(Client::load).unwrap().unwrap()
}

fn uri(host: &LibvirtHost) -> String {
    format!("qemu+unix:///system?socket={}", host.path("/run/libvirt/libvirt-sock").display())
}

fn connect(lab: &Lab, side: Side) -> Connection {
    client(lab).connect(Some(&uri(lab.hosts.host(side)))).unwrap()
}

/// Has QEMU execute a command, and returns what it has returned.
#[track_caller]
fn qmp(domain: &Domain, command: &str, arguments: &Value) -> Value {
    let request = json!({ "execute": command, "arguments": arguments }).to_string();
    let mut answer: Value = serde_json::from_str(&domain.monitor_command(&request).unwrap()).unwrap();
    assert!(answer["error"].is_null(), "{command}: {answer}");
    answer["return"].take()
}

#[track_caller]
fn wait_event(events: &Receiver<MonitorEvent>, name: &str) -> MonitorEvent {
    loop {
        let event = events.recv_timeout(LONG).unwrap_or_else(|_| panic!("no event {name} has come"));
        if event.name == name {
            return event;
        }
    }
}

#[test]
fn a_domain_is_found_described_paused_and_resumed_and_its_monitor_answers() {
    let Some(lab) = Lab::start() else { return };
    let guest = lab.guest("guest");
    let connection = connect(&lab, Side::A);
    assert_eq!(connection.version(), Version { major: 9, minor: 0, micro: 0 });
    assert!(connection.is_alive() && connection.passes_descriptors());

    let domain = Domain::find(&connection, "guest").unwrap();
    let uuid = domain.uuid().unwrap();
    assert_eq!(Domain::find(&connection, &uuid).unwrap().name(), "guest");
    let xml = domain.xml(Xml::Migratable).unwrap();
    assert!(xml.contains("<name>guest</name>") && xml.contains(&uuid), "{xml}");
    assert_eq!((domain.state(), domain.job()), (Ok(State::Running), Ok(Job::None)));
    assert_eq!(domain.is_persistent(), Ok(false));

    let (send, events) = channel();
    let subscription = domain.on_monitor_event(move |event| drop(send.send(event))).unwrap();
    domain.suspend().unwrap();
    assert!(wait_event(&events, "STOP").time.is_some());
    assert_eq!(domain.state(), Ok(State::Paused));
    assert_eq!(qmp(&domain, "query-status", &json!({}))["status"], "paused");
    domain.resume().unwrap();
    wait_event(&events, "RESUME");
    // The guest is stopped past libvirt's own call, and libvirt notices that.
    qmp(&domain, "stop", &json!({}));
    wait_event(&events, "STOP");
    qmp(&domain, "cont", &json!({}));
    wait_event(&events, "RESUME");
    drop(subscription);
    lab.assert_runs_once(&guest, Side::A);

    domain.destroy(Destroy::Graceful).unwrap();
    assert_eq!(domain.state(), Ok(State::ShutOff));
    // Also of a domain that is gone.
    domain.destroy(Destroy::Forced).unwrap();
}

#[test]
fn qemu_saves_its_devices_into_a_descriptor_that_libvirt_passes() {
    let Some(lab) = Lab::start() else { return };
    let guest = lab.guest("guest");
    let domain = Domain::find(&connect(&lab, Side::A), "guest").unwrap();
    let file = File::from(rustix::fs::memfd_create("state", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    // QEMU uses a descriptor of a set only if its access mode is exactly the one that it wants.
    let for_qemu = File::options().write(true).open(path).unwrap();

    let request = json!({ "execute": "add-fd", "arguments": { "opaque": "test" } }).to_string();
    let answer = domain.monitor_command_with_descriptors(&request, &[for_qemu.as_fd()]).unwrap();
    let answer: Value = serde_json::from_str(&answer).unwrap();
    let set = answer["return"]["fdset-id"].as_u64().unwrap_or_else(|| panic!("{answer}"));
    domain.suspend().unwrap();
    qmp(&domain, "xen-save-devices-state", &json!({ "filename": format!("/dev/fdset/{set}"), "live": true }));
    qmp(&domain, "remove-fd", &json!({ "fdset-id": set }));
    domain.resume().unwrap();

    let (mut file, mut state) = (file, Vec::new());
    file.rewind().unwrap();
    file.read_to_end(&mut state).unwrap();
    assert!(state.starts_with(b"QEVM\0\0\0\x03") && state.len() > 4096, "{} bytes", state.len());
    lab.assert_runs_once(&guest, Side::A);
}

#[test]
fn what_fails_is_an_error_that_names_it() {
    let Some(lab) = Lab::start() else { return };
    let guest = lab.guest("guest");
    let client = client(&lab);
    let nowhere = client.connect(Some("qemu+unix:///system?socket=/nonexistent/socket")).unwrap_err();
    assert!(matches!(&nowhere, Error::Connect { .. }), "{nowhere}");
    assert!(nowhere.to_string().contains("see whether its daemon runs"), "{nowhere}");
    let test = client.connect(Some("test:///default")).unwrap_err();
    assert!(matches!(&test, Error::NotQemu { .. }), "{test}");

    let connection = connect(&lab, Side::A);
    let error = Domain::find(&connection, "another").unwrap_err();
    assert!(matches!(&error, Error::NoDomain { name, .. } if name == "another"), "{error}");
    let error = Domain::find(&connection, "6a9e0d3c-5b7c-4a51-9d53-000000000000").unwrap_err();
    assert_eq!(error.code(), Some(Code::NoDomain));

    let domain = Domain::find(&connection, "guest").unwrap();
    // QEMU's own errors are answers.
    let answer = domain.monitor_command(r#"{"execute":"no-such-command"}"#).unwrap();
    assert!(answer.contains("CommandNotFound"), "{answer}");
    let not_json = domain.monitor_command("not JSON").unwrap_err();
    assert!(matches!(&not_json, Error::Failed { .. }), "{not_json}");
    domain.suspend().unwrap();
    domain.resume().unwrap();
    let missing = connection.restore_paused("/nonexistent/image", None).unwrap_err();
    assert!(missing.to_string().contains("/nonexistent/image"), "{missing}");
    lab.assert_runs_once(&guest, Side::A);

    // With its host libvirt ends, too.
    drop(guest);
    drop(lab);
    let mut state = domain.state();
    let is_lost = eventually(LONG, || {
        state = domain.state();
        matches!(state, Err(Error::ConnectionLost { .. }))
    });
    assert!(is_lost, "{state:?}");
    let lost = state.unwrap_err();
    assert!(lost.to_string().contains("was lost while it was asked to report its state (domain guest)"), "{lost}");
}

#[test]
fn a_saved_image_is_read_written_and_restored_paused() {
    let Some(lab) = Lab::start() else { return };
    let guest = lab.guest("guest");
    let connection = connect(&lab, Side::A);
    let host = lab.hosts.host(Side::A);
    host.virsh(&["save", "guest", "/run/lab/image"]).unwrap();
    let mut file = File::open(host.path("/run/lab/image")).unwrap();
    let image = SavedImage::read(&mut file).unwrap();
    assert!(image.was_running && image.xml.contains("<name>guest</name>"), "{}", image.xml);

    // The same stream behind a header of our own, without libvirt's cookie.
    let path = host.path("/run/lab/ours");
    let mut ours = File::create_new(&path).unwrap();
    std::io::Write::write_all(&mut ours, &image.encode().unwrap()).unwrap();
    std::io::copy(&mut file, &mut ours).unwrap();
    connection.restore_paused("/run/lab/ours", None).unwrap();
    let domain = Domain::find(&connection, "guest").unwrap();
    assert_eq!(domain.state(), Ok(State::Paused));
    assert_eq!(guest.running(), []);
    domain.resume().unwrap();
    lab.assert_runs_once(&guest, Side::A);

    // With a name in use.
    let taken = connection.restore_paused("/run/lab/ours", None).unwrap_err();
    assert!(matches!(&taken, Error::Failed { code: Code::OperationFailed | Code::OperationInvalid, .. }), "{taken:?}");
    lab.assert_runs_once(&guest, Side::A);
}

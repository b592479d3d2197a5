//! `sterna send --libvirt` and `receive --libvirt`: guests of libvirt move in direct mode.

use std::process::Command;

use rustix::process::{Signal, kill_process};
use serde_json::Value;
use sterna_qemu_lab::libvirt::{LibvirtGuest, LibvirtGuestOptions, Side};
use sterna_wire::switchover::CrashPoint;

use super::Lab;
use super::support::pair::eventually;
use super::support::{Hold, LONG, PEER_REFUSED, Sterna, in_round, report, sterna};

/// Where both programs keep their records on each host.
const STATE: &str = "/run/lab/state";
const REPORT: &str = "/run/lab/report.json";

/// So slow that the guest's memory takes many seconds.
const SLOW: &[&str] = &["--bandwidth", "4MB/s", "--method", "none", "--downtime", "5s"];

impl Lab {
    fn receive_command(&self, to: Side) -> Command {
        let mut command = self.hosts.host(to).command_inside(sterna().get_program());
        command.args(["receive", "--libvirt", "qemu:///system", "--allow", "sterna-sender", "--state-dir", STATE]);
        // A side that is lost is not waited for.
        command.args(["--retry", "0s"]);
        command.arg("--listen").arg(format!("{}:4920", to.address())).arg("--tls").arg(self.certificates.path());
        command
    }

    fn send_command(&self, guest: &LibvirtGuest<'_>, from: Side) -> Command {
        let mut command = self.hosts.host(from).command_inside(sterna().get_program());
        command.args(["send", "--libvirt", "qemu:///system", "--domain", guest.name(), "--state-dir", STATE]);
        command
            .arg("--to")
            .arg(format!("{}:4920", from.other().host_name()))
            .arg("--tls")
            .arg(self.certificates.path());
        command.args(["--json", REPORT, "--retry", "0s"]);
        command
    }

    fn receive(&self, to: Side) -> Sterna {
        let receive = Sterna::start("receive", &mut self.receive_command(to));
        receive.wait_for("listening on ");
        receive
    }

    fn send(&self, guest: &LibvirtGuest<'_>, from: Side, more: &[&str]) -> Sterna {
        Sterna::start("send", self.send_command(guest, from).args(more))
    }

    /// Starts a slow migration, and waits until it sends.
    fn slowly(&self, guest: &LibvirtGuest<'_>, from: Side) -> [Sterna; 2] {
        let (receive, send) = (self.receive(from.other()), self.send(guest, from, SLOW));
        send.wait_until("round 1", |lines| in_round(lines, 1));
        [send, receive]
    }

    /// Runs `recover` on a host. Returns whether the migration is settled there.
    fn recover(&self, id: &str, on: Side, received: bool) -> bool {
        let mut command = self.hosts.host(on).command_inside(sterna().get_program());
        command.args(["recover", id, "--state-dir", STATE, "--tls"]).arg(self.certificates.path());
        if received {
            command.args(["--allow", "sterna-sender"]);
        }
        Sterna::start("recover", &mut command).finish().0.success()
    }

    /// Moves the guest, and asserts that it has moved.
    #[track_caller]
    fn moves(&self, guest: &LibvirtGuest<'_>, from: Side) {
        let receive = self.receive(from.other());
        let (sent, _) = self.send(guest, from, &[]).finish();
        let (received, _) = receive.finish();
        assert!(sent.success() && received.success(), "{sent}, {received}");
        self.assert_runs_once(guest, from.other());
    }

    fn report(&self, from: Side) -> Value {
        report(&self.hosts.host(from).path(REPORT))
    }
}

#[test]
fn a_guest_moves_there_and_back_and_libvirt_manages_it_afterwards() {
    let Some(lab) = Lab::start() else { return };
    let guest = lab.guest("guest");
    for from in Side::ALL {
        lab.moves(&guest, from);
        assert_eq!(lab.report(from)["mode"], "direct");
    }
    let host = lab.hosts.host(Side::A);
    for words in [&["suspend", "guest"][..], &["resume", "guest"], &["save", "guest", "/run/lab/image"]] {
        host.virsh(words).unwrap();
    }
    host.virsh(&["restore", "/run/lab/image"]).unwrap();
    guest.wait_running(Side::A, LONG).unwrap();
    lab.assert_runs_once(&guest, Side::A);
    let to = Side::B.host_name();
    host.virsh(&["migrate", "--live", "--p2p", "--tls", "guest", &format!("qemu+tls://{to}/system")]).unwrap();
    lab.assert_runs_once(&guest, Side::B);
}

#[test]
fn a_dry_run_changes_nothing_and_finds_what_a_move_would_be_refused_for() {
    let Some(lab) = Lab::start() else { return };
    let guest = lab.guest("guest");
    let receive = lab.receive(Side::B);
    let (status, lines) = lab.send(&guest, Side::A, &["--dry-run"]).finish_with_lines();
    assert!(status.success(), "{lines:?}");
    let found = lab.report(Side::A);
    assert_eq!((&found["would_begin"], &found["mode"]), (&true.into(), &"direct".into()), "{found}");
    assert_eq!(lab.hosts.host(Side::B).virsh(&["list", "--all", "--name"]).unwrap().trim(), "");

    let destination = lab.hosts.host(Side::B);
    let xml = lab.hosts.host(Side::A).virsh(&["dumpxml", "--migratable", "guest"]).unwrap();
    std::fs::write(destination.path("/run/lab/twin.xml"), xml).unwrap();
    destination.virsh(&["create", "--paused", "/run/lab/twin.xml"]).unwrap();
    let (status, lines) = lab.send(&guest, Side::A, &["--dry-run", "--mode", "stream"]).finish_with_lines();
    assert!(!status.success(), "{lines:?}");
    let found = lab.report(Side::A);
    let reasons = found["refusals"].to_string();
    assert!(reasons.contains("has a domain guest already"), "{found}");
    assert!(reasons.contains("--libvirt moves guests in direct mode only"), "{found}");
    destination.virsh(&["destroy", "guest"]).unwrap();

    // The same `receive` takes the guest then.
    let (sent, _) = lab.send(&guest, Side::A, &[]).finish();
    assert!(sent.success() && receive.finish().0.success());
    lab.assert_runs_once(&guest, Side::B);
}

#[test]
fn the_destinations_own_description_is_used_unless_the_guest_would_notice() {
    let Some(lab) = Lab::start() else { return };
    let guest = lab.guest("guest");
    let destination = lab.hosts.host(Side::B);
    let xml = lab.hosts.host(Side::A).virsh(&["dumpxml", "--migratable", "guest"]).unwrap();
    let receive_by = |xml: &str| {
        let path = destination.path("/run/lab/own.xml");
        std::fs::write(&path, xml).unwrap();
        let receive = Sterna::start("receive", lab.receive_command(Side::B).args(["--xml", "/run/lab/own.xml"]));
        receive.wait_for("listening on ");
        receive
    };
    let mut other = receive_by(&xml.replace("guest</name>", "another</name>"));
    let (status, lines) = lab.send(&guest, Side::A, &[]).finish_with_lines();
    assert_eq!(status.code(), PEER_REFUSED, "{lines:?}");
    assert!(lines.iter().any(|line| line.contains("does not match source")), "{lines:?}");
    other.kill();
    lab.assert_runs_once(&guest, Side::A);

    let receive = receive_by(&xml.replace("</name>", "</name>\n  <title>moved</title>"));
    let (sent, _) = lab.send(&guest, Side::A, &[]).finish();
    assert!(sent.success() && receive.finish().0.success());
    lab.assert_runs_once(&guest, Side::B);
    assert!(destination.virsh(&["dumpxml", "guest"]).unwrap().contains("<title>moved</title>"));
}

#[test]
fn ten_moves_in_a_row() {
    let Some(lab) = Lab::start() else { return };
    let guest = lab.guest("guest");
    (0..10).for_each(|number| lab.moves(&guest, Side::ALL[number % 2]));
}

#[test]
fn memory_in_a_file_that_others_may_map_moves() {
    let Some(lab) = Lab::start() else { return };
    let memory_backing = "<source type='memfd'/><access mode='shared'/>";
    let options = LibvirtGuestOptions { memory_backing, ..LibvirtGuestOptions::default() };
    let guest = lab.hosts.guest("guest", &options).unwrap();
    Side::ALL.into_iter().for_each(|from| lab.moves(&guest, from));
}

#[test]
fn a_domain_that_the_destination_cannot_run_is_refused_and_moves_when_it_can() {
    let Some(lab) = Lab::start() else { return };
    let guest = lab.guest("guest");
    let receive = lab.receive(Side::B);
    let refused = |reason: &str| {
        let (status, lines) = lab.send(&guest, Side::A, &[]).finish_with_lines();
        assert_eq!(status.code(), PEER_REFUSED, "{lines:?}");
        assert!(lines.iter().any(|line| line.contains(reason)), "{reason}: {lines:?}");
        lab.assert_runs_once(&guest, Side::A);
    };
    let destination = lab.hosts.host(Side::B);
    let emulator = destination.path("/run/lab/emulator");
    let elsewhere = emulator.with_extension("elsewhere");
    std::fs::rename(&emulator, &elsewhere).unwrap();
    refused("/run/lab/emulator");
    // QEMU ends before it has read anything.
    std::fs::copy("/bin/false", &emulator).unwrap();
    refused("libvirt could not restore a domain");
    std::fs::rename(&elsewhere, &emulator).unwrap();

    let xml = lab.hosts.host(Side::A).virsh(&["dumpxml", "--migratable", "guest"]).unwrap();
    std::fs::write(destination.path("/run/lab/twin.xml"), xml).unwrap();
    destination.virsh(&["create", "--paused", "/run/lab/twin.xml"]).unwrap();
    let (status, lines) = lab.send(&guest, Side::A, &[]).finish_with_lines();
    assert_eq!(status.code(), PEER_REFUSED, "{lines:?}");
    assert!(lines.iter().any(|line| line.contains("has a domain guest already")), "{lines:?}");
    destination.virsh(&["destroy", "guest"]).unwrap();

    let (sent, _) = lab.send(&guest, Side::A, &[]).finish();
    assert!(sent.success() && receive.finish().0.success());
    lab.assert_runs_once(&guest, Side::B);
}

#[test]
fn whatever_is_killed_while_memory_is_sent_the_guest_runs_on_and_moves_afterwards() {
    let Some(lab) = Lab::start() else { return };
    let guest = lab.guest("guest");
    for killed in ["send", "receive", "destination's QEMU"] {
        eprintln!("kills: {killed}");
        let [mut send, mut receive] = lab.slowly(&guest, Side::A);
        let id = send.migration();
        match killed {
            "send" => send.kill(),
            "receive" => receive.kill(),
            _ => kill_process(lab.hosts.host(Side::B).qemu_pid("guest").unwrap(), Signal::KILL).unwrap(),
        }
        if killed == "send" {
            assert!(lab.recover(&id, Side::A, false));
        } else {
            assert!(!send.finish().0.success());
        }
        if killed == "receive" {
            lab.wait_forgotten(&guest, Side::B);
            assert!(lab.recover(&id, Side::B, true));
        } else {
            assert!(!receive.finish().0.success());
        }
        lab.assert_runs_once(&guest, Side::A);
    }
    lab.moves(&guest, Side::A);
}

#[test]
fn a_guest_that_is_resumed_by_others_before_the_decision_stays() {
    let Some(lab) = Lab::start() else { return };
    let guest = lab.guest("guest");
    let receive = lab.receive(Side::B);
    let scratch = lab.hosts.host(Side::A).path("/run/lab");
    let mut command = lab.send_command(&guest, Side::A);
    let hold = Hold::at("source.before-state", &scratch, &mut command);
    command.env("STERNA_FAULT", "source.before-state:hold:/run/lab/source.before-state.fifo");
    let send = Sterna::start("send", &mut command);
    let held = hold.reached(&send);
    lab.hosts.host(Side::A).virsh(&["resume", "guest"]).unwrap();
    drop(held);
    let (status, output) = send.finish();
    assert!(!status.success() && output.contains("another program let the guest run"), "{status}: {output}");
    assert!(!receive.finish().0.success());
    lab.assert_runs_once(&guest, Side::A);
}

/// In the place of a domain that was restored, others have started one of the same name and UUID.
#[test]
fn another_domain_of_the_same_name_is_neither_resumed_nor_destroyed() {
    let Some(lab) = Lab::start() else { return };
    let guest = lab.guest("guest");
    let destination = lab.hosts.host(Side::B);
    let xml = lab.hosts.host(Side::A).virsh(&["dumpxml", "--migratable", "guest"]).unwrap();
    std::fs::write(destination.path("/run/lab/twin.xml"), xml).unwrap();
    let replace = || {
        destination.virsh(&["destroy", "guest"]).unwrap();
        destination.virsh(&["create", "--paused", "/run/lab/twin.xml"]).unwrap();
        destination.qemu_pid("guest").unwrap()
    };
    let assert_untouched = |twin| {
        assert_eq!(destination.qemu_pid("guest").unwrap(), twin);
        assert_eq!(destination.virsh(&["domstate", "guest"]).unwrap().trim(), "paused");
    };

    eprintln!("it is to be discarded: the source has died before its decision");
    let receive = lab.receive(Side::B);
    let mut command = lab.send_command(&guest, Side::A);
    let scratch = lab.hosts.host(Side::A).path("/run/lab");
    let hold = Hold::at("source.before-record-committed", &scratch, &mut command);
    command.env("STERNA_FAULT", "source.before-record-committed:hold:/run/lab/source.before-record-committed.fifo");
    let mut send = Sterna::start("send", &mut command);
    let id = send.migration();
    let held = hold.reached(&send);
    let twin = replace();
    send.kill();
    drop(held);
    assert!(lab.recover(&id, Side::A, false));
    assert!(!receive.finish().0.success());
    assert_untouched(twin);
    destination.virsh(&["destroy", "guest"]).unwrap();
    lab.assert_runs_once(&guest, Side::A);

    eprintln!("it is to be resumed: the decision is made");
    let mut command = lab.receive_command(Side::B);
    let scratch = destination.path("/run/lab");
    let hold = Hold::at("destination.after-record-committed", &scratch, &mut command);
    command.env(
        "STERNA_FAULT",
        "destination.after-record-committed:hold:/run/lab/destination.after-record-committed.fifo",
    );
    let receive = Sterna::start("receive", &mut command);
    receive.wait_for("listening on ");
    let send = lab.send(&guest, Side::A, &["--source-after", "keep"]);
    let held = hold.reached(&receive);
    let twin = replace();
    drop(held);
    assert!(!receive.finish().0.success() && !send.finish().0.success());
    assert_untouched(twin);
    guest.assert_never_two();
    assert_eq!(guest.running(), []);
}

#[test]
fn a_domain_that_is_destroyed_at_the_destination_before_the_decision_goes_on_at_the_source() {
    let Some(lab) = Lab::start() else { return };
    let guest = lab.guest("guest");
    let mut command = lab.receive_command(Side::B);
    let scratch = lab.hosts.host(Side::B).path("/run/lab");
    let hold = Hold::at("destination.before-record-prepared", &scratch, &mut command);
    command.env(
        "STERNA_FAULT",
        "destination.before-record-prepared:hold:/run/lab/destination.before-record-prepared.fifo",
    );
    let receive = Sterna::start("receive", &mut command);
    receive.wait_for("listening on ");
    let send = lab.send(&guest, Side::A, &[]);
    let held = hold.reached(&receive);
    lab.hosts.host(Side::B).virsh(&["destroy", "guest"]).unwrap();
    drop(held);
    let (sent, received) = (send.finish().0, receive.finish().0);
    eprintln!("send {sent}, receive {received}");
    // The destination has reported that it is prepared, and its QEMU has ended since: the decision is made, and the guest is lost there. Or it
    // notices before that. In both cases no guest runs twice.
    guest.assert_never_two();
}

/// The crash points of a migration that nothing disturbs.
const POINTS: &[&str] = &[
    "source.after-record-started",
    "source.after-start-migration",
    "source.after-send-prepare",
    "source.before-record-committed",
    "source.after-record-committed",
    "source.after-send-commit",
    "source.before-end-guest",
    "source.after-end-guest",
    "destination.after-accept-stream",
    "destination.before-record-prepared",
    "destination.after-record-prepared",
    "destination.after-send-prepared",
    "destination.after-record-committed",
    "destination.after-cont",
    "destination.after-record-running",
];

#[test]
fn after_a_crash_at_any_point_exactly_one_guest_runs() {
    let Some(lab) = Lab::start() else { return };
    let guest = lab.guest("guest");
    let mut from = Side::A;
    for point in POINTS {
        assert!(point.parse::<CrashPoint>().is_ok(), "{point}");
        eprintln!("crash at {point} of a move from {}", from.host_name());
        let (mut receive, mut send) = (lab.receive_command(from.other()), lab.send_command(&guest, from));
        let at_source = point.starts_with("source.");
        let crashing = if at_source { &mut send } else { &mut receive };
        crashing.env("STERNA_FAULT", format!("{point}:crash")).args(["--log", "warn"]);
        let receive = Sterna::start("receive", &mut receive);
        receive.wait_for("listening on ");
        let send = Sterna::start("send", &mut send);
        let id = if at_source { send.migration() } else { receive.migration() };
        let (crashed, mut other) = if at_source { (send, receive) } else { (receive, send) };
        assert!(!crashed.finish().0.success());
        let here = if at_source { from } else { from.other() };
        // The one that waits for the other's decision must be able to ask: it is settled after that.
        let settled = lab.recover(&id, here, !at_source);
        assert!(eventually(LONG, || other.poll().is_some()), "{point}: the other side does not end");
        let there = lab.recover(&id, here.other(), at_source);
        assert!(there && (settled || lab.recover(&id, here, !at_source)), "{point} is not settled");
        let running = guest.running();
        assert_eq!(running.len(), 1, "{point}: {running:?}");
        lab.assert_runs_once(&guest, running[0]);
        match *point {
            "source.before-record-committed" => assert_eq!(running, [from]),
            "source.after-record-committed" => assert_eq!(running, [from.other()]),
            _ => {}
        }
        from = running[0];
    }
    lab.moves(&guest, from);
}

//! A QEMU that answers nothing, or cannot take the guest's memory: a process that is stopped stands for one whose main loop hangs.

use rustix::process::{Pid, Signal, kill_process};
use sterna_qemu_lab::huge::HugeTmpfs;
use sterna_qemu_lab::{Backend, Guest, QemuOptions, QemuVersion, skip_if_unavailable};

use crate::support::pair::{Pair, Watched, eventually};
use crate::support::settle::{Migration, Side};
use crate::support::{Hold, LONG, MODES, Sterna, UNCONFIRMED, nothing_was_touched, receive, send_by};

fn signal(qemu: &Watched, signal: Signal) {
    kill_process(Pid::from_raw(qemu.qemu.pid().cast_signed()).unwrap(), signal).unwrap();
}

#[test]
fn a_load_that_hangs_is_ended_by_an_operator_of_either_side_and_the_guest_runs_on() {
    for cancelling in [Side::Destination, Side::Source] {
        let Some(mut pair) = Pair::boot_sector(QemuVersion::V10_0) else { return };
        let mut command = receive(&pair.destination.qmp_path, &pair.destination_state());
        let receiver = Sterna::start("receive", command.arg("--insecure"));
        let address = receiver.address();
        let mut command = send_by("direct", &pair.source.qmp_path, &address, &pair.source_state(), &pair.report());
        command.args(["--insecure", "--downtime", "10s"]);
        let hold = Hold::at("source.before-start-migration", pair.scratch.path(), &mut command);
        let sender = Sterna::start("send", &mut command);
        let held = hold.reached(&sender);
        // It has read the opening of its stream, and will not read the rest.
        signal(&pair.destination, Signal::STOP);
        drop(held);
        assert!(eventually(LONG, || pair.source.status().as_deref() == Some("paused")), "{:?}", pair.source.state());
        if cancelling == Side::Destination {
            receiver.interrupt();
        } else {
            sender.interrupt();
        }

        let (status, text) = receiver.finish();
        assert_eq!(status.code(), UNCONFIRMED, "{text}");
        let kill = format!("kill -KILL {}", pair.destination.qemu.pid());
        assert!(text.contains(&kill) && !text.contains("Err("), "{text}");
        let (status, text) = sender.finish();
        assert!(!status.success() && text.contains("the guest runs on at the source"), "{text}");
        assert!(eventually(LONG, || pair.source.runs()), "{}", pair.source.state());
        pair.source.wait_progress().unwrap();

        // As the text says.
        pair.destination.kill();
        let (status, lines) = Side::Destination.recover(&pair, &[], None).expect("a record").finish_with_lines();
        assert!(status.success(), "{lines:?}");
        let migration = Migration { pair, sender: None, receiver: None };
        assert_eq!(migration.exactly_one(), Ok(Side::Source));
    }
}

#[test]
fn a_stopped_qemu_is_not_called_busy() {
    let Some(pair) = Pair::boot_sector(QemuVersion::V10_0) else { return };
    signal(&pair.source, Signal::STOP);
    // Its threads stop one after the other.
    assert!(eventually(LONG, || sterna_engine::process::is_stopped(pair.source.qemu.pid())));
    let mut command = send_by("auto", &pair.source.qmp_path, "127.0.0.1:1", &pair.source_state(), &pair.report());
    let (status, lines) = Sterna::start("send", command.arg("--insecure")).finish_with_lines();
    signal(&pair.source, Signal::CONT);
    assert!(nothing_was_touched(status.code()), "{status}: {lines:?}");
    let pid = pair.source.qemu.pid();
    let text = lines.iter().find(|line| line.starts_with("sterna: ")).expect("one line says why");
    for word in [format!("process {pid}"), "is stopped".into(), format!("kill -CONT {pid}")] {
        assert!(text.contains(&word) && !text.contains("busy"), "{word}: {text}");
    }
    pair.source.wait_progress().unwrap();
}

#[test]
fn a_destination_whose_memory_has_no_room_is_named_at_both_sides() {
    for mode in MODES {
        // The guest writes more of its 128 MiB.
        let Some(mount) = skip_if_unavailable(HugeTmpfs::mount(8 << 20)) else { return };
        let source = QemuOptions::new(QemuVersion::V10_0, Guest::BootSector);
        let backend = Backend::File { path: mount.file("ram") };
        let destination = QemuOptions { backend, ..source.incoming() };
        let Some(pair) = Pair::start(&source, &destination) else { return };
        pair.source.qemu.console().wait_for_bytes(3, LONG).expect("the guest boots");
        let mut migration = Migration::start_by(mode, pair, &[], None, None);
        let processes = [migration.sender.take(), migration.receiver.take()];
        for (status, text) in processes.map(|process| process.unwrap().finish()) {
            assert!(
                !status.success() && text.contains("the file system that backs guest RAM is full"),
                "{mode}: {text}"
            );
        }
        assert_eq!(migration.exactly_one(), Ok(Side::Source), "{mode}");
    }
}

//! The guest's machine: its disk, in two layers, has the records; a CD, a USB device, and an image that QEMU cannot migrate are for the acts.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use serde_json::{Value, json};
use sterna_qemu::qmp::{Qmp, QmpError};
use sterna_qemu_lab::{Guest, QemuOptions, QemuVersion, recorder};
use tempfile::TempDir;

use super::mount;
use crate::neighbours::qcow2;
use crate::support::LONG;
use crate::support::pair::{Watched, eventually};

const DISK_BYTES: usize = 2 << 20;
/// Names of block nodes and of devices.
pub(super) const DISK: &str = "disk";
pub(super) const CD: &str = "cd0";
pub(super) const MEDIUM: &str = "medium";
pub(super) const LATE: &str = "late";
pub(super) const USB: &str = "tablet";
/// The file of the socket by which the 9p device is used.
pub(super) const QTEST: &str = "qtest";
/// The directory that the guest can mount.
const SHARE: &str = "share";

/// The files of the machine, which both QEMUs open.
pub(super) struct Machine {
    files: TempDir,
}

impl Machine {
    pub(super) fn new() -> Self {
        let machine = Self { files: tempfile::tempdir().unwrap() };
        std::fs::write(machine.file("base"), recorder::disk(DISK_BYTES)).unwrap();
        std::fs::write(machine.file(DISK), qcow2::empty(DISK_BYTES as u64)).unwrap();
        for name in [MEDIUM, "other-medium", LATE] {
            File::create(machine.file(name)).unwrap().set_len(1 << 20).unwrap();
        }
        std::fs::create_dir(machine.file(SHARE)).unwrap();
        machine
    }

    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.files.path().join(name)
    }

    pub(super) fn options(&self) -> QemuOptions {
        let mut options = QemuOptions::new(QemuVersion::V10_0, Guest::None);
        let mut words = |pair: [&str; 2]| options.extra.extend(pair.map(str::to_owned));
        // A commit opens the base for writing, which the other QEMU has open.
        let base = json!({ "driver": "file", "filename": self.file("base"), "locking": "off" });
        let base = json!({ "driver": "raw", "node-name": "base", "file": base });
        let file = json!({ "driver": "file", "node-name": "disk-file", "filename": self.file(DISK) });
        let disk = json!({ "driver": "qcow2", "node-name": DISK, "file": file, "backing": base });
        words(["-blockdev", &disk.to_string()]);
        words(["-device", "ide-hd,id=hd0,bus=ide.0,drive=disk,bootindex=0"]);
        let medium = json!({ "driver": "file", "filename": self.file(MEDIUM) });
        let medium = json!({ "driver": "raw", "node-name": MEDIUM, "read-only": true, "file": medium });
        words(["-blockdev", &medium.to_string()]);
        words(["-device", "ide-cd,id=cd0,bus=ide.2,drive=medium"]);
        words(["-device", "qemu-xhci,id=usb"]);
        words(["-device", "usb-tablet,id=tablet,bus=usb.0,port=1"]);
        options.extra.extend(mount::device(&self.file(SHARE)));
        options
    }

    /// Returns the options of the first source.
    pub(super) fn source(&self) -> QemuOptions {
        let mut options = self.options();
        options.extra.extend(mount::socket(&self.file(QTEST)));
        options
    }

    /// Has QEMU reset the guest where the guest or its firmware asks for that. The laboratory's QEMUs end instead.
    pub(super) fn permit_reset(qemu: &Watched) {
        execute(&qemu.monitor, "set-action", json!({ "reboot": "reset" })).unwrap();
    }

    /// Checks the disk, which no QEMU writes now: all records up to `last` are there.
    pub(super) fn check_records(&self, last: u32) -> Result<u32, String> {
        let file = File::open(self.file(DISK)).unwrap();
        let entry = |at: u64| {
            let mut bytes = [0; 8];
            file.read_exact_at(&mut bytes, at).unwrap();
            u64::from_be_bytes(bytes) & 0x00ff_ffff_ffff_fe00
        };
        // The header has the place of the L1 table, whose first entry has that of the L2 table, whose first entry has that of the first
        // cluster: docs/interop/qcow2.txt of QEMU. The records lie in this cluster.
        let cluster = entry(entry(entry(40)));
        if cluster == 0 {
            return Err("the guest's disk has no records at all".into());
        }
        let mut records = vec![0; recorder::RECORDS.len()];
        file.read_exact_at(&mut records, cluster + recorder::RECORDS.start as u64).unwrap();
        recorder::check(&records, last).map_err(|error| error.to_string())
    }
}

/// Executes a command. QEMU's refusal is a value, everything else that goes wrong an error of the test.
pub(super) fn execute(monitor: &Qmp, command: &str, arguments: Value) -> Result<Value, String> {
    match monitor.execute(command, arguments) {
        Ok(value) => Ok(value),
        Err(error @ (QmpError::Refused { .. } | QmpError::Closed { .. })) => Err(error.to_string()),
        Err(error) => panic!("{command}: {error}"),
    }
}

/// Waits until the guest has written `count` further records.
pub(super) fn writes(qemu: &Watched, count: usize) -> Result<(), String> {
    let console = qemu.qemu.console();
    let mut left = count;
    let further = console.wait_for("further records", console.line_count(), LONG, |_| {
        left -= 1;
        (left == 0).then_some(())
    });
    further.map_err(|error| error.to_string())
}

/// Waits for a condition without an event.
pub(super) fn wait(what: &str, done: impl FnMut() -> bool) {
    assert!(eventually(LONG, done), "not seen in time: {what}");
}

//! What other programs and operators do.

use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use sterna_qemu::qmp::Qmp;

use super::machine::{CD, DISK, LATE, MEDIUM, Machine, QTEST, USB, execute, wait, writes};
use super::moment::Moment;
use super::mount;
use crate::support::LONG;
use crate::support::pair::{Watched, eventually};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    /// `system_reset`.
    Reset,
    /// The guest switches itself off.
    PowerOff,
    /// `stop`.
    Stop,
    /// `cont`.
    Cont,
    /// `stop`, then `cont`.
    StopAndCont,
    /// `quit`.
    Quit,
    /// A migration of another program to a file, which is finished.
    MigrateFinished,
    /// A migration of another program, whose destination does not read.
    MigrateRunning,
    /// The same, cancelled.
    MigrateCancelled,
    SnapshotSave,
    /// A snapshot of before the move is loaded.
    SnapshotLoad,
    /// A backup that goes on until it is cancelled.
    Backup,
    /// A mirror that is ready.
    Mirror,
    /// A stream that takes long.
    Stream,
    /// A commit of the active layer, which is ready.
    Commit,
    Eject,
    ChangeMedium,
    Resize,
    /// A node that QEMU cannot migrate.
    Blocker,
    /// The guest mounts a directory of the host by 9p.
    Mount,
    Plug,
    Unplug,
    Dump,
    /// SIGSTOP, and SIGCONT a while later.
    SigStop,
}

/// What QEMU did.
#[derive(Debug)]
pub(crate) enum Done {
    Done,
    /// QEMU refused it, for this reason.
    Refused(String),
}

/// The job of the acts that begin one.
const JOB: &str = "other-job";
/// A node without content.
const NULL: &str = "null";
/// A device that is plugged in.
const MOUSE: &str = "mouse";
const SNAPSHOT: &str = "before";
/// For how long [`Act::SigStop`] stops QEMU.
const STOPPED: Duration = Duration::from_secs(2);

impl Act {
    pub(crate) const ALL: &[Self] = &[
        Self::Reset,
        Self::PowerOff,
        Self::Stop,
        Self::Cont,
        Self::StopAndCont,
        Self::Quit,
        Self::MigrateFinished,
        Self::MigrateRunning,
        Self::MigrateCancelled,
        Self::SnapshotSave,
        Self::SnapshotLoad,
        Self::Backup,
        Self::Mirror,
        Self::Stream,
        Self::Commit,
        Self::Eject,
        Self::ChangeMedium,
        Self::Resize,
        Self::Blocker,
        Self::Mount,
        Self::Plug,
        Self::Unplug,
        Self::Dump,
        Self::SigStop,
    ];

    /// Returns whether this can happen at this moment.
    pub(crate) fn possible(self, moment: Moment, mode: &str) -> bool {
        match self {
            Self::PowerOff | Self::Mount => moment.guest_executes(),
            // QEMU's main loop waits until its stream is read, and `send` is held.
            Self::Plug => mode == "direct" || moment != Moment::FirstRound,
            // QEMU sets the disk back to the snapshot before it finds that it cannot load the rest while it migrates: nothing helps this guest.
            Self::SnapshotLoad => mode == "direct" || !moment.guest_executes(),
            _ => true,
        }
    }

    /// Prepares the machine before the move.
    pub(crate) fn prepare(self, machine: &Machine, source: &Watched) {
        let monitor = &source.monitor;
        match self {
            Self::SnapshotLoad => {
                job(source, "snapshot-save", json!({ "tag": SNAPSHOT, "vmstate": DISK, "devices": [DISK] })).unwrap();
                writes(source, 100).unwrap();
            }
            Self::Blocker => {
                // QEMU makes the image itself.
                let file = json!({ "driver": "file", "node-name": "late-file", "filename": machine.file(LATE) });
                execute(monitor, "blockdev-add", file).unwrap();
                let options = json!({ "driver": "vdi", "file": "late-file", "size": 1 << 20 });
                job(source, "blockdev-create", json!({ "options": options })).unwrap();
            }
            Self::Backup | Self::Mirror => {
                let null = json!({ "driver": "null-co", "node-name": NULL, "size": 2 << 20, "read-zeroes": true });
                execute(monitor, "blockdev-add", null).unwrap();
            }
            _ => {}
        }
    }

    /// Does it, and waits until it is done.
    pub(crate) fn perform(self, machine: &Machine, source: &Watched) -> (Done, Option<UnixListener>) {
        let monitor = &source.monitor;
        let mut listener = None;
        let done = match self {
            Self::Reset => {
                forget_events(source);
                execute(monitor, "system_reset", json!({})).map(|_| event(monitor, "RESET"))
            }
            Self::PowerOff => {
                forget_events(source);
                source.qemu.console().send("o").unwrap();
                event(monitor, "SHUTDOWN");
                Ok(())
            }
            Self::Stop => execute(monitor, "stop", json!({})).map(drop),
            Self::Cont => execute(monitor, "cont", json!({})).map(drop),
            Self::StopAndCont => {
                execute(monitor, "stop", json!({})).and_then(|_| execute(monitor, "cont", json!({}))).map(drop)
            }
            Self::Quit => {
                let quit = execute(monitor, "quit", json!({}));
                wait("end of QEMU", || !source.qemu.is_running());
                quit.map(drop)
            }
            Self::MigrateFinished => {
                let uri = format!("file:{}", machine.file("migrated").display());
                execute(monitor, "migrate", json!({ "uri": uri }))
                    .map(|_| wait("finished migration", || migration(source) == "completed"))
            }
            Self::MigrateRunning | Self::MigrateCancelled => {
                let socket = machine.file("third");
                listener = Some(UnixListener::bind(&socket).unwrap());
                let begun = execute(monitor, "migrate", json!({ "uri": format!("unix:{}", socket.display()) }));
                begun.and_then(|_| {
                    wait("active migration", || migration(source) == "active");
                    if self == Self::MigrateRunning {
                        return Ok(());
                    }
                    listener = None;
                    execute(monitor, "migrate_cancel", json!({}))?;
                    wait("end of the migration", || ["cancelled", "failed"].contains(&migration(source).as_str()));
                    Ok(())
                })
            }
            Self::SnapshotSave => {
                job(source, "snapshot-save", json!({ "tag": "now", "vmstate": DISK, "devices": [DISK] }))
            }
            Self::SnapshotLoad => {
                job(source, "snapshot-load", json!({ "tag": SNAPSHOT, "vmstate": DISK, "devices": [DISK] }))
            }
            Self::Backup => {
                begin(source, "blockdev-backup", json!({ "device": DISK, "target": NULL, "sync": "none" }), "running")
            }
            Self::Mirror => {
                begin(source, "blockdev-mirror", json!({ "device": DISK, "target": NULL, "sync": "full" }), "ready")
            }
            Self::Stream => begin(source, "block-stream", json!({ "device": DISK, "speed": 1 }), "running"),
            Self::Commit => begin(source, "block-commit", json!({ "device": DISK }), "ready"),
            Self::Eject => execute(monitor, "eject", json!({ "id": CD, "force": true })).map(drop),
            Self::ChangeMedium => change_medium(monitor, machine, "other-medium"),
            Self::Resize => execute(monitor, "block_resize", json!({ "node-name": DISK, "size": 4 << 20 })).map(drop),
            Self::Blocker => {
                execute(monitor, "blockdev-add", json!({ "driver": "vdi", "node-name": LATE, "file": "late-file" }))
                    .map(drop)
            }
            Self::Mount => mount::Driver::connect(&machine.file(QTEST)).mount(),
            Self::Plug => {
                execute(monitor, "device_add", json!({ "driver": "usb-mouse", "id": MOUSE, "bus": "usb.0" })).map(drop)
            }
            Self::Unplug => {
                forget_events(source);
                execute(monitor, "device_del", json!({ "id": USB })).map(|_| event(monitor, "DEVICE_DELETED"))
            }
            Self::Dump => {
                let file = format!("file:{}", machine.file("dump").display());
                execute(monitor, "dump-guest-memory", json!({ "paging": false, "protocol": file })).map(drop)
            }
            Self::SigStop => {
                signal(source, Signal::STOP);
                Ok(())
            }
        };
        (done.map_or_else(Done::Refused, |()| Done::Done), listener)
    }

    /// Ends what is not to last, once `send` goes on.
    pub(crate) fn after_release(self, source: &Watched) {
        if self == Self::SigStop {
            eventually(STOPPED, || false);
            signal(source, Signal::CONT);
        }
    }

    /// Undoes it, so that the guest can be moved again.
    pub(crate) fn undo(self, machine: &Machine, source: &Watched) -> Result<(), String> {
        let monitor = &source.monitor;
        match self {
            Self::Stop | Self::MigrateFinished => execute(monitor, "cont", json!({})).map(drop),
            Self::MigrateRunning => {
                execute(monitor, "migrate_cancel", json!({}))?;
                wait("end of the migration", || ["cancelled", "failed"].contains(&migration(source).as_str()));
                Ok(())
            }
            Self::Backup | Self::Mirror | Self::Stream | Self::Commit => {
                execute(monitor, "block-job-cancel", json!({ "device": JOB, "force": true }))?;
                wait_job(source, "null");
                Ok(())
            }
            Self::Eject => {
                let medium = json!({ "id": CD, "node-name": MEDIUM });
                execute(monitor, "blockdev-insert-medium", medium)?;
                execute(monitor, "blockdev-close-tray", json!({ "id": CD })).map(drop)
            }
            Self::ChangeMedium => change_medium(monitor, machine, MEDIUM),
            Self::Blocker => execute(monitor, "blockdev-del", json!({ "node-name": LATE })).map(drop),
            Self::Mount => {
                mount::Driver::connect(&machine.file(QTEST)).unmount();
                Ok(())
            }
            Self::Plug => {
                forget_events(source);
                execute(monitor, "device_del", json!({ "id": MOUSE })).map(|_| event(monitor, "DEVICE_DELETED"))
            }
            Self::Unplug => execute(
                monitor,
                "device_add",
                json!({ "driver": "usb-tablet", "id": USB, "bus": "usb.0", "port": "1" }),
            )
            .map(drop),
            _ => Ok(()),
        }
    }
}

fn migration(source: &Watched) -> String {
    source.migration_status().unwrap_or_default()
}

fn signal(source: &Watched, signal: Signal) {
    let qemu = Pid::from_raw(source.qemu.pid().cast_signed()).expect("a process number");
    // It may have ended just now.
    let _ = kill_process(qemu, signal);
}

fn event(monitor: &Qmp, name: &str) {
    let seen = monitor.wait_event(name, |_| true, Instant::now() + LONG);
    // The monitor of a QEMU that ends is closed right after the event.
    assert!(!matches!(seen, Ok(None)), "QEMU sends no event {name}");
}

fn change_medium(monitor: &Qmp, machine: &Machine, name: &str) -> Result<(), String> {
    let medium = json!({ "id": CD, "filename": machine.file(name), "format": "raw", "force": true, "read-only-mode": "read-only" });
    execute(monitor, "blockdev-change-medium", medium).map(drop)
}

/// Drops the events so far. Those that show when the guest ran are kept.
fn forget_events(source: &Watched) {
    drop(source.ran());
}

/// Waits until [`JOB`] has this status (`null` is that of a job that is gone), or has ended. Returns whether it has the status.
fn wait_job(source: &Watched, status: &str) -> bool {
    let mut reached = false;
    let wanted = |data: &Value| {
        reached |= data["id"] == JOB && data["status"] == status;
        reached || data["id"] == JOB && data["status"] == "null"
    };
    let seen = source.monitor.wait_event("JOB_STATUS_CHANGE", wanted, Instant::now() + LONG);
    let jobs = || source.monitor.execute("query-jobs", json!({}));
    assert!(!matches!(seen, Ok(None)), "the job is not {status}: {:?}", jobs());
    reached
}

/// Begins a job and waits until it has this status.
///
/// # Errors
/// QEMU refuses the job, or the job fails.
fn begin(source: &Watched, command: &str, mut arguments: Value, status: &str) -> Result<(), String> {
    arguments["job-id"] = JOB.into();
    forget_events(source);
    execute(&source.monitor, command, arguments)?;
    if wait_job(source, status) { Ok(()) } else { Err(format!("the job of {command} has failed")) }
}

/// Has a job done and dismissed.
///
/// # Errors
/// QEMU refuses the job, or the job fails.
fn job(source: &Watched, command: &str, arguments: Value) -> Result<(), String> {
    begin(source, command, arguments, "concluded")?;
    let jobs = execute(&source.monitor, "query-jobs", json!({}))?;
    execute(&source.monitor, "job-dismiss", json!({ "id": JOB }))?;
    match jobs.as_array().into_iter().flatten().find(|each| each["id"] == JOB).and_then(|each| each["error"].as_str()) {
        Some(error) => Err(error.to_owned()),
        None => Ok(()),
    }
}

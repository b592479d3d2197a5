//! Requests of other threads to the migration of a QEMU: in direct mode the library carries them out, otherwise QEMU by its downtime limit.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use sterna_engine::cancel::Cancel;
use sterna_engine::live_control::{Control, RequestOutcome};
use sterna_engine::migration::Phase;
use sterna_engine::report::{Observer, Outcome, Progress, Report};
use sterna_engine::transport::Security;
use sterna_qemu::gateway::{
    AllowedDifferences, DirectOptions, Monitor, Placement, ReceiveOptions, SendMode, SendOptions, SocketDirectory,
    WaitLimits, receive, send,
};
use sterna_qemu::qmp::Qmp;
use sterna_qemu_lab::ram::Ram;
use sterna_qemu_lab::{Guest, Qemu, QemuOptions, QemuVersion, boot_sector, skip_if_unavailable};
use sterna_wire::switchover::SourceAfter;

/// A limit that no correct test reaches.
const LONG: Duration = Duration::from_secs(300);
/// The guest writes all of 100 MB again and again: at this rate it never meets `TARGET`.
const BANDWIDTH: u64 = 20 << 20;
const TARGET: Duration = Duration::from_millis(60);

/// Reports the destination's address.
struct Listening(Mutex<Sender<String>>);

impl Observer for Listening {
    fn progress(&self, _: &Progress) {}

    fn note(&self, _: &str) {}

    fn listening(&self, address: &str) {
        self.0.lock().unwrap().send(address.to_owned()).expect("the test waits for it");
    }
}

/// Requests a longer target, which is not enough, and the switchover.
struct Requesting<'a> {
    control: &'a Control,
    requested: AtomicBool,
    notes: Mutex<Vec<String>>,
}

impl Observer for Requesting<'_> {
    fn progress(&self, progress: &Progress) {
        let under_way = progress.phase == Phase::Rounds && progress.wire_bytes > 0;
        if under_way && !self.requested.swap(true, Ordering::Relaxed) {
            assert_eq!(self.control.post_copy(), RequestOutcome::NotAgreed);
            assert_eq!(self.control.set_downtime(TARGET * 2), RequestOutcome::Accepted);
            assert_eq!(self.control.switch_over(), RequestOutcome::Accepted);
        }
    }

    fn note(&self, text: &str) {
        self.notes.lock().unwrap().push(text.to_owned());
    }
}

/// Moves a guest that never converges, by request.
fn move_by_request(mode: SendMode) -> Option<(Report, Vec<String>)> {
    let options = QemuOptions::new(QemuVersion::V10_0, Guest::BootSector);
    let source = skip_if_unavailable(Qemu::start(&options))?;
    let scratch = tempfile::tempdir().unwrap();
    // A second monitor: the first is Sterna's.
    let socket = scratch.path().join("watch");
    let mut incoming = options.incoming();
    let watch = format!("socket,id=watch,path={},server=on,wait=off", socket.display());
    incoming.extra.extend(["-chardev", &watch, "-mon", "chardev=watch,mode=control"].map(str::to_owned));
    let destination = Qemu::start(&incoming).expect("a second QEMU");
    source.console().wait_for_bytes(3, LONG).expect("the guest works");
    let state_dir = |side: &str| {
        let dir = scratch.path().join(side);
        std::fs::create_dir(&dir).unwrap();
        std::fs::set_permissions(&dir, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
        dir
    };
    let waits = WaitLimits { stall: LONG, total: None, retry: Duration::ZERO };
    let to = ReceiveOptions {
        qmp: destination.qmp_path().to_owned(),
        listen: "127.0.0.1:0".into(),
        security: Security::Insecure,
        placement: Placement::default(),
        prefault: false,
        wait: Some(LONG),
        waits,
        state_dir: state_dir("destination"),
        socket_dir: SocketDirectory::default(),
    };
    let control = Control::new();
    let (address, listens) = channel();
    let (sent, notes) = std::thread::scope(|scope| {
        let receiving = scope.spawn(move || receive(&to, &Cancel::new(), &Listening(Mutex::new(address))));
        let from = SendOptions {
            monitor: Monitor::Socket(source.qmp_path().to_owned()),
            to: listens.recv().expect("it listens"),
            security: Security::Insecure,
            channels: 2,
            method: "none".parse().unwrap(),
            qatzip: sterna_codec::Qatzip::default(),
            max_cpus: None,
            bandwidth: Some(BANDWIDTH),
            downtime: TARGET,
            packet_size: 512 << 10,
            delta_cache: 0,
            normal_page_ratio: 0,
            allowed: AllowedDifferences::default(),
            mode,
            direct: DirectOptions::default(),
            source_after: SourceAfter::Keep,
            patience: Duration::ZERO,
            waits,
            control: control.clone(),
            state_dir: state_dir("source"),
            socket_dir: SocketDirectory::default(),
        };
        let (requested, notes) = (AtomicBool::new(false), Mutex::default());
        let observer = Requesting { control: &control, requested, notes };
        let sent = send(&from, &Cancel::new(), &observer).expect("the migration began");
        let received = receiving.join().unwrap().expect("the migration began");
        assert_eq!((sent.outcome, received.outcome), (Outcome::Completed, Outcome::Completed), "{sent:?}");
        (sent, observer.notes.into_inner().unwrap())
    });
    assert_eq!((control.switch_over(), control.cancel()), (RequestOutcome::TooLate, RequestOutcome::TooLate));
    let before = destination.console().byte_count();
    destination.console().wait_for_bytes(before + 1, LONG).expect("the guest goes on");
    Qmp::connect(&socket).unwrap().execute("stop", serde_json::json!({})).unwrap();
    let ram = Ram::open(destination.pid(), destination.memory()).expect("RAM is found");
    boot_sector::check(&ram).expect("no page was lost");
    Some((sent, notes))
}

#[test]
fn a_guest_whose_rounds_would_never_end_is_paused_by_request_in_its_own_stream_and_directly() {
    for mode in [SendMode::Stream, SendMode::Auto] {
        let Some((sent, notes)) = move_by_request(mode) else { return };
        assert!(sent.downtime_ms > TARGET.as_secs_f64() * 1e3, "{mode:?}: {sent:?}");
        assert!(notes.iter().any(|note| note.starts_with("as requested, ")), "{mode:?}: {notes:?}");
        println!("{mode:?} ({:?}): a downtime of {:.0} ms", sent.mode, sent.downtime_ms);
    }
}

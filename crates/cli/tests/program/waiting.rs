//! A `receive` that waits for a source, and whose QEMU ends meanwhile: it ends too, with what has happened, and no guest was touched.

use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, SocketAddr};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::thread::{self, JoinHandle};

use rustix::net::sockopt::set_socket_reuseaddr;
use rustix::net::{AddressFamily, SocketType, bind, getsockname, socket};
use serde_json::json;
use sterna_qemu_lab::QemuVersion;

use crate::support::pair::Pair;
use crate::support::{CANCELLED, LONG, PEER_REFUSED, REFUSED, Sterna, receive, send, sterna};

/// Checks that `receive` has ended because its QEMU has.
fn ended_with_its_qemu(receiver: Sterna, how: &str) {
    let (status, lines) = receiver.finish_with_lines();
    let text = lines.join("\n");
    assert_eq!(status.code(), REFUSED, "{text}");
    assert!(text.contains(how) && text.contains("no guest was touched; start it again"), "{text}");
}

#[test]
fn a_receive_whose_qemu_ends_while_no_source_has_come_ends_too() {
    let Some(mut pair) = Pair::boot_sector(QemuVersion::V10_0) else { return };
    let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
    let receiver = Sterna::start("receive", command.arg("--insecure"));
    receiver.address();
    // QEMU may close its monitor before it has answered.
    let _ = pair.destination.monitor.execute("quit", json!({}));
    pair.destination.qemu.wait_exit(LONG).unwrap();
    // QEMU may close its monitor before it has sent the event that another program has ended it.
    ended_with_its_qemu(receiver, "while it waited for a source");
}

#[test]
fn a_receive_whose_qemu_is_killed_while_it_is_described_ends_and_the_source_is_refused() {
    let Some(mut pair) = Pair::boot_sector(QemuVersion::V10_0) else { return };
    let monitor = Monitor::before(pair.destination.qemu.qmp_path().to_owned(), pair.scratch.path().join("monitor"));
    let mut command = receive(&monitor.path, &pair.destination_state());
    let receiver = Sterna::start("receive", command.arg("--insecure"));
    let mut command = send(pair.source.qemu.qmp_path(), &receiver.address(), &pair.source_state(), &pair.report());
    let sender = Sterna::start("send", command.arg("--insecure"));
    monitor.closed_at_the_description();
    pair.destination.kill();
    ended_with_its_qemu(receiver, "QEMU has closed its QMP socket");
    let (status, text) = sender.finish();
    assert_eq!(status.code(), PEER_REFUSED, "{text}");
    pair.source.untouched().unwrap();
    pair.source.wait_progress().expect("the guest runs on");
}

/// A monitor that passes everything on to QEMU's, up to the command with which a machine's devices are listed: then it closes.
struct Monitor {
    path: PathBuf,
    serves: JoinHandle<()>,
}

impl Monitor {
    fn before(qemu: PathBuf, path: PathBuf) -> Self {
        let listener = UnixListener::bind(&path).unwrap();
        let serves = thread::spawn(move || {
            let (near, _) = listener.accept().unwrap();
            let far = UnixStream::connect(qemu).unwrap();
            let (mut back_from, mut back_to) = (far.try_clone().unwrap(), near.try_clone().unwrap());
            let back = thread::spawn(move || drop(std::io::copy(&mut back_from, &mut back_to)));
            let commands = BufReader::new(&near).lines().map(Result::unwrap);
            for command in commands.take_while(|command| !command.contains("info qtree")) {
                writeln!(&far, "{command}").unwrap();
            }
            for socket in [&near, &far] {
                let _ = socket.shutdown(Shutdown::Both);
            }
            back.join().unwrap();
        });
        Self { path, serves }
    }

    fn closed_at_the_description(self) {
        self.serves.join().unwrap();
    }
}

#[test]
fn a_send_that_waits_for_its_destination_moves_the_guest_once_there_is_one_and_can_be_cancelled_before() {
    let Some(pair) = Pair::boot_sector(QemuVersion::V10_0) else { return };
    // An address at which nothing listens yet: a bound socket keeps it from others until then.
    let kept = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    set_socket_reuseaddr(&kept, true).unwrap();
    bind(&kept, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let address = SocketAddr::try_from(getsockname(&kept).unwrap()).unwrap().to_string();
    let start = || {
        let mut command = send(pair.source.qemu.qmp_path(), &address, &pair.source_state(), &pair.report());
        let sender = Sterna::start("send", command.args(["--insecure", "--downtime", "10s", "--wait", "5min"]));
        sender.wait_for("waiting up to 300 s for ");
        sender
    };
    let cancelled = start();
    cancelled.interrupt();
    assert_eq!(cancelled.finish().0.code(), CANCELLED);
    let sender = start();
    let mut command = sterna();
    command.args(["receive", "--insecure", "--listen", &address, "--qmp"]).arg(pair.destination.qemu.qmp_path());
    let receiver = Sterna::start("receive", command.arg("--state-dir").arg(pair.destination_state()));
    let (sent, text) = sender.finish();
    assert!(sent.success() && receiver.finish().0.success(), "{text}");
    pair.destination.wait_progress().expect("the guest runs on");
}

#[test]
fn a_receive_writes_its_address_to_the_descriptor_that_was_asked_for() {
    let Some(pair) = Pair::boot_sector(QemuVersion::V10_0) else { return };
    // Without O_CLOEXEC, as a shell leaves it.
    let (reading, writing) = rustix::pipe::pipe().unwrap();
    let number = writing.as_raw_fd().to_string();
    let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
    let receiver = Sterna::start("receive", command.args(["--insecure", "--ready-fd", &number]));
    let mut line = String::new();
    BufReader::new(std::fs::File::from(reading)).read_line(&mut line).unwrap();
    assert_eq!(line, format!("{}\n", receiver.address()));
    receiver.interrupt();
    assert_eq!(receiver.finish().0.code(), CANCELLED);

    drop(writing);
    let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
    let (status, text) =
        Sterna::start("receive", command.args(["--insecure", "--ready-fd", "999"])).finish_with_lines();
    assert_eq!(status.code(), Some(2), "{text:?}");
    assert!(text[0].starts_with("sterna: --ready-fd 999: it cannot be written to: "), "{text:?}");
}

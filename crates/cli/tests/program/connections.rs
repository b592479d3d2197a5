//! How the two QEMUs and the other host are reached: a monitor that answers over several lines, a link-local address, a certificate with
//! another name than the address.

use std::path::Path;
use std::process::Command;

use sterna_qemu_lab::net::{Link, Network, run_in};
use sterna_qemu_lab::{Guest, QemuOptions, QemuVersion, skip_if_unavailable};

use crate::support::pair::Pair;
use crate::support::settle::{Migration, Side};
use crate::support::{LONG, MODES, Sterna, nothing_was_touched, send, sterna};

/// Returns `options` with another monitor at `socket`, which answers over several lines.
fn with_pretty_monitor(options: &QemuOptions, socket: &Path) -> QemuOptions {
    let mut options = options.clone();
    options.extra.extend([
        "-chardev".into(),
        format!("socket,id=pretty,path={},server=on,wait=off", socket.display()),
        "-mon".into(),
        "chardev=pretty,mode=control,pretty=on".into(),
    ]);
    options
}

#[test]
fn a_guest_whose_monitors_answer_over_several_lines_moves() {
    for mode in MODES {
        let sockets = tempfile::tempdir().unwrap();
        let (near, far) = (sockets.path().join("near"), sockets.path().join("far"));
        let options = QemuOptions::new(QemuVersion::V10_0, Guest::BootSector);
        let (source, destination) =
            (with_pretty_monitor(&options, &near), with_pretty_monitor(&options.incoming(), &far));
        let Some(mut pair) = Pair::start(&source, &destination) else { return };
        pair.source.qemu.console().wait_for_bytes(3, LONG).expect("the guest boots");
        (pair.source.qmp_path, pair.destination.qmp_path) = (near, far);
        let mut migration = Migration::start_by(mode, pair, &[], None, None);
        migration.settle().unwrap();
        assert_eq!(migration.exactly_one(), Ok(Side::Destination), "{mode}");
    }
}

/// Starts `command` in a network namespace.
fn start_in(namespace: &str, name: &'static str, command: &Command) -> Sterna {
    Sterna::start(name, run_in(namespace, command.get_program()).args(command.get_args()))
}

#[test]
fn a_guest_moves_by_a_link_local_address_that_is_in_no_certificate() {
    let Some(network) = skip_if_unavailable(Network::new(Link::default())) else { return };
    for (namespace, address) in [(network.a(), "fe80::1/64"), (network.b(), "fe80::2/64")] {
        let mut add = Command::new("ip");
        add.args(["-n", namespace, "-6", "address", "add", address, "dev", "eth0", "nodad"]);
        if !add.status().unwrap().success() {
            eprintln!("skipped: this machine has no IPv6");
            return;
        }
    }
    let options = QemuOptions::new(QemuVersion::V10_0, Guest::BootSector);
    let Some(pair) = Pair::start(&options, &options.incoming()) else { return };
    pair.source.qemu.console().wait_for_bytes(3, LONG).expect("the guest boots");
    let certificates = pair.scratch.path().join("certificates");
    let made = sterna().args(["cert", "--host", "destination.example", "--dir"]).arg(&certificates).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));

    let mut command = sterna();
    command.args(["receive", "--listen", "[fe80::2%eth0]:0", "--allow", "sterna-sender", "--tls"]).arg(&certificates);
    command.arg("--qmp").arg(&pair.destination.qmp_path).arg("--state-dir").arg(pair.destination_state());
    let receiver = start_in(network.b(), "receive", &command);
    let address = receiver.address();
    let port = address.rsplit_once("]:").unwrap().1;
    assert!(address.starts_with("[fe80::2%"), "{address}");

    let to = format!("[fe80::2%eth0]:{port}");
    let send_to = |to: &str, words: &[&str]| {
        let mut command = send(&pair.source.qmp_path, to, &pair.source_state(), &pair.report());
        command.args(["--downtime", "10s", "--tls"]).arg(&certificates).args(words);
        start_in(network.a(), "send", &command)
    };
    for (to, reason) in [
        (&*to, "--tls-server-name"),
        (&*format!("[fe80::2%eth1]:{port}"), "this host has no network interface \"eth1\""),
    ] {
        let (status, lines) = send_to(to, &[]).finish_with_lines();
        assert!(nothing_was_touched(status.code()), "{status}: {lines:?}");
        assert!(lines.iter().any(|line| line.starts_with("sterna: ") && line.contains(reason)), "{reason}: {lines:?}");
    }
    let sender = send_to(&to, &["--tls-server-name", "destination.example"]);
    let mut migration = Migration { pair, sender: Some(sender), receiver: Some(receiver) };
    migration.settle().unwrap();
    assert_eq!(migration.exactly_one(), Ok(Side::Destination));
}

#[test]
fn an_address_of_an_interface_that_does_not_exist_cannot_be_listened_on() {
    let Some(pair) = Pair::boot_sector(QemuVersion::V10_0) else { return };
    let mut command = sterna();
    command.args(["receive", "--listen", "[fe80::2%eth77]:0", "--qmp"]).arg(&pair.destination.qmp_path);
    command.arg("--state-dir").arg(pair.destination_state());
    let (status, lines) = Sterna::start("receive", command.arg("--insecure")).finish_with_lines();
    assert!(nothing_was_touched(status.code()), "{status}: {lines:?}");
    assert!(lines.iter().any(|line| line.contains("this host has no network interface \"eth77\"")), "{lines:?}");
}

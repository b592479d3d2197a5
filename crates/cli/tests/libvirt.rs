//! `sterna proxy` under real libvirts: two hosts (`sterna_qemu_lab::libvirt`), a guest that verifies its memory, and libvirt's own commands as
//! docs/operating.md has them. `client`: libvirt's client library; `direct`: its guests in direct mode. Run by `make test-libvirt`.
//!
//! After every move, whatever became of it: the guest has never run twice, it runs once, and its memory is right.

#[path = "libvirt/client.rs"]
mod client;
#[path = "libvirt/direct.rs"]
mod direct;
#[path = "program/support/mod.rs"]
mod support;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Stdio};

use rustix::process::{Signal, kill_process};
use sterna_qemu_lab::libvirt::{LibvirtGuest, LibvirtGuestOptions, LibvirtHosts, Side};
use sterna_qemu_lab::skip_if_unavailable;
use support::{LONG, Sterna, sterna};
use tempfile::TempDir;

/// Two hosts with certificates.
struct Lab {
    hosts: LibvirtHosts,
    certificates: TempDir,
}

impl Lab {
    fn start() -> Option<Lab> {
        let certificates = tempfile::tempdir().unwrap();
        let made =
            sterna().args(["cert", "--host", "host-a,host-b", "--dir"]).arg(certificates.path()).output().unwrap();
        assert!(made.status.success(), "{made:?}");
        let hosts = skip_if_unavailable(LibvirtHosts::start(certificates.path()))?;
        Some(Lab { hosts, certificates })
    }

    fn guest(&self, name: &str) -> LibvirtGuest<'_> {
        self.hosts.guest(name, &LibvirtGuestOptions::default()).unwrap()
    }

    /// Asserts that the guest runs on `side` by every account, has run nowhere else meanwhile, and finds its memory right.
    #[track_caller]
    fn assert_runs_once(&self, guest: &LibvirtGuest<'_>, side: Side) {
        guest.wait_running(side, LONG).unwrap();
        let state = self.hosts.host(side).virsh(&["domstate", guest.name()]).unwrap();
        assert_eq!(state.trim(), "running");
        self.wait_forgotten(guest, side.other());
        let verified = guest.verify(side, LONG).unwrap();
        assert!(verified.bad == 0 && verified.table_whole, "{verified:?}");
        guest.assert_never_two();
        assert_eq!(guest.running(), [side]);
    }

    /// Waits until libvirt on `side` has no such domain, running or not.
    #[track_caller]
    fn wait_forgotten(&self, guest: &LibvirtGuest<'_>, side: Side) {
        let deadline = std::time::Instant::now() + LONG;
        loop {
            let names = self.hosts.host(side).virsh(&["list", "--all", "--name"]).unwrap();
            if !names.lines().any(|name| name == guest.name()) {
                return;
            }
            assert!(std::time::Instant::now() < deadline, "{} is still known on {}", guest.name(), side.host_name());
        }
    }
}

/// A pair of proxies that carries guests from one host to the other.
struct Pair {
    receive: Sterna,
    send: Sterna,
}

/// The directory of the sockets of moves to `to`: the same on both hosts, as libvirt has it, and never both ends of one pair. Where a
/// socket is listened on decides who owns the directory: at the source root's proxy, at the destination QEMU.
fn directory(to: Side) -> String {
    format!("/run/sterna/to-{}", to.host_name())
}

impl Pair {
    fn start(lab: &Lab, from: Side, guests: &[&str]) -> Pair {
        let to = from.other();
        let (source, destination) = (lab.hosts.host(from), lab.hosts.host(to));
        let directory = directory(to);
        source.run("install", &["-d", "-m", "0711", &directory]).unwrap();
        destination
            .run("install", &["-d", "-o", "libvirt-qemu", "-g", "libvirt-qemu", "-m", "0755", &directory])
            .unwrap();
        let unix = |guest: &&str| match guests {
            [_] => format!("--unix={directory}/{guest}.sock"),
            _ => format!("--unix={guest}={directory}/{guest}.sock"),
        };

        let mut command = destination.command(sterna().get_program());
        command.args(["proxy", "receive", "--allow", "sterna-sender", "--tls"]).arg(lab.certificates.path());
        command.arg("--listen").arg(format!("{}:4920", to.address())).args(guests.iter().map(unix));
        command.arg(format!("--opaque=nbd={directory}/nbd.sock")).arg("--opaque=libvirt=/run/libvirt/libvirt-sock");
        let receive = Sterna::start("proxy receive", &mut command);
        receive.wait_for("listening on ");

        let mut command = source.command(sterna().get_program());
        command.args(["proxy", "send", "--tls"]).arg(lab.certificates.path());
        command.arg("--to").arg(format!("{}:4920", to.host_name())).args(guests.iter().map(unix));
        command
            .arg(format!("--opaque=nbd={directory}/nbd.sock"))
            .arg(format!("--opaque=libvirt={directory}/libvirt.sock"));
        let send = Sterna::start("proxy send", &mut command);
        send.wait_for("listening on ");
        Pair { receive, send }
    }

    /// Ends both proxies as systemd does. They have served until now, and nothing was wrong with them.
    #[track_caller]
    fn stop(mut self) {
        for proxy in [&mut self.send, &mut self.receive] {
            assert_eq!(proxy.poll(), None, "a proxy has ended by itself");
            proxy.terminate();
        }
        self.wait_ended();
    }

    #[track_caller]
    fn wait_ended(self) {
        for (name, proxy) in [("send", self.send), ("receive", self.receive)] {
            let (status, lines) = proxy.finish_with_lines();
            assert!(status.success(), "proxy {name}: {status}: {lines:?}");
        }
    }
}

/// Which way libvirt's own words take to the other host.
#[derive(Clone, Copy, Debug)]
enum Control {
    /// A connection of libvirt's own, beside the proxies.
    Beside,
    /// An opaque connection of the proxies.
    Carried,
}

/// What is said to `virsh migrate`.
#[derive(Clone, Copy, Debug)]
struct How {
    peer_to_peer: bool,
    parallel: bool,
    tls: bool,
    control: Control,
    more: &'static [&'static str],
}

/// Everything that libvirt can have carried at once.
const EVERYTHING: How = How { peer_to_peer: true, parallel: true, tls: true, control: Control::Carried, more: &[] };

impl How {
    fn words(&self, guest: &str, to: Side) -> Vec<String> {
        let directory = directory(to);
        let mut words: Vec<String> = ["migrate", "--live", guest].map(str::to_owned).to_vec();
        words.push(match self.control {
            Control::Beside => format!("qemu+tls://{}/system", to.host_name()),
            Control::Carried => format!("qemu+unix:///system?socket={directory}/libvirt.sock"),
        });
        words.extend(["--migrateuri".to_owned(), format!("unix://{directory}/{guest}.sock")]);
        if self.peer_to_peer {
            words.push("--p2p".into());
        }
        if self.parallel {
            words.extend(["--parallel", "--parallel-connections", "3"].map(str::to_owned));
        }
        if self.tls {
            words.extend(["--tls", "--tls-destination", to.host_name()].map(str::to_owned));
        }
        if self.more.contains(&"--copy-storage-all") {
            words.extend(["--disks-uri".to_owned(), format!("unix://{directory}/nbd.sock")]);
        }
        words.extend(self.more.iter().map(|word| (*word).to_owned()));
        words
    }
}

/// A `virsh migrate` under way.
struct Move<'a> {
    lab: &'a Lab,
    guest: &'a LibvirtGuest<'a>,
    from: Side,
    /// The number of the destination's QEMU.
    qemu: usize,
    child: Option<Child>,
    words: String,
}

impl<'a> Move<'a> {
    fn start(lab: &'a Lab, guest: &'a LibvirtGuest<'a>, from: Side, how: &How) -> Move<'a> {
        let words = how.words(guest.name(), from.other());
        eprintln!("virsh {}", words.join(" "));
        let qemu = guest.qemus(from.other()) + 1;
        // Also as a client virsh notices that the other host is gone.
        let mut command = lab.hosts.host(from).command("virsh");
        command.args(["--quiet", "--keepalive-interval", "2", "--keepalive-count", "4"]).args(&words);
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        Move { lab, guest, from, qemu, child: Some(child), words: words.join(" ") }
    }

    /// Waits until both QEMUs are in the middle of it.
    #[track_caller]
    fn wait_underway(&self) {
        self.guest.wait_event(self.from.other(), self.qemu, "MIGRATION active", LONG).unwrap();
        let deadline = std::time::Instant::now() + LONG;
        loop {
            let job = self.lab.hosts.host(self.from).virsh(&["domjobinfo", self.guest.name(), "--rawstats"]).unwrap();
            let sent = job.lines().find_map(|line| line.trim().strip_prefix("memory_processed: ")?.parse().ok());
            if sent.is_some_and(|sent: u64| sent > 4 << 20) {
                return;
            }
            assert!(std::time::Instant::now() < deadline, "nothing is sent: {job}");
        }
    }

    /// Waits until the destination's QEMU has ended.
    #[track_caller]
    fn wait_destination_ended(&self) {
        self.guest.wait_event(self.from.other(), self.qemu, "ended", LONG).unwrap();
    }

    /// Waits for its end; gives virsh's words where it failed.
    fn finish(&mut self) -> Result<(), String> {
        let output = self.child.take().expect("not finished yet").wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        eprintln!("virsh {}: {} {text}", self.words, output.status);
        if output.status.success() { Ok(()) } else { Err(text) }
    }
}

impl Drop for Move<'_> {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Moves the guest and asserts that it has moved.
#[track_caller]
fn move_guest(lab: &Lab, guest: &LibvirtGuest<'_>, from: Side, how: &How) {
    let moved = Move::start(lab, guest, from, how).finish();
    assert_eq!(moved, Ok(()), "{how:?}");
    lab.assert_runs_once(guest, from.other());
}

/// Slow enough that something can be done meanwhile: the guest's 64 MiB take more than ten seconds.
const SLOWLY: &[&str] = &["--bandwidth", "4"];

#[test]
fn the_laboratory_moves_a_guest_without_sterna() {
    let Some(lab) = Lab::start() else { return };
    let guest = lab.guest("guest");
    let to = Side::B.host_name();
    let words = ["migrate", "--live", "--p2p", "--parallel", "--tls", "guest"];
    lab.hosts.host(Side::A).virsh(&[&words[..], &[&format!("qemu+tls://{to}/system")]].concat()).unwrap();
    lab.assert_runs_once(&guest, Side::B);
}

#[test]
fn every_kind_of_move_goes_through_the_same_two_pairs() {
    let Some(lab) = Lab::start() else { return };
    let guest = lab.guest("guest");
    let pairs = Side::ALL.map(|from| Pair::start(&lab, from, &["guest"]));
    let mut from = Side::A;
    for number in 0..8 {
        let [peer_to_peer, parallel, tls] = [1, 2, 4].map(|bit| number & bit != 0);
        // Each choice is once with each control.
        let control =
            if (number & 1) ^ (number >> 1 & 1) ^ (number >> 2 & 1) == 0 { Control::Beside } else { Control::Carried };
        move_guest(&lab, &guest, from, &How { peer_to_peer, parallel, tls, control, more: &[] });
        from = from.other();
    }
    pairs.into_iter().for_each(Pair::stop);
}

#[test]
fn ten_moves_in_a_row_with_native_tls_and_control_carried() {
    let Some(lab) = Lab::start() else { return };
    let guest = lab.guest("guest");
    let pairs = Side::ALL.map(|from| Pair::start(&lab, from, &["guest"]));
    for number in 0..10 {
        move_guest(&lab, &guest, Side::ALL[number % 2], &EVERYTHING);
    }
    pairs.into_iter().for_each(Pair::stop);
}

#[test]
fn three_guests_move_at_once_through_one_pair() {
    let Some(lab) = Lab::start() else { return };
    let names = ["guest-1", "guest-2", "guest-3"];
    let guests = names.map(|name| lab.guest(name));
    let pair = Pair::start(&lab, Side::A, &names);
    let mut moves = guests.each_ref().map(|guest| Move::start(&lab, guest, Side::A, &EVERYTHING));
    assert_eq!(moves.each_mut().map(Move::finish), [const { Ok(()) }; 3]);
    guests.iter().for_each(|guest| lab.assert_runs_once(guest, Side::B));
    pair.stop();
}

#[test]
fn disks_are_copied_through_a_carried_connection() {
    let Some(lab) = Lab::start() else { return };
    let options = LibvirtGuestOptions { disk: Some(24 << 20), ..LibvirtGuestOptions::default() };
    let guest = lab.hosts.guest("guest", &options).unwrap();
    assert!(!guest.disk_is_whole(Side::B).unwrap());
    let pair = Pair::start(&lab, Side::A, &["guest"]);
    // libvirt 9.0 refuses QEMU's own TLS for disks over unix sockets.
    move_guest(&lab, &guest, Side::A, &How { tls: false, more: &["--copy-storage-all"], ..EVERYTHING });
    assert!(guest.disk_is_whole(Side::B).unwrap());
    pair.stop();
}

#[test]
fn an_aborted_move_leaves_the_guest_where_it_was_and_it_moves_afterwards() {
    let Some(lab) = Lab::start() else { return };
    let guest = lab.guest("guest");
    let pair = Pair::start(&lab, Side::A, &["guest"]);
    for how in [How { tls: false, ..EVERYTHING }, How { peer_to_peer: false, ..EVERYTHING }] {
        let mut aborted = Move::start(&lab, &guest, Side::A, &How { more: SLOWLY, ..how });
        aborted.wait_underway();
        lab.hosts.host(Side::A).virsh(&["domjobabort", "guest"]).unwrap();
        let reason = aborted.finish().expect_err("it was aborted");
        assert!(reason.contains("canceled by client"), "{reason}");
        lab.assert_runs_once(&guest, Side::A);
    }
    move_guest(&lab, &guest, Side::A, &EVERYTHING);
    pair.stop();
}

#[test]
fn a_destination_qemu_that_is_killed_leaves_the_guest_where_it_was_and_it_moves_afterwards() {
    let Some(lab) = Lab::start() else { return };
    let guest = lab.guest("guest");
    let pair = Pair::start(&lab, Side::A, &["guest"]);
    // Not --parallel without TLS: so QEMU 10.0.2 can take the guest with it at the source, also without Sterna ("yank_unregister_instance:
    // Assertion `QLIST_EMPTY(&entry->yankfns)' failed", in one of five tries).
    for how in [How { parallel: false, tls: false, ..EVERYTHING }, EVERYTHING] {
        let mut failing = Move::start(&lab, &guest, Side::A, &How { more: SLOWLY, ..how });
        failing.wait_underway();
        let qemu = lab.hosts.host(Side::B).qemu_pid("guest").unwrap();
        kill_process(qemu, Signal::KILL).unwrap();
        let reason = failing.finish().expect_err("there is no QEMU to move to");
        // What libvirt says of it without Sterna, too: by which of the hosts notices first.
        let reasons = ["qemu unexpectedly closed the monitor", "job 'migration out' failed"];
        assert!(reasons.iter().any(|known| reason.contains(known)), "{reason}");
        lab.assert_runs_once(&guest, Side::A);
    }
    move_guest(&lab, &guest, Side::A, &EVERYTHING);
    pair.stop();
}

#[test]
fn a_cut_cable_leaves_the_guest_where_it_was_and_it_moves_when_the_cable_is_mended() {
    let Some(lab) = Lab::start() else { return };
    let guest = lab.guest("guest");
    let pair = Pair::start(&lab, Side::A, &["guest"]);
    for control in [Control::Beside, Control::Carried] {
        let mut failing = Move::start(&lab, &guest, Side::A, &How { more: SLOWLY, control, ..EVERYTHING });
        failing.wait_underway();
        lab.hosts.network().set_up(false).unwrap();
        failing.finish().expect_err("there is no network to move over");
        // The destination's libvirt ends what nobody will finish.
        failing.wait_destination_ended();
        lab.hosts.network().set_up(true).unwrap();
        lab.assert_runs_once(&guest, Side::A);
    }
    move_guest(&lab, &guest, Side::A, &EVERYTHING);
    pair.stop();
}

#[test]
fn a_proxy_that_is_killed_leaves_the_guest_where_it_was_and_it_moves_through_a_new_one() {
    let Some(lab) = Lab::start() else { return };
    let guest = lab.guest("guest");
    let killed: [fn(&mut Pair) -> &mut Sterna; 2] = [|pair| &mut pair.send, |pair| &mut pair.receive];
    for proxy in killed {
        let mut pair = Pair::start(&lab, Side::A, &["guest"]);
        let mut failing = Move::start(&lab, &guest, Side::A, &How { more: SLOWLY, ..EVERYTHING });
        failing.wait_underway();
        proxy(&mut pair).kill();
        failing.finish().expect_err("nothing carries it any more");
        // The destination's libvirt ends what nobody will finish.
        failing.wait_destination_ended();
        lab.assert_runs_once(&guest, Side::A);
    }
    let pair = Pair::start(&lab, Side::A, &["guest"]);
    move_guest(&lab, &guest, Side::A, &EVERYTHING);
    pair.stop();
}

#[test]
fn proxies_that_are_told_to_end_during_a_move_end_after_it() {
    let Some(lab) = Lab::start() else { return };
    let guest = lab.guest("guest");
    let pair = Pair::start(&lab, Side::A, &["guest"]);
    let mut underway = Move::start(&lab, &guest, Side::A, &How { more: SLOWLY, ..EVERYTHING });
    underway.wait_underway();
    for proxy in [&pair.send, &pair.receive] {
        proxy.terminate();
        proxy.wait_for("SIGTERM");
    }
    lab.hosts.host(Side::A).virsh(&["migrate-setspeed", "guest", "1000"]).unwrap();
    assert_eq!(underway.finish(), Ok(()));
    lab.assert_runs_once(&guest, Side::B);
    pair.wait_ended();
}

#[test]
fn clients_that_come_and_go_disturb_no_move() {
    let Some(lab) = Lab::start() else { return };
    let guest = lab.guest("guest");
    let pair = Pair::start(&lab, Side::A, &["guest"]);
    let source = lab.hosts.host(Side::A);
    let mut underway = Move::start(&lab, &guest, Side::A, &How { more: SLOWLY, ..EVERYTHING });
    underway.wait_underway();
    for _ in 0..8 {
        // Half of a request, and gone: as a virsh that is killed.
        let client = UnixStream::connect(source.path(&format!("{}/libvirt.sock", directory(Side::B)))).unwrap();
        (&client).write_all(&[0, 0, 0, 28]).unwrap();
        drop(client);
        // Gone while the answer comes.
        let socket = format!("qemu+unix:///system?socket={}/libvirt.sock", directory(Side::B));
        let mut virsh = source.command("virsh");
        let mut virsh = virsh.args(["-c", &socket, "capabilities"]).stdout(Stdio::piped()).spawn().unwrap();
        virsh.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
        virsh.kill().unwrap();
        virsh.wait().unwrap();
    }
    source.virsh(&["migrate-setspeed", "guest", "1000"]).unwrap();
    assert_eq!(underway.finish(), Ok(()));
    lab.assert_runs_once(&guest, Side::B);
    pair.stop();
}

#[test]
fn what_cannot_be_carried_is_refused_and_the_guest_runs_on() {
    let Some(lab) = Lab::start() else { return };
    let guest = lab.guest("guest");
    let pair = Pair::start(&lab, Side::A, &["guest"]);
    let plain = How { parallel: false, tls: false, ..EVERYTHING };
    let xbzrle = &["--compressed", "--comp-methods", "xbzrle", "--bandwidth", "4"];
    Move::start(&lab, &guest, Side::A, &How { more: xbzrle, ..plain }).finish().expect_err("it cannot be carried");
    lab.assert_runs_once(&guest, Side::A);
    move_guest(&lab, &guest, Side::A, &plain);
    pair.stop();
}

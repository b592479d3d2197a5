//! One complete migration for the tables of cases: the backing of guest RAM, and the move itself, with all of memory
//! compared from outside before the destination's guest starts.

use std::path::Path;

use serde_json::Value;
use sterna_qemu_lab::Backend;
use sterna_qemu_lab::huge::{HugePages, HugeTmpfs};
use sterna_qemu_lab::ram::{CHANGED_BY_LOADING, compare};
use sterna_qemu_lab::skip_if_unavailable;

use super::pair::Pair;
use super::{Hold, Sterna, certificates, receive_waiting, report, send_retrying};

/// The backing of guest RAM.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Backing {
    Anonymous,
    Memfd,
    HugeTmpfs,
    Hugetlb,
}

/// A backing, with the resources that must exist as long as it is used.
pub(crate) struct Backed {
    pub(crate) backend: Backend,
    _mount: Option<HugeTmpfs>,
    _pages: Option<HugePages>,
}

/// Returns backings of `memory` bytes for a source and a destination; none if this machine lacks something.
pub(crate) fn backings(of: [Backing; 2], memory: u64) -> Option<[Backed; 2]> {
    // One reservation for both: a process can have only one at a time.
    let huge = of.iter().filter(|backing| **backing == Backing::Hugetlb).count() as u64;
    let mut pages = match huge {
        0 => None,
        count => Some(skip_if_unavailable(HugePages::reserve(count * memory))?),
    };
    let mut make = |backing| {
        let plain = |backend| Backed { backend, _mount: None, _pages: None };
        Some(match backing {
            Backing::Anonymous => plain(Backend::Anonymous),
            Backing::Memfd => plain(Backend::Memfd),
            Backing::HugeTmpfs => {
                let mount = skip_if_unavailable(HugeTmpfs::mount(memory + (16 << 20)))?;
                Backed { backend: Backend::File { path: mount.file("ram") }, _mount: Some(mount), _pages: None }
            }
            Backing::Hugetlb => Backed { backend: Backend::MemfdHuge, _mount: None, _pages: pages.take() },
        })
    };
    let [source, destination] = of;
    Some([make(source)?, make(destination)?])
}

fn protection(tls: bool, certs: &Path, receiver: bool) -> Vec<String> {
    let certs = certs.display().to_string();
    match (tls, receiver) {
        (false, _) => vec!["--insecure".into()],
        (true, true) => vec!["--tls".into(), certs, "--allow".into(), "sterna-sender".into()],
        (true, false) => vec!["--tls".into(), certs],
    }
}

/// How a guest is moved.
pub(crate) struct Move {
    /// The value of `send --mode`.
    pub(crate) mode: &'static str,
    /// Bytes of its RAM.
    pub(crate) memory: u64,
    pub(crate) tls: bool,
    /// The value of `--retry` of both sides.
    pub(crate) retry: &'static str,
    /// Further arguments of `send`.
    pub(crate) send: Vec<String>,
    /// Further arguments of `receive`.
    pub(crate) receive: Vec<String>,
}

impl Move {
    /// Moves the guest of `pair`, and returns the report. `relay` returns the address to which `send` connects, given
    /// the one on which `receive` listens. An error means that memory differs before the destination's guest starts.
    pub(crate) fn run(&self, pair: &Pair, relay: impl Fn(String) -> String) -> Result<Value, String> {
        self.run_while(pair, relay, |_| {})
    }

    /// Moves a guest as [`Move::run`] does, and calls `meanwhile` once `send` has started.
    pub(crate) fn run_while(
        &self,
        pair: &Pair,
        relay: impl Fn(String) -> String,
        meanwhile: impl FnOnce(&Sterna),
    ) -> Result<Value, String> {
        let certs = pair.scratch.path().join("certs");
        if self.tls {
            certificates(&certs);
        }
        let mut command = receive_waiting(self.retry, pair.destination.qemu.qmp_path(), &pair.destination_state());
        command.args(protection(self.tls, &certs, true)).args(&self.receive);
        let hold = Hold::at("destination.before-cont", pair.scratch.path(), &mut command);
        let receiver = Sterna::start("receive", &mut command);
        let address = relay(receiver.address());
        let (qmp, state, json) = (pair.source.qemu.qmp_path(), pair.source_state(), pair.report());
        let mut command = send_retrying(self.retry, self.mode, qmp, &address, &state, &json);
        command.args(protection(self.tls, &certs, false)).args(&self.send);
        let sender = Sterna::start("send", &mut command);
        meanwhile(&sender);

        let held = hold.reached(&receiver);
        let source_status = if self.mode == "direct" { "paused" } else { "postmigrate" };
        assert_eq!(pair.source.status().as_deref(), Some(source_status));
        assert_eq!(pair.destination.status().as_deref(), Some("paused"));
        let mut differing = compare(pair.source.qemu.pid(), pair.destination.qemu.pid(), self.memory).unwrap();
        differing.retain(|page| !CHANGED_BY_LOADING.contains(page));
        if let Some(first) = differing.first() {
            return Err(format!("{} pages differ, the first at {first:#x}", differing.len()));
        }
        drop(held);

        let (sent, _) = sender.finish();
        let (received, _) = receiver.finish();
        assert!(sent.success() && received.success(), "send: {sent}, receive: {received}");
        let report = report(&pair.report());
        assert_eq!(report["outcome"], "completed");
        assert_eq!(report["encrypted"], self.tls);
        assert_eq!(report["mode"], self.mode);
        Ok(report)
    }
}

/// How often to try a row whose source is QEMU 7.2.
///
/// An emulating QEMU 7.2 itself loses writes: a migration between two QEMU 7.2 without Sterna shows differing pages, or
/// a crashed guest, in about one of ten runs on a busy machine, one between two QEMU 10.0 in none. It does not track a
/// guest's writes through translations that were cached before a round began (QEMU's commit 03bfc2188f, "Fix migration
/// dirty bitmap coherency with TCG memory access", and similar ones). So differing pages there are no fault of Sterna,
/// unless they always differ. Each such row has a similar one with the same streams from a QEMU 10.0, which must
/// succeed at once.
const TRIES_OF_7_2: usize = 3;

/// Calls `moved` until memory does not differ, at most as often as the source's release requires. Returns none if it
/// was skipped.
pub(crate) fn tried<T>(
    from: sterna_qemu_lab::QemuVersion,
    mut moved: impl FnMut() -> Option<Result<T, String>>,
) -> Option<T> {
    let tries = if from == sterna_qemu_lab::QemuVersion::V7_2 { TRIES_OF_7_2 } else { 1 };
    for tries_left in (0..tries).rev() {
        match moved()? {
            Ok(result) => return Some(result),
            Err(differing) if tries_left > 0 => eprintln!("QEMU 7.2 as the source, another try: {differing}"),
            Err(differing) => panic!("{differing}"),
        }
    }
    unreachable!("the last try returns or panics")
}

/// Kernel options for a Linux guest of a QEMU 7.2: with separate page tables for the kernel, each interrupt drops the
/// cached translations, which avoids most of the lost writes.
pub(crate) fn kernel_arguments(from: sterna_qemu_lab::QemuVersion) -> String {
    if from == sterna_qemu_lab::QemuVersion::V7_2 { "pti=on".into() } else { String::new() }
}

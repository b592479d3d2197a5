//! Chooses emulation or KVM: KVM only after a probe has shown that it boots this kind of guest. Some machines have a `/dev/kvm` that
//! runs tiny guests but no Linux.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::{Accel, Error, Guest, LinuxGuest, Qemu, QemuOptions, QemuVersion, Tools};

/// How long a guest may take under KVM until its first byte. A real KVM needs well under a second; a slow one (KVM in a virtual
/// host without hardware support, where each exit is expensive) is slower than emulation and of no use.
const FIRST_BYTE: Duration = Duration::from_secs(2);
/// How long until it is ready.
const BOOT: Duration = Duration::from_secs(8);

impl Qemu {
    /// Starts a QEMU and waits until its QMP socket answers. A source's guest is then booting.
    ///
    /// # Errors
    /// [`Error::ToolsMissing`] without `scripts/setup`; [`Error::QemuEnded`] with QEMU's own error if it refuses its
    /// options.
    pub fn start(options: &QemuOptions) -> Result<Qemu, Error> {
        Self::start_by(options, resolve(options))
    }
}

/// Returns KVM or TCG, by `options` or by a probe. The probe runs once for each kind of guest after each boot of the host
/// (its result is kept among the tools), and applies to all releases: a guest does not move between KVM and TCG.
fn resolve(options: &QemuOptions) -> Accel {
    match (options.accel, std::env::var("STERNA_ACCEL").as_deref()) {
        (accel @ (Accel::Kvm | Accel::Tcg), _) => accel,
        (_, Ok("kvm")) => Accel::Kvm,
        (_, Ok("tcg")) => Accel::Tcg,
        _ if kvm_runs(options.version, &options.guest) => Accel::Kvm,
        _ => Accel::Tcg,
    }
}

/// Returns whether KVM runs this kind of guest here at a useful speed. If that is not known yet, `version` is probed.
#[must_use]
pub fn kvm_runs(version: QemuVersion, guest: &Guest) -> bool {
    static KNOWN: Mutex<Option<HashMap<bool, bool>>> = Mutex::new(None);
    let linux = matches!(guest, Guest::Linux(_));
    // Locked while probing: other callers wait for the result.
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    *known.get_or_insert_default().entry(linux).or_insert_with(|| {
        let note = note_path(linux);
        if let Some(answer) = note.as_ref().and_then(read_note) {
            return answer;
        }
        let answer = match probe(version, linux) {
            Ok(()) => true,
            Err(error) => {
                tracing::debug!(%version, linux, %error, "KVM does not run this guest; using TCG");
                false
            }
        };
        if let Some(path) = note {
            // A failure only means that the next process probes again.
            let _ = std::fs::write(path, format!("{} {answer}\n", boot_id()));
        }
        answer
    })
}

fn probe(version: QemuVersion, linux: bool) -> Result<(), Error> {
    if std::fs::File::options().read(true).write(true).open("/dev/kvm").is_err() {
        return Err(Error::Unavailable { what: "KVM".into(), reason: "cannot open /dev/kvm".into() });
    }
    let guest = if linux {
        Guest::Linux(LinuxGuest {
            memory: Some(1 << 20),
            // Early output distinguishes a slow start from none.
            kernel_arguments: "earlyprintk=serial loglevel=7".into(),
            ..LinuxGuest::default()
        })
    } else {
        Guest::BootSector
    };
    let mut options = QemuOptions::new(version, guest);
    options.accel = Accel::Kvm;
    let qemu = Qemu::start_by(&options, options.accel)?;
    qemu.console().wait_for_bytes(1, FIRST_BYTE)?;
    if linux { qemu.guest().wait_ready(BOOT).map(drop) } else { qemu.console().wait_for_bytes(20, BOOT) }
}

fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

fn note_path(linux: bool) -> Option<PathBuf> {
    let kind = if linux { "linux" } else { "boot-sector" };
    Some(Tools::locate().ok()?.directory().join(format!("kvm-probe-{kind}")))
}

fn read_note(path: &PathBuf) -> Option<bool> {
    let text = std::fs::read_to_string(path).ok()?;
    let (boot, answer) = text.trim().split_once(' ')?;
    if boot == boot_id() { answer.parse().ok() } else { None }
}

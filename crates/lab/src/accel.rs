//! Emulation or KVM: KVM only after a probe has shown that it boots the very guest. Some machines have a `/dev/kvm` that
//! runs tiny guests but no Linux.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::{Error, Guest, LinuxGuest, Qemu, QemuOptions, QemuVersion, Tools};

/// How long a guest may take under KVM until its first byte. A real KVM takes well under a second; a slow one (KVM in a
/// virtual host without hardware's help, where each exit costs much) is slower than emulation and gains nothing.
const FIRST_BYTE: Duration = Duration::from_secs(2);
/// How long until it is ready.
const BOOT: Duration = Duration::from_secs(8);

/// What runs the guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accel {
    /// KVM where a probe shows that it runs the guest, else TCG. `STERNA_ACCEL=kvm|tcg` in the environment decides instead.
    Auto,
    /// The processor.
    Kvm,
    /// QEMU's emulation.
    Tcg,
}

impl Accel {
    /// QEMU's name for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Accel::Kvm => "kvm",
            Accel::Tcg => "tcg",
            Accel::Auto => "auto",
        }
    }

    /// KVM or TCG: what `options` asks for, or what a probe says. The probe runs once for each kind of guest after
    /// each boot of the host (the answer is kept among the tools), and holds for all releases: a guest does not move
    /// between KVM and TCG.
    pub(crate) fn resolve(self, options: &QemuOptions) -> Accel {
        match (self, std::env::var("STERNA_ACCEL").as_deref()) {
            (Accel::Kvm | Accel::Tcg, _) => self,
            (_, Ok("kvm")) => Accel::Kvm,
            (_, Ok("tcg")) => Accel::Tcg,
            _ if kvm_runs(options.version, &options.guest) => Accel::Kvm,
            _ => Accel::Tcg,
        }
    }
}

/// Whether KVM runs this kind of guest here, at a speed worth having. Where nobody knows yet, `version` is probed.
#[must_use]
pub fn kvm_runs(version: QemuVersion, guest: &Guest) -> bool {
    static KNOWN: Mutex<Option<HashMap<bool, bool>>> = Mutex::new(None);
    let linux = matches!(guest, Guest::Linux(_));
    // Held while probing: a second asker waits for the first one's answer.
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
            // Only saves the next process the probe.
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
            // Early output tells a slow start from none.
            kernel_words: "earlyprintk=serial loglevel=7".into(),
            ..LinuxGuest::default()
        })
    } else {
        Guest::BootSector
    };
    let mut options = QemuOptions::new(version, guest);
    options.accel = Accel::Kvm;
    let qemu = Qemu::start(&options)?;
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

//! The test guest under libvirt.

use std::sync::Arc;
use std::time::Duration;

use super::witness::Witness;
use super::{LibvirtHosts, Side, write};
use crate::{Console, Error, GuestConsole, LinuxGuest, QemuVersion, Verified};

/// How long an emulated guest may take to boot and fill its memory.
const BOOT: Duration = Duration::from_secs(120);

/// How a guest is started.
#[derive(Clone, Debug)]
pub struct LibvirtGuestOptions {
    /// Guest RAM in bytes.
    pub memory: u64,
    /// Its work.
    pub linux: LinuxGuest,
    /// The size in bytes of a disk whose content only host A has; `None`: no disk. The guest does not use it.
    pub disk: Option<u64>,
    /// What its memory is: the content of `<memoryBacking>`, empty for libvirt's default, anonymous memory.
    pub memory_backing: &'static str,
}

impl Default for LibvirtGuestOptions {
    /// 256 MiB, of which 64 are filled, written and verified all the time; emulated. It is small, so that several fit on two cores.
    fn default() -> Self {
        let linux =
            LinuxGuest { memory: Some(64 << 20), dirty_rate: 4 << 20, verify_rate: 2 << 20, ..LinuxGuest::default() };
        LibvirtGuestOptions { memory: 256 << 20, linux, disk: None, memory_backing: "" }
    }
}

/// A guest that one of the two hosts runs.
pub struct LibvirtGuest<'a> {
    hosts: &'a LibvirtHosts,
    name: String,
    witness: Witness,
    disk: Option<Vec<u8>>,
}

impl<'a> LibvirtGuest<'a> {
    pub(super) fn start(
        hosts: &'a LibvirtHosts,
        name: &str,
        options: &LibvirtGuestOptions,
    ) -> Result<LibvirtGuest<'a>, Error> {
        let witness = Witness::new(name, Side::ALL.map(|side| hosts.host(side).lab.as_path()))?;
        let disk = options.disk.map(disk_content);
        let guest = LibvirtGuest { hosts, name: name.into(), witness, disk };
        if let Some(content) = &guest.disk {
            write(&hosts.host(Side::A).path(&guest.disk_path()), content)?;
            write(&hosts.host(Side::B).path(&guest.disk_path()), vec![0; content.len()])?;
        }
        let host = hosts.host(Side::A);
        write(&host.lab.join(format!("{name}.xml")), guest.description(options))?;
        host.virsh(&["create", &format!("/run/lab/{name}.xml")])?;
        let console = guest.witness.wait_console(Side::A, BOOT)?;
        GuestConsole::new(&console).wait_ready(BOOT)?;
        guest.wait_running(Side::A, BOOT)?;
        Ok(guest)
    }

    /// Returns its libvirt name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the file of its disk, the same path on both hosts.
    #[must_use]
    pub fn disk_path(&self) -> String {
        format!("/var/lib/libvirt/images/{}.img", self.name)
    }

    /// Returns whether the disk's file on a host has the guest's data.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn disk_is_whole(&self, side: Side) -> Result<bool, Error> {
        let path = self.hosts.host(side).path(&self.disk_path());
        let found = std::fs::read(&path).map_err(Error::path("reading", &path))?;
        Ok(Some(&found) == self.disk.as_ref())
    }

    /// Makes the guest on `side` verify its whole memory.
    ///
    /// # Errors
    /// As [`GuestConsole::verify`].
    pub fn verify(&self, side: Side, limit: Duration) -> Result<Verified, Error> {
        let console = self.console(side)?;
        GuestConsole::new(&console).verify(limit)
    }

    /// Returns the console of the QEMU that was last started on `side`.
    ///
    /// # Errors
    /// [`Error::Guest`] if there was none.
    pub fn console(&self, side: Side) -> Result<Arc<Console>, Error> {
        self.witness.console(side)
    }

    /// Returns the hosts on which the guest runs, as its QEMUs report: exactly one, if all is well. A host occurs twice if two QEMUs there
    /// run it.
    #[must_use]
    pub fn running(&self) -> Vec<Side> {
        self.witness.running()
    }

    /// Waits until the guest runs on `side` and not on the other.
    ///
    /// # Errors
    /// [`Error::Timeout`] with the QEMUs' reports.
    pub fn wait_running(&self, side: Side, limit: Duration) -> Result<(), Error> {
        self.witness.wait_running(&[side], limit)
    }

    /// Returns how many QEMUs have been started for it on `side`.
    #[must_use]
    pub fn qemus(&self, side: Side) -> usize {
        self.witness.qemus(side)
    }

    /// Waits until the `qemu`-th QEMU on `side`, counted from 1, has sent the event `what`. The migration's events include the status:
    /// `MIGRATION active`. `ended` means that the QEMU has ended.
    ///
    /// # Errors
    /// [`Error::Timeout`] with the QEMUs' reports.
    pub fn wait_event(&self, side: Side, qemu: usize, what: &str, limit: Duration) -> Result<(), Error> {
        self.witness.wait_report(side, qemu, what, limit)
    }

    /// Asserts that the guest has never run twice at the same time.
    ///
    /// # Panics
    /// If it has, with the QEMUs' reports.
    #[track_caller]
    pub fn assert_never_two(&self) {
        if let Some(reports) = self.witness.ran_twice() {
            panic!("guest {} ran twice at the same time:{reports}", self.name);
        }
    }

    fn description(&self, options: &LibvirtGuestOptions) -> String {
        let LibvirtGuest { name, .. } = self;
        let (memory, machine, backing) = (options.memory, QemuVersion::V10_0.machine(), options.memory_backing);
        let command_line = options.linux.command_line(0);
        // The name's last letters: both hosts must have the same number.
        let letters = name.bytes().rev().take(6).fold(String::new(), |text, byte| format!("{byte:02x}{text}"));
        let uuid = format!("6a9e0d3c-5b7c-4a51-9d53-{letters:0>12}");
        let disk = options.disk.map(|_| {
            let path = self.disk_path();
            format!(
                "<disk type='file' device='disk'><driver name='qemu' type='raw'/><source file='{path}'/>\
                 <target dev='vda' bus='virtio'/></disk>"
            )
        });
        let disk = disk.unwrap_or_default();
        format!(
            "<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>{name}</name>
  <uuid>{uuid}</uuid>
  <memory unit='bytes'>{memory}</memory>
  <memoryBacking>{backing}</memoryBacking>
  <vcpu>1</vcpu>
  <os>
    <type arch='x86_64' machine='{machine}'>hvm</type>
    <kernel>/run/lab/vmlinux</kernel><initrd>/run/lab/initramfs</initrd>
    <cmdline>{command_line}</cmdline>
  </os>
  <features><acpi/></features>
  <cpu mode='custom' match='exact'><model>qemu64</model></cpu>
  <on_poweroff>destroy</on_poweroff><on_reboot>destroy</on_reboot><on_crash>destroy</on_crash>
  <devices>
    <emulator>/run/lab/emulator</emulator>
    {disk}
    <controller type='usb' model='none'/>
    <serial type='unix'>
      <source mode='connect' path='/run/lab/{name}.console'/><target type='isa-serial' port='0'/>
    </serial>
    <memballoon model='none'/>
  </devices>
  <qemu:commandline>
    <qemu:arg value='-chardev'/><qemu:arg value='socket,id=lab,path=/run/lab/{name}.monitor'/>
    <qemu:arg value='-mon'/><qemu:arg value='chardev=lab,mode=control'/>
  </qemu:commandline>
</domain>
"
        )
    }
}

/// Returns bytes that no other file has by chance (xorshift64).
fn disk_content(size: u64) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let words = (0..size.div_ceil(8)).flat_map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.take(usize::try_from(size).expect("a disk of a test is small")).collect()
}

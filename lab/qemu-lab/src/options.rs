//! The options of a QEMU: release, machine, memory and its backing, role, guest.

use std::path::PathBuf;

use crate::{Accel, Disk, QemuVersion};

/// The backing of guest RAM in the QEMU process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Backend {
    /// Private anonymous memory, as without any `memory-backend` option.
    Anonymous,
    /// A shared memfd of 4 KiB pages.
    Memfd,
    /// A shared memfd of 2 MiB pages, which must be reserved ([`crate::huge::HugePages`]).
    MemfdHuge,
    /// A shared file, or a file in the directory at this path, on tmpfs ([`crate::huge::HugeTmpfs`]) or hugetlbfs.
    File {
        /// The file or directory.
        path: PathBuf,
    },
}

/// A QEMU's side of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Boots the guest.
    Source,
    /// Waits for a guest: `-incoming defer`.
    Incoming,
}

/// The content with which a Linux guest fills its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the guest's documentation describes each content")]
pub enum Fill {
    Zeros,
    Ones,
    Sequence,
    Random,
    Text,
    Corpus,
    Mixed,
}

impl Fill {
    /// Every kind.
    pub const ALL: [Fill; 7] =
        [Fill::Zeros, Fill::Ones, Fill::Sequence, Fill::Random, Fill::Text, Fill::Corpus, Fill::Mixed];

    /// Returns the guest's name for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Fill::Zeros => "zeros",
            Fill::Ones => "ones",
            Fill::Sequence => "sequence",
            Fill::Random => "random",
            Fill::Text => "text",
            Fill::Corpus => "corpus",
            Fill::Mixed => "mixed",
        }
    }
}

/// The order in which a Linux guest writes its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// One after another.
    Sequential,
    /// At random, all equally often.
    Random,
    /// Nine of ten writes go to a tenth of the pages.
    Hot,
}

/// How a Linux guest writes a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dirty {
    /// The whole page with new content.
    Page,
    /// Only its stamp: some words at its start.
    Stamp,
}

/// A directory in which a Linux guest works with files: a [`crate::SharedDirectory`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// The tag of its virtiofs device ([`crate::Virtiofsd::qemu_words`]).
    pub tag: String,
    /// Whether the guest also works with a file that was deleted while it is open.
    pub deleted: bool,
}

/// How a Linux guest uses its disks: threads read them past the guest's page cache into buffers, keep the content, and check it at
/// once and again before a buffer is reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskLoad {
    /// Bytes of memory for the buffers of all disks together, beside [`LinuxGuest::memory`]. At least 1 MiB for each thread of each disk.
    pub buffers: u64,
    /// Threads for each disk, from 1 to 64. Each has one read or write of at most 1 MiB in flight.
    pub threads: u64,
    /// Bytes a second that are read and written in all; not 0. A read has 75 KiB on average.
    pub rate: u64,
}

impl Default for DiskLoad {
    /// Some hundred reads a second in an emulated guest.
    fn default() -> Self {
        DiskLoad { buffers: 64 << 20, threads: 4, rate: 16 << 20 }
    }
}

/// The test guest's settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinuxGuest {
    /// The content of memory.
    pub fill: Fill,
    /// Bytes to fill. At least 160 MiB less than the machine has; `None`: three quarters of the free memory after boot.
    pub memory: Option<u64>,
    /// Bytes a second to write, in whole pages; 0 is none.
    pub dirty_rate: u64,
    /// How a page is written.
    pub dirty: Dirty,
    /// Bytes, from the start of the filled memory, in which pages are written again; `None`: all.
    pub dirty_span: Option<u64>,
    /// The order of these writes.
    pub pattern: Pattern,
    /// Bytes a second to verify all the time; 0 is none.
    pub verify_rate: u64,
    /// Further arguments of the kernel.
    pub kernel_arguments: String,
    /// Files of this machine that are copied to the guest's root file system, which is in its memory, as `file-0`, `file-1` and so on.
    pub files: Vec<PathBuf>,
    /// A directory in which it works with files all the time.
    pub share: Option<Share>,
    /// How it uses the machine's disks ([`QemuOptions::disks`]); `None`: not at all.
    pub disk_load: Option<DiskLoad>,
    /// Whether it has the driver of a balloon (`virtio-balloon-pci` among [`QemuOptions::extra`]).
    pub balloon: bool,
}

impl Default for LinuxGuest {
    fn default() -> Self {
        LinuxGuest {
            fill: Fill::Mixed,
            memory: None,
            dirty_rate: 0,
            dirty: Dirty::Page,
            dirty_span: None,
            pattern: Pattern::Random,
            verify_rate: 8 << 20,
            kernel_arguments: String::new(),
            files: Vec::new(),
            share: None,
            disk_load: None,
            balloon: false,
        }
    }
}

impl LinuxGuest {
    /// Returns the kernel's command line for a machine with this number of disks. It turns off features that cost an emulated guest
    /// seconds of booting.
    pub(crate) fn command_line(&self, disks: usize) -> String {
        let mut line = String::from(
            "console=ttyS0 quiet loglevel=1 panic=-1 mitigations=off nokaslr no_timer_check audit=0 apparmor=0 \
             init_on_alloc=0 cryptomgr.notests pci=nomsi,noaer 8250.nr_uarts=1",
        );
        let pattern = match self.pattern {
            Pattern::Sequential => "sequential",
            Pattern::Random => "random",
            Pattern::Hot => "hot",
        };
        let dirty = match self.dirty {
            Dirty::Page => "page",
            Dirty::Stamp => "stamp",
        };
        let settings = [
            ("fill", Some(self.fill.name().to_owned())),
            ("memory", self.memory.map(|bytes| bytes.to_string())),
            ("dirty-rate", Some(self.dirty_rate.to_string())),
            ("dirty", Some(dirty.to_owned())),
            ("dirty-span", self.dirty_span.map(|bytes| bytes.to_string())),
            ("pattern", Some(pattern.to_owned())),
            ("verify", Some(self.verify_rate.to_string())),
            ("share", self.share.as_ref().map(|share| share.tag.clone())),
            ("balloon", self.balloon.then(|| "on".to_owned())),
            ("disks", self.disk_load.map(|_| disks.to_string())),
            ("disk-buffers", self.disk_load.map(|load| load.buffers.to_string())),
            ("disk-threads", self.disk_load.map(|load| load.threads.to_string())),
            ("disk-rate", self.disk_load.map(|load| load.rate.to_string())),
            ("deleted", self.share.as_ref().filter(|share| share.deleted).map(|_| "on".to_owned())),
        ];
        for (name, value) in settings {
            if let Some(value) = value {
                line.push_str(&format!(" sterna.{name}={value}"));
            }
        }
        if !self.kernel_arguments.is_empty() {
            line.push(' ');
            line.push_str(&self.kernel_arguments);
        }
        line
    }
}

/// The guest that runs in the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Guest {
    /// A Linux kernel with the test guest as init.
    Linux(LinuxGuest),
    /// The [boot-sector guest](crate::boot_sector): runs in milliseconds, needs 128 MiB.
    BootSector,
    /// Nothing: the firmware finds nothing to boot and waits.
    None,
}

/// How a QEMU is started. Made by [`QemuOptions::new`], after which single fields can be changed.
#[derive(Clone, Debug)]
pub struct QemuOptions {
    /// The release.
    pub version: QemuVersion,
    /// The machine type, with optional properties; the migration stream's variant depends on it.
    pub machine: String,
    /// Guest RAM in bytes. The Linux guest needs at least 256 MiB.
    pub memory: u64,
    /// The backing of guest RAM.
    pub backend: Backend,
    /// Whether guest RAM is populated before the guest starts.
    pub preallocate: bool,
    /// Virtual CPUs.
    pub cpus: u32,
    /// Emulation or KVM.
    pub accel: Accel,
    /// The side of the migration.
    pub role: Role,
    /// The guest.
    pub guest: Guest,
    /// Disks, which a Linux guest finds as `/dev/vda` and so on. Source and destination open the same files.
    pub disks: Vec<Disk>,
    /// The machine's UUID: migration refuses a destination with another one.
    pub uuid: Option<String>,
    /// The path of the QMP socket; `None`: `qmp.sock` in the QEMU's private directory.
    pub qmp_path: Option<PathBuf>,
    /// Further arguments of QEMU.
    pub extra: Vec<String>,
    /// The network namespace to run in ([`crate::net::Network`]).
    pub namespace: Option<String>,
    /// A directory that is replaced by an empty one in a mount namespace of QEMU's own, as `/tmp` is in a container. Needs root.
    pub own_directory: Option<PathBuf>,
    /// Whether it runs in a pid namespace of its own with a `/proc` of its own, as in a container. Needs root.
    pub own_processes: bool,
    /// The user number to run as, with the group of the same number and no others. Needs root, and files that this user may read.
    pub user: Option<u32>,
    /// The host CPUs to run on, as `taskset -c` reads them: `0`, `0,2`, `1-3`.
    pub host_cpus: Option<String>,
}

impl QemuOptions {
    /// A source of 512 MiB (128 MiB for the boot sector) with one CPU, on the release's own q35 machine type.
    #[must_use]
    pub fn new(version: QemuVersion, guest: Guest) -> Self {
        QemuOptions {
            version,
            machine: version.machine().into(),
            memory: if matches!(guest, Guest::Linux(_)) { 512 << 20 } else { 128 << 20 },
            backend: Backend::Anonymous,
            preallocate: false,
            cpus: 1,
            accel: Accel::Auto,
            role: Role::Source,
            guest,
            disks: Vec::new(),
            uuid: None,
            qmp_path: None,
            extra: Vec::new(),
            namespace: None,
            own_directory: None,
            own_processes: false,
            user: None,
            host_cpus: None,
        }
    }

    /// The same machine as a destination, with its QMP socket in its own private directory.
    #[must_use]
    pub fn incoming(&self) -> Self {
        QemuOptions { role: Role::Incoming, qmp_path: None, ..self.clone() }
    }

    /// Returns the `-machine`, `-m` and `-object` words. The block is called `pc.ram` for every backing, so a guest can move
    /// between any two.
    pub(crate) fn memory_words(&self) -> Vec<String> {
        let size = self.memory;
        let preallocate = if self.preallocate { ",prealloc=on" } else { "" };
        let object = match &self.backend {
            Backend::Anonymous if self.preallocate => format!("memory-backend-ram,id=pc.ram,size={size}{preallocate}"),
            Backend::Anonymous => String::new(),
            Backend::Memfd => format!("memory-backend-memfd,id=pc.ram,size={size},share=on{preallocate}"),
            Backend::MemfdHuge => {
                format!("memory-backend-memfd,id=pc.ram,size={size},share=on,hugetlb=on,hugetlbsize=2M{preallocate}")
            }
            Backend::File { path } => {
                // QEMU's option syntax doubles commas.
                let path = path.display().to_string().replace(',', ",,");
                // Aligned, or the kernel maps no huge page of a tmpfs.
                format!("memory-backend-file,id=pc.ram,size={size},mem-path={path},share=on,align=2M{preallocate}")
            }
        };
        let mut words = vec!["-m".to_owned(), format!("{}K", size / 1024)];
        if object.is_empty() {
            words.extend(["-machine".to_owned(), self.machine.clone()]);
        } else {
            words.extend(["-object".to_owned(), object]);
            words.extend(["-machine".to_owned(), format!("{},memory-backend=pc.ram", self.machine)]);
        }
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_backend_names_the_block_alike() {
        let mut options = QemuOptions::new(QemuVersion::V7_2, Guest::BootSector);
        assert_eq!(options.memory_words(), ["-m", "131072K", "-machine", "pc-q35-7.2"]);
        for backend in [Backend::Memfd, Backend::MemfdHuge, Backend::File { path: "/dev/shm/a,b".into() }] {
            options.backend = backend;
            let words = options.memory_words();
            assert!(words[3].contains("id=pc.ram") && words[3].contains("share=on"), "{words:?}");
            assert_eq!(words[5], "pc-q35-7.2,memory-backend=pc.ram");
        }
        options.backend = Backend::File { path: "/dev/shm/a,b".into() };
        assert!(options.memory_words()[3].contains("mem-path=/dev/shm/a,,b,"));
    }

    #[test]
    fn the_guests_settings_are_on_the_command_line() {
        let guest = LinuxGuest { dirty_rate: 5, memory: Some(4096), dirty: Dirty::Stamp, ..LinuxGuest::default() };
        let line = guest.command_line(1);
        for word in
            ["sterna.fill=mixed", "sterna.memory=4096", "sterna.dirty-rate=5", "sterna.dirty=stamp", "console=ttyS0"]
        {
            assert!(line.split(' ').any(|found| found == word), "{word} in {line}");
        }
        assert!(!line.contains("dirty-span") && !line.contains("sterna.disk"));
        let guest = LinuxGuest { disk_load: Some(DiskLoad { threads: 7, ..DiskLoad::default() }), ..guest };
        assert!(guest.command_line(2).contains("sterna.disks=2 sterna.disk-buffers=67108864 sterna.disk-threads=7"));
    }
}

//! Two libvirts as two hosts on one machine.
//!
//! Each host has network, mount, process and host name namespaces of its own, a UUID of its own, and the `libvirtd` of Debian 12 that
//! `scripts/setup --libvirt` unpacks, overlaid on `/usr`. Its guests run in the unpacked QEMU 10.0, as the user `libvirt-qemu`. Each host
//! has its own `/run`, `/etc/libvirt` and libvirt directories below `/var`, so both use the same paths, as two machines do. All other
//! directories are this machine's.
//!
//! Both QEMUs of a guest report to the laboratory as well as to libvirt when their guest runs ([`LibvirtGuest::assert_never_two`]).
//!
//! Needs root. Everything started here ends when its value is dropped: when the first process of a host ends, so do the others.

mod guest;
mod witness;

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use rustix::thread::{ThreadNameSpaceType, UnshareFlags, move_into_thread_name_spaces, unshare_unsafe};
use tempfile::TempDir;

pub use guest::{LibvirtGuest, LibvirtGuestOptions};

use crate::error::run;
use crate::net::{Link, Network, run_in};
use crate::tools::guest_program;
use crate::{Error, Tools, initramfs, process};

/// How long a libvirtd may take until it is ready. Usually that takes a second or two.
const READY: Duration = Duration::from_secs(60);
/// How long one command of virsh may take, in seconds: longer than any migration here, also on a slow machine.
const VIRSH_SECONDS: &str = "240";
/// The number of QEMU's user, from Debian, for a machine without a user of that name.
const QEMU_USER: u32 = 64055;
const HOST_SCRIPT: &str = include_str!("libvirt/host.sh");

/// One of the two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// `host-a`.
    A,
    /// `host-b`.
    B,
}

impl Side {
    /// Both hosts.
    pub const ALL: [Side; 2] = [Side::A, Side::B];

    /// Returns the other host.
    #[must_use]
    pub fn other(self) -> Side {
        match self {
            Side::A => Side::B,
            Side::B => Side::A,
        }
    }

    /// Returns the name that resolves to the host's address on both hosts.
    #[must_use]
    pub fn host_name(self) -> &'static str {
        match self {
            Side::A => "host-a",
            Side::B => "host-b",
        }
    }

    /// Returns the host's address.
    #[must_use]
    pub fn address(self) -> Ipv4Addr {
        match self {
            Side::A => Network::ADDRESS_A,
            Side::B => Network::ADDRESS_B,
        }
    }

    fn uuid(self) -> &'static str {
        match self {
            Side::A => "3d2a4c1e-98a1-4b52-8f0e-6a1f3f1d000a",
            Side::B => "3d2a4c1e-98a1-4b52-8f0e-6a1f3f1d000b",
        }
    }
}

/// Two hosts with a cable between them.
pub struct LibvirtHosts {
    hosts: [LibvirtHost; 2],
    network: Network,
    directory: TempDir,
}

impl LibvirtHosts {
    /// Starts both hosts. `certificates` has the files that `sterna cert` makes for a server with the names `host-a` and `host-b`; both
    /// hosts use them for QEMU's TLS and for libvirt's own.
    ///
    /// # Errors
    /// [`Error::ToolsMissing`] without `scripts/setup --libvirt`; [`Error::Unavailable`] if this user may not make namespaces or mount
    /// in them; [`Error::Command`] with libvirtd's output if it does not start.
    pub fn start(certificates: &Path) -> Result<LibvirtHosts, Error> {
        let tools = Tools::locate()?;
        for part in ["libvirt/usr/sbin/libvirtd", "qemu-10.0/usr/bin/qemu-system-x86_64"] {
            let path = tools.directory().join(part);
            if !path.exists() {
                let looked = format!("looked in {}", path.display());
                return Err(Error::ToolsMissing { what: "libvirt (scripts/setup --libvirt)".into(), looked });
            }
        }
        let network = Network::new(Link::default())?;
        let directory = tempfile::Builder::new()
            .prefix("sterna-libvirt-")
            .tempdir()
            .map_err(Error::io("making a directory for two libvirts"))?;
        let start = |side: Side| {
            let namespace = if side == Side::A { network.a() } else { network.b() };
            let place = directory.path().join(side.host_name());
            LibvirtHost::start(side, namespace, &place, &tools, certificates)
        };
        let hosts = [start(Side::A)?, start(Side::B)?];
        for host in &hosts {
            host.wait_ready()?;
        }
        Ok(LibvirtHosts { hosts, network, directory })
    }

    /// Returns one of the hosts.
    #[must_use]
    pub fn host(&self, side: Side) -> &LibvirtHost {
        &self.hosts[side as usize]
    }

    /// Returns the cable between the hosts.
    #[must_use]
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// Returns a directory of this machine that both hosts see, for root only.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Starts a guest on host A and waits until its memory is filled.
    ///
    /// # Errors
    /// [`Error::Command`] with libvirt's error, [`Error::Timeout`] if the guest does not boot.
    pub fn guest(&self, name: &str, options: &LibvirtGuestOptions) -> Result<LibvirtGuest<'_>, Error> {
        LibvirtGuest::start(self, name, options)
    }
}

/// A host: the processes in its namespaces.
pub struct LibvirtHost {
    side: Side,
    /// `unshare`, which started the first process of the namespaces.
    starter: Child,
    first: Pid,
    first_pidfd: OwnedFd,
    notify: UnixDatagram,
    lab: PathBuf,
}

impl LibvirtHost {
    fn start(
        side: Side,
        namespace: &str,
        place: &Path,
        tools: &Tools,
        certificates: &Path,
    ) -> Result<LibvirtHost, Error> {
        write_configuration(side, place, certificates)?;
        let lab = place.join("lab");
        copy(&tools.kernel()?, &lab.join("vmlinux"))?;
        let program = guest_program()?;
        let init = std::fs::read(&program).map_err(Error::path("reading", &program))?;
        write(&lab.join("initramfs"), initramfs::with_init(&init, &[]))?;
        write(&lab.join("emulator"), EMULATOR)?;
        set_mode(&lab.join("emulator"), 0o755)?;
        let notify_path = lab.join("notify");
        let notify = UnixDatagram::bind(&notify_path).map_err(Error::path("making", &notify_path))?;

        let errors = place.join("errors");
        let mut command = run_in(namespace, "unshare");
        command
            .args(["--mount", "--uts", "--pid", "--fork", "--kill-child", "sh", "-c", HOST_SCRIPT, "host"])
            .arg(place)
            .arg(tools.directory())
            .arg(side.host_name())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(File::create(&errors).map_err(Error::path("creating", &errors))?);
        let mut starter = process::spawn(command, Vec::new()).map_err(Error::io("starting a host's first process"))?;
        let mut lines = BufReader::new(starter.stdout.take().expect("it is piped")).lines();
        let mut next = || lines.next().and_then(Result::ok).unwrap_or_default();
        let (pid, mounted) = (next(), next());
        let first = pid.parse().ok().and_then(Pid::from_raw).filter(|_| mounted == "mounted").ok_or_else(|| {
            let _ = starter.kill();
            let _ = starter.wait();
            let reason = std::fs::read_to_string(&errors).unwrap_or_default().trim().to_owned();
            Error::Unavailable { what: "a host with mounts of its own (libvirt needs them)".into(), reason }
        })?;
        // The process is a child of `starter`, which has not waited for it: the number is still its own.
        let first_pidfd = pidfd_open(first, PidfdFlags::empty())
            .map_err(|error| Error::Io { action: "watching a host's first process".into(), source: error.into() })?;
        Ok(LibvirtHost { side, starter, first, first_pidfd, notify, lab })
    }

    /// Waits until libvirtd accepts connections (sd_notify(3)).
    fn wait_ready(&self) -> Result<(), Error> {
        let deadline = Instant::now() + READY;
        let mut message = [0; 512];
        loop {
            let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            self.notify.set_read_timeout(Some(left)).map_err(Error::io("setting a read timeout"))?;
            match self.notify.recv(&mut message) {
                Ok(length) if message[..length].split(|byte| *byte == b'\n').any(|line| line == b"READY=1") => {
                    return Ok(());
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => {
                    let output = std::fs::read_to_string(self.lab.join("libvirtd.out")).unwrap_or_default();
                    let output = format!("not ready after {} s: {output}{}", READY.as_secs(), self.log());
                    return Err(Error::Command { command: "libvirtd".into(), output });
                }
            }
        }
    }

    /// Returns which host this is.
    #[must_use]
    pub fn side(&self) -> Side {
        self.side
    }

    /// Returns a command that runs `program` on this host. Arguments follow; the process is the program itself, not a wrapper, and its
    /// number is the one outside the host.
    #[must_use]
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--mount", "--net", "--uts", "--target", &self.first.to_string(), "--"]).arg(program);
        command
    }

    /// Returns a command that runs `program` on this host, with the processes that the host sees: it can work on the host's QEMUs. Arguments
    /// follow. The process is a wrapper; the program is killed with it.
    #[must_use]
    pub fn command_inside(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--mount", "--net", "--uts", "--pid", "--target", &self.first.to_string(), "--"]);
        command.args(["setpriv", "--pdeathsig", "KILL", "--"]).arg(program);
        command
    }

    /// Runs virsh on this host to its end.
    ///
    /// # Errors
    /// [`Error::Command`] with virsh's error.
    pub fn virsh(&self, words: &[&str]) -> Result<String, Error> {
        run(self.command("timeout").args(["-k", "5", VIRSH_SECONDS, "virsh", "--quiet"]).args(words))
    }

    /// Runs a command on this host to its end.
    ///
    /// # Errors
    /// [`Error::Command`] with its error.
    pub fn run(&self, program: &str, words: &[&str]) -> Result<String, Error> {
        run(self.command(program).args(words))
    }

    /// Runs `work` on a thread that sees the host's files, libvirt's libraries among them, in the place of this machine's.
    ///
    /// # Errors
    /// [`Error::Io`] if the thread cannot enter the host's mount namespace.
    ///
    /// # Panics
    /// If `work` does.
    pub fn among_its_files<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, Error> {
        let enter = || -> io::Result<()> {
            // SAFETY: only this thread's root and working directory are separated from the other threads', which setns(2) demands; no descriptor
            // is. The thread ends below.
            unsafe { unshare_unsafe(UnshareFlags::FS)? };
            move_into_thread_name_spaces(self.first_pidfd.as_fd(), ThreadNameSpaceType::MOUNT)?;
            Ok(())
        };
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| enter().map(|()| work()));
            let result = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            result.map_err(Error::io("entering a host's mount namespace"))
        })
    }

    /// Returns this machine's path of the host's file `path`, which begins with `/`.
    #[must_use]
    pub fn path(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{path}", self.first))
    }

    /// Returns the process of the QEMU that runs guest `name` on this host, from libvirt's pid file.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if there is none.
    pub fn qemu_pid(&self, name: &str) -> Result<Pid, Error> {
        // libvirtd writes numbers of the host's own process namespace; the kernel shows both.
        let unavailable =
            |reason: &str| Error::Unavailable { what: format!("the QEMU of {name}"), reason: reason.into() };
        let path = self.path(&format!("/run/libvirt/qemu/{name}.pid"));
        let inside = std::fs::read_to_string(&path).map_err(|error| unavailable(&error.to_string()))?;
        let inside = inside.trim();
        let processes = std::fs::read_dir("/proc").map_err(Error::io("reading /proc"))?;
        let same_namespace = |pid: &str| {
            let of = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
            of(pid).is_some() && of(pid) == of(&self.first.to_string())
        };
        processes
            .filter_map(Result::ok)
            .filter_map(|entry| entry.file_name().into_string().ok())
            .filter(|pid| pid.bytes().all(|byte| byte.is_ascii_digit()))
            .find(|pid| {
                let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
                let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
                numbers.and_then(|numbers| numbers.split_whitespace().next_back()) == Some(inside)
                    && same_namespace(pid)
            })
            .and_then(|pid| Pid::from_raw(pid.parse().ok()?))
            .ok_or_else(|| unavailable("no process has the number that libvirt has written down"))
    }

    /// Returns the logs of libvirtd and the QEMUs of this host.
    #[must_use]
    pub fn log(&self) -> String {
        let mut text = std::fs::read_to_string(self.lab.join("libvirtd.log")).unwrap_or_default();
        let guests = std::fs::read_dir(self.path("/var/log/libvirt/qemu")).into_iter().flatten().filter_map(Result::ok);
        for entry in guests {
            let log = std::fs::read_to_string(entry.path()).unwrap_or_default();
            // Without QEMU's long command line.
            let lines = log.lines().filter(|line| !line.ends_with('\\') && !line.starts_with('-'));
            text.extend(lines.map(|line| format!("{}: {line}\n", entry.file_name().display())));
        }
        text
    }
}

impl Drop for LibvirtHost {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{} logged:\n{}", self.side.host_name(), self.log());
        }
        // The kernel ends the rest of the process namespace with its first process, before that is reaped by `starter`.
        let _ = pidfd_send_signal(&self.first_pidfd, Signal::KILL);
        let _ = self.starter.wait();
    }
}

/// Runs the unpacked QEMU 10.0, independent of the environment that libvirt sets.
const EMULATOR: &str = "#!/bin/sh
libraries=/usr/lib/x86_64-linux-gnu
export LD_LIBRARY_PATH=/run/qemu$libraries:/run/qemu/lib/x86_64-linux-gnu QEMU_MODULE_DIR=/run/qemu$libraries/qemu
exec /run/qemu/usr/bin/qemu-system-x86_64 -L /run/qemu/usr/share/qemu -L /run/qemu/usr/share/seabios -L /run/qemu/usr/lib/ipxe/qemu \"$@\"
";

/// Writes the host's files in `/etc`, and the files that its guests need, before it is started.
fn write_configuration(side: Side, place: &Path, certificates: &Path) -> Result<(), Error> {
    for part in ["lab", "libvirt", "etc/libvirt", "etc/pki", "pki/CA", "pki/libvirt/private", "pki/qemu"] {
        let directory = place.join(part);
        std::fs::create_dir_all(&directory).map_err(Error::path("making", &directory))?;
    }
    // QEMU's user reaches the directories only through the mounts, and must be able to pass there.
    set_mode(&place.join("lab"), 0o755)?;
    let hosts: String = Side::ALL.map(|side| format!("{} {}\n", side.address(), side.host_name())).concat();
    write(&place.join("etc/hosts"), format!("127.0.0.1 localhost\n{hosts}"))?;
    let user = write_users(&place.join("etc"))?;

    let uuid = side.uuid();
    write(
        &place.join("libvirt/libvirtd.conf"),
        format!(
            "host_uuid = \"{uuid}\"\nlisten_tls = 1\nlisten_tcp = 1\nauth_tcp = \"none\"\nauth_unix_rw = \"none\"\n\
             keepalive_interval = 2\nkeepalive_count = 4\nlog_outputs = \"2:file:/run/lab/libvirtd.log\"\n"
        ),
    )?;
    // Without control groups and virtlogd, which a machine in a container may not have, and without a /dev of each QEMU's own, because that
    // does not come about where something is mounted on a device.
    write(
        &place.join("libvirt/qemu.conf"),
        "security_driver = \"none\"\ncgroup_controllers = []\nnamespaces = []\nstdio_handler = \"file\"\nkeepalive_interval = 2\nkeepalive_count = 4\n\
         default_tls_x509_cert_dir = \"/etc/pki/qemu\"\nmigrate_tls_x509_verify = 1\n",
    )?;

    let pki = place.join("pki");
    let names = ["ca-cert.pem", "server-cert.pem", "server-key.pem", "client-cert.pem", "client-key.pem"];
    let libvirts =
        ["CA/cacert.pem", "libvirt/servercert.pem", "libvirt/private/serverkey.pem", "libvirt/clientcert.pem"];
    for (name, libvirts) in names.iter().zip(libvirts.iter().chain(&["libvirt/private/clientkey.pem"])) {
        copy(&certificates.join(name), &pki.join(libvirts))?;
        let qemus = pki.join("qemu").join(name);
        copy(&certificates.join(name), &qemus)?;
        chown(&qemus, Some(user), Some(user)).map_err(Error::path("giving to QEMU's user", &qemus))?;
    }
    Ok(())
}

/// Writes this machine's users and groups, with `libvirt-qemu` added. Returns its number.
fn write_users(etc: &Path) -> Result<u32, Error> {
    let of_machine = |path: &str| std::fs::read_to_string(path).map_err(Error::path("reading", Path::new(path)));
    let without = |text: &str| -> String {
        text.lines().filter(|line| !line.starts_with("libvirt-qemu:")).map(|line| format!("{line}\n")).collect()
    };
    let (users, groups) = (without(&of_machine("/etc/passwd")?), without(&of_machine("/etc/group")?));
    let home = "/var/lib/libvirt:/usr/sbin/nologin";
    write(&etc.join("passwd"), format!("{users}libvirt-qemu:x:{QEMU_USER}:{QEMU_USER}::{home}\n"))?;
    write(&etc.join("group"), format!("{groups}libvirt-qemu:x:{QEMU_USER}:\n"))?;
    Ok(QEMU_USER)
}

fn write(path: &Path, content: impl AsRef<[u8]>) -> Result<(), Error> {
    std::fs::write(path, content).map_err(Error::path("writing", path))
}

fn copy(from: &Path, to: &Path) -> Result<(), Error> {
    std::fs::copy(from, to).map(drop).map_err(Error::path("copying", from))
}

fn set_mode(path: &Path, mode: u32) -> Result<(), Error> {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
        .map_err(Error::path("changing the mode of", path))
}

//! A microvm as a process: its options, its output, its end.

use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use sterna_memory::userfault::{Faults, Userfault};
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_microvm");
/// The user and group that own nothing (Linux's overflow ids).
const NOBODY: u32 = 65534;
/// A time limit that no correct test reaches.
const LONG: Duration = Duration::from_secs(300);

/// How vCPUs run and how written pages are tracked, as options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Threads,
    KvmWriteProtect,
    KvmLog,
    KvmRing,
}

impl Kind {
    pub(crate) const ALL: [Kind; 4] = [Kind::Threads, Kind::KvmWriteProtect, Kind::KvmLog, Kind::KvmRing];

    pub(crate) fn options(self) -> &'static str {
        match self {
            Kind::Threads => "--execution threads",
            Kind::KvmWriteProtect => "--execution kvm --tracking write-protect",
            Kind::KvmLog => "--execution kvm --tracking log",
            Kind::KvmRing => "--execution kvm --tracking ring",
        }
    }

    /// Returns whether this host can run it; prints the reason if not.
    pub(crate) fn is_possible(self) -> bool {
        if self == Kind::Threads {
            return true;
        }
        let made = kvm_ioctls::Kvm::new().and_then(|kvm| kvm.create_vm());
        if let Err(error) = &made {
            println!("skipped {self:?}: no KVM: {error}");
        }
        made.is_ok()
    }
}

/// Returns whether this host can report missing pages; prints the reason if not.
pub(crate) fn post_copy_is_possible() -> bool {
    let opened = Userfault::open(Faults::All, 0);
    if let Err(error) = &opened {
        println!("skipped post-copy: {error}");
    }
    opened.is_ok()
}

/// A running program. Killed when dropped.
pub(crate) struct Microvm {
    child: Child,
    lines: Receiver<String>,
    output: Vec<String>,
    json: PathBuf,
    _dir: TempDir,
}

/// The end of a program.
#[derive(Debug)]
pub(crate) struct Ended {
    /// `None`: it ended by a signal.
    pub(crate) code: Option<i32>,
    /// The content of its `--json` file.
    pub(crate) json: Value,
    /// Its whole output.
    pub(crate) output: String,
}

impl Microvm {
    /// Starts a program with these options, separated by spaces. Its guest has 32 MiB, unless the options change that,
    /// and verifies as fast as it can; the program ends when the guest has verified all of its memory twice more.
    pub(crate) fn start(options: &str) -> Self {
        Self::start_with(options, Stdio::inherit())
    }

    /// Starts a program as [`Microvm::start`] does, with `input` as its standard input, which it does not read.
    pub(crate) fn start_with(options: &str, input: impl Into<Stdio>) -> Self {
        let mut command = Command::new(PROGRAM);
        command.stdin(input);
        Self::spawn(command, tempfile::tempdir().unwrap(), options)
    }

    /// Returns its process number.
    pub(crate) fn pid(&self) -> rustix::process::Pid {
        rustix::process::Pid::from_child(&self.child)
    }

    /// Starts a destination as [`Microvm::destination`] does, as a user without privileges. Needs root.
    pub(crate) fn destination_of_nobody(options: &str) -> (Self, String) {
        // A directory where this user may read the program and write its report.
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("microvm");
        std::fs::copy(PROGRAM, &program).unwrap();
        std::os::unix::fs::chown(dir.path(), Some(NOBODY), Some(NOBODY)).unwrap();
        let mut command = Command::new(program);
        command.uid(NOBODY).gid(NOBODY).current_dir(dir.path());
        std::os::unix::fs::chown(dir.path().join("microvm"), Some(NOBODY), Some(NOBODY)).unwrap();
        Self::spawn(command, dir, &format!("--incoming 127.0.0.1:0 {options}")).and_its_address()
    }

    fn spawn(mut command: Command, dir: TempDir, options: &str) -> Self {
        let json = dir.path().join("report.json");
        let memory = if options.contains("--memory") { "" } else { "--memory 32 " };
        let passes = if options.contains("--passes") { "" } else { "--passes 2 " };
        let usual = format!("{memory}{passes}--check-rate unlimited --silent");
        let mut child = command
            .args(usual.split(' ').chain(options.split_whitespace()))
            .arg("--json")
            .arg(&json)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, lines) = channel();
        let outputs: [Box<dyn std::io::Read + Send>; 2] =
            [Box::new(child.stdout.take().unwrap()), Box::new(child.stderr.take().unwrap())];
        for output in outputs {
            let sender = sender.clone();
            std::thread::spawn(move || {
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    // The test may have ended.
                    let _ = sender.send(line);
                }
            });
        }
        Self { child, lines, output: Vec::new(), json, _dir: dir }
    }

    /// Starts a destination. Returns it and the address on which it listens.
    pub(crate) fn destination(options: &str) -> (Self, String) {
        Self::start(&format!("--incoming 127.0.0.1:0 {options}")).and_its_address()
    }

    fn and_its_address(mut self) -> (Self, String) {
        let line = self.wait_for("listening on ");
        let address = line.rsplit(' ').next().unwrap().to_owned();
        (self, address)
    }

    /// Waits for a line that contains `text`.
    pub(crate) fn wait_for(&mut self, text: &str) -> String {
        let deadline = Instant::now() + LONG;
        loop {
            let received = self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now()));
            let line =
                received.unwrap_or_else(|error| panic!("no '{text}' ({error}) after\n{}", self.output.join("\n")));
            self.output.push(line.clone());
            if line.contains(text) {
                return line;
            }
        }
    }

    /// Sends it a signal.
    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Kills it.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
    }

    /// Waits for its end.
    pub(crate) fn end(mut self) -> Ended {
        let deadline = Instant::now() + LONG;
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => self.output.push(line),
                // Its outputs are closed.
                Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => break,
                Err(error) => panic!("it does not end ({error}) after\n{}", self.output.join("\n")),
            }
        }
        let code = self.child.wait().unwrap().code();
        let json = std::fs::read(&self.json).map_or(Value::Null, |text| match serde_json::from_slice(&text) {
            Ok(json) => json,
            // One that was killed may have written a part.
            Err(_) if code.is_none() => Value::Null,
            Err(error) => panic!("{error} in the report after\n{}", self.output.join("\n")),
        });
        Ended { code, json, output: self.output.join("\n") }
    }
}

impl Drop for Microvm {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Ended {
    /// Checks that the guest is here, has verified all of its memory since and found nothing wrong.
    #[track_caller]
    pub(crate) fn guest_is_well(&self) {
        let faults = self.json["faults"].as_u64();
        assert_eq!(faults, Some(0), "{}", self.output);
        assert!(self.json["after"]["passes"].as_u64() >= Some(2), "{}", self.output);
    }

    /// Returns the migration's report.
    pub(crate) fn report(&self) -> &Value {
        &self.json["migration"]
    }

    /// Returns the migration's error.
    pub(crate) fn error(&self) -> &Value {
        &self.json["error"]
    }
}

/// Moves a guest that has verified its memory once; both ends must be well.
#[track_caller]
pub(crate) fn moves(both: &str, source: &str, destination: &str) -> (Ended, Ended) {
    let (receiving, address) = Microvm::destination(&format!("--insecure {both} {destination}"));
    let sending = Microvm::start(&format!("--insecure --migrate-to {address} {both} {source}"));
    moved(sending.end(), receiving)
}

/// Moves a guest as [`moves`] does, over a network of `bandwidth` bytes per second, until `shows` holds for the migration's report: at most
/// six times, each over half of the bandwidth of the time before. A vCPU of a busy machine may get so little CPU that its writes, or the
/// writes that are left to it, fit a network that a guest on a quiet machine never fits.
#[track_caller]
pub(crate) fn moves_until(both: &str, source: &str, bandwidth: u64, shows: impl Fn(&Value) -> bool) -> (Ended, Ended) {
    for halved in 0..6 {
        let (sent, received) = moves(both, &format!("{source} --bandwidth {}", bandwidth >> halved), "");
        if shows(sent.report()) {
            return (sent, received);
        }
        println!("again: {both}: {}", sent.report());
    }
    panic!("{both}: no move of six was as expected");
}

/// Waits for both ends, and checks that the migration completed and the guest is intact.
#[track_caller]
pub(crate) fn moved(sent: Ended, mut receiving: Microvm) -> (Ended, Ended) {
    if sent.code != Some(0) {
        // The destination may wait for another source.
        receiving.kill();
    }
    let received = receiving.end();
    assert_eq!((sent.code, received.code), (Some(0), Some(0)), "{}\n\n{}", sent.output, received.output);
    assert!(sent.json["before"]["passes"].as_u64() >= Some(1), "{}", sent.output);
    assert_eq!(sent.json["faults"].as_u64(), Some(0), "{}", sent.output);
    assert_eq!((sent.report()["outcome"].as_str(), sent.json["after"].is_null()), (Some("completed"), true));
    received.guest_is_well();
    (sent, received)
}

/// Writes certificates for both sides; the source's name is `source.example`.
pub(crate) fn certificates(dir: &Path) {
    use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose};
    let mut authority = CertificateParams::default();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let key = KeyPair::generate().unwrap();
    std::fs::write(dir.join("ca-cert.pem"), authority.self_signed(&key).unwrap().pem()).unwrap();
    let issuer = Issuer::new(authority, key);
    let sides = [
        ("server", "127.0.0.1", ExtendedKeyUsagePurpose::ServerAuth),
        ("client", "source.example", ExtendedKeyUsagePurpose::ClientAuth),
    ];
    for (side, name, usage) in sides {
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.extended_key_usages = vec![usage];
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &issuer).unwrap();
        std::fs::write(dir.join(format!("{side}-cert.pem")), certificate.pem()).unwrap();
        let path = dir.join(format!("{side}-key.pem"));
        std::fs::write(&path, key.serialize_pem()).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    }
}

//! Whole migrations in a sandbox: from their start on, a seccomp filter kills the process at every system call that is not
//! in the list below, which docs/embedding.md repeats. Both sides make no socket and open nothing but their records.
//!
//! Each test runs itself again in a process of its own, where the threads of both sides have a filter.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule, TargetArch,
};
use sterna_codec::MethodChoice;
use sterna_engine::cancel::Cancel;
use sterna_engine::destination::Destination;
use sterna_engine::migration::{ErrorKind, GuestState};
use sterna_engine::record_file::StateDir;
use sterna_engine::report::Outcome;
use sterna_engine::source::{NotConverging, Source};
use sterna_engine::tls::{TlsPem, TlsSettings};
use sterna_engine::transport::{Address, Security};
use sterna_memory::dirty::DirtyLog;
use sterna_memory::dirty::write_protect::WriteProtectLog;
use sterna_memory::ram::GuestRam;
use sterna_memory::userfault::{Faults, MISSING_SHMEM, Userfault, WP_ASYNC, WP_HUGETLBFS_SHMEM, WP_UNPOPULATED};

use crate::common::{sockets, within_a_minute};
use crate::guest::{Behind, Memory, Monitor, Restless, Running, Workload};

/// Has glibc allocate from one arena. With others it opens files now and then: `/sys/devices/system/cpu/online`,
/// `/proc/sys/vm/overcommit_memory`.
const ALLOCATOR: (&str, &str) = ("GLIBC_TUNABLES", "glibc.malloc.arena_max=1");
/// Set in the process in which the sides run.
const INSIDE: &str = "STERNA_TEST_SANDBOXED";

const CALM: Workload = Workload { writers: 2, span: 600, seed: 1, burst: 8 };
const BUSY: Workload = Workload { writers: 2, span: 3000, seed: 7, burst: 0 };

macro_rules! calls {
    ($($call:ident)*) => { &[$((stringify!($call), libc::$call)),*] };
}

/// Those of any Rust program with threads, the guest's included.
const PROGRAM: &[(&str, i64)] = calls!(
    SYS_brk SYS_clock_gettime SYS_clock_nanosleep SYS_clone SYS_clone3 SYS_close SYS_exit SYS_exit_group SYS_fcntl SYS_futex
    SYS_getpid SYS_getrandom SYS_gettid SYS_madvise SYS_mmap SYS_mprotect SYS_mremap SYS_munmap SYS_nanosleep SYS_prctl SYS_read
    SYS_restart_syscall SYS_rseq SYS_rt_sigaction SYS_rt_sigprocmask SYS_rt_sigreturn SYS_sched_getaffinity SYS_sched_yield
    SYS_set_robust_list SYS_sigaltstack SYS_write
);
/// Those of the channels.
const CHANNELS: &[(&str, i64)] = calls!(
    SYS_getpeername SYS_getsockopt SYS_ioctl SYS_poll SYS_ppoll SYS_recvfrom SYS_sendmsg SYS_setsockopt SYS_shutdown
);
/// That of a listening socket.
const LISTENING: &[(&str, i64)] = calls!(SYS_accept4);
/// Those of guest RAM and its dirty log, besides `ioctl`.
const MEMORY: &[(&str, i64)] = calls!(SYS_fallocate SYS_fstat SYS_fstatfs SYS_lseek SYS_pread64 SYS_pwritev SYS_statx);
/// Those of the records, besides `openat` in their directory.
const RECORDS: &[(&str, i64)] = calls!(
    SYS_flock SYS_fsync SYS_getdents64 SYS_geteuid SYS_newfstatat SYS_renameat SYS_unlinkat
);
/// That of post-copy, besides `ioctl`.
const POST_COPY: &[(&str, i64)] = calls!(SYS_eventfd2);

/// From now on the calling thread, and each that it starts, may make these calls only, and open files in `directory` only.
fn enter_sandbox(permitted: &[&[(&str, i64)]], directory: Option<RawFd>) {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        permitted.iter().flat_map(|calls| calls.iter().map(|(_, number)| (*number, Vec::new()))).collect();
    if let Some(directory) = directory {
        let of = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, directory as u64).unwrap();
        rules.insert(libc::SYS_openat, vec![SeccompRule::new(vec![of]).unwrap()]);
    }
    let architecture = TargetArch::try_from(std::env::consts::ARCH).unwrap();
    let filter = SeccompFilter::new(rules, SeccompAction::KillProcess, SeccompAction::Allow, architecture).unwrap();
    seccompiler::apply_filter(&BpfProgram::try_from(filter).unwrap()).unwrap();
}

/// Runs the test `name` again in a process of its own. Returns how that ended.
fn inside(name: &str) -> Output {
    let name = format!("sandboxed::{name}");
    let program = std::env::current_exe().unwrap();
    Command::new(program)
        .args(["--exact", &name, "--nocapture"])
        .env(INSIDE, "yes")
        .env(ALLOCATOR.0, ALLOCATOR.1)
        .output()
        .unwrap()
}

/// Runs `sides` in a process of its own, which must not be killed.
#[track_caller]
fn survives(name: &str, sides: fn()) {
    if std::env::var_os(INSIDE).is_some() {
        return within_a_minute(sides);
    }
    let Output { status, stdout, stderr } = inside(name);
    let output = format!("{}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    let killed = if status.signal() == Some(libc::SIGSYS) { ": a system call that is not permitted" } else { "" };
    assert!(status.success(), "{status}{killed}\n{output}");
    print!("{output}");
}

/// Returns a directory for records, open, with the number of its descriptor.
fn records() -> (tempfile::TempDir, StateDir, RawFd) {
    let dir = tempfile::tempdir().unwrap();
    let open = OwnedFd::from(File::open(dir.path()).unwrap());
    let number = open.as_raw_fd();
    (dir, open.into(), number)
}

/// Returns a source's address that has these connections.
fn connections(name: &str, sockets: Vec<TcpStream>) -> Address {
    let left = Mutex::new(sockets);
    Address::connecting(name, move || {
        let socket = left.lock().unwrap().pop();
        socket.map(OwnedFd::from).ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "all are in use"))
    })
}

/// Returns a userfaultfd as another program would have made it.
fn userfault(faults: Faults, features: u64) -> OwnedFd {
    Userfault::open(faults, features).unwrap().as_fd().try_clone_to_owned().unwrap()
}

/// Returns the dirty log of all of `ram`, with all that it needs open.
fn log(ram: &GuestRam) -> Box<dyn DirtyLog> {
    let blocks = ram.blocks().iter().map(|block| block.addresses()).collect();
    let descriptor = userfault(Faults::OfUserSpace, WP_ASYNC | WP_UNPOPULATED | WP_HUGETLBFS_SHMEM);
    Box::new(WriteProtectLog::new(blocks).unwrap().with_userfault(descriptor).unwrap())
}

/// Returns whether the kernel can do what these tests need; prints why not.
fn possible() -> bool {
    let opened =
        [(Faults::OfUserSpace, WP_ASYNC), (Faults::All, MISSING_SHMEM)].map(|(f, bits)| Userfault::open(f, bits));
    opened.iter().filter_map(|opened| opened.as_ref().err()).for_each(|error| println!("skipped: {error}"));
    opened.iter().all(Result::is_ok)
}

/// Returns the settings of both sides, from PEM that no file holds.
fn certificates() -> (Security, Security) {
    let mut authority = CertificateParams::default();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let key = KeyPair::generate().unwrap();
    let authority_pem = authority.self_signed(&key).unwrap().pem();
    let issuer = Issuer::new(authority, key);
    let signed = |name: &str, usage| {
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.extended_key_usages = vec![usage];
        let key = KeyPair::generate().unwrap();
        (params.signed_by(&key, &issuer).unwrap().pem(), key.serialize_pem())
    };
    let client = signed("source.example", ExtendedKeyUsagePurpose::ClientAuth);
    let server = signed("there.example", ExtendedKeyUsagePurpose::ServerAuth);
    let pem = |(certificate, key): &'static (String, String), authority: &'static str| TlsPem {
        authority: authority.as_bytes(),
        certificate: certificate.as_bytes(),
        key: key.as_bytes(),
        revoked: None,
    };
    let (client, server, authority) = (Box::leak(client.into()), Box::leak(server.into()), authority_pem.leak());
    let allow = ["source.example".to_owned()];
    (
        Security::Tls(TlsSettings::client_from_pem(&pem(client, authority)).unwrap()),
        Security::Tls(TlsSettings::server_from_pem(&pem(server, authority), &allow).unwrap()),
    )
}

#[test]
fn with_given_connections_tls_and_records_a_guest_moves_without_sockets_and_paths() {
    survives("with_given_connections_tls_and_records_a_guest_moves_without_sockets_and_paths", || {
        if !possible() {
            return;
        }
        let (source, destination) = (Memory::new(3000, 1000), Memory::new(3000, 1000));
        let running = Running::default();
        let (mut from, _) = Monitor::new(&source, &running, CALM);
        let (mut to, _) = Monitor::new(&destination, &running, CALM);
        let (client, server) = certificates();
        // The control channel, two RAM channels, the state.
        let (near, far): (Vec<_>, Vec<_>) = (0..4).map(|_| sockets()).unzip();
        let (at, queue) = Address::accepted("there.example");
        far.into_iter().for_each(|socket| queue.push(socket).unwrap());
        let to_there = connections("there.example:4920", near);
        let (source_dir, source_records, source_number) = records();
        let (destination_dir, destination_records, destination_number) = records();
        let log = log(&source.ram());
        from.start();

        std::thread::scope(|scope| {
            let receiving = scope.spawn(|| {
                enter_sandbox(&[PROGRAM, CHANNELS, MEMORY, RECORDS], Some(destination_number));
                let destination = Destination::new(destination.ram()).sandboxed(true).state_dir(&destination_records);
                destination.listen(at, &server).unwrap().run(&mut to, &Cancel::new(), &()).unwrap()
            });
            let sending = scope.spawn(|| {
                enter_sandbox(&[PROGRAM, CHANNELS, MEMORY, RECORDS], Some(source_number));
                let mut source = Source::new(source.ram(), log)
                    .method(MethodChoice::auto())
                    .sandboxed(true)
                    .state_dir(&source_records);
                source.run(to_there, &client, &mut from, &Cancel::new(), &()).unwrap()
            });
            let (sent, received) = (sending.join().unwrap(), receiving.join().unwrap());
            assert_eq!((sent.outcome, received.outcome), (Outcome::Completed, Outcome::Completed));
        });
        assert!(to.runs() && !from.runs() && !running.ever_twice());
        let recorded = |dir: &Path, state: &str| {
            let mut files = std::fs::read_dir(dir).unwrap().map(|file| file.unwrap().path());
            let record = files.find(|path| path.extension().is_some_and(|end| end == "json")).unwrap();
            let text = std::fs::read_to_string(record).unwrap();
            assert!(text.contains(state) && text.contains("\"monitor_process\": {"), "{text}");
        };
        recorded(source_dir.path(), "finished");
        recorded(destination_dir.path(), "running");
    });
}

#[test]
fn with_a_given_listening_socket_and_userfaultfd_post_copy_opens_nothing() {
    survives("with_a_given_listening_socket_and_userfaultfd_post_copy_opens_nothing", || {
        if !possible() {
            return;
        }
        let (source, destination) = (Memory::new(3000, 1000), Memory::new(3000, 1000));
        let running = Running::default();
        let (mut from, _) = Monitor::new(&source, &running, BUSY);
        let (mut to, _) = Monitor::new(&destination, &running, BUSY);
        let behind = Behind::new(&source);
        to.behind = Some(behind.clone());
        source.fill();
        let memory = Arc::clone(&destination);
        // Everything may be there before the guest gets a CPU, but not before its monitor has looked at a page.
        to.on_call = Some(Box::new(move |call| {
            if call == "load" {
                std::hint::black_box(memory.words(0)[0].load(Ordering::Relaxed));
            }
        }));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        // The control channel, two RAM channels, the state, and the requests of post-copy.
        let near = (0..5).map(|_| TcpStream::connect(listener.local_addr().unwrap()).unwrap()).collect();
        let (at, to_there) = (Address::listening(listener).unwrap(), connections("there", near));
        let ram = destination.ram().with_userfault(userfault(Faults::All, MISSING_SHMEM)).unwrap();
        let log = Restless::new(log(&source.ram()), &from);
        from.start();

        std::thread::scope(|scope| {
            let receiving = scope.spawn(|| {
                enter_sandbox(&[PROGRAM, CHANNELS, LISTENING, MEMORY, POST_COPY], None);
                let destination = Destination::new(ram.clone()).sandboxed(true);
                destination.listen(at, &Security::Insecure).unwrap().run(&mut to, &Cancel::new(), &()).unwrap()
            });
            let sending = scope.spawn(|| {
                enter_sandbox(&[PROGRAM, CHANNELS, MEMORY, POST_COPY], None);
                let mut source = Source::new(source.ram(), Box::new(log))
                    .bandwidth(Some(40 << 20))
                    .downtime(Duration::from_millis(10))
                    .when_not_converging(NotConverging::PostCopyAfter(1))
                    .sandboxed(true);
                source.run(to_there, &Security::Insecure, &mut from, &Cancel::new(), &()).unwrap()
            });
            let sent = sending.join().unwrap();
            receiving.join().unwrap();
            assert!(sent.post_copy.is_some_and(|post_copy| post_copy.requests > 0));
        });
        assert!(to.runs() && !from.runs() && !running.ever_twice());
        to.stop();
        assert_eq!((behind.wrong.load(Ordering::Relaxed), behind.differing_pages(&destination)), (0, 0));
        // The descriptor watches nothing any more, and serves the next migration.
        assert!(ram.has_userfault());
    });
}

#[test]
fn the_sandbox_kills_a_process_that_makes_a_socket_or_opens_a_path() {
    let name = "the_sandbox_kills_a_process_that_makes_a_socket_or_opens_a_path";
    match std::env::var(INSIDE) {
        Err(_) => {
            let program = std::env::current_exe().unwrap();
            for forbidden in ["socket", "path"] {
                let mut again = Command::new(&program);
                let again =
                    again.args(["--exact", &format!("sandboxed::{name}"), "--nocapture"]).env(INSIDE, forbidden);
                let ended = again.output().unwrap().status;
                assert_eq!(ended.signal(), Some(libc::SIGSYS), "{forbidden}: {ended}");
            }
        }
        Ok(forbidden) => {
            let (_dir, _records, number) = records();
            std::thread::spawn(move || {
                enter_sandbox(&[PROGRAM, CHANNELS, LISTENING, MEMORY, RECORDS, POST_COPY], Some(number));
                match forbidden.as_str() {
                    "socket" => drop(TcpStream::connect("127.0.0.1:9")),
                    _ => drop(File::open("/proc/self/maps")),
                }
            })
            .join()
            .unwrap();
        }
    }
}

#[test]
fn every_permitted_call_is_documented() {
    let page = include_str!("../../../../docs/embedding.md");
    for (name, _) in [PROGRAM, CHANNELS, LISTENING, MEMORY, RECORDS, POST_COPY].into_iter().flatten() {
        let name = name.strip_prefix("SYS_").unwrap();
        assert!(page.contains(&format!("`{name}`")), "{name} is not in docs/embedding.md");
    }
}

#[test]
fn a_sandboxed_side_refuses_beforehand_what_it_could_not_do() {
    let (memory, running) = (Memory::new(100, 100), Running::default());
    let (mut monitor, reported) = Monitor::new(&memory, &running, CALM);
    let (at, _queue) = Address::accepted("there");
    let destination = |at: Address, dir: Option<&Path>| {
        let destination = Destination::new(memory.ram()).sandboxed(true);
        let destination = match dir {
            Some(dir) => destination.state_dir(dir),
            None => destination,
        };
        destination.listen(at, &Security::Insecure).map(drop)
    };
    let mut source = Source::new(memory.ram(), Box::new(reported)).sandboxed(true);
    let refused = [
        source.run("127.0.0.1:1", &Security::Insecure, &mut monitor, &Cancel::new(), &()).map(drop),
        destination("127.0.0.1:0".into(), None),
        destination(Address::Unix("in".into()), None),
        destination(at.clone(), Some(Path::new("/state"))),
    ];
    for (refused, words) in refused.into_iter().zip(["new socket", "new socket", "new socket", "/state is a path"]) {
        let refused = refused.unwrap_err();
        assert_eq!((refused.kind, refused.guest), (ErrorKind::Settings, GuestState::Untouched));
        assert!(refused.reason.contains("sandboxed") && refused.reason.contains(words), "{refused}");
    }
    destination(at, None).unwrap();
}

#[test]
fn a_sandboxed_destination_without_a_userfaultfd_refuses_post_copy_in_words() {
    within_a_minute(|| {
        let (source, destination) = (Memory::new(100, 100), Memory::new(100, 100));
        let running = Running::default();
        let (mut from, reported) = Monitor::new(&source, &running, CALM);
        let (mut to, _) = Monitor::new(&destination, &running, CALM);
        let (near, far) = sockets();
        let (at, queue) = Address::accepted("there");
        queue.push(far).unwrap();
        let cancel = Cancel::new();
        std::thread::scope(|scope| {
            let listening =
                Destination::new(destination.ram()).sandboxed(true).listen(at, &Security::Insecure).unwrap();
            let receiving = scope.spawn(|| listening.run(&mut to, &cancel, &()));
            let mut source = Source::new(source.ram(), Box::new(reported)).when_not_converging(NotConverging::PostCopy);
            let to_there = connections("there", vec![near]);
            let refused = source.run(to_there, &Security::Insecure, &mut from, &Cancel::new(), &()).unwrap_err();
            assert_eq!(refused.kind, ErrorKind::Refused);
            assert!(refused.reason.contains("GuestRam::with_userfault"), "{refused}");
            cancel.cancel();
            receiving.join().unwrap().unwrap_err();
        });
    });
}

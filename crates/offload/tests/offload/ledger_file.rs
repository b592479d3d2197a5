//! The ledger's file between real processes: slots, owners that are killed, and what a hostile neighbour can do to it.
//!
//! Time is passed in, so nothing here waits for a clock.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};

use sterna_offload::share::ledger::file::SLOTS;
use sterna_offload::share::ledger::{Ledger, LedgerFile, OpenError, Slot, Table};
use sterna_offload::share::{AdmissionDecision, AdmissionRequest, Grant, IN_FLIGHT, Nanos, Share};
use sterna_offload::{SystemTime, Time};
use sterna_test_kit::tools::directory_in_memory;

const CHILD: &str = "STERNA_LEDGER_CHILD";
const QUEUE: &str = "wq0.0";
const BATCH: Nanos = 50_000;

fn path(directory: &Path) -> PathBuf {
    directory.join(format!("{QUEUE}.ledger"))
}

fn open(directory: &Path) -> LedgerFile {
    LedgerFile::open(directory, QUEUE).expect("a ledger")
}

fn ask(weight: u32) -> AdmissionRequest {
    AdmissionRequest { vm: std::process::id(), channel: 0, weight, predicted: BATCH, bytes: 512 << 10 }
}

/// Fills what it may have at this moment.
fn fill(ledger: &mut impl Share, weight: u32, now: Nanos) -> Vec<Grant> {
    let mut grants = Vec::new();
    while let AdmissionDecision::Admit(grant) = ledger.ask(&ask(weight), now) {
        grants.push(grant);
        assert!(grants.len() < 100, "no limit");
    }
    grants
}

/// In a child: has a batch in flight, wants more, and stays until it is killed.
#[test]
fn as_a_child() {
    let Some(directory) = std::env::var_os(CHILD) else { return };
    let mut ledger = Ledger::new(open(Path::new(&directory)));
    let grants = fill(&mut ledger, 1, 1_000_000);
    println!("\nholds {}", grants.len());
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// What is in a ledger is in it by the time of the one who wrote it: all processes of a host must have the same.
#[test]
fn all_processes_have_one_clock() {
    const ASKED: &str = "STERNA_CLOCK_CHILD";
    let now = || SystemTime.now();
    if std::env::var_os(ASKED).is_some() {
        println!("\nnow {}", now());
        return;
    }
    // This process's clock has been looked at long before the other process is there.
    let before = now();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["ledger_file::all_processes_have_one_clock", "--exact", "--nocapture"])
        .env(ASKED, "")
        .output()
        .unwrap();
    let said = String::from_utf8(child.stdout).unwrap();
    let theirs: Nanos = said.lines().find_map(|line| line.strip_prefix("now ")).expect("it says").parse().unwrap();
    assert!((before..=now()).contains(&theirs), "{theirs} is not between {before} and {}", now());
}

/// Root makes it for processes of several users.
#[test]
fn an_empty_file_becomes_a_ledger() {
    let directory = directory_in_memory();
    File::create(path(directory.path())).unwrap().set_permissions(Permissions::from_mode(0o660)).unwrap();
    let (first, second) = (open(directory.path()), open(directory.path()));
    first.write(&Slot { weight: 7, wants: 1, ..Slot::default() });
    let mut slots = vec![Slot::default(); SLOTS];
    second.read(&mut slots);
    assert_eq!((slots[first.own()].weight, first.own() == second.own()), (7, false));
}

/// A process that holds a slot; the pipe keeps it alive.
struct Holder {
    child: Child,
    _stdin: ChildStdin,
    held: usize,
}

fn holder(directory: &Path) -> Holder {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["ledger_file::as_a_child", "--exact", "--nocapture", "--test-threads=1"])
        .env(CHILD, directory)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let held = lines
        .find_map(|line| line.unwrap().strip_prefix("holds ").map(|held| held.parse().unwrap()))
        .expect("it says what it holds");
    let stdin = child.stdin.take().unwrap();
    // What it prints later must find no closed pipe.
    std::mem::forget(lines);
    Holder { child, _stdin: stdin, held }
}

#[test]
fn a_process_that_is_killed_leaves_nothing_behind() {
    let directory = directory_in_memory();
    let own = open(directory.path());
    let mut holder = holder(directory.path());
    assert_eq!(holder.held as u64, IN_FLIGHT / BATCH);
    let other = own.own() + 1;
    let mut slots = vec![Slot::default(); SLOTS];
    own.read(&mut slots);
    assert_eq!(slots[other].in_flight, holder.held as u64 * BATCH);
    assert!(own.alive(other), "it lives");

    let watcher = open(directory.path());
    let mut ledger = Ledger::new(own);
    let now = 1_000_000;
    // Of what the other has, its half counts and one batch; and the batch that it waits for.
    let first = fill(&mut ledger, 1, now);
    assert_eq!(first.len() as u64, (IN_FLIGHT / 2 - 2 * BATCH) / BATCH);

    // SIGKILL.
    holder.child.kill().unwrap();
    holder.child.wait().unwrap();
    assert!(!watcher.alive(other), "it is noticed");
    watcher.read(&mut slots);
    assert_eq!(slots[other], Slot::default());
    let second = fill(&mut ledger, 1, now + 1);
    assert_eq!((first.len() + second.len()) as u64, IN_FLIGHT / BATCH, "all room is its own");
}

#[test]
fn a_killed_process_is_also_forgotten_by_those_who_only_ask() {
    let directory = directory_in_memory();
    let mut ledger = Ledger::new(open(directory.path()));
    let mut holder = holder(directory.path());
    let mut now = 1_000_000;
    let mut grants = Vec::new();
    // Until its claims have run out by themselves and it was probed.
    holder.child.kill().unwrap();
    holder.child.wait().unwrap();
    for _ in 0..200 {
        match ledger.ask(&ask(1), now) {
            AdmissionDecision::Admit(grant) => grants.push(grant),
            AdmissionDecision::Wait { until } => now = until,
            AdmissionDecision::Spill => unreachable!("not asked to"),
        }
    }
    assert!(now < 10_000_000_000);
    assert!(!grants.is_empty());
    assert_eq!(open(directory.path()).own(), 1, "its slot is free");
}

#[test]
fn every_opener_has_a_slot_of_its_own_until_there_are_none() {
    let directory = directory_in_memory();
    let mut all: Vec<LedgerFile> = (0..SLOTS).map(|_| open(directory.path())).collect();
    let mut own: Vec<usize> = all.iter().map(Table::own).collect();
    own.sort_unstable();
    own.dedup();
    assert_eq!(own.len(), SLOTS);
    assert!(matches!(LedgerFile::open(directory.path(), QUEUE), Err(OpenError::Full { .. })));
    drop(all.remove(70));
    assert_eq!(open(directory.path()).own(), 70);
}

#[test]
fn files_that_others_could_write_or_that_are_no_ledger_are_refused() {
    let directory = directory_in_memory();
    drop(open(directory.path()));
    let file = path(directory.path());
    assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    std::fs::set_permissions(&file, Permissions::from_mode(0o666)).unwrap();
    let refused = || LedgerFile::open(directory.path(), QUEUE).expect_err("refused");
    assert!(matches!(refused(), OpenError::Untrusted { .. }));
    std::fs::remove_file(&file).unwrap();

    std::os::unix::fs::symlink("/dev/null", &file).unwrap();
    assert!(matches!(refused(), OpenError::Io { .. }), "a link is not followed");
    std::fs::remove_file(&file).unwrap();

    std::fs::create_dir(&file).unwrap();
    let _ = refused();
    std::fs::remove_dir(&file).unwrap();

    let mut other = File::create(&file).unwrap();
    std::fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
    other.write_all(&[0x5a; 100_000]).unwrap();
    assert!(matches!(refused(), OpenError::NotALedger { .. }), "something else");

    for name in ["", "..", "a/b", ".x", "x\0", "ü"] {
        assert!(matches!(LedgerFile::open(directory.path(), name), Err(OpenError::Name(_))), "{name:?}");
    }
    assert!(matches!(LedgerFile::open(Path::new("/dev/shm/none"), QUEUE), Err(OpenError::Io { .. })));
}

#[test]
fn a_ledger_on_a_disk_is_refused() {
    // The build directory, unless that lies in memory.
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    match LedgerFile::open(directory.path(), QUEUE) {
        Err(OpenError::NotInMemory { .. }) => {}
        Err(OpenError::Io { .. }) => println!("this file system cannot make files without a name: nothing to refuse"),
        Ok(_) => println!("the build directory lies in memory: nothing to refuse"),
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn a_file_that_is_cut_short_or_scribbled_over_stops_nobody() {
    let directory = directory_in_memory();
    let mut ledger = Ledger::new(open(directory.path()));
    let hostile = OpenOptions::new().write(true).open(path(directory.path())).unwrap();
    let mut now = 1_000_000;
    let mut batches = 0;
    for round in 0..300u64 {
        match round % 4 {
            0 => hostile.set_len(round * 7 % 5000).unwrap(),
            1 => hostile.write_all_at(&vec![0xff; 8256], 0).unwrap(),
            2 => hostile.write_all_at(&vec![round as u8; 3000], 64 + round).unwrap(),
            _ => hostile.set_len(0).unwrap(),
        }
        let grants = fill(&mut ledger, 5, now);
        assert!(ledger.in_flight() <= IN_FLIGHT);
        batches += grants.len();
        now += 400_000;
        for grant in grants {
            ledger.done(grant, 100_000, now);
        }
    }
    assert!(batches > 300, "{batches}");
}

#[test]
fn four_at_the_same_time_never_have_much_more_in_flight_than_one_may() {
    const THREADS: usize = 4;
    /// Batches that one holds at most.
    const HELD: usize = 4;
    let directory = directory_in_memory();
    let (in_use, most) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            // Its own open file, as another process has it.
            let file = open(directory.path());
            let (in_use, most) = (&in_use, &most);
            scope.spawn(move || {
                let mut ledger = Ledger::new(file);
                // Time stands still: nothing counts as done that was not given back.
                let now = 1_000_000;
                let (mut held, mut batches) = (Vec::new(), 0);
                while batches < 3000 {
                    let admitted = ledger.ask(&ask(1 + thread as u32), now);
                    // Who waits gives back first: else all could hold something and wait for the rest.
                    let waits = !matches!(admitted, AdmissionDecision::Admit(_));
                    if let AdmissionDecision::Admit(grant) = admitted {
                        most.fetch_max(in_use.fetch_add(BATCH, Ordering::SeqCst) + BATCH, Ordering::SeqCst);
                        held.push(grant);
                        batches += 1;
                    }
                    while !held.is_empty() && (waits || held.len() > batches % HELD) {
                        in_use.fetch_sub(BATCH, Ordering::SeqCst);
                        ledger.done(held.pop().expect("more than none"), BATCH, now);
                    }
                }
                for grant in held {
                    in_use.fetch_sub(BATCH, Ordering::SeqCst);
                    ledger.dropped(grant);
                }
            });
        }
    });
    let most = most.into_inner();
    assert_eq!(in_use.into_inner(), 0);
    // Those that look at the same moment may all go; and what one took before the others came counts up to its part and one batch.
    let others = (THREADS as u64 - 1) * BATCH;
    let not_believed = (HELD as u64 * BATCH).saturating_sub(IN_FLIGHT / THREADS as u64 + BATCH);
    assert!(most <= IN_FLIGHT + others + not_believed, "{most}");
}

//! The write-protecting dirty log on the memory of another real process.

use crate::dirty_support;

use crate::dirty_support::process::{Process, copy_of, huge, serve};
use crate::dirty_support::{collected, memory_file};
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};
use sterna_memory::PAGE_SIZE;
use sterna_memory::bitmap::PageBitmap;
use sterna_memory::dirty::union::UnionLog;
use sterna_memory::dirty::write_protect::{MappedBlock, MappedPart, WriteProtectLog};
use sterna_memory::dirty::{DirtyLog, DirtyLogError};
use sterna_memory::userfault::{MISSING_SHMEM, Userfault};

const FEATURES: u64 = WriteProtectLog::FEATURES;

/// The test that [`Process`] runs as a child.
#[test]
fn as_a_child() {
    serve();
}

/// Returns a log, or prints why none works here.
fn log_of(process: &mut Process, blocks: Vec<MappedBlock>) -> Option<WriteProtectLog> {
    let result = Userfault::from_descriptor(process.userfaultfd(), FEATURES)
        .map_err(DirtyLogError::from)
        .and_then(|userfault| WriteProtectLog::of_process(process.target(), userfault, blocks))
        .and_then(|mut log| log.start().and_then(|()| log.stop()).map(|()| log));
    match result {
        Ok(log) => Some(log),
        Err(error @ DirtyLogError::Missing { .. }) => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Starts a log of a new process, with each memory as a block.
fn started(kinds: &str) -> Option<(Process, WriteProtectLog)> {
    let mut process = Process::start(kinds)?;
    let blocks = process.blocks();
    let log = log_of(&mut process, blocks)?;
    Some((process, log))
}

/// Rounds of "collect, then copy what was named" while threads of the process write; at the end the copy equals the
/// memory.
fn no_write_is_lost(kinds: &str) {
    let Some((mut process, mut log)) = started(kinds) else { return };
    let blocks = process.blocks();
    println!("seeds 1582104577 1582104578");
    process.ask("populate 0");
    process.ask("race 1582104577");
    process.ask("race 1582104578");
    let wait = |process: &Process| {
        let target = process.writes() + 300;
        while process.writes() < target {
            std::thread::yield_now();
        }
    };
    wait(&process);
    log.start().unwrap();
    let mut copies: Vec<Vec<u8>> = blocks.iter().map(|block| vec![0; block.pages as usize * PAGE_SIZE]).collect();
    for (block, copy) in copies.iter_mut().enumerate() {
        process.read(process.addresses(block).start, copy);
    }
    let mut named = 0;
    let mut round = |process: &Process, log: &mut WriteProtectLog, copies: &mut Vec<Vec<u8>>| {
        for (block, copy) in copies.iter_mut().enumerate() {
            let mut dirty = PageBitmap::new(blocks[block].pages);
            log.collect(block, &mut dirty).unwrap();
            named += dirty.count();
            dirty.for_each_run(|run| {
                let bytes = run.start as usize * PAGE_SIZE..run.end as usize * PAGE_SIZE;
                process.read(process.addresses(block).start + bytes.start, &mut copy[bytes]);
            });
        }
    };
    for _ in 0..100 {
        wait(&process);
        round(&process, &mut log, &mut copies);
    }
    process.ask("end-race");
    round(&process, &mut log, &mut copies);
    assert!(named > 0);
    for (block, copy) in copies.iter().enumerate() {
        let mut there = vec![0; copy.len()];
        process.read(process.addresses(block).start, &mut there);
        assert!(there == *copy, "block {block}: a write was lost");
    }
    log.stop().unwrap();
    assert_eq!(process.ask("protected"), "0");
}

#[test]
fn of_anonymous_memory_no_write_is_lost() {
    no_write_is_lost("small:3000 transparent-huge:2048");
}

#[test]
fn of_shared_memory_and_files_no_write_is_lost() {
    no_write_is_lost("memfd:3000 memfd-transparent-huge:2048 disk:500");
}

#[test]
fn of_hugetlb_no_write_is_lost() {
    no_write_is_lost(&format!("hugetlb:{0} hugetlb-shared:{0}", huge(4)));
}

#[test]
fn of_private_file_mappings_no_write_is_lost() {
    no_write_is_lost("private-file:2000 small:100");
}

#[test]
fn exactly_the_other_processs_writes_are_named_and_nothing_is_left_after_stop() {
    for kind in ["small", "memfd", "private-file", "disk"] {
        let Some((mut process, mut log)) = started(&format!("{kind}:1000 small:10")) else { return };
        process.ask("populate 0");
        log.start().unwrap();
        assert_eq!(collected(&mut log, 0, 1000), [], "{kind}");
        for page in [3, 999, 500] {
            process.ask(&format!("write 0 {page}"));
        }
        process.ask("write 1 9");
        assert_eq!(collected(&mut log, 0, 1000), [3, 500, 999], "{kind}");
        assert_eq!(collected(&mut log, 0, 1000), [], "{kind}");
        assert_eq!(collected(&mut log, 1, 10), [9], "{kind}");
        assert_ne!(process.ask("protected"), "0", "{kind}");
        log.stop().unwrap();
        assert_eq!(process.ask("protected"), "0", "{kind}");
        assert_eq!(process.ask("watched"), "false", "{kind}");
        // The descriptor is kept, so it starts again.
        log.start().unwrap();
        process.ask("write 0 7");
        assert_eq!(collected(&mut log, 0, 1000), [7], "{kind}");
        drop(log);
        assert_eq!(process.ask("protected"), "0", "{kind}");
        assert_eq!(process.ask("watched"), "false", "{kind}");
    }
}

#[test]
fn anonymous_pages_that_the_other_process_frees_are_named() {
    let Some((mut process, mut log)) = started("small:1000") else { return };
    process.ask("populate 0");
    log.start().unwrap();
    process.ask("discard 0 100 16");
    assert_eq!(collected(&mut log, 0, 1000), (100..116).collect::<Vec<_>>());
    assert_eq!(process.ask("read 0 100"), "0");
    assert_eq!(collected(&mut log, 0, 1000), []);
    log.stop().unwrap();
    assert_eq!(process.ask("protected"), "0");
}

/// As a vhost-user back end maps guest RAM: the parts below and above 4 GiB at separate addresses, one of them twice.
#[test]
fn parts_of_a_block_are_numbered_by_the_block() {
    let Some(mut process) = Process::start("small:40 memfd:60 memfd:60") else { return };
    let part = |process: &Process, memory, first_page| MappedPart { addresses: process.addresses(memory), first_page };
    let parts = vec![part(&process, 1, 100), part(&process, 0, 20), part(&process, 2, 100)];
    let blocks = vec![MappedBlock { pages: 7, parts: vec![] }, MappedBlock { pages: 160, parts }];
    let Some(mut log) = log_of(&mut process, blocks) else { return };
    dirty_support::misuse_is_refused(&mut log, &[7, 160]);
    log.start().unwrap();
    for write in ["write 0 0", "write 0 39", "write 1 5", "write 2 5", "write 2 59"] {
        process.ask(write);
    }
    assert_eq!(collected(&mut log, 1, 160), [20, 59, 105, 159]);
    assert_eq!(collected(&mut log, 1, 160), []);
    assert_eq!(collected(&mut log, 0, 7), []);
    log.stop().unwrap();
}

#[test]
fn the_union_of_all_processes_that_map_the_memory_is_the_log_of_the_guest() {
    let file = memory_file(300);
    let kind = format!("/proc/{}/fd/{}:300", std::process::id(), file.as_raw_fd());
    let Some(mut first) = Process::start(&kind) else { return };
    let Some(mut second) = Process::start(&kind) else { return };
    let (of_first, of_second) = (first.blocks(), second.blocks());
    let Some(log_of_first) = log_of(&mut first, of_first) else { return };
    let Some(log_of_second) = log_of(&mut second, of_second) else { return };
    let mut log = UnionLog::new(vec![Box::new(log_of_first), Box::new(log_of_second)]);
    log.start().unwrap();
    first.ask("write 0 3");
    second.ask("write 0 4");
    assert_eq!(collected(&mut log, 0, 300), [3, 4]);
    second.ask("write 0 3");
    assert_eq!(collected(&mut log, 0, 300), [3]);
    log.stop().unwrap();
    assert_eq!([first.ask("protected"), second.ask("protected")], ["0", "0"]);
}

#[test]
fn a_descriptor_is_usable_in_any_state_in_which_it_was_passed() {
    // The descriptor that Cloud Hypervisor passes has had its handshake, and watches guest RAM.
    for (features, extra) in
        [(FEATURES, ""), (FEATURES, "watched"), (FEATURES | MISSING_SHMEM, "missing"), (FEATURES | MISSING_SHMEM, "")]
    {
        let Some(mut process) = Process::start("memfd:200 small:300") else { return };
        let fd = process.userfaultfd_with(features, extra);
        let userfault = Userfault::from_descriptor(fd, FEATURES).unwrap();
        let mut log = WriteProtectLog::of_process(process.target(), userfault, process.blocks()).unwrap();
        log.start().unwrap();
        process.ask("write 1 17");
        // The write would wait for ever if missing pages were still watched.
        process.ask("write 0 150");
        assert_eq!(collected(&mut log, 0, 200), [150], "{extra}");
        assert_eq!(collected(&mut log, 1, 300), [17], "{extra}");
        log.stop().unwrap();
        assert_eq!(process.ask("protected"), "0");
    }
}

#[test]
fn a_descriptor_without_the_features_is_refused() {
    let Some(mut process) = Process::start("small:10") else { return };
    let fd = process.userfaultfd_with(MISSING_SHMEM, "");
    let userfault = Userfault::from_descriptor(fd, MISSING_SHMEM).unwrap();
    let error = WriteProtectLog::of_process(process.target(), userfault, process.blocks()).unwrap_err().to_string();
    assert!(error.contains("opened without WP_ASYNC"), "{error}");
}

#[test]
fn memory_that_the_descriptor_does_not_watch_is_an_error() {
    for kind in ["small", "memfd"] {
        // A descriptor of another process with memory at the same addresses.
        let Some(mut process) = Process::start(&format!("{kind}:100")) else { return };
        let Some(mut other) = Process::start(&format!("{kind}:100")) else { return };
        let own = WriteProtectLog::of_process(
            process.target(),
            Userfault::from_descriptor(other.userfaultfd(), FEATURES).unwrap(),
            process.blocks(),
        );
        // If the other process has nothing at these addresses, the registration fails; otherwise the scan does.
        let error = own.unwrap().start().unwrap_err();
        assert!(matches!(error, DirtyLogError::NotWatched { .. } | DirtyLogError::Userfault(_)), "{kind}: {error}");
        assert_eq!([process.ask("protected"), other.ask("protected")], ["0", "0"]);

        let blocks = process.blocks();
        let Some(mut log) = log_of(&mut process, blocks) else { return };
        log.start().unwrap();
        process.ask("map-anew 0 50 10");
        let error = log.collect(0, &mut PageBitmap::new(100)).unwrap_err();
        assert!(matches!(error, DirtyLogError::NotWatched { .. }), "{kind}: {error}");
        assert!(error.to_string().contains("mapped anew since the dirty log was started"), "{error}");
        drop(log);
        assert_eq!(process.ask("protected"), "0");
    }
}

#[test]
fn memory_that_another_userfaultfd_watches_or_that_is_not_mapped_is_refused_and_nothing_is_left() {
    let Some(mut process) = Process::start("memfd:100 small:100") else { return };
    let mut blocks = process.blocks();
    let Some(mut first) = log_of(&mut process, vec![blocks[1].clone()]) else { return };
    let Some(mut log) = log_of(&mut process, blocks.clone()) else { return };
    first.start().unwrap();
    for error in [log.check().unwrap_err(), log.start().unwrap_err()] {
        let error = error.to_string();
        assert!(error.contains("another userfaultfd watches part of it"), "{error}");
    }
    first.stop().unwrap();
    log.check().unwrap();
    assert_eq!(process.ask("protected"), "0");
    assert_eq!(process.ask("watched"), "false");

    blocks[1].parts[0].addresses = PAGE_SIZE..101 * PAGE_SIZE;
    let fd = process.userfaultfd();
    let userfault = Userfault::from_descriptor(fd, FEATURES).unwrap();
    let mut log = WriteProtectLog::of_process(process.target(), userfault, blocks).unwrap();
    let error = log.start().unwrap_err();
    assert!(matches!(error, DirtyLogError::Unmapped { block: 1, .. }), "{error}");
    assert!(error.to_string().contains(&format!("process {}", process.pid())), "{error}");
    assert_eq!(process.ask("protected"), "0");
    assert_eq!(process.ask("watched"), "false");
}

#[test]
fn a_process_that_has_ended_is_an_error_with_the_reason_except_for_stop() {
    for how in ["kill", "exec"] {
        for kind in ["small", "memfd"] {
            let Some((mut process, mut log)) = started(&format!("{kind}:100 {kind}:100")) else { return };
            log.start().unwrap();
            process.ask("write 0 5");
            if how == "kill" {
                process.kill();
            } else {
                process.exec();
            }
            let error = log.collect(0, &mut PageBitmap::new(100)).unwrap_err();
            assert!(matches!(error, DirtyLogError::Gone { pid } if pid == process.pid()), "{how} {kind}: {error}");
            assert!(error.to_string().contains("has ended or has replaced its program"), "{error}");
            log.stop().unwrap();
            let error = log.start().unwrap_err();
            if how == "kill" {
                assert!(matches!(error, DirtyLogError::Gone { .. }), "{how} {kind}: {error}");
            }
        }
    }
}

/// Makes a child the tracker: `PID FD ADDRESS PAGES`.
const TRACKER: &str = "STERNA_DIRTY_LOG_TRACKER";

#[test]
fn as_the_tracker() {
    let Ok(what) = std::env::var(TRACKER) else { return };
    let words: Vec<usize> = what.split(' ').map(|word| word.parse().unwrap()).collect();
    let [pid, fd, start, pages] = words[..] else { panic!("{what}") };
    let target = sterna_memory::place::TargetProcess::open(pid as i32).unwrap();
    let userfault = Userfault::from_descriptor(copy_of(pid as i32, fd as i32), FEATURES).unwrap();
    let parts = vec![MappedPart { addresses: start..start + pages * PAGE_SIZE, first_page: 0 }];
    let blocks = vec![MappedBlock { pages: pages as u64, parts }];
    let mut log = WriteProtectLog::of_process(target.into(), userfault, blocks).unwrap();
    log.start().unwrap();
    println!("\ntracking");
    // Until the parent kills this process, or has ended.
    std::io::stdin().lines().for_each(drop);
}

#[test]
fn a_tracker_that_is_killed_leaves_nothing_in_the_process() {
    for kind in ["small", "memfd"] {
        let Some(mut process) = Process::start(&format!("{kind}:500")) else { return };
        let blocks = process.blocks();
        if log_of(&mut process, blocks).is_none() {
            return;
        }
        process.ask("populate 0");
        let fd = process.ask("userfaultfd");
        let mut tracker = Command::new(std::env::current_exe().unwrap())
            .args(["dirty_other_process::as_the_tracker", "--exact", "--nocapture", "--test-threads=1"])
            .env(TRACKER, format!("{} {fd} {} 500", process.pid(), process.addresses(0).start))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(tracker.stdout.take().unwrap()).lines();
        let is_tracking = lines.map(Result::unwrap).any(|line| line == "tracking");
        process.ask(&format!("close {fd}"));
        let protected = process.ask("protected");
        tracker.kill().unwrap();
        tracker.wait().unwrap();
        if !is_tracking {
            return println!("skipped: one child may not trace the other here");
        }
        assert_eq!(protected, "500", "{kind}");
        assert_eq!(process.ask("protected"), "0", "{kind}");
        assert_eq!(process.ask("watched"), "false", "{kind}");
        process.ask("write 0 3");
    }
}

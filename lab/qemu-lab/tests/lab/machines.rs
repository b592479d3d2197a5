//! Real machines: both guests boot under each release of QEMU, and after a plain QEMU-to-QEMU migration the memory is
//! correct, by the guests' own checks and by a comparison from outside.

use std::path::Path;

use crate::qmp::{LONG, Qmp};
use serde_json::json;
use sterna_qemu_lab::{
    Backend, Dirty, Error, Fill, Guest, LinuxGuest, Pattern, Qemu, QemuOptions, QemuVersion, boot_sector, huge, net,
    ram, skip_if_unavailable,
};

/// Moves the running guest by QEMU alone. Afterwards both machines are stopped and the destination is loaded.
fn migrate(source: &Qemu, destination: &Qemu) -> (Qmp, Qmp) {
    let uri = format!("unix:{}", destination.directory().join("migration.sock").display());
    let (mut from, mut to) = (Qmp::connect(source.qmp_path()), Qmp::connect(destination.qmp_path()));
    let capabilities =
        ["events", "return-path", "late-block-activate"].map(|name| json!({ "capability": name, "state": true }));
    for qmp in [&mut from, &mut to] {
        qmp.run("migrate-set-capabilities", &json!({ "capabilities": capabilities }));
    }
    from.run("migrate-set-parameters", &json!({ "max-bandwidth": 0 }));
    to.run("migrate-incoming", &json!({ "uri": uri }));
    to.run("stop", &json!({}));
    from.run("migrate", &json!({ "uri": uri }));
    to.wait_migration("completed");
    from.wait_migration("completed");
    (from, to)
}

fn linux(fill: Fill) -> LinuxGuest {
    LinuxGuest { fill, memory: Some(96 << 20), dirty_rate: 4 << 20, ..LinuxGuest::default() }
}

fn small_linux(version: QemuVersion, guest: LinuxGuest) -> QemuOptions {
    let mut options = QemuOptions::new(version, Guest::Linux(guest));
    options.memory = 256 << 20;
    options
}

fn unexpected(differing: &[u64]) -> Vec<u64> {
    differing.iter().copied().filter(|offset| !ram::CHANGED_BY_LOADING.contains(offset)).collect()
}

/// Number of attempts with QEMU 7.2, which under TCG itself sometimes loses writes.
const TRIES_OF_7_2: u32 = 4;

fn a_moved_linux_guest_finds_its_memory_right(version: QemuVersion, guest: &LinuxGuest) {
    let tries = if version == QemuVersion::V7_2 { TRIES_OF_7_2 } else { 1 };
    for left in (0..tries).rev() {
        match move_linux_guest(version, guest.clone()) {
            Some(differing) if !differing.is_empty() && left > 0 => {
                println!("QEMU lost pages at {differing:x?}: again");
            }
            Some(differing) => return assert_eq!(differing, [0u64; 0]),
            None => return,
        }
    }
}

/// Moves a guest and makes it verify its memory. If memory differs while both are paused, returns the differing pages
/// instead.
fn move_linux_guest(version: QemuVersion, guest: LinuxGuest) -> Option<Vec<u64>> {
    let options = small_linux(version, guest);
    let source = skip_if_unavailable(Qemu::start(&options))?;
    let ready = source.guest().wait_ready(LONG).expect("the guest boots");
    assert_eq!(ready.pages, (96 << 20) / 4096);
    let destination = Qemu::start(&options.incoming()).expect("a destination");
    let before = source.guest().wait_tick_after(2, LONG).expect("the guest counts");
    let (_from, mut to) = migrate(&source, &destination);
    let differing = ram::compare(source.pid(), destination.pid(), options.memory).expect("both can be read");
    let differing = unexpected(&differing);
    if !differing.is_empty() {
        return Some(differing);
    }
    to.run("cont", &json!({}));
    let after = destination.guest().wait_tick_after(before.number + 1, LONG).expect("the counter goes on");
    assert!(after.milliseconds > before.milliseconds && after.dirtied > before.dirtied, "{before:?} {after:?}");
    let verified = destination.guest().verify(LONG).expect("the guest verifies");
    assert_eq!((verified.bad, verified.table_whole, verified.pages), (0, true, ready.pages));
    assert_eq!(destination.guest().bad_lines(), [""; 0]);
    Some(differing)
}

#[test]
fn a_linux_guest_of_mixed_memory_moves_by_qemu_7_2() {
    a_moved_linux_guest_finds_its_memory_right(QemuVersion::V7_2, &linux(Fill::Mixed));
}

#[test]
fn a_linux_guest_of_mixed_memory_moves_by_qemu_10_0() {
    a_moved_linux_guest_finds_its_memory_right(QemuVersion::V10_0, &linux(Fill::Mixed));
}

#[test]
fn a_linux_guest_that_only_renews_stamps_moves() {
    let guest =
        LinuxGuest { dirty: Dirty::Stamp, pattern: Pattern::Hot, dirty_span: Some(32 << 20), ..linux(Fill::Corpus) };
    a_moved_linux_guest_finds_its_memory_right(QemuVersion::V10_0, &guest);
}

#[test]
fn every_fill_is_accepted_and_verifies() {
    for fill in Fill::ALL {
        let guest = LinuxGuest { memory: Some(8 << 20), ..linux(fill) };
        let Some(qemu) = skip_if_unavailable(Qemu::start(&small_linux(QemuVersion::V10_0, guest))) else { return };
        qemu.guest().wait_ready(LONG).unwrap_or_else(|error| panic!("{fill:?}: {error}"));
        let dirtied = qemu.guest().wait_tick_after(2, LONG).expect("ticks").dirtied;
        assert!(dirtied > 0, "{fill:?}");
        let verified = qemu.guest().verify(LONG).expect("an answer");
        assert_eq!((verified.bad, verified.table_whole, verified.pages), (0, true, 2048), "{fill:?}");
    }
}

#[test]
fn the_guest_finds_a_page_that_is_lost_in_its_memory() {
    let guest = LinuxGuest { dirty_rate: 0, verify_rate: 0, ..linux(Fill::Random) };
    let Some(source) = skip_if_unavailable(Qemu::start(&small_linux(QemuVersion::V10_0, guest))) else { return };
    source.guest().wait_ready(LONG).expect("the guest boots");
    let mut qmp = Qmp::connect(source.qmp_path());
    qmp.run("stop", &json!({}));
    let ram = ram::Ram::open(source.pid(), 256 << 20).expect("RAM is found");
    // Finds the guest's page 1000 by its stamp, wherever the guest's kernel has placed it.
    let mut stamp = b"STERNApg".to_vec();
    stamp.extend(1000u64.to_le_bytes());
    let mut chunk = vec![0; 1 << 20];
    let address = (0..ram.len()).step_by(chunk.len()).find_map(|offset| {
        ram.read(offset, &mut chunk).expect("RAM is read");
        let page = chunk.chunks(4096).position(|page| page.starts_with(&stamp))?;
        Some(offset + page as u64 * 4096)
    });
    let address = address.expect("the page is in RAM");
    let memory = std::fs::File::options().write(true).open(format!("/proc/{}/mem", source.pid())).expect("opened");
    std::os::unix::fs::FileExt::write_all_at(&memory, &[0; 4096], ram.address() + address).expect("written");
    qmp.run("cont", &json!({}));
    let verified = source.guest().verify(LONG).expect("an answer");
    assert_eq!((verified.bad, verified.table_whole), (1, true));
    let bad = source.guest().bad_lines();
    assert!(bad.len() == 1 && bad[0].contains("page 1000 expected generation 1 found lost"), "{bad:?}");
}

#[test]
fn the_guest_obeys_its_console() {
    let Some(mut qemu) = skip_if_unavailable(Qemu::start(&small_linux(QemuVersion::V7_2, linux(Fill::Text)))) else {
        return;
    };
    let guest = qemu.guest();
    guest.wait_ready(LONG).expect("the guest boots");
    guest.stop_dirtying().expect("sent");
    // A pass that was in progress at the stop has ended when the guest answers.
    let stopped = guest.verify(LONG).expect("an answer").generation;
    let tick = guest.last_tick().map_or(0, |tick| tick.number);
    guest.wait_tick_after(tick + 2, LONG).expect("it still counts");
    assert_eq!(guest.verify(LONG).expect("an answer").generation, stopped);
    guest.set_dirty_rate(1 << 20).expect("sent");
    guest.go_on_dirtying().expect("sent");
    let tick = guest.last_tick().map_or(0, |tick| tick.number);
    guest.wait_tick_after(tick + 3, LONG).expect("it still counts");
    assert!(guest.verify(LONG).expect("an answer").generation > stopped);
    guest.power_off().expect("sent");
    assert!(qemu.wait_exit(LONG).expect("it powers off").success());
}

#[test]
fn a_setting_that_the_guest_does_not_know_is_an_error_in_words() {
    let guest = LinuxGuest { kernel_arguments: "sterna.colour=red".into(), ..linux(Fill::Zeros) };
    let Some(qemu) = skip_if_unavailable(Qemu::start(&small_linux(QemuVersion::V10_0, guest))) else { return };
    let error = qemu.guest().wait_ready(LONG).expect_err("refused");
    assert!(matches!(&error, Error::Guest(text) if text.contains("colour")), "{error}");
}

#[test]
fn an_option_that_qemu_refuses_is_an_error_in_qemus_words() {
    let mut options = QemuOptions::new(QemuVersion::V7_2, Guest::None);
    options.machine = "pc-q35-99.9".into();
    let Err(error) = Qemu::start(&options).map(drop) else { panic!("there is no such machine") };
    if error.is_absence() {
        eprintln!("skipped: {error}");
        return;
    }
    assert!(error.to_string().contains("unsupported machine type"), "{error}");
}

#[test]
fn a_boot_sector_guest_moves_over_every_backing() {
    for version in QemuVersion::ALL {
        let mut options = QemuOptions::new(version, Guest::BootSector);
        let tmpfs = huge::HugeTmpfs::mount(512 << 20);
        let mut backends = vec![Backend::Anonymous, Backend::Memfd];
        match &tmpfs {
            Ok(tmpfs) => backends.push(Backend::File { path: tmpfs.path().to_owned() }),
            Err(error) => eprintln!("skipped huge tmpfs: {error}"),
        }
        for backend in backends {
            options.backend = backend;
            let Some(source) = skip_if_unavailable(Qemu::start(&options)) else { return };
            // After some passes the counters differ from their initial values.
            source.console().wait_for_bytes(5, LONG).expect("letters");
            let destination = Qemu::start(&options.incoming()).expect("a destination");
            let (_from, mut to) = migrate(&source, &destination);
            let what = format!("{version} {:?}", options.backend);
            let differing = ram::compare(source.pid(), destination.pid(), options.memory).expect("both can be read");
            assert_eq!(unexpected(&differing), [0u64; 0], "{what}");
            let ram = ram::Ram::open(destination.pid(), options.memory).expect("RAM is found");
            let passes = boot_sector::check(&ram).unwrap_or_else(|error| panic!("{what}: {error}"));
            assert!(passes > 1, "{what}: {passes}");
            to.run("cont", &json!({}));
            destination.console().wait_for_bytes(5, LONG).expect("letters after the move");
            to.run("stop", &json!({}));
            assert!(boot_sector::check(&ram).expect("still right") > passes, "{what}");
        }
    }
}

#[test]
fn reserved_huge_pages_back_a_machine() {
    let options = QemuOptions {
        backend: Backend::MemfdHuge,
        preallocate: true,
        ..QemuOptions::new(QemuVersion::V10_0, Guest::BootSector)
    };
    let Some(_pages) = skip_if_unavailable(huge::HugePages::reserve(options.memory)) else { return };
    let Some(qemu) = skip_if_unavailable(Qemu::start(&options)) else { return };
    qemu.console().wait_for_bytes(3, LONG).expect("letters");
    let ram = ram::Ram::open(qemu.pid(), options.memory).expect("RAM is found");
    let maps = std::fs::read_to_string(format!("/proc/{}/smaps", qemu.pid())).expect("smaps");
    let block = maps.split_once(&format!("{:x}-", ram.address())).expect("the block is mapped").1;
    let page = block.lines().find(|line| line.starts_with("KernelPageSize:")).expect("a page size");
    assert!(page.ends_with(" 2048 kB"), "{page}");
}

#[test]
fn a_machine_runs_in_the_namespace_and_on_the_processor_it_is_given() {
    let Some(network) = skip_if_unavailable(net::Network::new(net::Link::default())) else { return };
    let mut options = QemuOptions::new(QemuVersion::V7_2, Guest::None);
    options.namespace = Some(network.b().to_owned());
    options.host_cpus = Some("0".into());
    let Some(qemu) = skip_if_unavailable(Qemu::start(&options)) else { return };
    let proc = format!("/proc/{}", qemu.pid());
    let status = std::fs::read_to_string(format!("{proc}/status")).expect("status");
    assert!(status.lines().any(|line| line == "Cpus_allowed_list:\t0"), "{status}");
    assert!(status.starts_with("Name:\tqemu-system"), "the pid is QEMU's own, not a wrapper's: {status}");
    let namespaces = std::fs::read_link(format!("{proc}/ns/net")).expect("its namespace");
    assert_ne!(namespaces, std::fs::read_link("/proc/self/ns/net").expect("our namespace"));
}

#[test]
fn a_machine_outlives_the_thread_that_started_it() {
    let started =
        std::thread::spawn(|| skip_if_unavailable(Qemu::start(&QemuOptions::new(QemuVersion::V7_2, Guest::None))));
    let Some(mut qemu) = started.join().expect("started") else { return };
    let mut qmp = Qmp::connect(qemu.qmp_path());
    assert_eq!(qmp.run("query-status", &json!({}))["running"], true);
    qmp.run("quit", &json!({}));
    assert!(qemu.wait_exit(LONG).expect("it quits").success());
}

#[test]
fn a_killed_machine_is_gone_with_its_files() {
    let Some(qemu) = skip_if_unavailable(Qemu::start(&QemuOptions::new(QemuVersion::V10_0, Guest::None))) else {
        return;
    };
    let (pid, directory) = (qemu.pid(), qemu.directory().to_owned());
    assert!(qemu.is_running() && qemu.qmp_path().exists());
    drop(qemu);
    assert!(!directory.exists());
    assert!(!Path::new(&format!("/proc/{pid}")).exists());
}

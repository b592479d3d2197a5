//! QMP, settings, discovery and placement against the real QEMUs that `scripts/setup` unpacks. QEMU itself reads Sterna's bytes
//! back (`xp`), which proves that the discovered address is the guest's memory and nothing else.

use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_memory::place::PlacementMethod;
use sterna_qemu::discover::{Backing, FileKind, Freshness, RamBlock, discover};
use sterna_qemu::placement::{Placement, choose};
use sterna_qemu::qmp::{Qmp, QmpError};
use sterna_qemu::settings::{RequiredSettings, Role, Settings, SettingsError};
use sterna_qemu_lab::{Guest, QemuOptions, QemuVersion, Tools, skip_if_unavailable};

const SIZE: u64 = 64 << 20;
/// A limit that no correct test reaches, also on a busy machine.
const LONG: Duration = Duration::from_secs(300);

/// A QEMU that ends with the test.
struct Qemu {
    child: Child,
    directory: tempfile::TempDir,
}

impl Qemu {
    /// Starts a QEMU; `None`, with the reason printed, if it was not unpacked.
    fn start(version: QemuVersion, arguments: &[&str]) -> Option<Self> {
        let tools = skip_if_unavailable(Tools::locate())?;
        let mut command = skip_if_unavailable(tools.qemu(version))?;
        let directory = tempfile::tempdir().unwrap();
        let child = command
            .args(["-nodefaults", "-display", "none", "-accel", "tcg", "-M", version.machine()])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", directory.path().join("qmp").display())])
            .args(arguments)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        Some(Self { child, directory })
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("qmp")
    }

    fn qmp(&mut self) -> Qmp {
        let deadline = Instant::now() + LONG;
        loop {
            match Qmp::connect(self.path()) {
                Ok(qmp) => return qmp,
                Err(QmpError::Connect { .. }) if Instant::now() < deadline => {
                    assert_eq!(self.child.try_wait().unwrap(), None, "QEMU ended");
                    std::thread::yield_now();
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn block<'a>(blocks: &'a [RamBlock], name: &str) -> &'a RamBlock {
    blocks.iter().find(|block| block.name == name).unwrap_or_else(|| panic!("no {name} in {blocks:?}"))
}

/// Returns the bytes that QEMU reads at a guest address. By `xp`, because QEMU 11.1 refuses `pmemsave` and `memsave` as long as it waits for a guest.
fn guest_memory(qmp: &Qmp, address: u64, size: usize) -> Vec<u8> {
    const WORDS: usize = 1024;
    assert_eq!(size % 8, 0, "read by words of 8 bytes");
    let mut memory = Vec::with_capacity(size);
    while memory.len() < size {
        let words = WORDS.min((size - memory.len()) / 8);
        let dump = qmp.human(&format!("xp /{words}gx {:#x}", address + memory.len() as u64)).unwrap();
        let values =
            dump.lines().filter_map(|line| line.split_once(": ")).flat_map(|(_, line)| line.split_whitespace());
        for value in values {
            let digits = value.strip_prefix("0x").unwrap_or_else(|| panic!("{dump}"));
            memory.extend(u64::from_str_radix(digits, 16).unwrap().to_le_bytes());
        }
    }
    memory
}

/// Writes through `place` and makes QEMU read it back.
fn prove(qmp: &Qmp, block: &RamBlock, method: PlacementMethod) {
    let Placement::Direct { place, why } = choose(block) else {
        panic!("in-stream: {:?}", choose(block));
    };
    assert_eq!(place.method(), method, "{why}");
    assert_eq!(place.size(), SIZE);
    let pattern: Vec<u8> = (0..300_000_u32).map(|i| (i % 253) as u8 + 1).collect();
    for address in [1 << 20, SIZE - 300_000] {
        place.write(address, &pattern).unwrap();
        assert!(guest_memory(qmp, address, pattern.len()) == pattern, "at {address:#x}");
    }
    place.zero(1 << 20, 200_000).unwrap();
    let memory = guest_memory(qmp, 1 << 20, pattern.len());
    assert!(memory[..200_000].iter().all(|byte| *byte == 0));
    assert!(memory[200_000..] == pattern[200_000..]);

    let Freshness::Fresh(touched) = block.freshness() else {
        panic!("not fresh: {:?}", block.freshness());
    };
    assert!(touched.iter().any(|range| range.end == SIZE), "{touched:?}");
}

fn with_backend(backend: &str) -> [&str; 8] {
    ["-m", "64M", "-object", backend, "-machine", "memory-backend=ram0", "-incoming", "defer"]
}

#[test]
fn default_memory_is_found_and_written_by_process() {
    for version in QemuVersion::ALL {
        let Some(mut qemu) = Qemu::start(version, &["-m", "64M", "-vga", "std", "-incoming", "defer"]) else { return };
        let qmp = qemu.qmp();
        assert_eq!(qmp.peer_pid(), Some(qemu.child.id() as i32));
        let blocks = discover(&qmp).unwrap();
        let ram = block(&blocks, "pc.ram");
        let location = ram.location.as_ref().unwrap();
        assert!(matches!(location.backing, Backing::Anonymous), "{location:?}");
        assert!(!location.pinned && !location.preallocated);
        assert_eq!((ram.used, ram.page_size), (SIZE, 4096));
        // Nothing has run yet: all but a corner is known to be fresh.
        assert!(ram.freshness().touched_bytes(SIZE) <= 4 << 20, "{:?}", ram.freshness());
        prove(&qmp, ram, PlacementMethod::ProcessWrite);

        for name in ["pc.bios", "0000:00:01.0/vga.vram", "/rom@etc/acpi/tables"] {
            let Placement::InStream { why } = choose(block(&blocks, name)) else { panic!("{name} is written") };
            assert!(why.contains("device or the firmware"), "{why}");
        }
    }
}

#[test]
fn qemu_is_found_behind_a_socket_that_was_handed_over() {
    for version in QemuVersion::ALL {
        // The laboratory opens the QMP socket and passes it on, as libvirt does; QEMU's own `listen` makes it the peer.
        let options = QemuOptions { memory: SIZE, ..QemuOptions::new(version, Guest::None) }.incoming();
        let Some(qemu) = skip_if_unavailable(sterna_qemu_lab::Qemu::start(&options)) else { return };
        let qmp = Qmp::connect(qemu.qmp_path()).unwrap();
        assert_eq!(qmp.peer_pid(), Some(qemu.pid() as i32));
        let blocks = discover(&qmp).unwrap();
        let ram = block(&blocks, "pc.ram");
        assert_eq!(ram.location.as_ref().unwrap().process.pid(), qemu.pid() as i32);
        prove(&qmp, ram, PlacementMethod::ProcessWrite);
    }
}

#[test]
fn shared_memfd_is_written_as_a_file() {
    for version in QemuVersion::ALL {
        let backend = with_backend("memory-backend-memfd,id=ram0,size=64M,share=on");
        let Some(mut qemu) = Qemu::start(version, &backend) else { return };
        let qmp = qemu.qmp();
        let blocks = discover(&qmp).unwrap();
        let ram = block(&blocks, "ram0");
        let location = ram.location.as_ref().unwrap();
        let Backing::Shared { kind: FileKind::Memfd { huge }, offset: 0, .. } = location.backing else {
            panic!("{location:?}");
        };
        let method = if huge { PlacementMethod::Mapping } else { PlacementMethod::FileWrite };
        prove(&qmp, ram, method);
    }
}

#[test]
fn private_memfd_is_written_by_process() {
    for version in QemuVersion::ALL {
        let backend = with_backend("memory-backend-memfd,id=ram0,size=64M,share=off");
        let Some(mut qemu) = Qemu::start(version, &backend) else { return };
        let qmp = qemu.qmp();
        let blocks = discover(&qmp).unwrap();
        let ram = block(&blocks, "ram0");
        assert!(matches!(ram.location.as_ref().unwrap().backing, Backing::PrivateFile));
        let Placement::Direct { place, .. } = choose(ram) else { panic!("{:?}", choose(ram)) };
        assert_eq!(place.method(), PlacementMethod::ProcessWrite);
        place.write(1 << 20, &[0x5a; 8192]).unwrap();
        assert_eq!(guest_memory(&qmp, 1 << 20, 8192), [0x5a; 8192]);
        assert!(matches!(ram.freshness(), Freshness::Touched(_)));
    }
}

#[test]
fn file_in_memory_is_written_and_file_on_disk_is_left_to_qemu() {
    let memory = rustix::fs::statfs("/dev/shm").is_ok_and(|system| system.f_type == 0x0102_1994);
    for version in QemuVersion::ALL {
        for (directory, direct) in [("/dev/shm", true), (env!("CARGO_TARGET_TMPDIR"), false)] {
            if direct && !memory {
                eprintln!("skipped: /dev/shm is no tmpfs here");
                continue;
            }
            let directory = tempfile::tempdir_in(directory).unwrap();
            let path = directory.path().join("ram");
            let backend = format!("memory-backend-file,id=ram0,size=64M,share=on,mem-path={}", path.display());
            let Some(mut qemu) = Qemu::start(version, &with_backend(&backend)) else { return };
            let qmp = qemu.qmp();
            let blocks = discover(&qmp).unwrap();
            let ram = block(&blocks, "ram0");
            if direct {
                let location = ram.location.as_ref().unwrap();
                let Backing::Shared { kind: FileKind::Tmpfs { huge }, .. } = location.backing else {
                    panic!("{location:?}");
                };
                prove(&qmp, ram, if huge { PlacementMethod::Mapping } else { PlacementMethod::FileWrite });
            } else if rustix::fs::statfs(directory.path()).unwrap().f_type != 0x0102_1994 {
                let Placement::InStream { why } = choose(ram) else { panic!("{:?}", choose(ram)) };
                assert!(why.contains("on disk"), "{why}");
            }
        }
    }
}

#[test]
fn preallocated_memory_counts_as_touched() {
    for version in QemuVersion::ALL {
        let backend = with_backend("memory-backend-memfd,id=ram0,size=64M,share=on,prealloc=on");
        let Some(mut qemu) = Qemu::start(version, &backend) else { return };
        let qmp = qemu.qmp();
        let blocks = discover(&qmp).unwrap();
        assert_eq!(block(&blocks, "ram0").freshness(), Freshness::Touched("it was preallocated"));
    }
}

#[test]
fn qemu_that_ends_makes_writing_an_error() {
    for version in QemuVersion::ALL {
        let Some(mut qemu) = Qemu::start(version, &["-m", "64M", "-incoming", "defer"]) else { return };
        let qmp = qemu.qmp();
        let blocks = discover(&qmp).unwrap();
        let Placement::Direct { place, .. } = choose(block(&blocks, "pc.ram")) else { panic!() };
        let pid = qemu.child.id();
        drop(qemu);
        let error = place.write(0, &[1; 4096]).unwrap_err().to_string();
        assert_eq!(
            error,
            format!("process {pid} has ended or runs another program: its memory can no longer be written")
        );
        let Placement::InStream { why } = choose(block(&blocks, "pc.ram")) else { panic!() };
        assert!(why.contains("has ended"), "{why}");
    }
}

fn settings(qmp: &Qmp) -> (Value, Value) {
    (
        qmp.execute("query-migrate-capabilities", json!({})).unwrap(),
        qmp.execute("query-migrate-parameters", json!({})).unwrap(),
    )
}

fn wanted(role: Role) -> RequiredSettings {
    RequiredSettings {
        role,
        channels: 4,
        downtime_limit: Some(Duration::from_millis(250)),
        pause_before_switchover: true,
    }
}

#[test]
fn settings_are_made_and_put_back() {
    for version in QemuVersion::ALL {
        for (role, arguments) in [(Role::Source, &[][..]), (Role::Destination, &["-incoming", "defer"])] {
            let Some(mut qemu) = Qemu::start(version, &[&["-m", "64M"], arguments].concat()) else { return };
            let qmp = qemu.qmp();
            let before = settings(&qmp);
            let restore = Settings::apply(&qmp, &wanted(role)).unwrap();
            let now = Settings::read(&qmp).unwrap();
            for name in ["multifd", "return-path", "late-block-activate", "events"] {
                assert!(now.is_on(name), "{version} {name}");
            }
            assert_eq!(now.parameters["multifd-channels"], 4);
            assert_eq!(now.is_on("pause-before-switchover"), role == Role::Source);
            if role == Role::Source {
                assert_eq!(
                    (&now.parameters["max-bandwidth"], &now.parameters["downtime-limit"]),
                    (&json!(0), &json!(250))
                );
            }
            restore.restore().unwrap();
            assert_eq!(settings(&qmp), before, "{version} {role:?}");
        }
    }
}

#[test]
fn qemus_that_cannot_be_used_are_refused_untouched() {
    for version in QemuVersion::ALL {
        let incoming = ["-m", "64M", "-incoming", "tcp:127.0.0.1:0"];
        let Some(mut qemu) = Qemu::start(version, &incoming) else { return };
        let qmp = qemu.qmp();
        let before = settings(&qmp);
        for (role, expected) in [(Role::Destination, "already listens"), (Role::Source, "this is a destination")] {
            let error = Settings::apply(&qmp, &wanted(role)).unwrap_err();
            assert!(matches!(error, SettingsError::Refused { .. }) && error.to_string().contains(expected), "{error}");
        }
        assert_eq!(settings(&qmp), before);

        let mut qemu = Qemu::start(version, &["-m", "64M"]).unwrap();
        let qmp = qemu.qmp();
        let on = json!({ "capabilities": [{ "capability": "postcopy-ram", "state": true }] });
        qmp.execute("migrate-set-capabilities", on).unwrap();
        qmp.execute("migrate-set-parameters", json!({ "multifd-compression": "zstd" })).unwrap();
        let before = settings(&qmp);
        let error = Settings::apply(&qmp, &wanted(Role::Source)).unwrap_err();
        let SettingsError::Refused { reasons, .. } = &error else { panic!("{error}") };
        assert_eq!(reasons.len(), 2, "{error}");
        assert_eq!(settings(&qmp), before);
    }
}

#[test]
fn second_client_is_told_that_the_socket_is_busy() {
    for version in QemuVersion::ALL {
        let Some(mut qemu) = Qemu::start(version, &["-m", "64M", "-S"]) else { return };
        let first = qemu.qmp();
        let error = Qmp::connect_within(qemu.path(), Duration::from_millis(300)).unwrap_err();
        assert!(matches!(error, QmpError::Busy { .. }), "{error}");
        assert_eq!(first.status().unwrap(), "prelaunch");
        drop(first);
        assert_eq!(qemu.qmp().status().unwrap(), "prelaunch");
    }
}

#[test]
fn events_arrive_and_the_end_of_qemu_is_seen() {
    for version in QemuVersion::ALL {
        let Some(mut qemu) = Qemu::start(version, &["-m", "64M"]) else { return };
        let qmp = qemu.qmp();
        assert_eq!(qmp.query_migrate().unwrap().status, "none");
        let soon = || Instant::now() + LONG;
        qmp.execute("stop", json!({})).unwrap();
        let stop = qmp.wait_event("STOP", |_| true, soon()).unwrap().unwrap();
        assert!(stop.time_us.is_some());
        qmp.execute("quit", json!({})).unwrap();
        qmp.wait_event("SHUTDOWN", |data| data["reason"] == "host-qmp-quit", soon()).unwrap().unwrap();
        let closed = qmp.next_event(soon()).unwrap_err();
        assert!(matches!(closed, QmpError::Closed { .. }), "{closed}");
        assert!(qemu.child.wait().unwrap().success());
    }
}

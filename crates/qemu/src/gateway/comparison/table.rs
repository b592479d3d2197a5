//! Pairs of machines, real QEMUs that have not begun to run: each pair that does not fit has one difference, which the comparison names; and
//! pairs that only look different fit.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::Path;

use sterna_qemu_lab::{Accel, Guest, Qemu, QemuOptions, QemuVersion, skip_if_unavailable};
use sterna_wire::description::Description;

use super::{compare, describe};
use crate::qmp::Qmp;

const MIB: u64 = 1 << 20;

/// The source of most pairs. `DIR` is the directory of the images.
const BASE: &[&str] = &[
    "-S -cpu Nehalem -smp 2,sockets=1,cores=2 -machine smm=on -m slots=2,maxmem=1G",
    "-uuid 6d0f1c6e-0001-4000-8000-000000000001",
    "-device pcie-root-port,id=rp,addr=04.0,chassis=1 -device virtio-rng-pci,bus=rp",
    "-drive if=none,id=d,file=DIR/disk.raw,format=raw -device virtio-blk-pci,drive=d,addr=05.0",
    "-netdev hubport,hubid=0,id=n -device virtio-net-pci,netdev=n,addr=06.0,mac=52:54:00:00:00:01",
    "-device virtio-serial-pci,addr=07.0,id=vs -chardev null,id=c -device virtserialport,chardev=c,bus=vs.0",
    "-device qemu-xhci,addr=08.0,id=usb -device usb-tablet,bus=usb.0,port=1",
    "-device virtio-scsi-pci,addr=09.0,id=scsi",
    "-drive if=none,id=cd,file=DIR/cd.iso,format=raw,readonly=on -device scsi-cd,drive=cd,bus=scsi.0,scsi-id=1",
    "-device VGA,addr=0a.0",
    "-object memory-backend-ram,id=m0,size=64M -device pc-dimm,memdev=m0",
];

/// What a destination has instead of some words of [`BASE`] (or, if these are none, in addition), and what is found.
type Row = (&'static str, &'static str, &'static [&'static str]);

/// Each has one difference for which the guest would be lost, or run wrongly: the names of the refusals.
const REFUSED: &[Row] = &[
    ("-cpu Nehalem", "-cpu Penryn", &["cpu.features"]),
    ("-cpu Nehalem", "-cpu Nehalem,sse4.2=off", &["cpu.features"]),
    ("-cpu Nehalem", "-cpu Nehalem,vendor=AuthenticAMD", &["cpu.vendor"]),
    ("-cpu Nehalem", "-cpu Nehalem,phys-bits=38", &["cpu.phys-bits"]),
    ("sockets=1,cores=2", "sockets=2,cores=1", &["cpu.topology"]),
    ("sockets=1,cores=2", "sockets=1,cores=1,threads=2", &["cpu.topology"]),
    // QEMU gives a disk a queue for each vCPU.
    (
        "-smp 2,sockets=1,cores=2",
        "-smp 1,sockets=1,cores=2,maxcpus=2",
        &[
            "cpu.count",
            "device.q35-pcihost/05.0/virtio-blk-device:num-queues",
            "device.q35-pcihost/05.0:vectors",
            "device.q35-pcihost/09.0/virtio-scsi-device:num_queues",
            "device.q35-pcihost/09.0:vectors",
        ],
    ),
    ("-smp 2,sockets=1,cores=2", "-smp 2,sockets=2,cores=2,maxcpus=4", &["cpu.topology"]),
    ("-machine smm=on", "-machine smm=off", &["machine.smm"]),
    ("", "-machine nvdimm=on", &["machine.nvdimm"]),
    ("", "-machine max-ram-below-4g=64M", &["machine.max-ram-below-4g", "memory.0x100000000", "memory.0x140000000"]),
    ("slots=2", "slots=3", &["machine.memory-slots"]),
    ("maxmem=1G", "maxmem=2G", &["machine.memory-max-size"]),
    ("", "-machine hpet=off", &["device.hpet"]),
    ("", "-machine pit=off", &["device.q35-pcihost/1f.0/isa-pcspk@97", "device.q35-pcihost/1f.0/isa-pit@64"]),
    ("", "-machine vmport=off", &["device.q35-pcihost/1f.0/vmmouse", "device.q35-pcihost/1f.0/vmport"]),
    ("", "-machine sata=off", &["device.q35-pcihost/1f.2"]),
    ("", "-machine smbus=off", &["device.q35-pcihost/1f.3"]),
    ("", "-device isa-serial", &["device.q35-pcihost/1f.0/isa-serial@760"]),
    ("", "-device pvpanic", &["device.q35-pcihost/1f.0/pvpanic"]),
    ("", "-device intel-iommu", &["device.intel-iommu"]),
    ("", "-device virtio-balloon-pci,addr=10.0", &["device.q35-pcihost/10.0"]),
    ("-device virtio-rng-pci,bus=rp", "", &["device.q35-pcihost/04.0/00.0"]),
    ("-device virtio-rng-pci,bus=rp", "-device virtio-balloon-pci,bus=rp", &["device.q35-pcihost/04.0/00.0"]),
    ("addr=08.0", "addr=0b.0", &["device.q35-pcihost/08.0", "device.q35-pcihost/0b.0"]),
    ("qemu-xhci", "nec-usb-xhci", &["device.q35-pcihost/08.0"]),
    ("usb-tablet", "usb-mouse", &["device.q35-pcihost/08.0/usb-mouse@1", "device.q35-pcihost/08.0/usb-tablet@1"]),
    ("port=1", "port=2", &["device.q35-pcihost/08.0/usb-tablet@1", "device.q35-pcihost/08.0/usb-tablet@2"]),
    ("virtio-blk-pci,", "virtio-blk-pci,vectors=5,", &["device.q35-pcihost/05.0:vectors"]),
    (
        "virtio-blk-pci,",
        "virtio-blk-pci,num-queues=3,vectors=3,",
        &["device.q35-pcihost/05.0/virtio-blk-device:num-queues"],
    ),
    ("virtio-blk-pci,", "virtio-blk-pci,packed=on,", &["device.q35-pcihost/05.0/virtio-blk-device:packed"]),
    ("virtio-blk-pci,", "virtio-blk-pci,discard=off,", &["device.q35-pcihost/05.0/virtio-blk-device:discard"]),
    ("virtio-blk-pci,", "virtio-blk-pci,serial=X7,", &["device.q35-pcihost/05.0/virtio-blk-device:serial"]),
    (
        "virtio-blk-pci,",
        "virtio-blk-pci,logical_block_size=4096,physical_block_size=4096,",
        &[
            "device.q35-pcihost/05.0/virtio-blk-device:logical_block_size",
            "device.q35-pcihost/05.0/virtio-blk-device:physical_block_size",
        ],
    ),
    (
        "virtio-serial-pci,",
        "virtio-serial-pci,max_ports=2,",
        &["device.q35-pcihost/07.0/virtio-serial-device:max_ports"],
    ),
    (
        "virtserialport",
        "virtconsole",
        &[
            "device.q35-pcihost/07.0/virtio-serial-device/virtconsole@0",
            "device.q35-pcihost/07.0/virtio-serial-device/virtserialport@1",
        ],
    ),
    (
        "scsi-id=1",
        "scsi-id=2",
        &[
            "device.q35-pcihost/09.0/virtio-scsi-device/scsi-cd@0.1.0",
            "device.q35-pcihost/09.0/virtio-scsi-device/scsi-cd@0.2.0",
        ],
    ),
    (
        "scsi-cd",
        "scsi-hd",
        &[
            "device.q35-pcihost/09.0/virtio-scsi-device/scsi-cd@0.1.0",
            "device.q35-pcihost/09.0/virtio-scsi-device/scsi-hd@0.1.0",
        ],
    ),
    ("virtio-net-pci,", "virtio-net-pci,romfile=,", &["ram.0000:00:06.0/virtio-net-pci.rom"]),
    ("virtio-net-pci,", "virtio-net-pci,romsize=524288,", &["ram.0000:00:06.0/virtio-net-pci.rom"]),
    ("-device VGA,", "-device VGA,vgamem_mb=32,", &["ram.0000:00:0a.0/vga.vram"]),
    ("-machine smm=on", "-machine smm=on -m 96M", &["ram.pc.ram"]),
    ("", "-drive if=pflash,file=DIR/flash,format=raw,readonly=on", &["device.cfi.pflash01", "ram.pc.bios"]),
    ("-device pc-dimm,memdev=m0", "", &["memory.0x100000000", "ram.m0"]),
    ("pc-dimm,memdev=m0", "pc-dimm,memdev=m0,addr=0x104000000", &["memory.0x100000000", "memory.0x104000000"]),
    ("DIR/disk.raw", "DIR/copy.raw", &["disk.q35-pcihost/05.0/virtio-blk-device:storage"]),
    (
        "DIR/disk.raw,format=raw",
        "DIR/short.raw,format=raw",
        &["disk.q35-pcihost/05.0/virtio-blk-device:bytes", "disk.q35-pcihost/05.0/virtio-blk-device:storage"],
    ),
    (
        "DIR/disk.raw,format=raw",
        "DIR/disk.qcow2,format=qcow2",
        &["disk.q35-pcihost/05.0/virtio-blk-device:format", "disk.q35-pcihost/05.0/virtio-blk-device:storage"],
    ),
    (
        "DIR/disk.raw,format=raw",
        "DIR/disk.raw,format=raw,readonly=on",
        &["disk.q35-pcihost/05.0/virtio-blk-device:read-only"],
    ),
    ("DIR/cd.iso", "DIR/other.iso", &["disk.q35-pcihost/09.0/virtio-scsi-device/scsi-cd@0.1.0:storage"]),
    (
        "-drive if=none,id=cd,file=DIR/cd.iso,format=raw,readonly=on",
        "-drive if=none,id=cd",
        &["disk.q35-pcihost/09.0/virtio-scsi-device/scsi-cd@0.1.0:medium"],
    ),
    ("-uuid 6d0f1c6e-0001", "-uuid 6d0f1c6e-0002", &["uuid"]),
];

/// With these the guest runs, and may notice: the names of the warnings.
const WARNED: &[Row] = &[
    ("-cpu Nehalem", "-cpu Westmere", &["cpu.model", "cpu.more-features"]),
    ("-cpu Nehalem", "-cpu Nehalem,stepping=7", &["cpu.model"]),
    ("-cpu Nehalem", "-cpu Nehalem,l3-cache=off", &["cpu.settings"]),
];

/// These look different, and fit.
const FIT: &[Row] = &[
    ("-cpu Nehalem", "-cpu Nehalem-v1", &[]),
    ("-cpu Nehalem", "-cpu Nehalem,sse4_2=on,check=off", &[]),
    ("-smp 2,sockets=1,cores=2", "-smp cpus=2,cores=2,threads=1,dies=1", &[]),
    ("-machine smm=on", "-machine q35,smm=on,usb=off,graphics=on", &[]),
    ("-machine smm=on", "-machine smm=on -name another,process=q -rtc base=localtime -boot order=d", &[]),
    ("-machine smm=on", "-machine smm=on -accel tcg,thread=single -overcommit mem-lock=off", &[]),
    (
        "id=rp,addr=04.0,chassis=1 -device virtio-rng-pci,bus=rp",
        "id=x,addr=04.0,chassis=1 -device virtio-rng-pci,bus=x,id=y",
        &[],
    ),
    ("virtio-rng-pci,bus=rp", "virtio-rng-pci,bus=rp,rng=r -object rng-random,filename=/dev/zero,id=r", &[]),
    ("-device virtio-rng-pci,bus=rp", "-device virtio-rng-pci,bus=rp,addr=00.0,max-bytes=1024", &[]),
    (
        "-drive if=none,id=d,file=DIR/disk.raw,format=raw -device virtio-blk-pci,drive=d",
        "-blockdev driver=file,filename=DIR/disk.raw,node-name=f -device virtio-blk-pci,drive=f",
        &[],
    ),
    ("file=DIR/disk.raw,format=raw", "file=DIR/link.raw,format=raw,cache=none", &[]),
    ("file=DIR/disk.raw,format=raw", "file=DIR/disk.raw,format=raw,aio=threads,discard=unmap,detect-zeroes=on", &[]),
    ("-device virtio-blk-pci,drive=d", "-object iothread,id=io -device virtio-blk-pci,iothread=io,id=vda,drive=d", &[]),
    (
        "-netdev hubport,hubid=0,id=n -device virtio-net-pci,netdev=n",
        "-netdev user,id=other -device virtio-net-pci,netdev=other",
        &[],
    ),
    ("-netdev hubport,hubid=0,id=n -device virtio-net-pci,netdev=n", "-device virtio-net-pci,id=net0", &[]),
    ("-chardev null,id=c", "-chardev ringbuf,id=c", &[]),
    ("virtserialport,chardev=c", "virtserialport,chardev=c,id=agent,name=org.qemu.guest_agent.0", &[]),
    ("usb-tablet,bus=usb.0", "usb-tablet,id=t,bus=usb.0", &[]),
    ("DIR/cd.iso", "DIR/copy.iso", &[]),
    (
        "-drive if=none,id=cd,file=DIR/cd.iso,format=raw,readonly=on -device scsi-cd,drive=cd",
        "-blockdev driver=file,filename=DIR/cd.iso,read-only=on,node-name=o -device scsi-cd,drive=o,id=cd",
        &[],
    ),
    ("size=64M -device pc-dimm", "size=64M,prealloc=off,merge=off -device pc-dimm", &[]),
    ("-device pc-dimm,memdev=m0", "-device pc-dimm,memdev=m0,id=dimm0,slot=0", &[]),
    ("", "-object secret,id=s,data=x -audiodev none,id=a -watchdog-action pause -msg timestamp=on", &[]),
];

/// Makes the files of both machines.
fn make_files(directory: &Path) {
    let sparse = |name: &str, bytes: u64| File::create(directory.join(name)).unwrap().set_len(bytes).unwrap();
    sparse("disk.raw", 8 * MIB);
    sparse("copy.raw", 8 * MIB);
    sparse("short.raw", 7 * MIB);
    sparse("flash", 4 * MIB);
    std::os::unix::fs::symlink("disk.raw", directory.join("link.raw")).unwrap();
    for (name, content) in [("cd.iso", 1), ("copy.iso", 1), ("other.iso", 2)] {
        fs::write(directory.join(name), vec![content; 300 << 10]).unwrap();
    }
    // The header, in QEMU's docs/interop/qcow2.txt: magic, version, no backing file, clusters of 64 KiB, size, no encryption, one L1 entry at
    // 0x30000, one cluster of the refcount table at 0x10000.
    let words = [0x5146_49fb_u32, 2, 0, 0, 0, 16, 0, 8 << 20, 0, 1, 0, 0x3_0000, 0, 0x1_0000, 1];
    let header: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
    fs::write(directory.join("disk.qcow2"), header).unwrap();
    File::options().write(true).open(directory.join("disk.qcow2")).unwrap().set_len(4 << 16).unwrap();
}

/// Starts a QEMU that does not run its guest; none if the tools are missing.
fn start(words: &str, is_source: bool) -> Option<(Qemu, Qmp)> {
    let mut options = QemuOptions::new(QemuVersion::V10_0, Guest::None);
    options.accel = Accel::Tcg;
    options.extra = words.split_whitespace().map(str::to_owned).collect();
    let options = if is_source { options } else { options.incoming() };
    let qemu = skip_if_unavailable(Qemu::start(&options))?;
    let qmp = Qmp::connect(qemu.qmp_path());
    let qmp = qmp.unwrap_or_else(|error| panic!("{error}: {words}: {:?}", qemu.end()));
    Some((qemu, qmp))
}

/// Returns the words of a row's destination.
fn words_of(base: &str, (from, to, _): &Row, directory: &Path) -> String {
    assert!(base.contains(from), "{from}");
    let words = if from.is_empty() { format!("{base} {to}") } else { base.replacen(from, to, 1) };
    words.replace("DIR", &directory.display().to_string())
}

/// Compares the source with the destination of each row, and checks the names of the refusals, or that there are warnings of these names only.
fn check(rows: &[Row], refusals: bool) {
    let files = tempfile::tempdir().unwrap();
    make_files(files.path());
    let base = BASE.join(" ");
    let source_words = base.replace("DIR", &files.path().display().to_string());
    let Some((_source, qmp)) = start(&source_words, true) else { return };
    let source = describe(&qmp).expect("the source is described");
    let mut wrong = BTreeMap::new();
    for row in rows {
        let (_qemu, qmp) = start(&words_of(&base, row, files.path()), false).expect("a QEMU");
        let destination = describe(&qmp).expect("the destination is described");
        let found = compare::compare(&source, &destination);
        let names = |refuses: bool| -> BTreeSet<&str> {
            found.iter().filter(|one| one.refuses == refuses).map(|one| one.name.as_str()).collect()
        };
        let expected: BTreeSet<&str> = row.2.iter().copied().collect();
        let is_right =
            if refusals { names(true) == expected } else { names(false) == expected && names(true).is_empty() };
        if !is_right {
            let texts: Vec<_> =
                found.iter().map(|one| format!("{} ({}): {}", one.name, one.refuses, one.text)).collect();
            wrong.insert(format!("{} -> {}", row.0, row.1), texts);
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn a_machine_with_one_difference_that_matters_is_refused_by_its_name() {
    assert!(REFUSED.len() >= 40);
    check(REFUSED, true);
}

#[test]
fn machines_that_only_look_different_fit_and_differences_that_the_guest_survives_are_warned_of() {
    assert!(FIT.len() >= 20);
    check(&[WARNED, FIT].concat(), false);
}

#[test]
fn back_ends_of_networks_are_known_and_the_lock_of_the_sources_qemu_is_seen_at_the_destination() {
    let files = tempfile::tempdir().unwrap();
    make_files(files.path());
    let words = BASE.join(" ").replace("DIR", &files.path().display().to_string());
    let Some((_source, source)) = start(&words, true) else { return };
    let words = words.replace("-netdev hubport,hubid=0,", "-netdev user,");
    let (_destination, destination) = start(&words, false).expect("a second QEMU");
    let storage = |qmp: &Qmp| {
        let Description { facts, .. } = describe(qmp).unwrap();
        let back_end = facts["net.q35-pcihost/06.0/virtio-net-device"].clone();
        (back_end, facts["disk.q35-pcihost/05.0/virtio-blk-device:storage"].clone())
    };
    let ((_, ours), (back_end, theirs)) = (storage(&source), storage(&destination));
    assert_eq!(back_end, "user");
    assert!(ours.contains(" held=101,201 "), "{ours}");
    assert!(theirs.ends_with(" held= seen=101,201"), "{theirs}");
}

#[test]
fn the_files_below_an_image_are_compared_by_what_is_in_them() {
    let files = tempfile::tempdir().unwrap();
    make_files(files.path());
    for (name, content) in [("base", 1), ("copy", 1), ("other", 2)] {
        fs::write(files.path().join(name), vec![content; MIB as usize]).unwrap();
    }
    let with = |base: Option<&str>| {
        let top = "-S -blockdev driver=qcow2,node-name=top,file.driver=file,file.filename=DIR/disk.qcow2";
        let below = base.map_or_else(String::new, |base| {
            format!(",backing.driver=raw,backing.file.driver=file,backing.file.filename=DIR/{base}")
        });
        let words = format!("{top}{below} -device virtio-blk-pci,drive=top,addr=05.0");
        words.replace("DIR", &files.path().display().to_string())
    };
    let Some((_source, source)) = start(&with(Some("base")), true) else { return };
    let source = describe(&source).unwrap();
    let disk = "disk.q35-pcihost/05.0/virtio-blk-device";
    for (base, refused) in [
        (Some("base"), None),
        (Some("copy"), None),
        (Some("other"), Some(format!("{disk}:backing-1"))),
        (None, Some(format!("{disk}:backing"))),
    ] {
        let (_destination, destination) = start(&with(base), false).expect("a second QEMU");
        let found = compare::compare(&source, &describe(&destination).unwrap());
        let names: Vec<_> = found.iter().map(|one| one.name.clone()).collect();
        assert_eq!(names, Vec::from_iter(refused), "{base:?}: {found:#?}");
        assert!(found.iter().all(|one| one.refuses));
    }
}

/// Prints how long it takes; in the soak, as other tests take the CPUs meanwhile in the gate.
mod soak {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn the_time_of_a_comparison_of_16_vcpus_and_60_devices() {
        let files = tempfile::tempdir().unwrap();
        make_files(files.path());
        let mut words = BASE.join(" ").replace("DIR", &files.path().display().to_string());
        words = words.replace("-smp 2,sockets=1,cores=2", "-smp 16,sockets=1,cores=16");
        for slot in 0x10..0x1a {
            for function in 0..5 {
                let path = files.path().join(format!("disk-{slot}-{function}"));
                File::create(&path).unwrap().set_len(MIB).unwrap();
                let device = if function < 2 {
                    let drive = format!("d{slot}-{function}");
                    format!(
                        "-drive if=none,id={drive},file={},format=raw -device virtio-blk-pci,drive={drive}",
                        path.display()
                    )
                } else if function == 2 {
                    format!("-device virtio-net-pci,mac=52:54:00:00:{slot:02x}:02")
                } else {
                    "-device virtio-rng-pci".to_owned()
                };
                words.push_str(&format!(" {device},addr={slot:x}.{function},multifunction=on"));
            }
        }
        let Some((source_qemu, source)) = start(&words, true) else { return };
        let (_destination, destination) = start(&words, false).expect("a second QEMU");
        for _ in 0..5 {
            let (begun, work) = (Instant::now(), cpu_time(source_qemu.pid()));
            let ours = describe(&source).unwrap();
            let (took, work) = (begun.elapsed(), cpu_time(source_qemu.pid()) - work);
            let theirs = describe(&destination).unwrap();
            let begun = Instant::now();
            let found = compare::compare(&ours, &theirs);
            println!("described in {took:?}, of which QEMU worked {work:?}; compared in {:?}", begun.elapsed());
            assert_eq!(found, []);
        }
    }

    /// Returns for how long a process's main thread has had a CPU (Linux Documentation/scheduler/sched-stats.rst).
    fn cpu_time(pid: u32) -> Duration {
        let text = fs::read_to_string(format!("/proc/{pid}/schedstat")).unwrap();
        Duration::from_nanos(text.split(' ').next().unwrap().parse().unwrap())
    }
}

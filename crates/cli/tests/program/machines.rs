//! Two machines that do not fit: the guest is neither lost nor paused for nothing. What differs is named before anything is begun, by `send` and
//! by a dry run alike, in both modes; the guest runs on, and a destination that fits takes it. Machines that only look different fit.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;

use serde_json::Value;
use sterna_qemu_lab::{QemuOptions, QemuVersion};

use crate::support::pair::{Pair, Watched, emulated};
use crate::support::settle::{Migration, Side};
use crate::support::{FAILED, LONG, PEER_REFUSED, Sterna, receive, report, send_by};

const MIB: u64 = 1 << 20;

fn receiver(pair: &Pair) -> Sterna {
    let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
    Sterna::start("receive", command.arg("--insecure"))
}

/// Ends the destination's QEMU, and starts another one beside the same source.
fn with_destination(pair: Pair, options: &QemuOptions) -> Pair {
    let Pair { source, destination, scratch } = pair;
    drop(destination);
    let destination = Watched::start(&options.incoming(), scratch.path(), "another").expect("another QEMU");
    Pair { source, destination, scratch }
}

/// Runs `send` to its end. Returns its status, its output and its report, if there is one.
fn sent(pair: &Pair, mode: &str, receiver: &Sterna, words: &[&str]) -> (ExitStatus, String, Option<Value>) {
    let _ = std::fs::remove_file(pair.report());
    let mut command =
        send_by(mode, pair.source.qemu.qmp_path(), &receiver.address(), &pair.source_state(), &pair.report());
    let command = command.args(["--insecure", "--downtime", "10s"]).args(words);
    let (status, lines) = Sterna::start("send", command).finish_with_lines();
    let report = pair.report().exists().then(|| report(&pair.report()));
    (status, lines.join("\n"), report)
}

/// Returns the reasons of a dry run for which the machines do not fit.
fn dry_refusals(pair: &Pair, mode: &str, receiver: &Sterna, words: &[&str]) -> Vec<String> {
    let (_, _, result) = sent(pair, mode, receiver, &[words, &["--dry-run"]].concat());
    let result = result.expect("a dry run has a result");
    let all = result["refusals"].as_array().unwrap().iter().filter(|refusal| refusal["side"] == "machines");
    all.map(|refusal| refusal["reason"].as_str().unwrap().to_owned()).collect()
}

/// Checks that both modes, with and without a dry run, refuse to move the guest with the same reasons, each with one of `named`, and that
/// nothing was touched. Returns the reasons.
fn refused(pair: &Pair, receiver: &mut Sterna, named: &[&[&str]]) -> Vec<String> {
    let mut reasons: Vec<Vec<String>> = Vec::new();
    for mode in ["auto", "stream"] {
        let (status, text, _) = sent(pair, mode, receiver, &[]);
        assert_eq!(status.code(), PEER_REFUSED, "{text}");
        assert!(text.contains("the guest was not touched"), "{text}");
        let dry = dry_refusals(pair, mode, receiver, &[]);
        for reason in &dry {
            assert!(text.contains(reason.as_str()), "{mode}: {reason} is not in {text}");
        }
        reasons.push(dry);
    }
    assert_eq!(reasons[0], reasons[1], "one reason in one mode only");
    let reasons = reasons.swap_remove(0);
    assert_eq!(reasons.len(), named.len(), "{reasons:#?}");
    for words in named {
        let has_all = |reason: &&String| words.iter().all(|word| reason.contains(word));
        assert!(reasons.iter().any(|reason| has_all(&reason)), "{words:?}: {reasons:#?}");
    }
    // A destination that fits nothing keeps waiting.
    assert!(receiver.poll().is_none());
    assert_eq!(pair.destination.status().as_deref(), Some("inmigrate"));
    pair.source.untouched().unwrap();
    pair.source.wait_progress().expect("the guest runs on");
    reasons
}

/// Moves the guest and checks that it runs at the destination only, with all of its memory.
fn moves(pair: Pair, receiver: Sterna, mode: &str, words: &[&str]) -> String {
    let (status, text, report) = sent(&pair, mode, &receiver, words);
    assert!(status.success(), "{text}");
    assert_eq!(report.expect("a report")["outcome"], "completed");
    assert!(receiver.finish().0.success());
    pair.destination.wait_progress().expect("the guest executes at the destination");
    let migration = Migration { pair, sender: None, receiver: None };
    assert_eq!(migration.exactly_one(), Ok(Side::Destination));
    text
}

#[test]
fn a_cpu_that_lacks_features_of_the_guest_is_refused_by_their_names_and_the_right_one_takes_the_guest() {
    let strong = emulated(QemuVersion::V10_0, &["-cpu", "max", "-smp", "2"]);
    let weak = emulated(QemuVersion::V10_0, &["-cpu", "qemu64", "-smp", "2"]);
    let Some(pair) = Pair::start_boot_sector(&strong, &weak) else { return };
    let mut waiting = receiver(&pair);
    let reasons = refused(&pair, &mut waiting, &[&["features", "avx2", "bmi2", "smep", "-cpu", "--force-cpu"]]);
    assert!(!reasons[0].contains("hotplugged") && !reasons[0].contains("migratable"), "{reasons:?}");
    // Not by the option for all other differences.
    let (status, text, _) = sent(&pair, "auto", &waiting, &["--allow-difference", "cpu"]);
    assert_eq!(status.code(), PEER_REFUSED, "{text}");
    assert_eq!(dry_refusals(&pair, "auto", &waiting, &["--force-cpu"]), [""; 0]);
    waiting.interrupt();

    let pair = with_destination(pair, &strong);
    let right = receiver(&pair);
    assert_eq!(dry_refusals(&pair, "auto", &right, &[]), [""; 0]);
    moves(pair, right, "auto", &[]);
}

#[test]
fn a_guest_is_sent_to_a_cpu_without_its_features_only_where_a_person_forces_it() {
    // This guest uses none of them.
    let strong = emulated(QemuVersion::V10_0, &["-cpu", "max"]);
    let weak = emulated(QemuVersion::V10_0, &["-cpu", "max,avx2=off"]);
    let Some(pair) = Pair::start_boot_sector(&strong, &weak) else { return };
    let mut waiting = receiver(&pair);
    let reasons = refused(&pair, &mut waiting, &[&["at the destination: avx2;"]]);
    assert!(!reasons[0].contains("CPUID"), "its name is enough: {reasons:?}");
    let text = moves(pair, waiting, "auto", &["--force-cpu"]);
    assert!(text.contains("avx2") && text.contains("allowed by --force-cpu"), "{text}");
}

#[test]
fn a_cpu_with_more_features_takes_the_guest_with_a_warning() {
    let weak = emulated(QemuVersion::V10_0, &["-cpu", "max,avx2=off"]);
    let strong = emulated(QemuVersion::V10_0, &["-cpu", "max"]);
    for mode in ["direct", "stream"] {
        let Some(pair) = Pair::start_boot_sector(&weak, &strong) else { return };
        let waiting = receiver(&pair);
        let text = moves(pair, waiting, mode, &[]);
        assert!(text.contains("warning: ") && text.contains("further features at the destination: avx2"), "{text}");
    }
}

#[test]
fn other_topologies_and_numbers_of_vcpus_are_refused() {
    let source = emulated(QemuVersion::V10_0, &["-smp", "4,sockets=2,cores=2,threads=1"]);
    let destination = emulated(QemuVersion::V10_0, &["-smp", "2,sockets=1,cores=2,threads=1"]);
    let Some(pair) = Pair::start_boot_sector(&source, &destination) else { return };
    let mut waiting = receiver(&pair);
    refused(
        &pair,
        &mut waiting,
        &[
            &["4 vCPUs", "the destination 2", "only the source has number 2, 3", "cpu.count"],
            &["topology", "sockets: 2 at the source, 1 at the destination", "cpu.topology"],
        ],
    );
}

#[test]
fn devices_that_only_one_machine_has_or_at_another_address_are_refused() {
    let same = ["-device", "virtio-net-pci,addr=05.0,mac=52:54:00:00:00:01"];
    let network = ["-netdev", "user,id=n0", "-device", "virtio-net-pci,addr=04.0,netdev=n0"];
    let other = ["-netdev", "hubport,hubid=0,id=n0", "-device", "virtio-net-pci,addr=04.0,netdev=n0"];
    let here = [
        &same[..],
        &network,
        &["-device", "virtio-rng-pci,addr=06.0", "-device", "e1000,addr=07.0", "-uuid", UUIDS[0]],
    ]
    .concat();
    let there = [
        &same[..],
        &other,
        &["-device", "virtio-balloon-pci,addr=08.0", "-device", "rtl8139,addr=07.0", "-uuid", UUIDS[1]],
    ]
    .concat();
    let (here, there) = (emulated(QemuVersion::V10_0, &here), emulated(QemuVersion::V10_0, &there));
    let Some(pair) = Pair::start_boot_sector(&here, &there) else { return };
    let mut waiting = receiver(&pair);
    refused(
        &pair,
        &mut waiting,
        &[
            &["source's virtio-rng-pci at q35-pcihost/06.0 is missing", "--allow-difference device.q35-pcihost/06.0"],
            &["destination has a virtio-balloon-pci at q35-pcihost/08.0"],
            &["at q35-pcihost/07.0, the source has a e1000, the destination a rtl8139"],
            &["RAM block 0000:00:07.0/e1000.rom is missing"],
            &[UUIDS[0], UUIDS[1], "-uuid"],
            &["1 network back ends of the type user", "the destination 0"],
        ],
    );
}

const UUIDS: [&str; 2] = ["6d0f1c6e-0001-4000-8000-000000000001", "6d0f1c6e-0001-4000-8000-000000000002"];

#[test]
fn another_amount_of_memory_is_refused_in_both_modes_and_the_destination_keeps_waiting() {
    let source = emulated(QemuVersion::V10_0, &[]);
    let smaller = QemuOptions { memory: 96 << 20, ..source.clone() };
    let Some(pair) = Pair::start_boot_sector(&source, &smaller) else { return };
    let mut waiting = receiver(&pair);
    refused(&pair, &mut waiting, &[&["pc.ram has 134217728 bytes at the source and 100663296 at the destination"]]);
}

/// The words for a disk that is this file.
fn disk(file: &Path, id: &str, more: &str) -> [String; 4] {
    let drive = format!("if=none,id={id},file={},{more}", file.display());
    ["-drive".into(), drive, "-device".into(), format!("virtio-blk-pci,drive={id},addr=05.0")]
}

#[test]
fn another_disk_at_the_same_address_is_refused_with_both_values() {
    let scratch = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: u64| {
        let path = scratch.path().join(name);
        File::create(&path).unwrap().set_len(bytes).unwrap();
        path
    };
    let with = |words: [String; 4]| {
        let words: Vec<_> = words.iter().map(String::as_str).collect();
        emulated(QemuVersion::V10_0, &words)
    };
    let right = file("a.raw", 64 * MIB);
    // Older than what the guest has written.
    let copy = file("copy.raw", 64 * MIB);
    let link = scratch.path().join("link.raw");
    std::os::unix::fs::symlink("a.raw", &link).unwrap();
    let source = with(disk(&right, "system", "format=raw"));
    let raw = "format=raw";
    let shorter = format!("{}", 63 * MIB);
    let others: [(PathBuf, &str, Vec<&str>); 5] = [
        (file("shorter.raw", 63 * MIB), raw, vec!["67108864 bytes long", &shorter, "disk.", "an older state"]),
        (file("small.raw", 8 * MIB), raw, vec!["67108864 bytes long", "8388608 bytes long"]),
        (file("empty.raw", 0), raw, vec!["67108864 bytes long", " 0 bytes long"]),
        (
            file("read-only.raw", 64 * MIB),
            "format=raw,readonly=on",
            vec!["writable at the source", "read-only at the destination", "read-only="],
        ),
        (copy, raw, vec![]),
    ];
    let Some(mut pair) = Pair::start_boot_sector(&source, &with(disk(&others[0].0, "system", raw))) else { return };
    for (number, (file, more, words)) in others.iter().enumerate() {
        if number > 0 {
            let options = with(disk(file, "another-name", more));
            pair = with_destination(pair, &options);
        }
        let mut waiting = receiver(&pair);
        let names = [words.as_slice(), &["q35-pcihost/05.0/virtio-blk-device", "a.raw"]].concat();
        let storage =
            ["another one at the destination", "two files of one host", "05.0/virtio-blk-device:storage permits"];
        let named: &[&[&str]] = if words.is_empty() { &[&storage] } else { &[&names, &storage] };
        refused(&pair, &mut waiting, named);
        waiting.interrupt();
    }
    // The same disk under other names.
    let pair = with_destination(pair, &with(disk(&link, "another-name", raw)));
    let waiting = receiver(&pair);
    moves(pair, waiting, "auto", &[]);
}

#[test]
fn a_difference_that_a_person_allows_is_a_warning() {
    let scratch = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: u64| {
        let path = scratch.path().join(name);
        File::create(&path).unwrap().set_len(bytes).unwrap();
        path
    };
    let with = |file: PathBuf| {
        let words = disk(&file, "system", "format=raw");
        emulated(QemuVersion::V10_0, &words.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let Some(pair) = Pair::start_boot_sector(&with(file("a.raw", 64 * MIB)), &with(file("b.raw", 63 * MIB))) else {
        return;
    };
    let waiting = receiver(&pair);
    let (status, text, _) = sent(&pair, "auto", &waiting, &["--allow-difference", "dis"]);
    assert_eq!(status.code(), PEER_REFUSED, "the beginning of a word is no name: {text}");
    let text = moves(pair, waiting, "auto", &["--allow-difference", "disk"]);
    assert!(text.contains("bytes long") && text.contains("allowed by --allow-difference disk"), "{text}");
}

#[test]
fn machines_that_only_look_different_fit() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("disk.raw");
    File::create(&path).unwrap().set_len(8 * MIB).unwrap();
    let path = path.display();
    // Each host has its copy of a CD.
    let [cd, other_cd] = ["one.iso", "two.iso"].map(|name| {
        let path = scratch.path().join(name);
        std::fs::write(&path, [7; 400 << 10]).unwrap();
        format!("-drive if=none,id=cd,file={},format=raw,readonly=on -device ide-cd,drive=cd,bus=ide.3", path.display())
    });
    let one = [
        &cd[..],
        &format!("-drive if=none,id=one,file={path},format=raw -device virtio-blk-pci,drive=one,id=a,addr=05.0")[..],
        "-netdev hubport,hubid=0,id=n0 -device virtio-net-pci,netdev=n0,id=net-a,addr=06.0 -device qemu-xhci,id=usb-a,addr=07.0",
        "-device usb-tablet,bus=usb-a.0,id=t -device virtio-serial-pci,id=s,addr=08.0 -chardev null,id=c -device virtserialport,chardev=c",
        "-device pcie-root-port,id=rp-a,addr=09.0,chassis=1 -device virtio-rng-pci,bus=rp-a -cpu max",
    ];
    // Other kinds of back ends, names and orders.
    let two = [
        &other_cd[..],
        "-device pcie-root-port,id=rp-b,addr=09.0,chassis=1 -device virtio-rng-pci,bus=rp-b -cpu max,avx2=on",
        "-device virtio-serial-pci,id=x,addr=08.0 -chardev ringbuf,id=r -device virtserialport,chardev=r,id=port",
        "-device qemu-xhci,id=z,addr=07.0 -device usb-tablet,bus=z.0 -device virtio-net-pci,addr=06.0",
        &format!("-blockdev driver=file,filename={path},node-name=f -device virtio-blk-pci,drive=f,addr=05.0"),
    ];
    let words = |all: &[&str]| all.join(" ").split(' ').map(str::to_owned).collect::<Vec<_>>();
    let with = |all: &[&str]| QemuOptions { extra: words(all), ..emulated(QemuVersion::V10_0, &[]) };
    for mode in ["direct", "stream"] {
        let Some(pair) = Pair::start_boot_sector(&with(&one), &with(&two)) else { return };
        let waiting = receiver(&pair);
        assert_eq!(dry_refusals(&pair, mode, &waiting, &[]), [""; 0]);
        let text = moves(pair, waiting, mode, &[]);
        assert!(!text.contains("warning"), "{text}");
    }
}

#[test]
fn the_machines_of_different_releases_are_compared_and_fit() {
    use QemuVersion::{V7_2, V10_0, V11_1};
    let words = ["-device", "virtio-rng-pci", "-device", "qemu-xhci", "-device", "virtio-scsi-pci", "-smp", "2"];
    for (from, to) in [(V7_2, V10_0), (V10_0, V7_2), (V10_0, V11_1)] {
        let old = |version: QemuVersion| QemuOptions { machine: V7_2.machine().into(), ..emulated(version, &words) };
        let Some(pair) = Pair::start_boot_sector(&old(from), &old(to)) else { return };
        let waiting = receiver(&pair);
        let text = moves(pair, waiting, "auto", &[]);
        assert!(!text.contains("not compared"), "{from} to {to}: {text}");
    }
    // What an older release cannot emulate is found.
    let machine = V7_2.machine().to_owned();
    let with = |version| QemuOptions { machine: machine.clone(), ..emulated(version, &["-cpu", "max"]) };
    let Some(pair) = Pair::start_boot_sector(&with(V10_0), &with(V7_2)) else { return };
    let mut waiting = receiver(&pair);
    refused(&pair, &mut waiting, &[&["features", "sha-ni", "rdpid"]]);
}

/// Both have a virtio device at the same address, of another type at the destination: allowed by a person, this fails when its state is loaded.
#[test]
fn the_destinations_qemu_reports_why_it_could_not_load_the_guest() {
    use QemuVersion::{V10_0, V11_1};
    // Newer releases report what they have not found.
    for (version, why) in [(V10_0, "load of migration failed"), (V11_1, "virtio")] {
        for mode in ["direct", "stream"] {
            println!("{version} by {mode}");
            let source = emulated(version, &["-device", "virtio-rng-pci,addr=05.0"]);
            let destination = emulated(version, &["-device", "virtio-balloon-pci,addr=05.0"]);
            let Some(mut pair) = Pair::start_boot_sector(&source, &destination) else { return };
            let waiting = receiver(&pair);
            let (status, text, report) = sent(&pair, mode, &waiting, &["--allow-difference", "device"]);
            assert_eq!(status.code(), FAILED, "{text}");
            let reason = report.expect("a report")["reason"].as_str().unwrap().to_owned();
            assert!(reason.contains("QEMU could not load the guest: ") && reason.contains(why), "{reason}");
            let (received, at_destination) = waiting.finish();
            assert_eq!(received.code(), FAILED, "{at_destination}");
            assert!(at_destination.contains(why), "{at_destination}");
            pair.destination.qemu.wait_exit(LONG).unwrap();
            pair.source.wait_progress().expect("the guest runs on");
        }
    }
}

/// As docs/operating.md lists it: QEMU 9.0 and newer end when they move such a guest by their stream.
#[test]
fn a_fault_of_qemu_that_would_end_the_guest_is_warned_of_in_stream_mode_only() {
    use QemuVersion::{V7_2, V10_0};
    let words =
        "-machine nvdimm=on -m slots=2,maxmem=1G -object memory-backend-ram,id=m,size=64M -device nvdimm,memdev=m";
    for (version, has_it) in [(V10_0, true), (V7_2, false)] {
        let options = emulated(version, &words.split(' ').collect::<Vec<_>>());
        let Some(pair) = Pair::start_boot_sector(&options, &options) else { return };
        let waiting = receiver(&pair);
        for (mode, warns) in [("stream", has_it), ("direct", false)] {
            let (_, text, result) = sent(&pair, mode, &waiting, &["--dry-run"]);
            let warnings = result.expect("a dry run has a result")["warnings"].to_string();
            assert_eq!(
                warnings.contains("ends with a failed assertion"),
                warns,
                "{version} by {mode}: {warnings}: {text}"
            );
        }
        if has_it {
            moves(pair, waiting, "direct", &[]);
        }
    }
}

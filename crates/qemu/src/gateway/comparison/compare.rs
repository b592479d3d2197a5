//! Compares the descriptions of two machines. What differs is a refusal if the guest would be lost or run wrongly, else a warning.

use std::collections::BTreeMap;

use sterna_wire::description::Description;
use sterna_wire::text::cleaned;

use super::difference::{Difference, MAX_LISTED};
use super::same_storage::{self, Judgement};
use super::{cpu, host, memory};

/// What all versions of this program describe. The families `host` and `memory` came later, and are compared where both have them.
const FAMILIES: &[(&str, &str)] = &[
    ("machine", "machine types"),
    ("cpu", "vCPUs"),
    ("device", "devices"),
    ("disk", "disks"),
    ("ram", "RAM blocks"),
    ("net", "network back ends"),
    ("uuid", "UUIDs"),
];

/// Drivers of block nodes whose content is the disk itself (QEMU's block/). Of other drivers than these and [`FORMATS`], for instance filters,
/// this does not say which format is below them.
const PLAIN: &[&str] = &[
    "raw",
    "file",
    "host_device",
    "host_cdrom",
    "nbd",
    "rbd",
    "iscsi",
    "nfs",
    "gluster",
    "ssh",
    "http",
    "https",
    "ftp",
    "nvme",
    "null-co",
    "null-aio",
    "io_uring",
    "nvme-io_uring",
];
/// Network back ends that take packets with a header for offloads (`has_vnet_hdr` in QEMU's net/): a virtio device on another one offers none.
const OFFLOADING: &[&str] = &["tap", "vhost-user", "vhost-vdpa"];
/// Formats of images.
const FORMATS: &[&str] =
    &["bochs", "cloop", "dmg", "luks", "parallels", "qcow", "qcow2", "qed", "vdi", "vhdx", "vmdk", "vpc", "vvfat"];

/// Returns what differs between the machine of a source and that of its destination.
pub(super) fn compare(source: &Description, destination: &Description) -> Vec<Difference> {
    let mut found = Vec::new();
    for (family, words) in FAMILIES {
        let lacking = [(source, "source"), (destination, "destination")];
        if let Some((_, side)) = lacking.iter().find(|(of, _)| !of.families.contains(*family)) {
            let text = format!("the {words} of the two machines were not compared: the {side} does not report its own");
            found.push(Difference::warning(*family, text));
            continue;
        }
        match *family {
            "cpu" => cpu::compare(source, destination, &mut found),
            "device" => devices(source, destination, &mut found),
            "disk" => disks(source, destination, &mut found),
            "ram" => ram(source, destination, &mut found),
            "net" => networks(source, destination, &mut found),
            "machine" => machine_type(source, destination, &mut found),
            _ => uuid(source, destination, &mut found),
        }
    }
    let both = |family: &str| [source, destination].iter().all(|of| of.families.contains(family));
    if both("memory") {
        memory::compare(source, destination, &mut found);
    }
    host::compare(source, destination, &mut found);
    limited(found)
}

/// Returns at most [`MAX_LISTED`] of the differences, the refusals first, and one more that counts the rest: a description has thousands of
/// facts, and its sender may be hostile.
fn limited(mut found: Vec<Difference>) -> Vec<Difference> {
    found.sort_by_key(|difference| !difference.refuses);
    if found.len() > MAX_LISTED {
        let rest = found.split_off(MAX_LISTED);
        let text = format!("there are {} more differences", rest.len());
        let refuses = rest.iter().any(|difference| difference.refuses);
        found.push(Difference { name: "more".into(), refuses, text });
    }
    found
}

/// Returns the facts of a family by the rest of their names.
fn family<'a>(description: &'a Description, name: &str) -> BTreeMap<&'a str, &'a str> {
    let prefix = format!("{name}.");
    let length = prefix.len();
    let facts = description.facts.range(prefix.clone()..);
    let facts = facts.take_while(|(name, _)| name.starts_with(&prefix));
    facts.map(|(name, value)| (&name[length..], value.as_str())).collect()
}

fn machine_type(source: &Description, destination: &Description, found: &mut Vec<Difference>) {
    let [ours, theirs] = [source, destination].map(|of| of.facts.get("machine").map(|name| cleaned(name)));
    // Empty where QEMU does not report it.
    if let (Some(ours), Some(theirs)) = (ours.filter(|name| !name.is_empty()), theirs.filter(|name| !name.is_empty()))
        && ours != theirs
    {
        let text = format!(
            "the source's machine type is {ours}, the destination's {theirs}: start the destination's QEMU with -M {ours}"
        );
        found.push(Difference::refusal("machine", text));
    }
    let (here, there) = (family(source, "machine"), family(destination, "machine"));
    for (property, ours) in here {
        // `auto` follows from the accelerator and the firmware, and other releases may have other properties.
        let theirs = there.get(property).filter(|theirs| **theirs != ours && ours != "auto" && **theirs != "auto");
        if let Some(theirs) = theirs {
            let (property, ours, theirs) = (cleaned(property), cleaned(ours), cleaned(theirs));
            let option = match property.as_str() {
                "memory-slots" => format!("-m slots={ours}"),
                "memory-max-size" => format!("-m maxmem={ours}B"),
                _ => format!("-M {property}={ours}"),
            };
            let text = format!(
                "the machine has {property} = {ours} at the source and {theirs} at the destination: start the destination's QEMU with {option}"
            );
            found.push(Difference::refusal(format!("machine.{property}"), text));
        }
    }
}

/// A guest that has read its UUID from the firmware would find another one, and QEMU's own channels compare it.
fn uuid(source: &Description, destination: &Description, found: &mut Vec<Difference>) {
    let [ours, theirs] = [source, destination].map(|of| of.facts.get("uuid").map(|uuid| cleaned(uuid)));
    if let (Some(ours), Some(theirs)) = (ours, theirs)
        && ours != theirs
    {
        let text = format!(
            "the source's UUID is {ours}, the destination's {theirs}: start the destination's QEMU with -uuid {ours}"
        );
        found.push(Difference::refusal("uuid", text));
    }
}

/// QEMU's net/slirp.c saves the state of its back end. The destination loads the states of those that the source has.
fn networks(source: &Description, destination: &Description, found: &mut Vec<Difference>) {
    let users = |of: &Description| of.facts.get("net.user")?.parse::<u32>().ok();
    if let (Some(ours), Some(theirs)) = (users(source), users(destination))
        && ours > theirs
    {
        let text = format!(
            "the source has {ours} network back ends of the type user, whose state is sent, the destination {theirs}: start the destination's \
             QEMU with the same -netdev user"
        );
        found.push(Difference::refusal("net.user", text));
    }
    for (path, ours) in family(source, "net") {
        let Some(theirs) = destination.facts.get(&format!("net.{path}")).filter(|_| path != "user") else { continue };
        if OFFLOADING.contains(&ours) && !OFFLOADING.contains(&theirs.as_str()) {
            let (shown, ours, theirs) = (cleaned(path), cleaned(ours), cleaned(theirs));
            let text = format!(
                "the network device at {shown} has the back end {ours} at the source and {theirs} at the destination, which has no checksum and \
                 segmentation offloads: QEMU would refuse a guest that uses these when everything has been sent; start the destination's QEMU \
                 with a -netdev {ours}"
            );
            found.push(Difference::refusal(format!("net.{path}"), text));
        }
    }
}

/// QEMU itself ends where a block of the source is missing or has another length, after all of memory has been sent.
fn ram(source: &Description, destination: &Description, found: &mut Vec<Difference>) {
    let (here, there) = (family(source, "ram"), family(destination, "ram"));
    let sizes = |value: &str| -> Option<(u64, u64)> {
        let (used, total) = value.split_once(' ')?;
        Some((used.parse().ok()?, total.parse().ok()?))
    };
    for (name, value) in here {
        let Some((ours, _)) = sizes(value) else { continue };
        let shown = cleaned(name);
        let Some(theirs) = there.get(name) else {
            let text = format!(
                "the source's RAM block {shown} is missing at the destination: start it with the same memory, devices and names of memory \
                 backends"
            );
            found.push(Difference::refusal(format!("ram.{name}"), text));
            continue;
        };
        let Some((used, total)) = sizes(theirs) else { continue };
        // QEMU resizes a block that may grow, within what it may have.
        if ours != used && !(total > used && ours <= total) {
            let text = format!(
                "RAM block {shown} has {ours} bytes at the source and {used} at the destination: give both the same memory and devices"
            );
            found.push(Difference::refusal(format!("ram.{name}"), text));
        }
    }
}

fn devices(source: &Description, destination: &Description, found: &mut Vec<Difference>) {
    let (here, there) = (family(source, "device"), family(destination, "device"));
    // What is below a device that differs differs with it.
    let mut above: Vec<&str> = Vec::new();
    let paths: std::collections::BTreeSet<&str> = here.keys().chain(there.keys()).copied().collect();
    for path in paths {
        let below = |device: &&str| path.strip_prefix(*device).is_some_and(|rest| rest.starts_with(['/', ':']));
        if above.iter().any(below) {
            continue;
        }
        let (ours, theirs) = (here.get(path), there.get(path));
        if ours == theirs {
            continue;
        }
        let shown = cleaned(path);
        let name = format!("device.{path}");
        if let Some((device, property)) = path.rsplit_once(':').filter(|(device, _)| here.contains_key(device)) {
            // Another release may not have this property.
            if let (Some(ours), Some(theirs)) = (ours, theirs) {
                let kind = here.get(device).map_or_else(String::new, |kind| cleaned(kind));
                found.push(Difference::refusal(
                    name,
                    format!(
                        "{kind} at {} has {} = {} at the source and {} at the destination: give both the same",
                        cleaned(device),
                        cleaned(property),
                        cleaned(ours),
                        cleaned(theirs)
                    ),
                ));
            }
            continue;
        }
        let text = match (ours, theirs) {
            (Some(ours), None) => format!(
                "the source's {} at {shown} is missing at the destination: start it with the same devices, or unplug it at the source",
                cleaned(ours)
            ),
            (None, Some(theirs)) => format!(
                "the destination has a {} at {shown}, which the source does not have: start it with the same devices, or plug it in at the \
                 source",
                cleaned(theirs)
            ),
            (ours, theirs) => format!(
                "at {shown}, the source has a {}, the destination a {}: start both with the same devices at the same addresses",
                ours.map_or_else(String::new, |kind| cleaned(kind)),
                theirs.map_or_else(String::new, |kind| cleaned(kind))
            ),
        };
        above.push(path);
        found.push(Difference::refusal(name, text));
    }
}

fn disks(source: &Description, destination: &Description, found: &mut Vec<Difference>) {
    let (here, there) = (family(source, "disk"), family(destination, "disk"));
    let [boot, other_boot] = [source, destination].map(|of| of.facts.get("host.boot"));
    let one_host = boot.is_some() && boot == other_boot;
    for (path, file) in &here {
        // Without its device the disk is missing, too, which is said of the device.
        let Some(other_file) = there.get(path).filter(|_| !path.contains(':')) else { continue };
        let fact = |of: &BTreeMap<&str, &str>, what: &str| {
            of.get(format!("{path}:{what}").as_str()).map(|value| (*value).to_owned())
        };
        let both = |what: &str| (fact(&here, what), fact(&there, what));
        let mut report = |what: &str, ours: &str, theirs: &str, advice: &str| {
            found.push(Difference::refusal(
                format!("disk.{path}:{what}"),
                format!(
                    "the disk at {} is {} at the source ({}) and {} at the destination ({}): {advice}",
                    cleaned(path),
                    cleaned(ours),
                    cleaned(file),
                    cleaned(theirs),
                    cleaned(other_file)
                ),
            ));
        };
        match both("medium") {
            (None, None) => {}
            (Some(_), Some(_)) => continue,
            (ours, _) => {
                let words = |empty: bool| if empty { "without a medium" } else { "inserted" };
                let empty = ours.is_some();
                report(
                    "medium",
                    words(empty),
                    words(!empty),
                    "insert the same medium at the destination, or eject it at the source",
                );
                continue;
            }
        }
        if let (Some(ours), Some(theirs)) = both("bytes")
            && ours != theirs
        {
            let advice = "give the destination's QEMU the same disk: this is another one, or an older state of it";
            report("bytes", &format!("{ours} bytes long"), &format!("{theirs} bytes long"), advice);
        }
        if let (Some(ours), Some(theirs)) = both("read-only")
            && ours != theirs
        {
            let words = |value: &str| if value == "true" { "read-only" } else { "writable" };
            report("read-only", words(&ours), words(&theirs), "start the destination's QEMU with the same read-only=");
        }
        if let (Some(ours), Some(theirs)) = both("format")
            && let (Some(format), Some(other)) = (format(&ours), format(&theirs))
            && format != other
        {
            let advice =
                "start the destination's QEMU with the same format=, unless the disk was copied into another format";
            report("format", &format!("in the format {ours}"), &format!("in the format {theirs}"), advice);
        }
        let [where_here, where_there] = [file, other_file].map(|file| cleaned(file));
        let is_read_only = both("read-only") == (Some("true".into()), Some("true".into()));
        let name = format!("disk.{path}:storage");
        let (ours, theirs) = both("storage");
        let judged = same_storage::judge(ours.as_deref(), theirs.as_deref(), one_host);
        match judged {
            Judgement::Same | Judgement::Unknown => {}
            Judgement::Other(why) if is_read_only => {
                let what = format!("the read-only disk at {}", cleaned(path));
                found.extend(other_read_only(name, &what, [&where_here, &where_there], why, both("sample")));
            }
            Judgement::Other(why) => found.push(Difference::refusal(
                name,
                format!(
                    "the disk at {} is another one at the destination ({where_there}) than at the source ({where_here}): {why}; start the \
                     destination's QEMU with the source's disk, as this one lacks what the guest has written",
                    cleaned(path)
                ),
            )),
            Judgement::Doubtful => found.push(Difference::warning(
                name,
                format!(
                    "the disk at {} may be another one at the destination ({where_there}) than at the source ({where_here}): the source's QEMU \
                     has locked its file, and at the destination no lock is seen; make sure that both are one file",
                    cleaned(path)
                ),
            )),
        }
        let (Some(ours), Some(theirs)) = both("backing") else { continue };
        // Of the same image, only options give it other backing files. A copy may have none.
        if ours != theirs && judged == Judgement::Same {
            found.push(Difference::refusal(
                format!("disk.{path}:backing"),
                format!(
                    "the disk at {} is based on {} images at the source and on {} at the destination ({where_there}): start the destination's \
                     QEMU with the same backing files",
                    cleaned(path),
                    cleaned(&ours),
                    cleaned(&theirs)
                ),
            ));
        }
        for number in 1.. {
            let fact = format!("backing-{number}");
            let (Some(ours), Some(theirs)) = both(&fact) else { break };
            let (storage, other_storage) = both(&format!("{fact}:storage"));
            let judged = same_storage::judge(storage.as_deref(), other_storage.as_deref(), one_host);
            if let Judgement::Other(why) = judged {
                let what = format!("the backing file {number} of the disk at {}", cleaned(path));
                let samples = both(&format!("{fact}:sample"));
                let files = [&*cleaned(&ours), &*cleaned(&theirs)];
                found.extend(other_read_only(format!("disk.{path}:{fact}"), &what, files, why, samples));
            }
        }
    }
}

/// Returns the difference between two read-only images in other storage, because of `why`; none if they have the same content.
/// `files`: those of the source and of the destination. `samples`: checksums of both.
fn other_read_only(
    name: String,
    what: &str,
    files: [&str; 2],
    why: &str,
    samples: (Option<String>, Option<String>),
) -> Option<Difference> {
    let [here, there] = files;
    Some(match samples {
        (Some(ours), Some(theirs)) if ours == theirs => return None,
        (Some(_), Some(_)) => Difference::refusal(
            name,
            format!(
                "{what} has another content at the destination ({there}) than at the source ({here}): give the destination's QEMU the same \
                 image, or a copy of it"
            ),
        ),
        _ => Difference::warning(
            name,
            format!(
                "{what} is another one at the destination ({there}) than at the source ({here}): {why}; make sure that both have the same \
                 content"
            ),
        ),
    })
}

/// Returns the class of a driver: that of a plain disk, or the format. None where it does not say.
fn format(driver: &str) -> Option<&str> {
    if PLAIN.contains(&driver) { Some("raw") } else { Some(driver).filter(|driver| FORMATS.contains(driver)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A description with all families, and these facts.
    fn of(facts: &[(&str, &str)]) -> Description {
        Description {
            families: FAMILIES.iter().map(|(name, _)| (*name).to_owned()).collect(),
            facts: facts.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
        }
    }

    /// The names of the refusals and of the warnings.
    fn names(source: &[(&str, &str)], destination: &[(&str, &str)]) -> [Vec<String>; 2] {
        let found = compare(&of(source), &of(destination));
        [true, false].map(|refuses| {
            let found = found.iter().filter(|one| one.refuses == refuses);
            found.map(|one| one.name.clone()).collect()
        })
    }

    const NONE: [&str; 0] = [];

    #[test]
    fn of_very_many_differences_the_first_are_listed_and_the_rest_is_a_refusal_too() {
        let devices: Vec<String> = (0..MAX_LISTED + 7).map(|number| format!("device.slot/{number:03}")).collect();
        let facts: Vec<(&str, &str)> = devices.iter().map(|name| (name.as_str(), "virtio-rng-pci")).collect();
        let found = compare(&of(&[]), &of(&facts));
        assert_eq!(found.len(), MAX_LISTED + 1);
        assert!(found.iter().all(|difference| difference.refuses));
        assert_eq!(found.last().unwrap().text, "there are 7 more differences");
    }

    #[test]
    fn equal_machines_do_not_differ() {
        let machine = [
            ("cpu.0", "core-id=0 socket-id=0"),
            ("cpu.0:on", "avx2 sse2"),
            ("cpu.0:off", "hle"),
            ("cpu.0:words", "7.0.EBX=20"),
            ("cpu.0:vendor", "AuthenticAMD"),
            ("device.q35-pcihost/01.0", "virtio-rng-pci"),
            ("disk.x:bytes", "512"),
            ("ram.pc.ram", "4096 4096"),
            ("machine", "pc-q35-10.0"),
            ("uuid", "u"),
        ];
        assert_eq!(names(&machine, &machine), [NONE, NONE]);
        assert_eq!(
            names(&[("machine", "a"), ("uuid", "u")], &[("machine", "b"), ("uuid", "v")])[0],
            ["machine", "uuid"]
        );
        assert_eq!(names(&[("machine", "a")], &[("machine", "")])[0], NONE);
        assert_eq!(names(&[("net.user", "2")], &[("net.user", "1")])[0], ["net.user"]);
        assert_eq!(names(&[("net.user", "1")], &[("net.user", "2")])[0], NONE);
        assert_eq!(names(&[("net.h/06.0", "tap")], &[("net.h/06.0", "user")])[0], ["net.h/06.0"]);
        for (ours, theirs) in [("user", "tap"), ("tap", "vhost-user"), ("none", "user")] {
            assert_eq!(names(&[("net.h/06.0", ours)], &[("net.h/06.0", theirs)])[0], NONE);
        }
    }

    #[test]
    fn a_family_that_one_side_has_not_looked_at_is_a_warning_and_not_a_machine_without_it() {
        let mut older = of(&[]);
        older.families.remove("device");
        let found = compare(&of(&[("device.x", "hpet")]), &older);
        assert!(matches!(&found[..], [one] if !one.refuses && one.text.contains("the destination does not report")));
        let found = compare(&older, &of(&[("device.x", "hpet")]));
        assert!(matches!(&found[..], [one] if !one.refuses && one.text.contains("the source does not report")));
        // Families and facts of a later version are ignored.
        let mut later = of(&[("tpm.0", "2.0"), ("uuid", "u"), ("uuid:later", "x")]);
        later.families.insert("tpm".into());
        assert_eq!(compare(&of(&[("uuid", "u")]), &later), []);
    }

    #[test]
    fn a_device_that_differs_is_named_once_and_not_with_what_is_below_it() {
        let source = [
            ("device.host", "host"),
            ("device.host/01.0", "virtio-blk-pci"),
            ("device.host/01.0/virtio-blk-device", "virtio-blk-device"),
            ("device.host/01.0:vectors", "2"),
            ("device.host/02.0", "e1000"),
            ("device.host/03.0", "virtio-rng-pci"),
            ("device.host/03.0:vectors", "2"),
            ("device.host/04.0:max_ports", "2"),
            ("device.host/04.0", "virtio-serial-pci"),
        ];
        let destination = [
            ("device.host", "host"),
            ("device.host/02.0", "rtl8139"),
            ("device.host/03.0", "virtio-rng-pci"),
            ("device.host/03.0:vectors", "3"),
            ("device.host/04.0", "virtio-serial-pci"),
            ("device.host/05.0", "virtio-balloon-pci"),
        ];
        let [refusals, warnings] = names(&source, &destination);
        assert_eq!(refusals, ["device.host/01.0", "device.host/02.0", "device.host/03.0:vectors", "device.host/05.0"]);
        assert_eq!(warnings, NONE);
    }

    #[test]
    fn disks_differ_by_size_write_permission_and_format_and_not_by_where_they_are() {
        let disk = |file: &'static str, bytes: &'static str, read_only: &'static str, format: &'static str| {
            [("disk.d", file), ("disk.d:bytes", bytes), ("disk.d:read-only", read_only), ("disk.d:format", format)]
        };
        let source = disk("d0, /a", "512", "false", "raw");
        assert_eq!(names(&source, &disk("n1, nbd://b", "512", "false", "nbd"))[0], NONE);
        // A filter does not say what is below it.
        assert_eq!(names(&source, &disk("d0, /a", "512", "false", "throttle"))[0], NONE);
        for (other, name) in [
            (disk("d0, /a", "0", "false", "raw"), "disk.d:bytes"),
            (disk("d0, /a", "512", "true", "raw"), "disk.d:read-only"),
            (disk("d0, /a", "512", "false", "qcow2"), "disk.d:format"),
        ] {
            assert_eq!(names(&source, &other)[0], [name]);
        }
        let empty = [("disk.d", "d0"), ("disk.d:medium", "none")];
        assert_eq!(names(&source, &empty)[0], ["disk.d:medium"]);
        assert_eq!(names(&empty, &source)[0], ["disk.d:medium"]);
        assert_eq!(names(&empty, &empty)[0], NONE);
        // Its device is missing, which is another refusal.
        assert_eq!(names(&source, &[])[0], NONE);
    }

    #[test]
    fn backing_files_are_the_same_files_or_have_the_same_content() {
        let with = |storage: &'static str, sample: Option<&'static str>| {
            let mut facts = vec![
                ("disk.d", "d0, /a"),
                ("disk.d:storage", "rbd p//i"),
                ("disk.d:backing", "1"),
                ("disk.d:backing-1", "/base"),
                ("disk.d:backing-1:storage", storage),
            ];
            facts.extend(sample.map(|sample| ("disk.d:backing-1:sample", sample)));
            facts
        };
        let (here, there) = ("file system=local device=1 inode=7", "file system=local device=1 inode=8");
        let source = with(here, Some("512 aa"));
        assert_eq!(names(&source, &source), [NONE, NONE]);
        assert_eq!(names(&source, &with(there, Some("512 aa"))), [NONE, NONE]);
        assert_eq!(names(&source, &with(there, Some("512 bb")))[0], ["disk.d:backing-1"]);
        assert_eq!(names(&source, &with(there, None))[1], ["disk.d:backing-1"]);
        let flat = [("disk.d", "d0, /a"), ("disk.d:storage", "rbd p//i"), ("disk.d:backing", "0")];
        assert_eq!(names(&source, &flat)[0], ["disk.d:backing"]);
        // A copy in storage that cannot be compared may have no backing files; an older version does not name them.
        let copy = [("disk.d", "d0, nbd://x"), ("disk.d:backing", "0")];
        assert_eq!(names(&source, &copy), [NONE, NONE]);
        assert_eq!(names(&source, &flat[..2]), [NONE, NONE]);
    }

    #[test]
    fn a_ram_block_must_be_there_and_as_long_unless_it_may_grow() {
        let source = [("ram.pc.ram", "8192 8192"), ("ram.tables", "4096 4096")];
        assert_eq!(names(&source, &[("ram.pc.ram", "8192 8192"), ("ram.tables", "1024 65536")])[0], NONE);
        let [refusals, _] = names(&source, &[("ram.pc.ram", "4096 4096"), ("ram.m0", "1 1")]);
        assert_eq!(refusals, ["ram.pc.ram", "ram.tables"]);
    }
}

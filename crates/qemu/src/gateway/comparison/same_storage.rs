//! Judges by the facts of both sides whether a disk has the same storage.

use std::collections::BTreeMap;

/// Whether a disk of the source and one of the destination are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Judgement {
    Same,
    /// Not, and why.
    Other(&'static str),
    /// They look like one file, but the source's lock is not seen.
    Doubtful,
    Unknown,
}

/// Judges two facts `disk.PATH:storage`.
pub(super) fn judge(source: Option<&str>, destination: Option<&str>, one_host: bool) -> Judgement {
    let (Some(source), Some(destination)) = (source.and_then(Storage::read), destination.and_then(Storage::read))
    else {
        return Judgement::Unknown;
    };
    match (source.kind, destination.kind) {
        ("file", "file") => files(&source, &destination, one_host),
        ("block", "block") => block_devices(&source, &destination, one_host),
        ("rbd" | "iscsi", kind) if source == destination && kind == source.kind => Judgement::Same,
        ("rbd" | "iscsi", kind) if kind == source.kind => Judgement::Other("the images have different names"),
        // For example a file, and an export of it.
        _ => Judgement::Unknown,
    }
}

/// A fact: its kind, and values by names, or one value.
#[derive(PartialEq, Eq)]
struct Storage<'a> {
    kind: &'a str,
    values: BTreeMap<&'a str, &'a str>,
}

impl<'a> Storage<'a> {
    fn read(fact: &'a str) -> Option<Self> {
        let (kind, rest) = fact.split_once(' ')?;
        Some(Self { kind, values: rest.split(' ').map(|word| word.split_once('=').unwrap_or((word, ""))).collect() })
    }

    fn value(&self, name: &str) -> Option<&'a str> {
        self.values.get(name).copied()
    }

    fn bytes(&self, name: &str) -> Option<Vec<&'a str>> {
        Some(self.value(name)?.split(',').filter(|byte| !byte.is_empty()).collect())
    }
}

/// Returns whether both have this value, and the same; none if one lacks it.
fn equal(name: &str, source: &Storage<'_>, destination: &Storage<'_>) -> Option<bool> {
    Some(source.value(name)? == destination.value(name)?)
}

fn files(source: &Storage<'_>, destination: &Storage<'_>, one_host: bool) -> Judgement {
    let equal = |name| equal(name, source, destination);
    let same_inode = equal("inode") == Some(true);
    if one_host && same_inode && equal("device") == Some(true) {
        return Judgement::Same;
    }
    let systems = [source, destination].map(|of| of.value("system").unwrap_or_default());
    if systems == ["local", "local"] {
        return Judgement::Other(if one_host {
            "they are two files of one host"
        } else {
            "each is a file in a file system of its own host"
        });
    }
    let seen = is_lock_seen(source, destination);
    if !systems.iter().all(|system| matches!(*system, "local" | "shared")) {
        return if seen == Some(true) { Judgement::Same } else { Judgement::Unknown };
    }
    // Also where one host is the server of the other one.
    let is_one_file = same_inode && equal("born") != Some(false);
    match (is_one_file, seen) {
        (true, Some(false)) => Judgement::Doubtful,
        (true, _) => Judgement::Same,
        (false, Some(true)) if systems != ["shared", "shared"] => Judgement::Same,
        (false, _) => Judgement::Other("the shared file system numbers them as two files"),
    }
}

/// Returns whether the destination sees all locks of the source's QEMU; none if there are none, or the destination cannot look.
fn is_lock_seen(source: &Storage<'_>, destination: &Storage<'_>) -> Option<bool> {
    let (held, seen) = (source.bytes("held")?, destination.bytes("seen")?);
    (!held.is_empty()).then(|| held.iter().all(|byte| seen.contains(byte)))
}

fn block_devices(source: &Storage<'_>, destination: &Storage<'_>, one_host: bool) -> Judgement {
    if one_host && equal("number", source, destination) == Some(true) || equal("id", source, destination) == Some(true)
    {
        return Judgement::Same;
    }
    // Other names, such as those of encrypted devices, are each host's own. A path of a multipath device has another name than that device.
    const UNIQUE: [&str; 3] = ["dm:LVM-", "dm:mpath-", "wwid:"];
    let [ours, theirs] = [source, destination].map(|of| of.value("id").unwrap_or_default());
    if UNIQUE.iter().any(|kind| ours.starts_with(kind) && theirs.starts_with(kind)) {
        return Judgement::Other("the block devices have different identifiers");
    }
    Judgement::Unknown
}

#[cfg(test)]
mod tests {
    use super::*;

    const OTHER: Judgement = Judgement::Other("");

    /// Returns the judgement without its reason.
    fn judged(source: &str, destination: &str, one_host: bool) -> Judgement {
        match judge(Some(source), Some(destination), one_host) {
            Judgement::Other(_) => OTHER,
            judgement => judgement,
        }
    }

    #[test]
    fn files_of_one_host_are_the_same_by_device_and_inode() {
        let file = |system: &str, numbers: &str| format!("file system={system} {numbers} held=201 seen=");
        let one = "device=1 inode=7";
        for system in ["local", "shared", "other"] {
            assert_eq!(judged(&file(system, one), &file(system, one), true), Judgement::Same);
        }
        for another in ["device=1 inode=8", "device=2 inode=7"] {
            assert_eq!(judged(&file("local", one), &file("local", another), true), OTHER);
            assert_eq!(judged(&file("other", one), &file("other", another), true), Judgement::Unknown);
        }
        // Two mounts of one export.
        let seen = "file system=shared device=2 inode=7 held= seen=101,201";
        assert_eq!(judged(&file("shared", one), seen, true), Judgement::Same);
    }

    #[test]
    fn files_of_two_hosts_are_the_same_by_the_inode_of_a_shared_file_system_and_the_lock_of_the_source() {
        let source = |system: &str| format!("file system={system} device=1 inode=7 born=5 held=101,201 seen=");
        let destination = |system: &str, inode: u8, born: &str, seen: &str| {
            format!("file system={system} device=1 inode={inode}{born} held={seen}")
        };
        for (systems, inode, born, seen, judgement) in [
            (["local", "local"], 7, " born=5", " seen=101,201", OTHER),
            (["shared", "shared"], 7, " born=5", " seen=101,201", Judgement::Same),
            (["shared", "shared"], 7, "", " seen=101,201", Judgement::Same),
            (["shared", "shared"], 7, "", "", Judgement::Same),
            (["shared", "shared"], 7, "", " seen=", Judgement::Doubtful),
            (["shared", "shared"], 7, "", " seen=101", Judgement::Doubtful),
            (["shared", "shared"], 7, " born=6", "", OTHER),
            // Another guest's disk.
            (["shared", "shared"], 8, "", " seen=101,201", OTHER),
            // The source's host is the server.
            (["local", "shared"], 7, "", " seen=101,201", Judgement::Same),
            (["local", "shared"], 9, "", " seen=101,201", Judgement::Same),
            (["shared", "local"], 7, "", " seen=", Judgement::Doubtful),
            (["shared", "local"], 8, "", " seen=", OTHER),
            (["other", "other"], 8, "", " seen=", Judgement::Unknown),
            (["other", "other"], 8, "", " seen=101,201", Judgement::Same),
        ] {
            let there = destination(systems[1], inode, born, seen);
            assert_eq!(judged(&source(systems[0]), &there, false), judgement, "{} {there}", systems[0]);
        }
        // A read-only disk is not locked for writing.
        let reader = "file system=shared device=1 inode=7 held= seen=";
        assert_eq!(judged(reader, reader, false), Judgement::Same);
    }

    #[test]
    fn block_devices_and_images_are_the_same_by_their_names_on_all_hosts() {
        let block = |id: &str| format!("block number=8:16{id}");
        for (ours, theirs, one_host, judgement) in [
            (" id=wwid:a", " id=wwid:a", false, Judgement::Same),
            (" id=wwid:a", " id=wwid:b", false, OTHER),
            (" id=dm:LVM-a", " id=dm:LVM-b", false, OTHER),
            (" id=dm:CRYPT-LUKS2-a-here", " id=dm:CRYPT-LUKS2-a-there", false, Judgement::Unknown),
            (" id=dm:mpath-3a", " id=wwid:naa.a", false, Judgement::Unknown),
            (" id=wwid:a", "", false, Judgement::Unknown),
            ("", "", false, Judgement::Unknown),
            ("", "", true, Judgement::Same),
        ] {
            assert_eq!(judged(&block(ours), &block(theirs), one_host), judgement, "{ours} {theirs}");
        }
        assert_eq!(judged("rbd p//i", "rbd p//i", false), Judgement::Same);
        assert_eq!(judged("rbd p//i", "rbd p//j", false), OTHER);
        assert_eq!(judged("rbd p//i", "iscsi t/1", false), Judgement::Unknown);
        assert_eq!(judged("rbd p//i", "file system=local inode=1", false), Judgement::Unknown);
        for fact in ["", "file", "later x=1", "file ="] {
            assert_eq!(judged(fact, fact, true), Judgement::Unknown, "{fact:?}");
        }
        assert_eq!(judge(None, Some("rbd p//i"), true), Judgement::Unknown);
    }
}

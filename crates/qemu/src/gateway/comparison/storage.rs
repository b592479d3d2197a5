//! What identifies the storage of a disk: facts about the files that QEMU has open. The file that a disk's path names now need not be the one
//! that QEMU has opened, and QEMU may run in another mount namespace.

use std::collections::BTreeSet;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, UNIX_EPOCH};

use rustix::fs::{Mode, OFlags, ResolveFlags, openat2, statfs};
use serde_json::Value;
use sterna_memory::checksum::Crc32c;

use super::locks;

/// How long the file systems may take. Storage that is gone answers never.
const ANSWER_TIME: Duration = Duration::from_secs(3);
/// The bytes that QEMU locks in an image that its guest writes: for writing, and against other writers (block/file-posix.c, RAW_LOCK_PERM_BASE
/// and RAW_LOCK_SHARED_BASE, each with the number of BLK_PERM_WRITE).
const WRITER_LOCKS: [u64; 2] = [101, 201];
/// What is read of a read-only disk: all of it up to this, else as much in pieces.
const SAMPLE_BYTES: u64 = 1 << 20;
const SAMPLE_PIECES: u64 = 64;

/// File systems of one host (linux/magic.h): Btrfs, bcachefs, ext, F2FS, ramfs, tmpfs, XFS, ZFS.
const LOCAL: &[u64] =
    &[0x9123_683e, 0xca45_1a4e, 0xef53, 0xf2f5_2010, 0x8584_58f6, 0x0102_1994, 0x5846_5342, 0x2fc1_2fc1];
/// File systems that show all hosts the same inode numbers and locks: Ceph, GFS2, GPFS, Lustre, NFS, OCFS2.
const SHARED: &[u64] = &[0x00c3_6400, 0x0116_1970, 0x4750_4653, 0x0bd0_0bd0, 0x6969, 0x7461_636f];

/// A disk of the guest.
pub(super) struct Disk {
    /// The fact's name.
    pub(super) name: String,
    /// QEMU's name of the file.
    pub(super) file: String,
    pub(super) read_only: bool,
}

/// Returns facts about the storage of disks. What cannot be found out is left out.
pub(super) fn facts(pid: i32, disks: Vec<Disk>) -> Vec<(String, String)> {
    let (sender, found) = mpsc::sync_channel(1);
    let work = move || drop(sender.send(facts_of(pid, &disks)));
    let started = thread::Builder::new().name("sterna-storage".into()).spawn(work);
    let found = started.map_err(|error| error.to_string()).and_then(|_| {
        found.recv_timeout(ANSWER_TIME).map_err(|_| "the file systems of the disks do not answer".to_owned())
    });
    found.unwrap_or_else(|error| {
        tracing::warn!(%error, "the storage of the guest's disks is not identified");
        Vec::new()
    })
}

fn facts_of(pid: i32, disks: &[Disk]) -> Vec<(String, String)> {
    let files = OpenFiles::of(pid).map_err(|error| tracing::debug!(%error, "QEMU's files cannot be seen")).ok();
    let mut facts = Vec::new();
    for Disk { name, file, read_only } in disks {
        match Place::of(file) {
            Some(Place::Named(storage)) => facts.push((format!("{name}:storage"), storage)),
            Some(Place::Path(path)) => {
                let Some(files) = &files else { continue };
                let Some(open) = files.find(&path) else { continue };
                facts.push((format!("{name}:storage"), files.identity(open)));
                let sample = read_only.then(|| sample(&open.path)).transpose();
                match sample {
                    Ok(sample) => facts.extend(sample.map(|sample| (format!("{name}:sample"), sample))),
                    Err(error) => tracing::debug!(%error, %file, "a read-only disk cannot be read"),
                }
            }
            None => {}
        }
    }
    facts
}

/// Where the content of a disk is.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    Path(PathBuf),
    /// The name of an image that is the same everywhere.
    Named(String),
}

impl Place {
    /// Reads QEMU's name of a file, which is a path, a URL, or `json:` and the options of the nodes.
    fn of(file: &str) -> Option<Self> {
        if let Some(options) = file.strip_prefix("json:") {
            let options: Value = serde_json::from_str(options).ok()?;
            let mut node = &options;
            while node["driver"] != "rbd" && node["driver"] != "iscsi" && !node["filename"].is_string() {
                node = node.get("file")?;
            }
            let text = |key: &str| node[key].as_str().unwrap_or_default();
            let place = match node["driver"].as_str()? {
                "rbd" => Self::Named(format!("rbd {}/{}/{}", text("pool"), text("namespace"), text("image"))),
                "iscsi" => Self::Named(format!("iscsi {}/{}", text("target"), node["lun"].as_u64().unwrap_or(0))),
                _ => Self::Path(text("filename").into()),
            };
            return Some(place);
        }
        if let Some(address) = file.strip_prefix("iscsi://") {
            let (_, image) = address.split_once('/')?;
            return Some(Self::Named(format!("iscsi {image}")));
        }
        if let Some(image) = file.strip_prefix("rbd:") {
            let image = image.split(':').next()?;
            let (pool, image) = image.split_once('/')?;
            let (namespace, image) = image.split_once('/').unwrap_or(("", image));
            return Some(Self::Named(format!("rbd {pool}/{namespace}/{image}")));
        }
        Some(Self::Path(file.into())).filter(|_| !file.is_empty() && !file.contains("://"))
    }
}

/// A file that QEMU has open.
struct OpenFile {
    /// The descriptor, in /proc.
    path: PathBuf,
    /// The path by which QEMU's mount namespace shows the file.
    target: PathBuf,
    metadata: Metadata,
}

struct OpenFiles {
    pid: i32,
    all: Vec<OpenFile>,
}

impl OpenFiles {
    fn of(pid: i32) -> io::Result<Self> {
        let open = |entry: fs::DirEntry| {
            let path = entry.path();
            // Closed meanwhile.
            let (target, metadata) = (fs::read_link(&path).ok()?, fs::metadata(&path).ok()?);
            let kind = metadata.file_type();
            (kind.is_file() || kind.is_block_device()).then_some(OpenFile { path, target, metadata })
        };
        let all = fs::read_dir(format!("/proc/{pid}/fd"))?.filter_map(Result::ok).filter_map(open).collect();
        Ok(Self { pid, all })
    }

    /// Returns the file that QEMU has opened by this path.
    fn find(&self, path: &Path) -> Option<&OpenFile> {
        let now = self.at_path(path).and_then(|now| self.all.iter().find(|open| is_same(&open.metadata, &now)));
        // Another file has this path since, or the path cannot be followed.
        let replaced = || {
            let deleted = format!("{} (deleted)", path.display());
            self.all.iter().find(|open| open.target == path || open.target.as_os_str() == deleted.as_str())
        };
        now.or_else(replaced)
    }

    /// Returns the file that has this path now, as QEMU sees it.
    fn at_path(&self, path: &Path) -> Option<Metadata> {
        if path.is_relative() {
            return fs::metadata(Path::new(&format!("/proc/{}/cwd", self.pid)).join(path)).ok();
        }
        let root = File::open(format!("/proc/{}/root", self.pid)).ok()?;
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let file = openat2(root, path, flags, Mode::empty(), ResolveFlags::IN_ROOT).ok()?;
        File::from(file).metadata().ok()
    }

    /// Returns a fact: its kind, and values by names.
    fn identity(&self, file: &OpenFile) -> String {
        let metadata = &file.metadata;
        if metadata.file_type().is_block_device() {
            let number = format!("{}:{}", rustix::fs::major(metadata.rdev()), rustix::fs::minor(metadata.rdev()));
            let id = block_device_id(&Path::new("/sys/dev/block").join(&number));
            return format!("block number={number}{}", id.map_or_else(String::new, |id| format!(" id={id}")));
        }
        let system = statfs(&file.path).map_or(0, |stat| stat.f_type.cast_unsigned());
        let system = if LOCAL.contains(&system) {
            "local"
        } else if SHARED.contains(&system) {
            "shared"
        } else {
            "other"
        };
        let mut text = format!("file system={system} device={} inode={}", metadata.dev(), metadata.ino());
        if let Some(born) = metadata.created().ok().and_then(|born| born.duration_since(UNIX_EPOCH).ok()) {
            text.push_str(&format!(" born={}", born.as_nanos()));
        }
        let held = self.held(metadata);
        text.push_str(&format!(" held={}", bytes(&held)));
        // A lock that QEMU itself holds would hide another one.
        let seen = File::open(&file.path).and_then(|file| {
            let others = WRITER_LOCKS.into_iter().filter(|byte| !held.contains(byte));
            others.map(|byte| Ok((byte, locks::is_locked(&file, byte)?))).collect::<io::Result<Vec<_>>>()
        });
        if let Ok(seen) = seen {
            let seen = seen.into_iter().filter(|(_, locked)| *locked).map(|(byte, _)| byte).collect();
            text.push_str(&format!(" seen={}", bytes(&seen)));
        }
        text
    }

    /// Returns which of [`WRITER_LOCKS`] this QEMU holds on a file (proc_pid_fdinfo(5)).
    fn held(&self, metadata: &Metadata) -> BTreeSet<u64> {
        let same = self.all.iter().filter(|open| is_same(&open.metadata, metadata));
        let numbers = same.filter_map(|open| open.path.file_name());
        let info = numbers.map(|number| Path::new(&format!("/proc/{}/fdinfo", self.pid)).join(number));
        let info: String = info.filter_map(|info| fs::read_to_string(info).ok()).collect();
        WRITER_LOCKS.into_iter().filter(|byte| info.lines().any(|line| locks_byte(line, *byte))).collect()
    }
}

/// Returns whether a line of a descriptor's information is a lock of this byte.
fn locks_byte(line: &str, byte: u64) -> bool {
    // `lock:	1: OFDLCK  ADVISORY  READ -1 fd:01:1337 201 201`
    let Some(lock) = line.strip_prefix("lock:") else { return false };
    let mut words = lock.split_whitespace().rev();
    let (Some(last), Some(first)) = (words.next(), words.next()) else { return false };
    let number = |word: &str| word.parse::<u64>().ok();
    number(first).is_some_and(|first| first <= byte) && (last == "EOF" || number(last).is_some_and(|last| last >= byte))
}

fn bytes(all: &BTreeSet<u64>) -> String {
    all.iter().map(u64::to_string).collect::<Vec<_>>().join(",")
}

fn is_same(one: &Metadata, other: &Metadata) -> bool {
    let is_device = one.file_type().is_block_device() && other.file_type().is_block_device();
    (one.dev(), one.ino()) == (other.dev(), other.ino()) || is_device && one.rdev() == other.rdev()
}

/// Returns the identifier of a block device that it has on all hosts (Linux Documentation/ABI/stable/sysfs-block).
fn block_device_id(device: &Path) -> Option<String> {
    let read = |name: &str| {
        let text = fs::read_to_string(device.join(name)).ok()?;
        let words: Vec<_> = text.split_whitespace().collect();
        Some(words.join("_")).filter(|text| !text.is_empty())
    };
    if let Some(partition) = read("partition") {
        return Some(format!("{}/{partition}", block_device_id(&fs::canonicalize(device).ok()?.join(".."))?));
    }
    let kinds = [("dm/uuid", "dm"), ("wwid", "wwid"), ("device/wwid", "wwid"), ("serial", "serial")];
    kinds.iter().find_map(|(file, kind)| Some(format!("{kind}:{}", read(file)?)))
}

/// Returns the length of a file, and a checksum of some of it.
fn sample(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    // A block device has a length only so.
    let length = io::Seek::seek(&mut file, io::SeekFrom::End(0))?;
    let mut piece = vec![0; (SAMPLE_BYTES / SAMPLE_PIECES) as usize];
    let mut checksum = Crc32c::new();
    let last = length.saturating_sub(piece.len() as u64);
    let (step, rest) = (last / (SAMPLE_PIECES - 1), last % (SAMPLE_PIECES - 1));
    for number in 0..SAMPLE_PIECES {
        let spread = number * step + number * rest / (SAMPLE_PIECES - 1);
        let at = if length <= SAMPLE_BYTES { number * piece.len() as u64 } else { spread };
        let wanted = length.saturating_sub(at).min(piece.len() as u64) as usize;
        file.read_exact_at(&mut piece[..wanted], at)?;
        checksum.update(&piece[..wanted]);
    }
    Ok(format!("{length} {:08x}", checksum.finish()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_place_of_a_disk_is_read_from_paths_urls_and_options() {
        let named = |name: &str| Some(Place::Named(name.into()));
        let path = |path: &str| Some(Place::Path(path.into()));
        for (file, place) in [
            ("/a/b:c.raw", path("/a/b:c.raw")),
            ("images/a.qcow2", path("images/a.qcow2")),
            (r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"/a"}}"#, path("/a")),
            (
                r#"json:{"driver":"throttle","file":{"driver":"raw","file":{"driver":"host_device","filename":"/dev/x"}}}"#,
                path("/dev/x"),
            ),
            (r#"json:{"driver":"raw","file":{"driver":"rbd","pool":"p","image":"i","conf":"/c"}}"#, named("rbd p//i")),
            ("rbd:p/i:conf=/c", named("rbd p//i")),
            ("rbd:p/n/i", named("rbd p/n/i")),
            ("iscsi://u%p@host:3260/iqn.2026-01.org.x:t/1", named("iscsi iqn.2026-01.org.x:t/1")),
            (
                r#"json:{"driver":"iscsi","portal":"b","target":"iqn.2026-01.org.x:t","lun":1}"#,
                named("iscsi iqn.2026-01.org.x:t/1"),
            ),
            ("nbd://host:10809/disk", None),
            (r#"json:{"driver":"nbd","server":{"type":"unix"}}"#, None),
            ("json:{", None),
            ("", None),
        ] {
            assert_eq!(Place::of(file), place, "{file}");
        }
    }

    #[test]
    fn the_locks_of_a_descriptor_are_ranges_of_bytes() {
        let line = |range: &str| format!("lock:\t1: OFDLCK  ADVISORY  READ -1 fd:01:1337 {range}");
        for (range, locked) in
            [("201 201", true), ("200 203", true), ("100 101", false), ("100 EOF", true), ("202 EOF", false)]
        {
            assert_eq!(locks_byte(&line(range), 201), locked, "{range}");
        }
        assert!(!locks_byte("pos:\t201", 201));
    }

    #[test]
    fn a_sample_tells_files_apart_that_differ_where_it_reads() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        let of = |bytes: &[u8]| {
            fs::write(&path, bytes).unwrap();
            sample(&path).unwrap()
        };
        assert_eq!(of(&[]), "0 00000000");
        let small = vec![7; 300_001];
        assert_eq!(of(&small), of(&small));
        let other = |mut bytes: Vec<u8>, at: usize| {
            bytes[at] ^= 1;
            bytes
        };
        assert!((0..300_001).step_by(50_000).all(|at| of(&small) != of(&other(small.clone(), at))));
        let large = vec![7; (8 << 20) + 5];
        assert_ne!(of(&large), of(&other(large.clone(), 0)));
        assert_ne!(of(&large), of(&other(large.clone(), large.len() - 1)));
        assert_ne!(of(&large), of(&large[1..]));
    }

    #[test]
    fn a_file_is_found_by_its_descriptor_although_another_one_has_its_path() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        let open = File::create_new(&path).unwrap();
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let own = OpenFiles::of(std::process::id().cast_signed()).unwrap();
        let is_open =
            |path: &Path| own.find(path).is_some_and(|found| is_same(&found.metadata, &open.metadata().unwrap()));
        assert!(is_open(&path) && is_open(&link));
        fs::rename(&path, directory.path().join("older")).unwrap();
        fs::write(&path, "another").unwrap();
        let own = OpenFiles::of(std::process::id().cast_signed()).unwrap();
        assert!(own.find(&path).is_none(), "renamed: its present path is not this one");
        fs::remove_file(directory.path().join("older")).unwrap();
        drop(own);
        let replaced = directory.path().join("replaced");
        let open = File::create_new(&replaced).unwrap();
        fs::remove_file(&replaced).unwrap();
        fs::write(&replaced, "another").unwrap();
        let own = OpenFiles::of(std::process::id().cast_signed()).unwrap();
        let found = own.find(&replaced).expect("the deleted file is open");
        assert!(is_same(&found.metadata, &open.metadata().unwrap()));
    }

    #[test]
    fn block_devices_are_named_by_what_all_hosts_see() {
        let directory = tempfile::tempdir().unwrap();
        let disk = directory.path().join("sda");
        let write = |name: &str, text: &str| {
            let path = disk.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("sda1/partition", "1\n");
        assert_eq!(block_device_id(&disk), None);
        assert_eq!(block_device_id(&disk.join("sda1")), None);
        write("device/wwid", "t10.ATA     Disk    7\n");
        assert_eq!(block_device_id(&disk).as_deref(), Some("wwid:t10.ATA_Disk_7"));
        assert_eq!(block_device_id(&disk.join("sda1")).as_deref(), Some("wwid:t10.ATA_Disk_7/1"));
        write("dm/uuid", "LVM-abc\n");
        assert_eq!(block_device_id(&disk).as_deref(), Some("dm:LVM-abc"));
    }
}

//! The Linux guests' initial file system: one program, one console. It is a cpio archive in Linux's format (`newc`,
//! Documentation/driver-api/early-userspace/buffer-format.rst in the kernel's sources), not compressed, because unpacking is
//! slower than reading in an emulated guest.

/// Returns an archive with `program` as `/init`, the `/dev/console` that the kernel opens for it, a directory for the kernel's modules, and
/// `files` by their names.
pub(crate) fn with_init(program: &[u8], files: &[(String, Vec<u8>)]) -> Vec<u8> {
    const DIRECTORY: u32 = 0o040_755;
    const CHARACTER_DEVICE: u32 = 0o020_600;
    const PROGRAM: u32 = 0o100_755;
    let content = files.iter().map(|(_, file)| file.len() + 256).sum::<usize>();
    let mut archive = Vec::with_capacity(program.len() + content + 1024);
    entry(&mut archive, 1, "dev", DIRECTORY, (0, 0), &[]);
    // The numbers of /dev/console: Documentation/admin-guide/devices.txt in the kernel's sources.
    entry(&mut archive, 2, "dev/console", CHARACTER_DEVICE, (5, 1), &[]);
    entry(&mut archive, 3, "init", PROGRAM, (0, 0), program);
    entry(&mut archive, 4, "modules", DIRECTORY, (0, 0), &[]);
    for (inode, (name, file)) in (5..).zip(files) {
        entry(&mut archive, inode, name, PROGRAM, (0, 0), file);
    }
    entry(&mut archive, 0, "TRAILER!!!", 0, (0, 0), &[]);
    archive
}

fn entry(archive: &mut Vec<u8>, inode: u32, name: &str, mode: u32, (major, minor): (u32, u32), data: &[u8]) {
    let size = u32::try_from(data.len()).expect("a file of a guest is smaller than 4 GiB");
    let name_size = u32::try_from(name.len() + 1).expect("a short name");
    // inode, mode, user, group, links, time, size, device (2), device of a node (2), size of the name, checksum (unused)
    let fields = [inode, mode, 0, 0, 1, 0, size, 0, 0, major, minor, name_size, 0];
    archive.extend_from_slice(b"070701");
    for field in fields {
        archive.extend_from_slice(format!("{field:08X}").as_bytes());
    }
    archive.extend_from_slice(name.as_bytes());
    archive.push(0);
    pad(archive);
    archive.extend_from_slice(data);
    pad(archive);
}

/// Names and data end at multiples of four bytes.
fn pad(archive: &mut Vec<u8>) {
    archive.resize(archive.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_begins_at_a_multiple_of_four_and_names_its_sizes() {
        let archive =
            with_init(b"program", &[("file-0".into(), b"content".to_vec()), ("modules/1".into(), Vec::new())]);
        let mut at = 0;
        let mut names = Vec::new();
        loop {
            assert_eq!(&archive[at..at + 6], b"070701", "at {at}");
            let field = |number: usize| {
                let text =
                    std::str::from_utf8(&archive[at + 6 + number * 8..at + 14 + number * 8]).expect("hexadecimal");
                usize::from_str_radix(text, 16).expect("hexadecimal")
            };
            let (size, name_size) = (field(6), field(11));
            let name = std::str::from_utf8(&archive[at + 110..at + 110 + name_size - 1]).expect("a name");
            names.push((name.to_owned(), size));
            if name == "TRAILER!!!" {
                break;
            }
            at = ((at + 110 + name_size).next_multiple_of(4) + size).next_multiple_of(4);
        }
        let expected = [("dev", 0), ("dev/console", 0), ("init", 7), ("modules", 0), ("file-0", 7), ("modules/1", 0)];
        assert_eq!(names.pop().expect("an end").0, "TRAILER!!!");
        assert_eq!(names, expected.map(|(name, size)| (name.to_owned(), size)));
    }
}

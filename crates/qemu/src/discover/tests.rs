//! Parsing the output of QEMU and `/proc`. The texts are those of Debian's 7.2.22 and 10.0.2.

use std::os::unix::fs::FileExt;

use super::monitor::{address_from_view, device_memory, memdevs, ram_blocks};
use super::*;

const RAMBLOCK_7_2: &str =
    "              Block Name    PSize              Offset               Used              Total\r
                  pc.ram    4 KiB  0x0000000000000000 0x0000000010000000 0x0000000010000000\r
   0000:00:01.0/vga.vram    4 KiB  0x0000000010080000 0x0000000001000000 0x0000000001000000\r
    /rom@etc/acpi/tables    4 KiB  0x00000000110c0000 0x0000000000020000 0x0000000000200000\r
";
const RAMBLOCK_10_0: &str = "              Block Name    PSize              Offset               Used              Total                HVA  RO\r
                    ram0    2 MiB  0x0000000000000000 0x0000000010000000 0x0000000010000000 0x00007f7cefe00000  rw\r
    /rom@etc/acpi/tables    4 KiB  0x00000000110c0000 0x0000000000020000 0x0000000000200000 0x00007f7d05c00000  ro\r
";
const VIEW: &str = "FlatView #0\r
 AS \"cpu-smm-0\", root: memory\r
 Root memory region: memory\r
  0000000000000000-000000000009ffff (prio 0, ram): pc.ram @0000000000f00000\r
\r
FlatView #1\r
 AS \"memory\", root: system\r
 AS \"cpu-memory-0\", root: system\r
 Root memory region: system\r
  0000000000000000-000000000009ffff (prio 0, ram): pc.ram\r
  00000000000a0000-00000000000bffff (prio 1, i/o): vga-lowmem\r
  00000000000c0000-00000000000dffff (prio 1, rom): pc.rom\r
  0000000000100000-000000007fffffff (prio 0, ram): pc.ram @0000000000100000 KVM\r
  00000000e0000000-00000000e0ffffff (prio 1, ram): pc.ram2\r
  0000000100000000-000000017fffffff (prio 0, ram): pc.ram @0000000080000000 KVM\r
";

fn block(name: &str) -> ListedBlock {
    ListedBlock {
        name: name.into(),
        page_size: 4096,
        offset: 0,
        used: 1 << 28,
        total: 1 << 28,
        address: None,
        read_only: None,
    }
}

#[test]
fn ram_blocks_of_7_2_have_no_address() {
    let blocks = ram_blocks(RAMBLOCK_7_2).unwrap();
    assert_eq!(blocks.len(), 3);
    assert_eq!(blocks[0], block("pc.ram"));
    assert_eq!(blocks[1].name, "0000:00:01.0/vga.vram");
    assert_eq!((blocks[2].used, blocks[2].total), (0x20000, 0x200000));
}

#[test]
fn ram_blocks_of_10_0_have_address_and_read_only() {
    let blocks = ram_blocks(RAMBLOCK_10_0).unwrap();
    assert_eq!(blocks[0].address, Some(0x7f7cefe00000));
    assert_eq!((blocks[0].read_only, blocks[1].read_only), (Some(false), Some(true)));
    assert_eq!(blocks[0].page_size, 2 << 20);
}

#[test]
fn ram_block_names_may_contain_blanks() {
    let text = RAMBLOCK_7_2.replace("                  pc.ram", "          my 4 KiB ram 1");
    assert_eq!(ram_blocks(&text).unwrap()[0].name, "my 4 KiB ram 1");
}

#[test]
fn a_block_without_a_name_is_not_migrated_and_left_out() {
    let text = RAMBLOCK_7_2.replace("                  pc.ram", "                        ");
    assert_eq!(ram_blocks(&text).unwrap().len(), ram_blocks(RAMBLOCK_7_2).unwrap().len() - 1);
}

#[test]
fn unknown_tables_are_not_guessed_at() {
    for text in [
        "",
        "unknown command: 'info ramblock'\r\n",
        &RAMBLOCK_10_0.replace("HVA  RO", "RO  HVA"),
        &RAMBLOCK_10_0.replace("  rw", ""),
        &RAMBLOCK_7_2.replace("4 KiB", "3 KiB"),
        &RAMBLOCK_7_2.replace("0x0000000010000000 0x0000000010000000", "0x0000000010000000 0x1"),
    ] {
        let error = ram_blocks(text).unwrap_err();
        assert!(matches!(error, DiscoverError::NotUnderstood { .. }), "{error}");
    }
}

#[test]
fn address_comes_from_the_view_of_memory_and_is_cross_checked() {
    let host = |gpa: u64| match gpa {
        0x1_0000_0000.. => gpa - 0x8000_0000,
        _ => gpa,
    };
    let answer =
        |gpa: u64| Ok(format!("Host virtual address for {gpa:#x} (pc.ram) is {:#x}\r\n", 0x7f00_0000_0000 + host(gpa)));
    let found = address_from_view(VIEW, &block("pc.ram"), answer).unwrap();
    assert_eq!(found, Ok(0x7f00_0000_0000));

    // One of the answers differs.
    let lying = |gpa: u64| answer(if gpa == 0x100000 { gpa + 0x1000 } else { gpa });
    let reason = address_from_view(VIEW, &block("pc.ram"), lying).unwrap().unwrap_err();
    assert!(reason.contains("do not agree"), "{reason}");
    // The answer is about another block.
    let reason = address_from_view(VIEW, &block("pc.ram2"), answer).unwrap().unwrap_err();
    assert!(reason.contains("do not agree"), "{reason}");
    // The guest does not see the block; a block seen as ROM does not count.
    for name in ["ram0", "pc.rom", "vga-lowmem"] {
        let reason = address_from_view(VIEW, &block(name), answer).unwrap().unwrap_err();
        assert!(reason.contains("does not tell its address"), "{reason}");
    }
}

#[test]
fn only_plain_memory_backends_are_filled_from_outside() {
    let devs = memdevs(&json!([
        {"id": "ram0", "size": 1 << 28, "share": true, "prealloc": false, "future": {}},
        {"id": "vmem", "size": 1 << 28, "share": false, "prealloc": false},
        {"id": "twin", "size": 1 << 28, "share": false, "prealloc": false},
        {"id": "twin", "size": 1 << 28, "share": false, "prealloc": false},
        {"size": 1}
    ]));
    assert_eq!(devs.len(), 4);
    let owned = device_memory(&json!([
        {"type": "dimm", "data": {"memdev": "/objects/ram0"}},
        {"type": "virtio-mem", "data": {"memdev": "/objects/vmem"}},
        {"type": "new", "data": {}}
    ]));
    let backend_of = |block: &ListedBlock| backend_of(block, &devs, &owned).map(|memdev| memdev.id.clone());
    assert_eq!(backend_of(&block("ram0")).unwrap(), "ram0");
    assert_eq!(backend_of(&block("/objects/ram0")).unwrap(), "ram0");
    for (block, expected) in [
        (block("pc.bios"), "device or the firmware"),
        (block("vmem"), "device of type virtio-mem"),
        (block("twin"), "several memory backends"),
        (ListedBlock { used: 4096, ..block("ram0") }, "resized"),
        (ListedBlock { read_only: Some(true), ..block("ram0") }, "read-only"),
        (ListedBlock { used: 4096, total: 4096, ..block("ram0") }, "size"),
    ] {
        let reason = backend_of(&block).unwrap_err();
        assert!(reason.contains(expected), "{reason}");
    }
}

#[test]
fn area_must_be_one_writable_backing_without_holes() {
    let maps = Maps::parse(
        "7f0000000000-7f0000100000 rw-p 00000000 00:00 0 \n\
         7f0000100000-7f0000200000 rw-p 00000000 00:00 0 [anon: x]\n\
         7f0000200000-7f0000201000 ---p 00000000 00:00 0 \n\
         7f0000300000-7f0000400000 rw-s 00001000 00:01 1050    /memfd:memory-backend-memfd (deleted)\n\
         7f0000400000-7f0000500000 rw-s 00101000 00:01 1050    /memfd:memory-backend-memfd (deleted)\n\
         7f0000500000-7f0000600000 rw-s 00300000 00:01 1050    /memfd:memory-backend-memfd (deleted)\n\
         7f0000600000-7f0000700000 r--p 00000000 fe:01 77      /usr/bin/qemu-system-x86_64\n",
    );
    let area = maps.area(0x7f0000000000, 0x200000).unwrap();
    assert_eq!((area.shared, area.inode, area.offset), (false, 0, 0));
    let area = maps.area(0x7f0000380000, 0x100000).unwrap();
    assert_eq!((area.shared, area.inode, area.offset), (true, 1050, 0x81000));
    assert_eq!(area.first_mapping, (0x7f0000300000, 0x7f0000400000));
    assert!(area.is_device(rustix::fs::makedev(0, 1)) && !area.is_device(rustix::fs::makedev(0, 2)));
    for (address, size, expected) in [
        (0x7eff_ffff_f000, 0x2000, "not mapped"),
        (0x7f0000000000, 0x201000, "read-only"),
        (0x7f0000000000, 0x300000, "read-only"),
        (0x7f0000201000, 0x1000, "not mapped"),
        (0x7f0000300000, 0x300000, "different things"),
        (0x7f0000600000, 0x1000, "read-only"),
        (0x7f0000500000, 0x200000, "different things"),
        (u64::MAX - 5, 0x1000, "not possible"),
        (0x7f0000000000, 0, "not possible"),
    ] {
        let reason = maps.area(address, size).unwrap_err();
        assert!(reason.contains(expected), "{address:#x} {size:#x}: {reason}");
    }
    let gap = Maps::parse("1000-2000 rw-p 0 00:00 0\n3000-4000 rw-p 0 00:00 0\n");
    assert!(gap.area(0x1000, 0x3000).unwrap_err().contains("as a whole"));
    assert!(gap.area(0x3000, 0x2000).unwrap_err().contains("as a whole"));
}

#[test]
fn huge_tmpfs_is_recognised_by_its_mount() {
    let mounts = "36 25 0:32 / /huge rw,nosuid shared:1 - tmpfs tmpfs rw,size=1024k,huge=always\n\
                  37 25 0:33 / /plain rw - tmpfs tmpfs rw,size=1024k\n\
                  38 25 0:34 / /never rw - tmpfs huge=always rw,huge=never\n";
    for (minor, huge) in [(32, true), (33, false), (34, false), (35, false)] {
        assert_eq!(maps::mounted_huge(mounts, 0, minor), huge);
    }
}

#[test]
fn locked_or_pinned_memory_is_seen() {
    assert!(!maps::has_pinned_memory("VmPeak:\t 10 kB\nVmLck:\t       0 kB\nVmPin:\t       0 kB\n"));
    assert!(maps::has_pinned_memory("VmLck:\t    4096 kB\nVmPin:\t       0 kB\n"));
    assert!(maps::has_pinned_memory("VmLck:\t       0 kB\nVmPin:\t    4096 kB\n"));
}

#[test]
fn written_parts_of_a_file_are_touched_and_the_rest_is_fresh() {
    let file = memfd(4 << 20);
    file.write_all_at(&[1; 4096], 0).unwrap();
    file.write_all_at(&[1; 8192], 1 << 20).unwrap();
    file.write_all_at(&[1; 4096], (4 << 20) - 4096).unwrap();
    let location = shared(file, 4096, FileKind::Memfd { huge: false });
    let fresh = location.touched_ranges((3 << 20) - 4096).unwrap();
    let start = (1 << 20) - 4096;
    assert_eq!(fresh, Freshness::Fresh(std::iter::once(start..start + 8192).collect()));
    let pages = |page_size: u64| {
        let written = fresh.written_pages(1 << 20, page_size).unwrap();
        written.map(|pages| (pages.start, pages.end)).collect::<Vec<_>>()
    };
    assert_eq!(pages(4096), [(start / 4096, start / 4096 + 2)]);
    assert_eq!(pages(2 * (start + 8192)), [(0, 1)], "a page that is written in part is written");
    assert_eq!(fresh.touched_bytes(3 << 20), 8192);
    let nothing = shared(memfd(1 << 20), 0, FileKind::Memfd { huge: false }).touched_ranges(1 << 20);
    assert_eq!(nothing.unwrap(), Freshness::Fresh(Vec::new()));
}

#[test]
fn memory_of_unknown_content_counts_as_touched() {
    let file = || memfd(1 << 20);
    for kind in [FileKind::Disk, FileKind::Hugetlb { page_size: 2 << 20 }] {
        shared(file(), 0, kind).touched_ranges(1 << 20).unwrap_err();
    }
    let mut location = shared(file(), 0, FileKind::Tmpfs { huge: false });
    location.preallocated = true;
    location.touched_ranges(1 << 20).unwrap_err();
    location.preallocated = false;
    location.backing = Backing::PrivateFile;
    location.touched_ranges(1 << 20).unwrap_err();
    let unreachable = RamBlock { name: "x".into(), used: 1, page_size: 4096, location: Err("why".into()) };
    assert_eq!(unreachable.freshness().written_pages(1, 4096).err(), Some("its memory is out of reach"));
}

#[test]
fn anonymous_pages_in_use_are_touched() {
    // This test's own memory: a fresh mapping of which two pages are written.
    let size: usize = 1 << 20;
    // SAFETY: a new private mapping at an address that the kernel chooses.
    let start = unsafe {
        rustix::mm::mmap_anonymous(
            std::ptr::null_mut(),
            size,
            rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE,
            rustix::mm::MapFlags::PRIVATE,
        )
    }
    .unwrap();
    // Where huge pages are always on, one store would touch all of it.
    // SAFETY: advice on the mapping made above.
    unsafe { rustix::mm::madvise(start, size, rustix::mm::Advice::LinuxNoHugepage) }.unwrap();
    for page in [3, 4] {
        // SAFETY: inside the mapping.
        unsafe { start.cast::<u8>().add(page * 4096).write_volatile(1) };
    }
    let location = Location {
        process: Arc::new(TargetProcess::open(std::process::id() as i32).unwrap()),
        address: start as u64,
        backing: Backing::Anonymous,
        preallocated: false,
        pinned: false,
    };
    let fresh = location.touched_ranges(size as u64).unwrap();
    assert_eq!(fresh, Freshness::Fresh(std::iter::once(3 * 4096..5 * 4096).collect()));
    // SAFETY: the mapping made above, not used afterwards.
    unsafe { rustix::mm::munmap(start, size) }.unwrap();
}

fn memfd(size: u64) -> File {
    let file = File::from(rustix::fs::memfd_create("discover-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    file.set_len(size).unwrap();
    file
}

fn shared(file: File, offset: u64, kind: FileKind) -> Location {
    Location {
        process: Arc::new(TargetProcess::open(std::process::id() as i32).unwrap()),
        address: 0,
        backing: Backing::Shared { file, offset, kind },
        preallocated: false,
        pinned: false,
    }
}

//! The methods of placing, each tested against the real target: files, memfds, a child process.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};

use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};

use super::*;
use std::sync::Arc;

const SIZE: u64 = 4 << 20;

fn memfd() -> File {
    let fd = rustix::fs::memfd_create("place-test", MemfdFlags::CLOEXEC).unwrap();
    let file = File::from(fd);
    file.set_len(SIZE).unwrap();
    file
}

fn content(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// Private anonymous memory, for a child to inherit at the same address.
struct Anonymous(*mut u8);

impl Anonymous {
    fn new() -> Self {
        // SAFETY: a new mapping at an address the kernel chooses.
        let start = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                SIZE as usize,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        };
        Self(start.unwrap().cast())
    }

    fn address(&self) -> u64 {
        self.0 as u64
    }
}

impl Drop for Anonymous {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`; no pointer into it is used afterwards.
        unsafe { rustix::mm::munmap(self.0.cast(), SIZE as usize) }.unwrap();
    }
}

/// A forked child that only waits to be killed. Its memory is a copy of ours at the same addresses.
struct Child(i32);

impl Child {
    fn new() -> Self {
        // SAFETY: the child calls nothing but async-signal-safe functions: prctl, pause and _exit.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: as above. The child dies with its parent, so a failed test leaves nothing behind.
            unsafe {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                libc::pause();
                libc::_exit(0)
            }
        }
        assert!(pid > 0, "fork failed");
        Self(pid)
    }

    fn target(&self) -> Arc<TargetProcess> {
        Arc::new(TargetProcess::open(self.0).unwrap())
    }

    fn read(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0_u8; len];
        let local = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: len };
        let remote = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: len };
        // SAFETY: the local entry is a buffer of exactly that length.
        let read = unsafe { libc::process_vm_readv(self.0, &local, 1, &remote, 1, 0) };
        assert_eq!(read, len as isize);
        bytes
    }

    fn end(&mut self) {
        if self.0 > 0 {
            // SAFETY: our own child, not yet waited for.
            unsafe {
                libc::kill(self.0, libc::SIGKILL);
                assert_eq!(libc::waitpid(self.0, std::ptr::null_mut(), 0), self.0);
            }
            self.0 = 0;
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.end();
    }
}

/// Reads pages back: all of them, more than one system call takes, in any order, none; none outside.
fn read_back(place: &dyn Place, expected: &[u8]) {
    let pages = SIZE / PAGE_SIZE as u64;
    let all: Vec<u64> = (0..pages).map(|page| page * PAGE_SIZE as u64).collect();
    let every_second: Vec<u64> = all.iter().step_by(2).copied().collect();
    assert!(every_second.len() > VECTOR);
    let mixed = [5, 6, 7, 3, 4, 1000, 0, 1023].map(|page| page * PAGE_SIZE as u64).to_vec();
    for offsets in [all, every_second, mixed, Vec::new()] {
        let mut bytes = vec![0xee; offsets.len() * PAGE_SIZE];
        place.read_pages(&offsets, &mut bytes).unwrap();
        for (offset, page) in offsets.iter().zip(bytes.chunks(PAGE_SIZE)) {
            assert!(*page == expected[*offset as usize..][..PAGE_SIZE], "page at {offset:#x}");
        }
    }
    let mut page = vec![0xee; PAGE_SIZE];
    for outside in [SIZE, SIZE - 8, u64::MAX - 8] {
        let error = place.read_pages(&[outside], &mut page).unwrap_err();
        assert!(matches!(error, PlaceError::OutOfBounds { .. }), "{error}");
    }
    assert!(place.read_pages(&[0, 4096], &mut page).is_err(), "room for one");
    assert!(page.iter().all(|byte| *byte == 0xee));
}

/// The pieces that every method is tested with: adjacent, a gap, unaligned, empty, the last byte.
fn exercise(place: &dyn Place, read: &dyn Fn() -> Vec<u8>) {
    let page = vec![0xa5_u8; 4096];
    let odd: Vec<u8> = (0..10_000).map(|i| (i % 251) as u8 + 1).collect();
    let mut expected = vec![0_u8; SIZE as usize];
    let pieces = [
        (0, &page[..]),
        (4096, &page[..]),
        (8192, &[]),
        (1 << 20, &odd[..]),
        ((1 << 20) + 10_000, &page[..100]),
        (SIZE - 1, &page[..1]),
        (SIZE, &[]),
    ]
    .map(|(offset, data)| Piece { offset, data });
    place.write_pieces(&pieces).unwrap();
    for piece in &pieces {
        let at = piece.offset as usize;
        expected[at..at + piece.data.len()].copy_from_slice(piece.data);
    }
    assert!(read() == expected, "pieces");

    // More pieces than one system call takes, every second page.
    let many: Vec<Piece<'_>> =
        (0..SIZE / 8192).map(|i| Piece { offset: i * 8192, data: &odd[i as usize..i as usize + 4096] }).collect();
    assert!(many.len() > VECTOR);
    place.write_pieces(&many).unwrap();
    for piece in &many {
        let at = piece.offset as usize;
        expected[at..at + 4096].copy_from_slice(piece.data);
    }
    assert!(read() == expected, "many pieces");
    read_back(place, &expected);

    place.zero(8192, 4096).unwrap();
    expected[8192..12288].fill(0);
    place.zero((1 << 20) + 5, 300_000).unwrap();
    expected[(1 << 20) + 5..(1 << 20) + 300_005].fill(0);
    place.zero(SIZE, 0).unwrap();
    assert!(read() == expected, "zero");

    for (offset, len) in [(SIZE, 1), (SIZE - 1, 2), (u64::MAX, 2), (0, SIZE + 1)] {
        let error = place.zero(offset, len).unwrap_err();
        assert!(matches!(error, PlaceError::OutOfBounds { .. }), "{error}");
    }
    let bad = [Piece { offset: 0, data: &[9; 16] }, Piece { offset: SIZE - 8, data: &[9; 16] }];
    let error = place.write_pieces(&bad).unwrap_err();
    assert!(matches!(error, PlaceError::OutOfBounds { .. }), "{error}");
    assert!(read() == expected, "a refused call writes nothing");

    // Several threads, disjoint ranges.
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            scope.spawn(move || {
                let page = [thread as u8 + 1; 4096];
                for i in 0..64 {
                    place.write((i * 4 + thread) * 4096, &page).unwrap();
                }
            });
        }
    });
    for i in 0..256_usize {
        expected[i * 4096..(i + 1) * 4096].fill((i % 4) as u8 + 1);
    }
    assert!(read() == expected, "threads");
}

#[test]
fn mapping_writes_a_memfd() {
    let file = memfd();
    let place = Mapped::new(&file, 0, SIZE).unwrap();
    assert_eq!(place.method(), PlacementMethod::Mapping);
    exercise(&place, &|| content(&file));
}

#[test]
fn mapping_at_a_file_offset_writes_only_its_part() {
    let file = memfd();
    let place = Mapped::new(&file, 8192, 4096).unwrap();
    place.write(0, &[7; 4096]).unwrap();
    place.write(4096, &[7]).unwrap_err();
    let content = content(&file);
    assert!(content[8192..12288].iter().all(|byte| *byte == 7));
    assert_eq!(content.iter().filter(|byte| **byte == 7).count(), 4096);
}

#[test]
fn mapping_of_a_truncated_file_is_an_error_not_a_signal() {
    let file = memfd();
    let place = Mapped::new(&file, 0, SIZE).unwrap();
    file.set_len(4096).unwrap();
    let error = place.write(1 << 20, &[1; 4096]).unwrap_err();
    assert!(matches!(error, PlaceError::NoMemory { offset, .. } if offset == 1 << 20), "{error}");
    place.write(0, &[1; 4096]).unwrap();
}

#[test]
fn file_shorter_than_the_block_is_refused() {
    let file = memfd();
    let error = Mapped::new(&file, 4096, SIZE).unwrap_err();
    assert!(error.to_string().contains("too few"), "{error}");
    let error = FileWrite::new(file, 1, SIZE, ZeroBy::Writing).unwrap_err();
    assert!(error.to_string().contains("too few"), "{error}");
}

#[test]
fn file_write_writes_a_memfd() {
    for zero_by in [ZeroBy::PunchHole, ZeroBy::Writing] {
        let file = memfd();
        let place = FileWrite::new(file.try_clone().unwrap(), 0, SIZE, zero_by).unwrap();
        assert_eq!(place.method(), PlacementMethod::FileWrite);
        exercise(&place, &|| content(&file));
    }
}

#[test]
fn file_write_at_a_file_offset_writes_only_its_part() {
    let file = memfd();
    let place = FileWrite::new(file.try_clone().unwrap(), 4096, 8192, ZeroBy::PunchHole).unwrap();
    place.write(4095, &[7; 10]).unwrap();
    let content = content(&file);
    assert!(content[8191..8201].iter().all(|byte| *byte == 7));
    assert_eq!(content.iter().filter(|byte| **byte != 0).count(), 10);
}

#[test]
fn punching_frees_memory_and_writing_zeros_does_not() {
    for (zero_by, blocks_left) in [(ZeroBy::PunchHole, false), (ZeroBy::Writing, true)] {
        let file = memfd();
        let place = FileWrite::new(file.try_clone().unwrap(), 0, SIZE, zero_by).unwrap();
        place.write(0, &vec![1; SIZE as usize]).unwrap();
        place.zero(0, SIZE).unwrap();
        assert_eq!(file.metadata().unwrap().blocks() > 0, blocks_left);
        assert!(content(&file).iter().all(|byte| *byte == 0));
    }
}

#[test]
fn sealed_against_writing_is_an_error() {
    let fd = rustix::fs::memfd_create("place-test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&fd, SIZE).unwrap();
    rustix::fs::fcntl_add_seals(&fd, rustix::fs::SealFlags::WRITE).unwrap();
    let file = File::from(fd);
    let place = FileWrite::new(file.try_clone().unwrap(), 0, SIZE, ZeroBy::PunchHole).unwrap();
    let error = place.write(0, &[1]).unwrap_err();
    assert!(matches!(error, PlaceError::Io { .. }), "{error}");
    place.zero(0, SIZE).unwrap_err();
    Mapped::new(&file, 0, SIZE).unwrap_err();
}

#[test]
fn process_write_reaches_the_childs_memory_and_only_the_childs() {
    let memory = Anonymous::new();
    let child = Child::new();
    let place = ProcessWrite::new(&child.target(), memory.address(), SIZE).unwrap();
    assert_eq!(place.method(), PlacementMethod::ProcessWrite);
    exercise(&place, &|| child.read(memory.address(), SIZE as usize));
    // SAFETY: our own mapping, which nobody writes.
    let ours = unsafe { std::slice::from_raw_parts(memory.0, SIZE as usize) };
    assert!(ours.iter().all(|byte| *byte == 0));
}

#[test]
fn process_that_ended_is_named_in_the_error() {
    let memory = Anonymous::new();
    let mut child = Child::new();
    let pid = child.0;
    let target = child.target();
    let place = ProcessWrite::new(&target, memory.address(), SIZE).unwrap();
    child.end();
    for result in [place.write(0, &[1; 4096]), place.zero(0, 4096), target.check_alive()] {
        let error = result.unwrap_err();
        assert!(matches!(error, PlaceError::Gone { pid: gone } if gone == pid), "{error}");
    }
    let error = TargetProcess::open(pid).unwrap_err();
    assert!(matches!(error, PlaceError::Gone { .. }), "{error}");
    let error = ProcessWrite::new(&target, memory.address(), SIZE).unwrap_err();
    assert!(matches!(error, PlaceError::Gone { .. }), "{error}");
}

/// A child that replaces its program on request, and keeps its id: its address space is another program's then, as it
/// is when the id is reused.
#[test]
fn a_program_that_comes_under_the_same_number_is_never_written() {
    use std::io::{Read, Write};
    use std::os::unix::process::CommandExt;
    use std::process::{Command, Stdio};

    // The memory of `cat` is laid out alike every time without randomisation, so that the same address exists in both.
    let mut command = Command::new("sh");
    command.args(["-c", "echo ready; read line; exec cat"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    // SAFETY: personality(2) is a plain system call.
    unsafe {
        command.pre_exec(|| match libc::personality(libc::ADDR_NO_RANDOMIZE as libc::c_ulong) {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        });
    }
    let mut child = command.spawn().unwrap();
    let (mut input, mut output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    output.read_exact(&mut [0; 6]).unwrap();
    let pid = child.id() as i32;
    let stack = || -> u64 {
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
        let line = maps.lines().find(|line| line.ends_with("[stack]")).unwrap();
        let end = line.split([' ', '-']).nth(1).unwrap();
        u64::from_str_radix(end, 16).unwrap() - PAGE_SIZE as u64
    };
    let target = Arc::new(TargetProcess::open(pid).unwrap());
    let before = stack();
    let place = ProcessWrite::new(&target, before, PAGE_SIZE as u64).unwrap();
    let mut page = vec![0; PAGE_SIZE];
    place.read_pages(&[0], &mut page).unwrap();

    input.write_all(b"go\nhello\n").unwrap();
    output.read_exact(&mut [0; 6]).unwrap(); // cat answers: it has taken the place of sh
    target.check_alive().expect("the number is in use all the while");
    assert_eq!(stack(), before, "the other program has memory at the same address");

    let error = place.write(0, &page).unwrap_err();
    assert!(matches!(error, PlaceError::Gone { pid: gone } if gone == pid), "{error}");
    let error = place.read_pages(&[0], &mut page).unwrap_err();
    assert!(matches!(error, PlaceError::Gone { .. }), "{error}");
    drop(input);
    assert!(child.wait().unwrap().success(), "it goes on as if nothing had been tried");
}

#[test]
fn range_that_is_not_mapped_is_an_error_with_its_address() {
    let memory = Anonymous::new();
    let hole = 2 << 20;
    // What unplugged memory may leave: a mapping with nothing behind it.
    let empty = rustix::fs::memfd_create("hole", MemfdFlags::CLOEXEC).unwrap();
    // SAFETY: over a part of our own mapping that nothing points into.
    let mapped = unsafe {
        let at = memory.0.wrapping_add(hole).cast();
        rustix::mm::mmap(at, 4096, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED, &empty, 0)
    };
    mapped.unwrap();
    let child = Child::new();
    let place = ProcessWrite::new(&child.target(), memory.address(), SIZE).unwrap();
    let error = place.write(0, &vec![3; SIZE as usize]).unwrap_err();
    let at = memory.address() + hole as u64;
    assert!(matches!(error, PlaceError::Unmapped { address, .. } if address == at), "{error}");
    // The part before the hole was written, as the documentation permits.
    assert_eq!(child.read(memory.address(), 4096), vec![3; 4096]);

    let error = ProcessWrite::new(&child.target(), at, 4096).unwrap_err();
    assert!(matches!(error, PlaceError::Unmapped { .. }), "{error}");
}

#[test]
fn memory_of_another_user_is_refused_at_once() {
    // SAFETY: a plain system call.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("skipped: only root can become another user");
        return;
    }
    let memory = Anonymous::new();
    let child = Child::new();
    let (pid, address) = (child.0, memory.address());
    let refused = std::thread::spawn(move || {
        let nobody: libc::uid_t = 65534;
        // SAFETY: a plain system call. Without the C library around it, it changes this thread's user alone.
        assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, nobody, nobody, nobody) }, 0);
        TargetProcess::open(pid).and_then(|target| ProcessWrite::new(&Arc::new(target), address, SIZE).map(drop))
    });
    let error = refused.join().unwrap().unwrap_err();
    assert!(matches!(error, PlaceError::Denied { pid: denied } if denied == pid), "{error}");
}

#[test]
fn own_memory_is_written() {
    let memory = Anonymous::new();
    // SAFETY: the mapping outlives the place; `exercise` reads only between writes, from the same thread.
    let place = unsafe { OwnMemory::new(memory.0, SIZE as usize) };
    assert_eq!(place.method(), PlacementMethod::OwnMemory);
    exercise(&place, &|| {
        // SAFETY: no write is under way while this copy is made.
        unsafe { std::slice::from_raw_parts(memory.0, SIZE as usize) }.to_vec()
    });
}

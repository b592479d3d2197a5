//! Another process with memory to be tracked: this test program, started again to execute commands.
//!
//! The test file that uses this has a test `as_a_child` that calls [`serve`]. Commands and answers are lines.

use super::held_disk::Read;
use super::{HUGE, Memory, Writers};
use rustix::mm::Advice;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::fs::File;
use std::io::{BufRead, BufReader, Lines, Write};
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use sterna_memory::PAGE_SIZE;
use sterna_memory::dirty::write_protect::{MappedBlock, MappedPart};
use sterna_memory::place::TargetProcess;
use sterna_memory::userfault::{Faults, Userfault};
use sterna_test_kit::Random;

/// Makes the program a child, with this memory: `KIND:PAGES KIND:PAGES …`.
const CHILD: &str = "STERNA_DIRTY_LOG_CHILD";
/// Begins each answer, since the test harness prints too.
const ANSWER: &str = "answer ";

fn memory(kind: &str, pages: usize) -> Option<Memory> {
    match kind {
        "small" => Some(Memory::small(pages)),
        "transparent-huge" => Some(Memory::transparent_huge(pages)),
        "memfd" => Some(Memory::memfd(pages)),
        "memfd-transparent-huge" => Some(Memory::memfd_transparent_huge(pages)),
        "private-file" => Some(Memory::private_file(pages)),
        "disk" => Some(Memory::disk(pages)),
        "hugetlb" => Memory::hugetlb(pages),
        "hugetlb-shared" => Memory::hugetlb_shared(pages),
        // Memory at `/proc/PID/fd/N`, a file of another child.
        path => Some(Memory::shared_file(File::options().read(true).write(true).open(path).ok()?, pages)),
    }
}

/// Executes the parent's commands in a child; returns at once in any other process.
pub fn serve() {
    let Ok(kinds) = std::env::var(CHILD) else { return };
    // The answer must not be in the middle of the harness's output.
    println!();
    let memories: Option<Vec<Memory>> = kinds
        .split_whitespace()
        .map(|kind| kind.rsplit_once(':').and_then(|(kind, pages)| memory(kind, pages.parse().unwrap())))
        .collect();
    let Some(memories) = memories else { return println!("{ANSWER}none") };
    let writers = Writers::new();
    let places = memories.iter().map(|memory| format!("{:#x}", memory.addresses().start)).collect::<Vec<_>>().join(" ");
    println!("{ANSWER}{:#x} {places}", (&raw const writers.writes).expose_provenance());
    std::thread::scope(|scope| {
        let mut racing = Vec::new();
        let mut reads = Vec::new();
        for line in std::io::stdin().lines() {
            let line = line.unwrap();
            let words: Vec<&str> = line.split(' ').collect();
            let number = |index: usize| words[index].parse::<u64>().unwrap();
            let memory = || &memories[number(1) as usize];
            let discard = |advice| memory().advise(number(2)..number(2) + number(3), advice).unwrap();
            let mut answer = String::from("done");
            match words[0] {
                "write" => memory().write(number(2)),
                "read" => answer = memory().word(number(2), 0).load(Ordering::Relaxed).to_string(),
                "discard" => discard(Advice::LinuxDontNeed),
                "remove" => discard(Advice::LinuxRemove),
                "populate" => memory().populate(),
                "race" => {
                    let (writers, memories) = (&writers, &memories);
                    let seed = number(1);
                    racing.push(scope.spawn(move || {
                        let mut random = Random::new(seed);
                        while !writers.stopped() {
                            let memory = &memories[random.next_u64() as usize % memories.len()];
                            let span = if random.next_u64().is_multiple_of(2) {
                                memory.pages().min(8)
                            } else {
                                memory.pages()
                            };
                            memory
                                .word(random.next_u64() % span, random.next_u64() as usize % 512)
                                .store(random.next_u64(), Ordering::Relaxed);
                            writers.writes.fetch_add(1, Ordering::Relaxed);
                        }
                    }));
                }
                "end-race" => {
                    writers.stop.store(true, Ordering::Relaxed);
                    racing.drain(..).for_each(|thread| thread.join().unwrap());
                }
                "userfaultfd" => answer = raw_userfaultfd().to_string(),
                "handshake" => {
                    // SAFETY: a descriptor that `userfaultfd` made; the parent closes it by number.
                    let fd = unsafe { OwnedFd::from_raw_fd(number(1) as i32) };
                    let userfault = Userfault::from_descriptor(fd, number(2)).unwrap();
                    match words.get(3) {
                        Some(&"missing") => drop(userfault.register_missing(memories[0].addresses()).unwrap()),
                        Some(&"watched") => userfault.register_write_protect(memories[0].addresses()).unwrap(),
                        _ => {}
                    }
                    std::mem::forget(userfault);
                }
                // SAFETY: a descriptor that `userfaultfd` made and that is not used any more.
                "close" => unsafe { drop(OwnedFd::from_raw_fd(number(1) as i32)) },
                "protected" => answer = memories.iter().map(protected).sum::<usize>().to_string(),
                "watched" => {
                    let own = Userfault::open(Faults::OfUserSpace, WriteProtectFeatures::ALL).unwrap();
                    let tried: Result<(), _> =
                        memories.iter().try_for_each(|memory| own.register_write_protect(memory.addresses()));
                    answer = tried.is_err().to_string();
                }
                "begin-read" => {
                    // SAFETY: this process's memory, accessed by atomics, mapped until `end-read` or the end.
                    let read = unsafe { Read::begin(words[2].as_ref(), memory().addresses().start) };
                    reads.push(read.unwrap());
                }
                "end-read" => answer = reads.pop().unwrap().end().to_string(),
                "advise" => {
                    let start = std::ptr::without_provenance_mut(number(1) as usize);
                    // SAFETY: a range of this process's memory, accessed by atomics.
                    let result = unsafe { libc::madvise(start, number(2) as usize, number(3) as i32) };
                    answer = match result {
                        0 => "0".into(),
                        _ => std::io::Error::last_os_error().raw_os_error().unwrap().to_string(),
                    };
                }
                "map-anew" => memory().map_anew(number(2)..number(2) + number(3)),
                // This program reads its input until the input ends, and so does its replacement.
                "exec" => panic!("{}", Command::new("cat").stdout(Stdio::null()).exec()),
                command => panic!("{command}"),
            }
            println!("{ANSWER}{answer}");
        }
        writers.stop.store(true, Ordering::Relaxed);
    });
}

/// The features that a dirty log requires of its userfaultfd.
struct WriteProtectFeatures;

impl WriteProtectFeatures {
    const ALL: u64 = sterna_memory::dirty::write_protect::WriteProtectLog::FEATURES;
}

/// Makes a userfaultfd without a handshake.
fn raw_userfaultfd() -> i32 {
    let user_mode_only = 1;
    // SAFETY: the call takes an integer and returns a new descriptor or an error.
    unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK | user_mode_only) as i32 }
}

/// Returns how many pages a userfaultfd write-protects: bit 57 of `Documentation/admin-guide/mm/pagemap.rst`.
fn protected(memory: &Memory) -> usize {
    let mut entries = vec![0; memory.pages() as usize * 8];
    let page_map = File::open("/proc/self/pagemap").unwrap();
    page_map.read_exact_at(&mut entries, (memory.addresses().start / PAGE_SIZE * 8) as u64).unwrap();
    let bits = entries.chunks_exact(8).map(|entry| u64::from_ne_bytes(entry.try_into().unwrap()));
    bits.filter(|entry| entry & 1 << 57 != 0).count()
}

/// The parent's side.
#[derive(Debug)]
pub struct Process {
    child: Child,
    input: Option<ChildStdin>,
    lines: Lines<BufReader<ChildStdout>>,
    writes: usize,
    memories: Vec<Range<usize>>,
}

impl Drop for Process {
    fn drop(&mut self) {
        // The child may have ended; a failing test leaves nothing behind.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    /// Starts a process with this memory: `KIND:PAGES KIND:PAGES …`. Returns `None`, and prints the reason, if some of
    /// it is not available.
    pub fn start(kinds: &str) -> Option<Self> {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["dirty_other_process::as_a_child", "--exact", "--nocapture", "--test-threads=1"])
            .env(CHILD, kinds)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut process = Self { child, input, lines, writes: 0, memories: Vec::new() };
        let answer = process.answer();
        if answer == "none" {
            println!("skipped: no huge pages are free, and none can be added ({kinds})");
            return None;
        }
        let mut addresses = answer.split(' ').map(|hex| usize::from_str_radix(&hex[2..], 16).unwrap());
        process.writes = addresses.next().unwrap();
        let pages = kinds.split_whitespace().map(|kind| kind.rsplit_once(':').unwrap().1.parse::<usize>().unwrap());
        process.memories = addresses.zip(pages).map(|(start, pages)| start..start + pages * PAGE_SIZE).collect();
        Some(process)
    }

    /// Returns the next answer.
    pub fn answer(&mut self) -> String {
        let answers = self.lines.by_ref().map(Result::unwrap);
        answers.into_iter().find_map(|line| line.strip_prefix(ANSWER).map(str::to_owned)).expect("the child answers")
    }

    /// Sends a command without waiting for an answer.
    pub fn send(&mut self, command: &str) {
        writeln!(self.input.as_ref().unwrap(), "{command}").unwrap();
    }

    pub fn ask(&mut self, command: &str) -> String {
        self.send(command);
        self.answer()
    }

    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    pub fn target(&self) -> Arc<TargetProcess> {
        Arc::new(TargetProcess::open(self.pid()).unwrap())
    }

    pub fn addresses(&self, memory: usize) -> Range<usize> {
        self.memories[memory].clone()
    }

    /// Returns each memory as a separate block.
    pub fn blocks(&self) -> Vec<MappedBlock> {
        let block = |addresses: &Range<usize>| MappedBlock {
            pages: (addresses.len() / PAGE_SIZE) as u64,
            parts: vec![MappedPart { addresses: addresses.clone(), first_page: 0 }],
        };
        self.memories.iter().map(block).collect()
    }

    /// Makes a userfaultfd in the process, without a handshake; the process keeps no copy.
    pub fn userfaultfd(&mut self) -> OwnedFd {
        let number = self.ask("userfaultfd");
        self.take(&number)
    }

    /// Makes a userfaultfd in the process, with a handshake of `features`; `extra`: `missing`, `watched` or nothing.
    pub fn userfaultfd_with(&mut self, features: u64, extra: &str) -> OwnedFd {
        let number = self.ask("userfaultfd");
        self.ask(&format!("handshake {number} {features} {extra}"));
        self.take(&number)
    }

    fn take(&mut self, number: &str) -> OwnedFd {
        let fd = copy_of(self.pid(), number.parse().unwrap());
        self.ask(&format!("close {number}"));
        fd
    }

    /// Kills the process, and waits until it has ended.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Makes the process replace its program, and waits until it has.
    pub fn exec(&mut self) {
        self.send("exec");
        // The name changes after the old address space is gone (`begin_new_exec` in the kernel's `fs/exec.c`).
        let path = format!("/proc/{}/comm", self.pid());
        while std::fs::read_to_string(&path).unwrap() != "cat\n" {
            std::thread::yield_now();
        }
    }

    /// Returns how many writes its racing threads have made.
    pub fn writes(&self) -> u64 {
        let mut bytes = [0; 8];
        self.read(self.writes, &mut bytes);
        u64::from_ne_bytes(bytes)
    }

    /// Reads its memory at `address`.
    pub fn read(&self, address: usize, bytes: &mut [u8]) {
        let local = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        let remote = libc::iovec { iov_base: std::ptr::without_provenance_mut(address), iov_len: bytes.len() };
        // SAFETY: the local entry is a buffer of exactly that length.
        let read = unsafe { libc::process_vm_readv(self.pid(), &raw const local, 1, &raw const remote, 1, 0) };
        assert_eq!(read, bytes.len() as isize);
    }
}

/// Copies another process's descriptor.
pub fn copy_of(pid: i32, fd: i32) -> OwnedFd {
    let pidfd = pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap();
    let copy = pidfd_getfd(pidfd, fd, PidfdGetfdFlags::empty()).unwrap();
    assert!(copy.as_raw_fd() >= 0);
    copy
}

/// Returns the number of small pages in `count` huge pages.
pub const fn huge(count: usize) -> usize {
    count * HUGE / PAGE_SIZE
}

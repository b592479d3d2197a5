//! The calls that post-copy needs inside the process that guest RAM lies in, where that is another one.
//!
//! Watching missing pages and filling them works from outside, through a userfaultfd of that process's address space.
//! Only the process itself can make such a descriptor and free its private memory: the kernel lets no other process do
//! it (`userfaultfd(2)`, `process_madvise(2)`). A type that can run system calls there implements [`GuestProcess`].

use std::fmt::Debug;
use std::fs;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::mappings::Mapping;
use crate::place::TargetProcess;

/// Advice of madvise(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// Free the pages.
    DontNeed,
    /// No transparent huge pages.
    NoHugePage,
    /// Transparent huge pages.
    HugePage,
}

impl Advice {
    /// Returns the number that madvise(2) takes.
    pub fn code(self) -> i32 {
        match self {
            Self::DontNeed => libc::MADV_DONTNEED,
            Self::NoHugePage => libc::MADV_NOHUGEPAGE,
            Self::HugePage => libc::MADV_HUGEPAGE,
        }
    }
}

/// A process that has guest RAM and runs the guest, and in which system calls can be run.
pub trait GuestProcess: Debug + Send + Sync {
    /// Returns the process.
    fn process(&self) -> &Arc<TargetProcess>;

    /// Makes a userfaultfd of the process's address space, without a handshake, for all faults, including those that
    /// the kernel takes for the process, as KVM does for its guest.
    ///
    /// A copy stays open in the process. If this program dies, the copy keeps missing pages missing: a thread that
    /// touches one waits. Without the copy the kernel would end the watching, and the guest would read zeros as if they
    /// were its memory.
    ///
    /// # Errors
    /// It cannot be made, and what would make it possible.
    fn open_userfault(&self) -> io::Result<OwnedFd>;

    /// Closes the copy of [`GuestProcess::open_userfault`], once no page is missing any more.
    ///
    /// # Errors
    /// The copy stays open. It does no harm there, because nothing is watched.
    fn close_userfault(&self) -> io::Result<()>;

    /// Makes the process give the kernel `advice` about `addresses` of its memory, all at once where possible: the
    /// guest may be paused meanwhile.
    ///
    /// # Errors
    /// The kernel refuses it, with its error number, or it takes too long. Part of it may be done.
    fn advise(&self, addresses: &[Range<usize>], advice: Advice) -> io::Result<()>;
}

/// The advice about transparent huge pages in a process's memory, recorded to be restored.
#[derive(Clone, Debug)]
pub struct HugePageAdvice {
    /// The addresses where they are wanted, in ascending order.
    wanted: Vec<Range<usize>>,
}

impl HugePageAdvice {
    /// Reads the current advice of `process`; of this process if none is given.
    ///
    /// # Errors
    /// Its mappings cannot be read.
    pub fn of(process: Option<&TargetProcess>) -> io::Result<Self> {
        let smaps = fs::read_to_string(match process {
            None => "/proc/self/smaps".to_owned(),
            Some(process) => format!("/proc/{}/smaps", process.pid()),
        })?;
        if let Some(process) = process {
            process.check_alive().map_err(io::Error::other)?;
        }
        // Without advice the system's setting decides.
        let chosen = |name: &str, modes: &[&str]| {
            let path = format!("/sys/kernel/mm/transparent_hugepage/{name}");
            fs::read_to_string(path).is_ok_and(|text| modes.iter().any(|mode| text.contains(&format!("[{mode}]"))))
        };
        let private = chosen("enabled", &["always"]);
        let shared = chosen("shmem_enabled", &["always", "within_size", "force"]);
        Ok(Self::parse(&smaps, |is_private| if is_private { private } else { shared }))
    }

    /// Parses the text of `/proc/PID/smaps` (proc_pid_smaps(5)); `unadvised` returns whether private or shared memory
    /// has huge pages without advice.
    fn parse(smaps: &str, unadvised: impl Fn(bool) -> bool) -> Self {
        let (mut wanted, mut mapping) = (Vec::new(), None);
        for line in smaps.lines() {
            match line.strip_prefix("VmFlags:") {
                None => mapping = Mapping::parse(line).or(mapping),
                Some(flags) => {
                    let has = |flag| flags.split_whitespace().any(|one| one == flag);
                    if let Some(mapping) = mapping.take()
                        && (has("hg") || !has("nh") && unadvised(mapping.private))
                    {
                        wanted.push(mapping.start..mapping.end);
                    }
                }
            }
        }
        Self { wanted }
    }

    /// Returns the parts of `addresses` where they are wanted.
    pub(crate) fn within(&self, addresses: &Range<usize>) -> Vec<Range<usize>> {
        let part = |wanted: &Range<usize>| wanted.start.max(addresses.start)..wanted.end.min(addresses.end);
        self.wanted.iter().map(part).filter(|part| !part.is_empty()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_are_wanted_where_they_were_advised_or_are_the_rule() {
        let smaps = "\
1000-3000 rw-p 00000000 00:00 0 \n\
Size:                  8 kB\n\
VmFlags: rd wr mr mw me ac hg \n\
3000-4000 rw-p 00000000 00:00 0 [heap]\n\
VmFlags: rd wr mr mw me ac nh \n\
5000-7000 rw-p 00000000 00:00 0 \n\
VmFlags: rd wr mr mw me ac \n\
8000-9000 rw-s 00000000 00:01 7 /memfd:ram (deleted)\n\
VmFlags: rd wr sh mr mw me ms \n";
        let within = |unadvised: fn(bool) -> bool, addresses: Range<usize>| -> Vec<(usize, usize)> {
            let parts = HugePageAdvice::parse(smaps, unadvised).within(&addresses);
            parts.into_iter().map(|part| (part.start, part.end)).collect()
        };
        assert_eq!(within(|_| false, 0..0x9000), [(0x1000, 0x3000)]);
        assert_eq!(within(|private| private, 0x2000..0x6000), [(0x2000, 0x3000), (0x5000, 0x6000)]);
        assert_eq!(within(|private| !private, 0x5000..0xa000), [(0x8000, 0x9000)]);
        assert_eq!(within(|_| true, 0x3000..0x4000), []);
    }
}

//! Missing pages of another real process: watched, freed and filled from outside.

use crate::dirty_support::process::{Process, copy_of, serve};
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use sterna_memory::PAGE_SIZE;
use sterna_memory::guest_process::{Advice, GuestProcess};
use sterna_memory::missing::{FaultAction, MissingPages};
use sterna_memory::place::TargetProcess;
use sterna_memory::ram::{Backing, GuestRam, RamBlock};
use sterna_memory::userfault::Userfault;
use sterna_memory::userfault::wait::{FaultBuffer, Stop};

const PAGES: usize = 64;

/// The test that [`Process`] runs as a child.
#[test]
fn as_a_child() {
    serve();
}

/// A child that executes the calls that only it may make.
#[derive(Debug)]
struct Child {
    target: Arc<TargetProcess>,
    process: Mutex<Process>,
    /// The number of the child's userfaultfd, which stays open there.
    userfault: Mutex<Option<String>>,
    /// The ranges of each advice that was given.
    advised: Mutex<Vec<(Advice, usize)>>,
}

impl Child {
    fn start(kind: &str) -> Arc<Self> {
        let process = Process::start(&format!("{kind}:{PAGES}")).expect("memory of small pages is available");
        let (target, userfault, advised) = (process.target(), Mutex::default(), Mutex::default());
        Arc::new(Self { target, process: Mutex::new(process), userfault, advised })
    }

    fn ask(&self, command: &str) -> String {
        self.process.lock().unwrap().ask(command)
    }

    /// Returns the child's memory as a guest's RAM of one block.
    fn ram(self: &Arc<Self>, kind: &str) -> GuestRam {
        let addresses = self.process.lock().unwrap().addresses(0);
        let (start, bytes) = (addresses.start, addresses.len());
        let block = if kind == "memfd" {
            let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.target.pid())).unwrap();
            let range = format!("{:x}-{:x}", start, addresses.end);
            assert!(maps.lines().any(|line| line.starts_with(&range)), "{range} in {maps}");
            let path = format!("/proc/{}/map_files/{range}", self.target.pid());
            let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
            let block = RamBlock::of_file("ram", Arc::new(file), 0, bytes, PAGE_SIZE).unwrap();
            block.mapped_in(&self.target, start)
        } else {
            RamBlock::in_process("ram", &self.target, start, bytes, Backing::Anonymous)
        };
        GuestRam::new(vec![block]).unwrap().run_by(Arc::clone(self) as Arc<dyn GuestProcess>)
    }

    /// Returns how many of the child's threads wait for a page, by its userfaultfd.
    fn waiting(&self) -> u64 {
        let number = self.userfault.lock().unwrap().clone().unwrap();
        let info = std::fs::read_to_string(format!("/proc/{}/fdinfo/{number}", self.target.pid())).unwrap();
        info.lines().find_map(|line| line.strip_prefix("total:")?.trim().parse().ok()).unwrap()
    }
}

impl GuestProcess for Child {
    fn process(&self) -> &Arc<TargetProcess> {
        &self.target
    }

    fn open_userfault(&self) -> io::Result<OwnedFd> {
        let number = self.ask("userfaultfd");
        let descriptor = copy_of(self.target.pid(), number.parse().unwrap());
        *self.userfault.lock().unwrap() = Some(number);
        Ok(descriptor)
    }

    fn close_userfault(&self) -> io::Result<()> {
        let number = self.userfault.lock().unwrap().take().expect("the descriptor is closed once");
        self.ask(&format!("close {number}"));
        Ok(())
    }

    fn advise(&self, addresses: &[Range<usize>], advice: Advice) -> io::Result<()> {
        self.advised.lock().unwrap().push((advice, addresses.len()));
        for range in addresses {
            let error = self.ask(&format!("advise {} {} {}", range.start, range.len(), advice.code()));
            if error != "0" {
                return Err(io::Error::from_raw_os_error(error.parse().unwrap()));
            }
        }
        Ok(())
    }
}

/// Returns the content of a page by its first word.
fn page_of(word: u64) -> Vec<u8> {
    let mut content = vec![7; PAGE_SIZE];
    content[..8].copy_from_slice(&word.to_ne_bytes());
    content
}

fn watched(userfault: &Arc<Userfault>, ram: &GuestRam) -> MissingPages {
    let backing = ram.discardable(&ram.blocks()[0]).unwrap().expect("the block can be discarded");
    MissingPages::new(backing, Arc::clone(userfault)).unwrap()
}

/// A child with content in all of its memory, which is watched with these features of userfaultfd.
struct WatchedChild {
    child: Arc<Child>,
    ram: GuestRam,
    features: u64,
    userfault: Arc<Userfault>,
    missing: MissingPages,
}

impl WatchedChild {
    fn start(kind: &str) -> Self {
        let child = Child::start(kind);
        child.ask("populate 0");
        let ram = child.ram(kind);
        let features = ram.discardable(&ram.blocks()[0]).unwrap().unwrap().userfault_features();
        let userfault = ram.open_userfault(features).unwrap();
        let missing = watched(&userfault, &ram);
        Self { child, ram, features, userfault, missing }
    }
}

/// Reads the next fault of the child, and returns the answer to it.
fn next_fault(userfault: &Userfault, missing: &MissingPages) -> FaultAction {
    let (stop, mut buffer) = (Stop::new().unwrap(), FaultBuffer::new());
    let faults = userfault.wait_faults(&stop, &mut buffer).unwrap().unwrap();
    assert_eq!(faults.len(), 1);
    missing.fault(faults[0].address()).unwrap()
}

#[test]
fn a_process_waits_for_its_missing_pages_and_finds_pages_placed_from_outside() {
    for kind in ["small", "memfd"] {
        let WatchedChild { child, ram, userfault, missing, .. } = WatchedChild::start(kind);
        missing.declare_all_stale(&[3..5, 10..12, 20..21]).unwrap();
        assert_eq!(missing.stale_count(), 5);
        if kind == "small" {
            let advised = child.advised.lock().unwrap();
            assert_eq!(advised[..], [(Advice::NoHugePage, 1), (Advice::DontNeed, 3)], "all ranges at once");
        }
        // Pages that are not stale are unchanged.
        assert_eq!(child.ask("read 0 0"), "1");

        child.process.lock().unwrap().send("read 0 3");
        assert_eq!(next_fault(&userfault, &missing), FaultAction::Request(3..4));
        assert_eq!(missing.place(3, &page_of(333)).unwrap(), 1);
        assert_eq!(child.process.lock().unwrap().answer(), "333", "{kind}");
        // Pages that arrive before they are accessed cause no fault; zero pages are zero.
        assert_eq!(missing.place(4, &page_of(444)).unwrap(), 1);
        assert_eq!(missing.place_zero(20..21).unwrap(), 1);
        assert_eq!((child.ask("read 0 4"), child.ask("read 0 20")), ("444".into(), "0".into()));
        // Pages that never arrived and are not stale read as zero.
        let backing = ram.discardable(&ram.blocks()[0]).unwrap().unwrap();
        backing.discard(30..31).unwrap();
        child.process.lock().unwrap().send("read 0 30");
        assert_eq!(next_fault(&userfault, &missing), FaultAction::ZeroFilled);
        assert_eq!(child.process.lock().unwrap().answer(), "0");

        assert!(missing.finish().is_err());
        missing.place(10, &[page_of(1010), page_of(1111)].concat()).unwrap();
        missing.finish().unwrap();
        child.close_userfault().unwrap();
        assert_eq!((child.ask("read 0 10"), child.ask("read 0 11")), ("1010".into(), "1111".into()));
    }
}

#[test]
fn a_waiting_thread_continues_to_wait_when_the_filling_program_is_gone() {
    for kind in ["small", "memfd"] {
        let WatchedChild { child, features, userfault, missing, ram: _ram } = WatchedChild::start(kind);
        missing.declare_stale(5..7).unwrap();
        child.process.lock().unwrap().send("read 0 5");
        assert_eq!(next_fault(&userfault, &missing), FaultAction::Request(5..6));
        // Like the end of this program: closes its descriptor, without unregistering.
        std::mem::forget(missing);
        let userfault = Arc::into_raw(userfault);
        // SAFETY: made by `into_raw` just now; the copy that was forgotten with `missing` is never used nor dropped.
        unsafe { drop(std::ptr::read(userfault)) };
        assert_eq!(child.waiting(), 1, "{kind}: the page stays missing");

        // The process's copy can still be used to fill the page: this proves that the process has waited, and not read
        // zeros.
        let number = child.userfault.lock().unwrap().clone().unwrap();
        let copy = Userfault::from_descriptor(copy_of(child.target.pid(), number.parse().unwrap()), features).unwrap();
        let addresses = child.process.lock().unwrap().addresses(0);
        // SAFETY: the child's memory, which it accesses by atomics.
        unsafe { copy.copy(addresses.start + 5 * PAGE_SIZE, &page_of(555)).unwrap() };
        assert_eq!(child.process.lock().unwrap().answer(), "555");
        copy.unregister(addresses).unwrap();
        child.close_userfault().unwrap();
    }
}

#[test]
fn a_process_that_has_ended_is_noticed() {
    let child = Child::start("small");
    let ram = child.ram("small");
    let userfault = ram.open_userfault(0).unwrap();
    let missing = watched(&userfault, &ram);
    missing.declare_stale(5..6).unwrap();
    assert!(!userfault.is_orphaned());
    child.process.lock().unwrap().kill();
    assert!(userfault.is_orphaned());
    let error = missing.place(5, &page_of(5)).unwrap_err().to_string();
    assert!(error.contains("has ended or has replaced its program"), "{error}");
    assert!(ram.discardable(&ram.blocks()[0]).is_err());
}

#[test]
fn huge_pages_of_a_pool_are_refused_with_the_reason() {
    let Some(process) = Process::start("hugetlb:512") else { return };
    let (target, userfault, advised) = (process.target(), Mutex::default(), Mutex::default());
    let addresses = process.addresses(0);
    let child = Arc::new(Child { target, process: Mutex::new(process), userfault, advised });
    let block = RamBlock::in_process("ram", &child.target, addresses.start, addresses.len(), Backing::Anonymous)
        .with_page_size(2 << 20);
    let ram = GuestRam::new(vec![block]).unwrap().run_by(child);
    let error = ram.discardable(&ram.blocks()[0]).unwrap_err().to_string();
    assert!(error.contains("huge pages of 2097152 bytes from a pool"), "{error}");
}

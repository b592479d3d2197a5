//! Configurations for the tests' machines, and access to RAM that a guest writes.

use std::io::{self, Write};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use sterna_microvm::{
    Backing, BlockConfig, Config, Execution, Fill, Machine, Pattern, Rate, Report, Tracking, Workload,
};

/// A time limit that no correct test reaches.
pub(crate) const LONG: Duration = Duration::from_secs(300);
pub(crate) const PAGE: usize = 4096;

/// Both ways to run vCPUs, and how each can track written pages.
pub(crate) const KINDS: [(Execution, Tracking); 4] = [
    (Execution::Threads, Tracking::WriteProtect),
    (Execution::Kvm, Tracking::WriteProtect),
    (Execution::Kvm, Tracking::Log),
    (Execution::Kvm, Tracking::Ring),
];

/// A guest that works as fast as it can.
pub(crate) fn busy() -> Workload {
    Workload { write: Rate::Unlimited, check: Rate::Unlimited, say_every: 0, ..Workload::default() }
}

/// A guest that only verifies.
pub(crate) fn verifying(fill: Fill) -> Workload {
    Workload { fill, write: Rate::PagesPerSecond(0), ..busy() }
}

/// Two blocks of different kinds.
pub(crate) fn config(kind: (Execution, Tracking), vcpus: usize, workload: Workload) -> Config {
    let block = |name: &str, mib: u64, backing| BlockConfig { name: name.to_owned(), bytes: mib << 20, backing };
    Config {
        blocks: vec![block("low", 6, Backing::Memfd), block("high", 4, Backing::Anonymous)],
        vcpus,
        devices: Vec::new(),
        disk: None,
        execution: kind.0,
        tracking: kind.1,
        workload,
    }
}

/// The output of guests on their serial ports.
#[derive(Clone, Default)]
pub(crate) struct SerialOutput(Arc<Mutex<Vec<u8>>>);

impl SerialOutput {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }
}

impl Write for SerialOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns a machine, or prints why this host cannot have it.
pub(crate) fn machine(config: &Config, output: &SerialOutput) -> Option<Machine> {
    match Machine::new(config, Box::new(output.clone())) {
        Ok(machine) => Some(machine),
        Err(error) if config.execution == Execution::Kvm && lacks_kvm() => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("{config:?}: {error}"),
    }
}

fn lacks_kvm() -> bool {
    kvm_ioctls::Kvm::new().and_then(|kvm| kvm.create_vm()).is_err()
}

/// Returns a machine with a guest that runs and has filled its memory.
pub(crate) fn filled(config: &Config, output: &SerialOutput) -> Option<Machine> {
    let machine = machine(config, output)?;
    machine.boot().unwrap();
    machine.resume().unwrap();
    machine.wait_until(LONG, Report::is_filled).unwrap();
    Some(machine)
}

/// Waits until the guest has verified each page at least once since, and checks that it found nothing wrong.
pub(crate) fn goes_on_well(machine: &Machine, since: &Report, what: &str) -> Report {
    let report = machine.wait_until(LONG, |now| now.passes_since(since) >= 2 || now.faults() > 0);
    let report = report.unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_eq!(report.faults(), 0, "{what}: {report}");
    assert!(report.checked() >= since.checked() + report.pages(), "{what}: {report}");
    report
}

/// Returns the address of a page of a machine's RAM.
pub(crate) fn page(machine: &Machine, (block, page): (usize, u64)) -> *mut u8 {
    let block = &machine.blocks()[block];
    assert!(page < block.bytes() / PAGE as u64);
    block.start().as_ptr().wrapping_add(page as usize * PAGE)
}

/// Reads a page that a guest may be writing.
pub(crate) fn read(from: *const u8) -> [u64; PAGE / 8] {
    let mut words = [0; PAGE / 8];
    for (at, word) in words.iter_mut().enumerate() {
        // SAFETY: callers have the address from `page`, of a machine that exists.
        *word = unsafe { from.cast::<u64>().add(at).read_volatile() };
    }
    words
}

/// Writes a page of a paused guest.
pub(crate) fn write(to: *mut u8, words: &[u64; PAGE / 8]) {
    for (at, word) in words.iter().enumerate() {
        // SAFETY: callers have the address from `page`, of a machine that exists.
        unsafe { to.cast::<u64>().add(at).write_volatile(*word) };
    }
}

/// Returns all pages of a machine's RAM.
pub(crate) fn all_pages(machine: &Machine) -> impl Iterator<Item = (usize, u64)> {
    let pages: Vec<u64> = machine.blocks().iter().map(|block| block.bytes() / PAGE as u64).collect();
    pages.into_iter().enumerate().flat_map(|(block, pages)| (0..pages).map(move |page| (block, page)))
}

/// Copies pages from one machine's RAM to the other's.
pub(crate) fn copy(from: &Machine, to: &Machine, pages: impl Iterator<Item = (usize, u64)>) {
    for place in pages {
        write(page(to, place), &read(page(from, place)));
    }
}

/// Moves a paused guest into a new machine, without its RAM.
pub(crate) fn move_state(from: &Machine, to: &Machine) {
    let mut state = Vec::new();
    from.save(&mut state).unwrap();
    let mut rest = state.as_slice();
    to.load(&mut rest).unwrap();
    assert!(rest.is_empty());
}

/// Names of all that can fill memory.
pub(crate) const FILLS: [Fill; 7] =
    [Fill::Zeros, Fill::Ones, Fill::Sequence, Fill::Random, Fill::Text, Fill::Corpus, Fill::Mixed];
pub(crate) const PATTERNS: [Pattern; 3] = [Pattern::Sequential, Pattern::Random, Pattern::Hot];

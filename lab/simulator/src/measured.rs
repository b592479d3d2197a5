//! Costs that are measured on the machine of the simulator: admission by the product's own code, and filling descriptors
//! by a loop that stores the same bytes in the cache.

use std::hint::black_box;
use std::path::Path;

use rustix::time::{ClockId, clock_gettime};
use sterna_offload::share::ledger::{Ledger, LedgerFile};
use sterna_offload::share::{AdmissionDecision, AdmissionRequest, Fair, Share};

use crate::costs::Costs;

/// Rounds; the median counts, since a virtual machine is interrupted at times.
const ROUNDS: usize = 15;

fn median(mut nanos: impl FnMut() -> f64) -> f64 {
    let mut all: Vec<f64> = (0..ROUNDS).map(|_| nanos()).collect();
    all.sort_by(f64::total_cmp);
    all[ROUNDS / 2]
}

/// Returns the CPU time of this thread in ns, which is independent of other load.
pub fn thread_cpu() -> f64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    now.tv_sec as f64 * 1e9 + now.tv_nsec as f64
}

fn each(times: u32, mut what: impl FnMut()) -> f64 {
    let begun = thread_cpu();
    for _ in 0..times {
        what();
    }
    (thread_cpu() - begun) / f64::from(times)
}

/// Measures `ask` and `done` of a share, for one batch.
pub fn asking(share: &mut dyn Share) -> f64 {
    let mut now = 1_000_000;
    median(|| {
        each(2000, || {
            now += 20_000;
            let ask = AdmissionRequest { vm: 1, channel: 0, weight: 10, predicted: 17_000, bytes: 512 << 10 };
            if let AdmissionDecision::Admit(grant) = share.ask(black_box(&ask), now) {
                share.done(grant, 20_000, now + 19_000);
            }
        })
    })
}

/// As [`asking`], with a ledger's file in `directory`. Returns none if no file can be made there.
pub fn asking_ledger(directory: &Path) -> Option<f64> {
    let name = format!("bench{}", std::process::id());
    let file = LedgerFile::open(directory, &name).ok()?;
    let nanos = asking(&mut Ledger::new(file));
    let _ = std::fs::remove_file(directory.join(format!("{name}.ledger")));
    Some(nanos)
}

/// Measures filling a descriptor of 64 bytes and clearing a record of 32, per page of a batch. No device uses this
/// memory; the cost of cache lines that return from a device is charged.
fn filling() -> f64 {
    const PAGES: usize = 128;
    let mut descriptors = vec![[0u64; 8]; PAGES];
    let mut records = vec![[0u64; 4]; PAGES];
    median(|| {
        each(200, || {
            let base = black_box(0x7f00_0000_0000u64);
            for (page, (descriptor, record)) in descriptors.iter_mut().zip(&mut records).enumerate() {
                *record = [0; 4];
                let record_address = std::ptr::from_ref(record) as u64;
                *descriptor = [0x0600_000c_u64 << 32, record_address, base + ((page as u64) << 12), 0, 4096, 0, 0, 0];
            }
            black_box(&mut descriptors);
            black_box(&mut records);
        }) / PAGES as f64
    })
}

/// Returns `costs` with the values that can be measured here.
#[must_use]
pub fn here(costs: &Costs) -> Costs {
    Costs { fill_descriptor: filling(), ask: asking(&mut Fair::default()), ..costs.clone() }
}

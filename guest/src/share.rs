//! A vCPU's share of a bare guest, and the steps in which it works on it.
//!
//! A bare guest has no operating system: each vCPU fills, writes and checks a share of the memory, step by step. Between two
//! steps the monitor says what is next: it writes [`Orders`] into a page of the guest. How far the share is stands in
//! another page, [`Counters`], which only the guest writes and the monitor only reads. Both are guest memory and move with
//! the guest; they number the steps, so that one that came through a move badly is seen against the other.
//!
//! Devices are registers in the first 2 MiB of guest physical memory, where there is no RAM.

use core::fmt::{self, Write};

use crate::content::Page;
use crate::memory::{Bad, Memory, Pattern, Plan, Progress};
use crate::page::{Fault, Fill};

/// Guest physical address at which RAM begins. Below are the devices.
pub const RAM_START: u64 = 2 << 20;
/// A serial port for each vCPU, so that their lines do not mix. Eight registers, a byte each (16550A): what is written to
/// the first one is sent.
pub const SERIAL: u64 = 0x1000;
/// Bytes from one serial port to the next.
pub const SERIAL_BYTES: u64 = 8;
/// A 64-bit register: the number of steps that this vCPU has done. Writing it asks for orders.
pub const STEPS_DONE: u64 = 0x2000;
/// A 64-bit register: writing to it says that the payload itself failed, and why on the serial port before.
pub const FAILED: u64 = 0x3000;

/// Wrong pages that are described on the serial port, of each vCPU; more are only counted.
const BAD_LINES: u64 = 20;

/// Where a share lies and what is done to it. Written once, before the guest starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Layout {
    /// The vCPU, from 0.
    pub vcpu: u64,
    /// Guest physical address of its pages.
    pub pages: u64,
    /// How many.
    pub count: u64,
    /// Guest physical address of their table: a generation of 32 bits each.
    pub table: u64,
    /// The number of the first page; each page of the guest has a number of its own.
    pub first: u64,
    /// Pages, from the first, that are written again.
    pub span: u64,
    /// Index in [`Fill::ALL`].
    pub fill: u64,
    /// Index in [`Pattern::ALL`].
    pub pattern: u64,
    /// Pages are rewritten as a whole, else (0) only their stamps.
    pub whole: u64,
}

impl Layout {
    /// What is done to the share; nothing where fill or pattern are not among the known.
    pub fn plan(&self) -> Option<Plan> {
        Some(Plan {
            fill: Fill::ALL.get(self.fill as usize)?.1,
            pattern: Pattern::ALL.get(self.pattern as usize)?.1,
            span: self.span as usize,
            first: self.first,
        })
    }
}

/// What a vCPU does in its next step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Orders {
    /// The step's number, from 1.
    pub step: u64,
    /// The guest's own time in nanoseconds: it stands while the guest does.
    pub clock: u64,
    /// Pages to fill.
    pub fill: u64,
    /// Pages to write again.
    pub write: u64,
    /// Pages to check.
    pub check: u64,
    /// Whether (not 0) to say on the serial port how far it is.
    pub say: u64,
}

/// How far a vCPU is with its share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Counters {
    /// The step done last. Counts also while there is nothing to do: who stands still is not alive.
    pub steps: u64,
    /// Pages written again after filling.
    pub written: u64,
    /// Pages checked.
    pub checked: u64,
    /// How often the last of all pages was checked.
    pub passes: u64,
    /// Wrong pages found; one that stays wrong counts each time.
    pub bad: u64,
    /// How often the table of generations did not add up (looked at after each pass).
    pub table_broken: u64,
    /// How often orders were not those of the next step: orders or counters are not what was written last.
    pub out_of_step: u64,
    /// The first wrong page.
    pub first_bad: BadPage,
    /// What goes on with the next step.
    pub progress: Progress,
    /// Clock of the last line on the serial port.
    pub said_clock: u64,
    /// Pages written at that time.
    pub said_written: u64,
}

/// A [`Bad`] page in plain numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct BadPage {
    index: u64,
    expected: u64,
    /// 0: none; then in the order of [`Fault`].
    kind: u64,
    found: u64,
}

impl From<Bad> for BadPage {
    fn from(bad: Bad) -> Self {
        let (kind, found) = match bad.fault {
            Fault::Lost => (1, 0),
            Fault::Stale { generation } => (2, u64::from(generation)),
            Fault::Newer { generation } => (3, u64::from(generation)),
            Fault::Foreign { index } => (4, index),
            Fault::Corrupt { offset } => (5, offset as u64),
        };
        BadPage { index: bad.index, expected: u64::from(bad.expected), kind, found }
    }
}

impl BadPage {
    /// The page; none where there was none yet.
    pub fn get(&self) -> Option<Bad> {
        let fault = match self.kind {
            1 => Fault::Lost,
            2 => Fault::Stale { generation: self.found as u32 },
            3 => Fault::Newer { generation: self.found as u32 },
            4 => Fault::Foreign { index: self.found },
            5 => Fault::Corrupt { offset: self.found as usize },
            _ => return None,
        };
        Some(Bad { index: self.index, expected: self.expected as u32, fault })
    }
}

/// A vCPU's share: its pages, their table and what is done to them.
pub struct Share<'a> {
    /// The vCPU, from 0.
    pub vcpu: u64,
    /// The pages.
    pub pages: &'a mut [Page],
    /// Their generations.
    pub table: &'a mut [u32],
    /// What is done to them.
    pub plan: Plan,
    /// Pages are rewritten as a whole, not only their stamps.
    pub whole: bool,
}

impl Share<'_> {
    /// Does one step.
    ///
    /// # Errors
    /// What `serial` says.
    pub fn step(&mut self, orders: &Orders, counters: &mut Counters, serial: &mut impl Write) -> fmt::Result {
        let vcpu = self.vcpu;
        counters.steps = counters.steps.wrapping_add(1);
        if orders.step != counters.steps {
            counters.out_of_step += 1;
            writeln!(serial, "vcpu {vcpu}: orders for step {} came at step {}", orders.step, counters.steps)?;
            // Else each further step would be wrong, too.
            counters.steps = orders.step;
        }
        let mut memory = Memory::new(self.pages, self.table, self.plan, counters.progress);
        for _ in 0..orders.fill {
            memory.fill_next();
        }
        for _ in 0..orders.write {
            let before = memory.dirty_next(self.whole);
            counters.written += 1;
            note(before, vcpu, counters, serial)?;
        }
        for _ in 0..orders.check {
            let found = memory.check_next();
            counters.checked += 1;
            note(found, vcpu, counters, serial)?;
            if memory.progress().next_check == 0 {
                counters.passes += 1;
                if !memory.table_is_whole() {
                    counters.table_broken += 1;
                    writeln!(serial, "vcpu {vcpu}: the table of generations does not add up")?;
                }
            }
        }
        counters.progress = memory.progress();
        if orders.say != 0 {
            say(vcpu, orders, counters, serial)?;
        }
        Ok(())
    }
}

fn note(found: Result<(), Bad>, vcpu: u64, counters: &mut Counters, serial: &mut impl Write) -> fmt::Result {
    let Err(bad) = found else { return Ok(()) };
    if counters.bad == 0 {
        counters.first_bad = bad.into();
    }
    counters.bad += 1;
    if counters.bad > BAD_LINES {
        return Ok(());
    }
    writeln!(serial, "vcpu {vcpu}: BAD page {} expected generation {} found {}", bad.index, bad.expected, bad.fault)
}

/// One line about what was done so far, and the pages per second since the last one.
fn say(vcpu: u64, orders: &Orders, counters: &mut Counters, serial: &mut impl Write) -> fmt::Result {
    let nanoseconds = orders.clock.saturating_sub(counters.said_clock).max(1);
    let pages = counters.written.saturating_sub(counters.said_written);
    let rate = u128::from(pages) * 1_000_000_000 / u128::from(nanoseconds);
    (counters.said_clock, counters.said_written) = (orders.clock, counters.written);
    writeln!(
        serial,
        "vcpu {vcpu}: ms={} rate={rate} written={} checked={} passes={} bad={}",
        orders.clock / 1_000_000,
        counters.written,
        counters.checked,
        counters.passes,
        counters.bad + counters.table_broken + counters.out_of_step
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::content::PAGE_BYTES;

    const PAGES: u64 = 24;

    struct Guest {
        pages: Vec<Page>,
        table: Vec<u32>,
        counters: Counters,
        said: String,
    }

    impl Guest {
        fn filled() -> Self {
            let mut guest = Guest {
                pages: vec![[0; PAGE_BYTES]; PAGES as usize],
                table: vec![0; PAGES as usize],
                counters: Counters::default(),
                said: String::new(),
            };
            guest.step(Orders { step: 1, fill: PAGES + 5, ..Orders::default() });
            guest
        }

        fn step(&mut self, orders: Orders) {
            let plan = Plan { fill: Fill::Random, pattern: Pattern::Random, span: PAGES as usize, first: 100 };
            let (pages, table) = (&mut self.pages, &mut self.table);
            let mut share = Share { vcpu: 3, pages, table, plan, whole: true };
            share.step(&orders, &mut self.counters, &mut self.said).expect("a string takes everything");
        }
    }

    #[test]
    fn steps_do_what_was_ordered_and_count_it() {
        let mut guest = Guest::filled();
        for step in 2..10 {
            guest.step(Orders { step, write: 5, check: PAGES / 2, ..Orders::default() });
        }
        let done = guest.counters;
        assert_eq!((done.steps, done.written, done.checked, done.passes), (9, 40, 4 * PAGES, 4));
        assert_eq!((done.bad, done.table_broken, done.out_of_step, done.first_bad.get()), (0, 0, 0, None));
        guest.step(Orders { step: 10, clock: 2_000_000_000, say: 1, ..Orders::default() });
        assert_eq!(guest.said, "vcpu 3: ms=2000 rate=20 written=40 checked=96 passes=4 bad=0\n");
    }

    #[test]
    fn the_first_wrong_page_is_kept_and_each_is_counted() {
        let mut guest = Guest::filled();
        guest.pages[7] = [0; PAGE_BYTES];
        guest.pages[9][100] ^= 1;
        guest.step(Orders { step: 2, check: 2 * PAGES, ..Orders::default() });
        assert_eq!(guest.counters.bad, 4);
        let first = Bad { index: 107, expected: 1, fault: Fault::Lost };
        assert_eq!(guest.counters.first_bad.get(), Some(first));
        assert!(guest.said.contains("BAD page 109 expected generation 1 found corrupt"), "{}", guest.said);
    }

    #[test]
    fn bad_pages_survive_as_numbers() {
        for fault in [
            Fault::Lost,
            Fault::Stale { generation: 7 },
            Fault::Newer { generation: 8 },
            Fault::Foreign { index: 1 << 40 },
            Fault::Corrupt { offset: 4095 },
        ] {
            let bad = Bad { index: 5, expected: 6, fault };
            assert_eq!(BadPage::from(bad).get(), Some(bad));
        }
    }

    #[test]
    fn stale_orders_and_stale_counters_are_noticed() {
        let mut guest = Guest::filled();
        guest.step(Orders { step: 2, ..Orders::default() });
        let before = guest.counters;
        guest.step(Orders { step: 3, ..Orders::default() });
        guest.step(Orders { step: 3, ..Orders::default() });
        assert_eq!(guest.counters.out_of_step, 1);
        guest.step(Orders { step: 4, ..Orders::default() });
        assert_eq!(guest.counters.out_of_step, 1, "noticed once");
        guest.counters = before;
        guest.step(Orders { step: 5, ..Orders::default() });
        assert_eq!(guest.counters.out_of_step, 1);
    }

    #[test]
    fn a_broken_table_is_noticed_with_the_pass() {
        let mut guest = Guest::filled();
        guest.step(Orders { step: 2, write: 30, ..Orders::default() });
        guest.table.swap(1, 2);
        guest.table[3] += 1;
        guest.step(Orders { step: 3, check: PAGES, ..Orders::default() });
        assert_eq!(guest.counters.table_broken, 1);
    }
}

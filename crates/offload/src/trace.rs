//! Records everything that goes to devices and comes back, and reads such a record.
//!
//! A trace is lines of words, described in `docs/accelerator-trace.md`. `sterna accel capture` writes it on hardware.
//! [`read()`] returns it to tests; [`replay`] checks it against the software model's own table of the specification. So a
//! trace from somebody else's machine becomes a test.

mod read;

use std::fmt::{Debug, Formatter};
use std::io::{self, Write};
use std::sync::Mutex;

use sterna_idxd::{Descriptor, Kind, Mode, QueueInfo};

pub use self::read::{Answer, Exchange, TraceError, read};
#[cfg(feature = "model")]
pub use self::read::{Replay, replay};
use crate::sync::lock_std;
use crate::time::Nanos;

/// The first line of a trace.
pub const HEADER: &str = "sterna-accelerator-trace 1";

/// A trace being written.
pub struct Trace {
    output: Mutex<Output>,
}

struct Output {
    to: Box<dyn Write + Send>,
    next: u64,
    /// The first error; nothing is written after it.
    failed: Option<io::Error>,
}

impl Debug for Trace {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "Trace({} submissions)", lock_std(&self.output).next)
    }
}

impl Trace {
    /// Makes a trace that is written to `to`, which should be buffered.
    pub fn new(to: Box<dyn Write + Send>) -> Self {
        let mut output = Output { to, next: 1, failed: None };
        output.line(format_args!("{HEADER}"));
        Self { output: Mutex::new(output) }
    }

    /// Returns whether a write has failed: then nothing more is written, and capturing on is pointless.
    /// [`Self::finish`] returns the error.
    pub fn failed(&self) -> bool {
        lock_std(&self.output).failed.is_some()
    }

    /// Flushes the buffer.
    ///
    /// # Errors
    /// A write failed, now or before.
    pub fn finish(&self) -> io::Result<()> {
        let mut output = lock_std(&self.output);
        match output.failed.take() {
            Some(error) => Err(error),
            None => output.to.flush(),
        }
    }

    /// Records a queue that will be used, with everything that limits its descriptors.
    pub(crate) fn queue(&self, queue: &QueueInfo) {
        let kind = if queue.kind() == Kind::Dsa { "dsa" } else { "iaa" };
        let mode = if queue.mode == Some(Mode::Dedicated) { "dedicated" } else { "shared" };
        lock_std(&self.output).line(format_args!(
            "q {} {kind} {} {mode} {} {} {} {}",
            queue.full_name(),
            queue.device.version,
            queue.size,
            queue.max_batch,
            queue.max_transfer,
            u8::from(queue.block_on_fault)
        ));
    }

    /// Records a descriptor, and those of its members if it is a batch. Returns the number that its completion will
    /// have.
    pub(crate) fn submitted(
        &self,
        at: Nanos,
        queue: &str,
        descriptor: &Descriptor,
        members: impl Iterator<Item = [u8; 64]>,
    ) -> u64 {
        let mut output = lock_std(&self.output);
        let number = output.next;
        output.next += 1;
        output.line(format_args!("s {at} {number} {queue} {}", Hex(descriptor.as_bytes())));
        members.for_each(|member| output.line(format_args!("d {number} {}", Hex(&member))));
        number
    }

    /// Records a completion record, and those of the members if it is of a batch.
    pub(crate) fn completed(&self, at: Nanos, number: u64, record: &[u8], members: impl Iterator<Item = [u8; 32]>) {
        let mut output = lock_std(&self.output);
        output.line(format_args!("c {at} {number} {}", Hex(record)));
        members.for_each(|member| output.line(format_args!("r {number} {}", Hex(&member))));
    }
}

impl Output {
    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        if self.failed.is_none()
            && let Err(error) = writeln!(self.to, "{line}")
        {
            self.failed = Some(error);
        }
    }
}

struct Hex<'a>(&'a [u8]);

impl std::fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

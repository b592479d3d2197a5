//! Connects a vhost-user back-end to the engine.

use std::io::{BufRead, Write};
use std::time::{Duration, Instant};

use sterna_engine::device_state::{LoadDevice, SaveDevice};
use sterna_engine::vmm::VmmError;

use super::CHUNK;
use crate::vhost_user::BackEnd;

/// A back-end at the source, for [`Source::device`](sterna_engine::source::Source::device).
///
/// The monitor suspends the device (`GET_VRING_BASE` for each vring) in
/// [`SourceVmm::pause`](sterna_engine::vmm::SourceVmm::pause), and starts its vrings again in
/// [`SourceVmm::resume`](sterna_engine::vmm::SourceVmm::resume): the device then continues, whether or not its state
/// was read. The protocol cannot read ahead of the stop, and does not report the length of a state.
pub struct VhostUserSource {
    back_end: BackEnd,
    patience: Duration,
}

impl VhostUserSource {
    /// Makes the source for one migration. `patience` is the total time that the back-end may take for its state; the
    /// time of the network is not counted.
    pub fn new(back_end: BackEnd, patience: Duration) -> Self {
        Self { back_end, patience }
    }
}

impl SaveDevice for VhostUserSource {
    fn save(&mut self, state: &mut dyn Write) -> Result<(), VmmError> {
        let mut patience = Patience(self.patience);
        let mut saver = patience.during(|deadline| self.back_end.save(deadline))?;
        let mut buffer = vec![0; CHUNK];
        loop {
            match patience.during(|deadline| saver.read(&mut buffer, deadline))? {
                0 => break,
                count => state.write_all(&buffer[..count])?,
            }
        }
        patience.during(|deadline| saver.finish(deadline))?;
        Ok(())
    }

    /// Nothing is left to be undone: a state that was not read to its end is abandoned when its reader is dropped.
    fn saving_ended(&mut self) {}
}

/// A back-end at the destination, for [`Destination::device`](sterna_engine::destination::Destination::device):
/// connected, with its memory table, its vrings not started.
///
/// The monitor starts the vrings in [`DestinationVmm::resume`](sterna_engine::vmm::DestinationVmm::resume). After a
/// failed migration it must not: the back-end has a part of a state, or all of it; load again or end it.
pub struct VhostUserDestination {
    back_end: BackEnd,
    patience: Duration,
}

impl VhostUserDestination {
    /// Makes the destination for one migration. `patience` as at the [source](VhostUserSource::new).
    pub fn new(back_end: BackEnd, patience: Duration) -> Self {
        Self { back_end, patience }
    }
}

impl LoadDevice for VhostUserDestination {
    fn load(&mut self, state: &mut dyn BufRead) -> Result<(), VmmError> {
        let mut patience = Patience(self.patience);
        let mut loader = patience.during(|deadline| self.back_end.load(deadline))?;
        loop {
            let bytes = state.fill_buf()?;
            let count = bytes.len();
            if count == 0 {
                break;
            }
            patience.during(|deadline| loader.write(bytes, deadline))?;
            state.consume(count);
        }
        patience.during(|deadline| loader.finish(deadline))?;
        Ok(())
    }
}

/// The remaining time for waiting on a back-end.
struct Patience(Duration);

impl Patience {
    fn during<T>(&mut self, call: impl FnOnce(Instant) -> T) -> T {
        /// A clock cannot represent a time that is much later.
        const YEAR: Duration = Duration::from_secs(365 * 24 * 60 * 60);
        let begun = Instant::now();
        let result = call(begun + self.0.min(YEAR));
        self.0 = self.0.saturating_sub(begun.elapsed());
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_time_inside_calls_counts_against_the_patience() {
        let mut patience = Patience(Duration::from_secs(1000));
        let (first, ended) = patience.during(|deadline| {
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_millis(1) {}
            (deadline, Instant::now())
        });
        let (second, begun) = patience.during(|deadline| (deadline, Instant::now()));
        assert!(second - first <= begun - ended, "{first:?} {ended:?} {begun:?} {second:?}");
        Patience(Duration::MAX).during(|deadline| assert!(deadline > Instant::now()));
    }
}

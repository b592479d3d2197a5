//! The threads of one side's devices. A device whose call does not return keeps the migration from ending, so a message names it.

use std::convert::Infallible;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use super::{DeviceId, named};
use crate::cpu_time;

/// How long devices may take to end before a message names them.
const LONG: Duration = Duration::from_secs(1);

/// Threads of devices.
#[derive(Default)]
pub(crate) struct Threads(Vec<Thread>);

struct Thread {
    device: DeviceId,
    handle: JoinHandle<()>,
    /// Disconnected when the thread ends.
    ended: Receiver<Infallible>,
}

impl Threads {
    /// Starts the thread of a device, which is called `name`.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(super) fn start(
        &mut self,
        name: String,
        device: DeviceId,
        run: impl FnOnce() + Send + 'static,
    ) -> io::Result<()> {
        let (ends, ended) = channel();
        let handle = cpu_time::spawn(Builder::new().name(name), move || {
            let _ends = ends;
            run();
        })?;
        self.0.push(Thread { device, handle, ended });
        Ok(())
    }

    /// Waits until all threads have ended, whose end was requested. Calls `late` with the names of those that take long.
    pub(crate) fn join(&mut self, late: impl FnOnce(&str)) {
        let until = Instant::now() + LONG;
        let is_late = |thread: &&Thread| {
            let left = until.saturating_duration_since(Instant::now());
            thread.ended.recv_timeout(left) == Err(RecvTimeoutError::Timeout)
        };
        if let Some(devices) = named(self.0.iter().filter(is_late).map(|thread| thread.device.to_string())) {
            late(&devices);
        }
        for thread in self.0.drain(..) {
            // A panic of the thread has been printed.
            let _ = thread.handle.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_does_not_end_is_named_and_waited_for_all_the_same() {
        let (mut threads, (end, ends)) = (Threads::default(), channel::<()>());
        threads.start("one".into(), DeviceId::new("ends", 0), || {}).unwrap();
        threads.start("two".into(), DeviceId::new("ends", 1), || panic!("as it is to")).unwrap();
        let lasts = move || assert!(ends.recv().is_ok());
        threads.start("three".into(), DeviceId::new("lasts", 0), lasts).unwrap();
        let mut named = None;
        threads.join(|devices| {
            named = Some(devices.to_owned());
            end.send(()).unwrap();
        });
        assert_eq!(named.as_deref(), Some("lasts/0"));
        threads.join(|devices| panic!("{devices}"));
    }
}

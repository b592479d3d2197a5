//! The thread that looks at completions when no submitter does: of dropped tickets, and of channels whose owner waits
//! for something else. It releases credits, notices devices that do not answer, and sleeps when nothing is outstanding.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use crate::core::Core;
use crate::time::{NEVER, Nanos};

/// A running backstop.
#[derive(Debug)]
pub(crate) struct Backstop {
    thread: JoinHandle<()>,
}

impl Backstop {
    /// Starts the thread.
    pub(crate) fn start(core: Arc<Core>) -> std::io::Result<Self> {
        let thread = std::thread::Builder::new().name("offload-backstop".into()).spawn(move || run(&core))?;
        Ok(Self { thread })
    }

    /// Waits for its end, which the core's `closing` causes.
    pub(crate) fn join(self) {
        // It has no result, and a panic in it was printed already.
        let _ = self.thread.join();
    }
}

fn run(core: &Core) {
    while !(core.closing.load(Ordering::Acquire) && core.idle()) {
        let (heard, next) = look(core);
        if core.closing.load(Ordering::Acquire) && core.idle() {
            return;
        }
        core.settings.time.wait(&core.bell, heard, next);
    }
}

/// Looks at every channel. Returns the rings heard before, and when to look again.
fn look(core: &Core) -> (u64, Nanos) {
    // A submitter rings meanwhile, because it cannot know whether its channel was looked at already.
    core.until.store(NEVER, Ordering::SeqCst);
    let heard = core.bell.heard();
    let next = core.turn();
    core.until.store(next, Ordering::SeqCst);
    (heard, next)
}

#[cfg(all(test, feature = "accel"))]
mod tests {
    use std::ptr::NonNull;
    use std::sync::OnceLock;
    use std::sync::atomic::AtomicU64;

    use sterna_idxd::{Device, Kind, Mode, QueueInfo, WorkQueue};
    use sterna_test_kit::portal::OnDemandDevice;

    use super::*;
    use crate::core::LATER;
    use crate::{Bell, Offload, Operation, Region, Settings, Time};

    /// A clock that wakes sleepers late; meanwhile the backstop looks, and the first batch completes.
    #[derive(Debug, Default)]
    struct Late {
        now: AtomicU64,
        device: Arc<OnDemandDevice>,
        core: OnceLock<Arc<Core>>,
        heard: AtomicU64,
    }

    impl Time for Late {
        fn now(&self) -> Nanos {
            self.now.fetch_add(1, Ordering::Relaxed)
        }

        fn wait(&self, _: &Bell, _: u64, until: Nanos) {
            self.now.fetch_max(until.saturating_add(2 * LATER), Ordering::Relaxed);
            let (heard, next) = look(self.core.get().unwrap());
            assert_eq!(next, NEVER, "somebody attends to the only channel");
            self.heard.store(heard, Ordering::Relaxed);
            self.device.answer(0, 0);
        }
    }

    #[test]
    fn the_backstop_looks_at_batches_whose_owner_stopped_waiting() {
        let time = Arc::new(Late { now: AtomicU64::new(1), ..Late::default() });
        let mut settings = Settings::default();
        (settings.threads, settings.time) = (false, time.clone());
        let device = Arc::new(Device::new("dsa0", Kind::Dsa));
        let mut info = QueueInfo::new("wq0.0", device, Mode::Shared, 16);
        info.max_batch = 1;
        let queue = WorkQueue::with_portal(info, time.device.clone()).unwrap();
        let offload = Offload::with_queues(vec![queue], &settings).unwrap();
        let core = offload.core();
        assert!(time.core.set(core.clone()).is_ok());
        let memory: &'static mut [u64] = vec![0; 8].leak();
        // SAFETY: leaked, and nothing refers to it any more.
        let region = unsafe { Region::new(NonNull::from(memory).cast(), 64, None) };
        let channel = offload.channel();
        for _ in 0..2 {
            let mut batch = channel.batch(Operation::Checksum);
            batch.push(&region.range(0, 64).unwrap()).unwrap();
            let _ = channel.submit(batch).unwrap().into_id();
        }
        assert!(channel.wait(NEVER).is_some() && channel.in_flight() == 1);
        assert!(core.bell.heard() > time.heard.load(Ordering::Relaxed), "the backstop sleeps for ever");
        assert_ne!(look(&core).1, NEVER);

        time.device.answer(1, 0);
    }
}

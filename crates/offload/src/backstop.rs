//! The thread that looks at completions when nobody else does: of dropped tickets, of channels that wait for something
//! else. It gives credits back, notices devices that say nothing, and is off when nothing is outstanding.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use crate::core::Core;
use crate::time::{NEVER, Nanos};

/// How much later than predicted the backstop looks at a channel: its owner is expected to have done so by then. Were it on
/// time, it would be woken for every batch of a caller that waits for each.
pub(crate) const LATER: Nanos = 500_000;

/// A running backstop.
#[derive(Debug)]
pub(crate) struct Backstop {
    thread: JoinHandle<()>,
}

impl Backstop {
    /// Starts it.
    pub(crate) fn start(core: Arc<Core>) -> std::io::Result<Self> {
        let thread = std::thread::Builder::new().name("offload-backstop".into()).spawn(move || run(&core))?;
        Ok(Self { thread })
    }

    /// Waits for its end, which the core's `closing` brings about.
    pub(crate) fn join(self) {
        // It has no result, and a panic of it was printed by itself.
        let _ = self.thread.join();
    }
}

fn run(core: &Core) {
    while !(core.closing.load(Ordering::Acquire) && core.idle()) {
        // Whoever submits meanwhile rings, as it cannot know whether its channel was looked at already.
        core.until.store(NEVER, Ordering::SeqCst);
        let heard = core.bell.heard();
        let next = core.turn();
        core.until.store(next, Ordering::SeqCst);
        if core.closing.load(Ordering::Acquire) && core.idle() {
            return;
        }
        core.settings.time.sleep(&core.bell, heard, next);
    }
}

//! Resources that the threads of a migration share: cores, engines, the window, the CPU allowance.

/// Equal servers, each of which does one job at a time, first come, first served.
#[derive(Debug)]
pub(super) struct Servers(Vec<f64>);

impl Servers {
    pub(super) fn new(count: usize) -> Self {
        assert!(count > 0, "at least one server");
        Self(vec![0.0; count])
    }

    /// Returns when a job that arrives now and lasts `takes` begins and ends.
    pub(super) fn serve(&mut self, now: f64, takes: f64) -> (f64, f64) {
        let free = self.0.iter_mut().min_by(|one, other| one.total_cmp(other)).expect("there is one");
        let begun = free.max(now);
        *free = begun + takes;
        (begun, *free)
    }
}

/// The engine's window (`window.rs` there): 50 ms of acknowledged bytes, measured while the window limits the sender.
#[derive(Debug)]
pub(super) struct Window {
    bytes: f64,
    in_flight: usize,
    rate: f64,
    /// Since when it is measured, the bytes acknowledged since, and whether a sender waited.
    since: f64,
    acknowledged: usize,
    limited: bool,
}

const QUEUEING: f64 = 50e6;
const INTERVAL: f64 = 10e6;
const DECAY: f64 = 0.9;
/// Two batches.
const MIN_WINDOW: f64 = 1048576.0;
const FIRST: f64 = 4.0 * MIN_WINDOW;
const MAX_WINDOW: f64 = 256.0 * MIN_WINDOW;

impl Default for Window {
    fn default() -> Self {
        Self { bytes: FIRST, in_flight: 0, rate: 0.0, since: 0.0, acknowledged: 0, limited: false }
    }
}

impl Window {
    /// Returns whether another batch may be in flight. A caller that gets false waits.
    pub(super) fn has_room(&mut self) -> bool {
        let room = self.in_flight == 0 || (self.in_flight as f64) + MIN_WINDOW / 2.0 <= self.bytes;
        self.limited |= !room;
        room
    }

    pub(super) fn entered(&mut self, bytes: usize) {
        self.in_flight += bytes;
    }

    pub(super) fn acknowledged(&mut self, bytes: usize, now: f64) {
        self.in_flight -= bytes;
        self.acknowledged += bytes;
        let elapsed = now - self.since;
        if elapsed < INTERVAL {
            return;
        }
        if self.limited {
            self.rate = (self.acknowledged as f64 / elapsed).max(self.rate * DECAY);
            self.bytes = (self.rate * QUEUEING).clamp(MIN_WINDOW, MAX_WINDOW);
        }
        (self.since, self.acknowledged, self.limited) = (now, 0, false);
    }
}

/// CPU time that all threads may use together, as in the engine: 10 ms are saved up at most, and 30 ms owed.
#[derive(Debug)]
pub(super) struct Allowance {
    cpus: f64,
    level: f64,
    at: f64,
}

const SPAN: f64 = 10e6;
const MAX_DEBT: f64 = 30e6;

impl Allowance {
    pub(super) fn new(cpus: f64) -> Self {
        Self { cpus, level: 0.0, at: 0.0 }
    }

    /// Adds the CPU time that a thread has used since its last report. Returns how far all threads are over their
    /// allowance, 0 to 1.
    pub(super) fn used(&mut self, used: f64, now: f64) -> f64 {
        if self.cpus.is_infinite() {
            return 0.0;
        }
        let elapsed = (now - self.at).max(0.0);
        self.at += elapsed;
        self.level = ((self.level + elapsed * self.cpus).min(SPAN) - used).max(-MAX_DEBT);
        (-self.level / SPAN).clamp(0.0, 1.0)
    }
}

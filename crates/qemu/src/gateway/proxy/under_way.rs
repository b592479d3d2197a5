//! The sessions that a proxy has in progress: bounded in number, and closed when the proxy must end at once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use sterna_engine::cancel::Cancel;
use sterna_engine::wakers::Registration;

use super::ProxyStop;

/// Maximum number of migrations and connections that a proxy carries at once. Each needs a few threads and connections.
const MAX_CARRIED: usize = 256;

/// The sessions in progress. Clones share one state.
#[derive(Clone, Debug, Default)]
pub(super) struct UnderWay(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    next: u64,
    carried: HashMap<u64, Cancel>,
    /// A session was closed before its end.
    cut: bool,
    closed: bool,
}

/// One migration or connection. It counts as in progress until this is dropped.
#[derive(Debug)]
pub(super) struct Carried {
    number: u64,
    under_way: UnderWay,
    /// Ends this session.
    pub(super) cancel: Cancel,
}

impl UnderWay {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no thread panics with it locked")
    }

    /// Adds a session; none if there are too many.
    pub(super) fn enter(&self) -> Option<Carried> {
        let mut state = self.state();
        if state.carried.len() >= MAX_CARRIED {
            return None;
        }
        let (number, cancel) = (state.next, Cancel::new());
        state.next += 1;
        if state.closed {
            cancel.cancel();
        }
        state.carried.insert(number, cancel.clone());
        Some(Carried { number, under_way: self.clone(), cancel })
    }

    /// Cancels all sessions, including later ones.
    pub(super) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        state.cut |= !state.carried.is_empty();
        state.carried.values().for_each(Cancel::cancel);
    }

    /// Returns whether a session was cancelled before its end.
    pub(super) fn was_cut(&self) -> bool {
        self.state().cut
    }
}

/// Calls `drain` when `stop.drain` is cancelled. When `stop.close` is cancelled, cancels the sessions in progress and calls `close`. This lasts
/// as long as the returned registrations are held.
pub(super) fn obey(
    stop: &ProxyStop,
    under_way: &UnderWay,
    drain: impl Fn() + Send + 'static,
    close: impl Fn() + Send + 'static,
) -> [Registration; 2] {
    let under_way = under_way.clone();
    let close = move || {
        under_way.close();
        close();
    };
    [stop.drain.on_cancel(drain), stop.close.on_cancel(close)]
}

impl Drop for Carried {
    fn drop(&mut self) {
        self.under_way.state().carried.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_over_the_maximum_is_refused_until_another_one_ends() {
        let under_way = UnderWay::default();
        let mut carried: Vec<_> = (0..MAX_CARRIED).map(|_| under_way.enter().unwrap()).collect();
        assert!(under_way.enter().is_none());
        carried.pop();
        drop(under_way.enter().unwrap());
        assert!(!under_way.was_cut());
    }

    #[test]
    fn closing_cancels_present_and_later_sessions() {
        let under_way = UnderWay::default();
        let before = under_way.enter().unwrap();
        under_way.close();
        let after = under_way.enter().unwrap();
        assert!(before.cancel.is_cancelled() && after.cancel.is_cancelled() && under_way.was_cut());
    }
}

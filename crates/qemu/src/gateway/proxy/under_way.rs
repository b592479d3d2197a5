//! What a proxy carries at the moment: bounded in number, and closed when the proxy is told to end at once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use sterna::cancel::Cancel;
use sterna::wakers::Registration;

use super::ProxyStop;

/// Migrations and connections that a proxy carries at once, at most. Each costs a few threads and connections.
const MAX_CARRIED: usize = 256;

/// What is carried. Clones are the same.
#[derive(Clone, Debug, Default)]
pub(super) struct UnderWay(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    next: u64,
    carried: HashMap<u64, Cancel>,
    /// Whether anything was closed before its end.
    cut: bool,
    closed: bool,
}

/// One migration or connection, until it is dropped.
#[derive(Debug)]
pub(super) struct Carried {
    number: u64,
    under_way: UnderWay,
    /// Tells this one to end.
    pub(super) cancel: Cancel,
}

impl UnderWay {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no thread panics with it locked")
    }

    /// Counts one more in; none where there are too many.
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

    /// Tells all of them to end, and those that still come.
    pub(super) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        state.cut |= !state.carried.is_empty();
        state.carried.values().for_each(Cancel::cancel);
    }

    /// Whether anything was told to end before its time.
    pub(super) fn was_cut(&self) -> bool {
        self.state().cut
    }
}

/// Has `stop` obeyed: `drain` ends the listening, `close` what is waited for besides what is under way, which is told to end here. As long
/// as what is returned is held.
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
    fn there_is_room_for_so_many_and_again_when_one_has_ended() {
        let under_way = UnderWay::default();
        let mut carried: Vec<_> = (0..MAX_CARRIED).map(|_| under_way.enter().unwrap()).collect();
        assert!(under_way.enter().is_none());
        carried.pop();
        drop(under_way.enter().unwrap());
        assert!(!under_way.was_cut());
    }

    #[test]
    fn closing_tells_those_that_are_there_and_those_that_come() {
        let under_way = UnderWay::default();
        let before = under_way.enter().unwrap();
        under_way.close();
        let after = under_way.enter().unwrap();
        assert!(before.cancel.is_cancelled() && after.cancel.is_cancelled() && under_way.was_cut());
    }
}

//! Calls of the monitor by the driver's loop, made on the thread that called `run`.
//!
//! A call that the loop waits for is answered as by a function. A call that may last until memory has arrived, which only the loop can have
//! sent, is begun, and reports to the loop when it is done.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use crate::monitor::{DestinationMonitor, MonitorError};

type Call = Box<dyn FnOnce(&mut DestinationMonitor<'_>) + Send>;

/// The end of the loop.
#[derive(Debug)]
pub(super) struct MonitorCalls {
    calls: Sender<Call>,
    failures: Arc<Mutex<Vec<MonitorError>>>,
}

/// The end of the thread that called `run`.
pub(super) struct CallsIn(Receiver<Call>);

pub(super) fn monitor_calls() -> (MonitorCalls, CallsIn) {
    let (calls, calls_in) = channel();
    (MonitorCalls { calls, failures: Arc::default() }, CallsIn(calls_in))
}

impl MonitorCalls {
    /// Makes a call and waits for its result.
    pub(super) fn call<R: Send + 'static>(
        &self,
        call: impl FnOnce(&mut DestinationMonitor<'_>) -> R + Send + 'static,
    ) -> R {
        let (answer, answered) = channel();
        // The receiver waits below.
        self.begin(call, move |result| drop(answer.send(result)));
        answered.recv().expect("calls are made as long as the loop runs, and do not panic")
    }

    /// Begins a call, whose result is passed to `report`. Calls are made one after the other.
    pub(super) fn begin<R>(
        &self,
        call: impl FnOnce(&mut DestinationMonitor<'_>) -> R + Send + 'static,
        report: impl FnOnce(R) + Send + 'static,
    ) {
        let failures = Arc::clone(&self.failures);
        let call = move |vmm: &mut DestinationMonitor<'_>| {
            let result = call(vmm);
            vmm.failures().clone_into(&mut failures.lock().expect("no thread panics with the lock held"));
            report(result);
        };
        self.calls.send(Box::new(call)).expect("calls are made as long as the loop runs");
    }

    /// Returns the errors of the monitor's methods so far. Does not wait for a call that is under way.
    pub(super) fn failures(&self) -> Vec<MonitorError> {
        self.failures.lock().expect("no thread panics with the lock held").clone()
    }
}

impl CallsIn {
    /// Makes the calls, until the loop has ended.
    pub(super) fn serve(self, vmm: &mut DestinationMonitor<'_>) {
        for call in self.0 {
            call(vmm);
        }
    }
}

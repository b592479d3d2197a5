//! A destination whose monitor takes long to start the guest, because it waits for storage: the source waits as long as the destination is there.

use std::io::Read;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::common::within_a_minute;
use crate::guest::{Monitor, Signal, Workload, witnessed};
use sterna_engine::cancel::Cancel;
use sterna_engine::destination::Destination;
use sterna_engine::migration::Phase;
use sterna_engine::report::{Observer, Outcome, Progress};
use sterna_engine::source::{Source, TimeLimits};
use sterna_engine::transport::Security;
use sterna_engine::vmm::{DestinationVmm, VmmError};

/// A monitor that starts the guest when a signal is set.
struct StartsOn<'a>(&'a mut Monitor, Signal);

impl DestinationVmm for StartsOn<'_> {
    fn name(&self) -> String {
        DestinationVmm::name(self.0)
    }

    fn load(&mut self, state: &mut dyn Read) -> Result<(), VmmError> {
        self.0.load(state)
    }

    fn resume(&mut self) -> Result<(), VmmError> {
        self.1.wait();
        DestinationVmm::resume(self.0)
    }
}

/// Sets a signal when the source has looked at its time limits twice since the decision.
struct Waits(AtomicU32, Signal);

impl Observer for Waits {
    fn progress(&self, progress: &Progress) {
        if progress.phase == Phase::Committed && self.0.fetch_add(1, Ordering::Relaxed) == 1 {
            self.1.set();
        }
    }

    fn note(&self, _: &str) {}
}

#[test]
fn a_source_waits_longer_for_a_destination_that_is_connected_than_it_would_dial_a_lost_one() {
    within_a_minute(|| {
        let (mut from, log, mut to, witness) = witnessed(Workload { writers: 1, span: 100, seed: 5, burst: 8 });
        let waited = Signal::default();
        let listening = Destination::new(witness.destination.ram()).listen("127.0.0.1:0", &Security::Insecure).unwrap();
        let address = listening.address().clone();
        let limits = TimeLimits::default().delivery(Duration::ZERO).start(Some(Duration::from_secs(600)));
        let mut migration = Source::new(witness.source.ram(), Box::new(log)).time_limits(limits);
        let observer = Waits(AtomicU32::new(0), waited.clone());
        let (sent, received) = std::thread::scope(|scope| {
            let mut starts = StartsOn(&mut to, waited);
            let receiving = scope.spawn(move || listening.run(&mut starts, &Cancel::new(), &()));
            let sent = migration.run(address, &Security::Insecure, &mut from, &Cancel::new(), &observer);
            // Otherwise a source that gave up would leave its destination waiting.
            observer.1.set();
            (sent, receiving.join().unwrap())
        });
        received.unwrap();
        assert_eq!(sent.unwrap().outcome, Outcome::Completed);
        witness.check(&from, &mut to);
    });
}

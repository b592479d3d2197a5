//! Post-copy, with real page faults: the guest at the destination compares every word that it reads with the memory of
//! the source, which is paused.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use crate::common::within_a_minute;
use crate::guest::{Pace, Workload, both_sides, faults_can_be_watched, log_of, witnessed};
use sterna_codec::MethodChoice;
use sterna_engine::cancel::Cancel;
use sterna_engine::destination::Destination;
use sterna_engine::report::{Observer, Progress};
use sterna_engine::source::{NotConverging, Source, TimeLimits};
use sterna_engine::transport::Security;
use sterna_engine::transport::simulated::Network;
use sterna_offload::{Accelerators, Kind, Offload, Settings};

/// Cuts all connections when the guest was started, and again when the destination has reconnected. Until the last cut the guest looks at
/// a few words only: otherwise it might have all of its memory before.
struct Cutting {
    network: Network,
    left: AtomicU32,
    pace: Pace,
}

impl Observer for Cutting {
    fn progress(&self, _: &Progress) {}

    fn note(&self, text: &str) {
        let now = text.starts_with("the guest runs;") || text.starts_with("the destination is back");
        let left = |left: u32| left.checked_sub(1);
        if now && let Ok(left) = self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, left) {
            self.network.cut_all();
            if left == 1 {
                self.pace.allow(u64::MAX);
            }
        }
    }
}

const BUSY: Workload = Workload { writers: 2, span: 3000, seed: 7, burst: 0 };

#[test]
fn a_guest_that_never_converges_continues_at_the_destination_and_reads_its_own_memory() {
    within_a_minute(|| {
        if !faults_can_be_watched() {
            return;
        }
        for (channels, method) in [(1, "none"), (3, "lz4")] {
            let (mut from, log, mut to, witness) = witnessed(BUSY);
            let memory = Arc::clone(&witness.destination);
            // Everything may be there before the guest gets a CPU, but not before its monitor has looked at a page.
            to.on_call = Some(Box::new(move |call| {
                if call == "load" {
                    std::hint::black_box(memory.words(0)[0].load(Ordering::Relaxed));
                }
            }));
            let listening =
                Destination::new(witness.destination.ram()).listen("127.0.0.1:0", &Security::Insecure).unwrap();
            let mut migration = Source::new(witness.source.ram(), log_of(&from, log))
                .channels(channels)
                .method(method.parse().unwrap())
                .bandwidth(Some(40 << 20))
                .downtime(Duration::from_millis(10))
                .when_not_converging(NotConverging::PostCopyAfter(1));
            let address = listening.address().clone();
            let (sent, received) = both_sides(listening, &mut to, || {
                migration.run(address, &Security::Insecure, &mut from, &Cancel::new(), &())
            });
            let (sent, received) = (sent.unwrap(), received.unwrap());
            let post_copy = sent.post_copy.expect("post-copy was used");
            println!("{post_copy:?} downtime {:.1} ms; {received:?}", sent.downtime_ms);
            witness.check(&from, &mut to);
            assert!(post_copy.requests > 0);
        }
    });
}

/// The source still counts on its channels then, although nothing has to come over them any more.
#[test]
fn a_guest_whose_memory_is_complete_before_the_decision_continues_at_the_destination() {
    within_a_minute(|| {
        if !faults_can_be_watched() {
            return;
        }
        let (mut from, log, mut to, witness) = witnessed(BUSY);
        let memory = Arc::clone(&witness.destination);
        // A monitor that reads all of the guest's memory while it loads the state: it waits for every missing page.
        let digests = Arc::new(AtomicU64::new(0));
        let digest = Arc::clone(&digests);
        to.on_call = Some(Box::new(move |call| {
            if call == "load" {
                digest.store(memory.digest(), Ordering::Relaxed);
            }
        }));
        let listening = Destination::new(witness.destination.ram()).listen("127.0.0.1:0", &Security::Insecure).unwrap();
        let mut migration = Source::new(witness.source.ram(), log_of(&from, log))
            .bandwidth(Some(40 << 20))
            .downtime(Duration::from_millis(10))
            .when_not_converging(NotConverging::PostCopyAfter(1));
        let address = listening.address().clone();
        let (sent, received) = both_sides(listening, &mut to, || {
            migration.run(address, &Security::Insecure, &mut from, &Cancel::new(), &())
        });
        let (sent, _) = (sent.unwrap(), received.unwrap());
        assert!(sent.post_copy.is_some_and(|post_copy| post_copy.requests > 0), "{:?}", sent.post_copy);
        assert_eq!(digests.load(Ordering::Relaxed), witness.source.digest());
        witness.check(&from, &mut to);
    });
}

#[test]
fn a_guest_waits_while_the_connection_is_lost_and_then_gets_its_missing_memory() {
    within_a_minute(|| lost_and_found(None));
}

#[test]
fn pages_that_an_accelerator_had_in_progress_at_a_lost_connection_are_sent_again() {
    within_a_minute(|| {
        // The accelerator always has pages in progress.
        let faults = r#"[{"what":{"slow":{"factor":20}}},{"per_mille":20,"what":"drop_completion"}]"#;
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("model.json");
        std::fs::write(&file, format!(r#"{{"devices":[{{"name":"dsa0"}}],"faults":{faults}}}"#)).unwrap();
        let mut settings = Settings::default();
        settings.patience = Duration::from_secs(1);
        let offload = Offload::start(&Accelerators::model(file), &settings).unwrap();
        lost_and_found(Some(&offload));
        let report = offload.report();
        let device = report.operations.iter().flat_map(|of| &of.engines).find(|engine| engine.engine == Kind::Dsa);
        assert!(faults_can_be_watched() == device.is_some_and(|device| device.items > 0), "{report:?}");
    });
}

fn lost_and_found(offload: Option<&Arc<Offload>>) {
    if !faults_can_be_watched() {
        return;
    }
    let (mut from, log, mut to, witness) = witnessed(BUSY);
    let (network, pace) = (Network::new(5), Pace::default());
    pace.allow(32);
    to.behind.as_mut().expect("the guest compares its memory").pace = Some(pace.clone());
    let cutting = Cutting { network: network.clone(), left: AtomicU32::new(3), pace };
    let listening =
        Destination::new(witness.destination.ram()).listen(network.port("there"), &Security::Insecure).unwrap();
    let limits = TimeLimits::default().dial_pause(Duration::from_millis(5));
    let mut migration = Source::new(witness.source.ram(), log_of(&from, log))
        .method(MethodChoice::default())
        .bandwidth(Some(8 << 20))
        .downtime(Duration::from_millis(10))
        .time_limits(limits)
        .when_not_converging(NotConverging::PostCopyAfter(1));
    if let Some(offload) = offload {
        migration = migration.offload(Arc::clone(offload));
    }
    let address = listening.address().clone();
    let (sent, received) = std::thread::scope(|scope| {
        let (to, cutting) = (&mut to, &cutting);
        let receiving = scope.spawn(move || listening.run(to, &Cancel::new(), cutting));
        let sent = migration.run(address, &Security::Insecure, &mut from, &Cancel::new(), cutting);
        (sent.unwrap(), receiving.join().unwrap())
    });
    received.unwrap();
    assert!(sent.post_copy.unwrap().reconnected >= 3, "{:?}", sent.post_copy);
    witness.check(&from, &mut to);
}

//! A guest that writes, moved with accelerators of the software model.

// Each test program uses a part of it.
#![allow(dead_code)]

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use sterna_codec::MethodChoice;
use sterna_engine::cancel::Cancel;
use sterna_engine::destination::Destination;
use sterna_engine::report::{Observer, Report};
use sterna_engine::source::Source;
use sterna_engine::transport::Security;
use sterna_offload::{Accelerators, Kind, Offload, OffloadReport, Operation, Settings};

use crate::guest::{Memory, Running, Workload, monitors};

/// Queues of a DSA.
pub(crate) const SHARED: &str = r#"{"name":"wq0.0","size":32,"max_batch_size":128}"#;
pub(crate) const DEDICATED: &str = r#"{"name":"wq0.0","mode":"dedicated","size":16,"max_batch_size":128}"#;
pub(crate) const SMALL: &str = r#"{"name":"wq0.0","size":2,"max_batch_size":8}"#;

/// One DSA with these queues.
pub(crate) fn dsa(queues: &str) -> String {
    format!(r#"[{{"name":"dsa0","queues":[{queues}]}}]"#)
}

/// Starts an offload with these devices in software, and their faults.
pub(crate) fn start(devices: &str, faults: &str, seed: u64, settings: &Settings) -> Arc<Offload> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("model.json");
    let devices = format!(r#"{{"seed":{seed},"devices":{devices},"faults":{faults}}}"#);
    std::fs::write(&file, devices).unwrap();
    Offload::start(&Accelerators::model(file), settings).unwrap()
}

/// Starts an offload as [`start`] does, with long time limits, but short ones for a device that hangs.
pub(crate) fn offload_of(devices: &str, faults: &str, seed: u64, mut settings: Settings) -> Arc<Offload> {
    settings.patience = Duration::from_millis(if has_silence(faults) { 500 } else { 60_000 });
    // The model is a hundred times slower than a device, and slower still on a busy machine.
    let waits = has_silence(faults) || faults.contains("slow");
    settings.lateness = Duration::from_secs(if waits { 1 } else { 10 });
    start(devices, faults, seed, &settings)
}

/// Whether a device with these faults never answers: only then does [`offload_of`] wait for answers a short time. On a busy machine the
/// model of a device without faults is silent for so long, too.
pub(crate) fn has_silence(faults: &str) -> bool {
    ["hang", "halt", "drop_completion"].iter().any(|fault| faults.contains(fault))
}

/// Moves a guest that writes, and returns the accelerators' report.
pub(crate) fn migrate_with(
    what: &str,
    offload: &Arc<Offload>,
    workload: Workload,
    settings: impl FnOnce(Source) -> Source,
) -> OffloadReport {
    migrate_seen(what, offload, workload, &(), settings)
}

pub(crate) fn migrate_seen(
    what: &str,
    offload: &Arc<Offload>,
    workload: Workload,
    observer: &dyn Observer,
    settings: impl FnOnce(Source) -> Source,
) -> OffloadReport {
    report_of(what, offload, workload, observer, settings);
    offload.report()
}

/// Moves a guest that writes, and returns the source's report.
pub(crate) fn report_of(
    what: &str,
    offload: &Arc<Offload>,
    workload: Workload,
    observer: &dyn Observer,
    settings: impl FnOnce(Source) -> Source,
) -> Report {
    let (source, destination) = (Memory::new(1500, 700), Memory::new(1500, 700));
    let running = Running::default();
    let (mut from, log, mut to) = monitors([&source, &destination], &running, workload);
    // Zero pages that were touched, in addition to untouched ones.
    for block in 0..2 {
        source.words(block).iter().step_by(512).for_each(|word| word.store(0, Ordering::Relaxed));
        // And pages with content that is not written any more.
        let words = source.words(block).iter().skip(100).step_by(3 * 512);
        words.for_each(|word| word.store(77, Ordering::Relaxed));
    }
    from.start();
    let cancel = Cancel::new();
    let listening = Destination::new(destination.ram()).listen("127.0.0.1:0", &Security::Insecure).unwrap();
    let address = listening.address().clone();
    // On a busy machine the model is so slow that the pages written in the meantime would not fit a shorter downtime.
    let source = Source::new(source.ram(), Box::new(log)).downtime(Duration::from_secs(10));
    let mut migration = settings(source.method(MethodChoice::default()).offload(Arc::clone(offload)));
    let (sent, received) = std::thread::scope(|scope| {
        let (to, cancel) = (&mut to, &cancel);
        let receiving = scope.spawn(move || listening.run(to, cancel, &()));
        let sent = migration.run(address, &Security::Insecure, &mut from, cancel, observer);
        (sent, receiving.join().unwrap())
    });
    let (sent, received) = (sent.unwrap_or_else(|error| panic!("{what}: {error}")), received);
    received.unwrap_or_else(|error| panic!("{what}: {error}"));
    // Before the destination's monitor starts the guest, it compares memory with that of the paused source.
    assert_eq!(
        (to.called.as_slice(), running.now(), running.ever_twice()),
        (&["load", "start"][..], 1, false),
        "{what}"
    );
    assert!(!sent.accelerators.is_empty(), "{what}");
    sent
}

pub(crate) fn done_by(report: &OffloadReport, kind: Kind, operation: Operation) -> u64 {
    let of = report.operations.iter().filter(|one| one.operation == operation).flat_map(|one| &one.engines);
    of.filter(|engine| engine.engine == kind).map(|engine| engine.items).sum()
}

//! The two calls of the library: at the source and at the destination. `src/migration.rs` has their arguments.

use crate::note;
use crate::options::Options;
use crate::signals::Requests;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use sterna::{
    Destination, DevicePhase, DeviceProgress, MigrationError, Observer, Offload, Progress, ReceiveReport, Report,
    Security, Source, format_bytes, format_rate,
};
use sterna_microvm::Machine;
use sterna_microvm::migration::{Movable, devices_to_load, devices_to_save, guest_ram, opening_message};

/// Why there was no migration at all.
pub(crate) type NotBegun = Box<dyn std::error::Error>;

/// Moves the running guest to `to`. Afterwards it is paused here, or runs on if the migration failed.
pub(crate) fn send(
    machine: &Arc<Machine>,
    to: &str,
    options: &Options,
    security: &Security,
    offload: Arc<Offload>,
    requests: &Requests,
) -> Result<Result<Report, MigrationError>, NotBegun> {
    let log = machine.take_dirty_log().ok_or("the dirty log has been taken")?;
    let settings = &options.source;
    let mut source = Source::new(guest_ram(machine)?, log)
        .method(settings.method()?)
        .qatzip(settings.qatzip())
        .max_cpus(settings.max_cpus)
        .channels(settings.channels)
        .offload(offload)
        .iaa_verify(settings.iaa_verify)
        .bandwidth(settings.bandwidth)
        .delta_cache(settings.delta_cache << 20)
        .downtime(settings.downtime())
        .give_up_after(settings.give_up_after())
        .when_not_converging(settings.not_converging())
        .device_channels(settings.device_channels())
        .opening_message(opening_message(machine));
    for (id, device) in devices_to_save(machine) {
        source = source.device(id, device);
    }
    if let Some(dir) = &options.state_dir {
        source = source.state_dir(dir);
    }
    Ok(source.run(to, security, &mut Movable::new(machine), requests.cancel(), &ProgressPrinter::default()))
}

/// Receives a guest. Afterwards it runs here, unless the migration failed.
pub(crate) fn receive(
    machine: &Arc<Machine>,
    at: &str,
    options: &Options,
    security: &Security,
    requests: &Requests,
) -> Result<Result<ReceiveReport, MigrationError>, NotBegun> {
    let mut destination = Destination::new(guest_ram(machine)?).device_queue(options.destination.device_queue << 20);
    for (id, device) in devices_to_load(machine) {
        destination = destination.device(id, device);
    }
    if let Some(dir) = &options.state_dir {
        destination = destination.state_dir(dir);
    }
    let listening = destination.listen(at, security)?;
    Ok(listening.run(&mut Movable::new(machine), requests.cancel(), &ProgressPrinter::default()))
}

/// Prints the library's notes, and a line for each round and each device that take long enough.
#[derive(Default)]
struct ProgressPrinter {
    round: AtomicU64,
    /// Devices that the destination has loaded.
    loaded: AtomicUsize,
    /// The text about the awaited devices.
    waiting_for: Mutex<Option<String>>,
}

impl Observer for ProgressPrinter {
    fn progress(&self, progress: &Progress) {
        let devices = &progress.devices;
        let loaded = devices.iter().filter(|device| device.phase == DevicePhase::Loaded).count();
        if self.loaded.swap(loaded, Ordering::Relaxed) != loaded {
            note(format_args!("{loaded} of {} devices loaded", devices.len()));
        }
        let waiting_for = progress.waiting_for();
        let mut printed = self.waiting_for.lock().expect("no thread panics with it locked");
        if *printed != waiting_for {
            if let Some(devices) = &waiting_for {
                note(format_args!("waiting for {devices}"));
            }
            *printed = waiting_for;
        }
        if self.round.swap(progress.round, Ordering::Relaxed) == progress.round {
            return;
        }
        note(format_args!(
            "round {}: {} left, {} dirtied, {} sent, downtime would be {:.0} ms{}",
            progress.round,
            format_bytes(progress.remaining_bytes as f64),
            format_rate(progress.dirty_rate),
            format_rate(progress.wire_rate),
            progress.predicted_downtime_ms,
            devices_text(devices)
        ));
    }

    fn note(&self, text: &str) {
        note(format_args!("{text}"));
    }
}

/// Nothing where there are none.
fn devices_text(devices: &[DeviceProgress]) -> String {
    if devices.is_empty() {
        return String::new();
    }
    let sum = |of: fn(&DeviceProgress) -> u64| format_bytes(devices.iter().map(of).sum::<u64>() as f64);
    let (arrived, left) = (sum(|device| device.arrived_bytes), sum(|device| device.remaining_bytes));
    format!("; of {} devices {arrived} arrived, {left} left", devices.len())
}

//! Monitors and devices that write guest RAM while they save their state, the guest being paused: the destination has these writes too.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::common::within_a_minute;
use crate::device::{Device, Devices};
use crate::guest::{Memory, Monitor, PAGE, Signal, Workload, both_sides, faults_can_be_watched, log_of, witnessed};
use sterna_codec::MethodChoice;
use sterna_engine::cancel::Cancel;
use sterna_engine::destination::Destination;
use sterna_engine::device_state::DeviceChannels;
use sterna_engine::report::Report;
use sterna_engine::source::{NotConverging, Source};
use sterna_engine::transport::Security;
use sterna_engine::vmm::{ResumeReason, SourceVmm, VmmError};
use sterna_memory::dirty::reported::DirtyMarker;

const BUSY: Workload = Workload { writers: 2, span: 600, seed: 11, burst: 8 };

/// A monitor that sets a signal when it has saved its state.
struct Signals(Monitor, Signal);

impl SourceVmm for Signals {
    fn name(&self) -> String {
        SourceVmm::name(&self.0)
    }

    fn pause(&mut self) -> Result<(), VmmError> {
        self.0.pause()
    }

    fn resume(&mut self, reason: ResumeReason) -> Result<(), VmmError> {
        SourceVmm::resume(&mut self.0, reason)
    }

    fn save(&mut self, state: &mut dyn Write) -> Result<(), VmmError> {
        self.0.save(state)?;
        self.1.set();
        Ok(())
    }
}

/// Moves a guest whose monitor writes RAM while it saves `state_bytes` of state. `devices` returns its devices, from the source's memory
/// and the signal that the monitor has saved. At the destination the guest compares its memory with the source's.
fn moved(
    state_bytes: usize,
    channels: DeviceChannels,
    devices: impl FnOnce(&Arc<Memory>, DirtyMarker, &Signal) -> Devices,
) -> Report {
    let (mut from, log, mut to, witness) = witnessed(BUSY);
    (from.save_writes, from.state_bytes) = (7, state_bytes);
    let saved = Signal::default();
    let devices = devices(&witness.source, log.marker(), &saved);
    let mut from = Signals(from, saved);
    let listening = devices.at_destination(Destination::new(witness.destination.ram()));
    let listening = listening.listen("127.0.0.1:0", &Security::Insecure).unwrap();
    let address = listening.address().clone();
    // So long that the guest is paused once, also on a busy machine.
    let migration = devices.at_source(Source::new(witness.source.ram(), Box::new(log))).device_channels(channels);
    let mut migration = migration.method(MethodChoice::default()).downtime(Duration::from_secs(20));
    let (sent, received) =
        both_sides(listening, &mut to, || migration.run(address, &Security::Insecure, &mut from, &Cancel::new(), &()));
    received.unwrap();
    witness.check(&from.0, &mut to);
    assert!(devices.all_whole());
    sent.unwrap()
}

#[test]
fn pages_that_saving_the_monitors_state_writes_arrive_however_large_the_state_is() {
    within_a_minute(|| {
        // The largest is more than the channel and the network hold while the destination waits for RAM.
        for state_bytes in [0, 100_000, 64 << 20] {
            moved(state_bytes, DeviceChannels::default(), |_, _, _| Devices::default());
        }
    });
}

#[test]
fn pages_that_saving_devices_writes_arrive_over_every_kind_of_channel() {
    within_a_minute(|| {
        for channels in [DeviceChannels::Mixed, DeviceChannels::Own(2), DeviceChannels::Serial] {
            moved(100_000, channels, |memory, marker, monitor_saved| {
                let device = |instance| {
                    let (memory, marker, page) = (Arc::clone(memory), marker.clone(), 700 + u64::from(instance));
                    let writes = move || {
                        memory.words(1)[page as usize * PAGE / 8 + 8].store(7, Ordering::Relaxed);
                        marker.mark(1, page..page + 1);
                    };
                    // Long after the monitor has saved, except where the monitor saves last.
                    let saves_on = (channels != DeviceChannels::Serial).then(|| monitor_saved.clone());
                    Device { saves_on, in_save: Some(Arc::new(writes)), ..Device::new("device", instance, 0, 8 << 20) }
                };
                Devices((0..3).map(device).collect())
            });
        }
    });
}

#[test]
fn in_post_copy_pages_that_saving_writes_are_missing_at_the_destination_too() {
    within_a_minute(|| {
        if !faults_can_be_watched() {
            return;
        }
        let (mut from, log, mut to, witness) = witnessed(Workload { span: 3000, burst: 0, ..BUSY });
        (from.save_writes, from.state_bytes) = (100, 20 << 20);
        let listening = Destination::new(witness.destination.ram()).listen("127.0.0.1:0", &Security::Insecure).unwrap();
        let mut migration = Source::new(witness.source.ram(), log_of(&from, log))
            .method(MethodChoice::default())
            .bandwidth(Some(40 << 20))
            .downtime(Duration::from_millis(10))
            .when_not_converging(NotConverging::PostCopyAfter(1));
        let address = listening.address().clone();
        let (sent, received) = both_sides(listening, &mut to, || {
            migration.run(address, &Security::Insecure, &mut from, &Cancel::new(), &())
        });
        received.unwrap();
        assert!(sent.unwrap().post_copy.is_some());
        witness.check(&from, &mut to);
    });
}

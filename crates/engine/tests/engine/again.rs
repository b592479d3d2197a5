//! A source whose migration has failed or was cancelled runs again, with the dirty log and the devices that it was given.

use std::time::Duration;

use crate::common::within_a_minute;
use crate::device::{Device, Devices};
use crate::guest::{Memory, Monitor, Running, Workload};
use sterna_codec::MethodChoice;
use sterna_engine::cancel::Cancel;
use sterna_engine::destination::Destination;
use sterna_engine::device_state::DeviceChannels;
use sterna_engine::migration::{ErrorKind, GuestState, MigrationError};
use sterna_engine::report::Report;
use sterna_engine::source::Source;
use sterna_engine::transport::Security;
use sterna_engine::vmm::ResumeReason;
use sterna_memory::dirty::union::UnionLog;
use sterna_memory::dirty::{DirtyLog, DirtyLogError};

const BUSY: Workload = Workload { writers: 2, span: 600, seed: 5, burst: 8 };

/// A guest at its source.
struct Guest {
    running: Running,
    monitor: Monitor,
    devices: Devices,
    source: Source,
}

impl Guest {
    /// `channels`: those of two devices. `also`: a log beside the guest's own.
    fn new(channels: DeviceChannels, also: Option<Box<dyn DirtyLog>>) -> Self {
        let (memory, running) = (Memory::new(3000, 1000), Running::default());
        let (mut monitor, log) = Monitor::new(&memory, &running, BUSY);
        monitor.start();
        let device = |instance| Device::new("device", instance, 300_000, 300_000);
        let devices = Devices((0..2).map(device).collect());
        let logs = [Some(Box::new(log) as _), also].into_iter().flatten().collect();
        // So long that the guest is paused once, also on a busy machine.
        let source = Source::new(memory.ram(), Box::new(UnionLog::new(logs)))
            .method(MethodChoice::default())
            .device_channels(channels)
            .downtime(Duration::from_secs(20));
        let source = devices.at_source(source);
        Self { running, monitor, devices, source }
    }

    /// Runs the source once, to a destination whose monitor fails in this method.
    fn run(&mut self, cancel: &Cancel, fails: Option<&'static str>) -> Result<Report, MigrationError> {
        let memory = Memory::new(3000, 1000);
        let (mut to, _) = Monitor::new(&memory, &self.running, BUSY);
        to.fails = fails;
        let destination = self.devices.at_destination(Destination::new(memory.ram()));
        let listening = destination.listen("127.0.0.1:0", &Security::Insecure).unwrap();
        let address = listening.address().clone();
        std::thread::scope(|scope| {
            let to = &mut to;
            let receiving = scope.spawn(move || listening.run(to, &Cancel::new(), &()).is_ok() && to.runs());
            let sent = self.source.run(address, &Security::Insecure, &mut self.monitor, cancel, &());
            assert_eq!(receiving.join().unwrap(), sent.is_ok());
            sent
        })
    }

    fn stays(&self, error: &MigrationError) {
        assert_eq!(error.guest, GuestState::RunsAtSource, "{error}");
        assert!(self.monitor.runs());
        assert_eq!((self.running.now(), self.running.ever_twice()), (1, false));
    }

    /// Runs the source again; this run moves the guest.
    fn moves(&mut self) {
        let report = self.run(&Cancel::new(), None).unwrap();
        assert!(!self.monitor.runs() && !self.running.ever_twice());
        assert!(self.devices.all_whole());
        let bytes: u64 = report.devices.iter().map(|device| device.bytes).sum();
        assert_eq!(bytes, self.devices.bytes(), "each device was saved from the beginning");
    }
}

#[test]
fn a_migration_that_failed_with_the_guest_paused_is_tried_again_at_once() {
    within_a_minute(|| {
        for channels in [DeviceChannels::Mixed, DeviceChannels::Own(1), DeviceChannels::Serial] {
            let mut guest = Guest::new(channels, None);
            for _ in 0..2 {
                let error = guest.run(&Cancel::new(), Some("load")).unwrap_err();
                guest.stays(&error);
            }
            guest.moves();
            assert_eq!(guest.monitor.resumed, [ResumeReason::Failed; 2]);
        }
    });
}

#[test]
fn a_cancelled_migration_is_tried_again_at_once() {
    within_a_minute(|| {
        for (during, resumed) in [("save_ahead", &[][..]), ("pause", &[ResumeReason::Cancelled])] {
            let mut guest = Guest::new(DeviceChannels::Mixed, None);
            let cancel = Cancel::new();
            let cancelling = cancel.clone();
            guest.monitor.on_call = Some(Box::new(move |what| {
                if what == during {
                    cancelling.cancel();
                }
            }));
            let error = guest.run(&cancel, None).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Cancelled, "{error}");
            guest.stays(&error);
            guest.moves();
            assert_eq!(guest.monitor.resumed, resumed, "cancelled during {during}");
        }
    });
}

/// A log that panics at its second collecting, once.
struct PanicsOnce(u32);

impl DirtyLog for PanicsOnce {
    fn start(&mut self) -> Result<(), DirtyLogError> {
        Ok(())
    }

    fn collect(&mut self, _: usize, _: &mut sterna_memory::bitmap::PageBitmap) -> Result<(), DirtyLogError> {
        self.0 += 1;
        assert_ne!(self.0, 2, "the log was made to panic");
        Ok(())
    }

    fn stop(&mut self) -> Result<(), DirtyLogError> {
        Ok(())
    }
}

#[test]
fn a_log_that_panicked_and_devices_that_were_saving_are_used_again() {
    within_a_minute(|| {
        let mut guest = Guest::new(DeviceChannels::Mixed, Some(Box::new(PanicsOnce(0))));
        let error = guest.run(&Cancel::new(), None).unwrap_err();
        assert!(error.reason.contains("it panicked in collect"), "{error}");
        guest.stays(&error);
        guest.moves();
    });
}

#[test]
fn a_guest_that_has_moved_is_not_moved_again() {
    within_a_minute(|| {
        let mut guest = Guest::new(DeviceChannels::Mixed, None);
        guest.moves();
        let called = guest.monitor.called.len();
        let again = guest.source.run("127.0.0.1:1", &Security::Insecure, &mut guest.monitor, &Cancel::new(), &());
        let error = again.unwrap_err();
        assert_eq!(error.guest, GuestState::BelongsToDestination, "{error}");
        assert_eq!(guest.monitor.called.len(), called);
    });
}

//! A queue configuration for a host that migrates a given number of guests at once, in the format of `accel-config`.
//!
//! Each device gets two shared queues in one group with all its engines: one for the pages of running guests, and one,
//! which the device prefers, for those of paused guests. The reason for each number stands beside it.

use std::fmt::Write as _;

use serde::Serialize;
use sterna_idxd::{USUAL_BATCH, USUAL_TRANSFER, usual_threshold};
use thiserror::Error;

use crate::settings::LEDGERS;

/// The purpose of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accelerator {
    /// Data Streaming Accelerator.
    Dsa,
    /// In-Memory Analytics Accelerator.
    Iaa,
}

/// A device to plan queues for, as sysfs shows it (`/sys/bus/dsa/devices/NAME`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanDevice {
    /// `dsa0`, `iax1`.
    pub name: String,
    /// Its purpose.
    pub kind: Accelerator,
    /// `max_engines`.
    pub engines: u32,
    /// `max_work_queues`.
    pub work_queues: u32,
    /// `max_work_queues_size`: entries for all queues together. None where the kernel does not show it; likewise below.
    pub entries: Option<u32>,
    /// `max_batch_size`, in descriptors; not used for IAA, which has no batches.
    pub max_batch: Option<u32>,
    /// `max_transfer_size`, in bytes.
    pub max_transfer: Option<u64>,
}

impl PlanDevice {
    /// Returns the DSA with this number, with the limits of Sapphire Rapids.
    pub fn usual_dsa(number: u32) -> Self {
        Self {
            name: format!("dsa{number}"),
            kind: Accelerator::Dsa,
            engines: 4,
            work_queues: 8,
            entries: Some(128),
            max_batch: Some(1024),
            max_transfer: Some(1 << 31),
        }
    }
}

/// Why there is no plan.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum PlanError {
    /// No device.
    #[error("there is no DSA or IAA device to plan for; `sterna accel list` says what this host has")]
    NoDevice,
    /// The device has no room for two queues.
    #[error(
        "{device} has {engines} engines, {work_queues} queues and {entries} queue entries; at least one engine, two queues and \
         16 entries are needed"
    )]
    TooSmall {
        /// The device.
        device: String,
        /// Its engines.
        engines: u32,
        /// Its queues.
        work_queues: u32,
        /// Its entries.
        entries: u32,
    },
    /// The number of queue entries is not known.
    #[error(
        "the kernel does not show how many queue entries {device} has (max_work_queues_size), so they cannot be divided; \
         --devices chooses others"
    )]
    UnknownEntries {
        /// The device.
        device: String,
    },
    /// A name that cannot occur in an `accel-config` line.
    #[error("{0:?} is not the name of a device: it is dsa or iax with a number")]
    Name(String),
}

/// Batches that one guest's channel keeps in flight so that the device never waits for the channel.
const IN_FLIGHT: u64 = 2;

/// One queue. The fields are in the order that `accel-config load-config` requires: `dev` comes first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Queue {
    dev: String,
    mode: &'static str,
    size: u32,
    group_id: u32,
    priority: u32,
    block_on_fault: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_batch_size: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_transfer_size: Option<u64>,
    #[serde(rename = "type")]
    kind: &'static str,
    driver_name: &'static str,
    name: &'static str,
    threshold: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Engine {
    dev: String,
    group_id: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Group {
    dev: String,
    grouped_workqueues: Vec<Queue>,
    grouped_engines: Vec<Engine>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Device {
    dev: String,
    groups: Vec<Group>,
}

/// A configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    devices: Vec<Device>,
    notes: Vec<String>,
}

impl Plan {
    /// Plans for `guests` guests that are migrated at once, on all of `devices`.
    ///
    /// # Errors
    /// There is no device, or one is too small or has an invalid name.
    pub fn new(guests: u32, devices: &[PlanDevice]) -> Result<Self, PlanError> {
        if devices.is_empty() {
            return Err(PlanError::NoDevice);
        }
        let planned = devices.iter().map(plan_device).collect::<Result<Vec<_>, _>>()?;
        let notes = notes(guests, devices, &planned);
        Ok(Self { devices: planned, notes })
    }

    /// Returns notes for the operator.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Returns the file for `accel-config load-config -c FILE -e`.
    pub fn json(&self) -> String {
        serde_json::to_string_pretty(&self.devices).expect("numbers and words only")
    }

    /// Returns the same configuration as commands. A device that is enabled must be disabled before.
    pub fn commands(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for device in &self.devices {
            for group in &device.groups {
                lines.extend(group.grouped_engines.iter().map(|engine| {
                    format!("accel-config config-engine {}/{} --group-id={}", device.dev, engine.dev, engine.group_id)
                }));
                lines.extend(group.grouped_workqueues.iter().map(|queue| queue.command(&device.dev)));
            }
            lines.push(format!("accel-config enable-device {}", device.dev));
            for queue in device.groups.iter().flat_map(|group| &group.grouped_workqueues) {
                lines.push(format!("accel-config enable-wq {}/{}", device.dev, queue.dev));
            }
        }
        lines
    }
}

impl Queue {
    fn command(&self, device: &str) -> String {
        let mut line = format!(
            "accel-config config-wq {device}/{} --group-id={} --mode={} --wq-size={} --threshold={} --priority={} \
             --block-on-fault={}",
            self.dev, self.group_id, self.mode, self.size, self.threshold, self.priority, self.block_on_fault,
        );
        if let Some(size) = self.max_transfer_size {
            let _ = write!(line, " --max-transfer-size={size}");
        }
        if let Some(size) = self.max_batch_size {
            let _ = write!(line, " --max-batch-size={size}");
        }
        let _ = write!(line, " --type={} --name={} --driver-name={}", self.kind, self.name, self.driver_name);
        line
    }
}

fn plan_device(device: &PlanDevice) -> Result<Device, PlanError> {
    let PlanDevice { name, engines, work_queues, entries, .. } = device;
    let prefix = match device.kind {
        Accelerator::Dsa => "dsa",
        Accelerator::Iaa => "iax",
    };
    let number = name.strip_prefix(prefix).and_then(|number| number.parse::<u32>().ok());
    // Only the kernel's own spelling of the number.
    let number = number.filter(|number| *name == format!("{prefix}{number}"));
    let number = number.ok_or_else(|| PlanError::Name(name.clone()))?;
    let entries = entries.ok_or_else(|| PlanError::UnknownEntries { device: name.clone() })?;
    if *engines < 1 || *work_queues < 2 || entries < 16 {
        let (device, engines, work_queues) = (name.clone(), *engines, *work_queues);
        return Err(PlanError::TooSmall { device, engines, work_queues, entries });
    }
    // A paused guest has little left to send, and an almost empty queue.
    let switchover = entries / 4;
    let bulk = entries - switchover;
    // The device issues three descriptors of the one queue for each of the other (config-wq(1), `--priority`).
    let queues = vec![
        queue(device, number, 0, bulk, 5, "sterna-bulk"),
        queue(device, number, 1, switchover, 15, "sterna-switchover"),
    ];
    let engines = (0..*engines).map(|engine| Engine { dev: format!("engine{number}.{engine}"), group_id: 0 }).collect();
    let group = Group { dev: format!("group{number}.0"), grouped_workqueues: queues, grouped_engines: engines };
    Ok(Device { dev: name.clone(), groups: vec![group] })
}

fn queue(device: &PlanDevice, number: u32, index: u32, size: u32, priority: u32, name: &'static str) -> Queue {
    Queue {
        dev: format!("wq{number}.{index}"),
        mode: "shared",
        size,
        group_id: 0,
        priority,
        // A page fault would block an engine, and all work queued behind it.
        block_on_fault: 0,
        max_batch_size: match device.kind {
            Accelerator::Dsa => device.max_batch.map(|most| USUAL_BATCH.min(most)),
            Accelerator::Iaa => None,
        },
        max_transfer_size: device.max_transfer.map(|most| USUAL_TRANSFER.min(most)),
        kind: "user",
        driver_name: "user",
        name,
        threshold: usual_threshold(size),
    }
}

fn notes(guests: u32, devices: &[PlanDevice], planned: &[Device]) -> Vec<String> {
    let mut notes = Vec::new();
    for (kind, words) in [(Accelerator::Dsa, "DSA"), (Accelerator::Iaa, "IAA")] {
        let count = devices.iter().filter(|device| device.kind == kind).count();
        if count == 0 {
            continue;
        }
        let places: u64 = devices
            .iter()
            .zip(planned)
            .filter(|(device, _)| device.kind == kind)
            .map(|(_, planned)| u64::from(planned.groups[0].grouped_workqueues[0].threshold))
            .sum();
        let enough = match places.checked_div(guests.into()) {
            None => String::new(),
            Some(_) if guests == 1 => ", all for one guest".into(),
            Some(each) if each >= IN_FLIGHT => format!(", {each} for each of {guests} guests"),
            Some(each) => format!(
                ", {} for each of {guests} guests: no more than {} at once can be kept busy by them. Others take turns, and who \
                 would wait too long uses the CPU",
                if each == 0 { "not one".to_owned() } else { format!("fewer than {IN_FLIGHT}") },
                places / IN_FLIGHT,
            ),
        };
        let (devices, queues) =
            if count == 1 { ("device has", "its bulk queue") } else { ("devices have", "their bulk queues") };
        notes.push(format!("{words}: {count} {devices} room for {places} batches in {queues}{enough}."));
    }
    if guests > 1 {
        let names: Vec<_> = devices.iter().map(|device| format!("{LEDGERS}/{}.ledger", device.name)).collect();
        notes.push(format!(
            "Guests of one process share them by weight; those of several need a ledger for each device ({}), else each goes by how \
             long its work takes.",
            names.join(", ")
        ));
    }
    if devices
        .iter()
        .any(|device| device.kind == Accelerator::Dsa && device.max_batch.is_some_and(|most| most < USUAL_BATCH))
    {
        notes.push(format!(
            "A device takes batches of fewer than {USUAL_BATCH} descriptors: a packet's pages become several."
        ));
    }
    let dsa = |device: &PlanDevice| device.kind == Accelerator::Dsa && device.max_batch.is_none();
    for device in devices.iter().filter(|device| dsa(device) || device.max_transfer.is_none()) {
        notes.push(format!(
            "The kernel does not show all limits of {} (max_batch_size, max_transfer_size): those keep the kernel's default.",
            device.name
        ));
    }
    notes.push("A device that is enabled has to be disabled first: accel-config disable-device NAME.".into());
    notes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dsa(name: &str) -> PlanDevice {
        PlanDevice { name: name.into(), ..PlanDevice::usual_dsa(0) }
    }

    #[test]
    fn a_device_of_the_usual_size_gets_both_queues_and_all_engines() {
        let plan = Plan::new(100, &[dsa("dsa2")]).unwrap();
        assert_eq!(
            plan.commands(),
            [
                "accel-config config-engine dsa2/engine2.0 --group-id=0",
                "accel-config config-engine dsa2/engine2.1 --group-id=0",
                "accel-config config-engine dsa2/engine2.2 --group-id=0",
                "accel-config config-engine dsa2/engine2.3 --group-id=0",
                "accel-config config-wq dsa2/wq2.0 --group-id=0 --mode=shared --wq-size=96 --threshold=88 --priority=5 \
                 --block-on-fault=0 --max-transfer-size=2097152 --max-batch-size=128 --type=user --name=sterna-bulk \
                 --driver-name=user",
                "accel-config config-wq dsa2/wq2.1 --group-id=0 --mode=shared --wq-size=32 --threshold=30 --priority=15 \
                 --block-on-fault=0 --max-transfer-size=2097152 --max-batch-size=128 --type=user --name=sterna-switchover \
                 --driver-name=user",
                "accel-config enable-device dsa2",
                "accel-config enable-wq dsa2/wq2.0",
                "accel-config enable-wq dsa2/wq2.1",
            ]
        );
    }

    #[test]
    fn in_the_file_every_block_begins_with_its_device() {
        let iaa = PlanDevice { name: "iax1".into(), kind: Accelerator::Iaa, engines: 8, ..dsa("") };
        let json = Plan::new(4, &[dsa("dsa0"), iaa]).unwrap().json();
        // accel-config-load-config(1) demands it.
        for (line, next) in json.lines().zip(json.lines().skip(1)) {
            assert!(!line.trim_end().ends_with('{') || next.trim_start().starts_with("\"dev\""), "{line}\n{next}");
        }
        let read: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(read[0]["groups"][0]["grouped_workqueues"][1]["threshold"], 30);
        assert_eq!(read[1]["groups"][0]["grouped_engines"].as_array().unwrap().len(), 8);
        assert!(read[1]["groups"][0]["grouped_workqueues"][0].get("max_batch_size").is_none(), "IAA has no batches");
    }

    #[test]
    fn limits_of_the_device_are_kept_whatever_its_size() {
        for entries in 16..=200 {
            for max_batch in [1, 32, 4096] {
                let (entries_of, max_batch_of) = (Some(entries), Some(max_batch));
                let device = PlanDevice {
                    entries: entries_of,
                    max_batch: max_batch_of,
                    max_transfer: Some(1 << 16),
                    ..dsa("dsa0")
                };
                let plan = Plan::new(1, &[device]).unwrap();
                let queues = &plan.devices[0].groups[0].grouped_workqueues;
                assert_eq!(queues.iter().map(|queue| queue.size).sum::<u32>(), entries);
                for queue in queues {
                    assert!((1..queue.size).contains(&queue.threshold), "{queue:?}");
                    assert!(
                        queue.max_batch_size.unwrap() <= max_batch && queue.max_transfer_size.unwrap() <= 1 << 16,
                        "{queue:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_plan_for_more_guests_than_places_notes_that_they_take_turns() {
        let few = Plan::new(10, &[dsa("dsa0")]).unwrap();
        assert!(few.notes()[0].contains("8 for each of 10 guests"), "{:?}", few.notes());
        let many = Plan::new(80, &[dsa("dsa0")]).unwrap();
        assert!(many.notes()[0].contains("fewer than 2 for each of 80 guests: no more than 44"), "{:?}", many.notes());
        assert!(many.notes()[0].contains("take turns"), "{:?}", many.notes());
        let none = Plan::new(100, &[dsa("dsa0")]).unwrap();
        assert!(none.notes()[0].contains("not one for each of 100 guests"), "{:?}", none.notes());
    }

    #[test]
    fn a_plan_for_several_guests_names_the_ledgers_and_one_for_a_single_guest_does_not() {
        let ledgers = |guests| {
            let plan = Plan::new(guests, &[dsa("dsa0"), dsa("dsa2")]).unwrap();
            plan.notes().iter().any(|note| {
                note.contains("/run/sterna/accel/dsa0.ledger") && note.contains("/run/sterna/accel/dsa2.ledger")
            })
        };
        assert!(ledgers(2) && !ledgers(1));
    }

    #[test]
    fn what_the_kernel_does_not_show_is_left_to_it_or_refused() {
        let device = PlanDevice { max_batch: None, max_transfer: None, ..dsa("dsa0") };
        let plan = Plan::new(1, &[device]).unwrap();
        for text in plan.commands().into_iter().chain([plan.json()]) {
            assert!(!text.contains("max-transfer") && !text.contains("max-batch"), "{text}");
            assert!(!text.contains("max_transfer") && !text.contains("max_batch"), "{text}");
        }
        assert!(
            plan.notes().iter().any(|note| note.contains("does not show all limits of dsa0")),
            "{:?}",
            plan.notes()
        );
        let error = Plan::new(1, &[PlanDevice { entries: None, ..dsa("dsa0") }]).unwrap_err().to_string();
        assert!(error.contains("does not show") && !error.contains(" 0 "), "{error}");
    }

    #[test]
    fn any_number_of_guests_and_the_largest_devices_are_planned_for() {
        let largest = PlanDevice { entries: Some(u32::MAX), ..dsa("dsa0") };
        for guests in [0, 1, 1000, u32::MAX] {
            let note = Plan::new(guests, &[largest.clone(), largest.clone()]).unwrap().notes()[0].clone();
            assert!(note.starts_with("DSA: 2 devices have room for 5905580032 batches in their bulk queues"), "{note}");
            let note = Plan::new(guests, &[dsa("dsa0")]).unwrap().notes()[0].clone();
            assert!(note.starts_with("DSA: 1 device has room for 88 batches in its bulk queue"), "{note}");
            assert_eq!(note.contains("take turns"), guests >= 1000, "{note}");
        }
    }

    #[test]
    fn what_cannot_be_planned_for_is_refused() {
        assert_eq!(Plan::new(1, &[]), Err(PlanError::NoDevice));
        for name in ["dsa0; reboot", "dsa+1", "dsa01", "iax1", "dsa", "dsa99999999999"] {
            assert!(matches!(Plan::new(1, &[dsa(name)]), Err(PlanError::Name(_))), "{name}");
        }
        assert!(matches!(
            Plan::new(1, &[PlanDevice { entries: Some(15), ..dsa("dsa0") }]),
            Err(PlanError::TooSmall { .. })
        ));
    }
}

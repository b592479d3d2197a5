//! Opens devices: selectors are matched with the available queues before anything is opened, and each queue that is not used has a
//! reason.

use std::fmt::Write as _;
use std::sync::Arc;

use sterna_idxd::{QueueInfo, Reason, WorkQueue, discover};

use super::{NOT_ASKED_FOR, Opened, StartError};
use crate::accelerators::{Accelerators, DeviceSelector};
use crate::common::Common;
use crate::engine::OffloadEngine;
use crate::engine::device::Device;
use crate::engine::dsa::{self, Dsa};
use crate::engine::iaa::{self, Iaa};
use crate::engine::parts::Accelerator;
use crate::kind::Kind;
use crate::settings::Settings;

/// Opens the queues that `choice` selects.
pub(crate) fn open(choice: &Accelerators, settings: &Settings) -> Result<Opened, StartError> {
    let mut opened = Opened::default();
    if *choice == Accelerators::cpu() {
        opened.not_used.push(NOT_ASKED_FOR.into());
        return Ok(opened);
    }
    let mut models = Vec::new();
    let mut chosen: Vec<QueueInfo> = Vec::new();
    // The first round only reads, so that an error leaves everything unchanged.
    let found = discover(&settings.directories);
    let all: Vec<QueueInfo> = match &found {
        Ok(devices) => devices.iter().flat_map(|device| device.queues.iter().cloned()).collect(),
        Err(_) => Vec::new(),
    };
    for selector in choice.selectors() {
        let missing = |why: String| StartError::Missing { selector: selector.to_string(), why };
        match selector {
            DeviceSelector::Model(file) => models.push((selector, read_model(file).map_err(missing)?)),
            DeviceSelector::Auto => chosen.extend(all.iter().filter(|queue| queue.unusable.is_none()).cloned()),
            DeviceSelector::Kind(kind) => {
                let of_kind: Vec<_> = all.iter().filter(|queue| kind_of(queue) == *kind).collect();
                let usable: Vec<_> =
                    of_kind.iter().filter(|queue| queue.unusable.is_none()).map(|queue| (*queue).clone()).collect();
                if usable.is_empty() {
                    let reasons = reasons(&of_kind);
                    return Err(missing(match &found {
                        Err(error) => error.to_string(),
                        Ok(_) if reasons.is_empty() => format!("this host has no {} work queue", kind.name()),
                        Ok(_) => reasons.join("; "),
                    }));
                }
                opened.not_used.extend(reasons(&of_kind));
                chosen.extend(usable);
            }
            DeviceSelector::Queue(kind, path) => {
                let named = |queue: &&QueueInfo| kind_of(queue) == *kind && queue.node == *path;
                let Some(queue) = all.iter().find(named) else {
                    let there: Vec<_> = all.iter().map(|queue| queue.node.display().to_string()).collect();
                    return Err(missing(match &found {
                        Err(error) => error.to_string(),
                        Ok(_) if there.is_empty() => "there is no such work queue, and no other".into(),
                        Ok(_) => format!("there is no such work queue; there are {}", there.join(", ")),
                    }));
                };
                if let Some(why) = reason(queue) {
                    return Err(missing(why));
                }
                chosen.push(queue.clone());
            }
        }
    }
    let auto = *choice == Accelerators::auto();
    if auto {
        match &found {
            Err(error) => opened.not_used.push(format!("dsa, iaa: {error}")),
            Ok(_) if all.is_empty() => opened.not_used.push("dsa, iaa: no work queue is configured".into()),
            Ok(_) => opened.not_used.extend(reasons(&all.iter().collect::<Vec<_>>())),
        }
    }
    // Queues are identified by their names and grouped by their devices: two devices with one name would be treated as
    // one.
    for (index, (selector, model)) in models.iter().enumerate() {
        let missing = |why: String| StartError::Missing { selector: selector.to_string(), why };
        for name in devices_of(model) {
            if chosen.iter().any(|queue| queue.device.name == name) {
                return Err(missing(format!("this host has a device {name}, too, and both are asked for")));
            }
            if let Some((other, _)) = models[..index].iter().find(|(_, other)| devices_of(other).contains(&name)) {
                return Err(missing(format!("{other} has a device {name}, too")));
            }
        }
    }
    let mut names = std::collections::HashSet::new();
    chosen.retain(|queue| names.insert(queue.full_name()));
    for queue in chosen {
        let name = queue.full_name();
        let node = queue.node.clone();
        let kind = kind_of(&queue);
        match WorkQueue::open_with(queue, &settings.directories, &settings.opening) {
            Ok(queue) => opened.queues.push(queue),
            Err(error) => {
                let asked = choice
                    .selectors()
                    .iter()
                    .any(|selector| matches!(selector, DeviceSelector::Queue(_, path) if *path == node));
                if asked {
                    return Err(StartError::Missing {
                        selector: format!("{}:{}", kind.name(), node.display()),
                        why: error.to_string(),
                    });
                }
                opened.not_used.push(format!("{name}: {error}"));
            }
        }
    }
    for (selector, model) in models {
        let missing = |why: String| StartError::Missing { selector: selector.to_string(), why };
        let queues = open_model(model).map_err(missing)?;
        if queues.is_empty() {
            return Err(missing("this model has no work queue".into()));
        }
        opened.queues.extend(queues);
    }
    // A kind requested by name is missing if none of its queues could be opened.
    for selector in choice.selectors() {
        if let DeviceSelector::Kind(kind) = selector
            && !opened.queues.iter().any(|queue| kind_of(queue.info()) == *kind)
        {
            return Err(StartError::Missing { selector: selector.to_string(), why: opened.not_used.join("; ") });
        }
    }
    Ok(opened)
}

impl Opened {
    /// Returns the one line that names the accelerators in use.
    pub(crate) fn summary(&self) -> String {
        let mut used = Vec::new();
        for queue in &self.queues {
            let info = queue.info();
            let mode = info.mode.map_or(String::new(), |mode| format!("{mode}, "));
            let batches = match queue.max_batch() {
                Ok(most) => format!(", batches of {most}"),
                Err(_) if kind_of(info) == Kind::Iaa => String::new(),
                Err(why) => format!(", no batches: {why}"),
            };
            used.push(format!(
                "{} {} ({mode}{}{batches})",
                kind_of(info).name(),
                info.full_name(),
                queue.description()
            ));
        }
        let mut line = if used.is_empty() { "cpu".to_owned() } else { format!("{}, cpu", used.join(", ")) };
        if !self.not_used.is_empty() {
            line += &format!("; not used: {}", self.not_used.join("; "));
        }
        line.replace('\n', " ")
    }

    /// Returns the NUMA nodes of the devices; empty where there is no device.
    pub(crate) fn nodes(&self) -> Vec<Option<u32>> {
        let mut nodes: Vec<_> = self.queues.iter().map(|queue| queue.info().device.numa_node).collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    }

    /// Puts the devices into service, in order of preference. Adds to `summary` how each is shared.
    pub(crate) fn into_engines(self, common: &Common, summary: &mut String) -> Vec<Arc<dyn OffloadEngine>> {
        if let Some(trace) = &common.settings.trace {
            self.queues.iter().for_each(|queue| trace.queue(queue.info()));
        }
        let mut by_device: Vec<Vec<Arc<WorkQueue>>> = Vec::new();
        for queue in self.queues {
            let same = |device: &&mut Vec<Arc<WorkQueue>>| device[0].info().device.name == queue.info().device.name;
            match by_device.iter_mut().find(same) {
                Some(device) => device.push(queue),
                None => by_device.push(vec![queue]),
            }
        }
        let device = |(number, queues): (usize, Vec<Arc<WorkQueue>>)| {
            let code = match kind_of(queues[0].info()) {
                Kind::Iaa => iaa::code,
                _ => dsa::code,
            };
            Device::new(number as u64, queues, code, common)
        };
        let devices: Vec<_> = by_device.into_iter().enumerate().map(device).collect();
        for (device, shared) in devices.iter().map(|device| (&device.name, &device.shared)) {
            let _ = write!(summary, "; {device} is shared {}", shared.replace('\n', " "));
        }
        let of = |kind| -> Vec<_> { devices.iter().filter(|device| device.kind == kind).cloned().collect() };
        let mut engines: Vec<Arc<dyn OffloadEngine>> = Vec::new();
        let (dsa, iaa) = (of(Kind::Dsa), of(Kind::Iaa));
        if !dsa.is_empty() {
            engines.push(Arc::new(Accelerator::new(Dsa, dsa)));
        }
        if !iaa.is_empty() {
            engines.push(Arc::new(Accelerator::new(Iaa::new(), iaa)));
        }
        engines
    }
}

fn kind_of(queue: &QueueInfo) -> Kind {
    match queue.kind() {
        sterna_idxd::Kind::Dsa => Kind::Dsa,
        sterna_idxd::Kind::Iaa => Kind::Iaa,
    }
}

fn reason(queue: &QueueInfo) -> Option<String> {
    queue.unusable.as_ref().map(|why| format!("{}: {why}", queue.full_name()))
}

/// Returns why some of these queues are not used. A device has more queues than an operator configures: queues that are
/// not configured are a reason only if the device has no configured queue.
fn reasons(queues: &[&QueueInfo]) -> Vec<String> {
    let configured =
        |queue: &QueueInfo| !queue.unusable.as_ref().is_some_and(|why| why.reason == Reason::NotConfigured);
    let mut reasons: Vec<_> =
        queues.iter().filter(|queue| configured(queue)).filter_map(|queue| reason(queue)).collect();
    let mut empty: Vec<_> = queues.iter().map(|queue| queue.device.name.as_str()).collect();
    empty.dedup();
    empty.retain(|name| !queues.iter().any(|queue| queue.device.name == *name && configured(queue)));
    let plan = |name| format!("{name}: no queue of it is configured (`sterna accel plan --devices {name}` says how)");
    reasons.extend(empty.into_iter().map(plan));
    reasons
}

#[cfg(feature = "model")]
use crate::model::{devices as devices_of, open as open_model, read as read_model};

/// Replaces the model in a build without it.
#[cfg(not(feature = "model"))]
#[derive(Clone, Copy)]
enum NoModel {}

#[cfg(not(feature = "model"))]
fn read_model(_: &std::path::Path) -> Result<NoModel, String> {
    Err("this build has no software model (feature `model`)".into())
}

#[cfg(not(feature = "model"))]
fn devices_of(model: &NoModel) -> Vec<&str> {
    match *model {}
}

#[cfg(not(feature = "model"))]
fn open_model(model: NoModel) -> Result<Vec<Arc<WorkQueue>>, String> {
    match model {}
}

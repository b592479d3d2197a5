//! `sterna accel list`: the accelerators of this host, what Sterna uses each queue for, and why it does not use others. The text is
//! made of the same facts as the JSON.

use std::fmt::Write as _;

use serde::Serialize;
use sterna_idxd::{DeviceInfo, Directories, Kind, Operation, QueueInfo, Reason, WorkQueue, discover, iaa};
use sterna_memory::scan::Implementation;

use super::super::report_file::{Named, ReportFile};
use super::{Failure, Out};
use crate::args::accel::ListArgs;
use crate::exit::Exit;

const LIST: Named = Named { option: "--json", what: "list" };

/// Everything that the command shows. docs/accelerators.md describes the fields.
#[derive(Debug, Serialize)]
struct Listing {
    devices: Vec<Listed>,
    /// Why no DSA or IAA can be used; none where the driver is here.
    no_driver: Option<String>,
    /// The vector instructions by which the CPU does what no accelerator does.
    cpu: &'static str,
    /// Whether QAT was looked for: QATzip finds it by itself.
    qat_looked_for: bool,
}

#[derive(Debug, Serialize)]
struct Listed {
    name: String,
    kind: &'static str,
    version: u32,
    numa_node: Option<u32>,
    engines: usize,
    queues: Vec<ListedQueue>,
    /// What is strange about the device.
    oddities: Vec<String>,
    /// No queue is configured: the command that shows how to configure one.
    set_up_by: Option<String>,
}

#[derive(Debug, Serialize)]
struct ListedQueue {
    name: String,
    /// Whether Sterna can use it; with `--closed` it was not opened.
    usable: bool,
    /// How it was opened; none if it was not.
    opened_by: Option<String>,
    /// Why it is not used.
    reason: Option<String>,
    /// What Sterna uses it for.
    used_for: Vec<&'static str>,
    /// What Sterna would use it for if it were configured for that.
    not_configured_for: Vec<&'static str>,
    notes: Vec<String>,
}

pub(super) fn run(args: &ListArgs) -> Result<Exit, Failure> {
    let file = args.json.as_deref().map(|path| ReportFile::reserve_for(LIST, path)).transpose();
    let file = file.map_err(|error| Failure::refused(&error))?;
    let listing = Listing::of_this_host(args.closed);
    if !file.as_ref().is_some_and(ReportFile::is_stdout) {
        Out::Stdout.say(&listing.text(args.closed))?;
    }
    match file.map(|file| file.write(&listing)) {
        Some(Err(error)) => Err(Failure::failed(&error)),
        _ => Ok(Exit::Completed),
    }
}

impl Listing {
    fn of_this_host(closed: bool) -> Self {
        let directories = Directories::from_environment();
        let (devices, no_driver) = match discover(&directories) {
            Ok(devices) => (devices.iter().map(|info| Listed::of(info, &directories, closed)).collect(), None),
            Err(error) => (Vec::new(), Some(error.to_string())),
        };
        Self { devices, no_driver, cpu: Implementation::chosen().name(), qat_looked_for: false }
    }

    fn text(&self, closed: bool) -> String {
        let mut text = String::new();
        match &self.no_driver {
            Some(error) => drop(writeln!(text, "No DSA or IAA can be used: {error}")),
            None if self.devices.is_empty() => text.push_str("The idxd driver is here and has no device.\n"),
            None => self.devices.iter().for_each(|device| device.describe(&mut text, closed)),
        }
        let _ = writeln!(text, "The CPU does what no accelerator does, by {}.", self.cpu);
        text.push_str(
            "QAT is not looked for: QATzip uses it where its library finds it (--method deflate --engine qat).\n",
        );
        text
    }
}

impl Listed {
    fn of(info: &DeviceInfo, directories: &Directories, closed: bool) -> Self {
        let device = &info.device;
        let empty = |queue: &QueueInfo| queue.unusable.as_ref().is_some_and(|why| why.reason == Reason::NotConfigured);
        let set_up_by = format!("sterna accel plan --devices {}", device.name);
        Self {
            name: device.name.clone(),
            kind: if device.kind == Kind::Dsa { "dsa" } else { "iaa" },
            version: device.version,
            numa_node: device.numa_node,
            engines: info.engines.len(),
            queues: info.queues.iter().map(|queue| ListedQueue::of(queue, directories, closed)).collect(),
            oddities: info.invalid_attributes.iter().map(ToString::to_string).collect(),
            set_up_by: info.queues.iter().all(empty).then_some(set_up_by),
        }
    }

    fn describe(&self, text: &mut String, closed: bool) {
        let node = self.numa_node.map_or(String::new(), |node| format!(", NUMA node {node}"));
        let _ = writeln!(
            text,
            "{}: {} version {:#x}{node}, {} engines, {} queues",
            self.name,
            self.kind.to_uppercase(),
            self.version,
            self.engines,
            self.queues.len()
        );
        for queue in &self.queues {
            let _ = writeln!(text, "  {}: {}", queue.name, queue.sentence(closed));
            for note in &queue.notes {
                let _ = writeln!(text, "    note: {note}");
            }
        }
        if let Some(command) = &self.set_up_by {
            let _ = writeln!(text, "  to set it up: `{command}` prints how");
        }
        for oddity in &self.oddities {
            let _ = writeln!(text, "  odd: {oddity}");
        }
    }
}

impl ListedQueue {
    fn of(queue: &QueueInfo, directories: &Directories, closed: bool) -> Self {
        let (opened_by, reason) = match &queue.unusable {
            Some(unusable) => (None, Some(unusable.to_string())),
            None if closed => (None, None),
            None => match WorkQueue::open(queue.clone(), directories) {
                Ok(opened) => (Some(opened.submit_method().to_string()), None),
                Err(error) => (None, Some(error.to_string())),
            },
        };
        let usable = reason.is_none();
        let (used_for, not_configured_for) = if usable { uses(queue) } else { Default::default() };
        Self {
            name: queue.name.clone(),
            usable,
            opened_by,
            reason,
            used_for,
            not_configured_for,
            notes: queue.remarks.iter().map(ToString::to_string).collect(),
        }
    }

    fn sentence(&self, closed: bool) -> String {
        if let Some(reason) = &self.reason {
            return format!("not used: {reason}");
        }
        let uses = if self.used_for.is_empty() { "nothing".to_owned() } else { self.used_for.join(", ") };
        let lacks = match self.not_configured_for.is_empty() {
            true => String::new(),
            false => format!("; not configured (op_config) for {}", self.not_configured_for.join(", ")),
        };
        match &self.opened_by {
            Some(method) => format!("opens (by {method}); used for {uses}{lacks}"),
            None if closed => format!("would be used for {uses}{lacks}"),
            None => format!("used for {uses}{lacks}"),
        }
    }
}

/// Returns what Sterna uses a queue for, and what it would use the queue for if the kernel's configuration of the queue permitted that.
fn uses(queue: &QueueInfo) -> (Vec<&'static str>, Vec<&'static str>) {
    // What migrations submit, and no operation that only the interface of `sterna-offload` has.
    const BY_DSA: &[(&str, u8)] = &[
        ("zero maps", Operation::ComparePattern as u8),
        ("copies with checksums", Operation::CopyCrc as u8),
        ("copies without checksums", Operation::Memmove as u8),
        ("deltas", Operation::CreateDelta as u8),
    ];
    const BY_IAA: &[(&str, u8)] = &[
        ("deflate with a window of 4 KiB", iaa::Operation::Compress as u8),
        ("verifying that by inflating it", iaa::Operation::Decompress as u8),
    ];
    let all = if queue.kind() == Kind::Dsa { BY_DSA } else { BY_IAA };
    let (has, lacks): (Vec<_>, Vec<_>) = all.iter().partition(|(_, code)| queue.declares(*code) != Some(false));
    let names = |uses: Vec<&(&'static str, u8)>| uses.into_iter().map(|(name, _)| *name).collect();
    (names(has), names(lacks))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use sterna_idxd::{Device, Mode, OperationSet};

    #[test]
    fn a_queue_is_listed_with_the_uses_that_it_is_configured_for() {
        let mut queue = QueueInfo::new("wq0.0", Arc::new(Device::new("dsa0", Kind::Dsa)), Mode::Shared, 16);
        let all = vec!["zero maps", "copies with checksums", "copies without checksums", "deltas"];
        assert_eq!(uses(&queue), (all.clone(), vec![]), "where the kernel says nothing");
        // No-op, batch, compare, compare pattern, create delta.
        queue.operations = OperationSet::parse("0,0,0,0,0,0,0,000000e3");
        assert_eq!(
            uses(&queue),
            (vec!["zero maps", "deltas"], vec!["copies with checksums", "copies without checksums"])
        );
        queue.operations = OperationSet::parse("0,0,0,0,0,0,0,3");
        assert_eq!(uses(&queue), (vec![], all));
    }
}

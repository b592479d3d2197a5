//! What other programs and people do to a source QEMU whose guest is being moved: block jobs, exchanged media, resized disks, migrations of
//! their own, nodes that stay in use.
//!
//! QEMU's own migration forbids some of this, and waits for the rest. In direct mode QEMU does not know that its guest is being moved, so it
//! is asked: before anything begins, before each round, and once the guest is paused, when nothing of the guest can change any more.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use serde_json::{Value, json};
use sterna_wire::text::cleaned;

use crate::qmp::{MigrationInfo, PendingCommand, Qmp, QmpError};

/// How long QEMU may take for an answer where a look that fails is made again soon: meanwhile the driver handles nothing else.
const LOOK_TIME: Duration = Duration::from_secs(1);
/// States in which a job does nothing any more (`JobStatus` in QEMU's qapi/job.json).
const ENDED_JOBS: &[&str] = &["concluded", "null", "undefined"];

/// Fails while a job of QEMU runs. A backup, mirror, stream or commit reads and writes disks also while the guest is paused, so it would write
/// them at the source while the guest runs at the destination. QEMU may even abort when the disks are made inactive under a job.
///
/// # Errors
/// The first job, and what to do.
pub(super) fn check_jobs(qmp: &Qmp) -> Result<(), String> {
    match qmp.execute("query-jobs", json!({})) {
        Ok(jobs) => check_listed_jobs(&jobs),
        // QEMU before 3.0, which direct mode does not move at all.
        Err(QmpError::Refused { .. }) => Ok(()),
        Err(error) => Err(error.to_string()),
    }
}

fn check_listed_jobs(jobs: &Value) -> Result<(), String> {
    let text = |job: &Value, key: &str| cleaned(job[key].as_str().unwrap_or("unknown"));
    let runs = |job: &&Value| !ENDED_JOBS.contains(&job["status"].as_str().unwrap_or_default());
    match jobs.as_array().into_iter().flatten().find(runs) {
        Some(job) => Err(format!(
            "QEMU's job {} ({}, {}) uses disks of the guest, and would go on writing them here: wait until it has ended, or cancel it \
             (QMP query-jobs or query-block-jobs, job-cancel)",
            text(job, "id"),
            text(job, "type"),
            text(job, "status")
        )),
        None => Ok(()),
    }
}

/// Fails if QEMU has reasons why its guest cannot be migrated, or migrates it for another program. Returns QEMU's last migration.
///
/// # Errors
/// QEMU's first reason, or the state of the other migration.
pub(super) fn check_migration(qmp: &Qmp) -> Result<MigrationInfo, String> {
    let migration = qmp.query_migrate().map_err(|error| error.to_string())?;
    if let Some(reason) = migration.blocked_reasons.first() {
        return Err(format!("QEMU reports that the guest cannot be migrated: {}", cleaned(reason)));
    }
    if migration.is_active() {
        return Err(format!(
            "another program migrates this guest (QEMU's own migration is {}): end one of the two (QMP migrate_cancel)",
            cleaned(&migration.status)
        ));
    }
    Ok(migration)
}

/// Returns what other programs have begun that QEMU's own migration neither refuses nor waits for: a job, or another medium or size of a drive.
/// A QEMU that does not answer shows nothing: it may be completing its migration on slow storage.
pub(super) fn seen_beside_migration(qmp: &Qmp, media: &Media) -> Option<String> {
    let look = |command| qmp.execute_within(command, json!({}), LOOK_TIME).ok();
    let (jobs, drives) = (look("query-jobs")?, look("query-block")?);
    check_listed_jobs(&jobs).and_then(|()| media.compare(&Media::listed(&drives))).err()
}

/// What a drive of the guest has in it. Not the name of the node: a job puts a filter above it, and the job is what is to be reported.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Medium {
    file: String,
    /// Size that the guest sees, in bytes.
    bytes: Option<u64>,
    read_only: bool,
}

/// The media of the guest's drives, by the names of the drives, when the migration began. The destination's QEMU was started with the same.
/// Whether a tray is open is part of a device's state, which moves with the guest.
#[derive(Debug)]
pub(super) struct Media(BTreeMap<String, Option<Medium>>);

impl Media {
    /// Returns the media of this QEMU's drives.
    ///
    /// # Errors
    /// QEMU does not answer.
    pub(super) fn of(qmp: &Qmp) -> Result<Self, String> {
        let drives = qmp.execute("query-block", json!({})).map_err(|error| error.to_string())?;
        Ok(Self::listed(&drives))
    }

    fn listed(drives: &Value) -> Self {
        let text = |value: &Value| value.as_str().map(cleaned);
        let drive = |drive: &Value| {
            // A drive of `-blockdev` has only the path of its device.
            let name = [&drive["qdev"], &drive["device"]].into_iter().filter_map(text).find(|name| !name.is_empty());
            let inserted = &drive["inserted"];
            let medium = inserted.is_object().then(|| Medium {
                file: text(&inserted["file"]).unwrap_or_default(),
                bytes: inserted["image"]["virtual-size"].as_u64(),
                read_only: inserted["ro"].as_bool().unwrap_or(false),
            });
            (name.unwrap_or_default(), medium)
        };
        Self(drives.as_array().into_iter().flatten().map(drive).collect())
    }

    /// Checks that the drives have the same media.
    ///
    /// # Errors
    /// The first drive that has not, and what has changed.
    pub(super) fn check(&self, qmp: &Qmp) -> Result<(), String> {
        self.compare(&Self::of(qmp)?)
    }

    /// Asks QEMU what [`Media::check_answer`] checks.
    pub(super) fn ask(qmp: &Qmp) -> Result<PendingCommand, QmpError> {
        qmp.begin("query-block", json!({}))
    }

    /// As [`Media::check`], with QEMU's answer.
    pub(super) fn check_answer(&self, drives: &Value) -> Result<(), String> {
        self.compare(&Self::listed(drives))
    }

    fn compare(&self, now: &Self) -> Result<(), String> {
        // A drive that came or went is a device that did, which is found by the list of devices.
        for (name, before) in &self.0 {
            let Some(after) = now.0.get(name) else { continue };
            if before == after {
                continue;
            }
            let [before, after] =
                [before, after].map(|medium| medium.as_ref().map_or("no medium".into(), Medium::to_string));
            return Err(format!(
                "drive {name} had {before} when the migration began, and now has {after}: the destination would show the guest the former \
                 one; start the destination's QEMU with what the drive has now, and send again"
            ));
        }
        Ok(())
    }
}

impl fmt::Display for Medium {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, bytes, read_only } = self;
        f.write_str(file)?;
        if let Some(bytes) = bytes {
            write!(f, " of {bytes} bytes")?;
        }
        if *read_only { f.write_str(", read-only") } else { Ok(()) }
    }
}

/// Checks that the disks of the guest can be written no more, once its devices were saved. Since 10.0, `xen-save-devices-state` succeeds even
/// if the disks could not be made inactive, for example because their storage failed while caches were written: the destination would then
/// read an older state of them, and both QEMUs would write.
///
/// Only nodes count that a drive of the guest uses, itself or as the layers below another node: QEMU leaves all others active. QEMU before
/// 10.0 lists no node as active or not; there the command itself fails.
///
/// # Errors
/// The nodes that are still active.
pub(super) fn check_inactive(qmp: &Qmp, nodes: &Value, drives: &Value) -> Result<(), String> {
    if active(nodes).next().is_none() {
        return Ok(());
    }
    let graph = qmp.execute("x-debug-query-block-graph", json!({})).map_err(|error| error.to_string())?;
    check_listed_nodes(nodes, &in_use(drives, &graph))
}

/// Asks QEMU for the nodes that [`check_inactive`] checks.
pub(super) fn ask_nodes(qmp: &Qmp) -> Result<PendingCommand, QmpError> {
    qmp.begin("query-named-block-nodes", json!({ "flat": true }))
}

/// Checks, right before the decision, that no migration of another program has begun since the guest was paused, and that none has made the
/// disks active again: one that fails or is cancelled does (`migration_block_activate` in QEMU's migration/block-active.c), and the destination
/// could not lock them then.
///
/// # Errors
/// What was found.
pub(super) fn check_still_inactive(qmp: &Qmp) -> Result<(), String> {
    // QEMU's last migration: none, or the one by which the guest came. The list of nodes takes 1 ms of a machine with 20 disks.
    if ["none", "completed"].contains(&check_migration(qmp)?.status.as_str()) {
        return Ok(());
    }
    let answers = ask_nodes(qmp).and_then(|nodes| qmp.answers(&mut [nodes, Media::ask(qmp)?]));
    let [nodes, drives] = answers.map_err(|error| error.to_string())?;
    check_inactive(qmp, &nodes, &drives)
}

/// Returns the nodes that are active and can be written.
fn active(nodes: &Value) -> impl Iterator<Item = &Value> {
    nodes.as_array().into_iter().flatten().filter(|node| node["active"] == true && node["ro"] != true)
}

/// Returns the names of the nodes that the guest's drives use: `graph` has a number for each node, and an edge from each to those below it
/// (`XDbgBlockGraph` in QEMU's qapi/block-core.json).
fn in_use<'a>(drives: &'a Value, graph: &'a Value) -> BTreeSet<&'a str> {
    let list = |value: &'a Value| value.as_array().into_iter().flatten();
    let names: BTreeMap<u64, &str> = list(&graph["nodes"])
        .filter(|node| node["type"] == "block-driver")
        .filter_map(|node| Some((node["id"].as_u64()?, node["name"].as_str()?)))
        .collect();
    let mut used: BTreeSet<&str> = list(drives).filter_map(|drive| drive["inserted"]["node-name"].as_str()).collect();
    loop {
        let before = used.len();
        for edge in list(&graph["edges"]) {
            let name = |end: &str| edge[end].as_u64().and_then(|number| names.get(&number)).copied();
            if let (Some(parent), Some(child)) = (name("parent"), name("child"))
                && used.contains(parent)
            {
                used.insert(child);
            }
        }
        if used.len() == before {
            return used;
        }
    }
}

/// Maximum number of nodes that an error names.
const MAX_NAMED: usize = 8;

fn check_listed_nodes(nodes: &Value, used: &BTreeSet<&str>) -> Result<(), String> {
    let text = |node: &Value, key: &str| cleaned(node[key].as_str().unwrap_or_default());
    let named: Vec<String> = active(nodes)
        .filter(|node| node["node-name"].as_str().is_some_and(|name| used.contains(name)))
        .take(MAX_NAMED)
        .map(|node| format!("{} ({}, {})", text(node, "node-name"), text(node, "drv"), text(node, "file")))
        .collect();
    if named.is_empty() {
        return Ok(());
    }
    Err(format!(
        "disks of the guest could not be made inactive: their storage failed while QEMU wrote its caches, or something else in QEMU still \
         writes to them; see to the storage, or to block exports, and send again. Block nodes: {}",
        named.join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_has_not_ended_is_named_with_its_type_and_state() {
        let jobs = |status: &str| json!([{ "id": "old", "type": "commit", "status": "concluded" }, { "id": "j0", "type": "backup", "status": status }]);
        for status in ["created", "running", "paused", "ready", "standby", "waiting", "pending", "aborting"] {
            let reason = check_listed_jobs(&jobs(status)).unwrap_err();
            assert!(reason.contains(&format!("job j0 (backup, {status})")), "{reason}");
        }
        for status in ENDED_JOBS {
            assert_eq!(check_listed_jobs(&jobs(status)), Ok(()));
        }
        assert_eq!(check_listed_jobs(&json!([])), Ok(()));
    }

    #[test]
    fn a_medium_that_was_exchanged_removed_resized_or_made_read_only_is_named_with_both_states() {
        let media = |inserted: Value| {
            Media::listed(&json!([
                { "device": "", "qdev": "/machine/peripheral/disk/virtio-backend", "inserted": { "file": "a", "ro": false, "node-name": "d" } },
                { "device": "cd0", "qdev": "cd", "tray_open": true, "inserted": inserted },
            ]))
        };
        let inserted = |file: &str, bytes: u64, ro: bool| json!({ "file": file, "node-name": "n", "ro": ro, "image": { "virtual-size": bytes } });
        let before = media(inserted("one.iso", 4096, true));
        assert_eq!(before.compare(&media(inserted("one.iso", 4096, true))), Ok(()));
        for (after, words) in [
            (inserted("two.iso", 4096, true), "two.iso of 4096 bytes, read-only"),
            (inserted("one.iso", 8192, true), "one.iso of 8192 bytes, read-only"),
            (inserted("one.iso", 4096, false), "one.iso of 4096 bytes:"),
            (Value::Null, "no medium"),
        ] {
            let reason = before.compare(&media(after)).unwrap_err();
            assert!(reason.starts_with("drive cd had one.iso of 4096 bytes, read-only when"), "{reason}");
            assert!(reason.contains(&format!("now has {words}")), "{reason}");
        }
        // Its device went too, which is another check.
        assert_eq!(before.compare(&Media::listed(&json!([]))), Ok(()));
    }

    #[test]
    fn an_active_node_of_a_drive_is_named_unless_it_is_read_only_or_qemu_does_not_list_it_as_active() {
        let drives = json!([{ "device": "cd" }, { "device": "", "inserted": { "node-name": "n1" } }]);
        let node = |id: u64, name: &str| json!({ "id": id, "type": "block-driver", "name": name });
        let graph = json!({
            "nodes": [node(1, "n0"), node(2, "n1"), node(3, "spare"), { "id": 4, "type": "block-backend", "name": "" }],
            "edges": [{ "parent": 2, "child": 1 }, { "parent": 4, "child": 2 }],
        });
        let used = in_use(&drives, &graph);
        assert_eq!(used, BTreeSet::from(["n0", "n1"]));
        let nodes = |lower: Value, upper: Value, ro: bool| {
            json!([
                { "node-name": "n0", "drv": "file", "file": "a", "ro": ro, "active": lower },
                { "node-name": "n1", "drv": "qcow2", "file": "b", "ro": ro, "active": upper },
                { "node-name": "spare", "drv": "qcow2", "file": "c", "ro": false, "active": true },
            ])
        };
        for (lower, upper, named) in [(false, true, "n1 (qcow2, b)"), (true, false, "n0 (file, a)")] {
            let reason = check_listed_nodes(&nodes(lower.into(), upper.into(), false), &used).unwrap_err();
            assert!(reason.ends_with(&format!("Block nodes: {named}")), "{reason}");
        }
        for nodes in [
            nodes(true.into(), true.into(), true),
            nodes(false.into(), false.into(), false),
            nodes(Value::Null, Value::Null, false),
        ] {
            assert_eq!(check_listed_nodes(&nodes, &used), Ok(()));
        }
    }
}

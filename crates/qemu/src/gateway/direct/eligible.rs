//! Checks, before anything of a source QEMU is changed, whether direct mode can move its guest. An unknown condition
//! makes the guest ineligible.

use std::fs;

use serde_json::{Value, json};

use crate::gateway::neighbours;
use crate::gateway::qemu::DIRECT_RELEASES;
use crate::qmp::Qmp;

/// Devices that write guest RAM past QEMU's page tables, by the files that QEMU has open for them: prefix of the path,
/// and the reason.
const WRITERS: &[(&str, &str)] = &[
    ("/dev/vfio", "an assigned device (VFIO) writes guest RAM by DMA"),
    ("/dev/iommu", "an assigned device (iommufd) writes guest RAM by DMA"),
    ("/dev/vhost-vdpa", "a vDPA device writes guest RAM by DMA"),
    ("/dev/vhost-scsi", "vhost-scsi writes guest RAM that it has pinned"),
    ("/dev/infiniband", "RDMA writes guest RAM that it has pinned"),
    ("/dev/sev", "guest RAM is encrypted"),
];

/// Devices that save their state while the guest runs, or that write guest RAM past QEMU's page tables: prefix of their
/// type, and the reason.
const DEVICES: &[(&str, &str)] = &[
    ("vfio-", "saves its state while the guest runs, or writes guest RAM by DMA"),
    ("vhost-vdpa", "writes guest RAM by DMA"),
    ("vhost-scsi", "writes guest RAM that it has pinned"),
    ("ivshmem", "has memory that other guests write"),
    ("cxl-type3", "has memory of its own that the guest shares"),
];

/// Block drivers whose devices write guest RAM by DMA: QEMU's block/nvme.c (over util/vfio-helpers.c) and
/// block/blkio.c.
const DMA_DRIVERS: &[&str] =
    &["nvme", "io_uring", "nvme-io_uring", "virtio-blk-vfio-pci", "virtio-blk-vhost-user", "virtio-blk-vhost-vdpa"];

/// Checks that direct mode can move the guest of this QEMU.
///
/// # Errors
/// Why it cannot, and what would make it possible.
pub(super) fn check(qmp: &Qmp) -> Result<(), String> {
    CHECKS.iter().try_for_each(|check| check(qmp))
}

/// Returns every reason why direct mode cannot move the guest of this QEMU.
pub(super) fn obstacles(qmp: &Qmp) -> Vec<String> {
    CHECKS.iter().filter_map(|check| check(qmp).err()).collect()
}

/// A check that a QEMU must pass; its error is the reason why direct mode cannot move the guest.
type Check = fn(&Qmp) -> Result<(), String>;

/// What [`check`] consists of. Each is independent of the others.
const CHECKS: &[Check] = &[
    check_release,
    check_commands,
    check_migration,
    check_encryption,
    |qmp| check_devices(&qmp.human("info qtree").map_err(|error| error.to_string())?),
    |qmp| check_disks(&query(qmp, "query-named-block-nodes")?),
    check_files,
];

fn check_release(qmp: &Qmp) -> Result<(), String> {
    if !cfg!(target_arch = "x86_64") {
        return Err("it works on x86-64 hosts so far".into());
    }
    let version = qmp.version();
    let (first, last) = DIRECT_RELEASES;
    if !version.at_least(first.0, first.1) {
        return Err(format!("QEMU {version} does not tell where its RAM lies ({}.{} and newer do)", first.0, first.1));
    }
    if version.at_least(last.0, last.1 + 1) {
        return Err(format!(
            "QEMU {version} is newer than the last that this is known to work with ({}.{})",
            last.0, last.1
        ));
    }
    Ok(())
}

fn check_commands(qmp: &Qmp) -> Result<(), String> {
    let commands = query(qmp, "query-commands")?;
    let has = |name: &str| commands.as_array().is_some_and(|all| all.iter().any(|one| one["name"] == name));
    for needed in ["xen-save-devices-state", "transaction", "add-fd", "remove-fd"] {
        if !has(needed) {
            return Err(format!("this QEMU has no command {needed}"));
        }
    }
    Ok(())
}

fn check_migration(qmp: &Qmp) -> Result<(), String> {
    neighbours::check_migration(qmp)?;
    let parameters = query(qmp, "query-migrate-parameters")?;
    // Since 8.2, QEMU reports blockers for the migration mode that is set.
    if let Some(mode) = parameters["mode"].as_str().filter(|mode| *mode != "normal") {
        return Err(format!("QEMU's migration mode is {mode}: set it to normal"));
    }
    Ok(())
}

fn check_encryption(qmp: &Qmp) -> Result<(), String> {
    let cgs = qmp.execute("qom-get", json!({ "path": "/machine", "property": "confidential-guest-support" }));
    if cgs.is_ok_and(|object| object.as_str().is_some_and(|path| !path.is_empty())) {
        return Err("guest RAM is encrypted (confidential-guest-support)".into());
    }
    Ok(())
}

/// Checks that nothing pins guest RAM or writes it past QEMU's page tables. A destination that waits for missing pages
/// needs this, too.
///
/// # Errors
/// Which device, disk or file does.
pub(super) fn check_nothing_pins(qmp: &Qmp) -> Result<(), String> {
    check_devices(&qmp.human("info qtree").map_err(|error| error.to_string())?)?;
    check_disks(&query(qmp, "query-named-block-nodes")?)?;
    check_files(qmp)
}

/// Fails for block drivers that map all of guest RAM for a device: draining the block layer does not cover the device's
/// writes.
fn check_disks(nodes: &Value) -> Result<(), String> {
    for node in nodes.as_array().into_iter().flatten() {
        let driver = node["drv"].as_str().unwrap_or_default();
        if DMA_DRIVERS.contains(&driver) {
            let name = node["node-name"].as_str().unwrap_or_default();
            return Err(format!("disk {name} is driven by {driver}, whose device writes guest RAM by DMA"));
        }
    }
    Ok(())
}

fn query(qmp: &Qmp, command: &str) -> Result<Value, String> {
    qmp.execute(command, json!({})).map_err(|error| error.to_string())
}

/// Checks the types of the devices in the output of `info qtree`: `dev: TYPE, id "…"`.
fn check_devices(tree: &str) -> Result<(), String> {
    for line in tree.lines() {
        let Some(device) = line.trim_start().strip_prefix("dev: ") else { continue };
        let kind = device.split(',').next().unwrap_or(device);
        if let Some((_, what)) = DEVICES.iter().find(|(beginning, _)| kind.starts_with(beginning)) {
            let name = device.replace(", id \"\"", "");
            return Err(format!("device {name} {what}"));
        }
    }
    Ok(())
}

/// Checks the files that QEMU has open, which reveal devices that its monitor does not list.
fn check_files(qmp: &Qmp) -> Result<(), String> {
    let pid = qmp.peer_pid().ok_or("the QEMU process cannot be seen from here (another pid namespace)")?;
    let files = fs::read_dir(format!("/proc/{pid}/fd")).map_err(|error| {
        format!("the files of process {pid} cannot be seen ({error}): run as root, or with CAP_SYS_PTRACE")
    })?;
    for file in files.filter_map(Result::ok) {
        // The file may have been closed meanwhile.
        let Ok(path) = fs::read_link(file.path()) else { continue };
        let path = path.to_string_lossy();
        if let Some((_, what)) = WRITERS.iter().find(|(beginning, _)| path.starts_with(beginning)) {
            return Err(format!("{what} (QEMU has {path} open)"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_whose_devices_write_by_dma_are_named() {
        let nodes = |driver: &str| json!([{ "drv": "raw", "node-name": "d0" }, { "drv": driver, "node-name": "d1" }]);
        assert_eq!(
            check_disks(&nodes("nvme")).unwrap_err(),
            "disk d1 is driven by nvme, whose device writes guest RAM by DMA"
        );
        assert_eq!(check_disks(&nodes("file")), Ok(()));
    }

    #[test]
    fn devices_that_cannot_be_moved_directly_are_named() {
        let tree = "bus: main-system-bus\n  type System\n  dev: q35-pcihost, id \"\"\n    bus: pcie.0\n      \
                    dev: virtio-blk-pci, id \"disk\"\n      dev: vfio-pci, id \"vfio0\"\n";
        let reason = check_devices(tree).unwrap_err();
        assert_eq!(
            reason,
            "device vfio-pci, id \"vfio0\" saves its state while the guest runs, or writes guest RAM by DMA"
        );
        assert_eq!(check_devices(&tree.replace("vfio-pci", "virtio-net-pci")), Ok(()));
    }
}

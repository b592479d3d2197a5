//! The device files that are portals of this process's models.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, Weak};

use super::{ModelQueue, Shared};

/// A device file that is a portal.
#[derive(Debug)]
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "nothing can be trapped there"))]
struct Portal {
    device_number: u64,
    inode: u64,
    shared: Weak<Shared>,
    device: usize,
    queue: usize,
}

static PORTALS: Mutex<Vec<Portal>> = Mutex::new(Vec::new());

/// Makes the device file with this metadata the portal of `queue`.
pub(crate) fn add(file: &Metadata, queue: &ModelQueue) {
    let (shared, device, index) = queue.parts();
    PORTALS.lock().unwrap().push(Portal {
        device_number: file.dev(),
        inode: file.ino(),
        shared: Arc::downgrade(shared),
        device,
        queue: index,
    });
}

/// Returns the queue of this device file.
#[cfg(target_arch = "x86_64")]
pub(crate) fn find(device_number: u64, inode: u64) -> Option<ModelQueue> {
    let portals = PORTALS.lock().unwrap();
    // The newest: files come and go, and the numbers of removed files are reused.
    let found = portals.iter().rev().find(|portal| portal.device_number == device_number && portal.inode == inode)?;
    Some(ModelQueue::of(&found.shared.upgrade()?, found.device, found.queue))
}

/// Removes the portals of a model that is stopped.
pub(super) fn forget(shared: &Arc<Shared>) {
    let mut portals = PORTALS.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    portals.retain(|portal| !std::ptr::eq(portal.shared.as_ptr(), Arc::as_ptr(shared)));
}

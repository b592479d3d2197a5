//! Several devices of one guest. A running device must not write to a stopped one, so all of them first go through the
//! states without DMA between devices (`VFIO_MIGRATION_P2P`), and all return through them.
//!
//! A change of state takes a driver milliseconds, which are downtime: each device's change runs on its own thread.

use std::sync::Mutex;
use std::thread::{self, ScopedJoinHandle};
use std::{iter, panic};

use super::destination::Loader;
use super::device::Device;
use super::error::VfioError;
use super::source::Saver;

/// Whether there is DMA between the devices of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peers {
    /// There may be some: several devices are stopped only if all of them can suspend it.
    MayWrite,
    /// There is none, so devices may be stopped one after another: the IOMMU or the monitor's address map does not give
    /// one device access to another's memory.
    Separate,
}

/// Stops all devices of a guest whose CPUs have stopped: first all of them stop writing to each other, then all stop.
///
/// A device that cannot suspend its DMA is detected before anything happens. After any other error some devices are
/// stopped and others not: call [`abort_together`].
pub fn stop_together<D: Device>(savers: &mut [&mut Saver<D>], peers: Peers) -> Result<(), VfioError> {
    check_peers(savers, peers)?;
    each(savers, |saver| saver.quiesce())?;
    each(savers, |saver| saver.stop())
}

/// Checks whether these devices can be stopped together.
pub(crate) fn check_peers<D: Device>(savers: &[&mut Saver<D>], peers: Peers) -> Result<(), VfioError> {
    if peers == Peers::MayWrite
        && savers.len() > 1
        && let Some(saver) = savers.iter().find(|saver| !saver.flags().p2p())
    {
        return Err(VfioError::Peers { device: saver.name().to_owned() });
    }
    Ok(())
}

/// Runs all devices again, with their present state. The guest's CPUs must stay stopped until this has succeeded.
///
/// Every device is tried, and the first error returned. If one cannot run again (see [`Saver::state`]), none is allowed
/// to write to others: reset it ([`Saver::reset`]), or stop using it, and call this again.
pub fn abort_together<D: Device>(savers: &mut [&mut Saver<D>]) -> Result<(), VfioError> {
    if savers.len() > 1 {
        each(savers, |saver| saver.abort_quiesced())?;
    }
    each(savers, |saver| saver.abort())
}

/// Runs all devices with the loaded state. Only when the guest belongs to this host, and before its CPUs run.
///
/// Every device is tried, and the first error returned; it can be called again.
pub fn run_together<D: Device>(loaders: &mut [&mut Loader<D>]) -> Result<(), VfioError> {
    let mut waiting: Vec<&mut Loader<D>> =
        loaders.iter_mut().filter(|loader| !loader.is_running()).map(|loader| &mut **loader).collect();
    if waiting.len() > 1 {
        each(&mut waiting, |loader| loader.run_quiesced())?;
    }
    each(&mut waiting, |loader| loader.run())
}

/// Calls `act` with all at the same time, as far as the system has threads; returns the first error in their order.
fn each<T: Send>(all: &mut [&mut T], act: impl Fn(&mut T) -> Result<(), VfioError> + Sync) -> Result<(), VfioError> {
    let others = all.len().saturating_sub(1);
    let queue = Mutex::new(all.iter_mut().enumerate());
    // Returns the first of the errors of those that this thread takes.
    let some = || {
        let take = || queue.lock().expect("taking does not panic").next();
        iter::from_fn(take).filter_map(|(place, one)| act(one).err().map(|error| (place, error))).min_by_key(first)
    };
    thread::scope(|scope| {
        let helper = |_| thread::Builder::new().name("vfio-state".into()).spawn_scoped(scope, some).ok();
        let helpers: Vec<_> = (0..others).map_while(helper).collect();
        let own = some();
        let join = |helper: ScopedJoinHandle<'_, _>| helper.join().unwrap_or_else(|panic| panic::resume_unwind(panic));
        // The guest is paused: where the system has no thread left, a change of state takes longer and nothing else.
        let errors = helpers.into_iter().map(join).chain([own]).flatten();
        errors.min_by_key(first).map_or(Ok(()), |(_, error)| Err(error))
    })
}

/// The place of a device whose state could not be changed.
fn first((place, _): &(usize, VfioError)) -> usize {
    *place
}

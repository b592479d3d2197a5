//! Several devices of one guest. A device that is stopped must not be written to by another one that runs, so all of them
//! go through the states without DMA between devices first (`VFIO_MIGRATION_P2P`), and all come back through them.
//!
//! Changes of state take a driver milliseconds, and this is downtime: each device's is made on a thread of its own.

use std::panic;
use std::thread;

use super::destination::Loader;
use super::device::Device;
use super::error::VfioError;
use super::source::Saver;

/// What is known of DMA between the devices of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peers {
    /// There may be some: several devices are stopped only if all of them can hold it back.
    MayWrite,
    /// There is none, so devices may be stopped one after another: the IOMMU or the monitor's address map does not have
    /// one device's memory for another.
    Separate,
}

/// Stops all devices of a guest whose CPUs have stopped: first all of them keep from writing to each other, then all stop.
///
/// A device that cannot hold back its DMA is found before anything happens. After any other error some devices are stopped
/// and some are not: [`abort_together`].
pub fn stop_together<D: Device>(savers: &mut [&mut Saver<D>], peers: Peers) -> Result<(), VfioError> {
    check_peers(savers, peers)?;
    each(savers, |saver| saver.quiesce())?;
    each(savers, |saver| saver.stop())
}

/// Whether these devices can be stopped together.
pub(crate) fn check_peers<D: Device>(savers: &[&mut Saver<D>], peers: Peers) -> Result<(), VfioError> {
    if peers == Peers::MayWrite
        && savers.len() > 1
        && let Some(saver) = savers.iter().find(|saver| !saver.flags().p2p())
    {
        return Err(VfioError::Peers { device: saver.name().to_owned() });
    }
    Ok(())
}

/// Has all devices run again, with the state that they have. The guest's CPUs must stand still until this has succeeded.
///
/// Every device is tried, and the first error given. Where one cannot run again (see [`Saver::state`]), none is allowed to
/// write to others: reset it ([`Saver::reset`]), or stop using it, and call this again.
pub fn abort_together<D: Device>(savers: &mut [&mut Saver<D>]) -> Result<(), VfioError> {
    if savers.len() > 1 {
        each(savers, |saver| saver.abort_quiesced())?;
    }
    each(savers, |saver| saver.abort())
}

/// Has all devices run with what was loaded. Only when the guest belongs here, and before its CPUs run.
///
/// Every device is tried, and the first error given; it can be called again.
pub fn run_together<D: Device>(loaders: &mut [&mut Loader<D>]) -> Result<(), VfioError> {
    let mut waiting: Vec<&mut Loader<D>> =
        loaders.iter_mut().filter(|loader| !loader.is_running()).map(|loader| &mut **loader).collect();
    if waiting.len() > 1 {
        each(&mut waiting, |loader| loader.run_quiesced())?;
    }
    each(&mut waiting, |loader| loader.run())
}

/// Does `act` with all at the same time; the first error in their order.
fn each<T: Send>(all: &mut [&mut T], act: impl Fn(&mut T) -> Result<(), VfioError> + Sync) -> Result<(), VfioError> {
    let Some((first, rest)) = all.split_first_mut() else {
        return Ok(());
    };
    let act = &act;
    thread::scope(|scope| {
        let others: Vec<_> = rest.iter_mut().map(|one| scope.spawn(move || act(one))).collect();
        let mut result = act(first);
        for other in others {
            result = result.and(other.join().unwrap_or_else(|panic| panic::resume_unwind(panic)));
        }
        result
    })
}

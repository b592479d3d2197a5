//! A device in software, accessed by calls like the kernel's, or behind a vfio-user server.

use std::io;
use std::sync::Arc;

use sterna_devices::vfio::model::{ModelData, ModelDevice};
use sterna_devices::vfio::{Data, Device, DmaRange, Flags, PrecopyInfo, State};
use sterna_devices::vfio_user::{Client, VfioUserData, VfioUserDevice};

use crate::server::{Manner, Server, reach};

/// How a monitor accesses its devices.
#[derive(Clone, Debug)]
pub(crate) enum By {
    Calls,
    /// Through a vfio-user server with this manner.
    VfioUser(Manner),
}

/// A monitor's device.
#[derive(Clone)]
pub(crate) enum Reached {
    Here(ModelDevice),
    There(VfioUserDevice<Client>, #[expect(dead_code, reason = "serves while the device exists")] Arc<Server>),
}

impl Reached {
    pub(crate) fn new(model: ModelDevice, by: By) -> Self {
        match by {
            By::Calls => Self::Here(model),
            By::VfioUser(manner) => {
                let (server, stream) = Server::start(model, manner);
                Self::There(reach(stream).unwrap(), Arc::new(server))
            }
        }
    }
}

/// The stream of a monitor's device.
pub(crate) enum ReachedData {
    Here(ModelData),
    There(VfioUserData<Client>),
}

macro_rules! either {
    ($self:expr, $of:ident, $it:ident => $call:expr) => {
        match $self {
            $of::Here($it) => $call,
            $of::There($it, ..) => $call,
        }
    };
}

impl Device for Reached {
    type Data = ReachedData;

    fn migration(&self) -> io::Result<Flags> {
        either!(self, Reached, device => device.migration())
    }

    fn state(&self) -> io::Result<State> {
        either!(self, Reached, device => device.state())
    }

    fn set_state(&self, state: State) -> io::Result<Option<ReachedData>> {
        Ok(match self {
            Self::Here(device) => device.set_state(state)?.map(ReachedData::Here),
            Self::There(device, _) => device.set_state(state)?.map(ReachedData::There),
        })
    }

    fn data_size(&self) -> io::Result<u64> {
        either!(self, Reached, device => device.data_size())
    }

    fn reset(&self) -> io::Result<()> {
        either!(self, Reached, device => device.reset())
    }

    fn dma_logging_start(&self, page_size: u64, ranges: &[DmaRange]) -> io::Result<u64> {
        either!(self, Reached, device => device.dma_logging_start(page_size, ranges))
    }

    fn dma_logging_report(&self, range: DmaRange, page_size: u64, bitmap: &mut [u64]) -> io::Result<()> {
        either!(self, Reached, device => device.dma_logging_report(range, page_size, bitmap))
    }

    fn dma_logging_stop(&self) -> io::Result<()> {
        either!(self, Reached, device => device.dma_logging_stop())
    }

    fn reports_whole_mappings(&self) -> bool {
        either!(self, Reached, device => device.reports_whole_mappings())
    }
}

impl Data for ReachedData {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        either!(self, ReachedData, data => data.read(buffer))
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        either!(self, ReachedData, data => data.write(bytes))
    }

    fn precopy_info(&self) -> io::Result<PrecopyInfo> {
        either!(self, ReachedData, data => data.precopy_info())
    }
}

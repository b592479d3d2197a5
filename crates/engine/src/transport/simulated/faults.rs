//! The planned faults of a simulated network, and the connections on which they occur.

use std::ops::Range;
use std::sync::Arc;

use super::Port;
use super::random::Seeded;
use super::wire::{Name, Troubles};

/// A direction of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the side that connected to the side that listens.
    Forth,
    /// From the side that listens to the side that connected.
    Back,
}

impl Direction {
    pub(super) const BOTH: [Self; 2] = [Self::Forth, Self::Back];
}

/// Selects connections. Connections to a port with a listener are numbered from 0 since the network was made.
#[derive(Clone, Debug, Default)]
pub struct Which {
    port: Option<Arc<str>>,
    number: Option<u64>,
}

impl Which {
    /// Selects all connections of the network.
    pub fn all() -> Self {
        Self::default()
    }

    /// Selects all connections to `port`.
    pub fn to(port: &Port) -> Self {
        Self { port: Some(Arc::clone(&port.name)), number: None }
    }

    /// Restricts the selection to the connection with this number: among all of the network or, after [`Which::to`],
    /// among the port's.
    #[must_use]
    pub fn number(mut self, number: u64) -> Self {
        self.number = Some(number);
        self
    }

    pub(super) fn means(&self, name: &Name) -> bool {
        let number = if self.port.is_some() { name.of_port } else { name.of_network };
        self.port.as_ref().is_none_or(|port| *port == name.port) && self.number.is_none_or(|wanted| wanted == number)
    }
}

/// How many bytes have arrived in a direction when a fault occurs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum After {
    /// Exactly this number; 0: as soon as the connection is made.
    Bytes(u64),
    /// A number in this range, which the seed chooses for each connection.
    Within(Range<u64>),
}

impl From<u64> for After {
    fn from(bytes: u64) -> Self {
        Self::Bytes(bytes)
    }
}

impl From<Range<u64>> for After {
    fn from(range: Range<u64>) -> Self {
        Self::Within(range)
    }
}

impl After {
    fn bytes(&self, random: &mut Seeded) -> u64 {
        match self {
            Self::Bytes(bytes) => *bytes,
            Self::Within(range) => random.of(range),
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum What {
    Cut(Direction),
    Stall(Direction),
    Refuse,
}

/// A plan of faults, for connections that are made after [`Network::faults`](super::Network::faults) has received it.
///
/// If several rules select a connection, all of them apply.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    rules: Vec<(Which, What, After)>,
}

impl Faults {
    /// Returns a plan without faults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Cuts the connection when `after` bytes have arrived in `direction`. Bytes in transit are lost in both
    /// directions.
    #[must_use]
    pub fn cut(self, which: Which, direction: Direction, after: impl Into<After>) -> Self {
        self.with(which, What::Cut(direction), after.into())
    }

    /// Stops delivery in `direction` when `after` bytes have arrived, until
    /// [`Network::resume`](super::Network::resume). The sender notices when the capacity in between is full.
    #[must_use]
    pub fn stall(self, which: Which, direction: Direction, after: impl Into<After>) -> Self {
        self.with(which, What::Stall(direction), after.into())
    }

    /// Refuses the connection, as if there were no listener. The connection is numbered nevertheless.
    #[must_use]
    pub fn refuse(self, which: Which) -> Self {
        self.with(which, What::Refuse, After::Bytes(0))
    }

    fn with(mut self, which: Which, what: What, after: After) -> Self {
        self.rules.push((which, what, after));
        self
    }

    /// Returns the faults of this connection; `None` if the connection is refused.
    pub(super) fn of(&self, name: &Name, random: &mut Seeded) -> Option<Troubles> {
        let mut troubles = Troubles::default();
        for (_, what, after) in self.rules.iter().filter(|(which, ..)| which.means(name)) {
            let earliest = |at: &mut Option<u64>, bytes: u64| *at = Some(at.map_or(bytes, |at| at.min(bytes)));
            match what {
                What::Cut(direction) => earliest(&mut troubles.cut[*direction as usize], after.bytes(random)),
                What::Stall(direction) => earliest(&mut troubles.stall[*direction as usize], after.bytes(random)),
                What::Refuse => return None,
            }
        }
        Some(troubles)
    }
}

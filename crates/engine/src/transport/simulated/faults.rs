//! What shall go wrong on a simulated network, and on which connections.

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

/// Which connections are meant. Numbers count connections that somebody listened for, from 0, since the network exists.
#[derive(Clone, Debug, Default)]
pub struct Which {
    port: Option<Arc<str>>,
    number: Option<u64>,
}

impl Which {
    /// All connections of the network.
    pub fn all() -> Self {
        Self::default()
    }

    /// All connections to `port`.
    pub fn to(port: &Port) -> Self {
        Self { port: Some(Arc::clone(&port.name)), number: None }
    }

    /// Of those, only the one with this number: among all of the network, or, after [`Which::to`], among the port's.
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

/// After how many bytes that have arrived in the direction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum After {
    /// After exactly so many; 0: as soon as the connection is made.
    Bytes(u64),
    /// After a number in this range, which the seed chooses for each connection.
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

/// A plan of what goes wrong, for connections that are made after it was given to
/// [`Network::faults`](super::Network::faults).
///
/// Where several rules mean a connection, all of them hold.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    rules: Vec<(Which, What, After)>,
}

impl Faults {
    /// Nothing goes wrong.
    pub fn new() -> Self {
        Self::default()
    }

    /// The connection is cut when so much has arrived in `direction`. What is on its way then, both ways, is lost.
    #[must_use]
    pub fn cut(self, which: Which, direction: Direction, after: impl Into<After>) -> Self {
        self.with(which, What::Cut(direction), after.into())
    }

    /// When so much has arrived in `direction`, nothing more arrives until
    /// [`Network::resume`](super::Network::resume); the sender notices when what lies in between is full.
    #[must_use]
    pub fn stall(self, which: Which, direction: Direction, after: impl Into<After>) -> Self {
        self.with(which, What::Stall(direction), after.into())
    }

    /// The connection is refused, as if nobody listened. It counts nevertheless.
    #[must_use]
    pub fn refuse(self, which: Which) -> Self {
        self.with(which, What::Refuse, After::Bytes(0))
    }

    fn with(mut self, which: Which, what: What, after: After) -> Self {
        self.rules.push((which, what, after));
        self
    }

    /// What happens to this connection; `None`: it is refused.
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

//! How an embedded migration ended badly: on which side, in which phase, why, and where the guest is.

use std::error::Error;
use std::fmt;
use std::io;
use std::sync::Arc;

use sterna_codec::EngineMissing;
use sterna_memory::PAGE_SIZE;
use sterna_memory::place::PlaceError;
use sterna_memory::ram::{GuestRam, RamBlock};
use sterna_wire::control::{Block, DeviceChannels, Machine};
use sterna_wire::handshake::Refusal;
use sterna_wire::packet::BlockShape;
pub use sterna_wire::reason::ErrorKind;
use sterna_wire::reason::Reason;

use crate::monitor::MonitorError;
pub use crate::phase::{GuestState, Phase, Side};
use crate::record_file::{RecordFileError, StateDir};
use crate::report::{Outcome, ReceiveReport, Report};
use crate::transport::{Address, TransportError};
use crate::vmm::VmmError;

/// State of the monitor as a byte stream, version 1 of the records in `state`.
pub(crate) const GUEST_STATE: &str = "guest-state-1";

/// The capability to let the guest go on at the destination before all of its RAM is there, version 2.
pub(crate) const POST_COPY: &str = "post-copy-2";

/// The capability to refuse a packet whose content did not arrive as it was read, and to retransmit its pages, version 1.
pub const RETRANSMIT: &str = "send-again-1";

/// The capability to send pages as deltas against their earlier content, version 1.
pub const DELTA: &str = "delta-1";

/// The capability to show the source's progress at the destination, version 1.
pub(crate) const PROGRESS: &str = "progress-1";

/// The capability to go on over new connections where the connection was lost while only pages were sent, version 1. A side that does not wait
/// for the other one does not offer it.
pub const RESUME: &str = "resume-1";

/// The capability to send the state of devices separately from the monitor's, version 1.
pub(crate) const DEVICE_STATE: &str = "device-state-1";

/// Returns the shapes of the blocks of `ram`, against which packets are checked.
pub(crate) fn shapes(ram: &GuestRam) -> Vec<BlockShape> {
    let shape = |block: &RamBlock| BlockShape { pages: block.pages(), page_size: PAGE_SIZE as u32 };
    ram.blocks().iter().map(shape).collect()
}

/// A reason, and the error behind it where there is one.
#[derive(Debug)]
pub(crate) struct Cause {
    pub(crate) reason: Reason,
    pub(crate) source: Option<Arc<dyn Error + Send + Sync>>,
}

impl Cause {
    /// Makes a cause of a kind, without an error behind it.
    pub(crate) fn new(kind: ErrorKind, text: impl fmt::Display) -> Self {
        Self { reason: Reason::new(kind, text), source: None }
    }

    /// Makes a cause of an error.
    pub(crate) fn of(kind: ErrorKind, error: impl Error + Send + Sync + 'static) -> Self {
        Self { reason: Reason::new(kind, &error), source: Some(Arc::new(error)) }
    }
}

impl From<Reason> for Cause {
    fn from(reason: Reason) -> Self {
        Self { reason, source: None }
    }
}

impl From<String> for Cause {
    /// Before a migration has begun, an error that is only text is a disagreement of settings.
    fn from(text: String) -> Self {
        Self::new(ErrorKind::Settings, text)
    }
}

impl From<VmmError> for Cause {
    fn from(error: VmmError) -> Self {
        Self { reason: Reason::new(ErrorKind::Monitor, &error), source: Some(error.into()) }
    }
}

impl From<TransportError> for Cause {
    fn from(error: TransportError) -> Self {
        Self::of(error.kind(), error)
    }
}

impl From<RecordFileError> for Cause {
    fn from(error: RecordFileError) -> Self {
        Self::of(error.kind(), error)
    }
}

impl From<PlaceError> for Cause {
    fn from(error: PlaceError) -> Self {
        Self::of(ErrorKind::Memory, error)
    }
}

impl From<EngineMissing> for Cause {
    fn from(error: EngineMissing) -> Self {
        Self::of(ErrorKind::Settings, error)
    }
}

impl From<Refusal> for Cause {
    fn from(error: Refusal) -> Self {
        Self::of(ErrorKind::Settings, error)
    }
}

impl From<io::Error> for Cause {
    fn from(error: io::Error) -> Self {
        Self::of(ErrorKind::Other, error)
    }
}

/// Why a migration failed.
#[derive(Debug)]
#[non_exhaustive]
pub struct MigrationError {
    /// The side that returns the error.
    pub side: Side,
    /// The phase that the migration had reached.
    pub phase: Phase,
    /// Where the guest is.
    pub guest: GuestState,
    /// The kind of the failure: what a program branches on.
    pub kind: ErrorKind,
    /// Where the kind is [`ErrorKind::OtherSide`]: the kind that the other side sent. An older version sends none.
    pub other_side: Option<ErrorKind>,
    /// What happened, for people.
    pub reason: String,
    /// At the source: the report of what was done until then, if anything was.
    pub report: Option<Box<Report>>,
    /// At the destination: the report of what was done until then, if anything was.
    pub received: Option<Box<ReceiveReport>>,
    /// The error behind the reason, where it was one of this process.
    source: Option<Arc<dyn Error + Send + Sync>>,
}

impl MigrationError {
    /// Makes an error without a report, for an embedder's own tests of how its program answers failures.
    pub fn new(side: Side, phase: Phase, guest: GuestState, kind: ErrorKind, reason: impl Into<String>) -> Self {
        Self::of((side, phase, guest), Reason::new(kind, reason.into()))
    }

    /// Makes an error of the source, before anything was done.
    pub(crate) fn untouched(cause: impl Into<Cause>) -> Self {
        Self::before(Side::Source, cause.into())
    }

    /// Makes an error of the destination, before anything was done.
    pub(crate) fn not_accepted(cause: impl Into<Cause>) -> Self {
        Self::before(Side::Destination, cause.into())
    }

    fn before(side: Side, Cause { reason, source }: Cause) -> Self {
        Self { source, ..Self::of((side, Phase::SettingUp, GuestState::Untouched), reason) }
    }

    fn of((side, phase, guest): (Side, Phase, GuestState), reason: Reason) -> Self {
        let Reason { text, kind, other_side } = reason;
        Self { side, phase, guest, kind, other_side, reason: text, report: None, received: None, source: None }
    }

    /// Makes the error of a migration that was begun, for `reason`. The monitor's `failures` are errors of its methods; the one that
    /// `reason` quotes is the error behind it.
    pub(crate) fn ended(
        place: (Side, Phase, GuestState),
        outcome: Outcome,
        mut reason: Reason,
        failures: &[MonitorError],
    ) -> Self {
        if outcome == Outcome::Cancelled {
            reason = Reason::new(ErrorKind::Cancelled, reason.text);
        }
        let quoted = |failure: &&MonitorError| {
            let text = failure.to_string();
            // Every reason contains an empty text.
            !text.is_empty() && reason.text.contains(&text)
        };
        let behind = failures.iter().find(quoted).filter(|_| reason.kind == ErrorKind::Monitor);
        let source = behind.map(|failure| Arc::clone(&failure.0));
        Self { source, ..Self::of(place, reason) }
    }
}

impl fmt::Display for MigrationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = match self.side {
            Side::Source => "source",
            Side::Destination => "destination",
        };
        write!(f, "migration failed at the {side} while {}: {} ({})", self.phase, self.reason, self.guest)
    }
}

impl Error for MigrationError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

/// Returns why a process that neither makes sockets nor opens paths cannot use these settings; none if it can.
pub(crate) fn sandbox_refusal(address: &Address, state_dir: Option<&StateDir>) -> Option<String> {
    if address.makes_sockets() {
        return Some(format!(
            "this side is sandboxed, and {address} needs a new socket: give sockets (Address::connecting, \
             Address::listening, Address::accepted)"
        ));
    }
    state_dir.filter(|dir| dir.is_path()).map(|dir| {
        format!("this side is sandboxed, and {dir} is a path: give the records' directory as an open descriptor")
    })
}

/// Returns the description of the virtual machine that each side sends or checks.
pub fn machine(name: String, ram: &GuestRam, downtime_ms: u64) -> Machine {
    let block = |block: &RamBlock| Block {
        name: block.name().to_owned(),
        bytes: block.bytes(),
        page_size: block.page_size() as u64,
    };
    Machine {
        monitor: name,
        machine_type: String::new(),
        ram: ram.bytes(),
        downtime_ms,
        retry_ms: 0,
        blocks: ram.blocks().iter().map(block).collect(),
        devices: Vec::new(),
        device_channels: DeviceChannels::default(),
        opening: Vec::new(),
    }
}

/// Describes the first difference between the RAM blocks of the source and the destination; none where they are the same.
pub(crate) fn difference(source: &[Block], destination: &[Block]) -> Option<String> {
    let name = |block: &Block| sterna_wire::text::cleaned(&block.name);
    if source.len() != destination.len() {
        let names = |blocks: &[Block]| blocks.iter().map(name).collect::<Vec<_>>().join(", ");
        return Some(format!(
            "the source has {} RAM blocks ({}), the destination {} ({})",
            source.len(),
            names(source),
            destination.len(),
            names(destination)
        ));
    }
    source.iter().zip(destination).enumerate().find(|(_, (source, destination))| source != destination).map(
        |(number, (source, destination))| {
            let words = |block: &Block| format!("{}, {} bytes, pages of {}", name(block), block.bytes, block.page_size);
            let (source, destination) = (words(source), words(destination));
            format!("RAM block {number} is {source} at the source and {destination} at the destination")
        },
    )
}

/// As [`difference`], where the sides may back their RAM by pages of different sizes.
pub(crate) fn size_difference(source: &[Block], destination: &GuestRam) -> Option<String> {
    let mut ours = machine(String::new(), destination, 0).blocks;
    ours.iter_mut().zip(source).for_each(|(ours, theirs)| ours.page_size = theirs.page_size);
    difference(source, &ours)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(name: &str, bytes: u64, page_size: u64) -> Block {
        Block { name: name.into(), bytes, page_size }
    }

    #[test]
    fn a_difference_of_ram_blocks_is_described_for_both_sides() {
        let ours = [block("ram", 1 << 30, 4096), block("video", 1 << 20, 4096)];
        assert_eq!(difference(&ours, &ours), None);
        let cases = [
            (vec![ours[0].clone()], "the source has 1 RAM blocks (ram), the destination 2 (ram, video)"),
            (vec![block("ram", 1 << 29, 4096), ours[1].clone()], "RAM block 0 is ram, 536870912 bytes"),
            (vec![block("ram", 1 << 30, 2 << 20), ours[1].clone()], "pages of 2097152 at the source"),
            (vec![ours[0].clone(), block("vga\u{1b}[2J", 1 << 20, 4096)], "RAM block 1 is vga"),
        ];
        for (theirs, expected) in cases {
            let text = difference(&theirs, &ours).unwrap();
            assert!(text.contains(expected) && !text.contains('\u{1b}'), "{text}");
        }
    }

    #[test]
    fn the_text_of_an_error_names_side_phase_reason_and_where_the_guest_is() {
        let error = MigrationError::new(Side::Source, Phase::Rounds, GuestState::RunsAtSource, ErrorKind::Other, "x");
        let expected = "migration failed at the source while sending memory: x (the guest runs on at the source)";
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn an_error_of_the_monitor_is_the_source_of_the_migrations_error() {
        let disk = || MonitorError::from(VmmError::from("the disk is full"));
        let ended = |outcome, reason: Reason| {
            let place = (Side::Source, Phase::SwitchingOver, GuestState::RunsAtSource);
            let silent = MonitorError::from(VmmError::from(""));
            MigrationError::ended(place, outcome, reason, &[silent, disk()])
        };
        let text = "the state could not be saved: the disk is full";
        let monitor = ended(Outcome::Failed, Reason::new(ErrorKind::Monitor, text));
        assert_eq!(
            (monitor.kind, monitor.source().unwrap().to_string()),
            (ErrorKind::Monitor, "the disk is full".into())
        );
        // The other side may send the same words.
        let theirs = ended(Outcome::Failed, Reason::new(ErrorKind::Monitor, text).from_peer());
        assert_eq!((theirs.kind, theirs.other_side), (ErrorKind::OtherSide, Some(ErrorKind::Monitor)));
        assert!(theirs.source().is_none());
        let cancelled = ended(Outcome::Cancelled, Reason::new(ErrorKind::ConnectionLost, "cancelled"));
        assert_eq!((cancelled.kind, cancelled.source().is_some()), (ErrorKind::Cancelled, false));
    }
}

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

use crate::monitor::MonitorError;
use crate::record_file::RecordFileError;
use crate::report::{Outcome, ReceiveReport, Report};
use crate::transport::TransportError;
use crate::vmm::VmmError;

/// State of the monitor as a byte stream, version 1 of the records in `state`.
pub(crate) const GUEST_STATE: &str = "guest-state-1";

/// The capability to let the guest go on at the destination before all of its RAM is there, version 2.
pub(crate) const POST_COPY: &str = "post-copy-2";

/// The capability to refuse a packet whose content did not arrive as it was read, and to retransmit its pages, version 1.
pub const RETRANSMIT: &str = "send-again-1";

/// The capability to send pages as deltas against their earlier content, version 1.
pub const DELTA: &str = "delta-1";

/// The capability to send the state of devices separately from the monitor's, version 1.
pub(crate) const DEVICE_STATE: &str = "device-state-1";

/// Returns the shapes of the blocks of `ram`, against which packets are checked.
pub(crate) fn shapes(ram: &GuestRam) -> Vec<BlockShape> {
    let shape = |block: &RamBlock| BlockShape { pages: block.pages(), page_size: PAGE_SIZE as u32 };
    ram.blocks().iter().map(shape).collect()
}

/// One of the two sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Where the guest ran before the migration.
    Source,
    /// Where the guest is moved to.
    Destination,
}

/// The phase that a migration had reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Phase {
    /// Settings, connection, handshake: nothing was begun.
    SettingUp,
    /// The guest runs and the rounds send dirty pages.
    Rounds,
    /// The guest is paused; its last pages and its state are being sent.
    SwitchingOver,
    /// The decision is made: the guest belongs to the destination.
    Committed,
    /// The guest runs at the destination; the rest of its memory is being sent.
    PostCopy,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SettingUp => "setting up",
            Self::Rounds => "sending memory",
            Self::SwitchingOver => "switching over",
            Self::Committed => "starting the guest at the destination",
            Self::PostCopy => "sending the rest of memory after the guest",
        })
    }
}

/// Where the guest is after a migration that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GuestState {
    /// The guest was not touched: it is as it was before.
    Untouched,
    /// The guest runs at the source.
    RunsAtSource,
    /// The guest belongs to the source and is paused: the source could not resume it.
    PausedAtSource,
    /// The guest belongs to the destination; whether it runs there was not confirmed. It must never run at the source again.
    BelongsToDestination,
    /// The guest belongs to the destination and is paused: the destination could not resume it.
    PausedAtDestination,
    /// The guest belongs to the destination, and the sides lost each other for good before all of its memory was known to have arrived.
    /// A thread at the destination that touches a missing page waits.
    LacksMemory,
    /// The guest runs on both sides: somebody started it by hand. One of the two must be stopped at once.
    RunsTwice,
    /// The guest is at the other side; the memory at this side is of no use.
    NotHere,
}

impl fmt::Display for GuestState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Untouched => "the guest was not touched",
            Self::RunsAtSource => "the guest runs on at the source",
            Self::PausedAtSource => "the guest is paused at the source: let the monitor resume it",
            Self::BelongsToDestination => {
                "the guest belongs to the destination and must not run at the source; look whether it runs there"
            }
            Self::PausedAtDestination => {
                "the guest belongs to the destination and is paused there: let the monitor resume it"
            }
            Self::LacksMemory => "the guest belongs to the destination, and not all of its memory is known to be there",
            Self::RunsTwice => "the guest was started by hand where it must not run: stop one of the two at once",
            Self::NotHere => "nothing runs here, and the memory here is of no use",
        })
    }
}

/// The kind of a failure: what a program branches on. For people there is [`MigrationError::reason`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The migration was cancelled.
    Cancelled,
    /// A setting is out of its range, does not fit the others, or asks for what this host does not have. Nothing was begun.
    Settings,
    /// Guest RAM or its dirty log cannot be used.
    Memory,
    /// A method of the monitor has failed; the error's source is the method's error. Or a device whose state is sent separately.
    Monitor,
    /// The migration's record could not be read or written.
    Record,
    /// No connection could be made, or the address cannot be listened on.
    Network,
    /// At the source: the destination was reached and has refused the migration, before anything was done. It may take another one.
    Refused,
    /// The connection was lost, and the sides did not find each other again in time.
    ConnectionLost,
    /// A time limit has passed.
    TimeLimit,
    /// The rounds did not converge, and the settings end the migration then.
    NotConverging,
    /// The other side has failed, and has sent the reason.
    OtherSide,
    /// None of these.
    Other,
}

/// A reason, its kind, and the error behind it where there is one.
#[derive(Debug)]
pub(crate) struct Cause {
    pub(crate) kind: ErrorKind,
    pub(crate) reason: String,
    pub(crate) source: Option<Arc<dyn Error + Send + Sync>>,
}

impl Cause {
    /// Makes a cause of a kind, without an error behind it.
    pub(crate) fn new(kind: ErrorKind, reason: impl fmt::Display) -> Self {
        Self { kind, reason: reason.to_string(), source: None }
    }

    /// Makes a cause of an error.
    pub(crate) fn of(kind: ErrorKind, error: impl Error + Send + Sync + 'static) -> Self {
        Self { kind, reason: error.to_string(), source: Some(Arc::new(error)) }
    }
}

impl From<String> for Cause {
    /// Before a migration has begun, what is wrong in words is wrong with the settings of the two sides.
    fn from(reason: String) -> Self {
        Self::new(ErrorKind::Settings, reason)
    }
}

impl From<VmmError> for Cause {
    fn from(error: VmmError) -> Self {
        Self { kind: ErrorKind::Monitor, reason: error.to_string(), source: Some(error.into()) }
    }
}

impl From<TransportError> for Cause {
    fn from(error: TransportError) -> Self {
        Self::of(ErrorKind::Network, error)
    }
}

impl From<RecordFileError> for Cause {
    fn from(error: RecordFileError) -> Self {
        Self::of(ErrorKind::Record, error)
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
    /// The kind of the failure.
    pub kind: ErrorKind,
    /// What happened.
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
        let reason = reason.into();
        Self { side, phase, guest, kind, reason, report: None, received: None, source: None }
    }

    /// Makes an error of the source, before anything was done.
    pub(crate) fn untouched(cause: impl Into<Cause>) -> Self {
        Self::before(Side::Source, cause.into())
    }

    /// Makes an error of the destination, before anything was done.
    pub(crate) fn not_accepted(cause: impl Into<Cause>) -> Self {
        Self::before(Side::Destination, cause.into())
    }

    fn before(side: Side, Cause { kind, reason, source }: Cause) -> Self {
        Self { source, ..Self::new(side, Phase::SettingUp, GuestState::Untouched, kind, reason) }
    }

    /// Makes the error of a migration that was begun, for `reason`. The monitor's `failures` are errors of its methods.
    pub(crate) fn ended(
        (side, phase, guest): (Side, Phase, GuestState),
        outcome: Outcome,
        reason: String,
        failures: &[MonitorError],
    ) -> Self {
        let behind = failures.iter().find(|failure| reason.contains(&failure.to_string()));
        let kind = match outcome {
            Outcome::Cancelled => ErrorKind::Cancelled,
            _ if behind.is_some() => ErrorKind::Monitor,
            _ => kind_of(&reason),
        };
        let source = behind.filter(|_| kind == ErrorKind::Monitor).map(|failure| Arc::clone(&failure.0));
        Self { source, ..Self::new(side, phase, guest, kind, reason) }
    }
}

/// Words by which the kind of a reason is known. Reasons travel through the switchover's state machines, and from host to host, as text;
/// only Sterna's own part of a reason has these words.
const WORDS: [(&str, ErrorKind); 11] = [
    ("the destination failed: ", ErrorKind::OtherSide),
    ("the source failed: ", ErrorKind::OtherSide),
    ("record could not be written", ErrorKind::Record),
    ("saving the state of device ", ErrorKind::Monitor),
    ("loading the state of device ", ErrorKind::Monitor),
    ("the dirty log ", ErrorKind::Memory),
    ("given up after ", ErrorKind::NotConverging),
    ("was lost: ", ErrorKind::ConnectionLost),
    ("did not confirm it in time", ErrorKind::ConnectionLost),
    ("took too long", ErrorKind::TimeLimit),
    ("for too long", ErrorKind::TimeLimit),
];

/// Returns the kind of a reason that has passed through a state machine.
fn kind_of(reason: &str) -> ErrorKind {
    WORDS.iter().find(|(words, _)| reason.contains(words)).map_or(ErrorKind::Other, |(_, kind)| *kind)
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
        let ended = |outcome, reason: &str| {
            let place = (Side::Source, Phase::SwitchingOver, GuestState::RunsAtSource);
            MigrationError::ended(place, outcome, reason.to_owned(), &[disk()])
        };
        let monitor = ended(Outcome::Failed, "the state could not be saved: the disk is full");
        assert_eq!(
            (monitor.kind, monitor.source().unwrap().to_string()),
            (ErrorKind::Monitor, "the disk is full".into())
        );
        for (outcome, reason, kind) in [
            (Outcome::Cancelled, "cancelled", ErrorKind::Cancelled),
            (Outcome::Failed, "the destination failed: its disk took too long", ErrorKind::OtherSide),
            (Outcome::Failed, "loading took too long; waiting for gpu/0", ErrorKind::TimeLimit),
            (Outcome::Failed, "channel ram-0: the destination was lost: reset by peer", ErrorKind::ConnectionLost),
            (Outcome::Failed, "given up after 4 rounds: the guest writes faster", ErrorKind::NotConverging),
            (Outcome::Failed, "the dirty log failed: no memory", ErrorKind::Memory),
            (Outcome::Failed, "saving the state of device gpu/0 failed: it hangs", ErrorKind::Monitor),
            (Outcome::Unconfirmed, "the guest runs here, but the record could not be written: full", ErrorKind::Record),
            (Outcome::Failed, "something else", ErrorKind::Other),
        ] {
            let error = ended(outcome, reason);
            assert_eq!((error.kind, error.source().is_some()), (kind, false), "{reason}");
        }
    }
}

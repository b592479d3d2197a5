//! Commands between the sections of the main channel.

use std::io::Read;

use super::StreamError;
use super::input::Input;

pub(crate) const TYPE: u8 = 0x08;

const OPEN_RETURN_PATH: u16 = 1;
const PING: u16 = 2;
const POSTCOPY_ADVISE: u16 = 3;
const SWITCHOVER_START: u16 = 11;

/// One command, parsed and verbatim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Command {
    /// Its kind and value.
    pub kind: CommandKind,
    /// The whole command as it was read, from the type byte.
    pub bytes: Vec<u8>,
}

/// The commands that a precopy migration may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CommandKind {
    /// The destination may answer on the main channel's socket from now on.
    OpenReturnPath,
    /// The destination answers with a PONG of the same value.
    Ping(u32),
    /// Post-copy may follow. Must be stripped: on this command the destination discards all of its RAM, including pages that
    /// Sterna has placed directly.
    PostcopyAdvise,
    /// The guest has stopped and device state follows; starts the load threads of a destination from 10.0.
    SwitchoverStart,
}

impl Command {
    /// Returns whether the command must not reach the destination.
    #[must_use]
    pub fn to_be_stripped(&self) -> bool {
        self.kind == CommandKind::PostcopyAdvise
    }

    /// Reads a command back from its own [`bytes`](Self::bytes).
    ///
    /// # Errors
    /// [`StreamError`] for invalid bytes, and for bytes after the command.
    pub fn parse(bytes: &[u8]) -> Result<Self, StreamError> {
        let mut input = Input::with_capacity(bytes, 64);
        let command = Self::read(&mut input)?;
        match input.peek::<1>("command")? {
            None => Ok(command),
            Some(_) => Err(StreamError::Malformed("bytes after the command".into())),
        }
    }

    pub(crate) fn read<R: Read>(input: &mut Input<R>) -> Result<Self, StreamError> {
        input.begin_capture();
        let kind = input.u8("command")?;
        if kind != TYPE {
            return Err(StreamError::Unexpected { what: "command type", found: kind.into(), expected: TYPE.into() });
        }
        let id = input.be16("command number")?;
        let length = input.be16("command length")?;
        let kind = match (id, length) {
            (OPEN_RETURN_PATH, 0) => CommandKind::OpenReturnPath,
            (PING, 4) => CommandKind::Ping(input.be32("ping")?),
            (POSTCOPY_ADVISE, 0) => CommandKind::PostcopyAdvise,
            (POSTCOPY_ADVISE, 16) => {
                input.array::<16>("post-copy advise")?;
                CommandKind::PostcopyAdvise
            }
            (SWITCHOVER_START, 0) => CommandKind::SwitchoverStart,
            (OPEN_RETURN_PATH | PING | POSTCOPY_ADVISE | SWITCHOVER_START, _) => {
                return Err(StreamError::Malformed(format!("command {id} with {length} bytes of data")));
            }
            (other, _) => return Err(unsupported(other)),
        };
        Ok(Self { kind, bytes: input.end_capture() })
    }
}

fn unsupported(id: u16) -> StreamError {
    const POSTCOPY: &str = "turn the capability postcopy-ram off";
    let (name, advice) = match id {
        4 => ("POSTCOPY_LISTEN", POSTCOPY),
        5 => ("POSTCOPY_RUN", POSTCOPY),
        6 => ("POSTCOPY_RAM_DISCARD", POSTCOPY),
        7 => ("PACKAGED", POSTCOPY),
        8 => ("ENABLE_COLO", "turn the capability x-colo off"),
        9 => ("POSTCOPY_RESUME", POSTCOPY),
        10 => ("RECV_BITMAP", POSTCOPY),
        _ => {
            return StreamError::refused(
                format!("command {id}"),
                "it comes from a QEMU newer than the ones known here",
            );
        }
    };
    StreamError::refused(format!("command {name}"), advice)
}

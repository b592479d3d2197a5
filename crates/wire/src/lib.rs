//! What travels between two Sterna hosts, and both ends of the conversation as state machines without I/O or clocks.
//!
//! Bytes and events are passed in, bytes and actions come out: so both ends run against each other in one
//! deterministic test, and the model checker drives the same types as the programs do. Nothing here opens a socket,
//! starts a thread or reads a clock. `docs/protocol.md` describes the whole protocol for those who write another end.
//!
//! * [`header`]: what every connection says first, and the answer; [`identity`]: that it belongs to this migration.
//! * [`handshake`]: capabilities offered and chosen.
//! * [`control`]: the small messages; [`switchover`]: who may run the guest, and who decides.
//! * [`packet`]: pages, device state and everything else that is large, [`delta`]: pages by what has changed in them;
//!   [`device`]: the state of one device, in any order; [`sequence`]: that none is missing.
//! * [`limits`]: every bound a peer is held to.

pub mod checksum;
pub mod control;
pub mod delta;
pub mod device;
pub mod handshake;
pub mod header;
pub mod identity;
pub mod limits;
pub mod packet;
pub mod sequence;
pub mod switchover;
pub mod text;

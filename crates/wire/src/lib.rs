//! The messages between two Sterna hosts, and both ends of the protocol as state machines without I/O or clocks.
//!
//! Bytes and events are passed in; bytes and actions are returned. So one deterministic test runs both ends against
//! each other, and the model checker drives the same types as the programs do. No code here opens a socket, starts a
//! thread or reads a clock. `docs/protocol.md` describes the whole protocol for implementers of another end.
//!
//! * [`header`]: the first message of every connection, and the reply; [`identity`]: the proof that it belongs to this
//!   migration.
//! * [`handshake`]: capabilities offered and chosen.
//! * [`description`]: a virtual machine in named facts, by which two machines are compared.
//! * [`control`]: the small messages; [`switchover`]: which host may run the guest, and which decides.
//! * [`packet`]: pages, device state and all other bulk data, [`delta`]: pages as changes; [`device`]: the state of one
//!   device, in any order; [`sequence`]: that no packet is missing.
//! * [`reason`]: why a migration failed; [`limits`]: every limit that is enforced on a peer.

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod channel_kind;
pub mod checksum;
pub mod control;
pub mod delta;
pub mod description;
pub mod device;
pub mod handshake;
pub mod header;
pub mod identity;
pub mod limits;
mod mode;
pub mod packet;
pub mod reason;
pub mod sequence;
pub mod switchover;
pub mod text;

//! The limits of the wire format.
//!
//! A received length is compared with its limit here *before* memory is reserved for it; a hostile or broken peer
//! therefore costs a bounded amount of memory and time. `docs/protocol.md` repeats this table. Limits of one part alone are where that
//! part enforces them: the packets that a destination buffers (`handshake.rs`), the credit of a device (`device.rs`), and in
//! `sterna-engine` pending handshakes (`session/handshake.rs`), refused packets (`send/retransmit.rs`) and queued control messages
//! (`control_link.rs`).

use std::time::Duration;

/// Maximum number of RAM channels of one migration.
pub const MAX_RAM_CHANNELS: u16 = 64;
/// Maximum number of channels of device state alone of one migration, besides the stream channel.
pub const MAX_DEVICE_CHANNELS: u16 = MAX_RAM_CHANNELS - 1;
/// Maximum number of devices whose state travels apart from the monitor's.
pub const MAX_DEVICES: usize = 256;
/// Maximum bytes of the message of the source's monitor that opens a migration.
pub const MAX_OPENING: usize = 64 << 10;
/// Maximum number of facts in the description of a machine.
pub const MAX_FACTS: usize = 16384;
/// Maximum length of a fact's name, in bytes.
pub const MAX_FACT_NAME: usize = 1024;
/// Maximum length of a fact's value, in bytes.
pub const MAX_FACT_VALUE: usize = 64 << 10;
/// Maximum number of opaque channels of one session that carries a connection (NBD, libvirt's control socket): one for each direction.
pub const MAX_OPAQUE_CHANNELS: u16 = 2;
/// Maximum length of a control message, in bytes of JSON.
pub const MAX_CONTROL_MESSAGE: usize = 1 << 20;
/// Maximum number of runs in one packet's page table.
pub const MAX_RUNS: usize = 4096;
/// Maximum content of one packet after decoding, in bytes (`--packet-size` is at most this).
pub const MAX_CONTENT: usize = 16 << 20;
/// Minimum `--packet-size`, in bytes: one page of 4 KiB.
pub const MIN_PACKET_SIZE: usize = 4096;
/// The default of `--packet-size`: 128 pages of 4 KiB, as QEMU's multifd packets.
pub const DEFAULT_PACKET_SIZE: usize = 512 << 10;
/// Maximum number of RAM blocks of one guest.
pub const MAX_BLOCKS: usize = 4096;
/// Maximum length of a block or device name, in bytes (QEMU's own limit for an idstr is 255).
pub const MAX_NAME: usize = 255;
/// Maximum length of a refusal, reason or error text, in bytes; longer ones are truncated.
pub const MAX_TEXT: usize = 1024;
/// Maximum length of a RAM block, in bytes: 2^40 pages of 4 KiB.
pub const MAX_BLOCK_LENGTH: u64 = 1 << 52;

/// Maximum time in which a new connection sends its header and is answered.
pub const HANDSHAKE_TIME: Duration = Duration::from_secs(10);
/// Maximum time in which a destination that sends heartbeats prepares its machine after a hello.
pub const PREPARATION_TIME: Duration = Duration::from_secs(600);
/// Time between heartbeats of each side on an otherwise idle control channel.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// Time without a byte after which the peer counts as lost.
pub const SILENCE_LIMIT: Duration = Duration::from_secs(10);

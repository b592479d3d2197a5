//! Every limit that is enforced on a peer, in one place.
//!
//! A received length is compared with its limit here *before* memory is reserved for it; a hostile or broken peer
//! therefore costs a bounded amount of memory and time. `docs/protocol.md` repeats this table.

use std::time::Duration;

/// The most RAM channels in one migration.
pub const MAX_RAM_CHANNELS: u16 = 64;
/// The most channels of device state alone in one migration, besides the stream channel.
pub const MAX_DEVICE_CHANNELS: u16 = MAX_RAM_CHANNELS - 1;
/// The most devices whose state travels apart from the monitor's.
pub const MAX_DEVICES: usize = 256;
/// The most bytes of the message of the source's monitor that opens a migration.
pub const MAX_OPENING: usize = 64 << 10;
/// Opaque channels of one session that carries a connection (NBD, libvirt's control socket): one for each direction.
pub const MAX_OPAQUE_CHANNELS: u16 = 2;
/// The largest control message, in bytes of JSON.
pub const MAX_CONTROL_MESSAGE: usize = 1 << 20;
/// The most runs in one packet's page table.
pub const MAX_RUNS: usize = 4096;
/// The largest content of one packet after decoding, in bytes (`--packet-size` is at most this).
pub const MAX_CONTENT: usize = 16 << 20;
/// The smallest `--packet-size`, in bytes: one page of the smallest kind.
pub const MIN_PACKET_SIZE: usize = 4096;
/// The default of `--packet-size`: 128 pages of 4 KiB, as QEMU's multifd packets.
pub const DEFAULT_PACKET_SIZE: usize = 512 << 10;
/// The most RAM blocks of one guest.
pub const MAX_BLOCKS: usize = 4096;
/// The longest block or device name, in bytes (QEMU's own limit for an idstr is 255).
pub const MAX_NAME: usize = 255;
/// The longest refusal, reason or error text, in bytes; longer ones are truncated.
pub const MAX_TEXT: usize = 1024;
/// The largest RAM block, in bytes: 2^40 pages of 4 KiB.
pub const MAX_BLOCK_LENGTH: u64 = 1 << 52;

/// How long a new connection may take to send its header and to be answered.
pub const HANDSHAKE_TIME: Duration = Duration::from_secs(10);
/// How long a destination may prepare its machine after a hello, as long as it sends heartbeats.
pub const PREPARATION_TIME: Duration = Duration::from_secs(600);
/// How often each side sends a heartbeat on an otherwise idle control channel.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// After this long without a byte the peer counts as lost.
pub const SILENCE_LIMIT: Duration = Duration::from_secs(10);

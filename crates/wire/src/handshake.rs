//! How two versions agree: one side offers capabilities, the other side chooses, and the first side checks the choice.
//!
//! A refusal names the missing capability and the side that lacks it, so that its reader knows which program to update.

use std::collections::BTreeSet;

use crate::control::{Capabilities, DeviceChannels, Hello, Machine, Welcome};
use crate::header::ChannelHeader;
use crate::identity::MigrationKey;
use crate::limits::{
    MAX_BLOCKS, MAX_CONTENT, MAX_DEVICE_CHANNELS, MAX_DEVICES, MAX_NAME, MAX_OPENING, MAX_RAM_CHANNELS, MIN_PACKET_SIZE,
};
use crate::text::cleaned;

/// Maximum bytes that a destination buffers for all channels of a migration together, whatever the requested packet size.
const MAX_BUFFERED: u32 = 256 << 20;
/// Packets that a destination buffers for each channel: one as it came, and its content.
const PACKETS_PER_CHANNEL: u32 = 2;

/// Why a migration was refused at its beginning.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// The hello's key is malformed.
    #[error("the hello message has no valid key")]
    Key,
    /// The header's proof does not match the key: it was replayed from another connection, or damaged.
    #[error("the control channel's proof does not belong to this connection")]
    Proof,
    /// Too many or no channels.
    #[error("{0} RAM channels were asked for; between 1 and {MAX_RAM_CHANNELS} are possible")]
    Channels(u16),
    /// No or too many channels for device state.
    #[error("{0} channels for device state were asked for; between 1 and {MAX_DEVICE_CHANNELS} are possible")]
    DeviceChannels(u16),
    /// Too many devices.
    #[error("there are {0} devices with a state of their own; up to {MAX_DEVICES} are possible")]
    Devices(usize),
    /// A device's name is empty or too long.
    #[error("a device's name has {0} bytes; between 1 and {MAX_NAME} are possible")]
    DeviceName(usize),
    /// Two devices are the same.
    #[error("the device {0} is there twice")]
    DeviceTwice(String),
    /// Too many RAM blocks.
    #[error("there are {0} RAM blocks; up to {MAX_BLOCKS} are possible")]
    Blocks(usize),
    /// The name of a RAM block is too long.
    #[error("the name of a RAM block has {0} bytes; up to {MAX_NAME} are possible")]
    BlockName(usize),
    /// Two RAM blocks have the same name.
    #[error("the RAM block {0} is there twice")]
    BlockTwice(String),
    /// The opening message is too long.
    #[error("the opening message has {0} bytes; up to {MAX_OPENING} are possible")]
    Opening(usize),
    /// A packet size out of range.
    #[error("a packet size of {0} bytes is not between {MIN_PACKET_SIZE} and {MAX_CONTENT}")]
    PacketSize(u32),
    /// A feature that one side requires and the other does not have.
    #[error(
        "the {requirer} requires the capability \"{feature}\", which the {lacker} does not have; update the {lacker}'s sterna"
    )]
    Missing {
        /// The capability.
        feature: String,
        /// The side that requires it.
        requirer: &'static str,
        /// The side that lacks it.
        lacker: &'static str,
    },
    /// No method in common: even `none` is not known.
    #[error("the two sides have no compression method in common, not even \"none\"")]
    NoMethod,
    /// The destination chose a capability that was not offered.
    #[error("the destination chose what the source did not offer: {0}")]
    NotOffered(String),
}

/// Checks the hello and chooses the capabilities, at the destination.
///
/// `exporter` is that of the control connection's TLS session, empty without TLS.
pub fn choose(
    local: &Capabilities,
    header: &ChannelHeader,
    exporter: &[u8],
    hello: &Hello,
) -> Result<(MigrationKey, Capabilities), Refusal> {
    let key = MigrationKey::from_hex(&hello.key).ok_or(Refusal::Key)?;
    if !header.belongs(&key, exporter) {
        return Err(Refusal::Proof);
    }
    if hello.channels == 0 || hello.channels > MAX_RAM_CHANNELS {
        return Err(Refusal::Channels(hello.channels));
    }
    check_devices(&hello.machine)?;
    check_blocks(&hello.machine)?;
    if hello.machine.opening.len() > MAX_OPENING {
        return Err(Refusal::Opening(hello.machine.opening.len()));
    }
    let offered = &hello.capabilities;
    require(offered, local, "source", "destination")?;
    require(local, offered, "destination", "source")?;
    let chosen = Capabilities {
        methods: common(&local.methods, &offered.methods),
        packet_size: local.packet_size.min(offered.packet_size).min(max_packet_size(hello)),
        features: common(&local.features, &offered.features),
        required: Vec::new(),
    };
    check(&chosen)?;
    Ok((key, chosen))
}

/// Returns the packet size, in bytes, with which the channels of `hello` stay within [`MAX_BUFFERED`]: its RAM channels, its own channels
/// of device state, and the channel that every migration has besides.
fn max_packet_size(hello: &Hello) -> u32 {
    let channels = u32::from(hello.channels) + u32::from(hello.machine.device_channels.own()) + 1;
    MAX_BUFFERED / (PACKETS_PER_CHANNEL * channels)
}

/// Checks, at the source, that the destination's choice was offered.
pub fn conclude(offered: &Capabilities, welcome: &Welcome) -> Result<Capabilities, Refusal> {
    let chosen = &welcome.chosen;
    let strange = |chosen: &[String], offered: &[String]| chosen.iter().find(|name| !offered.contains(name)).cloned();
    if let Some(name) = strange(&chosen.methods, &offered.methods).or(strange(&chosen.features, &offered.features)) {
        return Err(Refusal::NotOffered(cleaned(&name)));
    }
    if chosen.packet_size > offered.packet_size {
        return Err(Refusal::NotOffered(format!("packets of {} bytes", chosen.packet_size)));
    }
    require(offered, chosen, "source", "destination")?;
    check(chosen)?;
    // Each name once, however often it occurs.
    Ok(Capabilities {
        methods: common(&offered.methods, &chosen.methods),
        features: common(&offered.features, &chosen.features),
        ..chosen.clone()
    })
}

/// Checks the devices of `machine` and their channels, independently of the other side.
pub fn check_devices(machine: &Machine) -> Result<(), Refusal> {
    if let DeviceChannels::Own(channels) = machine.device_channels
        && !(1..=MAX_DEVICE_CHANNELS).contains(&channels)
    {
        return Err(Refusal::DeviceChannels(channels));
    }
    let devices = &machine.devices;
    if devices.len() > MAX_DEVICES {
        return Err(Refusal::Devices(devices.len()));
    }
    let mut known = BTreeSet::new();
    for device in devices {
        if !(1..=MAX_NAME).contains(&device.name.len()) {
            return Err(Refusal::DeviceName(device.name.len()));
        }
        if !known.insert(device) {
            return Err(Refusal::DeviceTwice(cleaned(&device.to_string())));
        }
    }
    Ok(())
}

/// Checks the RAM blocks of `machine`, independently of the other side.
fn check_blocks(machine: &Machine) -> Result<(), Refusal> {
    let blocks = &machine.blocks;
    if blocks.len() > MAX_BLOCKS {
        return Err(Refusal::Blocks(blocks.len()));
    }
    let mut known = BTreeSet::new();
    for block in blocks {
        if block.name.len() > MAX_NAME {
            return Err(Refusal::BlockName(block.name.len()));
        }
        if !known.insert(&block.name) {
            return Err(Refusal::BlockTwice(cleaned(&block.name)));
        }
    }
    Ok(())
}

fn check(chosen: &Capabilities) -> Result<(), Refusal> {
    if !(MIN_PACKET_SIZE..=MAX_CONTENT).contains(&(chosen.packet_size as usize)) {
        return Err(Refusal::PacketSize(chosen.packet_size));
    }
    if chosen.methods.is_empty() { Err(Refusal::NoMethod) } else { Ok(()) }
}

fn require(
    one: &Capabilities,
    other: &Capabilities,
    requirer: &'static str,
    lacker: &'static str,
) -> Result<(), Refusal> {
    match one.required.iter().find(|feature| !other.features.contains(feature)) {
        Some(feature) => Err(Refusal::Missing { feature: cleaned(feature), requirer, lacker }),
        None => Ok(()),
    }
}

fn common(local: &[String], offered: &[String]) -> Vec<String> {
    local.iter().filter(|name| offered.contains(name)).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::{Block, Machine, Mode};
    use crate::header::ChannelKind;
    use crate::identity::{MigrationId, ProofSubject};

    fn capabilities(methods: &[&str], features: &[&str], required: &[&str]) -> Capabilities {
        let names = |list: &[&str]| list.iter().map(ToString::to_string).collect();
        Capabilities {
            methods: names(methods),
            packet_size: 1 << 19,
            features: names(features),
            required: names(required),
        }
    }

    fn hello(capabilities: Capabilities) -> (ChannelHeader, Hello) {
        let key = MigrationKey::from_bytes([5; 32]);
        let id = MigrationId::from_bytes([6; 16]);
        let subject = ProofSubject { id, kind: ChannelKind::Control, index: 0, incarnation: 1, exporter: b"tls" };
        let hello = Hello {
            program: "sterna test".into(),
            key: key.to_hex(),
            mode: Mode::Owner,
            channels: 2,
            capabilities,
            machine: Machine::default(),
        };
        (ChannelHeader::new(&key, &subject), hello)
    }

    #[test]
    fn both_sides_end_with_what_both_have() {
        let newer = capabilities(&["none", "lz4", "zstd", "future"], &["a", "b"], &["a"]);
        let older = capabilities(&["none", "zstd"], &["a"], &[]);
        let (header, hello) = hello(newer.clone());

        let (_, chosen) = choose(&older, &header, b"tls", &hello).unwrap();
        assert_eq!(chosen.methods, ["none", "zstd"]);
        assert_eq!(chosen.features, ["a"]);
        let welcome = Welcome { program: String::new(), chosen: chosen.clone() };
        assert_eq!(conclude(&newer, &welcome), Ok(chosen));
    }

    #[test]
    fn a_missing_capability_is_named_with_the_side_that_lacks_it() {
        let plain = capabilities(&["none"], &[], &[]);
        let demanding = capabilities(&["none"], &["x"], &["x"]);

        let (header, from_demanding) = hello(demanding.clone());
        let refused = choose(&plain, &header, b"tls", &from_demanding).unwrap_err();
        assert!(refused.to_string().contains("update the destination's"), "{refused}");

        let (header, from_plain) = hello(plain);
        let refused = choose(&demanding, &header, b"tls", &from_plain).unwrap_err();
        assert!(refused.to_string().contains("update the source's"), "{refused}");
    }

    #[test]
    fn a_hello_in_another_tls_session_or_with_absurd_numbers_is_refused() {
        let local = capabilities(&["none"], &[], &[]);
        let (header, good) = hello(local.clone());

        assert_eq!(choose(&local, &header, b"other", &good).unwrap_err(), Refusal::Proof);
        let bad_key = Hello { key: "00".into(), ..good.clone() };
        assert_eq!(choose(&local, &header, b"tls", &bad_key).unwrap_err(), Refusal::Key);
        for channels in [0, MAX_RAM_CHANNELS + 1] {
            let absurd = Hello { channels, ..good.clone() };
            assert_eq!(choose(&local, &header, b"tls", &absurd).unwrap_err(), Refusal::Channels(channels));
        }
        let mut long = good.clone();
        long.machine.opening = vec![0; MAX_OPENING + 1];
        assert_eq!(choose(&local, &header, b"tls", &long).unwrap_err(), Refusal::Opening(MAX_OPENING + 1));
        let mut tiny = good;
        tiny.capabilities.packet_size = 12;
        assert_eq!(choose(&local, &header, b"tls", &tiny).unwrap_err(), Refusal::PacketSize(12));
    }

    #[test]
    fn the_packets_of_all_channels_together_are_bounded() {
        let large = Capabilities { packet_size: 16 << 20, ..capabilities(&["none"], &[], &[]) };
        for (ram, devices) in [(1, 0), (1, 63), (2, 5), (64, 0), (64, 63)] {
            let (header, mut hello) = hello(large.clone());
            hello.channels = ram;
            if devices > 0 {
                hello.machine.device_channels = DeviceChannels::Own(devices);
            }
            let (_, chosen) = choose(&large, &header, b"tls", &hello).unwrap();
            let buffered = u64::from(chosen.packet_size) * 2 * u64::from(ram + devices + 1);
            assert!(buffered <= 256 << 20, "{ram} RAM channels, {devices} for devices: {buffered} bytes");
            assert!(chosen.packet_size >= 1 << 20 && chosen.packet_size <= 16 << 20);
        }
    }

    #[test]
    fn a_hello_with_too_many_ram_blocks_or_one_twice_is_refused() {
        let known = capabilities(&["none"], &[], &[]);
        let chosen = |names: Vec<String>| {
            let (header, mut hello) = hello(known.clone());
            let block = |name| Block { name, bytes: 4096, page_size: 4096 };
            hello.machine.blocks = names.into_iter().map(block).collect();
            choose(&known, &header, b"tls", &hello).map(drop)
        };
        let numbered = |count: usize| (0..count).map(|number| format!("dimm-{number}")).collect::<Vec<_>>();
        assert_eq!(chosen(numbered(MAX_BLOCKS)), Ok(()));
        assert_eq!(chosen(numbered(MAX_BLOCKS + 1)), Err(Refusal::Blocks(MAX_BLOCKS + 1)));
        let twice = ["pc.ram", "vga", "pc.ram"].map(str::to_owned);
        assert_eq!(chosen(twice.into()), Err(Refusal::BlockTwice("pc.ram".into())));
        assert_eq!(chosen(vec!["x".repeat(MAX_NAME)]), Ok(()));
        assert_eq!(chosen(vec!["x".repeat(MAX_NAME + 1)]), Err(Refusal::BlockName(MAX_NAME + 1)));
    }

    #[test]
    fn a_choice_that_is_repeated_counts_once() {
        let offered = capabilities(&["none", "zstd"], &["a"], &[]);
        let chosen = capabilities(&["zstd"; 1000], &["a"; 1000], &[]);
        let welcome = Welcome { program: String::new(), chosen };
        assert_eq!(conclude(&offered, &welcome), Ok(capabilities(&["zstd"], &["a"], &[])));
    }

    #[test]
    fn a_destination_that_chooses_what_was_not_offered_is_refused() {
        let offered = capabilities(&["none"], &[], &[]);
        for chosen in [
            capabilities(&["none", "zstd"], &[], &[]),
            capabilities(&["none"], &["y"], &[]),
            Capabilities { packet_size: 1 << 20, ..offered.clone() },
        ] {
            let welcome = Welcome { program: String::new(), chosen };
            assert!(matches!(conclude(&offered, &welcome), Err(Refusal::NotOffered(_))));
        }
    }
}

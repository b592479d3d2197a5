//! Composes the migration stream that a destination QEMU reads in direct mode. It contains no page of RAM.
//!
//! ```text
//! opening   magic, version │ configuration: machine type │ return path, ping │ "ram" begins: names and lengths of the blocks
//! closing   "ram" ends │ the sections of the source's device state │ end │ a description, empty
//! ```
//! The opening is sent while the guest still runs at its source. QEMU then refuses a machine type or a RAM block that does not fit, and
//! resizes blocks before a page is placed in them. QEMU answers the ping once it has read all of the opening.
//!
//! The device state is what `xen-save-devices-state` writes (`qemu_save_device_state` in migration/savevm.c): magic and version,
//! the sections of all devices but RAM, an end mark. Formats: migration/savevm.c, migration/ram.c, docs/devel/migration of QEMU.

use std::io::{self, Read, Write};

/// `QEVM`, and the version of the format.
const MAGIC: [u8; 8] = *b"QEVM\0\0\0\x03";
const SECTION_START: u8 = 0x01;
const SECTION_END: u8 = 0x03;
const DESCRIPTION: u8 = 0x06;
const CONFIGURATION: u8 = 0x07;
const COMMAND: u8 = 0x08;
const SECTION_FOOTER: u8 = 0x7e;
/// Number of the section `ram`. QEMU knows sections by their names, and by their numbers only once they have begun.
const RAM_SECTION: u32 = 0x7fff;
/// Version of the section `ram`.
const RAM_VERSION: u32 = 4;
/// `RAM_SAVE_FLAG_MEM_SIZE`, in the lower bits of the sum of all blocks' lengths.
const FLAG_LENGTHS: u64 = 0x04;
/// `RAM_SAVE_FLAG_EOS`.
const FLAG_END: u64 = 0x10;
/// `MIG_CMD_OPEN_RETURN_PATH` and `MIG_CMD_PING`.
const OPEN_RETURN_PATH: u16 = 1;
const PING: u16 = 2;
/// Longest name of a RAM block (`RAMBlock.idstr` has 256 bytes, the last of them 0).
const MAX_NAME: usize = 255;
/// The subsection of the vCPU state of a guest that runs, or has prepared to run, nested guests (`vmstate_nested_state` in
/// target/i386/machine.c).
const NESTED_STATE: &[u8] = b"cpu/nested_state";

/// The value of the ping, which the destination's QEMU sends back once it has read the opening.
pub(super) const PING_VALUE: u32 = 1;

/// A block of RAM as the stream names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BlockLength<'a> {
    pub(super) name: &'a str,
    /// Bytes in use.
    pub(super) used: u64,
}

/// Returns the opening of the stream.
///
/// # Errors
/// A block's name is empty or longer than QEMU permits.
pub(super) fn opening(machine_type: &str, blocks: &[BlockLength<'_>]) -> Result<Vec<u8>, String> {
    let mut stream = MAGIC.to_vec();
    stream.push(CONFIGURATION);
    stream.extend((machine_type.len() as u32).to_be_bytes());
    stream.extend(machine_type.bytes());
    command(&mut stream, OPEN_RETURN_PATH, &[]);
    stream.push(SECTION_START);
    stream.extend(RAM_SECTION.to_be_bytes());
    stream.extend(b"\x03ram");
    stream.extend(0u32.to_be_bytes());
    stream.extend(RAM_VERSION.to_be_bytes());
    let total: u64 = blocks.iter().map(|block| block.used).sum();
    stream.extend((total | FLAG_LENGTHS).to_be_bytes());
    for BlockLength { name, used } in blocks {
        let length = u8::try_from(name.len()).ok().filter(|length| usize::from(*length) <= MAX_NAME && *length > 0);
        stream.push(length.ok_or_else(|| format!("a RAM block's name has {} bytes", name.len()))?);
        stream.extend(name.bytes());
        stream.extend(used.to_be_bytes());
    }
    stream.extend(FLAG_END.to_be_bytes());
    footer(&mut stream, RAM_SECTION);
    command(&mut stream, PING, &PING_VALUE.to_be_bytes());
    Ok(stream)
}

/// Writes the closing of the stream. `state` is the device state that the source's QEMU has saved.
pub(super) fn close(mut state: impl Read, mut stream: impl Write) -> io::Result<()> {
    let mut magic = [0; MAGIC.len()];
    state.read_exact(&mut magic)?;
    if magic != MAGIC {
        let message = format!("the device state begins with {magic:02x?}, which no known QEMU writes");
        return Err(io::Error::new(io::ErrorKind::InvalidData, message));
    }
    let mut end = vec![SECTION_END];
    end.extend(RAM_SECTION.to_be_bytes());
    end.extend(FLAG_END.to_be_bytes());
    footer(&mut end, RAM_SECTION);
    stream.write_all(&end)?;
    io::copy(&mut state, &mut stream)?;
    stream.write_all(&[DESCRIPTION, 0, 0, 0, 2, b'{', b'}'])
}

/// Returns whether the device state is of a guest with nested guests.
pub(super) fn has_nested_guest(state: &[u8]) -> bool {
    state.windows(NESTED_STATE.len()).any(|part| part == NESTED_STATE)
}

fn command(stream: &mut Vec<u8>, command: u16, data: &[u8]) {
    stream.push(COMMAND);
    stream.extend(command.to_be_bytes());
    stream.extend((data.len() as u16).to_be_bytes());
    stream.extend(data);
}

fn footer(stream: &mut Vec<u8>, section: u32) {
    stream.push(SECTION_FOOTER);
    stream.extend(section.to_be_bytes());
}

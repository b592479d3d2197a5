//! Composes the migration stream that a destination QEMU reads in direct mode. It contains no page of the guest.
//!
//! ```text
//! opening   magic, version │ configuration: machine type │ return path │ "ram" begins: names and lengths of the blocks │ ping
//! closing   "ram" ends │ the sections of the source's device state │ end │ a description, empty
//! ```
//! The opening is sent while the guest still runs at its source. QEMU then refuses a machine type or a RAM block that does not fit, and
//! resizes blocks before a page is placed in them. QEMU answers the ping once it has read all of the opening.
//!
//! A QEMU that libvirt has started reads the same stream from a FIFO, where it cannot answer: its opening has neither return path nor ping.
//! After it come pages by which the blocks are found in QEMU's memory ([`pages`]).
//!
//! The device state is what `xen-save-devices-state` writes (`qemu_save_device_state` in migration/savevm.c): magic and version,
//! the sections of all devices but RAM, an end mark. Formats: migration/savevm.c, migration/ram.c, docs/devel/migration of QEMU.

use std::io::{self, Read, Write};

use sterna_memory::PAGE_SIZE;
use sterna_wire::text::cleaned;

/// `QEVM`, and the version of the format.
const MAGIC: [u8; 8] = *b"QEVM\0\0\0\x03";
const SECTION_START: u8 = 0x01;
const SECTION_PART: u8 = 0x02;
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
/// `RAM_SAVE_FLAG_PAGE`, in the lower bits of a page's offset.
const FLAG_PAGE: u64 = 0x08;
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

/// Returns the opening of a stream whose reader can answer.
///
/// # Errors
/// A name or a length is not one that QEMU permits.
pub(super) fn opening(machine_type: &str, blocks: &[BlockLength<'_>]) -> Result<Vec<u8>, String> {
    let mut stream = begin(machine_type)?;
    command(&mut stream, OPEN_RETURN_PATH, &[]);
    begin_ram(&mut stream, blocks)?;
    command(&mut stream, PING, &PING_VALUE.to_be_bytes());
    Ok(stream)
}

/// Returns the opening of a stream whose reader cannot answer: a FIFO, or a file.
///
/// # Errors
/// A name or a length is not one that QEMU permits.
pub(super) fn silent_opening(machine_type: &str, blocks: &[BlockLength<'_>]) -> Result<Vec<u8>, String> {
    let mut stream = begin(machine_type)?;
    begin_ram(&mut stream, blocks)?;
    Ok(stream)
}

/// A page of RAM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Page<'a> {
    /// The name of its block, as in the opening.
    pub(super) block: &'a str,
    /// Where it begins in the block, in bytes: a multiple of the page size.
    pub(super) offset: u64,
    pub(super) content: &'a [u8; PAGE_SIZE],
}

/// Returns the part of the stream that has QEMU write these pages. It stands between the opening and the closing.
///
/// # Errors
/// A block's name is not one that QEMU permits.
///
/// # Panics
/// If an offset is no multiple of the page size.
pub(super) fn pages(pages: &[Page<'_>]) -> Result<Vec<u8>, String> {
    let mut stream = Vec::with_capacity(pages.len() * (PAGE_SIZE + 32));
    stream.push(SECTION_PART);
    stream.extend(RAM_SECTION.to_be_bytes());
    for Page { block, offset, content } in pages {
        assert_eq!(offset % PAGE_SIZE as u64, 0, "pages begin where pages begin");
        stream.extend((offset | FLAG_PAGE).to_be_bytes());
        name(&mut stream, block)?;
        stream.extend(*content);
    }
    stream.extend(FLAG_END.to_be_bytes());
    footer(&mut stream, RAM_SECTION);
    Ok(stream)
}

fn begin(machine_type: &str) -> Result<Vec<u8>, String> {
    if machine_type.is_empty() || machine_type.len() > MAX_NAME {
        return Err(format!("a machine type's name has {} bytes", machine_type.len()));
    }
    let mut stream = MAGIC.to_vec();
    stream.push(CONFIGURATION);
    stream.extend((machine_type.len() as u32).to_be_bytes());
    stream.extend(machine_type.bytes());
    Ok(stream)
}

fn begin_ram(stream: &mut Vec<u8>, blocks: &[BlockLength<'_>]) -> Result<(), String> {
    stream.push(SECTION_START);
    stream.extend(RAM_SECTION.to_be_bytes());
    stream.extend(b"\x03ram");
    stream.extend(0u32.to_be_bytes());
    stream.extend(RAM_VERSION.to_be_bytes());
    let mut total = 0u64;
    for BlockLength { name, used } in blocks {
        if *used == 0 || used % PAGE_SIZE as u64 != 0 {
            return Err(format!("RAM block {} has {used} bytes, which are no whole pages", cleaned(name)));
        }
        total = total.checked_add(*used).ok_or("the RAM blocks are longer than any machine's memory")?;
    }
    stream.extend((total | FLAG_LENGTHS).to_be_bytes());
    for block in blocks {
        name(stream, block.name)?;
        stream.extend(block.used.to_be_bytes());
    }
    stream.extend(FLAG_END.to_be_bytes());
    footer(stream, RAM_SECTION);
    Ok(())
}

/// Writes a block's name.
fn name(stream: &mut Vec<u8>, name: &str) -> Result<(), String> {
    let length = u8::try_from(name.len()).ok().filter(|length| usize::from(*length) <= MAX_NAME && *length > 0);
    stream.push(length.ok_or_else(|| format!("a RAM block's name has {} bytes", name.len()))?);
    stream.extend(name.bytes());
    Ok(())
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

#[cfg(test)]
mod tests {
    use proptest::collection::{btree_map, vec};
    use proptest::prelude::*;

    use super::*;
    use crate::stream::{Event, MainReader, SectionKind};

    const DEVICES: &[u8] = b"QEVM\0\0\0\x03devices\0";

    fn blocks(lengths: &[(String, u64)]) -> Vec<BlockLength<'_>> {
        lengths.iter().map(|(name, used)| BlockLength { name, used: *used }).collect()
    }

    /// What a reader finds in a stream: the machine type, the blocks, the pages, and the bytes after RAM.
    #[derive(Debug, Default, PartialEq, Eq)]
    struct Found {
        machine_type: String,
        blocks: Vec<(String, u64)>,
        pages: Vec<(String, u64, Vec<u8>)>,
        commands: usize,
        rest: Vec<u8>,
    }

    /// Reads a stream as QEMU does.
    fn read(stream: &[u8]) -> Found {
        let (mut reader, mut found, mut page) = (MainReader::new(stream), Found::default(), vec![0; PAGE_SIZE]);
        loop {
            match reader.next_event(&mut page).unwrap() {
                Event::Header => {}
                Event::Configuration(configuration) => found.machine_type = configuration.machine,
                Event::Command(_) => found.commands += 1,
                Event::RamStart(start) => {
                    found.blocks = start.blocks.into_iter().map(|block| (block.name, block.used_length)).collect();
                }
                Event::Page { block, offset } => {
                    found.pages.push((found.blocks[block].0.clone(), offset, page.clone()));
                }
                Event::EndOfSection { kind } => assert!(kind != SectionKind::Complete || found.rest.is_empty()),
                Event::RamEnd => break,
                other => panic!("a stream of ours has {}", other.name()),
            }
        }
        let mut piece = [0; 256];
        loop {
            match reader.read_opaque(&mut piece).unwrap() {
                0 => return found,
                length => found.rest.extend(&piece[..length]),
            }
        }
    }

    #[test]
    fn only_the_opening_for_a_reader_that_can_answer_asks_for_an_answer() {
        let lengths = [("pc.ram".to_owned(), 0x2000)];
        for (opening, commands) in [(opening("pc", &blocks(&lengths)), 2), (silent_opening("pc", &blocks(&lengths)), 0)]
        {
            let mut stream = opening.unwrap();
            close(DEVICES, &mut stream).unwrap();
            let found = read(&stream);
            assert_eq!((found.commands, &found.blocks[..]), (commands, &lengths[..]));
        }
    }

    #[test]
    fn names_and_lengths_that_qemu_does_not_permit_are_refused() {
        let block = |name: &str, used| silent_opening("pc", &[BlockLength { name, used }]).map(drop);
        let long = "x".repeat(256);
        assert_eq!(block("ram", 4096), Ok(()));
        assert_eq!(block("", 4096).unwrap_err(), "a RAM block's name has 0 bytes");
        assert_eq!(block(&long, 4096).unwrap_err(), "a RAM block's name has 256 bytes");
        assert_eq!(block("ram", 4097).unwrap_err(), "RAM block ram has 4097 bytes, which are no whole pages");
        assert_eq!(block("ram", 0).unwrap_err(), "RAM block ram has 0 bytes, which are no whole pages");
        assert!(silent_opening("", &[]).is_err() && silent_opening(&long, &[]).is_err());
        let huge = [1, 2].map(|_| BlockLength { name: "ram", used: 1 << 63 });
        assert!(silent_opening("pc", &huge).unwrap_err().contains("longer than any machine's memory"));
        let page = Page { block: "", offset: 0, content: &[0; PAGE_SIZE] };
        assert_eq!(pages(&[page]).unwrap_err(), "a RAM block's name has 0 bytes");
    }

    #[test]
    fn a_device_state_that_begins_otherwise_is_refused() {
        let error = close(&b"QEVM\0\0\0\x04"[..], io::sink()).unwrap_err();
        assert!(error.to_string().contains("which no known QEMU writes"), "{error}");
        assert!(close(&b"QEVM"[..], io::sink()).is_err());
    }

    proptest! {
        #[test]
        fn a_stream_is_read_as_it_was_written(
            machine_type in "[a-z0-9.-]{1,60}",
            lengths in btree_map("[a-zA-Z0-9/@.:-]{1,255}", 1..1u64 << 24, 1..12),
            chosen in vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), any::<u8>()), 0..20),
            devices: Vec<u8>,
        ) {
            let lengths: Vec<(String, u64)> =
                lengths.into_iter().map(|(name, pages)| (name, pages * PAGE_SIZE as u64)).collect();
            let content: Vec<[u8; PAGE_SIZE]> = chosen.iter().map(|(_, _, byte)| [*byte; PAGE_SIZE]).collect();
            let written: Vec<Page<'_>> = chosen.iter().zip(&content).map(|((block, page, _), content)| {
                let (name, used) = &lengths[block.index(lengths.len())];
                let offset = page.index((used / PAGE_SIZE as u64) as usize) as u64 * PAGE_SIZE as u64;
                Page { block: name, offset, content }
            }).collect();

            let mut stream = silent_opening(&machine_type, &blocks(&lengths)).unwrap();
            // Several parts, as the destination may write.
            for part in written.chunks(7) {
                stream.extend(pages(part).unwrap());
            }
            let state: Vec<u8> = MAGIC.into_iter().chain(devices.iter().copied()).collect();
            close(&state[..], &mut stream).unwrap();

            let found = read(&stream);
            let pages: Vec<_> =
                written.iter().map(|page| (page.block.to_owned(), page.offset, page.content.to_vec())).collect();
            prop_assert_eq!(found.pages, pages);
            prop_assert_eq!((found.machine_type, found.blocks, found.commands), (machine_type, lengths, 0));
            let rest: Vec<u8> = devices.into_iter().chain(*b"\x06\0\0\0\x02{}").collect();
            prop_assert_eq!(found.rest, rest);
        }
    }
}

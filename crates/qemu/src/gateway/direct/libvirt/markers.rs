//! Finds RAM blocks in the memory of a QEMU whose monitor cannot be asked.
//!
//! The stream that QEMU reads has a random page for the beginning of each block, and another one for its end. Where the first one
//! appears in QEMU's memory, there the block begins; the second one proves that the block is there in its full length. Nothing is guessed
//! by sizes or by the order of mappings. The pages are overwritten, or cleared, as any others before the guest runs.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use sterna_memory::PAGE_SIZE;
use sterna_memory::mappings::Mapping;
use sterna_wire::control::Block;

use super::super::stream::{self, Page};

/// Bytes of randomness in a marker. The page repeats them.
const RANDOM: usize = 32;
/// Bytes of a mapping up to which all of its pages are searched. Larger blocks begin where their mapping begins: QEMU maps each block by
/// itself, with a page that is not accessible after it.
const SEARCHED: usize = 64 << 20;
/// Bytes that are read at a time.
const PIECE: usize = 1 << 20;

/// No address of a process is as high as this: Linux leaves the upper half to itself.
const ADDRESSES: u64 = 1 << 63;

type Marker = [u8; PAGE_SIZE];

/// The markers of a guest's RAM blocks.
pub(super) struct Markers {
    blocks: Vec<MarkedBlock>,
}

struct MarkedBlock {
    name: String,
    bytes: u64,
    first: Box<Marker>,
    /// None of a block that has one page only.
    last: Option<Box<Marker>>,
}

impl Markers {
    /// Makes markers for the blocks.
    ///
    /// # Errors
    /// The kernel returns no random numbers.
    pub(super) fn new(blocks: &[Block]) -> io::Result<Self> {
        let marked = |block: &Block| {
            let last = if block.bytes > PAGE_SIZE as u64 { Some(marker()?) } else { None };
            Ok(MarkedBlock { name: block.name.clone(), bytes: block.bytes, first: marker()?, last })
        };
        Ok(Self { blocks: blocks.iter().map(marked).collect::<io::Result<_>>()? })
    }

    /// Returns the part of the stream that has QEMU write the markers.
    ///
    /// # Errors
    /// A block's name is not one that QEMU permits.
    pub(super) fn stream(&self) -> Result<Vec<u8>, String> {
        let pages = self.blocks.iter().flat_map(|MarkedBlock { name, bytes, first, last }| {
            let page = |offset, content| Page { block: name, offset, content };
            let last = last.iter().map(move |last| page(bytes - PAGE_SIZE as u64, &**last));
            std::iter::once(page(0, &**first)).chain(last)
        });
        stream::pages(&pages.collect::<Vec<_>>())
    }

    /// Finds the blocks in the memory of process `pid`. Returns the address of each, in the blocks' order; none while QEMU has not read all of
    /// the markers, and if it is another process, or has ended.
    ///
    /// # Errors
    /// The memory cannot be read, or a block is there twice.
    pub(super) fn find(&self, pid: i32) -> Result<Option<Vec<u64>>, String> {
        let unread = |error: &io::Error| format!("the memory of process {pid} cannot be read: {error}");
        match self.search(pid) {
            // libvirt starts processes that have the image open for a moment.
            Err(Failure::Unread(error)) if has_ended(&error) => Ok(None),
            Err(Failure::Unread(error)) => Err(unread(&error)),
            Err(Failure::Twice(reason)) => Err(reason),
            Ok(found) => Ok(found),
        }
    }

    fn search(&self, pid: i32) -> Result<Option<Vec<u64>>, Failure> {
        let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
        let memory = File::open(format!("/proc/{pid}/mem"))?;
        let firsts: HashMap<&[u8], usize> =
            self.blocks.iter().enumerate().map(|(at, block)| (&block.first[..RANDOM], at)).collect();
        let mut found = vec![None; self.blocks.len()];
        let mut piece = vec![0; PIECE];
        for mapping in maps.lines().filter_map(Mapping::parse).filter(|mapping| mapping.writable) {
            let searched =
                if mapping.end - mapping.start <= SEARCHED { mapping.end } else { mapping.start + PAGE_SIZE };
            let mut address = mapping.start;
            while address < searched {
                let wanted = PIECE.min(searched - address);
                let Some(read) = read(&memory, address, &mut piece[..wanted])? else { break };
                for (number, page) in piece[..read].chunks_exact(PAGE_SIZE).enumerate() {
                    let Some(&at) = firsts.get(&page[..RANDOM]) else { continue };
                    let begin = (address + number * PAGE_SIZE) as u64;
                    if page != &self.blocks[at].first[..] || !self.blocks[at].ends(&memory, begin) {
                        continue;
                    }
                    if let Some(other) = found[at].replace(begin) {
                        let name = &self.blocks[at].name;
                        let reason = format!("RAM block {name} is at two addresses of QEMU, {other:#x} and {begin:#x}");
                        return Err(Failure::Twice(reason));
                    }
                }
                address += read.max(PAGE_SIZE);
            }
        }
        Ok(found.into_iter().collect())
    }
}

/// Why the blocks of a process were not found.
enum Failure {
    Unread(io::Error),
    Twice(String),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Unread(error)
    }
}

/// Returns whether a file of `/proc/PID` fails in this way because the process has ended.
fn has_ended(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::NOENT | Errno::SRCH))
}

impl MarkedBlock {
    /// Returns whether the block that begins at this address ends where it should.
    fn ends(&self, memory: &File, begin: u64) -> bool {
        let Some(last) = &self.last else { return true };
        let mut page = [0; PAGE_SIZE];
        // The length comes from the source.
        let Some(end) = begin.checked_add(self.bytes).filter(|end| *end <= ADDRESSES) else { return false };
        let address = (end - PAGE_SIZE as u64) as usize;
        matches!(read(memory, address, &mut page), Ok(Some(PAGE_SIZE))) && page[..] == last[..]
    }
}

/// Reads memory of another process. Returns none where there is none, or none that can be read, as of a device.
fn read(memory: &File, address: usize, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    match memory.read_at(buffer, address as u64) {
        Ok(0) => Ok(None),
        Ok(length) => Ok(Some(length)),
        Err(error) if matches!(Errno::from_io_error(&error), Some(Errno::IO | Errno::FAULT)) => Ok(None),
        Err(error) => Err(error),
    }
}

fn marker() -> io::Result<Box<Marker>> {
    let mut random = [0; RANDOM];
    let mut filled = 0;
    while filled < RANDOM {
        filled += getrandom(&mut random[filled..], GetRandomFlags::empty())?;
    }
    let mut marker = Box::new([0; PAGE_SIZE]);
    marker.chunks_exact_mut(RANDOM).for_each(|part| part.copy_from_slice(&random));
    Ok(marker)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(name: &str, bytes: usize) -> Block {
        Block { name: name.into(), bytes: bytes as u64, page_size: PAGE_SIZE as u64 }
    }

    /// Memory of this process, of whole pages.
    struct Memory(Vec<[u8; PAGE_SIZE]>, usize);

    impl Memory {
        fn new(pages: usize) -> Self {
            let memory = vec![[0; PAGE_SIZE]; pages + 1];
            let begin = memory.as_ptr().addr().next_multiple_of(PAGE_SIZE) - memory.as_ptr().addr();
            Self(memory, begin)
        }

        fn address(&self) -> u64 {
            (self.0.as_ptr().addr() + self.1) as u64
        }

        fn write(&mut self, page: usize, content: &Marker) {
            let begin = self.1 + page * PAGE_SIZE;
            self.0.as_flattened_mut()[begin..begin + PAGE_SIZE].copy_from_slice(content);
        }
    }

    fn own() -> i32 {
        std::process::id() as i32
    }

    #[test]
    fn blocks_are_found_once_both_markers_of_each_are_there() {
        // Away from the markers themselves, which are in this process, too.
        let markers = Markers::new(&[block("ram", 8 * PAGE_SIZE), block("rom", PAGE_SIZE)]).unwrap();
        let (mut ram, mut rom) = (Memory::new(8), Memory::new(1));
        ram.write(0, &markers.blocks[0].first);
        rom.write(0, &markers.blocks[1].first);
        assert_eq!(markers.find(own()).unwrap(), None);
        ram.write(7, markers.blocks[0].last.as_ref().unwrap());
        assert_eq!(markers.find(own()).unwrap(), Some(vec![ram.address(), rom.address()]));
    }

    #[test]
    fn in_a_process_that_has_ended_nothing_is_found() {
        let markers = Markers::new(&[block("rom", PAGE_SIZE)]).unwrap();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id() as i32;
        child.wait().unwrap();
        assert_eq!(markers.find(pid).unwrap(), None);
    }

    #[test]
    fn a_block_that_is_there_twice_is_refused() {
        let markers = Markers::new(&[block("ram", 2 * PAGE_SIZE)]).unwrap();
        let mut copies = [Memory::new(2), Memory::new(2)];
        for copy in &mut copies {
            copy.write(0, &markers.blocks[0].first);
            copy.write(1, markers.blocks[0].last.as_ref().unwrap());
        }
        let error = markers.find(own()).unwrap_err();
        assert!(error.contains("RAM block ram is at two addresses"), "{error}");
    }

    #[test]
    fn a_block_that_would_end_beyond_all_addresses_is_not_found() {
        for bytes in [u64::MAX - (PAGE_SIZE as u64 - 1), 1 << 63] {
            let markers = Markers::new(&[Block { bytes, ..block("ram", 0) }]).unwrap();
            let mut ram = Memory::new(1);
            ram.write(0, &markers.blocks[0].first);
            assert_eq!(markers.find(own()).unwrap(), None);
        }
    }

    #[test]
    fn markers_differ_and_their_stream_names_every_block() {
        let markers = Markers::new(&[block("a", 2 * PAGE_SIZE), block("b", PAGE_SIZE)]).unwrap();
        let [a, b] = &markers.blocks[..] else { unreachable!() };
        assert!(a.first != b.first && Some(&a.first) != a.last.as_ref() && b.last.is_none());
        let stream = markers.stream().unwrap();
        assert!(stream.len() > 3 * PAGE_SIZE && stream.windows(2).any(|part| part == b"\x01b"));
    }
}

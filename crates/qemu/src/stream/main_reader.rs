//! Reads the main channel of a source QEMU, one event at a time, up to the end of RAM; the rest is opaque.
//!
//! After the RAM section's end come the sections of all other devices. Their ends are not marked, and only the destination QEMU
//! can read them, so [`MainReader::read_opaque`] passes them on unread.

use std::io::Read;

use super::blocks::{self, RamStart};
use super::command::{self, Command};
use super::configuration::Configuration;
use super::device::{DevicePiece, DeviceSection, is_vfio};
use super::error::{printable, within};
use super::input::Input;
use super::{MAIN_MAGIC, MAIN_VERSION, StreamError};

pub(crate) const SECTION_START: u8 = 0x01;
pub(crate) const SECTION_PART: u8 = 0x02;
pub(crate) const SECTION_END: u8 = 0x03;
pub(crate) const SECTION_FULL: u8 = 0x04;
pub(crate) const SECTION_FOOTER: u8 = 0x7e;
const RAM_SECTION: &str = "ram";
const RAM_VERSION: u32 = 4;

// Record flags, from QEMU's migration/ram.h. They lie in the ten low bits of a page's offset.
pub(crate) const FLAG_ZERO: u64 = 0x02;
pub(crate) const FLAG_PAGE: u64 = 0x08;
pub(crate) const FLAG_EOS: u64 = 0x10;
pub(crate) const FLAG_CONTINUE: u64 = 0x20;
const FLAG_XBZRLE: u64 = 0x40;
const FLAG_HOOK: u64 = 0x80;
const FLAG_COMPRESS_PAGE: u64 = 0x100;
pub(crate) const FLAG_MULTIFD_FLUSH: u64 = 0x200;

/// Maximum number of PCI devices in one guest; each may have one section before the end of RAM.
const DEVICE_SECTIONS_LIMIT: usize = 1024;

/// The next item of the main channel.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// The eight bytes at the start of every stream. Write them to the destination at once: until it has them, it may not
    /// serve its other channels.
    Header,
    /// The configuration section.
    Configuration(Configuration),
    /// A command.
    Command(Command),
    /// The RAM setup section has started.
    RamStart(RamStart),
    /// A page; its bytes are in the caller's buffer.
    Page {
        /// Index of the block in [`RamStart::blocks`].
        block: usize,
        /// Offset in the block, bytes.
        offset: u64,
    },
    /// A page of zeros.
    ZeroPage {
        /// Index of the block in [`RamStart::blocks`].
        block: usize,
        /// Offset in the block, bytes.
        offset: u64,
    },
    /// Each multifd channel delivers one SYNC before the main channel may continue. Without multifd it has no meaning: QEMU
    /// 8.1 sends it even then.
    Flush,
    /// A RAM section has ended. Machine types up to 8.0: each multifd channel delivers one SYNC before the main channel
    /// may go on. Comes before the section's footer is read, because QEMU may hold the footer back until it has sent
    /// pages that wait for this sync point.
    EndOfSection {
        /// Which section.
        kind: SectionKind,
    },
    /// Part of a device's own section between the RAM sections, to be passed on verbatim.
    DeviceSection(DevicePiece),
    /// All RAM has been sent; from here on, only [`MainReader::read_opaque`] continues. Every further call returns this again.
    RamEnd,
}

impl Event {
    /// Returns its name, for messages.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Header => "the stream's header",
            Self::Configuration(_) => "a configuration section",
            Self::Command(_) => "a command",
            Self::RamStart(_) => "a RAM setup section",
            Self::Page { .. } => "a page",
            Self::ZeroPage { .. } => "a page of zeros",
            Self::Flush => "a sync point",
            Self::EndOfSection { .. } => "the end of a RAM section",
            Self::DeviceSection(_) => "a device's section",
            Self::RamEnd => "the end of RAM",
        }
    }
}

/// Which of the RAM sections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SectionKind {
    /// The first, with the block list.
    Setup,
    /// One of any number, while the guest runs.
    Iterate,
    /// The last, after the guest has stopped.
    Complete,
}

#[derive(Debug, Clone, Copy)]
enum State {
    Header,
    Configuration,
    /// Between sections.
    Between,
    /// RAM setup: the block list has not been read yet.
    BlockList {
        instance_id: u32,
        version_id: u32,
    },
    /// Inside a RAM section, between records.
    Records(SectionKind),
    /// A RAM section has ended, its footer comes.
    Footer(SectionKind),
    Device(DeviceSection),
    Opaque,
}

/// Pages gathered by [`MainReader::next_pages`]; reused from call to call.
#[derive(Debug, Default)]
pub struct PageBatch {
    /// Index of the block in [`RamStart::blocks`]; all pages are of this block.
    pub block: usize,
    /// Offset in the block of each page, bytes; the pages are in the caller's buffer in this order.
    pub offsets: Vec<u64>,
}

/// Pull parser of the main channel.
#[derive(Debug)]
pub struct MainReader<R> {
    input: Input<R>,
    state: State,
    page_size: usize,
    ignores_shared: bool,
    ram_section: Option<u32>,
    device_sections: Vec<u32>,
    /// Name and length of each block.
    blocks: Vec<(String, u64)>,
    /// The block to which CONTINUE refers. QEMU keeps it from section to section.
    current_block: Option<usize>,
    setup_had_flush: bool,
}

impl<R: Read> MainReader<R> {
    /// Starts at the first byte of the channel.
    pub fn new(reader: R) -> Self {
        Self {
            input: Input::new(reader),
            state: State::Header,
            page_size: 4096,
            ignores_shared: false,
            ram_section: None,
            device_sections: Vec::new(),
            blocks: Vec::new(),
            current_block: None,
            setup_had_flush: false,
        }
    }

    /// Returns the guest page size, bytes; final once the configuration has been read.
    #[must_use]
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Returns whether the RAM setup section had a FLUSH record: then, with multifd on, FLUSH records are the sync points,
    /// else each section's end is. Final after the setup section.
    #[must_use]
    pub fn setup_had_flush(&self) -> bool {
        self.setup_had_flush
    }

    /// Returns the underlying reader, for example to shut its socket down.
    #[must_use]
    pub fn get_ref(&self) -> &R {
        self.input.get_ref()
    }

    /// Reads up to the next event. A page's bytes go to the start of `page`, which must have room for one.
    ///
    /// # Errors
    /// [`StreamError`]; the reader is of no use afterwards. [`StreamError::Misuse`] when `page` is too short.
    pub fn next_event(&mut self, page: &mut [u8]) -> Result<Event, StreamError> {
        loop {
            let event = match self.state {
                State::Header => Some(self.header()?),
                State::Configuration => Some(self.configuration()?),
                State::Between => self.section_or_command()?,
                State::BlockList { instance_id, version_id } => Some(self.block_list(instance_id, version_id)?),
                State::Records(kind) => Some(self.record(kind, page)?),
                State::Footer(kind) => {
                    self.footer(self.ram_section.unwrap_or(0))?;
                    self.state = if kind == SectionKind::Complete { State::Opaque } else { State::Between };
                    None
                }
                State::Device(section) => Some(self.device(section)?),
                State::Opaque => Some(Event::RamEnd),
            };
            if let Some(event) = event {
                return Ok(event);
            }
        }
    }

    /// Reads the next pages into `buffer`, as many as fit and are of the same block, up to the first record that is not such a
    /// page, which is left for [`next_event`](Self::next_event). Returns the number of pages; 0 if the next record is not a
    /// page.
    ///
    /// May wait for a record after the last page. QEMU always sends one soon: it flushes its buffer at the end of each
    /// section, never between a page and the next record.
    ///
    /// # Errors
    /// As [`next_event`](Self::next_event).
    pub fn next_pages(&mut self, buffer: &mut [u8], batch: &mut PageBatch) -> Result<usize, StreamError> {
        batch.offsets.clear();
        let State::Records(SectionKind::Iterate | SectionKind::Complete) = self.state else { return Ok(0) };
        if buffer.len() < self.page_size {
            return Err(StreamError::Misuse("the page buffer is shorter than one page"));
        }
        for page in buffer.chunks_exact_mut(self.page_size) {
            let Some(record) = self.input.peek::<8>("RAM record")? else { break };
            let record = u64::from_be_bytes(record);
            let flags = record & self.flag_mask();
            let goes_on = flags == FLAG_PAGE | FLAG_CONTINUE;
            if flags & !FLAG_CONTINUE != FLAG_PAGE || (!batch.offsets.is_empty() && !goes_on) {
                break;
            }
            self.input.be64("RAM record")?;
            batch.block = self.page_block(record)?;
            self.input.take(page, "page")?;
            batch.offsets.push(record & !self.flag_mask());
        }
        Ok(batch.offsets.len())
    }

    /// Reads bytes after the end of RAM, unchanged; returns 0 at the end of the stream. With a return path, the source does not
    /// end the stream until it has received SHUT there.
    ///
    /// # Errors
    /// [`StreamError::Io`], or [`StreamError::Misuse`] before [`Event::RamEnd`].
    pub fn read_opaque(&mut self, buffer: &mut [u8]) -> Result<usize, StreamError> {
        match self.state {
            State::Opaque => self.input.read_some(buffer, "reading device state"),
            _ => Err(StreamError::Misuse("opaque bytes begin after the end of RAM")),
        }
    }

    fn flag_mask(&self) -> u64 {
        self.page_size as u64 - 1
    }

    fn header(&mut self) -> Result<Event, StreamError> {
        let magic = self.input.be32("stream header")?;
        if magic != MAIN_MAGIC {
            let (found, expected) = (magic.into(), MAIN_MAGIC.into());
            return Err(StreamError::Unexpected { what: "migration stream magic", found, expected });
        }
        let version = self.input.be32("stream header")?;
        if version != MAIN_VERSION {
            let (found, expected) = (version.into(), MAIN_VERSION.into());
            return Err(StreamError::Unexpected { what: "migration stream version", found, expected });
        }
        self.state = State::Configuration;
        Ok(Event::Header)
    }

    fn configuration(&mut self) -> Result<Event, StreamError> {
        let configuration = Configuration::read(&mut self.input)?;
        self.page_size = configuration.page_size();
        self.ignores_shared = configuration.ignores_shared();
        self.state = State::Between;
        Ok(Event::Configuration(configuration))
    }

    fn section_or_command(&mut self) -> Result<Option<Event>, StreamError> {
        let [kind] = self.input.peek("section type")?.ok_or(StreamError::Truncated { reading: "section type" })?;
        if kind == command::TYPE {
            return Ok(Some(Event::Command(Command::read(&mut self.input)?)));
        }
        self.input.begin_capture();
        self.input.u8("section type")?;
        match kind {
            SECTION_START | SECTION_FULL => self.section_start(kind),
            SECTION_PART | SECTION_END => self.section_part(kind),
            0x00 => Err(StreamError::Malformed("the stream says it is complete before the end of RAM".into())),
            other => Err(StreamError::Malformed(format!("section type {other:#x}"))),
        }
    }

    fn section_start(&mut self, kind: u8) -> Result<Option<Event>, StreamError> {
        const READING: &str = "section header";
        let section_id = self.input.be32(READING)?;
        let mut name = [0; 255];
        let name = printable("section name", self.input.counted(&mut name, READING)?)?;
        let instance_id = self.input.be32(READING)?;
        let version_id = self.input.be32(READING)?;
        if self.ram_section == Some(section_id) || self.device_sections.contains(&section_id) {
            return Err(StreamError::Malformed(format!("section {section_id} (\"{name}\") starts twice")));
        }
        if name == RAM_SECTION && kind == SECTION_START {
            if self.ram_section.is_some() || version_id != RAM_VERSION {
                return Err(StreamError::Malformed(format!(
                    "a second RAM section, or its version {version_id} is new"
                )));
            }
            self.input.end_capture();
            self.ram_section = Some(section_id);
            self.state = State::BlockList { instance_id, version_id };
            return Ok(None);
        }
        if is_vfio(name) && kind == SECTION_START {
            let count = self.device_sections.len() as u64 + 1;
            within("number of device sections", count, DEVICE_SECTIONS_LIMIT as u64)?;
            self.device_sections.push(section_id);
            return self.device_piece_start(section_id).map(Some);
        }
        Err(refused_section(name))
    }

    fn section_part(&mut self, kind: u8) -> Result<Option<Event>, StreamError> {
        let section_id = self.input.be32("section header")?;
        if self.ram_section == Some(section_id) {
            self.input.end_capture();
            self.state = State::Records(if kind == SECTION_END { SectionKind::Complete } else { SectionKind::Iterate });
            return Ok(None);
        }
        if self.device_sections.contains(&section_id) {
            return self.device_piece_start(section_id).map(Some);
        }
        Err(StreamError::Malformed(format!("section {section_id} goes on but never started")))
    }

    fn block_list(&mut self, instance_id: u32, version_id: u32) -> Result<Event, StreamError> {
        let blocks = blocks::read_blocks(&mut self.input, self.page_size, self.ignores_shared)?;
        let payload = self.input.end_capture();
        self.blocks = blocks.iter().map(|b| (b.name.clone(), b.used_length)).collect();
        self.state = State::Records(SectionKind::Setup);
        let section_id = self.ram_section.unwrap_or(0);
        Ok(Event::RamStart(RamStart { section_id, instance_id, version_id, blocks, payload }))
    }

    fn record(&mut self, kind: SectionKind, page: &mut [u8]) -> Result<Event, StreamError> {
        let record = self.input.be64("RAM record")?;
        let flags = record & self.flag_mask();
        let offset = record & !self.flag_mask();
        match flags & !FLAG_CONTINUE {
            FLAG_PAGE | FLAG_ZERO if kind == SectionKind::Setup => {
                Err(StreamError::Malformed("a page in the RAM setup section".into()))
            }
            FLAG_PAGE => {
                let page = page
                    .get_mut(..self.page_size)
                    .ok_or(StreamError::Misuse("the page buffer is shorter than one page"))?;
                let block = self.page_block(record)?;
                self.input.take(page, "page")?;
                Ok(Event::Page { block, offset })
            }
            FLAG_ZERO => {
                let block = self.page_block(record)?;
                let fill = self.input.u8("zero page")?;
                if fill != 0 {
                    return Err(StreamError::refused(
                        format!("a page filled with the byte {fill:#x}"),
                        "no QEMU since 1.6 sends it and current ones refuse it",
                    ));
                }
                Ok(Event::ZeroPage { block, offset })
            }
            FLAG_EOS if record == FLAG_EOS => {
                self.state = State::Footer(kind);
                Ok(Event::EndOfSection { kind })
            }
            FLAG_MULTIFD_FLUSH if record == FLAG_MULTIFD_FLUSH => {
                self.setup_had_flush |= kind == SectionKind::Setup;
                Ok(Event::Flush)
            }
            FLAG_XBZRLE => Err(StreamError::refused("an XBZRLE page", "turn the capability xbzrle off")),
            FLAG_COMPRESS_PAGE => Err(StreamError::refused("a compressed page", "turn the capability compress off")),
            FLAG_HOOK => Err(StreamError::refused("an RDMA hook", "do not use RDMA with a gateway")),
            _ => Err(StreamError::Malformed(format!("RAM record {record:#x} has unknown flags"))),
        }
    }

    /// Returns the block of a page record, whose flag word has been read; checks that the page lies inside.
    fn page_block(&mut self, record: u64) -> Result<usize, StreamError> {
        let offset = record & !self.flag_mask();
        let block = if record & FLAG_CONTINUE != 0 {
            self.current_block.ok_or_else(|| {
                StreamError::Malformed("the first page says it is of the same block as the last".into())
            })?
        } else {
            let mut name = [0; 255];
            let name = printable("RAM block name", self.input.counted(&mut name, "RAM block name")?)?;
            self.blocks
                .iter()
                .position(|(known, _)| known == name)
                .ok_or_else(|| StreamError::UnknownBlock(name.to_owned()))?
        };
        self.current_block = Some(block);
        let (name, used_length) = &self.blocks[block];
        // Block lengths are multiples of the page size, so a page that starts inside ends inside.
        if offset >= *used_length {
            return Err(StreamError::PageOutsideBlock { block: name.clone(), offset, used_length: *used_length });
        }
        Ok(block)
    }

    fn footer(&mut self, section_id: u32) -> Result<(), StreamError> {
        let mark = self.input.u8("section footer")?;
        if mark != SECTION_FOOTER {
            return Err(StreamError::refused(
                "a section without footer",
                "the machine type is older than 2.4, or the section's content was not what it seemed",
            ));
        }
        let found = self.input.be32("section footer")?;
        if found != section_id {
            return Err(StreamError::Unexpected {
                what: "section number in a footer",
                found: found.into(),
                expected: section_id.into(),
            });
        }
        Ok(())
    }

    /// Returns the captured header of a device section as its first piece.
    fn device_piece_start(&mut self, section_id: u32) -> Result<Event, StreamError> {
        self.state = State::Device(DeviceSection::new(section_id));
        Ok(Event::DeviceSection(DevicePiece { section_id, bytes: self.input.end_capture(), last: false }))
    }

    fn device(&mut self, mut section: DeviceSection) -> Result<Event, StreamError> {
        self.input.begin_capture();
        let last = section.piece(&mut self.input)?;
        if last {
            self.footer(section.section_id)?;
            self.state = State::Between;
        } else {
            self.state = State::Device(section);
        }
        let bytes = self.input.end_capture();
        Ok(Event::DeviceSection(DevicePiece { section_id: section.section_id, bytes, last }))
    }
}

fn refused_section(name: &str) -> StreamError {
    let advice = match name {
        "block" => "turn the capability block off and copy disks with NBD",
        "dirty-bitmap" => "turn the capability dirty-bitmaps off",
        "slirp" => "use another network back end than user",
        _ if name.contains("virtio-mem") => "virtio-mem sends state before RAM whose length cannot be told",
        _ => "only sections that say where they end can pass before the end of RAM",
    };
    StreamError::refused(format!("section \"{name}\" before the end of RAM"), advice)
}

//! Writes the main channel that a destination QEMU reads.
//!
//! Small records are buffered and written with the next pages or at [`MainWriter::flush`]; page content is never copied.

use std::io::{IoSlice, Write};

use super::blocks::RamStart;
use super::main_reader::{
    FLAG_CONTINUE, FLAG_EOS, FLAG_MULTIFD_FLUSH, FLAG_PAGE, FLAG_ZERO, SECTION_END, SECTION_FOOTER, SECTION_PART,
    SECTION_START,
};
use super::output::write_all_vectored;
use super::{Command, Configuration, DevicePiece, MAIN_MAGIC, MAIN_VERSION, StreamError, WireVariant};

/// Pages per system call: two slices each, within the kernel's 1024.
const PAGES_PER_WRITE: usize = 128;
/// Buffered small records are written out beyond this length, bytes.
const PENDING_LIMIT: usize = 64 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Start,
    Header,
    /// Between sections, before RAM has started.
    BeforeRam,
    /// In the setup section.
    Setup,
    /// Between sections, after RAM has started.
    Between,
    /// In an iterate section.
    Iterate,
    /// In the complete section.
    Complete,
    /// In a device's section.
    Device {
        ram_started: bool,
    },
    Opaque,
}

/// Writer of the main channel. Sections are opened when the first record goes into them.
#[derive(Debug)]
pub struct MainWriter<W> {
    writer: W,
    variant: WireVariant,
    /// Whether the destination has multifd on: only then there are sync points.
    multifd: bool,
    state: State,
    page_size: usize,
    section_id: u32,
    blocks: Vec<(String, u64)>,
    current_block: Option<usize>,
    pending: Vec<u8>,
    /// The position of each page of a call in `pending`: the end of its record header.
    cuts: Vec<usize>,
    sync_points: u64,
}

impl<W: Write> MainWriter<W> {
    /// Starts a channel to a destination QEMU of this variant. `multifd`: whether it has that capability on.
    pub fn new(writer: W, variant: WireVariant, multifd: bool) -> Self {
        Self {
            writer,
            variant,
            multifd,
            state: State::Start,
            page_size: 4096,
            section_id: 0,
            blocks: Vec::new(),
            current_block: None,
            pending: Vec::with_capacity(2 * PENDING_LIMIT),
            cuts: Vec::with_capacity(PAGES_PER_WRITE),
            sync_points: 0,
        }
    }

    /// Returns how many SYNC packets each multifd channel must have carried in all by now. Bring each channel up to it with
    /// [`MultifdWriter::sync_to`](super::MultifdWriter::sync_to) before any page of the next generation. Always 0
    /// without multifd.
    #[must_use]
    pub fn sync_points(&self) -> u64 {
        self.sync_points
    }

    /// Returns the underlying writer, for example to shut its socket down.
    #[must_use]
    pub fn get_ref(&self) -> &W {
        &self.writer
    }

    /// Ends writing and returns the underlying writer, without flushing.
    pub fn into_inner(self) -> W {
        self.writer
    }

    /// Writes the first eight bytes and flushes them. To be done as soon as the channel is connected, before the
    /// multifd channels connect: QEMU up to 7.2 takes the first connection for the main channel, 8.0 to 10.0 look at
    /// its first bytes and stop everything until they come.
    ///
    /// # Errors
    /// [`StreamError::Io`], or [`StreamError::Misuse`] when called twice.
    pub fn header(&mut self) -> Result<(), StreamError> {
        self.expect(&[State::Start], "the header comes first")?;
        self.pending.extend_from_slice(&MAIN_MAGIC.to_be_bytes());
        self.pending.extend_from_slice(&MAIN_VERSION.to_be_bytes());
        self.state = State::Header;
        self.flush()
    }

    /// Writes the configuration section as it was read.
    ///
    /// # Errors
    /// [`StreamError::Misuse`] unless it comes right after the header.
    pub fn configuration(&mut self, configuration: &Configuration) -> Result<(), StreamError> {
        self.expect(&[State::Header], "the configuration comes after the header")?;
        self.page_size = configuration.page_size();
        self.pending.extend_from_slice(&configuration.bytes);
        self.state = State::BeforeRam;
        Ok(())
    }

    /// Writes a command as it was read and flushes; ends an iterate section that is open.
    ///
    /// # Errors
    /// [`StreamError::Misuse`] for a command that must be stripped or one the destination does not know, or out of order.
    pub fn command(&mut self, command: &Command) -> Result<(), StreamError> {
        if command.to_be_stripped() {
            return Err(StreamError::Misuse("POSTCOPY_ADVISE makes the destination throw its RAM away"));
        }
        if command.kind == super::CommandKind::SwitchoverStart && !self.variant.switchover_start() {
            return Err(StreamError::Misuse("this destination does not know SWITCHOVER_START"));
        }
        self.close_iterate()?;
        self.expect(&[State::BeforeRam, State::Between], "commands stand between sections")?;
        self.pending.extend_from_slice(&command.bytes);
        self.flush()
    }

    /// Opens the RAM setup section with its block list. `page_sizes`: pass the list on as it is, for a destination
    /// with the post-copy capability; otherwise page sizes are left out of it.
    ///
    /// # Errors
    /// [`StreamError::Misuse`] out of order.
    pub fn ram_start(&mut self, start: &RamStart, page_sizes: bool) -> Result<(), StreamError> {
        self.expect(&[State::BeforeRam], "RAM starts once, after the configuration")?;
        self.section_id = start.section_id;
        self.blocks = start.blocks.iter().map(|b| (b.name.clone(), b.used_length)).collect();
        self.pending.push(SECTION_START);
        self.pending.extend_from_slice(&start.section_id.to_be_bytes());
        self.pending.extend_from_slice(b"\x03ram");
        self.pending.extend_from_slice(&start.instance_id.to_be_bytes());
        self.pending.extend_from_slice(&start.version_id.to_be_bytes());
        if page_sizes {
            self.pending.extend_from_slice(&start.payload);
        } else {
            self.pending.extend_from_slice(&start.payload_without_page_sizes());
        }
        self.state = State::Setup;
        Ok(())
    }

    /// Ends the setup section, which is the first sync point, and flushes.
    ///
    /// # Errors
    /// [`StreamError::Misuse`] unless the setup section is open.
    pub fn end_setup(&mut self) -> Result<(), StreamError> {
        self.expect(&[State::Setup], "no setup section is open")?;
        self.flush_record();
        self.end_section();
        self.flush()
    }

    /// Writes pages of one block. `data` holds them in the order of `offsets`, which are bytes in the block.
    ///
    /// # Errors
    /// [`StreamError::PageOutsideBlock`]; [`StreamError::Misuse`] when lengths do not agree, for an unknown block, or
    /// out of order; [`StreamError::Io`].
    pub fn pages(&mut self, block: usize, offsets: &[u64], data: &[u8]) -> Result<(), StreamError> {
        if data.len() != offsets.len() * self.page_size {
            return Err(StreamError::Misuse("page data does not have the length of its pages"));
        }
        self.check(block, offsets)?;
        if offsets.is_empty() {
            return Ok(());
        }
        self.open_records()?;
        let batches = offsets.chunks(PAGES_PER_WRITE).zip(data.chunks(PAGES_PER_WRITE * self.page_size));
        for (offsets, data) in batches {
            self.cuts.clear();
            for &offset in offsets {
                self.page_record(block, offset | FLAG_PAGE);
                self.cuts.push(self.pending.len());
            }
            let mut slices = [IoSlice::new(&[]); 2 * PAGES_PER_WRITE];
            let mut from = 0;
            for ((pair, &cut), page) in
                slices.chunks_exact_mut(2).zip(&self.cuts).zip(data.chunks_exact(self.page_size))
            {
                pair[0] = IoSlice::new(&self.pending[from..cut]);
                pair[1] = IoSlice::new(page);
                from = cut;
            }
            write_all_vectored(&mut self.writer, &mut slices[..2 * offsets.len()], "writing pages to QEMU")?;
            self.pending.clear();
        }
        Ok(())
    }

    /// Writes pages of zeros of one block. Correct for every destination: it checks whether the page is zero already and
    /// clears it if not.
    ///
    /// # Errors
    /// As [`pages`](Self::pages).
    pub fn zero_pages(&mut self, block: usize, offsets: &[u64]) -> Result<(), StreamError> {
        self.check(block, offsets)?;
        if offsets.is_empty() {
            return Ok(());
        }
        self.open_records()?;
        for &offset in offsets {
            self.page_record(block, offset | FLAG_ZERO);
            self.pending.push(0);
            if self.pending.len() >= PENDING_LIMIT {
                self.flush()?;
            }
        }
        Ok(())
    }

    /// Separates two generations: no page sent after this, on any channel, is overtaken by one sent before. A sync point
    /// when the destination has multifd on; flushes.
    ///
    /// # Errors
    /// [`StreamError::Misuse`] unless RAM has started and has not ended.
    pub fn generation_boundary(&mut self) -> Result<(), StreamError> {
        self.open_records()?;
        if self.multifd && !self.variant.syncs_per_section() {
            self.flush_record();
        } else if self.state == State::Iterate {
            self.end_section();
        } else if self.multifd {
            return Err(StreamError::Misuse("machine types up to 8.0 have no sync point inside the complete section"));
        }
        self.flush()
    }

    /// Opens the last RAM section; the guest at the source has stopped.
    ///
    /// # Errors
    /// [`StreamError::Misuse`] unless RAM has started and has not ended.
    pub fn begin_complete(&mut self) -> Result<(), StreamError> {
        self.close_iterate()?;
        self.expect(&[State::Between], "the complete section comes after setup")?;
        self.open(SECTION_END, State::Complete);
        Ok(())
    }

    /// Ends the last RAM section, which is the last sync point, and flushes. Only opaque bytes follow.
    ///
    /// # Errors
    /// [`StreamError::Misuse`] unless the complete section is open.
    pub fn end_complete(&mut self) -> Result<(), StreamError> {
        self.expect(&[State::Complete], "no complete section is open")?;
        self.flush_record();
        self.end_section();
        self.flush()
    }

    /// Writes a piece of a device's section as it was read; ends an iterate section that is open.
    ///
    /// # Errors
    /// [`StreamError::Misuse`] out of order, [`StreamError::Io`].
    pub fn device_section(&mut self, piece: &DevicePiece) -> Result<(), StreamError> {
        self.close_iterate()?;
        let ram_started = match self.state {
            State::Device { ram_started } => ram_started,
            State::BeforeRam => false,
            State::Between => true,
            _ => return Err(StreamError::Misuse("device sections stand between RAM sections")),
        };
        self.pending.extend_from_slice(&piece.bytes);
        self.state = match (piece.last, ram_started) {
            (false, _) => State::Device { ram_started },
            (true, true) => State::Between,
            (true, false) => State::BeforeRam,
        };
        if self.pending.len() >= PENDING_LIMIT { self.flush() } else { Ok(()) }
    }

    /// Writes bytes after the end of RAM, as they are.
    ///
    /// # Errors
    /// [`StreamError::Misuse`] before the end of RAM, [`StreamError::Io`].
    pub fn opaque(&mut self, bytes: &[u8]) -> Result<(), StreamError> {
        self.expect(&[State::Opaque], "opaque bytes begin after the end of RAM")?;
        let mut slices = [IoSlice::new(&self.pending), IoSlice::new(bytes)];
        write_all_vectored(&mut self.writer, &mut slices, "writing device state to QEMU")?;
        self.pending.clear();
        Ok(())
    }

    /// Writes all buffered records.
    ///
    /// # Errors
    /// [`StreamError::Io`].
    pub fn flush(&mut self) -> Result<(), StreamError> {
        const DOING: &str = "writing the main channel to QEMU";
        write_all_vectored(&mut self.writer, &mut [IoSlice::new(&self.pending)], DOING)?;
        self.pending.clear();
        self.writer.flush().map_err(|source| StreamError::Io { doing: DOING, source })
    }

    fn expect(&self, states: &[State], rule: &'static str) -> Result<(), StreamError> {
        if states.contains(&self.state) { Ok(()) } else { Err(StreamError::Misuse(rule)) }
    }

    fn check(&self, block: usize, offsets: &[u64]) -> Result<(), StreamError> {
        let (name, used_length) = self.blocks.get(block).ok_or(StreamError::Misuse("no RAM block has this index"))?;
        let mask = self.page_size as u64 - 1;
        match offsets.iter().find(|&&o| o & mask != 0 || o >= *used_length) {
            None => Ok(()),
            Some(&offset) => {
                Err(StreamError::PageOutsideBlock { block: name.clone(), offset, used_length: *used_length })
            }
        }
    }

    fn open(&mut self, kind: u8, state: State) {
        self.pending.push(kind);
        self.pending.extend_from_slice(&self.section_id.to_be_bytes());
        self.state = state;
    }

    fn open_records(&mut self) -> Result<(), StreamError> {
        match self.state {
            State::Iterate | State::Complete => Ok(()),
            State::Between => {
                self.open(SECTION_PART, State::Iterate);
                Ok(())
            }
            _ => Err(StreamError::Misuse("pages belong between the setup section and the end of RAM")),
        }
    }

    fn close_iterate(&mut self) -> Result<(), StreamError> {
        if self.state == State::Iterate {
            self.end_section();
            self.flush()?;
        }
        Ok(())
    }

    fn page_record(&mut self, block: usize, record: u64) {
        if self.current_block == Some(block) {
            self.pending.extend_from_slice(&(record | FLAG_CONTINUE).to_be_bytes());
        } else {
            self.pending.extend_from_slice(&record.to_be_bytes());
            let name = self.blocks[block].0.as_bytes();
            self.pending.push(u8::try_from(name.len()).unwrap_or(u8::MAX));
            self.pending.extend_from_slice(name);
            self.current_block = Some(block);
        }
    }

    /// The FLUSH record where it is a sync point.
    fn flush_record(&mut self) {
        if self.multifd && !self.variant.syncs_per_section() {
            self.pending.extend_from_slice(&FLAG_MULTIFD_FLUSH.to_be_bytes());
            self.sync_points += 1;
        }
    }

    fn end_section(&mut self) {
        self.pending.extend_from_slice(&FLAG_EOS.to_be_bytes());
        self.pending.push(SECTION_FOOTER);
        self.pending.extend_from_slice(&self.section_id.to_be_bytes());
        if self.multifd && self.variant.syncs_per_section() {
            self.sync_points += 1;
        }
        self.state = if self.state == State::Complete { State::Opaque } else { State::Between };
    }
}

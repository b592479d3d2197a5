//! Feeds the destination QEMU: writes pages into guest RAM or QEMU's stream, and everything else into QEMU's stream.
//!
//! Each RAM channel feeds the multifd channel with its own number. All pages of a region use one RAM channel, so QEMU receives
//! them in order, too. The main channel is shared: each thread that writes to it locks it.
//!
//! **Generations.** At the end of a generation each multifd channel carries one SYNC, and the last RAM channel to end the
//! generation writes the sync point on the main channel. Machine types before 9.0 have zero pages on the main channel. Such a
//! page waits until its channel's last generation has been closed there; else it could overtake the content that it replaces.
//!
//! **Pages in guest RAM.** Blocks whose memory can be written directly are filled by the engine's rules
//! ([`placer`](sterna_engine::receive::placer)). Until the switchover nothing else writes them: QEMU loads no ROMs into them while it
//! waits for a migration, memory of virtio-mem goes in-stream, and a balloon's discards begin with the guest. A delta's checksum would
//! detect any other writer.
//!
//! **End of RAM.** Everything after it waits until every channel has ended the last generation and every damaged page has
//! been retransmitted, because QEMU reads guest RAM while it loads devices.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, Weak};
use std::time::Duration;

use sterna_engine::abort::Abort;
use sterna_engine::receive::placer::{ChannelPlacer, Closed, PageAgreement, PagePlacer, PlacedBlock, StillWriting};
use sterna_engine::receive::{ChannelSink, DeviceBufferSink, PageSink, SinkError, StreamSink};
use sterna_engine::session::Sinks;
use sterna_memory::received::ReceivedBitmap;
use sterna_wire::delta::PageDeltas;
use sterna_wire::limits::MAX_RAM_CHANNELS;
use sterna_wire::packet::{BlockShape, DeviceLabel, Run, RunKind};

use super::layout::{self, Prologue, Start, record};
use super::source_stream::closer;
use super::{Placement as PlacementOption, qemu, sockets};
use crate::discover::RamBlock;
use crate::placement::{Placement, choose};
use crate::stream::{
    Command, MainWriter, MultifdInit, MultifdWriter, RamBlockInfo, ReturnPathReader, StreamError, WireVariant,
};

/// Pages in one multifd packet of 4 KiB pages.
const PAGES_PER_PACKET: usize = 128;

/// The feeder's reports to the driver.
#[derive(Debug)]
pub(super) enum FeederEvent {
    /// The stream has begun; pages may come.
    Ready {
        /// How each block is placed.
        placement: Vec<String>,
        /// The numbers of the blocks of which deltas are accepted.
        deltas: Vec<u16>,
        return_path: ReturnPathReader<UnixStream>,
    },
    /// All of RAM is placed.
    RamPlaced,
    /// The source QEMU has closed its main channel.
    Ended,
}

/// Finds the RAM blocks of the destination QEMU.
pub(super) type FindBlocks = Box<dyn Fn() -> Result<Vec<RamBlock>, String> + Send + Sync>;

/// The state that the sinks of one migration share.
pub(super) struct Feeder {
    socket: PathBuf,
    /// How long to wait for a QEMU that does not listen there yet.
    patience: Duration,
    placement: PlacementOption,
    find_blocks: FindBlocks,
    agreement: PageAgreement,
    placer: Arc<PagePlacer>,
    abort: Arc<Abort>,
    feeding: OnceLock<Feeding>,
    generations: Mutex<Generations>,
    changed: Condvar,
}

#[derive(Debug)]
struct Generations {
    /// The last generation that each RAM channel has ended.
    ended: Vec<u64>,
    /// The last generation that was closed on the main channel.
    closed: u64,
    over: bool,
}

impl Generations {
    /// Returns whether all channels have ended a generation that is not closed on the main channel yet.
    fn may_close(&self) -> bool {
        self.ended.iter().all(|ended| *ended > self.closed)
    }
}

/// The open stream to QEMU.
struct Feeding {
    main: Mutex<MainWriter<UnixStream>>,
    multifd: Vec<Mutex<MultifdWriter<UnixStream>>>,
    variant: WireVariant,
    /// The names of the blocks.
    blocks: Vec<String>,
}

impl Feeder {
    /// Creates a feeder for the QEMU that listens at `socket`.
    pub(super) fn new(
        socket: &Path,
        patience: Duration,
        placement: PlacementOption,
        find_blocks: FindBlocks,
        agreement: PageAgreement,
        abort: &Arc<Abort>,
    ) -> Arc<Self> {
        let generations = Generations { ended: Vec::new(), closed: 0, over: false };
        let feeder = Arc::new_cyclic(|feeder: &Weak<Self>| Self {
            socket: socket.to_owned(),
            patience,
            placement,
            find_blocks,
            agreement,
            placer: Arc::new(PagePlacer::new({
                let feeder = feeder.clone();
                move || feeder.upgrade().iter().for_each(|feeder| feeder.wake())
            })),
            abort: Arc::clone(abort),
            feeding: OnceLock::new(),
            generations: Mutex::new(generations),
            changed: Condvar::new(),
        });
        let weak = Arc::downgrade(&feeder);
        abort.on_end(move || {
            if let Some(feeder) = weak.upgrade() {
                feeder.generations().over = true;
                feeder.changed.notify_all();
            }
        });
        feeder
    }

    fn generations(&self) -> MutexGuard<'_, Generations> {
        self.generations.lock().expect("feeders do not panic")
    }

    fn feeding(&self) -> Result<&Feeding, SinkError> {
        self.feeding.get().ok_or_else(|| "pages came before the start of the stream".into())
    }

    /// Refuses all later pages: the source has sent its totals.
    ///
    /// # Errors
    /// A channel is still writing pages.
    pub(super) fn seal(&self) -> Result<(), StillWriting> {
        self.placer.close(Closed::Totals)
    }

    /// Connects to QEMU and writes everything up to the end of the RAM setup section.
    fn start(&self, start: &Start) -> Result<FeederEvent, SinkError> {
        if self.feeding.get().is_some() {
            return Err("the stream started twice".into());
        }
        if start.ram_channels == 0 || start.ram_channels > MAX_RAM_CHANNELS {
            return Err(format!("{} RAM channels are not possible", start.ram_channels).into());
        }
        if start.multifd_channels > 0 && u16::from(start.multifd_channels) != start.ram_channels {
            let (qemu, ours) = (start.multifd_channels, start.ram_channels);
            return Err(format!("the source QEMU has {qemu} multifd channels, the migration {ours} channels").into());
        }
        let machine = &start.configuration.machine;
        let page_size = start.configuration.page_size();
        if page_size != qemu::PAGE_SIZE {
            return Err(format!("guest pages of {page_size} bytes are not carried, only 4096").into());
        }
        let variant =
            WireVariant::for_machine(machine).unwrap_or_else(|| WireVariant::from_setup(start.flush_in_setup));
        // Before QEMU reads any of the stream: it may not answer QMP while it waits for a sync point.
        let (blocks, lines) = self.target_blocks(&start.ram.blocks)?;
        let connect = || -> std::io::Result<UnixStream> {
            let stream = sockets::connect_within(&self.socket, self.patience, || self.abort.is_over())?;
            self.abort.on_end(closer(&stream)?);
            Ok(stream)
        };
        let stream = connect().map_err(|error| format!("cannot connect to the destination QEMU: {error}"))?;
        let return_path = ReturnPathReader::new(stream.try_clone()?);
        let mut main = MainWriter::new(stream, variant, start.multifd_channels > 0);
        main.header()?;
        let mut multifd = Vec::new();
        for id in 0..start.multifd_channels {
            let stream = connect().map_err(|error| format!("cannot open multifd channel {id} to QEMU: {error}"))?;
            MultifdInit { uuid: start.uuid, id }.write(&stream)?;
            multifd.push(Mutex::new(MultifdWriter::new(stream, variant, page_size)?));
        }

        let names = start.ram.blocks.iter().map(|block| block.name.clone()).collect();
        let feeding = Feeding { main: Mutex::new(main), multifd, variant, blocks: names };
        feeding.on_main(|main| {
            main.configuration(&start.configuration)?;
            for item in &start.prologue {
                match item {
                    Prologue::Command(command) => main.command(command)?,
                    Prologue::DeviceSection(piece) => main.device_section(piece)?,
                }
            }
            main.ram_start(&start.ram, false)?;
            main.end_setup()
        })?;
        self.generations().ended = vec![0; start.ram_channels.into()];
        let direct = |number: &u16| blocks[usize::from(*number)].memory.is_some();
        let deltas = (0..blocks.len() as u16).filter(|number| self.agreement.deltas && direct(number)).collect();
        if self.feeding.set(feeding).is_err() || !self.placer.begin(blocks) {
            return Err("the stream started twice".into());
        }
        Ok(FeederEvent::Ready { placement: lines, deltas, return_path })
    }

    /// Decides how each block is placed. Returns the blocks, and the decisions for the log and the report.
    fn target_blocks(&self, announced: &[RamBlockInfo]) -> Result<(Vec<PlacedBlock>, Vec<String>), SinkError> {
        let mut found = match self.placement {
            PlacementOption::InStream => Vec::new(),
            PlacementOption::Auto => (self.find_blocks)()?,
        };
        let mut lines = Vec::new();
        let mut in_stream = 0;
        let blocks = announced.iter().map(|announced| {
            let position = found.iter().position(|block| block.name == announced.name);
            let (name, pages) = (announced.name.clone(), announced.used_length / qemu::PAGE_SIZE as u64);
            let shape = BlockShape { pages, page_size: qemu::PAGE_SIZE as u32 };
            let Some(block) = position.map(|at| found.swap_remove(at)) else {
                in_stream += 1;
                return PlacedBlock { name, shape, memory: None };
            };
            if block.used != announced.used_length {
                in_stream += 1;
                lines.push(format!("{name}: in-stream, its length differs and QEMU has to adapt it"));
                return PlacedBlock { name, shape, memory: None };
            }
            match choose(&block) {
                Placement::Direct { place, why } => {
                    let received = ReceivedBitmap::new(pages);
                    // Pages written before count as received, so that a zero page for them clears them.
                    let fresh = match block.freshness().written_pages(received.pages(), qemu::PAGE_SIZE as u64) {
                        Ok(written) => {
                            written.for_each(|pages| received.mark(pages));
                            "fresh".into()
                        }
                        Err(why) => {
                            received.mark(0..received.pages());
                            format!("not fresh: {why}")
                        }
                    };
                    lines.push(format!("{name}: {}, {why}, {fresh}", place.method()));
                    PlacedBlock { name, shape, memory: Some((place, received)) }
                }
                Placement::InStream { why } => {
                    in_stream += 1;
                    if announced.used_length > LARGE_BLOCK {
                        lines.push(format!("{name}: in-stream, {why}"));
                    }
                    PlacedBlock { name, shape, memory: None }
                }
            }
        });
        let blocks = blocks.collect();
        if in_stream > 0 {
            lines.push(format!("{in_stream} of {} blocks in-stream", announced.len()));
        }
        Ok((blocks, lines))
    }

    /// Ends `generation` for one RAM channel. The last channel to end it closes it on the main channel.
    fn end_generation(&self, channel: usize, generation: u64) -> Result<(), SinkError> {
        let feeding = self.feeding()?;
        if let Some(multifd) = feeding.multifd.get(channel) {
            let mut multifd = multifd.lock().expect("feeders do not panic");
            let next = multifd.syncs() + 1;
            multifd.sync_to(next)?;
        }
        {
            let mut generations = self.generations();
            let ended = generations.ended.get_mut(channel).ok_or("a RAM channel beyond those of the stream")?;
            if generation != *ended + 1 {
                return Err(format!("generation {generation} follows {ended}").into());
            }
            *ended = generation;
        }
        // Writing may block, and taking the migration down must not wait for it. So other channels are excluded by the
        // lock of the main channel, not by the lock of the generations.
        let mut main = feeding.main.lock().expect("feeders do not panic");
        while self.generations().may_close() {
            main.generation_boundary()?;
            self.generations().closed += 1;
            self.changed.notify_all();
        }
        Ok(())
    }

    fn wait_closed(&self, generation: u64) -> Result<(), SinkError> {
        let mut generations = self.generations();
        while generations.closed < generation {
            if generations.over {
                return Err("the migration is being taken down".into());
            }
            generations = self.changed.wait(generations).expect("feeders do not panic");
        }
        Ok(())
    }

    /// Waits until all refused pages have been retransmitted.
    fn wait_until_complete(&self) -> Result<(), SinkError> {
        let mut generations = self.generations();
        while self.placer.refused() > 0 {
            if generations.over {
                return Err("the migration is being taken down".into());
            }
            generations = self.changed.wait(generations).expect("feeders do not panic");
        }
        Ok(())
    }

    /// Wakes a thread that waits for retransmitted pages.
    fn wake(&self) {
        // A waiting thread either waits for the notification already, or sees the new number of pages when it gets the lock.
        drop(self.generations());
        self.changed.notify_all();
    }

    /// Returns the number of pages that arrived damaged and have not been retransmitted yet.
    pub(super) fn missing(&self) -> u64 {
        self.placer.refused()
    }

    fn end_ram(&self, generation: u64) -> Result<(), SinkError> {
        self.wait_closed(generation)?;
        self.wait_until_complete()?;
        self.feeding()?.on_main(|main| {
            main.begin_complete()?;
            main.end_complete()
        })
    }
}

/// Larger blocks, in bytes, have a line of their own in log and report.
const LARGE_BLOCK: u64 = 8 << 20;

impl Feeding {
    /// Performs `act` on the main channel, then writes as many SYNCs to every multifd channel as `act` has written sync points.
    ///
    /// Each channel gets the same number, whatever its count: a channel that has ended a generation before others stays ahead.
    fn on_main(
        &self,
        act: impl FnOnce(&mut MainWriter<UnixStream>) -> Result<(), StreamError>,
    ) -> Result<(), SinkError> {
        let mut main = self.main.lock().expect("feeders do not panic");
        let before = main.sync_points();
        act(&mut main)?;
        let added = main.sync_points() - before;
        // The main channel must be free while this thread waits for a multifd channel. That channel's writer may be blocked
        // until QEMU has passed a sync point, which another thread still has to write to the main channel.
        drop(main);
        if added == 0 {
            return Ok(());
        }
        for multifd in &self.multifd {
            let mut multifd = multifd.lock().expect("feeders do not panic");
            let syncs = multifd.syncs() + added;
            multifd.sync_to(syncs)?;
        }
        Ok(())
    }
}

/// The sink of one RAM channel.
pub(super) struct RamSink {
    feeder: Arc<Feeder>,
    placer: ChannelPlacer,
    channel: usize,
    generation: u64,
    normal: Vec<u64>,
    zero: Vec<u64>,
}

impl RamSink {
    /// Creates the sink of the RAM channel with this number.
    pub(super) fn new(feeder: &Arc<Feeder>, channel: u16) -> Self {
        let offsets = || Vec::with_capacity(PAGES_PER_PACKET);
        Self {
            feeder: Arc::clone(feeder),
            placer: ChannelPlacer::new(&feeder.placer, channel, feeder.agreement),
            channel: channel.into(),
            generation: 0,
            normal: offsets(),
            zero: offsets(),
        }
    }

    /// Writes pages to QEMU's own stream, in packets of at most 128 pages.
    fn feed(&mut self, feeding: &Feeding, block: u16, runs: &[Run], content: &[u8]) -> Result<(), SinkError> {
        let mut rest = content;
        for run in runs {
            for page in run.first..run.end() {
                let offset = page * qemu::PAGE_SIZE as u64;
                match run.kind {
                    RunKind::Normal => self.normal.push(offset),
                    RunKind::Zero => self.zero.push(offset),
                }
                if self.normal.len() + self.zero.len() == PAGES_PER_PACKET {
                    rest = self.feed_packet(feeding, block, rest)?;
                }
            }
        }
        self.feed_packet(feeding, block, rest)?;
        Ok(())
    }

    fn feed_packet<'a>(&mut self, feeding: &Feeding, block: u16, content: &'a [u8]) -> Result<&'a [u8], SinkError> {
        let (data, rest) = content.split_at(self.normal.len() * qemu::PAGE_SIZE);
        let index = usize::from(block);
        match feeding.multifd.get(self.channel) {
            Some(multifd) => {
                let zeros_here = feeding.variant.zero_pages_in_packets();
                let zero: &[u64] = if zeros_here { &self.zero } else { &[] };
                if !self.normal.is_empty() || !zero.is_empty() {
                    let name = &feeding.blocks[index];
                    multifd.lock().expect("feeders do not panic").pages(name, &self.normal, &[data], zero)?;
                }
                if !zeros_here && !self.zero.is_empty() {
                    self.feeder.wait_closed(self.generation)?;
                    feeding.main.lock().expect("feeders do not panic").zero_pages(index, &self.zero)?;
                }
            }
            None => {
                let mut main = feeding.main.lock().expect("feeders do not panic");
                main.pages(index, &self.normal, data)?;
                main.zero_pages(index, &self.zero)?;
            }
        }
        self.normal.clear();
        self.zero.clear();
        Ok(rest)
    }
}

impl PageSink for RamSink {
    fn blocks(&self) -> Result<Arc<[BlockShape]>, SinkError> {
        self.feeder.placer.shapes()
    }

    fn pages(&mut self, block: u16, runs: &[Run], content: &[u8]) -> Result<(), SinkError> {
        if self.feeder.placer.memory(block).is_some() {
            return self.placer.place(block, runs, content);
        }
        let feeder = Arc::clone(&self.feeder);
        let _permit = feeder.placer.permit()?;
        self.feed(feeder.feeding()?, block, runs, content)
    }

    fn deltas(&mut self, block: u16, runs: &[Run], deltas: PageDeltas<'_>) -> Result<bool, SinkError> {
        self.placer.apply(block, runs, deltas)
    }

    fn refuse(&mut self, block: u16, runs: &[Run]) -> Result<bool, SinkError> {
        self.placer.refuse(block, runs)
    }

    fn generation_end(&mut self, generation: u64) -> Result<(), SinkError> {
        self.feeder.end_generation(self.channel, generation)?;
        self.generation = generation;
        Ok(())
    }
}

/// Handles the device state that QEMU sends on the multifd channel of one RAM channel.
struct MultifdDeviceSink {
    feeder: Arc<Feeder>,
    channel: usize,
}

impl DeviceBufferSink for MultifdDeviceSink {
    fn buffer(&mut self, device: DeviceLabel<'_>, content: &[u8]) -> Result<(), SinkError> {
        let feeding = self.feeder.feeding()?;
        let name = std::str::from_utf8(device.name).map_err(|_| "a device's name is not text")?;
        let multifd = feeding.multifd.get(self.channel).ok_or("device state without multifd channels")?;
        Ok(multifd.lock().expect("feeders do not panic").device_state(name, device.instance, content)?)
    }
}

/// Creates the sinks of the channels that connect.
pub(super) struct FeederSinks {
    feeder: Arc<Feeder>,
    news: News,
}

/// Receives the feeder's reports, on the stream channel's thread.
type News = Arc<dyn Fn(FeederEvent) + Send + Sync>;

impl FeederSinks {
    /// `news` is called on the stream channel's thread.
    pub(super) fn new(feeder: Arc<Feeder>, news: impl Fn(FeederEvent) + Send + Sync + 'static) -> Self {
        Self { feeder, news: Arc::new(news) }
    }
}

impl Sinks for FeederSinks {
    fn ram(&self, index: u16) -> ChannelSink {
        let devices = MultifdDeviceSink { feeder: Arc::clone(&self.feeder), channel: index.into() };
        ChannelSink::new().with_pages(RamSink::new(&self.feeder, index)).with_device_buffers(devices)
    }

    fn stream(&self) -> ChannelSink {
        let records = RecordSink { feeder: Arc::clone(&self.feeder), news: Arc::clone(&self.news) };
        ChannelSink::new().with_stream(records)
    }
}

/// The sink of the stream channel.
struct RecordSink {
    feeder: Arc<Feeder>,
    news: News,
}

impl StreamSink for RecordSink {
    fn stream(&mut self, kind: u16, content: &[u8]) -> Result<(), SinkError> {
        match kind {
            record::START => {
                let news = self.feeder.start(&Start::decode(content)?)?;
                (self.news)(news);
            }
            record::COMMAND => {
                let command = Command::parse(content)?;
                self.feeder.feeding()?.on_main(|main| main.command(&command))?;
            }
            record::DEVICE_SECTION => {
                let piece = layout::decode_device_section(content)?;
                self.feeder.feeding()?.on_main(|main| main.device_section(&piece))?;
            }
            record::RAM_END => {
                self.feeder.end_ram(layout::decode_ram_end(content)?)?;
                (self.news)(FeederEvent::RamPlaced);
            }
            record::OPAQUE => {
                self.feeder.feeding()?.main.lock().expect("feeders do not panic").opaque(content)?;
            }
            record::END => (self.news)(FeederEvent::Ended),
            unknown => return Err(layout::LayoutError::Kind(unknown).into()),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;
    use sterna_wire::reason::Reason;

    use sterna_memory::place::{FileWrite, Place, ZeroBy};

    /// Returns a feeder without a QEMU, one of whose two blocks is filled directly.
    fn feeder(agreement: PageAgreement, abort: &Arc<Abort>) -> (Arc<Feeder>, UnixStream) {
        const PAGES: u64 = 16;
        let feeder = Feeder::new(
            Path::new(""),
            Duration::ZERO,
            PlacementOption::Auto,
            Box::new(|| Err("there is no QEMU".into())),
            agreement,
            abort,
        );
        let (main, qemu) = UnixStream::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        file.set_len(PAGES * qemu::PAGE_SIZE as u64).unwrap();
        let place = FileWrite::new(file, 0, PAGES * qemu::PAGE_SIZE as u64, ZeroBy::Writing).unwrap();
        let block = |name: &str, memory| PlacedBlock {
            name: name.into(),
            shape: BlockShape { pages: PAGES, page_size: 4096 },
            memory,
        };
        let direct: (Box<dyn Place>, _) = (Box::new(place), ReceivedBitmap::new(PAGES));
        let feeding = Feeding {
            main: Mutex::new(MainWriter::new(main, WireVariant::SwitchoverStart, false)),
            multifd: Vec::new(),
            variant: WireVariant::SwitchoverStart,
            blocks: vec!["rom".into(), "ram".into()],
        };
        assert!(feeder.feeding.set(feeding).is_ok());
        assert!(feeder.placer.begin(vec![block("rom", None), block("ram", Some(direct))]));
        (feeder, qemu)
    }

    const PAGE: [Run; 1] = [Run { kind: RunKind::Normal, first: 3, count: 1 }];

    #[test]
    fn the_end_of_ram_waits_for_refused_pages() {
        let abort = Arc::new(Abort::default());
        let (feeder, _qemu) = feeder(PageAgreement { deltas: true, retransmission: true }, &abort);
        let mut sink = RamSink::new(&feeder, 0);
        assert!(sink.refuse(1, &PAGE).unwrap());
        assert_eq!(feeder.missing(), 1);
        let (done, ended) = channel();
        let waits = Arc::clone(&feeder);
        std::thread::spawn(move || done.send(waits.wait_until_complete().map(|()| waits.missing()).map_err(drop)));
        sink.pages(1, &PAGE, &[7; qemu::PAGE_SIZE]).unwrap();
        assert_eq!(ended.recv_timeout(Duration::from_secs(30)), Ok(Ok(0)));
        // The wait ends when the migration is taken down.
        assert!(sink.refuse(1, &PAGE).unwrap());
        abort.raise(Reason::other("enough"));
        assert!(feeder.end_ram(0).unwrap_err().to_string().contains("taken down"));
    }

    #[test]
    fn deltas_and_refusals_need_an_agreement_and_a_block_that_is_filled_directly() {
        let abort = Arc::new(Abort::default());
        let none = || PageDeltas::new(&[], 0);
        for (deltas, retransmission) in [(true, true), (false, false)] {
            let (feeder, _qemu) = feeder(PageAgreement { deltas, retransmission }, &abort);
            let mut sink = RamSink::new(&feeder, 0);
            assert_eq!(sink.refuse(1, &PAGE).unwrap(), retransmission);
            assert_eq!(sink.deltas(1, &[], none()).is_ok(), deltas);
            assert!(!sink.refuse(0, &PAGE).unwrap() && sink.deltas(0, &[], none()).is_err());
        }
    }

    #[test]
    fn pages_after_the_totals_are_refused_and_leave_the_memory_as_it_was() {
        let abort = Arc::new(Abort::default());
        let (feeder, _qemu) = feeder(PageAgreement { deltas: true, retransmission: true }, &abort);
        let mut sink = RamSink::new(&feeder, 0);
        sink.pages(1, &PAGE, &[7; qemu::PAGE_SIZE]).unwrap();
        feeder.seal().unwrap();
        let refused = |outcome: Result<(), SinkError>| {
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains("pages after the source's totals"), "{error}");
        };
        for block in [0, 1] {
            refused(sink.pages(block, &PAGE, &[8; qemu::PAGE_SIZE]));
            refused(sink.deltas(block, &PAGE, PageDeltas::new(&[], 0)).map(drop));
            refused(sink.refuse(block, &PAGE).map(drop));
        }
        let mut page = [0; qemu::PAGE_SIZE];
        let place = feeder.placer.memory(1).expect("block 1 is filled directly");
        place.read_pages(&[3 * qemu::PAGE_SIZE as u64], &mut page).unwrap();
        assert_eq!(page, [7; qemu::PAGE_SIZE]);
    }

    #[test]
    fn a_write_without_sync_points_does_not_wait_for_a_blocked_multifd_channel() {
        let (main, _qemu_main) = UnixStream::pair().unwrap();
        let (multifd, _qemu_multifd) = UnixStream::pair().unwrap();
        let variant = WireVariant::SwitchoverStart;
        let feeding = Arc::new(Feeding {
            main: Mutex::new(MainWriter::new(main, variant, true)),
            multifd: vec![Mutex::new(MultifdWriter::new(multifd, variant, qemu::PAGE_SIZE).unwrap())],
            variant,
            blocks: Vec::new(),
        });
        // The lock that its writer holds while QEMU does not read.
        let blocked = feeding.multifd[0].lock().unwrap();

        let (done, ended) = channel();
        let other = Arc::clone(&feeding);
        std::thread::spawn(move || done.send(other.on_main(MainWriter::header).is_ok()));

        assert_eq!(ended.recv_timeout(Duration::from_secs(30)), Ok(true));
        assert!(feeding.main.try_lock().is_ok(), "the main channel is free for sync points");
        drop(blocked);
    }
}

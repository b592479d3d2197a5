//! The library's channels alone, both ends: pages are searched, read, sent, received and placed as in a migration, but
//! there is no handshake, no dirty log and no switchover. Measures with and without a part that
//! [`sterna_engine::destination::Destination`] always has.

use std::fmt::Display;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use sterna_engine::abort::Abort;
use sterna_engine::batch::BatchPool;
use sterna_engine::entry::{PageSearch, Pipeline};
use sterna_engine::pacer::Pacer;
use sterna_engine::receive::{ChannelSink, PacketRules, PageSink, Places, ReceiveCounters, SinkError, receive_packets};
use sterna_engine::send::{Compression, SendChannel, SendContext, Sent};
use sterna_engine::session::Session;
use sterna_engine::transport::{Address, Incoming, Limits, Listener, Security, accept_channel};
use sterna_engine::window::Window;
use sterna_memory::PAGE_SIZE;
use sterna_memory::holes::PageMap;
use sterna_memory::ram::{GuestRam, RamBlock};
use sterna_memory::received::{Freshness, ReceivedBitmap};
use sterna_wire::header::ChannelKind;
use sterna_wire::identity::{MigrationId, MigrationKey};
use sterna_wire::limits::DEFAULT_PACKET_SIZE;
use sterna_wire::packet::{BlockShape, Run, RunKind};

/// As [`sterna_engine::source::Source`] has them.
const DOWNTIME: Duration = Duration::from_millis(300);
const BATCHES_PER_CHANNEL: usize = 4;
const RULES: PacketRules = PacketRules { packet_size: DEFAULT_PACKET_SIZE, checksums: true };

fn text(error: impl Display) -> String {
    error.to_string()
}

/// Sends all populated memory of `ram`; returns the bytes on the wire.
pub(crate) fn send(ram: &GuestRam, to: &str, channels: u16) -> Result<u64, String> {
    let session = Session {
        id: MigrationId::from_bytes([1; 16]),
        key: MigrationKey::from_bytes([2; 32]),
        incarnation: 1,
        channels,
        device_channels: 0,
        packet_size: DEFAULT_PACKET_SIZE,
        features: Vec::new(),
        round_trip: Duration::ZERO,
    };
    let context = SendContext::new(
        Arc::new(Window::new(DEFAULT_PACKET_SIZE as u64, Duration::ZERO, DOWNTIME)),
        Arc::new(Pacer::new(None)),
        Arc::new(Abort::default()),
        Compression::none(),
        RULES,
    );
    let to = Address::from(to);
    let open = |index| session.open(&Security::Insecure, &to, ChannelKind::Ram, index, &context);
    let channels = (0..channels).map(open).collect::<Result<Vec<_>, _>>().map_err(text)?;
    let pool = BatchPool::new(BATCHES_PER_CHANNEL * channels.len(), 0);
    let window = Arc::clone(&context.window);
    let pipeline = Arc::new(Pipeline { channels, pool, window, page_size: PAGE_SIZE });
    let mut search = PageSearch::new(Arc::clone(&pipeline), ram.clone(), DEFAULT_PACKET_SIZE);
    let mut map = PageMap::own().map_err(text)?;
    for (number, block) in ram.blocks().iter().enumerate() {
        let mut runs = Vec::new();
        block.populated(&mut map, |run| runs.push(run)).map_err(text)?;
        runs.into_iter().try_for_each(|run| search.pages(number as u16, run)).map_err(text)?;
    }
    search.flush().map_err(text)?;
    pipeline.channels.iter().try_for_each(|channel| channel.drained().map(drop)).map_err(text)?;
    let sent = Sent::over(&pipeline.channels);
    drop(search);
    if let Ok(pipeline) = Arc::try_unwrap(pipeline) {
        pipeline.channels.into_iter().for_each(SendChannel::join);
    }
    context.abort.finish();
    Ok(sent.wire_bytes)
}

/// A destination that channels can connect to.
pub(crate) struct Listening {
    address: Address,
    incoming: Incoming,
}

impl Listening {
    /// Listens at `address`.
    pub(crate) fn open(address: &str) -> Result<Self, String> {
        let listener = Listener::bind(address).map_err(text)?;
        let address = listener.local_address().clone();
        let incoming = listener.start(Security::Insecure, Limits::default()).map_err(text)?;
        Ok(Self { address, incoming })
    }

    /// Returns the address at which it listens.
    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    /// Receives into `ram`, which must be untouched, by this many channels.
    pub(crate) fn receive(&self, ram: &GuestRam, channels: u16, received_bitmap: bool) -> Result<(), String> {
        let shape = |block: &RamBlock| BlockShape { pages: block.pages(), page_size: PAGE_SIZE as u32 };
        let shapes: Arc<[BlockShape]> = ram.blocks().iter().map(shape).collect();
        let bitmaps = || ram.blocks().iter().map(|block| ReceivedBitmap::new(block.pages())).collect();
        let received: Option<Arc<[_]>> = received_bitmap.then(bitmaps);
        std::thread::scope(|scope| {
            let mut running = Vec::new();
            for _ in 0..channels {
                let (connection, _) = self.incoming.next().ok_or("the listener has ended")?;
                let sink = PlacingSink { ram: ram.clone(), shapes: Arc::clone(&shapes), received: received.clone() };
                let mut sink = ChannelSink::new().with_pages(sink);
                running.push(scope.spawn(move || {
                    let (mut writer, mut reader) = accept_channel(connection).map_err(text)?;
                    let counters = ReceiveCounters::default();
                    receive_packets(&mut reader, Some(&mut writer), &mut sink, RULES, &counters).map_err(text)
                }));
            }
            running.into_iter().try_for_each(|thread| thread.join().expect("receiving does not panic"))
        })
    }
}

/// Places pages as [`sterna_engine::destination::Destination`] does. Without a received bitmap each zero page is read,
/// and cleared if it is not zero, as in QEMU before it had the bitmap: this populates memory that is not used.
struct PlacingSink {
    ram: GuestRam,
    shapes: Arc<[BlockShape]>,
    received: Option<Arc<[ReceivedBitmap]>>,
}

impl PlacingSink {
    /// Calls `place` with the pages of each normal run, once they can be written, and places the zero runs.
    fn runs<'a>(
        &'a self,
        block: u16,
        runs: &[Run],
        mut place: impl FnMut(&'a RamBlock, Range<u64>),
    ) -> Result<(), SinkError> {
        let received = self.received.as_ref().map(|received| &received[usize::from(block)]);
        let block = &self.ram.blocks()[usize::from(block)];
        for run in runs {
            let pages = run.first..run.end();
            match (run.kind, received) {
                (RunKind::Normal, received) => {
                    if let Some(received) = received {
                        received.mark(pages.clone());
                    }
                    block.populate(pages.clone())?;
                    place(block, pages);
                }
                (RunKind::Zero, Some(received)) => received.zero(pages, Freshness::Fresh, |part| block.zero(part)),
                (RunKind::Zero, None) => {
                    pages.filter(|page| !block.is_zero(*page)).for_each(|page| block.zero(page..page + 1));
                }
            }
        }
        Ok(())
    }
}

impl PageSink for PlacingSink {
    fn blocks(&self) -> Result<Arc<[BlockShape]>, SinkError> {
        Ok(Arc::clone(&self.shapes))
    }

    fn places(&mut self, block: u16, runs: &[Run]) -> Result<Option<Places<'_>>, SinkError> {
        let mut places = Places::new();
        self.runs(block, runs, |block, pages| {
            places.push(block.piece(pages));
        })?;
        Ok(Some(places))
    }

    fn pages(&mut self, block: u16, runs: &[Run], content: &[u8]) -> Result<(), SinkError> {
        let mut rest = content;
        self.runs(block, runs, |block, pages| {
            let (now, later) = rest.split_at((pages.end - pages.start) as usize * PAGE_SIZE);
            rest = later;
            block.write(pages.start, now);
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::guest::{Content, Guest, Memory};
    use super::*;

    #[test]
    fn memory_arrives_the_same_and_only_with_the_bitmap_are_zero_pages_left_unpopulated() {
        for received_bitmap in [true, false] {
            let (bytes, content) = (8 << 20, Content::Used(1 << 20));
            let source = Guest::new(Memory::SmallPages, bytes).unwrap();
            let destination = Guest::new(Memory::SmallPages, bytes).unwrap();
            source.fill(content).unwrap();
            let listening = Listening::open("127.0.0.1:0").unwrap();
            let to = listening.address().to_string();
            std::thread::scope(|scope| {
                let ram = destination.ram();
                let receiving = scope.spawn(move || listening.receive(&ram, 2, received_bitmap));
                send(&source.ram(), &to, 2).unwrap();
                receiving.join().unwrap().unwrap();
            });
            // A page that was only read maps the kernel's shared zero page, which does not count as populated.
            assert_eq!(destination.populated_bytes(), Ok(1 << 20));
            assert_eq!(destination.check(content), Ok(()));
        }
    }
}

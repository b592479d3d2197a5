//! The source's channels: from a queue of items to packets on the wire, and acknowledgements back.
//!
//! A channel has two threads. The *sending* thread takes items from the queue and writes packets. The *acknowledging* thread reads
//! acknowledgements and releases what the packets hold. The source never waits for single packets: only the window limits it.
//!
//! ```text
//!                    guest ranges   ┌───────────── sending thread ─────────────┐
//! queue ─> thread ─┬───────────────>│ read ──────> pages ──────────> packet    │──> socket
//!                  │                │ (ahead)      (retransmit,      (coding)  │
//!                  │  owned bytes   │               sent_pages,                │
//!                  ├────────────────│─────────────> delta)                     │
//!                  └── other items ─│───────────────────────────────>          │
//!                                   └────────────── ledger ────────────────────┘
//!                                                     ^── acknowledge <── socket
//! ```
//! To follow a page, read [`thread`], [`read`], [`pages`] and [`packet`] in this order. [`ledger`] has everything that was handed over and
//! is not settled; [`retransmit`] explains what happens to pages that the destination refuses.
//!
//! From the bottom: [`error`] and [`counters`] are data; on these stand the [`ledger`] and how content is encoded ([`choices`],
//! [`compression`], [`coding`]), then [`delta`] and [`packet`], then [`retransmit`], and the two threads on top.

mod acknowledge;
mod ahead;
mod blocks;
mod choices;
mod coding;
mod compression;
mod counters;
mod delta;
mod error;
mod ledger;
mod packet;
mod pages;
mod read;
mod retransmit;
mod sent_pages;
mod thread;

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread::{Builder, JoinHandle};

use sterna_memory::normal_page_ratio::NormalPageRatio;
use sterna_wire::reason::Reason;

use self::acknowledge::AcknowledgingThread;
pub use self::blocks::DeltaBlocks;
pub use self::compression::Compression;
pub use self::counters::{SendCounters, Sent};
pub use self::error::{AnswerError, MAX_REFUSED, PageNotInPacket, SendError, TooManyRefused};
pub use self::ledger::PieceArrivals;
use self::ledger::{ChannelLedger, Drained};
pub use self::retransmit::Refusals;
pub use self::sent_pages::HashKey;
use self::thread::SendingThread;
use crate::abort::Abort;
use crate::accelerator::Accelerator;
use crate::cpu_time;
use crate::item::Item;
use crate::pacer::Pacer;
use crate::receive::PacketRules;
use crate::transport::{Reader, Writer};
use crate::window::{Window, WindowClosed};

/// Batches that wait in a channel's queue. The window bounds bytes; the queue only has to keep the channel busy.
const QUEUE_LENGTH: usize = 16;

/// Which pages the channels may send as deltas.
#[derive(Clone, Debug, Default)]
pub enum DeltaSetting {
    /// None.
    #[default]
    None,
    /// Those of all blocks.
    AllBlocks {
        /// Maximum bytes of sent pages that each channel keeps.
        cache: usize,
    },
    /// Those of the blocks that the destination will name; pages cannot be read again, so each channel keeps them until they are
    /// acknowledged.
    SomeBlocks(Arc<DeltaBlocks>),
}

/// What the channels of one migration have in common.
#[derive(Debug, Clone)]
pub struct SendContext {
    /// Zero pages of guest ranges that count as normal: for tests and measurements.
    pub normal_page_ratio: NormalPageRatio,
    /// With a key, only the changed 4 KiB pages are sent of RAM blocks whose own pages are larger.
    pub hash_key: Option<HashKey>,
    /// The window.
    pub window: Arc<Window>,
    /// The bandwidth limit.
    pub pacer: Arc<Pacer>,
    /// The alarm.
    pub abort: Arc<Abort>,
    /// How content is compressed.
    pub compression: Compression,
    /// What was agreed on with the peer.
    pub rules: PacketRules,
    /// The accelerator that helps to read guest RAM.
    pub accelerator: Option<Accelerator>,
    /// The refusals of the migration, where the peer may refuse packets.
    pub refusals: Option<Arc<Refusals>>,
    /// Which pages may be sent as deltas.
    pub deltas: DeltaSetting,
    /// Where the state of devices is sent too: what receives the arrivals of its pieces.
    pub arrivals: Option<Arc<dyn PieceArrivals>>,
    /// Whether the channels know which pages were not acknowledged ([`SendChannel::unconfirmed_pages`]).
    pub keeps_pages: bool,
}

impl SendContext {
    /// Makes the context of plain channels: without an accelerator, refusals, deltas and device state.
    pub fn new(
        window: Arc<Window>,
        pacer: Arc<Pacer>,
        abort: Arc<Abort>,
        compression: Compression,
        rules: PacketRules,
    ) -> Self {
        Self {
            normal_page_ratio: NormalPageRatio::default(),
            hash_key: None,
            window,
            pacer,
            abort,
            compression,
            rules,
            accelerator: None,
            refusals: None,
            deltas: DeltaSetting::None,
            arrivals: None,
            keeps_pages: false,
        }
    }
}

/// One channel of the source. Dropping it ends its queue; [`SendChannel::join`] waits for its threads.
#[derive(Debug)]
pub struct SendChannel {
    queue: SyncSender<Item>,
    ledger: Arc<ChannelLedger>,
    threads: Vec<JoinHandle<()>>,
}

impl SendChannel {
    /// Starts the threads of a channel that the peer has accepted. `name` is for thread names and errors.
    ///
    /// # Errors
    /// A thread cannot be started, or an encoder cannot be made.
    pub fn start(name: &str, writer: Writer, reader: Reader, context: SendContext) -> io::Result<Self> {
        let (queue, items) = sync_channel(QUEUE_LENGTH);
        let ledger =
            Arc::new(ChannelLedger::new(Arc::clone(&context.window), context.arrivals.clone(), context.keeps_pages));
        let waits = Arc::clone(&ledger);
        context.abort.on_end(move || waits.end());

        let sending = SendingThread::new(writer, Arc::clone(&ledger), &context).map_err(io::Error::other)?;
        let (abort, channel) = (Arc::clone(&context.abort), name.to_owned());
        let sending = cpu_time::spawn(Builder::new().name(format!("send-{name}")), move || {
            if let Err(error) = sending.run(&items) {
                let reason = format!("channel {channel}: sending failed: {error}");
                match error {
                    SendError::Connection(_) => drop(abort.lost(reason)),
                    _ => drop(abort.raise(Reason::other(reason))),
                }
            }
        })?;

        let SendContext { abort, refusals, accelerator, .. } = context;
        let mut acknowledging = AcknowledgingThread { reader, ledger: Arc::clone(&ledger), refusals, accelerator };
        let channel = name.to_owned();
        let acknowledging = cpu_time::spawn(Builder::new().name(format!("ack-{name}")), move || {
            if let Err(error) = acknowledging.run() {
                match error {
                    AnswerError::TooManyRefused(error) => {
                        abort.raise(Reason::other(format_args!("channel {channel}: {error}")));
                    }
                    error => drop(abort.lost(format_args!("channel {channel}: the destination was lost: {error}"))),
                }
            }
            acknowledging.ledger.end();
        })?;
        Ok(Self { queue, ledger, threads: vec![sending, acknowledging] })
    }

    /// Queues `item`. Waits while the queue is full. Fails when the migration is being taken down.
    pub fn send(&self, item: Item) -> Result<(), WindowClosed> {
        if item.is_of_round() {
            self.ledger.queued(&item);
        }
        self.queue.send(item).map_err(|_| WindowClosed)
    }

    /// As [`SendChannel::send`], but returns `item` where the queue is full. Only for items that no caller of
    /// [`SendChannel::drained`] waits for: pieces of device state and records of the stream.
    pub(crate) fn try_send(&self, item: Item) -> Result<Option<Item>, WindowClosed> {
        let counts = item.is_of_round();
        match self.queue.try_send(item) {
            Ok(()) => {
                if counts {
                    self.ledger.count_queued();
                }
                Ok(None)
            }
            Err(TrySendError::Full(item)) => Ok(Some(item)),
            Err(TrySendError::Disconnected(_)) => Err(WindowClosed),
        }
    }

    /// Waits until everything that was handed over is acknowledged and nothing is refused, and returns the last sequence number. Meanwhile
    /// no other thread may hand anything over except pieces of device state, which this does not wait for.
    pub fn drained(&self) -> Result<u64, WindowClosed> {
        loop {
            match self.ledger.drained()? {
                Drained::All(last) => return Ok(last),
                Drained::Refused => self.send(Item::Retransmit)?,
            }
        }
    }

    /// Passes to `add`, by block, all pages that were handed over and that the destination may not have. Only where the channels
    /// [know](SendContext::keeps_pages) that.
    pub fn unconfirmed_pages(&self, add: impl FnMut(u16, Range<u64>)) {
        self.ledger.unconfirmed_pages(add);
    }

    /// Returns the counters of the channel.
    pub fn counters(&self) -> &SendCounters {
        &self.ledger.counters
    }

    /// Ends the queue and waits for the threads. The connection must have been closed, or the peer must close it.
    pub fn join(self) {
        drop(self.queue);
        for thread in self.threads {
            // A panic of a channel thread has already been printed; the migration was aborted by its closed connection.
            let _ = thread.join();
        }
    }
}

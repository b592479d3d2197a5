//! The ledger of one channel: everything that was handed over and is not settled yet.
//!
//! | counted | from | to |
//! |---|---|---|
//! | an item | [`ChannelLedger::queued`], by the thread that hands it over | [`ChannelLedger::all_written`], when all its packets are written |
//! | a packet | [`ChannelLedger::next_packet`], which gives it its number | [`ChannelLedger::acknowledge`], which releases what the packet holds |
//! | pages of guest RAM | [`ChannelLedger::queued`], where the channel keeps them in mind | the acknowledgement of their item's last packet |
//! | refused pages | [`ChannelLedger::refuse`], by the acknowledging thread | [`ChannelLedger::take_refused`], by the sending thread, which retransmits them |
//!
//! What an acknowledgement releases is in the packet's entry ([`InFlight`]): bytes of the window, pages that count as delivered, and the
//! arrival of a piece of device state. The channel has drained when nothing is left in any of the three rows.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use sterna_offload::Producer;
use sterna_wire::packet::{Ack, PageRequest, Run};
use sterna_wire::sequence::{BadAcknowledgement, SendSequence};

use super::counters::SendCounters;
use crate::item::Item;
use crate::window::{Carried, Window, WindowClosed};

/// Receives the arrivals of pieces of device state.
pub trait PieceArrivals: std::fmt::Debug + Send + Sync {
    /// Records that a piece of `bytes` bytes of the state of `device` has arrived at the destination.
    fn arrived(&self, device: u16, bytes: u32);
}

/// The entry of a packet that is not acknowledged.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct InFlight {
    /// Bytes of the window that its acknowledgement releases.
    pub(super) in_window: u64,
    /// The pages that its acknowledgement delivers. Retransmitted pages are not counted again.
    pub(super) delivers: Carried,
    /// Pages with content in it, handed over or retransmitted: the maximum that the destination may request again.
    pub(super) content_pages: u64,
    /// The device that is distrusted if the packet is refused.
    pub(super) suspect: Option<Suspect>,
    /// For a piece of a device's state: the device, and the bytes of the piece.
    pub(super) device: Option<(u16, u32)>,
}

/// The device that has made a packet's content.
#[derive(Clone, Copy, Debug)]
pub(super) enum Suspect {
    /// The device has copied the content.
    Copied(Producer),
    /// The device has compressed the content, and the result was not verified. Where another device has copied the content, that copy was
    /// verified as a rule. If the copy was wrong all the same, the copying device is the only suspect from the next time on.
    Compressed(Producer),
}

impl Suspect {
    /// Returns the device, and why it is distrusted.
    pub(super) fn charge(self) -> (Producer, &'static str) {
        match self {
            Self::Copied(producer) => (producer, "what it had copied was refused by the destination"),
            Self::Compressed(producer) => (producer, "what it had compressed was refused by the destination"),
        }
    }
}

/// An item of pages of guest RAM, not all of which are acknowledged.
#[derive(Debug)]
struct Unconfirmed {
    block: u16,
    /// Number of its runs.
    runs: usize,
    /// Its last packet; none while packets of it are to be written.
    last: Option<u64>,
}

/// Pages that the destination requests again.
#[derive(Clone, Copy, Debug)]
pub(super) struct RefusedPages {
    /// The number of the refused packet.
    pub(super) packet: u64,
    /// The pages.
    pub(super) pages: PageRequest,
}

/// How far the destination is once everything that was written is acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Drained {
    /// It has placed everything, up to this packet.
    All(u64),
    /// It has refused pages, which were not retransmitted yet.
    Refused,
}

#[derive(Debug, Default)]
struct State {
    sequence: SendSequence,
    /// Number of items whose packets are all written.
    written_items: u64,
    /// Each packet not yet acknowledged, oldest first.
    in_flight: VecDeque<InFlight>,
    refused: Vec<RefusedPages>,
    /// The items that are not acknowledged, oldest first, and their runs. Empty unless the channel keeps pages in mind.
    unconfirmed: VecDeque<Unconfirmed>,
    runs: VecDeque<Run>,
    /// Refused pages that the sending thread has taken, each with the packet that retransmits them, or a later one.
    retransmitted: Vec<(PageRequest, u64)>,
    /// Nothing more will be sent: the peer may close the channel.
    finished: bool,
    /// The channel has ended: nothing more will be acknowledged.
    ended: bool,
    /// Number of threads that wait for a change: waking costs a system call even where no thread waits.
    waiting: u32,
}

impl State {
    /// Forgets the pages of items that are acknowledged.
    fn confirm(&mut self) {
        let acknowledged = self.sequence.acknowledged();
        while let Some(item) = self.unconfirmed.pop_front_if(|item| item.last.is_some_and(|last| last <= acknowledged))
        {
            self.runs.drain(..item.runs);
        }
    }
}

/// The ledger of one channel.
#[derive(Debug)]
pub(super) struct ChannelLedger {
    /// Number of items that were handed over. Pieces of device state do not count: a round does not wait for them.
    queued_items: AtomicU64,
    state: Mutex<State>,
    changed: Condvar,
    window: Arc<Window>,
    arrivals: Option<Arc<dyn PieceArrivals>>,
    /// Whether pages are kept in mind until they are acknowledged.
    keeps_pages: bool,
    /// How long the receiver was busy since the last [`ChannelLedger::take_busy`], in microseconds.
    busy_us: AtomicU64,
    pub(super) counters: SendCounters,
}

impl ChannelLedger {
    /// Makes an empty ledger of a channel whose packets are in `window`. `arrivals` receives the arrivals of device state. `keeps_pages`: the
    /// ledger can tell which pages are [not acknowledged](Self::unconfirmed_pages); only one thread hands them over then.
    pub(super) fn new(window: Arc<Window>, arrivals: Option<Arc<dyn PieceArrivals>>, keeps_pages: bool) -> Self {
        Self {
            queued_items: AtomicU64::new(0),
            state: Mutex::default(),
            changed: Condvar::new(),
            window,
            arrivals,
            keeps_pages,
            busy_us: AtomicU64::new(0),
            counters: SendCounters::default(),
        }
    }

    /// Counts an item without pages of guest RAM.
    pub(super) fn count_queued(&self) {
        self.queued_items.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts an item that is about to be queued.
    pub(super) fn queued(&self, item: &Item) {
        self.count_queued();
        if self.keeps_pages {
            let (block, runs) = match item {
                Item::Guest(wanted) => (wanted.pages.block, wanted.pages.runs()),
                _ => (0, &[][..]),
            };
            let mut state = self.state();
            state.unconfirmed.push_back(Unconfirmed { block, runs: runs.len(), last: None });
            state.runs.extend(runs);
        }
    }

    /// Records that all packets of the first `items` items are written.
    pub(super) fn all_written(&self, items: u64) {
        let mut state = self.state();
        let (last, newly_written) = (state.sequence.last(), (items - state.written_items) as usize);
        state.written_items = items;
        if self.keeps_pages {
            let unwritten = state.unconfirmed.iter_mut().filter(|item| item.last.is_none());
            unwritten.take(newly_written).for_each(|item| item.last = Some(last));
            state.confirm();
        }
        self.wake(state);
    }

    /// Adds the next packet, and returns its number.
    pub(super) fn next_packet(&self, packet: InFlight) -> u64 {
        let mut state = self.state();
        state.in_flight.push_back(packet);
        state.sequence.advance()
    }

    /// Returns the number of the last packet.
    pub(super) fn last_packet(&self) -> u64 {
        self.state().sequence.last()
    }

    /// Returns the entry of packet `number`; none if the packet is not in flight.
    pub(super) fn packet(&self, number: u64) -> Option<InFlight> {
        let state = self.state();
        let before = number.checked_sub(state.sequence.acknowledged() + 1)?;
        state.in_flight.get(usize::try_from(before).ok()?).copied()
    }

    /// Removes the packets that `ack` covers, and releases what they hold.
    pub(super) fn acknowledge(&self, ack: &Ack) -> Result<(), BadAcknowledgement> {
        self.busy_us.fetch_add(ack.busy_us.into(), Ordering::Relaxed);
        let (mut released, mut delivered, mut with_pages) = (0, Carried::default(), 0);
        let mut state = self.state();
        let before = state.sequence.acknowledged();
        state.sequence.acknowledge(ack.sequence)?;
        for _ in before..ack.sequence {
            let Some(packet) = state.in_flight.pop_front() else { break };
            released += packet.in_window;
            delivered += packet.delivers;
            with_pages += u64::from(packet.delivers.pages() > 0);
            if let (Some((device, bytes)), Some(arrivals)) = (packet.device, &self.arrivals) {
                arrivals.arrived(device, bytes);
            }
        }
        state.confirm();
        self.wake(state);
        if released > 0 || with_pages > 0 {
            self.window.acknowledge(released, &delivered, with_pages);
        }
        Ok(())
    }

    /// Adds pages to retransmit, and empties `pages`. Called before the acknowledgement that covers their packet, so that a thread which
    /// sees that acknowledgement sees these pages.
    pub(super) fn refuse(&self, pages: &mut Vec<RefusedPages>) {
        self.state().refused.append(pages);
    }

    /// Moves the pages to retransmit to `pages`, which must be empty. Returns the number of the last acknowledged packet: if `pages` stays
    /// empty, the destination has placed everything up to that packet.
    pub(super) fn take_refused(&self, pages: &mut Vec<RefusedPages>) -> u64 {
        debug_assert!(pages.is_empty());
        let mut state = self.state();
        let (last, acknowledged) = (state.sequence.last(), state.sequence.acknowledged());
        if self.keeps_pages {
            // Those that were taken before are written by now.
            state.retransmitted.retain_mut(|(_, packet)| {
                *packet = last.min(*packet);
                *packet > acknowledged
            });
            let State { refused, retransmitted, .. } = &mut *state;
            retransmitted.extend(refused.iter().map(|refused| (refused.pages, u64::MAX)));
        }
        std::mem::swap(&mut state.refused, pages);
        acknowledged
    }

    /// Passes to `add` all pages that were handed over and may not be placed: those of items that are not acknowledged as a whole, and those that
    /// were refused. Only where the channel keeps pages in mind.
    pub(super) fn unconfirmed_pages(&self, mut add: impl FnMut(u16, Range<u64>)) {
        let state = self.state();
        let mut runs = state.runs.iter();
        for item in &state.unconfirmed {
            runs.by_ref().take(item.runs).for_each(|run| add(item.block, run.first..run.end()));
        }
        let refused = state.refused.iter().map(|refused| refused.pages);
        for pages in refused.chain(state.retransmitted.iter().map(|(pages, _)| *pages)) {
            add(pages.block, pages.first..pages.first + u64::from(pages.count));
        }
    }

    /// Waits until everything that was handed over so far is written and acknowledged. Fails where the channel ends before.
    pub(super) fn drained(&self) -> Result<Drained, WindowClosed> {
        let expected = self.queued_items.load(Ordering::Relaxed);
        let state = self.wait(self.state(), |state| state.written_items == expected)?;
        let last = state.sequence.last();
        let state = self.wait(state, |state| state.sequence.acknowledged() >= last)?;
        if state.refused.is_empty() { Ok(Drained::All(last)) } else { Ok(Drained::Refused) }
    }

    /// Returns how long the receiver was busy since the last call.
    pub(super) fn take_busy(&self) -> Duration {
        Duration::from_micros(self.busy_us.swap(0, Ordering::Relaxed))
    }

    /// Records that nothing more will be sent.
    pub(super) fn finish(&self) {
        self.state().finished = true;
    }

    /// Returns whether the peer may close the channel: nothing more will be sent, and everything is acknowledged.
    pub(super) fn is_complete(&self) -> bool {
        let state = self.state();
        state.finished && state.sequence.outstanding() == 0
    }

    /// Ends all waits: the channel has ended.
    pub(super) fn end(&self) {
        self.state().ended = true;
        self.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread of the channel panics")
    }

    /// Waits until `is_done`.
    fn wait<'a>(
        &self,
        mut state: MutexGuard<'a, State>,
        is_done: impl Fn(&State) -> bool,
    ) -> Result<MutexGuard<'a, State>, WindowClosed> {
        while !state.ended && !is_done(&state) {
            state.waiting += 1;
            state = self.changed.wait(state).expect("no thread of the channel panics");
            state.waiting -= 1;
        }
        if is_done(&state) { Ok(state) } else { Err(WindowClosed) }
    }

    fn wake(&self, state: MutexGuard<'_, State>) {
        let waiting = state.waiting;
        drop(state);
        if waiting > 0 {
            self.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::batch::BatchPool;
    use crate::item::{GuestPages, SendMode};

    #[derive(Debug, Default)]
    struct Arrivals(Mutex<Vec<(u16, u32)>>);

    impl PieceArrivals for Arrivals {
        fn arrived(&self, device: u16, bytes: u32) {
            self.0.lock().unwrap().push((device, bytes));
        }
    }

    fn ledger() -> (ChannelLedger, Arc<Window>, Arc<Arrivals>) {
        let window = Arc::new(Window::new(4096, Duration::ZERO, Duration::ZERO));
        let arrivals = Arc::new(Arrivals::default());
        (ChannelLedger::new(Arc::clone(&window), Some(Arc::clone(&arrivals) as _), true), window, arrivals)
    }

    /// An item of pages that are read from guest RAM, and these pages.
    fn pages(first: u64, count: u32) -> Item {
        let ram = crate::accelerator::tests::ram_of(&[&[1]]);
        let mut pages = BatchPool::new(1, 0).take(0).unwrap();
        pages.push_normal(first, count, 0);
        Item::Guest(GuestPages { ram, pages, post_copy: None, mode: SendMode::Usual })
    }

    fn unconfirmed(ledger: &ChannelLedger) -> Vec<(u16, Range<u64>)> {
        let mut pages = Vec::new();
        ledger.unconfirmed_pages(|block, run| pages.push((block, run)));
        pages
    }

    #[test]
    fn pages_are_confirmed_when_the_last_packet_of_their_item_is_acknowledged() {
        let (ledger, ..) = ledger();
        ledger.queued(&pages(10, 5));
        ledger.queued(&pages(20, 1));
        ledger.next_packet(InFlight::default());
        ledger.next_packet(InFlight::default());
        ledger.acknowledge(&ack(1)).unwrap();
        assert_eq!(unconfirmed(&ledger), [(0, 10..15), (0, 20..21)], "not all of the first is written");
        ledger.all_written(1);
        assert_eq!(unconfirmed(&ledger), [(0, 10..15), (0, 20..21)], "the second packet is on its way");
        ledger.acknowledge(&ack(2)).unwrap();
        assert_eq!(unconfirmed(&ledger), [(0, 20..21)]);
        // All of its pages were left out, because the destination has them.
        ledger.all_written(2);
        assert_eq!(unconfirmed(&ledger), []);
    }

    #[test]
    fn refused_pages_are_unconfirmed_until_the_packets_that_retransmit_them_are_acknowledged() {
        let (ledger, ..) = ledger();
        let request = PageRequest { block: 3, first: 7, count: 2 };
        ledger.next_packet(InFlight::default());
        ledger.refuse(&mut vec![RefusedPages { packet: 1, pages: request }]);
        ledger.acknowledge(&ack(1)).unwrap();
        let lacks = [(3, 7..9)];
        assert_eq!(unconfirmed(&ledger), lacks);
        ledger.take_refused(&mut Vec::new());
        ledger.next_packet(InFlight::default());
        assert_eq!(unconfirmed(&ledger), lacks);
        ledger.take_refused(&mut Vec::new());
        assert_eq!(unconfirmed(&ledger), lacks, "written, not acknowledged");
        ledger.acknowledge(&ack(2)).unwrap();
        ledger.take_refused(&mut Vec::new());
        assert_eq!(unconfirmed(&ledger), []);
    }

    fn ack(sequence: u64) -> Ack {
        Ack { sequence, busy_us: 5 }
    }

    #[test]
    fn an_acknowledgement_releases_what_all_packets_that_it_covers_hold() {
        let (ledger, window, arrivals) = ledger();
        window.enter(300).unwrap();
        let delivers = Carried { normal_pages: 1, zero_pages: 2, bytes: 100 };
        let pages = InFlight { in_window: 100, delivers, content_pages: 1, ..InFlight::default() };
        let piece = InFlight { in_window: 50, device: Some((3, 50)), ..InFlight::default() };
        let numbers = [pages, piece, pages].map(|packet| ledger.next_packet(packet));
        assert_eq!((numbers, ledger.last_packet()), ([1, 2, 3], 3));

        ledger.acknowledge(&ack(2)).unwrap();

        let delivered = window.delivered().1;
        assert_eq!((window.in_flight(), delivered.carried, delivered.packets), (150, delivers, 1));
        assert_eq!(*arrivals.0.lock().unwrap(), [(3, 50)]);
        assert_eq!((ledger.take_busy(), ledger.take_busy()), (Duration::from_micros(5), Duration::ZERO));
        assert_eq!(
            [1, 2, 3, 4].map(|number| ledger.packet(number).map(|packet| packet.in_window)),
            [None, None, Some(100), None]
        );
        assert!(ledger.acknowledge(&ack(2)).is_err() && ledger.acknowledge(&ack(4)).is_err());
        assert_eq!(window.in_flight(), 150);
    }

    #[test]
    fn a_channel_has_drained_when_its_items_are_written_and_acknowledged_and_nothing_is_refused() {
        let (ledger, ..) = ledger();
        let page = RefusedPages { packet: 1, pages: PageRequest { block: 0, first: 7, count: 1 } };
        ledger.queued(&Item::Retransmit);
        ledger.next_packet(InFlight::default());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| ledger.drained());
            ledger.all_written(1);
            ledger.refuse(&mut vec![page]);
            ledger.acknowledge(&ack(1)).unwrap();
            assert_eq!(waiting.join().unwrap(), Ok(Drained::Refused));
        });
        let mut refused = Vec::new();
        assert_eq!((ledger.take_refused(&mut refused), refused.len()), (1, 1));
        refused.clear();
        assert_eq!((ledger.take_refused(&mut refused), refused.len(), ledger.drained()), (1, 0, Ok(Drained::All(1))));

        assert!(!ledger.is_complete());
        ledger.finish();
        assert!(ledger.is_complete());
        ledger.next_packet(InFlight::default());
        assert!(!ledger.is_complete());
        ledger.end();
        assert_eq!(ledger.drained(), Err(WindowClosed));
    }
}

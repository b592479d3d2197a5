//! The ledger of one channel: everything that was handed over and is not settled yet.
//!
//! | counted | from | to |
//! |---|---|---|
//! | an item | [`ChannelLedger::queued`], by the thread that hands it over | [`ChannelLedger::all_written`], when all its packets are written |
//! | a packet | [`ChannelLedger::next_packet`], which gives it its number | [`ChannelLedger::acknowledge`], which releases what the packet holds |
//! | refused pages | [`ChannelLedger::refuse`], by the acknowledging thread | [`ChannelLedger::take_refused`], by the sending thread, which retransmits them |
//!
//! What an acknowledgement releases is in the packet's entry ([`InFlight`]): bytes of the window, pages that count as delivered, and the
//! arrival of a piece of device state. The channel has drained when nothing is left in any of the three rows.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use sterna_offload::Producer;
use sterna_wire::packet::{Ack, PageRequest};
use sterna_wire::sequence::{BadAcknowledgement, SendSequence};

use super::counters::SendCounters;
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
    /// Nothing more will be sent: the peer may close the channel.
    finished: bool,
    /// The channel has ended: nothing more will be acknowledged.
    ended: bool,
    /// Number of threads that wait for a change: waking costs a system call even where no thread waits.
    waiting: u32,
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
    /// How long the receiver was busy since the last [`ChannelLedger::take_busy`], in microseconds.
    busy_us: AtomicU64,
    pub(super) counters: SendCounters,
}

impl ChannelLedger {
    /// Makes an empty ledger of a channel whose packets are in `window`. `arrivals` receives the arrivals of device state.
    pub(super) fn new(window: Arc<Window>, arrivals: Option<Arc<dyn PieceArrivals>>) -> Self {
        Self {
            queued_items: AtomicU64::new(0),
            state: Mutex::default(),
            changed: Condvar::new(),
            window,
            arrivals,
            busy_us: AtomicU64::new(0),
            counters: SendCounters::default(),
        }
    }

    /// Counts an item that is about to be queued.
    pub(super) fn queued(&self) {
        self.queued_items.fetch_add(1, Ordering::Relaxed);
    }

    /// Records that all packets of the first `items` items are written.
    pub(super) fn all_written(&self, items: u64) {
        let mut state = self.state();
        state.written_items = items;
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
        std::mem::swap(&mut state.refused, pages);
        state.sequence.acknowledged()
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
        (ChannelLedger::new(Arc::clone(&window), Some(Arc::clone(&arrivals) as _)), window, arrivals)
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
        ledger.queued();
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

//! An embedded destination whose source speaks the protocol and sends what it must not, or not yet: the guest stays where it is, and both sides
//! report why.

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use crate::common::within_a_minute;
use crate::guest::{Behind, Memory, Monitor, Running, Workload, faults_can_be_watched};
use sterna_codec::Encoding;
use sterna_engine::abort::Abort;
use sterna_engine::batch::BatchPool;
use sterna_engine::cancel::Cancel;
use sterna_engine::destination::{Destination, Fence};
use sterna_engine::item::Item;
use sterna_engine::migration::{ErrorKind, GuestState, MigrationError, Phase};
use sterna_engine::pacer::Pacer;
use sterna_engine::report::ReceiveReport;
use sterna_engine::send::{Compression, SendChannel, SendContext};
use sterna_engine::session::{
    self, ConnectionEvent, Features, Offer, OnConnectionEvent, Peer, PeerEvent, Redial, Session,
};
use sterna_engine::transport::simulated::Network;
use sterna_engine::transport::{Address, Reader, Security, Writer};
use sterna_engine::window::Window;
use sterna_memory::ram::Backing;
use sterna_wire::control::{Block, ControlMessage, Machine, Mode, Totals};
use sterna_wire::packet::{PAGE_REQUEST_LENGTH, PacketHeader, PacketKind, PageRequest, Run, RunKind};
use sterna_wire::reason::Reason;
use sterna_wire::switchover::SwitchoverMessage;

use crate::odd_destinations::{BUSY, PAGES, SHAPES, failures, news};

/// A source that speaks the protocol as a test tells it to.
struct OddSource {
    address: Address,
    session: Session,
    redial: Redial,
    peer: Peer,
    news: Receiver<ConnectionEvent>,
    tell: OnConnectionEvent,
    abort: Arc<Abort>,
    answers: Vec<ControlMessage>,
}

impl OddSource {
    fn new(address: &Address, features: Features<'_>) -> Self {
        let block =
            |(name, pages): (&str, usize)| Block { name: name.into(), bytes: pages as u64 * 4096, page_size: 4096 };
        let machine = Machine {
            monitor: "odd".into(),
            machine_type: String::new(),
            ram: PAGES.iter().sum::<usize>() as u64 * 4096,
            downtime_ms: 300,
            blocks: ["low", "high"].into_iter().zip(PAGES).map(block).collect(),
            ..Machine::default()
        };
        let offer = Offer {
            to: address,
            security: &Security::Insecure,
            channels: 2,
            packet_size: 64 << 10,
            machine,
            mode: Mode::Embedded,
            features,
            encoding: Encoding::default(),
            patience: Duration::ZERO,
        };
        let (tell, news) = news();
        let (link, session) = session::dial(&offer, &Cancel::new(), &tell).unwrap();
        let (peer, abort, address) = (Peer::new(link), Arc::new(Abort::default()), address.clone());
        let redial = Redial::new(Duration::ZERO);
        Self { address, session, redial, peer, news, tell, abort, answers: Vec::new() }
    }

    /// Says this.
    fn send(&self, message: &ControlMessage) {
        self.peer.send(message);
    }

    fn say_of_the_switchover(&self, message: SwitchoverMessage) {
        self.send(&ControlMessage::Switchover(message));
    }

    /// Listens until something is heard that `wanted` looks for; false if the destination hung up before, or cannot be reached again.
    fn hears(&mut self, wanted: impl Fn(&ControlMessage) -> bool) -> bool {
        while let Ok(news) = self.news.recv() {
            match self.peer.handle(news) {
                Some(PeerEvent::Message(message, _share)) => {
                    self.answers.push(message);
                    if self.answers.last().is_some_and(&wanted) {
                        return true;
                    }
                }
                Some(PeerEvent::Lost(_) | PeerEvent::Unreachable(_)) => return false,
                Some(PeerEvent::Connected) | None => {}
            }
        }
        false
    }

    /// Returns the destination's messages, once it has hung up.
    fn until_it_hangs_up(mut self) -> Vec<ControlMessage> {
        while self.hears(|_| true) {}
        self.answers
    }

    /// Opens its channels: two for RAM, and the stream.
    fn open(&self) -> (Vec<SendChannel>, SendChannel) {
        let context = SendContext::new(
            Arc::new(Window::new(64 << 10, Duration::ZERO, Duration::ZERO)),
            Arc::new(Pacer::new(None)),
            Arc::clone(&self.abort),
            Compression::none(),
            self.session.rules(),
        );
        self.session.open_channels(&Security::Insecure, &self.address, &context, &Cancel::new()).unwrap()
    }

    /// Is lost, and comes back.
    fn comes_back(&mut self) {
        self.session.incarnation = self.peer.begin_anew();
        let (to, session, tell) = (self.address.clone(), self.session.clone(), Arc::clone(&self.tell));
        self.redial.dial(to, Security::Insecure, session, tell);
    }
}

/// The next request on a post-copy channel.
fn request(reader: &mut Reader) -> PageRequest {
    let mut bytes = [0; PAGE_REQUEST_LENGTH];
    assert!(reader.read_packet_start(&mut bytes).unwrap());
    PageRequest::decode(&bytes, &SHAPES).unwrap()
}

/// Sends what was asked for: zeros.
fn answer(writer: &mut Writer, page: &PageRequest) {
    let table = Run { kind: RunKind::Zero, first: page.first, count: page.count }.encode();
    let header = PacketHeader {
        kind: PacketKind::Pages,
        method: 0,
        subject: page.block,
        sequence: 1,
        table_length: table.len() as u32,
        payload_length: 0,
        content_length: 0,
        content_checksum: 0,
        detail: 0,
    };
    writer.write_all_vectored(&[&header.encode(&table), &table]).unwrap();
}

/// The records of a state of `content`: what begins it and what ends it.
fn send_state(stream: &SendChannel, content: &[u8], end: bool) {
    stream.send(Item::Stream { record: 3, content: content.to_vec() }).unwrap();
    if end {
        stream.send(Item::Stream { record: 4, content: Vec::new() }).unwrap();
    }
}

/// As the test monitor writes it: two numbers, the second of which is the digest of RAM that was never touched.
fn state() -> Vec<u8> {
    let digest = Memory::new(PAGES[0], PAGES[1]).digest();
    [[0; 8], digest.to_le_bytes()].concat()
}

const NOTHING: Features<'_> = Features { offered: &["guest-state-1"], required: &["guest-state-1"] };
const POST_COPY: Features<'_> =
    Features { offered: &["guest-state-1", "post-copy-2"], required: &["guest-state-1", "post-copy-2"] };

/// What a test has of the destination.
struct Destined {
    memory: Arc<Memory>,
    cancel: Cancel,
    fence: Fence,
    /// The calls of its monitor.
    calls: Receiver<&'static str>,
}

/// A destination against such a source.
fn destination_against<R: Send>(
    features: Features<'_>,
    source: impl FnOnce(OddSource, &Destined) -> R + Send,
) -> (Result<ReceiveReport, MigrationError>, R) {
    destination_that_touches(None, features, source)
}

/// As [`destination_against`], where the monitor reads a page of the first block when it starts the guest.
fn destination_that_touches<R: Send>(
    page: Option<usize>,
    features: Features<'_>,
    source: impl FnOnce(OddSource, &Destined) -> R + Send,
) -> (Result<ReceiveReport, MigrationError>, R) {
    destination_that_waits(Duration::from_millis(100), page, features, source)
}

/// As [`destination_that_touches`], where a source can reconnect for `linger` after the end.
fn destination_that_waits<R: Send>(
    linger: Duration,
    page: Option<usize>,
    features: Features<'_>,
    source: impl FnOnce(OddSource, &Destined) -> R + Send,
) -> (Result<ReceiveReport, MigrationError>, R) {
    let memory = Memory::new(PAGES[0], PAGES[1]);
    let (mut to, _) = Monitor::new(&memory, &Running::default(), Workload { writers: 0, ..BUSY });
    // In post-copy it would wait for what it looks at.
    to.behind = Some(Behind::new(&memory));
    let ram = memory.ram();
    let listening =
        Destination::new(ram).linger(linger).listen(Network::new(1).port("there"), &Security::Insecure).unwrap();
    let (called, calls) = channel();
    let touched = Arc::clone(&memory);
    to.on_call = Some(Box::new(move |call| {
        // The test may have ended.
        let _ = called.send(call);
        if let Some(page) = page.filter(|_| call == "start") {
            assert_eq!(touched.words(0)[page * 512].load(Ordering::Relaxed), 0);
        }
    }));
    let address = listening.address().clone();
    let destined = Destined { memory, cancel: Cancel::new(), fence: listening.fence(), calls };
    let outcome = std::thread::scope(|scope| {
        let (to, cancelled) = (&mut to, destined.cancel.clone());
        let receiving = scope.spawn(move || listening.run(to, &cancelled, &()));
        let answers = source(OddSource::new(&address, features), &destined);
        (receiving.join().unwrap(), answers)
    });
    // Started it is stopped by nobody here, whatever it lacks.
    let started = outcome.0.as_ref().err().is_none_or(|error| error.phase == Phase::PostCopy);
    assert_eq!(to.runs(), started);
    outcome
}

fn is_post_copy_ready(message: &ControlMessage) -> bool {
    matches!(message, ControlMessage::Switchover(SwitchoverMessage::PostCopyReady))
}

fn is_switchover(wanted: &SwitchoverMessage) -> impl Fn(&ControlMessage) -> bool {
    move |message| matches!(message, ControlMessage::Switchover(message) if message == wanted)
}

#[test]
fn a_source_that_begins_post_copy_without_having_agreed_on_it_is_refused() {
    within_a_minute(|| {
        let (received, answers) = destination_against(NOTHING, |source, _| {
            source.say_of_the_switchover(SwitchoverMessage::PostCopy);
            source.until_it_hangs_up()
        });
        let error = received.unwrap_err();
        assert!(error.reason.contains("it was not agreed on"), "{error}");
        assert_eq!(error.guest, GuestState::NotHere);
        assert_eq!(failures(&answers), [error.reason.as_str()]);
    });
}

#[test]
fn a_source_that_claims_pages_that_it_did_not_send_is_refused() {
    within_a_minute(|| {
        for ram in [vec![7, 0], vec![], vec![0; 9]] {
            let totals = ControlMessage::Totals(Totals { ram, normal_pages: 7, zero_pages: 0 });
            let (received, answers) = destination_against(NOTHING, |source, _| {
                source.send(&totals);
                source.until_it_hangs_up()
            });
            let error = received.unwrap_err();
            assert!(error.reason.contains("pages are missing"), "{error}");
            let aborted = answers.iter().any(|message| {
                matches!(message, ControlMessage::Switchover(SwitchoverMessage::Abort(reason)) if reason.text == error.reason)
            });
            assert!(aborted, "{answers:?}");
        }
    });
}

/// So many pages from `first` on, for a channel.
fn pages(first: u64, count: u32) -> Item {
    let mut batch = BatchPool::new(1, 64 << 10).take(0).unwrap();
    batch.push_normal(first, count, count as usize * 4096).fill(1);
    Item::Pages(batch)
}

fn nothing_sent() -> ControlMessage {
    ControlMessage::Totals(Totals { ram: vec![0, 0], normal_pages: 0, zero_pages: 0 })
}

#[test]
fn a_source_that_sends_what_it_may_not_send_now_is_refused_by_its_name() {
    within_a_minute(|| {
        let ready = ControlMessage::Ready { placement: vec!["secret".repeat(1000)], deltas: Vec::new() };
        for (sent, named) in [
            (vec![ready], "`ready`"),
            (vec![nothing_sent(), nothing_sent()], "`totals`"),
            (vec![ControlMessage::SwitchoverAck], "`switchover_ack`"),
        ] {
            let (received, answers) = destination_against(NOTHING, |source, _| {
                sent.iter().for_each(|message| source.send(message));
                source.until_it_hangs_up()
            });
            let error = received.unwrap_err();
            assert!(error.reason.contains(&format!("the source sent {named}")), "{error}");
            assert!(!error.to_string().contains("secret") && error.reason.len() < 100, "{error}");
            assert_eq!(error.guest, GuestState::NotHere);
            assert_eq!(failures(&answers), [error.reason.as_str()], "{answers:?}");
        }
    });
}

#[test]
fn a_source_that_sends_pages_after_its_totals_is_refused() {
    within_a_minute(|| {
        let (received, _) = destination_against(NOTHING, |source, destined| {
            let (ram, stream) = source.open();
            send_state(&stream, &state()[..9], false);
            source.send(&nothing_sent());
            // It loads, and waits for the rest of the state.
            assert_eq!(destined.calls.recv().unwrap(), "load");
            ram[0].send(pages(3, 1)).unwrap();
            source.until_it_hangs_up()
        });
        let error = received.unwrap_err();
        assert_eq!(error.guest, GuestState::NotHere);
        assert!(error.reason.contains("pages after the source's totals"), "{error}");
    });
}

#[test]
fn a_source_that_sent_more_than_its_totals_say_is_refused() {
    within_a_minute(|| {
        let (received, _) = destination_against(NOTHING, |source, _| {
            let (ram, _stream) = source.open();
            ram[0].send(pages(3, 1)).unwrap();
            ram[0].drained().unwrap();
            source.send(&nothing_sent());
            source.until_it_hangs_up()
        });
        let error = received.unwrap_err();
        assert_eq!(error.guest, GuestState::NotHere);
        assert!(error.reason.contains("more packets than its totals say"), "{error}");
    });
}

#[test]
fn a_source_that_sends_a_region_on_two_channels_is_refused() {
    within_a_minute(|| {
        let (received, _) = destination_against(NOTHING, |source, _| {
            let (ram, _stream) = source.open();
            ram[0].send(pages(3, 1)).unwrap();
            ram[0].drained().unwrap();
            ram[1].send(pages(4, 1)).unwrap();
            source.until_it_hangs_up()
        });
        let error = received.unwrap_err();
        assert!(error.reason.contains("pages of one region arrive on several channels"), "{error}");
    });
}

#[test]
fn a_destination_that_waits_for_state_can_be_cancelled() {
    within_a_minute(|| {
        let (received, _) = destination_against(NOTHING, |source, destined| {
            let (_ram, stream) = source.open();
            source.send(&nothing_sent());
            send_state(&stream, &state()[..9], false);
            stream.drained().unwrap();
            destined.cancel.cancel();
            source.until_it_hangs_up()
        });
        let error = received.unwrap_err();
        assert!(error.kind == ErrorKind::Cancelled && error.reason == "cancelled", "{error}");
    });
}

#[test]
fn a_source_that_comes_back_before_anything_was_loaded_in_post_copy_hears_that_nothing_came_of_it() {
    within_a_minute(|| {
        if !faults_can_be_watched() {
            return;
        }
        // It can be reached for a minute, which the source's goodbye cuts short.
        let (received, heard) = destination_that_waits(Duration::from_secs(60), None, POST_COPY, |mut source, _| {
            let (_ram, stream) = source.open();
            source.say_of_the_switchover(SwitchoverMessage::PostCopy);
            assert!(source.hears(is_post_copy_ready));
            // Nobody reads it: its thread waits.
            send_state(&stream, &state(), true);
            source.comes_back();
            let heard =
                source.hears(|message| matches!(message, ControlMessage::Switchover(SwitchoverMessage::Abort(_))));
            source.say_of_the_switchover(SwitchoverMessage::Goodbye);
            source.abort.finish();
            heard
        });
        assert!(heard);
        assert_eq!(received.unwrap_err().guest, GuestState::NotHere);
    });
}

/// What a source has in post-copy: RAM channels, the stream and the post-copy channel.
type Channels = (Vec<SendChannel>, SendChannel, (Writer, Reader));

impl OddSource {
    /// Leads the destination to where it is prepared, and lacks one page of a block.
    fn prepares_without(&mut self, block: u16, page: u64) -> Channels {
        let (ram, stream) = self.open();
        self.say_of_the_switchover(SwitchoverMessage::PostCopy);
        assert!(self.hears(is_post_copy_ready));
        let halves = self.session.open_post_copy(&Security::Insecure, &self.address, &self.abort).unwrap();
        let mut batch = BatchPool::new(1, 64 << 10).take(block).unwrap();
        batch.push_zero(page, 1);
        ram[0].send(Item::Discard(batch)).unwrap();
        let last = ram[0].drained().unwrap();
        self.send(&ControlMessage::Totals(Totals { ram: vec![last, 0], normal_pages: 0, zero_pages: 0 }));
        send_state(&stream, &state(), true);
        self.say_of_the_switchover(SwitchoverMessage::Prepare);
        assert!(self.hears(is_switchover(&SwitchoverMessage::Prepared)), "{:?}", self.answers);
        (ram, stream, halves)
    }
}

#[test]
fn a_second_post_copy_channel_is_refused() {
    within_a_minute(|| {
        if !faults_can_be_watched() {
            return;
        }
        let (received, refused) = destination_against(POST_COPY, |mut source, _| {
            let _channels = source.prepares_without(0, 7);
            let second = source.session.open_post_copy(&Security::Insecure, &source.address, &source.abort);
            source.say_of_the_switchover(SwitchoverMessage::Abort(Reason::other("seen enough")));
            let refused = second.unwrap_err().to_string();
            source.until_it_hangs_up();
            refused
        });
        assert!(refused.contains("the post-copy channel exists already"), "{refused}");
        assert_eq!(received.unwrap_err().guest, GuestState::NotHere);
    });
}

#[test]
fn a_guest_that_lacks_memory_is_not_started_when_its_source_is_gone_for_good() {
    within_a_minute(|| {
        if !faults_can_be_watched() {
            return;
        }
        let (received, started) = destination_against(POST_COPY, |mut source, destined| {
            let channels = source.prepares_without(0, 7);
            destined.fence.source_is_gone();
            while source.hears(|_| true) {}
            drop(channels);
            destined.calls.try_iter().any(|call| call == "start")
        });
        let error = received.unwrap_err();
        // It never ran here: the source had all of it.
        assert!(!started && error.guest == GuestState::NotHere, "{error}");
        assert!(error.reason.contains("part of the guest's memory with it"), "{error}");
    });
}

#[test]
fn memory_that_somebody_else_touched_in_post_copy_is_told_and_not_tried_again() {
    within_a_minute(|| {
        if !faults_can_be_watched() {
            return;
        }
        let (received, answers) = destination_against(POST_COPY, |mut source, destined| {
            // Of the block that is a file.
            let (_ram, _stream, (mut writer, _reader)) = source.prepares_without(1, 7);
            source.say_of_the_switchover(SwitchoverMessage::Commit);
            assert!(source.hears(is_switchover(&SwitchoverMessage::RunningIncomplete)), "{:?}", source.answers);
            let ram = destined.memory.ram();
            let Backing::Shared(file, _) = ram.blocks()[1].backing() else { panic!("a file is behind it") };
            file.write_all_at(&[1], 7 * 4096).unwrap();
            answer(&mut writer, &PageRequest { block: 1, first: 7, count: 1 });
            let lost = |message: &ControlMessage| {
                matches!(message, ControlMessage::Switchover(SwitchoverMessage::MemoryLost(_)))
            };
            assert!(source.hears(lost), "{:?}", source.answers);
            source.answers
        });
        let error = received.unwrap_err();
        assert_eq!((error.guest, error.phase), (GuestState::LacksMemory, Phase::PostCopy), "{error}");
        assert!(error.reason.contains("another mapping"), "{error}");
        let lost = SwitchoverMessage::MemoryLost(Reason::new(ErrorKind::Memory, &error.reason));
        assert!(answers.iter().any(is_switchover(&lost)), "{answers:?}");
    });
}

#[test]
fn channels_that_break_under_a_prepared_destination_do_not_make_it_give_up() {
    within_a_minute(|| {
        if !faults_can_be_watched() {
            return;
        }
        let (received, answers) = destination_against(POST_COPY, |mut source, _| {
            let (ram, stream, halves) = source.prepares_without(0, 7);
            // All data channels break there, because of a page that is none.
            let mut batch = BatchPool::new(1, 64 << 10).take(0).unwrap();
            batch.push_zero(10_000, 1);
            ram[0].send(Item::Pages(batch)).unwrap();
            assert!(ram[0].drained().is_err());
            drop((ram, stream, halves));
            source.say_of_the_switchover(SwitchoverMessage::Commit);
            // It hangs up, so that the source comes back with new channels, and knows what it lacks.
            while source.hears(|_| true) {}
            source.comes_back();
            let wants_more = source.hears(is_post_copy_ready);
            source.abort = Arc::default();
            let (mut writer, mut reader) =
                source.session.open_post_copy(&Security::Insecure, &source.address, &source.abort).unwrap();
            let page = request(&mut reader);
            assert_eq!((page, request(&mut reader).count), (PageRequest { block: 0, first: 7, count: 1 }, 0));
            answer(&mut writer, &page);
            let complete = source.hears(is_switchover(&SwitchoverMessage::Running));
            source.say_of_the_switchover(SwitchoverMessage::Goodbye);
            // Whether it also reports that it runs without a page depends on which comes first, the page or the guest's start.
            assert!(wants_more && complete, "{:?}", source.answers);
            source.abort.finish();
            source.answers
        });
        received.unwrap();
        assert_eq!(failures(&answers), [""; 0]);
    });
}

#[test]
fn what_starts_the_guest_gets_its_page_over_new_channels() {
    within_a_minute(|| {
        if !faults_can_be_watched() {
            return;
        }
        let (received, answers) = destination_that_touches(Some(7), POST_COPY, |mut source, destined| {
            let (ram, stream, (writer, mut reader)) = source.prepares_without(0, 7);
            source.say_of_the_switchover(SwitchoverMessage::Commit);
            // The monitor waits for its page, and learns that the guest is not started yet.
            let page = PageRequest { block: 0, first: 7, count: 1 };
            assert_eq!(request(&mut reader), page);
            assert!(destined.calls.try_iter().any(|call| call == "start"));
            drop((ram, stream, (writer, reader)));
            // A failure that the source names, and even its wish to cancel, is not the monitor's.
            source.send(&ControlMessage::Failed(Reason::new(ErrorKind::TimeLimit, "a step took too long")));
            source.comes_back();
            assert!(source.hears(is_post_copy_ready), "{:?}", source.answers);
            assert!(
                !source.answers.iter().any(is_switchover(&SwitchoverMessage::RunningIncomplete)),
                "{:?}",
                source.answers
            );
            source.abort = Arc::default();
            let (mut writer, mut reader) =
                source.session.open_post_copy(&Security::Insecure, &source.address, &source.abort).unwrap();
            assert_eq!((request(&mut reader), request(&mut reader).count), (page, 0));
            answer(&mut writer, &page);
            assert!(source.hears(is_switchover(&SwitchoverMessage::Running)), "{:?}", source.answers);
            source.say_of_the_switchover(SwitchoverMessage::Goodbye);
            source.abort.finish();
            source.answers
        });
        received.unwrap();
        assert_eq!(failures(&answers), [""; 0]);
    });
}

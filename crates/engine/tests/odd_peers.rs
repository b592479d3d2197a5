//! An embedded source or destination whose other side speaks the protocol and says what it should not, or not yet: the guest
//! stays where it is, and both sides say why.

mod common;
mod guest;

use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::within_a_minute;
use guest::{Memory, Monitor, Running, Workload};
use sterna::abort::Abort;
use sterna::cancel::Cancel;
use sterna::control_link::ControlLink;
use sterna::destination::Destination;
use sterna::migration::{GuestState, MigrationError, Phase};
use sterna::receive::{Sink, SinkError};
use sterna::report::ReceiveReport;
use sterna::session::{
    self, Doorman, Features, Greeting, Heard, Offer, OtherDoor, Peer, PeerNews, Session, Sinks, TellPeer, link_events,
};
use sterna::source::{NotConverging, Source, TimeLimits};
use sterna::transport::simulated::Network;
use sterna::transport::{Address, Limits, Listener, Reader, Security, Writer, accept_channel};
use sterna_codec::MethodChoice;
use sterna_memory::userfault::{Faults, Userfault};
use sterna_wire::control::{Block, ControlMessage, Machine, Mode, PostCopyFigures, Totals};
use sterna_wire::packet::{BlockShape, DeviceLabel, Run};
use sterna_wire::switchover::SwitchoverMessage;

const PAGES: [usize; 2] = [500, 100];
/// Never fits the downtime that is aimed at.
const BUSY: Workload = Workload { writers: 1, span: 500, seed: 3, burst: 0 };
const FEATURES: Features<'_> =
    Features { offered: &["guest-state-1", "post-copy-1", "unchecked-1"], required: &["guest-state-1"] };

/// Takes everything and looks at nothing.
struct Nowhere(Arc<[BlockShape]>);

impl Sink for Nowhere {
    fn blocks(&self) -> Result<Arc<[BlockShape]>, SinkError> {
        Ok(Arc::clone(&self.0))
    }

    fn pages(&mut self, _: u16, _: &[Run], _: &[u8]) -> Result<(), SinkError> {
        Ok(())
    }

    fn discard(&mut self, _: u16, _: &[Run]) -> Result<(), SinkError> {
        Ok(())
    }

    fn stream(&mut self, _: u16, _: &[u8]) -> Result<(), SinkError> {
        Ok(())
    }

    fn device_state(&mut self, _: DeviceLabel<'_>, _: &[u8]) -> Result<(), SinkError> {
        Ok(())
    }
}

impl Sinks for Nowhere {
    fn ram(&self, _: u16) -> Box<dyn Sink> {
        Box::new(Self(Arc::clone(&self.0)))
    }

    fn stream(&self) -> Box<dyn Sink> {
        self.ram(0)
    }
}

/// Takes a source's migration as far as it goes, and answers what it says with what `answers` gives for it. Returns what the
/// source said, when it has hung up.
fn odd_destination(
    listener: Listener,
    mut answers: impl FnMut(&ControlMessage) -> Vec<ControlMessage>,
) -> Vec<ControlMessage> {
    let incoming = listener.start(Security::Insecure, Limits::default()).unwrap();
    let greeting = Greeting { mode: Mode::Embedded, features: FEATURES, refusal: &|_| None };
    let greeted = greeting.first(&incoming, &Cancel::new(), |reason| panic!("{reason}")).unwrap();
    let (tell, news) = news();
    let events = link_events(&tell, 1);
    let link = ControlLink::start(greeted.writer, greeted.reader, greeted.closer, greeted.messages, events).unwrap();
    let shapes = PAGES.map(|pages| BlockShape { pages: pages as u64, page_size: 4096 });
    let abort = Arc::new(Abort::default());
    let kept: Arc<Mutex<Vec<(Writer, Reader)>>> = Arc::default();
    let door: OtherDoor = {
        let kept = Arc::clone(&kept);
        Box::new(move |_, connection, _| {
            kept.lock().unwrap().push(accept_channel(connection).unwrap());
            Ok(())
        })
    };
    let doorman = Doorman::new(greeted.session, Box::new(Nowhere(shapes.into())), &abort, Some(door), tell);
    doorman.open();
    let stop = incoming.stop_handle();
    let mut peer = Peer::new(link);
    peer.say(&ControlMessage::Welcome(greeted.welcome));
    let mut said = Vec::new();
    std::thread::scope(|scope| {
        let doorman = &doorman;
        scope.spawn(move || {
            while let Some((connection, header)) = incoming.next() {
                doorman.admit(connection, &header);
            }
        });
        for answer in answers(&ControlMessage::Ready { placement: Vec::new() }) {
            peer.say(&answer);
        }
        for news in news {
            match peer.hear(news) {
                Some(Heard::Said(message, _share)) => {
                    answers(&message).iter().for_each(|answer| peer.say(answer));
                    said.push(message);
                }
                Some(Heard::Lost(_)) => break,
                _ => {}
            }
        }
        stop.stop();
    });
    abort.finish();
    doorman.join();
    said
}

fn news() -> (TellPeer, Receiver<PeerNews>) {
    let (told, news) = channel();
    (Arc::new(move |event| drop(told.send(event))), news)
}

/// A source with a busy guest against a destination that answers so.
fn source_against(
    not_converging: NotConverging,
    answers: impl FnMut(&ControlMessage) -> Vec<ControlMessage> + Send,
) -> (MigrationError, Vec<ControlMessage>, bool) {
    let memory = Memory::new(PAGES[0], PAGES[1]);
    let running = Running::default();
    let (mut from, log) = Monitor::new(&memory, &running, BUSY);
    from.start();
    let port = Network::new(1).port("there");
    let listener = Listener::bind(port).unwrap();
    let address = listener.local_address();
    let limits = TimeLimits { telling: Duration::from_millis(100), ..TimeLimits::default() };
    let migration = Source::new(memory.ram(), Box::new(log))
        .when_not_converging(not_converging)
        .time_limits(limits)
        .bandwidth(Some(20 << 20))
        .downtime(Duration::from_millis(1));
    let (sent, said) = std::thread::scope(|scope| {
        let odd = scope.spawn(move || odd_destination(listener, answers));
        let sent = migration.run(address, &Security::Insecure, &mut from, &Cancel::new(), &());
        (sent, odd.join().unwrap())
    });
    let runs = from.runs();
    from.stop();
    (sent.unwrap_err(), said, runs)
}

fn failures(said: &[ControlMessage]) -> Vec<&str> {
    said.iter()
        .filter_map(|message| match message {
            ControlMessage::Failed { reason } => Some(reason.as_str()),
            _ => None,
        })
        .collect()
}

#[test]
fn a_destination_that_begins_or_ends_post_copy_unasked_is_refused_and_the_guest_stays() {
    within_a_minute(|| {
        for unasked in [ControlMessage::PostCopyReady, ControlMessage::PostCopyDone(PostCopyFigures::default())] {
            let (error, said, runs) = source_against(NotConverging::GoOn, |message| match message {
                ControlMessage::Ready { .. } => vec![unasked.clone()],
                _ => Vec::new(),
            });
            assert_eq!(error.guest, GuestState::RunsAtSource, "{error}");
            assert!(runs && error.reason.contains("the destination said"), "{error}");
            assert_eq!(failures(&said), [error.reason.as_str()], "{said:?}");
        }
    });
}

#[test]
fn a_destination_that_is_prepared_before_it_was_asked_is_refused_and_the_guest_stays() {
    within_a_minute(|| {
        for early in [SwitchoverMessage::Prepared, SwitchoverMessage::Running] {
            let (error, _, runs) = source_against(NotConverging::GoOn, |message| match message {
                ControlMessage::Ready { .. } => vec![ControlMessage::Switchover(early.clone())],
                _ => Vec::new(),
            });
            assert!(runs && error.guest == GuestState::RunsAtSource, "{error}");
            assert!(error.reason.contains("out of turn"), "{error}");
        }
    });
}

#[test]
fn a_destination_whose_memory_fails_in_post_copy_is_not_waited_for() {
    within_a_minute(|| {
        if let Err(error) = Userfault::open(Faults::All, 0) {
            println!("skipped: {error}");
            return;
        }
        let failed = ControlMessage::Failed { reason: "a page fault could not be answered".into() };
        let (error, _, runs) = source_against(NotConverging::PostCopyAfter(1), |message| match message {
            ControlMessage::PostCopy => vec![ControlMessage::PostCopyReady],
            ControlMessage::Switchover(SwitchoverMessage::Prepare) => {
                vec![ControlMessage::Switchover(SwitchoverMessage::Prepared)]
            }
            ControlMessage::Switchover(SwitchoverMessage::Commit) => {
                vec![ControlMessage::Switchover(SwitchoverMessage::Running), failed.clone()]
            }
            _ => Vec::new(),
        });
        assert!(!runs, "it belongs to the destination");
        assert_eq!((error.guest, error.phase), (GuestState::LacksMemory, Phase::PostCopy), "{error}");
        assert!(error.reason.contains("a page fault could not be answered"), "{error}");
    });
}

/// A destination against a source that says these things after the welcome, and then stays on the line.
fn destination_against(says: &[ControlMessage]) -> (Result<ReceiveReport, MigrationError>, Vec<ControlMessage>) {
    let memory = Memory::new(PAGES[0], PAGES[1]);
    let (mut to, _) = Monitor::new(&memory, &Running::default(), BUSY);
    let listening = Destination::new(memory.ram())
        .linger(Duration::from_millis(100))
        .listen(Network::new(1).port("there"), &Security::Insecure)
        .unwrap();
    let address = listening.address().clone();
    let outcome = std::thread::scope(|scope| {
        let to = &mut to;
        let receiving = scope.spawn(move || listening.run(to, &Cancel::new(), &()));
        let said = odd_source(&address, says);
        (receiving.join().unwrap(), said)
    });
    assert!(!to.runs());
    outcome
}

fn odd_source(address: &Address, says: &[ControlMessage]) -> Vec<ControlMessage> {
    let block = |(name, pages): (&str, usize)| Block { name: name.into(), bytes: pages as u64 * 4096, page_size: 4096 };
    let blocks = ["low", "high"].into_iter().zip(PAGES).map(block).collect();
    let machine = Machine {
        monitor: "odd".into(),
        machine_type: String::new(),
        ram: PAGES.iter().sum::<usize>() as u64 * 4096,
        downtime_ms: 300,
        blocks,
    };
    let offer = Offer {
        to: address,
        security: &Security::Insecure,
        channels: 1,
        packet_size: 64 << 10,
        machine,
        mode: Mode::Embedded,
        features: Features { offered: &["guest-state-1"], required: &["guest-state-1"] },
        method: MethodChoice::parse("none", None).unwrap().method(),
    };
    let (tell, news) = news();
    let (link, Session { .. }) = session::dial(&offer, &Cancel::new(), &tell).unwrap();
    let mut peer = Peer::new(link);
    says.iter().for_each(|message| peer.say(message));
    let mut said = Vec::new();
    for news in news {
        match peer.hear(news) {
            Some(Heard::Said(message, _share)) => {
                said.push(message);
            }
            Some(Heard::Lost(_)) => break,
            _ => {}
        }
    }
    said
}

#[test]
fn a_source_that_begins_post_copy_without_having_agreed_on_it_is_refused() {
    within_a_minute(|| {
        let (received, said) = destination_against(&[ControlMessage::PostCopy]);
        let error = received.unwrap_err();
        assert!(error.reason.contains("it was not agreed on"), "{error}");
        assert_eq!(error.guest, GuestState::NotHere);
        assert_eq!(failures(&said), [error.reason.as_str()]);
    });
}

#[test]
fn a_source_that_claims_to_have_sent_what_did_not_come_is_refused() {
    within_a_minute(|| {
        for ram in [vec![7], vec![], vec![0; 9]] {
            let totals = ControlMessage::Totals(Totals { ram, normal_pages: 7, zero_pages: 0 });
            let (received, said) = destination_against(&[totals]);
            let error = received.unwrap_err();
            assert!(error.reason.contains("pages are missing"), "{error}");
            let told = said.iter().any(|message| {
                matches!(message, ControlMessage::Switchover(SwitchoverMessage::Abort { reason }) if *reason == error.reason)
            });
            assert!(told, "{said:?}");
        }
    });
}

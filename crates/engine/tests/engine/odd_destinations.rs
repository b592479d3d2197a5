//! An embedded source whose destination speaks the protocol and sends what it must not, or not yet: the guest stays where it is, and both sides
//! report why.

use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use crate::common::within_a_minute;
use crate::guest::{Memory, Monitor, Running, Workload, faults_can_be_watched, log_of};
use sterna_codec::MethodChoice;
use sterna_engine::abort::Abort;
use sterna_engine::cancel::Cancel;
use sterna_engine::control_link::{self, ControlLink};
use sterna_engine::destination::Destination;
use sterna_engine::migration::{ErrorKind, GuestState, MigrationError, Phase};
use sterna_engine::receive::{ChannelSink, DeviceBufferSink, PageSink, SinkError, StreamSink};
use sterna_engine::session::{
    ChannelAcceptor, ConnectionEvent, ExtraChannelHandler, Features, Handshake, OnConnectionEvent, Peer, PeerEvent,
    Sinks, link_events,
};
use sterna_engine::source::{NotConverging, Source, TimeLimits};
use sterna_engine::transport::simulated::Network;
use sterna_engine::transport::{Limits, Listener, Reader, Security, Writer, accept_channel};
use sterna_wire::control::{ControlMessage, Mode, Totals};
use sterna_wire::header::ChannelKind;
use sterna_wire::packet::{BlockShape, DeviceLabel, Run};
use sterna_wire::reason::Reason;
use sterna_wire::switchover::{RecordState, SourceState, SwitchoverMessage};

pub(crate) const PAGES: [usize; 2] = [500, 100];
pub(crate) const SHAPES: [BlockShape; 2] =
    [BlockShape { pages: 500, page_size: 4096 }, BlockShape { pages: 100, page_size: 4096 }];
/// Never fits the downtime that is aimed at, however slow the machine is, where memory is filled.
pub(crate) const BUSY: Workload = Workload { writers: 1, span: 500, seed: 3, burst: 0 };
pub(crate) const FEATURES: Features<'_> =
    Features { offered: &["guest-state-1", "post-copy-2", "unchecked-1"], required: &["guest-state-1"] };

/// Takes everything and looks at nothing. State it takes only while it can have the lock.
#[derive(Clone)]
pub(crate) struct Nowhere(pub(crate) Arc<[BlockShape]>, pub(crate) Arc<Mutex<()>>);

impl PageSink for Nowhere {
    fn blocks(&self) -> Result<Arc<[BlockShape]>, SinkError> {
        Ok(Arc::clone(&self.0))
    }

    fn pages(&mut self, _: u16, _: &[Run], _: &[u8]) -> Result<(), SinkError> {
        Ok(())
    }

    fn discard(&mut self, _: u16, _: &[Run]) -> Result<(), SinkError> {
        Ok(())
    }
}

impl StreamSink for Nowhere {
    fn stream(&mut self, _: u16, _: &[u8]) -> Result<(), SinkError> {
        drop(self.1.lock().unwrap());
        Ok(())
    }
}

impl DeviceBufferSink for Nowhere {
    fn buffer(&mut self, _: DeviceLabel<'_>, _: &[u8]) -> Result<(), SinkError> {
        Ok(())
    }
}

impl Sinks for Nowhere {
    fn ram(&self, _: u16) -> ChannelSink {
        ChannelSink::new().with_pages(self.clone()).with_device_buffers(self.clone())
    }

    fn stream(&self) -> ChannelSink {
        ChannelSink::new().with_stream(self.clone())
    }
}

/// As [`Nowhere`], while its gate is open: pages that come later are not acknowledged.
#[derive(Clone)]
struct Gated(Nowhere, Arc<Gate>);

/// Is open at first.
#[derive(Default)]
struct Gate(Mutex<bool>, Condvar);

impl Gate {
    fn set(&self, shut: bool) {
        *self.0.lock().unwrap() = shut;
        self.1.notify_all();
    }
}

/// Opens the gate when it is dropped.
struct Shut(Arc<Gate>);

impl Drop for Shut {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

impl PageSink for Gated {
    fn blocks(&self) -> Result<Arc<[BlockShape]>, SinkError> {
        self.0.blocks()
    }

    fn pages(&mut self, _: u16, _: &[Run], _: &[u8]) -> Result<(), SinkError> {
        drop(self.1.1.wait_while(self.1.0.lock().unwrap(), |shut| *shut).unwrap());
        Ok(())
    }

    fn discard(&mut self, _: u16, _: &[Run]) -> Result<(), SinkError> {
        Ok(())
    }
}

impl Sinks for Gated {
    fn ram(&self, _: u16) -> ChannelSink {
        ChannelSink::new().with_pages(self.clone()).with_device_buffers(self.0.clone())
    }

    fn stream(&self) -> ChannelSink {
        self.0.stream()
    }
}

/// Takes a source's migration as far as it goes, and answers each of its messages by `answers`. Returns the messages of the
/// source, when it has hung up.
fn odd_destination(
    listener: Listener,
    sinks: impl Sinks + 'static,
    mut answers: impl FnMut(&ControlMessage) -> Vec<ControlMessage>,
) -> Vec<ControlMessage> {
    let incoming = listener.start(Security::Insecure, Limits::default()).unwrap();
    let handshake = Handshake { takes: &[(Mode::Embedded, FEATURES)], refusals: &|_| Vec::new(), describe: None };
    let accepted = handshake.first(&incoming, &Cancel::new(), |reason| panic!("{reason}")).unwrap();
    let (tell, news) = news();
    let events = link_events(&tell, 1);
    let link =
        ControlLink::start(accepted.writer, accepted.reader, accepted.closer, accepted.messages, events).unwrap();
    let abort = Arc::new(Abort::default());
    let kept: Arc<Mutex<Vec<(Writer, Reader)>>> = Arc::default();
    let extra_channels: ExtraChannelHandler = {
        let kept = Arc::clone(&kept);
        Box::new(move |_, connection, _| {
            kept.lock().unwrap().push(accept_channel(connection).unwrap());
            Ok(())
        })
    };
    let acceptor = ChannelAcceptor::new(accepted.session, Box::new(sinks), &abort, Some(extra_channels), tell);
    acceptor.open();
    let stop = incoming.stop_handle();
    let mut peer = Peer::new(link);
    peer.send(&ControlMessage::Welcome(accepted.welcome));
    let mut messages = Vec::new();
    std::thread::scope(|scope| {
        let acceptor = &acceptor;
        scope.spawn(move || {
            while let Some((connection, header)) = incoming.next() {
                acceptor.admit(connection, &header);
            }
        });
        for answer in answers(&ControlMessage::Ready { placement: Vec::new(), deltas: Vec::new() }) {
            peer.send(&answer);
        }
        for news in news {
            match peer.handle(news) {
                Some(PeerEvent::Message(message, _share)) => {
                    answers(&message).iter().for_each(|answer| peer.send(answer));
                    messages.push(message);
                }
                Some(PeerEvent::Lost(_)) => break,
                _ => {}
            }
        }
        stop.stop();
    });
    abort.finish();
    drop(answers);
    acceptor.join();
    messages
}

pub(crate) fn news() -> (OnConnectionEvent, Receiver<ConnectionEvent>) {
    let (sender, news) = channel();
    (Arc::new(move |event| drop(sender.send(event))), news)
}

/// A source with a busy guest against a destination that answers so.
fn source_against(
    not_converging: NotConverging,
    answers: impl FnMut(&ControlMessage) -> Vec<ControlMessage> + Send,
) -> (MigrationError, Vec<ControlMessage>, bool) {
    let memory = Memory::new(PAGES[0], PAGES[1]);
    memory.fill();
    let running = Running::default();
    let (mut from, log) = Monitor::new(&memory, &running, BUSY);
    let log = log_of(&from, log);
    from.start();
    let port = Network::new(1).port("there");
    let listener = Listener::bind(port).unwrap();
    let address = listener.local_address();
    let limits = TimeLimits::default().reporting_abort(Duration::from_millis(100));
    let mut migration = Source::new(memory.ram(), log)
        .method(MethodChoice::default())
        .when_not_converging(not_converging)
        .time_limits(limits)
        .bandwidth(Some(20 << 20))
        .downtime(Duration::from_millis(1));
    let (sent, messages) = std::thread::scope(|scope| {
        let sinks = Nowhere(SHAPES.into(), Arc::default());
        let odd = scope.spawn(move || odd_destination(listener, sinks, answers));
        let sent = migration.run(address, &Security::Insecure, &mut from, &Cancel::new(), &());
        (sent, odd.join().unwrap())
    });
    let runs = from.runs();
    from.stop();
    (sent.unwrap_err(), messages, runs)
}

#[test]
fn a_destination_that_answers_an_offer_with_something_else_is_named_in_words_and_not_quoted() {
    let listener = Listener::bind(Network::new(1).port("there")).unwrap();
    let address = listener.local_address();
    let incoming = listener.start(Security::Insecure, Limits::default()).unwrap();
    let stop = incoming.stop_handle();
    let odd = std::thread::spawn(move || {
        let (connection, _) = incoming.next().unwrap();
        let (mut writer, reader) = accept_channel(connection).unwrap();
        let answer = ControlMessage::Ready { placement: vec!["\u{202e}gnihton".into()], deltas: Vec::new() };
        control_link::send_message(&mut writer, &answer).unwrap();
        (writer, reader)
    });
    let memory = Memory::new(PAGES[0], PAGES[1]);
    let (mut from, log) = Monitor::new(&memory, &Running::default(), BUSY);
    from.start();
    let sent =
        Source::new(memory.ram(), Box::new(log)).run(address, &Security::Insecure, &mut from, &Cancel::new(), &());
    let reason = sent.unwrap_err().reason;
    assert!(reason.contains("is the program there a `sterna receive`?"), "{reason}");
    assert!(!reason.contains("Ready") && !reason.contains("gnihton") && !reason.contains('{'), "{reason}");
    from.stop();
    stop.stop();
    drop(odd.join().unwrap());
}

#[test]
fn a_destination_that_takes_no_state_is_given_up_in_time_and_the_guest_runs_on() {
    within_a_minute(|| {
        let memory = Memory::new(PAGES[0], PAGES[1]);
        let (mut from, log) = Monitor::new(&memory, &Running::default(), Workload { span: 1, ..BUSY });
        // More than all queues and sockets hold.
        from.state_bytes = 64 << 20;
        from.start();
        let listener = Listener::bind(Network::new(1).port("there")).unwrap();
        let address = listener.local_address();
        let short = Duration::from_millis(100);
        let limits = TimeLimits::default().step(short).reporting_abort(short);
        let mut migration = Source::new(memory.ram(), Box::new(log))
            .method(MethodChoice::default())
            .time_limits(limits)
            .downtime(Duration::from_millis(10))
            .packet_size(64 << 10);
        let stall = Arc::new(Mutex::new(()));
        let error = std::thread::scope(|scope| {
            let held = stall.lock().unwrap();
            let stall = Arc::clone(&stall);
            scope.spawn(move || odd_destination(listener, Nowhere(SHAPES.into(), stall), |_| Vec::new()));
            let sent = migration.run(address, &Security::Insecure, &mut from, &Cancel::new(), &());
            drop(held);
            sent.unwrap_err()
        });
        assert!(from.runs() && error.guest == GuestState::RunsAtSource, "{error}");
        assert!(error.reason.contains("sending the last pages and the state took too long"), "{error}");
        from.stop();
    });
}

#[test]
fn a_destination_that_ends_every_connection_at_once_is_not_dialled_without_a_pause() {
    within_a_minute(|| {
        let memory = Memory::new(PAGES[0], PAGES[1]);
        let (mut from, log) = Monitor::new(&memory, &Running::default(), BUSY);
        from.start();
        let listener = Listener::bind(Network::new(1).port("there")).unwrap();
        let address = listener.local_address();
        let incoming = listener.start(Security::Insecure, Limits::default()).unwrap();
        let stop = incoming.stop_handle();
        let limits = TimeLimits::default().reporting_abort(Duration::from_secs(3));
        let mut migration = Source::new(memory.ram(), Box::new(log)).time_limits(limits);
        let (error, dials) = std::thread::scope(|scope| {
            let destination = scope.spawn(move || {
                let handshake =
                    Handshake { takes: &[(Mode::Embedded, FEATURES)], refusals: &|_| Vec::new(), describe: None };
                let mut accepted = handshake.first(&incoming, &Cancel::new(), |reason| panic!("{reason}")).unwrap();
                control_link::send_message(&mut accepted.writer, &ControlMessage::Welcome(accepted.welcome)).unwrap();
                drop((accepted.writer, accepted.reader));
                // Accepts what comes, as a load balancer does whose servers are gone, and ends it.
                let mut dials = 0;
                while let Some((connection, header)) = incoming.next() {
                    dials += u32::from(header.kind == ChannelKind::Control);
                    drop(accept_channel(connection));
                }
                dials
            });
            let sent = migration.run(address, &Security::Insecure, &mut from, &Cancel::new(), &());
            stop.stop();
            (sent.unwrap_err(), destination.join().unwrap())
        });
        assert!(from.runs() && error.guest == GuestState::RunsAtSource, "{error}");
        from.stop();
        // With the shortest pauses there are six in this time, and nine in 8 s: a machine that is busy has fewer, or notices the end late.
        assert!((1..=8).contains(&dials), "{dials} dials");
    });
}

pub(crate) fn failures(messages: &[ControlMessage]) -> Vec<&str> {
    messages
        .iter()
        .filter_map(|message| match message {
            ControlMessage::Failed(reason) => Some(reason.text.as_str()),
            _ => None,
        })
        .collect()
}

#[test]
fn a_destination_that_begins_or_ends_post_copy_unasked_is_refused_and_the_guest_stays() {
    within_a_minute(|| {
        for unasked in [SwitchoverMessage::PostCopyReady, SwitchoverMessage::RunningIncomplete] {
            let (error, messages, runs) = source_against(NotConverging::GoOn, |message| match message {
                ControlMessage::Ready { .. } => vec![ControlMessage::Switchover(unasked.clone())],
                _ => Vec::new(),
            });
            assert_eq!(error.guest, GuestState::RunsAtSource, "{error}");
            assert!(runs && error.reason.contains("a message that does not belong here"), "{error}");
            assert_eq!(failures(&messages), [error.reason.as_str()], "{messages:?}");
        }
    });
}

#[test]
fn a_destination_that_sends_what_it_may_not_send_now_is_refused_by_its_name_and_the_guest_stays() {
    within_a_minute(|| {
        let ready = |line: &str| ControlMessage::Ready { placement: vec![line.into()], deltas: Vec::new() };
        let checked = ControlMessage::Checked { refusals: vec!["\u{202e}secret".repeat(1000)] };
        let totals = ControlMessage::Totals(Totals { ram: vec![7; 1000], ..Totals::default() });
        for (sent, named) in [
            (vec![ready("one"), ready("secret")], "`ready`"),
            (vec![ready("one"), checked], "`checked`"),
            (vec![totals], "`totals`"),
        ] {
            let (error, messages, runs) = source_against(NotConverging::GoOn, |message| match message {
                // Of the destination itself, in the place of what the source sends first.
                ControlMessage::Ready { .. } => sent.clone(),
                _ => Vec::new(),
            });
            assert!(runs && error.guest == GuestState::RunsAtSource, "{error}");
            assert!(error.reason.contains(&format!("the destination sent {named}")), "{error}");
            assert!(!error.to_string().contains("secret") && error.reason.len() < 100, "{error}");
            assert_eq!(failures(&messages), [error.reason.as_str()], "{messages:?}");
        }
    });
}

#[test]
fn a_destination_that_is_prepared_before_the_request_is_refused_and_the_guest_stays() {
    within_a_minute(|| {
        for early in [SwitchoverMessage::Prepared, SwitchoverMessage::Running] {
            let (error, _, runs) = source_against(NotConverging::GoOn, |message| match message {
                ControlMessage::Ready { .. } => vec![ControlMessage::Switchover(early.clone())],
                _ => Vec::new(),
            });
            assert!(runs && error.guest == GuestState::RunsAtSource, "{error}");
            assert!(error.reason.contains("a message that does not belong here"), "{error}");
        }
    });
}

#[test]
fn a_destination_whose_memory_fails_in_post_copy_is_not_waited_for() {
    within_a_minute(|| {
        if !faults_can_be_watched() {
            return;
        }
        let lost = SwitchoverMessage::MemoryLost(Reason::new(ErrorKind::Memory, "a page fault could not be answered"));
        let (error, _, runs) = source_against(NotConverging::PostCopyAfter(1), |message| match message {
            ControlMessage::Switchover(SwitchoverMessage::PostCopy) => {
                vec![ControlMessage::Switchover(SwitchoverMessage::PostCopyReady)]
            }
            ControlMessage::Switchover(SwitchoverMessage::Prepare) => {
                vec![ControlMessage::Switchover(SwitchoverMessage::Prepared)]
            }
            ControlMessage::Switchover(SwitchoverMessage::Commit) => {
                [SwitchoverMessage::RunningIncomplete, lost.clone()].map(ControlMessage::Switchover).into()
            }
            _ => Vec::new(),
        });
        assert!(!runs, "it belongs to the destination");
        assert_eq!((error.guest, error.phase), (GuestState::LacksMemory, Phase::PostCopy), "{error}");
        assert!(error.reason.contains("a page fault could not be answered"), "{error}");
    });
}

#[test]
fn a_destination_that_claims_memory_which_was_never_sent_is_not_believed_and_the_monitor_is_kept() {
    within_a_minute(|| {
        // Far more than the first window, and all of it is dirty when the guest is paused.
        const LOW: usize = 8192;
        let shapes = [BlockShape { pages: LOW as u64, ..SHAPES[0] }, SHAPES[1]];
        let memory = Memory::new(LOW, PAGES[1]);
        memory.fill();
        let running = Running::default();
        let (mut from, log) = Monitor::new(&memory, &running, Workload { span: LOW as u64, ..BUSY });
        let log = log_of(&from, log);
        from.start();
        let directory = tempfile::tempdir().unwrap();
        let listener = Listener::bind(Network::new(1).port("there")).unwrap();
        let address = listener.local_address();
        let mut migration = Source::new(memory.ram(), log)
            .method(MethodChoice::default())
            .when_not_converging(NotConverging::PostCopyAfter(1))
            .downtime(Duration::from_millis(1))
            .state_dir(directory.path());
        let error = std::thread::scope(|scope| {
            scope.spawn(move || {
                let gate: Arc<Gate> = Arc::default();
                let shut = Shut(Arc::clone(&gate));
                let sinks = Gated(Nowhere(shapes.into(), Arc::default()), gate);
                odd_destination(listener, sinks, move |message| {
                    let ControlMessage::Switchover(message) = message else { return Vec::new() };
                    let answers = match message {
                        SwitchoverMessage::PostCopy => vec![SwitchoverMessage::PostCopyReady],
                        SwitchoverMessage::Prepare => {
                            // What is missing is not taken, so that most of it stays at the source.
                            shut.0.set(true);
                            vec![SwitchoverMessage::Prepared]
                        }
                        SwitchoverMessage::Commit => {
                            vec![SwitchoverMessage::RunningIncomplete, SwitchoverMessage::Running]
                        }
                        _ => Vec::new(),
                    };
                    answers.into_iter().map(ControlMessage::Switchover).collect()
                })
            });
            migration.run(address, &Security::Insecure, &mut from, &Cancel::new(), &()).unwrap_err()
        });
        assert_eq!(
            (error.guest, error.phase, error.kind),
            (GuestState::LacksMemory, Phase::PostCopy, ErrorKind::OtherSide)
        );
        let claim = "the destination claims that the guest runs there with all of its memory, but ";
        assert!(error.reason.starts_with(claim) && error.reason.ends_with("never sent: they are only here"), "{error}");
        // Neither resumed nor ended.
        assert!(!from.runs() && !from.moved);
        let records = sterna_engine::record_file::unsettled(directory.path()).unwrap();
        let [record] = &records[..] else { panic!("{records:?}") };
        assert_eq!(record.state, RecordState::Source(SourceState::Committed));
        assert_eq!(record.disputed.as_deref(), Some(&*error.reason));
    });
}

#[test]
fn a_destination_that_calls_memory_lost_without_post_copy_is_not_believed() {
    within_a_minute(|| {
        let lost = SwitchoverMessage::MemoryLost(Reason::new(ErrorKind::Memory, "\u{202e}all of it"));
        let memory = Memory::new(PAGES[0], PAGES[1]);
        let (mut from, log) = Monitor::new(&memory, &Running::default(), Workload { writers: 0, ..BUSY });
        from.start();
        let listener = Listener::bind(Network::new(1).port("there")).unwrap();
        let address = listener.local_address();
        let mut migration = Source::new(memory.ram(), Box::new(log)).method(MethodChoice::default());
        let report = std::thread::scope(|scope| {
            scope.spawn(move || {
                odd_destination(listener, Nowhere(SHAPES.into(), Arc::default()), |message| match message {
                    ControlMessage::Switchover(SwitchoverMessage::Prepare) => {
                        vec![ControlMessage::Switchover(SwitchoverMessage::Prepared)]
                    }
                    ControlMessage::Switchover(SwitchoverMessage::Commit) => {
                        [lost.clone(), SwitchoverMessage::Running].map(ControlMessage::Switchover).into()
                    }
                    _ => Vec::new(),
                })
            });
            migration.run(address, &Security::Insecure, &mut from, &Cancel::new(), &()).unwrap()
        });
        // What counts is what it sends afterwards.
        assert!(from.moved && !from.runs() && report.post_copy.is_none());
    });
}

#[test]
fn a_source_that_was_accepted_receives_why_its_memory_cannot_be_prepared() {
    within_a_minute(|| {
        let running = Running::default();
        let monitor = || Monitor::new(&Memory::new(PAGES[0], PAGES[1]), &running, BUSY);
        let ((mut from, log), (mut to, _)) = (monitor(), monitor());
        from.start();
        let (sends, receives) = (from.memory.ram(), to.memory.ram());
        let listener = Listener::bind(Network::new(1).port("there")).unwrap();
        let address = listener.local_address();
        let incoming = listener.start(Security::Insecure, Limits::default()).unwrap();
        let (sent, received) = std::thread::scope(|scope| {
            let here = address.clone();
            let to = &mut to;
            let receiving = scope.spawn(move || {
                let takes = [(Mode::Embedded, Destination::FEATURES)];
                let handshake = Handshake { takes: &takes, refusals: &|_| Vec::new(), describe: None };
                let source = handshake.first(&incoming, &Cancel::new(), |reason| panic!("{reason}")).unwrap();
                // No device can ever send a byte into this queue.
                let destination = Destination::new(receives).device_queue(0);
                destination.take(source, incoming, &here, to, &Cancel::new(), &()).unwrap_err()
            });
            let mut migration = Source::new(sends, Box::new(log));
            let sent = migration.run(address, &Security::Insecure, &mut from, &Cancel::new(), &()).unwrap_err();
            (sent, receiving.join().unwrap())
        });
        assert!(received.reason.contains("a queue of 0 bytes"), "{received}");
        assert!(sent.kind == ErrorKind::Refused && sent.reason.contains(&received.reason), "{sent}");
        assert!(from.runs() && sent.guest == GuestState::Untouched, "{sent}");
        from.stop();
    });
}

use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use sterna_wire::limits::MAX_TEXT;
use sterna_wire::reason::Reason;
use sterna_wire::switchover::SwitchoverMessage;

use super::*;
use crate::transport::{Connection, Security};

#[test]
fn heartbeats_extend_the_wait_for_an_answer_and_only_up_to_the_latest_moment() {
    let (now, minute) = (Instant::now(), Duration::from_secs(60));
    let mut answer = Deadline { at: now, after_heartbeat: Some((minute, now + 10 * minute)) };
    answer.heartbeat();
    assert!(answer.at >= now + minute && answer.at < now + 10 * minute);
    let mut late = Deadline { at: now, after_heartbeat: Some((minute, now)) };
    let mut message = Deadline { at: now, after_heartbeat: None };
    late.heartbeat();
    message.heartbeat();
    assert_eq!((late.at, message.at), (now, now));
}

/// Long enough that a correct test never reaches it, short enough that a hanging one ends.
const PATIENCE: Duration = Duration::from_secs(100);
/// More than the kernel's buffers of both ends hold, in bytes.
const FLOOD: usize = 64 << 20;

/// Returns a link, the receiver of its events, which are unhandled until received, and its peer.
fn link() -> (ControlLink, Receiver<ControlEvent>, TcpStream) {
    let (link, events, peer) = link_within(&Allowance::default());
    (link.unwrap(), events, peer)
}

fn link_within(allowance: &Allowance) -> (io::Result<ControlLink>, Receiver<ControlEvent>, TcpStream) {
    link_limited(allowance, SILENCE_LIMIT)
}

/// `limit`: how long messages may be queued.
fn link_limited(
    allowance: &Allowance,
    limit: Duration,
) -> (io::Result<ControlLink>, Receiver<ControlEvent>, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    peer.set_read_timeout(Some(PATIENCE)).unwrap();
    let connection = Connection::accept(listener.accept().unwrap().0, &Security::Insecure).unwrap();
    let closer = connection.closer();
    let (writer, reader) = connection.split();
    let (sender, events) = channel();
    let send = move |event| drop(sender.send(event));
    let halves = (writer, reader, closer);
    let link = ControlLink::start_limited(allowance, limit, halves, ControlReader::default(), send);
    (link, events, peer)
}

fn message(length: usize) -> ControlMessage {
    ControlMessage::Ready { placement: vec!["x".repeat(length)], deltas: Vec::new() }
}

/// Writes as much of `flood` as the link and the kernel accept, and returns its length.
fn pour(peer: &mut TcpStream, flood: &[u8]) -> usize {
    peer.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    let mut written = 0;
    while written < flood.len() {
        match peer.write(&flood[written..]) {
            Ok(length) => written += length,
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{error}");
                break;
            }
        }
    }
    written
}

#[test]
fn a_peer_that_floods_a_busy_driver_has_to_wait_and_nothing_is_lost() {
    for length in [100, 60_000, 1_000_000] {
        let (_link, events, mut peer) = link();
        let one = message(length).encode();
        let count = FLOOD / one.len() + 1;
        let flood = one.repeat(count);
        let written = pour(&mut peer, &flood);
        assert!(written < flood.len(), "{length}: all of the flood was accepted");
        let mut waiting = vec![events.recv_timeout(PATIENCE).unwrap()];
        waiting.extend(events.try_iter());
        assert!(waiting.len() <= MAX_AHEAD / one.len().max(MIN_COUNTED) + 1, "{length}: {}", waiting.len());

        let sending = std::thread::spawn(move || {
            peer.set_write_timeout(Some(PATIENCE)).unwrap();
            peer.write_all(&flood[written..]).unwrap();
            // Dropped, and so closed, only when all has been handled: unread heartbeats would reset the connection.
            peer
        });
        let mut handled = waiting.len();
        drop(waiting);
        while handled < count {
            match events.recv_timeout(PATIENCE).unwrap() {
                ControlEvent::Message(received, _) => assert_eq!(received, message(length)),
                ControlEvent::Lost(reason) => panic!("{length}: after {handled}: {reason}"),
            }
            handled += 1;
        }
        drop(sending.join().unwrap());
        let end = events.recv_timeout(PATIENCE).unwrap();
        assert!(matches!(end, ControlEvent::Lost(_)), "{length}: {end:?}");
    }
}

#[test]
fn a_link_that_waits_for_its_driver_ends_when_it_is_closed_or_dropped() {
    for dropped in [false, true] {
        let (link, events, mut peer) = link();
        let flood = message(1_000_000).encode().repeat(FLOOD / 1_000_000);
        assert!(pour(&mut peer, &flood) < flood.len());
        // The share is kept, as by a driver that never handles the message.
        let ControlEvent::Message(_, _unhandled) = events.recv_timeout(PATIENCE).unwrap() else { panic!() };
        let kept = if dropped {
            drop(link);
            None
        } else {
            link.close();
            Some(link)
        };
        let ControlEvent::Lost(reason) = events.recv_timeout(PATIENCE).unwrap() else { panic!("a message") };
        assert!(reason.contains("closed on this side"), "{reason}");
        assert!(events.recv_timeout(PATIENCE).is_err(), "the reading thread has ended");
        drop(kept);
    }
}

#[test]
fn links_of_one_allowance_share_it_and_are_few() {
    let allowance = Allowance::default();
    let long = message(1_000_000).encode();
    let (first, of_first, mut peer) = link_within(&allowance);
    peer.write_all(&long).unwrap();
    let ControlEvent::Message(_, share) = of_first.recv_timeout(PATIENCE).unwrap() else { panic!() };
    // What the first link has read still counts when the link is gone, and keeps the second from reading on.
    drop(first);
    let (second, of_second, mut peer) = link_within(&allowance);
    assert!(pour(&mut peer, &long.repeat(FLOOD / long.len())) < FLOOD / long.len() * long.len());
    assert!(of_second.try_recv().is_err());
    drop(share);
    assert!(matches!(of_second.recv_timeout(PATIENCE).unwrap(), ControlEvent::Message(..)));

    let mut links = vec![second.unwrap()];
    while links.len() < MAX_LINKS {
        links.push(link_within(&allowance).0.unwrap());
    }
    let refused = link_within(&allowance).0.unwrap_err();
    assert!(refused.to_string().contains("too many"), "{refused}");
    links.pop();
    assert!(link_within(&allowance).0.is_ok());
}

/// Sends messages with numbers until some of them are queued, and returns how many.
fn fall_behind(link: &ControlLink, length: usize) -> usize {
    let mut count = 0;
    while !link.is_behind() {
        link.send(&numbered(count, length)).unwrap();
        count += 1;
        assert!(count * length < FLOOD, "the peer reads nothing, and all was sent");
    }
    count
}

fn numbered(number: usize, length: usize) -> ControlMessage {
    ControlMessage::Ready { placement: vec![number.to_string(), "x".repeat(length)], deltas: Vec::new() }
}

/// Reads `count` messages that are not heartbeats, and then to the end if `end`.
fn read_numbered(peer: &mut TcpStream, count: usize, length: usize, end: bool) {
    let (mut received, mut bytes) = (ControlReader::default(), vec![0; 64 << 10]);
    let mut next = 0;
    loop {
        while let Some(message) = received.next_message().unwrap() {
            if message != ControlMessage::Heartbeat {
                assert_eq!(message, numbered(next, length));
                next += 1;
            }
        }
        if next == count && !end {
            return;
        }
        match peer.read(&mut bytes).unwrap() {
            0 => break,
            read => received.push(&bytes[..read]),
        }
    }
    assert_eq!(next, count, "the connection has ended");
}

#[test]
fn messages_for_a_peer_that_does_not_read_yet_are_queued_and_arrive_in_order_from_all_senders() {
    const LENGTH: usize = 10_000;
    let (link, _events, mut peer) = link();
    let sender = link.sender();
    let mut count = fall_behind(&link, LENGTH);
    for _ in 0..10 {
        sender.send(&numbered(count, LENGTH)).unwrap();
        link.send(&numbered(count + 1, LENGTH)).unwrap();
        count += 2;
    }
    read_numbered(&mut peer, count, LENGTH, false);
    // It has read all of them, so the link's thread has sent them, and says so.
    link.flush(PATIENCE);
    assert!(!link.is_behind());
    link.send(&numbered(0, LENGTH)).unwrap();
    read_numbered(&mut peer, 1, LENGTH, false);
}

#[test]
fn a_link_that_ends_in_good_order_sends_what_is_queued_first() {
    const LENGTH: usize = 10_000;
    let (link, events, mut peer) = link();
    let count = fall_behind(&link, LENGTH);
    let sender = link.sender();
    std::thread::scope(|scope| {
        scope.spawn(|| link.finish());
        read_numbered(&mut peer, count, LENGTH, true);
    });
    assert!(sender.send(&numbered(0, LENGTH)).is_err(), "this side's direction has ended");
    drop(peer);
    assert!(matches!(events.recv_timeout(PATIENCE).unwrap(), ControlEvent::Lost(_)));
}

#[test]
fn a_peer_that_does_not_read_fills_the_queue_and_is_lost_for_that_reason() {
    let (link, events, mut peer) = link();
    // A peer that sends is not silent.
    peer.write_all(&ControlMessage::Heartbeat.encode()).unwrap();
    let before = fall_behind(&link, 60_000);
    let one = numbered(before, 60_000);
    let accepted = (0..FLOOD / 60_000).take_while(|_| link.send(&one).is_ok()).count();
    assert!(accepted <= MAX_QUEUED / 60_000, "{accepted} messages were queued");
    let ControlEvent::Lost(reason) = events.recv_timeout(PATIENCE).unwrap() else { panic!("a message") };
    assert_eq!(reason, QUEUE_FULL);
    assert!(link.send(&one).is_err() && !link.is_behind());
}

#[test]
fn a_message_that_is_queued_for_too_long_ends_the_link_also_while_its_driver_is_busy() {
    let (link, events, mut peer) = link_limited(&Allowance::default(), Duration::from_secs(1));
    let link = link.unwrap();
    peer.write_all(&message(MAX_CONTROL_MESSAGE - 100).encode().repeat(2)).unwrap();
    let ControlEvent::Message(_, _unhandled) = events.recv_timeout(PATIENCE).unwrap() else { panic!() };
    // The reading thread waits for the driver, which never handles the message.
    fall_behind(&link, 60_000);
    let ControlEvent::Lost(reason) = events.recv_timeout(PATIENCE).unwrap() else { panic!("a message") };
    assert_eq!(reason, QUEUED_TOO_LONG);
}

#[test]
fn a_link_whose_messages_are_queued_is_closed_or_dropped_at_once() {
    for dropped in [false, true] {
        let (link, events, _peer) = link();
        fall_behind(&link, 60_000);
        let outgoing = Arc::downgrade(&link.outgoing);
        let kept = if dropped {
            drop(link);
            None
        } else {
            link.close();
            Some(link)
        };
        let ControlEvent::Lost(reason) = events.recv_timeout(PATIENCE).unwrap() else { panic!("a message") };
        assert!(reason.contains("closed on this side"), "{reason}");
        drop(kept);
        // Disconnected: the reading thread has ended. The other one has, too, or is about to.
        assert!(events.recv_timeout(PATIENCE).is_err());
        let since = Instant::now();
        while outgoing.strong_count() > 0 {
            assert!(since.elapsed() < PATIENCE, "the link's thread does not end");
            std::thread::yield_now();
        }
    }
}

#[test]
fn a_long_reason_is_cut_before_it_is_sent() {
    let (link, _events, mut peer) = link();
    let reason = Reason::other("\u{1b}".repeat(2 * MAX_CONTROL_MESSAGE));
    let abort = ControlMessage::Switchover(SwitchoverMessage::Abort(reason.clone()));
    for message in [ControlMessage::Failed(reason.clone()), ControlMessage::Refused(reason), abort] {
        link.send(&message).unwrap();
    }
    let mut received = ControlReader::default();
    let mut bytes = [0; 4096];
    let mut reasons = Vec::new();
    while reasons.len() < 3 {
        let length = peer.read(&mut bytes).unwrap();
        received.push(&bytes[..length]);
        match received.next_message().unwrap() {
            Some(
                ControlMessage::Failed(reason)
                | ControlMessage::Refused(reason)
                | ControlMessage::Switchover(SwitchoverMessage::Abort(reason)),
            ) => reasons.push(reason.text),
            Some(ControlMessage::Heartbeat) | None => {}
            other => panic!("{other:?}"),
        }
    }
    assert!(reasons.iter().all(|reason| reason.len() <= MAX_TEXT && !reason.contains('\u{1b}')));
}

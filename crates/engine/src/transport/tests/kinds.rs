//! Properties that every kind of socket has, with and without TLS.

use std::io::{Read, Write};

use sterna_wire::header::{ChannelReply, MAGIC};

use super::*;
use crate::transport::simulated::random::Seeded;

// ---- Both halves -----------------------------------------------------------------------------------------------------

#[test]
fn parts_arrive_as_one_piece_and_are_counted() {
    for setup in setups() {
        let ((mut writer, _back), (_forth, mut reader)) = channel(&setup);
        let content = pattern(700_001, 1);
        let mut parts: Vec<&[u8]> = content.chunks(40_000).collect(); // more parts than one system call takes
        parts.insert(3, &[]);
        let (before, total) = (writer.bytes_written(), content.len());

        let writing = thread::scope(|scope| {
            let writing = scope.spawn(|| {
                writer.write_all_vectored(&parts).unwrap();
                writer.bytes_written() - before
            });
            let mut arrived = vec![0; total];
            reader.read_exact(&mut arrived).unwrap();
            assert!(arrived == content, "{:?}", setup.kind);
            writing.join().unwrap()
        });

        assert!(writing >= total as u64 && writing < total as u64 * 101 / 100, "{writing} on the wire");
        assert!(reader.bytes_read() >= total as u64);
    }
}

#[test]
fn both_directions_flow_at_once_and_neither_waits_for_the_other() {
    fn send(writer: &mut Writer, seed: u8) {
        writer.write_all(&pattern(6 << 20, seed)).unwrap();
    }
    fn receive(reader: &mut Reader, seed: u8) {
        let mut arrived = vec![0; 6 << 20];
        reader.read_exact(&mut arrived).unwrap();
        assert!(arrived == pattern(6 << 20, seed));
    }
    for setup in setups() {
        // All four halves live until everything has arrived: TLS sends `close_notify` when its writer ends, and a
        // socket that is closed with that unread resets the connection before its peer has read everything.
        let (mut source, mut destination) = channel(&setup);
        thread::scope(|scope| {
            scope.spawn(|| send(&mut source.0, 1));
            scope.spawn(|| send(&mut destination.0, 2));
            scope.spawn(|| receive(&mut source.1, 2));
            scope.spawn(|| receive(&mut destination.1, 1));
        });
    }
}

#[test]
fn a_clean_end_is_false_at_a_packet_boundary_and_an_error_inside_of_a_packet() {
    for boundary in [true, false] {
        for setup in setups() {
            let ((mut writer, _back), (_forth, mut reader)) = channel(&setup);
            writer.write_all(if boundary { b"packet" } else { b"packetpac" }).unwrap();
            drop(writer);

            let mut packet = [0; 6];
            assert!(reader.read_packet_start(&mut packet).unwrap());
            assert_eq!(&packet, b"packet");
            let end = reader.read_packet_start(&mut packet);
            match boundary {
                true => assert!(!end.unwrap()),
                false => assert_eq!(end.unwrap_err().kind(), io::ErrorKind::UnexpectedEof),
            }
        }
    }
}

#[test]
fn each_end_knows_the_other_by_its_address() {
    for setup in setups() {
        let (opened, (there, at)) = meet(&setup, |received| {
            let (connection, header) = received.unwrap();
            assert!(header.belongs(&KEY, connection.exporter()));
            let peer = connection.peer();
            (accept_channel(connection).unwrap(), peer)
        });
        drop((opened.unwrap(), there));
        let expected = match setup.kind {
            Kind::Tcp => "127.0.0.1:".to_owned(),
            Kind::Unix => format!("(process {})", std::process::id()),
            Kind::Simulated => "simulated:localhost (connection 0)".to_owned(),
        };
        assert!(at.contains(&expected), "{at}");
    }
}

// ---- Ending it from outside ------------------------------------------------------------------------------------------

#[test]
fn a_closer_wakes_a_waiting_reader_and_a_waiting_writer() {
    for setup in setups() {
        let ((mut writer, mut reader), _destination) = channel(&setup);
        let closer = Closer::of(&writer);
        thread::scope(|scope| {
            let reading = scope.spawn(move || reader.read_packet_start(&mut [0; 8]).unwrap_err());
            let (started, has_started) = std::sync::mpsc::channel();
            let writing = scope.spawn(move || {
                let content = [1; 16 << 10];
                loop {
                    // No thread reads at the other end, so a write waits sooner or later.
                    if let Err(error) = writer.write_all(&content) {
                        return error;
                    }
                    let _ = started.send(());
                }
            });
            has_started.recv_timeout(PATIENCE).unwrap();
            closer.close();
            assert_eq!(reading.join().unwrap().kind(), io::ErrorKind::ConnectionAborted);
            assert_eq!(writing.join().unwrap().kind(), io::ErrorKind::ConnectionAborted);
        });
    }
}

#[test]
fn a_closer_does_not_keep_the_connection_open() {
    for setup in setups() {
        let ((writer, reader), (_forth, mut other)) = channel(&setup);
        let closer = Closer::of(&writer);
        drop((writer, reader));
        assert!(!other.read_packet_start(&mut [0; 1]).unwrap());
        closer.close();
    }
}

#[test]
fn a_connection_that_is_cut_is_a_clean_end_only_without_tls() {
    for setup in setups() {
        let ((writer, _back), (_forth, mut reader)) = channel(&setup);
        Closer::of(&writer).close();
        let end = reader.read_packet_start(&mut [0; 6]);
        match setup.source {
            Security::Insecure => assert!(!end.unwrap()),
            Security::Tls(_) => assert_eq!(end.unwrap_err().kind(), io::ErrorKind::UnexpectedEof),
        }
    }
}

#[test]
fn writing_to_a_peer_that_is_gone_fails() {
    for setup in setups() {
        let ((mut writer, _back), destination) = channel(&setup);
        drop(destination);
        // TCP accepts bytes while it has room, until the peer's reset arrives.
        let written = (0..PATIENCE.as_micros()).find_map(|_| writer.write_all(&[1; 64 << 10]).err());
        let error = written.expect("a write fails in the end");
        let gone = [io::ErrorKind::BrokenPipe, io::ErrorKind::ConnectionReset];
        assert!(gone.contains(&error.kind()), "{:?}: {error}", setup.kind);
    }
}

// ---- Time limits -----------------------------------------------------------------------------------------------------

#[test]
fn silence_inside_of_a_packet_is_an_error_after_the_limit() {
    for kind in Kind::ALL {
        let listener = ManualListener::open(kind);
        let peer = listener.connect_raw();
        let limits = Limits { silence: Duration::from_millis(40), ..Limits::default() };
        let accepted =
            Connection::accept_within(listener.bound.accept().unwrap(), &Security::Insecure, &limits).unwrap();
        let (_writer, mut reader) = accepted.split();

        send_raw(&peer, b"pac");
        let lost = reader.read_packet_start(&mut [0; 6]).unwrap_err();
        assert_eq!(lost.kind(), io::ErrorKind::TimedOut, "{kind:?}: {lost}");

        send_raw(&peer, b"packet");
        assert!(reader.read_packet_start(&mut [0; 6]).unwrap());
        let lost = reader.read_exact(&mut [0; 1]).unwrap_err();
        assert_eq!(lost.kind(), io::ErrorKind::TimedOut, "{kind:?}: {lost}");

        reader.set_timeout(Some(Duration::ZERO)).unwrap_err();
        reader.set_timeout(None).unwrap();
        send_raw(&peer, b"!");
        reader.read_exact(&mut [0; 1]).unwrap();
    }
}

#[test]
fn a_peer_that_reads_nothing_is_disconnected_after_twice_the_limit() {
    // With TCP the kernel measures the time; for other sockets the write itself has the limit.
    for kind in [Kind::Unix, Kind::Simulated] {
        let listener = ManualListener::open(kind);
        let _peer = listener.connect_raw();
        let limits = Limits { silence: Duration::from_millis(20), ..Limits::default() };
        let accepted =
            Connection::accept_within(listener.bound.accept().unwrap(), &Security::Insecure, &limits).unwrap();
        let (mut writer, _reader) = accepted.split();
        let lost = writer.write_all(&vec![1; 16 << 20]).unwrap_err();
        assert_eq!(lost.kind(), io::ErrorKind::TimedOut, "{kind:?}: {lost}");
    }
}

#[test]
fn a_receiver_that_does_not_answer_is_disconnected_after_the_limit() {
    let limits = Limits { handshake: Duration::from_millis(40), ..Limits::default() };
    for setup in setups() {
        let listener = ManualListener::open(setup.kind);
        let given_up = Connection::connect_within(&listener.to, &setup.source, &limits)
            .and_then(|connection| open_channel(connection, &KEY, ID, ChannelKind::Control, 0, 1))
            .unwrap_err();
        assert!(matches!(given_up, TransportError::TooSlow { .. }), "{given_up}");
    }
}

#[test]
fn an_address_without_a_listener_is_named_in_the_error() {
    for kind in Kind::ALL {
        let listener = ManualListener::open(kind);
        let to = listener.bound.address().unwrap();
        drop(listener);
        let refused = text(Connection::connect(&to, &Security::Insecure));
        assert!(refused.contains(&to.to_string()), "{refused}");
    }
}

#[test]
fn an_address_is_listened_on_once_and_again_when_it_is_free() {
    for kind in Kind::ALL {
        let (address, _dir) = kind.address();
        let first = Listener::bind(&address).unwrap();
        let address = first.local_address();
        let refused = text(Listener::bind(&address));
        assert!(refused.contains(&address.to_string()), "{refused}");
        drop(first);
        Listener::bind(&address).unwrap();
    }
}

// ---- Hostile and broken peers ----------------------------------------------------------------------------------------

/// Connects a peer that sends `bytes` and then waits for the end. Returns the receiver's error and its answer to the
/// peer.
fn hostile(kind: Kind, security: &Security, bytes: &[u8], limits: &Limits) -> (TransportError, Vec<u8>) {
    let listener = ManualListener::open(kind);
    let peer = listener.connect_raw();
    send_raw(&peer, bytes);
    thread::scope(|scope| {
        let receiving = scope.spawn(|| receive_one(&listener.bound, security, limits).map(drop).unwrap_err());
        let answer = hear(&peer);
        drop(peer);
        (receiving.join().unwrap(), answer)
    })
}

#[test]
fn garbage_is_refused_with_and_without_tls() {
    let garbage = pattern(80, 77); // as long as a header
    for setup in setups() {
        let (error, answer) = hostile(setup.kind, &setup.destination, &garbage, &Limits::default());
        match setup.destination {
            Security::Insecure => {
                assert!(matches!(error, TransportError::Header { .. }), "{error}");
                let reason_length = ChannelReply::reason_length(answer[..4].try_into().unwrap());
                assert_eq!(reason_length, Ok(answer.len() - 4), "the peer receives the reason");
            }
            Security::Tls(_) => assert!(matches!(error, TransportError::Tls { .. }), "{error}"),
        }
    }
}

#[test]
fn a_peer_that_sends_too_little_is_disconnected() {
    let limits = Limits { handshake: Duration::from_millis(40), ..Limits::default() };
    for setup in setups() {
        let start = match setup.destination {
            Security::Insecure => &MAGIC[..],
            Security::Tls(_) => &[0x16, 3, 1, 2, 0, 1], // of a ClientHello
        };
        for bytes in [b"", start] {
            let (error, _) = hostile(setup.kind, &setup.destination, bytes, &limits);
            assert!(matches!(error, TransportError::TooSlow { .. }), "{bytes:?}: {error}");
        }
    }
}

#[test]
fn tls_on_one_side_only_is_explained_to_the_other_side() {
    let site = Site::new();
    for kind in Kind::ALL {
        let setup = Setup { kind, source: Security::Insecure, destination: site.server("source.example") };
        let (opened, _) = meet(&setup, text);
        let said = text(opened);
        assert!(said.contains("accepts TLS only"), "{kind:?}: {said}");
    }
    for kind in [Kind::Tcp, Kind::Simulated] {
        let setup = Setup { kind, source: site.client(), destination: Security::Insecure };
        let (opened, received) = meet(&setup, text);
        let said = text(opened);
        assert!(said.contains("does not use TLS"), "{kind:?}: {said}");
        assert!(received.contains("does not begin with Sterna's magic"), "{kind:?}: {received}");
    }
}

#[test]
fn the_receivers_reason_for_refusing_arrives() {
    for setup in setups() {
        let (opened, ()) = meet(&setup, |received| {
            refuse_channel(received.unwrap().0, "another migration is running");
        });
        let opened = opened.unwrap_err();
        let reason_length =
            matches!(&opened, TransportError::Refused { reason, .. } if reason == "another migration is running");
        assert!(reason_length, "{opened}");
    }
}

#[test]
fn tls_is_refused_where_the_peer_has_no_name() {
    let refused = text(Connection::connect("unix:in", &Site::new().client()));
    assert!(refused.contains("unix:in") && refused.contains("a Unix socket has none"), "{refused}");
}

// ---- The listener ----------------------------------------------------------------------------------------------------

/// Returns an accepting listener, the address to connect to, and the directory that keeps it alive.
fn listening(setup: &Setup, limits: Limits) -> (Incoming, Address, Option<tempfile::TempDir>) {
    let (address, dir) = setup.kind.address();
    let listener = Listener::bind(&address).unwrap();
    let to = by_name(&listener.local_address());
    (listener.start(setup.destination.clone(), limits).unwrap(), to, dir)
}

#[test]
fn a_listener_hands_out_channels_with_their_headers() {
    for setup in setups() {
        let (incoming, to, _dir) = listening(&setup, Limits::default());
        thread::scope(|scope| {
            let opening: Vec<_> = (0..4).map(|_| scope.spawn(|| open(&to, &setup.source))).collect();
            for _ in 0..4 {
                let (connection, header) = incoming.next_within(PATIENCE).unwrap();
                assert!(header.belongs(&KEY, connection.exporter()));
                accept_channel(connection).unwrap();
            }
            for opened in opening {
                opened.join().unwrap().unwrap();
            }
        });
    }
}

#[test]
fn beyond_the_limit_the_oldest_silent_connection_is_refused_with_the_reason_and_makes_room() {
    for setup in setups() {
        let (incoming, to, _dir) = listening(&setup, Limits { max_pending: 2, ..Limits::default() });
        let oldest = connect_raw(&to);
        let younger = Connection::connect(&to, &setup.source).unwrap();
        let accept = || accept_channel(incoming.next_within(PATIENCE).unwrap().0).unwrap();
        thread::scope(|scope| {
            let opening = scope.spawn(|| open(&to, &setup.source));
            accept();
            opening.join().unwrap().unwrap();
        });
        let said = hear(&oldest);
        assert!(String::from_utf8_lossy(&said).contains("too many connections"), "{said:?}");
        thread::scope(|scope| {
            let speaking = scope.spawn(|| open_channel(younger, &KEY, ID, ChannelKind::Ram, 0, 1));
            accept();
            speaking.join().unwrap().expect("it may still speak");
        });
    }
}

#[test]
fn where_nothing_can_make_room_a_connection_is_postponed_with_the_reason() {
    for setup in setups() {
        let (_incoming, to, _dir) = listening(&setup, Limits { max_pending: 0, ..Limits::default() });
        let refused = open(&to, &setup.source).unwrap_err();
        assert!(refused.is_busy(), "{:?}: {refused}", setup.kind);
        assert!(refused.to_string().contains("too many connections"), "{refused}");
    }
}

#[test]
fn stopping_a_listener_wakes_the_waiting_thread_and_frees_the_address() {
    for setup in setups() {
        let (incoming, to, _dir) = listening(&setup, Limits::default());
        let stop = incoming.stop_handle();
        thread::scope(|scope| {
            let waiting = scope.spawn(move || incoming.next().is_none());
            stop.stop();
            assert!(waiting.join().unwrap());
        });
        assert!(dial::dial(&to, PATIENCE).is_err(), "no process listens any more");
        if let Address::Unix(path) = &to {
            assert!(!path.exists(), "although the handle still exists");
        }
    }
}

#[test]
fn a_reader_that_waits_for_many_bytes_never_waits_for_more_than_arrive() {
    let mut random = Seeded::new(announced_seed(), 0);
    for setup in setups() {
        let ((mut writer, _back), (_forth, mut reader)) = channel(&setup);
        // A reader that waits for bytes that never come waits for ever.
        reader.set_timeout(Some(Duration::from_secs(3600))).unwrap();
        let content = pattern(6 << 20, 3);
        thread::scope(|scope| {
            // The writer stays open, so that only the bytes wake the reader.
            let (mut left, mut cuts) = (&content[..], Seeded::new(random.next(), 1));
            let writer = &mut writer;
            scope.spawn(move || {
                while !left.is_empty() {
                    let (piece, rest) = left.split_at(cuts.piece(300_000).min(left.len()));
                    writer.write_all(piece).unwrap();
                    left = rest;
                }
            });
            let (mut arrived, mut have) = (vec![0; content.len()], 0);
            while have < arrived.len() {
                let piece = random.piece(700_000).min(arrived.len() - have);
                match random.of(&(0..3)) {
                    0 => have += reader.read(&mut arrived[have..][..piece]).unwrap(),
                    _ => {
                        reader.read_exact(&mut arrived[have..][..piece]).unwrap();
                        have += piece;
                    }
                }
            }
            assert!(arrived == content, "{:?}", setup.kind);
        });
    }
}

#[test]
fn a_slow_peer_is_read_and_a_silent_one_is_lost() {
    for setup in setups() {
        let ((mut writer, _back), (_forth, mut reader)) = channel(&setup);
        let content = pattern(300_000, 4);
        writer.write_all(&content[..200_000]).unwrap();
        reader.set_timeout(Some(Duration::from_millis(500))).unwrap();
        let before = reader.bytes_read();
        let error = reader.read_exact(&mut vec![0; 300_000]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{:?}: {error}", setup.kind);
        assert!(reader.bytes_read() - before >= 200_000, "{:?}: bytes that had arrived were not read", setup.kind);
    }
}

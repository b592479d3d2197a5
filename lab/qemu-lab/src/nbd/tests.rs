use std::sync::atomic::{AtomicU64, Ordering};

use super::handshake::*;
use super::*;

/// Time limit of each step, which no correct test reaches.
const LONG: Duration = Duration::from_secs(300);
const SIZE: u64 = 1 << 20;

/// A client in transmission.
struct TinyClient {
    stream: UnixStream,
    cookie: u64,
}

/// The result of an option: the kind and the data of each reply.
type Replies = Vec<(u32, Vec<u8>)>;

fn exactly(mut stream: &UnixStream, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes).expect("the server answers");
    bytes
}

/// Connects, and answers the server's greeting.
fn greeted(server: &NbdServer) -> UnixStream {
    let mut stream = UnixStream::connect(server.socket()).expect("a server listens");
    stream.set_read_timeout(Some(LONG)).expect("set");
    assert_eq!(exactly(&stream, 18), b"NBDMAGICIHAVEOPT\0\x03");
    stream.write_all(&3u32.to_be_bytes()).expect("sent");
    stream
}

fn send_option(mut stream: &UnixStream, option: u32, data: &[u8]) {
    let mut message = b"IHAVEOPT".to_vec();
    message.extend_from_slice(&option.to_be_bytes());
    message.extend_from_slice(&(data.len() as u32).to_be_bytes());
    message.extend_from_slice(data);
    stream.write_all(&message).expect("sent");
}

/// Sends an option, and returns the replies up to the last one.
fn option(stream: &UnixStream, option: u32, data: &[u8]) -> Replies {
    send_option(stream, option, data);
    let mut replies = Vec::new();
    loop {
        let header = exactly(stream, 20);
        assert_eq!((u64_at(&header, 0), u32_at(&header, 8)), (0x0003_e889_0455_65a9, option));
        let kind = u32_at(&header, 12);
        replies.push((kind, exactly(stream, u32_at(&header, 16) as usize)));
        if kind != REP_INFO {
            return replies;
        }
    }
}

/// The data of `NBD_OPT_INFO` and `NBD_OPT_GO` for an export of this name, without requests.
fn named(name: &str) -> Vec<u8> {
    let mut data = (name.len() as u32).to_be_bytes().to_vec();
    data.extend_from_slice(name.as_bytes());
    data.extend_from_slice(&[0, 0]);
    data
}

impl TinyClient {
    fn connect(server: &NbdServer) -> Self {
        let stream = greeted(server);
        let replies = option(&stream, OPT_GO, &named(""));
        let mut export = vec![0, 0];
        export.extend_from_slice(&server.served.server.store.size().to_be_bytes());
        export.extend_from_slice(&0x16d_u16.to_be_bytes());
        assert!(replies.contains(&(REP_INFO, export)), "{replies:?}");
        assert_eq!(replies.last().expect("an acknowledgement"), &(REP_ACK, Vec::new()));
        TinyClient { stream, cookie: 0 }
    }

    /// Sends a request, and returns its cookie.
    fn send(&mut self, kind: u16, offset: u64, length: u32, data: &[u8]) -> u64 {
        self.cookie += 1;
        let mut message = 0x2560_9513_u32.to_be_bytes().to_vec();
        message.extend_from_slice(&0u16.to_be_bytes());
        message.extend_from_slice(&kind.to_be_bytes());
        message.extend_from_slice(&self.cookie.to_be_bytes());
        message.extend_from_slice(&offset.to_be_bytes());
        message.extend_from_slice(&length.to_be_bytes());
        message.extend_from_slice(data);
        self.stream.write_all(&message).expect("sent");
        self.cookie
    }

    /// Waits for an answer without data: its cookie and error.
    fn answer(&self) -> (u64, u32) {
        let answer = exactly(&self.stream, 16);
        assert_eq!(u32_at(&answer, 0), 0x6744_6698);
        (u64_at(&answer, 8), u32_at(&answer, 4))
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> u32 {
        let cookie = self.send(1, offset, data.len() as u32, data);
        let (answered, error) = self.answer();
        assert_eq!(answered, cookie);
        error
    }

    fn read(&mut self, offset: u64, length: u32) -> Vec<u8> {
        let cookie = self.send(0, offset, length, &[]);
        assert_eq!(self.answer(), (cookie, 0));
        exactly(&self.stream, length as usize)
    }

    /// Fails unless the server has closed the connection.
    fn expect_closed(mut self) {
        match self.stream.read(&mut [0; 1]) {
            Ok(0) => {}
            Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
            other => panic!("it is not closed: {other:?}"),
        }
    }
}

fn server() -> NbdServer {
    NbdServer::memory(vec![7; SIZE as usize]).expect("a server")
}

#[test]
fn what_one_client_writes_another_one_reads() {
    let server = server();
    let (mut one, mut other) = (TinyClient::connect(&server), TinyClient::connect(&server));
    assert_eq!(one.read(SIZE - 2, 2), [7, 7]);
    assert_eq!(one.write(3, b"abc"), 0);
    assert_eq!(other.read(2, 5), b"\x07abc\x07");
    let zeroes = other.send(6, 4, 1, &[]);
    assert_eq!(other.answer(), (zeroes, 0));
    let trim = other.send(4, 0, 4096, &[]);
    assert_eq!(other.answer(), (trim, 0));
    let flush = other.send(3, 0, 0, &[]);
    assert_eq!(other.answer(), (flush, 0));
    assert_eq!((server.content(2..7).as_slice(), server.connections()), (&b"\x07a\0c\x07"[..], 2));
    let expected = NbdCounts { reads: 2, writes: 1, flushes: 1, trims: 1, zeroes: 1, failed: 0 };
    assert_eq!(server.counts(), expected);
    one.send(2, 0, 0, &[]);
    one.expect_closed();
    assert_eq!(other.read(3, 1), b"a");
}

#[test]
fn a_file_has_what_was_written() {
    let image = tempfile::NamedTempFile::new().expect("a file");
    image.as_file().set_len(2 << 20).expect("set");
    let server = NbdServer::file(image.path()).expect("a server");
    let mut client = TinyClient::connect(&server);
    assert_eq!(client.write(0, &[1; 2 << 20]), 0);
    let zeroes = client.send(6, 1, (2 << 20) - 2, &[]);
    assert_eq!(client.answer(), (zeroes, 0));
    let content = std::fs::read(image.path()).expect("read");
    assert_eq!((content.len(), content[0], content[(2 << 20) - 1]), (2 << 20, 1, 1));
    assert!(content[1..(2 << 20) - 1].iter().all(|byte| *byte == 0));
}

#[test]
fn all_ways_to_negotiate_are_known_and_other_exports_and_options_are_refused() {
    let server = server();
    let stream = greeted(&server);
    assert_eq!(option(&stream, 3, &[]), [(REP_ERR_UNSUP, Vec::new())]);
    assert_eq!(option(&stream, OPT_GO, &named("other")), [(REP_ERR_UNKNOWN, Vec::new())]);
    assert_eq!(option(&stream, OPT_GO, &[0]), [(REP_ERR_INVALID, Vec::new())]);
    let replies = option(&stream, OPT_INFO, &named(""));
    let kinds: Vec<u32> = replies.iter().map(|(kind, _)| *kind).collect();
    assert_eq!(kinds, [REP_INFO, REP_INFO, REP_ACK]);
    assert_eq!(option(&stream, OPT_ABORT, &[]), [(REP_ACK, Vec::new())]);
    TinyClient { stream, cookie: 0 }.expect_closed();

    let stream = greeted(&server);
    send_option(&stream, OPT_EXPORT_NAME, b"");
    let answer = exactly(&stream, 10);
    assert_eq!((u64_at(&answer, 0), u16_at(&answer, 8)), (SIZE, 0x16d));
    assert_eq!(TinyClient { stream, cookie: 0 }.read(0, 3), [7; 3]);

    let stream = greeted(&server);
    send_option(&stream, OPT_EXPORT_NAME, b"other");
    TinyClient { stream, cookie: 0 }.expect_closed();

    // Without NBD_FLAG_C_NO_ZEROES, 124 zeros follow.
    let mut stream = UnixStream::connect(server.socket()).expect("a server listens");
    stream.set_read_timeout(Some(LONG)).expect("set");
    exactly(&stream, 18);
    stream.write_all(&1u32.to_be_bytes()).expect("sent");
    send_option(&stream, OPT_EXPORT_NAME, b"");
    assert_eq!(exactly(&stream, 134)[10..], [0; 124]);
    assert_eq!(TinyClient { stream, cookie: 0 }.read(0, 3), [7; 3]);
}

#[test]
fn requests_fail_that_the_test_selects_by_connection_command_offset_and_content() {
    let server = server();
    let (mut one, mut two) = (TinyClient::connect(&server), TinyClient::connect(&server));
    server.decide(|request| match request {
        NbdRequest { connection: 1, command: NbdCommand::Write, data: [b'm', ..], .. } => {
            NbdAnswer::Fail(NbdError::Eio)
        }
        NbdRequest { offset: 4096.., .. } => NbdAnswer::Fail(NbdError::Enospc),
        _ => NbdAnswer::Serve,
    });
    assert_eq!([one.write(0, b"metadata"), one.write(0, b"data"), two.write(8, b"more")], [5, 0, 0]);
    assert_eq!(two.write(4096, b"data"), 28);
    assert_eq!(one.read(0, 12), b"data\x07\x07\x07\x07more");
    assert_eq!((server.counts().writes, server.counts().failed), (2, 2));
    server.serve_all();
    assert_eq!(one.write(4096, b"metadata"), 0);
}

#[test]
fn held_requests_wait_while_others_are_answered_and_end_as_the_test_says() {
    let server = server();
    let mut client = TinyClient::connect(&server);
    server.decide(|request| if request.command.writes() { NbdAnswer::Hold } else { NbdAnswer::Serve });
    let cookies = [b"a", b"b", b"c", b"d"].map(|data| client.send(1, 0, 1, data));
    let held = server.wait_held(4, LONG).expect("held");
    assert!(held.iter().all(|held| (held.connection, held.command, held.length) == (1, NbdCommand::Write, 1)));
    assert_eq!(client.read(0, 1), [7], "none was performed");
    assert!(server.fail(held[1], NbdError::Eio) && !server.release(held[1]));
    assert_eq!(client.answer(), (cookies[1], 5));
    assert!(server.release(held[3]));
    assert_eq!((client.answer(), server.content(0..1)), ((cookies[3], 0), b"d".to_vec()));
    assert_eq!(server.held(), [held[0], held[2]]);
    assert_eq!(server.release_all(), 2);
    assert_eq!([client.answer(), client.answer()], [(cookies[0], 0), (cookies[2], 0)]);
    assert_eq!((server.content(0..1), server.in_flight()), (b"c".to_vec(), Vec::new()));
    // The order stays in force.
    client.send(1, 0, 1, b"e");
    server.wait_held(1, LONG).expect("held");
    let error = server.wait_held(2, Duration::ZERO).expect_err("only one is held");
    assert!(matches!(&error, Error::Timeout { last, .. } if last.contains("Write")), "{error}");
    drop(client);
    // A client that is gone has no requests.
    let mut other = TinyClient::connect(&server);
    server.serve_all();
    let mut state = server.state();
    while !state.held.is_empty() {
        drop(state);
        other.read(0, 1);
        state = server.state();
    }
    assert_eq!(state.pending_bytes, 0);
}

#[test]
fn delayed_requests_are_answered_after_their_time_and_at_once_if_released() {
    let server = server();
    let mut client = TinyClient::connect(&server);
    let begun = Instant::now();
    server.decide(|request| NbdAnswer::Delay(Duration::from_millis(if request.offset == 0 { 50 } else { 10 })));
    let (first, second) = (client.send(1, 0, 1, b"a"), client.send(1, 1, 1, b"b"));
    let mut answers = [client.answer(), client.answer()];
    assert!(begun.elapsed() >= Duration::from_millis(50));
    answers.sort_unstable();
    assert_eq!(answers, [(first, 0), (second, 0)]);
    server.wait_counts("two writes", LONG, |counts| counts.writes == 2).expect("counted");

    server.decide(|_| NbdAnswer::Delay(Duration::from_secs(1_000_000)));
    let third = client.send(3, 0, 0, &[]);
    let released = std::iter::repeat_with(|| server.release_all()).find(|released| *released > 0);
    assert_eq!((released, client.answer()), (Some(1), (third, 0)));
}

#[test]
fn requests_beyond_the_end_fail_and_impossible_ones_close_the_connection() {
    let server = server();
    let asked = Arc::new(AtomicU64::new(0));
    server.decide({
        let asked = Arc::clone(&asked);
        move |_| {
            asked.fetch_add(1, Ordering::SeqCst);
            NbdAnswer::Serve
        }
    });
    let mut client = TinyClient::connect(&server);
    for (kind, offset, length, error) in [
        (0, SIZE, 1, 22),
        (0, u64::MAX, 2, 22),
        (0, 0, MAX_PAYLOAD + 1, 75),
        (4, SIZE - 1, 2, 22),
        (6, 0, u32::MAX, 28),
        (7, 0, 1, 22),
    ] {
        let cookie = client.send(kind, offset, length, &[]);
        assert_eq!(client.answer(), (cookie, error), "command {kind}");
    }
    assert_eq!(client.write(SIZE - 1, b"ab"), 28);
    assert_eq!((asked.load(Ordering::SeqCst), server.counts().failed), (0, 7));
    client.send(1, 0, MAX_PAYLOAD + 1, &[]);
    client.expect_closed();

    let mut client = TinyClient::connect(&server);
    client.stream.write_all(&[0; REQUEST_HEADER]).expect("sent");
    client.expect_closed();
    let mut stream = greeted(&server);
    stream.write_all(b"IHAVEOPT\0\0\0\x07\xff\xff\xff\xff").expect("sent");
    TinyClient { stream, cookie: 0 }.expect_closed();
}

#[test]
fn too_many_held_requests_close_the_connection() {
    let server = server();
    server.decide(|_| NbdAnswer::Hold);
    let mut client = TinyClient::connect(&server);
    for _ in 0..MAX_PENDING {
        client.send(3, 0, 0, &[]);
    }
    server.wait_held(MAX_PENDING, LONG).expect("held");
    client.send(3, 0, 0, &[]);
    client.expect_closed();
    server.serve_all();
    assert_eq!(TinyClient::connect(&server).read(0, 1), [7]);
}

#[test]
fn a_dropped_server_closes_its_connections_and_removes_its_socket() {
    let server = server();
    server.decide(|request| if request.offset == 0 { NbdAnswer::Hold } else { NbdAnswer::Delay(LONG) });
    let (mut held, idle, negotiating) = (TinyClient::connect(&server), TinyClient::connect(&server), greeted(&server));
    held.send(1, 0, 1, b"a");
    held.send(1, 1, 1, b"a");
    server.wait_held(1, LONG).expect("held");
    let (socket, clone) = (server.socket().to_owned(), server.clone());
    drop(server);
    assert!(socket.exists() && clone.blockdev("node")["server"]["path"] == socket.to_str().expect("UTF-8"));
    drop(clone);
    assert!(!socket.exists());
    [held, idle, TinyClient { stream: negotiating, cookie: 0 }].into_iter().for_each(TinyClient::expect_closed);
}

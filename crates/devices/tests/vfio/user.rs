//! vfio-user: the consumer with correct and faulty servers, with a device in software behind them.

mod libvfio_user;
pub(crate) mod server;

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect};
use sterna_devices::vfio::model::{Call, Config, Fault, Leaves, ModelDevice};
use sterna_devices::vfio::{Chunk, Device, DmaRange, Flags, Loader, Saver, State, VfioError};
use sterna_devices::vfio_user::{Client, Command, Connection, VfioUserDevice};

use super::some_state;
use server::{Manner, Server, Trouble, reach};

/// The flags that vfio-user can have: no P2P.
pub(crate) const FLAGS: [Flags; 2] = [Flags::STOP_COPY, Flags::STOP_COPY.with_pre_copy()];

type Remote = VfioUserDevice<Client>;

/// Returns a device in software, its server, and the remote device.
fn remote(config: Config, manner: Manner) -> (ModelDevice, Server, Remote) {
    let model = ModelDevice::new(config);
    let (server, stream) = Server::start(model.clone(), manner);
    (model, server, reach(stream).unwrap())
}

fn source(size: usize) -> Config {
    Config::with_state(some_state(size)).flags(FLAGS[1])
}

fn destination(size: usize) -> Config {
    Config::empty(size).flags(FLAGS[1])
}

/// Moves all of a device's state, ahead if possible; calls `changes` between that and the stop.
fn carry(from: Remote, to: Remote, buffer: usize, changes: impl FnOnce()) -> Result<(), VfioError> {
    let (mut saver, mut loader) = (Saver::new(from, "source")?, Loader::new(to, "destination")?);
    let mut buffer = vec![0; buffer];
    loader.begin()?;
    let mut read = |saver: &mut Saver<Remote>| {
        loop {
            match saver.read(&mut buffer)? {
                Chunk::Bytes(count) => loader.write(&buffer[..count])?,
                other => return Ok::<_, VfioError>(other),
            }
        }
    };
    if saver.begin(u64::MAX)? {
        assert_eq!(read(&mut saver)?, Chunk::NothingNow);
    }
    changes();
    saver.quiesce()?;
    saver.stop()?;
    assert_eq!(read(&mut saver)?, Chunk::End);
    saver.finish()?;
    loader.finish()?;
    loader.run()
}

#[test]
fn state_arrives_whole_in_messages_of_any_size() {
    for flags in FLAGS {
        for (max_data, buffer, most) in
            [(1 << 20, 1 << 20, usize::MAX), (1000, 4096, 300), (1 << 20, 77, 50), (1, 9, 9)]
        {
            for (enomsg, padded) in [(false, false), (true, true)] {
                let manner = || Manner { enomsg, padded, ..Manner::with_max_data(max_data) };
                let size = if max_data == 1 { 100 } else { 5000 };
                let (model, _server, from) =
                    remote(Config { max_transfer: most, seed: Some(3), ..source(size) }.flags(flags), manner());
                let (there, _other, to) = remote(destination(size).flags(flags), manner());
                carry(from, to, buffer, || (0..50).for_each(|at| assert!(model.run(at)))).unwrap();
                assert_eq!(there.contents(), model.contents());
                assert_ne!(there.contents(), some_state(size));
                assert_eq!((model.is_in(), there.is_in()), (State::Stop, State::Running));
            }
        }
    }
}

#[test]
fn the_servers_maximum_message_size_is_negotiated() {
    let negotiated = |capabilities: &str| {
        let manner = Manner { capabilities: capabilities.as_bytes().to_vec(), ..Manner::default() };
        let (_server, stream) = Server::start(ModelDevice::new(source(10)), manner);
        Client::new(stream, Duration::from_secs(60)).map(|client| client.max_data())
    };
    let with = |text: &str| negotiated(&format!("{{\"capabilities\":{{{text}}}}}\0"));
    assert_eq!(with("\"max_data_xfer_size\":70000").unwrap(), 70_000);
    assert_eq!(with("\"max_data_xfer_size\":18446744073709551615").unwrap(), 1 << 20);
    for nothing in ["", "{}\0", "{\"capabilities\":{}}\0", "{\"capabilities\":{\"max_msg_fds\":1}}\0"] {
        assert_eq!(negotiated(nothing).unwrap(), 1 << 20);
    }
    for wrong in ["\"max_data_xfer_size\":0", "\"max_data_xfer_size\":-1", "\"max_data_xfer_size\":\"much\""] {
        assert!(with(wrong).unwrap_err().to_string().contains("bytes of data in a message"));
    }
    assert!(negotiated("{}").unwrap_err().to_string().contains("do not end in 0"));
    for wrong in ["\0", "{\0", "\u{1}\0"] {
        assert!(negotiated(wrong).unwrap_err().to_string().contains("cannot be read"), "{wrong:?}");
    }
    let long = negotiated(&format!("{}\0", " ".repeat(70_000))).unwrap_err();
    assert!(long.to_string().contains("were asked for"), "{long}");
    for version in [(1, 1), (0, 2)] {
        let (_server, stream) = Server::start(ModelDevice::new(source(10)), Manner { version, ..Manner::default() });
        let error = Client::new(stream, Duration::from_secs(60)).unwrap_err();
        assert!(error.to_string().contains(&format!("with {}.{}", version.0, version.1)), "{error}");
    }
    let refused = Manner::trouble(Command::VERSION, 0, Trouble::Errno(libc::EINVAL));
    let (_server, stream) = Server::start(ModelDevice::new(source(10)), refused);
    assert_eq!(Client::new(stream, Duration::from_secs(60)).unwrap_err().raw_os_error(), Some(libc::EINVAL));
}

/// The faults of a server, and the error texts.
const TROUBLES: [(Trouble, &str); 11] = [
    (Trouble::OtherNumber, "is answered as command"),
    (Trouble::OtherCommand, "is answered as command"),
    (Trouble::NoSize, "is less than its header"),
    (Trouble::Longer(1), "were asked for"),
    (Trouble::Longer(100 << 20), "were asked for"),
    (Trouble::Silence, "did not answer within"),
    (Trouble::Ends, "closed the connection"),
    (Trouble::EndsMidway, "closed the connection"),
    (Trouble::SendsTooLong, "command 11 with flags 0x0 has"),
    (Trouble::Floods, "did not answer within"),
    (Trouble::OtherType, "unknown type 2"),
];

#[test]
fn a_server_that_violates_the_protocol_is_lost_and_not_waited_for() {
    for (trouble, words) in TROUBLES {
        let nothing_comes = matches!(trouble, Trouble::Silence | Trouble::Floods);
        let patience = Duration::from_secs(if nothing_comes { 2 } else { 60 });
        for command in [Command::DEVICE_FEATURE, Command::MIG_DATA_READ] {
            let model = ModelDevice::new(source(5000));
            let (_server, stream) = Server::start(model.clone(), Manner::trouble(command, 0, trouble));
            let device = VfioUserDevice::new(Arc::new(Client::new(stream, patience).unwrap()));
            let (mut stopped, mut buffer) = (None, vec![0; 1000]);
            let error = if command == Command::DEVICE_FEATURE {
                device.state().unwrap_err()
            } else {
                let stream = stopped.insert(device.set_state(State::StopCopy).unwrap().unwrap());
                sterna_devices::vfio::Data::read(stream, &mut buffer).unwrap_err()
            };
            assert!(error.to_string().contains(words), "{trouble:?}: {error}");
            assert_eq!(error.raw_os_error(), None);
            // The connection is lost for good: the next message could be the reply to this command.
            let error = device.state().unwrap_err();
            assert!(error.to_string().contains("was shut down") && error.to_string().contains(words), "{error}");
        }
    }
}

#[test]
fn a_reply_that_is_too_short_or_too_long_is_an_error() {
    for trouble in [Trouble::Shorter, Trouble::ClaimsMore] {
        let (_model, _server, device) = remote(source(5000), Manner::trouble(Command::MIG_DATA_READ, 0, trouble));
        let mut stream = device.set_state(State::StopCopy).unwrap().unwrap();
        let error = sterna_devices::vfio::Data::read(&mut stream, &mut [0; 100]).unwrap_err();
        assert!(error.to_string().contains("bytes where"), "{error}");
    }
    // A change of state must report the new state.
    for (trouble, words) in [(Trouble::Shorter, "bytes where"), (Trouble::OtherState, "went to RUNNING_P2P")] {
        let (_model, _server, device) = remote(source(5000), Manner::trouble(Command::DEVICE_FEATURE, 1, trouble));
        let error = device.set_state(State::Resuming).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    }
    for after in 0..2 {
        let (_model, _server, device) =
            remote(source(5000), Manner::trouble(Command::DEVICE_FEATURE, after, Trouble::Shorter));
        let asked = if after == 0 {
            device.migration().map(|_| ())
        } else {
            device.migration().and(device.state()).map(|_| ())
        };
        assert!(asked.unwrap_err().to_string().contains("bytes where"));
    }
}

#[test]
fn a_servers_errors_are_the_kernels_and_error_0_is_a_violation() {
    let negotiated = [
        (Trouble::Errno(libc::EIO), libc::EIO),
        (Trouble::Errno(libc::ENOSPC), libc::ENOSPC),
        (Trouble::LoudError(libc::ENOSPC), libc::ENOSPC),
        (Trouble::Errno(0), libc::EIO),
        (Trouble::Errno(5000), libc::EIO),
        // The caller does not retry for ever.
        (Trouble::Errno(libc::EINTR), libc::EIO),
    ];
    for (number, means) in negotiated {
        let (_model, _server, device) = remote(source(10), Manner::trouble(Command::DEVICE_FEATURE, 0, number));
        assert_eq!(super::errno(device.state()), means, "{number:?}");
        assert_eq!(super::errno(device.state()), means, "the connection continues as before");
    }
}

#[test]
fn commands_of_the_server_are_refused_and_the_reply_is_found_behind_them() {
    for command in [Command::DEVICE_FEATURE, Command::MIG_DATA_READ, Command::MIG_DATA_WRITE] {
        let manner = || Manner::trouble(command, 1, Trouble::SendsCommands);
        let (model, _server, from) = remote(source(3000), manner());
        let (there, _other, to) = remote(destination(3000), manner());
        carry(from, to, 700, || ()).unwrap();
        assert_eq!(there.contents(), model.contents());
    }
}

#[test]
fn a_stream_begins_at_the_same_steps_as_the_kernels() {
    for from in [State::Running, State::PreCopy, State::Stop, State::StopCopy] {
        for to in State::ALL {
            let (model, _server, device) = remote(source(100), Manner::default());
            let alone = ModelDevice::new(source(100));
            // Streams of the model end when they are dropped here; a program would keep them.
            let _keep = (device.set_state(from).unwrap(), alone.set_state(from).unwrap());
            let (theirs, ours) = (alone.set_state(to), device.set_state(to));
            match (theirs, ours) {
                (Ok(theirs), Ok(ours)) => assert_eq!(theirs.is_some(), ours.is_some(), "{from} to {to}"),
                (Err(theirs), Err(ours)) => assert_eq!(theirs.raw_os_error(), ours.raw_os_error(), "{from} to {to}"),
                (theirs, ours) => panic!("{from} to {to}: {theirs:?}, {ours:?}"),
            }
            assert_eq!(model.is_in(), alone.is_in(), "{from} to {to}");
        }
    }
}

#[test]
fn pages_that_the_server_writes_are_reported_and_other_bits_stay() {
    let (model, _server, device) = remote(source(100), Manner::default());
    let range = DmaRange { iova: 1 << 20, length: 200 * 4096 };
    assert_eq!(device.dma_logging_start(4096, &[range]).unwrap(), 4096);
    for page in [0, 63, 64, 199] {
        assert!(model.dma_write(DmaRange { iova: range.iova + page * 4096 + 5, length: 8 }));
    }
    let mut bitmap = [0, 2, 0, 0, 9];
    device.dma_logging_report(range, 4096, &mut bitmap).unwrap();
    assert_eq!(bitmap, [1 | 1 << 63, 3, 0, 1 << (199 - 192), 9]);
    bitmap.fill(0);
    device.dma_logging_report(range, 4096, &mut bitmap).unwrap();
    assert_eq!(bitmap, [0; 5]);
    for (page_size, words) in [(4096, 3), (0, 5), (1, 5)] {
        assert_eq!(super::errno(device.dma_logging_report(range, page_size, &mut bitmap[..words])), libc::EINVAL);
    }
    device.dma_logging_stop().unwrap();
    assert_eq!(super::errno(device.dma_logging_stop()), libc::EINVAL);
    // The device's own choice.
    let (_model, _server, device) = remote(Config { dma_page_size: Some(65536), ..source(100) }, Manner::default());
    assert_eq!(device.dma_logging_start(4096, &[range]).unwrap(), 65536);
}

#[test]
fn a_device_without_migration_is_refused_before_anything_is_begun() {
    let (_model, _server, device) = remote(Config { flags: None, ..source(10) }, Manner::default());
    let error = Saver::new(device, "nic").unwrap_err();
    assert!(matches!(&error, VfioError::NoMigration { .. }) && error.to_string().contains("vfio-user"), "{error}");
}

#[test]
fn a_reset_without_effect_is_an_error() {
    let (model, _server, device) = remote(source(10), Manner::default());
    let _stream = device.set_state(State::Resuming).unwrap();
    device.reset().unwrap();
    assert_eq!(model.is_in(), State::Running);
    let (model, _server, device) = remote(source(10), Manner::default());
    model.fail(Fault { leaves: Leaves::InError, ..Fault::of(Call::SetState) });
    assert_eq!(super::errno(device.set_state(State::Stop)), libc::EIO);
    // The server answers without doing anything.
    let lazy = Lazy(model);
    let (_server, stream) = Server::start(lazy, Manner::default());
    let error = reach(stream).unwrap().reset().unwrap_err();
    assert!(error.to_string().contains("in ERROR after its reset"), "{error}");
}

/// A device whose reset does nothing.
struct Lazy(ModelDevice);

impl Device for Lazy {
    type Data = <ModelDevice as Device>::Data;

    fn migration(&self) -> std::io::Result<Flags> {
        self.0.migration()
    }

    fn state(&self) -> std::io::Result<State> {
        self.0.state()
    }

    fn set_state(&self, state: State) -> std::io::Result<Option<Self::Data>> {
        self.0.set_state(state)
    }

    fn data_size(&self) -> std::io::Result<u64> {
        self.0.data_size()
    }

    fn reset(&self) -> std::io::Result<()> {
        Ok(())
    }

    fn dma_logging_start(&self, page_size: u64, ranges: &[DmaRange]) -> std::io::Result<u64> {
        self.0.dma_logging_start(page_size, ranges)
    }

    fn dma_logging_report(&self, range: DmaRange, page_size: u64, bitmap: &mut [u64]) -> std::io::Result<()> {
        self.0.dma_logging_report(range, page_size, bitmap)
    }

    fn dma_logging_stop(&self) -> std::io::Result<()> {
        self.0.dma_logging_stop()
    }
}

#[test]
fn a_server_that_is_gone_fails_the_saver_and_the_loader_with_the_reason() {
    let (model, server, device) = remote(source(5000), Manner::default());
    let mut saver = Saver::new(device, "nic").unwrap();
    saver.begin(u64::MAX).unwrap();
    assert!(matches!(saver.read(&mut [0; 100]).unwrap(), Chunk::Bytes(100)));
    drop(server);
    let error = saver.read(&mut [0; 100]).unwrap_err();
    assert!(matches!(&error, VfioError::Read { after: 100, .. }), "{error}");
    let error = saver.abort().unwrap_err();
    assert!(error.to_string().contains("was shut down"), "{error}");
    assert_eq!((saver.state(), model.is_in()), (None, State::PreCopy));

    assert!(Client::connect("/nowhere/at/all".as_ref(), Duration::from_secs(1)).is_err());
    // The server accepts no client, and its queue is full.
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let mut queue = Vec::new();
    let error = loop {
        assert!(queue.len() < 100_000);
        match rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::NONBLOCK, None)
            .and_then(|stream| connect(&stream, &SocketAddrUnix::new(&socket)?).map(|()| stream))
        {
            Ok(stream) => queue.push(stream),
            Err(_) => break Client::connect(&socket, Duration::from_secs(60)).unwrap_err(),
        }
    };
    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
    assert!(error.to_string().contains("accepts no client now"), "{error}");
    let (alone, silent) = UnixStream::pair().unwrap();
    let error = Client::new(alone, Duration::from_millis(20)).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::TimedOut);
    drop(silent);
}

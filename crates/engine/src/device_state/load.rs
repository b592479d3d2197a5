//! Devices at the destination: pieces from the channels are put in order and read by a thread for each device.

use std::fmt;
use std::io::{self, BufRead, Read};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use sterna_wire::control::ControlMessage;
use sterna_wire::device::{DeviceReceiver, MIN_CREDIT, Piece};
use sterna_wire::reason::{ErrorKind, Reason};

use super::{DeviceId, LoadDevice, Threads, unless_it_panics};
use crate::device_bytes::{Buffers, DeviceBytes};
use crate::receive::{Content, DevicePieceSink, SinkError};
use crate::vmm::VmmError;

/// A device for which nothing has arrived for so long has loaded all of its state for now.
const MOMENT: Duration = Duration::from_millis(10);

/// A message of a device's thread to the driver.
#[derive(Debug)]
pub(crate) enum LoadEvent {
    /// The device has loaded all of its state.
    Loaded(u16),
    /// Loading has failed, with the reason.
    Failed(Reason),
}

/// The pieces that have arrived for one device.
struct Queue {
    id: DeviceId,
    buffers: Buffers,
    state: Mutex<QueueState>,
    changed: Condvar,
}

struct QueueState {
    receiver: DeviceReceiver<DeviceBytes>,
    over: bool,
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().expect("no thread panics with the lock held")
    }

    /// Waits for the next piece in order; none if the migration is being taken down. Where nothing has arrived for a moment, calls `idle`
    /// with the credit that the source has not been sent yet, if any.
    fn next_piece(&self, idle: impl Fn(u64)) -> Option<Piece<DeviceBytes>> {
        let nothing = |state: &mut QueueState| !state.over && !state.receiver.has_next();
        let mut state = self.state();
        loop {
            if state.over {
                return None;
            }
            if let Some(piece) = state.receiver.next_piece() {
                return Some(piece);
            }
            let timeout;
            (state, timeout) =
                self.changed.wait_timeout_while(state, MOMENT, nothing).expect("no thread panics with the lock held");
            if timeout.timed_out() {
                if let Some(up_to) = state.receiver.unsent_credit() {
                    drop(state);
                    idle(up_to);
                    state = self.state();
                }
                state = self.changed.wait_while(state, nothing).expect("no thread panics with the lock held");
            }
        }
    }
}

/// Whose turn it is, where one device loads after the other.
#[derive(Default)]
struct Turn {
    state: Mutex<(usize, bool)>,
    changed: Condvar,
}

impl Turn {
    /// Waits for the turn of `device`. Returns false if the migration is being taken down.
    fn wait(&self, device: usize) -> bool {
        let state = self.state.lock().expect("no thread panics with the lock held");
        let waits = |(turn, over): &mut (usize, bool)| *turn != device && !*over;
        !self.changed.wait_while(state, waits).expect("no thread panics with the lock held").1
    }

    fn change(&self, change: impl FnOnce(&mut (usize, bool))) {
        change(&mut self.state.lock().expect("no thread panics with the lock held"));
        self.changed.notify_all();
    }
}

/// The devices of one migration at the destination, numbered as the source numbers them.
pub(crate) struct LoadingDevices {
    queues: Vec<Queue>,
    turn: Option<Turn>,
}

/// Returns the bytes that each of so many devices may have on their way or waiting, where all together have `queue`.
///
/// # Errors
/// `queue` is too small.
pub(crate) fn share(queue: u64, devices: usize) -> Result<u64, String> {
    let share = queue / devices.max(1) as u64;
    if share >= MIN_CREDIT {
        return Ok(share);
    }
    let least = MIN_CREDIT * devices as u64;
    Err(format!("a queue of {queue} bytes for the state of {devices} devices; at least {least} are needed"))
}

impl fmt::Debug for LoadingDevices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.queues.iter().map(|queue| &queue.id)).finish()
    }
}

impl LoadingDevices {
    /// Makes the devices. Each may have `share` bytes on their way or waiting.
    pub(crate) fn new(ids: Vec<DeviceId>, share: u64, serial: bool) -> Self {
        let queue = |id| Queue {
            id,
            buffers: Buffers::new(usize::try_from(share).unwrap_or(usize::MAX)),
            state: Mutex::new(QueueState { receiver: DeviceReceiver::new(share), over: false }),
            changed: Condvar::new(),
        };
        Self { queues: ids.into_iter().map(queue).collect(), turn: serial.then(Turn::default) }
    }

    /// Returns the credits that are sent to the source first.
    pub(crate) fn credits(&self) -> impl Iterator<Item = ControlMessage> {
        self.queues.iter().zip(0..).map(|(queue, device)| {
            let up_to = queue.state().receiver.permitted();
            ControlMessage::DeviceCredit { device, up_to }
        })
    }

    /// Queues a piece that has arrived for `device`. Never waits.
    fn arrived(&self, device: u16, place: u64, piece: Piece<Content<'_>>) -> Result<(), SinkError> {
        let queue = self.queues.get(usize::from(device)).ok_or_else(|| format!("there is no device {device}"))?;
        let named = |error| format!("{}: {error}", queue.id);
        let length = if let Piece::Bytes(content) = &piece { content.length } else { 0 };
        let mut state = queue.state();
        // Before memory is reserved for the piece.
        state.receiver.check(place, length).map_err(named)?;
        let piece = match piece {
            Piece::Bytes(content) => Piece::Bytes(queue.buffers.receive(content.buffer, length)),
            Piece::Ahead => Piece::Ahead,
            Piece::End => Piece::End,
        };
        state.receiver.arrived(place, length, piece).map_err(named)?;
        drop(state);
        queue.changed.notify_all();
        Ok(())
    }

    /// Ends all waits here: the migration has ended or is being taken down.
    pub(crate) fn end(&self) {
        for queue in &self.queues {
            queue.state().over = true;
            queue.changed.notify_all();
        }
        if let Some(turn) = &self.turn {
            turn.change(|(_, over)| *over = true);
        }
    }

    /// Starts a thread for each device and adds it to `threads`. `send` sends a message to the source, `news` one to the driver.
    ///
    /// # Errors
    /// A thread cannot be started. Those that were started end with [`LoadingDevices::end`].
    pub(crate) fn start(
        self: &Arc<Self>,
        devices: Vec<Box<dyn LoadDevice>>,
        threads: &mut Threads,
        send: impl Fn(ControlMessage) + Clone + Send + 'static,
        news: impl Fn(LoadEvent) + Clone + Send + 'static,
    ) -> io::Result<()> {
        for (number, mut device) in devices.into_iter().enumerate() {
            let (devices, send, news) = (Arc::clone(self), send.clone(), news.clone());
            let id = self.queues[number].id.clone();
            threads.start(format!("load-device-{number}"), id, move || {
                let mut reader =
                    PieceReader { queue: &devices.queues[number], number: number as u16, send, next: Next::Nothing };
                match unless_it_panics(|| devices.load(number, &mut *device, &mut reader)) {
                    Ok(()) => news(LoadEvent::Loaded(number as u16)),
                    Err(error) => {
                        let id = &devices.queues[number].id;
                        let text = format_args!("loading the state of device {id} failed: {error}");
                        news(LoadEvent::Failed(Reason::new(ErrorKind::Monitor, text)));
                    }
                }
            })?;
        }
        Ok(())
    }

    fn load<S: Fn(ControlMessage)>(
        &self,
        number: usize,
        device: &mut dyn LoadDevice,
        reader: &mut PieceReader<'_, S>,
    ) -> Result<(), VmmError> {
        // A device is not called before anything has arrived for it.
        reader.await_first()?;
        if let Some(turn) = &self.turn
            && !turn.wait(number)
        {
            return Err(taken_down().into());
        }
        device.load(reader)?;
        // A newer source may send more than the device reads, and only the end shows that all has arrived.
        io::copy(reader, &mut io::sink())?;
        if let Some(turn) = &self.turn {
            turn.change(|(turn, _)| *turn += 1);
        }
        Ok(())
    }
}

impl DevicePieceSink for Arc<LoadingDevices> {
    fn piece(&mut self, device: u16, place: u64, piece: Piece<Content<'_>>) -> Result<(), SinkError> {
        self.arrived(device, place, piece)
    }
}

fn taken_down() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the state is incomplete: the migration is being taken down")
}

/// What a reader reads next.
enum Next {
    /// The following piece.
    Nothing,
    /// These bytes, from this position on.
    Bytes(DeviceBytes, usize),
    /// Nothing: the state has ended.
    End,
}

/// Reads the pieces of a device's state as one stream.
struct PieceReader<'a, S> {
    queue: &'a Queue,
    number: u16,
    send: S,
    next: Next,
}

impl<S: Fn(ControlMessage)> PieceReader<'_, S> {
    /// Waits until there is something to be read.
    fn await_first(&mut self) -> io::Result<()> {
        self.take_piece()
    }

    /// Waits for the next piece. This confirms that the device has loaded those before it.
    fn take_piece(&mut self) -> io::Result<()> {
        let piece = self.queue.next_piece(|up_to| self.send_credit(up_to)).ok_or_else(taken_down)?;
        self.next = match piece {
            Piece::Bytes(bytes) => Next::Bytes(bytes, 0),
            Piece::Ahead => {
                self.done_with(0);
                (self.send)(ControlMessage::DeviceTaken { device: self.number });
                Next::Nothing
            }
            Piece::End => {
                self.done_with(0);
                Next::End
            }
        };
        Ok(())
    }

    fn done_with(&self, content: usize) {
        let more = self.queue.state().receiver.done_with(content);
        if let Some(up_to) = more {
            self.send_credit(up_to);
        }
    }

    fn send_credit(&self, up_to: u64) {
        (self.send)(ControlMessage::DeviceCredit { device: self.number, up_to });
    }
}

impl<S: Fn(ControlMessage)> Read for PieceReader<'_, S> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        let bytes = self.fill_buf()?;
        let count = buffer.len().min(bytes.len());
        buffer[..count].copy_from_slice(&bytes[..count]);
        self.consume(count);
        Ok(count)
    }
}

impl<S: Fn(ControlMessage)> BufRead for PieceReader<'_, S> {
    /// Returns the rest of the current piece, or else the next piece.
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        loop {
            match &self.next {
                Next::Nothing => self.take_piece()?,
                Next::Bytes(bytes, at) if *at == bytes.len() => {
                    let length = bytes.len();
                    self.next = Next::Nothing;
                    self.done_with(length);
                }
                Next::End | Next::Bytes(..) => break,
            }
        }
        Ok(match &self.next {
            Next::Bytes(bytes, at) => &bytes[*at..],
            Next::End | Next::Nothing => &[],
        })
    }

    fn consume(&mut self, count: usize) {
        if let Next::Bytes(bytes, at) = &mut self.next {
            *at = bytes.len().min(*at + count);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use sterna_test_kit::Random;
    use sterna_wire::device::DeviceSender;

    use super::*;

    /// Reads all state and sends it to the test.
    struct ForwardingDevice(std::sync::mpsc::Sender<Vec<u8>>);

    impl LoadDevice for ForwardingDevice {
        fn load(&mut self, state: &mut dyn BufRead) -> Result<(), VmmError> {
            let mut loaded = Vec::new();
            state.read_to_end(&mut loaded)?;
            Ok(self.0.send(loaded)?)
        }
    }

    /// Devices, the messages of their threads to the source and to the driver, and the state that they loaded.
    struct Side {
        devices: Arc<LoadingDevices>,
        threads: Threads,
        to_source: Receiver<ControlMessage>,
        news: Receiver<LoadEvent>,
        loaded: Vec<Receiver<Vec<u8>>>,
    }

    fn side(count: u32, share: u64, serial: bool) -> Side {
        let ids = (0..count).map(|instance| DeviceId::new("device", instance)).collect();
        let devices = Arc::new(LoadingDevices::new(ids, share, serial));
        let ((message_in, to_source), (news_in, news)) = (channel(), channel());
        let (loaders, loaded): (Vec<Box<dyn LoadDevice>>, Vec<_>) = (0..count)
            .map(|_| {
                let (sender, receiver) = channel();
                (Box::new(ForwardingDevice(sender)) as Box<dyn LoadDevice>, receiver)
            })
            .unzip();
        let mut threads = Threads::default();
        let send = move |message| drop(message_in.send(message));
        devices.start(loaders, &mut threads, send, move |news| drop(news_in.send(news))).unwrap();
        Side { devices, threads, to_source, news, loaded }
    }

    /// Queues a piece that arrives, or the end.
    fn arrives(devices: &LoadingDevices, device: u16, place: u64, piece: Option<&[u8]>) {
        // A channel's buffer is larger than most pieces.
        let mut buffer = vec![0xee; 10 << 10];
        let piece = piece.map_or(Piece::End, |piece| {
            buffer.resize(buffer.len().max(piece.len()), 0xee);
            buffer[..piece.len()].copy_from_slice(piece);
            Piece::Bytes(Content { buffer: &mut buffer, length: piece.len() })
        });
        devices.arrived(device, place, piece).unwrap();
    }

    /// Sends the state of several devices, whose pieces arrive in a random order that their credit permits, and compares what was loaded.
    fn arrive_in_any_order(seed: u64) {
        let mut random = Random::new(seed);
        let count = 1 + random.index(5);
        let mut side = side(count as u32, MIN_CREDIT, random.index(3) == 0);
        let mut senders = vec![DeviceSender::default(); count];
        let mut left: Vec<Vec<u8>> =
            (0..count).map(|device| (0..random.index(400_000)).map(|at| (at * 31 + device) as u8).collect()).collect();
        let expected = left.clone();
        let mut ended = vec![false; count];
        let mut on_the_way: Vec<(u16, u64, Option<Vec<u8>>)> = Vec::new();
        for credit in side.devices.credits().collect::<Vec<_>>() {
            let ControlMessage::DeviceCredit { device, up_to } = credit else { unreachable!() };
            senders[usize::from(device)].credit(up_to).unwrap();
        }
        while !on_the_way.is_empty() || ended.iter().any(|ended| !ended) {
            let device = random.index(count);
            let length = left[device].len().min(1 + random.index(12 << 10));
            let at_end = left[device].is_empty();
            if !ended[device]
                && let Some(place) = senders[device].send(length)
            {
                let piece: Vec<u8> = left[device].drain(..length).collect();
                on_the_way.push((device as u16, place, (!at_end).then_some(piece)));
                ended[device] = at_end;
            } else if !on_the_way.is_empty() {
                let (device, place, piece) = on_the_way.swap_remove(random.index(on_the_way.len()));
                arrives(&side.devices, device, place, piece.as_deref());
            }
            // Where no device can send anything, one must load something first.
            let waits = on_the_way.is_empty()
                && ended.iter().zip(&senders).all(|(ended, sender)| *ended || sender.clone().send(12 << 10).is_none());
            let first = if waits && ended.contains(&false) { side.to_source.recv().ok() } else { None };
            for message in first.into_iter().chain(side.to_source.try_iter()) {
                if let ControlMessage::DeviceCredit { device, up_to } = message {
                    senders[usize::from(device)].credit(up_to).unwrap();
                }
            }
        }
        for (device, expected) in expected.iter().enumerate() {
            assert!(side.loaded[device].recv().unwrap() == *expected, "device {device}");
        }
        let loaded = side.news.iter().take(count).filter(|news| matches!(news, LoadEvent::Loaded(_))).count();
        assert_eq!(loaded, count);
        side.threads.join(|_| ());
    }

    #[test]
    fn a_state_is_the_same_in_whatever_order_it_arrives() {
        let chosen = std::env::var("STERNA_SEED").ok().map(|text| text.parse().expect("a number"));
        for seed in chosen.map_or(0..200, |seed: u64| seed..seed + 1) {
            println!("STERNA_SEED={seed}");
            arrive_in_any_order(seed);
        }
    }

    #[test]
    fn the_end_of_a_migration_ends_every_wait() {
        for serial in [false, true] {
            let mut side = side(3, MIN_CREDIT, serial);
            // One device waits for its first piece, one amid its state, one for its turn where there are turns.
            arrives(&side.devices, 1, 0, Some(b"begun"));
            arrives(&side.devices, 2, 0, Some(b"begun"));
            side.devices.end();
            side.threads.join(|_| ());
            let failed = side.news.iter().filter(|news| matches!(news, LoadEvent::Failed(_))).count();
            assert_eq!(failed, 3);
        }
    }

    #[test]
    fn a_queue_that_is_too_small_for_its_devices_is_refused() {
        assert_eq!(share(4 * MIN_CREDIT, 4), Ok(MIN_CREDIT));
        assert!(share(4 * MIN_CREDIT - 1, 4).unwrap_err().contains("at least 262144 are needed"));
        assert_eq!(share(MIN_CREDIT, 0), Ok(MIN_CREDIT), "without devices it is of no consequence");
    }
}

//! One connection of a simulated network: two bounded byte pipes that threads block on, and their faults.
//!
//! A connection behaves as TCP does on Linux in all that the transport can observe: a read returns a piece of the bytes
//! that have arrived, a closed direction can be read to its end, closing with unread bytes resets the connection, and a
//! broken connection loses the bytes in transit.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::net::Shutdown;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::SIMULATED;
use super::faults::Direction;
use super::random::Seeded;

/// Identifies a connection.
#[derive(Clone, Debug)]
pub(super) struct Name {
    pub(super) port: Arc<str>,
    /// Its number among all connections of the network.
    pub(super) of_network: u64,
    /// Its number among those to its port.
    pub(super) of_port: u64,
}

/// For each direction, after how many delivered bytes a fault occurs.
#[derive(Debug, Default)]
pub(super) struct Troubles {
    pub(super) cut: [Option<u64>; 2],
    pub(super) stall: [Option<u64>; 2],
}

/// The state that both ends share.
#[derive(Debug)]
pub(super) struct Wire {
    pub(super) name: Name,
    capacity: usize,
    state: Mutex<State>,
    /// Signals that bytes can be read from the flow of this direction, or that none will ever come.
    readable: [Condvar; 2],
    /// Signals that bytes can be written to the flow, or that none ever will be.
    writable: [Condvar; 2],
}

#[derive(Debug)]
struct State {
    flows: [Flow; 2],
    /// The timeouts of the end that reads each direction.
    timeouts: [Timeouts; 2],
    /// The connection was cut: how the reader of each direction sees it.
    broken: Option<[Break; 2]>,
    /// How the readers will see a cut.
    when_cut: [Break; 2],
}

/// How an end sees that a connection is broken. Both occur with TCP, depending on the devices between the hosts.
#[derive(Clone, Copy, Debug)]
enum Break {
    /// `ConnectionReset`.
    Reset,
    /// The end of the stream, although not all bytes have arrived.
    End,
}

/// How long an end waits for a byte, and for room to write.
#[derive(Clone, Copy, Debug, Default)]
struct Timeouts {
    read: Option<Duration>,
    write: Option<Duration>,
}

/// One direction.
#[derive(Debug)]
struct Flow {
    /// Bytes in transit.
    bytes: VecDeque<u8>,
    delivered: u64,
    cut_at: Option<u64>,
    stall_at: Option<u64>,
    stalled: bool,
    /// The writer will write no more.
    ended: bool,
    /// The flow ends with a reset, because the writer's end was closed with unread bytes. Bytes written before the
    /// reset arrive.
    reset: bool,
    /// The reader will read no more.
    unheard: bool,
    random: Seeded,
}

impl Flow {
    /// Returns how many of the bytes in transit the reader may receive, at most `most`.
    fn deliverable(&self, most: usize) -> usize {
        if self.stalled {
            return 0;
        }
        let border = |at: Option<u64>| at.map_or(u64::MAX, |at| at - self.delivered);
        let until = border(self.cut_at).min(border(self.stall_at)).min(most as u64) as usize;
        self.bytes.len().min(until)
    }

    fn take(&mut self, into: &mut [u8]) {
        let (front, back) = self.bytes.as_slices();
        let (first, second) = into.split_at_mut(into.len().min(front.len()));
        first.copy_from_slice(&front[..first.len()]);
        second.copy_from_slice(&back[..second.len()]);
        self.bytes.drain(..into.len());
        self.delivered += into.len() as u64;
    }
}

impl State {
    /// Ends both directions at once; bytes in transit are lost.
    fn cut(&mut self) {
        self.broken = Some(self.when_cut);
        for flow in &mut self.flows {
            flow.bytes = VecDeque::new();
        }
    }

    /// Triggers the faults that are due at the number of bytes that have arrived.
    fn come_to_pass(&mut self, direction: Direction) {
        let flow = &mut self.flows[direction as usize];
        if flow.stall_at == Some(flow.delivered) {
            (flow.stalled, flow.stall_at) = (true, None);
        }
        if flow.cut_at == Some(flow.delivered) {
            self.cut();
        }
    }
}

impl Wire {
    /// Makes a connection. Returns the connecting end and the listening end.
    pub(super) fn connect(name: Name, capacity: usize, troubles: &Troubles, mut random: Seeded) -> [End; 2] {
        let mut chance = || if random.next().is_multiple_of(2) { Break::Reset } else { Break::End };
        let when_cut = [chance(), chance()];
        let flows = Direction::BOTH.map(|direction| Flow {
            bytes: VecDeque::new(),
            delivered: 0,
            cut_at: troubles.cut[direction as usize],
            stall_at: troubles.stall[direction as usize],
            stalled: false,
            ended: false,
            reset: false,
            unheard: false,
            random: Seeded::new(random.next(), direction as u64),
        });
        let mut state = State { flows, timeouts: [Timeouts::default(); 2], broken: None, when_cut };
        Direction::BOTH.into_iter().for_each(|direction| state.come_to_pass(direction));
        let conditions = || [Condvar::new(), Condvar::new()];
        let wire = Self { name, capacity, state: Mutex::new(state), readable: conditions(), writable: conditions() };
        let wire = Arc::new(wire);
        [Direction::Back, Direction::Forth].map(|reads| End { wire: Arc::clone(&wire), reads })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nothing panics with a connection's state in hand")
    }

    fn wake_all(&self) {
        for condition in self.readable.iter().chain(&self.writable) {
            condition.notify_all();
        }
    }

    /// Cuts the connection.
    pub(super) fn cut(&self) {
        self.state().cut();
        self.wake_all();
    }

    /// Stops delivery in `direction`.
    pub(super) fn stall(&self, direction: Direction) {
        self.state().flows[direction as usize].stalled = true;
    }

    /// Resumes delivery.
    pub(super) fn resume(&self) {
        for flow in &mut self.state().flows {
            flow.stalled = false;
        }
        self.wake_all();
    }

    /// Removes the planned faults.
    pub(super) fn heal(&self) {
        for flow in &mut self.state().flows {
            (flow.cut_at, flow.stall_at) = (None, None);
        }
        self.resume();
    }
}

/// Waits for a change, at most until `deadline`.
fn wait<'a>(
    changed: &Condvar,
    state: MutexGuard<'a, State>,
    deadline: Option<Instant>,
) -> io::Result<MutexGuard<'a, State>> {
    let poisoned = "nothing panics with a connection's state in hand";
    let Some(deadline) = deadline else { return Ok(changed.wait(state).expect(poisoned)) };
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    Ok(changed.wait_timeout(state, left).expect(poisoned).0)
}

/// One end of a connection. Dropping it closes it, as the last file descriptor of a socket does.
#[derive(Debug)]
pub(in crate::transport) struct End {
    wire: Arc<Wire>,
    /// The direction that this end reads.
    reads: Direction,
}

impl End {
    fn reading(&self) -> usize {
        self.reads as usize
    }

    fn writing(&self) -> usize {
        1 - self.reads as usize
    }

    pub(super) fn wire(&self) -> &Arc<Wire> {
        &self.wire
    }

    /// Returns a description of the connection for messages.
    pub(in crate::transport) fn name(&self) -> String {
        let Name { port, of_port, .. } = &self.wire.name;
        format!("{SIMULATED}{port} (connection {of_port})")
    }

    /// Sets how long this end waits for a byte, and for room to write.
    pub(in crate::transport) fn set_timeouts(&self, read: Option<Duration>, write: Option<Duration>) {
        self.wire.state().timeouts[self.reading()] = Timeouts { read, write };
    }

    pub(in crate::transport) fn set_read_timeout(&self, timeout: Option<Duration>) {
        self.wire.state().timeouts[self.reading()].read = timeout;
    }

    /// Reads, waiting at most for the read timeout.
    pub(in crate::transport) fn read_with_timeout(&self, into: &mut [u8]) -> io::Result<usize> {
        let timeout = self.wire.state().timeouts[self.reading()].read;
        self.read(into, timeout.map(|timeout| Instant::now() + timeout))
    }

    /// Reads a random piece of the bytes that have arrived, waiting for them until `deadline`. Returns 0 at the end of
    /// the stream.
    pub(in crate::transport) fn read(&self, into: &mut [u8], deadline: Option<Instant>) -> io::Result<usize> {
        let at = self.reading();
        let mut state = self.wire.state();
        loop {
            match state.broken {
                Some(breaks) if let Break::Reset = breaks[at] => return Err(io::ErrorKind::ConnectionReset.into()),
                Some(_) => return Ok(0),
                None => {}
            }
            let flow = &mut state.flows[at];
            if flow.unheard || into.is_empty() {
                return Ok(0);
            }
            let most = flow.deliverable(into.len());
            if most > 0 {
                let count = flow.random.piece(most);
                flow.take(&mut into[..count]);
                state.come_to_pass(self.reads);
                let broken = state.broken.is_some();
                drop(state);
                self.wire.writable[at].notify_one();
                if broken {
                    self.wire.wake_all();
                }
                return Ok(count);
            }
            if flow.ended && flow.bytes.is_empty() && !flow.stalled {
                return if flow.reset { Err(io::ErrorKind::ConnectionReset.into()) } else { Ok(0) };
            }
            state = wait(&self.wire.readable[at], state, deadline)?;
        }
    }

    /// Returns how many bytes can be read without waiting.
    pub(in crate::transport) fn arrived(&self) -> u64 {
        let state = self.wire.state();
        if state.broken.is_some() { 0 } else { state.flows[self.reading()].deliverable(usize::MAX) as u64 }
    }

    /// Returns for how many bytes there is room.
    ///
    /// # Errors
    /// No byte that is written would ever arrive.
    fn room(&self, state: &State) -> io::Result<usize> {
        match state.broken {
            Some(breaks) if let Break::Reset = breaks[self.reading()] => {
                return Err(io::ErrorKind::ConnectionReset.into());
            }
            Some(_) => return Err(io::ErrorKind::BrokenPipe.into()),
            None => {}
        }
        // A stalled direction also delays the news that the other end has closed.
        let known = !state.flows[self.reading()].stalled;
        let flow = &state.flows[self.writing()];
        if flow.ended || (flow.unheard && known) {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        Ok(self.wire.capacity.saturating_sub(flow.bytes.len()))
    }

    /// Writes as much of `bytes` as there is room for, and returns how many.
    pub(in crate::transport) fn write_some(&self, bytes: &[u8]) -> io::Result<usize> {
        let mut state = self.wire.state();
        let count = self.room(&state)?.min(bytes.len());
        state.flows[self.writing()].bytes.extend(&bytes[..count]);
        self.wire.readable[self.writing()].notify_one();
        Ok(count)
    }

    /// Waits until [`End::write_some`] writes or fails.
    pub(in crate::transport) fn wait_writable(&self, deadline: Instant) -> io::Result<()> {
        let mut state = self.wire.state();
        while self.room(&state).is_ok_and(|room| room == 0) {
            state = wait(&self.wire.writable[self.writing()], state, Some(deadline))?;
        }
        Ok(())
    }

    /// Writes all of `parts`, waiting for room. If it may not wait, writes as much as there is room for and then fails
    /// with `WouldBlock`.
    pub(in crate::transport) fn write_all(&self, parts: &[IoSlice<'_>], may_wait: bool) -> io::Result<()> {
        let at = self.writing();
        let mut state = self.wire.state();
        for mut part in parts.iter().map(|part| &part[..]) {
            let timeout = state.timeouts[self.reading()].write;
            let mut deadline = None;
            while !part.is_empty() {
                let room = self.room(&state)?;
                if room > 0 {
                    let (now, later) = part.split_at(part.len().min(room));
                    state.flows[at].bytes.extend(now);
                    part = later;
                    deadline = None;
                    self.wire.readable[at].notify_one();
                } else if may_wait {
                    deadline = deadline.or_else(|| timeout.map(|timeout| Instant::now() + timeout));
                    state = wait(&self.wire.writable[at], state, deadline)?;
                } else {
                    return Err(io::ErrorKind::WouldBlock.into());
                }
            }
        }
        Ok(())
    }

    /// Drops the bytes that have arrived, without waiting for more.
    pub(in crate::transport) fn forget_unread(&self) {
        self.wire.state().flows[self.reading()].bytes.clear();
        self.wire.writable[self.reading()].notify_one();
    }

    /// Ends one direction, or both. Reads and writes that wait at this end return.
    pub(in crate::transport) fn shutdown(&self, how: Shutdown) {
        let mut state = self.wire.state();
        if matches!(how, Shutdown::Write | Shutdown::Both) {
            state.flows[self.writing()].ended = true;
        }
        if matches!(how, Shutdown::Read | Shutdown::Both) {
            let flow = &mut state.flows[self.reading()];
            flow.unheard = true;
            flow.bytes.clear();
        }
        drop(state);
        self.wire.wake_all();
    }
}

impl Drop for End {
    fn drop(&mut self) {
        let mut state = self.wire.state();
        let unread = !state.flows[self.reading()].bytes.is_empty();
        state.flows[self.writing()].reset |= unread;
        drop(state);
        self.shutdown(Shutdown::Both);
    }
}

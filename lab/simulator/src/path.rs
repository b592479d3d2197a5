//! The path of one migration from guest memory to guest memory, for evaluating the choice of encodings.
//!
//! As in the engine, each channel's thread reads a batch, encodes it, and writes it to its connection; all channels
//! share a window, a network, and if limited the cores and the engines of an accelerator. Each queue of the engine is
//! one here: the socket's buffers, the network, the receivers. A choice gets the same input as from the engine
//! ([`Interval`]), so a choice is the product's own [`sterna_codec::select::Selection`], a fixed method, or a
//! search that knows all costs in advance.

pub mod choices;
mod parts;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use sterna_codec::select::Interval;

use parts::{Allowance, Servers, Window};

/// Bytes that the kernel holds of a connection at the receiver.
const RECEIVE_BUFFER: usize = 6 << 20;
/// Batches of the same 2 MiB of memory take the same channel.
const REGION: usize = 4;

/// The resources between both guests' memory. Times are in nanoseconds, rates in bytes per nanosecond.
#[derive(Clone, Debug)]
pub struct Path {
    /// Sending threads, each with its own connection and receiving thread.
    pub channels: usize,
    /// Rate of the network; infinite for memory.
    pub rate: f64,
    /// From this batch on, the rate is this one.
    pub change: Option<(usize, f64)>,
    /// Reading a byte of guest memory, with its checksum.
    pub read: f64,
    /// Writing a byte to a connection.
    pub write: f64,
    /// Reading a byte from a connection.
    pub receive: f64,
    /// Checking a byte of content and putting it into the destination's memory.
    pub place: f64,
    /// Cores that the sending threads share, and as many that the receiving threads share.
    pub cores: usize,
    /// CPUs that the threads may use, as reported to the choice; infinite without a limit.
    pub allowed: f64,
    /// Engines of the accelerator.
    pub engines: usize,
    /// Bytes that the kernel holds of a connection at the sender.
    pub socket: usize,
}

impl Path {
    /// Makes a path with a network of this rate between machines without other limits, with one channel.
    pub fn link(rate: f64) -> Self {
        Self {
            channels: 1,
            rate,
            change: None,
            read: 0.1,
            write: 0.2,
            receive: 0.1,
            place: 0.05,
            cores: usize::MAX,
            allowed: f64::INFINITY,
            engines: 1,
            socket: 2 << 20,
        }
    }
}

/// The result of encoding a batch.
#[derive(Clone, Copy, Debug, Default)]
pub struct Encoded {
    /// Bytes before.
    pub size: usize,
    /// Bytes after.
    pub bytes: usize,
    /// Nanoseconds of the thread.
    pub thread: f64,
    /// Further nanoseconds of an engine of the accelerator, for which the thread waits.
    pub engine: f64,
    /// Nanoseconds of the receiver to decode it.
    pub decoding: f64,
}

/// The choice of encodings, for one channel.
pub trait Choice {
    /// Encodes batch number `batch` of all channels. `left` is how many nanoseconds the network still has data of the
    /// channel to send.
    fn encode(&mut self, batch: usize, left: f64) -> Encoded;

    /// Reports the duration of the last encoding, including the wait for an engine.
    fn encoded(&mut self, nanos: u64) {
        let _ = nanos;
    }

    /// Reports that the batch was written.
    fn sent(&mut self, interval: &Interval) {
        let _ = interval;
    }
}

/// The cost of a migration.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Took {
    /// Nanoseconds until everything was in place.
    pub time: f64,
    /// Nanoseconds of the sending threads' CPUs.
    pub cpu: f64,
    /// Nanoseconds of the accelerator's engines.
    pub engines: f64,
    /// Nanoseconds that threads waited for a free engine.
    pub queued: f64,
    /// Bytes on the network.
    pub bytes: usize,
}

impl Took {
    /// Returns the mean number of CPUs that the sending threads used.
    pub fn cpus(&self) -> f64 {
        self.cpu / self.time
    }
}

/// A thread's next action.
#[derive(Clone, Copy, Debug)]
enum Next {
    /// Takes a batch. The value: since when it has waited for room in the window.
    Batch(f64),
    /// Writes an encoded batch.
    Write(Encoded),
}

#[derive(Debug)]
struct Channel {
    next: Next,
    /// Its next batch.
    batch: usize,
    /// The end of its previous packet.
    since: f64,
    /// Since then: the time waited and the CPU time used.
    waited: f64,
    used: f64,
    /// Busy time that the receiver has reported since then.
    placing: f64,
    /// When all written bytes will have arrived.
    arrived: f64,
    /// Bytes that have not arrived, or were not read by the receiver: until when, and how many.
    sending: VecDeque<Passing>,
    arriving: VecDeque<(f64, usize)>,
    receiver_free: f64,
    /// How long nothing was in transit on any channel, at the time of its previous packet.
    idle: f64,
}

/// Bytes that pass the network evenly from one time to another.
#[derive(Clone, Copy, Debug)]
struct Passing {
    from: f64,
    until: f64,
    bytes: usize,
}

impl Passing {
    /// Returns the bytes that have not passed.
    fn left(&self, now: f64) -> f64 {
        let part = (self.until - now) / (self.until - self.from).max(f64::MIN_POSITIVE);
        self.bytes as f64 * part.clamp(0.0, 1.0)
    }

    /// Returns when `bytes` of it have passed since `now`, or all of it.
    fn when_less_by(&self, bytes: f64, now: f64) -> f64 {
        let each = (self.until - self.from) / self.bytes.max(1) as f64;
        // At least a nanosecond, as a step that rounds to nothing would never end.
        (now.max(self.from) + bytes * each).min(self.until).max(now + 1.0)
    }
}

/// Returns the bytes that have not passed by `now`; removes those that have.
fn left(passing: &mut VecDeque<Passing>, now: f64) -> f64 {
    while passing.front().is_some_and(|first| first.until <= now) {
        passing.pop_front();
    }
    passing.iter().map(|passing| passing.left(now)).sum()
}

/// A time in a heap.
#[derive(Clone, Copy, Debug, PartialEq)]
struct At(f64, usize);

impl Eq for At {}

impl Ord for At {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0).then(self.1.cmp(&other.1))
    }
}

impl PartialOrd for At {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// Returns the channel that takes this batch.
fn channel_of(batch: usize, channels: usize) -> usize {
    batch / REGION % channels
}

/// Moves `batches` batches, with a choice for each channel.
///
/// # Panics
/// Without a channel, or with other than one choice for each.
pub fn run<C: Choice>(path: &Path, batches: usize, choices: &mut [C]) -> Took {
    assert!(path.channels > 0 && choices.len() == path.channels, "each channel has a choice");
    let mut took = Took::default();
    let mut network_free = 0.0f64;
    let mut network_idle = 0.0f64;
    let mut senders = Servers::new(path.cores.min(path.channels));
    let mut receivers = Servers::new(path.cores.min(path.channels));
    let mut engines = Servers::new(path.engines);
    let mut allowance = Allowance::new(path.allowed);
    let mut window = Window::default();
    // Pending acknowledgements: when, of which channel, how many bytes, and how long the receiver was busy with them.
    let mut coming: BinaryHeap<Reverse<(At, usize, u64)>> = BinaryHeap::new();
    let mut threads: BinaryHeap<Reverse<At>> = (0..path.channels).map(|channel| Reverse(At(0.0, channel))).collect();
    let mut channels: Vec<Channel> = (0..path.channels)
        .map(|channel| Channel {
            next: Next::Batch(0.0),
            batch: channel * REGION,
            since: 0.0,
            waited: 0.0,
            used: 0.0,
            placing: 0.0,
            arrived: 0.0,
            sending: VecDeque::new(),
            arriving: VecDeque::new(),
            receiver_free: 0.0,
            idle: 0.0,
        })
        .collect();
    while let Some(Reverse(At(now, index))) = threads.pop() {
        while let Some(Reverse((At(at, of), size, placing))) = coming.peek().copied()
            && at <= now
        {
            coming.pop();
            window.acknowledged(size, at);
            channels[of].placing += placing as f64;
        }
        let (channel, choice) = (&mut channels[index], &mut choices[index]);
        match channel.next {
            Next::Batch(_) if channel.batch >= batches => {}
            Next::Batch(_) if !window.has_room() => {
                // Until the next known acknowledgement, or until another thread has caused one.
                let known = coming.peek().map(|Reverse((At(at, _), ..))| *at);
                let others = threads.peek().map(|Reverse(At(at, _))| *at);
                let until = known.or(others).expect("the bytes that fill the window are in transit or about to be");
                threads.push(Reverse(At(until.max(now + 1.0), index)));
            }
            Next::Batch(asked) => {
                channel.waited += now - asked;
                let encoded = choice.encode(channel.batch, (channel.arrived - now).max(0.0));
                window.entered(encoded.size);
                let reading = encoded.size as f64 * path.read;
                let (begun, read) = senders.serve(now, reading + encoded.thread);
                let (asked_engine, mut done) = (read, read);
                if encoded.engine > 0.0 {
                    let (begun, ended) = engines.serve(asked_engine, encoded.engine);
                    done = ended;
                    took.queued += begun - asked_engine;
                    took.engines += encoded.engine;
                }
                choice.encoded((done - begun - reading).max(0.0) as u64);
                channel.used += reading + encoded.thread;
                // The next of its region, or the first of its next region.
                channel.batch = match channel.batch + 1 {
                    next if channel_of(next, path.channels) == index => next,
                    next => next + REGION * (path.channels - 1),
                };
                channel.next = Next::Write(encoded);
                threads.push(Reverse(At(done, index)));
            }
            Next::Write(Encoded { size, bytes, decoding, .. }) => {
                let idle_there = (now - channel.arrived.max(channel.since)).max(0.0);
                let writing = bytes as f64 * path.write;
                let (_, mut written) = senders.serve(now, writing);
                channel.used += writing;
                // The network carries the beginning while the end is written, and before it the bytes that the receiver
                // has not read yet.
                let rate = match path.change {
                    Some((from, rate)) if channel.batch > from => rate,
                    _ => path.rate,
                };
                network_idle += (now - network_free).max(0.0);
                let start = now.max(network_free).max(channel.arrived);
                let mut let_in = start;
                free(&mut channel.arriving, let_in);
                while held(&channel.arriving) + bytes > RECEIVE_BUFFER
                    && let Some((until, _)) = channel.arriving.pop_front()
                {
                    let_in = let_in.max(until);
                }
                // While a receiver reads nothing, the network is free for others.
                network_free = (start + bytes as f64 / rate).max(written);
                channel.arrived = (let_in + bytes as f64 / rate).max(written);
                channel.sending.push_back(Passing { from: let_in, until: channel.arrived, bytes });
                // It is written when the socket has room for the rest of it.
                let had_room = written;
                loop {
                    let too_much = left(&mut channel.sending, written) - path.socket as f64;
                    match channel.sending.front() {
                        Some(first) if too_much > 0.0 => written = first.when_less_by(too_much, written),
                        _ => break,
                    }
                }
                channel.waited += written - had_room;
                // The receiver places the packet.
                let placing = bytes as f64 * path.receive + size as f64 * path.place + decoding;
                let ready = channel.arrived.max(channel.receiver_free);
                let (taken, placed) = receivers.serve(ready, placing);
                channel.arriving.push_back((taken, bytes));
                channel.receiver_free = placed;
                // As in the engine, a receiver that waits for a CPU is busy.
                coming.push(Reverse((At(placed, index), size, (placed - ready) as u64)));
                took.time = took.time.max(placed);
                took.bytes += bytes;
                // Report the interval to the choice.
                let elapsed = written - channel.since;
                let idle = std::mem::replace(&mut channel.idle, network_idle);
                let idle = network_idle - idle;
                let beyond = allowance.used(channel.used, written);
                took.cpu += std::mem::take(&mut channel.used);
                let waited = std::mem::take(&mut channel.waited).min(elapsed);
                let nanos = |time: f64| time.max(0.0) as u64;
                choice.sent(&Interval {
                    busy: nanos(elapsed - waited),
                    writing: nanos(writing),
                    waited: nanos(waited),
                    idle: nanos(idle),
                    arrived: nanos(idle_there + (let_in - start)),
                    placing: nanos(std::mem::take(&mut channel.placing)),
                    written: bytes,
                    beyond,
                });
                channel.since = written;
                channel.next = Next::Batch(written);
                threads.push(Reverse(At(written, index)));
            }
        }
    }
    took
}

/// Removes the entries that have left by `now`.
fn free(queue: &mut VecDeque<(f64, usize)>, now: f64) {
    while queue.front().is_some_and(|(until, _)| *until <= now) {
        queue.pop_front();
    }
}

fn held(queue: &VecDeque<(f64, usize)>) -> usize {
    queue.iter().map(|(_, bytes)| bytes).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: usize = 512 << 10;

    /// The same for each batch.
    struct Same(Encoded, Interval);

    impl Choice for Same {
        fn encode(&mut self, _batch: usize, _left: f64) -> Encoded {
            self.0
        }

        fn sent(&mut self, interval: &Interval) {
            self.1 = *interval;
        }
    }

    fn took(path: &Path, batches: usize, encoded: Encoded) -> (Took, Interval) {
        let mut choices: Vec<Same> = (0..path.channels).map(|_| Same(encoded, Interval::default())).collect();
        (run(path, batches, &mut choices), choices[0].1)
    }

    fn raw() -> Encoded {
        Encoded { size: SIZE, bytes: SIZE, ..Encoded::default() }
    }

    #[test]
    fn a_slow_network_sets_the_duration_and_the_threads_wait_for_it() {
        for channels in [1, 2, 4] {
            let path = Path { channels, ..Path::link(0.125) };
            let (took, last) = took(&path, 1000, raw());
            let network = 1000.0 * SIZE as f64 / 0.125;
            assert!(took.time >= network && took.time < 1.01 * network, "{took:?}");
            assert_eq!(took.bytes, 1000 * SIZE);
            assert!(last.waited > 5 * last.busy && last.idle == 0, "{last:?}");
        }
    }

    #[test]
    fn with_a_fast_network_threads_and_receivers_set_the_duration_and_more_channels_are_faster() {
        let encoded = Encoded { thread: SIZE as f64, bytes: SIZE / 2, ..raw() };
        let (one, last) = took(&Path::link(f64::INFINITY), 1000, encoded);
        // Read, encode, write half.
        let each = SIZE as f64 * (0.1 + 1.0 + 0.1);
        assert!((one.time / (1000.0 * each) - 1.0).abs() < 0.01, "{one:?}");
        assert_eq!(last.waited, 0);
        assert!(last.idle > last.busy / 2, "{last:?}");
        let (four, _) = took(&Path { channels: 4, ..Path::link(f64::INFINITY) }, 1000, encoded);
        assert!((4.0 * four.time / one.time - 1.0).abs() < 0.02);
        // On one core they are no faster, and use that core only.
        let (shared, _) = took(&Path { channels: 4, cores: 1, ..Path::link(f64::INFINITY) }, 1000, encoded);
        assert!((shared.time / one.time - 1.0).abs() < 0.02 && (shared.cpus() - 1.0).abs() < 0.02, "{shared:?}");
        // The sender waits for a slower receiver, which reports that it is busy.
        let (slow, last) = took(&Path::link(f64::INFINITY), 1000, Encoded { decoding: 3.0 * SIZE as f64, ..encoded });
        assert!(slow.time > 2.4 * one.time, "{slow:?}");
        assert!(last.waited > last.busy && last.arrived > last.busy && last.placing > last.busy, "{last:?}");
    }

    #[test]
    fn engines_serve_one_after_the_other_and_threads_wait_for_them_without_using_a_cpu() {
        let encoded = Encoded { engine: 1e6, bytes: SIZE / 2, ..raw() };
        let path = Path { channels: 4, ..Path::link(f64::INFINITY) };
        let (one, _) = took(&path, 1000, encoded);
        assert!((one.time / 1e9 - 1.0).abs() < 0.01, "{one:?}");
        assert_eq!(one.engines, 1e9);
        assert!(one.queued > 2e9 && one.cpus() < 0.2, "{one:?}");
        let (four, _) = took(&Path { engines: 4, ..path }, 1000, encoded);
        assert_eq!(four.queued, 0.0);
        assert!(four.time < 0.35 * one.time, "{four:?}");
    }

    #[test]
    fn the_network_changes_at_its_batch() {
        let path = Path { change: Some((500, 0.125)), ..Path::link(1.25) };
        let (took, _) = took(&path, 1000, raw());
        let network = 500.0 * SIZE as f64 * (1.0 / 1.25 + 1.0 / 0.125);
        assert!((took.time / network - 1.0).abs() < 0.02, "{took:?}");
    }

    #[test]
    fn only_a_choice_that_uses_more_cpu_than_allowed_gets_a_report_of_it() {
        let encoded = Encoded { thread: SIZE as f64, ..raw() };
        let path = Path { channels: 2, ..Path::link(f64::INFINITY) };
        for (allowed, beyond) in [(0.5, 1.0), (2.1, 0.0), (f64::INFINITY, 0.0)] {
            let (_, last) = took(&Path { allowed, ..path.clone() }, 1000, encoded);
            assert_eq!(last.beyond, beyond, "of {allowed}");
        }
    }

    #[test]
    fn every_batch_is_taken_once_by_the_channel_of_its_region() {
        struct Note<'a>(usize, &'a std::cell::RefCell<Vec<(usize, usize)>>);
        impl Choice for Note<'_> {
            fn encode(&mut self, batch: usize, _left: f64) -> Encoded {
                self.1.borrow_mut().push((batch, self.0));
                raw()
            }
        }
        for channels in [1, 3, 4] {
            let seen = std::cell::RefCell::new(Vec::new());
            let mut choices: Vec<_> = (0..channels).map(|index| Note(index, &seen)).collect();
            run(&Path { channels, ..Path::link(1.25) }, 101, &mut choices);
            drop(choices);
            let mut seen = seen.into_inner();
            seen.sort_unstable();
            let expected: Vec<_> = (0..101).map(|batch| (batch, channel_of(batch, channels))).collect();
            assert_eq!(seen, expected);
        }
    }
}

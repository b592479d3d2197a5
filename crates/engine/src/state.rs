//! The monitor's own state: a byte stream on the stream channel, written by `save`, read by `load`.
//!
//! The state that is sent ahead and the state that is sent at the switchover are two streams of records, each with an end of its own. At the
//! destination a record is received when the monitor reads it and not before, so a state of any size takes one packet of memory there.
//!
//! At the source the final state never makes the monitor wait: the destination reads none of it before it has all of RAM, and the last pages
//! of RAM are known only when the monitor has saved, since saving may write RAM. What the channel has no room for waits in memory.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use crate::item::Item;
use crate::receive::{SinkError, StreamSink};
use crate::send::SendChannel;

/// Which of the two streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Sent while the guest runs.
    Ahead,
    /// Sent when the guest is paused.
    Final,
}

impl Part {
    /// Returns the numbers of the part's records: of content, and of the end.
    const fn records(self) -> (u16, u16) {
        match self {
            Self::Ahead => (1, 2),
            Self::Final => (3, 4),
        }
    }
}

/// The writing end.
#[derive(Debug)]
pub(crate) struct StateWriter<'a> {
    channel: &'a SendChannel,
    part: Part,
    buffer: Vec<u8>,
    /// Records of the final state for which the channel had no room yet.
    waiting: VecDeque<Item>,
    packet_size: usize,
    written: u64,
}

impl<'a> StateWriter<'a> {
    pub(crate) fn new(channel: &'a SendChannel, part: Part, packet_size: usize) -> Self {
        Self { channel, part, buffer: Vec::new(), waiting: VecDeque::new(), packet_size, written: 0 }
    }

    /// Ends the stream and returns its length in bytes, once the channel has taken all of it. An empty stream ahead is not sent at all.
    pub(crate) fn finish(mut self) -> io::Result<u64> {
        if self.part == Part::Ahead && self.written == 0 {
            return Ok(0);
        }
        self.send()?;
        self.hand_over(self.part.records().1, Vec::new())?;
        for record in self.waiting {
            self.channel.send(record).map_err(io::Error::other)?;
        }
        Ok(self.written)
    }

    fn send(&mut self) -> io::Result<()> {
        let content = std::mem::take(&mut self.buffer);
        if content.is_empty() { Ok(()) } else { self.hand_over(self.part.records().0, content) }
    }

    fn hand_over(&mut self, record: u16, content: Vec<u8>) -> io::Result<()> {
        let record = Item::Stream { record, content };
        if self.part == Part::Ahead {
            return self.channel.send(record).map_err(io::Error::other);
        }
        self.waiting.push_back(record);
        while let Some(first) = self.waiting.pop_front() {
            if let Some(back) = self.channel.try_send(first).map_err(io::Error::other)? {
                self.waiting.push_front(back);
                break;
            }
        }
        Ok(())
    }
}

impl Write for StateWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let length = bytes.len().min(self.packet_size - self.buffer.len());
        self.buffer.extend_from_slice(&bytes[..length]);
        self.written += length as u64;
        if self.buffer.len() == self.packet_size {
            self.send()?;
        }
        Ok(length)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// One record: some content, or nothing at the end.
type Piece = Option<Vec<u8>>;

/// The sink of the stream channel: passes pieces on to the readers.
#[derive(Debug)]
pub(crate) struct StateSink<F> {
    ahead: Feed,
    last: Feed,
    /// Called when the first record of a part has arrived.
    begun: F,
}

/// The sending end to the reader of one part.
#[derive(Debug)]
struct Feed {
    pieces: Option<SyncSender<Piece>>,
    begun: bool,
}

/// The reading end of one part. Reading fails where the channel is lost before the end of the state.
#[derive(Debug)]
pub(crate) struct StateReader {
    pieces: Receiver<Piece>,
    piece: io::Cursor<Vec<u8>>,
    ended: bool,
    lost: bool,
}

/// Returns the sink, and the readers of the state that is sent ahead and of the final state.
pub(crate) fn state_sink<F: FnMut(Part) + Send>(begun: F) -> (StateSink<F>, StateReader, StateReader) {
    let feed = || {
        // One piece may wait while another is being read.
        let (sender, pieces) = sync_channel(1);
        let reader = StateReader { pieces, piece: io::Cursor::default(), ended: false, lost: false };
        (Feed { pieces: Some(sender), begun: false }, reader)
    };
    let ((ahead, read_ahead), (last, read_last)) = (feed(), feed());
    (StateSink { ahead, last, begun }, read_ahead, read_last)
}

impl<F: FnMut(Part) + Send> StreamSink for StateSink<F> {
    fn stream(&mut self, record: u16, content: &[u8]) -> Result<(), SinkError> {
        let parts = [Part::Ahead, Part::Final];
        let part = parts.into_iter().find(|part| [part.records().0, part.records().1].contains(&record));
        let part = part.ok_or_else(|| format!("a record of the unknown kind {record}"))?;
        let feed = if part == Part::Ahead { &mut self.ahead } else { &mut self.last };
        let Some(pieces) = &feed.pieces else { return Err("more state after its end".into()) };
        if !std::mem::replace(&mut feed.begun, true) {
            (self.begun)(part);
        }
        let end = record == part.records().1;
        let piece = if end { None } else { Some(content.to_vec()) };
        pieces.send(piece).map_err(|_| "the monitor reads no more state")?;
        if end {
            feed.pieces = None;
        }
        Ok(())
    }
}

impl Read for StateReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let read = self.piece.read(buffer)?;
            if read > 0 || self.ended || buffer.is_empty() {
                return Ok(read);
            }
            match self.pieces.recv() {
                Ok(Some(piece)) => self.piece = io::Cursor::new(piece),
                Ok(None) => self.ended = true,
                Err(_) => {
                    self.lost = true;
                    let text = "the state is incomplete: the migration is being taken down";
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, text));
                }
            }
        }
    }
}

impl StateReader {
    /// Returns whether the channel was lost before the end of the state.
    pub(crate) fn was_lost(&self) -> bool {
        self.lost
    }

    /// Reads to the end what the monitor has left. It may know of less than a newer source sends.
    pub(crate) fn finish(&mut self) -> io::Result<u64> {
        io::copy(self, &mut io::sink())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_two_parts_are_read_apart_and_to_their_ends() {
        let mut begun = Vec::new();
        let (mut sink, mut ahead, mut last) = state_sink(|part| begun.push(part));
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let records: [(u16, &[u8]); 6] = [(1, b"a"), (1, b"head"), (3, b"la"), (2, b""), (3, b"st"), (4, b"")];
                records.iter().for_each(|(record, content)| sink.stream(*record, content).unwrap());
                assert!(sink.stream(3, b"x").unwrap_err().to_string().contains("after its end"));
                assert!(sink.stream(9, b"x").unwrap_err().to_string().contains("unknown kind 9"));
            });
            let mut text = String::new();
            ahead.read_to_string(&mut text).unwrap();
            last.read_to_string(&mut text).unwrap();
            assert_eq!(text, "aheadlast");
            assert_eq!(last.finish().unwrap(), 0);
        });
        assert_eq!(begun, [Part::Ahead, Part::Final]);
    }

    #[test]
    fn a_state_that_breaks_off_is_an_error_and_not_an_end() {
        let (mut sink, _ahead, mut last) = state_sink(|_| {});
        std::thread::scope(|scope| {
            scope.spawn(move || sink.stream(3, b"half").unwrap());
            let error = last.read_to_end(&mut Vec::new()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        });
    }

    #[test]
    fn a_reader_that_is_gone_ends_the_channel() {
        let (mut sink, ahead, last) = state_sink(|_| {});
        drop((ahead, last));
        assert!(sink.stream(3, b"x").is_err());
    }
}

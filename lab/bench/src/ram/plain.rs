//! The plain mover, with which the library is compared. It has the same hole search, sockets and placement, and nothing
//! else: no rounds, no snapshot, no checksum, no window, and one acknowledgement at the end.
//!
//! Pages go from the source's memory to the kernel and from the kernel to the destination's memory; without a copy in
//! between. That is only possible because no guest writes this memory: pages that change in transit could be neither
//! checksummed nor searched for zeros.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicUsize, Ordering};

use sterna_memory::PAGE_SIZE;
use sterna_memory::holes::PageMap;
use sterna_memory::ram::{GuestRam, RamBlock};

/// The most bytes behind one header, all from one region of this size. Of 512 KiB to 4 MiB no size was faster by more
/// than noise, and channels that share a huge page would wait for each other's page fault.
const PIECE: u64 = 2 << 20;
/// Offset and length, little-endian; a length of zero is the end.
const HEADER: usize = 16;
/// The destination's answer once everything is in place.
const DONE: u8 = 1;

/// Sends all populated memory of the one block of `ram` by this many connections, and waits until all of it is in place
/// at the destination. Returns the bytes written.
pub(crate) fn send(ram: &GuestRam, to: &str, channels: u16) -> io::Result<u64> {
    let block = the_block(ram)?;
    let streams = (0..channels).map(|_| TcpStream::connect(to)).collect::<io::Result<Vec<_>>>()?;
    let pieces = pieces(block)?;
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let (pieces, next) = (&pieces, &next);
        let running: Vec<_> = streams
            .into_iter()
            .map(|mut stream| {
                scope.spawn(move || -> io::Result<u64> {
                    stream.set_nodelay(true)?;
                    let mut written = 0;
                    while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                        write_piece(&stream, block, piece)?;
                        written += HEADER as u64 + piece.end - piece.start;
                    }
                    stream.write_all(&[0; HEADER])?;
                    let mut answer = [0];
                    stream.read_exact(&mut answer)?;
                    if answer == [DONE] { Ok(written + HEADER as u64) } else { Err(io::ErrorKind::InvalidData.into()) }
                })
            })
            .collect();
        running.into_iter().map(|thread| thread.join().expect("the mover does not panic")).sum()
    })
}

/// Receives into the one block of `ram` by this many connections, until all of it is in place.
pub(crate) fn receive(ram: &GuestRam, listener: &TcpListener, channels: u16) -> io::Result<()> {
    let block = the_block(ram)?;
    std::thread::scope(|scope| {
        let running = (0..channels)
            .map(|_| {
                let (stream, _) = listener.accept()?;
                Ok(scope.spawn(move || receive_one(block, stream)))
            })
            .collect::<io::Result<Vec<_>>>()?;
        running.into_iter().try_for_each(|thread| thread.join().expect("the mover does not panic"))
    })
}

fn receive_one(block: &RamBlock, mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    loop {
        let mut header = [0; HEADER];
        stream.read_exact(&mut header)?;
        let word = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("eight bytes"));
        let (offset, length) = (word(0), word(8));
        if length == 0 {
            return stream.write_all(&[DONE]);
        }
        let end = offset.checked_add(length).filter(|end| *end <= block.bytes() && length <= PIECE);
        let piece = offset..end.ok_or(io::ErrorKind::InvalidData)?;
        let pages = piece.start / PAGE_SIZE as u64..piece.end.div_ceil(PAGE_SIZE as u64);
        block.populate(pages).map_err(io::Error::other)?;
        read_piece(&stream, block, &piece)?;
    }
}

fn the_block(ram: &GuestRam) -> io::Result<&RamBlock> {
    match ram.blocks() {
        [block] => Ok(block),
        _ => Err(io::Error::other("the plain mover moves one RAM block")),
    }
}

/// Returns the populated ranges of `block`, in bytes.
fn pieces(block: &RamBlock) -> io::Result<Vec<Range<u64>>> {
    let mut map = PageMap::own().map_err(io::Error::other)?;
    let mut pieces = Vec::new();
    let found = block.populated(&mut map, |run| {
        let (mut at, end) = (run.start * PAGE_SIZE as u64, run.end * PAGE_SIZE as u64);
        while at < end {
            let next = (at / PIECE + 1) * PIECE;
            pieces.push(at..next.min(end));
            at = next;
        }
    });
    found.map_err(io::Error::other)?;
    Ok(pieces)
}

/// Writes a header and the memory of `piece` behind it, directly from guest memory.
fn write_piece(stream: &TcpStream, block: &RamBlock, piece: &Range<u64>) -> io::Result<()> {
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(&piece.start.to_le_bytes());
    header[8..].copy_from_slice(&(piece.end - piece.start).to_le_bytes());
    let parts = [(header.as_ptr(), HEADER), (at(block, piece), (piece.end - piece.start) as usize)];
    let mut done = 0;
    while done < HEADER + parts[1].1 {
        let skip = |(start, length): (*const u8, usize), before: usize| {
            let skipped = done.saturating_sub(before).min(length);
            libc::iovec { iov_base: start.wrapping_add(skipped).cast_mut().cast(), iov_len: length - skipped }
        };
        let vector = [skip(parts[0], 0), skip(parts[1], HEADER)];
        // SAFETY: the header lives here, and the piece lies inside the block (`at` checks), which is readable as long as
        // `block` exists; the kernel only reads both.
        let written = unsafe { libc::writev(stream.as_raw_fd(), vector.as_ptr(), 2) };
        done += transferred(written)?;
    }
    Ok(())
}

/// Reads the memory of `piece`, directly into guest memory.
fn read_piece(stream: &TcpStream, block: &RamBlock, piece: &Range<u64>) -> io::Result<()> {
    let (start, length) = (at(block, piece), (piece.end - piece.start) as usize);
    let mut done = 0;
    while done < length {
        let place = start.wrapping_add(done).cast_mut().cast();
        // SAFETY: the rest of the piece lies inside the block (`at` checks), which is writable as long as `block`
        // exists; there is no reference to it.
        let read = unsafe { libc::recv(stream.as_raw_fd(), place, length - done, libc::MSG_WAITALL) };
        done += match transferred(read)? {
            0 if read == 0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => read,
        };
    }
    Ok(())
}

/// Returns the address of `piece`, after checking that it lies inside the block.
fn at(block: &RamBlock, piece: &Range<u64>) -> *const u8 {
    assert!(piece.start <= piece.end && piece.end <= block.bytes(), "{piece:?} is not in the block");
    block.start().expect("mapped here").as_ptr().wrapping_add(piece.start as usize)
}

/// Returns the bytes that a system call has moved; 0 if it was interrupted.
fn transferred(result: isize) -> io::Result<usize> {
    usize::try_from(result).or_else(|_| match io::Error::last_os_error() {
        error if error.kind() == io::ErrorKind::Interrupted => Ok(0),
        error => Err(error),
    })
}

#[cfg(test)]
mod tests {
    use super::super::guest::{Content, Guest, Memory};
    use super::*;

    fn moved(memory: Memory, content: Content, channels: u16) -> (Guest, u64) {
        let bytes = 8 << 20;
        let (source, destination) = (Guest::new(memory, bytes).unwrap(), Guest::new(memory, bytes).unwrap());
        source.fill(content).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap().to_string();
        let written = std::thread::scope(|scope| {
            let ram = destination.ram();
            let receiving = scope.spawn(move || receive(&ram, &listener, channels));
            let written = send(&source.ram(), &to, channels).unwrap();
            receiving.join().unwrap().unwrap();
            written
        });
        (destination, written)
    }

    #[test]
    fn what_is_populated_arrives_at_its_place_and_nothing_else_does() {
        for memory in [Memory::SmallPages, Memory::Memfd] {
            for channels in [1, 3] {
                let (destination, written) = moved(memory, Content::HalfFilled, channels);
                assert_eq!(destination.check(Content::HalfFilled), Ok(()), "{memory:?}, {channels} channels");
                assert_eq!(destination.populated_bytes(), Ok(4 << 20));
                assert_eq!(written, (4 << 20) + (2 + u64::from(channels)) * HEADER as u64);
            }
        }
        let (destination, written) = moved(Memory::SmallPages, Content::Untouched, 2);
        assert_eq!((destination.populated_bytes(), written), (Ok(0), 2 * HEADER as u64));
    }

    #[test]
    fn a_piece_that_is_not_in_the_block_is_refused() {
        let guest = Guest::new(Memory::SmallPages, 2 << 20).unwrap();
        for (offset, length) in [(2 << 20, 4096u64), (u64::MAX - 4095, 4096), (0, u64::MAX)] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let mut header = [0; HEADER];
            header[..8].copy_from_slice(&u64::to_le_bytes(offset));
            header[8..].copy_from_slice(&length.to_le_bytes());
            stream.write_all(&header).unwrap();
            let error = receive(&guest.ram(), &listener, 1).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{offset:#x} {length:#x}");
        }
    }
}

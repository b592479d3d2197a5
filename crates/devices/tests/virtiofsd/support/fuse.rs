//! The parts of a FUSE client that these tests need. Numbers and layouts are those of linux/fuse.h, protocol 7.31;
//! fields are in the machine's byte order.

use super::{Device, Machine};

/// `FUSE_ROOT_ID`.
pub(crate) const ROOT: u64 = 1;

/// `enum fuse_opcode`.
const LOOKUP: u32 = 1;
const UNLINK: u32 = 10;
const OPEN: u32 = 14;
const READ: u32 = 15;
const WRITE: u32 = 16;
const INIT: u32 = 26;
const CREATE: u32 = 35;

/// Lengths of `struct fuse_in_header`, `fuse_out_header` and `fuse_entry_out`.
const IN_HEADER: usize = 40;
const OUT_HEADER: usize = 16;
const ENTRY: usize = 128;

/// More bytes than any answer has, except that of READ.
const ROOM: usize = 512;

/// A guest's file system: it keeps node numbers and file handles, and does not know the back-end behind its queue.
pub(crate) struct Fuse {
    pub(crate) machine: Machine,
    unique: u64,
}

impl Fuse {
    pub(crate) fn new(machine: Machine) -> Fuse {
        Fuse { machine, unique: 0 }
    }

    /// Returns the same guest at the destination.
    pub(crate) fn moved(&self) -> Fuse {
        Fuse { machine: self.machine.moved(), unique: self.unique }
    }

    /// Returns all state that is not in memory, as in a monitor's state.
    pub(crate) fn state(&self) -> [u8; 14] {
        [&self.unique.to_le_bytes()[..], &self.machine.rings()].concat().try_into().expect("fourteen bytes")
    }

    pub(crate) fn set_state(&mut self, state: [u8; 14]) {
        self.unique = u64::from_le_bytes(state[..8].try_into().expect("eight bytes"));
        self.machine.set_rings(state[8..].try_into().expect("six bytes"));
    }

    pub(crate) fn init(&mut self, device: &Device) {
        // fuse_init_in: major, minor, max_readahead, flags.
        let answer = self.call(device, INIT, 0, &words(&[7, 31, 0, 0]), ROOM).expect("INIT");
        assert_eq!(answer[..4], 7u32.to_ne_bytes());
    }

    /// Returns the node of a name in a directory.
    pub(crate) fn lookup(&mut self, device: &Device, parent: u64, name: &str) -> Result<u64, i32> {
        self.call(device, LOOKUP, parent, &terminated(name), ROOM).map(|entry| number(&entry, 0))
    }

    /// Opens an existing file for reading and writing, and returns its handle.
    pub(crate) fn open(&mut self, device: &Device, node: u64) -> Result<u64, i32> {
        // fuse_open_in: flags (O_RDWR), open_flags. fuse_open_out begins with the handle.
        self.call(device, OPEN, node, &words(&[2, 0]), ROOM).map(|opened| number(&opened, 0))
    }

    /// Creates a file, and returns its node and handle.
    pub(crate) fn create(&mut self, device: &Device, parent: u64, name: &str) -> Result<(u64, u64), i32> {
        // fuse_create_in: flags (O_RDWR), mode, umask, open_flags. The answer is fuse_entry_out, then fuse_open_out.
        let mut encode_request = words(&[2, 0o100_600, 0, 0]);
        encode_request.extend(terminated(name));
        self.call(device, CREATE, parent, &encode_request, ROOM).map(|made| (number(&made, 0), number(&made, ENTRY)))
    }

    pub(crate) fn unlink(&mut self, device: &Device, parent: u64, name: &str) -> Result<(), i32> {
        self.call(device, UNLINK, parent, &terminated(name), ROOM).map(drop)
    }

    pub(crate) fn read(&mut self, device: &Device, node: u64, handle: u64, at: u64, size: u32) -> Result<Vec<u8>, i32> {
        self.call(device, READ, node, &range(handle, at, size), OUT_HEADER + size as usize)
    }

    /// Puts a write into the queue, without notifying the device. The next call must be `finish_write`.
    pub(crate) fn begin_write(&mut self, node: u64, handle: u64, at: u64, bytes: &[u8]) {
        let mut body = range(handle, at, u32::try_from(bytes.len()).expect("a small write"));
        body.extend_from_slice(bytes);
        let encode_request = self.encode_request(WRITE, node, &body);
        self.machine.submit(&encode_request, ROOM);
    }

    pub(crate) fn finish_write(&self, device: &Device) -> Result<(), i32> {
        self.decode_answer(&self.machine.answer(device, ROOM)).map(drop)
    }

    pub(crate) fn write(&mut self, device: &Device, node: u64, handle: u64, at: u64, bytes: &[u8]) -> Result<(), i32> {
        let length = u32::try_from(bytes.len()).expect("a small write");
        let mut encode_request = range(handle, at, length);
        encode_request.extend_from_slice(bytes);
        let answer = self.call(device, WRITE, node, &encode_request, ROOM)?;
        assert_eq!(answer[..4], length.to_ne_bytes(), "all of it is written");
        Ok(())
    }

    /// Sends one request. Returns the bytes after the answer's header, or the error number.
    fn call(&mut self, device: &Device, opcode: u32, node: u64, body: &[u8], room: usize) -> Result<Vec<u8>, i32> {
        let encode_request = self.encode_request(opcode, node, body);
        let answer = self.machine.request(device, &encode_request, room);
        self.decode_answer(&answer)
    }

    fn encode_request(&mut self, opcode: u32, node: u64, body: &[u8]) -> Vec<u8> {
        self.unique += 1;
        let length = u32::try_from(IN_HEADER + body.len()).expect("a small request");
        let mut encode_request = words(&[length, opcode]);
        encode_request.extend_from_slice(&self.unique.to_ne_bytes());
        encode_request.extend_from_slice(&node.to_ne_bytes());
        // uid, gid, pid, total_extlen and padding.
        encode_request.extend(words(&[rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw(), 1, 0]));
        assert_eq!(encode_request.len(), IN_HEADER);
        encode_request.extend_from_slice(body);
        encode_request
    }

    fn decode_answer(&self, answer: &[u8]) -> Result<Vec<u8>, i32> {
        assert!(answer.len() >= OUT_HEADER, "{answer:?}");
        assert_eq!(number(answer, 8), self.unique, "the answer to this request");
        match i32::from_ne_bytes(answer[4..8].try_into().expect("four bytes")) {
            0 => Ok(answer[OUT_HEADER..].to_vec()),
            error => Err(-error),
        }
    }
}

/// `struct fuse_read_in` and `fuse_write_in`, which have the same layout.
fn range(handle: u64, at: u64, size: u32) -> Vec<u8> {
    let mut bytes = [handle.to_ne_bytes(), at.to_ne_bytes()].concat();
    // size, read_flags or write_flags, lock_owner (64 bits), flags, padding.
    bytes.extend(words(&[size, 0, 0, 0, 0, 0]));
    bytes
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn terminated(name: &str) -> Vec<u8> {
    [name.as_bytes(), &[0]].concat()
}

fn number(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

//! A session: a thread's compressor and decompressor.

use std::ffi::{c_int, c_uint};
use std::marker::PhantomData;
use std::sync::Arc;

use crate::abi::{self, QzSession};
use crate::error::{Failure, StartError};
use crate::library::{Library, Storage};
use crate::members;
use crate::memory::{Buffer, Bytes};

/// Smaller inputs are always done in software (the library's default, which is kept).
const HARDWARE_FROM: usize = 1024;
/// The largest job a session can be made for. The library counts in 32 bits and its bound is a little longer than the input.
pub const LARGEST_JOB: usize = 64 << 20;

/// Whether the library may do in software what the hardware does not do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Software {
    /// Never: without hardware nothing starts, and a job that the hardware does not accept fails.
    Forbidden,
    /// Single jobs, when hardware is present but busy or failing. Without hardware nothing starts: the library's
    /// software is a plain zlib, and a caller with a better deflate should use that.
    #[default]
    WhenBusy,
    /// Also without any hardware.
    Always,
}

/// The parameters of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Params {
    /// Compression level, 1 (fast) to 9.
    pub level: u32,
    /// Whether software may help.
    pub software: Software,
    /// Bytes of input per request to the device, and so per gzip member it makes: a power of two from 1 KiB to 512 KiB. Devices
    /// like 32 KiB and more; 64 KiB is the library's default.
    pub hardware_buffer: u32,
    /// The most plain bytes of one job, up to [`LARGEST_JOB`]. Pinned buffers are allocated for it once.
    pub largest_job: usize,
}

impl Default for Params {
    fn default() -> Params {
        Params { level: 1, software: Software::default(), hardware_buffer: 64 << 10, largest_job: 1 << 20 }
    }
}

impl Params {
    /// Returns the most bytes that the largest job may compress to, whatever its content.
    pub(crate) fn compressed_room(&self) -> usize {
        bound(self.largest_job, self.hardware_buffer)
    }
}

/// The operation of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Calls [`Session::compress`].
    Compress,
    /// Calls [`Session::decompress`].
    Decompress,
    #[cfg(test)]
    /// Panics.
    Die,
    #[cfg(test)]
    /// Never returns.
    Hang,
}

/// What did the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// The device, or mostly: the library does not report when it finished a job in software.
    Hardware,
    /// The library's zlib.
    Software,
}

/// The result of a successful call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// Bytes written.
    pub bytes: usize,
    /// What did the work.
    pub by: By,
}

/// Compression and decompression of whole buffers, for the thread that made it.
///
/// The library ties sessions to threads, so this cannot be sent to another one:
/// ```compile_fail,E0277
/// fn needs_send<T: Send>() {}
/// needs_send::<sterna_qatzip::Session>();
/// ```
/// nor be used from two at once:
/// ```compile_fail,E0277
/// fn needs_sync<T: Sync>() {}
/// needs_sync::<sterna_qatzip::Session>();
/// ```
#[derive(Debug)]
pub struct Session {
    calls: Calls,
    /// Buffers for content that is passed in ordinary memory.
    source: Buffer,
    target: Buffer,
    thread: PhantomData<*mut ()>,
}

/// The library's sessions, and the checks of their results.
#[derive(Debug)]
struct Calls {
    compressing: Raw,
    decompressing: Raw,
    params: Params,
    on_hardware: bool,
    library: Arc<Library>,
    renewed: u64,
}

impl Library {
    /// A session for the calling thread.
    ///
    /// # Errors
    /// Parameters out of range, no hardware where software is forbidden, no memory.
    pub fn session(self: &Arc<Self>, params: &Params) -> Result<Session, StartError> {
        Session::new(self, params)
    }
}

impl Session {
    fn new(library: &Arc<Library>, params: &Params) -> Result<Session, StartError> {
        let parameter = |what, value, range| Err(StartError::Parameter { what, value, range });
        if !(1..=9).contains(&params.level) {
            return parameter("a level", params.level.into(), "1 to 9");
        }
        if !params.hardware_buffer.is_power_of_two() || !(1 << 10..=512 << 10).contains(&params.hardware_buffer) {
            return parameter(
                "a hardware buffer",
                params.hardware_buffer.into(),
                "a power of two from 1 KiB to 512 KiB",
            );
        }
        if !(1..=LARGEST_JOB).contains(&params.largest_job) {
            return parameter("a largest job", params.largest_job as u64, "1 byte to 64 MiB");
        }
        if library.forked() {
            return Err(StartError::Forked);
        }
        let hardware = library.hardware();
        match (hardware, params.software) {
            (Ok(()), _) => {}
            (Err(none), Software::Forbidden | Software::WhenBusy) => return Err(none.into()),
            (Err(_), Software::Always) if library.functions().software.is_none() => {
                return Err(StartError::ProbesAtEveryCall { keys: 1024 });
            }
            (Err(_), Software::Always) => {}
        }
        Ok(Session {
            calls: Calls {
                // Two: a session that decoded a plain gzip member may switch to another format (1.3.1), and its next
                // compressed output would lack the lengths that hardware needs for decoding.
                compressing: Raw::new(library, params, abi::DIRECTION_COMPRESS)?,
                decompressing: Raw::new(library, params, abi::DIRECTION_DECOMPRESS)?,
                params: *params,
                on_hardware: hardware.is_ok(),
                library: Arc::clone(library),
                renewed: 0,
            },
            source: Buffer::new(library, params.compressed_room())?,
            target: Buffer::new(library, params.compressed_room())?,
            thread: PhantomData,
        })
    }

    /// Compresses `input` into gzip members. `output` is replaced; where it has `room` bytes of capacity nothing is allocated.
    ///
    /// # Errors
    /// [`Failure::TooLong`] where the result does not fit into `room`; `output` is empty then, as on every error.
    pub fn compress(&mut self, input: &[u8], output: &mut Vec<u8>, room: usize) -> Result<Done, Failure> {
        self.between(Work::Compress, From::Slice(input), To::Heap(output), room)
    }

    /// Decompresses gzip members, of any origin, to at most `room` bytes. `output` is replaced; where it has `room`
    /// bytes of capacity nothing is allocated. Every member's CRC-32 and length are checked.
    ///
    /// # Errors
    /// [`Failure::TooLong`] if there would be more than `room`, [`Failure::BadInput`] if the input is not whole
    /// members; `output` is empty then, as on every error.
    pub fn decompress(&mut self, input: &[u8], output: &mut Vec<u8>, room: usize) -> Result<Done, Failure> {
        self.between(Work::Decompress, From::Slice(input), To::Heap(output), room)
    }

    /// As [`Session::compress`] or [`Session::decompress`]. Content in a [`Buffer`] is not copied; as an output it must
    /// have the capacity of those that [`Pool::buffers`](crate::Pool::buffers) makes.
    ///
    /// # Errors
    /// As those; [`Failure::TooLarge`] where an output is too small to begin with.
    pub fn work(&mut self, work: Work, input: &Bytes, output: &mut Bytes, room: usize) -> Result<Done, Failure> {
        let from = match input {
            Bytes::Heap(bytes) => From::Slice(bytes),
            Bytes::Pinned(buffer) => From::Pinned(buffer),
        };
        let to = match output {
            Bytes::Heap(bytes) => To::Heap(bytes),
            Bytes::Pinned(buffer) => To::Pinned(buffer),
        };
        self.between(work, from, to, room)
    }

    fn between(&mut self, work: Work, from: From<'_>, mut to: To<'_>, room: usize) -> Result<Done, Failure> {
        match &mut to {
            To::Heap(bytes) => bytes.clear(),
            To::Pinned(buffer) => buffer.clear(),
        }
        let source = match from {
            From::Slice(input) => {
                let compressing = work == Work::Compress;
                let most = if compressing { self.calls.params.largest_job } else { self.source.capacity() };
                self.calls.check(input.len(), most)?;
                self.source.fill(input);
                &self.source
            }
            From::Pinned(buffer) => buffer,
        };
        let target = match &mut to {
            To::Heap(_) => &mut self.target,
            To::Pinned(buffer) => &mut **buffer,
        };
        let done = match work {
            Work::Compress => self.calls.compress(source, target, room),
            Work::Decompress => self.calls.decompress(source, target, room),
            #[cfg(test)]
            Work::Die | Work::Hang => unreachable!("a worker's, not a session's"),
        }?;
        target.written(done.bytes);
        if let To::Heap(bytes) = to {
            bytes.extend_from_slice(&self.target);
        }
        Ok(done)
    }

    /// Returns whether this session uses hardware.
    #[must_use]
    pub fn on_hardware(&self) -> bool {
        self.calls.on_hardware
    }

    /// Returns how often a failure made it necessary to set up the library's own session again.
    #[must_use]
    pub fn renewed(&self) -> u64 {
        self.calls.renewed
    }
}

#[derive(Clone, Copy)]
enum From<'a> {
    Slice(&'a [u8]),
    Pinned(&'a Buffer),
}

enum To<'a> {
    Heap(&'a mut Vec<u8>),
    Pinned(&'a mut Buffer),
}

impl Calls {
    fn compress(&mut self, input: &Buffer, output: &mut Buffer, room: usize) -> Result<Done, Failure> {
        self.check(input.len(), self.params.largest_job)?;
        if self.params.software == Software::Forbidden && input.len() < HARDWARE_FROM {
            return Err(Failure::TooSmall { bytes: input.len() });
        }
        // Always the whole bound, with the caller's room compared afterwards: the software path leaks its deflate state
        // when a buffer is full (1.3.1).
        self.check(bound(input.len(), self.params.hardware_buffer), output.capacity())?;
        let room = room.min(output.capacity());
        let call = self.run(Operation::Compress, self.on_hardware, input, output)?;
        if call.produced > room {
            return Err(Failure::TooLong { room });
        }
        output.written(call.produced);
        if !output.starts_with(&[0x1f, 0x8b, 8]) {
            output.clear();
            self.renew(Operation::Compress)?;
            return Err(Failure::Inconsistent {
                call: "qzCompress",
                input: input.len(),
                consumed: call.consumed,
                produced: call.produced,
            });
        }
        Ok(Done { bytes: call.produced, by: call.by })
    }

    fn decompress(&mut self, input: &Buffer, output: &mut Buffer, room: usize) -> Result<Done, Failure> {
        self.check(room, self.params.largest_job.min(output.capacity()))?;
        let declared = members::declared(input)?;
        if declared.is_some_and(|bytes| bytes > room as u64) {
            return Err(Failure::TooLong { room });
        }
        // Members without lengths are not passed to hardware: the library would guess the lengths from the input, and
        // remember them.
        let on_hardware = self.on_hardware && declared.is_some();
        if self.params.software == Software::Forbidden && !on_hardware {
            return Err(Failure::BadInput("a member does not say its lengths, and QATzip's software is forbidden"));
        }
        let call = self.run(Operation::Decompress { room }, on_hardware, input, output)?;
        // There are two proofs that the last member is whole: the software path reports it, or on hardware all members
        // declared their lengths and the sum is right.
        let whole = call.consumed == input.len()
            && (call.ended || (call.by == By::Hardware && declared == Some(call.produced as u64)));
        if !whole || call.produced > room || declared.is_some_and(|bytes| bytes != call.produced as u64) {
            // Otherwise it would continue within this member at the next call.
            self.renew(Operation::Decompress { room })?;
            return Err(if call.produced > room {
                Failure::TooLong { room }
            } else if whole {
                Failure::BadInput("it decodes to another length than it says")
            } else {
                Failure::BadInput("it ends within a member")
            });
        }
        Ok(Done { bytes: call.produced, by: call.by })
    }

    fn check(&self, bytes: usize, limit: usize) -> Result<(), Failure> {
        if self.library.forked() {
            return Err(Failure::Forked);
        }
        if bytes > limit { Err(Failure::TooLarge { bytes, limit }) } else { Ok(()) }
    }

    fn run(
        &mut self,
        operation: Operation,
        on_hardware: bool,
        input: &Buffer,
        output: &mut Buffer,
    ) -> Result<Call, Failure> {
        let raw = match operation {
            Operation::Compress => &mut self.compressing,
            Operation::Decompress { .. } => &mut self.decompressing,
        };
        // One byte more than allowed: with a buffer exactly full it would stop before it reads the next member.
        let room = match operation {
            Operation::Compress => output.capacity(),
            Operation::Decompress { room } => (room + 1).min(output.capacity()),
        };
        let result = raw.call(&self.library, operation, on_hardware, input, (output, room));
        let forbidden = self.params.software == Software::Forbidden;
        let result = result.and_then(|call| match call.by {
            By::Software if forbidden => Err(Failure::DoneInSoftware),
            _ => Ok(call),
        });
        if result.is_err() {
            self.renew(operation)?;
        }
        result
    }

    /// Replaces the library's session after a failure: it keeps half a stream and would continue with it (1.3.1).
    fn renew(&mut self, operation: Operation) -> Result<(), Failure> {
        let (raw, direction) = match operation {
            Operation::Compress => (&mut self.compressing, abi::DIRECTION_COMPRESS),
            Operation::Decompress { .. } => (&mut self.decompressing, abi::DIRECTION_DECOMPRESS),
        };
        self.renewed += 1;
        raw.end();
        raw.set_up(&self.params, direction).map_err(|code| Failure::Lost { code })
    }
}

/// The most that `plain` bytes become: a device's request may grow to 9/8 and 1 KiB (what the library itself allows for), each with
/// header and trailer. `qzMaxCompressedLength` counts one header for any number of members (1.3.1), so it is not asked.
fn bound(plain: usize, hardware_buffer: u32) -> usize {
    let each = hardware_buffer as usize;
    let rest = plain % each;
    let grown = |bytes: usize| bytes + bytes.div_ceil(8) + 1024 + 32;
    plain / each * grown(each) + grown(rest)
}

#[derive(Clone, Copy)]
enum Operation {
    Compress,
    Decompress { room: usize },
}

struct Call {
    consumed: usize,
    produced: usize,
    by: By,
    ended: bool,
}

/// One of the library's sessions. `qzClose` is never called: it does nothing in 1.3, and in older ones closed those of other
/// threads too.
struct Raw {
    storage: Box<Storage>,
    library: Arc<Library>,
}

impl std::fmt::Debug for Raw {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.storage.session.fmt(f)
    }
}

impl Raw {
    fn new(library: &Arc<Library>, params: &Params, direction: c_uint) -> Result<Raw, StartError> {
        let mut raw = Raw { storage: Storage::new(), library: Arc::clone(library) };
        match raw.set_up(params, direction) {
            Ok(()) => Ok(raw),
            Err(code) => Err(StartError::Library { call: "qzSetupSessionDeflateExt", code }),
        }
    }

    fn set_up(&mut self, params: &Params, direction: c_uint) -> Result<(), c_int> {
        let mut wanted = abi::DEFAULTS;
        wanted.deflate.common.direction = direction;
        wanted.deflate.common.comp_lvl = params.level;
        wanted.deflate.common.max_forks = 0;
        wanted.deflate.common.sw_backup = u8::from(params.software != Software::Forbidden);
        wanted.deflate.common.hw_buff_sz = params.hardware_buffer;
        // Where a device fails to start, the library tries again after so many calls; what it found at the first is final here.
        wanted.deflate.common.wait_cnt_thrshold = c_int::MAX as c_uint;
        self.storage.session = QzSession::EMPTY;
        // SAFETY: a zeroed session in a box that does not move while it is set up, used by this thread alone (`Session` is neither
        // `Send` nor `Sync`); the layout of both arguments was proved when the library was loaded.
        let code = unsafe { (self.library.functions().setup)(&raw mut self.storage.session, &raw mut wanted) };
        if code == abi::OK && !self.storage.session.internal.is_null() { Ok(()) } else { Err(code) }
    }

    fn end(&mut self) {
        // In a child after a fork the devices belong to the parent: leaked on purpose.
        if !self.storage.session.internal.is_null() && !self.library.forked() {
            // SAFETY: set up by this thread and not yet torn down; the library clears `internal`.
            unsafe { (self.library.functions().teardown)(&raw mut self.storage.session) };
        }
        self.storage.session.internal = std::ptr::null_mut();
    }

    fn call(
        &mut self,
        library: &Library,
        operation: Operation,
        on_hardware: bool,
        source: &Buffer,
        (target, room): (&mut Buffer, usize),
    ) -> Result<Call, Failure> {
        assert!(room <= target.capacity(), "lengths were checked before");
        let input = source.len();
        if self.storage.session.internal.is_null() {
            return Err(Failure::Lost { code: 0 });
        }
        let functions = library.functions();
        let session = &raw mut self.storage.session;
        let total = self.storage.session.total_in;
        let narrow = |bytes: usize| c_uint::try_from(bytes).expect("buffers are far below 4 GiB");
        let (mut consumed, mut produced) = (narrow(input), narrow(room));
        let (from, to) = (source.start().as_ptr().cast_const(), target.start().as_ptr());
        let mut ended = 0u8;
        // SAFETY: the session is this thread's and set up. Source and target are separate buffers of at least the lengths given and
        // stay in place during the call. The software functions are those that the library's own entry points end in, with the
        // same arguments.
        let (code, name) = unsafe {
            match (operation, functions.software.filter(|_| !on_hardware)) {
                (Operation::Compress, Some((compress, _))) => {
                    (compress(session, from, &raw mut consumed, to, &raw mut produced, 1), "qzSWCompress")
                }
                (Operation::Compress, None) => {
                    ((functions.compress)(session, from, &raw mut consumed, to, &raw mut produced, 1), "qzCompress")
                }
                (Operation::Decompress { .. }, software) => {
                    let (decompress, name) = match software {
                        Some((_, decompress)) => (decompress, "qzSWDecompressMulti"),
                        None => (functions.decompress, "qzDecompress"),
                    };
                    let code = decompress(session, from, &raw mut consumed, to, &raw mut produced);
                    let asked = (functions.end_of_stream)(session, &raw mut ended);
                    (if code == abi::OK { asked } else { code }, name)
                }
            }
        };
        let (consumed, produced) = (consumed as usize, produced as usize);
        // Only the hardware path keeps these totals (1.3.1); the result itself does not say who made it.
        let by = if self.storage.session.total_in == total { By::Software } else { By::Hardware };
        match (code, operation) {
            (abi::OK, _) => {}
            (abi::DATA_ERROR, Operation::Decompress { .. }) => {
                return Err(Failure::BadInput("its content is corrupt"));
            }
            _ => return Err(Failure::Library { call: name, code }),
        }
        let all = matches!(operation, Operation::Decompress { .. }) || consumed == input;
        if !all || consumed > input || produced > room {
            return Err(Failure::Inconsistent { call: name, input, consumed, produced });
        }
        Ok(Call { consumed, produced, by, ended: ended == 1 })
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_allows_for_every_member_of_a_job() {
        assert_eq!(bound(0, 1024), 1056);
        assert_eq!(bound(64 << 10, 64 << 10), (64 << 10) * 9 / 8 + 2 * 1056);
        assert!(bound(LARGEST_JOB, 1024) < u32::MAX as usize);
    }
}

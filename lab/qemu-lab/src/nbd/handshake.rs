//! The fixed newstyle handshake, by which a client chooses the export, and the fields of messages.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;

/// Maximum bytes of a request that the server proposes (`NBD_INFO_BLOCK_SIZE`): the least that the protocol recommends.
const PROPOSED_PAYLOAD: u32 = 1 << 20;
/// Maximum bytes of an option's data: a name of 4096 bytes, the longest one allowed, and the fields around it.
const MAX_OPTION: u32 = 8 << 10;

// "Fixed newstyle negotiation", "Option types", "Option reply types", "Transmission flags".
const NBDMAGIC: u64 = 0x4e42_444d_4147_4943;
const IHAVEOPT: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// `NBD_FLAG_FIXED_NEWSTYLE` and `NBD_FLAG_NO_ZEROES`; a client's answer has the same bits.
const HANDSHAKE_FLAGS: u16 = 1 << 0 | NO_ZEROES as u16;
const NO_ZEROES: u32 = 1 << 1;
pub(super) const OPT_EXPORT_NAME: u32 = 1;
pub(super) const OPT_ABORT: u32 = 2;
pub(super) const OPT_INFO: u32 = 6;
pub(super) const OPT_GO: u32 = 7;
pub(super) const REP_ACK: u32 = 1;
pub(super) const REP_INFO: u32 = 3;
pub(super) const REP_ERR_UNSUP: u32 = 1 << 31 | 1;
pub(super) const REP_ERR_INVALID: u32 = 1 << 31 | 3;
pub(super) const REP_ERR_UNKNOWN: u32 = 1 << 31 | 6;
const INFO_EXPORT: u16 = 0;
const INFO_BLOCK_SIZE: u16 = 3;
/// `NBD_FLAG_HAS_FLAGS`, `SEND_FLUSH`, `SEND_FUA`, `SEND_TRIM`, `SEND_WRITE_ZEROES`, `CAN_MULTI_CONN`.
const TRANSMISSION_FLAGS: u16 = 1 << 0 | 1 << 2 | 1 << 3 | 1 << 5 | 1 << 6 | 1 << 8;

/// Negotiates with a client about an export of `size` bytes. Returns whether the client has chosen it.
pub(super) fn negotiate(mut stream: &UnixStream, size: u64) -> io::Result<bool> {
    let mut greeting = Fields::default();
    greeting.u64(NBDMAGIC).u64(IHAVEOPT).u16(HANDSHAKE_FLAGS);
    stream.write_all(&greeting.0)?;
    let mut flags = [0; 4];
    stream.read_exact(&mut flags)?;
    let zeros = if u32_at(&flags, 0) & NO_ZEROES == 0 { 124 } else { 0 };
    let mut header = [0; 16];
    loop {
        stream.read_exact(&mut header)?;
        let (option, length) = (u32_at(&header, 8), u32_at(&header, 12));
        if u64_at(&header, 0) != IHAVEOPT || length > MAX_OPTION {
            return Err(invalid("an option without its magic number, or too long"));
        }
        let mut data = vec![0; length as usize];
        stream.read_exact(&mut data)?;
        let reply = |kind: u32, body: &[u8]| {
            let mut reply = Fields::default();
            reply.u64(OPTION_REPLY_MAGIC).u32(option).u32(kind).u32(body.len() as u32);
            reply.0.extend_from_slice(body);
            let mut stream = stream;
            stream.write_all(&reply.0)
        };
        match option {
            // It has no other answer to a name that is unknown.
            OPT_EXPORT_NAME if !data.is_empty() => return Err(invalid("an unknown export")),
            OPT_EXPORT_NAME => {
                let mut answer = Fields::default();
                answer.u64(size).u16(TRANSMISSION_FLAGS);
                answer.0.resize(answer.0.len() + zeros, 0);
                stream.write_all(&answer.0)?;
                return Ok(true);
            }
            OPT_ABORT => {
                // The client need not wait for this answer.
                let _ = reply(REP_ACK, &[]);
                return Ok(false);
            }
            OPT_INFO | OPT_GO => match data.first_chunk::<4>().map(|length| u32::from_be_bytes(*length)) {
                Some(0) => {
                    let mut export = Fields::default();
                    export.u16(INFO_EXPORT).u64(size).u16(TRANSMISSION_FLAGS);
                    reply(REP_INFO, &export.0)?;
                    let mut sizes = Fields::default();
                    sizes.u16(INFO_BLOCK_SIZE).u32(1).u32(4096).u32(PROPOSED_PAYLOAD);
                    reply(REP_INFO, &sizes.0)?;
                    reply(REP_ACK, &[])?;
                    if option == OPT_GO {
                        return Ok(true);
                    }
                }
                Some(_) => reply(REP_ERR_UNKNOWN, &[])?,
                None => reply(REP_ERR_INVALID, &[])?,
            },
            _ => reply(REP_ERR_UNSUP, &[])?,
        }
    }
}

/// Returns the error for a message that this server cannot answer.
pub(super) fn invalid(what: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what)
}

/// The fields of a message, in network byte order.
#[derive(Default)]
struct Fields(Vec<u8>);

impl Fields {
    fn u16(&mut self, value: u16) -> &mut Self {
        self.0.extend_from_slice(&value.to_be_bytes());
        self
    }

    fn u32(&mut self, value: u32) -> &mut Self {
        self.0.extend_from_slice(&value.to_be_bytes());
        self
    }

    fn u64(&mut self, value: u64) -> &mut Self {
        self.0.extend_from_slice(&value.to_be_bytes());
        self
    }
}

pub(super) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(std::array::from_fn(|byte| bytes[at + byte]))
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(std::array::from_fn(|byte| bytes[at + byte]))
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(std::array::from_fn(|byte| bytes[at + byte]))
}

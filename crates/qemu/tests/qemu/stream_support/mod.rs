//! Streams put together by hand, byte for byte, from QEMU's format: not by the writers that are under test.
#![allow(dead_code, reason = "each test file uses a part of it")]

use std::io::{self, Read, Write};

pub(crate) use sterna_test_kit::Random;

/// A PAGE, ZERO, … record's flags, as in QEMU's `migration/ram.h`.
pub(crate) const ZERO: u64 = 0x02;
pub(crate) const MEM_SIZE: u64 = 0x04;
pub(crate) const PAGE: u64 = 0x08;
pub(crate) const EOS: u64 = 0x10;
pub(crate) const CONTINUE: u64 = 0x20;
pub(crate) const FLUSH: u64 = 0x200;

pub(crate) const HEADER: &[u8] = b"QEVM\x00\x00\x00\x03";
pub(crate) const OPEN_RETURN_PATH: &[u8] = b"\x08\x00\x01\x00\x00";
pub(crate) const PING_1: &[u8] = b"\x08\x00\x02\x00\x04\x00\x00\x00\x01";
pub(crate) const ADVISE: &[u8] =
    b"\x08\x00\x03\x00\x10\x00\x00\x00\x00\x00\x20\x10\x00\x00\x00\x00\x00\x00\x00\x10\x00";
pub(crate) const SWITCHOVER_START: &[u8] = b"\x08\x00\x0b\x00\x00";

pub(crate) fn configuration(machine: &str) -> Vec<u8> {
    let mut bytes = vec![0x07];
    bytes.extend(u32::try_from(machine.len()).unwrap().to_be_bytes());
    bytes.extend(machine.as_bytes());
    bytes
}

pub(crate) fn subsection(name: &str, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0x05];
    bytes.extend(counted(name));
    bytes.extend(1u32.to_be_bytes());
    bytes.extend(payload);
    bytes
}

pub(crate) fn counted(name: &str) -> Vec<u8> {
    let mut bytes = vec![u8::try_from(name.len()).unwrap()];
    bytes.extend(name.as_bytes());
    bytes
}

pub(crate) fn record(word: u64) -> Vec<u8> {
    word.to_be_bytes().to_vec()
}

pub(crate) fn named(word: u64, block: &str) -> Vec<u8> {
    [record(word), counted(block)].concat()
}

pub(crate) fn section_start(kind: u8, id: u32, name: &str, version: u32) -> Vec<u8> {
    let mut bytes = vec![kind];
    bytes.extend(id.to_be_bytes());
    bytes.extend(counted(name));
    bytes.extend(0u32.to_be_bytes());
    bytes.extend(version.to_be_bytes());
    bytes
}

pub(crate) fn section(kind: u8, id: u32) -> Vec<u8> {
    [vec![kind], id.to_be_bytes().to_vec()].concat()
}

pub(crate) fn footer(id: u32) -> Vec<u8> {
    section(0x7e, id)
}

pub(crate) fn block_list(blocks: &[(&str, u64)]) -> Vec<u8> {
    let total: u64 = blocks.iter().map(|b| b.1).sum();
    let mut bytes = record(total | MEM_SIZE);
    for (name, length) in blocks {
        bytes.extend(counted(name));
        bytes.extend(length.to_be_bytes());
    }
    bytes
}

/// Two blocks, a setup section, two iterate sections between which CONTINUE goes on, the complete section, device state.
pub(crate) fn whole_stream(flush: bool) -> Vec<u8> {
    let sync = if flush { record(FLUSH) } else { Vec::new() };
    [
        HEADER.to_vec(),
        configuration("pc-q35-7.2"),
        OPEN_RETURN_PATH.to_vec(),
        PING_1.to_vec(),
        section_start(1, 2, "ram", 4),
        block_list(&[("pc.ram", 0x4000), ("pc.bios", 0x1000)]),
        sync.clone(),
        record(EOS),
        footer(2),
        section(2, 2),
        named(PAGE, "pc.ram"),
        vec![0xa1; 4096],
        record(0x1000 | PAGE | CONTINUE),
        vec![0xa2; 4096],
        record(0x2000 | ZERO | CONTINUE),
        vec![0],
        record(EOS),
        footer(2),
        section(2, 2),
        record(0x3000 | PAGE | CONTINUE),
        vec![0xa3; 4096],
        named(PAGE, "pc.bios"),
        vec![0xb1; 4096],
        sync.clone(),
        record(EOS),
        footer(2),
        section(3, 2),
        sync,
        record(EOS),
        footer(2),
        b"\x04\x00\x00\x00\x00\x05timer".to_vec(),
        (0..=255).collect(),
    ]
    .concat()
}

pub(crate) fn multifd_init(uuid: [u8; 16], id: u8) -> Vec<u8> {
    let mut bytes = b"\x11\x22\x33\x44\x00\x00\x00\x01".to_vec();
    bytes.extend(uuid);
    bytes.push(id);
    bytes.resize(64, 0);
    bytes
}

/// A RAM packet's header for 4 KiB pages.
pub(crate) fn multifd_header(flags: u32, normal: u32, zero: u32, block: &str, offsets: &[u64]) -> Vec<u8> {
    let mut bytes = b"\x11\x22\x33\x44\x00\x00\x00\x01".to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(128u32.to_be_bytes());
    bytes.extend(normal.to_be_bytes());
    bytes.extend((normal * 4096).to_be_bytes());
    bytes.extend(7u64.to_be_bytes());
    bytes.extend(zero.to_be_bytes());
    bytes.resize(64, 0);
    bytes.extend(block.as_bytes());
    bytes.resize(320, 0);
    for offset in offsets {
        bytes.extend(offset.to_be_bytes());
    }
    bytes.resize(1344, 0);
    bytes
}

pub(crate) fn device_state_header(name: &str, instance: u32, length: u32) -> Vec<u8> {
    let mut bytes = b"\x11\x22\x33\x44\x00\x00\x00\x01\x00\x00\x00\x40".to_vec();
    bytes.extend(name.as_bytes());
    bytes.resize(268, 0);
    bytes.extend(instance.to_be_bytes());
    bytes.extend(length.to_be_bytes());
    bytes
}

/// A socket that gives and takes pieces of any length, and is interrupted now and then.
pub(crate) struct Pieces<T> {
    pub(crate) inner: T,
    pub(crate) random: Random,
    pub(crate) longest: usize,
}

impl<T> Pieces<T> {
    pub(crate) fn new(inner: T, seed: u64, longest: usize) -> Self {
        Self { inner, random: Random::new(seed), longest }
    }

    fn length(&mut self, of: usize) -> io::Result<usize> {
        if self.random.index(8) == 0 {
            return Err(io::ErrorKind::Interrupted.into());
        }
        Ok(of.min(1 + self.random.index(self.longest)))
    }
}

impl<T: Read> Read for Pieces<T> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let n = self.length(into.len())?;
        self.inner.read(&mut into[..n])
    }
}

impl<T: Write> Write for Pieces<T> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.length(bytes.len())?;
        self.inner.write(&bytes[..n])
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

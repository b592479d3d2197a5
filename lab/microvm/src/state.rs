//! The format of a machine's state: everything but its RAM.
//!
//! ```text
//! "STERNAvm"    8 bytes
//! version       32 bits, little endian: 1
//! length        32 bits, little endian: bytes of what follows, at most 1 MiB
//! JSON          `Saved`
//! ```
//!
//! The state comes over the network. Its length is bounded before memory is reserved, unknown fields are refused, and its values are
//! compared with the machine before anything is changed.

use crate::config::Workload;
use crate::error::Error;
#[cfg(has_kvm)]
use crate::kvm_state::KvmVcpuState;
use crate::serial::SavedSerial;
use serde::{Deserialize, Serialize};
use std::io::{Read, Write};

const MAGIC: [u8; 8] = *b"STERNAvm";
const VERSION: u32 = 1;
/// Maximum bytes of the JSON text; four vCPUs need about 100 KiB.
const MAX_BYTES: u32 = 1 << 20;

/// A machine's state.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Saved {
    /// Name and bytes of each block of RAM.
    pub(crate) blocks: Vec<(String, u64)>,
    pub(crate) workload: Workload,
    /// The guest's time, in nanoseconds.
    pub(crate) clock: u64,
    pub(crate) serial: Vec<SavedSerial>,
    pub(crate) vcpus: Vec<VcpuState>,
}

/// A vCPU's state.
#[derive(Serialize, Deserialize)]
pub(crate) enum VcpuState {
    /// On KVM.
    #[cfg(has_kvm)]
    Kvm(Box<KvmVcpuState>),
    /// A thread of the process.
    Thread {
        /// Whether it waits for orders.
        begun: bool,
    },
}

impl Saved {
    pub(crate) fn write(&self, to: &mut dyn Write) -> Result<(), Error> {
        let what = "write the machine's state";
        let text = serde_json::to_vec(self).map_err(Error::system(what))?;
        let length = u32::try_from(text.len()).ok().filter(|length| *length <= MAX_BYTES);
        let length = length.ok_or_else(|| Error::State(format!("{} bytes are more than {MAX_BYTES}", text.len())))?;
        let mut head = [0; 16];
        head[..8].copy_from_slice(&MAGIC);
        head[8..12].copy_from_slice(&VERSION.to_le_bytes());
        head[12..].copy_from_slice(&length.to_le_bytes());
        to.write_all(&head).and_then(|()| to.write_all(&text)).map_err(Error::system(what))
    }

    /// Reads a state, and no byte beyond it.
    pub(crate) fn read(from: &mut dyn Read) -> Result<Self, Error> {
        let failed = || Error::system("read the machine's state");
        let mut head = [0; 16];
        from.read_exact(&mut head).map_err(failed())?;
        if head[..8] != MAGIC {
            return Err(Error::State("it does not begin as one".to_owned()));
        }
        let number = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (version, length) = (number(8), number(12));
        if version != VERSION {
            return Err(Error::State(format!("it is of version {version}, this program knows {VERSION}")));
        }
        if length > MAX_BYTES {
            return Err(Error::State(format!("it has {length} bytes, more than {MAX_BYTES}")));
        }
        let mut text = vec![0; length as usize];
        from.read_exact(&mut text).map_err(failed())?;
        serde_json::from_slice(&text).map_err(|error| Error::State(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written() -> Vec<u8> {
        let vcpus = vec![VcpuState::Thread { begun: true }];
        let blocks = vec![("ram".to_owned(), 1 << 21)];
        let saved = Saved { blocks, workload: Workload::default(), clock: 7, serial: Vec::new(), vcpus };
        let mut bytes = Vec::new();
        saved.write(&mut bytes).expect("a vector takes everything");
        bytes
    }

    #[test]
    fn a_written_state_reads_back_and_no_byte_beyond_it_is_read() {
        let mut bytes = written();
        bytes.extend_from_slice(b"next");
        let mut rest = bytes.as_slice();
        let saved = Saved::read(&mut rest).expect("whole");
        assert_eq!((saved.clock, saved.workload), (7, Workload::default()));
        assert_eq!(rest, b"next");
    }

    #[test]
    fn an_invalid_state_is_refused_with_the_reason() {
        let refused = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = written();
            change(&mut bytes);
            Saved::read(&mut bytes.as_slice()).map(drop).expect_err("refused").to_string()
        };
        type Change<'a> = &'a dyn Fn(&mut Vec<u8>);
        let cases: [(Change<'_>, &str); 6] = [
            (&|bytes| bytes[0] = 0, "does not begin as one"),
            (&|bytes| bytes[8] = 2, "version 2"),
            (&|bytes| bytes[12..16].fill(0xff), "4294967295 bytes, more than 1048576"),
            (&|bytes| bytes.truncate(100), "cannot read the machine's state"),
            (&|bytes| bytes[20] = 0, "does not fit this machine"),
            (&|bytes| bytes.truncate(9), "cannot read the machine's state"),
        ];
        for (change, words) in cases {
            let error = refused(change);
            assert!(error.contains(words), "{error}");
        }
    }
}

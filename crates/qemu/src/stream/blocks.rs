//! The start of the RAM section: the list of blocks with their lengths.

use std::collections::HashSet;
use std::io::Read;

use super::StreamError;
use super::error::{printable, within};
use super::input::Input;

/// Record flag: the block list follows. Its length counts every migratable block.
pub(crate) const FLAG_MEM_SIZE: u64 = 0x04;
/// QEMU guests have some tens of blocks; a guest with all memory slots in use has 512.
const BLOCKS_LIMIT: usize = 4096;
/// No machine has more: 52 physical address bits.
const RAM_LIMIT: u64 = 1 << 52;

/// One RAM block of the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RamBlockInfo {
    /// QEMU's name of the block, such as `pc.ram`.
    pub name: String,
    /// Length in use, bytes; the destination resizes its block to this where it may.
    pub used_length: u64,
    /// Host page size, bytes. Present only with the post-copy capability, and then only when it is not the normal one.
    pub page_size: Option<u64>,
    /// Address of the block in its container. Present only with `x-ignore-shared`.
    pub mr_addr: Option<u64>,
}

/// The header and block list of the RAM setup section.
///
/// The block list does not say which fields it carries. `mr_addr` is there when the configuration names
/// `x-ignore-shared`, which excludes post-copy. A page size is told apart from what else could follow by its value: a
/// name starts with its length, never 0, while a page size below 2^56 starts with a 0 byte; and after the last block a
/// record always has one of its low flag bits set, while a page size that is sent is at least 8 KiB.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RamStart {
    /// The section's number, repeated in each later RAM section.
    pub section_id: u32,
    /// Instance number in the section header; 0 in every known QEMU.
    pub instance_id: u32,
    /// Version in the section header; 4 in every known QEMU.
    pub version_id: u32,
    /// The blocks, in the source's order. Pages name them by their index here.
    pub blocks: Vec<RamBlockInfo>,
    /// The block list record as it was read, from its flag word to the last block.
    pub payload: Vec<u8>,
}

impl RamStart {
    /// Reads the block list back from its own [`payload`](Self::payload).
    ///
    /// # Errors
    /// [`StreamError`] for invalid bytes, and for bytes after the list.
    pub fn from_payload(
        section_id: u32,
        instance_id: u32,
        version_id: u32,
        payload: &[u8],
        page_size: usize,
        ignores_shared: bool,
    ) -> Result<Self, StreamError> {
        let mut input = Input::with_capacity(payload, 1024);
        let blocks = read_blocks(&mut input, page_size, ignores_shared)?;
        let payload = input.end_capture();
        match input.peek::<1>("block list")? {
            None => Ok(Self { section_id, instance_id, version_id, blocks, payload }),
            Some(_) => Err(StreamError::Malformed("bytes after the block list".into())),
        }
    }

    /// Returns the block list for a destination without the post-copy capability, which expects no page sizes.
    ///
    /// Needed wherever POSTCOPY_ADVISE was stripped; equal to the payload when the source sent no page size.
    #[must_use]
    pub fn payload_without_page_sizes(&self) -> Vec<u8> {
        let total: u64 = self.blocks.iter().map(|b| b.used_length).sum();
        let mut bytes = (total | FLAG_MEM_SIZE).to_be_bytes().to_vec();
        for block in &self.blocks {
            // Names were counted by one byte when they were read.
            bytes.push(u8::try_from(block.name.len()).unwrap_or(u8::MAX));
            bytes.extend_from_slice(block.name.as_bytes());
            bytes.extend_from_slice(&block.used_length.to_be_bytes());
            if let Some(address) = block.mr_addr {
                bytes.extend_from_slice(&address.to_be_bytes());
            }
        }
        bytes
    }
}

/// Reads the MEM_SIZE record and leaves it captured in `input`.
pub(crate) fn read_blocks<R: Read>(
    input: &mut Input<R>,
    page_size: usize,
    ignores_shared: bool,
) -> Result<Vec<RamBlockInfo>, StreamError> {
    const READING: &str = "RAM block list";
    let page_size = page_size as u64;
    input.begin_capture();
    let record = input.be64(READING)?;
    if record & (page_size - 1) != FLAG_MEM_SIZE {
        return Err(StreamError::Malformed(format!(
            "the RAM section starts with record {record:#x}, not its block list"
        )));
    }
    let mut left = within("total RAM length", record & !(page_size - 1), RAM_LIMIT)?;
    let mut blocks = Vec::new();
    let mut names = HashSet::new();
    while left > 0 {
        if blocks.len() == BLOCKS_LIMIT {
            let (value, limit) = (blocks.len() as u64 + 1, BLOCKS_LIMIT as u64);
            return Err(StreamError::OverLimit { what: "number of RAM blocks", value, limit });
        }
        let mut name = [0; 255];
        let name = printable("RAM block name", input.counted(&mut name, READING)?)?.to_owned();
        let used_length = input.be64(READING)?;
        if used_length == 0 || used_length % page_size != 0 || used_length > left {
            return Err(StreamError::Malformed(format!(
                "RAM block \"{name}\" of {used_length:#x} bytes, {left:#x} bytes of the total are left"
            )));
        }
        left -= used_length;
        let page_size = if ignores_shared { None } else { block_page_size(input, &name)? };
        let mr_addr = if ignores_shared { Some(input.be64(READING)?) } else { None };
        if !names.insert(name.clone()) {
            return Err(StreamError::Malformed(format!("RAM block \"{name}\" is listed twice")));
        }
        blocks.push(RamBlockInfo { name, used_length, page_size, mr_addr });
    }
    Ok(blocks)
}

fn block_page_size<R: Read>(input: &mut Input<R>, block: &str) -> Result<Option<u64>, StreamError> {
    let Some(next) = input.peek::<8>("RAM block list")? else { return Ok(None) };
    let value = u64::from_be_bytes(next);
    if next[0] != 0 || value & 0x3ff != 0 {
        return Ok(None);
    }
    if !value.is_power_of_two() {
        return Err(StreamError::Malformed(format!("RAM block \"{block}\" with host pages of {value:#x} bytes")));
    }
    input.be64("RAM block page size")?;
    Ok(Some(value))
}

//! Parses what QEMU's monitor prints about RAM blocks: tables made for people, parsed strictly.
//!
//! `info ramblock` is `ram_block_format()` in QEMU's physmem.c: name, page size (`4 KiB`, `2 MiB`), offset, used,
//! total; since 8.0 also the host address and `ro`/`rw`. `info mtree -f` is `mtree_print_flatview()` in memory.c.

use serde_json::Value;

use super::DiscoverError;
use crate::qmp::QmpError;

/// A RAM block as QEMU reports it: a line of `info ramblock`.
#[derive(Debug, Clone, PartialEq)]
pub struct ListedBlock {
    /// Name as in the migration stream.
    pub name: String,
    /// Size of a page of its backing, bytes.
    pub page_size: u64,
    /// Its place among all of QEMU's RAM, in bytes (`ram_addr_t`).
    pub offset: u64,
    /// Bytes in use.
    pub used: u64,
    /// Bytes to which it may grow.
    pub total: u64,
    /// Host address; from 8.0 on.
    pub address: Option<u64>,
    /// Whether the guest may only read it; from 8.0 on.
    pub read_only: Option<bool>,
}

/// An entry of `query-memdev`.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Memdev {
    pub(super) id: String,
    pub(super) size: u64,
    pub(super) share: bool,
    pub(super) prealloc: bool,
}

pub(super) fn ram_blocks(text: &str) -> Result<Vec<ListedBlock>, DiscoverError> {
    let not_understood =
        |line: &str| DiscoverError::NotUnderstood { command: "info ramblock", line: line.chars().take(200).collect() };
    let mut lines = text.lines().filter(|line| !line.trim().is_empty());
    let header = lines.next().unwrap_or_default();
    let columns: Vec<&str> = header.split_whitespace().collect();
    let has_address = match columns[..] {
        ["Block", "Name", "PSize", "Offset", "Used", "Total"] => false,
        ["Block", "Name", "PSize", "Offset", "Used", "Total", "HVA", "RO"] => true,
        _ => return Err(not_understood(header)),
    };
    let mut blocks = Vec::new();
    for line in lines {
        let block = ram_block(line, has_address).ok_or_else(|| not_understood(line))?;
        // QEMU names the blocks that it migrates (`vmstate_register_ram` in migration/savevm.c), and moves no other: a
        // memory backend that no device uses, for instance.
        if !block.name.is_empty() {
            blocks.push(block);
        }
    }
    Ok(blocks)
}

fn ram_block(line: &str, has_address: bool) -> Option<ListedBlock> {
    // From the right, since a name may contain blanks.
    let mut words = line.split_whitespace().rev();
    let (read_only, address) = if has_address {
        let read_only = match words.next()? {
            "ro" => true,
            "rw" => false,
            _ => return None,
        };
        (Some(read_only), Some(hexadecimal(words.next()?)?))
    } else {
        (None, None)
    };
    let total = hexadecimal(words.next()?)?;
    let used = hexadecimal(words.next()?)?;
    let offset = hexadecimal(words.next()?)?;
    let unit = match words.next()? {
        "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => return None,
    };
    let psize = words.next()?;
    let page_size = psize.parse::<u64>().ok()?.checked_mul(unit)?;
    if !page_size.is_power_of_two() || used > total {
        return None;
    }
    // What remains in front of the page size is the name, right-aligned.
    let before_unit = &line[..line.rfind(&format!("{psize} "))?];
    let name = before_unit.trim();
    Some(ListedBlock { name: name.to_owned(), page_size, offset, used, total, address, read_only })
}

fn hexadecimal(text: &str) -> Option<u64> {
    u64::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

pub(super) fn memdevs(answer: &Value) -> Vec<Memdev> {
    answer
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|entry| {
            Some(Memdev {
                id: entry["id"].as_str()?.to_owned(),
                size: entry["size"].as_u64()?,
                share: entry["share"].as_bool()?,
                prealloc: entry["prealloc"].as_bool()?,
            })
        })
        .collect()
}

/// `query-memory-devices`: which backend belongs to a device, and its type (`dimm`, `nvdimm`, `virtio-mem`, …).
pub(super) fn device_memory(answer: &Value) -> Vec<(String, String)> {
    answer
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|entry| {
            let memdev = entry["data"]["memdev"].as_str()?;
            let id = memdev.strip_prefix("/objects/").unwrap_or(memdev);
            Some((id.to_owned(), entry["type"].as_str()?.to_owned()))
        })
        .collect()
}

/// Number of addresses of a block in the flat view whose host addresses are queried; all of them must agree.
const CROSS_CHECKS: usize = 4;

/// Finds a block's host address by its guest physical addresses: QEMU before 8.0 does not list the host address, but
/// translates guest physical addresses. The inner error is the reason why the address is not known.
pub(super) fn address_from_view(
    view: &str,
    block: &ListedBlock,
    gpa2hva: impl Fn(u64) -> Result<String, QmpError>,
) -> Result<Result<u64, String>, DiscoverError> {
    let seen: Vec<(u64, u64)> = guest_addresses(view, &block.name);
    let step = seen.len().div_ceil(CROSS_CHECKS).max(1);
    let mut found = None;
    for (gpa, offset) in seen.iter().step_by(step).chain(seen.last()) {
        let answer = gpa2hva(*gpa)?;
        let base = host_address(&answer, *gpa, &block.name).and_then(|host| host.checked_sub(*offset));
        match (base, found) {
            (Some(base), None) => found = Some(base),
            (Some(base), Some(before)) if base == before => {}
            _ => {
                let reason = format!("QEMU's answers about its address do not agree ({})", answer.trim());
                return Ok(Err(reason));
            }
        }
    }
    Ok(found.ok_or_else(|| "this QEMU does not tell its address: the guest's memory map does not show it".into()))
}

/// Returns where a block appears in guest physical memory: addresses, and offsets in the block.
fn guest_addresses(view: &str, block: &str) -> Vec<(u64, u64)> {
    let mut found = Vec::new();
    // QEMU prints several views, each after the names of its address spaces.
    let mut is_memory = false;
    for line in view.lines() {
        let line = line.trim();
        if line.starts_with("FlatView #") {
            is_memory = false;
        } else if line.starts_with("AS \"memory\",") {
            is_memory = true;
        } else if is_memory && let Some(entry) = view_entry(line, block) {
            found.push(entry);
        }
    }
    found
}

/// Parses a line like `0000000000100000-000000000fffffff (prio 0, ram): pc.ram @0000000000100000 KVM`.
fn view_entry(line: &str, block: &str) -> Option<(u64, u64)> {
    let (range, rest) = line.split_once(" (prio ")?;
    let (_priority, rest) = rest.split_once(", ram): ")?;
    let rest = rest.strip_prefix(block)?;
    if !rest.is_empty() && !rest.starts_with(' ') {
        return None;
    }
    let offset = match rest.trim_start().strip_prefix('@') {
        Some(offset) => u64::from_str_radix(offset.split_whitespace().next().unwrap_or_default(), 16).ok()?,
        None => 0,
    };
    let (start, _end) = range.split_once('-')?;
    Some((u64::from_str_radix(start, 16).ok()?, offset))
}

/// Parses a line like `Host virtual address for 0x0 (pc.ram) is 0x7fdc5fe00000`.
fn host_address(answer: &str, gpa: u64, block: &str) -> Option<u64> {
    let prefix = format!("Host virtual address for {gpa:#x} ({block}) is ");
    hexadecimal(answer.trim().strip_prefix(&prefix)?)
}

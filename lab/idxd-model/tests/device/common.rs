//! Descriptors and records for the tests, by numbers and not by the model's own table, so that an error in the table shows.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use sterna_idxd_model::memory::{AddressSpace, PageState, TestMemory};
use sterna_idxd_model::{DeviceConfig, Model, ModelConfig, ModelQueue, QueueConfig};

pub(crate) const FENCE: u32 = 1;
pub(crate) const BLOCK: u32 = 2;
/// Record address valid, and a record requested.
pub(crate) const RECORD: u32 = 0xc;
pub(crate) const CHECK: u32 = 0x80;

/// A descriptor under construction.
#[derive(Clone, Copy)]
pub(crate) struct Raw(pub(crate) [u8; 64]);

impl Raw {
    pub(crate) fn new(operation: u8, record: u64) -> Raw {
        let mut raw = Raw([0; 64]);
        raw.0[7] = operation;
        if record != 0 { raw.flags(RECORD).u64(8, record) } else { raw }
    }

    pub(crate) fn flags(mut self, flags: u32) -> Raw {
        for (byte, value) in self.0[4..7].iter_mut().zip(flags.to_le_bytes()) {
            *byte |= value;
        }
        self
    }

    pub(crate) fn without(mut self, flags: u32) -> Raw {
        for (byte, value) in self.0[4..7].iter_mut().zip(flags.to_le_bytes()) {
            *byte &= !value;
        }
        self
    }

    pub(crate) fn u8(mut self, at: usize, value: u8) -> Raw {
        self.0[at] = value;
        self
    }

    pub(crate) fn u32(mut self, at: usize, value: u32) -> Raw {
        self.0[at..at + 4].copy_from_slice(&value.to_le_bytes());
        self
    }

    pub(crate) fn u64(mut self, at: usize, value: u64) -> Raw {
        self.0[at..at + 8].copy_from_slice(&value.to_le_bytes());
        self
    }
}

pub(crate) fn noop(record: u64) -> Raw {
    Raw::new(0, record)
}

pub(crate) fn batch(record: u64, list: u64, count: u32) -> Raw {
    Raw::new(1, record).u64(16, list).u32(32, count)
}

pub(crate) fn drain(record: u64) -> Raw {
    Raw::new(2, record)
}

pub(crate) fn memmove(record: u64, source: u64, destination: u64, bytes: u32) -> Raw {
    Raw::new(3, record).u64(16, source).u64(24, destination).u32(32, bytes)
}

pub(crate) fn fill(record: u64, pattern: u64, destination: u64, bytes: u32) -> Raw {
    Raw::new(4, record).u64(16, pattern).u64(24, destination).u32(32, bytes)
}

pub(crate) fn compare(record: u64, first: u64, second: u64, bytes: u32) -> Raw {
    Raw::new(5, record).u64(16, first).u64(24, second).u32(32, bytes)
}

pub(crate) fn compare_pattern(record: u64, source: u64, pattern: u64, bytes: u32) -> Raw {
    Raw::new(6, record).u64(16, source).u64(24, pattern).u32(32, bytes)
}

pub(crate) fn create_delta(record: u64, first: u64, second: u64, bytes: u32, delta: u64, limit: u32) -> Raw {
    Raw::new(7, record).u64(16, first).u64(24, second).u32(32, bytes).u64(40, delta).u32(48, limit)
}

pub(crate) fn apply_delta(record: u64, delta: u64, delta_bytes: u32, destination: u64, bytes: u32) -> Raw {
    Raw::new(8, record).u64(16, delta).u64(24, destination).u32(32, bytes).u32(40, delta_bytes)
}

pub(crate) fn dualcast(record: u64, source: u64, first: u64, second: u64, bytes: u32) -> Raw {
    Raw::new(9, record).u64(16, source).u64(24, first).u32(32, bytes).u64(40, second)
}

pub(crate) fn crc(record: u64, source: u64, bytes: u32, seed: u32) -> Raw {
    Raw::new(0x10, record).u64(16, source).u32(32, bytes).u32(40, seed)
}

pub(crate) fn copy_crc(record: u64, source: u64, destination: u64, bytes: u32, seed: u32) -> Raw {
    Raw::new(0x11, record).u64(16, source).u64(24, destination).u32(32, bytes).u32(40, seed)
}

pub(crate) fn cache_flush(record: u64, destination: u64, bytes: u32) -> Raw {
    Raw::new(0x20, record).u64(24, destination).u32(32, bytes)
}

/// The fields of a completion record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) status: u8,
    pub(crate) result: u8,
    pub(crate) info: u8,
    pub(crate) completed: u32,
    pub(crate) fault: u64,
    pub(crate) detail: u32,
}

pub(crate) fn seen(bytes: &[u8]) -> Seen {
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    Seen {
        status: bytes[0],
        result: bytes[1],
        info: bytes[2],
        completed: word(4),
        fault: u64::from_le_bytes(bytes[8..16].try_into().unwrap()),
        detail: word(16),
    }
}

/// One manual device on memory whose pages the test makes present, missing or read-only.
pub(crate) struct Bench {
    pub(crate) model: Arc<Model>,
    pub(crate) memory: Arc<TestMemory>,
    pub(crate) queue: ModelQueue,
}

/// Where the records of a [`Bench`] are.
pub(crate) const RECORDS: u64 = 0x10_0000;
/// 1 MiB that is present.
pub(crate) const DATA: u64 = 0x100_0000;

impl Bench {
    pub(crate) fn new(change: impl FnOnce(&mut DeviceConfig)) -> Bench {
        Bench::with_seed(1, change)
    }

    pub(crate) fn with_seed(seed: u64, change: impl FnOnce(&mut DeviceConfig)) -> Bench {
        let mut device = DeviceConfig::default();
        device.queues[0].max_batch_size = 1024;
        change(&mut device);
        let memory = Arc::new(TestMemory::new());
        memory.set(RECORDS, 0x1_0000, PageState::Present);
        memory.set(DATA, 0x10_0000, PageState::Present);
        let config = ModelConfig { devices: vec![device], seed, ..ModelConfig::default() };
        let model = Model::manual_on(config, memory.clone() as Arc<dyn AddressSpace>).unwrap();
        let queue = model.queues().remove(0);
        Bench { model, memory, queue }
    }

    /// Makes a bench with a queue that may block on faults.
    pub(crate) fn blocking() -> Bench {
        Bench::new(|device| device.queues[0].block_on_fault = true)
    }

    pub(crate) fn record(&self, at: u64) -> Seen {
        seen(&self.memory.get(at, 32))
    }

    /// Submits a descriptor, waits until the device is idle and returns the first record.
    pub(crate) fn run(&self, raw: Raw) -> Seen {
        self.memory.put(RECORDS, &[0; 64]);
        self.submit(raw);
        self.model.settle();
        self.record(RECORDS)
    }

    pub(crate) fn submit(&self, raw: Raw) {
        if self.queue.config().mode == sterna_idxd_model::Mode::Shared {
            assert!(self.queue.enqcmd(&raw.0), "the queue accepts it");
        } else {
            self.queue.movdir64b(&raw.0);
        }
    }

    /// Runs a batch with these members, whose records are RECORDS + 64, + 128, …
    pub(crate) fn run_batch(&self, members: &[Raw]) -> Seen {
        let list = RECORDS + 0x8000;
        for (index, member) in members.iter().enumerate() {
            self.memory.put(list + 64 * index as u64, &member.0);
            self.memory.put(member_record(index), &[0; 32]);
        }
        self.run(batch(RECORDS, list, members.len() as u32))
    }

    pub(crate) fn member(&self, index: usize) -> Seen {
        self.record(member_record(index))
    }
}

pub(crate) fn member_record(index: usize) -> u64 {
    RECORDS + 64 + 32 * index as u64
}

/// Returns the configuration of a queue with this name.
pub(crate) fn queue(name: &str) -> QueueConfig {
    QueueConfig { name: name.into(), ..QueueConfig::default() }
}

/// Memory of this process: whole pages, unmapped at the end.
pub(crate) struct Mapping {
    pub(crate) address: u64,
    pub(crate) bytes: usize,
}

impl Mapping {
    pub(crate) fn anonymous(bytes: usize, protection: i32) -> Mapping {
        let mapping = Mapping::map(bytes, protection, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1);
        // Tests that fork would otherwise make the pages of all tests copy-on-write for a while.
        mapping.advise(0, bytes, libc::MADV_DONTFORK);
        mapping
    }

    pub(crate) fn map(bytes: usize, protection: i32, flags: i32, file: i32) -> Mapping {
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let address = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, file, 0) };
        assert_ne!(address, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
        Mapping { address: address as u64, bytes }
    }

    pub(crate) fn byte(&self, at: usize) -> &AtomicU8 {
        assert!(at < self.bytes);
        // SAFETY: within the mapping, which lives as long as `self`; atomics may be written by any thread.
        unsafe { &*((self.address as usize + at) as *const AtomicU8) }
    }

    pub(crate) fn put(&self, at: usize, bytes: &[u8]) {
        for (index, &byte) in bytes.iter().enumerate() {
            self.byte(at + index).store(byte, Ordering::SeqCst);
        }
    }

    pub(crate) fn get(&self, at: usize, bytes: usize) -> Vec<u8> {
        (at..at + bytes).map(|index| self.byte(index).load(Ordering::SeqCst)).collect()
    }

    pub(crate) fn advise(&self, at: usize, bytes: usize, advice: i32) {
        assert!(at + bytes <= self.bytes);
        // SAFETY: within the mapping.
        let result = unsafe { libc::madvise((self.address as usize + at) as *mut _, bytes, advice) };
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    }

    /// Removes all pages from the page tables at once. The addresses stay reserved, so that a late write cannot hit a
    /// later mapping of another owner.
    pub(crate) fn vanish(&self) {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        // SAFETY: replaces this value's own mapping.
        let at = unsafe { libc::mmap(self.address as *mut _, self.bytes, libc::PROT_NONE, flags, -1, 0) };
        assert_eq!(at as u64, self.address, "{}", std::io::Error::last_os_error());
    }

    pub(crate) fn protect(&self, at: usize, bytes: usize, protection: i32) {
        assert!(at + bytes <= self.bytes);
        // SAFETY: within the mapping.
        let result = unsafe { libc::mprotect((self.address as usize + at) as *mut _, bytes, protection) };
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own.
        unsafe { libc::munmap(self.address as *mut _, self.bytes) };
    }
}

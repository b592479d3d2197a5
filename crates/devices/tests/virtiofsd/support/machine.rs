//! A minimal monitor and guest driver of a virtio device: memory that is a memfd, split virtqueues (VIRTIO 1.2, 2.7),
//! and the vhost-user handshake.
//!
//! The memory is never mapped here: `pread` and `pwrite` see the same pages as the back-end's mapping.

use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use sterna_devices::vhost_user::BackEnd;
use sterna_memory::ram::{Backing, GuestRam, RamBlock};
use vhost::vhost_user::message::{VhostUserHeaderFlag, VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

use super::{Daemon, ample};

/// The addresses of the memory in the guest, and in the monitor as reported to the back-end: any two addresses serve.
const GUEST: u64 = 0x10_0000;
const USER: u64 = 0x7000_0000_0000;
const MEMORY: u64 = 2 << 20;
const PAGE: u64 = 4096;

/// virtio-fs has one queue for urgent requests and, here, one for all others (VIRTIO 1.2, 5.11.2).
const QUEUES: usize = 2;
const REQUESTS: usize = 1;
const QUEUE_SIZE: u16 = 64;

/// Offsets in memory: each queue's three parts, the driver's request, and the device's answer.
const QUEUE: u64 = 0x1_0000;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const REQUEST: u64 = 0x8_0000;
const ANSWER: u64 = 0x10_0000;

const VIRTIO_F_VERSION_1: u64 = 1 << 32;
const VIRTQ_DESC_F_NEXT: u16 = 1;
const VIRTQ_DESC_F_WRITE: u16 = 2;

/// The state that the rounds and the stream move: memory, and the positions of the rings.
pub(crate) struct Machine {
    memory: File,
    /// Requests made available so far; all before the last are answered.
    requests: u16,
    bases: [u16; QUEUES],
}

/// A connection to a back-end.
pub(crate) struct Device {
    frontend: Frontend,
    protocol: VhostUserProtocolFeatures,
    kicks: Vec<EventFd>,
    calls: Vec<EventFd>,
}

impl Machine {
    pub(crate) fn new() -> Machine {
        Machine { memory: memory(), requests: 0, bases: [0; QUEUES] }
    }

    /// Returns the destination's machine, with a copy of the memory.
    pub(crate) fn moved(&self) -> Machine {
        let copy = memory();
        let mut content = vec![0; MEMORY as usize];
        self.memory.read_exact_at(&mut content, 0).expect("memory");
        copy.write_all_at(&content, 0).expect("memory");
        Machine { memory: copy, ..*self }
    }

    /// Returns the memory for the engine. It is mapped until the process ends, so no owner has to track its last use.
    pub(crate) fn ram(&self) -> GuestRam {
        let file = self.memory.try_clone().expect("a descriptor");
        let (access, length) = (ProtFlags::READ | ProtFlags::WRITE, MEMORY as usize);
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe { mmap(std::ptr::null_mut(), length, access, MapFlags::SHARED, &file, 0) }.expect("mapped");
        let start = NonNull::new(start.cast()).expect("not at 0");
        // SAFETY: the mapping exists for ever. Only the engine accesses it, by raw pointers; all other code accesses
        // the file.
        let block = unsafe { RamBlock::new("guest", start, length, Backing::Shared(Arc::new(file), 0)) };
        GuestRam::new(vec![block]).expect("one block")
    }

    /// Returns the pages that device and driver write: queues, requests and answers.
    pub(crate) fn written() -> Range<u64> {
        QUEUE / PAGE..MEMORY / PAGE
    }

    /// Returns the number of pages of the memory.
    pub(crate) fn pages() -> u64 {
        MEMORY / PAGE
    }

    /// Returns a number computed from all of the memory.
    pub(crate) fn digest(&self) -> u64 {
        let mut content = vec![0; MEMORY as usize];
        self.memory.read_exact_at(&mut content, 0).expect("memory");
        let step = |digest: u64, byte: &u8| (digest ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        content.iter().fold(0xcbf2_9ce4_8422_2325, step)
    }

    /// Returns the positions of the rings, the monitor's part of the device's state.
    pub(crate) fn rings(&self) -> Vec<u8> {
        [self.requests, self.bases[0], self.bases[1]].into_iter().flat_map(u16::to_le_bytes).collect()
    }

    pub(crate) fn set_rings(&mut self, rings: [u8; 6]) {
        let number = |at: usize| u16::from_le_bytes([rings[at], rings[at + 1]]);
        (self.requests, self.bases) = (number(0), [number(2), number(4)]);
    }

    /// Performs the handshake, up to the point where the rings would start.
    pub(crate) fn attach(&self, daemon: &Daemon) -> Device {
        let mut frontend = Frontend::from_stream(daemon.connect(), QUEUES as u64);
        let offered = frontend.get_features().expect("GET_FEATURES");
        assert_ne!(offered & FEATURES, 0);
        let protocol = VhostUserProtocolFeatures::REPLY_ACK | VhostUserProtocolFeatures::DEVICE_STATE;
        assert!(frontend.get_protocol_features().expect("GET_PROTOCOL_FEATURES").contains(protocol));
        frontend.set_protocol_features(protocol).expect("SET_PROTOCOL_FEATURES");
        // From here on the back-end answers each message, so that a refusal is noticed at the refused message.
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        frontend.set_owner().expect("SET_OWNER");
        frontend.set_features(FEATURES).expect("SET_FEATURES");
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: GUEST,
            memory_size: MEMORY,
            userspace_addr: USER,
            mmap_offset: 0,
            mmap_handle: self.memory.as_raw_fd(),
        };
        frontend.set_mem_table(&[region]).expect("SET_MEM_TABLE");
        let events = || (0..QUEUES).map(|_| EventFd::new(nonblocking()).expect("an eventfd")).collect();
        Device { frontend, protocol, kicks: events(), calls: events() }
    }

    /// Starts the rings where they were stopped, or at their beginning. The kick is for a request that was not yet
    /// processed when they stopped.
    pub(crate) fn start(&self, device: &mut Device) {
        for queue in 0..QUEUES {
            let at = USER + QUEUE * queue as u64;
            let addresses = VringConfigData {
                queue_max_size: QUEUE_SIZE,
                queue_size: QUEUE_SIZE,
                flags: 0,
                desc_table_addr: at,
                avail_ring_addr: at + AVAILABLE,
                used_ring_addr: at + USED,
                log_addr: None,
            };
            device.frontend.set_vring_num(queue, QUEUE_SIZE).expect("SET_VRING_NUM");
            device.frontend.set_vring_base(queue, self.bases[queue]).expect("SET_VRING_BASE");
            device.frontend.set_vring_addr(queue, &addresses).expect("SET_VRING_ADDR");
            device.frontend.set_vring_call(queue, &device.calls[queue]).expect("SET_VRING_CALL");
            device.frontend.set_vring_kick(queue, &device.kicks[queue]).expect("SET_VRING_KICK");
            device.frontend.set_vring_enable(queue, true).expect("SET_VRING_ENABLE");
            device.kicks[queue].write(1).expect("a kick");
        }
    }

    /// Stops the rings: the device is suspended.
    pub(crate) fn suspend(&mut self, device: &Device) {
        for (queue, base) in self.bases.iter_mut().enumerate() {
            *base = device.frontend.get_vring_base(queue).expect("GET_VRING_BASE").try_into().expect("16 bits");
        }
        assert!(self.requests.wrapping_sub(self.bases[REQUESTS]) <= 1, "all requests but the last were processed");
        assert_eq!(self.bases[REQUESTS].to_le_bytes(), self.used(), "processed requests are answered");
    }

    /// Puts a request into the queue and waits for its answer.
    pub(crate) fn request(&mut self, device: &Device, question: &[u8], room: usize) -> Vec<u8> {
        self.submit(question, room);
        device.kick();
        self.answer(device, room)
    }

    /// Puts a request into the queue, without notifying the device.
    pub(crate) fn submit(&mut self, question: &[u8], room: usize) {
        assert!(question.len() as u64 <= ANSWER - REQUEST && room as u64 <= MEMORY - ANSWER);
        let queue = QUEUE * REQUESTS as u64;
        self.write(REQUEST, question);
        self.descriptor(queue, 0, REQUEST, question.len(), VIRTQ_DESC_F_NEXT);
        self.descriptor(queue, 1, ANSWER, room, VIRTQ_DESC_F_WRITE);
        let slot = u64::from(self.requests % QUEUE_SIZE);
        // Ring: flags, index, entries. Both descriptors above are the chain that begins with number 0.
        self.write(queue + AVAILABLE + 4 + 2 * slot, &0u16.to_le_bytes());
        self.requests = self.requests.wrapping_add(1);
        self.write(queue + AVAILABLE + 2, &self.requests.to_le_bytes());
    }

    /// Waits for the answer to the last request.
    pub(crate) fn answer(&self, device: &Device, room: usize) -> Vec<u8> {
        while self.used() != self.requests.to_le_bytes() {
            device.wait_for_call();
        }
        let slot = u64::from(self.requests.wrapping_sub(1) % QUEUE_SIZE);
        let element = self.read::<8>(QUEUE * REQUESTS as u64 + USED + 4 + 8 * slot);
        let length = u32::from_le_bytes(element[4..].try_into().expect("four bytes")) as usize;
        assert!(length <= room, "the device wrote {length} bytes into {room}");
        let mut answer = vec![0; length];
        self.memory.read_exact_at(&mut answer, ANSWER).expect("memory");
        answer
    }

    /// Returns how many requests the device has answered.
    fn used(&self) -> [u8; 2] {
        self.read(QUEUE * REQUESTS as u64 + USED + 2)
    }

    fn descriptor(&self, queue: u64, index: u64, at: u64, length: usize, flags: u16) {
        let mut bytes = Vec::with_capacity(16);
        bytes.extend_from_slice(&(GUEST + at).to_le_bytes());
        bytes.extend_from_slice(&u32::try_from(length).expect("it fits").to_le_bytes());
        bytes.extend_from_slice(&flags.to_le_bytes());
        bytes.extend_from_slice(&1u16.to_le_bytes());
        self.write(queue + 16 * index, &bytes);
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        self.memory.write_all_at(bytes, at).expect("memory");
    }

    fn read<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.memory.read_exact_at(&mut bytes, at).expect("memory");
        bytes
    }
}

const FEATURES: u64 = VIRTIO_F_VERSION_1 | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();

impl Device {
    /// Returns the back-end for the code under test.
    pub(crate) fn back_end(&self, name: &str) -> BackEnd {
        BackEnd::new(name, &self.frontend, self.protocol).expect("virtiofsd has the feature")
    }

    /// Announces a migration, as a monitor does that enables logging of writes: virtiofsd then collects its state while
    /// it runs.
    pub(crate) fn announce(&self) {
        self.frontend.set_features(FEATURES | VhostUserVirtioFeatures::LOG_ALL.bits()).expect("SET_FEATURES");
    }

    /// Withdraws the announcement.
    pub(crate) fn withdraw(&self) {
        self.frontend.set_features(FEATURES).expect("SET_FEATURES");
    }

    pub(crate) fn kick(&self) {
        self.kicks[REQUESTS].write(1).expect("a kick");
    }

    fn wait_for_call(&self) {
        let call = &self.calls[REQUESTS];
        let left = ample() - std::time::Instant::now();
        // SAFETY: `self` is borrowed meanwhile, so both stay open.
        let [called, connection] =
            [call.as_raw_fd(), self.frontend.as_raw_fd()].map(|fd| unsafe { BorrowedFd::borrow_raw(fd) });
        let mut watched =
            [PollFd::from_borrowed_fd(called, PollFlags::IN), PollFd::from_borrowed_fd(connection, PollFlags::RDHUP)];
        let ready = poll(&mut watched, Some(&Timespec::try_from(left).expect("a minute"))).expect("poll");
        assert_ne!(ready, 0, "virtiofsd does not answer a request");
        assert!(!watched[0].revents().is_empty(), "virtiofsd disconnected");
        call.read().expect("its count");
    }
}

fn memory() -> File {
    let file = File::from(rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd"));
    file.set_len(MEMORY).expect("its length");
    file
}

/// `EFD_NONBLOCK`, which is `O_NONBLOCK`.
fn nonblocking() -> i32 {
    i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).expect("a flag")
}

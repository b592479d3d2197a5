//! A model's queue as a portal, queues opened by every submission method, and memory that a device may access.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_idxd::{
    Completion, CompletionRecord, Descriptor, Device, Directories, Instructions, Kind, Mode, OpenError, Opening,
    Portal, QueueInfo, Status, Submission, SubmitError, SubmitMethod, WorkQueue, discover, iaa,
};
use sterna_idxd_model::trap::TrapError;
use sterna_idxd_model::{DeviceConfig, Model, ModelConfig, ModelQueue, QueueConfig, Tree, trap};
pub(crate) use sterna_test_kit::checksum::crc32c;
pub(crate) use sterna_test_kit::content::noise;

/// The portal: passes the 64 bytes to the model.
#[derive(Debug)]
pub(crate) struct ModelPortal {
    pub(crate) queue: ModelQueue,
    pub(crate) method: SubmitMethod,
}

impl Portal for ModelPortal {
    unsafe fn submit(&self, descriptor: &Descriptor) -> Submission {
        match self.method {
            SubmitMethod::Enqcmd if self.queue.enqcmd(descriptor.as_bytes()) => Submission::Accepted,
            SubmitMethod::Enqcmd => Submission::Retry,
            SubmitMethod::Movdir64b => {
                self.queue.movdir64b(descriptor.as_bytes());
                Submission::Accepted
            }
            SubmitMethod::Write => match self.queue.write(descriptor.as_bytes()) {
                Ok(64) => Submission::Accepted,
                Ok(other) => panic!("{other} bytes taken"),
                Err(libc::EAGAIN) => Submission::Retry,
                Err(errno) => Submission::Refused(io::Error::from_raw_os_error(errno)),
            },
        }
    }

    fn submit_method(&self) -> SubmitMethod {
        self.method
    }
}

/// Returns what discovery would return for a model's queue.
pub(crate) fn info(queue: &ModelQueue) -> QueueInfo {
    let kind = match queue.device().kind {
        sterna_idxd_model::Kind::Dsa => Kind::Dsa,
        sterna_idxd_model::Kind::Iaa => Kind::Iaa,
    };
    let mode = match queue.config().mode {
        sterna_idxd_model::Mode::Shared => Mode::Shared,
        sterna_idxd_model::Mode::Dedicated => Mode::Dedicated,
    };
    let mut device = Device::new(&queue.device().name, kind);
    device.version = queue.device().version;
    let mut info = QueueInfo::new(queue.name(), Arc::new(device), mode, queue.config().size);
    info.max_batch = if kind == Kind::Dsa { queue.config().max_batch_size } else { 1 };
    info.max_transfer = queue.config().max_transfer_size;
    info
}

pub(crate) fn open(
    model: &Model,
    name: &str,
    method: SubmitMethod,
    deadline: Duration,
) -> Result<Arc<WorkQueue>, OpenError> {
    let queue = model.queue(name).unwrap();
    WorkQueue::with_portal_within(info(&queue), Arc::new(ModelPortal { queue, method }), deadline)
}

/// A queue, opened by one submission method, and the model behind it.
pub(crate) struct Rig {
    pub(crate) what: &'static str,
    pub(crate) model: Arc<Model>,
    pub(crate) queue: Arc<WorkQueue>,
    _tree: Option<tempfile::TempDir>,
}

/// Returns one shared and one dedicated queue on a device of the given version.
pub(crate) fn config(version: u32) -> ModelConfig {
    let shared = QueueConfig { max_batch_size: 128, ..QueueConfig::default() };
    let dedicated = QueueConfig { name: "wq0.1".into(), mode: sterna_idxd_model::Mode::Dedicated, ..shared.clone() };
    let device = DeviceConfig { version, queues: vec![shared, dedicated], ..DeviceConfig::default() };
    ModelConfig { devices: vec![device], ..ModelConfig::default() }
}

impl Rig {
    /// Returns a queue by each submission method: by call, and with the real instructions where they can be trapped.
    pub(crate) fn all() -> Vec<Rig> {
        Self::all_of(&config(0x200))
    }

    pub(crate) fn all_of(config: &ModelConfig) -> Vec<Rig> {
        let by_call = [
            ("ENQCMD by call", "wq0.0", SubmitMethod::Enqcmd),
            ("MOVDIR64B by call", "wq0.1", SubmitMethod::Movdir64b),
            ("write by call, shared", "wq0.0", SubmitMethod::Write),
            ("write by call, dedicated", "wq0.1", SubmitMethod::Write),
        ];
        let mut rigs: Vec<Rig> = by_call
            .into_iter()
            .map(|(what, name, method)| {
                let model = Model::start(config.clone()).unwrap();
                let queue = open(&model, name, method, Duration::from_secs(10)).unwrap();
                Rig { what, model, queue, _tree: None }
            })
            .collect();
        rigs.extend(Rig::trapped(config, "wq0.0", "ENQCMD trapped"));
        rigs.extend(Rig::trapped(config, "wq0.1", "MOVDIR64B trapped"));
        rigs
    }

    /// Returns a queue by the full path: discovery in a fake tree, the device file mapped, the real instruction.
    pub(crate) fn trapped(config: &ModelConfig, name: &str, what: &'static str) -> Option<Rig> {
        match trap::install() {
            Ok(()) => {}
            Err(why @ TrapError::Architecture) => {
                println!("skipped, the real instructions: {why}");
                return None;
            }
            Err(error) => panic!("{error}"),
        }
        let model = Model::start(config.clone()).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let Tree { sysfs, dev } = model.write_tree(directory.path()).unwrap();
        let directories = Directories { sysfs, dev };
        let found = discover(&directories).unwrap();
        for device in &found {
            assert_eq!(device.invalid_attributes, [] as [&str; 0]);
        }
        let info = found.into_iter().flat_map(|device| device.queues).find(|queue| queue.name == name).unwrap();
        assert_eq!(info.unusable, None);
        // SAFETY: the handlers are installed, for good; the device files of the tree are empty.
        let instructions = unsafe { Instructions::trapped() };
        let opening = Opening { instructions, deadline: Duration::from_secs(10), ..Opening::default() };
        let queue = WorkQueue::open_with(info, &directories, &opening).unwrap();
        assert_ne!(queue.submit_method(), SubmitMethod::Write, "the file can be mapped");
        Some(Rig { what, model, queue, _tree: Some(directory) })
    }

    /// Submits, waits, and returns the credit.
    pub(crate) fn run(&self, descriptor: Descriptor) -> Completion {
        run(&self.queue, descriptor)
    }
}

pub(crate) fn run(queue: &WorkQueue, descriptor: Descriptor) -> Completion {
    let record = Arc::new(CompletionRecord::new());
    submit(queue, &descriptor.with_record(record.address()));
    wait(queue, &record)
}

pub(crate) fn run_iaa(queue: &WorkQueue, descriptor: iaa::Descriptor) -> iaa::Completion {
    let record = Arc::new(iaa::CompletionRecord::new());
    submit(queue, descriptor.with_record(record.address()).raw());
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(completion) = record.poll() {
            queue.seen_complete(1);
            return completion;
        }
        assert!(Instant::now() < end, "no answer");
        std::thread::yield_now();
    }
}

/// Submits until the queue accepts it. The memory that the descriptor names stays in place until the test has seen its
/// record.
pub(crate) fn submit(queue: &WorkQueue, descriptor: &Descriptor) {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        // SAFETY: the tests keep records and areas until they have seen the record.
        match unsafe { queue.submit(descriptor) } {
            Ok(()) => return,
            Err(SubmitError::Busy) => assert!(Instant::now() < end, "never taken"),
            Err(error) => panic!("{error}"),
        }
        std::thread::yield_now();
    }
}

pub(crate) fn wait(queue: &WorkQueue, record: &CompletionRecord) -> Completion {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(completion) = record.poll() {
            queue.seen_complete(1);
            return completion;
        }
        assert!(Instant::now() < end, "no answer");
        std::thread::yield_now();
    }
}

pub(crate) const PAGE: usize = 4096;

/// Touched memory, which test and device only copy from and to.
pub(crate) struct Area {
    start: *mut u8,
    pages: usize,
}

impl Area {
    pub(crate) fn new(pages: usize) -> Self {
        // SAFETY: a new anonymous mapping.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                pages * PAGE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE,
                -1,
                0,
            )
        };
        assert_ne!(start, libc::MAP_FAILED);
        let area = Self { start: start.cast(), pages };
        area.put(0, &vec![0; pages * PAGE]);
        area
    }

    pub(crate) fn with(bytes: &[u8]) -> Self {
        let area = Self::new(bytes.len().div_ceil(PAGE).max(1));
        area.put(0, bytes);
        area
    }

    pub(crate) fn at(&self, offset: usize) -> u64 {
        assert!(offset <= self.pages * PAGE);
        self.start.expose_provenance() as u64 + offset as u64
    }

    pub(crate) fn put(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.pages * PAGE);
        // SAFETY: within the mapping, to which there are no references.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.add(offset), bytes.len()) }
    }

    pub(crate) fn get(&self, offset: usize, bytes: usize) -> Vec<u8> {
        assert!(offset + bytes <= self.pages * PAGE);
        let mut copy = vec![0; bytes];
        // SAFETY: within the mapping, to which there are no references.
        unsafe { std::ptr::copy_nonoverlapping(self.start.add(offset), copy.as_mut_ptr(), bytes) };
        copy
    }

    /// Removes or restores a page's permissions.
    pub(crate) fn allow(&self, page: usize, allowed: bool) {
        assert!(page < self.pages);
        let protection = if allowed { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_NONE };
        // SAFETY: a page of this mapping.
        assert_eq!(unsafe { libc::mprotect(self.start.add(page * PAGE).cast(), PAGE, protection) }, 0);
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        // SAFETY: this mapping; the tests have seen all records.
        unsafe { libc::munmap(self.start.cast(), self.pages * PAGE) };
    }
}

pub(crate) fn assert_done(completion: &Completion, what: &str) {
    assert_eq!(completion.status, Status::Success, "{what}: {completion:?}");
}

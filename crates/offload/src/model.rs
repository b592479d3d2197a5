//! `--accel model:FILE.json`: the queues of software devices, as if they had been opened.
//!
//! The model decodes the 64-byte descriptors and works on this process's memory through its real page tables; all code
//! above the portal is the same as on hardware.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_idxd::{Descriptor, Device, Kind, Mode, Portal, QueueInfo, Submission, SubmitMethod, WorkQueue, iaa};
use sterna_idxd_model as model;
use sterna_idxd_model::{Model, ModelConfig, ModelQueue};

/// How long closing waits for work in progress, before the device is reset as the kernel does.
const DRAIN: Duration = Duration::from_secs(2);

/// The largest model file that is read: a device takes less than a kilobyte.
const LARGEST: u64 = 16 << 20;

/// Reads a model's configuration. Changes nothing.
pub(crate) fn read(file: &Path) -> Result<ModelConfig, String> {
    ModelConfig::from_json(&text(file)?).map_err(|error| error.to_string())
}

fn text(file: &Path) -> Result<String, String> {
    // Non-blocking: opening a pipe would wait for a writer.
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(file);
    let opened = opened.map_err(|error| error.to_string())?;
    if !opened.metadata().map_err(|error| error.to_string())?.is_file() {
        return Err("it is no regular file".into());
    }
    let mut text = String::new();
    opened.take(LARGEST + 1).read_to_string(&mut text).map_err(|error| error.to_string())?;
    match text.len() as u64 > LARGEST {
        true => Err(format!("it is larger than {} MiB", LARGEST >> 20)),
        false => Ok(text),
    }
}

/// Returns the names of its devices.
pub(crate) fn devices(config: &ModelConfig) -> Vec<&str> {
    config.devices.iter().map(|device| device.name.as_str()).collect()
}

/// Starts a model and opens all its queues.
pub(crate) fn open(config: ModelConfig) -> Result<Vec<Arc<WorkQueue>>, String> {
    let model = Model::start(config).map_err(|error| error.to_string())?;
    queues(&model)
}

/// Opens all queues of a running model.
///
/// # Errors
/// A queue does not complete the no-op that tests it.
pub fn queues(model: &Arc<Model>) -> Result<Vec<Arc<WorkQueue>>, String> {
    let open = |queue: ModelQueue| {
        let info = info(&queue);
        let method = if info.mode == Some(Mode::Dedicated) { SubmitMethod::Movdir64b } else { SubmitMethod::Enqcmd };
        let portal = Arc::new(ModelPortal { model: Arc::clone(model), queue, method });
        WorkQueue::with_portal(info, portal).map_err(|error| error.to_string())
    };
    model.queues().into_iter().map(open).collect()
}

fn info(queue: &ModelQueue) -> QueueInfo {
    let (of, config) = (queue.device(), queue.config());
    let kind = match of.kind {
        model::Kind::Dsa => Kind::Dsa,
        model::Kind::Iaa => Kind::Iaa,
    };
    let mut device = Device::new(&of.name, kind);
    device.version = of.version;
    device.numa_node = u32::try_from(of.numa_node).ok();
    let mode = match config.mode {
        model::Mode::Shared => Mode::Shared,
        model::Mode::Dedicated => Mode::Dedicated,
    };
    let mut info = QueueInfo::new(&config.name, Arc::new(device), mode, config.size);
    info.max_batch = if kind == Kind::Dsa { config.max_batch_size } else { 1 };
    info.max_transfer = config.max_transfer_size;
    (info.label, info.priority) = (Some(config.label.clone()), Some(config.priority));
    info.block_on_fault = config.block_on_fault;
    info.ats_disable = config.ats_disable;
    info.prs_disable = config.prs_disable;
    info
}

/// The portal of one queue. It keeps the model running.
#[derive(Debug)]
struct ModelPortal {
    model: Arc<Model>,
    queue: ModelQueue,
    method: SubmitMethod,
}

impl Portal for ModelPortal {
    unsafe fn submit(&self, descriptor: &Descriptor) -> Submission {
        let bytes = descriptor.as_bytes();
        if self.method == SubmitMethod::Movdir64b {
            self.queue.movdir64b(bytes);
            return Submission::Accepted;
        }
        if self.queue.enqcmd(bytes) { Submission::Accepted } else { Submission::Retry }
    }

    fn submit_method(&self) -> SubmitMethod {
        self.method
    }

    fn description(&self) -> String {
        "software model".into()
    }
}

impl Drop for ModelPortal {
    /// Drains the queue, as the kernel does on close: afterwards it has no work in progress.
    fn drop(&mut self) {
        let end = Instant::now() + DRAIN;
        let record = iaa::CompletionRecord::new();
        let drain = Descriptor::drain().with_record(record.address());
        let mut sent = false;
        while Instant::now() < end {
            // On a dedicated queue too: the closing thread is the last submitter.
            if !sent {
                // SAFETY: the record is here until it was written, or the device has been reset.
                sent = matches!(unsafe { self.submit(&drain) }, Submission::Accepted);
            }
            if record.poll().is_some() {
                return;
            }
            std::thread::sleep(Duration::from_micros(20));
        }
        self.model.reset(&self.queue.device().name);
    }
}

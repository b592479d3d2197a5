//! Why a queue could not be opened or did not accept a descriptor: what happened, to what, what to do.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::portal::SubmitMethod;
use crate::status::Status;
use crate::sysfs::Unusable;

/// Why a queue could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// According to the kernel's attributes the queue cannot be used.
    #[error("work queue {queue} cannot be used: {why}")]
    Unusable {
        /// The queue.
        queue: String,
        /// Why, and what would help.
        why: Unusable,
    },
    /// The device file could not be opened.
    #[error("cannot open {}: {source}: {}", path.display(), explain(Call::Open, source))]
    Open {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The opened file is no device.
    #[error("{} is no character device, so it is no work queue: nothing was sent to it", path.display())]
    NotADevice {
        /// The file.
        path: PathBuf,
    },
    /// Neither a mapped portal nor `write(2)` accepts descriptors.
    #[error(
        "work queue {queue} takes no descriptors: mapping its portal: {mapping}; writing to it: {source}: {}",
        explain(Call::Write, source)
    )]
    NoWay {
        /// The queue.
        queue: String,
        /// Why the portal is not used.
        mapping: String,
        /// The kernel's error for the write.
        source: io::Error,
    },
    /// The queue was opened, but the no-op that tests it did not complete.
    #[error("work queue {queue} was opened ({method}), but {why}")]
    NotProven {
        /// The queue.
        queue: String,
        /// The submission method of the test.
        method: SubmitMethod,
        /// The result of the no-op.
        why: NotProven,
    },
}

/// Why the no-op that tests a queue failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NotProven {
    /// Sent, and never completed.
    #[error(
        "a no-op sent to it was not answered within {0:?}: the device has halted, the queue was disabled, or it hangs \
         (accel-config list shows the states; disabling the device resets it, and loses its configuration)"
    )]
    NoAnswer(Duration),
    /// Never accepted.
    #[error(
        "it would not take a no-op for {0:?}: it is full, it was disabled, or its device has halted (accel-config list \
         shows the states)"
    )]
    NotAccepted(Duration),
    /// Completed with an error.
    #[error("a no-op sent to it came back with {0}")]
    Answered(Status),
    /// Refused by the kernel.
    #[error("the kernel refused a no-op: {0}: {hint}", hint = explain(Call::Write, .0))]
    Refused(io::Error),
}

/// Why a descriptor was not submitted. It was not sent, and its record will not be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// No room now: no credit left on a dedicated queue, or a shared one is full up to its threshold (or disabled, or halted,
    /// which look the same: bound the retries).
    #[error("the work queue has no room")]
    Busy,
    /// The kernel will not submit it.
    #[error("the kernel refused the descriptor: {0}: {hint}", hint = explain(Call::Write, .0))]
    Refused(#[source] io::Error),
    /// The queue was opened by another process: this one is a child of it.
    #[error("the work queue was opened by process {owner}, and this is process {here}: a child must open its own")]
    Forked {
        /// The process that opened it.
        owner: u32,
        /// The calling process.
        here: u32,
    },
    /// A batch, and the queue accepts none from this process.
    #[error("the work queue takes no batches: {0}")]
    NoBatches(NoBatches),
}

/// Why a queue accepts no batches from this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoBatches {
    /// IAA has none.
    #[error("IAA has none")]
    Iaa,
    /// The queue's maximum is below 2.
    #[error("its largest batch is {0} (accel-config config-wq --max-batch-size)")]
    Maximum(u32),
    /// First-generation devices accept none through `write(2)` (INTEL-SA-01084).
    #[error(
        "on first-generation devices the kernel submits none for a process; with CAP_SYS_RAWIO the portal can be mapped"
    )]
    FirstGeneration,
    /// The kernel reports that the operation is not available to processes.
    #[error("the kernel does not offer the operation (op_cap, op_config)")]
    NotOffered,
    /// Tried, and refused by the kernel.
    #[error("the kernel refused one")]
    RefusedByKernel,
    /// Tried, and refused by the device.
    #[error("the device refused one with status {0:#04x}")]
    RefusedByDevice(u8),
    /// Tried, and not completed.
    #[error("one was sent and not answered")]
    NotAnswered,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Call {
    Open,
    Write,
}

impl OpenError {
    /// Returns the system's error number, if the system refused.
    pub fn os_error(&self) -> Option<i32> {
        match self {
            OpenError::Open { source, .. } | OpenError::NoWay { source, .. } => source.raw_os_error(),
            OpenError::NotProven { why: NotProven::Refused(source), .. } => source.raw_os_error(),
            _ => None,
        }
    }
}

/// Explains an error number of the idxd driver, with a remedy. Sources: the kernel's `drivers/dma/idxd/cdev.c` and
/// `iommu_sva_bind_device`.
fn explain(call: Call, error: &io::Error) -> &'static str {
    match (error.raw_os_error(), call) {
        (Some(libc::EOPNOTSUPP), _) => {
            "the kernel has no shared virtual addressing for this device: boot with intel_iommu=on,sm_on on a kernel that has it \
             (some stable kernels leave it off even on capable machines)"
        }
        (Some(libc::EACCES), _) => {
            "this user may not open the device file for reading and writing: grant it with setfacl or a udev rule"
        }
        (Some(libc::EPERM), Call::Open) => {
            "the kernel allows it only with more privileges: run with CAP_SYS_RAWIO, and in a container allow the device in the \
             device cgroup"
        }
        (Some(libc::EPERM), Call::Write) => {
            "the file was opened by another process, before a fork: a child must open the queue itself"
        }
        (Some(libc::EBUSY), _) => {
            "the queue is dedicated and another process has it: stop that one, or make the queue shared (accel-config disable-wq, \
             config-wq --mode=shared with all other options, because disabling loses them, enable-wq)"
        }
        (Some(libc::ENOSPC), _) => {
            "the IOMMU has no address-space number (PASID) left to bind this process to: close other users of the device, or raise \
             the limit on PASIDs in the container's misc cgroup"
        }
        (Some(libc::ENODEV | libc::ENXIO), _) => {
            "there is no such queue any more, or its device has no shared virtual addressing: accel-config list shows what is \
             enabled, accel-config enable-wq enables it"
        }
        (Some(libc::ENOENT), _) => {
            "the device file is not there: accel-config enable-wq makes it appear; in a container it must be passed in"
        }
        (Some(libc::EINVAL), Call::Open) => {
            "the kernel could not bind this process's address space to the device: boot with intel_iommu=on,sm_on"
        }
        (Some(libc::EINVAL), Call::Write) => {
            "the kernel does not submit such a descriptor for a process, or submits none at all: batches need CAP_SYS_RAWIO or a \
             second-generation device, write(2) needs a kernel that has the fixes for INTEL-SA-01084 (of 2024 or later), and the \
             completion record must be aligned to its size"
        }
        (Some(libc::ENOMEM), _) => "the kernel has no memory for another user of the device",
        _ => "unexpected: the kernel log may say more",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_error_number_has_its_own_advice() {
        let numbers = [
            (libc::EOPNOTSUPP, "intel_iommu=on,sm_on"),
            (libc::EACCES, "setfacl"),
            (libc::EPERM, "CAP_SYS_RAWIO"),
            (libc::EBUSY, "--mode=shared"),
            (libc::ENOSPC, "PASID"),
            (libc::ENODEV, "accel-config enable-wq"),
            (libc::EINVAL, "address space"),
        ];
        for (number, advice) in numbers {
            let error = OpenError::Open { path: "/dev/dsa/wq0.0".into(), source: io::Error::from_raw_os_error(number) };
            let text = error.to_string();
            assert!(text.contains("/dev/dsa/wq0.0") && text.contains(advice), "{text}");
            assert_eq!(error.os_error(), Some(number));
        }
        let forked = SubmitError::Refused(io::Error::from_raw_os_error(libc::EPERM)).to_string();
        assert!(forked.contains("fork"), "{forked}");
        let batch = SubmitError::Refused(io::Error::from_raw_os_error(libc::EINVAL)).to_string();
        assert!(batch.contains("batches"), "{batch}");
    }
}

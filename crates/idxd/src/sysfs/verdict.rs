//! What is said of a queue: why it cannot be used, or remarks; each with a remedy: a sentence and the commands.
//!
//! The sentence covers what an administrator cannot change with `accel-config` (boot parameters, permissions).

use std::fmt;
use std::path::PathBuf;

/// Why a queue cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unusable {
    /// The reason, by type.
    pub reason: Reason,
    /// The commands that would help, to be run in this order as root; empty if none would.
    pub commands: Vec<String>,
}

/// A remark about a usable queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remark {
    /// One sentence.
    pub what: String,
    /// The commands that would change it; empty if none would.
    pub commands: Vec<String>,
}

/// Why a queue cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// The kernel uses it.
    Kernel {
        /// Its driver, if shown.
        driver: Option<String>,
    },
    /// It is meant for another driver than the one for processes.
    OtherDriver(String),
    /// It has no entries: it has not been configured. Some queues of a device are normally unused.
    NotConfigured,
    /// It has no type, or an unknown one.
    NotForUsers,
    /// Shared virtual addressing is off.
    NoSharedAddressing,
    /// Address translation by the device is off.
    AtsDisabled,
    /// The device is disabled.
    DeviceDisabled,
    /// The queue is disabled.
    QueueDisabled,
    /// The kernel does not show a required attribute.
    Unknown(&'static str),
    /// The kernel does not show a required attribute of its device.
    UnknownOfDevice(&'static str),
    /// It is in no group, or in one without an engine.
    NoEngine,
    /// The device file does not exist.
    NoNode(PathBuf),
    /// The device file may not be opened by this process.
    NoPermission(PathBuf),
    /// It is dedicated and another process has it open.
    InUse,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::Kernel { driver: Some(driver) } => write!(f, "it belongs to the kernel (driver {driver})"),
            Reason::Kernel { driver: None } => f.write_str("it belongs to the kernel"),
            Reason::OtherDriver(driver) => {
                write!(f, "it is meant for the driver {driver:?}, not for \"user\", the one that serves processes")
            }
            Reason::NotConfigured => f.write_str("it is not configured: it has no entries"),
            Reason::NotForUsers => f.write_str("it is not configured for processes (type user)"),
            Reason::NoSharedAddressing => f.write_str(
                "the device has no shared virtual addressing (pasid_enabled is 0): boot with intel_iommu=on,sm_on on a \
                 kernel that has it; some stable kernels leave it off even on capable machines",
            ),
            Reason::AtsDisabled => f.write_str(
                "address translation by the device is off (ats_disable is 1), and writes can be lost silently so",
            ),
            Reason::DeviceDisabled => f.write_str("its device is disabled"),
            Reason::QueueDisabled => f.write_str("it is disabled"),
            Reason::Unknown(attribute) => {
                write!(f, "the kernel does not show its {attribute} in a form that makes sense")
            }
            Reason::UnknownOfDevice(attribute) => {
                write!(f, "the kernel does not show its device's {attribute} in a form that makes sense")
            }
            Reason::NoEngine => f.write_str("it is in no group that has an engine"),
            Reason::NoNode(node) => {
                write!(
                    f,
                    "there is no {}: udev has not made it, or it is not visible in this container",
                    node.display()
                )
            }
            Reason::NoPermission(node) => write!(
                f,
                "this process may not open {node} for reading and writing: setfacl -m u:NAME:rw {node}, or a udev rule",
                node = node.display()
            ),
            Reason::InUse => f.write_str("it is dedicated, and another process has it open"),
        }
    }
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.reason)?;
        if !self.commands.is_empty() {
            write!(f, "; as root: {}", self.commands.join("; "))?;
        }
        if self.commands.iter().any(|line| line.contains("disable-device")) {
            f.write_str(" (disabling a device loses the configuration of its other queues, too)")?;
        }
        Ok(())
    }
}

impl fmt::Display for Remark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        if !self.commands.is_empty() {
            write!(f, "; as root: {}", self.commands.join("; "))?;
        }
        Ok(())
    }
}

//! Starts with the accelerators that the caller selects.

#[cfg(feature = "accel")]
mod devices;

#[cfg(feature = "accel")]
use std::sync::Arc;

use thiserror::Error;

#[cfg(feature = "accel")]
pub(crate) use self::devices::open;
#[cfg(not(feature = "accel"))]
pub(crate) use self::no_devices::open;

/// Why no accelerator is used where the CPU alone was selected.
const NOT_ASKED_FOR: &str = "accelerators: not asked for";

/// Why offload could not be started. Nothing was touched.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StartError {
    /// A setting is out of its range.
    #[error("offload: {name} is {given}, which is not within {range}")]
    Setting {
        /// The setting.
        name: &'static str,
        /// Its value.
        given: usize,
        /// The values that are allowed.
        range: &'static str,
    },
    /// An accelerator requested by name does not exist or cannot be used.
    #[error("accelerator {selector}: {why}")]
    Missing {
        /// The device selector: see [`Accelerators`](crate::Accelerators).
        selector: String,
        /// The reason, and what would help.
        why: String,
    },
    /// A thread could not be started.
    #[error("offload: no thread for the backstop: {0}")]
    Thread(std::io::Error),
}

/// The opened queues, and why others are not used.
#[derive(Debug, Default)]
pub(crate) struct Opened {
    #[cfg(feature = "accel")]
    pub(crate) queues: Vec<Arc<sterna_idxd::WorkQueue>>,
    /// Why other accelerators are not used.
    pub(crate) not_used: Vec<String>,
}

/// Replaces `devices` in a build without drivers of accelerators.
#[cfg(not(feature = "accel"))]
mod no_devices {
    use std::sync::Arc;

    use super::{NOT_ASKED_FOR, Opened, StartError};
    use crate::accelerators::{Accelerators, DeviceSelector};
    use crate::common::Common;
    use crate::engine::OffloadEngine;
    use crate::settings::Settings;

    /// What a build without drivers answers.
    const LEFT_OUT: &str = "this build has no drivers of accelerators (feature `accel`)";

    /// Opens nothing: selectors other than `auto` and `cpu` are errors.
    pub(crate) fn open(choice: &Accelerators, _: &Settings) -> Result<Opened, StartError> {
        let cpu = *choice == Accelerators::cpu();
        let named = choice.selectors().iter().find(|selector| !cpu && **selector != DeviceSelector::Auto);
        match named {
            Some(selector) => Err(StartError::Missing { selector: selector.to_string(), why: LEFT_OUT.into() }),
            None => {
                Ok(Opened { not_used: vec![if cpu { NOT_ASKED_FOR.into() } else { format!("dsa, iaa: {LEFT_OUT}") }] })
            }
        }
    }

    impl Opened {
        /// Returns the one line that names the accelerators in use.
        pub(crate) fn summary(&self) -> String {
            format!("cpu; not used: {}", self.not_used.join("; "))
        }

        /// Returns no NUMA node, as there is no device.
        pub(crate) fn nodes(&self) -> Vec<Option<u32>> {
            Vec::new()
        }

        /// Returns no engine.
        pub(crate) fn into_engines(self, _: &Common, _: &mut str) -> Vec<Arc<dyn OffloadEngine>> {
            Vec::new()
        }
    }
}

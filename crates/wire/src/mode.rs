//! How the virtual machine monitors are driven: in the hello, and in the records of both sides.

use serde::{Deserialize, Serialize};

/// How the virtual machine monitors are driven.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Sterna drives both monitors (QEMUs), receives the guest through the source's own migration stream, and decides the
    /// switchover.
    Owner,
    /// Sterna drives both monitors (QEMUs), reads guest RAM from outside, and decides the switchover.
    Direct,
    /// Another program drives the monitors (QEMUs); Sterna relays, and guarantees nothing about the switchover.
    Proxy,
    /// Sterna is part of the virtual machine monitors themselves.
    Embedded,
}

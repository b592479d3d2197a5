//! The error of the monitor's code.

/// Why a method of the monitor failed, in the monitor's own words.
pub type VmmError = Box<dyn std::error::Error + Send + Sync>;

//! What one migration took: the same figures for a guest of QEMU and for memory that the library moves.

use sterna_codec::{Encoding, MethodChoice};
use sterna_qemu_lab::usage::Usage;

use crate::hosts::HostsError;

/// Looks whether a migration was made by the method that its row names: defaults change, and a row must not change with them. `report` is
/// what the report says of the method, which may go on with how it was done.
///
/// # Errors
/// It was another method: the row is void.
pub(crate) fn check_method(asked: MethodChoice, report: &str) -> Result<(), HostsError> {
    let name = asked.to_string();
    let reports = |encoding: Encoding| {
        report.strip_prefix(&encoding.to_string()).is_some_and(|rest| rest.is_empty() || rest.starts_with(':'))
    };
    let is_same = asked.encodings().any(reports);
    let error = || {
        HostsError(format!("the method was to be {name}, and the report says {report}: this is not what the row names"))
    };
    is_same.then_some(()).ok_or_else(error)
}

/// Figures of one migration; what a benchmark does not look at is 0.
#[derive(Clone, Debug, Default)]
pub(crate) struct Measured {
    pub(crate) total_ms: f64,
    pub(crate) downtime_ms: f64,
    /// As the mover counts them; between namespaces, out of the source host's interface, headers and all.
    pub(crate) wire_bytes: f64,
    /// Pages sent that were not zero, in all rounds, where they were counted.
    pub(crate) pages: f64,
    /// Rounds over guest RAM, where they were counted.
    pub(crate) rounds: f64,
    /// What a guest that writes at a set rate has achieved of it.
    pub(crate) achieved: Option<f64>,
    /// Why the migration was given up, where it was and that is a result.
    pub(crate) given_up: Option<String>,
    /// All processes at the source.
    pub(crate) source_cpu: f64,
    /// All processes at the destination.
    pub(crate) destination_cpu: f64,
    /// Page faults at the destination.
    pub(crate) faults: f64,
    /// The most that Sterna's process had of its own, without guest RAM.
    pub(crate) source_memory: f64,
    pub(crate) destination_memory: f64,
    /// Seconds since the beginning and the bytes that had come in by then, where they were noted.
    pub(crate) received: Vec<(f64, f64)>,
}

impl Measured {
    /// With what both sides used meanwhile.
    pub(crate) fn using(source: &Usage, destination: &Usage) -> Self {
        Self {
            source_cpu: source.cpu_seconds(),
            destination_cpu: destination.cpu_seconds(),
            faults: (destination.minor_faults + destination.major_faults) as f64,
            ..Self::default()
        }
    }

    /// Total, wire, CPU of both sides and of each, faults, memory of each.
    pub(crate) fn figures(&self) -> Vec<f64> {
        vec![
            self.total_ms,
            self.wire_bytes,
            self.source_cpu + self.destination_cpu,
            self.source_cpu,
            self.destination_cpu,
            self.faults,
            self.source_memory,
            self.destination_memory,
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_of_another_method_voids_the_row() {
        let method = |text: &str| text.parse::<MethodChoice>().unwrap();
        for (asked, report) in [
            (method("none"), "none"),
            (method("zstd -3"), "zstd -3"),
            (method("auto"), "auto: lz4 30 %, none 70 %"),
            (method("deflate by iaa"), "deflate by iaa: 2 engines"),
        ] {
            assert!(check_method(asked, report).is_ok(), "{report}");
        }
        for (asked, report) in [
            (method("none"), "auto: none 100 %"),
            (method("zstd -3"), "zstd -1"),
            (method("zstd 1"), "zstd 10"),
            (method("none"), ""),
        ] {
            let error = check_method(asked, report).unwrap_err().to_string();
            assert!(error.contains(&format!("the report says {report}:")), "{error}");
        }
    }
}

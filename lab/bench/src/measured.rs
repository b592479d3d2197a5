//! The figures of one migration, the same for a guest of QEMU and for memory that the library moves.

use sterna_codec::{Encoding, MethodChoice};
use sterna_qemu_lab::usage::Usage;

use crate::hosts::HostsError;

/// Checks that a migration was made by the method that its row names: defaults change, and a row must not change with
/// them. `report` is the report's text about the method, which may continue with details.
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

/// Figures of one migration; 0 where a benchmark does not measure a figure.
#[derive(Clone, Debug, Default)]
pub(crate) struct Measured {
    pub(crate) total_ms: f64,
    pub(crate) downtime_ms: f64,
    /// Bytes as the mover counts them; between namespaces, as the source host's interface counts them, with headers.
    pub(crate) wire_bytes: f64,
    /// Pages sent that were not zero, in all rounds, where they were counted.
    pub(crate) pages: f64,
    /// Rounds over guest RAM, where they were counted.
    pub(crate) rounds: f64,
    /// The part of the set rate that a guest reached, if it writes at one.
    pub(crate) achieved: Option<f64>,
    /// Why the migration was abandoned, if it was and that is a result.
    pub(crate) given_up: Option<String>,
    /// CPU time of all processes at the source.
    pub(crate) source_cpu: f64,
    /// CPU time of all processes at the destination.
    pub(crate) destination_cpu: f64,
    /// Page faults at the destination.
    pub(crate) faults: f64,
    /// The peak memory of Sterna's process, without guest RAM.
    pub(crate) source_memory: f64,
    pub(crate) destination_memory: f64,
    /// Pairs of seconds since the beginning and bytes received by then, where recorded.
    pub(crate) received: Vec<(f64, f64)>,
}

impl Measured {
    /// Makes figures with the resource usage of both sides.
    pub(crate) fn using(source: &Usage, destination: &Usage) -> Self {
        Self {
            source_cpu: source.cpu_seconds(),
            destination_cpu: destination.cpu_seconds(),
            faults: (destination.minor_faults + destination.major_faults) as f64,
            ..Self::default()
        }
    }

    /// Returns total time, wire bytes, CPU of both sides and of each, faults, memory of each.
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

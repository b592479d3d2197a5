//! The options that every benchmark takes.

use std::path::PathBuf;

use sterna_qemu_lab::QemuVersion;

/// How a benchmark is run.
#[derive(Debug, clap::Args)]
pub(crate) struct BenchArgs {
    /// Smaller guests and fewer runs: at most 5 minutes on two cores
    #[arg(long)]
    pub(crate) quick: bool,
    /// All cells that there are, for hours ('compression' and 'selection' only)
    #[arg(long, conflicts_with = "quick")]
    pub(crate) long: bool,
    /// Write the figures as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Only the cells whose name contains this; can be given again. Targets that need other cells are not measured
    #[arg(long, value_name = "TEXT")]
    pub(crate) only: Vec<String>,
    /// Rounds over all cells [default: 5; 3 with --quick]
    #[arg(long, value_name = "N")]
    pub(crate) rounds: Option<usize>,
    /// CPUs that the source side has to itself, and as many that the destination side has
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) cpus: u16,
    /// Hold all of this machine's free memory, and let it go only as migrations take it: for a virtual machine that gives free
    /// memory back to its hypervisor, where each page that is touched anew is many times slower ('qemu' and 'dirty-rate' only)
    #[arg(long)]
    pub(crate) hold_free_memory: bool,
    /// Release of QEMU that is moved and compared with
    #[arg(long, default_value = "10.0", value_parser = release)]
    pub(crate) qemu: QemuVersion,
}

fn release(text: &str) -> Result<QemuVersion, String> {
    let known = QemuVersion::ALL.into_iter().find(|version| version.to_string() == text);
    known.ok_or_else(|| format!("known are {}", QemuVersion::ALL.map(|version| version.to_string()).join(", ")))
}

impl BenchArgs {
    /// Returns how many times each cell is measured.
    pub(crate) fn rounds(&self) -> usize {
        self.rounds.unwrap_or(if self.quick { 3 } else { 5 })
    }

    /// Returns how much memory is kept warm for a guest that populates `bytes`: no limit where all that is free is held.
    pub(crate) fn warmed(&self, bytes: u64) -> Option<u64> {
        (!self.hold_free_memory).then_some(bytes)
    }

    /// Returns whether the cell of this name is measured.
    pub(crate) fn wants(&self, cell: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|part| cell.contains(part.as_str()))
    }

    /// Checks that every `--only` names a cell: otherwise a typing error would measure fewer cells, or none.
    ///
    /// # Errors
    /// One names none; the text lists the cells.
    pub(crate) fn check_only(&self, cells: &[String]) -> Result<(), String> {
        match self.only.iter().find(|part| !cells.iter().any(|cell| cell.contains(part.as_str()))) {
            None => Ok(()),
            Some(part) => {
                Err(format!("--only: no cell's name contains '{part}'; the cells are\n  {}", cells.join("\n  ")))
            }
        }
    }
}

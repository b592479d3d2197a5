//! The origin of figures: the command, the day and the commit that a file of results names.

use std::path::Path;
use std::process::Command;

use serde::{Deserialize, Serialize};

/// The origin of a file of results.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Provenance {
    /// The command line, without the file that it wrote.
    pub(crate) command: String,
    /// The day, as in 2026-11-23, in UTC.
    pub(crate) date: String,
    /// The commit of the source tree; `-dirty` follows where the tree had other changes. "unknown" without git.
    pub(crate) commit: String,
}

impl Provenance {
    /// Returns that of this run.
    pub(crate) fn of_this_run() -> Self {
        let tree = Path::new(env!("CARGO_MANIFEST_DIR"));
        let unknown = || "unknown".to_owned();
        Self {
            command: command(std::env::args().skip(1)),
            date: output(Command::new("date").args(["-u", "+%F"])).unwrap_or_else(unknown),
            commit: output(Command::new("git").current_dir(tree).args([
                "describe",
                "--always",
                "--dirty",
                "--abbrev=12",
                "--exclude=*",
            ]))
            .unwrap_or_else(unknown),
        }
    }
}

fn command(words: impl Iterator<Item = String>) -> String {
    let mut line = "sterna-bench".to_owned();
    let mut is_file = false;
    for word in words {
        if std::mem::take(&mut is_file) || word.starts_with("--json=") {
            continue;
        }
        if word == "--json" {
            is_file = true;
            continue;
        }
        line.push(' ');
        match word.contains(' ') {
            true => line.push_str(&format!("\"{word}\"")),
            false => line.push_str(&word),
        }
    }
    line
}

fn output(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|output| output.status.success())?;
    let text = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_is_what_repeats_the_run_without_its_file() {
        let line = |words: &[&str]| command(words.iter().map(|word| (*word).to_owned()));
        assert_eq!(line(&["qemu", "--json", "q.json", "--rounds", "5"]), "sterna-bench qemu --rounds 5");
        assert_eq!(line(&["ram", "--json=x", "--only", "half filled"]), "sterna-bench ram --only \"half filled\"");
    }
}

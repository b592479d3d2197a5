//! Where tests find QATzip (what `STERNA_QATZIP` names, else what `scripts/setup` unpacked, else the system's), what they say without a
//! tool, and where they have files in memory.

use std::io::Write;
use std::path::PathBuf;

use tempfile::TempDir;

/// Returns a new directory in memory. Its name has this process's number, by which `scripts/leftovers` finds what killed tests leave.
///
/// # Panics
/// There is no `/dev/shm` in which this user may write.
#[must_use]
pub fn directory_in_memory() -> TempDir {
    let prefix = format!("sterna-{}-", std::process::id());
    tempfile::Builder::new().prefix(&prefix).tempdir_in("/dev/shm").expect("a directory in memory")
}

/// Returns the directory of QATzip's library; `None` for the system's.
#[must_use]
pub fn qatzip_directory() -> Option<PathBuf> {
    const UNPACKED: &str = "qatzip/usr/lib/x86_64-linux-gnu";
    if let Some(named) = std::env::var_os("STERNA_QATZIP").filter(|named| !named.is_empty()) {
        return Some(named.into());
    }
    tools().map(|tools| tools.join(UNPACKED)).find(|directory| directory.is_dir())
}

/// Prints that a test is skipped for want of QATzip.
///
/// # Panics
/// A skip is an error: `STERNA_REQUIRE_TOOLS` shows that `scripts/setup` ran, and setup did not record that the library is unavailable.
pub fn skip_without_qatzip(why: &str) {
    let excused = tools().any(|tools| tools.join("qatzip-absent").is_file());
    assert!(excused || std::env::var_os("STERNA_REQUIRE_TOOLS").is_none(), "{why}");
    skipped(&format!("{why} (scripts/setup --only qatzip unpacks it)"));
}

/// Prints why a test is skipped, past the test harness, which keeps to itself what a test prints that passes.
pub fn skipped(why: &str) {
    let _ = writeln!(std::io::stderr(), "skipped: {why}");
}

fn tools() -> impl Iterator<Item = PathBuf> {
    let named = std::env::var_os("STERNA_TOOLS").map(PathBuf::from);
    named.into_iter().chain([PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../target/tools")])
}

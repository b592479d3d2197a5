//! Where the tests find the library: what `STERNA_QATZIP` names, else what `scripts/setup` unpacked, else the system's.

use std::path::PathBuf;

/// Its directory; `None` for the system's.
pub(super) fn place() -> Option<PathBuf> {
    const UNPACKED: &str = "qatzip/usr/lib/x86_64-linux-gnu";
    if let Some(named) = std::env::var_os("STERNA_QATZIP").filter(|named| !named.is_empty()) {
        return Some(named.into());
    }
    tools().map(|tools| tools.join(UNPACKED)).find(|directory| directory.is_dir())
}

/// Fails where a skip is not allowed: `STERNA_REQUIRE_TOOLS` says that `scripts/setup` ran, and that did not write down that the
/// library cannot be had here.
pub(super) fn may_skip(why: &str) {
    let excused = tools().any(|tools| tools.join("qatzip-absent").is_file());
    assert!(excused || std::env::var_os("STERNA_REQUIRE_TOOLS").is_none(), "{why}");
    eprintln!("skipped: {why} (scripts/setup --only qatzip unpacks it)");
}

fn tools() -> impl Iterator<Item = PathBuf> {
    let named = std::env::var_os("STERNA_TOOLS").map(PathBuf::from);
    named.into_iter().chain([PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../target/tools")])
}

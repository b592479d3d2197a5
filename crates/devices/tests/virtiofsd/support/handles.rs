//! Checks whether virtiofsd can move files by their handles here. The tests of the gateway use this, too.

use std::path::Path;

/// Returns whether files can be opened by their handles; prints the reason if not.
pub(crate) fn may_open_by_handle(directory: &Path) -> bool {
    const CAP_DAC_READ_SEARCH: u64 = 1 << 2;
    const OVERLAYFS_SUPER_MAGIC: u64 = 0x794c_7630;
    let status = std::fs::read_to_string("/proc/self/status").expect("procfs");
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:")).expect("capabilities");
    let capable = u64::from_str_radix(effective.trim(), 16).expect("a mask") & CAP_DAC_READ_SEARCH != 0;
    let file_system = rustix::fs::statfs(directory).expect("the directory").f_type as u64;
    if !capable {
        eprintln!("skipped: opening files by their handles needs CAP_DAC_READ_SEARCH");
    } else if file_system == OVERLAYFS_SUPER_MAGIC {
        eprintln!("skipped: the files of {} (overlayfs) have no handles", directory.display());
    }
    capable && file_system != OVERLAYFS_SUPER_MAGIC
}

//! Checks whether it is worthwhile to query hardware at all: the library's own query is expensive, and prints a line
//! where there is none.

use std::path::Path;

/// What the kernel shows of its PCI devices.
const DEVICES: &str = "/sys/bus/pci/devices";
const INTEL: &str = "0x8086";
/// Base class and subclass "co-processor" (PCI Code and ID Assignment, 0Bh/40h), which QAT's physical and virtual functions have.
/// Other functions of Intel's have it too, so it proves nothing; without it there is no QAT.
const COPROCESSOR: &str = "0x0b40";

/// Returns whether this host may have QAT hardware. [`Library::hardware`](crate::Library::hardware) returns whether
/// this process can use any.
#[must_use]
pub fn may_have_hardware() -> bool {
    may_be_among(Path::new(DEVICES))
}

fn may_be_among(devices: &Path) -> bool {
    let Ok(entries) = std::fs::read_dir(devices) else { return false };
    let begins = |path: &Path, with: &str| std::fs::read_to_string(path).is_ok_and(|text| text.starts_with(with));
    entries.flatten().any(|entry| {
        let device = entry.path();
        begins(&device.join("vendor"), INTEL) && begins(&device.join("class"), COPROCESSOR)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_co_processor_of_intels_may_be_qat() {
        let devices = tempfile::tempdir().unwrap();
        assert!(!may_be_among(&devices.path().join("absent")));
        let add = |name: &str, vendor: &str, class: &str| {
            let device = devices.path().join(name);
            std::fs::create_dir(&device).unwrap();
            std::fs::write(device.join("vendor"), vendor).unwrap();
            std::fs::write(device.join("class"), class).unwrap();
            may_be_among(devices.path())
        };
        assert!(!add("0000:00:01.0", "0x8086\n", "0x020000\n"), "a network card");
        assert!(!add("0000:6a:01.0", "0x8086\n", "0x088000\n"), "a DSA");
        assert!(!add("0000:00:02.0", "0x1af4\n", "0x0b4000\n"), "somebody else's");
        assert!(add("0000:6b:00.0", "0x8086\n", "0x0b4000\n"), "a QAT");
    }
}

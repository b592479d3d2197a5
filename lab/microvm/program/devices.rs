//! The results of checking the devices with a state of their own.

use serde_json::{Value, json};
use sterna::format_bytes;
use sterna_microvm::Machine;
use sterna_microvm::scratch::{Scratch, Verified};

/// A device at a moment.
#[derive(Clone, Debug)]
struct Device {
    name: String,
    blocks: u64,
    written: u64,
    verified: Verified,
}

/// All devices of a machine at a moment.
#[derive(Clone, Debug, Default)]
pub(crate) struct Devices(Vec<Device>);

impl Devices {
    /// Returns the present results, without checking.
    pub(crate) fn of(machine: &Machine) -> Self {
        let device = |device: &Scratch| Device {
            name: device.id().to_string(),
            blocks: device.blocks(),
            written: device.written(),
            verified: device.verified(),
        };
        Self(machine.devices().iter().map(|this| device(this)).collect())
    }

    /// Checks all blocks, and returns the results.
    pub(crate) fn verified(machine: &Machine) -> Self {
        machine.devices().iter().for_each(|device| device.verify());
        Self::of(machine)
    }

    /// Returns how many blocks they rewrote since `earlier`.
    pub(crate) fn written_since(&self, earlier: &Self) -> u64 {
        let devices = self.0.iter().zip(&earlier.0);
        devices.map(|(now, then)| now.written.saturating_sub(then.written)).sum()
    }

    /// Returns whether each has written a block since.
    pub(crate) fn all_wrote(&self, machine: &Machine) -> bool {
        machine.devices().iter().zip(&self.0).all(|(now, then)| now.written() != then.written)
    }

    /// Returns the number of wrong blocks.
    pub(crate) fn wrong(&self) -> u64 {
        self.0.iter().map(|device| device.verified.wrong).sum()
    }

    /// Returns the results as text, unless no block was checked.
    pub(crate) fn text(&self) -> Option<String> {
        let looked_at: u64 = self.0.iter().map(|device| device.verified.blocks).sum();
        let (first, count) = (self.0.first().filter(|_| looked_at > 0)?, self.0.len());
        let wrong = match self.0.iter().find_map(|device| Some((&device.name, device.verified.first?))) {
            Some((name, first)) => format!("{} wrong, the first: of {name} {first}", self.wrong()),
            None => "none wrong".to_owned(),
        };
        let size = format_bytes(first.blocks as f64 * 4096.0);
        let devices = if count == 1 { format!("1 device of {size}") } else { format!("{count} devices of {size}") };
        Some(format!("{devices}: {looked_at} blocks verified, {wrong}"))
    }

    /// Returns the results as JSON.
    pub(crate) fn json(&self) -> Value {
        let device = |Device { name, blocks, written, verified }: &Device| {
            json!({
                "device": name,
                "blocks": blocks,
                "written": written,
                "verified": verified.blocks,
                "wrong": verified.wrong,
                "first_wrong": verified.first.map(|first| first.to_string()),
            })
        };
        self.0.iter().map(device).collect()
    }

    /// Returns one device of 1 MiB with this result.
    #[cfg(test)]
    pub(crate) fn with(verified: Verified) -> Self {
        Self(vec![Device { name: "scratch/0".to_owned(), blocks: 256, written: 0, verified }])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sterna_microvm::Fault;
    use sterna_microvm::scratch::WrongBlock;

    #[test]
    fn results_are_shown_as_text_and_json() {
        let text = |verified| Devices::with(verified).text();
        assert_eq!(text(Verified::default()), None);
        assert_eq!(Devices::default().text(), None);
        let right = Verified { blocks: 300, wrong: 0, first: None };
        assert_eq!(text(right).as_deref(), Some("1 device of 1.00 MiB: 300 blocks verified, none wrong"));
        let first = Some(WrongBlock { block: 7, fault: Fault::Stale { generation: 3 } });
        let wrong = text(Verified { blocks: 300, wrong: 2, first }).expect("text");
        assert!(wrong.ends_with("2 wrong, the first: of scratch/0 block 7 is stale: generation 3"), "{wrong}");
    }
}

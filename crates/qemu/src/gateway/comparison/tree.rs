//! The tree of a QEMU's devices, read from `info qtree`, with a path for each that does not depend on names which an operator gives.
//!
//! The saved state names a device by its place on its bus, not by its id. So a path consists of places: the address on a PCI bus, else the
//! type with the address that the bus has for it (`qdev_print` in QEMU's system/qdev-monitor.c prints both).

use std::collections::{BTreeMap, HashMap};

/// Types that QEMU has twice, in user space and in KVM, with the same saved state.
const TWINS: &[(&str, &str)] = &[("kvm-ioapic", "ioapic"), ("kvm-i8259", "isa-i8259"), ("kvm-pit", "isa-pit")];

/// The property with the device's place on its bus, by type of bus. A SCSI bus has three, a USB bus a line of its own.
const ADDRESSES: &[&str] = &["unit", USB_PORT, "iobase", "address", "nr", "nsid"];
/// Our name for the port in the line that QEMU prints for a USB device.
const USB_PORT: &str = "usb port";

/// A device.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Device {
    /// Where it is.
    pub(super) path: String,
    /// Its type.
    pub(super) kind: String,
    properties: BTreeMap<String, String>,
}

impl Device {
    /// Returns the value of a property, without quotation marks; none if it is empty.
    pub(super) fn property(&self, name: &str) -> Option<&str> {
        self.properties.get(name).map(|value| value.trim_matches('"')).filter(|value| !value.is_empty())
    }

    /// Returns the value of a property as QEMU shows it, with quotation marks, also of an empty text.
    pub(super) fn shown(&self, name: &str) -> Option<&str> {
        self.properties.get(name).map(String::as_str)
    }

    /// Returns a property that is a number.
    pub(super) fn number(&self, name: &str) -> Option<u64> {
        // `vectors = 2 (0x2)`
        self.property(name)?.split(' ').next()?.parse().ok()
    }
}

/// A device before it has a path.
#[derive(Default)]
struct Node {
    kind: String,
    properties: BTreeMap<String, String>,
    buses: Vec<Vec<Node>>,
}

type Lines<'a> = std::iter::Peekable<std::vec::IntoIter<(usize, &'a str)>>;

/// Returns all devices in the output of `info qtree`.
pub(super) fn devices(text: &str) -> Vec<Device> {
    let indented = |line: &'_ str| line.len() - line.trim_start().len();
    let lines: Vec<_> = text.lines().map(|line| (indented(line), line.trim())).collect();
    let mut lines = lines.into_iter().peekable();
    let mut found = Vec::new();
    while let Some((indent, line)) = lines.next() {
        if line.starts_with("bus: ") {
            list(bus(&mut lines, indent), "", &mut found);
        }
    }
    found
}

fn bus(lines: &mut Lines<'_>, indent: usize) -> Vec<Node> {
    let mut nodes = Vec::new();
    while let Some((inner, line)) = lines.next_if(|(inner, _)| *inner > indent) {
        if let Some(device) = line.strip_prefix("dev: ") {
            nodes.push(node(lines, inner, device.split(',').next().unwrap_or(device)));
        }
    }
    nodes
}

fn node(lines: &mut Lines<'_>, indent: usize, kind: &str) -> Node {
    let kind = TWINS.iter().find(|(twin, _)| *twin == kind).map_or(kind, |(_, name)| name);
    let mut node = Node { kind: kind.to_owned(), ..Node::default() };
    while let Some((inner, line)) = lines.next_if(|(inner, _)| *inner > indent) {
        if line.starts_with("bus: ") {
            let bus = bus(lines, inner);
            node.buses.push(bus);
        } else if let Some((name, value)) = line.split_once(" = ") {
            node.properties.entry(name.to_owned()).or_insert_with(|| value.to_owned());
        } else if let Some((_, port)) = line.split_once(", port ") {
            // `addr 0.0, port 1, speed 480, name QEMU USB Tablet, attached`
            let port = port.split(',').next().unwrap_or(port);
            node.properties.insert(USB_PORT.to_owned(), port.to_owned());
        }
    }
    node
}

/// Lists the devices of a bus, whose path is `parent`, and of those below it.
fn list(bus: Vec<Node>, parent: &str, found: &mut Vec<Device>) {
    let mut times: HashMap<String, usize> = HashMap::new();
    for Node { kind, properties, buses } in bus {
        let mut place = place(&kind, &properties);
        let seen = times.entry(place.clone()).or_default();
        if *seen > 0 {
            place = format!("{place}#{seen}");
        }
        *seen += 1;
        let path = if parent.is_empty() { place } else { format!("{parent}/{place}") };
        found.push(Device { path: path.clone(), kind, properties });
        let count = buses.len();
        for (at, bus) in buses.into_iter().enumerate() {
            // QEMU lists the newest bus first.
            let inner = if count > 1 { format!("{path}/bus{}", count - 1 - at) } else { path.clone() };
            list(bus, &inner, found);
        }
    }
}

/// Returns the place of a device on its bus.
fn place(kind: &str, properties: &BTreeMap<String, String>) -> String {
    let word = |name: &str| properties.get(name)?.split(' ').next().map(|word| word.trim_matches('"'));
    // Of all devices only those on a PCI bus have this property.
    if let Some(address) = word("addr") {
        return address.to_owned();
    }
    if let (Some(channel), Some(id), Some(lun)) = (word("channel"), word("scsi-id"), word("lun")) {
        return format!("{kind}@{channel}.{id}.{lun}");
    }
    match ADDRESSES.iter().find_map(|name| word(name)) {
        Some(address) => format!("{kind}@{address}"),
        None => kind.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TREE: &str = r#"bus: main-system-bus
  type System
  dev: hpet, id ""
    timers = 3 (0x3)
  dev: kvm-ioapic, id ""
    gsi_base = 0 (0x0)
  dev: q35-pcihost, id ""
    bus: pcie.0
      type PCIE
      dev: qemu-xhci, id "usb"
        addr = 04.0
        bus: usb.0
          type usb-bus
          dev: usb-tablet, id ""
            port = ""
            addr 0.0, port 1, speed 480, name QEMU USB Tablet, attached
      dev: virtio-blk-pci, id "disk"
        vectors = 17 (0x11)
        addr = 01.0
        class SCSI controller, addr 00:01.0, pci id 1af4:1042 (sub 1af4:1100)
        bus: virtio-bus
          type virtio-pci-bus
          dev: virtio-blk-device, id ""
            drive = "d0"
            serial = ""
      dev: ich9-ahci, id ""
        addr = 1f.2
        bus: ide.1
          type IDE
        bus: ide.0
          type IDE
          dev: ide-hd, id ""
            drive = "d1"
            unit = 0 (0x0)
      dev: ICH9-SMB, id ""
        addr = 1f.3
        bus: i2c
          type i2c-bus
          dev: smbus-eeprom, id ""
            address = 87 (0x57)
  dev: virtio-mmio, id ""
  dev: virtio-mmio, id ""
"#;

    #[test]
    fn a_device_has_a_path_of_places_and_not_of_names() {
        let found = devices(TREE);
        let paths: Vec<_> = found.iter().map(|device| (device.path.as_str(), device.kind.as_str())).collect();
        assert_eq!(
            paths,
            [
                ("hpet", "hpet"),
                ("ioapic", "ioapic"),
                ("q35-pcihost", "q35-pcihost"),
                ("q35-pcihost/04.0", "qemu-xhci"),
                ("q35-pcihost/04.0/usb-tablet@1", "usb-tablet"),
                ("q35-pcihost/01.0", "virtio-blk-pci"),
                ("q35-pcihost/01.0/virtio-blk-device", "virtio-blk-device"),
                ("q35-pcihost/1f.2", "ich9-ahci"),
                ("q35-pcihost/1f.2/bus0/ide-hd@0", "ide-hd"),
                ("q35-pcihost/1f.3", "ICH9-SMB"),
                ("q35-pcihost/1f.3/smbus-eeprom@87", "smbus-eeprom"),
                ("virtio-mmio", "virtio-mmio"),
                ("virtio-mmio#1", "virtio-mmio"),
            ]
        );
        assert_eq!(found[5].number("vectors"), Some(17));
        assert_eq!((found[6].property("drive"), found[6].property("serial")), (Some("d0"), None));
        let renamed = TREE.replace("usb.0", "x.0").replace("\"disk\"", "\"vda\"").replace("pcie.0", "p");
        assert_eq!(devices(&renamed), found);
        assert_eq!(devices(""), []);
    }
}

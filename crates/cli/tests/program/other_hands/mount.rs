//! The guest mounts a directory of the host by 9p, as far as QEMU is concerned: its device gets the two requests with which a mount begins.
//!
//! The requests come from outside the guest, by QEMU's protocol for tests of devices (`-qtest`, docs/devel/testing/qtest.rst): they are the port
//! accesses of a driver for a legacy virtio device (virtio 1.2, 4.1.4.8 and 2.7.2). The layout of the queue and the requests is in memory that
//! neither the firmware nor the guest uses.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use crate::support::LONG;

/// The number of the PCI slot.
const SLOT: u32 = 5;
/// Ports of PCI configuration mechanism 1.
const CONFIG_ADDRESS: u16 = 0xcf8;
const CONFIG_DATA: u16 = 0xcfc;
/// Guest-physical addresses of the queue, of a request and of the answer.
const QUEUE: u64 = 0x6_0000;
const REQUEST: u64 = 0x6_2000;
const ANSWER: u64 = 0x6_3000;
const PAGE: u64 = 4096;
/// Types of 9P2000.L requests; the answer has the next number.
const VERSION: u8 = 100;
const ATTACH: u8 = 104;

/// Returns QEMU's words for the device and its directory.
pub(super) fn device(directory: &Path) -> [String; 4] {
    let fsdev = format!("local,id=share,path={},security_model=none", directory.display());
    let device = format!("virtio-9p-pci,id=share0,fsdev=share,mount_tag=share,addr={SLOT:#x},disable-modern=on");
    ["-fsdev".into(), fsdev, "-device".into(), device]
}

/// Returns the words for the socket, which only the source has.
pub(super) fn socket(path: &Path) -> [String; 4] {
    let socket = format!("unix:{},server=on,wait=off", path.display());
    ["-qtest".into(), socket, "-qtest-log".into(), "/dev/null".into()]
}

/// The driver of the device.
pub(super) struct Driver {
    lines: BufReader<UnixStream>,
    /// The first port of the device.
    ports: u16,
}

impl Driver {
    pub(super) fn connect(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        let mut driver = Self { lines: BufReader::new(stream), ports: 0 };
        let bar = driver.configuration(0x10);
        driver.ports = u16::try_from(bar & !3).expect("the device has ports");
        driver
    }

    fn command(&mut self, command: &str) -> u64 {
        self.lines.get_mut().write_all(format!("{command}\n").as_bytes()).unwrap();
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        let answer = line.trim().strip_prefix("OK").unwrap_or_else(|| panic!("{command}: {line}"));
        answer.trim().strip_prefix("0x").map_or(0, |number| u64::from_str_radix(number, 16).unwrap())
    }

    /// Selects a register of the device's PCI configuration, and reads it.
    fn configuration(&mut self, register: u32) -> u64 {
        self.command(&format!("outl {CONFIG_ADDRESS:#x} {:#x}", 0x8000_0000 | SLOT << 11 | register));
        self.command(&format!("inl {CONFIG_DATA:#x}"))
    }

    fn out(&mut self, width: char, register: u16, value: u64) {
        self.command(&format!("out{width} {:#x} {value:#x}", self.ports + register));
    }

    fn write(&mut self, address: u64, bytes: &[u8]) {
        let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        self.command(&format!("write {address:#x} {} 0x{digits}", bytes.len()));
    }

    /// Mounts the directory.
    ///
    /// # Errors
    /// QEMU refuses the mount, as it does while it migrates the guest.
    pub(super) fn mount(&mut self) -> Result<(), String> {
        let command = self.configuration(4);
        // I/O space, and bus master.
        self.command(&format!("outl {CONFIG_DATA:#x} {:#x}", command & 0xffff | 5));
        // A reset; then the driver is there and knows the device.
        self.unmount();
        self.out('b', 18, 3);
        self.out('w', 14, 0);
        let entries = self.command(&format!("inw {:#x}", self.ports + 12));
        self.out('l', 8, QUEUE / PAGE);
        self.out('b', 18, 7);
        let text = |text: &str| [&(text.len() as u16).to_le_bytes(), text.as_bytes()].concat();
        let number = u32::to_le_bytes;
        let version = [number(4096).to_vec(), text("9P2000.L")].concat();
        self.request(entries, 0, VERSION, u16::MAX, &version)?;
        // File 0, without authentication, for no name of a user or tree, by user 0.
        let attach = [number(0).to_vec(), number(u32::MAX).to_vec(), text(""), text(""), number(0).to_vec()].concat();
        self.request(entries, 1, ATTACH, 1, &attach)
    }

    /// Resets the device, which ends the mount.
    pub(super) fn unmount(&mut self) {
        self.out('b', 18, 0);
    }

    /// Sends the request `index` of the queue, and waits for its answer.
    fn request(&mut self, entries: u64, index: u16, kind: u8, tag: u16, body: &[u8]) -> Result<(), String> {
        let length = 7 + body.len() as u32;
        let request = [&length.to_le_bytes()[..], &[kind], &tag.to_le_bytes(), body].concat();
        self.write(REQUEST, &request);
        // Two descriptors: the request, and where the answer is to be written.
        let descriptor = |address: u64, length: u32, flags: u16, next: u16| {
            [&address.to_le_bytes()[..], &length.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()].concat()
        };
        let descriptors = [descriptor(REQUEST, length, 1, 1), descriptor(ANSWER, PAGE as u32, 2, 0)].concat();
        self.write(QUEUE, &descriptors);
        let available = QUEUE + 16 * entries;
        let used = (available + 6 + 2 * entries).next_multiple_of(PAGE);
        self.write(available + 4 + 2 * u64::from(index), &[0, 0]);
        self.write(available + 2, &(index + 1).to_le_bytes());
        self.out('w', 16, 0);
        super::machine::wait("an answer of the 9p device", || {
            self.command(&format!("readw {:#x}", used + 2)) == u64::from(index + 1)
        });
        let answered = self.command(&format!("readb {:#x}", ANSWER + 4));
        if answered == u64::from(kind + 1) {
            Ok(())
        } else {
            Err(format!("the 9p device answers a request of type {kind} with one of type {answered}"))
        }
    }
}

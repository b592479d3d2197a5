//! The smallest guest: one boot sector that adds one to the first word of every page from 1 MiB to 100 MiB, again and
//! again, and writes a letter on the serial line after each pass (`A` once all are zero, then `B`).
//!
//! Between two passes, which take 5 ms of a CPU, it rests for up to 55 ms: many tests wait beside it. It writes 1.8 GB/s of pages all the same.
//!
//! It runs within milliseconds of the firmware, also under a KVM that runs no Linux. At any instant its counters are all
//! equal, or the first ones are ahead by one: a page that a migration lost or set back breaks that, and [`check`] finds it.
//!
//! Before each page it looks at a word that is otherwise zero: an [`End`] that is written there from outside makes it end by itself, a [`Task`]
//! makes it leave its passes for good.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};

use rustix::fs::{MemfdFlags, memfd_create};

use crate::Error;
use crate::ram::Ram;

/// The first page that it writes, in bytes.
pub const START: u64 = 1 << 20;
/// The end of the pages that it writes, in bytes.
pub const END: u64 = 100 << 20;

const PAGE: u64 = 4096;

/// The address of the word that makes the guest end.
const REQUEST: u64 = 0x7df8;

/// How the guest can end by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It switches the machine off, by ACPI: SLP_EN of the register PM1a_CNT, which firmware puts at port 0x604 (PMBASE 0x600).
    PowerOff,
    /// It resets the machine, by port 0xcf9 of the ICH9.
    Reset,
    /// It reports a panic to the machine, by the port of the device `pvpanic`, which the machine must have.
    Panic,
}

impl End {
    /// Returns the word: the port, and the value that is written to it.
    fn request(self) -> u32 {
        let (port, value): (u16, u16) = match self {
            Self::PowerOff => (0x604, 1 << 13),
            Self::Reset => (0xcf9, 6),
            Self::Panic => (0x505, 1),
        };
        u32::from(value) << 16 | u32::from(port)
    }
}

/// What the guest can do for good in the place of its passes, without handlers of interrupts and faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// It executes the instruction MOVBE again and again. A CPU that lacks the feature resets the machine, by a triple fault.
    UseMovbe = 1,
    /// It waits for an interrupt, with interrupts off.
    Halt = 2,
}

/// The addresses of the instructions that the guest executes once it has begun any [`Task`], up to the end of the last one.
pub const TASKS: std::ops::Range<u64> = 0x7cc7..0x7cdb;

/// Makes the guest in this RAM, which runs or will, leave its passes for `task`.
///
/// # Errors
/// As [`Ram::write`].
pub fn begin(ram: &Ram, task: Task) -> Result<(), Error> {
    ram.write(REQUEST, &(task as u32).to_le_bytes())
}

/// Makes the guest in this RAM, which runs or will, end by itself before it writes another page.
///
/// # Errors
/// As [`Ram::write`].
pub fn end(ram: &Ram, end: End) -> Result<(), Error> {
    ram.write(REQUEST, &end.request().to_le_bytes())
}

/// The machine code, loaded and started at 0x7c00 in 16-bit mode.
#[rustfmt::skip]
const CODE: [u8; 0xe1] = [
    // 7c00, 16-bit.
    0xfa,                               // cli
    0x31, 0xc0,                         // xor ax, ax
    0x8e, 0xd8,                         // mov ds, ax
    // A20 by port 0x92, without its bit 0, which resets the machine.
    0xe4, 0x92,                         // in al, 0x92
    0x0c, 0x02,                         // or al, 2
    0x24, 0xfe,                         // and al, 0xfe
    0xe6, 0x92,                         // out 0x92, al
    0x0f, 0x01, 0x16, 0xa8, 0x7c,       // lgdt [0x7ca8]
    0x0f, 0x20, 0xc0,                   // mov eax, cr0
    0x66, 0x83, 0xc8, 0x01,             // or eax, 1
    0x0f, 0x22, 0xc0,                   // mov cr0, eax
    0xea, 0x21, 0x7c, 0x08, 0x00,       // jmp 0x08:0x7c21
    // 7c21, 32-bit, flat, with a stack below the code.
    0x66, 0xb8, 0x10, 0x00,             // mov ax, 0x10
    0x8e, 0xd8,                         // mov ds, ax
    0x8e, 0xd0,                         // mov ss, ax
    0xbc, 0x00, 0x7c, 0x00, 0x00,       // mov esp, 0x7c00
    // Of interrupts only the timer's, at which firmware leaves it: 18.2 times a second, as interrupt 8.
    0x0f, 0x01, 0x1d, 0xae, 0x7c, 0x00, 0x00,// lidt [0x7cae]
    0xb0, 0xfe,                         // mov al, 0xfe
    0xe6, 0x21,                         // out 0x21, al
    // The firmware may have used this memory: all counters to zero.
    0xb8, 0x00, 0x00, 0x10, 0x00,       // mov eax, 0x100000
    0xc7, 0x00, 0x00, 0x00, 0x00, 0x00, // 7c3e: mov dword [eax], 0
    0x05, 0x00, 0x10, 0x00, 0x00,       // add eax, 0x1000
    0x3d, 0x00, 0x00, 0x40, 0x06,       // cmp eax, 0x6400000
    0x72, 0xee,                         // jb 0x7c3e
    0xb3, b'A',                         // mov bl, 'A'
    // 7c52: the letter, a rest up to the timer's next interrupt, then a pass.
    0x66, 0xba, 0xf8, 0x03,             // mov dx, 0x3f8
    0x88, 0xd8,                         // mov al, bl
    0xee,                               // out dx, al
    0xb3, b'B',                         // mov bl, 'B'
    0xfb,                               // sti
    0xf4,                               // hlt
    0xfa,                               // cli
    0xb8, 0x00, 0x00, 0x10, 0x00,       // mov eax, 0x100000
    // 7c63: has the guest to end?
    0x83, 0x3d, 0xf8, 0x7d, 0x00, 0x00, 0x00,// cmp dword [0x7df8], 0
    0x75, 0x50,                         // jne 0x7cbc
    0xff, 0x00,                         // inc dword [eax]
    0x05, 0x00, 0x10, 0x00, 0x00,       // add eax, 0x1000
    0x3d, 0x00, 0x00, 0x40, 0x06,       // cmp eax, 0x6400000
    0x72, 0xe9,                         // jb 0x7c63
    0xeb, 0xd6,                         // jmp 0x7c52
    // 7c7c: the port and the value.
    0xa1, 0xf8, 0x7d, 0x00, 0x00,       // mov eax, [0x7df8]
    0x89, 0xc2,                         // mov edx, eax
    0xc1, 0xe8, 0x10,                   // shr eax, 16
    0x66, 0xef,                         // out dx, ax
    0xeb, 0xfe,                         // jmp 0x7c88
    // 7c8a, the timer's interrupt: acknowledged. Nothing needs eax where interrupts are on.
    0xb0, 0x20,                         // mov al, 0x20
    0xe6, 0x20,                         // out 0x20, al
    0xcf,                               // iret
    0x90,                               // up to 7c90
    // 7c90, the segments: none, 4 GiB of code, 4 GiB of data.
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0xff, 0xff, 0x00, 0x00, 0x00, 0x9a, 0xcf, 0x00,
    0xff, 0xff, 0x00, 0x00, 0x00, 0x92, 0xcf, 0x00,
    // 7ca8: their size less one and their place.
    0x17, 0x00, 0x90, 0x7c, 0x00, 0x00,
    // 7cae, of interrupts: the size less one of the table of nine, and its place, of which only the last entry is one. 7cb4, that entry.
    0x47, 0x00, 0x74, 0x7c, 0x00, 0x00,
    0x8a, 0x7c, 0x08, 0x00, 0x00, 0x8e, 0x00, 0x00,
    // 7cbc: a task, or an end?
    0xa1, 0xf8, 0x7d, 0x00, 0x00,       // mov eax, [0x7df8]
    0x48,                               // dec eax
    0x74, 0x06,                         // jz 0x7cca
    0x48,                               // dec eax
    0x75, 0xb5,                         // jnz 0x7c7c
    // 7cc7: interrupts are off.
    0xf4,                               // hlt
    0xeb, 0xfd,                         // jmp 0x7cc7
    // 7cca: without a table of interrupts, a fault becomes a triple fault.
    0x0f, 0x01, 0x1d, 0xdb, 0x7c, 0x00, 0x00,// lidt [0x7cdb]
    0x0f, 0x38, 0xf0, 0x05, 0x00, 0x00, 0x10, 0x00,// 7cd1: movbe eax, [0x100000]
    0xeb, 0xf6,                         // jmp 0x7cd1
    // 7cdb, no interrupts.
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
];

/// The 512 bytes, with the signature that firmware requires.
#[must_use]
pub fn image() -> [u8; 512] {
    let mut image = [0; 512];
    image[..CODE.len()].copy_from_slice(&CODE);
    image[510..].copy_from_slice(&[0x55, 0xaa]);
    image
}

/// Returns the disk with the boot sector, in memory: one for all QEMUs of this process, as source and destination have one. The guest does not
/// write it. A disk smaller than one cylinder (504 KiB) has no geometry, and firmware refuses it.
pub(crate) fn disk() -> std::io::Result<OwnedFd> {
    static DISK: Mutex<Option<File>> = Mutex::new(None);
    let mut disk = DISK.lock().unwrap_or_else(PoisonError::into_inner);
    if disk.is_none() {
        let mut new = File::from(memfd_create("sterna-boot-sector", MemfdFlags::CLOEXEC)?);
        new.write_all(&image())?;
        new.set_len(1 << 20)?;
        *disk = Some(new);
    }
    disk.as_ref().expect("just made").try_clone().map(OwnedFd::from)
}

/// Checks the counters of a stopped machine's RAM and returns the first one, which is the number of passes begun.
///
/// # Errors
/// [`Error::Guest`] with the page where the counters are not as the guest leaves them.
pub fn check(ram: &Ram) -> Result<u32, Error> {
    let counter = |address: u64| -> Result<u32, Error> {
        let mut word = [0; 4];
        ram.read(address, &mut word)?;
        Ok(u32::from_le_bytes(word))
    };
    let first = counter(START)?;
    let mut last = first;
    for address in (START..END).step_by(PAGE as usize) {
        let found = counter(address)?;
        // At most one step down: the present pass has come this far.
        let one_step = last == first && last.checked_sub(1) == Some(found);
        if found != last && !one_step {
            return Err(Error::Guest(format!(
                "page at {address:#x} counts {found}, the pages before it {last}, the first {first}"
            )));
        }
        last = found;
    }
    Ok(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_image_is_a_boot_sector() {
        let image = image();
        assert_eq!(image[510..], [0x55, 0xaa]);
        assert_eq!(image[..CODE.len()], CODE);
    }

    #[test]
    fn jumps_and_addresses_meet_their_targets() {
        let at = |address: usize| &CODE[address - 0x7c00..];
        assert_eq!(at(0x7c21)[..4], [0x66, 0xb8, 0x10, 0x00]);
        assert_eq!(at(0x7c7c)[..5], [0xa1, 0xf8, 0x7d, 0x00, 0x00]);
        assert_eq!(at(0x7ca8)[..4], [0x17, 0x00, 0x90, 0x7c]);
        // Entry 8 of the table of interrupts, and the handler that it names.
        assert_eq!(at(0x7cae)[..4], [0x47, 0x00, 0x74, 0x7c]);
        assert_eq!(0x7c74 + 8 * 8, 0x7cb4);
        assert_eq!((at(0x7cb4)[..2].to_vec(), at(0x7c8a)[..2].to_vec()), (vec![0x8a, 0x7c], vec![0xb0, 0x20]));
        assert_eq!(at(0x7cca)[3..7], 0x7cdb_u32.to_le_bytes());
        let jumps = [
            (0x7c4e, 0x7c3e),
            (0x7c6a, 0x7cbc),
            (0x7c78, 0x7c63),
            (0x7c7a, 0x7c52),
            (0x7c88, 0x7c88),
            (0x7cc2, 0x7cca),
            (0x7cc5, 0x7c7c),
            (0x7cc8, 0x7cc7),
            (0x7cd9, 0x7cd1),
        ];
        for (jump, target) in jumps {
            let distance = at(jump)[1] as i8;
            assert_eq!(jump as isize + 2 + isize::from(distance), target, "jump at {jump:#x}");
        }
    }
}

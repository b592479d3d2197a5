//! A guest of one boot sector that writes numbered records to its disk, and names each number on the serial line once the disk has acknowledged
//! the write. So a test knows which writes must be on the disk, whatever was done to the guest and its QEMU in between.
//!
//! It runs in the firmware's 16-bit mode, and uses the disk that it was loaded from by the firmware (int 13h). Its lines are a letter and eight
//! hexadecimal digits: `a` after an acknowledged write, `w` after one that failed and is tried again, and `r` if the last record is not read
//! back. When it boots, it goes on after the greatest number on the disk. A byte `o` on the serial line makes it switch the machine off.

use std::ops::Range;

use crate::Error;

/// Bytes of a sector, each of which has one record.
const SECTOR: usize = 512;
/// The sectors with records: record n is in the sector 1 + n mod 64.
const SLOTS: u32 = 64;
/// The bytes of the disk with records.
pub const RECORDS: Range<usize> = SECTOR..SECTOR * (1 + SLOTS as usize);
/// The first word of a record. The number follows, and its complement.
const MAGIC: u32 = u32::from_le_bytes(*b"STER");

/// The machine code, loaded and started at 0x7c00.
#[rustfmt::skip]
const CODE: [u8; 0xf0] = [
    // 7c00, 16-bit: a stack below the code.
    0xfa,                                               // cli
    0x31, 0xc0,                                         // xor ax,ax
    0x8e, 0xd8,                                         // mov ds,ax
    0x8e, 0xc0,                                         // mov es,ax
    0x8e, 0xd0,                                         // mov ss,ax
    0xbc, 0x00, 0x7c,                                   // mov sp,0x7c00
    0xfb,                                               // sti
    0xfc,                                               // cld
    // The greatest number on the disk: the guest may have been reset. ebp is the last number.
    0x66, 0x31, 0xed,                                   // xor ebp,ebp
    0xc7, 0x06, 0xe8, 0x7c, 0x01, 0x00,                 // mov WORD PTR ds:0x7ce8,0x1
    // 7c17: the next sector. An error of the disk is tried again for ever.
    0xb4, 0x42,                                         // mov ah,0x42
    0xe8, 0x90, 0x00,                                   // call 0x7cac
    0x72, 0xf9,                                         // jb 0x7c17
    0x66, 0x81, 0x3e, 0x00, 0x80, 0x53, 0x54, 0x45, 0x52,// cmp DWORD PTR ds:0x8000,0x52455453
    0x75, 0x0c,                                         // jne 0x7c35
    0x66, 0xa1, 0x04, 0x80,                             // mov eax,ds:0x8004
    0x66, 0x39, 0xe8,                                   // cmp eax,ebp
    0x76, 0x03,                                         // jbe 0x7c35
    0x66, 0x89, 0xc5,                                   // mov ebp,eax
    0xff, 0x06, 0xe8, 0x7c,                             // inc WORD PTR ds:0x7ce8
    0x83, 0x3e, 0xe8, 0x7c, 0x41,                       // cmp WORD PTR ds:0x7ce8,0x41
    0x72, 0xd7,                                         // jb 0x7c17
    // 7c40: the last record must be on the disk.
    0xe8, 0x5f, 0x00,                                   // call 0x7ca2
    0xb4, 0x42,                                         // mov ah,0x42
    0xe8, 0x64, 0x00,                                   // call 0x7cac
    0x72, 0x51,                                         // jb 0x7c9b
    0x66, 0x39, 0x2e, 0x04, 0x80,                       // cmp DWORD PTR ds:0x8004,ebp
    0x75, 0x4a,                                         // jne 0x7c9b
    // The next record.
    0x66, 0x45,                                         // inc ebp
    0xe8, 0x4c, 0x00,                                   // call 0x7ca2
    0x66, 0xc7, 0x06, 0x00, 0x80, 0x53, 0x54, 0x45, 0x52,// mov DWORD PTR ds:0x8000,0x52455453
    0x66, 0x89, 0x2e, 0x04, 0x80,                       // mov DWORD PTR ds:0x8004,ebp
    0x66, 0x89, 0xe8,                                   // mov eax,ebp
    0x66, 0xf7, 0xd0,                                   // not eax
    0x66, 0xa3, 0x08, 0x80,                             // mov ds:0x8008,eax
    // 7c6e: written, which is the acknowledgement.
    0xb8, 0x00, 0x43,                                   // mov ax,0x4300
    0xe8, 0x38, 0x00,                                   // call 0x7cac
    0x72, 0x1e,                                         // jb 0x7c94
    // It is reported.
    0xb0, 0x61,                                         // mov al,0x61
    0xe8, 0x43, 0x00,                                   // call 0x7cbe
    // A byte on the serial line?
    0xba, 0xfd, 0x03,                                   // mov dx,0x3fd
    0xec,                                               // in al,dx
    0xa8, 0x01,                                         // test al,0x1
    0x74, 0xbd,                                         // je 0x7c40
    0xba, 0xf8, 0x03,                                   // mov dx,0x3f8
    0xec,                                               // in al,dx
    0x3c, 0x6f,                                         // cmp al,0x6f
    0x75, 0xb5,                                         // jne 0x7c40
    // ACPI's power off, where SeaBIOS puts a q35's PM1a_CNT: SLP_EN and the type of S5.
    0xba, 0x04, 0x06,                                   // mov dx,0x604
    0xb8, 0x00, 0x20,                                   // mov ax,0x2000
    0xef,                                               // out dx,ax
    0xeb, 0xac,                                         // jmp 0x7c40
    // 7c94: the write failed: it is reported and tried again.
    0xb0, 0x77,                                         // mov al,0x77
    0xe8, 0x25, 0x00,                                   // call 0x7cbe
    0xeb, 0xd3,                                         // jmp 0x7c6e
    // 7c9b: the record is not there.
    0xb0, 0x72,                                         // mov al,0x72
    0xe8, 0x1e, 0x00,                                   // call 0x7cbe
    0xeb, 0x9e,                                         // jmp 0x7c40
    // 7ca2, slot: the sector of the number.
    0x89, 0xe8,                                         // mov ax,bp
    0x83, 0xe0, 0x3f,                                   // and ax,0x3f
    0x40,                                               // inc ax
    0xa3, 0xe8, 0x7c,                                   // mov ds:0x7ce8,ax
    0xc3,                                               // ret
    // 7cac, disk: executes command ah at the sector.
    0x66, 0x55,                                         // push ebp
    0xc7, 0x06, 0xe2, 0x7c, 0x01, 0x00,                 // mov WORD PTR ds:0x7ce2,0x1
    0xb2, 0x80,                                         // mov dl,0x80
    0xbe, 0xe0, 0x7c,                                   // mov si,0x7ce0
    0xcd, 0x13,                                         // int 0x13
    0x66, 0x5d,                                         // pop ebp
    0xc3,                                               // ret
    // 7cbe, line: the letter in al, ebp as eight digits, and a line end.
    0xba, 0xf8, 0x03,                                   // mov dx,0x3f8
    0xee,                                               // out dx,al
    0x66, 0x89, 0xeb,                                   // mov ebx,ebp
    0xb9, 0x08, 0x00,                                   // mov cx,0x8
    0x66, 0xc1, 0xc3, 0x04,                             // rol ebx,0x4
    0x88, 0xd8,                                         // mov al,bl
    0x24, 0x0f,                                         // and al,0xf
    0x04, 0x30,                                         // add al,0x30
    0x3c, 0x39,                                         // cmp al,0x39
    0x76, 0x02,                                         // jbe 0x7cd8
    0x04, 0x27,                                         // add al,0x27
    0xee,                                               // out dx,al
    0xe2, 0xed,                                         // loop 0x7cc8
    0xb0, 0x0a,                                         // mov al,0xa
    0xee,                                               // out dx,al
    0xc3,                                               // ret
    0x90,                                           // up to 7ce0
    // 7ce0, the packet of the disk's command: its length, 1 sector, the buffer at 0:8000, the sector.
    0x10, 0x00, 0x01, 0x00, 0x00, 0x80, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
];

/// Returns the content of a disk of `bytes` with the boot sector and no record.
///
/// # Panics
/// If the disk is smaller than one cylinder (504 KiB), which the firmware refuses.
#[must_use]
pub fn disk(bytes: usize) -> Vec<u8> {
    assert!(bytes >= 504 << 10, "such a disk has no geometry");
    let mut disk = vec![0; bytes];
    disk[..CODE.len()].copy_from_slice(&CODE);
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    disk
}

/// Returns the greatest number that the lines acknowledge; 0 if there is none.
///
/// # Errors
/// [`Error::Guest`] if the guest could not write or read back a record.
pub fn acknowledged<'a>(lines: impl IntoIterator<Item = &'a str>) -> Result<u32, Error> {
    let mut greatest = 0;
    for line in lines {
        // A reset may cut a line short, which is then the beginning of the next one.
        let Some((letter, digits)) = line.split_at_checked(1).filter(|_| line.len() == 9) else { continue };
        let Ok(number) = u32::from_str_radix(digits, 16) else { continue };
        match letter.as_bytes()[0] {
            b'a' => greatest = greatest.max(number),
            b'w' => return Err(Error::Guest(format!("record {number} could not be written"))),
            b'r' => return Err(Error::Guest(format!("record {number} was not read back"))),
            _ => {}
        }
    }
    Ok(greatest)
}

/// Checks that all records up to `last` were written: `records` has the bytes [`RECORDS`] of the disk. Returns the greatest number.
///
/// # Errors
/// [`Error::Guest`] with the records that are missing, and with a sector that is none.
pub fn check(records: &[u8], last: u32) -> Result<u32, Error> {
    let (sectors, rest) = records.as_chunks::<SECTOR>();
    assert!(sectors.len() == SLOTS as usize && rest.is_empty(), "these are all records");
    let (mut missing, mut greatest) = (Vec::new(), 0);
    for (slot, sector) in (0..SLOTS).zip(sectors) {
        let word = |at: usize| u32::from_le_bytes([sector[at], sector[at + 1], sector[at + 2], sector[at + 3]]);
        let [magic, number, complement] = [word(0), word(4), word(8)];
        let empty = [magic, number, complement] == [0; 3];
        if !empty && (magic != MAGIC || complement != !number || number % SLOTS != slot) {
            return Err(Error::Guest(format!(
                "sector {} has no record: {magic:#x} {number} {complement:#x}",
                slot + 1
            )));
        }
        greatest = greatest.max(number);
        // The last record of this slot that was acknowledged.
        let wanted = last.saturating_sub(last.wrapping_sub(slot) % SLOTS);
        missing.extend((number < wanted).then_some((wanted, number)));
    }
    if missing.is_empty() {
        return Ok(greatest);
    }
    Err(Error::Guest(format!("acknowledged records are missing, up to {last}: (record, what is there) {missing:?}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jumps_and_calls_meet_their_targets() {
        let at = |address: usize| &CODE[address - 0x7c00..];
        for (jump, target) in [(0x7c1c, 0x7c17), (0x7c3e, 0x7c17), (0x7c48, 0x7c9b), (0x7c81, 0x7c40), (0x7c99, 0x7c6e)]
        {
            let distance = at(jump)[1] as i8;
            assert_eq!(jump as isize + 2 + isize::from(distance), target, "jump at {jump:#x}");
        }
        for (call, target) in [(0x7c19, 0x7cac), (0x7c40, 0x7ca2), (0x7c53, 0x7ca2), (0x7c78, 0x7cbe)] {
            let distance = i16::from_le_bytes([at(call)[1], at(call)[2]]);
            assert_eq!(call as isize + 3 + isize::from(distance), target, "call at {call:#x}");
        }
    }

    fn records(numbers: impl IntoIterator<Item = u32>) -> Vec<u8> {
        let mut disk = disk(1 << 20);
        for number in numbers {
            let at = SECTOR * (1 + (number % SLOTS) as usize);
            for (word, value) in [MAGIC, number, !number].into_iter().enumerate() {
                disk[at + 4 * word..][..4].copy_from_slice(&value.to_le_bytes());
            }
        }
        disk[RECORDS].to_vec()
    }

    #[test]
    fn a_record_that_was_acknowledged_and_is_missing_is_found_and_one_that_was_not_acknowledged_may_be_there() {
        assert_eq!(check(&records([]), 0).unwrap(), 0);
        assert_eq!(check(&records(1..=200), 199).unwrap(), 200);
        assert_eq!(check(&records(1..=3), 3).unwrap(), 3);
        for (written, acknowledged) in [(0, 1), (199, 200), (136, 200), (63, 64)] {
            let error = check(&records(1..=written), acknowledged).unwrap_err().to_string();
            assert!(error.contains(&format!("({acknowledged}, ")), "{error}");
        }
        let mut torn = records(1..=10);
        torn[SECTOR * 4 + 8] ^= 1;
        assert!(check(&torn, 10).unwrap_err().to_string().contains("sector 5"));
    }

    #[test]
    fn lines_are_acknowledgements_or_errors() {
        assert_eq!(acknowledged(["SeaBIOS", "a00000001", "a0000000f", "", "aa0000008e", "a0000"]).unwrap(), 15);
        for bad in ["w00000010", "r00000010"] {
            assert!(acknowledged(["a0000000f", bad]).unwrap_err().to_string().contains("record 16"));
        }
    }
}

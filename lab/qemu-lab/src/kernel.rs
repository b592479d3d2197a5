//! The guests' kernel, unpacked: QEMU starts the ELF program inside Debian's image directly (PVH), which saves an emulated guest a second of
//! CPU time for each boot.
//!
//! The image's layout is that of Documentation/arch/x86/boot.rst in the kernel's sources (`setup_sects`, `payload_offset`,
//! `payload_length`). Its payload is in LZ4's legacy frame format (lz4_Frame_format.md, "Legacy frame"), which Debian has chosen.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use crate::Error;

/// What a block of a legacy frame unpacks to; the last block to less.
const BLOCK_SIZE: usize = 8 << 20;
const LEGACY_FRAME: [u8; 4] = [0x02, 0x21, 0x4c, 0x18];
const ELF: &[u8] = b"\x7fELF";

/// Returns the path of the program that is packed in the kernel's image at `image`: a file beside the image, made if it is absent or older.
///
/// # Errors
/// [`Error::Io`] if the image is none that can be unpacked, or the file cannot be written.
pub(crate) fn unpacked(image: &Path) -> Result<PathBuf, Error> {
    let program = image.with_extension("elf");
    let changed = |path: &Path| path.metadata().and_then(|metadata| metadata.modified());
    let image_changed = changed(image).map_err(Error::path("reading", image))?;
    if changed(&program).is_ok_and(|program_changed| program_changed >= image_changed) {
        return Ok(program);
    }
    let content = std::fs::read(image).map_err(Error::path("reading", image))?;
    let unpacked = unpack(&content).ok_or_else(|| {
        let reason = "no bzImage with a payload in LZ4's legacy format; remove the directory and run scripts/setup";
        Error::path("unpacking", image)(std::io::Error::other(reason))
    })?;
    let directory = image.parent().unwrap_or(Path::new("."));
    // Several test programs may do this at the same time: each renames a whole file.
    // A QEMU may run as another user.
    let readable = std::fs::Permissions::from_mode(0o644);
    let file = tempfile::Builder::new().permissions(readable).tempfile_in(directory);
    let mut file = file.map_err(Error::path("writing in", directory))?;
    std::io::Write::write_all(&mut file, &unpacked).map_err(Error::path("writing", &program))?;
    file.persist(&program).map_err(|error| Error::path("writing", &program)(error.error))?;
    Ok(program)
}

/// Returns the ELF program in an image; `None` where there is none in the format that is unpacked here.
fn unpack(image: &[u8]) -> Option<Vec<u8>> {
    let number = |at: usize| Some(u32::from_le_bytes(image.get(at..at + 4)?.try_into().ok()?) as usize);
    if image.get(0x202..0x206)? != b"HdrS" {
        return None;
    }
    // Sectors of 512 bytes, of which the boot sector is one more.
    let start = (usize::from(image[0x1f1]) + 1) * 512 + number(0x248)?;
    let payload = image.get(start..start.checked_add(number(0x24c)?)?)?;
    // The build of the kernel appends the unpacked size to the frame.
    let (frame, size) = payload.split_last_chunk::<4>()?;
    let mut blocks = frame.strip_prefix(&LEGACY_FRAME)?;
    let mut program = Vec::new();
    while let Some((length, rest)) = blocks.split_first_chunk::<4>() {
        let (block, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        program.extend_from_slice(&lz4_flex::block::decompress(block, BLOCK_SIZE).ok()?);
        blocks = rest;
    }
    (program.len() == u32::from_le_bytes(*size) as usize && program.starts_with(ELF)).then_some(program)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An image whose program is `program`, with one sector of set-up and the payload 8 bytes into what follows it.
    fn image(program: &[u8]) -> Vec<u8> {
        let mut payload = LEGACY_FRAME.to_vec();
        for block in program.chunks(BLOCK_SIZE) {
            let block = lz4_flex::block::compress(block);
            payload.extend_from_slice(&(block.len() as u32).to_le_bytes());
            payload.extend_from_slice(&block);
        }
        payload.extend_from_slice(&(program.len() as u32).to_le_bytes());
        let mut image = vec![0; 1024 + 8];
        image[0x1f1] = 1;
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x248..0x24c].copy_from_slice(&8u32.to_le_bytes());
        image[0x24c..0x250].copy_from_slice(&(payload.len() as u32).to_le_bytes());
        image.extend_from_slice(&payload);
        image.extend_from_slice(b"what follows the payload");
        image
    }

    #[test]
    fn a_program_of_several_blocks_is_unpacked_beside_its_image_once() {
        let program: Vec<u8> = ELF.iter().copied().chain((0..BLOCK_SIZE + 5).map(|at| (at / 7) as u8)).collect();
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vmlinuz");
        std::fs::write(&path, image(&program)).unwrap();
        let unpacked_at = unpacked(&path).unwrap();
        assert_eq!(unpacked_at, directory.path().join("vmlinuz.elf"));
        assert!(std::fs::read(&unpacked_at).unwrap() == program);
        // The second time, only what is there counts.
        std::fs::write(&unpacked_at, b"as it was").unwrap();
        unpacked(&path).unwrap();
        assert_eq!(std::fs::read(&unpacked_at).unwrap(), b"as it was");
    }

    #[test]
    fn an_image_that_is_cut_off_or_of_another_format_is_refused() {
        let whole = image(b"\x7fELF and no more");
        assert_eq!(unpack(&whole).unwrap(), b"\x7fELF and no more");
        let end_of_payload = whole.len() - b"what follows the payload".len();
        for length in 0..end_of_payload {
            assert_eq!(unpack(&whole[..length]), None, "{length} bytes");
        }
        for spoilt in [0x202, 0x24c, 1032, 1036, end_of_payload - 1] {
            let mut image = whole.clone();
            image[spoilt] ^= 0x40;
            assert_eq!(unpack(&image), None, "byte {spoilt}");
        }
        assert_eq!(unpack(&image(b"no such program")), None);
    }
}

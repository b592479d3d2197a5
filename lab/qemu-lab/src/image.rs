//! Disks of a machine: images with the content that the Linux test guest expects, and how QEMU opens them.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use sterna_guest::content::PAGE_BYTES;
use sterna_guest::disk::{BLOCK_BYTES, write_block};
use sterna_guest::page::FIRST_GENERATION;
use tempfile::TempDir;

use crate::{Error, HeldDisk};

/// The image of a new disk, in a directory of its own; removed when dropped. The guest that boots from nothing on it writes its second half:
/// a guest that boots later needs a new image.
#[derive(Debug)]
pub struct DiskImage {
    directory: TempDir,
}

impl DiskImage {
    /// A raw image of `bytes`, a multiple of 4096, for the disk at position `number` of [`crate::QemuOptions::disks`]. A guest with
    /// N threads for a disk needs 2 × N MiB or more.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn new(number: u8, bytes: u64) -> Result<DiskImage, Error> {
        let directory = tempfile::Builder::new()
            .prefix("sterna-disk-")
            .tempdir()
            .map_err(Error::io("making a directory for a disk image"))?;
        let image = DiskImage { directory };
        let path = image.path();
        let file = File::create(&path).map_err(Error::path("creating", &path))?;
        let mut file = BufWriter::with_capacity(1 << 20, file);
        let mut page = [0; PAGE_BYTES];
        for block in 0..bytes / BLOCK_BYTES as u64 {
            write_block(&mut page, number, block, FIRST_GENERATION);
            file.write_all(&page).map_err(Error::path("writing", &path))?;
        }
        file.flush().map_err(Error::path("writing", &path))?;
        Ok(image)
    }

    /// The image file.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.directory.path().join("image")
    }
}

/// What QEMU does with the host's page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cache {
    /// Past it, as `cache=none`: the host's device writes guest RAM itself.
    None,
    /// Through it, as `cache=writeback`: QEMU's threads copy into guest RAM.
    Writeback,
}

/// How QEMU reads and writes the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aio {
    /// By threads of QEMU that wait.
    Threads,
    /// By Linux AIO; only with [`Cache::None`].
    Native,
    /// By `io_uring`.
    IoUring,
}

impl Aio {
    /// All of them.
    pub const ALL: [Aio; 3] = [Aio::Threads, Aio::Native, Aio::IoUring];

    fn name(self) -> &'static str {
        match self {
            Aio::Threads => "threads",
            Aio::Native => "native",
            Aio::IoUring => "io_uring",
        }
    }
}

/// A virtio disk of a machine, on a raw image that source and destination open, each locking the image while its guest runs
/// (`locking=on`, no `share-rw`).
#[derive(Clone, Debug)]
pub struct Disk {
    /// The image file.
    pub path: PathBuf,
    /// What is done with the host's page cache.
    pub cache: Cache,
    /// How the file is read and written.
    pub aio: Aio,
    /// Whether the disk has an IOThread of its own, else QEMU's main loop serves the disk.
    pub iothread: bool,
    /// What serves the file, where reads can be held: killing a QEMU then answers those that are.
    pub held: Option<HeldDisk>,
}

impl Disk {
    /// A disk on the image at `path`: [`Cache::None`], [`Aio::Threads`], no IOThread.
    #[must_use]
    pub fn new(path: &Path) -> Disk {
        Disk { path: path.to_owned(), cache: Cache::None, aio: Aio::Threads, iothread: false, held: None }
    }

    /// A disk on the image that `held` serves, by Linux AIO. With [`Aio::Threads`] a held read can keep the one behind it from the disk:
    /// QEMU starts a thread for a request only if none is idle, and a thread counts as idle until it runs (`util/thread-pool.c`).
    #[must_use]
    pub fn on(held: &HeldDisk) -> Disk {
        Disk { held: Some(held.clone()), aio: Aio::Native, ..Disk::new(held.path()) }
    }

    /// The words that give a QEMU this disk as its disk `number`.
    pub(crate) fn qemu_words(&self, number: usize) -> Vec<String> {
        let direct = if self.cache == Cache::None { "on" } else { "off" };
        // QEMU's option syntax doubles commas.
        let path = self.path.display().to_string().replace(',', ",,");
        let aio = self.aio.name();
        let mut words = vec![
            "-blockdev".to_owned(),
            format!(
                "driver=file,node-name=disk{number}-file,filename={path},locking=on,aio={aio},cache.direct={direct}"
            ),
            "-blockdev".to_owned(),
            format!("driver=raw,node-name=disk{number},file=disk{number}-file,cache.direct={direct}"),
        ];
        let mut device = format!("virtio-blk-pci,id=virtio-disk{number},drive=disk{number},share-rw=off");
        if self.iothread {
            words.extend(["-object".to_owned(), format!("iothread,id=disk{number}-io")]);
            device.push_str(&format!(",iothread=disk{number}-io"));
        }
        words.extend(["-device".to_owned(), device]);
        words
    }
}

#[cfg(test)]
mod tests {
    use sterna_guest::disk::check_block;

    use super::*;

    #[test]
    fn an_image_holds_the_first_generation_of_every_block_of_its_disk() {
        let image = DiskImage::new(3, 5 * BLOCK_BYTES as u64).expect("written");
        let content = std::fs::read(image.path()).expect("an image");
        let (pages, rest) = content.as_chunks::<PAGE_BYTES>();
        assert!(pages.len() == 5 && rest.is_empty());
        for (block, page) in (0..).zip(pages) {
            assert_eq!(check_block(page, 3, block, FIRST_GENERATION), Ok(()));
            assert!(check_block(page, 2, block, FIRST_GENERATION).is_err());
        }
    }
}

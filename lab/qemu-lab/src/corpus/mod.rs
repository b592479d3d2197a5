//! Content for guest memory with realistic compressibility: data of real machines, and the patterns of published measurements.
//!
//! A file repeated until memory is full would favour long matches and de-duplication that no guest offers. So nothing here is repeated:
//! text, programs and compressed files come from the system's `/usr`, each read once; a guest's RAM is that of a Linux guest booted for
//! this purpose; pictures are computed. If the machine has too little of something, an error reports it. Pages of zeros are left out,
//! because no migration compresses them, and so are duplicates of earlier pages.
//!
//! The content is kept in a directory of its own ([`directory`]), so that every process and every run on one machine has the same
//! content; other machines have other content of the same kinds.

mod files;
mod guest_ram;
mod mixed;
mod patterns;
mod pictures;
mod store;

use std::fs::File;
use std::os::unix::fs::FileExt;

use sterna_guest::content::{PAGE_BYTES, Page};

pub use patterns::Slabs;
pub use store::directory;

use crate::Error;

/// A kind of content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Corpus {
    /// Documentation, licences, headers and source text.
    Text,
    /// Programs and libraries.
    Binaries,
    /// Uncompressed pictures with a camera's noise, computed.
    Images,
    /// Files that are compressed already.
    Compressed,
    /// The RAM of a booted Linux guest: its kernel, its tables, and files in its page cache.
    GuestRam,
    /// Runs of 128 KiB to 2 MiB of all of the above, as in a guest that does several things.
    Mixed,
    /// Pages of ones: each the same.
    Ones,
    /// Sequence numbers: each word its own.
    Sequence,
    /// A memcached's slabs full of items with keys of 128 bytes and values of 2048.
    Memcached,
}

impl Corpus {
    /// All kinds.
    pub const ALL: [Self; 9] = [
        Self::Text,
        Self::Binaries,
        Self::Images,
        Self::Compressed,
        Self::GuestRam,
        Self::Mixed,
        Self::Ones,
        Self::Sequence,
        Self::Memcached,
    ];

    /// Returns its name in tables and file names.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Binaries => "binaries",
            Self::Images => "images",
            Self::Compressed => "compressed",
            Self::GuestRam => "guest-ram",
            Self::Mixed => "mixed",
            Self::Ones => "ones",
            Self::Sequence => "sequence",
            Self::Memcached => "memcached",
        }
    }

    /// Returns the kind with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|corpus| corpus.name() == name)
    }

    /// Opens `bytes` of it (whole pages), which are generated first if this machine has none yet. Another `seed` selects other parts of
    /// the material, or another order.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if the machine has less, with the available amount; the errors of booting a guest
    /// ([`Corpus::GuestRam`], [`Corpus::Mixed`]); [`Error::Io`].
    pub fn open(self, bytes: u64, seed: u64) -> Result<Content, Error> {
        assert!(bytes > 0 && bytes.is_multiple_of(PAGE_BYTES as u64), "content of {bytes} bytes");
        let (file, origin) = store::open(&format!("{}-{bytes}-{seed}", self.name()), |file| {
            let mut pages = self.pages(bytes, seed)?;
            // All pages of ones are the same on purpose.
            let distinct = self != Self::Ones;
            store::write_pages(file, pages.as_mut(), bytes, distinct, self.name())?;
            Ok(pages.origin())
        })?;
        Ok(Content { file, bytes, origin })
    }

    /// Returns the source of its pages. `bytes` is approximately how much will be read.
    fn pages(self, bytes: u64, seed: u64) -> Result<Box<dyn Pages>, Error> {
        Ok(match self {
            Self::Text => Box::new(files::Files::new(files::Kind::Text, seed)?),
            Self::Binaries => Box::new(files::Files::new(files::Kind::Binary, seed)?),
            Self::Compressed => Box::new(files::Files::new(files::Kind::Compressed, seed)?),
            Self::Images => Box::new(pictures::Pictures::new(seed)),
            Self::GuestRam => Box::new(guest_ram::GuestRam::new(bytes, seed)?),
            Self::Mixed => Box::new(mixed::Mixed::new(bytes, seed)?),
            Self::Ones => Box::new(patterns::Numbered::ones()),
            Self::Sequence => Box::new(patterns::Numbered::sequence()),
            Self::Memcached => Box::new(patterns::SlabPages::new(seed)),
        })
    }
}

/// Some bytes of a corpus.
#[derive(Debug)]
pub struct Content {
    file: File,
    bytes: u64,
    origin: String,
}

impl Content {
    /// Returns the number of bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns where the content came from, for tables.
    #[must_use]
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// Reads the bytes at `offset`. This copies from the system's page cache, so memory must be filled before a measurement.
    ///
    /// # Errors
    /// [`Error::Io`], also if there are fewer bytes.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        let read = self.file.read_exact_at(into, offset);
        read.map_err(Error::io(format!("reading {} bytes of prepared content at {offset}", into.len())))
    }
}

/// A source of pages of one kind.
trait Pages {
    /// Reads the next page. Returns false if there are no more.
    fn next(&mut self, page: &mut Page) -> Result<bool, Error>;

    /// Returns an upper limit of the available bytes.
    fn most(&self) -> u64 {
        u64::MAX
    }

    /// Returns where the pages read so far came from.
    fn origin(&self) -> String;
}

//! Finding the library, proving that it is the one this crate was written for, and asking it once for hardware.
//!
//! One per process: the library's state (devices, log level, what it found at start) is process-wide. It is never unloaded, because
//! it starts threads of its own and leaves destructors of thread keys behind.

use std::ffi::{CStr, OsStr, c_uchar};
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use libloading::os::unix::{Library as Loaded, RTLD_LOCAL, RTLD_NOW};

use crate::abi::{self, QzSession};
use crate::error::{NoHardware, OpenError};

/// The name under which the dynamic loader is asked. The number is the library's promise to stay compatible.
const SONAME: &str = "libqatzip.so.3";
/// The environment variable that names the file or its directory.
pub const VARIABLE: &str = "STERNA_QATZIP";

/// What the library needs, in the order in which they need each other. Where it was unpacked into a directory of its own these are
/// beside it, and no search path leads there. The first four are everybody's: what the system has is preferred.
const GENERAL: [&str; 4] = ["libz.so.1", "liblz4.so.1", "libnuma.so.1", "libcrypto.so.3"];
const ITS_OWN: [&str; 2] = ["libusdm.so.0", "libqat.so.4"];

/// Which library to use.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Choice {
    /// The one that the dynamic loader finds.
    #[default]
    System,
    /// This file, or the one in this directory; what it needs is taken from beside it where it is there.
    Path(PathBuf),
}

impl Choice {
    /// What `STERNA_QATZIP` names, else the system's.
    #[must_use]
    pub fn from_environment() -> Choice {
        match std::env::var_os(VARIABLE) {
            Some(path) if !path.is_empty() => Choice::Path(PathBuf::from(path)),
            _ => Choice::System,
        }
    }
}

/// The functions, once found.
#[derive(Clone, Copy)]
pub(crate) struct Functions {
    init: abi::Init,
    defaults: abi::Defaults,
    pub(crate) setup: abi::Setup,
    pub(crate) teardown: abi::Teardown,
    pub(crate) compress: abi::Compress,
    pub(crate) decompress: abi::Decompress,
    pub(crate) end_of_stream: abi::EndOfStream,
    pub(crate) malloc: abi::Malloc,
    pub(crate) free: abi::Free,
    /// The software path itself, without the look for hardware before it.
    pub(crate) software: Option<(abi::Compress, abi::Decompress)>,
}

/// QATzip, loaded and proved.
pub struct Library {
    functions: Functions,
    file: PathBuf,
    process: u32,
    hardware: OnceLock<Result<(), NoHardware>>,
}

static LOADED: Mutex<Option<Arc<Library>>> = Mutex::new(None);

impl Library {
    /// Loads the library, or hands out the one that this process has already loaded.
    ///
    /// # Errors
    /// It is not there, is not the right one, or cannot be proved to be.
    pub fn open(choice: &Choice) -> Result<Arc<Library>, OpenError> {
        OPENER.get_or_init(std::process::id);
        // A fork may have happened while another thread held the lock; only the process that loaded it ever waits for it.
        let mut loaded = match LOADED.try_lock() {
            Ok(guard) => guard,
            Err(std::sync::TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(std::sync::TryLockError::WouldBlock) if forked() => return Err(OpenError::Forked),
            Err(std::sync::TryLockError::WouldBlock) => LOADED.lock().unwrap_or_else(PoisonError::into_inner),
        };
        if let Some(library) = loaded.as_ref() {
            if library.forked() {
                return Err(OpenError::Forked);
            }
            if let Choice::Path(path) = choice {
                let wanted = canonical(&file_of(path));
                if wanted != library.file {
                    return Err(OpenError::Another { loaded: library.file.clone(), wanted });
                }
            }
            return Ok(Arc::clone(library));
        }
        let library = Arc::new(load(choice)?);
        *loaded = Some(Arc::clone(&library));
        Ok(library)
    }

    /// The file that was loaded; its name usually ends in the library's own version.
    #[must_use]
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Whether there is hardware that this process can use. Asked once: a look costs the library's own start-up, a line on
    /// standard error ("Cannot open /dev/vfio", from the driver beneath it) and one of the process's thread keys.
    ///
    /// # Errors
    /// There is none; in a child after `fork(2)` always.
    pub fn hardware(&self) -> Result<(), NoHardware> {
        // Before the lock, which another thread may have held at the moment of the fork.
        if self.forked() {
            return Err(NoHardware { code: -101 });
        }
        *self.hardware.get_or_init(|| {
            let mut session = Storage::new();
            // SAFETY: a zeroed session with room behind it, used by this thread alone; 0 is a legal second argument. Without
            // software as a fallback the return code tells hardware from none.
            match unsafe { (self.functions.init)(&raw mut session.session, 0) } {
                abi::OK | abi::DUPLICATE => Ok(()),
                code => Err(NoHardware { code }),
            }
        })
    }

    pub(crate) fn functions(&self) -> &Functions {
        &self.functions
    }

    /// Whether this is another process than the one that loaded the library.
    pub(crate) fn forked(&self) -> bool {
        std::process::id() != self.process
    }
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Library")
            .field("file", &self.file)
            .field("hardware", &self.hardware.get())
            .finish_non_exhaustive()
    }
}

/// The process that first called [`Library::open`].
static OPENER: OnceLock<u32> = OnceLock::new();

fn forked() -> bool {
    OPENER.get().is_some_and(|opener| *opener != std::process::id())
}

fn file_of(path: &Path) -> PathBuf {
    if path.is_dir() { path.join(SONAME) } else { path.to_owned() }
}

fn canonical(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

/// Loads without making symbols global; every symbol is resolved now, so that a missing one is an error here and no crash later.
fn dlopen(name: &OsStr) -> Result<Loaded, String> {
    // SAFETY: loading runs the constructors of the library and of what it needs. Theirs only set up their own state; that the file
    // is the library its name says is the trust an administrator gives to every file in the loader's path or in the variable.
    unsafe { Loaded::open(Some(name), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| words(&error))
}

/// The loader's sentence without what the wrapper puts around it.
fn words(error: &libloading::Error) -> String {
    match error {
        libloading::Error::DlOpen { source } | libloading::Error::DlSym { source } => source.to_string(),
        other => other.to_string(),
    }
}

fn load(choice: &Choice) -> Result<Library, OpenError> {
    let not_found = |why: String| OpenError::NotFound { why };
    let (loaded, named) = match choice {
        Choice::System => (dlopen(OsStr::new(SONAME)).map_err(not_found)?, PathBuf::from(SONAME)),
        Choice::Path(path) => {
            let file = file_of(path);
            if !file.is_file() {
                return Err(not_found(format!("there is no file {}", file.display())));
            }
            // A name without a slash would be searched for.
            let file = canonical(&file);
            if let Some(directory) = file.parent() {
                load_neighbours(directory);
            }
            (dlopen(file.as_os_str()).map_err(not_found)?, file)
        }
    };
    let (functions, file) = find_functions(&loaded, &named)?;
    prove(&functions, &file)?;
    // Never unloaded: see the top of this file.
    std::mem::forget(loaded);
    tracing::debug!(file = %file.display(), "QATzip is loaded");
    Ok(Library { functions, file, process: std::process::id(), hardware: OnceLock::new() })
}

/// The loader takes a library that is already there by its soname, so what lies beside is loaded first. What cannot be loaded is
/// left to the loader, whose message names it.
fn load_neighbours(directory: &Path) {
    for (names, system_first) in [(&GENERAL[..], true), (&ITS_OWN[..], false)] {
        for name in names {
            if system_first && let Ok(library) = dlopen(OsStr::new(name)) {
                std::mem::forget(library);
                continue;
            }
            let beside = directory.join(name);
            if beside.is_file()
                && let Ok(library) = dlopen(beside.as_os_str())
            {
                std::mem::forget(library);
            }
        }
    }
}

fn find_functions(loaded: &Loaded, named: &Path) -> Result<(Functions, PathBuf), OpenError> {
    // SAFETY: each name is asked for with the type that the header gives it; the pointers outlive `loaded`, which is never closed
    // once a `Library` exists, and are not called if it does not come to that.
    unsafe {
        let file = file_that_has(loaded).unwrap_or_else(|| named.to_owned());
        let missing = |symbol| OpenError::MissingFunction { library: file.display().to_string(), symbol };
        macro_rules! find {
            ($type:ty, $name:literal) => {
                *loaded.get::<$type>($name.as_bytes()).map_err(|_| missing($name))?
            };
        }
        // Not in the public header but exported, with the signatures of `qzCompress` and `qzDecompress`: what those call once they
        // have decided for software.
        let software = loaded
            .get::<abi::Compress>("qzSWCompress")
            .ok()
            .zip(loaded.get::<abi::Decompress>("qzSWDecompressMulti").ok())
            .map(|(compress, decompress)| (*compress, *decompress));
        let functions = Functions {
            init: find!(abi::Init, "qzInit"),
            defaults: find!(abi::Defaults, "qzGetDefaultsDeflateExt"),
            setup: find!(abi::Setup, "qzSetupSessionDeflateExt"),
            teardown: find!(abi::Teardown, "qzTeardownSession"),
            compress: find!(abi::Compress, "qzCompress"),
            decompress: find!(abi::Decompress, "qzDecompress"),
            end_of_stream: find!(abi::EndOfStream, "qzGetDeflateEndOfStream"),
            malloc: find!(abi::Malloc, "qzMalloc"),
            free: find!(abi::Free, "qzFree"),
            software,
        };
        // Its messages go to standard error, several per call; everything is told by return codes as well.
        find!(abi::SetLogLevel, "qzSetLogLevel")(abi::LOG_NONE);
        Ok((functions, file))
    }
}

/// Where the loader found it.
fn file_that_has(loaded: &Loaded) -> Option<PathBuf> {
    // SAFETY: the symbol's address is only looked up, never called; `dladdr` fills the structure or returns 0, and the name it
    // fills in belongs to the loader and lives as long as the library.
    unsafe {
        let symbol = loaded.get::<abi::Init>("qzInit").ok()?;
        let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
        if libc::dladdr(*symbol as *const libc::c_void, info.as_mut_ptr()) == 0 {
            return None;
        }
        let name = info.assume_init().dli_fname;
        let path =
            |name| Path::new(<OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(CStr::from_ptr(name).to_bytes()));
        (!name.is_null()).then(|| canonical(path(name)))
    }
}

const CANARY: u8 = 0xa5;

/// A session with room behind it, so that a library whose session is longer than ours writes into that and is found out.
#[repr(C)]
pub(crate) struct Storage {
    pub(crate) session: QzSession,
    spare: [u8; 216],
}

impl Storage {
    pub(crate) fn new() -> Box<Storage> {
        Box::new(Storage { session: QzSession::EMPTY, spare: [CANARY; 216] })
    }

    fn untouched(&self) -> bool {
        self.spare.iter().all(|byte| *byte == CANARY)
    }
}

/// The library cannot be asked for its version: `qzGetSoftwareComponentVersionList` and `qzGetStatus` do nothing on Linux (1.3.1).
/// What can be proved is what matters: it fills the parameters with the published defaults, each at its place, and writes nothing
/// behind them; it sets up and ends a session within the 40 bytes that this crate believes in. Neither looks for hardware.
fn prove(functions: &Functions, file: &Path) -> Result<(), OpenError> {
    let unproven = |what: String| OpenError::UnprovenLayout { library: file.display().to_string(), what };
    #[repr(C)]
    struct Room {
        params: abi::DeflateExt,
        spare: [u8; 256],
    }
    // Zeroes in front, so that padding and bytes it leaves alone compare equal; the canary behind.
    let mut room = Room { params: zeroed(), spare: [CANARY; 256] };
    // SAFETY: room for a structure several times as long as the header's.
    let code = unsafe { (functions.defaults)(&raw mut room.params) };
    if code != abi::OK {
        return Err(unproven(format!("qzGetDefaultsDeflateExt returned {code}")));
    }
    if room.params != abi::DEFAULTS {
        return Err(unproven("its defaults are not those of the header".into()));
    }
    if room.spare.iter().any(|byte| *byte != CANARY) {
        return Err(unproven("its parameters are longer".into()));
    }
    let mut storage = Storage::new();
    // SAFETY: a zeroed session with room behind it and parameters that the library itself filled in; torn down below on this
    // same thread.
    let code = unsafe { (functions.setup)(&raw mut storage.session, &raw mut room.params) };
    let session = storage.session;
    if code != abi::OK || session.internal.is_null() || ![abi::NO_HW, 0].contains(&session.hw_session_stat) {
        return Err(unproven(format!("a new session is not as the header has it, code {code}")));
    }
    let mut end: c_uchar = CANARY;
    // SAFETY: the session was set up above and belongs to this thread; the answer is one byte.
    let codes = unsafe {
        (
            (functions.end_of_stream)(&raw mut storage.session, &raw mut end),
            (functions.teardown)(&raw mut storage.session),
        )
    };
    if codes != (abi::OK, abi::OK) || end > 1 || !storage.session.internal.is_null() || !storage.untouched() {
        return Err(unproven(format!(
            "a session that was ended is not as the header has it, codes {} and {}",
            codes.0, codes.1
        )));
    }
    Ok(())
}

fn zeroed() -> abi::DeflateExt {
    // SAFETY: integers only; all zeroes is a value of each.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

//! The loaded library, and connections to a libvirt daemon.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Builder;
use std::time::Duration;

use crate::error::{Code, Error, LoadError, Reported};
use crate::raw::{Api, RawConnection, text};
use crate::version::{OLDEST, PASSES_DESCRIPTORS, Version};

/// How long a server may be silent before it is asked whether it lives, in seconds, and how many of these questions it may leave
/// unanswered. A server whose event loop hangs is given up after half a minute.
const KEEP_ALIVE: (i32, u32) = (5, 5);

/// Pause after a failed turn of the event loop, so that one that always fails does not use a CPU.
const EVENT_LOOP_PAUSE: Duration = Duration::from_secs(1);

/// `VIR_DOMAIN_SAVE_PAUSED`: a restored domain is left paused, whatever its image says.
const SAVE_PAUSED: u32 = 1 << 2;

/// libvirt's client library, loaded. Clones share it.
#[derive(Clone)]
pub struct Client {
    api: Arc<Api>,
    version: Version,
}

static LOADED: Mutex<Option<Client>> = Mutex::new(None);

impl Client {
    /// Loads the library, or returns the one that this process has already loaded. A failure is not kept: the library may be installed
    /// meanwhile.
    ///
    /// # Errors
    /// It is missing, or unsuitable.
    pub fn load() -> Result<Client, LoadError> {
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(client) = loaded.as_ref() {
            return Ok(client.clone());
        }
        let api = Arc::new(Api::load()?);
        let version = api.version().map_err(|error| LoadError::NotInitialized { why: error.message })?;
        let version = Version::of(version);
        if version < OLDEST {
            return Err(LoadError::TooOld { found: version });
        }
        let events = Arc::clone(&api);
        let turn = move || {
            loop {
                if let Err(error) = events.run_event_loop() {
                    tracing::warn!(error = %error.message, "libvirt's event loop");
                    std::thread::sleep(EVENT_LOOP_PAUSE);
                }
            }
        };
        let thread = Builder::new().name("libvirt-events".into()).spawn(turn);
        thread.map_err(|error| LoadError::NoThread { why: error.to_string() })?;
        tracing::debug!(%version, "libvirt's client library is loaded");
        Ok(loaded.insert(Client { api, version }).clone())
    }

    /// Returns the library's version.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// Connects to the QEMU driver of a libvirt daemon. Without a URI libvirt chooses one: for root `qemu:///system`, unless its
    /// configuration or `LIBVIRT_DEFAULT_URI` names another.
    ///
    /// # Errors
    /// There is no connection, or its libvirt is unsuitable.
    pub fn connect(&self, uri: Option<&str>) -> Result<Connection, Error> {
        let given = uri.map(|uri| text(uri).ok_or(Error::ZeroByte { what: "a URI of libvirt" })).transpose()?;
        let failed = |error: Reported| Error::connect(uri, error);
        let raw = RawConnection::open(&self.api, given.as_deref()).map_err(failed)?;
        let uri = raw.uri().map_err(failed)?;
        if let Some(driver) = raw.driver().filter(|driver| driver != "QEMU") {
            return Err(Error::NotQemu { uri, driver });
        }
        let server = Version::of(raw.server_version().map_err(failed)?);
        if server < OLDEST {
            return Err(Error::TooOld { uri, found: server });
        }
        if let Err(error) = raw.set_keep_alive(KEEP_ALIVE.0, KEEP_ALIVE.1) {
            tracing::debug!(error = %error.message, "virConnectSetKeepAlive");
        }
        Ok(Connection { raw: Arc::new(raw), uri: uri.into(), client: self.version, server })
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("version", &self.version).finish_non_exhaustive()
    }
}

/// A connection to a libvirt daemon. Clones share it; it closes when the last one, and the last domain, is dropped.
#[derive(Clone)]
pub struct Connection {
    pub(crate) raw: Arc<RawConnection>,
    uri: Arc<str>,
    client: Version,
    server: Version,
}

impl Connection {
    /// Returns the URI: the one that libvirt chose, if none was given.
    #[must_use]
    pub fn uri(&self) -> &str {
        &self.uri
    }

    /// Returns the daemon's version.
    #[must_use]
    pub fn version(&self) -> Version {
        self.server
    }

    /// Returns whether the connection has not ended.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.raw.is_alive()
    }

    /// Returns whether commands of the monitor can be given descriptors.
    #[must_use]
    pub fn passes_descriptors(&self) -> bool {
        self.raw.api().passes_descriptors() && self.server >= PASSES_DESCRIPTORS
    }

    /// Restores a domain from the saved image `path`, as libvirt sees that path, and leaves the domain paused. Blocks until QEMU has loaded
    /// everything. `xml`: the domain's description, in place of the image's.
    ///
    /// # Errors
    /// libvirt refuses, or QEMU could not load the image: no domain is left.
    pub fn restore_paused(&self, path: &str, xml: Option<&str>) -> Result<(), Error> {
        let path = text(path).ok_or(Error::ZeroByte { what: "the path of a saved image" })?;
        let xml = xml.map(|xml| text(xml).ok_or(Error::ZeroByte { what: "a domain's description" })).transpose()?;
        let restored = self.raw.restore(&path, xml.as_deref(), SAVE_PAUSED);
        restored.map_err(|error| self.error("restore a domain", "", error))
    }

    /// Makes the error of a call that libvirt has refused. libvirt has no number of its own for a connection that has ended.
    pub(crate) fn error(&self, doing: &'static str, domain: &str, reported: Reported) -> Error {
        let (uri, domain, message) = (self.uri.to_string(), domain.to_owned(), reported.message);
        if !self.is_alive() {
            return Error::ConnectionLost { uri, doing, domain, message };
        }
        Error::Failed { doing, domain, code: Code::of(reported.code), message }
    }

    /// Makes the error of a command with descriptors, which this libvirt does not pass.
    pub(crate) fn passes_no_descriptors(&self) -> Error {
        let doing = "pass descriptors to QEMU";
        Error::Unsupported { doing, since: PASSES_DESCRIPTORS, client: self.client, server: self.server }
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { uri, server, .. } = self;
        f.debug_struct("Connection").field("uri", uri).field("server", server).finish_non_exhaustive()
    }
}

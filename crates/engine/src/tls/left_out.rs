//! Replaces `certificates` in a build without TLS.

use std::convert::Infallible;
use std::path::Path;

use super::{TlsError, TlsPem};

/// One side's certificates and whom it trusts. This build has no TLS (feature `tls`), so none can be made.
#[derive(Clone, Debug)]
pub struct TlsSettings(Infallible);

impl TlsSettings {
    /// Returns an error, as this build has no TLS.
    ///
    /// # Errors
    /// [`TlsError::LeftOut`].
    pub fn client(_: &Path) -> Result<Self, TlsError> {
        Err(TlsError::LeftOut)
    }

    /// Returns an error, as this build has no TLS.
    ///
    /// # Errors
    /// [`TlsError::LeftOut`].
    pub fn server(_: &Path, _: &[String]) -> Result<Self, TlsError> {
        Err(TlsError::LeftOut)
    }

    /// Returns an error, as this build has no TLS.
    ///
    /// # Errors
    /// [`TlsError::LeftOut`].
    pub fn client_from_pem(_: &TlsPem<'_>) -> Result<Self, TlsError> {
        Err(TlsError::LeftOut)
    }

    /// Returns an error, as this build has no TLS.
    ///
    /// # Errors
    /// [`TlsError::LeftOut`].
    pub fn server_from_pem(_: &TlsPem<'_>, _: &[String]) -> Result<Self, TlsError> {
        Err(TlsError::LeftOut)
    }

    /// Never returns, for no settings can be made.
    ///
    /// # Errors
    /// None.
    pub fn with_server_name(self, _: &str) -> Result<Self, TlsError> {
        match self.0 {}
    }

    /// Never returns, for no settings can be made.
    pub(crate) fn cannot_exist(&self) -> ! {
        match self.0 {}
    }
}

//! Replaces `session` in a build without TLS: no session can be made.

use std::convert::Infallible;
use std::fmt;
use std::io::{self, IoSlice};

use sterna_memory::raw::RawPiece;

use super::encrypted::{Arrived, Leaving};
use super::{Address, TransportError};
use crate::tls::TlsSettings;

/// A TLS error, which there is none of.
#[derive(Debug)]
pub(super) struct Failure(Infallible);

impl fmt::Display for Failure {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {}
    }
}

impl std::error::Error for Failure {}

pub(super) fn failed(error: Infallible) -> io::Error {
    match error {}
}

/// One end of a TLS session, which there is none of.
#[derive(Debug)]
pub(super) struct Session(Infallible);

impl Session {
    pub(super) fn to(_: &Address, settings: &TlsSettings) -> Result<Self, TransportError> {
        settings.cannot_exist()
    }

    pub(super) fn of(_: &str, settings: &TlsSettings) -> Result<Self, TransportError> {
        settings.cannot_exist()
    }

    pub(super) fn is_allowed(&self, _: &TlsSettings) -> bool {
        match self.0 {}
    }

    pub(super) fn peer_name(&self) -> Option<String> {
        match self.0 {}
    }

    pub(super) fn is_handshaking(&self) -> bool {
        match self.0 {}
    }

    pub(super) fn has_ended(&self) -> bool {
        match self.0 {}
    }

    pub(super) fn shake(&mut self, _: &mut Arrived) -> Result<(), Infallible> {
        match self.0 {}
    }

    pub(super) fn own_messages(&mut self) -> Vec<u8> {
        match self.0 {}
    }

    pub(super) fn decrypt(&mut self, _: &mut Arrived, _: RawPiece<'_>) -> Result<usize, Infallible> {
        match self.0 {}
    }

    pub(super) fn encrypt(&mut self, _: &[IoSlice<'_>], _: &mut Leaving) -> Result<usize, Infallible> {
        match self.0 {}
    }

    pub(super) fn goodbye(&mut self, _: &mut Leaving) {
        match self.0 {}
    }

    pub(super) fn exporter(&self, _: &[u8]) -> Option<[u8; 32]> {
        match self.0 {}
    }
}

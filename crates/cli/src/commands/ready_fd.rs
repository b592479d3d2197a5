//! `--ready-fd`: the program that starts `receive` reads from a descriptor when sources can connect.

use std::fs::File;
use std::io::Write;
use std::sync::{Mutex, PoisonError};

use sterna_engine::report::{Observer, Progress, ReceiveProgress};
use sterna_wire::switchover::{Moment, Step};

use super::Failure;

/// The file behind the descriptor.
pub(super) struct ReadyFile(Mutex<Option<File>>);

impl ReadyFile {
    /// Opens what is behind the descriptor. Called before this process opens anything else, so that the descriptor is the caller's.
    pub(super) fn open(descriptor: Option<u16>) -> Result<Self, Failure> {
        let open = |number: u16| {
            let path = format!("/proc/self/fd/{number}");
            let failed = |error| Failure::usage(&format!("--ready-fd {number}: it cannot be written to: {error}"));
            File::options().write(true).open(path).map_err(failed)
        };
        descriptor.map(open).transpose().map(|file| Self(Mutex::new(file)))
    }

    /// Returns an observer that writes the address there, and passes everything on.
    pub(super) fn before<'a>(&'a self, observer: &'a dyn Observer) -> WithReadyFile<'a> {
        WithReadyFile { file: self, observer }
    }
}

pub(super) struct WithReadyFile<'a> {
    file: &'a ReadyFile,
    observer: &'a dyn Observer,
}

impl Observer for WithReadyFile<'_> {
    fn progress(&self, progress: &Progress) {
        self.observer.progress(progress);
    }

    fn received(&self, progress: &ReceiveProgress) {
        self.observer.received(progress);
    }

    fn note(&self, text: &str) {
        self.observer.note(text);
    }

    fn listening(&self, address: &str) {
        let file = self.file.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Err(error)) = file.map(|mut file| writeln!(file, "{address}")) {
            self.observer.note(&format!("--ready-fd: {error}"));
        }
        self.observer.listening(address);
    }

    fn step(&self, moment: Moment, step: Step) {
        self.observer.step(moment, step);
    }
}

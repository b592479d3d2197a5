//! A domain of libvirt's QEMU driver.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::connection::Connection;
use crate::error::{Code, Error, Reported};
use crate::raw::{RawDomain, RawEvent, RawSubscription, text};

/// Whether a domain's guest runs (`virDomainState`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum State {
    /// It runs. Guests that libvirt reports as blocked run as well.
    Running,
    /// It is paused.
    Paused,
    /// It shuts down.
    ShuttingDown,
    /// It has no QEMU.
    ShutOff,
    /// It has crashed.
    Crashed,
    /// It is suspended by its own power management.
    Suspended,
    /// libvirt does not report it.
    Unknown,
}

impl State {
    fn of(number: i32) -> Self {
        match number {
            1 | 2 => Self::Running,
            3 => Self::Paused,
            4 => Self::ShuttingDown,
            5 => Self::ShutOff,
            6 => Self::Crashed,
            7 => Self::Suspended,
            _ => Self::Unknown,
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Running => "running",
            Self::Paused => "paused",
            Self::ShuttingDown => "shutting down",
            Self::ShutOff => "shut off",
            Self::Crashed => "crashed",
            Self::Suspended => "suspended by its power management",
            Self::Unknown => "in an unknown state",
        })
    }
}

/// A job that libvirt carries out on a domain (`virDomainJobType`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Job {
    /// None is under way.
    None,
    /// One is under way: a migration, a save, a dump, a backup.
    UnderWay,
    /// The last one has ended, and its result has not been asked for.
    Ended,
}

impl Job {
    fn of(number: i32) -> Self {
        match number {
            0 => Self::None,
            1 | 2 => Self::UnderWay,
            _ => Self::Ended,
        }
    }
}

/// Which description of a domain is wanted (`virDomainXMLFlags`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Xml {
    /// As it is at present.
    Live,
    /// In the form for another host and another release of libvirt, with secrets (passwords of displays, for example): what libvirt itself
    /// writes into a saved image. It must not be logged.
    Migratable,
    /// As it will be after its next start.
    Inactive,
}

impl Xml {
    fn flags(self) -> u32 {
        const SECURE: u32 = 1 << 0;
        const INACTIVE: u32 = 1 << 1;
        const MIGRATABLE: u32 = 1 << 3;
        match self {
            Self::Live => 0,
            Self::Migratable => SECURE | MIGRATABLE,
            Self::Inactive => SECURE | INACTIVE,
        }
    }
}

/// How a domain's QEMU is ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destroy {
    /// By SIGTERM and, if QEMU does not end within some seconds, by SIGKILL.
    Forced,
    /// By SIGTERM only: an error if QEMU does not end within some seconds (`VIR_DOMAIN_DESTROY_GRACEFUL`).
    Graceful,
}

/// A domain. Clones share it.
#[derive(Clone)]
pub struct Domain {
    connection: Connection,
    raw: Arc<RawDomain>,
    name: Arc<str>,
}

impl Domain {
    /// Finds a domain by its name or, as virsh does, by its UUID.
    ///
    /// # Errors
    /// [`Error::NoDomain`], or libvirt does not answer.
    pub fn find(connection: &Connection, name: &str) -> Result<Self, Error> {
        let given = text(name).ok_or(Error::ZeroByte { what: "the name of a domain" })?;
        let is_absent = |error: &Reported| Code::of(error.code) == Code::NoDomain;
        let found = match RawDomain::by_name(&connection.raw, &given) {
            Err(error) if is_absent(&error) && is_uuid(name) => RawDomain::by_uuid(&connection.raw, &given),
            found => found,
        };
        match found {
            Ok(raw) => {
                let name = raw.name().unwrap_or_default().into();
                Ok(Self { connection: connection.clone(), raw: Arc::new(raw), name })
            }
            Err(error) if is_absent(&error) => {
                Err(Error::NoDomain { uri: connection.uri().to_owned(), name: name.to_owned() })
            }
            Err(error) => Err(connection.error("find a domain", name, error)),
        }
    }

    /// Returns the domain's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the connection by which the domain was found.
    #[must_use]
    pub fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Returns the domain's UUID, for instance `6a9e0d3c-5b7c-4a51-9d53-006775657374`.
    ///
    /// # Errors
    /// libvirt does not report it.
    pub fn uuid(&self) -> Result<String, Error> {
        self.done("report its UUID", self.raw.uuid())
    }

    /// Returns the domain's description.
    ///
    /// # Errors
    /// libvirt does not report it.
    pub fn xml(&self, which: Xml) -> Result<String, Error> {
        self.done("describe it", self.raw.xml(which.flags()))
    }

    /// Returns whether the guest runs. A domain that is gone, as a transient one is once its QEMU has ended, is [`State::ShutOff`].
    ///
    /// # Errors
    /// libvirt does not report it.
    pub fn state(&self) -> Result<State, Error> {
        match self.raw.state() {
            Err(error) if Code::of(error.code) == Code::NoDomain => Ok(State::ShutOff),
            state => self.done("report its state", state.map(|(state, _)| State::of(state))),
        }
    }

    /// Returns the job that libvirt carries out on the domain.
    ///
    /// # Errors
    /// libvirt does not report it, for example because the domain has no QEMU.
    pub fn job(&self) -> Result<Job, Error> {
        self.done("report its job", self.raw.job().map(Job::of))
    }

    /// Returns whether the domain stays defined when its QEMU has ended.
    ///
    /// # Errors
    /// libvirt does not report it.
    pub fn is_persistent(&self) -> Result<bool, Error> {
        self.done("report whether it is persistent", self.raw.is_persistent())
    }

    /// Pauses the guest. libvirt releases what its lock manager holds for the guest's disks.
    ///
    /// # Errors
    /// The guest is not paused, or that is unknown ([`Error::ConnectionLost`]).
    pub fn suspend(&self) -> Result<(), Error> {
        self.done("pause the guest", self.raw.suspend())
    }

    /// Lets the guest run. libvirt first acquires what its lock manager demands for the guest's disks.
    ///
    /// # Errors
    /// The guest does not run, or that is unknown ([`Error::ConnectionLost`]).
    pub fn resume(&self) -> Result<(), Error> {
        self.done("resume the guest", self.raw.resume())
    }

    /// Ends the domain's QEMU, and waits until it has ended. A domain without QEMU is left as it is.
    ///
    /// # Errors
    /// QEMU does not end, or that is unknown ([`Error::ConnectionLost`]).
    pub fn destroy(&self, how: Destroy) -> Result<(), Error> {
        let destroyed = self.raw.destroy(u32::from(how == Destroy::Graceful));
        match destroyed {
            // A transient domain is gone with its QEMU.
            Err(error) if Code::of(error.code) == Code::NoDomain => Ok(()),
            Err(error) if Code::of(error.code) == Code::OperationInvalid && self.state() == Ok(State::ShutOff) => {
                Ok(())
            }
            destroyed => self.done("end its QEMU", destroyed),
        }
    }

    /// Has QEMU's monitor execute a command, a JSON object, and returns QEMU's answer, a JSON object as well: QEMU's own errors are answers.
    /// libvirt marks the domain as tainted (`custom-monitor`). Blocks until QEMU has answered, and until libvirt has finished what
    /// else it does to the domain.
    ///
    /// # Errors
    /// QEMU received no command, or did not answer.
    pub fn monitor_command(&self, command: &str) -> Result<String, Error> {
        let command = text(command).ok_or(Error::ZeroByte { what: "a command for QEMU" })?;
        self.done("pass a command to QEMU", self.raw.monitor_command(&command))
    }

    /// As [`Domain::monitor_command`], for commands that are given descriptors (`add-fd`, `getfd`).
    ///
    /// # Errors
    /// As for [`Domain::monitor_command`]; [`Error::Unsupported`] before libvirt 8.2.
    pub fn monitor_command_with_descriptors(
        &self,
        command: &str,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<String, Error> {
        if !self.connection.passes_descriptors() {
            return Err(self.connection.passes_no_descriptors());
        }
        let command = text(command).ok_or(Error::ZeroByte { what: "a command for QEMU" })?;
        let executed = self.raw.monitor_command_with_descriptors(&command, descriptors);
        let executed = executed.ok_or_else(|| self.connection.passes_no_descriptors())?;
        self.done("pass a command with descriptors to QEMU", executed)
    }

    /// Has `on_event` called for each event of QEMU's monitor until the result is dropped. It is called on the thread that serves all
    /// connections, so it must not block.
    ///
    /// libvirt delivers events in their order, but by another way than answers to commands: an answer may overtake an event that QEMU has sent
    /// before it.
    ///
    /// # Errors
    /// libvirt delivers no events.
    pub fn on_monitor_event(
        &self,
        on_event: impl Fn(MonitorEvent) + Send + Sync + 'static,
    ) -> Result<MonitorEvents, Error> {
        let deliver = move |event: RawEvent| on_event(MonitorEvent::of(event));
        let subscription = self.raw.on_monitor_event(Box::new(deliver));
        self.done("deliver QEMU's events", subscription).map(|raw| MonitorEvents { _raw: raw })
    }

    fn done<T>(&self, doing: &'static str, result: Result<T, Reported>) -> Result<T, Error> {
        result.map_err(|error| self.connection.error(doing, &self.name, error))
    }
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { connection, name, .. } = self;
        f.debug_struct("Domain").field("name", name).field("connection", connection).finish_non_exhaustive()
    }
}

/// Returns whether a name may be a UUID: 32 hexadecimal digits, with hyphens or without.
fn is_uuid(name: &str) -> bool {
    let digits = name.bytes().filter(|byte| *byte != b'-');
    digits.clone().count() == 32 && digits.clone().all(|byte| byte.is_ascii_hexdigit())
}

/// An event of QEMU's monitor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MonitorEvent {
    /// Its name, for instance `STOP`.
    pub name: String,
    /// When QEMU sent it, by the clock of its host: seconds since 1970, and microseconds. None if QEMU does not know the time.
    pub time: Option<(u64, u32)>,
    /// Its data, a JSON object; none if it has none.
    pub details: Option<String>,
}

impl MonitorEvent {
    fn of(event: RawEvent) -> Self {
        let RawEvent { name, seconds, microseconds, details } = event;
        let time = u64::try_from(seconds).ok().map(|seconds| (seconds, microseconds));
        Self { name, time, details }
    }
}

/// The delivery of a domain's events, until this is dropped.
pub struct MonitorEvents {
    _raw: RawSubscription,
}

impl fmt::Debug for MonitorEvents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MonitorEvents").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_that_qemu_does_not_know_is_none() {
        let event = |seconds| RawEvent { name: "STOP".into(), seconds, microseconds: 7, details: None };
        assert_eq!(MonitorEvent::of(event(-1)).time, None);
        assert_eq!(MonitorEvent::of(event(5)).time, Some((5, 7)));
    }

    #[test]
    fn a_name_of_32_hexadecimal_digits_may_be_a_uuid() {
        assert!(is_uuid("6a9e0d3c-5b7c-4a51-9d53-006775657374") && is_uuid("6a9e0d3c5b7c4a519d53006775657374"));
        assert!(!is_uuid("guest") && !is_uuid("6a9e0d3c-5b7c-4a51-9d53-00677565737") && !is_uuid(""));
    }

    #[test]
    fn a_domain_that_waits_for_input_runs_and_numbers_of_later_releases_are_unknown() {
        assert_eq!([1, 2, 3, 5].map(State::of), [State::Running, State::Running, State::Paused, State::ShutOff]);
        assert_eq!([0, 8, -1].map(State::of), [State::Unknown; 3]);
        assert_eq!([0, 1, 2, 3, 4].map(Job::of), [Job::None, Job::UnderWay, Job::UnderWay, Job::Ended, Job::Ended]);
    }
}

//! Compares the machines of both sides before anything is begun: both are described by QMP, the destination sends its description, and the
//! source judges.
//!
//! A QEMU compares little of this itself: it refuses some of it when all of memory has been sent, and runs on with the rest, for example with
//! a CPU that lacks what the guest uses, or with another disk.

mod compare;
mod cpu;
mod describe;
mod difference;
mod facts;
mod host;
mod locks;
mod memory;
mod same_storage;
mod storage;
#[cfg(test)]
mod table;
mod tree;

use std::thread;
use std::time::Duration;

use sterna_codec::Encoding;
use sterna_engine::cancel::Cancel;
use sterna_engine::report::Observer;
use sterna_engine::session::{self, Offer, SessionError};
use sterna_engine::transport::Address;
use sterna_wire::control::{Machine, Mode};
use sterna_wire::description::Description;
use sterna_wire::reason::ErrorKind;

use self::difference::Difference;
use super::features::DESCRIBING;
use super::{GatewayError, SendOptions};
use crate::qmp::Qmp;

/// Differences between the machines for which a person takes responsibility.
#[derive(Clone, Debug, Default)]
pub struct AllowedDifferences {
    /// Names of differences, or the beginnings of names up to a `.`, `/` or `:`.
    pub names: Vec<String>,
    /// Whether the destination's CPU may lack features that the guest has.
    pub cpu: bool,
}

impl AllowedDifferences {
    /// Returns the option that allows a difference, if one was given.
    fn option(&self, difference: &Difference) -> Option<String> {
        if difference.name == cpu::FEATURES {
            return self.cpu.then(|| "--force-cpu".to_owned());
        }
        if is_for_sure(&difference.name) {
            return None;
        }
        let names = |name: &&String| {
            let rest = difference.name.strip_prefix(name.as_str());
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '/', ':']))
        };
        self.names.iter().find(names).map(|name| format!("--allow-difference {name}"))
    }
}

/// Returns whether every QEMU refuses a guest for a difference, so that no option can permit it.
fn is_for_sure(name: &str) -> bool {
    name == "machine" || name.starts_with("ram.")
}

/// What the comparison of the machines has found.
#[derive(Debug, Default)]
pub(super) struct Verdict {
    /// For what the guest would be lost, or run wrongly.
    pub(super) refusals: Vec<String>,
    /// What the guest may notice.
    pub(super) warnings: Vec<String>,
}

impl Verdict {
    fn of(differences: Vec<Difference>, allowed: &AllowedDifferences) -> Self {
        let mut verdict = Self::default();
        for difference in differences {
            let option = allowed.option(&difference);
            let Difference { name, refuses, text } = difference;
            match (refuses, option) {
                (false, _) => verdict.warnings.push(text),
                (true, Some(option)) => verdict.warnings.push(format!("{text} (allowed by {option})")),
                (true, None) if name == cpu::FEATURES => {
                    verdict.refusals.push(format!("{text}; --force-cpu sends the guest nevertheless"));
                }
                (true, None) if is_for_sure(&name) => verdict.refusals.push(text),
                (true, None) => verdict.refusals.push(format!("{text}; --allow-difference {name} permits it")),
            }
        }
        verdict
    }
}

/// The comparison with which a migration begins.
pub(super) struct Compared {
    missing: Option<NotCompared>,
    /// What the guest may notice.
    pub(super) warnings: Vec<String>,
}

impl Compared {
    /// Compares the machines, and notes the warnings.
    ///
    /// # Errors
    /// All refusals. Whatever keeps the machines from being compared is an error of [`Self::confirm`] only.
    pub(super) fn begin(
        qmp: &Qmp,
        options: &SendOptions,
        cancel: &Cancel,
        observer: &dyn Observer,
    ) -> Result<Self, GatewayError> {
        let Verdict { refusals, warnings } = match with_destination(qmp, options, cancel) {
            Ok(verdict) => verdict,
            Err(missing) => return Ok(Self { missing: Some(missing), warnings: Vec::new() }),
        };
        warnings.iter().for_each(|warning| observer.note(&format!("warning: {warning}")));
        if refusals.is_empty() {
            return Ok(Self { missing: None, warnings });
        }
        let text = format!("the machines do not fit: {}", refusals.join("; and "));
        Err(GatewayError::untouched(text).of(ErrorKind::Refused))
    }

    /// Returns the comparison with a destination that has no machine yet: nothing differs.
    pub(super) fn without_destination() -> Self {
        Self { missing: None, warnings: Vec::new() }
    }

    /// Checks that the machines were compared. Called right before the migration is offered, so that the reasons of this side come first.
    ///
    /// # Errors
    /// Why not, for instance that the destination does not answer.
    pub(super) fn confirm(&mut self) -> Result<(), GatewayError> {
        self.missing.take().map_or(Ok(()), |missing| Err(missing.into()))
    }
}

/// Why the machines were not compared.
#[derive(Debug)]
pub(super) enum NotCompared {
    /// The source's QEMU could not be described.
    Here(GatewayError),
    /// The destination has not answered, or has refused.
    There(SessionError),
}

impl From<NotCompared> for GatewayError {
    fn from(not: NotCompared) -> Self {
        match not {
            NotCompared::Here(error) => error,
            NotCompared::There(error) => Self::untouched(error),
        }
    }
}

/// Describes the machine of a destination's QEMU.
///
/// # Errors
/// QEMU does not answer, or the machine is too large.
pub(super) fn describe(qmp: &Qmp) -> Result<Description, String> {
    describe::describe(qmp)
}

/// Waits until the destination listens, as long as the options permit.
///
/// # Errors
/// The wait was cancelled. A destination that does not listen then, or refuses to answer, is left to the comparison.
pub(super) fn await_destination(
    qmp: &Qmp,
    options: &SendOptions,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<(), GatewayError> {
    if options.patience.is_zero() {
        return Ok(());
    }
    let seconds = options.patience.as_secs_f64();
    observer.note(&format!("waiting up to {seconds} s for {}, if nothing listens there yet", options.to));
    let to = Address::from(&options.to);
    let answer = session::describe(&Offer { patience: options.patience, ..offer(qmp, options, &to) }, cancel);
    if let Err(error) = answer {
        tracing::debug!(%error, "waiting for the destination");
    }
    match cancel.is_cancelled() {
        true => Err(GatewayError::untouched("cancelled").of(ErrorKind::Cancelled)),
        false => Ok(()),
    }
}

/// Returns the offer with which a destination is asked for its machine.
fn offer<'a>(qmp: &Qmp, options: &'a SendOptions, to: &'a Address) -> Offer<'a> {
    Offer {
        to,
        security: &options.security,
        channels: options.channels,
        packet_size: options.packet_size,
        machine: Machine { monitor: format!("QEMU {}", qmp.version()), ..Machine::default() },
        mode: Mode::Owner,
        features: DESCRIBING,
        encoding: Encoding::default(),
        patience: Duration::ZERO,
    }
}

/// Compares the machine of this QEMU with that of the destination.
///
/// # Errors
/// One of them was not described.
pub(super) fn with_destination(qmp: &Qmp, options: &SendOptions, cancel: &Cancel) -> Result<Verdict, NotCompared> {
    let to = Address::from(&options.to);
    let offer = offer(qmp, options, &to);
    // Both at the same time.
    let (destination, source) = thread::scope(|scope| {
        let source = thread::Builder::new().name("sterna-machine".into()).spawn_scoped(scope, || describe(qmp));
        let destination = session::describe(&offer, cancel);
        let source = match source {
            Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            Err(error) => Err(format!("no thread describes this machine: {error}")),
        };
        (destination, source)
    });
    let destination = destination.map_err(NotCompared::There)?;
    let source = source.map_err(|reason| NotCompared::Here(GatewayError::untouched(reason)))?;
    Ok(Verdict::of(compare::compare(&source, &destination), &options.allowed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_allowed_difference_is_a_warning_with_its_option_and_the_features_of_a_cpu_need_their_own() {
        let differences = || {
            let refusal = |name: &str| Difference::refusal(name, format!("{name} differs"));
            vec![
                refusal("cpu.features"),
                refusal("cpu.count"),
                refusal("disk.a/b:bytes"),
                Difference::warning("x", "w".into()),
            ]
        };
        let verdict = |names: &[&str], cpu| {
            let names = names.iter().map(|name| (*name).to_owned()).collect();
            let verdict = Verdict::of(differences(), &AllowedDifferences { names, cpu });
            (verdict.refusals.len(), verdict.warnings)
        };
        assert_eq!(verdict(&[], false), (3, vec!["w".to_owned()]));
        assert_eq!(verdict(&["cpu"], false).0, 2);
        assert_eq!(verdict(&["cpu.features", "dis", "disk.a/", "disk.a/b:byte"], false).0, 3);
        let (left, warnings) = verdict(&["cpu", "disk.a"], true);
        assert_eq!(left, 0);
        assert_eq!(
            warnings,
            [
                "cpu.features differs (allowed by --force-cpu)",
                "cpu.count differs (allowed by --allow-difference cpu)",
                "disk.a/b:bytes differs (allowed by --allow-difference disk.a)",
                "w"
            ]
        );
        let of_ram = || vec![Difference::refusal("ram.pc.ram", "another length".into())];
        let all = AllowedDifferences { names: vec!["ram".into(), "machine".into()], cpu: true };
        assert_eq!(Verdict::of(of_ram(), &all).refusals, ["another length"]);
        let verdict = Verdict::of(differences(), &AllowedDifferences::default());
        assert!(verdict.refusals[0].ends_with("--force-cpu sends the guest nevertheless"));
        assert!(verdict.refusals[2].ends_with("--allow-difference disk.a/b:bytes permits it"));
    }
}

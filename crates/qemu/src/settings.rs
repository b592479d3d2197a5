//! QEMU's migration settings: reads them, checks whether a migration through Sterna is possible with them, and changes those
//! that Sterna needs.
//!
//! Order matters: everything is read and checked first, so that a refusal leaves QEMU untouched. A [`Restore`] then records
//! the changed settings and restores exactly these, also when it is only dropped.
//!
//! Names and ranges: QEMU's qapi/migration.json, 7.2 to 10.0. Other settings stay as the user made them (announce-*,
//! cpu-throttle-*, avail-switchover-bandwidth, switchover-ack, auto-converge, validate-uuid, …).

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::qmp::{MigrationInfo, Qmp, QmpError, Version};

/// The oldest QEMU that Sterna supports, as major and minor number.
pub const OLDEST_QEMU: (u32, u32) = (7, 2);

/// The longest `downtime-limit` QEMU accepts.
pub const MAX_DOWNTIME_LIMIT: Duration = Duration::from_secs(2000);

/// A QEMU's side of the migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The guest runs here.
    Source,
    /// The guest will run here; started with `-incoming defer`.
    Destination,
}

/// The settings that a migration needs.
#[derive(Debug, Clone)]
pub struct RequiredSettings {
    /// This QEMU's side.
    pub role: Role,
    /// Multifd channels of this QEMU, 1 to 255; 0 for a single stream without multifd.
    pub channels: u8,
    /// QEMU's downtime limit, at most [`MAX_DOWNTIME_LIMIT`]. Only the source uses it; `None` leaves QEMU's setting.
    pub downtime_limit: Option<Duration>,
    /// Whether QEMU stops in `pre-switchover` and waits for `migrate-continue`. Only the source uses it.
    pub pause_before_switchover: bool,
}

/// Why the settings could not be changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SettingsError {
    /// This guest, or this QEMU, cannot be migrated as it is. Nothing was changed.
    #[error("cannot use this QEMU as {} of a migration: {}", role.name(), reasons.join("; "))]
    Refused {
        /// The intended side of this QEMU.
        role: Role,
        /// One sentence for each obstacle.
        reasons: Vec<String>,
    },
    /// A value outside the possible range. Nothing was changed.
    #[error("{0}")]
    Invalid(String),
    /// QMP failed. Changed settings were restored if QEMU still answers.
    #[error(transparent)]
    Qmp(#[from] QmpError),
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Role::Source => "source",
            Role::Destination => "destination",
        }
    }
}

/// Capabilities that Sterna cannot carry, and why.
const CANNOT_CARRY: &[(&str, &str)] = &[
    ("postcopy-ram", "post-copy is not carried yet"),
    ("postcopy-preempt", "post-copy is not carried yet"),
    ("background-snapshot", "a snapshot is not a migration between two hosts"),
    ("rdma-pin-all", "RDMA bypasses Sterna"),
    ("xbzrle", "Sterna compresses by itself, and QEMU's delta encoding excludes multifd"),
    ("compress", "Sterna compresses by itself"),
    ("x-colo", "COLO keeps two guests in step and never ends"),
    ("block", "disks are not migrated with RAM: use shared storage or mirror them by NBD"),
    ("dirty-bitmaps", "dirty bitmaps of disks are not carried"),
    ("x-ignore-shared", "it leaves guest RAM out of the migration"),
    ("mapped-ram", "it writes a file, not a stream"),
    ("zero-copy-send", "it does not work on the unix sockets between QEMU and Sterna"),
];

/// A QEMU's version, state and migration settings before a migration.
#[derive(Debug, Clone)]
pub struct Settings {
    /// QEMU's version.
    pub version: Version,
    /// The run state.
    pub status: String,
    /// The state of the current or last migration, if there is one.
    pub migration: MigrationInfo,
    /// `query-migrate-capabilities`: each capability's name and whether it is on.
    pub capabilities: BTreeMap<String, bool>,
    /// `query-migrate-parameters`.
    pub parameters: Map<String, Value>,
}

impl Settings {
    /// Reads the settings; changes nothing.
    pub fn read(qmp: &Qmp) -> Result<Self, QmpError> {
        let capabilities = qmp.execute("query-migrate-capabilities", json!({}))?;
        let parameters = qmp.execute("query-migrate-parameters", json!({}))?;
        Ok(Self {
            version: qmp.version().clone(),
            status: qmp.status()?,
            migration: qmp.query_migrate()?,
            capabilities: capabilities
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(|entry| Some((entry["capability"].as_str()?.to_owned(), entry["state"].as_bool()?)))
                .collect(),
            parameters: parameters.as_object().cloned().unwrap_or_default(),
        })
    }

    /// Returns whether a capability is on; `false` if this QEMU does not know it.
    pub fn is_on(&self, capability: &str) -> bool {
        self.capabilities.get(capability).copied().unwrap_or(false)
    }

    /// Returns every obstacle to a migration through Sterna, one sentence each; empty if there is none.
    pub fn refusals(&self, role: Role) -> Vec<String> {
        let mut reasons = Vec::new();
        let (major, minor) = OLDEST_QEMU;
        if !self.version.at_least(major, minor) {
            reasons.push(format!(
                "QEMU {} is too old: {major}.{minor} is the oldest that Sterna works with",
                self.version
            ));
        }
        self.refuse_state(role, &mut reasons);
        for (capability, why) in CANNOT_CARRY {
            if self.is_on(capability) {
                reasons.push(format!("the migration capability {capability} is on ({why}): turn it off"));
            }
        }
        for needed in ["return-path", "late-block-activate", "multifd"] {
            if !self.capabilities.contains_key(needed) {
                reasons.push(format!("this QEMU has no migration capability {needed}"));
            }
        }
        let parameter = |name: &str| self.parameters.get(name).and_then(Value::as_str).unwrap_or_default();
        if !parameter("tls-creds").is_empty() {
            reasons.push(
                "QEMU encrypts the migration itself (tls-creds is set): clear it and give Sterna the certificates (--tls)"
                    .into(),
            );
        }
        let compression = parameter("multifd-compression");
        if role == Role::Source && !matches!(compression, "" | "none") {
            reasons.push(format!(
                "QEMU compresses the migration itself (multifd-compression is {compression}): set it to none and let Sterna \
                 compress (--method)"
            ));
        }
        let mode = parameter("mode");
        if !matches!(mode, "" | "normal") {
            reasons.push(format!("the migration mode is {mode}: set it to normal"));
        }
        reasons
    }

    fn refuse_state(&self, role: Role, reasons: &mut Vec<String>) {
        let reason = match (role, self.status.as_str()) {
            (Role::Source, "inmigrate") => "it waits for an incoming migration itself: this is a destination".into(),
            (Role::Destination, "inmigrate") if self.migration.listening => {
                "it already listens for a migration: start it with -incoming defer instead of an address".into()
            }
            _ if self.migration.is_active() => format!(
                "a migration is already under way (its state is {}): wait for its end or cancel it",
                self.migration.status
            ),
            (Role::Source, "running" | "paused") => {
                for reason in &self.migration.blocked_reasons {
                    reasons.push(format!("QEMU says that this guest cannot be migrated: {reason}"));
                }
                return;
            }
            (Role::Source, "postmigrate") => "its guest has already been migrated away (run state postmigrate)".into(),
            (Role::Source, other) => format!("its guest is neither running nor paused (run state {other})"),
            (Role::Destination, "inmigrate") if self.migration.status != "none" => format!(
                "an incoming migration was tried before (its state is {}): start QEMU again",
                self.migration.status
            ),
            (Role::Destination, "inmigrate") => return,
            (Role::Destination, other) => {
                format!("it does not wait for an incoming migration (run state {other}): start it with -incoming defer")
            }
        };
        reasons.push(reason);
    }

    /// Checks this QEMU, and returns the changes that a migration through Sterna needs. Changes nothing.
    ///
    /// Both sides: multifd with `wanted.channels` channels (or off), return-path, late-block-activate, events. The source also: no
    /// bandwidth limit (Sterna paces), the downtime limit, pause-before-switchover. The destination also: no multifd
    /// compression, since Sterna feeds raw pages.
    pub fn plan(qmp: &Qmp, wanted: &RequiredSettings) -> Result<Plan, SettingsError> {
        if wanted.downtime_limit.is_some_and(|limit| limit > MAX_DOWNTIME_LIMIT) {
            return Err(SettingsError::Invalid(format!(
                "a downtime limit of {} s is longer than QEMU accepts ({} s)",
                wanted.downtime_limit.unwrap_or_default().as_secs_f64(),
                MAX_DOWNTIME_LIMIT.as_secs()
            )));
        }
        let settings = Settings::read(qmp)?;
        let reasons = settings.refusals(wanted.role);
        if !reasons.is_empty() {
            return Err(SettingsError::Refused { role: wanted.role, reasons });
        }
        let mut plan = Plan { qmp: qmp.clone(), wanted: Values::default(), before: Values::default() };
        settings.plan_capabilities(wanted, &mut plan);
        settings.plan_parameters(wanted, &mut plan);
        Ok(plan)
    }

    /// Makes the plan of [`Settings::plan`] and carries it out.
    pub fn apply(qmp: &Qmp, wanted: &RequiredSettings) -> Result<Restore, SettingsError> {
        Ok(Self::plan(qmp, wanted)?.carry_out()?)
    }

    fn plan_capabilities(&self, wanted: &RequiredSettings, plan: &mut Plan) {
        let mut desired = vec![
            ("multifd", wanted.channels > 0),
            ("return-path", true),
            ("late-block-activate", true),
            ("events", true),
        ];
        if wanted.role == Role::Source {
            desired.push(("pause-before-switchover", wanted.pause_before_switchover));
        }
        for (name, on) in desired {
            // A capability that this QEMU does not know is skipped: `refusals` has checked the indispensable ones.
            if let Some(was) = self.capabilities.get(name).filter(|was| **was != on) {
                plan.wanted.capabilities.insert(name.to_owned(), on);
                plan.before.capabilities.insert(name.to_owned(), *was);
            }
        }
    }

    fn plan_parameters(&self, wanted: &RequiredSettings, plan: &mut Plan) {
        let mut desired = Map::new();
        if wanted.channels > 0 {
            desired.insert("multifd-channels".into(), wanted.channels.into());
        }
        match wanted.role {
            Role::Source => {
                desired.insert("max-bandwidth".into(), 0.into());
                if let Some(limit) = wanted.downtime_limit {
                    desired.insert("downtime-limit".into(), (limit.as_millis() as u64).into());
                }
            }
            Role::Destination => {
                desired.insert("multifd-compression".into(), "none".into());
            }
        }
        desired.retain(|name, value| self.parameters.get(name).is_some_and(|was| was != value));
        for name in desired.keys() {
            plan.before.parameters.insert(name.clone(), self.parameters[name].clone());
        }
        plan.wanted.parameters = desired;
    }
}

/// Values of some settings.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Values {
    capabilities: BTreeMap<String, bool>,
    parameters: Map<String, Value>,
}

impl Values {
    /// Sets these values. QEMU refuses while a migration is active.
    ///
    /// # Errors
    /// The first failure. Capabilities are set even if setting the parameters failed.
    pub fn set(&self, qmp: &Qmp) -> Result<(), QmpError> {
        let first = send_parameters(qmp, &self.parameters);
        send_capabilities(qmp, &self.capabilities).and(first)
    }
}

/// The settings that must change, with their wanted and their present values.
#[derive(Debug)]
pub struct Plan {
    qmp: Qmp,
    wanted: Values,
    before: Values,
}

impl Plan {
    /// Returns the present values of the settings that will change.
    pub fn before(&self) -> &Values {
        &self.before
    }

    /// Changes the settings. After an error, those already changed are restored.
    pub fn carry_out(self) -> Result<Restore, QmpError> {
        // Made before the change: without an answer it is unknown whether QEMU changed a setting, and restoring is always harmless.
        let restore = Restore { qmp: self.qmp, before: Some(self.before) };
        self.wanted.set(&restore.qmp)?;
        Ok(restore)
    }
}

/// Restores the settings that were changed.
#[derive(Debug)]
#[must_use = "dropping it puts the settings back at once"]
pub struct Restore {
    qmp: Qmp,
    before: Option<Values>,
}

impl Restore {
    /// Restores the settings. QEMU refuses while a migration is active.
    pub fn restore(mut self) -> Result<(), QmpError> {
        self.restore_once()
    }

    /// Keeps the changed settings.
    pub fn keep(mut self) {
        self.before = None;
    }

    fn restore_once(&mut self) -> Result<(), QmpError> {
        // Taken first, so that drop does not repeat a failed attempt.
        self.before.take().map_or(Ok(()), |before| before.set(&self.qmp))
    }
}

impl Drop for Restore {
    fn drop(&mut self) {
        if let Err(error) = self.restore_once() {
            tracing::warn!(%error, "QEMU's migration settings could not be put back");
        }
    }
}

fn send_capabilities(qmp: &Qmp, values: &BTreeMap<String, bool>) -> Result<(), QmpError> {
    if values.is_empty() {
        return Ok(());
    }
    let list: Vec<Value> = values.iter().map(|(name, on)| json!({ "capability": name, "state": on })).collect();
    qmp.execute("migrate-set-capabilities", json!({ "capabilities": list }))?;
    Ok(())
}

fn send_parameters(qmp: &Qmp, values: &Map<String, Value>) -> Result<(), QmpError> {
    if values.is_empty() {
        return Ok(());
    }
    qmp.execute("migrate-set-parameters", Value::Object(values.clone()))?;
    Ok(())
}

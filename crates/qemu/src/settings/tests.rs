//! Refusals by tables, and changes against a monitor in this process that keeps settings as QEMU does. For real QEMUs see
//! `tests/control_real_qemu.rs`.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex};

use super::*;

fn migration(answer: &Value) -> MigrationInfo {
    MigrationInfo::from_json(answer)
}

fn usable(role: Role) -> Settings {
    let status = match role {
        Role::Source => "running",
        Role::Destination => "inmigrate",
    };
    let known = ["multifd", "return-path", "late-block-activate", "events", "xbzrle", "postcopy-ram"];
    Settings {
        version: Version { major: 7, minor: 2, micro: 0, package: String::new() },
        status: status.into(),
        migration: migration(&json!({})),
        capabilities: known.map(|name| (name.to_owned(), false)).into(),
        parameters: json!({ "tls-creds": "", "multifd-compression": "none", "multifd-channels": 2,
                            "max-bandwidth": 134217728, "downtime-limit": 300 })
        .as_object()
        .cloned()
        .unwrap(),
    }
}

fn only_refusal(settings: &Settings, role: Role) -> String {
    let mut reasons = settings.refusals(role);
    assert_eq!(reasons.len(), 1, "{reasons:?}");
    reasons.remove(0)
}

#[test]
fn usable_qemus_are_not_refused() {
    for role in [Role::Source, Role::Destination] {
        assert!(usable(role).refusals(role).is_empty());
    }
    let mut paused = usable(Role::Source);
    paused.status = "paused".into();
    // An earlier migration that failed is no obstacle for the source.
    paused.migration = migration(&json!({ "status": "failed", "error-desc": "x" }));
    assert!(paused.refusals(Role::Source).is_empty());
}

#[test]
fn every_capability_that_cannot_be_carried_is_refused_by_name() {
    for (capability, why) in CANNOT_CARRY {
        for role in [Role::Source, Role::Destination] {
            let mut settings = usable(role);
            settings.capabilities.insert((*capability).to_owned(), true);
            let reason = only_refusal(&settings, role);
            assert!(reason.contains(capability) && reason.contains(why), "{reason}");
        }
    }
}

#[test]
fn parameters_that_cannot_be_carried_are_refused() {
    for (name, value, roles) in [
        ("tls-creds", "tls0", &[Role::Source, Role::Destination][..]),
        ("multifd-compression", "zstd", &[Role::Source]),
        ("mode", "cpr-reboot", &[Role::Source, Role::Destination]),
    ] {
        for role in [Role::Source, Role::Destination] {
            let mut settings = usable(role);
            settings.parameters.insert(name.into(), value.into());
            let reasons = settings.refusals(role);
            assert_eq!(reasons.len(), usize::from(roles.contains(&role)), "{name} {role:?} {reasons:?}");
        }
    }
}

#[test]
fn states_that_cannot_be_used_are_refused() {
    let cases = [
        (Role::Source, "postmigrate", json!({}), "already been migrated away"),
        (Role::Source, "inmigrate", json!({}), "this is a destination"),
        (Role::Source, "prelaunch", json!({}), "neither running nor paused"),
        (Role::Source, "running", json!({ "status": "active" }), "already under way (its state is active)"),
        (Role::Source, "running", json!({ "blocked-reasons": ["a reason"] }), "a reason"),
        (Role::Destination, "running", json!({}), "start it with -incoming defer"),
        (Role::Destination, "inmigrate", json!({ "socket-address": [{}] }), "already listens"),
        (Role::Destination, "inmigrate", json!({ "status": "failed" }), "start QEMU again"),
        (Role::Destination, "inmigrate", json!({ "status": "setup" }), "already under way"),
    ];
    for (role, status, answer, expected) in cases {
        let mut settings = usable(role);
        settings.status = status.into();
        settings.migration = migration(&answer);
        let reason = only_refusal(&settings, role);
        assert!(reason.contains(expected), "{status}: {reason}");
    }
}

#[test]
fn qemu_that_is_too_old_or_lacks_a_capability_is_refused() {
    let mut settings = usable(Role::Source);
    settings.version = Version { major: 6, minor: 2, micro: 0, package: String::new() };
    assert!(only_refusal(&settings, Role::Source).contains("QEMU 6.2.0 is too old"));
    let mut settings = usable(Role::Source);
    settings.capabilities.remove("late-block-activate");
    assert!(only_refusal(&settings, Role::Source).contains("no migration capability late-block-activate"));
}

#[test]
fn all_reasons_are_given_at_once() {
    let mut settings = usable(Role::Source);
    settings.capabilities.insert("xbzrle".into(), true);
    settings.capabilities.insert("postcopy-ram".into(), true);
    settings.parameters.insert("tls-creds".into(), "tls0".into());
    let reasons = settings.refusals(Role::Source);
    assert_eq!(reasons.len(), 3);
    let text = SettingsError::Refused { role: Role::Source, reasons }.to_string();
    assert!(text.starts_with("cannot use this QEMU as source of a migration: "), "{text}");
}

/// A QEMU's settings, and the commands that changed them.
struct Fake {
    settings: Settings,
    /// A command that is refused.
    refuses: &'static str,
    changes: Vec<Value>,
}

/// Serves one client until it hangs up.
fn serve(settings: Settings, refuses: &'static str) -> (tempfile::TempDir, Qmp, Arc<Mutex<Fake>>) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    let fake = Arc::new(Mutex::new(Fake { settings, refuses, changes: Vec::new() }));
    let state = Arc::clone(&fake);
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let lines = BufReader::new(stream.try_clone().unwrap()).lines();
        writeln!(stream, r#"{{"QMP": {{"version": {{"qemu": {{"micro": 0, "minor": 2, "major": 7}}}}}}}}"#).unwrap();
        for line in lines {
            let command: Value = serde_json::from_str(&line.unwrap()).unwrap();
            let mut answer = state.lock().unwrap().answer(&command);
            answer["id"] = command["id"].clone();
            writeln!(stream, "{answer}").unwrap();
        }
    });
    (directory, Qmp::connect(&path).unwrap(), fake)
}

impl Fake {
    fn answer(&mut self, command: &Value) -> Value {
        let name = command["execute"].as_str().unwrap();
        if name == self.refuses {
            return json!({ "error": { "class": "GenericError", "desc": "no" } });
        }
        let arguments = &command["arguments"];
        json!({ "return": match name {
            "query-status" => json!({ "status": self.settings.status }),
            "query-migrate-parameters" => json!(self.settings.parameters),
            "query-migrate-capabilities" => self
                .settings
                .capabilities
                .iter()
                .map(|(name, on)| json!({ "capability": name, "state": on }))
                .collect(),
            "migrate-set-capabilities" => {
                for entry in arguments["capabilities"].as_array().unwrap() {
                    let name = entry["capability"].as_str().unwrap().to_owned();
                    self.settings.capabilities.insert(name, entry["state"].as_bool().unwrap());
                }
                self.changes.push(command.clone());
                json!({})
            }
            "migrate-set-parameters" => {
                self.settings.parameters.extend(arguments.as_object().unwrap().clone());
                self.changes.push(command.clone());
                json!({})
            }
            _ => json!({}),
        } })
    }

    fn values(&self) -> (BTreeMap<String, bool>, Map<String, Value>) {
        (self.settings.capabilities.clone(), self.settings.parameters.clone())
    }
}

fn wanted(role: Role) -> RequiredSettings {
    RequiredSettings {
        role,
        channels: 4,
        downtime_limit: Some(Duration::from_millis(250)),
        pause_before_switchover: false,
    }
}

#[test]
fn source_gets_what_it_needs_and_everything_is_put_back() {
    for by_drop in [false, true] {
        let (_directory, qmp, fake) = serve(usable(Role::Source), "");
        let before = fake.lock().unwrap().values();
        let restore = Settings::apply(&qmp, &wanted(Role::Source)).unwrap();
        let (capabilities, parameters) = fake.lock().unwrap().values();
        for name in ["multifd", "return-path", "late-block-activate", "events"] {
            assert!(capabilities[name], "{name}");
        }
        assert_eq!(parameters["multifd-channels"], 4);
        assert_eq!(parameters["max-bandwidth"], 0);
        assert_eq!(parameters["downtime-limit"], 250);
        if by_drop {
            drop(restore);
        } else {
            restore.restore().unwrap();
        }
        assert_eq!(fake.lock().unwrap().values(), before);
    }
}

#[test]
fn destination_is_not_compressed_and_keeps_its_limits() {
    let mut settings = usable(Role::Destination);
    settings.parameters.insert("multifd-compression".into(), "zlib".into());
    let (_directory, qmp, fake) = serve(settings, "");
    let restore = Settings::apply(&qmp, &wanted(Role::Destination)).unwrap();
    let parameters = fake.lock().unwrap().values().1;
    assert_eq!(parameters["multifd-compression"], "none");
    assert_eq!((&parameters["max-bandwidth"], &parameters["downtime-limit"]), (&json!(134_217_728), &json!(300)));
    restore.keep();
    assert_eq!(fake.lock().unwrap().values().1, parameters);
}

#[test]
fn what_is_already_right_is_neither_set_nor_put_back() {
    let mut settings = usable(Role::Destination);
    settings.capabilities.insert("events".into(), true);
    settings.parameters.insert("multifd-channels".into(), 4.into());
    let (_directory, qmp, fake) = serve(settings, "");
    Settings::apply(&qmp, &wanted(Role::Destination)).unwrap().restore().unwrap();
    let fake = fake.lock().unwrap();
    let text = Value::from(fake.changes.clone()).to_string();
    assert_eq!(fake.changes.len(), 2, "{text}");
    assert!(!text.contains("events") && !text.contains("multifd-channels"), "{text}");
}

#[test]
fn refused_qemu_is_left_untouched() {
    let mut settings = usable(Role::Source);
    settings.capabilities.insert("xbzrle".into(), true);
    let (_directory, qmp, fake) = serve(settings, "");
    let error = Settings::apply(&qmp, &wanted(Role::Source)).unwrap_err();
    assert!(matches!(error, SettingsError::Refused { .. }), "{error}");
    let mut long = wanted(Role::Source);
    long.downtime_limit = Some(MAX_DOWNTIME_LIMIT + Duration::from_millis(1));
    let error = Settings::apply(&qmp, &long).unwrap_err();
    assert!(matches!(error, SettingsError::Invalid(_)), "{error}");
    assert!(fake.lock().unwrap().changes.is_empty());
}

#[test]
fn failure_half_way_puts_back_the_first_half() {
    let (_directory, qmp, fake) = serve(usable(Role::Source), "migrate-set-parameters");
    let before = fake.lock().unwrap().values();
    let error = Settings::apply(&qmp, &wanted(Role::Source)).unwrap_err();
    assert!(matches!(error, SettingsError::Qmp(QmpError::Refused { .. })), "{error}");
    let fake = fake.lock().unwrap();
    assert_eq!(fake.changes.len(), 2, "capabilities set and put back");
    assert_eq!(fake.values(), before);
}

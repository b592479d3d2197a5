//! A QEMU that keeps a migration whose sockets were closed just while QEMU opened them. Whether it does is a race within QEMU (7.2 and 10.0; 11.1
//! never does), and QEMU 10.0 may even crash of it.

use std::os::unix::net::UnixListener;
use std::time::Duration;

use crate::support::pair::{Pair, Watched, eventually};
use crate::support::settle::{Migration, Side};
use crate::support::{LONG, REFUSED, Sterna, receive, send, send_by};
use serde_json::json;
use sterna_qemu_lab::{Guest, QemuOptions, QemuVersion};

/// Returns whether QEMU still keeps a migration that has ended.
fn holds_migration(source: &Watched) -> bool {
    let instances = source.monitor.execute("query-yank", json!({})).unwrap();
    instances.as_array().unwrap().iter().any(|one| one["type"] == "migration")
}

/// Imitates a `send` that is killed while the source QEMU opens its sockets, several times until QEMU does not clean
/// up. Returns whether QEMU did not clean up; none if it crashed, as QEMU 7.2 may.
fn broken_off(pair: &Pair) -> Option<bool> {
    let monitor = &pair.source.monitor;
    let on = |name: &str| json!({ "capability": name, "state": true });
    let settings = json!({ "capabilities": [on("multifd"), on("return-path"), on("events")] });
    monitor.execute("migrate-set-capabilities", settings).unwrap();
    for attempt in 0..60 {
        let path = pair.scratch.path().join(format!("broken-off-{attempt}"));
        let listener = UnixListener::bind(&path).unwrap();
        monitor.execute("migrate", json!({ "uri": format!("unix:{}", path.display()) })).unwrap();
        let main = listener.accept().unwrap();
        // The timing matters: the next connection must be in progress.
        for _ in 0..attempt % 5 {
            monitor.query_migrate().ok()?;
        }
        drop((listener, main));
        let over = || {
            let status = pair.source.migration_status();
            status.is_none_or(|status| ["failed", "cancelled"].contains(&status.as_str()))
        };
        assert!(eventually(LONG, over), "{:?}", pair.source.migration_status());
        pair.source.migration_status()?;
        if !eventually(Duration::from_secs(30), || !holds_migration(&pair.source)) {
            return Some(true);
        }
    }
    Some(false)
}

#[test]
fn a_qemu_that_keeps_an_aborted_migration_is_detected_before_a_destination_is_lost() {
    for version in QemuVersion::ALL {
        let Some(pair) = Pair::boot_sector(version) else { return };
        let mut migration = Migration::start(pair, &[], Some("source.before-start-migration:crash"), None);
        migration.wait_crash(Side::Source).unwrap();
        migration.receiver.take().unwrap().finish();
        let Some(held) = broken_off(&migration.pair) else {
            assert_eq!(version, QemuVersion::V7_2, "QEMU {version} crashed over a migration that was broken off");
            eprintln!("skipped: QEMU 7.2 crashed over a migration that was broken off");
            continue;
        };
        println!("QEMU {version}: {}", if held { "keeps it" } else { "cleans up" });
        if version == QemuVersion::V7_2 && !held {
            eprintln!("skipped: QEMU 7.2 cleaned up after each of the migrations that were broken off");
            continue;
        }

        let (ended, text) = Side::Source.recover(&migration.pair, &[], None).expect("there is a record").finish();
        assert!(ended.success() && migration.pair.source.runs(), "{ended}: {text}");
        assert_eq!(text.contains("query-yank"), held, "{text}");

        let options = QemuOptions::new(version, Guest::BootSector).incoming();
        let pair = &mut migration.pair;
        pair.destination = Watched::start(&options, pair.scratch.path(), "second").unwrap();
        let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
        let mut receiver = Sterna::start("receive", command.arg("--insecure"));
        let mut command = send(pair.source.qemu.qmp_path(), &receiver.address(), &pair.source_state(), &pair.report());
        let (sent, lines) =
            Sterna::start("send", command.args(["--insecure", "--downtime", "10s"])).finish_with_lines();
        if !held {
            assert!(sent.success() && receiver.finish().0.success(), "QEMU {version}: {lines:?}");
            assert_eq!(migration.exactly_one(), Ok(Side::Destination));
            continue;
        }
        assert_eq!(sent.code(), REFUSED, "{lines:?}");
        let told = lines.last().unwrap();
        assert!(told.contains("moved directly") && told.contains("not touched"), "{told}");
        assert!(receiver.poll().is_none(), "no source has come to it");
        assert_eq!(pair.destination.status().as_deref(), Some("inmigrate"), "its QEMU can still take a guest");
        assert_eq!(pair.source.migration_status().as_deref(), Some("failed"), "and not `setup` for good");
        if version == QemuVersion::V7_2 {
            // Too old for direct mode.
            receiver.interrupt();
            receiver.finish();
            assert_eq!(migration.exactly_one(), Ok(Side::Source));
            continue;
        }
        let (qmp, state, json) = (pair.source.qemu.qmp_path(), pair.source_state(), pair.report());
        let mut command = send_by("auto", qmp, &receiver.address(), &state, &json);
        let (sent, lines) =
            Sterna::start("send", command.args(["--insecure", "--downtime", "10s"])).finish_with_lines();
        assert!(sent.success() && receiver.finish().0.success(), "QEMU {version}: {lines:?}");
        assert!(lines.iter().any(|line| line.contains("mode: direct")), "{lines:?}");
        assert_eq!(migration.exactly_one(), Ok(Side::Destination));
    }
}

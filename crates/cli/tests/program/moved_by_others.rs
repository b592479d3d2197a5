//! Another program moves the guest after Sterna crashed: `recover` must not start the guest here then.

use std::time::Duration;

use crate::support::pair::{Pair, eventually};
use crate::support::settle::{Migration, Side};
use serde_json::json;
use sterna_qemu_lab::QemuVersion;

/// So slow that a migration takes seconds, and that the guest writes more meanwhile than fits its downtime.
const SLOW: &[&str] = &["--bandwidth", "20MB/s", "--method", "none", "--downtime", "2s"];
const LIMIT: Duration = Duration::from_secs(300);

#[test]
fn recover_does_not_start_a_guest_that_was_moved_away_after_the_crash() {
    for version in QemuVersion::ALL {
        let Some(pair) = Pair::boot_sector(version) else { return };
        let mut migration = Migration::start(pair, SLOW, None, None);
        let mut sender = migration.sender.take().unwrap();
        sender.wait_for("placement: ");
        sender.kill();
        let source = &migration.pair.source;
        let status = || source.migration_status().unwrap();
        assert!(eventually(LIMIT, || ["failed", "cancelled"].contains(&status().as_str())), "{}", status());

        // A migration is over for QEMU when it can no longer be yanked; until then another one is refused, and ends
        // QEMU 7.2.
        let instances = || source.monitor.execute("query-yank", json!({})).unwrap();
        let is_over = || instances().as_array().is_some_and(|all| all.iter().all(|one| one["type"] != "migration"));
        assert!(eventually(LIMIT, is_over), "{version}: {}", instances());

        // To a destination that this host cannot see.
        let off = |name: &str| json!({ "capability": name, "state": false });
        let plain = json!({ "capabilities": [off("multifd"), off("return-path")] });
        source.monitor.execute("migrate-set-capabilities", plain).unwrap();
        source.monitor.execute("migrate", json!({ "uri": "exec:cat > /dev/null" })).unwrap();
        assert!(eventually(LIMIT, || status() == "completed"), "{}", status());

        let recovery = Side::Source.recover(&migration.pair, &[], None).expect("there is a record");
        let (ended, lines) = recovery.finish_with_lines();
        assert_eq!(ended.code(), Some(1), "{lines:?}");
        assert!(lines.iter().any(|line| line.contains("moved away by another migration")), "{lines:?}");
        assert_eq!(source.status().as_deref(), Some("postmigrate"), "{version}: it was not touched");
    }
}

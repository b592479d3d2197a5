//! control
mod support;
use serde_json::json;
use sterna_lab::ram::{CHANGED_BY_LOADING, compare};
use sterna_lab::{Guest, LinuxGuest, QemuOptions, QemuVersion};
use support::LONG;
use support::pair::{Pair, eventually};
#[test]
fn control() {
    let n: usize = std::env::var("N").map_or(8, |n| n.parse().unwrap());
    let ch: u32 = std::env::var("CH").map_or(8, |n| n.parse().unwrap());
    let from = if std::env::var("FROM").is_ok() { QemuVersion::V10_0 } else { QemuVersion::V7_2 };
    let to = if std::env::var("TO").is_ok() { QemuVersion::V10_0 } else { QemuVersion::V7_2 };
    for i in 0..n {
        let linux = LinuxGuest { memory: Some(160 << 20), dirty_rate: 20 << 20, ..LinuxGuest::default() };
        let mut options = QemuOptions::new(from, Guest::Linux(linux));
        options.memory = 384 << 20;
        if std::env::var("MEMFD").is_ok() {
            options.backend = sterna_lab::Backend::Memfd;
        }
        let mut inc = options.incoming();
        inc.version = to;
        let Some(pair) = Pair::start(&options, &inc) else { return };
        pair.source.qemu.guest().wait_ready(LONG).unwrap();
        pair.source.qemu.guest().wait_tick_after(0, LONG).unwrap();
        let uri = format!("unix:{}", pair.scratch.path().join("m.sock").display());
        for m in [&pair.source.monitor, &pair.destination.monitor] {
            let caps = [("events", true), ("return-path", true), ("late-block-activate", true), ("multifd", ch > 0)]
                .map(|(name, on)| json!({ "capability": name, "state": on }));
            m.execute("migrate-set-capabilities", json!({ "capabilities": caps })).unwrap();
            m.execute("migrate-set-parameters", json!({ "max-bandwidth": 0, "multifd-channels": ch.max(1) })).unwrap();
        }
        pair.destination.monitor.execute("migrate-incoming", json!({ "uri": uri })).unwrap();
        pair.destination.monitor.execute("stop", json!({})).unwrap();
        pair.source.monitor.execute("migrate", json!({ "uri": uri })).unwrap();
        assert!(eventually(LONG, || pair.source.status().as_deref() == Some("postmigrate")));
        assert!(eventually(LONG, || pair.destination.status().as_deref() == Some("paused")));
        let mut d = compare(pair.source.qemu.pid(), pair.destination.qemu.pid(), 384 << 20).unwrap();
        d.retain(|p| !CHANGED_BY_LOADING.contains(p));
        pair.destination.monitor.execute("cont", json!({})).unwrap();
        let v = pair.destination.qemu.guest().verify(LONG).unwrap();
        println!("control {i}: {} pages differ {:x?}; verified {v:?}", d.len(), d.iter().take(6).collect::<Vec<_>>());
    }
}

//! The demo, as `make demo` runs it.

use std::path::Path;
use std::process::Command;

use serde_json::Value;
use sterna_qemu_lab::{Error, QemuVersion, Tools, skip_if_unavailable};

#[test]
fn the_demo_moves_a_guest_and_its_report_says_so() {
    let Some(tools) = skip_if_unavailable(Tools::locate()) else { return };
    let (Some(_), Some(_)) = (skip_if_unavailable(tools.kernel()), skip_if_unavailable(tools.qemu(QemuVersion::V10_0)))
    else {
        return;
    };
    // Built with the workspace's tests; here it would only be built again.
    let sterna = Path::new(env!("CARGO_BIN_EXE_sterna-bench")).with_file_name("sterna");
    let built = if sterna.is_file() {
        Ok(())
    } else {
        Err(Error::ToolsMissing {
            what: "the program sterna".into(),
            looked: format!("looked for {}", sterna.display()),
        })
    };
    let Some(()) = skip_if_unavailable(built) else { return };
    let scratch = tempfile::tempdir().unwrap();
    let mut demo = Command::new(env!("CARGO_BIN_EXE_sterna-bench"));

    let shown = demo
        .arg("demo")
        .arg("--directory")
        .arg(scratch.path())
        .env("STERNA_TOOLS", tools.directory())
        .output()
        .unwrap();

    let text = String::from_utf8_lossy(&shown.stdout).into_owned() + &String::from_utf8_lossy(&shown.stderr);
    assert!(shown.status.success(), "{text}");
    assert!(text.contains("The counter goes on") && text.contains("bad=0"), "{text}");
    let report: Value = serde_json::from_slice(&std::fs::read(scratch.path().join("report.json")).unwrap()).unwrap();
    assert_eq!((&report["outcome"], &report["guest_verified"]), (&"completed".into(), &true.into()), "{report:#}");
    for figure in ["total_ms", "downtime_ms", "wire_bytes"] {
        assert!(report[figure].as_f64().is_some_and(|value| value > 0.0), "{figure} in {report:#}");
    }
    assert!(
        report["encrypted"].as_bool().unwrap()
            && report["guest_first_tick_after"].as_u64() > report["guest_last_tick"].as_u64()
    );
}

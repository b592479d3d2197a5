//! `sterna accel` as a person types it: what it says of a host, of devices that work, and of devices that do not.

use std::io::BufReader;
use std::path::Path;
use std::process::{Command, Output};

use sterna_idxd_model::{Model, ModelConfig};

/// Both kinds of device, with a queue each.
const HEALTHY: &str = r#"{"devices":[{"name":"dsa0","queues":[{"name":"wq0.0","size":64,"max_batch_size":128}]},
    {"name":"iax1","kind":"iaa","queues":[{"name":"wq1.0","size":32}]}]}"#;
/// Copies that are not what was read, and a device that halts.
const BROKEN: &str = r#"{"devices":[{"name":"dsa0"}],"faults":[{"opcode":17,"what":"wrong_result"}]}"#;
const HALTS: &str = r#"{"devices":[{"name":"dsa0"}],"faults":[{"nth":30,"what":"halt"}]}"#;

fn accel(sysfs: &Path, words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
    command.arg("accel").args(words).env("STERNA_IDXD_SYSFS", sysfs).env("STERNA_IDXD_DEV", sysfs);
    command.output().unwrap()
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn with_model(model: &str, words: &[&str]) -> (Output, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("model.json");
    std::fs::write(&file, model).unwrap();
    let words: Vec<&str> = words.iter().copied().chain(["--model", file.to_str().unwrap()]).collect();
    (accel(Path::new("/nowhere"), &words), dir)
}

#[test]
fn a_host_without_devices_is_told_so_and_what_is_done_instead() {
    let list = accel(Path::new("/nowhere"), &["list"]);
    let text = said(&list);
    assert!(list.status.success() && text.contains("modprobe idxd") && text.contains("The CPU does"), "{text}");
    let test = accel(Path::new("/nowhere"), &["test"]);
    assert!(test.status.success(), "what there is works: {}", said(&test));
    let named = accel(Path::new("/nowhere"), &["test", "--accel", "dsa"]);
    assert_eq!(named.status.code(), Some(1), "{}", said(&named));
    assert!(said(&named).contains("--accel dsa"), "{}", said(&named));
    let plan = accel(Path::new("/nowhere"), &["plan"]);
    assert_eq!(plan.status.code(), Some(1), "{}", said(&plan));
}

#[test]
fn every_queue_of_a_tree_has_its_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let model = Model::manual(ModelConfig::from_json(HEALTHY).unwrap()).unwrap();
    let tree = model.write_tree(dir.path()).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
    command.args(["accel", "list", "--closed"]).env("STERNA_IDXD_SYSFS", &tree.sysfs).env("STERNA_IDXD_DEV", &tree.dev);
    let text = said(&command.output().unwrap());
    assert!(text.contains("wq0.0: would be used for zero maps"), "{text}");
    assert!(text.contains("wq1.0: would be used for deflate"), "{text}");
    let unused = text.lines().filter(|line| line.contains("wq0.") && line.contains("not used: ")).count();
    assert_eq!(unused, 7, "all other queues of the device say why not: {text}");
}

#[test]
fn devices_that_work_pass_with_every_operation_their_own() {
    let (test, _dir) = with_model(HEALTHY, &["test", "--rounds", "10"]);
    let text = said(&test);
    assert!(test.status.success(), "{text}");
    for line in text.lines().filter(|line| line.contains("none")) {
        assert!(line.contains("dsa ") || line.contains("iaa "), "{line}");
    }
    assert!(text.lines().any(|line| line.starts_with("copy and checksum") && line.contains("dsa 80")), "{text}");
}

#[test]
fn devices_that_do_not_are_named_and_nothing_comes_out_wrong() {
    for (model, word) in [(BROKEN, "copy"), (HALTS, "dsa0")] {
        let (test, _dir) = with_model(model, &["test"]);
        let text = said(&test);
        assert!(test.status.success(), "the CPU has done it over: {text}");
        let taken = text.lines().find(|line| line.contains("was taken out of service"));
        assert!(taken.is_some_and(|line| line.contains(word)), "{text}");
    }
}

#[test]
fn a_captured_trace_is_read_back() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("trace.txt");
    let (capture, _model) = with_model(HEALTHY, &["capture", "--rounds", "2", "-o", trace.to_str().unwrap()]);
    assert!(capture.status.success(), "{}", said(&capture));
    let exchanges = sterna_offload::trace::read(BufReader::new(std::fs::File::open(&trace).unwrap())).unwrap();
    assert!(exchanges.len() > 20 && exchanges.iter().all(|exchange| exchange.answer.is_some()), "{}", exchanges.len());
    let (missing, _model) = with_model(HEALTHY, &["capture", "-o", "/nowhere/trace.txt"]);
    assert_eq!(missing.status.code(), Some(1), "{}", said(&missing));
}

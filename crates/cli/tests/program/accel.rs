//! `sterna accel` as a user runs it: its output for a host, for devices that work, and for devices that do not.

use std::io::BufReader;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::support::LONG;
use sterna_idxd_model::{Model, ModelConfig};

/// Both kinds of device, with a queue each.
const HEALTHY: &str = r#"{"devices":[{"name":"dsa0","queues":[{"name":"wq0.0","size":64,"max_batch_size":128}]},
    {"name":"iax1","kind":"iaa","queues":[{"name":"wq1.0","size":32}]}]}"#;
/// A device with wrong copies, and one that halts.
const BROKEN: &str = r#"{"devices":[{"name":"dsa0"}],"faults":[{"opcode":17,"what":"wrong_result"}]}"#;
const HALTS: &str = r#"{"devices":[{"name":"dsa0"}],"faults":[{"nth":30,"what":"halt"}]}"#;

fn accel(sysfs: &Path, words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
    command.arg("accel").args(words).env("STERNA_IDXD_SYSFS", sysfs).env("STERNA_IDXD_DEV", sysfs);
    command.output().unwrap()
}

/// Two devices with two queues each.
const PAIRS: &str = r#"{"devices":[
    {"name":"dsa0","queues":[{"name":"wq0.0","size":16},{"name":"wq0.1","size":32}]},
    {"name":"iax1","kind":"iaa","queues":[{"name":"wq1.0","size":16},{"name":"wq1.1","size":16}]}]}"#;

fn text_of(output: &Output) -> String {
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
    let text = text_of(&list);
    assert!(list.status.success() && text.contains("modprobe idxd") && text.contains("The CPU does"), "{text}");
    let list = accel(Path::new("/nowhere"), &["list", "--json", "-"]);
    let list: serde_json::Value = serde_json::from_slice(&list.stdout).unwrap();
    assert!(list["no_driver"].as_str().unwrap().contains("modprobe idxd") && list["devices"] == serde_json::json!([]));
    let test = accel(Path::new("/nowhere"), &["test"]);
    assert_eq!(test.status.code(), Some(1), "nothing was tried: {}", text_of(&test));
    let sentence = "no accelerator was tried, because none was opened";
    assert!(text_of(&test).contains(sentence) && text_of(&test).contains("modprobe idxd"), "{}", text_of(&test));
    let cpu = accel(Path::new("/nowhere"), &["test", "--accel", "cpu", "--rounds", "2"]);
    assert!(cpu.status.success(), "the CPU was asked for: {}", text_of(&cpu));
    let named = accel(Path::new("/nowhere"), &["test", "--accel", "dsa"]);
    assert_eq!(named.status.code(), Some(1), "{}", text_of(&named));
    assert!(text_of(&named).contains("--accel dsa"), "{}", text_of(&named));
    let plan = accel(Path::new("/nowhere"), &["plan"]);
    assert_eq!(plan.status.code(), Some(1), "{}", text_of(&plan));
}

#[test]
fn every_queue_of_a_tree_has_its_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let model = Model::manual(ModelConfig::from_json(HEALTHY).unwrap()).unwrap();
    let tree = model.write_tree(dir.path()).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
    command.args(["accel", "list", "--closed"]).env("STERNA_IDXD_SYSFS", &tree.sysfs).env("STERNA_IDXD_DEV", &tree.dev);
    let text = text_of(&command.output().unwrap());
    assert!(text.contains("wq0.0: would be used for zero maps"), "{text}");
    assert!(text.contains("wq1.0: would be used for deflate"), "{text}");
    let output = command.args(["--json", "-"]).output().unwrap();
    let list: serde_json::Value = serde_json::from_slice(&output.stdout).expect("stdout is JSON alone");
    assert!(output.status.success(), "{list}");
    let used = |device: usize| list["devices"][device]["queues"][0]["used_for"].clone();
    assert_eq!(
        used(0),
        serde_json::json!(["zero maps", "copies with checksums", "copies without checksums", "deltas"]),
        "{list}"
    );
    assert_eq!(
        used(1),
        serde_json::json!(["deflate with a window of 4 KiB", "verifying that by inflating it"]),
        "{list}"
    );
    // The same facts as in the text.
    for device in list["devices"].as_array().unwrap() {
        assert!(text.contains(device["name"].as_str().unwrap()), "{device}");
        for queue in device["queues"].as_array().unwrap() {
            assert!(queue["opened_by"].is_null(), "it was not to be opened: {queue}");
            let name = queue["name"].as_str().unwrap();
            let uses: Vec<_> = queue["used_for"].as_array().unwrap().iter().filter_map(|used| used.as_str()).collect();
            let line = match queue["reason"].as_str() {
                None => format!("{name}: would be used for {}", uses.join(", ")),
                Some(reason) => format!("{name}: not used: {reason}"),
            };
            assert_eq!(queue["usable"].as_bool(), Some(queue["reason"].is_null()), "{queue}");
            assert!(text.contains(&line), "{line}: {text}");
        }
    }
    let unused = text.lines().filter(|line| line.contains("wq0.") && line.contains("not used: ")).count();
    assert_eq!(unused, 7, "all other queues of the device say why not: {text}");
}

#[test]
fn devices_that_work_pass_with_every_operation_their_own() {
    let (test, _dir) = with_model(HEALTHY, &["test", "--rounds", "10"]);
    let text = text_of(&test);
    assert!(test.status.success(), "{text}");
    for line in text.lines().filter(|line| line.contains("none")) {
        assert!(line.contains("dsa ") || line.contains("iaa "), "{line}");
    }
    let copies = |line: &&str| line.starts_with("dsa0/wq0.0  copy and checksum") && line.contains("dsa 80");
    assert_eq!(text.lines().filter(copies).count(), 1, "{text}");
}

#[test]
fn every_operation_is_tried_on_every_queue_of_its_kind() {
    let (test, _dir) = with_model(PAIRS, &["test", "--rounds", "3"]);
    let text = text_of(&test);
    assert!(test.status.success(), "{text}");
    let of = |queue: &str| -> Vec<String> {
        let lines = text.lines().filter_map(|line| line.strip_prefix(queue));
        lines.map(|line| line.trim_start().split("  ").next().unwrap().to_owned()).collect()
    };
    let dsa = of("dsa0/wq0.0 ");
    assert_eq!(dsa.len(), 8, "{text}");
    assert_eq!(of("dsa0/wq0.1 "), dsa);
    // One batch to make the stream and one to inflate it: taken in turn, inflate would always meet the second queue.
    for queue in ["iax1/wq1.0", "iax1/wq1.1"] {
        assert_eq!(of(&format!("{queue} ")), ["deflate", "inflate"]);
        let inflate = text.lines().find(|line| line.starts_with(queue) && line.contains("inflate")).unwrap();
        assert!(inflate.contains(" 3  iaa 3 "), "{inflate}");
    }
}

#[test]
fn a_queue_that_is_wrong_is_found_whichever_it_is_and_named() {
    for queue in ["wq1.0", "wq1.1"] {
        let faults = format!(r#"],"faults":[{{"queue":"{queue}","opcode":66,"what":"wrong_result"}}]}}"#);
        let model = PAIRS.strip_suffix("]}").unwrap().to_owned() + &faults;
        let (test, _dir) = with_model(&model, &["test", "--rounds", "2"]);
        let (stdout, stderr) = (String::from_utf8_lossy(&test.stdout), String::from_utf8_lossy(&test.stderr));
        assert_eq!(test.status.code(), Some(1), "{stdout}{stderr}");
        assert!(stderr.contains(&format!("1 of 4 failed the trial: iax1/{queue}.")), "{stderr}");
        assert!(stdout.lines().any(|line| line.starts_with(&format!("iax1/{queue}: "))), "{stdout}");
    }
}

#[test]
fn a_wrong_result_is_said_with_its_place_and_both_values_and_the_trace_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("trace.txt");
    // Checksums and compares, whose results are not checked again.
    for (opcode, part) in [(16, "checksum 0, of "), (5, "pair ")] {
        let model = format!(r#"{{"devices":[{{}}],"faults":[{{"opcode":{opcode},"what":"wrong_result"}}]}}"#);
        let (run, _dir) = with_model(&model, &["capture", "--rounds", "3", "-o", trace.to_str().unwrap()]);
        let text = text_of(&run);
        assert_eq!(run.status.code(), Some(1), "{text}");
        let fault = text.lines().find(|line| line.starts_with("dsa0/wq0.0: ")).expect(&text);
        assert!(fault.contains(part) && fault.contains(" is wrong (batch 0: ") && fault.contains("0x"), "{fault}");
        assert!(!fault.contains('…') && !fault.contains("Some("), "{fault}");
        assert!(text.contains(&format!("The trace is in {}", trace.display())), "{text}");
        std::fs::remove_file(&trace).unwrap();
    }
}

#[test]
fn devices_that_do_not_are_named_and_it_is_a_failure_though_nothing_comes_out_wrong() {
    for (model, word) in [(BROKEN, "copy"), (HALTS, "dsa0")] {
        let (test, _dir) = with_model(model, &["test"]);
        let text = text_of(&test);
        assert_eq!(test.status.code(), Some(1), "{text}");
        assert!(!text.contains("WRONG"), "the CPU has done it over: {text}");
        assert!(text.contains("1 of 1 failed the trial: dsa0/wq0.0"), "{text}");
        let taken = text.lines().find(|line| line.contains("was taken out of service"));
        assert!(taken.is_some_and(|line| line.contains(word)), "{text}");
    }
}

#[test]
fn a_captured_trace_is_read_back() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("trace.txt");
    let (capture, _model) = with_model(HEALTHY, &["capture", "--rounds", "2", "-o", trace.to_str().unwrap()]);
    assert!(capture.status.success(), "{}", text_of(&capture));
    let exchanges = sterna_offload::trace::read(BufReader::new(std::fs::File::open(&trace).unwrap())).unwrap();
    assert!(exchanges.len() > 20 && exchanges.iter().all(|exchange| exchange.answer.is_some()), "{}", exchanges.len());
    let (missing, _model) = with_model(HEALTHY, &["capture", "-o", "/nowhere/trace.txt"]);
    assert_eq!(missing.status.code(), Some(1), "{}", text_of(&missing));
}

#[test]
fn models_without_queues_are_no_success() {
    for model in ["{}", "[]", r#"{"devices":[{"queues":[]}]}"#] {
        for command in [&["test"][..], &["capture", "-o", "/dev/null"]] {
            let (run, _dir) = with_model(model, command);
            assert_eq!(run.status.code(), Some(1), "{}", text_of(&run));
            assert!(text_of(&run).contains("this model has no work queue"), "{}", text_of(&run));
        }
    }
}

#[test]
fn what_is_no_file_of_a_model_holds_nobody_up() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, 0o600.into()).unwrap();
    let large = dir.path().join("large");
    std::fs::File::create(&large).unwrap().set_len((16 << 20) + 1).unwrap();
    for (file, why) in [
        (pipe.as_path(), "no regular file"),
        (Path::new("/dev/zero"), "no regular file"),
        (dir.path(), "no regular file"),
        (large.as_path(), "larger than 16 MiB"),
    ] {
        let run = accel(Path::new("/nowhere"), &["test", "--model", file.to_str().unwrap()]);
        assert_eq!(run.status.code(), Some(1), "{}", text_of(&run));
        assert!(text_of(&run).contains(why), "{}", text_of(&run));
    }
}

#[test]
fn a_fault_of_a_device_that_is_not_there_is_refused() {
    let (run, _dir) = with_model(r#"{"devices":[{}],"faults":[{"device":"dsa1","what":"halt"}]}"#, &["test"]);
    assert_eq!(run.status.code(), Some(1));
    assert!(text_of(&run).contains("there is no device \"dsa1\"; there is dsa0"), "{}", text_of(&run));
}

#[test]
fn two_models_with_a_device_of_one_name_are_not_made_one() {
    let dir = tempfile::tempdir().unwrap();
    let files = [dir.path().join("one.json"), dir.path().join("other.json")];
    files.iter().for_each(|file| std::fs::write(file, r#"{"devices":[{}]}"#).unwrap());
    let both = format!("model:{},model:{}", files[0].display(), files[1].display());
    let run = accel(Path::new("/nowhere"), &["test", "--accel", &both]);
    assert_eq!(run.status.code(), Some(1), "{}", text_of(&run));
    let why = format!("model:{} has a device dsa0, too", files[0].display());
    assert!(text_of(&run).contains(&why), "{}", text_of(&run));
    std::fs::write(&files[1], r#"{"devices":[{"name":"dsa1","queues":[{"name":"wq1.0"}]}]}"#).unwrap();
    let run = accel(Path::new("/nowhere"), &["test", "--rounds", "1", "--accel", &both]);
    assert!(run.status.success() && text_of(&run).contains("dsa1/wq1.0"), "{}", text_of(&run));
}

/// The document's examples, as a user pastes them.
#[test]
fn the_examples_of_the_model_document_work() {
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/accelerator-model.md");
    let document = std::fs::read_to_string(document).unwrap();
    let examples: Vec<&str> =
        document.split("```json\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    assert_eq!(examples.len(), 2);
    let (test, _dir) = with_model(examples[0], &["test", "--rounds", "2"]);
    assert!(test.status.success(), "{}", text_of(&test));
    for queue in ["dsa0/wq0.0", "dsa0/wq0.1", "iax1/wq1.0"] {
        assert!(text_of(&test).contains(queue), "{}", text_of(&test));
    }
    let faulty = ModelConfig::from_json(examples[1]).unwrap();
    assert_eq!(faulty.faults.len(), 3);
    Model::manual(faulty).unwrap();
    // And a plan is a model.
    let plan = accel(Path::new("/nowhere"), &["plan", "--usual", "1", "--json", "-"]);
    let (test, _dir) = with_model(&String::from_utf8(plan.stdout).unwrap(), &["test", "--rounds", "1"]);
    assert!(test.status.success() && text_of(&test).contains("dsa0/wq0.1"), "{}", text_of(&test));
}

/// The content of a file that must not be touched.
const PRECIOUS: &str = "precious";

fn precious(dir: &Path) -> PathBuf {
    let file = dir.join("trace.txt");
    std::fs::write(&file, PRECIOUS).unwrap();
    file
}

#[test]
fn a_capture_that_cannot_start_leaves_the_old_file_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let file = precious(dir.path());
    let out = file.to_str().unwrap();
    let (broken, _model) = with_model("no model", &["capture", "-o", out]);
    let model = dir.path().join("model.json");
    std::fs::write(&model, HEALTHY).unwrap();
    let model = model.to_str().unwrap();
    for (run, code, why) in [
        (broken, 1, "cannot be read"),
        (accel(Path::new("/nowhere"), &["capture", "-o", out]), 1, "none was opened"),
        (accel(Path::new("/nowhere"), &["capture", "--accel", "cpu", "-o", out]), 1, "none was opened"),
        (accel(Path::new("/nowhere"), &["capture", "--accel", "dsa", "-o", out]), 1, "--accel dsa"),
        (
            accel(Path::new("/nowhere"), &["capture", "--model", model, "-o", model]),
            2,
            "is the model that is to be read",
        ),
        (
            accel(Path::new("/nowhere"), &["capture", "--accel", &format!("model:{model}"), "-o", model]),
            2,
            "is the model that is to be read",
        ),
    ] {
        assert_eq!(run.status.code(), Some(code), "{}", text_of(&run));
        assert!(text_of(&run).contains(why), "{}", text_of(&run));
    }
    assert_eq!(std::fs::read_to_string(&file).unwrap(), PRECIOUS);
    assert_eq!(std::fs::read_to_string(model).unwrap(), HEALTHY);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2, "the file and the model");
}

#[test]
fn a_capture_that_is_stopped_keeps_what_there_is() {
    for signal in [rustix::process::Signal::INT, rustix::process::Signal::TERM] {
        let dir = tempfile::tempdir().unwrap();
        let (file, model) = (precious(dir.path()), dir.path().join("model.json"));
        std::fs::write(&model, HEALTHY).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
        // More than ends while this test waits for the first lines.
        command.args(["accel", "capture", "--rounds", "100000", "--model"]).arg(&model).arg("-o").arg(&file);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let written = || {
            let others = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path());
            others
                .filter(|path| *path != file && *path != model)
                .any(|path| path.metadata().is_ok_and(|of| of.len() > 0))
        };
        let end = std::time::Instant::now() + LONG;
        while !written() {
            if std::time::Instant::now() > end {
                child.kill().unwrap();
                panic!("nothing is written");
            }
            std::thread::yield_now();
        }
        assert_eq!(std::fs::read_to_string(&file).unwrap(), PRECIOUS, "nothing is replaced before the end");
        rustix::process::kill_process(rustix::process::Pid::from_child(&child), signal).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(3), "{}", text_of(&output));
        assert!(text_of(&output).contains("The trace is in"), "{}", text_of(&output));
        let exchanges = sterna_offload::trace::read(BufReader::new(std::fs::File::open(&file).unwrap())).unwrap();
        assert!(!exchanges.is_empty());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2, "the file and the model");
    }
}

#[test]
fn a_trace_can_go_to_standard_output_and_the_words_go_elsewhere() {
    let (run, _model) = with_model(HEALTHY, &["capture", "--rounds", "1", "-o", "-"]);
    assert!(run.status.success(), "{}", text_of(&run));
    assert!(!sterna_offload::trace::read(&run.stdout[..]).unwrap().is_empty());
    assert!(String::from_utf8_lossy(&run.stderr).contains("The trace is in standard output"));
}

#[test]
fn output_that_is_lost_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model.json");
    std::fs::write(&model, HEALTHY).unwrap();
    let test = ["test", "--rounds", "1", "--model", model.to_str().unwrap()];
    for words in [&["plan", "--usual", "4"][..], &["plan", "--usual", "4", "--json", "-"], &["list"], &test] {
        for closed in [false, true] {
            let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
            command.arg("accel").args(words).stderr(Stdio::piped());
            command.stdout(std::fs::File::options().write(true).open("/dev/full").unwrap());
            if closed {
                // SAFETY: closing a descriptor is allowed between fork and exec.
                unsafe {
                    command.pre_exec(|| {
                        libc::close(1);
                        Ok(())
                    })
                };
            }
            let output = command.output().unwrap();
            assert_eq!(output.status.code(), Some(1), "{words:?}, closed: {closed}: {}", text_of(&output));
            let why = if closed { "Bad file descriptor" } else { "No space left" };
            assert!(text_of(&output).starts_with("sterna: ") && text_of(&output).contains(why), "{}", text_of(&output));
        }
        let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
        let null = command.arg("accel").args(words).stdout(Stdio::null()).stderr(Stdio::null()).status();
        assert!(null.unwrap().success(), "{words:?}: thrown away on purpose");
    }
}

/// `| head -1`: a reader that closes the pipe is no error.
#[test]
fn a_reader_that_goes_away_is_no_error() {
    for words in [&["plan", "--usual", "4"][..], &["plan", "--usual", "4", "--json", "-"], &["list"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
        let output = command.arg("accel").args(words).stdout(writer).stderr(Stdio::piped()).output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", text_of(&output));
        assert!(!text_of(&output).contains("sterna: "), "{words:?}: {}", text_of(&output));
    }
}

#[test]
fn a_plan_is_written_whole_or_not_at_all() {
    let dir = tempfile::tempdir().unwrap();
    let file = precious(dir.path());
    let refused = accel(Path::new("/nowhere"), &["plan", "--json", file.to_str().unwrap()]);
    assert_eq!(refused.status.code(), Some(1));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), PRECIOUS);
    let full = accel(Path::new("/nowhere"), &["plan", "--usual", "1", "--json", "/dev/full"]);
    assert_eq!(full.status.code(), Some(1), "{}", text_of(&full));
    assert!(text_of(&full).contains("--json: cannot write the plan to /dev/full"), "{}", text_of(&full));
    let written = accel(Path::new("/nowhere"), &["plan", "--usual", "1", "--json", file.to_str().unwrap()]);
    assert!(written.status.success() && text_of(&written).starts_with("# DSA: 1 device"), "{}", text_of(&written));
    let in_file = std::fs::read(&file).unwrap();
    let printed = accel(Path::new("/nowhere"), &["plan", "--usual", "1", "--json", "-"]);
    assert_eq!(printed.stdout, in_file, "on stdout nothing but the file");
    assert!(String::from_utf8_lossy(&printed.stderr).starts_with("# DSA: 1 device"), "{}", text_of(&printed));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn the_number_of_guests_changes_what_a_plan_says_of_them() {
    let notes = |guests: &str| text_of(&accel(Path::new("/nowhere"), &["plan", "--usual", "1", "--vms", guests]));
    let (one, some, many) = (notes("1"), notes("8"), notes("10000"));
    assert!(one.contains("all for one guest") && !one.contains(".ledger"), "{one}");
    assert!(some.contains("11 for each of 8 guests") && some.contains("/run/sterna/accel/dsa0.ledger"), "{some}");
    assert!(many.contains("not one for each of 10000 guests: no more than 44 at once"), "{many}");
}

/// Makes a host's sysfs tree, with plain files as device files.
fn host(config: &str) -> (tempfile::TempDir, sterna_idxd_model::Tree) {
    let dir = tempfile::tempdir().unwrap();
    let tree = Model::manual(ModelConfig::from_json(config).unwrap()).unwrap().write_tree(dir.path()).unwrap();
    (dir, tree)
}

fn on_host(tree: &sterna_idxd_model::Tree, words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
    command.arg("accel").args(words).env("STERNA_IDXD_SYSFS", &tree.sysfs).env("STERNA_IDXD_DEV", &tree.dev);
    command.output().unwrap()
}

#[test]
fn a_model_of_a_device_that_the_host_has_too_is_not_used_beside_it() {
    let (dir, tree) = host(HEALTHY);
    let model = dir.path().join("model.json");
    std::fs::write(&model, HEALTHY).unwrap();
    let run = on_host(&tree, &["test", "--accel", &format!("dsa,model:{}", model.display())]);
    assert_eq!(run.status.code(), Some(1), "{}", text_of(&run));
    assert!(text_of(&run).contains("this host has a device dsa0, too, and both are asked for"), "{}", text_of(&run));
}

#[test]
fn limits_that_the_kernel_does_not_show_are_not_planned_as_zero() {
    let (_dir, tree) = host(HEALTHY);
    for attribute in ["max_transfer_size", "max_batch_size"] {
        std::fs::remove_file(tree.sysfs.join("dsa0").join(attribute)).unwrap();
    }
    let text = text_of(&on_host(&tree, &["plan", "--devices", "dsa0"]));
    assert!(text.contains("accel-config") && !text.contains("--max-"), "{text}");
    assert!(text.contains("does not show all limits of dsa0"), "{text}");
    std::fs::write(tree.sysfs.join("dsa0/max_work_queues_size"), "many\n").unwrap();
    let refused = on_host(&tree, &["plan"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(text_of(&refused).contains("does not show how many queue entries dsa0 has"), "{}", text_of(&refused));
}

#[test]
fn a_device_that_nobody_configured_is_given_one_way_to_be_set_up() {
    let (_dir, tree) = host(r#"{"devices":[{"queues":[]}]}"#);
    let list = text_of(&on_host(&tree, &["list"]));
    assert!(list.contains("to set it up: `sterna accel plan --devices dsa0` prints how"), "{list}");
    assert!(!list.contains("config-wq"), "how its entries are divided is in the plan alone: {list}");
    let dsa = text_of(&on_host(&tree, &["test", "--accel", "dsa"]));
    assert!(dsa.contains("dsa0: no queue of it is configured (`sterna accel plan --devices dsa0`"), "{dsa}");
}

#[test]
fn what_helps_a_queue_is_said_once_and_ends_in_what_a_plan_would_have() {
    let (_dir, tree) = host(HEALTHY);
    std::fs::write(tree.sysfs.join("wq0.0/type"), "kernel\n").unwrap();
    std::fs::write(tree.sysfs.join("wq0.0/threshold"), "0\n").unwrap();
    let list = text_of(&on_host(&tree, &["list", "--closed"]));
    assert_eq!(list.matches("config-wq dsa0/wq0.0").count(), 1, "{list}");
    // 64 entries, of which a plan too would keep a twelfth.
    assert!(list.contains("--threshold=59"), "{list}");
}

#[test]
fn nothing_is_written_to_device_files_that_are_plain_files() {
    let (_dir, tree) = host(HEALTHY);
    let nodes = [tree.dev.join("dsa/wq0.0"), tree.dev.join("iax/wq1.0")];
    // Long enough that a write to a portal would find its place in them.
    nodes.iter().for_each(|node| std::fs::write(node, [0x5a; 4096]).unwrap());
    for words in [&["list"][..], &["test", "--rounds", "1"]] {
        let text = text_of(&on_host(&tree, words));
        assert_eq!(text.matches("is no character device").count(), 2, "{text}");
    }
    for node in nodes {
        assert!(std::fs::read(&node).unwrap() == [0x5a; 4096], "{} was written to", node.display());
    }
}

#[test]
fn a_wrong_list_is_named_once_and_help_has_all_that_can_be_said() {
    let wrong = accel(Path::new("/nowhere"), &["test", "--accel", "gpu"]);
    assert_eq!(wrong.status.code(), Some(2));
    assert_eq!(text_of(&wrong).matches("--accel").count(), 1, "{}", text_of(&wrong));
    for command in ["test", "capture"] {
        let help = text_of(&accel(Path::new("/nowhere"), &[command, "--help"]));
        for name in ["auto", "cpu", "dsa", "iaa", "dsa:/dev/dsa/wqX.Y", "iaa:/dev/iax/wqX.Y", "model:FILE"] {
            assert!(help.contains(name), "{command}: {name}: {help}");
        }
    }
}

#[test]
fn a_captured_trace_is_replayed_and_what_is_wrong_in_it_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("trace.txt");
    let path = trace.to_str().unwrap();
    let (capture, _model) = with_model(HEALTHY, &["capture", "--rounds", "2", "-o", path]);
    assert!(capture.status.success(), "{}", text_of(&capture));
    let replay = |text: &str| {
        std::fs::write(&trace, text).unwrap();
        accel(Path::new("/nowhere"), &["replay", path])
    };
    let whole = std::fs::read_to_string(&trace).unwrap();

    let good = replay(&whole);
    let text = text_of(&good);
    assert!(good.status.success() && text.contains("Nothing in it contradicts"), "{text}");
    for operation in ["DSA Batch of Compare Pattern", "DSA Apply Delta Record", "IAA Compress", "IAA Decompress"] {
        assert!(
            text.lines().any(|line| line.starts_with(operation) && (line.contains("01: ") || line.contains("05: "))),
            "{operation}: {text}"
        );
    }

    // The last line ends within its record, as if its writer was killed.
    let cut = replay(&whole[..whole.len() - 20]);
    assert!(cut.status.success(), "{}", text_of(&cut));
    assert!(
        text_of(&cut).contains("breaks off") && text_of(&cut).contains("was never seen to complete"),
        "{}",
        text_of(&cut)
    );

    let answer = whole.lines().find(|line| line.starts_with("c ")).unwrap();
    let wrong = replay(&whole.replacen(answer, &answer.replacen(" 01", " 1b", 1).replacen(" 05", " 1b", 1), 1));
    assert_eq!(wrong.status.code(), Some(1));
    assert!(text_of(&wrong).contains(": Status is 0x1b, which Batch"), "{}", text_of(&wrong));
    assert!(text_of(&wrong).contains("(5.8.1)") && text_of(&wrong).contains(" findings; docs/"), "{}", text_of(&wrong));

    let two = replay(&whole.repeat(2));
    assert_eq!(two.status.code(), Some(1));
    assert!(text_of(&two).contains("another trace begins here"), "{}", text_of(&two));
    let none = accel(Path::new("/nowhere"), &["replay", "/nowhere/trace.txt"]);
    assert_eq!(none.status.code(), Some(1));
    assert!(text_of(&none).contains("/nowhere/trace.txt: "), "{}", text_of(&none));
}

//! Traces of accelerators, held against the specification as the software model's table has it. Every file in `traces/` is a
//! test: those from a stranger's hardware beside those of the model.
#![cfg(feature = "model")]

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sterna_idxd_model::judge::Verdict;
use sterna_idxd_model::table::{dsa, iaa};
use sterna_idxd_model::{Model, ModelConfig};
use sterna_offload::trace::{Trace, replay};
use sterna_offload::{Offload, Settings, try_all};
use sterna_test_kit::Random;

fn judged(text: &str) -> Verdict {
    replay(text.as_bytes()).unwrap_or_else(|error| panic!("{error}")).verdict
}

fn findings(text: &str) -> Vec<String> {
    judged(text).findings.iter().map(ToString::to_string).collect()
}

fn files() -> Vec<(PathBuf, String)> {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/traces");
    let mut paths: Vec<PathBuf> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.into_iter().map(|path| (path.clone(), std::fs::read_to_string(path).unwrap())).collect()
}

fn file(name: &str) -> String {
    let (_, text) = files().into_iter().find(|(path, _)| path.file_name().unwrap() == name).unwrap();
    text
}

#[test]
fn every_trace_that_is_kept_agrees_with_the_specification() {
    let files = files();
    assert!(files.len() >= 4);
    for (path, text) in files {
        let verdict = judged(&text);
        assert!(verdict.findings.is_empty(), "{}: {:#?}", path.display(), verdict.findings);
        assert!(!verdict.operations.is_empty(), "{}", path.display());
    }
}

#[derive(Clone, Default)]
struct Written(Arc<Mutex<Vec<u8>>>);

impl Write for Written {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn captured(config: &str, rounds: u32) -> String {
    let model = Model::start(ModelConfig::from_json(config).unwrap()).unwrap();
    let written = Written::default();
    let mut settings = Settings::default();
    let silent = ["hang", "halt", "drop_completion"].iter().any(|fault| config.contains(fault));
    settings.patience = Duration::from_secs(if silent { 1 } else { 60 });
    let trace = Arc::new(Trace::new(Box::new(written.clone())));
    settings.trace = Some(Arc::clone(&trace));
    let offload = Offload::with_queues(sterna_offload::model::queues(&model).unwrap(), &settings).unwrap();
    let trials = try_all(&offload, 1, rounds);
    assert!(trials.iter().all(|trial| trial.wrong.is_none()), "{trials:?}");
    offload.shutdown();
    trace.finish().unwrap();
    let bytes = written.0.lock().unwrap().clone();
    String::from_utf8(bytes).unwrap()
}

#[test]
fn what_the_model_does_has_no_findings_whatever_goes_wrong() {
    let iaa = r#"{"name":"iax1","kind":"iaa","queues":[{"name":"wq1.0","size":32}]}"#;
    let fault =
        |every: u32, part: u32| format!(r#"{{"every":{every},"what":{{"page_fault":{{"per_mille":{part}}}}}}}"#);
    let shared = r#"{"name":"dsa0","queues":[{"size":64,"max_batch_size":128}]}"#;
    let mut seen: BTreeMap<u8, u64> = BTreeMap::new();
    let (mut operations, mut unanswered) = (BTreeSet::new(), 0);
    for (what, device, faults, rounds) in [
        ("all well", shared, String::new(), 5),
        (
            "dedicated",
            r#"{"name":"dsa0","queues":[{"mode":"dedicated","size":4,"max_batch_size":8}]}"#,
            String::new(),
            3,
        ),
        ("no batches", r#"{"name":"dsa0","queues":[{"size":8,"max_batch_size":1}]}"#, fault(9, 700), 3),
        ("faults", shared, format!("{},{},{}", fault(5, 500), fault(7, 1000), fault(11, 0)), 5),
        (
            "faults of later devices",
            r#"{"name":"dsa0","version":512,"event_log":true,"queues":[{"size":64,"max_batch_size":128}]}"#,
            format!("{},{}", fault(4, 900), fault(3, 10)),
            5,
        ),
        ("deltas that fault", shared, r#"{"opcode":8,"every":2,"what":{"page_fault":{"per_mille":40}}}"#.into(), 10),
        ("late", shared, r#"{"every":40,"what":{"late":{"delay_ns":3000000}}}"#.into(), 2),
        ("hardware errors", shared, r#"{"nth":70,"what":{"status":{"code":32}}}"#.into(), 2),
        ("a hang", shared, r#"{"nth":100,"what":"hang"}"#.into(), 2),
        ("a lost record", shared, r#"{"opcode":1,"nth":3,"what":"drop_completion"}"#.into(), 2),
        ("a halt", shared, r#"{"nth":150,"what":"halt"}"#.into(), 2),
    ] {
        let config = format!(r#"{{"seed":7,"devices":[{device},{iaa}],"faults":[{faults}]}}"#);
        let verdict = judged(&captured(&config, rounds));
        assert!(verdict.findings.is_empty(), "{what}: {:#?}", verdict.findings);
        for row in &verdict.operations {
            operations.insert(row.operation.clone());
            row.statuses.iter().for_each(|(code, count)| *seen.entry(*code).or_default() += count);
        }
        unanswered += verdict.unanswered.len();
    }
    // It is about something: every operation that the product uses, and every way to end that was asked for.
    for row in dsa::OPERATIONS.iter().chain(iaa::OPERATIONS).filter(|row| row.code != 0x20 && row.code != 0x44) {
        let used = !matches!(row.name, "No-op" | "Drain" | "Batch" | "Fill" | "Memory Copy with Dualcast");
        assert_eq!(operations.contains(row.name), used, "{}", row.name);
    }
    for code in [0x01, 0x02, 0x03, 0x05, 0x20, 0x83] {
        assert!(seen.get(&code).is_some_and(|count| *count > 0), "{code:#04x} is not among {seen:x?}");
    }
    assert!(unanswered >= 2, "{unanswered}");
}

/// The first line that begins so, and its index.
fn line_of<'a>(lines: &[&'a str], begins: &str) -> (usize, &'a str) {
    let at = lines.iter().position(|line| line.starts_with(begins)).unwrap();
    (at, lines[at])
}

#[test]
fn what_does_not_hang_together_is_found_where_it_is() {
    let whole = file("model-healthy.txt");
    let lines: Vec<&str> = whole.lines().collect();
    let with = |change: &dyn Fn(&mut Vec<String>)| {
        let mut changed: Vec<String> = lines.iter().map(|line| (*line).to_owned()).collect();
        change(&mut changed);
        findings(&(changed.join("\n") + "\n"))
    };
    let (submitted, submission) = line_of(&lines, "s ");
    let number: Vec<&str> = submission.split(' ').collect();
    let (time, number) = (number[1], number[2]);
    let (completed, completion) = line_of(&lines, "c ");
    assert_eq!(completion.split(' ').nth(2), Some(number), "the first batch is answered first");
    let (member, a_member) = line_of(&lines, "d ");
    let (record, _) = line_of(&lines, "r ");
    let replaced = |line: usize, at: usize, word: &str| {
        let mut words: Vec<&str> = lines[line].split(' ').collect();
        words[at] = word;
        let line_text = words.join(" ");
        with(&|lines| lines[line] = line_text.clone())
    };
    let expect = |found: Vec<String>, line: usize, parts: &[&str]| {
        let start = format!("line {}, submission {number}", line + 1);
        let is_it = |one: &String| one.starts_with(&start) && parts.iter().all(|part| one.contains(part));
        assert!(found.iter().any(is_it), "{start} … {parts:?} is not in {found:#?}");
    };
    let earlier = (time.parse::<u64>().unwrap() - 1).to_string();
    expect(replaced(completed, 1, &earlier), completed, &["time", &earlier, time]);
    let own = completion.split(' ').nth(3).unwrap();
    let long = format!("{own}{own}");
    expect(replaced(completed, 3, &long), completed, &["completion record", "64 bytes", "8.2"]);
    let zero = format!("00{}", &own[2..]);
    expect(replaced(completed, 3, &zero), completed, &["Status is 0x00", "5.8.1"]);
    expect(with(&|lines| drop(lines.remove(member))), submitted, &["Descriptor Count is 32, and 31", "8.3.2"]);
    expect(with(&|lines| drop(lines.remove(record))), completed, &["records of members are 31"]);
    expect(with(&|lines| lines.insert(member, a_member.into())), submitted, &["Descriptor Count is 32, and 33"]);
    let pasid = a_member.replacen(" 00", " 07", 1);
    expect(with(&|lines| lines[member] = pasid.clone()), member, &["member 0", "PASID", "8.1.1"]);
    expect(with(&|lines| lines.push(completion.into())), lines.len(), &["completion", "answered before"]);
    expect(with(&|lines| lines.push(a_member.into())), lines.len(), &["member does not follow"]);
    let record_line = lines[record];
    expect(with(&|lines| lines.push(record_line.into())), lines.len(), &["record of a member does not follow"]);
    let found = with(&|lines| lines.push(format!("c 99999999999999 9999 {own}")));
    assert!(found.iter().any(|one| one.contains("submission 9999") && one.contains("not submitted")), "{found:#?}");

    // Members of what is no batch.
    let (single, _) = lines.iter().enumerate().rfind(|(_, line)| line.starts_with("s ")).unwrap();
    let of = lines[single].split(' ').nth(2).unwrap();
    let foreign = a_member.replacen(&format!("d {number} "), &format!("d {of} "), 1);
    let found = with(&|lines| lines.insert(single + 1, foreign.clone()));
    assert!(found.iter().any(|one| one.contains("has members, and is no batch")), "{found:#?}");
    let (described, _) = line_of(&lines, "q ");
    let found = with(&|lines| drop(lines.remove(described)));
    assert!(found.iter().any(|one| one.contains("no line has described")), "{found:#?}");
}

/// No list of the product faults, so this is written by hand: what is done of a batch whose list ends at a page.
#[test]
fn a_batch_whose_list_faults_has_done_what_could_be_read() {
    let whole = file("model-healthy.txt");
    let lines: Vec<&str> = whole.lines().collect();
    let (_, submission) = line_of(&lines, "s ");
    let list = &submission.split(' ').nth(4).unwrap()[32..48];
    let (completed, completion) = line_of(&lines, "c ");
    let replayed = |done: u32, status: &str, address: &str| {
        let mut changed: Vec<String> = lines.iter().map(|line| (*line).to_owned()).collect();
        let words: Vec<&str> = completion.split(' ').collect();
        let fields = format!("{status}000000{:08x}{address}{}", done.swap_bytes(), "00".repeat(16));
        changed[completed] = format!("c {} {} {fields}", words[1], words[2]);
        for (index, line) in changed[completed + 1..].iter_mut().take(32).enumerate() {
            if index as u32 >= 10 {
                *line = format!("r {} {}", words[2], "00".repeat(32));
            }
        }
        findings(&(changed.join("\n") + "\n"))
    };
    assert!(replayed(10, "06", list).is_empty(), "{:#?}", replayed(10, "06", list));
    for (done, status, address, what) in [
        (9, "06", list, "member 9: Status is 0x01, and only 9 members were processed"),
        (11, "06", list, "member 10: completion record is missing"),
        (32, "06", list, "Bytes Completed is 0x20"),
        (10, "86", list, "a write, which it does not do (table 8-10)"),
        (10, "06", "0000000000700000", "Fault Address is 0x700000000000, and no operand of a read is there"),
        (10, "05", list, "Descriptors Completed is 10, and 32 members had to be processed"),
        (10, "14", list, "nothing in the descriptor is a reason for that"),
    ] {
        let found = replayed(done, status, address);
        assert!(found.iter().any(|one| one.contains(what)), "{what} is not in {found:#?}");
    }
}

#[test]
fn a_dedicated_queue_takes_what_it_has_entries_for() {
    let text = file("model-single.txt");
    let full = text.replacen("dedicated 8 ", "dedicated 2 ", 1);
    assert_ne!(text, full);
    let most = findings(&full);
    assert!(most.iter().any(|one| one.contains("has 3 descriptors, and entries for 2 (5.3)")), "{most:#?}");
    let shared = full.replacen("dedicated 2 ", "shared 2 ", 1);
    assert!(findings(&shared).is_empty(), "those say when they are full");
}

#[test]
fn a_trace_that_breaks_off_anywhere_has_descriptors_without_an_answer_and_no_findings() {
    let text = file("model-healthy.txt");
    let mut random = Random::new(1);
    let start = text.find('\n').unwrap() + 1;
    let ends = (0..200).map(|_| start + random.below((text.len() - start) as u64) as usize);
    let line_ends = text.match_indices('\n').map(|(at, _)| at + 1).step_by(7);
    let mut unanswered = 0;
    for end in ends.chain(line_ends) {
        let replayed = replay(&text.as_bytes()[..end]).unwrap();
        assert_eq!(replayed.truncated, !text[..end].ends_with('\n'), "at {end}");
        assert!(replayed.verdict.findings.is_empty(), "at {end}: {:#?}", replayed.verdict.findings);
        unanswered += replayed.verdict.unanswered.len();
    }
    assert!(unanswered > 100, "{unanswered}");
}

#[test]
fn what_a_queue_permits_is_held_against_what_it_was_given() {
    let whole = file("model-healthy.txt");
    let line = "q dsa0/wq0.0 dsa 256 shared 64 128 2097152 0\n";
    assert!(whole.contains(line));
    for (changed, what) in [
        ("q dsa0/wq0.0 iaa 256 shared 64 128 2097152 0\n", Some("is Iaa of a queue that is called \"dsa0/wq0.0\"")),
        ("q dsa0/wq0.0 dsa 256 shared 64 31 2097152 0\n", Some("Descriptor Count is 32, and 2 to 31 are permitted")),
        ("q dsa0/wq0.0 dsa 256 shared 64 128 4095 0\n", Some("Transfer Size is 4096, and 1 to 4095 are permitted")),
        ("q dsa0/wq0.0 dsa 256 shared 0 128 2097152 0\n", Some("configuration of the queue")),
        ("q dsa0/wq0.0 dsa 256 shared 64 128 4294967296 0\n", Some("configuration of the queue")),
        // What permits as much or more contradicts nothing, nor does the number of a version.
        ("q dsa0/wq0.0 dsa 512 dedicated 64 1024 2147483648 1\n", None),
        // Twice the same.
        (&line.repeat(2), None),
        (&format!("{line}q dsa0/wq0.0 dsa 256 shared 64 127 2097152 0\n"), Some("is another than before")),
    ] {
        let found = findings(&whole.replacen(line, changed, 1));
        match what {
            Some(what) => assert!(found.iter().any(|one| one.contains(what)), "{what} is not in {found:#?}"),
            None => assert!(found.is_empty(), "{changed}: {found:#?}"),
        }
    }
}

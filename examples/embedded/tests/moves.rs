//! The example moves its guest, as a reader would run it; and its verification detects a wrong page.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use sterna_embedded::Machine;
use vm_memory::{Bytes, GuestAddress};

/// The page for embedders, and the two sources whose code it shows.
const PAGE: &str = include_str!("../../../docs/embedding.md");
const EXAMPLE: &str = include_str!("../src/main.rs");
const ADAPTER: &str = include_str!("../../../crates/sterna/src/vm_memory.rs");

const PROGRAM: &str = env!("CARGO_BIN_EXE_sterna-embedded");

#[test]
fn a_guest_that_writes_its_memory_arrives_whole_in_another_process() {
    let mut receiver = Command::new(PROGRAM).args(["receive", "127.0.0.1:0"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(receiver.stdout.take().unwrap()).lines().map(Result::unwrap);
    let address = lines.next().unwrap().strip_prefix("listening on ").unwrap().to_owned();

    let sent = Command::new(PROGRAM).args(["send", &address]).output().unwrap();
    let report = String::from_utf8_lossy(&sent.stdout).into_owned();
    assert!(sent.status.success() && report.contains("completed"), "{report}{}", String::from_utf8_lossy(&sent.stderr));

    let verified = lines.next().unwrap();
    let steps: u64 =
        verified.strip_prefix("verified 20480 pages after ").unwrap().split(' ').next().unwrap().parse().unwrap();
    assert!(steps >= 10_000, "the guest ran for 5000 steps at each side: {verified}");
    assert!(receiver.wait().unwrap().success());
}

#[test]
fn the_page_for_embedders_shows_code_that_is_compiled() {
    for (first, compiled) in
        [("// source\nlet mut source = Source::new", EXAMPLE), ("let (mut blocks, mut slots)", ADAPTER)]
    {
        let begin = PAGE.find(&format!("```rust\n{first}")).expect("the page has the code") + "```rust\n".len();
        let code = &PAGE[begin..begin + PAGE[begin..].find("```").unwrap()];
        let lines: Vec<_> = compiled.lines().map(|line| line.trim_start_matches("//!").trim()).collect();
        for line in code.lines().map(str::trim).filter(|line| !["", "// source", "// destination"].contains(line)) {
            assert!(lines.contains(&line), "compiled nowhere: {line}");
        }
    }
}

#[test]
fn verification_finds_a_page_that_was_lost() {
    let mut machine = Machine::new().unwrap();
    machine.run();
    machine.wait_for(1);
    machine.halt();
    assert_eq!(machine.verify(), Ok(20480));
    // Step 1 has written the second word of page 7919; no step so early has written the last page.
    let (written, unwritten) = (GuestAddress((7919 << 12) + 8), GuestAddress((4 << 30) + (4096 << 12) - 1));
    let value: u64 = machine.memory.read_obj(written).unwrap();
    machine.memory.write_obj(0u64, written).unwrap();
    let lost = machine.verify().unwrap_err();
    assert!(lost.contains("0x1eef000"), "{lost}");
    machine.memory.write_obj(value, written).unwrap();
    machine.memory.write_obj(1u8, unwritten).unwrap();
    let foreign = machine.verify().unwrap_err();
    assert!(foreign.contains("0x100fff000"), "{foreign}");
}

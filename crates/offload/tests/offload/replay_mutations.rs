//! Any field of a good trace that is changed is found, or has no meaning that a trace could contradict. What has none, and why,
//! is [`without_meaning`]: nothing else may pass.
#![cfg(feature = "model")]

use std::collections::BTreeMap;

use sterna_idxd_model::table::dsa::{self, code};
use sterna_offload::trace::replay;
use sterna_test_kit::Random;

/// What the bytes at the end of a line are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    Submission,
    Member,
    Completion,
    MemberRecord,
}

/// The bytes of a line, and with them those that they belong to.
struct Place {
    line: usize,
    part: Part,
    iaa: bool,
    version: u32,
    descriptor: Vec<u8>,
    record: Option<Vec<u8>>,
}

fn unhex(word: &str) -> Vec<u8> {
    (0..word.len() / 2).map(|at| u8::from_str_radix(&word[2 * at..2 * at + 2], 16).unwrap()).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn places(lines: &[String]) -> Vec<Place> {
    let mut versions: BTreeMap<&str, u32> = BTreeMap::new();
    let mut queues: BTreeMap<&str, &str> = BTreeMap::new();
    // Of each submission its own bytes and those of its members.
    let (mut descriptors, mut records) = (BTreeMap::<_, Vec<_>>::new(), BTreeMap::<_, Vec<_>>::new());
    let mut found = Vec::new();
    for (line, text) in lines.iter().enumerate() {
        let words: Vec<&str> = text.split(' ').collect();
        let (part, number) = match words[0] {
            "q" => {
                versions.insert(words[1], words[3].parse().unwrap());
                continue;
            }
            "s" => (Part::Submission, words[2]),
            "d" => (Part::Member, words[1]),
            "c" => (Part::Completion, words[2]),
            "r" => (Part::MemberRecord, words[1]),
            _ => continue,
        };
        if part == Part::Submission {
            queues.insert(number, words[3]);
        }
        let is_descriptor = matches!(part, Part::Submission | Part::Member);
        let of = if is_descriptor { descriptors.entry(number) } else { records.entry(number) };
        let of = of.or_default();
        of.push(unhex(words[words.len() - 1]));
        found.push((line, part, number, of.len() - 1));
    }
    let place = |(line, part, number, index): (usize, Part, &str, usize)| Place {
        line,
        part,
        iaa: queues[number].starts_with("iax"),
        version: versions[queues[number]],
        descriptor: descriptors[number][index].clone(),
        record: records.get(number).map(|records| records[index].clone()),
    };
    found.into_iter().map(place).collect()
}

fn lines(name: &str) -> Vec<String> {
    let path = format!("{}/tests/traces/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(path).unwrap().lines().map(str::to_owned).collect()
}

/// Why a change says nothing that a trace could contradict; none if it has to be found. `at` is the first byte that changed.
fn without_meaning(place: &Place, at: usize, before: &[u8], after: &[u8]) -> Option<&'static str> {
    match (place.part, place.iaa) {
        (Part::Submission | Part::Member, false) => dsa_descriptor(place, at, before, after),
        (Part::Submission | Part::Member, true) => iaa_descriptor(at, before, after),
        (_, false) => dsa_record(place, at, before, after),
        (_, true) => iaa_record(at, before, after),
    }
}

/// Traffic classes, cache control and strict ordering: where table 5-3 permits them at all.
const HINTS: u32 = 0x7f00;

fn changed_flags(before: &[u8], after: &[u8]) -> u32 {
    (dsa::FLAGS.get(before) ^ dsa::FLAGS.get(after)) as u32
}

fn dsa_descriptor(place: &Place, at: usize, before: &[u8], after: &[u8]) -> Option<&'static str> {
    let operation = before[7];
    let status = place.record.as_ref().map(|record| record[0] & 0x3f);
    let crc = matches!(operation, code::CRC | code::COPY_CRC);
    let checked = matches!(operation, code::COMPARE | code::COMPARE_PATTERN | code::CREATE_DELTA);
    let checks = dsa::FLAGS.get(before) as u32 & dsa::CHECK_RESULT != 0;
    match at {
        4..=6 => match changed_flags(before, after) & !HINTS {
            0 => Some("a hint"),
            dsa::FENCE if place.part == Part::Member => Some("a fence behind nothing that has failed"),
            dsa::CHECK_RESULT if checked => Some("a check of a result that was expected, or of none"),
            dsa::REQUEST_RECORD if status != Some(1) => Some("a record is asked for, and written at a fault anyway"),
            dsa::BATCH_ERROR if operation == code::BATCH && status == Some(5) && place.version >= 0x200 => {
                Some("an earlier error of a batch that has one now")
            }
            bits if crc && bits & !(dsa::READ_SEED | dsa::BYPASS_INVERSION | dsa::BYPASS_REFLECTION) == 0 => {
                Some("how a checksum is made")
            }
            _ => None,
        },
        // What another operation has no use for is reserved, and what it requires is not there: few can be taken for others.
        7 if similar(operation) && similar(after[7]) => Some("another operation that can have the same fields"),
        8..16 => Some("an address"),
        16..32 => match operation {
            code::COMPARE_PATTERN | code::FILL if at >= 24 => Some("a pattern"),
            code::BATCH if at >= 24 => None,
            code::CRC if at >= 24 => None,
            _ => Some("an address"),
        },
        32..36 if operation != code::BATCH => Some("another size that is permitted"),
        40..48 if operation == code::CREATE_DELTA => Some("an address"),
        48..52 if operation == code::CREATE_DELTA => Some("another size that is permitted"),
        40..44 if operation == code::APPLY_DELTA => Some("another size that is permitted"),
        40..44 if crc => Some("how a checksum is made"),
        // Bit 0, and of a mask the bits of other results.
        40 | 56 if checked && status != Some(1) && status != Some(2) => Some("an expectation that is not looked at"),
        40 if checked && (!checks || (before[at] ^ after[at]) & 1 == 0) => Some("an expectation that is not looked at"),
        56 if operation == code::CREATE_DELTA => Some("an expectation that is not looked at"),
        _ => None,
    }
}

/// Two addresses at most and a size, no other field that must not be 0, and a record that may say nothing but success.
fn similar(operation: u8) -> bool {
    let all =
        [code::MOVE, code::FILL, code::COMPARE, code::COMPARE_PATTERN, code::CRC, code::COPY_CRC, code::CACHE_FLUSH];
    all.contains(&operation)
}

fn dsa_record(place: &Place, at: usize, before: &[u8], after: &[u8]) -> Option<&'static str> {
    let operation = place.descriptor[7];
    let status = before[0] & 0x3f;
    let fault = matches!(status, 3 | 4 | 6);
    let batch = operation == code::BATCH;
    match at {
        0 => match after[0] & 0x3f {
            same if same == status && (!fault || before[0] >> 7 == after[0] >> 7) => Some("bits of Status without use"),
            0x1e | 0x20..=0x22 => Some("a hardware error, which anything may end in"),
            5 if batch && status == 1 => Some("a batch that is called failed after a page request (8.3.2)"),
            0x10 => Some("an operation that the device has not, where it has never shown it"),
            1 | 2 if fault && before[4..8] == [0; 4] => Some("a fault at the first byte, of what also ends at none"),
            0 if place.version >= 0x200 => Some("a member's record that has met a fault itself (3.13.3)"),
            7 | 8 if operation == code::APPLY_DELTA && status == 1 => Some("what the data was"),
            _ => None,
        },
        1 => match operation {
            code::COMPARE | code::COMPARE_PATTERN if after[1] <= 1 && before[4..8] == [0; 4] && !fault => {
                Some("what the data was")
            }
            code::COMPARE | code::COMPARE_PATTERN | code::CREATE_DELTA => None,
            code::MOVE if fault && after[1] <= 1 => Some("the direction of a copy"),
            code::MOVE if fault => None,
            _ => Some("a field without use"),
        },
        2 if fault && place.version >= 0x200 && (before[2] ^ after[2]) & 0xf != 0 => match after[2] {
            masked if masked & 1 == 1 => Some("the address of a fault that is kept secret"),
            _ => Some("another operand of a page that has both, or an unknown one"),
        },
        2 | 3 => Some("a field without use"),
        4..8 => match (operation, before[1]) {
            _ if fault && !batch => Some("how much was done before the page that faulted"),
            (code::COMPARE | code::COMPARE_PATTERN, 1) | (code::CREATE_DELTA, 2) => Some("what the data was"),
            _ => None,
        },
        8..16 if fault => Some("another page of the operand that faulted, or another place on it"),
        8..16 => Some("a field without use"),
        16..20 if operation == code::CREATE_DELTA => Some("what the data was"),
        16..20 if matches!(operation, code::CRC | code::COPY_CRC) => Some("what the data was"),
        _ => Some("a field without use"),
    }
}

fn iaa_descriptor(at: usize, before: &[u8], after: &[u8]) -> Option<&'static str> {
    match at {
        4..=6 => match changed_flags(before, after) & !HINTS {
            0 => Some("a hint"),
            // CRC Select, the toggle, and what is done with the AECS.
            bits if bits & !0x6f_0000 == 0 => Some("what is done with the AECS and the checksum"),
            _ => None,
        },
        8..16 | 16..32 | 40..48 => Some("an address"),
        32..36 | 48..52 => Some("another size that is permitted"),
        38..40 => Some("how a stream is ended"),
        _ => None,
    }
}

fn iaa_record(at: usize, before: &[u8], after: &[u8]) -> Option<&'static str> {
    let status = before[0] & 0x3f;
    let fault = matches!(status, 3 | 4);
    match at {
        0 => match after[0] & 0x3f {
            same if same == status && (!fault || before[0] >> 7 == after[0] >> 7) => Some("bits of Status without use"),
            1 if fault && before[4..8] == [0; 4] => Some("a fault at the first byte, of what also ends at none"),
            3 | 4 if fault => Some("a fault with or without a page request (IAA 6.2.1)"),
            0x1e | 0x20..=0x24 => Some("a hardware error, which anything may end in"),
            0x10 => Some("an operation that the device has not, where it has never shown it"),
            0x0b if status == 1 => Some("what the data was"),
            _ => None,
        },
        4..8 if fault => Some("how much was done before the page that faulted"),
        4..8 => None,
        8..16 if fault => Some("another page of the operand that faulted, or another place on it"),
        24..=28 | 30..=35 => Some("what the data was"),
        _ => Some("a field without use"),
    }
}

#[test]
fn what_is_changed_is_found_or_has_no_meaning() {
    let seed = std::env::var("STERNA_SEED").map_or(1, |seed| seed.parse().unwrap());
    let mutations = std::env::var("STERNA_MUTATIONS").map_or(3000, |count| count.parse::<u64>().unwrap());
    println!("STERNA_SEED={seed} STERNA_MUTATIONS={mutations}");
    let mut random = Random::new(seed);
    let mut reasons: BTreeMap<&str, u64> = BTreeMap::new();
    let mut found = 0_u64;
    let mut missed: Vec<String> = Vec::new();
    for name in ["model-healthy.txt", "model-faults.txt", "model-single.txt"] {
        let mut lines = lines(name);
        let places = places(&lines);
        for _ in 0..mutations {
            let place = &places[random.below(places.len() as u64) as usize];
            let of_descriptor = matches!(place.part, Part::Submission | Part::Member);
            let before = if of_descriptor { &place.descriptor } else { place.record.as_ref().unwrap() };
            let at = random.below(before.len() as u64) as usize;
            let mut after = before.clone();
            after[at] ^= if random.once_in(2) { 1 << random.below(8) } else { 1 + random.below(255) as u8 };
            let whole = lines[place.line].clone();
            lines[place.line] = whole.replace(&hex(before), &hex(&after));
            let text = lines.join("\n") + "\n";
            lines[place.line] = whole;
            let verdict = replay(text.as_bytes()).unwrap().verdict;
            if verdict.found > 0 {
                found += 1;
                continue;
            }
            match without_meaning(place, at, before, &after) {
                Some(reason) => *reasons.entry(reason).or_default() += 1,
                None => missed.push(format!(
                    "{name}, line {}, byte {at}: {:#04x} in place of {:#04x}, {:?} of {}",
                    place.line + 1,
                    after[at],
                    before[at],
                    place.part,
                    hex(&place.descriptor)
                )),
            }
        }
    }
    println!("{found} found; without meaning: {reasons:#?}");
    assert!(missed.is_empty(), "{missed:#?}");
    // Most of what is not found are addresses, and bytes that a record has no use for.
    assert!(found > mutations, "{found}");
}

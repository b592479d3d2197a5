//! Checks a batch: that its list is the one that its descriptor names, and that its record is consistent with those of
//! its members.

use super::{Queue, Violation};
use crate::table::dsa::{self, record};
use crate::table::status;

/// Checks the members, once all are known.
pub(super) fn submitted(descriptor: &[u8; 64], members: &[[u8; 64]]) -> Vec<Violation> {
    let mut violations = Vec::new();
    let count = dsa::SIZE.get(descriptor);
    if members.len() as u64 != count {
        let text = format!("is {count}, and {} members were submitted", members.len());
        violations.push(Violation::new("Descriptor Count", "8.3.2", text));
    }
    // Records of 32 bytes, aligned to them: the same address or none in common.
    let address = |of: &[u8; 64]| dsa::RECORD.get(of);
    let valid = |of: &&[u8; 64]| dsa::FLAGS.get(&of[..]) as u32 & dsa::RECORD_VALID != 0;
    let mut records: Vec<u64> = members.iter().chain([descriptor]).filter(valid).map(address).collect();
    records.sort_unstable();
    if let Some(twice) = records.windows(2).find(|pair| pair[1] - pair[0] < record::BYTES as u64) {
        let text = format!("{:#x} is used twice in the batch", twice[1]);
        violations.push(Violation::new(dsa::RECORD.name, "8.1.4", text));
    }
    let (list, end) = (dsa::SOURCE.get(descriptor), dsa::SOURCE.get(descriptor).saturating_add(count * 64));
    if let Some(inside) = records.iter().find(|&&at| at >= list && at < end) {
        let text = format!("{inside:#x} is in the descriptor list");
        violations.push(Violation::new(dsa::RECORD.name, "8.1.4", text));
    }
    violations
}

/// Checks the records, once all are known. Returns each violation with the index of its member.
pub(super) fn answered(
    descriptor: &[u8; 64],
    members: &[[u8; 64]],
    own: &[u8],
    records: &[[u8; 32]],
    queue: &Queue,
) -> Vec<(Option<usize>, Violation)> {
    let mut violations = Vec::new();
    let mut find = |member, field, section, text| violations.push((member, Violation::new(field, section, text)));
    if records.len() != members.len() {
        let text = format!("are {}, and {} members were submitted", records.len(), members.len());
        find(None, "records of members", "format", text);
        return violations;
    }
    let code = own[0] & 0x3f;
    let count = members.len() as u64;
    for (index, seen) in records.iter().enumerate() {
        if seen[0] == 0 && seen.iter().any(|&byte| byte != 0) {
            let text = "is 0, which no device writes, and the rest of the record is not".to_owned();
            find(Some(index), "Status", "8.2.1", text);
        }
    }
    if !matches!(code, status::SUCCESS | status::BATCH_FAIL | status::BATCH_FAULT) {
        // Refused: the list was not even read. At a hardware error the specification says nothing.
        let written = records.iter().position(|seen| seen[0] != 0);
        if let (Some(index), status::BAD_OPERATION..=0x1c) = (written, code) {
            find(Some(index), "Status", "5.4", format!("is there, and the batch was refused with {code:#04x}"));
        }
        return violations;
    }
    let done = record::COMPLETED.get(own);
    let field = "Descriptors Completed";
    let failed = |seen: &[u8; 32]| !matches!(seen[0] & 0x3f, 0 | status::SUCCESS);
    let fenced = |at: &usize| dsa::FLAGS.get(&members[*at]) as u32 & dsa::FENCE != 0;
    let before = dsa::FLAGS.get(descriptor) as u32 & dsa::BATCH_ERROR != 0;
    // 3.9: the first fence behind a failure abandons itself and all behind it.
    let abandoned = (0..members.len()).filter(fenced).find(|&at| before || records[..at].iter().any(failed));
    let reached = abandoned.map_or(count, |at| at as u64);
    // A record that faults is copied by the kernel later, if at all (3.13.3): then the result of its member is unknown
    // here.
    let asked = |at: usize| dsa::FLAGS.get(&members[at]) as u32 & dsa::REQUEST_RECORD != 0;
    let missing = (0..done.min(count) as usize).find(|&at| records[at][0] == 0 && asked(at));
    let lost = queue.version >= 0x200 && code != status::SUCCESS && missing.is_some();
    match code {
        status::BATCH_FAULT if done >= count || done > reached => {
            find(None, field, "8.3.2", format!("is {done}, and the list of {count} could not be read"));
        }
        status::BATCH_FAULT => {}
        _ if done != reached && !lost => {
            find(None, field, "8.3.2, 3.9", format!("is {done}, and {reached} members had to be processed"));
        }
        _ => {}
    }
    if let Some(index) = missing
        && !lost
    {
        find(Some(index), "completion record", "8.3.2", format!("is missing, and {done} members were processed"));
    }
    for (index, seen) in records.iter().enumerate() {
        if index as u64 >= done && seen[0] != 0 {
            let text = format!("is {:#04x}, and only {done} members were processed", seen[0]);
            find(Some(index), "Status", "8.3.2, 3.9", text);
        } else if code == status::SUCCESS && failed(seen) {
            let text = format!("is {:#04x}, and the batch is a success", seen[0]);
            find(Some(index), "Status", "8.3.2", text);
        }
    }
    if before && code == status::SUCCESS {
        find(None, "Status", "table 8-14", "is a success, and the batch had an error before".to_owned());
    }
    violations
}

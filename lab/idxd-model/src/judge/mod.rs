//! Checks a device's behaviour: compares every submitted descriptor and every returned record with the
//! [`table`](crate::table) of the specification. So a trace of real hardware becomes a test.
//!
//! The judge does not see memory, so it cannot check compared or copied data; it checks sizes, flags, codes, addresses,
//! counts and order. Fields that the specification leaves undefined (because a status does not use them) are ignored.
//!
//! | module | checks |
//! |---|---|
//! | `descriptor` | whether the queue may get it: sections 5.4, 5.5, 8.1, 8.3; IAA 4.1, 4.2 |
//! | `operands` | the memory that an operation reads and writes, which contains every fault address |
//! | `completion` | whether the record follows from the descriptor: sections 5.8, 8.2, 8.3; IAA 4.4, 6.2 |
//! | `batch` | whether the records of members and of their batch are consistent: sections 3.8, 3.9, 8.3.2 |
//! | this one | the assignment, order and number of submissions and completions |

mod batch;
mod completion;
mod descriptor;
mod operands;
mod summary;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::{Display, Formatter};

use crate::config::{Kind, Mode};
use crate::table::dsa::{self, code};
use crate::table::status;
use summary::Summary;
pub use summary::{Latency, OperationSummary};

/// Maximum number of findings that are kept; further ones are only counted.
const MAX_FINDINGS: usize = 1000;

/// A trace's description of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queue {
    /// DSA or IAA.
    pub kind: Kind,
    /// Hardware version, `0x100` is 1.0; 0 if not known.
    pub version: u32,
    /// Shared or dedicated.
    pub mode: Mode,
    /// Entries.
    pub size: u32,
    /// Maximum number of descriptors of a batch.
    pub max_batch: u64,
    /// Maximum number of bytes of a transfer.
    pub max_transfer: u64,
    /// Whether descriptors may block on faults.
    pub block_on_fault: bool,
}

/// A violation of the specification, or a contradiction within the trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Line of the trace.
    pub line: usize,
    /// Number of the submission.
    pub submission: Option<u64>,
    /// Index of the member of a batch, from 0.
    pub member: Option<usize>,
    /// The field, by its name in the specification.
    pub field: &'static str,
    /// Its value, and what is wrong with it.
    pub violation: String,
    /// The violated section; of the DSA specification unless it names another.
    pub section: &'static str,
}

impl Display for Finding {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "line {}", self.line)?;
        if let Some(number) = self.submission {
            write!(f, ", submission {number}")?;
        }
        if let Some(member) = self.member {
            write!(f, ", member {member}")?;
        }
        write!(f, ": {} {} ({})", self.field, self.violation, self.section)
    }
}

/// A descriptor without a completion: the trace ended, or the device was given up. Not a finding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unanswered {
    /// Line of the submission.
    pub line: usize,
    /// Number of the submission.
    pub submission: u64,
    /// Name of the queue.
    pub queue: String,
    /// Name of the operation.
    pub operation: &'static str,
}

/// The result of checking a trace.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// The findings, by line; the first thousand of them.
    pub findings: Vec<Finding>,
    /// The total number of findings.
    pub found: u64,
    /// Descriptors without a completion, in order.
    pub unanswered: Vec<Unanswered>,
    /// By operation, the amount of work and its duration.
    pub operations: Vec<OperationSummary>,
}

/// A violation by a descriptor or a record, without its position in the trace.
#[derive(Clone, Debug)]
struct Violation {
    /// The status that a device reports for such a descriptor; 0 if none.
    status: u8,
    /// With *Invalid flags*, the flags.
    flags: u32,
    field: &'static str,
    text: String,
    section: &'static str,
}

impl Violation {
    fn new(field: &'static str, section: &'static str, text: String) -> Violation {
        Violation { status: 0, flags: 0, field, text, section }
    }
}

struct Submitted {
    line: usize,
    at: u64,
    queue: usize,
    descriptor: [u8; 64],
    members: Vec<[u8; 64]>,
}

struct Answered {
    line: usize,
    number: u64,
    submitted: Submitted,
    record: Vec<u8>,
    /// With their lines.
    members: Vec<(usize, [u8; 32])>,
}

struct QueueState {
    name: String,
    queue: Queue,
    outstanding: u64,
    /// Codes that were refused as unsupported, and codes that were executed.
    unsupported: BTreeMap<u8, (usize, u64)>,
    executed: HashSet<u8>,
    /// A completed drain shows that all submissions before this one are complete.
    drained: u64,
}

/// Reads a trace line by line.
pub struct Judge {
    queues: Vec<QueueState>,
    names: HashMap<String, usize>,
    outstanding: BTreeMap<u64, Submitted>,
    /// Numbers of all submissions.
    numbers: HashSet<u64>,
    last: Option<u64>,
    /// The submission whose members may follow.
    submitting: Option<u64>,
    /// The completion whose members' records may follow.
    answering: Option<Answered>,
    findings: Vec<Finding>,
    found: u64,
    summary: Summary,
}

impl Default for Judge {
    fn default() -> Judge {
        Judge::new()
    }
}

impl std::fmt::Debug for Judge {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "Judge({} submissions, {} findings)", self.numbers.len(), self.found)
    }
}

impl Judge {
    /// Starts with an empty trace.
    pub fn new() -> Judge {
        Judge {
            queues: Vec::new(),
            names: HashMap::new(),
            outstanding: BTreeMap::new(),
            numbers: HashSet::new(),
            last: None,
            submitting: None,
            answering: None,
            findings: Vec::new(),
            found: 0,
            summary: Summary::default(),
        }
    }

    /// Records a queue, before its first submission.
    pub fn queue(&mut self, line: usize, name: &str, queue: Queue) {
        self.settle();
        let expected = name.starts_with("dsa") || name.starts_with("iax") || name.starts_with("iaa");
        if expected && name.starts_with("dsa") != (queue.kind == Kind::Dsa) {
            let text = format!("is {:?} of a queue that is called {name:?}", queue.kind);
            self.find(line, None, None, Violation::new("kind of the queue", "kernel, sysfs", text));
        }
        // 9.2.3, 9.2.24: entries and batches are counted in 16 bits; a transfer is 2 GiB at most.
        let fits = queue.size > 0 && queue.size <= 0xffff && queue.max_batch <= 1 << 15;
        if !fits || queue.max_transfer == 0 || queue.max_transfer > 1 << 31 {
            let text = format!("is {queue:?}, which no device has");
            self.find(line, None, None, Violation::new("configuration of the queue", "9.2.2 to 9.2.24", text));
        }
        match self.names.get(name) {
            Some(&known) if self.queues[known].queue == queue => {}
            Some(_) => {
                let text = format!("is another than before for {name:?}");
                self.find(line, None, None, Violation::new("configuration of the queue", "5.2", text));
            }
            None => _ = self.know(name, queue),
        }
    }

    fn know(&mut self, name: &str, queue: Queue) -> usize {
        self.names.insert(name.to_owned(), self.queues.len());
        self.queues.push(QueueState {
            name: name.to_owned(),
            queue,
            outstanding: 0,
            unsupported: BTreeMap::new(),
            executed: HashSet::new(),
            drained: 0,
        });
        self.queues.len() - 1
    }

    /// Records a descriptor that the queue accepted at `at`.
    pub fn submission(&mut self, line: usize, at: u64, number: u64, queue: &str, descriptor: &[u8; 64]) {
        self.settle();
        if self.last.is_some_and(|last| last >= number) {
            let text = format!("is {number} after {}", self.last.unwrap_or(0));
            self.find(line, Some(number), None, Violation::new("number", "format", text));
        }
        self.last = self.last.max(Some(number));
        if !self.numbers.insert(number) {
            return;
        }
        let known = match self.names.get(queue) {
            Some(&known) => known,
            None => {
                let text = format!("is {queue:?}, which no line has described");
                self.find(line, Some(number), None, Violation::new("queue", "format", text));
                // An undescribed queue permits everything, but needs a kind.
                let kind = if queue.starts_with("dsa") { Kind::Dsa } else { Kind::Iaa };
                let (size, max_transfer) = (u32::MAX, u64::MAX);
                let mode = Mode::Shared;
                let queue_of =
                    Queue { kind, version: 0, mode, size, max_batch: u64::MAX, max_transfer, block_on_fault: true };
                self.know(queue, queue_of)
            }
        };
        let of = &mut self.queues[known];
        of.outstanding += 1;
        let (outstanding, rules) = (of.outstanding, of.queue);
        if rules.mode == Mode::Dedicated && outstanding > u64::from(rules.size) {
            let text = format!("has {outstanding} descriptors, and entries for {}", rules.size);
            self.find(line, Some(number), None, Violation::new("dedicated queue", "5.3", text));
        }
        for wrong in descriptor::check(descriptor, &rules, false) {
            self.find(line, Some(number), None, wrong);
        }
        let submitted = Submitted { line, at, queue: known, descriptor: *descriptor, members: Vec::new() };
        self.outstanding.insert(number, submitted);
        self.submitting = Some(number);
    }

    /// Records the next member of the batch that was just submitted.
    pub fn member(&mut self, line: usize, number: u64, descriptor: &[u8; 64]) {
        if self.submitting != Some(number) {
            self.settle();
            let text = "does not follow the submission of its batch".to_owned();
            self.find(line, Some(number), None, Violation::new("member", "format", text));
            return;
        }
        let Some(submitted) = self.outstanding.get_mut(&number) else { return };
        let rules = self.queues[submitted.queue].queue;
        let index = submitted.members.len();
        submitted.members.push(*descriptor);
        if !is_batch(&submitted.descriptor, &rules) {
            if index == 0 {
                let text = "has members, and is no batch".to_owned();
                self.find(line, Some(number), None, Violation::new("Operation", "8.3.2", text));
            }
            return;
        }
        for wrong in descriptor::check(descriptor, &rules, true) {
            self.find(line, Some(number), Some(index), wrong);
        }
    }

    /// Records a completion record that was seen at `at`.
    pub fn completion(&mut self, line: usize, at: u64, number: u64, record: &[u8]) {
        self.settle();
        let Some(submitted) = self.outstanding.remove(&number) else {
            let why = if self.numbers.contains(&number) { "was answered before" } else { "was not submitted before" };
            self.find(line, Some(number), None, Violation::new("completion", "8.2", format!("is of what {why}")));
            return;
        };
        let known = &mut self.queues[submitted.queue];
        known.outstanding -= 1;
        let rules = known.queue;
        if at < submitted.at {
            let text = format!("is {at}, and that of the submission {}", submitted.at);
            self.find(line, Some(number), None, Violation::new("time", "8.2", text));
        }
        let bytes = record_bytes(rules.kind);
        if record.len() != bytes {
            let section = if rules.kind == Kind::Dsa { "8.2" } else { "IAA 6.2" };
            let text = format!("has {} bytes in place of {bytes}", record.len());
            self.find(line, Some(number), None, Violation::new("completion record", section, text));
            return;
        }
        for wrong in completion::check(&submitted.descriptor, record, &rules, false) {
            self.find(line, Some(number), None, wrong);
        }
        self.supports(&submitted, number, line, &submitted.descriptor, record[0]);
        let latency = at.saturating_sub(submitted.at);
        self.summary.answered(&rules, &submitted.descriptor, submitted.members.first(), record[0], latency);
        self.answering = Some(Answered { line, number, submitted, record: record.to_vec(), members: Vec::new() });
    }

    /// Records the next record of a member of the batch that was just completed.
    pub fn member_record(&mut self, line: usize, number: u64, record: &[u8]) {
        let fits = <[u8; 32]>::try_from(record).ok();
        match (&mut self.answering, fits) {
            (Some(answered), Some(record)) if answered.number == number => answered.members.push((line, record)),
            (Some(answered), None) if answered.number == number => {
                let text = format!("has {} bytes in place of 32", record.len());
                self.find(line, Some(number), None, Violation::new("completion record", "8.2", text));
            }
            _ => {
                self.settle();
                let text = "does not follow the completion of its batch".to_owned();
                self.find(line, Some(number), None, Violation::new("record of a member", "format", text));
            }
        }
    }

    /// Ends the trace, at any point: missing members of the last batch are not findings.
    pub fn finish(mut self) -> Verdict {
        let short = |number: &u64| {
            let submitted = self.outstanding.get(number);
            submitted.is_some_and(|of| (of.members.len() as u64) < dsa::SIZE.get(&of.descriptor))
        };
        self.submitting = self.submitting.filter(|number| !short(number));
        self.answering = self.answering.take().filter(|of| of.members.len() >= of.submitted.members.len());
        self.settle();
        let unanswered = std::mem::take(&mut self.outstanding);
        let mut list = Vec::new();
        for (number, submitted) in unanswered {
            let known = &self.queues[submitted.queue];
            let (queue, drained) = (known.name.clone(), known.drained);
            let row = descriptor::operation(&submitted.descriptor, known.queue.kind);
            let operation = row.map_or("unknown operation", |row| row.name);
            self.summary.unanswered(&known.queue, &submitted.descriptor, submitted.members.first());
            if drained > number {
                let text = format!("is missing, and drain {drained} behind it on {queue:?} is complete");
                self.find(submitted.line, Some(number), None, Violation::new("completion", "3.12", text));
            }
            list.push(Unanswered { line: submitted.line, submission: number, queue, operation });
        }
        for known in 0..self.queues.len() {
            for (code, (line, number)) in std::mem::take(&mut self.queues[known].unsupported) {
                if self.queues[known].executed.contains(&code) {
                    let text = format!("is 0x10 for operation {code:#04x}, which the same queue has executed");
                    self.find(line, Some(number), None, Violation::new("Status", "5.4", text));
                }
            }
        }
        self.findings.sort_by_key(|finding| finding.line);
        Verdict { findings: self.findings, found: self.found, unanswered: list, operations: self.summary.operations() }
    }

    /// Handles the end of the members of the last batch.
    fn settle(&mut self) {
        if let Some(number) = self.submitting.take()
            && let Some(submitted) = self.outstanding.get(&number)
        {
            let rules = self.queues[submitted.queue].queue;
            if is_batch(&submitted.descriptor, &rules) {
                let line = submitted.line;
                for wrong in batch::submitted(&submitted.descriptor, &submitted.members) {
                    self.find(line, Some(number), None, wrong);
                }
            }
        }
        let Some(answered) = self.answering.take() else { return };
        let Answered { line, number, submitted, record, members } = answered;
        let rules = self.queues[submitted.queue].queue;
        if !is_batch(&submitted.descriptor, &rules) {
            if let Some((line, _)) = members.first() {
                let text = "is of a submission that is no batch".to_owned();
                self.find(*line, Some(number), None, Violation::new("record of a member", "8.3.2", text));
            }
            return;
        }
        for (index, ((line, record), descriptor)) in members.iter().zip(&submitted.members).enumerate() {
            if record[0] == 0 {
                continue;
            }
            for wrong in completion::check(descriptor, record, &rules, true) {
                self.find(*line, Some(number), Some(index), wrong);
            }
            self.supports(&submitted, number, *line, descriptor, record[0]);
            self.summary.member(&rules, descriptor, record[0]);
        }
        let records: Vec<[u8; 32]> = members.iter().map(|(_, record)| *record).collect();
        for (index, wrong) in batch::answered(&submitted.descriptor, &submitted.members, &record, &records, &rules) {
            let line = index.and_then(|index| members.get(index)).map_or(line, |(line, _)| *line);
            self.find(line, Some(number), index, wrong);
        }
    }

    /// Checks that a queue either supports an operation or does not (OPCAP, 5.4), and that a drain's predecessors are
    /// complete.
    fn supports(&mut self, submitted: &Submitted, number: u64, line: usize, descriptor: &[u8; 64], seen: u8) {
        let known = &mut self.queues[submitted.queue];
        let operation = dsa::OPERATION.get(descriptor) as u8;
        let in_batch = !std::ptr::eq(descriptor, &submitted.descriptor);
        match seen & 0x3f {
            // Within a batch these operations are never supported.
            status::BAD_OPERATION if in_batch && matches!(operation, code::BATCH | code::DRAIN) => {}
            status::BAD_OPERATION => _ = known.unsupported.entry(operation).or_insert((line, number)),
            status::SUCCESS..=0x0f => _ = known.executed.insert(operation),
            _ => {}
        }
        if operation == code::DRAIN && seen & 0x3f == status::SUCCESS {
            known.drained = known.drained.max(number);
        }
    }

    fn find(&mut self, line: usize, submission: Option<u64>, member: Option<usize>, wrong: Violation) {
        self.found += 1;
        if self.findings.len() < MAX_FINDINGS {
            let Violation { field, text, section, .. } = wrong;
            self.findings.push(Finding { line, submission, member, field, violation: text, section });
        }
    }
}

fn record_bytes(kind: Kind) -> usize {
    if kind == Kind::Dsa { dsa::record::BYTES } else { crate::table::iaa::record::BYTES }
}

fn is_batch(descriptor: &[u8; 64], queue: &Queue) -> bool {
    queue.kind == Kind::Dsa && dsa::OPERATION.get(descriptor) as u8 == code::BATCH
}

//! The reader of traces. They come from other people's machines, and from processes that were killed: every value is
//! checked, memory is bounded, and a file may end anywhere.

use std::io::{self, BufRead};

use thiserror::Error;

use super::HEADER;
use crate::time::Nanos;

/// One submission of a trace, and its completion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// Its number.
    pub number: u64,
    /// The queue: `dsa0/wq0.0`.
    pub queue: String,
    /// When it was submitted, on the clock of the submitting process.
    pub submitted: Nanos,
    /// The submitted descriptor.
    pub descriptor: Box<[u8; 64]>,
    /// If it is a batch, its members.
    pub members: Vec<[u8; 64]>,
    /// The completion, if there is one.
    pub answer: Option<Answer>,
}

/// The completion of a submission.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// When it was seen, some time after it was written.
    pub seen: Nanos,
    /// The record: 32 bytes of a DSA, 64 of an IAA.
    pub record: Vec<u8>,
    /// The records of the members at that time.
    pub members: Vec<[u8; 32]>,
}

/// A trace that cannot be read.
#[derive(Debug, Error)]
#[error("line {line} of the accelerator trace: {reason}")]
pub struct TraceError {
    /// Line, from 1.
    pub line: usize,
    /// What is wrong with it.
    pub reason: String,
}

/// The longest line: a descriptor in hexadecimal, and a queue's name.
const MAX_LINE: usize = 1024;
/// The most bytes of a trace. Its parsed form is less than twice as large: a submission has at least 130 bytes of text.
const MAX_TRACE: u64 = 256 << 20;
/// The most queues of one trace; the 255 times 255 queues that names allow are not plausible.
const MAX_QUEUES: usize = 4096;

/// One line.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "model"), allow(dead_code, reason = "queues are for the judge, which comes with the model"))]
enum Entry<'a> {
    Queue { name: &'a str, queue: Queue },
    Submission { at: Nanos, number: u64, queue: &'a str, descriptor: [u8; 64] },
    Member { number: u64, descriptor: [u8; 64] },
    Completion { at: Nanos, number: u64, record: Record },
    MemberRecord { number: u64, record: [u8; 32] },
}

#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "model"), allow(dead_code, reason = "queues are for the judge, which comes with the model"))]
struct Queue {
    iaa: bool,
    dedicated: bool,
    version: u32,
    size: u32,
    max_batch: u64,
    max_transfer: u64,
    block_on_fault: bool,
}

/// 32 or 64 bytes.
#[derive(Clone, Copy, Debug)]
enum Record {
    Dsa([u8; 32]),
    Iaa([u8; 64]),
}

impl Record {
    fn bytes(&self) -> &[u8] {
        match self {
            Record::Dsa(bytes) => bytes,
            Record::Iaa(bytes) => bytes,
        }
    }
}

/// Reads a trace up to its end, or to where it breaks off. Empty lines and those that begin with `#` are comments.
/// Returns whether the last line was cut.
fn lines(
    input: impl BufRead,
    mut each: impl FnMut(usize, Entry<'_>) -> Result<(), String>,
) -> Result<bool, TraceError> {
    let mut input = input.take(MAX_TRACE + 1);
    let mut begun = false;
    let (mut read, mut queues) = (0, 0);
    let mut buffer = Vec::new();
    for line in 1.. {
        let error = |reason: String| TraceError { line, reason };
        buffer.clear();
        let got = io::Read::take(&mut input, MAX_LINE as u64).read_until(b'\n', &mut buffer);
        let got = got.map_err(|failure| error(failure.to_string()))?;
        read += got as u64;
        if read > MAX_TRACE {
            return Err(error(format!("the trace has more than {} MiB; capture fewer rounds", MAX_TRACE >> 20)));
        }
        let ended = got == 0;
        if !ended && buffer.last() != Some(&b'\n') {
            if got == MAX_LINE {
                return Err(error("it is too long".into()));
            }
            // The writer was killed within this line, so its values are incomplete.
            return if begun { Ok(true) } else { Err(empty(line)) };
        }
        if ended {
            return if begun { Ok(false) } else { Err(empty(line)) };
        }
        let text = std::str::from_utf8(&buffer).map_err(|_| error("it is no text".into()))?.trim_end();
        if text.is_empty() || text.starts_with('#') {
            continue;
        }
        match (begun, text == HEADER) {
            (false, true) => begun = true,
            (false, false) => return Err(error(format!("a trace begins with the line {HEADER:?}"))),
            (true, true) => {
                return Err(error("another trace begins here; a file has one, so take them apart".into()));
            }
            (true, false) => {
                let entry = parse(text).map_err(error)?;
                queues += usize::from(matches!(entry, Entry::Queue { .. }));
                if queues > MAX_QUEUES {
                    return Err(error(format!("more than {MAX_QUEUES} queues")));
                }
                each(line, entry).map_err(error)?;
            }
        }
    }
    unreachable!("lines do not end but by a return")
}

fn empty(line: usize) -> TraceError {
    TraceError { line, reason: "the trace is empty".into() }
}

fn parse(text: &str) -> Result<Entry<'_>, String> {
    let mut words = [""; 10];
    let mut count = 0;
    for word in text.split(' ') {
        *words.get_mut(count).ok_or_else(|| format!("{text:?} has too many words"))? = word;
        count += 1;
    }
    Ok(match words[..count] {
        ["q" | "s", ..]
            if !words[..count].iter().all(|word| !word.is_empty() && word.bytes().all(|of| of.is_ascii_graphic())) =>
        {
            return Err(format!("{text:?} has words of other characters than ASCII's"));
        }
        ["q", name, kind, version, mode, size, max_batch, max_transfer, block_on_fault] => {
            let queue = Queue {
                iaa: one_of(kind, "dsa", "iaa")?,
                version: number(version)?,
                dedicated: one_of(mode, "shared", "dedicated")?,
                size: number(size)?,
                max_batch: number(max_batch)?,
                max_transfer: number(max_transfer)?,
                block_on_fault: one_of(block_on_fault, "0", "1")?,
            };
            Entry::Queue { name, queue }
        }
        ["s", at, of, queue, descriptor] => {
            Entry::Submission { at: number(at)?, number: number(of)?, queue, descriptor: bytes(descriptor)? }
        }
        ["d", of, descriptor] => Entry::Member { number: number(of)?, descriptor: bytes(descriptor)? },
        ["c", at, of, record] => {
            let record = match record.len() {
                64 => Record::Dsa(bytes(record)?),
                _ => Record::Iaa(bytes(record)?),
            };
            Entry::Completion { at: number(at)?, number: number(of)?, record }
        }
        ["r", of, record] => Entry::MemberRecord { number: number(of)?, record: bytes(record)? },
        _ => return Err(format!("{text:?} is none of q, s, d, c and r with their words")),
    })
}

fn one_of(word: &str, no: &str, yes: &str) -> Result<bool, String> {
    match word {
        _ if word == no => Ok(false),
        _ if word == yes => Ok(true),
        _ => Err(format!("{word:?} is neither {no} nor {yes}")),
    }
}

fn number<T: std::str::FromStr>(word: &str) -> Result<T, String> {
    // `parse` would accept a sign.
    let digits = word.bytes().all(|digit| digit.is_ascii_digit());
    word.parse().ok().filter(|_| digits).ok_or_else(|| format!("{word:?} is no number"))
}

fn bytes<const N: usize>(hex: &str) -> Result<[u8; N], String> {
    let digit = |digit: u8| (digit as char).to_digit(16).ok_or_else(|| format!("{hex:?} is not hexadecimal"));
    if hex.len() != 2 * N {
        hex.bytes().try_for_each(|byte| digit(byte).map(drop))?;
        return Err(format!("{} digits in place of {}", hex.len(), 2 * N));
    }
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(hex.as_bytes().chunks_exact(2)) {
        *byte = (digit(pair[0])? << 4 | digit(pair[1])?) as u8;
    }
    Ok(bytes)
}

/// Reads a whole trace, or the intact part of one that breaks off: submissions without a completion have none.
///
/// # Errors
/// The first line that does not follow the format, or refers to no earlier line.
pub fn read(input: impl BufRead) -> Result<Vec<Exchange>, TraceError> {
    let mut exchanges = Vec::new();
    lines(input, |_, entry| take(entry, &mut exchanges))?;
    Ok(exchanges)
}

fn take(entry: Entry<'_>, exchanges: &mut Vec<Exchange>) -> Result<(), String> {
    match entry {
        Entry::Queue { .. } => {}
        Entry::Submission { at, number, queue, descriptor } => {
            if exchanges.last().is_some_and(|last| last.number >= number) {
                return Err(format!("submission {number} comes after a later one"));
            }
            exchanges.push(Exchange {
                number,
                queue: queue.to_owned(),
                submitted: at,
                descriptor: Box::new(descriptor),
                members: Vec::new(),
                answer: None,
            });
        }
        Entry::Member { number, descriptor } => {
            let exchange = find(exchanges, number)?;
            if exchange.answer.is_some() {
                return Err("a member of a batch that was answered before".into());
            }
            exchange.members.push(descriptor);
        }
        Entry::Completion { at, number, record } => {
            let exchange = find(exchanges, number)?;
            if exchange.answer.is_some() {
                return Err(format!("submission {number} was answered before"));
            }
            exchange.answer = Some(Answer { seen: at, record: record.bytes().to_vec(), members: Vec::new() });
        }
        Entry::MemberRecord { number, record } => {
            let exchange = find(exchanges, number)?;
            let members = exchange.members.len();
            match &mut exchange.answer {
                Some(answer) if answer.members.len() < members => answer.members.push(record),
                _ => return Err("a record of a member that was not submitted or not answered".into()),
            }
        }
    }
    Ok(())
}

fn find(exchanges: &mut [Exchange], number: u64) -> Result<&mut Exchange, String> {
    let at = exchanges.binary_search_by_key(&number, |exchange| exchange.number);
    at.map(|at| &mut exchanges[at]).map_err(|_| format!("there is no submission {number} before it"))
}

/// The result of checking a trace.
#[cfg(feature = "model")]
#[derive(Debug)]
pub struct Replay {
    /// What was submitted, and what of it violates the specification.
    pub verdict: sterna_idxd_model::judge::Verdict,
    /// Whether the trace breaks off within a line, which was ignored: its writer was killed.
    pub truncated: bool,
}

/// Checks a trace: every descriptor and every record, and how they belong together.
///
/// # Errors
/// The first line that does not follow the format. A well-formed line with wrong content is a finding.
#[cfg(feature = "model")]
pub fn replay(input: impl BufRead) -> Result<Replay, TraceError> {
    use sterna_idxd_model::{Kind, Mode, judge};

    let mut judge = judge::Judge::new();
    let truncated = lines(input, |line, entry| {
        match entry {
            Entry::Queue { name, queue } => {
                let of = judge::Queue {
                    kind: if queue.iaa { Kind::Iaa } else { Kind::Dsa },
                    version: queue.version,
                    mode: if queue.dedicated { Mode::Dedicated } else { Mode::Shared },
                    size: queue.size,
                    max_batch: queue.max_batch,
                    max_transfer: queue.max_transfer,
                    block_on_fault: queue.block_on_fault,
                };
                judge.queue(line, name, of);
            }
            Entry::Submission { at, number, queue, descriptor } => {
                judge.submission(line, at, number, queue, &descriptor);
            }
            Entry::Member { number, descriptor } => judge.member(line, number, &descriptor),
            Entry::Completion { at, number, record } => judge.completion(line, at, number, record.bytes()),
            Entry::MemberRecord { number, record } => judge.member_record(line, number, &record),
        }
        Ok(())
    })?;
    Ok(Replay { verdict: judge.finish(), truncated })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn broken_lines_are_refused_with_their_number() {
        let descriptor = "00".repeat(64);
        let record = "01".repeat(32);
        for (lines, what) in [
            (String::new(), "is empty"),
            ("hello\n".into(), "begins with"),
            ("sterna-accel".into(), "is empty"),
            (format!("{HEADER}\ns 1 1 q 00\n"), "2 digits in place of 128"),
            (format!("{HEADER}\ns 1 1 q zz\n"), "not hexadecimal"),
            (format!("{HEADER}\ns 1 +1 q {descriptor}\n"), "is no number"),
            (format!("{HEADER}\nc 1 1 {record}\n"), "no submission 1"),
            (format!("{HEADER}\nc 1 1 {record}{record}01\n"), "130 digits in place of 128"),
            (format!("{HEADER}\ns 1 1 q {descriptor}\nr 1 {record}\n"), "not answered"),
            (format!("{HEADER}\ns 1 1 q {descriptor}\nc 1 1 {record}\nc 2 1 {record}\n"), "answered before"),
            (format!("{HEADER}\ns 1 2 q {descriptor}\ns 1 2 q {descriptor}\n"), "after a later one"),
            (format!("{HEADER}\n{}", "x".repeat(3000)), "too long"),
            (format!("{HEADER}\nq dsa0/wq0.0 dsa 256 shared 16 32 2097152 2\n"), "neither 0 nor 1"),
            (format!("{HEADER}\nq dsa0/wq0.0 dsa 256 shared 16 32 2097152\n"), "none of q, s"),
            (format!("{HEADER}\n{}\n", "x ".repeat(30)), "too many words"),
            (format!("{HEADER}\n\n{HEADER}\n"), "line 3 of the accelerator trace: another trace begins here"),
        ] {
            let error = read(lines.as_bytes()).unwrap_err();
            assert!(error.to_string().contains(what), "{error} lacks {what}");
        }
    }

    #[test]
    fn a_trace_that_breaks_off_has_what_was_written_whole() {
        let descriptor = "00".repeat(64);
        let whole = format!("{HEADER}\ns 1 1 q {descriptor}\ns 2 2 q {descriptor}\nc 3 1 {}\n", "01".repeat(64));
        for end in HEADER.len() + 1..=whole.len() {
            let exchanges = read(&whole.as_bytes()[..end]).unwrap();
            let lines = whole[..end].matches('\n').count() - 1;
            let (submitted, answered) = (lines.min(2), usize::from(lines == 3));
            assert_eq!(exchanges.len(), submitted, "at {end}");
            assert_eq!(exchanges.iter().filter(|exchange| exchange.answer.is_some()).count(), answered, "at {end}");
        }
    }

    #[test]
    fn more_than_a_reader_can_keep_is_refused_before_it_is_kept() {
        /// A comment without end, in lines of a thousand bytes.
        struct Comments(usize);
        impl io::Read for Comments {
            fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
                for byte in &mut *into {
                    *byte = if self.0 % 1000 == 999 { b'\n' } else { b'#' };
                    self.0 += 1;
                }
                Ok(into.len())
            }
        }
        let header = format!("{HEADER}\n");
        let error = read(io::BufReader::new(io::Read::chain(header.as_bytes(), Comments(0)))).unwrap_err();
        assert!(error.reason.contains("more than 256 MiB"), "{error}");
    }

    proptest! {
        #[test]
        fn no_input_makes_the_reader_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300), header in any::<bool>()) {
            let mut input = if header { format!("{HEADER}\n").into_bytes() } else { Vec::new() };
            input.extend(bytes);
            let _ = read(&input[..]);
        }
    }
}

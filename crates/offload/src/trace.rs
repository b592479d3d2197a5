//! Everything that goes to devices and comes back, written down while it happens, and read again.
//!
//! Lines of words, described in `docs/accelerator-trace.md`. `sterna accel capture` writes them on hardware; the reader checks
//! that they hang together and gives them to tests, so that a stranger's trace becomes one.

use std::fmt::{Debug, Formatter};
use std::io::{self, BufRead, Write};
use std::sync::Mutex;

use sterna_idxd::{Descriptor, Operation};
use thiserror::Error;

use crate::sync::lock_std;
use crate::time::Nanos;

/// The first line of a trace.
pub const HEADER: &str = "sterna-accelerator-trace 1";

/// A trace being written.
pub struct Trace {
    output: Mutex<Output>,
}

struct Output {
    to: Box<dyn Write + Send>,
    next: u64,
    /// The first error: what comes after it is not written.
    failed: Option<io::Error>,
}

impl Debug for Trace {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "Trace({} submissions)", lock_std(&self.output).next)
    }
}

impl Trace {
    /// A trace that is written to `to`, which should be buffered.
    pub fn new(to: Box<dyn Write + Send>) -> Self {
        let mut output = Output { to, next: 1, failed: None };
        output.line(format_args!("{HEADER}"));
        Self { output: Mutex::new(output) }
    }

    /// Whether something could not be written: then nothing is written any more, and to go on is in vain. [`Self::finish`] says what.
    pub fn failed(&self) -> bool {
        lock_std(&self.output).failed.is_some()
    }

    /// Writes what is buffered.
    ///
    /// # Errors
    /// Something could not be written, now or before.
    pub fn finish(&self) -> io::Result<()> {
        let mut output = lock_std(&self.output);
        match output.failed.take() {
            Some(error) => Err(error),
            None => output.to.flush(),
        }
    }

    /// A descriptor, and those of its members if it is a batch. Gives the number its completion will have.
    pub(crate) fn submitted(
        &self,
        at: Nanos,
        queue: &str,
        descriptor: &Descriptor,
        members: impl Iterator<Item = [u8; 64]>,
    ) -> u64 {
        let mut output = lock_std(&self.output);
        let number = output.next;
        output.next += 1;
        output.line(format_args!("s {at} {number} {queue} {}", Hex(descriptor.as_bytes())));
        members.for_each(|member| output.line(format_args!("d {number} {}", Hex(&member))));
        number
    }

    /// A record, and those of the members if it is of a batch.
    pub(crate) fn completed(&self, at: Nanos, number: u64, record: &[u8], members: impl Iterator<Item = [u8; 32]>) {
        let mut output = lock_std(&self.output);
        output.line(format_args!("c {at} {number} {}", Hex(record)));
        members.for_each(|member| output.line(format_args!("r {number} {}", Hex(&member))));
    }
}

impl Output {
    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        if self.failed.is_none()
            && let Err(error) = writeln!(self.to, "{line}")
        {
            self.failed = Some(error);
        }
    }
}

struct Hex<'a>(&'a [u8]);

impl std::fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// One submission of a trace, and what became of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// Its number.
    pub number: u64,
    /// The queue: `dsa0/wq0.0`.
    pub queue: String,
    /// When it was submitted, on the clock of the process that did.
    pub submitted: Nanos,
    /// What was submitted.
    pub descriptor: Box<[u8; 64]>,
    /// If it is a batch, its members.
    pub members: Vec<[u8; 64]>,
    /// What came back, if anything did.
    pub answer: Option<Answer>,
}

/// What came back for a submission.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// When it was seen, which is some time after it was written.
    pub seen: Nanos,
    /// The record: 32 bytes of a DSA, 64 of an IAA.
    pub record: Vec<u8>,
    /// The records of the members, as they were then.
    pub members: Vec<[u8; 32]>,
}

/// A trace that cannot be read.
#[derive(Debug, Error)]
#[error("line {line} of the accelerator trace: {wrong}")]
pub struct TraceError {
    /// Line, from 1.
    pub line: usize,
    /// What is wrong with it.
    pub wrong: String,
}

/// Most bytes of a line: a descriptor in hexadecimal, and a queue's name.
const LONGEST_LINE: usize = 1024;
/// Most submissions of one trace that are read.
const MOST: usize = 10_000_000;

/// Reads a whole trace. Empty lines and those that begin with `#` are comments.
///
/// # Errors
/// The first line that is not of the format, or does not follow from those before it.
pub fn read(mut input: impl BufRead) -> Result<Vec<Exchange>, TraceError> {
    let mut exchanges: Vec<Exchange> = Vec::new();
    let mut begun = false;
    let mut buffer = Vec::new();
    for line in 1.. {
        let wrong = |wrong: String| TraceError { line, wrong };
        buffer.clear();
        let got = io::Read::take(&mut input, LONGEST_LINE as u64).read_until(b'\n', &mut buffer);
        match got {
            Err(error) => return Err(wrong(error.to_string())),
            Ok(0) => break,
            Ok(LONGEST_LINE) if buffer.last() != Some(&b'\n') => return Err(wrong("it is too long".into())),
            Ok(_) => {}
        }
        let text = std::str::from_utf8(&buffer).map_err(|_| wrong("it is no text".into()))?.trim_end();
        if text.is_empty() || text.starts_with('#') {
            continue;
        }
        if !begun {
            if text != HEADER {
                return Err(wrong(format!("a trace begins with the line {HEADER:?}")));
            }
            begun = true;
            continue;
        }
        take_line(text, &mut exchanges).map_err(wrong)?;
    }
    if begun { Ok(exchanges) } else { Err(TraceError { line: 1, wrong: "the trace is empty".into() }) }
}

fn take_line(text: &str, exchanges: &mut Vec<Exchange>) -> Result<(), String> {
    let words: Vec<&str> = text.split(' ').collect();
    match words[..] {
        ["s", at, number, queue, descriptor] => {
            let number: u64 = parse(number)?;
            if exchanges.last().is_some_and(|last| last.number >= number) {
                return Err(format!("submission {number} comes after a later one"));
            }
            if exchanges.len() == MOST {
                return Err(format!("more than {MOST} submissions"));
            }
            exchanges.push(Exchange {
                number,
                queue: queue.to_owned(),
                submitted: parse(at)?,
                descriptor: Box::new(fixed(descriptor)?),
                members: Vec::new(),
                answer: None,
            });
        }
        ["d", number, descriptor] => {
            let exchange = find(exchanges, number)?;
            if exchange.answer.is_some() {
                return Err("a member of a batch that was answered before".into());
            }
            if exchange.members.len() as u64 == members(&exchange.descriptor) {
                return Err(format!("submission {number} has fewer members"));
            }
            exchange.members.push(fixed(descriptor)?);
        }
        ["c", at, number, record] => {
            let exchange = find(exchanges, number)?;
            if exchange.answer.is_some() {
                return Err(format!("submission {number} was answered before"));
            }
            let record = bytes(record)?;
            if !matches!(record.len(), 32 | 64) {
                return Err(format!("a record of {} bytes", record.len()));
            }
            exchange.answer = Some(Answer { seen: parse(at)?, record, members: Vec::new() });
        }
        ["r", number, record] => {
            let exchange = find(exchanges, number)?;
            let members = exchange.members.len();
            match &mut exchange.answer {
                Some(answer) if answer.members.len() < members => answer.members.push(fixed(record)?),
                _ => return Err("a record of a member that was not submitted or not answered".into()),
            }
        }
        _ => return Err(format!("{text:?} is none of s, d, c and r with their words")),
    }
    Ok(())
}

/// How many members a descriptor says that it has.
fn members(descriptor: &[u8; 64]) -> u64 {
    let descriptor = Descriptor::from_bytes(*descriptor);
    if descriptor.operation_code() == Operation::Batch as u8 { descriptor.bytes().into() } else { 0 }
}

fn find<'a>(exchanges: &'a mut [Exchange], number: &str) -> Result<&'a mut Exchange, String> {
    let number: u64 = parse(number)?;
    let at = exchanges.binary_search_by_key(&number, |exchange| exchange.number);
    at.map(|at| &mut exchanges[at]).map_err(|_| format!("there is no submission {number} before it"))
}

fn parse(word: &str) -> Result<u64, String> {
    word.parse().map_err(|_| format!("{word:?} is no number"))
}

fn bytes(hex: &str) -> Result<Vec<u8>, String> {
    let digits = hex.as_bytes().chunks_exact(2);
    if !digits.remainder().is_empty() || !hex.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return Err(format!("{hex:?} is not hexadecimal"));
    }
    Ok((0..hex.len() / 2).map(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).expect("checked above")).collect())
}

fn fixed<const N: usize>(hex: &str) -> Result<[u8; N], String> {
    bytes(hex)?.try_into().map_err(|bytes: Vec<u8>| format!("{} bytes in place of {N}", bytes.len()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn broken_lines_are_refused_with_their_number() {
        let descriptor = "00".repeat(64);
        let record = "01".repeat(32);
        // Operation 01 with a count of two.
        let batch = format!("{}01{}02{}", "00".repeat(7), "00".repeat(24), "00".repeat(31));
        for (lines, what) in [
            ("".to_owned(), "is empty"),
            ("hello".into(), "begins with"),
            (format!("{HEADER}\ns 1 1 q 00"), "1 bytes in place of 64"),
            (format!("{HEADER}\ns 1 1 q zz"), "not hexadecimal"),
            (format!("{HEADER}\nc 1 1 {record}"), "no submission 1"),
            (format!("{HEADER}\ns 1 1 q {descriptor}\nr 1 {record}"), "not answered"),
            (format!("{HEADER}\ns 1 1 q {descriptor}\nc 1 1 {record}\nc 2 1 {record}"), "answered before"),
            (format!("{HEADER}\ns 1 1 q {descriptor}\nd 1 {descriptor}"), "fewer members"),
            (format!("{HEADER}\ns 1 1 q {batch}{}", format!("\nd 1 {descriptor}").repeat(3)), "fewer members"),
            (format!("{HEADER}\ns 1 2 q {descriptor}\ns 1 2 q {descriptor}"), "after a later one"),
            (format!("{HEADER}\n{}", "x".repeat(3000)), "too long"),
        ] {
            let error = read(lines.as_bytes()).unwrap_err();
            assert!(error.to_string().contains(what), "{error} lacks {what}");
        }
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

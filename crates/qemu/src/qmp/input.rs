//! Reads the messages of a monitor: JSON objects one after the other. QEMU writes one a line, or, with `pretty=on`, over several lines, so
//! that a message ends with its object and not with a line.

use std::cell::Cell;
use std::io::{self, BufReader, Read};
use std::rc::Rc;

use serde_json::Value;
use serde_json::de::IoRead;

/// Longest message accepted. The largest answers QEMU gives (`query-qmp-schema`) are below 1 MiB, and a few MiB with `pretty=on`.
pub(super) const MAX_MESSAGE: usize = 16 << 20;

/// A message, and its length with the white space before it.
pub(crate) struct Message {
    pub(crate) object: Value,
    pub(super) bytes: usize,
}

/// The messages of a monitor.
pub(crate) struct Messages<R: Read> {
    values: serde_json::StreamDeserializer<'static, IoRead<Bounded<BufReader<R>>>, Value>,
    left: Rc<Cell<usize>>,
}

impl<R: Read> Messages<R> {
    pub(crate) fn new(input: R) -> Self {
        let left = Rc::new(Cell::new(MAX_MESSAGE));
        let input = Bounded { input: BufReader::new(input), left: Rc::clone(&left) };
        Self { values: serde_json::Deserializer::from_reader(input).into_iter(), left }
    }

    /// Reads the next message.
    ///
    /// # Errors
    /// Why there is none, now or later.
    pub(crate) fn next(&mut self) -> Result<Message, String> {
        self.left.set(MAX_MESSAGE);
        match self.values.next() {
            None if self.left.get() == 0 => Err(too_long()),
            None => Err("QEMU closed it (the process ended, or its monitor was removed)".into()),
            Some(Ok(object @ Value::Object(_))) => Ok(Message { object, bytes: MAX_MESSAGE - self.left.get() }),
            Some(Ok(_)) => Err("something other than an object came: this is not a QMP socket".into()),
            Some(Err(_)) if self.left.get() == 0 => Err(too_long()),
            Some(Err(error)) if error.is_eof() => Err("QEMU closed it in the middle of a message".into()),
            Some(Err(error)) if error.is_io() => Err(format!("cannot read from QEMU: {error}")),
            Some(Err(error)) => Err(format!("what came is not JSON ({error}): this is not a QMP socket")),
        }
    }
}

fn too_long() -> String {
    format!("a message of more than {MAX_MESSAGE} bytes came")
}

/// Ends its input once `left` bytes were read.
struct Bounded<R> {
    input: R,
    left: Rc<Cell<usize>>,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = buffer.len().min(self.left.get());
        let read = self.input.read(&mut buffer[..most])?;
        self.left.set(self.left.get() - read);
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(text: &[u8]) -> (Vec<Value>, String) {
        let mut messages = Messages::new(text);
        let mut read = Vec::new();
        loop {
            match messages.next() {
                Ok(message) => read.push(message.object),
                Err(reason) => return (read, reason),
            }
        }
    }

    #[test]
    fn messages_over_several_lines_and_several_on_a_line_are_read() {
        let text = b"{\r\n    \"return\": {\r\n    }\r\n}\r\n{\"event\": \"STOP\"} {\"id\": 1}\n\n";
        let (read, end) = all(text);
        let expected = ["{\"return\": {}}", "{\"event\": \"STOP\"}", "{\"id\": 1}"];
        assert_eq!(read, expected.map(|text| serde_json::from_str::<Value>(text).unwrap()));
        assert!(end.contains("QEMU closed it (the process ended"), "{end}");
    }

    #[test]
    fn a_message_may_be_as_long_as_the_limit_and_each_has_the_limit_for_itself() {
        let message = |bytes: usize| format!("{{\"a\": \"{}\"}}", "x".repeat(bytes - 9));
        let longest = message(MAX_MESSAGE);
        assert_eq!(longest.len(), MAX_MESSAGE);
        let (read, end) = all(longest.repeat(2).as_bytes());
        assert_eq!(read.len(), 2, "{end}");
        for long in [message(MAX_MESSAGE + 1), " ".repeat(MAX_MESSAGE + 1), "[".repeat(MAX_MESSAGE + 1)] {
            let (read, end) = all(long.as_bytes());
            assert!(read.is_empty() && (end.contains("more than") || end.contains("not JSON")), "{end}");
        }
    }
}

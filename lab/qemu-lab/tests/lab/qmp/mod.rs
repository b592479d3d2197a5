//! QMP, for tests of the laboratory.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

/// Time limit of each step of a test, which no correct test reaches: not where ten times as many programs run as the machine has CPUs.
pub(crate) const LONG: Duration = Duration::from_secs(300);

/// The part of QMP that these tests need; the laboratory itself needs none of it.
pub(crate) struct Qmp {
    reader: BufReader<UnixStream>,
}

impl Qmp {
    pub(crate) fn connect(path: &Path) -> Qmp {
        let stream = UnixStream::connect(path).expect("the QMP socket is free");
        stream.set_read_timeout(Some(LONG)).expect("a timeout");
        let mut qmp = Qmp { reader: BufReader::new(stream) };
        qmp.receive();
        qmp.run("qmp_capabilities", &json!({}));
        qmp
    }

    fn receive(&mut self) -> Value {
        let mut line = String::new();
        self.reader.read_line(&mut line).expect("QEMU answers");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"))
    }

    pub(crate) fn run(&mut self, command: &str, arguments: &Value) -> Value {
        let order = json!({ "execute": command, "arguments": arguments });
        writeln!(self.reader.get_mut(), "{order}").expect("QEMU listens");
        loop {
            let mut answer = self.receive();
            assert!(answer.get("error").is_none(), "{command}: {answer}");
            if let Some(value) = answer.get_mut("return") {
                return value.take();
            }
        }
    }

    /// Waits for the migration's status, by events.
    #[allow(dead_code, reason = "each test file uses its own part of this")]
    pub(crate) fn wait_migration(&mut self, status: &str) {
        loop {
            let message = self.receive();
            if message["event"] == "MIGRATION" {
                assert_ne!(message["data"]["status"], "failed", "{message}");
                if message["data"]["status"] == status {
                    return;
                }
            }
        }
    }
}
